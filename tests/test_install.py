"""R18: installing on Colab's images changes no package that they have."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from dose import full_dose_only
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
IMAGES = sorted((Path(__file__).parent / "images").iterdir())


@full_dose_only
@pytest.mark.parametrize("image", IMAGES, ids=lambda file: file.stem)
def test_nothing_that_colab_has_is_changed(
    tmp_path: Path, image: Path, record_property: Callable[[str, object], None]
) -> None:
    """pip looks only at names and versions, so an environment with these and without any code is enough."""
    packages = dict(line.split("==") for line in image.read_text().splitlines() if not line.startswith("#"))
    venv.create(tmp_path / "image", with_pip=False)
    relative = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for name, version in packages.items():
        info = tmp_path / "image" / relative / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "image" / "bin" / "python"), "--quiet"]
    report = tmp_path / "report.json"
    command = [*pip, "install", "--dry-run", "--report", str(report), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "Could not fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    installed = {
        item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
    }
    changed = {canonicalize_name(name) for name in installed} & {canonicalize_name(name) for name in packages}
    assert not changed
    assert "torchax" in installed and "trillora" in installed
    record_property("packages of the image checked", len(packages))
    record_property("packages added", len(installed))
