"""Compares a training of the golden model with the record of a CPU in float32; refused below a threshold. No jax.

For each adapter matrix, of its gradient in the first step:

- cosine: 1 if the direction is right;
- sign agreement: of the entries that are larger than the median of the record, the share with the same sign;
- norm ratio: 1 if the size is right.

The loss alone proves little: it hardly changes when attention sees the wrong tokens. Measured on a CPU, first step:

    change                                       loss       worst cosine   signs   norm ratio
    bfloat16 instead of float32                  +0.01 %    0.9989         1.00    0.998 to 1.003
    the same on an H200, cuDNN's attention       +0.00 %    0.9987         1.00    0.998 to 1.005
    attention scores 5 % too large               +0.01 %    0.992          1.00    0.99 to 1.05
    attention across documents                   -0.39 %    0.33           0.66    0.89 to 1.06
    attention to later tokens                    -0.24 %    0.13           0.54    0.93 to 1.06

The thresholds follow from the first line. bfloat16 has eight bits, and chips round in other places than a CPU: ten
times its error in the cosine, and in the norm, is still a correct chip. In float32 we ask for the most exact matmuls a
chip has, but a kernel may use bfloat16 inside; the threshold lets even that pass, with twice the error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from trillora.devices.measured import GoldenFigures, ProofCheck
from trillora.files.atomic import write_file

RECORD = Path(__file__).parent / "golden.safetensors"
LOSSES = "losses"
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Thresholds:
    """What a correct chip reaches."""

    loss: float  # largest relative difference
    cosine: float  # smallest
    signs: float  # smallest agreement
    norm: float  # largest relative difference


THRESHOLDS = {
    "bfloat16": Thresholds(loss=0.01, cosine=0.99, signs=0.98, norm=0.03),
    "float32": Thresholds(loss=0.005, cosine=0.998, signs=0.99, norm=0.01),
}


@dataclass(frozen=True)
class GoldenRecord:
    """What the golden model gave on a CPU in float32."""

    inputs: str  # digest
    losses: tuple[float, ...]
    gradients: dict[str, Array]
    libraries: dict[str, str]

    def write(self, path: Path = RECORD) -> None:
        tensors = {LOSSES: np.array(self.losses, np.float32), **self.gradients}
        metadata = {"inputs": self.inputs, "libraries": json.dumps(self.libraries)}
        write_file(path, save(tensors, metadata))

    @classmethod
    def read(cls, path: Path = RECORD) -> GoldenRecord:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        losses = tuple(tensors.pop(LOSSES).tolist())
        return cls(metadata["inputs"], losses, tensors, json.loads(metadata["libraries"]))


def figures_of(
    losses: Sequence[float], gradients: Mapping[str, Array], how: str, record: GoldenRecord
) -> GoldenFigures:
    return GoldenFigures(
        how=how,
        losses=[_json_number(loss) for loss in losses],
        expected=list(record.losses[: len(losses)]),
        matrices={name: compare(gradients[name], expected) for name, expected in sorted(record.gradients.items())},
    )


def compare(found: Array, expected: Array) -> list[float]:
    """Cosine, sign agreement and ratio of norms. A gradient that is zero or not finite gives zeros."""
    x, y = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    norms = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if not np.isfinite(norms[0]) or norms[0] == 0:
        return [0.0, 0.0, 0.0]
    large = np.abs(y) >= np.median(np.abs(y))
    cosine = float(x @ y) / (norms[0] * norms[1])
    return [cosine, float(np.mean((np.sign(x) == np.sign(y))[large])), norms[0] / norms[1]]


def judge(figures: GoldenFigures, dtype: str) -> list[ProofCheck]:
    """The lines of the proof for one number format."""
    limits = THRESHOLDS[dtype]
    off = [abs(found / expected - 1) for found, expected in zip(figures.losses, figures.expected, strict=True)]
    worst = max(range(len(off)), key=lambda step: off[step])
    loss = ProofCheck(
        f"loss of {len(off)} steps, {dtype}",
        "ok" if off[worst] <= limits.loss else "refused",
        f"off by {off[worst]:.2%} at most (threshold {limits.loss:.1%})",
        f"step {worst + 1}: {figures.losses[worst]:.4f}, expected {figures.expected[worst]:.4f}",
    )
    return [loss, *_gradient_checks(figures.matrices, limits, dtype)]


def _gradient_checks(matrices: Mapping[str, Sequence[float]], limits: Thresholds, dtype: str) -> list[ProofCheck]:
    def check(what: str, place: int, limit: float, text: str, distance: float) -> ProofCheck:
        name = max(matrices, key=lambda n: abs(matrices[n][place] - 1))
        found = matrices[name][place]
        passes = abs(found - 1) <= distance
        shown = f"{found:.4f} at worst (threshold {text.format(limit=limit)})"
        return ProofCheck(f"gradients, {dtype}: {what}", "ok" if passes else "refused", shown, name)

    return [
        check("cosine", 0, limits.cosine, "{limit:g}", 1 - limits.cosine),
        check("signs", 1, limits.signs, "{limit:g}", 1 - limits.signs),
        check("norm ratio", 2, limits.norm, "1 ± {limit:g}", limits.norm),
    ]


def _json_number(value: float) -> float:
    """JSON has no NaN: a loss that is not finite counts as zero, which is refused."""
    return value if np.isfinite(value) else 0.0
