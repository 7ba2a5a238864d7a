"""Checks on rows of the run's data: what was trained in them, and how well base and adapter predict it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from trillora.certify.certificate import Check
from trillora.certify.subject import NotHere, Subject
from trillora.data.documents import Documents
from trillora.data.open import open_dataset, with_template_date, with_token_ids
from trillora.data.prepare import Dataset
from trillora.data.stage import example_of
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import KINDS
from trillora.errors import TrilloraError
from trillora.evaluation.kinds.preferences import COIN_TOSS
from trillora.events import Listener
from trillora.files.digests import file_digest
from trillora.files.read_json import read_json
from trillora.runs.files import EVAL_FILE
from trillora.runs.saved import SavedAdapter

NUM_ROWS = 8  # whose spans are checked
NUM_SCORED = 3  # whose loss is computed
MAX_DATA = 256 << 20  # bytes; more would take long to read again
MAX_LINE = 1 << 22  # bytes
NO_HELP = "train longer or with other options: the adapter does not help on these rows"
DO = "look at the rows with `trillora inspect`, then train again"


class Changed(NotHere):
    """The data is there, but it is not what the run was trained on."""


class _Scores(BaseModel):
    model_config = ConfigDict(extra="ignore")
    loss: float | None = None
    reward_accuracy: float | None = None


class _Evaluation(BaseModel):
    """The part of `eval.json` that is used."""

    model_config = ConfigDict(extra="ignore")
    data: str
    num_rows: int
    base: _Scores | None = None
    adapter: _Scores


@dataclass(frozen=True)
class SampleRows:
    """Rows of the run's data, rendered again."""

    subject: Subject
    dataset: Dataset
    documents: Documents

    @cached_property
    def chosen(self) -> list[int]:
        """Evenly spaced documents."""
        count = min(NUM_ROWS, len(self.documents))
        return sorted({int(i) for i in np.linspace(0, len(self.documents) - 1, count).round()})

    @property
    def scored(self) -> list[TokenizedDocument]:
        """Of a pair, both sides."""
        return [part for i in self.chosen[:NUM_SCORED] for part in self.documents[i].parts]

    def is_chat(self, index: int) -> bool:
        return KINDS[self.dataset.store.rows["kind"][self.documents.rows_N[index]]] == "chat"

    def raw(self, index: int) -> dict[str, Any] | None:
        """The row as its JSONL file has it; None for other files."""
        store, row = self.dataset.store, int(self.documents.rows_N[index])
        file, member = store.facts["names"][store.rows["name"][row]]
        path = Path(store.files[file])
        if member or path.suffix != ".jsonl" or not path.is_file():
            return None
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == store.rows["line"][row]:
                    try:
                        value = json.loads(line) if len(line) <= MAX_LINE else None
                    except ValueError:
                        return None
                    return value if isinstance(value, dict) else None
        return None


def sample_rows(subject: Subject, listener: Listener) -> SampleRows:
    """Raises `NotHere` if the data of the run is not on this machine, or has changed."""
    if subject.stage is None or subject.stage_record is None:
        raise NotHere("The run is not known, so its rows are not either.", do="give the run: --run RUN")
    files = [(Path(file.name), file.sha256) for file in subject.stage_record.files]
    if not files or not all(path.is_file() for path, _ in files):
        raise NotHere("The run's data is not on this machine.", do="certify it where the data is")
    if sum(path.stat().st_size for path, _ in files) > MAX_DATA:
        raise NotHere(f"The run's data is larger than {MAX_DATA >> 20} MiB.", do="use `trillora inspect` for it")
    if any(file_digest(path) != digest for path, digest in files):
        raise Changed("The run's data has changed since the training.", do="restore the files of the run")
    path = subject.stage.data.path
    named = [path] if isinstance(path, str) else [each.path for each in path]
    if not all(os.path.exists(each) for each in named):  # the recipe may be another person's: no address is contacted
        raise NotHere("The run's data is not on this machine.", do="certify it where the data is")
    tokenizer = subject.opened.tokenizer
    recipe = with_token_ids(with_template_date(subject.stage, tokenizer, listener), tokenizer)
    dataset = open_dataset(recipe, tokenizer, listener)
    documents, _ = dataset.fitted("train", recipe.train.sequence_length, recipe.train.seed)
    return SampleRows(subject, dataset, documents)


def check_masks(rows: SampleRows) -> Iterator[Check]:
    """Whether exactly the assistant's answers and their stop tokens are trained."""
    subject, stage = rows.subject, rows.subject.stage
    assert stage is not None
    yield from _recorded_example(rows)
    if stage.data.train_on == "everything":
        what = "The recipe trains on everything (data.train_on), prompts too."
        yield Check("masks", "answers", "warning", what, do="leave data.train_on out to train on answers only")
        return
    faults, count = [], 0
    for index in rows.chosen:
        if not rows.is_chat(index):
            continue
        count += 1
        place = rows.dataset.store.place(int(rows.documents.rows_N[index]))
        for number, document in enumerate(rows.documents[index].parts):
            raw = rows.raw(index) if number == 0 else None  # its messages end with the chosen answer
            faults += [f"{place}: {fault}" for fault in mask_faults(document, raw, subject)]
    if faults:
        yield Check("masks", "answers", "failed", f"{'; '.join(faults[:3])}.", len(faults), 0, DO)
    elif count:
        what = f"In {count} sample rows exactly the answers and their stop tokens are trained."
        yield Check("masks", "answers", "ok", what, 0, 0)
    else:
        yield Check("masks", "answers", "skipped", "The rows are texts or pairs, not conversations.")


def mask_faults(document: TokenizedDocument, raw: Mapping[str, object] | None, subject: Subject) -> list[str]:
    """What is wrong with the trained spans of one conversation."""
    tokenizer, trained = subject.opened.tokenizer, document.supervised
    spans = _spans(trained)
    if not spans:
        return ["nothing is trained"]
    faults = []
    stops = set(subject.prompts.stops)
    if stops and any(not stops & {*document.tokens[max(a, b - 2) : b].tolist()} for a, b in spans):
        faults.append("an answer is trained without its stop token")
    if bool(trained[1:].all()):
        faults.append("the prompt is trained too")
    messages = raw.get("messages") if raw is not None else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return faults
    texts = [tokenizer.decode(document.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in spans]
    said = {role: _contents(messages, role) for role in ("assistant", "user", "system")}
    for text in said["user"] + said["system"]:
        if len(text) > 7 and any(text in span for span in texts) and not any(text in a for a in said["assistant"]):
            faults.append("a message of the user or system is trained")
    if said["assistant"] and said["assistant"][-1] and not any(said["assistant"][-1] in span for span in texts):
        faults.append("the last answer is not trained")
    return faults


def _contents(messages: Sequence[Mapping[str, object]], role: str) -> list[str]:
    found = (message.get("content") for message in messages if message.get("role") == role)
    return [content.strip() for content in found if isinstance(content, str)]


def _spans(trained: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _recorded_example(rows: SampleRows) -> Iterator[Check]:
    """The example that the run recorded when it started, against the same row now."""
    record = rows.subject.stage_record
    if record is None or not len(rows.documents):
        return
    now = [(piece.text, piece.trained) for piece in example_of(rows.documents, rows.subject.opened.tokenizer)]
    then = [(piece.text, piece.trained) for piece in record.example]
    if now == then:
        what = "The example row that the run recorded has the same text and trained spans when it is rendered again."
        yield Check("masks", "recorded example", "ok", what)
        return
    first = next((a for a, b in zip(then, now, strict=False) if a != b), then[-1] if then else ("", False))
    how = "was trained" if first[1] else "was not trained"
    what = f"The example row that the run recorded is not what the data gives now: {str(first[0])[:60]!r} {how}."
    yield Check("masks", "recorded example", "failed", what, do=DO)


def check_scores(subject: Subject, losses: tuple[float, float] | None) -> Iterator[Check]:
    """`losses`: of base and trained weights on sample rows (`logits.row_loss`)."""
    name = None
    has_preferences = subject.stage is not None and subject.stage.train.rows != "answers"
    file = None if subject.run is None else subject.run.folder / EVAL_FILE
    is_own = subject.adapter is not None and SavedAdapter(subject.adapter, subject.run).is_result
    if file is not None and file.is_file() and is_own:
        try:
            found = read_json(file, _Evaluation, do="evaluate it again with `trillora eval`")
            tested = f"{found.num_rows:,} rows of {found.data}"
            if found.adapter.reward_accuracy is not None:
                yield _rewards(found.adapter.reward_accuracy, tested)
                return
            if found.base is not None and found.base.loss is not None and found.adapter.loss is not None:
                losses, name, has_preferences = (found.base.loss, found.adapter.loss), tested, False
        except TrilloraError:
            pass
    if losses is None:
        yield Check("scores", "loss", "skipped", "There are no scores of the run, and no rows of it.")
        return
    base, own = losses
    name = name or "a few rows of the training data"
    what = f"Loss on {name}: base {base:.4f}, adapter {own:.4f}."
    if has_preferences:
        what = f"Log-probability of good minus bad answers on {name}: base {-base:.2f}, adapter {-own:.2f} nats."
    if not own < base:
        yield Check("scores", "loss", "warning", what, own, base, NO_HELP)
    else:
        yield Check("scores", "loss", "ok", what, own, base)


def _rewards(accuracy: float, tested: str) -> Check:
    what = f"Reward accuracy on {tested}: {accuracy:.1%}; half would be chance."
    if not accuracy > COIN_TOSS:
        return Check("scores", "rewards", "warning", what, accuracy, COIN_TOSS, NO_HELP)
    return Check("scores", "rewards", "ok", what, accuracy, COIN_TOSS)
