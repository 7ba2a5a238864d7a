"""Modules that are trained as a whole (`lora.modules_to_save`): the adapter has its own copy of their weights.

    lm_head.weight        [V, D]  of the base, frozen
    lm_head.saved_weight  [V, D]  of the adapter, float32, starts as a copy; PEFT's file calls it lm_head.weight

During a call the adapter's arrays take the place of the base's (`with_whole_weights`), so the module itself does not
change. If embedding and head are tied, training one of them as a whole unties them, as in PEFT. An embedding or head
has rows for new tokens too.

Legend: V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pydantic import Field

from trillora.errors import TrilloraError, nearest
from trillora.model.adapter_parameters import EMBEDDING_A, LORA_A, SAVED_BIAS, SAVED_WEIGHT, SUFFIXES, TOKEN_ROWS
from trillora.model.layout import Layout, Tree
from trillora.model.lora_spec import LoraSpec, TrainedTokens
from trillora.model.parts.token_rows import is_tied, rows_from_base

TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]
Indices = Ids | Annotated[dict[str, Ids], Field(max_length=16)] | None  # PEFT's trainable_token_indices
_PER_TOKEN = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")  # a row per token
_SAVED = {SAVED_WEIGHT.suffix: ".weight", SAVED_BIAS.suffix: ".bias"}


def add_whole_weights(model: torch.nn.Module, chosen: list[str], num_tokens: int, targets: list[str]) -> None:
    """Adds parameters (on the meta device) for every weight of these modules. `num_tokens` is the number of rows of
    embedding and head, if that is more than the base has. `targets` are adapted by LoRA."""
    if not chosen:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_tied(model) and any(model.get_submodule(name) in (embedding, head) for name in chosen):
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    for name in chosen:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if inner in targets:
                raise TrilloraError(
                    f"{inner} cannot be both a target of LoRA and trained as a whole.",
                    where="lora.modules_to_save",
                    do="remove it from lora.targets or from lora.modules_to_save",
                )
            _add(module, inner, num_tokens if module in (embedding, head) else 0)


def with_whole_weights(base: Tree, adapter: Tree) -> Tree:
    """All arrays of a call, by layout key: the adapter's whole weights replace the base's."""
    weights = {**base, **adapter}
    for key, array in adapter.items():
        if (replaced := base_key(key)) is not None:
            weights[replaced] = array.astype(base[replaced].dtype)
    return weights


def base_key(key: str) -> str | None:
    """The key of the base's array that this array of the adapter replaces, if it replaces one."""
    for suffix, of_base in _SAVED.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix) + of_base
    return None


def weight_from_base(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A whole weight before training. Rows for new tokens are the mean of the others."""
    weight = array.astype(jnp.float32)
    missing = shape[0] - weight.shape[0]
    if missing <= 0:
        return weight
    return jnp.concatenate([weight, jnp.broadcast_to(weight.mean(axis=0), (missing, *shape[1:]))])


def values_from_base(layout: Layout, tokens: TrainedTokens | None, base: Tree) -> Tree:
    """The arrays of an adapter that start with values of the base, by layout key, in float32."""
    values: Tree = {}
    for key, leaf in layout.items():
        if (replaced := base_key(key)) is not None:
            values[key] = weight_from_base(base[replaced], leaf.shape)
        elif key.endswith(TOKEN_ROWS.suffix):
            assert tokens is not None
            values[key] = rows_from_base(base[f"{key.removesuffix(TOKEN_ROWS.suffix)}.weight"], tokens)
    return values


def select_modules(model: torch.nn.Module, spec: LoraSpec) -> list[str]:
    """Full names of the modules that are trained as a whole, by name or by the end of a dotted name."""
    known = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    chosen: list[str] = []
    for number, wanted in enumerate(spec.whole):
        found = [name for name in known if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            short = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in known))
            guess = nearest(wanted, [*short, *known])
            raise TrilloraError(
                f"{type(model).__name__} has no module named {wanted!r}.",
                where=spec.file or f"lora.modules_to_save[{number}]",
                do=(f"did you mean {guess!r}? " if guess else "")
                + f"Modules here: {' '.join(name for name in short if not name.isdigit())}",
            )
        chosen += found
    inside = [name for name in chosen if any(name.startswith(f"{other}.") for other in chosen)]
    return [name for name in dict.fromkeys(chosen) if name not in inside]


def _add(module: torch.nn.Module, name: str, num_rows: int) -> None:
    if any(buffer.startswith("weight_") for buffer in module._buffers):  # the parts of a quantized weight
        raise TrilloraError(
            f"The weight of {name} is quantized, so it cannot be trained as a whole.",
            where="lora.modules_to_save, model.quantize",
            do="remove this module, or use model.quantize=none",
        )
    for kind, parameter in list(module.named_parameters(recurse=False)):
        if f".{kind}".endswith(SUFFIXES):
            continue
        if f".saved_{kind}" not in _SAVED:
            raise TrilloraError(
                f"{name} has a parameter {kind!r}, and only weights and biases can be trained as a whole.",
                where="lora.modules_to_save",
                do="remove this module",
            )
        rows, *others = parameter.shape
        shape = (max(rows, num_rows), *others)
        setattr(module, f"saved_{kind}", torch.nn.Parameter(torch.empty(shape, device="meta")))


# ---- in PEFT's files


class OtherParts(NamedTuple):
    """What an adapter has in addition to matrices of LoRA; see `LoraSpec`."""

    tokens: TrainedTokens | None = None
    whole: tuple[str, ...] = ()
    num_tokens: int = 0


def in_config(names: Iterable[str], tokens: TrainedTokens | None) -> dict[str, Any]:
    """PEFT's options for an adapter with arrays of these names. Names of modules are full: PEFT takes the end of a name
    for a match, and `norm` is also the end of `input_layernorm`."""
    rows = [name.removesuffix(TOKEN_ROWS.suffix) for name in names if name.endswith(TOKEN_ROWS.suffix)]
    whole = sorted({name.rpartition(".")[0] for name in names if base_key(name) is not None})
    options: dict[str, Any] = {"modules_to_save": whole} if whole else {}
    if tokens is not None and rows:
        # A list means the embedding and, if it is tied, the head.
        is_embedding = len(rows) == 1 and not any(name.endswith(_PER_TOKEN) for name in whole)
        by_module = {name: list(tokens.ids) for name in rows}
        options["trainable_token_indices"] = list(tokens.ids) if is_embedding else by_module
    return options


def other_parts(
    indices: Indices, modules_to_save: list[str], shapes: Mapping[str, tuple[int, ...]], where: str
) -> OtherParts:
    """What the arrays of a file mean, with PEFT's options."""
    whole = {
        name.rpartition(".")[0]: shape
        for name, shape in shapes.items()
        if base_key(name) is not None and not _is_copy(name, shapes)
    }
    ids = {module: found for module, found in _ids_by_module(indices, shapes, where).items() if module not in whole}
    for name in modules_to_save:
        if not any(module.endswith(name) for module in whole):  # PEFT's rule for a match
            raise _inconsistent(f"The adapter has no weights of {name}, which modules_to_save names.", where)
    if indices and not any(name.endswith(TOKEN_ROWS.suffix) for name in shapes) and not whole:
        raise _inconsistent("The adapter has no rows for its trainable_token_indices.", where)
    if len({tuple(sorted(found)) for found in ids.values()}) > 1:
        raise TrilloraError(
            "The adapter trains different tokens in the embedding and in the head.",
            where=where,
            do="train the same tokens in both",
        )
    num_tokens = max([shape[0] for name, shape in whole.items() if name.endswith(_PER_TOKEN) and shape], default=0)
    tokens = TrainedTokens(tuple(sorted(next(iter(ids.values())))), modules=tuple(ids)) if ids else None
    return OtherParts(tokens, tuple(sorted(whole)), num_tokens)


def sorted_rows(adapter: dict[str, np.ndarray], indices: Indices, where: str) -> dict[str, np.ndarray]:
    """The arrays of a file in the form that we use: trained rows in the order of their tokens. Where the file has a
    whole matrix too, they are rows of that matrix. PEFT stores the base's matrix with LoRA of an embedding or head; it
    has not changed, and is left out."""
    result = {name: array for name, array in adapter.items() if not _is_copy(name, adapter)}
    shapes = {name: array.shape for name, array in result.items()}
    for module, ids in _ids_by_module(indices, shapes, where).items():
        rows = result.pop(module + TOKEN_ROWS.suffix)
        matrix = result.get(module + SAVED_WEIGHT.suffix)
        if matrix is None:
            result[module + TOKEN_ROWS.suffix] = rows[np.argsort(ids)]
        elif max(ids) < len(matrix) and rows.shape[1:] == matrix.shape[1:]:
            matrix = matrix.copy()
            matrix[list(ids)] = rows
            result[module + SAVED_WEIGHT.suffix] = matrix
        else:
            raise _wrong_rows(module, where)
    return result


def is_used(name: str, names: Container[str]) -> bool:
    """Whether `sorted_rows` leaves an array of this name, in a file with arrays of these names."""
    is_folded = name.endswith(TOKEN_ROWS.suffix) and name.removesuffix(TOKEN_ROWS.suffix) + SAVED_WEIGHT.suffix in names
    return not is_folded and not _is_copy(name, names)


def _is_copy(name: str, names: Container[str]) -> bool:
    module, _, _ = name.rpartition(".")
    return base_key(name) is not None and any(module + kind.suffix in names for kind in (EMBEDDING_A, LORA_A))


def _ids_by_module(indices: Indices, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, list[int]]:
    """The trained tokens of each module that has rows, in the file's order."""
    found = {}
    for name in sorted(shapes):
        if not name.endswith(TOKEN_ROWS.suffix):
            continue
        module = name.removesuffix(TOKEN_ROWS.suffix)
        if isinstance(indices, dict):
            ids = next((ids for key, ids in indices.items() if f".{module}".endswith(f".{key}")), [])
        else:
            ids = indices or []
        if not ids or len(set(ids)) != len(ids) or shapes[name][:1] != (len(ids),) or len(shapes[name]) != 2:
            raise _wrong_rows(module, where)
        found[module] = ids
    return found


def _wrong_rows(module: str, where: str) -> TrilloraError:
    return _inconsistent(f"The adapter's trained tokens of {module} do not fit its trainable_token_indices.", where)


def _inconsistent(what: str, where: str) -> TrilloraError:
    do = "use the adapter_config.json and adapter_model.safetensors of the same adapter"
    return TrilloraError(what, where=where, do=do)
