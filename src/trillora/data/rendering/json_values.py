"""JSON values of rows: strict parsing, and short descriptions for error messages."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any, NoReturn

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}


def parse_json(text: str) -> Any:
    """A value that a tokenizer can take. Unlike `json.loads`, refuses NaN, infinity, half of a surrogate pair, and an
    object that has a key twice, of which only the last would be used.

    Raises ValueError, or its subclasses JSONDecodeError and UnicodeEncodeError (surrogates), or RecursionError.
    """
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    if _SURROGATE_ESCAPE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def kind_name(value: object) -> str:
    """What a value is, in the words of messages: "text", "a list"."""
    return _KINDS.get(type(value), "an object")


def excerpt(value: object, limit: int = 60) -> str:
    """The value in one printable line of at most `limit` characters."""
    return shortened(reprlib.repr(value), limit)


def shortened(text: str, limit: int) -> str:
    printable = text if text.isprintable() else ascii(text)[1:-1]
    return printable if len(printable) <= limit else f"{printable[: limit - 3]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {excerpt(twice)} is given twice")
    return value
