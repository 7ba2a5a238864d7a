"""From the recipe's paths to an ordered list of data files, known to be there before anything is read.

An entry is a file, a glob, a folder, an fsspec URL (`gs://…`, `memory://…`) or a Hugging Face dataset id
(`owner/name`, `owner/name@revision`), whose files come through the hub's own cache. What exists here goes before the
hub. In folders, archives and dataset repositories only files with a known suffix count; hidden files and those that
describe the data (README, LICENSE, dataset_infos.json) do not. The order never depends on the file system.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from trillora.errors import TrilloraError

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
KNOWN = " ".join([*FORMATS, *ARCHIVES]) + " (the formats also with .gz or .zst)"

_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w-][\w./-]*))?")
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|changelog|citation)(?:\.\w+)?|dataset_infos?\.json|dataset_dict\.json|state\.json", re.I
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_HASH_BLOCK = 1 << 20


class Kind(NamedTuple):
    """What a file name says: `format` inside `compression` ("" is none), or an archive of such files."""

    format: str  # a value of FORMATS, or "tar", "zip"
    compression: str  # "", "gzip" or "zstd"

    @property
    def is_archive(self) -> bool:
        return self.format in ("tar", "zip")


@dataclass(frozen=True)
class DataFile:
    """One file to read."""

    name: str  # what people see; without the credentials a URL may hold
    path: str  # what is opened: a local path or an fsspec URL
    source: int  # which of the recipe's entries it came from
    size: int  # bytes; 0 if a remote store does not say

    def open(self) -> BinaryIO:
        return _open(self.path)

    def sha256(self) -> str:
        """Hex digest of the bytes, read as a stream."""
        digest = hashlib.sha256()
        try:
            with self.open() as stream:
                while block := stream.read(_HASH_BLOCK):
                    digest.update(block)
        except Exception as error:  # remote stores raise what they like
            raise cannot_read(self.name, error) from None
        return digest.hexdigest()


def expand(paths: Sequence[str]) -> list[DataFile]:
    """All data files of the entries, in the order of the entries and sorted within each."""
    files: list[DataFile] = []
    for source, entry in enumerate(paths):
        if _URL.match(entry) and not entry.startswith("file://"):
            files += _remote(entry, source)
        else:
            files += _local(os.path.expanduser(entry.removeprefix("file://")), source)
    return files


def kind_of(name: str) -> Kind | None:
    """What the suffixes of a file name say, in any case; None if it is no data file."""
    name = name.lower()
    if name.endswith(".tgz"):
        return Kind("tar", "gzip")
    stem, suffix = os.path.splitext(name)
    compression = COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
    if suffix == ".tar" or (suffix == ".zip" and not compression):
        return Kind(suffix[1:], compression)
    return Kind(FORMATS[suffix], compression) if suffix in FORMATS else None


def found_data(path: str) -> Kind | None:
    """`kind_of` for a file nobody named: one met in a folder, an archive or a repository."""
    parts = PurePosixPath(path).parts
    if any(part.startswith((".", "__MACOSX")) for part in parts) or _ABOUT_DATA.fullmatch(parts[-1] if parts else ""):
        return None
    return kind_of(path)


def cannot_read(name: str, error: Exception) -> TrilloraError:
    """Reading failed for a reason outside the data. Only the system's own words are shown: others may hold secrets."""
    if isinstance(error, TrilloraError):
        return error
    reason = getattr(error, "strerror", None) or type(error).__name__
    return TrilloraError(
        f"The data file cannot be read: {reason}.", where=name, do="check the file, its permissions and the connection"
    )


def _open(path: str) -> BinaryIO:
    if not _URL.match(path):
        return open(path, "rb")
    system, inner = _file_system(path)
    return cast(BinaryIO, system.open(inner, "rb"))


def _local(entry: str, source: int) -> list[DataFile]:
    if not entry or "\0" in entry:
        raise TrilloraError("A data path is empty or holds a NUL.", where="data.path", do="name a file or a folder")
    if os.path.isdir(entry):
        return _folder(entry, entry, source)
    if os.path.lexists(entry):
        if kind_of(entry) is None:
            raise _unknown_suffix(entry)
        return [_local_file(entry, entry, source)]
    if glob.has_magic(entry):
        matches = sorted(set(glob.glob(entry, recursive=True)))
        wanted = [path for path in matches if os.path.isfile(path) and found_data(os.path.basename(path))]
        if not wanted:
            raise _nothing_there(entry, len(matches))
        return [_local_file(path, path, source) for path in wanted]
    hub_id = _HUB_ID.fullmatch(entry)
    if hub_id and kind_of(entry) is None:
        snapshot = _snapshot(hub_id["id"], hub_id["revision"])
        if not os.path.isdir(snapshot):  # the hub makes no folder if it has nothing of what was asked for
            raise _nothing_there(entry, 0)
        return _folder(snapshot, entry, source)
    raise TrilloraError(
        f"The data file {entry} does not exist.",
        where=entry,
        do="check the path; in a recipe it counts from the recipe's folder",
    )


def _folder(folder: str, shown_as: str, source: int) -> list[DataFile]:
    """The data files below a folder; links to files are followed, links to folders not (they may lead in circles)."""
    num_seen = 0
    wanted: list[tuple[str, str]] = []  # sorted by the path below the folder, the same on every machine
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            num_seen += 1
            path = os.path.join(parent, name)
            below = os.path.relpath(path, folder).replace(os.sep, "/")
            if found_data(below) and os.path.isfile(path):
                wanted.append((below, path))
    if not wanted:
        raise _nothing_there(shown_as, num_seen)
    return [_local_file(path, os.path.join(shown_as, below), source) for below, path in sorted(wanted)]


def _local_file(path: str, name: str, source: int) -> DataFile:
    try:
        if not os.path.isfile(path):
            os.stat(path)  # says so if it is a link to nowhere
            raise TrilloraError("This is no regular file.", where=name, do="copy the data into a file, and name that")
        with open(path, "rb"):
            return DataFile(name=name, path=path, source=source, size=os.stat(path).st_size)
    except OSError as error:
        raise cannot_read(name, error) from None


def _remote(entry: str, source: int) -> list[DataFile]:
    shown = without_secrets(entry)
    if "::" in entry:
        raise TrilloraError(
            "Chained URLs are not read.", where=shown, do="give the inner URL: archives and .gz, .zst are read in place"
        )
    is_web = entry.startswith(("http://", "https://"))
    try:
        system, path = _file_system(entry)
        if not is_web and glob.has_magic(path):
            paths = [found for found in system.glob(path) if system.isfile(found)]
        elif not is_web and system.isdir(path):
            paths = list(system.find(path))
        else:
            return [_remote_file(entry, system.info(path), source)]
        wanted = sorted(found for found in paths if found_data(_below(found, path)))
        if wanted:
            return [_remote_file(system.unstrip_protocol(found), system.info(found), source) for found in wanted]
    except FileNotFoundError:
        raise TrilloraError(
            f"There is no data at {shown}.", where=shown, do="check the address, and that you may read it"
        ) from None
    except TrilloraError:
        raise
    except Exception as error:  # each store raises its own; their texts may hold keys and tokens
        raise TrilloraError(
            f"The address cannot be opened: {type(error).__name__}.",
            where=shown,
            do="check the address, your access to it and the connection",
        ) from None
    raise _nothing_there(shown, len(paths))


def _remote_file(url: str, info: dict[str, Any], source: int) -> DataFile:
    shown = without_secrets(url)
    if kind_of(shown) is None:
        raise _unknown_suffix(shown)
    return DataFile(name=shown, path=url, source=source, size=int(info.get("size") or 0))


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError):
        packages = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "http": "aiohttp"}
        package = packages.get(scheme.removesuffix("s") if scheme == "https" else scheme)
        raise TrilloraError(
            f"Addresses that begin with {scheme}:// cannot be opened here.",
            where=without_secrets(url),
            do=f"pip install {package}" if package else "install the fsspec package for it, or copy the data here",
        ) from None
    return system, str(path)


def _below(path: str, folder: str) -> str:
    """The part of a path that was found rather than named: a person may name a hidden folder."""
    fixed = os.path.dirname(re.split(r"[*?\[]", folder)[0]) if glob.has_magic(folder) else folder
    return path.removeprefix(fixed).strip("/")


def without_secrets(url: str) -> str:
    """The URL without user:password@ and without the query, where signed addresses carry their key."""
    return re.sub(r"://[^/@]*@", "://", url).partition("?")[0]


def _unknown_suffix(name: str) -> TrilloraError:
    return TrilloraError(
        "The name of this file does not say what it holds.", where=name, do=f"give it one of the suffixes {KNOWN}"
    )


def _nothing_there(entry: str, num_seen: int) -> TrilloraError:
    others = f" among the {num_seen} files there" if num_seen else ""
    return TrilloraError(
        f"{entry} has no data file{others}.", where=entry, do=f"files are looked for by their suffix: {KNOWN}"
    )


def _raise(error: OSError) -> None:
    raise cannot_read(str(error.filename), error) from None


def _patterns() -> Iterable[str]:
    for suffix in FORMATS:
        yield from (f"*{suffix}", *(f"*{suffix}{compression}" for compression in COMPRESSIONS))
    yield from (f"*{suffix}" for suffix in ARCHIVES)


def _snapshot(name: str, revision: str | None) -> str:
    """The data files of a hub dataset, in the hub's own cache; from that cache alone when offline."""
    from huggingface_hub import errors, snapshot_download

    where = f"hub dataset {name}" + (f", revision {revision}" if revision else "")
    try:
        about = ["README*", "*/README*", ".*", "*/.*"]
        return str(
            snapshot_download(
                name, repo_type="dataset", revision=revision, allow_patterns=list(_patterns()), ignore_patterns=about
            )
        )
    except errors.GatedRepoError:
        what = f"The dataset '{name}' is gated: its owners must grant you access."
        do = "ask for access on the dataset's page, then log in here with: hf auth login"
    except errors.RevisionNotFoundError:
        what = f"The dataset '{name}' has no revision '{revision}'."
        do = "give a branch, tag or full commit that the dataset's page lists, or leave the @ out"
    except errors.RepositoryNotFoundError:
        what = f"The hub has no dataset '{name}' that you may see, and there is no such file or folder here."
        do = "check the spelling; if it is private: hf auth login"
    except (errors.LocalEntryNotFoundError, ConnectionError):
        what = (
            f"There is no file or folder '{name}' here, the hub cannot be reached, and its cache has no such dataset."
        )
        do = "check the path, or the connection (or HF_HUB_OFFLINE) if you mean a dataset of the hub"
    except errors.HFValidationError:
        what = f"'{name}' is neither a file or folder here nor a valid dataset id."
        do = "give an existing path, or owner/name"
    except Exception as error:  # the client lets its HTTP library's own errors through; their text may hold headers
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"Downloading '{name}' failed: {type(error).__name__}" + (f", status {status}" if status else "") + "."
        do = "check the connection and the free disk space, and run again: finished files are kept"
    raise TrilloraError(what, where=where, do=do)
