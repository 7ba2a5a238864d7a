"""The adapter of a multimodal model with the names of its text model alone, such as `Gemma3ForCausalLM`.

    model.language_model.layers.0.self_attn.q_proj    in the multimodal model
    model.layers.0.self_attn.q_proj                   in the text model

The matrices are the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trillora.adapters.card import CARD_FILE, peft_usage
from trillora.errors import TrilloraError
from trillora.events import Listener, ignore_events
from trillora.export.source import Exported, ExportSource
from trillora.files.atomic import new_folder
from trillora.files.checksums import with_checksums
from trillora.model.adapters import CONFIG_FILE, adapter_files, check_shapes
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.loading.wrapper import is_wrapper, text_class


def export_text_adapter(source: ExportSource, out: Path, *, listener: Listener = ignore_events) -> Exported:
    """Writes the adapter for the text model to the new folder `out`."""
    config = source.base.config
    text = config.get_text_config()
    kind = text_class(text.model_type)
    _check(source, text, kind)
    wrapper = CausalLM(config, ModelOptions(scan=False, remat="none"))
    alone = CausalLM(text, ModelOptions(scan=False, remat="none"))
    prefixes = {_name_of(wrapper.module, part): _name_of(alone.module, other) for part, other in _parts(wrapper, alone)}

    def renamed(name: str) -> str:
        prefix = next(prefix for prefix in prefixes if name.startswith(f"{prefix}."))
        return prefixes[prefix] + name.removeprefix(prefix)

    spec = dataclasses.replace(
        source.spec,
        targets=tuple(map(renamed, source.spec.targets)),
        rank_pattern=tuple((renamed(name), rank) for name, rank in source.spec.rank_pattern),
        alpha_pattern=tuple((renamed(name), alpha) for name, alpha in source.spec.alpha_pattern),
    )
    matrices = {renamed(name): array for name, array in source.matrices.items()}
    adapted = alone.with_lora(spec)
    check_shapes({name: a.shape for name, a in matrices.items()}, adapted.adapter_layout, str(source.adapter))
    files = with_checksums(
        0,
        {
            **adapter_files(matrices, adapted.module, adapted.targets, spec, source.base_id),
            **source.tokenizer_files(),
            **source.base.rope_file(),
        },
    )
    files[CARD_FILE] = _card(source, kind or "", json.loads(files[CONFIG_FILE]))
    with new_folder(out) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
    num_bytes = sum(map(len, files.values()))
    return Exported("text-adapter", out, tuple(files), num_bytes, source.notes)


def _check(source: ExportSource, text: Any, kind: str | None) -> None:
    reason = None
    if not is_wrapper(source.base.config):
        reason = "its base is not a multimodal model, so it has these names already"
    elif kind is None:
        reason = f"transformers has no class for the text model alone (model_type '{text.model_type}')"
    elif source.spec.tokens is not None or source.spec.whole:
        reason = "it has trained tokens or modules that were trained as a whole"
    if reason:
        raise TrilloraError(
            f"The adapter cannot be written for a text model: {reason}.",
            where=str(source.adapter),
            do="use the adapter as it is, or --to merged",
        )


def _parts(wrapper: CausalLM, alone: CausalLM) -> list[tuple[Any, Any]]:
    """The parts that both have: the decoder, and the head."""
    heads = (wrapper.module.get_output_embeddings(), alone.module.get_output_embeddings())
    return [(wrapper.decoder or wrapper.module, alone.decoder or alone.module), heads]


def _name_of(module: Any, part: object) -> str:
    return next(name for name, child in module.named_modules() if child is part)


def _card(source: ExportSource, kind: str, config: Mapping[str, object]) -> bytes:
    comment = f"  # a {kind} with the weights of this base's text model"
    usage = peft_usage("TEXT_MODEL", config, source.base.positions, comment)
    form = "A LoRA adapter for the text model alone,"
    return source.card(relation="adapter", form=form, library="peft", usage=usage, config=config)
