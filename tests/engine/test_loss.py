"""The chunked loss equals the loss of full logits, and full logits are never in memory.

Legend: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from trillora.engine.loss import (
    chunked_loss,
    chunked_token_scores,
    chunked_totals,
    token_losses,
    token_scores,
    totals,
)

pytestmark = pytest.mark.core

B, T, D, V = 3, 10, 8, 32
CHUNKS = (1, 5, 7, 64)  # one token, a divisor of T, not a divisor, longer than the sequence
ROUNDING = 1e-5  # of the largest value: float32 sums in another order


def head(base: dict[str, jax.Array], adapter: dict[str, jax.Array], hidden_BCD: jax.Array) -> jax.Array:
    """A head with an adapter and a nonlinearity, so that the gradient depends on the hidden states."""
    plain = hidden_BCD @ base["weight"].astype(hidden_BCD.dtype)
    return plain + jnp.tanh(hidden_BCD @ adapter["a"].astype(plain.dtype)) @ adapter["b"].astype(plain.dtype)


def draw(dtype: Any = jnp.float32) -> tuple[Any, Any, jax.Array, jax.Array, jax.Array]:
    """Base, head adapter, hidden states, targets, weights. One sequence and some tokens are not supervised."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    base = {"weight": normal(D, V).astype(dtype)}
    adapter = {"a": normal(D, 2), "b": normal(2, V)}
    weights = (generator.random((B, T)) < 0.7).astype(np.float32)
    weights[1] = 0
    weights[2, 4] = 0.5
    targets = generator.integers(0, V, (B, T)).astype(np.int32)
    return base, adapter, normal(B, T, D).astype(dtype), jnp.asarray(targets), jnp.asarray(weights)


def in_chunks(chunk: int, dtype: Any = jnp.float32) -> tuple[jax.Array, Any]:
    """Loss and its gradients with respect to head adapter and hidden states. The factor 3 tests the cotangent."""
    base, adapter, hidden, targets, weights = draw(dtype)

    def loss(adapter: Any, hidden: jax.Array) -> jax.Array:
        return 3 * chunked_loss(head, base, adapter, hidden, targets, weights, chunk)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(adapter, hidden)


def of_full_logits(dtype: Any = jnp.float32) -> tuple[jax.Array, Any]:
    base, adapter, hidden, targets, weights = draw(dtype)

    def loss(adapter: Any, hidden: jax.Array) -> jax.Array:
        return 3 * (token_losses(head(base, adapter, hidden), targets) * weights).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(adapter, hidden)


def assert_close(ours: Any, expected: Any, tolerance: float = ROUNDING) -> None:
    ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_token_losses_are_cross_entropy() -> None:
    base, adapter, hidden, targets, _ = draw()
    logits = head(base, adapter, hidden)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(np.asarray(logits)).flatten(0, 1),
        torch.tensor(np.asarray(targets)).flatten().long(),
        reduction="none",
    )
    assert_close(token_losses(logits, targets).reshape(-1), expected.numpy())


def test_token_losses_of_bfloat16_logits_are_float32() -> None:
    base, adapter, hidden, targets, _ = draw(jnp.bfloat16)
    logits = head(base, adapter, hidden)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_array_equal(token_losses(logits, targets), token_losses(logits.astype(jnp.float32), targets))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_loss_and_gradients_equal_those_of_full_logits(chunk: int) -> None:
    loss, gradients = in_chunks(chunk)
    expected_loss, expected_gradients = of_full_logits()
    assert_close(loss, expected_loss)
    jax.tree.map(assert_close, gradients, expected_gradients)


@pytest.mark.parametrize("chunk", [3, 64])
def test_tokens_without_weight_have_no_gradient(chunk: int) -> None:
    weights = draw()[-1]
    gradient = in_chunks(chunk)[1][1]
    unsupervised = np.asarray(weights) == 0
    assert 0 < unsupervised.sum() < unsupervised.size
    assert not np.asarray(gradient)[unsupervised].any()
    assert np.abs(np.asarray(gradient)[~unsupervised]).max(axis=-1).all()


def test_a_batch_without_supervision_has_no_loss_and_no_gradient() -> None:
    base, adapter, hidden, targets, weights = draw()

    def loss(adapter: Any, hidden: jax.Array) -> jax.Array:
        return chunked_loss(head, base, adapter, hidden, targets, jnp.zeros_like(weights), 3)

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(adapter, hidden)
    assert value == 0
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("chunk", [2, 7])
def test_loss_and_gradients_of_answers_equal_those_of_pytorch(chunk: int) -> None:
    """Supervised tokens anywhere, as in packed rows with several turns; weights other than one."""
    base, adapter, hidden, targets, weights = draw()
    weights = weights.at[0, 1].set(0.25).at[:, :3].multiply(jnp.array([[0.0], [1.0], [0.0]]))
    loss, gradients = jax.value_and_grad(
        lambda a, h: chunked_loss(head, base, a, h, targets, weights, chunk), argnums=(0, 1)
    )(adapter, hidden)

    def tensor(array: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(array), dtype=torch.float64)

    a, b, theirs = (tensor(each).requires_grad_() for each in (adapter["a"], adapter["b"], hidden))
    logits = theirs @ tensor(base["weight"]) + torch.tanh(theirs @ a) @ b
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(np.asarray(targets)).flatten().long(), reduction="none"
    )
    expected = (losses * tensor(weights).flatten()).sum()
    expected.backward()
    assert_close(loss, expected.item())
    for ours, leaf in ((gradients[0]["a"], a), (gradients[0]["b"], b), (gradients[1], theirs)):
        assert leaf.grad is not None
        assert_close(ours, leaf.grad)


@pytest.mark.parametrize(("supervised", "expected"), [((0, 0, 0), 0), ((1, 0, 4), 1), ((5, 2, 0), 2), ((10, 9, 1), 3)])
def test_chunks_without_supervised_tokens_are_skipped(supervised: tuple[int, ...], expected: int) -> None:
    base, adapter, hidden, targets, _ = draw()
    generator, weights, calls = np.random.default_rng(0), np.zeros((B, T), np.float32), []
    for row, count in enumerate(supervised):
        weights[row, generator.permutation(T)[:count]] = 1

    def counted(*arguments: Any) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return head(*arguments)

    def loss(weights: jax.Array, hidden: jax.Array) -> jax.Array:
        return chunked_loss(counted, base, adapter, hidden, targets, weights, 4)

    def evaluation(weights: jax.Array, hidden: jax.Array) -> jax.Array:
        return chunked_totals(counted, base, adapter, hidden, targets, weights, 4).loss

    def scores(weights: jax.Array, hidden: jax.Array) -> Any:
        return chunked_token_scores(counted, base, adapter, hidden, targets, weights, 4)

    for function in (jax.value_and_grad(loss, argnums=1), evaluation, scores):
        calls.clear()
        jax.block_until_ready(jax.jit(function)(jnp.asarray(weights), hidden))
        jax.effects_barrier()
        assert len(calls) == expected


def test_supervised_tokens_move_within_their_device() -> None:
    """Sequences are split over devices: nothing but sums passes between them."""
    base, adapter, hidden, targets, weights = draw()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:B]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    hidden, targets, weights = (jax.device_put(array, rows) for array in (hidden, targets, weights))

    def loss(adapter: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return 3 * chunked_loss(head, base, adapter, hidden, targets, weights, 4)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    text = step.lower(adapter, hidden, targets, weights).compile().as_text()
    assert "all-reduce" in text
    assert not [name for name in ("all-gather", "all-to-all", "collective-permute") if name in text]
    ours, expected = step(adapter, hidden, targets, weights), of_full_logits()
    jax.tree.map(assert_close, ours, expected)


def test_the_head_adapter_may_be_empty() -> None:
    base, adapter, hidden, targets, weights = draw()

    def frozen(base: Any, nothing: Any, hidden: jax.Array) -> jax.Array:
        assert nothing == {}
        return head(base, adapter, hidden)

    gradient = jax.grad(lambda h: chunked_loss(frozen, base, {}, h, targets, weights, 4))(hidden)
    assert_close(3 * gradient, of_full_logits()[1][1])


def test_the_gradient_of_bfloat16_hidden_states_is_bfloat16_and_as_accurate() -> None:
    """Adapters stay float32. Both versions round to bfloat16 (8 bits), but after different operations."""
    loss, (adapter_gradient, hidden_gradient) = in_chunks(4, jnp.bfloat16)
    expected_loss, (expected_adapter_gradient, expected_hidden_gradient) = of_full_logits(jnp.bfloat16)
    assert loss.dtype == jnp.float32
    assert hidden_gradient.dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 for g in adapter_gradient.values())
    assert_close(loss, expected_loss, 2**-8)
    assert_close(hidden_gradient, expected_hidden_gradient, 2**-7)
    jax.tree.map(lambda ours, e: assert_close(ours, e, 2**-6), adapter_gradient, expected_adapter_gradient)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_totals_equal_totals_of_full_logits(chunk: int) -> None:
    base, adapter, hidden, targets, weights = draw()
    logits = np.asarray(head(base, adapter, hidden))
    targets = jnp.where(jnp.arange(T) % 2, targets, logits.argmax(-1))  # about half of the predictions are correct
    ours = chunked_totals(head, base, adapter, hidden, targets, weights, chunk)
    hits = logits.argmax(-1) == np.asarray(targets)
    assert 0 < hits.sum() < hits.size
    assert ours.num_correct == (hits * np.asarray(weights)).sum()
    whole = totals(jnp.asarray(logits), targets, weights)
    assert ours.num_correct == whole.num_correct
    assert_close(ours.loss, whole.loss)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_of_weighted_tokens_equal_those_of_full_logits(chunk: int) -> None:
    base, adapter, hidden, targets, weights = draw()
    found = jax.jit(lambda h: chunked_token_scores(head, base, adapter, h, targets, weights, chunk))(hidden)
    expected = token_scores(head(base, adapter, hidden), targets)
    used = np.asarray(weights) > 0
    assert 0 < used.sum() < used.size
    assert_close(np.asarray(found.loss_BT)[used], np.asarray(expected.loss_BT)[used])
    np.testing.assert_array_equal(np.asarray(found.is_top_BT)[used], np.asarray(expected.is_top_BT)[used])


def arrays_of(jaxpr: Any) -> Iterator[Any]:
    """Every array that a program computes, including loops and called functions."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def largest_array(function: Any, *args: Any) -> tuple[int, int]:
    """The number of elements of the largest array, and the number of arrays."""
    sizes = [int(np.prod(aval.shape)) for aval in arrays_of(jax.make_jaxpr(function)(*args).jaxpr)]
    return max(sizes), len(sizes)


def test_full_logits_are_never_in_memory() -> None:
    base, adapter, hidden, targets, weights = draw()
    chunk = 4
    padded = B * 12 * V  # with the padding of the last chunk

    def loss(adapter: Any, hidden: jax.Array) -> jax.Array:
        return chunked_loss(head, base, adapter, hidden, targets, weights, chunk)

    size, num_arrays = largest_array(jax.value_and_grad(loss, argnums=(0, 1)), adapter, hidden)
    assert num_arrays > 50
    assert size == B * chunk * V < B * T * V < padded
    size, num_arrays = largest_array(
        lambda a, h: chunked_totals(head, base, a, h, targets, weights, chunk), adapter, hidden
    )
    assert num_arrays > 20
    assert size == B * chunk * V


def test_the_search_for_full_logits_finds_them_if_they_exist() -> None:
    base, adapter, hidden, targets, weights = draw()

    def loss(hidden: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda h: (token_losses(head(base, adapter, h), targets) * weights).sum())
        return jax.lax.scan(lambda sum_, h: (sum_ + body(h), None), jnp.float32(0), hidden[None])[0]

    assert largest_array(jax.grad(loss), hidden)[0] >= B * T * V
