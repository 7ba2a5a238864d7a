"""Cross-entropy computed from hidden states in chunks, so the full logits are never in memory.

Training needs the gradient of the loss with respect to the hidden states. The forward pass computes it together with
the loss, while a chunk's logits exist, and the backward pass only scales it. This saves one matmul over the
vocabulary compared with recomputing the logits, and needs no more memory than one chunk of logits.

Example: B = 2, T = 5 and chunk = 2 give 3 chunks of 2 tokens from every sequence; the last one is padded with a token
of weight 0. Logits exist as [2, 2, V], never as [2, 5, V].

Only answers need logits: tokens with a weight are moved to the front of their sequence, and a chunk without any is
skipped. In the example, two answers of 2 tokens and of 1 need one chunk of the 3:

    weights [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]  ->  [[1, 1], [1, 0]]  [[0, 0], [0, 0]]  [[0, 0], [0, 0]]
                                                                      skipped           skipped

Legend: B sequences, T tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from trillora.engine.kernels.cross_entropy import PLAIN, Kernel, loss_and_gradient
from trillora.engine.types import Pytree

Carry = TypeVar("Carry")
Output = TypeVar("Output")
Head = Callable[[Pytree, Pytree, jax.Array], jax.Array]  # (base, head adapter, hidden [B, C, D]) -> logits [B, C, V]


class Totals(NamedTuple):
    """Sums over supervised tokens. The caller divides once, so any split of a batch gives the same loss."""

    loss: jax.Array
    num_correct: jax.Array  # tokens whose most likely prediction is the target


def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Negative log-likelihood of each target, in float32. The reference implementation."""
    logits = logits_BTV.astype(jnp.float32)
    target = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target


def totals(logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> Totals:
    """Loss and correct predictions from full logits."""
    hits = jnp.argmax(logits_BTV, axis=-1) == targets_BT
    return Totals((token_losses(logits_BTV, targets_BT) * weights_BT).sum(), (hits * weights_BT).sum())


class TokenScores(NamedTuple):
    """What a model says about every target of a batch."""

    loss_BT: jax.Array  # negative log-likelihood, in nats
    is_top_BT: jax.Array  # whether the target is the most likely token


def token_scores(logits_BTV: jax.Array, targets_BT: jax.Array) -> TokenScores:
    return TokenScores(token_losses(logits_BTV, targets_BT), jnp.argmax(logits_BTV, axis=-1) == targets_BT)


def divergences(logits_p_BTV: jax.Array, logits_q_BTV: jax.Array) -> jax.Array:
    """KL(p || q) of the next-token distributions at every position [B, T], in nats."""
    log_p, log_q = (jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1) for logits in (logits_p_BTV, logits_q_BTV))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def chunked_loss(
    head: Head,
    base: Pytree,
    head_adapter: Pytree,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    chunk: int,
    kernel: Kernel = PLAIN,
) -> jax.Array:
    """Summed loss, differentiable in `head_adapter` and `hidden_BTD`; `chunk` tokens of every sequence at a time."""

    @jax.custom_vjp
    def loss_only(head_adapter: Pytree, hidden_BTD: jax.Array) -> jax.Array:
        return chunked_totals(head, base, head_adapter, hidden_BTD, targets_BT, weights_BT, chunk).loss

    def loss_with_gradient(head_adapter: Pytree, hidden_BTD: jax.Array) -> tuple[jax.Array, tuple[Pytree, jax.Array]]:
        def one_chunk(
            carry: tuple[jax.Array, Pytree], xs: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, Pytree], jax.Array]:
            loss, adapter_gradient = carry
            hidden, targets, weights = xs
            logits, pull_back = jax.vjp(lambda a, h: head(base, a, h), head_adapter, hidden)
            losses, error = loss_and_gradient(logits, targets, weights, kernel)
            d_adapter, d_hidden = pull_back(error)
            adapter_gradient = jax.tree.map(jnp.add, adapter_gradient, d_adapter)
            return (loss + (losses * weights).sum(), adapter_gradient), d_hidden

        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, head_adapter))
        order_BT = _supervised_first(weights_BT)
        chunks = _chunks(*_take((hidden_BTD, targets_BT, weights_BT), order_BT), chunk=chunk)
        (loss, adapter_gradient), d_chunks = _scan_supervised(one_chunk, start, chunks)
        (d_hidden,) = _take((_join(d_chunks, hidden_BTD.shape[1]),), jnp.argsort(order_BT, axis=1))
        return loss, (adapter_gradient, d_hidden)

    def scale(gradients: tuple[Pytree, jax.Array], cotangent: jax.Array) -> tuple[Pytree, jax.Array]:
        return jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradients)

    loss_only.defvjp(loss_with_gradient, scale)
    return loss_only(head_adapter, hidden_BTD)


def log_probs(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """The log-probability of each target, from full logits."""
    return -token_losses(logits_BTV, targets_BT)


def chunked_log_probs(
    head: Head,
    base: Pytree,
    head_adapter: Pytree,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    counted_BT: jax.Array,
    chunk: int,
    kernel: Kernel = PLAIN,
) -> jax.Array:
    """`log_probs` [B, T] of the tokens that count, and zeros; differentiable in `head_adapter` and `hidden_BTD`.

    The gradient of token t with respect to its hidden state is a vector that does not depend on the loss. The forward
    pass stores it while the logits exist, and the backward pass multiplies it with the token's cotangent: no second
    matmul over the vocabulary. An adapter of the head itself has no such vector: if there is one, the backward pass
    computes the chunks again. `chunked_loss` needs neither, because its cotangents, the weights, are known before.
    """
    counted_BT = counted_BT.astype(jnp.float32)
    order_BT = _supervised_first(counted_BT)
    back_BT = jnp.argsort(order_BT, axis=1)
    length = hidden_BTD.shape[1]

    def of_chunk(adapter: Pytree, xs: tuple[jax.Array, ...], weights: jax.Array) -> tuple[jax.Array, Pytree, jax.Array]:
        """The losses of a chunk, and the gradients of their weighted sum."""
        hidden, targets = xs[:2]
        logits, pull_back = jax.vjp(lambda a, h: head(base, a, h), adapter, hidden)
        losses, error = loss_and_gradient(logits, targets, weights, kernel)
        return losses, *pull_back(error)

    @jax.custom_vjp
    def of_hidden(head_adapter: Pytree, hidden_BTD: jax.Array) -> jax.Array:
        return forward(head_adapter, hidden_BTD)[0]

    def forward(head_adapter: Pytree, hidden_BTD: jax.Array) -> tuple[jax.Array, tuple[Pytree, jax.Array, jax.Array]]:
        def one_chunk(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
            losses, _of_adapter, d_hidden = of_chunk(head_adapter, xs, xs[2])
            return None, (-losses * xs[2], -d_hidden)

        chunks = _chunks(*_take((hidden_BTD, targets_BT, counted_BT), order_BT), chunk=chunk)
        found, unit = (_join(part, length) for part in _scan_supervised(one_chunk, None, chunks)[1])
        found, unit = _take((found, unit), back_BT)
        return found, (head_adapter, hidden_BTD, unit)

    def backward(stored: tuple[Pytree, jax.Array, jax.Array], cotangent_BT: jax.Array) -> tuple[Pytree, jax.Array]:
        head_adapter, hidden_BTD, unit_BTD = stored
        d_hidden = (unit_BTD * cotangent_BT[..., None]).astype(unit_BTD.dtype)

        def one_chunk(gradient: Pytree, xs: tuple[jax.Array, ...]) -> tuple[Pytree, None]:
            d_adapter = of_chunk(head_adapter, xs, -xs[2])[1]
            return jax.tree.map(jnp.add, gradient, d_adapter), None

        d_adapter = jax.tree.map(jnp.zeros_like, head_adapter)
        if jax.tree.leaves(head_adapter):
            chunks = _chunks(*_take((hidden_BTD, targets_BT, cotangent_BT * counted_BT), order_BT), chunk=chunk)
            d_adapter = _scan_supervised(one_chunk, d_adapter, chunks)[0]
        return d_adapter, d_hidden

    of_hidden.defvjp(forward, backward)
    return of_hidden(head_adapter, hidden_BTD)


def chunked_totals(
    head: Head,
    base: Pytree,
    head_adapter: Pytree,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    chunk: int,
) -> Totals:
    """Loss and correct predictions, without a gradient."""

    def one_chunk(sums: Totals, xs: tuple[jax.Array, ...]) -> tuple[Totals, None]:
        hidden, targets, weights = xs
        part = totals(head(base, head_adapter, hidden), targets, weights)
        return jax.tree.map(jnp.add, sums, part), None

    start = Totals(jnp.float32(0), jnp.float32(0))
    chunks = _chunks(*_take((hidden_BTD, targets_BT, weights_BT), _supervised_first(weights_BT)), chunk=chunk)
    sums: Totals = _scan_supervised(one_chunk, start, chunks)[0]
    return sums


def chunked_token_scores(
    head: Head,
    base: Pytree,
    head_adapter: Pytree,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    chunk: int,
) -> TokenScores:
    """`token_scores` of the tokens that have a weight; what is returned for the others has no meaning. Only one chunk
    of logits exists at a time."""

    def one_chunk(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, TokenScores]:
        hidden, targets, _weights = xs
        return None, token_scores(head(base, head_adapter, hidden), targets)

    order_BT = _supervised_first(weights_BT)
    chunks = _chunks(*_take((hidden_BTD, targets_BT, weights_BT), order_BT), chunk=chunk)
    scores = (_join(part, hidden_BTD.shape[1]) for part in _scan_supervised(one_chunk, None, chunks)[1])
    return TokenScores(*_take(tuple(scores), jnp.argsort(order_BT, axis=1)))


def chunked_divergences(
    head: Head, base: Pytree, head_adapters: tuple[Pytree, Pytree], hidden: tuple[jax.Array, jax.Array], chunk: int
) -> jax.Array:
    """`divergences` of two adapters from their hidden states [B, T, D], one chunk of logits at a time."""

    def one_chunk(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        p, q = (head(base, adapter, part) for adapter, part in zip(head_adapters, xs, strict=True))
        return None, divergences(p, q)

    return _join(jax.lax.scan(one_chunk, None, _chunks(*hidden, chunk=chunk))[1], hidden[0].shape[1])


def _supervised_first(weights_BT: jax.Array) -> jax.Array:
    """The positions of each sequence, those with a weight first; otherwise in their order."""
    return jnp.argsort((weights_BT == 0).astype(jnp.int32), axis=1, stable=True)


def _take(arrays: tuple[jax.Array, ...], positions_BT: jax.Array) -> tuple[jax.Array, ...]:
    """The given positions of each sequence in [B, T, …]: as much work as looking up embeddings."""

    def take(array: jax.Array) -> jax.Array:
        index = positions_BT.reshape(*positions_BT.shape, *(1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, index, axis=1, mode="promise_in_bounds")

    return tuple(map(take, arrays))


def _scan_supervised(
    one_chunk: Callable[[Carry, tuple[jax.Array, ...]], tuple[Carry, Output]],
    start: Carry,
    chunks: tuple[jax.Array, ...],
) -> tuple[Carry, Output]:
    """`jax.lax.scan`, but a chunk whose weights, the last array, are all zero changes nothing and gives zeros. All
    devices of a mesh skip the same chunks: the sequence with the most supervised tokens decides."""

    def skip(carry: Carry, xs: tuple[jax.Array, ...]) -> tuple[Carry, Output]:
        output = jax.eval_shape(one_chunk, carry, xs)[1]
        return carry, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), output)

    scanned: tuple[Carry, Output] = jax.lax.scan(
        lambda carry, xs: jax.lax.cond(xs[-1].any(), one_chunk, skip, carry, xs), start, chunks
    )
    return scanned


def _chunks(*arrays: jax.Array, chunk: int) -> tuple[jax.Array, ...]:
    """[B, T, …] as [chunks, B, C, …]: every device works on its own sequences in every chunk. The last chunk is padded
    with tokens of weight zero."""
    chunk = min(chunk, arrays[0].shape[1])
    padding = -arrays[0].shape[1] % chunk

    def split(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2))
        return array.reshape(array.shape[0], -1, chunk, *array.shape[2:]).swapaxes(0, 1)

    return tuple(map(split, arrays))


def _join(chunks: jax.Array, num_tokens: int) -> jax.Array:
    joined = chunks.swapaxes(0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :num_tokens]
