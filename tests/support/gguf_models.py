"""Tiny random models of the families that can be written as GGUF, with a tokenizer and an adapter made by PEFT."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_tokenizers import FAMILIES as CHATS
from chat_tokenizers import chat_tokenizer
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from trillora.export.source import ExportSource
from trillora.model.adapters import load_adapter
from trillora.model.loading.source import OpenModel, load_config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PERIOD = {"sliding_window": 8, "num_hidden_layers": 6}  # one layer of full attention after each five, or each one


def rotary(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3 = rotary("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LONG = rotary(
    "longrope",
    long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    original_max_position_embeddings=64,
    partial_rotary_factor=0.75,
)
YARN = rotary("yarn", factor=4.0, original_max_position_embeddings=64)
# name -> model type, tokenizer, options of the config
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "chatml", {"tie_word_embeddings": True}),
    "llama-wide": ("llama", "chatml", {"hidden_size": 256, "intermediate_size": 512}),
    "llama-biases": ("llama", "chatml", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", "llama3", LLAMA3),
    "llama-linear": ("llama", "chatml", rotary("linear", factor=4.0)),
    "llama-yarn": ("llama", "chatml", YARN),
    "mistral": ("mistral", "mistral", {"head_dim": 32, "sliding_window": None}),
    "mixtral": ("mixtral", "mistral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen3", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", "qwen3", YARN),
    "qwen2_moe": ("qwen2_moe", "qwen3", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", "qwen3", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gemma": ("gemma", "gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", "gemma", {**PERIOD, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", "gemma", {**PERIOD, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", "phi", {}),
    "phi3-long": ("phi3", "phi", LONG),
}


@functools.cache
def sentencepiece(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer as converted from sentencepiece: with a token for each byte. Its chat template is of the family."""
    family = CHATS[name]
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "gemma":
        inner.normalizer = normalizers.Replace(" ", "▁")
    elif name == "mistral":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if name != "gemma":
        ends.append(decoders.Strip(content=" ", left=1, right=0))
    inner.decoder = decoders.Sequence(ends)
    specials = [word for word in ("<s>", "</s>") if name != "gemma"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["▁"],
        special_tokens=["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    described = Tokenizer.from_str(_without_bytes(inner.to_str()))
    keeps = ("<unk>", "<s>", "<|endoftext|>")  # the others of Phi-3 remove the white space after them
    described.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False, rstrip=family.stop_strips and word not in keeps)
            for word in dict.fromkeys([*specials, *family.specials])
        ]
    )
    if family.bos is not None:
        described.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, described.token_to_id(family.bos))]
        )
    eos = next(word for word in ("<eos>", "<|endoftext|>", "</s>") if word in family.specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=described,
        bos_token=family.bos,
        eos_token=eos,
        unk_token="<unk>",
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _without_bytes(described: str) -> str:
    """The trainer adds all its first tokens as special tokens, but bytes are ordinary ones."""
    content = json.loads(described)
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    return json.dumps(content)


TEXT = (
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.\n\n"
    "system user assistant model: answer the question, and end the turn. def add(a, b):\n    return a + b\n"
    "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX"
)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return sentencepiece(name) if name in ("gemma", "mistral", "phi", "zephyr") else chat_tokenizer(name)


def config_of(name: str) -> Any:
    model_type, tokenizer, options = MODELS[name]
    num_tokens = len(tokenizer_of(tokenizer)) + 3  # rows without a token, as many models have
    return AutoConfig.for_model(model_type, **{**SIZES, "vocab_size": num_tokens, **options})


def build(name: str) -> Any:
    """A random model in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if each.endswith(("norm.weight", ".bias")):  # they start as zeros or ones, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def adapted(model: Any, **options: Any) -> Any:
    """The model with a random adapter, in PEFT."""
    names = {each.rsplit(".", 1)[-1] for each, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    targets = sorted(names & {"q_proj", "k_proj", "qkv_proj", "down_proj", "o_proj"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, **options}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif parameter.requires_grad and "lora_A" not in name:  # magnitudes, rows of tokens, whole modules
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return result.eval()


def source_of(name: str, folder: Path, **options: Any) -> tuple[ExportSource, Any]:
    """Base and adapter in folders, and PEFT's model."""
    build(name).save_pretrained(folder / "base")
    result = adapted(build(name), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result.save_pretrained(folder / "adapter")
    tokenizer = tokenizer_of(MODELS[name][1])
    spec, matrices = load_adapter(folder / "adapter")
    base = OpenModel(folder / "base", load_config(folder / "base"), tokenizer, f"some/{name}")
    return ExportSource(name, None, folder / "adapter", base, f"some/{name}", spec, matrices, None, ()), result


def log_probs(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """Of the token after each prompt, in transformers."""
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([prompt])).logits[0, -1].double() for prompt in prompts]
        return np.stack([torch.log_softmax(row, -1).numpy() for row in rows])


def prompts_for(name: str) -> list[list[int]]:
    """Two prompts, one of them longer than the sliding windows."""
    rng = np.random.default_rng(0)
    num_tokens = len(tokenizer_of(MODELS[name][1]))
    return [rng.integers(0, num_tokens, size).tolist() for size in (5, 30)]
