"""Preflight's screen: every value of a result is on it, at 80 and at 120 columns, with and without color."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise

import preflight_screens
import pytest
from generated import part_of
from preflight_answers import GO, NO_GO, RUN, STEP
from pydantic import ValidationError
from rich.console import Console

from trillora.preflight.result import (
    OptionChange,
    PreflightResult,
    Trial,
)
from trillora.report.preflight_screen import show

CHANGED = replace(
    GO,
    slice="kaggle",
    verdict="GO WITH CHANGES",
    smallest_go="kaggle",
    run=replace(RUN, sessions=4, weeks=2, session_hours=9.0, weekly_hours=20.0, cost=0.0),
    changes=(
        OptionChange("train.micro_batch_size", 32, 8, "32 sequences at once need 40.1 GiB of the 15.75"),
        OptionChange("hardware.mesh", "auto", {"data": 2, "fsdp": 4}, "it fits"),
    ),
    tried=(
        Trial("32 sequences at once, remat none", 40.1, False),
        Trial("16 sequences at once, remat none", None, False),
        Trial("8 sequences at once, remat linear", 9.43, True),
    ),
)
ESTIMATE = replace(GO, method="estimate", versions={}, step=replace(STEP, unit_seconds=None))
WITH_COST = replace(GO, run=replace(RUN, cost=61.2))
PAGES = {
    "go": [GO],
    "changed": [CHANGED],
    "no-go": [NO_GO],
    "estimate": [ESTIMATE],
    "several": [CHANGED, NO_GO, WITH_COST],
}


def shown(results: list[PreflightResult], width: int = 80, encoding: str = "utf-8", color: bool = False) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    system = "standard" if color else None
    console = Console(file=file, width=width, highlight=False, force_terminal=color, color_system=system)
    show(results, console)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def words(text: str) -> str:
    """The text without line breaks and columns."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_wider_than_the_terminal_or_cut(page: str, width: int) -> None:
    text = shown(PAGES[page], width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


@pytest.mark.parametrize("page", PAGES)
def test_a_terminal_without_unicode_shows_the_same(page: str) -> None:
    """The same words in the same order, and bars of the same length."""
    plain, full = (shown(PAGES[page], 120, encoding) for encoding in ("ascii", "utf-8"))
    # Rich draws a frame of | around tables in ASCII.
    plain_words, full_words = (
        [word for word in text.replace("±", "+-").replace("|", " ").split() if any(map(str.isalnum, word))]
        for text in (plain, full)
    )
    assert plain_words == full_words and len(plain_words) > 20
    assert (plain.count("#"), plain.count("!")) == (full.count("█"), full.count("▒"))


@pytest.mark.parametrize("page", PAGES)
def test_color_changes_no_word(page: str) -> None:
    colored = shown(PAGES[page], color=True)
    assert "\x1b[" in colored
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    show(PAGES[page], console)
    assert words(console.export_text(styles=False)) == words(shown(PAGES[page]))


def test_one_result_shows_every_value() -> None:
    text = words(shown([CHANGED]))
    for part in (
        "GO WITH CHANGES kaggle (8 v5e devices): the run fits with the changes below",
        "9.43 of 15.75 GiB per device (60 %)",
        "activations 6.97 GiB",
        "MLP up projection, saved for the backward pass, 2.50 GiB",
        "900 ms estimated, error up to ±15 %",
        "compute 610 ms",
        "HBM traffic 400 ms",
        "interconnect 200 ms",
        "attention kernels 100 ms",
        "The step waits 50 ms for the interconnect",
        "Roofline (lower bound at the chip's peak rates): 600 ms",
        "18,204 tokens/s, 42 % of peak FLOP/s, 2 programs to compile (about 31.2 s)",
        "23 h 24 min 13,000 steps, 4,915,200 tokens, 5 % padding",
        "4 sessions of at most 9 hours, in 2 weeks of 20 hours; each session resumes the run.",
        "Cost: free",
        "mesh data 1 x fsdp 8 x tensor 1",
        "micro batch size 8, remat linear, loss chunk 4096, attention splash, layers scan, bfloat16",
        "train.micro_batch_size 32 -> 8: 32 sequences at once need 40.1 GiB of the 15.75",
        "too large 32 sequences at once, remat none, 40.10 GiB",
        "too large 16 sequences at once, remat none",
        "fits 8 sequences at once, remat linear, 9.43 GiB",
        "ok RAM for loading: 5.1 of 330 GiB",
        "Evaluations are counted.",
        "libtpu 0.0.42.1",
    ):
        assert part in text


def test_the_screens_in_the_guide_are_what_is_printed_today() -> None:
    for name, text in preflight_screens.screens().items():
        assert part_of(preflight_screens.PAGE, name) == text, "run tools/preflight_screens.py --show"


def test_changes_can_be_pasted_after_the_recipe() -> None:
    assert "train.micro_batch_size=8 hardware.mesh.data=2 hardware.mesh.fsdp=4" in words(shown([CHANGED]))


def test_the_verdict_is_the_first_word() -> None:
    for result in (GO, CHANGED, NO_GO):
        assert shown([result]).strip().startswith(result.verdict)


def test_missing_values_are_left_out() -> None:
    text = shown([NO_GO])
    for absent in ("One step", "The run", "Settings", "Changes", "Tried", "Notes", "None", "nan"):
        assert absent not in text
    assert "session" not in shown([GO])
    assert "Cost" not in shown([GO])


def test_no_go_explains_what_is_too_large_and_what_would_fit() -> None:
    text = words(shown([NO_GO]))
    assert NO_GO.problem is not None and NO_GO.problem in text
    assert "v5e-1 (1 v5e device): the run does not fit" in text
    assert "19.20 of 15.75 GiB per device (3.45 GiB too much)" in text
    assert "(too close to the limit" in shown([replace(NO_GO, hbm_peak_gib=15.6)], 120)
    assert "Smallest slice that fits: v5e-4" in text
    assert "too little Disk for the model: 14.9 of 10 GiB" in text


def test_an_estimate_is_called_one() -> None:
    assert "ESTIMATE" in shown([ESTIMATE])
    assert "ESTIMATE" in shown([ESTIMATE, NO_GO])
    assert "ESTIMATE" not in shown([GO])


def bars(text: str, first: str, last: str) -> list[tuple[int, int]]:
    """First and last column of each bar between two lines."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if first in line)
    end = next(n for n, line in enumerate(lines) if last in line)
    filled = [[column for column, sign in enumerate(line) if sign in "█▒"] for line in lines[begin : end + 1]]
    return [(columns[0], columns[-1] + 1) for columns in filled]


def test_memory_bars_follow_each_other_up_to_the_peak() -> None:
    text = shown([GO], 120)
    parts = bars(text, "base  ", "logits  ")
    assert len(parts) == 5  # the batch is too small to be shown
    for (_, end), (begin, _) in pairwise(parts):
        assert abs(begin - end) <= 1  # the smallest part still takes one column
    start, mark = parts[0][0], next(line for line in text.splitlines() if "base  " in line).rstrip().rindex("|")
    assert (parts[-1][1] - start) / (mark - start) == pytest.approx(9.43 / 15.75, abs=0.03)


def test_the_part_beyond_the_limit_looks_different_without_color() -> None:
    lines = shown([NO_GO]).splitlines()
    assert "▒" not in next(line for line in lines if "base  " in line)
    assert "█▒" in next(line for line in lines if "activations  " in line)
    logits = next(line for line in lines if "logits  " in line)
    assert "▒" in logits
    assert "█" not in logits


def test_several_results_are_a_table_and_then_the_reasons() -> None:
    text = words(shown(PAGES["several"], 120))
    assert "slice verdict HBM GiB step tokens/s run sessions cost" in text
    assert "kaggle GO WITH CHANGES 9.4/15.8 900 ms 18,204 23 h 24 min 4 free" in text
    assert "v5e-1 NO-GO 19.2/15.8" in text
    assert "v5e-8 GO 9.4/15.8 900 ms 18,204 23 h 24 min 61.20" in text
    assert NO_GO.problem is not None
    assert text.index("Smallest slice that fits: v5e-4") < text.index(NO_GO.problem)
    assert "train.micro_batch_size=8" in text
    assert "base: MLP down projection, 3.50 GiB" in text
    assert text.count("Evaluations are counted.") == 1  # a note of two results, printed once


def test_columns_without_a_value_are_left_out() -> None:
    text = shown([GO, replace(GO, slice="v5e-16")])
    assert "sessions" not in text
    assert "cost" not in text


def test_the_smallest_slice_that_fits_is_named_for_each_chip() -> None:
    larger = replace(GO, slice="v5e-16", num_devices=16, smallest_go="v5e-16")
    other_chip = replace(GO, slice="v6e-8", chip="v6e", smallest_go="v6e-8")
    none = replace(NO_GO, smallest_go=None)
    assert "Smallest slice that fits: v5e-8, v6e-8" in shown([none, larger, GO, other_chip])
    assert "The run does not fit any of the slices tried." in shown([none, none])
    assert "The run does not fit this slice or the larger ones tried." in shown([none])


def test_text_of_a_result_is_not_markup() -> None:
    odd = replace(NO_GO, problem="[bold]not markup[/bold] [link=x]")
    assert "[bold]not markup[/bold] [link=x]" in shown([odd])
    assert "[bold]not markup[/bold] [link=x]" in shown([odd, GO])


@pytest.mark.parametrize("result", [GO, CHANGED, NO_GO, ESTIMATE], ids=lambda result: result.verdict)
def test_json_reads_back_as_the_same_result(result: PreflightResult) -> None:
    assert PreflightResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result


def test_json_of_another_schema_is_an_error() -> None:
    tree = GO.to_dict()
    without = {key: value for key, value in tree.items() if key != "verdict"}
    for wrong in ({**tree, "new": 1}, without, {**tree, "num_devices": "8"}, {**tree, "verdict": "MAYBE"}):
        with pytest.raises(ValidationError):
            PreflightResult.from_dict(wrong)
