"""New defects of GGUF files, LoRA GGUF files and Ollama's folders. The docstring of each says what goes wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from new_defects import lfs_pointer, punch_hole
from small_world import (
    QUANTIZED,
    Defect,
    Defects,
    change_bytes,
    from_gguf,
    gguf_file,
    merge_by_hand,
    next_bfloat16,
    quantized,
    read_weights,
    rewrite_gguf,
    write_weights,
)

NEW_GGUF_DEFECTS = Defects()
F32 = gguf.GGMLQuantizationType.F32
Tensors = dict[str, tuple[np.ndarray, Any]]


def _values(label: str, values: dict[str, Any], harm: str, *, target: str = "gguf_q8_0", **options: Any) -> None:
    """Adds a defect of the metadata."""

    def plant(world: Any) -> None:
        rewrite_gguf(getattr(world, target), values)

    NEW_GGUF_DEFECTS.append(Defect(f"{target}: {label}", plant, target, harm, **options))


# ---- metadata

_TWICE = {
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.rope.dimension_count": 8,
}
_values("twice the heads", _TWICE, "All shapes fit, and attention computes something else.", target="gguf_q4_0")
_values(
    "linear rope scaling",
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "Positions are rotated by other angles than in training.",
)
_values(
    "experts",
    {"llama.expert_count": 8, "llama.expert_used_count": 2},
    "llama.cpp looks for the tensors of a mixture, and refuses the file.",
)
_values("not causal", {"llama.attention.causal": False}, "Tokens see the ones after them.", target="gguf_q4_1")
_values("short context", {"llama.context_length": 32}, "Programs cut conversations to 32 tokens.")
_values("another eot", {"tokenizer.ggml.eot_token_id": 10}, "llama.cpp ends answers at this letter.")
_values("eos after every text", {"tokenizer.ggml.add_eos_token": True}, "Every prompt ends with the stop token.")
_values("other splits", {"tokenizer.ggml.pre": "llama-bpe"}, "Text is split by another rule: other tokens.")
_values("temperature", {"general.sampling.temp": 1.9}, "llama.cpp takes it as its default.", target="gguf_q4_0")
_values(
    "a template for tools",
    {"tokenizer.chat_template.tool_use": "{{ messages[0]['content'] }}"},
    "llama.cpp uses it instead of the trained template when tools are given.",
)
_values(
    "rope base in float32",
    {"llama.rope.freq_base": 10_001.0},
    "Far positions get other angles.",
    target="gguf",
    world="float32",
)


def _token_type(id: int, type: int) -> Callable[[Any, Path], None]:
    def change(folder: Path) -> None:
        reader = gguf.GGUFReader(str(gguf_file(folder)))
        types = reader.fields["tokenizer.ggml.token_type"].contents()
        types[id] = type
        rewrite_gguf(folder, {"tokenizer.ggml.token_type": types})

    return lambda world, folder: change(folder)


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def header_of_normal_type(world: Any, folder: Path) -> None:
    """llama.cpp reads <|start_header_id|> in a prompt as letters."""
    _token_type(449, 1)(world, folder)


@NEW_GGUF_DEFECTS.add("gguf_q4_0")
def hidden_mark(world: Any, folder: Path) -> None:
    """<think> is a control token, which llama.cpp does not print."""
    _token_type(452, 3)(world, folder)


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def unused_letter(world: Any, folder: Path) -> None:
    """A letter is marked as unused, and llama.cpp does not print it."""
    _token_type(70, 5)(world, folder)


@NEW_GGUF_DEFECTS.add("gguf_q4_1")
def tokens_swapped(world: Any, folder: Path) -> None:
    """Two words of the vocabulary are read and written as each other."""
    tokens = gguf.GGUFReader(str(gguf_file(folder))).fields["tokenizer.ggml.tokens"].contents()
    tokens[300], tokens[301] = tokens[301], tokens[300]
    rewrite_gguf(folder, {"tokenizer.ggml.tokens": tokens})


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def last_merge_lost(world: Any, folder: Path) -> None:
    """A word becomes two tokens."""
    merges = gguf.GGUFReader(str(gguf_file(folder))).fields["tokenizer.ggml.merges"].contents()
    rewrite_gguf(folder, {"tokenizer.ggml.merges": merges[:-1]})


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def no_template(world: Any, folder: Path) -> None:
    """llama.cpp writes prompts in ChatML."""
    rewrite_gguf(folder, remove=("tokenizer.chat_template",))


# ---- tensors


@NEW_GGUF_DEFECTS.add("gguf_q8_0", "gguf_q4_0", "gguf_q4_1")
def scale_of_one_block(world: Any, folder: Path) -> None:
    """32 weights of one row are wrong by a thousandth."""

    def change(data: np.ndarray) -> None:
        data[3, 0] ^= 1  # the lowest bit of the block's float16

    change_bytes(folder, "blk.1.attn_v.weight", change)


@NEW_GGUF_DEFECTS.add("gguf_q8_0", "gguf_q4_0", "gguf_q4_1")
def one_number_of_a_block(world: Any, folder: Path) -> None:
    """One weight is wrong by one step of its block."""

    def change(data: np.ndarray) -> None:
        data[9, -1] ^= 1

    change_bytes(folder, "blk.2.ffn_up.weight", change)


@NEW_GGUF_DEFECTS.add("gguf_q4_1")
def minimum_of_one_block(world: Any, folder: Path) -> None:
    """32 weights of one row are shifted."""

    def change(data: np.ndarray) -> None:
        data[3, 2] ^= 4  # after the scale: the block's smallest weight, in float16

    change_bytes(folder, "blk.0.attn_output.weight", change)


@NEW_GGUF_DEFECTS.add("gguf_q4_0")
def nibbles_swapped(world: Any, folder: Path) -> None:
    """Each block of one tensor has its halves exchanged, as by a reader of an older format."""

    def change(data: np.ndarray) -> None:
        blocks = data.reshape(len(data), -1, 18)
        blocks[..., 2:] = blocks[..., 2:] << 4 | blocks[..., 2:] >> 4

    change_bytes(folder, "blk.3.ffn_down.weight", change)


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def made_from_the_file_in_four_bits(world: Any, folder: Path) -> None:
    """Labeled as q8_0, with the noise of q4_0."""
    write_weights(folder, read_weights(world.gguf_q4_0))


@NEW_GGUF_DEFECTS.add("gguf_bf16")
def rotary_factors_added(world: Any, folder: Path) -> None:
    """llama.cpp divides the rotation of slow positions by them, as in Llama 3.1."""
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32)
    rewrite_gguf(folder, tensors=lambda tensors: tensors.update({"rope_freqs.weight": (factors, F32)}))


@NEW_GGUF_DEFECTS.add(*QUANTIZED)
def query_bias_added(world: Any, folder: Path) -> None:
    """llama.cpp adds it to the queries of one layer."""
    bias = np.full(64, 0.01, np.float32)
    rewrite_gguf(folder, tensors=lambda tensors: tensors.update({"blk.0.attn_q.bias": (bias, F32)}))


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def scale_next_to_a_weight(world: Any, folder: Path) -> None:
    """llama.cpp multiplies the layer's output by it."""
    scale = np.array([1.1], np.float32)
    rewrite_gguf(folder, tensors=lambda tensors: tensors.update({"blk.0.ffn_down.scale": (scale, F32)}))


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def last_layer_removed(world: Any, folder: Path) -> None:
    """A pruned model: it loads, and has three layers."""

    def remove(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("blk.3.")]:
            tensors.pop(name)

    rewrite_gguf(folder, {"llama.block_count": 3}, tensors=remove)


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def one_tensor_in_fewer_bits(world: Any, folder: Path) -> None:
    """A tensor of the q8_0 file has four bits."""
    type = gguf.GGMLQuantizationType.Q4_0

    def change(tensors: Tensors) -> None:
        name = "blk.1.attn_v.weight"
        array, old = tensors[name]
        tensors[name] = quantized(gguf.quants.dequantize(array, old), type), type

    rewrite_gguf(folder, tensors=change)


@NEW_GGUF_DEFECTS.add("gguf_bf16")
def final_norm_is_one(world: Any, folder: Path) -> None:
    """The last norm lost its weights."""
    change_bytes(folder, "output_norm.weight", lambda data: data.fill(1))


@NEW_GGUF_DEFECTS.add("gguf", world="float32")
def one_small_error_in_float32(world: Any, folder: Path) -> None:
    """One number of an adapted layer is wrong by less than a percent."""
    change_bytes(folder, "blk.0.ffn_up.weight", lambda data: next_bfloat16(data, 5, 7))


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def second_file_with_the_base(world: Any, folder: Path) -> None:
    """Programs that take the first file of the folder load the base."""
    shutil.copy(gguf_file(folder), folder / "a-model-q8_0.gguf")
    merge_by_hand(world, folder, lambda name: 0)


@NEW_GGUF_DEFECTS.add("gguf_q8_0")
def hole_in_the_file(world: Any, folder: Path) -> None:
    """Thousands of weights are zero."""
    punch_hole(gguf_file(folder))


@NEW_GGUF_DEFECTS.add("gguf_q4_0", "lora_gguf")
def git_lfs_pointer(world: Any, folder: Path) -> None:
    """The upload has a line of text in place of the file."""
    lfs_pointer(gguf_file(folder))


# ---- LoRA GGUF


def _of_layer(tensors: Tensors, part: str) -> list[str]:
    found = [name for name in tensors if name.startswith(part)]
    assert found
    return found


@NEW_GGUF_DEFECTS.add("lora_gguf")
def B_not_permuted(world: Any, folder: Path) -> None:
    """The change of the queries goes to other rows of each head."""

    def change(data: np.ndarray) -> None:
        data[:] = from_gguf("self_attn.q_proj.weight", np.array(data))

    change_bytes(folder, "blk.0.attn_q.weight.lora_b", change)


@NEW_GGUF_DEFECTS.add("lora_gguf")
def one_pair_missing(world: Any, folder: Path) -> None:
    """llama.cpp leaves this layer as in the base."""
    rewrite_gguf(folder, tensors=lambda t: [t.pop(name) for name in _of_layer(t, "blk.1.ffn_down.")])


@NEW_GGUF_DEFECTS.add("lora_gguf")
def alpha_missing(world: Any, folder: Path) -> None:
    """llama.cpp multiplies by 1 instead of alpha / rank."""
    rewrite_gguf(folder, remove=("adapter.lora.alpha",))


@NEW_GGUF_DEFECTS.add("lora_gguf", world="float32")
def layers_swapped(world: Any, folder: Path) -> None:
    """Two layers get each other's change."""

    def swap(tensors: Tensors) -> None:
        for name in _of_layer(tensors, "blk.0."):
            other = name.replace("blk.0.", "blk.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    rewrite_gguf(folder, tensors=swap)


@NEW_GGUF_DEFECTS.add("lora_gguf")
def A_in_four_bits(world: Any, folder: Path) -> None:
    """The change has noise of a tenth of its size."""
    type = gguf.GGMLQuantizationType.Q4_0
    rewrite_gguf(
        folder,
        tensors=lambda t: t.update({n: (quantized(array, type), type) for n, (array, _) in t.items() if "lora_a" in n}),
    )


@NEW_GGUF_DEFECTS.add("lora_gguf")
def one_entry_off_by_a_step_of_bfloat16(world: Any, folder: Path) -> None:
    """One number of one layer is wrong by less than a percent."""
    change_bytes(folder, "blk.2.attn_v.weight.lora_b", lambda data: next_bfloat16(data, 3, 1))


@NEW_GGUF_DEFECTS.add("lora_gguf")
def one_more_pair(world: Any, folder: Path) -> None:
    """The embedding, which was not trained, is changed too; as it is also the head, llama.cpp aborts."""
    generator = np.random.default_rng(0)
    pair = {
        "token_embd.weight.lora_a": (generator.normal(size=(456, 4)).astype(np.float32) * np.float32(0.01), F32),
        "token_embd.weight.lora_b": (generator.normal(size=(64, 4)).astype(np.float32) * np.float32(0.01), F32),
    }
    rewrite_gguf(folder, tensors=lambda tensors: tensors.update(pair))


_values(
    "active only after some tokens",
    {"adapter.alora.invocation_tokens": [7, 8]},
    "llama.cpp switches the adapter on only after these tokens.",
    target="lora_gguf",
)


# ---- Ollama


def _edit_modelfile(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "Modelfile"
    text = file.read_text()
    new = change(text)
    assert new != text
    file.write_text(new)


def _line(label: str, line: str, harm: str, **options: Any) -> None:
    """Adds a defect that is one more line in the Modelfile."""

    def plant(world: Any) -> None:
        _edit_modelfile(world.ollama, lambda text: text + line + "\n")

    NEW_GGUF_DEFECTS.append(Defect(f"ollama: {label}", plant, "ollama", harm, **options))


_line("system prompt", "SYSTEM You are a pirate.", "Every chat starts with a system message.")
_line("temperature", "PARAMETER temperature 1.9", "Answers are noise.")
_line("short context", "PARAMETER num_ctx 16", "Ollama cuts conversations to 16 tokens.")
_line("one more stop", 'PARAMETER stop "the"', "Answers end at this word.")
_line("few tokens", "PARAMETER num_predict 4", "Answers have four tokens.", world="float32")
_line("penalty", "PARAMETER repeat_penalty 3", "Answers avoid every word that was said.")
_line("example", 'MESSAGE user "Who are you?"\nMESSAGE assistant "A pirate."', "Every chat starts with these messages.")
_line("renderer", "RENDERER qwen3-coder", "Ollama writes prompts with its own code instead of the template.")
_line("second template", 'TEMPLATE "{{ .Prompt }}"', "The last template counts: prompts have no headers.")
_line("lower case", "system You are a pirate.", "Ollama's keywords may be in lower case.")


@NEW_GGUF_DEFECTS.add("ollama")
def adapter_on_the_merged_model(world: Any, folder: Path) -> None:
    """Ollama adds the change a second time."""
    shutil.copy(gguf_file(world.lora_gguf), folder / "lora.gguf")
    _edit_modelfile(folder, lambda text: text + "ADAPTER ./lora.gguf\n")


@NEW_GGUF_DEFECTS.add("ollama")
def one_line_end_less(world: Any, folder: Path) -> None:
    """Prompts have one line end after each header, and two in training."""
    _edit_modelfile(folder, lambda text: text.replace("<|end_header_id|>\n\n", "<|end_header_id|>\n"))


@NEW_GGUF_DEFECTS.add("ollama")
def request_without_line_ends(world: Any, folder: Path) -> None:
    """Only the end of each prompt differs from training."""
    _edit_modelfile(folder, lambda text: re.sub(r'\n\n"""', '"""', text))


@NEW_GGUF_DEFECTS.add("ollama", world="float32")
def from_a_model_of_the_library(world: Any, folder: Path) -> None:
    """Ollama downloads another model, and the file is not used."""
    _edit_modelfile(folder, lambda text: re.sub("FROM .*", "FROM llama3.2", text))


@NEW_GGUF_DEFECTS.add("ollama")
def stop_with_a_space(world: Any, folder: Path) -> None:
    """Answers never have this text, so they do not stop."""
    _edit_modelfile(folder, lambda text: text.replace('stop "<|eot_id|>"', 'stop "<|eot_id|> "'))


@NEW_GGUF_DEFECTS.add("ollama")
def gguf_is_the_base(world: Any, folder: Path) -> None:
    """Ollama runs the base."""
    merge_by_hand(world, folder, lambda name: 0)
