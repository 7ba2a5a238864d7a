"""`trillora inspect` for pairs and labels: both answers, their lengths, and warnings with numbers to set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rich.console import Console
from typer.testing import CliRunner

from trillora.cli import app
from trillora.data.rendering import thinking
from trillora.data.summary import DataReport, inspect
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.report.data.page import page
from trillora.report.data.screen import show
from trillora.report.data.text import preference_warning

Look = Callable[..., DataReport]
TOKENIZER = chat_tokenizer("chatml")
LONG, SHORT = "It is because " + "of this and " * 5, "No idea."


def pair(number: int, chosen: str, rejected: str) -> dict[str, Any]:
    return {"question": f"Why {number}?", "chosen": chosen, "rejected": rejected}


def answer(number: int, label: bool, **more: Any) -> dict[str, Any]:
    return {"question": f"Why {number}?", "answer": SHORT, "label": label, **more}


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')

    def write_and_look(rows: list[Any], loss: Any, train: dict[str, Any] | None = None, **data: Any) -> DataReport:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        options = {"sequence_length": 256, "batch_size": 2, "loss": loss, **(train or {})}
        recipe = {"model": str(tmp_path / "model"), "data": {"path": "rows.jsonl", **data}, "train": options}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
        (stage,) = stages_of(load_recipe(tmp_path / "recipe.yaml"))
        return inspect(stage.recipe)

    return write_and_look


def printed(report: DataReport) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        show(report, console)
    return captured.get()


def num_tokens(text: str) -> int:
    """Of an answer with what ChatML writes after it."""
    return len(TOKENIZER(f"{text}<|im_end|>\n", add_special_tokens=False)["input_ids"])


def test_both_answers_are_shown_with_what_is_trained(look: Look) -> None:
    report = look([pair(0, LONG.strip(), SHORT)], "dpo")
    (example,) = report.examples
    assert (example.side, example.rejected is not None) == ("chosen", True)
    assert example.rejected is not None and example.rejected.side == "rejected"
    for side, text in ((example, LONG.strip()), (example.rejected, SHORT)):
        assert "".join(piece.text for piece in side.pieces if piece.trained) == f"{text}<|im_end|>"
        assert "".join(piece.text for piece in side.pieces).startswith("<|im_start|>system")
        assert side.trained_tokens == num_tokens(text) - 1 and side.tokens > side.trained_tokens
    screen = printed(report)
    assert "chat of 2 turns (one round), two answers" in screen
    chosen = screen.index(f"chosen: {example.trained_tokens} of {example.tokens} tokens trained")
    rejected = screen.index(f"rejected: {example.rejected.trained_tokens} of {example.rejected.tokens} tokens trained")
    assert chosen < screen.index("⟦It is because") < rejected < screen.index("⟦No idea.<|im_end|>⟧")
    html = page(report)
    columns = re.search(r'<div class="sides">(.*?)</section>', html, re.S)
    assert columns is not None and columns[1].count("<pre>") == 2
    assert "chosen: " in columns[1] and "rejected: " in columns[1]


def test_facts_of_pairs_equal_a_slow_count(look: Look) -> None:
    rows = [pair(0, LONG, SHORT), pair(0, SHORT, LONG + LONG), pair(1, LONG, "Yes."), pair(2, SHORT, "No idea!")]
    report = look(rows, "dpo")
    pairs = report.pairs
    assert pairs is not None
    lengths = [(num_tokens(row["chosen"]), num_tokens(row["rejected"])) for row in rows]
    assert (pairs.pairs, pairs.prompts) == (4, 3)
    assert pairs.chosen_longer == sum(a > b for a, b in lengths) == 2
    assert pairs.equally_long == sum(a == b for a, b in lengths) == 1
    assert pairs.mean_chosen == sum(a for a, _ in lengths) / 4
    assert pairs.mean_rejected == sum(b for _, b in lengths) / 4
    for shown in (printed(report), page(report)):
        assert "4, of 3 prompts" in shown and "the answers after the prompt" in shown
        assert "the chosen one in 50% of the pairs; equally long in 25%" in shown
        assert "Lengths of pairs in tokens (both answers, each with the prompt)" in shown
        assert "Nothing is lost: every pair fits into 256 tokens" in shown
    assert report.labels is None and report.lengths is not None
    assert report.lengths.longest > max(a + b for a, b in lengths)


@pytest.mark.parametrize(
    ("num_longer", "num_shorter", "words"),
    [(7, 3, "the longer one in 70%"), (3, 7, "the shorter one in 70%"), (6, 4, None), (4, 6, None), (5, 5, None)],
)
def test_a_length_that_decides_is_warned_about(
    look: Look, num_longer: int, num_shorter: int, words: str | None
) -> None:
    rows = [pair(n, LONG, SHORT) for n in range(num_longer)]
    rows += [pair(100 + n, SHORT, LONG) for n in range(num_shorter)]
    report = look(rows, "dpo")
    warning = preference_warning(report)
    assert (warning is None) == (words is None)
    if warning is not None and words is not None:
        assert f"{words} of the pairs whose lengths differ: a model learns the length first" in warning
        assert "sigmoid_norm or simpo" in warning and "train.ld_alpha below 1" in warning
        assert f"Warning: {warning}" in " ".join(printed(report).split()) and warning.split(":")[0] in page(report)


@pytest.mark.parametrize(
    ("loss", "options", "warns"),
    [
        ("dpo", {}, True),
        ("cpo", {}, True),
        (["sigmoid", "sft"], {}, True),
        ("sigmoid_norm", {}, False),
        ("simpo", {}, False),
        ("dpo", {"ld_alpha": 0.5}, False),
    ],
)
def test_losses_that_do_not_learn_lengths_are_not_warned_about(
    look: Look, loss: Any, options: dict[str, Any], warns: bool
) -> None:
    report = look([pair(n, LONG, SHORT) for n in range(4)], loss, options)
    assert report.pairs is not None and report.pairs.share_longer == 1
    assert (preference_warning(report) is not None) == warns


def test_labels_are_counted_and_each_has_an_example(look: Look) -> None:
    report = look([answer(n, n % 2 == 0) for n in range(8)], "kto")
    assert report.labels is not None and (report.labels.good, report.labels.bad) == (4, 4)
    assert report.pairs is None and preference_warning(report) is None
    assert [example.side for example in report.examples] == ["good", "bad"]
    screen = printed(report)
    assert "4 good, 4 bad" in screen and "4 good, 4 bad" in page(report)
    assert "(one round), a good answer, " in screen and "(one round), a bad answer, " in screen


def test_unbalanced_labels_get_the_weights_that_balance_them(look: Look) -> None:
    rows = [answer(n, n < 2) for n in range(10)]  # 2 good, 8 bad
    warning = preference_warning(look(rows, "kto"))
    assert warning is not None and "0.25 times the weight of the bad ones" in warning
    assert "train.desirable_weight from 4 to 5.33, or train.undesirable_weight from 0.188 to 0.25" in warning
    for balanced in ({"desirable_weight": 4}, {"desirable_weight": 5.33}, {"undesirable_weight": 0.25}):
        assert preference_warning(look(rows, "kto", balanced)) is None
    assert preference_warning(look(rows, "kto", {"desirable_weight": 6})) is not None
    for nothing in ({"desirable_weight": 0}, {"undesirable_weight": 0}):
        assert preference_warning(look(rows, "kto", nothing)) is None, "this is on purpose"
    # The weights of rows count: 2 good rows of weight 4 have the weight of 8 bad ones.
    weighted = [answer(n, n < 2, w=4 if n < 2 else 1) for n in range(10)]
    assert preference_warning(look(weighted, "kto", weight_key="w")) is None


def test_labels_of_one_kind_only_are_named(look: Look) -> None:
    for label, word in ((True, "good"), (False, "bad")):
        warning = preference_warning(look([answer(n, label) for n in range(3)], "kto"))
        assert warning is not None and f"All answers are {word}" in warning


def test_one_labelled_row_and_pairs_that_are_too_long_would_be_refused(look: Look) -> None:
    report = look([answer(0, True)], "kto")
    assert not report.verdict.ready and "at least two rows" in report.verdict.what
    report = look([pair(0, LONG, SHORT)], "dpo", {"sequence_length": 64})
    assert not report.verdict.ready and "hold both answers, each with the prompt" in report.verdict.what
    assert "1 pair is too long; training would refuse" in printed(report)


def test_ordinary_rows_have_no_facts_of_preferences(look: Look) -> None:
    report = look([{"question": "Why?", "answer": SHORT}], "sft")
    assert (report.pairs, report.labels, preference_warning(report)) == (None, None, None)
    assert report.examples[0].side == "" and report.examples[0].rejected is None


def test_a_data_file_of_pairs_is_inspected_with_its_loss(look: Look, tmp_path: Path) -> None:
    look([pair(0, LONG, SHORT)], "dpo")
    model, file = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")

    def invoke(*options: str) -> tuple[int, str]:
        result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["inspect", file, "--model", model, *options])
        return result.exit_code, " ".join((result.stdout + result.stderr).split())

    code, out = invoke("train.loss=sft")
    assert code == 2 and "set train.loss: dpo to train on both answers" in out
    code, out = invoke("train.sequence_length=256")  # its rows show what they are for
    assert code == 0 and "The data is ready to train on" in out and "1, of 1 prompt" in out
    code, out = invoke("train.loss=dpo", "train.sequence_length=256", "--json")
    found = json.loads(out)
    assert code == 0 and found["pairs"]["pairs"] == 1 and found["examples"][0]["rejected"]["side"] == "rejected"


def test_masked_thinking_is_shown_as_context_on_both_sides(look: Look) -> None:
    rows = [
        pair(n, f"<think>\nlet me see {n}\n</think>\n\nBecause.", f"<think>\nhm\n</think>\n\nNo {n}.") for n in range(2)
    ]
    report = look(rows, "dpo", thinking="mask")
    assert report.verdict.ready and report.remarks == {thinking.MASKED: 2}
    screen = printed(report)
    assert "2 rows  The thinking of an answer is read, but not trained on (data.thinking: mask)" in screen
    assert "let me see 0" in screen and "⟦Because.<|im_end|>⟧" in screen and "⟦No 0.<|im_end|>⟧" in screen
    none = look([pair(0, LONG.strip(), SHORT)], "dpo", thinking="mask")
    assert not none.verdict.ready and "no row has thinking" in none.verdict.what


def test_answers_that_were_cut_off_are_shown_and_refused_if_all_pairs_have_one(look: Look) -> None:
    cut = [pair(n, f"Because of {n}.<|im_end|>", "It is because") for n in range(2)]
    report = look([pair(7, "Because.", SHORT), *cut], "dpo")
    ((remark, count),) = report.remarks.items()
    assert count == 2 and "it was cut off; the first is" in remark and remark.endswith("rows.jsonl:2")
    assert report.verdict.ready and "it was cut off" in printed(report)
    refused = look(cut, "dpo").verdict
    assert not refused.ready and "All 2 rows have the same defect" in refused.what and refused.where is not None
