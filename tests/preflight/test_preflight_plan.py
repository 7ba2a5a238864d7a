"""Hours, sessions, weeks and cost of a run, compared with a minute-by-minute simulation; and host requirements."""

from __future__ import annotations

import math
import random

import pytest

from trillora.devices.slices import NOTEBOOK_SLICES, Platform
from trillora.errors import TrilloraError
from trillora.preflight.host import host_lines
from trillora.preflight.sessions import RunTime, run_time

NOTEBOOK = Platform("a notebook", 9.0, 20.0, 47.0, 100.0, None)
GIB = 2**30


def plan(
    hours: float, start_hours: float = 0.1, platform: Platform | None = NOTEBOOK, price: float | None = None
) -> RunTime:
    """The time of a run whose steps take `hours` in total."""
    return run_time(36.0, round(hours * 100), start_hours * 3600, 0.0, platform, price, 8)


def test_a_run_without_limits_starts_once() -> None:
    run = plan(30, start_hours=0.5, platform=None)
    assert run == RunTime(pytest.approx(30.5), 1, 1, None)
    assert plan(400, platform=None).weeks == 3


def test_evaluations_count_like_steps() -> None:
    assert run_time(1.0, 3600, 360.0, 1800.0, None, None, 1).hours == pytest.approx(1.6)


def test_a_run_that_fits_one_session_takes_one_session() -> None:
    assert plan(8.9) == RunTime(pytest.approx(9.0), 1, 1, None)


def test_each_session_starts_again() -> None:
    run = plan(17.8)
    assert (run.sessions, run.hours) == (2, pytest.approx(18.0))


def test_the_weekly_quota_limits_a_week() -> None:
    # 9 + 9 + 2 hours per week; each session needs a tenth of an hour to start.
    assert plan(19.7) == RunTime(pytest.approx(20.0), 3, 1, None)
    assert plan(19.8) == RunTime(pytest.approx(20.2), 4, 2, None)


def test_no_session_starts_that_would_end_before_its_first_step() -> None:
    run = plan(18, start_hours=3.0)  # 6 + 6 hours of work; the last 2 of a week are not enough to start
    assert (run.sessions, run.weeks, run.hours) == (3, 2, pytest.approx(27.0))


def test_a_platform_without_a_quota_is_limited_by_its_sessions() -> None:
    colab = NOTEBOOK_SLICES["colab"].platform
    assert colab is not None
    assert colab.weekly_hours is None
    run = plan(23, start_hours=0.5, platform=colab)
    assert (run.sessions, run.weeks) == (2, 1)


def test_years_are_counted_quickly() -> None:
    run = plan(1e7)
    assert run.weeks == pytest.approx(1e7 / 19.7, rel=1e-3)


def test_a_start_longer_than_a_session_is_an_error() -> None:
    with pytest.raises(TrilloraError, match=r"take 9\.5 hours, but a session on a notebook lasts 9"):
        plan(1, start_hours=9.5)


def test_the_cost_includes_all_chips_and_starts() -> None:
    assert plan(9.9, platform=None, price=1.5).cost == pytest.approx(10 * 1.5 * 8)
    assert plan(17.8, price=1.5).cost == pytest.approx(18 * 1.5 * 8)


def test_the_default_price_is_the_platforms() -> None:
    kaggle = NOTEBOOK_SLICES["kaggle"].platform
    assert kaggle is not None
    assert plan(5, platform=kaggle).cost == 0
    assert plan(4.9, platform=kaggle, price=1.0).cost == pytest.approx(5 * 8)
    assert plan(5, platform=NOTEBOOK).cost is None


def minute_by_minute(work: int, start: int, session: int, quota: int) -> tuple[int, int, int]:
    """Minutes used, sessions and weeks: slow and obviously correct."""
    used = in_session = sessions = 0
    weeks, week_left = 1, quota
    left = 0  # minutes of start-up left in this session
    while work:
        if in_session == 0:
            if min(session, week_left) <= start:
                weeks, week_left = weeks + 1, quota
            in_session, left, sessions = min(session, week_left), start, sessions + 1
        in_session, week_left, used = in_session - 1, week_left - 1, used + 1
        if left:
            left -= 1
        else:
            work -= 1
    return used, sessions, weeks


def test_the_plan_equals_a_minute_by_minute_simulation() -> None:
    choice = random.Random(0)
    for _ in range(300):
        session, start, work = choice.randint(30, 600), choice.randint(1, 29), choice.randint(1, 9000)
        quota = choice.randint(session, 1500)
        notebook = Platform("a notebook", session / 60, quota / 60, 47.0, 100.0, None)
        run = run_time(60.0, work, start * 60.0, 0.0, notebook, None, 1)
        used, sessions, weeks = minute_by_minute(work, start, session, quota)
        assert (run.sessions, run.weeks) == (sessions, weeks)
        assert run.hours * 60 == pytest.approx(used)


# ---- the host


def test_ram_depends_on_the_largest_tensor_not_on_the_model() -> None:
    ram, _ = host_lines(GIB // 2, 14 * GIB, 0, 1, None, 47.0, 100.0)
    larger_model, _ = host_lines(GIB // 2, 140 * GIB, 0, 1, None, 47.0, 1000.0)
    assert ram == larger_model
    assert ram.ok
    assert 4 < ram.needed_gib < 8
    assert not host_lines(20 * GIB, 14 * GIB, 0, 1, None, 47.0, 100.0)[0].ok


def test_a_host_that_is_the_device_also_holds_the_arrays() -> None:
    tpu, held = (host_lines(GIB, 14 * GIB, held, 1, None, 16.0, 100.0)[0] for held in (0, 14 * GIB))
    assert held.needed_gib - tpu.needed_gib == 14
    assert tpu.ok
    assert not held.ok


def test_the_disk_needs_the_weights_and_ten_percent() -> None:
    _, disk = host_lines(GIB, 20 * GIB, 0, 1, None, 47.0, 21.9)
    assert disk.needed_gib == pytest.approx(22)
    assert not disk.ok
    assert host_lines(GIB, 20 * GIB, 0, 1, None, 47.0, 22.1)[1].ok


def test_unknown_sizes_are_the_platforms_or_no_obstacle() -> None:
    lines = host_lines(GIB, GIB, 0, 1, NOTEBOOK, None, None)
    assert [line.available_gib for line in lines] == [47.0, 100.0]
    for line in host_lines(10**6 * GIB, 10**6 * GIB, 0, 1, None, None, None):
        assert line.available_gib is None
        assert line.ok
        assert math.isfinite(line.needed_gib)


def test_several_hosts_are_named_in_the_lines() -> None:
    assert [line.what for line in host_lines(GIB, GIB, 0, 4, None, None, None)] == [
        "RAM for loading, each of 4 hosts",
        "Disk for the model, each of 4 hosts",
    ]
