"""Counts what a recipe's data would train, before training: `trillora inspect`.

`inspect` prepares the rows exactly as training does, but where training would stop with an error, it records the error
and continues. The report holds plain values: `report.data` shows it to people, `to_dict` to programs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.data.batches import Batches
from trillora.data.documents import PARTS, Documents, part_of
from trillora.data.excerpt import ExcerptPiece, pieces_of
from trillora.data.lengths import Lengths, LostFacts, length_facts, lost_facts
from trillora.data.open import chat_template, open_dataset, with_template_date
from trillora.data.prepare import DataProblem, Dataset
from trillora.data.rows import refused
from trillora.data.stage import batches_of
from trillora.data.tokenizing.encode import Tokenizer
from trillora.data.tokenizing.store import KINDS
from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.files.digests import text_digest
from trillora.model.limits import check_rows
from trillora.model.loading.source import find_model, load_config, load_tokenizer
from trillora.recipe.schema import StageRecipe
from trillora.safe_text import visible
from trillora.secrets import without_secrets

NUM_BAD_SHOWN = 5


@dataclass(frozen=True)
class FileSummary:
    name: str
    format: str
    rows: int  # without bad rows
    bytes: int | None  # None if the file is not on this machine
    sha256: str


@dataclass(frozen=True)
class SourceFacts:
    """One entry of `data.path`."""

    path: str
    weight: float
    rows: int


@dataclass(frozen=True)
class Reason:
    what: str  # digits replaced by N
    rows: int


@dataclass(frozen=True)
class ExampleFacts:
    place: str
    kind: str
    tokens: int
    trained_tokens: int
    pieces: tuple[ExcerptPiece, ...]  # their texts join to the decoded row


@dataclass(frozen=True)
class ChatTemplateFacts:
    owner: str  # "tokenizer", or the value of data.chat_template
    sha256: str


@dataclass(frozen=True)
class DataVerdict:
    """Whether training would accept the data, and if not, its error."""

    ready: bool
    what: str
    where: str | None = None
    do: str = ""

    def refusal(self) -> TrilloraError | None:
        """The error of training, safe to print; None if the data is accepted."""
        if self.ready:
            return None
        return TrilloraError(visible(self.what), where=visible(self.where or "") or None, do=visible(self.do))


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Rows are counted without bad rows; tokens are counted for one epoch, without rows dropped as too long."""

    model: str
    sequence_length: int
    batch_size: int
    pack: bool
    train_on: str
    on_too_long: str
    on_bad_row: str
    rows: int
    bad_rows: int
    duplicate_rows: int  # copies beyond the first
    shortened_rows: int
    kinds: dict[str, int]
    formats: dict[str, int]
    files: tuple[FileSummary, ...]
    sources: tuple[SourceFacts, ...]
    reasons: tuple[Reason, ...]
    first_bad_rows: tuple[DataProblem, ...]
    remarks: dict[str, int]  # what of the rows is not trained on, with the number of rows
    splits: dict[str, int]
    trained_tokens: int = 0
    masked_tokens: int = 0
    padded_tokens: int = 0  # in the sequences that hold a document
    packed_fill: float | None = None  # 1 - the share of these padded tokens
    sequences: int = 0  # that hold a document
    filler_sequences: int = 0  # empty ones that complete the last batch
    padding_fraction: float | None = None  # share of padding in an epoch, with the filler sequences
    padding_warning: str | None = None  # set if most of the computation would be padding
    steps_per_epoch: int = 0
    sequence_lengths: tuple[int, ...] = ()  # one program is compiled for each
    lengths: Lengths | None
    lost: LostFacts | None
    chat_template: ChatTemplateFacts | None
    example: ExampleFacts | None
    verdict: DataVerdict

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect(recipe: StageRecipe, listener: Listener = ignore_events, *, hide_torch: bool = False) -> DataReport:
    """Reads, renders and tokenizes the recipe's data, and counts what training would do with it.

    `hide_torch` saves the import of torch, which takes longer than everything else on small data. It is only for a
    process that loads no model afterwards.
    """
    model = recipe.model
    folder = find_model(
        model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, with_weights=False
    )
    if hide_torch and not model.trust_remote_code:  # after find_model: converting the embedded model needs torch
        _hide_torch()
    tokenizer = load_tokenizer(folder, recipe.tokens or ())
    recipe = with_template_date(recipe, tokenizer, listener)
    dataset = open_dataset(recipe, tokenizer, listener, lenient=True)
    documents = dataset.documents("train", recipe.train.seed)
    fitted, lost, too_long = dataset.fit(documents, recipe.train.sequence_length)
    epoch, nothing = {}, None
    try:
        epoch = _epoch_facts(batches_of(fitted, recipe, dataset.pad_id))
    except TrilloraError as error:
        nothing = error
    refusal = _bad_row(recipe, dataset) or too_long or nothing or _not_for_the_model(recipe, folder)
    accepted = DataVerdict(True, "The data is ready to train on.")
    options = dataset.options
    return DataReport(
        model=model.name,
        sequence_length=recipe.train.sequence_length,
        batch_size=recipe.train.batch_size,
        pack=recipe.data.pack,
        train_on=options.train_on,
        on_too_long=options.on_too_long,
        on_bad_row=recipe.data.on_bad_row,
        **_row_facts(dataset),
        **epoch,
        lengths=length_facts(documents, recipe.train.sequence_length) if len(documents) else None,
        lost=lost_facts(documents, lost, too_long is not None) if len(documents) else None,
        chat_template=_template_facts(recipe, dataset, tokenizer),
        example=_example(dataset, fitted if len(fitted) else documents, tokenizer),
        verdict=DataVerdict(False, refusal.what, refusal.where, refusal.do) if refusal else accepted,
    )


def _hide_torch() -> None:
    """Make transformers work as if torch were not installed, unless either is imported already.

    A tokenizer and a config do not need torch, and transformers supports this mode.
    """
    if "torch" not in sys.modules and "transformers" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises, find_spec finds nothing
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"


def _bad_row(recipe: StageRecipe, dataset: Dataset) -> TrilloraError | None:
    if not dataset.num_problems or recipe.data.on_bad_row != "refuse":
        return None
    first = dataset.problems[0]
    others = dataset.num_problems - 1
    more = f" ({others:,} more {'row is' if others == 1 else 'rows are'} bad)" if others else ""
    return refused(f"{first.what}{more}", first.where, first.do)


def _not_for_the_model(recipe: StageRecipe, folder: Path) -> TrilloraError | None:
    try:
        config = load_config(folder, trust_remote_code=recipe.model.trust_remote_code)
        check_rows(config, recipe.train.sequence_length)
    except TrilloraError as refusal:
        return refusal
    return None


def _row_facts(dataset: Dataset) -> dict[str, Any]:
    """Facts about the rows that do not depend on the sequence length."""
    rows, facts, options = dataset.store.rows, dataset.store.facts, dataset.options
    rows_of_source = np.bincount(rows["source"], minlength=len(options.sources)).tolist()
    parts = np.bincount(part_of(rows["digest"], options.validation, options.test), minlength=len(PARTS)).tolist()
    kinds = np.bincount(rows["kind"], minlength=len(KINDS)).tolist()
    return {
        "rows": len(rows),
        "bad_rows": dataset.num_problems,
        "duplicate_rows": len(rows) - len(np.unique(rows["digest"])),
        "shortened_rows": int(np.count_nonzero(rows["cut"])),
        "kinds": {kind: count for kind, count in zip(KINDS, kinds, strict=True) if count},
        "formats": dict(facts["formats"]),
        "files": tuple(
            FileSummary(f["name"], f["format"], f["num_rows"], f["size"], f["sha256"]) for f in dataset.files
        ),
        "sources": tuple(
            SourceFacts(without_secrets(source.path), source.weight, count)
            for source, count in zip(options.sources, rows_of_source, strict=True)
        ),
        "reasons": tuple(Reason(what, count) for what, count in facts["reasons"].items()),
        "first_bad_rows": tuple(dataset.problems[:NUM_BAD_SHOWN]),
        "remarks": dataset.remarks,
        "splits": dict(zip(PARTS, parts, strict=True)),
    }


def _epoch_facts(batches: Batches) -> dict[str, Any]:
    documents = batches.documents
    num_tokens, num_trained = int(documents.lengths_N.sum()), int(documents.trained_N.sum())
    return {
        "trained_tokens": num_trained,
        "masked_tokens": num_tokens - num_trained,
        "padded_tokens": batches.num_slots - num_tokens,
        "packed_fill": num_tokens / batches.num_slots,
        "sequences": batches.num_rows,
        "filler_sequences": batches.steps_per_epoch * batches.batch_size - batches.num_rows,
        "padding_fraction": batches.padding_fraction,
        "padding_warning": batches.padding_warning(),
        "steps_per_epoch": batches.steps_per_epoch,
        "sequence_lengths": tuple(batches.lengths),
    }


def _template_facts(recipe: StageRecipe, dataset: Dataset, tokenizer: Tokenizer) -> ChatTemplateFacts | None:
    text = chat_template(recipe.data, tokenizer)
    if text is None or not (dataset.store.rows["kind"] == KINDS.index("chat")).any():
        return None
    return ChatTemplateFacts(recipe.data.chat_template or "tokenizer", text_digest(text))


def _example(dataset: Dataset, documents: Documents, tokenizer: Tokenizer) -> ExampleFacts | None:
    """The first document, as it is trained."""
    if not len(documents):
        return None
    document, row = documents[0], int(documents.rows_N[0])
    trained = [False, *document.supervised[1:].tolist()]  # nothing predicts the first token
    return ExampleFacts(
        place=dataset.store.place(row),
        kind=KINDS[dataset.store.rows["kind"][row]],
        tokens=len(document),
        trained_tokens=document.num_supervised,
        pieces=pieces_of(tokenizer, document.tokens.tolist(), trained),
    )
