"""The data of one stage: batches to train on, and a fixed evaluation set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trillora.data.batches import Batches
from trillora.data.documents import NOTHING_LOST, Documents, Lost
from trillora.data.excerpt import ExcerptPiece, pieces_of
from trillora.data.lengths import label_facts
from trillora.data.open import chat_template, open_dataset, refusal_of, with_template_date, with_token_ids
from trillora.data.prepare import Dataset
from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Note
from trillora.files.digests import file_digest, text_digest
from trillora.model.loading.growth import tokenizer_files
from trillora.model.loading.source import OpenModel
from trillora.recipe.losses import is_file
from trillora.recipe.resolve import DocumentRoom
from trillora.recipe.schema import Stage, StageRecipe

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

EXAMPLE_TOKENS = 600  # of the row shown in the report
SHORTEST_BLOCK = 128  # tokens: what an attention kernel computes at once


@dataclass(frozen=True)
class StageData:
    """What a stage is trained and evaluated on."""

    name: str
    recipe: StageRecipe  # with a date for the chat template, if it needs one, and the numbers of trained tokens
    restarts_optimizer: bool
    dataset: Dataset
    batches: Batches
    evaluation: Documents | None
    num_steps: int
    template: str | None  # the chat template of the recipe, if it gives one

    @property
    def document_room(self) -> DocumentRoom | None:
        """Room for the documents to train and to evaluate on, in the shortest blocks; None without packing."""
        if not self.recipe.data.pack:
            return None
        parts = [part for part in (self.batches, evaluation_batches(self, num_rows=1)) if part is not None]
        longest = max(part.longest_document for part in parts)
        block = shortest_block(longest, self.recipe.train.sequence_length)
        return DocumentRoom(block, max(part.documents_in(block) for part in parts))

    def files_with_adapter(self, opened: OpenModel) -> dict[str, bytes]:
        """The files that belong to an adapter of this stage: the tokenizer, which may have new tokens; the chat
        template that it was trained with, which may not be the base's; and how the positions are scaled."""
        template = {} if self.template is None else {"chat_template.jinja": self.template.encode()}
        return {**tokenizer_files(opened.tokenizer, opened.folder), **template, **opened.rope_file()}

    def identity(self) -> dict[str, str]:
        """Digests of the tokenized rows, which depend on files, tokenizer, template and options; and of a loss that is
        a file."""
        losses = self.recipe.train.losses
        own = {
            f"{self.name} loss {Path(name).name}{f' ({number})' if len(losses) > 1 else ''}": file_digest(Path(name))
            for number, name in enumerate(losses, 1)
            if is_file(name)
        }
        return {
            f"{self.name} data": text_digest(self.dataset.store.folder.name),
            f"{self.name} chat template": text_digest(self.template or ""),
            **own,
        }

    def places_of(self, step: int) -> list[str]:
        """File and line of every row in the batch of a step."""
        rows = self.batches.documents.rows_N[self.batches.documents_of(step)]
        return sorted({self.dataset.store.place(int(row)) for row in rows})

    def padding_of(self, step: int) -> float:
        """Fraction of padding in the batch of a step."""
        num_tokens = int(self.batches.documents.lengths_N[self.batches.documents_of(step)].sum())
        return 1 - num_tokens / (self.batches.batch_size * self.batches.length_of(step))


def example_of(documents: Documents, tokenizer: Tokenizer) -> tuple[ExcerptPiece, ...]:
    """The first row as people see it: its text in pieces that are trained or not. Of a pair, the chosen side."""
    document = documents[0].parts[0]
    trained = [False, *document.supervised[1:EXAMPLE_TOKENS].tolist()]
    return pieces_of(tokenizer, document.tokens[:EXAMPLE_TOKENS].tolist(), trained)


def shortest_block(longest: int, sequence_length: int) -> int:
    """The sequence's length, halved as often as documents of `longest` tokens still fit."""
    block = sequence_length
    while block % 2 == 0 and block // 2 >= max(longest, SHORTEST_BLOCK):
        block //= 2
    return block


def read_stage(stage: Stage, tokenizer: Tokenizer, listener: Listener) -> StageData:
    """Reads and tokenizes the data of a stage. Errors name the stage."""
    recipe = with_token_ids(with_template_date(stage.recipe, tokenizer, listener), tokenizer)
    try:
        dataset = open_dataset(recipe, tokenizer, listener)
        if (refusal := refusal_of(dataset)) is not None:
            raise refusal
        batches = training_batches(dataset, recipe)
        if (refusal := refusal_of_labels(batches.documents, recipe)) is not None:
            raise refusal
        evaluation = _evaluation(dataset, recipe, tokenizer, listener)
    except TrilloraError as error:
        error.where = error.where or f"stage {stage.name}"
        raise
    listener(Note(f"Data {describe(batches)}"))
    if warning := batches.padding_warning():
        listener(Alarm(warning))
    train = recipe.train
    return StageData(
        name=stage.name,
        recipe=recipe,
        restarts_optimizer=stage.restarts_optimizer,
        dataset=dataset,
        batches=batches,
        evaluation=evaluation,
        num_steps=train.num_steps(batches.steps_per_epoch),
        template=None if recipe.data.chat_template is None else chat_template(recipe.data, tokenizer),
    )


def refusal_of_labels(documents: Documents, recipe: StageRecipe) -> TrilloraError | None:
    """The error for answers that all have the same label."""
    facts = label_facts(documents, recipe.train)
    if facts is None or (facts.good and facts.bad):
        return None
    kind, other = ("good", "bad") if facts.good else ("bad", "good")
    return TrilloraError(
        f"All {facts.good + facts.bad:,} answers to train on are {kind}: there is nothing to compare them with.",
        where="data, label",
        do=f"add {other} answers" + ("; to learn from good answers alone, set train.loss to sft" if facts.good else ""),
    )


def training_batches(dataset: Dataset, recipe: StageRecipe) -> Batches:
    documents, lost = dataset.fitted("train", recipe.train.sequence_length, recipe.train.seed)
    return batches_of(documents, recipe, dataset.pad_id, lost)


def batches_of(documents: Documents, recipe: StageRecipe, pad_id: int, lost: Lost = NOTHING_LOST) -> Batches:
    """Fitted documents in the batches that the recipe trains on."""
    return Batches(
        documents,
        batch_size=recipe.train.batch_size,
        sequence_length=recipe.train.sequence_length,
        seed=recipe.train.seed,
        pack=recipe.data.pack,
        num_buckets=recipe.data.num_length_buckets,
        pad_id=pad_id,
        lost=lost,
        mismatched=recipe.train.compares_others,
    )


def evaluation_batches(stage: StageData, num_rows: int) -> Batches | None:
    """The evaluation set in batches of `num_rows` sequences."""
    if stage.evaluation is None:
        return None
    return Batches(
        stage.evaluation,
        batch_size=num_rows,
        sequence_length=stage.recipe.train.sequence_length,
        pack=stage.recipe.data.pack,
        pad_id=stage.dataset.pad_id,
        mismatched=stage.recipe.train.compares_others,
    )


def _evaluation(dataset: Dataset, recipe: StageRecipe, tokenizer: Tokenizer, listener: Listener) -> Documents | None:
    data, length = recipe.data, recipe.train.sequence_length
    if data.validation is not None:
        held_out = data.model_copy(update={"path": data.validation, "validation": None, "split": None})
        dataset = open_dataset(recipe.model_copy(update={"data": held_out}), tokenizer, listener)
        part = "train"
    elif data.split is not None and data.split.validation:
        part = "validation"
    else:
        return None
    documents, _ = dataset.fitted(part, length)
    if not len(documents):
        where = "data.validation" if data.validation else "data.split.validation"
        raise TrilloraError("There are no rows to evaluate on.", where=where, do="add rows, or remove this option")
    # The documents with the smallest digests: the same ones at every start and for any order of the files.
    order = dataset.store.rows["digest"][documents.rows_N].argsort(kind="stable")
    return documents.take(order[: recipe.evaluate.max_documents])


def describe(batches: Batches) -> str:
    counts, lost = batches.summary(), batches.lost
    what = "pairs" if batches.documents.are_pairs else "documents"
    text = (
        f"{counts['documents']:,} {what} in {counts['rows']:,} sequences, {counts['supervised']:,} of "
        f"{counts['tokens']:,} tokens trained, {counts['padding_fraction']:.1%} padding"
    )
    if lost.num_split:
        text += f"; {lost.num_split:,} long texts split"
    if lost.num_rows:
        text += f"; {lost.num_rows:,} rows dropped because they are too long, with {lost.num_trained:,} trained tokens"
    return text
