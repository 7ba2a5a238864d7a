"""Batches of pairs and of labelled answers: whole pairs in a sequence, signed weights, answers at the wrong prompt."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from memory_data import in_memory, some_documents

from trillora.data.batches import OTHER, Batches
from trillora.data.documents import Documents
from trillora.data.mismatched import partners_of
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of

NAMES = ("tokens", "targets", "weights", "segments", "positions")


def answer(prompt: list[int], answer: list[int], weight: float = 1.0) -> TokenizedDocument:
    """A labelled answer: all tokens of the answer are trained."""
    supervised = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return TokenizedDocument(np.array([*prompt, *answer], np.int32), supervised, weight, 0, len(prompt))


def pair(prompt: list[int], chosen: list[int], rejected: list[int], weight: float = 1.0) -> TokenizedDocument:
    one, other = answer(prompt, chosen), answer(prompt, rejected)
    tokens = np.concatenate([one.tokens, other.tokens])
    return TokenizedDocument(tokens, np.concatenate([one.supervised, other.supervised]), weight, len(one), len(prompt))


def some_pairs(rng: random.Random, number: int) -> list[TokenizedDocument]:
    def ids(most: int) -> list[int]:
        return [rng.randint(1, 999) for _ in range(rng.randint(1, most))]

    return [pair(ids(6), ids(5), ids(5), rng.choice([1.0, 0.5])) for _ in range(number)]


def some_answers(rng: random.Random, number: int) -> list[TokenizedDocument]:
    return [
        answer(each.tokens[: each.prompt].tolist(), [number + 1000, 2], rng.choice([1.0, -1.0]))
        for number, each in enumerate(some_pairs(rng, number))
    ]


def rows_of(batch: dict[str, Any], prefix: str = "") -> list[list[list[float]]]:
    return [[batch[prefix + name][row].tolist() for name in NAMES] for row in range(len(batch["tokens"]))]


def test_a_pair_is_two_documents_next_to_each_other_with_opposite_weights() -> None:
    documents = in_memory([pair([5, 6], [7, 2], [8, 9, 2], weight=0.5)])
    (row,) = rows_of(Batches(documents, batch_size=1, sequence_length=12, pack=True, pad_id=3).batch(0))
    assert row == [
        [5, 6, 7, 2, 5, 6, 8, 9, 2, 3, 3, 3],
        [0, 7, 2, 0, 0, 8, 9, 2, 0, 0, 0, 0],
        [0, 0.5, 0.5, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0],
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0],
    ]


def test_a_packed_sequence_has_whole_pairs_and_an_unpacked_one_has_one() -> None:
    documents = in_memory([pair([5, 6], [7, 2], [8, 9, 2]), pair([4], [1], [3])])
    (row,) = rows_of(Batches(documents, batch_size=1, sequence_length=14, pack=True).batch(0))
    assert row[0] == [5, 6, 7, 2, 5, 6, 8, 9, 2, 4, 1, 4, 3, 0]
    assert row[3] == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4, 0]
    assert row[2] == [0, 1, 1, 0, 0, -1, -1, -1, 0, 1, 0, -1, 0, 0]
    alone = rows_of(Batches(documents, batch_size=2, sequence_length=14, pack=False).batch(0))
    assert sorted(max(row[3]) for row in alone) == [2, 2]
    assert sorted(row[0][:9] for row in alone) == [[4, 1, 4, 3, 0, 0, 0, 0, 0], [5, 6, 7, 2, 5, 6, 8, 9, 2]]


def sides_in(batch: dict[str, Any]) -> Counter[tuple[Any, ...]]:
    """Each pair of a batch, read back through odd and even segments, with its weight."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in range(len(batch["tokens"])):
        segments, weights = batch["segments"][row], batch["weights"][row]
        for first in range(1, segments.max() + 1, 2):
            sides = [tuple(batch["tokens"][row][segments == segment].tolist()) for segment in (first, first + 1)]
            signs = [set(np.sign(weights[segments == segment]).tolist()) - {0} for segment in (first, first + 1)]
            assert signs == [{1}, {-1}]
            found[(*sides, float(weights[segments == first].max()))] += 1
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_every_epoch_has_every_pair_once_in_one_sequence(pack: bool) -> None:
    rng = random.Random(0)
    for trial in range(20):
        pairs = some_pairs(rng, rng.randint(1, 40))
        batches = Batches(in_memory(pairs), batch_size=rng.randint(1, 7), sequence_length=32, seed=trial, pack=pack)
        expected = Counter((*(tuple(s.tokens.tolist()) for s in each.parts), each.weight) for each in pairs)
        for epoch in range(2):
            steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
            found: Counter[tuple[Any, ...]] = Counter()
            for step in steps:
                found += sides_in(batches.batch(step))
            assert found == expected


def test_the_rejected_side_counts_where_documents_begin() -> None:
    documents = in_memory([pair([5, 6], [7, 2], [8, 9, 2]), pair([4], [1], [3])])
    batches = Batches(documents, batch_size=1, sequence_length=16, pack=True)
    begins = np.flatnonzero(np.diff(batches.batch(0)["segments"][0], prepend=-1))
    assert begins.tolist() == [0, 4, 9, 11, 13]
    assert [batches.documents_in(block) for block in (4, 8, 16)] == [2, 3, 5]
    assert batches.longest_document == 5


def test_segments_know_their_documents() -> None:
    rng = random.Random(5)
    ordinary, pairs = some_documents(rng, 9, 16), some_pairs(rng, 20)
    for documents in (ordinary, pairs):
        batches = Batches(in_memory(documents), batch_size=3, sequence_length=40, pack=True)
        for step in range(batches.steps_per_epoch):
            batch, owners = batches.batch(step), iter(batches.segments_of(step).tolist())
            for row in range(3):
                for segment in range(1, batch["segments"][row].max() + 1):
                    found = batch["tokens"][row][batch["segments"][row] == segment].tolist()
                    part = documents[next(owners)].parts[0 if documents is ordinary else (segment + 1) % 2]
                    assert found == part.tokens.tolist()
            assert next(owners, None) is None


def test_the_warning_of_padding_names_pairs() -> None:
    batches = Batches(in_memory([pair([5], [6], [7])]), batch_size=1, sequence_length=64, pack=True)
    assert "the longest pair has 4 tokens" in (batches.padding_warning() or "")


def test_sources_and_parts_take_whole_pairs() -> None:
    documents = in_memory(some_pairs(random.Random(1), 9))
    some = documents.take(np.array([4, 2, 2]))
    assert [some[i].tokens.tolist() for i in range(3)] == [documents[i].tokens.tolist() for i in (4, 2, 2)]
    assert [(some[i].first, some[i].prompt) for i in (0, 1)] == [
        (documents[i].first, documents[i].prompt) for i in (4, 2)
    ]


# -- labels ------------------------------------------------------------------------------------------------------------

LABELLED = [answer([5], [7, 2]), answer([6, 6], [8, 9, 2], -1.0), answer([4], [3], 0.5)]


def labelled(documents: Documents, **options: Any) -> Batches:
    chosen = {"batch_size": 2, "sequence_length": 12, "pack": True, "mismatched": True} | options
    return Batches(documents, **chosen)


def test_the_other_arrays_have_each_prompt_with_the_answer_of_the_partner() -> None:
    documents = in_memory(LABELLED)
    batches = labelled(documents, batch_size=1, seed=1)
    partners = partners_of(documents.rows_N, 1).tolist()
    batch = batches.batch(0)
    (row,), (other,) = rows_of(batch), rows_of(batch, OTHER)
    assert partners == [2, 0, 1], "for this seed"
    # Each document needs the larger of its two lengths (3, 5, 4), and best fit puts the longest first: 1, 2, 0.
    assert row == [
        [6, 6, 8, 9, 2, 4, 3, 5, 7, 2, 0, 0],
        [0, 8, 9, 2, 0, 3, 0, 7, 2, 0, 0, 0],
        [0, -1, -1, -1, 0, 0.5, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0],
        [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 0],
    ]
    assert other == [
        [6, 6, 7, 2, 4, 8, 9, 2, 5, 3, 0, 0],
        [0, 7, 2, 0, 8, 9, 2, 0, 3, 0, 0, 0],
        [0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0],
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 0],
    ]


@pytest.mark.parametrize("pack", [True, False])
def test_both_halves_have_the_same_segments_and_prompts(pack: bool) -> None:
    rng = random.Random(3)
    for trial in range(20):
        documents = in_memory(some_answers(rng, rng.randint(2, 40)))
        batches = labelled(documents, seed=trial, batch_size=rng.randint(1, 5), sequence_length=16, pack=pack)
        seen = 0
        for step in range(batches.steps_per_epoch):
            batch = batches.batch(step)
            for own, other in zip(rows_of(batch), rows_of(batch, OTHER), strict=True):
                assert set(own[3]) - {0} == set(other[3]) - {0}
                for segment in set(own[3]) - {0}:
                    of_own, of_other = (
                        [[part[2][i], part[0][i]] for i in range(len(part[3])) if part[3][i] == segment]
                        for part in (own, other)
                    )
                    first = next(i for i, (weight, _) in enumerate(of_own) if weight)
                    assert [token for _, token in of_own[: first + 1]] == [token for _, token in of_other[: first + 1]]
                    assert of_own[first + 1][1] != of_other[first + 1][1], "the answer of another row"
                    assert all(weight in (0, 1) for weight, _ in of_other) and of_other[first][0] == 1
                    seen += 1
        assert seen == len(documents)


def test_partners_are_another_row_each_once_and_fixed_by_the_seed() -> None:
    for count in (2, 3, 17, 500):
        rows = np.arange(count)
        found = partners_of(rows, 7)
        assert sorted(found.tolist()) == rows.tolist()
        assert (found != rows).all()
        assert found.tolist() == partners_of(rows, 7).tolist()
    assert partners_of(np.arange(500), 7).tolist() != partners_of(np.arange(500), 8).tolist()
    # Fixed values: a change here silently changes what resumed runs train on.
    assert partners_of(np.arange(6), 0).tolist() == [2, 5, 4, 1, 3, 0]


def test_copies_of_a_row_are_not_partners() -> None:
    for seed in range(20):
        rows = np.array([0, 0, 0, 1, 1, 5])
        partners = partners_of(rows, seed)
        assert (rows[partners] != rows).all()
        assert len(set(partners[:3].tolist())) == 1


def test_fewer_than_two_rows_are_refused_by_name() -> None:
    for documents in (LABELLED[:1], LABELLED[:1] * 3):
        one = in_memory(documents)
        one.rows_N[:] = 0
        with pytest.raises(TrilloraError, match="compares at least two rows, and there is 1") as caught:
            labelled(one)
        assert caught.value.where == "train.loss"


def test_a_mismatched_answer_that_is_too_long_is_shortened_at_its_end() -> None:
    documents = in_memory([answer([5] * 6, [7, 2]), answer([6], [8] * 6)])
    batches = labelled(documents, sequence_length=8)
    batch = batches.batch(0)
    found = {tuple(row[0]) for row in rows_of(batch, OTHER)}
    assert found == {(5, 5, 5, 5, 5, 5, 8, 8), (6, 7, 2, 0, 0, 0, 0, 0)}
    assert sorted(row[2].count(1) for row in rows_of(batch, OTHER)) == [2, 2]
    assert batches.longest_document == 8


def test_sequences_have_room_for_the_longer_of_both_documents() -> None:
    # The second document has 2 tokens, its mismatched one 8: they do not fit next to the first, which has 8.
    documents = in_memory([answer([5], [8] * 7), answer([6], [7])])
    batches = labelled(documents, sequence_length=16)
    assert batches.num_rows == 1
    assert labelled(documents, sequence_length=12).num_rows == 2
    bucketed = labelled(documents, sequence_length=16, pack=False, num_buckets=2)
    assert bucketed.lengths == [8], "both need 8 tokens"


@pytest.mark.parametrize("mismatched", [True, False])
def test_batch_is_a_pure_function_also_of_preferences(mismatched: bool) -> None:
    def make(seed: int) -> Batches:
        rng = random.Random(2)
        documents = in_memory(some_answers(rng, 30) if mismatched else some_pairs(rng, 30))
        return Batches(documents, batch_size=4, sequence_length=32, seed=seed, pack=True, mismatched=mismatched)

    forwards, backwards = make(7), make(7)
    steps = range(3 * forwards.steps_per_epoch)
    in_order = [forwards.batch(step) for step in steps]
    for step in reversed(steps):
        again = backwards.batch(step)
        assert again.keys() == in_order[step].keys() and len(again) == (10 if mismatched else 5)
        assert all((again[name] == in_order[step][name]).all() for name in again)
        part = backwards.batch(step, places=range(2, 4))
        assert all((part[name] == again[name][2:4]).all() for name in again)
    assert not all((make(8).batch(0)[name] == in_order[0][name]).all() for name in in_order[0])


def test_ordinary_documents_have_five_arrays_and_no_negative_zero() -> None:
    documents = some_documents(random.Random(1), 7, 16)
    batch = Batches(in_memory(documents), batch_size=4, sequence_length=24, pack=True).batch(0)
    assert tuple(batch) == NAMES
    pairs = Batches(in_memory(some_pairs(random.Random(1), 7)), batch_size=4, sequence_length=32, pack=True).batch(0)
    assert not np.signbit(pairs["weights"][pairs["weights"] == 0]).any()


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "data", "where", "message"),
    [
        ("dpo", {"train_on": "everything"}, "data.train_on", "everything trains on the prompt too"),
        ("kto", {"train_on": "assistant"}, "data.train_on", "assistant trains on the prompt too"),
        ("dpo", {"format": "messages"}, "data.format", "messages does not fit a train.loss of pairs"),
        ("dpo", {"format": "labelled"}, "data.format", "labelled does not fit a train.loss of pairs"),
        ("kto", {"format": "text"}, "data.format", "text does not fit a train.loss of labels"),
        ("sft", {"format": "preference"}, "data.format", "preference does not fit train.loss: sft"),
        ("sft", {"format": "labelled"}, "data.format", "labelled does not fit train.loss: sft"),
        ("dpo", {"template": {"text": "{{ a }}"}}, "data.template", "makes rows with one answer"),
    ],
)
def test_options_that_do_not_fit_the_loss_are_refused_by_name(
    loss: str, data: dict[str, Any], where: str, message: str
) -> None:
    alone = {"model": "any", "data": {"path": "a.jsonl", **data}, "train": {"loss": loss}}
    with pytest.raises(TrilloraError, match=message) as caught:
        load_recipe(alone)
    assert caught.value.where and where in caught.value.where
    stage = {"name": "compare", "loss": loss, "data": {"path": "a.jsonl", **data}}
    with pytest.raises(TrilloraError, match=message) as caught:
        load_recipe({"model": "any", "stages": [{"name": "learn", "data": "b.jsonl"}, stage]})
    assert caught.value.where and f"stages[1].{where}" in caught.value.where


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        ("dpo", {"format": "preference", "train_on": "last"}),
        ("kto", {"format": "labelled", "on_too_long": "truncate-left"}),
        ("kto", {"format": "preference"}),
        (["sigmoid", "sft"], {"train_on": "completion", "columns": {"prompt": "a", "chosen": "b", "rejected": "c"}}),
    ],
)
def test_options_that_fit_the_loss_are_accepted(loss: Any, data: dict[str, Any]) -> None:
    recipe = load_recipe({"model": "any", "data": {"path": "a.jsonl", **data}, "train": {"loss": loss}})
    assert stages_of(recipe)[0].recipe.train.rows == ("labels" if loss == "kto" else "pairs")
