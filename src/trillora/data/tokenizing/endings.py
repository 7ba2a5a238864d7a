"""Pairs and labelled answers that do not end as an answer should, found while they are tokenized.

The end of every answer gets the stop token of the chat template, or EOS, so a model learns to stop wherever an answer
stops. That is wrong if the answer was cut off where it was made. Two signs of that do not depend on the language:

    chosen "Lima.<|im_end|>", rejected "Peru is a country in"    only one answer has its stop token, as text
    120 answers end in the middle of a sentence, all of them with 256 tokens, and no answer is longer

A stop token in the text of both answers is a defect too: it is ordinary text there, and the template adds the real one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trillora.data.rendering.control import any_of
from trillora.data.rendering.render import RenderedRow
from trillora.data.tokenizing.encode import TokenizedDocument

SHORTEST_CUT = 32  # tokens or characters: shorter answers often have equal lengths
LEAST_CUT = 3  # different answers of the greatest length that end in the middle of a sentence
MOST_OPEN = 0.5  # share of the shorter answers that may end so too, or else these answers are no sentences
_TAIL = 200  # characters at the end of an answer that may hold its stop token
_MID_SENTENCE = frozenset(",;-([{/&")  # and letters and digits


class Ending(NamedTuple):
    """A defect that some rows have. JSON in a store."""

    what: str
    do: str
    num_rows: int
    first: int  # row of the store


@dataclass
class _Lengths:
    """How many answers have each length, and which of them end in the middle of a sentence."""

    complete: Counter[int] = field(default_factory=Counter)
    open: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)  # with an answer that is open
    first: dict[int, int] = field(default_factory=dict)  # the first of these rows
    texts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # hashes of a few different ones

    def add(self, row: int, answers: Sequence[tuple[int, bool, str]]) -> None:
        """Length, whether it is open, and the text, of each answer of a row."""
        for length, is_open, text in answers:
            (self.open if is_open else self.complete)[length] += 1
            if is_open and len(self.texts[length]) < LEAST_CUT:
                self.texts[length].add(hash(text))
        for length in {length for length, is_open, _ in answers if is_open}:
            self.rows[length] += 1
            self.first.setdefault(length, row)

    def limit(self) -> int | None:
        """The length at which answers were cut off; None if nothing shows one."""
        longest = max([*self.complete, *self.open], default=0)
        num_shorter = self.complete.total() + self.open.total() - self.complete[longest] - self.open[longest]
        num_open = self.open.total() - self.open[longest]
        are_cut = len(self.texts[longest]) >= LEAST_CUT and self.open[longest] > self.complete[longest]
        is_prose = num_shorter > 0 and num_open <= MOST_OPEN * num_shorter
        return longest if longest >= SHORTEST_CUT and are_cut and is_prose else None


class Endings:
    """Collects the ends of all answers of a store."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: the spellings of the tokenizer's special and added tokens."""
        self._word_at_end = re.compile(rf"{any_of(words).pattern}\s*\Z")
        self._stops: dict[str, list[int]] = {"one": [], "all": []}  # number of rows, and the first
        self._lengths = {"tokens": _Lengths(), "characters": _Lengths()}

    def add(self, row: int, rendered: RenderedRow, document: TokenizedDocument) -> None:
        """The next row of the store. A row without a preference is left out."""
        sides = [side for side in (rendered, rendered.rejected) if side is not None and side.supervised]
        if rendered.prompt_digest is None or len(sides) != len(document.parts):
            return
        ends = [self._end_of(side) for side in sides]
        spelled = [end in {stop for _, stop in side.planted} for side, end in zip(sides, ends, strict=True)]
        if any(spelled):
            found = self._stops["all" if all(spelled) else "one"]
            found[:] = [found[0] + 1, found[1]] if found else [1, row]
        starts = [side.supervised[0][0] for side in sides]
        texts = [side.text[start:end] for side, start, end in zip(sides, starts, ends, strict=True)]
        is_open = [_is_mid_sentence(text) for text in texts]
        tokens = [int(np.flatnonzero(part.supervised)[-1]) - part.prompt for part in document.parts]  # without the stop
        self._lengths["tokens"].add(row, list(zip(tokens, is_open, texts, strict=True)))
        self._lengths["characters"].add(row, list(zip(map(len, texts), is_open, texts, strict=True)))

    def _end_of(self, side: RenderedRow) -> int:
        """Where the text of the last answer ends: before the stop token that the chat template wrote."""
        start, end = side.supervised[-1]
        tail = max(start, end - _TAIL)
        text = side.text[tail:end]
        if side.kind == "chat" and (word := self._word_at_end.search(text)):
            text = text[: word.start()]
        return tail + len(text.rstrip())

    def found(self) -> list[Ending]:
        """Every defect with the number of its rows."""
        endings = []
        if one := self._stops["one"]:
            what = (
                "One answer of the pair ends with the text of a stop token and the other one does not: it was cut off"
            )
            endings.append(Ending(what, "complete the answers that were cut off, or remove these pairs", *one))
        if all_ := self._stops["all"]:
            what = "The answer ends with the text of a stop token, which is ordinary text, before the real one"
            endings.append(Ending(what, "remove that text from the ends of the answers", *all_))
        limits = {unit: limit for unit, each in self._lengths.items() if (limit := each.limit()) is not None}
        if limits:
            unit = max(limits, key=lambda unit: self._lengths[unit].rows[limits[unit]])
            limit = limits[unit]
            lengths = self._lengths[unit]
            what = f"An answer was cut off: it ends in the middle of a sentence at {limit:,} {unit}, and none is longer"
            do = "make the answers again with a higher limit, or remove these rows"
            endings.append(Ending(what, do, lengths.rows[limit], lengths.first[limit]))
        return endings


def _is_mid_sentence(text: str) -> bool:
    return text[-1:].isalnum() or text[-1:] in _MID_SENTENCE
