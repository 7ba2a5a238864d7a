"""The model card: README.md with the hub's metadata, for an adapter's folder and for everything that is made from it.

    ---
    base_model: HuggingFaceTB/SmolLM2-135M-Instruct
    library_name: peft
    …
    ---
    # quickstart
    A LoRA adapter for …

It is made from the run's own files: run.json, recipe.json and eval.json. It contains no path of this machine and no
secret: files are named without their folders, and the hub refuses a path as a base model or data set. A person may edit
it, so it has no checksum, and `refresh_card` replaces only a card that no one has edited.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.files.bounded import read_bounded
from trillora.files.digests import text_digest
from trillora.files.hub import HUB_ID
from trillora.files.read_json import MAX_BYTES, parse_json, read_json, read_text
from trillora.model.adapters import CONFIG_FILE
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.model.loading.embedded import SMOLLM2_HUB_ID
from trillora.model.loading.rope import ScaledPositions, read_positions
from trillora.model.loading.wrapper import MULTIMODAL, TEXT
from trillora.recipe.schema import EMBEDDED, Recipe, TrainSection, stages_of
from trillora.runs.files import ADAPTER, EVAL_FILE, ROPE_FILE, is_run
from trillora.runs.manifest import RunManifest, StageRecord
from trillora.runs.saved import SavedRun
from trillora.safe_text import visible_line
from trillora.secrets import mask_secrets, secrets_of_environment
from trillora.version import __version__

CARD_FILE = "README.md"
Relation = Literal["adapter", "finetune", "quantized", "merge"]  # to the base model, as the hub calls it
_END = re.compile(r"\n<!-- Written by Trillora\. Digest of the text above: ([0-9a-f]{64}) -->\n\Z")
_MAX_LISTED = 20
_LIBRARIES = ("jax", "torch", "transformers", "torchax")
# What eval.json calls a metric, and what people call it.
_METRICS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "accuracy": "token accuracy",
    "exact_match": "exact match",
    "right_fields": "right fields",
    "valid_json": "valid JSON",
    "choice_accuracy": "choice accuracy",
    "pair_accuracy": "pair accuracy",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
    "f1": "F1",
    "chrf": "chrF",
    "bleu": "BLEU",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card is about."""

    name: str  # the title
    base: str | None  # as adapter_config.json names it
    relation: Relation = "adapter"
    form: str = "A LoRA adapter"  # how the first sentence starts
    run: Path | None = None  # whose files have the data, the recipe and the scores
    part: str | None = None  # the stage or phase that the adapter comes from; None: all of them
    config: Mapping[str, Any] = field(default_factory=dict)  # adapter_config.json
    notes: Sequence[str] = ()
    library: str | None = "peft"
    tags: Sequence[str] = ()
    usage: str | None = None  # how to load it; None: with PEFT
    positions: ScaledPositions | None = None  # as model.rope scaled them


def model_card(facts: CardFacts) -> str:
    """The text of README.md."""
    manifest, evaluated, recipe = _run_files(facts.run)
    stages = [stage for stage in manifest.stages if facts.part in (None, stage.name)] if manifest is not None else []
    scores = _scores(evaluated)
    base = hub_id(facts.base)
    metadata = {
        **({"base_model": base, "base_model_relation": facts.relation} if base else {}),
        **({"library_name": facts.library} if facts.library else {}),
        "pipeline_tag": "text-generation",
        "tags": _tags(facts, base),
        **({"datasets": found} if (found := _datasets(recipe, facts.part)) else {}),
        **({"model-index": _model_index(facts.name, evaluated, scores)} if scores else {}),
    }
    sections = [
        f"# {_plain(facts.name)}",
        f"{facts.form} of {_base_text(facts.base)}, made with Trillora {__version__}.",
        EMBEDDED_NOTE if manifest is not None and manifest.model.get("name") == EMBEDDED else "",
        *(_plain(note) for note in facts.notes),
        _section("Use", facts.usage or peft_usage(base, facts.config, facts.positions)),
        _section("Rotary positions", _positions(facts)),
        _section("Scores", _scores_table(evaluated, scores, _loss_in_training(manifest, recipe))),
        _section("Data", _data_table(stages)),
        _section("Recipe", _recipe_table(recipe, facts)),
        _section("Versions", _versions(manifest)),
        "The license and the terms of use of the base model apply to this model too.",
    ]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)
    body = "\n\n".join(part for part in sections if part)
    text = mask_secrets(f"---\n{head}---\n\n{body}\n", secrets_of_environment())
    return f"{text}\n<!-- Written by Trillora. Digest of the text above: {text_digest(text)} -->\n"


def adapter_card(
    config: bytes,
    run: Path | None,
    *,
    name: str,
    part: str | None = None,
    notes: Sequence[str] = (),
    positions: ScaledPositions | None = None,
) -> str:
    """The card of an adapter with this adapter_config.json."""
    options = parse_json(config, dict[str, Any], where=CONFIG_FILE, do="copy the file again, or use another adapter")
    base = options.get("base_model_name_or_path")
    found = base if isinstance(base, str) else None
    facts = CardFacts(name, found, run=run, part=part, config=options, notes=notes, positions=positions)
    return model_card(facts)


def is_unedited(text: str) -> bool:
    """Whether a card is as Trillora wrote it."""
    found = _END.search(text)
    return found is not None and text_digest(text[: found.start()]) == found[1]


def refresh_card(run: Path) -> bool:
    """Writes the card of a run's adapter again, with the newest scores. One that a person has edited stays, and a file
    that cannot be read or written is no reason to stop."""
    folder = run / ADAPTER
    file = folder / CARD_FILE
    try:
        if os.path.lexists(file) and not is_unedited(read_text(file, do="remove this file")):
            return False
        config = read_bounded(folder / CONFIG_FILE, MAX_BYTES)
        card = adapter_card(config, run, name=run.resolve().name, positions=read_positions(folder))
        write_file(file, card)
    except (OSError, ValueError, TrilloraError):
        return False
    return True


def hub_id(name: str | None) -> str | None:
    """The name if it is one of the hub's; None for a path of this machine."""
    name = SMOLLM2_HUB_ID if name == EMBEDDED else name
    is_path = name is not None and (name.startswith((".", "~", "/")) or os.path.exists(name))
    return name if name is not None and not is_path and HUB_ID.fullmatch(name) else None


# ---- what the run's files say


def _run_files(folder: Path | None) -> tuple[RunManifest | None, dict[str, Any], Recipe | None]:
    """A card without one of them is better than none."""
    if folder is None or not is_run(folder):
        return None, {}, None
    run, manifest, evaluated, recipe = SavedRun(folder), None, {}, None
    with suppress(TrilloraError):
        manifest = run.manifest
    with suppress(TrilloraError):
        evaluated = read_json(folder / EVAL_FILE, dict[str, Any], do="", allow_infinity=True)
    with suppress(TrilloraError):
        recipe = run.recipe
    return manifest, evaluated, recipe


def _scores(evaluated: Mapping[str, object]) -> dict[str, tuple[float, float | None]]:
    """metric -> of the adapter, of the base."""
    adapter, base = _mapping(evaluated, "adapter"), _mapping(evaluated, "base")
    values = {name: (_number(adapter.get(name)), _number(base.get(name))) for name in _METRICS}
    return {name: (own, other) for name, (own, other) in values.items() if own is not None}


def _model_index(
    name: str, evaluated: Mapping[str, object], scores: Mapping[str, tuple[float, float | None]]
) -> list[dict[str, Any]]:
    file = _file_name(evaluated.get("data")) or "held-out rows"
    metrics = [{"type": key, "name": _METRICS[key], "value": round(own, 6)} for key, (own, _) in scores.items()]
    data = {"type": (Path(file).suffix.lstrip(".") or "text"), "name": file}
    task = {"type": "text-generation", "name": "Text generation"}
    return [{"name": _plain(name), "results": [{"task": task, "dataset": data, "metrics": metrics}]}]


def _scores_table(
    evaluated: Mapping[str, object], scores: Mapping[str, tuple[float, float | None]], during: str
) -> str:
    if not scores:
        return during
    lines = [
        f"| {_METRICS[name]} | {'' if base is None else f'{base:.4g}'} | {own:.4g} |"
        for name, (own, base) in scores.items()
    ]
    rows, file = _number(evaluated.get("num_rows")), _file_name(evaluated.get("data"))
    title = "By `trillora eval`" + (f" on {rows:.0f} rows" if rows else "") + (f" of {file}" if file else "") + ":"
    table = "\n".join(["| | base model | this model |", "|---|---|---|", *lines])
    return "\n\n".join(part for part in (title, table, during) if part)


def _loss_in_training(manifest: RunManifest | None, recipe: Recipe | None) -> str:
    loss = None if manifest is None else _number(manifest.adapter.evaluation_loss)
    train = stages_of(recipe)[-1].recipe.train if recipe is not None else None
    name = "Loss" if train is None or train.rows == "answers" else f"Loss of {_losses(train)}"
    return "" if loss is None else f"{name} on held-out rows during training: {loss:.4f}."


def _losses(train: TrainSection) -> str:
    names = [train.loss] if isinstance(train.loss, str) else train.loss
    return " + ".join(_file_name(name) for name in names)


def _data_table(stages: Sequence[StageRecord]) -> str:
    lines = []
    for stage in stages:
        files = stage.files
        for file in files[:_MAX_LISTED]:
            shown = _file_name(file.name) or "?"
            lines.append(f"| {_plain(stage.name)} | {shown} | {file.num_rows or 0:,} | `{_plain(file.sha256)[:16]}` |")
        if len(files) > _MAX_LISTED:
            lines.append(f"| {_plain(stage.name)} | and {len(files) - _MAX_LISTED:,} more files | | |")
    head = ["| stage | file | rows | SHA-256 |", "|---|---|---|---|"]
    return "\n".join([*head, *lines]) if lines else ""


def _recipe_table(recipe: Recipe | None, facts: CardFacts) -> str:
    config = facts.config
    values: dict[str, Any] = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    if config.get("use_rslora"):
        values["rsLoRA"] = "yes"
    if config.get("use_dora"):
        values["DoRA"] = "yes"
    targets = config.get("target_modules")
    if isinstance(targets, list):
        values["layers"] = " ".join(map(str, targets[:_MAX_LISTED])) + (" …" if len(targets) > _MAX_LISTED else "")
    for stage in stages_of(recipe) if recipe is not None else ():
        if facts.part not in (None, stage.name):
            continue
        train, of = stage.recipe.train, "" if recipe is None or recipe.stages is None else f" of {stage.name}"
        length = f"{train.steps} steps" if train.steps else f"{train.epochs:g} epochs"
        rate = train.learning_rate if isinstance(train.learning_rate, str) else f"{train.learning_rate:g}"
        values[f"training{of}"] = f"{length}, batches of {train.batch_size} sequences of {train.sequence_length} tokens"
        if train.rows != "answers":
            values[f"loss{of}"] = f"{_losses(train)}, beta {train.strength:g}"
        values[f"learning rate{of}"] = f"{rate}, {train.schedule}, {train.optimizer}, seed {train.seed}"
    if facts.positions is not None:
        values["rotary positions"] = str(facts.positions.rope)
    if recipe is not None and recipe.model.quantize not in ("auto", "none"):
        values["base in memory"] = recipe.model.quantize
    if recipe is not None and recipe.engine.matmul != "full":
        values["matmuls with the base"] = f"{recipe.engine.matmul}, in training and in its evaluations"
    lines = [f"| {_plain(name)} | {_plain(value)} |" for name, value in values.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines]) if lines else ""


def _versions(manifest: RunManifest | None) -> str:
    environment = manifest.environment if manifest is not None else {}
    found = [f"{name} {_plain(environment[name])}" for name in _LIBRARIES if name in environment]
    made = manifest.trillora if manifest is not None else ""
    return ", ".join([*([f"Trillora {_plain(made)}"] if made else []), *found])


def _datasets(recipe: Recipe | None, part: str | None) -> list[str]:
    """The hub's data sets among the data; files of this machine are left out."""
    names: list[str] = []
    for stage in stages_of(recipe) if recipe is not None else ():
        path = stage.recipe.data.path
        for entry in [path] if isinstance(path, str) else path:
            text = entry if isinstance(entry, str) else entry.path
            name = hub_id(text.partition("@")[0])
            if part in (None, stage.name) and name is not None and not Path(name).suffix:
                names.append(name)
    return list(dict.fromkeys(names))


# ---- text


def _tags(facts: CardFacts, base: str | None) -> list[str]:
    linked = [f"base_model:{facts.relation}:{base}"] if base else []
    return [*linked, "lora", *(["transformers"] if facts.library else []), *facts.tags, "trillora"]


def _base_text(base: str | None) -> str:
    found = hub_id(base)
    if found:
        return f"[{found}](https://huggingface.co/{found})"
    return f"the model `{_file_name(base)}`" if base else "a base model"


def peft_usage(
    base: str | None, config: Mapping[str, object], positions: ScaledPositions | None, comment: str = ""
) -> str:
    """How to load an adapter with this adapter_config.json. `comment` explains what the base is."""
    kind = MULTIMODAL if config.get("auto_mapping") else TEXT
    name = base or "BASE_MODEL"
    scaled = "" if positions is None else positions.code(f'"{name}"')
    return f"""```python
from peft import PeftModel
from transformers import {"AutoConfig, " if scaled else ""}{kind}, AutoTokenizer

here = "THIS_REPOSITORY_OR_FOLDER"
{scaled}base = {kind}.from_pretrained("{name}", {"config=config, " if scaled else ""}dtype="auto"){comment}
tokenizer = AutoTokenizer.from_pretrained(here)
model = PeftModel.from_pretrained(base, here)
```"""


def _positions(facts: CardFacts) -> str:
    """What the reader of an adapter has to give to the base, because PEFT does not."""
    positions = facts.positions
    if positions is None:
        return ""
    lengths = f"for up to {positions.max_position_embeddings:,} tokens where the base has {positions.original:,}"
    trained = f"Trained with rotary positions scaled by {positions.rope}, {lengths}."
    if facts.relation != "adapter":
        return f"{trained} The model's own configuration says so, and nothing has to be set."
    values = positions.values()
    override = json.dumps({"text_config": values} if facts.config.get("auto_mapping") else values)
    return f"""{trained} PEFT does not read this from an adapter: without these values, the base gives other answers.
They are in `{ROPE_FILE}`, and in the code above. vLLM takes them as an option:

```
--hf-overrides '{override}'
```"""


def _section(title: str, content: str) -> str:
    return f"## {title}\n{content}" if content else ""


def _plain(value: object) -> str:
    """Untrusted text in one line, without a meaning in Markdown or HTML."""
    text = visible_line(str(value))[:300]
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", text)


def _file_name(path: object) -> str:
    """The last part of a path: folders of this machine stay private."""
    return _plain(re.split(r"[/\\]", str(path).partition("?")[0].rstrip("/\\"))[-1]) if isinstance(path, str) else ""


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _mapping(value: Mapping[str, object], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
