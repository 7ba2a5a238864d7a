"""Runs that train the experts of a mixture: they resume bit for bit, and PEFT computes the same with their adapter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
from architecture_checks import LOGITS, distance
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from trillora.model.adapters import fit_adapter, load_adapter
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

# Stored one by one (with a dense layer and a shared expert, for the second); stored fused, with biases.
QUICK = ("qwen3_moe",)
SLOW = ("deepseek_v3", "gpt_oss", "mixtral", "glm4_moe", "granitemoe", "olmoe")
RATE = "rate-0.01"
LORA = {"rank": 2, "alpha": 4, "targets": ["all-linear", "experts"]}
TOKENS = np.random.default_rng(0).integers(3, 200, (2, 20)).astype(np.int32)
ROUNDING = 2e-4  # root mean square: float32 in another order, over a few steps of Adam


def config_of(name: str) -> Any:
    config = tiny_models.configuration(name, 2)
    config.update({"vocab_size": len(chat_tokenizer("chatml")), "initializer_range": 0.1})
    config.max_position_embeddings = 256
    return config


@pytest.fixture(scope="module", params=[*QUICK, *(slow_case(name) for name in SLOW)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp(request.param), config_of(request.param))
    assert train(recipe_of(folder), folder / "run").stopped is None
    return folder / "run"


def recipe_of(folder: Path, **sections: Any) -> Any:
    values = tiny_run.recipe(folder, train={"checkpoint_every": 2, "keep_checkpoints": 9}, lora=LORA)
    return load_recipe({**values, **sections})


def test_a_run_learns_and_resumes_bit_for_bit(run: Path) -> None:
    losses = [line["loss"] for line in tiny_run.metrics(run, "step")]
    assert losses[-1] < losses[0]
    again = run.parent / "again"
    tiny_run.copy_interrupted(run, again, 2)
    train(recipe_of(run.parent), again)
    tiny_run.assert_same(again, run)


def peft_logits(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of the base and of the adapted model."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    ids = torch.tensor(TOKENS, dtype=torch.int64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*rank_pattern.*|.*alpha_pattern.*")
        base = model.eval()(input_ids=ids, use_cache=False).logits.numpy()
        adapted = PeftModel.from_pretrained(model, run / "adapter").eval()
        return base, adapted(input_ids=ids, use_cache=False).logits.numpy()


def test_peft_computes_the_same_with_the_trained_adapter(run: Path) -> None:
    base, expected = peft_logits(run)
    assert distance(base, expected) > 100 * LOGITS
    spec, matrices = load_adapter(run / "adapter")
    assert any(".experts." in target for target in spec.targets)
    model = CausalLM(load_config(run.parent / "model"), lora=spec)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = load_weights(run.parent / "model", model.module, model.layout, dict.fromkeys(model.layout, device))
    arrays = fit_adapter(matrices, model.adapter_layout, "here")
    assert distance(jax.jit(model.logits)(weights, arrays, {"tokens": jnp.asarray(TOKENS)}), expected) <= LOGITS


def test_a_sweep_over_a_mixture_equals_a_single_run(run: Path) -> None:
    folder = run.parent
    recipe = tiny_run.recipe(folder, lora=LORA)
    train(load_recipe({**recipe, "sweep": {"learning_rate": [1e-3, 1e-2], "keep": "all"}}), folder / "sweep")
    files = [at / "adapter_model.safetensors" for at in (folder / "sweep" / "adapters" / RATE, run / "adapter")]
    ours, alone = map(load_file, files)
    assert ours.keys() == alone.keys() and any(".experts." in name for name in ours)
    # Not the largest difference: Adam divides by the size of a gradient, which enlarges the rounding of tiny ones.
    for name, matrix in alone.items():
        assert np.linalg.norm(ours[name] - matrix) <= ROUNDING * np.linalg.norm(matrix), name
    losses = [line["loss"] for line in tiny_run.metrics(folder / "sweep", "adapter_step") if line["adapter"] == RATE]
    assert losses == pytest.approx([line["loss"] for line in tiny_run.metrics(run, "step")], rel=1e-4)
