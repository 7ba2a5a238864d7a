"""What the loop calls to train: the compiled step of an entry with its batches.

    for placed in stepper.feed(position.lanes, position.running, range(100)):
        state, results = stepper.step(state, base, placed)
    values = read(results)                  # {0: {"loss": 1.9, ...}, 1: ...}, by number of the adapter

One adapter has the plain step, with one program for every length of its batches. Several share the mapped step
(`step.group`), with one program for every number of adapters at once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from trillora.data.batches import Arrays, Batches
from trillora.devices.mesh import group_sharding, local_rows, put_batch, replicated
from trillora.engine.group import AdapterOptions, Lanes
from trillora.engine.step import StepMetrics, TrainState
from trillora.model.layout import Tree, unstack
from trillora.step.build import Assembly
from trillora.step.compile_guard import Programs, shape_text
from trillora.step.group import GroupAssembly, cut, padding_of
from trillora.training.entries.timeline import Entry

NUM_AHEAD = 2  # batches built before they are needed
Results = list[tuple[Sequence[int], StepMetrics]]  # numbers of adapters and their metrics, on the devices


class Stepper(Protocol):
    """See the module's docstring."""

    @property
    def assembly(self) -> Assembly: ...

    def feed(self, lanes: Sequence[int], running: Sequence[int], steps: range) -> Iterator[Any]:
        """The arguments of these steps, on the devices. `lanes`: the adapters in the step; the `running` change."""

    def shape_of(self, placed: Any) -> str:
        """For an error message."""

    def step(self, state: TrainState, base: Tree, placed: Any) -> tuple[TrainState, Results]: ...

    def adapter(self, state: TrainState, number: int) -> Tree:
        """One adapter on the devices, as the model needs it."""

    def reference(self, state: TrainState, number: int) -> Tree | None:
        """What one adapter is compared with, as the model needs it."""

    def weights(self, state: TrainState, number: int) -> dict[str, np.ndarray]:
        """One adapter on the host, by parameter name, as it is stored."""


class SingleStepper:
    """The step of one adapter."""

    def __init__(
        self, entry: Entry, assembly: Assembly, programs: Programs, copy: Callable[[TrainState], TrainState]
    ) -> None:
        self.assembly, self._batches, self._programs, self._copy = assembly, entry.members[0].batches, programs, copy

    def feed(self, lanes: Sequence[int], running: Sequence[int], steps: range) -> Iterator[dict[str, jax.Array]]:
        return placed_batches(self._batches, steps, self.assembly.mesh)

    def shape_of(self, placed: dict[str, jax.Array]) -> str:
        return shape_text(placed["tokens"].shape)

    def step(self, state: TrainState, base: Tree, placed: dict[str, jax.Array]) -> tuple[TrainState, Results]:
        state, metrics = self._programs(state, base, placed)
        return state, [([0], metrics)]

    def adapter(self, state: TrainState, number: int) -> Tree:
        return state.adapter

    def reference(self, state: TrainState, number: int) -> Tree | None:
        return state.reference

    def weights(self, state: TrainState, number: int) -> dict[str, np.ndarray]:
        whole = jax.tree.map(np.asarray, self._copy(state).adapter)  # the copy is on every device
        return unstack(whole, self.assembly.model.adapter_layout)


class MappedStepper:
    """The step of several adapters: in calls of at most as many as fit in memory at once."""

    def __init__(
        self, entry: Entry, assembly: GroupAssembly, programs: Mapping[int, Any], options: AdapterOptions
    ) -> None:
        """`programs`: number of adapters -> compiled step. `options` are on the devices."""
        self.assembly, self._entry, self._programs, self._options = assembly, entry, programs, options
        self._lane = assembly.compile_lane()

    def feed(self, lanes: Sequence[int], running: Sequence[int], steps: range) -> Iterator[list[Any]]:
        """A step has several calls, each with its lanes and its batch."""
        calls = plan_calls(lanes, len(self._entry.members), list(self._programs))
        everywhere, split = replicated(self.assembly.mesh), group_sharding(self.assembly.mesh)
        placed = [jax.device_put(_lanes_of(call, running), everywhere) for call in calls]

        def put(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, split, array.__getitem__)

        def make(step: int) -> list[Any]:
            rows = [{name: put(array) for name, array in self._rows(call, step).items()} for call in calls]
            return list(zip(calls, placed, rows, strict=True))

        return made_ahead(make, steps)

    def shape_of(self, placed: list[Any]) -> str:
        return ", ".join(shape_text(batch["tokens"].shape) for _, _, batch in placed)

    def step(self, state: TrainState, base: Tree, placed: list[Any]) -> tuple[TrainState, Results]:
        results: Results = []
        for call, lanes, batch in placed:
            state, metrics = self._programs[call.width](state, base, self._options, lanes, batch)
            results.append((call.members, metrics))
        return state, results

    def adapter(self, state: TrainState, number: int) -> Tree:
        return self._lanes(state.adapter, number)[0]

    def reference(self, state: TrainState, number: int) -> Tree | None:
        return None if state.reference is None else self._lanes(state.reference, number)[0]

    def weights(self, state: TrainState, number: int) -> dict[str, np.ndarray]:
        stored = jax.tree.map(np.asarray, self._lanes(state.adapter, number)[1])
        padding = padding_of(self._entry.members, self._entry.members[number].recipe)
        flat = unstack(stored, self.assembly.model.adapter_layout)
        return {name: cut(name, array, padding) for name, array in flat.items()}

    def _lanes(self, adapters_N: Tree, number: int) -> tuple[Tree, Tree]:
        """One adapter with its own scale, and as it is stored."""
        place = jax.device_put(np.int32(number), replicated(self.assembly.mesh))
        found: tuple[Tree, Tree] = self._lane(adapters_N, self._options, place)
        return found

    def _rows(self, call: Call, step: int) -> Arrays:
        batches = [self._entry.members[number].batches.batch(step) for number in call.members]
        empty = {name: np.zeros_like(array) for name, array in batches[0].items()}
        batches += [empty] * len(call.fill)
        return {name: np.stack([batch[name] for batch in batches]) for name in empty}


@dataclass(frozen=True)
class Call:
    """One call of the mapped step: the adapters it trains, and others that only fill the program's width."""

    members: list[int]
    fill: list[int]

    @property
    def width(self) -> int:
        return len(self.members) + len(self.fill)


def plan_calls(lanes: Sequence[int], num_members: int, widths: Sequence[int]) -> list[Call]:
    """Spreads adapters over calls of the widest program, and the rest over the narrowest one that holds it.

    >>> plan_calls([0, 1, 2, 4, 5], 6, [4, 2])
    [Call(members=[0, 1, 2, 4], fill=[]), Call(members=[5], fill=[0])]
    """
    widest = max(widths)
    calls = []
    for first in range(0, len(lanes), widest):
        members = list(lanes[first : first + widest])
        width = min(width for width in widths if width >= len(members))
        others = [number for number in range(num_members) if number not in members]
        calls.append(Call(members, others[: width - len(members)]))
    return calls


def _lanes_of(call: Call, running: Sequence[int]) -> Lanes:
    is_active = [number in running for number in call.members] + [False] * len(call.fill)
    return Lanes(np.array([*call.members, *call.fill], np.int32), np.array(is_active))


def read(results: Results) -> dict[int, dict[str, Any]]:
    """The metrics of a step by number of the adapter. Waits for the step."""
    found: dict[int, dict[str, Any]] = {}
    for members, metrics in results:
        values = jax.tree.map(np.atleast_1d, jax.device_get(metrics)._asdict())
        found |= {member: jax.tree.map(lambda v, i=i: v[i].item(), values) for i, member in enumerate(members)}
    return dict(sorted(found.items()))


def placed_batches(batches: Batches, steps: range, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """The batches of these steps, on the devices."""
    rows = local_rows(batches.batch_size, mesh)
    return made_ahead(lambda step: put_batch(batches.batch(step, rows), mesh, batches.batch_size), steps)


def made_ahead(make: Callable[[int], Any], steps: range) -> Iterator[Any]:
    """What `make` returns for these steps. A thread makes the next ones during the current step."""
    with ThreadPoolExecutor(1) as ahead:
        waiting: collections.deque[Future[Any]] = collections.deque()
        for step in steps:
            waiting.append(ahead.submit(make, step))
            if len(waiting) > NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
