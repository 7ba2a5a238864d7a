"""A bfloat16 model whose adapter changes little, its exports, and tools to damage them by hand.

The adapter of `planted_defects.write_world` changes its model by several percent. Here each layer changes by about
0.2 % of its weight, as in real fine-tuning: less than the noise of 4 and 8 bits, and about one step of bfloat16.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_run
import torch
from chat_tokenizers import chat_tokenizer
from planted_defects import INDEX, WEIGHTS, World, change_json, seal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from trillora.export.gguf.lora import export_lora_gguf
from trillora.export.gguf.tensors import permuted
from trillora.export.gguf.write import export_gguf
from trillora.export.merged import export_merged
from trillora.export.ollama import export_ollama
from trillora.export.source import open_source
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

LAYERS, Q_HEADS, KV_HEADS = 4, 4, 2
TYPES = ("q8_0", "q4_0", "q4_1", "bf16")
QUANTIZED = ("gguf_q8_0", "gguf_q4_0", "gguf_q4_1")
Arrays = dict[str, np.ndarray]  # float32, by names as in transformers


@dataclass(frozen=True)
class SmallWorld(World):
    """As World, with GGUF files of several types."""

    @property
    def gguf_q8_0(self) -> Path:
        return self.run / "exports" / "gguf-q8_0"

    @property
    def gguf_q4_0(self) -> Path:
        return self.run / "exports" / "gguf-q4_0"

    @property
    def gguf_q4_1(self) -> Path:
        return self.run / "exports" / "gguf-q4_1"

    @property
    def gguf_bf16(self) -> Path:
        return self.run / "exports" / "gguf-bf16"

    def copy(self, folder: Path) -> SmallWorld:
        shutil.copytree(self.run, folder / "run")
        return SmallWorld(folder)


def write_small_world(folder: Path) -> SmallWorld:
    """A Llama with Llama 3's chat format, trained at a low rate. Its norms are random, as no two are alike in life."""
    tokenizer = chat_tokenizer("llama3")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.convert_tokens_to_ids("<|eot_id|>")
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tiny_run.write_chats(folder / "chats.jsonl")
    recipe = tiny_run.recipe(folder, train={"sequence_length": 96, "batch_size": 4, "learning_rate": 2.5e-4})
    train(load_recipe(recipe), folder / "run")
    world = SmallWorld(folder)
    source = open_source(str(world.run))
    export_merged(source, world.merged, max_shard_bytes=100_000)
    for type in TYPES:
        export_gguf(source, getattr(world, f"gguf_{type}"), type=type)
    export_lora_gguf(source, world.lora_gguf)
    export_ollama(source, world.ollama, type="q8_0")
    return world


def relative_changes(world: World) -> dict[str, tuple[float, float]]:
    """By weight: the size of the trained change relative to it, and the part of it that the merged file has."""
    base, merged = base_weights(world), read_weights(world.merged)
    return {
        name: (
            float(np.linalg.norm(change) / np.linalg.norm(base[name])),
            float(np.vdot(merged[name] - base[name], change) / np.vdot(change, change)),
        )
        for name, change in trained_changes(world).items()
    }


# ---- defects


@dataclass(frozen=True)
class Defect:
    """Something that is planted into a copy of a world; also a rewrite that is no defect (`harmless_rewrites`)."""

    name: str
    plant: Callable[[Any], None]
    target: str  # the property of the world with the folder to certify
    harm: str  # what goes wrong with it; for a harmless rewrite, why nothing does
    world: str = "bfloat16"  # this module's, or "float32": the one of planted_defects
    seals: bool = True  # checksums of an adapter are written again


class Defects(list[Defect]):
    """A list to which a decorator adds the function below it. Its name and docstring are the defect's."""

    def add(
        self, *targets: str, **options: Any
    ) -> Callable[[Callable[[Any, Path], None]], Callable[[Any, Path], None]]:
        """The function gets the world and the folder of the target; for several targets it is called with each."""

        def register(function: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
            for target in targets:
                name = f"{target}: {function.__name__.strip('_').replace('_', ' ')}"
                harm = (function.__doc__ or "").strip()
                self.append(Defect(name, _on(function, target), target, harm, **options))
            return function

        return register


def _on(function: Callable[[Any, Path], None], target: str) -> Callable[[Any], None]:
    return lambda world: function(world, getattr(world, target))


def plant(defect: Defect, world: World, folder: Path) -> tuple[World, Path]:
    """A copy of the run with the defect, and the folder to certify."""
    copy = world.copy(folder)
    defect.plant(copy)
    if defect.target == "adapter" and defect.seals:
        seal(copy.adapter)
    return copy, getattr(copy, defect.target)


# ---- safetensors


def change_stored(file: Path, change: Callable[[dict[str, torch.Tensor]], Any], **metadata: str) -> None:
    """Writes a file again with other tensors, each in its own type."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt", **metadata})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def add_stored(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds tensors to the last shard, and to the index."""
    last = shards(folder)[-1]
    change_stored(last, lambda stored: stored.update(tensors))
    change_json(folder / INDEX, lambda values: values["weight_map"].update(dict.fromkeys(tensors, last.name)))


def base_folder(world: World) -> Path:
    return Path(json.loads((world.run / "recipe.json").read_text())["recipe"]["model"]["name"])


def base_weights(world: World) -> Arrays:
    return _read_safetensors(base_folder(world))


def trained_changes(world: World) -> Arrays:
    """scale * B A of each weight."""
    options = json.loads((world.adapter / "adapter_config.json").read_text())
    scale = np.float32(options["lora_alpha"] / options["r"])
    found = load_file(world.adapter / WEIGHTS)
    return {
        name.removeprefix("base_model.model.").replace("lora_A.", ""): (
            (found[name.replace("lora_A", "lora_B")].numpy() * scale) @ found[name].numpy()
        )
        for name in found
        if "lora_A" in name
    }


def _read_safetensors(folder: Path) -> Arrays:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float().numpy() for file in files for name, tensor in load_file(file).items()}


# ---- GGUF


def gguf_file(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.gguf"))))


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`"""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    return str(known.get_name(name, try_suffixes=(".weight", ".bias")))


def _num_heads(name: str) -> int | None:
    """Of a weight that GGUF has in another order of rows."""
    found = re.search(r"\.([qk])_proj\.", name)
    return {"q": Q_HEADS, "k": KV_HEADS}[found[1]] if found else None


def to_gguf(name: str, array: np.ndarray) -> np.ndarray:
    heads = _num_heads(name)
    return array if heads is None else permuted(array, heads)


def from_gguf(name: str, array: np.ndarray) -> np.ndarray:
    heads = _num_heads(name)
    if heads is None:
        return array
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def change_bytes(folder: Path, tensor: str, change: Callable[[np.ndarray], Any]) -> None:
    """Changes the stored numbers of one tensor in place: bytes, or float32."""
    reader = gguf.GGUFReader(str(gguf_file(folder)), "r+")
    [found] = [each for each in reader.tensors if each.name == tensor]
    change(found.data)
    reader.data.flush()


def rewrite_gguf(
    folder: Path,
    values: Mapping[str, Any] | None = None,
    remove: tuple[str, ...] = (),
    tensors: Callable[[dict[str, tuple[np.ndarray, Any]]], Any] = lambda tensors: None,
    alignment: int | None = None,
) -> None:
    """Writes the file again with other metadata and tensors, which are bytes (or float32) with their type."""
    file = gguf_file(folder)
    reader = gguf.GGUFReader(str(file))
    writer = gguf.GGUFWriter(file.with_suffix(".new"), reader.fields["general.architecture"].contents())
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    new = dict(values or {})
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in remove:
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, new.pop(key, field.contents()), field.types[0], sub_type)
    for key, value in new.items():
        is_list = isinstance(value, list)
        type = _value_type(value[0] if is_list else value)
        writer.add_key_value(key, value, *((gguf.GGUFValueType.ARRAY, type) if is_list else (type,)))
    stored = {each.name: (np.array(each.data), each.tensor_type) for each in reader.tensors}
    tensors(stored)
    for name, (array, tensor_type) in stored.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)


def _value_type(value: Any) -> Any:
    """Numbers of tokens, layers and others are unsigned."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return gguf.GGUFValueType.UINT32 if is_number else gguf.GGUFValueType.get_type(value)


def quantized(array: np.ndarray, type: Any) -> np.ndarray:
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), type)


# ---- weights of a merged model or a GGUF file, by their names in transformers


def read_weights(folder: Path) -> Arrays:
    """In float32, and with the rows of heads as transformers has them."""
    if not any(folder.glob("*.gguf")):
        return _read_safetensors(folder)
    stored = {each.name: each for each in gguf.GGUFReader(str(gguf_file(folder))).tensors}
    names = _weight_names()
    return {
        name: from_gguf(name, gguf.quants.dequantize(stored[gguf_name(name)].data, stored[gguf_name(name)].tensor_type))
        for name in names
    }


def _weight_names() -> list[str]:
    parts = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    parts += ["input_layernorm", "post_attention_layernorm"]
    whole = ["model.embed_tokens.weight", "model.norm.weight"]
    return whole + [f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in parts]


def write_weights(folder: Path, arrays: Arrays) -> None:
    """Replaces these weights in the folder's files, in the type that each is stored in."""
    if not any(folder.glob("*.gguf")):
        for file in shards(folder):
            change_stored(file, lambda tensors: tensors.update(_stored_as(tensors, arrays)))
        return
    reader = gguf.GGUFReader(str(gguf_file(folder)), "r+")
    stored = {each.name: each for each in reader.tensors}
    for name, array in arrays.items():
        found = stored[gguf_name(name)]
        found.data[:] = quantized(to_gguf(name, array), found.tensor_type).view(found.data.dtype)
    reader.data.flush()


def _stored_as(tensors: dict[str, torch.Tensor], arrays: Arrays) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.array(arrays[name], np.float32)).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name in arrays
    }


def change_weight(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Replaces one weight. `change` returns a new array, or changes the one that it gets."""
    array = np.array(read_weights(folder)[name])
    result = change(array)
    write_weights(folder, {name: array if result is None else result})


def merge_by_hand(world: World, folder: Path, factor: Callable[[str], float]) -> None:
    """Writes the base plus the change of each weight, times a factor that depends on its name."""
    base = base_weights(world)
    changes = trained_changes(world)
    write_weights(folder, {name: base[name] + np.float32(factor(name)) * change for name, change in changes.items()})


def layer_of(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None
    return int(found[1])


def next_bfloat16(array: np.ndarray, *place: int) -> None:
    """Moves one entry away from zero by one step of bfloat16."""
    bits = array[place].view(np.uint32) & np.uint32(0xFFFF0000)
    array[place] = (bits + np.uint32(0x10000)).view(np.float32)
