"""A data report as one HTML file: no script, no outside request, light or dark as the reader's system is."""

from __future__ import annotations

import html
import os
from pathlib import Path

from trillora.data_report.example import Gap, Piece, shortened, visible
from trillora.data_report.phrases import say_bytes, say_epoch, say_lost, say_rows
from trillora.data_report.report import DataReport
from trillora.errors import TrilloraError

# Names of colours: back, card, text, faint, line, trained, masked, padded, special, bad, edge (of a sequence).
STYLE = """
:root { color-scheme: light dark;
  --back: #f4f5f3; --card: #ffffff; --text: #1d2420; --faint: #5d6862; --line: #dde2de; --trained: #12794a;
  --trained-back: #d9f2e3; --masked: #4a6fa5; --padded: #c3cac6; --special: #0b6e80; --bad: #b3261e; --edge: #a66a00; }
@media (prefers-color-scheme: dark) { :root {
  --back: #121614; --card: #1b211e; --text: #e5ebe7; --faint: #98a39d; --line: #2d3631; --trained: #6fdba0;
  --trained-back: #17402b; --masked: #7ea3d8; --padded: #48534d; --special: #6ccbdc; --bad: #ff8a80;
  --edge: #f0b64a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 0 0 .75rem; }
p { margin: .5rem 0 0; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
.card, .verdict { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.15rem; margin-top: 1rem; }
.verdict { border-left: 6px solid var(--trained); font-weight: 600; }
.verdict.refused { border-left-color: var(--bad); }
.verdict p { font-weight: 400; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin-top: 1rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; line-height: 1.25; }
.tile.alarm b { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top; font-weight: 400; }
th { color: var(--faint); font-size: .85rem; }
.facts th { width: 9rem; font-size: inherit; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 11rem; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .86rem; }
.stack { display: flex; height: 1.6rem; border-radius: 6px; overflow: hidden; background: var(--line); }
.trained-fill { background: var(--trained); } .masked-fill { background: var(--masked); }
.padded-fill { background: var(--padded); } .bad-fill { background: var(--bad); }
.edge-fill { background: var(--edge); }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin-top: .6rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .4rem; }
.bins { display: grid; grid-template-columns: max-content max-content 1fr; gap: .2rem .75rem; align-items: center;
  font-variant-numeric: tabular-nums; }
.bins span { text-align: right; }
.bins div { height: 1.05rem; border-radius: 0 4px 4px 0; }
.bins div[class$=fill] { min-width: 2px; } 
.bins .edge { grid-column: 1 / -1; text-align: left; color: var(--edge); border-top: 2px dashed var(--edge);
  font-size: .85rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .75rem 0 0; padding: .9rem; background: var(--back);
  border-radius: 8px; line-height: 1.65; }
pre .context { color: var(--faint); } .special { color: var(--special); }
mark { background: var(--trained-back); color: var(--trained); font-weight: 600; border-radius: 3px;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; padding: .08rem 0; }
mark .special { text-decoration: underline; }
.gap { color: var(--edge); font-style: italic; }
"""


def write_page(report: DataReport, file: Path) -> None:
    """The page appears under its name only when it is whole."""
    making = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        making.write_text(page(report), "utf-8")
        os.replace(making, file)
    except OSError as error:
        making.unlink(missing_ok=True)
        raise TrilloraError(
            f"The page cannot be written: {error.strerror}.", where=str(file), do="give --html a file you can write to"
        ) from None


def page(report: DataReport) -> str:
    body = "\n".join(
        (
            _verdict(report),
            _tiles(report),
            _card("Tokens of an epoch", _tokens(report)),
            _card("Row lengths in tokens", _lengths(report)),
            _card("What is trained", _example(report)),
            _card("What is wrong with the bad rows", _bad_rows(report)),
            _card("Rows", _rows(report)),
            _card("Files", _files(report)),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Data for {_text(report.model)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Data for {_text(report.model)}</h1>
<div class="faint">Sequences of {report.sequence_length:,} tokens, {report.batch_size:,} to a step</div>
{body}
</main>
</body>
</html>
"""


def _text(text: str) -> str:
    """Text that is only text, for HTML and for eyes."""
    return html.escape(visible(text))


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{_text(title)}</h2>{content}</section>' if content else ""


def _verdict(report: DataReport) -> str:
    verdict = report.verdict
    if verdict.ready:
        return f'<div class="verdict">{_text(verdict.what)}</div>'
    where = f"<p>Where: {_text(verdict.where)}</p>" if verdict.where else ""
    what, do = _text(verdict.what), _text(verdict.do)
    return f'<div class="verdict refused">This data would be refused: {what}{where}<p>Do: {do}</p></div>'


def _tiles(report: DataReport) -> str:
    fill = "none" if report.packed_fill is None else f"{report.packed_fill:.1%}"
    tiles = [
        (f"{report.rows:,}", "rows", False),
        (f"{report.bad_rows:,}", "bad rows", report.bad_rows > 0),
        (f"{report.duplicate_rows:,}", "duplicates", False),
        (f"{report.trained_tokens:,}", "trained tokens", report.trained_tokens == 0),
        (fill, "slots filled", False),
        (f"{report.steps_per_epoch:,}", "steps an epoch", False),
    ]
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile{" alarm" if alarm else ""}"><b>{value}</b><span class="faint">{name}</span></div>'
            for value, name, alarm in tiles
        )
    )


def _tokens(report: DataReport) -> str:
    counts = {"trained": report.trained_tokens, "masked": report.masked_tokens, "padded": report.padded_tokens}
    total = max(sum(counts.values()), 1)
    parts = "".join(f'<div class="{n}-fill" style="width:{c / total:.3%}"></div>' for n, c in counts.items())
    key = "".join(
        f'<span><i class="{name}-fill"></i>{name} {count:,} ({count / total:.1%})</span>'
        for name, count in counts.items()
    )
    return f'<div class="stack">{parts}</div><div class="key">{key}</div><p>{_text(say_epoch(report))}</p>'


def _lengths(report: DataReport) -> str:
    lengths = report.lengths
    if lengths is None:
        return f"<p>{_text(say_lost(report))}</p>"
    most = max(bin.rows for bin in lengths.bins)
    edge = f'<div class="edge">sequence_length {report.sequence_length:,}</div>'
    too_long = "bad-fill" if report.lost is not None and report.lost.rows else "edge-fill"  # split, not lost
    lines = []
    for bin in lengths.bins:
        if not bin.fits and edge not in lines:
            lines.append(edge)
        kind = "none" if not bin.rows else "trained-fill" if bin.fits else too_long
        bar = f'<div class="{kind}" style="width:{bin.rows / most:.2%}"></div>'
        lines.append(f"<span>{bin.first:,} to {bin.last:,}</span><span>{bin.rows:,}</span>{bar}")
    if edge not in lines:
        lines.append(edge)
    middle = f"Median {lengths.median:,}, 95 % up to {lengths.percentile_95:,}, longest {lengths.longest:,}."
    return f'<div class="bins">{"".join(lines)}</div><p>{middle} {_text(say_lost(report))}</p>'


def _example(report: DataReport) -> str:
    example = report.example
    if example is None:
        return ""
    amount = f"{example.kind}, {example.trained_tokens:,} of {example.tokens:,} tokens trained"
    key = '<mark>trained</mark><span class="faint">context</span><span class="special">special token</span>'
    text = "".join(_piece(piece) for piece in shortened(example.pieces))
    return f'<div class="faint">{_text(example.place)}: {amount}</div><div class="key">{key}</div><pre>{text}</pre>'


def _piece(piece: Piece | Gap) -> str:
    if isinstance(piece, Gap):
        return f'<span class="gap"> [… {piece.characters:,} characters …] </span>'
    text = f'<span class="special">{_text(piece.text)}</span>' if piece.special else _text(piece.text)
    return f"<mark>{text}</mark>" if piece.trained else f'<span class="context">{text}</span>'


def _bad_rows(report: DataReport) -> str:
    if not report.bad_rows:
        return ""
    reasons = "".join(
        f'<tr><td class="number">{reason.rows:,}</td><td class="name">{_text(reason.what)}</td></tr>'
        for reason in report.reasons
    )
    first = "".join(
        f'<p><code>{_text(row.where)}</code><br>{_text(row.what)}<br><span class="faint">Do: {_text(row.do)}</span></p>'
        for row in report.first_bad_rows
    )
    return f'<div class="scroll"><table>{reasons}</table></div>{first}'


def _rows(report: DataReport) -> str:
    lines = (f'<tr><th>{_text(n)}</th><td class="name">{_text(value)}</td></tr>' for n, value in say_rows(report))
    return f'<div class="scroll"><table class="facts">{"".join(lines)}</table></div>'


def _files(report: DataReport) -> str:
    head = (
        '<tr><th>file</th><th>format</th><th class="number">rows</th><th class="number">size</th><th>sha256</th></tr>'
    )
    lines = "".join(
        f'<tr><td class="name">{_text(file.name)}</td><td>{_text(file.format)}</td>'
        f'<td class="number">{file.rows:,}</td><td class="number">{say_bytes(file.bytes)}</td>'
        f"<td><code>{file.sha256[:12]}</code></td></tr>"
        for file in report.files
    )
    return f'<div class="scroll"><table>{head}{lines}</table></div>'
