"""Sandboxed Jinja for untrusted templates: a model's chat template, and the templates of a recipe.

Chat templates are compiled as in transformers (same trimming, same extra names), so that training uses the text that
the tokenizer itself would produce. Jinja's sandbox limits a template to its row. It does not limit time and memory, so
templates run only in a worker process that does (`worker`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, ExtensionAttribute, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trillora.data.rendering.formats import REASONING_KEYS
from trillora.data.rendering.json_values import shortened
from trillora.data.rows import BadRow, BadTemplate, Chat, Example, Message, Pair, Text

# Two of Unicode's noncharacters, which valid text does not contain.
_TOKENS = {"end of print statement": "}}", "end of statement block": "%}"}  # as Jinja calls them
OPEN, CLOSE = "\ufdd2", "\ufdd3"


class ChatTemplate:
    """A chat template with the values it can use: the special tokens of its tokenizer, and the user's arguments."""

    def __init__(self, source: str, words: Mapping[str, object], today: datetime.date) -> None:
        environment = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        # A fixed date, so that a resumed run renders the same text.
        midnight = datetime.datetime.combine(today, datetime.time())
        environment.globals["strftime_now"] = midnight.strftime
        self._source = source
        self._words = dict(words)
        self._environment = environment
        self._template = _compiled(
            environment, source, "The chat template", "data.chat_template, or the tokenizer's own"
        )
        self._template.globals = dict(self._template.globals)  # read for every row; a plain dict is the fastest
        self.has_marks = environment.parse(source).find(ExtensionAttribute) is not None

    def reads(self, name: str) -> bool:
        """Whether the template may read this value: its name is in the source."""
        return name in self._source

    def check_tools(self, chat: Chat) -> None:
        """Refuse tools and calls that the template ignores: the row would be trained as if there were none."""
        has_calls = any(message.get("tool_calls") for message in chat.messages)
        for name, used in (("tools", chat.tools), ("tool_calls", has_calls)):
            if used and not self.reads(name):
                what = f'This conversation has "{name}", which the chat template ignores.'
                raise BadRow(what, "use a model or a data.chat_template that supports tools, or remove the row")

    def render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        """The conversation as text. `prompt`: add a generation prompt. `marked`: show generation marks as sentinels."""
        if self._needs_parts:
            messages = [_with_parts(message) for message in messages]
        return self._render(messages, tools, prompt=prompt, marked=marked)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[object] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        self._environment.shows_marks = marked
        messages = [_with_reasoning(message) for message in messages]
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        what = "The chat template refuses this conversation"
        return _rendered(
            self._template, values | self._words, what, "use roles and an order of turns that the template accepts"
        )

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template writes content that is a list of parts, but drops content that is text. Some multimodal
        models' templates do, such as SmolVLM and LLaVA. llama.cpp and vLLM give them a list of one part too."""
        question: Message = {"role": "user", "content": OPEN}
        return not self._writes_mark([question]) and self._writes_mark([_with_parts(question)])

    @cached_property
    def writes_thinking(self) -> bool:
        """Whether the template writes the thinking of an answer that is the last turn."""
        return self._writes_in_answer({"content": "!", "reasoning_content": OPEN})

    @cached_property
    def writes_thinking_inside(self) -> bool:
        """The same for thinking inside the content, between <think> and </think>."""
        return self._writes_in_answer({"content": f"<think>\n{OPEN}\n</think>\n\n!"})

    def _writes_in_answer(self, fields: Message) -> bool:
        messages: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", **fields}]
        return self._writes_mark([_with_parts(message) for message in messages] if self._needs_parts else messages)

    def _writes_mark(self, messages: list[Message]) -> bool:
        try:
            return OPEN in self._render(messages, None)
        except BadRow:
            return False


class RowTemplate:
    """The templates of a recipe. They turn any JSON row into a chat, a prompt with its completion, or a text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        environment = _row_environment()
        self._templates = {
            name: _compiled(environment, source, f"data.template.{name}", f"data.template.{name}")
            for name, source in sources.items()
        }

    def convert(self, row: dict[str, Any]) -> Example:
        do = "use only keys of the row in the template: " + " ".join(sorted(map(str, row))[:20])
        written = {
            name: _rendered(template, {**row, "row": row}, f"data.template.{name} cannot be rendered with this row", do)
            for name, template in self._templates.items()
        }
        if "text" in written:
            return Text(written["text"])
        if "completion" in written:
            return Pair(written["prompt"], written["completion"])
        roles = [role for role in ("system", "user", "assistant") if role in written]
        return Chat([{"role": role, "content": written[role]} for role in roles])


def _row_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def names_needed(source: str, name: str) -> set[str]:
    """The keys that every row needs, so that a recipe's template can be rendered. The template is parsed only: nothing
    of it runs. Names in conditions and loops may not be needed, and are not looked at."""
    environment = _row_environment()
    try:
        tree = environment.parse(source)
    except TemplateSyntaxError as error:
        raise _not_valid(error, source, name, name) from None
    except RecursionError:  # left to the process with limits
        return set()
    given = {each.name for each in tree.find_all(nodes.Name) if each.ctx != "load"}
    given |= {each.name for each in tree.find_all(nodes.Macro)}
    read = set()
    for output in (node for node in tree.body if isinstance(node, nodes.Output)):
        for part in output.nodes:
            inside = [part, *part.find_all(Node)]
            if not any(map(_may_not_read, inside)):
                read |= {node.name for node in inside if isinstance(node, nodes.Name)}
    return read - given - environment.globals.keys() - {"row"}


def _may_not_read(node: Node) -> bool:
    """Whether a part of an expression need not read its values: a or b, a if b, a is defined, a | default."""
    if isinstance(node, nodes.Filter):
        return node.name in ("default", "d")
    return isinstance(node, (nodes.CondExpr, nodes.And, nodes.Or, nodes.Test))


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    shows_marks = False

    def getattr(self, obj: object, attribute: str) -> Any:
        # `loop.first` and similar, read in every turn. Public attributes of a loop give access to nothing else.
        if type(obj) is LoopContext and not attribute.startswith("_"):
            return getattr(obj, attribute, self.undefined(obj=obj, name=attribute))
        return super().getattr(obj, attribute)


class _Generation(Extension):
    """The tag `{% generation %}`, with which a template marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Macro) -> str:
        text = str(caller())
        assert isinstance(self.environment, _ChatEnvironment)
        return f"{OPEN}{text}{CLOSE}" if self.environment.shows_marks else text


def _compiled(environment: ImmutableSandboxedEnvironment, source: str, name: str, where: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise _not_valid(error, source, name, where) from None


def _not_valid(error: TemplateSyntaxError, source: str, name: str, where: str) -> BadTemplate:
    why = (error.message or "it cannot be parsed").rstrip(".")
    for name_of_token, token in _TOKENS.items():
        why = why.replace(f"'{name_of_token}'", f"'{token}'").replace(name_of_token, f"'{token}'")
    line = source.splitlines()[error.lineno - 1 : error.lineno]
    shown = f": {shortened(line[0].strip(), 100)}" if line else ""
    what = f"{name} is not a valid Jinja template: {why}."
    return BadTemplate(what, where, f"correct line {error.lineno} of the template{shown}")


def _rendered(template: Template, values: Mapping[str, object], what: str, do: str) -> str:
    try:
        return template.render(values)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # templates can raise anything
        raise BadRow(f"{what}: {str(error)[:300]}", do) from None


def _with_reasoning(message: Message) -> Message:
    """The message with its thinking under every name that a template may read."""
    thought = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
