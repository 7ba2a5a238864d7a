"""Defects that are planted into a small trained run and its exports, one at a time.

Each is what really happens to people: an export that is the base, an alpha that another tool rewrote, a shard of an
older export. Checksums are written again after a defect of an adapter, so that they do not give it away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
from chat_tokenizers import chat_tokenizer
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from trillora.export.gguf.lora import export_lora_gguf
from trillora.export.gguf.write import export_gguf
from trillora.export.merged import export_merged
from trillora.export.ollama import export_ollama
from trillora.export.source import open_source
from trillora.files.checksums import with_checksums
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

WEIGHTS, CONFIG, INDEX = "adapter_model.safetensors", "adapter_config.json", "model.safetensors.index.json"
PREFIX = "base_model.model.model.layers."
Q0, Q1 = f"{PREFIX}0.self_attn.q_proj", f"{PREFIX}1.self_attn.q_proj"
BASE_Q0, BASE_Q1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@dataclass(frozen=True)
class World:
    """A folder with `model`, `run` (with its exports) and `chats.jsonl`."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def adapter(self) -> Path:
        return self.run / "adapter"

    @property
    def merged(self) -> Path:
        return self.run / "exports" / "merged"

    @property
    def half(self) -> Path:
        return self.run / "exports" / "merged-float16"

    @property
    def gguf(self) -> Path:
        return self.run / "exports" / "gguf-f32"

    @property
    def lora_gguf(self) -> Path:
        return self.run / "exports" / "lora-gguf"

    @property
    def ollama(self) -> Path:
        return self.run / "exports" / "ollama"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def copy(self, folder: Path) -> World:
        """The run alone: the base stays where the recipe says."""
        shutil.copytree(self.run, folder / "run")
        return World(folder)


def write_world(folder: Path) -> World:
    """A Llama with Llama 3's chat format, trained for a few steps, and its merged model in small shards."""
    tokenizer = chat_tokenizer("llama3")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.convert_tokens_to_ids("<|eot_id|>")
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tiny_run.write_chats(folder / "chats.jsonl")
    recipe = tiny_run.recipe(folder, train={"sequence_length": 96, "batch_size": 4, "learning_rate": 2e-2})
    train(load_recipe(recipe), folder / "run")
    world = World(folder)
    source = open_source(str(world.run))
    export_merged(source, world.merged, max_shard_bytes=100_000)
    export_merged(source, world.half, dtype="float16")
    export_gguf(source, world.gguf, type="f32")
    export_lora_gguf(source, world.lora_gguf)
    export_ollama(source, world.ollama, type="q8_0")
    return world


# ---- tools


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values, indent=1))


def change_tensors(file: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = {name: np.array(array) for name, array in load_file(file).items()}
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file, metadata={"format": "pt"})


def seal(adapter: Path) -> None:
    """Writes the checksums again."""
    facts = json.loads((adapter / "checksums.json").read_text())
    files = {name: (adapter / name).read_bytes() for name in facts["files"]}
    (adapter / "checksums.json").write_bytes(with_checksums(facts["step"], files)["checksums.json"])


def set_options(world: World, **options: Any) -> None:
    change_json(world.adapter / CONFIG, lambda values: values.update(options))


def change_adapter(world: World, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    change_tensors(world.adapter / WEIGHTS, change)


def change_merged(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces one tensor, in whichever shard it is."""
    for file in sorted(folder.glob("*.safetensors")):
        if name in load_file(file):
            change_tensors(
                file, lambda tensors: tensors.update({name: change(tensors[name]).astype(tensors[name].dtype)})
            )


def base_tensors(world: World) -> dict[str, np.ndarray]:
    run = json.loads((world.run / "recipe.json").read_text())
    return load_file(Path(run["recipe"]["model"]["name"]) / "model.safetensors")


def merged_tensors(world: World) -> dict[str, np.ndarray]:
    return {name: array for file in world.merged.glob("*.safetensors") for name, array in load_file(file).items()}


def own_tokenizer(folder: Path, name: str = "llama3") -> None:
    chat_tokenizer(name).save_pretrained(folder)


# ---- defects of an adapter


def no_op(world: World) -> None:
    change_adapter(world, lambda t: t.update({n: 0 * a for n, a in t.items() if "lora_B" in n}))


def zeroed_layer(world: World) -> None:
    change_adapter(world, lambda t: t.update({f"{Q0}.lora_B.weight": 0 * t[f"{Q0}.lora_B.weight"]}))


def swapped_factors(world: World) -> None:
    a, b = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
    change_adapter(world, lambda t: t.update({a: t[b].T, b: t[a].T}))


def swapped_layers(world: World) -> None:
    names = [(f"{Q0}.lora_{x}.weight", f"{Q1}.lora_{x}.weight") for x in "AB"]
    change_adapter(world, lambda t: t.update({x: t[y] for pair in names for x, y in (pair, pair[::-1])}))


def wrong_alpha(world: World) -> None:
    set_options(world, lora_alpha=16)


def wrong_rank_pattern(world: World) -> None:
    set_options(world, rank_pattern={"q_proj": 8})


def wrong_alpha_pattern(world: World) -> None:
    set_options(world, alpha_pattern={"q_proj": 32})


def flipped_rslora(world: World) -> None:
    set_options(world, use_rslora=True)


def unknown_base(world: World) -> None:
    set_options(world, base_model_name_or_path="/home/somebody/models/llama")


def nan_in_adapter(world: World) -> None:
    change_adapter(world, lambda t: t[f"{Q0}.lora_B.weight"].__setitem__((0, 0), np.nan))


def infinite_in_half(world: World) -> None:
    def overflow(tensors: dict[str, np.ndarray]) -> None:
        with np.errstate(over="ignore"):
            tensors.update({n: (a * 1e6).astype(np.float16) for n, a in tensors.items() if "lora_B" in n})

    change_adapter(world, overflow)


def truncated_adapter(world: World) -> None:
    file = world.adapter / WEIGHTS
    file.write_bytes(file.read_bytes()[:-4096])


def flipped_bit(world: World) -> None:
    """The only one that checksums must find."""
    file = world.adapter / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def pickled(world: World) -> None:
    (world.adapter / "adapter_model.bin").write_bytes(b"\x80\x04N.")


def other_tokenizer(world: World) -> None:
    own_tokenizer(world.adapter, "chatml")


def adapter_without_eos(world: World) -> None:
    own_tokenizer(world.adapter)
    change_json(world.adapter / "tokenizer_config.json", lambda values: values.pop("eos_token"))


def changed_template(world: World) -> None:
    own_tokenizer(world.adapter)
    _edit_template(world.adapter, lambda text: text.replace("<|eot_id|>", "<|eot_id|>\n"))


def _edit_template(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(change(file.read_text()))


def mask_over_the_prompt(world: World) -> None:
    def train_all(values: dict[str, Any]) -> None:
        for piece in values["stages"][0]["example"]:
            piece["trained"] = True

    change_json(world.run / "run.json", train_all)


def frozen_expert(world: World) -> None:
    """An adapter of a mixture: expert 1 was never trained. Its run is not known."""
    generator = np.random.default_rng(0)
    name = "base_model.model.model.layers.0.mlp.experts.{}.down_proj.lora_{}.weight"
    tensors = {}
    for expert in range(4):
        tensors[name.format(expert, "A")] = generator.normal(size=(4, 32)).astype(np.float32)
        tensors[name.format(expert, "B")] = generator.normal(size=(64, 4)).astype(np.float32) * (expert != 1)
    for file in ("adapter_model.safetensors", "checksums.json", "certificate.json"):
        (world.adapter / file).unlink(missing_ok=True)
    save_file(tensors, world.adapter / WEIGHTS, metadata={"format": "pt"})
    set_options(world, target_modules=["down_proj"], base_model_name_or_path="org/mixture")
    (world.run / "recipe.json").unlink()
    (world.run / "resolved.yaml").unlink()


# ---- defects of the base


def changed_base(world: World) -> None:
    """The same name, another revision: the base has been trained further."""
    shutil.copytree(Path(json.loads((world.run / "recipe.json").read_text())["recipe"]["model"]["name"]), world.model)
    change_tensors(world.model / "model.safetensors", lambda t: t.update({BASE_Q0: t[BASE_Q0] * 1.01}))


def changed_base_tokenizer(world: World) -> None:
    changed_base(world)
    shutil.copy(_base(world) / "model.safetensors", world.model / "model.safetensors")
    _edit_template(world.model, lambda text: text.replace("assistant", "model"))


def _base(world: World) -> Path:
    return Path(json.loads((world.run / "recipe.json").read_text())["recipe"]["model"]["name"])


# ---- defects of a merged model


def merged_is_base(world: World) -> None:
    base = base_tensors(world)
    for name in merged_tensors(world):
        change_merged(world.merged, name, lambda _, name=name: base[name])


def merged_twice(world: World) -> None:
    base = base_tensors(world)
    for name in merged_tensors(world):
        change_merged(world.merged, name, lambda array, name=name: 2 * array - base[name])


def merged_with_half_alpha(world: World) -> None:
    base = base_tensors(world)
    for name in merged_tensors(world):
        change_merged(world.merged, name, lambda array, name=name: (array + base[name]) / 2)


def merged_transposed(world: World) -> None:
    change_merged(world.merged, BASE_Q0, np.transpose)


def merged_swapped_layers(world: World) -> None:
    tensors = merged_tensors(world)
    change_merged(world.merged, BASE_Q0, lambda _: tensors[BASE_Q1])
    change_merged(world.merged, BASE_Q1, lambda _: tensors[BASE_Q0])


def merged_nan(world: World) -> None:
    change_merged(world.merged, BASE_Q0, lambda array: np.where(array == array.max(), np.nan, array))


def merged_overflow(world: World) -> None:
    def overflow(array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.where(array == array.max(), np.float32(70000), array).astype(np.float16)

    change_merged(world.half, BASE_Q0, overflow)


def shuffled_shards(world: World) -> None:
    """The index says that each tensor is in the next shard."""

    def shuffle(values: dict[str, Any]) -> None:
        shards = sorted(set(values["weight_map"].values()))
        turned = dict(zip(shards, shards[1:] + shards[:1], strict=True))
        values["weight_map"] = {name: turned[shard] for name, shard in values["weight_map"].items()}

    change_json(world.merged / INDEX, shuffle)


def _shards(world: World) -> list[Path]:
    return sorted(world.merged.glob("model-*.safetensors"))


def missing_shard(world: World) -> None:
    _shards(world)[1].unlink()


def truncated_shard(world: World) -> None:
    file = _shards(world)[1]
    file.write_bytes(file.read_bytes()[:-100])


def duplicated_tensor(world: World) -> None:
    first, second = _shards(world)[:2]
    name, array = next(iter(load_file(second).items()))
    change_tensors(first, lambda tensors: tensors.update({name: array * 0}))


def shard_of_another_export(world: World) -> None:
    """The right names and shapes, from the base instead of the merged model."""
    base = base_tensors(world)
    change_tensors(_shards(world)[-1], lambda tensors: tensors.update({name: base[name] for name in tensors}))


def merged_without_eos(world: World) -> None:
    change_json(world.merged / "tokenizer_config.json", lambda values: values.pop("eos_token"))


def merged_wrong_stop(world: World) -> None:
    change_json(world.merged / "generation_config.json", lambda values: values.update(eos_token_id=0))


def merged_double_bos(world: World) -> None:
    _edit_template(world.merged, lambda text: "{{ bos_token }}" + text)


def merged_other_padding(world: World) -> None:
    change_json(world.merged / "tokenizer_config.json", lambda values: values.update(pad_token="<|eot_id|>"))


def merged_wrong_config(world: World) -> None:
    def change(values: dict[str, Any]) -> None:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}

    change_json(world.merged / "config.json", change)


# ---- defects of GGUF files


def _file(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.gguf"))))


def change_gguf(folder: Path, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces the numbers of a float32 tensor in the file."""
    reader = GGUFReader(str(_file(folder)), "r+")
    [found] = [each for each in reader.tensors if each.name == tensor]
    found.data[:] = change(np.array(found.data))
    reader.data.flush()


def set_field(folder: Path, key: str, value: Any) -> None:
    reader = GGUFReader(str(_file(folder)), "r+")
    reader.fields[key].parts[-1][0] = value
    reader.data.flush()


def truncated_gguf(world: World) -> None:
    file = _file(world.gguf)
    file.write_bytes(file.read_bytes()[:-1000])


def gguf_not_permuted(world: World) -> None:
    """Rotary halves as transformers has them: the file loads, and answers are gibberish."""
    tensors = merged_tensors(world)
    for layer in range(2):
        for name, heads in (("q", 4), ("k", 2)):
            stored = tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            assert stored.shape[0] % heads == 0
            change_gguf(world.gguf, f"blk.{layer}.attn_{name}.weight", lambda _, stored=stored: stored)


def gguf_wrong_template(world: World) -> None:
    file = _file(world.gguf)
    file.write_bytes(file.read_bytes().replace(b"<|start_header_id|>assistant", b"<|start_header_id|>assistent"))


def gguf_wrong_end(world: World) -> None:
    set_field(world.gguf, "tokenizer.ggml.eos_token_id", 3)


def gguf_without_bos(world: World) -> None:
    set_field(world.gguf, "tokenizer.ggml.bos_token_id", 5)


def gguf_is_base(world: World) -> None:
    base = base_tensors(world)
    for layer in range(2):
        for name in ("gate", "up", "down"):
            stored = base[f"model.layers.{layer}.mlp.{name}_proj.weight"]
            change_gguf(world.gguf, f"blk.{layer}.ffn_{name}.weight", lambda _, stored=stored: stored)


def gguf_wrong_rotary(world: World) -> None:
    set_field(world.gguf, "llama.rope.freq_base", 500.0)


def lora_gguf_wrong_alpha(world: World) -> None:
    set_field(world.lora_gguf, "adapter.lora.alpha", 1.0)


def modelfile_without_stop(world: World) -> None:
    file = world.ollama / "Modelfile"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if "PARAMETER stop" not in line))


def modelfile_without_template(world: World) -> None:
    file = world.ollama / "Modelfile"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if line.startswith(("FROM", "PARAM"))))


@dataclass(frozen=True)
class Defect:
    name: str
    plant: Callable[[World], None]
    target: str  # adapter, merged, half, gguf, lora_gguf or ollama
    caught_by: tuple[str, ...]  # checks that must fail, as "part: name"
    base: bool = False  # certify with the base in World.model
    seals: bool = True
    loads: bool = True  # there is a base that it fits to
    slow: bool = False  # alike another one: tested at full dose


WEIGHT, OPTION, READ = "trained: weights", "trained: options", "reader: PEFT"
TENSORS, SHARE, LOADED = "trained: tensors", "trained: share of the change", "reader: transformers"
RAN, TALKED = "reader: llama.cpp", "tokenizer: conversation"
DEFECTS = (
    Defect("no-op adapter", no_op, "adapter", (WEIGHT, "norms: no-op", READ)),
    Defect("zeroed layer", zeroed_layer, "adapter", (WEIGHT, "norms: zero layers", READ)),
    Defect("swapped A and B", swapped_factors, "adapter", (WEIGHT, READ), slow=True),
    Defect("swapped layers", swapped_layers, "adapter", (WEIGHT, READ), slow=True),
    Defect("wrong alpha", wrong_alpha, "adapter", (OPTION, READ)),
    Defect("wrong rank pattern", wrong_rank_pattern, "adapter", ("trained: weights", READ)),
    Defect("wrong alpha pattern", wrong_alpha_pattern, "adapter", (OPTION, READ), slow=True),
    Defect("rsLoRA flag flipped", flipped_rslora, "adapter", (OPTION, READ), slow=True),
    Defect("base id is a local path", unknown_base, "adapter", ("trained: base id",)),
    Defect("NaN in the adapter", nan_in_adapter, "adapter", ("norms: norms",)),
    Defect("float16 overflow in the adapter", infinite_in_half, "adapter", ("norms: norms",), slow=True),
    Defect("truncated adapter", truncated_adapter, "adapter", ("files: files",)),
    Defect("flipped bit", flipped_bit, "adapter", ("files: checksums",), seals=False),
    Defect("pickle file", pickled, "adapter", ("files: no pickle",)),
    Defect("other tokenizer", other_tokenizer, "adapter", ("tokenizer: tokens",)),
    Defect("missing EOS", adapter_without_eos, "adapter", ("tokenizer: special tokens",)),
    Defect("changed chat template", changed_template, "adapter", ("tokenizer: chat template",)),
    Defect("mask over the prompt", mask_over_the_prompt, "adapter", ("masks: recorded example",)),
    Defect("frozen expert", frozen_expert, "adapter", ("norms: zero layers",), seals=False, loads=False),
    Defect("wrong base revision", changed_base, "adapter", ("trained: base weights",), base=True),
    Defect("base with another template", changed_base_tokenizer, "adapter", ("tokenizer: same as in training",), True),
    Defect("merged model is the base", merged_is_base, "merged", (TENSORS, SHARE, LOADED)),
    Defect("merged twice", merged_twice, "merged", (TENSORS, SHARE, LOADED), slow=True),
    Defect("merged with half the alpha", merged_with_half_alpha, "merged", (TENSORS, SHARE, LOADED), slow=True),
    Defect("transposed weight", merged_transposed, "merged", (TENSORS, LOADED), slow=True),
    Defect("swapped layers in the merged model", merged_swapped_layers, "merged", (TENSORS, LOADED), slow=True),
    Defect("NaN in the merged model", merged_nan, "merged", (TENSORS, LOADED), slow=True),
    Defect("float16 overflow in the merged model", merged_overflow, "half", (TENSORS, LOADED)),
    Defect("shuffled shards", shuffled_shards, "merged", ("files: shards",)),
    Defect("missing shard", missing_shard, "merged", ("files: shards",), slow=True),
    Defect("truncated shard", truncated_shard, "merged", ("files: files",), slow=True),
    Defect("tensor in two shards", duplicated_tensor, "merged", ("files: shards",), slow=True),
    Defect("shard of another export", shard_of_another_export, "merged", (TENSORS, LOADED), slow=True),
    Defect("merged model without EOS", merged_without_eos, "merged", ("tokenizer: special tokens",), slow=True),
    Defect("wrong stop token", merged_wrong_stop, "merged", ("tokenizer: stop token",)),
    Defect("double BOS", merged_double_bos, "merged", ("tokenizer: one BOS", "tokenizer: chat template")),
    Defect("padding is the stop token", merged_other_padding, "merged", ("tokenizer: special tokens",), slow=True),
    Defect("wrong rotary base in config.json", merged_wrong_config, "merged", (LOADED,)),
    Defect("truncated GGUF", truncated_gguf, "gguf", ("files: files",)),
    Defect("GGUF without q/k permutation", gguf_not_permuted, "gguf", (TENSORS, RAN)),
    Defect("GGUF with another template", gguf_wrong_template, "gguf", ("tokenizer: chat template", TALKED)),
    Defect("GGUF with another EOS", gguf_wrong_end, "gguf", ("tokenizer: tokens",), slow=True),
    Defect("GGUF with another BOS", gguf_without_bos, "gguf", ("tokenizer: tokens", TALKED), slow=True),
    Defect("GGUF of the base's feed-forward layers", gguf_is_base, "gguf", (TENSORS, SHARE, RAN), slow=True),
    Defect("GGUF with another rotary base", gguf_wrong_rotary, "gguf", (RAN,), slow=True),
    Defect("LoRA GGUF with another alpha", lora_gguf_wrong_alpha, "lora_gguf", (TENSORS, SHARE, RAN)),
    Defect("Modelfile without stop", modelfile_without_stop, "ollama", ("servers: Modelfile",)),
    Defect("Modelfile without template", modelfile_without_template, "ollama", ("servers: Modelfile",), slow=True),
)


def plant(defect: Defect, world: World, folder: Path) -> tuple[World, Path]:
    """A copy of the run with the defect, and the folder to certify."""
    copy = world.copy(folder)
    defect.plant(copy)
    if defect.target == "adapter" and defect.seals and (copy.adapter / "checksums.json").is_file():
        seal(copy.adapter)
    return copy, getattr(copy, defect.target)
