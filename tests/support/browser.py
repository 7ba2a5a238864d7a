"""Headless Chromium, driven over a pipe in its DevTools protocol: open a page, click, type, look.

    with Browser(tmp_path) as browser:
        browser.open("http://127.0.0.1:8000/")
        browser.type("#message", "What is LoRA?")
        browser.press("Enter")
        browser.wait_until("document.querySelectorAll('.answer').length === 2")

Messages are JSON objects that end with a zero byte, on the descriptors 3 and 4 of the browser. So no port is open and
no websocket library is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PATIENCE = 60.0  # seconds
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-dev-shm-usage",
    ),
    "--remote-debugging-pipe",
)
# Moves the two pipes to the descriptors 3 and 4, and becomes the browser.
_START = """
import fcntl, os, sys
reader, writer = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(reader, 3); os.dup2(writer, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab. `console` has its messages and exceptions, `requested` the URLs that it asked for."""

    def __init__(self, folder: Path, *, width: int = 1200, height: int = 900) -> None:
        assert CHROMIUM is not None
        for_browser, self._writer = os.pipe()
        self._reader, by_browser = os.pipe()
        command = [sys.executable, "-S", "-E", "-c", _START, str(for_browser), str(by_browser), CHROMIUM, *SWITCHES]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(for_browser, by_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_browser)
        os.close(by_browser)
        self.console: list[str] = []
        self.requested: list[str] = []
        self.posted: list[str] = []  # bodies
        self.downloads = folder / "downloads"
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)  # the browser exits when its pipe is closed
        os.close(self._reader)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, url: str) -> None:
        """Opens a page. Nothing that an earlier page did is in `console`, `requested` and `posted`."""
        self.call("Page.navigate", url="about:blank")
        self.wait_until("document.readyState === 'complete' && location.href === 'about:blank'")
        for noted in (self.console, self.requested, self.posted):
            noted.clear()
        self.call("Page.navigate", url=url)
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600  # otherwise a window has a minimum width
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def colors(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, expression: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, (expression, self.console, self.evaluate("document.body.innerText"))
            time.sleep(0.02)

    def text(self, selector: str) -> list[str]:
        """The text of every element that matches, also of hidden ones."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which must be visible there."""
        found = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)}), r = element.getBoundingClientRect();
                const at = [r.x + r.width / 2, r.y + r.height / 2];
                return element.contains(document.elementFromPoint(...at)) ? at : null;
            }})()"""
        )
        assert found is not None, f"{selector} is covered or outside the window"
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": found[0], "y": found[1]}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def type(self, selector: str, text: str) -> None:
        """Selects what is in a field and types over it."""
        self.evaluate(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        same = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def downloaded(self, name: str) -> Path:
        """A file that the page has saved, once it is complete."""
        end = time.monotonic() + PATIENCE
        while not (self.downloads / name).exists():
            assert time.monotonic() < end, list(self.downloads.iterdir())
            time.sleep(0.02)
        return self.downloads / name

    def wait_for_frame_text(self, words: str) -> None:
        end = time.monotonic() + PATIENCE
        while words not in (found := self._frame_text()):
            assert time.monotonic() < end, found[:2000]
            time.sleep(0.05)

    def _frame_text(self) -> str:
        """All text in the frames of the page. A frame without scripts has a process of its own."""

        def texts(node: dict[str, Any]) -> Iterator[str]:
            yield node["nodeValue"]
            for inner in node.get("children", ()):
                yield from texts(inner)

        page, found = self._session, []
        for target in self.call("Target.getTargets")["targetInfos"]:
            if target["type"] == "iframe":
                self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
                    "sessionId"
                ]
                found += texts(self.call("DOM.getDocument", depth=-1)["root"])
                self._session = page
        return " ".join(found)

    def screenshot(self, file: Path) -> Path:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return file

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writer, data) :]
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.consoleAPICalled", "params": found}:
                self.console.append(" ".join(str(part.get("value", part)) for part in found["args"]))
            case {"method": "Runtime.exceptionThrown", "params": found}:
                self.console.append(str(found["exceptionDetails"].get("exception", found)))
            case {"method": "Log.entryAdded", "params": found}:
                self.console.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
            case {"method": "Network.requestWillBeSent", "params": found}:
                self.requested.append(found["request"]["url"])
                self.posted += [found["request"]["postData"]] if "postData" in found["request"] else []

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            part = os.read(self._reader, 1 << 16)
            assert part, "the browser has exited"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
