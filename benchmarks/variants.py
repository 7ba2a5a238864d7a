"""Speed of every adapter variant relative to plain LoRA, in whole runs.

    python benchmarks/variants.py --steps 40 [--backend gpu] [--json FILE] [train.batch_size=8 …]

Each variant is a run of `trillora train` with the embedded model on the data of the quickstart, with the same batches.
Step times are the median of the second half. Prints a table with the ratio to plain LoRA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from record import MODEL_CODE, add_record_option, by_name, record_if

SOURCES = ("benchmarks/variants.py", *MODEL_CODE)
DATA = Path(__file__).resolve().parents[1] / "src" / "trillora" / "quickstart" / "data"
VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "dropout 0.05": {"lora": {"dropout": 0.05}},
    "rsLoRA": {"lora": {"rslora": True}},
    "rank pattern (attention 32)": {"lora": {"rank_pattern": {"re:.*_attn.*": 32}}},
    "DoRA": {"lora": {"dora": True}},
    "PiSSA": {"lora": {"init": "pissa_niter_16"}},
    "LoRA+ (16)": {"lora": {"loraplus_ratio": 16}},
    "embedding as a target": {"lora": {"targets": ["embed_tokens", "re:.*_proj"]}},
    "norms as whole modules": {"lora": {"modules_to_save": ["norm"]}},
    "two new tokens": {"tokens": ["<finding>", "</finding>"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--only", nargs="*", help="names of variants (default: all)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    add_record_option(parser)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in train.batch_size=8")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, sections in VARIANTS.items():
        if not args.only or name in args.only:
            rows.append(measure(name, sections, args))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    plain = rows[0]["step_ms"]
    print("| variant | step ms | relative to LoRA | last loss |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['variant']} | {row['step_ms']:.1f} | {row['step_ms'] / plain:.2f} | {row['loss']:.3f} |")
    shown = [{**row, "relative": row["step_ms"] / plain} for row in rows]
    record_if(args.record, "variants", by_name(shown, "variant"), SOURCES)


def measure(name: str, sections: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    recipe: dict[str, Any] = {
        "model": "smollm2",
        "data": str(DATA / "train.jsonl"),
        "train": {"sequence_length": 512, "batch_size": 8, "steps": args.steps, "learning_rate": 1e-3},
        "hardware": {"backend": args.backend, "devices": 1},
        **sections,
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        train(load_recipe(recipe, args.overrides), Path(work) / "run")
        lines = [json.loads(line) for line in (Path(work) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    between = [later["seconds"] - earlier["seconds"] for earlier, later in itertools.pairwise(steps)]
    return {
        "variant": name,
        "step_ms": 1e3 * statistics.median(between[len(between) // 2 :]),
        "loss": float(steps[-1]["loss"]),
        "seconds": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    main()
