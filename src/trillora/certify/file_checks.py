"""Checks of the files themselves: complete, undamaged, consistent with each other, and without pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from trillora.certify.certificate import FILE, PAGE, Check, FileFacts
from trillora.certify.gguf_file import open_gguf
from trillora.certify.subject import Subject
from trillora.errors import TrilloraError
from trillora.files.bounded import read_bounded
from trillora.files.checksums import read_checksums
from trillora.files.digests import file_digest
from trillora.files.read_json import read_json
from trillora.files.storage import MARK
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from trillora.model.loading.source import PICKLE_SUFFIXES, SINGLE_FILE
from trillora.model.loading.tensor_files import opened

INDEX = "model.safetensors.index.json"
DO = "copy the folder again, or export it again"
CARD = "README.md"
MAX_FILES = 5000
_OTHER_PICKLES = (".pkl", ".pickle", ".joblib", ".npy", ".npz", ".ckpt", ".h5", ".keras")


class _ShardIndex(BaseModel):
    model_config = ConfigDict(extra="ignore")
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def files_of(folder: Path) -> dict[str, FileFacts]:
    """Digest and size of every file, those in sub-folders and hidden ones too. The certificate itself and the card,
    which people edit, are left out, and what git and the hub's client write about a download."""
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    files = {name: file for name, file in found.items() if name not in (FILE, PAGE, CARD) and not _is_download(name)}
    if len(files) > MAX_FILES:
        what = f"The folder has {len(files):,} files; an adapter or an export has few."
        raise TrilloraError(what, where=str(folder), do="give the folder of one adapter or export")
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_digest, files.values()))
    return {
        name: FileFacts(digest, file.stat().st_size)
        for (name, file), digest in zip(files.items(), digests, strict=True)
    }


def _is_download(name: str) -> bool:
    return name.startswith((".git/", ".cache/huggingface/"))


def check_files(subject: Subject, files: dict[str, FileFacts]) -> Iterator[Check]:
    folder = subject.folder
    yield _complete(subject, files)
    yield from _checksums(folder, files)
    pickles = [name for name in files if name.lower().endswith((*PICKLE_SUFFIXES, *_OTHER_PICKLES))]
    if pickles:
        what = f"{pickles[0]} is a pickle file, which can run code when it is opened."
        yield Check("files", "no pickle", "failed", what, len(pickles), 0, f"remove {', '.join(pickles[:5])}")
    else:
        yield Check(
            "files", "no pickle", "ok", "There is no pickle file, which could run code when it is opened.", 0, 0
        )
    tensors = [folder / name for name in files if name.endswith(".safetensors") and "/" not in name]
    names = {file.name: _header(file) for file in tensors}
    if tensors:
        others = [file.name for file in tensors if _format(file) not in (None, "pt")]
        if others:
            what = f"{others[0]} is marked as a file of another library than PyTorch; transformers may refuse it."
            yield Check("files", "format", "failed", what, len(others), 0, DO)
        count = sum(map(len, names.values()))
        what = f"{count:,} tensors in {len(tensors):,} safetensors files, each as large as its header says."
        yield Check("files", "safetensors", "ok", what, count)
    if (folder / INDEX).is_file():
        yield _shards(folder, names)
    for name in files:
        if name.endswith(".gguf") and "/" not in name:
            found = open_gguf(folder / name)
            what = f"{name}: {len(found.types):,} tensors, which end where the header says."
            yield Check("files", "GGUF", "ok", what, len(found.types))


def only_files(folder: Path) -> Iterator[Check]:
    """Links to folders, devices and pipes have no digest, so what is behind them cannot be certified."""
    others = sorted(
        each.relative_to(folder).as_posix()
        for each in folder.rglob("*")
        if not each.is_file() and (each.is_symlink() or not each.is_dir())
    )
    if others:
        what = f"{others[0]} is a link to a folder, a broken link, a device or a pipe."
        yield Check("files", "only files", "failed", what, len(others), 0, f"remove {', '.join(others[:5])}")
    else:
        yield Check("files", "only files", "ok", "There are files and folders only.", 0, 0)


def _complete(subject: Subject, files: dict[str, FileFacts]) -> Check:
    needed: dict[str, tuple[str, ...]] = {
        "adapter": (CONFIG_FILE, WEIGHTS_FILE),
        "merged": ("config.json", "generation_config.json", "tokenizer_config.json"),
        "ollama": ("Modelfile",),
    }
    missing = [name for name in needed.get(subject.kind, ()) if name not in files]
    if subject.kind in ("gguf", "lora-gguf", "ollama") and (several := sorted(subject.folder.glob("*.gguf"))[1:]):
        what = f"There are {len(several) + 1} GGUF files, and an export has one."
        return Check(
            "files", "complete", "failed", what, len(several) + 1, 1, f"remove {several[0].name}, or the other one"
        )
    if subject.kind in ("gguf", "lora-gguf", "ollama") and not any(
        name.endswith(".gguf") and "/" not in name for name in files
    ):
        missing.append("the GGUF file")
    if subject.kind == "merged" and not {SINGLE_FILE, INDEX} & files.keys():
        missing.append(SINGLE_FILE)
    if missing:
        return Check("files", "complete", "failed", f"{', '.join(missing)} is missing.", len(missing), 0, DO)
    size = sum(file.size for file in files.values())
    return Check("files", "complete", "ok", f"{len(files):,} files, {size:,} bytes.", len(files))


def _checksums(folder: Path, files: dict[str, FileFacts]) -> Iterator[Check]:
    if MARK not in files:
        what = f"There is no {MARK}, so damage before this certificate cannot be noticed."
        yield Check("files", "checksums", "skipped", what)
        return
    facts = read_checksums(read_bounded(folder / MARK, 1 << 24))
    if facts is None:
        yield Check("files", "checksums", "failed", f"{MARK} differs from its own digest.", do=DO)
        return
    wrong = []
    for name, expected in facts["files"].items():
        found = files.get(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif (found.sha256, found.size) != (expected["sha256"], expected["size"]):
            wrong.append(f"{name} has changed since it was written ({found.size:,} bytes, then {expected['size']:,})")
    if wrong:
        yield Check("files", "checksums", "failed", f"{'; '.join(wrong[:5])}.", len(wrong), 0, DO)
    else:
        yield Check("files", "checksums", "ok", f"{len(facts['files']):,} files are as they were written.", 0, 0)


def _header(file: Path) -> list[str]:
    """The names of the tensors. The library compares every offset with the file's size."""
    with opened(file, "np") as tensors:
        return list(tensors.keys())


def _format(file: Path) -> str | None:
    with opened(file, "np") as tensors:
        return (tensors.metadata() or {}).get("format")


def _shards(folder: Path, names: dict[str, list[str]]) -> Check:
    index = read_json(folder / INDEX, _ShardIndex, do=DO)
    stored = Counter(name for tensors in names.values() for name in tensors)
    faults = [f"{shard} is missing" for shard in sorted({*index.weight_map.values()} - names.keys())]
    faults += [f"{name} is in two files" for name, count in stored.items() if count > 1]
    faults += [f"{shard} is not in the index" for shard in sorted(names.keys() - {*index.weight_map.values()})]
    for name, shard in index.weight_map.items():
        if shard in names and name not in names[shard]:
            other = next((file for file, tensors in names.items() if name in tensors), None)
            faults.append(f"{name} is in {other}, not in {shard}" if other else f"{name} is missing")
    faults += [f"{name} is not in the index" for name in stored.keys() - index.weight_map.keys()]
    if faults:
        do = f"{DO}; a shard may be missing, renamed, or from another export"
        return Check("files", "shards", "failed", f"{'; '.join(faults[:4])}.", len(faults), 0, do)
    what = f"{len(stored):,} tensors are in the {len(names)} files that the index names, each once."
    return Check("files", "shards", "ok", what, 0, 0)


def compare_files(now: dict[str, FileFacts], then: dict[str, FileFacts]) -> Check:
    """Whether the files match the certificate."""
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if not changed:
        return Check("files", "same as certified", "ok", f"{len(now):,} files have their certified digests.", 0, 0)
    how = [f"{n} {'is new' if n not in then else 'is missing' if n not in now else 'has changed'}" for n in changed]
    do = "restore the certified files; or certify the new ones with `trillora certify`"
    return Check("files", "same as certified", "failed", f"{'; '.join(how[:5])}.", len(changed), 0, do)
