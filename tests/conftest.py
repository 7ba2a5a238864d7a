"""Settings every test needs before jax is imported: eight virtual CPU devices, and no thread pools fighting."""

from __future__ import annotations

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # the same arithmetic, compiled in half the time
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiling for a TPU takes longest: begun first, it does not keep one worker busy alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("tpu_compiler") is None)
