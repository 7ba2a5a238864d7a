"""Experts spread over devices give the results and gradients of one device, wherever the router sends the tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dose import slow_case
from jax.sharding import PartitionSpec

from trillora.devices.mesh import BATCH_AXES, MeshShape, expert_axes, make_mesh, per_shard
from trillora.engine.mixture import experts
from trillora.engine.mixture.experts import Tokens, mix, mix_spread
from trillora.engine.mixture.grouped_product import grouped_product
from trillora.preflight.hlo import simulate

NUM_TOKENS, NUM_CHOICES, NUM_EXPERTS, WIDTH, INNER = 1024, 2, 16, 8, 12
MESHES = {
    "fsdp 8": MeshShape(fsdp=8),
    "data 2 x fsdp 4": MeshShape(data=2, fsdp=4),
    "fsdp 4 x tensor 2": MeshShape(fsdp=4, tensor=2),
    "tensor 8": MeshShape(tensor=8),
}
# The share of tokens whose first expert is 5. With 1.0 one device has at least half of all rows.
ROUTERS = {"even": 0.0, "skewed": 0.5, "all to one expert": 1.0}
EQUAL = 1e-5  # relative to the largest value: float32 sums in another order


def compute(rows_MD: jax.Array, gate_M: jax.Array, sizes_E: jax.Array, weights: Any) -> jax.Array:
    """As on a TPU, rows without an expert have results that are not numbers."""
    has_expert_M1 = jnp.arange(len(rows_MD))[:, None] < sizes_E.sum()
    inner = jnp.tanh(grouped_product(rows_MD, weights["up"], sizes_E)) * gate_M[:, None]
    out = grouped_product(jnp.where(has_expert_M1, inner, 0), weights["down"], sizes_E)
    return jnp.where(has_expert_M1, out, jnp.nan)


def inputs(share: float) -> tuple[Tokens, jax.Array, dict[str, jax.Array]]:
    generator = np.random.default_rng(0)
    scores = generator.random((NUM_TOKENS, NUM_EXPERTS))
    scores[: int(share * NUM_TOKENS), 5] = 2
    index = np.argsort(-scores, axis=1)[:, :NUM_CHOICES].astype(np.int32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    tokens = Tokens(normal(NUM_TOKENS, WIDTH), normal(NUM_TOKENS, NUM_CHOICES))
    weights = {"up": normal(NUM_EXPERTS, WIDTH, INNER), "down": normal(NUM_EXPERTS, INNER, WIDTH)}
    return tokens, jnp.asarray(index), weights


def spread(shape: MeshShape) -> Any:
    mesh = make_mesh(jax.devices(), shape)
    axes = expert_axes(NUM_EXPERTS, mesh)
    token_axes, copied_axes = (tuple(a for a in axes if (a in BATCH_AXES) == batch) for batch in (True, False))

    def local(tokens: Tokens, index: jax.Array, weights: Any) -> jax.Array:
        return mix_spread(compute, tokens, index, weights, NUM_EXPERTS, token_axes, copied_axes)

    rows = PartitionSpec(BATCH_AXES)
    return per_shard(local, mesh, (rows, rows, PartitionSpec(axes)), rows)


def results(function: Any, tokens: Tokens, index: jax.Array, weights: Any, *, frozen: bool = False) -> Any:
    """Results and gradients, as in a layer that is recomputed in the backward pass."""
    target = jnp.cos(jnp.arange(NUM_TOKENS * WIDTH, dtype=jnp.float32)).reshape(NUM_TOKENS, WIDTH)

    def loss(tokens: Tokens, weights: Any) -> tuple[jax.Array, jax.Array]:
        out = jax.checkpoint(function)(tokens, index, weights)
        return (out * target).sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=0 if frozen else (0, 1), has_aux=True))(tokens, weights)


def assert_equal(ours: Any, reference: Any) -> None:
    for own, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        assert np.abs(own - expected).max() <= EQUAL * np.abs(expected).max()


@pytest.mark.parametrize(
    ("mesh", "router"),
    [
        ("data 2 x fsdp 4", "all to one expert"),
        ("fsdp 4 x tensor 2", "skewed"),
        *(slow_case(mesh, router) for mesh in MESHES for router in ROUTERS),
    ],
)
def test_results_and_gradients_equal_those_of_one_device(mesh: str, router: str) -> None:
    given = inputs(ROUTERS[router])
    reference = results(lambda tokens, index, weights: mix(compute, tokens, index, weights, NUM_EXPERTS), *given)
    assert_equal(results(spread(MESHES[mesh]), *given), reference)


def test_frozen_experts_equal_those_of_one_device() -> None:
    given = inputs(1.0)
    alone = results(lambda *given: mix(compute, *given, NUM_EXPERTS), *given, frozen=True)
    assert_equal(results(spread(MESHES["data 2 x fsdp 4"]), *given, frozen=True), alone)


def test_lanes_of_a_sweep_equal_those_of_one_device() -> None:
    """Two lanes whose routers choose differently share the weights."""
    (first, first_index, weights), (_, second_index, _) = inputs(0.0), inputs(1.0)
    tokens = Tokens(*(jnp.stack([array, 2 * array]) for array in first))
    index = jnp.stack([first_index, second_index])

    def gradients(function: Any) -> Any:
        def loss(tokens: Tokens) -> jax.Array:
            return (jax.vmap(function, in_axes=(0, 0, None))(tokens, index, weights) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss))(tokens)

    alone = gradients(lambda tokens, index, weights: mix(compute, tokens, index, weights, NUM_EXPERTS))
    assert_equal(gradients(spread(MESHES["data 2 x fsdp 4"])), alone)


def test_preflight_knows_the_name_of_what_rarely_runs() -> None:
    """Preflight reads programs without jax, so it has its own copy of the name."""
    assert simulate.RARE == experts.RARE
    given = inputs(0.0)
    text = jax.jit(spread(MESHES["fsdp 8"])).lower(*given).compile().as_text()
    assert experts.RARE in next(line for line in text.splitlines() if " while(" in line)
