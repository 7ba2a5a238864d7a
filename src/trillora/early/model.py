"""Whether the base model can be found, and whether it has the layers that LoRA targets name, by its files alone.

The names of the layers come from the headers of the weight files. The model is not built, so only plain names such as
`q_prj` are judged here. MoE models are left out: their weights have other names in memory. Names of embeddings and of
heads are left out too: a tied head is not stored, and some are stored under another name. The trainer checks all of
them again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trillora.files.cache_dir import cache_root
from trillora.model.loading.description import read_config, read_index
from trillora.model.loading.embedded import find_gguf
from trillora.model.loading.source import SINGLE_FILE, find_model
from trillora.model.loading.tensor_files import stored_shapes
from trillora.model.lora_spec import ALL_LINEAR, EXPERTS, matches_nothing, matching
from trillora.recipe.lora import LoraSection
from trillora.recipe.schema import EMBEDDED, ModelSection

_PLAIN = re.compile(r"[A-Za-z_]\w*")  # a target that is the last part of a name
_OF_TOKENS = re.compile(r"embed|\bwte\b|head$")
_NO_LINEAR = re.compile(r"embed|norm|\bwte\b|\bwpe\b")


def check_model(model: ModelSection) -> Path | None:
    """The folder of the model's files, without the weights of one that is on the hub. None for the embedded model."""
    if model.name == EMBEDDED:
        find_gguf()
        return None
    is_local = Path(model.name).expanduser().is_dir()
    return find_model(
        model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, with_weights=is_local
    )


def check_targets(lora: LoraSection, folder: Path | None) -> None:
    """Refuses a target that no weight of the model is named after. `folder`: None for the embedded model."""
    if lora.targets == ALL_LINEAR or lora.from_ is not None:
        return
    folder = folder or _embedded()
    if folder is None or _has_experts(config := read_config(folder)):
        return
    linear = linear_names(folder)
    for number, target in enumerate(lora.targets if linear else ()):
        is_judged = _PLAIN.fullmatch(target) and target not in (ALL_LINEAR, EXPERTS) and not _OF_TOKENS.search(target)
        if is_judged and not matching(target, linear, ""):
            name = (config.get("architectures") or [config.get("model_type") or "the model"])[0]
            raise matches_nothing(f"LoRA target {target!r}", name, target, linear, f"lora.targets[{number}]")


def linear_names(folder: Path) -> list[str]:
    """Names of what may be linear layers, as the weights are stored. Empty if the weights are not on this machine."""
    names = [name.rpartition(".")[0] for name, shape in stored_shapes(_weight_files(folder)).items() if shape]
    return sorted({name for name in names if name and not _NO_LINEAR.search(name.rpartition(".")[2])})


def _weight_files(folder: Path) -> list[Path]:
    named = read_index(folder) or [SINGLE_FILE]
    return [folder / name for name in named if (folder / name).is_file()]


def _has_experts(config: dict[str, Any]) -> bool:
    inner = [value for value in config.values() if isinstance(value, dict)]
    return any("expert" in key for key in config) or any(map(_has_experts, inner))


def _embedded() -> Path | None:
    """The folder of the embedded model, if it was converted before."""
    found = sorted(cache_root().glob("smollm2-*-format*/config.json"))
    return found[-1].parent if found else None
