"""Memory and time without the TPU compiler.

References: XLA's own count of arguments and flops, and small programs counted by hand. test_preflight_records.py
compares whole steps with recorded results of the TPU compiler.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny_models
import tiny_run
from dose import slow_case
from jax.sharding import NamedSharding, PartitionSpec
from transformers import MistralConfig, Qwen3Config, Qwen3MoeConfig

from trillora.devices.chips import CHIPS
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.attention import MaskRule, ScoreScaling
from trillora.engine.attention import attend as attention
from trillora.preflight.estimate.estimate import (
    CALIBRATION,
    Estimate,
    _Memory,
    argument_bytes,
    estimate,
    schedule,
    trace,
)
from trillora.preflight.estimate.traced import (
    Operation,
    TracedProgram,
    Value,
    causal_share,
    read_program,
    reshaped_splits,
)
from trillora.preflight.hlo.simulate import TPU
from trillora.preflight.predict import MemoryEstimates
from trillora.recipe.load import load_recipe
from trillora.step.build import Assembly, assemble

V5E = CHIPS["v5e"]


def build(name: str, config: Any, mesh: MeshShape, **options: Any) -> Assembly:
    defaults = {"rows": 8, "tokens": 128, "remat": "full", "attention": "splash", "layers": "scan", "loss_chunk": 512}
    options = {**defaults, **options}
    recipe = load_recipe(
        {
            "model": {"name": name, "dtype": "bfloat16"},
            "data": {"path": "chats.jsonl", "pack": True},
            "lora": {"rank": options.get("rank", 16), "targets": options.get("targets", "all-linear")},
            "hardware": {"backend": "tpu"},
            "train": {
                "batch_size": options["rows"],
                "micro_batch_size": options.get("micro", options["rows"]),
                "sequence_length": options["tokens"],
                "steps": 100,
            },
            "engine": {
                "layers": options["layers"],
                "remat": options["remat"],
                "attention": options["attention"],
                "loss_chunk": options["loss_chunk"],
            },
        }
    )
    settings = tiny_run.step_settings(recipe)
    return assemble(recipe, settings, config, make_mesh(jax.devices()[: mesh.size], mesh), num_steps=100)


@functools.cache
def mistral(**options: Any) -> Assembly:
    config = MistralConfig(sliding_window=None)
    config.num_hidden_layers = options.get("num_layers", 32)
    return build("mistral-7b", config, MeshShape(fsdp=8), **{"rows": 8, "tokens": 2048, **options})


@functools.cache
def estimate_mistral(chip: str = "v5e", **options: Any) -> Estimate:
    return estimate(mistral(**options), CHIPS[chip])


def attention_flops(tokens: int) -> float:
    """One sequence of Mistral-7B: 32 layers of 32 heads of 128. Two products forward, twice, and five backward. The
    causal kernel computes 3 of 4 blocks of 1024 x 1024 scores for 2048 tokens, 10 of 16 for 4096."""
    return 32 * 9 * 2 * {2048: 3, 4096: 10}[tokens] * 1024**2 * 32 * 128


def read(function: Any, *arguments: Value) -> TracedProgram:
    shapes = [jax.ShapeDtypeStruct(v.shape, jnp.float32 if v.itemsize == 4 else jnp.bfloat16) for v in arguments]
    return read_program(jax.make_jaxpr(function)(*shapes), list(arguments), num_devices=8)


def array(*shape: int, splits: tuple[int, ...] | None = None, gather_over: int = 1) -> Value:
    return Value(shape, 4, splits or (1,) * len(shape), gather_over)


def products(program: TracedProgram) -> list[Operation]:
    return [operation for operation in program.operations if operation.product is not None]


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)], ids=str)
def test_arguments_are_what_xla_counts(shape: MeshShape) -> None:
    """XLA counts a program that takes the step's arguments and ignores them. The size is the same for any device."""
    config = tiny_models.configuration("llama")
    config.update({"hidden_size": 256, "vocab_size": 1024})  # large enough to be split
    assembly = build("llama", config, shape)
    takes_all = jax.jit(lambda *arguments: 0, keep_unused=True)
    compiled = takes_all.lower(assembly.state_shapes, assembly.base_shapes, assembly.batch_shapes).compile()
    assert sum(argument_bytes(assembly).values()) == compiled.memory_analysis().argument_size_in_bytes


def test_a_step_that_surely_fits_is_guessed_to_fit() -> None:
    assembly = build("llama", tiny_models.configuration("llama"), MeshShape(), remat="none")
    predictor = MemoryEstimates(V5E)
    needed = predictor.guess(assembly).needed
    fits = [predictor.surely_fits(assembly, needed * 2**times) for times in range(10)]
    assert not fits[0] and fits[-1]


@pytest.mark.parametrize("remat", [slow_case("none"), "linear", slow_case("full")])
def test_flops_are_what_xla_counts(remat: str) -> None:
    """XLA counts a loop body once, so layers are unrolled and the loss has a single chunk. It also counts elementwise
    operations, about 1 % here."""
    config = tiny_models.configuration("llama")
    config.update({"hidden_size": 256, "intermediate_size": 704, "vocab_size": 1024, "head_dim": 32})
    config.update({"num_attention_heads": 8, "num_key_value_heads": 4})
    options = {"attention": "xla", "layers": "unroll", "loss_chunk": 8 * 128, "remat": remat}
    assembly = build("llama", config, MeshShape(), **options)
    assert estimate(assembly, V5E).flops == pytest.approx(assembly.lower().cost_analysis()["flops"], rel=0.03)


def qwen3_30b_a3b(**changes: Any) -> dict[str, Any]:
    """Qwen3-30B-A3B with four layers, without the sizes of its experts. Eight of its experts are as wide as a dense
    model's 6144."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return {**sizes, **heads, "max_position_embeddings": 40960, "tie_word_embeddings": False, **changes}


@pytest.mark.parametrize("mesh", [MeshShape(), slow_case(MeshShape(fsdp=8))], ids=str)
def test_a_mixture_takes_the_time_of_its_active_parameters_and_the_memory_of_all(mesh: MeshShape) -> None:
    """The reference is a dense model that has the active parameters. The mixture has a router too. On several devices,
    it has room for a quarter more rows: in three products, in two of them again, and in three of the backward pass.
    The time is longer because rows are sorted and sent, groups of rows are padded, and more weights are read."""
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    configs = (Qwen3MoeConfig(**qwen3_30b_a3b(**experts)), Qwen3Config(**qwen3_30b_a3b()))
    options = {"rows": 8 * mesh.size, "tokens": 4096, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    mixture, dense = (estimate(build("qwen3", config, mesh, **options), V5E) for config in configs)
    router, spare = 3 * 2 * 2048 * 128, 0.25 * (3 + 2 + 3) * 2 * 8 * 768 * 2048 if mesh.size > 1 else 0
    assert mixture.flops == pytest.approx(dense.flops + 8 * 4096 * 4 * (router + spare), rel=0.003)
    assert dense.step_seconds < mixture.step_seconds < (2 if mesh.size > 1 else 1.5) * dense.step_seconds
    inactive, of_router = 4 * (128 - 8) * 3 * 2048 * 768, 4 * 128 * 2048
    assert mixture.arguments["base"] - dense.arguments["base"] == 2 * (inactive + of_router) / mesh.size


def peak_bytes(program: TracedProgram, vocabulary: int = 0) -> tuple[float, float, float]:
    held = _Memory(CALIBRATION, vocabulary).peak(program)
    return held.gathered, held.activations, held.logits


def test_the_peak_of_two_products_counted_by_hand() -> None:
    """float32. The first product holds its weight and its result. The second holds both results and its weight."""

    def two_layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w * 2.0 + 1.0) @ v

    first = 64 * 128 * 4
    narrow = read(two_layers, array(64, 32), array(32, 128, gather_over=8), array(128, 16, gather_over=8))
    assert peak_bytes(narrow) == (32 * 128 * 4, first, 0)
    wide = read(two_layers, array(64, 32), array(32, 128, gather_over=8), array(128, 1000, gather_over=8))
    assert peak_bytes(wide) == (128 * 1000 * 4, first + 64 * 1000 * 4, 0)
    assert peak_bytes(wide, vocabulary=1000) == (128 * 1000 * 4, first, 64 * 1000 * 4)


def test_the_peak_of_a_loop_counted_by_hand() -> None:
    """Five layers, sequences split over 8 devices: the stacked inputs of all layers, the input and the output of the
    current layer, and its gathered weight."""

    def layers(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, w: (x @ w, x), x, weights)

    program = read(layers, array(64, 32, splits=(8, 1)), array(5, 32, 32, gather_over=8))
    x = 8 * 32 * 4
    assert peak_bytes(program) == (32 * 32 * 4, 5 * x + 2 * x, 0)


def test_saving_more_costs_memory_and_saves_arithmetic() -> None:
    full, linear, everything = (estimate_mistral(remat=remat) for remat in ("full", "linear", "none"))
    assert full.peak_bytes < linear.peak_bytes < everything.peak_bytes
    assert everything.flops <= linear.flops < 0.8 * full.flops  # four passes over the weights become three
    assert linear.step_seconds < full.step_seconds


def test_each_policy_saves_what_it_says() -> None:
    """Counted by hand: values per token of a layer of Mistral-7B, and products that are computed again."""
    names = ("linear", "wide", "half", "gate", "attention", "full")
    found = {remat: estimate_mistral(remat=remat) for remat in names}
    q_and_o, k_and_v, gate_and_up, attended = 2 * 4096, 2 * 1024, 2 * 14336, 4096
    linear = q_and_o + k_and_v + gate_and_up + attended
    saved = {"linear": linear, "wide": gate_and_up + attended, "half": linear / 2, "attention": attended, "full": 0}
    saved["gate"] = gate_and_up / 2 + attended
    again = {"wide": q_and_o + k_and_v, "half": (linear - attended) / 2, "attention": linear - attended}
    again["gate"], again["full"] = again["attention"] - gate_and_up / 2, again["attention"]
    kernels = {"half": 1 / 2, "full": 1}  # share of the layers whose attention runs again
    tokens, linear_flops = 2048, found["linear"].flops
    one_layer = 2 * tokens * linear  # bytes; what is recomputed for a layer is in memory at the peak
    for remat in names[1:]:
        fewer = 32 * tokens * 2 * (saved["linear"] - saved[remat])  # bytes
        assert 0 < fewer - (found["linear"].peak_bytes - found[remat].peak_bytes) < 3 * one_layer, remat
        products = 32 * tokens * 2 * 4096 * again[remat]
        kernel = 2 / 9 * attention_flops(tokens) * kernels.get(remat, 0)
        assert found[remat].flops - linear_flops == pytest.approx(products + kernel, rel=0.02), remat


def test_offloaded_values_take_no_memory_of_the_device() -> None:
    offloaded, attention_only = estimate_mistral(remat="offload"), estimate_mistral(remat="attention")
    assert 0.85 * attention_only.peak_bytes < offloaded.peak_bytes < attention_only.peak_bytes
    assert offloaded.flops == pytest.approx(estimate_mistral(remat="linear").flops)


@pytest.mark.core
def test_flops_of_mistral_counted_by_hand() -> None:
    result = estimate_mistral()
    attention, mlp = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336
    # Frozen weights have no gradient: forward, recomputed forward, and backward to the inputs. The last product of a
    # layer and the head are not recomputed.
    weights = 32 * (3 * (attention + mlp) - mlp / 3) + 2 * 4096 * 32000
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    expected = 2 * result.tokens * (weights + 6 * adapters) + attention_flops(2048)
    assert result.flops == pytest.approx(expected, rel=5e-3)  # some adapters are not recomputed either


def test_smaller_micro_batches_need_less_memory_for_the_same_flops() -> None:
    whole, parts = estimate_mistral(rows=32), estimate_mistral(rows=32, micro=8)
    assert parts.peak_bytes < 0.7 * whole.peak_bytes
    assert parts.flops == pytest.approx(whole.flops, rel=1e-3)
    assert parts.tokens == whole.tokens == 32 * 2048 / 8


def test_unrolled_layers_have_the_flops_of_scanned_ones() -> None:
    """A gathered weight is not kept from its forward to its backward use, or the whole base would be gathered."""
    scanned, unrolled = estimate_mistral(num_layers=8), estimate_mistral(num_layers=8, layers="unroll")
    assert unrolled.flops == pytest.approx(scanned.flops, rel=0.01)  # the first layer's input needs no gradient
    assert unrolled.peak_bytes == pytest.approx(scanned.peak_bytes, rel=0.25)


@pytest.mark.parametrize("name", ["deepseek_v3", "mamba", *map(slow_case, ("gemma2", "gpt2", "mixtral"))])
def test_any_architecture_is_estimated(name: str) -> None:
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    result = estimate(build(name, tiny_models.configuration(name), shape, remat="linear", rank=4), V5E)
    assert result.peak_bytes > sum(result.arguments.values())
    assert result.flops > 0 and result.step_seconds > result.flops / (V5E.bf16_tflops * 1e12)


def test_a_product_is_split_by_rows_and_by_the_tensor_axis() -> None:
    rows, weight = array(64, 32, splits=(4, 1)), array(32, 128, splits=(1, 2))
    [operation] = products(read(lambda x, w: x @ w, rows, weight))
    assert operation.flops == 2 * 64 * 32 * 128 / 8
    assert operation.outputs[0].splits == (4, 2) and operation.partial_bytes == 0


def test_a_sum_over_split_rows_is_reduced_between_devices() -> None:
    rows, errors = array(64, 32, splits=(8, 1)), array(64, 16, splits=(8, 1))
    [operation] = products(read(lambda x, e: x.T @ e, rows, errors))
    assert operation.outputs[0].splits == (1, 1)
    assert operation.partial_over == 8 and operation.partial_bytes == 32 * 16 * 4


def test_a_loop_repeats_its_body_and_stacks_its_slices() -> None:
    def layers(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, w: (x @ w, x), x, weights)

    program = read(layers, array(64, 32, splits=(8, 1)), array(5, 32, 32, gather_over=8))
    [loop] = program.operations
    assert loop.length == 5 and loop.body is not None
    assert [v.shape for v in loop.outputs] == [(64, 32), (5, 64, 32)]
    assert loop.outputs[1].num_bytes == 5 * 8 * 32 * 4
    [product] = products(loop.body)
    assert product.inputs[1].gather_over == 8  # the loop gathers one layer at a time


def test_a_carry_that_starts_as_zeros_is_split_like_its_summands() -> None:
    def total(parts: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda sums, part: (sums + part, None), jnp.zeros((64, 32)), parts)[0]

    program = read(total, array(5, 64, 32, splits=(1, 8, 1)))
    assert program.outputs[0].splits == (8, 1)


def test_inside_shard_map_shapes_are_of_one_device() -> None:
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=8))
    rows = PartitionSpec("fsdp")
    local = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=rows, out_specs=rows)
    [operation] = products(read(local, array(64, 32, splits=(8, 1))))
    assert operation.flops == 2 * 8 * 32 * 8


def test_a_constraint_splits() -> None:
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=8))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    program = read(lambda x: jax.lax.with_sharding_constraint(x, rows), array(64, 32))
    assert program.outputs[0].splits == (8, 1)


def test_branches_are_weighted_by_how_often_they_are_taken() -> None:
    """Layers of two kinds share a body: here one in four has a window longer than 128 tokens."""

    def attend(kind: jax.Array, x: jax.Array) -> jax.Array:
        def look_back(window: int) -> Any:
            rule = MaskRule(window=window)
            return lambda x: attention(x, x, x, rule, ScoreScaling(1.0), implementation="splash")

        return jax.lax.switch(kind, [look_back(128), look_back(4096)], x)

    arguments = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16))
    closed = jax.make_jaxpr(attend)(*arguments)
    near, far, mixed = (
        sum(o.flops for o in read_program(closed, [array(), array(1, 4096, 2, 128)], 1, shares).operations)
        for shares in ((1.0, 0.0), (0.0, 1.0), (0.75, 0.25))
    )
    assert 0 < near < far
    assert mixed == pytest.approx(0.75 * near + 0.25 * far)


def test_a_sharded_table_is_looked_up_for_all_tokens_on_every_device() -> None:
    tokens, table = array(64, 16, splits=(8, 1)), array(1000, 32, gather_over=8)
    shapes = (jax.ShapeDtypeStruct((64, 16), jnp.int32), jax.ShapeDtypeStruct((1000, 32), jnp.float32))
    closed = jax.make_jaxpr(lambda t, e: e.at[t].get(mode="clip"))(*shapes)
    [lookup] = [o for o in read_program(closed, [tokens, table], 8).operations if o.name == "gather"]
    assert lookup.outputs[0].splits == (8, 1, 1)
    assert lookup.partial_bytes == 64 * 16 * 32 * 4


def test_elementwise_results_between_products_are_not_held() -> None:
    def two_layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w * 2.0 + 1.0) @ v

    steps = schedule(read(two_layers, array(64, 32), array(32, 128), array(128, 16)))
    assert [v.shape for step in steps for v in step.writes] == [(64, 128), (64, 16)]


def test_a_sum_of_two_large_arrays_is_held() -> None:
    """For example the residual stream. Otherwise the output of every layer would be held to the end."""

    def residual(x: jax.Array, w: jax.Array) -> jax.Array:
        stream = x + x @ w
        return stream * 2.0 + stream @ w

    steps = schedule(read(residual, array(64, 32), array(32, 32)))
    assert [step.kind for step in steps if step.writes] == ["product", "elementwise", "product"]


def test_unused_results_are_not_computed() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        _ = x @ x
        return x + 1.0

    assert all(not step.writes for step in schedule(read(wasteful, array(32, 32))))


@pytest.mark.parametrize(
    ("old", "splits", "new", "expected"),
    [
        ((8, 16, 64), (8, 1, 2), (8, 16, 4, 16), (8, 1, 2, 1)),  # heads split off
        ((8, 16, 4, 16), (8, 1, 2, 1), (8, 16, 64), (8, 1, 2)),
        ((8, 16, 64), (8, 1, 1), (128, 64), (8, 1)),  # sequences and tokens merged
        ((128, 64), (8, 1), (8, 16, 64), (8, 1, 1)),
        ((8, 16), (8, 1), (8, 16, 1), (8, 1, 1)),
        ((1, 8, 16), (1, 8, 1), (8, 16), (8, 1)),
        ((6, 4), (2, 1), (3, 8), (1, 2)),  # the first dim that 2 divides
    ],
)
def test_reshaping_keeps_the_split(old: Any, splits: Any, new: Any, expected: Any) -> None:
    assert reshaped_splits(old, splits, new) == expected


def test_a_causal_kernel_skips_the_blocks_above_the_diagonal() -> None:
    assert causal_share(1, 1) == 1
    assert causal_share(4, 4) == 10 / 16
    assert causal_share(4, 2) == 7 / 8  # a window of two blocks: only the first row has fewer


@pytest.mark.core
def test_attention_flops_follow_the_computed_blocks() -> None:
    """Half as many sequences of twice the length: only the attention flops change."""
    short, long = estimate_mistral(rows=16), estimate_mistral(rows=8, tokens=4096)
    assert long.flops - short.flops == pytest.approx(attention_flops(4096) - 2 * attention_flops(2048), rel=0.01)


def test_a_faster_chip_is_faster_and_links_can_be_the_limit() -> None:
    v5e, v6e = estimate_mistral("v5e"), estimate_mistral("v6e")
    assert v6e.step_seconds < v5e.step_seconds
    assembly = mistral()
    slow = replace(V5E, link_gb_per_second=V5E.link_gb_per_second / 10)
    bandwidth = 2 * slow.link_gb_per_second * 1e9 * TPU.links
    # Each pass over the layers gathers the base once.
    gathered = 2 * sum(v.num_bytes for v in trace(assembly).inputs if v.gather_over > 1) * 7 / 8
    assert estimate(assembly, slow).step_seconds > gathered / bandwidth
