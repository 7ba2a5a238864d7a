"""A model folder with random weights, written directly, for benchmarks that need a size and no knowledge.

write_model(Path("/tmp/model"), "mistral-7b")      # 14.5 GB, in the time that the disk takes
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": {  # mistralai/Mistral-7B-v0.3: 7.2 billion weights
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "sliding_window": None,
    },
    "llama-1b": {  # meta-llama/Llama-3.2-1B: 1.2 billion
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "mixture-3b": {  # Qwen3-MoE's kind: 3.4 billion weights, of which a token uses 1.2 billion
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny-mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
    "tiny": {
        "model_type": "mistral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "sliding_window": None,
    },
}
POOL = 2**25  # random numbers; every weight is a part of them, repeated
DEVIATION = 0.02


def write_model(folder: Path, shape: str, max_positions: int = 4096) -> int:
    """Writes config, tokenizer and bfloat16 weights, and returns the size of the weights in bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=max_positions)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(module).__name__], "bfloat16"
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    names = dict(module.named_parameters())  # tied weights once
    return _write_safetensors(folder / "model.safetensors", {name: tuple(p.shape) for name, p in names.items()})


def _write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """The format: the header's length in 8 bytes, a JSON header, the tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0).standard_normal(POOL, np.float32) * np.float32(DEVIATION)
    pool = memoryview((random.view(np.uint32) >> 16).astype(np.uint16)).cast("B")  # bfloat16: the high half of float32
    ones = np.full(2**20, 0x3F80, np.uint16)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            left, at = 2 * math.prod(shape), number * 4096 % len(pool)
            if len(shape) == 1:  # norms
                out.write(ones[: shape[0]].tobytes())
                continue
            while left:
                part = pool[at : at + left]
                out.write(part)
                left, at = left - len(part), 0
    return end
