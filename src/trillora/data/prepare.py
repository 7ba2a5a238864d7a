"""The user's files to tokenized rows on disk, and from there to batches.

Rows are read as a stream, rendered in worker processes, tokenized in this process, and written to a store whose name is
a digest of the files' content, the tokenizer and the options (`StoreInputs`). The next run with the same data finds it.
Apart from a few numbers per row, memory does not grow with the data. Example, one line of chats.jsonl:

    read     {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    render   <|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n, trained: 2<|im_end|>
    encode   [1, 4093, 198, 33, 27, 33, 47, 2, 198, 1, 520, 9531, 198, 34, 2, 198], trained: the 14th and 15th
    store    tokens.bin gets 16 numbers, rows.bin gets one record: chats.jsonl line 1, kind chat, 2 trained, a digest
    batch    `stage.training_batches` packs it with other documents into sequences

A bad row stops this (`data.on_bad_row: refuse`) or is counted and skipped (`skip`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np

from trillora.data.documents import PARTS, Documents, Lost, all_documents, fit, part_of, repeated
from trillora.data.reading.files import Content, DataFile, FileKind, expand, left_out
from trillora.data.reading.hub_files import DataSetPart, hub_files
from trillora.data.reading.parquet import ParquetDecoder
from trillora.data.reading.readers import RowChoice, read_rows
from trillora.data.rendering import formats, preferences
from trillora.data.rendering.pool import MAX_PAST_LIMIT, Batch, Outcome, Pool
from trillora.data.rendering.render import NO_CHAT_TEMPLATE, TEMPLATE_DATE, Cut, RenderedRow, RenderSettings, parse
from trillora.data.rows import BadRow, Fault, RawRow, place, refused
from trillora.data.tokenizing.encode import EncodedRow, Encoder, TokenizedDocument, Tokenizer
from trillora.data.tokenizing.endings import Ending, Endings
from trillora.data.tokenizing.preferences import encode_rows
from trillora.data.tokenizing.store import KINDS, MAKING, ROW, Store, StoreWriter, locked_store, open_store
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress, ignore_events
from trillora.files.digests import json_digest, text_digest
from trillora.recipe.losses import Rows

FORMAT = 9  # of a store: increase it when the same data would be read, tokenized or stored differently
ROWS_PER_BATCH = 256
BYTES_PER_BATCH = 2**20
ROWS_LOOKED_AT = 100  # to detect a file's format
MOST_REMARKS = 500  # different ones; rows whose keys are data have as many as they have keys
KEPT_PROBLEMS = 200  # bad rows stored with their place; all are counted
UNPAIRED = "The two answers of a pair are used as a good and a bad one"


@dataclass(frozen=True)
class Source:
    """One entry of `data.path`: a file, glob, folder, URL or hub id, and how often its rows occur in an epoch."""

    path: str
    weight: float = 1.0
    config: str | None = None  # of a hub data set
    split: str | None = None


@dataclass(frozen=True)
class DataOptions:
    """The recipe's options for its data."""

    sources: tuple[Source, ...]
    rows: Rows = "answers"  # what each is for: one answer, a pair of them, or an answer with a label
    format: str = "auto"
    template: dict[str, str] | None = None
    row_path: str | None = None  # path to the rows inside a JSON document
    schema: dict[str, Any] | None = None
    chat_template: str | None = None  # its text; None: the tokenizer's own
    train_on: str = "auto"
    thinking: str = "auto"
    on_too_long: str = "auto"
    on_bad_row: str = "refuse"
    template_date: str = TEMPLATE_DATE
    template_arguments: dict[str, Any] = field(default_factory=dict)
    weight_key: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    drop_keys: tuple[str, ...] = ()
    validation: float = 0.0
    test: float = 0.0


class FileInput(NamedTuple):
    """What of a file decides its tokens. Its name does not: a renamed file finds its store."""

    source: int  # entry of data.path
    kind: FileKind
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class StoreInputs:
    """Everything that decides what is in a store, whose name is the digest of this.

    `_StoreBuilder` takes what it needs from here and not from the recipe, so an option that changes the tokens is part
    of the name.
    """

    version: int
    files: tuple[FileInput, ...]
    row_path: str | None
    format: str
    rendering: RenderSettings
    truncate_from: str | None  # left or middle; None if rows are not truncated
    truncate_to: int | None  # tokens
    tokenizer: str  # digest

    @property
    def key(self) -> str:
        return json_digest(dataclasses.asdict(self))[:32]


@dataclass(frozen=True)
class DataProblem:
    """A row that was skipped, or a part of a file that could not be read."""

    where: str
    what: str
    do: str


@dataclass(frozen=True)
class Dataset:
    """An open store with the options it was made for."""

    store: Store
    options: DataOptions
    pad_id: int = 0
    left_out: tuple[str, ...] = ()  # what to say about files that were found but cannot be read
    is_new: bool = True  # False: found in the cache

    @property
    def files(self) -> list[dict[str, Any]]:
        """Name, sha256, format and number of rows of each file."""
        facts = self.store.facts["files"]
        return [{"name": name, **known} for name, known in zip(self.store.files, facts, strict=True)]

    @property
    def problems(self) -> list[DataProblem]:
        """The first KEPT_PROBLEMS of the problems."""
        # Stored with the file's index: files may be renamed before the store is opened again.
        found = self.store.facts["problems"]
        return [
            DataProblem(place(self.store.files[file], member, line, nth), what, do)
            for file, member, line, what, do, nth in found
        ]

    @property
    def num_problems(self) -> int:
        return int(self.store.facts["num_problems"])

    @property
    def notes(self) -> list[str]:
        """What a user should know about the files."""
        found = self.store.facts["notes"]
        return [*self.left_out, *(f"{self.store.files[file]}: {text}" for file, text in found)]

    @property
    def remarks(self) -> dict[str, int]:
        """What to know about the rows, such as what of them is not trained on, and the number of rows it is true of."""
        ends = {f"{end.what}; the first is {self.store.place(end.first)}": end.num_rows for end in self.endings}
        return {**self.store.facts["remarks"], **ends}

    @property
    def endings(self) -> list[Ending]:
        """Defects at the ends of pairs and labelled answers."""
        return [Ending(*end) for end in self.store.facts["endings"]]

    @property
    def system(self) -> str:
        """The system message that every row has; empty if they have different ones or none."""
        return str(self.store.facts["system"])

    def documents(self, part: str = "train", seed: int = 0) -> Documents:
        """The rows of one part, not yet fitted to a length. Source weights apply to the training part only."""
        rows = self.store.rows
        chosen = part_of(rows["split"], self.options.validation, self.options.test) == PARTS.index(part)
        counted = (rows["trained"] > 0) & (rows["weight"] != 0)
        documents = all_documents(self.store).take(np.flatnonzero(chosen & counted))
        if part != "train":
            return documents
        weights = np.array([source.weight for source in self.options.sources])[rows["source"][documents.rows_N]]
        return repeated(documents, weights, rows["digest"][documents.rows_N], seed)

    def fitted(self, part: str, sequence_length: int, seed: int = 0) -> tuple[Documents, Lost]:
        """The documents of one part, each at most `sequence_length` long, and what that cost."""
        fitted, lost, error = self.fit(self.documents(part, seed), sequence_length)
        if error is not None:
            raise error
        return fitted, lost

    def fit(self, documents: Documents, sequence_length: int) -> tuple[Documents, Lost, TrilloraError | None]:
        """Documents of at most `sequence_length` tokens, what that cost, and the error if that is too much."""
        kinds = self.store.rows["kind"][documents.rows_N]
        return fit(documents, kinds, sequence_length, self.options.on_too_long, self.store.place)


def prepare(
    options: DataOptions,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    sequence_length: int,
    listener: Listener = ignore_events,
    num_workers: int | None = None,
) -> Dataset:
    """Tokenized rows, from the cache or made now. `sequence_length` matters only if rows are truncated."""
    encoder = Encoder(tokenizer, options.chat_template)
    files = _files(options.sources)
    contents = [file.content() for file in files]
    inputs = store_inputs(options, tokenizer, encoder, files, contents, sequence_length)
    names = [file.name for file in files]
    folder = cache / "data" / inputs.key
    with locked_store(folder):
        store = open_store(folder, names)
        is_new = store is None
        if store is None:
            _remove_leftovers(folder.parent)
            allowed = 1 if options.on_bad_row == "refuse" else MAX_PAST_LIMIT
            with Pool(inputs.rendering, num_workers, max_past_limit=allowed) as pool, ParquetDecoder() as parquet:
                read_with = _Resources(files, contents, encoder, pool, parquet)
                _StoreBuilder(inputs, read_with, options.on_bad_row, listener).run(folder)
            store = open_store(folder, names)
    if store is None:
        raise TrilloraError("The new tokenized rows cannot be read back.", where=str(folder), do="check the disk")
    unused = (left_out(source.path) for source in options.sources if source.config is None and source.split is None)
    dataset = Dataset(store, options, encoder.pad_id, tuple(note for note in unused if note), is_new)
    if dataset.num_problems and options.on_bad_row == "refuse":
        first = dataset.problems[0]
        raise refused(first.what, first.where, first.do)
    return dataset


def _files(sources: Sequence[Source]) -> list[DataFile]:
    files: list[DataFile] = []
    for number, source in enumerate(sources):
        if source.config is not None or source.split is not None:
            files += hub_files(source.path, DataSetPart(source.config, source.split), number)
        else:
            files += [dataclasses.replace(file, source=number) for file in expand([source.path])]
    return files


@dataclass(frozen=True)
class _Resources:
    """Open files and processes to fill a store with. They decide nothing that `StoreInputs` does not have."""

    files: Sequence[DataFile]
    contents: Sequence[Content]
    encoder: Encoder
    pool: Pool
    parquet: ParquetDecoder


@dataclass
class _StoreBuilder:
    """Creates one store."""

    inputs: StoreInputs
    use: _Resources
    on_bad_row: str  # refuse: stop, and store nothing
    listener: Listener
    names: dict[tuple[int, str], int] = field(default_factory=dict)  # file and member -> index in the store
    shapes: dict[str, int] = field(default_factory=lambda: {"": 0})  # of conversations -> index in the store
    notes: list[tuple[int, str]] = field(default_factory=list)  # the file's index, and what to say about it
    problems: list[tuple[Any, ...]] = field(default_factory=list)  # the file's index, then the fields of a Fault
    num_past_limit: int = 0
    remarks: Counter[str] = field(default_factory=Counter)  # rows that each is true of
    systems: set[str] = field(default_factory=set)  # system messages; two are enough to know that they differ
    reasons: Counter[str] = field(default_factory=Counter)
    num_rows: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by file, then format
    formats: dict[tuple[int, str], str] = field(default_factory=dict)  # by file and member
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_bytes_in_all = sum(file.size for file in self.inputs.files)
        self.endings = Endings([*self.use.encoder.special_words, *self.use.encoder.added_words])

    def run(self, folder: Path) -> None:
        writer = StoreWriter(folder)
        try:
            for batch, outcomes in self.use.pool.map(self._batches()):
                writer.add(*self._encode(batch, outcomes))
            found: Counter[str] = Counter()
            for counts in self.num_rows.values():
                found.update(counts)
            writer.finish(
                {
                    "files": [self._file_facts(number, file) for number, file in enumerate(self.inputs.files)],
                    "formats": dict(found),
                    "names": list(self.names),
                    "shapes": list(self.shapes),
                    "notes": self.notes[:KEPT_PROBLEMS],
                    "problems": self.problems,
                    "num_problems": self.reasons.total(),
                    "reasons": dict(self.reasons.most_common(50)),
                    "remarks": dict(self.remarks.most_common(50)),
                    "endings": self.endings.found(),
                    "system": next(iter(self.systems)) if len(self.systems) == 1 else "",
                }
            )
        finally:
            writer.discard()

    def _file_facts(self, number: int, file: FileInput) -> dict[str, Any]:
        counts = self.num_rows[number]
        facts = {"format": ", ".join(sorted(counts)) or "none", "num_rows": counts.total()}
        return {"source": file.source, "size": file.size, "sha256": file.sha256, **facts}

    def _batches(self) -> Iterator[Batch]:
        """The files' rows in order; a batch has rows of one file or archive member."""
        for number in range(len(self.inputs.files)):
            for member, rows in itertools.groupby(self._rows(number), lambda row: row.member):
                for some in _portions(rows):
                    yield Batch(number, self._format((number, member), some), some)

    def _rows(self, number: int) -> Iterator[RawRow]:
        file, content = self.use.files[number], self.use.contents[number]
        wanted = RowChoice(self.inputs.row_path, _columns_read(self.inputs.rendering))

        def say(text: str) -> None:
            self.notes.append((number, text))

        for row in read_rows(file, content, self.use.parquet, wanted, consumed=self._consumed, say=say):
            if isinstance(row, Fault):
                self._problem(number, row)
            else:
                yield row

    def _format(self, owner: tuple[int, str], rows: Sequence[RawRow]) -> str:
        """The format of a file's rows: from the recipe, or detected in the first row that shows it."""
        if owner not in self.formats:
            rendering = self.inputs.rendering
            found = "template" if rendering.template is not None else self.inputs.format
            for row in rows[:ROWS_LOOKED_AT] if found == "auto" else ():
                with contextlib.suppress(BadRow):
                    read = formats.picked(parse(row.raw), rendering.columns, rendering.drop_keys)
                    found = preferences.detect(read, rendering.rows)
                    break
            if found == "auto":
                return "auto"  # no row shows it: the worker reports the problem of each
            self.formats[owner] = found
        return self.formats[owner]

    def _encode(self, batch: Batch, outcomes: Sequence[Outcome]) -> tuple[list[TokenizedDocument], np.ndarray]:
        """The documents of a batch and their records; bad rows are counted."""
        source = self.inputs.files[batch.file].source
        if len(outcomes) > 1 and all(isinstance(outcome, BadRow) for outcome in outcomes) and not self.num_rows:
            self._refuse_all(batch, outcomes)
        documents: list[TokenizedDocument] = []
        facts = []
        num_before = sum(counts.total() for counts in self.num_rows.values())
        rows: Sequence[RawRow] = batch.rows
        if self.inputs.rendering.rows == "labels":
            rows = [row for row, outcome in zip(rows, outcomes, strict=True) for _ in _unpaired(outcome)]
            outcomes = [answer for outcome in outcomes for answer in _unpaired(outcome)]
        for row, rendered, whole in zip(rows, outcomes, encode_rows(self.use.encoder, outcomes), strict=True):
            document = self._truncated(row, batch.format, rendered, whole)
            if isinstance(document, TokenizedDocument) and not document.num_supervised:
                document = BadRow("This row has no token to train on.", "remove the row, or add an answer to it")
            if isinstance(document, BadRow):
                fault = Fault(row.member, row.line, document.what, document.do, row.nth)
                self._problem(batch.file, fault, past_limit=document.past_limit)
                continue
            assert isinstance(rendered, RenderedRow)
            self.endings.add(num_before + len(documents), rendered, document)
            self.remarks.update(set(rendered.remarks) if len(self.remarks) < MOST_REMARKS else ())
            if len(self.systems) < 2:
                self.systems.add(rendered.system)
            name = self.names.setdefault((batch.file, row.member), len(self.names))
            kind, was_cut = KINDS.index(rendered.kind), document is not whole
            at = (row.line, row.nth)
            shape = self.shapes.setdefault(rendered.shape, len(self.shapes))
            about = (kind, was_cut, shape, rendered.turns)
            split = rendered.digest if rendered.prompt_digest is None else rendered.prompt_digest
            weight = -rendered.weight if rendered.label is False else rendered.weight
            facts.append((0, rendered.digest, split, *at, 0, 0, 0, 0, weight, name, source, *about))
            documents.append(document)
        self.num_rows[batch.file][batch.format] += len(documents)
        return documents, np.array(facts, ROW)

    def _refuse_all(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """No row so far is good. Skipping them is no advice then."""
        first = outcomes[0]
        if self.on_bad_row == "refuse" and isinstance(first, BadRow) and first.what != NO_CHAT_TEMPLATE:
            row = batch.rows[0]
            where = place(self.use.files[batch.file].name, row.member, row.line, row.nth)
            what = f"{first.what.rstrip('.')}. None of the first {len(outcomes)} rows can be used."
            raise TrilloraError(what, where=where, do=first.do)

    def _truncated(self, row: RawRow, format: str, rendered: Outcome, document: EncodedRow) -> EncodedRow:
        """The document with a shorter prompt; unchanged if it fits, or if the answer alone is too long."""
        if isinstance(rendered, BadRow) or isinstance(document, BadRow):
            return document
        side, length = self.inputs.truncate_from, self.inputs.truncate_to
        if side is None or length is None or len(document) <= length:
            return document
        per_token = len(rendered.text) / len(document)
        if rendered.rejected is not None:  # what is cut is in both sides
            per_token = (per_token + len(rendered.rejected.text) / len(document)) / 2
        taken, shorter = 0, document
        for _ in range(8):
            taken += math.ceil((len(shorter) - length) * per_token) + 1
            outcome = self.use.pool.render([row.raw], format, [Cut(side, taken)])[0]
            if rendered.label is not None:  # of two answers of a pair, the one that is good or bad
                outcome = _unpaired(outcome)[0 if rendered.label else -1]
            again = encode_rows(self.use.encoder, [outcome])[0]
            if isinstance(again, BadRow):
                break
            if len(again) <= length:
                return again
            shorter = again
        return document

    def _problem(self, file: int, fault: Fault, *, past_limit: bool = False) -> None:
        self.num_past_limit += past_limit
        where = place(self.use.files[file].name, fault.member, fault.line, fault.nth)
        if fault.what == NO_CHAT_TEMPLATE:  # no row is at fault, and it would be the same for the next one
            raise TrilloraError(fault.what, where=where, do=fault.do)
        if self.on_bad_row == "refuse":
            raise refused(fault.what, where, fault.do)
        if self.num_past_limit > MAX_PAST_LIMIT:
            raise TrilloraError(fault.what, where=where, do=fault.do)
        self.reasons[reason_of(fault.what)] += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append((file, *fault))

    def _consumed(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.listener(Progress("Reading data", self.num_bytes, self.num_bytes_in_all, "bytes"))


def _unpaired(outcome: Outcome) -> list[Outcome]:
    """The two answers of a pair as a good and a bad one; any other row as it is."""
    if isinstance(outcome, BadRow) or outcome.rejected is None:
        return [outcome]
    about: dict[str, Any] = {"rejected": None, "weight": outcome.weight, "prompt_digest": outcome.prompt_digest}
    good = dataclasses.replace(outcome, **about, label=True, remarks=(*outcome.remarks, UNPAIRED))
    bad = dataclasses.replace(outcome.rejected, **about, label=False, digest=outcome.digest ^ 1, remarks=())
    return [good, bad]


def store_inputs(
    options: DataOptions,
    tokenizer: Tokenizer,
    encoder: Encoder,
    files: Sequence[DataFile],
    contents: Sequence[Content],
    sequence_length: int,
) -> StoreInputs:
    pairs = zip(files, contents, strict=True)
    truncates = options.on_too_long.startswith("truncate-")
    return StoreInputs(
        version=FORMAT,
        files=tuple(FileInput(file.source, file.kind, content.size, content.sha256) for file, content in pairs),
        row_path=options.row_path,
        format=options.format,
        rendering=render_settings(options, tokenizer, encoder),
        truncate_from=options.on_too_long.removeprefix("truncate-") if truncates else None,
        truncate_to=sequence_length if truncates else None,
        tokenizer=_tokenizer_digest(tokenizer, encoder.vocab_size),
    )


def _tokenizer_digest(tokenizer: Tokenizer, vocab_size: int | None) -> str:
    """Of everything that `Encoder` reads. The special tokens may differ from the vocabulary's own file."""
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    ends = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, list(tokenizer("")["input_ids"])]
    return json_digest([text_digest(tokenizer.backend_tokenizer.to_str()), special, ends, vocab_size])


def _columns_read(settings: RenderSettings) -> tuple[str, ...]:
    """The columns of a table that are needed; empty for all. A schema and a template can see every column."""
    if not settings.columns or settings.schema is not None:
        return ()
    weight = () if settings.weight_key is None else (settings.weight_key,)
    return (*settings.columns.values(), *weight)


def render_settings(options: DataOptions, tokenizer: Tokenizer, encoder: Encoder) -> RenderSettings:
    template = options.chat_template
    if template is None and tokenizer.chat_template:
        template = tokenizer.get_chat_template()
    return RenderSettings(
        special_words=encoder.special_words,
        added_words=encoder.added_words,
        rows=options.rows,
        train_on=options.train_on,
        thinking=options.thinking,
        template=options.template,
        chat_template=template,
        chat_words=dict(tokenizer.special_tokens_map),
        template_date=options.template_date,
        arguments=options.template_arguments,
        weight_key=options.weight_key,
        columns=options.columns,
        drop_keys=list(options.drop_keys),
        schema=options.schema,
    )


def _remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left. A process that still writes a store holds the lock of that store."""
    for making in parent.glob(f"{MAKING}*"):
        key = making.name.removeprefix(MAKING).partition("-")[0]
        lock = filelock.FileLock(parent / f"{key}.lock", timeout=0)
        with contextlib.suppress(filelock.Timeout, OSError), lock:
            shutil.rmtree(making, ignore_errors=True)


def reason_of(what: str) -> str:
    """An error text with numbers replaced by N, so that equal mistakes in different rows count as one reason."""
    return re.sub(r"[0-9]+", "N", what)[:120]


def _portions(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in lists large enough to be worth sending to a worker."""
    some: list[RawRow] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row.raw)
        if len(some) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
            yield some
            some, size = [], 0
    if some:
        yield some
