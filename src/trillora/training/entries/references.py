"""What the reference thinks of a stage's answers, computed once before its first step.

    references = References(stage, assembly)                       # compiles its programs
    references.fill(state.reference, base, store, check, listener)
    stage.batches.batch(0)["reference"]                            # log-probabilities of the trained tokens [B, T]

`train.precompute_ref_log_probs` asks for it. Sequences are the same in every epoch, so a step of the second epoch and
later has one forward pass less. The numbers are kept in the folder of the run, under a digest of what they depend on: a
resumed run reads them, or computes them again if they are gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from trillora.data.batches import Batches
from trillora.data.stage import StageData
from trillora.devices.mesh import local_rows, put_batch
from trillora.events import Listener, Note, Progress, ignore_events
from trillora.files.checkpoints import Checkpoints
from trillora.model.layout import Tree
from trillora.step.build import Assembly
from trillora.step.compile_guard import Planned, Programs, shape_text

FILE = "log_probs.safetensors"  # of every bucket of sequences, by its number


class References:
    """See the module's docstring."""

    def __init__(self, stage: StageData, assembly: Assembly) -> None:
        self._batches, self._mesh = stage.batches, assembly.mesh
        self._num_rows = assembly.micro_batch_size  # sequences at once
        shapes = reference_shapes(stage.batches, self._num_rows)
        programs = {shape: assembly.compile_reference(*shape) for shape in shapes}
        self._programs = Programs(f"The reference of stage {stage.name}", programs)

    def fill(
        self,
        reference: Tree,
        base: Tree,
        store: Checkpoints | None,
        check: Callable[[], None],
        listener: Listener,
    ) -> None:
        """Gives the numbers to the batches. `check` is called before every batch; it may raise to abandon the work.
        `store` keeps them for the next start."""
        found = self._stored(store) if store is not None else None
        if found is None:
            found = self._computed(reference, base, check, listener)
            if store is not None:
                with store.reported("written"):
                    store.write(0, {FILE: save({str(number): array for number, array in enumerate(found)})})
        self._batches.references = found

    def _computed(
        self, reference: Tree, base: Tree, check: Callable[[], None], listener: Listener
    ) -> list[NDArray[np.float32]]:
        num_done, total = 0, self._batches.num_rows
        listener(Note(f"The reference reads {total:,} sequences, once"))
        found = [np.zeros(shape, np.float32) for shape in self._batches.shapes]
        for bucket, rows in self._parts():
            check()
            whole = [*rows, *[None] * (self._num_rows - len(rows))]
            own = self._batches.sequences(bucket, [whole[place] for place in local_rows(self._num_rows, self._mesh)])
            values = self._programs(reference, base, put_batch(own, self._mesh, self._num_rows))
            found[bucket][rows] = np.asarray(jax.device_get(values))[: len(rows)]
            num_done += len(rows)
            listener(Progress("reference", num_done, total))
        return found

    def _parts(self) -> Iterator[tuple[int, list[int]]]:
        for bucket, (num_rows, _) in enumerate(self._batches.shapes):
            for first in range(0, num_rows, self._num_rows):
                yield bucket, list(range(first, min(first + self._num_rows, num_rows)))

    def _stored(self, store: Checkpoints) -> list[NDArray[np.float32]] | None:
        newest = store.newest_valid(ignore_events)
        arrays = load(newest[1][FILE]) if newest is not None and newest[1].keys() == {FILE} else {}
        shapes = self._batches.shapes
        found = [arrays.get(str(number)) for number in range(len(shapes))]
        return _checked(found, shapes)


def _checked(
    found: Sequence[NDArray[np.float32] | None], shapes: Sequence[tuple[int, int]]
) -> list[NDArray[np.float32]] | None:
    arrays = [array for array in found if array is not None]
    are_right = [(array.shape, array.dtype) for array in arrays] == [(shape, np.float32) for shape in shapes]
    return arrays if are_right and all(np.isfinite(array).all() for array in arrays) else None


def digest_of(facts: str, reference: Tree) -> str:
    """Of what the numbers depend on: `facts` about the run, and the adapter."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(reference):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(jax.device_get(reference[name])).data)
    return digest.hexdigest()


def reference_shapes(batches: Batches, num_rows: int) -> list[tuple[int, int]]:
    return [(num_rows, length) for length in batches.lengths]


def planned(stage: StageData, num_rows: int) -> Planned:
    shapes = reference_shapes(stage.batches, num_rows)
    return Planned(f"the reference of stage {stage.name}", len(shapes), ", ".join(map(shape_text, shapes)))
