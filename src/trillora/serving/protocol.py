"""Requests of the OpenAI protocol, checked, and errors in its form.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}

Options of OpenAI's own service that do not apply here (`user`, `store`, …) are ignored, as are unknown ones. Options
that would change the answer and are not supported (`tools`, `response_format`, penalties) are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trillora.engine.rows import MOST_TOP
from trillora.errors import TrilloraError

MOST_MESSAGES = 2048
MOST_CHOICES = 128  # of one request: n, times the number of prompts
MOST_STOPS, LONGEST_STOP = 16, 256  # strings, and characters of each
MOST_LOGPROBS = 2**19  # of one request
MOST_NODES = 2**18  # lists, objects and keys of a body: Python needs up to a microsecond for each, and stops for it


class HttpError(Exception):
    """An error with its HTTP status, in the form that OpenAI's clients understand."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def in_words(error: TrilloraError) -> str:
    """The error as one line, with what to do."""
    return f"{error.what} To fix it: {error.do}." if error.do else error.what


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Other fields, such as `name` and `tool_calls`, are given to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None

    def plain(self) -> dict[str, object]:
        """With the content as one text, as templates expect it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**{k: v for k, v in (self.model_extra or {}).items() if v is not None}, "role": self.role} | (
            {"content": content} if content is not None else {}
        )


class StreamOptions(BaseModel):
    include_usage: bool = False


class Options(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="ignore")
    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None  # generate until the limit; not of OpenAI, for measurements
    # Not supported: refused if they would change the answer.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, object] | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if any(not text or len(text) > LONGEST_STOP for text in texts):
            raise ValueError(f"a stop string must have 1 to {LONGEST_STOP} characters")
        return stop

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Options:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported")
        return self

    def options(self) -> Options:
        """Without the messages or prompts."""
        return Options.model_construct(**{name: getattr(self, name) for name in Options.model_fields})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Options):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None  # arguments of the chat template; vLLM's name for them

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.tools or self.functions:
            raise ValueError("tools are not supported")
        if self.response_format and self.response_format.get("type") != "text":
            raise ValueError("response_format is not supported")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class CompletionRequest(Options):
    prompt: str | list[Any]  # a text, token ids, or a list of texts or of lists of token ids
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported")
        return self

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str | list[Any]) -> str | list[Any]:
        if isinstance(prompt, str) or _are_token_ids(prompt):
            return prompt
        if len(prompt) > MOST_CHOICES:
            raise ValueError(f"a request may have at most {MOST_CHOICES} prompts")
        if not prompt or not (all(isinstance(one, str) for one in prompt) or all(map(_are_token_ids, prompt))):
            raise ValueError("it must be a text, a list of token ids, or a list of one of them, not empty")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        return [self.prompt] if isinstance(self.prompt, str) or _are_token_ids(self.prompt) else self.prompt


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def parse(kind: type[Any], body: bytes) -> Any:
    """A request of this kind from untrusted bytes."""
    if sum(map(body.count, (b"[", b"{", b":"))) > MOST_NODES:
        raise HttpError(400, f"The request has more than {MOST_NODES:,} lists, objects and keys.")
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][:4])
        message = first["msg"].removeprefix("Value error, ")
        param = str(first["loc"][0]) if first["loc"] else None
        raise HttpError(400, f"{place}: {message}" if place else message, param=param) from None
    except RecursionError:
        raise HttpError(400, "The request is nested too deeply.") from None
