"""The models that a server offers: the base, and every adapter on it.

    serve runs/first                        -> base, first
    serve runs/skills (a run with phases)   -> base, and one model per phase
    serve MODEL --adapter A --adapter B     -> base, A, B

The base's weights are loaded once. The base and all adapters that are plain LoRA share one batch and its programs
(`adapter_stack`); the base is an adapter that changes nothing.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from trillora.devices.chips import GIB, Device
from trillora.devices.mesh import remember_programs
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files.cache_dir import cache_root
from trillora.files.user_path import user_path
from trillora.generation.generator import Generator, prompts_of, recipe_of
from trillora.generation.placement import place_adapter
from trillora.generation.prompts import Prompts
from trillora.model.adapters import fitting, load_adapter
from trillora.model.bridge import CausalLM
from trillora.model.decode import Decoder
from trillora.model.layout import Tree
from trillora.model.loading.growth import check_rows
from trillora.model.loading.rope import rope_of
from trillora.model.loading.source import base_name
from trillora.model.lora import RowsMixed, chosen_layers
from trillora.recipe.load import load_model_section
from trillora.recipe.schema import Quantize
from trillora.runs.adapter import adapter_of
from trillora.runs.files import REPORT_FILE, is_run
from trillora.runs.saved import SavedAdapter, SavedRun, find_adapter
from trillora.serving.adapter_stack import ReadAdapter, covering, place_stack, split_by_kind
from trillora.serving.engine import Engine
from trillora.serving.http.log import LOGGER
from trillora.serving.job import AnswerPiece, Job, NotFinite
from trillora.serving.lane import BatchSizes, Lane
from trillora.serving.programs import FEWEST_SLOTS, BatchShape, Compiler, ServingPrograms
from trillora.step.decisions import memory_limit

LONGEST = 4096  # slots of a row, unless the user asks for more: few conversations are longer
ROWS = {"cpu": (8, 4, 1)}  # to try, from the most
ROWS_OF_ACCELERATOR = (32, 16, 8, 4, 1)
PROMPTS_AT_ONCE = 4  # being rendered, each in a process; the processes start when they are needed
MARGIN = 0.1  # of a device's memory, for what the programs need in addition to weights and caches


@dataclass(frozen=True)
class Served:
    """One model of a server."""

    name: str
    prompts: Prompts
    num_tokens: int  # that have embeddings
    system: str = ""  # the system message that all rows of the training had


@dataclass(frozen=True)
class AdapterBatch:
    """Models that answer in one batch, in the order of their adapters in `adapter`."""

    models: tuple[str, ...]
    adapter: Tree
    programs: ServingPrograms
    num_tokens: int  # that have embeddings


@dataclass(frozen=True)
class Service:
    """All models of a server, and the engine that runs them."""

    models: dict[str, Served]
    base: str  # the name of the base
    engine: Engine
    report: Path | None  # the run's report.html

    def readable_report(self) -> Path | None:
        """The report, if there is one and it is not a link out of the run's folder."""
        if self.report is None:
            return None
        file = Path(os.path.realpath(self.report))
        return file if file.is_file() and file.is_relative_to(os.path.realpath(self.report.parent)) else None


def open_service(
    name: str,
    *,
    adapters: Sequence[str] = (),
    only_base: bool = False,
    overrides: Sequence[str] = (),
    quantize: Quantize | None = None,
    num_rows: int | None = None,
    max_length: int | None = None,
    max_waiting: int = 256,
    fewest_slots: int = FEWEST_SLOTS,
    listener: Listener = ignore_events,
) -> Service:
    """Opens a run or a model with its adapters, and starts the engine."""
    remember_programs(cache_root() / "programs")
    folder = user_path(name, where="the run or model")
    run = SavedRun.open(folder, overrides) if is_run(folder) else None
    found = {} if only_base else _adapters(run, adapters, listener)
    folders = {name: adapter.folder for name, adapter in found.items()}
    _check_positions(folders)
    _check_tokens(found)
    first = next(iter(folders.values()), None)
    generator = Generator.open(
        name,
        overrides=overrides,
        with_adapter=first is not None,
        adapter=first,
        quantize=quantize,
        listener=listener,
    )
    compiler = Compiler()
    model = run.recipe.model if run is not None else load_model_section(name, overrides)
    base = _base_id(model.name)
    models = _models(generator, base, found)
    batches = _batches(generator, base, folders, compiler, listener)
    models |= {name: replace(models[name], num_tokens=batch.num_tokens) for batch in batches for name in batch.models}
    length = _length(generator, max_length)
    shape = _fitting_shape(generator.mesh, batches[0].programs, num_rows, max_length, length)
    sizes = BatchSizes.up_to(shape.num_rows, shape.num_slots, fewest_slots)
    decode = generator.prompts.decode
    lanes = [
        Lane(batch.models, batch.programs, generator.base, batch.adapter, decode, sizes, generator.mesh)
        for batch in batches
    ]
    engine = Engine(
        lanes,
        compiler,
        num_rows=shape.num_rows,
        max_length=shape.num_slots,
        max_waiting=max_waiting,
        report=lambda error: logging.getLogger(LOGGER).error("A request failed: %s", error.what),
    )
    engine.start()
    _warm_up(engine, batches, listener)
    return Service(models, base, engine, None if run is None else run.folder / REPORT_FILE)


def _warm_up(engine: Engine, batches: Sequence[AdapterBatch], listener: Listener) -> None:
    """Generates two tokens with each set of programs: they are compiled before the first request, and they work. Of
    several models, two are asked together afterwards, as the page does: the batch that both share is compiled too."""
    listener(Note("Compiling the first programs"))
    asked: list[Sequence[str]] = []
    for batch in {id(batch.programs): batch for batch in batches}.values():
        asked += [batch.models[:1], *([batch.models[:2]] if len(batch.models) > 1 and engine.num_rows > 1 else [])]
    pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
    for models in asked:  # one after the other: the server may have one row and no queue
        while engine.num_running:  # the rows of those before
            time.sleep(0.001)
        engine.submit([Job(name, (0,), min(2, engine.max_length - 1), pieces.put) for name in models])
        num_open = len(models)
        while num_open:
            piece = pieces.get()
            if piece.error is not None and not isinstance(piece.error, NotFinite):  # fails in its own requests only
                engine.close()
                raise piece.error
            num_open -= piece.is_last


def _adapters(run: SavedRun | None, given: Sequence[str], listener: Listener) -> dict[str, SavedAdapter]:
    """The adapters by the name of their model: first the run's, then the command line's."""
    found: dict[str, SavedAdapter] = {}
    of_run = [] if run is None else [*run.several.values()] or [adapter_of(run, listener=listener)]
    for adapter in (*of_run, *map(find_adapter, given)):
        if found.setdefault(adapter.name, adapter).folder != adapter.folder:
            raise _same_name(adapter.name, found[adapter.name].folder, adapter.folder)
    return found


def _check_positions(folders: dict[str, Path]) -> None:
    """All adapters of a server share one base."""
    ropes = {name: rope_of(folder) for name, folder in folders.items()}
    first = next(iter(ropes), "")
    for name, rope in ropes.items():
        if rope != ropes[first]:
            shown = [f"{each} ({ropes[each] or 'not scaled'})" for each in (first, name)]
            raise TrilloraError(
                f"Adapters with different rotary positions cannot share a base: {shown[0]} and {shown[1]}.",
                where=str(folders[name]),
                do=f"serve {name} with a server of its own",
            )


def _check_tokens(adapters: dict[str, SavedAdapter]) -> None:
    """All adapters of a server share one tokenizer."""
    recipes = {name: recipe_of(adapter) for name, adapter in adapters.items()}
    tokens = {name: recipe.tokens or () if recipe is not None else () for name, recipe in recipes.items()}
    first = next(iter(tokens), "")
    for name, own in tokens.items():
        if list(own) != list(tokens[first]):
            shown = [f"{each} ({', '.join(list(tokens[each])[:8]) or 'none'})" for each in (first, name)]
            raise TrilloraError(
                f"Adapters with different new tokens cannot share a tokenizer: {shown[0]} and {shown[1]}.",
                where=str(adapters[name].folder),
                do=f"serve {name} with a server of its own",
            )


def _base_id(model: str) -> str:
    """The hub id of the base, or the name of its folder."""
    found = base_name(model)
    return Path(found).name if Path(found).is_dir() else found


def _num_tokens(model: CausalLM) -> int:
    """The tokens that have embeddings in the base or in the adapter."""
    new = model.lora.tokens.ids if model.lora.tokens is not None else ()
    return max(int(model.module.config.get_text_config().vocab_size), model.lora.num_tokens, *(i + 1 for i in new), 0)


def _models(generator: Generator, base: str, adapters: dict[str, SavedAdapter]) -> dict[str, Served]:
    """The base and the adapters, each with its chat template."""
    num_tokens = _num_tokens(generator.model)
    models = {base: Served(base, generator.base_prompts, num_tokens)}
    for number, (name, adapter) in enumerate(adapters.items()):
        if name in models:
            raise _same_name(name, Path(base), adapter.folder)
        prompts = generator.prompts if number == 0 else prompts_of(adapter, generator.base_prompts)
        models[name] = Served(name, prompts, num_tokens, adapter.system if prompts.has_template else "")
    for served in models.values():
        served.prompts.serve_strangers(PROMPTS_AT_ONCE)
    return models


def _batches(
    generator: Generator, base: str, folders: dict[str, Path], compiler: Compiler, listener: Listener
) -> list[AdapterBatch]:
    """One batch for the base and all adapters that can share it, and one for each of the others."""
    model, mesh = generator.model, generator.mesh
    shared, alone = split_by_kind(_read(generator, folders), model)
    batches: list[AdapterBatch] = []
    known: list[tuple[CausalLM, ServingPrograms]] = []

    def programs_of(own: CausalLM, adapter: Tree, num_adapters: int = 1) -> ServingPrograms:
        return ServingPrograms(Decoder(own), generator.base, adapter, mesh, compiler, num_adapters)

    if shared:
        own = model.with_lora(covering(shared))
        names, stack = (base, *(adapter.name for adapter in shared)), place_stack(shared, own, mesh)
        try:
            batches.append(AdapterBatch(names, stack, programs_of(own, stack, len(names)), _num_tokens(own)))
        except RowsMixed:
            alone = [*((adapter, "this model mixes the rows of a batch") for adapter in shared), *alone]
    if not batches:
        known.append((model, programs_of(model, generator.adapter)))
        unchanged = generator.neutral_adapter if folders else generator.adapter
        batches.append(AdapterBatch((base,), unchanged, known[0][1], _num_tokens(model)))
    for adapter, reason in alone:
        listener(Note(f"{adapter.name} takes turns with the other models, in a batch of its own: {reason}"))
        where, spec = str(adapter.folder), adapter.spec
        alike = next((k for k in known if replace(k[0].lora, dropout=0.0) == replace(spec, dropout=0.0)), None)
        if alike is None:
            with fitting(where):
                own = model.with_lora(spec)
            alike = (own, programs_of(own, place_adapter(adapter.matrices, own, mesh, where=where)))
            known.append(alike)
        placed = place_adapter(adapter.matrices, alike[0], mesh, where=where)
        batches.append(AdapterBatch((adapter.name,), placed, alike[1], _num_tokens(alike[0])))
    return batches


def _read(generator: Generator, folders: dict[str, Path]) -> list[ReadAdapter]:
    """The adapters. The generator has read the first one."""
    read: list[ReadAdapter] = []
    for name, folder in folders.items():
        if not read:
            spec, matrices = generator.model.lora, {key: np.asarray(a) for key, a in generator.adapter.items()}
        else:
            spec, matrices = load_adapter(folder)
            check_rows(generator.prompts.tokenizer, spec, str(folder))
        with fitting(str(folder)):
            read.append(ReadAdapter(name, folder, spec, matrices, chosen_layers(generator.model.module, spec)))
    return read


def _length(generator: Generator, wanted: int | None) -> int:
    """The most tokens of a prompt and its answer."""
    limit = generator.longest
    rope = getattr(generator.model.module.config.get_text_config(), "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # The frequencies change for the whole batch when one sequence exceeds this length.
        if one.get("rope_type") == "longrope" and (original := one.get("original_max_position_embeddings")):
            limit = min(limit or original, original)
    if wanted is not None and limit is not None and wanted > limit:
        what = f"The model reads at most {limit} tokens, not {wanted}."
        raise TrilloraError(what, where="--max-length", do=f"use --max-length {limit} or less")
    return wanted or min(limit or LONGEST, LONGEST)


def _fitting_shape(
    mesh: Mesh, programs: ServingPrograms, rows: int | None, given_length: int | None, length: int
) -> BatchShape:
    """The rows and slots of the caches: as given, or the most that fit into memory."""
    devices = list(mesh.devices.flat)
    platform = devices[0].platform
    free = _free_bytes(devices)
    all_rows = (rows,) if rows is not None else ROWS.get(platform, ROWS_OF_ACCELERATOR)
    lengths = (length,) if given_length is not None else tuple(length // 2**i for i in range(4) if length >= 2**i)
    shapes = [BatchShape(r, n) for n in lengths for r in all_rows]
    many = [shape for shape in shapes if shape.num_rows >= 4]
    for shape in (*many, *shapes):
        # While a batch changes its shape, the old and the new one exist.
        if free is None or 2 * programs.num_bytes(shape) <= free:
            return shape
    least = shapes[-1]
    assert free is not None
    needed = 2 * programs.num_bytes(least) / GIB
    raise TrilloraError(
        f"The cache for {least.num_rows} rows of {least.num_slots} tokens needs {needed:.2f} GiB, but only "
        f"{free / GIB:.2f} GiB are free.",
        where="--rows and --max-length",
        do="use fewer --rows, a smaller --max-length or --quantize",
    )


def _free_bytes(devices: Sequence[Device]) -> float | None:
    limit = memory_limit(devices)
    if limit is None or devices[0].platform == "cpu":  # there, the limit is what is free now
        return None if limit is None else limit * (1 - MARGIN)
    used = (devices[0].memory_stats() or {}).get("bytes_in_use", 0)
    return limit * (1 - MARGIN) - used


def _same_name(name: str, one: Path, other: Path) -> TrilloraError:
    return TrilloraError(
        f"Two models would have the name {name}.",
        where=f"{one} and {other}",
        do="rename one of the folders, or serve them one by one",
    )
