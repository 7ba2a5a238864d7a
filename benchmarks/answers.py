"""Time of the loss by the share of tokens that are supervised: only answers need logits.

    python benchmarks/answers.py                                               # CPU, a minute: the head of SmolLM2-135M
    python benchmarks/answers.py --rows 8 --tokens 2048 --width 2048 --vocabulary 128256 --dtype bfloat16 --chunk 1024

Measures loss and gradient from hidden states with a frozen head. The answer is the end of each sequence, as in a chat
with one turn. Each share is measured in turn, `--repeats` times. The table has medians, their ratio to a batch in which
every token is supervised, and the floating-point operations of the chunks that run: XLA counts only one chunk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.engine.loss import chunked_loss

SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of all rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    rows = measure(args, args.chunk // args.rows)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(args: argparse.Namespace, chunk: int) -> list[dict[str, float]]:
    base, hidden, targets = draw(args)
    program, one_chunk = make(targets, chunk), make(targets[:, :chunk], chunk)
    weights = {share: answers(args.rows, args.tokens, share) for share in SHARES}
    flops = one_chunk.lower(hidden[:, :chunk], weights[1.0][:, :chunk], base).compile().cost_analysis()["flops"]
    jax.block_until_ready(program(hidden, weights[1.0], base))
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(args.repeats):
        for share in SHARES:
            start = time.perf_counter()
            jax.block_until_ready(program(hidden, weights[share], base))
            seconds[share].append(time.perf_counter() - start)
    medians = {share: statistics.median(times) for share, times in seconds.items()}
    return [
        {
            "share": share,
            "chunks": (count := -(-int(weights[share].sum(axis=1).max()) // chunk)),
            "gflops": count * flops / 1e9,
            "seconds": medians[share],
            "ratio": medians[share] / medians[1.0],
        }
        for share in SHARES
    ]


def draw(args: argparse.Namespace) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The head's weight, hidden states and targets."""
    keys = jax.random.split(jax.random.key(0), 3)
    base = jax.random.normal(keys[0], (args.width, args.vocabulary), jnp.dtype(args.dtype)) * args.width**-0.5
    hidden = jax.random.normal(keys[1], (args.rows, args.tokens, args.width), jnp.dtype(args.dtype))
    return base, hidden, jax.random.randint(keys[2], (args.rows, args.tokens), 0, args.vocabulary)


def make(targets: jax.Array, chunk: int) -> Any:
    def loss(hidden: jax.Array, weights: jax.Array, base: jax.Array) -> jax.Array:
        return chunked_loss(lambda base, _, part: part @ base, base, {}, hidden, targets, weights, chunk)

    return jax.jit(jax.value_and_grad(loss))


def answers(rows: int, tokens: int, share: float) -> jax.Array:
    is_answer = np.arange(tokens) >= tokens - round(share * tokens)
    return jnp.asarray(np.tile(is_answer, (rows, 1)), jnp.float32)


def table(rows: list[dict[str, float]]) -> str:
    lines = ["| supervised | chunks | GFLOP | ms | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        numbers = f"{row['chunks']:.0f} | {row['gflops']:.1f} | {1e3 * row['seconds']:.1f} | {row['ratio']:.2f}"
        lines.append(f"| {row['share']:.0%} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
