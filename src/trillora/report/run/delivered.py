"""Which trained state the adapter of a finished run has: that of the best evaluation, or that of the last step.

run.json  "adapter": {"step": 16, "evaluation_loss": 0.428, "why": ""}, and 32 steps in metrics.jsonl
->  "The adapter is from step 16, the best on validation data; the run went on to step 32."
"""

from __future__ import annotations

from trillora.report.run.adapters import AdapterRecord
from trillora.report.run.read import RunRecord


def step_of_adapter(run: RunRecord, name: str = "") -> int | None:
    """The step of the run's adapter, or of one of several. None if there is none yet, or if it is not known."""
    if not run.adapters:
        return run.manifest.adapter.step if run.adapter == "adapter" else None
    adapter = next((adapter for adapter in run.adapters if adapter.name == name), None)
    return None if adapter is None or adapter.folder is None else adapter.best_step


def adapter_in_words(run: RunRecord) -> str:
    """Where the adapter comes from; empty if there is none yet. Of phases, each has its own step."""
    best = run.best
    if run.adapters:
        return "" if best is None or best.folder is None else _winner(best)
    step, source, last = step_of_adapter(run), run.manifest.adapter, run.last_step
    if step is None:
        return ""
    if source.why:
        return f"The adapter is from step {step:,}, not the best on validation data."
    if source.evaluation_loss is None:
        return f"The adapter is from step {step:,}" + (", the last one." if step == last else ".")
    after = f"; the run went on to step {last:,}." if step < last else ", and the last."
    return f"The adapter is from step {step:,}, the best on validation data{after}"


def _winner(best: AdapterRecord) -> str:
    if best.best_step is None:
        return f"The adapter is {best.name}."
    after = f"; it went on to step {best.last_step:,}." if best.best_step < best.last_step else "."
    return f"The adapter is {best.name} from step {best.best_step:,}, the best on validation data{after}"
