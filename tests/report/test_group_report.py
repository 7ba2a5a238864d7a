"""The report and the trackers of runs that train several adapters together, from written files, without training."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from canaries import CANARIES
from dose import FULL, dose
from hostile_json import changed_bytes, changed_value
from html_pages import HOSTILE, Page, browse, needs_chromium
from report_page import report
from sample_runs import PHASES, RATES, group_events, group_plan, write_group_run, write_lines
from tracked_files import needs_tensorboard, scalars

from trillora.events import (
    AdapterEnded,
    AdaptersStarted,
    AdapterStep,
    Evaluated,
    Event,
    Sampled,
    Score,
    Scored,
    Skipped,
    Step,
    ignore_events,
    to_metrics_line,
)
from trillora.report.run.adapters import edge_of_rates
from trillora.report.run.curves.several_adapters import looks_of
from trillora.report.run.read import read_run
from trillora.report.run.status import before_and_after, run_status
from trillora.report.run.write import write_report
from trillora.secrets import MASK
from trillora.tracking import tracking_listener

KINDS = ("phases", "sweep", "auto")
FILES = ("run.json", "metrics.jsonl", "history.jsonl", "group.json")


@pytest.fixture
def phases(tmp_path: Path) -> Path:
    return write_group_run(tmp_path / "run", "phases")


def cells(page: str, table: str) -> list[list[str]]:
    """The text of every cell of the table of this class, row by row."""
    (content,) = re.findall(rf'<table class="{table}">(.*?)</table>', page, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", content, re.DOTALL)
    return [
        [Page(cell.replace("<br>", " ")).text for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows
    ]


def chart(page: str, title: str) -> str:
    (found,) = re.findall(rf"<figure[^>]*><figcaption>{title}.*?</figure>", page, re.DOTALL)
    return str(found)


# Reading


def test_metrics_are_read_back_as_the_events_that_were_written(phases: Path) -> None:
    events: list[Any] = [
        *(AdapterStep(3, name, loss, 1e-4, 0.5, False, 90) for name, loss in (("alpaca", 1.5), ("code", math.inf))),
        Evaluated(3, "alpaca", 1.0, math.e, 0.5, 100, True),
        AdapterEnded(3, "code", "diverged", "5 steps in a row were bad"),
        Scored(3, "validation", (Score("base", "code", 2.0, 0.5, 10), Score("code", "code", math.nan, 0.5, 10))),
    ]
    (phases / "group.json").unlink()
    (phases / "metrics.jsonl").write_text("".join(f"{to_metrics_line(event)}\n" for event in events))
    run = read_run(phases)
    by_name = {adapter.name: adapter for adapter in run.adapters}
    assert list(by_name) == list(PHASES) and run.num_unreadable == 0
    assert [*by_name["alpaca"].steps, *by_name["code"].steps, *by_name["alpaca"].evaluations] == events[:3]
    assert (by_name["code"].status, by_name["code"].reason) == ("diverged", "5 steps in a row were bad")
    assert by_name["math"].status == "not finished" and by_name["math"].steps == ()
    assert repr(run.scored) == repr(events[4])  # NaN is not equal to itself


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_of_adapters_are_not_stages_of_one_run(tmp_path: Path, kind: str) -> None:
    run = read_run(write_group_run(tmp_path / "run", kind))
    plan = group_plan(kind)
    assert [adapter.name for adapter in run.adapters] == [adapter["name"] for adapter in plan]
    for adapter in run.adapters:
        assert {event.stage for event in adapter.evaluations} == {adapter.name}
        assert (adapter.best is None) == (adapter.status == "dropped")  # `auto` compares training losses
        if adapter.best is not None:
            assert adapter.best_loss == adapter.best.loss == min(e.loss for e in adapter.evaluations if e.step)
    pair = before_and_after(run)
    if kind == "phases":
        assert run.best is None and pair is None
    else:
        assert run.best is not None and pair == (run.best.evaluations[0], run.best.best)
        assert run.best.best_loss == min(a.best_loss or math.inf for a in run.adapters)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_run_has_the_best_adapter_so_far(tmp_path: Path, kind: str) -> None:
    folder = write_group_run(tmp_path / "run", kind, ended="stopped")
    run = read_run(folder)
    assert (run.best is not None) == (kind != "phases")
    assert {adapter.status for adapter in run.adapters} <= {"not finished", "dropped"}
    status = run_status(run)
    assert status.kind == "stopped" and status.more[0].startswith(f"{len(run.adapters)} adapters")
    assert "Adapters" in Page(report(folder)).text


def test_without_run_json_the_adapters_are_those_of_the_metrics(phases: Path) -> None:
    (phases / "run.json").unlink()
    (phases / "group.json").unlink()
    run = read_run(phases)
    assert [adapter.name for adapter in run.adapters] == list(PHASES)
    assert [adapter.status for adapter in run.adapters] == ["finished", "finished", "diverged", "stopped early"]


# Content


def test_report_of_phases_is_complete_and_in_order(phases: Path) -> None:
    text = Page(report(phases)).text
    expected = [
        *("alpaca.jsonl, code.jsonl and 2 more", "Finished: 120 steps", "4 adapters: 2 finished, 1 diverged (math)"),
        *("mean training loss", "skipped steps", "Adapters", "best loss", "alpaca", "2e-4", "math", "72 of 120"),
        *("diverged", "5 steps in a row were bad", "adapters/math", "stopped early", "merged into one (ties)"),
        *(
            "Curves",
            "Training loss, smoothed",
            "top edge: up to",
            "Evaluation loss",
            "Learning rate",
            "Tokens per second",
        ),
        *("Scores of every adapter on every phase", "test rows", "base", "merged"),
        *("Answers before and after", "alpaca", "Question about alpaca?", "support", "Question about support?"),
        *("Data", "alpaca", "data/alpaca.jsonl", "support", "data/support.jsonl"),
        *("Skipped steps", "adapter", "math.jsonl:812", "Use the result", "adapters/merged", "History"),
    ]
    place = 0
    for words in expected:
        assert words in text[place:], words
        place = text.index(words, place)
    assert "over learning rate" not in text  # each phase has data of its own


@pytest.mark.parametrize("kind", ["sweep", "auto"])
def test_report_of_a_sweep_is_complete_and_names_the_winner(tmp_path: Path, kind: str) -> None:
    run = write_group_run(tmp_path / "run", kind)
    page = report(run)
    rows = cells(page, "adapters")
    winner = json.loads((run / "group.json").read_text())["best"]
    assert rows[0] == ["name", "learning rate", "rank", "seed", "steps", "status", "best loss", "folder"]
    assert rows[1][0] == f"{winner}best" and rows[1][-1] == "adapter" and len(rows) == 1 + len(RATES)
    losses = [float(row[6].split()[0]) for row in rows[1:] if row[6]]
    assert losses == sorted(losses) and len(losses) == (8 if kind == "sweep" else 1)
    steps = [int(row[4].split()[0]) for row in rows[1:]]
    assert steps == ([120] * 8 if kind == "sweep" else [120, 30, 20, 20, 10, 10, 10, 10])
    text = Page(page).text
    assert f"Best: {winner} with evaluation loss {losses[0]:.4f}" in text and "the base model has 2.9870" in text
    shown = text[: text.index("Resolved recipe")]
    assert shown.count("data/findings.jsonl") == 1  # all adapters train on the same rows
    over = chart(page, "Best evaluation loss" if kind == "sweep" else "Training loss over learning rate")
    labels = re.findall(r'class="x[^"]*"[^>]*>([^<]+)<', over)
    assert labels == ["1e-5", "3e-5", "1e-4", "2e-4", "3e-4", "5e-4", "1e-3", "3e-3"]
    trends = re.findall(r"</i>(after step \d+)</span>", over)
    assert trends == ([] if kind == "sweep" else ["after step 10", "after step 20", "after step 30"])
    assert len(re.findall(r"spot", over)) == (8 if kind == "sweep" else 8 + 4 + 2)
    assert ("Training loss while rates were dropped" in page) == (kind == "auto")
    assert "Learning rate, log scale" in page


def test_the_page_describes_the_winner_and_says_whether_its_rate_is_at_the_edge(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "run", "sweep")
    text = Page(report(run)).text
    assert "The adapter is lr-0.0003 from step 120, the best on validation data, and the last." in text
    assert "that was tried" not in text
    summary = json.loads((run / "group.json").read_text())
    summary["best"] = "lr-0.003"
    for adapter in summary["adapters"]:
        adapter |= (
            {"folder": None, "step": None} if adapter["name"] != "lr-0.003" else {"folder": "adapter", "step": 30}
        )
    (run / "group.json").write_text(json.dumps(summary))
    text = Page(report(run)).text
    assert "The adapter is lr-0.003 from step 30, the best on validation data; the run continued to step 120." in text
    assert "The best learning rate, 3e-3, is the highest that was tried; try higher." in text
    assert edge_of_rates(1e-5, RATES).endswith("is the lowest that was tried; try lower.")
    assert edge_of_rates(1e-3, [1e-3, 1e-3, None]) == edge_of_rates(None, RATES) == ""


def test_phases_show_the_answers_of_each_adapter(phases: Path) -> None:
    """`support` stopped early after its best step, and its adapter is from that step."""
    page = report(phases)
    of_support = page[page.index("<h3>support</h3>") : page.index("<h2>Data</h2>")]
    summary = json.loads((phases / "group.json").read_text())
    (step,) = [adapter["step"] for adapter in summary["adapters"] if adapter["name"] == "support"]
    assert f"After, step {step}" in of_support
    assert "4 of 4 answers as expected, 0 before training." in Page(page).text


def test_every_adapter_has_one_line_in_each_chart_and_an_entry_in_the_legend(tmp_path: Path) -> None:
    for kind in KINDS:
        run = write_group_run(tmp_path / kind, kind)
        page, looks = report(run), looks_of(read_run(run))
        assert len(set(looks.values())) == len(looks)  # no two look the same
        winner = json.loads((run / "group.json").read_text())["best"]
        for title in ("Training loss, smoothed", "Evaluation loss"):
            names = [winner] if (kind, title) == ("auto", "Evaluation loss") else list(looks)  # the others have none
            drawn = chart(page, title)
            lines = re.findall(r'<path class="(curve c\d)(?: won)?" d="M', drawn)
            assert sorted(lines) == sorted(looks[name].classes for name in names)
            legend = re.findall(r'<i class="(curve c\d)"></i>([^<]+)</span>', drawn)
            assert legend == [(looks[name].classes, name) for name in names]
            assert (f'{looks[winner].classes} won"' if winner else "nothing") in drawn or winner is None


def test_the_learning_rate_axis_is_a_log_scale(tmp_path: Path) -> None:
    page = report(write_group_run(tmp_path / "run", "sweep"))
    over = chart(page, "Best evaluation loss over learning rate")
    lefts = [float(left) for left in re.findall(r'class="x[^"]*" style="left:([0-9.]+)%', over)]
    places = [math.log10(rate) for rate in RATES]
    unit = (lefts[-1] - lefts[0]) / (places[-1] - places[0])
    expected = [lefts[0] + unit * (place - places[0]) for place in places]
    assert lefts == [pytest.approx(left, abs=0.06) for left in expected]  # written with one decimal of 1000


def test_adapters_of_the_same_rate_have_one_color_and_their_own_trend(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "run", "sweep", ranks=(4, 16))
    looks = looks_of(read_run(run))
    assert [look.color for look in looks.values()] == [number // 2 for number in range(16)]
    assert [look.dash for look in looks.values()] == [0, 1] * 8
    over = chart(report(run), "Best evaluation loss over learning rate")
    assert "rank 4</span>" in over and "rank 16</span>" in over and over.count('<path class="trend') == 2


def test_the_score_matrix_marks_the_own_adapter_and_the_lowest_loss(phases: Path) -> None:
    scores = {
        ("base", "a"): 3.0, ("base", "b"): 2.0, ("a", "a"): 1.0, ("a", "b"): 2.5,
        ("b", "a"): math.nan, ("b", "b"): 1.5, ("merged", "a"): 1.25, ("merged", "b"): 1.25,
    }  # fmt: skip
    event = Scored(9, "validation", tuple(Score(*names, loss, 0.612, 10) for names, loss in scores.items()))
    (phases / "metrics.jsonl").write_text(f"{to_metrics_line(event)}\n")
    page = report(phases)
    assert cells(page, "matrix") == [
        ["", "a", "b"],
        ["base", "3.0000 61.2\u00a0%", "2.0000 61.2\u00a0%"],
        ["a", "1.0000 61.2\u00a0%", "2.5000 61.2\u00a0%"],
        ["b", "nan 61.2\u00a0%", "1.5000 61.2\u00a0%"],
        ["merged", "1.2500 61.2\u00a0%", "1.2500 61.2\u00a0%"],
    ]
    marked = re.findall(r'<td class="number ([a-z ]+)">([^<]+)<', page[page.index('class="matrix"') :])
    assert marked == [("own lowest", "1.0000"), ("own", "1.5000"), ("lowest", "1.2500")]
    assert "validation rows" in page


def test_sixty_four_adapters_stay_a_small_page(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "run", "sweep", 300 if FULL else 100, ranks=(1, 2, 4, 8, 16, 32, 64, 128))
    page = report(run)
    assert len(page.encode()) < 1_000_000
    assert page.count('<i class="swatch') == 64 and "48 more adapters" in page
    assert re.findall(r"</i>(lr [^<]+)<", chart(page, "Evaluation loss"))[0] == "lr 1e-5"


def test_the_snippet_loads_the_merged_adapter(phases: Path) -> None:
    text = Page(report(phases)).text
    assert f"trillora chat {phases}/adapters/merged" in text and json.dumps(str(phases / "adapters" / "merged")) in text
    assert "newest checkpoint" not in text


# Damaged and hostile files


@pytest.mark.parametrize("kind", KINDS)
def test_any_file_may_be_missing_or_end_anywhere(tmp_path: Path, kind: str) -> None:
    whole, cut = write_group_run(tmp_path / "whole", kind, 12), tmp_path / "cut"
    tried = 0
    for name in FILES:
        content = (whole / name).read_bytes()
        for end in range(-1, len(content), max(len(content) // 5, 1)):
            shutil.copytree(whole, cut)
            (cut / name).unlink()
            if end >= 0:
                (cut / name).write_bytes(content[:end])
            Page(report(cut).replace("<br>", ""))
            shutil.rmtree(cut)
            tried += 1
    assert tried >= 6 * len(FILES)


def test_every_value_may_be_anything(tmp_path: Path) -> None:
    whole, run = write_group_run(tmp_path / "whole", "phases", 12), tmp_path / "run"
    dice = random.Random(14)
    for number in range(dose(30, 3000)):
        shutil.copytree(whole, run)
        name = dice.choice(FILES)
        if number % 5 == 0:
            (run / name).write_bytes(changed_bytes((run / name).read_bytes(), dice))
        elif name.endswith(".jsonl"):
            lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
            for place in dice.sample(range(len(lines)), 2):
                changed = changed_value(lines[place], dice)
                lines[place] = {**changed, "kind": lines[place].get("kind")} if isinstance(changed, dict) else {}
            write_lines(run / name, lines)
        else:
            (run / name).write_text(json.dumps(changed_value(json.loads((run / name).read_text()), dice)))
        Page(report(run).replace("<br>", ""))
        shutil.rmtree(run)


def test_a_file_with_a_million_adapters_is_cut(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "run", "sweep", 12)
    lines = [{"kind": "adapter_step", "step": 1, "adapter": f"x{number}", "loss": 1.0} for number in range(20_000)]
    scores = [{"adapter": f"a{n}", "phase": f"p{n}", "loss": 1.0} for n in range(20_000)]
    write_lines(run / "metrics.jsonl", [*lines, {"kind": "scores", "step": 1, "rows": "test", "scores": scores}])
    assert len(report(run).encode()) < 1_500_000


def hostile_run(folder: Path) -> Path:
    """Markup and a long word in every name and text, and results that point out of the folder."""
    name = [HOSTILE + "x" * 200 + str(number) for number in range(2)]
    run = write_group_run(folder / "run", "phases", 12)
    facts = json.loads((run / "run.json").read_text())
    plan = [{**adapter, "name": word} for adapter, word in zip(facts["group"]["adapters"], name, strict=False)]
    facts["group"] = {"kind": HOSTILE, "adapters": plan}
    (run / "run.json").write_text(json.dumps(facts))
    events: list[Event] = [AdapterStep(step, word, 1.5, 1e-4, 0.5, False, 9) for step in (1, 2) for word in name]
    events += [Evaluated(step, word, 1.5 / (1 + step), 3.0, 0.5, 9, True) for step in (0, 1, 2) for word in name]
    events += [AdapterEnded(2, name[0], HOSTILE, HOSTILE)]  # type: ignore[arg-type]
    events += [Scored(2, HOSTILE, tuple(Score(a, b, 1.0, 0.5, 9) for a in name for b in name))]  # type: ignore[arg-type]
    events += [Skipped(1, name[0], HOSTILE, (HOSTILE,)), Sampled(1, name[0], ())]
    (run / "metrics.jsonl").write_text("".join(f"{to_metrics_line(event)}\n" for event in events))
    results = [{"name": word, "status": HOSTILE, "reason": HOSTILE, "folder": "../../outside"} for word in name]
    merged = {"method": HOSTILE, "folder": "/etc"}
    (run / "group.json").write_text(json.dumps({"kind": "x", "best": name[0], "adapters": results, "merged": merged}))
    for outside in (folder.parent / "outside", folder / "outside"):
        outside.mkdir(exist_ok=True)
        (outside / "adapter_model.safetensors").write_bytes(b"")
    return run


def test_markup_in_every_name_is_only_text_and_no_path_leaves_the_folder(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "here")
    page = report(run)
    plain = Page(report(write_group_run(tmp_path / "plain", "phases", 12)).replace("<br>", ""))
    assert Page(page.replace("<br>", "")).names <= plain.names
    assert page.count("&lt;script&gt;") > 20 and "script" not in plain.names
    assert not any(character in page for character in "\x00\x1b\u202e\x07")
    assert read_run(run).adapter is None and "PeftModel" not in page


def test_no_secret_reaches_the_page(phases: Path) -> None:
    everything = " ".join(CANARIES.values())
    name = {"adapter": everything, "stage": everything, "reason": everything, "status": everything, "loss": 1.0}
    score = {"adapter": everything, "phase": everything, "loss": 1.0, "accuracy": 0.5}
    kinds = ("adapter_step", "adapter_ended", "evaluation")
    lines = [{"kind": kind, "step": 3, **name} for kind in kinds]
    write_lines(phases / "metrics.jsonl", [*lines, {"kind": "scores", "step": 3, "rows": "test", "scores": [score]}])
    result = {"name": everything, "status": everything, "reason": everything, "folder": everything}
    (phases / "group.json").write_text(json.dumps({"kind": "phases", "best": everything, "adapters": [result]}))
    page = report(phases)
    assert page.count(MASK) > 50 and "canary" not in page.lower() and "ca0a12" not in page


# In a browser


@needs_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_it_without_error_and_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    page = write_report(hostile_run(tmp_path))
    console, requested, _ = browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}", width=width)
    assert console == [] and requested == []
    inside = tmp_path / "inside.html"
    content = page.read_text("utf-8").replace("<details", "<details open")
    inside.write_text(re.sub(r"<meta http-equiv[^>]*>", "", content), "utf-8")
    frame = tmp_path / "frame.html"  # a window has a minimum width, a frame has none
    frame.write_text(
        f'<!DOCTYPE html><iframe src="inside.html" width="{width}" height="900" style="border:0"></iframe>'
        "<script>onload = () => { document.title = document.querySelector('iframe')"
        ".contentDocument.documentElement.scrollWidth }</script>",
        "utf-8",
    )
    _, _, dom = browse(frame, tmp_path, "--dump-dom", "--allow-file-access-from-files", width=1300)
    found = re.search(r"<title>(\d+)</title>", dom)
    assert found is not None and int(found[1]) == width


# Trackers


@needs_tensorboard
def test_trackers_get_series_of_every_adapter(tmp_path: Path) -> None:
    plan = group_plan("phases")
    events = list(group_events("phases", plan, 12))
    with tracking_listener(tmp_path, 1, (), "trillora", {}, ignore_events) as listener:
        listener(AdaptersStarted("phases", PHASES))
        for event in events:
            listener(event)
    read = scalars(tmp_path / "tensorboard")
    for name in PHASES:
        steps = [e for e in events if isinstance(e, AdapterStep) and e.adapter == name]
        evaluations = [e for e in events if isinstance(e, Evaluated) and e.stage == name]
        assert read[f"adapters/{name}/loss"] == [(e.step, pytest.approx(e.loss, rel=1e-6)) for e in steps]  # 32 bits
        assert len(read[f"adapters/{name}/learning_rate"]) == len(read[f"adapters/{name}/grad_norm"]) == len(steps)
        losses = [(e.step, pytest.approx(e.loss, rel=1e-6)) for e in evaluations]
        assert read[f"adapters/{name}/eval_loss"] == losses and losses[0][0] == 0
        assert len(read[f"adapters/{name}/eval_accuracy"]) == len(evaluations)
    (scored,) = (e for e in events if isinstance(e, Scored))
    for score in scored.scores:
        assert read[f"scores/{score.adapter}/{score.phase}/loss"] == [(12, pytest.approx(score.loss, rel=1e-6))]
    assert len(read["train/loss"]) == sum(isinstance(event, Step) for event in events) == 12
    assert "eval/loss" not in read and "train/learning_rate" not in read
