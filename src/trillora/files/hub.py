"""Downloads from the Hugging Face hub, and its errors in plain words.

    download("org/name", "model", revision=None, allow=["*.json"])  ->  the local folder with these files

Files are kept in the hub's own cache. Without a connection, a download that is complete there is still found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from trillora.errors import TrilloraError, nearest

Kind = Literal["model", "dataset"]
# The hub's own rule: ASCII letters, digits, "_", "-" and "."; a name neither begins nor ends with "-" or ".".
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
HUB_ID = re.compile(rf"{_NAME}/{_NAME}")
HUB_ID_AT = re.compile(rf"(?P<id>{HUB_ID.pattern})(?:@(?P<revision>[\w-][\w./-]*))?")  # with or without a revision


def download(
    name: str,
    kind: Kind,
    *,
    revision: str | None,
    allow: Iterable[str],
    ignore: Iterable[str] = (),
    embedded: Sequence[str] = (),
) -> Path:
    """Downloads the files that match the patterns and returns their folder, which does not exist if none matches.

    `embedded` names models that need no hub: error messages suggest them.
    """
    from huggingface_hub import snapshot_download

    hub_cache()
    with _plain_errors(name, kind, revision, embedded):
        return Path(
            snapshot_download(
                name, repo_type=kind, revision=revision, allow_patterns=list(allow), ignore_patterns=list(ignore)
            )
        )


class DatasetFiles(NamedTuple):
    """The files of one commit of a data set, and its card."""

    commit: str  # or a branch that has no commit id
    sizes: dict[str, tuple[int, str]]  # path -> bytes and a digest, as the hub gives them
    card: dict[str, Any]


@overload
def dataset_files(name: str, revision: str | None) -> DatasetFiles: ...
@overload
def dataset_files(name: str, revision: str | None, *, optional: bool) -> DatasetFiles | None: ...
def dataset_files(name: str, revision: str | None, *, optional: bool = False) -> DatasetFiles | None:
    """Lists a data set's files. None if `optional` and there is no such revision."""
    from huggingface_hub import HfApi, errors

    with _plain_errors(name, "dataset", revision, ()):
        try:
            info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
        except errors.RevisionNotFoundError:
            if optional:
                return None
            raise
    sizes = {
        file.rfilename: (int(file.size), str(file.lfs.sha256 if file.lfs else file.blob_id))
        for file in info.siblings or ()
        if file.size is not None
    }
    return DatasetFiles(str(info.sha), sizes, info.card_data.to_dict() if info.card_data is not None else {})


@contextmanager
def _plain_errors(name: str, kind: Kind, revision: str | None, embedded: Sequence[str]) -> Iterator[None]:
    """Raises the hub client's errors as ours."""
    from huggingface_hub import errors

    try:
        yield
        return
    except errors.GatedRepoError:
        what = f"The {kind} '{name}' is gated: its owners must grant you access."
        do = f"request access on the {kind}'s page, then log in with: hf auth login"
    except errors.RevisionNotFoundError:
        what = f"The {kind} '{name}' has no revision '{revision}'."
        do = f"use a branch, tag or full commit listed on the {kind}'s page, or remove the revision"
    except errors.RepositoryNotFoundError:
        meant = nearest(name, [*_cached(kind), *embedded])
        what = f"The hub has no {kind} '{name}' that you can access, and there is no local path '{name}'."
        do = (f"did you mean '{meant}'? " if meant else "") + "Check the spelling; if it is private: hf auth login"
    except (errors.LocalEntryNotFoundError, ConnectionError):
        what = f"There is no local path '{name}', and the hub cannot be reached to download the {kind}."
        do = "check the path, the connection and HF_HUB_OFFLINE"
        do += f"; or use the embedded model: {' '.join(embedded)}" if embedded else ""
    except errors.HFValidationError:
        what = f"'{name}' is neither a local path nor a valid {kind} id."
        do = "use an existing path or an id of the form owner/name"
    except Exception as error:  # errors of the HTTP library; only their type is shown, their text may contain headers
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise _cache_unwritable(error) from error
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"Downloading '{name}' failed: {type(error).__name__}" + (f", status {status}" if status else "") + "."
        do = "check the connection and the free disk space, then run again: finished files are kept"
    raise TrilloraError(what, where=f"hub {kind} {name}" + (f", revision {revision}" if revision else ""), do=do)


def find_cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model that was downloaded before; None if it was not. The hub is not asked."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not in the cache, not a valid id, or a cache that cannot be read
        return None


def hub_cache() -> Path:
    """The folder in which the hub's library keeps its downloads."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    if folder.parts[:1] == ("~",):  # the library could not replace it, and would create a folder with this name
        do = "set HOME to a folder that you can write to, for example: export HOME=/tmp/home"
        raise TrilloraError("There is no folder for downloads: the home folder is not known.", where="HOME", do=do)
    return folder


def _cache_unwritable(error: OSError) -> TrilloraError:
    what = f"A download cannot be kept: {error.strerror}."
    do = "free some disk space there, or set HF_HOME to a folder that you can write to"
    return TrilloraError(what, where=str(error.filename), do=do)


def list_files(name: str, revision: str) -> set[str] | None:
    """All file names of a model's revision; None if the hub cannot be reached."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(name, revision=revision))
    except Exception:  # used only to explain another error in more detail
        return None


def _cached(kind: Kind) -> list[str]:
    """Ids in the local cache, whose folders are called models--org--name."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*--*")
    return [folder.name.removeprefix(f"{kind}s--").replace("--", "/", 1) for folder in folders]
