"""Reads and checks recipes.

`load_recipe` turns a YAML file (or a mapping) and overrides into a frozen `Recipe`, or raises one error that lists all
mistakes:

    load_recipe("recipe.yaml", ["train.steps=10"])

Values may still be `auto`. `recipe.resolve` holds what the run decides for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trillora.errors import TrilloraError
from trillora.recipe import yaml
from trillora.recipe.problems import Option, Origins, problems_as_error, unknown_option, value_problems
from trillora.recipe.schema import (
    DataSection,
    ModelSection,
    Recipe,
    Section,
    SourceSection,
    StageOptions,
    as_mapping,
    merged,
)


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Reads and checks a recipe: the path of a YAML file or a mapping, with overrides such as `train.steps=10`."""
    if isinstance(source, Mapping):
        name, folder, tree = "the recipe", Path.cwd(), _expanded(source)
    else:
        name, folder = str(source), Path(source).parent
        tree = _expanded(_read_mapping(Path(source)))
    _locate(tree, folder)
    origins = Origins(name)
    for path, value in _parsed_overrides(overrides, origins):
        given = _expanded(_nested(path, value))
        _locate(given, Path.cwd())  # typed on the command line: relative to the current folder
        tree = merged(tree, given)
    return _validated(tree, origins)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors and for other programs."""
    schema = _without_titles(Recipe.model_json_schema())
    for name in StageOptions.model_fields:  # the default of a stage's option is the value in `train`
        schema["$defs"]["StageSection"]["properties"][name].pop("default", None)
    for holder in (schema, schema["$defs"]["StageSection"]):
        for name, section in (("model", ModelSection), ("data", DataSection)):
            if name in holder["properties"]:
                node = {k: v for k, v in holder["properties"][name].items() if k not in ("anyOf", "$ref", "default")}
                path = {"type": "string", "minLength": 1}
                node["anyOf"] = [path, {"$ref": f"#/$defs/{section.__name__}"}]
                holder["properties"][name] = node
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trillora recipe",
        **schema,
    }


def options() -> dict[str, Option]:
    """Every option by its dotted path, sections included."""
    found: dict[str, Option] = {}

    def visit(prefix: str, section: type[Section]) -> None:
        for name, field in section.model_fields.items():
            path = f"{prefix}{name}"
            found[path] = Option.of(path, field)
            inner = found[path].section
            if inner is not None:
                visit(f"{path}.", inner)

    visit("", Recipe)
    return found


def _validated(tree: Mapping[str, Any], origins: Origins) -> Recipe:
    known = options()
    problems = [unknown_option(path, known, origins) for path in _unknown_paths(tree, known)]
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems += value_problems(error, known, origins)
    if problems:
        raise problems_as_error(problems)
    return recipe


def _unknown_paths(tree: Mapping[Any, Any], known: Mapping[str, Option], prefix: str = "") -> list[str]:
    unknown = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path not in known:
            unknown.append(path)
        elif known[path].section is not None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Mapping):
                    unknown += _unknown_paths(item, known, f"{path}.")
    return unknown


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        others = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        do = (
            f"recipes there: {', '.join(others)}"
            if others
            else "check the path: that folder contains no recipe (*.yaml)"
        )
        raise TrilloraError(f"There is no recipe '{path.name}'.", where=str(path), do=do) from error
    except UnicodeDecodeError as error:
        raise TrilloraError("The recipe is not a text file.", where=str(path), do="save it as UTF-8") from error
    except OSError as error:
        raise TrilloraError(
            f"The recipe cannot be read: {error.strerror}.", where=str(path), do="give the path of a readable YAML file"
        ) from error
    tree = yaml.parse(text, str(path))
    if not isinstance(tree, Mapping):
        found = {type(None): "empty", list: "a list"}.get(type(tree), "a single value")
        raise TrilloraError(
            f"A recipe is a mapping of options; this one is {found}.",
            where=str(path),
            do="write at least two lines: 'model: smollm2' and 'data: train.jsonl'",
        )
    return tree


def _parsed_overrides(overrides: Sequence[str] | Mapping[str, Any], origins: Origins) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            origins.overridden(path, f"override {path}")
            yield path, value
        return
    for text in overrides:
        path, equals, value = text.partition("=")
        path, where = path.strip(), f"override {text}"
        if not equals:
            raise TrilloraError(
                f"'{text}' is not an override.", where=where, do="write key=value, as in train.steps=10"
            )
        origins.overridden(path, where)
        yield path, yaml.parse(value, where)


def _expanded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with every shorthand section written out, so that overrides can reach inside."""
    expanded = dict(tree)
    for name, field in Recipe.model_fields.items():
        section = Option.of(name, field).section
        assert section is not None
        if name in expanded and name != "stages":
            expanded[name] = as_mapping(section, expanded[name])
    if isinstance(stages := expanded.get("stages"), list):
        expanded["stages"] = [
            {**stage, "data": as_mapping(DataSection, stage["data"])}
            if isinstance(stage, Mapping) and stage.get("data") is not None
            else stage
            for stage in stages
        ]
    return expanded


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_DATA_SUFFIX = re.compile(r"\.(jsonl|ndjson|json|txt|md|csv|tsv|parquet|gz|zst|tar|tgz|zip)$")


def _locate(tree: dict[str, Any], folder: Path) -> None:
    """Makes the paths of a tree absolute, in place. URLs and hub ids stay as they are."""
    data, stages, model, train = (tree.get(name) for name in ("data", "stages", "model", "train"))
    if isinstance(data, Mapping):
        tree["data"] = _located_data(data, folder)
    if isinstance(stages, Mapping):  # an override gives the number of a stage
        tree["stages"] = {number: _located_stage(stage, folder) for number, stage in stages.items()}
    elif isinstance(stages, list):
        tree["stages"] = [_located_stage(stage, folder) for stage in stages]
    if isinstance(train, Mapping) and isinstance(to := train.get("checkpoint_dir"), str) and "://" not in to:
        tree["train"] = {**train, "checkpoint_dir": os.path.abspath(folder / Path(to).expanduser())}
    # A bare word may be a hub id: only a value that starts like a path is a folder.
    if (
        isinstance(model, Mapping)
        and isinstance(name := model.get("name"), str)
        and name.startswith(("./", "../", "~"))
    ):
        tree["model"] = {**model, "name": str((folder / Path(name).expanduser()).resolve())}


def _located_stage(stage: Any, folder: Path) -> Any:
    if isinstance(stage, Mapping) and isinstance(stage.get("data"), str | Mapping):
        return {**stage, "data": _located_data(as_mapping(DataSection, stage["data"]), folder)}
    return stage


def _located_data(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    located = dict(data)
    if isinstance(path := data.get("path"), str):
        located["path"] = _data_path(path, folder)
    elif isinstance(path, Sequence):
        located["path"] = [_located_source(source, folder) for source in path]
    if isinstance(validation := data.get("validation"), str):
        located["validation"] = _data_path(validation, folder)
    if isinstance(schema := data.get("json_schema"), str):
        located["json_schema"] = str((folder / Path(schema).expanduser()).resolve())
    if isinstance(template := data.get("chat_template"), str) and ("/" in template or "." in template):
        located["chat_template"] = str((folder / Path(template).expanduser()).resolve())
    return located


def _located_source(source: Any, folder: Path) -> Any:
    expanded = as_mapping(SourceSection, source)
    if isinstance(expanded, Mapping) and isinstance(path := expanded.get("path"), str):
        return {**expanded, "path": _data_path(path, folder)}
    return source


def _data_path(path: str, folder: Path) -> str:
    file = folder / Path(path).expanduser()
    hub_like = _HUB_ID.fullmatch(path) and not _DATA_SUFFIX.search(path) and not file.exists()
    if not path or "://" in path or hub_like:
        return path
    return os.path.abspath(file)  # symbolic links keep their names: the suffix gives the format


def _without_titles(node: Any) -> Any:
    """Drops the titles in which pydantic repeats each name. An option called `title` stays: its value is a mapping."""
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(v) for v in node] if isinstance(node, list) else node
