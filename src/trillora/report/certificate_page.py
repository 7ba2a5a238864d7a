"""A certificate as one HTML file: no scripts, no requests, light or dark like the reader's system."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from trillora.certify.certificate import PAGE, Certificate, Check, Layer
from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.report.certificate_table import summary
from trillora.report.html import Tile, render
from trillora.report.numbers import format_count, format_number

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


@dataclass(frozen=True)
class Verdict:
    kind: str  # refused, warned, or nothing: a class of the style sheet
    what: str
    more: tuple[str, ...]


@dataclass(frozen=True)
class Bar:
    """The change of a layer. `size` is a share of its base weight, or a norm where that is not known."""

    name: str
    size: float
    share: float  # of the largest change
    is_suspicious: bool


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
    parts = itertools.groupby(sorted(certificate.checks, key=_order), key=lambda check: check.part)
    return render(
        "certificate.html",
        title=f"Certificate of {Path(certificate.target).name or certificate.target}",
        subtitle=" · ".join((certificate.kind, certificate.base or "base not known", certificate.created)),
        certificate=certificate,
        verdict=_verdict(certificate),
        figures=_figures(certificate),
        parts=[(TITLES.get(part, part), list(checks)) for part, checks in parts],
        marks=MARKS,
        figure=_figure,
        bars=_bars(certificate.layers),
        unit="share of the base weight's norm" if any(layer.base for layer in certificate.layers[:1]) else "norm",
        facts_of=_facts(certificate),
        files=list(certificate.files.items())[:MAX_FILES],
    )


def _order(check: Check) -> int:
    return list(TITLES).index(check.part) if check.part in TITLES else len(TITLES)


def _verdict(certificate: Certificate) -> Verdict:
    counts = {status: certificate.count(status) for status in ("ok", "warning", "failed", "skipped")}
    if certificate.failed:
        first = certificate.failed[0]
        do = (f"Do: {first.do}",) if first.do else ()
        failed = f"Failed: {counts['failed']} of {len(certificate.checks)} checks."
        return Verdict("refused", failed, (first.what, *do))
    warned = format_count(counts["warning"], "warning", "warnings")
    notes = f"{warned}, {counts['skipped']} not checked. Trained weights: {certificate.trained}."
    kind = "warned" if counts["warning"] or certificate.result == "partial" else ""
    word = "Passed in part" if certificate.result == "partial" else "Passed"
    return Verdict(kind, f"{word}: {counts['ok']} checks.", (notes, summary(certificate)))


def _figures(certificate: Certificate) -> list[Tile]:
    num_failed = certificate.count("failed")
    found = [
        Tile("checks passed", str(certificate.count("ok"))),
        Tile("failed", str(num_failed), is_alarm=num_failed > 0),
        Tile("warnings", str(certificate.count("warning"))),
    ]
    reader = [check for check in certificate.checks if check.part == "reader" and check.figure is not None]
    if reader:
        found.append(Tile(f"difference in {reader[0].name}", format_number(reader[0].figure)))
    share = next((check.figure for check in certificate.checks if check.name == "share of the change"), None)
    if share is not None:
        found.append(Tile("of the change arrived", format_number(share), is_alarm=not 0.9 <= share <= 1.1))
    return [*found, Tile("to check", f"{certificate.seconds:.0f} s")]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else format_number(value)


def _bars(layers: tuple[Layer, ...]) -> list[Bar]:
    """The layers with the largest changes, in the order of the model."""
    sizes = [layer.change / layer.base if layer.base else layer.change for layer in layers]
    most = max(sizes, default=0.0) or 1.0
    shown = sorted(range(len(layers)), key=lambda i: -sizes[i])[:MAX_LAYERS]
    return [
        Bar(
            layers[i].name,
            sizes[i],
            share=sizes[i] / most if math.isfinite(sizes[i]) else 0.0,
            is_suspicious=sizes[i] == 0 or sizes[i] > 1,
        )
        for i in sorted(shown)
    ]


def _facts(certificate: Certificate) -> list[tuple[str, str]]:
    return [
        ("base", certificate.base or "not known"),
        ("base digest", certificate.base_digest or "not known"),
        ("trained weights", certificate.trained),
        ("their digest", certificate.trained_digest or "not known"),
        ("versions", ", ".join(f"{name} {version}" for name, version in certificate.versions.items())),
    ]
