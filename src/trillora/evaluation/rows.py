"""The rows of an evaluation: which stage and file they come from, and their documents as in training.

What the rows of a file are for is seen in the file, not in the run: a run that was trained with dpo is tested on
ordinary rows, and any run on pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.data.documents import NOTHING_LOST, Documents, fit
from trillora.data.open import open_dataset
from trillora.data.prepare import ROWS_LOOKED_AT, Dataset
from trillora.data.reading import readers
from trillora.data.reading.files import DataFile
from trillora.data.reading.parquet import ParquetDecoder
from trillora.data.reading.readers import RowChoice
from trillora.data.rendering.formats import picked
from trillora.data.rendering.preferences import rows_shown_by
from trillora.data.rendering.render import parse
from trillora.data.rows import BadRow, Fault, RawRow, place
from trillora.data.tokenizing.store import KINDS
from trillora.early.training import check_files
from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener
from trillora.model.adapters import TEMPLATE_FILE
from trillora.recipe.data_section import DataSection
from trillora.recipe.load import RunRecipe
from trillora.recipe.losses import Rows
from trillora.recipe.schema import StageRecipe, stages_of

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

# A loss that has such rows. It is not computed.
_LOSSES: dict[Rows, str] = {"answers": "sft", "pairs": "dpo", "labels": "kto"}


def recipe_with_data(
    run_recipe: RunRecipe, data: str | Path | None, adapter: Path, name: str | None = None
) -> StageRecipe:
    """The recipe of a stage, by default the run's last one, with the test rows as its data, in the chat template of the
    adapter."""
    stages = stages_of(run_recipe.recipe)
    number = _stage_number(run_recipe, [stage.name for stage in stages], name, needs_name=data is None)
    stage = stages[number].recipe
    section = stage.data
    changes: dict[str, Any] = {}
    template = adapter / TEMPLATE_FILE
    if template.is_file():  # the run may have been copied here; its template was copied with it
        changes["chat_template"] = str(template)
    train = stage.train
    if data is not None:
        changes |= {"path": str(data), "split": None}
        if (rows := _rows_shown_by(str(data), section, train.rows)) != train.rows:
            train = train.model_copy(update={"loss": _LOSSES[rows]})
            changes |= {"format": "auto", "train_on": "auto"}
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
    return stage.model_copy(update={"data": section.model_copy(update=changes), "train": train})


def _rows_shown_by(path: str, data: DataSection, usual: Rows) -> Rows:
    """What the rows of a local file are for. Other files are not downloaded for it: they are like the run's."""
    if data.template is not None or data.format not in ("auto", "preference", "labelled"):
        return usual  # these say what a row means
    with suppress(TrilloraError):  # a file that cannot be read: its reader says why
        for _, row in itertools.islice(raw_rows(check_files(path), data.row_path), ROWS_LOOKED_AT):
            if isinstance(row, RawRow):
                with suppress(BadRow):
                    return rows_shown_by(picked(parse(row.raw), data.columns, data.drop_keys), usual)
    return usual


def raw_rows(files: Iterable[DataFile], row_path: str | None) -> Iterator[tuple[str, RawRow | Fault]]:
    """The rows of all files, and where each is."""
    with ParquetDecoder() as parquet:
        for file in files:
            for row in readers.read_rows(file, file.content(), parquet, RowChoice(row_path), consumed=lambda _: None):
                yield place(file.name, row.member, row.line, row.nth), row


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
    recipe: StageRecipe, tokenizer: Tokenizer, own_test: bool, max_rows: int | None, listener: Listener
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
    recipe refuses them: the run is finished, so its sequence length cannot change. The sides of a pair are tested one
    by one, so each has to fit."""
    documents = dataset.documents(part)
    kinds = dataset.store.rows["kind"][documents.rows_N]
    fits = (documents.longest_sides_N <= sequence_length) | (kinds == KINDS.index("text"))
    kept, lost = documents.take(fits), NOTHING_LOST
    if not documents.are_pairs:
        policy = "drop" if dataset.options.on_too_long == "drop" else "split"
        kept, lost, _ = fit(kept, kinds[fits], sequence_length, policy, dataset.store.place)
    num_lost = lost.num_rows + int((~fits).sum())
    if num_lost:
        rows = "1 row is" if num_lost == 1 else f"{num_lost:,} rows are"
        listener(Alarm(f"{rows} longer than the run's {sequence_length:,} tokens and not tested."))
    return kept


def _name_of(dataset: Dataset, own_test: bool) -> str:
    first, *others = [str(file["name"]) for file in dataset.files]
    name = f"{first} and {len(others)} more files" if others else first
    return f"{name}, test split" if own_test else name
