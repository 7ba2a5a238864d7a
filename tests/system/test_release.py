"""A release: sdist and wheel are complete, and the wheel works in a new environment, far from the checkout.

The environment is made by uv from the lock of `make quickstart`, with hashes, and everything in it is called as a user
would: by the path of the command, in an empty folder, with a bare PATH and a new home.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import release
import typer
from installed_wheel import Installed, install_wheel
from quickstart_run import QUICKSTART, tiny_model

from trillora.cli import app
from trillora.launch.install import find_uv
from trillora.launch.wheel import wheel_content
from trillora.shipped import HOME, shipped_recipes
from trillora.version import __version__

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path

    @property
    def files(self) -> dict[str, bytes]:
        return package_files(self.wheel)


def package_files(wheel: Path | io.BytesIO) -> dict[str, bytes]:
    """The package's files in a wheel, without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("trillora/")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(*release.build(tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def installed(built: Built, package_index: None, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(built.wheel, tmp_path_factory.mktemp("release"))


def command_lines() -> Iterator[list[str]]:
    """Every command of the command line."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield [name]
        yield from ([name, inner] for inner in getattr(command, "commands", {}))


# ---- the files


def test_the_wheel_has_the_files_of_the_package_and_no_others(built: Built) -> None:
    """Compared with the wheel that a launch makes of the running package, by other code."""
    name, content = wheel_content()
    assert built.wheel.name == name
    expected = package_files(io.BytesIO(content))
    assert built.files.keys() == expected.keys()
    assert [name for name, data in built.files.items() if data != expected[name]] == []
    assert len(expected) > 400


def test_the_sdist_is_complete_and_has_no_half_of_the_tests(built: Built) -> None:
    """The wheel was built from it; the checkout makes the same wheel."""
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        assert not any(member.issym() or member.islnk() for member in archive)
    assert {"LICENSE", "README.md", "pyproject.toml"} < names and not any(n.startswith("tests/") for n in names)
    assert {f"src/{name}" for name in built.files} <= names
    clone = built.sdist.parent / "clone"
    release.copy_tracked(clone)
    assert package_files(release.run_backend("wheel", clone, clone)) == built.files


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert sections[0] == ("Unreleased", "")
    assert sections[1][0] == __version__ and sections[1][1], "a date"


# ---- installed


def test_version_and_the_help_of_every_command(installed: Installed) -> None:
    assert installed.trillora("--version") == f"trillora {__version__}\n"
    lines = list(command_lines())
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda words: installed.trillora(*words, "--help"), lines))
    for words, text in zip(lines, texts, strict=True):
        assert text.startswith(f"Usage: trillora {' '.join(words)} "), words
    assert len(lines) >= 22 and ["recipes", "copy"] in lines
    package = installed.run(installed.bin / "python", "-c", "import trillora; print(trillora.__file__)").stdout
    assert package.startswith(str(installed.bin.parent)), "not the checkout"


def test_uv_keeps_the_torch_that_is_there(installed: Installed, built: Built) -> None:
    """As README says: `uv pip install` of what is here, and of an extra, chooses no other torch."""
    words = ["pip", "install", "--dry-run", "--python", str(installed.bin / "python"), f"{built.wheel}[data]"]
    done = subprocess.run([find_uv(), *words], capture_output=True, text=True, check=False)
    changed = {line.split()[1].partition("==")[0] for line in done.stderr.splitlines() if line[:3] in (" + ", " - ")}
    assert done.returncode == 0 and {"pyarrow", "zstandard"} <= changed, done.stderr
    assert not [name for name in changed if name.startswith(("torch", "nvidia", "jax"))], changed


def test_recipes_are_copied_from_the_wheel_and_inspected(installed: Installed) -> None:
    names = installed.trillora("recipes", "list").splitlines()[:-1]
    assert [line.split()[0] for line in names] == sorted(shipped_recipes())
    copied = [installed.trillora("recipes", "copy", line.split()[0]) for line in names]
    for path in {line for text in copied for line in text.splitlines() if line.startswith("recipes/")}:
        assert (installed.folder / path).read_bytes() == (HOME.parent / path).read_bytes()
    (typed,) = [line for line in copied[0].splitlines() if " inspect " in line]  # gemma-3-270m-chat
    done = installed.run("bash", "-c", typed.removeprefix("Look at its data").strip())
    assert done.returncode == 0 and "400" in done.stdout, done.stderr
    report = json.loads(installed.trillora("inspect", "recipes/tutorial/recipe.yaml", "--json"))
    assert report["rows"] == 207
    schema = json.loads(installed.trillora("schema"))
    assert schema == json.loads((ROOT / "docs" / "recipe.schema.json").read_text("utf-8"))


def test_doctor_finds_the_tested_packages(installed: Installed) -> None:
    findings = {each["name"]: each for each in json.loads(installed.trillora("doctor", "--json"))}
    assert findings["packages"]["what"].startswith("the set cpu: "), findings["packages"]
    assert findings["embedded model"]["state"] == "ok"


def test_the_quickstart_runs_and_the_command_that_it_prints_works(installed: Installed, tmp_path: Path) -> None:
    """Two rows and the tiny model of test_quickstart.py; everything else is the quickstart's own."""
    changes = json.dumps(tiny_model(tmp_path / "model"))
    done = installed.run(installed.bin / "python", "-P", "-c", QUICKSTART, changes)
    assert done.returncode == 0, done.stderr
    *_, chat, train = done.stdout.splitlines()
    assert chat == f"Chat with it:           {installed.bin}/trillora chat runs/quickstart"
    assert f"{installed.bin}/trillora train runs/quickstart/recipe.yaml" in train
    typed = f"{chat.partition(':')[2].strip()} --max-tokens 2"
    answer = installed.run("bash", "-c", typed, input="How severe is an open port?\n")
    assert answer.returncode == 0, answer.stderr
