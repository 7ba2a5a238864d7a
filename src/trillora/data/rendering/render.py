"""From a row's JSON to a `RenderedRow`: the text to tokenise, and which of its characters are trained.

A conversation is rendered once, whole, by the tokenizer's own chat template. Trained are the assistant's answers with
their stop tokens, some of them, or everything. Raw text and prompt/completion pairs are taken as they are. All of this
is plain Python on strings, meant to run in a worker process (`worker`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trillora.data.rendering import formats
from trillora.data.rendering.control import ControlWords, Span
from trillora.data.rendering.sandbox import ChatTemplate, RowTemplate
from trillora.data.rendering.schema import SchemaCheck
from trillora.data.rendering.spans import AnswerFinder
from trillora.data.rows import BadRow, Chat, Example, Message, Pair, Text

MAX_CHARACTERS = 64 * 2**20  # of one rendered row
# Two of Unicode's noncharacters around a number stand for content that spells a special token.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd3]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # json accepts half of a pair; UTF-8, and so a tokenizer, does not


@dataclass(frozen=True)
class RenderSettings:
    """All a worker must know, as plain JSON."""

    special_words: list[str]  # spellings of special tokens
    added_words: list[str]  # spellings of all added tokens
    train_on: str = "auto"
    template: dict[str, str] | None = None  # the recipe's, in place of a format
    chat_template: str | None = None
    chat_words: dict[str, str] = dataclasses.field(default_factory=dict)  # bos_token and the like, for that template
    template_date: str = "2024-07-26"  # what a chat template hears when it asks for the date
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class RenderedRow:
    """A row ready to be tokenised. Spans are in order and do not overlap."""

    text: str
    supervised: tuple[Span, ...]
    planted: tuple[Span, ...] = ()  # content that spells a special token
    cuts: tuple[int, ...] = ()  # where tokens may not reach across
    kind: str = "text"  # or pair, or chat: only a chat template writes BOS and stop tokens by itself
    digest: int = 0  # of the row's meaning: equal rows have equal digests


@dataclass(frozen=True)
class Cut:
    """How a row that is too long is shortened: `num_characters` taken from its longest untrained content."""

    side: str  # left or middle
    num_characters: int


class Renderer:
    """Makes scripts of raw rows, for one tokenizer."""

    def __init__(self, settings: RenderSettings) -> None:
        self._settings = settings
        self._words = ControlWords.of(settings.special_words, settings.added_words)
        self._fragments = Fragments(settings.special_words)
        self._schema = SchemaCheck(settings.schema) if settings.schema is not None else None
        self._rows = RowTemplate(settings.template) if settings.template is not None else None
        self._chat: ChatTemplate | None = None
        self._answers: AnswerFinder | None = None
        if settings.chat_template is not None:
            today = datetime.date.fromisoformat(settings.template_date)
            self._chat = ChatTemplate(settings.chat_template, settings.chat_words, today)
            self._answers = AnswerFinder(self._chat, self._words)

    def script(self, raw: bytes, format: str, cut: Cut | None = None) -> RenderedRow:
        """One row, from its JSON text. Raises `BadRow` for anything that cannot be trained on."""
        row = parse(raw)
        if self._schema is not None:
            self._schema.check(row)
        example = self.example(row, format)
        if cut is not None:
            example = shortened(example, cut)
        script = self.write(example)
        if len(script.text) > MAX_CHARACTERS:
            raise BadRow(
                f"This row renders to {len(script.text):,} characters.",
                f"keep rows below {MAX_CHARACTERS:,} characters",
            )
        return script

    def example(self, row: dict[str, Any], format: str) -> Example:
        if self._rows is None:
            return formats.convert(row, formats.detect(row) if format == "auto" else format)
        example = self._rows.convert(row)
        if isinstance(example, Chat):
            return dataclasses.replace(example, messages=formats.check_chat(example.messages))
        return example

    def write(self, example: Example) -> RenderedRow:
        match example:
            case Chat():
                return self._chat_script(example)
            case Pair(prompt, completion):
                if not completion.strip():
                    raise BadRow("The completion is empty.", "write the completion, or remove the row")
                text, start = prompt + completion, 0 if self._settings.train_on == "everything" else len(prompt)
                cuts = (len(prompt),) if prompt else ()
                planted, digest = self._spelled(text), _digest([prompt, completion])
                return RenderedRow(text, ((start, len(text)),), planted, cuts, kind="pair", digest=digest)
            case Text(text):
                if not text.strip():
                    raise BadRow("The text is empty.", "remove the row")
                return RenderedRow(text, ((0, len(text)),), self._spelled(text), digest=_digest(text))

    def _chat_script(self, chat: Chat) -> RenderedRow:
        if self._chat is None or self._answers is None:
            raise BadRow(
                "The model's tokenizer has no chat template, so conversations cannot be rendered the way it expects.",
                'use the chat ("instruct") version of the model, or name a template: data.chat_template',
            )
        text, planted = self._written(chat, self._chat, prompt=False)
        if self._settings.train_on == "everything":
            supervised: tuple[Span, ...] = ((0, len(text)),)
        else:
            supervised = self._answers.find(chat, text, planted, trained_turns(chat, self._settings.train_on))
        return RenderedRow(text, supervised, planted, kind="chat", digest=_digest([chat.messages, chat.tools]))

    def prompt(self, messages: list[Message]) -> RenderedRow:
        """A conversation that asks for an answer, with content kept from becoming control as in training."""
        if self._chat is None:
            raise BadRow("There is no chat template.", "use a chat model")
        text, planted = self._written(Chat(messages), self._chat, prompt=True)
        return RenderedRow(text, (), planted, kind="chat")

    def _written(self, chat: Chat, template: ChatTemplate, *, prompt: bool) -> tuple[str, tuple[Span, ...]]:
        """What the template makes of a conversation, and where content in it spells a special token."""
        template.check_tools(chat)
        text = template.render(chat.messages, chat.tools, prompt=prompt)
        planted, may_join = self._planted(chat, text, template, prompt=prompt)
        if may_join:
            self._refuse_joined(chat, text, template, prompt=prompt)
        return text, planted

    def _spelled(self, text: str) -> tuple[Span, ...]:
        return tuple(match.span() for match in self._words.special.finditer(text))

    def _planted(self, chat: Chat, text: str, template: ChatTemplate, *, prompt: bool) -> tuple[tuple[Span, ...], bool]:
        """Where content spells a special token, found by rendering with stand-ins and verified by putting them back;
        and whether some content may be a part of one."""
        spellings: list[str] = []
        may_join = False

        def stand_in(match: re.Match[str]) -> str:
            spellings.append(match[0])
            return f"{_OPEN}{len(spellings) - 1}{_CLOSE}"

        def hide(value: str) -> str:
            if _NONCHARACTERS.search(value):
                raise BadRow(
                    "The text holds one of U+FDD0 to U+FDD3, which are no characters.", "remove them from the row"
                )
            nonlocal may_join
            may_join = may_join or self._fragments.may_join(value.strip())
            return self._words.special.sub(stand_in, value)

        hidden = [
            {key: value if key == "role" else _map_text(value, hide) for key, value in message.items()}
            for message in chat.messages
        ]
        tools = _map_text(chat.tools, hide)
        if not spellings:
            return (), may_join
        try:
            rendered = template.render(hidden, tools, prompt=prompt)
        except BadRow:  # it looks into the content
            rendered = ""
        spans, position, restored = [], 0, []
        for number, part in enumerate(re.split(f"{_OPEN}([0-9]+){_CLOSE}", rendered)):
            if number % 2:
                part = spellings[int(part)]
                spans.append((position, position + len(part)))
            restored.append(part)
            position += len(part)
        if "".join(restored) != text:
            raise BadRow(
                f"Content spells the special token {spellings[0]!r}, and the chat template changes that content, so "
                "the two cannot be told apart.",
                "remove that text from the row",
            )
        return tuple(spans), may_join

    def _refuse_joined(self, chat: Chat, text: str, template: ChatTemplate, *, prompt: bool) -> None:
        """Refuse content that spells a special token only together with what the template writes next to it.

        Content that may be a part of one is rendered fenced off from its neighbours: the template's own tokens and
        whole spellings outlive that, joined ones do not.
        """
        suspects: list[str] = []

        def fence(value: str) -> str:
            core = value.strip()
            if not self._fragments.may_join(core):
                return value
            suspects.append(core)
            before, _, after = value.partition(core)
            return f"{before}{_OPEN}{core}{_OPEN}{after}"

        def fence_key(key: str) -> str:
            return key if key.isidentifier() else fence(key)  # templates ask for names

        messages = [
            {key: value if key == "role" else _map_text(value, fence, fence_key) for key, value in message.items()}
            for message in chat.messages
        ]
        tools = _map_text(chat.tools, fence, fence_key)
        if not suspects:
            return
        try:
            fenced = template.render(messages, tools, prompt=prompt)
        except BadRow:  # it looks into the content
            fenced = ""
        whole, apart = (Counter(self._words.special.findall(rendering)) for rendering in (text, fenced))
        if whole != apart:
            raise BadRow(
                f"The text {suspects[0][:60]!r} and what the chat template writes next to it spell the special token "
                f"{next(iter(whole - apart or apart))!r}, or cannot be told from it.",
                "reword that text",
            )


class Fragments:
    """Which texts could, with something before or behind them, spell one of the words."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(word for word in words if word)
        self._beginnings = {word[:n] for word in self._words for n in range(1, len(word))}
        self._ends = {word[n:] for word in self._words for n in range(1, len(word))}
        self._firsts, self._lasts = ({word[i] for word in self._words} for i in (0, -1))
        self._longest = max(map(len, self._words), default=0)

    def may_join(self, text: str) -> bool:
        """Asked for every text: most are told by not having the first or last character of any word at the border."""
        if not text:
            return False
        if len(text) < self._longest:
            return any(text in word and text != word for word in self._words) or self._at_borders(text)
        tail = len(text) - self._longest
        return (
            any(text.find(character, tail) >= 0 for character in self._firsts)
            or any(text.find(character, 0, self._longest) >= 0 for character in self._lasts)
        ) and self._at_borders(text)

    def _at_borders(self, text: str) -> bool:
        lengths = range(1, min(len(text), self._longest) + 1)
        return any(text[-n:] in self._beginnings or text[:n] in self._ends for n in lengths)


def parse(raw: bytes) -> dict[str, Any]:
    """A row's JSON, with everything that JSON itself can get wrong said in words."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"Byte {error.start + 1} of this row is not UTF-8.", "save the file as UTF-8") from None
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(line):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(
            "This row escapes half of a surrogate pair (\\ud800 to \\udfff), which is no character.",
            "write the character itself in UTF-8, or both halves of the pair",
        ) from None
    except json.JSONDecodeError as error:
        raise BadRow(
            f"This row is not JSON: {error.msg} at column {error.colno}.", "write one complete JSON object per row"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"This row is not JSON one can use: {error}.", "write one plain JSON object per row") from None
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        raise BadRow(
            f"This row holds {kinds.get(type(value), 'a number')}, not a JSON object.",
            'write {"messages": [...]} or {"text": "..."} for each row',
        )
    return value


def trained_turns(chat: Chat, train_on: str) -> list[int]:
    """The assistant turns the loss sees."""
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if train_on == "last":
        return turns[-1:]
    if train_on == "completion" and not chat.num_prompt:
        asked = max((i for i, message in enumerate(chat.messages[: turns[-1]]) if message["role"] == "user"), default=0)
        return [turn for turn in turns if turn > asked] or turns[-1:]
    if train_on in ("completion", "auto"):
        turns = [turn for turn in turns if turn >= chat.num_prompt]
        if not turns:
            raise BadRow("The completion has no assistant turn, so there is nothing to learn.", "add the answer")
    return turns


def shortened(example: Example, cut: Cut) -> Example:
    """The example with characters taken out of what is not trained, its longest parts first. Answers stay whole."""
    match example:
        case Pair(prompt, completion):
            return Pair(_without(prompt, cut.side, cut.num_characters), completion)
        case Text():
            raise BadRow("A text cannot be truncated: all of it is trained.", "use data.on_too_long: split")
    messages, left = list(example.messages), cut.num_characters
    while left > 0:
        lengths = [len(m["content"]) if m["role"] != "assistant" and m.get("content") else 0 for m in messages]
        longest = max(range(len(messages)), key=lengths.__getitem__)
        taken = min(left, lengths[longest] - 1)
        if taken <= 0:
            raise BadRow("The answers alone are longer than a row.", "raise train.sequence_length, or drop such rows")
        content = _without(messages[longest]["content"], cut.side, taken)
        messages[longest] = {**messages[longest], "content": content}
        left -= taken
    return dataclasses.replace(example, messages=messages)


def _without(text: str, side: str, num_characters: int) -> str:
    if num_characters >= len(text):
        raise BadRow("The answer alone is longer than a row.", "raise train.sequence_length, or drop such rows")
    if side == "left":
        return text[num_characters:]
    start = (len(text) - num_characters) // 2
    return text[:start] + text[start + num_characters :]


def _digest(meaning: Any) -> int:
    canonical = json.dumps(meaning, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "little")


def _map_text(value: Any, change: Callable[[str], str], change_key: Callable[[str], str] | None = None) -> Any:
    """The same JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(item, change, change_key) for item in value]
    if isinstance(value, dict):
        new_key = change_key or change
        return {new_key(key): _map_text(item, change, change_key) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
