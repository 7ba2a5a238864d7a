"""A run in a terminal: lines worth keeping scroll by, a panel with the latest values stays at the bottom."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
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
    amount_of,
    at,
    evaluation_line,
    in_one_line,
    num_skipped_text,
    sample_lines,
    step_figures,
)
from trillora.report.numbers import format_duration
from trillora.report.output import guarded_output
from trillora.safe_text import visible, visible_line

KEPT_STEPS = 20  # step lines that stay
REDRAW_SECONDS = 0.25
NUM_LOSSES = 32  # in the small loss curve of a wide panel
ANSWER_LINES = 2
MAX_PANEL, MAX_BAR = 120, 80  # columns; wider ones are harder to read


class LivePanel:
    """Lines worth keeping scroll by; a panel with the run, and bars of other work, stay below them."""

    def __init__(self, console: Console, adapters: Adapters) -> None:
        self._console = console
        self._adapters = adapters
        self._drawn = -math.inf
        self._works: dict[str, Progress] = {}
        self._step: Step | None = None
        self._stage: str | None = None
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._num_skipped = 0
        self._evaluated: Evaluated | None = None
        self._best: Evaluated | None = None
        self._together: EvaluatedTogether | None = None
        self._saved: Saved | None = None
        self._live = Live(
            console=console,
            auto_refresh=False,  # draw only when something changed
            get_renderable=self._picture,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a piped stdout is data for a program
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            with self._live, guarded_output():  # the guard is above rich's own replacement, which reads colors
                try:
                    yield
                finally:
                    self._works.clear()
                    self._live.transient = self._step is None  # keep the panel of a run as its summary
        finally:
            self._live.transient = True

    def show(self, event: Shown) -> None:
        match event:
            case Note(text):
                self._print(Text(visible(text)))
            case Alarm(text=text) | Skipped(text=text):
                self._print(Text(visible(f"alarm: {text}"), "bold red"))
            case Chosen(path, value, reason):
                bold = (visible(str(value)), "bold")
                self._print(Text.assemble(f"{visible(path)} = ", bold, (f"  ({visible(reason)})", "dim")))
            case Progress():
                self._show_progress(event)
            case Step():
                self._show_step(event)
            case Evaluated():
                self._evaluated = event
                self._best = event if event.is_best or self._best is None else self._best
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
                self._saved = event
                self._draw()

    def _show_progress(self, work: Progress) -> None:
        if work.done >= work.total:
            self._works.pop(work.label, None)
            self._draw(now=True)  # the next work may be long and send no events
        else:
            self._works[work.label] = work
            self._draw()

    def _show_step(self, step: Step) -> None:
        if step.stage != self._stage and self._stage is not None:
            self._print(Text(visible(f"stage {step.stage} starts"), "bold"))
        self._stage = step.stage
        self._step = step
        self._num_skipped += step.skipped and not self._adapters
        self._losses.append(step.loss)
        if step.step % max(1, step.num_steps // KEPT_STEPS) == 0 or step.step in (1, step.num_steps):
            words = f"{step_figures(step, self._adapters_text)}{num_skipped_text(self._total_skipped)}"
            self._print(Text(words, no_wrap=True, overflow="ellipsis"))
        else:
            self._draw()

    @property
    def _adapters_text(self) -> str:
        return self._adapters.text if self._adapters else ""

    @property
    def _total_skipped(self) -> int:
        return self._num_skipped + self._adapters.num_skipped

    def _show_together(self, together: EvaluatedTogether) -> None:
        self._together = together
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
        rows = _rows([*texts, *([Text(rest, FAINT)] if rest else [])], min(self._console.width, MAX_PANEL) - 2)
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

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        width = min(self._console.width, MAX_PANEL)
        if self._step is not None:
            inside = self._run(self._step, width - 4)
            name = self._adapters_text or visible_line(self._step.stage) or "training"
            parts.append(Panel(inside, title=Text(name), title_align="left", border_style="dim", width=width))
        for work in self._works.values():
            parts.append(_bar(visible_line(work.label), work.done, work.total, amount_of(work), min(width, MAX_BAR)))
        return Group(*parts)

    def _run(self, step: Step, width: int) -> RenderableType:
        is_over = step.step >= step.num_steps
        duration = f"took {format_duration(step.seconds)}" if is_over else f"left {format_duration(step.seconds_left)}"
        amount = f"{step.step / max(step.num_steps, 1):>4.0%}  {duration}"
        label = f"step {step.step:>{len(str(step.num_steps))}}/{step.num_steps}"
        bar = _bar(label, step.step, step.num_steps, amount, width)
        curve = self._curve(max(8, min(NUM_LOSSES, width - 60)))  # leaves room for the evaluation on its right
        label = "mean loss " if self._adapters else "loss "
        loss = [Text.assemble(label, (f"{step.loss:.4f}", "bold"), " ", (curve, "cyan"))]
        if self._together is not None and (finite := self._together.finite):
            lowest, highest = f"{finite[0].loss:.4f}", f"{finite[-1].loss:.4f}"
            loss.append(Text.assemble("evaluation ", (lowest, "bold"), " to ", (highest, "bold")))
        if self._evaluated is not None and self._best is not None:
            loss.append(Text.assemble("evaluation ", (f"{self._evaluated.loss:.4f}", "bold")))
            loss.append(Text(f"best {self._best.loss:.4f} {at(self._best.step)}"))
        rest = [Text.assemble((f"{step.tokens_per_second:,.0f}", "bold"), " tokens/s")]
        if step.peak_fraction is not None:
            rest.append(Text(f"{step.peak_fraction:.0%} of peak"))
        if step.memory_gib is not None:
            rest.append(Text(f"memory {step.memory_gib:.1f} GiB measured"))
        rest.append(Text(f"padding {step.padding:.0%}"))
        if not self._adapters:
            rest.append(Text(f"lr {step.learning_rate:.2e}"))
        if self._total_skipped:
            rest.append(Text(f"skipped {self._total_skipped}", "bold yellow"))
        if self._saved is not None:
            rest.append(Text(f"saved step {self._saved.step}"))
        return Group(bar, *_rows(loss, width), *_rows(rest, width))

    def _curve(self, length: int) -> str:
        letters = "▁▂▃▄▅▆▇█" if self._console.encoding.lower().startswith("utf") else "._-=*^"
        losses = list(self._losses)[-length:]
        finite = [loss for loss in losses if math.isfinite(loss)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        per_letter = (high - low) / (len(letters) - 1) or 1.0
        return "".join(letters[round((x - low) / per_letter)] if math.isfinite(x) else "!" for x in losses)


def _bar(label: str, done: int, total: int, amount: str, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.width = width
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, min_width=4)
    table.add_column(no_wrap=True)
    table.add_row(Text(label), ProgressBar(max(total, 1), done, finished_style="bar.complete"), Text(amount))
    return table


def _rows(items: list[Text], width: int) -> list[Text]:
    """Puts as many items as fit into each row, without breaking an item."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 3 + item.cell_len <= width:
            rows[-1].append("   ").append_text(item)
        else:
            item.no_wrap, item.overflow = True, "ellipsis"
            rows.append(item)
    return rows
