"""Numbers and the state of a run, in words."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from trillora.report.numbers import format_duration, format_number, format_percent
from trillora.report.run.read import EvaluationLine, RunRecord, StepLine
from trillora.secrets import mask_secrets, secrets_of_environment


@dataclass(frozen=True)
class RunStatus:
    """What became of the run: a word for its colour, a sentence, and what follows from it."""

    kind: str  # finished, running, stopped, diverged
    what: str
    more: tuple[str, ...] = ()
    command: str = ""


def verdict(run: RunRecord) -> RunStatus:
    last = run.history[-1] if run.history else None
    event = last.event if last else ""
    at = last.step if last and last.step is not None else run.last_step
    if not event and run.adapter == "adapter":
        event = "finished"
    steps = f"step {at:,}" + (f" of {run.num_steps:,}" if run.num_steps else "")
    reason = f": {last.reason.rstrip('.')}." if last and last.reason else "."
    again = f"trillora train {quoted(run.folder / 'resolved.yaml')} --out {quoted(run.folder)}"
    saved = (
        f"The newest checkpoint is of step {run.checkpoints[-1]:,}." if run.checkpoints else "Nothing was saved yet."
    )
    if event == "finished":
        early = run.num_steps is not None and at < run.num_steps
        how = f"Finished early at {steps}{reason}" if early else f"Finished: {at:,} {'step' if at == 1 else 'steps'}"
        time = total_seconds(run.steps)
        return RunStatus(
            "finished", how if early else f"{how} in {format_duration(time)}." if time else f"{how}.", _gains(run)
        )
    if event == "diverged":
        listed = "; the skipped rows are listed below" if run.skips else ""
        advice = f"A lower learning rate, or more warm-up steps, usually helps{listed}."
        return RunStatus("diverged", f"Diverged at {steps}{reason}", (saved, advice))
    if event == "stopped":
        more = (*_gains(run), f"{saved} The same command continues the run:")
        return RunStatus("stopped", f"Stopped at {steps}{reason}", more, again)
    steps = f"step {run.last_step:,}" + (f" of {run.num_steps:,}" if run.num_steps else "")
    more = (*_gains(run), "If no process is at work on it any more, the same command continues it:")
    return RunStatus("running", f"Under way: {steps} when this page was written.", more, again)


def _gains(run: RunRecord) -> tuple[str, ...]:
    pair = before_and_after(run)
    if pair is None:
        return ()
    before, after = pair
    if before.loss is None or after.loss is None or not 0 < before.loss < math.inf or not after.loss < math.inf:
        return ()
    change = after.loss / before.loss - 1
    how = "fell" if change < 0 else "rose"
    words = f"Evaluation loss {how} by {format_percent(round(abs(change), 2))}, "
    words += f"from {format_number(before.loss)} to {format_number(after.loss)}"
    if before.accuracy is not None and after.accuracy is not None:
        words += f"; the likeliest token is right in {format_percent(after.accuracy)} of places, before in "
        words += f"{format_percent(before.accuracy)}"
    return (f"{words}.",)


def before_and_after(run: RunRecord) -> tuple[EvaluationLine, EvaluationLine] | None:
    """The first and the last evaluation of the last stage: stages have evaluation sets of their own."""
    if not run.evaluations:
        return None
    stage = run.evaluations[-1].stage
    of_stage = [line for line in run.evaluations if line.stage == stage]
    return (of_stage[0], of_stage[-1]) if len(of_stage) > 1 else None


def total_seconds(steps: list[StepLine]) -> float:
    """Each process counts from its own start: where the clock goes back, another one began."""
    total = last = 0.0
    for line in steps:
        seconds = line.seconds if line.seconds is not None and line.seconds > 0 else last
        total, last = (total + last, seconds) if seconds < last else (total, seconds)
    return total + last


def seen_from_here(path: Path) -> str:
    """A path as the person sees it from where they stand."""
    whole, here = os.path.abspath(path), os.getcwd()
    shown = os.path.relpath(whole, here) if whole.startswith(here + os.sep) else whole
    return mask_secrets(shown, secrets_of_environment())


def quoted(path: Path) -> str:
    """A path for the command line."""
    return shlex.quote(seen_from_here(path))
