"""Pushes an adapter or a merged model to the Hugging Face hub, with its card, in one commit.

    push(adapter_to_push(source), "org/name", private=True, token=token_of_environment())

The token comes from HF_TOKEN alone, and no message contains it. A repository is private unless the user says otherwise,
and a public one is never used by accident. Files that name folders of this machine are not pushed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.adapters.card import CARD_FILE, adapter_card, hub_id, is_unedited
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.export.source import ExportSource
from trillora.files.checksums import checksums_of, read_checksums
from trillora.files.hub import HUB_ID
from trillora.files.read_json import parse_json, read_data, read_text
from trillora.files.storage import MARK
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from trillora.runs.files import MERGE_FILE
from trillora.safe_text import visible_line
from trillora.secrets import mask_message

VARIABLE = "HF_TOKEN"
NOT_PUSHED = (MERGE_FILE, "certificate.json", "certificate.html")  # they name folders of this machine
COPY_AGAIN = "copy it again"
File = Path | bytes


@dataclass(frozen=True)
class Pushed:
    """What is on the hub now."""

    repo: str
    url: str
    commit: str
    files: tuple[str, ...]
    is_private: bool
    notes: tuple[str, ...] = ()


def token_of_environment() -> str:
    token = os.environ.get(VARIABLE, "").strip()
    if not token:
        raise TrilloraError(
            "There is no token for the hub.",
            where=VARIABLE,
            do=f"make one with write access at https://huggingface.co/settings/tokens, then: export {VARIABLE}=…",
        )
    return token


def check_repo(repo: str) -> None:
    if not HUB_ID.fullmatch(repo) or len(repo) > 96 or "--" in repo or ".." in repo:
        raise TrilloraError(
            f"'{visible_line(repo)[:100]}' is not the name of a repository.",
            where="--repo",
            do="use ORG/NAME with letters, digits, '-', '_' and '.'",
        )


def adapter_to_push(source: ExportSource, base: str | None = None) -> dict[str, File]:
    """The files of an adapter by name. `base` is the id of the base model on the hub, if the adapter names it by a path
    of this machine, which no one else could load. The card has the newest scores, unless a person has edited it."""
    folder = source.adapter
    config = parse_json(_read(folder / CONFIG_FILE), dict[str, Any], where=str(folder / CONFIG_FILE), do=COPY_AGAIN)
    named = hub_id(base) or hub_id(source.base_id)
    if named is None:
        raise TrilloraError(
            "The adapter names its base model by a path of this machine, which no one else can load.",
            where=str(folder / CONFIG_FILE),
            do="give the base model's name on the hub: --base ORG/NAME",
        )
    files: dict[str, File] = dict(_files_of(folder))
    changed = (json.dumps({**config, "base_model_name_or_path": named}, indent=2) + "\n").encode()
    files[CONFIG_FILE] = changed
    card = folder / CARD_FILE
    if not card.is_file() or is_unedited(read_text(card, do="remove this file")):
        positions = source.base.positions
        text = adapter_card(changed, source.run, name=source.name, part=source.part, positions=positions)
        files[CARD_FILE] = text.encode()
    if MARK in files:
        files[MARK] = _new_checksums(folder, files)
    return files


def model_to_push(folder: Path) -> dict[str, File]:
    """The files of a merged model by name."""
    return dict(_files_of(folder))


def push(
    files: Mapping[str, File],
    repo: str,
    *,
    token: str,
    private: bool = True,
    endpoint: str | None = None,
    listener: Listener = ignore_events,
) -> Pushed:
    """Creates the repository if needed, and adds the files in one commit. `endpoint` is the hub's address, by default
    the one in the environment."""
    from huggingface_hub import CommitOperationAdd, HfApi

    check_repo(repo)
    api = HfApi(endpoint=endpoint, token=token)
    with _errors_in_words(repo, token):
        api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        is_private = bool(api.repo_info(repo, repo_type="model").private)
        if private and not is_private:
            raise TrilloraError(
                f"{repo} exists already, and everybody can read it.",
                where="--repo",
                do="add --public if that is what you want, or choose another name",
            )
        sizes = [len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values()]
        listener(Note(f"Uploading {len(files)} files to {repo}, {sum(sizes) / 1e6:,.1f} MB"))
        operations = [CommitOperationAdd(name, file) for name, file in sorted(files.items())]
        done = api.create_commit(repo, operations, commit_message="Upload from Trillora", repo_type="model")
    url = f"{api.endpoint}/{repo}"
    return Pushed(repo, url, done.oid, tuple(sorted(files)), is_private)


@contextmanager
def _errors_in_words(repo: str, token: str) -> Iterator[None]:
    """Turns the errors of the hub's library into messages. Their own text may contain headers, so only what the server
    says about the card is shown, without secrets."""
    try:
        yield
    except TrilloraError:
        raise
    except Exception as error:
        # What goes wrong with one file is wrapped.
        cause = error.__cause__ if type(error) is RuntimeError and isinstance(error.__cause__, Exception) else error
        if isinstance(cause, OSError) and cause.filename is not None:  # a file of this machine
            raise cause from None
        what, do = _in_words(cause, repo, token)
        raise TrilloraError(what, where=f"hub model {repo}", do=do) from None


def _in_words(error: Exception, repo: str, token: str) -> tuple[str, str]:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return _of_status(error.response.status_code, repo)
    if isinstance(error, ValueError):  # the check of the card, before anything is uploaded
        said = visible_line(mask_message(str(error).replace("\n", " "), (token,)))[:500]
        return f"The hub refuses the model card: {said}", f"correct {CARD_FILE} and run the command again"
    name = type(error).__name__
    if isinstance(error, OSError) or "connect" in name.lower() or "timeout" in name.lower():
        return "The hub cannot be reached.", "check the connection and HF_HUB_OFFLINE; nothing was published"
    return f"The upload failed: {name}.", "run the command again"


def _of_status(status: int, repo: str) -> tuple[str, str]:
    owner = repo.partition("/")[0]
    match status:
        case 401:
            return "The hub does not accept the token.", f"make a new one, and export {VARIABLE}=…"
        case 403:
            return f"The token may not write to {owner}.", "make a token with write access to this account"
        case 404:
            return (
                f"{repo} cannot be used as a model: it is of another type, or {owner} does not exist.",
                "choose another --repo",
            )
        case 409:
            return f"The name {repo} is taken by something that is not a model.", "choose another --repo"
    return f"The hub answered with status {status}.", "run the command again later"


def _files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Regular files; hidden ones and links could be anything."""
    for entry in sorted(folder.iterdir()):
        if (
            entry.is_file()
            and not entry.is_symlink()
            and not entry.name.startswith(".")
            and entry.name not in NOT_PUSHED
        ):
            yield entry.name, entry


def _new_checksums(folder: Path, files: Mapping[str, File]) -> bytes:
    """checksums.json for the pushed files: the config may have changed."""
    facts = read_checksums(_read(folder / MARK)) or {}
    listed = [name for name in facts.get("files", {WEIGHTS_FILE: {}, CONFIG_FILE: {}}) if name in files]
    return checksums_of(int(facts.get("step", 0)), {name: files[name] for name in listed})


def _read(file: Path) -> bytes:
    return read_data(file, do=COPY_AGAIN)
