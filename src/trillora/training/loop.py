"""The training loop of one stage: train, evaluate, save, and decide when to stop.

The device rarely waits for the host: the metrics of a step are read while the next step runs, batches are built ahead,
and checkpoints are copied on the device and written in the background. All state that influences the numbers is in
`TrainState` and `Position`, so a run resumed from any checkpoint ends exactly like an uninterrupted one.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from trillora.data.batches import Batches
from trillora.data.stage import StageData
from trillora.devices.mesh import any_process, local_rows, put_batch
from trillora.engine.step import WHY_SKIPPED, StepMetrics, TrainState
from trillora.errors import TrilloraError
from trillora.evaluation.token_metrics import TokenMetrics
from trillora.events import Alarm, Evaluated, Listener, Note, Sample, Sampled, Skipped, Step
from trillora.files.checkpoints import Checkpoints
from trillora.model.layout import Tree
from trillora.report.run.write import write_report
from trillora.runs.files import METRICS_FILE
from trillora.step.build import Assembly
from trillora.step.compile_guard import CompileWatch, Programs, shape_text
from trillora.training.divergence import DivergenceMonitor
from trillora.training.run_folder import RunFolder
from trillora.training.saver import Saver
from trillora.training.signals import Stop
from trillora.training.stalls.watchdog import Watchdog
from trillora.training.state_files import to_files
from trillora.training.validation import Measures, Sampler, peak_memory_gib

NUM_AHEAD = 2  # batches built before they are needed
SAVE_SHARE = 0.02  # fraction of the time that may be spent on saving checkpoints
SAVE_SECONDS = (30.0, 600.0)  # minimum and maximum time between two checkpoints


class Diverged(TrilloraError):
    """Training diverged; the last good checkpoint is kept."""

    exit_code = 76


class Abandoned(Exception):
    """A signal arrived during an evaluation. The resumed run repeats it."""


@dataclass
class Position:
    """The progress of a run: everything a checkpoint stores except arrays."""

    health: DivergenceMonitor  # the name is part of the checkpoint format
    stage: int = 0
    step: int = 0  # completed steps of the stage
    global_step: int = 0  # completed steps of the run
    measured_at: int | None = None  # step of the stage that was last evaluated
    best_loss: float | None = None  # lowest evaluation loss of the stage whose checkpoint was saved
    best_step: int | None = None  # its global step
    num_worse: int = 0  # evaluations since the last better one
    stage_is_over: bool = False  # ended early by `evaluate.patience`
    unsaved_best: tuple[int, float] | None = None  # step and loss of a better evaluation, until its checkpoint is saved

    def next_stage(self, *, is_end: bool) -> None:
        self.stage += 1
        if not is_end:  # a finished run keeps its best step
            self.step, self.measured_at, self.stage_is_over = 0, None, False
            self.best_loss, self.best_step, self.num_worse, self.unsaved_best = None, None, 0, None
            self.health.new_stage()

    def to_dict(self) -> dict[str, Any]:
        """For the checkpoint of this step. If this step is a new best, it is the best as soon as this can be read."""
        values = {**asdict(self), "health": self.health.to_dict()}
        if (best := values.pop("unsaved_best")) is not None:
            values |= {"best_step": best[0], "best_loss": best[1]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        return cls(**{**values, "health": DivergenceMonitor.from_dict(values["health"])})


@dataclass(frozen=True)
class Run:
    """What all stages of a run share."""

    folder: RunFolder
    listener: Listener
    stop: Stop
    checkpoints: Checkpoints
    saver: Saver
    keep_checkpoints: int
    assembly: Assembly  # of any stage: the shapes of the state are the same in all of them
    copy: Callable[[TrainState], TrainState]
    facts: dict[str, Any]  # stored in every checkpoint
    base_name: str
    num_steps: int  # of all stages
    evaluate_every: int  # steps
    watch: CompileWatch
    watchdog: Watchdog
    peak_seconds_per_token: float  # on all chips together at peak FLOP/s; 0 if the peak is unknown

    def save(self, state: TrainState, position: Position) -> None:
        """Copy the state, and write the copy in the background."""
        if position.unsaved_best is not None and position.unsaved_best[0] != position.global_step:
            self.confirm_best(position)
        step, place = position.global_step, position.to_dict()
        facts = {**self.facts, "position": place}
        copied, keep = self.copy(state), self.keep_checkpoints
        protect = () if place["best_step"] is None else (place["best_step"],)
        if jax.process_index() == 0:
            metrics = self.folder.metrics_so_far()
            self.saver.submit(
                step,
                lambda: {**to_files(copied, self.assembly, self.base_name, facts), METRICS_FILE: metrics()},
                # After a bad step no good checkpoint is removed: this one may be bad.
                None if position.health.num_bad else lambda: self.checkpoints.prune(keep, protect),
            )

    def confirm_best(self, position: Position) -> None:
        """Wait for the checkpoint of a better evaluation: it is the best one only if it could be saved."""
        if position.unsaved_best is None:
            return
        step, loss = position.unsaved_best
        self.saver.wait()
        is_saved, _ = any_process(self.saver.last_saved == step, False)  # only one process saves
        position.unsaved_best = None
        if is_saved:
            position.best_step, position.best_loss = step, loss
            return
        kept = f"step {position.best_step} is still the best" if position.best_step else "none is saved yet"
        better = f"The evaluation of step {step} is better than that of every saved step"
        self.listener(Alarm(f"{better}, but its checkpoint was not saved; {kept}."))

    def update_report(self) -> None:
        if jax.process_index() == 0:
            try:
                write_report(self.folder.path)
            except Exception as error:  # a broken report must not stop training
                self.listener(Alarm(f"The report could not be written: {error!r}"))


class StageLoop:
    """One stage of a run."""

    def __init__(
        self,
        run: Run,
        stage: StageData,
        assembly: Assembly,
        programs: Programs,
        base: Tree,
        position: Position,
        measures: Measures,
    ) -> None:
        self._run, self._stage, self._assembly, self._programs = run, stage, assembly, programs
        self._base, self._position, self._measures = base, position, measures
        self._options = stage.recipe.train
        self._pending: tuple[int, StepMetrics] | None = None
        self._started = self._last_report = self._last_save = time.perf_counter()
        self._step_seconds = 0.0
        self._num_done = 0  # steps of this process

    def train(self, state: TrainState) -> tuple[TrainState, str | None]:
        """Train to the end of the stage or to an external stop; return the state and the reason for the stop."""
        position, stage = self._position, self._stage
        if self._measuring_is_due():
            self._measure(state.adapter)
        if self._measuring_is_due():  # abandoned because of a signal; no step was made since the last checkpoint
            return state, self._run.stop.reason()
        self._run.stop.begin_training()
        self._started = self._last_report = time.perf_counter()
        num_slots = stage.batches.batch_size * stage.batches.sequence_length
        self._run.watchdog.begin_stage(position.global_step, num_slots, num_slots * self._run.peak_seconds_per_token)
        steps = range(position.step, 0 if position.stage_is_over else stage.num_steps)
        for batch in placed_batches(stage.batches, steps, self._assembly.mesh):
            shape = shape_text(batch["tokens"].shape)
            self._run.watch.doing = f"step {position.global_step + 1} of stage {stage.name}, a batch of {shape}"
            state, metrics = self._programs(state, self._base, batch)
            self._report()
            self._pending = (position.step, metrics)
            position.step += 1
            position.global_step += 1
            self._num_done += 1
            stopped, save = any_process(self._stop_is_due(), self._save_is_due())
            if not (stopped or save or self._measuring_is_due()):
                continue
            self._report()  # waits for the step
            improved = self._measuring_is_due() and self._measure(state.adapter)
            if self._measuring_is_due():
                stopped = True  # abandoned because of a signal; the resumed run starts with this evaluation
            elif position.stage_is_over or position.step == stage.num_steps:
                break  # the trainer saves it as the first state of the next stage
            if stopped or save or improved:
                self._save(state)
            if stopped:
                return state, self._run.stop.reason(self._next_seconds()) or "another process of the run"
        self._report()
        if position.health.first_bad == 1 and position.global_step == self._run.num_steps:
            raise self._diverged()  # a short run without one good step: its adapter would be the one it started with
        return state, None

    def _report(self) -> None:
        """Read the metrics of the latest step and send them to the listener."""
        if self._pending is None:
            return
        (number, metrics), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(metrics)._asdict().items()}
        now = time.perf_counter()
        self._step_seconds, self._last_report = now - self._last_report, now
        run, stage, position = self._run, self._stage, self._position
        step = position.global_step - position.step + number + 1
        run.watchdog.step_ended(step, self._num_slots(number))
        rate = self._num_slots(number) / self._step_seconds
        seconds = now - self._started
        skipped, loss, grad_norm = values["skipped"], values["loss"], values["grad_norm"]
        run.listener(
            Step(
                step=step,
                num_steps=run.num_steps,
                stage=stage.name,
                loss=loss,
                learning_rate=values["learning_rate"],
                grad_norm=grad_norm,
                skipped=bool(skipped),
                tokens_per_second=round(rate, 1),
                seconds=round(seconds, 3),
                seconds_left=round(seconds / max(self._num_done, 1) * (run.num_steps - step), 3),
                padding=stage.padding_of(number),
                memory_gib=peak_memory_gib(self._assembly.mesh, lambda: psutil.Process().memory_info().rss),
                peak_fraction=rate * run.peak_seconds_per_token or None,
                num_tokens=round(values["num_tokens"]),
            )
        )
        if skipped:
            run.listener(Skipped(step, stage.name, WHY_SKIPPED[skipped], tuple(stage.places_of(number))))
        position.health.observe(step, loss, grad_norm, bool(skipped))
        if position.health.num_bad >= self._options.max_bad_steps:
            raise self._diverged()

    def _num_slots(self, number: int) -> int:
        """Token positions in the batch of a step."""
        return self._stage.batches.batch_size * self._stage.batches.length_of(number)

    def _diverged(self) -> Diverged:
        """Remove the checkpoints that may be bad. A step's loss is that of the state before it, so the state of step
        `first_bad - 1` is bad too."""
        health, run = self._position.health, self._run
        assert health.first_bad is not None
        run.saver.wait()
        with run.checkpoints.reported("removed"):
            if jax.process_index() == 0:
                run.checkpoints.remove_after(health.first_bad - 2)
            good = run.checkpoints.steps()
        kept = f"the last good state is {run.checkpoints.where(good[-1])}" if good else "there is no good checkpoint"
        reasons = ", ".join(f"{number} {reason}" for reason, number in health.bad.items())
        return Diverged(
            f"Training diverged: from step {health.first_bad} on, {health.num_bad} steps in a row were bad "
            f"({reasons}); {kept}.",
            where=f"{run.folder.path}, stage {self._stage.name}",
            do=f"lower train.learning_rate (now {self._options.learning_rate:g}) and start a new run, or resume from "
            "the last good state with --accept-changes; metrics.jsonl lists the rows of skipped steps",
        )

    def _measuring_is_due(self) -> bool:
        position = self._position
        if position.measured_at == position.step or not self._measures:
            return False
        is_last = position.step == self._stage.num_steps
        return position.step == 0 or is_last or position.global_step % self._run.evaluate_every == 0

    def _measure(self, adapter: Tree) -> bool:
        """Evaluate and sample; return True for the best loss so far. A signal aborts it; the resumed run repeats it."""
        evaluator, sampler = self._measures.evaluator, self._measures.sampler
        self._run.watch.doing = f"the evaluation after step {self._position.global_step}"
        try:
            metrics = evaluator.measure(adapter, self._base, self._check_signal) if evaluator is not None else None
            self._check_signal()
            samples = self._answers(sampler, adapter) if sampler is not None else ()
        except Abandoned:
            return False
        improved = metrics is not None and self._judge(metrics)
        if samples:
            self._run.listener(Sampled(self._position.global_step, self._stage.name, samples))
        self._position.measured_at = self._position.step
        self._run.update_report()
        self._last_report = time.perf_counter()  # evaluation time is not part of the next step's time
        self._run.watchdog.restart()
        return improved

    def _answers(self, sampler: Sampler, adapter: Tree) -> tuple[Sample, ...]:
        # Their programs are in the plan but are compiled on first use: a resumed run may not need them.
        with contextlib.nullcontext() if sampler.has_answered else self._run.watch.allowing():
            return sampler.answer(self._measures.questions, adapter, self._base)

    def _judge(self, metrics: TokenMetrics) -> bool:
        """Report the metrics, return True for the best loss so far, and end a stage that no longer improves."""
        position, run = self._position, self._run
        run.confirm_best(position)
        best = math.inf if position.best_loss is None else position.best_loss
        improved = position.step > 0 and metrics.loss < best  # never if the loss is not finite
        if improved:
            position.unsaved_best, position.num_worse = (position.global_step, metrics.loss), 0
        elif position.step > 0:
            position.num_worse += 1
        run.listener(Evaluated(position.global_step, self._stage.name, **asdict(metrics), is_best=improved))
        patience = self._stage.recipe.evaluate.patience
        if patience is not None and position.num_worse >= patience:
            position.stage_is_over = True
            run.listener(Note(f"Stage {self._stage.name} ends: no better loss in {patience} evaluations"))
        return improved

    def _check_signal(self) -> None:
        check_signal(self._run.stop)

    def _stop_is_due(self) -> bool:
        return self._run.stop.reason(self._next_seconds()) is not None

    def _next_seconds(self) -> float:
        """Estimated time of one more step and a checkpoint."""
        return step_and_save_seconds(self._step_seconds, self._run.saver)

    def _save_is_due(self) -> bool:
        every, step = self._options.checkpoint_every, self._position.global_step
        return save_is_due(every, step, self._run.saver, self._last_save)

    def _save(self, state: TrainState) -> None:
        self._run.save(state, self._position)
        self._last_save = time.perf_counter()
        self._run.watchdog.restart()


def check_signal(stop: Stop) -> None:
    """Abandons an evaluation if a signal has arrived."""
    # Several processes evaluate together: one of them must not leave alone.
    if stop.signalled and jax.process_count() == 1:
        raise Abandoned


def step_and_save_seconds(step_seconds: float, saver: Saver) -> float:
    """Estimated time of one more step and a checkpoint."""
    return 1.5 * step_seconds + (saver.seconds or 0.0)


def save_is_due(every: int | str, step: int, saver: Saver, last_save: float) -> bool:
    """Whether to save after this step. `every` is a number of steps or `auto`."""
    if isinstance(every, int):
        return step % every == 0
    interval = min(max((saver.seconds or 0.0) / SAVE_SHARE, SAVE_SECONDS[0]), SAVE_SECONDS[1])
    return not saver.busy and time.perf_counter() - last_save > interval


def placed_batches(batches: Batches, steps: range, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """The batches of these steps, on the devices. A thread builds and sends the next ones during the current step."""
    rows = local_rows(batches.batch_size, mesh)

    def make(step: int) -> dict[str, jax.Array]:
        return put_batch(batches.batch(step, rows), mesh, batches.batch_size)

    with ThreadPoolExecutor(1) as ahead:
        waiting: collections.deque[Future[dict[str, jax.Array]]] = collections.deque()
        for step in steps:
            waiting.append(ahead.submit(make, step))
            if len(waiting) > NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
