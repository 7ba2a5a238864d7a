"""The tables of `make soak` and `make evidence` refer to tests by name: each of these tests exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


def load_tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS.parent / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("table", "least"), [("GUARANTEES", 40), ("EVIDENCE", 20)])
def test_every_guarantee_has_its_tests(table: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {path.name: path for path in TESTS.rglob("test_*.py")}
    names = [test for row in getattr(load_tool("guarantees", monkeypatch), table) for test in row.tests]
    missing = []
    for name in names:
        file, _, prefix = name.partition("::")
        if not re.search(rf"^def {prefix or 'test_'}", paths[file].read_text("utf-8"), re.MULTILINE):
            missing.append(name)
    assert len(names) >= least
    assert not missing, f"update {table} in tools/guarantees.py"


def test_a_row_fails_if_a_test_is_gone_or_failed_or_too_few_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    guarantees = load_tool("guarantees", monkeypatch)
    rows = load_tool("guarantee_rows", monkeypatch)
    promise = guarantees.Guarantee("name", "part", "how", ("test_a.py::test_one", "test_a.py::test_two"), least=2)

    def passed(*outcomes: str) -> bool:
        names = ("test_one[a]", "test_two", "test_one[b]")
        found = [
            rows.Result(f"test_a.py::{name}", outcome, 1.0, ()) for name, outcome in zip(names, outcomes, strict=False)
        ]
        return bool(rows.row_of(promise, found).passed)

    assert passed("passed", "passed") and passed("passed", "passed", "skipped")
    assert not passed("passed") and not passed("passed", "skipped") and not passed("passed", "failed", "passed")
