"""Which layers get an adapter, its initial values, and dropout. PEFT is the reference for the targets."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
from architecture_checks import distance, to_jax
from torchax import interop
from transformers.pytorch_utils import Conv1D

from trillora.engine.hash_random import MaskKey
from trillora.errors import TrilloraError
from trillora.model import lora
from trillora.model.bridge import CausalLM, build_module
from trillora.model.layout import Tree, stack, unstack
from trillora.model.lora import add_lora, chosen_layers, initial_adapter, linear_layers
from trillora.model.lora_spec import LoraSpec, select_targets
from trillora.model.overrides.torchax_fixes import environment
from trillora.model.trace import Trace, tracing

pytestmark = pytest.mark.core

ROUNDING = 1e-5  # of the largest value: float32, the same operations fused differently


def targets_of(name: str, targets: str | tuple[str, ...]) -> list[str]:
    module = build_module(tiny_models.build(name).config, "float32")
    return select_targets(module, list(linear_layers(module)), targets)


def peft_targets(name: str) -> dict[str, torch.nn.Module]:
    """The linear layers PEFT adapts for "all-linear", without the experts that newer versions adapt too."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fan_in_fan_out for Conv1D and the like
        model = inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear"), tiny_models.build(name))
    adapted = {n: m.get_base_layer() for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    return {name: layer for name, layer in adapted.items() if isinstance(layer, torch.nn.Linear | Conv1D)}


@pytest.mark.parametrize(
    ("name", "per_layer"),
    [("llama", 7), ("gpt2", 4), ("mixtral", 4), ("opt", 6), ("gpt_neox", 4), ("qwen2_moe", 8)],
)
def test_all_linear_selects_the_same_layers_as_peft(name: str, per_layer: int) -> None:
    ours = targets_of(name, "all-linear")
    assert set(ours) == set(peft_targets(name))
    assert len(ours) == len(set(ours)) == per_layer * 4


def test_a_router_that_subclasses_linear_is_not_adapted() -> None:
    """The router of phimoe returns three tensors: PEFT adapts it, and then its forward fails."""
    theirs = peft_targets("phimoe")
    routers = {name for name in theirs if name.endswith(".router")}
    assert len(routers) == 4
    assert set(targets_of("phimoe", "all-linear")) == set(theirs) - routers


def test_all_linear_leaves_out_the_gate_of_a_shared_expert() -> None:
    """It has one output, so that it cannot have the rank of the other layers."""
    module = build_module(tiny_models.configuration("qwen2_moe", 2), "float32")
    gates = {name for name in linear_layers(module) if name.endswith(".shared_expert_gate")}
    chosen = chosen_layers(module, LoraSpec(rank=4))
    assert len(gates) == 2 and not gates & chosen.keys()
    assert any(name.endswith(".shared_expert.gate_proj") for name in chosen)


@pytest.mark.parametrize(
    ("targets", "number"),
    [
        ("q_proj", 4),
        (("q_proj",), 4),
        (("q_proj", "down_proj"), 8),
        (("q_proj", "self_attn.q_proj"), 4),  # named twice, adapted once
        (("self_attn.q_proj",), 4),
        (("model.layers.2.mlp.up_proj",), 1),
        (("2.mlp.up_proj",), 1),
        (("*.mlp.*",), 12),
        (("model.layers.[01].*_proj",), 14),
        (("lm_head",), 1),
        (("lm_head", "q_proj"), 5),
    ],
)
def test_targets_are_names_dotted_suffixes_or_patterns(targets: str | tuple[str, ...], number: int) -> None:
    assert len(targets_of("llama", targets)) == number


def test_targets_are_in_the_models_order() -> None:
    forwards, backwards = targets_of("llama", ("q_proj", "down_proj")), targets_of("llama", ("down_proj", "q_proj"))
    assert forwards == backwards
    assert forwards[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]


def test_part_of_a_name_is_not_a_match() -> None:
    with pytest.raises(TrilloraError):
        targets_of("llama", ("proj",))


def test_a_target_without_a_match_suggests_the_nearest() -> None:
    with pytest.raises(TrilloraError) as caught:
        targets_of("llama", ("k_proj", "q_prj"))
    assert "q_prj" in caught.value.what and "LlamaForCausalLM" in caught.value.what
    assert caught.value.where == "lora.targets[1]"
    assert "did you mean 'q_proj'?" in caught.value.do
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"):
        assert name in caught.value.do


def test_only_the_adapter_is_trainable() -> None:
    module = build_module(tiny_models.build("llama").config, "float32")
    add_lora(module, LoraSpec(rank=2, targets=("q_proj",)))
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trainable) == 8
    assert all(name.endswith(("q_proj.lora_a", "q_proj.lora_b")) for name in trainable)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_matrices_have_the_shapes_of_peft(name: str) -> None:
    model = CausalLM(tiny_models.build(name).config, lora=LoraSpec(rank=3), scan=False)
    for target in model.targets:
        layer = model.module.get_submodule(target)
        num_in, num_out = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
        assert model.adapter_layout[f"{target}.lora_a"].shape == (3, num_in)
        assert model.adapter_layout[f"{target}.lora_b"].shape == (num_out, 3)
    assert len(model.adapter_layout) == 2 * len(model.targets)


def test_the_scale_is_alpha_over_rank_or_its_square_root() -> None:
    assert LoraSpec(rank=16, alpha=32).scale == 2
    assert LoraSpec(rank=16, alpha=32, rslora=True).scale == 8


def start(seed: int, *, scan: bool) -> Tree:
    model = CausalLM(tiny_models.build("llama").config, lora=LoraSpec(rank=4), scan=scan)
    return unstack(initial_adapter(model.adapter_layout, seed), model.adapter_layout)


def test_an_adapter_starts_with_b_zero_and_a_kaiming_uniform() -> None:
    adapter = start(0, scan=True)
    spread = []
    for name, array in adapter.items():
        assert array.dtype == np.float32
        if name.endswith(".lora_b"):
            assert not array.any()
            continue
        # PyTorch's own bound for kaiming_uniform_ with a = sqrt(5), which PEFT uses.
        bound = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5)) * math.sqrt(3 / array.shape[1])
        assert np.abs(array).max() <= bound
        spread.append((array / bound).reshape(-1))
    values = np.concatenate(spread)
    assert len(spread) == 28
    # Uniform on [-1, 1]: mean 0, variance 1/3. Five standard errors of 8,000 draws.
    assert abs(values.mean()) < 5 * math.sqrt(1 / 3 / values.size)
    assert abs(values.var() - 1 / 3) < 5 * math.sqrt(4 / 45 / values.size)
    assert np.abs(values).max() > 0.99


def test_initial_values_depend_on_seed_and_name_and_not_on_stacking() -> None:
    scanned, unrolled, other = start(0, scan=True), start(0, scan=False), start(1, scan=True)
    assert scanned.keys() == unrolled.keys() == other.keys()
    assert all(np.array_equal(scanned[name], unrolled[name]) for name in scanned)
    drawn = [tree[name].tobytes() for tree in (scanned, other) for name in tree if name.endswith(".lora_a")]
    assert len(drawn) == len(set(drawn)) == 56


class Tiny:
    """The tiny Llama with a random adapter, with the same numbers for any stacking of its layers."""

    def __init__(self, *, scan: bool, dropout: float) -> None:
        reference = tiny_models.build("llama", num_layers=2)
        self.model = CausalLM(reference.config, lora=LoraSpec(rank=4, alpha=8, dropout=dropout), scan=scan)
        flat = {name: to_jax(t) for name, t in (*reference.named_parameters(), *reference.named_buffers())}
        self.base = stack({n: flat[n] for leaf in self.model.layout.values() for n in leaf.names}, self.model.layout)
        names = sorted(name for leaf in self.model.adapter_layout.values() for name in leaf.names)
        shapes = {name: leaf.part_shape for leaf in self.model.adapter_layout.values() for name in leaf.names}
        generator = np.random.default_rng(0)
        drawn = {name: generator.normal(0, 0.3, shapes[name]).astype(np.float32) for name in names}
        self.adapter = stack(drawn, self.model.adapter_layout)

    def hidden(self, key: jax.Array | None) -> np.ndarray:
        tokens = jnp.arange(3, 19).reshape(2, 8)
        masks = None if key is None else MaskKey(key, jnp.arange(2))
        return np.asarray(jax.jit(self.model.hidden)(self.base, self.adapter, {"tokens": tokens}, masks))


def test_dropout_needs_a_key_and_is_the_same_scanned_or_not() -> None:
    scanned, unrolled = Tiny(scan=True, dropout=0.3), Tiny(scan=False, dropout=0.3)
    without = Tiny(scan=True, dropout=0.0).hidden(None)
    np.testing.assert_array_equal(scanned.hidden(None), without)
    key, other_key = jax.random.key(0), jax.random.key(1)
    dropped = scanned.hidden(key)
    assert distance(unrolled.hidden(key), dropped) < ROUNDING
    assert distance(dropped, without) > 0.01
    assert distance(scanned.hidden(other_key), dropped) > 0.01


def linear_with_adapter(dropout: float) -> Any:
    """One adapted layer whose weight is zero: (x, key) -> the adapter's output."""
    layer = torch.nn.Sequential(OrderedDict(proj=torch.nn.Linear(16, 8, bias=False, device="meta")))
    add_lora(layer, LoraSpec(rank=4, alpha=8, dropout=dropout, targets=("proj",)))
    generator = np.random.default_rng(0)
    shapes = {"proj.lora_a": (4, 16), "proj.lora_b": (8, 4)}
    weights = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    weights["proj.weight"] = jnp.zeros((8, 16))

    def call(x: jax.Array, key: jax.Array | None) -> jax.Array:
        masks = None if key is None else MaskKey(key, jnp.arange(len(x)))
        with tracing(Trace(weights=weights, dropout_key=masks)), environment():
            out = torch.func.functional_call(layer, interop.torch_view(weights), (interop.torch_view(x),))
        return interop.jax_view(out)

    return call, weights


def test_the_adapter_adds_scale_times_b_a_x() -> None:
    call, weights = linear_with_adapter(0.5)
    x = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    a, b = (np.asarray(weights[f"proj.lora_{part}"], np.float64) for part in "ab")
    assert distance(call(jnp.asarray(x), None), 2 * x @ a.T @ b.T) < ROUNDING


def test_dropout_keeps_the_expectation() -> None:
    call, _ = linear_with_adapter(0.3)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 16)), jnp.float32)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: call(x, key)))(jax.random.split(jax.random.key(0), 4000)))
    error_of_the_mean = draws.std(0) / math.sqrt(len(draws))
    assert (error_of_the_mean > 0).all()
    assert (np.abs(draws.mean(0) - np.asarray(call(x, None))) < 5 * error_of_the_mean).all()


def test_dropout_drops_the_requested_fraction_and_scales_the_rest() -> None:
    """Each input has a single nonzero number, so the output is either zero or the full output, scaled up."""
    call, _ = linear_with_adapter(0.25)
    x = jnp.zeros((4000, 16)).at[:, 0].set(1.0)
    whole, dropped = np.asarray(call(x, None)), np.asarray(call(x, jax.random.key(0)))
    gone = ~dropped.any(axis=1)
    assert abs(gone.mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)
    np.testing.assert_allclose(dropped[~gone], whole[~gone] / 0.75, rtol=1e-5)


def test_every_projection_layer_and_sequence_has_its_own_dropout_mask() -> None:
    model = Tiny(scan=True, dropout=0.5)
    seen: list[bytes] = []
    original = lora.keep_mask

    def recording(*args: Any) -> jax.Array:
        mask = original(*args)
        if mask.shape[-1] == 64:
            jax.debug.callback(lambda m: seen.extend(np.asarray(sequence).tobytes() for sequence in m), mask)
        return mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "keep_mask", recording)
        model.hidden(jax.random.key(0))
    jax.effects_barrier()
    assert len(set(seen)) == 6 * 2 * 2  # q, k, v, o, gate and up of two layers, two sequences; down has another width
