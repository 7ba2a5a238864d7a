"""A generator of a tiny model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models
from architecture_checks import LORA, to_jax
from chat_tokenizers import chat_tokenizer

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.model.bridge import CausalLM
from trillora.model.layout import stack

NUM_LAYERS = 2  # generation unrolls the layers, and most models have one kind


LENGTHS = (5, 17, 11)  # with the new tokens, longer than the sliding window of 8


def random_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, tiny_models.VOCABULARY, length).tolist() for length in lengths]


def endless() -> Prompts:
    """Prompts without stop tokens: a random model could generate one at any time."""
    prompts = Prompts(chat_tokenizer("chatml"), template=None)
    prompts.stops = ()
    return prompts


def num_layers(name: str) -> int | None:
    """With fewer than its usual layers, Gemma 2 only repeats a token."""
    return None if name == "gemma2" else NUM_LAYERS


@functools.cache
def tiny_generator(name: str, longest: int | None = None) -> tuple[Generator, dict[str, np.ndarray]]:
    """Our generator with the tiny model's weights, and its random adapter."""
    reference = tiny_models.build(name, num_layers=num_layers(name))
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    config = tiny_models.configuration(name, num_layers(name))
    model = CausalLM(config, lora=LORA, scan=False, remat="none", mesh=mesh)
    random = np.random.default_rng(1)
    matrices = {n: random.normal(0, 0.2, leaf.shape).astype(np.float32) for n, leaf in model.adapter_layout.items()}
    adapter = {key: jnp.asarray(array) for key, array in matrices.items()}
    return Generator(model, weights_of(reference, model), adapter, endless(), mesh, longest=longest), matrices


def weights_of(reference: Any, model: CausalLM) -> dict[str, jax.Array]:
    flat = {n: to_jax(t) for n, t in (*reference.named_parameters(), *reference.named_buffers())}
    return stack({n: flat[n] for leaf in model.layout.values() for n in leaf.names}, model.layout)
