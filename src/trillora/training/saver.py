"""Saves checkpoints in the background, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Saved, ignore_events
from trillora.files.checkpoints import Checkpoints


class Saver:
    """Saves one checkpoint at a time in a background thread, which also sends the events."""

    def __init__(self, checkpoints: Checkpoints, listener: Listener) -> None:
        self._checkpoints = checkpoints
        self._listener = listener
        # One thread for all saves: each new thread gets its own malloc arena, and memory would grow.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trillora-saver")
        self._saving: Future[None] | None = None
        self.seconds: float | None = None  # duration of the last successful save
        self.failure: OSError | None = None  # of the latest save; None if it succeeded

    @property
    def busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def submit(
        self, step: int, make_files: Callable[[], Mapping[str, bytes]], after: Callable[[], None] | None = None
    ) -> None:
        """Start a save when the current one is done. `after` runs if it succeeds, for example to prune."""
        self.wait()
        self._saving = self._thread.submit(self._run, step, make_files, after)

    def wait(self) -> None:
        """Wait for the current save. Raises its error unless it is an OSError, which is in `failure`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except BaseException as own:
            if error is None:
                raise
            error.add_note(f"While saving a checkpoint: {own!r}")
        finally:
            self._thread.shutdown()

    def _run(self, step: int, make_files: Callable[[], Mapping[str, bytes]], after: Callable[[], None] | None) -> None:
        start, where = time.monotonic(), self._checkpoints.where(step)
        self.failure = _os_error(lambda: self._checkpoints.write(step, make_files()))
        if self.failure is not None:
            alarm = f"The checkpoint of step {step} could not be saved: {self.failure}. Where: {where}."
            self._listener(Alarm(f"{alarm} Training continues; {self._newest_good()}."))
            return
        self.seconds = time.monotonic() - start
        self._listener(Saved(step=step, where=where, seconds=self.seconds))
        if after is not None and (failed := _os_error(after)) is not None:
            alarm = f"The checkpoint of step {step} is saved, but old ones could not be removed: {failed}."
            self._listener(Alarm(f"{alarm} Where: {where}. Training continues."))

    def _newest_good(self) -> str:
        """The newest valid checkpoint, for an error message. It is verified, because the disk just failed."""
        try:
            found = self._checkpoints.newest_valid(ignore_events)
        except TrilloraError:
            return "no checkpoint can be read there now"
        return f"the newest valid checkpoint is from step {found[0]}" if found else "there is no valid checkpoint yet"


def _os_error(work: Callable[[], None]) -> OSError | None:
    """The OSError of this work alone: a listener with a closed terminal raises OSError too."""
    try:
        work()
    except OSError as error:
        return error
    return None
