"""Memory and kernels of our step on a GPU that is not here: XLA compiles it, nothing runs.

    pip install --no-deps --target build/cuda jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2     # jax's own version
    PYTHONPATH=build/cuda python benchmarks/gpu_compile.py h200.txtpb engine.kernels=fused engine.remat=none

`h200.txtpb` describes the GPU; XLA's repository has such files in `xla/backends/gpu/target_config/specs`. To compile
cuDNN's attention, cuDNN would be needed: attention is XLA's here, and sequences are short. So only the differences
between two settings mean something. Products are cuBLAS's: without a GPU, XLA cannot find out which of its own kernels
would be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from gpu_step import SHAPES

FLAGS = " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="description of the GPU")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_intermixed_args()
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FLAGS
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(compile_step(args)), flush=True)


def compile_step(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies
    from transformers import LlamaConfig

    from trillora.devices.mesh import MeshShape, make_mesh
    from trillora.recipe.load import load_recipe
    from trillora.recipe.resolve import StepSettings, given_settings
    from trillora.recipe.schema import MeshSection, stages_of
    from trillora.step.build import assemble

    target = args.target.read_text()
    gpu = topologies.get_topology_desc("1x1x1", "cuda", target_config=target, topology="1x1x1").devices
    train = {"sequence_length": args.tokens, "batch_size": args.rows, "steps": 10}
    source = {"model": "random", "data": "random.jsonl", "lora": {"rank": 16, "alpha": 32}, "train": train}
    [stage] = stages_of(load_recipe(source, args.overrides))
    fixed = {"dtype": "bfloat16", "layers": "unroll", "attention": "xla", "loss_chunk": 1024, "remat": "none"}
    fixed |= {"backend": "gpu", "num_devices": 1, "mesh": MeshSection(), "micro_batch_size": args.rows}
    settings = StepSettings(**{**fixed, **given_settings(stage.recipe)})
    sizes = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    config = LlamaConfig(**sizes, max_position_embeddings=args.tokens)
    started = time.perf_counter()
    step = assemble(stage.recipe, settings, config, make_mesh(gpu, MeshShape()), 10)
    compiled = step.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    return {
        "overrides": args.overrides,
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 2),
        "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "kernels": entry.count(" fusion(") + entry.count(" custom-call("),
        "cublas": text.count('"__cublas$gemm"') + text.count('"__cublas$lt$matmul"'),
        "cublas_fp8": text.count('"__cublas$lt$matmul$f8"'),
        "seconds": round(time.perf_counter() - started, 1),
        "device": gpu[0].device_kind,
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    main()
