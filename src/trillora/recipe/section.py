"""The base class of every mapping in a recipe: unknown keys are errors, and values do not change."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A mapping of the recipe. Unknown keys are errors; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None  # the key a bare string is for: `model: smollm2` means `model: {name: …}`

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return as_mapping(cls, value)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # Python counts True as 1, so `rank: yes` would be rank 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("bool_type", "yes and no are not values of this option")
        return value


def as_mapping(section: type[Section], value: Any) -> Any:
    """A section as a mapping: a bare string or list is its shorthand key; an empty section (`lora:`) has no keys."""
    if value is None:
        return {}
    return {section.shorthand: value} if isinstance(value, (str, list)) and section.shorthand else value


def conflict(key: str, what: str, do: str) -> PydanticCustomError:
    # The texts go into the context, because braces in the message would be read as template fields.
    return PydanticCustomError("conflict", "values do not fit together", {"key": key, "what": what, "do": do})
