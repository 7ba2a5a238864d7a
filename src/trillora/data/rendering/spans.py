"""Where the assistant speaks in a rendered conversation: from the end of its header through its stop token.

Three ways, each verified against the full rendering, character by character; what cannot be verified is refused, never
guessed. A template's own `{% generation %}` marks are believed where they enclose every answer and its stop token. Else
the conversation is rendered once more with marks around the content of every turn: what stands between two contents is
then the template's own text, and where in it a header ends or a stop token stands is found by rendering prefixes of the
conversation, once for each such text. A template that does not bear marks is asked by prefixes alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trillora.data.rendering.control import ControlWords, Span, inside
from trillora.data.rendering.sandbox import CLOSE, OPEN, ChatTemplate
from trillora.data.rows import BadRow, Chat, Message

_MARKS = re.compile(f"[{OPEN}{CLOSE}]")


class AnswerFinder:
    """Finds answers in what one chat template writes. It remembers what it has learnt of the template."""

    def __init__(self, template: ChatTemplate, words: ControlWords) -> None:
        self._template = template
        self._words = words
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
        marked = _marked_spans(self._template.render(chat.messages, chat.tools, marked=True), text)
        if marked is None or len(marked) != len(answers):
            return None
        ended = [self._through_stop(text, span, planted) for span in marked]
        return {turn: span for turn, span in zip(answers, ended, strict=True) if span} if all(ended) else None

    def _contents(self, chat: Chat, text: str) -> list[Span] | None:
        """Where the content of each turn stands, if the template writes all of them as they are."""
        marked = [_with_marks(message) for message in chat.messages]
        if any(message is None for message in marked):
            return None
        rendered = self._template.render([message for message in marked if message], chat.tools)
        spans = _marked_spans(rendered, text)
        return spans if spans is not None and len(spans) == len(chat.messages) else None

    def _by_neighbours(
        self, chat: Chat, turn: int, text: str, planted: Sequence[Span], contents: Sequence[Span]
    ) -> Span:
        """The answer's content, widened by what is known of the template's text on either side."""
        begin, end = contents[turn]
        before = text[contents[turn - 1][1] if turn else 0 : begin]
        behind = text[end : contents[turn + 1][0] if turn + 1 < len(contents) else len(text)]
        if before not in self._leads or behind not in self._stops:
            start, stop = self._by_prefix(chat, turn, text, planted, contents[turn])
            if turn == 0:  # how a conversation opens says nothing of turns between others
                return start, stop
            self._leads[before], self._stops[behind] = begin - start, stop - end
        return begin - self._leads[before], end + self._stops[behind]

    def _by_prefix(
        self, chat: Chat, turn: int, text: str, planted: Sequence[Span], content: Span | None = None
    ) -> Span:
        """From where the conversation before this turn asks for an answer to the stop token that closes it."""
        message = chat.messages[turn]
        as_last = self._template.render(chat.messages[: turn + 1], chat.tools)
        floor = self._end_of_header(chat, turn, text, as_last)
        if floor is None:
            span = None
        elif message.get("tool_calls"):
            span = self._through_calls(text, as_last, floor, planted)
        else:
            span = self._through_answer(_answer(message), text, as_last, floor, planted, content)
        if span is None:
            raise BadRow(
                f"The answer of turn {turn + 1} and a stop token behind it cannot be found in what the chat template "
                "writes.",
                "use a chat template that writes each answer as it is and then the end-of-turn token, "
                "inside {% generation %} marks",
            )
        return span

    def _end_of_header(self, chat: Chat, turn: int, text: str, as_last: str) -> int | None:
        """Up to where the conversation before a turn, with its request for an answer, is what both renderings say."""
        if turn == 0:
            # Nothing precedes, so the header is what follows a question when an answer is asked for.
            question = [{"role": "user", "content": "?"}]
            asked = self._template.render(question, None, prompt=True)
            header = asked[_common_length(asked, self._template.render(question, None)) :]
            found = text.find(header) if header else -1
            return found + len(header) if found >= 0 and as_last.startswith(text[: found + len(header)]) else None
        asked = self._template.render(chat.messages[:turn], chat.tools, prompt=True)
        common = _common_length(asked, text, as_last)
        if common == len(asked):
            return common
        # Some templates ask in other words than they write: they open a <think> that the answer then lacks.
        before = self._template.render(chat.messages[:turn], chat.tools).rstrip()
        return common if common >= len(before) and text.startswith(before) else None

    def _through_answer(
        self, answer: str, text: str, as_last: str, floor: int, planted: Sequence[Span], content: Span | None
    ) -> Span | None:
        """The turn whose answer stands in both renderings, followed by the same stop token.

        The second rendering has nothing behind this turn: without it the header of a next turn could pass for a stop
        token.
        """
        for spelling in dict.fromkeys(filter(None, (answer, _without_thinking(answer)))):
            # A request that is longer than the header may have matched the answer's own first characters.
            spoken = self._find_answer(text, content[0] if content else floor, spelling)
            alone = self._find_answer(as_last, min(floor, content[0]) if content else floor, spelling)
            if spoken is None or alone is None or spoken[1][1] != alone[1][1]:
                continue
            begin, stop = spoken
            start = min(floor, begin)
            header = [w for w in self._words.special.finditer(text, start, begin) if not inside(w.start(), planted)]
            if inside(stop.start(1), planted) or any(word[0] == stop[1] for word in header):
                continue
            # Templates that ignore the request for an answer write the header inside the turn; it is not the answer's.
            return (begin if header else start), stop.end(1)
        return None

    def _through_calls(self, text: str, as_last: str, floor: int, planted: Sequence[Span]) -> Span | None:
        """A turn with tool calls: all the template writes for it, through the last control word that ends it."""
        words = [w for w in self._words.special.finditer(as_last, floor) if not inside(w.start(), planted)]
        for word in reversed(words):
            rest = self._words.special.sub("", as_last[word.end() :])
            if not rest.strip() and text.startswith(as_last[: word.end()]):
                return floor, word.end()
        return None

    def _find_answer(self, rendering: str, start: int, answer: str) -> tuple[int, re.Match[str]] | None:
        """Where the answer stands with a token of the template's directly behind it, and the match of that token."""
        begin = rendering.find(answer, start)
        while begin >= 0:
            if stop := self._words.added_next.match(rendering, begin + len(answer)):
                return begin, stop
            begin = rendering.find(answer, begin + 1)
        return None

    def _through_stop(self, text: str, span: Span, planted: Sequence[Span]) -> Span | None:
        """The span without the whitespace behind its stop token; None if it does not end with one."""
        start, end = span[0], span[0] + len(text[slice(*span)].rstrip())
        stop = self._words.added_at_end.search(text, start, end)
        return None if stop is None or inside(stop.start(), planted) else (start, end)


def _answer(message: Message) -> str:
    return (message.get("content") or "").strip()


def _without_thinking(answer: str) -> str:
    # A template may write an answer without the thinking in front of it.
    return answer.rpartition("</think>")[2].strip()


def _with_marks(message: Message) -> Message | None:
    """The message with marks around its content, inside the whitespace a template may trim; None if it has none."""
    content: str = message.get("content") or ""
    core = content.strip()
    if not core or "tool_calls" in message:
        return None
    before, _, after = content.partition(core)
    return {**message, "content": f"{before}{OPEN}{core}{CLOSE}{after}"}


def _marked_spans(marked: str, text: str) -> list[Span] | None:
    """The spans between marks; None if the marked rendering without its marks is not the real one."""
    parts = _MARKS.split(marked)
    if "".join(parts) != text or "".join(_MARKS.findall(marked)) != (OPEN + CLOSE) * (len(parts) // 2):
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
