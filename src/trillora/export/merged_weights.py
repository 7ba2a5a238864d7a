"""The weights of a base model with an adapter merged into them, one tensor at a time, in float32.

    weights = MergedWeights(source)
    weights.names                                            as in the base's files: ("lm_head.weight", …)
    weights.read("model.layers.0.self_attn.q_proj.weight")   W + scale * B A
    weights.rows("model.embed_tokens.weight", 0, 4096)       some rows of a large one

DoRA, trained tokens and modules that were trained as a whole are included. A change of the embedding or the head alone
unties them: then the head is a tensor of its own, also if the files have none.

Legend: R rank, D inputs, E outputs, V vocabulary; for experts: E experts, O outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trillora.errors import TrilloraError
from trillora.export.source import ExportSource
from trillora.model.adapter_parameters import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    SAVED_BIAS,
    SAVED_WEIGHT,
    TOKEN_ROWS,
)
from trillora.model.loading.checkpoint import DTYPES, Checkpoint
from trillora.model.loading.description import read_config
from trillora.model.parts.expert_parameters import by_expert

CHUNK_BYTES = 64 << 20  # of a tensor in float32


@dataclass(frozen=True)
class LowRank:
    """Adds left @ right to the stored matrix. With DoRA, the weights of each output then get a trained length."""

    left: np.ndarray  # [rows, R], with the scale
    right: np.ndarray  # [R, columns]
    lengths_E: np.ndarray | None = None
    outputs_first: bool = True  # each row of the stored matrix is one output

    @property
    def needs_whole(self) -> bool:
        """Whether a row of the result depends on other rows."""
        return self.lengths_E is not None and not self.outputs_first

    def applied(self, rows: np.ndarray, start: int) -> np.ndarray:
        stop = start + len(rows)
        rows += self.left[start:stop] @ self.right
        if self.lengths_E is None:
            return rows
        norms = np.linalg.norm(rows, axis=1 if self.outputs_first else 0, keepdims=True)
        np.maximum(norms, np.finfo(np.float32).tiny, out=norms)
        lengths = self.lengths_E[start:stop, None] if self.outputs_first else self.lengths_E[None]
        rows *= lengths / norms
        return rows


@dataclass(frozen=True)
class LowRankOfExperts:
    """Adds B A of each expert to its matrix in the stored tensor, whose first dim are the experts."""

    a_ERD: np.ndarray
    b_ERO: np.ndarray  # with the scale
    is_transposed: bool  # the matrices are stored as [inputs, outputs]

    def applied(self, rows: np.ndarray, start: int) -> np.ndarray:
        for matrix, a_RD, b_RO in zip(rows, self.a_ERD[start:], self.b_ERO[start:], strict=False):
            matrix += a_RD.T @ b_RO if self.is_transposed else b_RO.T @ a_RD
        return rows


@dataclass(frozen=True)
class TokenRows:
    """Replaces the rows of some tokens; new tokens follow after the last row."""

    ids: tuple[int, ...]  # in increasing order
    rows_ND: np.ndarray

    def applied(self, rows: np.ndarray, start: int) -> np.ndarray:
        ids = np.array(self.ids)
        inside = (ids >= start) & (ids < start + len(rows))
        rows[ids[inside] - start] = self.rows_ND[inside]
        return rows


@dataclass(frozen=True)
class Whole:
    """Replaces the tensor."""

    array: np.ndarray


Change = LowRank | LowRankOfExperts | TokenRows | Whole


@dataclass(frozen=True)
class Tensor:
    """One tensor of the merged model."""

    stored: str  # the tensor of the base's files that it starts from
    change: Change | None
    shape: tuple[int, ...]


class MergedWeights:
    """Values are computed when they are read. Nothing is kept."""

    def __init__(self, source: ExportSource) -> None:
        self._base = Checkpoint(source.base, source.spec)
        self._base.check_fits(source.matrices, str(source.adapter))
        changes = _changes(source, self._base)
        self.is_untied = self._base.is_tied and changes.get(self._base.embedding) is not changes.get(self._head)
        for parameter in changes:
            self._base.check_changeable(parameter)
        self._tensors = self._merged(changes)

    @property
    def _head(self) -> str:
        return self._base.head or ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def num_tokens(self) -> int:
        """The rows of the embedding."""
        name = self._base.stored_name(self._base.embedding) or self._base.stored_name(self._head) or ""
        return self._tensors[name].shape[0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """The type of the base's tensor: "bfloat16", "float32", …"""
        stored = self._base.tensors[self._tensors[name].stored].dtype
        return DTYPES.get(stored, stored)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about these weights."""
        notes = []
        if self.is_untied:
            notes.append(
                "The head has a weight of its own now: the base's is its embedding, and the adapter changes one."
            )
        if self._base.formats:
            notes.append(f"The base's weights are quantized ({', '.join(self._base.formats)}): they were dequantized.")
        return tuple(notes)

    def is_changed(self, name: str) -> bool:
        """Whether its values differ from the base's files."""
        tensor = self._tensors[name]
        return tensor.change is not None or self._base.is_packed(tensor.stored)

    def is_trained(self, name: str) -> bool:
        """Whether the adapter changes it."""
        return self._tensors[name].change is not None

    def base_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of the base's tensor in float32."""
        return self._base.read(self._tensors[name].stored, start, stop)

    def read(self, name: str) -> np.ndarray:
        """The whole tensor in float32."""
        if not self.shape(name):
            return self._base.read(self._tensors[name].stored)
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor in float32: the first dim from `start` to before `stop`."""
        tensor = self._tensors[name]
        change, last = tensor.change, self._base.tensors[tensor.stored].shape[0]
        if isinstance(change, Whole):
            return change.array[start:stop]
        if isinstance(change, LowRank) and change.needs_whole:
            return change.applied(self._base.read(tensor.stored), 0)[start:stop]
        rows = self._base.read(tensor.stored, start, min(stop, last)) if start < last else self._no_rows(tensor)
        if stop > last:  # of new tokens, which all have a value of their own
            rows = np.concatenate([rows, np.zeros((stop - max(start, last), *tensor.shape[1:]), np.float32)])
        return rows if change is None else change.applied(rows, start)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """The tensor in float32 in pieces of its first dim, so that a large one needs little memory."""
        for start, stop in self._pieces(name):
            yield self.read(name) if stop is None else self.rows(name, start, stop)

    def raw_chunks(self, name: str) -> Iterator[np.ndarray]:
        """A tensor without a change as the bytes of the base's files, in pieces."""
        assert not self.is_changed(name)
        for start, stop in self._pieces(name):
            yield self._base.raw(self._tensors[name].stored, start, stop)

    def _pieces(self, name: str) -> Iterator[tuple[int, int | None]]:
        shape, change = self.shape(name), self._tensors[name].change
        if not shape or (isinstance(change, LowRank) and change.needs_whole):
            yield 0, None
            return
        step = max(1, CHUNK_BYTES // max(1, 4 * math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield start, min(start + step, shape[0])

    def config(self) -> dict[str, Any]:
        """The content of config.json: the base's, with the new number of tokens, the scaled positions, and untied if it
        is."""
        config = copy.deepcopy(read_config(self._base.folder))
        text = config.get("text_config")
        parts = [config, *([text] if isinstance(text, dict) else [])]
        before = self._base.tensors[self._tensors[self._any_embedding].stored].shape[0]
        if self.num_tokens != before:
            holding = [part for part in parts if isinstance(part.get("vocab_size"), int)] or parts[-1:]
            for part in holding:
                part["vocab_size"] = self.num_tokens
        for part in parts if self._base.formats else ():
            part.pop("quantization_config", None)
        if self._base.positions is not None:
            self._base.positions.write_to(config)
        if self.is_untied:
            for part in parts:
                part["tie_word_embeddings"] = False
        return config

    @property
    def _any_embedding(self) -> str:
        return self._base.stored_name(self._base.embedding) or self._base.stored_name(self._head) or ""

    @staticmethod
    def _no_rows(tensor: Tensor) -> np.ndarray:
        return np.empty((0, *tensor.shape[1:]), np.float32)

    def _merged(self, changes: dict[str, Change]) -> dict[str, Tensor]:
        base = self._base
        # A part of an expert's parameter has a change of its own.
        parameters = base.parameters | {name: name for parts in base.expert_parts.values() for name in parts}
        tensors = {}
        for name, stored in base.tensors.items():
            change = changes.get(parameters.get(name, ""))
            tensors[name] = Tensor(name, change, _shape(stored.shape, change))
        found = {base.parameters[name] for name in tensors if name in base.parameters}
        both = (base.embedding, self._head) if base.is_tied else ()
        for parameter in both:
            other = next(each for each in both if each != parameter)
            if self.is_untied and parameter not in found:
                stored_name = base.stored_name(other)
                assert stored_name is not None
                change = changes.get(parameter)
                shape = _shape(base.tensors[stored_name].shape, change)
                tensors[base.new_name(parameter, other)] = Tensor(stored_name, change, shape)
        lost = changes.keys() - {parameters.get(name) for name in tensors} - {*both}
        if lost:
            raise TrilloraError(
                f"The base model's files have no {min(lost)}, which the adapter changes.",
                where=str(base.folder),
                do="use the base model that the adapter was trained with (see its adapter_config.json)",
            )
        return tensors


def _changes(source: ExportSource, base: Checkpoint) -> dict[str, Change]:
    """What the adapter does to each parameter, or to each tensor of the files if experts are stored one by one. Tied
    parameters that change together have the same object."""
    changes: dict[str, Change] = {}
    matrices = source.matrices
    for target, layer in base.layers.items():
        changes[f"{target}.weight"] = _low_rank(target, matrices, layer.scale, layer.is_transposed, layer.is_embedding)
    for target, parameter in base.experts.items():
        path, scale = parameter.lora
        holder = ".".join(filter(None, (target.rpartition(".")[0], path)))
        a, b = (matrices[holder + kind.suffix].astype(np.float32) for kind in (LORA_A, LORA_B))
        a_ERD, b_ERO = by_expert(a, b * np.float32(scale), parameter.num_experts)
        if not base.expert_parts[target]:
            changes[target] = LowRankOfExperts(a_ERD, b_ERO, parameter.is_transposed)
        for name, part in base.expert_parts[target].items():
            changes[name] = LowRank(b_ERO[part.expert][:, part.rows].T, a_ERD[part.expert])
    for name, array in matrices.items():
        if name.endswith(TOKEN_ROWS.suffix):
            assert source.spec.tokens is not None
            weight = name.removesuffix(TOKEN_ROWS.suffix) + ".weight"
            change = TokenRows(source.spec.tokens.ids, array)
            tied = (base.embedding, base.head or "") if base.is_tied else (weight,)
            changes |= dict.fromkeys(tied, change)
        for kind, end in ((SAVED_WEIGHT, ".weight"), (SAVED_BIAS, ".bias")):
            if name.endswith(kind.suffix):
                changes[name.removesuffix(kind.suffix) + end] = Whole(array)
    return changes


def _low_rank(
    target: str, matrices: dict[str, np.ndarray], scale: float, is_transposed: bool, is_embedding: bool
) -> LowRank:
    kinds = (EMBEDDING_A, EMBEDDING_B) if is_embedding else (LORA_A, LORA_B)
    a_RD, b_ER = (matrices[target + kind.suffix].astype(np.float32) for kind in kinds)
    lengths = matrices.get(target + MAGNITUDE.suffix)
    left, right = (a_RD.T, b_ER.T) if is_transposed else (b_ER, a_RD)
    return LowRank(left * np.float32(scale), right, lengths, outputs_first=not is_transposed)


def _shape(shape: tuple[int, ...], change: Change | None) -> tuple[int, ...]:
    if isinstance(change, Whole):
        return change.array.shape
    if isinstance(change, TokenRows):
        return max(shape[0], change.ids[-1] + 1), *shape[1:]
    return shape
