"""The recipes that come with Trillora: `trillora recipes list` and `copy`. test_release.py copies from a wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trillora.cli import app
from trillora.data.reading.files import expand
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.shipped import HOME, copy_recipe, shipped_files, shipped_recipes

ROOT = Path(__file__).parents[2]


def local_files(recipe: Path, *, tiny: bool) -> set[Path]:
    """The data and the schemas that a run of the recipe would read."""
    found = set()
    for stage in stages_of(load_recipe(recipe, tiny=tiny)):
        data = stage.recipe.data
        paths = [data.path, *([data.validation] if data.validation else [])]
        assert all(isinstance(path, str) and Path(path).is_absolute() for path in paths), "not a local file"
        found |= {Path(file.path) for file in expand(paths)}
        found |= {Path(data.json_schema)} if data.json_schema else set()
    return found


def test_every_recipe_is_listed_with_a_sentence() -> None:
    result = CliRunner().invoke(app, ["recipes", "list"])
    shown = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[:-1])
    assert shown.keys() == {path.stem for path in (ROOT / "recipes").glob("*.yaml")} | {"tutorial"}
    assert len(shown) > 8 and all(what.endswith(".") for what in shown.values()), shown
    assert result.stdout.endswith("recipes copy NAME\n")
    as_json = json.loads(CliRunner().invoke(app, ["recipes", "list", "--json"]).stdout)
    assert {recipe["name"]: recipe["what"] for recipe in as_json} == shown


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_copy_has_the_files_that_its_recipe_reads_and_no_others(name: str, tmp_path: Path) -> None:
    copied = copy_recipe(name, tmp_path)
    assert all(path.read_bytes() == (HOME / path.relative_to(tmp_path)).read_bytes() for path in copied.files)
    recipe, *named = copied.files
    read = local_files(recipe, tiny=copied.recipe.needs_tiny)
    assert read and read == {path for path in named if path.name != "NOTICE"}
    assert any(path.name == "NOTICE" for path in named) == any("samples" in path.parts for path in named)


def test_only_recipes_and_what_they_name_are_shipped() -> None:
    shipped = {path.relative_to(HOME).as_posix() for path in shipped_files()}
    assert {"samples/NOTICE", "schemas/sys-scan-ground-truth.schema.json", "tutorial/messages.csv"} < shipped
    assert not any(name.startswith(("data/", "real/", "results")) for name in shipped) and len(shipped) > 20


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    copy_recipe("sys-scan", tmp_path)
    assert copy_recipe("sys-scan", tmp_path).files == copy_recipe("sys-scan.yaml", tmp_path).files, "equal files"
    own = tmp_path / "samples" / "bookings.jsonl"
    own.write_text("mine")
    with pytest.raises(TrilloraError, match="another file with this name") as caught:
        copy_recipe("gemma-3-270m-chat", tmp_path)
    assert caught.value.where == str(own) and "--to FOLDER" in caught.value.do
    assert own.read_text() == "mine" and not (tmp_path / "gemma-3-270m-chat.yaml").exists()


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recipes", "copy", "tutoral", "--to", str(tmp_path / "new")])
    assert result.exit_code == 2 and "did you mean tutorial?" in result.output
    assert not (tmp_path / "new").exists()


def test_a_copied_recipe_is_inspected_by_the_command_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["recipes", "copy", "sys-scan-mistral-7b"]).stdout
    command = next(line for line in printed.splitlines() if " inspect " in line).partition(" inspect ")[2].split()
    assert command == ["recipes/sys-scan-mistral-7b.yaml", "--tiny"]
    report = CliRunner().invoke(app, ["inspect", *command, "--json"])
    assert report.exit_code == 0, report.output
    assert json.loads(report.stdout)["rows"] == 200
