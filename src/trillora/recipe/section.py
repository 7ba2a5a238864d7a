"""The base class of every mapping in a recipe, the types of its numbers, and overrides.

>>> merged({"train": {"steps": 5, "seed": 1}}, {"train": {"epochs": 2}})
{'train': {'seed': 1, 'epochs': 2}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trillora.errors import TrilloraError

Auto = Literal["auto"]
# Every number is bounded, here and nowhere else. The limits are far above what anybody uses, and far below what int32
# and float32, in which devices count and compute, can hold.
Count = Annotated[int, Field(ge=1, le=10**9)]  # of anything: steps, documents, tokens of a chunk
Rank = Annotated[int, Field(ge=1, le=2**16)]
Sequences = Annotated[int, Field(ge=1, le=2**20)]  # of one batch
Devices = Annotated[int, Field(ge=1, le=2**20)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]  # of one text
Rate = Annotated[float, Field(gt=0, le=1e6)]


class Section(BaseModel):
    """A mapping of the recipe. Unknown keys are errors; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None  # the key a bare string is for: `model: smollm2` means `model: {name: …}`

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: object) -> Any:
        return as_mapping(cls, value)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_for_numbers(cls, value: object, info: ValidationInfo) -> Any:
        # Python counts True as 1, so `rank: yes` would be rank 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("bool_type", "yes and no are not values of this option")
        return value


def as_mapping(section: type[Section], value: object) -> Any:
    """A section as a mapping: a bare string or list is its shorthand key; an empty section (`lora:`) has no keys."""
    if value is None:
        return {}
    return {section.shorthand: value} if isinstance(value, (str, list)) and section.shorthand else value


def conflict(key: str, what: str, do: str) -> PydanticCustomError:
    # The texts go into the context, because braces in the message would be read as template fields.
    return PydanticCustomError("conflict", "values do not fit together", {"key": key, "what": what, "do": do})


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, Any]:
    """`base` with the values of `over` on top, section by section."""
    result = dict(base)
    if over.get("steps") is not None or over.get("epochs") is not None:
        # Both set the length of the run: the one given later replaces the other.
        result.pop("steps", None)
        result.pop("epochs", None)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, list) and isinstance(value, Mapping) and value and all(map(is_number, value)):
            result[key] = _with_items(key, old, value)
        else:
            result[key] = _replaced(old, value)
    return result


def is_number(key: object) -> bool:
    """Whether a key is the number of an item in a list, as in `stages.0.steps`."""
    text = str(key)
    return text.isascii() and text.isdigit() and len(text) < 10


def _with_items(name: str, items: Sequence[object], over: Mapping[Any, Any]) -> list[Any]:
    """`stages.0.steps=5` changes the item of the list with that number."""
    changed = {int(number): value for number, value in over.items()}
    if (last := max(changed)) >= len(items):
        raise TrilloraError(
            f"There is no item {last} in {name}, which has {len(items)}.",
            where=f"override {name}.{last}",
            do="the first item has the number 0",
        )
    return [_replaced(item, changed[n]) if n in changed else item for n, item in enumerate(items)]


def _replaced(old: object, new: object) -> Any:
    return merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
