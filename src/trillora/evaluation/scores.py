"""Compares answers with the expected ones: equal texts, and for JSON objects their fields.

    >>> score('{"a": 1, "b": 2}', '{"b": 2.0, "a": 3}')
    AnswerScore(exact=False, valid_json=True, right_fields=True, fields={'a': False, 'b': True})

Answers are untrusted text, so the JSON parser has limits: bounded nesting, no infinite numbers, no NaN. A Markdown
fence around an answer is part of the answer: a task that expects JSON gets only JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64  # of nested objects and lists
_END_OF_THINKING = "</think>"
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_INVALID = object()


@dataclass(frozen=True)
class AnswerScore:
    """One answer. The JSON measures are None if the expected answer is not a JSON object."""

    exact: bool
    valid_json: bool | None
    right_fields: bool | None  # has the expected keys and no others
    fields: dict[str, bool]  # for every expected key, whether the value is right


@dataclass(frozen=True)
class Scores:
    """Fractions over many answers, and the token metrics. None: there was nothing to count."""

    loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None  # fraction of trained tokens that were the most likely ones
    exact_match: float | None = None
    valid_json: float | None = None
    right_fields: float | None = None
    fields: dict[str, float] = field(default_factory=dict)  # over the answers that should have the field
    # Of answers that are texts, between 0 and 1 (`text_metrics`).
    f1: float | None = None
    rouge_1: float | None = None
    rouge_2: float | None = None
    rouge_l: float | None = None
    chrf: float | None = None
    bleu: float | None = None
    # Of multiple choice: the choice with the highest log-probability, in total or per token.
    choice_accuracy: float | None = None
    choice_accuracy_norm: float | None = None
    # Of pairs of answers, and of answers with a label (`kinds.preferences`).
    pair_accuracy: float | None = None
    pair_accuracy_norm: float | None = None
    reward_accuracy: float | None = None  # of the adapter, against the base
    reward_margin: float | None = None  # nats; may be negative


METRICS = tuple(field.name for field in dataclasses.fields(Scores) if field.name != "fields")


def score(expected: str, answer: str) -> AnswerScore:
    """Surrounding whitespace is ignored. For the fields of JSON, key order and inner whitespace are ignored too. If the
    expected answer contains thinking, only the text after it is compared."""
    expected, answer = _without_thinking(expected, answer)
    exact = expected.strip() == answer.strip()
    wanted = parse_object(expected)
    if wanted is None:
        return AnswerScore(exact, None, None, {})
    found = parse_object(answer)
    if found is None:
        return AnswerScore(exact, False, False, dict.fromkeys(wanted, False))
    right = {name: name in found and canonical(found[name]) == canonical(value) for name, value in wanted.items()}
    return AnswerScore(exact, True, found.keys() == wanted.keys(), right)


def scored_text(expected: str, answer: str) -> tuple[str, str] | None:
    """Expected text and answer as the text metrics compare them, or None if the expected answer is a JSON object."""
    expected, answer = _without_thinking(expected, answer)
    return None if parse_object(expected) is not None else (expected.strip(), answer.strip())


def is_right(expected: str, answer: str) -> bool:
    """Whether an answer is right: the same text, or the same JSON value in any formatting."""
    expected, answer = _without_thinking(expected, answer)
    if expected.strip() == answer.strip():
        return True
    wanted, found = _parse(expected), _parse(answer)
    return wanted is not _INVALID and found is not _INVALID and canonical(wanted) == canonical(found)


def summarise(scores: Sequence[AnswerScore]) -> Scores:
    """The fractions over all answers."""
    names = dict.fromkeys(name for one in scores for name in one.fields)
    return Scores(
        exact_match=_fraction(one.exact for one in scores),
        valid_json=_fraction(one.valid_json for one in scores if one.valid_json is not None),
        right_fields=_fraction(one.right_fields for one in scores if one.right_fields is not None),
        fields={
            name: sum(right) / len(right)
            for name in names
            if (right := [one.fields[name] for one in scores if name in one.fields])
        },
    )


def majority(expected: Iterable[str]) -> dict[str, float]:
    """The score of always guessing the most common value, for each field, over the rows that have the field."""
    values: dict[str, Counter[str]] = {}
    for text in expected:
        for name, value in (parse_object(text.rpartition(_END_OF_THINKING)[2]) or {}).items():
            values.setdefault(name, Counter())[canonical(value)] += 1
    return {name: max(counts.values()) / counts.total() for name, counts in values.items()}


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object in the text; None if it is not one, or exceeds the limits."""
    value = _parse(text)
    return value if isinstance(value, dict) else None


def canonical(value: object) -> str:
    """The same text for equal JSON values. 1 and 1.0 are the same number; 1 and true are different values."""
    return json.dumps(_with_plain_numbers(value), sort_keys=True)


def _with_plain_numbers(value: object) -> Any:
    match value:
        case dict():
            return {name: _with_plain_numbers(inner) for name, inner in value.items()}
        case list():
            return [_with_plain_numbers(inner) for inner in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _without_thinking(expected: str, answer: str) -> tuple[str, str]:
    if _END_OF_THINKING not in expected:
        return expected, answer
    return expected.rpartition(_END_OF_THINKING)[2], answer.rpartition(_END_OF_THINKING)[2]


def _fraction(hits: Iterable[bool]) -> float | None:
    counted = list(hits)
    return sum(counted) / len(counted) if counted else None


def _parse(text: str) -> Any:
    """The JSON value in the text, or `_INVALID`."""
    if _too_deep(text):
        return _INVALID
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):  # includes Python's own limit on the digits of a number
        return _INVALID


def _too_deep(text: str) -> bool:
    """Checked before parsing, because the parser's own limit depends on the interpreter."""
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
        raise ValueError("the number is too large for a float")
    return number
