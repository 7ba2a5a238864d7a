"""Commands are printed as they can be typed: by name where the PATH leads to this installation, else by path."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trillora import own_command
from trillora.own_command import runnable

SCRIPT = Path(sysconfig.get_path("scripts")) / "trillora"
SYSTEM = "/usr/bin:/bin"
INSTALLED = pytest.mark.skipif(not SCRIPT.exists(), reason="Trillora is not installed, only imported")


def printed_command(folder: Path, path: str, program: str | Path = SCRIPT) -> str:
    """What `trillora recipes list` says in a shell with this PATH; its last line is a command."""
    environment = {"PATH": path, "HOME": str(folder)}
    done = subprocess.run(
        [program, "recipes", "list"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    command = done.stdout.splitlines()[-1].partition(": ")[2].replace("NAME", "tutorial")
    typed = ["bash", "--noprofile", "--norc", "-c", command]
    again = subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "messages.csv" in again.stdout, (command, again.stderr)
    return command


@INSTALLED
def test_without_trillora_on_the_path_its_path_is_printed_and_works(tmp_path: Path) -> None:
    assert printed_command(tmp_path, SYSTEM) == f"{SCRIPT} recipes copy tutorial"
    inside = tmp_path / "my environment"  # shown relative to the working folder, and quoted
    inside.symlink_to(SCRIPT.parents[1])
    found = printed_command(tmp_path, SYSTEM, inside / "bin" / "trillora")
    assert found == "'my environment/bin/trillora' recipes copy tutorial"


@INSTALLED
def test_trillora_on_the_path_is_printed_by_name(tmp_path: Path) -> None:
    assert printed_command(tmp_path, f"{SCRIPT.parent}:{SYSTEM}") == "trillora recipes copy tutorial"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "trillora").symlink_to(SCRIPT)  # as pipx and uv install commands
    assert printed_command(tmp_path, f"{tmp_path / 'bin'}:{SYSTEM}") == "trillora recipes copy tutorial"


@INSTALLED
def test_another_trillora_on_the_path_is_not_ours(tmp_path: Path) -> None:
    other = tmp_path / "bin" / "trillora"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    assert printed_command(tmp_path, f"{other.parent}:{SYSTEM}") == f"{SCRIPT} recipes copy tutorial"


def test_a_module_without_a_script_is_called_through_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = runnable("trillora --version")
    assert command.endswith(" -m trillora --version")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trillora ")


def test_only_commands_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_command, "own_command", lambda: "HERE")
    monkeypatch.setattr(own_command, "own_pip", lambda verb: f"PIP {verb}")
    for text, expected in {
        "run `trillora doctor`, then trillora eval RUN": "run `HERE doctor`, then HERE eval RUN",
        "see `trillora --help`": "see `HERE --help`",
        "(trillora serve)": "(HERE serve)",
        "pip install x; pip uninstall y": "PIP install x; PIP uninstall y",
        "uv pip install x": "uv pip install x",
        "python -m pip install x": "python -m pip install x",
        ".venv/bin/trillora chat run": ".venv/bin/trillora chat run",
        "Trillora trains; import trillora": "Trillora trains; import trillora",
        "my-trillora chat, trillora-x, a pip": "my-trillora chat, trillora-x, a pip",
    }.items():
        assert runnable(text) == expected


def test_pip_is_the_one_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(own_command.importlib.util, "find_spec", lambda name: object())
    assert runnable("pip install x") == f"{own_command._shown(Path(sys.executable))} -m pip install x"
    uv = tmp_path / "uv"
    uv.touch(0o755)
    monkeypatch.setattr(own_command.importlib.util, "find_spec", lambda name: None)
    assert runnable("pip install x") == f"uv pip install --python {own_command._shown(Path(sys.executable))} x"
