"""`--tiny`: a recipe on the embedded model and in small sizes, so that it trains on a CPU in minutes.

Everything that makes a recipe what it is stays: optimizer, LoRA, template, stages, phases. What only fits its chip and
its model goes. Then come the overrides in the recipe's own section:

    model: {name: mistralai/Mistral-7B-Instruct-v0.3, dtype: bfloat16}
    data: massive_dataset.tar.gz
    train: {sequence_length: 4096, batch_size: 32, epochs: 3}
    tiny:
      data: {path: samples/scans.jsonl}
      train: {steps: 60}

With `--tiny`: `model: smollm2`, the sample, 256 tokens, batches of 4, 60 steps. `load_recipe` applies it. The recipe of
such a run says `tiny: applied`, so the run is resumed without the option.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.files.user_path import user_path
from trillora.recipe import run_file
from trillora.recipe.schema import EMBEDDED, LISTS
from trillora.runs.files import RECIPE_FILE

APPLIED = "applied"  # the value of `tiny` in the recipe of a run
MOST = {"sequence_length": 256, "batch_size": 4, "warmup_steps": 4}
STEPS = 40
_LENGTH = ("steps", "epochs")
_EVALUATE = {"max_documents": 16, "num_samples": 1, "max_tokens": 64}


def shrunk(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with the built-in changes. `tree` is a recipe with its shorthand sections written out."""
    small = {name: part for name, part in tree.items() if name not in ("tiny", "hardware", "engine", "track")}
    small["model"] = {"name": EMBEDDED}
    small["hardware"] = {"devices": 1}
    train = _smaller(_mapping(tree, "train"))
    small["train"] = {"sequence_length": MOST["sequence_length"], "batch_size": MOST["batch_size"], **train}
    small["train"].pop("checkpoint_dir", None)  # Drive or a bucket
    small["train"]["steps"] = STEPS
    evaluate = _mapping(tree, "evaluate")
    given = {name: min(evaluate.get(name, most), most) for name, most in _EVALUATE.items() if _is_count(evaluate, name)}
    small["evaluate"] = {**evaluate, **given, "every_steps": STEPS // 2}
    if "from" in (lora := _mapping(tree, "lora")):  # an adapter of another model
        small["lora"] = {name: value for name, value in lora.items() if name != "from"}
    for name in LISTS:
        if isinstance(parts := tree.get(name), list):
            small[name] = [_smaller(part) if isinstance(part, Mapping) else part for part in parts]
    return small


def tiny_overrides(section: object, recipe: str) -> Iterable[tuple[str, Any]]:
    """The options in the section `tiny`, by their dotted names. `recipe` names the recipe in errors."""
    if section is None or section == APPLIED:
        return ()
    if not isinstance(section, Mapping):
        what = "The section tiny is not a mapping of options."
        raise TrilloraError(what, where=f"{recipe}, tiny", do="write options of the recipe below it: tiny: {train: …}")
    return _leaves(section, "")


def require_local_data(tree: Mapping[str, object], full: Mapping[str, object], recipe: str) -> None:
    """Refuses data from the hub or a URL that the full recipe has and the tiny one did not replace."""
    remote = dict(_remote_data(full))
    for option, address in _remote_data(tree):
        if remote.get(option) == address:
            raise TrilloraError(
                f"The recipe has no small data for --tiny: {option} is not a local file.",
                where=f"{recipe}, {option}",
                do=f"name a small file in the recipe's section tiny, or give it with {option}=FILE",
            )


def is_tiny_run(run: str | Path) -> bool:
    """Whether the run in this folder was started with `--tiny`. A damaged file is left to the trainer's checks."""
    try:
        return run_file.read(user_path(run, where="--out") / RECIPE_FILE).recipe.get("tiny") == APPLIED
    except (TrilloraError, OSError):
        return False


def _smaller(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `train`, a stage or a phase in small sizes. `train` has the length of the run."""
    kept = {name: value for name, value in options.items() if name not in (*_LENGTH, "micro_batch_size")}
    return kept | {name: min(kept[name], most) for name, most in MOST.items() if name in kept and _is_count(kept, name)}


def _mapping(tree: Mapping[str, object], name: str) -> Mapping[str, Any]:
    return section if isinstance(section := tree.get(name), Mapping) else {}


def _is_count(section: Mapping[str, object], name: str) -> bool:
    """Whether the value can be compared. A wrong one stays, to be reported like any other."""
    value = section.get(name, 0)
    return isinstance(value, int) and not isinstance(value, bool)


def _leaves(section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _remote_data(tree: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The data sources that are not local files, by option. Local paths are absolute by now."""
    parts = [("data", tree.get("data"))]
    for name in LISTS:
        listed = items if isinstance(items := tree.get(name), list) else []
        parts += [(f"{name}.{n}.data", part.get("data")) for n, part in enumerate(listed) if isinstance(part, Mapping)]
    for option, data in parts:
        if isinstance(data, Mapping):
            for name, source in _sources(data):
                if isinstance(source, str) and not Path(source).is_absolute():
                    yield f"{option}.{name}", source


def _sources(data: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    path = data.get("path")
    if isinstance(path, list):
        yield from ((f"path.{n}.path", s.get("path")) for n, s in enumerate(path) if isinstance(s, Mapping))
    else:
        yield "path", path
    yield "validation", data.get("validation")
