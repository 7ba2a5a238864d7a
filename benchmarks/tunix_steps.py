"""Tunix' own LoRA steps, compiled for a TPU slice that is not attached and simulated like ours.

    python -m pip install --no-deps --target TUNIX google-tunix==0.1.7 flax==0.12.8 qwix==0.1.8 clu einops etils \\
        google-metrax humanize jaxtyping msgpack orbax-checkpoint pandas perfetto sentencepiece simplejson \\
        tensorboardX tensorstore treescope wadler-lindig wrapt
    PYTHONPATH=TUNIX JAX_PLATFORMS=cpu python benchmarks/tunix_steps.py Llama-3.2-1B

The model, LoRA (by qwix), loss and training step are Tunix' code, with its default options: no rematerialization, no
flash attention, fsdp over all devices. Here are only abstract arrays in the place of weights, in bfloat16, and rank 16
on all linear layers, as in benchmarks/tpu_steps.py. Prints one JSON line. Needs libtpu and therefore x86-64 Linux.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trillora.devices.chips import CHIPS
from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT, find_slice

# Family in Tunix, its configuration, slice, sequences, tokens of each: the shapes of benchmarks/tpu_steps.py.
CASES = {
    "Llama-3.2-1B": ("llama3", "Llama3", "llama3p2_1b", "v5e-8", 8, 2048),
    "Llama-3.1-8B": ("llama3", "Llama3", "llama3p1_8b", "v6e-8", 8, 2048),
    "Qwen3-0.6B": ("qwen3", "Qwen3", "qwen3_0p6b", "v5e-8", 8, 2048),
    "Gemma-3-270M": ("gemma3", "Gemma3", "gemma3_270m", "v5e-8", 64, 512),
}
LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
RANK, ALPHA = 16, 32.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CASES)
    args = parser.parse_args()
    os.environ.update(COMPILE_ONLY_ENVIRONMENT)
    print(json.dumps({"model": args.model, **measure(*CASES[args.model])}), flush=True)
    os._exit(0)  # and with it a compilation that is no longer needed


def measure(family: str, kind: str, config: str, slice_name: str, num_rows: int, num_tokens: int) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies

    from trillora.preflight.early_exit import compile_until_layout
    from trillora.preflight.hlo.simulate import simulate

    place = find_slice(slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    jax.devices = lambda *_: list(topology.devices)  # Tunix shards activations unless the first device is a CPU
    mesh = topologies.make_mesh(topology, (place.num_devices, 1), ("fsdp", "tp"))
    with mesh:
        lowered = lower(family, kind, config, mesh, num_rows, num_tokens)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = compile_until_layout(
            lambda **more: lowered.compile(compiler_options=more), Path(folder) / "dump", whole=False
        )
    found = {"slice": slice_name, "sequences": num_rows, "tokens": num_tokens, "gib": round(result.needed / 2**30, 2)}
    if result.program is not None:
        step = simulate(result.program, CHIPS[place.chip], place.num_devices)
        found |= {"seconds": round(step.seconds, 4), "kernel_seconds": round(step.kernel_seconds, 4)}
        found |= {"exposed_interconnect_seconds": round(step.exposed_interconnect_seconds, 4), "notes": step.warnings}
    packages = ("google-tunix", "flax", "qwix", "jax", "libtpu")
    return found | {"versions": {name: importlib.metadata.version(name) for name in packages}}


def lower(family: str, kind: str, config: str, mesh: Any, num_rows: int, num_tokens: int) -> Any:
    """Tunix' training step, on arrays that are shapes with shardings."""
    import jax
    import jax.numpy as jnp
    import optax
    import qwix
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec
    from tunix.sft import peft_trainer, utils

    code = __import__(f"tunix.models.{family}.model", fromlist=[kind])

    def build() -> Any:
        model = getattr(code, kind)(getattr(code.ModelConfig, config)(), rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
        provider = qwix.LoraProvider(module_path=LINEAR, rank=RANK, alpha=ALPHA)
        model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
        return model, nnx.Optimizer(model, optax.adamw(2e-4), wrt=nnx.LoRAParam)

    graph, state = nnx.split(nnx.eval_shape(build))
    specs = nnx.get_partition_spec(state)
    state = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        specs,
    )
    trainer = SimpleNamespace(
        gen_model_input_fn=lambda batch: {
            **batch,
            "positions": utils.build_positions_from_mask(batch["input_mask"]),
            "attention_mask": utils.make_causal_attn_mask(batch["input_mask"]),
        },
        loss_fn=peft_trainer._default_loss_fn,
        _lora_enabled=True,
        _has_aux=False,
    )

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = peft_trainer.PeftTrainer._train_step(trainer, model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    kinds = {"input_tokens": jnp.int32, "input_mask": jnp.bool_}
    batch = {name: jax.ShapeDtypeStruct((num_rows, num_tokens), dtype, sharding=rows) for name, dtype in kinds.items()}
    return jax.jit(step, donate_argnums=0).lower(state, batch)


if __name__ == "__main__":
    main()
