"""How a checkpoint is quantized, by its config.json. One that cannot be read is refused before its weights are opened.

    read_method(folder)     config.json: {"quantization_config": {"quant_method": "gptq", "bits": 4, …}, …}
    -> StoredMethod(name="gptq", label="GPTQ int4", bits=4)

This module imports neither torch nor jax: it runs before a model is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trillora.errors import TrilloraError
from trillora.model.loading.description import CONFIG_FILE, read_config

_MODELOPT_FILE = "hf_quant_config.json"
_DO = "use the unquantized (bfloat16) version of the model, or one in MXFP4, FP8, bitsandbytes, GPTQ or AWQ"
_READ = ("mxfp4", "fp8", "mxfp8", "fbgemm_fp8", "bitsandbytes", "gptq", "awq", "compressed-tensors")
_COMPRESSED = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_LABELS = {"mxfp4": "MXFP4", "fp8": "float8", "mxfp8": "MXFP8", "fbgemm_fp8": "float8"}
Block = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class StoredMethod:
    """What the config says about the stored weights. Everything else is in the tensors themselves."""

    name: str  # quant_method
    label: str  # for people
    bits: int = 4  # of a code
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    zeros_are_less_by_one: bool = False  # GPTQ's first version stores each zero point minus one


class _Weights(BaseModel):
    num_bits: int = 8
    block_structure: tuple[Block, Block] | str | None = None


class _Group(BaseModel):
    format: str | None = None
    weights: _Weights | None = None


class _Section(BaseModel):
    """The fields of `quantization_config` that decide how weights are read."""

    model_config = ConfigDict(extra="allow")

    quant_method: str | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bits: int = 4
    weight_block_size: tuple[Block, Block] | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def read_method(folder: Path) -> StoredMethod | None:
    """How the weights of a model are quantized; None if they are not. Unknown methods are refused."""
    where = folder / CONFIG_FILE
    found = _section(read_config(folder)) if where.is_file() else None
    if found is None:
        if (folder / _MODELOPT_FILE).is_file():
            raise _refusal("ModelOpt", str(folder / _MODELOPT_FILE))
        return None
    key, content = found
    try:
        section = _Section.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        what = f"The model's {key}.{path} cannot be read: {first['msg']}."
        raise TrilloraError(what, where=str(where), do="download the file again") from None
    name = section.quant_method
    if name is None and (section.load_in_4bit or section.load_in_8bit):
        name = "bitsandbytes"  # older files do not say it
    if name not in _READ:
        raise _refusal(name or "an unknown method", f"{where}, {key}.quant_method")
    return _method(name, section, f"{where}, {key}")


def _section(config: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part.get(key), dict):
                return key, part[key]
    return None


def _method(name: str, section: _Section, where: str) -> StoredMethod:
    block = section.weight_block_size
    if name == "bitsandbytes":
        return StoredMethod(name, "bitsandbytes int8" if section.load_in_8bit else "bitsandbytes 4 bit")
    if name == "gptq":
        layout = section.checkpoint_format or section.format or "gptq"
        if layout not in ("gptq", "gptq_v2") or section.bits not in (2, 4, 8):
            raise _refusal(f"GPTQ with {section.bits} bits in the layout {layout}", where)
        return StoredMethod(name, f"GPTQ int{section.bits}", section.bits, zeros_are_less_by_one=layout == "gptq")
    if name == "awq":
        layout = section.version or section.format or "gemm"
        if layout.lower() != "gemm" or section.bits != 4:
            raise _refusal(f"AWQ with {section.bits} bits in the layout {layout}", where)
        return StoredMethod(name, "AWQ int4")
    if name == "compressed-tensors":
        return _compressed(name, section, where)
    return StoredMethod(name, _LABELS[name], block=block)


def _compressed(name: str, section: _Section, where: str) -> StoredMethod:
    groups = list(section.config_groups.values())
    formats = {format for format in (section.format, *(group.format for group in groups)) if format}
    if unknown := sorted(formats - {*_COMPRESSED}):
        raise _refusal(f"compressed-tensors in the format {unknown[0]}", where)
    if section.transform_config or (section.sparsity_config or {}).get("format", "dense") != "dense":
        raise _refusal("compressed-tensors with transformed or sparse weights", where)
    weights = [group.weights for group in groups if group.weights]
    widths = {each.num_bits for each in weights}
    if not widths <= {4, 8}:
        raise _refusal(f"compressed-tensors with {min(widths - {4, 8})} bits", where)
    block = next((each.block_structure for each in weights if isinstance(each.block_structure, tuple)), None)
    label = f"compressed-tensors {' and '.join(sorted(formats - {'mixed-precision', 'dense'})) or name}"
    return StoredMethod(name, label, block=block)


def _refusal(what: str, where: str) -> TrilloraError:
    return TrilloraError(f"The model's weights are quantized with {what}, which cannot be read.", where=where, do=_DO)
