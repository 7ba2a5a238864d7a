"""Hub data sets by config, split and columns: the real client of huggingface_hub and a server on this machine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback_datasets
import pyarrow
import pyarrow.parquet
import pytest
from chat_tokenizers import chat_tokenizer
from huggingface_hub import constants
from loopback_datasets import DatasetHub
from rendering import load

from trillora.data.prepare import Dataset, Source
from trillora.errors import TrilloraError

TOKENIZER = chat_tokenizer("chatml")
NAME = "some-org/questions"


def table(word: str, num: int, filler: int = 0) -> bytes:
    """Questions and answers in Parquet, with a column that no one needs."""
    rows = [{"question": f"{word} {n}?", "reply": f"{word} is {n}.", "scan": f"{n:05}" * filler} for n in range(num)]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, compression="none", use_dictionary=False)
    return file.getvalue()


def lines(word: str, num: int) -> bytes:
    return "".join(json.dumps({"prompt": f"{word} {n}?", "completion": f" {n}"}) + "\n" for n in range(num)).encode()


FILES = {
    "README.md": b"# Questions",
    "en/train-0.parquet": table("one", 3, filler=200_000),
    "en/train-1.parquet": table("more", 2),
    "en/test-0.parquet": table("exam", 2),
    "ro/data.jsonl": lines("unu", 4),
    "loader.py": b"raise SystemExit('never run')",
}
CARD = {
    "configs": [
        {
            "config_name": "en",
            "data_files": [{"split": "train", "path": "en/train-*"}, {"split": "test", "path": ["en/test-*"]}],
        },
        {"config_name": "ro", "data_files": "ro/*.jsonl"},
    ]
}
COLUMNS = {"prompt": "question", "completion": "reply"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    from huggingface_hub import HfFileSystem

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    HfFileSystem.clear_instance_cache()
    with loopback_datasets.running(DatasetHub(NAME, {"main": dict(FILES)}, card=CARD)) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served
    HfFileSystem.clear_instance_cache()


def opened(tmp_path: Path, source: Source, **options: Any) -> Dataset:
    return load("unused", TOKENIZER, tmp_path / "cache", sources=(source,), **options)


def texts(dataset: Dataset) -> list[str]:
    documents = dataset.documents("train", 0)
    return sorted(
        TOKENIZER.decode(documents[n].tokens.tolist(), skip_special_tokens=True) for n in range(len(documents))
    )


def test_a_split_of_a_config_is_read_without_the_rest(hub: DatasetHub, tmp_path: Path) -> None:
    dataset = opened(tmp_path, Source(NAME, config="en", split="train"), columns=COLUMNS)
    assert texts(dataset) == sorted(
        [f"one {n}?one is {n}." for n in range(3)] + [f"more {n}?more is {n}." for n in range(2)]
    )
    assert [file["name"] for file in dataset.files] == [f"{NAME}/en/train-0.parquet", f"{NAME}/en/train-1.parquet"]
    assert hub.read == {"en/train-0.parquet", "en/train-1.parquet"}
    sent = hub.num_bytes
    assert sent < len(FILES["en/train-0.parquet"]) * 1.5, "each byte is read once at most, not hashed first"
    assert texts(opened(tmp_path, Source(NAME, config="en", split="train"), columns=COLUMNS)) == texts(dataset)
    assert hub.num_bytes == sent, "tokens are in the cache"


@pytest.mark.parametrize(("config", "file"), [("ro", "ro/data.jsonl"), ("en", "en/train-1.parquet")])
def test_bytes_that_are_not_those_of_the_hubs_digest_are_refused(
    hub: DatasetHub, tmp_path: Path, config: str, file: str
) -> None:
    other = FILES[file].replace(b"unu 2", b"unu 9").replace(b"more is 1", b"more is 7")
    assert len(other) == len(FILES[file]) and other != FILES[file]
    hub.sent_instead[file] = other
    with pytest.raises(TrilloraError, match="not the one that the hub lists") as caught:
        opened(tmp_path, Source(NAME, config=config, split="train"), columns=COLUMNS if config == "en" else {})
    assert file in str(caught.value.where)


def test_columns_are_the_keys_of_a_format(hub: DatasetHub, tmp_path: Path) -> None:
    renamed = opened(
        tmp_path, Source(NAME, config="en", split="test"), columns={"question": "question", "answer": "reply"}
    )
    assert renamed.files[0]["format"] == "question-answer"
    with pytest.raises(TrilloraError, match=r'no "questoin", which data\.columns names') as caught:
        opened(tmp_path, Source(NAME, config="en", split="test"), columns={"prompt": "questoin", "completion": "reply"})
    assert caught.value.do is not None and "data.columns" in caught.value.do


def test_all_splits_of_a_config_without_a_split(hub: DatasetHub, tmp_path: Path) -> None:
    assert len(texts(opened(tmp_path, Source(NAME, config="en"), columns=COLUMNS))) == 7
    assert len(texts(opened(tmp_path, Source(NAME, config="ro", split="train")))) == 4


@pytest.mark.parametrize(
    ("source", "what", "do"),
    [
        (Source(NAME, split="train"), "has 2 configurations, and the recipe names none", "one of: en, ro"),
        (Source(NAME, config="eng"), "has no config 'eng'", "did you mean en? Use one of: en, ro"),
        (Source(NAME, config="en", split="tset"), "has no split 'tset'", "did you mean test? Use one of: test, train"),
        (Source("some-org/other", split="train"), "The hub has no dataset 'some-org/other'", "hf auth login"),
        (Source(f"{NAME}@v2", split="train"), "has no revision 'v2'", "branch"),
        (Source("rows.jsonl", split="train"), "is not the id of a Hugging Face data set", "remove config and split"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_exist_is_named_with_what_does(
    hub: DatasetHub, tmp_path: Path, source: Source, what: str, do: str
) -> None:
    with pytest.raises(TrilloraError) as caught:
        opened(tmp_path, source)
    assert what in caught.value.what and do in (caught.value.do or "")


def test_splits_are_known_by_the_names_of_files_without_a_card(hub: DatasetHub, tmp_path: Path) -> None:
    hub.card = {}
    hub.revisions["main"] = {"a.jsonl": lines("a", 1), "data/dev.jsonl": lines("b", 2), "test_1.jsonl": lines("c", 3)}
    assert [len(texts(opened(tmp_path, Source(NAME, split=split)))) for split in ("train", "validation", "test")] == [
        1,
        2,
        3,
    ]
    assert len(texts(opened(tmp_path, Source(NAME, config="default")))) == 6


def test_a_data_set_with_only_a_script_is_read_from_the_hubs_conversion(hub: DatasetHub, tmp_path: Path) -> None:
    hub.card, hub.revisions["main"] = {}, {"loader.py": b"raise SystemExit"}
    with pytest.raises(TrilloraError, match="no data file that can be read"):
        opened(tmp_path, Source(NAME, split="train"))
    hub.revisions["refs/convert/parquet"] = {
        "fr/train/0000.parquet": table("un", 2),
        "fr/partial-test/0000.parquet": table("x", 1),
    }
    assert len(texts(opened(tmp_path, Source(NAME, config="fr", split="train"), columns=COLUMNS))) == 2
    assert len(texts(opened(tmp_path, Source(NAME, split="test"), columns=COLUMNS))) == 1
