"""What a step computes with the model: the loss to minimize, and what an evaluation sums up.

    objective = objective_of(model, stage.recipe, chunk=512)
    step = make_train_step(objective, optimizer, schedule, max_grad_norm=1.0)
    sums = evaluation_of(model, stage.recipe, chunk=512)(adapter, reference, base, beta, batch)

A loss of answers to learn is a sum over tokens. A loss of preferences needs two forward passes, with the adapter and
with the reference, of which only the first has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from trillora.engine.hash_random import MaskKey
from trillora.engine.kernels.cross_entropy import PLAIN, Kernel
from trillora.engine.loss import (
    TokenScores,
    chunked_divergences,
    chunked_log_probs,
    chunked_loss,
    chunked_token_scores,
    chunked_totals,
    divergences,
    log_probs,
    token_losses,
    token_scores,
    totals,
)
from trillora.engine.preference.answers import Answers, Pairs, counts_of_labels, counts_of_pairs
from trillora.engine.preference.losses import (
    LABEL_LOSSES,
    METRICS,
    PAIR_LOSSES,
    REWARD_OF_MEANS,
    LossNumbers,
    divergence_of,
    sum_of_labels,
    sum_of_pairs,
)
from trillora.engine.step import Batch, Counts, Evaluation, Loss, Means, Objective, Sums, token_objective
from trillora.model.bridge import CausalLM, Inputs
from trillora.model.layout import Tree
from trillora.recipe.losses import is_file
from trillora.recipe.schema import StageRecipe, TrainSection
from trillora.step.loss.own_loss import load_loss
from trillora.step.shardings import with_whole_head

REFERENCE = "reference"  # an array of a batch: log-probabilities by the reference that were computed before
OTHER = "other_"  # arrays of a batch in which every question has the answer of another row
BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "weights": jnp.float32,
    "segments": jnp.int32,
    "positions": jnp.int32,
}


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


def objective_of(model: CausalLM, recipe: StageRecipe, chunk: int, beta: float | jax.Array | None = None) -> Objective:
    """What the stage minimizes. `beta` replaces the recipe's, for an adapter of a sweep."""
    train = recipe.train
    if train.rows == "answers":
        return token_objective(loss_function(model, chunk, packed=recipe.data.pack))
    numbers = numbers_of(train)
    numbers = numbers if beta is None else numbers._replace(beta=beta)
    both, sums_of = _both_log_probs(model, recipe, chunk), _preference_sums(train, numbers)

    def sums(
        adapter: Tree, reference: Tree, base: Tree, batch: Batch, _key: MaskKey, counts: Counts
    ) -> tuple[jax.Array, Means]:
        return sums_of(*both(adapter, reference, base, batch), batch, counts)

    def before(adapter: Tree, reference: Tree, base: Tree, batch: Batch) -> Means:
        other = {name.removeprefix(OTHER): array for name, array in batch.items() if name.startswith(OTHER)}
        return {"kl": divergence_of(*both(adapter, reference, base, other), other)}

    of_rows = counts_of_pairs if train.rows == "pairs" else counts_of_labels
    return Objective(sums, of_rows, METRICS, before if train.compares_others else None)


def _both_log_probs(
    model: CausalLM, recipe: StageRecipe, chunk: int
) -> Callable[[Tree, Tree, Tree, Batch], tuple[jax.Array, jax.Array]]:
    """The log-probabilities of the trained tokens by the policy and by the reference, without dropout."""
    log_probs_of = log_prob_function(model, chunk, packed=has_segments(recipe))

    def both(adapter: Tree, reference: Tree, base: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        policy = log_probs_of(adapter, base, batch)
        if REFERENCE in batch:
            return policy, batch[REFERENCE]
        if not recipe.train.has_reference:
            return policy, jnp.zeros_like(policy)
        return policy, jax.lax.stop_gradient(log_probs_of(reference, base, batch))

    return both


def _preference_sums(
    train: TrainSection, numbers: LossNumbers
) -> Callable[[jax.Array, jax.Array, Batch, Counts], tuple[jax.Array, Means]]:
    names, factors = train.losses, train.loss_weights or (1.0,) * len(train.losses)
    if train.rows == "labels":
        of_labels = [(factor, LABEL_LOSSES[name]) for factor, name in zip(factors, names, strict=True)]
        return lambda policy, reference, batch, counts: sum_of_labels(
            of_labels, policy, reference, Answers.of(batch, counts), numbers
        )
    known = (load_loss(name) if is_file(name) else PAIR_LOSSES[name] for name in names)
    of_pairs = list(zip(factors, known, strict=True))
    are_means = names[0] in REWARD_OF_MEANS
    return lambda policy, reference, batch, counts: sum_of_pairs(
        of_pairs, policy, reference, Pairs.of(batch, counts), numbers, reward_of_means=are_means
    )


def numbers_of(train: TrainSection) -> LossNumbers:
    options = {name: getattr(train, name) for name in LossNumbers._fields if name != "beta"}
    return LossNumbers(beta=train.strength, **options)


def has_segments(recipe: StageRecipe) -> bool:
    """Whether a sequence has several documents."""
    return recipe.data.pack or recipe.train.rows == "pairs"


def batch_dtypes(recipe: StageRecipe) -> dict[str, jnp.dtype]:
    """The arrays of a batch."""
    others = {f"{OTHER}{name}": dtype for name, dtype in BATCH_DTYPES.items()}
    reference = {REFERENCE: jnp.float32} if recipe.train.precompute_ref_log_probs else {}
    return {**BATCH_DTYPES, **(others if recipe.train.compares_others else {}), **reference}


def reference_function(model: CausalLM, recipe: StageRecipe, chunk: int) -> Callable[[Tree, Tree, Batch], jax.Array]:
    """(reference, base, batch) -> what the batches of the stage have as REFERENCE."""
    return log_prob_function(model, chunk, packed=has_segments(recipe))


def log_prob_function(model: CausalLM, chunk: int, *, packed: bool) -> Callable[[Tree, Tree, Batch], jax.Array]:
    """The log-probabilities of the tokens that have a weight, and zeros."""
    kernel = Kernel("triton", interpret=model.interpret) if model.kernels == "fused" else PLAIN

    def of_tokens(adapter: Tree, base: Tree, batch: Batch) -> jax.Array:
        inputs, targets, counted = model_inputs(batch, packed=packed), batch["targets"], batch["weights"] != 0
        if not model.has_separate_head:
            return jnp.where(counted, log_probs(model.logits(base, adapter, inputs), targets), 0)
        hidden = model.hidden(base, adapter, inputs)
        head_adapter, base = model.head_adapter(adapter), with_whole_head(model, base)
        return chunked_log_probs(model.head, base, head_adapter, hidden, targets, counted, chunk, kernel)

    return of_tokens


def evaluation_of(model: CausalLM, recipe: StageRecipe, chunk: int) -> Evaluation:
    """Sums over a batch of the evaluation set. Adapters of a sweep share the program, so beta is an argument."""
    if recipe.train.rows == "answers":
        return _evaluation_of_tokens(model, chunk, packed=recipe.data.pack)
    both = _both_log_probs(model, recipe, chunk)

    def eval_step(adapter: Tree, reference: Tree, base: Tree, beta: jax.Array, batch: Batch) -> Sums:
        objective = objective_of(model, recipe, chunk, beta)
        counts = objective.counts(batch)
        if objective.before is not None:
            counts = counts._replace(means=objective.before(adapter, reference, base, batch))
        policy, by_reference = both(adapter, reference, base, batch)
        sums_of = _preference_sums(recipe.train, numbers_of(recipe.train)._replace(beta=beta))
        # A mean over the tokens of chosen answers is a part of some losses. It is of the whole evaluation set, so it is
        # summed apart: without it, the divisor of `Pairs.token_mean` is infinite; with it, the batch's own sum is left.
        of_pairs, means = sums_of(policy, by_reference, batch, counts._replace(num_wanted=jnp.float32(jnp.inf)))
        with_tokens, _ = sums_of(policy, by_reference, batch, counts._replace(num_wanted=counts.divisor))
        wanted = jnp.maximum(batch["weights"], 0)
        return {
            "loss": of_pairs,
            "token_loss": with_tokens - of_pairs,
            "num_tokens": counts.num_tokens,
            "num_wanted": wanted.sum(),
            "wanted_log_p": (wanted * policy).sum(),
            **{name: jnp.stack(mean) for name, mean in means.items()},
        }

    return eval_step


def _evaluation_of_tokens(model: CausalLM, chunk: int, *, packed: bool) -> Evaluation:
    def eval_step(adapter: Tree, _reference: Tree, base: Tree, _beta: jax.Array, batch: Batch) -> Sums:
        inputs, targets, weights = model_inputs(batch, packed=packed), batch["targets"], batch["weights"]
        if model.has_separate_head:
            hidden, head_adapter = model.hidden(base, adapter, inputs), model.head_adapter(adapter)
            found = chunked_totals(model.head, base, head_adapter, hidden, targets, weights, chunk)
        else:
            found = totals(model.logits(base, adapter, inputs), targets, weights)
        return {"loss": found.loss, "num_correct": found.num_correct, "num_tokens": weights.sum()}

    return eval_step


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
