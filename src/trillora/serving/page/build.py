"""The web page of `trillora serve --page` as one HTML file: chat with two models side by side, and the run's report.

    chat_page("my-run", needs_key=False, has_report=True).html  ->  "<!DOCTYPE html> ... <script>..."

The browser runs only the script in `page.js`: the security policy has its hash. The page sends requests only to the
server that it came from. Text of models reaches the page as text, never as HTML: the browser enforces this too, through
`require-trusted-types-for`. The report is shown in a frame without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from trillora.report.html import base_style, text


@dataclass(frozen=True)
class Page:
    """A page, and the headers of its response."""

    html: str
    headers: dict[str, str]


def chat_page(title: str, *, needs_key: bool, has_report: bool) -> Page:
    """The whole page. It asks for the key if the server needs one, and keeps it in memory only."""
    script = _file("page.js")
    policy = _policy(script)
    parts = {
        "policy": policy,
        "title": text(title),
        "style": base_style() + _file("page.css"),
        "needs-key": str(needs_key).lower(),
        "has-report": str(has_report).lower(),
        "script": script,
    }
    html, *pieces = _file("page.html").split("{{")
    for piece in pieces:  # one pass: a title that looks like a placeholder stays a title
        name, _, rest = piece.partition("}}")
        html += parts[name] + rest
    return Page(html, _headers(policy))


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest}'",
            "style-src 'unsafe-inline'",  # the report has inline styles, and its frame inherits this policy
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types report",
        )
    )


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",  # this part has no effect inside a page
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _file(name: str) -> str:
    return files("trillora.serving.page").joinpath(name).read_text("utf-8")
