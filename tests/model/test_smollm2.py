"""A real chat model: its logits equal transformers', its training losses equal PyTorch with PEFT.

`make test` trains only its first layers, with their real weights: all 30 take half a minute.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from dose import FULL
from peft_reference import peft_losses
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trillora.devices.mesh import replicated
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import find_model, load_config, load_tokenizer
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.step.adapter_spec import lora_spec
from trillora.training.trainer import train

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folder() -> Path:
    return find_model("smollm2")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model to train: the first four layers, or all of them at full dose."""
    if FULL:
        return folder
    short = tmp_path_factory.mktemp("smollm2") / "first-layers"
    shutil.copytree(folder, short, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    dropped = tuple(f"model.layers.{n}." for n in range(NUM_LAYERS, config["num_hidden_layers"]))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    assert len(kept) < len(tensors) / 4
    save_file(kept, short / "model.safetensors", metadata={"format": "pt"})
    return short


def test_logits_equal_transformers(folder: Path) -> None:
    text = "The whale rose out of the sea, and the crew of the Pequod fell silent."
    ids = np.array([load_tokenizer(folder)(text)["input_ids"]], np.int32)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids).long()).logits
    model = CausalLM(load_config(folder))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    base = load_weights(folder, model.module, model.layout, {key: replicated(mesh) for key in model.layout})
    logits = jax.jit(model.logits)(base, {}, {"tokens": jnp.asarray(ids)})
    # Logits are up to 30; float32 sums over 30 layers in another order differ in the fifth digit.
    np.testing.assert_allclose(np.asarray(logits), expected.numpy(), atol=1e-3)


@pytest.mark.usefixtures("optimized")
def test_first_steps_equal_pytorch_and_peft(trained: Path, tmp_path: Path) -> None:
    num_steps = 10 if FULL else 3  # the third depends on the gradients of both matrices of LoRA
    tiny_run.write_chats(tmp_path / "chats.jsonl", num_rows=40)
    recipe = load_recipe(
        {
            "model": str(trained),
            "data": {"path": str(tmp_path / "chats.jsonl"), "pack": False},
            "train": {"sequence_length": 64, "batch_size": 2, "steps": num_steps, "schedule": "constant"},
            "lora": {"rank": 8, "alpha": 16},
            "hardware": {"devices": 1},
        }
    )
    ours = train(recipe, tmp_path / "run").losses
    layout = CausalLM(load_config(trained), lora=lora_spec(recipe.lora)).adapter_layout
    theirs = peft_losses(recipe, trained, tiny_run.batches_of(recipe, trained), layout, num_steps)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert ours[-1] < ours[0]
