"""Untrusted text made safe to print: a terminal or browser shows every character and obeys none.

>>> visible("red\\x1b[31m")
'red\\\\x1b[31m'
"""

from __future__ import annotations

import unicodedata

_HARMLESS = "\n\u200c\u200d"  # newline; the other two join letters and emoji


def visible(text: str) -> str:
    """The text with control and direction characters written as escapes. Newlines stay."""
    return "".join(c if c.isprintable() or c in _HARMLESS or _is_space(c) else _escaped(c) for c in text)


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
