"""Activations times another array, with one rule for both gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from norm_models import SIZES, random_tree
from torchax import interop
from transformers import AutoConfig

from trillora.model.bridge import CausalLM
from trillora.model.layout import unstack
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides import gated_products
from trillora.model.overrides.torchax_fixes import environment
from trillora.model.trace import Trace, tracing

ROUNDING = 2e-6  # of the largest value, float32


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that were computed with their activation."""
    shapes: list[tuple[int, ...]] = []
    original = gated_products.gated

    def counted(activation: Any, g: jax.Array, u: jax.Array) -> jax.Array:
        shapes.append(g.shape)
        return original(activation, g, u)

    monkeypatch.setattr(gated_products, "gated", counted)
    return shapes


def value_and_gradients(function: Any, attention: Any, *arrays: jax.Array) -> Any:
    """Of a PyTorch function, traced as the model's code is."""

    def loss(*given: jax.Array) -> jax.Array:
        with environment(), tracing(Trace({}, attention=attention)):
            h = interop.jax_view(function(*map(interop.torch_view, given)))
        return (h.astype(jnp.float32) * jnp.cos(jnp.arange(h.size)).reshape(h.shape)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays)


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("activation_first", [True, False])
def test_the_gradients_are_those_of_pytorch(name: str, activation_first: bool, used: list[Any]) -> None:
    """In float64, to rounding, or at least as close as without the rule: the tanh of gelu cancels digits."""
    rng = np.random.default_rng(1)
    g, u = (rng.normal(size=(3, 40)).astype(np.float32) * 4 for _ in range(2))

    def product(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        activated = ACTIVATIONS[name](g)
        return activated * u if activation_first else u * activated

    found = value_and_gradients(product, "splash", g, u)
    assert used == [(3, 40)]
    tensors = [torch.from_numpy(array).double().requires_grad_() for array in (g, u)]
    weights = torch.cos(torch.arange(g.size).double()).reshape(3, 40)
    loss = (product(*tensors) * weights).sum()
    loss.backward()
    plain = value_and_gradients(product, "xla", g, u)
    for ours, without, tensor in zip(*map(jax.tree.leaves, (found, plain)), (loss, *tensors), strict=True):
        expected = (loss if tensor is loss else tensor.grad).detach().numpy()
        error, plain_error = (np.abs(each - expected).max() for each in (ours, without))
        assert error <= max(ROUNDING * np.abs(expected).max(), plain_error)


def test_the_gradients_are_rounded_once(used: list[Any]) -> None:
    """In bfloat16, they differ from float64 by no more than half of the last bit."""
    rng = np.random.default_rng(2)
    g, u = (jnp.asarray(rng.normal(size=(64, 64)) * 2, jnp.bfloat16) for _ in range(2))
    _, gradients = value_and_gradients(lambda g, u: torch.nn.functional.silu(g) * u, "splash", g, u)
    tensors = [torch.from_numpy(np.asarray(array, np.float64)).requires_grad_() for array in (g, u)]
    dh = jnp.cos(jnp.arange(g.size)).reshape(g.shape).astype(jnp.bfloat16)  # h is bfloat16, and so is its gradient
    (torch.nn.functional.silu(tensors[0]) * tensors[1]).backward(torch.from_numpy(np.asarray(dh, np.float64)))
    for ours, tensor in zip(gradients, tensors, strict=True):
        expected = tensor.grad.numpy()
        assert (np.abs(np.asarray(ours, np.float64) - expected) <= 2**-8 * np.abs(expected) + 1e-6).all()
    assert len(used) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: torch.nn.functional.silu(g) * u[:1],  # other shapes
        lambda g, u: torch.sigmoid(g) * u,  # no activation that we know
        lambda g, u: torch.nn.functional.silu(g) * 2.0 + u,
    ],
)
def test_other_products_are_left_alone(function: Any, used: list[Any]) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(3, 40)).astype(np.float32) for _ in range(2)]
    ours, plain = (value_and_gradients(function, attention, *arrays) for attention in ("splash", "xla"))
    assert not used
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def loss_and_gradients(attention: Any) -> dict[str, Any]:
    """Of a tiny Llama with two layers."""
    config = AutoConfig.for_model("llama", **{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=2, pad_token_id=0)
    model = CausalLM(config, lora=LoraSpec(rank=2), attention=attention, interpret=True)
    layouts = (model.layout, model.adapter_layout)
    base, adapter = (jax.tree.map(lambda array: 0.2 * array, random_tree(layout)) for layout in layouts)
    batch = {"tokens": jnp.arange(8, dtype=jnp.int32).reshape(2, 4)}
    value, gradients = jax.jit(jax.value_and_grad(lambda a, b: model.hidden(b, a, batch).sum()))(adapter, base)
    return {"loss": value, **unstack(gradients, model.adapter_layout)}


def test_a_model_uses_it_on_tpus_only(used: list[Any]) -> None:
    plain = loss_and_gradients("xla")
    assert not used
    ours = loss_and_gradients("splash")
    assert used
    for name, expected in plain.items():
        assert np.abs(ours[name] - expected).max() <= 1e-4 * np.abs(expected).max(), name
