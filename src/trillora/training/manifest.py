"""What a run is made from: its manifest, and the facts that every checkpoint stores."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from trillora.data.stage import StageData, example_of
from trillora.model.layout import stored_weights
from trillora.model.loading.digest import settings_digests
from trillora.model.loading.source import EMBEDDED, OpenModel
from trillora.recipe.resolve import ResolvedRecipe
from trillora.recipe.schema import Recipe
from trillora.runs.manifest import AdapterPlan, DataFileFacts, GroupPlan, RunManifest, StageRecord
from trillora.step.build import Assembly
from trillora.training.entries.timeline import Entry
from trillora.training.run_identity import fixed_options
from trillora.version import __version__

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

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
) -> RunManifest:
    model, mesh = assembly.model, assembly.mesh
    firsts = [1 + sum(entry.num_steps for entry in entries[:number]) for number in range(len(entries))]
    return RunManifest(
        trillora=__version__,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model={
            "name": recipe.model.name,
            "base_name": opened.base_name,
            # The embedded model's are written by the installed libraries, and differ between versions.
            "settings": None if recipe.model.name == EMBEDDED else settings_digests(opened.folder),
            "num_parameters": sum(math.prod(leaf.shape) for leaf, _ in stored_weights(model.layout).values()),
            "num_trained": sum(math.prod(leaf.shape) for leaf in model.adapter_layout.values()),
            "arithmetic": model.arithmetic,
        },
        environment={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            **libraries(),
            "backend": mesh.devices.flat[0].platform,
            "device": mesh.devices.flat[0].device_kind,
            "num_devices": mesh.size,
            "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        },
        identity=identity,
        num_steps=sum(entry.num_steps for entry in entries),
        stages=tuple(
            of_stage(stage, opened.tokenizer, first)
            for entry, first in zip(entries, firsts, strict=True)
            for stage in entry.members
        ),
        group=_group(entries[-1]),
    )


def of_stage(stage: StageData, tokenizer: Tokenizer, first_step: int) -> StageRecord:
    train = stage.recipe.train
    return StageRecord(
        name=stage.name,
        first_step=first_step,
        num_steps=stage.num_steps,
        sequence_length=train.sequence_length,
        batch_size=train.batch_size,
        learning_rate=train.rate,
        files=tuple(DataFileFacts(f["name"], f["sha256"], f["format"], f["num_rows"]) for f in stage.dataset.files),
        data=stage.batches.summary(),
        num_evaluated=0 if stage.evaluation is None else len(stage.evaluation),
        example=example_of(stage.batches.documents, tokenizer),
        system=stage.dataset.system,
    )


def _group(entry: Entry) -> GroupPlan:
    """The adapters that are trained together, if there are several."""
    if entry.is_single:
        return GroupPlan("", ())
    adapters = []
    for one in entry.members:
        train, lora = one.recipe.train, one.recipe.lora
        beta = None if train.rows == "answers" else train.strength
        adapters.append(AdapterPlan(one.name, train.rate, lora.rank, lora.alpha, train.seed, one.num_steps, beta))
    return GroupPlan(entry.kind, tuple(adapters))


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
