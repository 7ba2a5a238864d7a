"""Conditions on the scores, so that a pipeline can stop at a bad adapter: `--gate "exact_match>=0.6, kl<=0.05"`.

    condition  = [FILE:][base.|adapter.]METRIC  >= | <= | > | <  number
    several conditions are separated by commas, and all must hold

METRIC is a name of `METRICS`, `fields.NAME` for a field of JSON answers, or `forgetting` or `kl` of the forgetting
meter. Without `base.` it is the adapter's. With several files it is the mean over the files, or one FILE's value. This
is a small language of its own: nothing of it is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trillora.errors import TrilloraError, nearest
from trillora.evaluation.result import Condition, Evaluation
from trillora.evaluation.scores import METRICS, Scores

OF_METER = ("forgetting", "kl")
AGAINST_BASE = ("reward_accuracy", "reward_margin")
FIELDS = "fields."
MAX_CONDITIONS = 100
_COMPARED = {
    ">=": lambda value, limit: value >= limit,
    "<=": lambda value, limit: value <= limit,
    ">": lambda value, limit: value > limit,
    "<": lambda value, limit: value < limit,
}
_CONDITION = re.compile(r"(?P<name>[^<>=]+)(?P<sign>>=|<=|>|<)\s*(?P<limit>[-+.\w]+)")
_FORM = 'write conditions such as "exact_match>=0.6, forgetting<=0.05"'


@dataclass(frozen=True)
class Wanted:
    """A condition that was asked for."""

    text: str
    file: str | None
    side: str  # base or adapter
    metric: str
    sign: str
    limit: float

    @property
    def needs_base(self) -> bool:
        return self.side == "base" or self.metric in (*OF_METER, *AGAINST_BASE)

    @property
    def field(self) -> str | None:
        return self.metric.removeprefix(FIELDS) if self.metric.startswith(FIELDS) else None


def parse_gate(text: str, files: Collection[str] = ()) -> tuple[Wanted, ...]:
    """The conditions of a gate. `files` are the names of the files, if there are several."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts or len(parts) > MAX_CONDITIONS:
        what = "The gate has no condition." if not parts else f"The gate has more than {MAX_CONDITIONS} conditions."
        raise TrilloraError(what, where="--gate", do=_FORM)
    return tuple(_parsed(part, files) for part in parts)


def check_fields(gate: Sequence[Wanted], fields: Mapping[str, Collection[str]]) -> None:
    """Checks the names of JSON fields. `fields`: for each file, the fields of its expected answers."""
    for wanted in gate:
        names = {name for file, known in fields.items() if wanted.file in (None, file) for name in known}
        if wanted.field is not None and wanted.field not in names:
            shown = " ".join(f"{FIELDS}{name}" for name in sorted(names)[:20])
            do = f"use one of: {shown}" if names else "remove the condition: the expected answers are not JSON objects"
            raise TrilloraError(f"No expected answer has the field '{wanted.field}'.", where="--gate", do=do)


def judge(gate: Sequence[Wanted], evaluation: Evaluation) -> tuple[Condition, ...]:
    """The conditions with what was measured. A metric without a value does not meet its condition."""
    return tuple(_judged(wanted, evaluation) for wanted in gate)


def _judged(wanted: Wanted, evaluation: Evaluation) -> Condition:
    found = next((part for part in evaluation.files if part.label == wanted.file), evaluation)
    value: float | None
    if wanted.metric in OF_METER:
        meter = evaluation.forgetting
        value = None if meter is None else meter.forgetting if wanted.metric == "forgetting" else meter.kl
    else:
        value = _value(found.base if wanted.side == "base" else found.adapter, wanted)
    met = value is not None and math.isfinite(value) and _COMPARED[wanted.sign](value, wanted.limit)
    return Condition(wanted.text, value, met)


def _value(scores: Scores | None, wanted: Wanted) -> float | None:
    if scores is None:
        return None
    return getattr(scores, wanted.metric) if wanted.field is None else scores.fields.get(wanted.field)


def _parsed(text: str, files: Collection[str]) -> Wanted:
    match = _CONDITION.fullmatch(text.strip())
    if match is None or not match["name"].strip():
        raise TrilloraError(f"'{text.strip()[:80]}' is not a condition.", where="--gate", do=_FORM)
    name, sign = match["name"].strip(), match["sign"]
    limit = _number(match["limit"], text)
    file, colon, rest = name.rpartition(":")
    if colon and file not in files:
        do = f"use one of: {' '.join(files)}" if files else "leave it out: only one file is evaluated"
        raise TrilloraError(f"'{file}' is not the name of an evaluated file.", where="--gate", do=do)
    side, dot, metric = rest.partition(".")
    if not dot or side not in ("base", "adapter"):
        side, metric = "adapter", rest
    is_field = metric.startswith(FIELDS) and metric != FIELDS
    if metric in OF_METER and (colon or side == "base" or rest != metric):
        what = f"'{metric}' compares the adapter with its base, so it has no file, base or adapter."
        raise TrilloraError(what, where="--gate", do=f"write {metric}{sign}{match['limit']}")
    if metric in AGAINST_BASE and side == "base":
        what = f"'{metric}' compares the adapter with its base, so the base has none."
        raise TrilloraError(what, where="--gate", do=f"write {metric}{sign}{match['limit']}")
    if is_field and files and not colon:
        what = f"'{metric[:80]}' is a field, and several files are evaluated."
        raise TrilloraError(what, where="--gate", do=f"say of which file: FILE:{metric[:80]}{sign}{match['limit']}")
    if not is_field and metric not in (*METRICS, *OF_METER):
        meant = nearest(metric, (*METRICS, *OF_METER))
        names = f"{' '.join((*METRICS, *OF_METER))} {FIELDS}NAME; each also with base. or adapter. before it"
        do = f"did you mean {meant}? Known: {names}" if meant else f"use one of: {names}"
        raise TrilloraError(f"Unknown metric '{metric[:80]}'.", where="--gate", do=do)
    return Wanted(f"{name} {sign} {match['limit']}", file if colon else None, side, metric, sign, limit)


def _number(text: str, condition: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise TrilloraError(f"'{text[:40]}' is not a number.", where=f"--gate, {condition.strip()[:80]}", do=_FORM)
    return limit
