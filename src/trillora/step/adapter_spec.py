"""The options of a run's adapter: those of the recipe, or of the adapter that the run starts from.

lora: {from: runs/first/adapter}              everything comes from the file
lora: {from: runs/first/adapter, rank: 8}     refused if the file's rank is not 8
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener
from trillora.files.digests import file_digest, text_digest
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, check_shapes, load_adapter, read_head
from trillora.model.bridge import CausalLM
from trillora.model.loading.source import find_adapter
from trillora.model.lora import features, linear_layers
from trillora.model.lora_spec import LayerLora, LoraSpec, adapted_layers, check_ranks
from trillora.recipe.schema import LoraSection

_SINGLE = ("rank", "alpha", "rslora", "dora")
_SELECTION = ("targets", "exclude", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class Start:
    """The adapter that a run starts from."""

    arrays: dict[str, np.ndarray]  # by parameter name
    digest: str
    where: str


def lora_spec(lora: LoraSection) -> LoraSpec:
    given = _given(lora)
    if lora.from_ is None:
        return LoraSpec(**given)
    stored = read_head(find_adapter(lora.from_)).spec
    for option in _SINGLE:
        if option in lora.model_fields_set and given[option] != getattr(stored, option):
            raise TrilloraError(
                f"lora.{option} is {given[option]}, but the adapter to start from has {getattr(stored, option)}.",
                where=f"lora.{option}, and {stored.file}",
                do=f"remove lora.{option}: it comes from the adapter; or start without lora.from",
            )
    dropout = lora.dropout if "dropout" in lora.model_fields_set else stored.dropout
    return dataclasses.replace(stored, dropout=dropout)


def check_layers(lora: LoraSection, spec: LoraSpec, model: CausalLM) -> None:
    """Compares the recipe with the model and with the adapter to start from."""
    module, linear = model.module, linear_layers(model.module)
    layers = adapted_layers(module, list(linear), spec)
    if lora.from_ is None:
        check_ranks(layers, {name: features(linear[name]) for name in layers})
        return
    head = read_head(find_adapter(lora.from_))
    check_shapes(head.shapes, model.adapter_layout, str(spec.file))
    given = {name: _given(lora)[name] for name in _SELECTION if name in lora.model_fields_set}
    other = dataclasses.replace(spec, file=None, **{"rank_pattern": (), "alpha_pattern": (), **given})
    wanted = adapted_layers(module, list(linear), other) if given else layers
    for name in sorted(layers.keys() | wanted.keys()):
        has, wants = layers.get(name), wanted.get(name)
        if has and wants:  # what is not given comes from the file
            rank = wants.rank if "rank_pattern" in given else has.rank
            wants = LayerLora(rank, wants.alpha if "alpha_pattern" in given else has.alpha)
        if has != wants:
            raise TrilloraError(
                f"The recipe gives {name} {wants or 'no adapter'}, but the adapter to start from has "
                f"{has or 'none for it'}.",
                where=f"{', '.join(f'lora.{option}' for option in given)}, and {spec.file}",
                do="remove these options: they come from the adapter; or start without lora.from",
            )


def open_start(lora: LoraSection, base_name: str, listener: Listener) -> Start | None:
    """Reads the adapter that the recipe names. `base_name` is the base model of the run."""
    if lora.from_ is None:
        return None
    folder = find_adapter(lora.from_)
    other = read_head(folder).base_name
    if other != base_name:
        listener(
            Alarm(
                f"The adapter in lora.from was trained on {other or 'an unnamed base model'}, and this run uses "
                f"{base_name}. If they are different models, the adapter is useless for this run."
            )
        )
    digest = text_digest("".join(file_digest(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)))
    return Start(load_adapter(folder)[1], digest, str(folder))


def _given(lora: LoraSection) -> dict[str, Any]:
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "rslora": lora.rslora,
        "dropout": lora.dropout,
        "targets": lora.targets,
        "exclude": lora.exclude,
        "rank_pattern": tuple(lora.rank_pattern.items()),
        "alpha_pattern": tuple(lora.alpha_pattern.items()),
        "dora": lora.dora,
        "init": lora.init,
    }
