r"""Finds the assistant's answers in a rendered conversation: the characters that are trained.

A ChatML template renders the conversation

    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]

as

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n

The answer is the span (52, 68), `Hello!<|im_end|>`. It starts after the header `<|im_start|>assistant\n`, which belongs
to the prompt at generation, and ends after the stop token, which the model must learn to write. The newline after the
stop token is not trained.

Three methods find such spans. Each checks its result against the full rendering, character by character. A
conversation for which they fail is refused: a span is never guessed. The sentinels are two noncharacters, written
« and » here.

1. Generation marks. A template that has `{% generation %}` is rendered with sentinels in place of these marks:

       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>»\n

   The marks are used if there is one pair per answer and each pair ends with a stop token.

2. Sentinels around content. The conversation is rendered once more with sentinels around the content of every turn:

       <|im_start|>user\n«Hi»<|im_end|>\n<|im_start|>assistant\n»Hello!«<|im_end|>\n

   This shows what the template writes between two contents: `<|im_end|>\n<|im_start|>assistant\n` before the answer
   and `<|im_end|>\n` after it. How many characters of each belong to the span (0 and 10) is found by method 3 and
   cached, so that method 3 runs once per such text.

3. Prefixes. The turns before the answer are rendered with `add_generation_prompt`; the span starts at its end:

       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n

   The stop token is the first special token after the answer. It must be the same when the conversation ends with this
   turn, so that the header of a next turn is not mistaken for it. This takes several renderings per turn. Apart from
   filling the cache of method 2, it is used for conversations with tool calls, or with content that the template
   changes, such as thinking that it leaves out. Texts are compared only from the end of the turn before the answer:
   some templates write tools, system text or thinking at the last question, wherever that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from trillora.data.rendering.control import ControlWords, Span, common_length, inside, odd_spans
from trillora.data.rendering.sandbox import CLOSE, OPEN, ChatTemplate
from trillora.data.rendering.thinking import SWITCH, USUAL, ThinkingMarks, marks_around
from trillora.data.rows import BadRow, Chat, Message

_AROUND = OPEN + CLOSE
_SENTINELS = re.compile(f"[{OPEN}{CLOSE}]")
_MAX_CACHED = 1000  # texts around answers; with thinking, every one is different
_THOUGHT, _ANSWER = "a thought 1", "an answer 2"  # texts of an example, to be found in its rendering


class AnswerFinder:
    """Finds answers in the renderings of one chat template, and caches what it learns about the template."""

    def __init__(self, template: ChatTemplate, words: ControlWords) -> None:
        self.template = template
        self._words = words
        self._special_at_end = re.compile(f"(?:{words.special.pattern})\\Z")
        self._leads: dict[str, int] = {}  # text before an answer -> how many characters at its end are trained
        self._stops: dict[str, int] = {}  # text after an answer -> how many characters at its start are trained

    def find(self, chat: Chat, text: str, planted: Sequence[Span], turns: Sequence[int]) -> tuple[Span, ...]:
        """One span of `text`, the full rendering, for each of the given assistant turns."""
        if self.template.has_marks and (spans := self._by_own_marks(chat, text, planted)):
            return tuple(spans[turn] for turn in turns)
        contents = self._contents(chat, text)
        if contents is None:
            return tuple(self._by_prefix(chat, turn, text, planted) for turn in turns)
        return tuple(self._by_neighbours(chat, turn, text, planted, contents) for turn in turns)

    @cached_property
    def thinking(self) -> ThinkingMarks:
        """The marks that the template writes around the thinking of an answer, found in an example."""
        question: Message = {"role": "user", "content": "?"}
        messages = [question, {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}]
        own = None
        try:
            text = self.template.render(messages, None)
            ((start, _),) = self.find(Chat(messages), text, (), [1])
            own = marks_around(text, start, _THOUGHT, _ANSWER, self._words.control)
        except BadRow:  # a template that refuses this example: its rows may be others
            pass
        return ThinkingMarks(tuple(dict.fromkeys((own or USUAL, USUAL))), self.template.reads(SWITCH))

    def _by_own_marks(self, chat: Chat, text: str, planted: Sequence[Span]) -> dict[int, Span] | None:
        """Method 1: the span of every assistant turn; None if the template's marks cannot be used."""
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        rendered = self.template.render(chat.messages, chat.tools, marked=True)
        marked = _marked_spans(rendered, text, _AROUND * len(answers))
        if marked is None:
            return None
        ended = [self._through_stop(text, span, planted) for span in marked]
        return {turn: span for turn, span in zip(answers, ended, strict=True) if span} if all(ended) else None

    def _contents(self, chat: Chat, text: str) -> list[Span] | None:
        """Method 2: where the content of each turn is; None unless the template writes all contents unchanged."""
        # Reversed around answers: a template may write the system text after a first answer, which this detects.
        marks = [_AROUND[::-1] if message["role"] == "assistant" else _AROUND for message in chat.messages]
        marked = [_with_marks(message, pair) for message, pair in zip(chat.messages, marks, strict=True)]
        if any(message is None for message in marked):
            return None
        rendered = self.template.render([message for message in marked if message], chat.tools)
        return _marked_spans(rendered, text, "".join(marks))

    def _by_neighbours(
        self, chat: Chat, turn: int, text: str, planted: Sequence[Span], contents: Sequence[Span]
    ) -> Span:
        """Method 2: the answer's content, extended by what is cached for the template's text on both sides."""
        begin, end = contents[turn]
        before = text[contents[turn - 1][1] if turn else 0 : begin]
        after = text[end : contents[turn + 1][0] if turn + 1 < len(contents) else len(text)]
        if before not in self._leads or after not in self._stops:
            start, stop = self._by_prefix(chat, turn, text, planted)
            if turn == 0:  # the opening of a conversation is no evidence for later turns
                return start, stop
            if len(self._leads) > _MAX_CACHED or len(self._stops) > _MAX_CACHED:
                self._leads, self._stops = {}, {}
            self._leads[before], self._stops[after] = begin - start, stop - end
        return begin - self._leads[before], end + self._stops[after]

    def _by_prefix(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> Span:
        """Method 3: from the end of the generation prompt through the stop token."""
        start = self._end_of_header(chat, turn, text)
        if chat.messages[turn].get("tool_calls"):
            end = self._end_of_calls(chat, turn, text, planted)
            span = None if start is None or end is None or end <= start else (start, end)
        else:
            found = self._answer_with_stop(chat, turn, text, planted)
            # A generation prompt longer than the header may match the first characters of the answer as well.
            span = None if start is None or found is None else (min(start, found[0]), found[1])
        if span is None:
            stop = "then the end-of-turn token, inside {% generation %} marks"
            what = (
                f"The answer of turn {turn + 1}, followed by a stop token, was not found in the chat template's text."
            )
            raise BadRow(what, f"use a chat template that writes each answer unchanged, {stop}")
        return span

    def _end_of_header(self, chat: Chat, turn: int, text: str) -> int | None:
        """How far the turns before this one, rendered with a generation prompt, agree with the full text."""
        if turn == 0:
            # No turn before: the header is what a generation prompt adds to a question.
            question = [{"role": "user", "content": "?"}]
            prompted = self.template.render(question, None, prompt=True)
            header = prompted[common_length(prompted, self.template.render(question, None)) :]
            found = text.find(header) if header else -1
            return found + len(header) if found >= 0 else None
        before, start = chat.messages[:turn], 0
        closed = [*before[:-1], _closed(before[-1])]
        head, mark, tail = self.template.render([*closed, *chat.messages[turn:]], chat.tools).partition(CLOSE)
        if mark and head + tail == text:
            before, start = closed, len(head)

        def rest(messages: Sequence[Message], prompt: bool = False) -> str:
            """The rendering from `start` on."""
            rendering = self.template.render(messages, chat.tools, prompt=prompt)
            return rendering.partition(CLOSE)[2] if start else rendering

        written, prompted, unprompted = text[start:], rest(before, prompt=True), rest(before)
        common = common_length(prompted, written)
        if common < len(unprompted.rstrip()) or (common == len(prompted) != len(unprompted)):
            return start + common if common == len(prompted) else None
        # Some templates have a generation prompt that differs from the header they write (it opens a <think> that the
        # answer then lacks), some have none: the header is then read off a plain answer in this place.
        plain = {"role": "assistant", "content": f"{OPEN}!"}
        try:
            answered = rest([*before, plain, *chat.messages[turn + 1 :]])
        except BadRow:  # the template refuses a tool's result that follows no call
            answered = rest([*before, plain])
        if len(prompted) > len(unprompted):
            return start + min(common, common_length(prompted, answered))
        header = answered.partition(OPEN)[0]
        has_words = self._words.control.search(header, len(unprompted))
        return start + (common_length(header, written) if has_words else common)

    def _answer_with_stop(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> Span | None:
        """From the start of the answer through its stop token, which must be the same if this turn is the last.

        Without that check, the header of a next turn could be mistaken for a stop token.
        """
        marked = _with_marks(chat.messages[turn], _AROUND, _without_thinking)
        if marked is None:
            return None
        rendered = self.template.render(_replaced(chat.messages, turn, marked), chat.tools)
        spoken = _marked_spans(rendered, text, _AROUND)
        if spoken is None:
            return None
        alone = self.template.render([*chat.messages[:turn], marked], chat.tools).rpartition(CLOSE)[2]
        stop, stop_alone = self._stop(text, spoken[0][1]), self._stop(alone, 0)
        if stop is None or stop_alone is None or stop[1] != stop_alone[1] or inside(stop.start(1), planted):
            return None
        return spoken[0][0], stop.end(1)

    def _stop(self, rendering: str, start: int) -> re.Match[str] | None:
        """The first special token directly after an answer; if there is none, the first added token."""
        first = found = self._words.added_next.match(rendering, start)
        while found is not None and not self._words.special.fullmatch(found[1]):
            found = self._words.added_next.match(rendering, found.end())
        return found or first

    def _end_of_calls(self, chat: Chat, turn: int, text: str, planted: Sequence[Span]) -> int | None:
        """The end of the last control word that the template writes for a turn with tool calls.

        From a sentinel inside the calls on, the rendering that ends with this turn must agree with the full text.
        """
        for marked in (*_marks_in_calls(chat.messages[turn]), chat.messages[turn]):
            rendered = self.template.render(_replaced(chat.messages, turn, marked), chat.tools)
            head, mark, tail = rendered.partition(CLOSE)
            if head + tail != text:
                continue
            alone = self.template.render([*chat.messages[:turn], marked], chat.tools)
            start, alone = (len(head), alone.partition(CLOSE)[2]) if mark else (0, alone)
            for word in reversed(list(self._words.special.finditer(alone))):
                if self._words.special.sub("", alone[word.end() :]).strip():
                    break
                if not inside(start + word.start(), planted) and text.startswith(alone[: word.end()], start):
                    return start + word.end()
        return None

    def _through_stop(self, text: str, span: Span, planted: Sequence[Span]) -> Span | None:
        """The span without the whitespace after its stop token; None if it does not end with one."""
        start, end = span[0], span[0] + len(text[slice(*span)].rstrip())
        # Special tokens only: an added token such as </tool_call> may be the end of the marks, but not of the turn.
        stop = self._special_at_end.search(text, start, end)
        return None if stop is None or inside(stop.start(), planted) else (start, end)


def _replaced(messages: Sequence[Message], turn: int, message: Message) -> list[Message]:
    return [*messages[:turn], message, *messages[turn + 1 :]]


def _without_thinking(answer: str) -> str:
    # A template may leave out the thinking in front of an answer.
    return answer.rpartition("</think>")[2].strip() or answer


def _with_marks(message: Message, marks: str, part: Callable[[str], str] = str) -> Message | None:
    """The message with sentinels around (the last part of) its content, inside whitespace a template may trim."""
    content: str = message.get("content") or ""
    core = part(content.strip())
    if not core or "tool_calls" in message:
        return None
    before, _, after = content.rpartition(core)
    return {**message, "content": f"{before}{marks[0]}{core}{marks[1]}{after}"}


def _closed(message: Message) -> Message:
    """The message with a sentinel after its content."""
    content: str = message.get("content") or ""
    core = content.rstrip()
    return {**message, "content": f"{core}{CLOSE}{content[len(core) :]}"}


def _marks_in_calls(message: Message) -> Iterator[Message]:
    """The message with a sentinel in its last call: after the name, or after the last text argument."""
    *calls, last = message["tool_calls"]
    function = last["function"]
    marked = [{**function, "name": function["name"] + CLOSE}]
    if isinstance(arguments := function["arguments"], dict):
        texts = [key for key, value in arguments.items() if isinstance(value, str)]
        marked += [{**function, "arguments": {**arguments, key: arguments[key] + CLOSE}} for key in texts[-1:]]
    for changed in marked:
        yield {**message, "tool_calls": [*calls, {**last, "function": changed}]}


def _marked_spans(marked: str, text: str, marks: str) -> list[Span] | None:
    """The spans between sentinels; None if they are not exactly `marks`, or the rest is not the real rendering."""
    parts = _SENTINELS.split(marked)
    if "".join(_SENTINELS.findall(marked)) != marks or "".join(parts) != text:
        return None
    return odd_spans(parts)
