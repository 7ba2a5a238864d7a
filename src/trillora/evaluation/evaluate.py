"""How good a run is on rows it has not seen: loss of their trained tokens, and answers to their questions.

    from trillora.evaluation.evaluate import evaluate
    print(evaluate("runs/first", "test.jsonl").to_dict())

Rows are read as the run's recipe reads them, and the adapter is compared with its base: the same programs, with an
adapter of zeros. The result is returned and written to the run's `eval.json`.
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
import jax.numpy as jnp
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
from trillora.events import Alarm, Listener, Progress, ignore_events
from trillora.files.atomic import write_file
from trillora.generation.generator import Generator
from trillora.model.layout import Tree
from trillora.model.loading.source import find_model, load_tokenizer
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import Recipe, StageRecipe, stages_of
from trillora.step.build import evaluation_function, loss_chunk_positions

FILE = "eval.json"
NUM_EXAMPLES = 20
SPARE_TOKENS = 16  # an answer may be so much longer than the longest expected one before it is cut off
MOST_TOKENS = 512  # of an answer, unless more are asked for: a base may never stop
LOSS_CHUNK = 1024  # tokens, where the recipe does not say


@dataclass(frozen=True)
class Example:
    """One question as people should see it."""

    prompt: str
    expected: str
    base: str | None
    adapter: str


@dataclass(frozen=True)
class Evaluation:
    """What was measured."""

    data: str
    num_rows: int
    base: Scores | None
    adapter: Scores
    majority: dict[str, float]  # share of the commonest value of each JSON field
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """As in `eval.json`. NaN and infinity, unknown to JSON, become words."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    backend: str = "auto",
    batch_size: int = 8,
    with_base: bool = True,
    listener: Listener = ignore_events,
) -> Evaluation:
    """Test a run on a data file, or on the test rows it kept out of training.

    `max_rows` takes that many rows, spread evenly over the data. Answers may have `max_tokens` tokens; when that is not
    given, a few more than the longest that is expected.
    """
    folder = check_run(Path(run).expanduser())
    recipe = recipe_with_data(load_recipe(folder / "resolved.yaml"), folder, data)
    source = recipe.model
    model = find_model(source.name, revision=source.revision, trust_remote_code=source.trust_remote_code)
    tokenizer = load_tokenizer(model)
    name, documents = read_rows(recipe, tokenizer, data is None, max_rows, listener)
    num_rows = len(np.unique(documents.rows_N))

    generator = Generator.open(str(folder), backend=backend, batch_size=batch_size, listener=listener)
    adapters = {"adapter": generator.adapter}
    if with_base:
        adapters["base"] = jax.tree.map(jnp.zeros_like, generator.adapter)
    scores = token_scores(generator, adapters, recipe, documents, batch_size, listener)

    found = (question_of(documents[index]) for index in range(len(documents)))
    questions = [question for question in found if question is not None]
    expected = [generator.prompts.decode(without_stop(q.expected, generator.prompts.stops)) for q in questions]
    limit = max_tokens if max_tokens is not None else default_limit(questions)
    answers: dict[str, list[str]] = {}
    for which in reversed(adapters):  # the base first, as in every table
        answers[which] = ask(generator, questions, limit, which == "adapter", f"Answers of the {which}", listener)
        judged = summarise([score(*pair) for pair in zip(expected, answers[which], strict=True)])
        known = scores[which]
        scores[which] = dataclasses.replace(
            judged, loss=known.loss, perplexity=known.perplexity, accuracy=known.accuracy
        )
    reader = generator.prompts.shown_question
    examples = [
        Example(
            reader(questions[i].prompt), expected[i], answers["base"][i] if with_base else None, answers["adapter"][i]
        )
        for i in range(min(NUM_EXAMPLES, len(questions)))
    ]
    evaluation = Evaluation(name, num_rows, scores.get("base"), scores["adapter"], majority(expected), tuple(examples))
    _save(folder / FILE, evaluation, listener)
    return evaluation


def check_run(folder: Path) -> Path:
    """A finished run, or an error that says what this is instead."""
    if not (folder / "resolved.yaml").is_file():
        beside = sorted(file.parent.name for file in folder.parent.glob("*/resolved.yaml"))
        do = "give the folder that `trillora train --out` wrote"
        raise TrilloraError(
            "There is no run here: it would hold a resolved.yaml." if folder.is_dir() else "There is no such run.",
            where=str(folder),
            do=f"{do}; runs beside it: {', '.join(beside[:8])}" if beside else do,
        )
    if not (folder / "adapter").is_dir():
        raise TrilloraError(
            "This run has no adapter yet, so there is nothing to test.",
            where=str(folder),
            do="let it finish: the same `trillora train` command goes on with it",
        )
    return folder


def recipe_with_data(recipe: Recipe, run: Path, data: str | Path | None) -> StageRecipe:
    """The run's recipe, as its last stage had it, with the rows to test on as its data."""
    stage = stages_of(recipe)[-1].recipe
    section = stage.data
    changes: dict[str, Any] = {}
    template = run / "adapter" / "chat_template.jinja"
    if template.is_file():  # a run may be on another machine by now; its template came along
        changes["chat_template"] = str(template)
    if data is not None:
        changes |= {"path": str(data), "split": None}
    elif section.split is None or not section.split.test:
        raise TrilloraError(
            "This run kept no rows for a test.",
            where=f"{run / 'resolved.yaml'}, data.split.test",
            do="name a file of rows it was not trained on with --data FILE; or train with data.split: {test: 0.1}",
        )
    return stage.model_copy(update={"data": section.model_copy(update=changes)})


def read_rows(
    recipe: StageRecipe, tokenizer: Any, own_test: bool, max_rows: int | None, listener: Listener
) -> tuple[str, Documents]:
    """What the data is called, and its documents, fitted to the run's length as in training."""
    if max_rows is not None and max_rows < 1:
        raise TrilloraError(f"{max_rows} rows are no test.", where="--rows", do="ask for at least 1")
    dataset = open_dataset(recipe, tokenizer, listener)
    name = _name_of(dataset, own_test)
    documents = _fitted(dataset, "test" if own_test else "train", recipe.train.sequence_length, listener)
    if not len(documents):
        raise TrilloraError(
            "There is no row to test on.",
            where=name,
            do="name a file that has rows with --data FILE"
            + ("; or keep a larger share with data.split.test" if own_test else ""),
        )
    rows = np.unique(documents.rows_N)
    if max_rows is not None and max_rows < len(rows):
        chosen = rows[np.linspace(0, len(rows) - 1, max_rows).round().astype(np.int64)]
        documents = documents.take(np.isin(documents.rows_N, chosen))
    return name, documents


def _fitted(dataset: Dataset, part: str, sequence_length: int, listener: Listener) -> Documents:
    """Long texts split or left out as in training. Other long rows are left out and counted: a recipe may refuse them,
    but to a run that is over there is nothing to mend."""
    documents = dataset.documents(part)
    kinds = dataset.store.rows["kind"][documents.rows_N]
    fits = (documents.lengths_N <= sequence_length) | (kinds == KINDS.index("text"))
    policy = "drop" if dataset.options.on_too_long == "drop" else "split"
    kept, lost = fit(documents.take(fits), kinds[fits], sequence_length, policy, dataset.store.place)
    num_lost = lost.num_rows + int((~fits).sum())
    if num_lost:
        rows = "1 row is" if num_lost == 1 else f"{num_lost:,} rows are"
        listener(Alarm(f"{rows} longer than the run's {sequence_length:,} tokens and left out of the test."))
    return kept


def token_scores(
    generator: Generator,
    adapters: dict[str, Tree],
    recipe: StageRecipe,
    documents: Documents,
    batch_size: int,
    listener: Listener,
) -> dict[str, Scores]:
    """Loss, perplexity and accuracy of every trained token, for each of the adapters by one program."""
    train, data = recipe.train, recipe.data
    batches = _batches(recipe, documents, min(batch_size, _rows_that_fit(recipe, batch_size)))
    tokens = LOSS_CHUNK if recipe.engine.loss_chunk == "auto" else recipe.engine.loss_chunk
    chunk = loss_chunk_positions(tokens, batches.batch_size, train.sequence_length)
    step = jax.jit(make_eval_step(evaluation_function(generator.model, chunk, packed=data.pack)))
    sums = {name: np.zeros(3) for name in adapters}
    for number in range(batches.steps_per_epoch):
        listener(Progress("Loss of the trained tokens", number, batches.steps_per_epoch))
        batch = put_batch(batches.batch(number), generator.mesh)
        for name, adapter in adapters.items():
            found = step(adapter, generator.base, batch)
            sums[name] += [float(found[key]) for key in ("loss", "num_correct", "num_tokens")]
    listener(Progress("Loss of the trained tokens", batches.steps_per_epoch, batches.steps_per_epoch))
    return {name: _mean_scores(*total) for name, total in sums.items()}


def ask(
    generator: Generator,
    questions: Sequence[Question],
    max_tokens: int,
    adapted: bool,
    label: str,
    listener: Listener,
) -> list[str]:
    """The greedy answer to every question. Questions of like length go together; one near the end of the model's
    positions goes alone, with as many tokens as it has room for."""
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    rooms = [max_tokens if generator.longest is None else generator.longest - len(q.prompt) for q in questions]
    free = [i for i in order if rooms[i] >= max_tokens]
    size = generator.batch_size
    groups = [(free[first : first + size], max_tokens) for first in range(0, len(free), size)]
    groups += [([i], rooms[i]) for i in order if rooms[i] < max_tokens]
    answers: dict[int, str] = {}
    for group, limit in groups:
        listener(Progress(label, len(answers), len(questions)))
        # A last group that is not full would be a shape, and a program, of its own.
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
    return min(longest + SPARE_TOKENS, MOST_TOKENS)


def without_stop(tokens: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    """An expected answer as an answer is given: without the token that ends it."""
    return tokens[:-1] if tokens and tokens[-1] in stops else tokens


def _name_of(dataset: Dataset, own_test: bool) -> str:
    first, *others = [str(file["name"]) for file in dataset.files]
    name = f"{first} and {len(others)} more files" if others else first
    return f"{name}, the rows kept for the test" if own_test else name


def _batches(recipe: StageRecipe, documents: Documents, batch_size: int) -> Batches:
    """Rows as in training. Fewer than a batch make a smaller batch."""

    def made(size: int) -> Batches:
        return Batches(
            documents,
            batch_size=size,
            sequence_length=recipe.train.sequence_length,
            seed=0,
            pack=recipe.data.pack,
            num_buckets=recipe.data.num_length_buckets,
        )

    batches = made(batch_size)
    return batches if batches.num_rows >= batch_size else made(batches.num_rows)


def _rows_that_fit(recipe: StageRecipe, otherwise: int) -> int:
    """What a device could train at once it can also read at once."""
    mesh, rows = recipe.hardware.mesh, recipe.train.micro_batch_size
    if rows == "auto" or mesh == "auto":
        return otherwise
    return max(1, rows // (mesh.data * mesh.fsdp))


def _mean_scores(loss: float, num_correct: float, num_tokens: float) -> Scores:
    mean = loss / num_tokens
    perplexity = math.exp(mean) if mean < 700 else mean * math.inf  # NaN stays NaN
    return Scores(loss=mean, perplexity=perplexity, accuracy=num_correct / num_tokens)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _save(file: Path, evaluation: Evaluation, listener: Listener) -> None:
    """Whole or not at all. A run that cannot be written to was still tested: what was found is not thrown away."""
    text = json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        write_file(file, text)
    except OSError as error:
        listener(Alarm(f"{file} cannot be written: {error.strerror}."))
