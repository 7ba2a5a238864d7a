"""Speed of packed sequences on one GPU: documents kept apart by their lengths or by a mask, and one document alone.

    python benchmarks/packed_gpu.py --rows 8 --tokens 2048 --documents 1 2 8 16
    python benchmarks/packed_gpu.py --rows 2 --tokens 8192 --documents 16

The step of `gpu_step.py` with as many equal documents in every sequence as given, in one process, in both orders. With
`--attention`, only forward and backward of one layer's attention, for several numbers of documents that the program has
room for. Prints a table, and JSON lines before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Sequence
from typing import Any

from gpu_step import SHAPES

BUCKETS = (8, 16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 2, 8, 16])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--bucket", type=int, help="documents to compile for; by default as a run would choose")
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    rows = attention_alone(args) if args.attention else whole_steps(args)
    for row in rows:
        print(json.dumps(row), flush=True)
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def whole_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of each kind of step, for each number of documents."""
    from transformers import LlamaConfig

    from trillora.devices.mesh import find_devices, put_batch
    from trillora.events import ignore_events
    from trillora.model.loading.weights import random_weights
    from trillora.recipe.load import load_recipe
    from trillora.step.autotune import choose, step_bytes
    from trillora.training.trainer import place_state

    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=args.tokens)
    devices, most = find_devices("auto", 1), args.bucket or max(args.documents)
    plans: dict[str, Any] = {}
    for kind in ("lengths", "mask", "not packed"):
        recipe = load_recipe(
            {
                "model": "random",
                "data": {"path": "random.jsonl", "pack": kind != "not packed"},
                "lora": {"rank": 16, "alpha": 32},
                "train": {"sequence_length": args.tokens, "batch_size": args.rows, "steps": args.steps},
            },
            args.overrides,
        )
        started, known = time.perf_counter(), most if kind == "lengths" else None
        plan = choose(recipe, config, devices, args.steps, ignore_events, most_documents=known)
        print(f"{kind}: {plan.settings}, {plan.settings.documents_per_sequence} documents, ", end="")
        print(
            f"{time.perf_counter() - started:.0f} s to compile, {step_bytes(plan.compiled) / 2**30:.1f} GiB", flush=True
        )
        plans[kind] = plan
    first = plans["mask"].assembly
    base = random_weights(first.model.module, first.model.layout, first.base_shardings, seed=0)
    cases = [(kind, n) for n in args.documents for kind in ("mask", "lengths")] + [("not packed", 1)]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    losses: dict[tuple[str, int], float] = {}
    for case in (*cases, *reversed(cases)):
        kind, count = case
        plan = plans[kind]
        batch = put_batch(batch_of(args, count, config.vocab_size), plan.assembly.mesh)
        state = place_state(plan.assembly, seed=0, base=base)
        for step in range(args.steps):
            before = time.perf_counter()
            state, metrics = plan.compiled(state, base, batch)
            metrics.loss.block_until_ready()
            if step >= args.steps // 2:
                seconds[case].append(time.perf_counter() - before)
        losses[case] = float(metrics.loss)
    unpacked = statistics.median(seconds["not packed", 1])
    return [
        {
            "sequences": f"{args.rows} x {args.tokens}",
            "documents": count,
            "kind": kind,
            "tokens/s": round(args.rows * args.tokens / statistics.median(times)),
            "ms": round(statistics.median(times) * 1e3, 1),
            "of not packed": round(unpacked / statistics.median(times), 3),
            "GiB": round(step_bytes(plans[kind].compiled) / 2**30, 1),
            "loss": round(losses[kind, count], 4),
        }
        for (kind, count), times in seconds.items()
    ]


def batch_of(args: argparse.Namespace, count: int, vocab_size: int) -> dict[str, Any]:
    """A batch with `count` documents of equal length in every sequence."""
    import numpy as np

    shape, length = (args.rows, args.tokens), args.tokens // count
    tokens = np.random.default_rng(0).integers(3, vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(args.tokens) % length, shape)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": (positions < length - 1).astype(np.float32),
        "segments": np.broadcast_to(1 + np.arange(args.tokens) // length, shape).astype(np.int32),
        "positions": positions.astype(np.int32),
    }


def attention_alone(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of forward and backward of one layer, by kind and by the documents that the program has room for."""
    import jax
    import jax.numpy as jnp

    from trillora.engine.attention import MaskRule, ScoreScaling, attend
    from trillora.engine.ragged import find_documents

    shape = SHAPES[args.shape]
    width = shape.get("head_dim", 64)
    heads = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["num_key_value_heads"])
    draw = [jax.random.normal(jax.random.key(n), (args.rows, args.tokens, h, width), jnp.bfloat16) for n, h in
            enumerate(heads)]  # fmt: skip
    found = []
    for count in args.documents:
        segments = jnp.asarray(batch_of(args, count, 256)["segments"])
        kinds: Sequence[tuple[str, int | None]] = [("causal", None), ("mask", None)]
        kinds = [*kinds, *(("lengths", most) for most in BUCKETS if most >= count)]
        for kind, most in kinds:

            def loss(q: Any, k: Any, v: Any, kind: str = kind, most: int | None = most) -> Any:
                ids = None if kind == "causal" else segments  # noqa: B023
                places = None if most is None else find_documents(segments, most)  # noqa: B023
                extra: dict[str, Any] = {"segments_BT": ids, "documents": places, "implementation": "cudnn"}
                return (attend(q, k, v, MaskRule(), ScoreScaling(width**-0.5), **extra).astype(jnp.float32) ** 2).sum()

            try:
                step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*draw).compile()
                times = [timed(step, draw) for _ in range(12)]
                memory = step.memory_analysis()
                row = {"documents": count, "kind": kind, "room for": most or "", "ms": round(min(times) * 1e3, 2)}
                found.append({**row, "temporary MiB": round(memory.temp_size_in_bytes / 2**20)})
            except Exception:
                traceback.print_exc(limit=-2)
    return found


def timed(step: Any, arrays: Sequence[Any]) -> float:
    """Seconds of a call, from ten in a row."""
    import jax

    before = time.perf_counter()
    for _ in range(10):
        result = step(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - before) / 10


if __name__ == "__main__":
    main()
