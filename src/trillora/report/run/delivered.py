"""Which trained state the adapter of a finished run has: the best evaluation's, or the last step's.

run.json  "adapter": {"step": 16, "evaluation_loss": 0.428}, and 32 steps in metrics.jsonl
->  "The adapter is from step 16, the best on validation data; the run continued to step 32."
"""

from __future__ import annotations

from trillora.report.run.read import RunRecord
from trillora.runs.files import ADAPTER


def step_of_adapter(run: RunRecord, name: str = "") -> int | None:
    """The step of the run's adapter, or of one of several. None if there is none yet, or if it is not known."""
    if not run.adapters:
        return run.manifest.adapter.step if run.adapter == ADAPTER else None
    adapter = next((adapter for adapter in run.adapters if adapter.name == name), None)
    return None if adapter is None else adapter.step


def adapter_in_words(run: RunRecord) -> str:
    """Where the adapter comes from; empty if there is none yet. Of phases, each has its own step."""
    best, step = run.best, step_of_adapter(run, run.best.name if run.best else "")
    if step is None:
        return ""
    if best is not None:
        is_best, last = step == best.best_step, best.last_step
        return _sentence(f"The adapter is {best.name} from step {step:,}", step, last, is_best)
    is_best = run.manifest.adapter.evaluation_loss is not None
    return _sentence(f"The adapter is from step {step:,}", step, run.last_step, is_best)


def _sentence(start: str, step: int, last: int, is_best: bool) -> str:
    if not is_best:
        return f"{start}, the last one." if step == last else f"{start}."
    after = f"; the run continued to step {last:,}." if step < last else ", and the last."
    return f"{start}, the best on validation data{after}"
