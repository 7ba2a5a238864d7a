"""Ends that come from outside: a signal, or the time a run may take. Asked about between steps; never in the middle.

SIGTERM, SIGINT and SIGHUP are notes, not exceptions: the loop finds them, saves, and returns. Before the first step
nothing can be lost, so there they end the process, also while the compiler keeps Python from running: a second thread
hears of them through a pipe that the interpreter writes to from the signal itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

EXIT_STOPPED = 75  # saved and not finished: the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
PATIENCE = 4.0  # seconds until a process that cannot listen is ended, nothing being at stake


class Interrupted(KeyboardInterrupt):
    """A signal before the first step."""


class Stop:
    """Whether, and why, a run should end now."""

    def __init__(self, time_limit: float | None = None) -> None:
        self._started = time.monotonic()
        self._limit = time_limit
        self._signal: str | None = None
        self._at_stake = False

    @property
    def signalled(self) -> str | None:
        """The signal that came, if one did."""
        return self._signal

    def reason(self, next_seconds: float = 0.0) -> str | None:
        """Why not to go on with something that takes so long."""
        if self._signal is not None:
            return self._signal
        if self._limit is not None and time.monotonic() - self._started + next_seconds > self._limit:
            return "the time limit"
        return None

    def begin_training(self) -> None:
        """From here on there is something to save: the loop asks, and nobody else ends the process."""
        self._at_stake = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted until the block ends. Only the main thread of a process can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # One that is ignored, as nohup does, stays ignored.
        old = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        for number in old:
            signal.signal(number, self._note)
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_writer)
            self._at_stake = True  # the watcher has no business any more
            os.close(writer)
            watcher.join()
            os.close(reader)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first = self._signal is None
        self._signal = self._signal or signal.Signals(number).name
        if first and not self._at_stake:
            raise Interrupted(self._signal)

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if self._at_stake or not any(number in SIGNALS for number in numbers):
                continue
            time.sleep(PATIENCE)
            if not self._at_stake and self._signal is None:  # the main thread has not come to hear of it
                with contextlib.suppress(OSError, ValueError):
                    print("Stopped before the first step; nothing was lost.", file=sys.stderr, flush=True)
                os._exit(EXIT_STOPPED)
