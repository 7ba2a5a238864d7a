"""Numbers and the state of a run, in words."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trillora.report.run.read import EvaluationLine, RunRecord, StepLine
from trillora.secrets import mask_secrets, secrets_of_environment

NOT_KNOWN = "?"


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
            "finished", how if early else f"{how} in {say_time(time)}." if time else f"{how}.", _gains(run)
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
    words = f"Evaluation loss {how} by {say_share(round(abs(change), 2))}, "
    words += f"from {say_number(before.loss)} to {say_number(after.loss)}"
    if before.accuracy is not None and after.accuracy is not None:
        words += f"; the likeliest token is right in {say_share(after.accuracy)} of places, before in "
        words += f"{say_share(before.accuracy)}"
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


def say_number(value: float | None) -> str:
    """Three figures that count."""
    if value is None:
        return NOT_KNOWN
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}" if size else "0"


def say_rate(value: float | None) -> str:
    """A learning rate: 2e-4."""
    if value is None:
        return NOT_KNOWN
    if not value:
        return "0"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def say_short(value: float | None) -> str:
    """12.3k, for axes and tiles."""
    if value is None:
        return NOT_KNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.0f}{name}" if scaled >= 100 else f"{scaled:.1f}".removesuffix(".0") + name
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


def say_share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    return f"{value:.1%}".replace(".0%", "%").replace("%", "\u00a0%")  # kept on one line


def say_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def say_moment(text: str, how: str = "%d %B %Y, %H:%M %Z") -> str:
    """An ISO time as people write it; as it is where it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.strftime(how).lstrip("0").rstrip()


def seen_from_here(path: Path) -> str:
    """A path as the person sees it from where they stand."""
    whole, here = os.path.abspath(path), os.getcwd()
    shown = os.path.relpath(whole, here) if whole.startswith(here + os.sep) else whole
    return mask_secrets(shown, secrets_of_environment())


def quoted(path: Path) -> str:
    """A path for the command line."""
    return shlex.quote(seen_from_here(path))
