"""Attention equals its definition in every form that models use, and the TPU kernel equals the reference.

The definition is written here as float64 loops. The Pallas kernel runs in the interpreter, on the CPU;
`test_attention_on_tpu.py` compiles it for TPUs. cuDNN needs a GPU: here only its list of unsupported forms is tested.

Legend: B sequences, T tokens, H query heads, K key/value heads, D key width, E value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.attention import Implementation, MaskRule, ScoreScaling, attend, unsupported
from trillora.model.overrides.attention import _attend_per_shard
from trillora.model.trace import Trace

pytestmark = pytest.mark.core

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
CAUSAL = MaskRule()
ROUNDING = 2e-5  # of the largest value: float32 sums over some hundred terms, taken in another order


@dataclass(frozen=True)
class Form:
    """One form of attention; the arrays are drawn by `draw`."""

    rule: MaskRule = CAUSAL
    softcap: float | None = None
    sinks: bool = False
    packed: bool = False  # several documents and padding in a sequence
    value_width: int = WIDTH
    key_heads: int = KEY_HEADS
    bias: str | None = None

    @property
    def scores(self) -> ScoreScaling:
        return ScoreScaling(scale=0.3, softcap=self.softcap)


# Forms that the TPU kernel supports. The caps and windows are small enough to matter: scores here reach about 4.
FORMS = {
    "causal": Form(),
    "window": Form(MaskRule(window=5)),
    "window of one": Form(MaskRule(window=1)),
    "window longer than the sequence": Form(MaskRule(window=10_000)),
    "chunks": Form(MaskRule(chunk=4)),
    "soft cap": Form(softcap=1.5),
    "sinks": Form(sinks=True),
    "packed": Form(packed=True),
    "packed chunks": Form(MaskRule(chunk=4), packed=True),
    "wide values": Form(value_width=24),
    "narrow values": Form(value_width=8),
    "one key head": Form(key_heads=1),
    "a key head per query head": Form(key_heads=HEADS),
    "all at once": Form(MaskRule(window=5), softcap=1.5, sinks=True, packed=True, value_width=24),
    "all at once, in chunks": Form(MaskRule(chunk=4), softcap=1.5, sinks=True, packed=True, value_width=8),
}
# Forms that only the reference supports.
REFERENCE_FORMS = {
    "not causal": Form(MaskRule(causal=False)),
    "not causal, packed": Form(MaskRule(causal=False), packed=True),
    "additive bias": Form(bias="per head"),
    "additive bias for all heads and sequences": Form(bias="shared"),
    "boolean bias": Form(bias="boolean"),
    "all at once, with a bias": Form(
        MaskRule(window=5), softcap=1.5, sinks=True, packed=True, value_width=24, bias="shared"
    ),
}


def draw(form: Form, num_rows: int, num_tokens: int) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Queries, keys and values, and the other arguments of `attend` for this form."""
    generator = np.random.default_rng(0)
    shapes = ((HEADS, WIDTH), (form.key_heads, WIDTH), (form.key_heads, form.value_width))
    tensors = tuple(jnp.asarray(generator.normal(size=(num_rows, num_tokens, *s)), jnp.float32) for s in shapes)
    extra: dict[str, Any] = {}
    if form.packed:
        rows = [document_ends(num_tokens, row) for row in range(num_rows)]
        extra["segments_BT"] = np.stack([segment_ids(ends, num_tokens) for ends in rows])
        extra["positions_BT"] = np.stack([positions(ids) for ids in extra["segments_BT"]])
    if form.sinks:
        extra["sinks_H"] = generator.normal(size=HEADS).astype(np.float32)
    if form.bias == "per head":
        extra["bias_BHTS"] = generator.normal(size=(num_rows, HEADS, num_tokens, num_tokens)).astype(np.float32)
    elif form.bias == "shared":
        extra["bias_BHTS"] = generator.normal(size=(1, 1, num_tokens, num_tokens)).astype(np.float32)
    elif form.bias == "boolean":
        sees = generator.random((num_rows, 1, num_tokens, num_tokens)) < 0.5
        extra["bias_BHTS"] = sees | np.eye(num_tokens, dtype=bool)
    return tensors, {name: jnp.asarray(array) for name, array in extra.items()}


def document_ends(num_tokens: int, row: int) -> list[int]:
    """Different for each sequence, not at the end of a block or chunk, and with padding after the last document."""
    return [num_tokens * 3 // 10 + row, num_tokens * 3 // 5, num_tokens - 2 - row]


def segment_ids(ends: list[int], num_tokens: int) -> np.ndarray:
    ids = np.zeros(num_tokens, np.int32)
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
        ids[start:end] = number
    return ids


def positions(ids: np.ndarray) -> np.ndarray:
    result = np.zeros(len(ids), np.int32)
    for number in set(ids.tolist()) - {0}:
        result[ids == number] = np.arange((ids == number).sum())
    return result


def real_tokens(extra: dict[str, jax.Array], num_rows: int, num_tokens: int) -> np.ndarray:
    """1 for tokens of documents, 0 for padding, whose output is not used; [B, T, 1, 1]."""
    segments = extra.get("segments_BT")
    real = np.ones((num_rows, num_tokens)) if segments is None else np.asarray(segments) > 0
    return real.astype(np.float32)[:, :, None, None]


def by_definition(form: Form, tensors: tuple[jax.Array, ...], extra: dict[str, jax.Array]) -> np.ndarray:
    """Softmax over the visible keys of each query, one score at a time."""
    query, key, value = (np.asarray(t, np.float64) for t in tensors)
    num_rows, num_tokens, num_heads = query.shape[:3]
    out = np.zeros((num_rows, num_tokens, num_heads, value.shape[-1]))
    for b in range(num_rows):
        for h in range(num_heads):
            k = h * key.shape[2] // num_heads
            for t in range(num_tokens):
                keys = [s for s in range(num_tokens) if may_see(form, extra, b, t, s)]
                scores = [score(form, extra, query[b, t, h] @ key[b, s, k], b, h, t, s) for s in keys]
                sink = [float(extra["sinks_H"][h])] if form.sinks else []
                total = sum(math.exp(x) for x in (*scores, *sink))
                for s, x in zip(keys, scores, strict=True):
                    out[b, t, h] += math.exp(x) / total * value[b, s, k]
    return out


def may_see(form: Form, extra: dict[str, jax.Array], b: int, t: int, s: int) -> bool:
    segments, at = (np.asarray(extra[n])[b] if n in extra else None for n in ("segments_BT", "positions_BT"))
    if segments is not None and segments[t] != segments[s]:
        return False
    place = np.arange(t + s + 1) if at is None else at
    if form.rule.causal and s > t:
        return False
    if form.rule.window is not None and s <= t - form.rule.window:
        return False
    if form.bias == "boolean" and not np.asarray(extra["bias_BHTS"])[b, 0, t, s]:
        return False
    return form.rule.chunk is None or place[t] // form.rule.chunk == place[s] // form.rule.chunk


def score(form: Form, extra: dict[str, jax.Array], product: float, b: int, h: int, t: int, s: int) -> float:
    x = float(product) * form.scores.scale
    if form.softcap is not None:
        x = form.softcap * math.tanh(x / form.softcap)
    if form.bias in ("per head", "shared"):
        bias = np.asarray(extra["bias_BHTS"], np.float64)
        x += bias[b % bias.shape[0], h % bias.shape[1], t, s]
    return x


def assert_close(ours: Any, expected: Any) -> None:
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("name", [*FORMS, *REFERENCE_FORMS])
def test_the_reference_equals_the_definition(name: str) -> None:
    form = {**FORMS, **REFERENCE_FORMS}[name]
    tensors, extra = draw(form, num_rows=2, num_tokens=13)
    real = real_tokens(extra, 2, 13)
    out = attend(*tensors, form.rule, form.scores, **extra)
    assert out.shape == (2, 13, HEADS, form.value_width)
    assert_close(out * real, by_definition(form, tensors, extra) * real)


def test_every_form_differs_from_plain_causal_attention() -> None:
    """The control: if a parameter had no effect at this size, the test above would prove nothing."""
    same = {"window longer than the sequence"}
    for name, form in {**FORMS, **REFERENCE_FORMS}.items():
        tensors, extra = draw(form, num_rows=2, num_tokens=13)
        plain = by_definition(replace(form, rule=MaskRule(), softcap=None, sinks=False, bias=None), tensors, {})
        differs = np.abs(by_definition(form, tensors, extra) - plain).max() > 1e-2
        shape_only = replace(Form(), value_width=form.value_width, key_heads=form.key_heads) == form
        assert differs == (name not in same and not shape_only), name


def test_a_query_without_visible_keys_gives_finite_output() -> None:
    tensors, _ = draw(Form(), num_rows=1, num_tokens=5)
    nothing = jnp.zeros((1, 1, 5, 5), bool)
    assert jnp.isfinite(attend(*tensors, MaskRule(), ScoreScaling(0.3), bias_BHTS=nothing)).all()


def test_the_output_has_the_type_of_the_values() -> None:
    tensors, _ = draw(Form(), num_rows=1, num_tokens=5)
    rounded = [t.astype(jnp.bfloat16) for t in tensors]
    assert attend(*rounded, MaskRule(), ScoreScaling(0.3)).dtype == jnp.bfloat16


def output_and_gradients(
    form: Form, num_rows: int, num_tokens: int, implementation: Implementation
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Only of real tokens: the output of padding is not used, and its gradient is zero."""
    tensors, extra = draw(form, num_rows, num_tokens)
    real = real_tokens(extra, num_rows, num_tokens)
    shape = (num_rows, num_tokens, HEADS, form.value_width)
    cotangent = np.random.default_rng(1).normal(size=shape).astype(np.float32) * real

    def run(*tensors: jax.Array) -> jax.Array:
        return attend(*tensors, form.rule, form.scores, **extra, implementation=implementation, interpret=True)

    def both(cotangent: jax.Array, *tensors: jax.Array) -> Any:
        out, pull_back = jax.vjp(run, *tensors)
        return out * real, pull_back(cotangent)

    return jax.jit(both)(cotangent, *tensors)


def uses_kernel(function: Any, *args: Any) -> bool:
    return "pallas_call" in str(jax.make_jaxpr(function)(*args))


# The interpreter takes seconds to compile, so several forms are combined: an error in one of them fails the case.
# Blocks are multiples of 128 tokens: 200 needs padding, and 384 is three blocks, some of them masked completely.
KERNEL_CASES = {"causal": 256, "window": 384, "packed chunks": 128, "one key head": 128, "all at once": 200}


@pytest.mark.parametrize(("name", "num_tokens"), KERNEL_CASES.items())
def test_the_tpu_kernel_equals_the_reference_in_output_and_gradients(name: str, num_tokens: int) -> None:
    form = FORMS[name]
    ours, our_gradients = output_and_gradients(form, 1, num_tokens, "splash")
    expected, expected_gradients = output_and_gradients(form, 1, num_tokens, "xla")
    assert_close(ours, expected)
    for gradient, expected_gradient in zip(our_gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("name", FORMS)
def test_the_tpu_kernel_runs_every_supported_form(name: str) -> None:
    form = FORMS[name]
    tensors, extra = draw(form, num_rows=2, num_tokens=13)
    reason = unsupported("splash", *tensors, form.rule, form.scores, extra.get("sinks_H"), None)
    assert reason is None

    def run(*tensors: jax.Array) -> jax.Array:
        return attend(*tensors, form.rule, form.scores, **extra, implementation="splash", interpret=True)

    assert uses_kernel(run, *tensors)


@pytest.mark.parametrize("name", REFERENCE_FORMS)
def test_the_reference_runs_forms_that_the_tpu_kernel_does_not_support(name: str) -> None:
    form = REFERENCE_FORMS[name]
    tensors, extra = draw(form, num_rows=2, num_tokens=13)
    assert unsupported("splash", *tensors, form.rule, form.scores, extra.get("sinks_H"), extra.get("bias_BHTS"))

    def run(*tensors: jax.Array) -> jax.Array:
        return attend(*tensors, form.rule, form.scores, **extra, implementation="splash", interpret=True)

    assert not uses_kernel(run, *tensors)
    np.testing.assert_array_equal(run(*tensors), attend(*tensors, form.rule, form.scores, **extra))


def test_the_reference_runs_queries_and_keys_of_different_length() -> None:
    (query, key, value), _ = draw(Form(), num_rows=1, num_tokens=13)
    for implementation in ("splash", "cudnn"):
        reason = unsupported(implementation, query[:, :7], key, value, MaskRule(), ScoreScaling(1.0), None, None)
        assert reason == "queries and keys of different length"


@pytest.mark.parametrize(
    ("reason", "dtype", "width", "form"),
    [
        (None, jnp.bfloat16, 64, Form(value_width=64)),
        (None, jnp.float16, 256, Form(MaskRule(window=5), value_width=256)),
        (None, jnp.bfloat16, 64, Form(MaskRule(chunk=4), value_width=64)),
        ("bias", jnp.bfloat16, 64, Form(value_width=64, bias="shared")),
        ("soft-capped", jnp.bfloat16, 64, Form(value_width=64, softcap=1.5)),
        ("sinks", jnp.bfloat16, 64, Form(value_width=64, sinks=True)),
        ("float32", jnp.float32, 64, Form(value_width=64)),
        ("values of width 32", jnp.bfloat16, 64, Form(value_width=32)),
        ("width 512", jnp.bfloat16, 512, Form(value_width=512)),
        ("width 12", jnp.bfloat16, 12, Form(value_width=12)),
        ("odd", jnp.bfloat16, 64, Form(value_width=64)),
    ],
)
def test_cudnn_reports_which_forms_it_does_not_support(reason: str | None, dtype: Any, width: int, form: Form) -> None:
    num_tokens = 13 if reason == "odd" else 14
    query: Any = jax.ShapeDtypeStruct((1, num_tokens, HEADS, width), dtype)
    value: Any = jax.ShapeDtypeStruct((1, num_tokens, HEADS, form.value_width), dtype)
    extra = draw(form, num_rows=1, num_tokens=num_tokens)[1]
    answer = unsupported(
        "cudnn", query, query, value, form.rule, form.scores, extra.get("sinks_H"), extra.get("bias_BHTS")
    )
    assert answer is None if reason is None else reason in (answer or "")


@pytest.mark.parametrize("name", ["all at once, in chunks", "one key head"])
def test_eight_devices_equal_one(name: str) -> None:
    """Sequences are split over data and fsdp, heads over tensor; a single key head is not split."""
    form = FORMS[name]
    mesh = make_mesh(jax.devices()[:8], MeshShape(data=2, fsdp=2, tensor=2))
    tensors, extra = draw(form, num_rows=4, num_tokens=16)
    real = real_tokens(extra, 4, 16)

    def sharded(*tensors: jax.Array) -> jax.Array:
        trace = Trace(
            weights={},
            segments_BT=extra.get("segments_BT"),
            positions_BT=extra.get("positions_BT"),
            attention="splash",
            interpret=True,
            mesh=mesh,
        )
        return _attend_per_shard(trace, *tensors, form.rule, form.scores, extra.get("sinks_H"), None) * real

    def reference(*tensors: jax.Array) -> jax.Array:
        return attend(*tensors, form.rule, form.scores, **extra) * real

    assert uses_kernel(sharded, *tensors)
    weights = np.random.default_rng(1).normal(size=(4, 16, HEADS, form.value_width)).astype(np.float32)
    results = []
    for function in (sharded, reference):
        out, pull_back = jax.vjp(jax.jit(function), *tensors)
        results.append((out, *pull_back(jnp.asarray(weights * real))))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected)
