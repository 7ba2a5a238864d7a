"""How likely a model finds given tokens: the losses of documents, and the log-probability of a text after a prompt.

    scorer = TokenScorer(generator)
    scorer.continuations([Continuation((1, 72, 9), (41, 2))], generator.adapter)
    # [Likelihood(log_probability=-3.2, num_tokens=2, is_greedy=False)]

Base and adapter run through the same programs, one for each shape. Sequences are padded to the generator's buckets, so
there are few shapes.

Legend: B sequences, T tokens, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from trillora.data.batches import Arrays, Batches
from trillora.devices.mesh import put_batch
from trillora.errors import TrilloraError
from trillora.evaluation.token_metrics import TokenMetrics, TokenSums
from trillora.events import Listener, Progress, ignore_events
from trillora.generation.generator import Generator, bucket_length
from trillora.model.layout import Tree
from trillora.step.loss.objective import divergence_function, loss_chunk_positions, token_score_function

Encode = Callable[[str], list[int]]  # a text to its tokens
LOSS_CHUNK = 1024  # tokens whose logits exist at once, if the recipe does not say


class Continuation(NamedTuple):
    """Tokens, and the tokens after them whose probability is asked for."""

    prompt: tuple[int, ...]  # not empty
    tokens: tuple[int, ...]


class Likelihood(NamedTuple):
    log_probability: float  # of all tokens together, in nats
    num_tokens: int
    is_greedy: bool  # each token is the most likely one


def in_two(encode: Encode, context: str, continuation: str) -> Continuation:
    """The tokens of both texts together, split where the context's tokens end. A space at the end of the context goes
    to the continuation: most tokenizers put it into the next word's token."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, first = encode(context + continuation), encode(context)
    return Continuation(tuple(whole[: len(first)]), tuple(whole[len(first) :]))


@dataclass(frozen=True)
class DocumentScores:
    """Sums over the trained tokens of each document."""

    loss_N: NDArray[np.float64]
    num_correct_N: NDArray[np.float64]
    num_tokens_N: NDArray[np.float64]

    def metrics(self) -> TokenMetrics:
        sums = TokenSums()
        parts = {"loss": self.loss_N, "num_correct": self.num_correct_N, "num_tokens": self.num_tokens_N}
        sums.add({name: part.sum() for name, part in parts.items()})
        return sums.metrics()


class TokenScorer:
    """The programs that score tokens, for one generator."""

    def __init__(self, generator: Generator, *, loss_chunk: int = LOSS_CHUNK, batch_size: int | None = None) -> None:
        self._generator, self._loss_chunk = generator, loss_chunk
        self._batch_size = batch_size or generator.batch_size
        # Functions to jit, by the number of positions of a chunk: it is part of the program.
        self._scores: Callable[..., Any] = cache(self._score_program)
        self._divergences: Callable[..., Any] = cache(self._divergence_program)

    def documents(
        self, batches: Batches, adapters: dict[str, Tree], *, packed: bool, listener: Listener = ignore_events
    ) -> dict[str, DocumentScores]:
        """The losses of all documents, for each adapter. Of a pair, the loss of the chosen answer."""
        count = len(batches.documents)
        sums = {name: DocumentScores(*(np.zeros(count) for _ in range(3))) for name in adapters}
        for number in range(batches.steps_per_epoch):
            listener(Progress("Loss of the trained tokens", number, batches.steps_per_epoch))
            batch, documents = batches.batch(number), batches.segments_of(number)
            placed, program = put_batch(batch, self._generator.mesh), self._scores(self._chunk(batch), packed)
            for name, adapter in adapters.items():
                found = program(adapter, self._generator.base, placed)
                _add(sums[name], documents, batch, np.asarray(found.loss_BT), np.asarray(found.is_top_BT))
        listener(Progress("Loss of the trained tokens", batches.steps_per_epoch, batches.steps_per_epoch))
        return sums

    def continuations(
        self,
        asked: Sequence[Continuation],
        adapter: Tree,
        *,
        label: str = "Log-probabilities",
        listener: Listener = ignore_events,
    ) -> list[Likelihood]:
        """The log-probability of each continuation after its prompt, in order."""
        for number, one in enumerate(asked, 1):
            self._check(one, f"text {number} of {len(asked)}")
        found: dict[int, Likelihood] = {}
        starts = [len(one.prompt) - 1 for one in asked]
        for group, batch in _groups([(*one.prompt, *one.tokens) for one in asked], self._batch_size, starts):
            listener(Progress(label, len(found), len(asked)))
            program = self._scores(self._chunk(batch), False)
            scores = program(adapter, self._generator.base, put_batch(batch, self._generator.mesh))
            loss_BT, is_top_BT = np.asarray(scores.loss_BT), np.asarray(scores.is_top_BT)
            for row, number in enumerate(group):
                prompt, tokens = asked[number]
                place = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
                log_probability = -float(loss_BT[row, place].sum(dtype=np.float64))
                found[number] = Likelihood(log_probability, len(tokens), bool(is_top_BT[row, place].all()))
        if asked:
            listener(Progress(label, len(asked), len(asked)))
        return [found[number] for number in range(len(asked))]

    def divergence(
        self, texts: Sequence[tuple[int, ...]], first: Tree, second: Tree, listener: Listener = ignore_events
    ) -> NDArray[np.float64]:
        """KL(first || second) of each predicted token of the texts, in nats, all in one array."""
        parts: list[NDArray[np.float64]] = []
        for group, batch in _groups(texts, self._batch_size):
            listener(Progress("General texts", len(parts), len(texts)))
            program = self._divergences(self._chunk(batch))
            placed = put_batch(batch, self._generator.mesh)
            kl_BT = np.asarray(program((first, second), self._generator.base, placed), np.float64)
            parts += [kl_BT[row, : len(texts[number]) - 1] for row, number in enumerate(group)]
        listener(Progress("General texts", len(texts), len(texts)))
        return np.concatenate(parts)

    def _chunk(self, batch: Arrays) -> int:
        return loss_chunk_positions(self._loss_chunk, *batch["tokens"].shape)

    def _score_program(self, chunk: int, packed: bool) -> Any:
        return jax.jit(token_score_function(self._generator.model, chunk, packed=packed))

    def _divergence_program(self, chunk: int) -> Any:
        return jax.jit(divergence_function(self._generator.model, chunk))

    def _check(self, asked: Continuation, where: str) -> None:
        if not asked.prompt or not asked.tokens:
            raise TrilloraError(
                "A prompt or its continuation has no tokens.", where=where, do="write at least one word"
            )
        length, longest = len(asked.prompt) + len(asked.tokens), self._generator.longest
        if longest is not None and length > longest + 1:  # the last token is only predicted
            what = f"The text has {length:,} tokens; the model's limit is {longest + 1:,}."
            raise TrilloraError(what, where=where, do="shorten it")


def _groups(
    texts: Sequence[Sequence[int]], batch_size: int, starts: Sequence[int] | None = None
) -> list[tuple[list[int], Arrays]]:
    """Texts of similar length as batches of one size: their numbers, and the arrays [B, T] of an evaluation step. The
    predictions of a text have a weight from its start on."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    groups = []
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        length = bucket_length(max(len(texts[number]) for number in group) - 1)
        shape = (batch_size, length)
        arrays: Arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments")}
        arrays["weights"] = np.zeros(shape, np.float32)
        arrays["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        for row, number in enumerate(group):
            end = len(texts[number]) - 1
            arrays["tokens"][row, :end], arrays["targets"][row, :end] = texts[number][:-1], texts[number][1:]
            arrays["segments"][row, :end] = 1
            arrays["weights"][row, starts[number] if starts else 0 : end] = 1
        groups.append((group, arrays))
    return groups


def _add(
    sums: DocumentScores, documents: NDArray[np.int64], batch: Arrays, loss_BT: np.ndarray, is_top_BT: np.ndarray
) -> None:
    """Adds the scores of a batch's tokens to their documents' scores. In every sequence, segments are counted from 1;
    `documents` has the document of each segment, for all sequences in a row."""
    weights_BT, segments_BT = np.asarray(batch["weights"], np.float64), np.asarray(batch["segments"])
    counts_B = segments_BT.max(axis=1)
    first_B = np.cumsum(counts_B) - counts_B
    used = weights_BT > 0
    place = documents[(first_B[:, None] + segments_BT - 1)[used]]
    for total, values in ((sums.loss_N, loss_BT), (sums.num_correct_N, is_top_BT), (sums.num_tokens_N, 1.0)):
        np.add.at(total, place, (weights_BT * values)[used])
