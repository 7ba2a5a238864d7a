"""Small data files of every kind for the tests, and functions that read them."""

from __future__ import annotations

import atexit
import csv
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from trillora.data.reading.files import DataFile, expand
from trillora.data.reading.parquet import ParquetDecoder
from trillora.data.reading.readers import RowChoice, read_rows
from trillora.data.rows import Fault, RawRow, RowsOfFile

ROWS: list[dict[str, Any]] = [{"text": "one"}, {"text": "zwei → 2"}, {"text": 'three "3"\nlines'}]
MIB = 1 << 20


def as_jsonl(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([["text"], *([row["text"]] for row in ROWS)])
    return text.getvalue().encode()


def as_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=2)
    return sink.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": as_jsonl,
    "a.ndjson": as_jsonl,
    "a.json": lambda: json.dumps(ROWS, ensure_ascii=False, indent=2).encode(),
    "wrapped.json": lambda: json.dumps({"version": [1, {"a": "]"}], "data": ROWS, "more": {"x": []}}).encode(),
    "lines.json": as_jsonl,
    "a.csv": as_csv,
    "a.tsv": lambda: as_csv("\t"),
    "a.parquet": as_parquet,
}


def wrap(data: bytes, suffix: str) -> bytes:
    return gzip.compress(data) if suffix == ".gz" else zstandard.compress(data) if suffix == ".zst" else data


def write(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


PARQUET = ParquetDecoder()  # one process for all tests
atexit.register(PARQUET.close)


def rows_of(
    file: DataFile,
    row_path: str | None = None,
    consumed: Callable[[int], None] = lambda count: None,
    say: Callable[[str], None] = lambda text: None,
) -> RowsOfFile:
    """The rows of a file as it is now."""
    return read_rows(file, file.content(), PARQUET, RowChoice(row_path), consumed=consumed, say=say)


def read(path: str, rows: str | None = None) -> list[RawRow | Fault]:
    """All rows and faults of a file. The reported progress must add up to its size."""
    (file,) = expand([path])
    progress: list[int] = []
    found = list(rows_of(file, rows, progress.append))
    assert sum(progress) == file.content().size and all(count > 0 for count in progress)
    return found


def split(found: list[RawRow | Fault]) -> tuple[list[Any], list[Fault]]:
    faults = [row for row in found if isinstance(row, Fault)]
    assert all(fault.what.endswith(".") and fault.do for fault in faults)
    return [json.loads(row.raw) for row in found if isinstance(row, RawRow)], faults


def only_fault(path: str, rows: str | None = None) -> Fault:
    (fault,) = read(path, rows)
    assert isinstance(fault, Fault) and fault.do
    return fault


def tar_of(members: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def zip_of(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return sink.getvalue()
