"""Checks common advice for TPUs against preflight, on recipes/gemma-3-270m-chat.yaml: a table of step times.

    python tools/seed_advice.py                    # Colab's chip, v5e-1, by the TPU compiler where it exists
    python tools/seed_advice.py --on v6e-1 --json advice.json

The advice: batches in multiples of 128, bfloat16, and a log line every 50 steps only. Each row changes one option of
the recipe. Tokens per second count every position of a batch, so rows with different batches compare. The cost of
logging is measured on this machine: the time of the host for the events of a step. The chip does not wait for it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from trillora.events import Step
from trillora.preflight.result import PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe.load import load_recipe
from trillora.report.console import console_listener
from trillora.tracking import tracking_listener

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from record import MODEL_CODE, add_record_option, by_name, record_if

SOURCES = ("tools/seed_advice.py", "recipes/gemma-3-270m-chat.yaml", "src/trillora/preflight", *MODEL_CODE)
RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "gemma-3-270m-chat.yaml"
# What is changed, and the values. The recipe's own are 128 sequences, 512 tokens and bfloat16.
CASES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("train.batch_size", (100, 127, 128, 256)),
    ("train.sequence_length", (500, 512, 600, 640)),
    ("model.dtype", ("bfloat16", "float32")),
)
NUM_EVENTS = 2000  # steps whose logging is timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="colab", metavar="SLICE", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    add_record_option(parser)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # shapes and sample come with Trillora
    rows = []
    print("| option | verdict | micro-batch, remat | memory | step | tokens/s |\n|---|---|---|---|---|---|")
    for option, values in CASES:
        for value in values:
            started = time.monotonic()
            recipe = load_recipe(RECIPE, {option: value})
            (result,) = preflight(recipe, [args.on])
            row = row_of(f"{option}={value}", result, recipe.train.batch_size * recipe.train.sequence_length)
            rows.append(row)
            print(line_of(row), flush=True)
            print(f"{row['option']}: {time.monotonic() - started:.0f} s, {result.method}", file=sys.stderr, flush=True)
    every, sparse = (1e6 * logging_seconds(steps) for steps in (1, 50))
    print(f"\nLogging: {every:.0f} µs of the host per step with every step, {sparse:.0f} µs with every 50th.")
    if args.json:
        logging = {"every step": every, "every 50th": sparse}
        args.json.write_text(json.dumps({"rows": rows, "logging_microseconds": logging}, indent=1) + "\n", "utf-8")
    timed = [{**row, "step_ms": 1000 * row["seconds"]} for row in rows if "seconds" in row]
    methods = {row["method"] for row in timed}
    on = "TPU compiler" if methods == {"compiler"} else "estimate"
    record_if(args.record, "seed-advice", by_name(timed, "option"), SOURCES, on=on)
    return 0


def row_of(option: str, result: PreflightResult, num_positions: int) -> dict[str, Any]:
    row: dict[str, Any] = {"option": option, "method": result.method, "verdict": result.verdict}
    row |= {"memory_gib": result.hbm_peak_gib, "slice": result.slice}
    if result.step and result.settings:
        row |= {"micro_batch_size": result.settings.micro_batch_size, "remat": result.settings.remat}
        row |= {"seconds": result.step.seconds, "tokens_per_second": num_positions / result.step.seconds}
    return row


def line_of(row: dict[str, Any]) -> str:
    memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:.1f} GiB"
    cells = [f"`{row['option']}`", row["verdict"], "", memory, "", ""]
    if "seconds" in row:
        cells[2] = f"{row['micro_batch_size']}, {row['remat']}"
        cells[4:] = f"{1000 * row['seconds']:.0f} ms", f"{row['tokens_per_second']:,.0f}"
    return f"| {' | '.join(cells)} |"


def logging_seconds(every_steps: int) -> float:
    """Of the host per step: a line of a log, and TensorBoard's files."""
    console = Console(file=io.StringIO())
    with (
        tempfile.TemporaryDirectory() as folder,
        console_listener(console, every_steps) as shown,
        tracking_listener(Path(folder), 1, (), "advice", {}, shown, every_steps) as listen,
    ):
        started = time.perf_counter()
        for step in range(1, NUM_EVENTS + 1):
            listen(Step(step, NUM_EVENTS, "train", 1.0, 1e-4, 0.5, False, 1e5, float(step), 1.0, 0.1))
        return (time.perf_counter() - started) / NUM_EVENTS


if __name__ == "__main__":
    sys.exit(main())
