"""What a step computes with the model: the loss to minimize, and what an evaluation sums up."""

from __future__ import annotations

from collections.abc import Callable

import jax

from trillora.engine.hash_random import MaskKey
from trillora.engine.kernels.cross_entropy import PLAIN, Kernel
from trillora.engine.loss import (
    TokenScores,
    Totals,
    chunked_divergences,
    chunked_loss,
    chunked_token_scores,
    chunked_totals,
    divergences,
    token_losses,
    token_scores,
    totals,
)
from trillora.engine.step import Batch, Evaluation, Loss
from trillora.model.bridge import CausalLM, Inputs
from trillora.model.layout import Tree
from trillora.step.shardings import with_whole_head


def loss_chunk_positions(tokens: int, rows_per_device: int, sequence_length: int) -> int:
    """Positions per sequence that make about this many tokens on a device."""
    return max(1, min(sequence_length, tokens // max(rows_per_device, 1)))


def model_inputs(batch: Batch, *, packed: bool) -> Inputs:
    """The model's inputs. A sequence with one document needs no segment ids: only padding follows it, and attention is
    causal. Kernels are faster without them."""
    names = ("tokens", "positions", "segments") if packed else ("tokens", "positions")
    return {name: batch[name] for name in names}


def loss_function(model: CausalLM, chunk: int, *, packed: bool) -> Loss:
    """The summed loss of a batch. If a model's head cannot be called separately, the full logits are computed."""

    kernel = Kernel("triton", interpret=model.interpret) if model.kernels == "fused" else PLAIN

    def loss(adapter: Tree, base: Tree, batch: Batch, key: MaskKey) -> jax.Array:
        dropout_key = key if model.has_dropout else None
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            logits = model.logits(base, adapter, inputs, dropout_key)
            return (token_losses(logits, batch["targets"]) * batch["weights"]).sum()
        hidden = model.hidden(base, adapter, inputs, dropout_key)
        head_adapter, base = model.head_adapter(adapter), with_whole_head(model, base)
        targets, weights = batch["targets"], batch["weights"]
        return chunked_loss(model.head, base, head_adapter, hidden, targets, weights, chunk, kernel)

    return loss


def evaluation_function(model: CausalLM, chunk: int, *, packed: bool) -> Evaluation:
    def evaluate(adapter: Tree, base: Tree, batch: Batch) -> Totals:
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            return totals(model.logits(base, adapter, inputs), batch["targets"], batch["weights"])
        hidden = model.hidden(base, adapter, inputs)
        head_adapter = model.head_adapter(adapter)
        return chunked_totals(model.head, base, head_adapter, hidden, batch["targets"], batch["weights"], chunk)

    return evaluate


def token_score_function(model: CausalLM, chunk: int, *, packed: bool) -> Callable[[Tree, Tree, Batch], TokenScores]:
    """For every token of a batch that has a weight, its loss and whether it is the most likely one."""

    def scores(adapter: Tree, base: Tree, batch: Batch) -> TokenScores:
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            return token_scores(model.logits(base, adapter, inputs), batch["targets"])
        hidden = model.hidden(base, adapter, inputs)
        head_adapter, weights = model.head_adapter(adapter), batch["weights"]
        return chunked_token_scores(model.head, base, head_adapter, hidden, batch["targets"], weights, chunk)

    return scores


def divergence_function(model: CausalLM, chunk: int) -> Callable[[tuple[Tree, Tree], Tree, Batch], jax.Array]:
    """KL(first || second) of two adapters' next-token distributions at every position of a batch [B, T]."""

    def divergence(adapters: tuple[Tree, Tree], base: Tree, batch: Batch) -> jax.Array:
        inputs = model_inputs(batch, packed=False)
        if not model.has_separate_head:
            first, second = (model.logits(base, adapter, inputs) for adapter in adapters)
            return divergences(first, second)
        first, second = (model.hidden(base, adapter, inputs) for adapter in adapters)
        heads = (model.head_adapter(adapters[0]), model.head_adapter(adapters[1]))
        return chunked_divergences(model.head, base, heads, (first, second), chunk)

    return divergence
