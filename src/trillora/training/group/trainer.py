"""A run that trains several adapters together: its phases, the combinations of a sweep, or several learning rates.

The order is that of `training.trainer`. What differs: one step serves all adapters (`step.group`), each has a position
of its own, and at the end each phase leaves an adapter in `adapters/NAME`. `adapter/` holds the best of a sweep, the
winner of the search for a learning rate, or the merged phases.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.data.stage import StageData, batches_of
from trillora.devices.mesh import any_process
from trillora.engine.group import group_state
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.events import AdaptersStarted, Chosen, Note
from trillora.model.adapters import fit_adapter
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.preflight.predict import predictor_for
from trillora.recipe import run_file
from trillora.recipe.group import Group, group_of
from trillora.recipe.resolve import ResolvedRecipe, ResolvedStage, StepSettings, given_settings
from trillora.recipe.schema import Stage, StageRecipe
from trillora.runs.files import MANIFEST_FILE, RECIPE_FILE, RESOLVED_FILE
from trillora.runs.manifest import AdapterPlan, GroupPlan
from trillora.step.adapter_spec import Start
from trillora.step.autotune import DoesNotFit, Plan, choose
from trillora.step.background import wait_for_programs
from trillora.step.build import Assembly
from trillora.step.compile_guard import Planned, describe
from trillora.step.group import (
    GroupAssembly,
    assemble_group,
    options_of,
    padded,
    padding_of,
    widest,
    without_padding,
)
from trillora.step.group_plan import Selection, halvings, planned_widths, selections
from trillora.training import manifest
from trillora.training.divergence import DivergenceMonitor
from trillora.training.group.loop import GroupLoop, GroupRun, Member
from trillora.training.group.position import GroupPosition, MemberPosition
from trillora.training.group.results import GroupResults
from trillora.training.group.state_files import (
    Kept,
    find_group_fault,
    from_files,
    make_group_copier,
    read_group_facts,
)
from trillora.training.loop import Diverged
from trillora.training.run_folder import losses
from trillora.training.run_process import Identity, RunProcess, TrainResult, peak_seconds_per_token, read_base
from trillora.training.validation import EvalPlan, Evaluator, Measures, Sampler, plan_evaluation


class GroupTraining(RunProcess):
    """One process of a run that trains several adapters."""

    find_fault = staticmethod(find_group_fault)
    read_facts = staticmethod(read_group_facts)

    def run(self) -> TrainResult:
        recipe, listener = self._recipe, self._listener
        devices, opened = self._open()
        saved = self._newest()
        facts = read_group_facts(saved[1]) if saved else None
        before = ResolvedRecipe.from_dict(facts["resolved"]) if facts else None
        stages, identity = self._read_stages(opened, before)
        group = group_of(recipe)
        assert group is not None
        data = members_data(group, stages)
        check_group(group, data, keeps_all=recipe.sweep is not None and recipe.sweep.keep == "all")
        position = self._start_position(facts, before, identity, opened, group)
        is_same_hardware = facts is not None and facts["devices"] == manifest.describe_devices(devices)
        picks = tuple(selections(data[0].num_steps)) if group.kind == "auto" else ()
        plans = self._plan(group, data, picks, opened.config, devices, before if is_same_hardware else None, before)
        first = plans[max(plans)]
        assembly = first.assembly
        assert isinstance(assembly, GroupAssembly)
        resolved = resolve_group(self._recipe, data, plans, before)
        filled = resolved.fill(recipe)
        self._write_recipe(filled, resolved, group, data, assembly, identity(), opened)
        size = first.settings.micro_batch_size
        # A sweep compares numbers; only phases show answers.
        eval_plans = [plan_evaluation(one, size, opened, listener, answers=group.kind == "phases") for one in data]
        listener(Note(describe(planned_programs(plans, data, eval_plans, is_new=saved is None))))
        self._print_adapted(assembly.model)
        base = read_base(opened.folder, assembly, listener)
        options = jax.device_put(options_of(group.members, [one.num_steps for one in data]), _everywhere(assembly))
        kept: Kept = {}
        if saved:
            where = self._checkpoints.where(position.step)
            state, kept = from_files(saved[1], assembly, [one.name for one in data], where)
        else:
            state = place_group(assembly, group.members, base, self._start)
        self._start_folder(saved)
        del saved  # as large as the state
        with self._tracking(position.step + 1, filled) as events, self._saver(events) as saver:
            run = GroupRun(
                folder=self._folder,
                listener=events,
                stop=self._stop,
                checkpoints=self._checkpoints,
                saver=saver,
                keep_checkpoints=recipe.train.keep_checkpoints,
                checkpoint_every=recipe.train.checkpoint_every,
                evaluate_every=resolved.evaluate_every,
                assembly=assembly,
                settings=first.settings,
                programs={width: plan.compiled for width, plan in plans.items()},
                lane=assembly.compile_lane(),
                copy=make_group_copier(assembly),
                facts={**manifest.of_checkpoint(filled, resolved, identity(), devices), "run": self._record.run_id},
                members=self._members(group, data, eval_plans, assembly),
                options=options,
                selections=picks,
                watch=self._watch,
                watchdog=self._watchdog,
                peak_seconds_per_token=peak_seconds_per_token(assembly.model.layout, devices),
            )
            any_process(False, False)  # compiled now: it is a program too
            wait_for_programs()
            return self._to_the_end(run, group, base, state, position, kept, opened, plans)

    def _start_position(
        self,
        facts: dict[str, Any] | None,
        before: ResolvedRecipe | None,
        identity: Identity,
        opened: OpenModel,
        group: Group,
    ) -> GroupPosition:
        if facts is None or before is None:
            guessing = math.log(opened.config.get_text_config().vocab_size)
            return GroupPosition.start([MemberPosition(DivergenceMonitor(guessing)) for _ in group.members])
        position = GroupPosition.from_dict(facts["position"])
        self._check_unchanged(facts, before, identity(), position.step)
        return position

    def _plan(
        self,
        group: Group,
        data: Sequence[StageData],
        picks: Sequence[Selection],
        config: Any,
        devices: list[Any],
        kept: ResolvedRecipe | None,
        before: ResolvedRecipe | None,
    ) -> dict[int, Plan]:
        """Compiles the step for every number of adapters that the run needs, the largest first: it decides how many
        adapters fit in memory at once. `kept`: decisions of an earlier start on the same hardware."""
        recipe, num_steps = widest(group.members), data[0].num_steps
        first = before.stages[0].settings if before else None
        fixed_by_start = {"layers": first.layers, "quantize": first.quantize} if first else {}

        def plan(width: int, shared: dict[str, Any]) -> Plan:
            def build(recipe: StageRecipe, settings: StepSettings, config: Any, mesh: Any, num_steps: int) -> Assembly:
                return assemble_group(group.members, settings, config, mesh)

            earlier = kept.stage(width_name(width)) if kept else None
            settings = {
                **fixed_by_start,
                **shared,
                **(vars(earlier.settings) if earlier else {}),
                "adapters_at_once": width,
            }
            predictor = None if earlier else predictor_for(devices)
            return choose(
                recipe, config, devices, num_steps, self._listener, kept=settings, predictor=predictor, build=build
            )

        given = given_settings(recipe).get("adapters_at_once")
        earlier = kept.stages[0].settings.adapters_at_once if kept else None
        fixed = earlier or given
        sizes = [min(fixed, len(data))] if fixed else halvings(len(data), _axis_size(recipe))
        for size in sizes:
            try:
                widest_plan = plan(size, {})
                break
            except DoesNotFit:
                if size == sizes[-1]:
                    raise
                self._listener(Note(f"{size} adapters do not fit in memory at once; fewer are tried"))
        if fixed is None:
            reason = "all of them" if size == len(data) else "as many as fit in memory"
            self._listener(Chosen("train.adapters_at_once", size, reason))
        shared = {name: value for name, value in widest_plan.settings.shared().items() if name != "adapters_at_once"}
        plans = {size: widest_plan}
        for width in planned_widths([one.num_steps for one in data], picks, size, _axis_size(recipe)):
            plans.setdefault(width, plan(width, shared))
        return plans

    def _write_recipe(
        self,
        filled: Any,
        resolved: ResolvedRecipe,
        group: Group,
        data: Sequence[StageData],
        assembly: GroupAssembly,
        identity: dict[str, str],
        opened: OpenModel,
    ) -> None:
        self._folder.write(RESOLVED_FILE, resolved.dump(self._recipe))
        self._folder.write(RECIPE_FILE, run_file.dump(filled), mode=run_file.MODE)
        of_run = manifest.of_run(filled, data, assembly, identity, opened)
        adapters = []
        for one in data:
            train, lora = one.recipe.train, one.recipe.lora
            adapters.append(AdapterPlan(one.name, train.rate, lora.rank, lora.alpha, train.seed, one.num_steps))
        of_run = dataclasses.replace(
            of_run,
            num_steps=max(one.num_steps for one in data),
            stages=tuple(dataclasses.replace(stage, first_step=1) for stage in of_run.stages),  # they start together
            group=GroupPlan(group.kind, tuple(adapters)),
        )
        self._folder.write(MANIFEST_FILE, of_run.to_json())

    def _members(
        self,
        group: Group,
        data: Sequence[StageData],
        eval_plans: Sequence[EvalPlan],
        assembly: GroupAssembly,
    ) -> tuple[Member, ...]:
        """The adapters with what evaluates them. All evaluations have one shape, so they share one program."""
        members = []
        evaluator: Evaluator | None = None
        by_rows: dict[int, Evaluator] = {}
        for one, plan in zip(data, eval_plans, strict=True):
            own = None
            if plan.batches is not None:
                own = by_rows.get(id(one.evaluation))
                if own is None:
                    own = evaluator = Evaluator(assembly, plan.batches, one.name, like=evaluator)
                    by_rows[id(one.evaluation)] = own
            sampler = None
            if plan.prompts is not None and plan.questions:
                sampler = Sampler(assembly, plan.prompts, plan.max_tokens)
            padding = padding_of(group.members, one.recipe)
            members.append(Member(one, Measures(own, sampler, plan.questions), padding))
        return tuple(members)

    def _to_the_end(
        self,
        run: GroupRun,
        group: Group,
        base: Tree,
        state: TrainState,
        position: GroupPosition,
        kept: Kept,
        opened: OpenModel,
        plans: dict[int, Plan],
    ) -> TrainResult:
        """Trains the group. Leaves its adapters, or a checkpoint if the run was stopped."""
        run.listener(AdaptersStarted(group.kind, tuple(run.names[number] for number in position.running)))
        if position.step:
            run.listener(Note(f"Resuming from step {position.step} of {run.num_steps}"))
        with self._watch.watching(), self._watchdog.guarding():
            state, stopped = GroupLoop(run, base, position, kept).train(state)
        run.saver.wait()
        self._check_saved(run.saver)
        adapter = None
        if stopped:
            run.listener(Note(f"Stopped at step {position.step} of {run.num_steps} by {stopped}; saved"))
        else:
            results = GroupResults(self._recipe, group, run, base, position, kept, opened)
            try:
                adapter = results.write()
            except Diverged as error:
                self._folder.add_history("diverged", position.step, error.what)
                run.update_report()
                raise
        self._folder.add_history("stopped" if stopped else "finished", position.step, stopped or "")
        run.update_report()
        done = tuple(losses(self._folder.metrics_file))
        num_compiles = sum(plan.num_compiles for plan in plans.values())
        return TrainResult(self._folder.path, adapter, done, num_compiles, stopped)


def members_data(group: Group, stages: Sequence[StageData]) -> list[StageData]:
    """The data of every adapter. The combinations of a sweep share their rows; only a seed changes their order."""
    if group.kind == "phases":
        return list(stages)
    [shared] = stages
    found = []
    for member in group.members:
        recipe = member.recipe.model_copy(update={"data": shared.recipe.data})
        batches = shared.batches
        if recipe.train.seed != shared.recipe.train.seed:
            documents, lost = shared.dataset.fitted("train", recipe.train.sequence_length, recipe.train.seed)
            batches = batches_of(documents, recipe, shared.dataset.pad_id, lost)
        found.append(dataclasses.replace(shared, name=member.name, recipe=recipe, batches=batches))
    return found


def check_group(group: Group, data: Sequence[StageData], *, keeps_all: bool) -> None:
    """Refuses a sweep whose best adapter cannot be found."""
    if group.kind == "sweep" and not keeps_all and data[0].evaluation is None:
        raise TrilloraError(
            "The best adapter of a sweep is found by its evaluation, but this recipe holds out no rows.",
            where="data.split",
            do="add data.split: {validation: 0.1} or data.validation, or set sweep.keep to all",
        )


def width_name(width: int) -> str:
    """The name under which the decisions for a step of this many adapters are saved."""
    return f"{width} at once"


def resolve_group(
    recipe: Any, data: Sequence[StageData], plans: dict[int, Plan], before: ResolvedRecipe | None
) -> ResolvedRecipe:
    """All decisions: one entry per adapter, with the settings of the widest step, and one per width."""
    first = plans[max(plans)]
    num_steps, every = max(one.num_steps for one in data), recipe.evaluate.every_steps
    resolved = []
    for number, one in enumerate(data):
        earlier = before.stage(one.name) if before else None
        reasons = {**(earlier.reasons if earlier else {}), **(first.reasons if number == 0 else {})}
        if number == 0 and every == "auto":
            reasons["every_steps"] = f"ten evaluations in {num_steps} steps"
        resolved.append(ResolvedStage(one.name, first.settings, one.recipe.data.template_date, reasons))
    for width, plan in plans.items():
        resolved.append(ResolvedStage(width_name(width), plan.settings, None, {}))
    return ResolvedRecipe(tuple(resolved), max(1, math.ceil(num_steps / 10)) if every == "auto" else every)


def planned_programs(
    plans: dict[int, Plan], data: Sequence[StageData], eval_plans: Sequence[EvalPlan], *, is_new: bool
) -> list[Planned]:
    found = [Planned("the state before the first step")] if is_new else []
    widths = ", ".join(map(str, plans))
    found.append(Planned("the step", len(plans), f"{widths} adapters at once"))
    if any(plan.batches is not None for plan in eval_plans):
        found.append(Planned("the evaluation"))
    for plan in eval_plans:
        found += [part for part in plan.programs() if part.what.startswith("the answers")]
    return [*found, Planned("one adapter of the group"), Planned("the copy of the state for a checkpoint")]


def place_group(
    assembly: GroupAssembly, members: Sequence[Stage], base: Tree, start: Start | None = None
) -> TrainState:
    """The state before the first step, on the devices: each adapter starts as it would alone."""
    layout = assembly.model.adapter_layout
    adapters = []
    for member in members:
        own = without_padding(layout, padding_of(members, member.recipe))
        if start is not None:
            adapters.append(fit_adapter(start.arrays, layout, start.where))
        else:
            adapters.append(padded(assembly.model.initial_adapter(base, member.recipe.train.seed, own), layout))
    stacked = {key: np.stack([adapter[key] for adapter in adapters]) for key in layout}
    keys = jnp.stack([jax.random.key(member.recipe.train.seed) for member in members])
    first_state = functools.partial(group_state, optimizer=assembly.optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)
    return jax.jit(lambda a, k: first_state(a, keys_N=k), out_shardings=shardings)(stacked, keys)


def _everywhere(assembly: GroupAssembly) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, assembly.option_shapes)


def _axis_size(recipe: StageRecipe) -> int:
    return 1 if recipe.hardware.mesh == "auto" else recipe.hardware.mesh.adapter
