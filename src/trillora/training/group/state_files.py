"""Converts the state of a group of adapters to files and back.

`state.safetensors` holds the arrays of all adapters that are still trained. `adapters.safetensors` holds the weights
that each adapter would leave if the run ended now, by the adapter's name: those of its best evaluation, or its last
ones. So a group needs no checkpoint per adapter to keep the best of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import NonNegativeInt, PositiveInt, model_validator
from safetensors.numpy import save

from trillora.devices.mesh import put_array
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.files.read_json import parse_json
from trillora.runs.files import KEPT_FILE, METRICS_FILE
from trillora.step.background import compile_program
from trillora.step.group import GroupAssembly
from trillora.training.group.position import GroupPosition, Status
from trillora.training.state_files import (
    DO,
    FACTS_FILE,
    STATE_FILE,
    CheckpointFacts,
    StrictFacts,
    check_health,
    check_metrics,
    facts_json,
    fault,
    named_arrays,
    read_tensors,
)

FILES = (KEPT_FILE, STATE_FILE, FACTS_FILE, METRICS_FILE)
Kept = dict[str, dict[str, np.ndarray]]  # adapter's name -> its matrices by parameter name


class MemberFacts(StrictFacts):
    """`MemberPosition` as JSON."""

    health: dict[str, Any]
    step: NonNegativeInt
    status: Status
    reason: str
    measured_at: NonNegativeInt | None
    best_loss: float | None
    best_step: PositiveInt | None
    num_worse: NonNegativeInt
    trial: list[float]

    _check_health = check_health()

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if (self.best_step or 0) > self.step or (self.measured_at or 0) > self.step:
            raise ValueError("it has a step after its last one")
        if (self.best_loss is None) != (self.best_step is None):
            raise ValueError("best_loss and best_step must both be set, or none of them")
        return self


class GroupPositionFacts(StrictFacts):
    """`GroupPosition` as JSON."""

    step: NonNegativeInt
    lanes: list[NonNegativeInt]
    members: list[MemberFacts]

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        running = [number for number, member in enumerate(self.members) if member.status == "running"]
        if not {*running} <= {*self.lanes} <= {*range(len(self.members))} or sorted({*self.lanes}) != self.lanes:
            raise ValueError("lanes are not the numbers of the adapters that are trained")
        for member in self.members:
            if member.step > self.step or (member.status == "running" and member.step != self.step):
                raise ValueError("an adapter is not at the step of the run")
        return self


class GroupFacts(CheckpointFacts):
    """The content of `FACTS_FILE` for a group."""

    position: GroupPositionFacts  # type: ignore[assignment]
    names: list[str]

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        if len(self.names) != len(self.position.members):
            raise ValueError("there is not one name per adapter")
        return self


def make_group_copier(assembly: GroupAssembly) -> Callable[[TrainState, Any], TrainState]:
    """A compiled program that copies the state of the running adapters to every device; of the others, zeros."""

    def copy(state: TrainState, is_running_N: jax.Array) -> TrainState:
        def kept(array: jax.Array) -> jax.Array:
            return jnp.where(is_running_N.reshape(-1, *(1,) * (array.ndim - 1)), array, 0)

        return jax.tree.map(kept, state._replace(key=jax.random.key_data(state.key)))

    everywhere = jax.sharding.NamedSharding(assembly.mesh, jax.sharding.PartitionSpec())
    running = jax.ShapeDtypeStruct((assembly.num_adapters,), jnp.bool_, sharding=everywhere)
    return compile_program(jax.jit(copy, out_shardings=everywhere).lower(assembly.state_shapes, running))


def to_files(copied: TrainState, kept: Kept, facts: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint. Values that are not finite are an error."""
    arrays = dict(named_arrays(jax.tree.map(np.asarray, copied)))
    matrices = {
        f"{name}/{matrix}": np.ascontiguousarray(value) for name, own in kept.items() for matrix, value in own.items()
    }
    for name, array in (*arrays.items(), *matrices.items()):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise AssertionError(f"{name} is not finite: the step should have been skipped")
    return {
        KEPT_FILE: save(matrices),
        STATE_FILE: save(arrays),
        FACTS_FILE: (facts_json(facts, indent=1) + "\n").encode(),
    }


def from_files(
    files: Mapping[str, bytes], assembly: GroupAssembly, names: Sequence[str], where: str
) -> tuple[TrainState, Kept]:
    """The state of a checkpoint, placed on the assembly's devices, and the adapters kept so far."""
    shapes = assembly.state_shapes
    stored = read_tensors(files, STATE_FILE)
    as_stored = shapes._replace(key=jax.eval_shape(jax.random.key_data, shapes.key))
    leaves = []
    for name, leaf in named_arrays(as_stored):
        array = stored.pop(name, None)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise _does_not_fit(name, where)
        leaves.append(array)
    if stored:
        raise _does_not_fit(min(stored), where)
    state = jax.tree.unflatten(jax.tree.structure(as_stored), leaves)
    placed: TrainState = jax.tree.map(lambda array, leaf: put_array(array, leaf.sharding), state, shapes)
    return placed._replace(key=jax.random.wrap_key_data(placed.key)), read_kept(files, names)


def read_kept(files: Mapping[str, bytes], names: Sequence[str]) -> Kept:
    kept: Kept = {}
    for path, array in read_tensors(files, KEPT_FILE).items():
        name, _, matrix = path.partition("/")
        if name not in names:
            raise fault(KEPT_FILE, f"{name} is not one of the adapters.")
        kept.setdefault(name, {})[matrix] = array
    return kept


def read_group_facts(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of `FACTS_FILE`, with the fields and types that `GroupFacts` declares."""
    return parse_json(files[FACTS_FILE], GroupFacts, where=FACTS_FILE, do=DO).model_dump(exclude_unset=True)


def find_group_fault(step: int, files: dict[str, bytes]) -> str | None:
    """What is wrong with the files of a checkpoint whose checksums are right; None if they are what a run writes."""
    try:
        for name in sorted({*FILES} ^ files.keys()):
            raise fault(name, "It is missing." if name in FILES else "It does not belong to a checkpoint of a group.")
        facts = read_group_facts(files)
        if (found := facts["position"]["step"]) != step:
            raise fault(FACTS_FILE, f"position.step is {found}, not {step}.")
        GroupPosition.from_dict(facts["position"])
        read_kept(files, facts["names"])
        for file in (STATE_FILE, KEPT_FILE):
            for name, array in read_tensors(files, file).items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise fault(file, f"{name} has values that are not finite.")
        check_metrics(files[METRICS_FILE])
    except TrilloraError as error:
        return f"{error.where or ''}: {error.what}".removeprefix(": ").removesuffix(".")
    return None


def _does_not_fit(name: str, where: str) -> TrilloraError:
    return TrilloraError(
        f"The checkpoint's {name} does not fit this run.",
        where=where,
        do="use the train.optimizer and the engine options of the original run (see its resolved.yaml)",
    )
