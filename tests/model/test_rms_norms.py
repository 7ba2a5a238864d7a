"""Which norms and rotations of a model the kernels and gradients for GPUs replace: those that compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dose import slow_case
from norm_models import SIZES, random_tree
from torchax import interop
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from trillora.model.bridge import CausalLM
from trillora.model.layout import unstack
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides.rms_norms import find_rms_norms
from trillora.model.overrides.rope import rotations_with_gradient
from trillora.model.overrides.torchax_fixes import environment


def model_of(name: str) -> torch.nn.Module:
    config = AutoConfig.for_model(name, **SIZES, num_key_value_heads=2, pad_token_id=0)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("name", "count", "offset"),
    [
        ("llama", 5, 0.0),
        ("qwen3", 9, 0.0),  # also of queries and keys
        ("gemma2", 9, 1.0),  # weights are stored minus one
        ("cohere2", 0, None),  # another norm: the mean is subtracted
    ],
)
def test_norms_are_recognised_by_what_they_compute(name: str, count: int, offset: float | None) -> None:
    found = find_rms_norms(model_of(name))
    assert len(found) == count
    assert {norm.offset for norm in found} == ({offset} if count else set())


class Shifted(modeling_llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.01


class WithScale(modeling_llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize("cls", [Shifted, WithScale])
def test_a_norm_that_computes_anything_else_is_left_alone(cls: Any) -> None:
    assert len(find_rms_norms(modeling_llama.LlamaRMSNorm(32))) == 1
    assert find_rms_norms(cls(32)) == []


def test_an_epsilon_that_the_code_does_not_use_is_noticed() -> None:
    norm = modeling_llama.LlamaRMSNorm(32, eps=1e-6)
    norm.eps = 1e-6  # type: ignore[assignment]
    norm.variance_epsilon = 1e-4
    assert [found.eps for found in find_rms_norms(norm)] == [1e-4]
    del norm.variance_epsilon
    norm.forward = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * norm.weight  # type: ignore
    assert find_rms_norms(norm) == []


@pytest.mark.parametrize("scan", [False, slow_case(True)])
def test_a_layer_may_normalise_what_all_layers_are_given(scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm replaces its input by the same numbers. The next layer must not see an argument's new numbers."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def with_norm(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        cosine = kwargs["position_embeddings"][0]
        return forward(self, hidden_states + self.input_layernorm(cosine), **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", with_norm)
    sizes = {**SIZES, "num_attention_heads": 1, "num_hidden_layers": 3}  # the cosine is as wide as the layers
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=1, pad_token_id=0)
    batch, found = {"tokens": jnp.ones((1, 4), jnp.int32)}, []
    for kernels in ("xla", "fused"):
        model = CausalLM(config, lora=LoraSpec(rank=2), scan=scan, kernels=kernels, interpret=True)
        base, adapter = (random_tree(layout) for layout in (model.layout, model.adapter_layout))
        loss = jax.value_and_grad(lambda adapter, base, model=model: model.hidden(base, adapter, batch).sum())
        value, gradients = jax.jit(loss)(adapter, base)
        found.append({"loss": value, **unstack(gradients, model.adapter_layout)})
    for name, plain in found[0].items():
        assert np.abs(found[1][name] - plain).max() <= 1e-4 * np.abs(plain).max(), name


def test_the_gradient_of_a_rotation_is_that_of_the_models_code() -> None:
    ((file, name, rotate),) = rotations_with_gradient(model_of("llama"))
    assert (file, name) == (modeling_llama, "rotate_half")
    x, dy = (jnp.asarray(np.random.default_rng(seed).normal(size=(2, 3, 8)), jnp.float32) for seed in (0, 1))

    def run(function: Any, x: jax.Array) -> jax.Array:
        with environment():
            y: jax.Array = interop.jax_view(function(interop.torch_view(x)))
        return y

    for function in (rotate, modeling_llama.rotate_half):
        y, pull = jax.vjp(lambda x, f=function: run(f, x), x)
        np.testing.assert_array_equal(y, jnp.concatenate([-x[..., 4:], x[..., :4]], axis=-1))
        np.testing.assert_array_equal(pull(dy)[0], jnp.concatenate([dy[..., 4:], -dy[..., :4]], axis=-1))


def test_models_that_rotate_neighbours_keep_their_code() -> None:
    assert modeling_cohere.rotate_half(torch.arange(4.0)).tolist() == [-1, 0, -3, 2]
    assert rotations_with_gradient(model_of("cohere")) == []
