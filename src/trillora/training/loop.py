"""The steps of one stage: train, measure, save, and find out when to end.

The device never waits for the host but where it must: a step's metrics are read while the next one runs, batches are
made ahead, checkpoints are copied on the device and written beside the training. Whatever decides about the numbers is
part of `Position`, so that a run continued from any checkpoint does as one that was never interrupted.
"""

from __future__ import annotations

import collections
import contextlib
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
from trillora.engine.step import StepMetrics, TrainState
from trillora.errors import TrilloraError
from trillora.events import Alarm, Evaluated, Listener, Note, Sample, Sampled, Step
from trillora.model.layout import Tree
from trillora.report.run.write import write_report
from trillora.step.build import Assembly
from trillora.step.compile_guard import CompileWatch, Programs, shape_text
from trillora.training.checkpoint import Checkpoints, Saver
from trillora.training.divergence import Health
from trillora.training.run_folder import RunFolder
from trillora.training.signals import Stop
from trillora.training.state_files import METRICS_FILE, to_files
from trillora.training.validation import Figures, Measures, Sampler, peak_memory_gib

NUM_AHEAD = 2  # batches made before they are needed
SAVE_SHARE = 0.02  # of the time that checkpoints may take
SAVE_SECONDS = (30.0, 600.0)  # between two of them, at least and at most
WHY_SKIPPED = {1: "the loss or its gradient was not finite", 2: "the gradient was far longer than any before"}


class Diverged(TrilloraError):
    """The run is lost from some step on; what was good is kept."""

    exit_code = 76


class _GivenUp(Exception):
    """A signal came while something was measured that can be measured again."""


@dataclass
class Position:
    """Where a run stands, besides its arrays."""

    health: Health
    stage: int = 0
    step: int = 0  # of the stage, done
    global_step: int = 0
    measured_at: int | None = None  # step of the stage that was last measured
    best_loss: float | None = None  # of the stage, by evaluation
    best_step: int | None = None  # global
    num_worse: int = 0  # evaluations since the best
    stage_is_over: bool = False  # before its last step

    def next_stage(self, *, is_end: bool) -> None:
        self.stage += 1
        if not is_end:  # a run that is over still knows its best
            self.step, self.measured_at, self.stage_is_over = 0, None, False
            self.best_loss, self.best_step, self.num_worse = None, None, 0
            self.health.new_stage()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "health": self.health.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        return cls(**{**values, "health": Health.from_dict(values["health"])})


@dataclass(frozen=True)
class Run:
    """What all stages share."""

    folder: RunFolder
    listener: Listener
    stop: Stop
    checkpoints: Checkpoints
    saver: Saver
    keep_checkpoints: int
    assembly: Assembly  # of any stage: the state has one shape
    copy: Callable[[TrainState], TrainState]
    facts: dict[str, Any]  # of the run, for every checkpoint
    base_name: str
    num_steps: int  # of all stages
    watch: CompileWatch
    peak_seconds_per_token: float  # as a share of a second of all the chips' arithmetic; 0 where that is not known

    def save(self, state: TrainState, position: Position) -> None:
        """Copy the state, and write it while training goes on."""
        step, facts = position.global_step, {**self.facts, "position": position.to_dict()}
        copied, keep = self.copy(state), self.keep_checkpoints
        protect = () if position.best_step is None else (position.best_step,)
        if jax.process_index() == 0:
            metrics = self.folder.metrics_so_far()
            self.saver.submit(
                step,
                lambda: {**to_files(copied, self.assembly, self.base_name, facts), METRICS_FILE: metrics()},
                None if position.health.num_bad else lambda: self.checkpoints.prune(keep, protect),
            )

    def update_report(self) -> None:
        if jax.process_index() == 0:
            try:
                write_report(self.folder.path)
            except Exception as error:  # whatever is wrong with a page, the run is worth more
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
        every = stage.recipe.evaluate.every_steps
        assert every != "auto"
        self._evaluate_every = every

    def train(self, state: TrainState) -> tuple[TrainState, str | None]:
        """The state when the stage is over, or when something outside says to stop, and what that was."""
        position, stage = self._position, self._stage
        if self._measuring_is_due():
            self._measure(state.adapter)
        if self._measuring_is_due():  # given up for a signal: nothing has changed since the last checkpoint
            return state, self._run.stop.reason()
        self._run.stop.begin_training()
        self._started = self._last_report = time.perf_counter()
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
                stopped = True  # given up for a signal; the run goes on with the measuring
            elif position.stage_is_over or position.step == stage.num_steps:
                break  # saved as the beginning of what comes next
            if stopped or ((save or improved) and not position.health.num_bad):
                self._save(state)  # what is not known to be good replaces nothing
            if stopped:
                return state, self._run.stop.reason(self._next_seconds()) or "another process of the run"
        self._report()
        return state, None

    def _report(self) -> None:
        """Read the metrics of the latest step, and tell them."""
        if self._pending is None:
            return
        (number, metrics), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(metrics)._asdict().items()}
        now = time.perf_counter()
        self._step_seconds, self._last_report = now - self._last_report, now
        run, stage, position = self._run, self._stage, self._position
        step = position.global_step - position.step + number + 1
        rate = stage.batches.batch_size * stage.batches.length_of(number) / self._step_seconds
        seconds = now - self._started
        times: dict[str, Any] = {
            "tokens_per_second": round(rate, 1),
            "seconds": round(seconds, 3),
            "memory_gib": peak_memory_gib(self._assembly.mesh, lambda: psutil.Process().memory_info().rss),
            "peak_fraction": rate * run.peak_seconds_per_token or None,
        }
        padding = stage.padding_of(number)
        run.folder.add_metrics("step", step=step, stage=stage.name, **values, padding=padding, **times)
        run.listener(
            Step(
                step=step,
                num_steps=run.num_steps,
                stage=stage.name,
                loss=values["loss"],
                learning_rate=values["learning_rate"],
                grad_norm=values["grad_norm"],
                skipped=bool(values["skipped"]),
                seconds_left=seconds / max(self._num_done, 1) * (run.num_steps - step),
                padding=padding,
                **times,
            )
        )
        if values["skipped"]:
            self._tell_skipped(step, number, WHY_SKIPPED[values["skipped"]])
        position.health.see(step, values["loss"], values["grad_norm"], bool(values["skipped"]))
        if position.health.num_bad >= self._options.max_bad_steps:
            raise self._diverged()

    def _tell_skipped(self, step: int, number: int, reason: str) -> None:
        rows = self._stage.places_of(number)
        self._run.folder.add_metrics("skipped", step=step, stage=self._stage.name, reason=reason, rows=rows)
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        self._run.listener(Alarm(f"Step {step} changed nothing: {reason}. Its rows: {', '.join(rows[:3])}{more}"))

    def _diverged(self) -> Diverged:
        """The state before the first bad loss is itself suspect: its loss was not seen to be good."""
        health, run = self._position.health, self._run
        assert health.first_bad is not None
        run.saver.wait()
        if jax.process_index() == 0:
            run.checkpoints.remove_after(health.first_bad - 2)
        good = run.checkpoints.steps()
        kept = (
            f"the last good state is {run.checkpoints.where(good[-1])}" if good else "there was no good state to keep"
        )
        return Diverged(
            f"The run has diverged: {health.num_bad} steps in a row were skipped, without gradient or worse than "
            f"guessing, from step {health.first_bad} on; {kept}.",
            where=f"{run.folder.path}, stage {self._stage.name}",
            do=f"lower train.learning_rate (it is {self._options.learning_rate:g}) and start anew, or go on from the "
            "last good state with --accept-changes; metrics.jsonl names the rows of skipped steps",
        )

    def _measuring_is_due(self) -> bool:
        position = self._position
        if position.measured_at == position.step or not self._measures:
            return False
        is_last = position.step == self._stage.num_steps
        return position.step == 0 or is_last or position.global_step % self._evaluate_every == 0

    def _measure(self, adapter: Tree) -> bool:
        """Evaluate and sample; whether this is the best so far. Given up for a signal: a continued run measures."""
        evaluator, sampler = self._measures.evaluator, self._measures.sampler
        self._run.watch.doing = f"the evaluation after step {self._position.global_step}"
        try:
            figures = evaluator.measure(adapter, self._base, self._ask) if evaluator is not None else None
            self._ask()
            samples = self._answers(sampler, adapter) if sampler is not None else ()
        except _GivenUp:
            return False
        improved = figures is not None and self._judge(figures)
        if samples:
            told: dict[str, Any] = {"step": self._position.global_step, "stage": self._stage.name}
            self._run.folder.add_metrics("samples", **told, samples=[asdict(sample) for sample in samples])
            self._run.listener(Sampled(**told, samples=samples))
        self._position.measured_at = self._position.step
        self._run.update_report()
        self._last_report = time.perf_counter()  # the next step's time is its own
        return improved

    def _answers(self, sampler: Sampler, adapter: Tree) -> tuple[Sample, ...]:
        # The plan has their programs; they are compiled when first needed, which a continued run may not come to.
        with contextlib.nullcontext() if sampler.has_answered else self._run.watch.allowing():
            return sampler.answer(self._measures.questions, adapter)

    def _judge(self, figures: Figures) -> bool:
        """Tell the figures, and whether they are the best; end a stage that gets no better."""
        position, run = self._position, self._run
        improved = position.step > 0 and (position.best_loss is None or figures.loss < position.best_loss)
        if improved:
            position.best_loss, position.best_step, position.num_worse = figures.loss, position.global_step, 0
        elif position.step > 0:
            position.num_worse += 1
        told = {"step": position.global_step, "stage": self._stage.name, **asdict(figures), "is_best": improved}
        run.folder.add_metrics("evaluation", **told)
        run.listener(Evaluated(**told))
        patience = self._stage.recipe.evaluate.patience
        if patience is not None and position.num_worse >= patience:
            position.stage_is_over = True
            run.listener(Note(f"Stage {self._stage.name} ends: {patience} evaluations without a better loss"))
        return improved

    def _ask(self) -> None:
        # Processes of one run measure together or not at all.
        if self._run.stop.signalled and jax.process_count() == 1:
            raise _GivenUp

    def _stop_is_due(self) -> bool:
        return self._run.stop.reason(self._next_seconds()) is not None

    def _next_seconds(self) -> float:
        """What one more step and a checkpoint would take."""
        return 1.5 * self._step_seconds + (self._run.saver.seconds or 0.0)

    def _save_is_due(self) -> bool:
        every, saver = self._options.checkpoint_every, self._run.saver
        if every != "auto":
            return self._position.global_step % every == 0
        wanted = min(max((saver.seconds or 0.0) / SAVE_SHARE, SAVE_SECONDS[0]), SAVE_SECONDS[1])
        return not saver.busy and time.perf_counter() - self._last_save > wanted

    def _save(self, state: TrainState) -> None:
        self._run.save(state, self._position)
        self._last_save = time.perf_counter()


def placed_batches(batches: Batches, steps: range, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """The batches of these steps on the devices; the next one is made and sent while the last one is worked on."""
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
