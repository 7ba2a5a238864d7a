"""Only one process at a time writes to a place: a run's folder, or where its checkpoints are stored.

    with lock_run(run), own_checkpoints(open_storage("gs://bucket/run"), run) as owned:
        owned.check()                       # before every change

The owner keeps a note at the place, and renews `beat` every 30 s:

    .lock-owner    {"pid": 71, "host": "vm-3", "machine": "…", "since": 1790000000.0, "beat": 1790000090.0}

Folders are also locked by the kernel (`.lock`), if the file system can do that. The kernel releases the lock when the
owner ends for any reason, so it decides between the processes of one machine. Object stores have no locks, and many
drives that are mounted over a network lock for one machine only: there the note decides. An owner is gone if

- its process has ended, which is visible on its own machine only;
- or its note was not renewed for 2 min, as after the loss of a virtual machine. The next process waits for that.

An owner that was taken for dead, such as a computer that slept, notices it before its next change and stops.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import filelock

from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files import atomic
from trillora.files.storage import LocalStorage, Storage

NOTE = ".lock-owner"
BEAT_SECONDS = 30.0  # between two signs of life
STALE_SECONDS = 120.0  # without a sign of life, until another machine may take over
_POLL_SECONDS = 2.0
# Seconds to wait until a note that another process is writing or replacing is final. Requests to a store take longer.
_SETTLING, _SETTLING_REMOTE = 0.2, 1.0


@dataclass(frozen=True)
class Owner:
    pid: int
    host: str
    since: float  # seconds since 1970
    machine: str  # where `pid` means this process
    beat: float = field(default=0.0, compare=False)  # the last sign of life, in seconds since 1970

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {began}"

    @property
    def is_here(self) -> bool:
        return self.machine == _machine()

    def is_gone(self) -> bool:
        """True if the process has certainly ended, or gave no sign of life for a long time."""
        if not self.is_here:
            return time.time() - self.beat >= STALE_SECONDS
        import psutil  # only if there is a note

        try:
            # A process that started after the note was written only reuses the pid. 5 s allow for clock adjustments.
            return bool(psutil.Process(self.pid).create_time() > self.since + 5)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


class Ownership:
    """The note of this process at a place. A thread renews it."""

    def __init__(self, storage: Storage, title: str, option: str) -> None:
        self._storage, self._title, self._option = storage, title, option
        now = round(time.time(), 3)
        self._me = Owner(os.getpid(), socket.gethostname(), now, _machine(), now)
        self._changing = threading.Lock()  # the note: a beat must not write it again after `release`
        self._ended = threading.Event()

    def take(self, listener: Listener, settling: float) -> None:
        """Writes the note, unless there is a live owner."""
        self._wait_for_last_owner(listener)
        with suppress(FileExistsError):  # another process was faster
            self._storage.write_note(NOTE, _text(self._me), new=True)
            time.sleep(settling)
        if (owner := _read(self._storage)[1]) != self._me:
            raise self.refusal(owner)
        threading.Thread(target=self._keep_beating, name="trillora-owner", daemon=True).start()

    def check(self) -> None:
        """TrilloraError if another process has taken over. Call it before every change of the place."""
        with self._changing:
            self._renew()

    def release(self) -> None:
        self._ended.set()
        with self._changing, suppress(OSError):
            data, owner = _read(self._storage)
            if data is not None and owner == self._me:
                self._storage.remove_note(NOTE, data)

    def refusal(self, owner: Owner | None) -> TrilloraError:
        return TrilloraError(
            f"{self._title} in use by {owner or 'another process'}.",
            where=self._storage.where,
            do=f"wait for it, stop it, or use another {self._option}",
        )

    def _wait_for_last_owner(self, listener: Listener) -> None:
        """Returns when the place has no owner any more, and its note is removed. An owner on another machine gets time
        for a sign of life."""
        first: Owner | None = None
        until = 0.0
        while True:
            data, owner = _read(self._storage)
            if owner is None or owner.is_gone() or (first is not None and time.monotonic() >= until):
                break
            if owner.is_here or (first is not None and (owner, owner.beat) != (first, first.beat)):
                raise self.refusal(owner)
            if first is None:
                first = owner
                # At most the whole time: the clock of the other machine may be ahead.
                seconds = min(STALE_SECONDS, STALE_SECONDS - (time.time() - owner.beat))
                until = time.monotonic() + seconds
                listener(Note(f"{self._title} in use by {owner}. Waiting up to {seconds:.0f} s for a sign of life"))
            time.sleep(max(0.01, min(_POLL_SECONDS, until - time.monotonic())))
        if data is not None:
            self._storage.remove_note(NOTE, data)

    def _renew(self) -> None:
        """Writes the note again, also if it was removed by hand. Errors of the storage are ignored: the change that
        follows meets them too."""
        try:
            _, owner = _read(self._storage)
            if owner is None or owner == self._me:
                self._storage.write_note(NOTE, _text(replace(self._me, beat=round(time.time(), 3))), new=False)
                return
        except OSError:
            return
        raise TrilloraError(
            f"Another process has taken over. {self._title} in use by {owner}.",
            where=self._storage.where,
            do=f"let that process continue, or stop it and use another {self._option} for this one",
        )

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with self._changing, suppress(TrilloraError):  # `check` raises it in a thread that can stop the run
                if not self._ended.is_set():
                    self._renew()


@contextmanager
def own(storage: Storage, title: str, option: str, listener: Listener) -> Iterator[Ownership]:
    """Own a place during the block; a folder is created if it is missing. TrilloraError if another process owns it.
    `title` starts the error message, and `option` names the place in the recipe or on the command line."""
    owned = Ownership(storage, title, option)
    with ExitStack() as stack:
        try:
            settling = _SETTLING_REMOTE
            if isinstance(storage, LocalStorage):
                atomic.make_folder(storage.root)
                lock = _lock(storage.root / ".lock")
                is_locked = _acquire(lock, storage.root)
                if is_locked is False:
                    raise owned.refusal(_live_owner(storage))
                stack.callback(lock.release)
                settling = 0 if is_locked else _SETTLING
            owned.take(listener, settling)
        except OSError as error:
            raise TrilloraError(
                f"{option} cannot be written: {error.strerror or error}.",
                where=storage.where,
                do=f"make it writable, with free space, or use another {option}",
            ) from error
        stack.callback(owned.release)
        yield owned


@contextmanager
def lock_run(run: Path, listener: Listener = ignore_events) -> Iterator[Ownership]:
    """Own a run's folder."""
    with own(LocalStorage(run), "This run is", "--out", listener) as owned:
        yield owned


@contextmanager
def own_checkpoints(storage: Storage, run: Path, listener: Listener = ignore_events) -> Iterator[Ownership | None]:
    """Own the place of a run's checkpoints. None if it is the run's folder, which is locked already."""
    if isinstance(storage, LocalStorage) and os.path.realpath(storage.root) == os.path.realpath(run):
        yield None
        return
    with own(storage, "These checkpoints are", "train.checkpoint_dir", listener) as owned:
        yield owned


@contextmanager
def removed_if_unused(*folders: Path) -> Iterator[None]:
    """If the block fails, folders that it has created are removed again, unless there is more in them than a lock."""
    created = [folder for named in folders for folder in (named, *named.parents) if not os.path.lexists(folder)]
    try:
        yield
    except BaseException:
        for folder in sorted(created, key=lambda folder: -len(folder.parts)):  # inner ones first
            with suppress(OSError):  # one that is in use stays
                _remove_unused(folder)
        raise


def _remove_unused(folder: Path) -> None:
    file = folder / ".lock"
    if os.listdir(folder) == [file.name]:
        lock = _lock(file)
        lock.acquire()  # a Timeout is an OSError: another process has just started here
        try:
            if os.listdir(folder) == [file.name]:
                os.unlink(file)
        finally:
            lock.release()
    os.rmdir(folder)


def _acquire(lock: filelock.BaseFileLock, folder: Path) -> bool | None:
    """True if the lock is ours now, False if another process has it, None if this file system has no locks."""
    try:
        lock.acquire()
    except filelock.Timeout:
        return False if _has_locks(folder) else None
    except (OSError, NotImplementedError):
        return None
    return True


def _lock(path: Path) -> filelock.BaseFileLock:
    """A kernel lock or an error, never a lock file that remains when its owner is killed."""
    options: dict[str, Any] = {"timeout": 0, "thread_local": False}
    if "fallback_to_soft" in inspect.signature(filelock.FileLock.__init__).parameters:  # not in older releases
        options["fallback_to_soft"] = False
    return filelock.FileLock(path, **options)


def _has_locks(folder: Path) -> bool:
    """Whether a new, private file can be locked: older versions of filelock report "no locks" as "held"."""
    path = folder / f".lock-probe-{os.getpid()}"
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


def _live_owner(storage: Storage) -> Owner | None:
    """The owner for an error message. A new owner writes its note just after it gets the lock, so wait for it."""
    owner = None
    for _ in range(5):
        with suppress(OSError):
            _, owner = _read(storage)
            if owner is not None and not owner.is_gone():
                break
        time.sleep(_SETTLING / 5)
    return owner


@cache
def _machine() -> str:
    """The computer since its last start, and the container: only there a process id has a meaning."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):  # not Linux
        return socket.gethostname()


def _text(owner: Owner) -> bytes:
    return (json.dumps(asdict(owner)) + "\n").encode()


def _read(storage: Storage) -> tuple[bytes | None, Owner | None]:
    """The note and the owner it names. A note that is being written is read again."""
    data = storage.read_note(NOTE)
    for _ in range(5):
        if data is None or (owner := _parse(data)) is not None:
            return data, None if data is None else owner
        time.sleep(_SETTLING / 5)
        data = storage.read_note(NOTE)
    return data, None


def _parse(data: bytes) -> Owner | None:
    try:
        values = json.loads(data)
        pid, since = int(values["pid"]), float(values["since"])
        beat = float(values["beat"])
        if not (0 < pid < 2**31 and 0 <= since < 2**33 and 0 <= beat < 2**33):
            return None
        return Owner(pid, str(values["host"]), since, str(values["machine"]), beat)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
