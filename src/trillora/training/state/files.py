"""Converts the training state to files and back. A checkpoint has the arrays of every adapter that is still trained,
what each adapter leaves if the run ends now, and the progress:

    state.safetensors      ADAPTER/adapter/…, ADAPTER/optimizer/…
    adapters.safetensors   ADAPTER/PARAMETER: the weights of the best evaluation, or the last ones if it has ended
    state.json             `CheckpointFacts`
    metrics.jsonl

So the best weights need no checkpoint of their own. A run of one adapter has PEFT's two files in place of
`adapters.safetensors`, with its latest weights before the first evaluation: each of its checkpoints is an adapter. All
arrays are stored unsharded and by layer, so a run can resume on another number of devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trillora.devices.mesh import put_array, replicated
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.events import METRICS
from trillora.files.read_json import first_problem, parse_json
from trillora.model.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    adapter_files,
    fit_adapter,
    read_adapter,
    spec_of,
)
from trillora.model.layout import unstack
from trillora.model.lora_spec import LayerLora, LoraSpec
from trillora.recipe.resolve import ResolvedRecipe, StepSettings
from trillora.runs.files import KEPT_FILE, METRICS_FILE
from trillora.step.background import compile_program
from trillora.step.build import Assembly
from trillora.training.state.position import Position

_SLICE = re.compile(r"\.(\d{1,6}):(\d{1,6}):([1-9]\d{0,5})\.")  # of stacked layers (`model.layout`)
STATE_FILE, FACTS_FILE = "state.safetensors", "state.json"
ADAPTER_FILES = (WEIGHTS_FILE, CONFIG_FILE)
FILES = (*ADAPTER_FILES, STATE_FILE, FACTS_FILE, METRICS_FILE)  # of a run of one adapter
FILES_OF_SEVERAL = (KEPT_FILE, STATE_FILE, FACTS_FILE, METRICS_FILE)
DO = "resume from an earlier checkpoint, or restore the file from a copy"
Kept = dict[str, dict[str, np.ndarray]]  # adapter's name -> its matrices by parameter name


class CheckpointFacts(BaseModel):
    """The content of `FACTS_FILE`. See `manifest.of_checkpoint` for what it is used for."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    run: str  # the id of the run
    identity: dict[str, str]
    options: dict[str, Any]
    resolved: ResolvedRecipe
    devices: str
    libraries: dict[str, str]
    position: Position

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.position.members or self.position.entry > len(self.resolved.stages):
            raise ValueError("position is not in one of the stages")
        for stage in self.resolved.stages:
            if stage.settings.mesh.size != stage.settings.num_devices:
                raise ValueError("the mesh does not have num_devices")
            if unknown := sorted(stage.reasons.keys() - StepSettings.OPTIONS.keys() - {"every_steps", "template_date"}):
                raise ValueError(f"{unknown[0]} is not decided automatically")
        return self


def make_copier(assembly: Assembly) -> Callable[[TrainState], TrainState]:
    """A compiled program that copies the state to every device. It returns before the copy is complete; JAX orders the
    copy before the next step, which reuses the memory of the original."""

    def copy(state: TrainState) -> TrainState:
        return jax.tree.map(jnp.copy, state._replace(key=jax.random.key_data(state.key)))

    return compile_program(jax.jit(copy, out_shardings=replicated(assembly.mesh)).lower(assembly.state_shapes))


def to_files(
    kept: Kept, assembly: Assembly, base_name: str, facts: dict[str, Any], position: Position
) -> Callable[[TrainState], dict[str, bytes]]:
    """A function that makes the files of a checkpoint from a copy of the state. It may be called later, in a thread:
    the position is read now. Values that are not finite are an error."""
    members = [(member.name, position.has_state(member)) for member in position.members]
    text = facts_json({**facts, "position": position.to_dict()}, indent=1) + "\n"

    def make(copied: TrainState) -> dict[str, bytes]:
        states = assembly.split(jax.tree.map(np.asarray, copied))
        arrays = {
            f"{name}/{path}": np.asarray(array, order="C")
            for (name, has_state), state in zip(members, states, strict=True)
            if has_state
            for path, array in named_arrays(state)
        }
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise AssertionError(f"{name} is not finite: the step should have been skipped")
        of_kept = _kept_files(kept, [name for name, _ in members], states[0], assembly, base_name)
        return {**of_kept, STATE_FILE: save(arrays), FACTS_FILE: text.encode()}

    return make


def _kept_files(
    kept: Kept, names: Sequence[str], first: TrainState, assembly: Assembly, base_name: str
) -> dict[str, bytes]:
    model = assembly.model
    if len(names) == 1:
        own = kept.get(names[0]) or unstack(first.adapter, model.adapter_layout)
        return adapter_files(own, model.module, model.targets, assembly.spec, base_name)
    matrices = {
        f"{name}/{key}": np.ascontiguousarray(array) for name, own in kept.items() for key, array in own.items()
    }
    return {KEPT_FILE: save(matrices)}


def from_files(files: Mapping[str, bytes], assembly: Assembly, position: Position, where: str) -> TrainState:
    """The state of a checkpoint, placed on the assembly's devices. Zeros for adapters that have ended."""
    stored = read_tensors(files, STATE_FILE)
    states: list[TrainState | None] = []
    for member in position.members:
        start = f"{member.name}/"
        own = {name.removeprefix(start): stored.pop(name) for name in list(stored) if name.startswith(start)}
        if own and not position.has_state(member):
            raise _does_not_fit(f"{start}{min(own)}", where)
        has_state = position.has_state(member)
        states.append(_member_state(own, assembly.member_shapes, start, where) if has_state else None)
    if stored:
        raise _does_not_fit(min(stored), where)
    put = jax.tree.map(
        lambda array, leaf: put_array(array, leaf.sharding), assembly.join(states), assembly.state_shapes
    )
    placed: TrainState = put
    return placed._replace(key=jax.random.wrap_key_data(placed.key))


def _member_state(stored: Mapping[str, np.ndarray], shapes: TrainState, start: str, where: str) -> TrainState:
    """The state of one adapter on the host, from arrays by name."""
    by_name = by_layer(stored)
    as_stored = shapes._replace(key=jax.eval_shape(jax.random.key_data, shapes.key))

    def read(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        parts = [by_name.pop(part) for part in layer_names(name) if part in by_name]
        is_whole = len(parts) == len(layer_names(name)) and len({part.shape for part in parts}) == 1
        array = (np.stack(parts) if _SLICE.search(name) else parts[0]) if is_whole else None
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise _does_not_fit(f"{start}{name}", where)
        return array

    leaves = [read(name, leaf) for name, leaf in named_arrays(as_stored)]
    if by_name:
        raise _does_not_fit(f"{start}{min(by_name)}", where)
    state: TrainState = jax.tree.unflatten(jax.tree.structure(as_stored), leaves)
    return state


def _does_not_fit(name: str, where: str) -> TrilloraError:
    return TrilloraError(
        f"The checkpoint's {name} does not fit this run.",
        where=where,
        do="use the train.optimizer and the engine options of the original run (see its resolved.yaml)",
    )


def read_kept(files: Mapping[str, bytes], assembly: Assembly, position: Position, where: str) -> Kept:
    """What the adapters leave if the run ends now. One that was not evaluated and has not ended leaves nothing yet."""
    if len(position.members) == 1:
        [member] = position.members
        if member.is_running and member.best_step is None:
            return {}
        layout = assembly.model.adapter_layout
        return {member.name: unstack(fit_adapter(read_adapter(files[WEIGHTS_FILE]), layout, where), layout)}
    return _kept_of_several(files, [member.name for member in position.members])


def _kept_of_several(files: Mapping[str, bytes], names: Sequence[str]) -> Kept:
    kept: Kept = {}
    for path, array in read_tensors(files, KEPT_FILE).items():
        name, _, matrix = path.partition("/")
        if name not in names:
            raise fault(KEPT_FILE, f"{name} is not one of the adapters.")
        kept.setdefault(name, {})[matrix] = array
    return kept


def layer_names(name: str) -> list[str]:
    """The names of an array's layers, if equal layers are stacked in it. Which are stacked depends on the options of
    the engine, and these on the hardware, so that arrays are read by layer.

    >>> layer_names("optimizer/0/mu/model.layers.1:6:2.mlp.up_proj.lora_a")[1]
    'optimizer/0/mu/model.layers.3.mlp.up_proj.lora_a'
    """
    return [_SLICE.sub(f".{number}.", name, count=1) for number in _layers(name)] or [name]


def by_layer(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without stacked arrays. A name may say anything: it is believed if the array has as many layers."""
    flat: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        is_stacked = array.ndim > 0 and 0 < len(array) == len(_layers(name))
        flat |= dict(zip(layer_names(name), array, strict=True)) if is_stacked else {name: array}
    return flat


def _layers(name: str) -> range:
    """The layers that are stacked in an array; none if it is not stacked."""
    found = _SLICE.search(name)
    return range(*map(int, found.groups())) if found else range(0)


def read_facts(files: Mapping[str, bytes]) -> CheckpointFacts:
    """The content of `FACTS_FILE`."""
    parse_json(files[FACTS_FILE], dict[str, Any], where=FACTS_FILE, do=DO)  # bounded, and nothing but JSON
    try:
        return _FACTS.validate_json(files[FACTS_FILE])
    except ValidationError as error:
        raise fault(FACTS_FILE, f"This file is not as expected: {first_problem(error)}.") from error


def find_fault(step: int, files: dict[str, bytes]) -> str | None:
    """What is wrong with the files of a checkpoint whose checksums are right; None if they are what a run writes. It
    does not depend on the recipe: `from_files` compares shapes with the run's."""
    try:
        _check(step, files)
    except TrilloraError as error:
        return f"{error.where or ''}: {error.what}".removeprefix(": ").removesuffix(".")
    return None


def _check(step: int, files: dict[str, bytes]) -> None:
    expected = FILES_OF_SEVERAL if KEPT_FILE in files else FILES
    for name in sorted({*expected} ^ files.keys()):
        raise fault(name, "It is missing." if name in expected else "It does not belong to a checkpoint.")
    facts = read_facts(files)
    if facts.position.global_step != step:
        raise fault(FACTS_FILE, f"position.global_step is {facts.position.global_step}, not {step}.")
    if (len(facts.position.members) > 1) != (KEPT_FILE in files):
        raise fault(FACTS_FILE, "position.members are not the adapters of this checkpoint.")
    if KEPT_FILE in files:
        _kept_of_several(files, [member.name for member in facts.position.members])
    else:
        config = parse_json(files[CONFIG_FILE], AdapterConfig, where=CONFIG_FILE, do=DO)
        _check_options(config, facts.options)
        spec_of(config, {name: a.shape for name, a in read_adapter(files[WEIGHTS_FILE]).items()}, WEIGHTS_FILE)
    for file in expected:
        if file.endswith(".safetensors"):
            _check_values(files, file)
    check_metrics(files[METRICS_FILE])


def _check_values(files: Mapping[str, bytes], file: str) -> None:
    for name, array in read_tensors(files, file).items():
        if file != STATE_FILE and array.dtype != np.float32:
            raise fault(file, f"{name} is not float32.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise fault(file, f"{name} has values that are not finite.")


def check_metrics(lines: bytes) -> None:
    for number, line in enumerate(lines.splitlines(), 1):
        _check_metric(line, number)


def _check_options(config: AdapterConfig, options: dict[str, Any]) -> None:
    """The adapter's configuration has the recipe's values. The values of `lora.from` are not in the recipe."""
    used = {"dropout": config.lora_dropout, "rslora": config.use_rslora}
    given = {option: options.get(f"lora.{option}", value) for option, value in used.items()}
    if "lora.rank" in options and "lora.alpha" in options:
        spec = LoraSpec(rslora=config.use_rslora, init=options.get("lora.init", "default"))
        layer = spec.in_file(LayerLora(options["lora.rank"], options["lora.alpha"]))
        used |= {"rank": config.r, "alpha": config.lora_alpha}
        given |= {"rank": layer.rank, "alpha": layer.alpha}
    for option, value in used.items():
        if given[option] != value:
            raise fault(CONFIG_FILE, f"Its {option} is {value}, but {FACTS_FILE} has {given[option]!r}.")


def read_tensors(files: Mapping[str, bytes], name: str) -> dict[str, np.ndarray]:
    try:
        return load(files[name])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:  # KeyError: a type that numpy does not have
        raise fault(name, f"It is not a valid safetensors file: {error}.") from error


def _check_metric(line: bytes, number: int) -> None:
    try:
        metric = json.loads(line)
        if metric["kind"] not in METRICS:
            raise ValueError(f"unknown kind {metric['kind']}")
        if metric["kind"] == "step":
            float(metric["loss"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise fault(METRICS_FILE, f"Line {number} is not a metric: {type(error).__name__}: {error}.") from error


_FACTS = TypeAdapter(CheckpointFacts)


def fault(file: str, what: str) -> TrilloraError:
    return TrilloraError(what, where=file, do=DO)


def facts_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False)


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Every array with its path in the tree."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
