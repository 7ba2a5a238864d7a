"""The generated notebooks, executed cell by cell on the CPU. Off their platform they choose local folders."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
import tiny_run
import yaml
from dose import FULL, full_dose_only
from executed_notebooks import ADAPTER, Executed, execute
from safetensors.numpy import load_file

from trillora.launch.bundle import make_bundle
from trillora.launch.notebooks.colab import write_colab
from trillora.launch.notebooks.kaggle import KaggleFiles, write_kaggle
from trillora.launch.notebooks.targets import find_target
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.filterwarnings("default")  # of Jupyter's libraries; the product runs in other processes
STEPS = 60


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebooks see one device, not eight: the proof compiles faster."""
    assert jax.device_count() == 8  # also starts jax in this process, which keeps its eight
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("notebooks"), tiny_run.llama(num_layers=1), num_rows=40)


def recipe(home: Path, name: str, **sections: Any) -> Path:
    file = home / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tiny_run.recipe(home, **sections)))
    return file


def test_colab_notebook_proves_trains_evaluates_exports_and_shows_the_report(
    home: Path, tmp_path: Path, warm_python: Path
) -> None:
    data = {"split": {"validation": 0.2, "test": 0.2}}
    file = recipe(home, "lesson", data=data, train={"steps": 6}, evaluate={"max_tokens": 4, "num_samples": 0})
    files = write_colab(make_bundle(file), tmp_path / "launch", find_target("colab", "colab"), export="merged")
    found = execute(files.notebook, tmp_path / "there", None if FULL else warm_python)
    assert found.record["state"] == "finished" and found.record["device"]["platform"] == "cpu"
    assert "neither Colab nor Kaggle" in found.of("session.check(")
    assert "loss" in found.of("session.train(")
    assert len(load_file(found.results / ADAPTER)) > 0
    assert "adapter" in found.of("session.evaluate(")
    assert (found.results / "run" / "exports" / "merged" / "model.safetensors").is_file()
    assert found.html.startswith("<iframe srcdoc=") and "lesson" in found.html
    assert '" sandbox width=' in found.html  # as on the page of `serve`: nothing in it can run

    # The same as without a notebook, bit for bit.
    sections = {"data": data, "train": {"steps": 6}, "evaluate": {"max_tokens": 4, "num_samples": 0}}
    train(load_recipe(tiny_run.recipe(home, **sections)), tmp_path / "plain")
    assert (found.results / ADAPTER).read_bytes() == (tmp_path / "plain" / ADAPTER.relative_to("run")).read_bytes()


@pytest.mark.parametrize(
    ("sections", "is_evaluated"),
    [
        ({"data": {"split": {"validation": 0.2, "test": 0.2}}}, True),
        ({"data": {"split": {"validation": 0.2, "test": 0}}}, False),
        ({"data": {"validation": "rows.jsonl"}}, False),
        ({}, False),
    ],
)
def test_a_notebook_evaluates_only_with_test_rows(
    home: Path, tmp_path: Path, sections: dict[str, Any], is_evaluated: bool
) -> None:
    """As `trillora eval RUN`, which refuses a run without them."""
    shutil.copy(tiny_run.recipe(home)["data"]["path"], home / "rows.jsonl")
    bundle = make_bundle(recipe(home, "lesson", **sections))
    files = write_colab(bundle, tmp_path / "launch", find_target("colab", "colab"), export="none")
    assert ("session.evaluate()" in files.notebook.read_text()) == is_evaluated


def test_a_notebook_of_phases_does_not_evaluate(home: Path, tmp_path: Path) -> None:
    values = tiny_run.recipe(home, data={"split": {"test": 0.2}})
    data = values.pop("data")
    values["phases"] = [{"name": name, "data": data} for name in ("one", "two")]
    (home / "phases.yaml").write_text(yaml.safe_dump(values))
    bundle = make_bundle(home / "phases.yaml")
    files = write_colab(bundle, tmp_path / "launch", find_target("colab", "colab"), export="none")
    assert "session.evaluate()" not in files.notebook.read_text()


@contextmanager
def stopped_at_step(results: Path, step: int) -> Iterator[None]:
    """Stops the training process like Kaggle at the end of a session, once this checkpoint is complete."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            numbers = [
                int(file.parent.name.partition("-")[2]) for file in results.glob("checkpoints/step-*/checksums.json")
            ]
            if max(numbers, default=0) >= step:
                for process in psutil.process_iter(["cmdline"]):
                    words = process.info["cmdline"] or []
                    if "train" in words and f"train.checkpoint_dir={results / 'checkpoints'}" in words:
                        process.terminate()
                        return
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def attach(files: KaggleFiles, folder: Path, previous: Executed | None) -> Path:
    """What Kaggle mounts: the data set, and the output of the previous kernel."""
    inputs = folder / "trillora" / "input"
    shutil.copytree(files.dataset, inputs / "datasets" / "me" / "trillora-chain")
    if previous is not None:
        shutil.copytree(previous.results, inputs / "notebooks" / "me" / "trillora-chain-1")
    return folder


def test_interrupted_chain_of_kernels_ends_with_the_adapter_of_an_uninterrupted_run(
    home: Path, tmp_path: Path, warm_python: Path
) -> None:
    """Two kernels, at full dose three. The last one is not stopped, and its processes may start quickly."""
    ends = (3, 12, None) if FULL else (3, None)
    options = {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 2}
    sections = {"train": options, "data": {"split": {"test": 0.2}}, "evaluate": {"max_tokens": 4, "num_samples": 0}}
    bundle = make_bundle(recipe(home, "chain", **sections))
    target = find_target("kaggle", "kaggle")
    files = write_kaggle(bundle, tmp_path / "launch", "me", target, sessions=len(ends), prove=False)
    reached: list[int] = []
    previous = None
    for number, last in enumerate(ends, start=1):
        folder = attach(files, tmp_path / f"vm-{number}", previous)
        notebook = files.session(number) / f"trillora-chain-{number}.ipynb"
        results = folder / "trillora" / "results" / "chain"
        if last is None:
            previous = execute(notebook, folder, None if FULL else warm_python)
        else:
            with stopped_at_step(results, last):
                previous = execute(notebook, folder)
        assert previous.record["state"] == ("finished" if last is None else "stopped")
        reached.append(tiny_run.metrics(results / "run", "step")[-1]["step"])
    assert reached[0] >= 3 and reached == sorted(set(reached)) and reached[-1] == STEPS
    whole = tmp_path / "whole"
    train(load_recipe(tiny_run.recipe(home, **sections)), whole)
    assert previous is not None
    assert (previous.results / ADAPTER).read_bytes() == (whole / ADAPTER.relative_to("run")).read_bytes()
    assert tiny_run.metrics(previous.results / "run") == tiny_run.metrics(whole)
    assert "adapter" in previous.of("session.evaluate(")
    assert previous.html.startswith("<iframe srcdoc=") and "chain" in previous.html


@full_dose_only
def test_tiny_recipe_runs_in_a_kaggle_notebook(tmp_path: Path) -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    bundle = make_bundle(recipes / "gemma-3-270m-chat.yaml", ["train.steps=4"], tiny=True)
    files = write_kaggle(bundle, tmp_path / "launch", "me", find_target("kaggle", "kaggle"), export="merged")
    folder = tmp_path / "vm"
    shutil.copytree(files.dataset, folder / "trillora" / "input" / "trillora-gemma")
    found = execute(files.session(1) / "trillora-gemma-3-270m-chat-1.ipynb", folder)
    assert found.record["state"] == "finished" and (found.results / ADAPTER).is_file()
