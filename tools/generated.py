"""Parts of documents that are made from the code, between two comments:

    <!-- options: start -->
    | option | type | ...
    <!-- options: end -->

Text around them is written by hand. Tests compare each part with the code; `make docs` writes it again.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def part_of(document: str, name: str) -> str:
    """The generated part of a document, as it is now."""
    return _split((ROOT / document).read_text(encoding="utf-8"), name)[1]


def write_part(document: str, name: str, text: str) -> None:
    """Replaces the generated part of a document."""
    before, _, after = _split((ROOT / document).read_text(encoding="utf-8"), name)
    (ROOT / document).write_text(f"{before}{text}{after}", encoding="utf-8")


def cell(text: str) -> str:
    """Plain text as a cell of a Markdown table; code between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    return "".join(
        part.replace("|", "\\|")
        if part.startswith("`") and len(part) > 1
        else re.sub(r"([\\|<>*_\[\]`])", r"\\\1", part)
        for part in parts
    )


def _split(text: str, name: str) -> tuple[str, str, str]:
    start, end = f"<!-- {name}: start -->\n", f"<!-- {name}: end -->"
    before, found, rest = text.partition(start)
    part, found_end, after = rest.partition(end)
    assert found and found_end, f"{start.strip()} or {end} is missing"
    return before + start, part, end + after
