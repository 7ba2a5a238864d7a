"""Renders the JSON of a row to a `RenderedRow`: the text to tokenize, and which of its characters are trained.

    {"prompt": "2 + 2 = ", "completion": "4"}  ->  RenderedRow(text="2 + 2 = 4", supervised=((8, 9),), ...)

A conversation is rendered as a whole by the tokenizer's chat template; `spans` finds the answers in the result. Raw
text and prompt/completion pairs are used unchanged.

Content may spell a control word (`control`), such as `<|im_end|>` in a question. It must become ordinary text tokens,
or a row could forge a turn. `RenderedRow.planted` has the spans of such spellings, where the tokenizer must not see a
control word. A spelling that only arises where content and template text meet is refused.

One exception: a text that the model writes (the content and thinking of an assistant turn, a completion, a plain text)
may use the model's own marks, since many data sets store thinking and tool calls as text in the answer:

    {"role": "assistant", "content": "<tool_call>\\n{\"name\": \"time\"}\\n</tool_call>"}   the tokens of Qwen's marks
    {"role": "user", "content": "what does <tool_call> mean?"}                     text

The model's own marks are `<think>`, `</think>`, and what the template writes for an answer with a tool call but not
for a plain conversation. Special tokens and the marks of turns and of tool results are never among them.

This is plain Python on strings. It runs in a worker process (`worker`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trillora.data.rendering import formats, preferences, thinking
from trillora.data.rendering.control import ControlWords, Fragments, Span, odd_spans
from trillora.data.rendering.json_values import kind_name, parse_json
from trillora.data.rendering.sandbox import ChatTemplate, RowTemplate
from trillora.data.rendering.schema import SchemaCheck
from trillora.data.rendering.spans import AnswerFinder
from trillora.data.rendering.unused import unused_keys, unwritten_fields
from trillora.data.rows import BadRow, Chat, Example, Labelled, Message, Pair, Preference, Text

TEMPLATE_DATE = "2024-07-26"  # for templates that write the date, where a result must not depend on the day
MAX_CHARACTERS = 64 * 2**20  # of one rendered row
# A template may write this many characters for each one of the row, of itself and of its arguments, and some more. One
# that makes a megabyte of every short row would keep the tokenizer busy for hours.
MAX_GROWTH, FREE_CHARACTERS = 20, 2**18
NO_CHAT_TEMPLATE = "The model's tokenizer has no chat template, so conversations cannot be rendered."
# Placeholder for content that spells a control word: a number between two of Unicode's noncharacters.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd3]")
MAX_FINDERS = 64  # different arguments of the chat template that are remembered
# Values that the template gets from the row itself, and options of transformers' `apply_chat_template`.
RESERVED_ARGUMENTS = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "conversation", "tokenize")
)
SYSTEM_ROLES = ("system", "developer")
_THINKING = frozenset(("<think>", "</think>"))
_WRITTEN = ("content", *formats.REASONING_KEYS)  # texts of an assistant turn that the model writes
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}


@dataclass(frozen=True)
class RenderSettings:
    """Everything a worker needs, as plain JSON."""

    special_words: list[str]  # spellings of special tokens
    added_words: list[str]  # spellings of all added tokens
    rows: str = "answers"  # or pairs, or labels: see `preferences`
    train_on: str = "auto"
    thinking: str = "auto"
    template: dict[str, str] | None = None  # data.template of the recipe, instead of a format
    chat_template: str | None = None
    chat_words: dict[str, str] = dataclasses.field(default_factory=dict)  # bos_token and others, for the chat template
    template_date: str = TEMPLATE_DATE  # returned by the template's `strftime_now`
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the chat template, in every row
    weight_key: str | None = None  # key of a row's weight in the loss
    columns: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # a format's key -> the row's; empty: all as named
    drop_keys: list[str] = dataclasses.field(default_factory=list)  # of rows and turns, which are read as if without
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class RenderedRow:
    """A row to be tokenized. Spans are in order and do not overlap."""

    text: str
    supervised: tuple[Span, ...]
    planted: tuple[Span, ...] = ()  # content that spells a control word, to be tokenized as text
    cuts: tuple[int, ...] = ()  # positions that no token may span
    kind: str = "text"  # or pair, or chat: a chat template writes BOS and stop tokens itself
    digest: int = 0  # hash of the content: equal rows have equal digests
    weight: float = 1.0  # of the row's tokens in the loss
    remarks: tuple[str, ...] = ()  # what of the row is not trained on, to be counted
    turns: int = 0  # of a conversation
    shape: str = ""  # of a conversation: "several rounds, system, tools"
    prompt_digest: int | None = None  # of a pair or a labelled answer
    label: bool | None = None  # whether the answer is good, if the row says so
    rejected: RenderedRow | None = None  # of a pair, whose chosen answer this row is
    system: str = ""  # the system message of a conversation
    prompt: int = 0  # where the answer begins; 0: at its first trained character
    marks: thinking.ThinkingMarks | None = None  # of the thinking in the answers, until it is in or out of the loss


@dataclass(frozen=True)
class Cut:
    """How to shorten a row that is too long: remove `num_characters` from its longest untrained content."""

    side: str  # remove from the left or the middle
    num_characters: int


class Renderer:
    """Renders raw rows for one tokenizer."""

    def __init__(self, settings: RenderSettings) -> None:
        self._settings = settings
        given = (settings.template, settings.chat_template, settings.chat_words, settings.arguments)
        self._num_own = len(json.dumps(given))  # characters that do not come from a row
        self._words = ControlWords.of(settings.special_words, settings.added_words, settings.chat_template)
        self._fragments = Fragments(self._words.words)
        self._schema = SchemaCheck(settings.schema) if settings.schema is not None else None
        self._rows = RowTemplate(settings.template) if settings.template is not None else None
        self._finders: dict[str, AnswerFinder] = {}  # by the arguments of the chat template
        self._answers = None if settings.chat_template is None else self._finder({})

    def render(self, raw: bytes, format: str, cut: Cut | None = None) -> RenderedRow:
        """Render one row from its JSON text. Raises `BadRow` for anything that cannot be trained on."""
        row = parse(raw)
        if self._schema is not None:
            self._schema.check(row)
        read = formats.picked(row, self._settings.columns, self._settings.drop_keys)
        if format == "auto" and self._rows is None:
            format = preferences.detect(read, self._settings.rows)
        example = self.example(read, format)
        if cut is not None:
            example = shortened(example, cut)
        remarks: list[str] = []
        if self._settings.thinking == "drop":
            example, had_some = thinking.dropped(example)
            remarks += [thinking.DROPPED] if had_some else []
        rendered = self._counted(self.write(example))
        # Columns that were named on purpose are right: the names of the scores cannot follow them.
        if format == preferences.PREFERENCE and not self._settings.columns and preferences.is_swapped(row):
            remarks.append(preferences.SWAPPED)
        if self._rows is None and not self._settings.columns:
            remarks += unused_keys(read, format, self._settings.weight_key)
        if remarks:
            rendered = dataclasses.replace(rendered, remarks=(*rendered.remarks, *remarks))
        if self._settings.weight_key is not None:
            rendered = dataclasses.replace(rendered, weight=formats.row_weight(row, self._settings.weight_key))
        for side in (rendered,) if rendered.rejected is None else (rendered, rendered.rejected):
            if len(side.text) > MAX_CHARACTERS:
                what = f"This row renders to {len(side.text):,} characters; the limit is {MAX_CHARACTERS:,}."
                raise BadRow(what, "shorten this row, or split it into several rows")
            self.check_growth(raw, side.text)
        return rendered

    def check_growth(self, raw: bytes, text: str) -> None:
        """Refuses text that is far longer than what it was made from."""
        most = FREE_CHARACTERS + MAX_GROWTH * (len(raw) + self._num_own)
        if len(text) > most:
            what = f"The template makes {len(text):,} characters of a row of {len(raw):,} bytes; the limit is {most:,}."
            raise BadRow(what, "fix the part of the template that repeats or multiplies text", past_limit=True)

    def example(self, row: dict[str, Any], format: str) -> Example:
        if self._rows is None:
            return preferences.convert(row, format)
        example = self._rows.convert(row)
        if isinstance(example, Chat):
            return dataclasses.replace(example, messages=formats.check_chat(example.messages))
        return example

    def write(self, example: Example) -> RenderedRow:
        match example:
            case Chat():
                return self._write_chat(example)
            case Pair(prompt, completion):
                if not completion.strip():
                    raise BadRow("The completion is empty.", "write the completion, or remove the row")
                text, start = prompt + completion, 0 if self._settings.train_on == "everything" else len(prompt)
                cuts = (len(prompt),) if prompt else ()
                planted, digest = self._spelled(text, len(prompt)), _digest([prompt, completion])
                marks = None if self._settings.train_on == "everything" else thinking.ThinkingMarks()
                return RenderedRow(text, ((start, len(text)),), planted, cuts, kind="pair", digest=digest, marks=marks)
            case Text(text):
                if not text.strip():
                    raise BadRow("The text is empty.", "remove the row")
                return RenderedRow(text, ((0, len(text)),), self._spelled(text, 0), digest=_digest(text))
            case Labelled(answer, is_good):
                return dataclasses.replace(self.write(answer), label=is_good, prompt_digest=_prompt_digest(answer))
            case Preference(chosen, rejected):
                return self._write_pair(chosen, rejected)

    def _write_pair(self, chosen: Chat | Pair, rejected: Chat | Pair) -> RenderedRow:
        """Both answers, each after the prompt, which must be the same text for both."""
        sides = [self.write(chosen), self.write(rejected)]
        if sides[0].text == sides[1].text:
            raise BadRow(f"{preferences.SAME} in the chat template's text.", preferences.DO_SAME)
        starts = [side.supervised[0][0] for side in sides]
        start = min(starts)
        # A template may open the thinking of one answer only. What is before it is the prompt then.
        differing = "".join(side.text[start:own] for side, own in zip(sides, starts, strict=True))
        if len({side.text[:start] for side in sides}) > 1 or self._words.control.sub("", differing).strip():
            what = "The text before the first trained answer differs between the chosen and the rejected answer."
            do = "use a chat template that writes a prompt in one way, whatever the answer is; or remove the row"
            raise BadRow(what, do if self._settings.train_on != "last" else f"leave data.train_on out; or {do}")
        one, other = (_trained_from(start, side) for side in sides)
        return dataclasses.replace(
            one,
            remarks=tuple(dict.fromkeys(one.remarks + other.remarks)),
            digest=_digest([one.digest, other.digest]),
            prompt_digest=_prompt_digest(chosen),
            rejected=other,
        )

    def _counted(self, row: RenderedRow) -> RenderedRow:
        """The row with the thinking of its answers in or out of the loss."""
        mode = self._settings.thinking
        if row.rejected is None:
            return _in_loss(row, mode, is_judged=row.label is not None)
        one, other = (_in_loss(side, mode, is_judged=True) for side in (row, row.rejected))
        prompt = one.prompt or other.prompt  # both answers begin in the same place
        return dataclasses.replace(
            one,
            remarks=tuple(dict.fromkeys(one.remarks + other.remarks)),
            prompt=prompt,
            rejected=dataclasses.replace(other, prompt=prompt),
        )

    def _write_chat(self, chat: Chat) -> RenderedRow:
        if self._answers is None:
            do = 'use the chat ("instruct") version of the model, or set data.chat_template, for example to chatml'
            raise BadRow(NO_CHAT_TEMPLATE, do)
        chat, answers = self._with_arguments(chat)
        text, planted = self._written(chat, answers.template, prompt=False)
        marks: thinking.ThinkingMarks | None = None
        if self._settings.train_on == "everything":
            untrained = answers.find(chat, text, planted, sorted(chat.untrained)) if chat.untrained else ()
            supervised = _around(untrained, text)
        else:
            turns = trained_turns(chat, self._settings.train_on)
            supervised, marks = answers.find(chat, text, planted, turns), answers.thinking
            if self._settings.thinking == "mask":
                thinking.check_found(chat, turns, text, supervised, marks)
        remarks = unwritten_fields(chat, answers.template)
        if next(message["role"] for message in chat.messages if message["role"] not in SYSTEM_ROLES) == "assistant":
            remarks.append("The conversation begins with the assistant: its first answer has no question")
        digest = _digest([chat.messages, chat.tools])
        row = RenderedRow(text, supervised, planted, kind="chat", digest=digest, remarks=tuple(remarks))
        first = chat.messages[0]
        system = first["content"] or "" if first["role"] == "system" else ""
        return dataclasses.replace(row, turns=len(chat.messages), shape=_shape(chat), system=system, marks=marks)

    def prompt(self, chat: Chat) -> RenderedRow:
        """A conversation with a generation prompt at its end. Content cannot become control tokens, as in training."""
        if self._answers is None:
            raise BadRow("The model's tokenizer has no chat template.", "use a chat model, or set data.chat_template")
        chat, answers = self._with_arguments(chat)
        text, planted = self._written(chat, answers.template, prompt=True)
        return RenderedRow(text, (), planted, kind="chat")

    def _with_arguments(self, chat: Chat) -> tuple[Chat, AnswerFinder]:
        """The conversation with its tools, and the template with the row's arguments. A row's value replaces the
        recipe's. The list of tools is an argument too; a row may also have it in a key of its own."""
        own = {**self._settings.arguments, **chat.arguments}
        tools = own.pop("tools", None)
        if chat.tools is None and tools:
            chat = dataclasses.replace(chat, tools=tools)
        return chat, self._finder(own)

    def _finder(self, arguments: Mapping[str, object]) -> AnswerFinder:
        """A template with these arguments, and what is known about it. Other arguments, other texts around answers."""
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._finders:
            for name, value in arguments.items():
                self._check_argument(name, value)
            if len(self._finders) >= MAX_FINDERS:
                self._finders = {}
            settings = self._settings
            assert settings.chat_template is not None, "without a template, conversations are refused"
            today = datetime.date.fromisoformat(settings.template_date)
            words = {**settings.chat_words, **arguments}
            self._finders[key] = AnswerFinder(ChatTemplate(settings.chat_template, words, today), self._words)
        return self._finders[key]

    def _check_argument(self, name: str, value: object) -> None:
        if name in RESERVED_ARGUMENTS or name in self._settings.chat_words:
            what = f"The chat template's argument {name!r} cannot be set: it comes from the row or the tokenizer."
            raise BadRow(what, "remove it from the arguments of the chat template")

        def check(text: str) -> str:
            if self._words.control.search(text) or self._fragments.at_borders(text.strip()):
                what = f"The chat template's argument {name!r} spells a control token, or a part of one: {text[:60]!r}."
                raise BadRow(what, "remove this text from the argument")
            return text

        _map_text(value, check, check)

    def _written(self, chat: Chat, template: ChatTemplate, *, prompt: bool) -> tuple[str, tuple[Span, ...]]:
        """The rendered conversation, and the spans where content spells a control word."""
        template.check_tools(chat)
        text = template.render(chat.messages, chat.tools, prompt=prompt)
        planted, may_join = self._planted(chat, text, template, prompt=prompt)
        if may_join:
            self._refuse_joined(chat, text, template, prompt=prompt)
        return text, planted

    @cached_property
    def _own_marks(self) -> frozenset[str]:
        """The model's own marks. Few data sets have them in their texts, so they are found when first needed."""
        if self._answers is None:
            return frozenset()
        question: Message = {"role": "user", "content": "?"}
        answer: Message = {"role": "assistant", "content": "!"}
        chats = [[question, answer, question, answer]]
        chats += [[question, {**answer, "content": content, "tool_calls": [_CALL]}] for content in (None, "", "!")]
        texts = [_render_or_empty(Chat(messages), self._answers.template, prompt=False) for messages in chats]
        plain, *called = (set(self._words.control.findall(text)) for text in texts)
        own = set().union(*called) - plain if plain else set()  # no plain words: the template refused the chat
        return self._words.marks & (own | _THINKING)

    def _may_write(self, word: str) -> bool:
        return word in self._words.marks and word in self._own_marks

    def _spelled(self, text: str, start: int) -> tuple[Span, ...]:
        """Where a text without a template, which the model writes from `start` on, spells a control word."""
        found = self._words.control.finditer(text)
        return tuple(word.span() for word in found if word.start() < start or not self._may_write(word[0]))

    def _planted(self, chat: Chat, text: str, template: ChatTemplate, *, prompt: bool) -> tuple[tuple[Span, ...], bool]:
        """The spans where content spells a control word, and whether some content may be a part of one.

        Found by rendering with placeholders; putting the spellings back must give `text`.
        """
        spellings: list[str] = []
        may_join = False

        def placeholder(word: re.Match[str]) -> str:
            spellings.append(word[0])
            return f"{_OPEN}{len(spellings) - 1}{_CLOSE}"

        def placeholder_or_own(word: re.Match[str]) -> str:
            return word[0] if self._may_write(word[0]) else placeholder(word)

        def hide(value: str, is_written: bool = False) -> str:
            if _NONCHARACTERS.search(value):
                what = "The text contains one of U+FDD0 to U+FDD3, which are not valid characters."
                raise BadRow(what, "remove these characters from the row")
            nonlocal may_join
            may_join = may_join or self._fragments.may_join(value.strip())
            return self._words.control.sub(placeholder_or_own if is_written else placeholder, value)

        hidden = _map_chat(chat, hide, hide)
        if not spellings:
            return (), may_join
        parts = re.split(f"{_OPEN}([0-9]+){_CLOSE}", _render_or_empty(hidden, template, prompt))
        parts[1::2] = [spellings[int(number)] for number in parts[1::2]]
        if "".join(parts) != text:
            what = f"Content spells the control token {spellings[0]!r}, and the chat template changes this content"
            why = "so it cannot be distinguished from the template's own"
            raise BadRow(f"{what}, {why}.", "remove this text from the row")
        return tuple(odd_spans(parts)), may_join

    def _refuse_joined(self, chat: Chat, text: str, template: ChatTemplate, *, prompt: bool) -> None:
        """Refuse content that spells a control word only together with the template's text next to it.

        Such content is rendered between separators. The template's own tokens and complete spellings are still there
        then, joined ones are not.
        """
        suspects: list[str] = []

        def separate(value: str, is_written: bool = False) -> str:
            core = value.strip()
            if not self._fragments.may_join(core):
                return value
            suspects.append(core)
            before, _, after = value.partition(core)
            return f"{before}{_OPEN}{core}{_OPEN}{after}"

        # Keys that are identifiers stay: templates look up names.
        separated = _map_chat(chat, separate, lambda key: key if key.isidentifier() else separate(key))
        if not suspects:
            return
        renderings = (text, _render_or_empty(separated, template, prompt))
        whole, apart = (Counter(self._words.control.findall(rendering)) for rendering in renderings)
        if whole != apart:
            what = f"The text {suspects[0][:60]!r} and the chat template's text next to it spell the control token"
            word = next(iter(whole - apart or apart))
            raise BadRow(f"{what} {word!r}, or cannot be distinguished from it.", "change this text in the row")


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a row. Raises `BadRow` with the reason if it is not one."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"Byte {error.start + 1} of this row is not UTF-8.", "save the file as UTF-8") from None
    try:
        value = parse_json(line)
    except UnicodeEncodeError:
        what = "This row has half of a surrogate pair (\\ud800 to \\udfff), which is not a character."
        raise BadRow(what, "write the character itself in UTF-8, or both halves of the pair") from None
    except json.JSONDecodeError as error:
        what = f"This row is not JSON: {error.msg} at column {error.colno}."
        raise BadRow(what, "write one complete JSON object per row") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"This row is not usable JSON: {error}.", "write one plain JSON object per row") from None
    if not isinstance(value, dict):
        do = 'write each row as {"messages": [...]} or {"text": "..."}'
        raise BadRow(f"This row is {kind_name(value)}, not a JSON object.", do)
    return value


def _shape(chat: Chat) -> str:
    """What kind of conversation it is. Rows of different shapes are worth looking at separately."""
    messages, roles = chat.messages, [message["role"] for message in chat.messages]
    parts = {
        "system": roles[0] in SYSTEM_ROLES,
        "tools": bool(chat.tools) or any(len(m) > 2 and "tool_calls" in m for m in messages) or "tool" in roles,
        "thinking": any(
            "</think>" in (m["content"] or "") or (len(m) > 2 and any(m.get(key) for key in formats.REASONING_KEYS))
            for m in messages
            if m["role"] == "assistant"
        ),
    }
    rounds = "several rounds" if roles.count("user") > 1 else "one round"
    return ", ".join([rounds, *(name for name, is_there in parts.items() if is_there)])


def trained_turns(chat: Chat, train_on: str) -> list[int]:
    """The indices of the assistant turns to train."""
    turns = [turn for turn in _chosen_turns(chat, train_on) if turn not in chat.untrained]
    if not turns:
        what = "Every answer that would be trained has weight 0."
        raise BadRow(what, "give one of them weight 1, or remove the row")
    return turns


def _around(spans: Sequence[Span], text: str) -> tuple[Span, ...]:
    """Everything but these spans, which are in order. White space after a span counts as part of it: some stop tokens
    include it, and a token is trained or not as a whole."""
    edges = [0]
    for start, end in spans:
        edges += [start, len(text) - len(text[end:].lstrip())]
    edges.append(len(text))
    return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)


def _chosen_turns(chat: Chat, train_on: str) -> list[int]:
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if train_on == "last":
        return turns[-1:]
    if train_on == "completion" and not chat.num_prompt:
        users = (i for i, message in enumerate(chat.messages[: turns[-1]]) if message["role"] == "user")
        last_question = max(users, default=0)
        return [turn for turn in turns if turn > last_question] or turns[-1:]
    if train_on in ("completion", "auto"):
        turns = [turn for turn in turns if turn >= chat.num_prompt]
        if not turns:
            raise BadRow("The completion has no assistant turn, so there is nothing to train on.", "add the answer")
    return turns


def shortened(example: Example, cut: Cut) -> Example:
    """The example with characters removed from its untrained parts, the longest first. Answers stay complete."""
    match example:
        case Pair(prompt, completion):
            return Pair(_without(prompt, cut.side, cut.num_characters), completion)
        case Text():
            raise BadRow("A text cannot be truncated: all of it is trained.", "set data.on_too_long: split")
        case Labelled(answer, is_good):
            return Labelled(_with_shorter_prompt(answer, cut), is_good)
        case Preference(chosen, rejected):
            return Preference(_with_shorter_prompt(chosen, cut), _with_shorter_prompt(rejected, cut))
    return dataclasses.replace(example, messages=_shorter_turns(example.messages, cut))


def _shorter_turns(turns: Sequence[Message], cut: Cut) -> list[Message]:
    messages, left = list(turns), cut.num_characters
    while left > 0:
        lengths = [len(m["content"]) if m["role"] != "assistant" and m.get("content") else 0 for m in messages]
        longest = max(range(len(messages)), key=lengths.__getitem__)
        taken = min(left, lengths[longest] - 1)
        if taken <= 0:
            raise _too_long_answer()
        content = _without(messages[longest]["content"], cut.side, taken)
        messages[longest] = {**messages[longest], "content": content}
        left -= taken
    return messages


def _with_shorter_prompt(side: Chat | Pair, cut: Cut) -> Chat | Pair:
    """Shortened in its prompt only, so that equal prompts stay equal."""
    if isinstance(side, Pair):
        return Pair(_without(side.prompt, cut.side, cut.num_characters), side.completion)
    prompt = _shorter_turns(side.messages[: side.num_prompt], cut)
    return dataclasses.replace(side, messages=[*prompt, *side.messages[side.num_prompt :]])


def _too_long_answer() -> BadRow:
    what = "The answers alone are longer than train.sequence_length."
    return BadRow(what, "increase train.sequence_length, or set data.on_too_long: drop")


def _without(text: str, side: str, num_characters: int) -> str:
    if num_characters >= len(text):
        raise _too_long_answer()
    if side == "left":
        return text[num_characters:]
    start = (len(text) - num_characters) // 2
    return text[:start] + text[start + num_characters :]


def _digest(meaning: object) -> int:
    canonical = json.dumps(meaning, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "little")


def _trained_from(start: int, row: RenderedRow) -> RenderedRow:
    (_, end), *others = row.supervised
    return dataclasses.replace(row, supervised=((start, end), *others))


def _in_loss(row: RenderedRow, mode: str, is_judged: bool) -> RenderedRow:
    """The row without the blocks of thinking that are not trained on. `is_judged`: its prompt ends at the first trained
    answer, not at the last one."""
    if row.marks is None:
        return row
    blocks = row.marks.blocks(row.text, row.supervised)
    removed = thinking.untrained(blocks, mode)
    answer, _ = row.supervised[0 if is_judged else -1]
    return dataclasses.replace(
        row,
        supervised=thinking.outside(row.supervised, removed),
        remarks=(*row.remarks, *row.marks.remarks(blocks, mode)),
        prompt=answer if any(block.start == answer for block in removed) else 0,
        marks=None,
    )


def _prompt_digest(side: Chat | Pair) -> int:
    """Hash of the prompt: rows with one prompt belong to one part of a split."""
    return _digest([side.prompt] if isinstance(side, Pair) else [side.messages[: side.num_prompt], side.tools])


def _map_chat(chat: Chat, change: Callable[[str, bool], str], change_key: Callable[[str], str]) -> Chat:
    """The conversation with every string in it changed, except roles. `change` learns if the model writes the text."""

    def read(value: str) -> str:
        return change(value, False)

    def changed(message: Message, key: str, value: object) -> Any:
        if key == "role":
            return value
        if message["role"] == "assistant" and key in _WRITTEN and isinstance(value, str):
            return change(value, True)
        return _map_text(value, read, change_key)

    messages = [{key: changed(message, key, value) for key, value in message.items()} for message in chat.messages]
    return Chat(messages, _map_text(chat.tools, read, change_key))


def _render_or_empty(chat: Chat, template: ChatTemplate, prompt: bool) -> str:
    try:
        return template.render(chat.messages, chat.tools, prompt=prompt)
    except BadRow:  # the template depends on the content that was changed
        return ""


def _map_text(value: object, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """The same JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(item, change, change_key) for item in value]
    if isinstance(value, dict):
        return {change_key(key): _map_text(item, change, change_key) for key, item in value.items()}
    return value
