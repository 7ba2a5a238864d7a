"""The test set in report.html: changes with their intervals, several files, forgetting, the gate; a damaged
eval.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_runs import EVALUATED, write_run

from trillora.report.html import render
from trillora.report.run.eval_scores import eval_scores
from trillora.report.run.read import read_run

CHANGE = {"difference": 0.41, "low": 0.34, "high": 0.48, "beyond_chance": True}
CHANCE = {"difference": -0.014, "low": -0.083, "high": 0.056, "beyond_chance": False}
CHOICES = {
    "data": "q.jsonl",
    "label": "q.jsonl",
    "num_rows": 40,
    "kind": "choices",
    "chance": 0.25,
    "base": {"choice_accuracy": 0.5},
    "adapter": {"choice_accuracy": 0.55},
    "intervals": {"choice_accuracy": CHANCE},
}
SINGLE = {**EVALUATED, "version": 2, "kind": "json", "intervals": {"exact_match": CHANGE, "fields.area": CHANCE}}
METER = {
    "base_accuracy": 0.639,
    "adapter_accuracy": 0.625,
    "forgetting": 0.014,
    "kl": 0.2306,
    "num_questions": 72,
    "interval": CHANCE,
}
GATE = [
    {"condition": "exact_match >= 0.4", "value": 0.41, "met": True},
    {"condition": "f1 >= <b>0.9", "value": None, "met": False},
]
SEVERAL = {**SINGLE, "kind": "mixed", "files": [{**SINGLE, "label": "a.jsonl"}, CHOICES]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "run", 10)


def page(folder: Path, evaluated: Any) -> str:
    (folder / "eval.json").write_text(json.dumps(evaluated), "utf-8")
    scores = eval_scores(read_run(folder))
    return render("eval_scores.html", scores=scores) if scores else ""


def test_a_change_is_shown_with_its_interval_and_faint_if_it_may_be_chance(folder: Path) -> None:
    text = page(folder, SINGLE)
    assert '<td class="number change">+41.0<small>+34.0 to +48.0</small></td>' in text
    assert 'class="number change chance"' in text and "\u22121.4<small>\u22128.3 to +5.6</small>" in text
    assert "exact match" in text and "ROUGE" not in text and "Forgetting" not in text and "Gate" not in text


def test_forgetting_and_the_gate_are_shown_below(folder: Path) -> None:
    text = page(folder, {**SINGLE, "forgetting": METER, "gate": GATE})
    assert "<b>1.4\u00a0%</b> of the general questions lost (within chance)" in text and "0.231 per token" in text
    assert "nothing lost" in page(folder, {**SINGLE, "forgetting": {**METER, "forgetting": 0.0}})
    assert '<span class="badge">met</span><code>exact_match &gt;= 0.4</code>' in text
    assert '<span class="badge no">not met</span>' in text and "not measured" in text and "<b>0.9" not in text


def test_several_files_are_folded_below_their_mean(folder: Path) -> None:
    assert "Mean" not in page(folder, SEVERAL)  # they have no metric in common
    text = page(folder, {**SEVERAL, "files": [*SEVERAL["files"], {**SINGLE, "label": "b.jsonl"}]})  # type: ignore[misc]
    assert "Mean of the files, 200 rows" in text
    assert "<summary>a.jsonl, 200 rows: exact match 41\u00a0%, base 0\u00a0%</summary>" in text
    assert "<summary>q.jsonl, 40 rows: multiple choice 55\u00a0%, base 50\u00a0%</summary>" in text


def test_without_intervals_no_change_is_shown(folder: Path) -> None:
    text = page(folder, EVALUATED)
    assert "data/findings-test.jsonl, 200 rows" in text and "41\u00a0%" in text and "change" not in text
    assert "majority guess" in text and "correct values by field" in text


@pytest.mark.parametrize("name", ["files", "forgetting", "gate", "intervals", "kind", "chance"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [7], {"exact_match": 3}, {"forgetting": "nan"}])
def test_damaged_parts_are_left_out(folder: Path, name: str, value: Any) -> None:
    text = page(folder, {**SEVERAL, "forgetting": METER, "gate": GATE, name: value})
    assert "41\u00a0%" in text or name == "files"
