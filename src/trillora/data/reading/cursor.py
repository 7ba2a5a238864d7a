"""Gives each record of a file its place, as a `RawRow` or a `Fault`. The limits of rows, and common advice."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from trillora.data.rows import Fault, RawRow

MAX_ROW_BYTES = 32 << 20
MAX_COLUMNS = 999  # of a table
FETCH_AGAIN = "copy or download the file again, completely"
SAVE_AS_UTF8 = "save the file as UTF-8"
SHORTEN = "shorten this row, or split it into several rows"


@dataclass
class Cursor:
    """Where the next record of a file or archive member is. A reader of lines sets `line` before each record."""

    member: str = ""
    line: int = 1  # on which the next record begins; in files without lines, its number
    num_records: int = 0  # so far, good and bad
    keys: list[str] = field(default_factory=list)  # the first keys of a JSON document
    _last: tuple[int, int] = (0, 0)  # line of the last record, and how many began there

    def row(self, raw: bytes, size: int) -> RawRow | Fault:
        """The next record. Empty `raw` means that it exceeded the limit and was not kept."""
        if not raw:
            return self.fault(too_long(size), SHORTEN)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return self.fault(f"Byte {error.start + 1} of this record is not UTF-8.", SAVE_AS_UTF8)
        line, nth = self._step()
        return RawRow(self.member, line, raw, nth)

    def record(self, record: Mapping[str, object]) -> RawRow | Fault:
        """The next record as JSON text. NaN and infinity pass; the parser of the row refuses them."""
        try:
            raw = _TO_JSON(record).encode("utf-8")
        except UnicodeEncodeError:
            return self.fault("This record contains bytes that are not UTF-8.", SAVE_AS_UTF8)
        except (TypeError, ValueError, RecursionError) as error:
            return self.fault(f"This record has a value that JSON cannot represent: {error}.", "remove that column")
        return self.row(raw if len(raw) <= MAX_ROW_BYTES else b"", len(raw))

    def fault(self, what: str, do: str) -> Fault:
        """The next record, which cannot be used."""
        line, nth = self._step()
        return Fault(self.member, line, what, do, nth)

    def _step(self) -> tuple[int, int]:
        """The place of the next record: its line, and its number there."""
        line, nth = self.line, self._last[1] + 1 if self._last[0] == self.line else 1
        self._last = line, nth
        self.num_records += 1
        self.line += 1
        return line, nth


def too_long(size: int) -> str:
    return f"This row has {size:,} bytes; the limit is {MAX_ROW_BYTES >> 20} MiB."


def _plain(value: object) -> str:
    """Parquet values that have no JSON type, as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__}")


_TO_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain).encode
