"""The notebooks of the repository: what `tools/notebooks.py` writes, executed cell by cell on the CPU.

The cells are the committed ones, but for two values: the recipe has the smallest model and few steps, and the wheel is
the one of the code under test. pip downloads it from its real address, which a server on this machine answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import nbformat
import pytest
import tiny_run
import yaml
from dose import FULL, slow_case
from executed_notebooks import ADAPTER, execute
from loopback_release import serving_release
from safetensors.numpy import load_file

import notebooks as ready
from trillora.launch.bundle import make_bundle
from trillora.launch.origin import Release
from trillora.launch.wheel import build_wheel
from trillora.version import REPOSITORY, __version__

pytestmark = pytest.mark.filterwarnings("default")  # of Jupyter's libraries
ROOT = Path(__file__).parents[2]
NAMES = sorted(ready.NOTEBOOKS)
QUICK = ("colab-tpu", "kaggle-2xt4")  # executed at every dose


def read(name: str) -> str:
    return (ready.FOLDER / f"{name}.ipynb").read_text("utf-8")


def test_the_committed_notebooks_are_what_the_tool_writes() -> None:
    assert {file.name for file in ready.FOLDER.iterdir()} == {
        "SHA256SUMS",
        "recipe.yaml",
        *(f"{n}.ipynb" for n in NAMES),
    }
    release = ready.named_release()
    assert ready.notebooks(release) == {name: read(name) for name in NAMES}, "run python tools/notebooks.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_everything_in_it_can_be_read(name: str) -> None:
    notebook = nbformat.reads(read(name), as_version=4)
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) < 12 and all(len(source.splitlines()) < 25 for source in code)
    assert not any(re.search(r"[A-Za-z0-9+/]{65}", source) for source in code), "base64"
    release = ready.named_release()
    assert release.url in code[0] and release.sha256 in code[0]
    assert release.url == f"{REPOSITORY}/releases/download/v{release.version}/{release.wheel}"
    place = "Colab" if name.startswith("colab") else "Kaggle"
    assert ("Colab" in read(name), "Kaggle" in read(name)) == (place == "Colab", place == "Kaggle")


def test_the_link_in_the_readme_opens_a_notebook_of_the_release() -> None:
    links = re.findall(
        r"https://colab\.research\.google\.com/github/\S+?(?=\))", (ROOT / "README.md").read_text("utf-8")
    )
    source, version = REPOSITORY.removeprefix("https://github.com/"), ready.named_release().version
    place = f"https://colab.research.google.com/github/{source}/blob/v{version}/notebooks"
    assert links and set(links) <= {f"{place}/{name}.ipynb" for name in NAMES if name.startswith("colab")}


# ---- executed


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebooks see one device, not eight: the proof compiles faster."""
    assert jax.device_count() == 8  # also starts jax in this process, which keeps its eight
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def released(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which pip finds the wheel at the address of its release."""
    with serving_release({Release(__version__, "").url: wheel}, tmp_path_factory.mktemp("server")) as variables:
        yield variables


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_model(tmp_path_factory.mktemp("ready") / "model", tiny_run.llama(num_layers=1))


def with_small_values(name: str, wheel: Path, model: Path, target: Path) -> Path:
    """The committed notebook with another digest and another recipe, and no other change."""
    notebook = nbformat.reads(read(name), as_version=4)
    fetch, recipe = (cell for cell in notebook.cells if re.search(r"SHA256 =|recipe.yaml\"\)", cell.source))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    fetch.source = fetch.source.replace(ready.named_release().sha256, digest).replace(
        ready.named_release().version, __version__
    )
    options = yaml.safe_load(re.search(r'"""\\\n(.*)"""', recipe.source, re.DOTALL)[1])  # type: ignore[index]
    assert options["data"]["path"] == "./data/messages.csv"
    options |= {"model": {"name": str(model), "dtype": "float32"}, "hardware": {"devices": 1}}
    del options["train"]["epochs"]
    options["train"]["steps"] = 3
    options["evaluate"] = {"max_tokens": 4, "num_samples": 0}
    recipe.source = f'_ = (folder / "recipe.yaml").write_text({yaml.safe_dump(options)!r}, encoding="utf-8")'
    nbformat.write(notebook, target)
    return target


@pytest.mark.parametrize("name", [name if name in QUICK else slow_case(name) for name in NAMES])
def test_a_notebook_downloads_checks_trains_evaluates_and_exports(
    name: str,
    wheel: Path,
    released: dict[str, str],
    model: Path,
    warm_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in released.items():
        monkeypatch.setenv(variable, value)
    notebook = with_small_values(name, wheel, model, tmp_path / f"{name}.ipynb")
    found = execute(notebook, tmp_path / "there", None if FULL else warm_python)
    assert found.record["state"] == "finished" and found.record["name"] == name
    assert (tmp_path / "there" / "trillora" / name / wheel.name).read_bytes() == wheel.read_bytes()
    assert "neither Colab nor Kaggle" in found.of("session.check(") and "loss" in found.of("session.train(")
    assert len(load_file(found.results / ADAPTER)) > 0 and "adapter" in found.of("session.evaluate(")
    assert (found.results / "run" / "exports" / "merged" / "model.safetensors").is_file()
    assert found.html.startswith("<iframe srcdoc=") and "Not run on a" in read(name)


def test_a_wheel_with_another_hash_is_not_used(
    wheel: Path, released: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in released.items():
        monkeypatch.setenv(variable, value)
    [fetch] = [cell for cell in nbformat.reads(read("colab-tpu"), as_version=4).cells if "SHA256 =" in cell.source]
    source = fetch.source.replace(ready.named_release().sha256, "0" * 64)
    source = source.replace(ready.named_release().version, __version__)
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not list(tmp_path.rglob("*.whl"))


def test_the_recipe_of_the_notebooks_loads_and_its_data_are_in_the_wheel() -> None:
    bundle = make_bundle(ready.FOLDER / "recipe.yaml")
    assert [file.name for file in bundle.files] == ["data/messages.csv"] and bundle.recipe.train.epochs == 3
    assert json.loads(read("kaggle-tpu"))["metadata"].keys() == {"kernelspec", "language_info"}
