"""Trains tiny fixed recipes and prints their losses; `--write` records them in tests/golden.

    python tools/golden.py --write    writes tests/golden/cpu-aarch64.json, or gpu-h200.json on a machine with that GPU

tests/prove/test_golden.py compares new losses with the recorded ones, so that a change of the numbers is noticed and
has to be recorded on purpose. All random numbers come from numpy, whose bits are the same on every machine. XLA's
optimizations are on, as in a real run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
RECIPES = ("stages", "experts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the losses in tests/golden")
    parser.add_argument("--backend", choices=("cpu", "gpu"), help="default: the one that jax chooses")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    args = parser.parse_args()
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        os.environ.pop(name, None)
    if args.backend == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), RECIPES if args.write else args.recipes)
    if args.write:
        GOLDEN.mkdir(exist_ok=True)
        file = GOLDEN / f"{machine_name()}.json"
        file.write_text(json.dumps({"jax": version("jax"), "losses": found["losses"]}, indent=1) + "\n", "utf-8")
        print(f"wrote {file}", file=sys.stderr)
    print(json.dumps({"machine": machine_name(), **found}))


def machine_name() -> str:
    """cpu-x86_64, gpu-h200: one file of losses each, because kernels differ."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu-{platform.machine()}"
    return f"{device.platform}-{device.device_kind.removeprefix('NVIDIA ').lower().replace(' ', '-')}"


def measure(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The losses of each recipe, and the digests of two adapters: one of a run without interruption, one of a resumed
    run."""
    import tiny_run
    from shared_steps import sharing

    from trillora.recipe.load import load_recipe
    from trillora.training.trainer import train

    write_inputs(folder)
    recipes = golden_recipes(folder)
    with sharing():  # the resumed run has the steps of the first
        losses = {name: list(train(load_recipe(recipes[name]), folder / name).losses) for name in names}
        name = "stages"
        resumed = folder / "resumed"
        shutil.copytree(folder / name, resumed)
        shutil.rmtree(resumed / "adapter")
        tiny_run.checkpoints_of(resumed).remove_after(4)
        train(load_recipe(recipes[name]), resumed)
    return {"losses": losses, "whole": adapter_digest(folder / name), "resumed": adapter_digest(resumed)}


def write_inputs(folder: Path) -> None:
    """A Llama and a Qwen3-MoE model with weights from numpy, and chats."""
    import numpy as np
    import tiny_run
    from chat_tokenizers import chat_tokenizer
    from safetensors.numpy import load_file, save_file
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": len(chat_tokenizer("chatml")),
        "max_position_embeddings": 256,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    tiny_run.write_chats(folder / "chats.jsonl", 40)
    for name, config in (("llama", LlamaConfig(**sizes)), ("experts", Qwen3MoeConfig(**sizes, **experts))):
        tiny_run.write_model(folder / name, config)
        file = folder / name / "model.safetensors"
        generator = np.random.default_rng(0)
        tensors = {
            key: array if array.ndim == 1 else generator.uniform(-0.1, 0.1, array.shape).astype(np.float32)
            for key, array in sorted(load_file(file).items())
        }
        save_file(tensors, file, metadata={"format": "pt"})


def golden_recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """Together: packing and its absence, dropout, stages, micro-batches, 8-bit Lion, AdamW and experts."""
    import tiny_run

    def recipe(model: str, **options: Any) -> dict[str, Any]:
        name = {"name": str(folder / model), "dtype": "float32"}
        return tiny_run.recipe(folder, model=name, lora={"dropout": 0.1}, train=options)

    lion = {"optimizer": "lion-8bit", "learning_rate": 1e-3, "schedule": "cosine"}
    stages = recipe("llama", **lion, checkpoint_every=2, keep_checkpoints=9)
    del stages["train"]["steps"]
    data = stages.pop("data")
    stages["stages"] = [
        {"name": "first", "data": {**data, "pack": False}, "steps": 5, "micro_batch_size": 4},
        {"name": "second", "data": data, "steps": 4, "batch_size": 4, "optimizer_state": "restart"},
    ]
    return {"stages": stages, "experts": recipe("experts", steps=8)}


def adapter_digest(run: Path) -> str:
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
