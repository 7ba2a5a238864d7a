"""Every command that uses a run works with one whose last stage learned from pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from click.testing import Result
from running_server import Running
from typer.testing import CliRunner

import trillora
from trillora.adapters.card import adapter_card
from trillora.cli import app
from trillora.recipe.load import load_recipe
from trillora.serving.served import open_service
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("verbs"), tiny_run.llama(num_layers=1))
    pairs = {"path": str(tiny_run.write_pairs(folder / "pairs.jsonl")), "split": {"validation": 0.2, "test": 0.3}}
    values = tiny_run.recipe(folder, train={"sequence_length": 96, "batch_size": 4})
    del values["train"]["steps"], values["data"]
    first = {"name": "answers", "data": str(folder / "chats.jsonl"), "steps": 2}
    second = {"name": "pairs", "data": pairs, "loss": "dpo", "beta": 0.2, "steps": 8, "learning_rate": 5e-3}
    train(load_recipe({**values, "stages": [first, second]}), folder / "run")
    return folder / "run"


def output_of(*arguments: Any, given: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert result.exit_code == 0, result.output
    return result


def certified(run: Path) -> dict[str, dict[str, Any]]:
    checks = json.loads(output_of("certify", run, "--json").stdout)["checks"]
    return {f"{check['part']}: {check['name']}": check for check in checks}


def test_certify_compares_good_with_bad_answers_or_uses_the_scores_of_an_evaluation(run: Path) -> None:
    checks = certified(run)
    for name in ("masks: answers", "masks: recorded example", "scores: loss"):
        assert checks[name]["status"] == "ok"
    assert "In 8 sample rows" in checks["masks: answers"]["what"]
    assert "Log-probability of good minus bad answers" in checks["scores: loss"]["what"]
    found = json.loads(output_of("eval", run, "--json").stdout)
    rewards = certified(run)["scores: rewards"]
    assert found["kind"] == "pairs" and rewards["figure"] == found["adapter"]["reward_accuracy"] > 0.5
    assert rewards["status"] == "ok"


def test_it_answers(run: Path) -> None:
    assert json.loads(output_of("generate", run, "-p", "What is 2 plus 3?", "--max-tokens", "4", "--json").stdout)[
        "text"
    ]
    assert output_of("chat", run, "--max-tokens", "2", given="/compare\nHello\n/quit\n").stdout.endswith("Bye.\n")
    running = Running(open_service(str(run), num_rows=2))
    try:
        body = {"model": run.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert running.post(body).json()["usage"]["completion_tokens"] == 2
    finally:
        running.stop()


@pytest.mark.parametrize("kind", ["merged", "ollama"])
def test_it_is_exported_and_the_export_is_certified(run: Path, tmp_path: Path, kind: str) -> None:
    found = output_of("export", run, "--to", kind, "--out", tmp_path / kind)
    assert f"{kind} passed" in found.output


def test_report_and_card_say_what_it_learned_from(run: Path) -> None:
    assert Path(output_of("report", run).stdout.strip()).read_text("utf-8").count("held-out pairs") > 0
    config = (run / "adapter" / "adapter_config.json").read_bytes()
    card = adapter_card(config, run, name="run")
    assert "| loss of pairs | dpo, beta 0.2 |" in card and "loss of answers" not in card
    assert "Loss of dpo on held-out rows during training: " in card
    assert "| reward accuracy |" in adapter_card(config, evaluated(run), name="run")


def evaluated(run: Path) -> Path:
    trillora.load(run).evaluate()
    return run
