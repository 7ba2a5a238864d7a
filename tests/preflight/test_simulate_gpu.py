"""Simulated step times of GPU programs in the format of XLA's GPU compiler, compared with times measured on an H200.

benchmarks/preflight_gpu.py compares whole steps on a real card.
"""

from __future__ import annotations

import numpy as np
import pytest

from trillora.devices.chips import GPUS
from trillora.preflight.hlo.kernels import CUDNN_BLOCK
from trillora.preflight.hlo.simulate import simulate

H200 = GPUS["H200"]
GEMM = """
  %{name} = (bf16[{rows},{outputs}]{{1,0}}, s8[4194304]{{0}}) custom-call(bf16[{rows},{inputs}]{{1,0}} %x, \
bf16[{inputs},{outputs}]{{1,0}} %w), custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":\
{{"beta":0,"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}"""
GPU_PROGRAM = """
HloModule jit_step, is_scheduled=true

%gemm_fusion_dot (p0: bf16[8192,4096], p1: bf16[4096,16]) -> bf16[8192,16] {
  %p0 = bf16[8192,4096]{1,0} parameter(0)
  %p1 = bf16[4096,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8192,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], bf16[8192,4096], bf16[4096,4096])) -> (s32[], bf16[8192,4096], bf16[4096,4096]) {
  %s = (s32[], bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8192,4096]{1,0} get-tuple-element(%s), index=1
  %w = bf16[4096,4096]{1,0} get-tuple-element(%s), index=2
  %cublas-gemm.1 = (bf16[8192,4096]{1,0}, s8[4194304]{0}) custom-call(bf16[8192,4096]{1,0} %x, \
bf16[4096,4096]{1,0} %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"beta":0,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %y = bf16[8192,4096]{1,0} get-tuple-element(%cublas-gemm.1), index=0
  ROOT %t = (s32[], bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0}) tuple(%i, %y, %w)
}

%condition (s.1: (s32[], bf16[8192,4096], bf16[4096,4096])) -> pred[] {
  %s.1 = (s32[], bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%command_buffer (a: bf16[8192,4096], b: bf16[4096,16]) -> bf16[8192,16] {
  %a = bf16[8192,4096]{1,0} parameter(0)
  %b = bf16[4096,16]{1,0} parameter(1)
  ROOT %f = bf16[8192,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion_dot, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
}

ENTRY %main (x: bf16[8192,4096], w: bf16[4096,4096], a: bf16[4096,16], q: bf16[4,2048,32,64]) -> bf16[8192,16] {
  %x = bf16[8192,4096]{1,0} parameter(0)
  %w = bf16[4096,4096]{1,0} parameter(1)
  %a = bf16[4096,16]{1,0} parameter(2)
  %q = bf16[4,2048,32,64]{3,2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0}) tuple(%zero, %x, %w)
  %while.1 = (s32[], bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0}) while(%state), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"16"},"known_init_step":{"init":"0","step":"1"}}
  %fmha.1 = (bf16[4,32,2048,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config":{"fmha_scale":0.125,"intermediate_tensor_shape":{"element_type":"BF16",\
"dimensions":["4","32","2048","2048"]},"mask_type":"CAUSAL","sliding_window_length":0}}
  ROOT %call = bf16[8192,16]{1,0} call(%x, %a), to_apply=%command_buffer
}
"""


def visible_pairs(num_tokens: int, window: int = 0) -> int:
    query, key = np.indices((num_tokens, num_tokens))
    return int(((key <= query) & (query - key < (window or num_tokens))).sum())


def test_the_arithmetic_of_loops_kernels_and_command_buffers_is_counted() -> None:
    found = simulate(GPU_PROGRAM, H200, 1)
    products = 16 * 2 * 8192 * 4096 * 4096 + 2 * 8192 * 4096 * 16
    attention = 2 * 2 * 4 * 32 * 64 * visible_pairs(2048)
    # Blocks on the edge of the mask are computed whole: half a block more for each query.
    edge = 2 * 2 * 4 * 32 * 64 * 2048 * CUDNN_BLOCK / 2
    assert found.flops == pytest.approx(products + attention + edge, rel=1e-3)
    assert found.warnings == ()


def attention_program(target: str, num_tokens: int, *, rows: int = 4, width: int = 128, window: int = 0) -> str:
    shape = f"bf16[{rows},{num_tokens},32,{width}]{{3,2,1,0}}"
    return f"""
HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[{rows},{num_tokens},32,{width}]) -> bf16[{rows},{num_tokens},32,{width}] {{
  %q = {shape} parameter(0)
  ROOT %fmha = ({shape}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="{target}", \
backend_config={{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"element_type":"BF16",\
"dimensions":["{rows}","32","{num_tokens}","{num_tokens}"]}},"mask_type":"CAUSAL","sliding_window_length":{window}}}}}
}}
"""


def one(shapes: str, line: str) -> str:
    return f"\nHloModule jit_step, is_scheduled=true\n\nENTRY %main {shapes} {{\n{line}\n}}\n"


def gemm_program(rows: int, inputs: int, outputs: int) -> str:
    arrays = f"  %x = bf16[{rows},{inputs}]{{1,0}} parameter(0)\n  %w = bf16[{inputs},{outputs}]{{1,0}} parameter(1)"
    product = GEMM.format(name="y", rows=rows, inputs=inputs, outputs=outputs)
    last = f"\n  ROOT %z = bf16[{rows},{outputs}]{{1,0}} get-tuple-element(%y), index=0"
    shapes = f"(x: bf16[{rows},{inputs}], w: bf16[{inputs},{outputs}]) -> bf16[{rows},{outputs}]"
    return one(shapes, arrays + product + last)


MIDDLE = one(  # of a gated MLP, forward: reads gate and up, writes their product
    "(g: bf16[16384,8192], u: bf16[16384,8192]) -> bf16[16384,8192]",
    "  %g = bf16[16384,8192]{1,0} parameter(0)\n  %u = bf16[16384,8192]{1,0} parameter(1)\n"
    '  ROOT %y = bf16[16384,8192]{1,0} custom-call(%g, %u), custom_call_target="__gpu$xla.gpu.triton"',
)


def attention_of_a_step() -> float:
    kinds = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    programs = [attention_program(kind, 2048, rows=8, width=64) for kind in kinds]
    return 16 * sum(simulate(program, H200, 1).seconds for program in programs)


def test_kernels_take_about_as_long_as_measured_on_an_h200() -> None:
    """Milliseconds of benchmarks/RESULTS.md: products by themselves ("Low-precision products"), attention in a step of
    the 1.2B shape with 8 x 2,048 tokens, and the kernel in the middle of a gated MLP ("What fused kernels gain").

    Within 16 %: products by themselves reach 0.80 of the peak, in the long steps that the constants are for 0.70."""
    measured_and_simulated = [
        (0.695, 1e3 * simulate(gemm_program(16384, 2048, 8192), H200, 1).seconds),
        (0.703, 1e3 * simulate(gemm_program(16384, 8192, 2048), H200, 1).seconds),
        (27.6, 1e3 * attention_of_a_step()),
        (0.275, 1e3 * simulate(MIDDLE, H200, 1).seconds),
    ]
    for measured, simulated in measured_and_simulated:
        assert simulated == pytest.approx(measured, rel=0.16), (measured, simulated)


def test_attention_with_a_mask_in_memory_is_slower_with_the_same_arithmetic() -> None:
    causal = simulate(attention_program("__cudnn$fmhaSoftmax", 2048), H200, 1)
    masked = simulate(attention_program("__cudnn$fmhaScaleBiasSoftmax", 2048), H200, 1)
    assert masked.seconds > 1.2 * causal.seconds and masked.flops == causal.flops


@pytest.mark.parametrize("window", [0, 1024])
def test_attention_counts_the_pairs_that_its_mask_shows(window: int) -> None:
    found = simulate(attention_program("__cudnn$fmhaSoftmax", 4096, window=window), H200, 1)
    pairs = visible_pairs(4096, window) + 4096 * CUDNN_BLOCK / 2  # blocks on the edge are computed whole
    assert found.flops == pytest.approx(2 * 2 * 4 * 32 * 128 * pairs, rel=1e-3)
