"""Converts the training state to files and back: the adapter in PEFT's format, the optimizer state, the progress.

The adapter is stored by parameter name, so a checkpoint is also an adapter that PEFT can load. All arrays are stored
unsharded, so a run can resume on another number of devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trillora.devices.mesh import put_array, replicated
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.events import METRICS
from trillora.files.read_json import parse_json
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
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import Attention, Backend, Dtype, Kernels, Layers, Matmul, Quantize, Remat
from trillora.runs.files import METRICS_FILE
from trillora.step.background import compile_program
from trillora.step.build import Assembly
from trillora.training.divergence import DivergenceMonitor

_SLICE = re.compile(r"\.(\d{1,6}):(\d{1,6}):([1-9]\d{0,5})\.")  # of stacked layers (`model.layout`)
STATE_FILE, FACTS_FILE = "state.safetensors", "state.json"
ADAPTER_FILES = (WEIGHTS_FILE, CONFIG_FILE)
FILES = (*ADAPTER_FILES, STATE_FILE, FACTS_FILE, METRICS_FILE)
DO = "resume from an earlier checkpoint, or restore the file from a copy"


class StrictFacts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class MeshFacts(StrictFacts):
    """`MeshSection`, without its defaults."""

    data: PositiveInt
    fsdp: PositiveInt
    tensor: PositiveInt
    adapter: PositiveInt = 1  # not written if there is one


class SettingsFacts(StrictFacts):
    """`StepSettings` as JSON."""

    backend: Backend
    num_devices: PositiveInt
    mesh: MeshFacts
    dtype: Dtype
    layers: Layers
    attention: Attention
    loss_chunk: PositiveInt
    remat: Remat
    micro_batch_size: PositiveInt
    adapters_at_once: PositiveInt
    quantize: Quantize
    document_room: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None
    matmul: Matmul
    kernels: Kernels

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        mesh = self.mesh
        if mesh.data * mesh.fsdp * mesh.tensor * mesh.adapter != self.num_devices:
            raise ValueError("the mesh does not have num_devices")
        return self


class StageFacts(StrictFacts):
    """`ResolvedStage` as JSON."""

    name: str
    settings: SettingsFacts
    template_date: str | None
    reasons: dict[str, str]

    @field_validator("reasons")
    @classmethod
    def _check_reasons(cls, reasons: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(reasons.keys() - StepSettings.OPTIONS.keys() - {"every_steps", "template_date"}):
            raise ValueError(f"{unknown[0]} is not decided automatically")
        return reasons


class ResolvedFacts(StrictFacts):
    """`ResolvedRecipe` as JSON."""

    stages: list[StageFacts] = Field(min_length=1)
    evaluate_every: PositiveInt


def check_health() -> Any:
    """A validator of the field `health`. Written by the dataclass and read by it, a value may have one form only."""

    def check(health: dict[str, Any]) -> dict[str, Any]:
        try:
            read = TypeAdapter(DivergenceMonitor).validate_python(health)
        except ValidationError as error:
            raise ValueError(f"its {error.errors()[0]['loc'][0]} has a wrong type") from None
        if facts_json(read.to_dict()) != facts_json(health):
            raise ValueError("it has a wrong type or an unknown field")
        return health

    return field_validator("health")(check)


class PositionFacts(StrictFacts):
    """`Position` as JSON."""

    health: dict[str, Any]
    stage: NonNegativeInt
    step: NonNegativeInt
    global_step: NonNegativeInt
    measured_at: NonNegativeInt | None
    best_loss: float | None
    best_step: PositiveInt | None
    num_worse: NonNegativeInt
    stage_is_over: bool

    _check_health = check_health()

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """No part of a run is ahead of the run."""
        if self.step > self.global_step or (self.best_step or 0) > self.global_step:
            raise ValueError("it has a step after global_step")
        if (self.measured_at or 0) > self.step:
            raise ValueError("measured_at is after step")
        if (self.best_loss is None) != (self.best_step is None):
            raise ValueError("best_loss and best_step must both be set, or none of them")
        return self


class CheckpointFacts(StrictFacts):
    """The content of `FACTS_FILE`. See `manifest.of_checkpoint` for what it is used for."""

    run: str  # the id of the run
    identity: dict[str, str]
    options: dict[str, Any]
    resolved: ResolvedFacts
    devices: str
    libraries: dict[str, str]
    position: PositionFacts

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if self.position.stage > len(self.resolved.stages):
            raise ValueError("position.stage is not one of the stages")
        return self


def make_copier(assembly: Assembly) -> Callable[[TrainState], TrainState]:
    """A compiled program that copies the state to every device. It returns before the copy is complete; JAX orders the
    copy before the next step, which reuses the memory of the original."""

    def copy(state: TrainState) -> TrainState:
        return jax.tree.map(jnp.copy, state._replace(key=jax.random.key_data(state.key)))

    return compile_program(jax.jit(copy, out_shardings=replicated(assembly.mesh)).lower(assembly.state_shapes))


def to_files(copied: TrainState, assembly: Assembly, base_name: str, facts: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint. Values that are not finite are an error."""
    state = jax.tree.map(np.asarray, copied)
    model = assembly.model
    adapter = unstack(state.adapter, model.adapter_layout)
    rest = dict(named_arrays(state._replace(adapter=())))
    for name, array in (*adapter.items(), *rest.items()):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise AssertionError(f"{name} is not finite: the step should have been skipped")
    return {
        **adapter_files(adapter, model.module, model.targets, assembly.spec, base_name),
        STATE_FILE: save(rest),
        FACTS_FILE: (facts_json(facts, indent=1) + "\n").encode(),
    }


def from_files(files: dict[str, bytes], assembly: Assembly, where: str) -> TrainState:
    """The state of a checkpoint, placed on the assembly's devices."""
    shapes = assembly.state_shapes
    adapter = fit_adapter(read_adapter(files[WEIGHTS_FILE]), assembly.model.adapter_layout, where)
    stored = by_layer(read_tensors(files, STATE_FILE))
    as_stored = shapes._replace(adapter=(), key=jax.eval_shape(jax.random.key_data, shapes.key))
    names = {part for name, _ in named_arrays(as_stored) for part in layer_names(name)}

    def read(name: str, leaf: jax.ShapeDtypeStruct | None) -> np.ndarray:
        parts = [stored[part] for part in layer_names(name) if part in stored]
        is_whole = len(parts) == len(layer_names(name)) and len({part.shape for part in parts}) == 1
        array = (np.stack(parts) if _SLICE.search(name) else parts[0]) if is_whole else None
        if array is None or leaf is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise TrilloraError(
                f"The checkpoint's {name} does not fit this run.",
                where=where,
                do="use the train.optimizer and the engine options of the original run (see its resolved.yaml)",
            )
        return array

    for extra in sorted(stored.keys() - names):
        read(extra, None)
    leaves = [read(name, leaf) for name, leaf in named_arrays(as_stored)]
    state = jax.tree.unflatten(jax.tree.structure(as_stored), leaves)._replace(adapter=adapter)
    placed: TrainState = jax.tree.map(lambda array, leaf: put_array(array, leaf.sharding), state, shapes)
    return placed._replace(key=jax.random.wrap_key_data(placed.key))


def layer_names(name: str) -> list[str]:
    """The names of an array's layers, if equal layers are stacked in it. Which are stacked depends on the options of
    the engine, and these on the hardware, so that arrays are read by layer.

    >>> layer_names("optimizer/0/mu/model.layers.1:6:2.mlp.up_proj.lora_a")[1]
    'optimizer/0/mu/model.layers.3.mlp.up_proj.lora_a'
    """
    return [_SLICE.sub(f".{number}.", name, count=1) for number in _layers(name)] or [name]


def by_layer(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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


def read_facts(files: dict[str, bytes]) -> dict[str, Any]:
    """The content of `FACTS_FILE`. It has the fields and types that `CheckpointFacts` declares."""
    facts = parse_json(files[FACTS_FILE], CheckpointFacts, where=FACTS_FILE, do=DO)
    return facts.model_dump(exclude_unset=True)


def find_fault(step: int, files: dict[str, bytes]) -> str | None:
    """What is wrong with the files of a checkpoint whose checksums are right; None if they are what a run writes. It
    does not depend on the recipe: `from_files` compares shapes with those of the run."""
    try:
        _check(step, files)
    except TrilloraError as error:
        return f"{error.where or ''}: {error.what}".removeprefix(": ").removesuffix(".")
    return None


def _check(step: int, files: dict[str, bytes]) -> None:
    for name in sorted({*FILES} ^ files.keys()):
        raise fault(name, "It is missing." if name in FILES else "It does not belong to a checkpoint.")
    facts = read_facts(files)
    if (found := facts["position"]["global_step"]) != step:
        raise fault(FACTS_FILE, f"position.global_step is {found}, not {step}.")
    config = parse_json(files[CONFIG_FILE], AdapterConfig, where=CONFIG_FILE, do=DO)
    _check_options(config, facts["options"])
    adapter = read_adapter(files[WEIGHTS_FILE])
    spec_of(config, {name: array.shape for name, array in adapter.items()}, WEIGHTS_FILE)
    for name, array in read_tensors(files, WEIGHTS_FILE).items():
        if array.dtype != np.float32:
            raise fault(WEIGHTS_FILE, f"{name} is not float32.")
    for name, array in read_tensors(files, STATE_FILE).items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise fault(STATE_FILE, f"{name} has values that are not finite.")
    check_metrics(files[METRICS_FILE])


def check_metrics(lines: bytes) -> None:
    for number, line in enumerate(lines.splitlines(), 1):
        _check_metric(line, number)


def _check_options(config: AdapterConfig, options: dict[str, Any]) -> None:
    """The adapter's configuration has the values of the recipe. Those of `lora.from` are not in the recipe."""
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


def fault(file: str, what: str) -> TrilloraError:
    return TrilloraError(what, where=file, do=DO)


def facts_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False)


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Every array with its path in the tree."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
