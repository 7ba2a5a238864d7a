"""Builds dataclasses from JSON that may be damaged: a missing or wrong value becomes an empty one, never an error.

parse(Evaluated, {"step": 5, "stage": "chat", "loss": "nan", "num_tokens": "many", "is_best": True})
-> Evaluated(step=5, stage="chat", loss=nan, perplexity=nan, accuracy=nan, num_tokens=0, is_best=True)
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

MAX_COUNT = 2**53  # JSON numbers above it are not exact, so they are not counts

T = TypeVar("T")


def parse(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of a dataclass; each field is converted as its type says (see `_CONVERTERS`)."""
    kind: Any = cls
    return cls(**{name: convert(values.get(name)) for name, convert in _converters(kind)})


def number(value: Any) -> float | None:
    """A number, or one of the strings "nan" and "inf"; None for anything else."""
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) < MAX_COUNT else None


def finite(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def count(value: Any) -> int | None:
    """A whole number that is not negative."""
    found = finite(value)
    return int(found) if found is not None and 0 <= found < MAX_COUNT and found == int(found) else None


def words(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The mappings in a list, without its other items."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _counts(value: Any) -> dict[str, float]:
    found = {name: finite(item) for name, item in mapping(value).items()}
    return {name: item for name, item in found.items() if item is not None and item >= 0}


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    float: lambda value: math.nan if (found := number(value)) is None else found,
    float | None: finite,
    int: lambda value: count(value) or 0,
    int | None: count,
    bool: lambda value: value is True,
    str: words,
    str | None: lambda value: None if value is None else words(value),
    dict[str, Any]: mapping,
    dict[str, float]: _counts,
    tuple[str, ...]: lambda value: tuple(map(str, value)) if isinstance(value, list) else (),
}


@cache
def _converters(cls: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, _converter(hints[field.name])) for field in dataclasses.fields(cls)]


def _converter(hint: Any) -> Callable[[Any], Any]:
    if hint in _CONVERTERS:
        return _CONVERTERS[hint]
    if typing.get_origin(hint) is typing.Literal:  # of strings
        return words
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value: parse(hint, mapping(value))
    inner = typing.get_args(hint)[0]  # tuple[Inner, ...] or Inner | None, Inner a dataclass
    if type(None) in typing.get_args(hint):
        return lambda value: parse(inner, value) if isinstance(value, dict) else None
    return lambda value: tuple(parse(inner, item) for item in mappings(value))
