"""Trained rows of the embedding: a few tokens get embeddings of their own, which belong to the adapter.

Used for new tokens, and for existing ones that the recipe names. The rest of the embedding is the frozen base. With
V = 6 tokens in the base and trained tokens 2 and 6 (a new one), `embed_tokens.token_rows` is [2, D], and

    lookup of [1, 2, 6]  ->  base row 1, token_rows[0], token_rows[1]
    logits [V + 1]       ->  base logits 0 1 · 3 4 5, with hidden @ token_rows.T at 2 and 6

The base does not grow: its matrix keeps its shape and its sharding, and no gradient of that size is computed. PEFT's
`trainable_token_indices` gives the same numbers: it writes the rows into a copy of the whole matrix at every call. The
rows are values, not differences. A tied head uses the rows of the embedding; another head has rows of its own.

Legend: N trained tokens, V tokens of the base, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax import interop

from trillora.errors import TrilloraError
from trillora.model.lora_spec import TrainedTokens
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS


class _EmbeddingWithRows:
    """A mixin for the embedding. The original class computes the other outputs, so scaling is included."""

    token_rows: torch.nn.Parameter  # [N, D]
    token_ids: tuple[int, ...]
    weight: torch.nn.Parameter

    def forward(self, tokens: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if not isinstance(tokens, TORCHAX_TENSORS):  # called as ordinary PyTorch
            return super().forward(tokens, *args, **kwargs)  # type: ignore[misc]
        found, ids_N = interop.jax_view(tokens), jnp.asarray(self.token_ids)
        place = jnp.minimum(jnp.searchsorted(ids_N, found), len(self.token_ids) - 1)
        is_trained = ids_N[place] == found
        base = super().forward(interop.torch_view(jnp.where(is_trained, 0, found)), *args, **kwargs)  # type: ignore[misc]
        with weight_replaced(self, self.token_rows):
            trained = super().forward(interop.torch_view(place), *args, **kwargs)  # type: ignore[misc]
        chosen = jnp.where(is_trained[..., None], interop.jax_view(trained), interop.jax_view(base))
        return interop.torch_view(chosen)


@contextmanager
def weight_replaced(embedding: Any, rows: torch.Tensor) -> Iterator[None]:
    """The embedding looks up these rows, in the dtype of its own."""
    weight = embedding.weight
    embedding._parameters["weight"] = rows.to(weight.dtype)
    try:
        yield
    finally:
        embedding._parameters["weight"] = weight


@functools.cache
def _with_rows(cls: Any) -> type:
    return type(cls.__name__, (_EmbeddingWithRows, cls), {"__module__": cls.__module__})


def add_token_rows(model: torch.nn.Module, tokens: TrainedTokens | None, whole: list[str]) -> None:
    """Adds rows (on the meta device) to the embedding and the head. Modules in `whole` are trained as a whole, so they
    need no rows."""
    if tokens is None:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    tied, named = is_tied(model), tokens.modules

    def is_used(module: torch.nn.Module) -> bool:
        name = names.get(id(module), "")
        return name not in whole and (named is None or name in named or (tied and module is head))

    of_embedding, of_head = is_used(embedding), is_used(head)
    has_all = all(names.get(id(m), "") in whole or is_used(m) for m in (embedding, head))
    if reason := _why_not(model, embedding, head, tokens, has_rows=of_embedding or of_head, has_all=has_all):
        raise TrilloraError(
            f"{type(model).__name__} cannot train single tokens: {reason}.",
            where="tokens, lora.train_tokens",
            do="remove these options, or train the whole matrices with lora.modules_to_save",
        )
    if tied and of_embedding != of_head:
        raise TrilloraError(
            "Embedding and head of this model share one matrix; trained tokens and a whole copy of one of them "
            "contradict each other.",
            where="lora.modules_to_save",
            do="name both of them, or none",
        )
    for module in [embedding] * of_embedding + [head] * of_head:
        shared = tied and module is head
        shape = (len(tokens.ids), module.weight.shape[1])
        rows = embedding.token_rows if shared else torch.nn.Parameter(torch.empty(shape, device="meta"))
        module.token_rows, module.token_ids = rows, tokens.ids
    if of_embedding:
        cls: Any = type(embedding)
        embedding.__class__ = _with_rows(cls)


def is_tied(model: torch.nn.Module) -> bool:
    """Whether the head uses the embedding's matrix."""
    head = model.get_output_embeddings()
    return getattr(head, "weight", None) is model.get_input_embeddings().weight


def token_logits(head: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    """The base's logits [..., V], replaced for the trained tokens; new tokens follow at the end."""
    rows_ND = interop.jax_view(head.token_rows)
    trained = (x @ rows_ND.astype(x.dtype).T).astype(logits.dtype)
    ids, num_base = np.array(head.token_ids), logits.shape[-1]
    num_inside = int((ids < num_base).sum())
    if num_inside:
        logits = logits.at[..., ids[:num_inside]].set(trained[..., :num_inside])
    if num_inside < len(ids):
        logits = jnp.concatenate([logits, trained[..., num_inside:]], axis=-1)
    return logits


@functools.partial(jax.jit, static_argnames="tokens")  # one program: the matrix is not copied to float32
def rows_from_base(weight_VD: jax.Array, tokens: TrainedTokens) -> jax.Array:
    """The rows before training [N, D]: the base's rows, and for new tokens the mean of all its rows. transformers
    adds noise of 1e-9 times their covariance to this mean."""
    weight = weight_VD.astype(jnp.float32)
    first_new = weight.shape[0] if tokens.first_new is None else min(tokens.first_new, weight.shape[0])
    ids_N = np.array(tokens.ids)
    rows = weight[np.minimum(ids_N, weight.shape[0] - 1)]
    return jnp.where((ids_N >= first_new)[:, None], weight.mean(axis=0), rows)


def _why_not(
    model: torch.nn.Module, embedding: Any, head: Any, tokens: TrainedTokens, *, has_rows: bool, has_all: bool
) -> str:
    """Why these tokens cannot be trained; empty if they can."""
    num_base = embedding.weight.shape[0]
    new = [id_ for id_ in tokens.ids if id_ >= num_base]
    if has_rows and not isinstance(embedding, torch.nn.Embedding):
        return "its embedding is not an ordinary one"
    if has_rows and not isinstance(head, torch.nn.Linear):
        return "its head is not a linear layer"
    if has_rows and head.bias is not None:
        return "its head has a bias, which PEFT leaves out for trained tokens"
    if has_rows and (hasattr(head, "lora_a") or hasattr(embedding, "lora_embedding_a")):  # PEFT refuses it too
        return "its embedding or head is in lora.targets"
    if new and not has_all:
        return "the adapter has new tokens, but rows for them only in the embedding or only in the head"
    if new != list(range(num_base, num_base + len(new))):
        return f"the base has {num_base} tokens, and the next ones are not all among {new[:5]}"
    # Per-layer embeddings of Gemma 3n may have a few rows less.
    others = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not embedding]
    if new and any(10 * other.num_embeddings > 9 * num_base for other in others):
        return "it has a second embedding with a row for every token"
    return ""
