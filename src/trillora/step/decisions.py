"""Decides what devices and shapes determine without compiling: number format, kernels, loss chunk, mesh.

Every decision has a reason, which the user is shown. What the recipe says is not decided again.

    decisions = Decisions({"num_devices": 8}, listener=print)
    decide_by_hardware(decisions, recipe, config, jax.devices())
    decisions["attention"], decisions.reasons["attention"]          # "splash", "the kernel for bfloat16 on tpu"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import psutil

from trillora.devices.chips import GIB, Device, chip_of, generation_of
from trillora.engine.kernels.triton_call import has_triton
from trillora.engine.quantize import item_bytes
from trillora.engine.ragged import MOST_OF_TOKENS, documents_bucket, why_masked
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener
from trillora.model.layout import Tree
from trillora.recipe.resolve import DocumentRoom, StepSettings
from trillora.recipe.schema import Attention, Dtype, Matmul, MeshSection, Quantize, StageRecipe
from trillora.step.search import format_gib

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

# Where nothing is predicted: of a device's memory; a base up to this size is copied to every device, not split.
REPLICATED_BASE_SHARE = 0.25
# Logits of one chunk of the loss: 2**27 float32 values are half a GiB, and so are 2**28 bfloat16 ones on a GPU, where
# twice the tokens save 1 % of a step. A CPU has small micro-batches: smaller chunks, so that more of them are without
# answers and are skipped. Matmuls of fewer tokens than the second number are slow; on a TPU its chip says how many.
CHUNK_LOGITS = {"cpu": (2**22, 64), "gpu": (2**28, 128), "tpu": (2**27, 128)}
# For `model.quantize: auto`: what to try if the base does not fit unquantized, fastest first (docs/quantization.md). On
# a TPU, nf4 writes out each weight before its matmul, and int4 does not.
FASTEST_QUANTIZED: dict[str, tuple[Quantize, ...]] = {
    "tpu": ("int8", "int4"),
    "gpu": ("int8", "nf4"),
    "cpu": ("int8", "nf4"),
}
SMALL_BASE = 0.5  # of a device's memory: a base up to this size leaves enough room for training
BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4.127}


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

    def decide(self, field: str, value: object, reason: str) -> None:
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
    decisions: Decisions,
    recipe: StageRecipe,
    config: PretrainedConfig,
    devices: Sequence[Device],
    needed: DocumentRoom | None = None,
) -> None:
    """Everything that devices and shapes determine without compiling."""
    platform, num_devices = devices[0].platform, len(devices)
    text = config.get_text_config()
    decisions.decide("backend", platform, f"jax found {devices[0].device_kind}")
    decisions.decide("num_devices", num_devices, "all devices")
    check_products(devices[0], decisions.values.get("matmul", "full"))
    decisions.decide("dtype", *choose_dtype(devices, text, decisions.values.get("quantize", "none")))
    if platform == "gpu" and num_experts(text) <= 1:
        decisions.decide("layers", "unroll", "fastest on GPUs")
    elif platform == "gpu":  # unrolled, an MoE model of 16 layers was not compiled after 90 s (22 s in a loop)
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


def decide_kernels(
    decisions: Decisions, config: PretrainedConfig, devices: Sequence[Device], *, in_group: bool
) -> None:
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
    elif num_experts(config.get_text_config()) > 1:
        why_not = "fused kernels were not measured with MoE models"
    elif decisions.values.get("quantize", "none") != "none" and decisions.values.get("matmul") != "fp8":
        why_not = "fused kernels were not measured with a quantized base"
    decisions.decide("kernels", "xla" if why_not else "fused", why_not or "fastest on one GPU, with the least memory")


def check_products(device: Device, matmul: Matmul) -> None:
    """Refuses rounded matmuls on a chip where they are not faster. A CPU computes them for tests and comparisons."""
    chip = None if device.platform == "cpu" else chip_of(device.device_kind)
    if matmul == "full" or chip is None or matmul in chip.doubled:
        return
    other = " or ".join(f"engine.matmul={format}" for format in ("full", *chip.doubled))
    raise TrilloraError(
        f"Matmuls in {matmul} are not faster on {device.device_kind}, only less exact.",
        where="engine.matmul",
        do=f"use {other}",
    )


def decide_mesh(decisions: Decisions, batch_size: int, config: PretrainedConfig, devices: Sequence[Device]) -> None:
    """By the size of the base, where no times are predicted."""
    if decisions.is_open("mesh"):
        quantize = decisions.values.get("quantize", "none")
        base_bytes = _base_bytes(config.get_text_config(), decisions["dtype"], quantize)
        decisions.decide("mesh", *choose_mesh(len(devices), batch_size, base_bytes, memory_limit(devices)))


def formats_to_try(platform: str) -> tuple[Quantize, ...]:
    return ("none", *FASTEST_QUANTIZED[platform])


def choose_dtype(devices: Sequence[Device], config: PretrainedConfig, quantize: str) -> tuple[Dtype, str]:
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


def fastest_attention(device: Device, dtype: Dtype, config: PretrainedConfig) -> Attention:
    """The kernel for a device. cuDNN has none for float32, none for GPUs before Ampere, and none for wide heads."""
    if device.platform == "tpu":
        return "splash"
    if device.platform != "gpu" or dtype != "bfloat16":
        return "xla"
    return "cudnn" if _head_width(config) <= generation_of(device).widest_head else "xla"


def room_for_documents(
    needed: DocumentRoom, sequence_length: int, config: PretrainedConfig, device: Device
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


def _head_width(config: PretrainedConfig) -> int:
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
    together were slower than either wherever they were compiled, except for MoE: its tokens travel between the
    devices that share the experts, and the fewer these are, the less is sent."""
    num_shards = math.gcd(batch_size, num_devices)
    tensor = num_devices // num_shards
    split = [number for number in range(2, num_shards) if num_shards % number == 0] if has_experts else []
    sizes = [1, *split, num_shards] if num_shards > 1 else [1]
    return [MeshSection(data=num_shards // fsdp, fsdp=fsdp, tensor=tensor) for fsdp in sizes]


def memory_limit(devices: Sequence[Device]) -> float | None:
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


def _base_bytes(config: PretrainedConfig, dtype: str, quantize: str) -> int:
    """A rough count from the configuration, good enough to choose between copying and splitting."""
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = _largest(config, "intermediate_size") or 4 * width
    experts = num_experts(config)
    whole = 4 if dtype == "float32" else 2  # bytes of a weight that is not quantized
    linear, fused = 4 * width * width, 3 * width * inner * experts
    linear_bytes = BITS.get(quantize, 8 * whole) / 8
    fused_bytes = linear_bytes if experts == 1 else whole  # fused experts are not quantized
    return round(2 * config.vocab_size * width * whole + layers * (linear * linear_bytes + fused * fused_bytes))


def num_experts(config: PretrainedConfig) -> int:
    return _largest(config, "num_local_experts", "num_experts", "n_routed_experts") or 1


def _largest(config: PretrainedConfig, *names: str) -> int:
    """The first of these options that is set; its maximum if it has one value per layer."""
    value = next((v for v in (getattr(config, name, None) for name in names) if v), 0)
    return max(value) if isinstance(value, list | tuple) else int(value)
