"""Functions and files stay short, and a class name has one meaning (CONTRIBUTING.md, tools/code_counts.py)."""

from __future__ import annotations

from pathlib import Path

from code_counts import (
    LONGEST_FILE,
    LONGEST_FUNCTION,
    PACKAGE,
    long_functions,
    modules_below,
    repeated_classes,
    with_any,
)

ROOT = Path(__file__).parents[2]
MODULES = modules_below(PACKAGE)
MOST_WITH_ANY = 430


def test_the_limits_are_the_ones_of_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"No function is longer than {LONGEST_FUNCTION} lines and no file longer than {LONGEST_FILE}." in text


def test_no_function_is_too_long() -> None:
    assert sum(len(module.functions) for module in MODULES) > 2000
    assert list(long_functions(MODULES)) == []


def test_no_file_is_too_long() -> None:
    assert len(MODULES) > 200
    assert [str(module.path) for module in MODULES if len(module.lines) > LONGEST_FILE] == []


def test_a_class_name_is_defined_once() -> None:
    assert sum(len(module.classes) for module in MODULES) > 300
    assert list(repeated_classes(MODULES)) == []


def test_signatures_with_any_do_not_become_more() -> None:
    assert len(with_any(MODULES)) <= MOST_WITH_ANY


def test_a_long_function_any_and_a_repeated_name_are_found(tmp_path: Path) -> None:
    body = "    pass\n" * LONGEST_FUNCTION
    (tmp_path / "a.py").write_text(f"class Same: ...\ndef long(x: list[Any]) -> None:\n{body}")
    (tmp_path / "b.py").write_text(f"class Same: ...\ndef short(x: 'Company') -> None:\n{body[:-9]}")
    modules = modules_below(tmp_path)
    assert [place.rpartition(": ")[2] for place in long_functions(modules)] == ["long, 61 lines"]
    assert [place.rpartition(": ")[2] for place in with_any(modules)] == ["long"]
    assert [name.partition(":")[0] for name in repeated_classes(modules)] == ["Same"]
