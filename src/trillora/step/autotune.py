"""Decides every `auto` of a stage, with the reason shown to the user.

What the shapes and the devices determine is decided first. Mesh, recomputation (remat), micro-batch size and loss chunk
are then found by compiling a few candidates: the one with the shortest predicted step that fits in memory wins
(`search`). Where no time can be predicted, the candidates are tried in a fixed order, and the first that fits wins.

    plan = choose(stage.recipe, config, jax.devices(), num_steps=100, listener=print, predictor=predictor)
    plan.settings.remat, plan.tried         # "linear", [micro-batch 8, remat none: 57.6 ms, 7.30 GiB, …]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import psutil
from jax.sharding import Mesh

from trillora.devices.chips import chip_of, generation_of
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.kernels.triton_call import has_triton
from trillora.engine.quantize import item_bytes
from trillora.engine.ragged import MOST_OF_TOKENS, documents_bucket, why_masked
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note, Progress
from trillora.model.layout import Tree
from trillora.recipe.resolve import DocumentRoom, StepSettings, given_settings
from trillora.recipe.schema import Attention, Dtype, Matmul, MeshSection, Quantize, Remat, StageRecipe
from trillora.step import background
from trillora.step.build import Assembly, assemble
from trillora.step.search import (
    GIB,
    HOPELESS,
    UNSURE,
    Attempt,
    Guess,
    Search,
    fastest_first,
    format_gib,
    guess_sizes,
    in_order,
    leaves_room,
    reason,
    smaller_chunks,
)

# Where nothing is predicted: of a device's memory; a base up to this size is copied to every device, not split.
REPLICATED_BASE_SHARE = 0.25
REMAT_ORDER: tuple[Remat, ...] = ("none", "linear", "full")  # most memory first
BETWEEN: tuple[Remat, ...] = ("wide", "half", "gate", "attention")  # what they save is between linear and full
LITTLE_RECOMPUTED: tuple[Remat, ...] = ("none", "linear", "wide")
USABLE = 0.97  # of the device's memory limit; the rest is left for fragmentation
# Logits of one chunk of the loss: 2**27 float32 values are half a GiB, and so are 2**28 bfloat16 ones on a GPU, where
# twice the tokens save 1 % of a step. A CPU has few rows at once: smaller chunks, so that more of them are without
# answers and are skipped. Products of fewer tokens than the second number are slow; on a TPU its chip says how many.
CHUNK_LOGITS = {"cpu": (2**22, 64), "gpu": (2**28, 128), "tpu": (2**27, 128)}
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
class Plan:
    """The settings of a stage and the compiled step. `reasons` explains each new decision, by field name."""

    settings: StepSettings
    reasons: dict[str, str]
    assembly: Assembly
    compiled: Any
    tried: tuple[Attempt, ...]  # the chosen one is the last

    @property
    def num_compiles(self) -> int:
        return sum(attempt.is_compiled for attempt in self.tried)


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


def compile_step(assembly: Assembly, meanwhile: Callable[[Assembly], None] | None = None) -> tuple[Any, float]:
    """The compiled step and the bytes it needs per device; (None, inf) if the compiler runs out of device memory.
    `meanwhile` is called while a compiler in the background works."""
    try:
        program = assembly.compile()
        if meanwhile is not None:
            meanwhile(assembly)
        compiled = background.compiled(program)
    except jax.errors.JaxRuntimeError as error:
        if says_out_of_memory(error):
            return None, math.inf
        raise
    return compiled, step_bytes(compiled)


class Predictor(Protocol):
    """Predicts how long steps take on the devices, and what they need."""

    error: float  # of guessed times, relative; 0 if compiled programs are not timed
    knows_time: bool  # else only the memory is predicted

    def surely_fits(self, assembly: Assembly, limit: float) -> bool:
        """Whether the step is so small that its memory need not be guessed."""

    def guess(self, assembly: Assembly) -> Guess:
        """From the traced step, without compiling it."""

    def seconds(self, assembly: Assembly, compiled: Any) -> float | None:
        """Of a compiled step; None if only its guess is known."""


@dataclass(frozen=True)
class Candidates:
    """Builds the step for any settings, each once."""

    make: Callable[[StepSettings], Assembly]
    values: Mapping[str, Any]  # what was decided so far
    _built: dict[StepSettings, Assembly] = field(default_factory=dict)

    def settings(self, mesh: MeshSection, remat: Remat, micro_batch_size: int) -> StepSettings:
        own = {"mesh": mesh, "remat": remat, "micro_batch_size": micro_batch_size}
        return StepSettings(**{**self.values, **own})

    def assembly(self, settings: StepSettings) -> Assembly:
        if settings not in self._built:
            self._built[settings] = self.make(settings)
        return self._built[settings]


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
    predictor: Predictor | None = None,
    build: Builder | None = None,
    document_room: DocumentRoom | None = None,
) -> Plan:
    """Decides what the recipe leaves open, compiles the step, and reports each decision.

    `kept` holds fields of `StepSettings` that were decided before: at the first start of a resumed run, or for another
    stage. The devices may belong to a slice that is not attached; preflight then passes its own `compiler`, and
    `mesh_devices` if only CPU devices can take their place. `build` makes the step: of one adapter, or of several.
    `document_room`: what the data needs; None if it is not known, or if nothing is packed.
    """
    fixed = {**(kept or {}), **given_settings(recipe)}
    decisions = Decisions(fixed, listener)
    decide_by_hardware(decisions, recipe, config, devices, document_room)
    limit = memory_limit(devices)
    by_time = predictor is not None and predictor.knows_time and limit is not None
    if not by_time:
        decide_mesh(decisions, recipe.train.batch_size, config, devices)

    def make(settings: StepSettings) -> Assembly:
        shape = settings.mesh
        mesh = make_mesh(mesh_devices or devices, MeshShape(shape.data, shape.fsdp, shape.tensor, shape.adapter))
        return (build or assemble)(recipe, settings, config, mesh, num_steps)

    candidates = Candidates(make, decisions.values)
    batch_size = recipe.train.batch_size
    has_experts = _num_experts(config.get_text_config()) > 1
    meshes = meshes_to_try(len(devices), batch_size, has_experts=has_experts)
    meshes = meshes if decisions.is_open("mesh") else [decisions["mesh"]]
    remats: tuple[Remat, ...] = (fixed["remat"],) if "remat" in fixed else REMAT_ORDER
    sizes = micro_batch_sizes(batch_size, fixed.get("micro_batch_size"), meshes[-1].data * meshes[-1].fsdp)
    smallest = (meshes[-1], remats[-1], sizes[-1])
    attempts = decide_quantization(decisions, lambda: candidates.settings(*smallest), candidates, compiler, limit)
    decide_kernels(decisions, config, devices, in_group=build is not None)
    if predictor is not None and limit is not None and by_time:
        guesses = guess_all(candidates, meshes, remats, sizes, predictor, limit * USABLE, listener)
        if "loss_chunk" not in fixed:
            guesses |= smaller_chunks(guesses, limit * USABLE)
        search = Search(guesses, limit * USABLE, num_steps, predictor.error)
    else:
        ranked = [candidates.settings(meshes[0], remat, size) for size in sizes for remat in remats]
        ranked = fastest_first(ranked, recipe.train.sequence_length)
        search = Search(in_order(ranked), limit and limit * USABLE, num_steps, error=0.0)
    compiled = compile_fastest(search, candidates, compiler, predictor, limit, listener)
    attempts += [*search.too_large(), *search.attempts]
    best = search.best
    if best is None:
        raise _does_not_fit(attempts, limit)
    attempts.sort(key=lambda attempt: attempt is best)
    decisions.decide_step(best.settings, reason(best, limit, attempts[:-1]))
    return Plan(best.settings, decisions.reasons, candidates.assembly(best.settings), compiled, tuple(attempts))


def _does_not_fit(attempts: list[Attempt], limit: float | None) -> DoesNotFit:
    attempts = sorted(attempts, key=lambda attempt: -attempt.needed)
    tried = "; ".join(map(str, attempts))
    return DoesNotFit(
        f"The run does not fit in {format_gib(limit)} of memory per device. Tried {tried}.", tuple(attempts)
    )


def compile_fastest(
    search: Search,
    candidates: Candidates,
    compiler: Compiler,
    predictor: Predictor | None,
    limit: float | None,
    listener: Listener,
) -> Any:
    """Compiles what the search asks for. Returns the program of its best candidate, and keeps no other."""
    best_program = None
    while (settings := search.next()) is not None:
        assembly = candidates.assembly(settings)
        if predictor and limit and not predictor.knows_time and not predictor.surely_fits(assembly, limit):
            # Unrolled layers need about what scanned ones do, but take many times as long to read.
            guess = predictor.guess(candidates.assembly(replace(settings, layers="scan")))
            if guess.needed > HOPELESS * limit:
                search.add(Attempt(settings, guess.needed, False, is_compiled=False))
                continue
        listener(Note(f"Compiling the training step ({settings})"))
        compiled, needed = compiler(assembly)
        fits = compiled is not None and _fits(needed, assembly, limit)
        is_choice = predictor is not None and len(search.guesses) > 1
        seconds = predictor.seconds(assembly, compiled) if predictor and is_choice and fits else None
        attempt = Attempt(settings, needed, fits, seconds)
        search.add(attempt)
        if search.best is attempt:
            best_program = compiled
    return best_program


def _fits(needed: float, assembly: Assembly, limit: float | None) -> bool:
    """Saving a checkpoint needs room for a second copy of the state."""
    return limit is None or needed + assembly.state_bytes <= limit * USABLE


def guess_all(
    candidates: Candidates,
    meshes: Sequence[MeshSection],
    remats: Sequence[Remat],
    sizes: Sequence[int],
    predictor: Predictor,
    limit: float,
    listener: Listener,
) -> dict[StepSettings, Guess]:
    """Guesses for all candidates that could be chosen. A split base only adds transfers: it is a candidate if the whole
    one may not fit, or only with much recomputed. Each guess takes seconds, so policies between linear and full
    are guessed only where they could be faster."""
    between = BETWEEN if len(remats) > 1 else ()
    each = len(remats) + len(between)  # families of a mesh

    def guess(settings: StepSettings) -> Guess:
        assembly = candidates.assembly(settings)
        return replace(predictor.guess(assembly), state=assembly.state_bytes)

    def is_enough(settings: StepSettings) -> bool:
        found = guesses[settings]
        saves = settings.remat in LITTLE_RECOMPUTED or len(remats) == 1
        return saves and UNSURE * (found.needed + found.state) <= limit

    guesses: dict[StepSettings, Guess] = {}
    for number, mesh in enumerate(meshes):
        if number and any(map(is_enough, guesses)):
            break
        smallest = candidates.assembly(candidates.settings(mesh, remats[-1], sizes[-1]))
        if mesh != meshes[-1] and local_bytes(smallest.base_shapes) > limit:
            continue
        found: dict[StepSettings, Guess] = {}
        for done, remat in enumerate((*remats, *between)):
            if done == len(remats) and not leaves_room(found, limit):
                break
            listener(Progress("Estimating the training step", number * each + done, len(meshes) * each))
            found |= guess_sizes(candidates.settings(mesh, remat, sizes[0]), sizes, limit, guess)
        guesses |= found
    listener(Progress("Estimating the training step", len(meshes) * each, len(meshes) * each))
    return guesses


def decide_quantization(
    decisions: Decisions,
    smallest: Callable[[], StepSettings],
    candidates: Candidates,
    compiler: Compiler,
    limit: float | None,
) -> list[Attempt]:
    """Takes the first format in which the candidate that needs the least memory fits. Returns those that do not."""
    attempts: list[Attempt] = []
    formats = formats_to_try(decisions["backend"])
    while decisions.is_open("quantize"):
        decisions.values["quantize"] = formats[len(attempts)]
        settings = smallest()
        assembly = candidates.assembly(settings)
        format: Quantize = decisions.values.pop("quantize")
        base = local_bytes(assembly.base_shapes)
        what = f"{format_gib(base)} of {format_gib(limit)} per device for the base"
        if limit is None or base <= SMALL_BASE * limit or format == formats[-1]:
            decisions.decide(
                "quantize", format, f"{what}; too large: {'; '.join(map(str, attempts))}" if attempts else what
            )
            continue
        needed = compiler(assembly)[1]
        if _fits(needed, assembly, limit):
            decisions.decide("quantize", format, what)
        else:
            attempts.append(Attempt(settings, needed, False))
    return attempts


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

    def decide_step(self, settings: StepSettings, reason: str) -> None:
        """What the search decided. It may have taken a smaller loss chunk than the one decided before."""
        if self["loss_chunk"] != settings.loss_chunk:
            del self.values["loss_chunk"]
        for name in ("mesh", "loss_chunk", "micro_batch_size", "remat"):
            self.decide(name, getattr(settings, name), reason)


def decide_by_hardware(
    decisions: Decisions, recipe: StageRecipe, config: Any, devices: list[Any], needed: DocumentRoom | None = None
) -> None:
    """Everything that devices and shapes determine without compiling."""
    platform, num_devices = devices[0].platform, len(devices)
    text = config.get_text_config()
    decisions.decide("backend", platform, f"jax found {devices[0].device_kind}")
    decisions.decide("num_devices", num_devices, "all devices")
    check_products(devices[0], decisions.values.get("matmul", "full"))
    decisions.decide("dtype", *choose_dtype(devices, text, decisions.values.get("quantize", "none")))
    if platform == "gpu" and _num_experts(text) <= 1:
        decisions.decide("layers", "unroll", "fastest on GPUs")
    elif platform == "gpu":  # unrolled, a mixture of 16 layers was not compiled after 90 s (22 s in a loop)
        decisions.decide("layers", "scan", "compiles the kernels of one layer's experts instead of all")
    else:
        decisions.decide("layers", "scan", f"compiles one layer instead of all; {platform}")
    dtype = decisions["dtype"]
    kernel = fastest_attention(devices[0], dtype, text)
    why = f"the kernel for {dtype} on {platform}"
    if kernel == "cudnn" and needed is not None:
        room, how = room_for_documents(needed, recipe.train.sequence_length, text, devices[0])
        kept = decisions.values.setdefault("document_room", room)
        if kept is not None and (kept.block != needed.block or kept.most < needed.most):  # for another evaluation set
            decisions.values["document_room"] = room
        why = f"{why}; {how}"
    decisions.decide("attention", kernel, why)
    if decisions["attention"] == "cudnn" and platform == "gpu" and not generation_of(devices[0]).widest_head:
        raise TrilloraError(
            f"cuDNN has no flash attention for {devices[0].device_kind}.",
            where="engine.attention",
            do="use engine.attention=auto",
        )
    most, least = CHUNK_LOGITS[platform]
    if platform == "tpu" and (chip := chip_of(devices[0].device_kind)) is not None:
        least = chip.fewest_tokens
    tokens = 2 ** int(math.log2(max(most // text.vocab_size, least)))
    decisions.decide("loss_chunk", tokens, f"of {text.vocab_size} logits each; the full logits are never stored")


def decide_kernels(decisions: Decisions, config: Any, devices: list[Any], *, in_group: bool) -> None:
    """Fused kernels where they were measured to be faster."""
    if not decisions.is_open("kernels"):
        return
    if devices[0].platform != "gpu":
        decisions.values["kernels"] = "xla"  # there is no choice
        return
    why_not = ""
    if len(devices) > 1 or in_group:
        why_not = "fused kernels are for one GPU and one adapter"
    elif decisions["dtype"] != "bfloat16" or not generation_of(devices[0]).widest_head or not has_triton():
        why_not = "fused kernels need bfloat16, a GPU of Ampere or newer, and a jax with Pallas for Triton"
    elif _num_experts(config.get_text_config()) > 1:
        why_not = "fused kernels were not measured with mixtures"
    elif decisions.values.get("quantize", "none") != "none" and decisions.values.get("matmul") != "fp8":
        why_not = "fused kernels were not measured with a quantized base"
    decisions.decide("kernels", "xla" if why_not else "fused", why_not or "fastest on one GPU, with the least memory")


def check_products(device: Any, matmul: Matmul) -> None:
    """Refuses rounded products on a chip where they are not faster. A CPU computes them for tests and comparisons."""
    chip = None if device.platform == "cpu" else chip_of(device.device_kind)
    if matmul == "full" or chip is None or matmul in chip.doubled:
        return
    other = " or ".join(f"engine.matmul={format}" for format in ("full", *chip.doubled))
    raise TrilloraError(
        f"Products in {matmul} are not faster on {device.device_kind}, only less exact.",
        where="engine.matmul",
        do=f"use {other}",
    )


def decide_mesh(decisions: Decisions, batch_size: int, config: Any, devices: list[Any]) -> None:
    """By the size of the base, where no times are predicted."""
    if decisions.is_open("mesh"):
        quantize = decisions.values.get("quantize", "none")
        base_bytes = _base_bytes(config.get_text_config(), decisions["dtype"], quantize)
        decisions.decide("mesh", *choose_mesh(len(devices), batch_size, base_bytes, memory_limit(devices)))


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
        f"the base in float32 ({format_gib(base_bytes)}) is too large; this GPU converts bfloat16 to float32 to compute"
    )


def fastest_attention(device: Any, dtype: Dtype, config: Any) -> Attention:
    """The kernel for a device. cuDNN has none for float32, none for GPUs before Ampere, and none for wide heads."""
    if device.platform == "tpu":
        return "splash"
    if device.platform != "gpu" or dtype != "bfloat16":
        return "xla"
    return "cudnn" if _head_width(config) <= generation_of(device).widest_head else "xla"


def room_for_documents(
    needed: DocumentRoom, sequence_length: int, config: Any, device: Any
) -> tuple[DocumentRoom | None, str]:
    """The room to compile for, so that cuDNN gets the lengths of packed documents, with the reason. None if it has to
    get a mask."""
    heads = _largest(config, "num_attention_heads") or 1
    why_not = why_masked(heads, _largest(config, "num_key_value_heads") or heads)
    if needed.most > MOST_OF_TOKENS * sequence_length:
        why_not = f"{needed.most} of them in {needed.block} tokens"
    if not generation_of(device).has_ragged:
        why_not = f"cuDNN has no ragged attention for {device.device_kind}"
    if why_not:
        return None, f"a mask keeps packed documents apart: {why_not}"
    room = DocumentRoom(needed.block, documents_bucket(needed.most))
    return room, f"it gets the lengths of up to {room.most} documents in {room.block} tokens"


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
        f"({format_gib(base_bytes)}) {split}"
    )
    return MeshSection(**{axis: num_shards}, tensor=tensor), reason


def meshes_to_try(num_devices: int, batch_size: int, *, has_experts: bool = False) -> list[MeshSection]:
    """The base whole on every device, then split: the base is frozen, so it need not be split to be updated. Both axes
    together were slower than either wherever they were compiled, except for mixtures: their tokens travel between the
    devices that share the experts, and the fewer these are, the less is sent."""
    num_shards = math.gcd(batch_size, num_devices)
    tensor = num_devices // num_shards
    split = [number for number in range(2, num_shards) if num_shards % number == 0] if has_experts else []
    sizes = [1, *split, num_shards] if num_shards > 1 else [1]
    return [MeshSection(data=num_shards // fsdp, fsdp=fsdp, tensor=tensor) for fsdp in sizes]


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
    experts = _num_experts(config)
    whole = 4 if dtype == "float32" else 2  # bytes of a weight that is not quantized
    linear, fused = 4 * width * width, 3 * width * inner * experts
    linear_bytes = BITS.get(quantize, 8 * whole) / 8
    fused_bytes = linear_bytes if experts == 1 else whole  # fused experts are not quantized
    return round(2 * config.vocab_size * width * whole + layers * (linear * linear_bytes + fused * fused_bytes))


def _num_experts(config: Any) -> int:
    return _largest(config, "num_local_experts", "num_experts", "n_routed_experts") or 1


def _largest(config: Any, *names: str) -> int:
    """The first of these options that is set; its maximum if it has one value per layer."""
    value = next((v for v in (getattr(config, name, None) for name in names) if v), 0)
    return max(value) if isinstance(value, list | tuple) else int(value)


def micro_batch_sizes(batch_size: int, fixed: int | None, num_shards: int) -> list[int]:
    """Sizes to try, largest first, down to one sequence on each device. Each gives every device the same number.

    >>> micro_batch_sizes(24, None, 2)
    [24, 12, 6, 2]
    """
    if batch_size % num_shards:
        raise TrilloraError(
            f"{batch_size} sequences cannot be spread evenly over {num_shards} devices.",
            where="train.batch_size",
            do=f"use a multiple of {num_shards}, or leave hardware.mesh on auto",
        )
    if fixed is None:
        rows = [batch_size // num_shards]  # on a device
        while rows[-1] > 1:
            rows.append(rows[-1] // next(factor for factor in range(2, rows[-1] + 1) if rows[-1] % factor == 0))
        return [num_shards * count for count in rows]
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
