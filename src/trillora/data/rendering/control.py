"""Which texts are control: tokens that open or end a turn or call a tool. Content must not become one.

Control words are the tokenizer's special tokens, and the marks that the chat template writes. Many tokenizers do not
flag these marks as special. DeepSeek's `<｜User｜>` and Qwen's `<tool_response>` are ordinary added tokens in their
files, although they structure the conversation. The added tokens of a tokenizer, with examples from Qwen:

    special tokens   <|im_start|> <|im_end|>        content never becomes one
    marks            <tool_response> <tool_call>    content never becomes one, except the model's own (`render`)
    vocabulary       <|fim_prefix|>                 not written by the template: content may use it
"""
# ruff: noqa: RUF001, RUF002  (full-width bars in DeepSeek's tokens, typographic apostrophes)

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROLES = ("system", "developer", "user", "assistant", "tool")
Span = tuple[int, int]  # characters [start, end) of a rendered string
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")  # in a Jinja string
_PROSE = frozenset(" _▁'’-.,:;!?\"")  # signs in ordinary words such as "don't" and "e.g."


@dataclass(frozen=True)
class ControlWords:
    """Patterns for the spellings of control words."""

    special: re.Pattern[str]
    control: re.Pattern[str]  # special tokens and marks
    words: tuple[str, ...]  # all that `control` finds
    marks: frozenset[str]  # those that are not special
    added_next: re.Pattern[str]  # any added token after optional whitespace, as it may end a turn; it is group 1

    @staticmethod
    def of(special: Sequence[str], added: Sequence[str], template: str | None) -> ControlWords:
        marks = frozenset(template_marks(added, template) if template else ()) - set(special)
        words = (*dict.fromkeys(word for word in special if word), *sorted(marks))
        return ControlWords(
            special=any_of(special),
            control=any_of(words),
            words=words,
            marks=marks,
            added_next=re.compile(rf"\s*({any_of([w for w in (*added, *special) if w.strip()]).pattern})"),
        )


class Fragments:
    """Decides which texts could spell one of the words together with text before or after them."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(word for word in words if word)
        self._beginnings = {word[:n] for word in self._words for n in range(1, len(word))}
        self._ends = {word[n:] for word in self._words for n in range(1, len(word))}
        self._firsts, self._lasts = ({word[i] for word in self._words} for i in (0, -1))
        self._longest = max(map(len, self._words), default=0)

    def may_join(self, text: str) -> bool:
        """Called for every text. Most are decided fast: no first or last character of a word is near their ends."""
        if not text:
            return False
        if len(text) < self._longest:
            return any(text in word and text != word for word in self._words) or self.at_borders(text)
        tail = len(text) - self._longest
        return (
            any(text.find(character, tail) >= 0 for character in self._firsts)
            or any(text.find(character, 0, self._longest) >= 0 for character in self._lasts)
        ) and self.at_borders(text)

    def at_borders(self, text: str) -> bool:
        lengths = range(1, min(len(text), self._longest) + 1)
        return any(text[-n:] in self._beginnings or text[:n] in self._ends for n in lengths)


def template_marks(added: Iterable[str], template: str) -> list[str]:
    """The added tokens that a chat template may write: marks whose text is in its source.

    The template is not run. `'<|' + message['role'] + '|>'` writes `<|user|>`: a role in a word may be left out.
    """
    source = template + _ESCAPED.sub(lambda code: chr(min(int(code[1] or code[2] or code[3], 16), 0x10FFFF)), template)
    return [word for word in added if _is_mark(word) and (word in source or _has_role(word, source))]


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for all words, longest first as in the tokenizer; without words, it never matches."""
    ordered = sorted({word for word in words if word}, key=lambda word: (-len(word), word))
    return re.compile(f"(?:{'|'.join(map(re.escape, ordered))})" if ordered else r"(?!)")


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


def _is_mark(word: str) -> bool:
    """Whether a word has the form of a mark, such as `<think>` or `[INST]`: letters and a sign that prose lacks.

    Runs of spaces, newlines or digits, and words that extend a vocabulary, are text even if a template writes them.
    """
    return any(c.isalpha() for c in word) and any(not c.isalnum() and not c.isspace() and c not in _PROSE for c in word)


def _has_role(word: str, source: str) -> bool:
    around = (word.partition(role) for role in ROLES if role in word)
    return any(before and after and before in source and after in source for before, _, after in around)
