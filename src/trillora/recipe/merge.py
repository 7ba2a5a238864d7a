"""Puts overrides on top of a recipe, section by section.

>>> merged({"train": {"steps": 5, "seed": 1}}, {"train": {"epochs": 2}})
{'train': {'seed': 1, 'epochs': 2}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trillora.errors import TrilloraError


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
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


def is_number(key: Any) -> bool:
    """Whether a key is the number of an item in a list, as in `stages.0.steps`."""
    text = str(key)
    return text.isascii() and text.isdigit() and len(text) < 10


def _with_items(name: str, items: list[Any], over: Mapping[Any, Any]) -> list[Any]:
    """`stages.0.steps=5` changes the item of the list with that number."""
    changed = {int(number): value for number, value in over.items()}
    if (last := max(changed)) >= len(items):
        raise TrilloraError(
            f"There is no item {last} in {name}, which has {len(items)}.",
            where=f"override {name}.{last}",
            do="the first item has the number 0",
        )
    return [_replaced(item, changed[n]) if n in changed else item for n, item in enumerate(items)]


def _replaced(old: Any, new: Any) -> Any:
    return merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
