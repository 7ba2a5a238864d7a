"""A run on disk: the names of its files, and what `SavedRun` says about it."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.events import Event, Note
from trillora.generation.generator import Generator
from trillora.model.adapters import load_adapter, read_adapter
from trillora.recipe.load import load_recipe
from trillora.runs import files
from trillora.runs.adapter import adapter_of
from trillora.runs.manifest import read_manifest
from trillora.runs.saved import SavedRun, find_adapter
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")
PACKAGE = Path(__file__).parents[2] / "src" / "trillora"
HOME = Path("runs", "files.py")
NAMES = {value for name, value in vars(files).items() if name.isupper() and isinstance(value, str)} | {*files.MARKS}
# Words with other meanings too: they count where a path is joined or compared.
WORDS = {name for name in NAMES if "." not in name}
CALLS = {"glob", "ignore_patterns", "join", "joinpath", "rglob", "startswith", "write"}


def texts(node: ast.AST) -> Iterator[str]:
    for child in [node, *getattr(node, "elts", [])]:
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def named(node: ast.AST) -> Iterator[str]:
    """The names of a run's files that a piece of code has."""
    match node:
        case ast.Constant(value=str(text)) if text in NAMES - WORDS:
            yield text
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            yield from (text for side in (left, right) for text in texts(side) if text.partition("/")[0] in WORDS)
        case ast.JoinedStr(values=values):
            parts = [part for value in values for text in texts(value) for part in text.split("/")[1:]]
            yield from (part for part in parts if part in NAMES)
        case ast.Compare(left=ast.Attribute(attr="name"), comparators=others):
            yield from (text for other in others for text in texts(other) if text in WORDS)
        case ast.Call(func=ast.Attribute(attr=called), args=arguments) if called in CALLS:
            yield from (text for each in arguments for text in texts(each) if text.partition("/")[0] in WORDS)


def places(package: Path) -> list[str]:
    return [
        f"{file.relative_to(package)}:{node.lineno} {name}"  # type: ignore[attr-defined]
        for file in sorted(package.rglob("*.py"))
        if file.relative_to(package) != HOME
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for name in named(node)
    ]


def test_the_names_of_a_runs_files_have_one_home() -> None:
    assert places(PACKAGE) == []
    assert len(NAMES) > 12 and {"adapter", "adapters", "checkpoints"} <= WORDS


@pytest.mark.parametrize(
    "code",
    [
        'folder / "run.json"',
        'NAME = "recipe.json"',
        'run / "adapter"',
        'run / "adapter" / "config.json"',
        'run / "adapters/code"',
        'folder.parent.name == "adapters"',
        'run.glob("checkpoints/*")',
        'os.path.join(run, "adapter")',
        "f\"{run / 'exports'}\"",
        'f"{run}/adapter"',
    ],
)
def test_a_planted_name_is_found(tmp_path: Path, code: str) -> None:
    for name in ("runs/files.py", "export/source.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{code}\n")
    [found] = places(tmp_path)
    assert found.startswith("export/source.py:1 ")


@pytest.mark.parametrize("code", ['sides = ("base", "adapter")', '"""The content of run.json."""', 'kind == "adapter"'])
def test_other_uses_of_these_words_are_none(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(f"{code}\n")
    assert places(tmp_path) == []


# ---- SavedRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("runs"), tiny_run.llama(num_layers=1))


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    train(load_recipe(tiny_run.recipe(folder, train={"checkpoint_every": 2})), folder / "run")
    return folder / "run"


@pytest.fixture
def interrupted(run: Path, tmp_path: Path) -> Path:
    tiny_run.copy_interrupted(run, tmp_path / "stopped", 2)
    return tmp_path / "stopped"


def test_a_finished_run_says_what_it_is(run: Path) -> None:
    saved = SavedRun.open(str(run))
    assert saved.is_finished and saved.recipe.train.steps == 4 and saved.several == {}
    assert saved.manifest is not None and saved.manifest.num_steps == 4 and saved.manifest.adapter.step == 4
    assert json.loads(saved.manifest.to_json()) == json.loads((run / "run.json").read_text("utf-8"))
    for adapter in (saved.finished_adapter(), adapter_of(saved), find_adapter(run), find_adapter(run / "adapter")):
        assert (adapter.folder, adapter.name, adapter.part, adapter.note) == (run / "adapter", "run", None, "")
        assert adapter.is_result and adapter.run is not None and adapter.run.manifest == read_manifest(run)


def test_an_interrupted_run_is_asked_from_its_last_checkpoint(run: Path, interrupted: Path) -> None:
    events: list[Event] = []
    saved = SavedRun.open(interrupted)
    assert not saved.is_finished
    generator = Generator.open(str(interrupted), listener=events.append)
    note = "The run is not finished: its adapter at the last checkpoint is used, step 2 of 4."
    assert Note(note) in events
    adapter = adapter_of(saved)
    assert (adapter.note, adapter.name, adapter.is_result) == (note, "stopped", False)
    trained = read_adapter(tiny_run.checkpoints_of(run).read(2)["adapter_model.safetensors"])
    _, matrices = load_adapter(adapter.folder)
    assert all((matrices[name] == trained[name]).all() for name in trained) and trained.keys() == matrices.keys()
    whole = Generator.open(str(run))
    assert any(not np.array_equal(generator.adapter[name], whole.adapter[name]) for name in whole.adapter)


def test_an_interrupted_run_is_evaluated_and_can_then_be_finished(
    run: Path, folder: Path, interrupted: Path, tmp_path: Path
) -> None:
    rows = tiny_run.write_chats(tmp_path / "rows.jsonl", 3)
    found = evaluate(interrupted, rows, max_tokens=1)
    assert found.adapter.loss > evaluate(run, rows, max_tokens=1).adapter.loss
    assert (run / "eval.json").is_file() and not (interrupted / "eval.json").exists()  # it has no result yet
    train(load_recipe(tiny_run.recipe(folder, train={"checkpoint_every": 2})), interrupted)
    tiny_run.assert_same(interrupted, run)
    assert adapter_of(SavedRun(interrupted)).folder == interrupted / "adapter"


def test_what_needs_a_result_refuses_a_run_that_is_not_finished(interrupted: Path) -> None:
    for refused in (SavedRun(interrupted).finished_adapter, lambda: find_adapter(interrupted)):
        with pytest.raises(TrilloraError, match="This run is not finished: it has no adapter yet") as caught:
            refused()
        assert "resumes it" in caught.value.do
    shutil.rmtree(interrupted / "checkpoints")
    with pytest.raises(TrilloraError, match="no adapter yet, and no checkpoint"):
        adapter_of(SavedRun(interrupted))


def test_one_of_several_adapters_is_chosen_by_its_name(run: Path, interrupted: Path) -> None:
    for name in ("code", "math"):
        shutil.copytree(run / "adapter", interrupted / "adapters" / name)
    saved = SavedRun(interrupted)
    assert list(saved.several) == list(saved.parts) == ["code", "math"]
    assert adapter_of(saved, "math").folder == interrupted / "adapters" / "math"
    assert find_adapter(interrupted / "adapters" / "code") == saved.finished_adapter("code")
    assert saved.finished_adapter("code").part == saved.finished_adapter("code").name == "code"
    with pytest.raises(TrilloraError, match="several adapters: code, math") as caught:
        adapter_of(saved)
    assert "--adapter NAME" in caught.value.do and str(interrupted / "adapters" / "code") in caught.value.do
    shutil.copytree(run / "adapter", interrupted / "adapter")
    assert saved.several == {} and adapter_of(saved).is_result
    shutil.rmtree(interrupted / "adapters")
    shutil.rmtree(interrupted / "adapter")
    (interrupted / "group.json").write_text("{}")
    with pytest.raises(TrilloraError, match="This run has no adapter"):
        adapter_of(saved)


def test_an_adapter_without_a_run(run: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(run / "adapter", tmp_path / "bare")
    found = find_adapter(bare)
    assert (found.folder, found.run, found.name, found.part, found.is_result) == (bare, None, "bare", None, False)
    with pytest.raises(TrilloraError, match="There is no adapter here"):
        find_adapter(tmp_path)
    with pytest.raises(TrilloraError, match="There is no such folder"):
        find_adapter(tmp_path / "gone")


def test_a_folder_that_is_no_run_names_the_runs_next_to_it(run: Path, folder: Path) -> None:
    with pytest.raises(TrilloraError, match=r"This folder is not a run: it has no recipe\.json") as caught:
        SavedRun.open(folder / "model")
    assert caught.value.do.endswith("runs in the same place: run")
    with pytest.raises(TrilloraError, match="There is no run"):
        SavedRun.open(folder / "runn")
