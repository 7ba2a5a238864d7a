"""Random mutations of a run folder, a model folder and a recipe, each followed by a real command.

No command ends with a traceback or an unexpected error, none takes 10 seconds longer than without the mutation, and no
command uses changed weights without saying so.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from dose import dose, log_progress
from warm_process import WarmCommand

from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

NUM_MUTATIONS = dose(3, 500)
PER_TEST = 6  # mutations
EXTRA_SECONDS = 10.0
SHORT = ("--max-tokens", "2")
# What each command reads; the words are relative to the folder of the mutated files.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generate": (("run", "model"), ("generate", "run", "-p", "hi", *SHORT)),
    "generate without a run": (("model",), ("generate", "model", "-p", "hi", *SHORT)),
    "eval": (("run", "model"), ("eval", "run", "--data", "chats.jsonl", "--rows", "1", "--no-base", *SHORT)),
    "report": (("run",), ("report", "run")),
    "inspect": (("model", "recipe"), ("inspect", "recipe.yaml")),
    "resume": (("stopped", "model", "recipe"), ("train", "recipe.yaml", "--out", "stopped")),
    "start": (("model", "recipe"), ("train", "recipe.yaml", "--out", "new")),
    "estimate": (("model", "recipe"), ("preflight", "recipe.yaml", "--on", "v5e-1", "--estimate", "--fresh")),
}
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**14, 1e308, -1e-300, 0.5, "", "x", "\0", "../..", "/dev/zero", "\x1b[31m",
    "é" * 300, [], {}, [[]], {"a": {"b": []}}, ["x"] * 50, "{{ 7 * 7 }}", "•••",
)  # fmt: skip


class Place:
    """A folder with a model, a recipe, a finished run and a stopped one, and a copy to restore it from."""

    def __init__(self, folder: Path) -> None:
        self.good, self.used = folder / "good", folder / "used"
        self.used.mkdir()
        tiny_run.write_both(self.used, tiny_run.llama(num_layers=1, width=32))
        settings = tiny_run.recipe(self.used, train={"checkpoint_every": 2}, data={"split": {"test": 0.2}})
        settings["model"]["name"], settings["data"]["path"] = "./model", "chats.jsonl"
        (self.used / "recipe.yaml").write_text(yaml.safe_dump(settings))
        train(load_recipe(self.used / "recipe.yaml"), self.used / "run")
        shutil.copytree(self.used / "run", self.used / "stopped", symlinks=True)
        shutil.rmtree(self.used / "stopped" / "adapter")
        shutil.copytree(self.used, self.good, symlinks=True)
        self.adapter = (self.good / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
        self._seconds: dict[str, float] = {}

    def seconds(self, name: str) -> float:
        """The time of a command without a mutation, when nothing is compiled yet."""
        if name not in self._seconds:
            self.restore()
            code, output, self._seconds[name] = self.run(name, limit=600)
            assert code == 0, output
        return self._seconds[name]

    def restore(self) -> None:
        shutil.rmtree(self.used)
        shutil.copytree(self.good, self.used, symlinks=True)

    def run(self, name: str, limit: float) -> tuple[int | None, str, float]:
        started = time.monotonic()
        before = Path.cwd()
        os.chdir(self.used)
        try:
            process = WarmCommand(*COMMANDS[name][1], errors=True)
        finally:
            os.chdir(before)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        output, _ = process.communicate(60)
        timer.cancel()
        return process.returncode, output, time.monotonic() - started


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("mutations"))


def mutate(rng: random.Random, file: Path, others: list[Path]) -> str:
    """Changes a file and returns what was done."""
    if file.suffix in (".json", ".yaml", ".jsonl") and rng.random() < 0.6:
        try:
            return mutate_value(rng, file)
        except (ValueError, IndexError, yaml.YAMLError):
            pass  # not one document: change bytes instead
    kind = rng.choice(tuple(FILE_MUTATIONS))
    FILE_MUTATIONS[kind](rng, file, others)
    return kind


def mutate_value(rng: random.Random, file: Path) -> str:
    document = yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        value = waiting.pop()
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, below in inner:
            places.append((value, key))
            waiting.append(below)
    holder, key = rng.choice(places)
    value = rng.choice(HOSTILE_VALUES)
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
        what = f"no {key}"
    else:
        holder[key] = value
        what = f"{key} = {str(value)[:20]!r}"
    text = yaml.safe_dump(document, allow_unicode=True) if file.suffix == ".yaml" else json.dumps(document)
    file.write_text(text)
    return what


def change_bytes(rng: random.Random, file: Path, _: list[Path]) -> None:
    data = bytearray(file.read_bytes() or b"x")
    for _number in range(rng.choice((1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(rng: random.Random, file: Path, _: list[Path]) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data) + 1)])


def lengthen(rng: random.Random, file: Path, _: list[Path]) -> None:
    file.write_bytes(file.read_bytes() + rng.choice((b"\0", b"}", b"\n\xff", b"[" * 100_000)))


def swap(rng: random.Random, file: Path, others: list[Path]) -> None:
    file.write_bytes(rng.choice(others).read_bytes())


def instead(make: Callable[[Path], object]) -> Callable[[random.Random, Path, list[Path]], None]:
    """Something that is not a file, in the place of the file."""

    def change(rng: random.Random, file: Path, _: list[Path]) -> None:
        file.unlink()
        make(file)

    return change


FILE_MUTATIONS: dict[str, Callable[[random.Random, Path, list[Path]], object]] = {
    "bits": change_bytes,
    "more bits": change_bytes,
    "cut": cut,
    "longer": lengthen,
    "empty": lambda rng, file, _: file.write_bytes(b""),
    "noise": lambda rng, file, _: file.write_bytes(rng.randbytes(3000)),
    "another file": swap,
    "nothing": instead(lambda file: None),
    "folder": instead(lambda file: file.mkdir()),
    "link to itself": instead(lambda file: file.symlink_to(file)),
    "link to a device": instead(lambda file: file.symlink_to("/dev/zero")),
    "pipe": instead(os.mkfifo),
}


def files_of(place: Place, part: str) -> list[Path]:
    if part == "recipe":
        return [place.used / "recipe.yaml"]
    return sorted(file for file in (place.used / part).rglob("*") if file.is_file() and file.name != ".lock")


def problem(place: Place, name: str, file: Path, result: tuple[int | None, str, float]) -> str | None:
    """What is wrong with the outcome of a command after `file` was changed."""
    code, output, seconds = result
    if seconds > place.seconds(name) + EXTRA_SECONDS:
        return f"took {seconds:.0f} s instead of {place.seconds(name):.0f} s"
    if code not in (0, 1, 2, 75, 76) or "Traceback" in output:
        return f"exit code {code}"
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x7f\u202a-\u202e\u2066-\u2069]", output):
        return "control characters in the output"
    good = place.good / file.relative_to(place.used)
    same = file.is_file() and not file.is_symlink() and file.read_bytes() == good.read_bytes()
    if code != 0 or same or not file.name.endswith(".safetensors"):
        return None
    if name == "resume" and (place.used / "stopped/adapter/adapter_model.safetensors").read_bytes() == place.adapter:
        return None  # an earlier checkpoint was used
    used = {"generate": ("adapter", "model"), "eval": ("adapter", "model"), "resume": ("checkpoints", "model")}
    if any(folder in file.relative_to(place.used).parts for folder in used.get(name, ())):
        return "changed weights were used without a word"
    return None


@pytest.mark.parametrize("first", range(0, NUM_MUTATIONS, PER_TEST))
def test_mutated_files_are_reported_and_never_used_silently(
    place: Place, first: int, record_property: Callable[[str, object], None]
) -> None:
    failures = []
    for seed in range(first, min(first + PER_TEST, NUM_MUTATIONS)):
        rng = random.Random(f"mutation {seed}")
        name = rng.choice(tuple(COMMANDS))
        limit = place.seconds(name) + EXTRA_SECONDS
        place.restore()
        files = files_of(place, rng.choice(COMMANDS[name][0]))
        file = rng.choice(files)
        what = mutate(rng, file, files)
        result = place.run(name, limit + 5)
        if wrong := problem(place, name, file, result):
            where = f"{seed}: {name}, {file.relative_to(place.used)}, {what}"
            failures.append(f"{where}: {wrong}\n{result[1][-1500:]}")
            log_progress(failures[-1])
    record_property("mutations", min(PER_TEST, NUM_MUTATIONS - first))
    assert not failures, "\n\n".join(failures)
