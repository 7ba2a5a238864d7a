"""Numbers hashed from their index look random: uniform, and uncorrelated between elements, sequences and keys."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillora.devices.mesh import MeshShape, batch_sharding, make_mesh
from trillora.engine.hash_random import MaskKey, element_index, keep_mask, scramble, uniform

SHAPE = (64, 32, 128)
SIGMAS = 5.0  # exceeded by chance once in two million tries


compiled_mask = jax.jit(keep_mask, static_argnums=(1, 2))


def mask_of(key: int, sequences: list[int], keep: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(compiled_mask(MaskKey(jax.random.key(key), np.array(sequences, np.int32)), keep, shape))


def signs(key: int, keep: float = 0.5) -> np.ndarray:
    """The mask of sequences 0, 1, …, with mean 0 and variance 1."""
    mask = mask_of(key, list(range(SHAPE[0])), keep, SHAPE)
    return (mask - keep) / math.sqrt(keep * (1 - keep))


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9])
def test_the_mask_keeps_the_requested_fraction_of_every_sequence(keep: float) -> None:
    for key in range(8):
        assert abs(signs(key, keep).mean()) * math.sqrt(math.prod(SHAPE)) < SIGMAS
        by_sequence = signs(key, keep).mean(axis=(1, 2)) * math.sqrt(SHAPE[1] * SHAPE[2])
        assert np.abs(by_sequence).max() < SIGMAS


def test_neighbours_sequences_and_keys_are_uncorrelated() -> None:
    one = signs(1)
    pairs = [one * signs(key) for key in (0, 2, 3, 2**31)]
    for dim in range(3):
        for step in (1, 2, 16):
            pairs.append(one * np.roll(one, step, axis=dim))
    assert len(pairs) == 13
    for pair in pairs:
        assert abs(pair.mean()) * math.sqrt(pair.size) < SIGMAS


def test_a_sequence_keeps_its_mask_in_any_part_of_the_batch() -> None:
    whole = mask_of(0, list(range(8)), 0.5, (8, 6, 4))
    for part in ([3], [1, 5], [0, 2, 4, 6]):
        np.testing.assert_array_equal(mask_of(0, part, 0.5, (len(part), 6, 4)), whole[part])
    assert len({sequence.tobytes() for sequence in whole}) == 8


def test_flattened_and_padded_sequences_have_the_same_mask() -> None:
    """A model may flatten [B, T, D] to [B * T, D], and a batch may be padded to another T."""
    whole = mask_of(0, [4, 7], 0.5, (2, 6, 4))
    np.testing.assert_array_equal(mask_of(0, [4, 7], 0.5, (12, 4)), whole.reshape(12, 4))
    np.testing.assert_array_equal(mask_of(0, [4, 7], 0.5, (2, 9, 4))[:, :6], whole)


def test_an_array_shared_by_all_sequences_has_one_mask() -> None:
    np.testing.assert_array_equal(mask_of(0, [4, 7], 0.5, (1, 6, 4)), mask_of(0, [1, 2, 3], 0.5, (1, 6, 4)))


def test_numbers_are_uniform() -> None:
    numbers = np.asarray(jax.jit(lambda: uniform(scramble(element_index((1024, 1024), 2))))())
    counts, _ = np.histogram(numbers, bins=256, range=(0, 1))
    expected = numbers.size / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < SIGMAS * math.sqrt(2 * 255)
    assert numbers.min() >= 0 and numbers.max() < 1


def test_element_index_counts_the_elements() -> None:
    np.testing.assert_array_equal(element_index((2, 3, 4), 3).ravel(), np.arange(24))
    np.testing.assert_array_equal(element_index((2, 3, 4), 2)[1].ravel(), np.arange(12))


def test_a_mask_is_the_same_on_any_mesh() -> None:
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=8))

    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(keep_mask(MaskKey(jax.random.key(3), jnp.arange(len(x))), 0.7, x.shape), x, 0)

    whole = np.asarray(jax.jit(masked)(jnp.ones(SHAPE)))
    split = jax.jit(masked, out_shardings=batch_sharding(mesh))(jax.device_put(jnp.ones(SHAPE), batch_sharding(mesh)))
    np.testing.assert_array_equal(np.asarray(split), whole)
