"""Sets of packages that were tested together. Standard library only: a notebook imports this before it installs them.

    found = find_set("tpu")
    found.versions["jax"], found.pythons      # "0.10.2", ((3, 11), (3, 13))
    found.differences(installed_versions())   # {} or {"jax": ("0.7.2", "0.10.2")}: installed, in the set

| set | for | file |
|---|---|---|
| cpu | laptops, `make quickstart`; `make test` has the same versions | cpu.txt; torch is installed in addition |
| tpu | Colab, Kaggle, Cloud TPU; preflight on any x86-64 Linux | tpu.txt |
| cuda | NVIDIA GPUs | cuda.txt |

`make lock` writes the files (tools/lock.py).
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

Python = tuple[int, int]
# Python versions, from and to, for which all packages of a set have builds.
PYTHONS: dict[str, tuple[Python, Python]] = {
    "cpu": ((3, 11), (3, 13)),
    "tpu": ((3, 11), (3, 13)),
    "cuda": ((3, 12), (3, 13)),
}
PREFERRED_PYTHON = "3.12"  # in all sets
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; pip's index has no CPU builds for x86-64
# These decide numbers and memory. Two environments in which they are equal run the same programs.
DECISIVE = ("jax", "jaxlib", "libtpu", "torch", "torchax", "transformers", "optax")
ONE_PER_CHIP = {"libtpu": "tpu", "jax_cuda13_plugin": "cuda"}  # package -> the only set that has it


@dataclass(frozen=True)
class LockedSet:
    """A set of packages."""

    name: str
    text: str  # a requirements file, with hashes
    versions: Mapping[str, str]  # by normalized name

    @property
    def pythons(self) -> tuple[Python, Python]:
        return PYTHONS[self.name]

    def supports(self, python: Python) -> bool:
        return self.pythons[0] <= python <= self.pythons[1]

    def differences(self, installed: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        """What decides numbers and is not as in the set: the installed version (None: missing), and the set's. A build
        of torch for CUDA has the same version as one for CPUs."""
        return {
            name: (installed.get(name), wanted)
            for name in DECISIVE
            if (wanted := self.versions.get(name)) is not None
            and public_version(installed.get(name)) != public_version(wanted)
        }

    @property
    def summary(self) -> str:
        """`jax 0.10.2, libtpu 0.0.42.1, torch 2.13.0+cpu, torchax …`."""
        names = ("jax", "libtpu", "torch", "torchax", "transformers")
        return ", ".join(f"{name} {self.versions[name]}" for name in names if name in self.versions)


@functools.cache
def find_set(name: str) -> LockedSet:
    text = read_lock(name)
    return LockedSet(name, text, locked_versions(text))


def read_lock(name: str) -> str:
    """The text of a file: a set, or what a tracking service needs in addition (wandb, trackio)."""
    return (resources.files(__package__) / f"{name}.txt").read_text("utf-8")


def lock_file(name: str) -> str:
    """Its path."""
    return str(resources.files(__package__) / f"{name}.txt")


def locked_versions(text: str) -> dict[str, str]:
    """Of a requirements file, by normalized name.

    >>> locked_versions("Numpy==2.3.5 --hash=sha256:0\\ntyping-extensions==4.15.0 ; python_version < '3.13'")
    {'numpy': '2.3.5', 'typing_extensions': '4.15.0'}
    """
    return {normalized(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)}


def installed_versions() -> dict[str, str]:
    """Of all packages in this environment, by normalized name. Of two installations the first counts, as in imports."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        found.setdefault(normalized(each.metadata["Name"]), each.version)
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def public_version(version: str | None) -> str | None:
    """Without what names the build: `2.13.0+cpu` -> `2.13.0`."""
    return None if version is None else version.partition("+")[0]


def set_for(installed: Mapping[str, str], chip: str | None) -> LockedSet:
    """The set to compare an environment with: for the chip of the machine (tpu, gpu or None), or by what is there."""
    if chip is not None:
        return find_set({"tpu": "tpu", "gpu": "cuda"}[chip])
    return find_set(next((name for package, name in ONE_PER_CHIP.items() if package in installed), "cpu"))
