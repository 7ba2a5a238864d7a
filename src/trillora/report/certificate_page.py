"""A certificate as one HTML file: no scripts, no requests, light or dark like the reader's system."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from trillora.certify.certificate import PAGE, Certificate, Check, Layer, PromptLogits
from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.report.certificate_table import summary
from trillora.report.html import card, document, text, tiles
from trillora.report.numbers import format_bytes, format_count, format_number

TITLES = {
    "files": "Files",
    "trained": "What was trained",
    "contents": "Configuration and other files",
    "reader": "Read by other programs",
    "servers": "Rules of servers",
    "tokenizer": "Tokenizer and chat template",
    "masks": "Trained spans of sample rows",
    "norms": "Norms of the adapter",
    "scores": "Base against adapter",
}
MARKS = {"ok": "passed", "warning": "warning", "failed": "failed", "skipped": "not checked"}
MAX_LAYERS, MAX_FILES = 400, 60

STYLE = """
h1 { overflow-wrap: anywhere; line-height: 1.25; }
.checks td { border-top: 1px solid var(--line); padding-top: .45rem; padding-bottom: .45rem; }
.checks td:first-child { width: 12rem; } .checks td:nth-child(2) { width: 7rem; } .checks td.number { width: 8rem; }
.checks tr:first-child td { border-top: 0; }
.mark { display: inline-block; min-width: 5.6rem; font-size: .82rem; font-weight: 600; border-radius: 6px;
  padding: .05rem .5rem; text-align: center; border: 1px solid; white-space: nowrap; }
.mark.ok { color: var(--trained); } .mark.failed { color: var(--bad); } .mark.warning { color: var(--edge); }
.mark.skipped { color: var(--faint); }
.do { color: var(--faint); display: block; }
.verdict.warned { border-left-color: var(--edge); }
.bars { display: grid; grid-template-columns: minmax(9rem, 22rem) max-content 1fr; gap: .15rem .75rem;
  align-items: center; font-variant-numeric: tabular-nums; font-size: .88rem; }
.bars span { overflow-wrap: anywhere; } .bars div { height: .7rem; border-radius: 0 3px 3px 0; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--faint); }
footer { margin-top: 1.5rem; font-size: .85rem; }
@media (max-width: 40rem) { .checks td:first-child { width: 7rem; } .mark { min-width: 0; }
  .bars { grid-template-columns: minmax(6rem, 12rem) max-content 1fr; } }
"""


def write_certificate_page(certificate: Certificate, folder: Path) -> Path:
    """Writes certificate.html atomically and returns its path."""
    try:
        write_file(folder / PAGE, certificate_page(certificate))
    except OSError as error:
        raise TrilloraError(
            f"The certificate's page cannot be written: {error.strerror}.",
            where=str(folder / PAGE),
            do="free disk space, or make the folder writable",
        ) from None
    return folder / PAGE


def certificate_page(certificate: Certificate) -> str:
    title = f"Certificate of {Path(certificate.target).name or certificate.target}"
    facts = " · ".join((certificate.kind, certificate.base or "base not known", certificate.created))
    parts = itertools.groupby(sorted(certificate.checks, key=_order), key=lambda check: check.part)
    body = "\n".join(
        (
            f'<h1>{text(title)}</h1>\n<div class="faint">{text(facts)}</div>',
            _verdict(certificate),
            tiles(_tiles(certificate)),
            *(card(TITLES.get(part, part), _checks(list(checks))) for part, checks in parts),
            card("Change of every layer", _layers(certificate.layers)),
            card("Next tokens after the fixed prompts", _logits(certificate.logits)),
            card("Files and versions", _facts(certificate)),
            '<footer class="faint">Repeat it with <code>trillora verify</code>. A certificate is no signature: compare '
            "it with the run, or with a copy from somewhere else.</footer>",
        )
    )
    return document(title, body, STYLE)


def _order(check: Check) -> int:
    return list(TITLES).index(check.part) if check.part in TITLES else len(TITLES)


def _verdict(certificate: Certificate) -> str:
    counts = {status: certificate.count(status) for status in ("ok", "warning", "failed", "skipped")}
    if certificate.failed:
        first = certificate.failed[0]
        do = f"<p>Do: {text(first.do)}</p>" if first.do else ""
        return (
            f'<div class="verdict refused">Failed: {counts["failed"]} of {len(certificate.checks)} checks.'
            f"<p>{text(first.what)}</p>{do}</div>"
        )
    warned = format_count(counts["warning"], "warning", "warnings")
    notes = f"{warned}, {counts['skipped']} not checked. Trained weights: {certificate.trained}."
    kind = "verdict warned" if counts["warning"] or certificate.result == "partial" else "verdict"
    word = "Passed in part" if certificate.result == "partial" else "Passed"
    proved = f"<p>{text(summary(certificate))}</p>"
    return f'<div class="{kind}">{word}: {counts["ok"]} checks.<p>{text(notes)}</p>{proved}</div>'


def _tiles(certificate: Certificate) -> list[tuple[str, str, bool]]:
    reader = [check for check in certificate.checks if check.part == "reader" and check.figure is not None]
    found = [(str(certificate.count("ok")), "checks passed", False)]
    found.append((str(certificate.count("failed")), "failed", certificate.count("failed") > 0))
    found.append((str(certificate.count("warning")), "warnings", False))
    if reader:
        found.append((format_number(reader[0].figure), f"difference in {text(reader[0].name)}", False))
    share = next((check.figure for check in certificate.checks if check.name == "share of the change"), None)
    if share is not None:
        found.append((format_number(share), "of the change arrived", not 0.9 <= share <= 1.1))
    found.append((f"{certificate.seconds:.0f} s", "to check", False))
    return found


def _checks(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        do = f'<span class="do">Do: {text(check.do)}</span>' if check.do else ""
        limit = f'<br><span class="faint">limit {_figure(check.limit)}</span>' if check.limit else ""
        figure = "" if check.figure is None else f"{_figure(check.figure)}{limit}"
        mark = f'<span class="mark {check.status}">{MARKS[check.status]}</span>'
        lines.append(
            f'<tr><td>{text(check.name)}</td><td>{mark}</td><td class="name">{text(check.what)}{do}</td>'
            f'<td class="number">{figure}</td></tr>'
        )
    return f'<div class="scroll"><table class="checks">{"".join(lines)}</table></div>'


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else format_number(value)


def _layers(layers: tuple[Layer, ...]) -> str:
    """A bar for each layer: its change as a share of its base weight, or of the largest change."""
    if not layers:
        return ""
    sizes = [layer.change / layer.base if layer.base else layer.change for layer in layers]
    most = max(sizes) or 1.0
    shown = sorted(range(len(layers)), key=lambda i: -sizes[i])[:MAX_LAYERS]
    lines = []
    for i in sorted(shown):
        width = 0.0 if not math.isfinite(sizes[i]) else sizes[i] / most
        kind = "bad-fill" if sizes[i] == 0 or sizes[i] > 1 else "trained-fill"
        lines.append(f"<span>{text(layers[i].name)}</span><span>{format_number(sizes[i])}</span>")
        lines.append(f'<div class="{kind}" style="width:{width:.2%}"></div>')
    unit = "share of the base weight's norm" if layers[0].base else "norm"
    head = f'<div class="faint">{len(layers):,} layers; {unit} of scale · B A</div>'
    bars = f'<div class="bars">{"".join(lines)}</div>'
    return head + (bars if len(shown) <= 24 else f"<details><summary>Show all</summary>{bars}</details>")


def _logits(logits: tuple[PromptLogits, ...]) -> str:
    if not logits:
        return ""
    head = '<tr><th>prompt</th><th class="number">tokens</th><th class="number">most likely token</th>'
    head += '<th class="number">trained</th><th class="number">base</th></tr>'
    lines = "".join(
        f'<tr><td>{number}</td><td class="number">{len(each.tokens)}</td><td class="number">{each.ids[0]}</td>'
        f'<td class="number">{each.trained[0]:.4f}</td><td class="number">{each.base[0]:.4f}</td></tr>'
        for number, each in enumerate(logits, 1)
    )
    note = (
        '<p class="faint">Log-probabilities by our engine in float32 on the CPU. The file has 100 for each prompt.</p>'
    )
    return f'<div class="scroll"><table>{head}{lines}</table></div>{note}'


def _facts(certificate: Certificate) -> str:
    lines = [("base", certificate.base or "not known"), ("base digest", certificate.base_digest or "not known")]
    lines += [("trained weights", certificate.trained), ("their digest", certificate.trained_digest or "not known")]
    lines += [("versions", ", ".join(f"{name} {version}" for name, version in certificate.versions.items()))]
    rows = "".join(f'<tr><th>{text(name)}</th><td class="name">{text(value)}</td></tr>' for name, value in lines)
    files = "".join(
        f'<tr><td class="name">{text(name)}</td><td class="number">{format_bytes(file.size)}</td>'
        f"<td><code>{file.sha256[:16]}</code></td></tr>"
        for name, file in list(certificate.files.items())[:MAX_FILES]
    )
    listed = f'<table><tr><th>file</th><th class="number">size</th><th>sha256</th></tr>{files}</table>'
    return f'<div class="scroll"><table class="facts">{rows}</table>{listed}</div>'
