"""A gated MLP with LoRA on a GPU: XLA's program, and the kernels of `engine.kernels: fused`. Time, memory, error.

    python benchmarks/gated_mlp_gpu.py                                            # the sizes of a 1.2B model
    python benchmarks/gated_mlp_gpu.py --tokens 8192 --width 4096 --inner 14336   # of a 7.2B model
    python benchmarks/gated_mlp_gpu.py --blocks 32x64x2x3 64x64x4x2x2048   # rows, columns, warps, stages, programs
    python benchmarks/gated_mlp_gpu.py --small                                    # tests the script, anywhere

`block` is the whole MLP, forward and backward, with gradients of the input and of three adapters. `forward` and
`backward` are only the part between the products with the base, with the share of the memory's speed that it reaches
if every wide array is read or written once. Errors are the worst result's, relative to its largest value, with
the same numbers in float32.

Legend: M tokens, D width, F inner width, R rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from trillora.engine.kernels.gated_mlp import Blocks, Form, Middle, middle

SCALE = 2.0
BYTES_PER_SECOND = 4.8e12  # of an H200's memory
NUM_WIDE = {"forward": 3, "backward": 7}  # arrays [M, F] read or written; dg and du are read again, for two products
Adapters = list[tuple[jax.Array, jax.Array]]  # A [R, D] and B [E, R] of gate, up and down


def separate(x: jax.Array, weights: list[jax.Array], adapters: Adapters) -> jax.Array:
    """Each layer by itself, as with `engine.kernels: xla`."""

    def layer(x: jax.Array, n: int) -> jax.Array:
        a, b = adapters[n]
        return x @ weights[n].T + (x @ a.astype(x.dtype).T) @ (b * SCALE).astype(x.dtype).T

    return layer(jax.nn.silu(layer(x, 0)) * layer(x, 1), 2)


def fused(blocks: Blocks, interpret: bool) -> Callable[..., jax.Array]:
    def block(x: jax.Array, weights: list[jax.Array], adapters: Adapters) -> jax.Array:
        (ag, bg), (au, bu), (ad, bd) = ((a.astype(x.dtype), (b * SCALE).astype(x.dtype)) for a, b in adapters)
        low = x @ jnp.concatenate([ag, au]).T
        given = Middle(x @ weights[0].T, x @ weights[1].T, low, bg, bu, ad)
        h, ld = middle(given, Form("silu", interpret=interpret, blocks=blocks))
        return h @ weights[2].T + ld @ bd.T

    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16, choices=(16, 32, 64))
    parser.add_argument("--blocks", nargs="*", default=["32x64x2x3"])
    parser.add_argument("--what", nargs="*", default=["block", "forward", "backward"])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.tokens, args.width, args.inner, args.repeat = 64, 32, 128, 1
    interpret = jax.default_backend() == "cpu"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.tokens} x {args.width} x {args.inner}")
    print("| what | way | ms | of memory's speed | temporary MiB | error |\n|---|---|---|---|---|---|", flush=True)
    for what, way, function, given, reference in cases(args, interpret):
        if what not in args.what:
            continue
        try:
            compiled = jax.jit(function).lower(*given).compile()
            found = compiled(*given)
            ms = 1e3 * seconds(compiled, given, args.repeat)
            wide = 2 * args.tokens * args.inner * NUM_WIDE.get(what, 0)
            share = f"{wide / BYTES_PER_SECOND / ms * 1e3:.0%}" if wide else ""
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"| {what} | {way} | {ms:.3f} | {share} | {temporary:.0f} | {error(found, reference):.1e} |", flush=True
            )
        except Exception:  # the next way may work
            traceback.print_exc(limit=-2)


def cases(args: argparse.Namespace, interpret: bool) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """What, way, function, arguments, and the results in float32."""
    M, D, F, R = args.tokens, args.width, args.inner, args.rank
    all_blocks = {text: Blocks(*map(int, text.split("x"))) for text in args.blocks}

    def draw(number: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 0.02) -> jax.Array:
        return (scale * jax.random.normal(jax.random.key(number), shape)).astype(dtype)

    def with_gradients(block: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(x: jax.Array, dy: jax.Array, weights: list[jax.Array], adapters: Adapters) -> Any:
            y, pull = jax.vjp(lambda x, adapters: block(x, weights, adapters), x, adapters)
            return y, pull(dy)

        return run

    sizes = [(D, F), (D, F), (F, D)]  # inputs and outputs of gate, up and down
    weights = [draw(n, outputs, inputs) for n, (inputs, outputs) in enumerate(sizes)]
    adapters = [
        (draw(10 + n, R, inputs, dtype=jnp.float32), draw(20 + n, outputs, R, dtype=jnp.float32))
        for n, (inputs, outputs) in enumerate(sizes)
    ]
    given = (draw(30, M, D, scale=1), draw(31, M, D, scale=1), weights, adapters)
    expected = in_float32(with_gradients(separate), given)
    yield "block", "xla", with_gradients(separate), given, expected
    for text, blocks in all_blocks.items():
        yield "block", f"fused {text}", with_gradients(fused(blocks, interpret)), given, expected

    wide, thin = (draw(40 + n, M, F, scale=1) for n in (0, 1)), (draw(43, F, R), draw(44, F, R), draw(45, R, F))
    inner, gradients = Middle(*wide, draw(42, M, 2 * R), *thin), (draw(46, M, F, scale=1), draw(47, M, R, scale=1))
    plain = Form("silu", "xla")
    forms = {f"kernel {text}": Form("silu", interpret=interpret, blocks=blocks) for text, blocks in all_blocks.items()}
    for what, function, arguments in (("forward", forward, (inner,)), ("backward", backward, (inner, gradients))):
        results = in_float32(function(plain), arguments)
        for name, form in {"xla": plain, **forms}.items():
            yield what, name, function(form), arguments, results


def forward(form: Form) -> Callable[..., Any]:
    return lambda given: middle(given, form)


def backward(form: Form) -> Callable[..., Any]:
    return lambda given, gradients: jax.vjp(forward(form), given)[1](gradients)


def in_float32(function: Callable[..., Any], given: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*jax.tree.map(lambda array: array.astype(jnp.float32), given))


def error(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(one - other).max() / jnp.abs(other).max()) for one, other in pairs)


def seconds(compiled: Any, given: Any, repeat: int) -> float:
    """The median of several groups of calls."""
    taken = []
    for _ in range(repeat):
        before = time.perf_counter()
        for _ in range(repeat):
            result = compiled(*given)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - before) / repeat)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
