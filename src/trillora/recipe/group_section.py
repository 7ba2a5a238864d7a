"""The sections `sweep` and `merge` of a recipe that trains several adapters together."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trillora.errors import TrilloraError
from trillora.recipe.merge_options import MergeMethod, MergeOptions
from trillora.recipe.section import Rank, Rate, Section, conflict

MAX_ADAPTERS = 64  # trained together


class SweepSection(Section):
    """Values to compare. Every combination is an adapter; all are trained together on the same base."""

    learning_rate: Annotated[tuple[Rate, ...], Field(min_length=1)] | None = Field(
        default=None, description="Learning rates to compare, instead of train.learning_rate."
    )
    rank: Annotated[tuple[Rank, ...], Field(min_length=1)] | None = Field(
        default=None, description="Ranks to compare, instead of lora.rank."
    )
    seed: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(min_length=1)] | None = Field(
        default=None, description="Seeds to compare, instead of train.seed."
    )
    keep: Literal["best", "all"] = Field(
        default="best", description="best: the adapter with the lowest evaluation loss is the run's. all: keep each."
    )

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        found = {"learning_rate": self.learning_rate, "rank": self.rank, "seed": self.seed}
        return {name: values for name, values in found.items() if values is not None}

    @model_validator(mode="after")
    def _compares_something(self) -> SweepSection:
        for name, values in self.values.items():
            if len(set(values)) < len(values):
                raise conflict(name, f"sweep.{name} has the same value twice.", "remove one of them")
        count = math.prod(map(len, self.values.values()))
        if count < 2:
            what = "The sweep has one combination, so there is nothing to compare."
            raise conflict("keep", what, "give two or more values of learning_rate, rank or seed")
        if count > MAX_ADAPTERS:
            what = f"The sweep has {count:,} combinations; the limit is {MAX_ADAPTERS}."
            raise conflict("keep", what, "give fewer values")
        return self


class MergeSection(Section):
    """How the adapters of the phases are merged into one at the end."""

    method: MergeMethod = Field(default="linear", description="How to merge. linear: the exact weighted sum.")
    weights: Annotated[tuple[float, ...], Field(min_length=1)] | None = Field(
        default=None, description="One weight per phase (default: 1 each)."
    )
    density: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Fraction of entries kept by ties, dare and magnitude-prune (default: 0.5)."
    )
    rank: Rank | None = Field(default=None, description="Rank of the merged adapter (default: what the method needs).")

    @property
    def options(self) -> MergeOptions:
        return MergeOptions(self.method, self.weights, self.density, self.rank)

    @model_validator(mode="after")
    def _is_defined(self) -> MergeSection:
        """The merge comes at the end of a run, so what can be checked is checked now."""
        try:
            self.options.checked(2 if self.weights is None else len(self.weights), "")
        except TrilloraError as error:
            raise conflict(error.where or "method", error.what, error.do) from error
        return self
