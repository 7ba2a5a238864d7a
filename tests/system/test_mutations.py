"""Random mutations of a run, a model, a recipe, adapters and exports, each followed by a real command.

No command ends with a traceback or an unexpected error, none takes 10 seconds longer than without the mutation, no
command uses changed weights without saying so, none prints or writes a secret of its environment, and none connects to
another machine because a file names it: only a recipe may name a model of the hub. The commands run without
`HF_HUB_OFFLINE`, and each connection of their Python code to another machine is recorded and fails.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import httpx2 as httpx
import numpy as np
import pytest
import tiny_run
import typer
import yaml
from canaries import find_secrets
from dose import dose, log_progress
from safetensors.numpy import load_file, save
from warm_process import WarmCommand

from trillora.cli import app
from trillora.files.checksums import with_checksums
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

EXTRA_SECONDS = 10.0
SECONDS_TO_STOP = 5.0  # of a server after SIGTERM
SHORT = ("--max-tokens", "2")
RENTED = ("--on", "v5e-8", "--step", "copy", "--project", "project-1")
ADAPTER, MERGED, GGUF, OLLAMA = "run/adapter", "run/exports/merged", "run/exports/gguf", "run/exports/ollama"
NEW = ("--out", "new", "--no-certify")
# What each command reads; the words are relative to the folder of the mutated files. The first ones are the small dose.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "export lora-gguf": ((ADAPTER, "run", "model"), ("export", "run", "--to", "lora-gguf", *NEW)),
    "merge": ((ADAPTER, "other", "run", "model"), ("merge", "run", "other", "--out", "new")),
    "verify merged": ((MERGED, "model"), ("verify", MERGED)),
    "launch tpu-vm": (("model", "recipe", "chats.jsonl"), ("launch", "tpu-vm", "recipe.yaml", *RENTED)),
    "serve": ((ADAPTER, "run", "model"), ("serve", "run", "--port", "0", "--rows", "1", "--max-length", "64")),
    "certify": ((ADAPTER, "run", "run/checkpoints", "model"), ("certify", "run")),
    "generate": (("run", "model"), ("generate", "run", "-p", "hi", *SHORT)),
    "generate without a run": (("model",), ("generate", "model", "-p", "hi", *SHORT)),
    "eval": (("run", "model"), ("eval", "run", "--data", "chats.jsonl", "--rows", "1", "--no-base", *SHORT)),
    "report": (("run",), ("report", "run")),
    "inspect": (("model", "recipe"), ("inspect", "recipe.yaml")),
    "resume": (("stopped", "model", "recipe"), ("train", "recipe.yaml", "--out", "stopped")),
    "start": (("model", "recipe"), ("train", "recipe.yaml", "--out", "new")),
    "estimate": (("model", "recipe"), ("preflight", "recipe.yaml", "--on", "v5e-1", "--estimate", "--fresh")),
    "export merged": ((ADAPTER, "run", "model"), ("export", "run", "--to", "merged", "--out", "new")),
    "export gguf": ((ADAPTER, "run", "model"), ("export", "run", "--to", "gguf", "--type", "q8_0", *NEW)),
    "export ollama": ((ADAPTER, "run", "model"), ("export", "run", "--to", "ollama", "--type", "q8_0", *NEW)),
    "export stopped": (("stopped", "model"), ("export", "stopped", "--to", "merged", *NEW)),
    "certify merged": ((MERGED, ADAPTER, "run", "model"), ("certify", MERGED)),
    "certify gguf": ((GGUF, ADAPTER, "run", "model"), ("certify", GGUF)),
    "certify ollama": ((OLLAMA,), ("certify", OLLAMA)),
    "verify": ((ADAPTER, "model"), ("verify", "run")),
    "verify gguf": ((GGUF, "model"), ("verify", GGUF)),
    "verify ollama": ((OLLAMA,), ("verify", OLLAMA)),
    "launch colab": (("model", "recipe", "chats.jsonl"), ("launch", "colab", "recipe.yaml", "--out", "new")),
    "launch kaggle": (
        ("model", "recipe", "chats.jsonl"),
        ("launch", "kaggle", "recipe.yaml", "--owner", "me", "--out", "new"),
    ),
    "chat": ((ADAPTER, "run", "model"), ("chat", "run")),  # its input is empty
    "new": (("chats.jsonl",), ("new", "--model", "model", "--data", "chats.jsonl", "--recipe", "new.yaml")),
}
READ_NOTHING_OF_OTHERS = {"schema", "doctor", "quickstart", "recipes"}  # commands
NUM_MUTATIONS = dose(8, 50 * len(COMMANDS))
PER_TEST = 8  # mutations; the small dose is one test, because each process prepares a folder of its own
# Made when a command first needs it: export or certificate -> command
PREPARED: dict[str, tuple[str, ...]] = {
    ADAPTER: ("certify", "run"),
    MERGED: ("export", "run", "--to", "merged", "--out", MERGED),
    GGUF: ("export", "run", "--to", "gguf", "--type", "q8_0", "--out", GGUF),
    OLLAMA: ("export", "run", "--to", "ollama", "--type", "q8_0", "--out", OLLAMA),
}
# The folders whose weights a command must not use, or confirm, after a change. Other checkpoints are not read.
LAST = "step-00000004"
WEIGHT_FILES = (".safetensors", ".gguf")
WEIGHTS_OF: dict[str, tuple[str, ...]] = {
    "generate": ("adapter", "model"),
    "chat": ("adapter", "model"),
    "eval": ("adapter", "model"),
    "resume": ("checkpoints", "model"),
    "serve": ("adapter", "model"),
    "export": ("adapter", "model"),
    "export stopped": ("model",),
    "merge": ("adapter", "other", "model"),
    "certify": ("adapter", "model", LAST, "exports"),
    # An export is compared with the checkpoint: the adapter next to it is not used.
    **{f"certify {kind}": ("model", LAST, "exports") for kind in ("merged", "gguf", "ollama")},
    "verify": ("adapter", "model", "exports"),
}
MAY_NAME_A_MODEL = ("recipe.yaml", "recipe.json", "resolved.yaml")  # files: the model is then looked up on the hub
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**14, 1e308, -1e-300, 0.5, "", "x", "\0", "../..", "/dev/zero", "\x1b[31m",
    "é" * 300, [], {}, [[]], {"a": {"b": []}}, ["x"] * 50, "{{ 7 * 7 }}", "•••",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    code: int | None
    output: str
    seconds: float
    connections: list[str]  # to other machines
    secrets: list[str]  # where they were found
    wrong: str | None = None  # what a server did wrong


class Place:
    """A folder with a model, a recipe, a finished run with exports, a stopped run and an adapter, and a copy to restore
    it from."""

    def __init__(self, folder: Path) -> None:
        self.good, self.used, self.audit = folder / "good", folder / "used", folder / "audit"
        self.used.mkdir()
        tiny_run.write_both(self.used, tiny_run.llama(num_layers=1, width=32))
        settings = tiny_run.recipe(self.used, train={"checkpoint_every": 2}, data={"split": {"test": 0.2}})
        settings["model"]["name"], settings["data"]["path"] = "./model", "chats.jsonl"
        (self.used / "recipe.yaml").write_text(yaml.safe_dump(settings))
        train(load_recipe(self.used / "recipe.yaml"), self.used / "run")
        shutil.copytree(self.used / "run", self.used / "stopped", symlinks=True)
        shutil.rmtree(self.used / "stopped" / "adapter")
        self._write_other_adapter()
        shutil.copytree(self.used, self.good, symlinks=True)
        self.adapter = (self.good / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
        self._seconds: dict[str, float] = {}
        self._prepared: set[str] = set()

    def _write_other_adapter(self) -> None:
        """Half of the run's adapter, with checksums of its own."""
        adapter = self.used / "run" / "adapter"
        files = {file.name: file.read_bytes() for file in adapter.iterdir() if file.name != "checksums.json"}
        weights = load_file(adapter / "adapter_model.safetensors")
        files["adapter_model.safetensors"] = save({name: 0.5 * array for name, array in weights.items()})
        (self.used / "other").mkdir()
        for name, data in with_checksums(4, files).items():
            (self.used / "other" / name).write_bytes(data)

    def prepare(self, name: str) -> None:
        """Makes the exports and certificates that the command reads."""
        parts, words = COMMANDS[name]
        needed = {part for part in parts if part in PREPARED} - ({ADAPTER} if words[0] != "verify" else set())
        for part in sorted(needed - self._prepared):
            self.restore()
            outcome = self._run(PREPARED[part], limit=600)
            assert outcome.code == 0 and not outcome.connections and not outcome.secrets, outcome
            shutil.copytree(self.used / part, self.good / part, symlinks=True, dirs_exist_ok=True)
            self._prepared.add(part)

    def seconds(self, name: str) -> float:
        """The time of a command without a mutation, when nothing is compiled yet."""
        if name not in self._seconds:
            self.prepare(name)
            self.restore()
            outcome = self.run(name, limit=600)
            assert outcome.code == 0 and not (outcome.connections or outcome.secrets or outcome.wrong), outcome
            self._seconds[name] = outcome.seconds
        return self._seconds[name]

    def restore(self) -> None:
        shutil.rmtree(self.used)
        shutil.copytree(self.good, self.used, symlinks=True)

    def run(self, name: str, limit: float) -> Outcome:
        return self._run(COMMANDS[name][1], limit)

    def _run(self, words: tuple[str, ...], limit: float) -> Outcome:
        started = time.monotonic()
        before = Path.cwd()
        self.audit.unlink(missing_ok=True)
        os.chdir(self.used)
        try:
            process = WarmCommand(*words, errors=True, audit=self.audit)
        finally:
            os.chdir(before)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        output, wrong = use_server(process) if words[0] == "serve" else ("", None)
        rest, _ = process.communicate(60)
        timer.cancel()
        seconds = time.monotonic() - started
        lines = self.audit.read_text().splitlines()
        assert lines[0].startswith("start"), "the command is watched"
        connections = [line for line in lines if line.startswith("connect\t")]
        secrets = find_secrets(self.used, output + rest)
        return Outcome(process.returncode, output + rest, seconds, connections, secrets, wrong)


def use_server(process: WarmCommand) -> tuple[str, str | None]:
    """Asks a server for its health and for one answer, and stops it. Returns what it printed, and what it did wrong. A
    server that does not start ends by itself."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"Serving at (http://127\.0\.0\.1:\d+)/v1", line):
            break
    else:
        return "".join(lines), None
    wrong = None
    try:
        health = httpx.get(f"{found[1]}/health", timeout=EXTRA_SECONDS)
        name = httpx.get(f"{found[1]}/v1/models", timeout=EXTRA_SECONDS).json()["data"][0]["id"]
        question = {"model": name, "prompt": "hi", "max_tokens": 2}
        answer = httpx.post(f"{found[1]}/v1/completions", json=question, timeout=60)
        if (health.status_code, answer.status_code) != (200, 200):
            wrong = f"answered {health.status_code} and {answer.status_code}: {answer.text[:500]}"
    except httpx.HTTPError as error:
        wrong = f"did not answer: {error!r}"
    stopped = time.monotonic()
    process.send_signal(signal.SIGTERM)
    lines += process.stdout
    if time.monotonic() - stopped > SECONDS_TO_STOP:
        wrong = wrong or f"ended {time.monotonic() - stopped:.1f} s after SIGTERM"
    return "".join(lines), wrong


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


def add_hidden(rng: random.Random, file: Path, others: list[Path]) -> None:
    """A hidden file next to it, as a system or an editor leaves it."""
    name = rng.choice((f"._{file.name}", f".{file.name}.swp", ".DS_Store", f".{file.stem}{file.suffix}"))
    (file.parent / name).write_bytes(rng.choice((b"", rng.randbytes(100), rng.choice(others).read_bytes())))


def link_to_copy(rng: random.Random, file: Path, _: list[Path]) -> None:
    """The same content, elsewhere."""
    copy = file.with_name(f".moved-{file.name}")
    file.rename(copy)
    file.symlink_to(copy if rng.random() < 0.5 else copy.name)


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
    "link to a file that is not there": instead(lambda file: file.symlink_to("missing")),
    "link to a copy": link_to_copy,
    "hidden": lambda rng, file, _: file.rename(file.with_name(f".{file.name}")),
    "another file, hidden": add_hidden,
    "pipe": instead(os.mkfifo),
}


def files_of(place: Place, part: str) -> list[Path]:
    """The files of a part. Exports are in a run, but are not read with it."""
    if part == "recipe":
        return [place.used / "recipe.yaml"]
    folder = place.used / part
    if folder.is_file():
        return [folder]
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return sorted(file for file in files if part != "run" or file.relative_to(folder).parts[0] != "exports")


def problem(place: Place, name: str, file: Path, outcome: Outcome) -> str | None:
    """What is wrong with the outcome of a command after `file` was changed."""
    if outcome.seconds > place.seconds(name) + EXTRA_SECONDS:
        return f"took {outcome.seconds:.0f} s instead of {place.seconds(name):.0f} s"
    if outcome.code not in (0, 1, 2, 75, 76) or "Traceback" in outcome.output:
        return f"exit code {outcome.code}"
    if outcome.wrong:
        return outcome.wrong
    if outcome.connections and file.name not in MAY_NAME_A_MODEL:
        return f"connects to {outcome.connections[:3]}"
    if outcome.secrets:
        return f"shows secrets: {outcome.secrets}"
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x7f\u202a-\u202e\u2066-\u2069]", outcome.output):
        return "control characters in the output"
    if outcome.code != 0 or file.suffix not in WEIGHT_FILES:
        return None
    relative = file.relative_to(place.used)
    if same_weights(place.good / relative, file):
        return None
    if name == "resume" and (place.used / "stopped/adapter/adapter_model.safetensors").read_bytes() == place.adapter:
        return None  # an earlier checkpoint was used
    if name == "merge" and "model" in relative.parts and "the base model" in outcome.output:
        return None  # it says that logits were not compared, because the base has changed or cannot be used
    folders = WEIGHTS_OF.get(name) or WEIGHTS_OF.get(COMMANDS[name][1][0], ())
    if name != "generate without a run" and any(folder in relative.parts for folder in folders):
        return "changed weights were used silently"
    return None


def same_weights(good: Path, file: Path) -> bool:
    """Whether every value is as it was. A rewritten header changes no weight, and a run's files have checksums."""
    if not file.is_file():
        return False
    if file.read_bytes() == good.read_bytes():
        return True
    try:
        return weights_of(file) == weights_of(good)
    except Exception:  # whatever a reader says of a damaged file
        return False


def weights_of(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of each tensor."""
    if file.suffix == ".gguf":
        arrays = {each.name: (each.tensor_type.name, each.data) for each in gguf.GGUFReader(file).tensors}
    else:
        arrays = {name: (array.dtype.name, array) for name, array in load_file(file).items()}
    return {name: (kind, array.shape, np.ascontiguousarray(array).tobytes()) for name, (kind, array) in arrays.items()}


def test_a_changed_weight_is_noticed_by_this_test(place: Place, tmp_path: Path) -> None:
    good = place.good / "run" / "adapter" / "adapter_model.safetensors"
    changed = tmp_path / good.name
    changed.write_bytes(good.read_bytes()[:-1] + bytes([good.read_bytes()[-1] ^ 1]))
    assert not same_weights(good, changed)
    changed.write_bytes(good.read_bytes())
    assert same_weights(good, changed)


def test_every_command_is_mutated() -> None:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {words[0] for _, words in COMMANDS.values()} == verbs - READ_NOTHING_OF_OTHERS
    launches = {words[1] for _, words in COMMANDS.values() if words[0] == "launch"}
    assert launches == {"colab", "kaggle", "tpu-vm"}


def command_of(seed: int) -> str:
    """The commands take turns."""
    return tuple(COMMANDS)[seed % len(COMMANDS)]


def failure_after_mutation(place: Place, seed: int) -> str | None:
    """Changes one file, runs a command, and returns what went wrong."""
    rng, name = random.Random(f"mutation {seed}"), command_of(seed)
    limit = place.seconds(name) + EXTRA_SECONDS
    place.restore()
    files = files_of(place, rng.choice(COMMANDS[name][0]))
    weights = [file for file in files if file.suffix in WEIGHT_FILES]
    if weights and rng.random() < 0.25:  # a quarter, because there are few of these files and they matter most
        file, what = rng.choice(weights), "bits of weights"
        change_bytes(rng, file, files)
    else:
        file = rng.choice(files)
        what = mutate(rng, file, files)
    outcome = place.run(name, limit + 5)
    where = f"{seed}: {name}, {file.relative_to(place.used)}, {what}"
    log_progress(f"{where}: exit code {outcome.code} after {outcome.seconds:.1f} s")
    if (wrong := problem(place, name, file, outcome)) is None:
        return None
    log_progress(f"FAILED {where}: {wrong}\n{outcome.output[-1500:]}")
    return f"{where}: {wrong}\n{outcome.output[-1500:]}"


@pytest.mark.parametrize("first", range(0, NUM_MUTATIONS, PER_TEST))
def test_mutated_files_are_reported_and_never_used_silently(
    place: Place, first: int, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(first, min(first + PER_TEST, NUM_MUTATIONS))
    failures = [failure for seed in seeds if (failure := failure_after_mutation(place, seed))]
    for verb, count in Counter(COMMANDS[command_of(seed)][1][0] for seed in seeds).items():
        record_property(f"mutations before {verb}", count)
    assert not failures, "\n\n".join(failures)
