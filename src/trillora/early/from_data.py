"""A recipe made of a data file, for commands that are given rows instead of a recipe.

    trillora train qa.csv --model smollm2 --out runs/qa

>>> options_from_data(Path("/data/qa.csv"), "smollm2")
{'model': 'smollm2', 'data': '/data/qa.csv'}

All other options have their defaults. `recipe_text` writes the options that a recipe gives as a file for the user to
change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trillora.early.training import loss_for
from trillora.files.user_path import user_path
from trillora.recipe import yaml
from trillora.recipe.schema import EMBEDDED, Recipe
from trillora.runs.files import RECIPE_FILE, is_run
from trillora.secrets import mask_values

_DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|txt|md|csv|tsv|parquet|tar|tgz|zip)(\.gz|\.zst)?$", re.IGNORECASE)


def is_data_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path names data instead of a recipe: a file with rows, or a folder of them. The recipe that a run saves
    is a JSON file too."""
    name = os.path.basename(os.fspath(path))
    if os.path.isdir(path):
        return not is_run(Path(path))
    return name != RECIPE_FILE and _DATA_FILE.search(name) is not None


def options_from_data(file: str | os.PathLike[str], model: str = EMBEDDED) -> dict[str, Any]:
    """The options of a recipe that trains `model` on all rows of a file, for `load_recipe`. Rows with a chosen and a
    rejected answer are compared."""
    path = os.path.abspath(user_path(file, where="the data file"))
    loss = loss_for(path)
    return {"model": model, "data": path, **({} if loss == "sft" else {"train": {"loss": loss}})}


def recipe_or_data(recipe: str | Path | Mapping[str, object]) -> str | Path | Mapping[str, object]:
    """A recipe as it is, or the options that data make one of."""
    if isinstance(recipe, Mapping) or not is_data_file(recipe):
        return recipe
    return options_from_data(recipe)


def recipe_text(recipe: Recipe, *comments: str) -> str:
    """A recipe file with the options that were given, without those that have their defaults. Secrets are masked."""
    lines = [f"# {comment}" for comment in comments]
    given = mask_values(recipe.model_dump(mode="json", exclude_unset=True))
    for name, section in given.items():
        if isinstance(section, dict) and len(section) == 1:
            section = section.get(_shorthand(name), section)
        lines.append(f"{name}: {yaml.write(section)}")
    return "\n".join(lines) + "\n"


def _shorthand(name: str) -> str:
    """The key of a section that is written as a bare value: `model: smollm2`."""
    return {"model": "name", "data": "path"}.get(name, "")
