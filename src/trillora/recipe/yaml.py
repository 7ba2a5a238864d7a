"""YAML to plain values and back, without YAML's surprises.

    >>> parse("rate: 2e-4", "recipe.yaml")
    {'rate': 0.0002}

PyYAML's safe loader would read `2e-4` as text, `010` as 8, `1:30` as 90 and `2024-01-01` as a date, and would silently
use the last of two equal keys. This loader does not. It reads plain values only, and a bounded number of them. Every
error has a file and a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from trillora.errors import TrilloraError

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOL = re.compile(r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF")
_NULL = re.compile(r"~|null|Null|NULL|")
_MERGE = re.compile(r"<<")
MAX_NODES = 100_000  # a hundred times the largest recipe that we know
_RESOLVERS = (("int", _INT), ("float", _FLOAT), ("bool", _BOOL), ("null", _NULL), ("merge", _MERGE))


class _Loader(yaml.SafeLoader):
    """Loader of plain values: it resolves plain scalars by the table above, and rejects duplicate keys, all tags but
    the tags of plain values, and texts that grow when their aliases and merges are followed."""

    # None matches every first letter. PyYAML tries the patterns in order; a whole word must match.
    yaml_implicit_resolvers = {  # noqa: RUF012  (declared by PyYAML as a class attribute)
        None: [(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern.pattern})$")) for tag, pattern in _RESOLVERS]
    }
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("str", "seq", "map")
    }

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MAX_NODES:
            problem = f"with its aliases and merges written out it has more than {MAX_NODES:,} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue
            if key_node.value in seen:
                problem = f"the key '{key_node.value[:80]}' is given twice (first on line {seen[key_node.value]})"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key_node.value] = key_node.start_mark.line + 1
        return node


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values in a node. Each node is visited once, however often it is used."""
    if id(node) not in known:
        known[id(node)] = MAX_NODES + 1  # of a node that contains itself
        inner = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]


def _add_constructor(tag: str, pattern: re.Pattern[str], convert: Callable[[str], Any]) -> None:
    def construct(loader: _Loader, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if not pattern.fullmatch(text):
            problem = f"this is not a value of the type '{tag}'"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return convert(text.replace("_", "").lower())

    _Loader.add_constructor(f"tag:yaml.org,2002:{tag}", construct)


_add_constructor("null", _NULL, lambda text: None)
_add_constructor("bool", _BOOL, lambda text: text in ("yes", "true", "on"))
_add_constructor("int", _INT, int)
_add_constructor("float", _FLOAT, lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")))


class _Dumper(yaml.SafeDumper):
    """Quotes text that our loader or a YAML 1.1 reader would read as another type."""


def _one_line_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes write a line break as an escape.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _one_line_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), None)


def parse(text: str, where: str) -> Any:
    """The values of a YAML text. `where` names the text in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not readable"
        place = f"{where}:{mark.line + 1}" if mark else where
        raise TrilloraError(f"Not valid YAML: {problem}.", where=place, do=_advice(text, problem)) from error
    except yaml.YAMLError as error:  # a character YAML does not allow: only a position is known
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise TrilloraError(
            "Not valid YAML: it contains a character that YAML does not allow.",
            where=f"{where}:{line}",
            do="save the file as plain UTF-8 text",
        ) from error
    except (RecursionError, ValueError) as error:  # thousands of nested brackets; a number of thousands of digits
        raise TrilloraError(f"Not a recipe: {error}.", where=where, do="write plain keys and values") from error


def _advice(text: str, problem: str) -> str:
    if "'\\t'" in problem or any(line[: len(line) - len(line.lstrip())].count("\t") for line in text.splitlines()):
        return "indent with spaces, never with tabs"
    if "written out" in problem:
        return "write the values instead of using aliases (*name) and merges (<<)"
    if "twice" in problem:
        return "remove one of the two"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and quote text that contains a colon followed by a space"
    if "constructor" in problem or "of the type" in problem:
        return "write plain text, numbers, lists and mappings: tags are not allowed"
    return "check indentation, brackets and quotes on this line and the one before"


def write(value: object) -> str:
    """A value as one line of YAML; `parse` reads it back unchanged."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("\n")
