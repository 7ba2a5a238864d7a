"""The section `data` of a recipe: where the rows are, how they become text, and which of them are held out."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trillora.recipe.losses import Rows
from trillora.recipe.section import Section, conflict


class SourceSection(Section):
    """One of several data sources."""

    shorthand = "path"
    path: str = Field(min_length=1, description="A file, glob, folder, URL or Hugging Face dataset id.")
    weight: float = Field(
        default=1.0, gt=0, le=1000, description="How often each row is seen per epoch; 0.5 uses half of the rows."
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="Configuration (subset) of a Hugging Face data set. With config or split, its files are read from "
        "the hub as they are needed, without downloading the whole data set.",
    )
    split: str | None = Field(
        default=None, min_length=1, description="Split of a Hugging Face data set, such as train. Default: all splits."
    )


class TemplateSection(Section):
    """Jinja templates that turn any JSON object into a training row. Its keys are variables; `row` is the object."""

    prompt: str | None = Field(default=None, description="Raw text before the completion. Not trained on.")
    completion: str | None = Field(default=None, description="Raw text to train on; EOS is appended.")
    system: str | None = Field(default=None, description="System message of a chat.")
    user: str | None = Field(default=None, description="User message of a chat, rendered by the chat template.")
    assistant: str | None = Field(default=None, description="Assistant message of that chat. Trained on.")
    text: str | None = Field(default=None, description="Plain text. All of it is trained on.")

    @model_validator(mode="after")
    def _one_shape(self) -> TemplateSection:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        if given not in (
            {"prompt", "completion"},
            {"user", "assistant"},
            {"system", "user", "assistant"},
            {"text"},
        ):
            raise conflict(
                min(given, default="prompt"),
                f"data.template has {' and '.join(sorted(given)) or 'nothing'}, which does not make a row.",
                "give prompt and completion; or user and assistant, optionally with system; or text",
            )
        return self


class SplitSection(Section):
    """Rows kept out of training. They are chosen by a hash of their content, so equal rows are on the same side. Rows
    of preferences are chosen by their prompt, so all answers to a prompt are on the same side."""

    validation: float = Field(default=0.1, ge=0, lt=1, description="Fraction of the rows used for evaluation.")
    test: float = Field(default=0.1, ge=0, lt=1, description="Fraction of the rows used for the final test.")

    @model_validator(mode="after")
    def _leaves_something(self) -> SplitSection:
        if self.validation + self.test >= 1:
            raise conflict(
                "test", "data.split leaves no rows to train on.", "make validation and test add up to less than 1"
            )
        return self


class DataSection(Section):
    """The training data."""

    shorthand = "path"
    path: Annotated[str, Field(min_length=1)] | Annotated[tuple[SourceSection, ...], Field(min_length=1)] = Field(
        description="A file, glob, folder, URL or Hugging Face dataset id, or a list of them with weights. Relative "
        "paths start at the recipe's folder.",
    )
    format: Literal[
        "auto",
        "messages",
        "sharegpt",
        "ultrachat",
        "prompt-completion",
        "alpaca",
        "question-answer",
        "text",
        "preference",
        "labelled",
    ] = Field(
        default="auto",
        description="Format of the rows. auto: detected for each file. preference: a prompt, a chosen and a rejected "
        "answer. labelled: an answer that is good or bad.",
    )
    template: TemplateSection | None = Field(
        default=None, description="Templates that turn any JSON object into a training row."
    )
    row_path: str | None = Field(
        default=None,
        min_length=1,
        description="Where the rows are inside a JSON document: data.findings.*.* for example.",
    )
    json_schema: str | None = Field(
        default=None, min_length=1, description="A JSON Schema file that every row must satisfy."
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="Replaces the tokenizer's chat template: chatml, llama3, gemma, zephyr, instruct, or a .jinja "
        "file.",
    )
    train_on: Literal["auto", "assistant", "last", "completion", "everything"] = Field(
        default="auto",
        description="Tokens included in the loss: all assistant messages, the last one, the completion, or everything. "
        "auto: the completion if rows have a prompt, else all assistant messages.",
    )
    thinking: Literal["auto", "train", "mask", "drop"] = Field(
        default="auto",
        description="The thinking in answers. train: in the loss. mask: read, but not in the loss. drop: removed. "
        "auto: in the loss, but not an empty block that the chat template writes where a row has no thinking.",
    )
    on_too_long: Literal["auto", "refuse", "drop", "split", "truncate-left", "truncate-middle"] = Field(
        default="auto",
        description="Rows longer than sequence_length. auto: split texts, and drop other rows up to 1 % of the "
        "trained tokens. truncate: shorten prompts and keep answers.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse", description="A row that cannot be used stops the run (refuse), or is skipped and counted."
    )
    split: SplitSection | None = Field(default=None, description="Rows kept out of training; `{}` means 80/10/10.")
    validation: str | None = Field(
        default=None, min_length=1, description="A separate file of evaluation rows, instead of a split."
    )
    pack: bool = Field(default=True, description="Pack several short documents into one sequence.")
    num_length_buckets: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1, description="Number of sequence lengths when pack is off; one program is compiled per length."
    )
    template_date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = Field(
        default=None,
        description="Date (YYYY-MM-DD) returned by the chat template's strftime_now (default: the date of the first "
        "start).",
    )

    template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the chat template, such as {enable_thinking: false} or {tools: [...]}, in training, "
        "evaluation, generation and serving alike. A row's own chat_template_kwargs come first.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="The keys of the row's format and the columns that they come from, such as "
        "{prompt: question, completion: answer}. Other columns are not read.",
    )
    drop_keys: tuple[str, ...] = Field(
        default=(),
        description="Keys of rows and of their turns that are left out on purpose.",
    )
    weight_key: str | None = Field(
        default=None,
        min_length=1,
        description="Key of a row's weight in the loss, a number from 0 to 1000 (default: 1).",
    )

    def check_rows(self, rows: Rows, place: str) -> None:
        """Raises the conflict of an option with what the stage's loss needs its rows for. `place`: of this section."""
        loss = "train.loss: sft" if rows == "answers" else f"a train.loss of {rows}"
        formats = {"pairs": ("preference",), "labels": ("labelled", "preference")}.get(rows)
        if formats is None:
            if self.format in ("preference", "labelled"):
                what = f"data.format: {self.format} does not fit {loss}, which learns one answer per row."
                do = "set train.loss to dpo for pairs or to kto for labels, or use auto"
                raise conflict(f"{place}.format", what, do)
            return
        if self.format not in ("auto", *formats):
            what = f"data.format: {self.format} does not fit {loss}."
            raise conflict(f"{place}.format", what, f"use auto or {formats[0]}, or set train.loss: sft")
        if self.template is not None:
            what = f"data.template makes rows with one answer and no label, which does not fit {loss}."
            raise conflict(f"{place}.template", what, "name the columns in data.columns instead")
        if self.train_on in ("everything", "assistant"):
            what = f"data.train_on: {self.train_on} trains on the prompt too, which {loss} does not judge."
            do = "leave it out: all answers after the prompt are trained on; or use last"
            raise conflict(f"{place}.train_on", what, do)

    @field_validator("template_date")
    @classmethod
    def _is_a_date(cls, date: str | None) -> str | None:
        if date is not None:
            datetime.date.fromisoformat(date)  # raises ValueError for 2024-13-45
        return date

    @model_validator(mode="after")
    def _options_are_compatible(self) -> DataSection:
        if self.template is not None and self.format != "auto":
            raise conflict("template", "Both data.format and data.template are given.", "remove one of them")
        if self.on_too_long.startswith("truncate") and self.train_on == "everything":
            what = "data.on_too_long: truncate shortens untrained tokens, but data.train_on: everything has none."
            raise conflict("on_too_long", what, "use drop or refuse, or train on the answers")
        if self.thinking in ("train", "mask") and self.train_on == "everything":
            what = f"data.train_on: everything trains on every token, so data.thinking: {self.thinking} has no effect."
            raise conflict("thinking", what, "remove one of them")
        if self.validation is not None and self.split is not None and self.split.validation:
            what = "Both data.validation and data.split.validation are given."
            raise conflict("validation", what, "remove one of them, or set data.split.validation to 0")
        if self.pack and self.num_length_buckets != 1:
            what = "data.num_length_buckets applies only when data.pack is off."
            raise conflict("num_length_buckets", what, "set data.pack to no as well")
        return self
