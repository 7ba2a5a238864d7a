"""The sections `sweep` and `merge` of a recipe that trains several adapters together, and how adapters are merged to
one: the method and its numbers, for the command, the recipe and Python.

MergeOptions("ties", weights=(1.0, 0.5), density=0.2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from trillora.errors import TrilloraError, nearest
from trillora.recipe.section import Rank, Rate, Section, conflict

MAX_ADAPTERS = 64  # trained together
MergeMethod = Literal["linear", "cat", "svd", "ties", "dare-linear", "dare-ties", "magnitude-prune"]
MERGE_METHODS: tuple[str, ...] = get_args(MergeMethod)
DEFAULT_DENSITY = 0.5

# The options that have an effect on a method, in addition to the weights.
_USED: dict[str, set[str]] = {
    "linear": {"rank"},
    "cat": set(),
    "svd": {"rank"},
    "ties": {"rank", "density"},
    "dare-linear": {"rank", "density", "seed"},
    "dare-ties": {"rank", "density", "seed"},
    "magnitude-prune": {"rank", "density"},
}


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
    beta: Annotated[tuple[Annotated[float, Field(gt=0, le=1e6)], ...], Field(min_length=1)] | None = Field(
        default=None, description="Values of beta to compare, instead of train.beta."
    )
    keep: Literal["best", "all"] = Field(
        default="best",
        description="best: the adapter with the lowest evaluation loss is the run's; with several betas, the one with "
        "the most pairs right. all: keep each.",
    )

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        found = {"learning_rate": self.learning_rate, "rank": self.rank, "seed": self.seed, "beta": self.beta}
        return {name: values for name, values in found.items() if values is not None}

    @model_validator(mode="after")
    def _compares_something(self) -> SweepSection:
        for name, values in self.values.items():
            if len(set(values)) < len(values):
                raise conflict(name, f"sweep.{name} has the same value twice.", "remove one of them")
        count = math.prod(map(len, self.values.values()))
        if count < 2:
            what = "The sweep has one combination, so there is nothing to compare."
            raise conflict("keep", what, "give two or more values of learning_rate, rank, seed or beta")
        if count > MAX_ADAPTERS:
            what = f"The sweep has {count:,} combinations; the limit is {MAX_ADAPTERS}."
            raise conflict("keep", what, "give fewer values")
        return self


@dataclass(frozen=True)
class MergeOptions:
    """None means the default: weights of 1, a density of 0.5, seed 0, and the rank that docs/merging.md gives."""

    method: MergeMethod = "linear"
    weights: tuple[float, ...] | None = None  # one per adapter
    density: float | None = None  # the share of entries that is kept
    rank: int | None = None  # of the result
    seed: int | None = None  # of the random choice of entries

    def checked(self, num_adapters: int, prefix: str = "--") -> MergeOptions:
        """The same options with weights, density and seed filled in. `prefix` names an option in errors: `--` on the
        command line, `merge.` in a recipe."""
        if self.method not in MERGE_METHODS:
            meant = nearest(str(self.method), MERGE_METHODS)
            raise TrilloraError(
                f"Unknown merge method '{self.method}'.",
                where=f"{prefix}method",
                do=(f"did you mean {meant}? " if meant else "") + f"Methods: {' '.join(MERGE_METHODS)}",
            )
        used = _USED[self.method]
        for option in ("density", "rank", "seed"):
            if getattr(self, option) is not None and option not in used:
                raise TrilloraError(
                    f"The method {self.method} has no {option}.",
                    where=f"{prefix}{option}",
                    do=f"leave it out; methods with it: {' '.join(m for m in MERGE_METHODS if option in _USED[m])}",
                )
        weights = self._checked_weights(num_adapters, prefix)
        density = DEFAULT_DENSITY if self.density is None else self.density
        if not 0 < density <= 1:
            what = f"The density must be above 0 and at most 1, got {density}."
            raise TrilloraError(what, where=f"{prefix}density", do="use a share such as 0.5")
        if self.rank is not None and self.rank < 1:
            what = f"The rank must be at least 1, got {self.rank}."
            raise TrilloraError(what, where=f"{prefix}rank", do="use the rank of one of the adapters, or leave it out")
        if self.seed is not None and self.seed < 0:
            what = f"The seed must not be negative, got {self.seed}."
            raise TrilloraError(what, where=f"{prefix}seed", do="use 0 or more")
        return MergeOptions(
            self.method,
            weights,
            density if "density" in used else None,
            self.rank,
            (self.seed or 0) if "seed" in used else None,
        )

    def _checked_weights(self, num_adapters: int, prefix: str) -> tuple[float, ...]:
        weights = (1.0,) * num_adapters if self.weights is None else tuple(map(float, self.weights))
        where = f"{prefix}weights"
        if len(weights) != num_adapters:
            raise TrilloraError(
                f"There are {num_adapters} adapters and {len(weights)} {'weight' if len(weights) == 1 else 'weights'}.",
                where=where,
                do=f"give one weight per adapter, in their order: {','.join(['1'] * num_adapters)}",
            )
        if not all(math.isfinite(weight) for weight in weights):
            what = f"A weight is not a finite number: {', '.join(f'{weight:g}' for weight in weights)}."
            raise TrilloraError(what, where=where, do="use numbers such as 1 and 0.5")
        if not any(weights):
            raise TrilloraError("All weights are zero, so the merge would change nothing.", where=where, do="use 1")
        return weights


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
