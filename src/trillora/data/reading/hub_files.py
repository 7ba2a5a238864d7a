"""The files of one configuration and split of a Hugging Face data set, to be read from the hub without a download.

    hub_files("org/name", config="ro", split="train", source=0)  ->  [DataFile("org/name/ro/train-00000.parquet"), …]

The data set's card says which files belong to a configuration and split. Without that, the names of its files do
(`train`, `validation`, `test` in a path). A data set that only has a loading script is read from the Parquet files that
the hub made of it; scripts are never run. All files come from one commit, so they cannot change while they are read;
what is read as a whole is compared with the hub's digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from trillora.data.reading.files import Content, DataFile, found_data, kind_of
from trillora.errors import TrilloraError, nearest
from trillora.files.hub import HUB_ID_AT, dataset_files

CONVERTED = "refs/convert/parquet"  # the hub's own branch with CONFIG/SPLIT/0000.parquet
DEFAULT = "default"  # the configuration of a data set without several
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
Splits = dict[str, list[str]]  # the paths of a configuration's files by split


class DataSetPart(NamedTuple):
    """Which rows of a data set: both are optional."""

    config: str | None
    split: str | None


def hub_files(path: str, part: DataSetPart, source: int) -> list[DataFile]:
    """The files of a configuration and split, sorted by name. All splits, if none is given."""
    match = HUB_ID_AT.fullmatch(path)
    if match is None or kind_of(path) is not None:
        what = f"{path} is not the id of a Hugging Face data set, so it has no config and no split."
        raise TrilloraError(what, where="data.path", do="write owner/name, or remove config and split")
    name, revision = match["id"], match["revision"]
    listed = dataset_files(name, revision)
    configs = dict(_configs(listed.card, listed.sizes))
    if not configs or (part.config is not None and part.config not in configs and revision is None):
        converted = dataset_files(name, CONVERTED, optional=True)
        if converted is not None and (by_folder := dict(_converted(converted.sizes))):
            listed, configs = converted, configs | by_folder
    config = _one_of("config", part.config, configs, name)
    chosen = configs[config]
    paths = (
        chosen[_one_of("split", part.split, chosen, name)] if part.split else [p for s in chosen.values() for p in s]
    )
    files = []
    for found in sorted(set(paths) & listed.sizes.keys()):
        kind, (size, digest) = kind_of(found), listed.sizes[found]
        assert kind is not None, "only data files are listed"
        url = f"hf://datasets/{name}@{listed.commit.replace('/', '%2F')}/{found}"
        files.append(DataFile(f"{name}/{found}", url, source, kind, Content(size, digest, ())))
    return files


def _one_of(option: str, value: str | None, known: Mapping[str, object], name: str) -> str:
    if value is None and (len(known) == 1 or DEFAULT in known):
        return DEFAULT if DEFAULT in known else next(iter(known))
    if value in known:
        return str(value)
    if not known:
        what, do = f"The data set {name} has no data file that can be read.", "use another data set, or its files' URLs"
        raise TrilloraError(what, where="data.path", do=do)
    all_names = ", ".join(sorted(known)[:20]) + (" …" if len(known) > 20 else "")
    if value is None:
        what = f"The data set {name} has {len(known)} configurations, and the recipe names none."
        raise TrilloraError(what, where=f"data.path.{option}", do=f"set {option} to one of: {all_names}")
    meant = nearest(value, [*known])
    do = (f"did you mean {meant}? " if meant else "") + f"Use one of: {all_names}"
    raise TrilloraError(f"The data set {name} has no {option} '{value}'.", where=f"data.path.{option}", do=do)


def _configs(card: Mapping[str, object], files: Iterable[str]) -> Iterator[tuple[str, Splits]]:
    """The configurations that the card describes, or the one that the names of the files show."""
    files = [file for file in files if found_data(file)]
    described = card.get("configs")
    entries = [entry for entry in described if isinstance(entry, dict)] if isinstance(described, list) else []
    for entry in entries or [{}]:
        folder = str(entry.get("data_dir") or "").strip("/")
        inside = [file for file in files if not folder or file.startswith(folder + "/")]
        splits = _described(entry["data_files"], folder, inside) if entry.get("data_files") else _by_name(inside)
        if splits:
            yield str(entry.get("config_name") or DEFAULT), splits


def _described(data_files: object, folder: str, files: list[str]) -> Splits:
    """From the card's patterns: a text, a list of texts, or a list of {split, path}."""
    from fsspec.utils import glob_translate

    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: Splits = {}
    for entry in entries:
        split, patterns = ("train", entry) if not isinstance(entry, dict) else (entry.get("split"), entry.get("path"))
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            whole = re.compile(glob_translate(f"{folder}/{pattern}".lstrip("/")))
            matches = [file for file in files if whole.fullmatch(file) or file.startswith(f"{pattern}/")]
            splits.setdefault(str(split or "train"), []).extend(matches)
    return {split: paths for split, paths in splits.items() if paths}


def _by_name(files: list[str]) -> Splits:
    """By a word in the path: data/validation-0.jsonl is of the split validation. Files without one are for training."""
    splits: Splits = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", file.lower()))
        named = [split for split, spelled in _WORDS.items() if words & set(spelled)]
        splits.setdefault(named[-1] if named else "train", []).append(file)
    return splits


def _converted(files: Iterable[str]) -> Iterator[tuple[str, Splits]]:
    """The hub writes CONFIG/SPLIT/0000.parquet, and partial-SPLIT for the beginning of a very large one."""
    configs: dict[str, Splits] = {}
    for file in files:
        if len(parts := file.split("/")) == 3 and file.endswith(".parquet"):
            configs.setdefault(parts[0], {}).setdefault(parts[1].removeprefix("partial-"), []).append(file)
    yield from configs.items()
