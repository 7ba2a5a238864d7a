"""Every `auto` of a recipe, decided once, with the reason a person is told.

What the shapes and the devices tell is decided first. How much to recompute and how many rows to take at once are then
tried on the compiler itself: the first that fits the memory wins, in the order fastest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import psutil

from trillora.assembly import Assembly, assemble
from trillora.config import resolve
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note
from trillora.mesh import MeshShape, make_mesh
from trillora.recipe import StageRecipe

GIB = 2**30
BASE_SHARE = 0.25  # of a device's memory: up to here the base is copied to every device rather than split
REMAT_ORDER = ("none", "linear", "full")  # fastest first
USABLE = 0.97  # of the device's limit; the rest is for fragments
# Logits of one chunk of the loss: 2**27 numbers are half a GiB in float32; a CPU's caches want less.
CHUNK_LOGITS = {"cpu": 2**25}


@dataclass(frozen=True)
class Plan:
    """A recipe without `auto`, and the compiled step it led to."""

    recipe: StageRecipe
    choices: tuple[Chosen, ...]
    assembly: Assembly
    compiled: Any
    num_compiles: int


def choose(recipe: StageRecipe, config: Any, devices: list[Any], num_steps: int, listener: Listener) -> Plan:
    """Decide, compile, and say so."""
    choices = [*by_hardware(recipe, config, devices)]
    for choice in choices:
        listener(choice)
    recipe = resolve(recipe, choices)
    shape = recipe.hardware.mesh
    assert shape != "auto"
    mesh = make_mesh(devices, MeshShape(shape.data, shape.fsdp, shape.tensor))
    limit = memory_limit(devices)
    tried: list[str] = []
    for attempt in _attempts(recipe, mesh.shape["data"] * mesh.shape["fsdp"]):
        listener(Note(f"Compiling the training step ({_describe(attempt, recipe)})"))
        candidate = resolve(recipe, attempt)
        assembly = assemble(candidate, config, mesh, num_steps)
        compiled, needed = _compile(assembly)
        if compiled is not None and (limit is None or needed <= limit * USABLE):
            chosen = [Chosen(c.path, c.value, _why(c, needed, limit, tried)) for c in attempt]
            for choice in chosen:
                listener(choice)
            return Plan(candidate, (*choices, *chosen), assembly, compiled, len(tried) + 1)
        tried.append(f"{_describe(attempt, recipe)}: {_gib(needed)}")
    raise TrilloraError(
        f"The run does not fit: {_gib(limit)} of memory a device. Tried {'; '.join(tried)}.",
        where="train",
        do="use a shorter train.sequence_length, a smaller lora.rank, more devices, or leave engine.remat and "
        "train.micro_batch_size on auto",
    )


def by_hardware(recipe: StageRecipe, config: Any, devices: list[Any]) -> Iterator[Chosen]:
    """What devices and shapes decide without compiling."""
    platform = devices[0].platform
    num_devices = len(devices)
    text = config.get_text_config()
    if recipe.hardware.backend == "auto":
        yield Chosen("hardware.backend", platform, f"what jax found here: {devices[0].device_kind}")
    if recipe.hardware.devices == "auto":
        yield Chosen("hardware.devices", num_devices, "all there are")
    dtype = recipe.model.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
        yield Chosen("model.dtype", dtype, f"the fastest format with enough range on {platform}")
    if recipe.hardware.mesh == "auto":
        shape, reason = choose_mesh(
            num_devices, recipe.train.batch_size, _base_bytes(text, dtype), memory_limit(devices)
        )
        yield Chosen("hardware.mesh", {"data": shape.data, "fsdp": shape.fsdp, "tensor": shape.tensor}, reason)
    if recipe.engine.layers == "auto":
        layers = "unroll" if platform == "gpu" else "scan"
        reason = "fastest on GPUs" if layers == "unroll" else f"compiles one layer instead of all; {platform}"
        yield Chosen("engine.layers", layers, reason)
    if recipe.engine.attention == "auto":
        kernel = {"tpu": "splash", "gpu": "cudnn" if dtype == "bfloat16" else "xla"}.get(platform, "xla")
        yield Chosen("engine.attention", kernel, f"the kernel for {dtype} on {platform}")
    if recipe.engine.loss_chunk == "auto":
        tokens = 2 ** int(math.log2(max(CHUNK_LOGITS.get(platform, 2**27) // text.vocab_size, 128)))
        yield Chosen("engine.loss_chunk", tokens, f"of {text.vocab_size} logits each; whole logits are never held")


def choose_mesh(num_devices: int, batch_size: int, base_bytes: int, limit: float | None) -> tuple[MeshShape, str]:
    """Rows over as many devices as divide the batch, matrices over the rest; the base split only if it must be."""
    row_shards = math.gcd(batch_size, num_devices)
    tensor = num_devices // row_shards
    if num_devices == 1:
        return MeshShape(), "one device"
    small = limit is None or base_bytes / tensor <= BASE_SHARE * limit
    shape = MeshShape(data=row_shards, tensor=tensor) if small else MeshShape(fsdp=row_shards, tensor=tensor)
    split = "is copied to every device" if small else "is split"
    reason = (
        f"a batch of {batch_size} rows goes over {row_shards} of {num_devices}; the base ({_gib(base_bytes)}) {split}"
    )
    return shape, reason


def memory_limit(devices: list[Any]) -> float | None:
    """Bytes a device may use; virtual CPU devices share what the machine has free."""
    if devices[0].platform == "cpu":
        local = [d for d in devices if d.process_index == jax.process_index()]
        return psutil.virtual_memory().available / max(len(local), 1)
    stats = devices[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _base_bytes(config: Any, dtype: str) -> int:
    """A rough count from the configuration: good enough to choose between copying and splitting."""
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = _largest(config, "intermediate_size") or 4 * width
    experts = _largest(config, "num_local_experts", "num_experts", "n_routed_experts") or 1
    parameters = 2 * config.vocab_size * width + layers * (4 * width * width + 3 * width * inner * experts)
    return parameters * (4 if dtype == "float32" else 2)


def _largest(config: Any, *names: str) -> int:
    """The first of these options that is set; the largest where it has a value for every layer."""
    value = next((v for v in (getattr(config, name, None) for name in names) if v), 0)
    return max(value) if isinstance(value, list | tuple) else int(value)


def _attempts(recipe: StageRecipe, row_shards: int) -> Iterator[list[Chosen]]:
    """Ways to fill the remaining `auto`s, fastest first. A micro-batch has a row for every device or is refused."""
    train = recipe.train
    if train.batch_size % row_shards:
        raise TrilloraError(
            f"{train.batch_size} rows cannot be spread evenly over {row_shards} devices.",
            where="train.batch_size",
            do=f"use a multiple of {row_shards}, or leave hardware.mesh on auto",
        )
    if train.micro_batch_size == "auto":
        halvings = [train.batch_size // 2**k for k in range(20) if train.batch_size % 2**k == 0]
        sizes: list[int | None] = [size for size in halvings if size % row_shards == 0]
    elif train.micro_batch_size % row_shards:
        raise TrilloraError(
            f"A micro-batch of {train.micro_batch_size} rows cannot be spread evenly over {row_shards} devices.",
            where="train.micro_batch_size",
            do=f"use a multiple of {row_shards}, or auto",
        )
    else:
        sizes = [None]
    for size in sizes:
        for remat in REMAT_ORDER if recipe.engine.remat == "auto" else (None,):
            attempt = [] if size is None else [Chosen("train.micro_batch_size", size, "")]
            yield attempt if remat is None else [*attempt, Chosen("engine.remat", remat, "")]


def _compile(assembly: Assembly) -> tuple[Any, float]:
    """The compiled step and the bytes it needs on a device; nothing where the compiler itself says it cannot fit."""
    try:
        compiled = assembly.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error):
            return None, math.inf
        raise
    return compiled, step_bytes(compiled)


def step_bytes(compiled: Any) -> float:
    """Arguments, results and everything in between, on one device."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0.0
    return float(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _describe(attempt: list[Chosen], recipe: StageRecipe) -> str:
    values = {c.path: c.value for c in attempt}
    rows = values.get("train.micro_batch_size", recipe.train.micro_batch_size)
    return f"{rows} rows at once, remat {values.get('engine.remat', recipe.engine.remat)}"


def _why(choice: Chosen, needed: float, limit: float | None, tried: list[str]) -> str:
    fits = f"needs {_gib(needed)} of {_gib(limit)} a device"
    return f"{fits}; too large: {'; '.join(tried)}" if tried else f"fastest, and {fits}"


def _gib(size: float | None) -> str:
    return "unknown" if size is None else "more than there is" if math.isinf(size) else f"{size / GIB:.2f} GiB"
