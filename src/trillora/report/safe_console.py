"""The console of all output: its text cannot control the terminal; the colors are ours.

Text that takes part in a layout is made visible before that, because escapes change its width.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trillora.report.output import unguarded
from trillora.safe_text import visible


class SafeConsole(Console):
    """`paper`: nothing is shown, but recorded in this number of columns, for `export_text` and `export_html`."""

    def __init__(self, *, stderr: bool = False, paper: int | None = None) -> None:
        stream = io.StringIO() if paper else unguarded(sys.stderr if stderr else sys.stdout)
        is_jupyter = False if paper else None  # None: rich finds out
        super().__init__(
            file=stream,
            highlight=False,
            markup=False,
            emoji=False,
            width=paper,
            record=paper is not None,
            force_jupyter=is_jupyter,
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
