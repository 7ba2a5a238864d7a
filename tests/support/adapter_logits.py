"""Logits of a model with an adapter: ours and PEFT's."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models
import torch
from architecture_checks import distance, to_jax

from trillora.files.checksums import with_checksums
from trillora.model.adapters import (
    adapter_files,
)
from trillora.model.bridge import CausalLM
from trillora.model.layout import stack
from trillora.model.lora_spec import LoraSpec

TOKENS = np.random.default_rng(0).integers(3, tiny_models.VOCABULARY, (2, 12))


# Our rounding error may be this many times PyTorch's own. 0.4 to 1.9 were seen; 17 or more with one matrix 0.1 % too
# large. One limit for the error itself does not fit all models: 4e-7 is normal in ernie4_5, 1.7e-5 in ernie4_5_moe.
ROUNDING = 4


DIFFERENT = 1e-2  # an adapter changes the logits by at least this, so that equality is meaningful


SPECS = {
    "llama": LoraSpec(rank=4, alpha=8, rslora=True),
    "gpt2": LoraSpec(rank=4, alpha=8),  # Conv1D: fan_in_fan_out
    "mixtral": LoraSpec(rank=2, alpha=8, targets=("q_proj", "o_proj")),  # newer PEFTs rename targets of MoE
    "ernie4_5": LoraSpec(  # a tied head
        rank=2, alpha=3, dropout=0.1, targets=("model.layers.1.mlp.up_proj", "v_proj", "lm_head")
    ),
    "ernie4_5_moe": LoraSpec(  # PEFT takes gate_proj, up_proj and down_proj in target_modules as experts
        rank=2, alpha=4, rslora=True, rank_pattern=(("up_proj", 3),), alpha_pattern=(("*.layers.1.*", 6),)
    ),
}


@functools.cache
def ours(name: str, spec: LoraSpec) -> CausalLM:
    return CausalLM(tiny_models.build(name).config, lora=spec)


def random_adapter(model: CausalLM) -> dict[str, np.ndarray]:
    """By parameter name."""
    generator = np.random.default_rng(1)
    return {
        name: generator.normal(0, 0.3, leaf.part_shape).astype(np.float32)
        for leaf in model.adapter_layout.values()
        for name in leaf.names
    }


def our_logits(name: str, model: CausalLM, stacked_adapter: dict[str, np.ndarray]) -> np.ndarray:
    reference = tiny_models.build(name)
    flat = {n: to_jax(t) for n, t in (*reference.named_parameters(), *reference.named_buffers())}
    base = stack({n: flat[n] for leaf in model.layout.values() for n in leaf.names}, model.layout)
    return np.asarray(jax.jit(model.logits)(base, stacked_adapter, {"tokens": jnp.asarray(TOKENS, jnp.int32)}))


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()


def error_ratio(our_logits: np.ndarray, model: Any) -> float:
    """The rounding error of our logits, relative to PyTorch's float32 error. Its float64 logits are exact in
    comparison, although transformers computes some parts of a model in float32 always."""
    exact = torch_logits(copy.deepcopy(model).double())
    return distance(our_logits, exact) / distance(torch_logits(model), exact)


def save(folder: Path, name: str = "llama", spec: LoraSpec | None = None) -> tuple[CausalLM, dict[str, np.ndarray]]:
    spec = spec or SPECS[name]
    model = ours(name, spec)
    adapter = random_adapter(model)
    files = with_checksums(1, adapter_files(adapter, model.module, model.targets, spec, "some/base"))
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return model, adapter
