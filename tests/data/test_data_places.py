"""Where rows are, as an editor counts lines, and what is said about tables and archives that are not as expected."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from data_files import ROWS, as_jsonl, read, rows_of, split, tar_of, write, zip_of

from trillora.data.reading import json_rows, readers, streams, tables
from trillora.data.reading.files import expand
from trillora.data.rows import place


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
