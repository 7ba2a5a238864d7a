"""Digests of everything a run depends on: model, tokenizer, chat template, data and recipe.

A run resumes only if they are unchanged. Options that do not influence the numbers may change: the hardware, memory
use, evaluation, and how often it saves. Files may move, because only their content counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.files.digests import json_digest
from trillora.recipe.schema import Recipe
from trillora.secrets import mask_values

# Options that may change when a run is resumed; a dotted name includes everything below it.
FREE = (
    *("hardware", "evaluate", "track"),
    *("engine.remat", "engine.attention", "engine.loss_chunk", "engine.kernels"),
    *("train.micro_batch_size", "train.max_bad_steps", "train.checkpoint_every", "train.keep_checkpoints"),
    *("train.checkpoint_dir", "train.time_limit", "train.adapters_at_once", "stages.micro_batch_size"),
    # Compared by content.
    *("model.name", "model.revision", "data.path", "data.validation"),
    *(f"{part}.data.{option}" for part in ("stages", "phases") for option in ("path", "validation")),
    "lora.from",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_free(path: str) -> bool:
    """Whether the option may change when a run is resumed."""
    general = re.sub(r"\.\d+\b", "", path)
    return any(general == name or general.startswith(f"{name}.") for name in FREE)


def fixed_options(recipe: Recipe) -> dict[str, Any]:
    """The options that must not change when a run is resumed, by dotted path. A text with a secret is masked, and its
    digest added."""
    flat: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if is_free(path):
            return
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                visit(f"{path}.{key}" if path else key, inner)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for number, inner in enumerate(value):
                visit(f"{path}.{number}", inner)
        else:
            value = _names_only(value) if path.split(".")[-1] == "loss" else value
            masked = mask_values(value)
            flat[path] = value if masked == value else f"{masked} (sha256 {json_digest(value)[:16]})"

    visit("", recipe.model_dump(mode="json"))
    return flat


def _names_only(loss: Any) -> Any:
    """A loss that is a file is compared by content, too: the file may move."""
    return [_names_only(each) for each in loss] if isinstance(loss, list) else os.path.basename(loss or "") or None


def with_defaults(options: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a checkpoint. Its version may not have had all of today's: then it did what the default does."""
    defaults = fixed_options(Recipe.model_validate({"model": "-", "data": "-"}))
    return {**{path: defaults[path] for path in now.keys() & defaults.keys()}, **options}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One phrase per change: options with both values, digests by name."""
    changed = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        is_digest = isinstance(old or new, str) and _SHA256.fullmatch(str(old or new))
        changed.append(f"{key} has changed" if is_digest else f"{key} was {_shown(old)} and is {_shown(new)}")
    return changed


def refuse(changed: list[str], run: Path, step: int) -> TrilloraError:
    more = f"; and {len(changed) - 6} more" if len(changed) > 6 else ""
    return TrilloraError(
        f"The inputs of this run have changed: {'; '.join(changed[:6])}{more}.",
        where=f"{run}, step {step}",
        do="restore the original inputs, use a new --out, or pass --accept-changes",
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
