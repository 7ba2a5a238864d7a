"""Listeners of users: they see every event, and may end the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

import trillora
from trillora.events import Event, Note, Saved, Step, StopTraining, ignore_events
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    return tiny_run.recipe(folder, train={"steps": 6, **options})


def test_the_example_of_the_docs_stops_a_run_and_resumes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(settings(folder)))
    example, both = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "watch" in code]
    assert "event.loss < 0.5" in example
    names: dict[str, Any] = {}
    exec(example.replace("event.loss < 0.5", "event.step == 2"), names)
    *steps, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2", "3"]  # the next step was running
    assert last == names["result"].stopped == "the listener (the loss is low enough)"
    assert names["result"].adapter is None

    answer = trillora.load("runs/first", listener=ignore_events).generate("What is 1 + 1?", max_tokens=4)
    assert isinstance(answer, str)
    assert (tmp_path / "runs" / "first" / "exports" / "adapter-step-3").is_dir()

    exec(both, names)  # continues, and prints what `watch` prints too
    shown = capsys.readouterr().out
    assert "Resuming from step 3 of 6" in shown and re.search(r"^6 \d", shown, re.M) and "step 6/6" in shown
    whole = train(load_recipe(settings(folder)), tmp_path / "whole")
    adapters = [run / "adapter" / "adapter_model.safetensors" for run in (whole.run, Path("runs/first"))]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.parametrize("kind", [Note, Saved])
def test_any_event_in_any_thread_may_stop_a_run(folder: Path, tmp_path: Path, kind: type[Event]) -> None:
    """Notes come before the first step, and a thread sends what is saved."""
    steps: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, Step):
            steps.append(event.step)
        if isinstance(event, kind):
            raise StopTraining

    options = {"steps": 2000, "checkpoint_every": 2}
    result = train(load_recipe(settings(folder, **options)), tmp_path / "run", listener=listen)
    assert result.stopped == "the listener" and 1 <= len(steps) < 2000
    assert tiny_run.checkpoints_of(tmp_path / "run").steps()[-1] == steps[-1]
    assert len(steps) == 1 or kind is Saved


def test_another_exception_of_a_listener_ends_the_call(folder: Path, tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, Step) and event.step == 2:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train(load_recipe(settings(folder)), tmp_path / "run", listener=listen)
    assert len(train(load_recipe(settings(folder)), tmp_path / "run").losses) == 6
