"""The entries of a run, one after the other: what is trained together.

timeline_of(recipe, stages)      # of a recipe with two stages: [Entry("stage", (first,)), Entry("stage", (second,))]
                                 # with phases, a sweep or several learning rates: one entry with all of them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trillora.data.stage import StageData, batches_of
from trillora.errors import TrilloraError
from trillora.recipe.group import Group, group_of
from trillora.recipe.schema import Recipe
from trillora.step.group_plan import Selection, selections


@dataclass(frozen=True)
class Entry:
    """Adapters that are trained together. They start from the adapter of the entry before, if there is one."""

    kind: Literal["stage", "phases", "sweep", "auto"]
    members: tuple[StageData, ...]
    selections: tuple[Selection, ...] = ()  # where learning rates are dropped

    @property
    def is_single(self) -> bool:
        return len(self.members) == 1

    @property
    def name(self) -> str:
        """For messages."""
        return f"stage {self.members[0].name}" if self.is_single else "all adapters"

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def num_steps(self) -> int:
        return max(member.num_steps for member in self.members)


def timeline_of(recipe: Recipe, stages: Sequence[StageData]) -> list[Entry]:
    """What a run trains, in order. `stages` are the data of the recipe's stages or phases."""
    group = group_of(recipe)
    if group is None:
        return [Entry("stage", (stage,)) for stage in stages]
    members = _members_of(group, stages)
    keeps_all = recipe.sweep is not None and recipe.sweep.keep == "all"
    if group.kind == "sweep" and not keeps_all and members[0].evaluation is None:
        raise TrilloraError(
            "The best adapter of a sweep is found by its evaluation, but this recipe holds out no rows.",
            where="data.split",
            do="add data.split: {validation: 0.1} or data.validation, or set sweep.keep to all",
        )
    picks = tuple(selections(members[0].num_steps)) if group.kind == "auto" else ()
    return [Entry(group.kind, members, picks)]


def _members_of(group: Group, stages: Sequence[StageData]) -> tuple[StageData, ...]:
    """The data of every adapter. The combinations of a sweep share their rows; only a seed changes their order."""
    if group.kind == "phases":
        return tuple(stages)
    [shared] = stages
    found = []
    for member in group.members:
        lora = member.recipe.lora.model_copy(update={"train_tokens": shared.recipe.lora.train_tokens})
        recipe = member.recipe.model_copy(update={"data": shared.recipe.data, "lora": lora})
        batches = shared.batches
        if recipe.train.seed != shared.recipe.train.seed:
            documents, lost = shared.dataset.fitted("train", recipe.train.sequence_length, recipe.train.seed)
            batches = batches_of(documents, recipe, shared.dataset.pad_id, lost)
        found.append(dataclasses.replace(shared, name=member.name, recipe=recipe, batches=batches))
    return tuple(found)
