"""Jinja for programs that strangers wrote: a model's chat template, and the templates of a recipe.

Chat templates are compiled as transformers compiles them (same trimming, same extra names), so that what is trained is
what the tokenizer itself would write. Jinja's sandbox keeps a template inside its row; against endless loops and
gigabytes it is no help, so templates of either kind run only in a worker process with limits (`worker`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ExtensionAttribute, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trillora.data.rows import BadRow, Chat, Example, Message, Pair, Text

# Two of Unicode's noncharacters, which no text for interchange contains.
OPEN, CLOSE = "\ufdd2", "\ufdd3"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template, with the words of its tokenizer."""

    def __init__(self, source: str, words: Mapping[str, str], today: datetime.date) -> None:
        environment = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        # A run must render the same on every day it is continued.
        midnight = datetime.datetime.combine(today, datetime.time())
        environment.globals["strftime_now"] = midnight.strftime
        self._source = source
        self._words = dict(words)
        self._environment = environment
        self._template = _compiled(environment, source, "The chat template")
        self._template.globals = dict(self._template.globals)  # read for every row; a plain mapping is the fastest
        self.has_marks = environment.parse(source).find(ExtensionAttribute) is not None

    def check_tools(self, chat: Chat) -> None:
        """Refuse what the template would leave out: it would be trained as if nobody had called anything."""
        for name, used in (("tools", chat.tools), ("tool_calls", _has_calls(chat))):
            if used and name not in self._source:
                raise BadRow(
                    f'This conversation has "{name}", which the chat template does not write.',
                    "use a model or a data.chat_template that knows tools, or remove the row",
                )

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        """The conversation as text. `prompt`: ask for an answer at its end. `marked`: show the template's marks."""
        self._environment.shows_marks = marked
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._words,
            )
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template raises what it likes
            raise BadRow(
                f"The chat template refuses this conversation: {str(error)[:300]}",
                "use the roles and the order of turns the template accepts",
            ) from None


class RowTemplate:
    """The templates of a recipe: any JSON row becomes a chat, a prompt with its completion, or a text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True, undefined=StrictUndefined)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._templates = {
            name: _compiled(environment, source, f"data.template.{name}") for name, source in sources.items()
        }

    def convert(self, row: dict[str, Any]) -> Example:
        written = {name: self._write(name, row) for name in self._templates}
        if "text" in written:
            return Text(written["text"])
        if "completion" in written:
            return Pair(written["prompt"], written["completion"])
        roles = [role for role in ("system", "user", "assistant") if role in written]
        return Chat([{"role": role, "content": written[role]} for role in roles])

    def _write(self, name: str, row: dict[str, Any]) -> str:
        try:
            return self._templates[name].render({**row, "row": row})
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise BadRow(
                f"The recipe's template '{name}' cannot be filled from this row: {str(error)[:300]}",
                "check the names in data.template against the row's keys: " + " ".join(sorted(map(str, row))[:20]),
            ) from None


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    shows_marks = False

    def getattr(self, obj: Any, attribute: str) -> Any:
        # `loop.first` and the like, asked for in every turn: public names of an object that holds nothing to reach.
        if type(obj) is LoopContext and not attribute.startswith("_"):
            return getattr(obj, attribute, self.undefined(obj=obj, name=attribute))
        return super().getattr(obj, attribute)


class _Generation(Extension):
    """`{% generation %}`, by which a template says where the assistant speaks."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Macro) -> str:
        spoken = str(caller())
        assert isinstance(self.environment, _ChatEnvironment)
        return f"{OPEN}{spoken}{CLOSE}" if self.environment.shows_marks else spoken


def _has_calls(chat: Chat) -> bool:
    return any(message.get("tool_calls") for message in chat.messages)


def _compiled(environment: ImmutableSandboxedEnvironment, source: str, name: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BadRow(f"{name} is no Jinja template: {error.message} in line {error.lineno}.", "mend it") from None


def _with_reasoning(message: Message) -> Message:
    """Thinking under every name a template may look for it."""
    thought = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
