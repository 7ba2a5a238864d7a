"""Linear layers with LoRA that have the same input, such as q, k and v, or gate and up.

    low = x Aᵀ        y_n = x W_nᵀ + low B_nᵀ        the W are frozen; A is all A matrices below each other

The gradient of x is a sum of matmuls, and so is each output: `product_sum` computes them, each in one pass over the
result if the GPU can.

`lora_linear` computes all of this. A gated MLP has kernels of its own for the B matrices of gate and up, and for the A
matrix of down: its other parts are `joined_linear` and `linear_and_low`.

Legend: M rows, D inputs, E outputs, R rank, Q ranks of all adapters, with zeros up to a multiple of 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trillora.engine.kernels.product_sum import FEW, IN_XLA, Products, product_sum

Outputs = tuple[jax.Array, ...]
Weights = Sequence[jax.Array]
Spans = tuple[tuple[int, int], ...]
Mark = tuple[()] | None  # () if there is an addend: what is saved for the gradient may not be a bool


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _padded(array: jax.Array, dim: int) -> jax.Array:
    """With zeros up to a multiple of what `product_sum` takes."""
    after = [(0, -size % FEW if i == dim % array.ndim else 0) for i, size in enumerate(array.shape)]
    return jnp.pad(array, after)


# ---- layers with their adapters


def lora_linear(
    x: jax.Array,
    weights: Weights,
    matrices: Sequence[tuple[jax.Array, jax.Array]],
    addend: jax.Array | None,
    on: Products,
    low_name: str,
) -> Outputs:
    """The outputs of all weights [E, D] with their adapters A [R, D] and B [E, R], which includes the scale. A single
    layer may have an addend, [..., E]. `low_name`: of what the A matrices give, for remat policies."""
    a_QD = _padded(jnp.concatenate([a for a, _ in matrices]), 0)
    before, placed = 0, []
    for a, b in matrices:
        after = a_QD.shape[0] - before - len(a)
        placed.append(jnp.pad(b, ((0, 0), (before, after))))
        before += len(a)
    spans = _spans([len(a) for a, _ in matrices])
    return _lora_linear(x, tuple(weights), a_QD, tuple(placed), addend, on, low_name, spans)


def _spans(ranks: Sequence[int]) -> Spans:
    """The columns of `low` that each layer needs, in whole steps of `product_sum`."""
    ends = [sum(ranks[: n + 1]) for n in range(len(ranks))]
    return tuple(((end - rank) // FEW * FEW, -(-end // FEW) * FEW) for end, rank in zip(ends, ranks, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _lora_linear(
    x: jax.Array,
    weights: Weights,
    a_QD: jax.Array,
    bs_EQ: Weights,
    addend: jax.Array | None,
    on: Products,
    low_name: str,
    spans: Spans,
) -> Outputs:
    return _lora_forward(x, weights, a_QD, bs_EQ, addend, on, low_name, spans)[0]


def _lora_forward(
    x: jax.Array,
    weights: Weights,
    a_QD: jax.Array,
    bs_EQ: Weights,
    addend: jax.Array | None,
    on: Products,
    low_name: str,
    spans: Spans,
) -> tuple[Outputs, tuple[jax.Array, Weights, jax.Array, Weights, jax.Array, Mark]]:
    low = checkpoint_name(x @ a_QD.T, low_name)
    outputs = tuple(
        product_sum([(x, weight), (low[..., first:end], b[:, first:end])], addend, transposed=True, on=on)
        for weight, b, (first, end) in zip(weights, bs_EQ, spans, strict=True)
    )
    return outputs, (x, weights, a_QD, bs_EQ, low, None if addend is None else ())


def _lora_backward(
    on: Products,
    low_name: str,
    spans: Spans,
    saved: tuple[jax.Array, Weights, jax.Array, Weights, jax.Array, Mark],
    gradients: Outputs,
) -> tuple[jax.Array, None, jax.Array, Outputs, jax.Array | None]:
    x, weights, a_QD, bs_EQ, low, mark = saved
    dlow = product_sum(list(zip(gradients, bs_EQ, strict=True)), transposed=False, on=IN_XLA)
    dx = product_sum([*zip(gradients, weights, strict=True), (dlow, a_QD)], transposed=False, on=on)
    dbs = tuple(_rows(dy).T @ _rows(low) for dy in gradients)
    return dx, None, _rows(dlow).T @ _rows(x), dbs, None if mark is None else gradients[0]


_lora_linear.defvjp(_lora_forward, _lora_backward)


# ---- parts of a gated MLP


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def joined_linear(x: jax.Array, weights: Weights, a_QD: jax.Array, on: Products) -> tuple[Outputs, jax.Array]:
    """The outputs of all weights [E, D] without their adapters, and what A gives."""
    return tuple(x @ weight.T for weight in weights), x @ a_QD.T


def _joined_forward(
    x: jax.Array, weights: Weights, a_QD: jax.Array, on: Products
) -> tuple[tuple[Outputs, jax.Array], tuple[jax.Array, Weights, jax.Array]]:
    return joined_linear(x, weights, a_QD, on), (x, weights, a_QD)


def _joined_backward(
    on: Products, saved: tuple[jax.Array, Weights, jax.Array], gradients: tuple[Outputs, jax.Array]
) -> tuple[jax.Array, None, jax.Array]:
    x, weights, a_QD = saved
    outputs, low = gradients
    adapters = (_padded(low, -1), _padded(a_QD, 0))
    dx = product_sum([*zip(outputs, weights, strict=True), adapters], transposed=False, on=on)
    return dx, None, _rows(low).T @ _rows(x)


joined_linear.defvjp(_joined_forward, _joined_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def linear_and_low(
    x: jax.Array, weight: jax.Array, low: jax.Array, b_ER: jax.Array, addend: jax.Array | None, on: Products
) -> jax.Array:
    """x Wᵀ + low Bᵀ + addend."""
    pairs = [(x, weight), (_padded(low, -1), _padded(b_ER, -1))]
    return product_sum(pairs, addend, transposed=True, on=on)


def _forward(
    x: jax.Array, weight: jax.Array, low: jax.Array, b_ER: jax.Array, addend: jax.Array | None, on: Products
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, Mark]]:
    return linear_and_low(x, weight, low, b_ER, addend, on), (weight, low, b_ER, None if addend is None else ())


def _backward(
    on: Products, saved: tuple[jax.Array, jax.Array, jax.Array, Mark], dy: jax.Array
) -> tuple[jax.Array, None, jax.Array, jax.Array, jax.Array | None]:
    weight, low, b_ER, mark = saved
    return dy @ weight, None, dy @ b_ER, _rows(dy).T @ _rows(low), None if mark is None else dy


linear_and_low.defvjp(_forward, _backward)
