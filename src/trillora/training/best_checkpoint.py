"""Chooses the checkpoint whose weights become the adapter.

    chosen = choose_checkpoint(checkpoints, {20: 1.31, 40: 1.12, 60: 1.18}, last=80, listener=listener)
    chosen.step     # 40; or 60 if the checkpoint of step 40 is damaged; or 80 if both are
    chosen.why      # "" or "step 60 is used, because the checkpoint of step 40 is damaged: …"

A run always ends with an adapter if any of its checkpoints can still be used: every evaluated one is tried, the best
first, then the last weights.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from dataclasses import dataclass

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener
from trillora.files.checkpoints import Checkpoints, Damaged


@dataclass(frozen=True)
class ChosenCheckpoint:
    step: int
    files: dict[str, bytes]
    why: str  # why it is not that of the best evaluation; empty if it is


def choose_checkpoint(
    checkpoints: Checkpoints, evaluated: Mapping[int, float], last: int, listener: Listener
) -> ChosenCheckpoint:
    """The checkpoint with the lowest loss in `evaluated` (step -> loss) that can be used, or that of the step `last`.
    Every better one is reported as an alarm."""
    finite = [step for step, loss in evaluated.items() if math.isfinite(loss)]
    ranked = sorted(finite, key=lambda step: (evaluated[step], step))
    why = ""
    with checkpoints.reported("read"):
        existing = checkpoints.steps()
        for rank, step in enumerate(ranked):
            if step not in existing and rank > 0:
                continue  # removed long ago, as it was not the best
            files, fault = _read(checkpoints, step)
            if files is not None:
                return ChosenCheckpoint(step, files, why and f"step {step} is used, because {why}")
            listener(Alarm(f"The adapter cannot be that of the best evaluation: {fault}."))
            why = why or fault
        return ChosenCheckpoint(last, checkpoints.read(last), why and f"the last step is used, because {why}")


def _read(checkpoints: Checkpoints, step: int) -> tuple[dict[str, bytes] | None, str]:
    """The files of a checkpoint, or what is wrong with it."""
    try:
        return checkpoints.read(step), ""
    except Damaged as damage:
        return None, f"the checkpoint of step {step} is damaged ({damage.file} {damage.fault})"
    except TrilloraError:
        return None, f"the checkpoint of step {step} is missing or has another format"
    except OSError as error:
        if error.errno != errno.EIO:  # EIO is a bad sector; a lost connection is no damage
            raise
        return None, f"the checkpoint of step {step} cannot be read ({error.strerror})"
