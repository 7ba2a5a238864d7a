"""Spellings of a tokenizer's special and added tokens: content must not become them, and they may end a turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # characters [start, end) of a rendered string


@dataclass(frozen=True)
class ControlWords:
    """Patterns for the spellings of special tokens, and of all added tokens, which may end a turn.

    Added tokens that are not special (`<think>`, Gemma's runs of newlines) are vocabulary that content may use.
    """

    special: re.Pattern[str]
    added_next: re.Pattern[str]  # after optional whitespace; the token is group 1

    @staticmethod
    def of(special: Sequence[str], added: Sequence[str]) -> ControlWords:
        any_added = _any_of([word for word in (*added, *special) if word.strip()])
        return ControlWords(special=re.compile(_any_of(special)), added_next=re.compile(rf"\s*({any_added})"))


def inside(position: int, spans: Sequence[Span]) -> bool:
    return any(start <= position < end for start, end in spans)


def odd_spans(parts: Sequence[str]) -> list[Span]:
    """Where the second, fourth, ... of these parts are in the joined text; re.split returns matches at these places."""
    ends = itertools.accumulate(map(len, parts))
    return [(end - len(part), end) for part, end in zip(parts, ends, strict=True)][1::2]


def common_length(text: str, other: str) -> int:
    """The length of the longest common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return len(text) if other.startswith(text) else next(differing, min(len(text), len(other)))


def _any_of(words: Sequence[str]) -> str:
    # Longest first, as in the tokenizer; without words, a pattern that never matches.
    ordered = sorted({word for word in words if word}, key=lambda word: (-len(word), word))
    return f"(?:{'|'.join(map(re.escape, ordered))})" if ordered else r"(?!)"
