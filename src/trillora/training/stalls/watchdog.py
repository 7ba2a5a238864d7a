"""A thread that reports a step which takes far longer than the others.

If a step takes several times the median, it reads the stack of the thread that trains, sends one alarm, and writes the
stacks of all threads to the run's folder:

    Step 7 takes long: 42 s so far, 1.2 s is usual. The run is waiting for the next batch of data: ...
    Stacks of all threads: runs/x/stalls.log

Evaluations are not steps. Steps that are the first of their stage have no median yet: they have minutes, and longer if
the chip needs longer at a tenth of its peak.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

from trillora.events import Alarm, Listener
from trillora.step.search import format_seconds
from trillora.training.stalls.waits import Wait, all_stacks, find_wait

FACTOR = 5.0  # times the median
MIN_SECONDS = 30.0  # a shorter pause is not worth a message
FIRST_SECONDS = 300.0  # for steps without a median
NUM_FIRST = 3  # steps until there is a median
NUM_RECENT = 64  # steps in the median
SLOW_FRACTION = 0.1  # of the chips' peak FLOP/s: a first step may be as slow as this
POLL_SECONDS = 1.0


class Watchdog:
    """Watches the thread that calls `guarding`. `log` stores a text and returns the name of its file, if it has one."""

    def __init__(self, listener: Listener, log: Callable[[str], str | None]) -> None:
        self._listener, self._log = listener, log
        self._recent: collections.deque[float] = collections.deque(maxlen=NUM_RECENT)  # seconds per token
        self._step, self._num_tokens = 0, 0  # of the last step
        self._peak_seconds = 0.0
        self._factor = FACTOR
        self._began = time.monotonic()
        self._is_reported = False

    def begin_stage(self, step: int, num_tokens: int, peak_seconds: float) -> None:
        """`step`: completed before this stage. `num_tokens`: token positions of a batch. `peak_seconds`: of a step at
        the chips' peak FLOP/s, 0 if unknown."""
        self._recent.clear()
        self._step, self._num_tokens, self._peak_seconds = step, num_tokens, peak_seconds
        self.restart()

    def restart(self) -> None:
        """The time until now, for example of an evaluation, is not part of a step."""
        self._began, self._is_reported = time.monotonic(), False

    def step_ended(self, step: int, num_tokens: int) -> None:
        self._recent.append((time.monotonic() - self._began) / num_tokens)
        self._step, self._num_tokens = step, num_tokens
        self.restart()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Within the block, slow steps of this thread are reported."""
        ended = threading.Event()
        arguments = (ended, threading.get_ident())
        thread = threading.Thread(target=self._watch, args=arguments, name="trillora-watchdog", daemon=True)
        self.restart()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(timeout=5)  # it may hang where the run did

    def _watch(self, ended: threading.Event, watched: int) -> None:
        while not ended.wait(POLL_SECONDS):
            seconds = time.monotonic() - self._began
            if self._is_reported or seconds < self._limit():
                continue
            wait = find_wait(sys._current_frames().get(watched))
            if wait.what is not None and seconds >= wait.at_least:
                self._is_reported = True
                self._factor *= 2  # a run that became slow for good is not reported again and again
                self._report(seconds, wait)

    def _limit(self) -> float:
        """Seconds after which the running step takes long."""
        if (usual := self._usual()) is None:
            return max(FIRST_SECONDS, self._peak_seconds / SLOW_FRACTION)
        return max(MIN_SECONDS, self._factor * usual)

    def _usual(self) -> float | None:
        """Seconds of a step like this one; None if too few were seen. Steps differ in their sequence length."""
        recent = tuple(self._recent)  # the other thread adds to it
        return statistics.median(recent) * self._num_tokens if len(recent) >= NUM_FIRST else None

    def _report(self, seconds: float, wait: Wait) -> None:
        usual = self._usual()
        compared = "" if usual is None else f", {format_seconds(usual)} is usual"
        text = f"Step {self._step + 1} takes long: {format_seconds(seconds)} so far{compared}."
        text = f"{text} The run is waiting for {wait.what}."
        self._listener(Alarm(text))  # first, because it may be the disk that hangs
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if where := self._log(f"{now} {text}\n{all_stacks()}"):
            self._listener(Alarm(f"Stacks of all threads: {where}"))
