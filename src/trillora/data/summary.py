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
from trillora.data.documents import PARTS, Documents, all_documents, part_of
from trillora.data.excerpt import ExcerptPiece, pieces_of
from trillora.data.lengths import (
    LabelFacts,
    Lengths,
    LostFacts,
    PairFacts,
    label_facts,
    length_facts,
    lost_facts,
    pair_facts,
)
from trillora.data.open import chat_template, open_dataset, refusal_of, with_template_date
from trillora.data.prepare import DataProblem, Dataset
from trillora.data.rows import place, refused
from trillora.data.stage import batches_of, refusal_of_labels
from trillora.data.tokenizing.encode import TokenizedDocument, Tokenizer
from trillora.data.tokenizing.store import KINDS, Store
from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.files.digests import text_digest
from trillora.model.limits import check_rows
from trillora.model.loading.source import find_model, load_config, load_tokenizer
from trillora.recipe.schema import StageRecipe
from trillora.safe_text import visible
from trillora.secrets import without_secrets

NUM_BAD_SHOWN = 5
NUM_EXAMPLES = 3


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
    shape: str  # of a conversation: "several rounds, system"
    turns: int
    tokens: int
    trained_tokens: int
    pieces: tuple[ExcerptPiece, ...]  # their texts join to the decoded row
    side: str = ""  # chosen, rejected, good or bad
    rejected: ExampleFacts | None = None  # the other side of a pair, whose chosen side this is


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
    shapes: dict[str, int]  # of conversations, with the number of rows
    formats: dict[str, int]
    files: tuple[FileSummary, ...]
    sources: tuple[SourceFacts, ...]
    reasons: tuple[Reason, ...]
    first_bad_rows: tuple[DataProblem, ...]
    notes: tuple[str, ...]  # about files
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
    pairs: PairFacts | None = None
    labels: LabelFacts | None = None
    chat_template: ChatTemplateFacts | None
    examples: tuple[ExampleFacts, ...]  # the first row, and the first of other shapes; or the row asked for
    verdict: DataVerdict

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect(
    recipe: StageRecipe, listener: Listener = ignore_events, *, row: str | None = None, hide_torch: bool = False
) -> DataReport:
    """Reads, renders and tokenizes the recipe's data, and counts what training would do with it.

    `row` is the row to show as an example: its number, or `file:line`.
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
    refusal = (
        _bad_row(recipe, dataset)
        or refusal_of(dataset)
        or too_long
        or nothing
        or refusal_of_labels(documents, recipe)
        or _not_for_the_model(recipe, folder)
    )
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
        pairs=pair_facts(documents, dataset.store.rows["split"][documents.rows_N], recipe.train),
        labels=label_facts(documents, recipe.train),
        chat_template=_template_facts(recipe, dataset, tokenizer),
        examples=_examples(dataset, fitted if len(fitted) else documents, tokenizer, row),
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
    if not len(dataset.store.rows):
        return TrilloraError(f"{first.what}{more}", where=first.where, do=first.do)
    return refused(f"{first.what}{more}", first.where, first.do)


def _not_for_the_model(recipe: StageRecipe, folder: Path) -> TrilloraError | None:
    try:
        model = recipe.model
        config = load_config(folder, trust_remote_code=model.trust_remote_code, rope=model.rope)
        check_rows(config, recipe.train.sequence_length, model.rope)
    except TrilloraError as refusal:
        return refusal
    return None


def _row_facts(dataset: Dataset) -> dict[str, Any]:
    """Facts about the rows that do not depend on the sequence length."""
    rows, facts, options = dataset.store.rows, dataset.store.facts, dataset.options
    rows_of_source = np.bincount(rows["source"], minlength=len(options.sources)).tolist()
    parts = np.bincount(part_of(rows["split"], options.validation, options.test), minlength=len(PARTS)).tolist()
    kinds = np.bincount(rows["kind"], minlength=len(KINDS)).tolist()
    return {
        "rows": len(rows),
        "bad_rows": dataset.num_problems,
        "duplicate_rows": len(rows) - len(np.unique(rows["digest"])),
        "shortened_rows": int(np.count_nonzero(rows["cut"])),
        "kinds": {kind: count for kind, count in zip(KINDS, kinds, strict=True) if count},
        "shapes": _shapes(dataset.store),
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
        "notes": tuple(dataset.notes),
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


def _shapes(store: Store) -> dict[str, int]:
    counts = np.bincount(store.rows["shape"], minlength=len(store.facts["shapes"])).tolist()
    return {shape: n for shape, n in zip(store.facts["shapes"], counts, strict=True) if n and shape}


def _examples(
    dataset: Dataset, documents: Documents, tokenizer: Tokenizer, row: str | None
) -> tuple[ExampleFacts, ...]:
    """The documents to show, as they are trained."""
    store = dataset.store
    if row is not None:
        documents, chosen = all_documents(store).take(np.array([find_row(dataset, row)])), [0]
    else:
        chosen = _different(store, documents)
    has_labels = dataset.options.rows == "labels"
    found = []
    for number in chosen:
        document, at = documents[number], int(documents.rows_N[number])
        if document.first:
            first, second = document.parts
            rejected = _example(store, at, second, tokenizer, "rejected")
            example = dataclasses.replace(_example(store, at, first, tokenizer, "chosen"), rejected=rejected)
        else:
            side = ("bad" if document.weight < 0 else "good") if has_labels else ""
            example = _example(store, at, document, tokenizer, side)
        found.append(example)
    return tuple(found)


def _example(store: Store, row: int, document: TokenizedDocument, tokenizer: Tokenizer, side: str) -> ExampleFacts:
    trained = [False, *document.supervised[1:].tolist()]  # nothing predicts the first token
    return ExampleFacts(
        place=store.place(row),
        kind=KINDS[store.rows["kind"][row]],
        shape=store.shape(row),
        turns=int(store.rows["turns"][row]),
        tokens=len(document),
        trained_tokens=document.num_supervised,
        pieces=pieces_of(tokenizer, document.tokens.tolist(), trained),
        side=side,
    )


def _different(store: Store, documents: Documents) -> list[int]:
    """The first document, and the first of each other kind, shape and label, the most frequent first."""
    if not len(documents):
        return []
    rows = store.rows[documents.rows_N]
    groups_N = (rows["kind"].astype(np.int64) * 128 + rows["shape"]) * 2 + (rows["weight"] < 0)
    groups, firsts, counts = np.unique(groups_N, return_index=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    others = [int(firsts[i]) for i in order if groups[i] != groups_N[0]]
    return [0, *others[: NUM_EXAMPLES - 1]]


def find_row(dataset: Dataset, wanted: str) -> int:
    """The index of a row in the store: by its number among all good rows, or by its place."""
    store, do = dataset.store, "give the number of a row, or file:line as messages show it"
    file, colon, line = wanted.rpartition(":")
    if not line.isdecimal() or not int(line):
        raise TrilloraError(f"'{wanted}' is not a row.", where="--row", do=do)
    if not colon:
        if int(line) > len(store.rows):
            raise TrilloraError(f"There are only {len(store.rows):,} rows.", where="--row", do=do)
        return int(line) - 1
    for problem in dataset.problems:
        if problem.where.endswith(f":{line}") and _is_file(problem.where.rpartition(":")[0], file):
            raise TrilloraError(problem.what, where=problem.where, do=problem.do)
    names = [place(store.files[number], member) for number, member in store.facts["names"]]
    ours = [number for number, name in enumerate(names) if _is_file(name, file)]
    if not ours:
        raise TrilloraError(f"No row is from a file '{file}'.", where="--row", do=f"files: {' '.join(names[:20])}")
    there = np.flatnonzero(np.isin(store.rows["name"], ours) & (store.rows["line"] <= int(line)))
    if not len(there):
        raise TrilloraError(f"No row of {file} begins on line {line} or before.", where="--row", do=do)
    return int(there[np.argmax(store.rows["line"][there])])  # the first that begins on that line, or around it


def _is_file(name: str, wanted: str) -> bool:
    """Whether the name of a file, or of a member of an archive, ends with this path."""
    return name == wanted or name.endswith((f"/{wanted}", f"!{wanted}"))
