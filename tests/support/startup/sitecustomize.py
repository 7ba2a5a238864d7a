"""Read by every Python that starts with this folder on its PYTHONPATH, before anything else is.

Where TRILLORA_AUDIT names a file, each process writes there what it unpickles, which files it opens for writing, makes,
renames or removes, and which other machines it looks up or connects to: one line `what<TAB>which<TAB>where in the
code`. With TRILLORA_AUDIT_OFFLINE, connections to other machines fail, as without a network.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

_CHANGES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1}
_CONNECTS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
_HERE = ("localhost", "::1", "127.", "0.0.0.0", "None")  # how addresses of this machine start
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

        elif event in _CONNECTS and not _is_here(args[_CONNECTS[event]]):
            write("connect", args[_CONNECTS[event]], _callers())
            if os.environ.get("TRILLORA_AUDIT_OFFLINE"):
                raise OSError(errno.ENETUNREACH, "no network in this test")

    write("start", " ".join(sys.orig_argv), "")
    sys.addaudithook(hook)


def _is_here(address: Any) -> bool:
    """Whether an address, or the name of a host, is this machine. Sockets with a path are, too."""
    if isinstance(address, tuple):
        return _is_here(address[0])
    name = os.fsdecode(address) if isinstance(address, bytes) else str(address)
    return name.startswith((*_HERE, "/", "\0")) or not name


def _callers() -> str:
    """The files of the stack, innermost first."""
    frame, files = sys._getframe(2), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return " < ".join(dict.fromkeys(files))


if _file := os.environ.get("TRILLORA_AUDIT"):
    _watch(_file)
