"""`trillora quickstart` with few findings: it trains, evaluates, and writes every file.

TRILLORA_DOSE=full uses the real embedded model. Otherwise a tiny one takes its place: compiling the 30 layers for
training and for answers takes minutes. test_smollm2.py and test_generate.py use the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import quickstart as benchmark
from dose import FULL
from kept_variables import FILES
from quickstart_run import NUM_ROWS, QUICKSTART, tiny_model
from run_process import WAIT

from trillora.devices.chips import has_accelerator
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.quickstart import run
from trillora.recipe.load import load_recipe
from trillora.report.run.next_steps import after_quickstart

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finished:
    folder: Path
    lines: list[dict[str, Any]]  # what it printed with --json
    errors: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """In a process of its own, as a user runs it: what conftest.py sets could hide a warning. Only XLA's optimizations
    are off, except at full dose; test_smollm2.py always trains with them."""
    place = tmp_path_factory.mktemp("quickstart")
    folder, changes = place / "first", {} if FULL else tiny_model(place / "model")
    environment = {name: os.environ[name] for name in (*FILES, "PYTHONPATH") if name in os.environ}
    if not FULL:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if has_accelerator():  # for which jax may be missing a plugin, and says so
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-c", QUICKSTART, json.dumps(changes), "--out", str(folder), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    return Finished(folder, [json.loads(line) for line in done.stdout.splitlines()], done.stderr)


def test_quickstart_trains_evaluates_and_reports(finished: Finished) -> None:
    losses = [line["loss"] for line in finished.lines if line.get("event") == "step"]
    assert len(losses) == NUM_ROWS and all(0 < loss < 10 for loss in losses)
    evaluation = finished.lines[-1]
    assert evaluation["num_rows"] == NUM_ROWS and evaluation["base"] is not None
    assert set(evaluation["majority"]) == {"provider", "area", "severity"}
    assert json.loads((finished.folder / "eval.json").read_text())["num_rows"] == NUM_ROWS
    assert "severity" in (finished.folder / "report.html").read_text()
    assert (finished.folder / "adapter" / "adapter_model.safetensors").is_file()
    card = (finished.folder / "adapter" / "README.md").read_text("utf-8")
    assert EMBEDDED_NOTE in finished.lines[0]["text"] and (EMBEDDED_NOTE in card) == FULL, "not for another base"


def test_the_benchmark_reads_the_scores_of_a_quickstart(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(finished.folder)
    scores = benchmark.scores(tmp_path)
    assert (scores["num_trained"], scores["num_tested"]) == (NUM_ROWS, NUM_ROWS)
    assert 0 < scores["provider"]["most_frequent"] <= 1 and set(scores["json"]) == {"before", "after"}
    shown = json.loads((ROOT / "benchmarks" / "results" / "quickstart.json").read_text())["values"]
    assert set(shown) == {*scores, "seconds", "setup_seconds"}


def test_quickstart_prints_nothing_of_the_libraries(finished: Finished) -> None:
    assert finished.errors == ""
    assert len(finished.lines) > NUM_ROWS and all("event" in line for line in finished.lines[:-1])


def test_the_recipe_of_a_quickstart_can_be_used_as_it_is(finished: Finished) -> None:
    recipe = load_recipe(finished.folder / "recipe.yaml")
    assert recipe.data is not None and recipe.data.path == str(finished.folder / "train.jsonl")
    text = after_quickstart(finished.folder)
    adapter = str(finished.folder / "adapter")
    assert adapter in text and "report.html" in text and "trillora chat" in text and "data=FILE" in text


def test_a_finished_quickstart_is_not_changed_and_an_unfinished_one_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    assert run._resumable_or_new(folder) == folder
    folder.mkdir()
    assert run._resumable_or_new(folder) == tmp_path / "quickstart-2", "not a folder of the quickstart"
    (folder / "recipe.yaml").write_text(run.RECIPE)
    assert run._resumable_or_new(folder) == folder
    (folder / "adapter").mkdir()
    assert run._resumable_or_new(folder) == tmp_path / "quickstart-2"
