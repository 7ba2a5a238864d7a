"""Compares cuDNN's ragged attention with the reference, on a GPU: outputs and gradients.

    python tests/support/ragged_on_gpu.py [--json] [part of a case's name]

Prints a line for each case with the largest errors, relative to the largest value, and ends with status 1 if one is too
large. `test_attention_on_gpu.py` runs it in a process of its own, because the other tests run on the CPU.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.devices.chips import generation_of
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.engine.ragged import documents_bucket, find_documents
from trillora.model.overrides.attention import _attend_per_shard
from trillora.model.trace import Trace

# Both kernels round probabilities and outputs to bfloat16, 2**-9 relative; sums of some hundred products of these come
# to about 1e-2 of the largest value. A wrong document gives errors near 1.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}
MASK_FACTOR = 1.5  # the errors may not be larger than this times the same kernel's with a mask, plus rounding
CAUSAL = MaskRule()
LONG = ([300, 200, 12], [512], [1, 1, 1, 500])
BLOCKS = ([128, 128, 128, 128], [100, 128, 3, 120, 128], [30, 20, 128, 10, 10, 5, 128])
SHORT = ([7] * 60, [3] * 40 + [100, 200], [])  # the last sequence is only padding


@dataclass(frozen=True)
class Case:
    lengths: tuple[list[int], ...] = LONG
    rule: MaskRule = CAUSAL
    heads: tuple[int, int, int] = (8, 2, 64)  # query heads, key heads, width
    num_tokens: int = 512
    dtype: str = "bfloat16"
    room: tuple[int, int] | None = None  # tokens of a block, documents that begin in it
    remat: bool = False
    split: bool = False


CASES = {
    "grouped heads": Case(),
    "a key head per query head": Case(heads=(4, 4, 64)),
    "one key head": Case(heads=(8, 1, 128)),
    "width 128": Case(heads=(8, 2, 128)),
    "width 256": Case(heads=(4, 2, 256)),
    "width 80": Case(heads=(4, 2, 80)),
    "float16": Case(dtype="float16"),
    "short documents and padding": Case(SHORT),
    "room for 128 documents": Case(room=(512, 128)),
    "blocks of 128": Case(BLOCKS, room=(128, 5)),
    "blocks of 128, window of 50": Case(BLOCKS, room=(128, 5), rule=MaskRule(window=50)),
    "blocks of 128, chunks of 48": Case(BLOCKS, room=(128, 5), rule=MaskRule(chunk=48)),
    "blocks of 256, width 128": Case(BLOCKS, room=(256, 8), heads=(8, 2, 128)),
    "334 tokens": Case(([100, 50, 3], [334], [200, 100, 20]), num_tokens=334),
    "window of 5": Case(rule=MaskRule(window=5)),
    "window of 100": Case(rule=MaskRule(window=100)),
    "window of 100, a key head per query head": Case(rule=MaskRule(window=100), heads=(4, 4, 128)),
    "window longer than the sequence": Case(rule=MaskRule(window=600)),
    "chunks of 64": Case(rule=MaskRule(chunk=64)),
    "chunks of 200, short documents": Case(SHORT, rule=MaskRule(chunk=200)),
    "recomputed in the backward pass": Case(remat=True),
    "one shard of a mesh": Case(split=True),
    "2048 tokens": Case(([600, 700, 500, 200], [2048], [128] * 16), heads=(32, 8, 64), num_tokens=2048),
}


def packed(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions [B, T]."""
    shape = (len(case.lengths), case.num_tokens)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, lengths in enumerate(case.lengths):
        ends = np.cumsum(lengths, dtype=int).tolist()
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True), 1):
            segments[row, end - length : end] = number
            positions[row, end - length : end] = np.arange(length)
    return segments, positions


def errors_of(case: Case) -> dict[str, Any]:
    """The largest errors of the output and the gradients, for the lengths and for the mask."""
    generator = np.random.default_rng(0)
    num_heads, num_key_heads, width = case.heads
    segments, positions = packed(case)
    shape = segments.shape
    arrays = [generator.normal(size=(*shape, n, width)) for n in (num_heads, num_key_heads, num_key_heads, num_heads)]
    given = [jnp.asarray(array, case.dtype) for array in arrays]
    is_real = jnp.asarray(segments > 0)[:, :, None, None]
    weights = jnp.where(is_real, given.pop(), 0)  # padding has no part in the loss
    room = case.room or (case.num_tokens, documents_bucket(max(map(len, case.lengths)) + 1))

    def run(implementation: Any, use_lengths: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        ids, at = jnp.asarray(segments), jnp.asarray(positions)
        documents = find_documents(ids, *room) if use_lengths else None
        scores = ScoreScaling(width**-0.5)
        if case.split:
            mesh = make_mesh(jax.devices()[:1], MeshShape())
            trace = Trace({}, ids, at, documents, attention=implementation, mesh=mesh)
            return _attend_per_shard(trace, query, key, value, case.rule, scores, None, None)
        tensors, rest = (query, key, value, case.rule, scores), {"segments_BT": ids, "positions_BT": at}
        return attend(*tensors, **rest, documents=documents, implementation=implementation)

    def results(implementation: Any, use_lengths: bool, *tensors: jax.Array) -> list[np.ndarray]:
        def loss(*tensors: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = run(implementation, use_lengths, *tensors)
            return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

        loss = jax.checkpoint(loss) if case.remat else loss
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        (_, out), gradients = step(*tensors)
        if use_lengths:
            text = step.lower(*tensors).as_text()
            assert "max_seg_per_batch" in text and '"PADDING_CAUSAL"' in text.replace("\\22", '"'), "a mask was used"
        return [np.asarray(array, np.float64) for array in (jnp.where(is_real, out, 0), *gradients)]

    exact = results("xla", False, *(array.astype(jnp.float32) for array in given))
    found = {"lengths": results("cudnn", True, *given), "mask": results("cudnn", False, *given)}
    real = np.asarray(is_real)
    padding_is_zero = all(np.isfinite(a).all() and not (a * ~real).any() for a in found["lengths"])
    errors = {
        name: [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(arrays, exact, strict=True)]
        for name, arrays in found.items()
    }
    limit = TOLERANCE[case.dtype]
    as_mask = all(a <= MASK_FACTOR * b + limit / 4 for a, b in zip(errors["lengths"], errors["mask"], strict=True))
    return {**errors, "passes": max(errors["lengths"]) <= limit and padding_is_zero and as_mask}


def main() -> None:
    device: Any = jax.devices()[0]
    if device.platform != "gpu" or not generation_of(device).has_ragged:
        print(f"cuDNN has no ragged attention for {device.device_kind}")
        sys.exit(0)
    results: dict[str, Any] = {}
    wanted = [word for word in sys.argv[1:] if word != "--json"]
    cases = {name: case for name, case in CASES.items() if all(word in name for word in wanted)}
    for name, case in cases.items():
        try:
            results[name] = errors_of(case)
            shown = "  ".join(
                f"{part} {' '.join(f'{e:.1e}' for e in results[name][part])}" for part in ("lengths", "mask")
            )
        except Exception as error:
            traceback.print_exc(limit=-3)
            results[name] = {"passes": False, "error": str(error)[:2000]}
            shown = str(error)[:300].replace("\n", " ")
        print(f"{'ok  ' if results[name]['passes'] else 'FAIL'} {name}: {shown}", flush=True)
    passed = sum(result["passes"] for result in results.values())
    print(f"{passed} of {len(cases)} pass on {device.device_kind}, jax {jax.__version__}", flush=True)
    if "--json" in sys.argv:
        print(json.dumps(results))
    sys.exit(0 if passed == len(cases) else 1)


if __name__ == "__main__":
    main()
