"""The recipes that come with Trillora, and copies of them with the files that they name.

    copy_recipe("gemma-3-270m-chat", Path("recipes"))

    recipes/gemma-3-270m-chat.yaml
    recipes/samples/bookings.jsonl
    recipes/samples/NOTICE            the licenses of the samples

A recipe is NAME.yaml or NAME/recipe.yaml in the folder `trillora/recipes`: files in an installation, a link to the
folder of the source in a checkout. Files keep their places relative to the recipe, so a copy works as it is.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError, nearest
from trillora.files.atomic import make_folder, write_file
from trillora.recipe import yaml

HOME = Path(__file__).parent / "recipes"
NOTICE = "NOTICE"  # next to samples of others: their licenses


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with Trillora."""

    name: str
    file: Path

    @property
    def what(self) -> str:
        """The first sentence of the comment at its head."""
        lines = self.file.read_text("utf-8").splitlines()
        end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        text = " ".join(line.removeprefix("#").strip() for line in lines[:end])
        return re.split(r"(?<=\.) ", text, maxsplit=1)[0]

    @property
    def needs_tiny(self) -> bool:
        """Whether it is made for a chip: a CPU trains it with `--tiny`."""
        return "tiny" in self._options()

    def files(self) -> list[Path]:
        """The recipe, the files that it names, and the licenses of those."""
        named = sorted({path for text in _texts(self._options()) for path in _found(text, self.file.parent)})
        notices = {path.parent / NOTICE for path in named} | {path.parents[1] / NOTICE for path in named}
        return [self.file, *named, *sorted(path for path in notices if HOME in path.parents and path.is_file())]

    def _options(self) -> dict[str, Any]:
        return dict(yaml.parse(self.file.read_text("utf-8"), self.name))


def shipped_recipes() -> dict[str, ShippedRecipe]:
    """All recipes, by name."""
    names = {path.stem: path for path in HOME.glob("*.yaml")} | {
        path.parent.name: path for path in HOME.glob("*/recipe.yaml")
    }
    if not names:
        what = "The recipes are missing in this installation of Trillora."
        raise TrilloraError(what, where=str(HOME), do="install Trillora again, from its source or a wheel of it")
    return {name: ShippedRecipe(name, names[name]) for name in sorted(names)}


def shipped_files() -> list[Path]:
    """The files of all recipes, each once, and the examples of losses."""
    of_recipes = {path for recipe in shipped_recipes().values() for path in recipe.files()}
    return sorted(of_recipes | set((HOME / "losses").glob("*.py")))


@dataclass(frozen=True)
class CopiedRecipe:
    """A recipe in a folder of the user."""

    recipe: ShippedRecipe
    files: tuple[Path, ...]  # of the copy; the first is the recipe itself


def copy_recipe(name: str, folder: Path) -> CopiedRecipe:
    """Copies a recipe and the files that it needs into a folder. A file that is there already, with other content, is
    an error before anything is written."""
    known = shipped_recipes()
    recipe = known.get(name.removesuffix(".yaml"))
    if recipe is None:
        meant = nearest(name, known)
        hint = f"did you mean {meant}? " if meant else ""
        do = f"{hint}The recipes are: {', '.join(known)}"
        raise TrilloraError(f"There is no recipe '{name[:80]}'.", where="trillora recipes", do=do)
    copies = {folder / path.relative_to(HOME): path.read_bytes() for path in recipe.files()}
    for path, content in copies.items():
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content):
            do = "copy to another folder with --to FOLDER, or rename this file"
            raise TrilloraError("There is another file with this name.", where=str(path), do=do)
    for path, content in copies.items():
        if not path.exists():
            make_folder(path.parent)
            write_file(path, content)
    return CopiedRecipe(recipe, tuple(copies))


def _texts(value: object) -> Iterator[str]:
    """Every text in a recipe's options."""
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)


def _found(text: str, folder: Path) -> Iterator[Path]:
    """The files that a text names, as a path or a pattern relative to the folder."""
    if not os.path.isabs(text):
        yield from (path for name in glob.glob(text, root_dir=folder) if (path := folder / name).is_file())
