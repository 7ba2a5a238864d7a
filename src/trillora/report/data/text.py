"""The sentences of a data report, the same in a terminal and on a page."""

from __future__ import annotations

import os

from trillora.data.lengths import Bin, Lengths
from trillora.data.prepare import DataProblem, reason_of
from trillora.data.summary import DataReport, DataVerdict, ExampleFacts
from trillora.report.numbers import format_count
from trillora.safe_text import visible


def say_verdict(report: DataReport) -> DataVerdict:
    """The verdict, without repeating a bad row: the list of bad rows shows it."""
    if report.verdict.ready or not report.bad_rows or report.on_bad_row != "refuse":
        return report.verdict
    rows = format_count(report.bad_rows, "row is", "rows are")
    if not report.rows:
        do = report.first_bad_rows[0].do if len(report.reasons) == 1 else "fix the bad rows shown: no row can be used"
        return DataVerdict(False, f"{rows} bad, and none is good.", do=do)
    return DataVerdict(False, f"{rows} bad.", do="fix the bad rows shown, or set data.on_bad_row to skip")


def bad_rows_by_reason(report: DataReport) -> list[tuple[int, str, list[DataProblem]]]:
    """How many rows are bad for each reason, the reason, and the rows that the report names."""
    found = []
    for reason in report.reasons:
        rows = [row for row in report.first_bad_rows if reason_of(row.what) == reason.what]
        # The exact words where there is only one row: a reason has its numbers replaced by N.
        found.append((reason.rows, rows[0].what if reason.rows == 1 and rows else reason.what, rows))
    return found


def say_lost(report: DataReport) -> str:
    """What the sequence length costs, in a sentence."""
    lost, lengths = report.lost, report.lengths
    if lost is None or lengths is None:
        return "There is no row to train on."
    split = ""
    if lost.split_rows:
        texts = format_count(lost.split_rows, "long text is", "long texts are")
        split = f" {texts} split into pieces of {report.sequence_length:,} tokens."
    if not lost.rows:
        rows = "every other row" if report.bad_rows else "every row"
        none = "No row is too long" if report.bad_rows else "Nothing is lost"
        return f"{none}:{split or f' {rows} fits into {report.sequence_length:,} tokens.'}"
    rows = format_count(lost.rows, "row is", "rows are")
    if lost.refused:  # the verdict has the numbers
        return f"{rows} too long; training would refuse.{split}"
    lengths_to_keep = f"{lost.length_that_keeps_all:,} tokens would keep all"
    almost = lost.length_that_keeps_99_percent
    if report.sequence_length < almost < lost.length_that_keeps_all:
        lengths_to_keep += f", {almost:,} would keep 99%"
    return (
        f"{rows} longer than {report.sequence_length:,} tokens and dropped, with {lost.trained_tokens:,} trained "
        f"tokens ({lost.share:.1%}). {lengths_to_keep}.{split}"
    )


def bins_and_edge(lengths: Lengths) -> list[Bin | None]:
    """The bins of the row lengths; None is where the sequence length is."""
    fitting = [bin for bin in lengths.bins if bin.fits]
    return [*fitting, None, *lengths.bins[len(fitting) :]]


def say_epoch(report: DataReport) -> str:
    if not report.sequences:
        return "No sequence to train on."
    shapes = " and ".join(f"{length:,}" for length in report.sequence_lengths)
    how = "packed" if report.pack else "one document each"
    filler = ""
    if report.filler_sequences:
        filler = f", completed with {format_count(report.filler_sequences, 'empty one', 'empty ones')}"
    return (
        f"{format_count(report.sequences, 'sequence', 'sequences')} of {shapes} tokens ({how}), "
        f"{report.packed_fill or 0:.1%} filled; {format_count(report.steps_per_epoch, 'step', 'steps')} "
        f"of {report.batch_size:,}{filler}."
    )


def say_rows(report: DataReport) -> list[tuple[str, str]]:
    """Name and value of each fact about the rows."""
    fate = "training would refuse" if report.on_bad_row == "refuse" else "skipped"
    facts = [
        ("rows", f"{report.rows:,}  ({_counts(report.kinds)})"),
        ("bad rows", f"{report.bad_rows:,}  ({fate})" if report.bad_rows else "none"),
        *([("conversations", _counts(report.shapes, "; "))] if report.shapes else []),
        ("duplicates", f"{report.duplicate_rows:,}" if report.duplicate_rows else "none"),
    ]
    if report.shortened_rows:
        facts.append(("shortened", f"{report.shortened_rows:,} rows (data.on_too_long: {report.on_too_long})"))
    facts.append(("split", _counts(report.splits)))
    if any(source.weight != 1 for source in report.sources) or len(report.sources) > 1:
        facts += [
            ("source", f"{nearby(s.path)}  ({format_count(s.rows, 'row', 'rows')}, each {s.weight:g} x)")
            for s in report.sources
        ]
    if report.chat_template is not None:
        owner = report.chat_template.owner
        whose = "the tokenizer's own" if owner == "tokenizer" else visible(nearby(owner))
        facts.append(("chat template", f"{whose}  (sha256 {report.chat_template.sha256[:12]})"))
    facts.append(("train on", f"auto  ({_auto(report.kinds)})" if report.train_on == "auto" else report.train_on))
    return facts


_TRAINED_BY_AUTO = {
    "chat": "the answers of chats",
    "pair": "the completions",
    "text": "the whole of texts",
}


def _auto(kinds: dict[str, int]) -> str:
    """What `data.train_on: auto` means for these rows."""
    return ", ".join(words for kind, words in _TRAINED_BY_AUTO.items() if kinds.get(kind)) or "no row"


def say_bin(bin: Bin) -> str:
    return f"{bin.first:,} to {bin.last:,}" if bin.last > bin.first else f"{bin.first:,}"


def nearby(path: str) -> str:
    """A path relative to the working directory if it is inside, safe to print."""
    inside = os.path.isabs(path) and path.startswith(os.getcwd() + os.sep)
    return visible(os.path.relpath(path) if inside else path).replace("\n", "\\n")


def nearby_first(note: str) -> str:
    """A note about a file with its path as in `nearby`."""
    path, colon, rest = note.partition(": ")
    return f"{nearby(path)}{colon}{visible(rest)}"


def say_example(example: ExampleFacts) -> str:
    """What the row is, and how much of it is trained."""
    turns = f" of {format_count(example.turns, 'turn', 'turns')}" if example.turns else ""
    shape = f" ({example.shape})" if example.shape else ""
    return f"{example.kind}{turns}{shape}, {example.trained_tokens:,} of {example.tokens:,} tokens trained"


def _counts(counts: dict[str, int], separator: str = ", ") -> str:
    return separator.join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
