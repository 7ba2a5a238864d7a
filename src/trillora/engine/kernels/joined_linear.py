"""Linear layers with the same input, such as q, k and v, or gate and up, with the A matrices of their adapters.

    y_n = x W_nᵀ          low = x Aᵀ          the W are frozen, A is all A matrices below each other

The gradient of x is a sum of products. It is written so that each product is added to the sum before it, which cuBLAS
does at the end of the product. XLA leaves the last addition to a pass of its own if the sum comes first in it.

Legend: M rows, D inputs, E outputs, Q ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

Outputs = tuple[tuple[jax.Array, ...], jax.Array]


@jax.custom_vjp
def joined_linear(x: jax.Array, weights: Sequence[jax.Array], a_QD: jax.Array) -> Outputs:
    """The outputs of all weights [E, D], and what A gives."""
    return tuple(x @ weight.T for weight in weights), x @ a_QD.T


def _forward(
    x: jax.Array, weights: Sequence[jax.Array], a_QD: jax.Array
) -> tuple[Outputs, tuple[jax.Array, Sequence[jax.Array], jax.Array]]:
    return joined_linear(x, weights, a_QD), (x, weights, a_QD)


def _backward(
    saved: tuple[jax.Array, Sequence[jax.Array], jax.Array], gradients: Outputs
) -> tuple[jax.Array, None, jax.Array]:
    x, weights, a_QD = saved
    outputs, low = gradients
    dx = low @ a_QD
    for dy, weight in zip(outputs, weights, strict=True):
        dx = dy @ weight + dx
    rows, low_MQ = x.reshape(-1, x.shape[-1]), low.reshape(-1, low.shape[-1])
    return dx, None, low_MQ.T @ rows


joined_linear.defvjp(_forward, _backward)
