"""The interface to lm-evaluation-harness gives the figures of the harness' own Hugging Face model. `make harness` runs
this; without the package it is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from transformers import AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytest.importorskip("lm_eval", reason="lm_eval is not installed: `make harness` runs these tests")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its packages

PAIRS = [
    ("Question: What is 1 plus 2?\nAnswer:", " It is 3."),
    ("Question: What is 1 plus 2?\nAnswer: ", "It is 3."),  # the space goes to the continuation
    ("The quick brown fox", " jumps over the lazy dog"),
    ("", "It is 3."),
    ("word " * 300, " It is 3."),  # longer than the model: the beginning is lost
    ("A", " b"),
]
TASK = """\
task: plus
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("harness"))
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 8})), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module", params=["base", "adapter"])
def both(run: Path, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Our model and the harness' own."""
    from lm_eval.models.huggingface import HFLM

    from trillora.evaluation.harness import HarnessModel

    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    ours = HarnessModel(Generator.open(str(run)), tokenizer, adapted=request.param == "adapter")
    options = {"peft": str(run / "adapter")} if request.param == "adapter" else {}
    theirs = HFLM(pretrained=str(run.parent / "model"), device="cpu", dtype="float32", batch_size=2, **options)
    return ours, theirs


def instances(kind: str, all_arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(all_arguments)]


def test_log_probabilities_are_those_of_the_harness_own_model(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    found, expected = (model.loglikelihood(instances("loglikelihood", PAIRS)) for model in both)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=1e-4)  # float32
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert ours.max_length == theirs.max_length == 256
    texts = [("It is 3. " * 5,), ("long text " * 200,)]  # the second in several windows
    rolling = [model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for model in both]
    assert rolling[0] == pytest.approx(rolling[1], rel=1e-4)


def test_answers_are_those_of_the_harness_own_model(both: tuple[Any, Any]) -> None:
    options = [{"until": ["."], "max_gen_toks": 12}, {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False}]
    requests = [
        (text, dict(options[i % 2])) for i, text in enumerate(("What is 1?", "The fox", "It is", "word " * 300))
    ]
    found, expected = (model.generate_until(instances("generate_until", requests)) for model in both)
    assert found == expected and len(set(found)) > 1
    chat = [{"role": "user", "content": "What is 1 plus 2?"}]
    assert both[0].apply_chat_template(chat) == both[1].apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "It is"}]
    rendered = [model.apply_chat_template(begun, add_generation_prompt=False) for model in both]
    assert rendered[0] == rendered[1]


def test_a_task_without_network_through_the_command(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"What is {a} plus 1?", "choices": [" It is 3.", " 4"], "answer": a % 2} for a in range(6)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plus.yaml").write_text(TASK.format(file=file))
    arguments = ["eval", str(run), "--harness", "plus", "--include-path", str(tmp_path)]
    told = CliRunner().invoke(app, [*arguments, "--json"])
    assert told.exit_code == 0, told.output
    result = json.loads(told.stdout.splitlines()[-1])
    assert set(result) == {"plus"} and set(result["plus"]) == {"acc", "acc_norm"}
    assert set(result["plus"]["acc"]) == {"base", "adapter", "stderr"}
    shown = CliRunner().invoke(app, [*arguments, "--rows", "2", "--no-base"])
    assert shown.exit_code == 0 and "plus" in shown.stdout and "acc_norm" in shown.stdout
    missing = CliRunner().invoke(app, [*arguments[:3], "plas", *arguments[4:]])
    assert missing.exit_code == 2 and "did you mean plus?" in missing.stderr


def test_tasks_that_do_not_exist_are_refused(run: Path, tmp_path: Path) -> None:
    from trillora.evaluation.harness import run_tasks

    for options in ({"tasks": [" "], "include_path": tmp_path}, {"tasks": ["a"], "include_path": tmp_path / "no"}):
        with pytest.raises(TrilloraError) as caught:
            run_tasks(run, **options)  # type: ignore[arg-type]
        assert caught.value.where and caught.value.do
