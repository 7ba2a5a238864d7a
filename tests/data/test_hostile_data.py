"""Data files made to do harm: bombs, pipes, names and keys that hide something, and thousands of damaged ones.

Whatever a file contains, reading it ends soon, in bounded memory, with rows, with faults that have a place and a
reason, or with a TrilloraError.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from chat_tokenizers import chat_tokenizer
from data_files import PARQUET, only_fault, read, split, tar_of, write, zip_of
from dose import dose, log_progress, slow_case
from rendering import load
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trillora.data.reading.files import DataFile, FileKind, expand
from trillora.data.rows import Fault, RawRow
from trillora.errors import TrilloraError

TOKENIZER = chat_tokenizer("chatml")
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
MIB = 1 << 20

# -- Parquet bombs -----------------------------------------------------------------------------------------------------


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return bytes(sink.getvalue())


def test_a_parquet_file_gives_no_more_bytes_than_a_compressed_file_of_its_size(tmp_path: Path) -> None:
    data = parquet(pa.table({"text": pa.array(["a" * 4 * MIB] * 24).dictionary_encode()}))
    assert len(data) < 1000
    rows, (fault,) = split(read(write(tmp_path, "a.parquet", data)))
    assert len(rows) == 16 and fault.line == 17 and "compression bomb" in fault.what and "64 MiB" in fault.what
    members = zip_of({"a.parquet": data, "b.jsonl": b'{"text": "after"}\n'})
    rows, (fault,) = split(read(write(tmp_path, "a.zip", members)))
    assert len(rows) == 17 and fault.member == "a.parquet" and rows[-1] == {"text": "after"}


def list_bomb(text: str, count: int, *, plain: bool) -> bytes:
    """One row with a list of equal texts, decoded to plain texts at once or one by one."""
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([text]))
    table = pa.table({"text": ["a"], "n": pa.ListArray.from_arrays(pa.array([0, count]), values)})
    return parquet(table, store_schema=not plain)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        slow_case(
            lambda: parquet(pa.table({"text": pa.array(["a" * 4 * MIB] * 256)}), use_dictionary=False),
            "1 GiB of memory",
        ),
        (lambda: list_bomb("a long text " * 20, 6_000_000, plain=True), "1 GiB of memory"),
        slow_case(lambda: list_bomb("a", 60_000_000, plain=False), "more than"),  # time or memory, by machine
    ],
    ids=["a page of a gigabyte", "a long list", "a list without end"],
)
def test_a_parquet_file_that_needs_gigabytes_is_refused(tmp_path: Path, make: Callable[[], bytes], word: str) -> None:
    data = make()
    assert len(data) < 60_000
    assert word in only_fault(write(tmp_path, "a.parquet", data)).what
    good = parquet(pa.table({"text": ["one", "two"]}))
    assert split(read(write(tmp_path, "b.parquet", good))) == ([{"text": "one"}, {"text": "two"}], [])


def test_a_prompt_repeated_in_every_row_is_no_bomb(tmp_path: Path) -> None:
    prompt = "You are a helpful assistant. " * 70
    table = pa.table(
        {"system": [prompt] * 20_000, "question": [f"{n}?" for n in range(20_000)], "answer": ["yes"] * 20_000}
    )
    data = parquet(table)
    assert len(data) * 300 < 20_000 * len(prompt)  # compressed more than the ratio that is allowed above 64 MiB
    rows, faults = split(read(write(tmp_path, "a.parquet", data)))
    assert len(rows) == 20_000 and faults == [] and rows[-1]["system"] == prompt


def test_rows_of_ten_megabytes_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [random.Random(n).randbytes(MIB // 2).hex() * 10 for n in range(8)]
    path = write(tmp_path, "a.parquet", parquet(pa.table({"text": texts}), use_dictionary=False, compression="none"))
    assert [row["text"] for row in split(read(path))[0]] == texts


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), "two columns called 'text'"),
        (pa.table({f"c{number}": ["x"] for number in range(1000)}), "1,000 columns; the limit is 999"),
        (pa.table({"text": ["a"]}).select([]), "no column"),
    ],
)
def test_columns_that_cannot_all_be_read_are_refused(tmp_path: Path, table: pa.Table, word: str) -> None:
    assert word in only_fault(write(tmp_path, "a.parquet", parquet(table))).what


def test_a_decoder_that_dies_costs_one_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", parquet(pa.table({"text": ["one"]})))
    assert split(read(path))[1] == []
    process = PARQUET._process
    assert process is not None
    process.kill()
    process.wait()
    assert "crashed" in only_fault(path).what
    assert split(read(path)) == ([{"text": "one"}], [])


# -- pipes, devices and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_path_that_is_no_regular_file_is_refused_however_it_is_written(
    tmp_path: Path, scheme: str, target: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "x.jsonl"
    link.symlink_to(target)
    os.mkfifo(tmp_path / "direct.jsonl")
    for path in (link, tmp_path / "direct.jsonl"):
        with pytest.raises(TrilloraError, match="not a regular file"):
            load(f"{scheme}{path}", TOKENIZER, tmp_path / "cache")


def test_a_file_replaced_by_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (file,) = expand([write(tmp_path, "a.jsonl", b'{"text": "a"}\n')])
    os.remove(file.path)
    os.mkfifo(file.path)
    with pytest.raises(TrilloraError, match="not a regular file"):
        file.content()


def test_local_urls_are_files_folders_and_globs(tmp_path: Path) -> None:
    path = write(tmp_path, "d/a.jsonl", b'{"text": "a"}\n')
    expected = [DataFile(path, path, 0, FileKind("jsonl", ""))]
    assert [expand([f"local://{entry}"]) for entry in (path, tmp_path / "d", tmp_path / "d/*.jsonl")] == [expected] * 3


def test_a_zip_member_without_a_name_is_a_fault(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("x.jsonl", b"{}")
        archive.writestr("good.jsonl", b'{"text": "a"}')
    data = sink.getvalue()
    name = data.rindex(b"x.jsonl")  # in the list of members: its length becomes 0, and 7 bytes of comment follow
    entry = data.rindex(b"PK\x01\x02", 0, name)
    header = bytearray(data[entry : entry + 46])
    header[28:30], header[32:34] = b"\0\0", b"\x07\0"
    rows, faults = split(read(write(tmp_path, "a.zip", data[:entry] + bytes(header) + data[entry + 46 :])))
    assert rows == [{"text": "a"}] and [fault.what for fault in faults] == [
        "This archive member has no name; it is not read."
    ]


# -- keys given twice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('{"text": "a", "text": "b"}', "text"),
        ('{"text": "a", "meta": {"x": [{"id": 1, "id": 2}]}}', "id"),
        (
            '{"messages": [{"role": "user", "role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "role",
        ),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "rows.json"])
def test_a_key_given_twice_makes_a_bad_row(tmp_path: Path, name: str, row: str, key: str) -> None:
    text = f'[{{"text": "good"}},\n{row}]' if name == "rows.json" else f'{{"text": "good"}}\n{row}\n'
    path = write(tmp_path, name, text.encode())
    with pytest.raises(TrilloraError, match=f"the key '{key}' is given twice") as caught:
        load(path, TOKENIZER, tmp_path)
    assert caught.value.where == f"{path}:2"
    assert load(path, TOKENIZER, tmp_path, on_bad_row="skip").num_problems == 1


def test_a_column_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrilloraError, match="two columns called 'text'"):
        load(write(tmp_path, "a.csv", b"text,text\na,b\n"), TOKENIZER, tmp_path)


def test_a_compressed_document_given_twice_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(b'[{"text": "a"}]').hex()
    fault = only_fault(write(tmp_path, "a.json", f'{{"compressed": true, "data": "{packed}", "data": "00"}}'.encode()))
    assert "'data' twice" in fault.what
    rows, _ = split(read(write(tmp_path, "b.json", b'{"data": "a", "data": "b"} {"text": "c"}')))
    assert len(rows) == 2  # a row, which is refused when it is parsed


# -- a tokenizer without a chat template -------------------------------------------------------------------------------


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_chats_for_a_tokenizer_without_a_chat_template_are_one_error(tmp_path: Path, on_bad_row: str) -> None:
    inner = Tokenizer.from_str(chat_tokenizer("mistral").backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    path = write(tmp_path, "a.jsonl", json.dumps(HELLO).encode())
    assert len(load(write(tmp_path, "b.jsonl", b'{"text": "one"}'), tokenizer, tmp_path).store.rows) == 1
    with pytest.raises(TrilloraError, match="no chat template") as caught:
        load(path, tokenizer, tmp_path, on_bad_row=on_bad_row)
    assert "data.chat_template" in caught.value.do and "skip" not in caught.value.do


# -- time grows with the size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [b'{"a":1} ', b'{"data":"x"}', b'{"a":nope}'],
    ids=["rows", "perhaps documents", "not JSON"],
)
def test_a_megabyte_of_objects_on_one_line_is_read_in_seconds(tmp_path: Path, line: bytes) -> None:
    count = MIB // len(line)
    documents = {"a.json": line * count, "b.json": b"[" + b",".join([line] * count) + b"]"}
    for name, data in documents.items():
        started = time.process_time()
        assert len(read(write(tmp_path, name, data))) == count
        assert time.process_time() - started < 5, name  # 11 s and more when each object looked at the whole line


def test_many_short_lists_in_one_document_are_read_in_seconds(tmp_path: Path) -> None:
    document = json.dumps({"x": {str(number): [{"a": 1}] for number in range(30_000)}}).encode()
    started = time.process_time()
    assert len(read(write(tmp_path, "a.json", document), "x.*")) == 30_000
    assert time.process_time() - started < 5


def test_a_folder_of_many_files_is_read_in_seconds(tmp_path: Path) -> None:
    count = dose(1500, 6000)
    for number in range(count):
        write(tmp_path, f"d/{number}.jsonl", b'{"text": "a"}\n')
    started = time.process_time()
    assert len(load(tmp_path / "d", TOKENIZER, tmp_path).store.rows) == count
    assert time.process_time() - started < 0.002 * count  # twice that for 1,500 files, when each file looked at all


# -- damaged files of every kind ---------------------------------------------------------------------------------------

WORDS = [
    "the fox",
    "a,b",
    'say "hi"',
    "two\nlines",
    "",
    "é→\U0001f600",
    "<|im_end|>",
    "9" * 30,
    "null",
    "\\ud800",
    "\x00",
]


def damaged(chance: random.Random, data: bytes, alphabet: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(changed) + 1)
        new = chance.choice([*alphabet, chance.randbytes(3), bytes(changed[at : at + 40])])
        changed[at : at + chance.choice([0, 0, 1, 2, 8, 60])] = new
    return bytes(changed)


def check(found: list[RawRow | Fault]) -> int:
    """The number of faults, each with a reason and advice."""
    assert found and all(isinstance(row, RawRow | Fault) for row in found)
    return len(split_faults(found))


def split_faults(found: list[RawRow | Fault]) -> list[Fault]:
    faults = [row for row in found if isinstance(row, Fault)]
    assert all(fault.what.endswith(".") and fault.do and "Traceback" not in fault.what for fault in faults)
    return faults


SIGNS = [
    b"",
    b'"',
    b",",
    b"\t",
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b'":',
]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "txt", "json"])
def test_fuzzed_rows_are_rows_or_problems_with_a_place(tmp_path: Path, suffix: str) -> None:
    """Through the whole preparation, in files of 50 records, so that damage to one does not hide the others."""
    chance = random.Random(suffix)
    num_files = dose(6, 200)
    share = 0.01 if suffix == "txt" else 0.5  # of the lines; one that is not UTF-8 costs the whole text
    for number in range(num_files):
        pairs = [(chance.choice(WORDS), chance.choice(WORDS)) for _ in range(50)]
        rows = [{"question": question, "answer": answer} for question, answer in pairs]
        mark = "\t" if suffix == "tsv" else ","
        text = {
            "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
            "json": json.dumps(rows),
            "txt": "\n".join(" ".join(pair) for pair in pairs),
        }.get(suffix, f"question{mark}answer\n" + "".join(f'"{q}"{mark}{a}\n' for q, a in pairs))
        data = b"".join(
            damaged(chance, line, SIGNS) if chance.random() < share else line
            for line in text.encode("utf-8", "surrogatepass").splitlines(keepends=True)
        )
        write(tmp_path, f"d/{number}.{suffix}", data)
    try:
        dataset = load(tmp_path / "d", TOKENIZER, tmp_path, on_bad_row="skip")
    except TrilloraError as error:
        assert error.what and error.do
        return
    assert dataset.num_problems + len(dataset.store.rows) >= num_files
    for problem in dataset.problems:
        assert problem.where.startswith(str(tmp_path / "d")) and problem.what.endswith(".") and problem.do
        assert "Traceback" not in problem.what
    log_progress(f"{suffix}: {num_files} files, {len(dataset.store.rows)} rows, {dataset.num_problems} problems")


def test_damaged_archives_and_streams_give_rows_and_faults(tmp_path: Path) -> None:
    chance = random.Random(7)
    rows = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(40))
    members = {"a.jsonl": rows, "d/b.json.gz": gzip.compress(rows), "c.csv": b"text\none\ntwo\n", "e.txt": b"hello"}
    members["f.parquet"] = parquet(pa.table({"text": ["one", "two"]}))
    files = {
        "a.zip": zip_of(members),
        "stored.zip": zip_of(members, zipfile.ZIP_STORED),
        "a.tar": tar_of(members),
        "a.tgz": gzip.compress(tar_of(members)),
        "a.tar.zst": zstandard.compress(tar_of(members)),
        "a.jsonl.gz": gzip.compress(rows),
        "a.jsonl.zst": zstandard.compress(rows),
    }
    num_faults = 0
    for name, data in files.items():
        for number in range(dose(40, 1000)):
            changed = damaged(chance, data, [b"", b"\0" * 8, b"\xff" * 4, b"PK\x01\x02", b"../", b"9" * 11])
            if number % 4 == 0:
                changed = changed[: chance.randrange(len(changed) + 1)]
            num_faults += check(read(write(tmp_path, name, changed)))
    assert num_faults > 100
    log_progress(f"archives: {len(files) * dose(40, 1000)} files, {num_faults} faults")


def test_damaged_parquet_files_give_true_rows_and_faults(tmp_path: Path) -> None:
    """With page checksums, which find damage that the format itself does not."""
    chance = random.Random(8)
    rows = [
        {
            "text": f"row {n} " * (n % 7),
            "n": n,
            "turns": [{"role": "user", "content": str(n)}] * (n % 3),
            "f": n / 7 or None,
        }
        for n in range(300)
    ]
    table = pa.Table.from_pylist(rows)
    num_faults = num_wrong = 0
    for number in range(dose(60, 300)):
        options = {
            "compression": chance.choice(["zstd", "snappy", "gzip", "none"]),
            "use_dictionary": chance.random() < 0.5,
            "row_group_size": chance.choice([40, 300]),
            "data_page_version": chance.choice(["1.0", "2.0"]),
            "write_page_checksum": True,
        }
        data = parquet(table, **options)
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(changed)) if number % 2 else chance.randrange(len(changed) * 3 // 4, len(changed))
            changed[at : at + chance.randint(1, 8)] = chance.randbytes(chance.randint(0, 8))
        found = read(write(tmp_path, "a.parquet", bytes(changed)))
        num_faults += check(found) > 0
        good = [json.loads(row.raw) for row in found if isinstance(row, RawRow)]
        num_wrong += any(row not in rows for row in good)
    assert num_wrong == 0
    assert num_faults > dose(60, 300) / 2
    log_progress(f"parquet: {dose(60, 300)} files, {num_faults} with faults")
