"""The state of a run in sentences: which adapter it left, or how far it came, and how much better it became."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from trillora.events import SWAPPED, Evaluated, Preferences, Step
from trillora.own_command import runnable
from trillora.report.numbers import format_count, format_duration, format_number, format_percent
from trillora.report.run.adapter_tables import summary
from trillora.report.run.answers import answers_in_words
from trillora.report.run.delivered import adapter_in_words, step_of_adapter
from trillora.report.run.read import RunRecord
from trillora.runs.files import ADAPTER
from trillora.safe_text import seen_from_here
from trillora.secrets import mask_secrets, secrets_of_environment


@dataclass(frozen=True)
class RunStatus:
    kind: str  # finished, running, stopped, diverged: a class of the style sheet
    what: str
    more: tuple[str, ...] = ()
    command: str = ""  # that resumes the run


def run_status(run: RunRecord) -> RunStatus:
    last = run.history[-1] if run.history else None
    event = last.event if last else ""
    at = last.step if last and last.step is not None else run.last_step
    if not event and (run.adapter == ADAPTER or run.result.adapters):
        event = "finished"
    num_steps = run.manifest.num_steps
    total = f" of {num_steps:,}" if num_steps else ""
    reason = f": {last.reason.rstrip('.')}." if last and last.reason else "."
    recipe, *addresses = run.again
    words = ["trillora train", quoted(run.folder / recipe), *addresses, "--out", quoted(run.folder)]
    again = runnable(" ".join(words))
    saved = f"The newest checkpoint is from step {run.checkpoints[-1]:,}." if run.checkpoints else "No checkpoint yet."
    if event == "finished":
        note = (f"{last.reason[:1].upper()}{last.reason[1:].rstrip('.')}.",) if last and last.reason else ()
        if num_steps is not None and at < num_steps:
            return _finished(f"Finished early at step {at:,}{total}.", run, note)
        seconds = total_seconds(run.steps)
        time = f" in {format_duration(seconds)}" if seconds else ""
        return _finished(f"Finished: {format_count(at, 'step', 'steps')}{time}.", run, note)
    if event == "diverged":
        listed = " The skipped rows are listed below." if run.skips else ""
        advice = f"A lower learning rate or more warm-up steps usually help.{listed}"
        more = (*summary(run), advice) if run.adapters else (saved, advice)
        return RunStatus("diverged", f"Diverged at step {at:,}{total}{reason}", more)
    if event == "stopped":
        more = (*_gains(run), f"{saved} To resume the run:")
        return RunStatus("stopped", f"Stopped at step {at:,}{total}{reason}", more, again)
    more = (*_gains(run), "If its process has ended, resume the run with:")
    return RunStatus("running", f"Running: step {run.last_step:,}{total} when this page was written.", more, again)


def _finished(done: str, run: RunRecord, note: tuple[str, ...]) -> RunStatus:
    """Says first which adapter the page describes."""
    source = adapter_in_words(run)
    return RunStatus("finished", source or done, (*([done] if source else []), *_gains(run), *note))


def _gains(run: RunRecord) -> tuple[str, ...]:
    of_loss = summary(run) if run.adapters else _change_of_loss(run)
    of_answers = answers_in_words(run)
    return (*of_loss, *([of_answers] if of_answers else []))


def _change_of_loss(run: RunRecord) -> tuple[str, ...]:
    pair = before_and_after(run)
    if pair is None:
        return ()
    before, after = pair
    if not 0 < before.loss < math.inf or not after.loss < math.inf:
        return ()
    change = after.loss / before.loss - 1
    how = "fell" if change < 0 else "rose"
    until = "" if step_of_adapter(run) == after.step else f" until step {after.step:,}"
    if before.preferences is not None and after.preferences is not None:
        return change_of_preferences(before.preferences, after.preferences, until)
    words = f"Evaluation loss {how} by {format_percent(round(abs(change), 2))}{until}, "
    words += f"from {format_number(before.loss)} to {format_number(after.loss)}"
    if math.isfinite(before.accuracy) and math.isfinite(after.accuracy):
        words += f"; token accuracy changed from {format_percent(before.accuracy)} to {format_percent(after.accuracy)}"
    return (f"{words}.",)


def change_of_preferences(before: Preferences, after: Preferences, until: str) -> tuple[str, ...]:
    """How many pairs are right now, and a word about log-probabilities that fall."""
    first, last = (format_percent(round(found.rewards_accuracies, 2)) for found in (before, after))
    low, high = (format_percent(round(bound, 2)) for bound in after.interval)
    words = (
        f"The chosen answer is preferred in {last} ({low} to {high}) of {after.pairs:,.0f} held-out pairs{until}, "
        f"before in {first}; the margin is {format_number(after.rewards_margins)}."
    )
    if after.seem_swapped:
        return (words, SWAPPED)
    chosen, rejected = after.logps_chosen - before.logps_chosen, after.logps_rejected - before.logps_rejected
    if chosen >= 0 or rejected >= 0:
        return (words,)
    both = (
        f"Chosen and rejected answers both became less likely ({format_number(chosen)} and {format_number(rejected)} "
        "nats). That is normal for losses that compare answers: the margin counts. If answers get worse, add "
        "sft to train.loss, or use ipo or apo_zero."
    )
    return (words, both)


def before_and_after(run: RunRecord) -> tuple[Evaluated, Evaluated] | None:
    """The first evaluation of the last stage, and the evaluation of the run's adapter; of an unfinished run, the last
    one. Each stage has its own evaluation set. Of several adapters, the same of the best one."""
    if run.adapters:
        best = run.best
        if best is None or best.best is None:
            return None
        step = step_of_adapter(run, best.name)
        return best.evaluations[0], next((event for event in best.evaluations if event.step == step), best.best)
    if not run.evaluations:
        return None
    stage = run.evaluations[-1].stage
    of_stage = [event for event in run.evaluations if event.stage == stage]
    step = step_of_adapter(run)
    after = next((event for event in reversed(of_stage) if step is None or event.step == step), of_stage[0])
    return (of_stage[0], after) if after is not of_stage[0] else None


def total_seconds(steps: list[Step]) -> float:
    """Training time of all processes. Each process counts from its own start: a smaller value means a new process."""
    total = last = 0.0
    for event in steps:
        seconds = event.seconds if 0 < event.seconds < math.inf else last
        total, last = (total + last, seconds) if seconds < last else (total, seconds)
    return total + last


def shown_path(path: Path) -> str:
    return mask_secrets(seen_from_here(os.path.abspath(path)), secrets_of_environment())


def quoted(path: Path) -> str:
    """A path for the command line."""
    return shlex.quote(shown_path(path))
