"""The recipe: every option of a run, declared once with its default, its unit and its effect.

`load_recipe` turns a YAML file (or a mapping) and overrides into a frozen `Recipe` or into one error that names every
mistake. `auto` stays in place until the run knows better: then `resolve` puts in what was chosen and `dump_resolved`
writes it down with the reasons. From here on functions get values, never the recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trillora import yaml_text
from trillora.errors import TrilloraError
from trillora.events import Chosen
from trillora.recipe_errors import Option, Origins, problems_as_error, unknown_option, value_problems

Choice = Chosen  # one fact, met in the recipe and among the events

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A mapping of the recipe: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None  # the key a bare string stands for: `model: smollm2` is `model: {name: …}`

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return _as_mapping(cls, value)

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
    rows: str | None = Field(
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
    too_long: Literal["auto", "refuse", "drop", "split", "truncate-left", "truncate-middle"] = Field(
        default="auto",
        description="Rows longer than a sequence: auto splits texts and drops others up to 1 % of the trained tokens; "
        "truncate shortens prompts and keeps answers.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse", description="A row that cannot be trained on stops the run, or is left out and counted."
    )
    split: SplitSection | None = Field(default=None, description="Rows kept out of training; `{}` for 80/10/10.")
    pack: bool = Field(default=True, description="Put several short rows into one sequence instead of padding each.")
    buckets: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1, description="Sequence lengths used when rows are not packed; each is compiled for."
    )
    today: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = Field(
        default=None, description="The date a chat template hears when it asks; chosen once, at the first start."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DataSection:
        if self.template is not None and self.format != "auto":
            raise _conflict("template", "Both data.format and data.template are given.", "keep one of the two")
        if self.too_long.startswith("truncate") and self.train_on == "everything":
            what = "data.too_long shortens what is not trained, and with data.train_on: everything all of it is."
            raise _conflict("too_long", what, "use drop or refuse, or train on the answers")
        if self.pack and self.buckets != 1:
            raise _conflict("buckets", "data.buckets is for rows that are not packed.", "set data.pack to no as well")
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
    learning_rate: float = Field(default=2e-4, gt=0, le=1, description="Peak step size of the optimiser.")
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
    data: DataSection = Field(description="What it learns from: a path, or a mapping.")
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter.")
    train: TrainSection = Field(default_factory=TrainSection, description="How it learns.")
    hardware: HardwareSection = Field(default_factory=HardwareSection, description="Where it runs.")
    engine: EngineSection = Field(default_factory=EngineSection, description="How the step is computed.")


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Reads and checks a recipe: a YAML file's path or a mapping, then `train.steps=10`-like overrides on top."""
    if isinstance(source, Mapping):
        name, folder, tree = "the recipe", Path.cwd(), _expanded(source)
    else:
        name, folder = str(source), Path(source).parent
        tree = _expanded(_read_mapping(Path(source)))
    _locate(tree, folder)
    origins = Origins(name)
    for path, value in _parsed_overrides(overrides, origins):
        given = _expanded(_nested(path, value))
        _locate(given, Path.cwd())  # typed at a prompt: from where the person stands
        tree = _merged(tree, given)
    return _validated(tree, origins)


def resolve(recipe: Recipe, choices: Iterable[Choice]) -> Recipe:
    """The recipe with what the machine chose in place of `auto`. What the user wrote is never replaced."""
    tree = recipe.model_dump(mode="json")
    for choice in choices:
        *parents, key = choice.path.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        value = list(choice.value) if isinstance(choice.value, tuple) else choice.value
        if section[key] not in (None, "auto", "all-linear", value):
            raise ValueError(f"{choice.path} is {section[key]!r}, given by the user: {value!r} may not replace it")
        tree = _merged(tree, _nested(choice.path, value))
    return _validated(tree, Origins("the resolved recipe"))


def dump_resolved(recipe: Recipe, choices: Sequence[Choice]) -> str:
    """The whole resolved recipe as YAML, each chosen value with its reason; `load_recipe` reads it back unchanged."""
    reasons = {choice.path: _one_line(choice.reason) for choice in choices}
    lines = ["# Every option of this run. A comment says why the machine chose a value."]
    for name, section in resolve(recipe, choices).model_dump(mode="json").items():
        lines.append(f"{name}:")
        for key, value in section.items():
            reason = reasons.get(f"{name}.{key}")
            lines.append(f"  {key}: {yaml_text.write(value)}" + (f"  # {reason}" if reason else ""))
    return "\n".join(lines) + "\n"


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors and for other programs."""
    schema = _without_titles(Recipe.model_json_schema())
    for name, field in Recipe.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if field.annotation.shorthand is not None:
            node = schema["properties"][name]
            node["anyOf"] = [{"type": "string", "minLength": 1}, {"$ref": node.pop("$ref")}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trillora recipe",
        **schema,
    }


def options() -> dict[str, Option]:
    """Every option by its dotted path, sections included."""
    found: dict[str, Option] = {}

    def visit(prefix: str, section: type[Section]) -> None:
        for name, field in section.model_fields.items():
            path = f"{prefix}{name}"
            found[path] = Option.of(path, field)
            inner = found[path].section
            if inner is not None:
                visit(f"{path}.", inner)

    visit("", Recipe)
    return found


def _validated(tree: Mapping[str, Any], origins: Origins) -> Recipe:
    known = options()
    problems = [unknown_option(path, known, origins) for path in _unknown_paths(tree, known)]
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems += value_problems(error, known, origins)
    if problems:
        raise problems_as_error(problems)
    return recipe


def _unknown_paths(tree: Mapping[Any, Any], known: Mapping[str, Option], prefix: str = "") -> list[str]:
    unknown = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path not in known:
            unknown.append(path)
        elif known[path].section is not None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Mapping):
                    unknown += _unknown_paths(item, known, f"{path}.")
    return unknown


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        do = (
            f"recipes there: {', '.join(beside)}"
            if beside
            else "check the path: no recipe (*.yaml) lies in that folder"
        )
        raise TrilloraError(f"There is no recipe '{path.name}'.", where=str(path), do=do) from error
    except UnicodeDecodeError as error:
        raise TrilloraError("The recipe is not text.", where=str(path), do="save it as UTF-8") from error
    except OSError as error:
        raise TrilloraError(
            f"The recipe cannot be read: {error.strerror}.", where=str(path), do="give the path of a readable YAML file"
        ) from error
    tree = yaml_text.parse(text, str(path))
    if not isinstance(tree, Mapping):
        found = {type(None): "empty", list: "a list"}.get(type(tree), "a single value")
        raise TrilloraError(
            f"A recipe is a mapping of options; this one is {found}.",
            where=str(path),
            do="write at least two lines: 'model: smollm2' and 'data: train.jsonl'",
        )
    return tree


def _parsed_overrides(overrides: Sequence[str] | Mapping[str, Any], origins: Origins) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            origins.overridden(path, f"override {path}")
            yield path, value
        return
    for text in overrides:
        path, equals, value = text.partition("=")
        path, where = path.strip(), f"override {text}"
        if not equals:
            raise TrilloraError(
                f"'{text}' is not an override.", where=where, do="write key=value, as in train.steps=10"
            )
        origins.overridden(path, where)
        yield path, yaml_text.parse(value, where)


def _as_mapping(section: type[Section], value: Any) -> Any:
    """A section as its mapping: a bare string or list is its shorthand key, nothing at all (`lora:`) all defaults."""
    if value is None:
        return {}
    return {section.shorthand: value} if isinstance(value, (str, list)) and section.shorthand else value


def _expanded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with every section of a recipe spelled out, so that overrides can reach inside."""
    expanded = dict(tree)
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        if name in expanded:
            expanded[name] = _as_mapping(section, expanded[name])
    return expanded


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    if over.get("steps") is not None or over.get("epochs") is not None:
        # The two say the same thing in other units: the later one replaces the earlier.
        result.pop("steps", None)
        result.pop("epochs", None)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_DATA_SUFFIX = re.compile(r"\.(jsonl|ndjson|json|txt|md|csv|tsv|parquet|gz|zst|tar|tgz|zip)$")


def _locate(tree: dict[str, Any], folder: Path) -> None:
    """Makes the paths of a tree absolute, in place. Addresses and hub ids stay as they are."""
    data, model = tree.get("data"), tree.get("model")
    if isinstance(data, Mapping):
        located = dict(data)
        if isinstance(path := data.get("path"), str):
            located["path"] = _data_path(path, folder)
        elif isinstance(path, Sequence):
            located["path"] = [_located_source(source, folder) for source in path]
        if isinstance(schema := data.get("json_schema"), str):
            located["json_schema"] = str((folder / Path(schema).expanduser()).resolve())
        if isinstance(template := data.get("chat_template"), str) and ("/" in template or "." in template):
            located["chat_template"] = str((folder / Path(template).expanduser()).resolve())
        tree["data"] = located
    # A bare word may be a hub id, so only what can be nothing but a folder is one.
    if (
        isinstance(model, Mapping)
        and isinstance(name := model.get("name"), str)
        and name.startswith(("./", "../", "~"))
    ):
        tree["model"] = {**model, "name": str((folder / Path(name).expanduser()).resolve())}


def _located_source(source: Any, folder: Path) -> Any:
    expanded = _as_mapping(SourceSection, source)
    if isinstance(expanded, Mapping) and isinstance(path := expanded.get("path"), str):
        return {**expanded, "path": _data_path(path, folder)}
    return source


def _data_path(path: str, folder: Path) -> str:
    file = folder / Path(path).expanduser()
    hub_like = _HUB_ID.fullmatch(path) and not _DATA_SUFFIX.search(path) and not file.exists()
    if not path or "://" in path or hub_like:
        return path
    return os.path.abspath(file)  # links keep their names, which say what a file holds


def _conflict(key: str, what: str, do: str) -> PydanticCustomError:
    # Braces would be read as a template's fields.
    return PydanticCustomError("conflict", "values do not fit together", {"key": key, "what": what, "do": do})


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _without_titles(node: Any) -> Any:
    """pydantic repeats each name as a title; dropped. An option that is itself called title would stay: its value
    is a mapping."""
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(v) for v in node] if isinstance(node, list) else node
