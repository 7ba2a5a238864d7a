"""The commands for the recipes that come with Trillora: recipes list, recipes copy."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from trillora.cli.options import JsonResult
from trillora.cli.output import print_json

recipes = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List and copy the recipes that come with Trillora.",
)


@recipes.command("list")
def list_all(as_json: JsonResult = False) -> None:
    """Show all recipes, with one sentence about each."""
    from trillora.own_command import runnable
    from trillora.shipped import shipped_recipes

    known = shipped_recipes()
    if as_json:
        print_json([{"name": name, "what": recipe.what} for name, recipe in known.items()])
        return
    width = max(map(len, known))
    for name, recipe in known.items():
        print(f"{name:<{width}}  {recipe.what}")
    print(runnable("Copy one with its data: trillora recipes copy NAME"))


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `trillora recipes list` shows.")],
    to: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", help="Folder for the recipe; created if it is missing.")
    ] = Path("recipes"),
    as_json: JsonResult = False,
) -> None:
    """Copy a recipe with its sample data and schemas into a folder."""
    from trillora.files.user_path import user_path
    from trillora.own_command import runnable
    from trillora.shipped import copy_recipe

    copied = copy_recipe(name, user_path(to, where="--to"))
    if as_json:
        print_json({"recipe": str(copied.files[0]), "files": [str(path) for path in copied.files]})
        return
    recipe, tiny = shlex.quote(str(copied.files[0])), " --tiny" if copied.recipe.needs_tiny else ""
    print(*copied.files, sep="\n")
    print(runnable(f"Look at its data   trillora inspect {recipe}{tiny}"))
    print(runnable(f"Train it on a CPU  trillora train {recipe}{tiny} --out runs/{copied.recipe.name}"))
