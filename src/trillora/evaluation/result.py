"""The result of an evaluation, as it is returned, shown and written to `eval.json`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trillora.evaluation.scores import Scores


@dataclass(frozen=True)
class Example:
    """One prompt with its answers, for display."""

    prompt: str
    expected: str
    base: str | None
    adapter: str


@dataclass(frozen=True)
class Evaluation:
    """The result of a test."""

    data: str
    num_rows: int
    base: Scores | None
    adapter: Scores
    majority: dict[str, float]  # fraction of the most common value of each JSON field
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """The content of `eval.json`. NaN and infinity, which JSON does not have, become text."""
        return _json_values(dataclasses.asdict(self))


def _json_values(value: Any) -> Any:
    match value:
        case dict():
            return {name: _json_values(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_json_values(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
