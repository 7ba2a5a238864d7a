"""Checksums of a set of files, such as a checkpoint or an adapter.

`checksums.json` has the step, the size and SHA-256 of every other file, and a digest of itself. Reading compares it
byte for byte with what would be written for the same facts, so every flipped bit is detected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trillora.files.digests import bytes_digest, file_digest, json_digest
from trillora.files.storage import MARK

FORMAT = 1
MAX_BYTES = 1 << 24  # of checksums.json


def with_checksums(step: int, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, followed by their checksums."""
    return {**files, MARK: checksums_of(step, files)}


def checksums_of(step: int, files: Mapping[str, bytes | Path]) -> bytes:
    """The content of checksums.json for these files. Those on the disk may be larger than the memory."""
    if MARK in files:
        raise ValueError(f"{MARK} is a reserved name")
    sums = {name: {"sha256": _digest(file), "size": _size(file)} for name, file in files.items()}
    return seal({"format": FORMAT, "step": step, "files": sums})


def _digest(file: bytes | Path) -> str:
    return file_digest(file) if isinstance(file, Path) else bytes_digest(file)


def _size(file: bytes | Path) -> int:
    return file.stat().st_size if isinstance(file, Path) else len(file)


def read_checksums(data: bytes) -> dict[str, Any] | None:
    """The facts in the bytes of `checksums.json`; None if they are damaged."""
    try:
        facts = {key: value for key, value in json.loads(data).items() if key != "digest"}
        if seal(facts) != data:
            return None
        # A correct digest around facts that `with_checksums` does not write is damage too.
        is_ours = facts["format"] != FORMAT or all(
            len(sums) == 2 and len(sums["sha256"]) == 64 and sums["size"] >= 0 for sums in facts["files"].values()
        )
        return facts if is_ours and facts["step"] >= 0 else None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def find_wrong_size(facts: Mapping[str, Any], sizes: Mapping[str, int | None]) -> tuple[str, str] | None:
    """The first file that is missing or has another size, and how; None if there is none. For files that are not read
    yet: one that was replaced may be larger than the memory."""
    for name, expected in facts["files"].items():
        if name not in sizes:
            return name, "is missing"
        if sizes[name] not in (None, expected["size"]):  # None: not known
            return name, f"has {sizes[name]} bytes instead of {expected['size']}"
    return None


def find_damage(facts: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[str, str] | None:
    """The first file that differs from its checksum, and how; None if all are as written."""
    if found := find_wrong_size(facts, {name: len(data) for name, data in files.items()}):
        return found
    different = (name for name, expected in facts["files"].items() if bytes_digest(files[name]) != expected["sha256"])
    name = next(different, None)
    return None if name is None else (name, "differs from its checksum")


def seal(facts: Mapping[str, object]) -> bytes:
    """The facts and their digest as JSON. Equal facts give equal bytes."""
    digest = json_digest(facts)
    return (json.dumps({**facts, "digest": digest}, sort_keys=True, indent=1) + "\n").encode()
