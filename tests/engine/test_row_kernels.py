"""Kernels that work on rows, in the Pallas interpreter, equal PyTorch's float64 autograd: RMSNorm, and the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dose import slow_case
from gpu_lowering import lowered_for_a_gpu
from torch.nn import functional

from trillora.engine.kernels import rms_norm as norms
from trillora.engine.kernels.cross_entropy import PLAIN, Kernel, loss_and_gradient
from trillora.engine.kernels.rms_norm import Norm, rms_norm

# Relative to the largest value. float32: sums in another order; bfloat16: inputs are exact, results are rounded once.
ROUNDING = {"float32": 2e-6, "bfloat16": 2**-8}


def values(*shape: int, seed: int, dtype: Any = "float32", scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def in_torch(array: jax.Array, *, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(np.asarray(array, np.float64), requires_grad=requires_grad)


def assert_close(found: Any, expected: torch.Tensor, dtype: str, more: float = 0.0) -> None:
    theirs = expected.detach().numpy()
    error = np.abs(np.asarray(found, np.float64) - theirs).max()
    assert error <= (ROUNDING[dtype] + more) * np.abs(theirs).max()


def for_kernels(cases: list[tuple[tuple[int, ...], str, float]], plain: Any, kernel: Any) -> list[Any]:
    """Each case for the kernel; for plain jax, the first always and the others at full dose."""
    first, *others = cases
    return [*((*case, kernel) for case in cases), (*first, plain), *(slow_case(*case, plain) for case in others)]


# ---- RMSNorm


NORMS: list[tuple[tuple[int, ...], str, float]] = [
    ((3, 7, 64), "bfloat16", 1.0),  # the last tile of rows is not full
    ((4, 16, 64), "float32", 0.0),
    ((5, 96), "float32", 1.0),  # the width is no power of two
    ((2, 3, 2, 200), "bfloat16", 0.0),
    ((1, 5000), "float32", 0.0),  # a row is more than a tile
]


@pytest.mark.parametrize(("shape", "dtype", "offset", "kernel"), for_kernels(NORMS, "xla", "triton"))
def test_norm_and_gradients_are_pytorchs(shape: tuple[int, ...], dtype: str, offset: float, kernel: Any) -> None:
    x, *given = (values(*shape, seed=seed, dtype=dtype) for seed in (0, 1, 2))
    weight = values(shape[-1], seed=3, dtype=dtype)
    leaves = [in_torch(x, requires_grad=True), in_torch(weight, requires_grad=True)]
    expected = (functional.rms_norm(leaves[0], shape[-1:], leaves[1] + offset, eps=1e-3), leaves[0] * 1)
    for used in ([0], [1], [0, 1]):  # the norm, x as it comes out, and both

        @jax.jit
        def compute(x: jax.Array, weight: jax.Array, given: list[jax.Array], used: Any = tuple(used)) -> Any:
            norm = Norm(1e-3, offset, kernel, interpret=True)
            found, pull = jax.vjp(lambda *inputs: [rms_norm(*inputs, norm)[n] for n in used], x, weight)
            return found, pull(given)

        found, of_ours = compute(x, weight, [given[n] for n in used])
        theirs = [expected[n] for n in used]
        of_theirs = torch.autograd.grad(
            theirs, leaves, [in_torch(given[n]) for n in used], retain_graph=True, materialize_grads=True
        )
        assert {str(each.dtype) for each in (*found, *of_ours)} == {dtype}
        for one, other in zip((*found, *of_ours), (*theirs, *of_theirs), strict=True):
            assert_close(one, other, dtype)


@pytest.mark.parametrize("is_added", [False, True])
def test_the_weights_gradient_costs_nothing_if_it_is_not_used(is_added: bool) -> None:
    """Base weights are frozen: only two kernels are left, and no sum over rows. The gradient of an x that is added to a
    later result is part of the second kernel."""

    def frozen(x: jax.Array, weight: jax.Array) -> jax.Array:
        found, pull = jax.vjp(lambda x: rms_norm(x, weight, Norm(1e-6))[: 1 + is_added], x)
        result: jax.Array = pull(found)[0]
        return result

    text = lowered_for_a_gpu(frozen, values(64, 128, seed=0, dtype="bfloat16"), values(128, seed=1, dtype="bfloat16"))
    assert text.count("custom_call") == 2
    assert "stablehlo.reduce" not in text
    assert "stablehlo.add" not in text


def test_rows_that_the_kernels_can_compute() -> None:
    def is_supported(shape: tuple[int, ...], dtype: Any) -> bool:
        return norms.is_supported(jax.ShapeDtypeStruct(shape, dtype))  # type: ignore[arg-type]

    assert is_supported((16384, 2048), jnp.bfloat16)
    assert is_supported((1, norms.WIDEST), jnp.float32)
    assert not is_supported((1, norms.WIDEST + 1), jnp.bfloat16)
    assert not is_supported((2**20, 2048), jnp.bfloat16)  # places need more than 32 bits
    assert not is_supported((8, 64), jnp.float16)


# ---- the loss


LOSSES: list[tuple[tuple[int, ...], str, float]] = [
    ((2, 3, 700), "bfloat16", 3.0),  # the last block of columns is not full
    ((8, 512), "float32", 3.0),
    ((4, 1000), "float32", 200.0),  # exp() of the logits would overflow
    ((3, 100), "bfloat16", 0.0),  # all alike
    ((2, 1024 + 8), "bfloat16", 3.0),  # groups of 8, one of them in the last block
    ((2, 257), "float32", 3.0),  # no groups
]
LOSS_KERNEL = Kernel("triton", interpret=True, columns=256)


@pytest.mark.parametrize(("shape", "dtype", "scale", "kernel"), for_kernels(LOSSES, PLAIN, LOSS_KERNEL))
def test_loss_and_gradient_are_pytorchs(shape: tuple[int, ...], dtype: str, scale: float, kernel: Kernel) -> None:
    logits = values(*shape, seed=0, dtype=dtype, scale=scale)
    generator = np.random.default_rng(1)
    targets = jnp.asarray(generator.integers(0, shape[-1], shape[:-1]))
    weights = jnp.asarray(generator.random(shape[:-1]), jnp.float32).at[0].set(0.0)
    losses, gradient = jax.jit(loss_and_gradient, static_argnums=3)(logits, targets, weights, kernel)
    assert losses.dtype == jnp.float32
    assert gradient.dtype == logits.dtype

    theirs = in_torch(logits, requires_grad=True)
    flat = functional.cross_entropy(
        theirs.reshape(-1, shape[-1]), torch.tensor(np.asarray(targets)).long().reshape(-1), reduction="none"
    )
    (expected,) = torch.autograd.grad((flat.reshape(shape[:-1]) * in_torch(weights)).sum(), theirs)
    # The exponent of a probability is the difference of two logits, each rounded to float32.
    of_exponent = 2**-23 * float(jnp.abs(logits.astype(jnp.float32)).max())
    assert_close(losses, flat.reshape(shape[:-1]), "float32", of_exponent)
    assert_close(gradient, expected, dtype, of_exponent)
    np.testing.assert_array_equal(np.asarray(gradient[0], np.float32), 0)


def test_a_later_block_with_much_larger_logits_does_not_overflow() -> None:
    logits = jnp.concatenate([jnp.full((1, 256), -3e4), jnp.full((1, 256), 3e4)], axis=1)
    kernel = Kernel("triton", interpret=True, columns=128)
    losses, gradient = loss_and_gradient(logits, jnp.asarray([300]), jnp.ones(1), kernel)
    np.testing.assert_allclose(losses, np.log(256), rtol=1e-3)  # float32 has few digits left at 3e4
    assert jnp.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[0, :256], 0, atol=1e-9)


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    """Otherwise a chunk of logits would be in memory twice."""

    def compute(logits: jax.Array, targets: jax.Array) -> Any:
        return loss_and_gradient(logits * 2, targets, jnp.ones(4), Kernel("triton"))

    text = lowered_for_a_gpu(compute, values(4, 300, seed=0, dtype="bfloat16"), jnp.zeros(4, jnp.int32))
    assert text.count("custom_call") == 1
    assert "output_operand_alias" in text
