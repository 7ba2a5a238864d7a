"""One run, in order: recipe, model, data, step, loop, adapter."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import Mesh

from trillora.assembly import Assembly
from trillora.choices import Plan, choose
from trillora.config import Recipe, dump_resolved
from trillora.data.batches import Batches
from trillora.dataset import chat_template, open_dataset, settle
from trillora.engine.step import StepMetrics, TrainState, initial_state
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, Progress, Step, print_nothing
from trillora.mesh import find_devices, gather, join_cluster, local_rows, put_batch
from trillora.model.adapters import save_adapter
from trillora.model.layout import Tree, unstack
from trillora.model.limits import check_rows
from trillora.model.lora import initial_adapter
from trillora.model.source import find_model, load_config, load_tokenizer
from trillora.model.weights import load_weights

NUM_AHEAD = 2  # batches made before they are needed


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves."""

    run: Path
    adapter: Path
    losses: tuple[float, ...]  # of every step
    num_compiles: int


def train(recipe: Recipe, out: Path, *, listener: Listener = print_nothing) -> TrainResult:
    """Fine-tune as the recipe says; the run's folder gets `resolved.yaml`, `metrics.jsonl` and `adapter/`."""
    join_cluster()
    check_folder(out)
    hardware = recipe.hardware
    devices = find_devices(hardware.backend, None if hardware.devices == "auto" else hardware.devices)
    listener(Note(f"Model {recipe.model.name}"))
    folder = find_model(
        recipe.model.name, revision=recipe.model.revision, trust_remote_code=recipe.model.trust_remote_code
    )
    config = load_config(folder, trust_remote_code=recipe.model.trust_remote_code)
    check_rows(config, recipe.train.sequence_length, recipe.data.pack)
    tokenizer = load_tokenizer(folder)
    recipe, settled = settle(recipe, tokenizer)
    batches = read_data(recipe, tokenizer, listener)
    num_steps = recipe.train.steps or math.ceil((recipe.train.epochs or 1) * batches.steps_per_epoch)

    plan = choose(recipe, config, devices, num_steps, listener)
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "resolved.yaml").write_text(dump_resolved(plan.recipe, (*settled, *plan.choices)), "utf-8")
    programs = compile_lengths(plan, batches, listener)
    base = read_base(folder, plan.assembly, listener)
    state = place_state(plan.assembly, recipe.train.seed)

    with _metrics_file(out) as file:
        state, losses = run_steps(plan, programs, state, base, batches, num_steps, listener, file)
    adapter = write_adapter(plan, state, out, base_name=recipe.model.name)
    if recipe.data.chat_template is not None and jax.process_index() == 0:
        # What the adapter has learnt to answer is not what the base's tokenizer would write.
        (adapter / "chat_template.jinja").write_text(chat_template(recipe.data, tokenizer) or "", "utf-8")
    listener(Note(f"Adapter written to {adapter}"))
    return TrainResult(out, adapter, tuple(losses), plan.num_compiles + len(programs) - 1)


def check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise TrilloraError("A run is a folder; this is a file.", where=str(out), do="choose another --out")
    if (out / "adapter").exists():
        raise TrilloraError(
            "This folder already holds a finished run.", where=str(out), do="choose another --out, or remove it"
        )


def read_data(recipe: Recipe, tokenizer: Any, listener: Listener = print_nothing) -> Batches:
    """The batches of the training part, with what became of long rows said aloud."""
    dataset = open_dataset(recipe, tokenizer, listener)
    train = recipe.train
    batches = dataset.batches(
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        seed=train.seed,
        pack=recipe.data.pack,
        num_buckets=recipe.data.buckets,
    )
    listener(Note(f"Data {describe(batches)}"))
    return batches


def describe(batches: Batches) -> str:
    counts, lost = batches.summary(), batches.lost
    text = (
        f"{counts['documents']:,} documents in {counts['rows']:,} rows, {counts['supervised']:,} of "
        f"{counts['tokens']:,} tokens trained, {counts['padding_fraction']:.1%} padding"
    )
    if lost.num_split:
        text += f"; {lost.num_split:,} long texts split"
    if lost.num_rows:
        text += f"; {lost.num_rows:,} rows too long left out, with {lost.num_trained:,} trained tokens"
    return text


def read_base(folder: Path, assembly: Assembly, listener: Listener) -> Tree:
    def progress(done: int, total: int) -> None:
        listener(Progress("Loading weights", done, total))

    model = assembly.model
    return load_weights(folder, model.module, model.layout, assembly.base_shardings, progress=progress)


def place_state(assembly: Assembly, seed: int) -> TrainState:
    """The state before the first step, on the devices."""
    adapter = initial_adapter(assembly.model.adapter_layout, seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)
    make = jax.jit(lambda a: initial_state(a, assembly.optimizer, seed), out_shardings=shardings)
    return make(adapter)


def compile_lengths(plan: Plan, batches: Batches, listener: Listener) -> dict[int, Any]:
    """A compiled step for every row length of the batches; the plan brings the longest."""
    longest = batches.sequence_length
    if batches.lengths != [longest]:
        names = ", ".join(map(str, batches.lengths))
        listener(Note(f"{len(batches.lengths)} programs in all, for rows of {names} tokens"))
    others = {length: plan.assembly.compile(length) for length in batches.lengths if length != longest}
    return {longest: plan.compiled, **others}


def placed_batches(batches: Batches, steps: range, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """The batches of these steps on the devices; the next one is made and sent while the last one is worked on."""
    rows = local_rows(batches.batch_size, mesh)
    with ThreadPoolExecutor(1) as ahead:
        waiting: collections.deque[Future[dict[str, jax.Array]]] = collections.deque()
        for step in steps:
            waiting.append(ahead.submit(lambda s: put_batch(batches.batch(s, rows), mesh, batches.batch_size), step))
            if len(waiting) > NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def run_steps(
    plan: Plan,
    programs: dict[int, Any],
    state: TrainState,
    base: Tree,
    batches: Batches,
    num_steps: int,
    listener: Listener,
    file: TextIO | None,
) -> tuple[TrainState, list[float]]:
    """The loop. A step's metrics are read while the next one runs, so that the device never waits for the host."""
    losses: list[float] = []
    started = last = time.perf_counter()
    pending: tuple[int, StepMetrics] | None = None

    def report(step: int, metrics: StepMetrics) -> None:
        nonlocal last
        values = {name: float(value) for name, value in metrics._asdict().items()}
        now = time.perf_counter()
        rate = batches.batch_size * batches.length_of(step) / (now - last)
        last = now
        losses.append(values["loss"])
        line = {"step": step + 1, **values, "tokens_per_second": round(rate, 1), "seconds": round(now - started, 3)}
        if file is not None:
            file.write(json.dumps(line) + "\n")
            file.flush()
        listener(
            Step(step + 1, num_steps, values["loss"], values["learning_rate"], values["grad_norm"], rate, now - started)
        )

    for step, batch in enumerate(placed_batches(batches, range(num_steps), plan.assembly.mesh)):
        state, metrics = programs[batch["tokens"].shape[1]](state, base, batch)
        if pending is not None:
            report(*pending)
        pending = (step, metrics)
    if pending is not None:
        report(*pending)
    return state, losses


def write_adapter(plan: Plan, state: TrainState, out: Path, base_name: str) -> Path:
    """The trained adapter in PEFT's format."""
    model = plan.assembly.model
    whole = unstack(gather(state.adapter, plan.assembly.mesh), model.adapter_layout)
    folder = out / "adapter"
    if jax.process_index() == 0:
        save_adapter(folder, whole, model.module, model.targets, plan.assembly.spec, base_name)
    return folder


@contextlib.contextmanager
def _metrics_file(out: Path) -> Iterator[TextIO | None]:
    """`metrics.jsonl`, written by one process of the run."""
    if jax.process_index() != 0:
        yield None
        return
    with open(out / "metrics.jsonl", "w", encoding="utf-8") as file:
        yield file
