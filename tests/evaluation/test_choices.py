"""Multiple choice, several files, the forgetting meter and the gate, on a tiny run. The references are transformers
and PEFT."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.evaluation.forgetting import general_questions, general_texts
from trillora.evaluation.kinds.choices import ChoiceQuestion, read_choices, some_of
from trillora.evaluation.likelihood import TokenScorer
from trillora.evaluation.result import Evaluation
from trillora.generation.generator import Generator
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

SHOWN = 12
QUESTIONS = [
    {"question": f"What is {a} plus {a + 1}?", "choices": [f"It is {2 * a + k}." for k in (0, 1, 2)], "answer": "B"}
    for a in range(SHOWN)
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("choices"), tiny_run.llama(num_layers=1))
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 6, "sequence_length": 96})), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def questions(run: Path) -> Path:
    return write(run.parent / "questions.jsonl", QUESTIONS)


@pytest.fixture(scope="module")
def found(run: Path, questions: Path) -> Evaluation:
    """Two files, the forgetting meter and a gate in one evaluation."""
    gate = "questions.jsonl:choice_accuracy>=0, chats.jsonl:loss<0, forgetting<=1, kl>0"
    return evaluate(run, [run.parent / "chats.jsonl", questions], max_tokens=4, forgetting=True, gate=gate)


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def models(run: Path) -> dict[str, Any]:
    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32).eval()

    return {"base": base(), "adapter": PeftModel.from_pretrained(base(), run / "adapter").eval()}


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of every token after the first, one sequence at a time."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].double()
    return logits.log_softmax(-1)


def choice_scores(model: Any, prompt: list[int], choices: list[list[int]]) -> tuple[int, int]:
    totals, means = [], []
    for choice in choices:
        logs = log_probabilities(model, prompt + choice)[len(prompt) - 1 :]
        scores = [float(logs[i, token]) for i, token in enumerate(choice)]
        totals.append(sum(scores))
        means.append(sum(scores) / len(scores))
    return int(np.argmax(totals)), int(np.argmax(means))


def most_likely(model: Any, tokenizer: Any, question: ChoiceQuestion) -> int:
    """All choices in one batch, padded at the end, which a causal model does not see."""
    prompt = f"Question: {question.question}\nAnswer:"
    texts = [tokenizer(f"{prompt} {choice}")["input_ids"] for choice in question.choices]
    start, longest = len(tokenizer(prompt)["input_ids"]), max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        logs = model(input_ids=ids).logits.double().log_softmax(-1)
    totals = [sum(float(logs[i, j - 1, text[j]]) for j in range(start, len(text))) for i, text in enumerate(texts)]
    return int(np.argmax(totals))


def test_the_chosen_answers_are_the_most_likely_for_transformers_and_peft(run: Path, found: Evaluation) -> None:
    chats, choices = found.files
    assert choices.kind == "choices" and choices.num_rows == SHOWN and choices.chance == pytest.approx(1 / 3)
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    for which, model in models(run).items():
        picked = []
        for row in QUESTIONS:
            asked = [{"role": "user", "content": row["question"]}]
            text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            options = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in row["choices"]]
            picked.append(choice_scores(model, prompt, options))
        scores = getattr(choices, which)
        assert scores.choice_accuracy == np.mean([total == 1 for total, _ in picked])
        assert scores.choice_accuracy_norm == np.mean([mean == 1 for _, mean in picked])
        said = [getattr(example, which) for example in choices.examples]
        assert said == [row["choices"][total] for row, (total, _) in zip(QUESTIONS, picked, strict=True)]
        assert len(set(picked)) > 1  # else it would prove little
    assert choices.adapter.loss is None and choices.examples[0].prompt.splitlines()[1] == "A. It is 0."
    assert "choice_accuracy" in choices.intervals and "loss" in chats.intervals


def test_the_columns_of_the_training_rows_do_not_matter(
    run: Path, questions: Path, found: Evaluation, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    options = ["data.columns={messages: chat}", "data.drop_keys=[answer]", "data.weight_key=importance"]
    own = evaluate(tmp_path / "run", questions, overrides=options)
    assert (own.base, own.adapter) == (found.files[1].base, found.files[1].adapter)


def test_several_files_have_their_own_results_and_means(run: Path, found: Evaluation) -> None:
    chats, choices = found.files
    assert (found.num_rows, found.data) == (21 + SHOWN, "chats.jsonl, questions.jsonl")
    assert found.adapter.loss == chats.adapter.loss  # the only file that has one
    assert found.adapter.choice_accuracy == choices.adapter.choice_accuracy
    written = json.loads((run / "eval.json").read_text("utf-8"))
    assert written == found.to_dict()
    assert [file["label"] for file in written["files"]] == ["chats.jsonl", "questions.jsonl"]
    alone = evaluate(run, run.parent / "chats.jsonl", max_tokens=4)
    assert alone.adapter == chats.adapter and alone.intervals == chats.intervals
    assert alone.files == () and alone.forgetting is None


def test_forgetting_is_the_accuracy_lost_and_the_divergence_is_that_of_the_logits(run: Path, found: Evaluation) -> None:
    meter = found.forgetting
    assert meter is not None
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    both = models(run)
    kl = []
    for text in general_texts():
        tokens = tokenizer(text)["input_ids"]
        p, q = (log_probabilities(model, tokens) for model in both.values())
        kl += (p.exp() * (p - q)).sum(-1).tolist()
    assert meter.num_tokens == len(kl) and meter.kl == pytest.approx(np.mean(kl), rel=1e-4)  # float32 logits
    asked = general_questions()
    for which, model in both.items():
        right = [most_likely(model, tokenizer, question) == question.right for question in asked]
        assert np.mean(right) == pytest.approx(getattr(meter, f"{which}_accuracy"))
    assert meter.forgetting == max(meter.base_accuracy - meter.adapter_accuracy, 0)
    assert meter.interval.difference == pytest.approx(meter.adapter_accuracy - meter.base_accuracy)


def test_an_adapter_that_changes_nothing_does_not_diverge(run: Path) -> None:
    generator = Generator.open(str(run))
    texts, base = [(1, 5, 9, 12), (7, 8)], generator.neutral_adapter
    found = TokenScorer(generator).divergence(texts, base, base)
    assert found.shape == (4,) and (found == 0).all()
    assert (TokenScorer(generator).divergence(texts, base, generator.adapter) > 0).all()


def test_the_gate_is_judged_printed_and_decides_the_exit_code(run: Path, questions: Path, found: Evaluation) -> None:
    assert [condition.met for condition in found.gate] == [True, False, True, True] and not found.passed
    arguments = ["eval", str(run), "--data", str(questions), "--rows", "4"]
    passed = CliRunner().invoke(app, [*arguments, "--gate", "choice_accuracy>=0"])
    assert passed.exit_code == 0 and "gate passed" in passed.stdout and "choice, per token" in passed.stdout
    failed = CliRunner().invoke(app, [*arguments, "--gate", "choice_accuracy>1, loss<1", "--json"])
    assert failed.exit_code == 3
    assert [condition["met"] for condition in json.loads(failed.stdout)["gate"]] == [False, False]


def test_a_wrong_gate_is_refused_before_anything_runs(run: Path, questions: Path) -> None:
    events: list[Any] = []
    for gate, options in (
        ("exact_mach>=1", {}),
        ("base.loss<1", {"with_base": False}),
        ("forgetting<1", {"with_base": False}),
        ("fields.area>0", {}),
    ):
        with pytest.raises(TrilloraError, match=r"Unknown metric|base model|No expected answer"):
            evaluate(run, questions, gate=gate, listener=events.append, **options)  # type: ignore[arg-type]
    assert not any("Model" in str(event) for event in events)  # no weight was read


def test_an_answer_is_an_index_a_letter_or_a_text(tmp_path: Path) -> None:
    rows = [
        {"question": "?", "choices": ["x", "y", "z"], "answer": answer, "more": 1} for answer in (1, "B", " b ", "y")
    ]
    rows += [{"prompt": "?", "choices": ["B", "A"], "answer": "A"}]  # a text comes before a letter
    read = read_choices(str(write(tmp_path / "a.jsonl", rows)))
    assert read == [ChoiceQuestion("?", ("x", "y", "z"), 1)] * 4 + [ChoiceQuestion("?", ("B", "A"), 1)]
    for number, other in enumerate(([{"text": "no"}], ["no object"], [])):
        assert read_choices(str(write(tmp_path / f"{number}.jsonl", list(other)))) is None
    assert [question.right for question in some_of([ChoiceQuestion("?", ("a",), n) for n in range(9)], 3)] == [0, 4, 8]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"question": "?", "choices": ["a", "b"]}, "none of its 2 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": 2}, "none of its 2 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": True}, "none of its 2 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": "C"}, "none of its 2 choices"),
        ({"question": "?", "choices": ["a", "a"], "answer": 0}, "same one twice"),
        ({"question": "?", "choices": ["a"], "answer": 0}, "1 choices"),
        ({"question": "?", "choices": {"text": ["a"]}, "answer": 0}, "not a list of texts"),
        ({"question": "?", "choices": ["a", ""], "answer": 0}, "not a list of texts"),
        ({"choices": ["a", "b"], "answer": 0}, "no question"),
        ({"question": "?", "answer": "a"}, "not a list of texts"),
    ],
)
def test_a_bad_question_is_refused_with_its_line(row: dict[str, Any], what: str, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.jsonl", [QUESTIONS[0], row])
    with pytest.raises(TrilloraError, match=what) as caught:
        read_choices(str(file))
    assert str(caught.value.where).endswith("bad.jsonl:2") and caught.value.do


def test_harness_tasks_without_the_harness_name_the_command_to_install_it(run: Path) -> None:
    result = CliRunner().invoke(app, ["eval", str(run), "--harness", "no_such_task"])
    assert result.exit_code == 2
    if importlib.util.find_spec("lm_eval") is None:
        assert 'pip install "lm_eval>=' in result.stderr
    for wrong in (["--harness", "a", "--gate", "loss<1"], ["--include-path", "."]):
        assert CliRunner().invoke(app, ["eval", str(run), *wrong]).exit_code == 2


def test_the_general_questions_are_sound() -> None:
    asked = general_questions()
    assert 60 <= len(asked) <= 100 and len({question.question for question in asked}) == len(asked)
    assert {len(question.choices) for question in asked} == {3}
    # Guessing one place gives nothing: the right answers are spread over the places.
    assert max(sum(question.right == place for question in asked) for place in range(3)) < len(asked) / 2
    assert len(general_texts()) == 12
