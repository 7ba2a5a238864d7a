"""The number types of a GGUF file: which one each tensor gets, and the conversion.

    tensor_type("blk.0.attn_q.weight", (576, 576), "q8_0", num_layers=30)   GGMLQuantizationType.Q8_0
    to_bytes(rows, GGMLQuantizationType.Q8_0)                               uint8 [rows, 612]

Norms, biases and routers stay float32: they are small, and llama.cpp wants them so. The gguf library quantizes the
simple types in numpy, with the same bytes as llama.cpp. The K-types of q4_k_m are quantized by llama.cpp's own
function, which the package xllamacpp contains.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trillora.errors import TrilloraError
from trillora.locks.extras import install_command

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

# Name -> general.file_type, as in llama.cpp's enum llama_ftype.
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q4_k_m": 15,
    "bf16": 32,
}
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q4_k_m")
LARGEST_HALF = 65504.0  # the largest float16, which is the type of the scales too


def check_type(type: str) -> None:
    if type not in TYPES:
        known = ", ".join(TYPES)
        raise TrilloraError(f"'{type}' is not a type of GGUF files.", where="--type", do=f"use one of {known}")
    if importlib.util.find_spec("gguf") is None:
        raise TrilloraError(
            "The package that writes GGUF files is not installed.",
            where="Python package gguf",
            do=install_command("export"),
        )
    if type == "q4_k_m":
        _library()


def tensor_type(name: str, shape: Sequence[int], type: str, num_layers: int) -> GGMLQuantizationType:
    """The type of one tensor. Types with blocks need rows of whole blocks; others get the next larger type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) == 1 or name.endswith("_norm.weight") or "ffn_gate_inp" in name or name.startswith("rope_"):
        return GGMLQuantizationType.F32
    wanted = _k_type(name, num_layers) if type == "q4_k_m" else type.upper()
    if wanted.startswith(("Q4_", "Q5_")) and type != "q4_k_m" and name in ("output.weight", "token_embd.weight"):
        wanted = "Q8_0"  # logits suffer most from few bits; llama.cpp's own files have 6 bits here
    for candidate in (wanted, {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(wanted), "F16"):
        if candidate and shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[candidate]][0] == 0:
            return GGMLQuantizationType[candidate]
    raise AssertionError("F16 has blocks of one value")


def _k_type(name: str, num_layers: int) -> str:
    """llama.cpp's mixture Q4_K_M: more bits for the head, and for values and `down` in some layers."""
    if name in ("output.weight", "token_embd.weight"):
        return "Q6_K"
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    is_important = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    is_sensitive = any(part in name for part in ("attn_v.", "attn_qkv.", "ffn_down"))
    return "Q6_K" if is_important and is_sensitive else "Q4_K"


def byte_shape(shape: Sequence[int], type: GGMLQuantizationType) -> tuple[int, ...]:
    from gguf import quant_shape_to_byte_shape

    return tuple(quant_shape_to_byte_shape(shape, type))


def to_bytes(array: np.ndarray, type: GGMLQuantizationType, name: str = "tensor") -> np.ndarray:
    """Rows of float32 in another type, as bytes."""
    from gguf import GGMLQuantizationType, quants

    array = np.ascontiguousarray(array, np.float32)
    largest = float(np.abs(array).max(initial=0.0))  # NaN if there is one
    if not largest <= (np.inf if type.name in ("F32", "BF16") else LARGEST_HALF) or largest == np.inf:
        raise TrilloraError(
            f"{name} has values up to {largest:g}, which {type.name.lower()} cannot hold.",
            where="--type",
            do="use --type bf16 or f32"
            if np.isfinite(largest)
            else "look for a run that diverged: values must be finite",
        )
    if type in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        return _quantize_k(array, type)
    return quants.quantize(array, type).view(np.uint8)


def to_values(data: np.ndarray, type: GGMLQuantizationType) -> np.ndarray:
    """The other way: bytes of whole rows as float32."""
    from gguf import quants

    return np.asarray(quants.dequantize(data, type).astype(np.float32, copy=False))


def round_trip(array: np.ndarray, type: GGMLQuantizationType) -> np.ndarray:
    """The values that a reader gets back, in float32."""
    return to_values(to_bytes(array, type), type).reshape(array.shape)


def _quantize_k(array: np.ndarray, type: GGMLQuantizationType) -> np.ndarray:
    rows = array.reshape(-1, array.shape[-1])
    result = np.empty(byte_shape(rows.shape, type), np.uint8)
    pointer = ctypes.POINTER(ctypes.c_float)
    written = _library().ggml_quantize_chunk(
        int(type),
        rows.ctypes.data_as(pointer),
        result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(rows.shape[0]),
        ctypes.c_int64(rows.shape[1]),
        pointer(),  # no importance matrix
    )
    assert written == result.nbytes
    return result.reshape(byte_shape(array.shape, type))


@functools.cache
def _library() -> ctypes.CDLL:
    """llama.cpp's library inside xllamacpp; an error if it is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    files = sorted(Path(spec.origin).parent.glob("xllamacpp*.so")) if spec and spec.origin else []
    library = ctypes.CDLL(str(files[0])) if files else None
    if library is None or not hasattr(library, "ggml_quantize_chunk"):
        raise TrilloraError(
            "q4_k_m needs the quantization of llama.cpp, which is not installed.",
            where="Python package xllamacpp",
            do=f"{install_command('certify')}, or use --type q4_0 or q5_1",
        )
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library
