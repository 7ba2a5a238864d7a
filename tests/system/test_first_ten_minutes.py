"""Every command of docs/first-ten-minutes.md works as printed: from a fresh clone, and from the wheel alone.

Both run the real embedded model with XLA's optimizations, in a terminal, with the environment of a new user.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import release
import terminal
import tiny_run
from dose import full_dose_only
from installed_wheel import install_wheel

import trillora
from trillora.quickstart import run as lesson
from trillora.runs.files import EVAL_FILE

pytestmark = full_dose_only


def end_of(recording: terminal.Recording) -> str:
    return recording.text[-4000:]


def test_from_a_clone_the_quickstart_learns_and_its_commands_work(
    package_index: None, tmp_path: Path, record_property: Any
) -> None:
    folder = terminal.clone(tmp_path / "trillora")
    recording = terminal.record("clone", folder, os.environ["PATH"])
    assert len(recording.codes) == 3 and set(recording.codes.values()) == {0}, end_of(recording)
    run = folder / "runs" / "quickstart"
    found = json.loads((run / EVAL_FILE).read_text("utf-8"))
    base, adapter, guess = found["base"], found["adapter"], found["majority"]
    assert found["num_rows"] == lesson.NUM_TESTED
    fields = adapter["fields"]
    record_property("quickstart", ", ".join(f"{name} {share:.0%}" for name, share in fields.items()))
    assert base["right_fields"] == 0 and adapter["right_fields"] >= 0.95
    assert fields["provider"] >= guess["provider"] + 0.15  # 91 % were measured where a guess has 56 %
    assert fields["area"] >= guess["area"] + 0.30  # 69 % and 19 %
    assert "provider" in (run / "report.html").read_text("utf-8")
    assert "Bye." in recording.text.partition("Failed check: S3 bucket")[2], end_of(recording)


def test_from_the_wheel_alone_own_rows_are_trained_exported_and_certified(
    package_index: None, tmp_path: Path, record_property: Any
) -> None:
    wheel = release.build(tmp_path / "dist")[1]
    installed = install_wheel(wheel, tmp_path / "place")
    terminal.write_files(installed.folder)
    recording = terminal.record("wheel", installed.folder, os.pathsep.join((str(installed.bin), "/usr/bin", "/bin")))
    assert len(recording.codes) == 6 and set(recording.codes.values()) == {0}, end_of(recording)
    record_property("commands", len(recording.codes))
    run = installed.folder / "runs" / "qa"
    assert (run / "adapter" / "adapter_model.safetensors").is_file() and (run / "report.html").is_file()
    assert (run / "exports" / "merged" / "model.safetensors").is_file()
    losses = [line["loss"] for line in tiny_run.metrics(run, "step")]
    assert len(losses) == 12 and losses[-1] < losses[0] / 3, losses
    assert "adapter passed" in recording.text and "trillora chat runs/qa" in recording.text
    assert str(Path(trillora.__file__).parent) not in recording.text, "not the checkout's code"


def test_the_recordings_are_of_the_commands_of_the_page() -> None:
    for part in terminal.PARTS:
        text = (terminal.RECORDINGS / f"{part}.txt").read_text("utf-8")
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        assert typed == [each.command for each in terminal.commands_of(part)], f"run tools/terminal.py {part} --write"
