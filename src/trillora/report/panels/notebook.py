"""A run in a notebook cell: a panel that is updated in place, and below it a few plain lines that stay.

Jupyter and Colab replace an output that has an id when another one with the same id comes, so nothing needs ipywidgets,
and a saved notebook has only the last picture.
"""

from __future__ import annotations

import importlib
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from trillora.events import Progress
from trillora.report.adapter_text import Adapters, Shown
from trillora.report.panels.run import RunPanel
from trillora.report.plain_lines import NOTEBOOK, PlainLines
from trillora.report.safe_console import SafeConsole

REDRAW_SECONDS = 1.0  # every picture is a message to the browser
WIDTH = 100  # columns
PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class NotebookPanel:
    """Shows events in the cell that runs now."""

    def __init__(self, file: IO[str], adapters: Adapters, every_steps: int | None = None) -> None:
        self._lines = PlainLines(file, NOTEBOOK, adapters, every_steps)
        self._panel = RunPanel(adapters)
        self._id = uuid.uuid4().hex
        self._drawn = -math.inf
        self._is_there = False

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            with self._lines.open():
                yield
        finally:
            self._panel.works.clear()
            if self._is_there:
                self._draw()  # the panel of a run stays as its summary, and bars of other work disappear

    def show(self, event: Shown) -> None:
        self._panel.follow(event)
        is_end = isinstance(event, Progress) and event.done >= event.total  # the next work may send no events
        has_picture = self._is_there or self._panel.step is not None or self._panel.works
        if has_picture and (is_end or time.monotonic() - self._drawn >= REDRAW_SECONDS):
            self._draw()
        if not isinstance(event, Progress):
            self._lines.show(event)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        paper = SafeConsole(paper=WIDTH)
        paper.print(self._panel.picture(WIDTH))
        text = paper.export_text(clear=False)
        page = paper.export_html(inline_styles=True, code_format=PAGE) if text.strip() else ""
        display = importlib.import_module("IPython.display").display
        display({"text/plain": text, "text/html": page}, raw=True, display_id=self._id, update=self._is_there)
        self._is_there = True
