"""What LoRA adds to a block of two wide layers (gate and up) on a GPU, in several ways to write the same sum.

    python benchmarks/lora_gpu.py [--tokens 16384 --inputs 2048 --outputs 8192 --rank 16]

Forward and backward with respect to the input and both adapters. `adds in products` counts the products that add to
another array in the same kernel (cuBLAS with beta = 1), in the compiled program. Prints a table.

| name | y |
|---|---|
| base | x W, without LoRA |
| scaled after | x W + ((x A) B) * s |
| scaled B | x W + (x A) (s B) |
| barrier | the same, with x W kept apart until it is added to |
| joined | [x, x A] [W; s B], with W and B copied into one matrix in every step |
| joined, kept | the same, with one matrix that is an argument: the best that a copy could give |

Legend: M tokens, D inputs, E outputs, R rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SCALE = 2.0
Arrays = Any


def base(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, joined: jax.Array) -> jax.Array:
    return x @ w.T


def scaled_after(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, joined: jax.Array) -> jax.Array:
    return x @ w.T + (x @ a.astype(x.dtype).T) @ b.astype(x.dtype).T * SCALE


def scaled_b(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, joined: jax.Array) -> jax.Array:
    return x @ w.T + (x @ a.astype(x.dtype).T) @ (b * SCALE).astype(x.dtype).T


def barrier(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, joined: jax.Array) -> jax.Array:
    y = jax.lax.optimization_barrier(x @ w.T)
    return y + (x @ a.astype(x.dtype).T) @ (b * SCALE).astype(x.dtype).T


@jax.custom_vjp
def _joined(x: jax.Array, a: jax.Array, b: jax.Array, joined_EN: jax.Array) -> jax.Array:
    return _joined_forward(x, a, b, joined_EN)[0]


def _joined_forward(x: jax.Array, a: jax.Array, b: jax.Array, joined_EN: jax.Array) -> tuple[jax.Array, Arrays]:
    u = x @ a.T
    return jnp.concatenate([x, u], axis=1) @ joined_EN.T, (x, u, a, joined_EN)


def _joined_backward(kept: Arrays, dy: jax.Array) -> Arrays:
    x, u, a, joined_EN = kept
    both = dy @ joined_EN  # the gradients of x and of u, in one pass over dy
    dx, du = both[:, : x.shape[1]], both[:, x.shape[1] :]
    return dx + du @ a, du.T @ x, dy.T @ u, jnp.zeros_like(joined_EN)


_joined.defvjp(_joined_forward, _joined_backward)


def joined(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, kept: jax.Array) -> jax.Array:
    small = (b * SCALE).astype(x.dtype)
    return _joined(x, a.astype(x.dtype), small, jax.lax.stop_gradient(jnp.concatenate([w, small], axis=1)))


def joined_kept(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, kept: jax.Array) -> jax.Array:
    return _joined(x, a.astype(x.dtype), (b * SCALE).astype(x.dtype), kept)


KINDS: dict[str, Callable[..., jax.Array]] = {
    "base": base,
    "scaled after": scaled_after,
    "scaled B": scaled_b,
    "barrier": barrier,
    "joined": joined,
    "joined, kept": joined_kept,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    rows = []
    for name, layer in KINDS.items():
        try:
            rows.append(measure(name, layer, args))
            print(json.dumps(rows[-1]), flush=True)
        except Exception:
            traceback.print_exc(limit=-2)
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def measure(name: str, layer: Callable[..., jax.Array], args: argparse.Namespace) -> dict[str, Any]:
    M, D, E, R = args.tokens, args.inputs, args.outputs, args.rank

    def draw(number: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return (0.02 * jax.random.normal(jax.random.key(number), shape)).astype(dtype)

    x, dy, w = draw(0, M, D), draw(1, M, E), [draw(2, E, D), draw(3, E, D)]
    a = [draw(n, R, D, dtype=jnp.float32) for n in (4, 5)]
    b = [draw(n, E, R, dtype=jnp.float32) for n in (6, 7)]
    kept = [jnp.concatenate([one, (SCALE * two).astype(one.dtype)], axis=1) for one, two in zip(w, b, strict=True)]

    def step(x: jax.Array, dy: jax.Array, a: Arrays, b: Arrays, w: Arrays, kept: Arrays) -> Arrays:
        def block(x: jax.Array, a: Arrays, b: Arrays) -> jax.Array:
            gate, up = (layer(x, w[n], a[n], b[n], kept[n]) for n in (0, 1))
            return jax.nn.silu(gate) * up

        out, backward = jax.vjp(block, x, a, b)
        return out, backward(dy)

    compiled = jax.jit(step).lower(x, dy, a, b, w, kept).compile()
    seconds = []
    for _ in range(10):
        before = time.perf_counter()
        for _ in range(10):
            result = compiled(x, dy, a, b, w, kept)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - before) / 10)
    text = compiled.as_text()
    return {
        "name": name,
        "ms": round(statistics.median(seconds) * 1e3, 3),
        "adds in products": text.count('"beta":1'),
        "products": text.count("__cublas$") + text.count("__triton_gemm"),
        "temporary MiB": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
        "norm of the gradient": f"{float(jnp.linalg.norm(result[1][0].astype(jnp.float32))):.6g}",
    }


if __name__ == "__main__":
    main()
