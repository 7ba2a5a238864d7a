"""Writes the list of all error messages into docs/troubleshooting.md: `python tools/error_reference.py`.

The messages are found in the syntax trees of the code, so none can be forgotten:

    what = f"There is no model '{name}'."
    raise TrilloraError(what, where=..., do=f"did you mean '{meant}'?")

becomes a row with "There is no model '…'." and "did you mean '…'?". A name is looked up among the assignments of its
function, of its module and of the module that it is imported from; a parameter among the calls of its function. What
remains unknown is `…`. A message of which nothing is known passes on another error, which has its own row.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from generated import ROOT, cell, write_part

SOURCE = ROOT / "src" / "trillora"
DOCUMENT, PART = "docs/troubleshooting.md", "errors"
GAP = "…"
MOST = 12  # texts that one expression may stand for
# Packages by topic, in the order of a run. A package that is not listed is a topic of its own.
TOPICS = {
    "Command line": ("cli",),
    "Recipe": ("recipe",),
    "Data": ("data",),
    "Models and the hub": ("model/loading", "files/hub.py", "model/bridge.py", "model/limits.py", "model/stack.py"),
    "Adapters": ("model", "step/adapter_spec.py"),
    "Devices and memory": ("devices", "engine", "step"),
    "Preflight": ("preflight",),
    "Runs and checkpoints": ("training", "files", "tracking", "report/run"),
    "Generation and chat": ("generation",),
    "Evaluation": ("evaluation",),
    "Merging adapters": ("adapters",),
    "Export": ("export",),
    "Certificates": ("certify", "report/certificate_page.py"),
    "Serving": ("serving",),
    "The machine": ("errors.py", "report", "doctor.py", "child_process.py"),
}
# Calls that make a message: the positions of `what` and `do` among their arguments.
MAKERS = {"conflict": (1, 2), "BadRow": (0, 1)}


@dataclass(frozen=True)
class Message:
    """An error that a user can see."""

    topic: str
    what: str
    do: str


@dataclass
class Module:
    """One file: its tree, and the places where names get their values."""

    path: str  # relative to the package
    tree: ast.Module
    functions: dict[ast.AST, ast.FunctionDef | None] = field(default_factory=dict)  # the function around each node
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Module:
        module = cls(file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text(encoding="utf-8")))
        module._note_functions(module.tree, None)
        return module

    def _note_functions(self, node: ast.AST, around: ast.FunctionDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            self.functions[child] = around
            self.parents[child] = node
            self._note_functions(child, child if isinstance(child, ast.FunctionDef) else around)

    def assigned_before(self, name: str, use: ast.AST) -> list[ast.expr]:
        """The values that a name can have where it is used, if it is assigned in a block around that place: the last
        assignment of the block, and those inside the statements after it."""
        while not isinstance(use, (ast.FunctionDef, ast.Module)):
            inner, use = use, self.parents[use]
            bodies = [getattr(use, part, None) for part in ("body", "orelse", "finalbody")]
            for body in (body for body in bodies if isinstance(body, list) and inner in body):
                before = body[: body.index(inner)]
                direct = [number for number, statement in enumerate(before) if _gives(statement, name)]
                if direct:
                    return [value for statement in before[direct[-1] :] for value in _assigned(statement, name)]
        return []

    def calls(self, *names: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _name(node.func) in names:
                yield node


@dataclass
class Code:
    """All files of the package."""

    modules: dict[str, Module]

    @classmethod
    def read(cls) -> Code:
        modules = [Module.read(file) for file in sorted(SOURCE.rglob("*.py"))]
        return cls({module.path: module for module in modules})

    def error_classes(self) -> list[str]:
        """TrilloraError and the classes derived from it."""
        found = ["TrilloraError"]
        classes = [n for m in self.modules.values() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
        for _ in range(3):  # depth of the class tree
            found += [c.name for c in classes if c.name not in found and {_name(b) for b in c.bases} & set(found)]
        return found

    def sites(self) -> Iterator[tuple[Module, ast.Call, ast.expr | None, ast.expr | None]]:
        """Every call that makes an error, with the expressions of its message and of what to do."""
        errors = self.error_classes()
        for module in self.modules.values():
            for call in module.calls(*errors, *MAKERS):
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                at_what, at_do = MAKERS.get(_name(call.func), (0, -1))
                what = keywords.get("what") or (call.args[at_what] if len(call.args) > at_what else None)
                do = keywords.get("do") or (call.args[at_do] if 0 <= at_do < len(call.args) else None)
                yield module, call, what, do

    def messages(self) -> list[Message]:
        found = set()
        for module, _, what, do in self.sites():
            texts = self.texts(what, module)
            advice = " / ".join(dict.fromkeys(text for text in self.texts(do, module) if text != GAP)) or GAP
            found |= {Message(topic_of(module.path), text, advice) for text in texts if _says_something(text)}
        return sorted(found, key=lambda message: (message.what.strip("'…").casefold(), message.do))

    def texts(self, node: ast.expr | None, module: Module, depth: int = 0) -> list[str]:
        """What an expression can be as text, with gaps for what is known only when it runs."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return self._joined(values, module, depth)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._joined([left, right], module, depth)
            case ast.IfExp(body=body, orelse=other):
                return _unique([*self.texts(body, module, depth), *self.texts(other, module, depth)])
            case ast.Call(func=ast.Attribute(value=template, attr="format")):
                return [_without_fields(text) for text in self.texts(template, module, depth)]
            case ast.Name(id=name) if depth < 4:
                values = list(self._values(name, node, module))
                return _unique([t for value, home in values for t in self.texts(value, home, depth + 1)]) or [GAP]
        return [GAP]

    def _joined(self, nodes: list[ast.expr], module: Module, depth: int) -> list[str]:
        choices = []
        for node in nodes:
            # Inside a text, only constants and choices are spelled out; names become gaps.
            inner = node.value if isinstance(node, ast.FormattedValue) else node
            plain = isinstance(inner, (ast.Constant, ast.JoinedStr, ast.BinOp)) or not isinstance(node, ast.FormattedValue)
            choices.append(self.texts(inner, module, depth + 1) if plain else [GAP])
        joined = ("".join(parts).replace(GAP + GAP, GAP) for parts in itertools.product(*choices))
        return _unique(list(itertools.islice(joined, MOST)))

    def _values(self, name: str, node: ast.expr, module: Module) -> Iterator[tuple[ast.expr, Module]]:
        function = module.functions.get(node)
        while function is not None:
            values = module.assigned_before(name, node)
            values = values or [value for value in _assigned(function, name) if module.functions.get(value) is function]
            if values:
                yield from ((value, module) for value in values)
                return
            arguments = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            if name in arguments:
                yield from self._arguments(function, arguments.index(name), name, module)
                return
            function = module.functions.get(function)
        yield from ((value, module) for value in _assigned(module.tree, name) if module.functions.get(value) is None)
        for statement in ast.walk(module.tree):
            if isinstance(statement, ast.ImportFrom) and name in [alias.name for alias in statement.names]:
                home = self.modules.get((statement.module or "").removeprefix("trillora.").replace(".", "/") + ".py")
                yield from ((value, home) for value in _assigned(home.tree, name)) if home else ()

    def _arguments(
        self, function: ast.FunctionDef, position: int, name: str, module: Module
    ) -> Iterator[tuple[ast.expr, Module]]:
        """What the calls of a function pass as one of its parameters."""
        parameters = [argument.arg for argument in function.args.args]
        if parameters[:1] in (["self"], ["cls"]):
            position -= 1
        for call in module.calls(function.name):
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            if name in keywords:
                yield keywords[name], module
            elif position < len(call.args):
                yield call.args[position], module


def topic_of(path: str) -> str:
    """The topic of a file: that of the longest prefix that is listed."""
    listed = [(len(prefix), topic) for topic, prefixes in TOPICS.items() for prefix in prefixes if path.startswith(prefix)]
    return max(listed)[1] if listed else path.partition("/")[0].removesuffix(".py").replace("_", " ").capitalize()


def page_part(messages: list[Message]) -> str:
    """The generated part of the page: a table per topic."""
    topics = dict.fromkeys([*TOPICS, *sorted({message.topic for message in messages})])
    lines = [f"{len(messages)} messages.", ""]
    for topic in topics:
        rows = [f"| {cell(m.what)} | {cell(m.do)} |" for m in messages if m.topic == topic]
        if rows:
            lines += [f"### {topic}", "", "| message | what to do |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    """The values that a name gets in a scope; of `what, do = "…", "…"`, the one at the name's place."""
    values = []
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                values.append(value)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                values.append(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=elements)):
                values += [v for t, v in zip(targets, elements, strict=False) if _name(t) == name]
    return values


def _gives(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and bool(_assigned(statement, name))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _says_something(text: str) -> bool:
    return any(letter.isalpha() for letter in text)


def _unique(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))[:MOST]


def _without_fields(template: str) -> str:
    parts, inside = "", False
    for letter in template:
        inside = (inside or letter == "{") and letter != "}"
        parts += GAP if letter == "}" else "" if inside else letter
    return parts


def main() -> None:
    messages = Code.read().messages()
    write_part(DOCUMENT, PART, page_part(messages))
    print(f"{DOCUMENT}: {len(messages)} messages")


if __name__ == "__main__":
    main()
