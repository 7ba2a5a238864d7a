"""F1, ROUGE, chrF and BLEU: values worked out by hand, and sacrebleu's own."""

from __future__ import annotations

import builtins
import random
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from trillora.evaluation.kinds.answers import judge_answers, kind_of
from trillora.evaluation.text_metrics import TEXT_METRICS, Comparison, common_subsequence, f1, rouge

EXPECTED = ["The quick brown fox jumps over the lazy dog today.", "It is raining in the north.", "x", "Yes, really."]
ANSWERS = ["The quick brown fox jumped over a lazy dog.", "It rains in the north of a country.", "", "Yes, really."]


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        ("The cat sat.", "a cat sat down", 0.8),  # {cat, sat} and {cat, sat, down}: precision 2/3, recall 1
        ("Paris", "paris!", 1.0),
        ("42", "43", 0.0),
        ("the", "a", 1.0),  # nothing is left of both
        ("the", "dog", 0.0),
        ("go go go", "go", 0.5),  # a bag counts words: precision 1, recall 1/3
        ("", "", 1.0),
    ],
)
def test_f1_is_that_of_squad(expected: str, answer: str, score: float) -> None:
    assert f1(expected, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("expected", "answer", "scores"),
    [
        # 4 of 6 and 7 words; the pair "the cat" of 5 and 6 pairs; "the cat on mat" in order.
        ("the cat sat on the mat", "The cat was on a mat today!", (8 / 13, 2 / 11, 8 / 13)),
        ("a b c d", "d c b a", (1.0, 0.0, 0.25)),  # one word is in order
        ("one", "one", (1.0, 0.0, 1.0)),  # one word has no pairs
        ("", "word", (0.0, 0.0, 0.0)),
        ("într-o zi", "într o zi", (1.0, 1.0, 1.0)),  # words are letters and digits of any language
    ],
)
def test_rouge_is_worked_out_by_hand(expected: str, answer: str, scores: tuple[float, ...]) -> None:
    """The first two are also what Google's rouge_score 0.1.2 gives."""
    assert tuple(rouge(expected, answer).values()) == pytest.approx(scores)


def test_the_longest_common_subsequence_is_that_of_the_usual_table() -> None:
    dice = random.Random(0)
    for _ in range(60):
        first, second = (dice.choices("abcd", k=dice.randrange(80)) for _ in range(2))
        row = [0] * (len(second) + 1)
        for a in first:
            above = row[:]
            for j, b in enumerate(second):
                row[j + 1] = above[j] + 1 if a == b else max(above[j + 1], row[j])
        assert common_subsequence(first, second) == row[-1]


def test_chrf_and_bleu_are_those_of_sacrebleu() -> None:
    judged = judge_answers(EXPECTED, ANSWERS, Comparison())
    chrf = [CHRF().sentence_score(answer, [text]).score for text, answer in zip(EXPECTED, ANSWERS, strict=True)]
    assert judged.scores.chrf == pytest.approx(np.mean(chrf) / 100)
    assert judged.scores.bleu == pytest.approx(BLEU().corpus_score(ANSWERS, [EXPECTED]).score / 100)
    single = BLEU(effective_order=True).sentence_score(ANSWERS[0], [EXPECTED[0]]).score
    assert judged.examples[0]["bleu"] == pytest.approx(single / 100, abs=1e-6)
    assert set(judged.examples[0]) == {*TEXT_METRICS, "exact_match"}
    assert judged.scores.f1 == pytest.approx(np.mean([f1(*pair) for pair in zip(EXPECTED, ANSWERS, strict=True)]))


def test_without_sacrebleu_the_other_metrics_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_sacrebleu(name: str, *args: Any) -> Any:
        if name.startswith("sacrebleu"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_sacrebleu)
    judged = judge_answers(EXPECTED, ANSWERS, Comparison())
    assert (judged.scores.chrf, judged.scores.bleu) == (None, None) and judged.scores.rouge_l is not None
    assert "bleu" not in judged.sums


def test_text_metrics_are_of_texts_only() -> None:
    judged = judge_answers(['{"a": 1}', "two words"], ['{"a": 1}', "two words"], Comparison())
    assert judged.scores.f1 == 1.0 and judged.scores.fields == {"a": 1.0}
    assert judged.sums["f1"].values_NK.tolist() == [[0, 0], [1, 1]]
    assert judge_answers(['{"a": 1}'], ["no"], Comparison()).scores.f1 is None


def test_the_kind_of_the_expected_answers() -> None:
    assert kind_of(['{"a": 1}', '{"b": 2}']) == "json"
    assert kind_of(["Paris", "It is 4.", "word " * 90]) == "short"  # in the median
    assert kind_of(["A sentence with more than ten words, as a summary has it."] * 2) == "long"
    assert kind_of(['{"a": 1}', "Paris"]) == "mixed"
    assert kind_of([]) == "none"
