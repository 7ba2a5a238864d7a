"""Trains the golden model on this machine's CPU in float32 and writes src/trillora/prove/golden.safetensors.

    python tools/record_proof.py            compares a new training with the record
    python tools/record_proof.py --write    replaces the record; needed when prove/golden.py changes

One device, XLA's optimizations as in a real run. `trillora doctor --prove` compares every chip with this record.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the record")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="to compare with the record"
    )
    args = parser.parse_args()
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        os.environ.pop(name, None)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT / "src"))
    import jax

    from trillora.events import ignore_events
    from trillora.prove.compare import RECORD, GoldenRecord, figures_of, judge
    from trillora.prove.golden import train_golden

    run = train_golden(jax.devices()[:1], args.dtype, ignore_events)
    if args.write:
        libraries = {name: version(name) for name in ("jax", "torch", "transformers", "numpy")}
        GoldenRecord(run.inputs, run.losses, run.gradients, libraries).write()
        print(f"wrote {RECORD}", file=sys.stderr)
    for check in judge(figures_of(run.losses, run.gradients, run.how, GoldenRecord.read()), args.dtype):
        print(f"{check.state}  {check.name}: {check.figures}; {check.where}")


if __name__ == "__main__":
    main()
