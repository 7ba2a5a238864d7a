"""An example row for people: its text in pieces that are trained or not, shortened if it is long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trillora.data.rendering.control import common_length

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

MAX_CHARACTERS = 2400  # of a shortened example
MAX_PIECES = 40
MIN_PIECE = 60  # characters; shorter pieces are not cut


@dataclass(frozen=True)
class ExcerptPiece:
    """Consecutive tokens of a row that are all trained or all not, and all special or all not."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class Gap:
    """Text removed from a long example."""

    characters: int


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int], trained: Sequence[bool]) -> tuple[ExcerptPiece, ...]:
    """The decoded row, cut where `trained` or "is a special token" changes.

    A character may consist of several tokens. If a cut falls inside one, the character goes to the piece that holds its
    last token: the pieces always join to the decoded row.
    """
    specials = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    whole = decode(tokens)
    states = [(is_trained, token in specials) for token, is_trained in zip(tokens, trained, strict=True)]
    borders = [i for i in range(1, len(states)) if states[i] != states[i - 1]]
    pieces, start = [], 0
    anchor = (0, 0)  # token and character to decode from: tokenizers rarely join a special token to the text before it
    for first, end in pairwise([0, *borders, len(states)]):
        if states[first][1]:
            anchor = (first, start)
        stop = len(whole)
        if end < len(states):
            part = decode(tokens[anchor[0] : end])
            stop = anchor[1] + common_length(part, whole[anchor[1] : anchor[1] + len(part)])
            if stop < anchor[1] + len(part.rstrip("\ufffd")):  # this tokenizer does: decode from the start
                stop = common_length(decode(tokens[:end]), whole)
        if stop > start:
            pieces.append(ExcerptPiece(whole[start:stop], *states[first]))
            start = stop
    return tuple(pieces)


def shortened(pieces: Sequence[ExcerptPiece]) -> list[ExcerptPiece | Gap]:
    """The pieces with at most about MAX_CHARACTERS: the middle of long pieces and of a long list becomes a Gap."""
    half = MAX_PIECES // 2
    too_many = len(pieces) > MAX_PIECES
    kept = [*pieces[:half], *pieces[-half:]] if too_many else list(pieces)
    longest = MAX_CHARACTERS
    while longest > MIN_PIECE and sum(min(len(piece.text), longest) for piece in kept) > MAX_CHARACTERS:
        longest //= 2
    short: list[ExcerptPiece | Gap] = []
    for number, piece in enumerate(kept):
        if too_many and number == half:
            short.append(Gap(sum(len(removed.text) for removed in pieces[half:-half])))
        short += _without_middle(piece, longest)
    return short


def _without_middle(piece: ExcerptPiece, longest: int) -> list[ExcerptPiece | Gap]:
    if len(piece.text) <= longest:
        return [piece]
    half = longest // 2
    first, last = (dataclasses.replace(piece, text=text) for text in (piece.text[:half], piece.text[-half:]))
    return [first, Gap(len(piece.text) - 2 * half), last]
