"""What is measured while a stage trains: loss on a fixed set of rows, and answers to fixed prompts.

Both are functions of the adapter alone: measured again after an interruption, they give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trillora.assembly import Assembly
from trillora.data.batches import Batches
from trillora.data.documents import Documents
from trillora.data.questions import Question, question_of
from trillora.engine.step import Batch
from trillora.errors import TrilloraError
from trillora.events import Sample
from trillora.generate import Generator
from trillora.mesh import local_rows, put_batch
from trillora.model.layout import Tree
from trillora.prompts import Prompts

TEXT_PROMPT = 24  # tokens of a text to go on from
TEXT_ANSWER = 48  # tokens of the text shown beside what the model wrote


@dataclass(frozen=True)
class Figures:
    """Of the evaluation set."""

    loss: float
    perplexity: float
    accuracy: float
    num_tokens: int


class Evaluator:
    """The loss of fixed rows, in batches of one shape, by one program."""

    def __init__(self, assembly: Assembly, batches: Batches) -> None:
        self._mesh, self.batches = assembly.mesh, batches
        self._program = assembly.compile_evaluation(batches.batch_size, batches.sequence_length)

    def measure(self, adapter: Tree, base: Tree, ask: Callable[[], None]) -> Figures:
        """`ask` is called between batches; it may raise to give up."""
        totals = np.zeros(3)
        for number in range(self.batches.steps_per_epoch):
            ask()
            sums = self._program(adapter, base, self._placed(number))
            totals += [float(sums[name]) for name in ("loss", "num_correct", "num_tokens")]
        loss, accuracy = float(totals[0] / totals[2]), float(totals[1] / totals[2])
        return Figures(loss, math.exp(min(loss, 700)), accuracy, round(totals[2]))

    def _placed(self, number: int) -> Batch:
        rows = local_rows(self.batches.batch_size, self._mesh)
        return put_batch(self.batches.batch(number, rows), self._mesh, self.batches.batch_size)


def fixed_documents(documents: Documents, digests: np.ndarray, most: int) -> Documents:
    """The same rows for every start of a run, and for every order of the files: those of the smallest digests."""
    order = np.argsort(digests[documents.rows_N], kind="stable")
    return documents.take(order[:most])


class Sampler:
    """Answers to fixed prompts by the adapter of the moment."""

    def __init__(self, assembly: Assembly, base: Tree, prompts: Prompts, max_tokens: int) -> None:
        self._generator: Generator | None = None
        self._make = lambda adapter: Generator(assembly.model, base, adapter, prompts, assembly.mesh)
        self._prompts, self._max_tokens = prompts, max_tokens

    def answer(self, questions: Sequence[Question], adapter: Tree) -> tuple[Sample, ...]:
        if self._generator is None:
            self._generator = self._make(adapter)
        self._generator.adapter = adapter
        longest = self._generator.longest
        room = min(self._max_tokens, *(longest - len(q.prompt) for q in questions)) if longest else self._max_tokens
        if room < 1:
            raise TrilloraError(
                "A prompt to sample from leaves no room for an answer.",
                where="evaluate.prompts",
                do=f"keep prompts below {longest} tokens, or set evaluate.samples to 0",
            )
        written = self._generator.continue_tokens([q.prompt for q in questions], max_tokens=room)
        # An adapter is given up to the next step: nothing here may hold on to it.
        self._generator.adapter = {}
        decode = self._prompts.decode
        return tuple(
            Sample(
                self._prompts.shown_question(question.prompt),
                decode(tokens),
                decode(question.expected) if question.expected else None,
            )
            for question, (tokens, _) in zip(questions, written, strict=True)
        )


def sample_questions(documents: Documents, count: int) -> list[Question]:
    """The first of the evaluation set: an answer to give, or a text to go on with."""
    found: list[Question] = []
    for index in range(len(documents)):
        if len(found) == count:
            break
        document = documents[index]
        if (question := question_of(document)) is None:
            cut = min(TEXT_PROMPT, len(document) // 2)
            tokens = document.tokens.tolist()
            question = Question(tuple(tokens[:cut]), tuple(tokens[cut : cut + TEXT_ANSWER]))
        if question.prompt:
            found.append(question)
    return found


def peak_memory_gib(mesh: Mesh, process_bytes: Callable[[], int]) -> float | None:
    """The most a device has held; a CPU's device is the process."""
    device: Any = mesh.local_devices[0]
    if device.platform == "cpu":
        return process_bytes() / 2**30
    stats = device.memory_stats()
    return stats["peak_bytes_in_use"] / 2**30 if stats and "peak_bytes_in_use" in stats else None


def can_sample() -> bool:
    """Prompts are put to one process's devices."""
    return jax.process_count() == 1
