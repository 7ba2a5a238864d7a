"""Writes the functions and classes into docs/reference/python.md: `python tools/api_reference.py`.

Signatures, docstrings and the comments after fields are read from the source, without importing it:

    losses: tuple[float, ...]  # of every step, earlier starts included

becomes

    | `losses` | `tuple[float, ...]` | of every step, earlier starts included |

The functions are the names in `trillora.__all__`; RESULTS are what they return, and EVENTS what a listener gets.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generated import ROOT, cell, write_part

SOURCE = ROOT / "src" / "trillora"
DOCUMENT, PART = "docs/reference/python.md", "api"
PACKAGE = "__init__.py"
RESULTS = {
    "loaded_run.py": ["LoadedRun"],
    "training/run_process.py": ["TrainResult"],
    "data/summary.py": ["DataReport"],
    "preflight/result.py": ["PreflightResult", "StepForecast", "RunForecast"],
}
EVENTS = "events.py"
NOT_SENT = "Not sent to listeners."  # in the docstring of what is in this file for other reasons
COMMENT = re.compile(r"#(?! type:) (.*)$")


@dataclass(frozen=True)
class File:
    """A file of the package and its definitions by name."""

    lines: list[str]
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> File:
        text = path.read_text(encoding="utf-8")
        return cls(text.splitlines(), ast.parse(text))

    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    def comment(self, line: int) -> str:
        """The comment at the end of a line, counted from 1."""
        found = COMMENT.search(self.lines[line - 1])
        return found[1] if found else ""


def page_part() -> str:
    """The generated part of the page."""
    lines = ["## Functions", ""]
    for name, file in public().items():
        definition = file.definitions()[name]
        if isinstance(definition, ast.FunctionDef):
            lines += [f"### {name}", "", "```python", signature(definition), "```", "", docstring(definition), ""]
    lines += ["## Results", ""]
    for path, names in RESULTS.items():
        file = File.read(SOURCE / path)
        for name in names:
            lines += [f"### {name}", "", *_described(file, name)]
    lines += ["## Events", ""]
    events = File.read(SOURCE / EVENTS)
    for name in event_names(events):
        lines += [f"### {name}", "", *_described(events, name)]
    return "\n".join(lines)


def public() -> dict[str, File]:
    """What `trillora.__all__` names, with the files that define it; in the order of the file, what is imported last."""
    file = File.read(SOURCE / PACKAGE)
    values = {node.targets[0].id: node.value for node in file.tree.body if _is_assignment(node)}  # type: ignore[attr-defined]
    names, lazy = ast.literal_eval(values["__all__"]), ast.literal_eval(values["_LAZY"])
    here = {name: file for name in file.definitions() if name in names}
    return here | {
        name: File.read(SOURCE / (home.removeprefix("trillora.").replace(".", "/") + ".py"))
        for name, home in lazy.items()
        if name in names
    }


def event_names(file: File) -> list[str]:
    """The dataclasses that listeners get."""
    return [
        name
        for name, node in file.definitions().items()
        if isinstance(node, ast.ClassDef) and NOT_SENT not in docstring(node)
    ]


def signature(function: ast.FunctionDef) -> str:
    """`def` line of a function, one parameter per line if it is long."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    short = f"{function.name}({ast.unparse(function.args)}){returns}"
    if len(short) <= 100:
        return short
    return "\n".join(
        [f"{function.name}(", *(f"    {parameter}," for parameter in _parameters(function)), f"){returns}"]
    )


def is_public(method: ast.FunctionDef) -> bool:
    """Whether a method is called by users: not a property, and not one of several signatures."""
    return method.name[0] != "_" and not method.decorator_list and bool(docstring(method))


def docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _parameters(function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def _described(file: File, name: str) -> list[str]:
    """A dataclass: its docstring and a table of its fields."""
    node = file.definitions()[name]
    lines = [cell(docstring(node)), "", "| field | type | |", "|---|---|---|"]
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            kind = ast.unparse(field.annotation).replace("|", "\\|")
            lines.append(f"| `{field.target.id}` | `{kind}` | {cell(file.comment(field.end_lineno or field.lineno))} |")
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and is_public(method):
            code = ["```python", signature(method), "```"]
            lines += ["", f"#### {name}.{method.name}", "", *code, "", docstring(method)]
    return [*lines, ""]


def _is_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[:1] in "_"


def main() -> None:
    write_part(DOCUMENT, PART, page_part())
    print(f"{DOCUMENT}: {len(public())} names")


if __name__ == "__main__":
    main()
