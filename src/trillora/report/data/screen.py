"""Prints a data report. Without colors, brackets mark the trained text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trillora.data.excerpt import ExcerptPiece, Gap, shortened
from trillora.data.summary import DataReport, ExampleFacts
from trillora.errors import TrilloraError
from trillora.report.data.text import (
    bad_rows_by_reason,
    bins_and_edge,
    nearby,
    nearby_first,
    preference_warning,
    say_bin,
    say_epoch,
    say_example,
    say_lost,
    say_rows,
    say_side,
    say_verdict,
    sides_of,
    title_of_lengths,
)
from trillora.report.numbers import format_bytes, format_count
from trillora.safe_text import visible

BAR = 32  # characters of the longest bar
TRAINED, MASKED, SPECIAL, TRAINED_SPECIAL = "bold green", "dim", "cyan", "bold cyan underline"
NUM_FILES = 20


def show(report: DataReport, console: Console) -> None:
    """Prints the report; the verdict comes last."""
    _show_files(report, console)
    _show_rows(report, console)
    _show_remarks(report, console)
    _show_bad_rows(report, console)
    _show_tokens(report, console)
    _show_lengths(report, console)
    show_examples(report, console)
    _show_verdict(report, console)


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _print(console: Console, text: Text | Table) -> None:
    console.print(Padding(text, (0, 0, 0, 2), expand=False))


def _grid(num_columns: int, right: Iterable[int] = ()) -> Table:
    table = Table.grid(padding=(0, 2))
    for number in range(num_columns):
        table.add_column(justify="right" if number in right else "left", overflow="fold")
    return table


def _show_files(report: DataReport, console: Console) -> None:
    console.print(Text(f"Data for {visible(report.model)}", "bold"))
    table = _grid(5, right=(2, 3))
    for file in report.files[:NUM_FILES]:
        size = format_bytes(file.bytes)
        name = Text(nearby(file.name))
        table.add_row(name, file.format, format_count(file.rows, "row", "rows"), size, Text(file.sha256[:12], "dim"))
    _print(console, table)
    if len(report.files) > NUM_FILES:
        _print(console, Text(f"and {len(report.files) - NUM_FILES:,} more files", "dim"))


def _show_rows(report: DataReport, console: Console) -> None:
    _title(console, "Rows")
    table = _grid(2)
    for name, value in say_rows(report):
        table.add_row(Text(name, "dim"), Text(value))
    _print(console, table)
    if warning := preference_warning(report):
        _print(console, Text(f"Warning: {warning}", "bold yellow"))


def _show_remarks(report: DataReport, console: Console) -> None:
    if not report.remarks and not report.notes:
        return
    _title(console, "Remarks")
    table = _grid(2, right=(0,))
    for remark, num_rows in report.remarks.items():
        table.add_row(Text(format_count(num_rows, "row", "rows"), "yellow"), Text(visible(remark)))
    for note in report.notes:
        table.add_row("", Text(nearby_first(note)))
    _print(console, table)


def _show_bad_rows(report: DataReport, console: Console) -> None:
    if not report.bad_rows:
        return
    _title(console, "What is wrong with the bad rows")
    table = _grid(2, right=(0,))
    for num_rows, what, rows in bad_rows_by_reason(report):
        table.add_row(Text(f"{num_rows:,} x", "red"), Text(visible(what)))
        if rows:
            table.add_row("", Text("\n".join(nearby(row.where) for row in rows), "yellow"))
            table.add_row("", Text(f"do: {visible(rows[0].do)}", "dim"))
    _print(console, table)


def _show_tokens(report: DataReport, console: Console) -> None:
    _title(console, "Tokens in an epoch")
    counts = (
        ("trained", report.trained_tokens, "in the loss", "green"),
        ("masked", report.masked_tokens, "context only", "blue"),
        ("padded", report.padded_tokens, "empty slots", "bright_black"),
    )
    total = max(sum(count for _, count, _, _ in counts), 1)
    table = _grid(5, right=(1, 2))
    for name, count, meaning, style in counts:
        bar = Text(_bar(count, total, console), style)
        table.add_row(name, f"{count:,}", f"{count / total:.1%}", bar, Text(meaning, "dim"))
    _print(console, table)
    _print(console, Text(say_epoch(report)))
    if report.padding_warning:
        _print(console, Text(f"Warning: {report.padding_warning}", "bold yellow"))


def _show_lengths(report: DataReport, console: Console) -> None:
    _title(console, title_of_lengths(report))
    lengths = report.lengths
    if lengths is not None:
        most = max(bin.rows for bin in lengths.bins)
        table = _grid(3, right=(0, 1))
        too_long = "red" if report.lost is not None and report.lost.rows else "yellow"  # split, not lost
        for bin in bins_and_edge(lengths):
            if bin is None:
                edge = ("─" if _draws(console) else "-") * 4 + " sequence_length"
                table.add_row(Text(f"{report.sequence_length:,}", "bold yellow"), "", Text(edge, "bold yellow"))
            else:
                bar = Text(_bar(bin.rows, most, console), "green" if bin.fits else too_long)
                table.add_row(say_bin(bin), f"{bin.rows:,}", bar)
        _print(console, table)
        middle = f"median {lengths.median:,}, 95th percentile {lengths.percentile_95:,}, longest {lengths.longest:,}"
        _print(console, Text(middle))
    _print(console, Text(say_lost(report)))


def _bar(count: int, most: int, console: Console) -> str:
    block = "█" if _draws(console) else "#"
    return block * max(round(BAR * count / most), 1 if count else 0)


def _draws(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def show_examples(report: DataReport, console: Console) -> None:
    """The rows with what is trained of them."""
    for number, example in enumerate(report.examples):
        _title(console, "Example" if not number else "Another, of another kind")
        _show_example(example, console)


def _show_example(example: ExampleFacts, console: Console) -> None:
    has_colours = console.color_system is not None and not console.no_color
    legend = [("trained", TRAINED), ("context", MASKED), ("special token", SPECIAL)]
    key = [part for word, style in legend for part in ((word, style), " ")] if has_colours else ["⟦trained⟧"]
    _print(console, Text.assemble(f"{nearby(example.place)}  {say_example(example)}  ", *key))
    for side in sides_of(example) or [example]:
        console.print()
        if side.side in ("chosen", "rejected"):
            _print(console, Text(say_side(side), "bold"))
        short = shortened(side.pieces)
        _print(console, coloured(short) if has_colours else bracketed(short))


def coloured(pieces: Iterable[ExcerptPiece | Gap]) -> Text:
    return Text.assemble(*((_text_of(piece), _style_of(piece)) for piece in pieces))


def bracketed(pieces: Iterable[ExcerptPiece | Gap]) -> Text:
    """Trained text between ⟦ and ⟧: one pair for neighboring pieces and the gaps between them."""
    runs: list[tuple[bool, str]] = []
    for piece in pieces:
        trained = runs[-1][0] if isinstance(piece, Gap) and runs else isinstance(piece, ExcerptPiece) and piece.trained
        runs.append((trained, _text_of(piece)))
    joined = ((trained, "".join(part for _, part in group)) for trained, group in groupby(runs, lambda run: run[0]))
    return Text("".join(f"⟦{inner}⟧" if trained else inner for trained, inner in joined))


def _text_of(piece: ExcerptPiece | Gap) -> str:
    return f" [… {piece.characters:,} characters …] " if isinstance(piece, Gap) else visible(piece.text)


def _style_of(piece: ExcerptPiece | Gap) -> str:
    if isinstance(piece, Gap):
        return "italic yellow"
    if piece.special:
        return TRAINED_SPECIAL if piece.trained else SPECIAL
    return TRAINED if piece.trained else MASKED


def _show_verdict(report: DataReport, console: Console) -> None:
    console.print()
    verdict = say_verdict(report)
    if verdict.ready:
        console.print(Text(verdict.what, "bold green"))
    else:
        error = TrilloraError(verdict.what, where=verdict.where and nearby(verdict.where), do=verdict.do)
        text = f"Training would refuse this data: {visible(str(error))}"
        console.print(Text(text, "bold red"), soft_wrap=True)
