"""Merges several adapters to one, in PEFT's format.

    result = merge_adapters(["runs/sql", "runs/chat"], MergeOptions("ties", density=0.2), "merged")

Every method is defined on the changes of the weights, scale * B A, never on A and B alone (`adapters/methods.py`). The
result has alpha = rank, so its scale is 1. It is written only after it was compared with the definition of the merge.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.adapters.card import CARD_FILE, adapter_card
from trillora.adapters.inputs import (
    MAX_BYTES,
    AdapterInput,
    check_compatible,
    names_for_peft,
    read_input,
    selection,
)
from trillora.adapters.logits_check import LogitsCheck, compare_logits
from trillora.adapters.methods import METHODS, ROUNDING, LayerChange, MergedLayer, definition, merge_layer
from trillora.errors import Bug, TrilloraError
from trillora.events import Alarm, Listener, Note, Progress, ignore_events
from trillora.files.atomic import write_file
from trillora.files.bounded import read_bounded
from trillora.files.checksums import with_checksums
from trillora.files.storage import LocalStorage
from trillora.files.user_path import user_path
from trillora.model.adapters import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    WEIGHTS_FILE,
    check_written,
    peft_files,
    peft_task,
    read_adapter,
)
from trillora.model.loading.rope import ScaledPositions, read_positions
from trillora.model.lora import LoraSpec
from trillora.recipe.group_section import MergeOptions
from trillora.recipe.lora import RopeSection
from trillora.runs.files import ADAPTER, MERGE_FILE

_LIBRARY = "transformers.models."  # PEFT imports what auto_mapping names
# How far logits may differ from the definition through rounding: of the logits, and of what the merge changes in them.
OF_LOGITS, OF_CHANGE = 2e-5, 1e-2


@dataclass(frozen=True)
class MergedInput:
    """One adapter of the merge."""

    name: str
    digest: str  # of its changes
    rank: int
    num_layers: int
    weight: float
    share: float  # of the merged change; all shares add up to 1, and one that works against the others is negative


@dataclass(frozen=True)
class MergeResult:
    """What was written, and the content of `merge.json`."""

    adapter: Path
    method: str
    rank: int
    density: float | None
    seed: int | None
    base: str | None
    inputs: tuple[MergedInput, ...]
    num_layers: int
    lost: float  # the share of the change that the cut to the rank removed, as a fraction of the sum of its squares
    worst_lost: float  # the same, of the layer that lost most
    worst_layer: str | None
    logits: LogitsCheck | None
    not_compared: str | None  # why logits were not compared

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "adapter": str(self.adapter)}


def merge_adapters(
    adapters: Sequence[str | Path],
    options: MergeOptions,
    out: str | Path,
    *,
    prefix: str = "--",
    with_logits: bool = True,
    listener: Listener = ignore_events,
) -> MergeResult:
    """Merges adapters (folders of adapters or of finished runs) and writes the result to the new folder `out`.

    `prefix` names the options in errors, such as `--` or `merge.`. `with_logits=False` leaves out the comparison of
    logits, for which the base model is loaded.
    """
    folder = _new_folder(out)
    if len(adapters) < 2:
        found = "got one" if adapters else "got none"
        raise TrilloraError(f"A merge needs at least two adapters, {found}.", do="name two or more adapters")
    options = options.checked(len(adapters), prefix)
    inputs = [read_input(name) for name in adapters]
    check_compatible(inputs)
    layers = _by_layer(inputs)
    merged = _merge_layers(layers, options, _limit(layers, options, prefix), listener)
    _check_changes_something(merged)
    rank = max(layer.a_RD.shape[0] for layer in merged.values())
    matrices = _as_adapter(merged, rank)
    base = next((each.base for each in inputs if each.base), None)
    parameters, names = names_for_peft(inputs, list(merged), base)
    files = peft_files(matrices, _config(inputs, selection(inputs, list(merged), parameters), rank, base), names)
    _check_files(files, matrices)
    digest = next((each.base_digest for each in inputs if each.base_digest), None)
    logits: LogitsCheck | str = "not asked for"
    if with_logits:
        logits = _compare(base, digest, inputs[0].rope, rank, matrices, layers, options, listener)
    result = _result(folder, inputs, merged, options, rank, base, logits)
    if isinstance(logits, LogitsCheck):
        _check_logits(logits, is_cut=result.lost > ROUNDING**2)
    _write(folder, files, inputs, result, listener)
    return result


def _new_folder(out: str | Path) -> Path:
    folder = user_path(out, where="--out")
    if os.path.lexists(folder):
        raise TrilloraError("The output folder already exists.", where=str(folder), do="choose another --out")
    return folder


def _by_layer(inputs: Sequence[AdapterInput]) -> dict[str, dict[int, LayerChange]]:
    """layer -> number of the adapter -> its change. An adapter without the layer does not change it."""
    layers = sorted({layer for each in inputs for layer in each.changes})
    return {
        layer: {number: each.changes[layer] for number, each in enumerate(inputs) if layer in each.changes}
        for layer in layers
    }


def _limit(layers: dict[str, dict[int, LayerChange]], options: MergeOptions, prefix: str) -> int | None:
    """The largest rank of the result; None if the whole change is kept."""
    is_whole = METHODS[options.method].prune is not None
    possible = max(
        min(*next(iter(changes.values())).shape, *([] if is_whole else [sum(each.rank for each in changes.values())]))
        for changes in layers.values()
    )
    if options.rank is not None and options.rank > possible:
        raise TrilloraError(
            f"The rank {options.rank} is more than this merge can have, {possible}.",
            where=f"{prefix}rank",
            do=f"use at most {possible}, or leave it out",
        )
    if options.method in ("linear", "cat"):
        return options.rank
    return options.rank or min(possible, max(each.rank for changes in layers.values() for each in changes.values()))


def _merge_layers(
    layers: dict[str, dict[int, LayerChange]], options: MergeOptions, rank: int | None, listener: Listener
) -> dict[str, MergedLayer]:
    merged = {}
    for number, (layer, changes) in enumerate(layers.items()):
        listener(Progress("Merging layers", number, len(layers)))
        merged[layer] = merge_layer(layer, changes, options, rank)
    listener(Progress("Merging layers", len(layers), len(layers)))
    return merged


def _check_changes_something(merged: dict[str, MergedLayer]) -> None:
    """What is left after changes cancel each other is rounding, not a change."""
    square, of_terms = (sum(getattr(layer, kind) for layer in merged.values()) for kind in ("square", "term_square"))
    if square <= ROUNDING**2 * of_terms:
        raise TrilloraError(
            "The merge changes nothing: "
            + ("the adapters cancel each other." if of_terms else "no entry of the adapters is kept."),
            where="--weights" if of_terms else None,
            do="use other weights" if of_terms else "use adapters that change something, and a larger density",
        )


def _as_adapter(merged: dict[str, MergedLayer], rank: int) -> dict[str, np.ndarray]:
    """The matrices by parameter name. Layers of a lower rank are filled with zeros: PEFT's files have one rank."""
    matrices = {}
    for name, layer in merged.items():
        missing = rank - layer.a_RD.shape[0]
        matrices[f"{name}.lora_a"] = np.pad(layer.a_RD, ((0, missing), (0, 0)))
        matrices[f"{name}.lora_b"] = np.pad(layer.b_ER, ((0, 0), (0, missing)))
    return matrices


def _task_of(config: Mapping[str, object]) -> dict[str, Any]:
    """As in an adapter's own config: for a multimodal base, the class that PEFT's AutoPeftModel builds."""
    match config.get("auto_mapping"):
        case {"base_model_class": str() as name, "parent_library": str() as library} if library.startswith(_LIBRARY):
            return peft_task(name, library)
    return peft_task()


def _config(
    inputs: Sequence[AdapterInput], selected: Mapping[str, object], rank: int, base: str | None
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        **_task_of(inputs[0].config),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        **selected,
        "fan_in_fan_out": any(each.config.get("fan_in_fan_out") is True for each in inputs),
        "bias": "none",
        "inference_mode": True,
    }


def _check_files(files: dict[str, bytes], matrices: dict[str, np.ndarray]) -> None:
    """The files contain the matrices that `merge_layer` has compared with the definition, bit for bit."""
    stored = read_adapter(files[WEIGHTS_FILE])
    if stored.keys() != matrices.keys() or any(stored[n].tobytes() != matrices[n].tobytes() for n in matrices):
        what = "The file of the merged adapter does not contain its matrices."
        raise Bug(what, do="report it to the developers of Trillora; nothing was written")


def _compare(
    base: str | None,
    digest: str | None,
    rope: RopeSection | None,
    rank: int,
    matrices: dict[str, np.ndarray],
    layers: dict[str, dict[int, LayerChange]],
    options: MergeOptions,
    listener: Listener,
) -> LogitsCheck | str:
    """The logits of the merged adapter and of the definition, or why they cannot be compared."""
    if base is None:
        return "the adapters do not name their base model"
    spec = LoraSpec(rank, float(rank), targets=tuple(layers))
    listener(Note(f"Comparing logits with the definition of the merge on {base}"))
    return compare_logits(
        base,
        spec,
        matrices,
        lambda layer: definition(layer, layers[layer], options),
        listener,
        base_digest=digest,
        rope=rope,
    )


def _check_logits(logits: LogitsCheck, *, is_cut: bool) -> None:
    """A cut changes logits too, and its size is reported. Anything else must be rounding."""
    allowed = math.inf if is_cut else OF_LOGITS * logits.logits + OF_CHANGE * logits.change
    if not logits.difference <= allowed:  # never true for NaN
        raise Bug(
            f"The merged adapter does not compute what the merge defines: its logits differ by {logits.difference:g}, "
            f"where the merge changes them by {logits.change:g}.",
            do="report it to the developers of Trillora; nothing was written",
        )


def _result(
    folder: Path,
    inputs: Sequence[AdapterInput],
    merged: dict[str, MergedLayer],
    options: MergeOptions,
    rank: int,
    base: str | None,
    logits: LogitsCheck | str,
) -> MergeResult:
    square = sum(layer.square for layer in merged.values())
    losses = {name: layer.lost_square / layer.square if layer.square else 0.0 for name, layer in merged.items()}
    worst = max(losses, key=lambda name: losses[name])
    parts = [
        MergedInput(
            name=each.name,
            digest=each.digest,
            rank=each.rank,
            num_layers=len(each.changes),
            weight=(options.weights or ())[number],
            share=sum(layer.shares.get(number, 0.0) for layer in merged.values()) / square,
        )
        for number, each in enumerate(inputs)
    ]
    return MergeResult(
        adapter=folder,
        method=options.method,
        rank=rank,
        density=options.density,
        seed=options.seed,
        base=base,
        inputs=tuple(parts),
        num_layers=len(merged),
        lost=sum(layer.lost_square for layer in merged.values()) / square,
        worst_lost=losses[worst],
        worst_layer=worst if losses[worst] > 0 else None,
        logits=logits if isinstance(logits, LogitsCheck) else None,
        not_compared=logits if isinstance(logits, str) else None,
    )


def write_merge_facts(result: MergeResult) -> None:
    """Writes `merge.json` and the card again, after the merged adapter was moved into its run."""
    write_file(result.adapter / MERGE_FILE, _facts(result))
    config = read_bounded(result.adapter / CONFIG_FILE, MAX_BYTES)
    card = _card(result, config, read_positions(result.adapter), result.adapter.parent)
    write_file(result.adapter / CARD_FILE, card)


def _card(result: MergeResult, config: bytes, positions: ScaledPositions | None, run: Path | None = None) -> str:
    """The model card. Inputs are named without their folders: RUN/adapter and RUN/adapters/NAME by RUN and NAME."""
    names = [Path(each.name).resolve() for each in result.inputs]
    shown = [path.parent.name if path.name == ADAPTER else path.name for path in names]
    parts = ", ".join(f"{name} ({each.weight:g})" for name, each in zip(shown, result.inputs, strict=True))
    note = f"Merged from {len(shown)} adapters by the method {result.method}, with their weights: {parts}."
    name = (result.adapter if run is None else run).resolve().name
    return adapter_card(config, run, name=name, notes=[note], positions=positions)


def _facts(result: MergeResult) -> str:
    return json.dumps({"format": 1, **result.to_dict()}, indent=1) + "\n"


def _write(
    folder: Path,
    files: dict[str, bytes],
    inputs: Sequence[AdapterInput],
    result: MergeResult,
    listener: Listener,
) -> None:
    templates = {each.template for each in inputs if each.template is not None}
    if len(templates) > 1:
        listener(Alarm("The adapters have different chat templates: the merged one uses the base model's."))
    elif templates:
        files = {**files, TEMPLATE_FILE: templates.pop()}
    if (positions := inputs[0].positions) is not None:  # all have the same
        files = {**files, **positions.file()}
    tokenizer = next((each.tokenizer for each in inputs if each.tokenizer), {})
    try:
        # Both may be written again: after a move, and by a person.
        card = _card(result, files[CONFIG_FILE], positions)
        others = {MERGE_FILE: _facts(result).encode(), CARD_FILE: card.encode()}
        files = {**tokenizer, **files}
        LocalStorage(folder.parent).write(folder.name, {**others, **with_checksums(0, files)})
    except OSError as error:
        raise TrilloraError(
            f"The merged adapter cannot be written: {error.strerror}.",
            where=str(folder),
            do="free disk space, or choose another --out",
        ) from error
    check_written(folder, files)
