"""The life of one request: its prompts become jobs, and their answers go to the client, whole or as they come.

The event loop only passes data on: prompts are rendered and tokenized in a thread, and the engine has its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError
from trillora.serving.answers import ChatForm, CompletionForm, Usage, joined
from trillora.serving.engine import QueueFull, Stopping
from trillora.serving.job import Job, Piece
from trillora.serving.protocol import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    HttpError,
    Options,
    in_words,
    parse,
)
from trillora.serving.served import Served, Service
from trillora.serving.stream import EventSender, Inbox, Receive, Send, watch

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
RETRY_SECONDS = 5

Encoded = list[tuple[int, ...]]
Form = ChatForm | CompletionForm


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, in addition to its options."""

    served: Served
    prompts: Encoded
    limit: int | None  # tokens of an answer
    num_top: int
    scores_prompt: bool = False


class Completions:
    """Answers the requests of both kinds. The methods return the JSON of a whole answer, or None after a stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        texts = {name: model.prompts.token_text for name, model in service.models.items()}
        self._token_texts = {name: lru_cache(2**16)(text) for name, text in texts.items()}
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")  # tokenizers are not made for several

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: bytes, receive: Receive, send: Send) -> dict[str, Any] | None:
        request: ChatRequest = parse(ChatRequest, body)
        served = self.served(request.model)
        messages = [message.plain() for message in request.messages]
        arguments = request.chat_template_kwargs
        prompts = await self._encoded(served, lambda: [tuple(served.prompts.encode(messages, arguments))], "messages")
        num_top = (request.top_logprobs or 0) if request.logprobs else 0
        limit = request.max_completion_tokens or request.max_tokens
        form = ChatForm(served.name, self._token_texts[served.name], with_logprobs=bool(request.logprobs))
        return await self._answer(request, Wanted(served, prompts, limit, num_top), form, receive, send)

    async def complete(self, body: bytes, receive: Receive, send: Send) -> dict[str, Any] | None:
        request: CompletionRequest = parse(CompletionRequest, body)
        served = self.served(request.model)
        given = request.prompts
        prompts = await self._encoded(served, lambda: [_tokens(served, prompt) for prompt in given], "prompt")
        scores_prompt = bool(request.echo) and request.logprobs is not None
        if request.max_tokens == 0 and not scores_prompt:
            raise HttpError(400, "max_tokens may be 0 only with echo and logprobs.", param="max_tokens")
        limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        echo = [served.prompts.decode(prompt) for prompt in prompts for _ in range(request.n or 1)]
        form = CompletionForm(
            served.name,
            self._token_texts[served.name],
            with_logprobs=request.logprobs is not None,
            echo=echo if request.echo else None,
        )
        wanted = Wanted(served, prompts, limit, request.logprobs or 0, scores_prompt)
        return await self._answer(request, wanted, form, receive, send)

    def served(self, name: str) -> Served:
        if name not in self._service.models:
            known = ", ".join(self._service.models)
            raise HttpError(
                404, f"There is no model {name[:200]!r}. Models: {known}.", param="model", code="model_not_found"
            )
        return self._service.models[name]

    async def _encoded(self, served: Served, encode: Callable[[], Encoded], param: str) -> Encoded:
        """Prompts as tokens that fit the cache. Templates and texts are not trusted: any failure is the request's."""
        try:
            prompts = await asyncio.get_running_loop().run_in_executor(self._encoder, encode)
        except TrilloraError as error:
            raise HttpError(400, in_words(error), param=param) from None
        longest = self._service.engine.max_length
        for prompt in prompts:
            if not prompt:
                raise HttpError(400, "The prompt is empty.", param=param)
            if len(prompt) >= longest:
                what = f"The prompt has {len(prompt)} tokens. Prompt and answer together may have {longest}."
                raise HttpError(400, what, param=param, code="context_length_exceeded")
        return prompts

    async def _answer(
        self,
        request: Options,
        wanted: Wanted,
        form: Form,
        receive: Receive,
        send: Send,
    ) -> dict[str, Any] | None:
        """Runs the jobs of a request and sends their answers, whole or as they come."""
        inbox = Inbox(len(wanted.prompts) * (request.n or 1))
        jobs = self._jobs(request, wanted, inbox)
        self._submit(jobs)
        watcher = asyncio.create_task(watch(receive, inbox.leave))
        num_prompt = sum(map(len, wanted.prompts))
        try:
            if request.stream:
                await _stream(inbox, len(jobs), num_prompt, form, send, with_usage=request.wants_usage)
                return None
            pieces: list[list[Piece]] = [[] for _ in jobs]
            async for arrived in inbox:
                for index, piece in arrived:
                    if piece.error is not None:
                        raise _as_http(piece.error)
                    pieces[index].append(piece)
            answers = [joined(some) for some in pieces]
            return form.whole(answers, Usage(num_prompt, sum(answer.num_tokens for answer in answers)))
        finally:
            watcher.cancel()
            self._service.engine.cancel(jobs)

    def _submit(self, jobs: Sequence[Job]) -> None:
        try:
            self._service.engine.submit(jobs)
        except (QueueFull, Stopping) as error:
            raise _as_http(error) from None

    def _jobs(self, request: Options, wanted: Wanted, inbox: Inbox) -> list[Job]:
        n, longest = request.n or 1, self._service.engine.max_length
        if n * len(wanted.prompts) > MOST_CHOICES:
            raise HttpError(400, f"A request may have at most {MOST_CHOICES} answers.", param="n")
        sampling = Sampling(
            1.0 if request.temperature is None else request.temperature,
            1.0 if request.top_p is None else request.top_p,
            request.top_k or 0,
            secrets.randbits(32) if request.seed is None else request.seed % 2**32,
        )
        return [
            Job(
                wanted.served.name,
                prompt,
                min(longest if wanted.limit is None else wanted.limit, longest - len(prompt)),
                inbox.receiver(number * n + choice),
                sampling,
                number=choice,
                stop_tokens=() if request.ignore_eos else wanted.served.prompts.stops,
                stop_texts=request.stops,
                num_top=wanted.num_top,
                scores_prompt=wanted.scores_prompt,
            )
            for number, prompt in enumerate(wanted.prompts)
            for choice in range(n)
        ]


async def _stream(inbox: Inbox, num_answers: int, num_prompt: int, form: Form, send: Send, *, with_usage: bool) -> None:
    sender, num_written = EventSender(send), [0] * num_answers
    await sender.open()
    await sender.events([chunk for index in range(num_answers) if (chunk := form.opening(index)) is not None])
    async for arrived in inbox:
        if not arrived:
            await sender.keep_alive()
        for index, piece in arrived:
            if piece.error is not None:
                await sender.fail(piece.error)
                return
            num_written[index] = piece.num_tokens
            await sender.events(form.parts(index, piece))
    if with_usage:
        await sender.events([form.usage(Usage(num_prompt, sum(num_written)))])
    await sender.close()


def _tokens(served: Served, prompt: str | list[int]) -> tuple[int, ...]:
    """A text is continued as it is, without the chat template; token ids must be of the model."""
    if isinstance(prompt, str):
        return tuple(served.prompts.encode_text(prompt))
    if any(not 0 <= token < served.num_tokens for token in prompt):
        raise TrilloraError(
            f"The prompt has token ids that the model does not have: they are 0 to {served.num_tokens - 1}.",
            do="use the tokenizer of this model",
        )
    return tuple(prompt)


def _as_http(error: TrilloraError) -> HttpError:
    """A failure of the engine. Clients repeat the request by themselves, except where it would fail again."""
    if isinstance(error, QueueFull):
        return HttpError(429, in_words(error), code="queue_full", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, Stopping):
        return HttpError(503, in_words(error), code="stopping", headers={"retry-after": str(RETRY_SECONDS)})
    return HttpError(500, in_words(error), headers={"x-should-retry": "false"})
