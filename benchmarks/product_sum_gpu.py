"""Sums of products on a Hopper GPU: cuBLAS, one product after the other, and our kernel for all of them.

    python benchmarks/product_sum_gpu.py                          # the layers of a 1.2B model with LoRA of rank 16
    python benchmarks/product_sum_gpu.py --shape 7b --tokens 8192
    python benchmarks/product_sum_gpu.py --small                  # tests the script, anywhere

For each sum of a decoder layer: microseconds of a call, in a row of calls that keeps the GPU busy for `--seconds`, so
that it is limited by its power as in a training step; and the mean difference from the same sum in float32. cuBLAS runs
before and after the kernel, because a GPU becomes slower as it becomes warm. `--bands` tries other orders of blocks.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from gpu_step import SHAPES

from trillora.engine.kernels.product_sum import FEW, Products, Tiles, is_supported, product_sum
from trillora.step.build import CUBLAS_OPTIONS

RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--bands", type=int, nargs="+", default=[Tiles().band])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.shape, args.tokens, args.seconds = "tiny", 16, 0.0
    device = jax.devices()[0]
    processors = getattr(device, "core_count", 0) if device.platform == "gpu" else 0
    print(f"{device.device_kind}, jax {jax.__version__}, {vars(args)}")
    print("| sum | way | us | of cuBLAS | error |\n|---|---|---|---|---|", flush=True)
    for name, (inner, width, transposed, is_added) in layer_sums(SHAPES[args.shape]).items():
        pairs, addend = operands(args.tokens, inner, width, transposed=transposed, is_added=is_added)
        exact = product_sum(*in_float32(pairs, addend), transposed=transposed, on=Products())
        ways = {f"kernel, band {band}": (Products(processors), Tiles(band=band)) for band in args.bands}
        if not is_supported(pairs, width, processors):
            ways = {}
        plain = (Products(), Tiles())
        first = 0.0
        for way, (on, tiles) in {"cuBLAS": plain, **ways, "cuBLAS again": plain}.items():
            function = functools.partial(product_sum, transposed=transposed, on=on, tiles=tiles)
            options: Any = CUBLAS_OPTIONS if processors else None
            compiled = jax.jit(function).lower(pairs, addend).compile(compiler_options=options)
            error = float(jnp.abs(compiled(pairs, addend) - exact).mean())
            taken = microseconds(functools.partial(compiled, pairs, addend), args.seconds)
            first = first or taken
            print(f"| {name} | {way} | {taken:.1f} | {taken / first:.3f} | {error:.1e} |", flush=True)


def layer_sums(shape: dict[str, Any]) -> dict[str, tuple[list[int], int, bool, bool]]:
    """By name: K of the products with the base, N, whether it is the forward pass, and whether a residual is added."""
    width, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    keys = shape.get("num_key_value_heads", heads) * shape.get("head_dim", width // heads)
    return {
        "q": ([width], width, True, False),
        "k or v": ([width], keys, True, False),
        "o, residual": ([width], width, True, True),
        "down, residual": ([inner], width, True, True),
        "gradient of q, k, v": ([width, keys, keys], width, False, False),
        "gradient of o": ([width], width, False, False),
        "gradient of gate, up": ([inner, inner], width, False, False),
    }


def operands(num_rows: int, inner: list[int], width: int, *, transposed: bool, is_added: bool) -> tuple[Any, Any]:
    """With LoRA's term last, which has zeros beyond the ranks."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(inner) + 3))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    def right(size: int) -> jax.Array:
        return draw(*((width, size) if transposed else (size, width)), scale=0.02)

    pairs = [(draw(num_rows, size), right(size)) for size in inner]
    low = draw(num_rows, FEW, scale=0.1).at[:, RANK * len(inner) :].set(0)
    return [*pairs, (low, right(FEW))], draw(num_rows, width) if is_added else None


def in_float32(*trees: Any) -> Any:
    return jax.tree.map(lambda array: array.astype(jnp.float32), trees)


def microseconds(call: Any, seconds: float) -> float:
    """Of one call: as many in a row as take this long, after ten that say how long one takes."""
    taken, count = 0.0, 10
    for _ in range(2):
        started = time.perf_counter()
        for _ in range(count - 1):
            call()
        jax.block_until_ready(call())
        taken = (time.perf_counter() - started) / count
        count = max(1, int(seconds / taken))
    return taken * 1e6


if __name__ == "__main__":
    main()
