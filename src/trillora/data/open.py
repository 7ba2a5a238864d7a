"""Opens the data of a recipe: the starting point of both training and `trillora inspect`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from trillora.data.prepare import DataOptions, Dataset, Source, prepare
from trillora.data.rendering import preferences, thinking
from trillora.data.rendering.chat_templates import find_template
from trillora.data.tokenizing.encode import Tokenizer
from trillora.errors import TrilloraError
from trillora.events import Alarm, Chosen, Listener, Note
from trillora.files.cache_dir import with_cache
from trillora.files.read_json import read_json
from trillora.model.loading.growth import trained_tokens
from trillora.recipe.data_section import DataSection
from trillora.recipe.losses import Rows
from trillora.recipe.schema import StageRecipe
from trillora.safe_text import seen_from_here

SCHEMA_DO = "put one JSON object into the file, or change data.json_schema"
TEMPLATE_DATE_REASON = "the chat template writes the date; a resumed run must write the same one"


def with_template_date(recipe: StageRecipe, tokenizer: Tokenizer, listener: Listener) -> StageRecipe:
    """The recipe with a date for the chat template: today's, if the template writes one and the recipe gives none."""
    template = chat_template(recipe.data, tokenizer)
    if template is None or "strftime_now" not in template or recipe.data.template_date is not None:
        return recipe
    today = datetime.date.today().isoformat()
    listener(Chosen("data.template_date", today, TEMPLATE_DATE_REASON))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"template_date": today})})


def with_token_ids(recipe: StageRecipe, tokenizer: Tokenizer) -> StageRecipe:
    """The recipe with the numbers of all tokens whose embeddings are trained. `tokenizer` has the new ones."""
    ids = trained_tokens(tokenizer, recipe.tokens or (), recipe.lora.train_tokens)
    if not ids:
        return recipe
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"train_tokens": ids})})


def open_dataset(recipe: StageRecipe, tokenizer: Tokenizer, listener: Listener, *, lenient: bool = False) -> Dataset:
    """The recipe's rows, tokenized. With `lenient`, bad rows are only counted, even if the recipe refuses them."""
    options = data_options(recipe.data, tokenizer, rows=recipe.train.rows, lenient=lenient)
    length = recipe.train.sequence_length
    dataset = with_cache(
        lambda cache: prepare(options, tokenizer, cache, sequence_length=length, listener=listener),
        say=lambda text: listener(Alarm(text)),
    )
    for file in dataset.files:
        listener(Note(f"Data {seen_from_here(file['name'])}: {file['format']}, {file['num_rows']:,} rows"))
    if not dataset.is_new:
        listener(Note("Data already tokenized: read from the cache"))
    for note in dataset.notes:
        listener(Note(f"Data {note}"))
    for remark, count in dataset.remarks.items():
        listener(Note(f"Data {count:,} rows: {remark}"))
    if dataset.num_problems:
        first = dataset.problems[0]
        listener(Note(f"Data {dataset.num_problems:,} bad rows skipped; the first is {first.where}: {first.what}"))
        if not lenient and not len(dataset.store.rows):
            raise TrilloraError(f"No row can be trained on. The first: {first.what}", where=first.where, do=first.do)
    return dataset


def refusal_of(dataset: Dataset) -> TrilloraError | None:
    """The error of rows that cannot be meant to be trained on: an option that has no place, a defect of all rows."""
    num_rows, mode = len(dataset.store.rows), dataset.options.thinking
    for end in dataset.endings:
        if end.num_rows == num_rows:
            what = f"All {num_rows:,} rows have the same defect: {end.what[0].lower()}{end.what[1:]}."
            return TrilloraError(what, where=dataset.store.place(end.first), do=end.do)
    if num_rows and dataset.remarks.get(preferences.SWAPPED) == num_rows:
        what = f"In all {num_rows:,} rows, the chosen answer has a lower score than the rejected one."
        do = "swap the two columns, in the file or with data.columns; or correct the scores"
        return TrilloraError(what, where=dataset.files[0]["name"], do=do)
    if num_rows and mode != "auto" and thinking.FOUND.isdisjoint(dataset.remarks):
        what = f"data.thinking: {mode}, but no row has thinking that the chat template writes."
        do = "remove it; or write thinking into reasoning_content, or into the content between <think> and </think>"
        return TrilloraError(what, where="data.thinking", do=do)
    return None


def data_options(
    data: DataSection, tokenizer: Tokenizer, *, rows: Rows = "answers", lenient: bool = False
) -> DataOptions:
    sources = (Source(data.path),) if isinstance(data.path, str) else tuple(Source(**dict(s)) for s in data.path)
    return DataOptions(
        sources=sources,
        rows=rows,
        format=data.format,
        template=None if data.template is None else data.template.model_dump(exclude_none=True),
        row_path=data.row_path,
        schema=None if data.json_schema is None else read_json(Path(data.json_schema), dict[str, Any], do=SCHEMA_DO),
        chat_template=None if data.chat_template is None else chat_template(data, tokenizer),
        train_on=data.train_on,
        thinking=data.thinking,
        on_too_long=data.on_too_long,
        on_bad_row="skip" if lenient else data.on_bad_row,
        template_date=data.template_date or DataOptions.template_date,
        template_arguments=data.template_arguments,
        weight_key=data.weight_key,
        columns=data.columns,
        drop_keys=data.drop_keys,
        validation=data.split.validation if data.split else 0.0,
        test=data.split.test if data.split else 0.0,
    )


def chat_template(data: DataSection, tokenizer: Tokenizer) -> str | None:
    """The chat template as text: the recipe's, or else the tokenizer's own."""
    if data.chat_template is not None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        return find_template(data.chat_template, {*tokenizer.all_special_tokens, *added}, tokenizer.eos_token)
    return tokenizer.get_chat_template() if tokenizer.chat_template else None
