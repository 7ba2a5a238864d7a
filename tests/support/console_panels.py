"""What the console shows, as text."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from trillora.events import (
    Event,
    Step,
)
from trillora.report.console import console_listener


def step(number: int, num_steps: int = 100, **fields: Any) -> Step:
    fields = {"loss": 2.5, "grad_norm": 1.0, "skipped": False, "memory_gib": 13.27, "peak_fraction": 0.413} | fields
    fields = {"stage": "chat", "tokens_per_second": 1234.0, "seconds_left": (num_steps - number) * 2.0} | fields
    fields = {"learning_rate": 2e-4, "seconds": number * 2.0, "padding": 0.034} | fields
    return Step(number, num_steps, **fields)


def logged(events: list[Event], every_steps: int | None = None) -> list[str]:
    out = io.StringIO()
    with console_listener(Console(file=out), every_steps) as listener:
        for event in events:
            listener(event)
    return out.getvalue().splitlines()


def terminal(out: io.StringIO, width: int = 80, **options: Any) -> Console:
    environment = {"TERM": "xterm-256color"}
    return Console(file=out, force_terminal=True, width=width, height=40, _environ=environment, **options)


def in_terminal(events: list[Event], width: int = 80) -> str:
    """All that was written, without the control sequences."""
    out = io.StringIO()
    with console_listener(terminal(out, width)) as listener:
        for event in events:
            listener(event)
    return without_codes(out.getvalue())


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def last_panel(written: str) -> list[str]:
    return written[written.rindex("╭") : written.rindex("╯") + 1].splitlines()
