"""Generation with a 7B model on a small GPU: peak memory and speed with the base in int8 and nf4.

    python benchmarks/small_gpu.py                             # Mistral 7B's shape, at most 10 GB of the GPU
    python benchmarks/small_gpu.py --shape tiny --memory-gb 0  # a test of the script, on any machine

Writes a model with random weights and opens it as `trillora generate --quantize FORMAT` does, once per format, in a
process whose memory on the GPU is limited: jax's pool gets the limit less 0.8 GB for the CUDA context and kernels, and
cannot grow. `limit` is the pool's size, `peak` the most it held, while loading or generating; `card` is what the driver
reports for the whole card at the end. Prints a table, and one line of JSON per format.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from random_model import SHAPES, write_model
from record import add_record_option, by_name, record_if

SOURCES = ("benchmarks/small_gpu.py", "src/trillora/generation", "src/trillora/model")
OUTSIDE_GB = 0.8  # of the CUDA context and the kernels, which are not in jax's pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--formats", nargs="*", default=["int8", "nf4"])
    parser.add_argument("--memory-gb", type=float, default=10, help="of the card, in 10^9 bytes; 0: no limit")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--model", type=Path, help="a folder with a model; default: random weights")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    add_record_option(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)), flush=True)
        return
    with tempfile.TemporaryDirectory() as work:
        if args.model is None:
            started = time.perf_counter()
            args.model = Path(work) / "model"
            size = write_model(args.model, args.shape)
            print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - started:.0f} s", flush=True)
        rows = [in_child(format, args) for format in args.formats]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    record_if(args.record, "small-gpu", by_name(rows, "format"), SOURCES)


def in_child(format: str, args: argparse.Namespace) -> dict[str, Any]:
    """A process of its own: the limit is set when jax starts, and the peak counts from there."""
    environment = dict(os.environ)
    total = card_mib("memory.total")
    if args.memory_gb and total:
        share = (args.memory_gb - OUTSIDE_GB) * 1e9 / (total * 2**20)
        environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.5f}", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    command = [sys.executable, __file__, "--child", format, "--model", str(args.model)]
    for name in ("batch", "prompt", "new"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"format": format, "error": f"exit code {done.returncode}"}
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    found: dict[str, Any] = json.loads(line)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    import jax
    import numpy as np

    from trillora.engine.quantize import item_bytes
    from trillora.generation.generator import Generator

    generator = Generator.open(str(args.model), quantize=args.child)
    loaded = time.perf_counter() - started
    loading_peak = memory("peak_bytes_in_use")
    random = np.random.default_rng(1)
    prompts = random.integers(1, 500, (args.batch, args.prompt)).tolist()

    def once() -> tuple[float, float]:
        """Seconds to the first tokens, and for the rest."""
        start = time.perf_counter()
        parts = generator.write(prompts, max_tokens=args.new)
        next(parts)
        first = time.perf_counter()
        num_written = 1 + sum(part.shape[1] for part in parts)
        assert num_written >= args.new, f"only {num_written} tokens were generated"
        return first - start, time.perf_counter() - first

    once()  # compiles
    compiled = time.perf_counter() - started - loaded
    times = [once() for _ in range(3)]
    prefill, decode = min(t[0] for t in times), min(t[1] for t in times)
    return {
        "format": args.child,
        "weights_gb": sum(a.size * item_bytes(a.dtype) for a in generator.base.values()) / 1e9,
        "limit_gb": memory("bytes_limit"),
        "peak_loading_gb": loading_peak,
        "peak_gb": memory("peak_bytes_in_use"),
        "card_gb": (card_mib("memory.used") or 0) * 2**20 / 1e9,
        "prefill_tokens_per_second": args.batch * args.prompt / prefill,
        "decode_tokens_per_second": args.batch * (args.new - 1) / decode,
        "loading_seconds": loaded,
        "compile_seconds": compiled,
        "batch": args.batch,
        "prompt": args.prompt,
        "new": args.new,
        "dtype": str(next(a.dtype for key, a in generator.base.items() if "embed" in key)),
        "device": jax.devices()[0].device_kind,
        "versions": {name: version(name) for name in ("jax", "torch", "torchax", "transformers")},
    }


def memory(name: str) -> float:
    """In 10^9 bytes; 0 where the device does not count."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get(name, 0) / 1e9


def card_mib(what: str) -> float | None:
    """From the driver; None without an NVIDIA GPU."""
    try:
        command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| base | weights GB | peak GB, loading | peak GB | limit GB | card GB | prefill tokens/s | decode tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['format']} | {row['error']} |")
            continue
        sizes = (row[name] for name in ("weights_gb", "peak_loading_gb", "peak_gb", "limit_gb", "card_gb"))
        speeds = (row[name] for name in ("prefill_tokens_per_second", "decode_tokens_per_second"))
        cells = [*(f"{size:.2f}" for size in sizes), *(f"{speed:,.1f}" for speed in speeds)]
        lines.append(f"| {row['format']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
