"""Rewrites of adapters and exports that change bytes but nothing that a program computes: certify must accept them.

The docstring of each says why nothing changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from planted_defects import CONFIG, INDEX, WEIGHTS, change_json
from safetensors.torch import load_file, save_file
from small_world import Defects, change_stored, gguf_file, rewrite_gguf, shards

HARMLESS = Defects()
Tensors = dict[str, torch.Tensor]


def _factors(folder: Path, change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replaces each A [R, inputs] and B [outputs, R]."""

    def each(tensors: Tensors) -> None:
        for name in [name for name in tensors if "lora_A" in name]:
            other = name.replace("lora_A", "lora_B")
            tensors[name], tensors[other] = change(tensors[name], tensors[other])

    change_stored(folder / WEIGHTS, each)


def _written_again(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values) -> None:
    """JSON in other order and with other white space."""
    values = change(json.loads(file.read_text()))
    file.write_text(json.dumps(dict(reversed(values.items())), indent=7, ensure_ascii=True))


# ---- adapters


@HARMLESS.add("adapter")
def ranks_in_another_order(world: Any, folder: Path) -> None:
    """The sum over ranks has the same terms."""
    order = [2, 0, 3, 1]
    _factors(folder, lambda a, b: (a[order], b[:, order]))


@HARMLESS.add("adapter")
def power_of_two_from_B_to_A(world: Any, folder: Path) -> None:
    """Each product is the same number, without rounding."""
    _factors(folder, lambda a, b: (a * 4, b / 4))


@HARMLESS.add("adapter")
def signs_of_A_and_B(world: Any, folder: Path) -> None:
    """Two minus signs cancel out."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    _factors(folder, lambda a, b: (a * signs[:, None], b * signs))


@HARMLESS.add("adapter")
def alpha_doubled_and_B_halved(world: Any, folder: Path) -> None:
    """The scale and B change by powers of two that cancel out."""
    _factors(folder, lambda a, b: (a, b / 2))
    change_json(folder / CONFIG, lambda values: values.update(lora_alpha=2 * values["lora_alpha"]))


@HARMLESS.add("adapter", world="float32")
def tensors_in_another_order(world: Any, folder: Path) -> None:
    """safetensors are read by name, and this metadata is only for people."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors, key=lambda name: name[::-1])
    save_file({name: tensors[name] for name in names}, folder / WEIGHTS, {"made_by": "a tool", "format": "pt"})


@HARMLESS.add("adapter")
def options_saved_by_peft(world: Any, folder: Path) -> None:
    """PEFT writes every option with its default, its own version, and the targets in any order."""
    from peft import LoraConfig

    LoraConfig.from_pretrained(str(folder)).save_pretrained(str(folder))


@HARMLESS.add("adapter", world="float32")
def options_in_another_order(world: Any, folder: Path) -> None:
    """JSON has no order of keys, and targets are a set."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        values["target_modules"].reverse()
        return {**values, "peft_version": "0.17.0"}

    _written_again(folder / CONFIG, change)


@HARMLESS.add("adapter", "merged", world="float32")
def readme_edited(world: Any, folder: Path) -> None:
    """No program computes with it."""
    file = folder / "README.md"
    file.write_text(file.read_text() + "\nTrained on a rainy Sunday.\n")


@HARMLESS.add("adapter", "merged", "gguf_q8_0")
def licence_and_gitattributes_added(world: Any, folder: Path) -> None:
    """No program computes with them; an upload to a hub adds both."""
    (folder / "LICENSE").write_text("Apache License\nVersion 2.0\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


@HARMLESS.add("adapter", "merged")
def tokenizer_saved_again(world: Any, folder: Path) -> None:
    """transformers reads the files and writes them in its own way."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


@HARMLESS.add("adapter", "merged")
def tokenizer_json_in_one_line(world: Any, folder: Path) -> None:
    """The same JSON without white space."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":")))


# ---- merged models


def _write_shards(folder: Path, parts: list[Tensors]) -> None:
    for file in [*shards(folder), folder / INDEX]:
        file.unlink()
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    names = ["model.safetensors"] if len(parts) == 1 else names
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, {"format": "pt"})
    if len(parts) > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(tensor.nbytes for part in parts for tensor in part.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _stored(folder: Path) -> Tensors:
    return {name: tensor for file in shards(folder) for name, tensor in load_file(file).items()}


@HARMLESS.add("merged")
def one_file_instead_of_shards(world: Any, folder: Path) -> None:
    """The same tensors; a single file needs no index."""
    _write_shards(folder, [_stored(folder)])


@HARMLESS.add("merged", world="float32")
def other_shards(world: Any, folder: Path) -> None:
    """The same tensors in two files, with a right index."""
    tensors = _stored(folder)
    names = sorted(tensors, reverse=True)
    _write_shards(folder, [{name: tensors[name] for name in part} for part in (names[:5], names[5:])])


@HARMLESS.add("merged")
def saved_again_by_transformers(world: Any, folder: Path) -> None:
    """transformers reads the model and writes it in its own way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for file in [*shards(folder), folder / INDEX]:
        file.unlink()
    model.save_pretrained(folder)


@HARMLESS.add("merged")
def other_version_of_transformers(world: Any, folder: Path) -> None:
    """The version says which release wrote the file; JSON has no order of keys."""
    for name in ("config.json", "generation_config.json"):
        _written_again(folder / name, lambda values: {**values, "transformers_version": "4.57.1"})


@HARMLESS.add("merged")
def null_keys_dropped(world: Any, folder: Path) -> None:
    """A missing key has the same value as null."""
    _written_again(
        folder / "config.json", lambda values: {key: value for key, value in values.items() if value is not None}
    )


@HARMLESS.add("merged")
def index_written_again(world: Any, folder: Path) -> None:
    """JSON has no order of keys, and no program needs the number of parameters."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        values["metadata"].pop("total_parameters")
        return {**values, "weight_map": dict(reversed(values["weight_map"].items()))}

    _written_again(folder / INDEX, change)


# ---- GGUF


@HARMLESS.add("gguf_q8_0", "gguf_q4_0", "lora_gguf")
def description_added(world: Any, folder: Path) -> None:
    """Texts for people: no program computes with them."""
    rewrite_gguf(folder, {"general.description": "Adds small numbers.", "general.license": "apache-2.0"})


@HARMLESS.add("gguf_q4_1", "gguf_bf16")
def gguf_tensors_in_another_order(world: Any, folder: Path) -> None:
    """Tensors are read by name."""

    def turn(tensors: dict[str, Any]) -> None:
        items = list(tensors.items())
        tensors.clear()
        tensors.update(reversed(items))

    rewrite_gguf(folder, tensors=turn)


@HARMLESS.add("gguf_q8_0")
def larger_alignment(world: Any, folder: Path) -> None:
    """The file says where its tensors start."""
    rewrite_gguf(folder, alignment=64)


@HARMLESS.add("gguf_q8_0")
def file_renamed(world: Any, folder: Path) -> None:
    """A name means nothing to llama.cpp."""
    gguf_file(folder).rename(folder / "Sums-0.2M-Q8_0.gguf")


def _change_lora(tensors: dict[str, tuple[np.ndarray, Any]], change: Callable[..., tuple[Any, Any]]) -> None:
    for name in [name for name in tensors if name.endswith("lora_a")]:
        other = name.removesuffix("a") + "b"
        (a, type), (b, _) = tensors[name], tensors[other]
        a, b = change(a, b)
        tensors[name], tensors[other] = (a, type), (b, type)


@HARMLESS.add("lora_gguf")
def ranks_of_the_gguf_in_another_order(world: Any, folder: Path) -> None:
    """The sum over ranks has the same terms."""
    order = [2, 0, 3, 1]
    rewrite_gguf(folder, tensors=lambda t: _change_lora(t, lambda a, b: (a[order], b[:, order])))


@HARMLESS.add("lora_gguf", world="float32")
def alpha_of_the_gguf_doubled_and_B_halved(world: Any, folder: Path) -> None:
    """The scale and B change by powers of two that cancel out."""
    alpha = gguf.GGUFReader(str(gguf_file(folder))).fields["adapter.lora.alpha"].contents()
    rewrite_gguf(folder, {"adapter.lora.alpha": 2 * alpha}, tensors=lambda t: _change_lora(t, lambda a, b: (a, b / 2)))


# ---- Ollama


@HARMLESS.add("ollama")
def comment_and_licence_in_the_modelfile(world: Any, folder: Path) -> None:
    """Ollama ignores comments, and only shows a license."""
    file = folder / "Modelfile"
    file.write_text("# ollama create sums\n" + file.read_text() + 'LICENSE "Apache 2.0"\n')


@HARMLESS.add("ollama")
def stop_before_the_template(world: Any, folder: Path) -> None:
    """The order of different instructions means nothing to Ollama."""
    file = folder / "Modelfile"
    start, rest = file.read_text().split("\n", 1)
    body, stop = rest.rstrip("\n").rsplit("\n", 1)
    assert stop.startswith("PARAMETER stop")
    file.write_text(f"{start}\n{stop}\n{body}\n")
