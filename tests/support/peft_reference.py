"""A reference training loop in PyTorch and PEFT with the same base model, initial adapter, batches and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from trillora.data.batches import Batches
    from trillora.recipe.schema import Recipe


def peft_losses(recipe: Recipe, folder: Path, batches: Batches, adapter_layout: Any, num_steps: int) -> list[float]:
    """The losses of `num_steps` AdamW steps with a constant learning rate."""
    start = initial_weights(adapter_layout, recipe.train.seed)
    return losses_from(start, recipe, folder, [batches.batch(step) for step in range(num_steps)])


def initial_weights(adapter_layout: Any, seed: int) -> dict[str, np.ndarray]:
    """Our initial adapter, by layers."""
    from trillora.model.layout import unstack
    from trillora.model.lora import initial_adapter

    return {
        name: np.asarray(array)
        for name, array in unstack(initial_adapter(adapter_layout, seed), adapter_layout).items()
    }


def losses_from(
    start: dict[str, np.ndarray],
    recipe: Recipe,
    folder: Path,
    batches: Sequence[dict[str, np.ndarray]],
    device: str = "cpu",
    weights: torch.dtype = torch.float32,
    arithmetic: torch.dtype = torch.float32,
) -> list[float]:
    """The losses of one step for each batch. PEFT keeps the adapter in float32. On a GPU, this needs a process without
    torchax: where that is imported, PyTorch has no gradients on other devices."""
    lora, train = recipe.lora, recipe.train
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).to(device)
    if arithmetic != weights:  # otherwise buffers keep their type: the frequencies of positions are in float32
        base = base.to(arithmetic)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    trained = load_start(model, start)
    optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)
    return train_model(model, optimizer, batches, train.max_grad_norm)


def train_model(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[dict[str, np.ndarray]], max_grad_norm: float
) -> list[float]:
    """The losses of one step for each batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for arrays in batches:
        batch = {name: torch.tensor(array, device=model.device) for name, array in arrays.items()}
        logits = model(input_ids=batch["tokens"].long()).logits
        loss = mean_loss(logits, batch["targets"].long(), batch["weights"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean over supervised tokens. Logits are flattened first: along a strided dim PyTorch sums 49k exponentials
    naively in float32, with an error of 1e-4."""
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def load_start(model: Any, start: dict[str, np.ndarray]) -> list[torch.nn.Parameter]:
    """Copies our initial adapter into PEFT's parameters, and checks that all of them are set."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {
        "lora_a": "lora_A.default.weight",
        "lora_b": "lora_B.default.weight",
        "lora_magnitude": "lora_magnitude_vector.default.weight",
    }
    for name, array in start.items():
        layer, kind = name.rsplit(".", 1)
        with torch.no_grad():
            parameters.pop(f"base_model.model.{layer}.{names[kind]}").copy_(torch.tensor(array))
    assert not parameters, f"PEFT trains more parameters: {sorted(parameters)[:3]}"
    return [p for p in model.parameters() if p.requires_grad]
