"""The engine: one thread that owns the device. Jobs wait in a bounded queue, join a batch, and leave it when done.

Each turn of the thread

1. lets waiting jobs join, in order, while rows and memory last,
2. enqueues the next call of every lane that has rows (one lane for the base and all adapters that can share a batch),
3. reads the calls before, and delivers their text while the device computes.

Memory is bounded: the caches of all lanes together are at most `num_rows` rows of `max_length` slots. A job joins only
if that holds even when all answers become as long as they may, so a running answer never waits for memory.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from trillora.errors import TrilloraError, as_error
from trillora.serving.job import AnswerPiece, Job
from trillora.serving.lane import Lane
from trillora.serving.programs import BatchShape, Compiler

JOINS_PER_TURN = 4  # while others are running: reading a prompt takes as long as several of their tokens


class QueueFull(TrilloraError):
    """Too many jobs are waiting."""


class Stopping(TrilloraError):
    """The server takes no new jobs."""


class Engine:
    """Runs the jobs of all lanes. Every model is in one of them."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        compiler: Compiler,
        *,
        num_rows: int,
        max_length: int,
        max_waiting: int,
        report: Callable[[TrilloraError], None] = lambda error: None,
    ) -> None:
        self.num_rows, self.max_length, self.max_waiting = num_rows, max_length, max_waiting
        self._lanes, self._compiler, self._report = tuple(lanes), compiler, report
        self._lane_of = {model: lane for lane in lanes for model in lane.models}
        self._waiting: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set when the engine stops
        self._num_events = 0  # new jobs, cancelled ones and compiled programs
        self._num_handled: int | None = None  # if set: nothing can be done before there are more events than this
        self._budget = max(lane.num_bytes(BatchShape(num_rows, max_length)) for lane in lanes)
        compiler.when_ready = self._wake
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(lane.running) for lane in self._lanes)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds the jobs of one request: all of them or, with an error, none."""
        with self._changed:
            if self._deadline is not None:
                raise Stopping("The server is stopping.", do="send the request again later")
            num_open = len(self._waiting) + self.num_running
            if num_open + len(jobs) > self.max_waiting + self.num_rows:
                what = f"The server is busy: {num_open} answers are running or waiting."
                raise QueueFull(what, do="send the request again later, or start the server with a longer --queue")
            self._waiting.extend(jobs)
            self._num_events += 1
            self._changed.notify_all()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """The jobs are not wanted any more."""
        for job in jobs:
            job.is_cancelled = True
        self._wake()

    def stop(self, seconds: float) -> None:
        """Takes no new jobs, and ends those that are not finished after this time with an error."""
        with self._changed:
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until the thread has ended, after `stop`."""
        self._thread.join()

    def close(self) -> None:
        """Ends the engine and its compiler."""
        self.stop(0.0)
        self.join()
        self._compiler.close()

    def _wake(self) -> None:
        with self._changed:
            self._num_events += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self._deadline is not None and (self._is_idle() or time.monotonic() >= self._deadline):
                    break
            try:
                self._turn()
            except Exception as error:  # a bug of ours: the jobs fail, the server stays
                self._fail_everything(as_error(error))
        self._fail_everything(Stopping("The server was stopped before the answer was complete.", do="send it again"))

    def _has_work(self) -> bool:
        if self._deadline is not None:
            return True
        return not self._is_idle() and self._num_handled != self._num_events

    def _is_idle(self) -> bool:
        return not self._waiting and all(lane.is_empty for lane in self._lanes)

    def _turn(self) -> None:
        num_events, before = self._num_events, self._occupied()
        has_joined = self._let_join()
        busy = [lane for lane in self._lanes if not lane.is_empty]
        advanced = [lane for lane in busy if self._guarded(lane, lane.advance)]
        for lane in busy:
            self._guarded(lane, partial(lane.collect, all_calls=lane not in advanced))
        with self._changed:
            waiting = tuple(self._waiting)
        for lane in self._lanes:
            lane.keep_prompt(waiting)
        has_changed = has_joined or bool(advanced) or self._occupied() != before
        self._num_handled = None if has_changed else num_events  # what is left waits for a program
        if self._deadline is not None and self._num_handled is not None:
            time.sleep(0.01)

    def _occupied(self) -> list[int | None]:
        return [None if lane.is_empty else len(lane.running) for lane in self._lanes]

    def _let_join(self) -> bool:
        """Starts waiting jobs in order. One whose program is being compiled lets others pass; one without a row or
        memory does not, or a large request could wait forever."""
        with self._changed:
            waiting = [job for job in self._waiting if not job.is_cancelled]
            self._waiting = collections.deque(waiting)
        for lane in self._lanes:
            lane.sweep()
            lane.forget_waiting()
        num_running = self.num_running
        most = self.num_rows if num_running == 0 else JOINS_PER_TURN
        num_joined = 0
        for i, job in enumerate(waiting):
            lane, free = self._lane_of[job.model], self.num_rows - num_running - num_joined
            if num_joined >= most or free < 1:
                break
            num_alike = sum(self._lane_of[other.model] is lane for other in waiting[i : i + free])
            num_expected = self._num_that_fit(lane, job, num_alike)
            if num_expected == 0:
                break
            try:
                if not lane.join(job, num_expected):
                    continue
            except Exception as error:
                if lane.is_broken:
                    self._fail(lane, as_error(error))
                self._report(as_error(error))
                _end_with(job, as_error(error))
            with self._changed:
                self._waiting.remove(job)
            num_joined += 1
        return num_joined > 0

    def _num_that_fit(self, lane: Lane, job: Job, num_expected: int) -> int:
        """How many jobs like this one the lane has memory for if all other lanes become as large as they may: as many
        as expected, or one, or none."""
        others = sum(
            other.num_bytes(other.largest([], other.shape.num_rows) if other.running else other.shape)
            for other in self._lanes
            if other is not lane and other.shape is not None
        )
        present = lane.shape.num_rows if lane.shape is not None else 1
        for number in dict.fromkeys((num_expected, 1)):
            num_rows = max(len(lane.running) + number, present)
            if num_rows <= self.num_rows and others + lane.num_bytes(lane.largest([job], num_rows)) <= self._budget:
                return number
        return 0

    def _guarded(self, lane: Lane, work: Callable[[], bool | None]) -> bool | None:
        try:
            return work()
        except Exception as error:
            self._fail(lane, as_error(error))
            return True

    def _fail(self, lane: Lane, error: TrilloraError) -> None:
        """Ends all jobs of a lane: a call that fails may have used up the arrays of the batch."""
        if lane.running:
            self._report(error)
        jobs = [running.job for running in lane.running if not running.is_done]
        lane.reset()
        lane.keep_prompt(())  # its arrays may be invalid too
        for job in jobs:
            _end_with(job, error)

    def _fail_everything(self, error: TrilloraError) -> None:
        for lane in self._lanes:
            self._fail(lane, error)
        with self._changed:
            waiting, self._waiting = list(self._waiting), collections.deque()
        for job in waiting:
            _end_with(job, error)


def _end_with(job: Job, error: TrilloraError) -> None:
    if not job.is_cancelled:
        job.receive(AnswerPiece(error=error))
