"""The reader of JSON files that may be damaged or hostile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from trillora.errors import TrilloraError
from trillora.files.read_json import read_json


class Index(BaseModel):
    weight_map: dict[str, str]


def read(file: Path, expected: type = Index, **options: Any) -> Any:
    return read_json(file, expected, do="download the file again", **options)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "index").write_text('\ufeff{"weight_map": {"a": "b"}, "metadata": [[[1]]]}', "utf-8")
    assert read(tmp_path / "index").weight_map == {"a": "b"}
    assert read(tmp_path / "index", dict[str, Any])["metadata"] == [[[1]]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "100 levels"),
        (b'{"a": "' + b"[" * 200 + b'", "b": ' + b"[" * 101, "100 levels"),
        (b'{"weight_map": NaN}', "NaN is not a JSON number"),
        (b"[]", "its content"),
        (b"5", "its content"),
        (b'{"weight_map": {"a": 5}}', "weight_map.a must be a valid string"),
        (b'{"weight_map": null}', "weight_map must be a valid dictionary"),
        (b'{"a": 1' + b"1" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_bad_file_is_named_with_the_reason(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "index").write_bytes(content)
    with pytest.raises(TrilloraError, match=words) as caught:
        read(tmp_path / "index")
    assert caught.value.where == str(tmp_path / "index")


def test_brackets_in_text_are_not_depth(tmp_path: Path) -> None:
    (tmp_path / "index").write_text('{"weight_map": {"' + "[{" * 500 + '": "\\"["}}')
    assert len(read(tmp_path / "index").weight_map) == 1


def test_pipes_devices_and_large_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b" " * 2_000_000)
    for name in ("pipe", "link", "large", "missing"):
        with pytest.raises(TrilloraError, match="cannot be"):
            read(tmp_path / name, max_bytes=1_000_000)
