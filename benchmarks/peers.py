"""Trillora, Unsloth, TRL and TRL with Liger side by side on one GPU, in one run: speed, memory, losses.

    python benchmarks/peers.py 1b-2048 1b-packed                all engines, in both orders
    python benchmarks/peers.py mixture --only trillora unsloth --orders 1 --time-limit 180
    python benchmarks/peers.py tiny --only trillora trl         a test of the script, on any machine

Writes the random weights once for each shape. Each engine runs in a process of its own (`peer_engines.py`, which says
what is the same for all), first in the order of `--only`, then in the opposite one; a step's time is the median of the
second half. `trillora, capped` may use as much memory as Unsloth used. `trillora, fp8` computes products with the base
in 8 bits (`engine.matmul: fp8`), which the others do not. With `--peer-path`, the packages of the others are only on
their path. A run that fails, or does not start before the time limit, has its reason in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from peer_engines import FIRST_TOKEN, WORKS
from random_model import write_model
from record import MODEL_CODE, PACKAGES, add_record_option, by_name, record_if

CAPPED, FP8 = "trillora, capped", "trillora, fp8"
ENGINES = ("trillora", "unsloth", CAPPED, FP8, "unsloth-packed", "trl-liger", "trl")
HERE = Path(__file__).parent
SOURCES = ("benchmarks/peers.py", "benchmarks/peer_engines.py", *MODEL_CODE)
PEERS = ("unsloth", "trl", "peft", "liger-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--only", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--orders", type=int, choices=(1, 2), default=2)
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; nothing is started after this")
    parser.add_argument("--each", type=float, default=150, help="seconds that one engine may take")
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--peer-path", default="", help="folder with the packages of the others")
    parser.add_argument("--set", nargs="*", default=[], help="recipe overrides for trillora")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    add_record_option(parser)
    parser.add_argument("--name", default="peers", help="of the record: peers, peers-fp8 or peers-mixture")
    args = parser.parse_args()
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for shape in dict.fromkeys(WORKS[work].shape for work in args.works):
        works = [work for work in args.works if WORKS[work].shape == shape]
        folder = model_folder(args.models, shape)
        for order in range(args.orders):
            for engine in args.only[:: -1 if order else 1]:
                for together in works_for(engine, works):
                    if time.perf_counter() - started > args.time_limit:
                        found = [{"error": "no time left"}] * len(together)
                    else:
                        found = run(engine, together, folder, args, cap_for(together[0], rows))
                    for work, one in zip(together, found, strict=True):
                        rows.append({"order": order, "engine": engine, "work": work} | one)
                        print(json.dumps(rows[-1]), flush=True)
                    if args.json:
                        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    record_if(args.record, args.name, values_of(rows), SOURCES, packages=(*PACKAGES, *PEERS))


def values_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By work and engine. Speeds and times are means over the orders, peaks the larger one."""
    good = [row for row in rows if "error" not in row]
    values = by_name(good, "work", "engine")
    for work, engines in values.items():
        for engine, one in engines.items():
            same = [row for row in good if row["work"] == work and row["engine"] == engine]
            one |= {key: fmean(row[key] for row in same) for key in ("tokens_per_second", "step_ms")}
            one |= {"peak_gib": max(row["peak_gib"] for row in same), "orders": len(same)}
        engines["tokens"] = sum(WORKS[work].lengths)
    compiled = [
        int(found[1])
        for row in good
        if row["work"].startswith("1b-") and (found := re.search(r"compiled (\d+) s", row["notes"]))
    ]
    if compiled:
        values["compile"] = {"1b_seconds_least": min(compiled), "1b_seconds_most": max(compiled)}
    return values


def model_folder(models: Path, shape: str) -> Path:
    """Writes the weights, and a tokenizer with the special tokens that the trainers ask for."""
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    folder = models / shape
    if not (folder / "tokenizer.json").exists():
        before = time.perf_counter()
        size = write_model(folder, shape, max_positions=32768)
        config = json.loads((folder / "config.json").read_text())
        special = dict(zip(("pad_token", "bos_token", "eos_token"), ("<pad>", "<s>", "</s>"), strict=True))
        config |= {f"{name}_id": number for number, name in enumerate(special)}
        (folder / "config.json").write_text(json.dumps(config))
        words = {word: number for number, word in enumerate([*special.values(), "a"])}
        assert len(special) == FIRST_TOKEN
        tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<pad>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<pad>", **special).save_pretrained(folder)
        print(f"wrote {shape}: {size / 1e9:.1f} GB in {time.perf_counter() - before:.0f} s", flush=True)
    return folder


def works_for(engine: str, works: list[str]) -> list[list[str]]:
    """The works of each process. Unsloth packs different lengths in any case, and full rows in none."""
    if engine == CAPPED:  # to another amount each
        return [[work] for work in works]
    if engine == "unsloth-packed":
        works = [work for work in works if not WORKS[work].is_uneven and WORKS[work].lengths[0] < WORKS[work].row]
    return [works] if works else []


def run(
    engine: str, works: list[str], folder: Path, args: argparse.Namespace, cap: float | None
) -> list[dict[str, Any]]:
    """The results of one process, or its error."""
    name = engine.split(",")[0]
    cap = cap if engine == CAPPED else None
    if engine == CAPPED and cap is None:
        return [{"error": "no peak of Unsloth to cap to"}] * len(works)
    environment = dict(os.environ)
    if name == "trillora":
        card = card_gib()
        if card:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{cap / card if cap else 0.92:.4f}"
        # Only the first start pays for compiling, which is not measured.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(args.models / "programs")
    elif args.peer_path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (args.peer_path, environment.get("PYTHONPATH"))))
        environment["UNSLOTH_COMPILE_LOCATION"] = str(args.models / "unsloth")
    command = [sys.executable, str(HERE / "peer_engines.py"), name, *works, "--model", str(folder)]
    overrides = [*args.set, *(["engine.matmul=fp8"] if engine == FP8 else [])] if name == "trillora" else []
    command += ["--steps", str(args.steps), *(["--set", *overrides] if overrides else [])]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.each)
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        output, errors = (part.decode() if part else "" for part in (late.stdout, late.stderr))  # type: ignore[union-attr]
        errors += f"\nnot done after {args.each:.0f} s"
    seconds = round(time.perf_counter() - started)
    results = {one["work"]: one for one in map(as_result, output.splitlines()) if one}
    if any(work not in results or "error" in results[work] for work in works):
        print(output[-1500:], errors[-3500:], sep="\n", flush=True)
    missing = {"error": (errors.strip().splitlines() or ["no message"])[-1][:200]}
    return [
        results.get(work, missing) | {"engine": engine, "process_seconds": seconds, "cap_gib": cap} for work in works
    ]


def as_result(line: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(line) if line.startswith('{"engine"') else None
    return found


def cap_for(work: str, rows: list[dict[str, Any]]) -> float | None:
    """The most that Unsloth used on this work."""
    mine = [row for row in rows if row["work"] == work and row["engine"].startswith("unsloth")]
    return max((row["peak_gib"] for row in mine if "peak_gib" in row), default=None)


def card_gib() -> float | None:
    """The whole memory of the GPU, from the driver; None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each engine and work; the two orders are separated by a slash."""
    lines = [
        "| work | engine | tokens/s | relative to Unsloth | step ms | peak GiB | losses | trained | notes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for work in dict.fromkeys(row["work"] for row in rows):
        mine = [row for row in rows if row["work"] == work]
        unsloth = [mean_speed(mine, name) for name in ("unsloth", "unsloth-packed")]
        best = max((speed for speed in unsloth if speed), default=None)
        for engine in dict.fromkeys(row["engine"] for row in mine):
            good = [row for row in mine if row["engine"] == engine and "error" not in row]
            bad = [row["error"] for row in mine if row["engine"] == engine and "error" in row]
            if not good:
                lines.append(f"| {work} | {engine} | {'; '.join(bad)} | | | | | | |")
                continue
            speeds, steps, peaks = ([row[key] for row in good] for key in ("tokens_per_second", "step_ms", "peak_gib"))
            relative = f"{sum(speeds) / len(speeds) / best:.2f}" if best else ""
            cells = [
                " / ".join(f"{speed:,}" for speed in speeds),
                relative,
                " / ".join(map(str, steps)),
                f"{max(peaks)}",
                f"{good[0]['first_loss']} to {good[0]['last_loss']}",
                f"{good[0]['trained']:,}",
                "; ".join(filter(None, [good[0]["notes"], *bad])),
            ]
            lines.append(f"| {work} | {engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_speed(rows: list[dict[str, Any]], engine: str) -> float | None:
    speeds = [row["tokens_per_second"] for row in rows if row["engine"] == engine and "error" not in row]
    return sum(speeds) / len(speeds) if speeds else None


if __name__ == "__main__":
    main()
