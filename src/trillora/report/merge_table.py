"""Shows a merge in a terminal: the adapters with their weights and shares, then what was written."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.adapters.merge import MergeResult
from trillora.report.numbers import format_count
from trillora.safe_text import visible


def show(result: MergeResult, console: Console) -> None:
    lines = box.ROUNDED if console.encoding.lower().startswith("utf") else box.ASCII
    table = Table(box=lines)
    table.add_column("adapter", header_style="bold", overflow="fold")
    for name in ("rank", "layers", "weight", "share of the change"):
        table.add_column(name, justify="right", header_style="bold")
    for each in result.inputs:
        figures = (str(each.rank), str(each.num_layers), f"{each.weight:g}", f"{each.share:.1%}")
        table.add_row(Text(visible(each.name)), *figures)
    console.print(table)
    console.print(Text("\n".join(_sentences(result))))


def _sentences(result: MergeResult) -> list[str]:
    layers = format_count(result.num_layers, "layer", "layers")
    sentences = [f"Merged by {result.method}: rank {result.rank}, {layers}."]
    if result.worst_layer is None or result.lost < 1e-9:
        sentences.append("Nothing of the change was cut off.")
    else:
        worst = f"most in {visible(result.worst_layer)}, {result.worst_lost:.1%}"
        sentences.append(f"The cut to rank {result.rank} lost {result.lost:.1%} of the change ({worst}).")
    if result.logits is not None:
        part = result.logits.difference / result.logits.change if result.logits.change else 0.0
        sentences.append(f"Logits differ from the definition by {part:.2g} of what the merge changes in them.")
    else:
        sentences.append(f"Logits were not compared: {visible(result.not_compared or '')}.")
    return [*sentences, f"Adapter written to {visible(str(result.adapter))}"]
