"""`trillora.load` and the notebook that uses it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from executed_notebooks import execute_cells

import trillora
from trillora.errors import TrilloraError
from trillora.events import ignore_events
from trillora.loaded_run import LoadedRun
from trillora.training.run_process import TrainResult

pytestmark = pytest.mark.filterwarnings("default")  # of Jupyter's libraries
VALUES = """
import json
print(json.dumps({
    "num_losses": len(result.losses),
    "answers": [*adapted, *before],
    "base": evaluation.base.loss,
    "adapter": evaluation.adapter.loss,
    "merged": str(merged),
}))
"""
NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first-run.ipynb"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_model(folder / "model", tiny_run.llama(num_layers=1, width=32))
    return folder


@dataclass(frozen=True)
class Cells:
    """The notebook after its cells ran in a kernel, with a tiny model."""

    values: dict[str, Any]  # what was defined
    outputs: list[Any]  # of all cells, in order


@pytest.fixture(scope="module")
def cells(world: Path) -> Cells:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    [place] = [place for place, cell in enumerate(code) if "parameters" in cell["metadata"].get("tags", ())]
    sources[place] = 'MODEL, STEPS, RUN = "./model", 3, "runs/capitals"'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(trillora.__file__).parent.parent))
        *outputs, [values] = execute_cells([*sources, VALUES], world)
    return Cells(json.loads(values.text), [output for cell in outputs for output in cell])


@pytest.fixture(scope="module")
def run(cells: Cells, world: Path) -> LoadedRun:
    return trillora.load(world / "runs" / "capitals", listener=ignore_events)


@pytest.fixture(scope="module")
def other(cells: Cells, world: Path) -> TrainResult:
    """Another run of the same base."""
    values = tiny_run.recipe(world, data={"path": str(world / "capitals.csv")}, train={"steps": 1}, lora={"rank": 8})
    return trillora.train(values, out=world / "runs" / "other", listener=ignore_events)


def test_the_notebook_trains_asks_evaluates_and_exports(cells: Cells, world: Path) -> None:
    values = cells.values
    assert values["num_losses"] == 3 and [type(answer) for answer in values["answers"]] == [str] * 4
    assert values["base"] != values["adapter"]  # losses
    assert world / values["merged"] == world / "runs" / "capitals" / "exports" / "merged"
    assert (world / values["merged"] / "model.safetensors").is_file()


def test_the_notebook_shows_the_data_at_once_and_one_panel_of_the_run(cells: Cells) -> None:
    shown = [output.data["text/plain"] for output in cells.outputs if output.output_type == "display_data"]
    [data] = [text for text in shown if "The data is ready to train on." in text]
    assert data.count("\n") > 20
    [panel] = [text for text in shown if "╭─ train ─" in text]
    assert "step 3/3 ━" in panel and "100%" in panel
    errors = [output.text for output in cells.outputs if output.get("name") == "stderr"]
    assert "Warning" not in "".join(errors)


def test_the_notebook_writes_the_columns_that_it_names(cells: Cells, world: Path) -> None:
    header = (world / "capitals.csv").read_text("utf-8").splitlines()[0].split(",")
    text = "".join(line for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] for line in cell["source"])
    assert f"`{header[0]}` and `{header[1]}` is one of the known formats" in text


def test_one_prompt_has_one_answer_and_a_list_has_a_list(run: LoadedRun) -> None:
    messages = [{"role": "user", "content": "The capital of Peru?"}]
    alone = run.generate("The capital of Peru?", max_tokens=4)
    assert isinstance(alone, str)
    assert run.generate(["The capital of Peru?", messages], max_tokens=4) == [alone, alone]


def test_a_run_is_merged_with_another(run: LoadedRun, other: TrainResult, tmp_path: Path) -> None:
    result = run.merge(other.run, out=tmp_path / "both", weights=(1.0, 0.5))
    assert [each.weight for each in result.inputs] == [1.0, 0.5]
    assert (tmp_path / "both" / "adapter_model.safetensors").is_file()


def test_a_run_that_is_not_there_is_named(world: Path, run: LoadedRun) -> None:
    with pytest.raises(TrilloraError, match="no run 'capital'") as caught:
        trillora.load(world / "runs" / "capital")
    assert "did you mean 'capitals'?" in caught.value.do
    with pytest.raises(TrilloraError, match="not a run"):
        trillora.load(world / "model")


def test_an_unknown_export_is_refused_before_anything_is_opened(run: LoadedRun) -> None:
    with pytest.raises(TrilloraError, match="no export to 'ggfu'") as caught:
        run.export("ggfu")
    assert "did you mean 'gguf'?" in caught.value.do


def test_metrics_are_a_data_frame_where_pandas_is_installed(other: TrainResult) -> None:
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(TrilloraError, match="pandas"):
            other.metrics_frame()
        return
    frame = other.metrics_frame()
    assert list(frame[frame.kind == "step"].loss) == list(other.losses)
