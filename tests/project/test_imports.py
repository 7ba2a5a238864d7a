"""The layout: packages import downwards only, libraries have one home each, and ARCHITECTURE.md shows every module.

Every import statement of the package is read, also those inside functions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "trillora"

# Packages and top-level modules from low to high. Each may import what is in the tiers above its own line here, and
# nothing in its own tier or below. A new package needs a place in this list. A module may be lower than its package.
TIERS: tuple[tuple[str, ...], ...] = (
    ("child_process", "errors", "events", "locks", "runs.files", "safe_text", "secrets", "version"),
    ("own_command",),
    ("files",),
    ("recipe", "devices", "engine"),
    ("model",),
    ("data", "shipped"),
    ("runs",),
    ("step", "early"),
    ("prove", "generation"),
    ("evaluation",),
    ("preflight", "tracking", "doctor", "adapters"),
    ("export",),
    ("certify",),
    ("report",),
    ("training", "serving", "launch"),
    ("quickstart", "loaded_run"),
    ("",),  # trillora/__init__.py: the Python API
    ("cli",),
    ("__main__",),
)
HEIGHT = {part: height for height, tier in enumerate(TIERS) for part in tier}

# Outside libraries with few homes; everything else goes through them.
ONLY_IN: dict[str, set[str]] = {
    "torch": {"model", "certify"},
    "torchax": {"model"},
    "transformers": {"model", "certify"},
    "jax": {
        *("devices", "engine", "model", "step", "generation", "evaluation", "preflight", "adapters", "training"),
        *("certify", "serving", "prove"),
    },
    "jaxlib": {"devices", "engine", "model", "step"},
    "optax": {"engine", "step"},
    "pydantic": {"files", "recipe", "model", "preflight", "training", "certify", "serving", "launch"},
    "typer": {"cli"},
    "rich": {"", "cli", "report"},
    "peft": {"certify"},  # the independent reader
    "xllamacpp": {"certify", "export"},
    "gguf": {"model", "export", "certify"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "lm_eval": {"evaluation"},
    "sacrebleu": {"evaluation"},
    "nbformat": {"launch"},
}

# The engine is arithmetic: it uses no files and no environment.
NEVER_IN: dict[str, set[str]] = {"engine": {"os", "io", "pathlib", "shutil", "tempfile", "subprocess", "fsspec"}}
MAX_MODULES = 13  # in one folder


@dataclass(frozen=True)
class Edge:
    source: str  # module, dotted, without the package's name
    target: str  # or the name of an outside package
    inside: bool
    line: int


def part_of(module: str) -> str:
    return module if module in HEIGHT else module.partition(".")[0]


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
        if part not in HEIGHT:
            found.append(f"{file.name}: '{part}' has no place in TIERS")
            continue
        if part in NEVER_IN:
            found += [f"{module or package.name}:{line} opens a file" for line in opened_files(file)]
        for edge in dict.fromkeys(edges_of(file, package)):  # a statement may import several names
            num_edges += 1
            where = f"{module or package.name}:{edge.line} imports {edge.target or package.name}"
            if edge.inside:
                target = part_of(edge.target)
                if target != part and HEIGHT[target] >= HEIGHT[part]:
                    found.append(f"{where}: {target or package.name} is not below {part or package.name}")
            elif part not in ONLY_IN.get(edge.target, {part}):
                found.append(f"{where}: only {sorted(ONLY_IN[edge.target])} may")
            elif edge.target in NEVER_IN.get(part, set()):
                found.append(f"{where}: {part} uses no files")
    return found, num_modules, num_edges


def test_packages_import_downwards_only() -> None:
    found, num_modules, num_edges = faults(PACKAGE)
    assert found == []
    assert num_modules > 120 and num_edges > 700


def tree_of(architecture: str) -> set[str]:
    """The modules named in the tree of ARCHITECTURE.md: a line ends in `/` or holds modules of the folder above it."""
    block = re.search(r"```\ntrillora/\n(.*?)```", architecture, re.DOTALL)
    assert block is not None, "ARCHITECTURE.md has no tree"
    modules: set[str] = set()
    folders: list[tuple[int, str]] = [(-1, "")]
    for line in block[1].splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        while folders[-1][0] >= indent:
            folders.pop()
        if folder := re.match(r"(\w+)/", text):
            folders.append((indent, f"{folders[-1][1]}{folder[1]}/"))
        else:
            modules |= {f"{folders[-1][1]}{name}" for name in text.partition("  #")[0].split()}
    return modules


def test_the_tree_in_architecture_shows_every_module() -> None:
    shown = tree_of((ROOT / "ARCHITECTURE.md").read_text("utf-8"))
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    real = {str(path) for path in paths if path.name not in ("__init__", "__main__")}
    assert shown - real == set(), "shown, but not there"
    assert real - shown == set(), "there, but not shown"


def test_a_missing_and_a_removed_module_are_noticed_in_the_tree() -> None:
    lines = [
        "trillora/",
        "  cli  errors",
        "  data/   rows to batches",
        "    pack",
        "    reading/",
        "      files  # on disk",
    ]
    tree = "\n".join(["```", *lines, "```"])
    assert tree_of(tree) == {"cli", "errors", "data/pack", "data/reading/files"}


def test_no_folder_has_too_many_modules() -> None:
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    modules = {folder: [file for file in folder.glob("*.py") if file.name != "__init__.py"] for folder in folders}
    crowded = {str(folder): len(files) for folder, files in modules.items() if len(files) > MAX_MODULES}
    assert crowded == {} and len(folders) > 20


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("errors.py", "from trillora import recipe"),
        ("errors.py", "import trillora.recipe.load"),
        ("errors.py", "from trillora.recipe.load import load_recipe"),
        ("errors.py", "from .recipe import load"),
        ("errors.py", "def f():\n    from trillora.recipe.load import load_recipe"),
        ("errors.py", "import importlib\nimportlib.import_module('trillora.recipe.load')"),
        ("model/lora.py", "from trillora.data.pack import pack"),
        ("model/lora.py", "from ..data import pack"),
        ("model/__init__.py", "from ..data import pack"),
        ("data/pack.py", "from trillora.training import loop"),
        ("data/pack.py", "import jax.numpy as jnp"),
        ("data/pack.py", "def f():\n    import torch"),
        ("recipe/load.py", "import jax"),
        ("recipe/load.py", "from trillora.engine import step"),
        ("cli/verbs.py", "def verb():\n    import jax"),
        ("engine/step.py", "import pydantic"),
        ("engine/step.py", "from trillora.recipe.load import load_recipe"),
        ("engine/step.py", "from torch import nn"),
        ("engine/step.py", "from pathlib import Path"),
        ("engine/step.py", "open('x')"),
        ("training/loop.py", "import transformers"),
        ("newcomer.py", "import math"),
    ],
)
def test_a_planted_upward_import_is_caught(tmp_path: Path, file: str, code: str) -> None:
    package = tmp_path / "trillora"
    names = ["errors.py", "recipe/load.py", "engine/step.py", "model/lora.py", "data/pack.py", "training/loop.py", file]
    for name in names:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        for created in (package / "__init__.py", package / name, (package / name).parent / "__init__.py"):
            created.touch()
    (package / "data" / "pack.py").write_text("from trillora.recipe.load import load_recipe\n")
    if (package / "newcomer.py") != package / file:
        assert faults(package)[0] == []
    (package / file).write_text(code + "\n")
    assert len(faults(package)[0]) == 1


def test_no_module_makes_an_array_when_it_is_imported() -> None:
    """The first array starts jax's threads and takes the devices: a process that is forked later would wait for ever,
    and several hosts could not be joined any more."""
    program = """
import contextlib, importlib, pkgutil, trillora
from jax._src import xla_bridge
from trillora.errors import TrilloraError
for module in pkgutil.walk_packages(trillora.__path__, "trillora."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(TrilloraError):  # the harness, which needs a package that is not installed
            importlib.import_module(module.name)
        assert not xla_bridge.backends_are_initialized(), module.name
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "imported", done.stderr[-2000:]
