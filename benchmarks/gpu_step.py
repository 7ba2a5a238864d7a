"""Speed and memory of our LoRA step on one GPU, with automatically chosen options.

    python benchmarks/gpu_step.py --rows 8 --tokens 2048 [--memory-gib 18] [--packed] [--kernels 40]
    python benchmarks/gpu_step.py engine.kernels=fused

Random weights of a 1.2B Llama shape (or `--shape 7b`), LoRA rank 16 on the seven linear layers of a block, AdamW,
bfloat16: the step of `trillora train`, built by the same functions. Prints one JSON line. `--memory-gib` limits the
memory of jax, so that a step with less memory is chosen. `--kernels N` profiles four more steps and prints their N
longest kernels. `peers.py` compares with other trainers on the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from importlib.metadata import version
from itertools import pairwise
from typing import Any

SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
PROFILED = 4  # steps
CARD_GIB = 139.8  # reported by the driver for an H200 with 141 GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--memory-gib", type=float, help="memory limit for jax, in GiB")
    parser.add_argument("--packed", action="store_true", help="two separate documents in every sequence")
    parser.add_argument("--kernels", type=int, default=0, help="print this many of the longest kernels")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_args()
    share = 0.92 if args.memory_gib is None else args.memory_gib / CARD_GIB
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.4f}"
    print(json.dumps(measure(args)), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np
    from kernel_times import longest_kernels
    from transformers import LlamaConfig

    from trillora.devices.mesh import find_devices, put_batch
    from trillora.events import to_json
    from trillora.model.loading.weights import random_weights
    from trillora.recipe.load import load_recipe
    from trillora.recipe.resolve import DocumentRoom
    from trillora.step.autotune import choose, step_bytes
    from trillora.training.entries.programs import place_state

    data, lora = {"path": "random.jsonl", "pack": args.packed}, {"rank": 16, "alpha": 32}
    train = {"sequence_length": args.tokens, "batch_size": args.rows, "steps": args.steps}
    recipe = load_recipe({"model": "random", "data": data, "lora": lora, "train": train}, args.overrides)
    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=args.tokens)
    devices, started = find_devices("auto", 1), time.perf_counter()
    room = DocumentRoom(args.tokens // 2, 1) if args.packed else None
    plan = choose(recipe, config, devices, args.steps, lambda event: print(to_json(event)), document_room=room)
    compile_seconds = time.perf_counter() - started
    assembly = plan.assembly
    base = random_weights(assembly.model.module, assembly.model.layout, assembly.base_shardings, seed=0)
    state = place_state(assembly, seed=0, base=base)
    generator = np.random.default_rng(0)
    batches = [put_batch(random_batch(generator, args, config.vocab_size), assembly.mesh) for _ in range(4)]

    def run(num_steps: int) -> tuple[Any, list[float]]:
        """The last metrics, and when each step ended. As in training, a step is awaited after the next has started."""
        nonlocal state
        ends, before = [], None
        for step in range(num_steps):
            state, metrics = plan.compiled(state, base, batches[step % len(batches)])
            if before is not None:
                before.loss.block_until_ready()
                ends.append(time.perf_counter())
            before = metrics
        metrics.loss.block_until_ready()
        return metrics, [*ends, time.perf_counter()]

    metrics, ends = run(args.steps)
    step_seconds = statistics.median(later - earlier for earlier, later in pairwise(ends[args.steps // 2 :]))
    if args.kernels:
        print(longest_kernels(lambda: run(PROFILED)[0], args.kernels, PROFILED), flush=True)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "engine": "trillora",
        "tokens_per_second": round(args.rows * args.tokens / step_seconds),
        "step_ms": round(step_seconds * 1e3, 1),
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 1),
        "planned_gib": round(step_bytes(plan.compiled) / 2**30, 1),
        "limit_gib": round(stats.get("bytes_limit", 0) / 2**30, 1),
        "remat": plan.settings.remat,
        "kernels": plan.settings.kernels,
        "packed": args.packed,
        "num_compiles": plan.num_compiles,
        "compile_seconds": round(compile_seconds, 1),
        "loss": round(float(metrics.loss), 3),
        "device": jax.devices()[0].device_kind,
        "versions": {name: version(name) for name in ("jax", "torch", "torchax", "transformers")},
    }


def random_batch(generator: Any, args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    import numpy as np

    shape = (args.rows, args.tokens)
    tokens = generator.integers(3, vocab_size, shape).astype(np.int32)
    half = args.tokens // 2 if args.packed else args.tokens
    positions = np.broadcast_to(np.arange(args.tokens) % half, shape)
    segments = np.broadcast_to(1 + np.arange(args.tokens) // half, shape)
    weights = (positions < half - 1).astype(np.float32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": weights,
        "segments": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
    }


if __name__ == "__main__":
    main()
