"""Runs to merge, by kind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import tiny_models
from chat_tokenizers import chat_tokenizer
from peft_parity import build, quiet_peft

from trillora.export.source import ExportSource
from trillora.model.adapters import load_adapter
from trillora.model.loading.source import OpenModel, load_config

LINEAR = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}


PATTERNS = {
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7},
    "alpha_pattern": {"v_proj": 3},
    "use_rslora": True,
}


# name -> the base, options of PEFT, whether the head has a weight of its own afterwards
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("untied", LINEAR, True),
    "rslora and patterns": ("tied", PATTERNS, False),
    "dora": ("tied", {**LINEAR, "use_dora": True}, False),
    "dora on a tied head": ("tied", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}, True),
    "tied head": ("tied", {"target_modules": ["q_proj", "lm_head"]}, True),
    "tied embedding": ("scaled", {"target_modules": ["q_proj", "embed_tokens"]}, True),
    "untied embedding": ("untied", {"target_modules": ["q_proj", "embed_tokens"]}, True),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, False),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}, False),
    "experts": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}, True),
    "old tokens": ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": [9, 5]}, False),
    "whole modules": ("untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, True),
    "whole head of a tied model": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    "whole embedding of a tied model": (
        "tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        True,
    ),
}


def torch_base(name: str, num_new: int = 0) -> Any:
    return build(name, num_new) if name in ("tied", "untied", "scaled") else tiny_models.build(name)


def source_of(
    folder: Path, base: str, options: dict[str, Any], *, num_new: int = 0, dtype: Any = None
) -> tuple[ExportSource, Any]:
    """A base model and an adapter that PEFT made, in folders; and PEFT's model."""
    plain = torch_base(base)
    if dtype is not None:
        plain = plain.to(dtype)
    plain.save_pretrained(folder / "base")
    chat_tokenizer("chatml").save_pretrained(folder / "base")
    adapted = quiet_peft(torch_base(base, num_new), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT cannot see whether the vocabulary has grown
        adapted.save_pretrained(folder / "adapter")
    return open_folder(folder), adapted


def open_folder(folder: Path) -> ExportSource:
    spec, matrices = load_adapter(folder / "adapter")
    base = OpenModel(folder / "base", load_config(folder / "base"), chat_tokenizer("chatml"), "some/base")
    return ExportSource("test", None, folder / "adapter", base, "some/base", spec, matrices, None, ())
