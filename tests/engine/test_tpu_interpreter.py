"""Numbers of the TPU's kernels, without a TPU: jax's TPU interpreter on a CPU, against dense references.

The interpreter (`pallas.tpu.InterpretParams`) simulates the chip's memories and copies between them; memory that was
never written is NaN, so a kernel that reads it is found. There are two Pallas kernels that we call on TPUs: splash
attention and the grouped matmul of experts. Blocks have the recipes' sizes: 1024, and 512 where a window hides
half of a longer block. Matmuls in int8 are XLA's own and have no kernel to interpret
(tests/model/test_low_precision.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.engine.mixture.grouped_product import GroupedForm, grouped_product, tiles_of
from trillora.engine.splash import block_kinds, block_size, is_fused

pytestmark = pytest.mark.core

TPU: Any = pltpu.InterpretParams(uninitialized_memory="nan")
# Largest difference of outputs and gradients, relative to the largest value. float32: sums of some hundred terms in
# another order; 1.4e-6 was seen. bfloat16: one rounding, 2^-8, of a result that is a sum of rounded terms; 0.006 seen.
FLOAT32, BFLOAT16 = 5e-6, 0.02


def largest_error(found: Any, wanted: Any) -> float:
    """Over outputs and gradients. NaN counts as infinite."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    errors = [np.abs(np.asarray(a - b, np.float64)).max() / np.abs(np.asarray(b, np.float64)).max() for a, b in pairs]
    return max(float("inf") if np.isnan(error) else float(error) for error in errors)


def outputs_and_gradients(function: Callable[..., jax.Array], *arguments: jax.Array) -> Any:
    def loss(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*arguments).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum(), out

    places = tuple(range(len(arguments)))
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=places, has_aux=True))(*arguments)
    return out, gradients


# tokens, window, soft cap, sinks, packed, width, dtype
FORMS = {
    "one block of 1024": (1024, None, None, False, False, 128, jnp.float32),
    "two blocks of 1024, packed": (2048, None, None, False, True, 64, jnp.float32),
    "blocks of 512 and a window": (2048, 512, None, False, True, 64, jnp.float32),
    "soft cap": (512, None, 30.0, False, True, 128, jnp.float32),
    "sinks": (512, 128, None, True, True, 64, jnp.float32),
    "padded to a whole block": (700, None, None, False, True, 64, jnp.float32),
    "heads of 256": (512, None, None, False, True, 256, jnp.float32),
    "bfloat16": (1024, None, None, False, True, 128, jnp.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
def test_splash_attention_equals_the_dense_reference(form: str, record_property: Callable[[str, object], None]) -> None:
    num_tokens, window, softcap, has_sinks, packed, width, dtype = FORMS[form]
    random = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(random.standard_normal((1, num_tokens, heads, width)), dtype) for heads in (2, 1, 1)
    )
    sinks = (jnp.asarray(random.standard_normal(2), jnp.float32),) if has_sinks else ()
    segments = jnp.asarray(np.sort(random.integers(1, 5, (1, num_tokens)))) if packed else None
    rule, scores = MaskRule(window=window), ScoreScaling(width**-0.5, softcap)

    def attention(implementation: Any, interpret: Any) -> Callable[..., jax.Array]:
        def run(query: jax.Array, key: jax.Array, value: jax.Array, *sinks: jax.Array) -> jax.Array:
            extra = {"sinks_H": sinks[0]} if sinks else {}
            return attend(
                query, key, value, rule, scores, segments_BT=segments, implementation=implementation,
                interpret=interpret, **extra,
            )  # fmt: skip

        return run

    arguments = (query, key, value, *sinks)
    found = outputs_and_gradients(attention("splash", TPU), *arguments)
    exact = tuple(array.astype(jnp.float32) for array in arguments)
    wanted = outputs_and_gradients(attention("xla", False), *exact)
    assert "pallas_call" in str(jax.make_jaxpr(attention("splash", TPU))(*arguments))  # not the reference itself
    error = largest_error(found, wanted)
    record_property("largest error", error)
    assert error < (FLOAT32 if dtype == jnp.float32 else BFLOAT16), error


def test_both_gradient_kernels_and_both_block_sizes_are_among_the_forms() -> None:
    sizes = {name: block_size(-(-form[0] // 512) * 512, 1024, form[1]) for name, form in FORMS.items()}
    assert set(sizes.values()) == {512, 1024}
    fused = set()
    for name, (num_tokens, window, *_) in FORMS.items():
        num_blocks = -(-num_tokens // sizes[name])
        fused.add(is_fused(block_kinds(num_blocks, sizes[name], window), sizes[name]))
    assert fused == {True, False}


@pytest.mark.parametrize("outputs_first", [False, True], ids=["inputs first", "outputs first"])
@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, FLOAT32), (jnp.bfloat16, BFLOAT16)], ids=["f32", "bf16"])
def test_grouped_matmul_equals_one_matmul_for_each_group(
    outputs_first: bool, dtype: Any, limit: float, record_property: Callable[[str, object], None]
) -> None:
    """Groups of all sizes, also an empty one and one that ends inside a tile."""
    sizes, num_inputs, num_outputs = np.array([300, 0, 513, 211]), 256, 384
    num_rows = int(sizes.sum())
    assert num_rows == 1024 and tiles_of(num_rows, len(sizes), num_inputs, num_outputs) is not None
    random = np.random.default_rng(1)
    rows = jnp.asarray(random.standard_normal((num_rows, num_inputs)), dtype)
    shape = (len(sizes), num_outputs, num_inputs) if outputs_first else (len(sizes), num_inputs, num_outputs)
    weights = jnp.asarray(random.standard_normal(shape), dtype)
    form = GroupedForm(outputs_first=outputs_first, kernel="megablox", interpret=TPU)

    def grouped(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_product(rows, weights, jnp.asarray(sizes, jnp.int32), form)

    def one_by_one(rows: jax.Array, weights: jax.Array) -> jax.Array:
        starts = np.cumsum([0, *sizes])
        parts = [
            rows[a:b] @ (weights[group].T if outputs_first else weights[group])
            for group, (a, b) in enumerate(itertools.pairwise(starts))
        ]
        return jnp.concatenate(parts)

    assert "pallas_call" in str(jax.make_jaxpr(grouped)(rows, weights))
    found = outputs_and_gradients(grouped, rows, weights)
    wanted = outputs_and_gradients(one_by_one, rows.astype(jnp.float32), weights.astype(jnp.float32))
    error = largest_error(found, wanted)
    record_property("largest error", error)
    assert error < limit, error


def test_a_kernel_that_reads_what_was_never_written_is_found() -> None:
    """The interpreter is able to fail."""
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, y_ref: Any, scratch_ref: Any) -> None:
        y_ref[...] = x_ref[...] + scratch_ref[...]

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = [pltpu.VMEM((8, 128), jnp.float32)]
    call = pl.pallas_call(kernel, out_shape=shape, scratch_shapes=scratch, interpret=TPU)
    assert np.isnan(np.asarray(call(jnp.ones((8, 128))))).all()
