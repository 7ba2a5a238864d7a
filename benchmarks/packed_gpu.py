"""Speed of packed sequences on one GPU: documents kept apart by their lengths or by a mask, and one document alone.

    python benchmarks/packed_gpu.py --rows 8 --tokens 2048 --documents 2 16
    python benchmarks/packed_gpu.py --rows 2 --tokens 8192 --documents 16
    python benchmarks/packed_gpu.py --attention --rows 8 --tokens 2048 --documents 16

The step of `gpu_step.py` with as many documents in every sequence as given, of random lengths, in one process, in both
orders. The programs are compiled at the same time. With `--attention`, only forward and backward of
one layer's attention, for several sizes of blocks and numbers of documents that the program has room for. Prints a JSON
line after each case, and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from gpu_step import SHAPES

ROOMS = (16, 32, 64, 128)  # documents, for attention alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    rows = attention_alone(args) if args.attention else whole_steps(args)
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def whole_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of each kind of step, for each number of documents."""
    from transformers import LlamaConfig

    from trillora.devices.mesh import put_batch
    from trillora.model.loading.weights import random_weights
    from trillora.step.autotune import step_bytes
    from trillora.training.entries.programs import place_state

    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=args.tokens)
    cases = [(kind, n) for n in args.documents for kind in ("mask", "lengths")] + [("not packed", 1)]
    with ThreadPoolExecutor(4) as compilers:
        plans: dict[tuple[str, int], Any] = {}
        for kind, count in cases:
            known = plans.get(("mask", args.documents[0])) if kind == "mask" else None  # the same for all documents
            plans[kind, count] = known or plan_of(args, config, kind, count, compilers)
        programs = {case: plan.compiled.result() for case, plan in plans.items()}
    first = plans["not packed", 1].assembly
    base = random_weights(first.model.module, first.model.layout, first.base_shardings, seed=0)
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for case in (*cases, *reversed(cases)):
        kind, count = case
        assembly, program = plans[case].assembly, programs[case]
        batch = put_batch(batch_of(args, count, config.vocab_size), assembly.mesh)
        state = place_state(assembly, seed=0, base=base)
        for step in range(args.steps):
            before = time.perf_counter()
            state, metrics = program(state, base, batch)
            metrics.loss.block_until_ready()
            if step >= args.steps // 2:
                seconds[case].append(time.perf_counter() - before)
        middle = statistics.median(seconds[case])
        found[case] = {
            "sequences": f"{args.rows} x {args.tokens}",
            "documents": count,
            "kind": kind,
            "room": str(tuple(plans[case].settings.document_room or ())),
            "tokens/s": round(args.rows * args.tokens / middle),
            "ms": round(middle * 1e3, 1),
            "GiB": round(step_bytes(program) / 2**30, 1),
            "loss": round(float(metrics.loss), 4),
        }
        print(json.dumps(found[case]), flush=True)
    return list(found.values())


def plan_of(args: argparse.Namespace, config: Any, kind: str, count: int, compilers: Executor) -> Any:
    """The step of a kind; `compiled` is a future."""
    from trillora.devices.mesh import find_devices
    from trillora.events import ignore_events
    from trillora.recipe.load import load_recipe
    from trillora.step.autotune import choose

    recipe = load_recipe(
        {
            "model": "random",
            "data": {"path": "random.jsonl", "pack": kind != "not packed"},
            "lora": {"rank": 16, "alpha": 32},
            "train": {"sequence_length": args.tokens, "batch_size": args.rows, "steps": args.steps},
            "engine": {"remat": "none"},
        },
        args.overrides,
    )

    def compile_later(assembly: Any) -> tuple[Any, float]:
        started, _ = time.perf_counter(), assembly.traced
        print(f"{kind}, {count}: traced in {time.perf_counter() - started:.0f} s", flush=True)
        return compilers.submit(assembly.compile), 0.0

    room = room_of(args, count) if kind == "lengths" else None
    devices = find_devices("auto", 1)
    return choose(recipe, config, devices, args.steps, ignore_events, compiler=compile_later, document_room=room)


def lengths_of(args: argparse.Namespace, count: int) -> Any:
    """Lengths [rows, documents] that fill every sequence: cut at random places."""
    import numpy as np

    generator = np.random.default_rng(0)
    cuts = [generator.choice(args.tokens - 1, count - 1, replace=False) + 1 for _ in range(args.rows)]
    return np.stack([np.diff(np.sort([0, *cut, args.tokens])) for cut in cuts])


def room_of(args: argparse.Namespace, count: int, block: int | None = None) -> Any:
    """The room that these documents need, as a run would find it."""
    import numpy as np

    from trillora.data.stage import shortest_block
    from trillora.recipe.resolve import DocumentRoom

    lengths = lengths_of(args, count)
    block = block or shortest_block(int(lengths.max()), args.tokens)
    starts = np.cumsum(lengths, axis=1) - lengths
    return DocumentRoom(block, max(int(np.bincount(row // block).max()) for row in starts))


def batch_of(args: argparse.Namespace, count: int, vocab_size: int) -> dict[str, Any]:
    """A batch with `count` documents in every sequence."""
    import numpy as np

    shape, lengths = (args.rows, args.tokens), lengths_of(args, count)
    tokens = np.random.default_rng(1).integers(3, vocab_size, shape).astype(np.int32)
    segments = np.stack([np.repeat(np.arange(1, count + 1), row) for row in lengths]).astype(np.int32)
    is_start = np.diff(segments, axis=1, prepend=0) > 0
    places = np.broadcast_to(np.arange(args.tokens), shape)
    positions = places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": (np.diff(segments, axis=1, append=count + 1) == 0).astype(np.float32),
        "segments": segments,
        "positions": positions.astype(np.int32),
    }


def attention_alone(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of forward and backward of one layer, by kind and by the documents that the program has room for."""
    import jax
    import jax.numpy as jnp

    from trillora.engine.attention import MaskRule, ScoreScaling, attend
    from trillora.engine.ragged import documents_bucket, find_documents

    shape = SHAPES[args.shape]
    width = shape.get("head_dim", 64)
    heads = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["num_key_value_heads"])
    sizes = ((args.rows, args.tokens, number, width) for number in heads)
    arrays = [jax.random.normal(jax.random.key(n), size, jnp.bfloat16) for n, size in enumerate(sizes)]

    def program(segments: Any, kind: str, room: tuple[int, int] | None) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            places = None if room is None else find_documents(segments, *room)
            ids = None if kind == "causal" else segments
            extra: dict[str, Any] = {"segments_BT": ids, "documents": places, "implementation": "cudnn"}
            return (attend(q, k, v, MaskRule(), ScoreScaling(width**-0.5), **extra).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()

    found = []
    for count in args.documents:
        segments = jnp.asarray(batch_of(args, count, 256)["segments"])
        block, most = room_of(args, count)
        rooms = [(block, documents_bucket(most)), *((args.tokens, room) for room in ROOMS if room >= count)]
        kinds: list[tuple[str, Any]] = [("causal", None), ("mask", None), *(("lengths", room) for room in rooms)]
        for kind, room in kinds:
            try:
                step = program(segments, kind, room)
                times = [timed(step, arrays) for _ in range(5)]
                memory = step.memory_analysis()
                found.append(
                    {"documents": count, "kind": kind, "room": str(room or ""), "ms": round(min(times) * 1e3, 2)}
                )
                found[-1]["temporary MiB"] = round(memory.temp_size_in_bytes / 2**20)
                print(json.dumps(found[-1]), flush=True)
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
