"""Random damage for fuzzers: one value of a JSON document, or a few bytes of a file.

changed_value({"r": 2, "a": [1]}, random.Random(0))  ->  {"r": "2", "a": [1]}
"""

from __future__ import annotations

import copy
import random
from typing import Any

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_537, 100_000, 10**9, 2**31 - 1, 2**31, 2**63, 10**14, 10**30),
    *(-(2**31), -(10**30), 0.0, 0.5, -0.5, 1e-300, 1e300, 1.5e9, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "2", "false", "null", "../../etc/passwd", "a" * 5000, "\x00", "\ud800", "日本", "{{ x }}"),
    *([], [[]], [None], [1], ["x"], [1] * 1000, {}, {"x": 1}, {"a": {"b": {"c": []}}}, [{}], {"name": "x"}),
)


def changed_value(document: Any, randomness: random.Random) -> Any:
    """A copy in which one value, at any depth, is replaced, removed, doubled or wrapped."""
    changed = copy.deepcopy(document)
    places = list(_places(changed))
    if not places:
        return randomness.choice(STRANGE)
    container, key = randomness.choice(places)
    value = container[key]
    kind = randomness.randrange(10)
    if kind < 5:
        container[key] = copy.deepcopy(randomness.choice(STRANGE))
    elif kind == 5:
        del container[key]
    elif kind == 6:
        container[key] = randomness.choice([[value], {"value": value}, str(value), [value, value]])
    elif kind == 7 and isinstance(value, int | float):
        container[key] = randomness.choice([-value, value + 1, value * 2, value * 10**6, value - 1, float(value)])
    elif kind == 8:
        container[key] = _nested(randomness.choice([50, 90, 99, 101, 500]), randomness.choice("[{"))
    else:
        other, other_key = randomness.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    return changed


def changed_bytes(data: bytes, randomness: random.Random) -> bytes:
    """A copy in which bits flip, a piece is removed, repeated or replaced, or the end is missing."""
    body = bytearray(data)
    kind = randomness.randrange(6)
    start = randomness.randrange(len(body) + 1)
    end = min(len(body), start + randomness.choice([1, 2, 8, 100]))
    if kind < 2 and body:
        for _ in range(randomness.choice([1, 1, 3, 30])):
            body[randomness.randrange(len(body))] ^= 1 << randomness.randrange(8)
    elif kind == 2:
        body[start:end] = bytes(randomness.randrange(256) for _ in range(end - start))
    elif kind == 3:
        del body[start:end]
    elif kind == 4:
        body[start:start] = body[start:end] or b"\x00"
    else:
        del body[start:]
    return bytes(body)


def _places(value: Any) -> Any:
    """Every (container, key) of the document."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _nested(depth: int, bracket: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if bracket == "[" else {"a": value}
    return value
