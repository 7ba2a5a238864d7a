"""What a recipe's data would train, counted before anything is trained: `trillora inspect`.

`inspect` prepares the rows exactly as training does, but notes what training would refuse instead of stopping there.
The report is plain values: `terminal` and `page` show it to people, `to_dict` to programs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.data.batches import Batches
from trillora.data.documents import PARTS, Documents, part_of
from trillora.data.excerpt import Piece, pieces_of
from trillora.data.lengths import Lengths, LostFacts, fitted_or_refused, length_facts, lost_facts
from trillora.data.open import chat_template, open_dataset, settle
from trillora.data.prepare import Dataset
from trillora.data.reading.files import without_secrets
from trillora.data.rows import refused
from trillora.data.tokenizing.encode import Tokenizer
from trillora.data.tokenizing.store import KINDS
from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.model.limits import check_rows
from trillora.model.loading.source import find_model, load_config, load_tokenizer
from trillora.recipe.schema import StageRecipe
from trillora.safe_text import visible

NUM_BAD_SHOWN = 5


@dataclass(frozen=True)
class FileFacts:
    name: str
    format: str
    rows: int  # that can be trained on
    bytes: int | None  # None where the file is not on this machine
    sha256: str


@dataclass(frozen=True)
class SourceFacts:
    """One entry of the recipe's list."""

    path: str
    weight: float
    rows: int


@dataclass(frozen=True)
class BadRowFacts:
    where: str
    what: str
    do: str


@dataclass(frozen=True)
class Reason:
    what: str  # figures written as N
    rows: int


@dataclass(frozen=True)
class ExampleFacts:
    place: str
    kind: str
    tokens: int
    trained_tokens: int
    pieces: tuple[Piece, ...]  # joined they are the decoded row


@dataclass(frozen=True)
class ChatTemplateFacts:
    owner: str  # "tokenizer", or what the recipe names
    sha256: str


@dataclass(frozen=True)
class DataVerdict:
    """Whether training would take the data, and if not, what it would say."""

    ready: bool
    what: str
    where: str | None = None
    do: str = ""

    def refusal(self) -> TrilloraError | None:
        """As an error that is safe to print."""
        if self.ready:
            return None
        return TrilloraError(visible(self.what), where=visible(self.where or "") or None, do=visible(self.do))


@dataclass(frozen=True)
class DataReport:
    """Rows are those that can be trained on; tokens are those of one epoch, without what is left out as too long."""

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
    files: tuple[FileFacts, ...]
    sources: tuple[SourceFacts, ...]
    reasons: tuple[Reason, ...]
    first_bad_rows: tuple[BadRowFacts, ...]
    splits: dict[str, int]
    trained_tokens: int
    masked_tokens: int
    padded_tokens: int  # empty slots of the sequences
    packed_fill: float | None  # share of the slots that hold a token
    sequences: int  # [T] rows of an epoch
    filler_sequences: int  # empty ones that complete the last batch
    steps_per_epoch: int
    sequence_lengths: tuple[int, ...]  # shapes: each is compiled for
    lengths: Lengths | None
    lost: LostFacts | None
    chat_template: ChatTemplateFacts | None
    example: ExampleFacts | None
    verdict: DataVerdict

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect(recipe: StageRecipe, listener: Listener = ignore_events) -> DataReport:
    """Reads, renders and tokenises the recipe's data, and counts what training would do with it."""
    model = recipe.model
    folder = find_model(
        model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, with_weights=False
    )
    tokenizer = load_tokenizer(folder)
    recipe, chosen = settle(recipe, tokenizer)
    for choice in chosen:
        listener(choice)
    dataset = open_dataset(recipe, tokenizer, listener, lenient=True)
    documents = dataset.documents("train", recipe.train.seed)
    fitted, lost, too_long = fitted_or_refused(dataset, documents, recipe.train.sequence_length)
    batches, nothing = _batches(recipe, fitted)
    refusal = _bad_row(recipe, dataset) or too_long or nothing or _not_for_the_model(recipe, folder)
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
        **_epoch_facts(batches),
        lengths=length_facts(documents, recipe.train.sequence_length) if len(documents) else None,
        lost=lost_facts(documents, lost, too_long is not None) if len(documents) else None,
        chat_template=_template_facts(recipe, dataset, tokenizer),
        example=_example(dataset, fitted if len(fitted) else documents, tokenizer),
        verdict=_verdict(refusal),
    )


def _batches(recipe: StageRecipe, fitted: Documents) -> tuple[Batches | None, TrilloraError | None]:
    train, data = recipe.train, recipe.data
    try:
        return Batches(
            fitted,
            batch_size=train.batch_size,
            sequence_length=train.sequence_length,
            seed=train.seed,
            pack=data.pack,
            num_buckets=data.num_length_buckets,
        ), None
    except TrilloraError as refusal:
        return None, refusal


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
        check_rows(config, recipe.train.sequence_length, recipe.data.pack)
    except TrilloraError as refusal:
        return refusal
    return None


def _verdict(refusal: TrilloraError | None) -> DataVerdict:
    if refusal is None:
        return DataVerdict(True, "The data is ready to train on.")
    return DataVerdict(False, refusal.what, refusal.where, refusal.do)


def _row_facts(dataset: Dataset) -> dict[str, Any]:
    """What is known of the rows before any is fitted to a length."""
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
        "files": tuple(FileFacts(f["name"], f["format"], f["num_rows"], f["size"], f["sha256"]) for f in dataset.files),
        "sources": tuple(
            SourceFacts(without_secrets(source.path), source.weight, count)
            for source, count in zip(options.sources, rows_of_source, strict=True)
        ),
        "reasons": tuple(Reason(what, count) for what, count in facts["reasons"].items()),
        "first_bad_rows": tuple(BadRowFacts(p.where, p.what, p.do) for p in dataset.problems[:NUM_BAD_SHOWN]),
        "splits": dict(zip(PARTS, parts, strict=True)),
    }


def _epoch_facts(batches: Batches | None) -> dict[str, Any]:
    if batches is None:
        counts = ("trained_tokens", "masked_tokens", "padded_tokens", "sequences", "filler_sequences")
        return {**dict.fromkeys((*counts, "steps_per_epoch"), 0), "packed_fill": None, "sequence_lengths": ()}
    documents = batches.documents
    num_tokens, num_trained = int(documents.lengths_N.sum()), int(documents.trained_N.sum())
    num_slots = round(num_tokens / (1 - batches.summary()["padding_fraction"]))
    return {
        "trained_tokens": num_trained,
        "masked_tokens": num_tokens - num_trained,
        "padded_tokens": num_slots - num_tokens,
        "packed_fill": num_tokens / num_slots,
        "sequences": batches.num_rows,
        "filler_sequences": batches.steps_per_epoch * batches.batch_size - batches.num_rows,
        "steps_per_epoch": batches.steps_per_epoch,
        "sequence_lengths": tuple(batches.lengths),
    }


def _template_facts(recipe: StageRecipe, dataset: Dataset, tokenizer: Tokenizer) -> ChatTemplateFacts | None:
    text = chat_template(recipe.data, tokenizer)
    if text is None or not (dataset.store.rows["kind"] == KINDS.index("chat")).any():
        return None
    return ChatTemplateFacts(recipe.data.chat_template or "tokenizer", hashlib.sha256(text.encode()).hexdigest())


def _example(dataset: Dataset, documents: Documents, tokenizer: Tokenizer) -> ExampleFacts | None:
    """The first document of an epoch's list, as it is trained."""
    if not len(documents):
        return None
    document, row = documents[0], int(documents.rows_N[0])
    trained = [False, *document.supervised[1:].tolist()]  # the first token has nothing before it to be told from
    return ExampleFacts(
        place=dataset.store.place(row),
        kind=KINDS[dataset.store.rows["kind"][row]],
        tokens=len(document),
        trained_tokens=document.num_supervised,
        pieces=pieces_of(tokenizer, document.tokens.tolist(), trained),
    )
