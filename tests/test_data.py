"""From a file to batches: every row once an epoch, arrays as a slow, obvious reference says, every error placed."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from trillora.data import Batches, load_batches
from trillora.data.encode import Rendered
from trillora.data.pack import best_fit, split_long
from trillora.data.render import render_chat, render_text
from trillora.data.sources import detect_format, read_jsonl
from trillora.errors import TrilloraError

TOKENIZER = chat_tokenizer("chatml")
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


def some_documents(rng: random.Random, number: int, longest: int) -> list[Rendered]:
    documents = []
    for index in range(number):
        length = rng.randint(2, longest)
        tokens = np.array([rng.randint(1, 999) for _ in range(length)], np.int32)
        supervised = np.array([rng.random() < 0.5 for _ in range(length)], np.bool_)
        supervised[-1] = True
        documents.append(Rendered(tokens, supervised, f"f:{index + 1}"))
    return documents


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


def slow_triples(document: Rendered) -> tuple[tuple[int, int, int], ...]:
    triples = []
    for i in range(len(document)):
        trained = i + 1 < len(document) and bool(document.supervised[i + 1])
        triples.append((int(document.tokens[i]), int(document.tokens[i + 1]) if trained else 0, int(trained)))
    return tuple(triples)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, **options: Any) -> Batches:
    return load_batches(path, TOKENIZER, **{"sequence_length": 64, "batch_size": 2, "seed": 0} | options)


@pytest.mark.parametrize("pack", [True, False])
def test_every_epoch_holds_every_document_once_as_the_slow_reference_writes_it(pack: bool) -> None:
    rng = random.Random(0)
    for trial in range(20):
        documents = some_documents(rng, rng.randint(1, 40), 32)
        batches = Batches(documents, batch_size=rng.randint(1, 7), sequence_length=32, seed=trial, pack=pack)
        expected = Counter(map(slow_triples, documents))
        for epoch in range(2):
            steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
            found = Counter(document for step in steps for document in documents_in(batches.batch(step)))
            assert found == expected


def test_batches_have_one_shape_the_agreed_types_and_silent_padding() -> None:
    documents = some_documents(random.Random(1), 7, 16)
    batches = Batches(documents, batch_size=4, sequence_length=24, seed=0, pack=False, pad_id=5)
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
        return Batches(documents, batch_size=4, sequence_length=32, seed=seed, pack=True)

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


def test_order_of_rows_is_the_same_on_every_machine() -> None:
    documents = [Rendered(np.array([i, i], np.int32), np.ones(2, np.bool_), "") for i in range(1, 9)]
    batches = Batches(documents, batch_size=8, sequence_length=2, seed=3, pack=False)
    # Written down once: a change here silently changes what resumed runs train on.
    assert batches.batch(0)["tokens"][:, 0].tolist() == [1, 5, 8, 2, 6, 7, 4, 3]
    assert batches.batch(1)["tokens"][:, 0].tolist() == [1, 7, 3, 2, 4, 8, 5, 6]


def test_packing_holds_each_document_once_fits_and_fills() -> None:
    rng = random.Random(4)
    for _ in range(20):
        lengths = [rng.randint(1, 64) for _ in range(rng.randint(1, 300))]
        rows = best_fit(lengths, 64)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
        assert rows == best_fit(lengths, 64)
    lengths = [
        min(1024, int(rng.lognormvariate(5, 0.8)) + 8) for _ in range(5000)
    ]  # ordinary chat: many short, few long
    assert sum(lengths) / (1024 * len(best_fit(lengths, 1024))) > 0.98


def test_split_text_keeps_every_target_exactly_once() -> None:
    rng = random.Random(5)
    for _ in range(50):
        document = some_documents(rng, 1, 100)[0]
        length = rng.randint(2, 40)
        pieces = split_long([document], length)
        assert all(2 <= len(piece) <= length for piece in pieces)
        targets = [pair for piece in pieces for pair in slow_triples(piece)[:-1]]
        assert targets == list(slow_triples(document)[:-1])


def test_file_of_conversations_becomes_its_rendered_documents(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x " * n}, {"role": "assistant", "content": "y"}]} for n in range(9)
    ]
    batches = load(write_rows(tmp_path / "a.jsonl", rows))
    found = Counter(d for step in range(batches.steps_per_epoch) for d in documents_in(batches.batch(step)))
    documents = [render_chat(row["messages"], TOKENIZER) for row in rows]
    assert found == Counter(map(slow_triples, documents))
    summary = batches.summary()
    assert summary["documents"] == 9
    assert summary["rows"] == batches.num_rows < 9
    assert summary["tokens"] == sum(map(len, documents))
    assert summary["supervised"] == 18  # "y" and its stop token
    assert summary["padding_fraction"] == pytest.approx(1 - summary["tokens"] / (64 * batches.num_rows), rel=1e-12)


def test_file_of_text_is_split_and_trained_whole(tmp_path: Path) -> None:
    texts = ["The quick brown fox " * 50, "Paris"]
    batches = load(write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts]), sequence_length=32)
    assert batches.summary()["supervised"] == sum(len(render_text(text, TOKENIZER)) - 1 for text in texts)


def test_many_rows_at_once_equal_one_at_a_time(tmp_path: Path) -> None:
    rows = [{"text": f"fox {n} <|im_end|>" if n % 3 else f"dog {n}"} for n in range(1100)]  # more than two calls' worth
    batches = load(write_rows(tmp_path / "a.jsonl", rows), batch_size=1100, pack=False)
    alone = Counter(slow_triples(render_text(row["text"], TOKENIZER)) for row in rows)
    assert Counter(documents_in(batches.batch(0))) == alone


def test_byte_order_mark_windows_lines_and_blank_lines_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "\xc8\x99\xe2\x80\xa8x"}\r\n\r\n{"text": "\\ud83d\\ude42"}')
    rows = list(read_jsonl(path))
    assert [(row.line, row.value["text"]) for row in rows] == [(1, "ș\u2028x"), (3, "🙂")]
    assert detect_format(rows) == "text"


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"text": "\xff"}', "Byte 11 of this line is not UTF-8"),
        (b'{"text": ', "not JSON: Expecting value at column 10"),
        (b'{"text": NaN}', "NaN is not a JSON number"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON one can use"),
        (b"[" * 200000, "not JSON one can use"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'"text"', "holds a string, not"),
        (b"{}", "its keys: none"),
        ({"prompt": "a", "answer": "b"}, 'neither "messages" nor "text"; its keys: answer prompt'),
        ({"text": "fox"}, 'in the "text" format, the rows before it in "messages"'),
        ({"text": "fox"} | HELLO, 'both "messages" and "text"'),
        ({"messages": []}, '"messages" is empty'),
        ({"messages": "Hello"}, '"messages" is not a list'),
        ({"messages": ["Hello"]}, "Turn 1 is not an object"),
        ({"messages": [{"content": "Hello"}]}, 'Turn 1 has no "role"'),
        (turns(("user", "a"), ("asistant", "b")), "did you mean 'assistant'"),
        (turns((["user"], "a")), "unknown role"),
        (turns(("user", "a"), ("assistant", None)), '"content" of turn 2 is missing'),
        (turns(("user", ["a"]), ("assistant", "b")), '"content" of turn 1 is a list'),
        (turns(("user", "a"), ("assistant", " \n")), "answer in turn 2 is empty"),
        (turns(("user", "a")), "no assistant turn"),
        (HELLO | {"tools": [{"name": "search"}]}, 'declares "tools"'),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path: Path, bad: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    line = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    path.write_bytes(json.dumps(HELLO).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(TrilloraError) as caught:
        load(path)
    assert message in str(caught.value)
    assert caught.value.where == f"{path}:3"
    assert caught.value.do


@pytest.mark.parametrize("row", [{"text": ""}, {"text": " \n"}, {"text": 3}, {"text": None}])
def test_a_text_row_without_text_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "fox"}, row])
    with pytest.raises(TrilloraError) as caught:
        load(path)
    assert caught.value.where == f"{path}:2"


def test_missing_empty_and_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\xef\xbb\xbf\r\n\n")
    for name, message in (("gone.jsonl", "does not exist"), ("empty.jsonl", "is empty"), ("", "cannot be read")):
        with pytest.raises(TrilloraError, match=message) as caught:
            load(tmp_path / name)
        assert caught.value.where == str(tmp_path / name)


def test_a_conversation_too_long_is_refused_with_the_length_that_would_do(tmp_path: Path) -> None:
    rows = [turns(("user", "fox " * n), ("assistant", "b")) for n in (1, 90, 200, 3)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    longest = len(render_chat(rows[2]["messages"], TOKENIZER))
    with pytest.raises(
        TrilloraError, match=f"2 of 4 rows are longer than sequence_length 64; the longest has {longest}"
    ) as caught:
        load(path)
    assert caught.value.where == f"{path}:3"
    assert load(path, sequence_length=longest).summary()["documents"] == 4


def test_named_formats_and_choices_are_checked(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "fox"} | HELLO])
    assert load(path, format="messages").summary()["supervised"] == 2 + len(TOKENIZER("Hi")["input_ids"]) - 1
    assert load(path, format="text").summary()["tokens"] == len(render_text("fox", TOKENIZER))
    with pytest.raises(TrilloraError, match="did you mean 'messages'"):
        load(path, format="message")
    with pytest.raises(TrilloraError, match="did you mean 'assistant'"):
        load(path, format="messages", train_on="assistants")
    with pytest.raises(TrilloraError, match="nothing to train"):
        load(path, format="text", sequence_length=1)


def test_nothing_supervised_is_refused() -> None:
    silent = Rendered(np.array([1, 2], np.int32), np.array([True, False]), "f:1")
    for documents in ([], [silent]):
        with pytest.raises(TrilloraError, match="no token to train on"):
            Batches(documents, batch_size=1, sequence_length=8, seed=0, pack=True)
