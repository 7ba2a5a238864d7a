"""Planted defects at the ends of preference data: answers that were cut off, and stop tokens in their text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rendering import load
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from trillora.data.open import refusal_of
from trillora.data.prepare import Dataset
from trillora.data.rendering.preferences import SWAPPED
from trillora.data.tokenizing.endings import LEAST_CUT
from trillora.errors import TrilloraError

CHATML = chat_tokenizer("chatml")
SENTENCE = "It is Paris, they say. "
Row = dict[str, Any]


def pair(number: int, chosen: str, rejected: str, as_text: bool = False) -> Row:
    if as_text:
        return {"prompt": f"Question {number}: ", "chosen": chosen, "rejected": rejected}
    asked = [{"role": "user", "content": f"Question {number}"}]
    return {
        "prompt": asked,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def read(folder: Path, rows: list[Row], tokenizer: Any = CHATML, kind: str = "pairs", **options: Any) -> Dataset:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return load(folder / "a.jsonl", tokenizer, folder / "cache", rows=kind, **options)


def good(count: int) -> list[Row]:
    return [pair(number, SENTENCE * (1 + number % 3), f"It is number {number}.") for number in range(count)]


def cut_to_tokens(number: int, limit: int) -> str:
    """An answer as a program with a limit of tokens writes it."""
    ids = CHATML(f"{number} " + "which has many words and " * 60)["input_ids"][:limit]
    return str(CHATML.decode(ids)).rstrip()


def test_good_pairs_have_no_remark(tmp_path: Path) -> None:
    dataset = read(tmp_path, good(20))
    assert dataset.endings == [] and dataset.remarks == {} and refusal_of(dataset) is None


@pytest.mark.parametrize("as_text", [False, True], ids=["chat", "text"])
def test_an_answer_without_the_stop_text_that_the_other_has_was_cut_off(as_text: bool, tmp_path: Path) -> None:
    planted = [pair(n, "Paris.<|im_end|>", "It is a city in", as_text) for n in (0, 1)]
    dataset = read(tmp_path, [*[pair(9, "Yes.", "No.", as_text)] * 3, *planted])
    ((remark, count),) = dataset.remarks.items()
    assert count == 2 and "One answer of the pair ends with the text of a stop token" in remark
    assert remark.endswith("a.jsonl:4") and refusal_of(dataset) is None
    refusal = refusal_of(read(tmp_path, planted))
    assert refusal is not None and "All 2 rows have the same defect" in refusal.what and "cut off" in refusal.what
    assert refusal.where is not None and refusal.where.endswith("a.jsonl:1") and "complete the answers" in refusal.do


def test_a_stop_token_in_the_text_of_all_answers_is_refused(tmp_path: Path) -> None:
    rows = [pair(n, "Paris.<|im_end|>\n", "Rome.<|im_end|>") for n in range(3)]
    refusal = refusal_of(read(tmp_path, rows))
    assert refusal is not None and "ordinary text" in refusal.what and "remove that text" in refusal.do
    labelled = [{"prompt": "a", "completion": f"b{n}</s>", "label": bool(n % 2)} for n in range(4)]
    tokenizer = chat_tokenizer("zephyr")
    assert refusal_of(read(tmp_path, labelled, tokenizer, "labels")) is not None
    assert (
        refusal_of(read(tmp_path, [*labelled, {"prompt": "a", "completion": "b", "label": True}], tokenizer, "labels"))
        is None
    )


def test_an_end_token_that_the_tokenizer_does_not_flag_as_special_is_known_from_the_template(tmp_path: Path) -> None:
    inner = Tokenizer.from_str(CHATML.backend_tokenizer.to_str())
    inner.add_tokens([AddedToken("<end_of_turn>", normalized=False), AddedToken("<start_of_turn>", normalized=False)])
    template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)
    assert "<end_of_turn>" not in tokenizer.all_special_tokens
    assert read(tmp_path, good(3), tokenizer).endings == []
    rows = [pair(n, f"{n} is Paris.<end_of_turn>", "It is a city in") for n in range(3)]
    refusal = refusal_of(read(tmp_path, rows, tokenizer))
    assert refusal is not None and "cut off" in refusal.what


def test_marks_that_the_model_writes_itself_are_no_stop_tokens(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    rows = [pair(n, call, f"Number {n}.") for n in range(3)]
    assert read(tmp_path, rows, chat_tokenizer("qwen3")).endings == []


@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_answers_cut_at_a_length_limit_are_counted(unit: str, tmp_path: Path) -> None:
    if unit == "tokens":
        cut = [cut_to_tokens(number, 80) for number in range(LEAST_CUT)]
    else:  # of one length in characters, and of several in tokens
        cut = [f"{words * 20}"[:198].rstrip().ljust(200, "x") for words in ("the fox ", "zq7w ", "Paris is ")]
    rows = [*good(10), *(pair(10 + n, "It is Paris.", text) for n, text in enumerate(cut))]
    dataset = read(tmp_path, rows)
    (ending,) = dataset.endings
    assert ending.num_rows == LEAST_CUT and ending.first == 10
    limit = re.search(r"in the middle of a sentence at (\d+) (\w+)", ending.what)
    assert limit is not None and limit[2] == unit
    assert int(limit[1]) == 200 if unit == "characters" else 78 <= int(limit[1]) <= 80  # a space may end the 80 tokens
    assert refusal_of(dataset) is None
    refusal = refusal_of(read(tmp_path, rows[10:]))
    assert refusal is not None and "All 3 rows have the same defect" in refusal.what and "higher limit" in refusal.do


def test_equal_lengths_alone_are_no_defect(tmp_path: Path) -> None:
    codes = [pair(n, f"{n:02}" * 40, f"{n + 50:02}" * 40) for n in range(10)]
    assert read(tmp_path, codes).endings == [], "answers that never are sentences"
    few = [*good(10), *(pair(n, "It is Paris.", cut_to_tokens(n, 80)) for n in range(11, 10 + LEAST_CUT))]
    assert read(tmp_path, few).endings == [], "a few answers may have the same length by chance"
    ended = [*good(10), *(pair(n, "It is Paris.", f"{cut_to_tokens(n, 80)}.") for n in range(10, 20))]
    assert read(tmp_path, ended).endings == []
    short = [pair(n, "It is Paris.", "no") for n in range(10)]
    assert read(tmp_path, short).endings == []


def test_a_repeated_answer_is_not_taken_for_one_that_was_cut(tmp_path: Path) -> None:
    rows = [*good(10), *(pair(n, "It is Paris.", cut_to_tokens(0, 80)) for n in range(10, 20))]
    assert read(tmp_path, rows).endings == []


def test_scores_that_contradict_the_columns_are_counted_and_refused(tmp_path: Path) -> None:
    def scored(number: int, chosen: float, rejected: float) -> Row:
        scores = {"score_chosen": chosen, "score_rejected": rejected}
        return {**pair(number, "It is Paris.", "It is Rome."), **scores}

    swapped = [scored(n, 1 + n, 5 + n) for n in range(3)]
    some = read(tmp_path, [scored(8, 5, 1), scored(9, 4, 4), *swapped])
    assert some.remarks[SWAPPED] == 3 and refusal_of(some) is None
    refusal = refusal_of(read(tmp_path, swapped))
    assert refusal is not None and "In all 3 rows" in refusal.what and "lower score" in refusal.what
    assert "swap the two columns" in refusal.do
    others = [{**pair(n, "It is Paris.", "It is Rome."), "chosen_length": 1, "rejected_length": 2} for n in range(3)]
    assert SWAPPED not in read(tmp_path, others).remarks


def test_a_cached_store_says_and_refuses_the_same(tmp_path: Path) -> None:
    rows = [pair(n, "Paris.<|im_end|>", "It is a city in") for n in range(2)]
    first, again = read(tmp_path, rows), read(tmp_path, rows)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.endings == again.endings and str(refusal_of(first)) == str(refusal_of(again))


def test_a_template_without_a_stop_token_is_refused_for_pairs_too(tmp_path: Path) -> None:
    inner = Tokenizer.from_str(CHATML.backend_tokenizer.to_str())
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)
    with pytest.raises(TrilloraError, match="followed by a stop token, was not found"):
        read(tmp_path, good(2), tokenizer)


def test_ordinary_rows_are_not_looked_at(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>"}]}]
    assert read(tmp_path, rows, kind="answers").endings == []
