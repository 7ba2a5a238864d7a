"""The programs of an entry, and the state that it starts with.

`Ahead` compiles the programs and loads the base while the compiler works on a step; `Work` is what the loop gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.data.batches import Batches
from trillora.engine.group import group_state
from trillora.engine.step import TrainState, initial_state, next_stage
from trillora.events import Listener, Note
from trillora.model.adapters import fit_adapter
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.model.loading.weights import load_weights
from trillora.step.adapter_spec import Start
from trillora.step.autotune import Plan
from trillora.step.background import compile_program
from trillora.step.build import Assembly
from trillora.step.compile_guard import Planned, Programs, Shape, shape_text
from trillora.step.decisions import SMALL_BASE, local_bytes
from trillora.step.group import GroupAssembly, Member, options_of, padded, padding_of, without_padding
from trillora.training.entries.plan import Plans, widest_of
from trillora.training.entries.references import References, planned
from trillora.training.entries.stepper import MappedStepper, SingleStepper, Stepper
from trillora.training.entries.timeline import Entry
from trillora.training.validation import EvalPlan, Evaluator, Measures, Sampler, make_measures, plan_evaluation

Copy = Callable[[TrainState], TrainState]


@dataclass(frozen=True)
class EntryWork:
    """An entry and its compiled programs."""

    entry: Entry
    stepper: Stepper
    measures: tuple[Measures, ...]  # of each adapter
    close: Callable[[TrainState], TrainState]  # the last state of the entry -> the first of the next
    references: References | None  # if the batches need what the reference thinks of them
    num_compiles: int  # of the step, including candidates that did not fit


class Ahead:
    """Compiles the remaining programs and loads the base while the compiler works on a step."""

    def __init__(
        self, entries: list[Entry], opened: OpenModel, limit: float | None, first: int, is_new: bool, listener: Listener
    ) -> None:
        """`limit`: bytes of memory per device. `first`: entries before it are finished."""
        self._entries, self._opened, self._limit, self._listener = entries, opened, limit, listener
        self._first, self._is_new = first, is_new
        self._eval_plans: dict[tuple[int, int], list[EvalPlan]] = {}
        self._programs: dict[int, tuple[Assembly, tuple[Measures, ...], Callable[[TrainState], TrainState]]] = {}
        self._base: tuple[Tree, Tree] | None = None  # its shapes and arrays

    def meanwhile(self, number: int, assembly: Assembly) -> None:
        """Called while the step of a stage is compiled. It may turn out too large: then the next candidate does not
        begin again with its own programs."""
        if number >= self._first and number not in self._programs:
            self._start_programs(number, assembly)
        # With several stages, the memory that is free decides for the later ones too: the base is read after them. A
        # large base is in the way of a compiler that tries kernels on the device.
        is_small = self._limit is None or local_bytes(assembly.base_shapes) <= SMALL_BASE * self._limit
        if len(self._entries) == 1 and is_small:
            self.base(assembly)

    def eval_plans(self, number: int, assembly: Assembly) -> list[EvalPlan]:
        """Of each adapter of an entry. A sweep compares numbers: it shows no answers."""
        key, entry = (number, assembly.micro_batch_size), self._entries[number]
        if key not in self._eval_plans:
            answers = entry.kind in ("stage", "phases")
            self._eval_plans[key] = [
                plan_evaluation(one, key[1], self._opened, self._listener, answers=answers) for one in entry.members
            ]
        return self._eval_plans[key]

    def base(self, assembly: Assembly) -> Tree:
        if self._base is None or self._base[0] != assembly.base_shapes:
            self._base = None  # free the old base before loading the new one
            self._base = assembly.base_shapes, read_base(self._opened.folder, assembly, self._listener)
        return self._base[1]

    def work(self, number: int, plans: Plans, copy: Copy) -> EntryWork:
        """The entry with all its programs."""
        entry, plan = self._entries[number], widest_of(plans)
        if number not in self._programs or self._programs[number][0] is not plan.assembly:
            self._start_programs(number, plan.assembly)
        _, measures, close = self._programs[number]
        stage = entry.members[0]
        references = References(stage, plan.assembly) if stage.recipe.train.precompute_ref_log_probs else None
        num_compiles = sum(one.num_compiles for one in plans.values())
        stepper: Stepper
        if isinstance(plan.assembly, GroupAssembly):
            options = options_of(entry.members, [one.num_steps for one in entry.members])
            placed = jax.device_put(options, _shardings(plan.assembly.option_shapes))
            compiled = {width: one.compiled for width, one in plans.items()}
            stepper = MappedStepper(entry, plan.assembly, compiled, placed)
        else:
            steps = compile_lengths(plan, entry.members[0].batches, self._listener)
            num_compiles += len(steps) - 1
            stepper = SingleStepper(entry, plan.assembly, Programs(f"The step of {entry.name}", steps), copy)
        return EntryWork(entry, stepper, measures, close, references, num_compiles)

    def _start_programs(self, number: int, assembly: Assembly) -> None:
        """The programs of an entry, except its steps. A resumed run may not need those that answer prompts."""
        entry, plans = self._entries[number], self.eval_plans(number, assembly)
        if not entry.is_single:
            self._programs[number] = assembly, shared_measures(entry, plans, assembly), _unchanged
            return
        [stage], follows = entry.members, self._entries[number + 1 : number + 2]
        measures = make_measures(plans[0], assembly, self._listener, at_once=self._is_new)
        close: Callable[[TrainState], TrainState] = _unchanged  # the last state: the run may be trained longer
        if follows:
            restarts = follows[0].members[0].restarts_optimizer
            close = compile_next(assembly, stage.recipe.train.seed, number + 1, restart=restarts)
        self._programs[number] = assembly, (measures,), close


def shared_measures(entry: Entry, plans: Sequence[EvalPlan], assembly: Assembly) -> tuple[Measures, ...]:
    """What evaluates each adapter. All evaluations have one shape, so they share one program."""
    found = []
    evaluator: Evaluator | None = None
    by_rows: dict[int, Evaluator] = {}
    for one, plan in zip(entry.members, plans, strict=True):
        own = None
        if plan.batches is not None:
            own = by_rows.get(id(one.evaluation))
            if own is None:
                own = evaluator = Evaluator(assembly, plan.batches, one.name, like=evaluator)
                by_rows[id(one.evaluation)] = own
        sampler = None
        if plan.prompts is not None and plan.questions:
            sampler = Sampler(assembly, plan.prompts, plan.max_tokens)
        found.append(Measures(own, sampler, plan.questions))
    return tuple(found)


def planned_programs(
    entries: Sequence[Entry], plans: Sequence[Plans], eval_plans: Sequence[Sequence[EvalPlan]], *, is_new: bool
) -> Iterator[Planned]:
    """The programs of these entries, including steps that are already compiled. Programs that only move arrays while
    weights are loaded are not counted."""
    if is_new:
        yield Planned("the state before the first step")
    for entry, own, evaluations in zip(entries, plans, eval_plans, strict=True):
        if entry.is_single:
            yield from _planned_single(entry, widest_of(own), evaluations[0])
        else:
            yield from _planned_together(own, evaluations)
        if entry is not entries[-1]:
            yield Planned(f"the state at the end of {entry.name}")
    yield Planned("the copy of the state for a checkpoint")


def _planned_single(entry: Entry, plan: Plan, evaluation: EvalPlan) -> Iterator[Planned]:
    [stage], batches = entry.members, entry.members[0].batches
    shapes = [(batches.batch_size, length) for length in step_lengths(batches)]
    yield Planned(f"the step of {entry.name}", len(shapes), ", ".join(map(shape_text, shapes)))
    if stage.recipe.train.precompute_ref_log_probs:
        yield planned(stage, plan.assembly.micro_batch_size)
    yield from evaluation.programs()


def _planned_together(plans: Plans, evaluations: Sequence[EvalPlan]) -> Iterator[Planned]:
    yield Planned("the step", len(plans), f"{', '.join(map(str, plans))} adapters at once")
    if any(evaluation.batches is not None for evaluation in evaluations):
        yield Planned("the evaluation")
    for evaluation in evaluations:
        yield from (part for part in evaluation.programs() if part.what.startswith("the answers"))
    yield Planned("one adapter of the group")


def read_base(folder: Path, assembly: Assembly, listener: Listener) -> Tree:
    model = assembly.model
    return load_weights(folder, model.module, model.layout, assembly.base_shardings, listener)


def start_state(entry: Entry, assembly: Assembly, base: Tree, start: Start | None) -> TrainState:
    """The state before the first step. `start`: the adapter to begin with."""
    if isinstance(assembly, GroupAssembly):
        return place_group(assembly, entry.members, base, start)
    return place_state(assembly, entry.members[0].recipe.train.seed, base, start)


def place_state(assembly: Assembly, seed: int, base: Tree, start: Start | None = None) -> TrainState:
    """The first state of one adapter, on the devices."""

    def first_state(adapter: Tree) -> TrainState:
        keeps_reference = assembly.state_shapes.reference is not None
        return initial_state(adapter, assembly.optimizer, seed, keeps_reference=keeps_reference)

    if start is not None:
        adapter = fit_adapter(start.arrays, assembly.model.adapter_layout, start.where)
    else:
        adapter = assembly.model.initial_adapter(base, seed)
    return jax.jit(first_state, out_shardings=_shardings(assembly.state_shapes))(adapter)


def place_group(
    assembly: GroupAssembly, members: Sequence[Member], base: Tree, start: Start | None = None
) -> TrainState:
    """The first state of several adapters, on the devices: each starts as it would alone."""
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
    keeps_reference = assembly.state_shapes.reference is not None
    state = functools.partial(group_state, optimizer=assembly.optimizer, keeps_reference=keeps_reference)
    return jax.jit(lambda a, k: state(a, keys_N=k), out_shardings=_shardings(assembly.state_shapes))(stacked, keys)


def compile_next(assembly: Assembly, seed: int, stage: int, *, restart: bool) -> Callable[[TrainState], TrainState]:
    """Compiles the program that turns the last state of a stage into the first state of the next."""

    def next_state(state: TrainState) -> TrainState:
        optimizer = assembly.optimizer.init(state.adapter) if restart else state.optimizer
        keeps_reference = state.reference is not None
        return next_stage(state.adapter, optimizer, seed, stage, keeps_reference=keeps_reference)

    jitted = jax.jit(next_state, out_shardings=_shardings(assembly.state_shapes), donate_argnums=0)
    return compile_program(jitted.lower(assembly.state_shapes))


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


def _unchanged(state: TrainState) -> TrainState:
    return state


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)
