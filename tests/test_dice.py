"""Numbers hashed from their place look like chance: even, and neighbours, rows and keys know nothing of each other."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillora.devices.mesh import MeshShape, batch_sharding, make_mesh
from trillora.engine.hash_random import keep_mask, places, scramble, share

SHAPE = (64, 32, 128)
SIGMAS = 5.0  # what chance exceeds once in two million tries


def signs(key: int, keep: float = 0.5) -> np.ndarray:
    """+1 and -1, scaled to a variance of one."""
    mask = np.asarray(keep_mask(jax.random.key(key), keep, SHAPE))
    return (mask - keep) / math.sqrt(keep * (1 - keep))


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95])
def test_the_share_kept_is_the_one_asked_for(keep: float) -> None:
    for key in range(8):
        assert abs(signs(key, keep).mean()) * math.sqrt(math.prod(SHAPE)) < SIGMAS
        by_row = signs(key, keep).mean(axis=(1, 2)) * math.sqrt(SHAPE[1] * SHAPE[2])
        assert np.abs(by_row).max() < SIGMAS


def test_neighbours_and_keys_know_nothing_of_each_other() -> None:
    one = signs(1)
    pairs = [one * signs(key) for key in (0, 2, 3, 2**31)]
    for dim in range(3):
        for step in (1, 2, 16):
            pairs.append(one * np.roll(one, step, axis=dim))
    assert len(pairs) == 13
    for pair in pairs:
        assert abs(pair.mean()) * math.sqrt(pair.size) < SIGMAS


def test_all_numbers_are_equally_likely() -> None:
    numbers = np.asarray(share(scramble(places((1024, 1024), 2))))
    counts, _ = np.histogram(numbers, bins=256, range=(0, 1))
    expected = numbers.size / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < SIGMAS * math.sqrt(2 * 255)
    assert numbers.min() >= 0 and numbers.max() < 1


def test_places_count_the_elements() -> None:
    np.testing.assert_array_equal(places((2, 3, 4), 3).ravel(), np.arange(24))
    np.testing.assert_array_equal(places((2, 3, 4), 2)[1].ravel(), np.arange(12))


def test_a_mask_is_the_same_however_it_is_split() -> None:
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=8))

    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(keep_mask(jax.random.key(3), 0.7, x.shape), x, 0)

    whole = np.asarray(jax.jit(masked)(jnp.ones(SHAPE)))
    split = jax.jit(masked, out_shardings=batch_sharding(mesh))(jax.device_put(jnp.ones(SHAPE), batch_sharding(mesh)))
    np.testing.assert_array_equal(np.asarray(split), whole)
