"""The inputs of preflight: the stages of a recipe with their real data, and the configuration of the model. No jax.

No weights are downloaded. `known_models.json` has the configurations of a few well-known models, for use without a
connection to the hub. If the tokenizer is not available, the embedded model's tokenizer counts the tokens. The result
notes both.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillora.data.stage import StageData, read_stage
from trillora.errors import TrilloraError
from trillora.events import Listener
from trillora.files.atomic import write_file
from trillora.files.cache_dir import with_cache, writing_cache
from trillora.files.digests import file_digest, text_digest
from trillora.model.limits import check_rows
from trillora.model.loading.growth import grow
from trillora.model.loading.source import find_model, load_config, load_tokenizer
from trillora.model.loading.stored.method import read_method
from trillora.preflight.client import versions
from trillora.recipe.group import Group, group_of
from trillora.recipe.schema import EMBEDDED, Recipe, Stage, StageRecipe, stages_of
from trillora.step.group_plan import segments, selections

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig, Tokenizer

KNOWN_MODELS = Path(__file__).parent / "known_models.json"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class StageInput:
    """A stage of the recipe, and what its data determines."""

    name: str
    recipe: StageRecipe
    num_steps: int
    steps_by_length: dict[int, int]  # sequence length in tokens -> number of steps
    num_tokens: int  # over all steps, without padding
    padding_warning: str | None  # if most of the computed tokens are padding
    num_evaluated: int  # documents of the fixed evaluation set
    num_compared: int = 0  # sequences that the reference reads before the first step
    members: tuple[Stage, ...] = ()  # the adapters of a group, if there is one
    width: int = 1  # how many of them are trained in these steps

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequences; the step is compiled for these."""
        return self.recipe.train.sequence_length

    @property
    def full_steps(self) -> float:
        """Number of steps, with shorter sequences counted in proportion to their length."""
        return sum(steps * length for length, steps in self.steps_by_length.items()) / self.sequence_length


@dataclass(frozen=True)
class PreflightInput:
    model: Path  # a folder with at least config.json
    stages: tuple[StageInput, ...]
    notes: tuple[str, ...]


def read_inputs(recipe: Recipe, listener: Listener) -> PreflightInput:
    folder, notes = describe_model(recipe)
    if method := read_method(folder):
        notes.append(
            f"The checkpoint is stored in {method.label} and dequantized while loading: memory and time are those "
            "of an unquantized base."
        )
    config = load_config(folder, trust_remote_code=recipe.model.trust_remote_code, rope=recipe.model.rope)
    tokenizer, tokenizer_notes = _tokenizer(folder, recipe)
    stages = [_stage_input(read_stage(stage, tokenizer, listener)) for stage in stages_of(recipe)]
    warnings = tuple(_warnings(stages, config))
    if (group := group_of(recipe)) is not None:
        stages = _group_inputs(group, stages)
    return PreflightInput(folder, tuple(stages), (*notes, *tokenizer_notes, *warnings))


def _stage_input(data: StageData) -> StageInput:
    batches, steps = data.batches, data.num_steps
    by_length = Counter({batches.lengths[0]: steps})
    if len(batches.lengths) > 1:
        by_length = Counter(batches.length_of(step) for step in range(steps))
    return StageInput(
        name=data.name,
        recipe=data.recipe,
        num_steps=steps,
        steps_by_length=dict(by_length),
        num_tokens=round(batches.summary()["tokens"] * steps / batches.steps_per_epoch),
        padding_warning=batches.padding_warning(),
        num_evaluated=0 if data.evaluation is None else len(data.evaluation),
        num_compared=batches.num_rows if data.recipe.train.precompute_ref_log_probs else 0,
    )


def _group_inputs(group: Group, stages: list[StageInput]) -> list[StageInput]:
    """A group as stages: the steps with all adapters, then those with fewer."""
    num_steps = [stage.num_steps for stage in stages]
    if len(stages) == 1:
        num_steps *= len(group.members)
    picks = selections(num_steps[0]) if group.kind == "auto" else ()
    tokens_per_step = sum(stage.num_tokens / stage.num_steps for stage in stages) / len(stages)
    found = []
    for segment in segments(num_steps, picks):
        name = f"{segment.num_adapters} adapter{'s' if segment.num_adapters > 1 else ''}"
        found.append(
            dataclasses.replace(
                stages[0],
                name=name,
                num_steps=segment.num_steps,
                steps_by_length={stages[0].sequence_length: segment.num_steps},
                num_tokens=round(tokens_per_step * segment.num_steps * segment.num_adapters),
                members=group.members,
                width=segment.num_adapters,
            )
        )
    return found


def describe_model(recipe: Recipe) -> tuple[Path, list[str]]:
    """The folder of the model's configuration, and notes for the user."""
    named = recipe.model
    try:
        return find_model(
            named.name, revision=named.revision, trust_remote_code=named.trust_remote_code, with_weights=False
        ), []
    except TrilloraError:
        config = json.loads(KNOWN_MODELS.read_text()).get(named.name)
        if config is None or named.revision is not None:
            raise
        folder = with_cache(lambda cache: _written_config(cache, named.name, config), say=lambda _: None)
        return folder, [f"{named.name} could not be downloaded: using the configuration that comes with Trillora."]


def _written_config(cache: Path, name: str, config: PretrainedConfig) -> Path:
    folder = cache / "known-models" / name
    with writing_cache(cache):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.json", json.dumps(config, indent=1))
    return folder


def _tokenizer(folder: Path, recipe: Recipe) -> tuple[Tokenizer, list[str]]:
    name, notes = recipe.model.name, []
    try:
        tokenizer = load_tokenizer(folder)
    except TrilloraError:
        notes = [f"The tokenizer of {name} is not available: tokens were counted with the embedded model's tokenizer."]
        tokenizer = load_tokenizer(find_model(EMBEDDED))
    grow(tokenizer, recipe.tokens or ())
    return tokenizer, notes


def _warnings(stages: list[StageInput], config: PretrainedConfig) -> Iterator[str]:
    for stage in stages:
        if stage.padding_warning:
            yield f"Warning{f', stage {stage.name}' if len(stages) > 1 else ''}: {stage.padding_warning}"
        try:
            check_rows(config, stage.sequence_length, stage.recipe.model.rope)
        except TrilloraError as refusal:
            yield f"Warning, stage {stage.name}: training refuses this. {refusal.what} To do: {refusal.do}."


def fingerprint(recipe: Recipe, **question: object) -> str:
    """A digest of everything the result depends on. Fast: data files are identified by size and modification time, the
    model by its files or by its commit in the hub's cache."""
    parts = {
        "recipe": recipe.model_dump(mode="json"),
        "model": _model_state(recipe.model.name, recipe.model.revision),
        "data": sorted(_file_states(_paths(recipe.model_dump(mode="json")))),
        "code": sorted((str(f.relative_to(PACKAGE)), file_digest(f)) for f in PACKAGE.rglob("*.py")),
        "versions": versions(),
        **question,
    }
    return text_digest(json.dumps(parts, sort_keys=True, default=str))


def _paths(tree: object) -> Iterator[Path]:
    """Every string of a recipe that is an existing path."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _paths(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _paths(value)
    elif isinstance(tree, str) and len(tree) < 1000 and "\n" not in tree and "/" in tree:
        path = Path(tree).expanduser()
        if path.exists():
            yield path


def _file_states(paths: Iterator[Path]) -> Iterator[tuple[str, int, int]]:
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                state = file.stat()
                yield str(file), state.st_size, state.st_mtime_ns


def _model_state(name: str, revision: str | None) -> Any:
    folder = Path(name).expanduser()
    if name == EMBEDDED or folder.is_dir():
        return sorted(_file_states(iter([folder]))) if folder.is_dir() else name
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a hub id; find_model reports it later
        return name
    return str(found) if isinstance(found, str) else "not cached"
