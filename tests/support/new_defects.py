"""New defects of adapters and merged models: what tools, people, disks and uploads do, and single wrong entries.

The docstring of each, or the text in a table, says what goes wrong.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from planted_defects import BASE_Q0, CONFIG, INDEX, Q0, WEIGHTS, change_json
from safetensors.torch import load_file, save_file
from small_world import (
    LAYERS,
    Defect,
    Defects,
    add_stored,
    base_folder,
    base_weights,
    change_stored,
    change_weight,
    layer_of,
    next_bfloat16,
    quantized,
    read_weights,
    shards,
    trained_changes,
    write_weights,
)

NEW_DEFECTS = Defects()
Q2, K1 = "model.layers.2.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
EMBEDDING, EOT = "model.embed_tokens.weight", 451
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
Change = Callable[[dict[str, Any]], Any]


def _in_json(target: str, file: str, label: str, change: Change, harm: str, **options: Any) -> None:
    """Adds a defect that changes a JSON file."""

    def plant(world: Any) -> None:
        change_json(getattr(world, target) / file, change)

    NEW_DEFECTS.append(Defect(f"{target}: {file} with {label}", plant, target, harm, **options))


def _sets(target: str, file: str, label: str, harm: str, values: dict[str, Any], **options: Any) -> None:
    _in_json(target, file, label, lambda content: content.update(values), harm, **options)


def lfs_pointer(file: Path) -> None:
    """The text that a clone without Git LFS has in place of a large file."""
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n")


def punch_hole(file: Path) -> None:
    """Zeros instead of a block of 4 KiB, as after a crash of a file system."""
    with file.open("r+b") as opened:
        opened.seek(-3 * 4096, 2)
        opened.write(bytes(4096))


# ---- options of an adapter

ADAPTER_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("layers_to_transform", {"layers_to_transform": [0]}, "PEFT adapts only the first layer."),
    ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}, "PEFT runs the second layer twice."),
    ("bias all", {"bias": "all"}, "vLLM refuses it; PEFT makes biases trainable and saves them with the adapter."),
    ("fan_in_fan_out", {"fan_in_fan_out": True}, "Tools that believe it add the transposed change."),
    ("use_dora", {"use_dora": True}, "PEFT rescales each row of the weights to its length before training."),
    ("exclude_modules", {"exclude_modules": ["down_proj"]}, "PEFT leaves these layers without their change."),
    ("target_parameters", {"target_parameters": ["down_proj.weight"]}, "PEFT cannot wrap a layer twice."),
    ("a shorter target_modules", {"target_modules": ["q_proj", "v_proj"]}, "PEFT adapts only these layers."),
    ("target_modules of one layer", {"target_modules": r".*\.0\..*_proj"}, "PEFT adapts only the first layer."),
    ("a head that was not saved", {"modules_to_save": ["lm_head"]}, "PEFT unties the head and has no weights for it."),
    ("trainable tokens", {"trainable_token_indices": [EOT]}, "PEFT looks for rows of tokens that are not there."),
    ("alora", {"alora_invocation_tokens": [7, 8]}, "PEFT switches the adapter on only after these tokens."),
    ("init pissa", {"init_lora_weights": "pissa"}, "PEFT subtracts singular vectors from the base while loading."),
    ("another method", {"peft_type": "LOHA"}, "PEFT builds other layers and finds none of the weights."),
)
for _label, _options, _harm in ADAPTER_OPTIONS:
    _sets("adapter", CONFIG, _label, _harm, _options, world="float32")


# ---- weights of an adapter


def _change_adapter(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    change_stored(folder / WEIGHTS, change)


def _rename(folder: Path, rename: Callable[[str], str]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


@NEW_DEFECTS.add("adapter")
def one_entry_of_B_off_by_a_step_of_bfloat16(world: Any, folder: Path) -> None:
    """One number of one layer is wrong by less than a percent."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        next_bfloat16(tensors[f"{Q0}.lora_B.weight"].numpy(), 3, 1)

    _change_adapter(folder, change)


@NEW_DEFECTS.add("adapter")
def B_one_percent_smaller(world: Any, folder: Path) -> None:
    """The change is a percent too small, as with an average of checkpoints."""
    _change_adapter(folder, lambda t: t.update({n: 0.99 * x for n, x in t.items() if "lora_B" in n}))


@NEW_DEFECTS.add("adapter")
def rounded_to_bfloat16(world: Any, folder: Path) -> None:
    """Every number of the adapter is rounded to 8 bits."""
    _change_adapter(folder, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))


@NEW_DEFECTS.add("adapter", world="float32")
def one_rank_lost(world: Any, folder: Path) -> None:
    """The last column of every B is zero: a part of the change is missing in all layers."""
    _change_adapter(folder, lambda t: [x[:, -1].zero_() for n, x in t.items() if "lora_B" in n])


@NEW_DEFECTS.add("adapter", world="float32")
def names_of_a_compiled_model(world: Any, folder: Path) -> None:
    """Saved from torch.compile(): PEFT knows none of the names, and the adapter does nothing."""
    _rename(folder, lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."))


@NEW_DEFECTS.add("adapter", world="float32")
def names_without_prefix(world: Any, folder: Path) -> None:
    """PEFT knows none of the names, and the adapter does nothing."""
    _rename(folder, lambda name: name.removeprefix("base_model.model."))


@NEW_DEFECTS.add("adapter", world="float32")
def one_more_layer(world: Any, folder: Path) -> None:
    """The adapter also changes the head, which was not trained."""
    head = "base_model.model.lm_head.lora_{}.weight"
    generator = torch.Generator().manual_seed(0)
    num_tokens = json.loads((base_folder(world) / "config.json").read_text())["vocab_size"]
    extra = {
        head.format("A"): 0.01 * torch.randn(4, 64, generator=generator),
        head.format("B"): 0.01 * torch.randn(num_tokens, 4, generator=generator),
    }
    _change_adapter(folder, lambda tensors: tensors.update(extra))
    change_json(folder / CONFIG, lambda values: values["target_modules"].append("lm_head"))


@NEW_DEFECTS.add("adapter", world="float32")
def A_of_another_seed(world: Any, folder: Path) -> None:
    """One A has its random start of another run: B multiplies other directions."""
    generator = torch.Generator().manual_seed(0)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        a = tensors[f"{Q0}.lora_A.weight"]
        a.copy_(torch.randn(a.shape, generator=generator) * a.std())

    _change_adapter(folder, change)


@NEW_DEFECTS.add("adapter", world="float32")
def git_lfs_pointer(world: Any, folder: Path) -> None:
    """The upload has a line of text in place of the weights."""
    lfs_pointer(folder / WEIGHTS)


# ---- config.json and others of a merged model

CONFIG_FILE, GENERATION = "config.json", "generation_config.json"
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MERGED_OPTIONS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (
        CONFIG_FILE,
        "twice the heads",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
        "All shapes fit, and attention computes something else.",
    ),
    (
        CONFIG_FILE,
        "a sliding window",
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
        "Tokens see only the eight before them.",
    ),
    (CONFIG_FILE, "rope_scaling", {"rope_scaling": _LLAMA3}, "The older name: it replaces rope_parameters."),
    (CONFIG_FILE, "rope_theta", {"rope_theta": 5e5}, "transformers 4 and others read this older name."),
    (CONFIG_FILE, "partial rotation", {"partial_rotary_factor": 0.5}, "Some programs rotate half of each head."),
    (CONFIG_FILE, "a head that is not stored", {"tie_word_embeddings": False}, "transformers starts a random head."),
    (CONFIG_FILE, "another eos_token_id", {"eos_token_id": 450}, "Programs that read only config.json do not stop."),
    (CONFIG_FILE, "a pad_token_id", {"pad_token_id": EOT}, "Programs treat the end of each turn as padding."),
    (CONFIG_FILE, "the older torch_dtype", {"torch_dtype": "float16"}, "transformers 4 loads it as float16."),
    (GENERATION, "min_new_tokens", {"min_new_tokens": 64}, "Answers do not stop before 64 tokens."),
    (GENERATION, "no_repeat_ngram_size", {"no_repeat_ngram_size": 2}, "No pair of tokens occurs twice."),
    (GENERATION, "another bos_token_id", {"bos_token_id": 10}, "Text without a prompt starts with another token."),
    (TOKENIZER_CONFIG, "split_special_tokens", {"split_special_tokens": True}, "Headers of turns are read as letters."),
    (TOKENIZER_CONFIG, "no attention mask", {"model_input_names": ["input_ids"]}, "Batches attend to padding."),
    (
        TOKENIZER_CONFIG,
        "a template",
        {"chat_template": "{{ messages }}"},
        "Programs that know no chat_template.jinja use it.",
    ),
    (
        TOKENIZER_CONFIG,
        "a special word",
        {"extra_special_tokens": ["is"]},
        "The word is split off inside others, and is missing in decoded answers.",
    ),
)
for _file, _label, _options, _harm in MERGED_OPTIONS:
    _sets("merged", _file, _label, _harm, _options)


def _post_processor(values: dict[str, Any]) -> None:
    values["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def _flags(content: str, **flags: bool) -> Change:
    def change(values: dict[str, Any]) -> None:
        [token] = [each for each in values["added_tokens"] if each["content"] == content]
        token.update(flags)

    return change


_TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
_PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": EOT,
    "pad_type_id": 0,
    "pad_token": "<|eot_id|>",
}
TOKENIZER_CHANGES: tuple[tuple[str, Change, str], ...] = (
    ("no BOS", _post_processor, "The tokenizer no longer puts BOS before text."),
    ("truncation", lambda v: v.update(truncation=_TRUNCATION), "The tokenizers library cuts texts to 16 tokens."),
    ("padding", lambda v: v.update(padding=_PADDING), "The tokenizers library fills texts to 64 tokens."),
    ("dropout", lambda v: v["model"].update(dropout=0.3), "The same text gives other tokens each time."),
    (
        "a space before text",
        lambda v: v["pre_tokenizer"].update(add_prefix_space=True),
        "Each text starts with a space.",
    ),
    ("a stop that strips", _flags("<|eot_id|>", rstrip=True), "It swallows the white space after it."),
    ("a start that strips", _flags("<|start_header_id|>", lstrip=True), "It swallows the white space before it."),
    ("a hidden mark", _flags("<think>", special=True), "skip_special_tokens removes it from answers."),
    ("a visible stop", _flags("<|eot_id|>", special=False), "The tokenizers library leaves it in answers."),
    ("a whole word", _flags("<tool_call>", single_word=True), "Inside text it is read as letters."),
)
for _label, _change, _harm in TOKENIZER_CHANGES:
    _in_json("merged", TOKENIZER, _label, _change, _harm)
_in_json("adapter", TOKENIZER, "a stop that strips", _flags("<|eot_id|>", rstrip=True), "It swallows white space.")
_sets("adapter", TOKENIZER, "truncation", "Texts are cut to 16 tokens.", {"truncation": _TRUNCATION}, world="float32")


@NEW_DEFECTS.add("merged", "adapter")
def template_that_drops_early_turns(world: Any, folder: Path) -> None:
    """Conversations of more than six messages lose their start; shorter ones are as in training."""
    file = folder / "chat_template.jinja"
    file.write_text("{%- if messages | length > 6 %}{%- set messages = messages[2:] %}{%- endif %}" + file.read_text())


@NEW_DEFECTS.add("merged")
def special_tokens_map_of_another_model(world: Any, folder: Path) -> None:
    """transformers reads this older file too, and takes its EOS."""
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end_header_id|>"}))


# ---- tensors of a merged model


@NEW_DEFECTS.add("merged", "gguf_bf16")
def one_entry_off_by_a_step_of_bfloat16(world: Any, folder: Path) -> None:
    """One number of an adapted layer is wrong by less than a percent."""
    change_weight(folder, Q2, lambda array: next_bfloat16(array, 5, 7))


@NEW_DEFECTS.add("merged", "gguf_bf16")
def one_entry_of_the_embedding_off(world: Any, folder: Path) -> None:
    """One number of a tensor that no adapter changes is wrong by less than a percent."""
    change_weight(folder, EMBEDDING, lambda array: next_bfloat16(array, 300, 11))


@NEW_DEFECTS.add("merged", world="float32")
def one_small_error_in_float32(world: Any, folder: Path) -> None:
    """One number of a float32 file is wrong by less than a percent."""
    change_weight(folder, BASE_Q0, lambda array: next_bfloat16(array, 5, 7))


@NEW_DEFECTS.add("merged", "gguf_q8_0", "gguf_q4_0", "gguf_bf16")
def rows_of_rare_tokens_swapped(world: Any, folder: Path) -> None:
    """<tool_call> is read and written as </tool_call>."""
    change_weight(folder, EMBEDDING, lambda array: array[[*range(454), 455, 454]])


@NEW_DEFECTS.add("merged", "gguf_q8_0")
def norm_of_another_layer(world: Any, folder: Path) -> None:
    """Layer 1 scales its inputs as layer 2 does."""
    norm = "model.layers.{}.input_layernorm.weight"
    write_weights(folder, {norm.format(1): read_weights(folder)[norm.format(2)]})


@NEW_DEFECTS.add("merged", "gguf_q4_0")
def query_heads_swapped(world: Any, folder: Path) -> None:
    """The first two heads of layer 2 ask each other's questions."""
    change_weight(folder, Q2, lambda array: array[[*range(16, 32), *range(16), *range(32, 64)]])


@NEW_DEFECTS.add("merged", "gguf_q4_1")
def key_heads_swapped(world: Any, folder: Path) -> None:
    """Queries meet the keys of the other group."""
    change_weight(folder, K1, lambda array: np.roll(array, 16, axis=0))


@NEW_DEFECTS.add("merged", "gguf_q8_0")
def keys_and_values_swapped(world: Any, folder: Path) -> None:
    """One layer uses its keys as values: shapes are equal."""
    weights, value = read_weights(folder), K1.replace("k_proj", "v_proj")
    write_weights(folder, {K1: weights[value], value: weights[K1]})


@NEW_DEFECTS.add("merged", "gguf_q4_0")
def change_of_the_layer_before(world: Any, folder: Path) -> None:
    """Counted from one: each layer got the change of its neighbor."""
    base, changes = base_weights(world), trained_changes(world)

    def neighbour(name: str) -> str:
        layer = layer_of(name)
        return name.replace(f"layers.{layer}.", f"layers.{(layer - 1) % LAYERS}.")

    write_weights(folder, {name: base[name] + changes[neighbour(name)] for name in changes})


@NEW_DEFECTS.add("merged", "gguf_q8_0")
def change_transposed_in_square_layers(world: Any, folder: Path) -> None:
    """Queries and outputs of attention change in other directions than trained."""
    base, changes = base_weights(world), trained_changes(world)
    square = {name: change for name, change in changes.items() if change.shape[0] == change.shape[1]}
    write_weights(folder, {name: base[name] + change.T for name, change in square.items()})


@NEW_DEFECTS.add("merged", "gguf_bf16")
def merged_into_a_base_of_four_bits(world: Any, folder: Path) -> None:
    """QLoRA merged into the dequantized base: its noise is larger than the change."""
    base, type = base_weights(world), gguf.GGMLQuantizationType.Q4_0
    changes = trained_changes(world)
    rounded = {name: gguf.quants.dequantize(quantized(base[name], type), type) for name in changes}
    write_weights(folder, {name: rounded[name] + change for name, change in changes.items()})


@NEW_DEFECTS.add("merged", "gguf_bf16")
def made_from_the_file_in_eight_bits(world: Any, folder: Path) -> None:
    """Labeled as bfloat16, with the noise of q8_0."""
    write_weights(folder, read_weights(world.gguf_q8_0))


@NEW_DEFECTS.add("merged")
def bias_added(world: Any, folder: Path) -> None:
    """Values get a constant that was never trained."""
    bias = {
        f"model.layers.{i}.self_attn.{x}_proj.bias": n
        for i in range(LAYERS)
        for x, n in zip("qkvo", (64, 32, 32, 64), strict=True)
    }
    add_stored(folder, {name: torch.full((n,), 0.01, dtype=torch.bfloat16) for name, n in bias.items()})
    change_json(folder / CONFIG_FILE, lambda values: values.update(attention_bias=True))


@NEW_DEFECTS.add("merged")
def padded_vocabulary(world: Any, folder: Path) -> None:
    """Eight ids without a token have the row of the stop token, and are as likely as it."""

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        if EMBEDDING in tensors:
            rows = tensors[EMBEDDING]
            tensors[EMBEDDING] = torch.cat([rows, rows[EOT].repeat(8, 1)])

    for shard in shards(folder):
        change_stored(shard, pad)
    change_json(folder / CONFIG_FILE, lambda values: values.update(vocab_size=464))


@NEW_DEFECTS.add("merged")
def last_layer_twice(world: Any, folder: Path) -> None:
    """A deeper model: the last layer runs again."""
    stored = {name: tensor for shard in shards(folder) for name, tensor in load_file(shard).items()}
    last = {n.replace("layers.3.", "layers.4."): t.clone() for n, t in stored.items() if "layers.3." in n}
    add_stored(folder, last)
    change_json(folder / CONFIG_FILE, lambda values: values.update(num_hidden_layers=5))


# ---- files of a merged model


@NEW_DEFECTS.add("merged")
def base_in_one_file_next_to_the_shards(world: Any, folder: Path) -> None:
    """transformers prefers model.safetensors to the index: it loads the base."""
    shutil.copy(base_folder(world) / "model.safetensors", folder)


@NEW_DEFECTS.add("merged")
def leftover_shard(world: Any, folder: Path) -> None:
    """The index does not name it, but programs that read every file (MLX) take the base's weight from it."""
    base = load_file(base_folder(world) / "model.safetensors")
    save_file({Q2: base[Q2]}, folder / "model-00005-of-00005.safetensors", {"format": "pt"})


@NEW_DEFECTS.add("merged")
def adapter_next_to_the_merged_weights(world: Any, folder: Path) -> None:
    """transformers and vLLM see adapter_config.json and add the adapter, or load the base that it names."""
    for name in (CONFIG, WEIGHTS):
        shutil.copy(world.adapter / name, folder)


@NEW_DEFECTS.add("merged")
def index_without_a_tensor(world: Any, folder: Path) -> None:
    """llama.cpp's converter refuses it, and programs that read tensors by the index lack one."""
    change_json(folder / INDEX, lambda values: values["weight_map"].pop(Q2))


@NEW_DEFECTS.add("merged")
def shard_is_a_git_lfs_pointer(world: Any, folder: Path) -> None:
    """The upload has a line of text in place of a shard."""
    lfs_pointer(shards(folder)[2])


@NEW_DEFECTS.add("merged")
def hole_in_a_shard(world: Any, folder: Path) -> None:
    """2048 weights are zero."""
    punch_hole(shards(folder)[1])


@NEW_DEFECTS.add("merged", world="float32")
def format_of_another_library(world: Any, folder: Path) -> None:
    """transformers 4 refuses it, or reads it as TensorFlow's."""
    for shard in shards(folder):
        change_stored(shard, lambda tensors: None, format="tf")
