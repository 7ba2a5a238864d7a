"""Ways to multiply rows with the matrix of their expert on a GPU: time, rate, error.

    python benchmarks/grouped_gpu.py [--tokens 16384] [--experts 32] [--choices 4] [--only triton]

The shapes are one MoE layer's gate and up projection, with LoRA. Compared are one plain matmul of the
same size (the bound), `jax.lax.ragged_dot`, jax's own Mosaic kernel, and the Triton kernels of `trillora.engine` with
several block sizes. A way that fails prints its error, and the next one runs. `--small` tests the script anywhere.
"""

from __future__ import annotations

import argparse
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trillora.engine.mixture import grouped_kernels
from trillora.engine.mixture.grouped_kernels import Blocks

RANK = 16
OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
SAMPLE = 32  # rows that are compared with the reference
Way = tuple[str, Callable[..., jax.Array], dict[str, Any] | None]  # name, function, options of the compiler


class Part(NamedTuple):
    what: str
    flops: float
    given: tuple[jax.Array, ...]
    reference: Callable[..., jax.Array]  # all of the result, or SAMPLE rows
    ways: list[Way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=4, help="experts per token")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768, help="width of an expert")
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--time-limit", type=float, default=80, help="seconds; the remaining ways are skipped")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.tokens, args.experts, args.width, args.inner = 64, 4, 64, 32
    deadline = time.perf_counter() + args.time_limit
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| what | way | ms | TFLOP/s | error |\n|---|---|---|---|---|", flush=True)
    for part in parts(args):
        expected = np.asarray(jax.jit(part.reference)(*part.given))
        for name, way, options in part.ways:
            if args.only not in name or time.perf_counter() > deadline:
                continue
            try:
                print(f"| {part.what} | {name} | {measure(part, way, options, expected)} |", flush=True)
            except Exception as error:  # the next way may work
                traceback.print_exc(limit=-2)
                print(f"| {part.what} | {name} | {type(error).__name__} | | |", flush=True)


def measure(part: Part, way: Callable[..., jax.Array], options: dict[str, Any] | None, expected: np.ndarray) -> str:
    compiled = jax.jit(way).lower(*part.given).compile(options)
    found = compiled(*part.given)
    if found.shape[0] > expected.shape[0]:
        found = found[:: found.shape[0] // SAMPLE]
    error = np.abs(np.asarray(found, np.float32) - expected).max() / np.abs(expected).max()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        jax.block_until_ready([compiled(*part.given) for _ in range(8)][-1])
        times.append((time.perf_counter() - started) / 8)
    return f"{min(times) * 1e3:.3f} | {part.flops / min(times) / 1e12:.0f} | {error:.1e}"


def parts(args: argparse.Namespace) -> Iterator[Part]:
    num_rows, width, outputs, num_experts = args.tokens * args.choices, args.width, 2 * args.inner, args.experts
    generator = np.random.default_rng(0)
    experts = generator.choice(num_experts, num_rows, p=generator.dirichlet(np.full(num_experts, 20.0)))
    sizes = jnp.asarray(np.bincount(experts, minlength=num_experts), jnp.int32)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(next(keys))

    rows, stored = normal(num_rows, width), normal(num_experts, outputs, width)
    gradient, inner = normal(num_rows, outputs), normal(num_rows, RANK)
    a, b = normal(num_experts, RANK, width), normal(num_experts, RANK, outputs)
    interpret = jax.default_backend() == "cpu"
    product = functools.partial(grouped_kernels.product, interpret=interpret)
    outer = functools.partial(grouped_kernels.outer_products, interpret=interpret)
    ragged = lambda x, w, s: jax.lax.ragged_dot(x, w.swapaxes(1, 2), s)  # noqa: E731
    by_weights, thin = 2 * num_rows * width * outputs, 2 * num_rows * width * RANK

    def triton(blocks: list[tuple[int, ...]], **options: Any) -> list[Way]:
        return [(f"triton {one}", functools.partial(product, blocks=Blocks(*one), **options), None) for one in blocks]

    def with_low_rank(x: Any, w: Any, s: Any, i: Any, b: Any, *, blocks: Blocks) -> jax.Array:
        return product(x, w, s, (i, b), transposed=True, blocks=blocks)

    yield Part(
        "forward",
        by_weights,
        (rows, stored, sizes),
        lambda x, w, s: of_sample(x, w.swapaxes(1, 2), s),
        [
            ("one plain product: a bound", lambda x, w, s: x @ w[0].T, None),
            ("ragged_dot", ragged, None),
            ("ragged_dot, fused by XLA", ragged, {"xla_gpu_experimental_use_ragged_dot_fusion": True}),
            *triton(BLOCKS, transposed=True),
            *(mosaic(*one, transposed=True) for one in MOSAIC),
        ],
    )
    yield Part(
        "backward to rows",
        by_weights,
        (gradient, stored, sizes),
        of_sample,
        [
            ("one plain product: a bound", lambda x, w, s: x @ w[0], None),
            *triton(BLOCKS[:4]),
            *(mosaic(*one, transposed=False) for one in MOSAIC[:2]),
        ],
    )
    yield Part(
        "forward and low rank",
        by_weights,
        (rows, stored, sizes, inner, b),
        lambda x, w, s, i, b: of_sample(x, w.swapaxes(1, 2), s, i, b),
        [(f"triton {one}", functools.partial(with_low_rank, blocks=Blocks(*one)), None) for one in BLOCKS[:3]],
    )
    yield Part(
        "rows by A",
        thin,
        (rows, a, sizes),
        lambda x, a, s: of_sample(x, a.swapaxes(1, 2), s),
        [*triton(THIN, transposed=True), ("all experts, one product", lambda x, a, s: all_experts(x, a, s), None)],
    )
    yield Part(
        "gradient of A",
        thin,
        (inner, rows, sizes),
        one_by_one,
        [
            ("ragged_dot", lambda x, y, s: jax.lax.ragged_dot_general(x, y, s, OUTER), None),
            *((f"triton {one}", functools.partial(outer, blocks=Blocks(*one)), None) for one in OUTERS),
        ],
    )
    order = jnp.asarray(generator.permutation(num_rows), jnp.int32)

    def added(x: jax.Array, order: jax.Array) -> jax.Array:
        return jnp.zeros((args.tokens, width), x.dtype).at[order // args.choices].add(x)

    def summed(x: jax.Array, order: jax.Array) -> jax.Array:
        return x[jnp.argsort(order)].reshape(args.tokens, args.choices, width).sum(1)

    yield Part(
        "rows to tokens",
        num_rows * width,
        (rows, order),
        lambda x, order: summed(x.astype(jnp.float32), order),
        [("scatter and add", added, None), ("gather and sum", summed, None)],
    )


def of_sample(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *low_rank: jax.Array) -> jax.Array:
    """Some rows, each with the matrix of its expert."""
    sample = jnp.arange(0, rows.shape[0], rows.shape[0] // SAMPLE)
    expert = jnp.searchsorted(jnp.cumsum(sizes), sample, side="right")

    def products(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("mi,mio->mo", rows[sample].astype(jnp.float32), weights[expert].astype(jnp.float32))

    return products(rows, weights) + (products(*low_rank) if low_rank else 0)


def all_experts(rows: jax.Array, a_ERI: jax.Array, sizes: jax.Array) -> jax.Array:
    """All experts' products, of which one is kept for each row."""
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
    out = (rows @ a_ERI.reshape(-1, a_ERI.shape[2]).T).reshape(rows.shape[0], *a_ERI.shape[:2])
    return jnp.take_along_axis(out, expert[:, None, None], axis=1)[:, 0]


def one_by_one(left_MI: jax.Array, right_MO: jax.Array, sizes: jax.Array) -> jax.Array:
    """The outer products of one expert after the other, from all rows with other experts' rows set to 0."""
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(left_MI.shape[0]), side="right")

    def of(number: jax.Array) -> jax.Array:
        mine = jnp.where((expert == number)[:, None], left_MI, 0)
        return jnp.dot(mine.T, right_MO, preferred_element_type=jnp.float32)

    return jax.lax.map(of, jnp.arange(sizes.shape[0]))


BLOCKS = [  # rows, outputs, inputs, warps, stages
    (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 8, 3),
    (128, 128, 32, 4, 5),
]
THIN = [(64, 16, 128, 4, 4), (128, 16, 64, 4, 4), (32, 16, 256, 4, 3), (128, 16, 128, 8, 3)]
OUTERS = [(64, 128, 16, 4, 4), (128, 64, 16, 4, 4), (64, 64, 16, 4, 4), (32, 256, 16, 4, 4)]
MOSAIC = [(128, 128, 64, 4, 4), (128, 128, 64, 5, 2), (128, 192, 64, 4, 2), (64, 192, 64, 4, 2)]


def mosaic(block_m: int, block_n: int, block_k: int, steps: int, grid_n: int, *, transposed: bool) -> Way:
    """jax's own kernel for Hopper."""

    def way(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        found: jax.Array = ragged_dot(
            rows,
            weights,
            group_sizes=sizes,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            max_concurrent_steps=steps,
            grid_block_n=grid_n,
            transpose_rhs=transposed,
        )
        return found

    return f"mosaic {(block_m, block_n, block_k, steps, grid_n)}", way, None


if __name__ == "__main__":
    main()
