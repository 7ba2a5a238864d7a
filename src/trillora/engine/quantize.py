"""Frozen weights in 4 or 8 bits: how they are stored, and matmuls with them.

    parts = quantize(weight_ED, "int8")       # {"q": int8 [E, D], "scale": float32 [E]}
    y = linear(x, parts, bias=None)           # about x @ weight_ED.T
    y = rounded_linear(x, parts, bias=None)   # the same with x rounded to int8: both operands have 8 bits

    format         parts                                               bits a weight   weight[e, d]
    int8           q int8 [E, D], scale [E]                            8               q * scale[e]
    int4           q int4 [E, D], scale [E]                            4               q * scale[e]
    fp8            q float8_e4m3 [E, D], scale [E]                     8               q * scale[e]
    fp8_one_scale  q float8_e4m3 [E, D], scale []                      8               q * scale
    nf4            q uint8 [E, D / 2], absmax uint8 [E, D / 64],       4.127           NF4[code] * absmax of its block
                   absmax_scale [E * D / 64 / 256], absmax_mean []

Where there is one scale per output (channel), the matmul is computed with the codes and scaled afterwards:
`(x @ q.T) * scale`. Then XLA converts the codes while it reads them, and the weight is never in memory in a wider type.
nf4 has a scale per 64 inputs, so the weight is computed before the matmul. Its numbers are bitsandbytes' numbers: the
nearest of 16 values, and scales that are 8-bit codes themselves, in groups of 256 around their mean.

`rounded_linear` is for chips that multiply 8-bit numbers at twice the rate of bfloat16. Scales of x are computed when
they are needed: nothing is calibrated or kept. Sums are in int32, or in float32 for fp8. int8 has a scale for each row
of x. Example, two inputs and one output:

    x = [3, -1]       rounded: [127, -42] * 3/127       weight [0.5, 0.2]: [127, 51] * 0.5/127
    y = (127 * 127 - 42 * 51) * 3/127 * 0.5/127 = 1.3008                   exact: 1.3

fp8 has one scale for all of x, and one for the weight: XLA passes them to cuBLAS, so that the result needs no further
pass. Both are powers of two: they only move the exponent, so a number is rounded in the same way whatever the others
are, unless it is 10,000 times smaller than the largest. The gradient of x is such a matmul too. Gradients of outputs
have a wider range than activations, so they are rounded to e5m2: one bit of fraction less, and one of exponent more.

Weights get no gradient. The backward pass keeps only the codes, not the converted weight and not x.

Legend: E outputs, D inputs, N blocks of 64 inputs.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Format = Literal["int8", "int4", "nf4", "fp8", "int4_in_int8", "fp8_one_scale"]
Matmul = Literal["full", "int8", "fp8"]  # matmuls: in the type of x, or with x in the format of the codes
Parts = dict[str, jax.Array]

# The code of the largest weight of a channel.
LARGEST = {"int8": 127, "int4": 7, "int4_in_int8": 7, "fp8": 448}
CODES: dict[str, Any] = {"int8": jnp.int8, "int4": jnp.int4, "int4_in_int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
EXPONENT = np.uint32(0x7F800000)  # bits of a float32
# Floats with 8 bits, and a power of two: the largest number of an array is scaled to one to two times as much.
E4M3: tuple[DTypeLike, float] = (jnp.float8_e4m3fn, 2.0**7)
E5M2: tuple[DTypeLike, float] = (jnp.float8_e5m2, 2.0**14)
# Quantiles of a normal distribution, scaled to [-1, 1]: table of bitsandbytes 0.50.
NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)
BLOCK = 64  # inputs that share a scale in nf4
GROUP = 256  # scales that share a scale


def stored_format(
    option: Literal["none", "int8", "int4", "nf4", "fp8"], platform: str, matmul: Matmul = "full"
) -> Format | None:
    """How a platform stores the codes. A program that is compiled ahead of time for the CPU refuses 4-bit arrays: they
    do not have the layout that it was compiled for (jax 0.10). So there each int4 code takes a byte."""
    if option == "none":
        return None
    if matmul == "fp8":
        return "fp8_one_scale"
    return "int4_in_int8" if option == "int4" and platform == "cpu" else option


def block_of(format: str) -> int:
    """Inputs that belong together; a weight is split over devices between blocks only."""
    return BLOCK if format == "nf4" else 1


def part_names(format: Format) -> tuple[str, ...]:
    """The codes come first."""
    return ("q", "absmax", "absmax_scale", "absmax_mean") if format == "nf4" else ("q", "scale")


def item_bytes(dtype: DTypeLike) -> float:
    """Bytes of one element on a device, where 4-bit integers are packed; numpy stores each in a byte. 0 for types
    without a size, such as random keys."""
    return 0.5 if getattr(dtype, "name", "") in ("int4", "uint4") else float(getattr(dtype, "itemsize", 0))


@functools.cache
def shapes(num_outputs: int, num_inputs: int, format: Format) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the parts of a weight."""
    weight = jax.ShapeDtypeStruct((num_outputs, num_inputs), jnp.float32)
    found = jax.eval_shape(lambda w: quantize(w, format), weight)
    return {name: found[name] for name in part_names(format)}


def quantize(weight_ED: jax.Array, format: Format) -> Parts:
    weight_ED = weight_ED.astype(jnp.float32)
    if format == "nf4":
        return _quantize_nf4(weight_ED)
    codes, scale = to_fp8(weight_ED) if format == "fp8_one_scale" else round_rows(weight_ED, format)
    return {"q": codes, "scale": scale}


def round_rows(x: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Codes [..., D] and scales [...]: the largest number of a row gets the largest code. A row with a number that is
    not finite has such a scale too, so matmuls with it are not finite either."""
    largest = LARGEST[format]
    x = x.astype(jnp.float32)
    scale = _largest(x) / largest
    scaled = x * _inverse(scale)[..., None]
    if format != "fp8":
        scaled = jnp.round(scaled)
    # The largest is a rounding error off the largest code at most, and is rounded to it: nothing needs to be clipped.
    return scaled.astype(CODES[format]), scale


def to_fp8(x: jax.Array, kind: tuple[DTypeLike, float] = E4M3) -> tuple[jax.Array, jax.Array]:
    """Codes, and one scale for all, a power of two. A number that is not finite makes the scale infinite, and matmuls
    with it NaN."""
    dtype, target = kind
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).max().astype(jnp.float32), jnp.uint32)
    scale = jax.lax.bitcast_convert_type(bits & EXPONENT, jnp.float32) / target
    return (x.astype(jnp.float32) * _inverse(scale)).astype(dtype), scale


def dequantize(parts: Parts, num_inputs: int) -> jax.Array:
    """The weight [E, D] in float32."""
    if "scale" in parts:
        return parts["q"].astype(jnp.float32) * parts["scale"][..., None]
    num_outputs, num_blocks = parts["absmax"].shape
    codes = parts["q"].reshape(num_outputs, num_blocks, BLOCK // 2)
    values = jnp.concatenate([_nf4_value(codes >> 4), _nf4_value(codes & 15)], axis=-1)
    weight = values * _absmax(parts)[..., None]
    return weight.reshape(num_outputs, num_blocks * BLOCK)[:, :num_inputs]


@jax.custom_vjp
def linear(x: jax.Array, parts: Parts, bias: jax.Array | None = None) -> jax.Array:
    """x [..., D] -> [..., E], in the type of x. Differentiable in x."""
    x, parts = _not_before(x, parts)
    # A sum with the bias is rounded once, like PyTorch's.
    wide = x.dtype if bias is None else jnp.float32
    if "scale" not in parts:
        weight = dequantize(parts, x.shape[-1]).astype(x.dtype)
        y = jnp.einsum("...d,ed->...e", x, weight, preferred_element_type=wide)
    else:
        codes = parts["q"].astype(x.dtype)  # exact: 8 bits fit in the fraction of bfloat16
        y = jnp.einsum("...d,ed->...e", x, codes, preferred_element_type=wide) * parts["scale"]
    return (y if bias is None else y + bias).astype(x.dtype)


def _linear_forward(x: jax.Array, parts: Parts, bias: jax.Array | None) -> tuple[jax.Array, tuple[Parts, jax.Array]]:
    return linear(x, parts, bias), (parts, jnp.zeros((x.shape[-1], 0)))


def _linear_backward(kept: tuple[Parts, jax.Array], dy: jax.Array) -> tuple[jax.Array, None, None]:
    parts, inputs = kept
    dy, parts = _not_before(dy, parts)
    if "scale" not in parts:
        return dy @ dequantize(parts, len(inputs)).astype(dy.dtype), None, None
    scaled = (dy * parts["scale"]).astype(dy.dtype)
    return scaled @ parts["q"].astype(dy.dtype), None, None


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def rounded_linear(x: jax.Array, parts: Parts, bias: jax.Array | None = None) -> jax.Array:
    """`linear` of parts in int8 or fp8_one_scale, with x rounded to the format of the codes."""
    wide = x.dtype if bias is None else jnp.float32
    if parts["q"].dtype == jnp.int8:
        y = _int8_product("...d,ed->...e", x, parts["q"]) * parts["scale"]
    else:
        y = _fp8_product(x, E4M3, parts, 1, wide)
    return (y if bias is None else y + bias).astype(x.dtype)


def _rounded_forward(x: jax.Array, parts: Parts, bias: jax.Array | None) -> tuple[jax.Array, Parts]:
    return rounded_linear(x, parts, bias), parts


def _rounded_backward(parts: Parts, dy: jax.Array) -> tuple[jax.Array, None, None]:
    if parts["q"].dtype == jnp.int8:
        # The scales of the outputs are summed over here, so they have to be part of what is rounded.
        dx = _int8_product("...e,ed->...d", dy * parts["scale"], parts["q"])
    else:
        dx = _fp8_product(dy, E5M2, parts, 0, dy.dtype)
    return dx.astype(dy.dtype), None, None


rounded_linear.defvjp(_rounded_forward, _rounded_backward)


def _int8_product(equation: str, x: jax.Array, codes_ED: jax.Array) -> jax.Array:
    """The matmul of the codes, times the scales of the rows of x, in float32."""
    codes, scale = round_rows(x, "int8")
    y = jnp.einsum(equation, codes, codes_ED, preferred_element_type=jnp.int32)
    return y.astype(jnp.float32) * scale[..., None]


def _fp8_product(x: jax.Array, kind: tuple[DTypeLike, float], parts: Parts, dim: int, out: DTypeLike) -> jax.Array:
    """x times the codes, summed over this dim of the codes, in the type `out`. Written so that XLA finds cuBLAS's fp8
    matmul: its operands are two matrices of codes, and one number scales the result, which XLA then passes to cuBLAS.
    It is a power of two, so the result is only rounded once.

    cuBLAS sums over the inner dims of both matrices. For the gradient, XLA transposes the codes in every step: for each
    weight that reads and writes as many bytes as it has numbers. A second copy of the base would save that."""
    codes, scale = to_fp8(x.reshape(-1, x.shape[-1]), kind)
    codes, parts = _not_before(codes, parts)
    y = jax.lax.dot_general(codes, parts["q"], (((1,), (dim,)), ((), ())), preferred_element_type=out)
    return (y * (scale * parts["scale"]).astype(out)).reshape(*x.shape[:-1], -1)


def _not_before(x: jax.Array, parts: Parts) -> tuple[jax.Array, Parts]:
    """Makes the compiler convert the codes when x is known, not earlier. Where layers are unrolled, XLA converted the
    weights of all layers before the loop over micro-batches and kept them: the whole base in a wide type. TPUs are left
    alone: there the layers are a scan, and codes are converted as part of the matmul."""

    def wait(x: jax.Array, parts: Parts) -> tuple[jax.Array, Parts]:
        return jax.lax.optimization_barrier((x, parts))

    return jax.lax.platform_dependent(x, parts, tpu=lambda x, parts: (x, parts), default=wait)


# ---- nf4


def _quantize_nf4(weight_ED: jax.Array) -> Parts:
    """Two codes per byte: the first half of a block in the high bits, the second in the low bits. bitsandbytes puts
    neighbors into a byte; they would have to be interleaved again for the matmul. Rows are padded to whole blocks."""
    num_outputs, num_inputs = weight_ED.shape
    padded = jnp.pad(weight_ED, ((0, 0), (0, -num_inputs % BLOCK)))
    blocks = padded.reshape(num_outputs, -1, BLOCK)
    absmax_EN = _largest(blocks)
    codes = _nearest(blocks * _inverse(absmax_EN)[..., None], NF4)
    packed = codes[..., : BLOCK // 2] << 4 | codes[..., BLOCK // 2 :]
    mean = absmax_EN.mean()
    flat = (absmax_EN - mean).ravel()
    groups = jnp.pad(flat, (0, -flat.size % GROUP)).reshape(-1, GROUP)
    scale = jnp.abs(groups).max(axis=-1)
    absmax = _nearest(groups * _inverse(scale)[:, None], DYNAMIC)
    return {
        "q": packed.reshape(num_outputs, -1),
        "absmax": absmax.ravel()[: flat.size].reshape(absmax_EN.shape),
        "absmax_scale": scale,
        "absmax_mean": mean,
    }


def _absmax(parts: Parts) -> jax.Array:
    """The scales of the blocks [E, N]."""
    codes = parts["absmax"]
    number = jax.lax.broadcasted_iota(jnp.int32, codes.shape, 0) * codes.shape[1]
    group = (number + jax.lax.broadcasted_iota(jnp.int32, codes.shape, 1)) // GROUP
    return _look_up(DYNAMIC, codes) * _look_up(parts["absmax_scale"], group) + parts["absmax_mean"]


def _nf4_value(codes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(codes, tpu=_select_nf4, default=lambda c: _look_up(NF4, c))


def _select_nf4(codes: jax.Array) -> jax.Array:
    """The same by 15 selects, bit by bit: a TPU looks values up one by one, which takes several times as long."""
    values: list[Any] = list(NF4)
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _look_up(table: np.ndarray | jax.Array, codes: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")


def _nearest(values: jax.Array, table: np.ndarray) -> jax.Array:
    """Index of the nearest entry of a sorted table; of the lower one if two are equally near."""
    middles = (table[:-1] + table[1:]) / 2
    if len(table) > 16:
        return jnp.searchsorted(middles, values).astype(jnp.uint8)
    codes = jnp.zeros(values.shape, jnp.uint8)
    for middle in middles:
        codes += values > middle
    return codes


def _largest(x: jax.Array) -> jax.Array:
    """The largest |x| of each row [..., D], or NaN if the row has one. XLA's max loses NaN on x86-64 CPUs (jax 0.10 and
    0.11), so CPUs compare bits: float32 numbers without a sign are ordered like their bits, with NaN last."""

    def of_bits(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        return jax.lax.bitcast_convert_type(bits.max(axis=-1), jnp.float32)

    return jax.lax.platform_dependent(x, cpu=of_bits, default=lambda x: jnp.abs(x).max(axis=-1))


def _inverse(scale: jax.Array) -> jax.Array:
    """1 / scale, and 0 for a channel or block of zeros."""
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def _dynamic_map() -> np.ndarray:
    """The 256 values of bitsandbytes' signed dynamic code: for each power of ten from 1e-6 to 1, 1, 2, 4, … 64 evenly
    spaced values of either sign; and 0 and 1."""
    values = [np.float32(0), np.float32(1)]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (exponent - 6))
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


DYNAMIC = _dynamic_map()
