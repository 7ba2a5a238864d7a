"""Pairs and labelled answers in an evaluation. The references for log-probabilities are transformers and PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_run
import torch
from peft import PeftModel
from rendering import load
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.data.documents import answers_alone
from trillora.data.rendering.preferences import rows_shown_by
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.evaluation.kinds.preferences import Compared, with_rewards
from trillora.evaluation.likelihood import DocumentScores
from trillora.evaluation.result import Evaluation
from trillora.evaluation.rows import read_rows, recipe_with_data
from trillora.events import Alarm, Preferences, ignore_events
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.report.run.write import write_report
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

ROUNDING = 2e-5  # float32 sums in another order
NUM_PAIRS = 24


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def some_pairs() -> list[dict[str, Any]]:
    """Prompts of one and of three turns. The chosen answer is the longer one in every third row, so that some pairs are
    right and some wrong for any model."""
    rows = []
    for a in range(NUM_PAIRS):
        prompt = [turn("user", f"What is {a} plus {a + 1}?")]
        if a % 4 == 0:
            prompt = [turn("user", "Hello"), turn("assistant", "Yes?"), *prompt]
        answers = [f"It is {2 * a + 1}.", f"{3 * a}" if a % 3 == 0 else f"It may be {3 * a}, who knows?"]
        chosen, rejected = ([turn("assistant", answer)] for answer in answers)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def trained(folder: Path, name: str, file: str, **options: Any) -> Path:
    options = {"steps": 6, "sequence_length": 96, "batch_size": 4, **options}
    data = {"path": str(folder / file), "split": {"validation": 0, "test": 0.3}}
    train(load_recipe(tiny_run.recipe(folder, data=data, train=options)), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("pairs"), tiny_run.llama(num_layers=1))
    tiny_run.write_pairs(folder / "train.jsonl")
    tiny_run.write_labels(folder / "labels.jsonl")
    write(folder / "pairs.jsonl", some_pairs())
    return folder


@pytest.fixture(scope="module")
def dpo(folder: Path) -> Path:
    return trained(folder, "dpo", "train.jsonl", loss="dpo", learning_rate=5e-3)


@pytest.fixture(scope="module")
def sft(folder: Path) -> Path:
    return trained(folder, "sft", "chats.jsonl")


@pytest.fixture(scope="module")
def tested(dpo: Path, folder: Path) -> Evaluation:
    return evaluate(dpo, folder / "pairs.jsonl")


class Reference:
    """The log-probability of an answer, one sequence at a time, by transformers and PEFT."""

    def __init__(self, run: Path) -> None:
        def base() -> Any:
            return AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32).eval()

        self.models = {"base": base(), "adapter": PeftModel.from_pretrained(base(), run / "adapter").eval()}
        self.tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")

    def tokens(self, prompt: list[dict[str, str]], answer: str) -> tuple[list[int], list[int]]:
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        parts = (self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, f"{answer}<|im_end|>"))
        return next(parts), next(parts)

    def log_probs(self, which: str, prompt: list[dict[str, str]], answer: str) -> list[float]:
        asked, said = self.tokens(prompt, answer)
        with torch.no_grad():
            logits = self.models[which](input_ids=torch.tensor([asked + said])).logits[0].double()
        logs = logits.log_softmax(-1)[len(asked) - 1 : -1]
        return [float(logs[i, token]) for i, token in enumerate(said)]


def halves(margins: list[float]) -> float:
    return float(np.mean([(margin > 0) + 0.5 * (margin == 0) for margin in margins]))


def test_log_probabilities_are_the_same_in_transformers_and_peft(dpo: Path, tested: Evaluation) -> None:
    assert (tested.kind, tested.num_rows, tested.chance) == ("pairs", NUM_PAIRS, 0.5) and tested.base is not None
    reference, ratios = Reference(dpo), np.zeros((2, NUM_PAIRS))
    for which in ("base", "adapter"):
        found = getattr(tested, which)
        both: list[list[list[float]]] = []
        for row in some_pairs():
            answers = [row[side][0]["content"] for side in ("chosen", "rejected")]
            both.append([reference.log_probs(which, row["prompt"], answer) for answer in answers])
        sums = np.array([[sum(logs) for logs in pair] for pair in both])
        means = [np.mean(chosen) - np.mean(rejected) for chosen, rejected in both]
        ratios += (1 if which == "adapter" else -1) * sums.T
        assert found.pair_accuracy == halves([chosen - rejected for chosen, rejected in sums])
        assert found.pair_accuracy_norm == halves(means)
        tokens = np.concatenate([chosen for chosen, _ in both])
        assert found.loss == pytest.approx(-tokens.mean(), rel=ROUNDING)
        for example, row, (chosen, rejected) in zip(tested.examples, some_pairs(), sums, strict=False):
            shown = example.scores[which]
            assert [shown["chosen"], shown["rejected"]] == pytest.approx([chosen, rejected], rel=ROUNDING, abs=1e-4)
            preferred = row["chosen" if chosen > rejected else "rejected"][0]["content"]
            assert (example.prompt, example.expected) == (row["prompt"][-1]["content"], row["chosen"][0]["content"])
            assert getattr(example, which) == preferred
        assert 0 < found.pair_accuracy < 1  # else it would prove little
    margins = (ratios[0] - ratios[1]).tolist()
    assert tested.adapter.reward_accuracy == halves(margins)
    assert tested.adapter.reward_margin == pytest.approx(np.mean(margins), rel=1e-4)  # of differences
    assert tested.base.reward_accuracy is None and tested.base.reward_margin is None


def test_the_share_of_right_rewards_has_wilsons_interval_and_the_margin_a_drawn_one(tested: Evaluation) -> None:
    share = tested.adapter.reward_accuracy
    assert share is not None and share > 0.5
    interval = tested.intervals["reward_accuracy"]
    low, high = Preferences(NUM_PAIRS, 0, 0, 0, share, 0, 0).interval
    assert (interval.low, interval.high) == (low - 0.5, high - 0.5) and interval.difference == share - 0.5
    margin = tested.intervals["reward_margin"]
    assert margin.difference == tested.adapter.reward_margin and margin.low < margin.difference < margin.high
    assert {"pair_accuracy", "pair_accuracy_norm", "loss"} < set(tested.intervals)


def test_all_answers_right_leave_an_interval() -> None:
    """Drawn rows would all be right, and the interval would be a point."""
    low, high = Preferences(20, 0, 0, 0, 1.0, 0, 0).interval
    assert (round(low, 3), high) == (0.839, 1.0)  # statsmodels: proportion_confint(20, 20, method="wilson")


def test_a_file_decides_how_it_is_tested_and_not_the_run(
    dpo: Path, sft: Path, folder: Path, tested: Evaluation
) -> None:
    files = [folder / "chats.jsonl", folder / "pairs.jsonl"]
    on_pairs, on_chats = (evaluate(run, files, max_tokens=2) for run in (dpo, sft))
    for found in (on_pairs, on_chats):
        chats, pairs = found.files
        assert (chats.kind, pairs.kind, found.kind) == ("short", "pairs", "mixed")
        assert chats.adapter.exact_match is not None
        assert chats.adapter.pair_accuracy is None and chats.chance is None
        assert found.adapter.pair_accuracy == pairs.adapter.pair_accuracy
    # The base finds the same with either run.
    assert [file.base for file in on_pairs.files] == [file.base for file in on_chats.files]
    assert on_pairs.files[1].base == tested.base and on_pairs.files[1].adapter == tested.adapter
    assert on_chats.files[1].adapter != tested.adapter


def test_its_own_test_rows_are_pairs_and_the_base_may_be_left_out(dpo: Path) -> None:
    found = evaluate(dpo, with_base=False)
    assert found.kind == "pairs" and "test split" in found.data and found.num_rows < 40
    assert found.adapter.pair_accuracy is not None and found.adapter.reward_accuracy is None
    assert found.base is None and found.intervals == {} and found.examples[0].base is None


def test_labels_are_right_if_good_answers_became_more_likely_and_bad_ones_less(sft: Path, folder: Path) -> None:
    found = evaluate(sft, folder / "labels.jsonl", max_rows=15)
    assert (found.kind, found.num_rows, found.examples) == ("labels", 15, ())
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text("utf-8").splitlines()]
    rows, reference = [rows[i] for i in np.linspace(0, 39, 15).round().astype(int)], Reference(sft)
    ratios, of_good = [], []
    for row in rows:
        base, own = (reference.log_probs(w, row["prompt"], row["completion"][0]["content"]) for w in reference.models)
        ratios.append(sum(own) - sum(base))
        of_good += own if row["label"] else []
    is_good = np.array([row["label"] for row in rows])
    signed = np.where(is_good, ratios, np.negative(ratios))
    assert found.adapter.reward_accuracy == np.mean(signed > 0) and 0 < np.mean(signed > 0) < 1
    margin = np.mean(np.array(ratios)[is_good]) - np.mean(np.array(ratios)[~is_good])
    assert found.adapter.reward_margin == pytest.approx(margin, rel=1e-4)
    assert found.adapter.loss == pytest.approx(-np.mean(of_good), rel=ROUNDING)
    assert found.adapter.pair_accuracy is None


def test_without_a_good_answer_there_is_no_loss_and_no_margin(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = load(folder / "labels.jsonl", tokenizer, tmp_path, rows="labels").documents()
    bad = rows.take(rows.weights_N < 0)
    one = Compared(bad, DocumentScores(*(np.ones(len(bad)) for _ in range(3))))
    assert len(bad) == 20 and set(one.sums | one.rewards(one)) == {"reward_accuracy"}


def test_equal_answers_count_half_and_weights_count_in_the_loss_only(dpo: Path, folder: Path, tmp_path: Path) -> None:
    rows = [{**row, "importance": weight} for row, weight in zip(some_pairs(), (2, 1, 1), strict=False)]
    file = write(tmp_path / "weighted.jsonl", rows)
    run_recipe = load_run_recipe(dpo, ["data.weight_key=importance"])
    recipe = recipe_with_data(run_recipe, file, dpo / "adapter")
    _, pairs = read_rows(recipe, AutoTokenizer.from_pretrained(folder / "model"), False, None, ignore_events)
    assert pairs.weights_N.tolist() == [2, 1, 1]
    loss, tokens = np.array([4.0, 4.0, 1.0, 2.0, 6.0, 5.0]), np.array([2.0, 4.0, 1.0, 1.0, 3.0, 2.0])
    base = Compared(pairs, DocumentScores(loss, tokens, tokens))
    moved = Compared(pairs, DocumentScores(loss + np.array([0, 0, 0, 1, 3, 0]), tokens, tokens))
    sums = with_rewards({"base": base, "adapter": moved})
    assert sums["base"]["pair_accuracy"].value == (0.5 + 1 + 0) / 3
    assert sums["base"]["pair_accuracy_norm"].value == (0 + 1 + 1) / 3
    assert sums["base"]["loss"].value == (2 * 4 + 1 + 6) / (2 * 2 + 1 + 3)
    assert sums["adapter"]["reward_accuracy"].value == (0.5 + 1 + 0) / 3
    assert sums["adapter"]["reward_margin"].value == pytest.approx((0 + 1 - 3) / 3)


def test_the_sides_of_a_pair_are_slices_of_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    dataset = load(folder / "pairs.jsonl", AutoTokenizer.from_pretrained(folder / "model"), tmp_path, rows="pairs")
    pairs = dataset.documents()
    alone = answers_alone(pairs)
    assert len(alone) == 2 * len(pairs) == 2 * NUM_PAIRS and alone.tokens is pairs.tokens
    for number in range(NUM_PAIRS):
        for side, part in enumerate(pairs[number].parts):
            found = alone[2 * number + side]
            assert (found.tokens == part.tokens).all() and (found.supervised == part.supervised).all()
            assert alone.trained_N[2 * number + side] == part.num_supervised > 0 and found.weight == 1
    assert (alone.rows_N == np.repeat(pairs.rows_N, 2)).all() and not alone.are_pairs


def test_a_pair_needs_room_for_each_side_not_for_both_together(dpo: Path, folder: Path, tmp_path: Path) -> None:
    question = [turn("user", "Say it. " * 8)]
    rows = [
        {"prompt": question, "chosen": [turn("assistant", "No. " * n)], "rejected": [turn("assistant", "Yes.")]}
        for n in (1, 80)
    ]
    recipe = recipe_with_data(load_run_recipe(dpo), write(tmp_path / "long.jsonl", rows), dpo / "adapter")
    events: list[Any] = []
    _, documents = read_rows(recipe, AutoTokenizer.from_pretrained(folder / "model"), False, None, events.append)
    assert documents.rows_N.tolist() == [0]
    assert documents.lengths_N[0] > 96 > documents.longest_sides_N[0]
    assert [event.text for event in events if isinstance(event, Alarm)] == [
        "1 row is longer than the run's 96 tokens and not tested."
    ]


def test_a_gate_is_about_pairs_too(dpo: Path, folder: Path) -> None:
    arguments = ["eval", str(dpo), "--data", str(folder / "pairs.jsonl"), "--rows", "12"]
    gate = "pair_accuracy>=0, base.pair_accuracy_norm<=1, reward_margin>0"
    passed = CliRunner().invoke(app, [*arguments, "--gate", gate])
    assert passed.exit_code == 0, passed.output
    for shown in ("gate passed", "pair accuracy", "reward margin", "adapter prefers", "log-probability"):
        assert shown in passed.stdout
    failed = CliRunner().invoke(app, [*arguments, "--gate", "pair_accuracy>1, reward_accuracy>=0", "--json"])
    assert failed.exit_code == 3
    found = json.loads(failed.stdout)
    assert [condition["met"] for condition in found["gate"]] == [False, True]
    assert found == json.loads((dpo / "eval.json").read_text("utf-8"))
    assert found["kind"] == "pairs" and set(found["examples"][0]["scores"]["adapter"]) == {"chosen", "rejected"}
    assert found["intervals"]["reward_accuracy"]["beyond_chance"] in (True, False)
    page = write_report(dpo).read_text("utf-8")
    assert "reward accuracy" in page and "Adapter prefers (log-probabilities: chosen -" in page
    for gate, options in (("reward_margin>0", {"with_base": False}), ("base.reward_accuracy>0", {})):
        with pytest.raises(TrilloraError, match="base"):
            evaluate(dpo, folder / "pairs.jsonl", gate=gate, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "usual", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "answers", "pairs"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "answers", "pairs"),  # half of one: refused later
        ({"messages": [turn("user", "a")], "rejected_response": "c"}, "labels", "pairs"),
        ({"prompt": "a", "completion": "b"}, "pairs", "answers"),
        ({"prompt": "a", "completion": "b", "chosen": None}, "pairs", "answers"),
        ({"prompt": "a", "completion": "b", "label": False}, "answers", "labels"),
        ({"prompt": "a", "completion": "b", "label": "True"}, "pairs", "labels"),
        ({"prompt": "a", "completion": "b", "label": 1}, "labels", "labels"),
        ({"prompt": "a", "completion": "b", "label": 1}, "answers", "answers"),  # a class
        ({"prompt": "a", "completion": "b", "label": "spam"}, "pairs", "answers"),
        ({"text": "a", "label": True}, "answers", "answers"),
    ],
)
def test_the_keys_of_a_row_show_what_it_is_for(row: dict[str, Any], usual: Any, expected: str) -> None:
    assert rows_shown_by(row, usual) == expected


def test_the_first_row_that_shows_it_decides_in_files_of_any_kind(dpo: Path, sft: Path, folder: Path) -> None:
    first = [{"nothing": 1}, "no object", {"prompt": "a", "chosen": "b", "rejected": "c"}, {"text": "a"}]
    damaged = write(folder / "damaged.jsonl", first)
    table = pyarrow.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    shutil.make_archive(str(folder / "archive"), "zip", folder, "pairs.jsonl")
    for file in (damaged, folder / "pairs.parquet", folder / "archive.zip"):
        assert recipe_with_data(load_run_recipe(sft), file, sft / "adapter").train.rows == "pairs"
    chats = folder / "chats.jsonl"
    given = load_run_recipe(dpo, ["data.format=preference"])
    recipe = recipe_with_data(given, chats, dpo / "adapter")
    assert (recipe.train.rows, recipe.data.format) == ("answers", "auto")
    empty = write(folder / "empty.jsonl", [])
    assert recipe_with_data(load_run_recipe(dpo), empty, dpo / "adapter").train.rows == "pairs"
    # A recipe that says how rows are read is believed.
    template = load_run_recipe(sft, ['data.template.prompt="{{ prompt }}"', 'data.template.completion="{{ chosen }}"'])
    for told in (template, load_run_recipe(sft, ["data.format=messages"])):
        assert recipe_with_data(told, folder / "pairs.jsonl", sft / "adapter").train.rows == "answers"
