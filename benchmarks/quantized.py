"""Loss and step time of SmolLM2 on a quantized base, compared with the whole one.

    python benchmarks/quantized.py --steps 200                  # CPU: int8, int4, nf4
    python benchmarks/quantized.py --steps 200 --backend gpu    # and fp8

Trains on findings of the cloud scanner prowler (the data of `trillora quickstart`, Apache-2.0) with the same seed,
batches and learning rate, and measures the loss on 64 held-out findings before and after. Step times are the median
without the first five steps. Prints a table; `--json FILE` also writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "src" / "trillora" / "quickstart" / "data"
WARM_UP = 5  # steps that are not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--formats", nargs="*", help="default: none int8 int4 nf4, on a GPU also fp8")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in train.batch_size=8")
    args = parser.parse_args()
    formats = args.formats or ["none", "int8", "int4", "nf4", *(["fp8"] if args.backend == "gpu" else [])]
    rows: list[dict[str, Any]] = []
    for format in formats:
        rows.append(measure(format, args.steps, args.backend, args.overrides))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(format: str, steps: int, backend: str, overrides: list[str]) -> dict[str, Any]:
    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    recipe = {
        "model": {"name": "smollm2", "quantize": format},
        "data": {"path": str(DATA / "train.jsonl"), "validation": str(DATA / "validation.jsonl")},
        "lora": {"rank": 16, "alpha": 32},
        "train": {"sequence_length": 184, "batch_size": 2, "steps": steps, "learning_rate": 1e-3, "warmup_steps": 5},
        "evaluate": {"every_steps": steps, "num_samples": 0, "max_documents": 64, "keep_best": False},
        "hardware": {"backend": backend, "devices": 1},
    }
    with tempfile.TemporaryDirectory() as work:
        if stopped := train(load_recipe(recipe, overrides), Path(work) / "run").stopped:
            raise SystemExit(f"The run with {format} was stopped by {stopped}.")
        lines = [json.loads(line) for line in (Path(work) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "step"]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    held_out = {line["step"]: line["loss"] for line in lines if line["kind"] == "evaluation"}
    between = [later - earlier for earlier, later in zip(seconds[WARM_UP:], seconds[WARM_UP + 1 :], strict=False)]
    return {
        "format": format,
        "loss_before": held_out[0],
        "loss_after": held_out[steps],
        "training_loss": statistics.mean(losses[-20:]),  # of the last 20 steps
        "step_seconds": statistics.median(between),
        "peak_memory_gib": max(line["memory_gib"] or 0 for line in lines if line["kind"] == "step"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, with ratios to the first row."""
    first = rows[0]
    whole = first["format"]
    lines = [
        f"| base | held-out loss before | after | / {whole} | training loss | step time / {whole} |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['loss_before']:.4f} | {row['loss_after']:.4f} "
            f"| {row['loss_after'] / first['loss_after']:.4f} | {row['training_loss']:.4f} "
            f"| {row['step_seconds'] / first['step_seconds']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
