"""Tar files from other machines: plain files and folders are unpacked, everything else is refused before a file is
written."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trillora.errors import TrilloraError
from trillora.files import unpack as unpack_module
from trillora.files.unpack import unpack


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


def pack(file: Path, *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(file, "w") as archive:
        for each in (entry("run/first", size=3), *entries):
            archive.addfile(each, io.BytesIO(b"x" * each.size) if each.isreg() else None)
    return file


def content(folder: Path) -> dict[Path, bytes | None]:
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_files_and_folders_are_unpacked_with_their_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "run" / "empty").mkdir(parents=True)
    (source / "run" / ("long" * 60)).write_bytes(os.urandom(3_000_000))
    (source / "ä.json").write_text("{}")
    with tarfile.open(tmp_path / "results.tar", "w") as archive:
        archive.add(source, arcname=".")  # as a session packs its results
    for _ in range(2):  # a second download replaces the files of the first
        unpack(tmp_path / "results.tar", tmp_path / "results")
        assert content(tmp_path / "results") == content(source)


BAD = {
    "above": (entry("../above"), r'"\.\."'),
    "absolute": (entry("/tmp/above"), "absolute path"),
    "drive": (entry("C:above"), "absolute path"),
    "backslash": (entry("run\\..\\above"), r'"\.\."'),
    "line break": (entry("run/a\nb"), "control character"),
    "symbolic link": (entry("run/link", tarfile.SYMTYPE, "/etc/passwd"), "a symbolic link"),
    "harmless link": (entry("run/link", tarfile.SYMTYPE, "first"), "a symbolic link"),
    "hard link": (entry("run/link", tarfile.LNKTYPE, "run/first"), "a hard link"),
    "device": (entry("run/null", tarfile.CHRTYPE), "a character device"),
    "pipe": (entry("run/pipe", tarfile.FIFOTYPE), "a named pipe"),
    "unknown": (entry("run/unknown", b"Z"), "neither a plain file"),
    "long": (entry("/".join(["deep"] * 2000)), "too long"),
}


@pytest.mark.parametrize(("bad", "problem"), BAD.values(), ids=BAD)
def test_an_entry_that_is_no_plain_file_is_refused_and_nothing_is_written(
    tmp_path: Path, bad: tarfile.TarInfo, problem: str
) -> None:
    with pytest.raises(TrilloraError, match=problem) as refused:
        unpack(pack(tmp_path / "results.tar", bad), tmp_path / "in" / "results")
    assert "results.tar" in str(refused.value.where)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["results.tar"]


def test_a_link_that_is_there_already_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "results" / "run").mkdir(parents=True)
    (tmp_path / "results" / "run" / "first").symlink_to(tmp_path / "mine")
    unpack(pack(tmp_path / "results.tar"), tmp_path / "results")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "results" / "run" / "first").read_text() == "xxx"


def huge_header(file: Path) -> None:
    """A file of 4 GiB, almost all of it the extended header of one entry."""
    with open(file, "wb") as target:
        target.write(entry("x", tarfile.XHDTYPE, size=4 << 30).tobuf())
        target.truncate(4 << 30)


def wrong_size(file: Path) -> None:
    """A pax record says that an entry of no bytes has a terabyte."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        made = entry("run/x")
        made.pax_headers = {"size": str(1 << 40)}
        archive.addfile(made)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not a tar file": (lambda file: file.write_bytes(b"<html>" * 500), "invalid header"),
    "empty": (lambda file: file.write_bytes(b""), "empty file"),
    "compressed": (lambda file: tarfile.open(file, "w:gz").close(), "invalid header|truncated"),
    "cut": (lambda file: file.write_bytes(pack(file, entry("y", size=9000)).read_bytes()[:4000]), "it is cut"),
    "huge header": (huge_header, "header of 4,294,967,"),
    "wrong size": (wrong_size, "larger than itself|end of data"),
    "headers of headers": (
        lambda file: file.write_bytes(entry("a", tarfile.GNUTYPE_LONGNAME).tobuf() * 5000),
        "recursion",
    ),
}


@pytest.mark.parametrize(("make", "problem"), DAMAGE.values(), ids=DAMAGE)
def test_an_archive_that_is_damaged_or_a_bomb_is_refused(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    make(tmp_path / "results.tar")
    with pytest.raises(TrilloraError, match=problem):
        unpack(tmp_path / "results.tar", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_an_archive_of_too_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "MAX_ENTRIES", 10)
    pack(tmp_path / "results.tar", *(entry(f"run/{number}") for number in range(9)))
    unpack(tmp_path / "results.tar", tmp_path / "results")
    with pytest.raises(TrilloraError, match="more than 10 entries"):
        unpack(pack(tmp_path / "more.tar", *(entry(f"run/{number}") for number in range(10))), tmp_path / "more")
