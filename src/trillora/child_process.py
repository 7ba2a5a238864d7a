"""Starts child Python processes with the parent's import path only, never the working directory.

    child = isolated_python("from trillora.preflight.compiler_process import main; main()", environment=os.environ)
    subprocess.Popen(child.command, env=child.environment)

`python -c` and `python -m` look for modules in the working folder first, before the standard library. A data set with a
file `json.py` would then run its code in ours. A process started here has the import path of this one, without
relative entries, and imports this very package. Workers exchange frames with us over pipes: lists of byte strings.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_PACKAGE_HOME = str(Path(__file__).parents[1])  # the folder that contains the package
_HARMLESS = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")
_HEADER = struct.Struct("<IQ")  # number of parts, bytes of all parts with their lengths
_LENGTH = struct.Struct("<I")  # of one part


class ChildPython(NamedTuple):
    """What to pass to `subprocess`."""

    command: list[str]
    environment: dict[str, str]


def isolated_python(program: str, *arguments: str, environment: Mapping[str, str]) -> ChildPython:
    """A Python process that runs `program`, Python code, with `arguments` in `sys.argv[1:]`."""
    # -P keeps the working folder off the path until our line sets it; PYTHONSAFEPATH does so in the child's children.
    # Paths are written in ASCII (!a), because the locale may not have their letters.
    code = f"import sys; sys.path[:] = {_import_path()!a}\n{program}"
    return ChildPython([sys.executable, "-P", "-c", code, *arguments], {**environment, "PYTHONSAFEPATH": "1"})


def bare_environment() -> dict[str, str]:
    """For a process that handles untrusted content: a few variables of this process, none of them secret."""
    return {name: os.environ[name] for name in _HARMLESS if name in os.environ}


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


def _import_path() -> list[str]:
    """This process's own path. An empty or relative entry means the working folder or a folder in it."""
    path = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return path if _PACKAGE_HOME in path else [_PACKAGE_HOME, *path]
