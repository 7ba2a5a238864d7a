"""The logits of what was trained: our engine in float32 on the CPU, with the trained weights and without them.

    reference = compute_reference(subject, rows, listener)
    reference.logits[0].trained     # log-probabilities of the 100 most likely tokens after the first prompt
    with_stored(reference.logits, folder, listener)[0].stored   # the same with the weights of a merged model
    compare(reference.logits, read) # how far another program's log-probabilities are from them

An export in bfloat16 or in fewer bits has other logits than what was trained, because it rounds. So its reader is
compared with our engine on the rounded weights: then one limit fits all types.

Log-probabilities are compared at the last token of each prompt: all readers can give these, llama.cpp too.

Legend: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from trillora.certify.certificate import PromptLogits
from trillora.certify.subject import NotHere, Subject
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.devices.chips import GIB
from trillora.devices.mesh import MeshShape, find_devices, make_mesh
from trillora.errors import TrilloraError
from trillora.events import Listener, Note
from trillora.model.adapters import fit_adapter, fitting
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Tree
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights
from trillora.step.decisions import memory_limit
from trillora.step.shardings import shard_adapter, weight_shardings

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(first, second):\n    return first +",
    "Water boils at 100 degrees. Ice melts at",
)
QUESTIONS = ("Write a short letter to a friend about the weather.", "What is 7 plus 12?")
MAX_PROMPT = 48  # tokens
MAX_ROW = 256  # tokens of a sample row
NUM_LIKELIEST = 100
FULL_MEMORY = 0.8  # fraction of the free memory that the base may need in float32


@dataclass(frozen=True)
class Reference:
    logits: tuple[PromptLogits, ...]
    rows: tuple[float, float] | None = None  # `row_loss` of the sample rows: base, trained


@dataclass(frozen=True)
class ReaderDifference:
    """How far a reader is from our engine, over all prompts."""

    difference: float  # largest, of the log-probabilities of the most likely tokens, with the same weights
    divergence: float  # largest KL divergence from the trained model, in nats
    change: float  # largest difference between trained model and base, of the same tokens
    from_base: float  # largest difference between reader and base


def prompts_of(subject: Subject) -> list[list[int]]:
    """Fixed prompts as tokens: texts, questions in the chat template, and the tokens that the adapter trains."""
    opened, spec = subject.opened, subject.trained.spec
    size = opened.config.get_text_config().vocab_size
    largest = max(size, *(token + 1 for token in (spec.tokens.ids if spec.tokens else (0,))))
    rows = [list(opened.tokenizer(text)["input_ids"]) for text in TEXTS]
    if subject.template is not None:
        for question in QUESTIONS:
            with suppress(TrilloraError):  # a template that refuses a plain question
                rows.append(subject.prompts.encode(question))
    if spec.tokens is not None:
        rows.append([*rows[0][:4], *spec.tokens.ids[:8]])
    known = [[token for token in row if token < largest][-MAX_PROMPT:] for row in rows]
    return [row or [0] for row in known]


def compute_reference(subject: Subject, rows: Sequence[TokenizedDocument], listener: Listener) -> Reference:
    """Runs the trained weights and the base. Raises `NotHere` if the machine cannot."""
    opened, trained = subject.opened, subject.trained
    prompts = prompts_of(subject)
    listener(Note("Computing the logits of what was trained, in float32 on the CPU"))
    mesh = make_mesh(find_devices("cpu", None)[:1], MeshShape())
    with fitting(str(subject.folder)):
        model = CausalLM(opened.config, ModelOptions(remat="none", mesh=mesh), lora=trained.spec)
    _check_memory(model)
    fitted = fit_adapter(trained.matrices, model.adapter_layout, where=trained.source)
    base = load_weights(opened.folder, model.module, model.layout, weight_shardings(model, mesh), listener)
    places = shard_adapter(model.adapter_layout, mesh)
    adapters = jax.device_put([fitted, model.initial_adapter(base, seed=0)], [places, places])
    found = [_run(model, base, adapter, prompts, rows) for adapter in adapters]
    (own_BV, own_BT), (base_BV, base_BT) = found
    if not np.isfinite(own_BV).all():
        raise TrilloraError(
            "The logits of the trained weights are not finite.",
            where=trained.source,
            do="train again with a lower learning rate",
        )
    logits = tuple(_recorded(prompt, own_BV[b], base_BV[b]) for b, prompt in enumerate(prompts))
    losses = None
    if rows:
        losses = row_loss(base_BT[len(prompts) :], rows), row_loss(own_BT[len(prompts) :], rows)
        if not np.isfinite(losses).all():
            what = "The loss on the sample rows is not finite, with or without the adapter."
            raise TrilloraError(what, where=trained.source, do="look for damaged weights in the base: trillora verify")
    return Reference(logits, losses)


def with_stored(logits: Sequence[PromptLogits], folder: Path, listener: Listener) -> tuple[PromptLogits, ...]:
    """The same with the logits of the model in `folder`: a merged model with its weights as they are rounded."""
    listener(Note("Computing the logits of the rounded weights, in float32 on the CPU"))
    mesh = make_mesh(find_devices("cpu", None)[:1], MeshShape())
    model = CausalLM(load_config(folder), ModelOptions(remat="none", mesh=mesh))
    _check_memory(model)
    base = load_weights(folder, model.module, model.layout, weight_shardings(model, mesh), listener)
    found_BV, _ = _run(model, base, {}, [each.tokens for each in logits], ())
    if not np.isfinite(found_BV).all():
        what = "The logits of the rounded weights are not finite."
        raise TrilloraError(what, where=str(folder), do="export it in float32 or bfloat16")
    return tuple(
        dataclasses.replace(each, stored=tuple(round(float(found_BV[b, id_]), 6) for id_ in each.ids))
        for b, each in enumerate(logits)
    )


def _check_memory(model: CausalLM) -> None:
    needed = sum(leaf.num_bytes for leaf in model.layout.values())
    limit = memory_limit(find_devices("cpu", None)[:1])
    if limit is not None and needed > FULL_MEMORY * limit:
        raise NotHere(
            f"The model needs {needed / GIB:.1f} GiB in float32, and {limit / GIB:.1f} GiB are free.",
            do="certify it on a machine with more memory",
        )


def _run(
    model: CausalLM, base: Tree, adapter: Tree, prompts: Sequence[Sequence[int]], rows: Sequence[TokenizedDocument]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities after each prompt [B, V], and of each next token [B, T] of prompts and rows."""
    tokens_BT, targets_BT, ends_B = _batch(prompts, rows)

    @jax.jit
    def run(base: Tree, adapter: Tree, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV = model.logits(base, adapter, {"tokens": tokens_BT}).astype(jnp.float32)
        totals_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        last_BV = logits_BTV[jnp.arange(len(tokens_BT)), ends_B]
        chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return jax.nn.log_softmax(last_BV, axis=-1)[: len(prompts)], chosen_BT - totals_BT

    with jax.default_matmul_precision("highest"):
        last_BV, chosen_BT = run(base, adapter, tokens_BT)
    return np.asarray(last_BV), np.asarray(chosen_BT)


def _batch(prompts: Sequence[Sequence[int]], rows: Sequence[TokenizedDocument]) -> tuple[np.ndarray, ...]:
    """Tokens, the token after each, and the place of each prompt's last token. Sequences are filled up at the end,
    which a causal model does not see."""
    texts = [*map(list, prompts), *(row.tokens[:MAX_ROW].tolist() for row in rows)]
    length = -(-max(map(len, texts)) // 16) * 16
    tokens_BT = np.zeros((len(texts), length), np.int32)
    for b, text in enumerate(texts):
        tokens_BT[b, : len(text)] = text
    return tokens_BT, np.roll(tokens_BT, -1, axis=1), np.array([len(text) - 1 for text in texts])


def row_loss(logprobs_BT: np.ndarray, rows: Sequence[TokenizedDocument]) -> float:
    """The mean over the trained tokens. With rejected or bad answers, how much more likely they are than the others,
    per answer: this difference is what is learned."""
    total = count = 0.0
    for b, row in enumerate(rows):
        is_target = row.supervised[1:MAX_ROW]
        total -= float(np.sign(row.weight) * logprobs_BT[b, : len(is_target)][is_target].sum())
        count += int(is_target.sum())
    return total / max(len(rows) if any(row.weight < 0 for row in rows) else count, 1)


def _recorded(prompt: Sequence[int], own_V: np.ndarray, base_V: np.ndarray) -> PromptLogits:
    ids = np.argsort(-own_V, kind="stable")[: min(NUM_LIKELIEST, len(own_V))]
    ids = ids[np.isfinite(base_V[ids])]  # tokens that the base does not have
    own, base = (tuple(round(float(value), 6) for value in array[ids]) for array in (own_V, base_V))
    return PromptLogits(tuple(map(int, prompt)), tuple(map(int, ids)), own, base)


def compare(logits: Sequence[PromptLogits], read: Sequence[np.ndarray]) -> ReaderDifference:
    """`read` has a reader's log-probabilities of the whole vocabulary after each prompt."""
    found = []
    for each, logprobs_V in zip(logits, read, strict=True):
        ids, trained, base = np.array(each.ids), np.array(each.trained), np.array(each.base)
        if ids.max() >= len(logprobs_V):
            raise TrilloraError(
                f"It has {len(logprobs_V):,} tokens; what was trained has at least {ids.max() + 1:,}.",
                do="export it again with the tokenizer of the run",
            )
        own = np.asarray(logprobs_V, np.float64)[ids]
        if not np.isfinite(own).all():
            what = "Its logits are not finite: values overflow, or the file is damaged."
            raise TrilloraError(what, do="export it in float32 or bfloat16, or look for layers with huge weights")
        share = np.exp(trained)
        divergence = max(0.0, float((share * (trained - own)).sum()))  # of the first 100 tokens: may round below zero
        exact = np.array(each.stored) if each.stored else trained
        found.append((abs(own - exact).max(), divergence, abs(trained - base).max(), abs(own - base).max()))
    return ReaderDifference(*(float(max(column)) for column in zip(*found, strict=True)))
