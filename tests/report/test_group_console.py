"""How a terminal and a log show a run that trains several adapters together."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable

import pytest
from console_panels import in_terminal, last_panel, logged, step, terminal
from rich.console import Console
from sample_runs import PHASES, group_events, group_plan

from trillora.events import (
    AdapterEnded,
    AdaptersStarted,
    AdapterStep,
    Evaluated,
    Event,
    Note,
    Sample,
    Sampled,
    Score,
    Scored,
    Skipped,
)
from trillora.report.console import console_listener

TWO = AdaptersStarted("phases", ("alpaca", "code"))


@pytest.fixture(autouse=True)
def outside_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)


def evaluated(number: int, name: str, loss: float, *, is_best: bool = True) -> Evaluated:
    return Evaluated(number, name, loss, math.exp(min(loss, 9)), 0.6, 1000, is_best and number > 0)


def one_step(number: int, names: Iterable[str], num_steps: int = 100) -> list[Event]:
    steps: list[Event] = [AdapterStep(number, name, 2.5, 1e-4, 1.0, False, 900) for name in names]
    return [*steps, step(number, num_steps, stage="all")]


def test_a_log_has_one_line_per_step_and_evaluation() -> None:
    assert logged(
        [
            TWO,
            *(evaluated(0, "alpaca", 3.0), evaluated(0, "code", 2.5)),
            *one_step(1, ("alpaca", "code")),
            *(evaluated(1, "alpaca", 1.75), evaluated(1, "code", 2.75, is_best=False)),
            AdapterEnded(1, "code", "stopped early", "no better loss in 1 evaluation"),
            *one_step(2, ("alpaca",)),
            AdapterEnded(2, "alpaca", "finished", ""),
            Note("done"),
        ]
    ) == [
        "evaluation of the base model  loss: alpaca 3.0000, code 2.5000",
        "step   1/100  mean loss 2.5000  2 adapters  1,234 tokens/s  left 3 min",
        "evaluation at step 1  loss: alpaca 1.7500, code 2.7500 (not better)",
        "Adapter code stopped early at step 1: no better loss in 1 evaluation",
        "step   2/100  mean loss 2.5000  1 of 2 adapters  1,234 tokens/s  left 3 min",
        "Adapter alpaca finished at step 2",
        "done",
    ]


def test_the_base_model_has_one_loss_if_all_adapters_have_the_same_rows() -> None:
    names = tuple(f"lr-{number}" for number in range(8))
    lines = logged([AdaptersStarted("sweep", names), *(evaluated(0, name, 2.5) for name in names)])
    assert lines == ["evaluation of the base model  loss 2.5000 for all 8 adapters"]


def test_events_between_the_evaluations_of_a_round_do_not_split_it() -> None:
    events: list[Event] = [TWO, *one_step(50, ("alpaca", "code"))]
    for name in ("alpaca", "code"):
        events += [evaluated(50, name, 1.5), Sampled(50, name, (Sample("q", f"a {name}", "x"), Sample("q2", "a2")))]
        events.append(AdapterEnded(50, name, "finished", ""))
    assert logged(events)[1:] == [
        "evaluation at step 50  loss: alpaca 1.5000, code 1.5000",
        *("samples at step 50", "  ? [alpaca] q", "  > a alpaca", "  = x", "  ? [code] q", "  > a code", "  = x"),
        "2 adapters (alpaca, code) finished at step 50",
    ]


def test_two_rounds_without_an_event_in_between_stay_apart() -> None:
    lines = logged([TWO, *(evaluated(number, name, 1.5) for number in (1, 2) for name in ("alpaca", "code"))])
    assert [line.split("  ")[0] for line in lines] == ["evaluation at step 1", "evaluation at step 2"]


def test_skipped_steps_of_many_adapters_are_one_alarm_and_are_counted() -> None:
    names = tuple(f"lr-{number}" for number in range(8))
    steps = [AdapterStep(1, name, math.nan, 1e-4, 1.0, True, 0) for name in names]
    skips = [Skipped(1, name, "the loss was not finite", ("a.jsonl:3",)) for name in names]
    lines = logged([AdaptersStarted("sweep", names), *steps, step(1, stage="all", skipped=True), *skips])
    assert lines[0].endswith("  skipped 8") and len(lines) == 2
    assert lines[1].startswith("alarm: 8 adapters (lr-0, lr-1, lr-2 and 5 more): Step 1 was skipped: the loss was not")


@pytest.mark.parametrize("shown", [False, True])
def test_a_diverged_adapter_is_an_alarm(shown: bool) -> None:
    out = io.StringIO()
    with console_listener(terminal(out) if shown else Console(file=out)) as listener:
        listener(TWO)
        listener(AdapterEnded(31, "code", "diverged", "5 steps in a row were bad."))
    words = "alarm: Adapter code diverged at step 31: 5 steps in a row were bad"
    assert (f"\x1b[1;31m{words}" if shown else f"{words}\n") in out.getvalue()


def test_adapters_that_are_dropped_together_are_one_line() -> None:
    names = tuple(f"lr-{number}" for number in range(8))
    ends = [AdapterEnded(4, name, "dropped", f"training loss 2.{number}") for number, name in enumerate(names[:5])]
    lines = logged([AdaptersStarted("auto", names), *ends, AdapterEnded(4, names[5], "dropped", "training loss 3")])
    assert lines == ["6 adapters (lr-0, lr-1, lr-2 and 3 more) were dropped at step 4"]
    assert logged([AdaptersStarted("auto", names), ends[0]]) == [
        "Adapter lr-0 was dropped at step 4: training loss 2.0"
    ]


def test_adapters_that_were_never_announced_are_known_after_their_first_step() -> None:
    lines = logged([*one_step(1, ("a", "b")), *(evaluated(1, name, 1.5) for name in "ab")])
    assert "2 adapters" in lines[0] and lines[1:] == ["evaluation at step 1  loss: a 1.5000, b 1.5000"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_the_mean_loss_and_the_active_adapters(width: int) -> None:
    events: list[Event] = [AdaptersStarted("phases", ("alpaca", "code", "math"))]
    events += [evaluated(5, "alpaca", 1.25), evaluated(5, "code", 2.25), AdapterEnded(5, "math", "dropped", "")]
    panel = last_panel(in_terminal([*events, *one_step(6, ("alpaca", "code"))], width))
    text = "\n".join(panel)
    assert all(len(line) == width for line in panel)
    assert "─ 2 of 3 adapters ─" in text and "mean loss 2.5000" in text and "evaluation 1.2500 to 2.2500" in text
    assert "lr " not in text  # each adapter has its own


@pytest.mark.parametrize("num_adapters", [8, 64])
def test_many_adapters_stay_readable_in_a_terminal(num_adapters: int) -> None:
    names = tuple(f"lr-{1 + number}e-4-rank-16" for number in range(num_adapters))
    events: list[Event] = [AdaptersStarted("sweep", names)]
    events += [evaluated(9, name, 3 - number / 50, is_best=number % 2 == 0) for number, name in enumerate(names)]
    lines = [line.rstrip() for line in in_terminal(events).splitlines() if line.strip("\r ")]
    assert lines[0].lstrip("\r") == "evaluation at step 9  loss" and len(lines) <= 8
    assert max(map(len, lines)) <= 80
    lowest = f"{names[-1]}   {3 - (num_adapters - 1) / 50:.4f}"
    assert any(lowest in line for line in lines)
    if num_adapters == 64:
        assert lines[1].split()[:2] == [names[-1], "1.7400"]  # sorted
        assert lines[-1] == "  and 52 more up to 3.0000, 32 of 64 better than before"


SCORES = (
    Score("base", "alpaca", 3.0, 0.5, 9),
    Score("base", "code", 2.0, 0.5, 9),
    Score("alpaca", "alpaca", 1.0, 0.75, 9),
    Score("alpaca", "code", 2.5, 0.25, 9),
    Score("code", "alpaca", math.nan, 0.5, 9),
    Score("code", "code", 1.5, 0.75, 9),
    Score("merged", "alpaca", 1.25, 0.5, 9),
    Score("merged", "code", 1.25, 0.5, 9),
)


def test_scores_are_a_table_with_the_own_adapter_and_the_lowest_loss_marked() -> None:
    expected = [
        "loss and accuracy on the test rows; [ ] own adapter, * lowest of a phase",
        "                alpaca            code",
        "  base     3.000 50.0%     2.000 50.0%",
        "  alpaca  [1.000 75.0%]*   2.500 25.0%",
        "  code       nan 50.0%    [1.500 75.0%]",
        "  merged   1.250 50.0%     1.250 50.0% *",
    ]
    assert logged([TWO, Scored(9, "test", SCORES)]) == expected
    shown = in_terminal([TWO, Scored(9, "test", SCORES)]).replace("\r", "").splitlines()
    assert [line.rstrip() for line in shown if line.strip()] == expected


def test_scores_of_many_phases_have_one_line_per_phase() -> None:
    phases = [f"phase-{number}" for number in range(64)]
    scores = tuple(Score(a, p, 1.0 + (a != p), 0.5, 9) for a in ("base", *phases, "merged") for p in phases)
    for lines in (
        logged([Scored(9, "validation", scores)]),
        in_terminal([Scored(9, "validation", scores)], 80).replace("\r", "").splitlines(),
    ):
        lines = [line.rstrip() for line in lines if line.strip()]
        assert len(lines) == 2 + 64 and max(map(len, lines)) <= 90
        assert lines[1].split() == ["base", "own", "merged", "lowest"]
        assert lines[-1].split() == ["phase-63", "2.000", "50.0%", "[1.000", "50.0%]*", "2.000", "50.0%", "phase-63"]


@pytest.mark.parametrize("kind", ["phases", "sweep", "auto"])
def test_a_long_run_has_few_lines_in_a_log_and_the_last_evaluation_is_not_lost(kind: str) -> None:
    plan = group_plan(kind)
    names = tuple(adapter["name"] for adapter in plan)
    lines = logged([AdaptersStarted(kind, names), *group_events(kind, plan, 600)])  # type: ignore[arg-type]
    assert sum(line.startswith("step") for line in lines) <= 111
    rounds = [line for line in lines if line.startswith("evaluation")]
    assert len(rounds) == (11 if kind == "auto" else 13) and rounds[-1].startswith("evaluation at step 600")
    assert len(lines) <= 250 and (kind != "phases" or lines[-1].startswith("  merged"))
    assert all(name in rounds[0] for name in names) == (kind == "phases") and len(PHASES) == 4
