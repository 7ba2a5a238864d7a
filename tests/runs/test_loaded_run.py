"""`trillora.load` and the notebook that uses it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run

import trillora
from trillora.errors import TrilloraError
from trillora.evaluation.result import Evaluation
from trillora.events import ignore_events
from trillora.loaded_run import LoadedRun

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first-run.ipynb"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_model(folder / "model", tiny_run.llama(num_layers=1, width=32))
    return folder


@pytest.fixture(scope="module")
def names(world: Path) -> dict[str, Any]:
    """What is defined after the notebook's cells ran, with a tiny model."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    found: dict[str, Any] = {}
    num_replaced = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            source = "".join(cell["source"])
            if "parameters" in cell["metadata"].get("tags", ()):
                source, num_replaced = 'MODEL, STEPS, RUN = "./model", 3, "runs/capitals"', num_replaced + 1
            exec(compile(source, NOTEBOOK.name, "exec"), found)
    assert num_replaced == 1
    return found


@pytest.fixture(scope="module")
def run(names: dict[str, Any], world: Path) -> LoadedRun:
    return trillora.load(world / names["RUN"], listener=ignore_events)


def test_the_notebook_trains_asks_evaluates_and_exports(names: dict[str, Any], world: Path) -> None:
    assert len(names["result"].losses) == 3 and names["result"].adapter is not None
    assert [type(answer) for answer in (*names["adapted"], *names["before"])] == [str] * 4
    assert isinstance(names["evaluation"], Evaluation)
    assert names["evaluation"].base.loss != names["evaluation"].adapter.loss
    assert world / names["merged"] == world / "runs" / "capitals" / "exports" / "merged"
    assert (world / names["merged"] / "model.safetensors").is_file()


def test_one_prompt_has_one_answer_and_a_list_has_a_list(run: LoadedRun) -> None:
    messages = [{"role": "user", "content": "The capital of Peru?"}]
    alone = run.generate("The capital of Peru?", max_tokens=4)
    assert isinstance(alone, str)
    assert run.generate(["The capital of Peru?", messages], max_tokens=4) == [alone, alone]


def test_a_run_is_merged_with_another(run: LoadedRun, world: Path, tmp_path: Path) -> None:
    other = trillora.train(
        tiny_run.recipe(world, data={"path": str(world / "capitals.csv")}, train={"steps": 1}, lora={"rank": 8}),
        out=tmp_path / "other",
        listener=ignore_events,
    )
    result = run.merge(other.run, out=tmp_path / "both", weights=(1.0, 0.5))
    assert [each.weight for each in result.inputs] == [1.0, 0.5]
    assert (tmp_path / "both" / "adapter_model.safetensors").is_file()


def test_a_run_that_is_not_there_is_named(world: Path, names: dict[str, Any]) -> None:
    with pytest.raises(TrilloraError, match="no run 'capital'") as caught:
        trillora.load(world / "runs" / "capital")
    assert "did you mean 'capitals'?" in caught.value.do
    with pytest.raises(TrilloraError, match="not a run"):
        trillora.load(world / "model")


def test_an_unknown_export_is_refused_before_anything_is_opened(run: LoadedRun) -> None:
    with pytest.raises(TrilloraError, match="no export to 'ggfu'") as caught:
        run.export("ggfu")
    assert "did you mean 'gguf'?" in caught.value.do


def test_metrics_are_a_data_frame_where_pandas_is_installed(names: dict[str, Any]) -> None:
    result = names["result"]
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(TrilloraError, match="pandas"):
            result.metrics_frame()
        return
    frame = result.metrics_frame()
    assert list(frame[frame.kind == "step"].loss) == list(result.losses)
