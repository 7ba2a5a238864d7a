"""Every `auto` of a recipe, decided once, with the reason a person is told.

What the shapes and the devices tell is decided first. How much to recompute and how many rows to take at once are then
tried on the compiler itself: the first that fits the memory wins, in the order fastest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import psutil

from trillora.devices.chips import chip_of
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note
from trillora.recipe.load import resolve
from trillora.recipe.schema import StageRecipe
from trillora.step.build import Assembly, assemble

GIB = 2**30
BASE_SHARE = 0.25  # of a device's memory: up to here the base is copied to every device rather than split
REMAT_ORDER = ("none", "linear", "full")  # fastest first
USABLE = 0.97  # of the device's limit; the rest is for fragments
HOPELESS = 1.4  # times the limit, by a guess whose error is far smaller
# Logits of one chunk of the loss: 2**27 numbers are half a GiB in float32; a CPU's caches want less.
CHUNK_LOGITS = {"cpu": 2**25}


@dataclass(frozen=True)
class Attempt:
    """One way to run the step, and what the compiler said of it."""

    what: str
    needed: float  # bytes a device; infinite where the compiler gave up before it knew
    fits: bool

    def __str__(self) -> str:
        return f"{self.what}: {_gib(self.needed)}"


@dataclass(frozen=True)
class Plan:
    """A recipe without `auto`, and the compiled step it led to."""

    recipe: StageRecipe
    choices: tuple[Chosen, ...]
    assembly: Assembly
    compiled: Any
    tried: tuple[Attempt, ...]

    @property
    def num_compiles(self) -> int:
        return len(self.tried)


class DoesNotFit(TrilloraError):
    """No way to run the step that the recipe leaves open fits the devices."""

    def __init__(self, what: str, tried: tuple[Attempt, ...]) -> None:
        super().__init__(
            what,
            where="train",
            do="use a shorter train.sequence_length, a smaller lora.rank, more devices, or leave engine.remat and "
            "train.micro_batch_size on auto",
        )
        self.tried = tried


Compiler = Callable[[Assembly], tuple[Any, float]]


def compile_step(assembly: Assembly) -> tuple[Any, float]:
    """The compiled step and the bytes it needs on a device; nothing where the compiler itself says it cannot fit."""
    try:
        compiled = assembly.compile()
    except jax.errors.JaxRuntimeError as error:
        if says_out_of_memory(error):
            return None, math.inf
        raise
    return compiled, step_bytes(compiled)


@dataclass(frozen=True)
class Candidate:
    """One way to run the step that the recipe leaves open."""

    recipe: StageRecipe
    chosen: list[Chosen]
    assembly: Assembly

    def __str__(self) -> str:
        return f"{self.recipe.train.micro_batch_size} rows at once, remat {self.recipe.engine.remat}"


def choose(
    recipe: StageRecipe,
    config: Any,
    devices: list[Any],
    num_steps: int,
    listener: Listener,
    compiler: Compiler = compile_step,
    mesh_devices: list[Any] | None = None,
    guess: Callable[[Assembly], float] | None = None,
) -> Plan:
    """Decide, compile, and say so.

    The devices may be of a slice that is not here: whoever asks beforehand gives them, and a compiler that goes as far
    as it needs; where there is none for such devices, also others to stand in their places on the mesh. What is
    hopeless by `guess`, bytes without compiling, is not compiled.
    """
    choices = [*by_hardware(recipe, config, devices)]
    for choice in choices:
        listener(choice)
    recipe = resolve(recipe, choices)
    shape = recipe.hardware.mesh
    assert shape != "auto"
    mesh = make_mesh(mesh_devices or devices, MeshShape(shape.data, shape.fsdp, shape.tensor))
    limit = memory_limit(devices)

    def way(size: int | None, remat: str | None) -> Candidate:
        chosen = _chosen(size, remat)
        filled = resolve(recipe, chosen)
        return Candidate(filled, chosen, assemble(filled, config, mesh, num_steps))

    tried: list[Attempt] = []
    for size in _micro_batches(recipe, mesh.shape["data"] * mesh.shape["fsdp"]):
        remats = REMAT_ORDER if recipe.engine.remat == "auto" else (None,)
        ways: Iterable[Candidate] = (way(size, remat) for remat in remats)
        if guess is not None and limit is not None:
            ways, hopeless = _not_hopeless((way(size, remat) for remat in reversed(remats)), guess, limit)
            tried += hopeless
        for each in ways:
            listener(Note(f"Compiling the training step ({each})"))
            compiled, needed = compiler(each.assembly)
            # A checkpoint's copy of the state lies beside the step.
            fits = compiled is not None and (limit is None or needed + each.assembly.state_bytes <= limit * USABLE)
            before = tuple(tried)
            tried.append(Attempt(str(each), needed, fits))
            if fits:
                made = [Chosen(c.path, c.value, _why(c, needed, limit, before)) for c in each.chosen]
                for choice in made:
                    listener(choice)
                return Plan(each.recipe, (*choices, *made), each.assembly, compiled, tuple(tried))
    raise DoesNotFit(
        f"The run does not fit: {_gib(limit)} of memory a device. Tried {'; '.join(map(str, tried))}.", tuple(tried)
    )


def _not_hopeless(
    slowest_first: Iterator[Candidate], guess: Callable[[Assembly], float], limit: float
) -> tuple[list[Candidate], list[Attempt]]:
    """The ways worth compiling, fastest first, and the one that is not: what is faster still needs still more."""
    ways: list[Candidate] = []
    for way in slowest_first:
        needed = guess(way.assembly)
        if needed > HOPELESS * limit:
            return ways, [Attempt(str(way), needed, False)]
        ways.insert(0, way)
    return ways, []


def says_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error)


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
    """Bytes a device may use; virtual CPU devices share what the machine has free. A device that is not here is known
    by its kind."""
    if devices[0].platform == "cpu":
        local = [d for d in devices if d.process_index == jax.process_index()]
        return psutil.virtual_memory().available / max(len(local), 1)
    try:
        stats = devices[0].memory_stats()
    except jax.errors.JaxRuntimeError:  # compile-only: no memory to ask
        stats = None
    if stats:
        return stats.get("bytes_limit")
    chip = chip_of(devices[0].device_kind)
    return chip.hbm_gib * GIB if chip else None


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


def _micro_batches(recipe: StageRecipe, row_shards: int) -> list[int | None]:
    """Rows to take at once, most first; None where the recipe says. A row for every device or it is refused."""
    train = recipe.train
    if train.batch_size % row_shards:
        raise TrilloraError(
            f"{train.batch_size} rows cannot be spread evenly over {row_shards} devices.",
            where="train.batch_size",
            do=f"use a multiple of {row_shards}, or leave hardware.mesh on auto",
        )
    if train.micro_batch_size == "auto":
        halvings = [train.batch_size // 2**k for k in range(20) if train.batch_size % 2**k == 0]
        return [size for size in halvings if size % row_shards == 0]
    if train.micro_batch_size % row_shards:
        raise TrilloraError(
            f"A micro-batch of {train.micro_batch_size} rows cannot be spread evenly over {row_shards} devices.",
            where="train.micro_batch_size",
            do=f"use a multiple of {row_shards}, or auto",
        )
    return [None]


def _chosen(size: int | None, remat: str | None) -> list[Chosen]:
    """What is left `auto`, filled."""
    rows = [] if size is None else [Chosen("train.micro_batch_size", size, "")]
    return rows if remat is None else [*rows, Chosen("engine.remat", remat, "")]


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


def _why(choice: Chosen, needed: float, limit: float | None, tried: Sequence[Attempt]) -> str:
    fits = f"needs {_gib(needed)} of {_gib(limit)} a device"
    return f"{fits}; too large: {'; '.join(map(str, tried))}" if tried else f"fastest, and {fits}"


def _gib(size: float | None) -> str:
    return "unknown" if size is None else "more than there is" if math.isinf(size) else f"{size / GIB:.2f} GiB"
