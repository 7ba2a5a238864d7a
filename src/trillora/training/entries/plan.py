"""Decides every `auto` of a run and compiles every step before training starts.

plans = plan_entries(entries, choices, first=0)
plans[0]            # {1: Plan}: number of adapters at once -> settings and compiled step
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trillora.data.open import TEMPLATE_DATE_REASON
from trillora.events import Chosen, Listener, Note
from trillora.preflight.predict import predictor_for
from trillora.recipe.resolve import ResolvedRecipe, ResolvedStage, StepSettings, given_settings
from trillora.recipe.schema import Recipe, StageRecipe, stages_of
from trillora.step.autotune import DoesNotFit, Plan, choose, compile_step
from trillora.step.build import Assembly
from trillora.step.group import assemble_group, widest
from trillora.step.group_plan import halvings, planned_widths
from trillora.training.entries.timeline import Entry

Plans = dict[int, Plan]  # of one entry: number of adapters at once -> settings and compiled step


@dataclass(frozen=True)
class Choices:
    """What the decisions of a run depend on."""

    config: Any  # of the model
    devices: list[Any]
    before: ResolvedRecipe | None  # the decisions of an earlier start
    is_same_hardware: bool  # then all of them are kept
    listener: Listener
    meanwhile: Callable[[int, Assembly], None]  # called while the compiler works on the step of an entry

    def fixed(self, name: str) -> dict[str, Any]:
        """The decisions of an earlier start that are kept: all of them, or what the state depends on."""
        earlier = self.before.stage(name) if self.before else None
        if earlier is None:
            return {}
        fixed = {"layers": earlier.settings.layers, "quantize": earlier.settings.quantize}
        return dict(vars(earlier.settings)) if self.is_same_hardware else fixed

    def predictor(self, name: str) -> Any:
        """None if there is nothing left to choose."""
        is_kept = self.is_same_hardware and self.before is not None and self.before.stage(name) is not None
        return None if is_kept else predictor_for(self.devices)


def plan_entries(entries: Sequence[Entry], choices: Choices, first: int) -> list[Plans]:
    """Plans the entries from `first` on. That with the longest sequences is compiled first, and its settings hold for
    all of them, because they share the base."""
    plans: dict[int, Plans] = {}
    shared: dict[str, Any] = {}
    left = range(min(first, len(entries) - 1), len(entries))
    for number in sorted(left, key=lambda n: -entries[n].members[0].recipe.train.sequence_length):
        if entries[number].is_single:
            plans[number] = {1: _plan_single(number, entries[number], choices, shared)}
        else:
            plans[number] = _plan_together(entries[number], choices)
        shared = shared or widest_of(plans[number]).settings.shared()
    return [plans.get(number, plans[max(plans)]) for number in range(len(entries))]


def widest_of(plans: Plans) -> Plan:
    return plans[max(plans)]


def _plan_single(number: int, entry: Entry, choices: Choices, shared: dict[str, Any]) -> Plan:
    [stage] = entry.members
    meanwhile = functools.partial(choices.meanwhile, number)
    return choose(
        stage.recipe,
        choices.config,
        choices.devices,
        stage.num_steps,
        choices.listener,
        kept={**shared, **choices.fixed(stage.name)},
        predictor=choices.predictor(stage.name),
        compiler=functools.partial(compile_step, meanwhile=meanwhile),
        document_room=stage.document_room,
    )


def _plan_together(entry: Entry, choices: Choices) -> Plans:
    """The step for every number of adapters that the entry needs, the largest first: it decides how many adapters fit
    in memory at once."""
    recipe = widest(entry.members)
    axis_size = 1 if recipe.hardware.mesh == "auto" else recipe.hardware.mesh.adapter

    def plan(width: int, shared: dict[str, Any]) -> Plan:
        def build(recipe: StageRecipe, settings: StepSettings, config: Any, mesh: Any, num_steps: int) -> Assembly:
            return assemble_group(entry.members, settings, config, mesh)

        name, first = width_name(width), choices.fixed(entry.members[0].name)
        fixed = {key: value for key, value in first.items() if key in ("layers", "quantize")}
        own = choices.fixed(name) if choices.is_same_hardware else {}
        kept: dict[str, Any] = {**fixed, **shared, **own, "adapters_at_once": width}
        num_steps, predictor = entry.members[0].num_steps, choices.predictor(name)
        values = (recipe, choices.config, choices.devices, num_steps, choices.listener)
        return choose(*values, kept=kept, predictor=predictor, build=build)

    size, widest_plan = _widest_plan(entry, choices, plan, axis_size)
    shared = {name: value for name, value in widest_plan.settings.shared().items() if name != "adapters_at_once"}
    plans = {size: widest_plan}
    for width in planned_widths([one.num_steps for one in entry.members], entry.selections, size, axis_size):
        plans.setdefault(width, plan(width, shared))
    return plans


def _widest_plan(
    entry: Entry, choices: Choices, plan: Callable[[int, dict[str, Any]], Plan], axis_size: int
) -> tuple[int, Plan]:
    """How many adapters fit in memory at once, and their step."""
    num_adapters, before = len(entry.members), choices.before if choices.is_same_hardware else None
    earlier = before.stages[0].settings.adapters_at_once if before else None
    fixed = earlier or given_settings(widest(entry.members)).get("adapters_at_once")
    sizes = [min(fixed, num_adapters)] if fixed else halvings(num_adapters, axis_size)
    for size in sizes:
        try:
            found = plan(size, {})
            break
        except DoesNotFit:
            if size == sizes[-1]:
                raise
            choices.listener(Note(f"{size} adapters do not fit in memory at once; fewer are tried"))
    if fixed is None:
        reason = "all of them" if size == num_adapters else "as many as fit in memory"
        choices.listener(Chosen("train.adapters_at_once", size, reason))
    return size, found


def width_name(width: int) -> str:
    """The name under which the decisions for a step of this many adapters are saved."""
    return f"{width} at once"


def resolve(
    recipe: Recipe, entries: Sequence[Entry], plans: Sequence[Plans], before: ResolvedRecipe | None, first: int
) -> ResolvedRecipe:
    """All decisions of the run with their reasons: of every adapter, and of every number of adapters at once. Decisions
    of an earlier start keep theirs. Entries before `first` are finished and keep their micro-batch size."""
    dates = {stage.name: stage.recipe.data.template_date for stage in stages_of(recipe)}
    every, num_steps = recipe.evaluate.every_steps, sum(entry.num_steps for entry in entries)
    resolved: list[ResolvedStage] = []
    for number, (entry, own) in enumerate(zip(entries, plans, strict=True)):
        plan = widest_of(own)
        for place, stage in enumerate(entry.members):
            earlier = before.stage(stage.name) if before else None
            reasons = {**(earlier.reasons if earlier else {}), **(plan.reasons if place == 0 else {})}
            date = stage.recipe.data.template_date
            if date is not None and dates.get(stage.name, date) is None:
                reasons["template_date"] = TEMPLATE_DATE_REASON
            if not resolved and every == "auto":
                reasons["every_steps"] = f"ten evaluations in {num_steps} steps"
            settings = plan.settings
            if earlier is not None and number < first and entry.is_single:
                settings = dataclasses.replace(settings, micro_batch_size=earlier.settings.micro_batch_size)
            resolved.append(ResolvedStage(stage.name, settings, date, reasons))
        if not entry.is_single:
            resolved += [ResolvedStage(width_name(width), one.settings, None, {}) for width, one in own.items()]
    return ResolvedRecipe(tuple(resolved), max(1, math.ceil(num_steps / 10)) if every == "auto" else every)
