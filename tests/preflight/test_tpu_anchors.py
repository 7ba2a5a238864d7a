"""The published TPU rates, and the full training step they are compared with."""

from __future__ import annotations

import full_training
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_anchors
import transformers
from dose import full_dose_only
from generated import part_of
from tpu_published_rates import MODELS, PUBLISHED

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.devices.slices import find_slice
from trillora.engine.loss import token_losses
from trillora.model.bridge import CausalLM

ROUNDING = 1e-5  # relative, float32: chunks are summed in another order than whole logits


def test_every_published_rate_can_be_compiled_and_compared() -> None:
    assert len({case.name for case in PUBLISHED}) == len(PUBLISHED) >= 6
    for case in PUBLISHED:
        kind, sizes = MODELS[case.model]
        getattr(transformers, kind)(**sizes)
        assert find_slice(case.slice_name).num_devices > 1
        assert case.source and case.differs
        assert (case.tokens_per_second is None) != (case.tflops is None)


def test_the_page_shows_the_errors_of_the_recorded_programs() -> None:
    """Of today's simulator: with its own constants, and with those that were fitted without the model."""
    records = tpu_anchors.read_records()
    assert set(records["cases"]) == {case.name for case in PUBLISHED}
    assert set(records["fitted_without"]) == {case.model for case in PUBLISHED}
    assert part_of(tpu_anchors.PAGE, tpu_anchors.PART) == tpu_anchors.table(records), "run it with --table-only"


@full_dose_only  # a hundred simulations; the test above always has the errors that follow from these constants
def test_the_constants_of_a_model_are_fitted_to_the_others() -> None:
    records = tpu_anchors.read_records()
    found = {model: list(constants) for model, constants in tpu_anchors.fit_without_each_model(records)}
    assert found == records["fitted_without"]


def test_times_between_samples_follow_the_inverse_of_both_shares() -> None:
    times = {(a, b): 3 / a + 5 / b for a in tpu_anchors.SAMPLED for b in tpu_anchors.SAMPLED}
    assert tpu_anchors.between(times, 0.8, 0.93) == pytest.approx(3 / 0.8 + 5 / 0.93)


def test_tflops_are_converted_with_parameters_and_attention() -> None:
    """By hand, for 32 layers of 64 heads of 128: 6 x 15.83e9 + 12 x 32 x 8192 x 2048 / 2 = 98.2e9 per token."""
    case = next(case for case in PUBLISHED if case.name == "maxtext-16b@v5e-256")
    assert round(case.as_tokens_per_second(15_830_000_000)) == round(120.4e12 / 98.2012e9)


def test_full_training_differentiates_every_weight() -> None:
    """Compared with whole logits. The head is tied to the embedding, so its gradient has two parts."""
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        sliding_window=8,
    )
    model = CausalLM(config, dtype="float32", remat="full")
    shapes, _ = full_training.weight_shapes(model, make_mesh(jax.devices()[:1], MeshShape()), jnp.float32)
    rng = np.random.default_rng(0)
    weights = {key: jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32) for key, leaf in shapes.items()}
    tensors = dict(model.module.named_buffers())
    buffers = {
        key: jnp.asarray(tensors[leaf.names[0]].numpy()) for key, leaf in model.layout.items() if key not in shapes
    }
    num_rows, num_tokens = 2, 12
    tokens, targets = jnp.asarray(rng.integers(0, 64, (2, num_rows, num_tokens)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "weights": jnp.ones(tokens.shape)}

    def whole(weights: dict[str, jax.Array]) -> jax.Array:
        logits = model.logits({**buffers, **weights}, {}, {"tokens": tokens, "positions": positions})
        return token_losses(logits, targets).sum()

    loss = full_training.full_loss(model, chunk=5)
    ours = jax.jit(jax.grad(loss))(weights, buffers, batch, jax.random.key(0))
    expected = jax.jit(jax.grad(whole))(weights)
    assert len(ours) == len(expected) > 10
    for key, gradient in expected.items():
        scale = float(jnp.abs(gradient).max())
        assert scale > 0, key
        np.testing.assert_allclose(ours[key], gradient, atol=ROUNDING * scale, rtol=0, err_msg=key)
