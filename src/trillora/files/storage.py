"""Where checkpoints lie: named sets of files that appear whole and vanish whole.

A folder on a disk commits by renaming: files are written into a hidden folder, flushed, and the folder gets its name.
Behind a URL (`gs://…`, any fsspec file system) there is no such rename: objects appear one by one. There a set being
written or removed holds the object `.making`, and is not there for readers until its mark, written last, is.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trillora.errors import TrilloraError, nearest
from trillora.files import atomic
from trillora.secrets import mask_urls, secrets_of_url, without_secrets

MARK = "checksums.json"  # the last file of every set

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # room for what the hidden names add, within 255


class Storage(Protocol):
    where: str  # for messages: never a password or a token

    def names(self) -> list[str]:
        """The sets that were written to their end, sorted; also those that lost a file since."""

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """Adds a set or replaces it; its last file is `MARK`. OSError where it cannot; other sets are untouched."""

    def read(self, name: str) -> dict[str, bytes]:
        """All files of a set but hidden ones. What is no file is listed with a slash and no bytes."""

    def remove(self, name: str) -> None:
        """Takes a set away: gone for readers first, then file by file."""

    def clean(self) -> list[str]:
        """Removes what writes and removals left that never finished, and names it. Only for the one who writes here."""


def open_storage(where: str | Path) -> Storage:
    """The storage at a path or an fsspec URL; nothing is created before the first write."""
    if isinstance(where, str) and "://" in where:
        return RemoteStorage(where)
    return LocalStorage(Path(where).expanduser())


def check_name(name: str) -> None:
    """Refuses every name that could lead out of its folder, hide, or mean something to a shell or a URL."""
    if not _NAME.fullmatch(name):
        raise TrilloraError(
            f"{name[:80]!r} cannot be the name of a checkpoint or of a file in one.",
            do="use up to 128 letters, digits, '.', '_' and '-', the first of them no '.'",
        )


def _check(name: str, files: Mapping[str, bytes]) -> None:
    for each in (name, *files):
        check_name(each)
    assert list(files)[-1:] == [MARK], "the mark is written last"


class LocalStorage:
    """A folder on a disk, a mounted drive included."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.where = str(root)

    def names(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        _check(name, files)
        atomic.make_folder(self._root)
        making = self._root / f".making-{name}-{os.getpid()}"
        try:
            _remove_tree(making)  # of a killed process that had our number
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
        """Gives the finished folder its name. A folder of that name steps aside; `clean` knows how to bring it back."""
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
            with suppress(OSError):  # the new one is in place; `clean` takes what stays
                _remove_tree(old)

    def read(self, name: str) -> dict[str, bytes]:
        check_name(name)
        files: dict[str, bytes] = {}
        with os.scandir(self._root / name) as entries:
            # File managers and notebooks leave hidden files wherever somebody looks; none of ours is hidden.
            listed = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        for entry in listed:
            if not entry.is_file():
                files[f"{entry.name}/"] = b""
                continue
            try:
                files[entry.name] = Path(entry.path).read_bytes()
            except OSError as error:  # a failing read, unlike a failing open, does not say of which file
                raise OSError(error.errno, error.strerror, entry.path) from error
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
        for each in hidden:
            name = each.removeprefix(".replaced-")
            if name != each and _NAME.fullmatch(name) and not os.path.lexists(self._root / name):
                os.rename(self._root / each, self._root / name)  # killed between the two renames of a replacement
        for each in hidden:
            self._drop(self._root / each)
        if hidden:
            atomic.sync_folder(self._root)
        return hidden

    def _drop(self, hidden: Path) -> None:
        """Removes a hidden folder. Its new name reaches the disk before the first of its files leaves it."""
        if os.path.lexists(hidden):
            atomic.sync_folder(self._root)
            _remove_tree(hidden)


def _remove_tree(path: Path) -> None:
    """Removes a folder and all in it, or a file, or nothing; follows no links."""
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
    """A folder behind an fsspec URL. Every failure of whatever library answers there becomes an OSError."""

    def __init__(self, url: str) -> None:
        self.where = without_secrets(url)
        self._secrets = secrets_of_url(url)
        self._system, path = self._open(url)
        self._root = str(path).rstrip("/")
        if not self._root:
            raise TrilloraError("The address names no folder.", where=self.where, do=f"write {self.where}NAME")

    def names(self) -> list[str]:
        names = [name for name, entry in self._list("").items() if entry["type"] == "directory"]
        return sorted(name for name in names if _NAME.fullmatch(name) and self._is_there(self._list(name)))

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """A set that is replaced goes before its successor is there: so that comes whole under a hidden name first."""
        _check(name, files)
        spare = f".new-{name}"
        if self._is_there(self._list(name)) or self._list(spare):
            self._fill(spare, files)
        self._fill(name, files)
        with suppress(OSError):  # written; `clean` takes what stays
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
        with suppress(OSError):  # written; `clean` takes what stays
            self._ask(self._system.rm_file, self._path(name, ".making"))

    def read(self, name: str) -> dict[str, bytes]:
        check_name(name)
        return self._read(name)

    def _read(self, name: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        listed = self._list(name)
        if not listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.where}/{name}")
        for file, entry in sorted(listed.items()):
            if file.startswith("."):
                continue
            if entry["type"] == "directory":
                files[f"{file}/"] = b""
            else:
                files[file] = bytes(self._ask(self._system.cat_file, self._path(name, file)))
        return files

    def remove(self, name: str) -> None:
        check_name(name)
        self._discard(f".new-{name}")
        self._discard(name)

    def clean(self) -> list[str]:
        """Touches only what holds `.making`, `.new-…` and empty folders: other things may lie at the same address."""
        cleaned = []
        for folder, entry in sorted(self._list("").items()):
            name = folder.removeprefix(".new-")
            if entry["type"] != "directory" or not _NAME.fullmatch(name):
                continue
            files = self._list(folder)
            if not self._is_there(files):
                self._discard(folder)
            elif folder != name:  # the replacement is whole: it is put in place now
                content = self._read(folder)
                self._fill(name, {file: content[file] for file in sorted(content, key=lambda file: file == MARK)})
                self._discard(folder)
            elif ".making" in files:
                self._ask(self._system.rm_file, self._path(name, ".making"))
            else:
                continue
            cleaned.append(folder)
        return cleaned

    def _hide(self, name: str) -> None:
        """From here on readers see nothing, and `clean` may take it all."""
        self._put(name, ".making", b"being written or removed\n")
        if MARK in self._list(name):
            self._ask(self._system.rm_file, self._path(name, MARK))

    def _empty(self, name: str, but: Collection[str]) -> None:
        for file, entry in self._list(name).items():
            if file in but:
                continue
            if entry["type"] == "directory":
                self._ask(self._system.rm, self._path(name, file), recursive=True)
            else:
                self._ask(self._system.rm_file, self._path(name, file))

    def _discard(self, name: str) -> None:
        if self._list(name):
            self._hide(name)
            self._empty(name, {".making"})
            self._empty(name, ())
        with suppress(OSError):  # object stores have no folders; elsewhere an empty one may stay
            self._ask(self._system.rmdir, self._path(name))

    @staticmethod
    def _is_there(files: Mapping[str, Mapping[str, Any]]) -> bool:
        """An empty mark is one whose file was opened and not yet written: not every system puts a file at once."""
        return bool(files) and (".making" not in files or bool(files.get(MARK, {}).get("size")))

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *filter(None, parts)])

    def _put(self, name: str, file: str, data: bytes) -> None:
        try:
            self._ask(self._system.pipe_file, self._path(name, file), data)
        except FileNotFoundError:  # a system that knows folders; object stores do not need them
            self._ask(self._system.makedirs, self._path(name), exist_ok=True)
            self._ask(self._system.pipe_file, self._path(name, file), data)

    def _list(self, name: str) -> dict[str, dict[str, Any]]:
        """Entries by name. Not `find` or `walk`: they keep silent about a connection that failed."""
        folder = self._path(name)
        try:
            self._ask(self._system.invalidate_cache)
            entries = self._ask(self._system.ls, folder, detail=True)
        except FileNotFoundError:
            return {}
        paths = [(entry["name"].rstrip("/"), entry) for entry in entries]
        # Some object stores list the folder itself among its contents.
        return {path.rpartition("/")[2]: entry for path, entry in paths if path.strip("/") != folder.strip("/")}

    def _open(self, url: str) -> tuple[Any, str]:
        import fsspec  # half a second, and only where a URL is used

        scheme = url.partition("://")[0]
        if "::" in url:
            raise TrilloraError("Chained addresses cannot hold checkpoints.", where=self.where, do="name one address")
        if scheme not in fsspec.available_protocols():
            near = nearest(scheme, fsspec.available_protocols())
            raise TrilloraError(
                f"Nobody here knows addresses that begin with {scheme}://.",
                where=self.where,
                do=f"did you mean {near}://?" if near else "use gs://, s3://, or the path of a folder",
            )
        try:
            # Not an instance shared with others, who may have told it to remember listings.
            system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            missing = getattr(error.__cause__ or error, "name", None) or "the package that fsspec names for it"
            raise TrilloraError(
                f"Addresses that begin with {scheme}:// need the package {missing.partition('.')[0]}.",
                where=self.where,
                do=f"pip install {missing.partition('.')[0]}",
            ) from None
        except Exception as error:
            raise TrilloraError(
                f"The address cannot be opened: {self._said(error)}",
                where=self.where,
                do="check the address and your credentials for it",
            ) from None
        return system, str(path)

    def _ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(self._said(error)) from None
        except Exception as error:  # libraries of cloud stores have error trees of their own
            raise OSError(self._said(error)) from None

    def _said(self, error: Exception) -> str:
        """The error's name and text, without the secrets of the URL."""
        return mask_urls(f"{type(error).__name__}: {error}", self._secrets)
