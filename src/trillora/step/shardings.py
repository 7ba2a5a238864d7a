"""How weights and adapters are split over the devices of a mesh."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillora.devices.mesh import AXES, FSDP_AXIS, replicated, weight_spec
from trillora.engine.quantize import block_of, item_bytes
from trillora.model.bridge import CausalLM
from trillora.model.layout import Layout, Leaf, Tree
from trillora.model.parts.expert_parameters import split_by_expert

WHOLE_SHARE = 0.25  # of a device's experts: if all other weights take no more, they are copied to every device
COPIED_ADAPTER_BYTES = 2**30  # adapter and optimizer state up to this size are copied to every device, not split


def weight_shardings(model: CausalLM, mesh: Mesh) -> dict[str, NamedSharding]:
    """Codes of a quantized weight are sharded like the weight; its scales, if they are one vector, are replicated. If a
    device has some of the experts, and the other weights are few in comparison, it has all of those: they would have to
    be gathered."""
    on_last_dim, experts = model.weights_split_on_last_dim(), split_by_expert(model.module)
    embedding = getattr(model.module.get_input_embeddings(), "weight", None)
    tables = {name for name, parameter in model.module.named_parameters() if parameter is embedding}

    def spec(leaf: Leaf) -> PartitionSpec:
        part, stacked, name = leaf.quantized, leaf.stacked, leaf.names[0]
        if part is None:
            return weight_spec(
                leaf.shape,
                mesh,
                stacked=stacked,
                tensor_on_last_dim=name in on_last_dim,
                fsdp_on_last_dim=name in tables,
                of_experts=name in experts,
            )
        if len(leaf.part_shape) < 2:
            return PartitionSpec()
        *stack, rows, columns = part.weight.shape
        shape = (*stack, columns, rows) if part.inputs_first else (*stack, rows, columns)
        last, block = part.weight.names[0] in on_last_dim, block_of(part.format)
        return weight_spec(shape, mesh, stacked=stacked, tensor_on_last_dim=last, block=block)

    specs = {key: spec(leaf) for key, leaf in model.layout.items()}
    split = {key for key, leaf in model.layout.items() if leaf.names[0] in experts and FSDP_AXIS in _axes(specs[key])}
    shards = {key: NamedSharding(mesh, specs[key]).shard_shape(model.layout[key].shape) for key in split}
    of_experts = sum(math.prod(shape) * item_bytes(model.layout[key].dtype) for key, shape in shards.items())
    others = sum(leaf.num_bytes for key, leaf in model.layout.items() if key not in split)
    if others <= WHOLE_SHARE * of_experts:
        specs = {key: spec if key in split else _without_fsdp(spec) for key, spec in specs.items()}
    return {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,)) if axis is not None]


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == FSDP_AXIS else axis for axis in spec))


def shard_adapter(layout: Layout, mesh: Mesh) -> dict[str, NamedSharding]:
    """Small adapters are copied to every device, which avoids gathering; large ones are split like the base. On a mesh
    with all three axes the adapter is always copied: XLA's partitioner was seen to give wrong numbers there."""
    with_optimizer = 3 * sum(leaf.num_bytes for leaf in layout.values())
    if with_optimizer <= COPIED_ADAPTER_BYTES or all(mesh.shape[axis] > 1 for axis in AXES):
        return {key: replicated(mesh) for key in layout}
    return {
        key: NamedSharding(mesh, weight_spec(leaf.shape, mesh, stacked=leaf.stacked)) for key, leaf in layout.items()
    }


def with_whole_head(model: CausalLM, base: Tree) -> Tree:
    """The base with the weight of its head gathered over `fsdp`. Otherwise every chunk of the loss would gather it."""
    weight = getattr(model.module.get_output_embeddings(), "weight", None)
    key = next((name for name, parameter in model.module.named_parameters() if parameter is weight), "")
    if model.mesh is None or model.mesh.shape[FSDP_AXIS] == 1 or key not in base:
        return base
    whole = NamedSharding(model.mesh, _without_fsdp(weight_shardings(model, model.mesh)[key].spec))
    return {**base, key: jax.lax.with_sharding_constraint(base[key], whole)}
