"""Members of tar and zip archives, read in place one after the other: nothing is ever written to disk.

A member is only a name and a stream, so a hostile name can reach no file; it is refused all the same, because an
archive with such names is not what its owner thinks. Tar headers are walked here rather than by `tarfile`, which reads
extended headers of any size into memory; zip directories are read by `zipfile` through a guard on their size.
"""

from __future__ import annotations

import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from trillora.data.reading.files import KNOWN, Kind, found_data
from trillora.data.reading.streams import BLOCK, Damage, Meter, RawFile, Stream, read_up_to
from trillora.data.rows import Fault
from trillora.errors import TrilloraError

MAX_MEMBERS = 100_000
_MAX_DIRECTORY = 48 << 20  # bytes of a zip directory: 100,000 members with names of 400 characters
_MAX_EXTENDED_HEADER = 1 << 20  # bytes of a tar member's long name or pax records
_SECTOR = 512  # tar counts in these
_FETCH_AGAIN = "copy or download the archive again, completely"
_MAKE_AGAIN = "make the archive again from plain files, or unpack it yourself and name the folder"
_TAR_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
}
_ZIP_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
_ZIP_ERRORS = (  # OSError is a seek to nowhere: a failing disk is a TrilloraError already
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(OSError, ValueError, OverflowError, LookupError),
)


@dataclass(frozen=True)
class Member:
    """A data file in an archive. Its stream is good until the next member is asked for."""

    name: str
    kind: Kind
    stream: Stream


@dataclass
class _Gate:
    """Decides which members are read, and counts the others."""

    num_members: int = 0
    num_read: int = 0
    ignored: list[str] = field(default_factory=list)  # the first few
    num_ignored: int = 0

    def count(self) -> None:
        self.num_members += 1
        if self.num_members > MAX_MEMBERS:
            raise Damage(f"The archive has more than {MAX_MEMBERS:,} members.", "put the rows into fewer, larger files")

    def check(self, name: str) -> Kind | Fault | None:
        """The kind of a regular member; None for one that is no data."""
        parts = re.split(r"[/\\]", name)
        if not name or parts[0] == "" or re.match(r"[A-Za-z]:", name):
            return Fault(shown(name), 0, "The archive member has an absolute path; it is not read.", _MAKE_AGAIN)
        if ".." in parts:
            return Fault(shown(name), 0, 'The archive member has ".." in its path; it is not read.', _MAKE_AGAIN)
        kind = found_data("/".join(part for part in parts if part not in ("", ".")))
        if kind is None:
            self.num_ignored += 1
            if len(self.ignored) < 5:
                self.ignored.append(shown(name))
        elif kind.is_archive:
            return Fault(shown(name), 0, "An archive inside an archive is not read.", "unpack the outer one")
        else:
            self.num_read += 1
        return kind

    def verdict(self) -> Iterator[Fault]:
        if not self.num_read:
            others = f" {self.num_ignored} members have other names: {', '.join(self.ignored)}." if self.ignored else ""
            yield Fault("", 0, f"The archive has no data file that can be read.{others}", f"suffixes read: {KNOWN}")


class _TarPart:
    """The bytes of one member, out of the archive's stream."""

    def __init__(self, source: Stream, size: int) -> None:
        self._source = source
        self._left = size
        self._padding = -size % _SECTOR
        self.lost = False  # the archive itself broke, so nothing comes after this member

    def read(self, size: int, /) -> bytes:
        try:
            data = self._source.read(min(size, self._left))
            if not data and size and self._left:
                raise Damage("The archive ends inside this member: it was cut.", _FETCH_AGAIN)
        except Damage:
            self.lost = True
            raise
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """On to the next header."""
        self._left += self._padding
        self._padding = 0
        while self._left:
            self.read(BLOCK)


def tar_members(source: Stream) -> Iterator[Member | Fault]:
    gate = _Gate()
    long_name: str | None = None  # from the extended header before a member
    long_size: int | None = None
    sparse = False
    while (header := _tar_header(source)) is not None:
        gate.count()
        size = header.size if long_size is None else long_size
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            records = _extended(source, header)
            long_name = records.get("path", long_name)
            long_size = _number(records["size"]) if "size" in records else long_size
            sparse = sparse or any(key.startswith("GNU.sparse") for key in records)
            continue
        has_bytes = header.type not in (*_TAR_KINDS, tarfile.DIRTYPE)
        part = _TarPart(source, size if has_bytes else 0)
        if header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            name = header.name if long_name is None else long_name
            found = _tar_member(gate, name, header, sparse)
            if isinstance(found, Kind):
                yield Member(shown(name), found, part)
            elif found is not None:
                yield found
            long_name, long_size, sparse = None, None, False
        if part.lost:
            return
        part.skip()
    if _has_more(source):
        yield Fault("", 0, "The archive goes on behind its end mark; that is not read.", _MAKE_AGAIN)
    yield from gate.verdict()


def zip_members(source: RawFile, meter: Meter) -> Iterator[Member | Fault]:
    guard = _ZipGuard(source)
    try:
        archive = zipfile.ZipFile(cast(BinaryIO, guard))
    except _ZIP_ERRORS as error:
        what = f"This is no zip archive, or it was cut ({error}): its list of members stands at its end."
        raise Damage(what, _FETCH_AGAIN) from None
    guard.opening = False
    gate = _Gate()
    with archive:
        for info in archive.infolist():
            gate.count()
            if info.is_dir():
                continue
            found = _zip_member(gate, info)
            if isinstance(found, Kind):
                yield Member(shown(info.filename), found, _ZipPart(archive, info, meter))
            elif found is not None:
                yield found
    yield from gate.verdict()


def shown(name: str) -> str:
    """A member's name as it can be printed: what is no character, or moves the cursor, is replaced."""
    clean = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in clean[:500])


def _tar_header(source: Stream) -> tarfile.TarInfo | None:
    """The next header, or None at the end mark."""
    sector = read_up_to(source, _SECTOR)
    if len(sector) < _SECTOR:
        raise Damage("The tar archive ends without its end mark: it was cut, or is no tar archive.", _FETCH_AGAIN)
    if not sector.strip(b"\0"):
        return None
    try:
        header = tarfile.TarInfo.frombuf(sector, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise Damage(f"This is no tar archive, or it is damaged: {error}.", _FETCH_AGAIN) from None
    if header.size < 0:
        raise Damage("The tar archive is damaged: a member has a negative size.", _FETCH_AGAIN)
    if header.type == tarfile.GNUTYPE_SPARSE:
        more = sector[482]
        while more:  # the map of a sparse file goes on in sectors of its own
            sector = read_up_to(source, _SECTOR)
            more = sector[504] if len(sector) == _SECTOR else 0
    return header


def _tar_member(gate: _Gate, name: str, header: tarfile.TarInfo, sparse: bool) -> Kind | Fault | None:
    if header.type == tarfile.DIRTYPE:
        return None
    if header.type in _TAR_KINDS:
        what = f"The archive member is {_TAR_KINDS[header.type]}; it is not read."
        return Fault(shown(name), 0, what, _MAKE_AGAIN)
    if sparse or header.type not in tarfile.REGULAR_TYPES or header.type == tarfile.GNUTYPE_SPARSE:
        return Fault(shown(name), 0, "The archive member is a sparse or unknown kind of file.", _MAKE_AGAIN)
    return gate.check(name)


def _extended(source: Stream, header: tarfile.TarInfo) -> dict[str, str]:
    """What an extended header says about the next member: the records of pax, or GNU's long name as `path`."""
    if header.size > _MAX_EXTENDED_HEADER:
        raise Damage(f"A header of the tar archive has {header.size:,} bytes, which none needs.", _MAKE_AGAIN)
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
            raise Damage("A pax header of the tar archive is damaged.", _FETCH_AGAIN)
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        data = data[length:]
    return records


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise Damage("A pax header of the tar archive is damaged: a length is no number.", _FETCH_AGAIN)
    return int(text)


def _has_more(source: Stream) -> bool:
    """Whether anything but zeros follows. Reading on also verifies the checksum at the end of a .tar.gz."""
    more = False
    while block := source.read(BLOCK):
        more = more or bool(block.strip(b"\0"))
    return more


class _ZipGuard:
    """The archive's file, refusing to read a directory larger than we can hold."""

    def __init__(self, source: RawFile) -> None:
        self._source = source
        self.opening = True
        self.seek, self.tell, self.seekable = source.seek, source.tell, source.seekable

    def read(self, size: int = -1, /) -> bytes:
        if self.opening and size > _MAX_DIRECTORY:
            raise Damage(f"The zip archive's list of members has {size:,} bytes.", _MAKE_AGAIN)
        data = self._source.read(size)
        if self.opening and data.count(b"PK\x01\x02") > MAX_MEMBERS:  # how every entry of the list begins
            raise Damage(f"The archive has more than {MAX_MEMBERS:,} members.", "put the rows into fewer, larger files")
        return data


class _ZipPart:
    """The bytes of one member; opened when first read, as others may be skipped."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, meter: Meter) -> None:
        self._archive = archive
        self._info = info
        self._meter = meter
        self._stream: zipfile.ZipExtFile | None = None
        self._made = 0

    def read(self, size: int, /) -> bytes:
        try:
            if self._stream is None:
                self._stream = cast(zipfile.ZipExtFile, self._archive.open(self._info))
            data = self._stream.read(size)
        except TrilloraError:
            raise
        except _ZIP_ERRORS as error:
            raise Damage(
                f"The archive member is damaged or cut: {error or type(error).__name__}.", _FETCH_AGAIN
            ) from None
        self._made += len(data)
        self._meter.made(len(data), of_stream=self._made, from_bytes=self._info.compress_size)
        return data


def _zip_member(gate: _Gate, info: zipfile.ZipInfo) -> Kind | Fault | None:
    name = info.filename
    kind = _ZIP_KINDS.get(stat.S_IFMT(info.external_attr >> 16))
    if kind:
        return Fault(shown(name), 0, f"The archive member is {kind}; it is not read.", _MAKE_AGAIN)
    found = gate.check(name)
    if not isinstance(found, Kind):
        return found
    if info.flag_bits & 1:
        return Fault(shown(name), 0, "The archive member is encrypted.", "unpack it yourself with its password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        what = f"The archive member is compressed by method {info.compress_type}, which is not read."
        return Fault(shown(name), 0, what, "make the archive again with the usual deflate")
    return found
