"""Checkpoints: sets of files with their checksums, the newest valid one found, saved beside the training.

`checksums.json` holds size and SHA-256 of every other file, the step, and a digest of itself; it is compared byte for
byte with what it would be if it were written now, so that a flipped bit is noticed wherever it is.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Saved, ignore_events
from trillora.files.digests import bytes_digest, json_digest
from trillora.files.storage import MARK, Storage

FORMAT = 1

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)


class Damaged(TrilloraError):
    """A checkpoint is not what was written."""

    def __init__(self, name: str, file: str, fault: str, *, where: str) -> None:
        super().__init__(
            f"Checkpoint {name} is damaged: {file} {fault}.",
            where=f"{where}/{name}/{file}",
            do="continue from an earlier checkpoint, or bring the file back from a copy",
        )
        self.file = file
        self.fault = fault


class Checkpoints:
    """The checkpoints of one run. One process writes; whoever wants may read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def where(self, step: int) -> str:
        return f"{self._storage.where}/{_name(step)}"

    def write(self, step: int, files: Mapping[str, bytes]) -> None:
        """Adds or replaces a checkpoint. OSError where that fails; those that were there are untouched."""
        self._storage.write(_name(step), with_checksums(step, files))

    def steps(self) -> list[int]:
        """Of every checkpoint there is, unread, ascending."""
        found = [(name, int(match[1])) for name in self._storage.names() if (match := _STEP.fullmatch(name))]
        return sorted(step for name, step in found if name == _name(step))  # step-000000050 is not ours

    def read(self, step: int) -> dict[str, bytes]:
        """The files that were written, each compared with its checksum; `Damaged` where one differs."""
        try:
            files = self._storage.read(_name(step))
        except FileNotFoundError:
            there = ", ".join(map(str, self.steps())) or "none"
            raise TrilloraError(
                f"There is no checkpoint of step {step}.", where=self._storage.where, do=f"steps there: {there}"
            ) from None
        if found := _fault(step, files, where=self.where(step)):
            raise Damaged(_name(step), *found, where=self._storage.where)
        del files[MARK]
        return files

    def newest_valid(self, listener: Listener) -> tuple[int, dict[str, bytes]] | None:
        """The newest that verifies, with its files. Each newer one is told as an alarm."""
        try:
            for step in reversed(self.steps()):
                try:
                    return step, self.read(step)
                except Damaged as damage:
                    fault = f"{damage.file} {damage.fault}"
                except OSError as error:
                    if error.errno != errno.EIO:  # a bad sector is rot; a lost connection or a missing right is not
                        raise
                    fault = f"{error.filename} cannot be read ({error.strerror})"
                listener(Alarm(f"{self.where(step)} is damaged: {fault}. The checkpoint before it is tried."))
        except OSError as error:
            raise TrilloraError(
                f"Checkpoints cannot be read: {error}",
                where=self._storage.where,
                do="make the place readable and start again: nothing was changed",
            ) from error
        return None

    def prune(self, keep: int, protect: Collection[int] = ()) -> None:
        """Removes all but the newest `keep` and the protected, oldest first."""
        if keep < 1:
            raise ValueError("the newest checkpoint stays")
        for step in self.steps()[:-keep]:
            if step not in protect:
                self._storage.remove(_name(step))

    def remove_after(self, step: int) -> None:
        """Removes what is newer than a step, newest first: cut short, what stays is still a history."""
        for newer in reversed(self.steps()):
            if newer > step:
                self._storage.remove(_name(newer))

    def clean(self) -> list[str]:
        """Removes and names what unfinished writes and removals left; for the owner of the run, at its start."""
        return self._storage.clean()


class Saver:
    """Saves in one background thread, one checkpoint at a time. Events come from that thread."""

    def __init__(self, checkpoints: Checkpoints, listener: Listener) -> None:
        self._checkpoints = checkpoints
        self._listener = listener
        # One thread for all saves: each thread has a heap of its own, and a new one every time makes memory grow.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trillora-saver")
        self._saving: Future[None] | None = None
        self.seconds: float | None = None  # the last save that succeeded took
        self.last_saved: int | None = None  # step, by this saver
        self.failure: OSError | None = None  # of the last save, None after one that succeeded

    @property
    def busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def submit(
        self, step: int, make_files: Callable[[], Mapping[str, bytes]], after: Callable[[], None] | None = None
    ) -> None:
        """Starts a save, after the one under way. `after` runs when it succeeded: pruning, say."""
        self.wait()
        self._saving = self._thread.submit(self._run, step, make_files, after)

    def wait(self) -> None:
        """Until nothing is being saved. Raises what went wrong there other than the disk."""
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
        if self._save(step, make_files) and after is not None:
            self._follow(step, after)

    def _save(self, step: int, make_files: Callable[[], Mapping[str, bytes]]) -> bool:
        start = time.monotonic()
        try:
            self._checkpoints.write(step, make_files())
            self.failure = None
        except OSError as error:
            self.failure = error
        # Outside the `try`: a listener whose terminal is gone raises an OSError too.
        if self.failure is None:
            self.last_saved, self.seconds = step, time.monotonic() - start
            self._listener(Saved(step=step, where=self._checkpoints.where(step), seconds=self.seconds))
            return True
        self._listener(
            Alarm(
                f"The checkpoint of step {step} could not be saved: {self.failure}. Where: "
                f"{self._checkpoints.where(step)}. Training goes on; {self._newest_good()}."
            )
        )
        return False

    def _follow(self, step: int, after: Callable[[], None]) -> None:
        failed: OSError | None = None
        try:
            after()
        except OSError as error:
            failed = error
        if failed is not None:
            self._listener(
                Alarm(
                    f"The checkpoint of step {step} is saved; tidying up after it failed: {failed}. "
                    f"Where: {self._checkpoints.where(step)}. Training goes on."
                )
            )

    def _newest_good(self) -> str:
        """Read and verified: this is said when a disk fails."""
        try:
            found = self._checkpoints.newest_valid(ignore_events)
        except TrilloraError:
            return "no checkpoint can be read there now"
        return f"the newest good checkpoint is that of step {found[0]}" if found else "there is no good checkpoint yet"


def with_checksums(step: int, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files with their checksums behind them."""
    if MARK in files:
        raise ValueError(f"{MARK} is made here")
    return {**files, MARK: _checksums(step, files)}


def _name(step: int) -> str:
    if step < 0:
        raise ValueError("steps begin with 0")
    return f"step-{step:08d}"


def _checksums(step: int, files: Mapping[str, bytes]) -> bytes:
    sums = {name: {"sha256": bytes_digest(data), "size": len(data)} for name, data in files.items()}
    return _seal({"format": FORMAT, "step": step, "files": sums})


def _seal(facts: dict[str, Any]) -> bytes:
    """One way to write the facts, with their digest."""
    digest = json_digest(facts)
    return (json.dumps({**facts, "digest": digest}, sort_keys=True, indent=1) + "\n").encode()


def _unseal(data: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(data)
        facts = {key: value for key, value in told.items() if key != "digest"}
        if _seal(facts) != data:
            return None
        # Sealed by something else than `_checksums`: as good as rot.
        is_ours = facts["format"] != FORMAT or all(
            len(sums) == 2 and len(sums["sha256"]) == 64 and sums["size"] >= 0 for sums in facts["files"].values()
        )
        return facts if is_ours and facts["step"] >= 0 else None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _fault(step: int, files: Mapping[str, bytes], *, where: str) -> tuple[str, str] | None:
    """The first file that is not what was written, and what is wrong with it."""
    if MARK not in files:
        return MARK, "is missing"
    facts = _unseal(files[MARK])
    if facts is None:
        return MARK, "differs from its own digest"
    if facts.get("format") != FORMAT:  # sealed, so no rot
        raise TrilloraError(
            f"Checkpoint {_name(step)} has format {facts.get('format')}; this version of Trillora reads {FORMAT}.",
            where=where,
            do="continue with the version that wrote it",
        )
    if facts["step"] != step:
        return MARK, f"belongs to step {facts['step']}"
    for name, told in facts["files"].items():
        if name not in files:
            return name, "is missing"
        if len(files[name]) != told["size"]:
            return name, f"has {len(files[name])} bytes instead of {told['size']}"
        if bytes_digest(files[name]) != told["sha256"]:
            return name, "differs from its checksum"
    extra = sorted(files.keys() - facts["files"].keys() - {MARK})
    return (extra[0], "does not belong there") if extra else None
