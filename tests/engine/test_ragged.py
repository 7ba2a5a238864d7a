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
from descriptions import gpu, llama
from dose import dose
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from memory_data import in_memory, some_documents
from pydantic import TypeAdapter
from tiny_run import llama as tiny_llama
from tiny_run import recipe as tiny_recipe
from tiny_run import write_both

from trillora.data.batches import Batches
from trillora.data.stage import StageData, evaluation_batches, read_stage, shortest_block
from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.engine.ragged import documents_bucket, find_documents, ragged_function, why_masked
from trillora.events import Chosen, Event, ignore_events
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import load_tokenizer
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import DocumentRoom, StepSettings
from trillora.recipe.schema import MeshSection, stages_of
from trillora.step.decisions import Decisions, decide_by_hardware

CAUSAL = MaskRule()
SCORES = ScoreScaling(0.3)
NEWEST = (99, 0, 0)


def random_row(rng: random.Random, num_tokens: int, longest: int) -> list[int]:
    """Lengths of documents that fit; none for a sequence that is only padding."""
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0 and rng.random() < 0.9:
        lengths.append(rng.randint(1, min(left, rng.choice([1, 5, longest]), longest)))
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


def begins_in(lengths: list[int], num_tokens: int, block: int) -> list[list[tuple[int, int]]]:
    """By a loop: place and length of all that begins in each block. Padding ends with its block."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_tokens // block)]
    place = 0
    for length in lengths:
        found[place // block].append((place % block, length))
        place += length
    while place < num_tokens:
        length = block - place % block
        found[place // block].append((place % block, length))
        place += length
    return found


@pytest.mark.parametrize("block", [24, 12, 6])
def test_lengths_and_starts_equal_those_of_a_loop(block: int) -> None:
    rng, num_tokens, most = random.Random(0), 24, 24
    find = jax.jit(find_documents, static_argnums=(1, 2))
    for _ in range(dose(20, 500)):
        rows = [random_row(rng, num_tokens, block) for _ in range(4)]
        found = find(jnp.asarray(segment_ids(rows, num_tokens)[0]), block, most)
        expected = [pairs for row in rows for pairs in begins_in(row, num_tokens, block)]
        assert found.most == most and found.block_of((4, num_tokens)) == block
        assert len(expected) == len(found.lengths_BM) == len(found.starts_BN)
        for pairs, starts, lengths in zip(expected, found.starts_BN, found.lengths_BM, strict=True):
            assert starts.tolist() == [start for start, _ in pairs] + [-1] * (most + 1 - len(pairs))
            assert lengths.tolist() == [length for _, length in pairs] + [-1] * (most - len(pairs))
        assert found.lengths_BM.dtype == found.starts_BN.dtype == jnp.int32


def test_the_examples_of_the_module_are_right() -> None:
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    found = find_documents(segments, block=6, most=4)
    assert (found.lengths_BM.tolist(), found.starts_BN.tolist()) == ([[3, 2, 1, -1]], [[0, 3, 5, -1, -1]])
    found = find_documents(segments, block=3, most=2)
    assert (found.lengths_BM.tolist(), found.starts_BN.tolist()) == ([[3, -1], [2, 1]], [[0, -1, -1], [0, 2, -1]])


@pytest.mark.parametrize(("most", "bucket"), [(1, 2), (2, 2), (3, 3), (5, 6), (7, 8), (9, 12), (13, 16), (33, 48)])
def test_buckets_have_room(most: int, bucket: int) -> None:
    assert documents_bucket(most) == bucket


@pytest.mark.parametrize(
    ("longest", "length", "block"),
    [(2048, 2048, 2048), (1025, 2048, 2048), (1024, 2048, 1024), (3, 2048, 128), (3, 1000, 250), (3, 64, 64)],
)
def test_blocks_are_as_short_as_documents_allow(longest: int, length: int, block: int) -> None:
    assert shortest_block(longest, length) == block


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


def cudnn_by_loops(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    q_seqlen: Any = None,
    kv_seqlen: Any = None,
    q_offsets: Any = None,
    kv_offsets: Any = None,
    *,
    scale: float,
    mask_type: Any,
    sliding_window_length: int | None,
) -> jax.Array:
    """Attends within each document, which is a part of all tokens in a row, as in memory. What belongs to none is NaN:
    cuDNN does not write it."""
    assert mask_type == cudnn.MaskType.PADDING_CAUSAL and q_offsets is kv_offsets and q_seqlen is kv_seqlen
    num_tokens, num_heads, width = query.shape[1:]
    group = num_heads // key.shape[2]
    q, k, v = (np.asarray(a, np.float32).reshape(-1, a.shape[2], width) for a in (query, key, value))
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    out = np.full(q.shape, np.nan, np.float32)
    for row, (starts, lengths) in enumerate(zip(q_offsets.tolist(), q_seqlen.tolist(), strict=True)):
        assert max(lengths) <= num_tokens and len(starts) == len(lengths) + 1 and starts[-1] == -1
        for start, length in zip(starts, lengths, strict=False):
            begin = row * num_tokens + start
            for t in range(begin, begin + length):
                first = begin if sliding_window_length is None else max(begin, t - sliding_window_length + 1)
                logits = np.einsum("hd,shd->hs", q[t], k[first : t + 1]) * scale
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[t] = np.einsum("hs,shd->hd", weights, v[first : t + 1])
    return jnp.asarray(out, query.dtype).reshape(query.shape)


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize(("block", "most"), [(24, 5), (12, 3)])
@pytest.mark.parametrize(
    "rule", [CAUSAL, MaskRule(window=3), MaskRule(window=99), MaskRule(chunk=4), MaskRule(chunk=24)]
)
def test_attention_by_documents_equals_the_mask(
    rule: MaskRule, block: int, most: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "dot_product_attention", cudnn_by_loops)
    rows, num_tokens, generator = [[9, 1, 7, 5], [12, 12], [3, 2], []], 24, np.random.default_rng(0)
    segments, positions = (jnp.asarray(a) for a in segment_ids(rows, num_tokens))
    shapes = ((len(rows), num_tokens, heads, 8) for heads in (4, key_heads, key_heads))
    tensors = tuple(jnp.asarray(generator.normal(size=shape), jnp.bfloat16) for shape in shapes)
    extra: dict[str, Any] = {"segments_BT": segments, "positions_BT": positions}
    documents = find_documents(segments, block, most)
    ours = attend(*tensors, rule, SCORES, **extra, documents=documents, implementation="cudnn")
    expected = attend(*(t.astype(jnp.float32) for t in tensors), rule, SCORES, **extra)
    assert np.isfinite(np.asarray(ours, np.float32)).all(), "every token, also padding, belongs to a document"
    is_real = np.asarray(segments > 0)[:, :, None, None]
    # The output is rounded to bfloat16: 2**-9 of its value.
    np.testing.assert_allclose(np.asarray(ours, np.float32) * is_real, expected * is_real, rtol=2**-8, atol=1e-6)


def test_chunks_have_room_for_every_document_in_pieces() -> None:
    rng, num_tokens, visited = random.Random(1), 24, 0
    for _ in range(dose(300, 3000)):
        chunk, block = rng.randint(1, 20), rng.choice([24, 12, 6])
        row = random_row(rng, num_tokens, block)
        most = max(map(len, begins_in(row, num_tokens, block)))
        pieces = [min(chunk, length - start) for length in row for start in range(0, length, chunk)]
        in_pieces = max(map(len, begins_in(pieces, num_tokens, block)))
        assert in_pieces <= most + block // chunk + 1
        visited += in_pieces > most
    assert visited > 20


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
@pytest.mark.parametrize(
    ("rule", "window", "most"),
    [(CAUSAL, 0, 16), (MaskRule(window=7), 7, 16), (MaskRule(window=16), 0, 16), (MaskRule(chunk=8), 0, 19)],
)
def test_cudnn_gets_lengths_and_places_in_both_passes(rule: MaskRule, window: int, most: int, dtype: Any) -> None:
    query, key = (jax.ShapeDtypeStruct((2, 32, heads, 64), dtype) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        extra: dict[str, Any] = {"segments_BT": segments, "documents": find_documents(segments, 16, 16)}
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
        found = find_documents(segments, 32, 8) if documents else None
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

    def calls(room: tuple[int, int] | None) -> list[tuple[str, int, dict[str, Any]]]:
        model = CausalLM(
            config,
            dtype="bfloat16",
            scan=scan,
            remat="linear",
            attention="cudnn",
            document_room=room,
        )
        base = {k: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for k, leaf in model.layout.items()}
        inputs = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("tokens", "positions", "segments")}
        return kernel_calls(lambda base, inputs: model.hidden(base, {}, inputs).astype(jnp.float32).sum(), base, inputs)

    found = calls((8, 4))
    assert {call[0] for call in found} == {"Softmax"}
    assert all(config["max_seg_per_batch"] == 4 for _, _, config in found)
    assert {call[0] for call in calls(None)} == {"ScaleBiasSoftmax"}


documents_of = jax.jit(find_documents, static_argnums=(1, 2))


def test_no_block_has_more_documents_than_batches_say() -> None:
    rng, num_tokens, seen = random.Random(2), 32, set()
    for trial in range(dose(10, 100)):
        block = rng.choice([32, 16, 8])
        documents = in_memory(some_documents(rng, rng.randint(1, 60), longest=rng.choice([3, block])))
        pack = trial % 5 > 0
        batches = Batches(documents, batch_size=rng.randint(1, 5), sequence_length=num_tokens, seed=trial, pack=pack)
        found = [documents_of(batches.batch(n)["segments"], block, 20) for n in range(2)]
        rows = [documents.lengths_N[batches._buckets[0].rows[n]].tolist() for n in range(batches.num_rows)]
        most = max(len(begin) for row in rows for begin in begins_in(row, num_tokens, block))
        assert batches.documents_in(block) == most
        assert all(int((one.lengths_BM > 0).sum(axis=1).max()) <= most for one in found)
        assert pack or most <= 2, "a document and the padding after it"
        seen.add(most)
    assert max(seen) >= 8


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
    evaluated, block = evaluation_batches(both, 4), shortest_block(int(alone.batches.documents.lengths_N.max()), 256)
    assert evaluated is not None and alone.document_room and both.document_room
    assert alone.document_room == (block, alone.batches.documents_in(block))
    assert both.document_room == (block, evaluated.documents_in(block)) > alone.document_room
    assert read(pack=False).document_room is None


def decided(capability: str, needed: tuple[int, int] | None, config: Any, **fixed: Any) -> tuple[Any, str]:
    events: list[Event] = []
    decisions = Decisions(fixed, events.append)
    recipe = load_recipe({"model": "any", "data": "any.jsonl", "train": {"sequence_length": 2048}})
    decide_by_hardware(decisions, recipe, config, [gpu(capability)], needed and DocumentRoom(*needed))
    reasons = [event.reason for event in events if isinstance(event, Chosen) and event.path == "engine.attention"]
    return decisions.values.get("document_room"), reasons[0]


def test_the_setting_follows_the_data_the_card_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", NEWEST)
    grouped, needed = llama(num_key_value_heads=8), (1024, 11)
    room, reason = decided("9.0", needed, grouped)
    assert room == (1024, 12) and reason.endswith("; it gets the lengths of up to 12 documents in 1024 tokens")
    room, reason = decided("8.0", needed, grouped)
    assert room is None and "a mask keeps packed documents apart: cuDNN has no ragged attention for" in reason
    assert decided("9.0", (2048, 64), grouped)[0] == (2048, 64)
    assert decided("9.0", (2048, 65), grouped)[0] is None  # a mask is faster
    assert decided("12.0", needed, grouped)[0] is None  # not tried on these cards
    assert decided("9.0", None, grouped) == (None, "the kernel for bfloat16 on gpu")  # not packed, or not known
    assert decided("7.5", needed, grouped)[0] is None
    assert decided("9.0", needed, grouped, document_room=None)[0] is None  # a run that began without it
    for kept, expected in {(1024, 64): (1024, 64), (1024, 8): (1024, 12), (512, 64): (1024, 12)}.items():
        assert decided("9.0", needed, grouped, document_room=DocumentRoom(*kept))[0] == expected
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert decided("9.0", needed, grouped)[0] is None
    assert decided("9.0", needed, llama(num_key_value_heads=32))[0] == (1024, 12)


def test_settings_without_room_for_documents_are_read_and_stages_have_their_own() -> None:
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    without = StepSettings(
        backend="gpu", num_devices=1, mesh=MeshSection(**mesh), dtype="bfloat16", layers="unroll", attention="cudnn",
        loss_chunk=1024, remat="none", micro_batch_size=8,
    )  # fmt: skip
    assert StepSettings.from_dict(without.to_dict()) == without and without.document_room is None
    new = StepSettings.from_dict({**without.to_dict(), "document_room": [512, 32]})
    assert TypeAdapter(StepSettings).validate_json(json.dumps(new.to_dict()), strict=True) == new
    assert new.document_room == DocumentRoom(512, 32) and "document_room" not in new.shared()
    assert new.mesh == MeshSection()
