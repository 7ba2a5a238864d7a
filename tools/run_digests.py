"""Trains tiny runs of every kind on the CPU and prints the digests of their adapters.

    python tools/run_digests.py                        one JSON object: kind -> adapter -> digest
    python tools/run_digests.py --compare before.json  and the adapters that differ from an earlier output

Each kind is trained without interruption, and again in a process that is killed in the middle and then resumed. Both
have to give the same adapters, and a change of the trainer has to leave all of them as they were, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KILLED_AT = {
    "plain": 5,
    "best": 6,
    "stages": 7,
    "phases": 7,
    "sweep": 5,
    "rates": 9,
    "preferences": 8,
    "kto": 5,
}  # a step after a checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"one of {', '.join(KILLED_AT)}; default: all")
    parser.add_argument("--compare", type=Path, help="an earlier output")
    parser.add_argument("--kill", nargs=2, metavar=("FOLDER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]
    if args.kill:
        train_and_kill(args.kinds[0], Path(args.kill[0]), Path(args.kill[1]))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for kind in args.kinds or KILLED_AT:
            found[kind] = digests_of(kind, Path(folder))
            print(kind, *(f"{name} {digest[:16]}" for name, digest in found[kind].items()), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))
    if args.compare:
        before = json.loads(args.compare.read_text("utf-8"))
        changed = [f"{kind} {name}" for kind in found for name in found[kind] if found[kind] != before[kind]]
        sys.exit(f"Not as in {args.compare}: {', '.join(changed)}" if changed else 0)


def digests_of(kind: str, folder: Path) -> dict[str, str]:
    """The digest of each adapter that a run leaves."""
    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    whole, resumed = folder / f"{kind}-whole", folder / f"{kind}-resumed"
    train(load_recipe(recipe_of(kind, folder)), whole)
    command = [sys.executable, __file__, kind, "--kill", str(folder), str(resumed)]
    if (code := subprocess.run(command).returncode) != -signal.SIGKILL:
        sys.exit(f"{kind} ended with {code} before it could be killed")
    train(load_recipe(recipe_of(kind, folder)), resumed)
    found = adapters_of(whole)
    if found != adapters_of(resumed):
        sys.exit(f"{kind}: the resumed run left other adapters")
    return found


def train_and_kill(kind: str, folder: Path, out: Path) -> None:
    from trillora.events import Event, Saved, Step
    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    num_saved = 0

    def listen(event: Event) -> None:
        nonlocal num_saved
        num_saved += isinstance(event, Saved)
        if isinstance(event, Step) and event.step >= KILLED_AT[kind] and num_saved:
            os.kill(os.getpid(), signal.SIGKILL)

    train(load_recipe(recipe_of(kind, folder)), out, listener=listen)


def adapters_of(run: Path) -> dict[str, str]:
    files = sorted(run.glob("adapter*/**/adapter_model.safetensors"))
    return {str(file.parent.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write_inputs(folder: Path) -> None:
    import tiny_run

    tiny_run.write_both(folder, tiny_run.llama(num_layers=2, width=32), num_rows=40)
    tiny_run.write_pairs(folder / "pairs.jsonl")
    tiny_run.write_labels(folder / "labels.jsonl")
    lines = (folder / "chats.jsonl").read_text("utf-8").splitlines()
    (folder / "other.jsonl").write_text("".join(line.replace("plus", "and") + "\n" for line in lines[:25]), "utf-8")


def recipe_of(kind: str, folder: Path) -> dict[str, Any]:
    import tiny_run

    train = {"steps": 10, "batch_size": 4, "schedule": "cosine", "warmup_steps": 2}
    train |= {"checkpoint_every": 2, "keep_checkpoints": 3}
    values = tiny_run.recipe(folder, lora={"dropout": 0.1}, train=train)
    values["evaluate"] = {"every_steps": 3, "num_samples": 0}
    if kind == "plain":
        return values
    data = values["data"] = {**values["data"], "split": {"validation": 0.2, "test": 0.1}}
    if kind == "best":
        values["train"] |= {"learning_rate": 0.3, "schedule": "constant"}  # the last weights are not the best
    if kind == "sweep":
        values["sweep"] = {"learning_rate": [1e-3, 1e-2], "rank": [2, 4], "keep": "all"}
    if kind == "rates":
        values["train"] |= {"learning_rate": "auto", "steps": 16, "warmup_steps": 0}
    if kind == "kto":
        values["data"] = {**data, "path": str(folder / "labels.jsonl")}
        values["train"] |= {"loss": "kto", "micro_batch_size": 2}
    if kind == "preferences":
        del values["data"], values["train"]["steps"]
        pairs = {**data, "path": str(folder / "pairs.jsonl")}
        second = {"name": "second", "data": pairs, "steps": 6, "loss": ["dpo", "sft"], "learning_rate": 1e-3}
        second["sequence_length"] = 96
        values["stages"] = [{"name": "first", "data": data, "steps": 5}, second]
    other = {**data, "path": str(folder / "other.jsonl")}
    if kind == "stages":
        del values["data"], values["train"]["steps"]
        second = {"name": "second", "data": other, "steps": 6, "optimizer_state": "restart"}
        values["stages"] = [{"name": "first", "data": {**data, "pack": False}, "steps": 5}, second]
    if kind == "phases":
        del values["data"]
        lengths = {"sums": 6, "pairs": 10, "short": 4, "again": 10}
        values["phases"] = [
            {"name": name, "data": other if name == "pairs" else data, "steps": steps, "learning_rate": 1e-2 / (1 + n)}
            for n, (name, steps) in enumerate(lengths.items())
        ]
    return values


if __name__ == "__main__":
    main()
