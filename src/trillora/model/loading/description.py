"""Reads the JSON files that describe a model. They may be damaged or hostile, so every value is checked once, here.

    read_config(folder)["hidden_size"]    config.json: known fields have their type, sizes are within bounds
    check_weights(config, shapes, where)  and they agree with what the weight files contain
    stop_tokens(folder, config)           generation_config.json
    read_index(folder)                    model.safetensors.index.json
    check_tokenizer_config(folder)        tokenizer_config.json
    processor_template(folder)            chat_template.json

transformers believes a config. With 100,000 layers it builds them for minutes, and with a width of 2^31 it asks for
terabytes. So these checks come before transformers reads the file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trillora.errors import TrilloraError
from trillora.files.read_json import read_json

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDED_NOTE = (
    "The base is the 4-bit copy (Q4_1) of SmolLM2-135M-Instruct that comes with Trillora. "
    "With the original weights of the hub, the adapter was not measured."
)
_DO = "download the file again"
_MAX_REUSE = 16  # how often a model may use the weights of a layer: HRM uses them six times

# Smallest and largest value of a size, by the whole name of its field; the first match counts. They apply at every
# depth: in a multimodal model the sizes are in text_config. The largest known values: 128 layers, a width of 53,248
# (intermediate_size), 16,384 experts, 290,943 tokens, 10,485,760 positions.
_SIZES: tuple[tuple[re.Pattern[str], int, int], ...] = tuple(
    (re.compile(names), smallest, largest)
    for names, smallest, largest in (
        (r"n_layers?|num_(hidden_|encoder_|decoder_)?layers|num_blocks", 1, 1024),
        (r"(hidden|embedding|intermediate)_size|n_embd|d_model|head_dim", 1, 1 << 20),
        (r"n_heads?|num_(attention_|key_value_|kv_)?heads|kv_n_heads", 1, 1 << 14),
        (r"vocab_size", 1, 1 << 24),
        (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 1, (1 << 31) - 1),
        (r".*token_id", -1, (1 << 31) - 1),  # older Llama configs have a pad_token_id of -1
        (r"num_labels|.*layers?|.*experts?", -1024, 1 << 16),
        (r".*_(size|dim)", -1, 1 << 24),
        (r".*", -(1 << 53), 1 << 53),
    )
)


class _Config(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None


FileName = Annotated[str, Field(pattern="^[ -~]+$", max_length=255)]
TokenId = Annotated[int, Field(strict=True, ge=-1, lt=1 << 31)]


class _GenerationConfig(BaseModel):
    eos_token_id: TokenId | list[TokenId] | None = None


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)

    weight_map: dict[str, FileName] = Field(min_length=1)


class _NamedTemplate(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    template: str


class _TokenizerConfig(BaseModel):
    model_config = ConfigDict(strict=True)

    chat_template: str | list[_NamedTemplate] | None = None


class _ProcessorTemplate(BaseModel):
    model_config = ConfigDict(strict=True)

    chat_template: str | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Sizes are within bounds; everything else is left to transformers."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise TrilloraError(
            "There is no config.json, so this is not a transformers model.",
            where=str(folder),
            do="use the folder or hub id of a complete model, not of an adapter",
        )
    # Mamba 2 has an infinite limit.
    config = read_json(file, _Config, do=_DO, allow_infinity=True).model_dump(exclude_unset=True)
    _check_sizes(config, "", str(file))
    return config


def _check_sizes(part: Mapping[str, object], path: str, where: str) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            _check_sizes(value, f"{path}{key}.", where)
        smallest, largest = next((low, high) for names, low, high in _SIZES if names.fullmatch(key))
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int and not smallest <= number <= largest:
                raise TrilloraError(
                    f"The model's {path}{key} must be between {smallest} and {largest}, but is {str(number)[:40]}.",
                    where=where,
                    do=_DO,
                )


def check_weights(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuses a config whose sizes are far from the stored tensors' sizes, before anything is built from it.

    `shapes` are the shapes of all tensors by name. This compares only what every architecture has: layers, width and
    vocabulary. Loading the weights compares every name and shape.
    """
    text = config.get_text_config()
    layers: dict[str, set[str]] = defaultdict(set)
    for name in shapes:
        if match := re.match(r"(.*?)\.(\d+)\.", name):
            layers[match[1]].add(match[2])
    stored = max(map(len, layers.values()), default=0)
    num_layers = getattr(text, "num_hidden_layers", None)
    if isinstance(num_layers, int) and layers and num_layers > _MAX_REUSE * stored:
        raise _contradiction(f"num_hidden_layers is {num_layers}, but the weights have {stored} layers", where)
    dims = {dim for shape in shapes.values() for dim in shape}
    for key in ("vocab_size", "hidden_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size not in dims:
            raise _contradiction(f"{key} is {size}, but no weight has a dimension of this size", where)


def _contradiction(what: str, where: str) -> TrilloraError:
    return TrilloraError(
        f"The config does not describe these weights: {what}.",
        where=where,
        do="use config.json and weights of the same model",
    )


def stop_tokens(folder: Path, config: PretrainedConfig) -> set[int]:
    """The stop tokens in the model's own files: `generation_config.json`, or else `config.json`."""
    text = config.get_text_config()
    file, source = folder / "generation_config.json", folder / CONFIG_FILE
    named = getattr(text, "eos_token_id", None)
    if named is None:
        named = getattr(config, "eos_token_id", None)  # of a multimodal model as a whole
    if file.is_file():
        generation = read_json(file, _GenerationConfig, do=_DO, allow_infinity=True)
        if "eos_token_id" in generation.model_fields_set:
            named, source = generation.eos_token_id, file
    tokens = named if isinstance(named, list | tuple) else [] if named is None else [named]
    for token in tokens:
        if token >= text.vocab_size:
            raise TrilloraError(
                f"eos_token_id is {token}, but the model has only {text.vocab_size} tokens.", where=str(source), do=_DO
            )
    return {token for token in tokens if token >= 0}


def read_index(folder: Path) -> list[str] | None:
    """The names of the weight files in the index; None if there is no index."""
    file = folder / INDEX_FILE
    if not file.is_file():
        return None
    return sorted(set(read_json(file, _Index, do=_DO).weight_map.values()))


def processor_template(folder: Path) -> str | None:
    """The chat template of a multimodal processor. Older repositories have it only there, and AutoTokenizer does
    not read it."""
    file = folder / "chat_template.json"
    return read_json(file, _ProcessorTemplate, do=_DO).chat_template if file.is_file() else None


def check_tokenizer_config(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    if file.is_file():
        read_json(file, _TokenizerConfig, do=_DO, allow_infinity=True)
