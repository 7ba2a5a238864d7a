"""Hours, sessions, weeks and cost of a whole recipe. No jax.

Notebook platforms limit the length of a session and the hours per week. Every session loads the model and compiles
again before it resumes the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trillora.devices.slices import Platform
from trillora.errors import TrilloraError

HOUR = 3600.0  # seconds
HOURS_OF_A_WEEK = 168.0


@dataclass(frozen=True)
class RunTime:
    """Time and cost of the whole recipe."""

    hours: float  # all sessions together, start-up included
    sessions: int
    weeks: int  # calendar weeks needed, at least
    cost: float | None  # in the currency of the price; None if no price is known


@dataclass(frozen=True)
class _Week:
    sessions: int
    worked: float  # seconds spent on steps and evaluations
    used: float  # seconds of quota used, start-up included


def run_time(
    step_seconds: float,
    num_steps: int,
    start_seconds: float,
    evaluation_seconds: float,
    platform: Platform | None,
    price_per_hour: float | None,
    num_chips: int,
) -> RunTime:
    """Time of all steps and evaluations under the platform's limits.

    `evaluation_seconds` is the sum over all evaluations. Each session spends `start_seconds` on loading and compiling.
    `price_per_hour` is per chip; default: the platform's price.
    """
    work = step_seconds * num_steps + evaluation_seconds
    if platform is None:
        used, sessions = start_seconds + work, 1
        weeks = max(1, math.ceil(used / HOUR / HOURS_OF_A_WEEK))
    else:
        used, sessions, weeks = _in_sessions(work, start_seconds, platform)
        price_per_hour = platform.price_per_hour if price_per_hour is None else price_per_hour
    cost = None if price_per_hour is None else used / HOUR * price_per_hour * num_chips
    return RunTime(used / HOUR, sessions, weeks, cost)


def _in_sessions(work: float, start: float, platform: Platform) -> tuple[float, int, int]:
    """Seconds used, sessions and weeks. All weeks but the last are equal, so only one of them is simulated."""
    session, quota = platform.session_hours * HOUR, (platform.weekly_hours or HOURS_OF_A_WEEK) * HOUR
    full = _one_week(math.inf, start, session, quota)
    if not full.sessions:
        raise TrilloraError(
            f"Loading and compiling take {start / HOUR:.1f} hours, but a session on {platform.name} lasts "
            f"{min(session, quota) / HOUR:g}: it would end before the first step.",
            do="use a slice without a session limit (for example v5e-8), or a smaller model",
        )
    full_weeks = max(0, math.ceil(work / full.worked) - 1)
    last = _one_week(work - full_weeks * full.worked, start, session, quota)
    return full_weeks * full.used + last.used, full_weeks * full.sessions + last.sessions, full_weeks + 1


def _one_week(work: float, start: float, session: float, quota: float) -> _Week:
    """Do as much of `work` as the weekly quota allows, session after session. All arguments are seconds."""
    sessions, worked, used, left = 0, 0.0, 0.0, work
    while sessions == 0 or left > 0:
        length = min(session, quota - used)
        if length <= start:  # the session would end before its first step
            break
        done = min(length - start, left)
        sessions, worked, used, left = sessions + 1, worked + done, used + start + done, left - done
    return _Week(sessions, worked, used)
