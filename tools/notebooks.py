"""Writes the notebooks in notebooks/, as `trillora launch` would with the released wheel.

    python tools/notebooks.py                      # with the wheel that notebooks/SHA256SUMS names
    python tools/notebooks.py dist/trillora-…whl   # with this one: writes SHA256SUMS, too

tools/release.py does the second with the wheel that it has built. tests/launch/test_ready_notebooks.py compares the
files with what this program writes, and executes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from pathlib import Path

from trillora.launch.bundle import Bundle, make_bundle
from trillora.launch.notebooks.document import make_notebook
from trillora.launch.notebooks.targets import find_target
from trillora.launch.origin import Release

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SUMS = FOLDER / "SHA256SUMS"
NOTEBOOKS = {
    "colab-tpu": find_target("colab", "colab"),
    "colab-t4": find_target("colab", "t4"),
    "kaggle-tpu": find_target("kaggle", "kaggle"),
    "kaggle-2xt4": find_target("kaggle", "2xt4"),
}


def write(release: Release) -> bool:
    """Writes SHA256SUMS and the notebooks. Returns whether anything changed."""
    texts = {SUMS: f"{release.sha256}  {release.wheel}\n"}
    texts |= {FOLDER / f"{name}.ipynb": text for name, text in notebooks(release).items()}
    changed = [file for file, text in texts.items() if not file.is_file() or file.read_text("utf-8") != text]
    for file in changed:
        file.write_text(texts[file], "utf-8")
    return bool(changed)


def notebooks(release: Release) -> dict[str, str]:
    """The text of each notebook, by name."""
    return {name: make_notebook(bundle(name), None, target, release=release) for name, target in NOTEBOOKS.items()}


def bundle(name: str) -> Bundle:
    made = make_bundle(FOLDER / "recipe.yaml", set_name=NOTEBOOKS[name].packages)
    return dataclasses.replace(made, name=name)


def named_release() -> Release:
    """The release that the notebooks use."""
    return _release(*SUMS.read_text("utf-8").split())


def release_of(wheel: Path) -> Release:
    return _release(hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.name)


def _release(sha256: str, name: str) -> Release:
    [version] = re.findall(r"^trillora-(.+)-py3-none-any\.whl$", name)
    return Release(version, sha256)


def main() -> int:
    release = release_of(Path(sys.argv[1])) if len(sys.argv) > 1 else named_release()
    print(f"notebooks/ {'now use' if write(release) else 'already use'} {release.wheel} ({release.sha256})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
