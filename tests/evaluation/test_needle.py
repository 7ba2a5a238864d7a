"""Facts in long texts: the texts, what counts as found, and the table, through the real generator."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_run
from rich.console import Console

from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.evaluation.kinds.needle import (
    DEPTHS,
    MAX_ANSWER,
    NUM_FACTS,
    fact_of,
    is_found,
    num_fitting,
    parse_lengths,
    prompts_at,
    text_of,
)
from trillora.evaluation.result import Evaluation
from trillora.generation.generator import Generator
from trillora.recipe.load import load_recipe
from trillora.report.eval_table import show
from trillora.training.trainer import train

LENGTH, LONGER = 288, 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_run.llama(num_layers=1)
    config.max_position_embeddings = LONGER
    return tiny_run.write_both(tmp_path_factory.mktemp("needle"), config)


@pytest.fixture(scope="module")
def base(folder: Path) -> Generator:
    return Generator.open(str(folder / "model"))


@pytest.fixture(scope="module")
def found(folder: Path, base: Generator) -> Evaluation:
    """The adapter has learned the answers to the prompts of one length by heart."""
    cells = [cell for depth in DEPTHS for cell in prompts_at(base, LENGTH, depth, 0)]
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"It is {fact.number}."}]}
        for fact, prompt in cells
    ]
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"sequence_length": LONGER, "batch_size": 10, "steps": 60}
    recipe = tiny_run.recipe(folder, data={"path": str(folder / "facts.jsonl")}, train=options)
    train(load_recipe({**recipe, "evaluate": {"num_samples": 0}}), folder / "run")
    return evaluate(folder / "run", folder / "chats.jsonl", max_rows=2, max_tokens=4, needle=f"{LONGER},{LENGTH}")


def test_the_table_has_the_share_found_by_length_and_depth(found: Evaluation, folder: Path) -> None:
    needle = found.needle
    assert needle is not None and needle.lengths == (LENGTH, LONGER) and needle.depths == DEPTHS
    assert needle.adapter[0] == (1.0,) * len(DEPTHS)  # what it has learned
    assert needle.base == ((0.0,) * len(DEPTHS),) * 2  # a random model does not know them
    assert len(needle.adapter[1]) == len(DEPTHS) and needle.num_facts == NUM_FACTS
    saved = json.loads((folder / "run" / "eval.json").read_text())["needle"]
    assert saved["adapter"][0] == [1.0] * len(DEPTHS) and saved["lengths"] == [LENGTH, LONGER]
    out = io.StringIO()
    show(found, Console(file=out, width=120))
    [line] = [line for line in out.getvalue().splitlines() if re.search(rf"\b{LENGTH}\b.*%", line)]
    assert line.count("0%  100%") == len(DEPTHS)


@pytest.mark.parametrize("depth", DEPTHS)
def test_prompts_are_as_long_as_their_answers_allow(base: Generator, depth: float) -> None:
    for number, (fact, prompt) in enumerate(prompts_at(base, LENGTH, depth, 0)):
        assert isinstance(prompt, str) and prompt.count(fact.sentence) == 1 and prompt.endswith(fact.question)
        num_tokens, sentences = len(base.encode(prompt)), prompt.count(".") - 2  # of the fact and the question
        longer = text_of(fact, depth, sentences + 2, (0, number)) + f"\n\n{fact.question}"
        assert num_tokens <= LENGTH - MAX_ANSWER < len(base.encode(longer))


def test_a_fact_is_at_its_depth_among_sentences_without_numbers() -> None:
    fact = fact_of(0, 50, 1)
    for depth, place in ((0.0, 0), (0.25, 25), (1.0, 100)):
        parts = re.split(r"(?<=\.) ", text_of(fact, depth, 100, (0, 1)))
        assert parts.index(fact.sentence) == place and len(parts) == 101
        assert not any(re.search(r"\d", part) for part in parts if part != fact.sentence)
        assert len({*parts}) > 80
    assert fact == fact_of(0, 50, 1) != fact_of(0, 75, 1) and fact.number in fact.sentence
    assert fact.number not in fact.question


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("48213", True),
        ("The number is 48213.", True),
        ("48,213", True),
        ("<think>Is it 7?</think> 48213", True),
        ("It is 48213, not 5.", True),
        ("482130", False),
        ("12 or 48213", False),
        ("", False),
        ("I do not know.", False),
    ],
)
def test_the_first_number_of_an_answer_counts(answer: str, right: bool) -> None:
    assert is_found(answer, "48213") is right


def test_as_many_sentences_as_fit_are_found_with_few_prompts() -> None:
    asked: list[int] = []

    def num_tokens(number: int) -> int:
        asked.append(number)
        return 100 + 11 * number + (number > 500) * 40  # not quite linear

    number = num_fitting(num_tokens, 100_000)
    assert num_tokens(number) <= 100_000 < num_tokens(number + 4) and len(asked) < 10
    assert [num_fitting(num_tokens, room) for room in (100, 110, 111)] == [0, 0, 1]
    assert all(a <= b for a, b in pairwise(num_fitting(num_tokens, room) for room in range(100, 400)))
    with pytest.raises(TrilloraError, match="132 tokens already") as caught:
        num_fitting(num_tokens, 99)
    assert "264" in str(caught.value.do)


@pytest.mark.parametrize("text", ["", "a", "4096,", "-5", "1e3", ",".join(["10"] * 17), "999999999"])
def test_bad_lengths_are_refused_before_anything_is_loaded(text: str) -> None:
    with pytest.raises(TrilloraError, match="not a list of at most 16 lengths") as caught:
        parse_lengths(text)
    assert caught.value.where == "--needle"
    assert parse_lengths("4096, 1024,4096") == (1024, 4096)


def test_a_length_that_the_model_does_not_read_is_refused(found: Evaluation, folder: Path) -> None:
    with pytest.raises(TrilloraError, match="longer than the 320") as caught:
        evaluate(folder / "run", folder / "chats.jsonl", max_rows=1, max_tokens=4, needle="320,321")
    assert caught.value.do == "use at most 320"
