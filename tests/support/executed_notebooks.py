"""Notebooks executed cell by cell, and what they printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from trillora.launch.notebooks.session import RESULT

ADAPTER = Path("run") / "adapter" / "adapter_model.safetensors"


@dataclass(frozen=True)
class Executed:
    """What a notebook left behind."""

    outputs: list[tuple[str, str]]  # source and output of every code cell
    results: Path
    html: str

    def of(self, source: str) -> str:
        [text] = [text for code, text in self.outputs if source in code]
        return text

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / RESULT).read_text())
        return found


def execute(notebook: Path, folder: Path, python: Path | None = None) -> Executed:
    """Runs all cells with `folder` as the current one. `python` runs the processes that the notebook starts."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if python is not None:
            startup = folder / "ipython" / "profile_default" / "startup"
            startup.mkdir(parents=True)
            (startup / "python.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
            patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        return _execute(notebook, folder)


def execute_cells(sources: Sequence[str], folder: Path) -> list[list[Any]]:
    """Runs cells in a new kernel with `folder` as the current one. Returns the outputs of each, as a person sees them
    at the end."""
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])  # type: ignore[no-untyped-call]
    _run(content, folder)
    return [cell.outputs for cell in content.cells]


def _run(content: Any, folder: Path) -> None:
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=900, kernel_name="python3", resources=resources).execute()


def _execute(notebook: Path, folder: Path) -> Executed:
    content = nbformat.read(notebook, as_version=4)
    _run(content, folder)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    outputs = [(cell.source, "".join(out.get("text", "") for out in cell.outputs)) for cell in cells]
    shown = [out.data.get("text/html", "") for cell in cells for out in cell.outputs if "data" in out]
    name = next(path.stem for path in (folder / "trillora").glob("*") if path.name not in ("results", "input"))
    return Executed(outputs, folder / "trillora" / "results" / name, "".join(shown))
