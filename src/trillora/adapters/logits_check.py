"""Compares a merged adapter with the definition of its merge: the logits of both on fixed prompts.

The adapter runs as any adapter does. The definition is added to the base model's weights, W + D, and runs without an
adapter. Both use one program in float32, with the model's own layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from trillora.devices.mesh import MeshShape, find_devices, make_mesh
from trillora.errors import TrilloraError
from trillora.events import Listener
from trillora.files.hub import find_cached
from trillora.model.adapters import fit_adapter, fitting
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Tree
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.embedded import SMOLLM2_HUB_ID
from trillora.model.loading.source import OpenModel, weight_files
from trillora.model.loading.weights import load_weights
from trillora.model.lora import LoraSpec
from trillora.model.lora_spec import AdapterDoesNotFit
from trillora.recipe.lora import RopeSection
from trillora.recipe.schema import EMBEDDED
from trillora.step.decisions import memory_limit
from trillora.step.shardings import shard_adapter, weight_shardings

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(first, second):\n    return first +",
    "Write a short letter to a friend about the weather.",
)
NUM_TOKENS = 12  # of each prompt
FULL_MEMORY = 0.6  # fraction of a device's memory that the base may need in float32


@dataclass(frozen=True)
class LogitsCheck:
    """Root mean squares over all logits."""

    difference: float  # between the merged adapter and the definition
    change: float  # between the definition and the base model
    logits: float  # of the definition


def compare_logits(
    base_name: str,
    spec: LoraSpec,
    adapter: dict[str, np.ndarray],
    definition: Callable[[str], np.ndarray],
    listener: Listener,
    base_digest: str | None = None,
    rope: RopeSection | None = None,
) -> LogitsCheck | str:
    """`definition` returns the change [outputs, inputs] of a layer; `base_digest` is what a run recorded; `rope`
    scales the base's positions. Returns the reason if the base cannot be used."""
    try:
        opened = open_local(base_name, rope)
        if opened is None:
            return f"the base model {base_name} is not on this machine"
        if base_digest is not None and base_digest != weights_digest(opened.folder, weight_files(opened.folder)):
            return f"the base model {base_name} has changed since the adapters were trained on it"
        return _compare(opened, base_name, spec, adapter, definition, listener)
    except AdapterDoesNotFit:
        raise
    except TrilloraError as error:
        return f"the base model cannot be used: {error.what.rstrip('.')}"


def _compare(
    opened: OpenModel,
    base_name: str,
    spec: LoraSpec,
    adapter: dict[str, np.ndarray],
    definition: Callable[[str], np.ndarray],
    listener: Listener,
) -> LogitsCheck | str:
    devices = find_devices("auto", None)[:1]
    mesh = make_mesh(devices, MeshShape())
    with fitting(base_name):
        model = CausalLM(opened.config, ModelOptions(remat="none", mesh=mesh), lora=spec)
    limit = memory_limit(devices)
    if limit is not None and sum(leaf.num_bytes for leaf in model.layout.values()) > FULL_MEMORY * limit:
        return f"the base model {base_name} in float32 does not fit into memory"
    if any(f"{name}.weight" not in _names(model) for name in model.targets):
        return "a changed weight is shared with another layer"
    fitted = fit_adapter(adapter, model.adapter_layout, where=base_name)
    base: Tree = load_weights(opened.folder, model.module, model.layout, weight_shardings(model, mesh), listener)
    own = jax.device_put(fitted, shard_adapter(model.adapter_layout, mesh))
    nothing = jax.tree.map(jnp.zeros_like, own)
    inputs = {"tokens": jnp.asarray(_tokens(opened))}
    with jax.default_matmul_precision("highest"):  # accelerators round float32 matmuls to fewer digits by default
        run = jax.jit(model.logits)
        of_adapter, of_base = (np.asarray(run(base, tree, inputs)) for tree in (own, nothing))
        _add(base, model, definition)
        of_definition = np.asarray(run(base, nothing, inputs))
    if not np.isfinite(of_definition).all():
        return "the logits of the definition are not finite"
    return LogitsCheck(
        _root_mean_square(of_adapter - of_definition),
        _root_mean_square(of_definition - of_base),
        _root_mean_square(of_definition),
    )


def open_local(base_name: str, rope: RopeSection | None = None) -> OpenModel | None:
    """The base model if it is on this machine. Nothing is downloaded because an adapter names it, and no code of the
    model is run."""
    if base_name in (EMBEDDED, SMOLLM2_HUB_ID):
        folder: str | None = EMBEDDED
    elif os.path.isdir(os.path.expanduser(base_name)):
        folder = base_name
    else:
        cached = find_cached(base_name)
        folder = str(cached) if cached else None
    return OpenModel.open(folder, revision=None, trust_remote_code=False, rope=rope) if folder else None


def _names(model: CausalLM) -> set[str]:
    return {name for leaf in model.layout.values() for name in leaf.names}


def _add(base: Tree, model: CausalLM, definition: Callable[[str], np.ndarray]) -> None:
    """Adds the definition to the weights, in place, one array at a time."""
    targets = {f"{name}.weight": name for name in model.targets}
    for key, leaf in model.layout.items():
        if not targets.keys() & set(leaf.names):
            continue
        parts = [_stored_change(model, targets.get(name), leaf.part_shape, definition) for name in leaf.names]
        change = np.stack(parts) if leaf.stacked else parts[0]
        base[key] = base[key] + jax.device_put(change, base[key].sharding)


def _stored_change(
    model: CausalLM, layer: str | None, shape: tuple[int, ...], definition: Callable[[str], np.ndarray]
) -> np.ndarray:
    if layer is None:
        return np.zeros(shape, np.float32)
    return model.as_stored(layer, definition(layer)).astype(np.float32)


def _tokens(opened: OpenModel) -> np.ndarray:
    """The prompts [B, T], each repeated until it has enough tokens. A tokenizer may have more tokens than the model."""
    rows = [opened.tokenizer(prompt)["input_ids"] or [0] for prompt in PROMPTS]
    tokens = np.stack([np.resize(np.array(row, np.int32), NUM_TOKENS) for row in rows])
    return np.minimum(tokens, opened.config.get_text_config().vocab_size - 1)


def _root_mean_square(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
