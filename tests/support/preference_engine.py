"""Our steps of preferences with the model, the adapter and the tokens of a run of TRL's (`trl_reference`).

engine = Engine(start)
loss, metrics, gradients = engine.first_step({"loss": "ipo"}, run.batches[0])
losses, adapter = engine.train({"loss": "ipo", "learning_rate": 1e-3}, run.batches)
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import AutoConfig
from trl_reference import Batch

from trillora.devices.mesh import MeshShape, make_mesh, replicated
from trillora.engine.step import divided, initial_state
from trillora.model.adapter_parameters import name_in_file
from trillora.model.adapters import fit_adapter, load_adapter
from trillora.model.layout import unstack
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import MeshSection, StageRecipe, stages_of
from trillora.step.build import Assembly, assemble
from trillora.step.loss import objective

OTHER = objective.OTHER
SEQUENCES, LENGTH, SHORT = 2, 256, 64  # sequences of a batch, and their tokens
CHUNK = 40  # positions of a sequence whose logits exist together: not all answers are in the first chunk
Tree = dict[str, jax.Array]
Numbers = dict[str, np.ndarray]  # by the names in an adapter's file


class Engine:
    """The model's part of a step is one program for all losses; the losses come from recipes."""

    def __init__(self, start: Path) -> None:
        self._config = AutoConfig.from_pretrained(start / "base")
        self._steps: dict[str, tuple[Any, Any]] = {}
        model = self._assembly(recipe_of({})).model
        self._layout = model.adapter_layout
        self.base = load_weights(
            start / "base", model.module, model.layout, dict.fromkeys(model.layout, replicated(_one_device()))
        )
        self.adapter = jax.device_put(fit_adapter(load_adapter(start / "adapter")[1], self._layout, str(start)))
        # With B = 0 the model is the base.
        self.nothing = {key: array * (not key.endswith("lora_b")) for key, array in self.adapter.items()}
        log_probs = objective.log_prob_function(model, CHUNK, packed=True)
        self._log_probs = jax.jit(log_probs)
        self._pull_back = jax.jit(
            lambda adapter, base, batch, cotangent: jax.vjp(lambda a: log_probs(a, base, batch), adapter)[1](cotangent)
        )

    def first_step(self, train: dict[str, Any], batch: Batch) -> tuple[float, dict[str, float], Numbers]:
        """Loss, metrics and gradients; the reference is the base model."""
        arrays, policy, reference = _with_others(batch), {}, {}
        for name, part in (("rows", batch), ("others", batch.others)):
            if part is not None:
                policy[name], reference[name] = (
                    self._log_probs(adapter, self.base, arrays_of(part)) for adapter in (self.adapter, self.nothing)
                )
        loss, metrics, cotangent = _of_log_probs(recipe_of(train), arrays, policy, reference)
        [gradient] = self._pull_back(self.adapter, self.base, arrays_of(batch), cotangent)
        return loss, metrics, self.numbers(gradient)

    def mean_loss(self, batch: Batch) -> float:
        """The mean of the negative log-probabilities of all answers' tokens."""
        arrays = arrays_of(batch)
        return -float(self._log_probs(self.adapter, self.base, arrays).sum() / (arrays["weights"] != 0).sum())

    def train(
        self, train: dict[str, Any], batches: Sequence[Batch], *, continued: bool = False
    ) -> tuple[list[float], Numbers]:
        """The losses of whole steps on short rows, and the adapter after them. `continued`: the reference is the first
        adapter, not the base model."""
        optimizer, step = self._step(train)
        state = initial_state(self.adapter, optimizer, 0, keeps_reference=True)
        state = state._replace(reference=self.adapter if continued else self.nothing)
        losses = []
        for batch in batches:
            state, metrics = step(state, self.base, _with_others(batch, SHORT))
            assert not metrics.skipped
            losses.append(float(metrics.loss))
        return losses, self.numbers(state.adapter)

    def _step(self, train: dict[str, Any]) -> tuple[Any, Any]:
        """The optimizer and the compiled step, which runs share."""
        key = repr(sorted(train.items()))
        if key not in self._steps:
            assembly = self._assembly(recipe_of(train))
            self._steps[key] = assembly.optimizer, jax.jit(assembly.train_step)
        return self._steps[key]

    def _assembly(self, recipe: StageRecipe) -> Assembly:
        settings = StepSettings(
            backend="cpu",
            num_devices=1,
            mesh=MeshSection(),
            dtype="float32",
            layers="scan",
            attention="xla",
            loss_chunk=CHUNK * SEQUENCES,
            remat="none",
            micro_batch_size=SEQUENCES,
        )
        return assemble(recipe, settings, self._config, _one_device(), 1)

    def numbers(self, tree: Tree) -> Numbers:
        flat = unstack(jax.device_get(tree), self._layout)
        return {name_in_file(name): np.asarray(array) for name, array in flat.items()}


def recipe_of(train: dict[str, Any]) -> StageRecipe:
    options = {"loss": "dpo", "batch_size": SEQUENCES, "sequence_length": LENGTH, "steps": 1, "schedule": "constant"}
    recipe = load_recipe({"model": "-", "data": "-", "lora": {"rank": 4, "alpha": 8}, "train": {**options, **train}})
    return stages_of(recipe)[0].recipe


Known = dict[str, jax.Array]  # log-probabilities: of the "rows", and of the "others"


def _of_log_probs(
    recipe: StageRecipe, arrays: Tree, policy: Known, reference: Known
) -> tuple[float, dict[str, float], jax.Array]:
    """Loss, metrics, and the gradient of the loss with respect to the policy's log-probabilities."""

    def look_up(known: Known, _base: None, batch: Tree) -> jax.Array:
        is_rows = "others" not in known or any(name.startswith(OTHER) for name in batch)
        return known["rows" if is_rows else "others"]

    with unittest.mock.patch.object(objective, "log_prob_function", lambda *_, **__: look_up):
        found = objective.objective_of(cast(Any, None), recipe, CHUNK)

    def mean_loss(policy: Known, reference: Known) -> tuple[jax.Array, dict[str, jax.Array]]:
        counts = found.counts(arrays)
        if found.before is not None:
            counts = counts._replace(means=found.before(policy, reference, None, arrays))
        loss, means = found.sums(policy, reference, None, arrays, cast(Any, None), counts)
        return loss / counts.divisor, divided({**counts.means, **means})

    (loss, metrics), gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(policy, reference)
    return float(loss), {name: float(value) for name, value in metrics.items()}, gradient["rows"]


def _one_device() -> Mesh:
    return make_mesh(jax.devices()[:1], MeshShape())


def _with_others(batch: Batch, length: int = LENGTH) -> Tree:
    others = {} if batch.others is None else arrays_of(batch.others, length)
    return arrays_of(batch, length) | {f"{OTHER}{name}": array for name, array in others.items()}


def arrays_of(batch: Batch, length: int = LENGTH) -> Tree:
    """Our arrays. Each sequence has half of the pairs, or of the answers with a label, one document after another."""
    count = len(batch.tokens)
    order, signs = list(range(count)), [1 if label else -1 for label in batch.labels]
    if not batch.labels:  # the chosen answers come first
        order = [place for pair in range(count // 2) for place in (pair, pair + count // 2)]
        signs = [1] * (count // 2) + [-1] * (count // 2)
    names = ("tokens", "targets", "weights", "segments", "positions")
    arrays = {name: np.zeros((SEQUENCES, length), objective.BATCH_DTYPES[name]) for name in names}
    for number, places in enumerate(np.split(np.array(order), SEQUENCES)):
        end = 0
        for segment, place in enumerate(places, start=1):
            tokens, mask = np.array(batch.tokens[place]), np.array(batch.masks[place])
            start, end = end, end + len(tokens)
            arrays["tokens"][number, start:end] = tokens
            arrays["segments"][number, start:end] = segment
            arrays["positions"][number, start:end] = range(len(tokens))
            arrays["targets"][number, start : end - 1] = tokens[1:] * mask[1:]
            arrays["weights"][number, start : end - 1] = signs[place] * mask[1:]
    return {name: jnp.asarray(array) for name, array in arrays.items()}
