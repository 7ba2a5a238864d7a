"""The folder for files that Trillora can recreate: converted models, tokenized data, compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$TRILLORA_CACHE, else ~/.cache/trillora."""
    chosen = os.environ.get("TRILLORA_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "trillora"
