"""Counts what this project keeps small or few in the code of a folder, `src/trillora` unless another is named.

    python tools/code_counts.py                       # 61,266 lines, 380 modules, 4,053 functions, ...
    python tools/code_counts.py --list Any classes    # also where each `Any` and each repeated class name is

A function counts from `def` to its last line, without decorators; docstrings and comments are lines too.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "trillora"
LONGEST_FUNCTION, LONGEST_FILE = 60, 600  # lines, as CONTRIBUTING.md says
CHAINS = re.compile(r"\b(those|that) of\b", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: Path
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def classes(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(node, ast.ClassDef)]


def modules_below(folder: Path) -> list[Module]:
    """Every Python file below a folder, without links, in the order of their paths."""
    paths = sorted(path for path in folder.rglob("*.py") if not path.is_symlink())
    return [Module(path, path.read_text(encoding="utf-8")) for path in paths]


def names_any(function: Function) -> bool:
    """Whether a parameter or the result is annotated with `Any`, alone or inside another type."""
    return any("Any" in re.findall(r"\w+", ast.unparse(annotation)) for annotation in _annotations(function))


def _annotations(function: Function) -> Iterator[ast.expr]:
    given = function.args
    for parameter in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg):
        if parameter and parameter.annotation:
            yield parameter.annotation
    if function.returns:
        yield function.returns


def num_lines(function: Function) -> int:
    """From `def` to the last line, decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def with_any(modules: list[Module]) -> list[str]:
    return [_place(module, each) for module in modules for each in module.functions if names_any(each)]


def long_functions(modules: list[Module]) -> list[str]:
    long = [(module, each) for module in modules for each in module.functions if num_lines(each) > LONGEST_FUNCTION]
    return [f"{_place(module, each)}, {num_lines(each)} lines" for module, each in long]


def repeated_classes(modules: list[Module]) -> list[str]:
    """The class names that two or more modules define, with the modules."""
    counts = Counter(name for module in modules for name in set(module.classes))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    return [f"{name}: {', '.join(str(each.path) for each in modules if name in each.classes)}" for name in repeated]


def chains(modules: list[Module]) -> list[str]:
    """The lines with "those of" or "that of"."""
    return [
        f"{module.path}:{number}: {line.strip()}"
        for module in modules
        for number, line in enumerate(module.lines, 1)
        if CHAINS.search(line)
    ]


def _place(module: Module, function: Function) -> str:
    return f"{module.path}:{function.lineno}: {function.name}"


def main() -> None:
    found = {"Any": with_any, "classes": repeated_classes, "chains": chains, "long": long_functions}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PACKAGE)
    parser.add_argument("--list", nargs="+", choices=found, default=[], help="print these places as well")
    args = parser.parse_args()
    modules = modules_below(args.folder)
    places = {kind: find(modules) for kind, find in found.items()}
    longest = max(modules, key=lambda module: len(module.lines))
    counts = {
        "lines": sum(len(module.lines) for module in modules),
        "modules": len(modules),
        "functions": sum(len(module.functions) for module in modules),
        "functions with Any in the signature": len(places["Any"]),
        "class names in two or more modules": len(places["classes"]),
        "lines with 'those of' or 'that of'": len(places["chains"]),
        f"functions longer than {LONGEST_FUNCTION} lines": len(places["long"]),
        f"lines of the longest file, {longest.path.name}": len(longest.lines),
    }
    for kind in args.list:
        print(*places[kind], sep="\n")
    for what, count in counts.items():
        print(f"{count:>9,}  {what}")


if __name__ == "__main__":
    main()
