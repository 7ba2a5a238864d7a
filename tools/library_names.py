"""Records the names that Trillora imports from the libraries with lower bounds, in tests/golden/library-names.json.

    .venv-oldest/bin/python tools/library_names.py    after `make compat-oldest`, which makes that environment

The record is a list of statements, such as "from jax.sharding import Mesh", from all of src/trillora. Each is tried
here with the oldest supported libraries, so the record has only names that exist there.
tests/project/test_library_names.py compares the code with it in every environment. Imports inside
`try: ... except ImportError` are optional and left out.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from setup_env import ENDS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "trillora"
RECORD = ROOT / "tests" / "golden" / "library-names.json"
OTHER_NAMES = {"pyyaml": "yaml"}  # packages that are imported by another name
WITH_OTHERS = {"jaxlib"}  # comes with jax, in the same version


def libraries() -> set[str]:
    """The packages with a lower bound in pyproject.toml, by the names that they are imported by."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    packages = (re.split(r"[^\w-]", requirement)[0].lower() for requirement in declared)
    return {OTHER_NAMES.get(package, package) for package in packages} | WITH_OTHERS


def imported_names(source: str, known: set[str]) -> set[tuple[str, str]]:
    """(module, name) of everything that Python code imports from known libraries; an empty name for the module alone.

    >>> sorted(imported_names("import jax.numpy as jnp\\nfrom torch import nn", {"jax", "torch"}))
    [('jax.numpy', ''), ('torch', 'nn')]
    """
    found: set[tuple[str, str]] = set()
    for node in _required(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] in known}


def all_imported_names() -> set[tuple[str, str]]:
    known = libraries()
    files = sorted(SOURCE.rglob("*.py"))
    return set().union(*(imported_names(file.read_text("utf-8"), known) for file in files))


def recorded_statements() -> set[str]:
    return set(json.loads(RECORD.read_text("utf-8")))


def exists(module: str, name: str) -> bool:
    """Whether the installed library has the name."""
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def has_oldest_libraries() -> bool:
    torch, others = ENDS["oldest"]
    pins = [*others, f"torch=={torch}"]
    return all(version(package).partition("+")[0] == wanted for package, wanted in (pin.split("==") for pin in pins))


def as_statement(module: str, name: str) -> str:
    return f"from {module} import {name}" if name else f"import {module}"


def _required(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what may fail to be imported."""
    if isinstance(node, ast.Try) and any(_catches_import_error(handler) for handler in node.handlers):
        below: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
    else:
        below = list(ast.iter_child_nodes(node))
    yield node
    for child in below:
        yield from _required(child)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    return bool(caught & {"ImportError", "ModuleNotFoundError"})


def main() -> int:
    if not has_oldest_libraries():
        print("Not the oldest supported libraries. Run: make compat-oldest, then .venv-oldest/bin/python", *sys.argv)
        return 1
    names = sorted(all_imported_names())
    missing = [as_statement(*name) for name in names if not exists(*name)]
    if missing:
        print("These do not exist in Colab's libraries:", *missing, sep="\n  ")
        return 1
    statements = [as_statement(*name) for name in names]
    RECORD.write_text(json.dumps(statements, indent=1) + "\n", "utf-8")
    print(f"{RECORD.relative_to(ROOT)}: {len(names)} names")
    return 0


if __name__ == "__main__":
    sys.exit(main())
