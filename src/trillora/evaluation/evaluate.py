"""Tests a run on rows it was not trained on: the loss of their trained tokens, and the answers to their prompts.

    from trillora.evaluation.evaluate import evaluate
    print(evaluate("runs/first", "test.jsonl").to_dict())

Rows are read as the run's recipe says. The adapter is compared with its base, which runs through the same programs with
an adapter of zeros. The result is returned and written to the run's `eval.json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trillora.data.batches import Batches
from trillora.data.documents import Documents, fit
from trillora.data.open import open_dataset
from trillora.data.prepare import Dataset
from trillora.data.questions import Question, question_of
from trillora.data.tokenizing.store import KINDS
from trillora.devices.mesh import put_batch
from trillora.engine.step import make_eval_step
from trillora.errors import TrilloraError
from trillora.evaluation.scores import Scores, majority, score, summarise
from trillora.evaluation.token_metrics import TokenMetrics, TokenSums
from trillora.events import Alarm, Listener, Progress, ignore_events
from trillora.files.atomic import write_file
from trillora.files.user_path import user_path
from trillora.generation.generator import Generator
from trillora.model.adapters import TEMPLATE_FILE
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.recipe.load import RECIPE_FILES, RunRecipe, is_run, load_run_recipe
from trillora.recipe.schema import StageRecipe, stages_of
from trillora.step.build import evaluation_function, loss_chunk_positions

FILE = "eval.json"
PHASES = "adapters"  # the folder with the adapters of the phases
NUM_EXAMPLES = 20
SPARE_TOKENS = 16  # an answer may be this much longer than the longest expected one
MAX_TOKENS = 512  # default limit of an answer: a base may never stop
LOSS_CHUNK = 1024  # tokens, if the recipe says auto


@dataclass(frozen=True)
class Example:
    """One prompt with its answers, for display."""

    prompt: str
    expected: str
    base: str | None
    adapter: str


@dataclass(frozen=True)
class Evaluation:
    """The result of a test."""

    data: str
    num_rows: int
    base: Scores | None
    adapter: Scores
    majority: dict[str, float]  # fraction of the most common value of each JSON field
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """The content of `eval.json`. NaN and infinity, which JSON does not have, become text."""
        return _json_values(dataclasses.asdict(self))


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


def check_run(folder: Path, adapter: Path | None = None) -> Path:
    """Checks that the folder holds a run, which is finished unless another adapter is given."""
    if not is_run(folder):
        others = sorted({file.parent.name for name in RECIPE_FILES for file in folder.parent.glob(f"*/{name}")})
        do = "give the folder that `trillora train --out` wrote"
        raise TrilloraError(
            "This folder is not a run: it has no recipe.json." if folder.is_dir() else "There is no such run.",
            where=str(folder),
            do=f"{do}; runs in the same place: {', '.join(others[:8])}" if others else do,
        )
    if adapter is None and (folder / PHASES).is_dir() and not (folder / "adapter").is_dir():
        names = sorted(phase.name for phase in (folder / PHASES).iterdir())
        raise TrilloraError(
            "This run has several adapters, one for each phase.",
            where=str(folder),
            do=f"choose one with --stage: {' '.join(names)}",
        )
    if adapter is None and not (folder / "adapter").is_dir():
        raise TrilloraError(
            "This run has no adapter yet, so there is nothing to test.",
            where=str(folder),
            do="finish it first: the same `trillora train` command resumes it",
        )
    return folder


def recipe_with_data(
    run_recipe: RunRecipe,
    run: Path,
    data: str | Path | None,
    adapter: Path | None = None,
    name: str | None = None,
) -> StageRecipe:
    """The recipe of a stage, by default the run's last one, with the test rows as its data, in the chat template of the
    adapter."""
    stages = stages_of(run_recipe.recipe)
    number = _stage_number(run_recipe, [stage.name for stage in stages], name, needs_name=data is None)
    stage = stages[number].recipe
    section = stage.data
    changes: dict[str, Any] = {}
    template = (adapter or run / "adapter") / TEMPLATE_FILE
    if template.is_file():  # the run may have been copied here; its template was copied with it
        changes["chat_template"] = str(template)
    if data is not None:
        changes |= {"path": str(data), "split": None}
    elif section.split is None or not section.split.test:
        raise TrilloraError(
            "This run has no test rows of its own.",
            where=f"{run_recipe.file}, data.split.test",
            do="give a file of rows it was not trained on with --data FILE; or train with data.split: {test: 0.1}",
        )
    else:
        part = "stages" if run_recipe.recipe.stages else "phases" if run_recipe.recipe.phases else None
        prefix = f"{part}.{number}." if part else ""
        run_recipe.require(f"{prefix}data.path")
    return stage.model_copy(update={"data": section.model_copy(update=changes)})


def _stage_number(run_recipe: RunRecipe, names: list[str], name: str | None, *, needs_name: bool) -> int:
    if name is None and needs_name and run_recipe.recipe.phases is not None:
        raise TrilloraError(
            "Each phase of this run has test rows of its own.",
            where=str(run_recipe.file),
            do=f"choose one with --stage: {' '.join(names)}; or give rows with --data FILE",
        )
    if name is not None and name not in names:
        what = f"There is no stage '{name}' in this run."
        raise TrilloraError(what, where="--stage", do=f"use one of: {' '.join(names)}")
    return len(names) - 1 if name is None else names.index(name)


def read_rows(
    recipe: StageRecipe, tokenizer: Any, own_test: bool, max_rows: int | None, listener: Listener
) -> tuple[str, Documents]:
    """The name of the data, and its documents, fitted to the run's sequence length as in training."""
    if max_rows is not None and max_rows < 1:
        raise TrilloraError(f"--rows must be at least 1, got {max_rows}.", where="--rows", do="use 1 or more")
    dataset = open_dataset(recipe, tokenizer, listener)
    name = _name_of(dataset, own_test)
    documents = _fitted(dataset, "test" if own_test else "train", recipe.train.sequence_length, listener)
    if not len(documents):
        raise TrilloraError(
            "There is no row to test on.",
            where=name,
            do="give a file that has rows with --data FILE" + ("; or use a larger data.split.test" if own_test else ""),
        )
    rows = np.unique(documents.rows_N)
    if max_rows is not None and max_rows < len(rows):
        chosen = rows[np.linspace(0, len(rows) - 1, max_rows).round().astype(np.int64)]
        documents = documents.take(np.isin(documents.rows_N, chosen))
    return name, documents


def _fitted(dataset: Dataset, part: str, sequence_length: int, listener: Listener) -> Documents:
    """Splits or drops long texts as in training. Other rows that are too long are dropped and counted, even if the
    recipe refuses them: the run is finished, so its sequence length cannot change."""
    documents = dataset.documents(part)
    kinds = dataset.store.rows["kind"][documents.rows_N]
    fits = (documents.lengths_N <= sequence_length) | (kinds == KINDS.index("text"))
    policy = "drop" if dataset.options.on_too_long == "drop" else "split"
    kept, lost, _ = fit(documents.take(fits), kinds[fits], sequence_length, policy, dataset.store.place)
    num_lost = lost.num_rows + int((~fits).sum())
    if num_lost:
        rows = "1 row is" if num_lost == 1 else f"{num_lost:,} rows are"
        listener(Alarm(f"{rows} longer than the run's {sequence_length:,} tokens and not tested."))
    return kept


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


def _name_of(dataset: Dataset, own_test: bool) -> str:
    first, *others = [str(file["name"]) for file in dataset.files]
    name = f"{first} and {len(others)} more files" if others else first
    return f"{name}, test split" if own_test else name


def _sequences_that_fit(recipe: StageRecipe, otherwise: int) -> int:
    """A device can evaluate at least as many sequences at once as it could train."""
    mesh, size = recipe.hardware.mesh, recipe.train.micro_batch_size
    if size == "auto" or mesh == "auto":
        return otherwise
    return max(1, size // (mesh.data * mesh.fsdp))


def _json_values(value: Any) -> Any:
    match value:
        case dict():
            return {name: _json_values(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_json_values(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _save(file: Path, evaluation: Evaluation, listener: Listener) -> None:
    """Written atomically. If the run's folder is read-only, the result is still returned."""
    text = json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        write_file(file, text)
    except OSError as error:
        listener(Alarm(f"{file} cannot be written: {error.strerror}."))
