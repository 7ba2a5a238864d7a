"""Where a model comes from: the embedded one, a folder, or the hub; always ends as a local folder that was checked.

Only data is ever fetched or opened: json, safetensors, tokenizer files, templates. Pickle weights (.bin, .pt) and
Python files can run code on this machine; the first are refused, the second need the user's word and a fixed commit.
A model that transformers knows itself is read as transformers' own, whatever Python files lie beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError, nearest
from trillora.model.loading.embedded import say_on_stderr, smollm2_folder

EMBEDDED = "smollm2"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_FILES = ("*.model", "*.tiktoken", "*.txt")  # besides json: sentencepiece, tiktoken, merges and vocabularies
DESCRIPTION_FILES = ("*.json", "*.jinja", *TOKENIZER_FILES)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class OpenModel:
    """A model's files, read as far as no weights are needed."""

    folder: Path
    config: Any
    tokenizer: Any

    @classmethod
    def open(cls, name: str, *, revision: str | None, trust_remote_code: bool) -> OpenModel:
        folder = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
        return cls(folder, load_config(folder, trust_remote_code=trust_remote_code), load_tokenizer(folder))


def find_model(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    with_weights: bool = True,
    say: Callable[[str], None] = say_on_stderr,
) -> Path:
    """The local folder of a model: config.json, tokenizer and, unless asked without, complete safetensors weights.

    `name` is `smollm2` (embedded), a folder, or a hub id `org/name`; `revision` is a hub branch, tag or commit.
    """
    if name == EMBEDDED:
        return smollm2_folder(say)
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_remote_code(folder, trusted=trust_remote_code, pinned=True)
        if with_weights:
            weight_files(folder)
        return folder
    if not HUB_ID.fullmatch(name) or name.startswith((".", "~")):
        raise _no_such_folder(name, folder)
    return _from_hub(name, revision, trust_remote_code, with_weights)


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a causal language model; anything else is refused by name."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    described = _read_config(folder)
    _check_remote_code(folder, trusted=trust_remote_code, pinned=True)
    where = str(folder / "config.json")
    model_type = described.get("model_type")
    own_code = _needs_own_code(described)
    causal_classes = {name.lower() for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if not own_code or "AutoModelForCausalLM" not in (described["auto_map"] or {}):
        if not _is_native(described):
            meant = nearest(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            raise TrilloraError(
                f"model_type '{model_type}' is not a causal language model that transformers knows.",
                where=where,
                do=(f"nearest known: '{meant}'; " if meant else "")
                + "choose a text-generation model, or a newer transformers if this one is new",
            )
        # A bare body (LlamaModel) may still carry tied embeddings; another task's head (…ForSequence…) never fits.
        # Case does not count: the code MPT once brought calls itself MPTForCausalLM, transformers' MptForCausalLM.
        architectures = described.get("architectures") or []
        if architectures and all("For" in name and name.lower() not in causal_classes for name in architectures):
            raise TrilloraError(
                f"transformers knows no causal language model {', '.join(architectures)} (model_type '{model_type}').",
                where=where,
                do=f"choose the model's text-generation version ({MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]})",
            )
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=own_code and trust_remote_code
        )
    except Exception as error:  # transformers validates fields with several exception types; say which file it is
        raise TrilloraError(
            f"transformers cannot read this config: {error}",
            where=where,
            do="take config.json from the model's own repository, and the transformers version it names",
        ) from error
    if not own_code and hasattr(config, "auto_map"):
        del config.auto_map  # else building the model with trust_remote_code set would run what it names
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's own tokenizer. Its files must be there: transformers would invent an empty one."""
    from transformers import AutoTokenizer

    known = ("tokenizer.json", "vocab.json", "tekken.json", *TOKENIZER_FILES)
    if not any(file for pattern in known for file in folder.glob(pattern)):
        raise TrilloraError(
            "The model has no tokenizer files.",
            where=str(folder),
            do="copy tokenizer.json and tokenizer_config.json there from the repository the model came from",
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception on a broken file
        raise TrilloraError(
            f"The tokenizer cannot be loaded: {error}",
            where=str(folder),
            do="download tokenizer.json and tokenizer_config.json again; a tokenizer that is Python code is not run",
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, all present; or an error that says what is there instead."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TrilloraError("The weight index names no tensors.", where=str(index), do="download this file again")
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
        if missing:
            raise TrilloraError(
                f"{len(missing)} of the model's {len(shards)} weight files are missing: {', '.join(missing[:3])}"
                + (" …" if len(missing) > 3 else ""),
                where=str(index),
                do="download the missing files; an interrupted download or copy leaves such a folder",
            )
        return [folder / shard for shard in shards]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise _no_weights({file.name for file in folder.iterdir()}, str(folder))


def _no_weights(files: set[str], where: str) -> TrilloraError:
    """Why a model without `model.safetensors` or its index is no use, judged by the file names it does have."""
    pickles = sorted(file for file in files if file.endswith(PICKLE_SUFFIXES) and not file.startswith("training_args"))
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    others = sorted(file for file in files if file.endswith(".safetensors"))
    if pickles:
        return TrilloraError(
            f"The weights are pickle files ({pickles[0]}), which can run code when opened, so they are not.",
            where=where,
            do='convert where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('MODEL').save_pretrained('FOLDER')\", then copy the tokenizer files to FOLDER",
        )
    if ggufs:
        return TrilloraError(
            f"The weights are a GGUF file ({ggufs[0]}), made for inference.",
            where=where,
            do="give the repository or folder with the safetensors files it was made from",
        )
    if others:
        return TrilloraError(
            f"There are safetensors files ({others[0]}), but no {SINGLE_FILE} and no {INDEX_FILE}.",
            where=where,
            do="give the transformers version of the model; an adapter or another library's layout cannot be a base",
        )
    return TrilloraError(
        "The model has no weights.",
        where=where,
        do=f"put {SINGLE_FILE}, or {INDEX_FILE} with the files it names, there",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise TrilloraError(
            "There is no config.json, so this is not a transformers model.",
            where=str(folder),
            do="give the folder or hub id of a whole model (an adapter folder is not one)",
        )
    return _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrilloraError(
            f"This is not valid JSON: {error}", where=str(file), do="download the file again"
        ) from error
    if not isinstance(content, dict):
        raise TrilloraError("This JSON file does not hold an object.", where=str(file), do="download the file again")
    return content


def _is_native(described: dict[str, Any]) -> bool:
    """Whether transformers itself has this type's causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = described.get("model_type")
    return isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _needs_own_code(described: dict[str, Any]) -> bool:
    """Many repositories still name code from before transformers knew their type (Phi-3): that code is not needed."""
    return "auto_map" in described and not _is_native(described)


def _check_remote_code(folder: Path, *, trusted: bool, pinned: bool) -> None:
    """Refuse a model that only its own Python code can read, unless it is trusted and cannot change under the user."""
    if not _needs_own_code(_read_config(folder)):
        return
    where = str(folder / "config.json")
    if not trusted:
        raise TrilloraError(
            "The model brings Python code of its own (auto_map), which would run on this machine.",
            where=where,
            do="read that code, then set trust_remote_code: true with a commit as revision; "
            "or use a newer transformers, if it knows this model_type itself",
        )
    if not pinned:
        raise TrilloraError(
            "The model's Python code may change at any time: no commit is fixed.",
            where=where,
            do="set revision to the full 40-digit commit whose code you read",
        )


def _no_such_folder(name: str, folder: Path) -> TrilloraError:
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    meant = nearest(folder.name, [*siblings, EMBEDDED])
    return TrilloraError(
        f"There is no model '{name}'.",
        where=f"{folder} is not a folder, and a hub id has the form org/name",
        do=(f"did you mean '{meant}'? " if meant else "")
        + f"Give '{EMBEDDED}' (embedded), an existing folder, or a hub id",
    )


def _from_hub(name: str, revision: str | None, trust_remote_code: bool, with_weights: bool) -> Path:
    # The description comes first and alone: a model that will be refused costs kilobytes, not gigabytes.
    folder = _snapshot(name, revision, DESCRIPTION_FILES)
    _check_remote_code(folder, trusted=trust_remote_code, pinned=bool(revision and COMMIT.fullmatch(revision)))
    wanted = list(DESCRIPTION_FILES)
    if _needs_own_code(_read_config(folder)):
        wanted.append("*.py")
    if with_weights:
        wanted.append("*.safetensors")
    if len(wanted) > len(DESCRIPTION_FILES):
        folder = _snapshot(name, folder.name, wanted)  # the snapshot folder is named by its commit: both are the same
    if with_weights and not any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        raise _no_weights(_hub_files(name, folder), f"hub model {name}")
    if with_weights:
        weight_files(folder)
    return folder


def _snapshot(name: str, revision: str | None, patterns: list[str] | tuple[str, ...]) -> Path:
    """The hub's files of these kinds, top level only, in the hub's own cache; from that cache alone when offline."""
    from huggingface_hub import errors, snapshot_download

    where = f"hub model {name}" + (f", revision {revision}" if revision else "")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                # Sub-folders hold other formats, and consolidated* is Mistral's second copy of the same weights.
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except errors.GatedRepoError:
        what = f"'{name}' is gated: its owners must grant you access."
        do = "ask for access on the model's page, then log in here with: hf auth login"
    except errors.RevisionNotFoundError:
        what = f"'{name}' has no revision '{revision}'."
        do = "give a branch, tag or full commit that the model's page lists, or leave revision out"
    except errors.RepositoryNotFoundError:
        meant = nearest(name, [*_cached_models(), EMBEDDED])
        what = f"The hub has no model '{name}' that you may see, and there is no such folder here."
        do = (f"did you mean '{meant}'? " if meant else "") + "Check the spelling; if it is private: hf auth login"
    except (errors.LocalEntryNotFoundError, ConnectionError):
        what = f"The hub cannot be reached, and '{name}' is not in the local cache."
        do = f"check the connection (or HF_HUB_OFFLINE), give a local folder, or use the embedded model: {EMBEDDED}"
    except errors.HFValidationError:
        what = f"'{name}' is not a valid hub id."
        do = f"give org/name, an existing folder, or '{EMBEDDED}'"
    except Exception as error:  # the client lets its HTTP library's own errors through; their text may hold headers
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"Downloading '{name}' failed: {type(error).__name__}" + (f", status {status}" if status else "") + "."
        do = "check the connection and the free disk space, and run again: finished files are kept"
    raise TrilloraError(what, where=where, do=do)


def _hub_files(name: str, snapshot: Path) -> set[str]:
    """All file names of that commit on the hub, fetched or not; only the fetched ones when it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(name, revision=snapshot.name))
    except Exception:  # this only explains a refusal better: offline, the refusal stands and says a little less
        return {file.name for file in snapshot.iterdir()}


def _cached_models() -> list[str]:
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
