"""Checks of an adapter against its run and its base: the same weights, the same options, sane sizes."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trillora.certify.certificate import Check, Layer, Status
from trillora.certify.subject import NotHere, Subject, Trained, scale_of
from trillora.certify.weights.expected import product_slack
from trillora.errors import TrilloraError
from trillora.files.read_json import read_json
from trillora.model.adapter_parameters import EMBEDDING_A, EMBEDDING_B, LORA_A, LORA_B
from trillora.model.adapters import CONFIG_FILE, load_adapter
from trillora.model.loading.digest import SETTINGS_FILES, settings_digests
from trillora.model.loading.source import base_name
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.stored.packed import opened_tensor
from trillora.model.loading.stored.view import unquantized
from trillora.model.loading.weights import PLAIN_FLOATS, read_headers
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.expert_parameters import INNER, by_expert
from trillora.recipe.schema import EMBEDDED

LARGEST_SCALE = 100.0  # of B A; usual ones are 0.5 to 16
RETRAIN = "copy the adapter from its run again; the run's training command writes it again from the checkpoint"


def check_trained(subject: Subject) -> Iterator[Check]:
    """Whether the adapter is what the run trained, on the base that the run used."""
    adapter = subject.adapter
    assert adapter is not None
    spec, matrices = load_adapter(adapter)
    trained = subject.trained
    if trained.is_from_run:
        yield _same_arrays(spec, matrices, trained)
        config = read_json(adapter / CONFIG_FILE, dict[str, Any], do=RETRAIN)
        yield _same_options(spec, matrices, config, trained)
        yield from check_arithmetic(subject)
    else:
        why = "it was merged from others" if subject.run is not None else "its run is not known"
        what = f"The adapter's weights cannot be compared with a checkpoint: {why}, or its checkpoint is gone."
        yield Check("trained", "weights", "skipped", what, do="give the run: --run RUN")


def check_arithmetic(subject: Subject) -> Iterator[Check]:
    """Says what was rounded in training. All checks use the base in its stored precision."""
    recipe = subject.recipe
    if recipe is None or recipe.model.quantize in ("auto", "none"):
        return
    products = "" if recipe.engine.matmul == "full" else f" and matmuls with it in {recipe.engine.matmul}"
    what = f"Training used a base in {recipe.model.quantize}{products}; the figures here use full precision."
    yield Check("trained", "arithmetic", "ok", what)


def _same_arrays(own: LoraSpec, found: dict[str, np.ndarray], trained: Trained) -> Check:
    different = sorted(found.keys() ^ trained.matrices.keys())
    rewritten = 0
    for name in sorted(found.keys() & trained.matrices.keys()):
        array, expected = found[name], trained.matrices[name]
        if array.shape == expected.shape and array.tobytes() == expected.astype(array.dtype).tobytes():
            continue
        if _same_function(name, own, found, trained):
            rewritten += 1
        else:
            different.append(name)
    if different:
        what = (
            f"{len(different):,} of {len(trained.matrices):,} arrays differ from the {trained.source}, "
            f"first {different[0]}."
        )
        return Check("trained", "weights", "failed", what, len(different), 0, RETRAIN)
    if rewritten:
        what = f"{rewritten:,} of {len(found):,} arrays are rewritten, with the same scale B A as the {trained.source}."
        return Check("trained", "weights", "ok", what, 0, 0)
    what = f"All {len(found):,} arrays equal the {trained.source}, bit for bit."
    return Check("trained", "weights", "ok", what, 0, 0)


def _same_function(name: str, own: LoraSpec, found: dict[str, np.ndarray], trained: Trained) -> bool:
    """Whether an array of a linear layer belongs to the same scale B A: the order of the ranks, and factors that move
    between A, B and alpha, change nothing."""
    layer = name.rpartition(".")[0]
    names = [layer + kind.suffix for kind in (LORA_A, LORA_B)]
    if name not in names or layer not in trained.spec.targets:
        return False
    (a_RD, b_ER), (own_a, own_b) = (
        [arrays[n].astype(np.float64) for n in names] for arrays in (found, trained.matrices)
    )
    if a_RD.shape[1] != own_a.shape[1] or b_ER.shape[0] != own_b.shape[0] or b_ER.shape[1] != len(a_RD):
        return False
    left, right = trained.scale(layer) * own_b, own_a
    off = np.abs(scale_of(own, layer) * b_ER @ a_RD - left @ right)
    return bool((off <= product_slack(left, right)).all())


def _same_options(
    own: LoraSpec, matrices: dict[str, np.ndarray], config: Mapping[str, object], trained: Trained
) -> Check:
    """Whether adapter_config.json makes the same of the arrays. Scales count with their arrays (`_same_function`)."""
    expected, wrong = trained.spec, []
    for option in ("dora", "tokens", "whole"):
        before, now = getattr(expected, option), getattr(own, option)
        if before != now:
            wrong.append(f"{option} is {now} and was {before}")
    layers = sorted(name.rpartition(".")[0] for name in matrices if name.endswith((LORA_A.suffix, EMBEDDING_A.suffix)))
    for layer in layers:
        now, before = scale_of(own, layer), scale_of(expected, layer)
        names = [name for name in matrices if name.rpartition(".")[0] == layer]
        is_moved = all(_same_function(name, own, matrices, trained) for name in names)
        if not np.isclose(now, before, rtol=1e-6) and not is_moved:
            wrong.append(f"the scale of {layer} is {now:g} and was {before:g}")
    wrong += _other_options(config, trained.options)
    if wrong:
        what = f"{CONFIG_FILE} differs from the {trained.source}: {'; '.join(wrong[:3])}."
        return Check("trained", "options", "failed", what, len(wrong), 0, f"restore {CONFIG_FILE}; or {RETRAIN}")
    what = f"Rank, alpha, rsLoRA, DoRA and patterns give the scales of the {trained.source} in {len(layers):,} layers."
    return Check("trained", "options", "ok", what, 0, 0)


# Keys of adapter_config.json that are compared by what they do (scales, tokens, base), or that do nothing.
_BY_EFFECT = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "base_model_name_or_path"),
    *("trainable_token_indices", "modules_to_save", "peft_version", "inference_mode"),
)


def _other_options(config: Mapping[str, object], trained: Mapping[str, object] | None) -> list[str]:
    """Options that differ from the trained ones; where those are not known, that do something we never write."""
    known = {key: config.get(key) for key in _WRITTEN} if trained is None else trained
    defaults = _peft_defaults()

    def value(options: Mapping[str, object], key: str) -> Any:
        found = options.get(key, defaults.get(key))
        return sorted(found) if isinstance(found, list) else found or None

    keys = sorted((config.keys() | known.keys()) - {*_BY_EFFECT})
    wrong = [key for key in keys if value(config, key) != value(known, key)]
    return [f"{key} is {config.get(key)!r} instead of {known.get(key)!r}" for key in wrong]


_WRITTEN = (
    "peft_type",
    "task_type",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "fan_in_fan_out",
    "auto_mapping",
)


def _peft_defaults() -> dict[str, Any]:
    """What PEFT does with options that a file does not have."""
    if importlib.util.find_spec("peft") is None:
        return {}
    from peft import LoraConfig

    return LoraConfig().to_dict()


def check_base(subject: Subject) -> Iterator[Check]:
    """Whether the base model is the one that the run was trained on."""
    recorded = None if subject.manifest is None else subject.manifest.identity.get("model")
    opened_base = subject.opened
    if recorded is None:
        what = f"The digest of {opened_base.base_name} is recorded; there is no run to compare it with."
        yield Check("trained", "base weights", "skipped", what)
    elif recorded != subject.base_digest:
        what = (
            f"The weights of {opened_base.base_name} are not those that the run was trained on: their digest is "
            f"{subject.base_digest[:12]}…, the run recorded {recorded[:12]}…."
        )
        do = "use the same model and revision as the run; if its files have changed, download them again"
        yield Check("trained", "base weights", "failed", what, do=do)
    else:
        what = f"{opened_base.base_name} has the digest that the run recorded, {recorded[:12]}…."
        yield Check("trained", "base weights", "ok", what)
    if opened_base.rope is not None:
        what = f"The base's rotary positions are scaled as in training: {opened_base.rope}."
        yield Check("trained", "positions", "ok", what)
    yield from _base_settings(subject)
    if subject.kind == "adapter":
        yield _base_id(subject)


def _base_settings(subject: Subject) -> Iterator[Check]:
    """Files of the base that an export copies: one that was edited after training would be in the export."""
    recorded = None if subject.manifest is None else subject.manifest.model.get("settings")
    if not isinstance(recorded, dict):
        return  # the embedded model
    now = settings_digests(subject.opened.folder)
    changed = [name for name in SETTINGS_FILES if now.get(name) != recorded.get(name)]
    if not changed:
        yield Check("trained", "base settings", "ok", f"{len(now)} other files of the base are as in training.", 0, 0)
        return
    status: Status = "warning" if subject.kind == "adapter" else "failed"  # an adapter does not contain them
    what = f"{', '.join(changed)} of the base have changed since training, and an export copies them."
    do = "restore the files of the base; if they were changed on purpose, train again"
    yield Check("trained", "base settings", status, what, len(changed), 0, do)


def _base_id(subject: Subject) -> Check:
    name = subject.base_id
    known = None if subject.manifest is None else subject.manifest.model.get("base_name")
    expected = base_name(str(known)) if known else None
    if name is None:
        what = f"{CONFIG_FILE} does not name the base model, so nothing can load the adapter by itself."
        return Check("trained", "base id", "failed", what, do="set base_model_name_or_path to the base's hub id")
    if expected is not None and name != expected and not _same_folder(name, expected):
        what = f"{CONFIG_FILE} names the base {name}, but the run was trained on {expected}."
        return Check("trained", "base id", "failed", what, do=f"set base_model_name_or_path to {expected}")
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.isdir(name) or name == EMBEDDED
    if is_path:
        status: Status = "warning" if expected is not None else "failed"
        what = f"The base is named by a path, {name}, which exists on this machine only; the hub refuses such a card."
        return Check("trained", "base id", status, what, do="set base_model_name_or_path to the base's hub id")
    return Check("trained", "base id", "ok", f"{CONFIG_FILE} names the base {name}.")


def _same_folder(one: str, other: str) -> bool:
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)


# ---- norms


def layers_of(subject: Subject, known: dict[str, float] | None = None) -> tuple[Layer, ...]:
    """Norm of the change of every adapted layer, and of its base weight, which `known` may have from before."""
    assert subject.adapter is not None
    spec, matrices = load_adapter(subject.adapter)
    bases = known if known is not None else _base_norms(subject)
    layers = []
    for name in sorted(matrices):
        for kind_a, kind_b in ((LORA_A, LORA_B), (EMBEDDING_A, EMBEDDING_B)):
            if not name.endswith(kind_a.suffix):
                continue
            layer = name.removesuffix(kind_a.suffix)
            a, b = matrices[name].astype(np.float64), matrices[layer + kind_b.suffix].astype(np.float64)
            num_experts = _num_experts(spec, layer, len(a))
            scale = scale_of(spec, layer)
            # |B A|² = tr((BᵀB)(A Aᵀ)), without the product itself; of each expert, if there are several
            pairs = zip(*by_expert(a, b, num_experts), strict=True)
            square = sum(float(((b_RE @ b_RE.T) * (a_RD @ a_RD.T)).sum()) for a_RD, b_RE in pairs)
            layers.append(Layer(layer, len(a) // num_experts, scale, scale * max(square, 0.0) ** 0.5, bases.get(layer)))
    return tuple(layers)


def _num_experts(spec: LoraSpec, layer: str, num_rows: int) -> int:
    """How many experts have their matrices in these arrays; 1 for a linear layer. Only targets of experts are named
    differently from their arrays (`parts/expert_parameters.py`)."""
    if layer in spec.targets:
        return 1
    module = layer.partition(f".{INNER}")[0]
    rank = next((rank for name, rank in spec.rank_pattern if name.startswith(f"{module}.")), spec.rank)
    return max(1, num_rows // rank)


def _base_norms(subject: Subject) -> dict[str, float]:
    """The norm of each base weight by the name of its layer, one tensor in memory at a time."""
    try:
        folder = subject.opened.folder
    except NotHere:
        return {}
    norms = {}
    for name, tensor in unquantized(read_headers(folder), read_method(folder)).items():
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in PLAIN_FLOATS:
            with opened_tensor(tensor, torch.float32) as read:
                norm = float(torch.linalg.vector_norm(read(()), dtype=torch.float64))
            if not math.isfinite(norm):
                what = f"The base's weight {name} has values that are not finite."
                raise TrilloraError(what, where=str(folder), do="download or copy the base again")
            norms[name.removesuffix(".weight")] = norm
    return norms


def check_norms(subject: Subject, layers: tuple[Layer, ...], *, is_confirmed: bool) -> Iterator[Check]:
    """`is_confirmed`: the weights equal the run's checkpoint, so what is unusual was trained so."""
    assert subject.adapter is not None
    unusual: Status = "warning" if is_confirmed else "failed"
    _, matrices = load_adapter(subject.adapter)  # raises if a value is not finite
    yield Check("norms", "finite", "ok", f"All values of {len(matrices):,} arrays are finite.", 0, 0)
    if not layers:
        what = "The adapter has no low-rank layers; it trains tokens or whole modules."
        yield Check("norms", "layers", "skipped", what)
        return
    changes = np.array([layer.change for layer in layers])
    zero = [layer.name for layer in layers if layer.change == 0]
    if len(zero) == len(layers) and not any(not name.endswith(_OF_LORA) for name in matrices):
        what = "The adapter changes nothing: every layer's B A is zero, so it equals the base."
        yield Check("norms", "no-op", "failed", what, 0, 0, RETRAIN)
    elif zero:
        experts = sorted({name.split(".experts.")[1].partition(".")[0] for name in zero if ".experts." in name})
        named = f"experts {', '.join(experts[:20])}: " if experts else ""
        what = f"{len(zero):,} of {len(layers):,} adapted layers change nothing ({named}{', '.join(zero[:4])})."
        do = "if the layer is used by the model, look for a frozen or skipped layer in training; else leave it out"
        yield Check("norms", "zero layers", unusual, what, len(zero), 0, do)
    else:
        what = f"{len(layers):,} layers change by {changes.min():.3g} to {changes.max():.3g}."
        yield Check("norms", "zero layers", "ok", what, 0, 0)
    largest = max(layers, key=lambda layer: layer.scale)
    status: Status = "ok" if 0 < largest.scale <= LARGEST_SCALE else unusual
    what = f"The largest scale of B A is {largest.scale:g}."
    do = "" if status == "ok" else "check lora_alpha, r and use_rslora against the run's recipe"
    yield Check("norms", "scale", status, what, largest.scale, LARGEST_SCALE, do)
    yield from _ratios(layers, unusual)


_OF_LORA = (LORA_A.suffix, LORA_B.suffix)


def _ratios(layers: tuple[Layer, ...], unusual: Status) -> Iterator[Check]:
    known = [(layer.change / layer.base, layer.name) for layer in layers if layer.base]
    if not known:
        yield Check("norms", "against the base", "skipped", "The base's weights were not read.")
        return
    ratio, name = max(known)
    what = f"The largest change is {ratio:.3g} of its base weight, in {name}."
    if ratio <= 1:
        yield Check("norms", "against the base", "ok", what, ratio, 1)
    else:
        do = "lower the learning rate or alpha: the update is larger than the base weight"
        yield Check("norms", "against the base", unusual, what, ratio, 1, do)
