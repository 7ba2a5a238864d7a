"""Recipes from files and back: read, checked, resolved, written down.

`load_recipe` turns a YAML file (or a mapping) and overrides into a frozen `Recipe` or into one error that names every
mistake. `auto` stays in place until the run knows better: then `resolve` puts in what was chosen and `dump_resolved`
writes it down with the reasons. From here on functions get values, never the recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trillora.errors import TrilloraError
from trillora.events import Chosen
from trillora.recipe import yaml
from trillora.recipe.problems import Option, Origins, problems_as_error, unknown_option, value_problems
from trillora.recipe.schema import DataSection, ModelSection, Recipe, Section, SourceSection, as_mapping, merged

R = TypeVar("R", bound=Recipe)
Choice = Chosen  # one fact, met in the recipe and among the events
OPEN = (None, "auto", "all-linear")  # values that leave an option to the machine


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Reads and checks a recipe: a YAML file's path or a mapping, then `train.steps=10`-like overrides on top."""
    if isinstance(source, Mapping):
        name, folder, tree = "the recipe", Path.cwd(), _expanded(source)
    else:
        name, folder = str(source), Path(source).parent
        tree = _expanded(_read_mapping(Path(source)))
    _locate(tree, folder)
    origins = Origins(name)
    for path, value in _parsed_overrides(overrides, origins):
        given = _expanded(_nested(path, value))
        _locate(given, Path.cwd())  # typed at a prompt: from where the person stands
        tree = merged(tree, given)
    return _validated(tree, origins, Recipe)


def still_open(recipe: Recipe, choices: Iterable[Choice]) -> list[Choice]:
    """Those of earlier choices that the recipe still leaves to the machine."""
    tree = recipe.model_dump(mode="json")
    return [choice for choice in choices if _section_of(tree, choice)[choice.path.split(".")[-1]] in OPEN]


def resolve(recipe: R, choices: Iterable[Choice]) -> R:
    """The recipe with what the machine chose in place of `auto`. What the user wrote is never replaced."""
    tree = recipe.model_dump(mode="json")
    for choice in choices:
        section, key = _section_of(tree, choice), choice.path.split(".")[-1]
        value = list(choice.value) if isinstance(choice.value, tuple) else choice.value
        if section[key] not in (*OPEN, value):
            raise ValueError(f"{choice.path} is {section[key]!r}, given by the user: {value!r} may not replace it")
        changed = merged(section, {key: value})
        section.clear()
        section.update(changed)
    return _validated(tree, Origins("the resolved recipe"), type(recipe))


def _section_of(tree: dict[str, Any], choice: Choice) -> dict[str, Any]:
    """Where in a recipe's tree a choice belongs."""
    section: Any = tree
    for parent in choice.path.split(".")[:-1]:
        section = section[int(parent) if isinstance(section, list) else parent]
    return section


def dump_resolved(recipe: Recipe, choices: Sequence[Choice]) -> str:
    """The whole resolved recipe as YAML, each chosen value with its reason; `load_recipe` reads it back unchanged."""
    reasons = {choice.path: _one_line(choice.reason) for choice in choices}
    lines = ["# Every option of this run. A comment says why the machine chose a value."]

    def options_of(section: Mapping[str, Any], path: str, indent: str) -> Iterable[str]:
        for key, value in section.items():
            reason = reasons.get(f"{path}.{key}")
            yield f"{indent}{key}: {yaml.write(value)}" + (f"  # {reason}" if reason else "")

    for name, section in resolve(recipe, choices).model_dump(mode="json").items():
        if section is None:
            continue
        lines.append(f"{name}:")
        if name != "stages":
            lines += options_of(section, name, "  ")
            continue
        for number, stage in enumerate(section):
            given = {key: value for key, value in stage.items() if value is not None}
            first, *rest = options_of(given, f"stages.{number}", "    ")
            lines += [f"  - {first.lstrip()}", *rest]
    return "\n".join(lines) + "\n"


def choice_in_stage(recipe: Recipe, number: int, choice: Choice) -> Choice:
    """A choice made for one stage, as an option of the whole recipe."""
    section, _, key = choice.path.partition(".")
    if recipe.stages is None or section not in ("data", "train"):
        return choice
    place = f"stages.{number}.{f'data.{key}' if section == 'data' else key}"
    return Choice(place, choice.value, choice.reason)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors and for other programs."""
    schema = _without_titles(Recipe.model_json_schema())
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


def _validated(tree: Mapping[str, Any], origins: Origins, kind: type[R]) -> R:
    known = options()
    problems = [unknown_option(path, known, origins) for path in _unknown_paths(tree, known)]
    try:
        recipe = kind.model_validate(tree)
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
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        do = (
            f"recipes there: {', '.join(beside)}"
            if beside
            else "check the path: no recipe (*.yaml) lies in that folder"
        )
        raise TrilloraError(f"There is no recipe '{path.name}'.", where=str(path), do=do) from error
    except UnicodeDecodeError as error:
        raise TrilloraError("The recipe is not text.", where=str(path), do="save it as UTF-8") from error
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
    """The mapping with every section of a recipe spelled out, so that overrides can reach inside."""
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
    """Makes the paths of a tree absolute, in place. Addresses and hub ids stay as they are."""
    data, stages, model, train = (tree.get(name) for name in ("data", "stages", "model", "train"))
    if isinstance(data, Mapping):
        tree["data"] = _located_data(data, folder)
    if isinstance(stages, Mapping):  # an override names one by its number
        tree["stages"] = {number: _located_stage(stage, folder) for number, stage in stages.items()}
    elif isinstance(stages, list):
        tree["stages"] = [_located_stage(stage, folder) for stage in stages]
    if isinstance(train, Mapping) and isinstance(to := train.get("checkpoint_dir"), str) and "://" not in to:
        tree["train"] = {**train, "checkpoint_dir": os.path.abspath(folder / Path(to).expanduser())}
    # A bare word may be a hub id, so only what can be nothing but a folder is one.
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
    return os.path.abspath(file)  # links keep their names, which say what a file holds


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _without_titles(node: Any) -> Any:
    """pydantic repeats each name as a title; dropped. An option that is itself called title would stay: its value
    is a mapping."""
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(v) for v in node] if isinstance(node, list) else node
