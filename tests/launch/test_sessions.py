"""What a launched notebook does on the machine that it runs on: checks, results, processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trillora.devices import listed
from trillora.launch.notebooks import session as session_module
from trillora.launch.notebooks.session import RESULT, Session, SessionError, clean_environment, find_platform
from trillora.launch.notebooks.targets import TARGETS, Target

CPU = {"platform": "cpu", "kind": "cpu", "count": 1}
GPU = {"platform": "gpu", "kind": "Tesla T4", "count": 1}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.name))
@pytest.mark.parametrize("found", [CPU, GPU, {"error": "no driver\n"}], ids=["cpu", "one GPU", "no driver"])
def test_session_without_the_chips_is_refused_and_says_so_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, found: dict[str, Any]
) -> None:
    session = Session("chat", tmp_path / "chat", backend=target.backend, devices=target.num_devices)
    monkeypatch.setattr(session, "platform", target.place)
    monkeypatch.setattr(listed, "found_by", lambda *words, **options: dict(found))
    if found is GPU and target.name == "t4":
        session.check(prove=False)
        return
    with pytest.raises(SessionError, match=f"not have {target.num_devices} x {target.backend.upper()}") as refused:
        session.check()
    assert ("580 or newer" in str(refused.value)) == (target.backend == "gpu")
    with pytest.raises(SessionError, match="has not passed"):  # `colab exec` runs the next cell anyway
        session.train()
    assert json.loads((session.results / RESULT).read_text())["state"] == "no-chip"


def test_results_on_colab_are_on_drive_which_is_written_out_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    drive = ModuleType("google.colab.drive")
    drive.mount = lambda place: calls.append(f"mount {place}")  # type: ignore[attr-defined]
    drive.flush_and_unmount = lambda: calls.append("flush")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.colab.drive", drive)
    monkeypatch.setattr(session_module, "DRIVE", tmp_path / "drive")
    session = Session("chat", tmp_path / "chat")
    session.platform = "colab"
    session.keep_results()
    assert calls == [f"mount {tmp_path / 'drive'}"]
    assert session.results == tmp_path / "drive" / "MyDrive" / "trillora" / "chat"
    (session.run / "adapter").mkdir(parents=True)
    (session.run / "adapter" / "adapter_config.json").write_text("{}")
    session.train()  # it is finished: nothing is started
    session.finish()
    assert calls[1:] == ["flush"] and "The run is already finished." in capsys.readouterr().out
    assert (session.results / "run" / "adapter" / "adapter_config.json").is_file()
    assert json.loads((session.results / RESULT).read_text())["state"] == "finished"

    def refused(place: str) -> None:
        raise ValueError("mount failed")

    drive.mount = refused  # type: ignore[attr-defined]
    again = Session("chat", tmp_path / "other")
    again.platform = "colab"
    again.keep_results()
    assert "Google Drive is not mounted (ValueError): download the results" in capsys.readouterr().out


def test_results_of_another_recipe_are_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: one")
    first = Session("chat", folder)
    first._save(state="finished")
    (first.results / "run").mkdir()
    assert Session("chat", folder).results == first.results
    (folder / "recipe.yaml").write_text("model: two")
    with pytest.raises(SessionError, match="another recipe with the name chat"):
        Session("chat", folder)


def test_a_recipe_with_a_mistake_can_be_corrected(tmp_path: Path) -> None:
    """It left a record, but no results that another recipe could spoil."""
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("modle: one")
    Session("chat", folder)._save(state="failed", exit_code=2)
    (folder / "recipe.yaml").write_text("model: one")
    corrected = Session("chat", folder)
    corrected._save(state="started")
    assert json.loads((corrected.results / RESULT).read_text())["state"] == "started"


def test_processes_end_before_the_session_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kaggle ends by force may be lost, for example an adapter whose evaluation takes too long."""
    monkeypatch.setattr(session_module, "LAST", 3599.0)
    session = Session("chat", tmp_path / "chat", hours=1)
    assert session._call([sys.executable, "-c", "import time; time.sleep(60)"]) == -15
    with pytest.raises(SessionError, match="start a new one"):
        session._started -= 3000
        session._is_checked = True
        session.train()


def test_platform_is_found_by_its_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_platform() == "local"
    (tmp_path / "google" / "colab").mkdir(parents=True)
    (tmp_path / "google" / "colab" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "google", None)  # another package of that name may be installed
    monkeypatch.delitem(sys.modules, "google")
    assert find_platform() == "colab"
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert find_platform() == "kaggle"


def test_environment_of_kaggle_is_cleaned() -> None:
    image = {"TPU_LIBRARY_PATH": "/lib/libtpu.so", "TPU_WORKER_HOSTNAMES": "WARNING: could not find it", "A": "1"}
    cleaned = clean_environment(image, "kaggle")
    assert cleaned.keys() == {"A", "PYTHONUNBUFFERED"}
    assert clean_environment(image | {"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, "kaggle")["TPU_WORKER_HOSTNAMES"] == "t-0,t-1"
    assert clean_environment(image | {"PYTHONPATH": "/env/python"}, "colab").keys() == cleaned.keys()
    assert image.items() <= clean_environment(image, "local").items()
