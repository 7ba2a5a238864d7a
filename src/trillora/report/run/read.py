"""Reads a run folder. Its files may be missing, incomplete, or damaged.

Secrets are masked here, before any other code sees a text. `parse` says what becomes of missing and wrong values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.events import (
    METRICS,
    AdapterEnded,
    AdapterStep,
    Evaluated,
    HistoryEntry,
    Metric,
    Sampled,
    Scored,
    Skipped,
    Step,
)
from trillora.files.bounded import read_bounded
from trillora.files.read_json import check_depth
from trillora.files.user_path import user_path
from trillora.recipe import run_file
from trillora.report.run.adapters import AdapterRecord, adapters_of
from trillora.report.run.parse import count, mapping, parse, words
from trillora.runs.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CHECKPOINTS,
    EVAL_FILE,
    GROUP_FILE,
    HISTORY_FILE,
    MANIFEST_FILE,
    MARKS,
    METRICS_FILE,
    RECIPE_FILE,
    RESOLVED_FILE,
)
from trillora.runs.manifest import GroupResult, RunManifest, not_a_run
from trillora.secrets import mask_secrets, mask_settings, mask_values, secrets_of_environment

MAX_FILE = 1 << 30  # bytes; metrics of a million steps have about 300 MB


@dataclass
class RunRecord:
    folder: Path
    manifest: RunManifest
    recipe: str  # resolved.yaml
    again: tuple[str, ...]  # the file that `trillora train` reads to resume, and the addresses it needs again
    evaluated: dict[str, Any]  # eval.json
    result: GroupResult  # group.json
    steps: list[Step] = field(default_factory=list)  # in order, each once
    evaluations: list[Evaluated] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)
    skips: list[Skipped] = field(default_factory=list)
    adapters: tuple[AdapterRecord, ...] = ()  # of a run that trains several together; `stage` of its events is a name
    scored: Scored | None = None
    history: list[HistoryEntry] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)  # steps, ascending
    adapter: str | None = None  # folder of the newest adapter, relative to the run
    base: str = ""  # the base model, as `from_pretrained` takes it
    is_multimodal: bool = False  # the base
    num_unreadable: int = 0  # lines of metrics.jsonl and history.jsonl

    @property
    def best(self) -> AdapterRecord | None:
        """The winner of several adapters. Phases have none: each has data of its own."""
        if self.result.best is not None:
            return next((adapter for adapter in self.adapters if adapter.name == self.result.best), None)
        rated = [adapter for adapter in self.adapters if adapter.best is not None]
        is_contest = self.manifest.group.kind in ("sweep", "auto")
        return min(rated, key=self.rank_of) if is_contest and rated else None

    @property
    def compares_betas(self) -> bool:
        return len({adapter.plan.beta for adapter in self.adapters}) > 1

    def rank_of(self, adapter: AdapterRecord) -> tuple[float, float]:
        """Lower is better. Losses of different betas are not comparable: the share of pairs that are right is."""
        loss = math.inf if adapter.best_loss is None else adapter.best_loss
        accuracy = adapter.best.accuracy if self.compares_betas and adapter.best is not None else 0.0
        return -accuracy, loss

    @property
    def last_step(self) -> int:
        return max([0, *(step.step for step in self.steps[-1:]), *(event.step for event in self.evaluations[-1:])])


def read_run(folder: Path) -> RunRecord:
    user_path(folder, where="the run")
    if not any((folder / name).is_file() for name in MARKS):
        raise not_a_run(folder)
    known = secrets_of_environment()
    run = RunRecord(
        folder,
        parse(RunManifest, mapping(_json_of(folder / MANIFEST_FILE, known))),
        recipe=mask_settings(_text_of(folder / RESOLVED_FILE), known),
        again=_again(folder),
        evaluated=mapping(_json_of(folder / EVAL_FILE, known)),
        result=parse(GroupResult, mapping(_json_of(folder / GROUP_FILE, known))),
    )
    _read_metrics(run, known)
    for line in _lines(folder / HISTORY_FILE, run):
        run.history.append(parse(HistoryEntry, mask_values(line, known)))
    _find_adapter(run, known)
    return run


def _again(folder: Path) -> tuple[str, ...]:
    try:
        return RECIPE_FILE, *(f"{name}=ADDRESS" for name in run_file.read(folder / RECIPE_FILE).withheld)
    except TrilloraError:  # missing or damaged
        return (RESOLVED_FILE,)


def _read_metrics(run: RunRecord, known: tuple[str, ...]) -> None:
    latest: dict[tuple[str, int, str], Metric] = {}  # a repeated step replaces the first one
    mask = lru_cache(100)(partial(mask_secrets, known=known))
    for raw in _lines(run.folder / METRICS_FILE, run):
        kind, step = words(raw.get("kind")), count(raw.get("step"))
        if step is None:
            run.num_unreadable += 1
        elif kind in METRICS:
            # Almost all lines are steps. Their only text is the name of the stage or the adapter.
            only_text = {"step": "stage", "adapter_step": "adapter"}.get(kind)
            line = {**raw, only_text: mask(words(raw.get(only_text)))} if only_text else mask_values(raw, known)
            event = parse(METRICS[kind], line)
            latest[kind, step, _part(event)] = event
    events = sorted(latest.values(), key=lambda event: event.step)
    run.steps = [event for event in events if isinstance(event, Step)]
    run.evaluations = [event for event in events if isinstance(event, Evaluated)]
    run.samples = [event for event in events if isinstance(event, Sampled)]
    run.skips = [event for event in events if isinstance(event, Skipped)]
    run.scored = next((event for event in reversed(events) if isinstance(event, Scored)), None)
    adapter_steps = [event for event in events if isinstance(event, AdapterStep)]
    ends = [event for event in events if isinstance(event, AdapterEnded)]
    run.adapters = adapters_of(run.manifest.group, run.result, adapter_steps, run.evaluations, ends)


def _part(event: Metric) -> str:
    """The part of the run that an event is about."""
    match event:
        case AdapterStep() | AdapterEnded():
            return event.adapter
        case Scored():
            return ""
        case _:
            return event.stage


def _find_adapter(run: RunRecord, known: tuple[str, ...]) -> None:
    """The adapter of a finished run, one of several that it trained together, or the newest checkpoint's."""
    folders = {}
    try:
        for folder in (run.folder / CHECKPOINTS).iterdir():
            digits = folder.name.removeprefix("step-")
            if digits.isdecimal() and len(digits) < 16 and folder.name != digits:
                folders[int(digits)] = folder
    except OSError:
        pass  # none yet
    run.checkpoints = sorted(folders)
    named = ""
    results = [words(run.result.merged.get("folder")), *(adapter.folder or "" for adapter in run.result.adapters)]
    trained = [run.folder / folder for folder in results if _is_inside(folder)]
    for folder in (run.folder / ADAPTER, *trained, *(folders[step] for step in reversed(run.checkpoints))):
        if _is_file(folder / ADAPTER_WEIGHTS):
            run.adapter = str(folder.relative_to(run.folder))
            config = mapping(_json_of(folder / ADAPTER_CONFIG, known))
            named = words(config.get("base_model_name_or_path"))
            run.is_multimodal = bool(mapping(config.get("auto_mapping")))
            break
    run.base = mask_secrets(words(run.manifest.model.get("base_name")) or named, known)


def _is_inside(folder: str) -> bool:
    """Whether the path, which a file of the run names, stays in the run's folder."""
    return folder != "" and not Path(folder).is_absolute() and ".." not in Path(folder).parts


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that is too long
        return False


def _lines(file: Path, run: RunRecord) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file. Unreadable lines are counted, except a last one that is still being written."""
    lines = _bytes_of(file).split(b"\n")
    for place, line in enumerate(lines):
        if line.strip():
            value = _parsed(line.decode("utf-8", "replace"))
            if isinstance(value, dict):
                yield value
            elif place < len(lines) - 1:
                run.num_unreadable += 1


def _json_of(file: Path, known: tuple[str, ...]) -> Any:
    return mask_values(_parsed(_text_of(file)), known)


def _parsed(text: str) -> Any:
    try:
        check_depth(text)
        return json.loads(text)
    except (ValueError, RecursionError):  # incomplete, not JSON, or too deep
        return None


def _text_of(file: Path) -> str:
    return _bytes_of(file).decode("utf-8", "replace")


def _bytes_of(file: Path) -> bytes:
    try:
        return read_bounded(file, MAX_FILE)
    except (OSError, ValueError):  # missing, unreadable, a pipe or too large: the report shows the rest
        return b""
