"""Merges an adapter into a model of random weights, and prints how much memory that needed. Needs its own process:

python tests/support/merge_in_little_memory.py FOLDER NUM_LAYERS WIDTH VOCABULARY
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch
from chat_tokenizers import chat_tokenizer
from safetensors.torch import save_file
from transformers import LlamaConfig

from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.model.adapters import adapter_files
from trillora.model.bridge import CausalLM
from trillora.model.lora_spec import LoraSpec


def make(folder: Path, num_layers: int, width: int, vocabulary: int) -> None:
    """One file per layer, so that making the model does not need its memory either."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        intermediate_size=width * 11 // 4 // 128 * 128,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    model = CausalLM(config, lora=LoraSpec(rank=16), scan=False)
    base = folder / "base"
    base.mkdir(parents=True)
    parts: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.module.named_parameters():
        if "lora_" not in name:
            key = name.split("layers.")[-1].split(".")[0] if "layers." in name else name
            parts.setdefault(key, []).append((name, parameter.shape))
    weight_map = {}
    for key, tensors in parts.items():
        file = f"model-{key}.safetensors"
        save_file({n: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for n, shape in tensors}, base / file)
        weight_map |= {name: file for name, _ in tensors}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(base)
    chat_tokenizer("chatml").save_pretrained(base)
    arrays = {
        name: torch.randn(leaf.part_shape).mul_(0.01).numpy()
        for leaf in model.adapter_layout.values()
        for name in leaf.names
    }
    (folder / "adapter").mkdir()
    for name, data in adapter_files(arrays, model.module, model.targets, model.lora, str(base)).items():
        (folder / "adapter" / name).write_bytes(data)


def main(folder: Path, *sizes: int) -> None:
    if not (folder / "adapter").exists():
        make(folder, *sizes)
        return
    source = open_source(str(folder / "adapter"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    exported = export_merged(source, folder / "merged")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"before_mb": before // 1024, "peak_mb": after // 1024, "model_mb": exported.num_bytes // 2**20}
    print(json.dumps({**facts, "seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
