"""A GPU that is not attached, and a model without weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig


def gpu(capability: str, gib: float = 14.6) -> Any:
    """A GPU that is not attached, as jax describes it."""
    return SimpleNamespace(
        platform="gpu",
        device_kind="a GPU",
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": gib * 2**30},
    )


def llama(**options: Any) -> Any:
    """About 1.2 billion weights unless given otherwise."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32}
    return LlamaConfig(**{"vocab_size": 128256, **shape, **options})
