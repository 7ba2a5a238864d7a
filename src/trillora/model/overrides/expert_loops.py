"""Experts that do not use transformers' interface: loops over the experts that were chosen become static programs.

Their code loops over the experts with at least one token and computes each with its own tokens. Both depend on values:

    for expert in greater(expert_mask.sum((-1, -2)), 0).nonzero():        expert_mask [experts, choices, tokens]
        choice, token = torch.where(expert_mask[expert])
        out.index_add_(0, token, compute(hidden[token]) * weights[token, choice, None])

During a trace the same code runs with other answers to these two questions. All experts are chosen, and every expert
gets all tokens. A token that did not choose the expert takes its weight from an extra column of zeros, so the loop is
a masked sum. It computes every expert for every token: correct, but slower than `experts`, where tokens are sorted.

The other kind of module has tokens sorted by expert already, and splits them by numbers that it reads from the router:
there one ragged matmul replaces the loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop

from trillora.engine.mixture.grouped_product import grouped_product
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, replaced

LOOP = ("hidden_states", "top_k_index", "top_k_weights")  # arguments of a module that loops over experts
SPLIT = ("inputs", "expert_size")  # arguments of a linear layer per expert


def static_loops(model: torch.nn.Module) -> list[Replacement]:
    """Replacements (class, name, value) for the classes of a model that loop over experts."""
    replacements: list[Replacement] = []
    for cls, module in {type(module): module for module in model.modules()}.items():
        arguments = tuple(inspect.signature(cls.forward).parameters)[1:]
        if arguments == SPLIT:
            replacements.append((cls, "forward", _ragged))
        elif arguments == LOOP and not hasattr(module, "is_transposed"):  # set by transformers' interface
            replacements.append((cls, "forward", _masked_sum(cls.forward)))
    if any(value is _ragged for _, _, value in replacements):
        replacements += [(cls, "tolist", _tolist(cls.tolist)) for cls in TORCHAX_TENSORS]
    return replacements


class _Expert(int):
    """The number of an expert, where models expect a row of indices or a tensor with one index."""

    def __getitem__(self, index: int) -> int:
        return int(self)

    def item(self) -> int:
        return int(self)


def _masked_sum(loop: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    where = torch.where

    def all_experts(counts: torch.Tensor, *args: object, **kwargs: object) -> list[_Expert]:
        return [_Expert(i) for i in range(counts.shape[0])]

    def all_tokens(mask: torch.Tensor, *args: object) -> Any:
        if args:
            return where(mask, *args)
        chosen_KN = interop.jax_view(mask) != 0
        num_choices, num_tokens = chosen_KN.shape
        choice = jnp.where(chosen_KN.any(0), jnp.argmax(chosen_KN, 0), num_choices)
        return interop.torch_view((choice, jnp.arange(num_tokens)))

    @functools.wraps(loop)
    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(hidden_states, TORCHAX_TENSORS):
            return loop(self, hidden_states, top_k_index, top_k_weights)
        with_zeros = torch.nn.functional.pad(top_k_weights, (0, 1))
        with replaced([(torch, "where", all_tokens), *((cls, "nonzero", all_experts) for cls in TORCHAX_TENSORS)]):
            return loop(self, hidden_states, top_k_index, with_zeros)

    return forward


def _ragged(self: torch.nn.Module, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    rows, weight, sizes = interop.jax_view((inputs, self.weight, expert_size))
    return interop.torch_view(grouped_product(rows, weight.swapaxes(1, 2), sizes.astype(jnp.int32)))


def _tolist(original: Callable[..., object]) -> Callable[..., object]:
    """The router's numbers of tokens stay a tensor, for `_ragged`."""

    def tolist(self: torch.Tensor) -> Any:
        return self if isinstance(self.jax(), jax.core.Tracer) else original(self)

    return tolist
