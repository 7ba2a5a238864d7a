"""A recipe's data section made ready: what training and `trillora inspect` both start from."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from trillora.data.prepare import DataOptions, Dataset, Source, prepare
from trillora.data.rendering.chat_templates import find_template
from trillora.data.tokenizing.encode import Encoder, Tokenizer
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note
from trillora.files.cache_dir import cache_root
from trillora.recipe.load import resolve
from trillora.recipe.schema import DataSection, StageRecipe


def settle(recipe: StageRecipe, tokenizer: Tokenizer) -> tuple[StageRecipe, list[Chosen]]:
    """The recipe with what its data section leaves open: the date, where the chat template asks for it."""
    template = chat_template(recipe.data, tokenizer)
    if template is None or "strftime_now" not in template or recipe.data.template_date is not None:
        return recipe, []
    today = datetime.date.today().isoformat()
    chosen = [
        Chosen("data.template_date", today, "the chat template writes the date; a continued run must write the same")
    ]
    return resolve(recipe, chosen), chosen


def open_dataset(recipe: StageRecipe, tokenizer: Tokenizer, listener: Listener, *, lenient: bool = False) -> Dataset:
    """The recipe's rows, tokenised. `lenient`: bad rows are noted, whatever the recipe says."""
    dataset = prepare(
        data_options(recipe.data, tokenizer, lenient=lenient),
        tokenizer,
        cache_root(),
        sequence_length=recipe.train.sequence_length,
        listener=listener,
    )
    for file in dataset.files:
        listener(Note(f"Data {file['name']}: {file['format']}, {file['num_rows']:,} rows"))
    if not dataset.is_new:
        listener(Note("Data tokenised before; found in the cache"))
    if dataset.num_problems:
        first = dataset.problems[0]
        listener(Note(f"Data {dataset.num_problems:,} bad rows left out; the first is {first.where}: {first.what}"))
        if not lenient and not len(dataset.store.rows):
            raise TrilloraError(f"No row can be trained on. The first: {first.what}", where=first.where, do=first.do)
    return dataset


def data_options(data: DataSection, tokenizer: Tokenizer, *, lenient: bool = False) -> DataOptions:
    sources = (Source(data.path),) if isinstance(data.path, str) else tuple(Source(s.path, s.weight) for s in data.path)
    template = None
    if data.template is not None:
        template = {name: text for name, text in data.template.model_dump().items() if text is not None}
    named = data.chat_template
    return DataOptions(
        sources=sources,
        format=data.format,
        template=template,
        row_path=data.row_path,
        schema=None if data.json_schema is None else _read_schema(data.json_schema),
        chat_template=None if named is None else chat_template(data, tokenizer),
        train_on=data.train_on,
        on_too_long=data.on_too_long,
        on_bad_row="skip" if lenient else data.on_bad_row,
        template_date=data.template_date or DataOptions.template_date,
        validation=data.split.validation if data.split else 0.0,
        test=data.split.test if data.split else 0.0,
    )


def chat_template(data: DataSection, tokenizer: Tokenizer) -> str | None:
    """The text of the template conversations are rendered with: the recipe's, else the tokenizer's own."""
    if data.chat_template is not None:
        encoder = Encoder(tokenizer)
        return find_template(data.chat_template, {*encoder.special_words, *encoder.added_words}, tokenizer.eos_token)
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def _read_schema(path: str) -> dict[str, Any]:
    try:
        schema = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise TrilloraError(
            f"The JSON Schema cannot be read: {error.strerror}.", where=path, do="check data.json_schema"
        ) from None
    except ValueError as error:
        raise TrilloraError(f"The JSON Schema is not JSON: {error}.", where=path, do="mend the file") from None
    if not isinstance(schema, dict):
        raise TrilloraError("A JSON Schema is a JSON object.", where=path, do="write one object into the file")
    return schema
