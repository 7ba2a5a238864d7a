"""Output streams whose reader may disappear: a closed pipe, a full disk or a terminal that hung up never stops a run.

    $ trillora train recipe.yaml --out run | head -1     # the run continues after head exits

No rich here: the command line needs these functions for `--help` too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast


def closed_pipe_safe(file: IO[str]) -> IO[str]:
    """Wraps a text file so that writing never raises. After the first failed write, all output is discarded."""
    return cast(IO[str], _SafeOutput(file))


def flush_output() -> None:
    """Flushes stdout and stderr. Redirects a closed one to the null device, so that Python's own flush at exit does not
    fail."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            _SafeOutput(file).flush()


def escape_unencodable() -> None:
    """Lets stdout print characters that its encoding does not have, as escapes: "ü" in an ASCII terminal is "\\xfc"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _SafeOutput(io.TextIOBase):
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_closed = False

    def write(self, text: str) -> int:
        self._try(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def isatty(self) -> bool:
        with suppress(ValueError):  # raised by a closed file
            return self._file.isatty()
        return False

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except UnicodeEncodeError:
            self._file.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            action()
        except BlockingIOError:
            pass  # the pipe is full: drop this text rather than wait for a slow reader
        except (OSError, ValueError):
            self._is_closed = True
            # The failed text is still in Python's buffer. Python would flush it at exit, fail and print a warning.
            with suppress(OSError, ValueError):  # not a file of the operating system
                descriptor = self._file.fileno()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
