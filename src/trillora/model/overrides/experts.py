"""Mixture of experts with static shapes: sort tokens by expert, one ragged product per projection, scatter back.

transformers' own loop over experts depends on which experts were selected, which cannot be compiled. Example with
3 tokens, 2 experts per token and 4 experts:

    index_NK = [[2, 0], [1, 2], [0, 2]]      experts of each token
    expert[order] = [0, 0, 1, 2, 2, 2]       the six (token, expert) pairs, sorted by expert
    token = [0, 2, 1, 0, 1, 2]               the token of each pair
    group_sizes = [2, 1, 3, 0]               pairs of each expert, for `grouped_product`

An adapter of the experts adds two such products: by A and by B of the token's expert.

Legend: N tokens, K experts per token, D width, E experts, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec
from torchax import interop
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trillora.devices.mesh import BATCH_AXES, per_shard
from trillora.engine.grouped_product import grouped_product
from trillora.model.parts.expert_parameters import lora_of
from trillora.model.trace import current

NAME = "trillora"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def register() -> None:
    """Registers `experts_implementation="trillora"` with transformers. May be called more than once."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    trace = current()
    # Not by getattr, which would add the adapter to the weights of all experts.
    parameters = {name: module._parameters.get(name) for name in _WEIGHTS}
    weights: dict[str, Any] = {name: interop.jax_view(t) for name, t in parameters.items() if t is not None}
    weights |= {f"{name}_lora": lora for name in parameters if (lora := lora_of(module, name)) is not None}

    def local(hidden: jax.Array, index: jax.Array, gate: jax.Array, weights: dict[str, Any]) -> jax.Array:
        return _mix(module, hidden, index, gate, weights)

    args = (*(interop.jax_view(t) for t in (hidden_states, top_k_index, top_k_weights)), weights)
    if trace is not None and trace.mesh is not None and trace.mesh.size > 1:
        # Each device sorts its own tokens: a global sort would move tokens between all devices.
        tokens, everywhere = PartitionSpec(BATCH_AXES, None), PartitionSpec()
        specs = (tokens, tokens, tokens, dict.fromkeys(weights, everywhere))
        local = per_shard(local, trace.mesh, specs, tokens)
    return interop.torch_view(local(*args))


def _mix(
    module: Any, hidden_ND: jax.Array, index_NK: jax.Array, gate_NK: jax.Array, weights: dict[str, Any]
) -> jax.Array:
    """The weighted sum of each token's experts."""
    num_choices = index_NK.shape[1]
    expert = index_NK.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    group_sizes = jnp.bincount(expert, length=module.num_experts).astype(jnp.int32)
    token = order // num_choices

    def project(rows: jax.Array, name: str) -> jax.Array:
        weight = weights[name] if module.is_transposed else weights[name].swapaxes(1, 2)
        out = grouped_product(rows, weight.astype(rows.dtype), group_sizes)
        if (lora := weights.get(f"{name}_lora")) is not None:
            a_ERI, b_ERO = (matrix.astype(rows.dtype) for matrix in lora)
            inner = grouped_product(rows, a_ERI.swapaxes(1, 2), group_sizes)
            out = out + grouped_product(inner, b_ERO, group_sizes)
        return out + weights[f"{name}_bias"][expert[order]].astype(out.dtype) if module.has_bias else out

    rows = hidden_ND[token]
    if module.has_gate:
        inner = module._apply_gate(interop.torch_view(project(rows, "gate_up_proj")))
    else:
        inner = module.act_fn(interop.torch_view(project(rows, "up_proj")))
    out = project(interop.jax_view(inner), "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = interop.jax_view(module.post_expert_norm(interop.torch_view(out)))
    out = out * gate_NK.reshape(-1)[order][:, None].astype(out.dtype)
    return jnp.zeros((hidden_ND.shape[0], out.shape[-1]), out.dtype).at[token].add(out).astype(hidden_ND.dtype)
