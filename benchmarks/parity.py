"""Compares 100 training steps of SmolLM2: Trillora against PyTorch with PEFT.

    python benchmarks/parity.py --steps 100
    python benchmarks/parity.py --steps 20 engine.kernels=fused engine.layers=unroll  # GPU kernels, interpreted: slow

The same base, initial adapter and batches, float32, AdamW with a constant learning rate, on the CPU. Prints the losses
every ten steps and the largest difference. Fails if the first ten steps differ by more than 1e-4. The test suite runs
the first ten steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src" / "trillora" / "quickstart" / "data" / "train.jsonl"
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("overrides", nargs="*", help="recipe overrides")
    args = parser.parse_args()
    from peft_reference import peft_losses

    from trillora.data.stage import read_data
    from trillora.model.bridge import CausalLM
    from trillora.model.loading.source import find_model, load_config, load_tokenizer
    from trillora.recipe.load import load_recipe
    from trillora.step.build import lora_spec
    from trillora.training.trainer import train

    with tempfile.TemporaryDirectory() as work:
        recipe = load_recipe(
            {
                "model": "smollm2",
                "data": {"path": str(DATA), "pack": False},
                "train": {"sequence_length": 184, "batch_size": 2, "steps": args.steps, "schedule": "constant"},
                "hardware": {"devices": 1},
            },
            args.overrides,
        )
        started = time.perf_counter()
        ours = train(recipe, Path(work) / "run").losses
        our_seconds = time.perf_counter() - started
        folder = find_model("smollm2")
        layout = CausalLM(load_config(folder), lora=lora_spec(recipe.lora)).adapter_layout
        started = time.perf_counter()
        theirs = peft_losses(recipe, folder, read_data(recipe, load_tokenizer(folder)), layout, args.steps)
        their_seconds = time.perf_counter() - started
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(
            f"step {step + 1:4}  ours {ours[step]:.6f}  PyTorch + PEFT {theirs[step]:.6f}  diff {differences[step]:.1e}"
        )
    print(
        f"largest difference: first 10 steps {max(differences[:10]):.1e}, all {args.steps} {max(differences):.1e}; "
        f"seconds: ours {our_seconds:.0f} (compilation included), PyTorch + PEFT {their_seconds:.0f}"
    )
    return 0 if max(differences[:10]) <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
