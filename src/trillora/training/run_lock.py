"""One process owns a run folder.

The lock is the kernel's, on `RUN/.lock`, and ends with its owner however that ends. Beside it lies a note of who holds
it, for the message to whoever comes second. Where a file system has no locks, the note itself is the lock.
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

_SETTLING = 0.2  # seconds in which a note that is being written, or taken by another heir, comes to rest


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
    """Owns a run folder, which is made if need be; TrilloraError at once when another process does."""
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
        with suppress(OSError):  # the lock is held without it; a full disk is met later, where it can be told
            atomic.write_file(note, _text(me))
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(note) == me:
                os.unlink(note)
        lock.release()


def _lock(path: Path) -> filelock.BaseFileLock:
    """The kernel's lock or an error, never a file that outlives a killed owner."""
    options: dict[str, Any] = {"timeout": 0, "thread_local": False}
    if "fallback_to_soft" in inspect.signature(filelock.FileLock.__init__).parameters:  # not in older releases
        options["fallback_to_soft"] = False
    return filelock.FileLock(path, **options)


def _has_locks(run: Path) -> bool:
    """Whether a file nobody else knows can be locked: older filelocks take "no locks here" for "held by another"."""
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
    by_hand = f"if that process is gone, remove {note} and start again; this file system has no locks to tell"
    try:
        for _ in range(2):  # the second time after a dead owner's note was taken away
            with suppress(FileExistsError), open(note, "x", encoding="utf-8") as file:
                file.write(_text(me))
                break
            owner = _owner_to_name(note)
            if owner is not None and not _is_dead(owner):
                raise _refused(run, owner, by_hand)
            _take_away(note, owner)
    except OSError as error:
        raise _cannot_write(run, error) from error
    time.sleep(_SETTLING)
    if (owner := _read(note)) != me:
        raise _refused(run, owner, by_hand)


def _take_away(note: Path, owner: Owner | None) -> None:
    """Removes a dead owner's note; not that of another heir, who was faster."""
    aside = note.with_name(f"{note.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(note, aside)
        if _read(aside) == owner:
            os.unlink(aside)
        else:
            os.rename(aside, note)


def _is_dead(owner: Owner) -> bool:
    """Sure to be gone. Of another host nothing is known."""
    if owner.host != socket.gethostname():
        return False
    import psutil  # only where there are no locks

    try:
        # A process that began after the note was written has inherited the number; 5 s for clocks that are set.
        return bool(psutil.Process(owner.pid).create_time() > owner.since + 5)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _owner_to_name(note: Path) -> Owner | None:
    """Whom to name. A new owner writes its note a moment after it got the lock; until then a dead one's lies there."""
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
        told = json.loads(note.read_bytes())
        owner = Owner(int(told["pid"]), str(told["host"]), float(told["since"]))
        return owner if 0 < owner.pid < 2**31 and 0 <= owner.since < 2**33 else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _refused(run: Path, owner: Owner | None, do: str) -> TrilloraError:
    return TrilloraError(f"This run is in use by {owner or 'another process'}.", where=str(run), do=do)


def _cannot_write(run: Path, error: OSError) -> TrilloraError:
    return TrilloraError(
        f"The run's folder cannot be written: {error.strerror or error}.",
        where=str(run),
        do="choose a folder you may write to, on a disk with space",
    )
