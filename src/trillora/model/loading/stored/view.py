"""The tensors of a checkpoint as an unquantized one would have them.

…experts.gate_up_proj_blocks, …experts.gate_up_proj_scales   ->   …experts.gate_up_proj
…q_proj.weight, …q_proj.weight_scale_inv                     ->   …q_proj.weight
…norm.weight                                                 ->   …norm.weight, as it is
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trillora.model.loading.stored import bitsandbytes, integers, mxfp4, scaled
from trillora.model.loading.stored.method import StoredMethod
from trillora.model.loading.stored.packed import Stored


def unquantized(tensors: Mapping[str, Stored], method: StoredMethod | None) -> dict[str, Stored]:
    """Tensors by name. The parts of quantized weights are not in it."""
    found: dict[str, Stored] = {}
    for each in (mxfp4, bitsandbytes, scaled, integers):
        found |= {name: tensor for name, tensor in each.find(tensors, method).items() if name not in found}
    used = {part.name for tensor in found.values() if tensor.packed for part in tensor.packed.parts.values()}
    return {**{name: tensor for name, tensor in tensors.items() if name not in used}, **found}


def formats(tensors: Iterable[Stored]) -> tuple[str, ...]:
    """In which weights are quantized."""
    return tuple(sorted({tensor.packed.format for tensor in tensors if tensor.packed}))
