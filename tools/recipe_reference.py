"""Writes the tables of options into docs/reference/recipe.md: `python tools/recipe_reference.py`.

They are made from docs/recipe.schema.json, which `trillora schema` prints:

    "rank": {"default": 16, "minimum": 1, "maximum": 65536, "type": "integer", "description": "Rank of the adapter. …"}

becomes

    | `rank` | integer from 1 | `16` | Rank of the adapter. … |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from generated import ROOT, cell, write_part

DOCUMENT, PART = "docs/reference/recipe.md", "options"
LARGE = 2**16  # an upper limit from here on only keeps numbers within what devices can hold, and is not shown
NAMES = {"integer": "integer", "number": "number", "boolean": "yes or no", "string": "text"}
# Sections inside other sections, which are shown after them, and the options that they belong to.
INNER = {
    "RopeSection": "model.rope",
    "SourceSection": "data.path[n]",
    "TemplateSection": "data.template",
    "SplitSection": "data.split",
    "MeshSection": "hardware.mesh",
}
PARTS = ("StageSection", "PhaseSection")  # take what they do not set from `train`

Schema = Mapping[str, Any]


def page_part(schema: Schema) -> str:
    """The generated part of the page: a table of the recipe's sections, and a table per section."""
    sections = {name: _section(option) for name, option in schema["properties"].items()}
    lines = ["## All sections", "", "| section | value | |", "|---|---|---|"]
    for name, option in schema["properties"].items():
        about = option.get("description") or schema["$defs"][sections[name]]["description"]
        shown = f"[`{name}`](#{name})" if sections[name] else f"`{name}`"
        lines.append(f"| {shown} | {_type(option, name)} | {cell(about)} |")
    for name, section in sections.items():
        if section:
            lines += ["", f"## {name}", "", *_table(schema, section)]
            inner = [key for key in INNER if INNER[key].startswith(f"{name}.")]
            for key in inner:
                lines += ["", f"### {INNER[key]}", "", *_table(schema, key)]
    return "\n".join([*lines, ""])


def num_options(schema: Schema) -> int:
    """The options that the tables must have."""
    sections = [schema, *schema["$defs"].values()]
    return sum(len(section["properties"]) for section in sections)


def _table(schema: Schema, section: str) -> list[str]:
    defined = schema["$defs"][section]
    lines = [cell(defined["description"]), "", "| option | value | default | effect |", "|---|---|---|---|"]
    of_train = schema["$defs"]["TrainSection"]["properties"] if section in PARTS else {}
    for name, option in defined["properties"].items():
        default = "as in `train`" if name in of_train else _default(option, name in defined.get("required", ()))
        lines.append(f"| `{name}` | {_type(option, name)} | {default} | {cell(option['description'])} |")
    return lines


def _section(option: Schema) -> str:
    """The section that a top-level option refers to, itself or as the items of a list; "" if it is a plain value."""
    for part in (option, *option.get("anyOf", ())):
        reference = part.get("$ref") or part.get("items", {}).get("$ref")
        if reference:
            return str(reference.rpartition("/")[2])
    return ""


def _default(option: Schema, required: bool) -> str:
    if required:
        return "**required**"
    value = option.get("default")
    if value in (None, [], {}):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _type(option: Schema, name: str) -> str:
    """The values of an option in words."""
    if "anyOf" in option:
        parts = list(dict.fromkeys(_type(part, name) for part in option["anyOf"] if part.get("type") != "null"))
        between = ", " if all(part.startswith("`") for part in parts) else " or "
        return between.join(parts)
    if "$ref" in option:
        section = option["$ref"].rpartition("/")[2]
        anchor = INNER.get(section, name).replace(".", "").replace("[n]", "n")
        return f"[mapping](#{anchor})"
    if "const" in option:
        return f"`{option['const']}`"
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    if option["type"] == "array":
        return f"list of {_plural(_type(option['items'], name))}"
    if option["type"] == "object":
        values = option.get("additionalProperties")
        return f"mapping to {_plural(_type(values, name))}" if isinstance(values, dict) else "mapping of options"
    return NAMES[option["type"]] + _bounds(option)


def _plural(words: str) -> str:
    for one, many in {"integer": "integers", "number": "numbers", "[mapping]": "[mappings]"}.items():
        words = words.replace(one, many)
    return re.sub(r"\btext\b", "texts", words)


def _bounds(option: Schema) -> str:
    low, above = option.get("minimum"), option.get("exclusiveMinimum")
    high, below = option.get("maximum"), option.get("exclusiveMaximum")
    lower = f" from {low:g}" if low is not None else f" above {above:g}" if above is not None else ""
    if high is not None and high < LARGE:
        return f"{lower} to {high:g}" if lower.startswith(" from") else f"{lower}, at most {high:g}"
    return f"{lower}, below {below:g}" if below is not None and below < LARGE else lower


def read_schema() -> Schema:
    schema: Schema = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
    return schema


def main() -> None:
    schema = read_schema()
    write_part(DOCUMENT, PART, page_part(schema))
    print(f"{DOCUMENT}: {num_options(schema)} options")


if __name__ == "__main__":
    main()
