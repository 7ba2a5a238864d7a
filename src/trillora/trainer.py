"""One run, in order: recipe, model, data, step, stages, adapter. A run that was interrupted goes on where it was.

    train(load_recipe("recipe.yaml"), Path("runs/first"))

The same call starts a run and continues it: the newest valid checkpoint wins. It is believed only if model, tokenizer,
template, data and recipe are those it was made with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from trillora.assembly import Assembly
from trillora.cache import cache_root
from trillora.checkpoint import Checkpoints, Saver, sealed
from trillora.choices import Plan, choose
from trillora.config import choice_in_stage, dump_resolved, resolve, still_open
from trillora.data.batches import Batches
from trillora.data.questions import Question
from trillora.durable import remove_unfinished
from trillora.engine.step import TrainState, initial_state, next_stage
from trillora.errors import TrilloraError
from trillora.events import Alarm, Chosen, Listener, Note, Progress, print_nothing
from trillora.hardware import peak_tflops
from trillora.health import Health
from trillora.identity import differences, fixed_options, refuse, text_digest, weights_digest
from trillora.loop import Diverged, Position, Run, StageLoop
from trillora.masking import mask_settings, mask_values
from trillora.measure import Evaluator, Sampler, can_sample, sample_questions
from trillora.mesh import find_devices, join_cluster, remember_programs, same_everywhere
from trillora.model.adapters import check_changes_something, check_written, read_adapter
from trillora.model.layout import Tree
from trillora.model.limits import check_rows, why_not_decode
from trillora.model.lora import initial_adapter
from trillora.model.source import find_model, load_config, load_tokenizer, weight_files
from trillora.model.weights import load_weights
from trillora.prompts import Prompts, configured_stops
from trillora.recipe import ModelSection, Recipe, seconds_of, stages_of
from trillora.run_folder import RunFolder, losses
from trillora.run_lock import hold
from trillora.snapshot import ADAPTER_FILES, METRICS_FILE, WEIGHTS_FILE, from_files, make_copier, read_facts
from trillora.stage_data import StageData, evaluation_batches, read_stage
from trillora.stopping import Interrupted, Stop
from trillora.storage import LocalStorage, open_storage
from trillora.trackers import tracking_listener
from trillora.version import __version__

LIBRARIES = ("jax", "torch", "transformers", "torchax")


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves."""

    run: Path
    adapter: Path | None  # None where it was stopped before its end
    losses: tuple[float, ...]  # of every step since the beginning, also by earlier processes
    num_compiles: int  # of the training step, by this process
    stopped: str | None = None  # why it ended early; the same call goes on


@dataclass(frozen=True)
class OpenModel:
    """A model's files, read as far as no weights are needed."""

    folder: Path
    config: Any
    tokenizer: Any

    @classmethod
    def open(cls, model: ModelSection) -> OpenModel:
        trusted = model.trust_remote_code
        folder = find_model(model.name, revision=model.revision, trust_remote_code=trusted)
        return cls(folder, load_config(folder, trust_remote_code=trusted), load_tokenizer(folder))


def train(
    recipe: Recipe, out: Path, *, listener: Listener = print_nothing, accept_changes: bool = False
) -> TrainResult:
    """Fine-tune as the recipe says, or go on with it; everything is written into the run's folder."""
    join_cluster()
    limit = recipe.train.time_limit
    stop = Stop(seconds_of(limit) if limit else None)
    is_writer = jax.process_index() == 0
    folder = RunFolder(out, writes=is_writer, listener=listener)
    if folder.is_finished:
        raise TrilloraError(
            "This folder already holds a finished run.", where=str(out), do="choose another --out, or remove it"
        )
    with stop.listening(), hold(out) if is_writer else contextlib.nullcontext():
        try:
            return _Training(recipe, folder, stop, listener, accept_changes).run()
        except Interrupted as signal:
            listener(Note(f"Stopped by {signal} before the first step of this start; nothing was lost"))
            return TrainResult(out, None, tuple(losses(folder.metrics_file)), 0, stopped=str(signal))


class _Training:
    """One process's part of a run."""

    def __init__(self, recipe: Recipe, folder: RunFolder, stop: Stop, listener: Listener, accept_changes: bool) -> None:
        self._recipe, self._folder, self._stop, self._listener = recipe, folder, stop, listener
        self._accept_changes = accept_changes
        self._checkpoints = Checkpoints(open_storage(recipe.train.checkpoint_to or folder.path / "checkpoints"))

    def run(self) -> TrainResult:
        recipe, listener = self._recipe, self._listener
        remember_programs(cache_root() / "programs")
        hardware, model = recipe.hardware, recipe.model
        devices = find_devices(hardware.backend, None if hardware.devices == "auto" else hardware.devices)
        listener(Note(f"Model {model.name}"))
        opened = OpenModel.open(model)
        config = opened.config
        with ThreadPoolExecutor(1) as beside:
            weights: Future[str] = beside.submit(weights_digest, opened.folder, weight_files(opened.folder))
            saved = self._newest()
            facts = read_facts(saved[1]) if saved else None
            stages = self._read_stages(opened, facts)
            identity = {"model": weights.result(), "tokenizer": _tokenizer_digest(opened.tokenizer)}
        for stage in stages:
            identity |= stage.identity()
        if saved and facts:
            self._check_unchanged(facts, identity, saved[0])

        num_steps = sum(stage.num_steps for stage in stages)
        position = (
            Position.from_dict(facts["position"])
            if facts
            else Position(Health(math.log(config.get_text_config().vocab_size)))
        )
        kept = still_open(recipe, _kept_choices(facts, devices))
        plans, choices = self._plan(stages, config, devices, kept, first=position.stage)
        stages = [dataclasses.replace(stage, recipe=plan.recipe) for stage, plan in zip(stages, plans, strict=True)]
        resolved = resolve(recipe, choices)
        self._write_facts(resolved, choices, stages, plans[-1].assembly, identity, opened)
        checkpointed = {
            "identity": identity,
            "options": mask_values(fixed_options(resolved)),
            "choices": [[c.path, c.value, c.reason] for c in choices],
            "devices": _describe_devices(devices),
            "libraries": _libraries(),
            "num_steps": num_steps,
        }
        base = read_base(opened.folder, plans[-1].assembly, listener)
        self._folder.start_metrics(saved[1][METRICS_FILE] if saved else b"")
        config_for_trackers = mask_values(resolved.model_dump(mode="json"))
        with (
            self._tracking(position.global_step + 1, config_for_trackers) as told,
            Saver(self._checkpoints, told) as saver,
        ):
            run = Run(
                folder=self._folder,
                listener=told,
                stop=self._stop,
                checkpoints=self._checkpoints,
                saver=saver,
                keep_checkpoints=recipe.train.keep_checkpoints,
                assembly=plans[-1].assembly,
                copy=make_copier(plans[-1].assembly),
                facts=checkpointed,
                base_name=model.name,
                num_steps=num_steps,
                flops_per_token=_flops_share(base, devices),
            )
            return self._run_stages(run, stages, plans, base, position, saved, opened)

    def _run_stages(
        self,
        run: Run,
        stages: list[StageData],
        plans: list[Plan],
        base: Tree,
        position: Position,
        saved: tuple[int, dict[str, bytes]] | None,
        opened: OpenModel,
    ) -> TrainResult:
        """What is left of the run, stage after stage, each from where the one before ended."""
        seed = self._recipe.train.seed
        num_compiles, stopped, state = 0, None, None
        self._folder.add_history("resumed" if saved else "started", position.global_step)
        try:
            for number in range(position.stage, len(stages)):
                stage, plan = stages[number], plans[number]
                assembly = plan.assembly
                if state is None and saved:
                    state = from_files(saved[1], assembly, where=self._checkpoints.where(saved[0]))
                    run.listener(Note(f"Going on from step {position.global_step} of {run.num_steps}"))
                elif state is None:
                    state = place_state(assembly, seed)
                programs = compile_lengths(plan, stage.batches, run.listener)
                num_compiles += plan.num_compiles + len(programs) - 1
                measures = self._measures(run, stage, assembly, base, opened)
                state, stopped = StageLoop(run, stage, assembly, programs, base, position, *measures).train(state)
                if stopped is None:
                    follows = stages[number + 1] if number + 1 < len(stages) else None
                    position.next_stage(is_end=follows is None)
                    state = place_next(
                        state, assembly, seed, number + 1, restart=bool(follows and follows.restarts_optimizer)
                    )
                    run.save(state, position)
                    stopped = self._stop.reason() if follows else None
                if stopped is not None:
                    break
        except Diverged as error:
            self._folder.add_history("diverged", position.global_step, error.what)
            run.update_report()
            raise
        run.saver.wait()
        done = tuple(losses(self._folder.metrics_file))
        if stopped is not None:
            self._folder.add_history("stopped", position.global_step, stopped)
            run.update_report()
            self._check_saved(run.saver)
            run.listener(Note(f"Stopped at step {position.global_step} of {run.num_steps} by {stopped}; saved"))
            return TrainResult(self._folder.path, None, done, num_compiles, stopped)
        adapter = self._write_adapter(run, position, stages[-1])
        self._folder.add_history("finished", position.global_step)
        run.update_report()
        return TrainResult(self._folder.path, adapter, done, num_compiles)

    def _newest(self) -> tuple[int, dict[str, bytes]] | None:
        """The newest valid checkpoint. What was half-written is removed first."""
        if jax.process_index() == 0:
            self._checkpoints.clean()
            remove_unfinished(self._folder.path)
        found = self._checkpoints.newest_valid(self._listener)
        if found is None and (steps := self._checkpoints.steps()):
            raise TrilloraError(
                f"Every checkpoint of this run is damaged ({len(steps)}), and it will not start over by itself.",
                where=self._checkpoints.where(steps[-1]),
                do="bring one back from a copy; or, to start anew, remove the folder or choose another --out",
            )
        if not same_everywhere(found[0] if found else -1):
            raise TrilloraError(
                "The processes of this run do not see the same checkpoints.",
                where="train.checkpoint_to",
                do="give a folder or an address that all of them can read, as gs://bucket/run",
            )
        return found

    def _read_stages(self, opened: OpenModel, facts: dict[str, Any] | None) -> list[StageData]:
        recipe = self._recipe
        if facts:  # the date a template writes was chosen at the first start
            dates = [Chosen(*choice) for choice in facts["choices"] if choice[0].endswith("data.today")]
            recipe = resolve(recipe, still_open(recipe, dates))
        stages = []
        for stage in stages_of(recipe):
            check_rows(opened.config, stage.recipe.train.sequence_length, stage.recipe.data.pack)
            stages.append(read_stage(stage, opened.tokenizer, self._listener))
        return stages

    def _check_unchanged(self, facts: dict[str, Any], identity: dict[str, str], step: int) -> None:
        chosen = [Chosen(*choice) for choice in facts["choices"]]
        recipe = resolve(self._recipe, still_open(self._recipe, chosen))
        now = {**identity, **mask_values(fixed_options(recipe))}
        before = {**facts["identity"], **facts["options"]}
        if (changed := differences(before, now)) and not self._accept_changes:
            raise refuse(changed, self._folder.path, step)
        for change in changed:
            self._listener(Alarm(f"Going on although {change}"))
        for change in differences(facts["libraries"], _libraries()):
            self._listener(Note(f"Since the checkpoint {change}: results may differ in the last digits"))

    def _plan(
        self, stages: list[StageData], config: Any, devices: list[Any], kept: list[Chosen], first: int
    ) -> tuple[list[Plan], list[Chosen]]:
        """Every `auto` decided and every step compiled before the first one runs. The stage with the longest rows
        decides for all what the base looks like and how much is recomputed."""
        recipe = resolve(self._recipe, kept)
        choices = [*kept]

        def decide(number: int, made: Sequence[Chosen]) -> None:
            nonlocal recipe
            new = [choice_in_stage(recipe, number, choice) for choice in made]
            new = [choice for choice in new if choice.path not in {c.path for c in choices}]
            choices.extend(new)
            recipe = resolve(recipe, new)

        for number, stage in enumerate(stages):
            decide(number, stage.settled)
        num_steps = sum(stage.num_steps for stage in stages)
        if recipe.evaluate.every == "auto":
            every = Chosen("evaluate.every", max(1, math.ceil(num_steps / 10)), f"ten times in {num_steps} steps")
            decide(0, [every])
        plans: dict[int, Plan] = {}
        left = range(min(first, len(stages) - 1), len(stages))
        for number in sorted(left, key=lambda n: -stages[n].recipe.train.sequence_length):
            of_stage = stages_of(recipe)[number].recipe
            plans[number] = choose(of_stage, config, devices, stages[number].num_steps, self._listener)
            decide(number, plans[number].choices)
        return [plans.get(number, plans[max(plans)]) for number in range(len(stages))], choices

    def _write_facts(
        self,
        resolved: Recipe,
        choices: list[Chosen],
        stages: list[StageData],
        assembly: Assembly,
        identity: dict[str, str],
        opened: OpenModel,
    ) -> None:
        """`resolved.yaml` and `run.json`: what this run is made of."""
        model, mesh = assembly.model, assembly.mesh
        first_steps = [1 + sum(stage.num_steps for stage in stages[:number]) for number in range(len(stages))]
        facts = {
            "format": 1,
            "trillora": __version__,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": {
                "name": resolved.model.name,
                "num_parameters": sum(math.prod(leaf.shape) for leaf in model.layout.values()),
                "num_trained": sum(math.prod(leaf.shape) for leaf in model.adapter_layout.values()),
                "folder": opened.folder.name,
            },
            "environment": {
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                **_libraries(),
                "backend": mesh.devices.flat[0].platform,
                "device": mesh.devices.flat[0].device_kind,
                "num_devices": mesh.size,
                "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            },
            "identity": identity,
            "num_steps": sum(stage.num_steps for stage in stages),
            "stages": [stage.facts(opened.tokenizer, first) for stage, first in zip(stages, first_steps, strict=True)],
        }
        self._folder.write("resolved.yaml", mask_settings(dump_resolved(resolved, choices)))
        self._folder.write("run.json", json.dumps(mask_values(facts), indent=1) + "\n")

    @contextlib.contextmanager
    def _tracking(self, first_step: int, config: dict[str, Any]) -> Iterator[Listener]:
        if jax.process_index() != 0:
            yield self._listener
            return
        track, folder = self._recipe.track, self._folder.path
        with tracking_listener(folder, first_step, track.services, track.project, config, self._listener) as listener:
            yield listener

    def _measures(
        self, run: Run, stage: StageData, assembly: Assembly, base: Tree, opened: OpenModel
    ) -> tuple[Evaluator | None, Sampler | None, list[Question]]:
        """What the stage's recipe asks to be measured, as far as it can be."""
        options, tokenizer = stage.recipe.evaluate, opened.tokenizer
        rows = stage.recipe.train.micro_batch_size
        assert rows != "auto"
        batches = evaluation_batches(stage, rows)
        evaluator = None
        if batches is not None:
            run.listener(Note(f"Compiling the evaluation: {len(batches.documents)} rows kept out of training"))
            evaluator = Evaluator(assembly, batches)
        wanted = options.prompts or (options.samples and stage.evaluation is not None)
        if not wanted:
            return evaluator, None, []
        if (reason := why_not_decode(opened.config)) or not can_sample():
            run.listener(Note(f"No samples: {reason or 'a run of several processes writes none'}"))
            return evaluator, None, []
        template = stage.template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)
        stops = configured_stops(opened.folder, opened.config)
        prompts = Prompts(tokenizer, template=template, today=stage.recipe.data.today, stops=stops)
        if options.prompts:
            questions = [Question(tuple(prompts.encode(prompt)), ()) for prompt in options.prompts]
        else:
            assert stage.evaluation is not None
            questions = sample_questions(stage.evaluation, options.samples)
        run.listener(Note(f"Samples: {len(questions)} prompts are answered at every evaluation"))
        return evaluator, Sampler(assembly, base, prompts, options.max_tokens), questions

    def _write_adapter(self, run: Run, position: Position, stage: StageData) -> Path | None:
        """The adapter of the best evaluation, or of the last step, in PEFT's format: written whole and read back."""
        folder = self._folder.path / "adapter"
        if jax.process_index() != 0:
            return folder
        self._check_saved(run.saver)
        step = position.global_step
        if stage.recipe.evaluate.keep_best and stage.evaluation is not None and position.best_step is not None:
            step = position.best_step
        files = self._checkpoints.read(step)
        kept = {name: files[name] for name in ADAPTER_FILES}
        check_changes_something(read_adapter(kept[WEIGHTS_FILE]), str(folder))
        if stage.template is not None:
            # What the adapter has learnt to answer is not what the base's tokenizer would write.
            kept["chat_template.jinja"] = stage.template.encode()
        LocalStorage(self._folder.path).write("adapter", sealed(step, kept))
        check_written(folder, kept)
        best = "" if step == position.global_step else f", that of step {step}, the best of the evaluations"
        run.listener(Note(f"Adapter written to {folder}{best}"))
        return folder

    def _check_saved(self, saver: Saver) -> None:
        """A run may go on without a checkpoint; it may not end without one."""
        if saver.failure is not None:
            raise TrilloraError(
                f"The last state could not be saved: {saver.failure}.",
                where=self._checkpoints.where(0).rpartition("/")[0],
                do="make room there, and give the same command again: it goes on from the last checkpoint",
            )


def read_base(folder: Path, assembly: Assembly, listener: Listener) -> Tree:
    def progress(done: int, total: int) -> None:
        listener(Progress("Loading weights", done, total))

    model = assembly.model
    return load_weights(folder, model.module, model.layout, assembly.base_shardings, progress=progress)


def place_state(assembly: Assembly, seed: int) -> TrainState:
    """The state before the first step, on the devices."""
    adapter = initial_adapter(assembly.model.adapter_layout, seed)
    make = jax.jit(lambda a: initial_state(a, assembly.optimizer, seed), out_shardings=_shardings(assembly))
    return make(adapter)


def place_next(state: TrainState, assembly: Assembly, seed: int, stage: int, *, restart: bool) -> TrainState:
    """The state before the first step of a later stage."""

    def make(state: TrainState) -> TrainState:
        optimizer = assembly.optimizer.init(state.adapter) if restart else state.optimizer
        return next_stage(state.adapter, optimizer, seed, stage)

    return jax.jit(make, out_shardings=_shardings(assembly), donate_argnums=0)(state)


def compile_lengths(plan: Plan, batches: Batches, listener: Listener) -> dict[int, Any]:
    """A compiled step for every row length of the batches; the plan brings the longest."""
    longest = batches.sequence_length
    if batches.lengths != [longest]:
        names = ", ".join(map(str, batches.lengths))
        listener(Note(f"{len(batches.lengths)} programs in all, for rows of {names} tokens"))
    others = {length: plan.assembly.compile(length) for length in batches.lengths if length != longest}
    return {longest: plan.compiled, **others}


def _shardings(assembly: Assembly) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)


def _kept_choices(facts: dict[str, Any] | None, devices: list[Any]) -> list[Chosen]:
    """What was chosen at the first start stands, so that a continued run is the same program; on other devices only
    what the stored state depends on."""
    if facts is None:
        return []
    choices = [Chosen(*choice) for choice in facts["choices"]]
    if facts["devices"] == _describe_devices(devices):
        return choices
    return [c for c in choices if c.path == "engine.layers" or c.path.endswith("data.today")]


def _describe_devices(devices: list[Any]) -> str:
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def _libraries() -> dict[str, str]:
    return {name: metadata.version(name) for name in LIBRARIES}


def _tokenizer_digest(tokenizer: Any) -> str:
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return text_digest(tokenizer.backend_tokenizer.to_str() + template)


def _flops_share(base: Tree, devices: list[Any]) -> float:
    """Arithmetic of one token, as a share of a second of all devices: two operations a weight forwards and two
    backwards, for the base itself has no gradient. 0 where the speed of the devices is not known."""
    peak = peak_tflops(devices[0].device_kind)
    if peak is None:
        return 0.0
    return 4 * sum(array.size for array in base.values() if array.ndim >= 2) / (peak * 1e12 * len(devices))
