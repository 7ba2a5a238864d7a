"""The sentences of a data report, the same in a terminal and on a page."""

from __future__ import annotations

import os

from trillora.data.summary import DataReport
from trillora.report.numbers import format_count
from trillora.safe_text import visible


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
        return f"Nothing is lost:{split or f' every row fits into {report.sequence_length:,} tokens.'}"
    almost = lost.length_that_keeps_99_percent
    ways = f"{lost.length_that_keeps_all:,} tokens keep all"
    if report.sequence_length < almost < lost.length_that_keeps_all:
        ways += f", {almost:,} keep 99 %"
    rows = format_count(lost.rows, "row is", "rows are")
    fate = "training would refuse" if lost.refused else "left out"
    return (
        f"{rows} longer than {report.sequence_length:,} tokens, with {lost.trained_tokens:,} trained tokens "
        f"({lost.share:.1%}): {fate}. {ways}.{split}"
    )


def say_epoch(report: DataReport) -> str:
    if not report.sequences:
        return "No sequence to train on."
    shapes = " and ".join(f"{length:,}" for length in report.sequence_lengths)
    how = "packed" if report.pack else "one row each"
    filler = (
        f", completed with {format_count(report.filler_sequences, 'empty one', 'empty ones')}"
        if report.filler_sequences
        else ""
    )
    return (
        f"{format_count(report.sequences, 'sequence', 'sequences')} of {shapes} tokens ({how}), "
        f"{report.packed_fill or 0:.1%} filled; {format_count(report.steps_per_epoch, 'step', 'steps')} "
        f"of {report.batch_size:,}{filler}."
    )


def say_rows(report: DataReport) -> list[tuple[str, str]]:
    """Facts about rows, each with its name."""
    facts = [("rows", f"{report.rows:,}  ({_counts(report.kinds)})")]
    if report.bad_rows:
        fate = "training would refuse" if report.on_bad_row == "refuse" else "left out"
        facts.append(("bad rows", f"{report.bad_rows:,}  ({fate})"))
    else:
        facts.append(("bad rows", "none"))
    facts.append(("duplicates", f"{report.duplicate_rows:,}" if report.duplicate_rows else "none"))
    if report.shortened_rows:
        facts.append(("shortened", f"{report.shortened_rows:,} rows, to fit (data.on_too_long: {report.on_too_long})"))
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
    facts.append(("train on", report.train_on))
    return facts


def nearby(path: str) -> str:
    """A path as the person sees it from where they stand, in characters that do nothing."""
    inside = os.path.isabs(path) and path.startswith(os.getcwd() + os.sep)
    return visible(os.path.relpath(path) if inside else path).replace("\n", "\\n")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
