"""Makes untrusted text (data rows, model answers, file names) safe to print in a terminal or a browser.

>>> visible("red\\x1b[31m")
'red\\\\x1b[31m'
>>> visible_line("two\\nlines")
'two\\\\nlines'
"""

from __future__ import annotations

import os
import unicodedata

_SAFE = "\n\t\u200c\u200d"  # the two joiners are part of letters and emoji


def visible(text: str) -> str:
    """Writes control and text-direction characters as escapes. Newlines, tabs and spaces of any width stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _SAFE or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def visible_line(text: str) -> str:
    """As `visible`, with newlines and tabs as escapes too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def seen_from_here(path: str) -> str:
    """An absolute path relative to the working directory if it is inside it; any other text as it is."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the working directory was removed
        return path
