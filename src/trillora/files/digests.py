"""SHA-256 digests, as 64 hexadecimal digits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 22  # bytes


def bytes_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def text_digest(text: str) -> str:
    """Of the UTF-8 bytes; a lone surrogate, which data files may contain, counts as its three bytes."""
    return bytes_digest(text.encode("utf-8", "surrogatepass"))


def json_digest(value: object) -> str:
    """Of a JSON value, independent of the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True))


def file_digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return stream_digest(stream)


def stream_digest(stream: BinaryIO) -> str:
    """Of the bytes up to the end. Remote files have no buffer that hashlib.file_digest could use."""
    digest = hashlib.sha256()
    while block := stream.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
