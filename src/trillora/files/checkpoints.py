"""Checkpoints: sets of files with checksums. The newest valid one is found even if later ones are damaged."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener
from trillora.files.checksums import FORMAT, MAX_BYTES, find_damage, find_wrong_size, read_checksums, with_checksums
from trillora.files.storage import MARK, Storage

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)


class Damaged(TrilloraError):
    """A file of a checkpoint is not as it was written."""

    def __init__(self, name: str, file: str, fault: str, *, where: str) -> None:
        super().__init__(
            f"Checkpoint {name} is damaged: {file} {fault}.",
            where=f"{where}/{name}/{file}",
            do="resume from an earlier checkpoint, or restore the file from a copy",
        )
        self.file = file
        self.fault = fault


class Checkpoints:
    """The checkpoints of one run. One process writes; any process may read. `check_owner` runs before every change and
    raises TrilloraError if another process has taken over."""

    def __init__(self, storage: Storage, check_owner: Callable[[], None] | None = None) -> None:
        self._storage = storage
        self._check_owner = check_owner or (lambda: None)

    @property
    def place(self) -> str:
        return self._storage.where

    def where(self, step: int) -> str:
        return f"{self._storage.where}/{_name(step)}"

    def write(self, step: int, files: Mapping[str, bytes]) -> None:
        """Add or replace a checkpoint. Raises OSError if that fails; existing checkpoints stay intact."""
        self._check_owner()
        self._storage.write(_name(step), with_checksums(step, files))

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending. Their files are not read. Raises OSError if that fails."""
        found = [(name, int(match[1])) for name in self._storage.names() if (match := _STEP.fullmatch(name))]
        return sorted(step for name, step in found if name == _name(step))  # not step-000000050: an extra zero

    def read(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint, verified; raises `Damaged` if one differs from its checksum."""
        try:
            facts = self._facts(step)  # before files of any size are read
            files = self._storage.read(_name(step), facts["files"])
        except FileNotFoundError:
            if step in (steps := self.steps()):  # a link to a drive that is not mounted
                raise
            existing = ", ".join(map(str, steps)) or "none"
            raise TrilloraError(
                f"There is no checkpoint of step {step}.",
                where=self._storage.where,
                do=f"use one of the existing steps: {existing}",
            ) from None
        if found := find_damage(facts, files):
            raise Damaged(_name(step), *found, where=self._storage.where)
        return files

    def _facts(self, step: int) -> dict[str, Any]:
        """The checksums of a checkpoint whose files have their names and sizes; raises `Damaged` if not."""
        sizes = self._storage.sizes(_name(step))
        is_bounded = (sizes.get(MARK) or 0) <= MAX_BYTES
        mark = self._storage.read(_name(step), [MARK]).get(MARK) if is_bounded else b""
        facts = None if mark is None else read_checksums(mark)
        if found := _fault(step, facts, sizes, where=self.where(step)):
            raise Damaged(_name(step), *found, where=self._storage.where)
        assert facts is not None
        return facts

    def newest_valid(
        self, listener: Listener, find_fault: Callable[[int, dict[str, bytes]], str | None] | None = None
    ) -> tuple[int, dict[str, bytes]] | None:
        """The newest valid checkpoint: its step and files. Every damaged newer one is reported as an alarm.
        `find_fault` looks for content that Trillora does not write, in files whose checksums are right."""
        with self.reported("read"):
            for step in reversed(self.steps()):
                try:
                    files = self.read(step)
                    fault = find_fault(step, files) if find_fault else None
                    if fault is None:
                        return step, files
                except Damaged as damage:
                    fault = f"{damage.file} {damage.fault}"
                except OSError as error:
                    if error.errno != errno.EIO:  # EIO is a bad sector; a lost connection or permission is no damage
                        raise
                    fault = f"{error.filename} cannot be read ({error.strerror})"
                listener(Alarm(f"{self.where(step)} is damaged: {fault}. Trying the checkpoint before it."))
        return None

    @contextmanager
    def reported(self, verb: str) -> Iterator[None]:
        """Turns an OSError of the block into an error with the place and what to do."""
        try:
            yield
        except OSError as error:
            raise TrilloraError(
                f"Checkpoints cannot be {verb}: {error}.",
                where=self._storage.where,
                do="make this location available and run the same command again; nothing was changed",
            ) from error

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, oldest first."""
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self._check_owner()
        for step in self.steps()[:-keep]:
            self._storage.remove(_name(step))

    def remove_after(self, step: int) -> None:
        """Remove checkpoints after a step, newest first, so that an interruption leaves no gap."""
        self._check_owner()
        for newer in reversed(self.steps()):
            if newer > step:
                self._storage.remove(_name(newer))

    def clean(self) -> list[str]:
        """Remove the leftovers of interrupted writes and return their names. Only for the owner of the run."""
        self._check_owner()
        return self._storage.clean()


def _name(step: int) -> str:
    if step < 0:
        raise ValueError("a step cannot be negative")
    return f"step-{step:08d}"


def _fault(
    step: int, facts: Mapping[str, Any] | None, sizes: Mapping[str, int | None], *, where: str
) -> tuple[str, str] | None:
    """The first file that is damaged by its name or size and what is wrong with it, or None."""
    if MARK not in sizes:
        return MARK, "is missing"
    if facts is None:
        return MARK, "differs from its own digest"
    if facts.get("format") != FORMAT:  # the digest is right, so this is no damage
        raise TrilloraError(
            f"Checkpoint {_name(step)} has format {facts.get('format')}; this version of Trillora reads {FORMAT}.",
            where=where,
            do="resume with the version of Trillora that wrote it",
        )
    if facts["step"] != step:
        return MARK, f"belongs to step {facts['step']}"
    if damage := find_wrong_size(facts, sizes):
        return damage
    extra = sorted(sizes.keys() - facts["files"].keys() - {MARK})
    return (extra[0], "does not belong there") if extra else None
