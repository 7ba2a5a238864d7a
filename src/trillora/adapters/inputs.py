"""The adapters of a merge: where they are, what they change, and whether their sum is defined.

A sum of changes means something only for changes of the same weights. So the adapters must name the same base model,
and each must be nothing but changes B A of linear layers: DoRA rescales the result, saved modules and trained tokens
replace weights, and PiSSA counts its change from other weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.adapters.logits_check import open_local
from trillora.adapters.methods import LayerChange
from trillora.errors import TrilloraError
from trillora.files.bounded import read_bounded
from trillora.files.digests import json_digest
from trillora.files.read_json import read_json
from trillora.model.adapters import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE, is_end, load_adapter, read_layers
from trillora.model.bridge import build_module
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.embedded import SMOLLM2_HUB_ID
from trillora.model.loading.rope import ScaledPositions, read_positions
from trillora.model.loading.source import weight_files
from trillora.model.lora import LoraSpec
from trillora.model.parts.peft_names import by_parameter, names_in_file
from trillora.recipe.lora import RopeSection
from trillora.recipe.schema import EMBEDDED
from trillora.runs.files import ROPE_FILE
from trillora.runs.saved import find_adapter

TOKEN_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
TOKENIZER_FILES = (*TOKEN_FILES, "tokenizer_config.json", "special_tokens_map.json")
MAX_BYTES = 64 << 20  # of a tokenizer's file; the largest known has 35 MB

# Options of PEFT's config whose adapters are more than a sum of changes, and why; the value that means "not used".
NO_SUM: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA rescales each layer's weight after the change is added"),
    "modules_to_save": (None, "it replaces whole modules"),
    "trainable_token_indices": (None, "it replaces rows of the embedding"),
    "bias": ("none", "it replaces biases"),
    "lora_bias": (False, "it also adds a bias"),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that also change the base's weights
SELECTION = ("exclude_modules", "layers_to_transform", "layers_pattern")  # of layers, in addition to target_modules


@dataclass(frozen=True)
class AdapterInput:
    """One adapter of a merge."""

    name: str  # as the user wrote it
    folder: Path
    rank: int
    changes: dict[str, LayerChange]  # by layer
    digest: str  # of the changes: equal for copies of an adapter
    base: str | None  # the base model's name in PEFT's config
    base_digest: str | None  # of the base's weights, known for an adapter of a run
    config: dict[str, Any]
    parameters: set[str]  # layers that it lists in `target_parameters`
    names: dict[str, str]  # layer -> name in the file, where these differ
    template: bytes | None
    positions: ScaledPositions | None

    @property
    def rope(self) -> RopeSection | None:
        return None if self.positions is None else self.positions.rope

    tokenizer: dict[str, bytes]


def read_input(name: str | Path) -> AdapterInput:
    """Reads and checks one adapter. Its files may be hostile: `load_adapter` checks them."""
    found = find_adapter(name)
    folder, manifest = found.folder, found.run.manifest if found.run is not None else None
    file = folder / CONFIG_FILE
    config = read_json(file, dict[str, Any], do="copy the file again, or use another adapter")
    _check_is_sum(config, file)
    spec, matrices = load_adapter(folder)
    changes = _changes(spec, matrices, folder / WEIGHTS_FILE)
    base = config.get("base_model_name_or_path")
    return AdapterInput(
        name=str(name),
        folder=folder,
        rank=max((change.rank for change in changes.values()), default=0),
        changes=changes,
        digest=_digest(changes),
        base=base if isinstance(base, str) and base else None,
        base_digest=manifest.identity.get("model") if manifest is not None else None,
        config=config,
        parameters=_parameters(config, changes),
        names={layer: name for name, layer in read_layers(folder).items()},
        template=_read(folder / TEMPLATE_FILE),
        positions=read_positions(folder),
        tokenizer={name: data for name in TOKENIZER_FILES if (data := _read(folder / name)) is not None},
    )


def _changes(spec: LoraSpec, matrices: dict[str, np.ndarray], file: Path) -> dict[str, LayerChange]:
    for name in matrices:
        if not name.endswith((".lora_a", ".lora_b")):
            raise TrilloraError(
                f"This adapter cannot be merged with others: its {name} is not the change of a linear layer.",
                where=str(file),
                do="use an adapter that has only LoRA matrices of linear layers",
            )
    if experts := sorted({*spec.targets} - {name.rpartition(".")[0] for name in matrices}):
        raise TrilloraError(
            f"This adapter cannot be merged with others: {experts[0]} is a parameter of experts.",
            where=str(file),
            do="use adapters that have only LoRA matrices of linear layers",
        )
    alphas = dict(spec.alpha_pattern)  # by layer
    changes = {}
    for layer in sorted({name.rpartition(".")[0] for name in matrices}):
        a, b = matrices[f"{layer}.lora_a"], matrices[f"{layer}.lora_b"]
        rank = math.sqrt(a.shape[0]) if spec.rslora else a.shape[0]
        changes[layer] = LayerChange(a, b, alphas.get(layer, spec.alpha) / rank)
    return changes


def _parameters(config: dict[str, Any], layers: Iterable[str]) -> set[str]:
    listed = {*(config.get("target_parameters") or [])}
    return {layer for layer in layers if is_end(f"{layer}.weight", listed)}


def check_compatible(inputs: Sequence[AdapterInput]) -> None:
    """Refuses adapters whose sum is not defined, and merges that a mistake has caused."""
    seen: dict[str, AdapterInput] = {}
    for each in inputs:
        if (twin := seen.setdefault(each.digest, each)) is not each:
            raise TrilloraError(
                "The same adapter is given twice.",
                where=f"{twin.name} and {each.name}",
                do="name it once, with a larger weight if that was meant",
            )
    first = inputs[0]
    for other in inputs[1:]:
        if not _same_base(first, other):
            raise TrilloraError(
                f"The adapters have different base models: {first.base} and {other.base}"
                + (", with the same name but other weights." if first.base == other.base else "."),
                where=f"{first.name} and {other.name}",
                do="merge adapters of the same base model",
            )
        if first.rope != other.rope:
            ropes = [str(each.rope or "not scaled") for each in (first, other)]
            raise TrilloraError(
                f"The adapters were trained with different rotary positions: {ropes[0]} and {ropes[1]}.",
                where=f"{first.name} and {other.name}, {ROPE_FILE}",
                do="merge adapters that were trained with the same model.rope",
            )
    for one, other in itertools.combinations(inputs, 2):
        _check_shapes(one, other)
        names = [name for name in TOKEN_FILES if one.tokenizer.get(name) != other.tokenizer.get(name)]
        if names and one.tokenizer and other.tokenizer:
            raise TrilloraError(
                f"The adapters have different tokenizers: {names[0]} differs.",
                where=f"{one.name} and {other.name}",
                do="merge adapters that were trained with the same tokenizer",
            )
        _check_special_tokens(one, other)


def _check_special_tokens(one: AdapterInput, other: AdapterInput) -> None:
    """Refuses adapters with different stop or padding tokens. Trainers that take the stop token for padding do not
    train it, so an adapter may have learned to stop at another token than the next one, or not at all."""
    for name, shown in (("eos_token", "stop"), ("pad_token", "padding")):
        tokens = [_special_token(each, name) for each in (one, other)]
        if None not in tokens and tokens[0] != tokens[1]:
            raise TrilloraError(
                f"The adapters were trained with different {shown} tokens: {tokens[0]!r} and {tokens[1]!r}.",
                where=f"{one.name} and {other.name}, tokenizer_config.json",
                do=f"train them with the same {name}; if only the files differ, copy tokenizer_config.json from one",
            )


def _special_token(adapter: AdapterInput, name: str) -> str | None:
    """The text of a special token, if the adapter's files name it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = json.loads(adapter.tokenizer.get(file, b"{}"))
        except (ValueError, RecursionError):
            continue  # the file is only copied; what it says is not known
        token = content.get(name) if isinstance(content, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _check_is_sum(config: Mapping[str, object], file: Path) -> None:
    reasons = [
        (key, why) for key, (unused, why) in NO_SUM.items() if config.get(key, unused) not in (unused, None, [], {})
    ]
    if str(config.get("init_lora_weights")).startswith(CHANGES_BASE):
        reasons.append(("init_lora_weights", "its change counts from other weights than the base model's"))
    for key, why in reasons:
        raise TrilloraError(
            f"This adapter cannot be merged with others: it uses {key}, and {why}.",
            where=str(file),
            do="use a LoRA adapter without it; a merge adds changes of weights, and this is not only a change",
        )


def _check_shapes(one: AdapterInput, other: AdapterInput) -> None:
    for layer in one.changes.keys() & other.changes.keys():
        if one.changes[layer].shape != other.changes[layer].shape:
            shapes = [" x ".join(map(str, each.changes[layer].shape)) for each in (one, other)]
            raise TrilloraError(
                f"The adapters have different base models: {layer} is {shapes[0]} in one and {shapes[1]} in the other.",
                where=f"{one.name} and {other.name}",
                do="merge adapters of the same base model",
            )


def _same_base(one: AdapterInput, other: AdapterInput) -> bool:
    """By the digests of the weights, where both are known; else by name. Two folders may hold the same model. Without
    a name, the shapes decide."""
    if one.base_digest and other.base_digest:
        return one.base_digest == other.base_digest
    if one.base is None or other.base is None or _normal(one.base) == _normal(other.base):
        return True
    folders = [Path(os.path.expanduser(each)) for each in (one.base, other.base)]
    if not all(os.path.isfile(folder / "config.json") for folder in folders):
        return False
    first, second = (weights_digest(folder, weight_files(folder)) for folder in folders)
    return first == second


def _normal(base: str) -> str:
    """Equal for different spellings of a base model's name. Hub ids do not depend on case."""
    name = SMOLLM2_HUB_ID if base == EMBEDDED else base
    folder = os.path.expanduser(name)
    return os.path.realpath(folder) if os.path.isdir(folder) else name.rstrip("/").lower()


def _digest(changes: dict[str, LayerChange]) -> str:
    digest = hashlib.sha256()
    for layer, change in changes.items():
        facts = [layer, change.scale, change.a_RD.shape, change.b_ER.shape]
        digest.update(json_digest(facts).encode() + change.a_RD.tobytes() + change.b_ER.tobytes())
    return digest.hexdigest()


def _read(file: Path) -> bytes | None:
    try:
        return read_bounded(file, MAX_BYTES) if file.is_file() else None
    except ValueError as error:
        raise TrilloraError(f"This file cannot be used: {error}.", where=str(file), do="remove it") from error


def selection(inputs: Sequence[AdapterInput], layers: Sequence[str], parameters: Collection[str]) -> dict[str, Any]:
    """PEFT's selection of these layers: from an adapter that has the same ones, else their names. `parameters` are
    the layers that PEFT reads only if they are listed in `target_parameters`."""
    for each in inputs:
        targets, config = each.config.get("target_modules"), each.config
        if each.changes.keys() != {*layers} or each.parameters != {*parameters} or any(map(config.get, SELECTION)):
            continue
        if isinstance(targets, str) or (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
            own = {"target_parameters": config["target_parameters"]} if parameters else {}
            return {"target_modules": targets, **own}
    listed = {"target_parameters": [f"{layer}.weight" for layer in layers if layer in parameters]} if parameters else {}
    return {"target_modules": [layer for layer in layers if layer not in parameters], **listed}


def names_for_peft(
    inputs: Sequence[AdapterInput], layers: Sequence[str], base: str | None
) -> tuple[set[str], dict[str, str]]:
    """The layers that PEFT reads only if they are listed in `target_parameters`, and the names in the file of those it
    finds by another name (`model/parts/peft_names.py`). The base model decides; the adapters, if it is not here."""
    if (module := _module(base)) is not None:
        return {*by_parameter(module, layers)}, names_in_file(module, layers)
    taken = {layer.rpartition(".")[2] for each in inputs for layer in each.parameters}
    names = {layer: name for each in inputs for layer, name in each.names.items() if layer in layers}
    return {layer for layer in layers if layer.rpartition(".")[2] in taken}, names


def _module(base: str | None) -> Any | None:
    """The base model without weights, if it is on this machine and can be used."""
    try:
        opened = open_local(base) if base is not None else None
        return None if opened is None else build_module(opened.config, "float32")
    except TrilloraError:
        return None
