"""Finds a model by name and checks its files. The result is always a local folder.

    OpenModel.open("smollm2", …)       the embedded model
    OpenModel.open("models/mine", …)   a folder
    OpenModel.open("org/name", …)      a hub id; the files are in the hub's cache

Only data is downloaded and opened: JSON, safetensors, tokenizer files, templates. Pickle weights (.bin, .pt) and Python
files can run code on this machine. Pickle weights are refused. Python files need trust_remote_code and, on the hub, a
full commit as revision. They are ignored if transformers supports the model itself.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trillora.errors import TrilloraError, nearest
from trillora.files.hub import HUB_ID, download, list_files
from trillora.model.loading.description import (
    CONFIG_FILE,
    INDEX_FILE,
    check_tokenizer_config,
    check_weights,
    processor_template,
    read_config,
    read_index,
)
from trillora.model.loading.embedded import SMOLLM2_HUB_ID, smollm2_folder
from trillora.model.loading.growth import grow
from trillora.model.loading.rope import ScaledPositions, rope_of, scale_positions
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.tensor_files import stored_shapes
from trillora.model.loading.wrapper import has_own_head, is_wrapper, multimodal_class, text_class
from trillora.recipe.lora import RopeSection
from trillora.recipe.schema import EMBEDDED, ModelSection

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig, Tokenizer

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_FILES = ("*.model", "*.tiktoken", "*.txt")  # sentencepiece, tiktoken, merges and vocabularies
DESCRIPTION_FILES = ("*.json", "*.jinja", *TOKENIZER_FILES)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class OpenModel:
    """A model's folder, configuration and tokenizer; its weights are not read yet."""

    folder: Path
    config: PretrainedConfig
    tokenizer: Tokenizer
    base_name: str  # loads the same model in PEFT and transformers: a hub id or the path of a folder
    rope: RopeSection | None = None  # how `config` scales the positions

    @classmethod
    def open(
        cls,
        name: str,
        *,
        revision: str | None,
        trust_remote_code: bool,
        tokens: Sequence[str] = (),
        rope: RopeSection | None = None,
    ) -> OpenModel:
        """`tokens` are added to the tokenizer; `rope` scales the positions."""
        folder = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
        config = load_config(folder, trust_remote_code=trust_remote_code, rope=rope)
        files = weight_files(folder)
        check_weights(config, stored_shapes(files), str(folder / CONFIG_FILE))
        is_tied = getattr(config, "tie_word_embeddings", False)  # some wrappers do not have it
        if is_wrapper(config) and is_tied and has_own_head(config, files):
            config.tie_word_embeddings = False
        return cls(folder, config, load_tokenizer(folder, tokens), base_name(name), rope)

    @classmethod
    def of(cls, model: ModelSection, *, tokens: Sequence[str] = (), adapter: Path | None = None) -> OpenModel:
        """The model of a recipe. A finished `adapter` may say how its positions are scaled."""
        return cls.open(
            model.name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            tokens=tokens,
            rope=rope_of(adapter, model.rope),
        )

    @property
    def positions(self) -> ScaledPositions | None:
        """How the positions are scaled."""
        return None if self.rope is None else ScaledPositions.of(self.config)

    def rope_file(self) -> dict[str, bytes]:
        """The file next to an adapter that says how the positions are scaled, by its name; empty if they are not."""
        return {} if self.positions is None else self.positions.file()


def base_name(name: str) -> str:
    """The name under which PEFT and transformers find the model that Trillora calls `name`."""
    if name == EMBEDDED:
        return SMOLLM2_HUB_ID
    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.is_dir() else name


def find_model(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, with_weights: bool = True
) -> Path:
    """Returns the local folder of a model: config.json, tokenizer and, with `with_weights`, complete safetensors files.

    `name` is `smollm2` (embedded), a folder, or a hub id `org/name`; `revision` is a hub branch, tag or commit.
    """
    if name == EMBEDDED:
        return smollm2_folder()
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_remote_code(folder, trusted=trust_remote_code, pinned=True)
        read_method(folder)
        if with_weights:
            weight_files(folder)
        return folder
    if not HUB_ID.fullmatch(name):
        raise _no_such_folder(name, folder)
    return _from_hub(name, revision, trust_remote_code, with_weights)


def load_config(folder: Path, trust_remote_code: bool = False, rope: RopeSection | None = None) -> PretrainedConfig:
    """Returns the transformers config of a causal language model, or of a multimodal model that contains one; other
    models raise an error that names them. `rope` scales its positions."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_json = read_config(folder)
    _check_remote_code(folder, trusted=trust_remote_code, pinned=True)
    where = str(folder / CONFIG_FILE)
    model_type = config_json.get("model_type")
    own_code = _needs_own_code(config_json)
    usual = text_class(model_type) or multimodal_class(model_type)
    supported = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), multimodal_class(model_type) or ""}
    causal_classes = {name.lower() for name in supported}
    if not own_code or "AutoModelForCausalLM" not in (config_json["auto_map"] or {}):
        if not _is_native(config_json):
            meant = nearest(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            raise TrilloraError(
                f"model_type '{model_type}' is not a causal language model that transformers supports.",
                where=where,
                do=(f"did you mean '{meant}'? " if meant else "")
                + "Choose a text-generation model; if this model is new, install a newer transformers",
            )
        # A model without a head (LlamaModel) may have tied embeddings; the head of another task never fits. Case is
        # ignored: the code that MPT came with says MPTForCausalLM, transformers says MptForCausalLM.
        architectures = config_json.get("architectures") or []
        if architectures and all("For" in name and name.lower() not in causal_classes for name in architectures):
            raise TrilloraError(
                f"{', '.join(architectures)} (model_type '{model_type}') is not a causal language model.",
                where=where,
                do=f"use the model's text-generation version ({usual})",
            )
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=own_code and trust_remote_code
        )
    except Exception as error:  # transformers' validation raises several exception types; add the file's name
        raise TrilloraError(
            f"transformers cannot read this config: {error}",
            where=where,
            do="use the config.json of the model's repository, and the transformers version that it names",
        ) from error
    if not own_code and not _has_text_model(config):
        raise TrilloraError(
            f"The text model inside this model cannot be found (model_type '{model_type}').",
            where=where,
            do="choose a text-generation model, or a multimodal one whose config.json has a text_config with a decoder",
        )
    if not own_code and hasattr(config, "auto_map"):
        del config.auto_map  # otherwise building the model with trust_remote_code would run the code it names
    if rope is not None:
        scale_positions(config, rope, where)
    return config


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Also usable as a decorator: turns a panic of the tokenizers library, which is not an Exception, into an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 defines this class in every library of its own
            raise
        raise TrilloraError(
            f"The tokenizers library failed: {error}",
            where="tokenizer.json",
            do="use the tokenizer.json of the model's repository: this one has a pattern that cannot split the text",
        ) from None


@tokenizer_errors()
def load_tokenizer(folder: Path, tokens: Sequence[str] = ()) -> Tokenizer:
    """Loads the tokenizer and adds `tokens`. Missing files are an error: transformers would create an empty
    tokenizer."""
    from transformers import AutoTokenizer

    known = ("tokenizer.json", "vocab.json", "tekken.json", *TOKENIZER_FILES)
    if not any(file for pattern in known for file in folder.glob(pattern)):
        raise TrilloraError(
            "The model has no tokenizer files.",
            where=str(folder),
            do="copy tokenizer.json and tokenizer_config.json from the model's repository to this folder",
        )
    check_tokenizer_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer.decode(tokenizer("A probe.")["input_ids"])  # some strange values raise only when they are used
    except Exception as error:  # the tokenizers library raises plain Exception on a broken file
        raise TrilloraError(
            f"The tokenizer cannot be loaded: {error}",
            where=str(folder),
            do="download tokenizer.json and tokenizer_config.json again; tokenizers in Python code are not run",
        ) from error
    # The encoder of rows and prompts refuses tokens that the model does not have.
    tokenizer.model_vocab_size = _vocab_size(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor_template(folder)
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        # transformers cannot choose one. Without a template, rows of chats ask the user for data.chat_template.
        only = next(iter(templates.values())) if len(templates) == 1 else None
        if only is None:
            logger.warning("The tokenizer's chat templates have no default, so none is used: %s", ", ".join(templates))
        tokenizer.chat_template = only
    grow(tokenizer, tokens)
    return tokenizer


def _vocab_size(folder: Path) -> int | None:
    """The number of tokens that the model has embeddings for, if its config gives it."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    config = read_config(folder)
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None


def weight_files(folder: Path) -> list[Path]:
    """Returns the model's safetensors files, or raises an error that says which files are there instead."""
    shards = read_index(folder)
    if shards is not None:
        missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
        if missing:
            raise TrilloraError(
                f"{len(missing)} of the model's {len(shards)} weight files are missing: {', '.join(missing[:3])}"
                + (" …" if len(missing) > 3 else ""),
                where=str(folder / INDEX_FILE),
                do="download the missing files: the download or copy was probably interrupted",
            )
        return [folder / shard for shard in shards]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise _no_weights({file.name for file in folder.iterdir()}, str(folder))


def _no_weights(files: set[str], where: str) -> TrilloraError:
    """The error for a model without `model.safetensors` or its index, which depends on the files that are there."""
    pickles = sorted(file for file in files if file.endswith(PICKLE_SUFFIXES) and not file.startswith("training_args"))
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    others = sorted(file for file in files if file.endswith(".safetensors"))
    if pickles:
        return TrilloraError(
            f"The weights are pickle files ({pickles[0]}), which can run code when they are opened.",
            where=where,
            do='convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('MODEL').save_pretrained('FOLDER')\", then copy the tokenizer files to FOLDER",
        )
    if ggufs:
        return TrilloraError(
            f"The weights are a GGUF file ({ggufs[0]}), a format for inference.",
            where=where,
            do="use the repository or folder with the safetensors files that it was made from",
        )
    if others:
        return TrilloraError(
            f"There are safetensors files ({others[0]}), but no {SINGLE_FILE} and no {INDEX_FILE}.",
            where=where,
            do="use the transformers version of the model; an adapter or another library's format cannot be a base",
        )
    return TrilloraError(
        "The model has no weights.",
        where=where,
        do=f"add {SINGLE_FILE}, or {INDEX_FILE} with the files that it lists",
    )


def _is_native(config_json: Mapping[str, object]) -> bool:
    """Whether transformers includes a causal language model of this type, or a multimodal one."""
    model_type = config_json.get("model_type")
    return text_class(model_type) is not None or multimodal_class(model_type) is not None


def _has_text_model(config: PretrainedConfig) -> bool:
    """False for a multimodal model whose config does not say which part is a causal language model."""
    try:
        text = config.get_text_config()
    except ValueError:  # several parts could be meant
        return False
    is_text = text_class(config.model_type) is not None
    return is_text or (is_wrapper(config) and not (config.is_encoder_decoder or text.is_encoder_decoder))


def _needs_own_code(config_json: Mapping[str, object]) -> bool:
    """Many repositories (Phi-3) still name code from before transformers supported their type. It is not needed."""
    return "auto_map" in config_json and not _is_native(config_json)


def code_files(folder: Path) -> list[Path]:
    """The Python files of a model that needs its own code; none if transformers supports it."""
    return sorted(folder.rglob("*.py")) if _needs_own_code(read_config(folder)) else []


def _check_remote_code(folder: Path, *, trusted: bool, pinned: bool) -> None:
    """Refuses a model that needs its own Python code, unless the user trusts the code and it cannot change."""
    if not _needs_own_code(read_config(folder)):
        return
    where = str(folder / CONFIG_FILE)
    if not trusted:
        raise TrilloraError(
            "The model needs its own Python code (auto_map), which would run on this machine.",
            where=where,
            do="read its *.py files; if you trust them, add model.trust_remote_code=true (generate, chat, eval: "
            "--trust-remote-code), and for a model of the hub model.revision=COMMIT with the full commit; or install a "
            "newer transformers, if it supports this model_type",
        )
    if "--" in json.dumps(read_config(folder)["auto_map"]):  # other/repository--module.Class
        raise TrilloraError(
            "The model's code is in another repository, which may change at any time.",
            where=where,
            do="copy the *.py files into the model's folder, and remove the repository's name from auto_map",
        )
    if not pinned:
        raise TrilloraError(
            "The model's Python code may change at any time: revision is not a full commit.",
            where=where,
            do="set revision to the 40-digit commit whose code you read",
        )


def _no_such_folder(name: str, folder: Path) -> TrilloraError:
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    meant = nearest(folder.name, [*siblings, EMBEDDED])
    return TrilloraError(
        f"There is no model '{name}'.",
        where=f"{folder} is not a folder, and a hub id has the form org/name",
        do=(f"did you mean '{meant}'? " if meant else "")
        + f"Use '{EMBEDDED}' (embedded), an existing folder, or a hub id",
    )


def _from_hub(name: str, revision: str | None, trust_remote_code: bool, with_weights: bool) -> Path:
    def fetch(commit: str | None, patterns: tuple[str, ...]) -> Path:
        # Subfolders contain other formats; consolidated* is a second copy of the weights in Mistral's format.
        ignore = ("*/*", "consolidated*")
        return download(name, "model", revision=commit, allow=patterns, ignore=ignore, embedded=[EMBEDDED])

    # First only the description: for a model that will be refused, that is kilobytes instead of gigabytes.
    folder = fetch(revision, DESCRIPTION_FILES)
    _check_remote_code(folder, trusted=trust_remote_code, pinned=bool(revision and COMMIT.fullmatch(revision)))
    read_method(folder)
    code = ("*.py",) if _needs_own_code(read_config(folder)) else ()
    weights = ("*.safetensors",) if with_weights else ()
    if code or weights:
        # The snapshot folder is named by its commit, so both downloads are of the same commit.
        folder = fetch(folder.name, (*DESCRIPTION_FILES, *code, *weights))
    if with_weights and not any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        files = list_files(name, folder.name) or {file.name for file in folder.iterdir()}
        raise _no_weights(files, f"hub model {name}")
    if with_weights:
        weight_files(folder)
    return folder
