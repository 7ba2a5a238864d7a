"""Writes TensorBoard event files without the tensorboard package.

    EventFile(folder, first_step=1).scalar("train/loss", 7, 1.25)
    -> TFRecord of tensorflow.Event{step: 7, summary: {value: {tag: "train/loss", simple_value: 1.25}}}

A TFRecord is length, checksum of the length, data, checksum of the data; the checksums are masked CRC-32C. We write
only scalars, so few fields of the protocol buffer are needed.

Why not tensorboard's own EventFileWriter: every user would install it, and tensorboard 2.21 adds seven packages and
50 MB (grpcio, Pillow, protobuf, Werkzeug, ...) and takes 0.9 s to import; this module takes 0.01 s. The tests read our
files with tensorboard's own reader.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

VERSION = b"brain.Event:2"  # readers use the START entry below only with this version
FLUSH_SECONDS = 5.0
_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
_START = 1  # SessionLog.SessionStatus


def _checksums_of_bytes() -> Iterator[int]:
    for byte in range(256):
        checksum = byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (_POLYNOMIAL if checksum & 1 else 0)
        yield checksum


_TABLE = tuple(_checksums_of_bytes())


def crc32c(data: bytes) -> int:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: rotated and shifted, because a CRC of data that contains its own CRC is weak."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


class EventFile:
    """The event file of one process. Its START entry names the first step, and readers drop what earlier processes
    wrote for this and later steps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{_stamp(folder)}.trillora.{os.getpid()}"
        self._file = self.path.open("xb")
        self._flushed = time.monotonic()
        # A run that starts over also evaluates the base again, as step 0.
        start = first_step if first_step > 1 else 0
        self._write(_event(0, _field(3, _BYTES, VERSION)))
        self._write(_event(start, _field(7, _BYTES, _field(1, _VARINT, _START))))
        self.flush()

    def scalar(self, tag: str, step: int, value: float) -> None:
        try:
            number = struct.pack("<f", value)
        except OverflowError:  # too large for float32
            number = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
        point = _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, number)
        self._write(_event(step, _field(5, _BYTES, _field(1, _BYTES, point))))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        self._file.write(record(event))


def _stamp(folder: Path) -> str:
    """A time for the file name. Readers sort files by name, so it is later than all files in the folder, even
    if they come from a machine whose clock is ahead."""
    now = time.time_ns()
    for file in folder.glob("events.out.tfevents.*"):
        parts = file.name.split(".")
        if len(parts) > 4 and parts[3].isdecimal() and parts[4].isdecimal():
            now = max(now, int(parts[3]) * 10**9 + int(parts[4]) + 1)
    return f"{now // 10**9:010d}.{now % 10**9:09d}"


def _event(step: int, content: bytes) -> bytes:
    return _field(1, _FIXED64, struct.pack("<d", time.time())) + _field(2, _VARINT, step) + content


def _field(number: int, wire_type: int, value: int | bytes) -> bytes:
    key = _varint(number << 3 | wire_type)
    if isinstance(value, int):
        return key + _varint(value)
    return key + (_varint(len(value)) if wire_type == _BYTES else b"") + value


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
