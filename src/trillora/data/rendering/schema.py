"""Rows checked against a JSON Schema the recipe names: the first failure, with its path and what was expected.

The `jsonschema` package does the checking and is imported only when a recipe asks for it. A schema is complete in
itself: nothing it refers to is ever fetched.
"""

from __future__ import annotations

import reprlib
from typing import Any

from trillora.data.rows import BadRow
from trillora.errors import TrilloraError

_LONGEST_SHOWN = 120  # characters of a value or path in a message: rows can be megabytes
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


class SchemaCheck:
    """One JSON Schema, ready to check rows."""

    def __init__(self, schema: dict[str, Any]) -> None:
        try:
            from jsonschema import Draft202012Validator, SchemaError
            from jsonschema.exceptions import best_match
            from jsonschema.validators import validator_for
            from referencing import Registry
            from referencing.exceptions import Unresolvable
        except ImportError as error:
            raise TrilloraError(
                "The recipe names a schema, and the package that checks rows against one is not installed.",
                where="data.json_schema",
                do='pip install "jsonschema>=4.18"',
            ) from error
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise TrilloraError(
                f"The schema is not a JSON Schema: {_shortened(error.message)} at {_shortened(error.json_path)}.",
                where="data.json_schema",
                do="correct it at that place",
            ) from None
        self._best_match = best_match
        self._unresolvable = Unresolvable
        # Without an explicit registry the package fetches what a schema refers to; an empty one knows no addresses.
        self._validator = kind(schema, registry=Registry())

    def check(self, row: Any) -> None:
        """Refuse a row the schema does not allow."""
        try:
            failure = next(self._validator.iter_errors(row), None)
        except self._unresolvable as error:
            raise TrilloraError(
                f"The schema refers to {_shown(error.ref)}, which it does not contain; nothing is fetched for it.",
                where="data.json_schema",
                do='copy that part into the schema\'s "$defs" and refer to it there',
            ) from None
        except RecursionError:
            raise BadRow(
                "The row is nested too deeply to be checked, or the schema refers to itself without end.",
                "remove the row, or correct the schema",
            ) from None
        if failure is not None:
            closest = self._best_match([failure])  # inside anyOf and the like, the branch that nearly fits
            raise BadRow(_told(closest or failure), "correct the row, or the schema if the row is right")


def _told(failure: Any) -> str:
    where = _shortened(failure.json_path)
    keyword, wanted, found = failure.validator, failure.validator_value, failure.instance
    if keyword == "required":
        missing = [name for name in wanted if name not in found]
        return f"The schema wants {_listed(missing)} at {where}."
    if keyword == "type":
        kinds = " or ".join([wanted] if isinstance(wanted, str) else wanted)
        return f"The schema wants the type {kinds} at {where}; it is {_KINDS.get(type(found), 'a number')}."
    if keyword == "enum":
        return f"The schema wants one of {_listed(wanted)} at {where}; it is {_shown(found)}."
    if keyword == "const":
        return f"The schema wants {_shown(wanted)} at {where}; it is {_shown(found)}."
    if keyword in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
        return f"The schema wants {keyword} {wanted} at {where}; it has {len(found)}."
    return f"The schema wants {keyword} {_shown(wanted)} at {where}; it is {_shown(found)}."


def _listed(values: list[Any]) -> str:
    listed = ", ".join(_shown(value) for value in values[:8])
    return f"{listed} and {len(values) - 8} more" if len(values) > 8 else listed


def _shown(value: object) -> str:
    return _shortened(reprlib.repr(value))


def _shortened(text: str) -> str:
    printable = text if text.isprintable() else ascii(text)[1:-1]  # keys of a row stand in its paths
    return printable if len(printable) <= _LONGEST_SHOWN else f"{printable[: _LONGEST_SHOWN - 3]}..."
