"""A data report as one HTML file: no scripts, no requests, light or dark like the reader's system."""

from __future__ import annotations

from pathlib import Path

from trillora.data.excerpt import shortened
from trillora.data.summary import DataReport
from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.report.data.text import (
    bad_rows_by_reason,
    bins_and_edge,
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
from trillora.report.html import Tile, TokenShare, render


def write_page(report: DataReport, file: Path) -> None:
    """Replaces the file in one step, so that the page is never incomplete."""
    try:
        write_file(file, page(report))
    except OSError as error:
        what = f"The page cannot be written: {error.strerror}."
        raise TrilloraError(what, where=str(file), do="give --html a file you can write to") from None


def page(report: DataReport) -> str:
    return render(
        "data.html",
        title=f"Data for {report.model}",
        subtitle=f"Sequences of {report.sequence_length:,} tokens, {report.batch_size:,} to a step",
        report=report,
        verdict=say_verdict(report),
        figures=_figures(report),
        tokens=_tokens(report),
        epoch=say_epoch(report),
        say_bin=say_bin,
        bins=bins_and_edge(report.lengths) if report.lengths else (),
        too_long="bad-fill" if report.lost is not None and report.lost.rows else "edge-fill",  # split, not lost
        lost=say_lost(report),
        title_of_lengths=title_of_lengths(report),
        examples=[
            (
                each.place,
                say_example(each),
                shortened(each.pieces),
                [(say_side(side), shortened(side.pieces)) for side in sides_of(each)],
            )
            for each in report.examples
        ],
        preference_warning=preference_warning(report),
        bad_rows=bad_rows_by_reason(report) if report.bad_rows else (),
        row_facts=say_rows(report),
    )


def _figures(report: DataReport) -> list[Tile]:
    fill = "none" if report.packed_fill is None else f"{report.packed_fill:.1%}"
    return [
        Tile("rows", f"{report.rows:,}"),
        Tile("bad rows", f"{report.bad_rows:,}", is_alarm=report.bad_rows > 0),
        Tile("duplicates", f"{report.duplicate_rows:,}"),
        Tile("trained tokens", f"{report.trained_tokens:,}", is_alarm=report.trained_tokens == 0),
        Tile("of the sequences filled", fill, is_alarm=report.padding_warning is not None),
        Tile("steps per epoch", f"{report.steps_per_epoch:,}"),
    ]


def _tokens(report: DataReport) -> list[TokenShare]:
    counts = {"trained": report.trained_tokens, "masked": report.masked_tokens, "padded": report.padded_tokens}
    return [TokenShare(kind, kind, count, f"{count:,}") for kind, count in counts.items()]
