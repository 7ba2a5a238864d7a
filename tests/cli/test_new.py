"""`trillora new`: five questions, or options, make a recipe that works."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from early_mistakes import write_world
from typer.testing import CliRunner, Result

import trillora
from trillora.cli import app
from trillora.data.rendering.formats import convert
from trillora.data.rendering.sandbox import RowTemplate
from trillora.early.training import check_start
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import Recipe


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, ["new", *arguments], input=answers)


def made(*arguments: str) -> Recipe:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return load_recipe("qa.yaml")


def test_options_make_a_recipe_that_starts(world: Path) -> None:
    recipe = made("--model", "./model", "--data", "qa.csv")
    assert recipe.data is not None and recipe.data.path == str(world / "qa.csv")
    check_start(recipe, world / "runs" / "qa")
    text = (world / "qa.yaml").read_text()
    assert "  path: qa.csv\n" in text and "# split: {validation: 0.1, test: 0.1}" in text


def test_the_next_commands_are_printed() -> None:
    output = invoke("--model", "smollm2", "--data", "qa.csv", "--out", "runs/first").output
    assert "trillora inspect qa.yaml" in output and "trillora train qa.yaml --out runs/first" in output
    output = invoke("--model", "smollm2", "--data", "qa.csv", "--on", "colab").output
    assert "preflight qa.yaml --on colab" in output and "launch colab qa.yaml" in output


def test_a_system_prompt_becomes_a_template() -> None:
    recipe = made("--model", "smollm2", "--data", "qa.csv", "--system", 'Answer: "{{ in JSON }}".', "--on", "cpu")
    assert recipe.hardware.backend == "cpu" and recipe.data is not None and recipe.data.template is not None
    template = recipe.data.template
    assert template.system == '{% raw %}Answer: "{{ in JSON }}".{% endraw %}'
    assert (template.user, template.assistant) == ("{{ question }}", "{{ answer }}")


def test_a_system_prompt_needs_questions_and_answers(world: Path) -> None:
    (world / "texts.jsonl").write_text('{"text": "one"}\n')
    result = invoke("--model", "smollm2", "--data", "texts.jsonl", "--system", "Be brief.")
    assert result.exit_code == 2 and "leave out --system" in result.output
    assert not (world / "texts.yaml").exists()


def test_a_system_prompt_keeps_the_input_of_every_row(world: Path) -> None:
    """Rows as the format alpaca renders them, with the system prompt; the first row has no input."""
    rows: list[dict[str, Any]] = [
        {"instruction": "Say hello.", "input": "", "output": "Hello."},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Add.", "input": None, "output": "What?"},
        {"instruction": "Say bye.", "output": "Bye."},
    ]
    (world / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = made("--model", "smollm2", "--data", "qa.jsonl", "--system", "Be brief.")
    assert recipe.data is not None and recipe.data.template is not None
    template = RowTemplate(recipe.data.template.model_dump(exclude_none=True))
    for row in rows:
        assert template.convert(row) == convert({**row, "system": "Be brief."}, "alpaca")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "1+1?"}], "completion": [{"role": "assistant", "content": "2"}]},
        {"question": "1+1?", "answer": "2", "system": "Count."},
        {"question": "1+1?", "answer": "2", "tools": [{"name": "add"}]},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1?", "completion": "3", "label": False},
    ],
)
def test_a_system_prompt_is_refused_where_a_template_would_lose_a_part_of_the_row(world: Path, row: object) -> None:
    (world / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert invoke("--model", "smollm2", "--data", "rows.jsonl", "--recipe", "a.yaml").exit_code == 0
    result = invoke("--model", "smollm2", "--data", "rows.jsonl", "--system", "Be brief.", "--recipe", "b.yaml")
    assert result.exit_code == 2 and "leave out --system" in result.output, result.output
    assert not (world / "b.yaml").exists()


def test_without_a_terminal_the_missing_options_are_named() -> None:
    result = invoke()
    assert result.exit_code == 2 and result.output.startswith("--model and --data not given")
    assert "trillora new --model smollm2 --data qa.csv" in result.output


def test_on_a_terminal_five_questions_are_asked(world: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(trillora.__file__).parent.parent)}
    command = [sys.executable, "-m", "trillora", "new"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=world, env=environment) as process:
        os.write(ours, b"./model\nqa.csv\ncpu\nBe brief.\n\n")
        assert process.wait(timeout=120) == 0
    output = os.read(ours, 1 << 16).decode()
    questions = ("Base model", "File with the rows", "Where does it run", "System prompt", "Folder of the run")
    assert all(question in output for question in questions), output
    recipe = load_recipe(world / "qa.yaml")
    assert (recipe.hardware.backend, recipe.model.name) == ("cpu", str(world / "model"))
    assert "train qa.yaml --out runs/qa" in output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--data", "qs.csv"), "did you mean 'qa.csv'?"),
        (("--data", "qa.csv", "--on", "kagle"), "did you mean kaggle?"),
        (("--data", "qa.csv", "--recipe", "ok.yaml"), "choose another file with --recipe"),
    ],
)
def test_a_wrong_answer_writes_nothing(world: Path, words: tuple[str, ...], answer: str) -> None:
    before = {path: path.read_bytes() for path in world.glob("*.*")}
    result = invoke("--model", "smollm2", *words)
    assert result.exit_code == 2 and answer in result.output
    assert {path: path.read_bytes() for path in world.glob("*.*")} == before


def test_the_same_answers_again_change_nothing() -> None:
    assert made("--model", "smollm2", "--data", "qa.csv") == made("--model", "smollm2", "--data", "qa.csv")
