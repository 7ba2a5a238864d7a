"""Embeddings of n-grams: the ids are 64-bit hashes, computed here with 32-bit integers and within each document.

The id of the n tokens up to t is (token_t * m_0 ^ token_(t-1) * m_1 ^ ...) modulo a prime, with multipliers of up to 63
bits. JAX has no 64-bit integers by default. So a product is an array of four digits of 16 bits, lowest first:

    >>> product(jnp.asarray(3), 2**48 + 7)  # 3 * 2**48 + 21
    [21, 0, 0, 3]

Legend: B sequences, T tokens, K hashes of an n-gram.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop

from trillora.model.overrides.recurrent import starts_of
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, current

DIGIT, NUM_DIGITS = 16, 4  # bits of a digit, digits of a number


def hashed_ngrams(model: torch.nn.Module) -> list[Replacement]:
    """Replacements (class, name, value) for the n-gram embeddings of a model."""
    found = [module for module in model.modules() if hasattr(module, "layer_multipliers")]
    multipliers = {id(module): _multipliers(module) for module in found}
    return [(cls, "forward", _embed(cls.forward, multipliers)) for cls in {type(module) for module in found}]


def _multipliers(module: torch.nn.Module) -> list[int]:
    """Computed as transformers does: as an array of a JAX program, the module's buffer would lose its upper half."""
    build = sys.modules[type(module).__module__]._build_layer_multipliers
    values: list[int] = build(
        module.unigram_vocab_size, module.ngram_size, module.ple_layer_index, module.seed
    ).tolist()
    return values


def _embed(original: Callable[..., object], multipliers: dict[int, list[int]]) -> Callable[..., object]:
    def forward(self: torch.nn.Module, input_ids: torch.Tensor, past_key_values: object) -> Any:
        trace = current()
        if trace is None or past_key_values is not None or not isinstance(input_ids, TORCHAX_TENSORS):
            return original(self, input_ids, past_key_values)
        tokens = interop.jax_view(input_ids).astype(jnp.int32)
        products = [
            product(before(tokens, trace.segments_BT, back, self.eos_token_id), multiplier)
            for back, multiplier in enumerate(multipliers[id(self)])
        ]
        ids, mixed = [], products[0]
        for back in range(1, self.ngram_size):
            mixed = mixed ^ products[back]
            of_ngram = slice((back - 1) * self.heads_per_ngram, back * self.heads_per_ngram)
            sizes, offsets = (jnp.asarray(n[of_ngram]) for n in (self.head_vocab_sizes, self.head_offsets))
            ids.append(remainder(mixed, sizes) + offsets)
        return self.ngram_embedding(interop.torch_view(jnp.concatenate(ids, axis=-1))).flatten(-2)

    return forward


def before(tokens_BT: jax.Array, segments_BT: jax.Array | None, back: int, end: int) -> jax.Array:
    """The token `back` places before each one; `end` where a document begins or an `end` token is between them."""
    T = tokens_BT.shape[1]
    shifted = jnp.pad(tokens_BT, ((0, 0), (back, 0)), constant_values=end)[:, :T]
    is_start = jnp.pad(tokens_BT == end, ((0, 0), (1, 0)), constant_values=True)[:, :T]
    if segments_BT is not None:
        is_start |= starts_of(segments_BT)
    slot = jnp.arange(T)
    start = jax.lax.cummax(jnp.where(is_start, slot, 0), axis=1)
    return jnp.where(slot - start >= back, shifted, end)


def product(numbers: jax.Array, multiplier: int) -> jax.Array:
    """The digits [4, ...] of the product modulo 2 ** 64, for numbers below 2 ** 31."""
    low = jnp.uint32(2**DIGIT - 1)
    number = numbers.astype(jnp.uint32)
    columns = [jnp.zeros_like(number) for _ in range(NUM_DIGITS + 1)]
    for i, digit in enumerate((number & low, number >> DIGIT)):
        for j in range(NUM_DIGITS - i):
            part = digit * jnp.uint32(multiplier >> (DIGIT * j) & (2**DIGIT - 1))
            columns[i + j] += part & low
            columns[i + j + 1] += part >> DIGIT
    for i in range(NUM_DIGITS):
        columns[i + 1] += columns[i] >> DIGIT
    return jnp.stack([column & low for column in columns[:NUM_DIGITS]])


def remainder(digits: jax.Array, sizes_K: jax.Array) -> jax.Array:
    """The number modulo each of the sizes [..., K], which are below 2 ** 31: one bit after the other, highest first."""
    size = sizes_K.astype(jnp.uint32)
    rest = jnp.zeros((*digits.shape[1:], len(size)), jnp.uint32)
    for place in reversed(range(NUM_DIGITS * DIGIT)):
        bit = digits[place // DIGIT] >> (place % DIGIT) & 1
        rest = 2 * rest + bit[..., None]
        rest = jnp.where(rest >= size, rest - size, rest)
    return rest.astype(jnp.int32)
