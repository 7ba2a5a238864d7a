"""A model with the weights of an export as they are rounded, for our engine and for llama.cpp.

    write_rounded(subject, folder)       # safetensors and config.json: the export's weights, the expected configuration
    write_float32_copy(model, folder)    # the same GGUF file, with its tensors in float32

Both are temporary, and as large as the model in float32.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trillora.certify.gguf_file import GgufFile
from trillora.certify.subject import NotHere, Subject
from trillora.certify.weights.checks import Place, Places
from trillora.devices.chips import GIB
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress, ignore_events
from trillora.export.gguf.quantize import FILE_TYPES
from trillora.export.gguf.write import FileTensor, write_tensors
from trillora.model.loading.description import CONFIG_FILE, INDEX_FILE
from trillora.model.loading.source import weight_files


def write_rounded(subject: Subject, folder: Path, listener: Listener) -> None:
    config = subject.merged.config()
    (folder / CONFIG_FILE).write_text(json.dumps(config), "utf-8")
    if subject.kind == "merged":  # its own files; the configuration is the expected one
        for file in [*weight_files(subject.folder), subject.folder / INDEX_FILE]:
            if file.is_file():
                (folder / file.name).symlink_to(file.absolute())
        return
    weights, model = subject.expected, subject.gguf
    places = Places(model.text("general.architecture") or "", subject.opened.config.get_text_config(), str(model.file))
    _check_room(folder, sum(math.prod(weights.shape(name)) for name in weights.names))
    shards: dict[str, str] = {}
    for number, name in enumerate(weights.names):
        listener(Progress("Reading weights", number, len(weights.names)))
        if found := places.find(name, weights.shape(name)):  # empty for a vision tower
            shards[name] = f"model-{number:05d}.safetensors"
            save_file({name: _from_gguf(model, found, weights.shape(name))}, folder / shards[name])
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shards}), "utf-8")


def _from_gguf(model: GgufFile, places: list[Place], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the checkpoint from its places in a GGUF file, in float32."""
    tensor = np.empty(shape, np.float32)
    for place in places:
        if place.target not in model.types:
            raise TrilloraError(f"{place.target} is missing.", where=str(model.file), do="export it again")
        part = tensor[:, place.columns] if len(shape) > 2 else tensor
        values = model.rows(place.target, place.rows, part.size // len(place.rows))[1]
        part[...] = values.reshape(part.shape) - np.float32(place.offset)
    return tensor


def write_float32_copy(model: GgufFile, folder: Path) -> Path:
    """With the header of the file."""
    from gguf import GGMLQuantizationType

    _check_room(folder, sum(math.prod(model.shape(name)) for name in model.types))
    values = {**model.header(), "general.file_type": FILE_TYPES["f32"]}
    tensors = [
        FileTensor(
            name,
            model.shape(name),
            GGMLQuantizationType.F32,
            lambda name=name: [model.tensor(name)],  # type: ignore[misc]
        )
        for name in model.types
    ]
    file = folder / "float32.gguf"
    write_tensors(file, model.text("general.architecture") or "", values, tensors, ignore_events)
    return file


def _check_room(folder: Path, num_values: int) -> None:
    free = shutil.disk_usage(folder).free
    if 4 * num_values > 0.9 * free:
        raise NotHere(
            f"The weights need {4 * num_values / GIB:.1f} GiB on the disk of {folder.parent}, and "
            f"{free / GIB:.1f} GiB are free.",
            do="set TMPDIR to a folder with more room, and certify again",
        )
