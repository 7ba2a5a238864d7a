"""Converts the training state to files and back: the adapter in PEFT's format, the optimizer state, the progress.

The adapter is stored by parameter name, so a checkpoint is also an adapter that PEFT can load. All arrays are stored
unsharded, so a run can resume on another number of devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load, save

from trillora.devices.mesh import replicated
from trillora.engine.step import TrainState
from trillora.errors import TrilloraError
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_files, fit_adapter, read_adapter
from trillora.model.layout import unstack
from trillora.step.build import Assembly

STATE_FILE, FACTS_FILE, METRICS_FILE = "state.safetensors", "state.json", "metrics.jsonl"
ADAPTER_FILES = (WEIGHTS_FILE, CONFIG_FILE)


def make_copier(assembly: Assembly) -> Callable[[TrainState], TrainState]:
    """A compiled program that copies the state to every device. It returns before the copy is complete; JAX orders the
    copy before the next step, which reuses the memory of the original."""

    def copy(state: TrainState) -> TrainState:
        return jax.tree.map(jnp.copy, state._replace(key=jax.random.key_data(state.key)))

    return jax.jit(copy, out_shardings=replicated(assembly.mesh)).lower(assembly.state_shapes).compile()


def to_files(copied: TrainState, assembly: Assembly, base_name: str, facts: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint. Values that are not finite are an error."""
    state = jax.tree.map(np.asarray, copied)
    model = assembly.model
    adapter = unstack(state.adapter, model.adapter_layout)
    rest = dict(_named(state._replace(adapter=())))
    for name, array in (*adapter.items(), *rest.items()):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise AssertionError(f"{name} is not finite: the step should have been skipped")
    return {
        **adapter_files(adapter, model.module, model.targets, assembly.spec, base_name),
        STATE_FILE: save(rest),
        FACTS_FILE: (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode(),
    }


def from_files(files: dict[str, bytes], assembly: Assembly, where: str) -> TrainState:
    """The state of a checkpoint, placed on the assembly's devices."""
    shapes = assembly.state_shapes
    adapter = fit_adapter(read_adapter(files[WEIGHTS_FILE]), assembly.model.adapter_layout, where)
    stored = load(files[STATE_FILE])
    as_stored = shapes._replace(adapter=(), key=jax.eval_shape(jax.random.key_data, shapes.key))

    def read(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        array = stored.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise TrilloraError(
                f"The checkpoint's {name} does not fit this run.",
                where=where,
                do="use the train.optimizer and engine.layers of the original run (see its resolved.yaml)",
            )
        return array

    leaves = [read(name, leaf) for name, leaf in _named(as_stored)]
    state = jax.tree.unflatten(jax.tree.structure(as_stored), leaves)._replace(adapter=adapter)
    key = jax.random.wrap_key_data(jnp.asarray(state.key))
    return jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), state._replace(key=key), shapes)


def read_facts(files: dict[str, bytes]) -> dict[str, Any]:
    return json.loads(files[FACTS_FILE])


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Every array with its path in the tree."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
