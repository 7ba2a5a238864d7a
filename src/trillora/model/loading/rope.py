"""Rotary positions for rows that are longer than the model was trained for: `model.rope` of a recipe.

    scale_positions(config, RopeSection(type="yarn", factor=4), "config.json")
    ScaledPositions.of(config).values()
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100000.0, "factor": 4.0,
                         "original_max_position_embeddings": 8192}, "max_position_embeddings": 32768}

The configuration is changed before the model is built, so transformers' own code computes the frequencies. A merged
model has the values in its config.json. PEFT's files have no place for them: they are in `rope.json` next to the
adapter, which everything that opens its base reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from trillora.errors import TrilloraError
from trillora.files.read_json import read_json
from trillora.model.limits import can_have_yarn, why_not_scaled
from trillora.recipe.lora import RopeSection, RopeType
from trillora.runs.files import ROPE_FILE

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

DO = "copy it from the adapter's run again"
_OF_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as in Llama 3.1's config.json
_KEPT = ("rope_theta", "partial_rotary_factor")  # of positions that are not scaled
Positive = Annotated[float, Field(gt=0, le=1e12)]
Positions = Annotated[int, Field(ge=1, lt=2**31)]


class _Parameters(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    rope_type: RopeType
    rope_theta: Positive
    factor: Annotated[float, Field(gt=1, le=1024)]
    original_max_position_embeddings: Positions | None = None
    partial_rotary_factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None


class ScaledPositions(BaseModel):
    """What a config.json says about scaled positions, and the content of `rope.json`. A file may be hostile: numbers
    have their ranges, and other keys are not kept."""

    model_config = ConfigDict(strict=True, extra="ignore")

    rope_parameters: _Parameters
    max_position_embeddings: Positions

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        text = config.get_text_config()
        return cls(rope_parameters=text.rope_parameters, max_position_embeddings=text.max_position_embeddings)

    @property
    def rope(self) -> RopeSection:
        """The same as a recipe says it: the base's own config has the rest."""
        return RopeSection(type=self.rope_parameters.rope_type, factor=self.rope_parameters.factor)

    @property
    def original(self) -> int:
        """For how many positions the base was trained."""
        given = self.rope_parameters.original_max_position_embeddings
        return given or round(self.max_position_embeddings / self.rope_parameters.factor)

    def values(self) -> dict[str, object]:
        return self.model_dump(exclude_none=True)

    def code(self, base: str) -> str:
        """Lines of Python that make `config`, the scaled configuration of a base; `base` is Python for its name."""
        return f"""config = AutoConfig.from_pretrained({base})
config.get_text_config().update({self.values()})
"""

    def file(self) -> dict[str, bytes]:
        """The file next to an adapter, by its name."""
        return {ROPE_FILE: (json.dumps(self.values(), indent=2) + "\n").encode()}

    def write_to(self, content: dict[str, Any]) -> None:
        """Writes the values into the content of config.json, in the form that it has: `rope_parameters`, or what older
        versions of transformers read, `rope_theta` and `rope_scaling`."""
        inner = content.get("text_config")
        part, values = inner if isinstance(inner, dict) else content, self.values()
        parameters = self.rope_parameters.model_dump(exclude_none=True)
        if "rope_parameters" not in part and ("rope_theta" in part or "rope_scaling" in part):
            del values["rope_parameters"]
            part |= {name: parameters.pop(name) for name in _KEPT if name in parameters}
            values["rope_scaling"] = parameters
        part |= values


def scale_positions(config: PretrainedConfig, rope: RopeSection, where: str) -> None:
    """Changes the config of a model, or of the text model inside a multimodal one."""
    if why := why_not_scaled(config):
        raise TrilloraError(
            f"model.rope cannot be used with this model: {why}.",
            where=f"model.rope, and {where}",
            do="remove model.rope; rows can have as many tokens as max_position_embeddings in config.json says",
        )
    if rope.type == "yarn" and not can_have_yarn(config):
        raise TrilloraError(
            "model.rope: transformers cannot compute yarn for this model: its config.json has no head_dim.",
            where=f"model.rope, and {where}",
            do="use model.rope.type: llama3 or linear, which need none",
        )
    text = config.get_text_config()
    original = text.max_position_embeddings
    kept = {name: value for name, value in text.rope_parameters.items() if name in _KEPT}
    values: dict[str, Any] = {"rope_type": rope.type, **kept, "factor": rope.factor}
    if rope.type != "linear":
        values["original_max_position_embeddings"] = original
    text.rope_parameters = values | (_OF_LLAMA_3 if rope.type == "llama3" else {})
    text.max_position_embeddings = int(original * rope.factor)


def read_positions(adapter: Path) -> ScaledPositions | None:
    """How the positions of the base were scaled when this adapter was trained; None if they were not."""
    file = adapter / ROPE_FILE
    return read_json(file, ScaledPositions, do=DO) if file.is_file() else None


def rope_of(adapter: Path | None, given: RopeSection | None = None) -> RopeSection | None:
    """How the positions of an adapter's base are scaled. `given` is `model.rope` of a recipe or a command, which must
    not contradict the adapter."""
    if adapter is None:
        return given
    found = read_positions(adapter)
    own = None if found is None else found.rope
    if given is not None and own != given:
        raise TrilloraError(
            f"The adapter was trained with {own or 'no scaling'} of its positions, and model.rope says {given}.",
            where=str(adapter / ROPE_FILE),
            do=f"use an adapter that was trained with the same model.rope; or copy {ROPE_FILE} from its run again",
        )
    return own
