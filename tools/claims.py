"""Figures in README and docs: written from the records of measurements, with their age. `make claims` lists them.

    python tools/claims.py            lists every figure: fresh, stale or without a record; fails if README is not right
    python tools/claims.py --write    writes the figures, the tables and the lines "Measured" into the documents

A figure in a sentence is followed by the record and the value that it shows; its form stays (decimals, percent, m:ss):

    losses match PyTorch to 1.8e-5<!-- claim: parity.largest --> over 100<!-- claim: parity.steps --> steps
    1.26<!-- claim: peers.1b-2048.trillora.tokens_per_second / peers.1b-2048.unsloth.tokens_per_second --> times

A table is a part of its own, made by a function of `claim_tables.py`, and names of commits and days go into a line
after the figures, both between comments: `<!-- claims speed: start -->`, `<!-- measured: start -->`, each with an end.

Every figure shows its commit and day in that line. If a source of the record has changed since, the line says so too.
That remark appears once for each measurement, with the first change, and not with every commit: so it is part of the
text, and a test compares it. Where git does not know the commit (a shallow clone), the remark stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claim_records import Missing, Record, changed_since, read_records
from claim_tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
README = "README.md"
CHANGED = "**code changed since**"
WRITE = "run: python tools/claims.py --write"
FIGURE = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?::\d\d)?(?: ?%)?"
PARTS = re.compile(
    rf"(?P<figure>{FIGURE})<!-- claim: (?P<path>[^>]+?) -->"
    r"|<!-- (?P<part>[\w -]+): start -->\n(?P<body>.*?)<!-- (?P=part): end -->",
    re.DOTALL,
)
# Parts that other generators write and other tests compare, and whole pages: which records they show.
OTHERS = {
    (README, "recipes"): "recipe-",
    ("benchmarks/PREFLIGHT.md", "compile matrix"): "compile-matrix-",
    ("benchmarks/PREFLIGHT.md", "published rates"): "tpu-anchors",
}
PAGES = {"docs/models.md": "architectures", "docs/ATLAS.md": "atlas-"}
# Numbers in README that no one measured: names, versions, bounds and the conditions of a measurement.
NOT_MEASURED = ("Python 3.11 or newer", "1.2B model", "rank 16 on seven layers")
NUMBER = re.compile(rf"(?<![\w.])(?<!\w-){FIGURE}")
WORDS = "four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred|thousand|twice"
NUMBER_WORD = re.compile(rf"(?<![\w-])(?:{WORDS})(?![\w-])", re.IGNORECASE)
UNIT = r"%|(?<!7)x(?! ?\d)\b|times\b|µs\b|ms\b|s\b|seconds\b|min|hours?\b|[KMG]i?B\b|tokens/s|TFLOP|GFLOP|of \d"
NOT_TEXT = re.compile(r"^ *```.*?^ *```|<!--.*?-->|`[^`\n]*`|(?<=\])\([^)\s]*\)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Claim:
    """A figure in a sentence, or all figures of a table."""

    line: int
    shown: str
    what: str
    records: tuple[Record, ...]


@dataclass
class Document:
    """A document read with the records: its text as it should be, its figures, and what is wrong."""

    name: str
    text: str
    records: dict[str, Record]
    root: Path = ROOT
    claims: list[Claim] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _not_named: dict[str, Record] = field(default_factory=dict)  # used since the last line "Measured"

    def as_it_should_be(self) -> str:
        written = PARTS.sub(self._part, self.text)
        for mark in re.findall(r"<!-- claim: .*?-->", PARTS.sub("", self.text)):
            self.problems.append(f"{self.name}: no figure right before {mark}")
        if self._not_named:
            self.problems.append(
                f"{self.name}: figures of {', '.join(self._not_named)} have no line 'measured' after them"
            )
        return written

    def _part(self, found: re.Match[str]) -> str:
        line, part = self.text.count("\n", 0, found.start()) + 1, found["part"]
        if found["figure"]:
            shown = self._claim(line, found["path"], lambda show: show(found["figure"], found["path"]), found["figure"])
            return f"{shown}<!-- claim: {found['path']} -->"
        if part == "measured":
            body = measured(list(self._not_named.values()), found["body"], self.root, self.name)
            self._not_named.clear()
        elif part.startswith("claims "):
            make = TABLES.get(part.removeprefix("claims "))
            if make is None:
                self.problems.append(f"{self.name}:{line}: tools/claim_tables.py has no table {part[7:]}")
                return found[0]
            body = self._claim(line, f"table {part[7:]}", make, found["body"])
        elif prefix := OTHERS.get((self.name, part)):
            shown_records = [record for name, record in self.records.items() if name.startswith(prefix)]
            self._use(line, f"{len(NUMBER.findall(found['body']))} figures", f"table {part}", shown_records)
            body = found["body"]
        else:
            return found[0]
        return f"<!-- {part}: start -->\n{body}<!-- {part}: end -->"

    def _claim(self, line: int, what: str, make: Callable[[Show], str], otherwise: str) -> str:
        """The text that `make` gives, and a note of the records that it took its numbers from."""
        show = Show(self.records)
        try:
            text = make(show)
        except Missing as missing:
            self.problems.append(f"{self.name}:{line}: {missing}")
            return otherwise
        is_table = what.startswith("table ")
        self._use(line, f"{show.num_figures} figures" if is_table else text, what, list(show.used.values()))
        return text

    def _use(self, line: int, shown: str, what: str, records: list[Record]) -> None:
        self.claims.append(Claim(line, shown, what, tuple(records)))
        self._not_named |= {record.name: record for record in records}


@dataclass
class Show:
    """Values of records as text, with a note of the records that they came from."""

    records: dict[str, Record]
    used: dict[str, Record] = field(default_factory=dict)
    num_figures: int = 0

    def __call__(self, sample: str, path: str) -> str:
        """A number, or the quotient of two (`A / B`), in the form of the sample."""
        values = [self._value(one) for one in path.split(" / ")]
        if not all(isinstance(value, int | float) for value in values):
            raise Missing(f"{path} is not a number")
        self.num_figures += 1
        return in_the_form_of(sample, values[0] if len(values) == 1 else values[0] / values[1])

    def text(self, path: str) -> str:
        return str(self._value(path))

    def names(self, path: str) -> list[str]:
        """What a record has below a path, in its order."""
        return list(self._value(path))

    def _value(self, path: str) -> Any:
        name, _, rest = path.partition(".")
        if name not in self.records:
            raise Missing(f"there is no record {name}")
        self.used[name] = self.records[name]
        return self.records[name].at(rest)


def in_the_form_of(sample: str, value: float) -> str:
    """The value with the decimals of a sample, and with its percent sign, plus sign, exponent or minutes."""
    number = sample.rstrip(" %")
    unit = sample[len(number) :]
    value = 100 * value if "%" in unit else value
    mantissa = re.split("e", number)[0]
    decimals = len(mantissa.partition(".")[2])
    sign = "+" if number[0] in "+-" else ""
    if ":" in number:
        return f"{round(value) // 60}:{round(value) % 60:02}"
    if "e" in number:
        return re.sub(r"e([-+])0?", lambda e: "e" + e[1].strip("+"), f"{value:.{decimals}e}") + unit
    return f"{value:{sign},.{decimals}f}{unit}"


def measured(records: Sequence[Record], old: str, root: Path, document: str) -> str:
    """The line with commit, day and machine of each record, and whether its sources have changed."""
    groups: dict[str, dict[str, list[str]]] = {}
    for record in sorted(sorted(records, key=lambda record: record.name), key=lambda record: record.date, reverse=True):
        where = f"{record.date} at {record.commit}, {record.machine}"
        changed = changed_since(record, root)
        is_stale = bool(changed) if changed is not None else f"{where}, {CHANGED}" in old
        files = groups.setdefault(f"{where}, {CHANGED}" if is_stale else where, {})
        files.setdefault(record.file, []).append(record.name)
    up = "../" * document.count("/")
    lines = []
    for where, files in groups.items():
        links = (f"[{names[0] if len(names) == 1 else file}]({up}{file})" for file, names in files.items())
        lines.append(f"{where} ({', '.join(links)})")
    return f"<sub>Measured {'; '.join(lines)}.</sub>\n" if lines else ""


def without_record(text: str, document: str) -> Iterator[tuple[int, str]]:
    """Line and text of every number that no record backs. In README all numbers count, elsewhere those with a unit."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    def blank_part(found: re.Match[str]) -> str:
        part = found["part"]
        known = part is None or part == "measured" or part.startswith("claims ") or (document, part) in OTHERS
        return blank(found) if known else found[0]

    text = NOT_TEXT.sub(blank, PARTS.sub(blank_part, text))
    if document == README:
        for phrase in NOT_MEASURED:
            text = re.sub(re.escape(phrase).replace(r"\ ", r"\s+"), blank, text)
        found = sorted((m.start(), m[0]) for pattern in (NUMBER, NUMBER_WORD) for m in pattern.finditer(text))
    else:
        found = [(m.start(), m[0]) for m in re.finditer(rf"{NUMBER.pattern}(?:(?<=%)| ?(?:{UNIT}))", text)]
    for place, number in found:
        yield text.count("\n", 0, place) + 1, number


def documents(root: Path) -> list[str]:
    found = [*(root / "docs").glob("*.md"), *(root / "benchmarks").glob("PREFLIGHT.md")]
    pages = sorted(path.relative_to(root).as_posix() for path in found)
    return [README, *(page for page in pages if page not in PAGES)]


def read(root: Path, name: str, records: dict[str, Record]) -> Document:
    return Document(name, (root / name).read_text("utf-8"), records, root)


def problems_of(root: Path, name: str, records: dict[str, Record]) -> list[str]:
    """What is wrong with a document: a figure, a table or a line that differs from the records; in README also every
    number without one."""
    document = read(root, name, records)
    should_be = document.as_it_should_be()
    if should_be != document.text and not document.problems:
        pairs = zip(document.text.splitlines(), should_be.splitlines(), strict=False)
        line = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), 1)
        document.problems.append(f"{name}:{line}: differs from the records; {WRITE}")
    if name == README:
        document.problems += [
            f"{name}:{line}: {number} comes from no record: mark it with <!-- claim: RECORD.VALUE -->"
            for line, number in without_record(document.text, name)
        ]
    return document.problems


def show_list(root: Path, records: dict[str, Record]) -> None:
    """Prints every figure with its state, and every record."""
    counts = {"fresh": 0, "stale": 0, "unknown commit": 0}
    used: set[str] = set()
    num_bare = {}
    for name in documents(root):
        document = read(root, name, records)
        document.as_it_should_be()
        bare = list(without_record(document.text, name))
        num_bare[name] = len(bare)
        print(f"\n{name}: {len(document.claims)} figures and tables with a record, {len(bare)} numbers without one")
        for claim in document.claims:
            states = sorted({state_of(record, root) for record in claim.records})
            counts[worst(states)] += 1
            used |= {record.name for record in claim.records}
            print(f"  {claim.line:4}  {claim.shown:12}  {worst(states):14}  {claim.what}")
        for line in sorted({line for line, _ in bare}):
            print(f"  {line:4}  {', '.join(number for at, number in bare if at == line)}: no record")
    print(f"\n{len(records)} records")
    for record in records.values():
        pages = [page for page, prefix in PAGES.items() if record.name.startswith(prefix)]
        where = "" if record.name in used else f"; on {pages[0]}" if pages else "; shown nowhere"
        how = f"; transcribed from {record.transcribed}" if record.transcribed else ""
        print(f"  {record.name}: {record.date}, {record.commit}, {record.machine}{where}{how}")
        changed = changed_since(record, root)
        if changed:
            print(f"    stale: {len(changed)} of its files changed, such as {changed[0]}")
        elif changed is None:
            print("    unknown commit")
    in_docs = sum(number for name, number in num_bare.items() if name != README)
    print("\nFigures and tables with a record: " + ", ".join(f"{number} {state}" for state, number in counts.items()))
    print(
        f"Numbers without a record: {num_bare[README]} in README; {in_docs} in docs, where limits and options count too"
    )


def state_of(record: Record, root: Path) -> str:
    changed = changed_since(record, root)
    return "unknown commit" if changed is None else "stale" if changed else "fresh"


def worst(states: Sequence[str]) -> str:
    return next(state for state in ("stale", "unknown commit", "fresh") if state in states)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the figures into the documents")
    args = parser.parse_args(arguments)
    records = read_records(root)
    if args.write:
        for name in documents(root):
            document = read(root, name, records)
            should_be = document.as_it_should_be()
            if should_be != document.text:
                (root / name).write_text(should_be, encoding="utf-8")
                print(f"wrote {name}")
    else:
        show_list(root, records)
    problems = [problem for name in documents(root) for problem in problems_of(root, name, records)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
