"""HTML pages from the templates in `report/templates`.

    render("data.html", title="My <rows>", ...)  ->  "<!DOCTYPE html> ... <title>My &lt;rows&gt;</title> ..."

A page is a single file without scripts or requests. It follows the light or dark mode of the reader's system. All text
that reaches a template is untrusted: HTML in it is not interpreted, and its control characters are visible.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trillora.report import numbers
from trillora.safe_text import visible

FORMATS = ("number", "loss", "short", "percent", "rate", "duration", "time", "bytes", "count")


@dataclass(frozen=True)
class Tile:
    """A large figure and its name. What was there before, and the unit, are written small."""

    name: str
    value: str
    before: str = ""
    unit: str = ""
    is_alarm: bool = False


@dataclass(frozen=True)
class TokenShare:
    """A part of a bar of tokens."""

    kind: str  # trained, masked, padded: a color of the style sheet
    label: str
    tokens: float
    shown: str  # `tokens` as text


def render(template: str, **values: Any) -> str:
    """The whole page, or the part of it that the template has."""
    return _environment().get_template(template).render(values)


def base_style() -> str:
    """The style sheet of every page, for pages that are not made from these templates."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, "base.css")[0]


def text(words: str) -> str:
    """Escapes untrusted text, for pages that are not made from these templates."""
    return html.escape(visible(words))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trillora.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["grouped"] = "{:,}".format
    environment.filters |= {f"format_{name}": getattr(numbers, f"format_{name}") for name in FORMATS}
    return environment


def _shown(value: Any) -> Any:
    """What is written for a value. Markup is the output of a macro, whose own values were escaped."""
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
