"""Reads and checks recipes.

`load_recipe` turns a YAML file (or a mapping) and overrides into a frozen `Recipe`, or raises one error that lists all
mistakes:

    load_recipe("recipe.yaml", ["train.steps=10"])

Values may still be `auto`. `recipe.resolve` holds what the run decides for them. `load_run_recipe` reads the recipe of
a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trillora.errors import TrilloraError
from trillora.files.bounded import read_bounded
from trillora.files.hub import HUB_ID_AT
from trillora.files.user_path import check_letters, user_path
from trillora.recipe import run_file, yaml
from trillora.recipe.data_section import DataSection, SourceSection
from trillora.recipe.losses import is_file
from trillora.recipe.problems import (
    MAX_LETTERS,
    MAX_SHOWN,
    Option,
    Origins,
    inner_problems,
    problems_as_error,
    shown,
    unknown_option,
    value_problem,
)
from trillora.recipe.run_file import RunFile
from trillora.recipe.schema import LISTS, ModelSection, PhaseOptions, Recipe, StageOptions
from trillora.recipe.section import Section, as_mapping, merged
from trillora.recipe.tiny import APPLIED, require_local_data, shrunk, tiny_overrides
from trillora.runs.files import MARKS, RECIPE_FILE
from trillora.safe_text import visible_line
from trillora.secrets import MASK

MAX_BYTES = 1 << 20  # of a recipe; PyYAML reads about 200 kB per second


def load_recipe(
    source: str | Path | Mapping[str, object],
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    tiny: bool = False,
) -> Recipe:
    """Reads and checks a recipe: the path of a YAML file or a mapping, with overrides such as `train.steps=10`. With
    `tiny`, on the embedded model and in small sizes (`recipe.tiny`).

    A recipe in the folder of a run may have come with that run from another person: only an override can allow its
    model's Python code to run.
    """
    if isinstance(source, Mapping):
        return _checked(source, "the recipe", Path.cwd(), overrides, tiny=tiny)
    file = user_path(source, where="the recipe")
    flag = "model.trust_remote_code=true" if any(os.path.isfile(file.parent / name) for name in MARKS) else None
    if file.name == RECIPE_FILE:
        saved = run_file.read(file)
        recipe = _checked(saved.recipe, str(file), file.parent, overrides, flag, tiny)
        saved.require("", recipe, file)
    else:
        recipe = _checked(_read_mapping(file), str(file), file.parent, overrides, flag, tiny)
    if flag is not None:
        _refuse_own_loss(recipe, overrides, file)
    return recipe


def _refuse_own_loss(recipe: Recipe, overrides: Sequence[str] | Mapping[str, object], file: Path) -> None:
    """A recipe in the folder of a run may have come with that run from another person, and its loss is a program."""
    typed = {text if isinstance(overrides, Mapping) else text.partition("=")[0].strip() for text in overrides}
    losses = {"train.loss": recipe.train.losses}
    losses |= {f"stages.{number}.loss": stage.losses for number, stage in enumerate(recipe.stages or ())}
    for option, names in losses.items():
        own = next(filter(is_file, names), None)
        if own is not None and option not in typed:
            what = f"This recipe belongs to a run, and asks to run the code of a loss: {own}."
            do = f"read the file; if you trust it, add {option}={own}"
            raise TrilloraError(what, where=f"{file}, {option}", do=do)


@dataclass(frozen=True)
class RunRecipe:
    """The recipe of a run, as a program reads it."""

    recipe: Recipe
    file: Path
    saved: RunFile

    def require(self, option: str) -> None:
        """Refuses to open an address whose credentials were not saved, unless it was given again."""
        self.saved.require(option, self.recipe, self.file)


def load_run_recipe(folder: Path, overrides: Sequence[str] = ()) -> RunRecipe:
    """The recipe that the run in this folder was trained with, and overrides typed by the user."""
    file = folder / RECIPE_FILE
    saved = run_file.read(file)
    return RunRecipe(_checked(saved.recipe, str(file), folder, overrides, "--trust-remote-code"), file, saved)


def load_model_section(name: str, overrides: Sequence[str] = ()) -> ModelSection:
    """The section `model` of a recipe without data, for commands that only need a model."""
    return _checked({"model": name, "data": "none"}, "the command line", Path.cwd(), overrides).model


def _checked(
    source: Mapping[str, object],
    name: str,
    folder: Path,
    overrides: Sequence[str] | Mapping[str, object],
    code_flag: str | None = None,
    tiny: bool = False,
) -> Recipe:
    """The recipe in a mapping whose relative paths count from `folder`. With `code_flag` (what the user must give),
    only an override may allow the code of a model."""
    origins = Origins(name)
    tree = _read_tree(source, folder, origins, tiny)
    typed: dict[str, Any] = {}
    for path, value in _parsed_overrides(overrides, origins):
        given = _given(path, value, Path.cwd())  # typed on the command line: relative to the current folder
        tree, typed = merged(tree, given), merged(typed, given)
    if "tiny" in typed:
        do = "leave out 'tiny.'; with --tiny, overrides replace options of the tiny recipe"
        raise TrilloraError("The section tiny cannot be overridden.", where=origins.of("tiny"), do=do)
    if tiny:
        require_local_data(tree, _read_tree(source, folder, Origins(name), False), name)
    recipe = _validated(tree, origins)
    if masked := sorted(option for option, text in run_file.texts(recipe) if MASK in text):
        exact = folder / RECIPE_FILE
        instead = f"use {exact}, which is exact; or give" if os.path.isfile(exact) else "give"
        raise TrilloraError(
            f"{masked[0]} contains {MASK}, which replaces a secret in files for people.",
            where=origins.of(masked[0]),
            do=f"{instead} the original values: {' '.join(f'{option}=…' for option in masked[:8])}",
        )
    chosen = typed.get("model")
    is_typed = isinstance(chosen, Mapping) and "trust_remote_code" in chosen
    if code_flag and recipe.model.trust_remote_code and not is_typed:
        raise TrilloraError(
            "This recipe belongs to a run, and asks to run the Python code of its model (trust_remote_code).",
            where=origins.of("model.trust_remote_code"),
            do=f"read the *.py files of {recipe.model.name}; if you trust them, add {code_flag}",
        )
    return recipe


def _read_tree(source: Mapping[str, object], folder: Path, origins: Origins, tiny: bool) -> dict[str, Any]:
    """The recipe in a mapping, with shorthand written out, absolute paths, and its section `tiny` applied or left
    out."""
    tree = _expanded(source)
    _locate(tree, folder)
    section = tree.pop("tiny", None)
    small = tiny_overrides(section, origins.recipe)
    if section == APPLIED:
        return {**tree, "tiny": APPLIED}
    if not tiny:
        return tree
    tree = shrunk(tree)
    for path, value in small:
        origins.overridden(path, f"{origins.recipe}, tiny.{path}")
        tree = merged(tree, _given(path, value, folder))
    return {**tree, "tiny": APPLIED}


def _given(path: str, value: object, folder: Path) -> dict[str, Any]:
    """One override as a tree. Its relative paths count from `folder`."""
    given = _expanded(_nested(path, value))
    _locate(given, folder)
    return given


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors and for other programs."""
    schema = _without_titles(Recipe.model_json_schema())
    parts = {"StageSection": StageOptions, "PhaseSection": PhaseOptions}
    for part, own in parts.items():
        for name in own.model_fields:  # the default of a stage's option is the value in `train`
            schema["$defs"][part]["properties"][name].pop("default", None)
    for holder in (schema, *(schema["$defs"][part] for part in parts)):
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
            path = f"{prefix}{field.alias or name}"
            found[path] = Option.of(path, field)
            inner = found[path].section
            if inner is not None:
                visit(f"{path}.", inner)

    visit("", Recipe)
    return found


def _validated(tree: Mapping[str, object], origins: Origins) -> Recipe:
    known = options()
    unknown = _unknown_paths(tree, known)
    problems = [unknown_option(path, known, origins) for path in unknown[:MAX_SHOWN]]
    num_problems = len(unknown)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        wrong = inner_problems(error, known, unknown)
        num_problems += len(wrong)
        problems += [value_problem(path, wrong[path], known, origins) for path in list(wrong)[:MAX_SHOWN]]
    if problems:
        raise problems_as_error(problems[:MAX_SHOWN], num_problems)
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
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")
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
    except ValueError as error:
        do = "give the path of a YAML file"
        raise TrilloraError(f"The recipe cannot be used: {error}.", where=str(path), do=do) from error
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


def _parsed_overrides(overrides: Sequence[str] | Mapping[str, object], origins: Origins) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            origins.overridden(path, f"override {path}")
            yield path, value
        return
    for text in overrides:
        path, equals, value = text.partition("=")
        path, where = path.strip(), f"override {visible_line(path.strip()[:MAX_LETTERS])}"
        if not equals:
            do = "write key=value, as in train.steps=10"
            raise TrilloraError(f"{shown(text)} is not an override.", where="the command line", do=do)
        origins.overridden(path, where)
        yield path, yaml.parse(value, where)


def _expanded(tree: Mapping[str, object]) -> dict[str, Any]:
    """The mapping with every shorthand section written out, so that overrides can reach inside."""
    expanded = dict(tree)
    for name, field in Recipe.model_fields.items():
        section = Option.of(name, field).section
        if section is None or name not in expanded or name in LISTS:
            continue
        if not (expanded[name] is None and field.default is None):
            expanded[name] = as_mapping(section, expanded[name])
    for name in LISTS:
        if isinstance(parts := expanded.get(name), list):
            expanded[name] = [
                {**part, "data": as_mapping(DataSection, part["data"])}
                if isinstance(part, Mapping) and part.get("data") is not None
                else part
                for part in parts
            ]
    return expanded


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


_DATA_SUFFIX = re.compile(r"\.(jsonl|ndjson|json|txt|md|csv|tsv|parquet|gz|zst|tar|tgz|zip)$")


def _locate(tree: dict[str, Any], folder: Path) -> None:
    """Makes the paths of a tree absolute, in place. URLs and hub ids stay as they are."""
    data, model, train, lora = (tree.get(name) for name in ("data", "model", "train", "lora"))
    if isinstance(data, Mapping):
        tree["data"] = _located_data(data, folder, "data")
    for part in LISTS:
        if tree.get(part) is not None:
            tree[part] = _each(tree[part], _located_stage, folder, part)
    if isinstance(train, Mapping):
        train = tree["train"] = _located_loss(train, folder, "train")
        if isinstance(to := train.get("checkpoint_dir"), str):
            tree["train"] = {**train, "checkpoint_dir": _located(to, folder, "train.checkpoint_dir")}
    if isinstance(lora, Mapping) and isinstance(start := lora.get("from"), str):
        tree["lora"] = {**lora, "from": _data_path(start, folder, "lora.from")}
    if isinstance(model, Mapping) and isinstance(name := model.get("name"), str) and name:
        # A bare word may be a hub id: only a value that starts like a path is a folder.
        is_path = name.startswith(("./", "../", "~"))
        path = user_path(name, where="model.name", folder=folder if is_path else None)
        tree["model"] = {**model, "name": os.path.realpath(path) if is_path else name}


def _each(items: object, change: Callable[[Any, Path, str], Any], folder: Path, where: str) -> Any:
    """The change made to every item of a list. In an override, a list is a mapping of numbers: `stages.0.data=…`."""
    if isinstance(items, Mapping):
        return {key: change(item, folder, f"{where}.{key}") for key, item in items.items()}
    return [change(item, folder, f"{where}.{n}") for n, item in enumerate(items)] if isinstance(items, list) else items


def _located_loss(options: Mapping[str, object], folder: Path, where: str) -> dict[str, Any]:
    """A loss may be a file."""

    def located(name: object) -> object:
        return _located(name, folder, f"{where}.loss") if isinstance(name, str) and is_file(name) else name

    loss = options.get("loss")
    found = [located(name) for name in loss] if isinstance(loss, list) else located(loss)
    return {**options, "loss": found} if "loss" in options else dict(options)


def _located_stage(stage: object, folder: Path, where: str) -> Any:
    stage = _located_loss(stage, folder, where) if isinstance(stage, Mapping) else stage
    if isinstance(stage, Mapping) and isinstance(stage.get("data"), str | list | Mapping):
        data = as_mapping(DataSection, stage["data"])
        return {**stage, "data": _located_data(data, folder, f"{where}.data")}
    return stage


def _located_data(data: Mapping[str, object], folder: Path, where: str) -> dict[str, Any]:
    located = dict(data)
    if isinstance(path := data.get("path"), str):
        located["path"] = _data_path(path, folder, f"{where}.path")
    elif path is not None:
        located["path"] = _each(path, _located_source, folder, f"{where}.path")
    if isinstance(validation := data.get("validation"), str):
        located["validation"] = _data_path(validation, folder, f"{where}.validation")
    if isinstance(schema := data.get("json_schema"), str):
        located["json_schema"] = os.path.realpath(_located(schema, folder, f"{where}.json_schema"))
    if isinstance(template := data.get("chat_template"), str) and ("/" in template or "." in template):
        located["chat_template"] = os.path.realpath(_located(template, folder, f"{where}.chat_template"))
    return located


def _located_source(source: object, folder: Path, where: str) -> Any:
    expanded = as_mapping(SourceSection, source)
    if isinstance(expanded, Mapping) and isinstance(path := expanded.get("path"), str):
        return {**expanded, "path": _data_path(path, folder, where)}
    return source


def _data_path(path: str, folder: Path, where: str) -> str:
    located = _located(path, folder, where)
    is_hub_id = HUB_ID_AT.fullmatch(path) and not _DATA_SUFFIX.search(path) and not os.path.exists(located)
    return path if is_hub_id else located


def _located(path: str, folder: Path, where: str) -> str:
    """The absolute path. Symbolic links keep their names: the suffix gives the format."""
    if not path or "://" in path:
        check_letters(path, where)
        return path
    return os.path.abspath(user_path(path, where=where, folder=folder))


def _without_titles(node: object) -> Any:
    """Drops the titles in which pydantic repeats each name. An option called `title` stays: its value is a mapping."""
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(v) for v in node] if isinstance(node, list) else node
