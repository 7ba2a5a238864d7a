"""The cycles of the TPU's attention kernel follow the compiler's bundles, and programs and traced steps agree on them.

`BUNDLES` was counted in final bundles of libtpu 0.0.42.1 (`xla_jf_dump_llo_text`), kernel by kernel: to begin and end
a row of the grid, and to compute one block. The formula has one constant for all lengths, so it is a little off.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from trillora.devices.chips import CHIPS
from trillora.engine.attention import MaskRule, ScoreScaling, attend
from trillora.preflight.estimate.traced import Value, read_program
from trillora.preflight.hlo.attention import AttentionWork, Phase
from trillora.preflight.hlo.simulate import TPU, SimulatedStep, simulate

# matrix unit, phase, width, block: bundles to begin and end a row, and of one block
BUNDLES: dict[tuple[int, Phase, int, int], tuple[int, int]] = {
    (128, "fwd", 64, 512): (732, 1187),
    (128, "fwd", 64, 1024): (1420, 4881),
    (128, "fwd", 128, 512): (723, 1173),
    (128, "fwd", 128, 1024): (1404, 4964),
    (128, "fwd", 256, 512): (879, 2217),
    (128, "fwd", 256, 1024): (1710, 9076),
    (128, "fused", 64, 512): (480, 2368),
    (128, "fused", 64, 1024): (928, 9362),
    (128, "fused", 128, 512): (444, 2312),
    (128, "fused", 128, 1024): (828, 9259),
    (128, "fused", 256, 512): (764, 4551),
    (128, "fused", 256, 1024): (1468, 18260),
    (128, "dkv", 64, 1024): (810, 7275),
    (128, "dkv", 128, 1024): (710, 7296),
    (128, "dq", 64, 1024): (421, 5754),
    (128, "dq", 128, 1024): (375, 5718),
    (256, "fwd", 64, 1024): (752, 3262),
    (256, "fwd", 128, 512): (389, 905),
    (256, "fwd", 128, 1024): (739, 3265),
    (256, "fwd", 256, 1024): (882, 3328),
    (256, "fused", 64, 1024): (492, 5753),
    (256, "fused", 128, 512): (278, 1514),
    (256, "fused", 128, 1024): (470, 5745),
    (256, "fused", 256, 1024): (808, 5887),
    (256, "dkv", 128, 1024): (416, 4526),
    (256, "dq", 128, 1024): (228, 3620),
}


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_the_cycles_are_those_of_the_bundles(num_tokens: int) -> None:
    """Of one head with a causal mask. Within 4 %: constants were taken from blocks of 1024 and heads of 128."""
    for (unit, phase, width, block), (edge, run) in BUNDLES.items():
        rows = num_tokens // block
        computed = rows * (rows + 1) // 2
        work = AttentionWork(phase, width, block, computed, rows, 0)
        assert work.cycles(unit) == pytest.approx(computed * run + rows * edge, rel=0.04), (unit, phase, width, block)


def test_a_chip_with_two_cores_takes_half_the_cycles() -> None:
    work = AttentionWork("fwd", 128, 1024, 36, 8, 64)
    v5e, v5p, v6e, v7x = (
        work.seconds(CHIPS[name].matrix_unit, CHIPS[name].bf16_tflops * 1e12) * CHIPS[name].clock_ghz
        for name in ("v5e", "v5p", "v6e", "7x")
    )
    assert v5p == pytest.approx(v5e / 2, rel=0.01) and v7x == pytest.approx(v6e, rel=0.01)


@pytest.mark.parametrize(("num_tokens", "phases"), [(2048, ["fwd", "fused"]), (32_768, ["fwd", "dkv", "dq"])])
def test_a_traced_step_has_the_work_of_its_kernels(num_tokens: int, phases: list[str]) -> None:
    query, key = (jax.ShapeDtypeStruct((2, num_tokens, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def loss(*tensors: jax.Array) -> jax.Array:
        return attend(*tensors, MaskRule(), ScoreScaling(0.1), implementation="splash").astype(jnp.float32).sum()

    closed = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(query, key, key)
    values = [Value(each.shape, 2, (1,) * 4) for each in (query, key, key)]
    found = [o.attention for o in read_program(closed, values, 1).operations if o.attention is not None]
    rows = num_tokens // 1024
    assert [work.phase for work in found] == phases
    for work in found:
        assert (work.width, work.block, work.rows) == (64, 1024, 8 * rows)
        assert work.computed == 8 * rows * (rows + 1) / 2 and work.places == 8 * rows**2


def splash(phase: Phase, table: str, branch: int | None = None) -> tuple[str, ...]:
    """jax's kernel as it appears in a program: 32 heads of 128 over 4096 tokens, in blocks of 1024. `branch`: of the
    conditional that it is in."""
    heads, keys = "bf16[32,4096,128]{2,1,0}", "bf16[8,4096,128]{2,1,0}"
    outputs = {
        "fwd": f"({heads}, f32[32,4096,128]{{2,1,0}})",
        "fused": f"(bf16[4,32,4096,128]{{3,2,1,0}}, {keys})",
        "dkv": f"({keys}, {keys})",
        "dq": heads,
    }
    name = "dkv" if phase == "fused" else phase
    number = f"{phase}.{branch or 0}"
    scope = "" if branch is None else f', metadata={{op_name="jit(step)/cond/branch_{branch}_fun/pallas_call"}}'
    return (
        f"%table.{number} = s8[{table}]{{2,1,0}} constant({{...}})",
        f"%q.{number} = {heads} parameter(0)",
        f"%k.{number} = {keys} parameter(1)",
        f"%splash_mha_{name}.{number} = {outputs[phase]} custom-call(%table.{number}, %q.{number}, %k.{number}, "
        f'%k.{number}), custom_call_target="tpu_custom_call"{scope}',
    )


def run(*lines: str) -> SimulatedStep:
    body = "".join(f"  {line}\n" for line in lines)
    text = f"HloModule step, is_scheduled=true\n\nENTRY %main (x: bf16[]) -> bf16[] {{\n{body}}}\n"
    return simulate(text, CHIPS["v5e"], 1)


@pytest.mark.parametrize(("width", "num_blocks"), [(4, 10), (2, 7)])
def test_attention_kernels_count_the_blocks_they_compute(width: int, num_blocks: int) -> None:
    """Causal: 1 + 2 + 3 + 4 of 16 blocks. With a window of one block: at most two per row. Products: scores and output;
    scores and four gradients; in two kernels scores and their gradient twice."""
    products, computed = 2 * num_blocks * 1024 * 1024 * 128 * 32, 32 * num_blocks
    forward = splash("fwd", f"1,4,{width}")
    alone = run(*forward)
    assert alone.flops == 2 * products
    peak = 197e12 * TPU.attention
    work = AttentionWork("fwd", 128, 1024, computed, 32 * 4, 32 * 4 * width)
    assert alone.seconds == alone.kernel_seconds == pytest.approx(work.seconds(128, peak))
    # A window does not narrow the table of the fused kernel; it makes the other table, for the gradient of keys, lower.
    for phase, table, number in (("fused", "1,4,4", 5), ("dkv", f"1,{width},4", 4), ("dq", f"1,4,{width}", 3)):
        both = run(*forward, *splash(phase, table))
        assert both.flops == (2 + number) * products and both.warnings == ()
        places = 32 * 4 * (4 if phase == "fused" else width)
        added = AttentionWork(phase, 128, 1024, computed, 32 * 4, places).seconds(128, peak)
        assert both.seconds - alone.seconds == pytest.approx(added)


def test_a_fused_kernel_has_the_share_of_the_forward_kernel_in_its_branch() -> None:
    """Layers with and without a window: 7 and 10 blocks."""
    forward = (*splash("fwd", "1,4,2", branch=0), *splash("fwd", "1,4,4", branch=1))
    alone = run(*forward)
    for branch, num_blocks in ((0, 7), (1, 10)):
        both = run(*forward, *splash("fused", "1,4,4", branch=branch))
        assert both.flops - alone.flops == 5 * 2 * num_blocks * 1024 * 1024 * 128 * 32
