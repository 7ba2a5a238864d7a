"""Tests a run on rows it was not trained on: the loss of their trained tokens, and the answers to their prompts.

    from trillora.evaluation.evaluate import evaluate
    print(evaluate("runs/first", "test.jsonl").to_dict())

Rows are read as the run's recipe says. The adapter is compared with its base, which runs through the same programs with
an adapter of zeros. The result is returned and written to the run's `eval.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from trillora.data.batches import Batches
from trillora.data.documents import Documents
from trillora.data.questions import Question, question_of
from trillora.devices.mesh import put_batch
from trillora.engine.step import make_eval_step
from trillora.evaluation.result import Evaluation, Example
from trillora.evaluation.rows import PHASES, check_run, read_rows, recipe_with_data
from trillora.evaluation.scores import Scores, majority, score, summarise
from trillora.evaluation.token_metrics import TokenMetrics, TokenSums
from trillora.events import Alarm, Listener, Progress, ignore_events
from trillora.files.atomic import write_file
from trillora.files.user_path import user_path
from trillora.generation.generator import Generator
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.recipe.load import load_run_recipe
from trillora.recipe.schema import StageRecipe
from trillora.step.build import evaluation_function, loss_chunk_positions

FILE = "eval.json"
NUM_EXAMPLES = 20
SPARE_TOKENS = 16  # an answer may be this much longer than the longest expected one
MAX_TOKENS = 512  # default limit of an answer: a base may never stop
LOSS_CHUNK = 1024  # tokens, if the recipe says auto


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    stage: str | None = None,
    adapter: Path | None = None,
    overrides: Sequence[str] = (),
    max_rows: int | None = None,
    max_tokens: int | None = None,
    backend: str = "auto",
    batch_size: int = 8,
    with_base: bool = True,
    listener: Listener = ignore_events,
) -> Evaluation:
    """Tests a run on a data file, or on the test rows of its own split.

    `max_rows` limits the test to that many evenly spaced rows. `max_tokens` limits each answer (default: slightly more
    than the longest expected answer). `overrides` replace options of the run's recipe, such as the address of its data.
    `adapter` is the folder of an adapter that is tested instead of the run's own; then nothing is written. `stage` is
    the name of the stage or phase whose rows are tested (default: the last stage); a phase has an adapter of its own.
    """
    folder = user_path(run, where="the run")
    if stage is not None and adapter is None and (folder / PHASES / stage).is_dir():
        adapter = folder / PHASES / stage
    check_run(folder, adapter)
    recipe = recipe_with_data(load_run_recipe(folder, overrides), folder, data, adapter, stage)
    source = recipe.model
    opened = OpenModel.open(
        source.name,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        tokens=recipe.tokens or (),
    )
    name, documents = read_rows(recipe, opened.tokenizer, data is None, max_rows, listener)
    num_rows = len(np.unique(documents.rows_N))

    generator = Generator.open(
        str(folder),
        overrides=overrides,
        opened=opened,
        adapter=adapter,
        backend=backend,
        batch_size=batch_size,
        listener=listener,
    )
    adapters = {"adapter": generator.adapter}
    if with_base:
        adapters["base"] = generator.neutral_adapter
    metrics = token_metrics(generator, adapters, recipe, documents, batch_size, listener)

    evaluation = _evaluation(name, num_rows, generator, adapters, metrics, documents, max_tokens, listener)
    if adapter is None:
        _save(folder / FILE, evaluation, listener)
    return evaluation


def _evaluation(
    name: str,
    num_rows: int,
    generator: Generator,
    adapters: dict[str, Tree],
    metrics: dict[str, TokenMetrics],
    documents: Documents,
    max_tokens: int | None,
    listener: Listener,
) -> Evaluation:
    """Asks every question of the documents, and compares the answers with the expected ones."""
    found = (question_of(documents[index]) for index in range(len(documents)))
    questions = [question for question in found if question is not None]
    expected = [generator.prompts.decode(without_stop(q.expected, generator.prompts.stops)) for q in questions]
    limit = max_tokens if max_tokens is not None else default_limit(questions)
    answers: dict[str, list[str]] = {}
    scores: dict[str, Scores] = {}
    for which in reversed(adapters):  # the base first, as in every table
        answers[which] = ask(generator, questions, limit, which == "adapter", f"Answers of the {which}", listener)
        judged = summarise([score(*pair) for pair in zip(expected, answers[which], strict=True)])
        known = metrics[which]
        scores[which] = dataclasses.replace(
            judged, loss=known.loss, perplexity=known.perplexity, accuracy=known.accuracy
        )
    shown = [generator.prompts.shown_question(question.prompt) for question in questions[:NUM_EXAMPLES]]
    of_base: Sequence[str | None] = answers.get("base", [None] * len(questions))
    examples = tuple(map(Example, shown, expected, of_base, answers["adapter"]))
    return Evaluation(name, num_rows, scores.get("base"), scores["adapter"], majority(expected), examples)


def token_metrics(
    generator: Generator,
    adapters: dict[str, Tree],
    recipe: StageRecipe,
    documents: Documents,
    batch_size: int,
    listener: Listener,
) -> dict[str, TokenMetrics]:
    """Loss, perplexity and accuracy over all trained tokens, for each adapter, with one program."""
    train, data = recipe.train, recipe.data
    batches = Batches(
        documents,
        batch_size=min(batch_size, _sequences_that_fit(recipe, batch_size)),
        sequence_length=train.sequence_length,
        pack=data.pack,
        num_buckets=data.num_length_buckets,
        shrink=True,
    )
    tokens = LOSS_CHUNK if recipe.engine.loss_chunk == "auto" else recipe.engine.loss_chunk
    chunk = loss_chunk_positions(tokens, batches.batch_size, train.sequence_length)
    step = jax.jit(make_eval_step(evaluation_function(generator.model, chunk, packed=data.pack)))
    sums = {name: TokenSums() for name in adapters}
    for number in range(batches.steps_per_epoch):
        listener(Progress("Loss of the trained tokens", number, batches.steps_per_epoch))
        batch = put_batch(batches.batch(number), generator.mesh)
        for name, adapter in adapters.items():
            sums[name].add(step(adapter, generator.base, batch))
    listener(Progress("Loss of the trained tokens", batches.steps_per_epoch, batches.steps_per_epoch))
    return {name: total.metrics() for name, total in sums.items()}


def ask(
    generator: Generator,
    questions: Sequence[Question],
    max_tokens: int,
    adapted: bool,
    label: str,
    listener: Listener,
) -> list[str]:
    """The greedy answer to every question. Questions of similar length are batched. A question close to the model's
    maximum length runs alone, with as many new tokens as still fit."""
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    rooms = [max_tokens if generator.longest is None else generator.longest - len(q.prompt) for q in questions]
    free = [i for i in order if rooms[i] >= max_tokens]
    size = generator.batch_size
    groups = [(free[first : first + size], max_tokens) for first in range(0, len(free), size)]
    groups += [([i], rooms[i]) for i in order if rooms[i] < max_tokens]
    answers: dict[int, str] = {}
    for group, limit in groups:
        listener(Progress(label, len(answers), len(questions)))
        # An incomplete last group would be a new shape and compile another program, so it is filled up.
        filled = [*group, *group[-1:] * (size - len(group))] if len(free) > size and limit == max_tokens else group
        prompts = [questions[i].prompt for i in filled]
        written = generator.continue_tokens(prompts, max_tokens=limit, adapted=adapted)
        for i, (tokens, _) in zip(group, written, strict=False):
            answers[i] = generator.prompts.decode(tokens)
    if questions:
        listener(Progress(label, len(questions), len(questions)))
    return [answers[i] for i in range(len(questions))]


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


def _save(file: Path, evaluation: Evaluation, listener: Listener) -> None:
    """Written atomically. If the run's folder is read-only, the result is still returned."""
    text = json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        write_file(file, text)
    except OSError as error:
        listener(Alarm(f"{file} cannot be written: {error.strerror}."))
