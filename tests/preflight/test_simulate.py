"""Simulated step times of small programs: written by hand, with times calculated by hand, and compiled by the TPU
compiler, with times known from the chips' public figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from functools import cache

import pytest
from dose import slow_case

from trillora.devices.chips import CHIPS, Chip
from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT
from trillora.preflight.hlo.parse import ArrayShape, parse, trip_count
from trillora.preflight.hlo.simulate import GRID_STEP_SECONDS, HOP_SECONDS, TPU, VECTOR_CYCLES, SimulatedStep, simulate

# Round figures: 100 TFLOP/s, 1 TB/s, 50 GB/s per link and direction, 1 GHz.
CHIP = Chip(
    hbm_gib=16,
    bf16_tflops=100,
    hbm_gb_per_second=1000,
    link_gb_per_second=50,
    torus_dims=2,
    clock_ghz=1.0,
    matrix_unit=128,
)
ON_CHIP = "{1,0:T(8,128)(2,1)S(1)}"
IN_HBM = "{1,0:T(8,128)(2,1)}"
MIB = 2**20


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def program(*computations: str) -> str:
    header = 'HloModule jit_step, is_scheduled=true, frontend_attributes={a="b"}\n\nFileNames\n1 "step.py"\n'
    return "\n\n".join([header, *(textwrap.dedent(text).strip() for text in computations)]) + "\n"


def entry(*lines: str) -> str:
    return "\n".join(["ENTRY %main (x: bf16[]) -> bf16[] {", *(f"  {line}" for line in lines), "}"])


def run(*lines: str, others: tuple[str, ...] = (), chip: Chip = CHIP, num_devices: int = 8) -> SimulatedStep:
    return simulate(program(*others, entry(*lines)), chip, num_devices)


# A product of 1024 x 1024 matrices in on-chip memory: no HBM traffic.
PRODUCT = f"""
%product (a: bf16[1024,1024], b: bf16[1024,1024]) -> bf16[1024,1024] {{
  %a = bf16[1024,1024]{ON_CHIP} parameter(0)
  %b = bf16[1024,1024]{ON_CHIP} parameter(1)
  ROOT %convolution.1 = bf16[1024,1024]{ON_CHIP} convolution(%a, %b), dim_labels=bf_io->bf
}}
"""
PRODUCT_FLOPS = 2 * 1024**3


def product(name: str, num_cycles: int, *operands: str) -> str:
    first, second = operands
    return (
        f"%{name} = bf16[1024,1024]{ON_CHIP} fusion(%{first}, %{second}), kind=kOutput, calls=%product, "
        f"{cycles(num_cycles)}"
    )


PARAMETERS = (
    f"%x = bf16[1024,1024]{ON_CHIP} parameter(0)",
    f"%y = bf16[1024,1024]{IN_HBM} parameter(1)",
)


def test_text_is_parsed_into_computations_and_instructions() -> None:
    text = program(
        PRODUCT,
        """
        ENTRY %main.7 (x: bf16[8,128], y: bf16[8,128]) -> (bf16[8,128], /*index=1*/f32[]) {
          %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
          %kernel.1 = (f32[8,128]{1,0:T(8,128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) custom-call(%x, /*index=1*/%x), \
        custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
        "xprof_metadata":"{\\"block_q\\": 512}"
        }}, metadata={op_name="attention"}
          %constant.1 = f32[] constant(1e-06)
          ROOT %tuple.1 = (bf16[8,128]{1,0}, f32[]) tuple(%x, %constant.1)
        }
        """,
    )
    read = parse(text)
    assert list(read.computations) == ["product", "main.7"]
    assert read.entry.name == "main.7"
    assert [i.opcode for i in read.entry.instructions] == ["parameter", "custom-call", "constant", "tuple"]
    kernel = read.entry.by_name["kernel.1"]
    assert kernel.operands == ("x", "x")
    assert kernel.shapes == (
        ArrayShape("f32", (8, 128), (1, 0), (8, 128)),
        ArrayShape("bf16", (8, 128), (1, 0), (8, 128), memory_space=1),
    )
    assert "block_q" in kernel.attributes  # two lines below the instruction
    assert 'op_name="attention"' in kernel.attributes
    assert read.entry.by_name["constant.1"].literal == "1e-06"
    assert read.entry.root.name == "tuple.1"
    assert [i.opcode for i in read.computations["product"].instructions] == ["parameter", "parameter", "convolution"]


def test_text_without_a_program_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("RESOURCE_EXHAUSTED: Ran out of memory")


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        (ArrayShape("bf16", (100, 100)), 20_000),
        (ArrayShape("bf16", (100, 100), (1, 0), (8, 128)), 104 * 128 * 2),  # both minor dims padded to whole tiles
        (ArrayShape("bf16", (100, 100), (0, 1), (8, 128)), 128 * 104 * 2),
        (ArrayShape("f32", (4, 16, 3), (2, 1, 0), (8, 128)), 4 * 16 * 128 * 4),  # rank 3: the major dim is not padded
        (ArrayShape("f32", (2000,), (0,), (1024,)), 2048 * 4),
        (ArrayShape("s4", (64, 128), (1, 0), (64, 128)), 64 * 128 / 2),
        (ArrayShape("pred", (10,)), 10),
        (ArrayShape("f8e4m3fn", (10,)), 10),
        (ArrayShape("token", ()), 0),
    ],
)
def test_bytes_count_the_padding_of_tiles(shape: ArrayShape, num_bytes: float) -> None:
    assert shape.num_bytes == num_bytes


LOOP = """
%body (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {{
  %s = (s32[], bf16[1024,1024]{on_chip}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %c = bf16[1024,1024]{on_chip} get-tuple-element(%s), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  {product}
  ROOT %t = (s32[], bf16[1024,1024]{on_chip}) tuple(%next, %p)
}}

%condition (s.1: (s32[], bf16[1024,1024])) -> pred[] {{
  %s.1 = (s32[], bf16[1024,1024]{on_chip}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}}
"""


def loop(limit: str, step: int = 1) -> str:
    return LOOP.format(on_chip=ON_CHIP, product=product("p", 50_000, "c", "c"), limit=limit, step=step)


def loop_lines(attributes: str = "") -> tuple[str, ...]:
    return (
        *PARAMETERS,
        "%zero = s32[] constant(0)",
        "%start = s32[] copy(%zero)",
        f"%state = (s32[], bf16[1024,1024]{ON_CHIP}) tuple(%start, %x)",
        f"ROOT %w = (s32[], bf16[1024,1024]{ON_CHIP}) while(%state), condition=%condition, body=%body{attributes}",
    )


@pytest.mark.parametrize(
    ("limit", "step", "attributes", "trips"),
    [
        ("12", 1, "", 12),
        ("12", 5, "", 3),
        ("x", 1, ', backend_config={"known_trip_count":{"n":"7"}}', 7),  # stated by the compiler
    ],
)
def test_a_loop_counts_once_per_iteration(limit: str, step: int, attributes: str, trips: int) -> None:
    text = program(PRODUCT, loop(limit, step), entry(*loop_lines(attributes)))
    read = parse(text)
    assert trip_count(read, read.entry, read.entry.by_name["w"]) == trips
    time = simulate(text, CHIP, 1)
    assert time.seconds == pytest.approx(trips * 50e-6, rel=1e-3)  # the counter takes almost no time
    assert time.flops == trips * PRODUCT_FLOPS
    assert time.warnings == ()


def test_tuple_elements_may_be_written_without_an_instruction() -> None:
    """libtpu 0.0.48 dumps them like this. Without the loop's counter, the loop would count once."""
    written = loop("12")
    for name, element in (("i", "s#0"), ("c", "s#1"), ("i.1", "s.1#0")):
        line = next(text for text in written.splitlines() if text.startswith(f"  %{name} = "))
        written = (
            written.replace(line + "\n", "").replace(f"%{name},", f"%{element},").replace(f"%{name})", f"%{element})")
        )
    assert written.count("#") == 4 and "get-tuple-element" not in written
    plain, short = (program(PRODUCT, text, entry(*loop_lines())) for text in (loop("12"), written))
    assert simulate(short, CHIP, 1) == simulate(plain, CHIP, 1)
    body = parse(short).computations["body"]
    assert body.by_name["s#1"].shapes == (ArrayShape("bf16", (1024, 1024), (1, 0), (8, 128), memory_space=1),)
    assert body.by_name["s#0"].attribute("index") == "0"


def test_a_loop_without_a_trip_count_counts_once_with_a_warning() -> None:
    time = simulate(program(PRODUCT, loop("x"), entry(*loop_lines())), CHIP, 1)
    assert time.flops == PRODUCT_FLOPS
    assert len(time.warnings) == 1 and "trip count of loop w" in time.warnings[0]


COPY = (
    f"%started = (bf16[1024,1024]{ON_CHIP}, bf16[1024,1024]{IN_HBM}, u32[]) copy-start(%y)",
    f"%done = bf16[1024,1024]{ON_CHIP} copy-done(%started)",
)
COPY_SECONDS = 2 * MIB / (1e12 * TPU.hbm)


def test_a_copy_overlaps_with_a_product() -> None:
    alone = run(*PARAMETERS, *COPY, others=(PRODUCT,))
    assert alone.seconds == pytest.approx(COPY_SECONDS)
    hidden = run(*PARAMETERS, COPY[0], product("p", 50_000, "x", "x"), COPY[1], others=(PRODUCT,))
    assert hidden.seconds == pytest.approx(50e-6)
    in_turn = run(*PARAMETERS, *COPY, product("p", 50_000, "x", "done"), others=(PRODUCT,))
    assert in_turn.seconds == pytest.approx(COPY_SECONDS + 50e-6)
    assert in_turn.hbm_bytes == 2 * MIB


def gather(suffix: str) -> str:
    return (
        f"all-gather{suffix}(%x), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, "
        "use_global_device_ids=true"
    )


# Each of four devices forwards three parts of 2 MiB over two links.
GATHER_SECONDS = 3 * 2 * MIB / (2 * 50e9 * TPU.links) + 4 * HOP_SECONDS


def test_a_collective_is_exposed_or_hidden() -> None:
    whole = f"bf16[4096,1024]{ON_CHIP}"
    started = f"%started = (bf16[1024,1024]{ON_CHIP}, {whole}) {gather('-start')}"
    done = f"%done = {whole} all-gather-done(%started)"
    plain = run(*PARAMETERS, f"%g = {whole} {gather('')}")
    assert plain.seconds == plain.exposed_interconnect_seconds == pytest.approx(GATHER_SECONDS)
    assert plain.interconnect_bytes == 3 * 2 * MIB
    hidden = run(*PARAMETERS, started, product("p", 500_000, "x", "x"), done, others=(PRODUCT,))
    assert hidden.seconds == pytest.approx(500e-6)
    assert hidden.exposed_interconnect_seconds == 0
    half_hidden = run(*PARAMETERS, started, product("p", 50_000, "x", "x"), done, others=(PRODUCT,))
    assert half_hidden.seconds == pytest.approx(GATHER_SECONDS)
    assert half_hidden.exposed_interconnect_seconds == pytest.approx(GATHER_SECONDS - 50e-6)
    assert half_hidden.interconnect_seconds == pytest.approx(GATHER_SECONDS)


def test_a_collective_fused_with_products_counts_once() -> None:
    """The TPU compiler cuts an all-gather into pieces and fuses them with products that run in parallel."""
    piece = f'{gather("").replace("%x", "%a")}, backend_config={{"async_collective_fusion_config":{{}}}}'
    state = f"(bf16[1024,1024]{ON_CHIP}, bf16[4096,1024]{IN_HBM})"
    carried = f"(bf16[1024,1024]{ON_CHIP}, bf16[4096,1024]{IN_HBM}, bf16[4096,1024]{IN_HBM})"
    start = f"""
    %begin (a: bf16[1024,1024]) -> {state} {{
      %a = bf16[1024,1024]{ON_CHIP} parameter(0)
      %g = bf16[4096,1024]{IN_HBM} {piece}
      ROOT %s = {state} custom-call(%g), custom_call_target="AsyncCollectiveStart"
    }}
    """
    carrier = f"""
    %carry (a: bf16[1024,1024], b: bf16[4096,1024]) -> {carried} {{
      %a = bf16[1024,1024]{ON_CHIP} parameter(0)
      %b = bf16[4096,1024]{IN_HBM} parameter(1)
      %c = bf16[1024,1024]{ON_CHIP} convolution(%a, %a), dim_labels=bf_io->bf
      %g = bf16[4096,1024]{IN_HBM} {piece}
      ROOT %t = {carried} tuple(%c, %b, %g)
    }}
    """
    end = f"""
    %finish (a: bf16[4096,1024]) -> bf16[4096,1024] {{
      %a = bf16[4096,1024]{IN_HBM} parameter(0)
      %g = bf16[4096,1024]{IN_HBM} {piece}
      ROOT %s = bf16[4096,1024]{IN_HBM} custom-call(%a, %g), custom_call_target="AsyncCollectiveDone"
    }}
    """
    time = run(
        *PARAMETERS,
        f"%async-collective-start = {state} fusion(%x), kind=kCustom, calls=%begin",
        f"%part = bf16[4096,1024]{IN_HBM} get-tuple-element(%async-collective-start), index=1",
        f"%carrier = {carried} fusion(%x, %part), kind=kOutput, calls=%carry, {cycles(20_000)}",
        f"%part.1 = bf16[4096,1024]{IN_HBM} get-tuple-element(%carrier), index=1",
        f"%async-collective-done = bf16[4096,1024]{IN_HBM} fusion(%part.1), kind=kCustom, calls=%finish",
        others=(start, carrier, end),
    )
    assert time.interconnect_bytes == 3 * 2 * MIB
    assert time.hbm_bytes == 4 * 2 * MIB  # the gathered array is written once, although products pass it on
    assert time.seconds == pytest.approx(GATHER_SECONDS)
    assert time.exposed_interconnect_seconds == pytest.approx(GATHER_SECONDS - 20e-6)
    assert time.flops == PRODUCT_FLOPS


def test_a_reduce_scatter_sends_everything_once() -> None:
    """The TPU compiler writes it as a fusion of an all-reduce and a slice."""
    inner = f"""
    %all-reduce-scatter (a: bf16[1024,1024]) -> bf16[128,1024] {{
      %a = bf16[1024,1024]{ON_CHIP} parameter(0)
      %r = bf16[1024,1024]{ON_CHIP} all-reduce(%a), replica_groups={{}}, to_apply=%add
      %i = s32[] constant(0)
      ROOT %s = bf16[128,1024]{ON_CHIP} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={{128,1024}}
    }}
    """
    fusion = f"%f = bf16[128,1024]{ON_CHIP} fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    time = run(*PARAMETERS, fusion, others=(inner,))
    assert time.interconnect_bytes == pytest.approx(2 * MIB * 7 / 8)
    assert time.seconds == time.exposed_interconnect_seconds


@pytest.mark.parametrize(
    ("groups", "num_devices"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[2,4]<=[8]", 4),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
        ("{}", 8),
    ],
)
def test_an_all_reduce_sends_everything_twice(groups: str, num_devices: int) -> None:
    time = run(*PARAMETERS, f"%r = bf16[1024,1024]{ON_CHIP} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    assert time.interconnect_bytes == pytest.approx(2 * 2 * MIB * (num_devices - 1) / num_devices)


def test_the_stated_algorithm_decides_how_many_links_are_used() -> None:
    line = f"%r = bf16[1024,1024]{ON_CHIP} all-reduce(%x), replica_groups={{}}, to_apply=%add"
    one = run(*PARAMETERS, line)
    stated = 'backend_config={"collective_algorithm_config":{"debug":"RingStrategy{colors:4 phases:2 cores:{4 2}}"}}'
    two = run(*PARAMETERS, f"{line}, {stated}")
    assert one.roofline_seconds == pytest.approx(2 * two.roofline_seconds)


def test_two_neighbors_exchange_in_both_directions_at_once() -> None:
    sent = [
        f"%started.{k} = (bf16[1024,1024]{ON_CHIP}, bf16[1024,1024]{ON_CHIP}, u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,1},{1,0}}"
        for k in range(2)
    ]
    done = [f"%done.{k} = bf16[1024,1024]{ON_CHIP} collective-permute-done(%started.{k})" for k in range(2)]
    time = run(*PARAMETERS, *sent, *done)
    assert time.seconds == pytest.approx(2 * MIB / (50e9 * TPU.links) + 2 * HOP_SECONDS)


def test_only_slices_that_a_fusion_reads_and_writes_are_traffic() -> None:
    """Scanned weights: one layer of twelve is read, one layer of the saved activations is written."""
    layers = "bf16[12,1024,1024]{2,1,0:T(8,128)(2,1)}"
    inner = f"""
    %update (all: bf16[12,1024,1024], saved: bf16[12,1024,1024], i: s32[]) -> bf16[12,1024,1024] {{
      %all = {layers} parameter(0)
      %saved = {layers} parameter(1)
      %i = s32[] parameter(2)
      %zero = s32[] constant(0)
      %one = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} dynamic-slice(%all, %i, %zero, %zero), dynamic_slice_sizes={{1}}
      %twice = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} add(%one, %one)
      %new = {layers} dynamic-update-slice(%saved, %twice, %i, %zero, %zero)
      ROOT %same = {layers} bitcast(%new)
    }}
    """
    time = run(
        f"%w = {layers} parameter(0)",
        f"%s = {layers} parameter(1)",
        "%i = s32[] parameter(2)",
        f"ROOT %f = {layers} fusion(%w, %s, %i), kind=kLoop, calls=%update, {cycles(1000)}",
        others=(inner,),
    )
    assert time.hbm_bytes == pytest.approx(2 * 2 * MIB, rel=1e-5)  # and the index
    assert time.compute_seconds == pytest.approx(1e-6 * VECTOR_CYCLES)


def test_a_value_passed_through_an_inner_fusion_is_read_whole() -> None:
    inner = f"""
    %relabel (a: bf16[1024,1024]) -> bf16[1024,1024] {{
      %a = bf16[1024,1024]{IN_HBM} parameter(0)
      ROOT %same = bf16[1024,1024]{IN_HBM} bitcast(%a)
    }}

    %outer (a: bf16[1024,1024]) -> bf16[1024,1024] {{
      %a = bf16[1024,1024]{IN_HBM} parameter(0)
      %f = bf16[1024,1024]{IN_HBM} fusion(%a), kind=kLoop, calls=%relabel
      ROOT %c = bf16[1024,1024]{IN_HBM} convolution(%f, %f), dim_labels=bf_io->bf
    }}
    """
    time = run(*PARAMETERS, f"%f = bf16[1024,1024]{IN_HBM} fusion(%y), kind=kOutput, calls=%outer", others=(inner,))
    assert time.hbm_bytes == 2 * 2 * MIB


def test_the_largest_number_of_cycles_means_that_they_are_unknown() -> None:
    """So a grouped product of a mixture on v6e."""
    arrays = [f"%{name} = bf16[1024,1024]{ON_CHIP} parameter({i})" for i, name in enumerate("xy")]
    unknown = run(*arrays, "ROOT " + product("f", 2**63 - 1, "x", "y"), others=(PRODUCT,))
    assert unknown.seconds == pytest.approx(PRODUCT_FLOPS / (CHIP.bf16_tflops * 1e12 * TPU.product), rel=0.01)


@pytest.mark.parametrize("count", [2**63 - 1, 5000], ids=["unknown", "known"])
def test_a_count_elsewhere_does_not_make_a_product_free(count: int) -> None:
    """Programs of libtpu 0.0.50 have counts in a few instructions, though they are not compiled to the end."""
    arrays = [f"%{name} = bf16[1024,1024]{ON_CHIP} parameter({i})" for i, name in enumerate("xy")]
    other = f"%other = bf16[1024,1024]{ON_CHIP} add(%x, %y), {cycles(count)}"
    bare = product("f", 1, "x", "y").replace(cycles(1), "").rstrip(", ")
    time = run(*arrays, other, f"ROOT {bare}", others=(PRODUCT,))
    assert time.seconds >= PRODUCT_FLOPS / (CHIP.bf16_tflops * 1e12 * TPU.product)


def test_without_cycles_products_take_padded_flops_at_the_peak() -> None:
    """A rank of 16 keeps the matrix unit as busy as a rank of 128."""
    inner = f"""
    %thin (a: bf16[4096,16], b: bf16[16,4096]) -> bf16[4096,4096] {{
      %a = bf16[4096,16]{ON_CHIP} parameter(0)
      %b = bf16[16,4096]{ON_CHIP} parameter(1)
      ROOT %c = bf16[4096,4096]{ON_CHIP} convolution(%a, %b), dim_labels=bf_io->bf
    }}
    """
    time = run(
        f"%a = bf16[4096,16]{ON_CHIP} parameter(0)",
        f"%b = bf16[16,4096]{ON_CHIP} parameter(1)",
        f"ROOT %f = bf16[4096,4096]{ON_CHIP} fusion(%a, %b), kind=kOutput, calls=%thin",
        others=(inner,),
    )
    assert time.flops == 2 * 4096 * 4096 * 16
    assert time.seconds == pytest.approx(2 * 4096 * 4096 * 128 / (100e12 * TPU.product))


def test_a_batch_of_products_as_a_convolution_counts_no_padding() -> None:
    line = (
        "%c = bf16[8,512,256]{2,1,0} convolution(%a, %b), "
        "window={size=8 pad=0_7 stride=1 lhs_dilate=1 rhs_reversal=1}, dim_labels=0bf_0io->0bf"
    )
    time = run("%a = bf16[8,512,64]{2,1,0} parameter(0)", "%b = bf16[8,64,256]{2,1,0} parameter(1)", line)
    # The window covers 8 x 8 pairs; those below the diagonal are padding.
    assert time.flops == 2 * 512 * 64 * 256 * 36
    exact = line.replace("pad=0_7 stride=1 lhs_dilate=1", "pad=0_0 stride=7 lhs_dilate=8")
    assert run(
        "%a = bf16[8,512,64]{2,1,0} parameter(0)", "%b = bf16[8,64,256]{2,1,0} parameter(1)", exact
    ).flops == pytest.approx(2 * 8 * 512 * 64 * 256)


def test_a_grouped_product_computes_whole_tiles() -> None:
    """20,480 rows in 16 groups: 160 tiles of rows, and one more for each end of a group inside a tile. 1536 outputs are
    three tiles of 640. The tables take no time that matters."""
    time = run(
        "%sizes = s32[16]{0} parameter(0)",
        "%ragged-dot-metadata.1 = (s32[17]{0:S(1)}, s32[175]{0:S(1)}) custom-call(%sizes), "
        'custom_call_target="tpu_custom_call"',
        "%tiles = s32[175]{0:S(1)} get-tuple-element(%ragged-dot-metadata.1), index=1",
        "%rows = bf16[20480,2048]{1,0} parameter(1)",
        "%weights = bf16[16,2048,1536]{2,1,0} parameter(2)",
        "%ragged-dot-none.1 = bf16[20480,1536]{1,0} custom-call(%tiles, %rows, %weights), "
        'custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,2048,640"}, '
        'backend_config={"custom_call_config":{"cost_estimate":{"flops":"128849018880"}}}',
    )
    steps = 175 * 3
    tiles = steps * 2 * 128 * 2048 * 640 / (100e12 * TPU.product)
    assert time.seconds == pytest.approx(tiles + steps * GRID_STEP_SECONDS, rel=1e-3)
    assert time.flops == 2 * 20480 * 2048 * 1536 and time.warnings == ()
    traffic = 3 * 175 * 128 * 2048 * 2 + 16 * 2048 * 1536 * 2 + 20480 * 1536 * 2
    assert time.hbm_bytes == pytest.approx(traffic, rel=1e-3)


def test_our_grouped_product_skips_tiles_without_rows() -> None:
    """Of 80 tiles of 256 rows, 64 have rows. The kernel has the weights in either order."""
    time = run(
        "%rows = bf16[20480,2048]{1,0} parameter(0)",
        "%weights = bf16[16,1536,2048]{2,1,0} parameter(1)",
        "%kernel.1 = bf16[20480,1536]{1,0} custom-call(%rows, %weights), "
        'custom_call_target="tpu_custom_call", metadata={op_name="jit/grouped_product_tiles_256_2048_768_64_end/gmm"}',
    )
    steps = (64 + 15) * 2
    tiles = steps * 2 * 256 * 2048 * 768 / (100e12 * TPU.product)
    assert time.seconds == pytest.approx(tiles + steps * GRID_STEP_SECONDS)


def test_loops_that_rarely_run_are_not_counted() -> None:
    loop = '%w = bf16[8]{0} while(%x), condition=%c, body=%b, metadata={op_name="jit(step)/NAME/while"}'
    body = "%b (p: bf16[8]) -> bf16[8] {\n  ROOT %p = bf16[1024,1024]{1,0} parameter(0)\n}"
    assert len(run(loop.replace("NAME", "layers"), others=(body,)).warnings) == 1
    assert run(loop.replace("NAME", "transpose(rarely_runs)"), others=(body,)).warnings == ()


def test_an_unknown_kernel_is_timed_by_its_memory_with_a_warning() -> None:
    time = run(*PARAMETERS, f'%k.1 = bf16[1024,1024]{IN_HBM} custom-call(%y), custom_call_target="tpu_custom_call"')
    assert time.seconds == pytest.approx(2 * COPY_SECONDS)
    assert len(time.warnings) == 1 and "k.1" in time.warnings[0]


def test_a_step_is_never_faster_than_its_roofline() -> None:
    time = run(*PARAMETERS, *COPY, product("p", 50_000, "x", "done"), others=(PRODUCT,))
    assert time.roofline_seconds == pytest.approx(PRODUCT_FLOPS / 100e12)
    assert time.seconds > time.roofline_seconds


# For the real compiler. Takes the name of a chip and prints the simulated times of its programs.
COMPILE = textwrap.dedent(
    """
    import dataclasses, json, re, sys

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from trillora.devices.chips import CHIPS
    from trillora.devices.slices import find_slice
    from trillora.preflight.hlo.simulate import simulate

    chip = sys.argv[1]


    def mesh_of(number):
        place = find_slice(f"{chip}-{number}")
        topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
        return Mesh(np.array(topology.devices), ("all",))


    def array(mesh, shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


    def per_device(mesh, function, in_specs, out_specs):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


    one, eight = mesh_of(1), mesh_of(8)
    square = array(one, (8192, 8192))
    half_gib = (2**14, 2**14)  # reads half a GiB, writes half a GiB
    mib_256 = (2**14, 2**13)
    cases = {
        "product": (one, lambda a, b: a @ b, square, square),
        "elementwise": (one, lambda a: a * 2 + 1, array(one, half_gib)),
        "gather": (
            eight,
            per_device(eight, lambda x: jax.lax.all_gather(x, "all", tiled=True), P("all"), P()),
            array(eight, mib_256, "all"),
        ),
        "sum": (eight, per_device(eight, lambda x: jax.lax.psum(x, "all"), P(), P()), array(eight, mib_256)),
    }
    for name, (mesh, function, *arguments) in cases.items():
        text = jax.jit(function).lower(*arguments).compile().as_text()
        bare = re.sub(r'"estimated_cycles":"[0-9]+"', '"left":"out"', text)  # as after an early exit
        for kind, program in (("", text), (" without cycles", bare)):
            time = simulate(program, CHIPS[chip], mesh.size)
            print(json.dumps({"case": name + kind, **dataclasses.asdict(time)}), flush=True)
    """
)


@cache
def compiled(chip: str) -> dict[str, dict[str, float]]:
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, chip], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 8
    return {line["case"]: line for line in lines}


@pytest.mark.tpu_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, has wheels for x86-64 Linux only: Colab, Kaggle, WSL, a container",
)
# Fraction of the peak for a large product. v5e: close to the peak. v6e: 75 to 79 % were measured
# (github.com/yangwhale/gpu-tpu-pedia, tpu/v7_perf), and the compiler's own cycle count gives 70 %.
@pytest.mark.parametrize(("chip", "least", "most"), [("v5e", 0.80, 0.97), slow_case("v6e", 0.65, 0.85)])
def test_programs_of_the_real_compiler_match_the_chips_figures(chip: str, least: float, most: float) -> None:
    cases, facts = compiled(chip), CHIPS[chip]
    for kind in ("", " without cycles"):
        product_time = cases[f"product{kind}"]
        assert product_time["flops"] == 2 * 8192**3
        assert product_time["hbm_bytes"] == 3 * 8192**2 * 2
        assert least < product_time["flops"] / product_time["seconds"] / (facts.bf16_tflops * 1e12) < most
        assert product_time["roofline_seconds"] == pytest.approx(2 * 8192**3 / (facts.bf16_tflops * 1e12))

        # Streaming reaches 75 to 95 % of the public HBM bandwidth.
        stream = cases[f"elementwise{kind}"]
        assert stream["hbm_bytes"] == 2**30
        assert 0.75 < stream["hbm_bytes"] / stream["seconds"] / (facts.hbm_gb_per_second * 1e9) < 0.95

        # Eight chips form a ring with a link in each direction and reach 70 to 95 % of its bandwidth. In an all-gather
        # every device sends seven of eight parts, in a sum it does so twice.
        for case, passes in (("gather", 1), ("sum", 2)):
            time = cases[f"{case}{kind}"]
            assert time["interconnect_bytes"] == pytest.approx(passes * 7 / 8 * 2**28)
            share = time["interconnect_bytes"] / time["interconnect_seconds"] / (2 * facts.link_gb_per_second * 1e9)
            assert 0.70 < share < 0.95
            assert time["seconds"] >= time["exposed_interconnect_seconds"] == time["interconnect_seconds"]
        assert all(case["warnings"] == [] for case in cases.values())
