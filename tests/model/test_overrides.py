"""Our versions of models' own functions: each equals a plain loop in numpy, or the module's code in PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
from torchax import interop
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trillora.engine.attention import MaskRule, visible
from trillora.errors import TrilloraError
from trillora.model.overrides.attention import NAME, TensorOnDemand, register
from trillora.model.overrides.compressors import complete_windows
from trillora.model.overrides.expert_loops import static_loops
from trillora.model.overrides.indexers import choose_blocks
from trillora.model.overrides.ngrams import before, product, remainder
from trillora.model.overrides.recurrent import decaying_attention, document_convolution
from trillora.model.overrides.torchax_fixes import counted_no_grad, environment
from trillora.model.trace import Trace, replaced, tracing

# Two sequences, with documents that begin inside and at the edge of blocks of 4.
SEGMENTS = np.array([[1] * 5 + [2] * 6, [1] * 4 + [2] * 1 + [3] * 6])
POSITIONS = np.array([[*range(5), *range(6)], [*range(4), 0, *range(6)]])


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_attention_with_decay_sums_over_the_tokens_of_a_document() -> None:
    B, T, H, D = 2, 11, 3, 5
    query, key, value = (random(B, T, H, D, seed=seed) for seed in range(3))
    rate = np.array([0.1, 0.5, 1.0], np.float32)
    expected = np.zeros((B, T, H, D))
    for b in range(B):
        for t in range(T):
            for s in range(t + 1):
                if SEGMENTS[b, s] == SEGMENTS[b, t]:
                    weight = np.exp(-rate * (t - s)) * (query[b, t] * key[b, s]).sum(-1)
                    expected[b, t] += weight[:, None] * value[b, s]
    attention = jax.jit(decaying_attention, static_argnums=5)
    ours = attention(query, key, value, rate, SEGMENTS, 4)
    np.testing.assert_allclose(ours, expected, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize(("groups", "extended", "dilation"), [(6, False, 1), (2, True, 1), (6, True, 3)])
def test_a_convolution_gives_the_same_as_for_each_document_alone(groups: int, extended: bool, dilation: int) -> None:
    """Padded by the module, or extended by the model with what precedes a document."""
    torch.manual_seed(0)
    reach = 2 * dilation
    convolution = torch.nn.Conv1d(6, 6, 3, groups=groups, padding=0 if extended else reach, dilation=dilation)
    first = torch.randn(6, 1)

    def run(tokens_CT: torch.Tensor) -> torch.Tensor:
        given = torch.cat([first.expand(6, reach), tokens_CT], dim=1) if extended else tokens_CT
        return convolution(given[None])[0, :, : tokens_CT.shape[1]]

    tokens = torch.tensor(random(2, 6, 11))
    expected = [[run(tokens[b][:, SEGMENTS[b] == s]) for s in np.unique(SEGMENTS[b])] for b in range(2)]
    places = first.numpy() if extended else np.zeros((6, 1), np.float32)
    given = np.concatenate([np.broadcast_to(places, (2, 6, reach)), tokens.numpy()], axis=2)
    weight, bias = (p.detach().numpy() for p in (convolution.weight, convolution.bias))
    compiled = jax.jit(document_convolution, static_argnums=(4, 5))
    ours = compiled(given, weight, bias, SEGMENTS, groups, dilation)
    separate = np.stack([torch.cat(documents, dim=1).detach().numpy() for documents in expected])
    np.testing.assert_allclose(ours, separate, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("num_local", [0, 1, 2])
def test_blocks_of_keys_are_chosen_within_a_document(num_local: int) -> None:
    B, H, T, size, num_chosen = 2, 2, 11, 2, 2
    scores = random(B, H, T, T)
    seen = np.asarray(jax.jit(visible, static_argnums=(0, 1, 2))(MaskRule(), T, T, SEGMENTS))
    expected = np.zeros((B, H, T, T), bool)
    for b, h, t in np.ndindex(B, H, T):
        blocks: dict[int, list[int]] = {}
        for s in np.flatnonzero(seen[b, t]):
            blocks.setdefault(POSITIONS[b, s] // size, []).append(s)
        own = POSITIONS[b, t] // size
        local = {max(own - back, 0) for back in range(num_local)}
        ranked = sorted(blocks, key=lambda n: (n not in local, -max(scores[b, h, t, s] for s in blocks[n])))
        for n in ranked[:num_chosen]:
            expected[b, h, t, blocks[n]] = True
    choose = jax.jit(choose_blocks, static_argnums=(3, 4, 5))
    ours = choose(scores, POSITIONS, seen, size, num_chosen, num_local)
    np.testing.assert_array_equal(np.asarray(ours) & seen[:, None], expected)


def test_windows_of_tokens_begin_at_the_first_token_of_a_document() -> None:
    rate = 2
    windows = complete_windows(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS), rate)
    num_windows = 0
    for b in range(2):
        slots = [s for s in range(11) if POSITIONS[b, s] % rate == rate - 1]
        num_windows += len(slots)
        np.testing.assert_array_equal(windows.end_BN[b, : len(slots)], slots)
        np.testing.assert_array_equal(windows.first_BN[b, : len(slots)], [POSITIONS[b, s] - 1 for s in slots])
        seen = [[s <= t and SEGMENTS[b, s] == SEGMENTS[b, t] for s in slots] for t in range(11)]
        np.testing.assert_array_equal(windows.visible_BTN[b, :, : len(slots)], seen)
        assert not windows.visible_BTN[b, :, len(slots) :].any()
    assert num_windows == 5 + 5
    assert complete_windows(jnp.asarray(POSITIONS), None, 12).end_BN.shape == (2, 0)


def test_hashes_of_63_bits_equal_exact_integers() -> None:
    random_integers = np.random.default_rng(0)
    tokens = [0, 1, 65535, 65536, 2**31 - 1, *random_integers.integers(0, 2**31, 20).tolist()]
    sizes = [2, 65537, 2**31 - 1]
    for multiplier in (1, 2**62 + 2**33 - 1, *random_integers.integers(0, 2**63 - 1, 5).tolist()):
        digits = product(jnp.asarray(tokens), multiplier)
        expected = [[(token * multiplier) % 2**64 % size for size in sizes] for token in tokens]
        np.testing.assert_array_equal(remainder(digits, jnp.asarray(sizes)), expected)


def test_ngrams_end_at_documents_and_end_tokens() -> None:
    tokens, end = np.array([[5, 6, 1, 7, 8, 9, 4, 5, 6, 7, 8], [*range(20, 31)]]), 1
    for back in range(3):
        expected = np.full(tokens.shape, end)
        for b, t in np.ndindex(*tokens.shape):
            source = range(max(t - back, 0), t + 1)
            one_document = all(SEGMENTS[b, s] == SEGMENTS[b, t] for s in source)
            if t >= back and one_document and all(tokens[b, s] != end for s in source[:-1]):
                expected[b, t] = tokens[b, t - back]
        found = jax.jit(before, static_argnums=(2, 3))(tokens, SEGMENTS, back, end)
        np.testing.assert_array_equal(found, expected)


def test_keys_that_no_mask_explains_are_refused() -> None:
    register()
    rule = TensorOnDemand(num_queries=5, num_keys=5)
    with tracing(Trace(weights={})), environment():
        tensors = [interop.torch_view(jnp.zeros((1, 2, length, 4))) for length in (5, 6, 6)]
        with pytest.raises(TrilloraError, match="5 tokens to 6 keys of its own"):
            ALL_ATTENTION_FUNCTIONS[NAME](torch.nn.Identity(), *tensors, rule)


def test_a_rule_acts_as_a_mask_tensor() -> None:
    rule = TensorOnDemand(num_sequences=2, num_queries=11, num_keys=11)
    with tracing(Trace(weights={}, segments_BT=jnp.asarray(SEGMENTS))), environment():
        additive = torch.where(rule, 0.0, -1.0)
        first = rule[:, 0]
        assert rule.dtype == torch.bool and rule.shape == (2, 1, 11, 11)
    seen = np.asarray(visible(MaskRule(), 11, 11, jnp.asarray(SEGMENTS)))
    np.testing.assert_array_equal(interop.jax_view(first), seen)
    np.testing.assert_array_equal(interop.jax_view(additive)[:, 0], np.where(seen, 0.0, -1.0))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_no_gradient_flows_through_no_grad() -> None:
    """Unlike through the forward of an autograd function, which PyTorch also runs without gradients."""

    def loss(x: jax.Array) -> jax.Array:
        with tracing(Trace(weights={})), environment(), replaced(counted_no_grad()):
            t = interop.torch_view(x)
            with torch.no_grad():
                constant = (t * 3).exp()
            return interop.jax_view((constant * Square.apply(t)).sum())

    x = jnp.asarray([0.1, 0.2])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), jnp.exp(3 * x) * 2 * x, rtol=1e-6)


class Mixture(torch.nn.Module):
    """Calls the experts of a model, or its whole mixture where the router sorts the tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind = "MoE" if name == "jetmoe" else "Experts"
        self.inner = next(m for m in tiny_models.build(name).modules() if type(m).__name__.endswith(kind))
        self.routes = name == "jetmoe"

    def forward(self, hidden_ND: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden_ND[None]) if self.routes else self.inner(hidden_ND, index_NK, weight_NK)
        return out.reshape(hidden_ND.shape)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # as in `CausalLM.run`
@pytest.mark.parametrize("name", ["dbrx", "longcat_flash", "jetmoe"])
def test_a_loop_over_experts_gives_the_same_in_a_trace(name: str) -> None:
    module = Mixture(name)
    hidden = torch.tensor(random(7, 64)).requires_grad_()
    index = torch.tensor([[0, 1], [1, 3], [3, 1], [0, 3], [1, 0], [3, 0], [1, 3]])  # expert 2 has no token
    weights = torch.rand(index.shape, generator=torch.Generator().manual_seed(0))
    expected = module(hidden, index, weights)
    expected.square().sum().backward()
    parameters = {n: jnp.asarray(p.detach().numpy()) for n, p in module.named_parameters()}

    def loss(
        hidden: jax.Array, others: list[jax.Array], parameters: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        with replaced(static_loops(module)), environment():
            arguments = interop.torch_view((hidden, *others))
            out = torch.func.functional_call(module, interop.torch_view(parameters), arguments)
        return jnp.square(interop.jax_view(out)).sum(), interop.jax_view(out)

    first, *others = (jnp.asarray(t.detach().numpy()) for t in (hidden, index, weights))
    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(first, others, parameters)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert hidden.grad is not None
    np.testing.assert_allclose(gradient, hidden.grad.numpy(), rtol=1e-3, atol=1e-4)
