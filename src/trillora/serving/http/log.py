"""What a server writes about failures: one short line for each kind, and how often it was repeated.

The server failed: ValueError: no such token. (trillora/serving/lane.py, line 210)
The server failed: ValueError: no such token. (trillora/serving/lane.py, line 210) [repeated 381 times]
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time

from trillora.errors import Bug, as_error
from trillora.report.output import closed_pipe_safe
from trillora.safe_text import visible

LONGEST_LINE = 500  # characters
MOST_KINDS = 50  # lines before the next summary
SUMMARY_SECONDS = 60.0
LOGGER = "trillora.serving"
LIBRARIES = ("uvicorn.error", "asyncio")


class FailureLog(logging.Handler):
    """Prints to stderr. Further messages of a kind are counted, and said at most once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._counting = threading.Lock()
        self._counts: dict[str, int] = {}
        self._started = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError):
            return
        self.write(_described(record.getMessage(), error))

    def write(self, text: str) -> None:
        line = " ".join(text.split())[:LONGEST_LINE]
        with self._counting:
            lines = self._summary() if time.monotonic() - self._started > SUMMARY_SECONDS else []
            if line not in self._counts and len(self._counts) >= MOST_KINDS:
                line = "Other failures."
            if line not in self._counts:
                lines.append(line)
            self._counts[line] = self._counts.get(line, 0) + 1
        _print(lines)

    def finish(self) -> None:
        """Prints the counts that were not said yet."""
        with self._counting:
            lines = self._summary()
        _print(lines)

    def _summary(self) -> list[str]:
        lines = [f"{kind} [repeated {count - 1} times]" for kind, count in self._counts.items() if count > 1]
        self._counts, self._started = {}, time.monotonic()
        return lines


def _print(lines: list[str]) -> None:
    for line in lines:
        print(visible(line), file=closed_pipe_safe(sys.stderr), flush=True)


def install(log: FailureLog) -> None:
    """For our failures, and in place of the tracebacks of libraries."""
    for name in (LOGGER, *LIBRARIES):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [log], False
        logger.setLevel(logging.ERROR)


def _described(message: str, error: BaseException | None) -> str:
    if not isinstance(error, Exception):
        return message
    shown = as_error(error)
    place = f" ({shown.where})" if shown.where else ""
    return f"{shown.what}{place}" if isinstance(shown, Bug) else f"{message.strip()}: {shown.what}{place}"
