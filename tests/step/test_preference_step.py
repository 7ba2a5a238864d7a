"""The step of a loss of preferences: equal to the formula over whole logits, and independent of how a batch is cut."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.preference.answers import Pairs, counts_of_pairs
from trillora.engine.preference.losses import PAIR_LOSSES, LossNumbers, sum_of_pairs
from trillora.engine.step import TrainState, initial_state
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import MeshSection, stages_of
from trillora.step.build import Assembly, assemble

LENGTH, ROWS = 48, 4


def assembly_of(
    train: dict[str, Any], *, rows: int = ROWS, length: int = LENGTH, micro: int | None = None, mesh: Any = None
) -> Assembly:
    options = {"batch_size": rows, "sequence_length": length, "steps": 4, "learning_rate": 1e-2, **train}
    recipe = load_recipe({"model": "-", "data": "-", "lora": {"rank": 4}, "train": options})
    shape = MeshSection(**(mesh or {}))
    settings = StepSettings(
        backend="cpu",
        num_devices=shape.size,
        mesh=shape,
        dtype="float32",
        layers="scan",
        attention="xla",
        loss_chunk=24,
        remat="none",
        micro_batch_size=micro or rows,
    )
    devices = make_mesh(jax.devices()[: shape.size], MeshShape(**shape.model_dump()))
    [stage] = stages_of(recipe)
    return assemble(stage.recipe, settings, tiny_run.llama(), devices, 4)


def documents(seed: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of different lengths."""
    numbers = np.random.default_rng(seed)
    sizes = [(int(numbers.integers(2, 6)), int(numbers.integers(1, 7))) for _ in range(count)]
    return [(numbers.integers(5, 90, a).tolist(), numbers.integers(5, 90, b).tolist()) for a, b in sizes]


Row = list[tuple[list[int], list[int], float]]  # documents of a sequence: prompt, completion, weight


def batch_of(rows: list[Row], length: int = LENGTH) -> dict[str, np.ndarray]:
    names = {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "segments": np.int32,
        "positions": np.int32,
    }
    batch = {name: np.zeros((len(rows), length), dtype) for name, dtype in names.items()}
    for number, row in enumerate(rows):
        start = 0
        for segment, (prompt, completion, weight) in enumerate(row, start=1):
            text = prompt + completion
            end, first = start + len(text), start + len(prompt) - 1
            batch["tokens"][number, start:end] = text
            batch["segments"][number, start:end] = segment
            batch["positions"][number, start:end] = range(len(text))
            batch["targets"][number, first : end - 1] = completion
            batch["weights"][number, first : end - 1] = weight
            start = end
    return batch


@functools.cache
def pairs(count: int = 8) -> list[Row]:
    """One pair per sequence: a chosen and a rejected answer to the same prompt."""
    chosen, rejected = documents(1, count), documents(2, count)
    return [
        [(prompt, good, 1.0), (prompt, bad, -1.0)] for (prompt, good), (_, bad) in zip(chosen, rejected, strict=True)
    ]


def packed(rows: list[Row], per_row: int) -> list[Row]:
    return [list(itertools.chain(*rows[start : start + per_row])) for start in range(0, len(rows), per_row)]


def adapter_of(assembly: Assembly, seed: int, size: float = 0.1) -> dict[str, jax.Array]:
    """Both matrices of LoRA are random: with B = 0 policy and reference are equal, and most mistakes cannot be seen."""
    numbers = np.random.default_rng(seed)
    shapes = assembly.state_shapes.adapter
    return {key: jnp.asarray(numbers.normal(0, size, leaf.shape), jnp.float32) for key, leaf in sorted(shapes.items())}


def base_of(assembly: Assembly) -> dict[str, jax.Array]:
    numbers = np.random.default_rng(0)
    return {
        key: jnp.asarray(
            1 + numbers.normal(0, 0.1, leaf.shape) if "norm" in key else numbers.normal(0, 0.1, leaf.shape), leaf.dtype
        )
        for key, leaf in sorted(assembly.base_shapes.items())
    }


def state_of(assembly: Assembly, *, policy: int = 1, reference: int = 2) -> TrainState:
    """The numbers are seeds."""
    state = initial_state(adapter_of(assembly, policy), assembly.optimizer, 0, keeps_reference=True)
    return state._replace(reference=adapter_of(assembly, reference))


def one_step(
    assembly: Assembly, rows: list[Row], other: list[Row] | None = None, **values: Any
) -> tuple[TrainState, Any]:
    batch = batch_of(rows, assembly.batch_shapes["tokens"].shape[1])
    if other is not None:
        batch |= {f"other_{name}": array for name, array in batch_of(other, LENGTH).items()}
    placed = {name: jax.device_put(array, assembly.batch_shapes[name].sharding) for name, array in batch.items()}
    state = jax.device_put(
        values.get("state") or state_of(assembly), jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)
    )
    base = {key: jax.device_put(array, assembly.base_shardings[key]) for key, array in base_of(assembly).items()}
    return jax.jit(assembly.train_step)(state, base, placed)


def log_probs(assembly: Assembly, adapter: Any, base: Any, rows: list[Row]) -> jax.Array:
    """The sum over the completion of each document, alone in a sequence, from whole logits."""
    batch = batch_of([[document] for row in rows for document in row], 16)
    inputs = {name: jnp.asarray(batch[name]) for name in ("tokens", "positions")}
    logits = assembly.model.logits(base, adapter, inputs).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.where(batch["weights"] != 0, chosen, 0).sum(1)


def ratios(assembly: Assembly, adapter: Any, reference: Any, base: Any, rows: list[Row]) -> jax.Array:
    return log_probs(assembly, adapter, base, rows) - log_probs(assembly, reference, base, rows)


def test_dpo_is_the_formula_over_whole_logits_row_by_row() -> None:
    assembly, beta = assembly_of({"loss": "dpo", "beta": 0.3}, rows=2, length=96), 0.3
    state = state_of(assembly)

    def loss(adapter: Any, reference: Any, base: Any) -> tuple[jax.Array, jax.Array]:
        found = ratios(assembly, adapter, reference, base, pairs())
        margins = found[0::2] - found[1::2]
        return -jnp.mean(jax.nn.log_sigmoid(beta * margins)), margins

    (expected, margins), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        state.adapter, state.reference, base_of(assembly)
    )
    _, metrics = one_step(assembly, packed(pairs(), 4))
    assert float(metrics.loss) == pytest.approx(float(expected), rel=2e-6)
    norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in gradient.values())))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=2e-5)
    assert float(metrics.means["rewards/margins"]) == pytest.approx(beta * float(np.mean(margins)), rel=2e-5)
    assert float(metrics.means["rewards/accuracies"]) == np.mean(np.array(margins) > 0)
    assert float(metrics.means["pairs"]) == 8


def test_packing_and_micro_batches_change_nothing() -> None:
    train = {"loss": ["dpo", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5}
    alone, metrics = one_step(assembly_of(train, rows=8), pairs())
    cut, of_cut = one_step(assembly_of(train, rows=8, micro=2), pairs())
    together, of_packed = one_step(assembly_of(train, rows=2, length=96), packed(pairs(), 4))
    for state, found in ((cut, of_cut), (together, of_packed)):
        assert float(found.loss) == pytest.approx(float(metrics.loss), rel=2e-6)
        assert float(found.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=2e-5)
        for name, value in metrics.means.items():
            assert float(found.means[name]) == pytest.approx(float(value), rel=2e-5, abs=1e-6), name
        for key, array in alone.optimizer.mu.items():  # the gradient; Adam's update amplifies rounding
            np.testing.assert_allclose(state.optimizer.mu[key], array, atol=3e-6 * float(jnp.abs(array).max()) + 1e-9)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_every_loss_is_the_same_for_packed_pairs(name: str) -> None:
    """Random log-probabilities, and no model: the sum and its gradient by token."""
    numbers = LossNumbers(beta=0.3, label_smoothing=0.1, ld_alpha=0.5)

    def value(policy: jax.Array, batch: dict[str, jax.Array], reference: jax.Array) -> jax.Array:
        found = Pairs.of(batch, counts_of_pairs(batch))
        return sum_of_pairs([(1.0, PAIR_LOSSES[name])], policy, reference, found, numbers)[0]

    results = []
    for rows, length in ((pairs(), 40), (pairs(), LENGTH), (packed(pairs(), 2), LENGTH), (packed(pairs(), 8), 192)):
        batch = {key: jnp.asarray(array) for key, array in batch_of(rows, length).items()}
        counted = np.asarray(batch["weights"] != 0)
        random = np.random.default_rng(7).uniform(-4, -0.01, (2, int(counted.sum())))
        policy, reference = (np.zeros(counted.shape, np.float32) for _ in range(2))
        policy[counted], reference[counted] = random  # the documents have the same order in every packing
        loss, gradient = jax.value_and_grad(value)(jnp.asarray(policy), batch, jnp.asarray(reference))
        results.append((float(loss), np.asarray(gradient)[counted]))
        assert not np.asarray(gradient)[~counted].any()
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-5, atol=1e-7)
    assert np.count_nonzero(results[0][1]) > len(results[0][1]) / 3  # sft has none for rejected answers


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_eight_devices_equal_one(loss: str, mesh: dict[str, int]) -> None:
    _, metrics = one_step(assembly_of({"loss": loss}, rows=8), pairs())
    _, found = one_step(assembly_of({"loss": loss}, rows=8, mesh=mesh), pairs())
    assert float(found.loss) == pytest.approx(float(metrics.loss), rel=3e-6)
    assert float(found.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=3e-5)


@pytest.mark.parametrize(("loss", "expected"), [("dpo", np.log(2)), ("ipo", 25.0), ("apo_zero", 1.0), ("hinge", 1.0)])
def test_before_the_first_step_nothing_is_preferred(loss: str, expected: float) -> None:
    """B of a new adapter is zero: policy and reference are the same, bit for bit."""
    assembly = assembly_of({"loss": loss}, rows=2, length=96)
    fresh = {key: array * (not key.endswith("lora_b")) for key, array in adapter_of(assembly, 1).items()}
    assert sum(not array.any() for array in fresh.values()) == len(fresh) / 2
    _, metrics = one_step(
        assembly, packed(pairs(), 4), state=initial_state(fresh, assembly.optimizer, 0, keeps_reference=True)
    )
    assert float(metrics.loss) == np.float32(expected)
    assert float(metrics.means["rewards/margins"]) == 0 and float(metrics.means["rewards/accuracies"]) == 0.5
    assert float(metrics.grad_norm) > 0


def labelled() -> tuple[list[Row], list[Row]]:
    """Answers with a label, and each question with the answer of the row before."""
    found = [(prompt, answer, 1.0 if number % 2 else -1.0) for number, (prompt, answer) in enumerate(documents(3, 8))]
    others = [(prompt, found[number - 1][1], 1.0) for number, (prompt, _, _) in enumerate(found)]
    return [[row] for row in found], [[row] for row in others]


def test_kto_is_the_formula_and_its_estimate_is_of_the_whole_batch() -> None:
    train = {"loss": "kto", "beta": 0.2, "undesirable_weight": 0.5}
    rows, others = labelled()
    assembly = assembly_of(train, rows=8)
    state = state_of(assembly, policy=2, reference=1)

    shift = max(0.0, float(ratios(assembly, state.adapter, state.reference, base_of(assembly), others).mean()))
    is_good = np.array([row[0][2] > 0 for row in rows])

    def loss(adapter: Any, reference: Any, base: Any) -> jax.Array:
        rewards = 0.2 * (ratios(assembly, adapter, reference, base, rows) - shift)
        return jnp.mean(jnp.where(is_good, 1 - jax.nn.sigmoid(rewards), 0.5 * (1 - jax.nn.sigmoid(-rewards))))

    expected, gradient = jax.jit(jax.value_and_grad(loss))(state.adapter, state.reference, base_of(assembly))
    norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in gradient.values())))
    for micro in (8, 2):
        _, metrics = one_step(assembly_of(train, rows=8, micro=micro), rows, others, state=state)
        assert float(metrics.loss) == pytest.approx(float(expected), rel=2e-6)
        assert float(metrics.grad_norm) == pytest.approx(norm, rel=3e-5)
        assert max(0.0, float(metrics.means["kl"])) == pytest.approx(shift, rel=2e-5)
    assert shift > 0.1  # the estimate has an effect
