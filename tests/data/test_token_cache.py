"""The cache of tokenized rows: it holds what was made from exactly these inputs, and never anything else."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import chat_tokenizer
from data_files import tar_of, zip_of
from rendering import load

from trillora.data import prepare as module
from trillora.data.prepare import DataOptions, Dataset, FileInput, Source, StoreInputs, store_inputs
from trillora.data.reading.files import HASHED_BLOCK, Content, DataFile, FileKind, expand
from trillora.data.rendering.render import RenderSettings
from trillora.data.tokenizing.encode import Encoder
from trillora.data.tokenizing.store import MAKING
from trillora.errors import TrilloraError

TOKENIZER = chat_tokenizer("chatml")
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


def texts_of(dataset: Dataset) -> list[str]:
    documents = dataset.documents()
    return [str(TOKENIZER.decode(documents[i].tokens.tolist())) for i in range(len(documents))]


# -- the key -----------------------------------------------------------------------------------------------------------


def test_the_same_bytes_under_another_suffix_are_read_as_that_kind_of_file(tmp_path: Path) -> None:
    data = json.dumps(HELLO).encode() + b"\n"
    for name, format in {
        "same.txt": "text",
        "same.jsonl": "messages",
        "again.md": "text",
        "a.ndjson": "messages",
    }.items():
        (tmp_path / name).write_bytes(data)
        assert load(tmp_path / name, TOKENIZER, tmp_path / "cache").files[0]["format"] == format, name
    with pytest.raises(TrilloraError, match="not gzip data"):
        (tmp_path / "same.jsonl.gz").write_bytes(data)
        load(tmp_path / "same.jsonl.gz", TOKENIZER, tmp_path / "cache")


def test_a_corrected_suffix_ends_the_complaint(tmp_path: Path) -> None:
    wrong = tmp_path / "t.tsv"
    wrong.write_text("question,answer\nq,a\n")
    assert load(wrong, TOKENIZER, tmp_path, on_bad_row="skip").num_problems == 1
    wrong.rename(tmp_path / "t.csv")
    assert load(tmp_path / "t.csv", TOKENIZER, tmp_path).num_problems == 0


def key(folder: Path, tokenizer: Any = TOKENIZER, sequence_length: int = 64, **options: Any) -> str:
    path = folder / "a.jsonl"
    path.write_text(json.dumps(HELLO))
    chosen = DataOptions(**{"sources": (Source(str(path)),), **options})
    files = expand([source.path for source in chosen.sources])
    contents = [file.content() for file in files]
    return store_inputs(chosen, tokenizer, Encoder(tokenizer), files, contents, sequence_length).key


CHANGED_OPTIONS: dict[str, Any] = {
    "rows": "pairs",
    "format": "messages",
    "template": {"text": "{{ messages[0].content }}"},
    "row_path": "data",
    "schema": {"type": "object"},
    "chat_template": "{{ messages[0].content }}",
    "train_on": "last",
    "thinking": "mask",
    "on_too_long": "truncate-left",
    "template_date": "2025-01-01",
    "template_arguments": {"enable_thinking": False},
    "weight_key": "importance",
    "drop_keys": ("tools",),
    "columns": {"text": "body"},
}
# They select from the stored rows, or decide whether a bad row is an error.
OPTIONS_THAT_KEEP_TOKENS: dict[str, Any] = {"on_bad_row": "skip", "validation": 0.5, "test": 0.5}


def test_every_option_is_in_the_key_or_leaves_the_tokens_alone(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(DataOptions)}
    assert names == {"sources", *CHANGED_OPTIONS, *OPTIONS_THAT_KEEP_TOKENS}, "decide for a new option where it belongs"
    plain = key(tmp_path)
    keys = {name: key(tmp_path, **{name: value}) for name, value in CHANGED_OPTIONS.items()}
    assert len({plain, *keys.values()}) == 1 + len(keys)
    assert all(key(tmp_path, **{name: value}) == plain for name, value in OPTIONS_THAT_KEEP_TOKENS.items())
    path = str(tmp_path / "a.jsonl")
    assert key(tmp_path, sources=(Source(path, weight=2.0),)) == plain
    assert key(tmp_path, sources=(Source(path), Source(path))) != plain
    truncated = [
        key(tmp_path, sequence_length=n, on_too_long=f"truncate-{side}")
        for n in (64, 65)
        for side in ("left", "middle")
    ]
    assert len({plain, *truncated}) == 5 and key(tmp_path, sequence_length=65) == plain


def some_inputs() -> StoreInputs:
    return StoreInputs(
        version=1,
        files=(FileInput(0, FileKind("jsonl", ""), 10, "ab"),),
        row_path=None,
        format="auto",
        rendering=RenderSettings([], []),
        truncate_from=None,
        truncate_to=None,
        tokenizer="cd",
    )


def variants(value: Any) -> list[Any]:
    """Changed copies: every field of a dataclass or a named tuple on its own, at every level."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [dataclasses.replace(value, **{n: v}) for n in fields for v in variants(getattr(value, n))]
    if hasattr(value, "_fields"):
        return [value._replace(**{name: v}) for name in value._fields for v in variants(getattr(value, name))]
    if isinstance(value, tuple) and value:
        return [(v, *value[1:]) for v in variants(value[0])] + [(*value, value[0])]
    match value:
        case None:
            return ["x"]
        case int():
            return [value + 1]
        case str():
            return [value + "x"]
        case list() | tuple():
            return [[*value, "x"]]
        case dict():
            return [{**value, "x": "y"}]
    raise TypeError(type(value))


def test_every_field_of_the_inputs_changes_the_key() -> None:
    changed = variants(some_inputs())
    num_fields = sum(len(dataclasses.fields(owner)) for owner in (StoreInputs, RenderSettings)) + len(FileInput._fields)
    assert len(changed) >= num_fields - 1  # `rendering` is counted by its fields
    assert len({inputs.key for inputs in [some_inputs(), *changed]}) == 1 + len(changed)


def test_the_code_that_fills_a_store_does_not_see_the_recipe() -> None:
    source = inspect.getsource(module._StoreBuilder) + inspect.getsource(module._Resources)
    assert "options" not in source.lower() and ".kind_of" not in source
    assert {field.name for field in dataclasses.fields(module._Resources)} == {
        "files", "contents", "encoder", "pool", "parquet"
    }  # fmt: skip
    # Of a file, only these reach the rows. The name is for messages, the path only opens it, and what is known of its
    # content is in the key.
    assert {field.name for field in dataclasses.fields(DataFile)} == {"name", "path", "source", "kind", "known"}


def test_special_tokens_that_the_vocabulary_does_not_know_are_in_the_key(tmp_path: Path) -> None:
    def changed(**words: Any) -> str:
        tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, **words)
        tokenizer.chat_template = TOKENIZER.chat_template
        return key(tmp_path, tokenizer)

    words = list(TOKENIZER.added_tokens_encoder)[:2]
    choices = [{"eos_token": words[0]}, {"eos_token": words[1]}, {"eos_token": words[0], "bos_token": words[1]}]
    choices += [{"eos_token": words[0], "unk_token": words[1]}]
    assert len({changed(**choice) for choice in choices}) == len(choices)


def test_tokens_change_only_together_with_the_version_of_the_store(tmp_path: Path) -> None:
    rows: list[Any] = [
        HELLO,
        {"prompt": "### Response:\n", "completion": "\nyes"},
        {
            "messages": [
                {"role": "user", "content": "<|im_end|> é"},
                {"role": "assistant", "content": "<think>x</think>y"},
            ]
        },
        {"instruction": "Add", "input": "1 1", "output": "2"},
    ]
    digests = []
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        dataset = load(path, TOKENIZER, tmp_path)
        digests.append(hashlib.sha256(dataset.store.tokens.tobytes()).hexdigest()[:8])
    # If these change, the same data is tokenized differently: increase FORMAT in data/prepare.py, or a cache that was
    # made before the change is used.
    assert (module.FORMAT, digests) == (9, ["fbf118ce", "eb07ddba", "483ccfb1", "05dcb0dc"])


# -- the bytes that were hashed are the bytes that were read -----------------------------------------------------------


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, compression="none", use_dictionary=False)
    return bytes(sink.getvalue())


def jsonl_of(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


FILES: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": jsonl_of,
    "a.json": lambda rows: json.dumps(rows).encode(),
    "a.jsonl.gz": lambda rows: gzip.compress(jsonl_of(rows), mtime=0),
    "a.tar": lambda rows: tar_of({"a.jsonl": jsonl_of(rows)}),
    "a.zip": lambda rows: zip_of({"a.jsonl": jsonl_of(rows)}),
    "a.parquet": parquet_of,
}
HONEST = [{"text": f"the honest fox {number}"} for number in range(50)]
OTHER = [{"text": f"the other dog {number}"} for number in range(50)]


@pytest.fixture
def after_hashing(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Actions that happen after a file is hashed and before it is read."""
    actions: list[Callable[[], object]] = []
    hashed = DataFile.content

    def content(file: DataFile) -> Content:
        found = hashed(file)
        while actions:
            actions.pop()()
        return found

    monkeypatch.setattr(DataFile, "content", content)
    return actions


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_changes_after_it_was_hashed_is_refused_and_not_stored(
    tmp_path: Path, after_hashing: list[Callable[[], object]], name: str
) -> None:
    path, cache = tmp_path / name, tmp_path / "cache"
    honest, other = FILES[name](HONEST), FILES[name](OTHER)
    path.write_bytes(honest)
    after_hashing.append(lambda: path.write_bytes(other))
    with pytest.raises(TrilloraError, match="changed while it was read") as caught:
        load(path, TOKENIZER, cache)
    assert caught.value.where == str(path) and "nothing writes" in caught.value.do
    path.write_bytes(honest)
    dataset = load(path, TOKENIZER, cache)
    assert dataset.is_new and [text.removesuffix("<|im_end|>") for text in texts_of(dataset)] == [
        row["text"] for row in HONEST
    ]
    assert dataset.files[0]["sha256"] == hashlib.sha256(honest).hexdigest()


@pytest.mark.parametrize("change", ["first block", "last block", "shorter", "gone"])
def test_a_change_anywhere_in_a_large_file_is_seen(
    tmp_path: Path, after_hashing: list[Callable[[], object]], change: str
) -> None:
    path = tmp_path / "a.txt"
    data = b"the fox and the dog\n" * (2 * HASHED_BLOCK // 20 + 999)
    path.write_bytes(data)
    places = {"first block": 5, "last block": len(data) - 5}
    if change in places:
        at = places[change]
        after_hashing.append(lambda: path.write_bytes(data[:at] + b"X" + data[at + 1 :]))
    else:
        after_hashing.append(lambda: path.write_bytes(data[:-1]) if change == "shorter" else path.unlink())
    with pytest.raises(TrilloraError, match="cannot be read" if change == "gone" else "changed while it was read"):
        load(path, TOKENIZER, tmp_path / "cache")


def test_rows_appended_after_hashing_are_not_read(tmp_path: Path, after_hashing: list[Callable[[], object]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_of(HONEST))
    after_hashing.append(lambda: path.write_bytes(jsonl_of(HONEST + OTHER)))
    dataset = load(path, TOKENIZER, tmp_path / "cache")
    assert len(dataset.store.rows) == len(HONEST)
    assert dataset.files[0]["sha256"] == hashlib.sha256(jsonl_of(HONEST)).hexdigest()


def test_a_remote_file_that_changes_is_refused(tmp_path: Path, after_hashing: list[Callable[[], object]]) -> None:
    store = fsspec.filesystem("memory")
    url = "memory://changing/a.jsonl"
    store.pipe("/changing/a.jsonl", jsonl_of(HONEST))
    after_hashing.append(lambda: store.pipe("/changing/a.jsonl", jsonl_of(OTHER)))
    try:
        with pytest.raises(TrilloraError, match="changed while it was read"):
            load(url, TOKENIZER, tmp_path)
    finally:
        store.rm("/changing", recursive=True)


# -- what killed processes leave ---------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import filelock
from trillora.data.tokenizing.store import StoreWriter
folder = Path(sys.argv[1])
with filelock.FileLock(f"{folder}.lock"):
    StoreWriter(folder)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one_that_writes(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "data"
    cache.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", KILLED, str(cache / "0123")], check=False, timeout=60)
    (left,) = cache.glob(f"{MAKING}*")
    busy = cache / f"{MAKING}4567-x"
    busy.mkdir()
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_of(HONEST))
    with filelock.FileLock(cache / "4567.lock"):  # another process writes this one now
        assert load(path, TOKENIZER, tmp_path / "cache").is_new
    assert not left.exists() and busy.exists()
    assert not [name for name in os.listdir(cache) if name.startswith(MAKING) and name != busy.name]
