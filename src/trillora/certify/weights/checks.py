"""Checks a merged model or a GGUF file value by value against its definition: W + scale * B A, rounded to its type.

Two figures say whether the right weights arrived:

    wrong    values that are not the expected ones in the type of their tensor, `stored_values.py`; none are allowed
    share    of the trained change that is in the file: <file - base, change> / <change, change>

The share is 0 for the base, 2 if the adapter was merged twice, 0.5 with half the alpha. For a correct file it is what
its type can hold, which is known: 1 for float32, and usually near 1 for others. A file that holds less than half of the
change is not the model that was trained, even if every value is rounded correctly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trillora.certify.certificate import Check
from trillora.certify.gguf_file import GgufFile
from trillora.certify.subject import Subject
from trillora.certify.weights.expected import ExpectedRows, ExpectedWeights, product_slack
from trillora.certify.weights.stored_values import FLOATS, rounded, wrong_blocks, wrong_values
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress, ignore_events
from trillora.export.carried import LEAST_SHARE, Share
from trillora.export.gguf.quantize import FILE_TYPES, to_bytes, to_values
from trillora.export.gguf.tensors import text_name
from trillora.export.gguf.write import ModelPlan, plan_model
from trillora.model.adapter_parameters import LORA_A, LORA_B
from trillora.model.loading.checkpoint import DTYPES
from trillora.model.loading.source import weight_files
from trillora.model.loading.tensor_files import opened

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

MOST = 0.9  # of the change; a file with less loses a part that answers may show
NEAR = 0.02  # difference of a share from the expected one, below which the right change is in the file
DO = "export it again from the run; if this happens again, report it to the developers of Trillora"


@dataclass
class Tally:
    """What is counted over all tensors."""

    num_tensors: int = 0
    num_values: int = 0
    num_wrong: int = 0
    faults: list[str] = field(default_factory=list)
    found: Share = field(default_factory=Share)
    expected: Share = field(default_factory=Share)

    def add(self, name: str, kind: str, num_values: int, num_wrong: int, hint: str) -> None:
        self.num_tensors += 1
        self.num_values += num_values
        self.num_wrong += num_wrong
        if num_wrong:
            self.faults.append(f"{name} has {num_wrong:,} of {num_values:,} values that are wrong for {kind}{hint}")

    def add_share(self, found: np.ndarray, again: np.ndarray, piece_values: np.ndarray, base: np.ndarray) -> None:
        self.found.add(found, piece_values, base)
        self.expected.add(again, piece_values, base)

    def checks(self, what: str) -> Iterator[Check]:
        if self.faults:
            named = "; ".join(self.faults[:3])
            text = f"{len(self.faults):,} tensors are wrong: {named}."
            yield Check("trained", "tensors", "failed", text, max(self.num_wrong, 1), 0, DO)
        else:
            text = f"{self.num_tensors:,} {what}, rounded to their types, in each of {self.num_values:,} values."
            yield Check("trained", "tensors", "ok", text, 0, 0)
        yield self._share()

    def _share(self) -> Check:
        share, expected, name = self.found.value, self.expected.value, "share of the change"
        if share is None or expected is None:
            return Check("trained", name, "skipped", "The adapter changes no tensor of the base.")
        text = f"{share:.4f} of the trained change is in the file"
        if abs(share - expected) > NEAR:
            reading = "the adapter is not in it" if abs(share) < 0.1 else "the scale is wrong, or parts are missing"
            text += f", and {expected:.4f} should be: {reading}."
            return Check("trained", name, "failed", text, share, expected, DO)
        if self.found.is_lost:
            text += ": its type rounds most of the change away, so this is nearly the base model."
            return Check("trained", name, "failed", text, share, LEAST_SHARE, "export it in a finer type: --type")
        if share < MOST:
            text += ", as much as its type can hold."
            return Check(
                "trained", name, "warning", text, share, expected, "use a finer type to keep all of it: --type"
            )
        return Check("trained", name, "ok", f"{text}.", share, expected)


def _hint(found: np.ndarray, piece: ExpectedRows) -> str:
    """What a wrong tensor looks like, from a part of it."""
    base, values = piece.base, piece.values
    if not np.isfinite(found).all():
        largest = float(abs(values).max())
        return " (not finite: float16 ends at 65504)" if largest > 65504 else " (not finite)"
    if base is not None and np.allclose(found, base, rtol=1e-3, atol=1e-6):
        return ": it equals the base"
    if found.ndim == 2 and found.shape[0] == found.shape[1] and np.allclose(found.T, values, rtol=1e-2, atol=1e-4):
        return ": it is transposed"
    return ""


# ---- merged models


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    name: str
    shape: tuple[int, ...]
    type: str  # in safetensors' words

    def rows(self, start: int, stop: int) -> torch.Tensor:
        with opened(self.file) as tensors:
            part: torch.Tensor = (
                tensors.get_slice(self.name)[start:stop] if self.shape else tensors.get_tensor(self.name)
            )
        return part


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    found = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                found[name] = StoredTensor(file, name, tuple(part.get_shape()), str(part.get_dtype()))
    return found


def stored_dtype(weights: ExpectedWeights, own: dict[str, StoredTensor]) -> str | None:
    """The `--type` that a merged model was exported with; None if every tensor has the type that the base has."""
    floats = [name for name in weights.names if name in own and weights.type(name) in FLOATS]
    if all(own[name].type == weights.type(name) for name in floats):
        return None
    kinds = [own[name].type for name in floats]
    return DTYPES.get(max(set(kinds), key=kinds.count))


def check_merged(subject: Subject, listener: Listener) -> Iterator[Check]:
    yield from compare_merged(subject.expected, subject.folder, listener).checks("tensors are W + scale B A")


def compare_merged(weights: ExpectedWeights, folder: Path, listener: Listener = ignore_events) -> Tally:
    """A folder of safetensors."""
    own, tally = tensors_of(folder), Tally()
    dtype = stored_dtype(weights, own)
    for number, name in enumerate(weights.names):
        listener(Progress("Comparing tensors", number, len(weights.names)))
        kind = next((code for code, each in DTYPES.items() if each == dtype), None)
        kind = kind if kind and weights.type(name) in FLOATS else weights.type(name)
        if name not in own:
            tally.faults.append(f"{name} is missing")
        elif own[name].shape != weights.shape(name):
            tally.faults.append(f"{name} is {own[name].shape} instead of {weights.shape(name)}")
        elif own[name].type != kind:
            tally.faults.append(f"{name} is stored as {own[name].type} instead of {kind}")
        else:
            _compare_merged(weights, name, own[name], tally)
    listener(Progress("Comparing tensors", len(weights.names), len(weights.names)))
    extra = own.keys() - {*weights.names}
    if weights.tied_head is not None and weights.tied_head[1] in own and weights.tied_head[0] in extra:
        head, embedding = own[weights.tied_head[0]], own[weights.tied_head[1] or ""]
        if head.shape == embedding.shape and all(
            torch.equal(head.rows(start, stop), embedding.rows(start, stop))
            for start, stop in weights.spans(embedding.name)
        ):
            extra = extra - {head.name}  # a tied head that is stored again
    tally.faults += [f"{name} should not be there" for name in sorted(extra)]
    return tally


def _compare_merged(weights: ExpectedWeights, name: str, stored: StoredTensor, tally: Tally) -> None:
    num_wrong, size, hint = 0, math.prod(weights.shape(name)), ""
    if weights.is_copied(name) and stored.type == weights.type(name):
        for start, stop in weights.spans(name):
            part = stored.rows(start, stop).contiguous().reshape(-1)
            width = max(1, part.element_size())
            found, base = part.view(torch.uint8).numpy(), weights.raw(name, start, stop)
            num_wrong += int((found != base).reshape(-1, width).any(axis=1).sum())
        tally.add(name, stored.type, size, num_wrong, ": the adapter does not change this tensor" if num_wrong else "")
        return
    for piece in weights.pieces(name):
        found = stored.rows(piece.start, piece.stop).to(torch.float32).numpy()
        wrong = int(wrong_values(found, piece.values, piece.slack, stored.type).sum())
        num_wrong += wrong
        hint = hint or (_hint(found, piece) if wrong else "")
        if piece.base is not None and weights.is_trained(name):
            tally.add_share(np.nan_to_num(found), rounded(piece.values, stored.type), piece.values, piece.base)
    tally.add(name, stored.type, size, num_wrong, hint)


# ---- GGUF

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)")
_KINDS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


@dataclass(frozen=True)
class Place:
    """Where rows of a checkpoint's tensor are in a GGUF file."""

    target: str
    rows: np.ndarray  # the row of the file for each row of the tensor, both without their other dims
    columns: slice = field(
        default_factory=lambda: slice(None)
    )  # of the second dim, if a tensor with experts is in two places
    offset: float = 0.0  # that is added to the values


class Places:
    """By the tables of the gguf library."""

    def __init__(self, architecture: str, config: PretrainedConfig, where: str) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
        if architecture not in known:
            raise TrilloraError(f"llama.cpp has no architecture '{architecture}'.", where=where, do=DO)
        self._architecture = architecture
        self._map = get_tensor_name_map(known[architecture], config.num_hidden_layers)
        heads = getattr(config, "num_attention_heads", 1)
        self._heads = heads, getattr(config, "num_key_value_heads", None) or heads

    def target(self, name: str) -> str | None:
        """The tensor's name in GGUF."""
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        return None if found is None else str(found)

    def find(self, stored: str, shape: tuple[int, ...]) -> list[Place]:
        """Empty for tensors that a text model does not have."""
        name = text_name(stored)
        if name is None:
            return []
        if expert := _EXPERT.fullmatch(name):
            layer = re.search(r"\.layers\.(\d+)\.", name)
            target = f"blk.{layer[1] if layer else 0}.ffn_{_KINDS.get(expert[3], expert[3])}_exps.weight"
            return [Place(target, int(expert[2]) * shape[0] + np.arange(shape[0]))]
        if fused := _FUSED.search(name):
            if fused[2] == "down_proj":
                return [Place(f"blk.{fused[1]}.ffn_down_exps.weight", np.arange(shape[0] * shape[1]))]
            half, rows = shape[1] // 2, np.arange(shape[0] * shape[1] // 2)
            names = [f"blk.{fused[1]}.ffn_{kind}_exps.weight" for kind in ("gate", "up")]
            return [Place(names[0], rows, slice(0, half)), Place(names[1], rows, slice(half, None))]
        found = self.target(name)
        if found is None:
            raise TrilloraError(f"GGUF has no place for {name}.", do=DO)
        offset = 1.0 if self._architecture in ("gemma", "gemma2", "gemma3") and found.endswith("norm.weight") else 0.0
        return [Place(found, self.row_numbers(found, shape), offset=offset)]

    def row_numbers(self, target: str, shape: tuple[int, ...]) -> np.ndarray:
        """llama.cpp's Llama interleaves the rotary halves of queries and keys."""
        if self._architecture != "llama" or not re.search(r"\.attn_[qk]\.(weight|bias)(\.lora_b)?$", target):
            return np.arange(shape[0]) if len(shape) > 1 else np.arange(1)
        num_heads = self._heads[".attn_k." in target]
        pairs = np.arange(shape[0]).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
        return np.argsort(pairs)


def planned_gguf(subject: Subject, model: GgufFile) -> ModelPlan:
    """What the export writes for this run, in the type that the file says it has."""
    number = model.value("general.file_type")
    type = next((name for name, known in FILE_TYPES.items() if known == number), None)
    if type is None:
        raise TrilloraError(
            f"The file says that its type is number {number}, which Trillora does not write.",
            where=str(model.file),
            do=DO,
        )
    return plan_model(subject.source, subject.merged, type)


def check_gguf(subject: Subject, model: GgufFile, plan: ModelPlan, listener: Listener) -> Iterator[Check]:
    config = subject.opened.config.get_text_config()
    yield from compare_gguf(subject.expected, model, plan, config, listener).checks("tensors are W + scale B A")


def compare_gguf(
    weights: ExpectedWeights,
    model: GgufFile,
    plan: ModelPlan,
    config: PretrainedConfig,
    listener: Listener = ignore_events,
) -> Tally:
    """A whole model in GGUF."""
    tally, places = Tally(), Places(plan.arch, config, str(model.file))
    types = {tensor.name: (tensor.type.name, tuple(tensor.shape)) for tensor in plan.tensors}
    for name in sorted(types.keys() | model.types.keys()):
        if name not in model.types:
            tally.faults.append(f"{name} is missing")
        elif name not in types:
            tally.faults.append(f"{name} should not be there")
        elif (model.types[name], model.shape(name)) != types[name]:
            found, wanted = (model.types[name], model.shape(name)), types[name]
            tally.faults.append(f"{name} is {found[0]} {found[1]} instead of {wanted[0]} {wanted[1]}")
        elif name in plan.constants:
            wrong = int((model.tensor(name) != plan.constants[name].astype(np.float32)).sum())
            tally.add(name, model.types[name], plan.constants[name].size, wrong, "")
    bad = {fault.split(" ", 1)[0] for fault in tally.faults}
    for number, name in enumerate(weights.names):
        listener(Progress("Comparing tensors", number, len(weights.names)))
        for place in places.find(name, weights.shape(name)):
            if place.target in types and place.target not in bad:
                _compare_gguf(weights, name, place, model, tally)
    listener(Progress("Comparing tensors", len(weights.names), len(weights.names)))
    return tally


def _compare_gguf(weights: ExpectedWeights, name: str, place: Place, model: GgufFile, tally: Tally) -> None:
    kind = model.types[place.target]
    size, num_wrong, hint = 0, 0, ""
    for piece, rows in placed(weights, name, place):
        width = piece.values.shape[-1]
        data, found = model.rows(place.target, rows, width)
        if kind in FLOATS:
            wrong = int(wrong_values(found, piece.values, piece.slack, kind).sum())
            again = rounded(piece.values, kind)
        else:
            type = model.type(place.target)
            bytes_again = to_bytes(piece.values, type).reshape(data.shape)
            blocks = wrong_blocks(data, bytes_again, found, piece.values, piece.slack, type)
            wrong = int(blocks.sum()) * (piece.values.size // len(blocks))
            again = found if np.array_equal(data, bytes_again) else to_values(bytes_again, type).reshape(found.shape)
        size, num_wrong = size + piece.values.size, num_wrong + wrong
        hint = hint or (_hint(found, piece) if wrong else "")
        if piece.base is not None and weights.is_trained(name):
            tally.add_share(np.nan_to_num(found), again, piece.values, piece.base)
    tally.add(place.target, kind, size, num_wrong, hint)


def placed(weights: ExpectedWeights, name: str, place: Place) -> Iterator[tuple[ExpectedRows, np.ndarray]]:
    """The pieces of a tensor as matrices of the file's rows, and the numbers of these rows."""
    per_row = len(place.rows) // max(1, (weights.shape(name) or (1,))[0]) if len(weights.shape(name)) > 2 else 1
    for piece in weights.pieces(name):
        shape = piece.values.shape

        def matrix(array: np.ndarray, shape: tuple[int, ...] = shape) -> np.ndarray:
            cut = array[:, place.columns] if len(shape) > 2 else array
            return cut.reshape(-1, shape[-1]) if len(shape) > 1 else cut.reshape(len(place.rows), -1)

        slack = piece.slack if isinstance(piece.slack, float) else matrix(piece.slack)
        base = None if piece.base is None else matrix(piece.base) + place.offset
        rows = place.rows if len(shape) < 2 else place.rows[piece.start * per_row : piece.stop * per_row]
        yield ExpectedRows(piece.start, piece.stop, matrix(piece.values) + place.offset, slack, base), rows


def check_lora_gguf(subject: Subject, model: GgufFile) -> Iterator[Check]:
    """An adapter in GGUF, whose scale is alpha / rank."""
    trained, tally = subject.trained, Tally()
    places = Places(model.text("general.architecture") or "", subject.opened.config.get_text_config(), str(model.file))
    alpha = model.value("adapter.lora.alpha")
    left = {*model.types}
    layers = sorted(name.removesuffix(LORA_A.suffix) for name in trained.matrices if name.endswith(LORA_A.suffix))
    for layer in layers:
        target = places.target(text_name(f"{layer}.weight") or "")
        names = [f"{target}.{end}" for end in ("lora_a", "lora_b")]
        if any(name not in model.types for name in names):
            tally.faults.append(f"{layer} is missing")
            continue
        left -= {*names}
        a_RD, b_ER = (model.tensor(name).astype(np.float64) for name in names)
        own_a, own_b = (trained.matrices[layer + kind.suffix].astype(np.float64) for kind in (LORA_A, LORA_B))
        if a_RD.shape != own_a.shape or b_ER.shape != own_b.shape:
            tally.faults.append(f"{layer} has other shapes: {b_ER.shape} times {a_RD.shape}")
            continue
        b_ER = b_ER[places.row_numbers(names[1].replace(".lora_b", ""), b_ER.shape)]
        scale = float(alpha) / len(a_RD) if isinstance(alpha, int | float) and alpha else math.nan
        found, expected = scale * b_ER @ a_RD, trained.scale(layer) * own_b @ own_a
        wrong = int((~(np.abs(found - expected) <= product_slack(trained.scale(layer) * own_b, own_a))).sum())
        nothing = np.zeros_like(expected)
        tally.add_share(np.nan_to_num(found), expected, expected, nothing)
        tally.add(target or layer, "F32", expected.size, wrong, "")
    tally.faults += [f"{name} should not be there" for name in sorted(left)]
    yield from tally.checks("changes are scale B A")
