"""Messages between this process and its workers: lists of byte strings over a pipe."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import BinaryIO

_HEADER = struct.Struct("<IQ")  # number of parts, bytes of all parts with their lengths
_LENGTH = struct.Struct("<I")  # of one part


def write_frame(stream: BinaryIO, parts: Sequence[bytes]) -> None:
    """Write a list of byte strings, each preceded by its length."""
    frame = b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))
    stream.write(_HEADER.pack(len(parts), len(frame)) + frame)
    stream.flush()


def read_frame(stream: BinaryIO) -> list[bytes] | None:
    """Read what `write_frame` wrote; None at the end of the stream, even in the middle of a frame."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_parts, size = _HEADER.unpack(header)
    frame = stream.read(size)
    if len(frame) < size:
        return None
    parts, position = [], 0
    for _ in range(num_parts):
        (length,) = _LENGTH.unpack_from(frame, position)
        parts.append(frame[position + 4 : position + 4 + length])
        position += 4 + length
    return parts
