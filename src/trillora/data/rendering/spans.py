"""Where the assistant speaks in a rendered conversation: from the end of its header through its stop token.

Three ways, each verified against the full rendering, character by character; what cannot be verified is refused, never
guessed. A template's own `{% generation %}` marks are believed where they enclose every answer and its stop token. Else
the conversation is rendered once more with marks around the content of every turn: what stands between two contents is
then the template's own text, and where in it a header ends or a stop token stands is found by rendering prefixes of the
conversation, once for each such text. Conversations with tool calls, or thinking that the template leaves out, are
asked by prefixes for every turn. Prefixes are compared with the full rendering only from the end of the turn before:
some templates write tools, system text or thinking at the last question, wherever that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from trillora.data.rendering.control import ControlWords, Span, inside
from trillora.data.rendering.sandbox import CLOSE, OPEN, ChatTemplate
from trillora.data.rows import BadRow, Chat, Message

_AROUND = OPEN + CLOSE
_MARKS = re.compile(f"[{OPEN}{CLOSE}]")
_MAX_REMEMBERED = 1000  # texts around answers; thinking makes every one of them new


class AnswerFinder:
    """Finds answers in what one chat template writes. It remembers what it has learnt of the template."""

    def __init__(self, template: ChatTemplate, words: ControlWords) -> None:
        self._template = template
        self._words = words
        self._special_at_end = re.compile(f"(?:{words.special.pattern})\\Z")
        self._leads: dict[str, int] = {}  # text before an answer -> how much of its end the assistant writes
        self._stops: dict[str, int] = {}  # text behind an answer -> how much of its beginning is the stop token

    def find(self, chat: Chat, text: str, planted: Sequence[Span], turns: Sequence[int]) -> tuple[Span, ...]:
        """One span of `text`, the full rendering, for each of the assistant turns asked for."""
        if self._template.has_marks and (spans := self._by_own_marks(chat, text, planted)):
            return tuple(spans[turn] for turn in turns)
        contents = self._contents(chat, text)
        if contents is None:
            return tuple(self._by_prefix(chat, turn, text, planted) for turn in turns)
        return tuple(self._by_neighbours(chat, turn, text, planted, contents) for turn in turns)

    def _by_own_marks(self, chat: Chat, text: str, planted: Sequence[Span]) -> dict[int, Span] | None:
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        rendered = self._template.render(chat.messages, chat.tools, marked=True)
        marked = _marked_spans(rendered, text, _AROUND * len(answers))
        if marked is None:
            return None
        ended = [self._through_stop(text, span, planted) for span in marked]
        return {turn: span for turn, span in zip(answers, ended, strict=True) if span} if all(ended) else None

    def _contents(self, chat: Chat, text: str) -> list[Span] | None:
        """Where the content of each turn stands, if the template writes all of them as they are."""
        # Around answers the marks are turned: a template may write the system text behind a first answer.
        marks = [_AROUND[::-1] if message["role"] == "assistant" else _AROUND for message in chat.messages]
        marked = [_with_marks(message, pair) for message, pair in zip(chat.messages, marks, strict=True)]
        if any(message is None for message in marked):
            return None
        rendered = self._template.render([message for message in marked if message], chat.tools)
        return _marked_spans(rendered, text, "".join(marks))

    def _by_neighbours(
        self, chat: Chat, turn: int, text: str, planted: Sequence[Span], contents: Sequence[Span]
    ) -> Span:
        """The answer's content, widened by what is known of the template's text on either side."""
        begin, end = contents[turn]
        before = text[contents[turn - 1][1] if turn else 0 : begin]
        behind = text[end : contents[turn + 1][0] if turn + 1 < len(contents) else len(text)]
        if before not in self._leads or behind not in self._stops:
            start, stop = self._by_prefix(chat, turn, text, planted)
            if turn == 0:  # how a conversation opens says nothing of turns between others
                return start, stop
            if len(self._leads) > _MAX_REMEMBERED or len(self._stops) > _MAX_REMEMBERED:
                self._leads, self._stops = {}, {}
            self._leads[before], self._stops[behind] = begin - start, stop - end
        return begin - self._leads[before], end + self._stops[behind]

    def _by_prefix(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> Span:
        """From where the conversation before this turn asks for an answer to the stop token that closes it."""
        floor = self._end_of_header(chat, turn, text)
        if chat.messages[turn].get("tool_calls"):
            end = self._end_of_calls(chat, turn, text, planted)
            span = None if floor is None or end is None or end <= floor else (floor, end)
        else:
            found = self._answer_with_stop(chat, turn, text, planted)
            # A request that is longer than the header may have matched the answer's own first characters.
            span = None if floor is None or found is None else (min(floor, found[0]), found[1])
        if span is None:
            raise BadRow(
                f"The answer of turn {turn + 1} and a stop token behind it cannot be found in what the chat template "
                "writes.",
                "use a chat template that writes each answer as it is and then the end-of-turn token, "
                "inside {% generation %} marks",
            )
        return span

    def _end_of_header(self, chat: Chat, turn: int, text: str) -> int | None:
        """Up to where the conversation before a turn, with its request for an answer, is what the full text says."""
        if turn == 0:
            # Nothing precedes, so the header is what follows a question when an answer is asked for.
            question = [{"role": "user", "content": "?"}]
            asked = self._template.render(question, None, prompt=True)
            header = asked[_common_length(asked, self._template.render(question, None)) :]
            found = text.find(header) if header else -1
            return found + len(header) if found >= 0 else None
        before, start = chat.messages[:turn], 0
        closed = [*before[:-1], _closed(before[-1])]
        head, mark, tail = self._template.render([*closed, *chat.messages[turn:]], chat.tools).partition(CLOSE)
        if mark and head + tail == text:
            before, start = closed, len(head)

        def behind(messages: Sequence[Message], prompt: bool = False) -> str:
            rendering = self._template.render(messages, chat.tools, prompt=prompt)
            return rendering.partition(CLOSE)[2] if start else rendering

        written, asked = text[start:], behind(before, prompt=True)
        unasked = behind(before)
        common = _common_length(asked, written)
        if common < len(unasked.rstrip()) or (common == len(asked) != len(unasked)):
            return start + common if common == len(asked) else None
        # Some templates ask in other words than they write (they open a <think> that the answer then lacks), some do
        # not ask: how they begin a plain answer in this place tells the header.
        plain = {"role": "assistant", "content": f"{OPEN}!"}
        try:
            begun = behind([*before, plain, *chat.messages[turn + 1 :]])
        except BadRow:  # a tool's answer behind no call
            begun = behind([*before, plain])
        if len(asked) > len(unasked):
            return start + min(common, _common_length(asked, begun))
        header = begun.partition(OPEN)[0]
        has_words = self._words.special.search(header, len(unasked))
        return start + (_common_length(header, written) if has_words else common)

    def _answer_with_stop(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> Span | None:
        """Where the answer begins and its stop token ends; both stand alike in a rendering that ends with this turn.

        Without that one the header of a next turn could pass for a stop token.
        """
        marked = _with_marks(chat.messages[turn], _AROUND, _without_thinking)
        if marked is None:
            return None
        rendered = self._template.render(_replaced(chat.messages, turn, marked), chat.tools)
        spoken = _marked_spans(rendered, text, _AROUND)
        if spoken is None:
            return None
        alone = self._template.render([*chat.messages[:turn], marked], chat.tools).rpartition(CLOSE)[2]
        stop, stop_alone = self._stop(text, spoken[0][1]), self._stop(alone, 0)
        if stop is None or stop_alone is None or stop[1] != stop_alone[1] or inside(stop.start(1), planted):
            return None
        return spoken[0][0], stop.end(1)

    def _stop(self, rendering: str, start: int) -> re.Match[str] | None:
        """The first special token directly behind an answer; an added one that is not special, if there is none."""
        first = found = self._words.added_next.match(rendering, start)
        while found is not None and not self._words.special.fullmatch(found[1]):
            found = self._words.added_next.match(rendering, found.end())
        return found or first

    def _end_of_calls(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> int | None:
        """Behind the last control word that the template writes for a turn with tool calls.

        From a mark inside the calls on, the rendering that ends with this turn must be what the full text says.
        """
        for marked in (*_marks_in_calls(chat.messages[turn]), chat.messages[turn]):
            head, mark, tail = self._template.render(_replaced(chat.messages, turn, marked), chat.tools).partition(
                CLOSE
            )
            if head + tail != text:
                continue
            alone = self._template.render([*chat.messages[:turn], marked], chat.tools)
            start, alone = (len(head), alone.partition(CLOSE)[2]) if mark else (0, alone)
            for word in reversed(list(self._words.special.finditer(alone))):
                if self._words.special.sub("", alone[word.end() :]).strip():
                    break
                if not inside(start + word.start(), planted) and text.startswith(alone[: word.end()], start):
                    return start + word.end()
        return None

    def _through_stop(self, text: str, span: Span, planted: Sequence[Span]) -> Span | None:
        """The span without the whitespace behind its stop token; None if it does not end with one."""
        start, end = span[0], span[0] + len(text[slice(*span)].rstrip())
        # An added token that is not special, such as </tool_call>, may end what is said and still not end the turn.
        stop = self._special_at_end.search(text, start, end)
        return None if stop is None or inside(stop.start(), planted) else (start, end)


def _replaced(messages: Sequence[Message], turn: int, message: Message) -> list[Message]:
    return [*messages[:turn], message, *messages[turn + 1 :]]


def _without_thinking(answer: str) -> str:
    # A template may write an answer without the thinking in front of it.
    return answer.rpartition("</think>")[2].strip() or answer


def _with_marks(message: Message, marks: str, part: Callable[[str], str] = str) -> Message | None:
    """The message with marks around (the last part of) its content, inside the whitespace a template may trim."""
    content: str = message.get("content") or ""
    core = part(content.strip())
    if not core or "tool_calls" in message:
        return None
    before, _, after = content.rpartition(core)
    return {**message, "content": f"{before}{marks[0]}{core}{marks[1]}{after}"}


def _closed(message: Message) -> Message:
    """The message with a mark behind its content."""
    content: str = message.get("content") or ""
    core = content.rstrip()
    return {**message, "content": f"{core}{CLOSE}{content[len(core) :]}"}


def _marks_in_calls(message: Message) -> Iterator[Message]:
    """The message with a mark in its last call: behind the name, or behind an argument that is text."""
    *calls, last = message["tool_calls"]
    function = last["function"]
    marked = [{**function, "name": function["name"] + CLOSE}]
    if isinstance(arguments := function["arguments"], dict):
        texts = [key for key, value in arguments.items() if isinstance(value, str)]
        marked += [{**function, "arguments": {**arguments, key: arguments[key] + CLOSE}} for key in texts[-1:]]
    for changed in marked:
        yield {**message, "tool_calls": [*calls, {**last, "function": changed}]}


def _marked_spans(marked: str, text: str, marks: str) -> list[Span] | None:
    """The spans between marks; None if these are not the marks, or the rest is not the real rendering."""
    parts = _MARKS.split(marked)
    if "".join(_MARKS.findall(marked)) != marks or "".join(parts) != text:
        return None
    spans, position = [], 0
    for number, part in enumerate(parts):
        if number % 2:
            spans.append((position, position + len(part)))
        position += len(part)
    return spans


def _common_length(*texts: str) -> int:
    """How many characters all of them begin with."""
    first, *others = texts
    if all(other.startswith(first) for other in others):
        return len(first)
    return next((i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), min(map(len, texts)))
