"""The adapters that a recipe trains together: its phases, the combinations of its sweep, or eight learning rates.

    recipe = load_recipe({"model": "smollm2", "data": "chats.jsonl", "sweep": {"learning_rate": [1e-4, 2e-4]}})
    group = group_of(recipe)
    [member.name for member in group.members]        # ["rate-0.0001", "rate-0.0002"]
    group.members[0].recipe.train.learning_rate      # 0.0001

Each member has the whole recipe that would train it alone. This defines what training together means: the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trillora.recipe.schema import Recipe, Stage, StageRecipe, stages_of

# Rates that `learning_rate: auto` tries, a factor of two apart: below and above what LoRA needs with AdamW.
AUTO_RATES = tuple(5e-5 * 2**power for power in range(8))
LION_FACTOR = 0.2  # Lion's direction has entries of size one, Adam's are mostly smaller
_SHORT = {"learning_rate": "rate", "rank": "rank", "seed": "seed", "beta": "beta"}


@dataclass(frozen=True)
class Group:
    """Adapters that are trained together. In `auto`, all but one are dropped on the way."""

    kind: Literal["phases", "sweep", "auto"]
    members: tuple[Stage, ...]


def group_of(recipe: Recipe) -> Group | None:
    """None for a recipe that trains one adapter."""
    if recipe.phases is not None:
        return Group("phases", stages_of(recipe))
    if recipe.sweep is not None:
        return Group("sweep", _combinations(recipe, recipe.sweep.values))
    if recipe.train.learning_rate == "auto":
        factor = LION_FACTOR if recipe.train.optimizer.startswith("lion") else 1.0
        return Group("auto", _combinations(recipe, {"learning_rate": tuple(rate * factor for rate in AUTO_RATES)}))
    return None


def _combinations(recipe: Recipe, values: dict[str, tuple[float, ...]]) -> tuple[Stage, ...]:
    [alone] = stages_of(recipe)
    found = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        name = "_".join(f"{_SHORT[option]}-{value:g}" for option, value in chosen.items())
        found.append(Stage(name, _with(alone.recipe, chosen)))
    return tuple(found)


def _with(recipe: StageRecipe, chosen: Mapping[str, object]) -> StageRecipe:
    train: dict[str, Any] = {name: chosen[name] for name in ("learning_rate", "seed", "beta") if name in chosen}
    lora = {"rank": chosen["rank"]} if "rank" in chosen else {}
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update=train), "lora": recipe.lora.model_copy(update=lora)}
    )
