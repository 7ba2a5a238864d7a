"""Answers compared with what was expected: equal texts, and for JSON objects their fields.

Answers are whatever a model wrote, so they are read with limits: no deep nesting, no numbers without end, no NaN. A
fence around an answer is a part of it: who asked for JSON is to get JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64  # of objects and lists inside each other
_THOUGHT = "</think>"  # ends what a model says to itself
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class Score:
    """One answer. What is asked of JSON is None where no JSON object was expected."""

    exact: bool
    valid_json: bool | None
    right_fields: bool | None  # the expected keys, no other
    fields: dict[str, bool]  # for every expected key, whether its value is the expected one


@dataclass(frozen=True)
class Scores:
    """Shares over many answers, and what the loss says of all trained tokens. None: there was nothing to count."""

    loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None  # of trained tokens, how many were the likeliest
    exact_match: float | None = None
    valid_json: float | None = None
    right_fields: float | None = None
    fields: dict[str, float] = field(default_factory=dict)  # over the answers that should have the field


def score(expected: str, answer: str) -> Score:
    """Spaces around a text do not count; order of keys, and spaces inside JSON, do not count for its fields. Where
    thinking is expected before the answer, what was thought does not count either."""
    if _THOUGHT in expected:
        expected, answer = _spoken(expected), _spoken(answer)
    exact = expected.strip() == answer.strip()
    wanted = parse_object(expected)
    if wanted is None:
        return Score(exact, None, None, {})
    found = parse_object(answer)
    if found is None:
        return Score(exact, False, False, dict.fromkeys(wanted, False))
    right = {name: name in found and canonical(found[name]) == canonical(value) for name, value in wanted.items()}
    return Score(exact, True, found.keys() == wanted.keys(), right)


def summarise(scores: Sequence[Score]) -> Scores:
    """The shares of all answers."""
    names = dict.fromkeys(name for one in scores for name in one.fields)
    return Scores(
        exact_match=_share(one.exact for one in scores),
        valid_json=_share(one.valid_json for one in scores if one.valid_json is not None),
        right_fields=_share(one.right_fields for one in scores if one.right_fields is not None),
        fields={
            name: sum(right) / len(right)
            for name in names
            if (right := [one.fields[name] for one in scores if name in one.fields])
        },
    )


def majority(expected: Iterable[str]) -> dict[str, float]:
    """What guessing would give: for each field the share of its commonest value among the rows that have the field."""
    values: dict[str, Counter[str]] = {}
    for text in expected:
        for name, value in (parse_object(_spoken(text)) or {}).items():
            values.setdefault(name, Counter())[canonical(value)] += 1
    return {name: max(counts.values()) / counts.total() for name, counts in values.items()}


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, or None if it is none, or none that can be trusted."""
    if _too_deep(text):
        return None
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):  # also Python's own limit on the digits of a number
        return None
    return value if isinstance(value, dict) else None


def canonical(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are one number, 1 and true are not one value."""
    return json.dumps(_with_plain_numbers(value), sort_keys=True)


def _with_plain_numbers(value: Any) -> Any:
    match value:
        case dict():
            return {name: _with_plain_numbers(inner) for name, inner in value.items()}
        case list():
            return [_with_plain_numbers(inner) for inner in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _spoken(text: str) -> str:
    return text.rpartition(_THOUGHT)[2]


def _share(hits: Iterable[bool]) -> float | None:
    counted = list(hits)
    return sum(counted) / len(counted) if counted else None


def _too_deep(text: str) -> bool:
    """Counted beforehand: how deep the parser itself can go depends on the interpreter."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number beyond every float")
    return number
