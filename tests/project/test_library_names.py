"""Every name that is imported from a library exists in the oldest supported version of that library.

Most environments have newer versions. So the names are compared with a record, which
tools/library_names.py writes with the oldest libraries; with those, each name is really imported.
"""

from __future__ import annotations

import library_names
import pytest
from library_names import all_imported_names, as_statement, exists, has_oldest_libraries, libraries, recorded_statements

pytestmark = pytest.mark.core

SOME = 100  # names; 133 when this was written

CODE = """
import jax.numpy as jnp, os
from transformers.core_model_loading import WeightRenaming, apply_renamings
from . import torch

def late():
    from optax import adamw as optimizer
    try:
        from jax._src.cudnn import fused
    except (ImportError, AttributeError):
        import jaxlib
    try:
        import torch
    except ValueError:
        pass
"""


def test_imported_names_exist_in_the_oldest_supported_libraries() -> None:
    names = all_imported_names()
    assert len(names) > SOME
    if has_oldest_libraries():
        missing = [as_statement(*name) for name in sorted(names) if not exists(*name)]
        assert not missing, f"These do not exist in the oldest supported libraries: {missing}"
        return
    unknown = sorted({as_statement(*name) for name in names} - recorded_statements())
    assert not unknown, (
        f"These may not exist in the oldest supported libraries: {unknown}. Run `make compat-oldest`. If they do "
        "exist, record them: .venv-oldest/bin/python tools/library_names.py"
    )


def test_all_imports_are_found_except_optional_ones() -> None:
    assert {"jax", "jaxlib", "torch", "transformers", "huggingface_hub", "yaml"} <= libraries()
    assert library_names.imported_names(CODE, libraries()) == {
        ("jax.numpy", ""),
        ("transformers.core_model_loading", "WeightRenaming"),
        ("transformers.core_model_loading", "apply_renamings"),
        ("optax", "adamw"),
        ("jaxlib", ""),
        ("torch", ""),
    }


def test_a_missing_name_and_a_missing_module_do_not_exist() -> None:
    assert exists("json", "") and exists("json", "loads") and exists("json", "tool")  # tool is a module
    assert not exists("json", "no_such_name") and not exists("json.no_such_module", "")
