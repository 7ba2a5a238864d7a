"""Read by every Python that starts with this folder on its PYTHONPATH, before anything else is.

Where TRILLORA_AUDIT names a file, each process writes there what it unpickles and which files it opens for writing,
makes, renames or removes: one line `what<TAB>which<TAB>where in the code`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_CHANGES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _watch(file: str) -> None:
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(what: str, which: Any, place: str) -> None:
        shown = str(which).replace("\t", "\\t").replace("\n", "\\n")
        os.write(log, f"{what}\t{shown}\t{place}\n".encode("utf-8", "backslashreplace"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            write("unpickle", f"{args[0]}.{args[1]}", _callers())
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITING and not isinstance(args[0], int):
            write("change", os.fsdecode(args[0]), "")
        elif event in _CHANGES:
            write("change", os.fsdecode(args[_CHANGES[event]]), "")

    write("start", " ".join(sys.orig_argv), "")
    sys.addaudithook(hook)


def _callers() -> str:
    """The files of the stack, innermost first."""
    frame, files = sys._getframe(2), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return " < ".join(dict.fromkeys(files))


if _file := os.environ.get("TRILLORA_AUDIT"):
    _watch(_file)
