"""One run, in order: recipe, model, data, step, stages, adapter.

    train(load_recipe("recipe.yaml"), Path("runs/first"))

The same call starts a run and resumes it from the newest valid checkpoint. A run is resumed only if model, tokenizer,
chat template, data and recipe are unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillora.adapters.card import CARD_FILE, adapter_card
from trillora.data.batches import Batches
from trillora.data.open import TEMPLATE_DATE_REASON
from trillora.data.stage import StageData
from trillora.devices.cluster import join_cluster
from trillora.devices.mesh import any_process
from trillora.early.training import check_not_finished
from trillora.engine.step import TrainState, initial_state, next_stage
from trillora.events import Alarm, Listener, Note, ignore_events
from trillora.files.checkpoints import Checkpoints
from trillora.files.checksums import with_checksums
from trillora.files.owner import lock_run, own_checkpoints, removed_if_unused
from trillora.files.storage import LocalStorage, open_storage
from trillora.model.adapters import check_changes_something, check_written, fit_adapter, read_adapter
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.preflight.predict import predictor_for
from trillora.recipe import run_file
from trillora.recipe.group import group_of
from trillora.recipe.resolve import ResolvedRecipe, ResolvedStage
from trillora.recipe.schema import Recipe, seconds_of, stages_of
from trillora.runs.files import ADAPTER, CHECKPOINTS, MANIFEST_FILE, METRICS_FILE, RECIPE_FILE, RESOLVED_FILE
from trillora.runs.manifest import AdapterSource
from trillora.step.adapter_spec import Start
from trillora.step.autotune import Plan, choose, compile_step
from trillora.step.background import compile_program, compiling_in_background, wait_for_programs
from trillora.step.build import Assembly
from trillora.step.compile_guard import Planned, Programs, Shape, describe, shape_text
from trillora.step.decisions import SMALL_BASE, local_bytes, memory_limit
from trillora.training import manifest
from trillora.training.best_checkpoint import choose_checkpoint
from trillora.training.divergence import DivergenceMonitor
from trillora.training.group.trainer import GroupTraining
from trillora.training.loop import Diverged, Position, Run, StageLoop
from trillora.training.run_folder import RunFolder, evaluation_losses, losses
from trillora.training.run_process import RunProcess, TrainResult, peak_seconds_per_token, read_base
from trillora.training.saved_record import RunRecord
from trillora.training.signals import Interrupted, Stop
from trillora.training.state_files import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    from_files,
    make_copier,
    read_facts,
)
from trillora.training.validation import EvalPlan, Measures, make_measures, plan_evaluation


def train(
    recipe: Recipe, out: Path, *, listener: Listener = ignore_events, accept_changes: bool = False
) -> TrainResult:
    """Trains by the recipe, or resumes the run in `out`. Everything is written to that folder."""
    join_cluster(listener)
    limit = recipe.train.time_limit
    stop = Stop(seconds_of(limit) if limit else None)
    is_writer = jax.process_index() == 0
    with stop.listening():
        try:
            with _new_folders(recipe, out) if is_writer else contextlib.nullcontext():
                folder = RunFolder(out, writes=is_writer, listener=listener)
                return _train(recipe, folder, is_writer, stop, listener, accept_changes)
        except Interrupted as signal:
            listener(Note(f"Stopped by {signal} before the first step of this start; nothing was lost"))
            return TrainResult(out, None, tuple(losses(out / METRICS_FILE)), 0, stopped=str(signal))


def _train(
    recipe: Recipe, folder: RunFolder, is_writer: bool, stop: Stop, listener: Listener, accept_changes: bool
) -> TrainResult:
    check_not_finished(folder.path)
    kind = _Training if group_of(recipe) is None else GroupTraining
    with _owned_checkpoints(recipe, folder, is_writer, listener) as checkpoints, compiling_in_background():
        return kind(recipe, folder, checkpoints, stop, listener, accept_changes).run()


def _new_folders(recipe: Recipe, out: Path) -> contextlib.AbstractContextManager[None]:
    """A start that fails before it has written anything leaves no folders."""
    place = recipe.train.checkpoint_dir or ""
    return removed_if_unused(out, out / CHECKPOINTS if not place or "://" in place else Path(place).expanduser())


@contextlib.contextmanager
def _owned_checkpoints(recipe: Recipe, folder: RunFolder, is_writer: bool, listener: Listener) -> Iterator[Checkpoints]:
    """The checkpoints of the run. While the block runs, no other process can use the run or write to them."""
    storage = open_storage(recipe.train.checkpoint_dir or folder.path / CHECKPOINTS)
    if not is_writer:
        yield Checkpoints(storage)
        return
    with lock_run(folder.path, listener):
        RunRecord(folder).check_place(storage)
        with own_checkpoints(storage, folder.path, listener) as owned:
            yield Checkpoints(storage, owned.check if owned else None)


@dataclass(frozen=True)
class StageWork:
    """A stage and its compiled programs."""

    stage: StageData
    assembly: Assembly
    programs: Programs
    measures: Measures
    close: Callable[[TrainState], TrainState]  # the last state of the stage -> the first of the next
    num_compiles: int  # of the step, including candidates that did not fit


class _Ahead:
    """Compiles the remaining programs and loads the base while the compiler works on a step."""

    def __init__(
        self, stages: list[StageData], opened: OpenModel, seed: int, first: int, is_new: bool, listener: Listener
    ) -> None:
        self._stages, self._opened, self._seed, self._listener = stages, opened, seed, listener
        self._first, self._is_new = first, is_new
        self._eval_plans: dict[tuple[int, int], EvalPlan] = {}
        self._programs: dict[int, tuple[Assembly, Measures, Callable[[TrainState], TrainState]]] = {}
        self._base: tuple[Tree, Tree] | None = None  # its shapes and arrays

    def meanwhile(self, number: int, limit: float | None, assembly: Assembly) -> None:
        """Called while the step of a stage is compiled. It may turn out too large: then the next candidate does not
        begin again with its own programs."""
        if number >= self._first and number not in self._programs:
            self._start_programs(number, assembly)
        # With several stages, the memory that is free decides for the later ones too: the base is read after them. A
        # large base is in the way of a compiler that tries kernels on the device.
        if len(self._stages) == 1 and (limit is None or local_bytes(assembly.base_shapes) <= SMALL_BASE * limit):
            self.base(assembly)

    def eval_plan(self, number: int, assembly: Assembly) -> EvalPlan:
        key = (number, assembly.micro_batch_size)
        if key not in self._eval_plans:
            self._eval_plans[key] = plan_evaluation(self._stages[number], key[1], self._opened, self._listener)
        return self._eval_plans[key]

    def base(self, assembly: Assembly) -> Tree:
        if self._base is None or self._base[0] != assembly.base_shapes:
            self._base = None  # free the old base before loading the new one
            self._base = assembly.base_shapes, read_base(self._opened.folder, assembly, self._listener)
        return self._base[1]

    def work(self, number: int, plan: Plan) -> StageWork:
        """The stage with all its programs."""
        stage = self._stages[number]
        steps = compile_lengths(plan, stage.batches, self._listener)
        if number not in self._programs or self._programs[number][0] is not plan.assembly:
            self._start_programs(number, plan.assembly)
        _, measures, close = self._programs[number]
        return StageWork(
            stage=stage,
            assembly=plan.assembly,
            programs=Programs(f"The step of stage {stage.name}", steps),
            measures=measures,
            close=close,
            num_compiles=plan.num_compiles + len(steps) - 1,
        )

    def _start_programs(self, number: int, assembly: Assembly) -> None:
        """The programs of a stage, except its steps. A resumed run may not need those that answer prompts."""
        follows = self._stages[number + 1] if number + 1 < len(self._stages) else None
        restarts = follows is not None and follows.restarts_optimizer
        plan = self.eval_plan(number, assembly)
        measures = make_measures(plan, assembly, self._listener, at_once=self._is_new)
        close = compile_next(assembly, self._seed, number + 1, restart=restarts)
        self._programs[number] = assembly, measures, close


class _Training(RunProcess):
    """One process of a run that trains one adapter, in one or more stages."""

    def run(self) -> TrainResult:
        recipe, listener = self._recipe, self._listener
        devices, opened = self._open()
        saved = self._newest()
        facts = read_facts(saved[1]) if saved else None
        before = ResolvedRecipe.from_dict(facts["resolved"]) if facts else None
        stages, identity = self._read_stages(opened, before)
        position = Position(DivergenceMonitor(math.log(opened.config.get_text_config().vocab_size)))
        if facts and before:
            position = self._position_of(facts)
            self._check_unchanged(facts, before, identity(), position.global_step)

        is_same_hardware = facts is not None and facts["devices"] == manifest.describe_devices(devices)
        ahead = _Ahead(stages, opened, recipe.train.seed, position.stage, saved is None, listener)
        plans = self._plan(stages, opened.config, devices, before, is_same_hardware, position.stage, ahead)
        resolved = resolve_recipe(recipe, stages, plans, before, first=position.stage)
        filled, assembly = resolved.fill(recipe), plans[min(position.stage, len(plans) - 1)].assembly
        self._folder.write(RESOLVED_FILE, resolved.dump(recipe))
        self._folder.write(RECIPE_FILE, run_file.dump(filled), mode=run_file.MODE)
        self._opened = opened
        self._manifest = manifest.of_run(filled, stages, assembly, identity(), opened)
        self._folder.write(MANIFEST_FILE, self._manifest.to_json())
        left = range(position.stage, len(stages))
        eval_plans = [ahead.eval_plan(number, plans[number].assembly) for number in left]
        if left:
            planned = planned_programs([stages[number] for number in left], eval_plans, is_new=saved is None)
            listener(Note(describe(planned)))

        self._print_adapted(assembly.model)
        base = ahead.base(assembly)
        where = self._checkpoints.where(position.global_step)
        new = functools.partial(place_state, assembly, recipe.train.seed, base, self._start)
        state = from_files(saved[1], assembly, where) if saved else new()
        self._start_folder(saved)
        del saved  # as large as the state
        with self._tracking(position.global_step + 1, filled) as events, self._saver(events) as saver:
            run = Run(
                folder=self._folder,
                listener=events,
                stop=self._stop,
                checkpoints=self._checkpoints,
                saver=saver,
                keep_checkpoints=recipe.train.keep_checkpoints,
                assembly=assembly,
                copy=make_copier(assembly),
                facts={**manifest.of_checkpoint(filled, resolved, identity(), devices), "run": self._record.run_id},
                base_name=opened.base_name,
                num_steps=sum(stage.num_steps for stage in stages),
                evaluate_every=resolved.evaluate_every,
                watch=self._watch,
                watchdog=self._watchdog,
                peak_seconds_per_token=peak_seconds_per_token(assembly.model.layout, devices),
            )
            works = [ahead.work(number, plans[number]) for number in left]
            any_process(False, False)  # compiled now: it is a program too
            wait_for_programs()
            return self._to_the_end(run, works, base, state, position, stages[-1])

    def _to_the_end(
        self,
        run: Run,
        works: list[StageWork],
        base: Tree,
        state: TrainState,
        position: Position,
        last: StageData,
    ) -> TrainResult:
        """Runs the remaining stages. Leaves an adapter, or a checkpoint if the run was stopped."""
        if position.global_step:
            run.listener(Note(f"Resuming from step {position.global_step} of {run.num_steps}"))
        try:
            with self._watch.watching(), self._watchdog.guarding():
                stopped = self._run_stages(run, works, base, state, position)
            run.saver.wait()
            self._check_saved(run.saver)
            adapter, reason = (None, stopped) if stopped else self._write_adapter(run, position, last)
        except Diverged as error:
            self._record_last()
            self._end(run, "diverged", position, error.what)
            raise
        if stopped:
            run.listener(Note(f"Stopped at step {position.global_step} of {run.num_steps} by {stopped}; saved"))
        self._end(run, "stopped" if stopped else "finished", position, reason)
        done = tuple(losses(self._folder.metrics_file))
        return TrainResult(self._folder.path, adapter, done, sum(work.num_compiles for work in works), stopped)

    def _run_stages(
        self, run: Run, works: list[StageWork], base: Tree, state: TrainState, position: Position
    ) -> str | None:
        """Trains the remaining stages in order. Returns the reason if the run was stopped."""
        for number, work in enumerate(works, 1):
            loop = StageLoop(run, work.stage, work.assembly, work.programs, base, position, work.measures)
            state, stopped = loop.train(state)
            if stopped:
                return stopped
            self._watch.doing = f"the end of stage {work.stage.name}"
            is_end = number == len(works)
            state = work.close(state)
            position.next_stage(is_end=is_end)
            run.save(state, position)
            if not is_end and (reason := self._stop.reason()):
                return reason
        return None

    def _end(self, run: Run, event: str, position: Position, reason: str) -> None:
        self._folder.add_history(event, position.global_step, reason)
        run.update_report()

    def _position_of(self, facts: dict[str, Any]) -> Position:
        """The position of a checkpoint. A best evaluation whose checkpoint is gone is not the best any more."""
        position = Position.from_dict(facts["position"])
        with self._checkpoints.reported("read"):
            steps = self._checkpoints.steps()
        if position.best_step is not None and position.best_step not in steps:
            gone = f"Step {position.best_step} had the best evaluation, but its checkpoint is missing"
            self._listener(Alarm(f"{gone}: the best of the others is used."))
            position.best_step = position.best_loss = None
        return position

    def _plan(
        self,
        stages: list[StageData],
        config: Any,
        devices: list[Any],
        before: ResolvedRecipe | None,
        is_same_hardware: bool,
        first: int,
        ahead: _Ahead,
    ) -> list[Plan]:
        """Decides every `auto` and compiles every step before training starts. The stage with the longest sequences is
        compiled first, and its settings hold for all stages, because they share the base."""
        plans: dict[int, Plan] = {}
        shared: dict[str, Any] = {}
        left = range(min(first, len(stages) - 1), len(stages))
        for number in sorted(left, key=lambda n: -stages[n].recipe.train.sequence_length):
            stage = stages[number]
            earlier = before.stage(stage.name) if before else None
            kept = dict(shared)
            if earlier is not None:  # a resumed run is the same program
                fixed = {"layers": earlier.settings.layers, "quantize": earlier.settings.quantize}
                kept |= vars(earlier.settings) if is_same_hardware else fixed
            predictor = None if earlier is not None and is_same_hardware else predictor_for(devices)
            meanwhile = functools.partial(ahead.meanwhile, number, memory_limit(devices))
            plans[number] = choose(
                stage.recipe,
                config,
                devices,
                stage.num_steps,
                self._listener,
                kept=kept,
                predictor=predictor,
                compiler=functools.partial(compile_step, meanwhile=meanwhile),
                document_room=stage.document_room,
            )
            shared = shared or plans[number].settings.shared()
        return [plans.get(number, plans[max(plans)]) for number in range(len(stages))]

    def _write_adapter(self, run: Run, position: Position, stage: StageData) -> tuple[Path, str]:
        """Writes the adapter of the best evaluation, or of the last step, in PEFT's format, and reads it back. Returns
        its folder, and why it is not that of the best evaluation."""
        folder = self._folder.path / ADAPTER
        run.confirm_best(position)
        if jax.process_index() != 0:
            return folder, ""
        evaluated = self._evaluated(position, stage)
        chosen = choose_checkpoint(self._checkpoints, evaluated, position.global_step, run.listener)
        kept = {name: chosen.files[name] for name in ADAPTER_FILES}
        check_changes_something(read_adapter(kept[WEIGHTS_FILE]), str(folder))
        kept |= stage.files_with_adapter(self._opened)
        assert self._manifest is not None
        source = AdapterSource(chosen.step, evaluated.get(chosen.step), chosen.why)
        self._folder.write(MANIFEST_FILE, dataclasses.replace(self._manifest, adapter=source).to_json())
        card = adapter_card(kept[CONFIG_FILE], self._folder.path, name=self._folder.path.resolve().name)
        with self._folder.reported(folder):
            files = {CARD_FILE: card.encode(), **with_checksums(chosen.step, kept)}
            LocalStorage(self._folder.path).write(ADAPTER, files)
        check_written(folder, kept)
        best = "" if chosen.step == position.global_step else f": step {chosen.step}, which had the best evaluation"
        run.listener(Note(f"Adapter written to {folder}{f': {chosen.why}' if chosen.why else best}"))
        return folder, chosen.why

    def _evaluated(self, position: Position, stage: StageData) -> dict[int, float]:
        """The losses by step from which the best is chosen; empty if the last weights are the result."""
        if not stage.recipe.evaluate.keep_best or stage.evaluation is None:
            return {}
        first = position.global_step - position.step  # evaluated before the first step of the stage
        losses = evaluation_losses(self._folder.metrics_file, stage.name)
        if position.best_step is not None and position.best_loss is not None:
            losses[position.best_step] = position.best_loss  # also if metrics.jsonl was damaged
        return {step: loss for step, loss in losses.items() if first < step <= position.global_step}


def resolve_recipe(
    recipe: Recipe, stages: Sequence[StageData], plans: Sequence[Plan], before: ResolvedRecipe | None, first: int
) -> ResolvedRecipe:
    """All decisions of the run with their reasons. Decisions of an earlier start keep theirs. Stages before `first` are
    finished and keep their micro-batch size."""
    written = stages_of(recipe)
    num_steps = sum(stage.num_steps for stage in stages)
    every = recipe.evaluate.every_steps
    resolved = []
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True)):
        earlier = before.stage(stage.name) if before else None
        reasons = {**(earlier.reasons if earlier else {}), **plan.reasons}
        date = stage.recipe.data.template_date
        if date is not None and written[number].recipe.data.template_date is None:
            reasons["template_date"] = TEMPLATE_DATE_REASON
        if number == 0 and every == "auto":
            reasons["every_steps"] = f"ten evaluations in {num_steps} steps"
        settings = plan.settings
        if earlier is not None and number < first:
            settings = dataclasses.replace(settings, micro_batch_size=earlier.settings.micro_batch_size)
        resolved.append(ResolvedStage(stage.name, settings, date, reasons))
    return ResolvedRecipe(tuple(resolved), max(1, math.ceil(num_steps / 10)) if every == "auto" else every)


def place_state(assembly: Assembly, seed: int, base: Tree, start: Start | None = None) -> TrainState:
    """The state before the first step, on the devices. `start`: the adapter to begin with."""

    def first_state(adapter: Tree) -> TrainState:
        return initial_state(adapter, assembly.optimizer, seed)

    if start is not None:
        adapter = fit_adapter(start.arrays, assembly.model.adapter_layout, start.where)
    else:
        adapter = assembly.model.initial_adapter(base, seed)
    return jax.jit(first_state, out_shardings=_shardings(assembly))(adapter)


def compile_next(assembly: Assembly, seed: int, stage: int, *, restart: bool) -> Callable[[TrainState], TrainState]:
    """Compiles the program that turns the last state of a stage into the first state of the next."""

    def next_state(state: TrainState) -> TrainState:
        optimizer = assembly.optimizer.init(state.adapter) if restart else state.optimizer
        return next_stage(state.adapter, optimizer, seed, stage)

    jitted = jax.jit(next_state, out_shardings=_shardings(assembly), donate_argnums=0)
    return compile_program(jitted.lower(assembly.state_shapes))


def planned_programs(stages: Sequence[StageData], eval_plans: Sequence[EvalPlan], *, is_new: bool) -> Iterator[Planned]:
    """The programs of these stages, including steps that are already compiled. Programs that only move arrays while
    weights are loaded are not counted."""
    if is_new:
        yield Planned("the state before the first step")
    for stage, eval_plan in zip(stages, eval_plans, strict=True):
        shapes = [(stage.batches.batch_size, length) for length in step_lengths(stage.batches)]
        yield Planned(f"the step of stage {stage.name}", len(shapes), ", ".join(map(shape_text, shapes)))
        yield from eval_plan.programs()
        yield Planned(f"the state at the end of stage {stage.name}")
    yield Planned("the copy of the state for a checkpoint")


def step_lengths(batches: Batches) -> list[int]:
    """Sequence lengths to compile the step for. The longest is always one of them: the settings were tuned with it."""
    return sorted({*batches.lengths, batches.sequence_length})


def compile_lengths(plan: Plan, batches: Batches, listener: Listener) -> dict[Shape, Any]:
    """A compiled step for every sequence length of the batches; the plan has the longest."""
    longest = batches.sequence_length
    if batches.lengths != [longest]:
        names = ", ".join(map(str, batches.lengths))
        listener(Note(f"{len(batches.lengths)} programs, for sequences of {names} tokens"))
    return {
        (batches.batch_size, length): plan.compiled if length == longest else plan.assembly.compile(length)
        for length in step_lengths(batches)
    }


def _shardings(assembly: Assembly) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)
