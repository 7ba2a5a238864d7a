"""One run, in order: model, data, entries, plan, programs, base, loop, results.

    train(load_recipe("recipe.yaml"), Path("runs/first"))

The same call starts a run and resumes it from the newest valid checkpoint. A run is resumed only if model, tokenizer,
chat template, data and recipe are unchanged.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillora.devices.cluster import join_cluster
from trillora.devices.mesh import any_process
from trillora.early.training import check_not_finished, lengths_of_last
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.events import AdaptersStarted, Alarm, Listener, Note, Recorded, ignore_events
from trillora.files.checkpoints import Checkpoints
from trillora.files.owner import lock_run, own_checkpoints, removed_if_unused
from trillora.files.storage import open_storage
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.recipe import run_file
from trillora.recipe.resolve import ResolvedRecipe
from trillora.recipe.schema import Recipe, seconds_of
from trillora.report.event_text import adapted_lines
from trillora.runs.files import (
    ADAPTER,
    CHECKPOINTS,
    EXPORTS,
    MANIFEST_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    RESOLVED_FILE,
    is_finished,
)
from trillora.runs.manifest import RunManifest
from trillora.step.adapted_share import adapted_share
from trillora.step.autotune import Plan
from trillora.step.background import compiling_in_background, wait_for_programs
from trillora.step.compile_guard import describe
from trillora.step.decisions import memory_limit
from trillora.training import manifest
from trillora.training.entries.plan import Choices, Plans, plan_entries, resolve, widest_of
from trillora.training.entries.programs import Ahead, Copy, EntryWork, planned_programs, start_state
from trillora.training.entries.timeline import Entry, timeline_of
from trillora.training.loop import Diverged, Run, train_entries
from trillora.training.results import Results
from trillora.training.run_folder import RunFolder, losses
from trillora.training.run_process import Identity, RunProcess, TrainResult, peak_seconds_per_token
from trillora.training.saved_record import RunIdRecord
from trillora.training.saver import Saver
from trillora.training.signals import Interrupted, Stop
from trillora.training.state.files import (
    CheckpointFacts,
    Kept,
    from_files,
    make_copier,
    read_facts,
    read_kept,
)
from trillora.training.state.position import Position


def train(
    recipe: Recipe, out: Path, *, listener: Listener = ignore_events, accept_changes: bool = False
) -> TrainResult:
    """Trains by the recipe, or resumes the run in `out`. Everything is written to that folder."""
    join_cluster(listener)
    limit = recipe.train.time_limit
    stop = Stop(seconds_of(limit) if limit else None)
    listener = stop.heeding(listener)
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
    check_not_finished(recipe, folder.path)
    with _owned_checkpoints(recipe, folder, is_writer, listener) as checkpoints, compiling_in_background():
        return _Training(recipe, folder, checkpoints, stop, listener, accept_changes).run()


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
        RunIdRecord(folder).check_place(storage)
        with own_checkpoints(storage, folder.path, listener) as owned:
            yield Checkpoints(storage, owned.check if owned else None)


@dataclass(frozen=True)
class Course:
    """What a run does: its entries, how their steps run, and where it begins."""

    devices: list[Any]
    model: OpenModel
    identity: Identity
    entries: list[Entry]
    plans: list[Plans]
    ahead: Ahead
    position: Position
    resolved: ResolvedRecipe
    filled: Recipe  # with every decision

    @property
    def left(self) -> range:
        """The numbers of the entries that are not finished."""
        return range(self.position.entry, len(self.entries))

    @property
    def entry(self) -> Entry:
        """The one that is trained first, or the last one if all are finished."""
        return self.entries[min(self.position.entry, len(self.entries) - 1)]

    @property
    def plan(self) -> Plan:
        """Of this entry."""
        return widest_of(self.plans[min(self.position.entry, len(self.plans) - 1)])


class _Training(RunProcess):
    """One process of a run."""

    def run(self) -> TrainResult:
        devices, model = self._open()
        saved = self._newest()
        course = self._plan(devices, model, read_facts(saved[1]) if saved else None)
        if is_finished(self._folder.path):
            self._set_aside(course)
        of_run = self._write_recipe(course)
        self._describe(course, is_new=saved is None)
        base = course.ahead.base(course.plan.assembly)
        state, kept = self._load(course, base, saved)
        self._start_folder(saved)
        del saved  # as large as the state
        copy = make_copier(course.plan.assembly)
        with self._tracking(course.position.global_step + 1, course.filled) as events, self._saver(events) as saver:
            run = self._run_of(course, base, kept, copy, events, saver)
            works = [course.ahead.work(number, course.plans[number], copy) for number in course.left]
            results = self._results(course, run, works)
            any_process(False, False)  # compiled now: it is a program too
            wait_for_programs()
            return self._to_the_end(run, works, state, results, of_run)

    def _plan(self, devices: list[Any], model: OpenModel, facts: CheckpointFacts | None) -> Course:
        """Decides everything that the recipe leaves open, and compiles the steps."""
        recipe, listener, before = self._recipe, self._listener, facts.resolved if facts else None
        stages, identity = self._read_stages(model, before)
        entries = timeline_of(recipe, stages)
        if facts is None:
            position = Position.start(entries[0].names, math.log(model.config.get_text_config().vocab_size))
        else:
            position = facts.position
            is_longer = position.entry == len(entries) and position.step < entries[-1].num_steps
            self._check_unchanged(facts, identity(), lengths_of_last(recipe) if is_longer else ())
            if is_longer:
                position.reopen()
        ahead = Ahead(entries, model, memory_limit(devices), position.entry, facts is None, listener)
        is_same_hardware = facts is not None and facts.devices == manifest.describe_devices(devices)
        choices = Choices(model.config, devices, before, is_same_hardware, listener, ahead.meanwhile)
        plans = plan_entries(entries, choices, position.entry)
        resolved = resolve(recipe, entries, plans, before, position.entry)
        return Course(devices, model, identity, entries, plans, ahead, position, resolved, resolved.fill(recipe))

    def _set_aside(self, course: Course) -> None:
        """A finished run that is trained longer is not finished: its adapter moves to RUN/exports, under a name that no
        adapter of a checkpoint has."""
        step, folder = course.position.step, self._folder.path
        if not course.left:
            what, do = "This run already has all steps that the recipe asks for.", "raise train.steps or train.epochs"
            raise TrilloraError(what, where=str(folder), do=do)
        kept = folder / EXPORTS / f"finished-step-{course.position.global_step}"
        if jax.process_index() == 0:
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(exist_ok=True)
            (folder / ADAPTER).rename(kept)
        self._listener(Note(f"This run is finished and is trained longer; its adapter so far is in {kept}"))
        train = course.entry.members[0].recipe.train
        if train.schedule != "constant":
            what = f"The first {step} steps followed train.schedule: {train.schedule} for {step} steps."
            more = f"It continues at step {step + 1} of {course.entry.num_steps}, so the learning rate jumps."
            self._listener(Alarm(f"{what} {more}"))

    def _write_recipe(self, course: Course) -> RunManifest:
        """Writes the recipe with all decisions, and the manifest."""
        self._folder.write(RESOLVED_FILE, course.resolved.dump(self._recipe))
        self._folder.write(RECIPE_FILE, run_file.dump(course.filled), mode=run_file.MODE)
        of_run = manifest.of_run(course.filled, course.entries, course.plan.assembly, course.identity(), course.model)
        self._folder.write(MANIFEST_FILE, of_run.to_json())
        return of_run

    def _describe(self, course: Course, *, is_new: bool) -> None:
        """Prints which programs are compiled, what share of the model is adapted, and what stays frozen."""
        if course.left:
            entries, plans = course.entries[course.left.start :], course.plans[course.left.start :]
            evaluations = [
                course.ahead.eval_plans(number, widest_of(course.plans[number]).assembly) for number in course.left
            ]
            self._listener(Note(describe(planned_programs(entries, plans, evaluations, is_new=is_new))))
        stages = [stage for entry in course.entries for stage in entry.members]
        if any(stage.recipe.train.rows != "answers" and stage.recipe.lora.dropout for stage in stages):
            self._listener(Note("lora.dropout is off where answers are compared: chance would look like a preference"))
        for line in adapted_lines(adapted_share(course.plan.assembly.model)):
            self._listener(Note(line))

    def _load(self, course: Course, base: Tree, saved: tuple[int, dict[str, bytes]] | None) -> tuple[TrainState, Kept]:
        """The state to begin with, on the devices, and what the adapters leave so far."""
        assembly, position = course.plan.assembly, course.position
        if saved is None:
            return start_state(course.entries[0], assembly, base, self._start), {}
        where, entry = self._checkpoints.where(saved[0]), course.entry
        before = [member.name for member in position.members]
        if before != entry.names and not (entry.is_single and len(before) == 1):
            raise TrilloraError(
                f"The checkpoint is of other adapters: {', '.join(before)}.",
                where=where,
                do="use the phases, sweep or learning rate of the original run, or a new --out",
            )
        state = from_files(saved[1], assembly, position, where)
        kept = read_kept(saved[1], assembly, position, where)
        for member, name in zip(position.members, entry.names, strict=True):
            member.name = name  # a stage may have another name now
        return state, {name: kept[old] for old, name in zip(before, entry.names, strict=True) if old in kept}

    def _run_of(self, course: Course, base: Tree, kept: Kept, copy: Copy, events: Listener, saver: Saver) -> Run:
        facts = manifest.of_checkpoint(course.filled, course.resolved, course.identity(), course.devices)
        return Run(
            folder=self._folder,
            listener=events,
            stop=self._stop,
            checkpoints=self._checkpoints,
            saver=saver,
            keep_checkpoints=self._recipe.train.keep_checkpoints,
            copy=copy,
            facts={**facts, "run": self._record.run_id},
            base_name=course.model.base_name,
            num_steps=sum(entry.num_steps for entry in course.entries),
            evaluate_every=course.resolved.evaluate_every,
            watch=self._watch,
            watchdog=self._watchdog,
            peak_seconds_per_token=peak_seconds_per_token(course.plan.assembly.model.layout, course.devices),
            base=base,
            position=course.position,
            kept=kept,
        )

    def _results(self, course: Course, run: Run, works: Sequence[EntryWork]) -> Results:
        entry, plans = course.entries[-1], course.plans[-1]
        measures = works[-1].measures if works else ()
        if not works and not entry.is_single:  # its adapters are scored with the program that evaluated them
            measures = course.ahead.work(len(course.entries) - 1, plans, run.copy).measures
        plan = widest_of(plans)
        return Results(self._recipe, entry, run, plan.assembly, plan.settings, measures, course.model)

    def _to_the_end(
        self, run: Run, works: Sequence[EntryWork], state: TrainState, results: Results, of_run: RunManifest
    ) -> TrainResult:
        """Trains the remaining entries. Leaves the run's adapters, or a checkpoint if the run was stopped."""
        position, adapter = run.position, None
        if results.entry.kind != "stage":
            names = [position.members[number].name for number in position.running]
            run.listener(AdaptersStarted(results.entry.kind, tuple(names)))
        if position.global_step:
            run.listener(Note(f"Resuming from step {position.global_step} of {run.num_steps}"))
        try:
            with self._watch.watching(), self._watchdog.guarding():
                stopped = train_entries(run, works, state)
            run.saver.wait()
            self._check_saved(run.saver)
            if not stopped:
                adapter = results.write(of_run)
        except Diverged as error:
            self._record_last()
            self._end(run, "diverged", error.what)
            raise
        if stopped:
            run.listener(Note(f"Stopped at step {position.global_step} of {run.num_steps} by {stopped}; saved"))
        self._end(run, "stopped" if stopped else "finished", stopped or "")
        done = tuple(losses(self._folder.metrics_file))
        return TrainResult(self._folder.path, adapter, done, sum(work.num_compiles for work in works), stopped)

    def _end(self, run: Run, event: str, reason: str) -> None:
        self._folder.add_history(event, run.position.global_step, reason)
        run.listener(Recorded(run.position.global_step))
