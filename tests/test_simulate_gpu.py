"""Simulated step times of GPU programs, written by hand in the format of XLA's GPU compiler.

benchmarks/preflight_gpu.py measures the error on a real card."""

from __future__ import annotations

import pytest

from trillora.devices.chips import GPUS
from trillora.preflight.hlo.kernels import CUDNN_BACKWARD_PASSES, CUDNN_BLOCK
from trillora.preflight.hlo.simulate import GPU, simulate

H200 = GPUS["H200"]

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


def test_a_gpu_program_is_timed_by_flops_and_memory() -> None:
    time = simulate(GPU_PROGRAM, H200, 1)
    gemm = 2 * 8192 * 4096 * 4096
    # Two products; the causal mask hides half of them, but blocks on its edge are computed whole.
    attention = 2 * (2 * 4 * 32 * 2048 * 2048 * 64) * (1 / 2 + CUDNN_BLOCK / 2048 / 2)
    thin = 2 * 8192 * 4096 * 16
    thin_bytes = 2 * (8192 * 4096 + 4096 * 16 + 8192 * 16)  # bound by HBM: rank 16
    assert time.flops == 16 * gemm + attention + thin
    expected = (
        16 * gemm / (989e12 * GPU.product)
        + attention / (989e12 * GPU.kernel * GPU.narrow)
        + thin_bytes / (4800e9 * GPU.hbm)
        + 18 * GPU.launch_seconds
    )
    assert time.seconds == pytest.approx(expected, rel=1e-3)
    assert time.kernel_seconds == pytest.approx(attention / (989e12 * GPU.kernel * GPU.narrow) + GPU.launch_seconds)
    assert time.warnings == ()


def attention_program(target: str, num_tokens: int, window: int = 0) -> str:
    shape = f"bf16[4,{num_tokens},32,128]{{3,2,1,0}}"
    return f"""
HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[4,{num_tokens},32,128]) -> bf16[4,{num_tokens},32,128] {{
  %q = {shape} parameter(0)
  ROOT %fmha = ({shape}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="{target}", \
backend_config={{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"element_type":"BF16",\
"dimensions":["4","32","{num_tokens}","{num_tokens}"]}},"mask_type":"CAUSAL","sliding_window_length":{window}}}}}
}}
"""


def test_the_backward_attention_kernel_includes_its_helper_kernels() -> None:
    forward = simulate(attention_program("__cudnn$fmhaSoftmax", 2048), H200, 1)
    backward = simulate(attention_program("__cudnn$fmhaSoftmaxBackward", 2048), H200, 1)
    assert backward.flops == pytest.approx(2.5 * forward.flops)  # five products instead of two
    queries = 4 * 2048 * 32 * 128 * 2
    helpers = CUDNN_BACKWARD_PASSES * queries / (4800e9 * GPU.hbm)
    assert backward.seconds == pytest.approx(
        2.5 * (forward.seconds - GPU.launch_seconds) + GPU.launch_seconds + helpers
    )
    assert backward.kernel_seconds == pytest.approx(backward.seconds)


def test_attention_with_a_mask_in_memory_is_slower() -> None:
    causal = simulate(attention_program("__cudnn$fmhaSoftmax", 2048), H200, 1)
    masked = simulate(attention_program("__cudnn$fmhaScaleBiasSoftmax", 2048), H200, 1)
    arithmetic = causal.seconds - GPU.launch_seconds
    assert masked.seconds - GPU.launch_seconds == pytest.approx(arithmetic / GPU.masked)


def test_kernels_in_triton_are_timed_by_their_memory() -> None:
    program = """
HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[16384,8192]) -> bf16[16384,8192] {
  %x = bf16[16384,8192]{1,0} parameter(0)
  ROOT %y = bf16[16384,8192]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"
}
"""
    seconds = 2 * 16384 * 8192 * 2 / (4800e9 * GPU.hbm * GPU.triton)
    assert simulate(program, H200, 1).seconds == pytest.approx(seconds + GPU.launch_seconds)


def test_a_window_reduces_attention_flops() -> None:
    whole = simulate(attention_program("__cudnn$fmhaSoftmax", 8192), H200, 1)
    narrow = simulate(attention_program("__cudnn$fmhaSoftmax", 8192, window=1024), H200, 1)
    edge = CUDNN_BLOCK / 2 / 8192
    assert narrow.flops / whole.flops == pytest.approx((1 / 8 - 1 / 128 + edge) / (1 / 2 + edge))
