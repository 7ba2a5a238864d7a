"""The model's thinking in an answer, and what `data.thinking` does with it.

    {"role": "assistant", "reasoning_content": "3 + 3", "content": "6"}   or   "<think>3 + 3</think>6" as the content

A template of Qwen 3's kind writes both like the first line, and an answer without thinking like the second. The part
under the line is the block: the marks, what is between them, and the white space after them.

    <|im_start|>assistant\\n<think>\\n3 + 3\\n</think>\\n\\n6<|im_end|>
                           ------------------------------
    <|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n6<|im_end|>
                           -------------------------

`auto` trains on the first block and leaves the second one out of the loss: it is the template's text, not the row's.
`train` trains on both and `mask` on neither. `drop` removes the thinking from the row, so only empty blocks are left.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trillora.data.rendering.control import Span
from trillora.data.rendering.formats import REASONING_KEYS
from trillora.data.rows import BadRow, Chat, Example, Labelled, Message, Pair, Preference

TRAINED = "The thinking of an answer is trained on (data.thinking: mask or drop changes that)"
MASKED = "The thinking of an answer is read, but not trained on (data.thinking: mask)"
DROPPED = "The thinking of an answer was removed (data.thinking: drop)"
EMPTY = "The empty thinking block before an answer is not trained on"
EMPTY_TRAINED = "The empty thinking block before an answer is trained on (data.thinking: train)"
SWITCH = "enable_thinking"  # the argument by which templates write an empty block into prompts
EMPTY_WITH_SWITCH = f"{EMPTY}; to have it in prompts too, set data.template_arguments: {{{SWITCH}: false}}"
FOUND = frozenset((TRAINED, MASKED, DROPPED, EMPTY_TRAINED))  # remarks of rows in which the option has an effect
_SPACE = re.compile(r"\s*")
_MARK_AT_END = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")
_FAR = 80  # characters before an answer that may hold a mark and white space


class Marks(NamedTuple):
    """What is written before and after the thinking."""

    opening: str
    closing: str


USUAL = Marks("<think>", "</think>")


class Block(NamedTuple):
    """Thinking at the start of an answer: characters [start, end) of the rendered text."""

    start: int
    end: int
    is_empty: bool


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks that a template writes, and the usual ones, which many data sets have in the text of an answer."""

    all: tuple[Marks, ...] = (USUAL,)
    has_switch: bool = False  # the template can write an empty block into prompts

    def block(self, text: str, span: Span) -> Block | None:
        """The thinking that an answer begins with. Its opening mark may be before the answer, in the prompt."""
        start, end = span
        begin = _SPACE.match(text, start, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        for marks in self.all:
            closes = text.find(marks.closing, start, end)
            if closes < 0:
                continue
            is_inside = text.startswith(marks.opening, begin)
            inside = begin + len(marks.opening) if is_inside else start
            is_open = is_inside or text[max(start - _FAR, 0) : start].rstrip().endswith(marks.opening)
            # Programs that sample from a prompt with an opening mark often store "thoughts</think>answer".
            lacks_opening = marks == USUAL and text.find(marks.opening, start, closes) < 0
            if is_open or lacks_opening:
                stop = _SPACE.match(text, closes + len(marks.closing), end).end()  # type: ignore[union-attr]
                return Block(start, stop, not text[inside:closes].strip())
        return None

    def blocks(self, text: str, spans: Sequence[Span]) -> list[Block]:
        found = (self.block(text, span) for span in spans)
        return [block for block in found if block is not None]

    def remarks(self, blocks: Sequence[Block], mode: str) -> list[str]:
        """What to say about a row with these blocks."""
        empty = EMPTY_TRAINED if mode == "train" else EMPTY_WITH_SWITCH if self.has_switch else EMPTY
        full = MASKED if mode == "mask" else TRAINED
        return list(dict.fromkeys(empty if block.is_empty else full for block in blocks))


def marks_around(text: str, start: int, thought: str, answer: str, control: re.Pattern[str]) -> Marks | None:
    """The marks around a thought, in an answer that begins at `start`; None if the template does not write it."""
    begins = text.find(thought, start)
    ends = begins + len(thought)
    answers = text.find(answer, ends)
    if begins < 0 or answers < 0:
        return None
    opening, closing = text[start:begins].strip(), text[ends:answers].strip()
    if not opening and (mark := _MARK_AT_END.search(text[:begins])):  # the generation prompt has it
        opening = mark[0].rstrip()
    if not opening or not closing:
        return None
    word = control.match(closing)
    return Marks(opening, word[0] if word else closing.split()[0])


def untrained(blocks: Sequence[Block], mode: str) -> list[Block]:
    """The blocks that are out of the loss."""
    return [block for block in blocks if mode == "mask" or (block.is_empty and mode != "train")]


def outside(spans: Sequence[Span], blocks: Sequence[Block]) -> tuple[Span, ...]:
    """The spans without the blocks that they begin with."""
    ends = {block.start: block.end for block in blocks}
    return tuple((ends.get(start, start), end) for start, end in spans if ends.get(start, start) < end)


def thought_of(message: Message) -> str:
    """The thinking of an assistant turn; empty if it has none."""
    for key in REASONING_KEYS:
        if thought := str(message.get(key) or "").strip():
            return thought
    content = message.get("content") or ""
    block = ThinkingMarks().block(content, (0, len(content)))
    if block is None:
        return ""
    thought = content[: block.end].strip()
    return str(thought).removeprefix(USUAL.opening).removesuffix(USUAL.closing).strip()


def check_found(chat: Chat, turns: Sequence[int], text: str, spans: Sequence[Span], marks: ThinkingMarks) -> None:
    """Refuses thinking that is in the span of an answer, but not in a block: it would be trained on."""
    for turn, span in zip(turns, spans, strict=True):
        thought, block = thought_of(chat.messages[turn]), marks.block(text, span)
        if not thought or (block is not None and not block.is_empty):
            continue
        answer = _without_block(chat.messages[turn].get("content") or "")  # it may have the words of the thought
        if text.count(thought, *span) > answer.count(thought):
            what = f"data.thinking: mask, but the thinking of turn {turn + 1} is not at the start of its answer."
            raise BadRow(what, "use a chat template that writes it there between two marks; or set data.thinking: drop")


def dropped(example: Example) -> tuple[Example, bool]:
    """The example without any thinking, and whether it had some. A text has no answers, so it stays."""
    match example:
        case Chat() | Pair():
            return _without_thoughts(example)
        case Labelled(answer, is_good):
            answer, had_some = _without_thoughts(answer)
            return Labelled(answer, is_good), had_some
        case Preference(chosen, rejected):
            (chosen, first), (rejected, second) = _without_thoughts(chosen), _without_thoughts(rejected)
            return Preference(chosen, rejected), first or second
    return example, False


def _without_thoughts(side: Chat | Pair) -> tuple[Chat | Pair, bool]:
    if isinstance(side, Pair):
        thinks_in_text = bool(thought_of({"content": side.completion}))
        return (Pair(side.prompt, _without_block(side.completion)) if thinks_in_text else side), thinks_in_text
    thinks = [message["role"] == "assistant" and bool(thought_of(message)) for message in side.messages]
    messages = [
        _without_thought(message, number) if does else message
        for number, (message, does) in enumerate(zip(side.messages, thinks, strict=True), start=1)
    ]
    return dataclasses.replace(side, messages=messages), any(thinks)


def _without_thought(message: Message, number: int) -> Message:
    kept = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    if content := kept.get("content"):
        kept["content"] = _without_block(content)
        if not kept["content"].strip() and "tool_calls" not in kept:
            what = f"The answer in turn {number} is all thinking, which data.thinking: drop removes."
            raise BadRow(what, "complete the answer, or remove the row")
    return kept


def _without_block(answer: str) -> str:
    block = ThinkingMarks().block(answer, (0, len(answer)))
    return answer if block is None else answer[block.end :]
