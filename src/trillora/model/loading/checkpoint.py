"""The tensors of a model's files and the parameters that they are, for writing a changed copy of the model.

    files = Checkpoint(opened, spec)
    files.parameters["language_model.model.norm.weight"]    "model.language_model.norm.weight", the module's name
    files.read("language_model.model.norm.weight")          its values in float32
    files.layers["model.language_model.layers.0.mlp.up_proj"].scale     what the adapter is multiplied by
    files.experts["model.layers.0.mlp.experts.down_proj"]               adapted parameters of experts

Names in the files stay as they are. Tensors that the module does not use, such as a vision tower, are listed too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from trillora.errors import TrilloraError
from trillora.model.adapters import check_shapes, fitting
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.loading.source import OpenModel
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.stored.packed import Stored, opened_tensor
from trillora.model.loading.stored.view import formats, unquantized
from trillora.model.loading.tensor_files import opened as opened_file
from trillora.model.loading.weights import PLAIN_FLOATS, Converted, convert, match_names, read_headers, tied_groups
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.expert_parameters import ExpertParameter, expert_parameters

DTYPES = {  # the names of safetensors, and those that people use
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True)
class AdaptedLayer:
    """A target of LoRA."""

    scale: float
    is_transposed: bool  # the weight is stored as [inputs, outputs]: Conv1D, and an embedding, whose inputs are tokens
    is_embedding: bool


@dataclass(frozen=True)
class ExpertRows:
    """The outputs of one expert that a tensor of the files has."""

    expert: int
    rows: np.ndarray


class Checkpoint:
    """The files of a model, and the layers that an adapter with the options `spec` changes."""

    def __init__(self, base: OpenModel, spec: LoraSpec) -> None:
        # Only a config whose code the user trusts still has an auto_map.
        trusted = hasattr(base.config, "auto_map")
        with fitting(spec.file or base.base_name):
            model = CausalLM(base.config, ModelOptions(scan=False, remat="none", trust_remote_code=trusted), lora=spec)
        self._model, self._module, self.folder = model, model.module, base.folder
        self.positions = base.positions
        self.tensors = unquantized(read_headers(base.folder), read_method(base.folder))
        known, _ = match_names(self.tensors, self._module)
        self.parameters = {source.name: name for name, source in known.items() if isinstance(source, Stored)}
        self._converted = {name: source for name, source in known.items() if isinstance(source, Converted)}
        self._ties = tied_groups(self._module)
        experts = expert_parameters(model.module)
        self.layers = {
            name: _adapted(self._module.get_submodule(name)) for name in model.targets if name not in experts
        }
        self.experts = {name: experts[name] for name in model.targets if name in experts}
        self.expert_parts = {name: self._parts_of(name, parameter) for name, parameter in self.experts.items()}
        names = {id(module): name for name, module in self._module.named_modules()}
        self.embedding = f"{names[id(self._module.get_input_embeddings())]}.weight"
        head = self._module.get_output_embeddings()
        self.head = f"{names[id(head)]}.weight" if head is not None else None

    @property
    def is_tied(self) -> bool:
        """Whether the base's head is its embedding. One that is trained as a whole is not any more."""
        return self.head is not None and self.head in self._ties.get(self.embedding, ())

    @property
    def formats(self) -> tuple[str, ...]:
        """In which its weights are quantized."""
        return formats(self.tensors.values())

    def is_packed(self, name: str) -> bool:
        """Whether this tensor is quantized in the files. It is read dequantized."""
        return self.tensors[name].packed is not None

    def check_fits(self, matrices: dict[str, np.ndarray], where: str) -> None:
        """Refuses an adapter of another model."""
        check_shapes({name: array.shape for name, array in matrices.items()}, self._model.adapter_layout, where)

    def stored_name(self, parameter: str) -> str | None:
        """The name of a parameter in the files; None if they do not have it."""
        return next((name for name, known in self.parameters.items() if known == parameter), None)

    def check_changeable(self, parameter: str) -> None:
        """Refuses to change a weight that is not one tensor of the files."""
        if source := self._converted.get(parameter):
            raise TrilloraError(
                f"{parameter} cannot be changed in the files: it is made from {len(source.parts)} tensors of other "
                f"names, the first of which is {source.parts[0][1].name}.",
                where=str(source.parts[0][1].file),
                do="use the adapter with PEFT or `trillora serve`, without merging it",
            )
        others = {*self._ties.get(parameter, ())} - {self.embedding, self.head}
        if others:
            raise TrilloraError(
                f"{parameter} cannot be changed alone: {min(others)} is the same weight.",
                where=str(self.folder),
                do="use the adapter with PEFT or `trillora serve`, without merging it",
            )

    def _parts_of(self, name: str, parameter: ExpertParameter) -> dict[str, ExpertRows]:
        """The tensors of the files that are rows of a parameter [E, O, I], if it is stored so. A conversion of numbers
        instead of rows shows where each of them goes."""
        source = self._converted.get(name)
        if source is None or parameter.is_transposed or any(len(part.shape) != 2 for _, part in source.parts):
            return {}
        numbers, num_rows = {}, 0
        for _, part in source.parts:
            numbers[part.name] = torch.arange(num_rows, num_rows := num_rows + part.shape[0])[:, None]
        placed = convert(source, self._module, lambda part: numbers[part.name])[name].numpy()
        num_experts, num_outputs = parameter.num_experts, parameter.features[1]
        if placed.shape != (num_experts, num_outputs, 1) or num_rows != placed.size:
            return {}
        places = np.argsort(placed, axis=None)
        parts: dict[str, ExpertRows] = {}
        for tensor, own in numbers.items():
            experts, rows = np.divmod(places[own[:, 0]], num_outputs)
            if len({*experts}) != 1:
                return {}
            parts[tensor] = ExpertRows(int(experts[0]), rows)
        return parts

    def new_name(self, parameter: str, like: str) -> str:
        """The name in the files for a parameter that they do not have. `like` is one that they have."""
        stored = self.stored_name(like) or like
        prefix = stored.removesuffix(like) if stored.endswith(like) else ""
        for name in (prefix + parameter, parameter):
            made = replace(self.tensors[stored], name=name)
            if name not in self.tensors and parameter in match_names({**self.tensors, name: made}, self._module)[0]:
                return name
        raise TrilloraError(
            f"The head of this model needs a weight of its own, and there is no name for it next to {stored}.",
            where=str(self.folder),
            do="train without lm_head and the embedding in lora.targets and lora.modules_to_save",
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor in float32, or some of its rows."""
        tensor = self.tensors[name]
        if tensor.dtype not in PLAIN_FLOATS:
            raise TrilloraError(
                f"{name} is stored as {tensor.dtype}: the checkpoint is quantized.",
                where=str(tensor.file),
                do="give the unquantized (bfloat16 or float32) version of the model with --base",
            )
        with opened_tensor(tensor, torch.float32) as read:
            return read((slice(start, stop),) if tensor.shape else ()).to(torch.float32, copy=True).numpy()

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The same as bytes, as they are in the file."""
        tensor = self.tensors[name]
        with opened_file(tensor.file) as file:
            return _rows(file, tensor, start, stop).contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def _rows(file: Any, tensor: Stored, start: int, stop: int | None) -> torch.Tensor:
    rows: torch.Tensor = file.get_slice(tensor.name)[start:stop] if tensor.shape else file.get_tensor(tensor.name)
    return rows


def _adapted(module: torch.nn.Module) -> AdaptedLayer:
    is_embedding = isinstance(module, torch.nn.Embedding)
    return AdaptedLayer(module.lora_scale, isinstance(module, Conv1D) or is_embedding, is_embedding)
