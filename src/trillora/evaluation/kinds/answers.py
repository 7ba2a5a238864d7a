"""Rows with an expected answer: the loss of their trained tokens, and the model's own answers compared with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from trillora.data.batches import Batches
from trillora.data.documents import Documents
from trillora.data.questions import Question, question_of
from trillora.evaluation.bootstrap import Sums, exp_quotient, shares
from trillora.evaluation.likelihood import LOSS_CHUNK, DocumentScores, TokenScorer
from trillora.evaluation.result import Example, Kind
from trillora.evaluation.scores import AnswerScore, Scores, score, scored_text, summarise
from trillora.evaluation.text_metrics import BLEU_COUNTS, TEXT_METRICS, Comparison, TextScore
from trillora.events import Listener, Progress
from trillora.generation.generator import Generator
from trillora.model.layout import Tree
from trillora.recipe.schema import StageRecipe

NUM_EXAMPLES = 20
SPARE_TOKENS = 16  # an answer may be this much longer than the longest expected one
MAX_TOKENS = 512  # default limit of an answer: a base may never stop
FEW_GROUPS = 8  # of questions that are answered together; they share their programs
SHORT_WORDS = 10  # expected answers of at most this many words, in the median, are short


@dataclass(frozen=True)
class Judged:
    """The answers of one model."""

    scores: Scores
    sums: dict[str, Sums]  # by metric; fields.NAME for a JSON field
    examples: list[dict[str, float]]  # the scores of the first answers


def kind_of(expected: Sequence[str]) -> Kind:
    """What the expected answers are: it decides which metrics are shown."""
    if not expected:
        return "none"
    texts = [found[0] for text in expected if (found := scored_text(text, text)) is not None]
    if not texts:
        return "json"
    if len(texts) < len(expected):
        return "mixed"
    return "short" if median(len(text.split()) for text in texts) <= SHORT_WORDS else "long"


def judge_answers(expected: Sequence[str], answers: Sequence[str], comparison: Comparison) -> Judged:
    """All metrics of the answers: equal texts and JSON fields (`scores`), and of texts their likeness."""
    pairs = list(zip(expected, answers, strict=True))
    each = [score(*pair) for pair in pairs]
    texts = [comparison.score(*text) if (text := scored_text(*pair)) is not None else None for pair in pairs]
    sums = _json_sums(each) | _text_sums(texts, comparison)
    known: dict[str, Any] = {name: part.value for name, part in sums.items() if name in TEXT_METRICS}
    examples = [_of_one(one, text) for one, text in zip(each[:NUM_EXAMPLES], texts, strict=False)]
    return Judged(dataclasses.replace(summarise(each), **known), sums, examples)


def _json_sums(each: Sequence[AnswerScore]) -> dict[str, Sums]:
    if not each:
        return {}
    sums = {"exact_match": shares(one.exact for one in each)}
    if any(one.valid_json is not None for one in each):
        sums["valid_json"] = shares(one.valid_json for one in each)
        sums["right_fields"] = shares(one.right_fields for one in each)
    for name in dict.fromkeys(name for one in each for name in one.fields):
        sums[f"fields.{name}"] = shares(one.fields.get(name) for one in each)
    return sums


def _text_sums(texts: Sequence[TextScore | None], comparison: Comparison) -> dict[str, Sums]:
    known = [text for text in texts if text is not None]
    if not known:
        return {}
    names = [name for name in known[0].scores if name != "bleu"]
    sums = {name: shares(None if text is None else text.scores[name] for text in texts) for name in names}
    if comparison.has_sacrebleu:
        nothing = (0,) * BLEU_COUNTS
        counts = [nothing if text is None or text.bleu_counts is None else text.bleu_counts for text in texts]
        sums["bleu"] = Sums(np.array(counts, np.float64), comparison.bleu)
    return sums


def _of_one(one: AnswerScore, text: TextScore | None) -> dict[str, float]:
    found = {"exact_match": float(one.exact)}
    return found | {name: round(value, 6) for name, value in (text.scores if text is not None else {}).items()}


def token_scores(
    scorer: TokenScorer,
    adapters: dict[str, Tree],
    recipe: StageRecipe,
    documents: Documents,
    batch_size: int,
    listener: Listener,
) -> dict[str, DocumentScores]:
    """Loss and accuracy of the trained tokens of each document, for each adapter, with one program."""
    batches = Batches(
        documents,
        batch_size=min(batch_size, _sequences_that_fit(recipe, batch_size)),
        sequence_length=recipe.train.sequence_length,
        pack=recipe.data.pack,
        num_buckets=recipe.data.num_length_buckets,
        shrink=True,
    )
    return scorer.documents(batches, adapters, packed=recipe.data.pack, listener=listener)


def loss_chunk(recipe: StageRecipe) -> int:
    return LOSS_CHUNK if recipe.engine.loss_chunk == "auto" else recipe.engine.loss_chunk


def token_sums(scores: DocumentScores, documents: Documents) -> dict[str, Sums]:
    """Per-row sums. A text that was split has several documents per row."""
    rows_N, row_of = np.unique(documents.rows_N, return_inverse=True)
    loss, correct, tokens = (
        np.bincount(row_of, part, len(rows_N)).astype(np.float64)
        for part in (scores.loss_N, scores.num_correct_N, scores.num_tokens_N)
    )
    losses = np.stack([loss, tokens], axis=1)
    return {
        "loss": Sums(losses),
        "perplexity": Sums(losses, exp_quotient),
        "accuracy": Sums(np.stack([correct, tokens], axis=1)),
    }


def questions_of(documents: Documents) -> list[Question]:
    found = (question_of(documents[index]) for index in range(len(documents)))
    return [question for question in found if question is not None]


def examples_of(
    generator: Generator,
    questions: Sequence[Question],
    expected: Sequence[str],
    answers: dict[str, list[str]],
    judged: dict[str, Judged],
) -> tuple[Example, ...]:
    shown = [generator.prompts.shown_question(question.prompt) for question in questions[:NUM_EXAMPLES]]
    of_base: Sequence[str | None] = answers.get("base", [None] * len(questions))
    scores = [{which: judged[which].examples[i] for which in judged} for i in range(len(shown))]
    return tuple(map(Example, shown, expected, of_base, answers["adapter"], scores))


def ask(
    generator: Generator,
    questions: Sequence[Question],
    max_tokens: int,
    adapted: bool,
    label: str,
    listener: Listener,
) -> list[str]:
    """The greedy answer to every question."""
    answers: dict[int, str] = {}
    for group, limit, longest in _groups(generator, questions, max_tokens):
        listener(Progress(label, len(answers), len(questions)))
        prompts = [questions[i].prompt for i in group]
        written = generator.continue_tokens(prompts, max_tokens=limit, adapted=adapted, at_least=longest)
        for i, (tokens, _) in zip(group, written, strict=True):
            answers[i] = generator.prompts.decode(tokens)
    if questions:
        listener(Progress(label, len(questions), len(questions)))
    return [answers[i] for i in range(len(questions))]


def prepare_answers(generator: Generator, questions: Sequence[Question], max_tokens: int) -> None:
    """Compiles the programs of `ask`."""
    for group, limit, longest in _groups(generator, questions, max_tokens):
        generator.prepare([questions[i].prompt for i in group], max_tokens=limit, at_least=longest)


def _groups(generator: Generator, questions: Sequence[Question], max_tokens: int) -> list[tuple[list[int], int, int]]:
    """Questions of similar length that are answered together, how long the answers may be, and the length of prompts to
    use the programs of. A question close to the model's maximum length runs alone, with as many new tokens as still
    fit."""
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    rooms = [max_tokens if generator.longest is None else generator.longest - len(q.prompt) for q in questions]
    free = [i for i in order if rooms[i] >= max_tokens]
    size = generator.batch_size
    groups = [free[first : first + size] for first in range(0, len(free), size)]
    if len(groups) > 1:  # an incomplete last group would be a new shape and compile another program
        groups[-1] += groups[-1][-1:] * (size - len(groups[-1]))
    lengths = [max(len(questions[i].prompt) for i in group) for group in groups]
    # Few groups take less time with padding than with programs of their own.
    is_similar = 1 < len(groups) <= FEW_GROUPS and lengths[-1] <= 2 * lengths[0]
    shared = lengths[-1] if is_similar else 0
    alone = [([i], rooms[i], 0) for i in order if rooms[i] < max_tokens]
    return [(group, max_tokens, shared) for group in groups] + alone


def default_limit(questions: Sequence[Question]) -> int:
    longest = max((len(question.expected) for question in questions), default=1)
    return min(longest + SPARE_TOKENS, MAX_TOKENS)


def without_stop(tokens: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    """The expected answer without its stop token, like a generated answer."""
    return tokens[:-1] if tokens and tokens[-1] in stops else tokens


def _sequences_that_fit(recipe: StageRecipe, otherwise: int) -> int:
    """A device can evaluate at least as many sequences at once as it could train."""
    mesh, size = recipe.hardware.mesh, recipe.train.micro_batch_size
    if size == "auto" or mesh == "auto":
        return otherwise
    return max(1, size // (mesh.data * mesh.fsdp))
