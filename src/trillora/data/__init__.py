"""Rows to batches: from a JSONL file to packed arrays that train exactly the right tokens.

`sources` reads rows, `render` makes tokenised documents of them (`spans` finds the answers, `encode` keeps content from
becoming control tokens), `pack` shares rows among documents, `batches` serves them by step. NumPy and a tokenizer only.
"""

from __future__ import annotations

from pathlib import Path

from trillora.data.batches import Batches
from trillora.data.encode import Tokenizer
from trillora.data.pack import refuse_too_long, split_long
from trillora.data.render import render_rows
from trillora.data.sources import detect_format, read_jsonl

__all__ = ["Batches", "load_batches"]


def load_batches(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    train_on: str = "assistant",
    pack: bool = True,
    sequence_length: int,
    batch_size: int,
    seed: int,
) -> Batches:
    """All batches of one file. `format`: auto, messages or text; `train_on`: assistant or everything."""
    rows = list(read_jsonl(path))
    if format == "auto":
        format = detect_format(rows)
    documents = list(render_rows(rows, tokenizer, format=format, train_on=train_on))
    if format == "text":
        documents = split_long(documents, max(sequence_length, 2))
    else:
        refuse_too_long(documents, sequence_length)
    return Batches(
        documents,
        batch_size=batch_size,
        sequence_length=sequence_length,
        seed=seed,
        pack=pack,
        pad_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
