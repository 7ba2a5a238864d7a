"""A run folder, read as far as it goes: files may be missing, half written, or not what they should be.

Secrets are masked here, before anything else sees a text. Numbers that are not there are None; NaN stays NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from trillora.data.excerpt import Piece
from trillora.errors import TrilloraError
from trillora.secrets import mask_secrets, mask_settings, mask_values, secrets_of_environment

FILES = ("run.json", "metrics.jsonl", "history.jsonl", "resolved.yaml")  # one of them makes a folder a run
LARGEST = 2**53  # a whole number beyond it is no count


@dataclass(frozen=True)
class StepLine:
    step: int
    stage: str
    loss: float | None
    learning_rate: float | None
    num_tokens: int
    skipped: bool
    tokens_per_second: float | None
    seconds: float | None  # since its process began to train
    memory_gib: float | None
    peak_fraction: float | None


@dataclass(frozen=True)
class EvaluationLine:
    step: int
    stage: str
    loss: float | None
    perplexity: float | None
    accuracy: float | None
    is_best: bool


@dataclass(frozen=True)
class AnswerRecord:
    """What the model said to a prompt after a step."""

    step: int
    prompt: str
    answer: str
    expected: str | None


@dataclass(frozen=True)
class SkipLine:
    step: int
    stage: str
    reason: str
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Happening:
    time: str
    event: str
    step: int | None
    reason: str
    machine: str


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
    counts: dict[str, float]  # of its data: documents, rows, tokens, supervised, padding_fraction
    num_evaluated: int | None
    example: tuple[Piece, ...]


@dataclass
class RunRecord:
    folder: Path
    version: str = ""
    started: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    num_steps: int | None = None
    stages: list[StageRecord] = field(default_factory=list)
    steps: list[StepLine] = field(default_factory=list)  # in order, each once
    evaluations: list[EvaluationLine] = field(default_factory=list)
    answers: list[AnswerRecord] = field(default_factory=list)
    skips: list[SkipLine] = field(default_factory=list)
    history: list[Happening] = field(default_factory=list)
    evaluated: dict[str, Any] = field(default_factory=dict)  # eval.json
    recipe: str = ""
    checkpoints: list[int] = field(default_factory=list)  # steps, rising
    adapter: str | None = None  # folder of the newest one, seen from the run
    base: str = ""  # what PEFT is to load it on
    num_unreadable: int = 0  # lines of the logs

    @property
    def last_step(self) -> int:
        return max([0, *(line.step for line in self.steps[-1:]), *(line.step for line in self.evaluations[-1:])])


def read_run(folder: Path) -> RunRecord:
    if not any((folder / name).is_file() for name in FILES):
        raise TrilloraError(
            "There is no run here: none of its files is in the folder."
            if folder.is_dir()
            else "There is no run here: the folder does not exist.",
            where=str(folder),
            do="give the folder that was named with --out when the run was started",
        )
    known = secrets_of_environment()
    run = RunRecord(folder, recipe=mask_settings(_text_of(folder / "resolved.yaml"), known))
    _read_facts(run, _mapping(_json_of(folder / "run.json", known)))
    _read_metrics(run, known)
    for raw in _lines(folder / "history.jsonl", run):
        line = mask_values(raw, known)
        facts = [words(line, name) for name in ("time", "event", "reason", "machine")]
        run.history.append(Happening(facts[0], facts[1], whole(line, "step"), facts[2], facts[3]))
    run.evaluated = _mapping(_json_of(folder / "eval.json", known))
    _find_adapter(run, known)
    return run


def number(values: dict[str, Any], name: str) -> float | None:
    """A number, or one of the words nan and inf; None for anything else."""
    value = values.get(name)
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) < LARGEST else None


def finite(values: dict[str, Any], name: str) -> float | None:
    value = number(values, name)
    return value if value is not None and math.isfinite(value) else None


def whole(values: dict[str, Any], name: str) -> int | None:
    """A count: a whole number that is not negative."""
    value = finite(values, name)
    return int(value) if value is not None and 0 <= value < LARGEST and value == int(value) else None


def words(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return "" if value is None else value if isinstance(value, str) else str(value)


def mappings(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The mappings in a list; whatever else is in it is left out."""
    value = values.get(name)
    return [_mapping(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _read_facts(run: RunRecord, facts: dict[str, Any]) -> None:
    run.version, run.started = words(facts, "trillora"), words(facts, "started")
    run.model, run.environment = _mapping(facts.get("model")), _mapping(facts.get("environment"))
    run.identity, run.num_steps = _mapping(facts.get("identity")), whole(facts, "num_steps")
    for stage in mappings(facts, "stages"):
        data = _mapping(stage.get("data"))
        run.stages.append(
            StageRecord(
                name=words(stage, "name"),
                first_step=whole(stage, "first_step"),
                num_steps=whole(stage, "num_steps"),
                sequence_length=whole(stage, "sequence_length"),
                batch_size=whole(stage, "batch_size"),
                learning_rate=finite(stage, "learning_rate"),
                files=tuple(
                    DataFileFacts(words(f, "name"), words(f, "sha256"), words(f, "format"), whole(f, "num_rows"))
                    for f in mappings(stage, "files")
                ),
                counts={name: value for name in data if (value := finite(data, name)) is not None and value >= 0},
                num_evaluated=whole(stage, "num_evaluated"),
                example=tuple(
                    Piece(words(piece, "text"), piece.get("trained") is True, piece.get("special") is True)
                    for piece in mappings(stage, "example")
                ),
            )
        )


def _read_metrics(run: RunRecord, known: tuple[str, ...]) -> None:
    steps: dict[int, StepLine] = {}  # what a resumed run writes again, replaces
    evaluations: dict[tuple[int, str], EvaluationLine] = {}
    answers: dict[tuple[int, str], AnswerRecord] = {}
    skips: dict[int, SkipLine] = {}
    mask = lru_cache(100)(partial(mask_secrets, known=known))
    for raw in _lines(run.folder / "metrics.jsonl", run):
        # Almost all lines are steps, which hold numbers and the name of their stage.
        line = {**raw, "stage": mask(words(raw, "stage"))} if raw.get("kind") == "step" else mask_values(raw, known)
        step, stage = whole(line, "step"), words(line, "stage")
        if step is None:
            run.num_unreadable += 1
            continue
        match line.get("kind"):
            case "step":
                steps[step] = _step_line(step, stage, line)
            case "evaluation":
                evaluations[step, stage] = EvaluationLine(
                    step,
                    stage,
                    number(line, "loss"),
                    number(line, "perplexity"),
                    number(line, "accuracy"),
                    line.get("is_best") in (True, 1),
                )
            case "samples":
                for sample in mappings(line, "samples"):
                    expected = sample.get("expected")
                    prompt = words(sample, "prompt")
                    answers[step, prompt] = AnswerRecord(
                        step, prompt, words(sample, "answer"), None if expected is None else str(expected)
                    )
            case "skipped":
                listed = line.get("rows")
                rows = tuple(str(row) for row in listed) if isinstance(listed, list) else ()
                skips[step] = SkipLine(step, stage, words(line, "reason"), rows)
    run.steps = [steps[step] for step in sorted(steps)]
    run.evaluations = sorted(evaluations.values(), key=lambda line: line.step)
    run.answers = sorted(answers.values(), key=lambda answer: answer.step)
    run.skips = [skips[step] for step in sorted(skips)]


def _step_line(step: int, stage: str, line: dict[str, Any]) -> StepLine:
    return StepLine(
        step,
        stage,
        loss=number(line, "loss"),
        learning_rate=finite(line, "learning_rate"),
        num_tokens=whole(line, "num_tokens") or 0,
        skipped=line.get("skipped") in (True, 1),
        tokens_per_second=finite(line, "tokens_per_second"),
        seconds=finite(line, "seconds"),
        memory_gib=finite(line, "memory_gib"),
        peak_fraction=finite(line, "peak_fraction"),
    )


def _find_adapter(run: RunRecord, known: tuple[str, ...]) -> None:
    """The finished adapter, else that of the newest checkpoint."""
    folders = {}
    try:
        for folder in (run.folder / "checkpoints").iterdir():
            digits = folder.name.removeprefix("step-")
            if digits.isdecimal() and len(digits) < 16 and folder.name != digits:
                folders[int(digits)] = folder
    except OSError:
        pass  # none yet
    run.checkpoints = sorted(folders)
    for folder in (run.folder / "adapter", *(folders[step] for step in reversed(run.checkpoints))):
        if (folder / "adapter_model.safetensors").is_file():
            run.adapter = str(folder.relative_to(run.folder))
            config = _mapping(_json_of(folder / "adapter_config.json", known))
            run.base = words(config, "base_model_name_or_path")
            break
    run.base = run.base or words(run.model, "folder") or words(run.model, "name")
    run.base = mask_secrets(run.base, known)


def _lines(file: Path, run: RunRecord) -> Iterator[dict[str, Any]]:
    """The objects of a log. Its last line may be half written; others that cannot be read are counted."""
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
        return json.loads(text)
    except (ValueError, RecursionError):  # half written, or not JSON
        return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text_of(file: Path) -> str:
    return _bytes_of(file).decode("utf-8", "replace")


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # not there, or not to be read: the report says what it knows without it
        return b""
