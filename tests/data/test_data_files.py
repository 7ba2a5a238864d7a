"""Expanding the paths of a recipe to files: paths, globs, folders, URLs and hub datasets."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from data_files import ROWS, as_jsonl, as_parquet, rows_of, split, write, zip_of

from trillora.data.reading.files import DataFile, expand, kind_of, left_out
from trillora.errors import TrilloraError


def names(files: list[DataFile], root: Path) -> list[str]:
    return [os.path.relpath(file.name, root) for file in files]


def test_files_folders_and_globs_expand_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/10.json.gz", "b/deep/x.csv", "a.jsonl", "c.TAR.GZ", "notes.doc", ".git/x.json"):
        write(tmp_path, name, b"x")
    for name in ("README.md", "LICENSE.txt", ".hidden.jsonl", "dataset_infos.json", "b/.cache/y.jsonl"):
        write(tmp_path, name, b"x")
    everything = ["a.jsonl", "b/10.json.gz", "b/2.jsonl", "b/deep/x.csv", "c.TAR.GZ"]
    assert names(expand([str(tmp_path)]), tmp_path) == everything
    files = expand([str(tmp_path / "b" / "*.json*"), str(tmp_path / "README.md"), f"file://{tmp_path}/**/*.csv"])
    assert names(files, tmp_path) == ["b/10.json.gz", "b/2.jsonl", "README.md", "b/deep/x.csv"]
    assert [file.source for file in files] == [0, 0, 1, 2]
    assert files[0].content()[:2] == (1, hashlib.sha256(b"x").hexdigest())


def test_files_of_a_folder_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    names = ["a.txt", "b.rst", "c/d.rst", "e.PDF", "README.rst", ".git/x", "noname"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    said = "4 files are left out, which no reader knows: 2 x .rst, 1 x .pdf, 1 x no suffix"
    assert left_out(str(tmp_path)) == f"{tmp_path}: {said}"
    said = "2 files are left out, which no reader knows: 1 x .pdf, 1 x .rst"
    assert left_out(f"{tmp_path}/*.*") == f"{tmp_path}/*.*: {said}"
    entries = (f"{tmp_path}/*.txt", f"{tmp_path}/a.txt", "owner/name", "gs://b/x")
    assert [left_out(entry) for entry in entries] == [None] * 4


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a[1].jsonl", as_jsonl())
    assert [file.path for file in expand([path])] == [path]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("A.JSONL.GZ", ("jsonl", "gzip")),
        ("a.tgz", ("tar", "gzip")),
        ("a.tar.zst", ("tar", "zstd")),
        ("a.zip", ("zip", "")),
    ],
)
def test_the_suffixes_give_the_kind(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["a", "a.gz", "a.zip.gz", "jsonl", "a.exe", ".gz"])
def test_files_with_other_suffixes_are_not_data(name: str) -> None:
    assert kind_of(name) is None


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing/*.jsonl", "no data file"),
        ("empty", "no data file"),
        ("other.exe", "suffix of this file is unknown"),
        ("*.exe", "among the 1 files"),
        ("pipe.jsonl", "not a regular file"),
        ("dangling.jsonl", "No such file"),
        ("", "is empty"),
        ("a\0b", "NUL"),
        ("nosuchscheme://x/y.jsonl", "cannot be opened"),
        ("memory://nothing/there.jsonl", "no data at"),
        ("simplecache::memory://x.jsonl", "Chained"),
    ],
)
def test_an_entry_without_data_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path, "other.exe", b"x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.symlink("missing", tmp_path / "dangling.jsonl")
    with pytest.raises(TrilloraError, match=word) as error:
        expand([entry])
    assert error.value.do and error.value.where is not None


def test_urls_are_read_like_files() -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/sources/b.jsonl.gz": gzip.compress(as_jsonl()), "/sources/a/x.zip": zip_of({"a.json": as_jsonl()})})
    store.pipe({"/sources/a/t.parquet": as_parquet(), "/sources/README.md": b"x"})
    try:
        files = expand(["memory://sources", "memory://sources/*.gz", "memory://sources/a/t.parquet"])
        ends = ["a/t.parquet", "a/x.zip", "b.jsonl.gz", "b.jsonl.gz", "t.parquet"]
        assert all(
            file.name.startswith("memory://") and file.name.endswith(e) for file, e in zip(files, ends, strict=True)
        )
        for file in files:
            assert split(list(rows_of(file))) == (ROWS, [])
        assert files[2].content().sha256 == hashlib.sha256(store.cat("/sources/b.jsonl.gz")).hexdigest()
    finally:
        store.rm("/sources", recursive=True)


def test_secrets_of_a_url_are_never_shown() -> None:
    with pytest.raises(TrilloraError) as error:
        expand(["nosuch://user:hunter2@host/x.jsonl?signature=hunter2"])
    assert "hunter2" not in str(error.value) and error.value.__cause__ is None


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache in the layout of huggingface_hub, with one dataset; the tests run with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    repository = tmp_path / "cache" / "datasets--owner--talks"
    commit = "0123456789abcdef0123456789abcdef01234567"
    write(repository, "refs/main", commit.encode())
    for name in ("data/train.jsonl", "data/more.json", "README.md"):
        blob = write(repository, f"blobs/{name.replace('/', '-')}", as_jsonl())
        link = repository / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return repository


def test_a_hub_dataset_is_read_from_the_cache(hub_cache: Path) -> None:
    files = expand(["owner/talks", f"owner/talks@{'0123456789abcdef0123456789abcdef01234567'}"])
    assert [file.name for file in files[:2]] == ["owner/talks/data/more.json", "owner/talks/data/train.jsonl"]
    assert [file.source for file in files] == [0, 0, 1, 1]
    assert all(split(list(rows_of(file))) == (ROWS, []) for file in files)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data/*.json", ["more.json"]),
        ("/data/train.jsonl", ["train.jsonl"]),
        ("/data", ["more.json", "train.jsonl"]),
        ("@main/data/", ["more.json", "train.jsonl"]),
        ("", ["more.json", "train.jsonl"]),
    ],
)
def test_a_part_of_a_hub_dataset_is_read_from_the_cache(hub_cache: Path, path: str, found: list[str]) -> None:
    files = expand([f"hf://datasets/owner/talks{path}"])
    assert [Path(file.name).name for file in files] == found
    assert all(split(list(rows_of(file))) == (ROWS, []) for file in files)


@pytest.mark.parametrize("path", ["/other", "/data/*.parquet", "/README.md"])
def test_a_part_of_a_hub_dataset_without_data_is_an_error(hub_cache: Path, path: str) -> None:
    with pytest.raises(TrilloraError, match="has no data file"):
        expand([f"hf://datasets/owner/talks{path}"])


def test_a_folder_has_precedence_over_a_dataset_of_the_same_name(hub_cache: Path, tmp_path: Path) -> None:
    write(tmp_path, "owner/talks/mine.jsonl", as_jsonl())
    assert [file.name for file in expand(["owner/talks"])] == ["owner/talks/mine.jsonl"]


@pytest.mark.parametrize("entry", ["owner/nothing", "owner/talks@v2"])
def test_a_dataset_that_is_not_available_is_an_error(hub_cache: Path, entry: str) -> None:
    with pytest.raises(TrilloraError, match="cannot be reached") as error:
        expand([entry])
    assert "HF_HUB_OFFLINE" in error.value.do


def test_a_gated_or_missing_dataset_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    cases = {errors.GatedRepoError: "gated", errors.RepositoryNotFoundError: "no dataset", RuntimeError: "RuntimeError"}
    for kind, word in cases.items():

        def refuse(*args: object, kind: Any = kind, **kwargs: object) -> str:
            raise kind.__new__(kind)  # without its constructor, which needs a response

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(TrilloraError, match=word):
            expand(["owner/name"])


def test_a_file_that_disappears_stops_the_run_with_its_name(tmp_path: Path) -> None:
    (file,) = expand([write(tmp_path, "a.jsonl", as_jsonl())])
    os.remove(file.path)
    for work in (lambda: list(rows_of(file)), file.content):
        with pytest.raises(TrilloraError, match="cannot be read") as error:
            work()
        assert error.value.where == file.name
