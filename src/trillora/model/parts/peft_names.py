"""What PEFT does to names when it loads an adapter, and what a file must contain so that no matrix is lost.

From version 0.19 on, PEFT treats an adapter like an old checkpoint of the model: it converts it with the rules by which
transformers converts checkpoints. Matrices whose new names belong to no layer are left out, without an error.

Experts. Where checkpoints store experts one by one, as `….experts.0.gate_proj.weight`, PEFT reads `gate_proj` in
`target_modules` as the experts' projection, and leaves out the linear layers that have this name, such as in a
shared expert. It takes `….gate_proj.weight` in `target_parameters` as it is (`by_parameter`).

Renamed layers. A rule for the names of a checkpoint may also match the names of the module. Then the file has a name
which the rules turn into the right one (`names_in_file`), and the metadata of the file say which layer is meant:

    layer, in memory and in the config     model.layers.1.mlp.shared_experts.up_proj
    in the file, as in laguna checkpoints  model.layers.1.mlp.shared_expert.up_proj
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from trillora.errors import TrilloraError
from trillora.files.read_json import parse_json
from trillora.model.parts.expert_parameters import expert_parameters

if TYPE_CHECKING:
    import torch

METADATA = "layers"  # key in the metadata of the file: a JSON object, name in the file -> layer
_MATRIX = ".lora_A.default.weight"  # PEFT adds the adapter's name before it applies the rules


def by_parameter(module: torch.nn.Module, targets: Iterable[str]) -> dict[str, str]:
    """The targets that the file lists in `target_parameters`, with the names of their parameters there: the experts,
    and linear layers that have the name of an expert's projection."""
    taken = {name for pattern in _converted_tensors(module) if "experts" in pattern for name in _words(pattern)[-1:]}
    taken |= {"gate"} if taken else set()  # PEFT renames the router too
    experts = expert_parameters(module)
    return {
        name: name if name in experts else f"{name}.weight"
        for name in targets
        if name in experts or name.rpartition(".")[2] in taken
    }


def _converted_tensors(module: torch.nn.Module) -> list[str]:
    """The tensors that transformers combines when it loads a checkpoint of this model, as patterns such as
    `mlp.experts.*.gate_proj.weight`."""
    converters = [rule for rule in get_model_conversion_mapping(module) if isinstance(rule, WeightConverter)]
    return [pattern for converter in converters for pattern in converter.source_patterns]


def _words(pattern: str) -> list[str]:
    return [word for word in re.findall(r"\w+", pattern) if word != "weight"]


def names_in_file(module: torch.nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The names in the file of the layers that PEFT would not find by their own. A layer that it would not find by any
    name is given an empty one."""
    rules = _renamings(module)
    backwards = [rule.reverse_transform() for rule in reversed(rules)]
    names = {}
    for layer in layers:
        if not _is_found(layer, layer, rules):
            name = _renamed(layer + _MATRIX, backwards).removesuffix(_MATRIX)
            names[layer] = name if _is_found(name, layer, rules) else ""
    return names


def _renamings(module: torch.nn.Module) -> list[Any]:
    """The rules by which transformers renames the tensors of a checkpoint. PEFT uses them if the model has some."""
    if get_checkpoint_conversion_mapping(getattr(module.config, "model_type", "")) is None:
        return []
    return [rule for rule in get_model_conversion_mapping(module) if isinstance(rule, WeightRenaming)]


def _renamed(name: str, rules: list[Any]) -> str:
    for rule in rules:
        name, _ = rule.rename_source_key(name)
    return name


def _is_found(name: str, layer: str, rules: list[Any]) -> bool:
    """Whether PEFT finds the layer by this name. It takes back what only removed the start of a name."""
    converted = _renamed(name + _MATRIX, rules)
    found = name + _MATRIX if (name + _MATRIX).endswith(converted) else converted
    return found == layer + _MATRIX


def with_layers(data: bytes, names: Mapping[str, str]) -> bytes:
    """A safetensors file with the layers of renamed matrices in its metadata. `names` comes from `names_in_file`. The
    header is written here because safetensors writes metadata in random order."""
    if not names:
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    layers = json.dumps({name: layer for layer, name in sorted(names.items())})
    header = {"__metadata__": {**header.pop("__metadata__", {}), METADATA: layers}, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file that was read already, so its header is valid."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(header.get("__metadata__") or {})


def layers_in(metadata: Mapping[str, str] | None, where: str) -> dict[str, str]:
    """Name in the file -> layer, for the matrices whose names differ."""
    do = "copy the file again, or use another adapter"
    layers = parse_json((metadata or {}).get(METADATA, "{}").encode(), dict[str, str], where=where, do=do)
    if len(layers) != len({*layers.values()}):
        raise TrilloraError(f"The file's metadata name a layer twice in {METADATA!r}.", where=where, do=do)
    return layers
