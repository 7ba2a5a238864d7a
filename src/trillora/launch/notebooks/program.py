"""Runs the command-line programs of Google and Kaggle. Their output is bounded, masked, and never trusted."""

from __future__ import annotations

import collections
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trillora.errors import TrilloraError
from trillora.events import Listener, Note
from trillora.safe_text import visible
from trillora.secrets import mask_message

MAX_LINE = 4096  # characters
MAX_LINES = 2000  # of an answer that are kept


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended, and the last lines that it printed."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        """Its last words, for an error message."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return visible(mask_message(lines[-1][:300])) if lines else "it printed nothing"


def find_program(name: str, install: str) -> str:
    """The path of a program. Raises an error with the command that installs it."""
    if (found := shutil.which(name)) is None:
        raise TrilloraError(f"The program `{name}` is not installed.", where="PATH", do=install)
    return found


def call(
    command: Sequence[str],
    *,
    seconds: float,
    listener: Listener | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProgramEnd:
    """Runs a program without input for at most `seconds`. Its lines are shown to the listener, if there is one."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    lines: collections.deque[str] = collections.deque(maxlen=MAX_LINES)
    try:
        while line := process.stdout.readline(MAX_LINE):
            lines.append(line.rstrip("\n"))
            if listener is not None and line.strip():
                listener(Note(visible(mask_message(line.rstrip()))))
        return ProgramEnd(process.wait(), "\n".join(lines))
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        timer.cancel()
        process.stdout.close()
