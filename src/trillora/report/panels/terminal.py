"""A run in a terminal: lines worth keeping scroll by, a panel with the latest values stays at the bottom."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from trillora.events import Alarm, Chosen, Evaluated, Note, Progress, Sampled, Saved, Scored, Skipped, Step
from trillora.report.adapter_text import (
    FAINT,
    GAP,
    Adapters,
    EndedTogether,
    EvaluatedTogether,
    Shown,
    evaluated_items,
    evaluated_rest,
    evaluated_title,
    same_loss,
    scores_table,
    scores_title,
)
from trillora.report.event_text import (
    at,
    evaluation_line,
    in_one_line,
    num_skipped_text,
    sample_lines,
    step_figures,
)
from trillora.report.output import guarded_output
from trillora.report.panels.run import MAX_PANEL, RunPanel, rows_of
from trillora.safe_text import visible

KEPT_STEPS = 20  # step lines that stay
REDRAW_SECONDS = 0.25
ANSWER_LINES = 2


class LivePanel:
    """Lines worth keeping scroll by; a panel with the run, and bars of other work, stay below them."""

    def __init__(self, console: Console, adapters: Adapters) -> None:
        self._console = console
        self._panel = RunPanel(adapters, has_blocks=console.encoding.lower().startswith("utf"))
        self._drawn = -math.inf
        self._stage: str | None = None
        self._live = Live(
            console=console,
            auto_refresh=False,  # draw only when something changed
            get_renderable=lambda: self._panel.picture(console.width),
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a piped stdout is data for a program
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            with self._live, guarded_output():  # the guard is above rich's own replacement, which reads colors
                try:
                    yield
                finally:
                    self._panel.works.clear()
                    self._live.transient = self._panel.step is None  # keep the panel of a run as its summary
        finally:
            self._live.transient = True

    def show(self, event: Shown) -> None:
        self._panel.follow(event)
        match event:
            case Note(text):
                self._print(Text(visible(text)))
            case Alarm(text=text) | Skipped(text=text):
                self._print(Text(visible(f"alarm: {text}"), "bold red"))
            case Chosen(path, value, reason):
                bold = (visible(str(value)), "bold")
                self._print(Text.assemble(f"{visible(path)} = ", bold, (f"  ({visible(reason)})", "dim")))
            case Progress():
                self._draw(now=event.done >= event.total)  # the next work may be long and send no events
            case Step():
                self._show_step(event)
            case Evaluated():
                self._print(Text(evaluation_line(event), "cyan"))
            case EvaluatedTogether():
                self._show_together(event)
            case EndedTogether():
                style = "bold red" if event.is_alarm else "" if event.ended.status == "finished" else "yellow"
                self._print(Text(visible(f"{'alarm: ' if event.is_alarm else ''}{event.text}"), style))
            case Scored(scores=scores) if scores:
                self._show_scores(event)
            case Sampled():
                self._show_samples(event)
            case Saved():
                self._draw()

    def _show_step(self, step: Step) -> None:
        if step.stage != self._stage and self._stage is not None:
            self._print(Text(visible(f"stage {step.stage} starts"), "bold"))
        self._stage = step.stage
        if step.step % max(1, step.num_steps // KEPT_STEPS) == 0 or step.step in (1, step.num_steps):
            skipped = num_skipped_text(self._panel.num_skipped)
            words = f"{step_figures(step, self._panel.adapters_text)}{skipped}"
            self._print(Text(words, no_wrap=True, overflow="ellipsis"))
        else:
            self._draw()

    def _show_together(self, together: EvaluatedTogether) -> None:
        if same := same_loss(together):
            self._print(Text(f"{evaluated_title(together)}  {same}", "cyan"))
            return
        items = evaluated_items(together)
        longest = max(cell_len(name) for name, _, _ in items)
        texts = [
            Text(f"{name}{' ' * (longest - cell_len(name))}  {loss:>7}", "cyan" if is_better else FAINT)
            for name, loss, is_better in items
        ]
        rest = evaluated_rest(together)
        rows = rows_of([*texts, *([Text(rest, FAINT)] if rest else [])], min(self._console.width, MAX_PANEL) - 2)
        text = Text(f"{evaluated_title(together)}  loss", "bold cyan")
        for row in rows:
            text.append("\n  ").append_text(row)
        self._print(text)

    def _show_scores(self, scored: Scored) -> None:
        self._print(Text(scores_title(scored), "bold"))
        for line in scores_table(scored, self._console.width - 2):
            text = Text("  ")
            for cell, style in line:
                text.append(cell, style).append(GAP)
            text.truncate(self._console.width, overflow="ellipsis")
            self._print(text)

    def _show_samples(self, sampled: Sampled) -> None:
        width = max(self._console.width - 4, 20)
        text = Text.assemble((f"samples {at(sampled.step)}", "bold"))
        for mark, line, style in sample_lines(sampled, lambda text: in_one_line(text, width * ANSWER_LINES)):
            parts = Text(line, style).wrap(self._console, width)
            for number, part in enumerate(parts[:ANSWER_LINES], 1):
                if number == ANSWER_LINES < len(parts):
                    part.append(" …")
                    part.truncate(width, overflow="ellipsis")
                text.append(f"\n  {mark if number == 1 else ' '} ", "dim")
                text.append_text(part)
        self._print(text)

    def _print(self, text: Text) -> None:
        self._live.refresh()  # printing redraws the panel as it was last refreshed
        self._console.print(text)
        self._drawn = time.monotonic()

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._live.refresh()
