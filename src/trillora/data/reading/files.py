"""Expands the recipe's paths to an ordered list of data files, and checks that they exist before any is read.

An entry is a file, a glob, a folder, an fsspec URL (`gs://…`, `memory://…`) or a Hugging Face dataset id
(`owner/name`, `owner/name@revision`; `hf://datasets/owner/name/path` for some of its files), whose files come from the
hub's cache. A local path has precedence over the hub.
In folders, archives and dataset repositories only files with a known suffix are used, except hidden files and files
that describe the data (README, LICENSE, dataset_infos.json). The order does not depend on the file system.

However a local path is written (a link, `file://…`, `local://…`), its file is opened in one place, which refuses pipes
and devices.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from trillora.errors import TrilloraError, nearest
from trillora.files.hub import HUB_ID_AT, download
from trillora.secrets import without_secrets

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".md": "text",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")
KNOWN = " ".join([*FORMATS, *ARCHIVES]) + ", each format also with .gz or .zst"

_HUB_URL = re.compile(r"hf://datasets/(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.*))?")
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|changelog|citation)(?:\.\w+)?|dataset_infos?\.json|dataset_dict\.json|state\.json", re.I
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
HASHED_BLOCK = 1 << 20  # bytes; a file is checked in blocks of this size while it is read


class FileKind(NamedTuple):
    """What the suffixes of a file name mean: `format` inside `compression` ("": none), or an archive of such files."""

    format: str  # a value of FORMATS, or "tar", "zip"
    compression: str  # "", "gzip" or "zstd"

    @property
    def is_archive(self) -> bool:
        return self.format in ("tar", "zip")


class Content(NamedTuple):
    """What a file contained when it was hashed, so that bytes read later can be compared with it.

    SHA-256 works block by block. Its state before each block is kept, so any single block can be checked again, in any
    order: the digest of the whole file then covers the bytes that were really used.
    """

    size: int  # bytes
    sha256: str  # hex digest
    states: tuple[Any, ...]  # of hashlib, after 0, 1, 2 … blocks; empty for a file of the hub, which gives its digest

    def digest_in_order(self) -> Any:
        """A state of hashlib for `sha256`, to be updated with the whole file. Of small files, the hub gives git's."""
        is_of_git = len(self.sha256) == 40
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False) if is_of_git else hashlib.sha256()

    def has_block(self, number: int, block: bytes) -> bool:
        """Whether `block` is the block of this number."""
        if not self.states:  # of the hub: compared as a whole (`RawFile`)
            return True
        state = self.states[number].copy()
        state.update(block)
        return bool(state.digest() == self.states[number + 1].digest())


@dataclass(frozen=True)
class DataFile:
    """One file to read."""

    name: str  # shown to the user; without the credentials of a URL
    path: str  # a local path or an fsspec URL
    source: int  # index of the entry in data.path
    kind: FileKind
    known: Content | None = None  # of a file of the hub, which is then read only once

    def open(self) -> BinaryIO:
        if not _URL.match(self.path):
            return _open_regular(self.path, self.name)
        system, inner = _file_system(self.path)
        return cast(BinaryIO, system.open(inner, "rb"))

    def content(self) -> Content:
        """Reads the whole file once, unless its content is known."""
        if self.known is not None:
            return self.known
        size, state = 0, hashlib.sha256()
        states = [state.copy()]
        try:
            with self.open() as stream:
                while block := read_block(stream, HASHED_BLOCK):
                    size += len(block)
                    state.update(block)
                    states.append(state.copy())
        except Exception as error:  # remote stores have their own exception types
            raise cannot_read(self.name, error) from None
        return Content(size, state.hexdigest(), tuple(states))


def read_block(stream: BinaryIO, size: int) -> bytes:
    """Exactly `size` bytes, fewer only at the end. Some remote files return fewer bytes than they have."""
    block = stream.read(size)
    while block and len(block) < size and (more := stream.read(size - len(block))):
        block += more
    return block


def expand(paths: Sequence[str]) -> list[DataFile]:
    """The data files of all entries, in the order of the entries and sorted by name within each."""
    files: list[DataFile] = []
    for source, entry in enumerate(paths):
        if (part := _HUB_URL.fullmatch(entry)) is not None:
            files += _hub(entry, part["id"], part["revision"], part["path"], source)
        elif _URL.match(entry) and not entry.startswith("file://"):
            files += _remote(entry, source)
        else:
            files += _local(os.path.expanduser(entry.removeprefix("file://")), source)
    return files


def _open_regular(path: str, name: str) -> BinaryIO:
    """Opens a local file. Pipes and devices are refused: they may have no end, or wait for a writer."""
    # Without O_NONBLOCK, opening a pipe waits.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TrilloraError("This is not a regular file.", where=name, do="copy the data into a regular file")
    return os.fdopen(descriptor, "rb")


def kind_of(name: str) -> FileKind | None:
    """The kind of a file by its suffixes, in upper or lower case; None if it is not a data file."""
    name = name.lower()
    if name.endswith(".tgz"):
        return FileKind("tar", "gzip")
    stem, suffix = os.path.splitext(name)
    if compression := COMPRESSIONS.get(suffix, ""):
        suffix = os.path.splitext(stem)[1]
    if suffix == ".tar" or (suffix == ".zip" and not compression):
        return FileKind(suffix[1:], compression)
    return FileKind(FORMATS[suffix], compression) if suffix in FORMATS else None


def found_data(path: str) -> FileKind | None:
    """`kind_of` for a file found in a folder, an archive or a repository rather than given by its path."""
    return None if is_about_data(path) else kind_of(path)


def is_about_data(path: str) -> bool:
    """Whether a file that was found is hidden, or describes the data."""
    parts = PurePosixPath(path).parts
    is_hidden = any(part.startswith((".", "__MACOSX")) for part in parts if part not in (".", ".."))
    return is_hidden or bool(_ABOUT_DATA.fullmatch(parts[-1] if parts else ""))


def left_out(entry: str) -> str | None:
    """What to say about the files of a local folder or glob that `expand` does not use; None if there are none."""
    entry = os.path.expanduser(entry.removeprefix("file://"))
    if _URL.match(entry):
        return None
    if os.path.isdir(entry):
        found = [os.path.relpath(os.path.join(at, name), entry) for at, _, names in os.walk(entry) for name in names]
    elif glob.has_magic(entry) and not os.path.lexists(entry):
        found = [os.path.basename(path) for path in glob.glob(entry, recursive=True) if os.path.isfile(path)]
    else:
        return None
    names = [name for name in found if not is_about_data(name.replace(os.sep, "/")) and kind_of(name) is None]
    return f"{entry}: {say_left_out(names)}" if names else None


def say_left_out(names: Sequence[str]) -> str:
    """Which files have an unknown suffix: "3 files are left out, which no reader knows: 2 x .rst, 1 x .pdf"."""
    suffixes = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in names)
    most = sorted(suffixes.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
    counts = ", ".join(f"{count:,} x {suffix}" for suffix, count in most)
    return f"{len(names):,} {'file is' if len(names) == 1 else 'files are'} left out, which no reader knows: {counts}"


def cannot_read(name: str, error: Exception) -> TrilloraError:
    """Reading failed for a reason outside the data. Only the system's message is shown: others may contain secrets."""
    if isinstance(error, TrilloraError):
        return error
    what = f"The data file cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}."
    return TrilloraError(what, where=name, do="check the file, its permissions and the connection")


def _local(entry: str, source: int) -> list[DataFile]:
    if not entry or "\0" in entry:
        what = "A data path is empty or contains a NUL character."
        raise TrilloraError(what, where="data.path", do="write the path of a file or a folder")
    if os.path.isdir(entry):
        return _folder(entry, entry, source)
    if os.path.lexists(entry):
        return [_local_file(entry, entry, source)]
    if glob.has_magic(entry):
        matches = sorted(set(glob.glob(entry, recursive=True)))
        chosen = [path for path in matches if os.path.isfile(path) and found_data(os.path.basename(path))]
        if not chosen:
            raise _nothing_there(entry, len(matches))
        return [_local_file(path, path, source) for path in chosen]
    hub_id = HUB_ID_AT.fullmatch(entry)
    if hub_id and kind_of(entry) is None:
        return _hub(entry, hub_id["id"], hub_id["revision"], None, source)
    raise _no_file(entry)


def _no_file(entry: str) -> TrilloraError:
    """The error for a path where nothing is, with the most similar data file or folder in its place."""
    folder, name = os.path.split(entry)
    try:
        others = [each.name for each in os.scandir(folder or ".") if each.is_dir() or kind_of(each.name)]
    except OSError:
        others = []
    meant = nearest(name, others)
    do = f"did you mean '{meant}'? Check" if meant else "check"
    do += " the path; a relative path in a recipe starts at the recipe's folder"
    return TrilloraError(f"The data file {entry} does not exist.", where=entry, do=do)


def _hub(entry: str, name: str, revision: str | None, path: str | None, source: int) -> list[DataFile]:
    """The data files of a data set on the hub: all of them, or those at a path (a file, a glob or a folder) in it. They
    are downloaded to the hub's cache, because a URL would be read from the network at every start."""
    suffixes = [*(suffix + compression for suffix in FORMATS for compression in ("", *COMPRESSIONS)), *ARCHIVES]
    wanted, not_data = [f"*{suffix}" for suffix in suffixes], ("README*", "*/README*", ".*", "*/.*")
    if path:
        is_file = glob.has_magic(path) or kind_of(path) is not None
        wanted = [path] if is_file else [f"{path.rstrip('/')}/{pattern}" for pattern in wanted]
    snapshot = download(name, "dataset", revision=revision, allow=wanted, ignore=not_data)
    if not snapshot.is_dir():  # the hub creates no folder if no file matches
        raise _nothing_there(entry, 0)
    files = _folder(str(snapshot), name if path else entry, source)
    chosen = [file for file in files if any(fnmatchcase(file.name.removeprefix(f"{name}/"), each) for each in wanted)]
    if path and not chosen:
        raise _nothing_there(entry, len(files))
    return chosen if path else files


def _folder(folder: str, shown_as: str, source: int) -> list[DataFile]:
    """The data files in a folder and its subfolders. Links to files are followed, links to folders (cycles) are not."""
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder, onerror=_raise) for name in names]
    below = {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in paths}
    # Sorted by the path inside the folder, which is the same on every machine.
    chosen = sorted(name for name, path in below.items() if found_data(name) and os.path.isfile(path))
    if not chosen:
        raise _nothing_there(shown_as, len(paths))
    return [_local_file(below[name], os.path.join(shown_as, name), source) for name in chosen]


def _local_file(path: str, name: str, source: int) -> DataFile:
    kind = kind_of(path)
    if kind is None:
        raise _unknown_suffix(name)
    try:
        _open_regular(path, name).close()
    except OSError as error:
        raise cannot_read(name, error) from None
    return DataFile(name=name, path=path, source=source, kind=kind)


def _remote(entry: str, source: int) -> list[DataFile]:
    shown = _shown(entry)
    if "::" in entry:
        do = "write only the inner URL: archives, .gz and .zst are read in place"
        raise TrilloraError("Chained URLs are not supported.", where=shown, do=do)
    is_web = entry.startswith(("http://", "https://"))
    try:
        system, path = _file_system(entry)
        if _is_local(system):
            return _local(path, source)
        if not is_web and glob.has_magic(path):
            paths = [found for found in system.glob(path) if system.isfile(found)]
        elif not is_web and system.isdir(path):
            paths = list(system.find(path))
        else:
            system.info(path)  # raises if it does not exist
            return [_remote_file(entry, source)]
        chosen = sorted(found for found in paths if found_data(_below(found, path)))
        if chosen:
            return [_remote_file(system.unstrip_protocol(found), source) for found in chosen]
    except FileNotFoundError:
        do = "check the URL and your access rights"
        raise TrilloraError(f"There is no data at {shown}.", where=shown, do=do) from None
    except TrilloraError:
        raise
    except Exception as error:  # each store has its own exception types; their messages may contain secrets
        what = f"The URL cannot be opened: {type(error).__name__}."
        do = "check the URL, your access rights and the connection"
        raise TrilloraError(what, where=shown, do=do) from None
    raise _nothing_there(shown, len(paths))


def _remote_file(url: str, source: int) -> DataFile:
    shown = _shown(url)
    kind = kind_of(shown)
    if kind is None:
        raise _unknown_suffix(shown)
    return DataFile(name=shown, path=url, source=source, kind=kind)


def _is_local(system: object) -> bool:
    """Whether an fsspec file system is this machine's: `local://` and `file://`."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(system, LocalFileSystem)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError):
        packages = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "http": "aiohttp"}
        package = packages.get(scheme.removesuffix("s") if scheme == "https" else scheme)
        do = f"pip install {package or 'the fsspec package for this scheme'}, or copy the data to this machine"
        raise TrilloraError(f"URLs with the scheme {scheme}:// cannot be opened.", where=_shown(url), do=do) from None
    return system, str(path)


def _below(path: str, folder: str) -> str:
    """The part of a path below the given folder or glob: the given part may be hidden, the part found may not."""
    fixed = os.path.dirname(re.split(r"[*?\[]", folder)[0]) if glob.has_magic(folder) else folder
    return path.removeprefix(fixed).strip("/")


def _shown(url: str) -> str:
    """The URL without secrets. Outside the web, `#` is part of a file name and does not start a fragment."""
    if url.startswith(("http://", "https://")):
        return without_secrets(url)
    return without_secrets(url.replace("#", "\0")).replace("\0", "#")


def _unknown_suffix(name: str) -> TrilloraError:
    what = "The suffix of this file is unknown, so its format is not clear."
    return TrilloraError(what, where=name, do=f"give it one of the suffixes {KNOWN}")


def _nothing_there(entry: str, num_seen: int) -> TrilloraError:
    others = f" among the {num_seen} files there" if num_seen else ""
    return TrilloraError(f"{entry} has no data file{others}.", where=entry, do=f"use one of the suffixes {KNOWN}")


def _raise(error: OSError) -> None:
    raise cannot_read(str(error.filename), error) from None
