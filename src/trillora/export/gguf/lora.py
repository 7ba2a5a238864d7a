"""Writes only the adapter as a GGUF file, for llama.cpp's `--lora` on a GGUF file of the base model.

    export_lora_gguf(source, Path("runs/first/exports/lora-gguf")).files   ("lora.gguf",)

llama.cpp adds alpha / rank * B A, with one alpha for all layers and each layer's own rank. rsLoRA, and layers with an
alpha of their own, have other scales: where a layer's scale is different, its B is multiplied by the difference.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.export.gguf.families import Family, family_of
from trillora.export.gguf.quantize import check_type
from trillora.export.gguf.tensors import change_of, name_finder, text_name
from trillora.export.gguf.write import FileTensor, Value, write_tensors
from trillora.export.merged import writing
from trillora.export.source import Exported, ExportSource
from trillora.files.atomic import new_folder
from trillora.model.adapter_parameters import LORA_A, LORA_B
from trillora.model.lora_spec import LayerLora, LoraSpec

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

FILE = "lora.gguf"


def export_lora_gguf(source: ExportSource, out: Path, *, listener: Listener = ignore_events) -> Exported:
    """Writes the adapter alone to the new folder `out`."""
    check_type("f32")
    family, config = family_of(source.base.config), source.base.config.get_text_config()
    _check(source, config)
    values, alpha = lora_values(source)
    with writing(out), new_folder(out) as folder:
        write_tensors(folder / FILE, family.arch, values, _tensors(source, family, config, alpha), listener)
        num_bytes = (folder / FILE).stat().st_size
    return Exported("lora-gguf", out, (FILE,), num_bytes, source.notes)


def lora_values(source: ExportSource) -> tuple[dict[str, Value], float]:
    """The header, and the alpha in it, which every layer is scaled by."""
    if (rope := source.base.rope) is not None:
        reason = f"it was trained with scaled rotary positions ({rope}), for which such a file has no place"
        raise _refused(source, reason)
    alpha = scale_of(source.spec, "", source.spec.rank) * source.spec.rank
    values: dict[str, Value] = {
        "general.architecture": family_of(source.base.config).arch,
        "general.type": "adapter",
        "general.name": source.name,
        "general.base_model.count": 1,
        "general.base_model.0.name": source.base_id.rsplit("/", 1)[-1],
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    return values, alpha


def scale_of(spec: LoraSpec, layer: str, rank: int) -> float:
    """The factor of B A in a layer. The options of a written adapter name layers in full."""
    return spec.scale_of(LayerLora(rank, dict(spec.alpha_pattern).get(layer, spec.alpha)))


def _check(source: ExportSource, config: PretrainedConfig) -> None:
    spec, reason = source.spec, None
    if spec.dora:
        reason = "DoRA rescales the weights after the change is added"
    elif spec.tokens is not None:
        reason = "it has rows of new or trained tokens"
    elif spec.whole:
        reason = "it has modules that were trained as a whole"
    elif others := [name for name in source.matrices if not name.endswith((LORA_A.suffix, LORA_B.suffix))]:
        reason = f"it has {others[0]}, which is not a matrix of a linear layer"
    elif experts := sorted({*spec.targets} - {name.rpartition(".")[0] for name in source.matrices}):
        reason = f"it changes the experts' {experts[0]}"
    elif config.tie_word_embeddings and any(name.startswith("lm_head.") for name in source.matrices):
        reason = "it changes the head alone, which is the embedding too in this model"
    if reason:
        raise _refused(source, reason)


def _refused(source: ExportSource, reason: str) -> TrilloraError:
    return TrilloraError(
        f"This adapter cannot be a LoRA file of llama.cpp: {reason}.",
        where=str(source.adapter),
        do="use --to gguf, which merges the adapter into the base model",
    )


def _tensors(source: ExportSource, family: Family, config: PretrainedConfig, alpha: float) -> list[FileTensor]:
    from gguf import GGMLQuantizationType

    find = name_finder(family, config.num_hidden_layers)
    tensors = []
    for name, a_RD in source.matrices.items():
        if not name.endswith(LORA_A.suffix):
            continue
        layer = name.removesuffix(LORA_A.suffix)
        weight = text_name(f"{layer}.weight")
        assert weight is not None
        rank = len(a_RD)
        share = scale_of(source.spec, layer, rank) * rank / alpha
        b_ER = source.matrices[layer + LORA_B.suffix]
        b_ER = b_ER if math.isclose(share, 1.0) else b_ER * np.float32(share)
        change = change_of(weight, family, config)  # of rows: outputs, so it concerns B alone
        pair = {"lora_a": a_RD, "lora_b": change(b_ER) if change else b_ER}
        for suffix, array in pair.items():
            tensors.append(
                FileTensor(
                    f"{find(weight)}.{suffix}",
                    array.shape,
                    GGMLQuantizationType.F32,
                    lambda array=array: [array],  # type: ignore[misc]
                )
            )
    return tensors
