"""More planted defects: known attacks on exports in float32, bfloat16 and few bits, new defects, harmless rewrites.

    world = write_small_world(folder)
    copy, target = plant(KNOWN_DEFECTS[0], world, other_folder)

`NEW_DEFECTS` are in new_defects.py (adapters, merged models) and new_gguf_defects.py (GGUF files, Ollama's folders),
`HARMLESS` in harmless_rewrites.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harmless_rewrites import HARMLESS
from new_defects import NEW_DEFECTS as NEW_HUGGING_FACE_DEFECTS
from new_gguf_defects import NEW_GGUF_DEFECTS
from planted_defects import World, change_json
from small_world import (
    QUANTIZED,
    Defect,
    Defects,
    add_stored,
    base_weights,
    gguf_file,
    layer_of,
    merge_by_hand,
    plant,
    quantized,
    rewrite_gguf,
    trained_changes,
    write_small_world,
)

__all__ = ["DEFECTS", "HARMLESS", "KNOWN_DEFECTS", "NEW_DEFECTS", "Defect", "plant", "write_small_world"]

KNOWN_DEFECTS = Defects()
ALL = ("merged", *QUANTIZED)
FLOAT32 = ("merged", "gguf")  # of the world of planted_defects, which has two layers


# ---- weights, in every format

# By the name of a weight, and the number of the last layer.
FACTORS: dict[str, Callable[[str, int], float]] = {
    "half the alpha": lambda name, last: 0.5,
    "a quarter of the alpha": lambda name, last: 0.25,
    "the first half of the layers missing": lambda name, last: layer_of(name) > last // 2,
    "only the last layer merged": lambda name, last: layer_of(name) == last,
    "attention only": lambda name, last: "self_attn" in name,
    "one k_proj missing": lambda name, last: name != "model.layers.1.self_attn.k_proj.weight",
    "sign of the change flipped": lambda name, last: -1,
    "sign of one layer flipped": lambda name, last: -1 if layer_of(name) == last - 1 else 1,
    "layers doubled and others missing": lambda name, last: 2 * (layer_of(name) % 2),
    "the base without the adapter": lambda name, last: 0,
    "merged twice": lambda name, last: 2,
}


def _merged_with(factor: Callable[[str, int], float], target: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        last = max(map(layer_of, trained_changes(world)))
        merge_by_hand(world, getattr(world, target), lambda name: factor(name, last))

    return plant


KNOWN_DEFECTS += [
    Defect(
        name=f"{target}: {label}",
        plant=_merged_with(factor, target),
        target=target,
        harm="The model answers like another one than the trained one.",
        world=world,
    )
    for label, factor in FACTORS.items()
    for world, targets in (("bfloat16", ALL), ("float32", FLOAT32))
    for target in targets
    if (world, label) != ("float32", "only the last layer merged")  # with two layers: half of the layers missing
]


def _add_head(world: Any, folder: Path, noise: Callable[[np.ndarray], np.ndarray]) -> None:
    embedding = base_weights(world)["model.embed_tokens.weight"]
    head = noise(embedding).astype(np.float32)
    if not any(folder.glob("*.gguf")):
        change_json(folder / "config.json", lambda values: values.update(tie_word_embeddings=False))
        dtype = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
        add_stored(folder, {"lm_head.weight": torch.from_numpy(head).to(dtype)})
        return

    def add(tensors: dict[str, Any]) -> None:
        type = tensors["token_embd.weight"][1]
        tensors["output.weight"] = quantized(head, type), type

    rewrite_gguf(folder, tensors=add)


@KNOWN_DEFECTS.add(*FLOAT32, world="float32")
@KNOWN_DEFECTS.add(*ALL)
def untied_random_head(world: Any, folder: Path) -> None:
    """Answers are noise."""
    generator = np.random.default_rng(0)
    _add_head(world, folder, lambda embedding: generator.normal(size=embedding.shape) * embedding.std())


@KNOWN_DEFECTS.add(*FLOAT32, world="float32")
@KNOWN_DEFECTS.add(*ALL)
def untied_head_with_noise(world: Any, folder: Path) -> None:
    """Each logit is wrong by 5 %."""
    generator = np.random.default_rng(0)
    _add_head(world, folder, lambda e: e + 0.05 * e.std() * generator.normal(size=e.shape))


# ---- files of a merged model


def _json(file: str, label: str, options: Mapping[str, Any], harm: str, *, target: str = "merged") -> None:
    """Adds a defect that sets options in a file, in both worlds."""

    def change(world: Any) -> None:
        change_json(getattr(world, target) / file, lambda values: values.update(options))

    for world in ("bfloat16", "float32"):
        KNOWN_DEFECTS.append(Defect(f"{target}: {file} with {label}", change, target, harm, world))


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **values}}


POSITIONS = "Positions are rotated by other angles than in training."
CONFIG = "config.json"
_json(CONFIG, "rope_theta 500,000", _rope(rope_theta=500_000.0), POSITIONS)
_json(CONFIG, "rope_theta 20,000", _rope(rope_theta=20_000.0), POSITIONS)
_json(CONFIG, "linear rope scaling", _rope(rope_type="linear", factor=2.0), POSITIONS)
_json(CONFIG, "hidden_act gelu", {"hidden_act": "gelu"}, "Every feed-forward layer computes something else.")
_json(CONFIG, "rms_norm_eps 1e-3", {"rms_norm_eps": 1e-3}, "Every norm divides by a larger number.")
_json(CONFIG, "max_position_embeddings 32", {"max_position_embeddings": 32}, "vLLM refuses longer conversations.")
_json(CONFIG, "dtype float16", {"dtype": "float16"}, "Programs load it as float16, with another range of numbers.")
_json(CONFIG, "other architectures", {"architectures": ["MistralForCausalLM"]}, "vLLM runs the code of another model.")
_json(
    CONFIG,
    "a stray quantization_config",
    {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "Programs quantize the weights, or look for scales that are not there.",
)

GENERATION = "generation_config.json"
_json(GENERATION, "60 more stop ids", {"eos_token_id": [451, *range(60)]}, "Answers end at letters.")
_json(GENERATION, "30 suppressed tokens", {"suppress_tokens": [*range(60, 90)]}, "Letters never occur in answers.")
_json(GENERATION, "max_new_tokens 1", {"max_new_tokens": 1}, "Answers are one token.")
_json(GENERATION, "repetition_penalty 5", {"repetition_penalty": 5.0}, "Greedy answers differ.")
_json(GENERATION, "temperature 50", {"temperature": 50.0}, "vLLM takes it as its default: answers are noise.")

TOKENIZER_CONFIG = "tokenizer_config.json"
_json(TOKENIZER_CONFIG, "clean-up", {"clean_up_tokenization_spaces": True}, "Spaces before punctuation disappear.")
_json(TOKENIZER_CONFIG, "model_max_length 8", {"model_max_length": 8}, "Truncated prompts have eight tokens.")

_json("tokenizer.json", "the decoder Fuse", {"decoder": {"type": "Fuse"}}, "Answers have Ġ instead of spaces.")
_json("tokenizer.json", "NFKC", {"normalizer": {"type": "NFKC"}}, "Ligatures and wide letters give other tokens.")

ADAPTER = "adapter_config.json"
_json(ADAPTER, "a revision", {"revision": "v1"}, "PEFT loads another version of the base.", target="adapter")
_json(ADAPTER, "lora_dropout 0.9", {"lora_dropout": 0.9}, "More training loses most of the change.", target="adapter")
_json(ADAPTER, "SEQ_CLS", {"task_type": "SEQ_CLS"}, "PEFT loads a classifier with a random head.", target="adapter")


@KNOWN_DEFECTS.add("merged", world="float32")
@KNOWN_DEFECTS.add("merged")
def a_layer_less(world: Any, folder: Path) -> None:
    """transformers leaves out the last layer."""

    def change(values: dict[str, Any]) -> None:
        values["num_hidden_layers"] -= 1

    change_json(folder / "config.json", change)


@KNOWN_DEFECTS.add("merged", world="float32")
@KNOWN_DEFECTS.add("merged")
def two_ids_swapped(world: Any, folder: Path) -> None:
    """Two words of the vocabulary are read and written as each other."""

    def swap(values: dict[str, Any]) -> None:
        vocabulary = values["model"]["vocab"]
        vocabulary["x"], vocabulary["q"] = vocabulary["q"], vocabulary["x"]

    change_json(folder / "tokenizer.json", swap)


@KNOWN_DEFECTS.add("merged", world="float32")
@KNOWN_DEFECTS.add("merged")
def last_merge_removed(world: Any, folder: Path) -> None:
    """A word becomes two tokens."""
    change_json(folder / "tokenizer.json", lambda values: values["model"]["merges"].pop())


@KNOWN_DEFECTS.add("merged", world="float32")
@KNOWN_DEFECTS.add("merged")
def auto_map_with_code(world: Any, folder: Path) -> None:
    """With trust_remote_code, code of the folder runs."""
    change_json(
        folder / "config.json",
        lambda values: values.update(auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}),
    )
    (folder / "modeling_evil.py").write_text("from transformers import LlamaForCausalLM as EvilForCausalLM\n")


@KNOWN_DEFECTS.add("merged", world="float32")
@KNOWN_DEFECTS.add("merged")
def template_for_tools(world: Any, folder: Path) -> None:
    """transformers uses it instead of the trained template when tools are given."""
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages[0]['content'] }}")


def _add_file(name: str, data: bytes, harm: str) -> None:
    def add(world: Any) -> None:
        file = world.merged / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)

    for world in ("bfloat16", "float32"):
        KNOWN_DEFECTS.append(Defect(f"merged: with {name}", add, "merged", harm, world))


_add_file("sub/pytorch_model.bin", b"\x80\x04N.", "A pickle, which runs code when it is loaded, comes along.")
_add_file("sub/evil.py", b"print('here')\n", "Code comes along with the weights.")
_add_file(".evil.bin", b"\x80\x04N.", "A hidden pickle comes along.")


# ---- metadata of GGUF files


@KNOWN_DEFECTS.add("gguf", world="float32")
@KNOWN_DEFECTS.add(*QUANTIZED)
def rope_base_20_000(world: Any, folder: Path) -> None:
    """Positions are rotated by other angles than in training."""
    rewrite_gguf(folder, {"llama.rope.freq_base": 20_000.0})


@KNOWN_DEFECTS.add("gguf", world="float32")
@KNOWN_DEFECTS.add(*QUANTIZED)
def rope_base_500_000(world: Any, folder: Path) -> None:
    """Positions are rotated by other angles than in training."""
    rewrite_gguf(folder, {"llama.rope.freq_base": 500_000.0})


@KNOWN_DEFECTS.add("gguf", world="float32")
@KNOWN_DEFECTS.add(*QUANTIZED)
def rms_epsilon(world: Any, folder: Path) -> None:
    """Every norm divides by a larger number."""
    rewrite_gguf(folder, {"llama.attention.layer_norm_rms_epsilon": 1e-3})


@KNOWN_DEFECTS.add("gguf", world="float32")
@KNOWN_DEFECTS.add("gguf_q8_0")
def one_merge_reversed(world: Any, folder: Path) -> None:
    """A pair of letters is not merged, and another one is."""
    file = gguf_file(folder)
    data = file.read_bytes()
    assert data.count(b"\x03\0\0\0\0\0\0\0h e") == 1
    file.write_bytes(data.replace(b"\x03\0\0\0\0\0\0\0h e", b"\x03\0\0\0\0\0\0\0e h"))


@KNOWN_DEFECTS.add("gguf", world="float32")
@KNOWN_DEFECTS.add("gguf_q8_0")
def bos_not_added(world: Any, folder: Path) -> None:
    """llama.cpp's prompts have no BOS."""
    rewrite_gguf(folder, {"tokenizer.ggml.add_bos_token": False})


NEW_DEFECTS = (*NEW_HUGGING_FACE_DEFECTS, *NEW_GGUF_DEFECTS)
DEFECTS = (*KNOWN_DEFECTS, *NEW_DEFECTS)
