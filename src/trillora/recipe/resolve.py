"""A recipe with every `auto` decided.

A run decides once per start, stage by stage. `StepSettings` is how the step runs, `ResolvedStage` adds what the stage's
data left open, and `ResolvedRecipe` is the whole run. It is saved in every checkpoint, so that a resumed run keeps its
decisions, and written to `resolved.yaml`:

    engine:
      remat: linear  # 49.1 ms per step, needs an estimated 2.14 GiB of 15.75 GiB per device; slower: …
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from pydantic import PositiveInt

from trillora.recipe import yaml
from trillora.recipe.data_section import DataSection
from trillora.recipe.schema import (
    Attention,
    Backend,
    Dtype,
    EngineSection,
    HardwareSection,
    Kernels,
    Layers,
    Matmul,
    MeshSection,
    Quantize,
    Recipe,
    Remat,
)
from trillora.secrets import mask_message


class DocumentRoom(NamedTuple):
    """Room for the documents of packed sequences: a sequence consists of blocks (see `engine.ragged`)."""

    block: PositiveInt  # tokens; no document is longer
    most: PositiveInt  # documents that can begin in a block


def _option(path: str) -> dict[str, str]:
    """Metadata of a field: the option of the recipe that decides it."""
    return {"option": path}


@dataclass(frozen=True)
class StepSettings:
    """How the training step of one stage runs. Each field names its option; OPTIONS has them all, by field name."""

    OPTIONS: ClassVar[Mapping[str, str]]

    backend: Backend = field(metadata=_option("hardware.backend"))
    num_devices: PositiveInt = field(metadata=_option("hardware.devices"))
    mesh: MeshSection = field(metadata=_option("hardware.mesh"))
    dtype: Dtype = field(metadata=_option("model.dtype"))
    layers: Layers = field(metadata=_option("engine.layers"))
    attention: Attention = field(metadata=_option("engine.attention"))
    loss_chunk: PositiveInt = field(metadata=_option("engine.loss_chunk"))  # tokens
    remat: Remat = field(metadata=_option("engine.remat"))
    # Sequences, over all devices; of each adapter, if several are trained together.
    micro_batch_size: PositiveInt = field(metadata=_option("train.micro_batch_size"))
    adapters_at_once: PositiveInt = field(default=1, metadata=_option("train.adapters_at_once"))
    quantize: Quantize = field(default="none", metadata=_option("model.quantize"))
    matmul: Matmul = field(default="full", metadata=_option("engine.matmul"))
    kernels: Kernels = field(default="xla", metadata=_option("engine.kernels"))
    document_room: DocumentRoom | None = None  # where attention uses it; given by the data, not by an option

    def __str__(self) -> str:
        adapters = f"{self.adapters_at_once} adapters, " if self.adapters_at_once > 1 else ""
        products = "" if self.matmul == "full" else " and matmuls"
        base = "" if self.quantize == "none" else f", {self.quantize} base{products}"
        whole = ", whole base on every device" if self.mesh.data > 1 and self.mesh.fsdp == 1 else ""
        split = ", split base" if self.mesh.fsdp > 1 else ""
        fused = ", fused kernels" if self.kernels == "fused" else ""
        return f"{adapters}micro-batch {self.micro_batch_size}, remat {self.remat}{base}{whole}{split}{fused}"

    def shared(self) -> dict[str, Any]:
        """The settings that all stages of a run have in common, because they share the base weights."""
        own = ("micro_batch_size", "document_room")
        return {name: value for name, value in vars(self).items() if name not in own}

    def to_dict(self) -> dict[str, Any]:
        room = None if self.document_room is None else list(self.document_room)
        return {**vars(self), "mesh": self.mesh.model_dump(), "document_room": room}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepSettings:
        room = values["document_room"]
        own = {"mesh": MeshSection(**values["mesh"]), "document_room": None if room is None else DocumentRoom(*room)}
        return cls(**{**values, **own})


StepSettings.OPTIONS = {each.name: each.metadata["option"] for each in fields(StepSettings) if each.metadata}


def given_settings(recipe: Recipe) -> dict[str, Any]:
    """The fields of `StepSettings` that the user fixed."""
    values = {name: attrgetter(path)(recipe) for name, path in StepSettings.OPTIONS.items()}
    return {name: value for name, value in values.items() if value != "auto"}


def _options_of(section: str, settings: StepSettings) -> dict[str, Any]:
    """The options of a section of the recipe that are decided: `_options_of("model", …)` has dtype and quantize."""
    paths = {name: path.partition(".") for name, path in StepSettings.OPTIONS.items()}
    return {option: getattr(settings, name) for name, (home, _, option) in paths.items() if home == section}


@dataclass(frozen=True)
class ResolvedStage:
    """What was decided for one stage. `reasons` explains each decision that was not the user's, by field name."""

    name: str
    settings: StepSettings
    template_date: str | None
    reasons: dict[str, str]


@dataclass(frozen=True)
class ResolvedRecipe:
    """Every decision of a run."""

    stages: tuple[ResolvedStage, ...]
    evaluate_every: PositiveInt  # steps

    def stage(self, name: str) -> ResolvedStage | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "stages": [{**vars(stage), "settings": stage.settings.to_dict()} for stage in self.stages],
            "evaluate_every": self.evaluate_every,
        }

    def fill(self, recipe: Recipe) -> Recipe:
        """The recipe with the decisions in place of every `auto`. Options that the user fixed have the same value."""
        first = self.stages[0].settings
        sections: dict[str, Any] = {
            "model": recipe.model.model_copy(update=_options_of("model", first)),
            "evaluate": recipe.evaluate.model_copy(update={"every_steps": self.evaluate_every}),
            "hardware": HardwareSection(**_options_of("hardware", first)),
            "engine": EngineSection(**_options_of("engine", first)),
        }
        if recipe.stages is None:
            sections["train"] = recipe.train.model_copy(update=self._train_settings(recipe))
        if recipe.data is not None:
            sections["data"] = recipe.data.model_copy(update={"template_date": self.stages[0].template_date})
        if recipe.phases is not None:
            sections["phases"] = tuple(
                phase.model_copy(
                    update={"data": phase.data.model_copy(update={"template_date": resolved.template_date})}
                )
                for phase, resolved in zip(recipe.phases, self.stages, strict=False)  # then come other entries
            )
        if recipe.stages is not None:
            sections["stages"] = tuple(
                stage.model_copy(
                    update={
                        "micro_batch_size": resolved.settings.micro_batch_size,
                        "data": stage.data.model_copy(update={"template_date": resolved.template_date}),
                    }
                )
                for stage, resolved in zip(recipe.stages, self.stages, strict=True)
            )
        return recipe.model_copy(update=sections)

    def _train_settings(self, recipe: Recipe) -> dict[str, int]:
        decided = _options_of("train", self.stages[0].settings)
        if recipe.phases is None and recipe.sweep is None and recipe.train.learning_rate != "auto":
            del decided["adapters_at_once"]  # there is one adapter
        return decided

    def dump(self, recipe: Recipe) -> str:
        """The filled recipe as YAML for people, with a reason after each decision, and without secrets. If it has none,
        `load_recipe` reads it back unchanged."""
        lines = [
            "# Every option of this run. A comment explains each value that was chosen automatically.",
            "# For reading: secrets are masked. Programs read recipe.json.",
        ]
        for name, section in _masked(self.fill(recipe).model_dump(mode="json")).items():
            if section is None:
                continue
            if name in ("tokens", "tiny"):
                lines.append(f"{name}: {yaml.write(section)}")
                continue
            lines.append(f"{name}:")
            if name not in ("stages", "phases"):
                lines += _lines(section, self._reasons(0, name, recipe.stages is None), "  ")
                continue
            for number, stage in enumerate(section):
                reasons = self._reasons(number, "train", True) if name == "stages" else {}
                first, *rest = _lines(stage, reasons, "    ")
                lines += [f"  - {first.lstrip()}", *rest]
        return "\n".join(lines) + "\n"

    def _reasons(self, number: int, section: str, has_stage_options: bool) -> dict[str, str]:
        """Reasons for the options of a section, by option name."""
        options = dict(StepSettings.OPTIONS, every_steps="evaluate.every_steps", template_date="data.template_date")
        found = {}
        for name, reason in self.stages[number].reasons.items():
            home, _, option = options[name].partition(".")
            if home == section and (has_stage_options or home not in ("train", "data")):
                found[option] = reason
        return found


def keep_dates(recipe: Recipe, before: ResolvedRecipe) -> Recipe:
    """The recipe with the template dates of an earlier start, where it gives none."""

    def dated(data: DataSection, stage: ResolvedStage | None) -> DataSection:
        if stage is None or data.template_date is not None:
            return data
        return data.model_copy(update={"template_date": stage.template_date})

    if recipe.data is not None:
        return recipe.model_copy(update={"data": dated(recipe.data, before.stages[0])})
    name, parts = ("stages", recipe.stages) if recipe.stages is not None else ("phases", recipe.phases)
    changed = [part.model_copy(update={"data": dated(part.data, before.stage(part.name))}) for part in parts or ()]
    return recipe.model_copy(update={name: tuple(changed)})


def keep_fixed(recipe: Recipe, before: ResolvedRecipe) -> Recipe:
    """The recipe with all earlier decisions that may not change in a resumed run: dates, number formats, layers."""
    first = before.stages[0].settings
    decided = _options_of("model", first)
    open_ = {name: value for name, value in decided.items() if getattr(recipe.model, name) == "auto"}
    sections: dict[str, Any] = {"model": recipe.model.model_copy(update=open_)}
    if recipe.engine.layers == "auto":
        sections["engine"] = recipe.engine.model_copy(update={"layers": first.layers})
    return keep_dates(recipe, before).model_copy(update=sections)


def _lines(section: Mapping[str, object], reasons: Mapping[str, str], indent: str) -> Iterable[str]:
    for key, value in section.items():
        reason = reasons.get(key)
        yield f"{indent}{key}: {yaml.write(value)}" + (f"  # {_one_line(reason)}" if reason else "")


def _masked(value: object) -> Any:
    """Each text is masked by itself, so that the result is valid YAML with the same keys."""
    match value:
        case str():
            return mask_message(value)
        case dict():
            return {key: _masked(inner) for key, inner in value.items()}
        case list():
            return [_masked(inner) for inner in value]
    return value


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
