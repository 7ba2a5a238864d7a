"""What surrounds the training: find the newest checkpoint, read the data, compare the inputs, write the folder."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillora.data.stage import StageData, read_stage
from trillora.devices.chips import peak_tflops
from trillora.devices.mesh import find_devices, remember_programs, same_everywhere
from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Note
from trillora.files.atomic import remove_unfinished
from trillora.files.cache_dir import cache_root
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import LocalStorage
from trillora.model.layout import Layout, stored_weights
from trillora.model.limits import check_rows
from trillora.model.loading.digest import tokenizer_digest, weights_digest
from trillora.model.loading.source import OpenModel, weight_files
from trillora.recipe.resolve import ResolvedRecipe, keep_dates, keep_fixed
from trillora.recipe.schema import Recipe, stages_of
from trillora.report.run.write import report_listener
from trillora.runs.files import METRICS_FILE
from trillora.secrets import mask_values
from trillora.step.adapter_spec import Start, open_start
from trillora.step.compile_guard import CompileWatch
from trillora.tracking import tracking_listener
from trillora.training import manifest
from trillora.training.run_folder import RunFolder, read_lines
from trillora.training.run_identity import differences, fixed_options, refuse, with_defaults
from trillora.training.saved_record import RunIdRecord
from trillora.training.saver import Saver
from trillora.training.signals import Stop
from trillora.training.stalls.watchdog import Watchdog
from trillora.training.state.files import CheckpointFacts, find_fault, read_facts

Identity = Callable[[], dict[str, str]]  # digests of what a run depends on, by name


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    run: Path
    adapter: Path | None  # None if the run was stopped early
    losses: tuple[float, ...]  # of every step, earlier starts included
    num_compiles: int  # of the training step, in this process
    stopped: str | None = None  # why it stopped early; the same call resumes it

    def metrics_frame(self) -> Any:
        """The metrics of every step and evaluation as a pandas DataFrame; an error if pandas is not installed."""
        if importlib.util.find_spec("pandas") is None:
            do = "pip install pandas, or read the lines of metrics.jsonl"
            raise TrilloraError("A DataFrame needs the package pandas.", where=str(self.run / METRICS_FILE), do=do)
        return importlib.import_module("pandas").DataFrame(list(read_lines(self.run / METRICS_FILE)))


class RunProcess:
    """One process of a run."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        checkpoints: Checkpoints,
        stop: Stop,
        listener: Listener,
        accept_changes: bool,
    ) -> None:
        self._recipe, self._folder, self._checkpoints, self._stop = recipe, folder, checkpoints, stop
        self._watch = CompileWatch()
        self._listener = self._watch.allow_compiling(listener)
        self._watchdog = Watchdog(self._listener, folder.add_stall)
        self._accept_changes = accept_changes
        self._record = RunIdRecord(folder)
        self._start: Start | None = None  # the adapter that a new run starts from

    def _open(self) -> tuple[list[Any], OpenModel]:
        """The devices and the model of the run."""
        remember_programs(cache_root() / "programs")
        wanted, named = self._recipe.hardware, self._recipe.model
        devices = find_devices(wanted.backend, None if wanted.devices == "auto" else wanted.devices)
        small = " and small sizes, because of --tiny" if self._recipe.tiny else ""
        self._listener(Note(f"Model {named.name}{small}"))
        return devices, OpenModel.of(named, tokens=self._recipe.tokens or ())

    def _start_folder(self, saved: tuple[int, dict[str, bytes]] | None) -> None:
        """Sets the files of the run's folder to the state of the checkpoint."""
        step = saved[0] if saved else None
        self._folder.start_metrics(saved[1][METRICS_FILE] if saved else b"")
        self._folder.add_history("resumed" if saved else "started", step or 0)
        self._record.write(step, "" if step is None else self._checkpoints.where(step))

    def _saver(self, listener: Listener) -> Saver:
        return Saver(self._checkpoints, self._record.listening(listener))

    def _record_last(self) -> None:
        """After checkpoints were removed."""
        with self._checkpoints.reported("read"):
            steps = self._checkpoints.steps()
        self._record.write(steps[-1] if steps else None, self._checkpoints.where(steps[-1]) if steps else "")

    def _newest(self) -> tuple[int, dict[str, bytes]] | None:
        """The newest valid checkpoint. Unfinished files are removed first."""
        with self._checkpoints.reported("read"):
            if jax.process_index() == 0:
                self._checkpoints.clean()
                LocalStorage(self._folder.path).clean()  # an adapter that was not written completely
                remove_unfinished(self._folder.path)
            steps = self._checkpoints.steps()
        found = self._checkpoints.newest_valid(self._listener, find_fault)
        if found is None and steps:
            raise TrilloraError(
                f"All {len(steps)} checkpoints of this run are damaged. The run does not restart by itself.",
                where=self._checkpoints.where(steps[-1]),
                do="restore one from a backup; or, to start from scratch, remove the folder or use another --out",
            )
        run_id = read_facts(found[1]).run if found else None
        self._record.compare(steps, run_id, self._checkpoints.place, self._listener)
        if not same_everywhere(found[0] if found else -1):
            raise TrilloraError(
                "The processes of this run do not see the same checkpoints.",
                where="train.checkpoint_dir",
                do="use a folder or URL that all of them can read, such as gs://bucket/run",
            )
        return found

    def _read_stages(self, opened: OpenModel, before: ResolvedRecipe | None) -> tuple[list[StageData], Identity]:
        """The data of every stage, and digests of everything the run depends on. A thread reads the weights for theirs,
        which takes seconds: the digests are for the moment when they are needed."""
        recipe = keep_dates(self._recipe, before) if before else self._recipe
        pool = ThreadPoolExecutor(1, "digest")
        weights = pool.submit(weights_digest, opened.folder, weight_files(opened.folder))
        pool.shutdown(wait=False)
        stages = []
        for stage in stages_of(recipe):
            check_rows(opened.config, stage.recipe.train.sequence_length, opened.rope)
            stages.append(read_stage(stage, opened.tokenizer, self._listener))
        others = {"tokenizer": tokenizer_digest(opened.tokenizer)}
        for data in stages:
            others |= data.identity()
        self._start = open_start(self._recipe.lora, opened, self._listener)
        if self._start is not None:
            others["lora.from"] = self._start.digest
        return stages, lambda: {"model": weights.result(), **others}

    def _check_unchanged(self, facts: CheckpointFacts, identity: dict[str, str], may_change: Sequence[str]) -> None:
        """Refuses to resume with other inputs or options, unless the user accepts the changes. `may_change`: names of
        options."""
        now = {**identity, **mask_values(fixed_options(keep_fixed(self._recipe, facts.resolved)))}
        then = {**facts.identity, **with_defaults(facts.options, now)}
        now, then = ({key: each[key] for key in each if key not in may_change} for each in (now, then))
        if (changed := differences(then, now)) and not self._accept_changes:
            raise refuse(changed, self._folder.path, facts.position.global_step)
        for change in changed:
            self._listener(Alarm(f"Resuming although {change}"))
        for change in differences(facts.libraries, manifest.libraries()):
            self._listener(Note(f"Since the checkpoint {change}: results may differ in the last digits"))

    @contextlib.contextmanager
    def _tracking(self, first_step: int, resolved: Recipe) -> Iterator[Listener]:
        if jax.process_index() != 0:
            yield self._listener
            return
        track, folder = resolved.track, self._folder.path
        config = mask_values(resolved.model_dump(mode="json"))
        with tracking_listener(
            folder, first_step, track.services, track.project, config, self._listener, track.every_steps or 1
        ) as listener:
            yield report_listener(folder, self._folder.recording(listener))

    def _check_saved(self, saver: Saver) -> None:
        """Training may continue after a failed save, but a run may not end with one."""
        if saver.failure is not None:
            raise TrilloraError(
                f"The last state could not be saved: {saver.failure}.",
                where=self._checkpoints.where(0).rpartition("/")[0],
                do="free some space there and run the same command again: it resumes from the last checkpoint",
            )


def peak_seconds_per_token(layout: Layout, devices: list[Any]) -> float:
    """Seconds that all devices together need for one token at peak FLOP/s: two operations per weight in the forward
    pass and two in the backward pass, because the base has no gradient. 0 if the peak is unknown."""
    peak = peak_tflops(devices[0].device_kind)
    if peak is None:
        return 0.0
    shapes = [leaf.shape for leaf, _ in stored_weights(layout).values()]
    return 4 * sum(math.prod(shape) for shape in shapes if len(shape) >= 2) / (peak * 1e12 * len(devices))
