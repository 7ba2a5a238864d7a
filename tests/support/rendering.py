"""Renders single rows in this process, for comparison with the tokenizer's own output."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from trillora.data.prepare import DataOptions, Dataset, Source, prepare, render_settings
from trillora.data.rendering.render import Renderer
from trillora.data.rows import BadRow
from trillora.data.tokenizing.encode import Encoder, TokenizedDocument
from trillora.errors import TrilloraError


@functools.cache
def _encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


def render(row: dict[str, Any], tokenizer: Any, format: str, **options: Any) -> TokenizedDocument:
    """The tokens of a row. A bad row raises the error that users would see."""
    encoder = _encoder(tokenizer)
    settings = render_settings(DataOptions(sources=(), **options), tokenizer, encoder)
    document: TokenizedDocument | BadRow
    try:
        rendered = Renderer(settings).render(json.dumps(row).encode(), format)
        document = encoder.encode([rendered])[0]
    except BadRow as error:
        document = error
    if isinstance(document, BadRow):
        raise TrilloraError(document.what, do=document.do)
    return document


def render_chat(messages: Any, tokenizer: Any, train_on: str = "assistant", **row: Any) -> TokenizedDocument:
    return render({"messages": messages, **row}, tokenizer, "messages", train_on=train_on)


def render_text(text: str, tokenizer: Any) -> TokenizedDocument:
    return render({"text": text}, tokenizer, "text")


def load(path: Path | str, tokenizer: Any, cache: Path, sequence_length: int = 64, **options: Any) -> Dataset:
    """Prepare a file with one worker."""
    chosen = dataclasses.replace(DataOptions((Source(str(path)),)), **options)
    return prepare(chosen, tokenizer, cache, sequence_length=sequence_length, num_workers=1)
