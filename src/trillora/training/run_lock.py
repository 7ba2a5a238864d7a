"""Only one process at a time may use a run folder.

The lock is a kernel lock on `RUN/.lock`, which is released when its owner ends for any reason. The note
`RUN/.lock-owner` says who holds it, for the error message of a second process. On file systems without locks, the note
itself is the lock.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from trillora.errors import TrilloraError
from trillora.files import atomic

_SETTLING = 0.2  # seconds to wait until a note that another process is writing or replacing is final


@dataclass(frozen=True)
class Owner:
    pid: int
    host: str
    since: float  # seconds since 1970

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {began}"


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run folder and create it if it is missing. TrilloraError at once if another process holds the lock."""
    note = run / ".lock-owner"
    me = Owner(os.getpid(), socket.gethostname(), time.time())
    try:
        atomic.make_folder(run)
    except OSError as error:
        raise _cannot_write(run, error) from error
    lock = _lock(run / ".lock")
    try:
        lock.acquire()
    except filelock.Timeout:
        if _has_locks(run):
            raise _refused(run, _owner_to_name(note), "wait for it, stop it, or choose another folder") from None
        _own_by_note(run, note, me)
    except (OSError, NotImplementedError):
        _own_by_note(run, note, me)
    else:
        with suppress(OSError):  # the note is optional here; a full disk is reported by the next write
            atomic.write_file(note, _text(me))
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(note) == me:
                os.unlink(note)
        lock.release()


def _lock(path: Path) -> filelock.BaseFileLock:
    """A kernel lock or an error, never a lock file that remains when its owner is killed."""
    options: dict[str, Any] = {"timeout": 0, "thread_local": False}
    if "fallback_to_soft" in inspect.signature(filelock.FileLock.__init__).parameters:  # not in older releases
        options["fallback_to_soft"] = False
    return filelock.FileLock(path, **options)


def _has_locks(run: Path) -> bool:
    """Whether a new, private file can be locked: older versions of filelock report "no locks" as "held"."""
    path = run / f".lock-probe-{os.getpid()}"
    probe = _lock(path)
    try:
        probe.acquire()
    except (OSError, NotImplementedError):  # a Timeout is an OSError
        return False
    finally:
        probe.release()
        with suppress(OSError):
            os.unlink(path)
    return True


def _own_by_note(run: Path, note: Path, me: Owner) -> None:
    by_hand = f"if that process has ended, remove {note} and try again; this file system has no locks to check that"
    try:
        for _ in range(2):  # the second attempt follows the removal of a dead owner's note
            with suppress(FileExistsError), open(note, "x", encoding="utf-8") as file:
                file.write(_text(me))
                break
            owner = _owner_to_name(note)
            if owner is not None and not _is_dead(owner):
                raise _refused(run, owner, by_hand)
            _remove(note, owner)
    except OSError as error:
        raise _cannot_write(run, error) from error
    time.sleep(_SETTLING)
    if (owner := _read(note)) != me:
        raise _refused(run, owner, by_hand)


def _remove(note: Path, owner: Owner | None) -> None:
    """Remove a dead owner's note, but not the note of another process that was faster."""
    moved = note.with_name(f"{note.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(note, moved)
        if _read(moved) == owner:
            os.unlink(moved)
        else:
            os.rename(moved, note)


def _is_dead(owner: Owner) -> bool:
    """True if the process has certainly ended. Processes of other hosts may be alive."""
    if owner.host != socket.gethostname():
        return False
    import psutil  # only where there are no locks

    try:
        # A process that started after the note was written only reuses the pid. 5 s allow for clock adjustments.
        return bool(psutil.Process(owner.pid).create_time() > owner.since + 5)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _owner_to_name(note: Path) -> Owner | None:
    """The owner for an error message. A new owner writes its note just after it gets the lock, so wait for it."""
    owner = _read(note)
    for _ in range(5):
        if owner is not None and not _is_dead(owner):
            break
        time.sleep(_SETTLING / 5)
        owner = _read(note)
    return owner


def _text(owner: Owner) -> str:
    return json.dumps(asdict(owner)) + "\n"


def _read(note: Path) -> Owner | None:
    try:
        values = json.loads(note.read_bytes())
        owner = Owner(int(values["pid"]), str(values["host"]), float(values["since"]))
        return owner if 0 < owner.pid < 2**31 and 0 <= owner.since < 2**33 else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _refused(run: Path, owner: Owner | None, do: str) -> TrilloraError:
    return TrilloraError(f"This run is in use by {owner or 'another process'}.", where=str(run), do=do)


def _cannot_write(run: Path, error: OSError) -> TrilloraError:
    return TrilloraError(
        f"The run's folder cannot be written: {error.strerror or error}.",
        where=str(run),
        do="choose a writable folder on a disk with free space",
    )
