"""Which tensors a GGUF file has, and where their values come from.

    plan_tensors(family, config, weights)
    [GgufTensor("blk.0.attn_q.weight", (576, 576), (TensorPart("model….q_proj.weight"),), permutation), …]

Names come from the map of the gguf library. The experts of a layer are one tensor in GGUF, but separate tensors in most
checkpoints. So a tensor is planned as parts, which are read and written one after another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trillora.errors import TrilloraError
from trillora.export.gguf.families import OTHER_WAY, Family

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

_EXPERT = re.compile(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)")
_EXPERT_KIND = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
_PREFIXES = ("language_model.model.", "model.language_model.")  # of the text part in a multimodal checkpoint
_HEADS = ("language_model.lm_head.",)
_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_SUFFIXES = (".weight", ".bias")
MAX_CHUNK = 1 << 26  # values that are read and converted at a time: 256 MiB in float32


class Weights(Protocol):
    """The part of `MergedWeights` that is used here."""

    is_untied: bool  # the adapter gave the head weights of its own

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def num_tokens(self) -> int: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> np.ndarray: ...
    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class TensorPart:
    """A stored tensor, or rows of one of its experts."""

    stored: str
    expert: int | None = None  # index in a tensor that has all experts
    rows: tuple[int, int] | None = None  # of this expert


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file. Its parts follow each other along the first dim."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    change: Callable[[np.ndarray], np.ndarray] | None = None  # needs the whole part
    constant: np.ndarray | None = None  # the value, if it is not stored in the checkpoint

    def arrays(self, weights: Weights) -> Iterator[np.ndarray]:
        """The values in float32, in pieces of whole rows."""
        if self.constant is not None:
            yield self.constant
        for part in self.parts:
            if part.expert is not None:
                array = weights.rows(part.stored, part.expert, part.expert + 1)[0]
                yield array if part.rows is None else array[slice(*part.rows)]
            elif self.change is not None or len(weights.shape(part.stored)) == 1:
                array = weights.read(part.stored)
                yield self.change(array) if self.change else array
            else:
                num_rows, *rest = weights.shape(part.stored)
                step = max(1, MAX_CHUNK // int(np.prod(rest)))
                for start in range(0, num_rows, step):
                    yield weights.rows(part.stored, start, min(start + step, num_rows))


def plan_tensors(family: Family, config: PretrainedConfig, weights: Weights) -> list[GgufTensor]:
    """All tensors that come from the checkpoint. A tensor without a place in the file is an error. `config` is the text
    model's."""
    find = name_finder(family, config.num_hidden_layers)
    plan: list[GgufTensor] = []
    experts: dict[tuple[str, str], dict[int, TensorPart]] = defaultdict(dict)
    is_tied = getattr(config, "tie_word_embeddings", False) and not weights.is_untied
    for stored in weights.names:
        name = text_name(stored)
        if name is None or (is_tied and name == "lm_head.weight"):
            continue  # some checkpoints store a tied head again; llama.cpp uses the embedding where there is no head
        if match := _EXPERT.search(name):
            experts[match[1], _EXPERT_KIND.get(match[3], match[3])][int(match[2])] = TensorPart(stored)
        elif match := _FUSED.search(name):
            plan += _fused(stored, match[1], match[2], weights.shape(stored))
        else:
            plan.append(
                GgufTensor(find(name), weights.shape(stored), (TensorPart(stored),), change_of(name, family, config))
            )
    for (layer, kind), parts in experts.items():
        ordered = tuple(parts[number] for number in range(len(parts)))
        shape = (len(ordered), *weights.shape(ordered[0].stored))
        plan.append(GgufTensor(f"blk.{layer}.ffn_{kind}_exps.weight", shape, ordered))
    return plan


def text_name(stored: str) -> str | None:
    """The name in a model that has only text; None for tensors of images."""
    if stored.startswith(_TOWERS):
        return None
    for prefix in _PREFIXES:
        if stored.startswith(prefix):
            return "model." + stored.removeprefix(prefix)
    for prefix in _HEADS:
        if stored.startswith(prefix):
            return "lm_head." + stored.removeprefix(prefix)
    return stored


def name_finder(family: Family, num_layers: int) -> Callable[[str], str]:
    """A function from names in transformers to names in GGUF: `model.layers.0.mlp.up_proj.weight` to
    `blk.0.ffn_up.weight`."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == family.arch)
    known = get_tensor_name_map(arch, num_layers)

    def find(name: str) -> str:
        found = known.get_name(name, try_suffixes=_SUFFIXES)
        if found is None:
            raise TrilloraError(
                f"GGUF has no place for {name} in a model of the family {family.title}.",
                where="the base model's weights",
                do=OTHER_WAY,
            )
        return str(found)

    return find


def change_of(name: str, family: Family, config: PretrainedConfig) -> Callable[[np.ndarray], np.ndarray] | None:
    """What llama.cpp wants to be different in a tensor with this name (as in transformers)."""
    if family.norm_offset and name.endswith("norm.weight"):
        return lambda array: array + np.float32(family.norm_offset)
    if family.permutes and re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        num_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return lambda array: permuted(array, num_heads)
    return None


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from halves to pairs: 0 1 2 3 | 4 5 6 7 becomes 0 4 | 1 5 | 2 6 | 3 7."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _fused(stored: str, layer: str, kind: str, shape: tuple[int, ...]) -> list[GgufTensor]:
    """Experts in one tensor [E, out, in]. The rows of the gate come before the rows of `up`."""
    num_experts, num_rows, width = shape
    if kind == "down_proj":
        parts = tuple(TensorPart(stored, expert) for expert in range(num_experts))
        return [GgufTensor(f"blk.{layer}.ffn_down_exps.weight", shape, parts)]
    half = num_rows // 2
    return [
        GgufTensor(
            f"blk.{layer}.ffn_{name}_exps.weight",
            (num_experts, half, width),
            tuple(TensorPart(stored, expert, rows) for expert in range(num_experts)),
        )
        for name, rows in (("gate", (0, half)), ("up", (half, num_rows)))
    ]
