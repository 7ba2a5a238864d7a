"""From a rendered string to tokens, such that only the template, never the content, can write a control token.

A `Script` is a rendered string with two kinds of character spans: `supervised` (what the loss sees) and `planted`
(content that happens to spell a special token). A string without planted spans is tokenised whole, exactly as the
tokenizer itself would. A planted spelling is cut after its first character and the parts are tokenised apart, so that
none of them matches; what follows the cut is tokenised behind a special token, because some tokenizers treat the
beginning of a string differently (they put a space there) from its middle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trillora.errors import TrilloraError

Tokenizer = Any  # a transformers PreTrainedTokenizerFast; this layer does not import transformers
Span = tuple[int, int]  # characters [start, end) of a rendered string


@dataclass(frozen=True)
class Script:
    """A rendered document before tokenising. Spans are in order and do not overlap."""

    text: str
    supervised: tuple[Span, ...]
    planted: tuple[Span, ...]
    where: str
    head: tuple[int, ...] = ()  # tokens around the text that no text can spell, trained like any other
    tail: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """A tokenised document. The loss sees token i if `supervised[i]`; the first token is never a target."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    where: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        """How many targets this document gives: supervised tokens that have a token before them."""
        return int(np.count_nonzero(self.supervised[1:]))


@dataclass(frozen=True)
class ControlTokens:
    """A tokenizer's own words: `special` is what content must never become, `added` what may end a turn.

    Added tokens not declared special (`<think>`, Gemma's runs of newlines) are vocabulary that content may use.
    """

    spelling: dict[int, str]  # of the special tokens
    watched_ids: NDArray[np.int32]  # the same without the unknown token, which any text may become
    special: re.Pattern[str]
    added_at_end: re.Pattern[str]
    added_next: re.Pattern[str]  # behind whitespace; the token is group 1
    anchor: str  # a special token that leaves the text after it alone; "" if there is none

    @staticmethod
    def of(tokenizer: Tokenizer) -> ControlTokens:
        added = tokenizer.added_tokens_decoder
        spelling = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        spelling |= {id_: token.content for id_, token in added.items() if token.special}
        anchors = (token.content for token in added.values() if token.special and _leaves_text_alone(token))
        words = [token.content for token in added.values() if token.content.strip()]
        any_added = _any_of([*words, *spelling.values()])
        return ControlTokens(
            spelling=spelling,
            watched_ids=np.array([i for i in spelling if i != tokenizer.unk_token_id], np.int32),
            special=re.compile(_any_of(list(spelling.values()))),
            added_at_end=re.compile(any_added + r"\Z"),
            added_next=re.compile(rf"\s*({any_added})"),
            anchor=next(anchors, ""),
        )


def encode(scripts: Sequence[Script], tokenizer: Tokenizer, control: ControlTokens) -> list[Rendered]:
    """Tokenise all scripts in one call. The tokenizer adds no BOS or EOS: the script has all it wants."""
    pieces: list[str] = []
    starts: list[list[int]] = []
    for script in scripts:
        bounds = [0, *_cuts(script, control), len(script.text)]
        starts.append(bounds[:-1])
        pieces += [script.text[a:b] if a == 0 else control.anchor + script.text[a:b] for a, b in pairwise(bounds)]
    encoded = tokenizer(
        pieces,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    rendered, first = [], 0
    for script, script_starts in zip(scripts, starts, strict=True):
        ids_parts, offsets_parts = [], []
        for number, start in enumerate(script_starts, start=first):
            ids = np.array(encoded["input_ids"][number], np.int32)
            offsets = np.array(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
            if start and control.anchor:
                ids, offsets = ids[1:], offsets[1:] - len(control.anchor)
            ids_parts.append(ids)
            offsets_parts.append(offsets + start)
        first += len(script_starts)
        rendered.append(_mark(script, np.concatenate(ids_parts), np.concatenate(offsets_parts), control))
    return rendered


def _mark(script: Script, ids: NDArray[np.int32], offsets: NDArray[np.int64], control: ControlTokens) -> Rendered:
    """Supervise each token that holds a character of a supervised span; refuse control tokens made by content."""
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # a token may cover no character
    for index in np.flatnonzero(np.isin(ids, control.watched_ids)):
        # A special token may take the spaces around it (lstrip, rstrip), hence strip.
        spelled = script.text[offsets[index, 0] : offsets[index, 1]].strip()
        planted = any(starts[index] < end and ends[index] > start for start, end in script.planted)
        if planted or spelled != control.spelling[int(ids[index])]:
            raise TrilloraError(
                f"The text {spelled!r} would become the control token {control.spelling[int(ids[index])]!r}.",
                where=script.where,
                do="reword that text: this tokenizer has no way to write it as ordinary text",
            )
    supervised = np.zeros(len(ids), np.bool_)
    for start, end in script.supervised:
        supervised |= (starts < end) & (ends > start)
    tokens = np.concatenate([np.array(script.head, np.int32), ids, np.array(script.tail, np.int32)])
    mask = np.pad(supervised, (len(script.head), len(script.tail)), constant_values=True)
    return Rendered(tokens, mask, script.where)


def _cuts(script: Script, control: ControlTokens) -> list[int]:
    """Where to cut: behind the first character of every spelling that begins in planted text, overlapping ones too."""
    begins = (i for start, end in script.planted for i in range(start, end) if control.special.match(script.text, i))
    return [i + 1 for i in begins if i + 1 < len(script.text)]


def _any_of(words: Sequence[str]) -> str:
    # Longest first, as the tokenizer itself prefers; with no word at all, a pattern that never matches.
    ordered = sorted({word for word in words if word}, key=lambda word: (-len(word), word))
    return f"(?:{'|'.join(map(re.escape, ordered))})" if ordered else r"(?!)"


def _leaves_text_alone(token: Any) -> bool:
    return not (token.rstrip or token.single_word or token.normalized)
