"""`trillora launch kaggle`: folders that Kaggle's own client uploads.

    out/dataset/dataset-metadata.json   chat.bundle   recipe.yaml
    out/session-1/kernel-metadata.json  trillora-chat-1.ipynb
    out/session-2/…                     its input is the output of session 1

A session stops half an hour before Kaggle's limit of nine hours, and its output has the checkpoints. The next kernel
resumes from them. Some metadata keys make Kaggle silently fall back to CPU; `clean_kernel` removes them. The file
`target` has the name of the machine: kaggle (the TPU) or 2xt4.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.files.atomic import new_folder, write_file
from trillora.files.bounded import read_bounded
from trillora.launch.bundle import RECIPE, Bundle
from trillora.launch.notebooks.document import SUFFIX, make_notebook, pack, without_platform_keys
from trillora.launch.notebooks.targets import Target, find_target
from trillora.launch.origin import find_release

TARGET = "target"
MAX_SESSIONS = 50
MAX_NAME = 36  # characters; Kaggle's names have 50, with `trillora-` and the number of the session
MAX_BYTES = 1 << 20
# What Kaggle's client reads. It ignores all other keys, so a misspelled one would change nothing and say nothing.
# `docker_image` and `docker_image_pinning_type` are left out: with an image of its own, a kernel runs on a CPU.
KERNEL_KEYS = (
    *("id", "title", "code_file", "language", "kernel_type", "is_private", "enable_gpu", "enable_tpu"),
    *("enable_internet", "machine_shape", "dataset_sources", "kernel_sources", "competition_sources"),
    *("model_sources", "keywords"),
)


@dataclass(frozen=True)
class KaggleFiles:
    """The folders of a launch. `owner` is a user of Kaggle."""

    folder: Path
    owner: str
    name: str
    num_sessions: int
    target: Target

    @property
    def dataset(self) -> Path:
        return self.folder / "dataset"

    @property
    def dataset_id(self) -> str:
        return f"{self.owner}/trillora-{self.name}"

    @property
    def uploaded(self) -> Path:
        """Exists as soon as Kaggle has the data set."""
        return self.folder / "uploaded"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def session(self, number: int) -> Path:
        return self.folder / f"session-{number}"

    def kernel_id(self, number: int) -> str:
        return f"{self.owner}/trillora-{self.name}-{number}"


def write_kaggle(
    bundle: Bundle,
    out: Path,
    owner: str,
    target: Target,
    *,
    sessions: int = 1,
    export: str = "none",
    prove: bool = True,
    listener: Listener = ignore_events,
) -> KaggleFiles:
    """Writes all folders into a new one. `sessions` kernels form a chain."""
    check_owner(owner)
    if out.is_dir() and any(out.iterdir()):
        raise TrilloraError("This folder is not empty.", where=str(out), do="remove it, or choose another --out")
    files = KaggleFiles(out, owner, bundle.name[:MAX_NAME].rstrip("-"), sessions, target)
    release = find_release()
    with new_folder(out) as making:
        written = dataclasses.replace(files, folder=making)
        written.dataset.mkdir()
        packed = pack(bundle, written.dataset / f"{bundle.name}{SUFFIX}", listener, has_wheel=release is None)
        (written.dataset / RECIPE).write_text(bundle.recipe_text, encoding="utf-8")
        _write_json(written.dataset / "dataset-metadata.json", dataset_metadata(files))
        write_file(making / TARGET, f"{target.name}\n")
        text = make_notebook(bundle, packed, target, release=release, export=export, prove=prove)
        for number in range(1, sessions + 1):
            home = written.session(number)
            home.mkdir()
            metadata = kernel_metadata(files, number)
            (home / metadata["code_file"]).write_text(text, encoding="utf-8")
            _write_json(home / "kernel-metadata.json", metadata)
    return files


def kernel_metadata(files: KaggleFiles, number: int) -> dict[str, Any]:
    """Of one session. The title must become the id when Kaggle makes a slug of it."""
    slug = files.kernel_id(number).partition("/")[2]
    return {
        "id": files.kernel_id(number),
        "title": slug.replace("-", " "),
        "code_file": f"{slug}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        **machine_keys(files.target),
        "enable_internet": True,
        "dataset_sources": [files.dataset_id],
        "kernel_sources": [files.kernel_id(number - 1)] if number > 1 else [],
        "competition_sources": [],
        "model_sources": [],
        "keywords": [],
    }


def machine_keys(target: Target) -> dict[str, Any]:
    """The keys that choose the machine."""
    is_tpu = target.backend == "tpu"
    return {"enable_gpu": not is_tpu, "enable_tpu": is_tpu, "machine_shape": target.accelerator}


def dataset_metadata(files: KaggleFiles) -> dict[str, Any]:
    """Private, and without a license that would allow anything."""
    slug = files.dataset_id.partition("/")[2]
    return {"id": files.dataset_id, "title": slug.replace("-", " "), "licenses": [{"name": "other"}]}


def open_kaggle(out: Path) -> KaggleFiles:
    """The folders that an earlier command wrote."""
    numbers = [number for number in range(1, MAX_SESSIONS + 1) if (out / f"session-{number}").is_dir()]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        do = "write it with `trillora launch kaggle RECIPE --out FOLDER`"
        raise TrilloraError("This is not the folder of a launch on Kaggle.", where=str(out), do=do)
    identity = str(_read_json(out / "session-1" / "kernel-metadata.json").get("id"))
    found = re.fullmatch(r"([A-Za-z0-9_-]{1,50})/trillora-([a-z0-9-]{1,50})-1", identity)
    if found is None:
        where = f"{out / 'session-1' / 'kernel-metadata.json'}, id"
        raise TrilloraError("The id of this kernel is not of a launch.", where=where, do="write the folder again")
    target = find_target("kaggle", _text_of(out / TARGET).strip())
    return KaggleFiles(out, found[1], found[2], len(numbers), target)


def clean_kernel(folder: Path, target: Target) -> list[str]:
    """Removes what makes Kaggle run the kernel on a CPU, for example after `kaggle kernels pull -m` into this folder:
    an image of its own, `metadata.kaggle` in the notebook, retired accelerators. Returns what was changed."""
    file = folder / "kernel-metadata.json"
    found = _read_json(file)
    kept = {key: value for key, value in found.items() if key in KERNEL_KEYS}
    kept |= machine_keys(target)
    changed = sorted(key for key in {*found, *kept} if found.get(key) != kept.get(key))
    if changed:
        _write_json(file, kept)
    notebook = folder / os.path.basename(str(kept.get("code_file")))
    if not notebook.is_file():
        raise TrilloraError("The notebook is missing.", where=str(notebook), do="write the folder again")
    try:
        before = notebook.read_text(encoding="utf-8")
        after = without_platform_keys(before)
        is_changed = json.loads(after)["metadata"] != json.loads(before)["metadata"]
    except Exception as error:  # nbformat raises errors of several libraries
        raise TrilloraError("This is not a notebook.", where=str(notebook), do="write the folder again") from error
    if is_changed:
        write_file(notebook, after)
        changed.append("metadata.kaggle of the notebook")
    return changed


def find_owner(given: str | None) -> str:
    """The user of Kaggle: as given, or as the client's own settings say."""
    if given is not None:
        check_owner(given)
        return given
    if name := os.environ.get("KAGGLE_USERNAME"):
        return name
    try:
        name = _read_json(Path.home() / ".kaggle" / "kaggle.json").get("username")
    except (TrilloraError, RuntimeError):
        name = None
    if not isinstance(name, str):
        what = "Kaggle's names start with a user, and it is not known who you are there."
        raise TrilloraError(what, where="--owner", do="add --owner NAME, as in kaggle.com/NAME")
    return name


def check_owner(owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}", owner):
        do = "give the name in the address of your profile: kaggle.com/NAME"
        raise TrilloraError(f"'{owner[:50]}' is not a user of Kaggle.", where="--owner", do=do)


def _write_json(file: Path, tree: Mapping[str, object]) -> None:
    write_file(file, json.dumps(tree, indent=1) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(_text_of(file))
    except ValueError as error:
        raise TrilloraError("This file is not JSON.", where=str(file), do="write the folder again") from error
    if not isinstance(tree, dict):
        raise TrilloraError("This file is not a JSON object.", where=str(file), do="write the folder again")
    return tree


def _text_of(file: Path) -> str:
    try:
        return read_bounded(file, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise TrilloraError("This file cannot be read.", where=str(file), do="write the folder again") from error
