"""Mistakes that people make at the command line, for tests and for benchmarks/mistakes.py.

`write_world` makes a folder in which `trillora ARGUMENTS` is each of them; `MISTAKES` has the arguments and a part of
the answer. Nothing of this may import jax, torch or transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trillora.recipe.load import load_recipe
from trillora.recipe.run_file import dump

TYPO = ("data.template={user: '{{ quest }}', assistant: '{{ answer }}'}",)
OPEN = ("data.template={user: '{{ question', assistant: '{{ answer }}'}",)
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelled option": (("train", "ok.yaml", "train.lerning_rate=1", "--out", "new"), "did you mean"),
    "missing data file": (("train", "missing.yaml", "--out", "new"), "did you mean 'qa.csv'?"),
    "rows of no format": (("train", "ok.yaml", "data=odd.csv", "--out", "new"), "matches no known format"),
    "row that is no JSON": (("train", "ok.yaml", "data=bad.jsonl", "--out", "new"), "bad.jsonl:2"),
    "typo in a template": (("train", "ok.yaml", *TYPO, "--out", "new"), "it has no 'quest'"),
    "template that is none": (("train", "ok.yaml", *OPEN, "--out", "new"), "not a valid Jinja template"),
    "rows of two formats": (("train", "ok.yaml", "data=mixed.json", "--out", "new"), "mixed.json:3"),
    "wrong LoRA target": (("train", "ok.yaml", "lora.targets=[q_prj]", "--out", "new"), "did you mean 'q_proj'?"),
    "missing model": (("train", "ok.yaml", "model=./modle", "--out", "new"), "did you mean 'model'?"),
    "finished run": (("train", "ok.yaml", "--out", "runs/done"), "already contains a finished run"),
    "wrong run in chat": (("chat", "runs/dome"), "did you mean 'done'?"),
    "wrong run in eval": (("eval", "runs/dome"), "did you mean 'done'?"),
    "wrong run in serve": (("serve", "runs/dome", "--port", "0"), "did you mean 'done'?"),
    "wrong run in export": (("export", "runs/dome", "--to", "merged"), "did you mean 'done'?"),
}


def write_world(folder: Path) -> None:
    """The files that the mistakes are made with."""
    (folder / "qa.csv").write_text("question,answer\nWhat is 1+1?,2\nWhat is 2+2?,4\n")
    (folder / "odd.csv").write_text("Frage;Antwort\n1+1?;2\n")
    (folder / "bad.jsonl").write_text('{"text": "one"}\n{"text": "two"\n')
    (folder / "mixed.json").write_text('[\n{"text": "one"},\n{"question": "1+1?", "answer": "2"}\n]\n')
    (folder / "ok.yaml").write_text("model: ./model\ndata: qa.csv\n")
    (folder / "missing.yaml").write_text("model: ./model\ndata: qs.csv\n")
    (folder / "model").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    names = (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.v_proj", f"{layer}.mlp.up_proj", "model.embed_tokens")
    weights = {f"{name}.weight": np.zeros((4, 4), np.float32) for name in names}
    save_file(weights, folder / "model" / "model.safetensors")
    run = folder / "runs" / "done"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    (run / "recipe.json").write_text(dump(load_recipe(folder / "ok.yaml")))
