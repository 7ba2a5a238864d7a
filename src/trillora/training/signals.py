"""External stop requests: signals, the time limit and listeners. The loop checks for them between steps.

During training, SIGTERM, SIGINT and SIGHUP are only recorded: the loop sees them, saves, and returns. Before the first
step there is nothing to save, so they end the process, even while the compiler blocks Python's signal handlers: the
interpreter writes every signal to a pipe (`signal.set_wakeup_fd`), and a second thread reads it. It also ends a process
that has reacted to the signal, but has to wait for a compiler in another thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from trillora.errors import EXIT_STOPPED
from trillora.events import Event, Listener, StopTraining

SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
PATIENCE = 4.0  # seconds for the main thread to react to a signal before the process is ended


class Interrupted(KeyboardInterrupt):
    """A signal arrived before the first step."""


class Stop:
    """Whether and why a run should stop now."""

    has_stopped = False  # whether a signal has stopped a run of this process

    def __init__(self, time_limit: float | None = None) -> None:
        self._started = time.monotonic()
        self._limit = time_limit
        self._signal: str | None = None
        self._asked: str | None = None  # by a listener
        self._has_state_to_save = False

    @property
    def signalled(self) -> str | None:
        """The name of the first signal that arrived, or None."""
        return self._signal

    def reason(self, next_seconds: float = 0.0) -> str | None:
        """Why the run should stop instead of doing work that takes `next_seconds`; None if it may continue."""
        if self._signal is not None:
            return self._signal
        if self._asked is not None:
            return self._asked
        if self._limit is not None and time.monotonic() - self._started + next_seconds > self._limit:
            return "the time limit"
        return None

    def heeding(self, listener: Listener) -> Listener:
        """The listener, which may raise `StopTraining`."""

        def listen(event: Event) -> None:
            try:
                listener(event)
            except StopTraining as asked:
                self._asked = f"the listener ({asked})" if str(asked) else "the listener"

        return listen

    def begin_training(self) -> None:
        """From here on there is something to save: only the loop stops the run."""
        self._has_state_to_save = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals until the block ends. Only the main thread can do this; in others the block does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Signals that are ignored, for example by nohup, stay ignored.
        old = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        for number in old:
            signal.signal(number, self._record)
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_writer)
            self._has_state_to_save = True  # the watcher must not end the process any more
            os.close(writer)
            watcher.join()
            os.close(reader)

    def _record(self, number: int, frame: FrameType | None) -> None:
        Stop.has_stopped = True
        first = self._signal is None
        self._signal = self._signal or signal.Signals(number).name
        if first and not self._has_state_to_save:
            raise Interrupted(self._signal)

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if self._has_state_to_save or not any(number in SIGNALS for number in numbers):
                continue
            time.sleep(PATIENCE)
            if not self._has_state_to_save:
                with contextlib.suppress(OSError, ValueError):
                    print("Stopped before the first step; no training was lost.", file=sys.stderr, flush=True)
                os._exit(EXIT_STOPPED)


def ignore_after_stop() -> None:
    """For a process that ends after its run: a signal that arrives after the run was stopped by another one is ignored.
    It would change the exit code otherwise, if the run's own handlers are already gone."""
    for number in SIGNALS:
        old = signal.getsignal(number)
        if old is not None and old != signal.SIG_IGN:
            signal.signal(number, functools.partial(_unless_stopped, old))


def _unless_stopped(old: Any, number: int, frame: FrameType | None) -> None:
    if Stop.has_stopped:
        return
    if callable(old):
        old(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
