"""`engine.lora_kernel: fused`: which modules of a model are computed by the kernels, and that nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from architecture_checks import GRADIENTS, LOGITS, Subject, distance, gradient_distance, logits_and_gradients
from dose import slow_case
from torch.nn import functional

from trillora.model.bridge import CausalLM
from trillora.model.layout import unstack
from trillora.model.lora import add_lora
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides.gated_mlps import find_gated_mlps
from trillora.model.remat import Remat
from trillora.model.trace import LoraKernel
from trillora.recipe import schema

SAME = 1e-5  # relative, float32: sums in another order


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject(name)


@pytest.mark.parametrize(
    ("name", "activation", "remat", "scan"),
    [
        ("llama", "silu", "none", False),
        ("llama", "silu", "linear", True),
        ("qwen3", "silu", "full", False),
        ("gemma2", "gelu_tanh", "gate", False),
        slow_case("deepseek_v3", "silu", "none", False),  # a dense layer, and shared experts
    ],
)
def test_model_with_kernels_equals_pytorch(name: str, activation: str, remat: Remat, scan: bool) -> None:
    subject = subject_of(name)
    ours = subject.ours(lora_kernel="fused", interpret=True, remat=remat, scan=scan)
    assert [mlp.activation for mlp in ours.gated_mlps] == [activation] * len(ours.stack.layers)
    logits, gradients = logits_and_gradients(ours, *subject.weights(ours), subject.tokens)
    found = {key: np.asarray(gradient) for key, gradient in unstack(gradients, ours.adapter_layout).items()}
    assert distance(logits, subject.logits) <= LOGITS
    assert gradient_distance(found, subject.gradients) <= GRADIENTS


def test_model_with_kernels_equals_the_one_without() -> None:
    """The kernels are really used: one for the forward and one for the backward pass of the layers' body."""
    subject = subject_of("llama")

    def gradients_of(kernel: LoraKernel) -> tuple[dict[str, np.ndarray], str]:
        ours = subject.ours(lora_kernel=kernel, interpret=True, remat="none", scan=True)
        weights = subject.weights(ours)
        compute = functools.partial(logits_and_gradients, ours, tokens=subject.tokens)
        traced = str(jax.make_jaxpr(compute)(*weights))
        gradients = compute(*weights)[1]
        return {key: np.asarray(each) for key, each in unstack(gradients, ours.adapter_layout).items()}, traced

    (fused, with_kernels), (plain, without) = gradients_of("fused"), gradients_of("xla")
    assert with_kernels.count("pallas_call") == 2 and "pallas_call" not in without
    assert gradient_distance(fused, plain) <= SAME


class Gated(torch.nn.Module):
    """The usual code of a gated MLP; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            torch.nn.Linear(*shape, bias=False, device="meta") for shape in ((16, 32), (32, 16), (16, 32))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Turned(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.w3(x)
        return self.w2(up * functional.gelu(self.w1(x)))


class ScaledResult(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.w2(functional.silu(self.w1(x)) * self.w3(x))


class ScaledGate(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(1.0001 * self.w1(x)) * self.w3(x))


class Clamped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x).clamp(max=7))


class OtherInput(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x.clone()))


class OtherActivation(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.relu(self.w1(x)) * self.w3(x))


class OverTokens(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x).roll(1, dims=1))


class Twice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x) + 0 * self.w3(x))


class MoreArguments(Gated):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.w2(functional.silu(self.w1(x)) * self.w3(x) * scale)


OTHERS = (ScaledResult, ScaledGate, Clamped, OtherInput, OtherActivation, OverTokens, Twice, MoreArguments)


def gated(cls: type[Gated] = Gated, **lora: Any) -> Gated:
    module = cls()
    add_lora(module, LoraSpec(**{"rank": 4, "targets": ("w1", "w2", "w3"), **lora}))
    return module


def test_a_module_is_recognised_by_what_it_computes() -> None:
    for cls, activation in ((Gated, "silu"), (Turned, "gelu")):
        module = gated(cls)
        (mlp,) = find_gated_mlps(module)
        assert (mlp.module, mlp.gate, mlp.up, mlp.down) == (module, module.w1, module.w3, module.w2)
        assert mlp.activation == activation
        assert all("forward" not in vars(layer) for layer in module.children())
    for other in OTHERS:
        assert not find_gated_mlps(gated(other)), other.__name__


def test_only_plain_lora_on_all_three_layers_uses_the_kernels() -> None:
    others: list[dict[str, Any]] = [{"dropout": 0.1}, {"dora": True}, {"init": "pissa"}, {"rank": 65}]
    for lora in (*others, {"targets": ("w1", "w2")}):
        assert not find_gated_mlps(gated(**lora)), lora
    config = subject_of("llama").config
    quantized = CausalLM(config, lora=LoraSpec(rank=4), quantize="int8", lora_kernel="fused")
    assert not quantized.gated_mlps and not CausalLM(config, lora=LoraSpec(rank=4)).gated_mlps


def test_recipes_have_the_same_names() -> None:
    assert schema.LoraKernel.__args__ == LoraKernel.__args__  # type: ignore[attr-defined]
