"""A merged model as transformers reads it: safetensors in shards, config, tokenizer, chat template and a model card.

    exported = export_merged(open_source("runs/first"), Path("merged"))

Shards are written piece by piece, so the memory does not grow with the model. Tensors that the adapter does not change
are copied byte by byte, with the names of the base's files; that includes a vision tower.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trillora.adapters.card import CARD_FILE
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress, ignore_events
from trillora.export.carried import Rounding, check_carries
from trillora.export.merged_weights import MergedWeights
from trillora.export.safetensors_file import PlannedTensor, write_tensors
from trillora.export.source import Exported, ExportSource
from trillora.files.atomic import new_folder
from trillora.files.bounded import read_bounded
from trillora.files.read_json import read_json
from trillora.model.loading.checkpoint import DTYPES
from trillora.model.loading.description import CONFIG_FILE, INDEX_FILE, stop_tokens
from trillora.model.loading.digest import SETTINGS_FILES
from trillora.model.loading.source import SINGLE_FILE, code_files
from trillora.model.loading.wrapper import auto_class

SHARD_BYTES = 5_000_000_000
MAX_BYTES = 64 << 20  # of a file that is copied
FLOATS = {"float32": ("F32", np.float32), "float16": ("F16", np.float16), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
GENERATION_FILE = "generation_config.json"
_CODES = {name: code for code, name in DTYPES.items()}


def export_merged(
    source: ExportSource,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    listener: Listener = ignore_events,
) -> Exported:
    """Writes the base model with the adapter merged into it to the new folder `out`. `dtype` is "float32", "float16"
    or "bfloat16"; None keeps the type of each tensor."""
    if dtype is not None and dtype not in FLOATS:
        raise TrilloraError(
            f"A merged model cannot be stored as {dtype}.", where="--type", do=f"use {' or '.join(FLOATS)}"
        )
    weights = MergedWeights(source)
    shards = _shards(weights, dtype, max_shard_bytes)
    check_carries(
        weights,
        dtype or "The base's type",
        _rounding(dtype),
        {name: _rounding(name) for name in ("float16", "float32")},
    )
    notes = [*source.notes, *weights.notes]
    with writing(out), new_folder(out) as folder:
        _write_shards(folder, weights, shards, listener)
        others = {CARD_FILE: _card(source, notes), **other_files(source, weights, dtype)}
        for name, data in others.items():
            (folder / name).write_bytes(data)
        files = sorted(entry.name for entry in folder.iterdir())
        num_bytes = sum((folder / name).stat().st_size for name in files)
    return Exported("merged", out, tuple(files), num_bytes, tuple(notes))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """For a block that writes the folder of an export: refuses one that has files, and explains a full disk."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise TrilloraError(
            "The output folder already exists.", where=str(out), do="choose another --out, or remove it"
        )
    try:
        yield
    except OSError as error:
        raise TrilloraError(
            f"The export cannot be written: {error.strerror or error}.",
            where=str(out),
            do="free disk space, or choose another --out; nothing was left behind",
        ) from error


def _shards(weights: MergedWeights, dtype: str | None, max_bytes: int) -> dict[str, list[PlannedTensor]]:
    """The tensors of each file. A tensor that is larger than `max_bytes` has a file of its own."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for name in weights.names:
        own = weights.dtype(name)
        stored = dtype if dtype is not None and own in (*FLOATS, "float64") else own
        tensor = PlannedTensor(name, _CODES.get(stored, stored), weights.shape(name))
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": part for number, part in enumerate(shards, 1)}


def _rounding(dtype: str | None) -> Rounding:
    """How a merged model with this `--type` rounds a tensor."""

    def rounded(weights: MergedWeights, name: str, rows: np.ndarray) -> np.ndarray:
        kind = FLOATS.get(dtype or weights.dtype(name), FLOATS["float32"])[1]
        with np.errstate(over="ignore"):
            return rows.astype(kind).astype(np.float32)

    return rounded


def _write_shards(
    folder: Path, weights: MergedWeights, shards: dict[str, list[PlannedTensor]], listener: Listener
) -> None:
    total, done = sum(tensor.num_bytes for part in shards.values() for tensor in part), 0

    def pieces(tensor: PlannedTensor) -> Iterator[np.ndarray]:
        nonlocal done
        for piece in _pieces(weights, tensor):
            yield piece
            done += piece.nbytes
            listener(Progress("Merging weights", done, total, "bytes"))

    for file, tensors in shards.items():
        write_tensors(folder / file, tensors, pieces)
    if len(shards) > 1:
        parameters = sum(math.prod(tensor.shape) for part in shards.values() for tensor in part)
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {tensor.name: file for file, tensors in shards.items() for tensor in tensors},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _pieces(weights: MergedWeights, tensor: PlannedTensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor in the type that it is stored in."""
    own = weights.dtype(tensor.name)
    if not weights.is_changed(tensor.name) and _CODES.get(own, own) == tensor.dtype:
        yield from weights.raw_chunks(tensor.name)
        return
    kinds = dict(FLOATS.values())
    for chunk in weights.chunks(tensor.name):
        with np.errstate(over="ignore"):
            stored = chunk.astype(kinds.get(tensor.dtype, np.float64))
        if not np.isfinite(stored).all():
            largest = float(np.abs(chunk).max())
            raise TrilloraError(
                f"{tensor.name} has values up to {largest:g}, which {DTYPES[tensor.dtype]} cannot hold.",
                where=tensor.name,
                do="use --type bfloat16 or --type float32",
            )
        yield stored.reshape(-1).view(np.uint8)


def _card(source: ExportSource, notes: list[str]) -> bytes:
    kind = auto_class(source.base.config)
    usage = f"""```python
from transformers import {kind}, AutoTokenizer

here = "THIS_REPOSITORY_OR_FOLDER"
model = {kind}.from_pretrained(here, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(here)
```"""
    form = "A fine-tuned version, with its LoRA adapter merged into the weights,"
    return source.card(relation="finetune", form=form, library="transformers", usage=usage, notes=notes)


def other_files(source: ExportSource, weights: MergedWeights, dtype: str | None) -> dict[str, bytes]:
    """Every file but the weights and the card: their names and contents."""
    config = weights.config()
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name
        config["dtype"] = dtype
    base = source.base.folder
    generation = _generation_config(source)
    copied = [file for file in (base / name for name in SETTINGS_FILES) if file.is_file()]
    copied += code_files(base)  # of a model whose code the user trusts
    return {
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
        **{file.name: read_bounded(file, MAX_BYTES) for file in copied},
        **({} if generation is None else {GENERATION_FILE: generation}),
        **source.tokenizer_files(),
    }


def _generation_config(source: ExportSource) -> bytes | None:
    """The base's generation_config.json with the token that ends an answer in training, or else generation would go
    past the end. None if the base's files stop there already."""
    base, prompts = source.base, source.prompts
    known = sorted(stop_tokens(base.folder, base.config))
    eos = base.tokenizer.eos_token_id
    wanted = [*prompts.template_stops] or ([eos] if eos is not None else [])
    if {*wanted} <= {*known}:
        return None
    file, text = base.folder / GENERATION_FILE, base.config.get_text_config()
    ids = {name: getattr(text, name, None) for name in ("bos_token_id", "pad_token_id")}
    content: dict[str, Any] = {name: id_ for name, id_ in ids.items() if id_ is not None}
    if file.is_file():
        content = read_json(file, dict[str, Any], do="download the file again", allow_infinity=True)
    content["eos_token_id"] = list(dict.fromkeys([*known, *wanted]))
    return (json.dumps(content, indent=2) + "\n").encode()
