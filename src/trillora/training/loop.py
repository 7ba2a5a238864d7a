"""The training loop: train, evaluate, save, let adapters end, and decide when to stop.

All adapters of an entry take every step together. One that ends leaves the step; what decides when depends only on
numbers that a checkpoint stores. The device rarely waits for the host: the metrics of a step are read while the next
step runs, batches are built ahead, and checkpoints are copied on the device and written in the background. All state
that influences the numbers is in `TrainState` and `Position`, so a run resumed from any checkpoint ends exactly like an
uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import psutil

from trillora.devices.mesh import any_process
from trillora.engine.step import WHY_SKIPPED, TrainState
from trillora.errors import TrilloraError
from trillora.evaluation.token_metrics import TokenMetrics
from trillora.events import (
    SWAPPED,
    AdapterEnded,
    AdapterStep,
    Alarm,
    Evaluated,
    Listener,
    Note,
    Preferences,
    Recorded,
    Sample,
    Sampled,
    Skipped,
    Step,
)
from trillora.files.checkpoints import Checkpoints
from trillora.files.digests import json_digest
from trillora.files.storage import LocalStorage
from trillora.model.layout import Tree
from trillora.runs.files import METRICS_FILE, REFERENCES
from trillora.step.build import Assembly
from trillora.step.compile_guard import CompileWatch
from trillora.step.group_plan import Selection, best, score
from trillora.training.entries.programs import EntryWork
from trillora.training.entries.references import digest_of
from trillora.training.entries.stepper import Results, read
from trillora.training.run_folder import RunFolder
from trillora.training.saver import Saver
from trillora.training.signals import Stop
from trillora.training.stalls.watchdog import Watchdog
from trillora.training.state.files import Kept, to_files
from trillora.training.state.position import Position, Status
from trillora.training.validation import peak_memory_gib

ALL = "all"  # the stage of `Step` events that are means over several adapters
SAVE_SHARE = 0.02  # fraction of the time that may be spent on saving checkpoints
SAVE_SECONDS = (30.0, 600.0)  # minimum and maximum time between two checkpoints


class Diverged(TrilloraError):
    """Training diverged; the last good checkpoint is kept."""

    exit_code = 76


class Abandoned(Exception):
    """A signal arrived during an evaluation. The resumed run repeats it."""


@dataclass
class Run:
    """What all entries of a run share."""

    folder: RunFolder
    listener: Listener
    stop: Stop
    checkpoints: Checkpoints
    saver: Saver
    keep_checkpoints: int
    copy: Callable[[TrainState], TrainState]
    facts: dict[str, Any]  # stored in every checkpoint
    base_name: str
    num_steps: int  # of all entries
    evaluate_every: int  # steps
    watch: CompileWatch
    watchdog: Watchdog
    peak_seconds_per_token: float  # on all chips together at peak FLOP/s; 0 if the peak is unknown
    base: Tree
    position: Position
    kept: Kept  # what the adapters of the entry leave if the run ends now

    def store_of(self, reference: Tree) -> Checkpoints | None:
        """Where the numbers of a reference are kept. Several processes may not share a folder: they compute them."""
        if jax.process_count() > 1:
            return None
        facts = json_digest({name: self.facts[name] for name in ("identity", "options")})
        return Checkpoints(LocalStorage(self.folder.path / REFERENCES / digest_of(facts, reference)))

    def save(self, state: TrainState, assembly: Assembly) -> None:
        """Copy the state, and write the copy in the background."""
        position, copied, kept = self.position, self.copy(state), dict(self.kept)
        make_files = to_files(kept, assembly, self.base_name, self.facts, position)
        # After a bad step no good checkpoint is removed: this one may be bad.
        latest = [own for own in position.members if own.step == position.global_step and own.status != "diverged"]
        is_bad = any(own.health.num_bad for own in latest)
        if jax.process_index() == 0:
            metrics = self.folder.metrics_so_far()
            self.saver.submit(
                position.global_step,
                lambda: {**make_files(copied), METRICS_FILE: metrics()},
                None if is_bad else lambda: self.checkpoints.prune(self.keep_checkpoints),
            )


def train_entries(run: Run, works: Sequence[EntryWork], state: TrainState) -> str | None:
    """Trains the remaining entries in order. Returns the reason if the run was stopped."""
    for number, work in enumerate(works, 1):
        state, stopped = EntryLoop(run, work).train(state)
        if stopped:
            return stopped
        run.watch.doing = f"the end of {work.entry.name}"
        follows = works[number].entry if number < len(works) else None
        state = work.close(state)
        run.position.next_entry(follows.names if follows else None)
        if follows is not None:
            run.kept.clear()
        run.save(state, work.stepper.assembly)
        if follows is not None and (reason := run.stop.reason()):
            return reason
    return None


class EntryLoop:
    """Trains all adapters of an entry to their end."""

    def __init__(self, run: Run, work: EntryWork) -> None:
        self._run, self._entry, self._stepper, self._measures = run, work.entry, work.stepper, work.measures
        self._references, self._position = work.references, run.position
        self._pending: tuple[int, Results] | None = None
        self._started = self._last_report = self._last_save = time.perf_counter()
        self._step_seconds = 0.0
        self._num_done = 0  # steps of this process
        self._has_said_swapped = False

    def train(self, state: TrainState) -> tuple[TrainState, str | None]:
        """Train to the end of all adapters or to an external stop; return the state and the reason for the stop."""
        position, run = self._position, self._run
        if not self._compare_before(state) or (self._needs_attention() and not self._settle(state)):
            return state, run.stop.reason()  # abandoned; no step was made since the last checkpoint
        run.stop.begin_training()
        self._started = self._last_report = time.perf_counter()
        num_slots = self._num_slots(None, position.running)
        run.watchdog.begin_stage(position.global_step, num_slots, num_slots * run.peak_seconds_per_token)
        while running := position.running:
            for placed in self._stepper.feed(position.lanes, running, self._steps()):
                state = self._step(state, placed)
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
        return state, None

    def _compare_before(self, state: TrainState) -> bool:
        """Compute what the reference thinks of all batches, if they need it. False if a signal arrived."""
        reference = self._stepper.reference(state, 0)
        if self._references is None or reference is None:
            return True
        run = self._run
        run.watch.doing = f"the reference of {self._entry.name}"
        try:
            self._references.fill(reference, run.base, run.store_of(reference), self._check_signal, run.listener)
        except Abandoned:
            return False
        return True

    def _settle(self, state: TrainState) -> bool:
        """Evaluate, and let adapters end. False if a signal arrived."""
        if not self._measure(state):
            return False
        self._end_members(state)
        self._position.lanes = self._position.running
        return True

    def _steps(self) -> range:
        """The steps until the first of the running adapters ends or rates are dropped, if nothing happens earlier."""
        position, members = self._position, self._entry.members
        ends = [members[number].num_steps for number in position.running]
        ends += [selection.step for selection in self._entry.selections if selection.step > position.step]
        return range(position.step, min(ends))

    def _step(self, state: TrainState, placed: Any) -> TrainState:
        shape = self._stepper.shape_of(placed)
        position, name = self._position, self._entry.name
        self._run.watch.doing = f"step {position.global_step + 1} of {name}, a batch of {shape}"
        state, results = self._stepper.step(state, self._run.base, placed)
        self._report()
        self._pending = (position.step, results)
        position.advance()
        self._num_done += 1
        return state

    def _needs_attention(self) -> bool:
        """Whether an evaluation, a selection or the end of an adapter is due."""
        position, entry = self._position, self._entry
        is_selection = any(selection.step == position.step for selection in entry.selections)
        is_end = any(position.step == entry.members[number].num_steps for number in position.running)
        return is_selection or is_end or bool(self._due())

    # ---- metrics

    def _report(self) -> None:
        """Read the metrics of the latest step and send them to the listener."""
        if self._pending is None:
            return
        (number, results), self._pending = self._pending, None
        position, values = self._position, read(results)
        now = time.perf_counter()
        self._step_seconds, self._last_report = now - self._last_report, now
        step = position.global_step - position.step + number + 1
        self._run.watchdog.step_ended(step, self._num_slots(number, list(values)))
        # An adapter that diverged at the step before may have taken one more, which does not count.
        values = {member: own for member, own in values.items() if position.members[member].is_running}
        if values:
            self._report_step(step, number, values, now)
        for member, own in values.items():
            self._report_member(member, step, number, own)

    def _report_step(self, step: int, number: int, values: Mapping[int, dict[str, Any]], now: float) -> None:
        """The metrics of the step: with several adapters, their means."""
        run, members = self._run, self._entry.members
        rate = self._num_slots(number, list(values)) / self._step_seconds
        seconds = now - self._started
        run.listener(
            Step(
                step=step,
                num_steps=run.num_steps,
                stage=members[0].name if self._entry.is_single else ALL,
                loss=_mean([own["loss"] for own in values.values()]),
                learning_rate=max(own["learning_rate"] for own in values.values()),
                grad_norm=_mean([own["grad_norm"] for own in values.values()]),
                skipped=any(own["skipped"] for own in values.values()),
                tokens_per_second=round(rate, 1),
                seconds=round(seconds, 3),
                seconds_left=round(seconds / max(self._num_done, 1) * (run.num_steps - step), 3),
                padding=_mean([members[member].padding_of(number) for member in values]),
                memory_gib=peak_memory_gib(self._stepper.assembly.mesh, lambda: psutil.Process().memory_info().rss),
                peak_fraction=rate * run.peak_seconds_per_token or None,
                num_tokens=round(sum(own["num_tokens"] for own in values.values())),
                preferences=Preferences.of(_means([own["means"] for own in values.values()])),
            )
        )

    def _report_member(self, member: int, step: int, number: int, values: dict[str, Any]) -> None:
        run, own, stage = self._run, self._position.members[member], self._entry.members[member]
        loss, grad_norm, skipped = values["loss"], values["grad_norm"], bool(values["skipped"])
        if not self._entry.is_single:
            rate, num_tokens = values["learning_rate"], round(values["num_tokens"])
            run.listener(AdapterStep(step, stage.name, loss, rate, grad_norm, skipped, num_tokens))
        if skipped:
            run.listener(Skipped(step, stage.name, WHY_SKIPPED[values["skipped"]], tuple(stage.places_of(number))))
        if self._entry.selections and number < self._entry.selections[-1].step:
            own.trial.append(loss if math.isfinite(loss) else None)
        own.health.observe(step, loss, grad_norm, skipped)
        if own.health.num_bad >= stage.recipe.train.max_bad_steps:
            own.step = step
            self._diverge(member)

    def _num_slots(self, number: int | None, members: Sequence[int]) -> int:
        """Token positions in the batches of a step of these adapters; None: of the longest step."""
        batches = [self._entry.members[member].batches for member in members]
        return sum(b.batch_size * (b.sequence_length if number is None else b.length_of(number)) for b in batches)

    # ---- evaluation

    def _due(self) -> list[int]:
        """The adapters that have to be evaluated at this step."""
        return [number for number in self._position.running if self._is_due(number)]

    def _is_due(self, number: int) -> bool:
        position, picks = self._position, self._entry.selections
        if position.members[number].measured_at == position.global_step or not self._measures[number]:
            return False
        if picks and 0 < position.step < picks[-1].step:
            return False  # many rates are compared by their training losses
        is_edge = position.step in (0, self._entry.members[number].num_steps)
        return is_edge or position.global_step % self._run.evaluate_every == 0

    def _measure(self, state: TrainState) -> bool:
        """Evaluate the adapters that are due. False if a signal arrived: the resumed run repeats it."""
        due, run, step = self._due(), self._run, self._position.global_step
        if not due:
            return True
        run.watch.doing = f"the evaluation after step {step}"
        known: dict[tuple[int, float], TokenMetrics] = {}  # of the base model, by evaluation set and beta
        try:
            found = [(number, *self._measured(state, number, known)) for number in due]
        except Abandoned:
            return False
        for number, metrics, samples in found:
            if metrics is not None:
                self._judge(state, number, metrics)
            if samples:
                run.listener(Sampled(step, self._entry.members[number].name, samples))
            self._position.members[number].measured_at = step
        run.listener(Recorded(step))
        self._last_report = time.perf_counter()  # evaluation time is not part of the next step's time
        run.watchdog.restart()
        return True

    def _measured(
        self, state: TrainState, number: int, known: dict[tuple[int, float], TokenMetrics]
    ) -> tuple[TokenMetrics | None, tuple[Sample, ...]]:
        """Metrics and answers of one adapter. Before the first step, all that have the same rows have the same."""
        measures, adapter, run = self._measures[number], self._stepper.adapter(state, number), self._run
        evaluator, sampler, metrics = measures.evaluator, measures.sampler, None
        self._check_signal()
        if evaluator is not None:
            beta = self._entry.members[number].recipe.train.strength
            asked = id(evaluator.batches), beta
            metrics = known.get(asked) if self._position.global_step == 0 else None
            if metrics is None:
                reference = self._stepper.reference(state, number)
                metrics = evaluator.measure(adapter, run.base, self._check_signal, reference, beta)
            known[asked] = metrics
        self._check_signal()
        if sampler is None:
            return metrics, ()
        # Their programs are in the plan but are compiled on first use: a resumed run may not need them.
        with contextlib.nullcontext() if sampler.has_answered else run.watch.allowing():
            return metrics, sampler.answer(measures.questions, adapter, run.base)

    def _judge(self, state: TrainState, number: int, metrics: TokenMetrics) -> None:
        """Report the metrics, keep the adapter if it is its best, and end it if it no longer improves."""
        run, own, stage = self._run, self._position.members[number], self._entry.members[number]
        is_first = self._position.step == 0
        improved = not is_first and metrics.loss < (math.inf if own.best_loss is None else own.best_loss)
        if improved:
            own.best_loss, own.best_accuracy = metrics.loss, metrics.accuracy
            own.best_step, own.num_worse = own.step, 0
            self._keep(state, number)
        elif not is_first:
            own.num_worse += 1
        run.listener(Evaluated(own.step, stage.name, **vars(metrics), is_best=improved))
        if not is_first and metrics.preferences is not None and metrics.preferences.seem_swapped:
            self._say_swapped(stage.name)
        patience = stage.recipe.evaluate.patience
        if patience is not None and own.num_worse >= patience:
            self._keep_last(state, number)
            self._end(number, "stopped early", f"no better loss in {patience} evaluations")

    def _say_swapped(self, stage: str) -> None:
        """Once, however many evaluations and adapters show it."""
        if not self._has_said_swapped:
            self._has_said_swapped = True
            self._run.listener(Alarm(f"Stage {stage}: {SWAPPED} Look at them with `trillora inspect`."))

    def _keep(self, state: TrainState, number: int) -> None:
        """Copy an adapter to the host: it is what this one leaves if nothing better comes."""
        self._run.kept[self._entry.members[number].name] = self._stepper.weights(state, number)

    def _keep_last(self, state: TrainState, number: int) -> None:
        own, evaluate = self._position.members[number], self._entry.members[number].recipe.evaluate
        if own.best_step is None or not evaluate.keep_best:
            self._keep(state, number)

    # ---- the end of adapters

    def _end_members(self, state: TrainState) -> None:
        """End the adapters that have made their last step, and those whose learning rate is worse."""
        position, entry = self._position, self._entry
        for selection in entry.selections:
            if selection.step == position.step and len(position.running) > selection.keep:
                self._select(selection)
        for number in position.running:
            if position.step < entry.members[number].num_steps:
                continue
            if position.members[number].health.first_bad == 1 and position.global_step == self._run.num_steps:
                self._diverge(number)  # a short run without one good step: it would be the adapter it started with
                continue
            self._keep_last(state, number)
            self._end(number, "finished", "")

    def _select(self, selection: Selection) -> None:
        position, running = self._position, self._position.running
        scores = [score(position.members[number].trial) for number in running]
        going_on = {running[place] for place in best(scores, selection.keep)}
        for number, loss in zip(running, scores, strict=True):
            if number in going_on:
                position.members[number].trial = []
            else:
                self._end(number, "dropped", f"training loss {loss:.4f}, worse than with other learning rates")

    def _diverge(self, number: int) -> None:
        """One of several adapters ends; the only one ends the run."""
        if self._entry.is_single:
            raise self._diverged()
        health = self._position.members[number].health
        self._end(number, "diverged", f"from step {health.first_bad} on, {health.num_bad} steps were bad ({health})")

    def _end(self, number: int, status: Status, reason: str) -> None:
        assert status != "running"
        own = self._position.members[number]
        own.end(status, reason)
        if status in ("dropped", "diverged"):
            self._run.kept.pop(own.name, None)
        if not self._entry.is_single:
            self._run.listener(AdapterEnded(own.step, own.name, status, reason))
        elif status == "stopped early":
            self._run.listener(Note(f"Stage {own.name} ends: {reason}"))

    def _diverged(self) -> Diverged:
        """Remove the checkpoints that may be bad. A step's loss belongs to the state before it, so the state of step
        `first_bad - 1` is bad too."""
        [own], [stage], run = self._position.members, self._entry.members, self._run
        assert own.health.first_bad is not None
        run.saver.wait()
        with run.checkpoints.reported("removed"):
            if jax.process_index() == 0:
                run.checkpoints.remove_after(own.health.first_bad - 2)
            good = run.checkpoints.steps()
        kept = f"the last good state is {run.checkpoints.where(good[-1])}" if good else "there is no good checkpoint"
        return Diverged(
            f"Training diverged: from step {own.health.first_bad} on, {own.health.num_bad} steps in a row were bad "
            f"({own.health}); {kept}.",
            where=f"{run.folder.path}, stage {own.name}",
            do=f"lower train.learning_rate (now {stage.recipe.train.learning_rate:g}) and start a new run, or resume "
            "from the last good state with --accept-changes; metrics.jsonl lists the rows of skipped steps",
        )

    # ---- stopping and saving

    def _check_signal(self) -> None:
        """Abandons an evaluation if a signal has arrived."""
        # Several processes evaluate together: one of them must not leave alone.
        if self._run.stop.signalled and jax.process_count() == 1:
            raise Abandoned

    def _stop_is_due(self) -> bool:
        return self._run.stop.reason(self._next_seconds()) is not None

    def _next_seconds(self) -> float:
        """Estimated time of one more step and a checkpoint."""
        return 1.5 * self._step_seconds + (self._run.saver.seconds or 0.0)

    def _save_is_due(self) -> bool:
        """Whether to save after this step: by number, or with `auto` by time."""
        every, saver = self._entry.members[0].recipe.train.checkpoint_every, self._run.saver
        if isinstance(every, int):
            return self._position.global_step % every == 0
        interval = min(max((saver.seconds or 0.0) / SAVE_SHARE, SAVE_SECONDS[0]), SAVE_SECONDS[1])
        return not saver.busy and time.perf_counter() - self._last_save > interval

    def _save(self, state: TrainState) -> None:
        self._run.save(state, self._stepper.assembly)
        self._last_save = time.perf_counter()
        self._run.watchdog.restart()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: _mean([own[name] for own in values]) for name in values[0]}
