"""Registers, shared memory and spills of the kernels of `engine.kernels.gated_mlp`, compiled for Hopper without a GPU.

    pip install --target build/triton triton
    PYTHONPATH=build/triton python benchmarks/gated_mlp_compile.py [--blocks 32x64x4x2] [--rows 16384 --inner 8192]

Takes the Triton module that jax emits and compiles it with a Triton of its own, which may be another version than the
one in XLA. Nothing runs, so there are no times: `blocks` is how many fit on one processor at once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import triton
from gated_mlp_gpu import backward, forward
from jax._src.pallas.triton import lowering
from triton.backends.compiler import GPUTarget

from trillora.engine.kernels.gated_mlp import ACTIVATIONS, RANKS, Blocks, Form, Middle

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin"
REGISTERS, SHARED_BYTES, WARPS = 65536, 227 * 2**10, 64  # of a processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--blocks", default="32x64x4x2", help="rows x columns x warps x stages")
    args = parser.parse_args()
    blocks = Blocks(*map(int, args.blocks.split("x")))
    print(f"Triton {triton.__version__}, jax {jax.__version__}, {args.rows} x {args.inner}, {args.blocks}")
    print("| activation | rank | kernel | registers | shared KiB | spilled bytes | blocks |\n|" + "---|" * 7)
    for activation, rank in ((a, r) for a in ACTIVATIONS for r in RANKS):
        M, F, R = args.rows, args.inner, rank
        shapes = [(M, F), (M, F), (M, 2 * R), (F, R), (F, R), (R, F), (M, F), (M, R)]
        *given, dh, dld = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        form = Form(activation, blocks=blocks)
        for name, function, arguments in (
            ("forward", forward(form), (Middle(*given),)),
            ("backward", backward(form), (Middle(*given), (dh, dld))),
        ):
            row = measured(module_of(function, *arguments), blocks)
            print(f"| {activation} | {rank} | {name} | " + " | ".join(map(str, row)) + " |", flush=True)


def module_of(function: Any, *arguments: Any) -> str:
    """The Triton module of the one kernel in a function."""
    found, lower = [], lowering.lower_jaxpr_to_triton_module

    def remember(*args: Any, **kwargs: Any) -> Any:
        result = lower(*args, **kwargs)
        found.append(result.module.operation.get_asm())
        return result

    lowering.lower_jaxpr_to_triton_module = remember
    try:
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    finally:
        lowering.lower_jaxpr_to_triton_module = lower
    (module,) = found
    return module


def measured(module: str, blocks: Blocks) -> tuple[int, int, int, int]:
    """Registers of a thread, KiB of shared memory, spilled bytes, blocks per processor."""
    with tempfile.TemporaryDirectory() as folder:
        source, ptx = Path(folder, "kernel.ttir"), Path(folder, "kernel.ptx")
        source.write_text(module)
        options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
        compiled = triton.compile(str(source), target=GPUTarget("cuda", 90, 32), options=options)
        ptx.write_text(compiled.asm["ptx"])
        said = ""
        for ptxas in sorted(PTXAS.glob("ptxas*")):  # an older one does not know newer versions of PTX
            command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(ptx), "-o", "/dev/null"]
            said += subprocess.run(command, capture_output=True, text=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", said)[-1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    shared = compiled.metadata.shared
    of_block = -(-registers // 8) * 8 * 32 * blocks.num_warps
    fitting = (
        REGISTERS // of_block,
        SHARED_BYTES // (shared + 1024),
        WARPS // blocks.num_warps,
    )
    return registers, shared // 2**10, spilled, min(fitting)


if __name__ == "__main__":
    main()
