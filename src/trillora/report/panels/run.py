"""The latest values of a run, and bars of other work, as one picture that is drawn again and again.

╭─ train ──────────────────────────────────────────╮
│ step 137/300 ━━━━━━━━━━━━━━╸━━━━━━━  46%  left 5 min │
│ loss 1.2500 █▇▅▄▃▂▁   evaluation 1.9000            │
╰──────────────────────────────────────────────────╯
Loading weights ━━━━━━━━━━━━━━━ 269 MB of 538 MB
"""

from __future__ import annotations

import math
from collections import deque

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trillora.events import Evaluated, Progress, Saved, Step
from trillora.report.adapter_text import Adapters, EvaluatedTogether, Shown
from trillora.report.event_text import amount_of, at
from trillora.report.numbers import format_duration
from trillora.safe_text import visible_line

NUM_LOSSES = 32  # in the small loss curve of a wide panel
MAX_PANEL, MAX_BAR = 120, 80  # columns; wider ones are harder to read
BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", "._-=*^"  # of the curve, from low to high


class RunPanel:
    """What is worth seeing at any time. `has_blocks`: the place where it is shown has block characters."""

    def __init__(self, adapters: Adapters, *, has_blocks: bool = True) -> None:
        self.step: Step | None = None  # the latest one
        self.works: dict[str, Progress] = {}  # by label, unfinished
        self._adapters = adapters
        self._has_blocks = has_blocks
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._num_skipped = 0
        self._evaluated: Evaluated | None = None
        self._best: Evaluated | None = None
        self._together: EvaluatedTogether | None = None
        self._saved: Saved | None = None

    @property
    def adapters_text(self) -> str:
        return self._adapters.text if self._adapters else ""

    @property
    def num_skipped(self) -> int:
        return self._num_skipped + self._adapters.num_skipped

    def follow(self, event: Shown) -> None:
        """Takes the values of an event."""
        match event:
            case Progress():
                if event.done >= event.total:
                    self.works.pop(event.label, None)
                else:
                    self.works[event.label] = event
            case Step():
                self.step = event
                self._num_skipped += event.skipped and not self._adapters
                self._losses.append(event.loss)
            case Evaluated():
                self._evaluated = event
                self._best = event if event.is_best or self._best is None else self._best
            case EvaluatedTogether():
                self._together = event
            case Saved():
                self._saved = event

    def picture(self, width: int) -> RenderableType:
        """In at most `width` columns."""
        parts: list[RenderableType] = []
        width = min(width, MAX_PANEL)
        if self.step is not None:
            inside = self._run(self.step, width - 4)
            name = self.adapters_text or visible_line(self.step.stage) or "training"
            parts.append(Panel(inside, title=Text(name), title_align="left", border_style="dim", width=width))
        for work in self.works.values():
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
        if self.num_skipped:
            rest.append(Text(f"skipped {self.num_skipped}", "bold yellow"))
        if self._saved is not None:
            rest.append(Text(f"saved step {self._saved.step}"))
        return Group(bar, *rows_of(loss, width), *rows_of(rest, width))

    def _curve(self, length: int) -> str:
        letters = BLOCKS if self._has_blocks else LETTERS
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


def rows_of(items: list[Text], width: int) -> list[Text]:
    """Puts as many items as fit into each row, without breaking an item."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 3 + item.cell_len <= width:
            rows[-1].append("   ").append_text(item)
        else:
            item.no_wrap, item.overflow = True, "ellipsis"
            rows.append(item)
    return rows
