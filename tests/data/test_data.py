"""Documents to batches: every document once per epoch, equal to a simple reference, for any number of processes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from memory_data import in_memory, some_documents

from trillora.data.batches import Batches
from trillora.data.documents import fit
from trillora.data.pack import best_fit, bucket_lengths
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import KINDS
from trillora.errors import TrilloraError


def documents_in(batch: dict[str, Any]) -> list[tuple[tuple[int, int, int], ...]]:
    """Each document of a batch as (token, target, weight) triples, read back through segments."""
    found = []
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            slots = np.flatnonzero(batch["segments"][row] == segment)
            assert (np.diff(slots) == 1).all()
            assert batch["positions"][row][slots].tolist() == list(range(len(slots)))
            columns = (batch[name][row][slots].tolist() for name in ("tokens", "targets", "weights"))
            found.append(tuple(zip(*columns, strict=True)))
    return found


def simple_triples(document: TokenizedDocument) -> tuple[tuple[int, int, int], ...]:
    triples = []
    for i in range(len(document)):
        trained = i + 1 < len(document) and bool(document.supervised[i + 1])
        triples.append((int(document.tokens[i]), int(document.tokens[i + 1]) if trained else 0, int(trained)))
    return tuple(triples)


@pytest.mark.parametrize("pack", [True, False])
def test_every_epoch_has_every_document_once_as_in_the_simple_reference(pack: bool) -> None:
    rng = random.Random(0)
    for trial in range(20):
        documents = some_documents(rng, rng.randint(1, 40), 32)
        batches = Batches(in_memory(documents), batch_size=rng.randint(1, 7), sequence_length=32, seed=trial, pack=pack)
        expected = Counter(map(simple_triples, documents))
        for epoch in range(2):
            steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
            found = Counter(document for step in steps for document in documents_in(batches.batch(step)))
            assert found == expected


def test_batches_have_one_shape_fixed_dtypes_and_untrained_padding() -> None:
    documents = some_documents(random.Random(1), 7, 16)
    batches = Batches(in_memory(documents), batch_size=4, sequence_length=24, seed=0, pack=False, pad_id=5)
    assert (batches.num_rows, batches.steps_per_epoch) == (7, 2)
    for step in range(4):
        batch = batches.batch(step)
        assert {name: array.dtype.name for name, array in batch.items()} == {
            "tokens": "int32", "targets": "int32", "weights": "float32", "segments": "int32", "positions": "int32"
        }  # fmt: skip
        assert all(array.shape == (4, 24) for array in batch.values())
        padding = batch["segments"] == 0
        assert (batch["tokens"][padding] == 5).all()
        for name in ("targets", "weights", "positions"):
            assert not batch[name][padding].any()
        assert not batch["targets"][batch["weights"] == 0].any()
    assert [(batches.batch(step)["segments"].max(axis=1) == 0).sum() for step in range(4)] == [0, 1, 0, 1]


def test_batch_is_a_pure_function_of_documents_seed_and_step() -> None:
    def make(seed: int) -> Batches:
        documents = some_documents(random.Random(2), 30, 16)
        return Batches(in_memory(documents), batch_size=4, sequence_length=32, seed=seed, pack=True)

    forwards, backwards = make(7), make(7)
    steps = range(3 * forwards.steps_per_epoch)
    in_order = [forwards.batch(step) for step in steps]
    for step in reversed(steps):
        again = backwards.batch(step)
        assert all((again[name] == in_order[step][name]).all() for name in again)
    epochs = [in_order[epoch * forwards.steps_per_epoch]["tokens"] for epoch in range(3)]
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[1] == epochs[2]).all()
    assert not (make(8).batch(0)["tokens"] == epochs[0]).all()


def test_order_of_documents_is_the_same_on_every_machine() -> None:
    documents = [TokenizedDocument(np.array([i, i], np.int32), np.ones(2, np.bool_)) for i in range(1, 9)]
    batches = Batches(in_memory(documents), batch_size=8, sequence_length=2, seed=3, pack=False)
    # Fixed values: a change here silently changes what resumed runs train on.
    assert batches.batch(0)["tokens"][:, 0].tolist() == [1, 5, 8, 2, 6, 7, 4, 3]
    assert batches.batch(1)["tokens"][:, 0].tolist() == [1, 7, 3, 2, 4, 8, 5, 6]


def test_packing_has_each_document_once_unsplit_with_little_padding() -> None:
    rng = random.Random(4)
    for _ in range(20):
        lengths = np.array([rng.randint(1, 64) for _ in range(rng.randint(1, 300))])
        rows = best_fit(lengths, 64)
        assert sorted(rows.documents.tolist()) == list(range(len(lengths)))
        assert all(lengths[rows[row]].sum() <= 64 for row in range(len(rows)))
        assert rows.documents.tolist() == best_fit(lengths, 64).documents.tolist()
    # Typical chat data: many short documents, few long ones.
    lengths = np.array([min(1024, int(rng.lognormvariate(5, 0.8)) + 8) for _ in range(5000)])
    assert lengths.sum() / (1024 * len(best_fit(lengths, 1024))) > 0.98


def test_unpacked_documents_use_the_shortest_bucket_that_fits_once_per_epoch() -> None:
    rng = random.Random(6)
    documents = some_documents(rng, 50, 100)
    batches = Batches(in_memory(documents), batch_size=4, sequence_length=104, seed=1, pack=False, num_buckets=3)
    assert batches.lengths == [40, 72, 104]
    for epoch in range(2):
        found: Counter[Any] = Counter()
        for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch):
            batch = batches.batch(step)
            length = batch["tokens"].shape[1]
            assert length == batches.length_of(step)
            for document in documents_in(batch):
                assert length == next(bucket for bucket in batches.lengths if bucket >= len(document))
                found[document] += 1
        assert found == Counter(map(simple_triples, documents))
    assert bucket_lengths(np.array([3, 500]), 1024, 4) == [256, 512]
    assert bucket_lengths(np.array([3, 1000]), 1000, 2) == [504, 1000]
    assert bucket_lengths(np.array([5]), 7, 1) == [7]


@pytest.mark.parametrize("num_processes", [1, 3, 8])
@pytest.mark.parametrize("pack", [True, False])
def test_processes_together_see_every_document_exactly_once_also_when_resumed(num_processes: int, pack: bool) -> None:
    documents = some_documents(random.Random(8), 61, 32)
    batch_size = 24  # sequences, divided over 1, 3 or 8 processes

    def make() -> Batches:
        return Batches(in_memory(documents), batch_size=batch_size, sequence_length=32, seed=5, pack=pack)

    first = make()
    share = batch_size // num_processes
    for epoch in range(3):
        found: Counter[Any] = Counter()
        for step in range(epoch * first.steps_per_epoch, (epoch + 1) * first.steps_per_epoch):
            batches = make() if step % 2 else first  # a process that starts here knows only the step
            for process in range(num_processes):
                places = range(process * share, (process + 1) * share)
                part = batches.batch(step, places)
                assert all((part[name] == first.batch(step)[name][places.start : places.stop]).all() for name in part)
                found.update(documents_in(part))
        assert found == Counter(map(simple_triples, documents))


def test_split_text_keeps_every_target_exactly_once() -> None:
    rng = random.Random(5)
    for _ in range(50):
        lengths = [rng.randint(2, 100) for _ in range(4)]
        texts = [TokenizedDocument(np.arange(1, n + 1, dtype=np.int32), np.ones(n, np.bool_)) for n in lengths]
        length = rng.randint(2, 40)
        kinds = np.full(4, KINDS.index("text"), np.int8)
        pieces, lost, _ = fit(in_memory(texts), kinds, length, "auto", str)
        assert lost.num_rows == 0
        assert all(2 <= n <= length for n in pieces.lengths_N)
        targets = [triple for i in range(len(pieces)) for triple in simple_triples(pieces[i])[:-1]]
        assert targets == [triple for text in texts for triple in simple_triples(text)[:-1]]
        assert pieces.trained_N.sum() == len(targets)


def test_end_of_text_is_trained_even_if_it_is_the_padding_token() -> None:
    document = TokenizedDocument(np.array([5, 6, 9], np.int32), np.ones(3, np.bool_))
    batch = Batches(in_memory([document]), batch_size=2, sequence_length=6, seed=0, pack=True, pad_id=9).batch(0)
    assert batch["targets"][0].tolist() == [6, 9, 0, 0, 0, 0]
    assert batch["weights"].sum() == 2


def test_documents_without_trained_tokens_are_refused() -> None:
    untrained = TokenizedDocument(np.array([1, 2], np.int32), np.array([True, False]))
    for documents in ([], [untrained]):
        with pytest.raises(TrilloraError, match="no token to train on"):
            Batches(in_memory(documents), batch_size=1, sequence_length=8, seed=0, pack=True)
    with pytest.raises(TrilloraError, match="nothing to train"):
        Batches(in_memory([untrained]), batch_size=1, sequence_length=1, seed=0, pack=True)
