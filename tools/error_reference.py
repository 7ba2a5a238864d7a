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
from functools import cache, cached_property
from pathlib import Path

from generated import ROOT, cell, write_part

SOURCE = ROOT / "src" / "trillora"
DOCUMENT, PART = "docs/troubleshooting.md", "errors"
GAP = "…"
UNKNOWN = "The message says it."
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
    "Launching": ("launch", "cli/launch_commands.py", "cli/tpu_vm_commands.py", "devices/cluster.py"),
    "The machine": ("errors.py", "report", "doctor.py", "child_process.py", "prove", "devices/measured.py"),
}
INTRODUCTIONS = {
    "Command line": "Arguments that do not fit together. `trillora COMMAND --help` lists the options of a command.",
    "Recipe": (
        "Everything in a recipe is checked before anything is loaded, and up to 20 mistakes are reported at once. "
        "[Recipe options](reference/recipe.md) lists every option with its values."
    ),
    "Data": (
        "`trillora inspect RECIPE` reads all rows, counts each of these, and shows the first ones with file and "
        "line. A message about one row ends with the option that trains without it: `data.on_bad_row: skip`. See "
        "[Data](data.md)."
    ),
    "Models and the hub": (
        "A model is checked before its weights are downloaded. [Architectures](ARCHITECTURES.md) lists what works. "
        "Gated models need a login: `hf auth login`, or the variable `HF_TOKEN`."
    ),
    "Adapters": (
        "Options of `lora` that do not fit the model, and adapters from elsewhere. See [Adapters](adapters.md) and "
        "[New tokens](tokens.md)."
    ),
    "Devices and memory": (
        "A run never falls back to another device silently. Whether a run fits is known before it starts: "
        "[Preflight](preflight.md)."
    ),
    "Preflight": (
        "`trillora preflight --estimate` answers without the TPU compiler, which exists for x86-64 Linux only."
    ),
    "Runs and checkpoints": (
        "A run resumes with the same command. What is damaged is named, and an older checkpoint is used if there is "
        "one. See [Runs](runs.md)."
    ),
    "Generation and chat": "See [Chat](chat.md).",
    "Evaluation": "See [Evaluation](evaluation.md).",
    "Merging adapters": "See [Merging](merging.md).",
    "Export": (
        "An export is complete or absent: nothing half-written remains after an error. See [Export](export.md)."
    ),
    "Certificates": (
        "These errors mean that something could not be compared. A comparison that fails is not an error: it is in "
        "the certificate, with exit code 1. See [Certificates](certificates.md)."
    ),
    "Serving": (
        "Errors of single requests are answered in OpenAI's form and leave the server running: "
        "[Serving](serving.md#what-is-supported)."
    ),
    "Launching": (
        "A launch is checked on your machine first: data, secrets and preflight. Without a flag that starts something, "
        "only the commands are printed. See [Where to train](platforms.md)."
    ),
    "The machine": (
        "`trillora doctor` checks the machine and shows how to fix what it finds. Errors of the operating system "
        "are passed on with its own words, such as `No space left on device.`, and with what to do."
    ),
}
# Calls that make a message: the positions of `what` and `do` among their arguments.
MAKERS = {
    "conflict": (1, 2),
    "BadRow": (0, 1),
    "Fault": (2, 3),
    "fault": (0, 1),
    "Damage": (0, 1),
    "RecipeProblem": (1, 3),
}


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
    called: dict[str, list[ast.Call]] = field(default_factory=dict)  # calls by the name of the function
    returned: dict[str, list[ast.expr]] = field(default_factory=dict)  # returned values by the name of the function
    imported: dict[str, str] = field(default_factory=dict)  # names, and the files of the package they come from

    @classmethod
    def read(cls, file: Path) -> Module:
        module = cls(file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text(encoding="utf-8")))
        module._note(module.tree, None)
        return module

    def _note(self, node: ast.AST, around: ast.FunctionDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            self.functions[child] = around
            self.parents[child] = node
            match child:
                case ast.Call():
                    self.called.setdefault(_name(child.func), []).append(child)
                case ast.Return(value=ast.expr() as value) if around:
                    self.returned.setdefault(around.name, []).append(value)
                case ast.ImportFrom(module=str(home), names=names):
                    path = home.removeprefix("trillora.").replace(".", "/") + ".py"
                    self.imported |= {alias.name: path for alias in names}
            self._note(child, child if isinstance(child, ast.FunctionDef) else around)

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

    def calls(self, *names: str) -> list[ast.Call]:
        return [call for name in names for call in self.called.get(name, ())]

    def inits(self, errors: list[str]) -> Iterator[tuple[str, ast.Call]]:
        """The calls of `super().__init__` in classes that are errors, with the names of these classes."""
        for call in self.calls("__init__"):
            function = self.functions.get(call)
            around = self.parents.get(function) if function else None
            if isinstance(around, ast.ClassDef) and around.name in errors and around.name != "TrilloraError":
                yield around.name, call


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
        classes = [n for m in self.modules.values() for n in m.parents if isinstance(n, ast.ClassDef)]
        for _ in range(3):  # depth of the class tree
            found += [c.name for c in classes if c.name not in found and {_name(b) for b in c.bases} & set(found)]
        return found

    def sites(self) -> Iterator[tuple[Module, ast.Call, ast.expr | None, ast.expr | None]]:
        """Every call that makes an error, with the expressions of its message and of what to do."""
        errors = self.error_classes()
        inits = {name: call for module in self.modules.values() for name, call in module.inits(errors)}
        plain = [name for name in errors if name not in inits]  # take `what` and `do` as TrilloraError does
        for module in self.modules.values():
            own = [call for call in inits.values() if call in module.parents]
            for call in (*module.calls(*plain, *MAKERS), *own):
                if _name(call.func) == "fault" and not module.path.startswith("data/"):
                    continue  # another function of this name
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                at_what, at_do = MAKERS.get(_name(call.func), (0, -1))
                what = keywords.get("what") or (call.args[at_what] if len(call.args) > at_what else None)
                do = keywords.get("do") or (call.args[at_do] if 0 <= at_do < len(call.args) else None)
                yield module, call, what, do

    @cached_property
    def messages(self) -> list[Message]:
        found = set()
        for module, _, what, do in self.sites():
            for whats, dos in self._pairs(what, do, module):
                advice = " / ".join(dict.fromkeys(text for text in dos if text != GAP)) or UNKNOWN
                found |= {Message(topic_of(module.path), text, advice) for text in whats if _says_something(text)}
        return sorted(found, key=lambda message: (message.what.strip("'…").casefold(), message.do))

    def _pairs(
        self, what: ast.expr | None, do: ast.expr | None, module: Module
    ) -> Iterator[tuple[list[str], list[str]]]:
        """The texts of a message with the texts of its advice. Two names that get their values together, as in
        `what, do = "…", "…"`, are paired value by value."""
        if isinstance(what, ast.Name) and isinstance(do, ast.Name):
            values = [list(self._values(name.id, name, module)) for name in (what, do)]
            if len(values[0]) == len(values[1]):
                for of_what, of_do in zip(*values, strict=True):
                    yield self.texts(of_what[0], of_what[1], 1), self.texts(of_do[0], of_do[1], 1)
                return
        yield self.texts(what, module), self.texts(do, module)

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
            case ast.Call(func=ast.Attribute(value=template, attr="strip" | "rstrip")):
                return self.texts(template, module, depth)
            case ast.Call(func=ast.Name(id=name)) if depth < 4:
                values = [value for value in self._returned(name, module) if not isinstance(value[0], ast.Tuple)]
                return _unique([t for value, home in values for t in self.texts(value, home, depth + 1)]) or [GAP]
            case ast.Name(id=name) if depth < 4:
                values = list(self._values(name, node, module))
                return _unique([t for value, home in values for t in self.texts(value, home, depth + 1)]) or [GAP]
        return [GAP]

    def _joined(self, nodes: list[ast.expr], module: Module, depth: int) -> list[str]:
        choices = []
        for node in nodes:
            inner = node.value if isinstance(node, ast.FormattedValue) else node
            plain = isinstance(inner, (ast.Constant, ast.JoinedStr, ast.BinOp)) or not isinstance(
                node, ast.FormattedValue
            )
            choices.append(self.texts(inner, module, depth + 1) if plain else self._in_text(inner, module, depth))
        joined = ("".join(parts).replace(GAP + GAP, GAP) for parts in itertools.product(*choices))
        return _unique(list(itertools.islice(joined, MOST)))

    def _in_text(self, node: ast.expr, module: Module, depth: int) -> list[str]:
        """A value inside a text: spelled out if its function assigns sentences to its name, else a gap."""
        texts = self.texts(node, module, depth + 1) if isinstance(node, ast.Name) else []
        return texts if texts and len(texts) <= 4 and all(len(text.split()) >= 3 for text in texts) else [GAP]

    def _values(self, name: str, node: ast.expr, module: Module) -> Iterator[tuple[ast.expr, Module]]:
        function = module.functions.get(node)
        while function is not None:
            values = module.assigned_before(name, node)
            values = values or [value for value in _assigned(function, name) if module.functions.get(value) is function]
            if values:
                yield from ((value, module) for value in values)
                return
            if pairs := list(self._unpacked(function, name, module)):
                yield from pairs
                return
            arguments = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            if name in arguments:
                yield from self._arguments(function, arguments.index(name), name, module)
                return
            function = module.functions.get(function)
        yield from ((value, module) for value in _assigned(module.tree, name) if module.functions.get(value) is None)
        for home in self._imported_from(name, module):
            yield from ((value, home) for value in _assigned(home.tree, name))

    def _unpacked(self, function: ast.FunctionDef, name: str, module: Module) -> Iterator[tuple[ast.expr, Module]]:
        """The values of a name in `what, do = _in_words(error)`: from what that function returns."""
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call(func=ast.Name(id=called))):
                    places = [place for place, target in enumerate(targets) if _name(target) == name]
                    for value, home in self._returned(called, module) if places else ():
                        if isinstance(value, ast.Tuple) and places[0] < len(value.elts):
                            yield value.elts[places[0]], home

    def _returned(self, name: str, module: Module) -> Iterator[tuple[ast.expr, Module]]:
        """What a function of this module, or one that it imports, returns."""
        for home in (module, *self._imported_from(name, module)):
            yield from ((value, home) for value in home.returned.get(name, ()))

    def _imported_from(self, name: str, module: Module) -> list[Module]:
        home = self.modules.get(module.imported.get(name, ""))
        return [home] if home else []

    def _arguments(
        self, function: ast.FunctionDef, position: int, name: str, module: Module
    ) -> Iterator[tuple[ast.expr, Module]]:
        """What the calls of a function pass as one of its parameters."""
        parameters = [argument.arg for argument in function.args.args]
        if parameters[:1] in (["self"], ["cls"]):
            position -= 1
        around = module.parents[function]
        is_init = function.name == "__init__" and isinstance(around, ast.ClassDef)
        for call in module.calls(around.name if is_init else function.name):  # type: ignore[attr-defined]
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            if name in keywords:
                yield keywords[name], module
            elif position < len(call.args):
                yield call.args[position], module


def topic_of(path: str) -> str:
    """The topic of a file: that of the longest prefix that is listed."""
    listed = [
        (len(prefix), topic) for topic, prefixes in TOPICS.items() for prefix in prefixes if path.startswith(prefix)
    ]
    return max(listed)[1] if listed else path.partition("/")[0].removesuffix(".py").replace("_", " ").capitalize()


def page_part(messages: list[Message]) -> str:
    """The generated part of the page: a table per topic, after the introduction that is written below."""
    topics = dict.fromkeys([*TOPICS, *sorted({message.topic for message in messages})])
    lines = []
    for topic in topics:
        rows = [f"| {cell(m.what)} | {cell(m.do)} |" for m in messages if m.topic == topic]
        if rows:
            about = [INTRODUCTIONS[topic], ""] if topic in INTRODUCTIONS else []
            lines += [f"## {topic}", "", *about, "| message | what to do |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    """The values that a name gets in a scope; of `what, do = "…", "…"`, the one at the name's place."""
    return _assignments(scope).get(name, [])


@cache
def _assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                values.setdefault(target, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value):
                values.setdefault(target, []).append(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=elements)):
                for inner, value in zip(targets, elements, strict=False):
                    values.setdefault(_name(inner), []).append(value)
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
    messages = Code.read().messages
    write_part(DOCUMENT, PART, page_part(messages))
    print(f"{DOCUMENT}: {len(messages)} messages")


if __name__ == "__main__":
    main()
