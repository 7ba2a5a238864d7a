"""A step that trains every weight of a model, lowered for a slice that is not attached.

Trillora trains adapters, but published rates are for full training. Here the base weights take the adapter's place;
model, loss and step are Trillora's own. Weights and moments are sharded over all devices (fsdp).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from jax.experimental import topologies
from jax.sharding import Mesh
from tpu_published_rates import MODELS, Published

from trillora.devices.mesh import MeshShape, batch_sharding, make_mesh, replicated
from trillora.devices.slices import find_slice
from trillora.engine.loss import chunked_loss
from trillora.engine.optim import make_optimizer, make_schedule
from trillora.engine.step import Batch, Loss, TrainState, initial_state, make_train_step, token_objective
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Tree
from trillora.step.compiler_options import tpu_options
from trillora.step.loss.objective import BATCH_DTYPES, loss_chunk_positions
from trillora.step.shardings import weight_shardings

LOSS_CHUNK = 4096  # tokens per device whose logits exist at once


def lower_step(case: Published) -> tuple[Any, dict[str, str | bool], int]:
    """The lowered step, its compiler options, and the number of trained weights."""
    place = find_slice(case.slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    mesh = make_mesh(list(topology.devices), MeshShape(fsdp=len(topology.devices)))
    kind, sizes = MODELS[case.model]
    config = getattr(transformers, kind)(**sizes)
    model = CausalLM(config, ModelOptions(dtype="bfloat16", remat=case.remat, attention=case.attention, mesh=mesh))
    optimizer = make_optimizer(case.optimizer, weight_decay=0.1)
    schedule = make_schedule("constant", 1e-4, warmup_steps=0, num_steps=1000)
    loss = full_loss(model, loss_chunk_positions(LOSS_CHUNK, case.rows, case.tokens))
    step = keeping_dtypes(make_train_step(token_objective(loss), optimizer, schedule, max_grad_norm=1.0))

    weights, buffers = weight_shapes(model, mesh, jnp.dtype(case.weights))
    state = state_shapes(weights, jax.eval_shape(lambda tree: initial_state(tree, optimizer, 0), weights), mesh)
    batch = {
        name: jax.ShapeDtypeStruct((case.rows * mesh.size, case.tokens), dtype, sharding=batch_sharding(mesh))
        for name, dtype in BATCH_DTYPES.items()
    }
    out_shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), replicated(mesh))
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out_shardings).lower(state, buffers, batch)
    num_weights = sum(math.prod(leaf.shape) for leaf in weights.values())
    return lowered, tpu_options(mesh.devices.flat[0].device_kind, mesh.size), num_weights


def full_loss(model: CausalLM, chunk: int) -> Loss:
    """Summed loss, differentiable with respect to all weights; computed in the model's own dtype."""
    head_weight = _head_weight(model)

    def loss(weights: Tree, buffers: Tree, batch: Batch, key: jax.Array) -> jax.Array:
        weights = {name: array.astype(model.layout[name].dtype) for name, array in weights.items()}
        inputs = {"tokens": batch["tokens"], "positions": batch["positions"]}
        hidden = model.hidden({**buffers, **weights}, {}, inputs)
        # The chunked loss has a gradient only for the head's adapter, so the head's weight is passed as that.
        head = {head_weight: weights[head_weight]}
        return chunked_loss(model.head, {}, head, hidden, batch["targets"], batch["weights"], chunk)

    return loss


def keeping_dtypes(train_step: Any) -> Any:
    """The step computes in float32, the dtype of adapters; cast weights and moments to it, and back to their own."""

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def step(state: TrainState, buffers: Tree, batch: Batch) -> tuple[TrainState, Any]:
        before = (state.adapter, state.optimizer)
        weights, optimizer = jax.tree.map(wide, before)
        new, metrics = train_step(state._replace(adapter=weights, optimizer=optimizer), buffers, batch)
        weights, optimizer = jax.tree.map(lambda a, b: a.astype(b.dtype), (new.adapter, new.optimizer), before)
        return new._replace(adapter=weights, optimizer=optimizer), metrics

    return step


def weight_shapes(model: CausalLM, mesh: Mesh, dtype: Any) -> tuple[Tree, Tree]:
    """The trained weights, stored as `dtype`, and the buffers, which are not trained."""
    shardings = weight_shardings(model, mesh)
    names_of_buffers = {name for name, _ in model.module.named_buffers()}
    weights, buffers = {}, {}
    for key, leaf in model.layout.items():
        if leaf.names[0] in names_of_buffers:
            buffers[key] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[key])
        else:
            weights[key] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=shardings[key])
    return weights, buffers


def state_shapes(weights: Tree, state: TrainState, mesh: Mesh) -> TrainState:
    """Moments are sharded like their weight. Arrays with another shape than their weight are small and replicated."""

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        weight = weights.get(str(getattr(path[-1], "key", "")))
        fits = weight is not None and weight.shape == leaf.shape
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight.sharding if fits else replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, state)


def _head_weight(model: CausalLM) -> str:
    """Name of the output layer's weight in the layout: the embedding's name if the two are tied."""
    weight = model.module.get_output_embeddings().weight
    return next(name for name, parameter in model.module.named_parameters() if parameter is weight)
