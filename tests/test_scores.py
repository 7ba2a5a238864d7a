"""Answers are compared as a strict reader would: texts as they are, JSON by its values, and nothing hostile hurts."""

from __future__ import annotations

import json
import random

import pytest

from trillora.evaluation.scores import MAX_DEPTH, Score, canonical, is_right, majority, parse_object, score, summarise

VERDICT = '{"severity": "high", "area": "storage", "count": 2}'


def test_spaces_around_a_text_do_not_count_and_all_others_do() -> None:
    assert score("It is 7.", "\n It is 7. ") == Score(True, None, None, {})
    assert not score("It is 7.", "It is  7.").exact
    assert not score("It is 7.", "").exact


def test_json_is_judged_by_its_values() -> None:
    same = score(VERDICT, '{"count":2.0,\n "area":"storage", "severity":"high"}')
    assert same == Score(False, True, True, {"severity": True, "area": True, "count": True})
    other = score(VERDICT, '{"severity": "low", "area": "storage", "count": "2"}')
    assert other == Score(False, True, True, {"severity": False, "area": True, "count": False})


def test_thinking_is_not_part_of_an_answer_if_it_is_expected() -> None:
    expected = f"<think>\n\n</think>\n\n{VERDICT}"
    assert score(expected, f"<think>\nhm\n</think>\n\n{VERDICT}") == score(VERDICT, VERDICT)
    assert score(expected, VERDICT).exact
    assert score(VERDICT, expected).valid_json is False
    assert majority([expected]) == majority([VERDICT])


def test_an_answer_is_right_if_text_or_json_values_are_equal() -> None:
    assert is_right("yes", " yes\n") and is_right('{"a": 1, "b": [2]}', '{ "b": [2.0], "a": 1 }')
    assert is_right("[1, 2]", "[1,2]") and is_right("<think>a</think>5", "<think>b</think>5")
    assert not is_right("[1]", "[true]") and not is_right('{"a": 1}', '{"a": true}') and not is_right("yes", "Yes")
    assert not is_right('{"a": 1}', '```json\n{"a": 1}\n```') and not is_right("a b", "a  b")


def test_a_missing_or_an_added_field_is_not_the_right_fields() -> None:
    assert score(VERDICT, '{"severity": "high", "area": "storage"}').right_fields is False
    more = score(VERDICT, VERDICT[:-1] + ', "more": 1}')
    assert more.valid_json and more.right_fields is False and all(more.fields.values())
    assert score("{}", "{}") == Score(True, True, True, {})


@pytest.mark.parametrize(
    "answer",
    [
        f"```json\n{VERDICT}\n```",
        f"Here it is: {VERDICT}",
        f"{VERDICT} {VERDICT}",
        VERDICT[:-1],
        f"[{VERDICT}]",
        "null",
        "",
        VERDICT.replace('"', "'"),
        VERDICT.replace("2", "NaN"),
        VERDICT.replace("2", "-Infinity"),
        VERDICT.replace("2", "1e999"),
        VERDICT.replace("2", "9" * 100_000),
        VERDICT.replace("2", "[" * 100_000),
        VERDICT.replace("2", "[" * 100_000 + "]" * 100_000),
        VERDICT.replace("2", '{"a":' * 50_000 + "1" + "}" * 50_000),
        "\ufeff" + VERDICT,
    ],
)
def test_an_unusable_json_object_has_no_right_field(answer: str) -> None:
    nothing = dict.fromkeys(json.loads(VERDICT), False)
    assert score(VERDICT, answer) == Score(False, False, False, nothing)


def test_brackets_inside_strings_are_not_nesting() -> None:
    text = json.dumps({"a": "[" * 1000, 'b"': "\\" * 99 + '"[{'})
    assert parse_object(text) == json.loads(text)
    deepest = '{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert parse_object(deepest) is not None
    assert parse_object(deepest.replace("[]", "[[]]")) is None


def test_any_text_gets_a_score() -> None:
    rng = random.Random(0)
    alphabet = [
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "1e9",
        "-",
        "0",
        "true",
        "NaN",
        " ",
        "\n",
        "\x00",
        "é",
        "\ud800",
    ]
    for _ in range(3000):
        answer = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        for text in (answer, VERDICT[: rng.randint(0, len(VERDICT))] + answer):
            assert score(VERDICT, text).valid_json == (parse_object(text) is not None)
    for long in (  # in quadratic time these would take hours
        '"' * 300_000,
        '"\\' * 300_000,
        "{" * 300_000,
    ):
        assert score(VERDICT, long).valid_json is False


def test_numbers_are_equal_as_numbers_and_true_is_not_a_number() -> None:
    assert canonical([1, {"b": 2, "a": 3.0}]) == canonical([1.0, {"a": 3, "b": 2.0}])
    assert canonical(True) != canonical(1)
    assert canonical("1") != canonical(1)
    assert canonical([1, 2]) != canonical([2, 1])
    assert canonical(None) != canonical("null")


def test_shares_count_only_the_answers_that_should_have_the_field() -> None:
    scores = [
        score(VERDICT, VERDICT),
        score(VERDICT, '{"severity": "high"}'),
        score('{"severity": "low"}', "no"),
        score("plain", "plain"),
    ]
    told = summarise(scores)
    assert told.exact_match == 0.5
    assert told.valid_json == pytest.approx(2 / 3)
    assert told.right_fields == pytest.approx(1 / 3)
    assert told.fields == {"severity": pytest.approx(2 / 3), "area": 0.5, "count": 0.5}
    assert told.loss is None


def test_no_answers_give_no_shares() -> None:
    told = summarise([])
    assert (told.exact_match, told.valid_json, told.right_fields, told.fields) == (None, None, None, {})
    assert summarise([score("a", "b")]).valid_json is None


def test_majority_is_the_best_constant_guess() -> None:
    texts = ['{"a": 1, "b": "x"}', '{"a": 1.0, "b": "y"}', '{"a": true}', "no JSON"]
    guess = majority(texts)
    assert guess == {"a": pytest.approx(2 / 3), "b": 0.5}
    best = summarise([score(text, '{"a": 1, "b": "x"}') for text in texts])
    assert best.fields == guess
    assert majority([]) == {}
