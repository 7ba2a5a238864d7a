"""HTML pages in tests: parsed, with hostile text, and opened in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
HOSTILE = (
    '</style></title></pre><script>console.log("OWNED")</script>'
    '<img src=http://127.0.0.1:9/ onerror=console.log("OWNED")>\n'
    """"><svg onload='console.log("OWNED")'>' onmouseover='x <!-- ]]> &lt;b&gt; """
    "\u202e\x1b[31m\x00 {{7*7}} javascript:alert(1)"
)


class Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(f"{tag}.{name}" for name, _ in attrs)}
        if tag not in ("meta", "path", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(f"{tag}.{name}" for name, _ in attrs)}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def browse(page: Path, folder: Path, *options: str, width: int = 1200) -> tuple[list[str], list[str], str]:
    """Console lines, requested URLs, and standard output."""
    log = folder / "net.json"
    switches = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
        *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"),
        *(f"--window-size={width},1600", "--virtual-time-budget=2000", *options),
    ]
    command = [str(CHROMIUM), *switches, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    # The browser makes requests of its own. Requests of the page have an origin.
    requested = re.findall(r'"initiator":"(?!not an origin)[^"]*".*?"url":"([^"]+)"', log.read_text("utf-8", "replace"))
    return console, requested, result.stdout


def first_pixel(image: Path) -> tuple[int, ...]:
    """The corner pixel of a PNG: no filter changes the first bytes of the first line."""
    data, place, packed = image.read_bytes(), 8, b""
    while place < len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        packed += data[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += 12 + length
    return tuple(zlib.decompress(packed)[1:4])
