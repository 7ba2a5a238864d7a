"""Installs a bundle into the environment of the running Python: exactly the packages of its set.

    PYTHONPATH=job/trillora-0.2.0-py3-none-any.whl venv/bin/python -P -m trillora.launch.install job tpu

reads `job/requirements.txt`, lets uv install it with its hashes, and compares what is there with the file. Nothing is
resolved to "newest". Imported from the wheel before anything is installed: standard library only.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trillora.locks.sets import PYTHONS, TORCH_INDEX, installed_versions, locked_versions, read_lock

REQUIREMENTS = "requirements.txt"
TOKEN_FILE = "hf-token"  # noqa: S105, the name of a file
UV = "uv==0.13.7"
SHOWN = ("jax", "libtpu", "torch", "torchax", "transformers")
NO_TORCH = re.compile(r"no version of torch==")
LAST_LINES = 8  # of uv's answer, in an error


class InstallError(Exception):
    """The set could not be installed; the message says what to do."""


def requirements(names: Sequence[str], wheel: Path) -> str:
    """The text of requirements.txt: a set, what is added to it (smollm2, wandb, trackio), and the wheel next to it."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{_joined([read_lock(name) for name in names])}./{wheel.name} --hash=sha256:{digest}\n"


def _joined(locks: Sequence[str]) -> str:
    """One requirements file. Sets and what is added to them may name a package twice, in the same version."""
    found = {entry.split("==")[0]: entry for lock in locks for entry in re.split(r"\n(?=\w)", lock.strip())[1:]}
    return "".join(f"{entry}\n" for entry in found.values())


def install(folder: Path, set_name: str = "tpu", *, torch_index: str = TORCH_INDEX) -> dict[str, str]:
    """Installs `folder/requirements.txt`. Returns the versions that it names, all of which are installed now."""
    started = time.monotonic()
    check_machine(set_name)
    wanted = locked_versions((folder / REQUIREMENTS).read_text("utf-8"))
    code, output = _install(folder)
    if code != 0 and NO_TORCH.search(output):  # no mirror and no folder of UV_FIND_LINKS has its CPU build
        # Which index a file comes from does not matter: hashes decide.
        code, output = _install(folder, "--index", torch_index, "--index-strategy", "unsafe-best-match")
    if code != 0:
        raise InstallError(explain(output))
    importlib.invalidate_caches()
    found = installed_versions()
    wrong = [f"{name} {found.get(name)} instead of {v}" for name, v in wanted.items() if found.get(name) != v]
    if wrong:
        raise InstallError(
            f"After the installation, {len(wrong)} packages are not as in the set {set_name}: {', '.join(wrong[:3])}.\n"
            f"  do: remove {sys.prefix} and install again; if that does not help, report this message."
        )
    shown = ", ".join(f"{name} {wanted[name]}" for name in SHOWN if name in wanted)
    print(f"Installed the set {set_name}: {shown}; {len(wanted)} packages, {time.monotonic() - started:.0f} s.")
    return wanted


def check_machine(set_name: str) -> None:
    """Raises an error where a set has no builds."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in (("Linux", "x86_64"), ("Linux", "AMD64")):
        raise InstallError(
            f"The set {set_name} is for Linux on x86-64, and this is {system} on {machine}.\n"
            "  do: use a machine with x86-64 processors, as Colab, Kaggle and all machines with TPUs have."
        )
    (first, last), this = PYTHONS[set_name], sys.version_info[:2]
    if not first <= this <= last:
        text, oldest, newest = (".".join(map(str, version)) for version in (this, first, last))
        raise InstallError(
            f"The set {set_name} has builds for Python {oldest} to {newest}, and this is Python {text}.\n"
            "  do: make the environment with `uv venv --python 3.12`."
        )


def _install(folder: Path, *more: str) -> tuple[int, str]:
    command = [find_uv(), "pip", "install", "--python", sys.executable, "--no-deps", "--require-hashes", *more]
    done = subprocess.run(
        [*command, "--requirement", REQUIREMENTS], cwd=folder, capture_output=True, text=True, errors="replace"
    )
    return done.returncode, done.stdout + done.stderr


def find_uv() -> str:
    """The path of uv, which is installed if it is missing."""
    if found := shutil.which(
        "uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    ):
        return found
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "install", "--quiet", UV], capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise InstallError(f"uv, which installs packages, is missing. {explain(done.stderr)}")
    code = "import uv; print(uv.find_uv_bin())"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def explain(output: str) -> str:
    """What went wrong, by the words of uv or pip, and what to do."""
    last = "\n".join(f"  | {line}" for line in list(_lines(output))[-LAST_LINES:])
    if re.search(r"hash mismatch|THESE PACKAGES DO NOT MATCH", output, re.IGNORECASE):
        what = "A package is not the file that was tested: its hash differs."
        do = "install again; if it stays so, launch again with a newer Trillora and do not use this package"
    elif re.search(r"dns error|failed to fetch|could not connect|connection|timed out|network", output, re.IGNORECASE):
        what = "The package index cannot be reached."
        do = (
            "turn the network on (Kaggle: Settings > Internet), or set UV_FIND_LINKS to a folder with the wheels of "
            "requirements.txt and UV_NO_INDEX=1"
        )
    elif re.search(r"no wheels|matching (?:platform|python|ABI)", output, re.IGNORECASE):
        what = f"A package of the set has no build for Python {platform.python_version()} on this machine."
        do = "make the environment with `uv venv --python 3.12`"
    elif "No space left" in output:
        what, do = "The disk is full.", "free 4 GB, or make the environment on another disk"
    else:
        what, do = "The packages cannot be installed.", "see the lines above"
    return f"{what}\n{last}\n  do: {do}."


def _lines(output: str) -> Iterator[str]:
    return (line.rstrip()[:300] for line in output.splitlines() if line.strip())


def main() -> int:
    try:
        install(Path(sys.argv[1]), *sys.argv[2:])
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
