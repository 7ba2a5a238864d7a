"""Decides every `auto` of a stage, with the reason shown to the user.

What the shapes and the devices determine is decided first. Recomputation (remat) and the micro-batch size are then
found by compiling: candidates are tried from fastest to slowest, and the first one that fits in memory wins.

    plan = choose(stage.recipe, config, jax.devices(), num_steps=100, listener=print)
    plan.settings.remat, plan.tried         # "full", [micro-batch 8, remat none: 21.40 GiB, …]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from trillora.devices.chips import chip_of, generation_of
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.quantize import item_bytes
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note
from trillora.model.layout import Tree
from trillora.recipe.resolve import StepSettings, given_settings
from trillora.recipe.schema import Attention, Dtype, MeshSection, Quantize, StageRecipe
from trillora.step.build import Assembly, assemble

GIB = 2**30
REPLICATED_BASE_SHARE = 0.25  # of a device's memory: a base up to this size is copied to every device, not split
REMAT_ORDER = ("none", "linear", "full")  # fastest first
USABLE = 0.97  # of the device's memory limit; the rest is left for fragmentation
HOPELESS = 1.4  # times the limit: the estimate's error is far smaller than this
# Logits of one chunk of the loss: 2**27 float32 values are half a GiB. CPU caches prefer smaller chunks.
CHUNK_LOGITS = {"cpu": 2**25}
# For `model.quantize: auto`: what to try if the base does not fit unquantized, fastest first (docs/quantization.md). On
# a TPU, nf4 writes out each weight before its product, and int4 does not.
FASTEST_QUANTIZED: dict[str, tuple[Quantize, ...]] = {
    "tpu": ("int8", "int4"),
    "gpu": ("int8", "nf4"),
    "cpu": ("int8", "nf4"),
}
SMALL_BASE = 0.5  # of a device's memory: a base up to this size leaves enough room for training
BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4.127}


@dataclass(frozen=True)
class Attempt:
    """A candidate and the memory the compiler reported for it."""

    what: str
    needed: float  # bytes per device; infinite if the compiler gave up before it knew
    fits: bool

    def __str__(self) -> str:
        return f"{self.what}: {_gib(self.needed)}"


@dataclass(frozen=True)
class Plan:
    """The settings of a stage and the compiled step. `reasons` explains each new decision, by field name."""

    settings: StepSettings
    reasons: dict[str, str]
    assembly: Assembly
    compiled: Any
    tried: tuple[Attempt, ...]

    @property
    def num_compiles(self) -> int:
        return len(self.tried)


class DoesNotFit(TrilloraError):
    """No candidate that the recipe allows fits in the devices' memory."""

    def __init__(self, what: str, tried: tuple[Attempt, ...]) -> None:
        super().__init__(
            what,
            where="train",
            do="use model.quantize=auto, a shorter train.sequence_length, a smaller lora.rank, more devices, or leave "
            "engine.remat and train.micro_batch_size on auto",
        )
        self.tried = tried


Compiler = Callable[[Assembly], tuple[Any, float]]
Builder = Callable[[StageRecipe, StepSettings, Any, Mesh, int], Assembly]


def compile_step(assembly: Assembly) -> tuple[Any, float]:
    """The compiled step and the bytes it needs per device; (None, inf) if the compiler runs out of device memory."""
    try:
        compiled = assembly.compile()
    except jax.errors.JaxRuntimeError as error:
        if says_out_of_memory(error):
            return None, math.inf
        raise
    return compiled, step_bytes(compiled)


@dataclass(frozen=True)
class Candidate:
    """One choice of micro-batch size and remat."""

    settings: StepSettings
    assembly: Assembly


def choose(
    recipe: StageRecipe,
    config: Any,
    devices: list[Any],
    num_steps: int,
    listener: Listener,
    *,
    kept: Mapping[str, Any] | None = None,
    compiler: Compiler = compile_step,
    mesh_devices: list[Any] | None = None,
    guess: Callable[[Assembly], float] | None = None,
    build: Builder | None = None,
) -> Plan:
    """Decides what the recipe leaves open, compiles the step, and reports each decision.

    `kept` holds fields of `StepSettings` that were decided before: at the first start of a resumed run, or for another
    stage. The devices may belong to a slice that is not attached; preflight then passes its own `compiler`, and
    `mesh_devices` if only CPU devices can take their place. `guess` returns an estimate in bytes; candidates that it
    shows to be far too large are not compiled. `build` makes the step: of one adapter, or of several.
    """
    fixed = {**(kept or {}), **given_settings(recipe)}
    decisions = Decisions(fixed, listener)
    decide_by_hardware(decisions, recipe, config, devices)
    shape = decisions["mesh"]
    mesh = make_mesh(mesh_devices or devices, MeshShape(shape.data, shape.fsdp, shape.tensor, shape.adapter))
    limit = memory_limit(devices)
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    remats = (fixed["remat"],) if "remat" in fixed else REMAT_ORDER
    sizes = micro_batch_sizes(recipe.train.batch_size, fixed.get("micro_batch_size"), num_shards)

    def candidate(size: int, remat: str) -> Candidate:
        settings = StepSettings(**{**decisions.values, "micro_batch_size": size, "remat": remat})
        return Candidate(settings, (build or assemble)(recipe, settings, config, mesh, num_steps))

    attempts = decide_quantization(decisions, lambda: candidate(sizes[-1], remats[-1]), compiler, limit)
    for size in sizes:
        candidates: Iterator[Candidate] = (candidate(size, remat) for remat in remats)
        if guess is not None and limit is not None:
            slowest_first = (candidate(size, remat) for remat in reversed(remats))
            candidates, hopeless = _worth_compiling(slowest_first, guess, limit)
            attempts += hopeless
        for each in candidates:
            listener(Note(f"Compiling the training step ({each.settings})"))
            compiled, needed = compiler(each.assembly)
            # Saving a checkpoint needs room for a second copy of the state.
            fits = compiled is not None and (limit is None or needed + each.assembly.state_bytes <= limit * USABLE)
            reason = _reason(needed, limit, attempts)
            attempts.append(Attempt(str(each.settings), needed, fits))
            if fits:
                decisions.decide("micro_batch_size", size, reason)
                decisions.decide("remat", each.settings.remat, reason)
                return Plan(each.settings, decisions.reasons, each.assembly, compiled, tuple(attempts))
    raise DoesNotFit(
        f"The run does not fit in {_gib(limit)} of memory per device. Tried {'; '.join(map(str, attempts))}.",
        tuple(attempts),
    )


def decide_quantization(
    decisions: Decisions, smallest: Callable[[], Candidate], compiler: Compiler, limit: float | None
) -> list[Attempt]:
    """Takes the first format in which the candidate that needs the least memory fits. Returns those that do not."""
    attempts: list[Attempt] = []
    formats = formats_to_try(decisions["backend"])
    while decisions.is_open("quantize"):
        decisions.values["quantize"] = formats[len(attempts)]
        candidate = smallest()
        format: Quantize = decisions.values.pop("quantize")
        base = local_bytes(candidate.assembly.base_shapes)
        what = f"{_gib(base)} of {_gib(limit)} per device for the base"
        if limit is None or base <= SMALL_BASE * limit or format == formats[-1]:
            decisions.decide(
                "quantize", format, f"{what}; too large: {'; '.join(map(str, attempts))}" if attempts else what
            )
            continue
        needed = compiler(candidate.assembly)[1]
        if needed + candidate.assembly.state_bytes <= limit * USABLE:
            decisions.decide("quantize", format, what)
        else:
            attempts.append(Attempt(str(candidate.settings), needed, False))
    return attempts


def _worth_compiling(
    slowest_first: Iterator[Candidate], guess: Callable[[Assembly], float], limit: float
) -> tuple[Iterator[Candidate], list[Attempt]]:
    """The candidates worth compiling, fastest first. Faster candidates need more memory, so the search stops at the
    first hopeless one, which is returned as an attempt."""
    candidates: list[Candidate] = []
    hopeless: list[Attempt] = []
    for candidate in slowest_first:
        needed = guess(candidate.assembly)
        if needed > HOPELESS * limit:
            hopeless = [Attempt(str(candidate.settings), needed, False)]
            break
        candidates.insert(0, candidate)
    return iter(candidates), hopeless


def says_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error)


class Decisions:
    """The settings of a stage while they are decided. A field that is already fixed is not decided again."""

    def __init__(self, fixed: Mapping[str, Any], listener: Listener) -> None:
        self.values = dict(fixed)
        self.reasons: dict[str, str] = {}
        self._listener = listener

    def __getitem__(self, field: str) -> Any:
        return self.values[field]

    def is_open(self, field: str) -> bool:
        return field not in self.values

    def decide(self, field: str, value: Any, reason: str) -> None:
        if self.is_open(field):
            self.values[field], self.reasons[field] = value, reason
            shown = value.model_dump() if isinstance(value, MeshSection) else value
            self._listener(Chosen(StepSettings.OPTIONS[field], shown, reason))


def decide_by_hardware(decisions: Decisions, recipe: StageRecipe, config: Any, devices: list[Any]) -> None:
    """Everything that devices and shapes determine without compiling."""
    platform, num_devices = devices[0].platform, len(devices)
    text = config.get_text_config()
    decisions.decide("backend", platform, f"jax found {devices[0].device_kind}")
    decisions.decide("num_devices", num_devices, "all devices")
    decisions.decide("dtype", *choose_dtype(devices, text, decisions.values.get("quantize", "none")))
    if decisions.is_open("mesh"):
        base_bytes = _base_bytes(text, decisions["dtype"], decisions.values.get("quantize", "none"))
        shape, reason = choose_mesh(num_devices, recipe.train.batch_size, base_bytes, memory_limit(devices))
        decisions.decide("mesh", shape, reason)
    if platform == "gpu":
        decisions.decide("layers", "unroll", "fastest on GPUs")
    else:
        decisions.decide("layers", "scan", f"compiles one layer instead of all; {platform}")
    dtype = decisions["dtype"]
    kernel = fastest_attention(devices[0], dtype, text)
    decisions.decide("attention", kernel, f"the kernel for {dtype} on {platform}")
    if decisions["attention"] == "cudnn" and platform == "gpu" and not generation_of(devices[0]).widest_head:
        raise TrilloraError(
            f"cuDNN has no flash attention for {devices[0].device_kind}.",
            where="engine.attention",
            do="use engine.attention=auto",
        )
    tokens = 2 ** int(math.log2(max(CHUNK_LOGITS.get(platform, 2**27) // text.vocab_size, 128)))
    decisions.decide("loss_chunk", tokens, f"of {text.vocab_size} logits each; the full logits are never stored")


def formats_to_try(platform: str) -> tuple[Quantize, ...]:
    return ("none", *FASTEST_QUANTIZED[platform])


def choose_dtype(devices: list[Any], config: Any, quantize: str) -> tuple[Dtype, str]:
    """The number format of the base and of activations, with the reason. Never float16: activations of some models
    exceed its range, and training in it would need a scaled loss."""
    platform = devices[0].platform
    if platform == "cpu":
        return "float32", "the fastest format with enough range on cpu"
    if platform != "gpu" or generation_of(devices[0]).has_bfloat16:
        return "bfloat16", f"the fastest format with enough range on {platform}"
    base_bytes, limit = _base_bytes(config, "float32", quantize), memory_limit(devices)
    if limit is None or base_bytes <= SMALL_BASE * limit:
        return "float32", "this GPU has no bfloat16 arithmetic, and float16 does not have enough range"
    return "bfloat16", (
        f"the base in float32 ({_gib(base_bytes)}) is too large; this GPU converts bfloat16 to float32 to compute"
    )


def fastest_attention(device: Any, dtype: Dtype, config: Any) -> Attention:
    """The kernel for a device. cuDNN has none for float32, none for GPUs before Ampere, and none for wide heads."""
    if device.platform == "tpu":
        return "splash"
    if device.platform != "gpu" or dtype != "bfloat16":
        return "xla"
    return "cudnn" if _head_width(config) <= generation_of(device).widest_head else "xla"


def _head_width(config: Any) -> int:
    """Of the widest heads."""
    heads = _largest(config, "num_attention_heads") or 1
    return _largest(config, "head_dim", "v_head_dim") or config.hidden_size // heads


def choose_mesh(num_devices: int, batch_size: int, base_bytes: int, limit: float | None) -> tuple[MeshSection, str]:
    """Sequences over as many devices as divide the batch, matrices over the rest. The base is split only if needed."""
    if num_devices == 1:
        return MeshSection(), "one device"
    num_shards = math.gcd(batch_size, num_devices)
    tensor = num_devices // num_shards
    is_small = limit is None or base_bytes / tensor <= REPLICATED_BASE_SHARE * limit
    axis = "data" if is_small else "fsdp"
    split = "is copied to every device" if is_small else "is split"
    reason = (
        f"a batch of {batch_size} sequences is spread over {num_shards} of {num_devices} devices; the base "
        f"({_gib(base_bytes)}) {split}"
    )
    return MeshSection(**{axis: num_shards}, tensor=tensor), reason


def memory_limit(devices: list[Any]) -> float | None:
    """Bytes one device may use. Virtual CPU devices share the machine's free memory; a device that is not attached is
    looked up by its kind."""
    if devices[0].platform == "cpu":
        local = [d for d in devices if d.process_index == jax.process_index()]
        return psutil.virtual_memory().available / max(len(local), 1)
    try:
        stats = devices[0].memory_stats()
    except jax.errors.JaxRuntimeError:  # compile-only device
        stats = None
    if stats:
        return stats.get("bytes_limit")
    chip = chip_of(devices[0].device_kind)
    return chip.hbm_gib * GIB if chip else None


def local_bytes(shapes: Tree) -> float:
    """Bytes of these arrays on one device."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * item_bytes(a.dtype) for a in shapes.values())


def _base_bytes(config: Any, dtype: str, quantize: str) -> int:
    """A rough count from the configuration, good enough to choose between copying and splitting."""
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = _largest(config, "intermediate_size") or 4 * width
    experts = _largest(config, "num_local_experts", "num_experts", "n_routed_experts") or 1
    whole = 4 if dtype == "float32" else 2  # bytes of a weight that is not quantized
    linear, fused = 4 * width * width, 3 * width * inner * experts
    linear_bytes = BITS.get(quantize, 8 * whole) / 8
    fused_bytes = linear_bytes if experts == 1 else whole  # fused experts are not quantized
    return round(2 * config.vocab_size * width * whole + layers * (linear * linear_bytes + fused * fused_bytes))


def _largest(config: Any, *names: str) -> int:
    """The first of these options that is set; its maximum if it has one value per layer."""
    value = next((v for v in (getattr(config, name, None) for name in names) if v), 0)
    return max(value) if isinstance(value, list | tuple) else int(value)


def micro_batch_sizes(batch_size: int, fixed: int | None, num_shards: int) -> list[int]:
    """Sizes to try, largest first. Each must give every device the same number of sequences."""
    if batch_size % num_shards:
        raise TrilloraError(
            f"{batch_size} sequences cannot be spread evenly over {num_shards} devices.",
            where="train.batch_size",
            do=f"use a multiple of {num_shards}, or leave hardware.mesh on auto",
        )
    if fixed is None:
        halvings = [batch_size // 2**k for k in range(20) if batch_size % 2**k == 0]
        return [size for size in halvings if size % num_shards == 0]
    if fixed % num_shards:
        raise TrilloraError(
            f"A micro-batch of {fixed} sequences cannot be spread evenly over {num_shards} devices.",
            where="train.micro_batch_size",
            do=f"use a multiple of {num_shards}, or auto",
        )
    return [fixed]


def step_bytes(compiled: Any) -> float:
    """Arguments, results and temporaries of a compiled step on one device."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0.0
    return float(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _reason(needed: float, limit: float | None, too_large: Sequence[Attempt]) -> str:
    fits = f"needs {_gib(needed)} of {_gib(limit)} per device"
    return f"{fits}; too large: {'; '.join(map(str, too_large))}" if too_large else f"fastest, and {fits}"


def _gib(size: float | None) -> str:
    return "unknown" if size is None else "more than available" if math.isinf(size) else f"{size / GIB:.2f} GiB"
