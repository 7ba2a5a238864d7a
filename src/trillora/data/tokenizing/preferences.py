"""Pairs and labelled answers as documents.

A pair is one document: the chosen side and the rejected side, one after the other. Both begin with the same tokens,
the prompt. Example, with trained tokens in brackets and a prompt of three tokens:

    chosen    1 5 6 [7 2]                 document  1 5 6 [7 2] 1 5 6 [8 9 2]
    rejected  1 5 6 [8 9 2]               first 5, prompt 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trillora.data.rendering.preferences import DO_SAME, SAME
from trillora.data.rendering.render import RenderedRow
from trillora.data.rows import BadRow
from trillora.data.tokenizing.encode import EncodedRow, Encoder, TokenizedDocument


def encode_rows(encoder: Encoder, rows: Sequence[RenderedRow | BadRow]) -> list[EncodedRow]:
    """The documents of all rows, also of pairs and labelled answers; bad rows stay."""
    special = {i: row for i, row in enumerate(rows) if isinstance(row, RenderedRow) and row.prompt_digest is not None}
    rejected = [row.rejected for row in special.values() if row.rejected is not None]
    documents = encoder.encode([*rows, *rejected])
    others = iter(documents[len(rows) :])
    for i, row in special.items():
        documents[i] = _with_prompt(documents[i]) if row.rejected is None else _joined(documents[i], next(others))
    return documents[: len(rows)]


def _joined(chosen: EncodedRow, rejected: EncodedRow) -> EncodedRow:
    """Both sides as one document. If one side joins the end of the prompt and the start of its answer to one token, the
    prompt of both ends before it."""
    chosen, rejected = _with_prompt(chosen), _with_prompt(rejected)
    if isinstance(chosen, BadRow) or isinstance(rejected, BadRow):
        return chosen if isinstance(chosen, BadRow) else rejected
    if np.array_equal(chosen.tokens, rejected.tokens):
        return BadRow(f"{SAME} as tokens.", DO_SAME)
    end = min(chosen.prompt, rejected.prompt)
    differing = np.flatnonzero(chosen.tokens[:end] != rejected.tokens[:end])
    prompt = int(differing[0]) if len(differing) else end
    if prompt == 0:
        return BadRow("The chosen and the rejected answer have no token of the prompt in common.", "write a prompt")
    for side in (chosen, rejected):
        side.supervised[prompt : side.prompt] = True
    return TokenizedDocument(
        np.concatenate([chosen.tokens, rejected.tokens]),
        np.concatenate([chosen.supervised, rejected.supervised]),
        first=len(chosen),
        prompt=prompt,
    )


def _with_prompt(document: EncodedRow) -> EncodedRow:
    """The document with the length of its prompt: everything before the first target, or before untrained thinking."""
    if isinstance(document, BadRow):
        return document
    supervised = document.supervised.copy()
    supervised[0] = False  # nothing predicts the first token
    if not supervised.any():
        return BadRow("An answer of this row has no token to train on.", "remove the row, or complete the answer")
    return dataclasses.replace(document, supervised=supervised, prompt=document.prompt or int(np.argmax(supervised)))
