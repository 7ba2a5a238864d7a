"""Whether the values in a file are the expected ones, rounded to the file's type.

    wrong_values(found, piece.values, piece.slack, "BF16")         # a mask of entries
    wrong_blocks(data, again, found, piece.values, piece.slack, type)    # a mask of blocks

An export computes in float32 and rounds once, and the expected values are in float64. So a value may be the next one of
its type, but only where the two roundings are nearly tied: every value must lie between the rounded ends of
[expected - slack, expected + slack]. A block of a quantized type is compared in the same way, by the rule of its type:
first the scale, then the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trillora.export.gguf.quantize import round_trip

FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Expected values in a float type, as float32: first to float32, in which exports compute."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(FLOATS[kind]).astype(np.float32)


def wrong_values(found: np.ndarray, values: np.ndarray, slack: np.ndarray | float, kind: str) -> np.ndarray:
    """Which entries of `found`, float32, are not the expected values in this float type."""
    low, high = rounded(values - slack, kind), rounded(values + slack, kind)
    return ~((low <= found) & (found <= high))


@dataclass(frozen=True)
class BlockRule:
    """A type with blocks of 32 values: stored as scale * (code - middle) + least, with the scale in float16."""

    num_codes: int
    is_centred: bool  # the largest value has the lowest code: scale = largest / -middle; else from the least value up
    is_symmetric: bool = False  # codes from -127 to 127, scale = largest / 127


RULES = {
    "Q8_0": BlockRule(255, is_centred=True, is_symmetric=True),
    "Q4_0": BlockRule(16, is_centred=True),
    "Q5_0": BlockRule(32, is_centred=True),
    "Q4_1": BlockRule(16, is_centred=False),
    "Q5_1": BlockRule(32, is_centred=False),
}
RARE = 0.05  # of the blocks of a K-type may differ: their scales are searched, and a search can end elsewhere
AS_GOOD = 1.01  # how much larger the error of such a block may be


def wrong_blocks(
    data: np.ndarray, again: np.ndarray, found: np.ndarray, values: np.ndarray, slack: np.ndarray | float, type: Any
) -> np.ndarray:
    """Which blocks of a quantized tensor are not the expected values by the rule of their type. `data` are bytes
    [rows, bytes of a row], `found` their values in float32, and `again` the bytes of the expected values."""
    size = block_bytes(type)
    is_other = (again != data).reshape(len(data), -1, size).any(axis=-1).reshape(-1)
    if not is_other.any() or (isinstance(slack, float) and slack == 0.0):
        return is_other
    slack = np.broadcast_to(slack, values.shape)
    width = values.size // len(is_other)
    blocks = [array.reshape(-1, width)[is_other] for array in (found.astype(np.float64), values, slack)]
    headers = data.reshape(-1, size)[is_other]
    if type.name in RULES:
        is_other[is_other] = ~_follows(RULES[type.name], headers, *blocks)
    elif is_other.mean() <= RARE or is_other.sum() <= 2:
        own, best = blocks[0] - blocks[1], round_trip(blocks[1].astype(np.float32), type) - blocks[1]
        is_other[is_other] = np.linalg.norm(own, axis=1) > AS_GOOD * np.linalg.norm(best, axis=1)
    return is_other


def block_bytes(type: Any) -> int:
    from gguf import GGML_QUANT_SIZES

    return int(GGML_QUANT_SIZES[type][1])


def _follows(
    rule: BlockRule, headers: np.ndarray, found: np.ndarray, values: np.ndarray, slack: np.ndarray
) -> np.ndarray:
    """Which blocks follow the rule for some values within the slack."""
    halves = headers[:, :4].copy().view(np.float16).astype(np.float64)
    scale, least = halves[:, :1], np.zeros_like(halves[:, :1]) if rule.is_centred else halves[:, 1:2]
    off = slack.max(axis=1, keepdims=True)
    top, bottom = values.max(axis=1, keepdims=True), values.min(axis=1, keepdims=True)
    if rule.is_symmetric:
        return _fits(rule, found, values, slack, scale, np.maximum(top, -bottom) / 127, off / 127, least)
    if not rule.is_centred:
        steps = rule.num_codes - 1
        is_least = (_half(bottom - off) <= least) & (least <= _half(bottom + off))
        fits = _fits(rule, found, values - bottom, slack + off, scale, (top - bottom) / steps, 2 * off / steps, least)
        return fits & is_least[:, 0]
    middle = rule.num_codes // 2
    signs = [np.where(top >= -bottom, top, bottom)]
    signs.append(np.where(np.abs(top + bottom) <= 2 * off, top + bottom - signs[0], signs[0]))  # tied: either end
    tries = [_fits(rule, found, values, slack, scale, end / -middle, off / middle, least) for end in signs]
    return tries[0] | tries[1]


def _fits(
    rule: BlockRule,
    found: np.ndarray,
    values: np.ndarray,
    slack: np.ndarray,
    scale: np.ndarray,
    expected: np.ndarray,
    off: np.ndarray,
    least: np.ndarray,
) -> np.ndarray:
    """Whether the scale is the expected one within `off`, and each code the one of its value."""
    is_scale = (_half(expected - off) <= scale) & (scale <= _half(expected + off))
    with np.errstate(divide="ignore", invalid="ignore"):
        places = np.where(expected == 0, 0.0, values / expected)
        room = (
            np.where(expected == 0, 0.0, (slack + np.abs(places) * off) / np.abs(expected)) + 2.0**-21 * rule.num_codes
        )
        codes = np.where(scale == 0, 0.0, np.rint((found - least) / scale))
    is_code = (_code(rule, places - room) <= codes) & (codes <= _code(rule, places + room))
    return np.asarray((is_scale & (is_code | (scale == 0))).all(axis=1))


def _code(rule: BlockRule, places: np.ndarray) -> np.ndarray:
    """The code at a place, counted from zero for the value zero."""
    if rule.is_symmetric:
        return np.clip(np.floor(places + 0.5), -127, 127)
    first = rule.num_codes // 2 if rule.is_centred else 0
    return np.clip(np.floor(places + first + 0.5), 0, rule.num_codes - 1) - first


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(np.float16).astype(np.float64)
