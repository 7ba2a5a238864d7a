"""Pieces that all HTML pages share: the document, the style sheet, escaped text, cards, and coloured training text.

    document("My run", card("Files", text("a<b.jsonl")))  ->  "<!DOCTYPE html> ... a&lt;b.jsonl ..."

A page is a single file without scripts or requests. It follows the light or dark mode of the reader's system.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from trillora.data.excerpt import ExcerptPiece, Gap
from trillora.safe_text import visible

# The variables are colours. `edge` marks the end of a sequence.
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


def document(title: str, body: str, more_style: str = "") -> str:
    """Returns the whole page. Its security policy makes the browser refuse scripts and requests."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text(title)}</title>
<style>{STYLE}{more_style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def text(words: str) -> str:
    """Escapes untrusted text: HTML is not interpreted, and control characters are visible."""
    return html.escape(visible(words))


def card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{text(title)}</h2>{content}</section>' if content else ""


def tiles(facts: Iterable[tuple[str, str, bool]]) -> str:
    """Large figures from (value, name, is alarming). The values and names are HTML and are not escaped."""
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile{" alarm" if alarm else ""}"><b>{value}</b><span class="faint">{name}</span></div>'
            for value, name, alarm in facts
        )
    )


def coloured(pieces: Iterable[ExcerptPiece | Gap]) -> str:
    """Shows which parts of a training document are trained on, with a legend of the colours."""
    key = '<mark>trained</mark><span class="faint">context</span><span class="special">special token</span>'
    return f'<div class="key">{key}</div><pre>{"".join(_piece(piece) for piece in pieces)}</pre>'


def _piece(piece: ExcerptPiece | Gap) -> str:
    if isinstance(piece, Gap):
        return f'<span class="gap"> [… {piece.characters:,} characters …] </span>'
    words = f'<span class="special">{text(piece.text)}</span>' if piece.special else text(piece.text)
    return f"<mark>{words}</mark>" if piece.trained else f'<span class="context">{words}</span>'
