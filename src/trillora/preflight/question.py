"""What the compiler process is asked: one stage of a recipe on one slice. No jax.

    Question("v5e-8", "compiler", "/models/qwen3", stage.recipe, num_steps=300)

It is sent as one line of JSON; the answer is a `StageResult`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trillora.preflight.hlo.simulate import AS_ASSUMED, Slowdown
from trillora.preflight.result import JsonRecord, Method
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import Stage, StageRecipe


@dataclass(frozen=True)
class Question(JsonRecord):
    slice: str
    method: Method
    model: str  # folder of the model
    stage: StageRecipe
    num_steps: int
    trust_remote_code: bool = False
    whole: bool = False  # compile to the end
    kept: StepSettings | None = None  # of another stage, whose shared settings are used here too
    slowdown: Slowdown = AS_ASSUMED  # as measured on the chip
    members: tuple[Stage, ...] = ()  # of a group of adapters
    width: int = 1  # how many of the members are trained at once
