"""The training loop of a group: all running adapters take each step together.

It is the loop of one adapter (`training.loop`) with several positions. An adapter that ends leaves the group; the
others continue in a program for fewer adapters. What decides when one ends depends only on numbers that a checkpoint
stores, so a resumed run ends exactly like an uninterrupted one.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import Mesh

from trillora.data.batches import Arrays
from trillora.data.stage import StageData
from trillora.devices.mesh import any_process, group_sharding, replicated
from trillora.engine.group import AdapterOptions, Lanes
from trillora.engine.step import WHY_SKIPPED, StepMetrics, TrainState
from trillora.evaluation.token_metrics import TokenMetrics
from trillora.events import AdapterEnded, AdapterStep, Alarm, Evaluated, Listener, Sampled, Skipped, Step
from trillora.files.checkpoints import Checkpoints
from trillora.model.layout import Tree, unstack
from trillora.recipe.resolve import StepSettings
from trillora.report.run.write import write_report
from trillora.runs.files import METRICS_FILE
from trillora.step.compile_guard import CompileWatch
from trillora.step.group import GroupAssembly, cut
from trillora.step.group_plan import Selection
from trillora.training.group.position import GroupPosition, MemberPosition, Status
from trillora.training.group.rates import best, score
from trillora.training.group.state_files import Kept, to_files
from trillora.training.loop import NUM_AHEAD, Abandoned, check_signal, save_is_due, step_and_save_seconds
from trillora.training.run_folder import RunFolder
from trillora.training.saver import Saver
from trillora.training.signals import Stop
from trillora.training.stalls.watchdog import Watchdog
from trillora.training.validation import Measures, peak_memory_gib

ALL = "all"  # the stage of `Step` events, which are means over the adapters


@dataclass(frozen=True)
class Member:
    """One adapter of the group."""

    stage: StageData
    measures: Measures
    padding: int  # of its rank, up to the largest one

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def num_steps(self) -> int:
        return self.stage.num_steps


@dataclass(frozen=True)
class GroupRun:
    """What the loop works with."""

    folder: RunFolder
    listener: Listener
    stop: Stop
    checkpoints: Checkpoints
    saver: Saver
    keep_checkpoints: int
    checkpoint_every: int | str
    evaluate_every: int  # steps
    assembly: GroupAssembly
    settings: StepSettings  # of the widest step
    programs: Mapping[int, Any]  # number of adapters -> compiled step
    lane: Any  # compiled: (adapters, options, number) -> adapter
    copy: Callable[[TrainState, Any], TrainState]
    facts: dict[str, Any]  # stored in every checkpoint
    members: tuple[Member, ...]
    options: AdapterOptions  # on the devices
    selections: tuple[Selection, ...]  # where learning rates are dropped
    watch: CompileWatch
    watchdog: Watchdog
    peak_seconds_per_token: float

    @property
    def num_steps(self) -> int:
        return max(member.num_steps for member in self.members)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def adapter(self, state: TrainState, number: int) -> tuple[Tree, Tree]:
        """One adapter on the devices: as the model's layers need it, with its own scale; and as it is stored."""
        found: tuple[Tree, Tree] = self.lane(state.adapter, self.options, self.put(np.int32(number)))
        return found

    def put(self, value: Any) -> Any:
        return jax.device_put(value, replicated(self.assembly.mesh))

    def update_report(self) -> None:
        if jax.process_index() == 0:
            try:
                write_report(self.folder.path)
            except Exception as error:  # a broken report must not stop training
                self.listener(Alarm(f"The report could not be written: {error!r}"))


class GroupLoop:
    """Trains all adapters of a group to their end."""

    def __init__(self, run: GroupRun, base: Tree, position: GroupPosition, kept: Kept) -> None:
        self._run, self._base, self._position, self._kept = run, base, position, kept
        self._pending: tuple[int, list[tuple[list[int], StepMetrics]]] | None = None
        self._started = self._last_report = self._last_save = time.perf_counter()
        self._step_seconds = 0.0
        self._num_done = 0  # steps of this process

    def train(self, state: TrainState) -> tuple[TrainState, str | None]:
        """Train to the end of all adapters or to an external stop; return the state and the reason for the stop."""
        position, run = self._position, self._run
        if self._needs_attention() and not self._settle(state):
            return state, run.stop.reason()
        run.stop.begin_training()
        self._started = self._last_report = time.perf_counter()
        num_slots = self._num_slots(len(position.running))
        run.watchdog.begin_stage(position.step, num_slots, num_slots * run.peak_seconds_per_token)
        while running := position.running:
            calls = plan_calls(position.lanes, len(run.members), list(run.programs))
            for placed in placed_calls(run.members, calls, running, self._steps(), run.assembly.mesh):
                run.watch.doing = f"step {position.step + 1}"
                state = self._step(state, calls, placed)
                stopped, save = any_process(self._stop_is_due(), self._save_is_due())
                attention = self._needs_attention()
                if stopped or save or attention:
                    self._report()  # waits for the step
                    if attention and not self._settle(state):
                        stopped = True  # the resumed run starts with this evaluation
                    if (save or stopped) and position.running:
                        self._save(state)
                    if stopped and position.running:
                        return state, run.stop.reason(self._next_seconds()) or "another process of the run"
                if position.running != running:
                    break  # fewer adapters continue
        self._save(state)
        return state, None

    def _settle(self, state: TrainState) -> bool:
        """Evaluate, and let adapters end. False if a signal arrived."""
        if not self._measure(state):
            return False
        self._end_members(state)
        self._position.lanes = self._position.running
        return True

    def _steps(self) -> range:
        """The steps until the first of the running adapters ends or rates are dropped, if nothing happens earlier."""
        position, run = self._position, self._run
        ends = [run.members[number].num_steps for number in position.running]
        ends += [selection.step for selection in run.selections if selection.step > position.step]
        return range(position.step, min(ends))

    def _step(self, state: TrainState, calls: Sequence[Call], placed: Sequence[Any]) -> TrainState:
        results = []
        for call, (lanes, batch) in zip(calls, placed, strict=True):
            program = self._run.programs[call.width]
            state, metrics = program(state, self._base, self._run.options, lanes, batch)
            results.append((call.members, metrics))
        self._report()
        position = self._position
        self._pending = (position.step, results)
        position.step += 1
        for number in position.running:
            position.members[number].step = position.step
        self._num_done += 1
        return state

    def _needs_attention(self) -> bool:
        """Whether an evaluation, a selection or the end of an adapter is due."""
        position = self._position
        is_selection = any(selection.step == position.step for selection in self._run.selections)
        is_end = any(position.step == self._run.members[n].num_steps for n in position.running)
        return is_selection or is_end or bool(self._due())

    # ---- metrics

    def _report(self) -> None:
        """Read the metrics of the latest step and send them to the listener."""
        if self._pending is None:
            return
        (number, results), self._pending = self._pending, None
        position = self._position
        read: dict[int, dict[str, Any]] = {}
        for members, metrics in results:
            values = jax.device_get(metrics)._asdict()
            read |= {member: {name: v[i].item() for name, v in values.items()} for i, member in enumerate(members)}
        now = time.perf_counter()
        self._step_seconds, self._last_report = now - self._last_report, now
        self._run.watchdog.step_ended(number + 1, self._num_slots(len(read)))
        # An adapter that diverged at the step before may have taken one more, which does not count.
        read = {member: values for member, values in sorted(read.items()) if position.members[member].is_running}
        for member, values in read.items():
            self._report_adapter(member, number, values)
        self._report_mean(number, read, now)

    def _report_adapter(self, member: int, number: int, values: dict[str, Any]) -> None:
        run, own, stage = self._run, self._position.members[member], self._run.members[member].stage
        skipped, step = bool(values["skipped"]), number + 1
        run.listener(
            AdapterStep(
                step=step,
                adapter=stage.name,
                loss=values["loss"],
                learning_rate=values["learning_rate"],
                grad_norm=values["grad_norm"],
                skipped=skipped,
                num_tokens=round(values["num_tokens"]),
            )
        )
        if skipped:
            run.listener(Skipped(step, stage.name, WHY_SKIPPED[values["skipped"]], tuple(stage.places_of(number))))
        if run.selections and step <= run.selections[-1].step:
            own.trial.append(values["loss"])
        own.health.observe(step, values["loss"], values["grad_norm"], skipped)
        if own.health.num_bad >= stage.recipe.train.max_bad_steps:
            reasons = ", ".join(f"{count} {reason}" for reason, count in own.health.bad.items())
            first = own.health.first_bad
            own.step = step
            self._end(member, "diverged", f"from step {first} on, {own.health.num_bad} steps were bad ({reasons})")

    def _num_slots(self, num_adapters: int) -> int:
        """Token positions in the batches of a step of this many adapters."""
        batches = self._run.members[0].stage.batches
        return num_adapters * batches.batch_size * batches.sequence_length

    def _report_mean(self, number: int, read: dict[int, dict[str, Any]], now: float) -> None:
        run = self._run
        if not read:
            return
        rate = self._num_slots(len(read)) / self._step_seconds
        seconds = now - self._started
        left = seconds / max(self._num_done, 1) * (run.num_steps - number - 1)
        run.listener(
            Step(
                step=number + 1,
                num_steps=run.num_steps,
                stage=ALL,
                loss=_mean([values["loss"] for values in read.values()]),
                learning_rate=max(values["learning_rate"] for values in read.values()),
                grad_norm=_mean([values["grad_norm"] for values in read.values()]),
                skipped=any(values["skipped"] for values in read.values()),
                tokens_per_second=round(rate, 1),
                seconds=round(seconds, 3),
                seconds_left=round(left, 3),
                padding=_mean([run.members[member].stage.padding_of(number) for member in read]),
                memory_gib=peak_memory_gib(run.assembly.mesh, lambda: psutil.Process().memory_info().rss),
                peak_fraction=rate * run.peak_seconds_per_token or None,
                num_tokens=round(sum(values["num_tokens"] for values in read.values())),
            )
        )

    # ---- evaluation

    def _due(self) -> list[int]:
        """The adapters that have to be evaluated at this step."""
        return [number for number in self._position.running if self._is_due(number)]

    def _is_due(self, number: int) -> bool:
        member, own = self._run.members[number], self._position.members[number]
        if own.measured_at == own.step or not member.measures:
            return False
        is_selection = self._run.selections and own.step < self._run.selections[-1].step
        if is_selection and own.step > 0:
            return False  # many rates are compared by their training losses
        return own.step in (0, member.num_steps) or own.step % self._run.evaluate_every == 0

    def _measure(self, state: TrainState) -> bool:
        """Evaluate the adapters that are due. False if a signal arrived: the resumed run repeats it."""
        due = self._due()
        if not due:
            return True
        self._run.watch.doing = f"the evaluation after step {self._position.step}"
        found = []
        known: dict[int, TokenMetrics] = {}  # of the base model, by evaluation set
        try:
            for number in due:
                found.append((number, *self._measured(state, number, known)))
        except Abandoned:
            return False
        for number, metrics, samples, stored in found:
            self._judge(number, metrics, stored)
            name = self._run.members[number].name
            if samples:
                self._run.listener(Sampled(self._position.step, name, samples))
            self._position.members[number].measured_at = self._position.step
        self._run.update_report()
        self._last_report = time.perf_counter()  # evaluation time is not part of the next step's time
        self._run.watchdog.restart()
        return True

    def _measured(self, state: TrainState, number: int, known: dict[int, TokenMetrics]) -> tuple[Any, Any, Tree]:
        """Metrics and answers of one adapter. Before the first step, all that have the same rows have the same."""
        measures, (adapter, stored) = self._run.members[number].measures, self._run.adapter(state, number)
        evaluator, sampler = measures.evaluator, measures.sampler
        self._check_signal()
        metrics = None
        if evaluator is not None:
            rows = id(evaluator.batches)
            is_first = self._position.step == 0
            metrics = known.get(rows) if is_first else None
            metrics = metrics or evaluator.measure(adapter, self._base, self._check_signal)
            known[rows] = metrics
        samples: Any = ()
        if sampler is not None:
            with contextlib.nullcontext() if sampler.has_answered else self._run.watch.allowing():
                samples = sampler.answer(measures.questions, adapter, self._base)
        return metrics, samples, stored

    def _judge(self, number: int, metrics: TokenMetrics | None, stored: Tree) -> None:
        """Report the metrics, keep the adapter if it is its best, and end it if it no longer improves."""
        run, own, member = self._run, self._position.members[number], self._run.members[number]
        if metrics is None:
            return
        improved = own.step > 0 and metrics.loss < (math.inf if own.best_loss is None else own.best_loss)
        if improved:
            own.best_loss, own.best_step, own.num_worse = metrics.loss, own.step, 0
            self._keep(number, stored)
        elif own.step > 0:
            own.num_worse += 1
        run.listener(Evaluated(own.step, member.name, **asdict(metrics), is_best=improved))
        patience = member.stage.recipe.evaluate.patience
        if patience is not None and own.num_worse >= patience:
            self._keep_last(number, stored)
            self._end(number, "stopped early", f"no better loss in {patience} evaluations")

    def _keep(self, number: int, stored: Tree) -> None:
        """Copy an adapter to the host: it is what this one leaves if nothing better comes."""
        member = self._run.members[number]
        flat = unstack(jax.tree.map(np.asarray, stored), self._run.assembly.model.adapter_layout)
        self._kept[member.name] = {name: cut(name, array, member.padding) for name, array in flat.items()}

    def _keep_last(self, number: int, stored: Tree) -> None:
        own, evaluate = self._position.members[number], self._run.members[number].stage.recipe.evaluate
        if own.best_step is None or not evaluate.keep_best:
            self._keep(number, stored)

    # ---- the end of adapters

    def _end_members(self, state: TrainState) -> None:
        """End the adapters that have made their last step, and those whose learning rate is worse."""
        position, run = self._position, self._run
        for selection in run.selections:
            if selection.step == position.step and len(position.running) > selection.keep:
                self._select(selection)
        for number in position.running:
            if position.step == run.members[number].num_steps:
                self._keep_last(number, run.adapter(state, number)[1])
                self._end(number, "finished", "")

    def _select(self, selection: Selection) -> None:
        position, running = self._position, self._position.running
        scores = [score(position.members[number].trial) for number in running]
        going_on = {running[place] for place in best(scores, selection.keep)}
        for number, loss in zip(running, scores, strict=True):
            if number in going_on:
                position.members[number].trial = []
            else:
                self._end(number, "dropped", f"training loss {loss:.4f}, worse than that of other learning rates")

    def _end(self, number: int, status: Status, reason: str) -> None:
        own: MemberPosition = self._position.members[number]
        own.end(status, reason)
        name = self._run.members[number].name
        if status in ("dropped", "diverged"):
            self._kept.pop(name, None)
        assert status != "running"
        self._run.listener(AdapterEnded(own.step, name, status, reason))

    # ---- stopping and saving

    def _check_signal(self) -> None:
        check_signal(self._run.stop)

    def _stop_is_due(self) -> bool:
        return self._run.stop.reason(self._next_seconds()) is not None

    def _next_seconds(self) -> float:
        return step_and_save_seconds(self._step_seconds, self._run.saver)

    def _save_is_due(self) -> bool:
        return save_is_due(self._run.checkpoint_every, self._position.step, self._run.saver, self._last_save)

    def _save(self, state: TrainState) -> None:
        """Copy the state, and write the copy in the background."""
        run, position = self._run, self._position
        is_running = np.array([member.is_running for member in position.members])
        copied = run.copy(state, run.put(is_running))
        facts = {**run.facts, "position": position.to_dict(), "names": run.names}
        kept = dict(self._kept)
        if jax.process_index() == 0:
            metrics = run.folder.metrics_so_far()
            run.saver.submit(
                position.step,
                lambda: {**to_files(copied, kept, facts), METRICS_FILE: metrics()},
                lambda: run.checkpoints.prune(run.keep_checkpoints),
            )
        self._last_save = time.perf_counter()
        run.watchdog.restart()


@dataclass(frozen=True)
class Call:
    """One call of the step: the adapters it trains, and others that only fill the program's width."""

    members: list[int]
    fill: list[int]

    @property
    def width(self) -> int:
        return len(self.members) + len(self.fill)


def plan_calls(lanes: Sequence[int], num_members: int, widths: Sequence[int]) -> list[Call]:
    """Spreads adapters over calls of the widest program, and the rest over the narrowest one that holds it.

    >>> plan_calls([0, 1, 2, 4, 5], 6, [4, 2])
    [Call(members=[0, 1, 2, 4], fill=[]), Call(members=[5], fill=[0])]
    """
    widest = max(widths)
    calls = []
    for first in range(0, len(lanes), widest):
        members = list(lanes[first : first + widest])
        width = min(width for width in widths if width >= len(members))
        others = [number for number in range(num_members) if number not in members]
        calls.append(Call(members, others[: width - len(members)]))
    return calls


def placed_calls(
    members: Sequence[Member], calls: Sequence[Call], running: Sequence[int], steps: range, mesh: Mesh
) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """The arguments of the calls of each step, on the devices. A thread builds the next ones during the current step.
    Only the `running` adapters change."""
    everywhere, split = replicated(mesh), group_sharding(mesh)
    lanes = [
        jax.device_put(
            Lanes(
                np.array([*call.members, *call.fill], np.int32),
                np.array([number in running for number in call.members] + [False] * len(call.fill)),
            ),
            everywhere,
        )
        for call in calls
    ]

    def rows(call: Call, step: int) -> Arrays:
        batches = [members[number].stage.batches.batch(step) for number in call.members]
        empty = {name: np.zeros_like(array) for name, array in batches[0].items()}
        batches += [empty] * len(call.fill)
        return {name: np.stack([batch[name] for batch in batches]) for name in empty}

    def make(step: int) -> list[tuple[Any, dict[str, Any]]]:
        placed = []
        for own, call in zip(lanes, calls, strict=True):
            batch = rows(call, step)
            put = {
                name: jax.make_array_from_callback(array.shape, split, array.__getitem__)
                for name, array in batch.items()
            }
            placed.append((own, put))
        return placed

    with ThreadPoolExecutor(1) as ahead:
        waiting: collections.deque[Future[Any]] = collections.deque()
        for step in steps:
            waiting.append(ahead.submit(make, step))
            if len(waiting) > NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
