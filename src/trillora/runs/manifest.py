"""What a run says about itself: `run.json`, `group.json` and `saved.json`, as training writes them.

    manifest = read_manifest(Path("runs/first"))
    manifest.identity["model"]          the digest of the base's weights
    manifest.stages[-1].num_steps       40

The report reads these dataclasses too, from files that may be damaged: there, a missing or wrong value is an empty one.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.data.excerpt import ExcerptPiece
from trillora.errors import TrilloraError, nearest
from trillora.files.read_json import read_json
from trillora.runs.files import GROUP_FILE, MANIFEST_FILE, RECIPE_FILE
from trillora.secrets import mask_values

RESTORE = "restore it from a copy, or run the training command again"


@dataclass(frozen=True)
class DataFileFacts:
    name: str
    sha256: str
    format: str
    num_rows: int | None


@dataclass(frozen=True)
class StageRecord:
    name: str
    first_step: int | None
    num_steps: int | None
    sequence_length: int | None
    batch_size: int | None
    learning_rate: float | None
    files: tuple[DataFileFacts, ...]
    data: dict[str, float]  # documents, rows, tokens, supervised, padding_fraction
    num_evaluated: int | None
    example: tuple[ExcerptPiece, ...]
    system: str = ""  # the system message that every row has


@dataclass(frozen=True)
class AdapterPlan:
    name: str
    learning_rate: float | None
    rank: int | None
    alpha: float | None
    seed: int | None
    num_steps: int | None
    beta: float | None = None  # of a loss of preferences


@dataclass(frozen=True)
class GroupPlan:
    """The adapters of a run that trains several together; empty if it trains one."""

    kind: str  # phases, sweep, auto
    adapters: tuple[AdapterPlan, ...]


@dataclass(frozen=True)
class AdapterSource:
    """Which weights became the adapter."""

    step: int | None  # of the checkpoint; None until the run is finished
    evaluation_loss: float | None


@dataclass(frozen=True)
class RunManifest:
    """The content of run.json."""

    trillora: str  # version
    started: str  # ISO 8601
    model: dict[str, Any]  # `base_name` is what `from_pretrained` loads the base model from
    environment: dict[str, Any]
    identity: dict[str, Any]  # digests of what the run depends on, by name
    num_steps: int | None
    stages: tuple[StageRecord, ...]  # one per adapter if there are several
    group: GroupPlan = GroupPlan("", ())
    adapter: AdapterSource = AdapterSource(None, None)

    def to_json(self) -> str:
        return json.dumps({"format": 1, **mask_values(dataclasses.asdict(self))}, indent=1) + "\n"


@dataclass(frozen=True)
class AdapterResult:
    name: str
    status: str
    reason: str
    num_steps: int | None
    best_step: int | None
    best_loss: float | None
    folder: str | None  # relative to the run
    step: int | None  # whose weights the folder has


@dataclass(frozen=True)
class GroupResult:
    """The content of group.json."""

    kind: str
    best: str | None  # name of an adapter
    adapters: tuple[AdapterResult, ...]
    merged: dict[str, Any]  # method, rank, lost, folder; empty if the adapters are not merged

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class SavedRecord:
    """The content of saved.json."""

    run: str  # the id of the run
    step: int | None = None  # of the newest checkpoint
    where: str = ""  # that checkpoint


def read_manifest(run: Path) -> RunManifest | None:
    """None if the run stopped before its first step."""
    file = run / MANIFEST_FILE
    return read_json(file, RunManifest, do=RESTORE) if file.exists() else None


def read_group_result(run: Path) -> GroupResult | None:
    """None if the run trains one adapter, or is not finished."""
    file = run / GROUP_FILE
    return read_json(file, GroupResult, do=RESTORE) if file.exists() else None


def not_a_run(folder: Path) -> TrilloraError:
    others = sorted(file.parent.name for file in folder.parent.glob(f"*/{RECIPE_FILE}"))
    meant = nearest(folder.name, [name for name in others if name != folder.name])
    do = (f"did you mean '{meant}'? Give" if meant else "give") + " the folder that `trillora train --out` wrote"
    do = f"{do}; runs in the same place: {', '.join(others[:8])}" if others else do
    there, nothing = f"This folder is not a run: it has no {RECIPE_FILE}.", f"There is no run '{folder.name}'."
    return TrilloraError(there if folder.is_dir() else nothing, where=str(folder), do=do)
