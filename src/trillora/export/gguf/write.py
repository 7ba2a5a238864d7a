"""Writes a model with its adapter merged in as one GGUF file, for llama.cpp, Ollama, LM Studio and others.

    export_gguf(source, Path("runs/first/exports/gguf-q8_0"), type="q8_0").files   ("model-q8_0.gguf",)

The header has all sizes, so it is written first. Then tensors are read, merged, converted and written one after
another: memory holds a part of one tensor at a time. The folder gets its name when the file is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.events import Listener, Note, Progress, ignore_events
from trillora.export.carried import Rounding, check_carries
from trillora.export.gguf.families import describe, family_of
from trillora.export.gguf.quantize import FILE_TYPES, byte_shape, check_type, round_trip, tensor_type, to_bytes
from trillora.export.gguf.tensors import GgufTensor, plan_tensors
from trillora.export.gguf.tokenizer import TokenizerMetadata, tokenizer_metadata
from trillora.export.merged import writing
from trillora.export.merged_weights import MergedWeights
from trillora.export.source import Exported, ExportSource
from trillora.files.atomic import new_folder

FINER = ("q8_0", "f16", "f32")  # types that are tried if the chosen one cannot hold the change
Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file, with its type and a function that computes its values in pieces of whole rows."""

    name: str
    shape: tuple[int, ...]
    type: Any  # GGMLQuantizationType
    pieces: Callable[[], Iterable[np.ndarray]]
    stored: tuple[str, ...] = ()  # the tensors of the checkpoint that it is made from


def export_gguf(source: ExportSource, out: Path, *, type: str, listener: Listener = ignore_events) -> Exported:
    """Writes the base model with the adapter merged into it to the new folder `out`."""
    with writing(out), new_folder(out) as folder:
        name, notes = write_model(source, folder, type=type, listener=listener)
        num_bytes = (folder / name).stat().st_size
    return Exported("gguf", out, (name,), num_bytes, notes)


@dataclass(frozen=True)
class ModelPlan:
    """A GGUF file before it is written: its header, and its tensors."""

    arch: str
    values: dict[str, Value]
    tensors: list[FileTensor]
    constants: dict[str, np.ndarray]  # tensors that are not in the checkpoint
    notes: tuple[str, ...]  # what a user should know about it


def plan_model(source: ExportSource, weights: MergedWeights, type: str) -> ModelPlan:
    check_type(type)
    config = source.base.config.get_text_config()
    family = family_of(source.base.config)
    description = describe(family, config, weights.num_tokens)
    tokenizer = _tokenizer(source, weights.num_tokens)
    constants = description.rope.tensors
    added = [GgufTensor(name, array.shape, (), constant=array) for name, array in constants.items()]
    values = {
        "general.architecture": family.arch,
        "general.type": "model",
        "general.name": model_name(source.name, tokenizer),
        "general.file_type": FILE_TYPES[type],
        "general.quantization_version": 2,
        "general.base_model.count": 1,
        "general.base_model.0.name": source.base_id.rsplit("/", 1)[-1],
        **description.values,
        **tokenizer.values,
    }
    tensors = [
        FileTensor(
            each.name,
            each.shape,
            tensor_type(each.name, each.shape, type, config.num_hidden_layers),
            lambda each=each: each.arrays(weights),  # type: ignore[misc]
            tuple(part.stored for part in each.parts),
        )
        for each in [*added, *plan_tensors(family, config, weights)]
    ]
    notes = (*source.notes, *(_sentence(note) for note in (*description.notes, *tokenizer.notes)))
    return ModelPlan(family.arch, values, tensors, dict(constants), notes)


def write_model(source: ExportSource, folder: Path, *, type: str, listener: Listener) -> tuple[str, tuple[str, ...]]:
    """Writes the merged model into a folder. Returns the file's name, and what a user should know about it."""
    weights = MergedWeights(source)
    plan = plan_model(source, weights, type)
    check_carries(weights, type, _rounding(plan, None), {name: _rounding(plan, name) for name in FINER})
    name = f"model-{type}.gguf"
    write_tensors(folder / name, plan.arch, plan.values, plan.tensors, listener)
    for note in plan.notes[len(source.notes) :]:
        listener(Note(note))
    return name, plan.notes


def _rounding(plan: ModelPlan, type: str | None) -> Rounding:
    """How the planned file rounds a tensor, or one in which every changed tensor has this type."""
    types = {stored: tensor.type for tensor in plan.tensors for stored in tensor.stored}

    def rounded(weights: MergedWeights, name: str, rows: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType

        kind = types.get(name, GGMLQuantizationType.F32)
        return round_trip(rows, kind if type is None else GGMLQuantizationType[type.upper()])

    return rounded


def write_tensors(
    path: Path, arch: str, values: Mapping[str, Value], tensors: Sequence[FileTensor], listener: Listener
) -> None:
    """Writes a GGUF file piece by piece."""
    from gguf import GGUFWriter

    writer = GGUFWriter(None, arch)
    for key, value in values.items():
        if key != "general.architecture":  # the writer adds it
            _add(writer, key, value)
    sizes = []
    for tensor in tensors:
        shape = byte_shape(tensor.shape, tensor.type)
        sizes.append(int(np.prod(shape, dtype=np.int64)))
        writer.add_tensor_info(tensor.name, shape, np.dtype("uint8"), sizes[-1], tensor.type)
    done, total = 0, sum(sizes)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for tensor, size in zip(tensors, sizes, strict=True):
            start = file.tell()
            for piece in tensor.pieces():
                file.write(to_bytes(piece, tensor.type, tensor.name).data)
                listener(Progress("Writing GGUF", done + file.tell() - start, total, "bytes"))
            assert file.tell() - start == size, tensor.name
            writer.write_padding(file, size)
            done += size
    finally:
        if writer.fout is not None:
            writer.close()


def _add(writer: Any, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _tokenizer(source: ExportSource, num_tokens: int) -> TokenizerMetadata:
    return tokenizer_metadata(
        source.base.tokenizer,
        num_tokens,
        template=source.template,
        stops=source.prompts.stops,
        adds_bos=source.adds_bos,
    )


def model_name(name: str, tokenizer: TokenizerMetadata) -> str:
    """The name in the file. llama.cpp reads it: in a model with `phi-3` in its name, special tokens remove the white
    space after them. So it has that name if, and only if, the tokenizer does that."""
    plain = re.sub(r"phi-?3", "phi 3", name.replace("jina-", "jina "), flags=re.IGNORECASE)
    return f"Phi-3 {plain}" if tokenizer.strips_after else plain


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}."
