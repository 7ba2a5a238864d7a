"""Packed documents reach cuDNN with their places and lengths, for as many as the data has, or else with a mask.

cuDNN needs a GPU (`test_attention_on_gpu.py`). Here a loop over the documents replaces it, and the calls are
lowered for CUDA without being compiled.

Legend: B sequences, T tokens, M documents at most, H query heads, K key/value heads, D width.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dose import dose
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from test_data import in_memory, some_documents
from test_hardware import gpu, llama
from tiny_run import llama as tiny_llama
from tiny_run import recipe as tiny_recipe
from tiny_run import write_both

from trillora.data.batches import Batches
from trillora.data.stage import StageData, evaluation_batches, read_stage
from trillora.engine import attention
from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.engine.ragged import Documents, documents_bucket, find_documents, ragged_function, why_masked
from trillora.events import Chosen, Event, ignore_events
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import load_tokenizer
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import MeshSection, stages_of
from trillora.step.autotune import Decisions, decide_by_hardware
from trillora.training.state_files import SettingsFacts

CAUSAL = MaskRule()
SCORES = ScoreScaling(0.3)
NEWEST = (99, 0, 0)


def random_row(rng: random.Random, num_tokens: int) -> list[int]:
    """Lengths of documents that fit; none for a sequence that is only padding."""
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0 and rng.random() < 0.9:
        lengths.append(rng.randint(1, min(left, rng.choice([1, 5, num_tokens]))))
    return lengths


def segment_ids(rows: list[list[int]], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions [B, T], as `data.pack` fills them."""
    segments = np.zeros((len(rows), num_tokens), np.int32)
    positions = np.zeros_like(segments)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, 1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = range(length)
            start += length
    return segments, positions


def test_lengths_and_starts_equal_those_of_a_loop() -> None:
    rng, num_tokens = random.Random(0), 24
    find = jax.jit(find_documents, static_argnums=1)
    for trial in range(dose(40, 1000)):
        rows = [random_row(rng, num_tokens) for _ in range(4)]
        most = next(n for n in (2, 8, 32) if n >= max(map(len, rows))) if trial % 2 else 32
        found = find(jnp.asarray(segment_ids(rows, num_tokens)[0]), most)
        assert found.most == most
        for row, lengths in enumerate(rows):
            whole = lengths or [num_tokens]  # padding alone is one document
            whole = [*whole[:-1], whole[-1] + num_tokens - sum(whole)]  # else it belongs to the last one
            starts = [sum(whole[:number]) for number in range(len(whole))]
            assert found.lengths_BM[row].tolist() == whole + [-1] * (most - len(whole))
            assert found.starts_BN[row].tolist() == starts + [-1] * (most + 1 - len(whole))
        assert found.lengths_BM.dtype == found.starts_BN.dtype == jnp.int32


def test_the_example_of_the_module_is_right() -> None:
    found = find_documents(jnp.array([[1, 1, 1, 2, 2, 0]]), 4)
    assert (found.lengths_BM.tolist(), found.starts_BN.tolist()) == ([[3, 3, -1, -1]], [[0, 3, -1, -1, -1]])


@pytest.mark.parametrize(("most", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (100, 128)])
def test_buckets_are_powers_of_two_that_have_room(most: int, bucket: int) -> None:
    assert documents_bucket(most) == bucket


def by_documents(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents, scale: float, window: int | None
) -> jax.Array:
    """Attends within each document. What belongs to none is NaN: cuDNN does not write it."""
    group = query.shape[2] // key.shape[2]
    q, k, v = (np.asarray(a, np.float32) for a in (query, key, value))
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    out = np.full(query.shape, np.nan, np.float32)
    for row, (starts, lengths) in enumerate(zip(documents.starts_BN, documents.lengths_BM, strict=True)):
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=False):
            for t in range(start, start + length):
                first = start if window is None else max(start, t - window + 1)
                logits = np.einsum("hd,shd->hs", q[row, t], k[row, first : t + 1]) * scale
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[row, t] = np.einsum("hs,shd->hd", weights, v[row, first : t + 1])
    return jnp.asarray(out, query.dtype)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "rule", [MaskRule(), MaskRule(window=3), MaskRule(window=99), MaskRule(chunk=4), MaskRule(chunk=24)], ids=repr
)
def test_attention_by_documents_equals_the_mask(
    rule: MaskRule, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ragged_function", lambda: by_documents)
    monkeypatch.setattr(jax, "__version_info__", NEWEST)
    rows, num_tokens, generator = [[9, 1, 7, 5], [24], [3, 2], []], 24, np.random.default_rng(0)
    segments, positions = (jnp.asarray(a) for a in segment_ids(rows, num_tokens))
    shapes = ((len(rows), num_tokens, heads, 8) for heads in (4, key_heads, key_heads))
    tensors = tuple(jnp.asarray(generator.normal(size=shape), jnp.bfloat16) for shape in shapes)
    extra: dict[str, Any] = {"segments_BT": segments, "positions_BT": positions}
    documents = find_documents(segments, 4)
    ours = attend(*tensors, rule, SCORES, **extra, documents=documents, implementation="cudnn")
    expected = attend(*(t.astype(jnp.float32) for t in tensors), rule, SCORES, **extra)
    assert np.isfinite(np.asarray(ours, np.float32)).all(), "every token, also padding, belongs to a document"
    is_real = np.asarray(segments > 0)[:, :, None, None]
    # The output is rounded to bfloat16: 2**-9 of its value.
    np.testing.assert_allclose(np.asarray(ours, np.float32) * is_real, expected * is_real, rtol=2**-8, atol=1e-6)


def test_chunks_have_room_for_every_document_in_pieces() -> None:
    rng, num_tokens, visited = random.Random(1), 24, 0
    for _ in range(dose(200, 2000)):
        chunk = rng.randint(1, 20)
        rows = [random_row(rng, num_tokens) for _ in range(3)]
        pieces = max(sum(-(-length // chunk) for length in row) for row in rows)
        assert pieces <= max(map(len, rows)) + num_tokens // chunk
        visited += pieces > max(map(len, rows))
    assert visited > 5


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """jax asks the GPU while it traces."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr(jax, "__version_info__", NEWEST)
    ragged_function.cache_clear()
    yield
    ragged_function.cache_clear()


def kernel_calls(function: Callable[..., Any], *shapes: Any) -> list[tuple[str, int, dict[str, Any]]]:
    """The cuDNN kernels of a function for CUDA: name, number of operands, configuration."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @__cudnn\$fmha(\w+)\(([^)]*)\)(.*)", text)
    found = []
    for name, operands, rest in calls:
        config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', rest)
        assert config is not None
        decoded = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), config[1]))
        found.append((name, operands.count("%"), decoded["cudnn_fmha_backend_config"]))
    return found


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rule", "window", "most"), [(MaskRule(), 0, 16), (MaskRule(window=7), 7, 16),
                                                      (MaskRule(chunk=8), 0, 20)])  # fmt: skip
def test_cudnn_gets_lengths_and_places_in_both_passes(rule: MaskRule, window: int, most: int, dtype: Any) -> None:
    query, key = (jax.ShapeDtypeStruct((2, 32, heads, 64), dtype) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        extra: dict[str, Any] = {"segments_BT": segments, "documents": find_documents(segments, 16)}
        return attend(query, key, value, rule, SCORES, **extra, implementation="cudnn").astype(jnp.float32).sum()

    forward, backward = kernel_calls(jax.grad(loss, argnums=(0, 1, 2)), query, key, key, segments)
    assert forward[:2] == ("Softmax", 3 + 4)  # query, key, value; lengths and places of queries and of keys
    assert backward[:2] == ("SoftmaxBackward", 6 + 4)  # also statistics, the gradient and the output
    for _, _, config in (forward, backward):
        assert (config["mask_type"], config["max_seg_per_batch"]) == ("PADDING_CAUSAL", most)
        assert config["sliding_window_length"] == window


def names_of(documents: bool, rule: MaskRule = CAUSAL, *, key_heads: int = 4, mapped: bool = False) -> list[str]:
    query, key = (jax.ShapeDtypeStruct((2, 32, heads, 64), jnp.bfloat16) for heads in (4, key_heads))

    def run(query: jax.Array, key: jax.Array, segments: jax.Array) -> jax.Array:
        found = find_documents(segments, 8) if documents else None
        extra: dict[str, Any] = {"segments_BT": segments, "documents": found, "mapped": mapped}
        return attend(query, key, key, rule, SCORES, **extra, implementation="cudnn")

    calls = kernel_calls(run, query, key, jax.ShapeDtypeStruct((2, 32), jnp.int32))
    return [f"{name} {config['mask_type']}" for name, _, config in calls]


LENGTHS, MASK = ["Softmax PADDING_CAUSAL"], ["ScaleBiasSoftmax NO_MASK"]


@pytest.mark.usefixtures("as_on_hopper")
def test_a_mask_is_used_where_lengths_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of(True) == names_of(True, key_heads=1) == LENGTHS
    assert names_of(False) == MASK
    assert names_of(True, mapped=True) == MASK and "map over" in str(why_masked(4, 4, mapped=True))
    assert names_of(True, MaskRule(causal=False)) == MASK and "not causal" in str(why_masked(4, 4, causal=False))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert names_of(True) == LENGTHS and why_masked(4, 4) is None
    assert names_of(True, key_heads=1) == MASK and "0.11.1" in str(why_masked(4, 1))


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize("missing", ["function", "argument", "mask"])
def test_a_mask_is_used_if_jax_has_no_such_function(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offsets(query: Any, key: Any, value: Any, q_seqlen: Any, kv_seqlen: Any, *, scale: Any) -> None: ...

    assert ragged_function() is not None
    ragged_function.cache_clear()
    if missing == "mask":
        monkeypatch.setattr(cudnn, "MaskType", SimpleNamespace(CAUSAL=2))
    elif missing == "function":
        monkeypatch.delattr(cudnn, "dot_product_attention")
    else:
        monkeypatch.setattr(cudnn, "dot_product_attention", without_offsets)
    assert ragged_function() is None
    assert why_masked(4, 4) == "this jax has no ragged attention that is known here"


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize("scan", [True, False])
def test_the_model_gives_every_layer_the_lengths(scan: bool) -> None:
    config = tiny_llama()

    def calls(documents_per_sequence: int | None) -> list[tuple[str, int, dict[str, Any]]]:
        model = CausalLM(
            config,
            dtype="bfloat16",
            scan=scan,
            remat="linear",
            attention="cudnn",
            documents_per_sequence=documents_per_sequence,
        )
        base = {k: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for k, leaf in model.layout.items()}
        inputs = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("tokens", "positions", "segments")}
        return kernel_calls(lambda base, inputs: model.hidden(base, {}, inputs).astype(jnp.float32).sum(), base, inputs)

    num_bodies = 1 if scan else config.num_hidden_layers
    assert [call[0] for call in calls(8)] == ["Softmax"] * num_bodies
    assert all(config["max_seg_per_batch"] == 8 for _, _, config in calls(8))
    assert [call[0] for call in calls(None)] == ["ScaleBiasSoftmax"] * num_bodies


def test_no_sequence_has_more_documents_than_batches_say() -> None:
    rng, seen = random.Random(2), set()
    for trial in range(dose(5, 50)):
        documents = in_memory(some_documents(rng, rng.randint(1, 60), longest=rng.choice([3, 32])))
        pack = trial % 5 > 0
        batches = Batches(documents, batch_size=rng.randint(1, 5), sequence_length=32, seed=trial, pack=pack)
        most = max(int(batches.batch(step)["segments"].max()) for step in range(batches.steps_per_epoch))
        assert batches.most_documents == most
        assert pack or most == 1
        seen.add(most)
    assert max(seen) > 8


def test_a_stage_counts_the_documents_of_training_and_evaluation(tmp_path: Path) -> None:
    """The evaluation set here has shorter documents, so that more of them share a sequence."""
    write_both(tmp_path, num_rows=12)
    short = [{"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]} for _ in range(40)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short), "utf-8")
    tokenizer = load_tokenizer(tmp_path / "model")

    def read(**data: Any) -> StageData:
        settings = tiny_recipe(tmp_path, train={"sequence_length": 256}, data=data)
        return read_stage(stages_of(load_recipe(settings))[0], tokenizer, ignore_events)

    alone, both = read(), read(validation=str(tmp_path / "short.jsonl"))
    assert alone.most_documents == alone.batches.most_documents
    evaluated = evaluation_batches(both, 4)
    assert evaluated is not None
    assert both.most_documents == evaluated.most_documents > alone.most_documents > 1
    assert read(pack=False).most_documents is None


def decided(capability: str, most: int | None, config: Any, **fixed: Any) -> tuple[int | None, str]:
    events: list[Event] = []
    decisions = Decisions(fixed, events.append)
    recipe = load_recipe({"model": "any", "data": "any.jsonl"})
    decide_by_hardware(decisions, recipe, config, [gpu(capability)], most)
    reasons = [event.reason for event in events if isinstance(event, Chosen) and event.path == "engine.attention"]
    return decisions.values.get("documents_per_sequence"), reasons[0]


def test_the_setting_follows_the_data_the_card_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", NEWEST)
    grouped = llama(num_key_value_heads=8)
    number, reason = decided("9.0", 11, grouped)
    assert number == 16 and reason.endswith("; it gets the lengths of up to 16 documents in a sequence")
    number, reason = decided("8.0", 11, grouped)
    assert number is None and "a mask keeps packed documents apart: cuDNN has no ragged attention for" in reason
    assert decided("12.0", 11, grouped)[0] is None  # not tried on these cards
    assert decided("9.0", None, grouped) == (None, "the kernel for bfloat16 on gpu")  # not packed, or not known
    assert decided("7.5", 11, grouped)[0] is None
    assert decided("9.0", 11, grouped, documents_per_sequence=None)[0] is None  # a run that began without it
    assert decided("9.0", 11, grouped, documents_per_sequence=64)[0] == 64
    assert decided("9.0", 11, grouped, documents_per_sequence=8)[0] == 16  # the evaluation set was replaced
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert decided("9.0", 11, grouped)[0] is None
    assert decided("9.0", 11, llama(num_key_value_heads=32))[0] == 16


def test_settings_without_the_number_of_documents_are_read_and_stages_have_their_own() -> None:
    values = {
        "backend": "gpu", "num_devices": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "dtype": "bfloat16",
        "layers": "unroll", "attention": "cudnn", "loss_chunk": 1024, "remat": "none", "micro_batch_size": 8,
    }  # fmt: skip
    SettingsFacts.model_validate(values)
    old = StepSettings.from_dict(values)
    assert old.documents_per_sequence is None
    new = StepSettings.from_dict({**old.to_dict(), "documents_per_sequence": 32})
    SettingsFacts.model_validate(new.to_dict())
    assert StepSettings.from_dict(json.loads(json.dumps(new.to_dict()))) == new
    assert "documents_per_sequence" not in new.shared()
    assert new.mesh == MeshSection()
