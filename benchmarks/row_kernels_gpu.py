"""RMSNorm, and loss with its gradient, on a GPU: XLA's programs, and the kernels of `engine.kernels: fused`.

    python benchmarks/row_kernels_gpu.py                                 # the sizes of a 1.2B model
    python benchmarks/row_kernels_gpu.py --width 4096 --tokens 8192 --vocabulary 32768
    python benchmarks/row_kernels_gpu.py --small                         # tests the script, anywhere

Time, the share of the memory's speed if every array is read and written once, and the largest difference from the same
in float32, relative to the largest value.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from gated_mlp_gpu import BYTES_PER_SECOND, error, seconds

from trillora.engine.kernels.cross_entropy import Kernel, loss_and_gradient
from trillora.engine.kernels.rms_norm import Norm, rms_norm

LOSS_FORMS = (None, 32768, 16384, 8192, 4096)  # columns of a block; None is the default
IN_PLACE = 20  # calls in one program
NORM_FORMS = ((2048, 1), (2048, 2), (2048, 4), (4096, 2), (4096, 4), (8192, 8))  # numbers of a tile, warps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk of the loss")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.tokens, args.width, args.chunk, args.vocabulary, args.repeat = 16, 64, 4, 300, 1
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}")
    print("| what | way | ms | of memory's speed | error |\n|---|---|---|---|---|", flush=True)
    for what, way, function, given, num_bytes in cases(args):
        try:
            compiled, expected = jax.jit(function), jax.jit(function)(*jax.tree.map(in_float32, given))
            worst = error(compiled(*given), expected)
            timed = jax.jit(in_place(function)) if what == "loss" else compiled
            ms = 1e3 * seconds(timed, given, args.repeat) / (IN_PLACE if what == "loss" else 1)
            share = num_bytes / BYTES_PER_SECOND / ms * 1e3
            print(f"| {what} | {way} | {ms:.3f} | {share:.0%} | {worst:.1e} |", flush=True)
        except Exception:  # the next way may work
            traceback.print_exc(limit=-2)


def in_place(function: Any) -> Any:
    """Gradients take the place of logits several times, as they do once in a step; otherwise they would be copied."""
    return lambda logits, targets: jax.lax.fori_loop(
        0, IN_PLACE, lambda _, each: function(each, targets).gradient, logits
    )


def in_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, Any, Any, int]]:
    """What, way, function, arguments, bytes that must be read and written."""
    interpret = jax.default_backend() == "cpu"

    def draw(number: int, *shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(jax.random.key(number), shape)).astype(jnp.bfloat16)

    rows = (draw(0, args.tokens, args.width), draw(1, args.tokens, args.width), draw(2, args.width))
    norms = {"xla": Norm(1e-5, kernel="xla")}
    norms |= {f"{n} x {w} warps": Norm(1e-5, interpret=interpret, numbers=n, num_warps=w) for n, w in NORM_FORMS}
    for name, norm in norms.items():
        yield "norm", name, norm_forward(norm), rows, 2 * rows[0].nbytes
    for name, norm in norms.items():
        yield "norm's gradient", name, norm_backward(norm), rows, 3 * rows[0].nbytes
    for name, norm in norms.items():
        yield "both gradients", name, norm_backward(norm, is_added=True), rows, 4 * rows[0].nbytes
    targets = jax.random.randint(jax.random.key(3), (args.chunk,), 0, args.vocabulary)
    logits = draw(4, args.chunk, args.vocabulary, scale=3.0)
    kernels = {"xla": Kernel()}
    kernels |= {f"{columns or 'default'}": Kernel("triton", interpret, columns=columns) for columns in LOSS_FORMS}
    for name, kernel in kernels.items():
        yield "loss", name, loss(kernel), (logits, targets), 2 * logits.nbytes


def norm_forward(norm: Norm) -> Any:
    return lambda x, dy, weight: rms_norm(x, weight, norm)[0]


def norm_backward(norm: Norm, *, is_added: bool = False) -> Any:
    """With `is_added`, x is also added to a later result, whose gradient is x here."""

    def run(x: jax.Array, dy: jax.Array, weight: jax.Array) -> Any:
        if is_added:
            return jax.vjp(lambda x: rms_norm(x, weight, norm), x)[1]((dy, x))
        return jax.vjp(lambda x: rms_norm(x, weight, norm)[0], x)[1](dy)

    return run


def loss(kernel: Kernel) -> Any:
    return lambda logits, targets: loss_and_gradient(logits, targets, jnp.ones(len(targets)), kernel)


if __name__ == "__main__":
    main()
