"""`--gate`: conditions are a small language, wrong ones are refused with a remedy, and a missing value is not met."""

from __future__ import annotations

import dataclasses
import math

import pytest

from trillora.errors import TrilloraError
from trillora.evaluation.gate import check_fields, judge, parse_gate
from trillora.evaluation.result import Evaluation, Forgetting, Interval
from trillora.evaluation.scores import Scores

FILE = Evaluation(
    "a.jsonl", 20, Scores(loss=2.0, exact_match=0.1), Scores(loss=0.5, exact_match=0.6, fields={"area": 0.7}), {}, ()
)


def met(gate: str, evaluation: Evaluation = FILE) -> list[bool]:
    return [condition.met for condition in judge(parse_gate(gate), evaluation)]


def test_conditions_are_compared_with_the_adapter_or_the_base() -> None:
    assert met("exact_match>=0.6, exact_match > 0.6,loss<1,base.loss >= 2, adapter.loss<=0.5") == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert met("fields.area>=0.7, fields.area<0.7") == [True, False]
    assert met("loss<1e0, loss>-1, loss<+.75") == [True, True, True]


def test_what_was_not_measured_does_not_pass() -> None:
    conditions = judge(parse_gate("f1>=0, forgetting<=1, bleu<=1"), FILE)
    assert [(condition.value, condition.met) for condition in conditions] == [(None, False)] * 3
    assert met("loss<1", dataclasses.replace(FILE, adapter=Scores(loss=math.nan))) == [False]
    assert met("base.loss>1", dataclasses.replace(FILE, base=None)) == [False]


def test_forgetting_and_divergence_are_of_the_meter() -> None:
    meter = Forgetting(0.8, 0.75, 0.05, 0.2, 72, 400, Interval(-0.05, -0.1, 0.0, False))
    assert met("forgetting<=0.05, kl<0.2", dataclasses.replace(FILE, forgetting=meter)) == [True, False]


def test_several_files_have_names() -> None:
    whole = dataclasses.replace(
        FILE,
        adapter=Scores(exact_match=0.5),
        files=(dataclasses.replace(FILE, label="a.jsonl"), dataclasses.replace(FILE, label="b.jsonl")),
    )
    gate = parse_gate("exact_match>=0.6, b.jsonl:exact_match>=0.6, a.jsonl:base.loss>1", ["a.jsonl", "b.jsonl"])
    assert [condition.met for condition in judge(gate, whole)] == [False, True, True]
    assert [condition.condition for condition in judge(gate, whole)][1] == "b.jsonl:exact_match >= 0.6"


@pytest.mark.parametrize(
    ("gate", "what", "do"),
    [
        ("", "no condition", "exact_match>=0.6"),
        (" , ", "no condition", "exact_match>=0.6"),
        ("exact_match", "not a condition", "exact_match>=0.6"),
        ("exact_match=0.6", "not a condition", "exact_match>=0.6"),
        ("exact_match==0.6", "not a condition", "exact_match>=0.6"),
        ("exact_mach>=0.6", "Unknown metric 'exact_mach'", "did you mean exact_match? Known: loss"),
        ("__class__>=0", "Unknown metric", "loss perplexity"),
        ("fields.>=0", "Unknown metric", "fields.NAME"),
        ("exact_match>=high", "'high' is not a number", "exact_match>=0.6"),
        ("exact_match>=nan", "'nan' is not a number", "exact_match>=0.6"),
        ("exact_match>=inf", "'inf' is not a number", "exact_match>=0.6"),
        ("1<exact_match<2", "not a condition", "exact_match>=0.6"),
        ("a.jsonl:loss<1", "'a.jsonl' is not the name", "only one file"),
        ("base.forgetting<1", "compares the adapter", "forgetting<1"),
        ("loss<1," * 101, "more than 100", "exact_match>=0.6"),
    ],
)
def test_wrong_conditions_are_refused_with_a_remedy(gate: str, what: str, do: str) -> None:
    with pytest.raises(TrilloraError) as caught:
        parse_gate(gate)
    assert what in caught.value.what and do in caught.value.do and "--gate" in str(caught.value.where)


def test_fields_are_known_once_the_rows_are_read() -> None:
    check_fields(parse_gate("fields.area>0"), {"": {"area"}})
    with pytest.raises(TrilloraError, match="No expected answer has the field 'aria'") as caught:
        check_fields(parse_gate("fields.aria>0"), {"": {"area", "severity"}})
    assert caught.value.do == "use one of: fields.area fields.severity"
    files = ["a.jsonl", "b.jsonl"]
    with pytest.raises(TrilloraError, match="several files"):
        parse_gate("fields.area>0", files)
    with pytest.raises(TrilloraError, match="No expected answer"):
        check_fields(parse_gate("b.jsonl:fields.area>0", files), {"a.jsonl": {"area"}, "b.jsonl": set()})


def test_a_long_condition_is_read_in_linear_time() -> None:
    """With a quadratic pattern this took minutes."""
    spaces = " " * 200_000
    [found] = parse_gate(f"{spaces}loss{spaces}<{spaces}1{spaces}")
    assert (found.metric, found.sign, found.limit) == ("loss", "<", 1.0)
    for text in ("a" + spaces, spaces + "<1", "a" * 200_000, "loss<" + "1" + spaces + "x"):
        with pytest.raises(TrilloraError):
            parse_gate(text)
