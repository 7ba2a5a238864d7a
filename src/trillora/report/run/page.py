"""The report of a run as one HTML file: no scripts, no requests, light or dark like the reader's system."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trillora.data.excerpt import ExcerptPiece, Gap, shortened
from trillora.errors import TrilloraError
from trillora.events import Preferences
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.model.loading.rope import read_positions
from trillora.model.loading.wrapper import MULTIMODAL, TEXT
from trillora.own_command import runnable
from trillora.recipe.schema import EMBEDDED
from trillora.report.html import Tile, TokenShare, render
from trillora.report.numbers import (
    format_duration,
    format_number,
    format_percent,
    format_rate,
    format_short,
    format_time,
)
from trillora.report.run.adapter_tables import adapters_table, scores_table
from trillora.report.run.adapters import MAX_ADAPTERS
from trillora.report.run.answers import answers
from trillora.report.run.curves.one_adapter import curves
from trillora.report.run.curves.several_adapters import adapter_curves, hues_of
from trillora.report.run.eval_scores import eval_scores
from trillora.report.run.parse import count, words
from trillora.report.run.read import RunRecord
from trillora.report.run.status import before_and_after, quoted, run_status, shown_path, total_seconds
from trillora.runs.files import ADAPTER, CHECKPOINTS, ROPE_FILE
from trillora.runs.manifest import DataFileFacts, StageRecord
from trillora.secrets import mask_secrets, secrets_of_environment

MAX_LISTED = 50  # lines of a table
MAX_RECIPE = 60_000  # characters
_ADDED_TOKENS = re.compile(r"^tokens: *(\[.|\n *-)", re.MULTILINE)  # in the recipe
_SCALED_POSITIONS = re.compile(r"^  rope: *(\{.|\n *\w)", re.MULTILINE)
TIME_FORMAT = "%d %b, %H:%M"  # the head of the page has the year


@dataclass(frozen=True)
class ShownStage:
    """What a stage trained on."""

    title: str  # empty if there is only one
    lines: list[str]
    tokens: list[TokenShare]
    files: list[DataFileFacts]
    num_files: int
    example: list[ExcerptPiece | Gap]


@dataclass(frozen=True)
class Use:
    """How to use the adapter: a command and Python code."""

    chat: str
    code: str
    is_checkpoint: bool
    note: str


def page(run: RunRecord) -> str:
    title = f"{_model_name(run)} on {_data_name(run)}" if _data_name(run) else _model_name(run)
    facts = [format_time(run.manifest.started), _machine(run)]
    stages = _distinct(run.manifest.stages[:MAX_ADAPTERS])[:MAX_LISTED] if run.adapters else run.manifest.stages
    return render(
        "run.html",
        title=title,
        subtitle=" · ".join(fact for fact in facts if fact),
        run=run,
        status=run_status(run),
        figures=_figures(run),
        hues=hues_of(run) if run.adapters else (),
        adapters=adapters_table(run) if run.adapters else None,
        drawings=adapter_curves(run) if run.adapters else curves(run),
        matrix=scores_table(run),
        answers=answers(run),
        scores=eval_scores(run),
        stages=[_stage(stage, len(stages) > 1) for stage in stages],
        use=_use(run),
        environment=_facts(run.manifest.environment),
        model=_facts({**_model_facts(run), **run.manifest.identity}),
        recipe=run.recipe[:MAX_RECIPE].rstrip(),
        num_cut=max(len(run.recipe) - MAX_RECIPE, 0),
        most=MAX_LISTED,
        moment=TIME_FORMAT,
        version=f"Trillora {run.manifest.trillora}".rstrip(),
        folder=shown_path(run.folder),
    )


def _distinct(stages: Iterable[StageRecord]) -> list[StageRecord]:
    """One stage for all adapters that train on the same rows, as in a sweep."""
    found: list[tuple[StageRecord, list[StageRecord]]] = []  # what they share, and the stages
    for stage in stages:
        shared = replace(stage, name="", learning_rate=None)
        alike = next((alike for other, alike in found if other == shared), None)
        if alike is None:
            found.append((shared, alike := []))
        alike.append(stage)
    return [
        alike[0]
        if len(alike) == 1
        else replace(shared, name=", ".join(stage.name for stage in alike[:3]) + _and_more(len(alike) - 3))
        for shared, alike in found
    ]


def _model_name(run: RunRecord) -> str:
    model = run.manifest.model
    name = words(model.get("base_name")) or run.folder.resolve().name
    return name.rstrip("/").rpartition("/")[2] or name


def _data_name(run: RunRecord) -> str:
    names = list(dict.fromkeys(Path(file.name).name for stage in run.manifest.stages for file in stage.files))
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2:,} more" if len(names) > 2 else shown


def _machine(run: RunRecord) -> str:
    environment = run.manifest.environment
    device = words(environment.get("device")) or words(environment.get("backend"))
    num_devices = count(environment.get("num_devices")) or 1
    return f"{num_devices} x {device}" if device and num_devices > 1 else device


def _preference_figures(before: Preferences, after: Preferences) -> list[Tile]:
    shares = [format_percent(round(found.rewards_accuracies, 2)) for found in (before, after)]
    logps = [format_number(found.logps_chosen) for found in (before, after)]
    return [
        Tile(f"of {after.pairs:,.0f} pairs right", shares[1], before=shares[0]),
        Tile("reward margin", format_number(after.rewards_margins), before=format_number(before.rewards_margins)),
        Tile("log-probability of chosen answers", logps[1], before=logps[0]),
    ]


def _figures(run: RunRecord) -> list[Tile]:
    tiles = []
    pair = before_and_after(run)
    if pair is not None:
        before, after = pair
        tiles.append(Tile("evaluation loss", format_number(after.loss), before=format_number(before.loss)))
        if after.preferences is not None and before.preferences is not None:
            tiles += _preference_figures(before.preferences, after.preferences)
        else:
            tiles.append(Tile("perplexity", format_number(after.perplexity), before=format_number(before.perplexity)))
        if after.preferences is None and math.isfinite(before.accuracy) and math.isfinite(after.accuracy):
            shares = [format_percent(round(share, 2)) for share in (before.accuracy, after.accuracy)]
            tiles.append(Tile("token accuracy", shares[1], before=shares[0]))
    elif run.steps:
        name = "mean training loss" if run.adapters else "training loss"
        tiles.append(Tile(name, format_number(run.steps[-1].loss), before=format_number(run.steps[0].loss)))
    steps = [step for adapter in run.adapters for step in adapter.steps] or run.steps
    tokens, seconds = sum(step.num_tokens for step in steps), total_seconds(run.steps)
    if tokens:
        tiles.append(Tile("tokens trained on", format_short(tokens)))
    if seconds:
        tiles.append(Tile("training time", format_duration(seconds)))
    if speeds := _known(step.tokens_per_second for step in run.steps):
        tiles.append(Tile("tokens per second", format_short(statistics.median(speeds))))
    if peaks := _known(step.peak_fraction for step in run.steps):
        tiles.append(Tile("of peak FLOP/s", format_percent(statistics.median(peaks))))
    if memory := _known(step.memory_gib for step in run.steps):
        tiles.append(Tile("measured memory", format_number(max(memory)), unit="GiB"))
    skipped = max(sum(step.skipped for step in steps), len(run.skips))
    if run.steps:
        tiles.append(Tile("skipped steps", f"{skipped:,}", is_alarm=skipped > 0))
    return tiles


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value and math.isfinite(value)]


def _stage(stage: StageRecord, is_one_of_many: bool) -> ShownStage:
    plan = [
        f"{stage.num_steps:,} steps" if stage.num_steps else "",
        f"of {stage.batch_size:,} sequences" if stage.batch_size else "",
        f"of {stage.sequence_length:,} tokens" if stage.sequence_length else "",
    ]
    rate = f", learning rate {format_rate(stage.learning_rate)}" if stage.learning_rate is not None else ""
    labels = {"documents": "documents", "rows": "sequences", "tokens": "tokens"}
    counts = [f"{int(stage.data[name]):,} {label}" for name, label in labels.items() if name in stage.data]
    counts += [f"{stage.num_evaluated:,} evaluation documents"] if stage.num_evaluated else []
    lines = " ".join(part for part in plan if part) + rate, ", ".join(counts)
    return ShownStage(
        title=stage.name if is_one_of_many else "",
        lines=[line for line in lines if line],
        tokens=_tokens(stage.data),
        files=list(stage.files[:MAX_LISTED]),
        num_files=len(stage.files),
        example=shortened(stage.example) if stage.example else [],
    )


def _tokens(counts: dict[str, float]) -> list[TokenShare]:
    tokens, trained = counts.get("tokens", 0), counts.get("supervised", 0)
    padding = min(counts.get("padding_fraction", 0), 0.999)
    if not tokens:
        return []
    parts = {"trained": trained, "masked": max(tokens - trained, 0), "padded": tokens * padding / (1 - padding)}
    names = {"trained": "trained", "masked": "context", "padded": "padding"}
    return [TokenShare(kind, names[kind], amount, format_short(amount)) for kind, amount in parts.items()]


def _use(run: RunRecord) -> Use | None:
    if run.adapter is None:
        return None
    folder = run.folder / run.adapter
    is_checkpoint = run.adapter.startswith(CHECKPOINTS)
    is_one_of_many = run.adapters and run.adapter != ADAPTER and not is_checkpoint
    return Use(
        chat=runnable(f"trillora chat {quoted(folder if is_one_of_many else run.folder)}"),
        code=_load_code(run, folder),
        is_checkpoint=is_checkpoint,
        note=EMBEDDED_NOTE if run.manifest.model.get("name") == EMBEDDED else "",
    )


def _load_code(run: RunRecord, folder: Path) -> str:
    """Python code that loads the adapter. With absolute paths it runs from any directory."""
    base = os.path.abspath(run.base) if os.path.isdir(run.base) else run.base
    adapter = mask_secrets(os.path.abspath(folder), secrets_of_environment())
    has_tokenizer = (folder / "tokenizer_config.json").is_file()  # not in a checkpoint
    base, adapter = (json.dumps(name, ensure_ascii=False) for name in (base, adapter))
    grown = "base.resize_token_embeddings(len(tokenizer))  # the run added tokens\n"
    grown = grown if _ADDED_TOKENS.search(run.recipe) else ""
    kind = MULTIMODAL if run.is_multimodal else TEXT
    scaled = _scaling(run, folder, base)
    has_config = "AutoConfig" in scaled
    return f"""from peft import PeftModel
from transformers import {"AutoConfig, " if has_config else ""}{kind}, AutoTokenizer

{scaled}base = {kind}.from_pretrained({base}, {"config=config, " if has_config else ""}dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({adapter if has_tokenizer else base})
{grown}model = PeftModel.from_pretrained(base, {adapter})"""


def _scaling(run: RunRecord, folder: Path, base: str) -> str:
    """Code that scales the positions of the base, as the adapter needs it."""
    with suppress(TrilloraError, OSError):
        if (positions := read_positions(folder)) is not None:
            return positions.code(base)
    if _SCALED_POSITIONS.search(run.recipe):  # a checkpoint, which has no such file
        return f"# Add the scaling of the recipe's model.rope to the base: a checkpoint has no {ROPE_FILE}\n"
    return ""


def _model_facts(run: RunRecord) -> dict[str, Any]:
    model = run.manifest.model
    facts: dict[str, Any] = {"base model": words(model.get("base_name"))}
    total, trained = count(model.get("num_parameters")), count(model.get("num_trained"))
    if total:
        facts["parameters"] = f"{total:,}"
    if trained:
        facts["trained parameters"] = f"{trained:,}" + (f" ({trained / total:.2%})" if total else "")
    facts["arithmetic"] = words(model.get("arithmetic"))
    return facts


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    first = list(facts.items())[: 2 * MAX_LISTED]
    return [(str(name), _plain(value)) for name, value in first if value not in (None, "")]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(_plain(inner) for inner in value) if isinstance(value, list) else str(value)


def _and_more(rest: int) -> str:
    return f" … and {rest:,} more" if rest > 0 else ""
