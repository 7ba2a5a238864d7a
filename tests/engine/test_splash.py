"""The tables of blocks of the TPU's attention kernel, and its memory for long sequences.

jax's own tables are the reference; it makes them by comparing all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, PartitionSpec

from trillora.engine import splash
from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.engine.splash import block_kinds, block_size, is_fused, splash_kernel, tables

pytestmark = pytest.mark.core

LONG = 131_072  # tokens
ROUNDING = 2e-5  # of the largest value: float32 sums over some hundred terms, taken in another order


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("shrink", [False, True])
def test_the_tables_are_those_of_jax(by_key: bool, shrink: bool) -> None:
    """For all windows that a few blocks can have."""
    process = mask_info.process_mask_dkv if by_key else mask_info.process_mask
    for num_blocks, block in ((1, 4), (2, 4), (3, 4), (7, 4), (5, 2)):
        num_tokens = num_blocks * block
        for window in (None, *range(1, num_tokens)):
            shape = (num_tokens, num_tokens)
            mask: Any = splash_mask.CausalMask(shape)
            mask = mask if window is None else splash_mask.LocalMask(shape, (window - 1, 0), 0)
            heads = splash_mask.MultiHeadMask([mask] * 2)
            expected, _ = process(heads, (block, block), head_shards=1, q_seq_shards=1, shrink_grid=shrink)
            ours = tables(block_kinds(num_blocks, block, window), by_key=by_key, shrink=shrink)
            for found, wanted in zip(ours, (expected.data_next, expected.block_mask), strict=True):
                np.testing.assert_array_equal(found, wanted, err_msg=f"{num_blocks} of {block}, window {window}")
                assert found.dtype == np.asarray(wanted).dtype


def test_the_tables_do_not_compare_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax is asked for the mask of one block only, whatever the length."""
    asked: list[int] = []
    original = splash_mask._ComputableMask.__getitem__

    def counted(mask: Any, places: Any) -> Any:
        found = original(mask, places)
        asked.append(found.size)
        return found

    monkeypatch.setattr(splash_mask._ComputableMask, "__getitem__", counted)
    splash_kernel.cache_clear()
    kernel = splash_kernel(8, LONG, 4096, None, 1024, "name", True)
    assert kernel.fwd_mask_info.block_mask.shape == (1, 128, 5)
    assert asked and sum(asked) <= 16 * 1024**2  # all pairs are 17 billion


def test_a_kernel_made_for_one_mesh_is_used_on_another() -> None:
    """Kernels are kept by shape: nothing in them may belong to the mesh of the first call."""
    splash_kernel.cache_clear()
    query = jax.ShapeDtypeStruct((8, 256, 2, 64), jnp.bfloat16)
    for num_devices in (8, 4, 1):
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        rows = PartitionSpec("data")

        @jax.shard_map(mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=False)
        def run(query: jax.Array) -> jax.Array:
            return attend(query, query, query, MaskRule(), ScoreScaling(0.1), implementation="splash")

        assert "pallas_call" in str(jax.make_jaxpr(run)(query))


def arrays(jaxpr: Jaxpr) -> Iterator[Any]:
    """The results of all operations outside kernels, and of those inside what they call."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        if equation.primitive.name != "pallas_call":
            for parameter in equation.params.values():
                if isinstance(parameter, Jaxpr | ClosedJaxpr):
                    yield from arrays(parameter.jaxpr if isinstance(parameter, ClosedJaxpr) else parameter)


@pytest.mark.parametrize("rule", [MaskRule(), MaskRule(window=4096)])
def test_the_memory_of_the_gradient_is_linear_in_the_length(rule: MaskRule) -> None:
    """Traced with 4,096 to 131,072 tokens: no array is larger than the partial gradients that are allowed."""
    for num_tokens in (4096, 16_384, 32_768, LONG):
        query = jax.ShapeDtypeStruct((1, num_tokens, 2, 64), jnp.bfloat16)

        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(query, key, value, rule, ScoreScaling(0.1), implementation="splash").sum()

        traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, query, query)
        largest = max(array.size for array in arrays(traced.jaxpr))
        assert largest <= splash.MOST_PARTIAL * query.size, num_tokens


def test_which_gradient_kernel_is_used() -> None:
    def fused(num_blocks: int, window: int | None = None) -> bool:
        return is_fused(block_kinds(num_blocks, 1024, window), 1024)

    assert all(fused(number) for number in range(1, splash.MOST_PARTIAL + 1)), "always faster without a window"
    assert not fused(splash.MOST_PARTIAL + 1), "too large"
    assert fused(4, 512) and not fused(12, 512), "most partial gradients would be zero"


def test_windows_take_shorter_blocks_where_that_saves_much() -> None:
    """gpt-oss has windows of 128 tokens, Gemma of 512 or 1024, older Mistrals of 4096."""
    lengths, windows = (2048, 8192, LONG), (None, 128, 512, 1024, 4096)
    assert {window: [block_size(length, 1024, window) for length in lengths] for window in windows} == {
        None: [1024, 1024, 1024],
        128: [512, 512, 512],
        512: [512, 512, 512],
        1024: [1024, 512, 512],
        4096: [1024, 1024, 1024],
    }
    assert block_size(2048, 512, None) == 512, "wide heads"
    assert [block_size(n, 1024, 128) for n in (128, 768, 1536)] == [128, 256, 512], "lengths with other divisors"
    kernel = splash_kernel(2, 2048, 512, None, 1024, "name", True)
    assert kernel.fwd_mask_info.block_mask.shape == (1, 4, 2) and not kernel.kwargs["block_sizes"].use_fused_bwd_kernel


@pytest.mark.parametrize("window", [None, 100])
def test_the_gradient_in_two_kernels_equals_the_reference(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, with the limit below that."""
    monkeypatch.setattr(splash, "MOST_PARTIAL", 2)
    splash_kernel.cache_clear()
    rng = np.random.default_rng(2)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 384, heads, 16)), jnp.float32) for heads in (4, 2, 2))

    def output_and_gradients(implementation: Any) -> Any:
        def run(*tensors: jax.Array) -> jax.Array:
            rule, scores = MaskRule(window=window), ScoreScaling(0.3)
            return attend(*tensors, rule, scores, implementation=implementation, interpret=True)

        def both(*tensors: jax.Array) -> Any:
            out, pull_back = jax.vjp(run, *tensors)
            return out, *pull_back(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

        if implementation == "splash":
            assert str(jax.make_jaxpr(both)(query, key, value)).count("pallas_call") == 3
        return jax.jit(both)(query, key, value)

    try:
        for ours, expected in zip(output_and_gradients("splash"), output_and_gradients("xla"), strict=True):
            assert np.abs(ours - expected).max() <= ROUNDING * np.abs(expected).max()
    finally:
        splash_kernel.cache_clear()
