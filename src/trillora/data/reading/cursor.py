"""Numbers the records of a file, and turns each into a `RawRow` or a `Fault`. The limits of rows, and common advice."""

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
    """Counts the records of one file or archive member, good and bad."""

    member: str = ""
    line: int = 0
    keys: list[str] = field(default_factory=list)  # the first keys of a JSON document

    def row(self, raw: bytes, size: int) -> RawRow | Fault:
        """The next record. Empty `raw` means that it exceeded the limit and was not kept."""
        if not raw:
            return self.fault(too_long(size), SHORTEN)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return self.fault(f"Byte {error.start + 1} of this record is not UTF-8.", SAVE_AS_UTF8)
        self.line += 1
        return RawRow(self.member, self.line, raw)

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
        self.line += 1
        return Fault(self.member, self.line, what, do)


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
