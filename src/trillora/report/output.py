"""Where text leaves the program. Untrusted text never controls the terminal, and a reader may disappear.

    with guarded_output():
        print(answer)       # "\\x1b[2J" is printed as these six letters, in a terminal, a pipe or a file

    $ trillora train recipe.yaml --out run | head -1     # the run continues after head exits

`guarded_output` replaces stdout and stderr, so it also guards what libraries print. rich writes colors itself: its
consoles (`report/console.py`) escape their text and write to the `unguarded` stream. No rich here: the command line
needs these functions for `--help` too.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from trillora.events import Alarm, Event, Note
from trillora.safe_text import visible
from trillora.secrets import mask_message

# What the progress bars of libraries write to stderr: a line that starts over, or only steps between lines.
_BAR = re.compile(r"\r(?=[^\r]*\Z)|(?:\n|\x1b\[A)+\Z")


@contextmanager
def guarded_output() -> Iterator[None]:
    """Replaces stdout and stderr by streams that write control characters as escapes, as well as those that the
    encoding does not have: "ü" in ASCII is "\\xfc"."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is not None:
        sys.stdout = cast(Any, _Guarded(sys.stdout))
    if sys.stderr is not None:
        sys.stderr = cast(Any, _GuardedWithBars(sys.stderr))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # a closed pipe; `flush_output` deals with it
            if sys.stdout is not None:
                sys.stdout.flush()
        sys.stdout, sys.stderr = before


def unguarded(file: IO[str]) -> IO[str]:
    """The stream below the guard, for text that is safe and has colors of our own."""
    while isinstance(file, _Guarded):
        file = file.below
    return file


def masked(event: Event) -> Event:
    """The event without secrets, if it is a message. The texts of rows and answers stay as they are."""
    if isinstance(event, Note | Alarm):
        return dataclasses.replace(event, text=mask_message(event.text))
    return event


def closed_pipe_safe(file: IO[str]) -> IO[str]:
    """Wraps a text file so that writing never raises. After the first failed write, all output is discarded."""
    return cast(IO[str], _SafeOutput(file))


def flush_output() -> None:
    """Flushes stdout and stderr. Redirects a closed one to the null device, so that Python's own flush at exit does not
    fail."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            _SafeOutput(file).flush()


class _Guarded(io.TextIOBase):
    def __init__(self, below: IO[str]) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(self._safe(text))
        return len(text)

    def _safe(self, text: str) -> str:
        return visible(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self.below.flush()

    def isatty(self) -> bool:
        return self.below.isatty()

    def fileno(self) -> int:
        return self.below.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.below, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Without it, `input` does not use readline."""
        return getattr(self.below, "errors", None) or "strict"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


class _GuardedWithBars(_Guarded):
    def _safe(self, text: str) -> str:
        bar = _BAR.match(text)
        end = bar.end() if bar else 0
        return text[:end] + visible(text[end:])


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
