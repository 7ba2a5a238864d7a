"""The recipe: every option of a run, declared once with its default, its unit and its effect.

A recipe has `data`, or `stages` that follow each other; `stages_of` shows either as a list of stages, each a whole
recipe of its own, so that nothing below needs to know of the difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A mapping of the recipe: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None  # the key a bare string stands for: `model: smollm2` is `model: {name: …}`

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return as_mapping(cls, value)

    @field_validator("*", mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python counts True as 1, so `rank: yes` would be rank 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("bool_type", "yes and no are not values of this option")
        return value


class ModelSection(Section):
    """Which model learns."""

    shorthand = "name"
    name: str = Field(min_length=1, description="The embedded smollm2, a Hugging Face id, or a folder.")
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of a Hugging Face id; null for its main branch."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Number format of the frozen base; auto picks what the chip computes fastest in."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that lies in the model's repository. Only for code you have read."
    )


class SourceSection(Section):
    """One of several sources."""

    shorthand = "path"
    path: str = Field(min_length=1, description="A file, glob, folder, address or Hugging Face data set id.")
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="How often each of its rows is seen in an epoch; 0.5 takes half of them.",
    )


class TemplateSection(Section):
    """Jinja templates that make a training row of any JSON object: its keys are the names, `row` is the whole."""

    prompt: str | None = Field(default=None, description="Raw text in front of the completion; not trained.")
    completion: str | None = Field(default=None, description="Raw text that is trained, with EOS behind it.")
    system: str | None = Field(default=None, description="System turn of a chat.")
    user: str | None = Field(default=None, description="User turn of a chat, rendered by the chat template.")
    assistant: str | None = Field(default=None, description="The assistant's answer in that chat; trained.")
    text: str | None = Field(default=None, description="A document, trained whole.")

    @model_validator(mode="after")
    def _one_shape(self) -> TemplateSection:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        if given not in (
            {"prompt", "completion"},
            {"user", "assistant"},
            {"system", "user", "assistant"},
            {"text"},
        ):
            raise _conflict(
                min(given, default="prompt"),
                f"data.template has {' and '.join(sorted(given)) or 'nothing'}, which is no row.",
                "give prompt and completion; or user and assistant, with system if you like; or text",
            )
        return self


class SplitSection(Section):
    """Rows kept out of training, chosen by their own content: equal rows are always on the same side."""

    validation: float = Field(default=0.1, ge=0, lt=1, description="Share of the rows kept for evaluation.")
    test: float = Field(default=0.1, ge=0, lt=1, description="Share of the rows kept for the final test.")

    @model_validator(mode="after")
    def _leaves_something(self) -> SplitSection:
        if self.validation + self.test >= 1:
            raise _conflict(
                "test", "data.split leaves nothing to train on.", "keep validation and test below 1 together"
            )
        return self


class DataSection(Section):
    """What it learns from."""

    shorthand = "path"
    path: Annotated[str, Field(min_length=1)] | Annotated[tuple[SourceSection, ...], Field(min_length=1)] = Field(
        description="A file, glob, folder, address or Hugging Face data set id, or a list of them with weights; "
        "relative paths count from the recipe's folder.",
    )
    format: Literal["auto", "messages", "sharegpt", "prompt-completion", "alpaca", "question-answer", "text"] = Field(
        default="auto", description="What a row is; auto looks at the rows of each file."
    )
    template: TemplateSection | None = Field(default=None, description="How to make a training row of any JSON object.")
    row_path: str | None = Field(
        default=None, min_length=1, description="Where rows lie inside a JSON document: data.findings.*.* for example."
    )
    json_schema: str | None = Field(
        default=None, min_length=1, description="A JSON Schema file that every row must satisfy."
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="Instead of the tokenizer's own: chatml, llama3, gemma, zephyr, instruct, or a .jinja file.",
    )
    train_on: Literal["auto", "assistant", "last", "completion", "everything"] = Field(
        default="auto",
        description="Which tokens the loss sees: all answers, the last, the completion, or everything; auto takes "
        "the completion where rows tell it apart from a prompt, else all answers.",
    )
    on_too_long: Literal["auto", "refuse", "drop", "split", "truncate-left", "truncate-middle"] = Field(
        default="auto",
        description="Rows longer than a sequence: auto splits texts and drops others up to 1 % of the trained tokens; "
        "truncate shortens prompts and keeps answers.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse", description="A row that cannot be trained on stops the run, or is left out and counted."
    )
    split: SplitSection | None = Field(default=None, description="Rows kept out of training; `{}` for 80/10/10.")
    validation: str | None = Field(
        default=None, min_length=1, description="A file of rows to evaluate on, instead of a share of these."
    )
    pack: bool = Field(default=True, description="Put several short rows into one sequence instead of padding each.")
    num_length_buckets: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1, description="Sequence lengths used when rows are not packed; each is compiled for."
    )
    template_date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = Field(
        default=None, description="The date a chat template hears when it asks; chosen once, at the first start."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DataSection:
        if self.template is not None and self.format != "auto":
            raise _conflict("template", "Both data.format and data.template are given.", "keep one of the two")
        if self.on_too_long.startswith("truncate") and self.train_on == "everything":
            what = "data.on_too_long shortens what is not trained, and with data.train_on: everything all of it is."
            raise _conflict("on_too_long", what, "use drop or refuse, or train on the answers")
        if self.validation is not None and self.split is not None and self.split.validation:
            what = "Both data.validation and a share for it in data.split are given."
            raise _conflict("validation", what, "keep one of the two, or set data.split.validation to 0")
        if self.pack and self.num_length_buckets != 1:
            raise _conflict(
                "num_length_buckets",
                "data.num_length_buckets is for rows that are not packed.",
                "set data.pack to no as well",
            )
        return self


class LoraSection(Section):
    """The adapter."""

    rank: Count = Field(default=16, description="Inner width of the adapter: more learns more and costs more memory.")
    alpha: float = Field(default=32.0, gt=0, description="Strength: the adapter is scaled by alpha / rank.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) instead, which suits high ranks.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of the adapter's inputs dropped while training.")
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default="all-linear", description="Layers that get an adapter: all-linear, or a list of names or patterns."
    )


class TrainSection(Section):
    """How it learns."""

    sequence_length: int = Field(default=512, ge=2, description="Tokens in one row of a batch.")
    batch_size: Count = Field(default=8, description="Rows of one optimiser step, over all devices together.")
    micro_batch_size: Auto | Count = Field(
        default="auto", description="Rows of the batch processed at once, over all devices; fewer need less memory."
    )
    optimizer: Literal["adamw", "lion", "lion-8bit", "adafactor"] = Field(
        default="adamw",
        description="Update rule; adamw keeps two numbers for each it trains, lion one, lion-8bit a quarter, adafactor "
        "next to none. Both lions want a learning rate three to ten times smaller.",
    )
    learning_rate: float = Field(default=2e-4, gt=0, description="Peak step size of the optimiser.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="How the learning rate falls from its peak to zero at the last step; constant stays, wsd stays "
        "and falls at the end.",
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Last share of the steps, over which schedule wsd falls; 0.2 when not given."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises to its peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="Pull of the adapter towards zero.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Longer gradients are scaled down to this length.")
    steps: Count | None = Field(default=None, description="Optimiser steps of the run; give this or epochs.")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Passes over the data; give this or steps. 1 when neither is given."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Start of every random choice: same seed, same run.")
    max_bad_steps: Count = Field(
        default=10,
        description="The run stops at its last good state after so many steps in a row that were skipped, without "
        "gradient or worse than guessing.",
    )
    checkpoint_every: Auto | Count = Field(
        default="auto", description="Steps between checkpoints; auto spends at most 2 % of the time on them."
    )
    keep_checkpoints: int = Field(default=2, ge=2, description="Newest checkpoints kept; the best is kept beside them.")
    checkpoint_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or address (gs://bucket/run) for checkpoints; in the run's folder when not given.",
    )
    time_limit: Annotated[str, Field(pattern=r"^([0-9]+h([0-9]+m)?|[0-9]+m([0-9]+s)?|[0-9]+s)$")] | None = Field(
        default=None, description="Save and stop after this time, as in 8h30m; the same command goes on from there."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_told(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("steps") is None and value.get("epochs") is None:
            return {**value, "epochs": 1.0}
        return value

    @model_validator(mode="before")
    @classmethod
    def _wsd_falls_at_the_end(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("schedule") == "wsd" and value.get("decay_fraction") is None:
            return {**value, "decay_fraction": 0.2}
        return value

    @model_validator(mode="after")
    def _values_fit_together(self) -> TrainSection:
        if self.decay_fraction is not None and self.schedule != "wsd":
            raise _conflict(
                "decay_fraction",
                f"train.decay_fraction is for train.schedule: wsd; it is {self.schedule}.",
                "set train.schedule to wsd, or leave train.decay_fraction out",
            )
        if self.steps is not None and self.epochs is not None:
            raise _conflict("epochs", "Both train.steps and train.epochs are given.", "keep one of the two")
        if self.micro_batch_size != "auto" and self.batch_size % self.micro_batch_size:
            fitting = [str(n) for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise _conflict(
                "micro_batch_size",
                f"train.micro_batch_size {self.micro_batch_size} does not divide train.batch_size {self.batch_size}.",
                f"use auto, or one of {', '.join(fitting)}",
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            raise _conflict(
                "warmup_steps",
                f"train.warmup_steps is {self.warmup_steps}, more than the {self.steps} steps of the run.",
                f"use at most {self.steps}, or the learning rate never reaches its peak",
            )
        return self


def _as_in_train(name: str) -> Any:
    """An option of a stage: that of `train`, unless the stage says otherwise."""
    info = TrainSection.model_fields[name]
    return Field(default=None, description=info.description)


class StageSection(Section):
    """One of several stages: data of its own, and whatever differs from `train`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$", description="What the stage is called.")
    data: DataSection = Field(description="What it learns from: a path, or a mapping.")
    optimizer_state: Literal["carry", "restart"] = Field(
        default="carry", description="Whether the optimiser goes on with what the stage before left, or afresh."
    )
    sequence_length: Annotated[int, Field(ge=2)] | None = _as_in_train("sequence_length")
    batch_size: Count | None = _as_in_train("batch_size")
    micro_batch_size: Auto | Count | None = _as_in_train("micro_batch_size")
    learning_rate: Annotated[float, Field(gt=0)] | None = _as_in_train("learning_rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] | None = _as_in_train("schedule")
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = _as_in_train("decay_fraction")
    warmup_steps: Annotated[int, Field(ge=0)] | None = _as_in_train("warmup_steps")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = _as_in_train("max_grad_norm")
    steps: Count | None = _as_in_train("steps")
    epochs: Annotated[float, Field(gt=0)] | None = _as_in_train("epochs")

    def train_options(self) -> dict[str, Any]:
        """What differs from `train`."""
        own = {"name", "data", "optimizer_state"}
        return {k: v for k, v in self.model_dump(mode="json").items() if k not in own and v is not None}


class EvaluateSection(Section):
    """What is measured while it learns, on rows kept out of training."""

    every_steps: Auto | Count = Field(default="auto", description="Steps between evaluations; auto makes ten of a run.")
    max_documents: Count = Field(default=256, description="Rows of the evaluation set, always the same ones.")
    num_samples: int = Field(default=3, ge=0, le=64, description="Prompts of that set answered at every evaluation.")
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="Prompts of your own to answer instead."
    )
    max_tokens: Count = Field(default=128, description="Longest of these answers, in tokens.")
    patience: Count | None = Field(
        default=None, description="End a stage after so many evaluations without a better loss; never when not given."
    )
    keep_best: bool = Field(
        default=True, description="The adapter is that of the last stage's best evaluation, not of the last step."
    )


class TrackSection(Section):
    """Where the curves go besides the run's own folder."""

    services: tuple[Literal["wandb", "trackio"], ...] = Field(
        default=(), description="Log to these as well, through their own libraries."
    )
    project: str = Field(default="trillora", min_length=1, description="The project's name there.")


class MeshSection(Section):
    """How the devices are arranged; the product is their number."""

    data: Count = Field(default=1, description="Copies of the base, each with its own rows.")
    fsdp: Count = Field(
        default=1, description="Parts the base is split into, gathered layer by layer; rows are split too."
    )
    tensor: Count = Field(default=1, description="Parts each matrix product is split into.")


class HardwareSection(Section):
    """Where it runs."""

    backend: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        default="auto", description="Kind of device; a named one is used or the run stops, never silently another."
    )
    devices: Auto | Count = Field(default="auto", description="How many devices to use; auto takes all.")
    mesh: Auto | MeshSection = Field(
        default="auto", description="Arrangement of the devices; auto fits the model to them."
    )

    @model_validator(mode="after")
    def _mesh_holds_the_devices(self) -> HardwareSection:
        if self.mesh != "auto" and self.devices != "auto":
            size = self.mesh.data * self.mesh.fsdp * self.mesh.tensor
            if size != self.devices:
                raise _conflict(
                    "mesh",
                    f"hardware.mesh holds {size} devices (data x fsdp x tensor), hardware.devices is {self.devices}.",
                    "make them equal, or leave one of them auto",
                )
        return self


class EngineSection(Section):
    """How the step is computed: the same numbers, other speed and memory."""

    layers: Literal["auto", "scan", "unroll"] = Field(
        default="auto", description="One compiled layer looped over, or all written out: compile time against speed."
    )
    remat: Literal["auto", "none", "linear", "dots", "full"] = Field(
        default="auto",
        description="What the backward pass recomputes instead of keeping: more saves memory, costs time.",
    )
    attention: Literal["auto", "xla", "splash", "cudnn"] = Field(
        default="auto", description="Attention kernel: xla runs anywhere, splash on TPU, cudnn on NVIDIA GPUs."
    )
    loss_chunk: Auto | Count = Field(
        default="auto", description="Tokens per piece of the loss; fewer need less memory."
    )


class Recipe(Section):
    """One training run."""

    model: ModelSection = Field(description="Which model learns: a name, or a mapping.")
    data: DataSection | None = Field(default=None, description="What it learns from: a path, or a mapping.")
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter.")
    train: TrainSection = Field(default_factory=TrainSection, description="How it learns.")
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection, description="What is measured meanwhile.")
    track: TrackSection = Field(default_factory=TrackSection, description="Where the curves go.")
    hardware: HardwareSection = Field(default_factory=HardwareSection, description="Where it runs.")
    engine: EngineSection = Field(default_factory=EngineSection, description="How the step is computed.")

    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Instead of data: stages that follow each other, the adapter going from one to the next.",
    )

    @model_validator(mode="after")
    def _has_data(self) -> Recipe:
        if self.data is not None and self.stages is not None:
            raise _conflict("stages", "Both data and stages are given.", "move data into a stage, or leave stages out")
        if self.data is None and self.stages is None:
            expected = "give text (the path) or a mapping. What it learns from"
            raise _conflict("data", "The recipe lacks 'data'.", f"{expected}; or a list of stages")
        names = [stage.name for stage in self.stages or ()]
        for number, stage in enumerate(self.stages or ()):
            if stage.name in names[:number]:
                raise _conflict(f"stages[{number}].name", f"Two stages are called {stage.name}.", "rename one")
            try:
                _train_of(self.train, stage)
            except ValidationError as error:
                found = error.errors(include_url=False)[0]
                what, do = (found["ctx"][key].replace("train.", f"stages[{number}].") for key in ("what", "do"))
                raise _conflict(f"stages[{number}].{found['ctx']['key']}", what, do) from None
        return self


class StageRecipe(Recipe):
    """A recipe of one stage: what the parts of a run are made from."""

    data: DataSection = Field(description="What it learns from: a path, or a mapping.")


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    name: str
    recipe: StageRecipe
    restarts_optimizer: bool = False


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The run as stages, each a whole recipe of its own; most recipes have one."""
    tree = {**recipe.model_dump(mode="json"), "stages": None}
    if recipe.stages is None:
        return (Stage("train", StageRecipe.model_validate(tree)),)
    return tuple(
        Stage(
            stage.name,
            StageRecipe.model_validate(
                {
                    **tree,
                    "data": stage.data.model_dump(mode="json"),
                    "train": _train_of(recipe.train, stage).model_dump(),
                }
            ),
            stage.optimizer_state == "restart",
        )
        for stage in recipe.stages
    )


def seconds_of(time_limit: str) -> int:
    """`8h30m` in seconds."""
    return sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)([hms])", time_limit))


def _train_of(train: TrainSection, stage: StageSection) -> TrainSection:
    own = stage.train_options()
    general = train.model_dump(mode="json")
    if "schedule" in own:
        general.pop("decay_fraction")  # it belongs to the other schedule
    return TrainSection.model_validate(merged(general, own))


def as_mapping(section: type[Section], value: Any) -> Any:
    """A section as its mapping: a bare string or list is its shorthand key, nothing at all (`lora:`) all defaults."""
    if value is None:
        return {}
    return {section.shorthand: value} if isinstance(value, (str, list)) and section.shorthand else value


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    if over.get("steps") is not None or over.get("epochs") is not None:
        # The two say the same thing in other units: the later one replaces the earlier.
        result.pop("steps", None)
        result.pop("epochs", None)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, list) and isinstance(value, Mapping) and all(str(n).isdigit() for n in value):
            # `stages.0.steps=5`: of a list, the member with this number.
            result[key] = [merged(o, value[str(n)]) if str(n) in value else o for n, o in enumerate(old)]
        else:
            result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _conflict(key: str, what: str, do: str) -> PydanticCustomError:
    # Braces would be read as a template's fields.
    return PydanticCustomError("conflict", "values do not fit together", {"key": key, "what": what, "do": do})
