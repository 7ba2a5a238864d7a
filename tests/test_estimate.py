"""Memory and time without the TPU compiler: arguments exactly, the rest within a stated error of what it recorded.

Small programs with a known answer test how the traced step is read; test_preflight_records.py compares what comes out
of it with what the real compiler said.
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
from jax.sharding import NamedSharding, PartitionSpec
from transformers import MistralConfig

from trillora.devices.chips import CHIPS
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.attention import MaskRule, ScoreScaling
from trillora.engine.attention import attend as attention
from trillora.preflight.estimate.estimate import Estimate, argument_bytes, estimate, schedule, trace
from trillora.preflight.estimate.traced import (
    Operation,
    TracedProgram,
    Value,
    causal_share,
    read_program,
    reshaped_splits,
)
from trillora.preflight.hlo.simulate import TPU
from trillora.recipe.load import load_recipe
from trillora.step.build import Assembly, assemble

GIB = 2**30
V5E = CHIPS["v5e"]


def build(name: str, config: Any, mesh: MeshShape, **options: Any) -> Assembly:
    options = {"rows": 8, "tokens": 128, "remat": "full", "attention": "splash", "layers": "scan", **options}
    recipe = load_recipe(
        {
            "model": {"name": name, "dtype": "bfloat16"},
            "data": {"path": "chats.jsonl", "pack": True},
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
                "loss_chunk": 512,
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


def estimate_mistral(chip: str = "v5e", **options: Any) -> Estimate:
    return estimate(mistral(**options), CHIPS[chip])


def attention_flops(tokens: int) -> float:
    """Of one row of Mistral-7B, whose kernel has blocks of 1024: two products forwards, twice, and five backwards."""
    return 32 * 9 * 2 * tokens**2 * 32 * 128 * causal_share(tokens // 1024, tokens // 1024)


def read(function: Any, *arguments: Value) -> TracedProgram:
    shapes = [jax.ShapeDtypeStruct(v.shape, jnp.float32 if v.itemsize == 4 else jnp.bfloat16) for v in arguments]
    return read_program(jax.make_jaxpr(function)(*shapes), list(arguments), num_devices=8)


def array(*shape: int, splits: tuple[int, ...] | None = None, gather_over: int = 1) -> Value:
    return Value(shape, 4, splits or (1,) * len(shape), gather_over)


def products(program: TracedProgram) -> list[Operation]:
    return [operation for operation in program.operations if operation.product is not None]


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)], ids=str)
def test_arguments_are_what_xla_counts(shape: MeshShape) -> None:
    """Of a program that takes the step's arguments and does nothing with them: the same for any kind of device."""
    config = tiny_models.configuration("llama")
    config.update({"hidden_size": 256, "vocab_size": 1024})  # large enough to be split
    assembly = build("llama", config, shape)
    takes_all = jax.jit(lambda *arguments: 0, keep_unused=True)
    compiled = takes_all.lower(assembly.state_shapes, assembly.base_shapes, assembly.batch_shapes).compile()
    assert sum(argument_bytes(assembly).values()) == compiled.memory_analysis().argument_size_in_bytes


def test_the_parts_make_up_the_peak() -> None:
    result = estimate_mistral()
    parts = result.gathered_bytes + result.activations_bytes + result.logits_bytes
    assert result.peak_bytes == pytest.approx(sum(result.arguments.values()) + parts)


def test_saving_more_costs_memory_and_saves_arithmetic() -> None:
    full, linear, everything = (estimate_mistral(remat=remat) for remat in ("full", "linear", "none"))
    assert full.peak_bytes < linear.peak_bytes < everything.peak_bytes
    assert everything.flops <= linear.flops < 0.8 * full.flops  # four passes over the weights become three
    assert linear.step_seconds < full.step_seconds


def test_flops_are_those_of_weights_attention_and_adapters() -> None:
    result = estimate_mistral()
    attention, mlp = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336
    # Frozen weights have no gradient: forward, forward again, and back to the inputs. The last product of a layer is
    # not computed again: only the next layer needs it. Nor is the head.
    weights = 32 * (3 * (attention + mlp) - mlp / 3) + 2 * 4096 * 32000
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    expected = 2 * result.tokens * (weights + 6 * adapters) + attention_flops(2048)
    assert result.flops == pytest.approx(expected, rel=5e-3)  # an adapter here or there is not computed again either


def test_smaller_parts_at_once_need_less_and_do_as_much() -> None:
    whole, parts = estimate_mistral(rows=32), estimate_mistral(rows=32, micro=8)
    assert parts.peak_bytes < 0.7 * whole.peak_bytes
    assert parts.flops == pytest.approx(whole.flops, rel=1e-3)
    assert parts.tokens == whole.tokens == 32 * 2048 / 8


def test_unrolled_layers_do_the_work_of_scanned_ones() -> None:
    """And a gathered weight is not kept from its forward to its backward use, or the whole base would be."""
    scanned, unrolled = estimate_mistral(num_layers=8), estimate_mistral(num_layers=8, layers="unroll")
    assert unrolled.flops == pytest.approx(scanned.flops, rel=0.01)  # the first layer's input needs no gradient
    assert unrolled.peak_bytes == pytest.approx(scanned.peak_bytes, rel=0.25)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral", "deepseek_v3", "mamba"])
def test_any_architecture_is_estimated(name: str) -> None:
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    result = estimate(build(name, tiny_models.configuration(name), shape, remat="linear"), V5E)
    assert result.peak_bytes > sum(result.arguments.values())
    assert result.flops > 0 and result.step_seconds > result.flops / (V5E.bf16_tflops * 1e12)


def test_a_product_is_shared_out_by_rows_and_by_the_tensor_axis() -> None:
    rows, weight = array(64, 32, splits=(4, 1)), array(32, 128, splits=(1, 2))
    [operation] = products(read(lambda x, w: x @ w, rows, weight))
    assert operation.flops == 2 * 64 * 32 * 128 / 8
    assert operation.outputs[0].splits == (4, 2) and operation.partial_bytes == 0


def test_a_sum_over_split_rows_is_added_up_between_devices() -> None:
    rows, errors = array(64, 32, splits=(8, 1)), array(64, 16, splits=(8, 1))
    [operation] = products(read(lambda x, e: x.T @ e, rows, errors))
    assert operation.outputs[0].splits == (1, 1)
    assert operation.partial_over == 8 and operation.partial_bytes == 32 * 16 * 4


def test_a_loop_repeats_its_body_and_stacks_what_it_keeps() -> None:
    def layers(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, w: (x @ w, x), x, weights)

    program = read(layers, array(64, 32, splits=(8, 1)), array(5, 32, 32, gather_over=8))
    [loop] = program.operations
    assert loop.length == 5 and loop.body is not None
    assert [v.shape for v in loop.outputs] == [(64, 32), (5, 64, 32)]
    assert loop.outputs[1].num_bytes == 5 * 8 * 32 * 4
    [product] = products(loop.body)
    assert product.inputs[1].gather_over == 8  # a layer's slice is gathered in the loop, not all layers before


def test_a_carry_that_starts_as_zeros_is_split_like_what_is_added() -> None:
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


def test_branches_count_by_how_often_they_are_taken() -> None:
    """Layers of two kinds that share a body: here one in four looks back further than 128 tokens."""

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


def test_a_split_table_is_looked_up_for_all_rows_on_every_device() -> None:
    tokens, table = array(64, 16, splits=(8, 1)), array(1000, 32, gather_over=8)
    shapes = (jax.ShapeDtypeStruct((64, 16), jnp.int32), jax.ShapeDtypeStruct((1000, 32), jnp.float32))
    closed = jax.make_jaxpr(lambda t, e: e.at[t].get(mode="clip"))(*shapes)
    [lookup] = [o for o in read_program(closed, [tokens, table], 8).operations if o.name == "gather"]
    assert lookup.outputs[0].splits == (8, 1, 1)
    assert lookup.partial_bytes == 64 * 16 * 32 * 4


def test_arithmetic_between_products_is_not_held() -> None:
    def two_layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w * 2.0 + 1.0) @ v

    steps = schedule(read(two_layers, array(64, 32), array(32, 128), array(128, 16)))
    assert [v.shape for step in steps for v in step.writes] == [(64, 128), (64, 16)]


def test_a_sum_that_stands_for_two_arrays_is_held() -> None:
    """As the residual stream: else every layer's output would be, to the end."""

    def residual(x: jax.Array, w: jax.Array) -> jax.Array:
        stream = x + x @ w
        return stream * 2.0 + stream @ w

    steps = schedule(read(residual, array(64, 32), array(32, 32)))
    assert [step.kind for step in steps if step.writes] == ["product", "elementwise", "product"]


def test_what_nothing_uses_is_not_computed() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        _ = x @ x
        return x + 1.0

    assert all(not step.writes for step in schedule(read(wasteful, array(32, 32))))


@pytest.mark.parametrize(
    ("old", "splits", "new", "expected"),
    [
        ((8, 16, 64), (8, 1, 2), (8, 16, 4, 16), (8, 1, 2, 1)),  # heads taken apart
        ((8, 16, 4, 16), (8, 1, 2, 1), (8, 16, 64), (8, 1, 2)),
        ((8, 16, 64), (8, 1, 1), (128, 64), (8, 1)),  # rows and tokens as one
        ((128, 64), (8, 1), (8, 16, 64), (8, 1, 1)),
        ((8, 16), (8, 1), (8, 16, 1), (8, 1, 1)),
        ((1, 8, 16), (1, 8, 1), (8, 16), (8, 1)),
        ((6, 4), (2, 1), (3, 8), (1, 2)),  # the first dim that two devices can share
    ],
)
def test_reshaping_keeps_the_split(old: Any, splits: Any, new: Any, expected: Any) -> None:
    assert reshaped_splits(old, splits, new) == expected


def test_a_causal_kernel_skips_the_blocks_above_the_diagonal() -> None:
    assert causal_share(1, 1) == 1
    assert causal_share(4, 4) == 10 / 16
    assert causal_share(4, 2) == 7 / 8  # a window of two blocks: only the first row has less


def test_attention_costs_what_its_blocks_do() -> None:
    """Twice the tokens in half the rows: everything but attention costs the same."""
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
