"""Compares 100 training steps of Trillora with PyTorch and PEFT: the losses of every step.

    python benchmarks/parity.py --steps 100
    python benchmarks/parity.py --steps 20 engine.kernels=fused engine.layers=unroll  # GPU kernels, interpreted: slow
    python benchmarks/parity.py --bfloat16 --shape llama-1b train.batch_size=64 train.sequence_length=128   # on a GPU

The same base, initial adapter and batches for both, AdamW with a constant learning rate. In float32, on the CPU: fails
if one of the first ten steps differs by more than 1e-4. The test suite runs these ten.

With `--bfloat16`, on a GPU: PyTorch trains three times with the same weights: in bfloat16, again from another initial
adapter, and with arithmetic in float32. Fails if Trillora is farther from the last than PyTorch in bfloat16 is, and
also farther than the two initial adapters are from each other, in the mean of all steps. SmolLM2 is too narrow for some
of the GPU's kernels, so `--shape` has random weights of another shape (`random_model.py`) read the same data.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from random_model import SHAPES, write_model
from record import MODEL_CODE, PACKAGES, add_record_option, record_if

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src" / "trillora" / "quickstart" / "data" / "train.jsonl"
SOURCES = (
    "benchmarks/parity.py",
    "tests/support/peft_reference.py",
    "src/trillora/training",
    "src/trillora/data",
    *MODEL_CODE,
)
SAME = 1e-4  # losses of the first ten steps, in float32
sys.path.insert(0, str(ROOT / "tests" / "support"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bfloat16", action="store_true", help="on a GPU")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, instead of SmolLM2")
    parser.add_argument("overrides", nargs="*", help="recipe overrides")
    add_record_option(parser)
    args = parser.parse_args()
    if args.bfloat16:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # PyTorch needs room on the same GPU
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as work:
        return compare(args, Path(work))


def compare(args: argparse.Namespace, work: Path) -> int:
    from peft_reference import initial_weights

    from trillora.data.stage import read_stage
    from trillora.events import ignore_events
    from trillora.model.bridge import CausalLM
    from trillora.model.loading.source import find_model, load_config, load_tokenizer
    from trillora.recipe.load import load_recipe
    from trillora.recipe.schema import stages_of
    from trillora.step.build import lora_spec
    from trillora.training.trainer import train

    folder = random_weights(work / "model", args.shape) if args.shape else find_model("smollm2")
    recipe = load_recipe(
        {
            "model": {"name": str(folder), "dtype": "bfloat16" if args.bfloat16 else "float32"},
            "data": {"path": str(DATA), "pack": False},
            "train": {"sequence_length": 184, "batch_size": 2, "steps": args.steps, "schedule": "constant"},
            "hardware": {"devices": 1},
        },
        args.overrides,
    )
    started = time.perf_counter()
    ours = train(recipe, work / "run").losses
    seconds = time.perf_counter() - started
    print(f"Trillora took {seconds:.0f} s, compilation included.", flush=True)
    layout = CausalLM(load_config(folder), lora=lora_spec(recipe.lora)).adapter_layout
    [stage] = stages_of(recipe)
    data = read_stage(stage, load_tokenizer(folder), ignore_events).batches
    batches = [data.batch(step) for step in range(args.steps)]
    started = time.perf_counter()

    def theirs(*kind: str, seed: int = recipe.train.seed) -> list[float]:
        return in_own_process(initial_weights(layout, seed), recipe, folder, batches, *kind)

    if args.bfloat16:
        low, other = (theirs("cuda", "bfloat16", "bfloat16", seed=recipe.train.seed + n) for n in range(2))
        found = check_bfloat16(ours, low, other, theirs("cuda", "bfloat16", "float32"))
    else:
        reference = theirs("cpu", "float32", "float32")
        found = check_float32(ours, reference)
        values = {"steps": args.steps, "largest": max(apart(ours, reference)), "seconds": round(seconds)}
        values |= {"pytorch_seconds": round(time.perf_counter() - started)}
        record_if(args.record, "parity", values, SOURCES, packages=(*PACKAGES, "peft"))
    print(f"PyTorch with PEFT took {time.perf_counter() - started:.0f} s.")
    return found


def in_own_process(start: Any, recipe: Any, folder: Path, batches: Any, device: str, *dtypes: str) -> list[float]:
    import torch
    from peft_reference import losses_from

    kinds = (getattr(torch, name) for name in dtypes)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(losses_from, start, recipe, folder, batches, device, *kinds).result()


def random_weights(folder: Path, shape: str) -> Path:
    """With SmolLM2's tokenizer, so that the data is the same."""
    from trillora.model.loading.source import find_model

    write_model(folder, shape)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(find_model("smollm2") / name, folder)
    return folder


def check_float32(ours: list[float], theirs: list[float]) -> int:
    differences = apart(ours, theirs)
    for step in range(0, len(ours), max(1, len(ours) // 10)):
        print(f"step {step + 1:4}  ours {ours[step]:.6f}  PyTorch {theirs[step]:.6f}  diff {differences[step]:.1e}")
    print(f"largest difference: first 10 steps {max(differences[:10]):.1e}, all {max(differences):.1e}")
    return 0 if max(differences[:10]) <= SAME else 1


def check_bfloat16(ours: list[float], theirs: list[float], other: list[float], exact: list[float]) -> int:
    """`other`: PyTorch from another initial adapter; `exact`: with arithmetic in float32."""
    for step in [*range(0, len(ours), max(1, len(ours) // 10)), len(ours) - 1]:
        losses = (("ours", ours), ("PyTorch", theirs), ("another seed", other), ("float32", exact))
        print(f"step {step + 1:4}  " + "  ".join(f"{name} {each[step]:.4f}" for name, each in losses))
    found, rounding, spread = (fmean(apart(*pair)) for pair in ((ours, exact), (theirs, exact), (other, theirs)))
    print(f"mean difference from float32: ours {found:.5f}, PyTorch {rounding:.5f}; between two seeds: {spread:.5f}")
    return 0 if found <= max(rounding, spread) else 1


def apart(left: list[float], right: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
