"""Reads a JSON file that may be damaged or hostile: bounded in size and depth, and checked against a type.

    class Index(BaseModel):
        weight_map: dict[str, str]

    index = read_json(folder / "model.safetensors.index.json", Index, do="download the file again")

Every failure is a TrilloraError that names the file and the field:

    This file is not as expected: weight_map.a must be a string.
      where: m/model.safetensors.index.json
      do:    download the file again
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from trillora.errors import TrilloraError
from trillora.files.bounded import read_bounded

T = TypeVar("T")
MAX_BYTES = 64 << 20  # the largest known index of weights has 10 MB
MAX_DEPTH = 100


def read_json(file: Path, expected: type[T], *, do: str, max_bytes: int = MAX_BYTES, allow_infinity: bool = False) -> T:
    """The content of a JSON file as `expected`: a pydantic model, a TypedDict, `dict[str, Any]`.

    `allow_infinity` accepts Infinity, which is not JSON but which Python writes into some model configs.
    """
    data = read_data(file, do=do, max_bytes=max_bytes)
    return parse_json(data, expected, where=str(file), do=do, allow_infinity=allow_infinity)


def read_text(file: Path, *, do: str, max_bytes: int = MAX_BYTES) -> str:
    """The content of a UTF-8 file as `Path.read_text` returns it; only a regular file of bounded size is read."""
    try:
        text = read_data(file, do=do, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrilloraError(f"Byte {error.start + 1} of this file is not UTF-8.", where=str(file), do=do) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(data: bytes, expected: type[T], *, where: str, do: str, allow_infinity: bool = False) -> T:
    """As `read_json`, for bytes that were read already."""
    try:
        text = data.decode("utf-8-sig")
        check_depth(text)
        value = json.loads(text, parse_constant=_allow_infinity if allow_infinity else _refuse)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise TrilloraError(f"This is not valid JSON: {error}.", where=where, do=do) from error
    try:
        adapter: TypeAdapter[T] = _adapter(expected)  # type: ignore[arg-type]
        return adapter.validate_python(value)
    except ValidationError as error:
        raise TrilloraError(f"This file is not as expected: {first_problem(error)}.", where=where, do=do) from error


def read_data(file: Path, *, do: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of bounded size."""
    try:
        return read_bounded(file, max_bytes)
    except OSError as error:
        raise TrilloraError(f"This file cannot be read: {error.strerror}.", where=str(file), do=do) from error
    except ValueError as error:
        raise TrilloraError(f"This file cannot be used: {error}.", where=str(file), do=do) from error


def check_depth(text: str) -> None:
    """Refuses deep nesting before the parser recurses. Brackets in strings count too, but only close to the limit."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth, in_string, escaped = 0, False, False
    for letter in text:
        if in_string:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
            elif letter == '"':
                in_string = False
        elif letter == '"':
            in_string = True
        elif letter in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        elif letter in "]}":
            depth -= 1


def _allow_infinity(name: str) -> float:
    return _refuse(name) if name == "NaN" else float(name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@cache
def _adapter(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(expected)


def first_problem(error: ValidationError) -> str:
    """The place and the message of the first problem, for an error message."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "its content"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be")
    message = re.sub(r"a valid dictionary or (instance|object).*", "an object", message[:1].lower() + message[1:])
    return f"{place}: {message}" if not message.startswith("must") else f"{place} {message}"
