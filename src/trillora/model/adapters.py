"""Adapters as files in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

`adapter_parameters.py` gives the names in memory and in the file.

Files are verified when they are read: against the checksums that a run writes next to them, against the types and
ranges in `AdapterConfig`, and every value must be finite.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import save
from safetensors.torch import load
from transformers.pytorch_utils import Conv1D

from trillora.errors import TrilloraError
from trillora.files.bounded import read_whole
from trillora.files.checksums import FORMAT, find_damage, find_wrong_size, read_checksums
from trillora.files.read_json import parse_json, read_data
from trillora.files.storage import MARK
from trillora.model.adapter_parameters import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    is_of_lora,
    name_in_file,
    name_in_memory,
)
from trillora.model.layout import Layout
from trillora.model.loading.tensor_files import opened, stored_shapes
from trillora.model.loading.wrapper import removed_modules
from trillora.model.lora import adaptable_layers, chosen_layers
from trillora.model.lora_spec import AdapterDoesNotFit, LayerLora, LoraSpec, bounded_regex
from trillora.model.parts.expert_parameters import INNER
from trillora.model.parts.peft_names import by_parameter, layers_in, metadata_of, names_in_file, with_layers
from trillora.model.parts.whole_weights import Indices, in_config, is_used, other_parts, sorted_rows
from trillora.runs.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

logger = logging.getLogger(__name__)

WEIGHTS_FILE, CONFIG_FILE = ADAPTER_WEIGHTS, ADAPTER_CONFIG
TEMPLATE_FILE = "chat_template.jinja"  # only if the run had its own

# Options that change W + scale * B A to another formula, with the value that means "not used".
_UNSUPPORTED: dict[str, Any] = {
    "use_bdlora": None,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "arrow_config": None,
}

# Prefixes of initializations that also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


Rank = Annotated[int, Field(ge=1, le=1 << 16)]
Alpha = Annotated[float, Field(gt=0, le=1e9)]


class AdapterConfig(BaseModel):
    """The part of PEFT's `adapter_config.json` that LoRA needs, in its ranges. Other keys are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    peft_type: str
    r: Rank
    lora_alpha: Alpha
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Annotated[dict[str, Rank], Field(max_length=4096)] | None = None
    alpha_pattern: Annotated[dict[str, Alpha], Field(max_length=4096)] | None = None
    target_parameters: Annotated[list[str], Field(max_length=4096)] | None = None
    trainable_token_indices: Indices = None
    modules_to_save: Annotated[list[str], Field(max_length=4096)] | None = None
    base_model_name_or_path: str | None = None


def adapter_files(
    adapter: dict[str, np.ndarray], module: torch.nn.Module, targets: list[str], spec: LoraSpec, base_name: str
) -> dict[str, bytes]:
    """PEFT's two files for an adapter given by parameter name (`….q_proj.lora_a`). PEFT loads the base model from
    `base_name`. Equal adapters give equal bytes."""
    usual = spec.in_file(LayerLora(spec.rank, spec.alpha))
    parameters = by_parameter(module, targets)
    layers = {parameters.get(name, name): spec.in_file(layer) for name, layer in chosen_layers(module, spec).items()}
    modules = [name for name in targets if name not in parameters]
    wrapper = (type(module).__name__, type(module).__module__) if removed_modules(module) else ()
    config = {
        "peft_type": "LORA",
        **peft_task(*wrapper),
        "base_model_name_or_path": base_name,
        "r": usual.rank,
        "lora_alpha": _whole(usual.alpha),
        "lora_dropout": 0.0 if parameters else spec.dropout,  # PEFT refuses another value with target_parameters
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "rank_pattern": _peft_pattern({name: layer.rank for name, layer in layers.items()}, usual.rank),
        "alpha_pattern": _peft_pattern({name: _whole(layer.alpha) for name, layer in layers.items()}, usual.alpha),
        "target_modules": _target_names(module, modules, set(adaptable_layers(module, spec))),
        **({"target_parameters": _parameter_names(module, [*parameters.values()])} if parameters else {}),
        "fan_in_fan_out": any(isinstance(module.get_submodule(name), Conv1D) for name in modules),
        "bias": "none",
        "inference_mode": True,
        **in_config(adapter, spec.tokens),
    }
    return peft_files(adapter, config, names_in_file(module, _layers(adapter)))


def _layers(names: Iterable[str]) -> list[str]:
    """The names of what LoRA adapts, without the names of the matrices."""
    return sorted({name.rpartition(".")[0] for name in names if is_of_lora(name)})


def peft_task(wrapper: str = "", library: str = "") -> dict[str, Any]:
    """What PEFT's AutoPeftModel builds. The layers of a multimodal model have the names of its wrapper, which is not
    always the class that AutoModelForCausalLM builds, so its class is given."""
    if not wrapper:
        return {"task_type": "CAUSAL_LM"}
    return {"task_type": None, "auto_mapping": {"base_model_class": wrapper, "parent_library": library}}


def _whole(alpha: float) -> float:
    """As an integer if it is one: Ollama cannot read 32.0."""
    return int(alpha) if float(alpha).is_integer() else alpha


def peft_files(
    adapter: dict[str, np.ndarray], config: Mapping[str, object], names: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """The two files of an adapter given by parameter name, with this content of `CONFIG_FILE`. `names` are those in the
    file of the layers that PEFT finds by another name (`parts/peft_names.py`)."""
    names = {layer: name for layer, name in (names or {}).items() if name}
    stored = {name: _renamed(name, names) for name in adapter}
    tensors = {name_in_file(stored[name]): np.ascontiguousarray(array) for name, array in adapter.items()}
    weights = with_layers(save(tensors, metadata={"format": "pt"}), names)
    return {WEIGHTS_FILE: weights, CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}


def _renamed(name: str, layers: Mapping[str, str]) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layers[layer]}.{kind}" if layer in layers and is_of_lora(name) else name


def read_adapter(weights: bytes, where: str = WEIGHTS_FILE) -> dict[str, np.ndarray]:
    """The matrices in the bytes of `WEIGHTS_FILE`, by parameter name, in float32. All their values are finite."""
    try:
        tensors = load(weights)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TrilloraError(
            f"The adapter's weights cannot be read: {error}.",
            where=where,
            do="copy the file again, or use another checkpoint",
        ) from error
    layers = layers_in(metadata_of(weights), where)
    adapter: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        matrix = tensor.to(torch.float32) if tensor.is_floating_point() else None
        if matrix is None or not torch.isfinite(matrix).all():
            raise TrilloraError(
                f"The adapter's {name} has values that are not "
                + ("finite." if matrix is not None else f"floating-point numbers: {tensor.dtype}."),
                where=where,
                do="copy the file again, or use another checkpoint",
            )
        adapter[_from_peft(name, layers, where)] = matrix.numpy()
    return adapter


def check_changes_something(adapter: dict[str, np.ndarray], where: str) -> None:
    targets = [name.removesuffix(LORA_B.suffix) for name in adapter if name.endswith(LORA_B.suffix)]
    changed = (_changes(adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]) for name in targets)
    of_embedding = (array.any() for name, array in adapter.items() if name.endswith(EMBEDDING_A.suffix))
    if not any(changed) and not any(of_embedding):
        raise TrilloraError(
            "The adapter changes nothing: every B matrix is zero.",
            where=where,
            do="train for at least one step with a learning rate above zero and rows that have supervised tokens",
        )


def _changes(a_RD: np.ndarray, b_ER: np.ndarray) -> bool:
    """False if B is zero, or if PiSSA's two halves still cancel each other."""
    half = len(a_RD) // 2
    cancels = np.array_equal(a_RD[:half], a_RD[half:]) and np.array_equal(b_ER[:, :half], -b_ER[:, half:])
    return bool(b_ER.any()) and not cancels


def check_written(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        if (folder / name).read_bytes() != data:
            raise TrilloraError(
                "The adapter on disk differs from the one that was written.",
                where=str(folder / name),
                do="check the disk, or write the adapter to another disk",
            )


def load_adapter(folder: Path) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """Reads an adapter written by Trillora or PEFT; its matrices are by parameter name."""
    files = _read_verified(folder)
    config = _read_config(files[CONFIG_FILE], folder / CONFIG_FILE)
    where = str(folder / WEIGHTS_FILE)
    adapter = sorted_rows(read_adapter(files[WEIGHTS_FILE], where), config.trainable_token_indices, where)
    spec = spec_of(config, {name: array.shape for name, array in adapter.items()}, where)
    return spec, adapter


@dataclass(frozen=True)
class AdapterHead:
    """What an adapter's files say about its matrices, which are not read."""

    spec: LoraSpec
    shapes: dict[str, tuple[int, ...]]  # by parameter name
    base_name: str | None


def read_head(folder: Path) -> AdapterHead:
    _check_present(folder)
    config = _read_config(_read_part(folder / CONFIG_FILE), folder / CONFIG_FILE)
    where = str(folder / WEIGHTS_FILE)
    stored, layers = stored_shapes([folder / WEIGHTS_FILE]), read_layers(folder)
    shapes = {_from_peft(name, layers, where): shape for name, shape in stored.items()}
    used = {name: shape for name, shape in shapes.items() if is_used(name, shapes)}
    return AdapterHead(spec_of(config, shapes, where), used, config.base_model_name_or_path)


def read_layers(folder: Path) -> dict[str, str]:
    """Name in the file -> layer, where these differ."""
    with opened(folder / WEIGHTS_FILE, "np") as tensors:
        return layers_in(tensors.metadata(), str(folder / WEIGHTS_FILE))


def spec_of(config: AdapterConfig, shapes: dict[str, tuple[int, ...]], where: str) -> LoraSpec:
    """The options of an adapter with these matrices. PEFT has many rules to select targets; the file contains the
    result. So does it for ranks, and they must be possible: where two patterns match, the first one counts, but PEFT
    sorts the patterns when it writes them."""
    others = other_parts(config.trainable_token_indices, config.modules_to_save or [], shapes, where)
    described = str(Path(where).with_name(CONFIG_FILE))
    places = _places(config, shapes, described, where)
    parameters = {*(config.target_parameters or [])}
    compared = {name: f"{name}.weight" if is_end(f"{name}.weight", parameters) else name for name in places}
    ranks = _peft_values(compared, config.rank_pattern or {}, config.r, described)
    alphas = _peft_values(compared, config.alpha_pattern or {}, config.lora_alpha, described)
    found = {}
    for target, module in places.items():
        found[target] = _rank_of(target, module, ranks[target], shapes, config.use_dora, where)
        if len(alphas[target]) > 1:
            logger.warning("%s: two alpha patterns match %s; the first is used, as by PEFT", described, target)
    return LoraSpec(
        config.r,
        config.lora_alpha,
        config.use_rslora,
        config.lora_dropout,
        tuple(places),
        rank_pattern=tuple((name, rank) for name, rank in found.items() if rank != config.r),
        alpha_pattern=tuple((name, alpha) for name, (alpha, *_) in alphas.items() if alpha != config.lora_alpha),
        dora=config.use_dora,
        **others._asdict(),
        file=where,
    )


def _places(config: AdapterConfig, shapes: dict[str, tuple[int, ...]], described: str, where: str) -> dict[str, str]:
    """The targets, and for each the name that its matrices have in the file. These differ for parameters of experts:
    only a model knows which of them has which matrices, but they are as many."""
    names = _layers(shapes)
    ranks = _peft_values({name: name for name in names}, config.rank_pattern or {}, config.r, described)
    parameters = {*(config.target_parameters or [])}
    lasts = sorted({name.rpartition(".")[2] for name in parameters} - {"weight"})
    places: dict[str, str] = {}
    num_left: dict[str, int] = {}  # parameters of a module of experts that have no matrices yet
    for name in names:
        module = name
        while module.endswith(f".{INNER}"):
            module = module.removesuffix(f".{INNER}")
        own = [parameter for last in lasts if is_end(parameter := f"{module}.{last}", parameters)]
        rows, *_ = shapes.get(name + LORA_A.suffix) or (0,)
        if own and rows not in ranks[name]:
            num_left[module] = num_left.get(module, len(own)) - 1
            places |= dict.fromkeys(own, name)
        else:
            places[name] = name
    if unequal := [module for module, count in num_left.items() if count]:
        raise _inconsistent(
            f"The adapter does not have matrices for each of the target_parameters of {unequal[0]}.", where
        )
    return dict(sorted(places.items()))


def is_end(name: str, names: set[str]) -> bool:
    """PEFT's rule for `target_parameters`: the name, or its end in whole parts, is one of these."""
    parts = name.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


def _rank_of(
    target: str, module: str, ranks: list[int], shapes: dict[str, tuple[int, ...]], dora: bool, where: str
) -> int:
    """The rank of a target whose matrices have the name `module`. Experts' matrices have a multiple of it."""
    a = shapes.get(module + LORA_A.suffix) or shapes.get(module + EMBEDDING_A.suffix)
    b = shapes.get(module + LORA_B.suffix) or shapes.get(module + EMBEDDING_B.suffix)
    fits = a is not None and (a[0] in ranks if module == target else a[0] % ranks[0] == 0)
    if a is None or b is None or len(a) != 2 or len(b) != 2 or a[0] != b[1] or not fits:
        raise _inconsistent(
            f"The adapter's {target} does not have matrices of rank {' or '.join(map(str, ranks))}: "
            f"A is {'missing' if a is None else a}, B is {'missing' if b is None else b}.",
            where,
        )
    magnitude = shapes.get(module + MAGNITUDE.suffix)
    if magnitude != ((b[0],) if dora else None):
        raise _inconsistent(
            f"The adapter's {target} has magnitudes of shape {magnitude}, but use_dora is {dora}."
            if magnitude
            else f"The adapter's {target} has no magnitudes, but use_dora is true.",
            where,
        )
    return a[0] if module == target else ranks[0]


def _inconsistent(what: str, where: str) -> TrilloraError:
    return TrilloraError(what, where=where, do=f"use the {CONFIG_FILE} and {WEIGHTS_FILE} of the same adapter")


def _peft_values(
    targets: dict[str, str], patterns: Mapping[str, object], usual: object, where: str
) -> dict[str, list[Any]]:
    """The values of each target by PEFT's rule: from the patterns that match the end of its name, first the one
    that counts. `targets` gives the name that PEFT compares."""
    regexes = [(bounded_regex(key, where), value) for key, value in patterns.items()]

    def values_of(name: str) -> list[Any]:
        parts = name.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]
        return [value for regex, value in regexes if any(map(regex.fullmatch, ends))]

    return {target: list(dict.fromkeys(values_of(name))) or [usual] for target, name in targets.items()}


def _peft_pattern(values: Mapping[str, object], usual: object) -> dict[str, Any]:
    """PEFT's pattern that gives the targets these values: by short names where that is exact, else by full names."""
    different = {name: value for name, value in values.items() if value != usual}
    short = {re.escape(_short_name(name)): value for name, value in different.items()}
    given = _peft_values({name: name for name in values}, short, usual, CONFIG_FILE)
    if given == {name: [value] for name, value in values.items()}:
        return short
    # Longest first: the first match counts, and a full name may be the end of another.
    return {re.escape(name): different[name] for name in sorted(different, key=lambda name: (-len(name), name))}


def _short_name(name: str) -> str:
    """The end of a name that says what it is: `q_proj`, and `gate_proj.weight` for a parameter."""
    return ".".join(name.rsplit(".", 2)[-2 if name.endswith(".weight") else -1 :])


def _read_verified(folder: Path) -> dict[str, bytes]:
    """The bytes of every file that Trillora reads from an adapter's folder, compared with their checksums."""
    _check_present(folder)
    names = {name for name in (CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE, MARK) if (folder / name).is_file()}
    mark = _read_part(folder / MARK) if MARK in names else None
    try:
        if mark is not None:  # a grown tokenizer has files here too
            listed = (read_checksums(mark) or {}).get("files", {})
            names |= {name for name in listed if Path(name).name == name and (folder / name).is_file()}
            _refuse_damage(folder, _find_fault(mark, {name: (folder / name).stat().st_size for name in names}))
        files = {name: _read_part(folder / name) for name in sorted(names)}
    except OSError as error:
        raise TrilloraError(
            f"The adapter cannot be read: {error.strerror}.", where=str(folder), do="check the disk and the permissions"
        ) from error
    if mark is None:
        logger.warning("%s has no %s, so damage to the adapter cannot be noticed", folder, MARK)
    else:
        facts = read_checksums(mark)
        assert facts is not None
        _refuse_damage(folder, find_damage(facts, files))
    return files


def _read_part(file: Path) -> bytes:
    """Only weights and files of a tokenizer may be large. If there are checksums, their sizes were compared before."""
    if file.name in (CONFIG_FILE, TEMPLATE_FILE, MARK):
        return read_data(file, do="restore it from a copy; it should be much smaller")
    return read_whole(file)


def _refuse_damage(folder: Path, damage: tuple[str, str] | None) -> None:
    if damage is None:
        return
    file, fault = damage
    raise TrilloraError(
        f"The adapter is damaged: {file} {fault}.",
        where=str(folder / file),
        do="restore it from a copy; or remove this folder and run the training command again, which writes it from "
        f"the last checkpoint; if you changed the file yourself, remove {MARK}",
    )


def _check_present(folder: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise TrilloraError(
                f"There is no adapter here: {name} is missing.",
                where=str(folder),
                do="use the folder that contains adapter_config.json and adapter_model.safetensors",
            )


def _find_fault(mark: bytes, sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """The first file that is damaged by its name or size; None if there is none."""
    facts = read_checksums(mark)
    if facts is None:
        return MARK, "differs from its own digest"
    if facts.get("format") != FORMAT:
        return MARK, f"has format {facts.get('format')} instead of {FORMAT}"
    extra = sorted(sizes.keys() - facts["files"].keys() - {MARK})
    return (extra[0], "has no checksum") if extra else find_wrong_size(facts, sizes)


def _read_config(data: bytes, path: Path) -> AdapterConfig:
    do = "copy the file again, or rewrite it with the peft_type, r and lora_alpha of the training run"
    config = parse_json(data, AdapterConfig, where=str(path), do=do)
    if config.peft_type != "LORA":
        raise _unsupported(path, "peft_type", config.peft_type)
    options = config.model_extra or {}
    for key, unused in _UNSUPPORTED.items():
        if options.get(key, unused) not in (unused, None, []):
            raise _unsupported(path, key, options[key])
    if str(options.get("init_lora_weights")).startswith(_CHANGES_BASE):
        raise _unsupported(path, "init_lora_weights", options["init_lora_weights"])
    return config


@contextlib.contextmanager
def fitting(where: str) -> Iterator[None]:
    """For building a model with the targets of a loaded adapter: one that the model does not have is not an error in
    the user's recipe, but an adapter of another model."""
    try:
        yield
    except TrilloraError as error:
        if not (error.where or "").startswith("lora."):
            raise
        raise AdapterDoesNotFit(
            f"The adapter does not fit this model: {error.what}",
            where=where,
            do="use the base model that the adapter was trained with (see its adapter_config.json)",
        ) from error


def fit_adapter(adapter: dict[str, np.ndarray], layout: Layout, where: str) -> dict[str, np.ndarray]:
    """Stacks a loaded adapter by a model's layout. An adapter that does not fit raises an error with the matrix."""
    check_shapes({name: array.shape for name, array in adapter.items()}, layout, where)
    return {
        key: np.stack([adapter[name] for name in leaf.names]) if leaf.stacked else adapter[leaf.names[0]]
        for key, leaf in layout.items()
    }


def check_shapes(shapes: dict[str, tuple[int, ...]], layout: Layout, where: str) -> None:
    expected = {name: leaf.part_shape for leaf in layout.values() for name in leaf.names}
    for name in sorted(expected.keys() | shapes.keys()):
        found, needed = shapes.get(name), expected.get(name)
        if found != needed:
            raise AdapterDoesNotFit(
                f"The adapter does not fit this model: {name} is {found or 'missing'}, the model needs "
                f"{needed or 'no such matrix'}.",
                where=where,
                do="use the base model and the targets that the adapter was trained with (see its adapter_config.json)",
            )


def _target_names(module: torch.nn.Module, targets: list[str], adaptable: set[str]) -> list[str]:
    """Short names if PEFT's rule (the name, or a path ending in .name) selects exactly the targets, else full names."""
    short = sorted({name.rsplit(".", 1)[-1] for name in targets})
    names = {name for name, _ in module.named_modules()} | removed_modules(module)
    selected = {name for name in names if name.rsplit(".", 1)[-1] in short}
    return short if selected == set(targets) and selected <= adaptable else sorted(targets)


def _parameter_names(module: torch.nn.Module, parameters: list[str]) -> list[str]:
    """Short names if PEFT's rule (a path ending in .name) selects exactly these parameters, else full names."""
    short = sorted({".".join(name.rsplit(".", 2)[-2:]) for name in parameters})
    ends = tuple(f".{name}" for name in short)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [f"{name}.weight" for name in removed_modules(module)]
    selected = {name for name in names if name.endswith(ends)}
    return short if selected == set(parameters) else sorted(parameters)


def _from_peft(name: str, layers: Mapping[str, str], where: str) -> str:
    if (ours := name_in_memory(name)) is not None:
        if ours.rpartition(".")[0] in layers.values():  # it would take the place of a matrix that has another name
            raise _inconsistent(f"The adapter's file has matrices of {ours.rpartition('.')[0]} twice.", where)
        return _renamed(ours, layers)
    raise TrilloraError(
        f"The adapter contains {name}, which is not a LoRA matrix of a linear layer.",
        where=where,
        do="use an adapter that has only LoRA matrices of linear layers",
    )


def _unsupported(path: Path, key: str, value: object) -> TrilloraError:
    return TrilloraError(
        f"This adapter uses {key}: {value}, which is not plain LoRA.",
        where=str(path),
        do="use a plain LoRA adapter, or merge this one into its base model with PEFT first",
    )
