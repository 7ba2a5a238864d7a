"""Checks rows against the recipe's JSON Schema, and reports the first failure with its path and what was expected.

The `jsonschema` package is imported only if a recipe has a schema. A schema must be self-contained: references are
never fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trillora.data.rendering.json_values import excerpt, kind_name, shortened
from trillora.data.rows import BadRow
from trillora.errors import TrilloraError

_LONGEST_SHOWN = 120  # characters of a value or path in a message: rows can be megabytes


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
            what = "Checking rows against a JSON Schema needs the package jsonschema."
            raise _error(what, 'pip install "jsonschema>=4.18"') from error
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            what = f"The schema is not a JSON Schema: {_shortened(error.message)} at {_shortened(error.json_path)}."
            raise _error(what, "correct the schema at this path") from None
        self._best_match = best_match
        self._unresolvable = Unresolvable
        # Without an explicit registry the package fetches references; an empty one resolves no URL.
        self._validator = kind(schema, registry=Registry())

    def check(self, row: Any) -> None:
        """Raises `BadRow` if the schema does not allow the row."""
        try:
            failure = next(self._validator.iter_errors(row), None)
        except self._unresolvable as error:
            what = f"The schema refers to {_shown(error.ref)}, which it does not contain; references are not fetched."
            raise _error(what, 'copy that part into the schema\'s "$defs" and refer to it there') from None
        except RecursionError:
            what = "The row is nested too deeply to be checked, or the schema refers to itself endlessly."
            raise BadRow(what, "remove the row, or correct the schema") from None
        if failure is not None:
            closest = self._best_match([failure])  # inside anyOf and similar, the branch that nearly matches
            raise BadRow(_message(closest or failure), "correct the row, or change data.json_schema")


def _error(what: str, do: str) -> TrilloraError:
    return TrilloraError(what, where="data.json_schema", do=do)


def _message(failure: Any) -> str:
    where = _shortened(failure.json_path)
    keyword, expected, value = failure.validator, failure.validator_value, failure.instance
    if keyword == "required":
        return f"The schema requires {_listed([name for name in expected if name not in value])} at {where}."
    found = f"it is {_shown(value)}"
    if keyword == "type":
        expected = f"the type {' or '.join([expected] if isinstance(expected, str) else expected)}"
        found = f"it is {kind_name(value)}"
    elif keyword == "enum":
        expected = f"one of {_listed(expected)}"
    elif keyword == "const":
        expected = _shown(expected)
    elif keyword in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
        expected, found = f"{keyword} {expected}", f"it has {len(value)}"
    else:
        expected = f"{keyword} {_shown(expected)}"
    return f"The schema requires {expected} at {where}; {found}."


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(_shown(value) for value in values[:8])
    return f"{listed} and {len(values) - 8} more" if len(values) > 8 else listed


def _shown(value: object) -> str:
    return excerpt(value, _LONGEST_SHOWN)


def _shortened(text: str) -> str:
    return shortened(text, _LONGEST_SHOWN)
