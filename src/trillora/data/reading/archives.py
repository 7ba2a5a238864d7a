"""Members of tar and zip archives, read in place one after the other. Nothing is written to disk.

A member is only a name and a stream, so a hostile name can reach no file. Such names are refused nevertheless: an
archive that has them is not what its owner thinks. Tar headers are parsed here, because `tarfile` reads extended
headers of any size into memory. Zip directories are read by `zipfile`, with a limit on their size.
"""

from __future__ import annotations

import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, BinaryIO, cast

from trillora.data.reading.cursor import FETCH_AGAIN
from trillora.data.reading.files import KNOWN, FileKind, found_data, is_about_data, say_left_out
from trillora.data.reading.streams import BLOCK, Damage, Meter, RawFile, Stream, read_up_to
from trillora.data.rows import Fault
from trillora.errors import TrilloraError
from trillora.safe_text import visible_line

MAX_MEMBERS = 100_000
_MAX_DIRECTORY = 48 << 20  # bytes of a zip directory: 100,000 members with names of 400 characters
_MAX_EXTENDED_HEADER = 1 << 20  # bytes of a tar member's long name or pax records
_SECTOR = 512  # the unit of a tar archive, bytes
_PACK_AGAIN = "create the archive again from plain files, or unpack it and put the folder in data.path"
_SPECIAL_FILES = {  # by the type in a tar header (bytes), or in the file mode of a zip member (a number)
    **dict.fromkeys((tarfile.SYMTYPE, stat.S_IFLNK), "a symbolic link"),
    **dict.fromkeys((tarfile.CHRTYPE, stat.S_IFCHR), "a character device"),
    **dict.fromkeys((tarfile.BLKTYPE, stat.S_IFBLK), "a block device"),
    **dict.fromkeys((tarfile.FIFOTYPE, stat.S_IFIFO), "a named pipe"),
    tarfile.LNKTYPE: "a hard link",
    stat.S_IFSOCK: "a socket",
}
_ZIP_ERRORS = (  # OSError is a seek to an invalid position; a failing disk is already a TrilloraError
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(OSError, ValueError, OverflowError, LookupError),
)


@dataclass(frozen=True)
class ArchiveMember:
    """A data file in an archive. Its stream is valid until the next member is requested."""

    name: str
    kind: FileKind
    stream: Stream


@dataclass
class _Gate:
    """Decides which members are read, and counts the others."""

    say: Callable[[str], None]
    num_read: int = 0
    ignored: list[str] = field(default_factory=list)  # names of the first few
    num_ignored: int = 0
    unknown: list[str] = field(default_factory=list)  # names of those that are not hidden or about the data

    def check(self, name: str, stream: Stream) -> ArchiveMember | Fault | None:
        """A regular file of the archive; None if it is not a data file."""
        parts = re.split(r"[/\\]", name)
        if not name:
            return _unread(name, "has no name")
        if parts[0] == "" or re.match(r"[A-Za-z]:", name):
            return _unread(name, "has an absolute path")
        if ".." in parts:
            return _unread(name, 'has ".." in its path')
        kind = found_data("/".join(part for part in parts if part not in ("", ".")))
        if kind is None:
            self.num_ignored += 1
            if len(self.ignored) < 5:
                self.ignored.append(_shown(name))
            if not is_about_data(name):
                self.unknown.append(_shown(name))
            return None
        if kind.is_archive:
            return _unread(name, "is an archive inside an archive", "unpack the outer archive")
        self.num_read += 1
        return ArchiveMember(_shown(name), kind, stream)

    def verdict(self) -> Iterator[Fault]:
        """A fault if no member could be read. Else says what was not."""
        if self.num_read and self.unknown:
            self.say(say_left_out(self.unknown))
        elif not self.num_read:
            others = f" Its {self.num_ignored} other files: {', '.join(self.ignored)}." if self.ignored else ""
            do = f"add data files to the archive; supported suffixes: {KNOWN}"
            yield Fault("", 0, f"The archive has no data file that can be read.{others}", do)


class _TarPart:
    """The bytes of one member, read from the archive's stream."""

    def __init__(self, source: Stream, size: int) -> None:
        self._source = source
        self._left = size
        self._padding = -size % _SECTOR
        self.lost = False  # the archive itself is damaged, so no member follows

    def read(self, size: int, /) -> bytes:
        try:
            data = self._source.read(min(size, self._left))
            if not data and size and self._left:
                raise Damage("The archive ends inside this member: it was cut.", FETCH_AGAIN)
        except Damage:
            self.lost = True
            raise
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """Advance to the next header."""
        self._left += self._padding
        self._padding = 0
        while self._left:
            self.read(BLOCK)


def tar_members(source: Stream, say: Callable[[str], None]) -> Iterator[ArchiveMember | Fault]:
    gate = _Gate(say)
    long_name: str | None = None  # from the extended header before a member
    long_size: int | None = None
    sparse = False
    for number, header in enumerate(iter(lambda: _tar_header(source), None), start=1):
        if number > MAX_MEMBERS:
            raise _too_many_members()
        size = header.size if long_size is None else long_size
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            records = _extended(source, header)
            long_name = records.get("path", long_name)
            long_size = _number(records["size"]) if "size" in records else long_size
            sparse = sparse or any(key.startswith("GNU.sparse") for key in records)
            continue
        has_bytes = header.type not in (*_SPECIAL_FILES, tarfile.DIRTYPE)
        part = _TarPart(source, size if has_bytes else 0)
        if header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            found = _tar_member(gate, header.name if long_name is None else long_name, header, sparse, part)
            if found is not None:
                yield found
            long_name, long_size, sparse = None, None, False
        if part.lost:
            return
        part.skip()
    # Only zeros may follow. Reading to the end also verifies the checksum of a .tar.gz.
    if sum(len(block.strip(b"\0")) for block in iter(lambda: source.read(BLOCK), b"")):
        what = "The archive has data after its end mark, which is not read (two archives joined?)."
        yield Fault("", 0, what, _PACK_AGAIN)
    yield from gate.verdict()


def zip_members(source: RawFile, meter: Meter, say: Callable[[str], None]) -> Iterator[ArchiveMember | Fault]:
    guard = _ZipGuard(source)
    try:
        archive = zipfile.ZipFile(cast(BinaryIO, guard))
    except _ZIP_ERRORS as error:
        what = f"This is not a zip archive, or it was cut: its list of members, at its end, is missing ({error})."
        raise Damage(what, FETCH_AGAIN) from None
    guard.opening = False
    gate = _Gate(say)
    with archive:
        for info in archive.infolist():
            if info.filename.endswith("/"):  # not info.is_dir(), which fails on an empty name
                continue
            found = _zip_member(gate, info, _ZipPart(archive, info, meter))
            if found is not None:
                yield found
    yield from gate.verdict()


def _shown(name: str) -> str:
    return visible_line(name[:500])


def _unread(name: str, why: str, do: str = _PACK_AGAIN) -> Fault:
    return Fault(_shown(name), 0, f"This archive member {why}; it is not read.", do)


def _too_many_members() -> Damage:
    return Damage(f"The archive has more than {MAX_MEMBERS:,} members.", "put the rows into fewer, larger files")


def _tar_header(source: Stream) -> tarfile.TarInfo | None:
    """The next header, or None at the end mark."""
    sector = read_up_to(source, _SECTOR)
    if len(sector) < _SECTOR:
        raise Damage("The tar archive has no end mark: it was cut, or is not a tar archive.", FETCH_AGAIN)
    if not sector.strip(b"\0"):
        return None
    try:
        header = tarfile.TarInfo.frombuf(sector, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise Damage(f"This is not a tar archive, or it is damaged: {error}.", FETCH_AGAIN) from None
    if header.size < 0:
        raise Damage("The tar archive is damaged: a member has a negative size.", FETCH_AGAIN)
    if header.type == tarfile.GNUTYPE_SPARSE:
        flag = 482
        while len(sector) == _SECTOR and sector[flag]:  # the map of a sparse file continues in further sectors
            sector, flag = read_up_to(source, _SECTOR), 504
    return header


def _tar_member(
    gate: _Gate, name: str, header: tarfile.TarInfo, sparse: bool, part: _TarPart
) -> ArchiveMember | Fault | None:
    if header.type == tarfile.DIRTYPE:
        return None
    if header.type in _SPECIAL_FILES:
        return _unread(name, f"is {_SPECIAL_FILES[header.type]}")
    if sparse or header.type not in tarfile.REGULAR_TYPES or header.type == tarfile.GNUTYPE_SPARSE:
        return _unread(name, "is a sparse file or of an unknown kind")
    return gate.check(name, part)


def _extended(source: Stream, header: tarfile.TarInfo) -> dict[str, str]:
    """The records of an extended header, which describe the next member: pax records, or GNU's long name as `path`."""
    if header.size > _MAX_EXTENDED_HEADER:
        what = f"A header of the tar archive has {header.size:,} bytes; the limit is {_MAX_EXTENDED_HEADER >> 20} MiB."
        raise Damage(what, _PACK_AGAIN)
    part = _TarPart(source, header.size)
    data = read_up_to(part, header.size)
    part.skip()
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    records: dict[str, str] = {}
    while data.strip(b"\0"):
        length = _number(data.partition(b" ")[0].decode("ascii", "replace"))
        key, equals, value = data[:length].partition(b" ")[2].partition(b"=")
        if not equals or length > len(data) or not value.endswith(b"\n"):
            raise Damage("A pax header of the tar archive is damaged.", FETCH_AGAIN)
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        data = data[length:]
    return records


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise Damage("A pax header of the tar archive is damaged: a length is not a number.", FETCH_AGAIN)
    return int(text)


class _ZipGuard:
    """The archive's file. Refuses to read a directory that is too large to keep in memory."""

    def __init__(self, source: RawFile) -> None:
        self._source = source
        self.opening = True
        self.seek, self.tell, self.seekable = source.seek, source.tell, source.seekable

    def read(self, size: int = -1, /) -> bytes:
        if self.opening and size > _MAX_DIRECTORY:
            what = f"The zip archive's list of members has {size:,} bytes; the limit is {_MAX_DIRECTORY >> 20} MiB."
            raise Damage(what, _PACK_AGAIN)
        data = self._source.read(size)
        if self.opening and data.count(b"PK\x01\x02") > MAX_MEMBERS:  # the signature of every entry of the list
            raise _too_many_members()
        return data


@dataclass
class _ZipPart:
    """The bytes of one member. It is opened by the first read, since members may be skipped."""

    archive: zipfile.ZipFile
    info: zipfile.ZipInfo
    meter: Meter
    stream: IO[bytes] | None = None
    num_bytes: int = 0

    def read(self, size: int, /) -> bytes:
        try:
            self.stream = self.stream or self.archive.open(self.info)
            data = self.stream.read(size)
        except TrilloraError:
            raise
        except _ZIP_ERRORS as error:
            what = f"This archive member is damaged or cut: {error or type(error).__name__}."
            raise Damage(what, FETCH_AGAIN) from None
        self.num_bytes += len(data)
        self.meter.produce(len(data), of_stream=self.num_bytes, from_bytes=self.info.compress_size)
        return data


def _zip_member(gate: _Gate, info: zipfile.ZipInfo, part: _ZipPart) -> ArchiveMember | Fault | None:
    name = info.filename
    if special := _SPECIAL_FILES.get(stat.S_IFMT(info.external_attr >> 16)):
        return _unread(name, f"is {special}")
    found = gate.check(name, part)
    if not isinstance(found, ArchiveMember):
        return found
    if info.flag_bits & 1:
        return _unread(name, "is encrypted", "unpack it with its password, and put the folder in data.path")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        why = f"uses compression method {info.compress_type}"
        return _unread(name, why, "create the archive again with the usual method, deflate")
    return found
