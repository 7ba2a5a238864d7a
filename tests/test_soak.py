"""The table of `make soak` refers to tests by name: each of these tests exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_guarantee_has_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("soak", TESTS.parent / "tools" / "soak.py")
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", soak)  # dataclasses look their module up
    spec.loader.exec_module(soak)
    names = [test for guarantee in soak.GUARANTEES for test in guarantee.tests]
    missing = []
    for name in names:
        file, _, prefix = name.partition("::")
        if not re.search(rf"^def {prefix or 'test_'}", (TESTS / file).read_text("utf-8"), re.MULTILINE):
            missing.append(name)
    assert len(names) >= 40
    assert not missing, "update GUARANTEES in tools/soak.py"
