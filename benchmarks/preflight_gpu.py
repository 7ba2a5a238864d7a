"""Compares preflight's prediction of a training step with a measurement on a GPU: peak memory and step time.

    python benchmarks/preflight_gpu.py [--only 3] [--keep FOLDER]

The prediction is made as for a TPU, before anything runs: memory from the compiled step, time from a simulation of its
program with the card's public figures. Then the step runs on random weights. Each case runs in its own process, so that
the measured peak belongs to it alone. Prints one JSON line per case and a table. `--keep` writes each program and the
times of its kernels, to see where a prediction is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MISTRAL, GEMMA = "mistralai/Mistral-7B-v0.3", "google/gemma-3-270m"
LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"
SMALL_LLAMA = "1b"  # a shape of gpu_step.py

# model, batch size, micro-batch size, sequence length, remat, packed
CASES: tuple[tuple[str, int, int, int, str, bool], ...] = (
    # used to set the simulation's constants for GPUs
    (SMALL_LLAMA, 8, 8, 2048, "none", False),
    (SMALL_LLAMA, 16, 8, 2048, "linear", False),
    (GEMMA, 64, 64, 512, "linear", False),
    (GEMMA, 32, 32, 1024, "full", False),
    (QWEN, 16, 16, 1024, "none", False),
    (QWEN, 8, 8, 4096, "linear", False),
    (MISTRAL, 8, 8, 2048, "full", False),
    (MISTRAL, 4, 4, 4096, "linear", False),
    # not used to set them
    (SMALL_LLAMA, 4, 4, 8192, "full", False),
    (SMALL_LLAMA, 8, 8, 2048, "none", True),
    (QWEN, 32, 32, 512, "none", True),
    (LLAMA, 4, 4, 2048, "linear", False),
)
NUM_FITTED = 8
STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="case numbers, from 0")
    parser.add_argument("--keep", type=Path, help="folder for programs and kernel times")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # for the child process
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.keep)), flush=True)
        return
    rows = []
    numbers = range(len(CASES)) if args.only is None else args.only
    for number in numbers:
        command = [sys.executable, __file__, "--measure", str(number)]
        command += ["--keep", str(args.keep)] if args.keep else []
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        line = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
        print(line or f"case {number} failed", flush=True)
        rows += [json.loads(line)] if ran.returncode == 0 else []
    show(rows)
    sys.exit(0 if len(rows) == len(numbers) else 1)


def show(rows: list[dict[str, Any]]) -> None:
    print("\n| model | rows x tokens | remat | GiB predicted | measured | error | s predicted | measured | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        gib, seconds = row["gib"], row["seconds"]
        print(
            f"| {row['model']} | {row['rows']} x {row['tokens']}{', packed' * row['packed']} | {row['remat']} "
            f"| {gib[0]:.2f} | {gib[1]:.2f} | {gib[0] / gib[1] - 1:+.1%} "
            f"| {seconds[0]:.3f} | {seconds[1]:.3f} | {seconds[0] / seconds[1] - 1:+.1%} |"
        )
    for is_fitted, title in ((True, "fitted"), (False, "new")):
        chosen = [row for row in rows if (row["number"] < NUM_FITTED) == is_fitted]
        for name in ("gib", "seconds") if chosen else ():
            errors = [abs(row[name][0] / row[name][1] - 1) for row in chosen]
            print(f"{title}: {name}, mean absolute error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")


def measure(number: int, keep: Path | None) -> dict[str, Any]:
    import jax

    from trillora.devices.chips import chip_of
    from trillora.devices.mesh import find_devices
    from trillora.events import ignore_events
    from trillora.preflight.estimate.estimate import estimate, kind_shares
    from trillora.preflight.hlo.simulate import simulate
    from trillora.recipe.load import load_recipe
    from trillora.step.autotune import choose, step_bytes
    from trillora.step.search import GIB

    name, rows, at_once, tokens, remat, packed = CASES[number]
    recipe = load_recipe(
        {
            "model": name,
            "data": {"path": "random.jsonl", "pack": packed},
            "train": {"sequence_length": tokens, "batch_size": rows, "micro_batch_size": at_once, "steps": STEPS},
            "engine": {"remat": remat},
        }
    )
    config = read_config(name, recipe)
    devices = find_devices("auto", 1)
    chip = chip_of(devices[0].device_kind)
    assert chip is not None, f"unknown device {devices[0].device_kind}"
    started = time.perf_counter()
    plan = choose(recipe, config, devices, STEPS, ignore_events)
    compile_seconds = time.perf_counter() - started
    program = plan.compiled.as_text()
    predicted = simulate(program, chip, 1, kind_shares(config))
    guessed = estimate(plan.assembly, chip)

    step = ready_to_run(plan, argparse.Namespace(rows=rows, tokens=tokens, packed=packed), config.vocab_size)
    seconds = [step() for _ in range(STEPS)]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{number}.hlo").write_text(program)
        (keep / f"{number}.kernels.json").write_text(json.dumps(kernel_seconds(step)))
    return {
        "number": number,
        "model": name,
        "rows": rows if rows == at_once else f"{rows // at_once} times {at_once}",
        "tokens": tokens,
        "remat": remat,
        "packed": packed,
        "gib": (step_bytes(plan.compiled) / GIB, peak / GIB),
        "seconds": (predicted.seconds, statistics.median(seconds[STEPS // 2 :])),
        "estimate": (guessed.peak_bytes / GIB, guessed.step_seconds),
        "parts": {key: value for key, value in vars(predicted).items() if key != "warnings"},
        "warnings": predicted.warnings,
        "compile_seconds": round(compile_seconds, 1),
        "device": devices[0].device_kind,
        "versions": {package: version(package) for package in ("jax", "torch", "torchax", "transformers")},
    }


def ready_to_run(plan: Any, shape: argparse.Namespace, vocab_size: int) -> Callable[[], float]:
    """A function that runs one step on random weights and tokens and returns its seconds."""
    import numpy as np
    from gpu_step import random_batch

    from trillora.devices.mesh import put_batch
    from trillora.model.loading.weights import random_weights
    from trillora.training.entries.programs import place_state

    assembly = plan.assembly
    base = random_weights(assembly.model.module, assembly.model.layout, assembly.base_shardings, seed=0)
    state = place_state(assembly, seed=0, base=base)
    batch = put_batch(random_batch(np.random.default_rng(0), shape, vocab_size), assembly.mesh)

    def step() -> float:
        nonlocal state
        before = time.perf_counter()
        state, metrics = plan.compiled(state, base, batch)
        metrics.loss.block_until_ready()
        return time.perf_counter() - before

    return step


def read_config(name: str, recipe: Any) -> Any:
    from gpu_step import SHAPES
    from transformers import LlamaConfig

    from trillora.model.loading.source import load_config
    from trillora.preflight.inputs import describe_model

    if name in SHAPES:
        return LlamaConfig(**SHAPES[name], max_position_embeddings=8192)
    return load_config(describe_model(recipe)[0], trust_remote_code=False)


def kernel_seconds(step: Callable[[], float]) -> list[tuple[str, str, int, float]]:
    """Kernels of one step on the card: instruction (if known), kernel, number of calls, seconds."""
    import jax
    from jax.profiler import ProfileData

    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for plane in ProfileData.from_file(str(file)).planes if plane.name.startswith("/device:GPU")]
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for plane in planes:
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    instruction = dict(event.stats).get("hlo_op", "")
                    spent[str(instruction), event.name].append(event.duration_ns / 1e9)
    return sorted(((*key, len(each), sum(each)) for key, each in spent.items()), key=lambda row: -row[3])


if __name__ == "__main__":
    main()
