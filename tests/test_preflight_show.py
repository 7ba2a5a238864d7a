"""Preflight's screen: every figure of an answer is on it, at 80 and at 120 columns, with and without colour."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from trillora.report.preflight_screen import show

GO: dict[str, Any] = {
    "slice": "v5e-8",
    "chip": "v5e",
    "num_devices": 8,
    "method": "compiler",
    "verdict": "GO",
    "fits": True,
    "hbm_peak_gib": 9.43,
    "hbm_limit_gib": 15.75,
    "memory": {"base": 1.9, "adapter": 0.04, "optimizer": 0.02, "batch": 0.0, "activations": 6.97, "logits": 0.5},
    "largest_buffers": [{"what": "MLP up projection, saved for the backward pass", "gib": 2.5}],
    "flops_per_step": 1.0e14,
    "step_seconds": 0.9,
    "step_seconds_roofline": 0.6,
    "step_seconds_error": 0.15,
    "time": {"compute": 0.61, "hbm": 0.4, "interconnect": 0.2, "exposed_interconnect": 0.05, "kernels": 0.1},
    "tokens_per_second": 18204.1,
    "fraction_of_peak": 0.42,
    "num_compiles": 2,
    "compile_seconds": 31.2,
    "padding": 0.05,
    "num_steps": 13000,
    "num_tokens": 4915200,
    "run_hours": 23.4,
    "sessions": 1,
    "weeks": 1,
    "session_hours": None,
    "weekly_hours": None,
    "cost": None,
    "price_per_hour": None,
    "settings": {"mesh": "data 1 x fsdp 8 x tensor 1", "micro_batch_size": 8, "remat": "linear", "loss_chunk": 4096},
    "changes": [],
    "tried": [],
    "host": [{"what": "RAM for loading", "needed_gib": 5.1, "available_gib": 330.0, "ok": True}],
    "smallest_go": "v5e-4",
    "problem": None,
    "notes": ["Evaluations are counted."],
    "versions": {"libtpu": "0.0.42.1"},
    "from_cache": False,
}
CHANGED: dict[str, Any] = {
    **GO,
    "slice": "kaggle",
    "verdict": "GO WITH CHANGES",
    "sessions": 4,
    "weeks": 2,
    "session_hours": 9.0,
    "weekly_hours": 20.0,
    "cost": 0.0,
    "changes": [
        {"option": "train.micro_batch_size", "from": 32, "to": 8, "why": "32 rows at once need 40.1 GiB of the 15.75"},
        {"option": "hardware.mesh", "from": "auto", "to": {"data": 2, "fsdp": 4}, "why": "it fits"},
    ],
    "tried": [
        {"what": "32 rows at once, remat none", "peak_gib": 40.1, "fits": False},
        {"what": "16 rows at once, remat none", "peak_gib": None, "fits": False},
        {"what": "8 rows at once, remat linear", "peak_gib": 9.43, "fits": True},
    ],
}
# As much as is known when the compiler refuses.
NO_GO: dict[str, Any] = {
    "slice": "v5e-1",
    "chip": "v5e",
    "num_devices": 1,
    "method": "compiler",
    "verdict": "NO-GO",
    "fits": False,
    "hbm_peak_gib": 19.2,
    "hbm_limit_gib": 15.75,
    "memory": {"base": 13.5, "activations": 5.0, "logits": 0.7},
    "largest_buffers": [{"what": "base: MLP down projection", "gib": 3.5}],
    "host": [{"what": "Disk for the model", "needed_gib": 14.9, "available_gib": 10.0, "ok": False}],
    "smallest_go": "v5e-4",
    "problem": "The step needs 19.20 GiB and a v5e chip has 15.75.",
}
ESTIMATE: dict[str, Any] = {**GO, "method": "estimate", "versions": {}}
PAGES = {
    "go": [GO],
    "changed": [CHANGED],
    "no-go": [NO_GO],
    "estimate": [ESTIMATE],
    "several": [CHANGED, NO_GO, {**GO, "cost": 61.2}],
}


def shown(answers: list[dict[str, Any]], width: int = 80, encoding: str = "utf-8", color: bool = False) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    system = "standard" if color else None
    console = Console(file=file, width=width, highlight=False, force_terminal=color, color_system=system)
    show(answers, console)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def words(text: str) -> str:
    """Without line breaks and columns."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_wider_than_the_terminal_or_cut(page: str, width: int) -> None:
    text = shown(PAGES[page], width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


@pytest.mark.parametrize("page", PAGES)
def test_a_terminal_without_unicode_shows_the_same(page: str) -> None:
    assert shown(PAGES[page], encoding="ascii")


@pytest.mark.parametrize("page", PAGES)
def test_colour_changes_no_word(page: str) -> None:
    colored = shown(PAGES[page], color=True)
    assert "\x1b[" in colored
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    show(PAGES[page], console)
    assert words(console.export_text(styles=False)) == words(shown(PAGES[page]))


def test_one_answer_shows_every_figure() -> None:
    text = words(shown([CHANGED]))
    for part in (
        "GO WITH CHANGES kaggle 8 v5e devices",
        "9.43 of 15.75 GiB",
        "activations 6.97 GiB",
        "MLP up projection, saved for the backward pass, 2.50 GiB",
        "0.90 s estimate, known error ±15 %",
        "compute 0.61 s",
        "HBM traffic 0.40 s",
        "interconnect 0.20 s",
        "attention kernels 0.10 s",
        "50 ms are spent waiting for the interconnect",
        "(roofline): 0.60 s",
        "18,204 tokens/s, 42 % of the peak arithmetic, 2 programs to compile (about 31.2 s)",
        "23.4 h 13,000 steps, 4,915,200 tokens, 5 % padding",
        "4 sessions of at most 9 hours, in 2 weeks of 20 hours",
        "Cost: free",
        "mesh data 1 x fsdp 8 x tensor 1",
        "micro batch size 8, remat linear, loss chunk 4096",
        "32 rows at once need 40.1 GiB of the 15.75",
        "too large 32 rows at once, remat none, 40.10 GiB",
        "too large 16 rows at once, remat none",
        "fits 8 rows at once, remat linear, 9.43 GiB",
        "ok RAM for loading: 5.1 of 330 GiB",
        "Evaluations are counted.",
        "libtpu 0.0.42.1",
    ):
        assert part in text


def test_changes_can_be_pasted_behind_the_recipe() -> None:
    assert "train.micro_batch_size=8 hardware.mesh.data=2 hardware.mesh.fsdp=4" in words(shown([CHANGED]))


def test_the_verdict_is_the_first_word() -> None:
    for answer in (GO, CHANGED, NO_GO):
        assert shown([answer]).strip().startswith(answer["verdict"])


def test_what_an_answer_lacks_is_left_out() -> None:
    text = shown([NO_GO])
    for absent in ("One step", "The run", "Settings", "Changes", "Tried", "Notes", "None", "nan"):
        assert absent not in text
    assert "session" not in shown([GO])
    assert "Cost" not in shown([GO])


def test_no_go_says_what_is_too_much_and_what_would_do() -> None:
    text = words(shown([NO_GO]))
    assert NO_GO["problem"] in text
    assert "3.45 too much" in text
    assert "The smallest slice that is GO: v5e-4" in text
    assert "too little Disk for the model: 14.9 of 10 GiB" in text


def test_an_estimate_is_called_one() -> None:
    assert "ESTIMATE" in shown([ESTIMATE])
    assert "ESTIMATE" in shown([ESTIMATE, NO_GO])
    assert "ESTIMATE" not in shown([GO])


def bars(text: str, first: str, last: str) -> list[tuple[int, int]]:
    """Where the bars of a picture begin and end, in columns."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if first in line)
    end = next(n for n, line in enumerate(lines) if last in line)
    filled = [[column for column, sign in enumerate(line) if sign in "█▒"] for line in lines[begin : end + 1]]
    return [(columns[0], columns[-1] + 1) for columns in filled]


def test_memory_bars_follow_each_other_up_to_the_peak() -> None:
    text = shown([GO], 120)
    parts = bars(text, "base  ", "logits  ")
    assert len(parts) == 5  # the batch is too small to be seen
    for (_, end), (begin, _) in pairwise(parts):
        assert abs(begin - end) <= 1  # the smallest part still takes one column
    start, mark = parts[0][0], next(line for line in text.splitlines() if "base  " in line).rstrip().rindex("|")
    assert (parts[-1][1] - start) / (mark - start) == pytest.approx(9.43 / 15.75, abs=0.03)


def test_what_is_beyond_the_limit_looks_different_without_colour() -> None:
    lines = shown([NO_GO]).splitlines()
    assert "▒" not in next(line for line in lines if "base  " in line)
    assert "█▒" in next(line for line in lines if "activations  " in line)
    logits = next(line for line in lines if "logits  " in line)
    assert "▒" in logits
    assert "█" not in logits


def test_several_answers_are_a_table_and_then_the_reasons() -> None:
    text = words(shown(PAGES["several"], 120))
    assert "slice verdict HBM GiB step tokens/s run sessions cost" in text
    assert "kaggle GO WITH CHANGES 9.4/15.8 0.90 s 18,204 23.4 h 4 free" in text
    assert "v5e-1 NO-GO 19.2/15.8" in text
    assert "v5e-8 GO 9.4/15.8 0.90 s 18,204 23.4 h 61.20" in text
    assert text.index("The smallest slice that is GO: v5e-4") < text.index(NO_GO["problem"])
    assert "train.micro_batch_size=8" in text
    assert "base: MLP down projection, 3.50 GiB" in text


def test_columns_without_a_figure_are_left_out() -> None:
    text = shown([GO, {**GO, "slice": "v5e-16"}])
    assert "sessions" not in text
    assert "cost" not in text


def test_the_smallest_go_is_one_of_the_answers_where_no_other_was_looked_for() -> None:
    go = {**GO, "smallest_go": None}
    larger = {**go, "slice": "v5e-16", "num_devices": 16}
    no_go = {**NO_GO, "smallest_go": None}
    assert "The smallest slice that is GO: v5e-8" in shown([no_go, larger, go])
    assert "No slice that was tried is GO." in shown([no_go, no_go])


def test_text_of_an_answer_is_only_text() -> None:
    odd = {**NO_GO, "problem": "[bold]not markup[/bold] [link=x]"}
    assert "[bold]not markup[/bold] [link=x]" in shown([odd])
    assert "[bold]not markup[/bold] [link=x]" in shown([odd, GO])
