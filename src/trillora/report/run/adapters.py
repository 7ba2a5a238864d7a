"""The adapters of a run that trains several together, collected from run.json, metrics.jsonl and group.json.

    run.json      what was planned: names, learning rates, ranks, seeds, steps
    metrics.jsonl what happened: `adapter_step`, `evaluation` and `adapter_ended` lines
    group.json    the results, written when the run is finished

A file that is missing or damaged leaves gaps; the other files fill those they can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trillora.events import AdapterEnded, AdapterStep, Evaluated
from trillora.report.numbers import format_rate
from trillora.runs.manifest import AdapterPlan, AdapterResult, GroupPlan, GroupResult

MAX_ADAPTERS = 256  # a damaged file may have any number
NOT_ENDED = "not finished"


@dataclass(frozen=True)
class AdapterRecord:
    """What is known about one adapter of several."""

    plan: AdapterPlan
    steps: tuple[AdapterStep, ...]  # in order
    evaluations: tuple[Evaluated, ...]  # in order; step 0 is the base model
    status: str
    reason: str
    last_step: int
    best: Evaluated | None  # the trained state with the lowest loss
    best_loss: float | None  # as in group.json, or else of `best`
    best_step: int | None
    folder: str | None
    step: int | None  # whose weights the folder has

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def base_loss(self) -> float | None:
        first = self.evaluations[0] if self.evaluations else None
        return first.loss if first is not None and first.step == 0 and math.isfinite(first.loss) else None


def adapters_of(
    plan: GroupPlan,
    result: GroupResult,
    steps: Iterable[AdapterStep],
    evaluations: Iterable[Evaluated],
    ends: Iterable[AdapterEnded],
) -> tuple[AdapterRecord, ...]:
    """The adapters in the order of the plan. The events are in the order of their steps."""
    steps_of: dict[str, list[AdapterStep]] = {}
    for step in steps:
        steps_of.setdefault(step.adapter, []).append(step)
    evaluations_of: dict[str, list[Evaluated]] = {}
    for evaluated in evaluations:
        evaluations_of.setdefault(evaluated.stage, []).append(evaluated)
    end_of = {end.adapter: end for end in ends}
    plans = {adapter.name: adapter for adapter in plan.adapters}
    results = {adapter.name: adapter for adapter in result.adapters}
    names = [name for name in dict.fromkeys((*plans, *results, *steps_of)) if name]
    return tuple(
        _record(
            plans.get(name) or AdapterPlan(name, None, None, None, None, None),
            results.get(name),
            steps_of.get(name, []),
            evaluations_of.get(name, []),
            end_of.get(name),
        )
        for name in names[:MAX_ADAPTERS]
    )


def _record(
    plan: AdapterPlan,
    result: AdapterResult | None,
    steps: Sequence[AdapterStep],
    evaluations: Sequence[Evaluated],
    end: AdapterEnded | None,
) -> AdapterRecord:
    trained = [event for event in evaluations if event.step > 0 and math.isfinite(event.loss)]
    best = min(trained, key=lambda event: event.loss, default=None)
    loss, at = (best.loss, best.step) if best is not None else (None, None)
    if result is not None and result.best_loss is not None:
        loss, at = result.best_loss, result.best_step
    ended = (result.status if result is not None else "") or (end.status if end is not None else "")
    reason = (result.reason if result is not None else "") or (end.reason if end is not None else "")
    last = steps[-1].step if steps else (result.num_steps or 0) if result is not None else 0
    return AdapterRecord(
        plan,
        tuple(steps),
        tuple(evaluations),
        status=ended or NOT_ENDED,
        reason=reason,
        last_step=last,
        best=best,
        best_loss=loss,
        best_step=at,
        folder=result.folder if result is not None else None,
        step=result.step if result is not None else None,
    )


def edge_of_rates(best: float | None, tried: Iterable[float | None]) -> str:
    """Advice if no rate above or below the best one was tried; otherwise nothing."""
    rates = sorted({rate for rate in tried if rate is not None})
    if len(rates) < 2 or best is None or rates[0] < best < rates[-1]:
        return ""
    edge, way = ("highest", "higher") if best == rates[-1] else ("lowest", "lower")
    return f"The best learning rate, {format_rate(best)}, is the {edge} that was tried; try {way}."
