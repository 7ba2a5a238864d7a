"""The options of a run's adapter: from the recipe, or from the adapter that the run starts from.

lora: {from: runs/first/adapter}              everything comes from the file
lora: {from: runs/first/adapter, rank: 8}     refused if the file's rank is not 8
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener
from trillora.files.digests import file_digest, text_digest
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, check_shapes, load_adapter, read_head
from trillora.model.bridge import CausalLM
from trillora.model.limits import refused_by_peft
from trillora.model.loading.rope import rope_of
from trillora.model.loading.source import OpenModel
from trillora.model.lora import adaptable_layers, chosen_layers, features
from trillora.model.lora_spec import LayerLora, LoraSpec, TrainedTokens, check_ranks
from trillora.model.parts.expert_parameters import expert_parameters
from trillora.model.parts.peft_names import by_parameter, names_in_file
from trillora.recipe.schema import LoraSection
from trillora.runs.saved import find_adapter

_SINGLE = ("rank", "alpha", "rslora", "dora")  # compared as they are
_SELECTION = ("targets", "exclude", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class Start:
    """The adapter that a run starts from."""

    arrays: dict[str, np.ndarray]  # by parameter name
    digest: str
    where: str


def lora_spec(lora: LoraSection, num_new_tokens: int = 0) -> LoraSpec:
    """The tokens of `lora` are numbers (`with_token_ids`), and the last `num_new_tokens` of them are new."""
    given = _given(lora)
    ids = tuple(token for token in lora.train_tokens if isinstance(token, int))
    assert len(ids) >= max(len(lora.train_tokens), num_new_tokens), "tokens without their numbers"
    if lora.from_ is None:
        tokens = TrainedTokens(ids, ids[-num_new_tokens] if num_new_tokens else None) if ids else None
        return LoraSpec(**given, tokens=tokens, num_tokens=max(ids, default=-1) + 1)
    stored = read_head(find_adapter(lora.from_, from_hub=True).folder).spec
    if ids and (stored.tokens is None or ids != stored.tokens.ids):
        raise TrilloraError(
            f"The recipe trains {len(ids)} tokens, which are not exactly the tokens of the adapter to start from.",
            where=f"tokens or lora.train_tokens, and {stored.file}",
            do="give the tokens of the run that made the adapter; or start without lora.from",
        )
    matched = {name for name in stored.whole for end in lora.modules_to_save if f".{name}".endswith(f".{end}")}
    if lora.modules_to_save and matched != {*stored.whole}:
        raise TrilloraError(
            "lora.modules_to_save does not name the modules that the adapter to start from has as a whole: "
            f"{', '.join(stored.whole[:5]) or 'none'}.",
            where=f"lora.modules_to_save, and {stored.file}",
            do="remove lora.modules_to_save: they come from the adapter; or start without lora.from",
        )
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
    module = model.module
    layers = chosen_layers(module, spec)
    if lora.from_ is None:
        sizes = {name: features(layer) for name, layer in adaptable_layers(module, spec).items()}
        check_ranks(layers, sizes | {name: experts.features for name, experts in expert_parameters(module).items()})
        _check_readable(spec, by_parameter(module, layers), refused_by_peft(module.config, layers))
        _check_found(names_in_file(module, layers))
        return
    head = read_head(find_adapter(lora.from_, from_hub=True).folder)
    check_shapes(head.shapes, model.adapter_layout, str(spec.file))
    given = {name: _given(lora)[name] for name in _SELECTION if name in lora.model_fields_set}
    other = dataclasses.replace(spec, file=None, **{"rank_pattern": (), "alpha_pattern": (), **given})
    wanted = chosen_layers(module, other) if given else layers
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


def _check_readable(spec: LoraSpec, parameters: Collection[str], refused: Sequence[str]) -> None:
    """Refuses before the training what PEFT could not load after it. `parameters` are the targets that the adapter's
    file lists in `target_parameters`; `refused` are those that PEFT does not accept."""
    if refused:
        raise TrilloraError(
            f"PEFT could not load an adapter of {refused[0]}: fast kernels of this model would ignore it.",
            where="lora.targets",
            do=f"remove {refused[0].rpartition('.')[2]} from lora.targets; all-linear does not include it",
        )
    if spec.dora and parameters:
        names = sorted({name.rpartition(".")[2] for name in parameters})
        raise TrilloraError(
            f"DoRA is not possible for {', '.join(names)} of this MoE model: PEFT could not load the adapter.",
            where="lora.dora",
            do=f"remove lora.dora, or add lora.exclude: [{', '.join(names)}]",
        )


def _check_found(names: dict[str, str]) -> None:
    """`names`: layers whose names PEFT changes, empty if no name would become the layer's."""
    if lost := sorted(layer for layer, name in names.items() if not name):
        raise TrilloraError(
            f"PEFT could not load an adapter of {lost[0]}: it would rename it as transformers renames checkpoints.",
            where="lora.targets",
            do=f"add lora.exclude: [{', '.join(sorted({layer.rpartition('.')[2] for layer in lost}))}]",
        )


def open_start(lora: LoraSection, base: OpenModel, listener: Listener) -> Start | None:
    """Reads the adapter that the recipe names. `base` is the base model of the run."""
    if lora.from_ is None:
        return None
    folder = find_adapter(lora.from_, from_hub=True).folder
    other = read_head(folder).base_name
    if other != base.base_name:
        listener(
            Alarm(
                f"The adapter in lora.from was trained on {other or 'an unnamed base model'}, and this run uses "
                f"{base.base_name}. If they are different models, the adapter is useless for this run."
            )
        )
    if (rope := rope_of(folder)) != base.rope:
        trained, now = (str(each or "not scaled") for each in (rope, base.rope))
        what = f"The adapter in lora.from was trained with other rotary positions ({trained}) than this run ({now})."
        listener(Alarm(f"{what} This run uses its own."))
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
        "whole": lora.modules_to_save,
    }
