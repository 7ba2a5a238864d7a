"""Adapters as files in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

Names in memory and in the file; the shapes are the same:

    model.layers.0.mlp.up_proj.lora_a  <->  base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    model.layers.0.mlp.up_proj.lora_b  <->  base_model.model.model.layers.0.mlp.up_proj.lora_B.weight

Written files are read back and compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.numpy import load, load_file, save
from transformers.pytorch_utils import Conv1D

from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.model.layout import Layout
from trillora.model.lora import LoraSpec, linear_layers

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_SUFFIXES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

# Options that change W + scale * B A to another formula, with the value that means "not used".
_UNSUPPORTED: dict[str, Any] = {
    "use_dora": False,
    "use_bdlora": None,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "arrow_config": None,
}

# Prefixes of initialisations that also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_files(
    adapter: dict[str, np.ndarray], module: Any, targets: list[str], spec: LoraSpec, base_name: str
) -> dict[str, bytes]:
    """PEFT's two files for an adapter given by parameter name (`….q_proj.lora_a`). PEFT loads the base model from
    `base_name`. Equal adapters give equal bytes."""
    tensors = {_to_peft(name): np.ascontiguousarray(array) for name, array in adapter.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": _target_names(module, targets),
        "fan_in_fan_out": any(isinstance(module.get_submodule(name), Conv1D) for name in targets),
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2) + "\n"
    return {WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}), CONFIG_FILE: text.encode()}


def read_adapter(weights: bytes) -> dict[str, np.ndarray]:
    """The matrices in the bytes of `WEIGHTS_FILE`, by parameter name."""
    return {_from_peft(name, Path(WEIGHTS_FILE)): array for name, array in load(weights).items()}


def check_changes_something(adapter: dict[str, np.ndarray], where: str) -> None:
    if not any(array.any() for name, array in adapter.items() if name.endswith(".lora_b")):
        raise TrilloraError(
            "The adapter changes nothing: every B matrix is zero.",
            where=where,
            do="train for at least one step with a learning rate above zero and rows that have supervised tokens",
        )


def save_adapter(
    folder: Path, adapter: dict[str, np.ndarray], module: Any, targets: list[str], spec: LoraSpec, base_name: str
) -> None:
    """Writes an adapter, then reads the files back and compares them."""
    check_changes_something(adapter, str(folder))
    files = adapter_files(adapter, module, targets, spec, base_name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_file(folder / name, data)
    check_written(folder, files)


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
    config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    for path in (config_path, weights_path):
        if not path.is_file():
            raise TrilloraError(
                f"There is no adapter here: {path.name} is missing.",
                where=str(folder),
                do="use the folder that contains adapter_config.json and adapter_model.safetensors",
            )
    config = _read_config(config_path)
    if config.get("peft_type") != "LORA":
        raise _unsupported(config_path, "peft_type", config.get("peft_type"))
    for key, unused in _UNSUPPORTED.items():
        if config.get(key, unused) not in (unused, None):
            raise _unsupported(config_path, key, config[key])
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        raise _unsupported(config_path, "init_lora_weights", config["init_lora_weights"])
    try:
        tensors = load_file(weights_path)
    except (safetensors.SafetensorError, OSError) as error:
        raise TrilloraError(
            f"The adapter's weights cannot be read: {error}.",
            where=str(weights_path),
            do="copy the file again, or use another checkpoint",
        ) from error
    adapter = {_from_peft(name, weights_path): array.astype(np.float32) for name, array in tensors.items()}
    spec = LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        rslora=config.get("use_rslora", False),
        dropout=config.get("lora_dropout", 0.0),
        # PEFT has many rules to select targets. The file contains the result.
        targets=tuple(sorted({name.rsplit(".", 1)[0] for name in adapter})),
    )
    return spec, adapter


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise TrilloraError(
            f"The adapter's configuration cannot be read: {type(error).__name__}: {error}.",
            where=str(path),
            do="copy the file again, or rewrite it with the peft_type, r and lora_alpha of the training run",
        ) from error
    return config


def fit_adapter(adapter: dict[str, np.ndarray], layout: Layout, where: str) -> dict[str, np.ndarray]:
    """Stacks a loaded adapter by a model's layout. An adapter that does not fit raises an error with the matrix."""
    expected = {name: leaf.part_shape for leaf in layout.values() for name in leaf.names}
    for name in sorted(expected.keys() | adapter.keys()):
        found, needed = adapter[name].shape if name in adapter else None, expected.get(name)
        if found != needed:
            raise TrilloraError(
                f"The adapter does not fit this model: {name} is {found or 'missing'}, the model needs "
                f"{needed or 'no such matrix'}.",
                where=where,
                do="use the base model and the targets that the adapter was trained with (see its adapter_config.json)",
            )
    return {
        key: np.stack([adapter[name] for name in leaf.names]) if leaf.stacked else adapter[leaf.names[0]]
        for key, leaf in layout.items()
    }


def _target_names(module: torch.nn.Module, targets: list[str]) -> list[str]:
    """Short names if PEFT's rule (the name, or a path ending in .name) selects exactly the targets, else full names."""
    short = sorted({name.rsplit(".", 1)[-1] for name in targets})
    selected = {name for name, _ in module.named_modules() if name.rsplit(".", 1)[-1] in short}
    return short if selected == set(targets) and selected <= set(linear_layers(module)) else sorted(targets)


def _to_peft(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    return f"{_PREFIX}{stem}{_SUFFIXES['.' + suffix]}"


def _from_peft(name: str, path: Path) -> str:
    for ours, theirs in _SUFFIXES.items():
        if name.startswith(_PREFIX) and name.endswith(theirs):
            return name.removeprefix(_PREFIX).removesuffix(theirs) + ours
    raise TrilloraError(
        f"The adapter contains {name}, which is not a LoRA matrix of a linear layer.",
        where=str(path),
        do="use an adapter that has only LoRA matrices of linear layers",
    )


def _unsupported(path: Path, key: str, value: Any) -> TrilloraError:
    return TrilloraError(
        f"This adapter uses {key}: {value}, which is not plain LoRA.",
        where=str(path),
        do="use a plain LoRA adapter, or merge this one into its base model with PEFT first",
    )
