"""Checkpoints in stored formats, with their values."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


Quantize = Callable[[str, torch.Tensor], Tensors]  # name and weight -> stored tensors by name


BITSANDBYTES = json.loads((Path(__file__).parents[1] / "golden" / "nf4-bitsandbytes.json").read_text())


def random_bytes(shape: tuple[int, ...], low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def float8(rows: int, columns: int, scale_name: str = "weight_scale_inv", kind: Any = torch.float32) -> Quantize:
    """Random codes with a scale for each block; one scale if `rows` is 0."""

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) if rows else ()
        scale = (torch.rand(grid) + 0.5) / 64
        exponents = torch.randint(118, 124, grid, dtype=torch.uint8)
        if kind == torch.uint8:
            scale = exponents
        elif kind == torch.float8_e8m0fnu:
            scale = exponents.view(kind)
        codes = torch.randn(weight.shape).mul(50).to(torch.float8_e4m3fn)
        return {name: codes, name.removesuffix("weight") + scale_name: scale.to(kind)}

    return quantize


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def golden(name: str, dtype: Any) -> torch.Tensor:
    return torch.tensor(np.frombuffer(base64.b64decode(BITSANDBYTES[name]), dtype))


def nf4(name: str, weight: torch.Tensor, *, nested: bool = True, dtype: str = "bfloat16") -> Tensors:
    """As bitsandbytes saves a weight."""
    count = weight.numel() // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": list(weight.shape)}
    parts = {
        "": random_bytes((weight.numel() // 2, 1)),
        ".quant_map": torch.tensor(BITSANDBYTES["nf4"]),
        ".absmax": random_bytes((count,)) if nested else torch.rand(count),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.03125, "nested_dtype": "float32"}
        parts[".nested_quant_map"] = golden("dynamic_float32", "f4")
        parts[".nested_absmax"] = torch.rand(-(-count // 256))
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {name + end: part for end, part in {**parts, ".quant_state.bitsandbytes__nf4": text}.items()}


def int8(name: str, weight: torch.Tensor) -> Tensors:
    layer = name.removesuffix("weight")
    codes = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    return {
        name: codes,
        f"{layer}SCB": torch.rand(len(weight)),
        f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def channels(name: str, weight: torch.Tensor) -> Tensors:
    layer = name.removesuffix("weight")
    codes = torch.randn(weight.shape).mul(50).to(torch.float8_e4m3fn)
    return {name: codes, f"{layer}weight_scale": torch.rand(len(weight), 1), f"{layer}input_scale": torch.ones(1)}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


KEPT = {
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (channels, {**COMPRESSED, "format": "float-quantized"}),
}
