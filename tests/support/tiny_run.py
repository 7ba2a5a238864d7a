"""A small complete run: a random Llama with a real chat tokenizer in a folder, a file of chats, and a recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from chat_tokenizers import chat_tokenizer
from transformers import LlamaConfig

from trillora.data.batches import Batches
from trillora.data.open import open_dataset
from trillora.data.stage import training_batches
from trillora.events import ignore_events
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import open_storage
from trillora.model.loading.source import load_tokenizer
from trillora.model.loading.wrapper import auto_class
from trillora.recipe.resolve import StepSettings, given_settings
from trillora.recipe.schema import MeshSection, Recipe

TIMES = {
    "seconds",
    "seconds_left",
    "tokens_per_second",
    "memory_gib",
    "peak_fraction",
}  # depend on the clock or the machine
# Wide enough that weights are sharded over a mesh (`mesh.SMALL`).
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def llama(num_layers: int = 2, width: int = 64) -> LlamaConfig:
    """As small as most tests need: a few hundredths of a second per step. Its weights are large enough for an adapter
    to learn in ten steps. One layer is not scanned, which saves a third of the time to trace and compile: for tests of
    what happens around the model."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _llama(num_hidden_layers=num_layers, initializer_range=0.1, **sizes)


def long_llama(width: int) -> LlamaConfig:
    """For rows of up to 1024 tokens. Attention is most of the work there, so it has one layer and one head."""
    config = llama(1, width)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.head_dim, config.max_position_embeddings = width, 1024
    return config


def wide_llama(num_layers: int = 2) -> LlamaConfig:
    return _llama(num_hidden_layers=num_layers, **WIDE)


def _llama(**sizes: Any) -> LlamaConfig:
    vocabulary = len(chat_tokenizer("chatml"))
    return LlamaConfig(**sizes, vocab_size=vocabulary, max_position_embeddings=256, tie_word_embeddings=True)


def write_model(folder: Path, config: Any | None = None) -> Path:
    """Weights as transformers saves them, and a ChatML tokenizer."""
    torch.manual_seed(0)
    config = config or llama()
    model = getattr(transformers, auto_class(config)).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    chat_tokenizer("chatml").save_pretrained(folder)
    return folder


def write_both(folder: Path, config: Any | None = None, num_rows: int = 21) -> Path:
    """The model and the chats at the paths that `recipe` uses."""
    write_model(folder / "model", config)
    write_chats(folder / "chats.jsonl", num_rows)
    return folder


def write_chats(path: Path, num_rows: int = 21) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {a + 1}?"},
                {"role": "assistant", "content": f"It is {2 * a + 1}." * (1 + a % 3)},
            ]
        }
        for a in range(num_rows)
    ]
    return _write_rows(path, rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_pairs(path: Path, num_rows: int = 40) -> Path:
    """The chosen answer is right and short, the rejected one wrong and long."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {a + 1}?"}],
            "chosen": [{"role": "assistant", "content": f"{2 * a + 1}"}],
            "rejected": [{"role": "assistant", "content": f"It may be {3 * a}!"}],
        }
        for a in range(num_rows)
    ]
    return _write_rows(path, rows)


def write_labels(path: Path, num_rows: int = 40) -> Path:
    """Every second answer is good."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {a + 1}?"}],
            "completion": [{"role": "assistant", "content": f"{2 * a + 1}" if a % 2 else f"It may be {3 * a}!"}],
            "label": bool(a % 2),
        }
        for a in range(num_rows)
    ]
    return _write_rows(path, rows)


def recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe for the model and the chats in `folder`, as a mapping; `sections` are merged into it."""
    settings: dict[str, Any] = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "chats.jsonl")},
        "lora": {"rank": 4, "alpha": 8},
        "train": {"sequence_length": 64, "batch_size": 8, "steps": 4, "learning_rate": 1e-2, "schedule": "constant"},
        "hardware": {"devices": 1},
        "engine": {},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return settings


def step_settings(stage: Recipe) -> StepSettings:
    """The settings of a recipe that fixes everything `assemble` reads."""
    given = {"backend": "cpu", "num_devices": 1, "mesh": MeshSection(), **given_settings(stage)}
    return StepSettings(**given)


def batches_of(stage: Recipe, model: Path) -> Batches:
    """What a recipe trains on, with the tokenizer of a model."""
    return training_batches(open_dataset(stage, load_tokenizer(model), ignore_events), stage)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(run: Path) -> Checkpoints:
    return Checkpoints(open_storage(run / "checkpoints"))


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The metrics of a run, without the fields that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if kind in (None, line["kind"])]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def copy_interrupted(run: Path, again: Path, step: int) -> None:
    """A copy of a finished run as it was after a step."""
    shutil.copytree(run, again)
    shutil.rmtree(again / "adapter")
    checkpoints_of(again).remove_after(step)
    (again / "saved.json").unlink()


def assert_same(run: Path, whole: Path) -> None:
    """Adapter, last checkpoint and all metrics are equal, bit for bit."""
    assert metrics(run) == metrics(whole)
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()
    last = checkpoints_of(whole).steps()[-1]
    files, expected = (checkpoints_of(r).read(last) for r in (run, whole))
    for file in ("state.safetensors", "adapter_model.safetensors"):
        assert files[file] == expected[file]
    assert json.loads(files["state.json"])["position"] == json.loads(expected["state.json"])["position"]
