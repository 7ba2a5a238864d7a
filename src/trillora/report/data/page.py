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
    say_bin,
    say_epoch,
    say_example,
    say_lost,
    say_rows,
    say_verdict,
)
from trillora.report.html import card, coloured, document, text, tiles
from trillora.report.numbers import format_bytes


def write_page(report: DataReport, file: Path) -> None:
    """Replaces the file in one step, so that the page is never incomplete."""
    try:
        write_file(file, page(report))
    except OSError as error:
        what = f"The page cannot be written: {error.strerror}."
        raise TrilloraError(what, where=str(file), do="give --html a file you can write to") from None


def page(report: DataReport) -> str:
    body = "\n".join(
        (
            _verdict(report),
            _tiles(report),
            card("Tokens in an epoch", _tokens(report)),
            card("Row lengths in tokens", _lengths(report)),
            card("What is trained", _examples(report)),
            card("Remarks", _remarks(report)),
            card("What is wrong with the bad rows", _bad_rows(report)),
            card("Rows", _rows(report)),
            card("Files", _files(report)),
        )
    )
    shape = f"Sequences of {report.sequence_length:,} tokens, {report.batch_size:,} to a step"
    title = f"Data for {report.model}"
    return document(title, f'<h1>{text(title)}</h1>\n<div class="faint">{shape}</div>\n{body}')


def _verdict(report: DataReport) -> str:
    verdict = say_verdict(report)
    if verdict.ready:
        return f'<div class="verdict">{text(verdict.what)}</div>'
    where = f"<p>Where: {text(verdict.where)}</p>" if verdict.where else ""
    what, do = text(verdict.what), text(verdict.do)
    return f'<div class="verdict refused">Training would refuse this data: {what}{where}<p>Do: {do}</p></div>'


def _tiles(report: DataReport) -> str:
    fill = "none" if report.packed_fill is None else f"{report.packed_fill:.1%}"
    return tiles(
        [
            (f"{report.rows:,}", "rows", False),
            (f"{report.bad_rows:,}", "bad rows", report.bad_rows > 0),
            (f"{report.duplicate_rows:,}", "duplicates", False),
            (f"{report.trained_tokens:,}", "trained tokens", report.trained_tokens == 0),
            (fill, "of the sequences filled", report.padding_warning is not None),
            (f"{report.steps_per_epoch:,}", "steps per epoch", False),
        ]
    )


def _tokens(report: DataReport) -> str:
    counts = {"trained": report.trained_tokens, "masked": report.masked_tokens, "padded": report.padded_tokens}
    total = max(sum(counts.values()), 1)
    parts = key = ""
    for name, count in counts.items():
        parts += f'<div class="{name}-fill" style="width:{count / total:.3%}"></div>'
        key += f'<span><i class="{name}-fill"></i>{name} {count:,} ({count / total:.1%})</span>'
    warning = f"<p><b>Warning: {text(report.padding_warning)}</b></p>" if report.padding_warning else ""
    return f'<div class="stack">{parts}</div><div class="key">{key}</div><p>{text(say_epoch(report))}</p>{warning}'


def _lengths(report: DataReport) -> str:
    lengths = report.lengths
    if lengths is None:
        return f"<p>{text(say_lost(report))}</p>"
    most = max(bin.rows for bin in lengths.bins)
    edge = f'<div class="edge">sequence_length {report.sequence_length:,}</div>'
    too_long = "bad-fill" if report.lost is not None and report.lost.rows else "edge-fill"  # split, not lost
    lines = []
    for bin in bins_and_edge(lengths):
        if bin is None:
            lines.append(edge)
            continue
        kind = "none" if not bin.rows else "trained-fill" if bin.fits else too_long
        bar = f'<div class="{kind}" style="width:{bin.rows / most:.2%}"></div>'
        lines.append(f"<span>{say_bin(bin)}</span><span>{bin.rows:,}</span>{bar}")
    middle = f"Median {lengths.median:,}, 95th percentile {lengths.percentile_95:,}, longest {lengths.longest:,}."
    return f'<div class="bins">{"".join(lines)}</div><p>{middle} {text(say_lost(report))}</p>'


def _examples(report: DataReport) -> str:
    return "".join(
        f'<div class="faint">{text(example.place)}: {text(say_example(example))}</div>'
        f"{coloured(shortened(example.pieces))}"
        for example in report.examples
    )


def _bad_rows(report: DataReport) -> str:
    if not report.bad_rows:
        return ""
    lines = []
    for num_rows, what, rows in bad_rows_by_reason(report):
        places = "".join(f"<br><code>{text(row.where)}</code>" for row in rows)
        do = f'<br><span class="faint">Do: {text(rows[0].do)}</span>' if rows else ""
        lines.append(f'<tr><td class="number">{num_rows:,}</td><td class="name">{text(what)}{places}{do}</td></tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _remarks(report: DataReport) -> str:
    found = [(f"{n:,}", remark) for remark, n in report.remarks.items()] + [("", note) for note in report.notes]
    if not found:
        return ""
    lines = (f'<tr><td class="number">{n}</td><td class="name">{text(what)}</td></tr>' for n, what in found)
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _rows(report: DataReport) -> str:
    lines = (f'<tr><th>{text(n)}</th><td class="name">{text(value)}</td></tr>' for n, value in say_rows(report))
    return f'<div class="scroll"><table class="facts">{"".join(lines)}</table></div>'


def _files(report: DataReport) -> str:
    lines = '<th>file</th><th>format</th><th class="number">rows</th><th class="number">size</th><th>sha256</th></tr>'
    for file in report.files:
        lines += f'<tr><td class="name">{text(file.name)}</td><td>{text(file.format)}</td>'
        lines += f'<td class="number">{file.rows:,}</td><td class="number">{format_bytes(file.bytes)}</td>'
        lines += f"<td><code>{file.sha256[:12]}</code></td></tr>"
    return f'<div class="scroll"><table><tr>{lines}</table></div>'
