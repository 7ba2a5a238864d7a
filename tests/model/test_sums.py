"""Outputs of linear layers that are added to the residual stream as a part of their products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dose import slow_case
from norm_models import SIZES, random_tree
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from trillora.model.bridge import CausalLM
from trillora.model.layout import unstack
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides import sums
from trillora.model.trace import LinearSum


def loss_and_gradients(kernels: Any, *, scan: bool = False) -> dict[str, Any]:
    """Of one layer, or of two that are scanned."""
    sizes = {**SIZES, "num_hidden_layers": 2 if scan else 1}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, pad_token_id=0)
    model = CausalLM(config, lora=LoraSpec(rank=2), scan=scan, kernels=kernels, interpret=True)
    layouts = (model.layout, model.adapter_layout)
    base, adapter = (jax.tree.map(lambda array: 0.2 * array, random_tree(layout)) for layout in layouts)
    batch = {"tokens": jnp.arange(8, dtype=jnp.int32).reshape(2, 4)}
    value, gradients = jax.jit(jax.value_and_grad(lambda a, b: model.hidden(b, a, batch).sum()))(adapter, base)
    return {"loss": value, **unstack(gradients, model.adapter_layout)}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, plain in one.items():
        assert np.abs(other[name] - plain).max() <= 1e-4 * np.abs(plain).max(), name


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many outputs had a note, and how many of the notes were used."""
    counts = {"made": 0, "used": 0}

    def counted(output: jax.Array, add_to: Any) -> LinearSum:
        def counted_add_to(other: jax.Array) -> jax.Array:
            counts["used"] += 1
            found: jax.Array = add_to(other)
            return found

        counts["made"] += 1
        return LinearSum(output, counted_add_to)

    monkeypatch.setattr(sums, "LinearSum", counted)
    return counts


@pytest.mark.parametrize("scan", [False, slow_case(True)])
def test_both_residual_sums_of_a_layer_are_parts_of_products(scan: bool, notes: dict[str, int]) -> None:
    plain = loss_and_gradients("xla", scan=scan)
    assert notes["made"] == 0
    assert_equal(plain, loss_and_gradients("fused", scan=scan))
    assert notes["used"] > 0
    # Of q, k, v, o and the MLP, the last two are added. Once it is known that q, k and v have the same input, they are
    # computed together, without notes.
    assert (notes["made"], notes["used"]) == (5 + 2, 2 + 2)


def test_other_additions_are_computed_as_before(notes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def odd_layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y = self.mlp(hidden_states)
        with_factor = torch.add(hidden_states, y, alpha=0.5)
        broadcast = hidden_states[:, :1] + y
        with torch.no_grad():
            constant = hidden_states + y
        return with_factor + broadcast + constant + 0.1 * y

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", odd_layer)
    assert_equal(loss_and_gradients("xla"), loss_and_gradients("fused"))
    assert notes["made"] > 0
    assert notes["used"] == 0


def test_an_output_may_be_added_and_used_again(notes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y = self.mlp(self.input_layernorm(hidden_states))
        return (y + hidden_states) * y

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", layer)
    assert_equal(loss_and_gradients("xla"), loss_and_gradients("fused"))
    assert notes["used"] > 0
