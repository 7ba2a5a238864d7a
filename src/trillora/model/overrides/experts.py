"""Mixture of experts: transformers' modules, computed by `engine.mixture.experts`.

transformers' own loop over experts depends on which experts were selected, which cannot be compiled. Here each token's
experts are rows of grouped matmuls. On a mesh, every device computes

    with its own part of the experts    the rows of all tokens of its group, if the number of experts is divisible
    with all experts                    the rows of its own tokens, otherwise. The weights are gathered

An adapter of the experts adds two matmuls: by A and by B of the row's expert.

Legend: N tokens, K experts per token, D width, E experts, M rows, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from torchax import interop
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trillora.devices.mesh import BATCH_AXES, expert_axes, per_shard
from trillora.engine.mixture.experts import FIRST, Tokens, mix, mix_spread
from trillora.engine.mixture.grouped_product import GroupedForm, Kernel, adapted_product, grouped_product, kernel_for
from trillora.model.overrides.torchax_fixes import environment
from trillora.model.parts.expert_parameters import lora_of
from trillora.model.remat import WIDE
from trillora.model.trace import Trace, current

NAME = "trillora"
NORM = "post_expert_norm"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def register() -> None:
    """Registers `experts_implementation="trillora"` with transformers. May be called more than once."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    trace = current()
    # Not by getattr, which would add the adapter to the weights of all experts.
    parameters = {name: module._parameters.get(name) for name in _WEIGHTS}
    weights: dict[str, Any] = {name: interop.jax_view(t) for name, t in parameters.items() if t is not None}
    weights |= {f"{name}_lora": lora for name in parameters if (lora := lora_of(module, name)) is not None}
    if getattr(module, "has_post_expert_norm", False):
        weights[NORM] = interop.jax_view(dict(module.post_expert_norm.named_parameters()))
    hidden, index, gate = (interop.jax_view(t) for t in (hidden_states, top_k_index, top_k_weights))
    num_experts = module.num_experts
    mesh = trace.mesh if trace is not None else None
    axes = expert_axes(num_experts, mesh) if mesh is not None else ()
    kernel = _kernel(trace) if trace is not None else "xla"
    form = GroupedForm(not module.is_transposed, FIRST if axes else 1.0, kernel, trace is not None and trace.interpret)
    compute = functools.partial(_weighted, module, form)
    if mesh is None or mesh.size == 1:
        return interop.torch_view(mix(compute, Tokens(hidden, gate), index, weights, num_experts))

    def local(tokens: Tokens, index: jax.Array, weights: Mapping[str, object]) -> jax.Array:
        if not axes:
            return mix(compute, tokens, index, weights, num_experts)
        token_axes, copied_axes = (tuple(a for a in axes if (a in BATCH_AXES) == batch) for batch in (True, False))
        return mix_spread(compute, tokens, index, weights, num_experts, token_axes, copied_axes)

    rows, everywhere = PartitionSpec(BATCH_AXES, None), PartitionSpec()
    by_expert = PartitionSpec(axes) if axes else everywhere
    specs = (rows, rows, {name: everywhere if name == NORM else by_expert for name in weights})
    return interop.torch_view(per_shard(local, mesh, specs, rows)(Tokens(hidden, gate), index, weights))


def _kernel(trace: Trace) -> Kernel:
    if trace.attention == "splash":  # also while a step for TPUs is traced on a mesh of CPU devices
        return "megablox"
    return kernel_for(trace.mesh.devices.flat[0]) if trace.mesh is not None else "xla"


def _weighted(
    module: torch.nn.Module,
    form: GroupedForm,
    rows_MD: jax.Array,
    gate_M: jax.Array,
    sizes_E: jax.Array,
    weights: dict[str, Any],
) -> jax.Array:
    """The result of each row's expert, multiplied by the row's gate. Also called while gradients are traced, when the
    module has no weights: everything that it needs is in `weights`."""
    gate_M1 = gate_M.astype(rows_MD.dtype)[:, None]

    def weighted(rows: jax.Array) -> jax.Array:
        """Without what a kernel left in rows that have no expert. The gradients there are 0 too."""
        if form.padded == 1:
            return rows * gate_M1
        return jnp.where(jnp.arange(len(rows))[:, None] < sizes_E.sum(), rows * gate_M1, 0)

    def project(rows: jax.Array, name: str) -> jax.Array:
        weight = weights[name].astype(rows.dtype)
        if (lora := weights.get(f"{name}_lora")) is None:
            return grouped_product(rows, weight, sizes_E, form)
        a_ERI, b_ERO = (matrix.astype(rows.dtype) for matrix in lora)
        return adapted_product(rows, weight, a_ERI, b_ERO, sizes_E, form)

    def add_bias(out: jax.Array, name: str, scale: jax.Array | int = 1) -> jax.Array:
        if not module.has_bias:
            return out
        expert_M = jnp.repeat(jnp.arange(len(sizes_E)), sizes_E, total_repeat_length=len(out))
        return out + weights[f"{name}_bias"].astype(out.dtype)[expert_M] * scale

    name = "gate_up_proj" if module.has_gate else "up_proj"
    # Saved together with the linear layers that are wider than their input: each token has several rows.
    inner = checkpoint_name(add_bias(project(rows_MD, name), name), WIDE)
    with environment():
        activate = module._apply_gate if module.has_gate else module.act_fn
        inner = interop.jax_view(activate(interop.torch_view(inner)))
    if NORM not in weights:
        # Multiplied before the projection: the gradient of the gate then does not need the projection's result.
        return add_bias(project(weighted(inner), "down_proj"), "down_proj", gate_M1)
    out = add_bias(project(inner, "down_proj"), "down_proj")
    with environment():
        arguments = interop.torch_view((weights[NORM], out))
        out = interop.jax_view(torch.func.functional_call(module.post_expert_norm, *arguments))
    return weighted(out)
