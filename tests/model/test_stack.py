"""Equal layers share one traced body, every layer runs once and in order, and the result equals plain PyTorch."""

from __future__ import annotations

import collections
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from architecture_checks import LOGITS, Subject, distance
from tiny_models import configuration
from torchax import interop
from transformers import CONFIG_MAPPING

from trillora.engine.kernels.joined_linear import lora_linear
from trillora.model import lora
from trillora.model.bridge import CausalLM
from trillora.model.layout import stack, unstack
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides.torchax_fixes import environment
from trillora.model.remat import Remat
from trillora.model.stack import LayerStack, RepeatedLayers, find_segments
from trillora.model.trace import Trace, tracing

pytestmark = pytest.mark.core

ROUNDING = 1e-5  # of the largest value: float32, the same operations fused differently


def num_bodies(segments: list[RepeatedLayers]) -> int:
    return sum(segment.period for segment in segments)


def layers_run(segments: list[RepeatedLayers]) -> list[int]:
    return [s.start + i for s in segments for i in range(s.period * s.repetitions)]


@functools.cache
def fewest_bodies(signatures: str) -> int:
    """Brute force: tries every repeated period at the front, then the rest."""
    if not signatures:
        return 0
    return min(
        period + fewest_bodies(signatures[period * repetitions :])
        for period in range(1, len(signatures) + 1)
        for repetitions in range(1, len(signatures) // period + 1)
        if signatures.startswith(signatures[:period] * repetitions)
    )


@pytest.mark.parametrize(
    ("signatures", "bodies"),
    [
        ("", 0),
        ("A", 1),
        ("AAAA", 1),
        ("ABABAB", 2),
        ("ABCD", 4),
        ("AAABAAABAA", 5),
        ("BAAAAAAAA", 2),  # a dense layer first, then experts
        ("AABAABAA", 4),  # the tiny gemma3: ends in the middle of its period
        ("AAAAABAAAAABAAAAABAAAAABAA", 7),  # gemma3 with 26 layers
        ("ABABABACACAC", 4),
        ("AABB", 2),
    ],
)
def test_as_few_bodies_as_possible_are_traced(signatures: str, bodies: int) -> None:
    segments = find_segments(list(signatures))
    assert layers_run(segments) == list(range(len(signatures)))
    assert num_bodies(segments) == bodies == fewest_bodies(signatures)


def test_a_segment_only_repeats_equal_layers() -> None:
    strings = ["".join(letters) for n in range(8) for letters in itertools.product("AB", repeat=n)]
    for signatures in strings:
        segments = find_segments(list(signatures))
        assert layers_run(segments) == list(range(len(signatures)))
        for s in segments:
            run = signatures[s.start : s.start + s.period * s.repetitions]
            assert run == run[: s.period] * s.repetitions
        # A loop has a cost, so one more body may be traced to save a loop or two.
        assert num_bodies(segments) <= fewest_bodies(signatures) + 1
    assert len(strings) == 255


class Layer(torch.nn.Module):
    """Its output depends on its weight, its arguments and the order of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)

    def forward(self, hidden_states: torch.Tensor, shift: torch.Tensor, factor: float, memory: Any) -> torch.Tensor:
        out = torch.tanh(self.linear(hidden_states) + shift) * factor
        if memory is not None:
            out = out + memory.get("first", 0.0)
            if "first" not in memory:
                memory["first"] = out
        return out


class Layers(torch.nn.Module):
    """What `LayerStack` needs of a model: a configuration, and a list of layers that it calls one after another."""

    def __init__(self, factors: list[float], *, shared_shift: bool = False, writes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = SimpleNamespace(num_hidden_layers=len(factors))
        self.config = SimpleNamespace(get_text_config=lambda: config)
        self.layers = torch.nn.ModuleList(Layer() for _ in factors)
        self.factors, self.shared_shift, self.writes = factors, shared_shift, writes

    def forward(self, hidden: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        memory = collections.UserDict() if self.writes else None
        num_layers = len(self.layers)
        by_layer = [shifts[0]] * num_layers if self.shared_shift else [shifts[i] for i in range(num_layers)]
        for layer, shift, factor in zip(self.layers, by_layer, self.factors, strict=True):
            hidden = layer(hidden, shift, factor, memory)
        return hidden


class Stacked:
    """The layers run by a `LayerStack`, and PyTorch's result for comparison."""

    def __init__(self, module: Layers, *, scan: bool = True, remat: Remat = "none") -> None:
        self.module = module
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(2, 3, 4, generator=generator)
        self.shifts = torch.randn(len(module.layers), 4, generator=generator)
        with torch.no_grad():
            self.expected = module(self.hidden, self.shifts).numpy()
        self.stack = LayerStack(module, scan=scan, unroll=1, remat=remat)

    def weights(self) -> dict[str, jax.Array]:
        flat = {name: jnp.asarray(p.detach().numpy()) for name, p in self.module.named_parameters()}
        weights = {}
        for segment, j, prefix in self.stack.slots():
            indices = [segment.start + j + r * segment.period for r in range(segment.repetitions)]
            parts = [flat[f"layers.{i}.linear.weight"] for i in indices]
            weights[f"{prefix}linear.weight"] = jnp.stack(parts) if segment.repetitions > 1 else parts[0]
        return weights

    def run(self, weights: dict[str, jax.Array], hidden: jax.Array, shifts: jax.Array) -> jax.Array:
        with tracing(Trace(weights=weights)), environment():
            return interop.jax_view(self.module(interop.torch_view(hidden), interop.torch_view(shifts)))

    def arguments(self) -> tuple[Any, ...]:
        return self.weights(), jnp.asarray(self.hidden.numpy()), jnp.asarray(self.shifts.numpy())

    def traced_tanhs(self) -> int:
        """The number of layer bodies in the program."""
        return str(jax.make_jaxpr(self.run)(*self.arguments())).count("= tanh ")


@pytest.mark.parametrize("shared_shift", [True, False])
def test_a_tensor_that_differs_per_layer_is_scanned_with_the_weights(shared_shift: bool) -> None:
    stacked = Stacked(Layers([0.9] * 5, shared_shift=shared_shift))
    assert stacked.stack.segments == [RepeatedLayers(0, 1, 5)]
    assert stacked.traced_tanhs() == 1
    assert distance(jax.jit(stacked.run)(*stacked.arguments()), stacked.expected) < ROUNDING


def test_layers_run_one_by_one_if_a_number_differs_per_layer() -> None:
    stacked = Stacked(Layers([0.9, 0.8, 0.7, 0.6]))
    assert stacked.traced_tanhs() == 4
    assert distance(jax.jit(stacked.run)(*stacked.arguments()), stacked.expected) < ROUNDING


def test_a_number_equal_in_every_repetition_may_differ_within_the_period() -> None:
    """The attribute `kind` makes the signatures differ; otherwise the period would be one layer."""
    module = Layers([0.9, 0.8] * 3)
    for i, layer in enumerate(module.layers):
        layer.kind = ("even", "odd")[i % 2]  # type: ignore[assignment]
    stacked = Stacked(module)
    assert stacked.stack.segments == [RepeatedLayers(0, 2, 3)]
    assert stacked.traced_tanhs() == 2
    assert distance(jax.jit(stacked.run)(*stacked.arguments()), stacked.expected) < ROUNDING


@pytest.mark.parametrize("remat", ["none", "full"])
def test_equal_layers_that_run_one_by_one_share_a_body(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two factors are two kinds of calls. Tensors may differ: each layer has its own shift."""
    calls, forward = collections.Counter[float](), Layer.forward

    def counted(self: Layer, hidden: Any, shift: Any, factor: float, memory: Any) -> Any:
        calls[factor] += 1
        return forward(self, hidden, shift, factor, memory)

    monkeypatch.setattr(Layer, "forward", counted)
    stacked = Stacked(Layers([0.9, 0.8] * 3), scan=False, remat=remat)
    calls.clear()
    assert distance(jax.jit(stacked.run)(*stacked.arguments()), stacked.expected) < ROUNDING
    assert calls == {0.9: 2, 0.8: 1}  # the first layer is also traced for its shapes


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", ["none", "half", "full"])
def test_a_dictionary_shared_by_layers_works(scan: bool, remat: Remat) -> None:
    stacked = Stacked(Layers([0.9] * 3, writes=True), scan=scan, remat=remat)
    assert distance(jax.jit(stacked.run)(*stacked.arguments()), stacked.expected) < ROUNDING


@pytest.mark.parametrize("remat", ["none", "linear", "half", "dots", "full"])
def test_remat_does_not_change_gradients(remat: Remat) -> None:
    def gradients(stacked: Stacked) -> tuple[Any, ...]:
        return jax.jit(jax.grad(lambda *args: (stacked.run(*args) ** 2).sum(), argnums=(1, 2)))(*stacked.arguments())

    plain = gradients(Stacked(Layers([0.9] * 3), scan=False))
    for ours, expected in zip(gradients(Stacked(Layers([0.9] * 3), remat=remat)), plain, strict=True):
        assert distance(ours, np.asarray(expected)) < ROUNDING


def test_layers_still_run_as_plain_pytorch() -> None:
    stacked = Stacked(Layers([0.9] * 3))
    with torch.no_grad():
        np.testing.assert_array_equal(stacked.module(stacked.hidden, stacked.shifts), stacked.expected)


@pytest.fixture(scope="module")
def gemma() -> Subject:
    """Eight layers of two kinds that differ only in rotary tables and mask, so they share one body."""
    return Subject("gemma3_text")


def test_a_scanned_model_equals_the_unrolled_one_and_pytorch(gemma: Subject) -> None:
    results = {}
    for scan in (True, False):
        model = gemma.ours(scan=scan)
        base, adapter = gemma.weights(model)
        program = jax.jit(model.logits).lower(base, adapter, {"tokens": jnp.asarray(gemma.tokens)})
        results[scan] = np.asarray(program.compile()(base, adapter, {"tokens": jnp.asarray(gemma.tokens)}))
        assert len(model.stack.slots()) == (1 if scan else 8)
        assert ("stablehlo.while" in program.as_text()) == scan
    assert distance(results[True], results[False]) < ROUNDING
    assert distance(results[True], gemma.logits) < LOGITS


def test_the_layout_has_every_parameter_once_stacked_or_not(gemma: Subject) -> None:
    scanned, unrolled = (gemma.ours(scan=scan) for scan in (True, False))
    for which in ("layout", "adapter_layout"):
        layout, flat = getattr(scanned, which), getattr(unrolled, which)
        names = [name for leaf in layout.values() for name in leaf.names]
        assert len(names) == len(set(names))
        assert set(names) == {name for leaf in flat.values() for name in leaf.names}
    stacked = "model.layers.0:8:1.self_attn.q_proj.weight"
    assert scanned.layout[stacked].names == tuple(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(8))
    base, _ = gemma.weights(scanned)
    again = stack(unstack(base, scanned.layout), scanned.layout)
    assert all(np.array_equal(base[key], again[key]) for key in base)


def test_layers_that_use_the_window_in_their_own_code_do_not_share_a_body() -> None:
    """Cohere 2 rotates queries and keys only in layers with a window, so these differ in more than the mask."""
    cohere = Subject("cohere2").ours(scan=True)
    assert [segment.period for segment in cohere.stack.segments] == [2]
    assert [segment.period for segment in Subject("gemma2").ours(scan=True).stack.segments] == [1]


@pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="transformers does not have the model yet")
def test_linked_layers_share_products_in_every_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with the same input are computed together; the first trace of the model finds out which."""
    model = CausalLM(configuration("zaya"), lora=LoraSpec(rank=2), kernels="fused", interpret=True)
    base, adapter = (
        {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in layout.items()}
        for layout in (model.layout, model.adapter_layout)
    )
    together: list[int] = []

    def counted(x: jax.Array, weights: list[jax.Array], *rest: Any) -> Any:
        together.append(len(weights))
        return lora_linear(x, weights, *rest)

    monkeypatch.setattr(lora, "lora_linear", counted)
    for _ in range(2):
        together.clear()
        jax.eval_shape(lambda b, a: model.hidden(b, a, {"tokens": jnp.ones((1, 8), jnp.int32)}), base, adapter)
        assert max(together) > 1
    assert model.stack.linked
