"""Tests a run on rows it was not trained on: the loss of their trained tokens, and the answers to their prompts.

    from trillora.evaluation.evaluate import evaluate
    print(evaluate("runs/first", "test.jsonl").to_dict())

Rows are read as the run's recipe says. What a row is for decides how it is tested: rows with `choices` are multiple
choice; of rows with a chosen and a rejected answer, both are compared. The adapter is compared with its base,
which runs through the same programs with an adapter of zeros. The result is returned and written to the run's
`eval.json`. docs/evaluation.md explains the metrics.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.data.documents import Documents, answers_alone
from trillora.errors import TrilloraError
from trillora.evaluation.bootstrap import Difference, differences, mean_difference
from trillora.evaluation.forgetting import measure_forgetting
from trillora.evaluation.gate import Wanted, check_fields, judge, parse_gate
from trillora.evaluation.kinds import choices, preferences
from trillora.evaluation.kinds.answers import (
    ask,
    default_limit,
    examples_of,
    judge_answers,
    kind_of,
    loss_chunk,
    prepare_answers,
    questions_of,
    token_scores,
    token_sums,
    without_stop,
)
from trillora.evaluation.kinds.choices import ChoiceQuestion
from trillora.evaluation.kinds.needle import measure_needle, parse_lengths
from trillora.evaluation.likelihood import TokenScorer
from trillora.evaluation.result import Evaluation, Forgetting
from trillora.evaluation.rows import read_rows, recipe_with_data
from trillora.evaluation.scores import METRICS, Scores, majority, parse_object
from trillora.evaluation.text_metrics import NO_SACREBLEU, Comparison
from trillora.events import Alarm, Listener, Note, ignore_events
from trillora.files.atomic import write_file
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.locks.extras import install_command
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.recipe.schema import StageRecipe
from trillora.runs.adapter import adapter_of
from trillora.runs.files import EVAL_FILE
from trillora.runs.saved import SavedRun
from trillora.step.background import compiling_in_background

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

MAX_FILES = 100
Data = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class _TestFile:
    """The rows of one file, or of the run's own split."""

    name: str
    label: str  # short, different for every file
    recipe: StageRecipe
    rows: Documents | list[ChoiceQuestion]


@dataclass(frozen=True)
class _Tested:
    """The result of a file, and the differences between base and adapter on drawn rows."""

    result: Evaluation
    differences: dict[str, Difference]


@dataclass(frozen=True)
class _Models:
    """What the files are tested with."""

    generator: Generator
    adapters: dict[str, Tree]  # the base first, as in every table
    scorer: TokenScorer
    comparison: Comparison
    tokenizer: Tokenizer
    max_tokens: int | None
    batch_size: int
    listener: Listener


def evaluate(
    run: str | Path,
    data: Data = None,
    *,
    stage: str | None = None,
    adapter: str | Path | None = None,
    overrides: Sequence[str] = (),
    max_rows: int | None = None,
    max_tokens: int | None = None,
    backend: str = "auto",
    batch_size: int = 8,
    with_base: bool = True,
    forgetting: bool = False,
    needle: str | None = None,
    gate: str | None = None,
    listener: Listener = ignore_events,
) -> Evaluation:
    """Tests a run on one or several data files, or on the test rows of its own split.

    `max_rows` limits each file to that many evenly spaced rows. `max_tokens` limits each answer (default: slightly more
    than the longest expected answer). `overrides` replace options of the run's recipe, such as the address of its data.
    `adapter` is tested instead of the run's own: the name of one of several, or a folder. `stage` is the name of the
    stage or phase whose rows are tested (default: the last stage); a phase has an adapter of its own. `eval.json` is
    written only for the result of a finished run.
    `forgetting` asks general questions too, and `needle` for facts in texts of these lengths in tokens, such as
    "1024,4096". `gate` has conditions on the scores: `Evaluation.passed`.
    """
    saved = SavedRun.open(run, overrides)
    chosen = adapter if adapter is not None else stage if stage in saved.parts else None
    used = adapter_of(saved, chosen, listener=listener)
    paths = _paths(data)
    lengths = parse_lengths(needle) if needle is not None else ()
    wanted = parse_gate(gate, _labels(paths) if len(paths) > 1 else ()) if gate is not None else ()
    forgetting = forgetting or any(condition.metric in ("forgetting", "kl") for condition in wanted)
    _check_base(wanted, forgetting, with_base)
    opened, files = _open(saved, paths, used.folder, stage, max_rows, listener)
    check_fields(wanted, {file.label: _fields(file, opened.tokenizer) for file in files})
    generator = Generator.open(
        str(saved.folder),
        overrides=overrides,
        opened=opened,
        adapter=used.folder,
        backend=backend,
        batch_size=batch_size,
        listener=listener,
    )
    adapters = ({"base": generator.neutral_adapter} if with_base else {}) | {"adapter": generator.adapter}
    found = measure_needle(generator, lengths, with_base=with_base, listener=listener) if lengths else None
    scorer = TokenScorer(generator, loss_chunk=loss_chunk(files[0].recipe))
    models = _Models(generator, adapters, scorer, Comparison(), opened.tokenizer, max_tokens, batch_size, listener)
    with compiling_in_background():
        result = _combined([_tested(file, models, seed) for seed, file in enumerate(files)])
    if forgetting:
        result = dataclasses.replace(result, forgetting=_meter(models))
    result = dataclasses.replace(result, needle=found, gate=judge(wanted, result))
    for note in result.notes:
        listener(Note(note))
    if used.is_result:
        _save(saved.folder / EVAL_FILE, result, listener)
    return result


def _paths(data: Data) -> list[str | None]:
    """The files; [None]: the run's own test rows."""
    if data is None or isinstance(data, str | Path):
        return [None if data is None else str(data)]
    paths = [str(path) for path in data]
    if not paths or len(paths) > MAX_FILES or len(set(paths)) < len(paths):
        what = f"{len(paths)} files are given, or one of them twice."
        raise TrilloraError(what, where="--data", do=f"give 1 to {MAX_FILES} different files")
    return list(paths)


def _labels(paths: Sequence[str | None]) -> list[str]:
    """The names of the files without their folders, if these differ; otherwise the paths."""
    names = [path.rstrip("/").rpartition("/")[2] if path is not None else "" for path in paths]
    return [names[i] if names.count(names[i]) == 1 else path or "" for i, path in enumerate(paths)]


def _check_base(wanted: Sequence[Wanted], forgetting: bool, with_base: bool) -> None:
    if with_base or not (forgetting or any(condition.needs_base for condition in wanted)):
        return
    where = "--forgetting" if forgetting else "--gate"
    raise TrilloraError("This compares with the base model.", where=where, do="leave out --no-base")


def _open(
    saved: SavedRun,
    paths: Sequence[str | None],
    adapter: Path,
    stage: str | None,
    max_rows: int | None,
    listener: Listener,
) -> tuple[OpenModel, list[_TestFile]]:
    """The model's tokenizer and configuration, and the rows of all files: they are read before any weight is."""
    recipes = [recipe_with_data(saved.saved_recipe, path, adapter, stage) for path in paths]
    opened = saved.open_base(adapter=adapter)
    files = []
    for path, label, recipe in zip(paths, _labels(paths), recipes, strict=True):
        questions = None
        if path is not None and recipe.data.template is None:  # a template says itself what a row means
            questions = choices.read_choices(path, recipe.data.row_path)
        if path is not None and questions is not None:
            files.append(_TestFile(path, label, recipe, choices.some_of(questions, max_rows)))
        else:
            name, documents = read_rows(recipe, opened.tokenizer, path is None, max_rows, listener)
            files.append(_TestFile(name, label, recipe, documents))
    return opened, files


def _fields(file: _TestFile, tokenizer: Tokenizer) -> set[str]:
    """The fields of a file's expected answers that are JSON objects."""
    if isinstance(file.rows, list) or file.recipe.train.rows != "answers":
        return set()
    texts = (tokenizer.decode(question.expected, skip_special_tokens=True) for question in questions_of(file.rows))
    return {name for text in texts for name in parse_object(text.rpartition("</think>")[2]) or {}}


def _tested(file: _TestFile, models: _Models, seed: int) -> _Tested:
    if isinstance(file.rows, list):
        return _choices(file, file.rows, models, seed)
    if file.recipe.train.rows != "answers":
        return _preferences(file, file.rows, models, seed)
    return _answers(file, file.rows, models, seed)


def _answers(file: _TestFile, documents: Documents, models: _Models, seed: int) -> _Tested:
    """Asks every question of the documents, and compares the answers with the expected ones."""
    generator, listener = models.generator, models.listener
    questions = questions_of(documents)
    expected = [generator.prompts.decode(without_stop(q.expected, generator.prompts.stops)) for q in questions]
    limit = models.max_tokens if models.max_tokens is not None else default_limit(questions)
    prepare_answers(generator, questions, limit)  # compiled while the losses are computed
    losses = token_scores(models.scorer, models.adapters, file.recipe, documents, models.batch_size, listener)
    answers, judged, scores, sums = {}, {}, {}, {}
    for which in models.adapters:
        answers[which] = ask(generator, questions, limit, which == "adapter", f"Answers of the {which}", listener)
        judged[which] = judge_answers(expected, answers[which], models.comparison)
        known = losses[which].metrics()
        scores[which] = dataclasses.replace(
            judged[which].scores, loss=known.loss, perplexity=known.perplexity, accuracy=known.accuracy
        )
        sums[which] = token_sums(losses[which], documents) | judged[which].sums
    kind = kind_of(expected)
    compared = differences(sums["base"], sums["adapter"], seed) if "base" in sums else {}
    result = Evaluation(
        data=file.name,
        num_rows=len(np.unique(documents.rows_N)),
        base=scores.get("base"),
        adapter=scores["adapter"],
        majority=majority(expected),
        examples=examples_of(generator, questions, expected, answers, judged),
        label=file.label,
        kind=kind,
        intervals={name: difference.interval() for name, difference in compared.items()},
        notes=(f"{NO_SACREBLEU} {install_command('eval')}",)
        if kind in ("long", "mixed") and not models.comparison.has_sacrebleu
        else (),
    )
    return _Tested(result, compared)


def _choices(file: _TestFile, questions: list[ChoiceQuestion], models: _Models, seed: int) -> _Tested:
    """The log-probability of every choice of every question."""
    stops = models.generator.prompts.stops
    asked = choices.continuations(questions, file.recipe, models.tokenizer, stops, models.listener)
    chosen, sums = {}, {}
    for which, adapter in models.adapters.items():
        label = f"Choices of the {which}"
        found = models.scorer.continuations(asked, adapter, label=label, listener=models.listener)
        chosen[which] = choices.answers_of(questions, found)
        sums[which] = choices.accuracies(questions, chosen[which])
    scores = {which: _scores({name: part.value for name, part in known.items()}) for which, known in sums.items()}
    compared = differences(sums["base"], sums["adapter"], seed) if "base" in sums else {}
    result = Evaluation(
        data=file.name,
        num_rows=len(questions),
        base=scores.get("base"),
        adapter=scores["adapter"],
        majority={},
        examples=choices.examples(questions, chosen),
        label=file.label,
        kind="choices",
        chance=choices.chance(questions),
        intervals={name: difference.interval() for name, difference in compared.items()},
    )
    return _Tested(result, compared)


def _preferences(file: _TestFile, documents: Documents, models: _Models, seed: int) -> _Tested:
    """The log-probability of every answer of every pair, or of every answer with a label."""
    alone = answers_alone(documents)
    found = token_scores(models.scorer, models.adapters, file.recipe, alone, models.batch_size, models.listener)
    compared = {which: preferences.Compared(documents, scores) for which, scores in found.items()}
    sums = preferences.with_rewards(compared)
    scores = {which: _scores({name: part.value for name, part in known.items()}) for which, known in sums.items()}
    drawn = differences(sums["base"], sums["adapter"], seed) if "base" in sums else {}
    result = Evaluation(
        data=file.name,
        num_rows=len(documents),
        base=dataclasses.replace(scores["base"], reward_accuracy=None, reward_margin=None) if "base" in sums else None,
        adapter=scores["adapter"],
        majority={},
        examples=preferences.examples(documents, compared, models.generator.prompts) if documents.are_pairs else (),
        label=file.label,
        kind="pairs" if documents.are_pairs else "labels",
        chance=preferences.COIN_TOSS,
        intervals=preferences.intervals_of(drawn, sums["adapter"]),
    )
    return _Tested(result, drawn)


def _meter(models: _Models) -> Forgetting:
    plain = Prompts(models.tokenizer, template=None)
    base, adapter = models.adapters["base"], models.adapters["adapter"]
    return measure_forgetting(models.scorer, plain.encode, base, adapter, models.listener)


def _combined(tested: Sequence[_Tested]) -> Evaluation:
    """The only result, or the means of several: of each metric over the files that have it."""
    if len(tested) == 1:
        return tested[0].result
    files = tuple(part.result for part in tested)
    names = {name for part in tested for name in part.differences if not name.startswith("fields.")}
    shared = {name: [part.differences[name] for part in tested if name in part.differences] for name in names}
    means = {name: mean_difference(parts).interval() for name, parts in shared.items()}
    kinds = {file.kind for file in files}
    return Evaluation(
        data=", ".join(file.label for file in files),
        num_rows=sum(file.num_rows for file in files),
        base=_mean([file.base for file in files]) if files[0].base is not None else None,
        adapter=_mean([file.adapter for file in files]),
        majority={},
        examples=(),
        kind=kinds.pop() if len(kinds) == 1 else "mixed",
        intervals={name: means[name] for name in METRICS if name in means},
        files=files,
        notes=tuple(dict.fromkeys(note for file in files for note in file.notes)),
    )


def _mean(scores: Sequence[Scores | None]) -> Scores:
    values: Mapping[str, list[float]] = {
        name: [value for one in scores if one is not None and (value := getattr(one, name)) is not None]
        for name in METRICS
    }
    return _scores({name: float(np.mean(found)) for name, found in values.items() if found})


def _scores(values: dict[str, Any]) -> Scores:
    return Scores(**values)


def _save(file: Path, evaluation: Evaluation, listener: Listener) -> None:
    """Written atomically. If the run's folder is read-only, the result is still returned."""
    text = json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        write_file(file, text)
    except OSError as error:
        listener(Alarm(f"{file} cannot be written: {error.strerror}."))
