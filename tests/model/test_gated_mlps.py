"""`engine.kernels: fused`: which modules of a model are computed by the kernels, and that nothing else changes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
import torch
from architecture_checks import GRADIENTS, LOGITS, Subject, distance, gradient_distance, logits_and_gradients
from dose import full_dose_only, slow_case
from peft import PeftModel
from safetensors.numpy import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from trillora.errors import TrilloraError
from trillora.events import ignore_events
from trillora.model.bridge import CausalLM
from trillora.model.layout import split_layers, unstack
from trillora.model.lora import add_lora
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides.gated_mlps import find_gated_mlps
from trillora.model.remat import Remat
from trillora.model.trace import Kernels
from trillora.recipe import schema
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.step.autotune import choose
from trillora.training.state.files import by_layer, layer_names
from trillora.training.trainer import train

SAME = 1e-5  # relative, float32: sums in another order


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject(name)


@pytest.mark.parametrize(
    ("name", "activation", "remat", "scan"),
    [
        ("llama", "silu", "none", False),  # what is chosen on a GPU
        slow_case("llama", "silu", "linear", True),
        slow_case("qwen3", "silu", "full", False),
        ("gemma2", "gelu_tanh", "gate", True),
        slow_case("gemma2", "gelu_tanh", "gate", False),
        slow_case("deepseek_v3", "silu", "none", False),  # a dense layer, and shared experts
    ],
)
def test_model_with_kernels_equals_pytorch(name: str, activation: str, remat: Remat, scan: bool) -> None:
    subject = subject_of(name)
    ours = subject.ours(kernels="fused", interpret=True, remat=remat, scan=scan)
    assert [mlp.activation for mlp in ours.gated_mlps] == [activation] * len(ours.stack.layers)
    logits, gradients = logits_and_gradients(ours, *subject.weights(ours), subject.tokens)
    found = {key: np.asarray(gradient) for key, gradient in unstack(gradients, ours.adapter_layout).items()}
    assert distance(logits, subject.logits) <= LOGITS
    assert gradient_distance(found, subject.gradients) <= GRADIENTS


def test_the_kernels_are_used() -> None:
    """One for the forward and one for the backward pass of the layers' body. Recomputation runs only the norm again."""
    subject = subject_of("llama")
    names = ["gated_mlp", "gated_mlp_gradient", "rms_norm", "rms_norm_gradient"]
    for kernel, remat, expected in (("fused", "none", names), ("fused", "linear", names), ("xla", "none", [])):
        ours = subject.ours(kernels=kernel, interpret=True, remat=remat)
        compute = functools.partial(logits_and_gradients, ours, tokens=subject.tokens)
        traced = str(jax.make_jaxpr(compute)(*subject.weights(ours)))
        found = re.findall(r"\bname=(\w+)", traced)
        assert sorted({name for name in found if name in names}) == expected
        assert found.count("gated_mlp") == found.count("gated_mlp_gradient") == len(expected) // 4


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
    quantized = CausalLM(config, lora=LoraSpec(rank=4), quantize="int8", kernels="fused")
    assert not quantized.gated_mlps and not CausalLM(config, lora=LoraSpec(rank=4)).gated_mlps


def test_recipes_have_the_same_names() -> None:
    assert schema.Kernels.__args__ == Kernels.__args__  # type: ignore[attr-defined]


# ---- the adapters of equal layers are one array


def test_adapters_of_layers_that_are_not_scanned_are_stored_as_for_a_scan() -> None:
    subject = subject_of("gemma2")  # repeats two kinds of layers
    scanned, fused = subject.ours(), subject.ours(kernels="fused", scan=False)
    assert fused.adapter_layout == scanned.adapter_layout
    assert fused.layout == subject.ours(scan=False).layout
    assert any(leaf.stacked for leaf in fused.adapter_layout.values())


def test_the_gradient_of_split_layers_is_one_concatenation() -> None:
    layout = subject_of("llama").ours(kernels="fused", scan=False).adapter_layout
    key, leaf = next(item for item in layout.items() if item[1].stacked)
    array = np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32)

    def weighted(parts: dict[str, jax.Array]) -> jax.Array:
        return sum((number + 1) * (part**2).sum() for number, part in enumerate(parts.values()))  # type: ignore[return-value]

    split = jax.grad(lambda array: weighted(split_layers({key: array}, layout)))
    indexed = jax.grad(lambda array: weighted(unstack({key: array}, layout)))
    np.testing.assert_array_equal(split(array), indexed(array))
    assert "pad" not in str(jax.make_jaxpr(split)(array))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("fused"))


BATCH = 2  # interpreted kernels take seconds for a step with eight rows


def trained(folder: Path, run: Path, kernel: Kernels) -> Path:
    engine = {"kernels": kernel, "layers": "unroll", "remat": "none"}
    train(
        load_recipe(
            tiny_run.recipe(folder, engine=engine, train={"batch_size": BATCH, "steps": 4, "checkpoint_every": 2})
        ),
        run,
    )
    return run


@pytest.mark.usefixtures("shared_steps")
def test_a_run_with_kernels_learns_the_same_resumes_and_is_read_by_peft(folder: Path, tmp_path: Path) -> None:
    fused, plain = (trained(folder, tmp_path / kernel, kernel) for kernel in ("fused", "xla"))
    np.testing.assert_allclose(tiny_run.losses(fused), tiny_run.losses(plain), rtol=SAME)
    ours, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (fused, plain))
    assert gradient_distance(ours, theirs) <= 1e-3  # Adam also enlarges gradients that are only rounding

    again = tmp_path / "again"
    tiny_run.copy_interrupted(fused, again, step=2)
    tiny_run.assert_same(trained(folder, again, "fused"), fused)
    other = tmp_path / "other"
    tiny_run.copy_interrupted(fused, other, step=2)
    resumed = tiny_run.losses(trained(folder, other, "xla"))  # its adapters are one array for each layer
    np.testing.assert_allclose(resumed, tiny_run.losses(plain), rtol=SAME)

    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    loaded = PeftModel.from_pretrained(base, str(fused / "adapter")).state_dict()
    for name, array in ours.items():
        key = name.replace(".weight", ".default.weight")
        np.testing.assert_array_equal(loaded[key].numpy(), array)


# ---- where it cannot be used


def test_several_devices_are_refused(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, engine={"kernels": "fused"}, hardware={"devices": 2}))
    (stage,) = stages_of(recipe)
    with pytest.raises(
        TrilloraError, match=r"needs one NVIDIA GPU \(Ampere or newer\), and this step is for 2 x cpu"
    ) as error:
        choose(stage.recipe, tiny_run.llama(), jax.devices()[:2], 4, ignore_events)
    assert error.value.where == "engine.kernels"


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "DoRA": {"dora": True},
    "PiSSA": {"init": "pissa"},
    "ranks and whole norms": {
        "rank_pattern": {"up_proj": 2, "q_proj": 8},
        "modules_to_save": ["norm", "input_layernorm"],
    },
    "attention only": {"targets": ["q_proj", "v_proj"]},
    "embedding": {"targets": ["embed_tokens", "gate_proj", "up_proj", "down_proj"]},
}


@full_dose_only  # the runs and models above have plain LoRA on all layers only
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_adapters_learn_the_same_with_kernels(folder: Path, tmp_path: Path, variant: str) -> None:
    """The kernels compute what they can of any adapter, and XLA the rest."""
    runs = []
    for kernels in ("fused", "xla"):
        engine = {"kernels": kernels, "layers": "unroll", "remat": "none"}
        recipe = tiny_run.recipe(folder, engine=engine, train={"batch_size": BATCH, "steps": 3}, lora=VARIANTS[variant])
        train(load_recipe(recipe), tmp_path / kernels)
        runs.append(tiny_run.losses(tmp_path / kernels))
    np.testing.assert_allclose(*runs, rtol=SAME)


def test_a_state_is_read_by_layer_whatever_was_stacked() -> None:
    """Equal layers are one array with fused kernels or scanned layers, and several otherwise."""
    stacked = "optimizer/mu/model.layers.1:6:2.mlp.up_proj.lora_a"
    arrays = {stacked: np.arange(6).reshape(3, 2), "step": np.int32(4)}
    layers = [f"optimizer/mu/model.layers.{number}.mlp.up_proj.lora_a" for number in (1, 3, 5)]
    assert layer_names(stacked) == layers
    flat = by_layer(arrays)
    assert sorted(flat) == sorted([*layers, "step"])
    np.testing.assert_array_equal(np.stack([flat[name] for name in layers]), arrays[stacked])
    assert by_layer(flat).keys() == flat.keys()
    hostile = {"mu/model.layers.0:999999:1.lora_a": np.zeros(2), "mu/model.layers.0:2:0.lora_a": np.zeros(2)}
    assert by_layer(hostile).keys() == hostile.keys()
