"""Independent readers: PEFT, transformers and llama.cpp load what was written, with their own code.

    read_with_peft(base_folder, adapter_folder, prompts)   # one array of log-probabilities [V] per prompt

A reader may refuse the files or warn about them; both are reported.

Legend: V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.certify.subject import NotHere
from trillora.child_process import bare_environment, isolated_python
from trillora.errors import TrilloraError, in_words
from trillora.locks.extras import install_command
from trillora.model.adapter_parameters import is_of_lora, name_in_memory
from trillora.model.adapters import load_adapter
from trillora.model.loading.source import load_config
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.wrapper import auto_class

if TYPE_CHECKING:
    from trillora.model.loading.types import PreTrainedModel
    from trillora.recipe.lora import RopeSection

LLAMA_CPP_SECONDS = 600
_DEQUANTIZED = ("mxfp4", "fp8", "mxfp8")  # by transformers itself, with an option


@dataclass(frozen=True)
class Reading:
    logprobs: list[np.ndarray]  # [V] per prompt
    warnings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # arrays of the file that the reader left out or changed
    num_arrays: int = 0  # of the file, if the reader was asked which of them it has


@dataclass
class _Heard:
    texts: list[str] = field(default_factory=list)


class _Ear(logging.Handler):
    def __init__(self, heard: _Heard) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.texts.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """The warnings of PEFT and transformers, which log some and raise others as Python warnings."""
    heard = _Heard()
    ear, loggers = _Ear(heard), [logging.getLogger(name) for name in ("peft", "transformers")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.addHandler(ear)
        each.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield heard.texts
        ignored = (DeprecationWarning, FutureWarning, ResourceWarning)
        heard.texts.extend(str(each.message) for each in caught if not issubclass(each.category, ignored))
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.removeHandler(ear)
            each.setLevel(level)


def read_with_peft(
    base: Path, adapter: Path, prompts: Sequence[Sequence[int]], rope: RopeSection | None = None
) -> Reading:
    """Base and adapter as PEFT's users load them. They have to scale the positions themselves, as the card says."""
    if importlib.util.find_spec("peft") is None:
        raise NotHere("Reading adapters with PEFT needs the package peft.", do=install_command("certify"))
    from peft import PeftModel

    with _reader("PEFT"), listening() as heard:
        model = _load(base, rope)
        if (rows := _num_tokens(adapter)) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)  # as AutoPeftModelForCausalLM does
        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=False).eval()
        found = _logprobs(model, prompts)
    arrays = load_adapter(adapter)[1]
    return Reading(found, tuple(heard), _lost(model, arrays), len(arrays))


def _lost(model: PreTrainedModel, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The arrays that PEFT's model does not have. PEFT ignores names that it does not know, and warns at most of layers
    that got no values. Rows of tokens may be in another order, and whole weights shared, so only their names count."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    held = {name_in_memory(name): tensor for name, tensor in state.items()}

    def is_held(name: str) -> bool:
        return name in held and (not is_of_lora(name) or np.array_equal(held[name].float().numpy(), arrays[name]))

    return tuple(name for name in sorted(arrays) if not is_held(name))


def read_with_transformers(folder: Path, prompts: Sequence[Sequence[int]]) -> Reading:
    with _reader("transformers"), listening() as heard:
        found = _logprobs(_load(folder), prompts)
    return Reading(found, tuple(heard))


def _load(folder: Path, rope: RopeSection | None = None) -> PreTrainedModel:
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    method, config = read_method(folder), load_config(folder, rope=rope)
    if rope is not None:
        options["config"] = config
    if method is not None and method.name in _DEQUANTIZED:
        config.quantization_config["dequantize"] = True
        options["config"] = config
    try:
        found = getattr(transformers, auto_class(config)).from_pretrained(str(folder), use_safetensors=True, **options)
    except ImportError as error:
        if method is None:
            raise
        # bitsandbytes, compressed-tensors, gptqmodel: packages for GPUs
        what = f"transformers needs another package for a base in {method.label}: {in_words(error)}"
        raise NotHere(what, do="install it, and certify again") from error
    return found.eval()


def _num_tokens(adapter: Path) -> int:
    """The size of the tokenizer next to an adapter; 0 if there is none."""
    if not (adapter / "tokenizer_config.json").is_file():
        return 0
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(str(adapter), local_files_only=True, trust_remote_code=False))


def _logprobs(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    import torch

    found = []
    with torch.inference_mode():
        for prompt in prompts:
            logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, -1]
            found.append(torch.log_softmax(logits.float(), dim=-1).numpy())
    return found


@contextmanager
def _reader(name: str) -> Iterator[None]:
    """An exception of the reader is what it says about the files. Its progress bars are hidden."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    except TrilloraError:
        raise
    except Exception as error:
        what = f"{name} cannot load it: {in_words(error)}"
        raise TrilloraError(what, do="export it again; if this happens again, use another kind of export") from error
    finally:
        if shown:
            bars.enable_progress_bar()


_SMALL = 32 << 20  # bytes of a model for one thread: more would mostly wait for each other, at full load


def read_with_llama_cpp(
    file: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    lora: Path | None = None,
    chats: Sequence[Sequence[dict[str, str]]] = (),
) -> tuple[Reading, list[list[int]]]:
    """Log-probabilities, and the tokens of each chat by llama.cpp's own template code. In a process of its own: it is
    C++ code that reads a file which may be damaged."""
    if importlib.util.find_spec("xllamacpp") is None:
        what = "Reading GGUF files with llama.cpp needs the package xllamacpp."
        raise NotHere(what, do=install_command("certify"))
    program = "from trillora.certify.llama_cpp import main; main()"
    child = isolated_python(program, environment=bare_environment())
    request = {
        "model": str(file.absolute()),
        "lora": None if lora is None else str(lora.absolute()),
        "prompts": [list(map(int, prompt)) for prompt in prompts],
        "num_tokens": num_tokens,
        "chats": list(chats),
        "threads": 1 if file.stat().st_size < _SMALL else os.cpu_count() or 1,
    }
    do = "export it again; if this happens again, use another --type"
    try:
        done = subprocess.run(
            child.command,
            env=child.environment,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=LLAMA_CPP_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        done, answer = None, None
    if answer is None:
        last = b"" if done is None else b" ".join(done.stderr.strip().splitlines()[-2:])
        raise TrilloraError(
            f"llama.cpp cannot load it: {last.decode(errors='replace')[-400:] or 'it did not answer'}.",
            where=str(file),
            do=do,
        )
    logprobs = []
    for pairs in answer["logprobs"]:
        array = np.full(num_tokens, -np.inf)
        for token, value in pairs:
            if 0 <= token < num_tokens:
                array[token] = value
        logprobs.append(array)
    return Reading(logprobs), [list(map(int, ids)) for ids in answer["chats"]]
