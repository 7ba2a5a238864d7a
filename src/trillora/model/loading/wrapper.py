"""The text model inside a multimodal model, which is a wrapper around it. It is found by structure, not by name.

    Gemma3ForConditionalGeneration
      model
        vision_tower, multi_modal_projector      deleted before any weight is read
        language_model                           get_decoder()
          embed_tokens                           get_input_embeddings()
          layers.0.self_attn.q_proj …
      lm_head                                    get_output_embeddings()

`keep_text_model` deletes each module that neither contains one of these three nor is inside one. Names stay as in
the wrapper, so transformers' rules for the names in files still apply, and PEFT loads the adapter on the whole wrapper.
The wrapper's own forward runs: for text alone, it computes positions and masks as it always does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillora.errors import TrilloraError
from trillora.model.loading.tensor_files import opened

if TYPE_CHECKING:
    import torch

    from trillora.model.loading.types import PretrainedConfig

TEXT, MULTIMODAL = "AutoModelForCausalLM", "AutoModelForMultimodalLM"
_HEAD = "lm_head.weight"  # the end of the name of every head in transformers
_ROWS_PER_READ = 4096
_REMOVED = "removed_modules"  # the attribute of a module with the names of what was deleted


def text_class(model_type: object) -> str | None:
    """The name of transformers' causal language model of this type; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None


def multimodal_class(model_type: object) -> str | None:
    """The name of transformers' class for text, images and sound of this type; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None


def is_wrapper(config: PretrainedConfig) -> bool:
    """Whether the checkpoint has a multimodal model with a text model inside. Its `architectures` decide. Without them,
    it is a text model, if transformers has one of this type."""
    name = multimodal_class(config.model_type)
    architectures = getattr(config, "architectures", None) or [text_class(config.model_type) or name]
    return name is not None and name in architectures and config.get_text_config() is not config


def auto_class(config: PretrainedConfig) -> str:
    """The name of transformers' class that loads the checkpoint as it is stored."""
    return MULTIMODAL if is_wrapper(config) else TEXT


def has_own_head(config: PretrainedConfig, files: Sequence[Path]) -> bool:
    """Whether the files have a head that differs from the embedding. The configs of many wrappers tie the two by
    default, while their text models' configs do not. transformers then uses both matrices."""
    text = config.get_text_config()
    shape = [text.vocab_size, text.hidden_size]
    found: dict[str, Path] = {}
    for file in files:
        with opened(file) as tensors:
            names = [name for name in tensors.keys() if tensors.get_slice(name).get_shape() == shape]  # noqa: SIM118
            found |= dict.fromkeys(names, file)
    heads = [name for name in found if name.endswith(_HEAD)]
    embeddings = [name for name in found if name not in heads]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    head, embedding = (_blocks(found[name], name, shape[0]) for name in (heads[0], embeddings[0]))
    return any(not ours.equal(theirs) for ours, theirs in zip(head, embedding, strict=True))


def _blocks(file: Path, name: str, num_rows: int) -> Iterator[Any]:
    with opened(file) as tensors:
        rows = tensors.get_slice(name)
        for start in range(0, num_rows, _ROWS_PER_READ):
            yield rows[start : start + _ROWS_PER_READ]


def keep_text_model(module: torch.nn.Module) -> None:
    """Deletes all of a wrapper but its decoder, its embedding and its head."""
    decoder, embedding, head = _text_parts(module)
    names = {id(child): name for name, child in module.named_modules()}
    kept = [names[id(part)] for part in (decoder, embedding, head)]

    def is_kept(name: str) -> bool:
        return any(f"{part}.".startswith(f"{name}.") or f"{name}.".startswith(f"{part}.") for part in kept)

    removed = [name for name, _ in module.named_modules() if name and not is_kept(name)]
    for name in removed:
        parent, _, attribute = name.rpartition(".")
        if parent not in removed:
            delattr(module.get_submodule(parent), attribute)
    module.__dict__[_REMOVED] = frozenset(removed)


def removed_modules(module: torch.nn.Module) -> frozenset[str]:
    """The names of the modules that `keep_text_model` deleted; empty for a text model."""
    found: frozenset[str] = module.__dict__.get(_REMOVED, frozenset())
    return found


def _text_parts(module: torch.nn.Module) -> tuple[Any, Any, Any]:
    inside = {id(child) for child in module.modules()}
    try:
        parts = (module.get_decoder(), module.get_input_embeddings(), module.get_output_embeddings())
    except (AttributeError, NotImplementedError):
        parts = (None, None, None)
    for part, what in zip(parts, ("decoder", "embedding of tokens", "head"), strict=True):
        if part is None or part is module or id(part) not in inside:
            raise TrilloraError(
                f"The text model inside {type(module).__name__} cannot be found: it has no {what}.",
                where=f"{module.name_or_path}/config.json" if module.name_or_path else None,
                do="choose a model that generates text; if it is a new one, install a newer transformers",
            )
    return parts
