"""Reading rows from files: every format, compression and archive, and every hostile or broken file we know."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
import stat
import tarfile
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from chat_tokenizers import chat_tokenizer
from data_files import (
    FORMATS,
    MIB,
    ROWS,
    as_csv,
    as_jsonl,
    as_parquet,
    only_fault,
    read,
    rows_of,
    split,
    tar_of,
    wrap,
    write,
    zip_of,
)
from dose import FULL
from rendering import load

from trillora.data.reading import archives, json_rows, readers, streams, tables
from trillora.data.reading.cursor import MAX_ROW_BYTES
from trillora.data.reading.files import DataFile, FileKind, expand
from trillora.data.rows import Fault, RawRow, place
from trillora.errors import TrilloraError

# -- formats, compressions and archives --------------------------------------------------------------------------------


LINES = {"a.json": [2, 5, 8], "wrapped.json": [1, 1, 1], "a.csv": [2, 3, 4], "a.tsv": [2, 3, 4]}  # else 1, 2, 3


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_in_every_compression(tmp_path: Path, name: str, suffix: str) -> None:
    found = read(write(tmp_path, name + suffix, wrap(FORMATS[name](), suffix)))
    assert split(found) == (ROWS, [])
    assert {row.member for row in found} == {""} and [row.line for row in found] == LINES.get(name, [1, 2, 3])


@pytest.mark.parametrize("block", [1, 7, 64, streams.BLOCK])
def test_a_row_is_placed_on_the_line_where_an_editor_shows_its_start(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (json_rows, tables, readers):
        monkeypatch.setattr(module, "BLOCK", block)  # in small blocks, a row and its line ends are in several
    rows = [{"n": str(n), "text": "line\nbreaks\n" * (n % 3) + "x" * n} for n in range(40)]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["n", "text"])  # ends lines with \r\n
    writer.writeheader()
    for row in rows:
        writer.writerow(row)
        table.write("\r\n" * (int(row["n"]) % 2))  # blank lines
    nested = {"about": {"lines": [1, 2]}, "data": rows}
    documents = [json.dumps(value, indent=indent) for value in (rows, nested) for indent in (0, 1, 4)]
    documents += ["".join(json.dumps(row, indent=2) + "\n\n" for row in rows), json.dumps(rows).replace("}, {", "},{")]
    for name, text in [("a.csv", table.getvalue()), *((f"{n}.json", text) for n, text in enumerate(documents))]:
        found = read(write(tmp_path, name, text.encode()))
        assert split(found) == (rows, [])
        if name == "a.csv":
            starts = [text.index(f"\n{row['n']},") + 1 for row in rows]
        else:
            starts = [m.start() for m in re.finditer(r'\{\s*"n"', text)]
        assert [row.line for row in found] == [text.count("\n", 0, start) + 1 for start in starts], name
        on_lines = Counter[int]()
        for row in found:
            on_lines[row.line] += 1
            assert row.nth == on_lines[row.line]


def test_rows_of_one_json_line_are_counted(tmp_path: Path) -> None:
    found = read(write(tmp_path, "a.json", b'[{"a": 1}, {"a": 2},\n{"a": 3}]'))
    assert [place("a.json", row.member, row.line, row.nth) for row in found] == [
        "a.json:1",
        "a.json:1 (row 2 of the line)",
        "a.json:2",
    ]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip"])
def test_members_of_archives_are_read_in_order_with_their_names(tmp_path: Path, suffix: str) -> None:
    members = {f"dir/{name}": make() for name, make in FORMATS.items()}
    members |= {f"./z/{name}.gz": gzip.compress(make()) for name, make in FORMATS.items()}
    members |= {"x.jsonl.zst": zstandard.compress(as_jsonl()), "photo.jpg": b"no data", "README.md": b"no data"}
    data = zip_of(members) if suffix == ".zip" else tar_of(members)
    data = wrap(data, {".tar.gz": ".gz", ".tgz": ".gz", ".tar.zst": ".zst"}.get(suffix, ""))
    found = read(write(tmp_path, "a" + suffix, data))
    rows, faults = split(found)
    assert (rows, faults) == (ROWS * 17, [])
    assert list(dict.fromkeys(row.member for row in found)) == list(members)[:17]


def test_a_long_name_in_a_tar_is_read_in_every_dialect(tmp_path: Path) -> None:
    name = "d" * 150 + "/ä" + "n" * 200 + ".jsonl"
    for number, dialect in enumerate([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]):
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=dialect) as archive:
            info = tarfile.TarInfo(name)
            info.size = len(as_jsonl())
            archive.addfile(info, io.BytesIO(as_jsonl()))
        found = read(write(tmp_path, f"{number}.tar", sink.getvalue()))
        assert split(found) == (ROWS, []) and found[0].member == name


def test_text_files_are_one_row_each(tmp_path: Path) -> None:
    assert split(read(write(tmp_path, "a.txt", b"a\r\nb\r\n"))) == ([{"text": "a\nb\n"}], [])
    assert split(read(write(tmp_path, "b.md.gz", gzip.compress(b"# b")))) == ([{"text": "# b"}], [])


def test_long_text_is_split_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a long text\n" for number in range(900_000))
    rows, faults = split(read(write(tmp_path, "a.txt", text.encode())))
    assert faults == [] and len(rows) == len(text) // (8 * MIB) + 1
    assert "".join(row["text"] for row in rows) == text
    assert all(row["text"].endswith("\n") and len(row["text"]) <= 9 * MIB for row in rows)


def test_parquet_values_without_a_json_type_become_text_or_a_fault(tmp_path: Path) -> None:
    import datetime
    import decimal

    day, price = datetime.date(2024, 2, 29), decimal.Decimal("1.50")
    table = pa.table({"day": [day, day], "price": [price, price], "blob": [b"text", b"\xff"]})
    pq.write_table(table, tmp_path / "a.parquet")
    rows, faults = split(read(str(tmp_path / "a.parquet")))
    assert rows == [{"day": "2024-02-29", "price": "1.50", "blob": "text"}]
    assert [fault.line for fault in faults] == [2]


def test_a_parquet_string_that_is_not_utf8_loses_only_its_row(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    rows, faults = split(read(str(tmp_path / "a.parquet")))
    assert rows == [{"text": "ok"}] and [fault.line for fault in faults] == [2]


# -- rows inside a JSON document ---------------------------------------------------------------------------------------

SHARD = {
    "metadata": {"n": 3},
    "data": {"version": "2.0", "findings": {"scan": {"low": [{"id": 1}, {"id": 2}]}, "net": {"high": [{"id": 3}]}}},
}


@pytest.mark.parametrize(
    ("rows", "ids"),
    [("data.findings.*.*", [1, 2, 3]), ("data.findings.scan.low", [1, 2]), ("data.findings.net.*", [3])],
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_at_a_path_are_found_also_in_compressed_documents(
    tmp_path: Path, rows: str, ids: list[int], packed: bool
) -> None:
    document: dict[str, Any] = SHARD
    if packed:
        hexed = gzip.compress(json.dumps(SHARD).encode()).hex()
        document = {"compressed": True, "compression_method": "gzip", "data": hexed}
    found = read(write(tmp_path, "a.json", json.dumps(document).encode()), rows)
    assert split(found) == ([{"id": number} for number in ids], [])


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ('[{"a": 1}, {"a": 2}]', None),
        ('{"version": 3, "data": [{"a": 1}, {"a": 2}]}', None),
        ('{"a": 1} {"a": 2}', None),
        ('{"x": {"high": [{"a": 1}], "low": [{"a": 2}]}}', "x.*"),
    ],
)
def test_the_examples_of_the_json_reader_hold(tmp_path: Path, document: str, rows: str | None) -> None:
    assert json_rows.__doc__ is not None and document in json_rows.__doc__
    packed = json.dumps({"compressed": True, "data": gzip.compress(document.encode()).hex()})
    for number, text in enumerate([document, packed]):
        found = read(write(tmp_path, f"{number}.json", text.encode()), rows)
        assert split(found) == ([{"a": 1}, {"a": 2}], [])


def test_a_compressed_document_without_a_path_is_read_like_any_document(tmp_path: Path) -> None:
    for number, inner in enumerate([ROWS, {"data": ROWS}]):
        document = {"data": gzip.compress(json.dumps(inner).encode()).hex(), "compressed": True}
        assert split(read(write(tmp_path, f"{number}.json", json.dumps(document).encode()))) == (ROWS, [])


def test_one_object_is_one_row_for_other_values_of_its_data_key(tmp_path: Path) -> None:
    for number, row in enumerate([{"a": {"b": ["]", "\\", '"}']}}, {"data": "text"}, {"data": [1]}, {"compressed": 0}]):
        assert split(read(write(tmp_path, f"{number}.json", json.dumps(row).encode()))) == ([row], [])


def test_a_path_without_rows_names_the_keys_of_the_document(tmp_path: Path) -> None:
    fault = only_fault(write(tmp_path, "a.json", json.dumps(SHARD).encode()), "data.finding.*")
    assert "data.finding.*" in fault.what and "metadata data" in fault.what
    assert "nothing at data.row_path" in only_fault(write(tmp_path, "b.json", b"[1, 2]"), "data").what
    assert "data.row_path" in only_fault(write(tmp_path, "a.jsonl", as_jsonl()), "data.*").what


@pytest.mark.parametrize(
    ("inner", "word"),
    [("zz", "hexadecimal"), (b"no gzip at all".hex(), "gzip"), (gzip.compress(as_jsonl())[:-9].hex(), "cut")],
)
def test_a_broken_compressed_document_is_a_fault(tmp_path: Path, inner: str, word: str) -> None:
    document = json.dumps({"compressed": True, "data": inner}).encode()
    assert word in split(read(write(tmp_path, "a.json", document)))[1][0].what


def test_json_is_split_into_the_values_that_the_json_module_finds(tmp_path: Path) -> None:
    deep: Any = "end"
    for number in range(40):
        deep = [deep, {'k\\"]}': deep if number < 3 else number}]
    values: list[Any] = [1, -2.5e3, "a,b]\\", "", None, True, [], {}, [[]], {"a": [{"b": [{"c": "}"}]}]}, deep, "é" * 9]
    values += [{"m": '\\"' * 200_000, "n": ["{" * 300_000]}, "x" * 700_000]
    for number, indent in enumerate([None, 1]):
        path = write(tmp_path, f"{number}.json", json.dumps(values * 3, indent=indent).encode())
        assert split(read(path)) == (values * 3, [])


# -- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_byte_order_marks_decide_the_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith(("le", "be")) else ""
    data = (mark + FORMATS[name]().decode()).encode(encoding)
    assert split(read(write(tmp_path, name, data))) == (ROWS, [])


def test_windows_line_ends_and_blank_lines_are_not_rows(tmp_path: Path) -> None:
    found = read(write(tmp_path, "a.jsonl", b'\r\n{"a": 1}\r\n \t\r\n\n{"a": 2}'))
    assert split(found) == ([{"a": 1}, {"a": 2}], [])
    assert [(row.line, row[2]) for row in found] == [(2, b'{"a": 1}'), (5, b'{"a": 2}')]


def test_bytes_that_are_not_utf8_lose_only_their_row(tmp_path: Path) -> None:
    lines = read(write(tmp_path, "a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 2}\n'))
    assert [row[2] for row in lines] == [b'{"a": 1}', b'{"a": "\xff"}', b'{"a": 2}']
    rows, faults = split(read(write(tmp_path, "a.json", b'[{"a": 1},\n{"a": "\xff"}, {"a": 2}]')))
    assert rows == [{"a": 1}, {"a": 2}] and faults[0].line == 2 and "Byte 8" in faults[0].what
    rows, faults = split(read(write(tmp_path, "a.csv", b"a\n1\n\xff\n2\n")))
    assert rows == [{"a": "1"}, {"a": "2"}] and faults[0].line == 3
    assert "Byte 3" in only_fault(write(tmp_path, "a.txt", b"ab\xffc")).what


def test_half_a_surrogate_pair_in_utf16_loses_only_its_row(tmp_path: Path) -> None:
    data = b"\xff\xfe" + '{"a": 1}\n{"a": "\ud800"}\n{"a": 2}\n'.encode("utf-16-le", "surrogatepass")
    first, second, third = read(write(tmp_path, "a.jsonl", data))
    assert (first[2], third[2]) == (b'{"a": 1}', b'{"a": 2}')
    assert isinstance(second, RawRow)
    with pytest.raises(UnicodeDecodeError):
        second.raw.decode()


@pytest.mark.parametrize("data", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_a_file_without_a_row_is_called_empty(tmp_path: Path, name: str, data: bytes) -> None:
    packed = gzip.compress(data) if name.endswith(".gz") else data
    assert "is empty" in only_fault(write(tmp_path, name, packed)).what
    assert "is empty" in only_fault(write(tmp_path, "a.zip", zip_of({name: packed}))).what


def test_csv_records_that_do_not_match_the_header_are_the_only_ones_lost(tmp_path: Path) -> None:
    rows, faults = split(read(write(tmp_path, "a.csv", b'a,b\n1,2\n3\n"x\ny","z,"""\n4,5,6\n')))
    assert rows == [{"a": "1", "b": "2"}, {"a": "x\ny", "b": 'z,"'}]
    assert [(fault.line, fault.what[:25]) for fault in faults] == [
        (3, "This record has 1 fields;"),
        (6, "This record has 3 fields;"),
    ]
    trailing = write(tmp_path, "d.csv", b"a,b\n1,2,\n3,4,,\n")  # some writers end every record with a separator
    assert split(read(trailing)) == ([{"a": "1", "b": "2"}, {"a": "3", "b": "4"}], [])
    assert "two columns called 'a'" in only_fault(write(tmp_path, "b.csv", b"a,a\n1,2\n")).what
    rows, faults = split(read(write(tmp_path, "c.csv", b'a\n1\n"never closed\n2\n3\n')))
    assert rows == [{"a": "1"}] and "a closing quote is missing" in faults[0].what and "closing quote" in faults[0].do
    assert "The rest of the file is not read" in faults[0].what and faults[0].line == 3


@pytest.mark.parametrize(("separator", "said"), [(";", "semicolons"), ("\t", "tabs"), (",", None)])
def test_a_table_with_another_separator_is_read_and_this_is_said(tmp_path: Path, separator: str, said: str) -> None:
    text = f'a{separator}b\r\n1{separator}"2, 3; 4"\r\n'
    notes: list[str] = []
    (file,) = expand([write(tmp_path, "a.csv", text.encode())])
    rows, faults = split(list(rows_of(file, say=notes.append)))
    assert (rows, faults) == ([{"a": "1", "b": "2, 3; 4"}], [])
    assert notes == ([f"columns are separated by {said}"] if said else [])


def test_one_column_is_one_column(tmp_path: Path) -> None:
    assert split(read(write(tmp_path, "a.csv", b"text\na;b\nc\td\n"))) == ([{"text": "a;b"}, {"text": "c\td"}], [])


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_members_that_are_no_data_are_counted_by_suffix(tmp_path: Path, name: str) -> None:
    members = {"a.jsonl": as_jsonl(), "b.rst": b"x", "c/d.rst": b"x", "e": b"x", "README.md": b"x", ".hidden": b"x"}
    notes: list[str] = []
    (file,) = expand([write(tmp_path, name, zip_of(members) if name == "a.zip" else tar_of(members))])
    assert split(list(rows_of(file, say=notes.append))) == (ROWS, [])
    assert notes == ["3 files are left out, which no reader knows: 2 x .rst, 1 x no suffix"]


# -- damage: the rows before it are read -------------------------------------------------------------------------------

MANY = [
    {"n": number, "text": hashlib.sha256(bytes([number % 256, number // 256])).hexdigest()} for number in range(20_000)
]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_before_a_cut_are_read(tmp_path: Path, name: str, suffix: str) -> None:
    plain = as_jsonl(MANY) if name == "a.jsonl" else json.dumps(MANY).encode()
    packed = wrap(plain, suffix)
    rows, faults = split(read(write(tmp_path, name + suffix, packed[: len(packed) // 2])))
    assert len(rows) > 5_000 and rows == MANY[: len(rows)]
    assert len(faults) == 1 and "cut" in faults[0].what
    assert faults[0].line == (1 if name == "a.json" else len(rows) + 1)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_rows_before_the_cut_of_an_archive_are_read(tmp_path: Path, suffix: str) -> None:
    data = wrap(tar_of({"a.jsonl": as_jsonl(), "b.jsonl": as_jsonl(MANY), "c.jsonl": as_jsonl()}), suffix[4:])
    found = read(write(tmp_path, "a" + suffix, data[: len(data) // 2]))
    rows, faults = split(found)
    assert rows[:3] == ROWS and len(rows) > 5_000 and rows[3:] == MANY[: len(rows) - 3]
    assert [fault.member for fault in faults] == ["b.jsonl"]


def test_a_damaged_zip_member_is_the_only_one_lost(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.jsonl": as_jsonl(), "b.jsonl": as_jsonl(MANY), "c.jsonl": as_jsonl()}))
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    found = read(write(tmp_path, "a.zip", bytes(data)))
    assert split(found[:3]) == split(found[-3:]) == (ROWS, [])
    assert split(found[3:1000])[0] == MANY[:997]  # after the damage rows are garbage, until the checksum fails
    assert [row.member for row in found if isinstance(row, Fault)] == ["b.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.tar", "a.tgz", "a.zip", "a.parquet", "a.json"])
def test_a_file_that_is_not_what_its_suffix_says_is_a_fault(tmp_path: Path, name: str) -> None:
    assert " not " in only_fault(write(tmp_path, name, b"hello world, " * 100)).what


@pytest.mark.parametrize("name", ["a.zip", "a.parquet", "a.tar"])
def test_a_cut_archive_or_table_is_a_fault(tmp_path: Path, name: str) -> None:
    data = {
        "a.zip": zip_of({"a.jsonl": as_jsonl()}),
        "a.parquet": as_parquet(),
        "a.tar": tar_of({"a.jsonl": as_jsonl()}),
    }
    assert split(read(write(tmp_path, name, data[name][:-40][:1024])))[1]


@pytest.mark.parametrize(
    "document", [b'[{"a": 1},\n{"a": 2', b'[{"a": 1}\n{"a": 2}]', b'[{"a": 1},\n, 2]', b'[{"a": 1},\n {"a": "\n']
)
def test_records_before_broken_json_are_read(tmp_path: Path, document: bytes) -> None:
    rows, faults = split(read(write(tmp_path, "a.json", document)))
    assert rows == [{"a": 1}] and len(faults) == 1 and "byte" in faults[0].what and faults[0].line == 2


def test_corrupt_parquet_is_a_fault_and_never_wrong_rows(tmp_path: Path) -> None:
    data = bytearray(as_parquet())
    starts = range(4, len(data) - 8, 7)  # after the magic number, up to the length of the footer
    num_faulty = 0
    for start in starts:
        damaged = data.copy()
        damaged[start : start + 3] = b"\xff\xff\xff"
        rows, faults = split(read(write(tmp_path, "a.parquet", bytes(damaged))))
        assert faults or rows == ROWS, start  # some bytes, such as statistics, are not needed for reading
        num_faulty += bool(faults)
    assert num_faulty > len(starts) / 2


def test_an_encrypted_zip_member_and_one_of_an_unknown_method_are_faults(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.jsonl": as_jsonl(), "b.jsonl": as_jsonl()}))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 8] |= 1
    rows, (fault,) = split(read(write(tmp_path, "a.zip", bytes(data))))
    assert rows == ROWS and fault.member == "b.jsonl" and "encrypted" in fault.what
    found = split(read(write(tmp_path, "b.zip", zip_of({"a.jsonl": as_jsonl()}, zipfile.ZIP_BZIP2))))
    assert found[0] == [] and "method 12" in found[1][0].what


def test_mutated_files_give_rows_and_faults_and_never_a_traceback(tmp_path: Path) -> None:
    chance = random.Random(4)
    members = {"a.jsonl": as_jsonl(), "b.json.gz": gzip.compress(FORMATS["a.json"]()), "c.csv": as_csv()}
    files = {name: make() for name, make in FORMATS.items()} | {
        "a.txt": as_jsonl(),
        "a.jsonl.gz": gzip.compress(as_jsonl()),
    }
    files |= {"a.jsonl.zst": zstandard.compress(as_jsonl()), "a.tar": tar_of(members), "a.zip": zip_of(members)}
    files |= {"a.tgz": gzip.compress(tar_of(members)), "s.json": json.dumps(SHARD).encode()}
    num_faults = 0
    for name, data in files.items():
        for _ in range(80 if FULL else 30):
            mutated = bytearray(data)
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(mutated))
                change = chance.choice(
                    [b"", b'"', b"[", b"}", b"\0", b"\xff", chance.randbytes(3), bytes(mutated[at : at + 40])]
                )
                mutated[at : at + chance.choice([0, 1, 8, 200])] = change
                mutated += b"" if mutated else b" "
            found = read(write(tmp_path, name, bytes(mutated)), "data.*" if name == "s.json" else None)
            assert found and all(isinstance(row, RawRow | Fault) for row in found)
            num_faults += sum(isinstance(row, Fault) for row in found)
    assert num_faults > (300 if FULL else 110)


@pytest.mark.parametrize(("suffix", "make"), [(".zip", zip_of), (".tar", tar_of)])
def test_a_bad_row_in_an_archive_is_named_with_how_to_skip_it(
    tmp_path: Path, suffix: str, make: Callable[[dict[str, bytes]], bytes]
) -> None:
    members = {"a.jsonl": as_jsonl(), "dir/b.csv": b"text\none\ntwo,three\nfour\n"}
    path = write(tmp_path, f"data{suffix}", make(members))
    tokenizer = chat_tokenizer("chatml")
    with pytest.raises(TrilloraError, match="This record has 2 fields; the header has 1") as caught:
        load(path, tokenizer, tmp_path)
    assert caught.value.where == f"{path}!dir/b.csv:3"
    assert "separator" in caught.value.do
    assert caught.value.do.endswith("; or set data.on_bad_row: skip to train without b.csv:3")
    lenient = load(path, tokenizer, tmp_path, on_bad_row="skip")  # the advice is true
    assert (len(lenient.documents()), lenient.num_problems) == (len(ROWS) + 2, 1)
    with pytest.raises(TrilloraError) as cached:  # what a lenient run stored refuses with the same advice
        load(path, tokenizer, tmp_path)
    assert (cached.value.where, cached.value.do) == (caught.value.where, caught.value.do)


# -- hostile archives --------------------------------------------------------------------------------------------------


def hostile_tar() -> bytes:
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE}
    kinds |= {"pipe": tarfile.FIFOTYPE, "odd": b"Z"}
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name in ("/etc/absolute.jsonl", "../up.jsonl", "a/../../b.jsonl", "C:\\x.jsonl", "a\\..\\b.jsonl"):
            info = tarfile.TarInfo(name)
            info.size = len(as_jsonl())
            archive.addfile(info, io.BytesIO(as_jsonl()))
        for name, kind in kinds.items():
            info = tarfile.TarInfo(f"{name}.jsonl")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        folder = tarfile.TarInfo("folder.jsonl")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("inner.tar.gz", "inner.zip", "good.jsonl"):
            info = tarfile.TarInfo(name)
            info.size = len(as_jsonl())
            archive.addfile(info, io.BytesIO(as_jsonl()))
    return sink.getvalue()


def test_hostile_tar_members_are_each_a_fault_and_nothing_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tar", hostile_tar())
    found = read(path)
    rows, faults = split(found)
    assert rows == ROWS and {row.member for row in found if isinstance(row, RawRow)} == {"good.jsonl"}
    words = ["absolute", '".."', '".."', "absolute", '".."', "symbolic", "hard link", "character", "block", "pipe"]
    words += ["unknown kind", "inside an archive", "inside an archive"]
    assert len(faults) == len(words) and all(word in fault.what for word, fault in zip(words, faults, strict=True))
    assert [str(file) for file in tmp_path.rglob("*")] == [path]


def test_hostile_zip_members_are_each_a_fault(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, mode in [("l.jsonl", stat.S_IFLNK), ("d.jsonl", stat.S_IFCHR), ("p.jsonl", stat.S_IFIFO)]:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, "/etc/passwd")
        for name in ("/abs.jsonl", "../up.jsonl", "folder/", "evil\x1b[2J.jsonl", "good.jsonl"):
            archive.writestr(name, as_jsonl())
    found = read(write(tmp_path, "a.zip", sink.getvalue()))
    rows, faults = split(found)
    words = ["symbolic", "device", "pipe", "absolute", '".."']
    assert rows == ROWS * 2 and all(word in fault.what for word, fault in zip(words, faults, strict=True))
    assert r"evil\x1b[2J.jsonl" in {row.member for row in found}


@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_an_archive_without_data_lists_its_files(tmp_path: Path, make: Callable[[dict[str, bytes]], bytes]) -> None:
    path = write(tmp_path, "a.zip" if make is zip_of else "a.tar", make({"a.jpg": b"x", "README.md": b"y"}))
    fault = only_fault(path)
    assert "no data file" in fault.what and "a.jpg, README.md" in fault.what and ".jsonl" in fault.do


@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_an_archive_with_too_many_members_is_refused(
    tmp_path: Path, make: Callable[[dict[str, bytes]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 20)  # 100,000 members take seconds to write
    path = write(tmp_path, "a.zip" if make is zip_of else "a.tar", make({f"{n}.jsonl": as_jsonl() for n in range(21)}))
    assert split(read(path))[1][-1].what == "The archive has more than 20 members."


def test_a_tar_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    for number, kind in enumerate([tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME]):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, 8 << 30
        with open(tmp_path / f"{number}.tar", "wb") as sparse:
            sparse.write(info.tobuf(tarfile.GNU_FORMAT))
            sparse.truncate(8 << 20)
        (file,) = expand([str(tmp_path / f"{number}.tar")])
        (fault,) = rows_of(file)
        assert isinstance(fault, Fault) and "8,589,934,592" in fault.what


def test_data_after_the_end_of_a_tar_is_reported(tmp_path: Path) -> None:
    rows, faults = split(read(write(tmp_path, "a.tar", tar_of({"a.jsonl": as_jsonl()}) * 2)))
    assert rows == ROWS and "after its end mark" in faults[0].what


# -- bombs and memory --------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def gzip_bomb(num_mib: int) -> bytes:
    sink = io.BytesIO()
    with gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=9) as stream:
        for _ in range(num_mib):
            stream.write(b" " * MIB)
    return sink.getvalue()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return gzip_bomb(100)


def test_compression_bombs_are_stopped_and_reported(tmp_path: Path, bomb: bytes) -> None:
    write(tmp_path, "a.jsonl.gz", bomb)
    write(tmp_path, "b.jsonl.zst", zstandard.compress(b" " * (80 * MIB)))
    write(tmp_path, "c.zip", zip_of({"c.jsonl": b" " * (100 * MIB)}))
    for name in ("a.jsonl.gz", "b.jsonl.zst", "c.zip"):
        (fault,) = read(str(tmp_path / name))
        assert isinstance(fault, Fault) and "compression bomb" in fault.what and "200 times" in fault.what, name


def test_members_after_a_bomb_are_still_read(tmp_path: Path, bomb: bytes) -> None:
    members = {
        "a.jsonl": as_jsonl(),
        "b.jsonl.gz": bomb,
        "c.jsonl": as_jsonl(),
        "d.jsonl.gz": gzip.compress(as_jsonl()),
    }
    for name, data in {"a.tar": tar_of(members), "a.zip": zip_of(members)}.items():
        rows, faults = split(read(write(tmp_path, name, data)))
        assert rows == ROWS * 3 and [fault.member for fault in faults] == ["b.jsonl.gz"]


def test_many_small_bombs_in_one_archive_are_stopped_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FREE_BYTES_OF_FILE", 128 * MIB)  # saves two seconds
    small = gzip_bomb(60)  # each is below the limit of one stream
    faults = split(read(write(tmp_path, "a.tar", tar_of({f"{n}.jsonl.gz": small for n in range(8)}))))[1]
    assert "This row has" in faults[0].what
    assert len(faults) == 8 and "compression bomb" in faults[-1].what and "128 MiB" in faults[-1].what


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_row_of_50_mb_is_skipped_in_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    head, before, tail = {
        "a.jsonl": (b'{"a": 1}\n', b'{"a": "', b'"}\n{"a": 2}\n'),
        "a.json": (b'[{"a": 1},\n', b'{"a": "', b'"}, {"a": 2}]'),
        "a.csv": (b"a,b\n1,\n", b'"', b'",\n2,\n'),
        "a.txt": (b"", b"", b"\nafter"),
    }[name]
    with open(path, "wb") as sink:
        sink.write(head + before)
        for _ in range(50):
            sink.write(b"x" * MIB)
        sink.write(tail)
    found, peak = peak_bytes(lambda: read(str(path)))
    rows, (fault,) = split(found)
    assert len(rows) == (1 if name == "a.txt" else 2)
    assert "52,428,8" in fault.what and "32 MiB" in fault.what and fault.line == {"a.txt": 1, "a.csv": 3}.get(name, 2)
    assert peak < 4 * MAX_ROW_BYTES  # the row up to the limit, and copies of it while it grows


def test_a_row_of_the_largest_size_is_read(tmp_path: Path) -> None:
    row = b'"' + b"x" * (MAX_ROW_BYTES - 2) + b'"'
    for name, data in {"a.jsonl": row, "a.json": b"[" + row + b"]"}.items():
        (found,) = read(write(tmp_path, name, data))
        assert isinstance(found, RawRow) and found.raw == row
        found_too_long = read(write(tmp_path, name, data.replace(b"x", b"xx", 1)))[0]
        assert isinstance(found_too_long, Fault)


def test_an_open_quote_in_csv_keeps_no_more_than_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", b'a\n1\n"open\n' + (b"some text of a line without end  " * 100 + b"\n") * 11_000)
    found, peak = peak_bytes(lambda: read(path))
    rows, (fault,) = split(found)
    assert rows == [{"a": "1"}] and "closing quote is missing" in fault.what
    assert peak < 8 * MAX_ROW_BYTES  # the csv module uses up to four bytes per character


class Repeated(io.RawIOBase):
    """A large file without disk space: a start, one block many times, an end."""

    def __init__(self, head: bytes, block: bytes, count: int, tail: bytes) -> None:
        self._parts = self._all(head, block, count, tail)
        self._rest = b""

    @staticmethod
    def _all(head: bytes, block: bytes, count: int, tail: bytes) -> Iterator[bytes]:
        yield head
        for _ in range(count):
            yield block
        yield tail

    def read(self, size: int = -1, /) -> bytes:
        while len(self._rest) < size and (part := next(self._parts, None)) is not None:
            self._rest += part
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "wrapped.json"])
def test_200_mb_are_read_in_bounded_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of it with `make test`."""
    row = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}, {"role": "assistant", "content": "y"}]})
    between = "\n" if name == "a.jsonl" else ","
    head, tail = {"a.jsonl": (b"", b"{}"), "a.json": (b"[", b"{}]"), "wrapped.json": (b'{"data": [', b"{}]}")}[name]
    block = (row + between).encode() * 50
    count = (200 if FULL else 50) * MIB // len(block)
    monkeypatch.setattr(DataFile, "open", lambda file: Repeated(head, block, count, tail))
    file = DataFile(name, name, 0, FileKind(os.path.splitext(name)[1][1:], ""))
    num_rows, peak = peak_bytes(lambda: sum(1 for _ in rows_of(file)))
    assert num_rows == count * 50 + 1
    assert peak < 16 * MIB
