"""Finds words that we do not use, in everything a person reads: part of `make lint`.

    python tools/check_english.py             # every tracked text file
    python tools/check_english.py README.md   # these files only

Python files are checked in comments, strings and the names of functions and classes; other text files as a whole.
CONTRIBUTING.md explains the style. Code that needs a banned word as a word of another program (a JSON key, a library's
argument) is listed in `ALLOWED`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".json", ".sh")
NAMES = ("Makefile", "run")
# Recorded output, data, and this list itself.
SKIPPED = (
    *("tools/check_english.py", "tools/code_counts.py", "tests/project/test_english.py", "LICENSE"),
    *("recipes/samples/", "recipes/schemas/", "docs/models.md"),
)

# Each pattern with what to write instead.
BANNED: dict[str, str] = {
    r"anew": "again, new",
    r"mend(?:s|ed|ing)?": "fix",
    r"told|tells?|telling": "say, show, report, print",
    r"lies|lay|laid": "is, is stored, placed",
    r"stands": "is",
    r"besides": "also, in addition",
    r"beside": "next to, with",
    r"beforehand": "in advance, before",
    r"henceforth|hence|thus|likewise": "so, also",
    r"go(?:es)? on|going on|went on": "continue, resume",
    r"whoever": "name the subject",
    r"nobody|somebody": "no one, or name the subject",
    r"at hand": "available",
    r"hears?": "receives, gets",
    r"afresh": "from scratch",
    r"so many": "N",
    r"commonest|likeliest": "most common, most likely",
    r"of its own accord|for want of|wants for": "by itself, without",
    r"to the letter": "exactly, character by character",
}
# The same for text, but not for names of functions and classes.
IN_TEXT: dict[str, str] = {
    r"(?:those|that) of": "repeat the noun, or write: the base's, as in the base, equals the base",
    r"rows at once": "micro-batch",
    r"in silence|without a word": "silently",
    r"letter by letter": "character by character, exactly",
    r"all the same": "anyway",
    r"(?:colour|neighbour|behaviour|favour)\w*": "color, neighbor, behavior, favor",
    r"(?:recognis|normalis|initialis|randomis|tokenis|summaris|optimis(?!t))\w+|modell(?:ed|ing)": "American spelling",
}


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w'/-])(?:{'|'.join(words)})(?![\w'-])", re.IGNORECASE)


PATTERN, PATTERN_OF_TEXT = any_of(BANNED), any_of([*BANNED, *IN_TEXT])
# Where IN_TEXT does not hold yet, and the pages that are made from there; and a text that a model writes.
NOT_YET = (
    "src/trillora/preflight/hlo/",
    *("tests/generation/test_generate.py", "tools/sys_scan_kinds.py"),
)
# A banned word that is not ours to change: (part of the path, text on the line).
ALLOWED: tuple[tuple[str, str], ...] = ()


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    return [p for p in paths if (p.suffix in SUFFIXES or p.name in NAMES) and p.is_file() and not _skipped(p)]


def _skipped(path: Path) -> bool:
    name = str(path.relative_to(ROOT))
    return name.startswith(SKIPPED) or (path.suffix == ".json" and not name.endswith("recipe.schema.json"))


def texts_of(path: Path) -> Iterator[tuple[int, str, re.Pattern[str]]]:
    """What a person reads in a file, line by line, with the line's number and what must not be in it."""
    source = path.read_text(encoding="utf-8")
    in_text = PATTERN if path.as_posix().removeprefix(f"{ROOT.as_posix()}/").startswith(NOT_YET) else PATTERN_OF_TEXT
    if path.suffix != ".py":
        yield from ((number, line, in_text) for number, line in enumerate(source.splitlines(), 1))
        return
    if not in_text.search(source.replace("_", " ")):
        return  # Python's tokenizer is slow, and most files have none of the words anywhere
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            lines = enumerate(token.string.splitlines(), token.start[0])
            yield from ((number, line, in_text) for number, line in lines)
        elif kind == "NAME" and previous in ("def", "class"):
            yield token.start[0], token.string.replace("_", " "), PATTERN
        previous = token.string


def faults(path: Path) -> Iterator[str]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for number, text, pattern in texts_of(path):
        if any(part in name and allowed in text for part, allowed in ALLOWED):
            continue
        for found in pattern.finditer(text):
            instead = next(
                hint for word, hint in {**BANNED, **IN_TEXT}.items() if re.fullmatch(word, found[0], re.IGNORECASE)
            )
            yield f"{name}:{number}: '{found[0]}' (write: {instead})"


def main() -> int:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or tracked_files()
    found = [fault for path in paths for fault in faults(path)]
    print("\n".join(found) if found else f"plain English in {len(paths)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
