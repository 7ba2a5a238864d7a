"""A run on disk: the names of its files, and what `SavedRun` says about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from trillora.runs import files

PACKAGE = Path(__file__).parents[2] / "src" / "trillora"
HOME = Path("runs", "files.py")
NAMES = {value for name, value in vars(files).items() if name.isupper()}
# Words with other meanings too: they count where a path is joined or compared.
WORDS = {name for name in NAMES if "." not in name}
CALLS = {"glob", "ignore_patterns", "join", "joinpath", "rglob", "startswith", "write"}


def texts(node: ast.AST) -> Iterator[str]:
    for child in [node, *getattr(node, "elts", [])]:
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def named(node: ast.AST) -> Iterator[str]:
    """The names of a run's files that a piece of code has."""
    match node:
        case ast.Constant(value=str(text)) if text in NAMES - WORDS:
            yield text
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            yield from (text for side in (left, right) for text in texts(side) if text.partition("/")[0] in WORDS)
        case ast.Compare(left=ast.Attribute(attr="name"), comparators=others):
            yield from (text for other in others for text in texts(other) if text in WORDS)
        case ast.Call(func=ast.Attribute(attr=called), args=arguments) if called in CALLS:
            yield from (text for each in arguments for text in texts(each) if text.partition("/")[0] in WORDS)


def places(package: Path) -> list[str]:
    return [
        f"{file.relative_to(package)}:{node.lineno} {name}"  # type: ignore[attr-defined]
        for file in sorted(package.rglob("*.py"))
        if file.relative_to(package) != HOME
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for name in named(node)
    ]


def test_the_names_of_a_runs_files_have_one_home() -> None:
    assert places(PACKAGE) == []
    assert len(NAMES) > 12 and {"adapter", "adapters", "checkpoints"} <= WORDS


@pytest.mark.parametrize(
    "code",
    [
        'folder / "run.json"',
        'NAME = "recipe.json"',
        'run / "adapter"',
        'run / "adapter" / "config.json"',
        'run / "adapters/code"',
        'folder.parent.name == "adapters"',
        'run.glob("checkpoints/*")',
        'os.path.join(run, "adapter")',
        "f\"{run / 'exports'}\"",
    ],
)
def test_a_planted_name_is_found(tmp_path: Path, code: str) -> None:
    for name in ("runs/files.py", "export/source.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{code}\n")
    [found] = places(tmp_path)
    assert found.startswith("export/source.py:1 ")


@pytest.mark.parametrize("code", ['sides = ("base", "adapter")', '"""The content of run.json."""', 'kind == "adapter"'])
def test_other_uses_of_these_words_are_none(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(f"{code}\n")
    assert places(tmp_path) == []
