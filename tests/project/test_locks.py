"""The lock files: complete, exact, with hashes, and what the tests run with."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setup_env import TORCH

from trillora.locks.sets import PREFERRED_PYTHON, find_set

ROOT = Path(__file__).parents[2]
CUDA_DIFFERS = {"jax", "jaxlib", "torch"}  # tools/lock.py says why
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SETS = ROOT / "src" / "trillora" / "locks"
FILES = {file.name: file for folder in (ROOT / "locks", SETS) for file in folder.glob("*.txt")}
WITHOUT_TORCH = {"cpu.txt", "dev.txt"}  # its build depends on the machine


def locked(file: str) -> dict[str, Requirement]:
    text = FILES[file].read_text("utf-8")
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip())[1:]:
        head, *hashes = (line.strip(" \\") for line in entry.splitlines())
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), head
        requirement = Requirement(head)
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), head
        found[canonicalize_name(requirement.name)] = requirement
    return found


def version_of(requirement: Requirement) -> str:
    return str(requirement.specifier).removeprefix("==")


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("cpu.txt", ["export"]),
        ("dev.txt", ["dev"]),
        ("tpu.txt", ["tpu", "data", "export", "eval"]),
        ("cuda.txt", ["cuda", "data", "export", "eval"]),
    ],
)
def test_every_requirement_is_locked_within_its_bounds(file: str, extras: list[str]) -> None:
    lock = locked(file)
    declared = [*PROJECT["dependencies"], *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]
    wrong = []
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name == "torch" and file in WITHOUT_TORCH:
            continue
        if name not in lock or not requirement.specifier.contains(version_of(lock[name]), prereleases=True):
            wrong.append(f"{requirement} but {lock.get(name)}")
    assert not wrong, "run `make lock`"
    assert "setuptools" in lock


def test_what_is_tested_here_is_what_a_tpu_gets() -> None:
    """All sets agree on every package that they share, except cuda on those that its reason names."""
    dev, visited = {name: version_of(entry) for name, entry in locked("dev.txt").items()}, 0
    for file in ("cpu.txt", "tpu.txt", "smollm2.txt", "cuda.txt"):
        for name, entry in locked(file).items():
            if name in dev and not (file == "cuda.txt" and name in CUDA_DIFFERS):
                assert version_of(entry) == dev[name], (file, name)
                visited += 1
    assert visited > 200
    assert version_of(locked("tpu.txt")["torch"]) == f"{TORCH}+cpu"


def test_each_lock_adds_to_the_set_for_tpus_and_changes_nothing() -> None:
    for file in ("wandb.txt", "trackio.txt", "smollm2.txt"):
        assert locked(file) and not locked(file).keys() & locked("tpu.txt").keys()


def test_a_lock_has_no_addresses_and_cuda_is_only_where_it_belongs() -> None:
    assert len(FILES) == 8
    for name, file in FILES.items():
        text = file.read_text("utf-8")
        assert "://" not in text and " @ " not in text
        assert bool(re.search(r"^(nvidia|jax-cuda)\S*==", text, re.MULTILINE)) == (name == "cuda.txt")
        assert not re.search(r"^triton==", text, re.MULTILINE)  # of a torch for GPUs


def test_every_set_has_a_build_of_torch_for_each_of_its_python_versions() -> None:
    for name in ("tpu", "cuda"):
        (_, first), (_, last) = find_set(name).pythons
        entry = next(e for e in find_set(name).text.split("\ntorch==")[1:])
        hashes = re.split(r"\n(?=\S)", entry)[0].count("--hash=sha256:")
        assert hashes == last - first + 1 and PREFERRED_PYTHON.endswith(f".{max(first, 12)}")


@pytest.mark.skipif(not (Path(sys.prefix) / "setup.stamp").exists(), reason="not an environment of `make setup`")
@pytest.mark.skipif(Path(sys.prefix).name != ".venv", reason="an environment with the oldest libraries")
def test_these_tests_run_with_the_locked_versions() -> None:
    differing = {}
    for name, requirement in locked("dev.txt").items():
        if requirement.marker is None or requirement.marker.evaluate():
            try:
                installed = metadata.version(name)
            except metadata.PackageNotFoundError:
                installed = "missing"
            if installed != version_of(requirement):
                differing[name] = (installed, version_of(requirement))
    assert not differing, "run `make setup`"


# Version with a published hole in code that reads what strangers send -> what it allows.
HOLES = {
    "jinja2": ("3.1.5", "a template leaves the sandbox, CVE-2025-27516"),
    "starlette": ("0.49.0", "a Range header takes quadratic time, CVE-2025-62727"),
    "h11": ("0.14.0", "malformed chunks are accepted, CVE-2025-43859"),
}


@pytest.mark.parametrize("name", HOLES)
def test_bounds_exclude_versions_with_a_published_hole(name: str) -> None:
    declared = {canonicalize_name(each.name): each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    version, hole = HOLES[name]
    assert version not in declared[name], hole
    for file in ("cpu.txt", "dev.txt", "tpu.txt", "cuda.txt"):
        assert version_of(locked(file)[name]) in declared[name], file
