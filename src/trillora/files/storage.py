"""Stores checkpoints: named sets of files that are added, replaced and removed atomically.

    storage = open_storage("runs/first/checkpoints")        # or "gs://bucket/first"
    storage.write("step-00000100", {"state.json": b"…", MARK: b"…"})
    storage.names()                                         # ["step-00000100"]

On a disk, a set is a folder. Its files are written into the hidden folder `.making-<name>-<process>` and flushed, then
the folder is renamed. A set that is replaced is first renamed to `.replaced-<name>`, one that is removed to
`.removing-<name>`.

At a URL (`gs://…`, any fsspec file system) there is no atomic rename: files appear one by one. While a set is written
or removed, it contains the file `.making`. Readers ignore such a set until its last file, `MARK`, is there. To replace
a set, the new one is first written completely to `.new-<name>`.

After a crash, `clean` finishes or undoes what was interrupted.

A note is a small file next to the sets: `.lock-owner` says which process writes here (`trillora.files.owner`).
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trillora.errors import TrilloraError, nearest
from trillora.files import atomic
from trillora.files.bounded import read_bounded, read_whole
from trillora.secrets import mask_urls, secrets_of_url, without_secrets

MARK = "checksums.json"  # written last; its presence shows that a set is complete
MAX_NOTE = 1 << 20  # bytes
CALL_SECONDS = 60.0  # for a store to answer; data gets more time, at the rate below
_SLOWEST_BYTES_PER_SECOND = 1 << 18

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # hidden names are longer; the limit of file systems is 255


class Storage(Protocol):
    where: str  # for messages, without secrets

    def exists(self) -> bool:
        """Whether there is anything at this place."""

    def names(self) -> list[str]:
        """The names of all completely written sets, sorted. A set that lost a file later is included."""

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """Adds or replaces a set, whose last file must be `MARK`. Raises OSError; other sets are never affected."""

    def sizes(self, name: str) -> dict[str, int | None]:
        """The bytes of each file of a set except hidden ones; None if a store does not say. A subfolder is listed as
        `name/`, with 0."""

    def read(self, name: str, only: Collection[str] | None = None) -> dict[str, bytes]:
        """The files of a set; all that `sizes` lists, or only these. A subfolder has no bytes."""

    def remove(self, name: str) -> None:
        """Removes a set. Readers stop seeing it before its first file is removed."""

    def clean(self) -> list[str]:
        """Cleans up after interrupted writes and removals; returns what it cleaned. Only for the writing process."""

    def read_note(self, name: str) -> bytes | None:
        """The content of a note, or None if there is none."""

    def write_note(self, name: str, data: bytes, *, new: bool) -> None:
        """Writes a note. FileExistsError if it must be new and is not; some stores can only check that first."""

    def remove_note(self, name: str, data: bytes) -> None:
        """Removes a note with this content. One with another content stays."""


def open_storage(where: str | Path) -> Storage:
    """Opens the storage at a path or an fsspec URL. Nothing is created before the first write."""
    if isinstance(where, str) and "://" in where:
        return RemoteStorage(where)
    return LocalStorage(Path(where).expanduser())


def check_name(name: str) -> None:
    """Refuses names that could leave the folder, be hidden, or have a meaning in a shell or URL."""
    if not _NAME.fullmatch(name):
        raise TrilloraError(
            f"{name[:80]!r} cannot be the name of a checkpoint or of one of its files.",
            do="use up to 128 letters, digits, '.', '_' and '-', and do not start with '.'",
        )


def _check(name: str, files: Mapping[str, bytes]) -> None:
    for checked in (name, *files):
        check_name(checked)
    assert list(files)[-1:] == [MARK], "MARK must be the last file"


class LocalStorage:
    """A folder on a disk or a mounted drive."""

    def __init__(self, root: Path) -> None:
        self.root = self._root = root
        self.where = str(root)

    def exists(self) -> bool:
        return os.path.exists(self._root)

    def names(self) -> list[str]:
        """Links are listed too: checkpoints may have been moved to another disk, which may be missing now."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(e.name for e in entries if _NAME.fullmatch(e.name) and (e.is_dir() or e.is_symlink()))
        except FileNotFoundError:
            return []

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        _check(name, files)
        atomic.make_folder(self._root)
        making = self._root / f".making-{name}-{os.getpid()}"
        try:
            _remove_tree(making)  # left by a killed process with the same id
            os.mkdir(making)
            for file, data in files.items():
                atomic.write_synced(making / file, data)
            atomic.sync_folder(making)
            self._commit(making, name)
        except BaseException:
            with suppress(OSError):
                _remove_tree(making)
            raise

    def _commit(self, making: Path, name: str) -> None:
        """Renames the finished folder. An existing folder is moved away first; `clean` can restore it."""
        target, old = self._root / name, self._root / f".replaced-{name}"
        replacing = os.path.lexists(target)
        if replacing:
            self._drop(old)
            os.rename(target, old)
        try:
            os.rename(making, target)
        except BaseException:
            if replacing:
                with suppress(OSError):
                    os.rename(old, target)
            raise
        atomic.sync_folder(self._root)
        if replacing:
            with suppress(OSError):  # the new set is in place; `clean` removes the rest
                _remove_tree(old)

    def sizes(self, name: str) -> dict[str, int | None]:
        check_name(name)
        with os.scandir(self._root / name) as entries:
            # File managers and notebooks create hidden files. Ours are never hidden.
            listed = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        return {e.name if e.is_file() else f"{e.name}/": e.stat().st_size if e.is_file() else 0 for e in listed}

    def read(self, name: str, only: Collection[str] | None = None) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for file in self.sizes(name):
            if only is not None and file not in only:
                continue
            path = self._root / name / file
            try:
                files[file] = b"" if file.endswith("/") else read_whole(path)
            except OSError as error:  # unlike open, read does not name the file
                raise OSError(error.errno, error.strerror, str(path)) from error
        return files

    def remove(self, name: str) -> None:
        check_name(name)
        hidden = self._root / f".removing-{name}"
        self._drop(hidden)
        os.rename(self._root / name, hidden)
        self._drop(hidden)

    def clean(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                hidden = sorted(e.name for e in entries if e.name.startswith((".making-", ".replaced-", ".removing-")))
        except FileNotFoundError:
            return []
        for entry in hidden:
            name = entry.removeprefix(".replaced-")
            if name != entry and _NAME.fullmatch(name) and not os.path.lexists(self._root / name):
                os.rename(self._root / entry, self._root / name)  # killed between the two renames of `_commit`
        for entry in hidden:
            self._drop(self._root / entry)
        if hidden:
            atomic.sync_folder(self._root)
        return hidden

    def read_note(self, name: str) -> bytes | None:
        try:
            return read_bounded(self._root / name, MAX_NOTE)
        except FileNotFoundError:
            return None
        except ValueError as error:  # a pipe, or a file that is not ours
            raise OSError(errno.EINVAL, str(error), str(self._root / name)) from error

    def write_note(self, name: str, data: bytes, *, new: bool) -> None:
        """Replaces a note in place: that works on a full disk, and notes are too short to be seen half written."""
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | (os.O_EXCL if new else 0)
        descriptor = os.open(self._root / name, flags, 0o666)
        try:
            os.write(descriptor, data)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def remove_note(self, name: str, data: bytes) -> None:
        """Renames it first: of several processes that remove a note, only one has it then."""
        moved = f"{name}-{os.getpid()}"
        with suppress(FileNotFoundError):
            os.rename(self._root / name, self._root / moved)
            if self.read_note(moved) == data:
                os.unlink(self._root / moved)
            else:
                os.rename(self._root / moved, self._root / name)

    def _drop(self, hidden: Path) -> None:
        """Removes a hidden folder. Its new name is flushed to the disk before its first file is removed."""
        if os.path.lexists(hidden):
            atomic.sync_folder(self._root)
            _remove_tree(hidden)


def _remove_tree(path: Path) -> None:
    """Removes a folder with its contents, or a file, if it exists. Links are not followed."""
    if os.path.islink(path) or not os.path.isdir(path):
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    with os.scandir(path) as entries:
        inside = sorted(entry.name for entry in entries)
    for name in inside:
        _remove_tree(path / name)
    os.rmdir(path)


class RemoteStorage:
    """A folder at an fsspec URL. Errors of the library that accesses it are raised as OSError."""

    def __init__(self, url: str) -> None:
        self.where = without_secrets(url)
        self._secrets = secrets_of_url(url)
        self._system, path = self._open(url)
        self._root = str(path).rstrip("/")
        if not self._root:
            raise TrilloraError("The URL names no folder.", where=self.where, do=f"use {self.where}NAME")

    def exists(self) -> bool:
        return bool(self._list(""))

    def names(self) -> list[str]:
        names = [name for name, entry in self._list("").items() if entry["type"] == "directory"]
        return sorted(name for name in names if _NAME.fullmatch(name) and self._is_there(self._list(name)))

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """To replace a set, its files must be removed first. So the new set is first written under a hidden name."""
        _check(name, files)
        spare = f".new-{name}"
        if self._is_there(self._list(name)) or self._list(spare):
            self._fill(spare, files)
        self._fill(name, files)
        with suppress(OSError):  # the set is written; `clean` removes the rest
            self._discard(spare)

    def _fill(self, name: str, files: Mapping[str, bytes]) -> None:
        try:
            self._hide(name)
            self._empty(name, {".making"})
            for file, data in files.items():
                self._put(name, file, data)
        except OSError:
            with suppress(OSError):
                self._discard(name)
            raise
        with suppress(OSError):  # the set is written; `clean` removes the rest
            self._call(self._system.rm_file, self._path(name, ".making"))

    def sizes(self, name: str) -> dict[str, int | None]:
        check_name(name)
        return self._sizes(name)

    def read(self, name: str, only: Collection[str] | None = None) -> dict[str, bytes]:
        check_name(name)
        return self._read(name, only)

    def _sizes(self, name: str) -> dict[str, int | None]:
        listed = self._list(name)
        if not listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.where}/{name}")
        sizes: dict[str, int | None] = {}
        for file, entry in sorted(listed.items()):
            if not file.startswith("."):
                is_folder = entry["type"] == "directory"
                sizes[f"{file}/" if is_folder else file] = 0 if is_folder else entry.get("size")
        return sizes

    def _read(self, name: str, only: Collection[str] | None = None) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for file, size in self._sizes(name).items():
            if only is not None and file not in only:
                continue
            if file.endswith("/"):
                files[file] = b""
            else:
                path = self._path(name, file)
                files[file] = bytes(self._call(self._system.cat_file, path, num_bytes=size or 0))
        return files

    def remove(self, name: str) -> None:
        check_name(name)
        self._discard(f".new-{name}")
        self._discard(name)

    def clean(self) -> list[str]:
        """Changes only sets with `.making`, `.new-…` and empty folders: the URL may have other contents too."""
        cleaned = []
        for folder, entry in sorted(self._list("").items()):
            name = folder.removeprefix(".new-")
            if entry["type"] != "directory" or not _NAME.fullmatch(name):
                continue
            files = self._list(folder)
            if not self._is_there(files):
                self._discard(folder)
            elif folder != name:  # the replacement is complete: put it in place
                content = self._read(folder)
                self._fill(name, {file: content[file] for file in sorted(content, key=lambda file: file == MARK)})
                self._discard(folder)
            elif ".making" in files:
                self._call(self._system.rm_file, self._path(name, ".making"))
            else:
                continue
            cleaned.append(folder)
        return cleaned

    def _hide(self, name: str) -> None:
        """Makes a set invisible for readers. From now on `clean` may remove it."""
        self._put(name, ".making", b"being written or removed\n")
        if MARK in self._list(name):
            self._call(self._system.rm_file, self._path(name, MARK))

    def _empty(self, name: str, keep: Collection[str]) -> None:
        for file, entry in self._list(name).items():
            if file in keep:
                continue
            if entry["type"] == "directory":
                self._call(self._system.rm, self._path(name, file), recursive=True)
            else:
                self._call(self._system.rm_file, self._path(name, file))

    def _discard(self, name: str) -> None:
        if self._list(name):
            self._hide(name)
            self._empty(name, {".making"})
            self._empty(name, ())
        with suppress(OSError):  # object stores have no folders; elsewhere an empty folder is harmless
            self._call(self._system.rmdir, self._path(name))

    @staticmethod
    def _is_there(files: Mapping[str, Mapping[str, object]]) -> bool:
        """Whether a set is complete. An empty mark is not: some systems create a file before they write its data."""
        return bool(files) and (".making" not in files or bool(files.get(MARK, {}).get("size")))

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *filter(None, parts)])

    def read_note(self, name: str) -> bytes | None:
        self._call(self._system.invalidate_cache)
        try:
            return bytes(self._call(self._system.cat_file, self._path(name)))
        except FileNotFoundError:
            return None

    def write_note(self, name: str, data: bytes, *, new: bool) -> None:
        exists = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.where}/{name}")
        if new and self.read_note(name) is not None:
            raise exists
        # Object stores can refuse to replace an object, so of two new notes one fails. Old versions of fsspec cannot.
        can_refuse = new and "mode" in inspect.signature(self._system.pipe_file).parameters
        try:
            self._put("", name, data, **({"mode": "create"} if can_refuse else {}))
        except OSError:
            if can_refuse and self.read_note(name) not in (None, data):
                raise exists from None
            raise

    def remove_note(self, name: str, data: bytes) -> None:
        if self.read_note(name) == data:
            self._call(self._system.rm_file, self._path(name))

    def _put(self, name: str, file: str, data: bytes, **options: object) -> None:
        path, size = self._path(name, file), len(data)
        try:
            self._call(self._system.pipe_file, path, data, num_bytes=size, **options)
        except FileNotFoundError:  # a file system with folders; object stores have none
            self._call(self._system.makedirs, self._path(name), exist_ok=True)
            self._call(self._system.pipe_file, path, data, num_bytes=size, **options)

    def _list(self, name: str) -> dict[str, dict[str, Any]]:
        """Entries by name. Uses `ls` because `find` and `walk` hide connection errors."""
        folder = self._path(name)
        try:
            self._call(self._system.invalidate_cache)
            entries = self._call(self._system.ls, folder, detail=True)
        except FileNotFoundError:
            return {}
        paths = [(entry["name"].rstrip("/"), entry) for entry in entries]
        # Some object stores list the folder itself as one of its entries.
        return {path.rpartition("/")[2]: entry for path, entry in paths if path.strip("/") != folder.strip("/")}

    def _open(self, url: str) -> tuple[Any, str]:
        import fsspec  # takes half a second, so it is imported only for URLs

        scheme = url.partition("://")[0]
        if "::" in url:
            raise TrilloraError("Chained URLs cannot store checkpoints.", where=self.where, do="use a single URL")
        if scheme not in fsspec.available_protocols():
            near = nearest(scheme, fsspec.available_protocols())
            raise TrilloraError(
                f"Unsupported URL scheme {scheme}://.",
                where=self.where,
                do=f"did you mean {near}://?" if near else "use gs://, s3:// or the path of a folder",
            )
        try:
            # A new instance: a shared one might cache listings.
            system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            package = (getattr(error.__cause__ or error, "name", None) or "").partition(".")[0]
            raise TrilloraError(
                f"URLs with {scheme}:// need another package{package and f': {package}'}.",
                where=self.where,
                do=f"pip install {package}" if package else f"install the fsspec package for {scheme}",
            ) from None
        except Exception as error:
            raise TrilloraError(
                f"The URL cannot be opened: {self._message(error)}",
                where=self.where,
                do="check the URL and your credentials",
            ) from None
        return system, str(path)

    def _call(self, function: Callable[..., object], *arguments: object, num_bytes: int = 0, **options: object) -> Any:
        seconds = CALL_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND
        try:
            return _within(seconds, lambda: function(*arguments, **options))
        except FileNotFoundError as error:
            raise FileNotFoundError(self._message(error)) from None
        except Exception as error:  # the libraries of cloud stores have their own exception types
            raise OSError(self._message(error)) from None

    def _message(self, error: Exception) -> str:
        """The error's name and text, without the secrets of the URL."""
        return mask_urls(f"{type(error).__name__}: {error}", self._secrets)


def _within(seconds: float, work: Callable[[], object]) -> Any:
    """The result of work that may never end: a store behind a firewall does not even refuse a connection. It is done in
    a thread that the process does not wait for."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="trillora-storage", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # an error of the work itself
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
