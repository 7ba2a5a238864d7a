"""What a run is made from: `run.json` for people and the report, and the facts that every checkpoint stores."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from trillora.model.layout import stored_weights
from trillora.model.loading.digest import settings_digests
from trillora.model.loading.source import EMBEDDED, OpenModel
from trillora.recipe.resolve import ResolvedRecipe
from trillora.recipe.schema import Recipe
from trillora.secrets import mask_values
from trillora.step.build import Assembly
from trillora.training.entries.timeline import Entry
from trillora.training.run_identity import fixed_options
from trillora.version import __version__

LIBRARIES = ("jax", "torch", "transformers", "torchax")


def libraries() -> dict[str, str]:
    return {name: metadata.version(name) for name in LIBRARIES}


def describe_devices(devices: Sequence[Any]) -> str:
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def of_run(
    recipe: Recipe,
    entries: Sequence[Entry],
    assembly: Assembly,
    identity: dict[str, str],
    opened: OpenModel,
) -> dict[str, Any]:
    """The content of `run.json`. `base_name` is what `from_pretrained` loads the base model from."""
    model, mesh = assembly.model, assembly.mesh
    firsts = [1 + sum(entry.num_steps for entry in entries[:number]) for number in range(len(entries))]
    stages = [(one, first) for entry, first in zip(entries, firsts, strict=True) for one in entry.members]
    return mask_values(
        {
            "format": 1,
            "trillora": __version__,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": {
                "name": recipe.model.name,
                "base_name": opened.base_name,
                # The embedded model's are written by the installed libraries, and differ between versions.
                "settings": None if recipe.model.name == EMBEDDED else settings_digests(opened.folder),
                "num_parameters": sum(math.prod(leaf.shape) for leaf, _ in stored_weights(model.layout).values()),
                "num_trained": sum(math.prod(leaf.shape) for leaf in model.adapter_layout.values()),
                "arithmetic": model.arithmetic,
            },
            "environment": {
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                **libraries(),
                "backend": mesh.devices.flat[0].platform,
                "device": mesh.devices.flat[0].device_kind,
                "num_devices": mesh.size,
                "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            },
            "identity": identity,
            "num_steps": sum(entry.num_steps for entry in entries),
            "stages": [stage.facts(opened.tokenizer, first) for stage, first in stages],
            **_group(entries[-1]),
        }
    )


def _group(entry: Entry) -> dict[str, Any]:
    """The adapters that are trained together, if there are several."""
    if entry.is_single:
        return {}
    adapters = [
        {
            "name": one.name,
            "learning_rate": one.recipe.train.rate,
            "rank": one.recipe.lora.rank,
            "alpha": one.recipe.lora.alpha,
            "seed": one.recipe.train.seed,
            "num_steps": one.num_steps,
        }
        for one in entry.members
    ]
    return {"group": {"kind": entry.kind, "adapters": adapters}}


def of_checkpoint(
    recipe: Recipe, resolved: ResolvedRecipe, identity: dict[str, str], devices: Sequence[Any]
) -> dict[str, Any]:
    """What a resumed run is compared with, and the decisions it keeps. `recipe` has no `auto` left."""
    return {
        "identity": identity,
        "options": fixed_options(recipe),
        "resolved": resolved.to_dict(),
        "devices": describe_devices(devices),
        "libraries": libraries(),
    }
