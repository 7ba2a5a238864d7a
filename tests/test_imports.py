"""Layers import downwards only. Every import statement of the package is read, also those inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "trillora"

# What each part may import of the others. A new module needs a line here: that is where its place is decided.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "events": set(),
    "durable": set(),
    "masking": set(),
    "scores": set(),
    "yaml_text": {"errors"},
    "recipe_errors": {"errors"},
    "recipe": set(),
    "config": {"errors", "events", "yaml_text", "recipe", "recipe_errors"},
    "hardware": {"errors", "events"},
    "cache": set(),
    "stopping": set(),
    "health": set(),
    "storage": {"errors", "durable"},
    "checkpoint": {"errors", "events", "storage"},
    "run_lock": {"errors", "durable"},
    "run_folder": {"errors", "events", "durable"},
    "identity": {"errors", "recipe"},
    "trackers": {"errors", "events", "masking"},
    "engine": {"errors"},
    "data": {"errors", "events"},
    "dataset": {"errors", "events", "config", "recipe", "cache", "data"},
    "mesh": {"errors", "events", "hardware"},
    "model": {"errors", "events", "cache", "durable", "hardware", "engine", "mesh"},
    "assembly": {"errors", "events", "recipe", "hardware", "mesh", "engine", "model"},
    "choices": {"errors", "events", "config", "recipe", "hardware", "mesh", "assembly"},
    "data_report": {"errors", "events", "data", "dataset", "model", "recipe"},
    "run_report": {"errors", "durable", "masking", "data_report"},
    "prompts": {"errors", "data"},
    "generate": {
        *("errors", "events", "config", "recipe", "mesh", "engine", "model", "assembly", "choices", "prompts"),
    },
    "chat": {"errors", "engine", "generate", "prompts"},
    "snapshot": {"errors", "assembly", "engine", "mesh", "model"},
    "stage_data": {"errors", "events", "data", "data_report", "dataset", "identity", "recipe"},
    "compile_plan": {"errors", "events"},
    "measure": {
        *(
            "compile_plan",
            "errors",
            "events",
            "assembly",
            "data",
            "engine",
            "generate",
            "mesh",
            "model",
            "prompts",
            "stage_data",
        ),
    },
    "loop": {
        *(
            "compile_plan",
            "errors",
            "events",
            "assembly",
            "checkpoint",
            "data",
            "engine",
            "health",
            "measure",
            "mesh",
            "model",
        ),
        *("run_folder", "run_report", "snapshot", "stage_data", "stopping"),
    },
    "run_facts": {"assembly", "identity", "masking", "recipe", "stage_data", "version"},
    "trainer": {
        *("durable", "errors", "events", "config", "recipe", "hardware", "mesh", "engine", "data", "model", "cache"),
        *("assembly", "choices", "checkpoint", "health", "identity", "loop", "masking", "measure", "run_facts"),
        *("run_folder", "run_lock", "snapshot", "stage_data", "stopping", "storage", "trackers", "compile_plan"),
    },
    "evaluate": {
        *("errors", "events", "config", "recipe", "data", "dataset", "durable", "engine", "mesh", "model"),
        *("assembly", "generate", "prompts", "scores"),
    },
    "eval_table": {"data_report", "evaluate", "scores"},
    "quickstart_data": set(),
    "quickstart": {"errors", "events", "config", "durable", "evaluate", "run_report", "trainer"},
    "preflight": {
        *(
            "errors",
            "events",
            "cache",
            "config",
            "durable",
            "recipe",
            "hardware",
            "mesh",
            "model",
            "assembly",
            "choices",
        ),
        "stage_data",
    },
    "doctor": {"cache"},
    "console": {"doctor", "errors", "events"},
    "cli": {
        *("", "errors", "events", "config", "recipe", "console", "hardware", "trainer", "quickstart", "stopping"),
        *("data_report", "doctor", "engine", "generate", "chat", "evaluate", "eval_table", "run_report"),
        "preflight",
    },
    # The package itself: the Python API.
    "": {"errors", "events", "version", "config", "recipe", "console", "data_report", "preflight", "trainer"},
    "__main__": {"cli"},
}

# Outside packages with one home each; everybody else goes through it.
ONLY_IN: dict[str, set[str]] = {
    "torch": {"model"},
    "torchax": {"model"},
    "transformers": {"model"},
    "jax": {
        *("model", "engine", "mesh", "assembly", "choices", "generate", "snapshot", "measure", "loop", "trainer"),
        *("evaluate", "preflight", "compile_plan"),
    },
    "jaxlib": {"model", "engine", "mesh", "assembly"},
    "optax": {"engine", "assembly"},
    "pydantic": {"config", "recipe", "recipe_errors"},
    "typer": {"cli"},
    "rich": {"", "cli", "console", "data_report", "eval_table", "preflight"},
    "peft": set(),
}

# The engine is arithmetic: it sees no files and no environment.
NEVER_IN: dict[str, set[str]] = {"engine": {"os", "io", "pathlib", "shutil", "tempfile", "subprocess", "fsspec"}}


@dataclass(frozen=True)
class Edge:
    source: str  # module, dotted, without the package's name
    target: str  # likewise, or the name of an outside package
    inside: bool
    line: int


def part_of(module: str) -> str:
    return module.partition(".")[0]


def module_name(file: Path, package: Path) -> str:
    parts = list(file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, module: str, package: Path, *, is_package: bool) -> Iterator[str]:
    """Full dotted names that a node imports, `import_module("…")` included."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=source, names=names, level=level):
            prefix = source or ""
            if level:
                around = [package.name, *filter(None, module.split("."))]
                around = around[: len(around) - (level - 1 if is_package else level)]
                prefix = ".".join([*around, *([source] if source else [])])
            # `from trillora import config` imports a module, `from trillora.recipe.load import Recipe` a name in one.
            yield from (f"{prefix}.{alias.name}" for alias in names)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__"):
                yield name


def edges_of(file: Path, package: Path) -> Iterator[Edge]:
    module = module_name(file, package)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        line = getattr(node, "lineno", 0)
        for name in imported_names(node, module, package, is_package=file.name == "__init__.py"):
            first, _, rest = name.partition(".")
            if first != package.name:
                yield Edge(module, first, False, line)
            else:
                yield Edge(module, module_or_owner(rest, package), True, line)


def module_or_owner(name: str, package: Path) -> str:
    """The longest leading part of a dotted name that is a module of the package."""
    while name:
        path = package.joinpath(*name.split("."))
        if path.with_suffix(".py").exists() or path.is_dir():
            return name
        name = name.rpartition(".")[0]
    return ""


def opened_files(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno


def faults(package: Path) -> tuple[list[str], int, int]:
    """Every forbidden import of a package, and how many modules and imports were looked at."""
    found: list[str] = []
    num_modules = num_edges = 0
    for file in sorted(package.rglob("*.py")):
        num_modules += 1
        module = module_name(file, package)
        part = part_of(module)
        if part not in MAY_IMPORT:
            found.append(f"{file.name}: '{part}' has no line in MAY_IMPORT: decide what it may import")
            continue
        if part in NEVER_IN:
            found += [f"{module or package.name}:{line} opens a file" for line in opened_files(file)]
        for edge in dict.fromkeys(edges_of(file, package)):  # a statement may import several names
            num_edges += 1
            where = f"{module or package.name}:{edge.line} imports {edge.target or package.name}"
            if edge.inside:
                target = part_of(edge.target)
                if target != part and target not in MAY_IMPORT[part]:
                    found.append(f"{where}: {part or package.name} may import only {sorted(MAY_IMPORT[part])}")
            elif part not in ONLY_IN.get(edge.target, {part}):
                found.append(f"{where}: only {sorted(ONLY_IN[edge.target])} may")
            elif edge.target in NEVER_IN.get(part, set()):
                found.append(f"{where}: {part} sees no files")
    return found, num_modules, num_edges


def test_layers_import_downwards_only() -> None:
    found, num_modules, num_edges = faults(PACKAGE)
    assert found == []
    assert num_modules == len([path for path in PACKAGE.rglob("*") if path.suffix == ".py"])
    assert num_modules >= 20
    assert num_edges >= 120


def test_the_table_itself_has_no_cycle() -> None:
    reached: dict[str, set[str]] = {}

    def below(part: str, path: tuple[str, ...]) -> set[str]:
        assert part not in path, f"cycle: {' -> '.join([*path, part])}"
        if part not in reached:
            inner = [below(target, (*path, part)) for target in MAY_IMPORT[part]]
            reached[part] = MAY_IMPORT[part].union(*inner)
        return reached[part]

    for part in MAY_IMPORT:
        if part not in ("", "cli"):  # cli reads the version; the package's own names are loaded on use
            below(part, ())
    assert "model" in reached["trainer"] and "trainer" not in reached["model"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("errors.py", "from trillora import config"),
        ("errors.py", "import trillora.recipe.load"),
        ("errors.py", "from trillora.recipe.load import Recipe"),
        ("errors.py", "from .config import Recipe"),
        ("errors.py", "from . import config"),
        ("errors.py", "def f():\n    from trillora.recipe.load import Recipe"),
        ("errors.py", "import importlib\nimportlib.import_module('trillora.recipe.load')"),
        ("model/lora.py", "from trillora.data.pack import pack"),
        ("model/lora.py", "from ..data import pack"),
        ("model/__init__.py", "from ..data import pack"),
        ("data/pack.py", "from trillora.model import lora"),
        ("data/pack.py", "import jax.numpy as jnp"),
        ("data/pack.py", "def f():\n    import torch"),
        ("config.py", "import jax"),
        ("cli.py", "def verb():\n    import jax"),
        ("engine/step.py", "import pydantic"),
        ("engine/step.py", "from trillora.recipe.load import Recipe"),
        ("engine/step.py", "from torch import nn"),
        ("engine/step.py", "from pathlib import Path"),
        ("engine/step.py", "open('x')"),
        ("trainer.py", "import transformers"),
        ("newcomer.py", "import math"),
    ],
)
def test_a_planted_upward_import_is_caught(tmp_path: Path, file: str, code: str) -> None:
    package = tmp_path / "trillora"
    files = ["__init__.py", "config.py", "errors.py", "model/__init__.py", "model/lora.py", "data/__init__.py"]
    for name in [*files, "data/pack.py", "engine/__init__.py", "engine/step.py", file]:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("from trillora.errors import TrilloraError\n" if name == "config.py" else "")
    if (package / "newcomer.py") != package / file:
        assert faults(package)[0] == []
    (package / file).write_text(code + "\n")
    assert len(faults(package)[0]) == 1
