"""Merges the changes that several adapters make to one layer. The result is a change of low rank again.

An adapter changes a layer's weight W [E, D] by D_i = scale_i * B_i A_i. A merge is a sum of terms, one per adapter:

    linear, cat, svd   term_i = w_i D_i
    magnitude-prune    term_i = w_i P_i, where P_i has the largest entries of D_i and zeros
    dare-linear        term_i = w_i P_i, where P_i has random entries of D_i, divided by the density, and zeros
    ties, dare-ties    as the two above, but only where P_i has the sign of sum_j P_j, divided by the number of those

Example: D_1 = [2, -1], D_2 = [3, 4], weights 1 and 1, density 1. linear: [5, 3]. ties: [(2 + 3) / 2, 4 / 1], because
the sum [5, 3] is positive and -1 is not.

Sums of products have a low rank already, so they are factored through small matrices in float64. The other methods
compute the whole matrix in float32, and cut it to a rank.

Legend: R rank, D inputs, E outputs.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trillora.errors import Bug, TrilloraError
from trillora.recipe.group_section import MergeOptions

LARGEST = 1e15  # entry of a change: float32 ends at 3e38, and the iteration below squares the matrix
ROUNDING = 1e-6  # of float32: matrices that differ by less, relative to their norm, are the same
EXACT_SIZE = 1024  # a matrix with a longer smaller side is cut by iteration, in a tenth of the time
NUM_SPARE, NUM_ITERATIONS = 16, 6  # of that iteration


@dataclass(frozen=True)
class MergeSteps:
    """The two steps before the sum."""

    prune: Literal["largest", "random"] | None = None
    elects_sign: bool = False


METHODS: dict[str, MergeSteps] = {
    "linear": MergeSteps(),
    "cat": MergeSteps(),
    "svd": MergeSteps(),
    "ties": MergeSteps("largest", elects_sign=True),
    "dare-linear": MergeSteps("random"),
    "dare-ties": MergeSteps("random", elects_sign=True),
    "magnitude-prune": MergeSteps("largest"),
}


@dataclass(frozen=True)
class LayerChange:
    """The change of one adapter to one layer, scale * B A."""

    a_RD: np.ndarray
    b_ER: np.ndarray
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b_ER.shape[0], self.a_RD.shape[1]

    @property
    def rank(self) -> int:
        return self.a_RD.shape[0]

    def matrix(self) -> np.ndarray:
        return (self.b_ER @ self.a_RD) * np.float32(self.scale)


@dataclass(frozen=True)
class MergedLayer:
    """B A is the merged change, with scale 1."""

    a_RD: np.ndarray
    b_ER: np.ndarray
    square: float  # the sum of the squares of the whole change, before the cut
    term_square: float  # the same for the terms of all adapters, together
    lost_square: float  # of what the cut to a rank removed
    shares: dict[int, float]  # adapter -> its term's part of `square`, which is their sum


def random_mask(seed: int, layer: str, adapter: int, shape: tuple[int, ...], density: float) -> np.ndarray:
    """Which entries DARE keeps. It depends on nothing else, so layers can be merged in any order."""
    generator = np.random.default_rng([seed, zlib.crc32(layer.encode()), adapter])
    return generator.random(shape, np.float32) < np.float32(density)


def terms(layer: str, changes: dict[int, LayerChange], options: MergeOptions) -> dict[int, np.ndarray]:
    """The terms of the sum that defines the merge, in float32. An adapter without this layer has none."""
    method, weights, density = METHODS[options.method], options.weights or (), options.density or 1.0
    pruned: dict[int, np.ndarray] = {}
    for number, change in changes.items():
        matrix = change.matrix()
        if method.prune == "largest":
            matrix *= largest_mask(matrix, density)
        elif method.prune == "random" and density < 1:
            matrix *= random_mask(options.seed or 0, layer, number, matrix.shape, density)
            matrix /= np.float32(density)
        pruned[number] = matrix
    if not method.elects_sign:
        return {number: matrix * np.float32(weights[number]) for number, matrix in pruned.items()}
    is_positive = _sum(pruned.values()) >= 0
    agrees = {number: np.where(is_positive, matrix > 0, matrix < 0) for number, matrix in pruned.items()}
    counts = np.maximum(_sum(mask.astype(np.float32) for mask in agrees.values()), 1)
    return {n: np.float32(weights[n]) * matrix * agrees[n] / counts for n, matrix in pruned.items()}


def largest_mask(matrix: np.ndarray, density: float) -> np.ndarray:
    """The largest entries by absolute value; of equal ones, the first."""
    num_kept = int(density * matrix.size)
    if num_kept in (0, matrix.size):
        return np.full(matrix.shape, num_kept > 0)
    sizes = np.abs(matrix).ravel()
    smallest = np.partition(sizes, matrix.size - num_kept)[matrix.size - num_kept]
    mask = sizes > smallest
    mask[np.flatnonzero(sizes == smallest)[: num_kept - int(mask.sum())]] = True
    return mask.reshape(matrix.shape)


def definition(layer: str, changes: dict[int, LayerChange], options: MergeOptions) -> np.ndarray:
    """The merged change of a layer before any cut."""
    return _sum(terms(layer, changes, options).values())


def merge_layer(layer: str, changes: dict[int, LayerChange], options: MergeOptions, rank: int | None) -> MergedLayer:
    """`rank` limits the rank of the result; None keeps the whole change. The result is compared with the definition."""
    _check_size(layer, changes, options)
    if METHODS[options.method].prune:
        assert rank is not None
        merged, found = _merge_matrices(terms(layer, changes, options), rank)
    else:
        merged, found = _merge_products(changes, options, rank)
    whole = (merged.square + merged.term_square) ** 0.5
    tolerance = ROUNDING * whole * (merged.lost_square**0.5 + ROUNDING * whole)  # of a square: (x + e)^2 - x^2
    if METHODS[options.method].prune:
        tolerance += ROUNDING * merged.square  # `lost_square` is a difference of float32 squares
    if not abs(found - merged.lost_square) <= tolerance:  # never true for NaN
        raise Bug(
            f"The merged change of {layer} is not the one that {options.method} defines: it differs by "
            f"{found**0.5:g} instead of {merged.lost_square**0.5:g}.",
            do="report it to the developers of Trillora; nothing was written",
        )
    return merged


def _check_size(layer: str, changes: dict[int, LayerChange], options: MergeOptions) -> None:
    """Refuses values whose products float32 cannot hold, so that no result is infinite."""
    largest = max(
        abs((options.weights or ())[number] * change.scale) * _largest(change.a_RD) * _largest(change.b_ER)
        for number, change in changes.items()
    )
    if not largest / (options.density or 1.0) <= LARGEST:
        raise TrilloraError(
            "The merged change is too large for float32.",
            where=layer,
            do="use smaller weights; if they are small, an adapter is damaged",
        )


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _merge_products(
    changes: dict[int, LayerChange], options: MergeOptions, rank: int | None
) -> tuple[MergedLayer, float]:
    """The merged sum of products, and the square of its difference from the definition."""
    b_ER, a_RD = _joined(changes, options)
    gram = np.array([[_product(one, other) for other in changes.values()] for one in changes.values()])
    w = np.array([(options.weights or ())[number] for number in changes])
    shares = dict(zip(changes, (w * (gram @ w)).tolist(), strict=True))
    left, singular, right = _factored(b_ER, a_RD)
    if options.method == "cat":
        a, b, lost = a_RD, b_ER, 0.0
    else:
        # What is smaller than the rounding of float32 is not part of the change.
        true_rank = int((singular > singular.max(initial=0.0) * np.finfo(np.float32).eps).sum())
        kept = min(true_rank, rank if rank is not None else true_rank)
        root = np.sqrt(singular[:kept])
        a, b, lost = root[:, None] * right[:kept], left[:, :kept] * root, square_of(singular[kept:])
    a, b = a.astype(np.float32), b.astype(np.float32)
    rest = _core(np.concatenate([b_ER, -b], axis=1), np.concatenate([a_RD, a]))
    square, term_square = square_of(singular), float(w**2 @ np.diag(gram))
    return MergedLayer(a, b, square, term_square, lost, shares), square_of(rest)


def _merge_matrices(parts: dict[int, np.ndarray], rank: int) -> tuple[MergedLayer, float]:
    """The sum of whole matrices cut to a rank, and the square of its difference from the definition."""
    whole = _sum(parts.values())
    square, term_square = square_of(whole), sum(map(square_of, parts.values()))
    shares = {number: float(np.vdot(part.astype(np.float64), whole)) for number, part in parts.items()}
    is_wide = whole.shape[0] <= whole.shape[1]
    b, a = _cut(whole if is_wide else whole.T, min(rank, *whole.shape))
    a, b = (a, b) if is_wide else (b.T, a.T)
    lost = max(0.0, square - float(((b.T @ b) * (a @ a.T)).sum()))
    a, b = a.astype(np.float32), b.astype(np.float32)
    return MergedLayer(a, b, square, term_square, lost, shares), square_of(whole - b @ a)


def _cut(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best approximation of this rank, for a matrix [n, m] with n <= m: its projection on the `rank` leading left
    singular vectors. They are the eigenvectors of matrix @ matrix.T; a large matrix gets close to them by iteration."""
    if matrix.shape[0] <= EXACT_SIZE:
        wide = matrix.astype(np.float64)
        basis = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :rank]
        projected = basis.T @ wide
    else:
        generator = np.random.default_rng(0)
        num_directions = min(rank + NUM_SPARE, matrix.shape[0])
        directions = matrix @ generator.standard_normal((matrix.shape[1], num_directions), np.float32)
        for _ in range(NUM_ITERATIONS):
            directions = matrix @ (matrix.T @ np.linalg.qr(directions)[0])
        around = np.linalg.qr(directions.astype(np.float64))[0]
        inside = around.T @ matrix
        turned = np.linalg.eigh(inside @ inside.T)[1][:, ::-1][:, :rank]
        basis, projected = around @ turned, turned.T @ inside
    root = np.sqrt(np.linalg.norm(projected, axis=1))  # half of each singular value on either side
    return basis * root, np.divide(projected, root[:, None], out=np.zeros_like(projected), where=root[:, None] > 0)


def _joined(changes: dict[int, LayerChange], options: MergeOptions) -> tuple[np.ndarray, np.ndarray]:
    """B [E, R] and A [R, D] whose product is the weighted sum of all changes, in float64."""
    weights = options.weights or ()
    b = np.concatenate([change.b_ER for change in changes.values()], axis=1, dtype=np.float64)
    a = np.concatenate([weights[n] * change.scale * change.a_RD.astype(np.float64) for n, change in changes.items()])
    return b, a


def _factored(b_ER: np.ndarray, a_RD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The singular value decomposition (SVD) of B A, through the SVD of a small matrix."""
    left, left_core = np.linalg.qr(b_ER)
    right, right_core = np.linalg.qr(a_RD.T)
    u, singular, v = np.linalg.svd(left_core @ right_core.T, full_matrices=False)
    return left @ u, singular, v @ right.T


def _core(b_ER: np.ndarray, a_RD: np.ndarray) -> np.ndarray:
    """A small matrix with the singular values of B A."""
    left, right = (np.asarray(np.linalg.qr(matrix, mode="r")) for matrix in (b_ER, a_RD.T))
    return left @ right.T


def _product(one: LayerChange, other: LayerChange) -> float:
    """The sum of the products of their entries."""
    b = one.b_ER.T.astype(np.float64) @ other.b_ER
    return one.scale * other.scale * float((b * (one.a_RD.astype(np.float64) @ other.a_RD.T)).sum())


def square_of(array: np.ndarray) -> float:
    flat = array.astype(np.float64).ravel()
    return float(flat @ flat)


def _sum(matrices: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, matrices)
