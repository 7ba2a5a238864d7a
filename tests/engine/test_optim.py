"""Optimizers and schedules: equal to optax where optax has them. 8-bit Lion equals a NumPy version of it, and its
difference from Lion in float32 is measured. Every optimizer trains in a real run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from dose import FULL, slow_case
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load, save

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.lion8bit import (
    BLOCK_SIZE,
    Lion8bitState,
    block_scales,
    blocked_shape,
    dequantise,
    quantise,
    rounding_numbers,
    scale_by_lion_8bit,
)
from trillora.engine.optim import OptimizerName, ScheduleName, make_optimizer, make_schedule, scale_by_adafactor
from trillora.engine.step import initial_state, make_train_step, token_objective
from trillora.errors import TrilloraError
from trillora.model.adapters import load_adapter
from trillora.model.layout import Leaf
from trillora.model.loading.source import load_config
from trillora.recipe.load import load_recipe
from trillora.step import shardings
from trillora.step.build import assemble, decayed_leaves
from trillora.training.trainer import train

pytestmark = pytest.mark.core

OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
ROUNDING = 1e-5  # relative: float32 arithmetic in another order, over a few steps
# One block that is not full, several blocks with padding in the last one, stacked layers, stacked experts, a vector.
SHAPES = {"small": (3, 5), "wide": (4, 200), "stack": (3, 8, 40), "experts": (2, 3, 4, 70), "vector": (300,)}


def tree(seed: int, *, spread: bool = False) -> dict[str, np.ndarray]:
    """Normal numbers; `spread`: over six decades, like the gradients of an adapter."""
    generator = np.random.default_rng(seed)
    return {
        key: np.asarray(
            generator.normal(size=shape) * 10 ** (generator.uniform(-6, 0, shape) if spread else 0.0), np.float32
        )
        for key, shape in SHAPES.items()
    }


def num_bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def assert_close(ours: Any, expected: Any) -> None:
    assert ours.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(ours[key], array, rtol=ROUNDING, atol=1e-7, err_msg=key)


# Optimizers of optax


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "reference"), [("adamw", optax.adamw), ("lion", optax.lion)])
def test_adamw_and_lion_equal_optax(name: OptimizerName, reference: Any, weight_decay: float) -> None:
    ours, theirs = make_optimizer(name, weight_decay), reference(0.01, weight_decay=weight_decay)
    params = tree(0)
    state, other = ours.init(params), theirs.init(params)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(5):
        direction, state = update(tree(i + 1), state, params)
        expected, other = their_update(tree(i + 1), other, params)
        assert_close(jax.tree.map(lambda d: -0.01 * d, direction), expected)
        params = optax.apply_updates(params, expected)


def test_adafactor_equals_optax_matrix_by_matrix() -> None:
    """Also for layers stacked on leading dims, which optax by itself might factor."""
    ours, theirs = scale_by_adafactor(), optax.scale_by_factored_rms(min_dim_size_to_factor=2)

    def matrices(tree: dict[str, np.ndarray]) -> dict[str, Any]:
        return {
            f"{key}[{i}]": part
            for key, array in tree.items()
            for i, part in enumerate(array.reshape(-1, *array.shape[-2:]) if array.ndim > 2 else [array])
        }

    params = tree(0)
    state, other = ours.init(params), theirs.init(matrices(params))
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(5):
        direction, state = update(tree(i + 1), state, params)
        expected, other = their_update(matrices(tree(i + 1)), other, matrices(params))
        assert_close(matrices(jax.tree.map(np.asarray, direction)), expected)
    assert len(expected) == 1 + 1 + 3 + 6 + 1


def test_adafactor_equals_optaxs_without_its_learning_rate_scaling_and_clipping() -> None:
    theirs = optax.adafactor(
        0.01, min_dim_size_to_factor=2, multiply_by_parameter_scale=False, clipping_threshold=None, momentum=None
    )
    ours = make_optimizer("adafactor", 0.0)
    params = {"a": tree(0)["wide"]}
    state, other = ours.init(params), theirs.init(params)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(5):
        gradient = {"a": tree(i + 1)["wide"]}
        direction, state = update(gradient, state, params)
        expected, other = their_update(gradient, other, params)
        assert_close(jax.tree.map(lambda d: -0.01 * d, direction), expected)


def test_adafactor_state_is_small_for_an_adapter() -> None:
    adapter = {"lora_a": np.zeros((30, 16, 2048), np.float32), "lora_b": np.zeros((30, 8192, 16), np.float32)}
    assert num_bytes(scale_by_adafactor().init(adapter)) < 0.07 * num_bytes(adapter)  # 1/16 and the short sides


def test_stacked_layers_are_updated_like_separate_layers() -> None:
    layers = [tree(i, spread=True)["stack"] for i in range(4)]
    for name in OPTIMIZERS:
        optimizer = make_optimizer(name, 0.1)
        stacked, alone = {"w": layers[0]}, {str(i): layers[0][i] for i in range(3)}
        state, other = optimizer.init(stacked), optimizer.init(alone)
        update = jax.jit(optimizer.update)
        for gradient in layers[1:]:
            together, state = update({"w": gradient}, state, stacked)
            apart, other = update({str(i): gradient[i] for i in range(3)}, other, alone)
        np.testing.assert_allclose(together["w"], np.stack([apart[str(i)] for i in range(3)]), rtol=1e-6, err_msg=name)


# 8-bit Lion


def numpy_rounding_numbers(count: int, num: int) -> np.ndarray:
    mask = 2**32 - 1
    numbers = []
    for index in range(num):
        bits = index ^ (count * 0x9E3779B9 & mask)
        for factor in (0x7FEB352D, 0x846CA68B):
            bits = (bits ^ (bits >> 16)) * factor & mask
            bits ^= bits >> 15
        numbers.append(((bits ^ (bits >> 16)) >> 8) / 2**24)
    return np.array(numbers, np.float32)


def numpy_lion_8bit(
    gradient: np.ndarray, codes: np.ndarray, scales: np.ndarray, random_numbers: np.ndarray
) -> tuple[np.ndarray, ...]:
    """One update of one matrix in float32: block-wise quantization (Dettmers et al. 2022, section 2: divide a block by
    its largest magnitude, then round to a value of the code) around Lion (Chen et al. 2023, algorithm 2). The code is a
    table of 128 magnitudes; the random numbers select one of the two nearest."""
    table = np.arange(128, dtype=np.float32) ** 2  # in units of 1/127² of the largest
    flat = gradient.reshape(-1)
    direction, codes, scales = np.zeros_like(flat), codes.copy(), scales.copy()
    b1, b2 = np.float32(0.9), np.float32(0.99)
    one_less_b1, one_less_b2 = np.float32(1 - 0.9), np.float32(1 - 0.99)
    for block in range(len(scales)):
        part = slice(block * codes.shape[1], (block + 1) * codes.shape[1])
        g, c = flat[part], codes[block, : len(flat[part])]
        m = np.sign(c) * table[np.abs(c)] * (scales[block] * np.float32(1 / 16129))
        direction[part] = np.sign(one_less_b1 * g + b1 * m)
        m = one_less_b2 * g + b2 * m
        scales[block] = np.abs(m).max()
        codes[block] = 0
        if scales[block] > 0:
            size = np.abs(m) * (np.float32(16129) / scales[block])
            below = np.clip(np.searchsorted(table, size, side="right") - 1, 0, 126)
            share = (size - table[below]) / (table[below + 1] - table[below])
            codes[block, : len(g)] = np.sign(m) * (below + (random_numbers[part][: len(g)] < share))
    return direction.reshape(gradient.shape), codes, scales


def test_lion_8bit_equals_the_numpy_version_bit_for_bit() -> None:
    """Not compiled: XLA may fuse a product with a sum and round once instead of twice."""
    optimizer = scale_by_lion_8bit()
    state = optimizer.init(tree(0))
    reference = jax.tree.map(np.asarray, state)
    visited = 0
    for i in range(6):
        gradients = tree(i + 1, spread=True)
        random_numbers = numpy_rounding_numbers(i, 1024)
        if i == 3:
            gradients["wide"][:] = 0
        direction, state = optimizer.update(gradients, state)
        for key, gradient in gradients.items():
            codes, scales = np.array(reference.codes[key]), np.array(reference.scales[key])
            leading = gradient.shape[:-2]
            for index in np.ndindex(leading):
                of_matrix = numpy_lion_8bit(gradient[index], codes[index], scales[index], random_numbers)
                expected, codes[index], scales[index] = of_matrix
                np.testing.assert_array_equal(np.asarray(direction[key])[index], expected, err_msg=key)
            np.testing.assert_array_equal(state.codes[key], codes, err_msg=key)
            np.testing.assert_array_equal(state.scales[key], scales, err_msg=key)
            reference.codes[key], reference.scales[key] = codes, scales
            visited += codes.size
    assert visited > 10_000 and all(np.abs(codes).max() == 127 for codes in reference.codes.values())


def test_a_block_never_spans_two_matrices_and_the_last_is_padded() -> None:
    assert blocked_shape((4, 200)) == (4, BLOCK_SIZE)
    assert blocked_shape((3, 5)) == (1, 15)
    assert blocked_shape((32, 16, 4096)) == (32, 256, BLOCK_SIZE)
    assert blocked_shape((2, 3, 4, 70)) == (2, 3, 2, BLOCK_SIZE)
    assert blocked_shape(()) == (1, 1)


def test_lion_8bit_quantisation_error_is_below_one_step_of_the_code() -> None:
    gradient = tree(1, spread=True)["stack"]
    scales = block_scales(gradient)
    read = np.asarray(dequantise(quantise(gradient, scales, jnp.int32(7)), scales, gradient))
    blocks = np.zeros((3, 2 * BLOCK_SIZE), np.float32)
    blocks[:, :320] = gradient.reshape(3, -1)
    share = np.abs(blocks).reshape(3, 2, -1) / np.asarray(scales)[..., None]
    step = (2 * np.floor(np.sqrt(share) * 127) + 1) / 127**2 * np.asarray(scales)[..., None]
    error = np.abs(read.reshape(3, -1) - gradient.reshape(3, -1))
    assert (error <= step.reshape(3, -1)[:, :320] * (1 + 1e-5)).all()  # 1e-5: float32 rounding
    assert (np.sign(read) * np.sign(gradient) >= 0).all()  # no sign is flipped
    assert step.max() <= 1.6e-2 * np.asarray(scales).max()


def test_lion_8bit_quantisation_is_unbiased() -> None:
    """Also for numbers below one step, which rounding to nearest would always set to zero."""
    numbers = jnp.asarray([[1.0, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 3e-5, 1e-5, 1e-6, 0.0, -0.3, -2e-5] * 20], jnp.float32)
    scales, num_times = block_scales(numbers), 4000
    one = jax.jit(jax.vmap(lambda count: dequantise(quantise(numbers, scales, count), scales, numbers)))
    mean = np.asarray(one(jnp.arange(num_times)), np.float64).mean(0)
    steps = (2 * np.floor(np.sqrt(np.abs(numbers)) * 127) + 1) / 127**2
    # The standard deviation is at most half a step: allow five standard errors of the mean, for 240 numbers.
    assert (np.abs(mean - numbers) <= 5 * 0.5 * steps / num_times**0.5 + 1e-7).all()
    assert mean[0, 0] == 1.0 and mean[0, 9] == 0.0  # the largest number and zero are always exact


def test_rounding_numbers_are_uniform_and_uncorrelated() -> None:
    draw = jax.vmap(lambda count: rounding_numbers((64, BLOCK_SIZE), count))
    throws = np.asarray(draw(jnp.arange(64))).reshape(64, -1)
    num, deviation = throws.size, 1 / 12**0.5
    assert 0.0 <= throws.min() < 1e-4 and 1 - 1e-4 < throws.max() < 1.0
    assert abs(throws.mean() - 0.5) < 5 * deviation / num**0.5
    off = (throws - 0.5) / deviation
    for other in (np.roll(off, 1, 0), np.roll(off, 1, 1), np.roll(off, BLOCK_SIZE, 1), np.roll(off, (1, 1), (0, 1))):
        assert abs((off * other).mean()) < 5 / num**0.5  # five standard errors
    counts, _ = np.histogram(throws, 256)
    assert ((counts - num / 256) ** 2 / (num / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5


def test_lion_8bit_is_the_same_on_any_mesh() -> None:
    """Bit for bit, given the same gradients."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    optimizer = scale_by_lion_8bit()
    update = jax.jit(optimizer.update)
    gradients = [np.random.default_rng(i).normal(size=(3, 64, 96)).astype(np.float32) for i in range(4)]
    state = split_state = optimizer.init({"w": gradients[0]})
    for gradient in gradients:
        direction, state = update({"w": gradient}, state)
        split_direction, split_state = update({"w": jax.device_put(gradient, split)}, split_state)
        jax.tree.map(np.testing.assert_array_equal, (direction, state), (split_direction, split_state))
    assert not split_direction["w"].sharding.is_fully_replicated


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39])
def test_gradients_too_small_to_scale_become_zeros(value: float) -> None:
    optimizer = scale_by_lion_8bit()
    gradient = {"w": jnp.full((3, 300), value, jnp.float32)}
    direction, state = optimizer.update(gradient, optimizer.init(gradient))
    assert not np.asarray(state.codes["w"]).any() and not np.asarray(state.scales["w"]).any()
    assert np.isfinite(direction["w"]).all()


def test_lion_8bit_takes_a_quarter_of_lions_memory() -> None:
    adapter = {"lora_a": np.zeros((30, 16, 576), np.float32), "lora_b": np.zeros((30, 1536, 16), np.float32)}
    ours, theirs = num_bytes(make_optimizer("lion-8bit", 0.0).init(adapter)), num_bytes(optax.lion(1.0).init(adapter))
    assert 0.25 < ours / theirs < 0.255  # a scale for every 256 bytes


def test_lion_8bit_state_can_be_saved_as_safetensors() -> None:
    optimizer = scale_by_lion_8bit()
    update = jax.jit(optimizer.update)
    _, state = update(tree(1), optimizer.init(tree(0)))
    flat = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}
    read = load(save(flat))
    assert {a.dtype for a in read.values()} == {np.dtype(np.int8), np.dtype(np.float32), np.dtype(np.int32)}
    restored = jax.tree.unflatten(jax.tree.structure(state), [read[name] for name in flat])
    assert isinstance(restored, Lion8bitState)
    ours, theirs = (update(tree(2), s) for s in (restored, state))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_donated_state_is_intact_after_a_skipped_step(name: OptimizerName) -> None:
    def loss(adapter: Any, base: Any, batch: Any, key: Any) -> jax.Array:
        return sum(jnp.sum((a - 1.0) ** 2) for a in adapter.values()) * batch["tokens"].sum()

    optimizer = make_optimizer(name, 0.1)
    schedule = make_schedule("constant", 0.01, 0, 3)
    step = jax.jit(make_train_step(token_objective(loss), optimizer, schedule, max_grad_norm=1.0), donate_argnums=0)
    state = initial_state(jax.tree.map(jnp.asarray, tree(0)), optimizer, seed=0)
    weights = jnp.ones((2, 2))
    state, _ = step(state, {}, {"tokens": weights, "weights": weights})
    before = jax.tree.map(np.array, (state.adapter, state.optimizer))
    state, metrics = step(state, {}, {"tokens": weights * jnp.nan, "weights": weights})
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.adapter, state.optimizer), before)
    state, metrics = step(state, {}, {"tokens": weights, "weights": weights})
    assert int(metrics.skipped) == 0 and not np.array_equal(state.adapter["wide"], before[0]["wide"])


# How far 8-bit Lion is from Lion: 200 steps with a decaying rate on 6,144 quadratic functions, with curvatures over two
# decades in every block. The gradient noise is in units of the largest curvature. Measured on x86-64:
#
#   noise   signs that differ, same gradients   final loss of Lion   of 8-bit Lion   (659.9 at the start)
#    0                  21.9 %                        18.34               18.72
#    0.1                 4.1 %                        23.87               24.33
#    0.3                 2.5 %                        40.71               41.08
#    1                   1.4 %                       101.59              101.89
#    3                   0.9 %                       241.76              242.34
#
# Without noise most of those signs belong to numbers that have converged and oscillate around the minimum, which hardly
# changes the loss. A uniform code with rounding to nearest ended at 188.7 and 73.6 in the first two rows.
WALK_STEPS, WALK_RATE = 200, 0.02
# The largest allowed fraction of differing signs and ratio of the final losses: a little above the measured values, for
# the rounding of other machines.
WALKS = {0.0: (0.25, 1.05), 0.1: (0.05, 1.04), 1.0: (0.018, 1.01)}


def walk(noise: float) -> tuple[float, float, float, float]:
    """The fraction of signs that differ from Lion's for the same gradients; the loss at the start; and the final losses
    of Lion and of 8-bit Lion, each following its own gradients."""
    generator = np.random.default_rng(0)
    curvature = jnp.asarray(10 ** generator.uniform(-2, 0, (64, 96)), jnp.float32)
    target = jnp.asarray(generator.normal(size=(64, 96)), jnp.float32)
    eight_bit, exact = scale_by_lion_8bit(), optax.scale_by_lion()

    def loss(x: jax.Array) -> jax.Array:
        return (curvature * (x - target) ** 2).sum() / 2

    def one(carry: Any, step: jax.Array) -> tuple[Any, jax.Array]:
        x, state, shadow, y, other = carry
        shake = noise * jax.random.normal(jax.random.key(step), x.shape)
        rate = WALK_RATE * (1 - step / WALK_STEPS)
        gradient = jax.grad(loss)(x) + shake
        direction, state = eight_bit.update(gradient, state)
        same_gradients, shadow = exact.update(gradient, shadow)
        reference, other = exact.update(jax.grad(loss)(y) + shake, other)
        return (x - rate * direction, state, shadow, y - rate * reference, other), (direction != same_gradients).mean()

    x = jnp.zeros_like(target)
    start = (x, eight_bit.init(x), exact.init(x), x, exact.init(x))
    (end, _, _, end_of_lion, _), differ = jax.jit(lambda c: jax.lax.scan(one, c, jnp.arange(WALK_STEPS)))(start)
    return float(differ.mean()), float(loss(x)), float(loss(end_of_lion)), float(loss(end))


@pytest.mark.parametrize("noise", [slow_case(0.0), 0.1, slow_case(1.0)])
def test_lion_8bit_stays_as_close_to_lion_as_documented(noise: float) -> None:
    differ, at_start, of_lion, of_ours = walk(noise)
    most_differ, most_loss = WALKS[noise]
    print(f"noise {noise}: {differ:.2%} of signs differ; loss {at_start:.1f} -> {of_lion:.2f}, {of_ours:.2f}")
    assert differ < most_differ
    assert of_ours < most_loss * of_lion < at_start


# Weight decay


def test_lora_and_dora_decay_and_other_vectors_do_not_stacked_or_separate() -> None:
    def leaf(shape: tuple[int, ...], *, stacked: bool) -> Leaf:
        return Leaf(("name",) * (shape[0] if stacked else 1), stacked, shape, np.dtype(np.float32))

    layout = {
        "layers.0:3:1.lora_a": leaf((3, 4, 10), stacked=True),
        "layers.0:3:1.lora_b": leaf((3, 10, 4), stacked=True),
        "layers.0:3:1.lora_magnitude": leaf((3, 10), stacked=True),
        "head.lora_a": leaf((4, 10), stacked=False),
        "head.lora_magnitude": leaf((10,), stacked=False),
        "norm.saved_weight": leaf((10,), stacked=False),
    }
    decayed = decayed_leaves(layout)
    assert {key for key, yes in decayed.items() if yes} == layout.keys() - {"norm.saved_weight"}
    params = {key: jnp.ones(leaf.shape) for key, leaf in layout.items()}
    nothing = jax.tree.map(jnp.zeros_like, params)
    for name in OPTIMIZERS:
        optimizer = make_optimizer(name, 0.1, decayed)
        direction, _ = jax.jit(optimizer.update)(nothing, optimizer.init(params), params)
        for key, pull in direction.items():
            np.testing.assert_allclose(pull, 0.1 if decayed[key] else 0.0, err_msg=f"{name} {key}")


# Schedules


def rates(name: ScheduleName, warmup: int, steps: int, decay_fraction: float | None, until: int) -> list[float]:
    rate = make_schedule(name, 1.0, warmup, steps, decay_fraction)
    return [float(rate(jnp.int32(i))) for i in range(until)]


@pytest.mark.parametrize(
    ("warmup", "steps", "fraction", "expected"),
    [
        (2, 10, 0.4, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (0, 10, 0.2, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0, 0]),
        (0, 4, 1.0, [1, 0.75, 0.5, 0.25, 0, 0]),
        (3, 4, 1.0, [1 / 3, 2 / 3, 1, 1, 0]),  # the warm-up comes first
        (0, 3, 0.01, [1, 1, 1, 0, 0]),  # at least one step of decay, which starts at the peak
        (4, 4, 0.5, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_wsd_warms_up_stays_and_decays(warmup: int, steps: int, fraction: float, expected: list[float]) -> None:
    np.testing.assert_allclose(rates("wsd", warmup, steps, fraction, len(expected)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_every_schedule_reaches_its_peak_and_ends_at_zero_or_stays(name: ScheduleName) -> None:
    at = rates(name, 3, 30, 0.2, 35)
    assert at[2] == at[3] == max(at) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(at[3:])), "nothing rises after the warm-up"
    assert at[29] > 0 and at[30:] == [1.0 if name == "constant" else 0.0] * 5


def test_decay_fraction_is_only_for_wsd() -> None:
    smallest = {"model": "smollm2", "data": "train.jsonl"}
    assert load_recipe(smallest, ["train.schedule=wsd"]).train.decay_fraction == 0.2
    assert load_recipe(smallest, ["train.schedule=wsd", "train.decay_fraction=0.5"]).train.decay_fraction == 0.5
    assert load_recipe(smallest).train.decay_fraction is None
    with pytest.raises(TrilloraError, match=r"decay_fraction applies only to train\.schedule: wsd, which is cosine"):
        load_recipe(smallest, ["train.decay_fraction=0.5"])


# Real runs

LARGE = {"rank": 256, "exclude": ["k_proj", "v_proj"]}  # matrices that are split over a mesh; k and v are too small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_run.write_model(folder / "model", tiny_run.wide_llama(num_layers=1))
    tiny_run.write_chats(folder / "chats.jsonl")
    return folder


# adamw by most other runs, lion-8bit by the runs below. Of lion, the small dose has the updates only.
TESTED = ("adamw", "lion", "lion-8bit")


@pytest.mark.parametrize("name", [slow_case(name) if name in TESTED else name for name in OPTIMIZERS])
def test_every_optimizer_learns_in_a_run(tmp_path: Path, name: OptimizerName) -> None:
    folder = tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=2 if FULL else 1))
    settings = {"optimizer": name, "steps": 10, "schedule": "wsd", "warmup_steps": 2, "weight_decay": 0.01}
    if "lion" in name:
        settings["learning_rate"] = 3e-3
    engine = {"layers": "scan", "remat": "none"}
    result = train(load_recipe(tiny_run.recipe(folder, train=settings, engine=engine)), tmp_path / "run")
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert load_recipe(tmp_path / "run" / "resolved.yaml").train.decay_fraction == 0.2


def test_lion_8bit_on_a_mesh_equals_one_device(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a split adapter and momentum; normally only large adapters are split."""
    monkeypatch.setattr(shardings, "COPIED_ADAPTER_BYTES", 0)
    settings = {"optimizer": "lion-8bit", "learning_rate": 1e-3, "steps": 3}
    runs: dict[str, tuple[float, ...]] = {}
    for name, hardware in {
        "alone": {"devices": 1},
        "mesh": {"devices": 4, "mesh": {"fsdp": 2, "tensor": 2}},
    }.items():
        recipe = tiny_run.recipe(folder, train=settings, lora=LARGE | {"alpha": 16}, hardware=hardware)
        runs[name] = train(load_recipe(recipe), tmp_path / name).losses
    # Float32 sums over devices are taken in another order, which can flip the sign of a momentum close to zero.
    assert runs["mesh"] == pytest.approx(runs["alone"], rel=1e-5)
    (_, ours), (_, reference) = (load_adapter(tmp_path / name / "adapter") for name in ("mesh", "alone"))
    flipped = np.concatenate([(np.abs(ours[key] - array) > 1e-4).reshape(-1) for key, array in reference.items()])
    assert flipped.size > 8 * 10**5 and flipped.mean() < 1e-3  # 0 when measured


@pytest.mark.parametrize(("name", "num_like_it"), [("adamw", 2), ("lion", 1), ("lion-8bit", 1), ("adafactor", 0)])
def test_optimizer_arrays_are_split_where_the_adapter_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: OptimizerName, num_like_it: int
) -> None:
    monkeypatch.setattr(shardings, "COPIED_ADAPTER_BYTES", 0)
    settings = tiny_run.recipe(
        folder,
        model={"dtype": "float32"},
        lora=LARGE,
        train={"optimizer": name, "micro_batch_size": 8},
        engine={"layers": "scan", "remat": "none", "attention": "xla", "loss_chunk": 64},
    )
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=4, tensor=2))
    recipe = load_recipe(settings)
    assembly = assemble(recipe, tiny_run.step_settings(recipe), load_config(folder / "model"), mesh, num_steps=4)
    leaves = jax.tree.leaves(assembly.state_shapes.optimizer)
    assert all(len(leaf.sharding.spec) <= len(leaf.shape) for leaf in leaves)
    num_split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
    split_adapters = [s for s in assembly.adapter_shardings.values() if not s.is_fully_replicated]
    assert len(split_adapters) > 5 and num_split == num_like_it * len(split_adapters)
