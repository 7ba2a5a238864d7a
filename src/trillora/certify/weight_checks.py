"""Checks a merged model or a GGUF file tensor by tensor against its definition, W + scale * B A.

Two figures say whether the right weights arrived:

    error    of each tensor, as a fraction of what its storage type may lose by rounding; at most 1
    share    of the trained change that is in the file: <file - base, change> / <change, change>

The share is 1 for a correct file, 0 for the base, 2 if the adapter was merged twice, 0.5 with half the alpha. Rounding
is independent of the change, so it hardly moves the sum over all weights: this works for 4-bit files too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trillora.certify.certificate import Check
from trillora.certify.gguf_file import GgufFile
from trillora.certify.subject import Subject
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress
from trillora.export.merged_weights import MergedWeights
from trillora.export.source import ExportSource
from trillora.model.adapter_parameters import LORA_A, LORA_B
from trillora.model.loading.source import weight_files
from trillora.model.loading.tensor_files import opened

# Root mean square error of a tensor as a fraction of its root mean square. Floats: half a unit in the last place.
ROUNDING = {
    "F32": 2e-6,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "Q8_0": 0.02,
    "Q6_K": 0.05,
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.10),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 0.20),
}
# The largest error of an entry as a fraction of the largest entry in its block of 32: half a step, or a whole one where
# the range is not symmetric (-8 to 7), and the step itself is rounded to float16, by 2^-11, which counts per step.
BLOCK_STEPS = {
    "Q8_0": (0.5 + 127 * 2**-11) / 127,
    "Q5_0": (1 + 16 * 2**-11) / 16,
    "Q4_0": (1 + 8 * 2**-11) / 8,
}
BLOCK = 32
SHARES = (0.9, 1.1)
DO = "export it again from the run; if this happens again, report it to the developers of Trillora"


@dataclass
class _Sums:
    """What is gathered over all tensors."""

    num_tensors: int = 0
    worst: float = 0.0  # error / allowed
    worst_name: str = ""
    along: float = 0.0  # <file - base, change>
    square: float = 0.0  # <change, change>
    faults: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(
        self, name: str, found: np.ndarray, expected: np.ndarray, base: np.ndarray | None, kind: str, factors: int = 1
    ) -> None:
        """`factors`: how many rounded arrays were multiplied."""
        if found.shape != expected.shape:
            self.faults.append(f"{name} is {found.shape} instead of {expected.shape}")
            return
        if not np.isfinite(found).all():
            largest = float(abs(expected).max())
            why = f"the largest value is {largest:.4g}, float16 ends at 65504" if largest > 65504 else "it is damaged"
            self.faults.append(f"{name} has values that are not finite ({why})")
            return
        self.num_tensors += 1
        error = _error(found, expected, kind) / factors
        if error > self.worst:
            self.worst, self.worst_name = error, name
        if error > 1:
            self.faults.append(f"{name} is off by {error:.3g} times what {kind} may lose{_hint(found, expected, base)}")
        if base is not None and base.shape == expected.shape:
            change = expected - base
            self.along += float(np.vdot(found - base, change))
            self.square += float(np.vdot(change, change))

    @property
    def share(self) -> float | None:
        return self.along / self.square if self.square else None

    def checks(self, what: str) -> Iterator[Check]:
        if self.faults:
            named = "; ".join(self.faults[:3])
            found = f"{len(self.faults):,} tensors are wrong: {named}."
            yield Check("trained", "tensors", "failed", found, max(self.worst, 1.0), 1, DO)
        else:
            left = f"; {len(self.skipped)} were not compared ({self.skipped[0]} …)" if self.skipped else ""
            found = f"{self.num_tensors:,} {what}, as exactly as their type can store it{left}."
            yield Check("trained", "tensors", "ok", found, self.worst, 1)
        if self.share is None:
            yield Check("trained", "share of the change", "skipped", "The trained change was not found.")
            return
        low, high = SHARES
        found = f"{self.share:.4f} of the trained change is in the file."
        if low <= self.share <= high:
            yield Check("trained", "share of the change", "ok", found, self.share, 1)
        elif not self.faults and self.share < low:
            found += " The rest is smaller than the steps of the storage type."
            do = "export it in float32 or float16"
            yield Check("trained", "share of the change", "warning", found, self.share, 1, do)
        else:
            reading = (
                "the adapter is not in it" if abs(self.share) < 0.1 else "the scale is wrong, or it was merged twice"
            )
            found = f"{found[:-1]}: {reading}."
            yield Check("trained", "share of the change", "failed", found, self.share, 1, DO)


def _error(found: np.ndarray, expected: np.ndarray, kind: str) -> float:
    """The error as a fraction of what the type may lose."""
    size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64)))) or 1e-30
    off = found - expected
    error = float(np.sqrt(np.mean(np.square(off, dtype=np.float64)))) / size / ROUNDING.get(kind, 0.2)
    if kind not in BLOCK_STEPS or expected.shape[-1] % BLOCK:
        return error
    blocks, offs = (abs(array).reshape(-1, BLOCK) for array in (expected, off))
    allowed = blocks.max(axis=1) * BLOCK_STEPS[kind] * 1.001 + 1e-7  # float32; steps below 6e-8 are zero in float16
    return max(error, float((offs.max(axis=1) / allowed).max()))


def _hint(found: np.ndarray, expected: np.ndarray, base: np.ndarray | None) -> str:
    if base is not None and base.shape == found.shape and np.allclose(found, base, rtol=1e-3, atol=1e-6):
        return ": it equals the base"
    if found.ndim == 2 and found.shape[0] == found.shape[1] and np.allclose(found.T, expected, rtol=1e-2, atol=1e-4):
        return ": it is transposed"
    return ""


def source_of(subject: Subject) -> ExportSource:
    """What was trained, as `MergedWeights` reads it."""
    trained, base = subject.trained, subject.opened
    return ExportSource(
        name=subject.name,
        run=subject.run,
        adapter=subject.adapter or subject.folder,
        base=base,
        base_id=subject.base_id or base.base_name,
        spec=trained.spec,
        matrices=trained.matrices,
        recipe=subject.recipe,
        notes=(),
    )


def check_merged(subject: Subject, listener: Listener) -> Iterator[Check]:
    """A folder of safetensors."""
    weights = MergedWeights(source_of(subject))
    own = _tensors_of(subject.folder)
    sums = _Sums()
    for number, name in enumerate(weights.names):
        listener(Progress("Comparing tensors", number, len(weights.names)))
        if name not in own:
            sums.faults.append(f"{name} is missing")
            continue
        found, kind = own[name]()
        before = weights.before(name) if weights.is_changed(name) else None
        sums.add(name, found, weights.read(name), before, kind)
    listener(Progress("Comparing tensors", len(weights.names), len(weights.names)))
    extra = own.keys() - {*weights.names} - {"lm_head.weight"}  # a tied head may be stored twice
    sums.faults += [f"{name} is not in the base" for name in sorted(extra)]
    yield from sums.checks("tensors are W + scale B A")


_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _tensors_of(folder: Path) -> dict[str, Callable[[], tuple[np.ndarray, str]]]:
    """Functions that read one tensor in float32, and its type."""

    def reader(file: Path, name: str) -> Callable[[], tuple[np.ndarray, str]]:
        def read() -> tuple[np.ndarray, str]:
            with opened(file) as tensors:
                tensor = tensors.get_tensor(name)
            return tensor.to(torch.float32).numpy(), _TYPES.get(tensor.dtype, str(tensor.dtype))

        return read

    found: dict[str, Callable[[], tuple[np.ndarray, str]]] = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            found |= {name: reader(file, name) for name in tensors.keys()}  # noqa: SIM118
    return found


# ---- GGUF

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


class _Names:
    """Where a tensor of the checkpoint is in a GGUF file, by the tables of the gguf library, and how it is stored."""

    def __init__(self, model: GgufFile, subject: Subject) -> None:
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        self.architecture = model.text("general.architecture") or ""
        known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
        if self.architecture not in known:
            raise TrilloraError(f"llama.cpp has no architecture '{self.architecture}'.", where=str(model.file), do=DO)
        arch: MODEL_ARCH = known[self.architecture]
        config: Any = subject.opened.config.get_text_config()
        self._map = get_tensor_name_map(arch, config.num_hidden_layers)
        heads = getattr(config, "num_attention_heads", 1)
        self._heads = heads, getattr(config, "num_key_value_heads", None) or heads

    def find(self, name: str) -> tuple[str, int | None] | None:
        """The tensor, and the number of the expert in it."""
        if expert := _EXPERT.fullmatch(name):
            found = self._map.get_name(f"{expert[1]}.{expert[3]}.weight", try_suffixes=(".weight",))
            return None if found is None else (found, int(expert[2]))
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        return None if found is None else (found, None)

    def stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array as llama.cpp keeps it: rotary halves interleaved, Gemma's norms plus one."""
        if self.architecture == "llama" and re.search(
            r"\.attn_[qk]\.(weight|bias)$|\.attn_[qk]\.weight\.lora_b$", name
        ):
            return permuted(array, self._heads[".attn_k." in name])
        if self.architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            return array + 1
        return array


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    width = array.shape[0] // num_heads
    return array.reshape(num_heads, 2, width // 2, -1).swapaxes(1, 2).reshape(array.shape)


def check_gguf(subject: Subject, model: GgufFile, listener: Listener) -> Iterator[Check]:
    """A whole model in GGUF."""
    weights, names = MergedWeights(source_of(subject)), _Names(model, subject)
    sums, left = _Sums(), dict(model.types)
    experts: dict[str, np.ndarray] = {}
    for number, name in enumerate(weights.names):
        listener(Progress("Comparing tensors", number, len(weights.names)))
        place = names.find(name)
        if place is None or place[0] not in model.types:
            is_tied = place is not None and place[0] == "output.weight"
            (sums.skipped if place is None or is_tied else sums.faults).append(f"{name} is missing")
            continue
        target, expert = place
        left.pop(target, None)
        if expert is None:
            found = model.tensor(target)
        else:
            if target not in experts:
                experts = {target: model.tensor(target)}  # one stack of experts in memory at a time
            found = experts[target][expert]
        before = weights.before(name) if weights.is_changed(name) else None
        expected = weights.read(name)
        if expected.ndim == 2 and found.ndim == 2 and len(found) < len(expected) and target.startswith("token_embd"):
            expected, before = expected[: len(found)], None  # Gemma's rows without a token are cut off
        arrays = [None if each is None else names.stored(target, each) for each in (expected, before)]
        assert arrays[0] is not None
        sums.add(target, found, arrays[0], arrays[1], model.types[target])
    listener(Progress("Comparing tensors", len(weights.names), len(weights.names)))
    sums.skipped += [name for name in left if not name.startswith("rope_")]
    yield from sums.checks("tensors are W + scale B A")


def check_lora_gguf(subject: Subject, model: GgufFile) -> Iterator[Check]:
    """An adapter in GGUF, whose scale is alpha / rank."""
    trained, names = subject.trained, _Names(model, subject)
    alpha = model.value("adapter.lora.alpha")
    sums = _Sums()
    layers = sorted(name.removesuffix(LORA_A.suffix) for name in trained.matrices if name.endswith(LORA_A.suffix))
    for layer in layers:
        place = names.find(f"{layer}.weight")
        if place is None or f"{place[0]}.lora_a" not in model.types:
            sums.faults.append(f"{layer} is missing")
            continue
        a_RD, b_ER = (model.tensor(f"{place[0]}.{end}") for end in ("lora_a", "lora_b"))
        scale = float(alpha) / len(a_RD) if isinstance(alpha, int | float) and alpha else math.nan
        own_a, own_b = (trained.matrices[layer + kind.suffix] for kind in (LORA_A, LORA_B))
        expected = trained.scale(layer) * names.stored(f"{place[0]}.lora_b", own_b) @ own_a
        kind = max((model.types[f"{place[0]}.{end}"] for end in ("lora_a", "lora_b")), key=lambda t: ROUNDING.get(t, 1))
        sums.add(place[0], scale * b_ER @ a_RD, expected, np.zeros_like(expected), kind, factors=2)
    yield from sums.checks("changes are scale B A")
