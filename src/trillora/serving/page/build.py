"""The web page of `trillora serve --page` as one HTML file: chat with two models side by side, and the run's report.

    chat_page("my-run", needs_key=False, has_report=True)  ->  "<!DOCTYPE html> ... <script>..."

The browser runs only the script in `page.js`: the security policy has its hash. The page sends requests only to the
server that it came from. Text of models reaches the page as text, never as HTML: the browser enforces this too, through
`require-trusted-types-for`. The report is shown in a frame without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from trillora.report.html import STYLE, text

_NAME = "trillora.serving.page"


@cache
def _file(name: str) -> str:
    return files(_NAME).joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Inline styles are allowed because the report in its frame has some and inherits the policy.
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash(_file('page.js'))}",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types report",
    )
)

# For the response. `frame-ancestors` has no effect in the page's own meta element.
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def chat_page(title: str, *, needs_key: bool, has_report: bool) -> str:
    """The whole page. It asks for the key if the server needs one, and keeps it in memory only."""
    parts = {
        "policy": POLICY,
        "title": text(title),
        "style": STYLE + _file("page.css"),
        "needs-key": str(needs_key).lower(),
        "has-report": str(has_report).lower(),
        "script": _file("page.js"),
    }
    page, *pieces = _file("page.html").split("{{")
    for piece in pieces:  # one pass: a title that looks like a placeholder stays a title
        name, _, rest = piece.partition("}}")
        page += parts[name] + rest
    return page
