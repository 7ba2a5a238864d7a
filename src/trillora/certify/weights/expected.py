"""The weights of a merged model by their definition, W + scale * B A, in float64.

    weights = ExpectedWeights(base, spec, matrices)
    for piece in weights.pieces("model.layers.0.self_attn.q_proj.weight"):
        piece.values    # float64, rows piece.start to piece.stop
        piece.slack     # how far float32 arithmetic may be from them; 0 where nothing is computed

This is not the code that writes exports (`export/merged_weights.py`): an error there must not be in both. Only the
reader of the base's files is the same.

Legend: R rank, D inputs, E outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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
from trillora.model.loading.checkpoint import Checkpoint
from trillora.model.loading.source import OpenModel
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.expert_parameters import by_expert

ULP = 2.0**-23  # relative error of one operation in float32, at most half of this
PIECE = 1 << 22  # values that are computed at a time


@dataclass(frozen=True)
class ExpectedRows:
    """Rows of a tensor: expected values, their slack, and the base's values (None for rows that it does not have)."""

    start: int
    stop: int
    values: np.ndarray
    slack: np.ndarray | float
    base: np.ndarray | None


class TensorRule(Protocol):
    """How the adapter changes a tensor."""

    @property
    def needs_whole(self) -> bool: ...

    def apply(self, rows: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float]: ...


@dataclass(frozen=True)
class Product:
    """W + left right; with DoRA, each output's weights then get a trained length."""

    left: np.ndarray  # [rows, R], with the scale
    right: np.ndarray  # [R, columns]
    lengths_E: np.ndarray | None = None
    outputs_first: bool = True

    @property
    def needs_whole(self) -> bool:
        return self.lengths_E is not None and not self.outputs_first

    def apply(self, rows: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float]:
        left = self.left[start : start + len(rows)]
        values = rows + left @ self.right
        sizes = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(self.right, axis=0)[None]
        slack = ULP * (np.abs(rows) + (len(self.right) + 4) * sizes)
        if self.lengths_E is None:
            return values, slack
        axis = int(self.outputs_first)
        factors = np.expand_dims(self.lengths_E[start : start + len(rows)] if axis else self.lengths_E, axis)
        factors = factors / np.maximum(np.linalg.norm(values, axis=axis, keepdims=True), np.finfo(np.float32).tiny)
        values = values * factors
        sums = 4 * np.sqrt(values.shape[axis]) + 8  # the norm is a sum of that many squares
        return values, slack * np.abs(factors) + sums * ULP * np.abs(values)


@dataclass(frozen=True)
class ProductOfExperts:
    """W + B A of each expert; the first dim are the experts."""

    a_ERD: np.ndarray
    b_ERO: np.ndarray
    is_transposed: bool
    needs_whole = False

    def apply(self, rows: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float]:
        values, slack = np.empty_like(rows), np.empty_like(rows)
        for number, matrix in enumerate(rows):
            a_RD, b_RO = self.a_ERD[start + number], self.b_ERO[start + number]
            left, right = (a_RD.T, b_RO) if self.is_transposed else (b_RO.T, a_RD)
            values[number], slack[number] = Product(left, right).apply(matrix, 0)
        return values, slack


@dataclass(frozen=True)
class TrainedRows:
    """The rows of trained tokens."""

    ids: np.ndarray
    rows_ND: np.ndarray
    needs_whole = False

    def apply(self, rows: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float]:
        is_here = (self.ids >= start) & (self.ids < start + len(rows))
        values = rows.copy()
        values[self.ids[is_here] - start] = self.rows_ND[is_here]
        return values, 0.0


@dataclass(frozen=True)
class Replaced:
    """A module that was trained as a whole."""

    array: np.ndarray
    needs_whole = False

    def apply(self, rows: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float]:
        return self.array[start : start + len(rows)], 0.0


@dataclass(frozen=True)
class _Tensor:
    stored: str  # the base's tensor
    rule: TensorRule | None
    shape: tuple[int, ...]


class ExpectedWeights:
    """Tensors by the names of the base's files."""

    def __init__(self, base: OpenModel, spec: LoraSpec, matrices: Mapping[str, np.ndarray]) -> None:
        self.files = Checkpoint(base, spec)
        self._exact = {name: array.astype(np.float64) for name, array in matrices.items()}
        rules = self._rules(spec)
        ties = (self.files.embedding, self.files.head or "")
        is_untied = self.files.is_tied and rules.get(ties[0]) is not rules.get(ties[1])
        self._tensors: dict[str, _Tensor] = {}
        for stored, tensor in self.files.tensors.items():
            rule = rules.get(self.files.parameters.get(stored, stored))
            self._tensors[stored] = _Tensor(stored, rule, _shape(tensor.shape, rule))
        for parameter, other in (ties, ties[::-1]) if is_untied else ():
            like = self.files.stored_name(other)
            if self.files.stored_name(parameter) is None and like is not None:
                shape = _shape(self.files.tensors[like].shape, rules.get(parameter))
                self._tensors[self.files.new_name(parameter, other)] = _Tensor(like, rules.get(parameter), shape)
        self.tied_head = (ties[1], self.files.stored_name(ties[0])) if self.files.is_tied and not is_untied else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def type(self, name: str) -> str:
        """The type of the base's tensor, in safetensors' words: BF16."""
        return self.files.tensors[self._tensors[name].stored].dtype

    def is_copied(self, name: str) -> bool:
        """Whether it has the values of the base's files, as they are stored."""
        return self._tensors[name].rule is None and not self.files.is_packed(self._tensors[name].stored)

    def is_trained(self, name: str) -> bool:
        return self._tensors[name].rule is not None

    def raw(self, name: str, start: int, stop: int) -> np.ndarray:
        """The bytes of a copied tensor."""
        return self.files.raw(self._tensors[name].stored, start, stop)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """The pieces of a tensor, as rows."""
        shape, rule = self.shape(name), self._tensors[name].rule
        if not shape or (rule is not None and rule.needs_whole):
            return [(0, shape[0] if shape else 1)]
        step = max(1, PIECE // max(1, int(np.prod(shape[1:], dtype=np.int64))))
        return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]

    def pieces(self, name: str) -> Iterator[ExpectedRows]:
        tensor = self._tensors[name]
        num_stored = (self.files.tensors[tensor.stored].shape or (1,))[0]
        for start, stop in self.spans(name):
            base = self.files.read(tensor.stored, start, min(stop, num_stored)).astype(np.float64)
            rows, known = base, base if stop <= num_stored else None
            if stop > num_stored:
                rows = np.concatenate([base, np.zeros((stop - max(start, num_stored), *tensor.shape[1:]))])
            values, slack = (rows, 0.0) if tensor.rule is None else tensor.rule.apply(rows, start)
            yield ExpectedRows(
                start, stop, values, slack, known if known is None or known.shape == values.shape else None
            )

    def _rules(self, spec: LoraSpec) -> dict[str, TensorRule]:
        rules: dict[str, TensorRule] = {}
        exact = self._exact
        for target, layer in self.files.layers.items():
            kinds = (EMBEDDING_A, EMBEDDING_B) if layer.is_embedding else (LORA_A, LORA_B)
            a_RD, b_ER = (exact[target + kind.suffix] for kind in kinds)
            left, right = (a_RD.T, b_ER.T) if layer.is_transposed else (b_ER, a_RD)
            lengths = exact.get(target + MAGNITUDE.suffix)
            rules[f"{target}.weight"] = Product(layer.scale * left, right, lengths, not layer.is_transposed)
        for target, parameter in self.files.experts.items():
            path, scale = parameter.lora
            holder = ".".join(filter(None, (target.rpartition(".")[0], path)))
            a, b = (exact[holder + kind.suffix] for kind in (LORA_A, LORA_B))
            a_ERD, b_ERO = by_expert(a, scale * b, parameter.num_experts)
            parts = self.files.expert_parts[target]
            if not parts:
                rules[target] = ProductOfExperts(a_ERD, b_ERO, parameter.is_transposed)
            for name, part in parts.items():
                rules[name] = Product(b_ERO[part.expert][:, part.rows].T, a_ERD[part.expert])
        for name, array in exact.items():
            if name.endswith(TOKEN_ROWS.suffix) and spec.tokens is not None:
                weight = name.removesuffix(TOKEN_ROWS.suffix) + ".weight"
                rule = TrainedRows(np.array(spec.tokens.ids), array)
                for parameter_name in (
                    (self.files.embedding, self.files.head or "") if self.files.is_tied else (weight,)
                ):
                    rules[parameter_name] = rule
            for kind, end in ((SAVED_WEIGHT, ".weight"), (SAVED_BIAS, ".bias")):
                if name.endswith(kind.suffix):
                    rules[name.removesuffix(kind.suffix) + end] = Replaced(array)
        return rules


def _shape(shape: tuple[int, ...], rule: TensorRule | None) -> tuple[int, ...]:
    if isinstance(rule, Replaced):
        return rule.array.shape
    if isinstance(rule, TrainedRows):
        return max(shape[0], int(rule.ids[-1]) + 1), *shape[1:]
    return shape


def product_slack(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How far products of matrices that are equal but for float32 rounding may be from each other."""
    sizes = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0)[None]
    return ULP * (left.shape[1] + 8) * sizes + np.finfo(np.float32).tiny
