"""A stand-in for Google's `gcloud`: records every call, keeps machines in a folder, and answers with the real texts.

Each worker of a machine is a folder, and `ssh --command` runs there for real. `uv`, which would install packages, is a
stand-in too: it makes a `trillora` that runs the package under test. `Google` prepares the folder for a test. The texts
are the real program's, as other projects have recorded them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CAPACITY = (
    'ERROR: (gcloud.compute.tpus.queued-resources.create) {"code": 8, "message": "There is no more capacity in the '
    'zone \\"us-east5-b\\"; you can try in another zone where Cloud TPU Nodes are offered (see '
    'https://cloud.google.com/tpu/docs/regions) [EID: 0x1234]"}'
)
QUOTA = (
    "ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: Quota limit "
    "'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5."
)
ENGINE_QUOTA = "ERROR: (gcloud.compute.instances.create) Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0"
STOCKOUT = "ERROR: (gcloud.compute.instances.create) ZONE_RESOURCE_POOL_EXHAUSTED: stockout"
WRONG_TYPE = "ERROR: (gcloud) INVALID_ARGUMENT: CloudTpu received an invalid AcceleratorType"
WRONG_ZONE = "ERROR: (gcloud) PERMISSION_DENIED: Location us-east9-z is not found or access is unauthorized."
NOT_ALLOWED = "ERROR: (gcloud) This user agent is not allowed to use the machine type ct5lp-hightpu-8t"
PREEMPTED = "ERROR: (gcloud) code 3: update is not supported while in state PREEMPTED"
NO_ACCOUNT = (
    "ERROR: (gcloud.compute.tpus) You do not currently have an active account selected.\nPlease run:\n\n"
    "  $ gcloud auth login\n\nto obtain new credentials."
)
NO_PROJECT = "ERROR: (gcloud.compute.tpus) The required property [project] is not currently set."
NOT_FOUND = "ERROR: (gcloud) NOT_FOUND: Resource was not found"
EXISTS = "ERROR: (gcloud) ALREADY_EXISTS: Resource already exists"
RESET = "Connection to 10.0.0.2 closed by remote host."


class Google:
    """The test's side: the program, its settings and what it recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir(parents=True)
        (folder / "machines").mkdir()
        for name in ("gcloud", "uv"):
            program = bin_folder / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} {name} {folder} "$@"\n')
            program.chmod(0o755)
        self.bin = bin_folder
        self.settings: dict[str, Any] = {"account": "me@example.com", "project": "my-project", "buckets": []}
        self.set()

    def set(self, **settings: Any) -> None:
        """account, project, buckets; refuse: {verb: [text, …]}, used up one by one; states: queued resource's, one by
        one, until ACTIVE; node: state of new nodes; workers: their number; preempt_when: files, whose existence ends
        the machine once each; python: runs `trillora` on its workers; is_slow: `create` does not end, and the machine
        appears when it is first deleted."""
        self.settings.update(settings)
        (self.folder / "settings.json").write_text(json.dumps(self.settings))

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls.jsonl"
        return [json.loads(line)["words"] for line in file.read_text().splitlines()] if file.exists() else []

    def verbs(self) -> list[str]:
        return [_verb(words) for words in self.calls]

    @property
    def machines(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "machines").iterdir())

    def everything_recorded(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.jsonl"))


def _verb(words: list[str]) -> str:
    named = [word for word in words if not word.startswith("-")]
    return next((word for word in named if word in ("create", "describe", "delete", "ssh", "scp", "list")), named[0])


class StandIn:
    """One call of the program."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.settings = json.loads((folder / "settings.json").read_text())
        self.options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        self.named = [word for word in words if not word.startswith("--")]

    def main(self) -> int:
        verb = _verb(self.words)
        with self.locked():
            record = {"words": self.words, "tokens": [name for name in ("HF_TOKEN",) if name in os.environ]}
            with (self.folder / "calls.jsonl").open("a") as calls:
                calls.write(json.dumps(record) + "\n")
            refusals = self.settings.get("refuse", {}).get(verb)
            if refusals:
                self.settings["refuse"][verb] = refusals[1:]
                (self.folder / "settings.json").write_text(json.dumps(self.settings))
                return self.fail(refusals[0])
        if self.words[:2] == ["auth", "list"]:
            return self.answer(self.settings["account"])
        if self.words[:2] == ["config", "get-value"]:
            return self.answer(self.settings["project"] or "(unset)")
        if self.words[:2] == ["storage", "buckets"]:
            return self.answer("US-EAST5") if self.named[3] in self.settings["buckets"] else self.fail(NOT_FOUND)
        return int(getattr(self, verb)())

    def create(self) -> int:
        name = self.named[self.named.index("create") + 1]
        if self.machine(name).exists():
            return self.fail(EXISTS)
        if self.settings.get("is_slow"):
            if os.fork():
                time.sleep(600)
            os.setsid()
            until = time.monotonic() + 60
            while '"delete"' not in (self.folder / "calls.jsonl").read_text() and time.monotonic() < until:
                time.sleep(0.005)
            (self.folder / "appeared").touch()
        self.machine(name).mkdir()
        for number in range(self.settings.get("workers", 1)):
            (self.machine(name) / f"worker-{number}").mkdir()
        (self.machine(name) / "node").write_text(self.settings.get("node", "READY"))
        return self.answer("")

    def describe(self) -> int:
        name = self.named[self.named.index("describe") + 1]
        if not self.machine(name).exists():
            return self.fail(NOT_FOUND)
        wanted = self.options["format"]
        if "networkEndpoints" in wanted or "networkIP" in wanted:
            return self.answer(";".join(["127.0.0.1"] * self.settings.get("workers", 1)))
        node = (self.machine(name) / "node").read_text()
        if "status" in wanted:
            return self.answer({"READY": "RUNNING", "PREEMPTED": "TERMINATED"}.get(node, node))
        if wanted == "value(state)":
            return self.answer(node)
        with self.locked():
            states = self.settings.get("states") or ["ACTIVE"]
            self.settings["states"] = states[1:]
            (self.folder / "settings.json").write_text(json.dumps(self.settings))
        return self.answer(states[0])

    def delete(self) -> int:
        name = self.named[self.named.index("delete") + 1]
        if not self.machine(name).exists():
            return self.fail(NOT_FOUND)
        self.end_processes(name)
        shutil.rmtree(self.machine(name))
        return self.answer("")

    def scp(self) -> int:
        source, target = self.named[-2:]
        name = next(word.partition(":")[0] for word in (source, target) if ":" in word)
        homes = sorted(self.machine(name).glob("worker-*"))
        if not homes or (self.machine(name) / "node").read_text() != "READY":
            return self.fail(RESET, 255)
        if ":" in source:
            return subprocess.run(
                ["cp", "-r", str(homes[0] / source.partition(":")[2]), target], check=False
            ).returncode
        for home in homes:
            place = home / target.partition(":")[2]
            subprocess.run(["cp", "-rp", source, str(place)], check=True)
            if Path(source).is_file():
                with (self.folder / "modes.jsonl").open("a") as modes:
                    modes.write(json.dumps([Path(source).name, oct(place.stat().st_mode & 0o777)]) + "\n")
        return 0

    def ssh(self) -> int:
        name = self.named[self.named.index("ssh") + 1]
        worker, command = self.options.get("worker", "0"), self.options["command"]
        if not self.machine(name).exists() or (self.machine(name) / "node").read_text() != "READY":
            return self.fail(RESET, 255)
        homes = sorted(self.machine(name).glob("worker-*" if worker == "all" else f"worker-{worker}"))
        code = 0
        for home in homes:
            environment = {**os.environ, "HOME": str(home), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
            process = subprocess.Popen(["bash", "-c", command], cwd=home, env=environment)
            while process.poll() is None:
                if "follow.sh" in command and self.is_preempted():
                    self.preempt(name)
                    return self.fail(RESET, 255)
                time.sleep(0.005)
            code = code or process.returncode
        return code

    def is_preempted(self) -> bool:
        waiting = self.settings.get("preempt_when") or []
        if not waiting or not Path(waiting[0]).exists():
            return False
        self.settings["preempt_when"] = waiting[1:]
        (self.folder / "settings.json").write_text(json.dumps(self.settings))
        return True

    def preempt(self, name: str) -> None:
        self.end_processes(name)
        for home in self.machine(name).glob("worker-*"):
            shutil.rmtree(home)
        (self.machine(name) / "node").write_text(self.settings.get("after_preemption", "PREEMPTED"))

    def end_processes(self, name: str) -> None:
        for file in self.machine(name).glob("worker-*/*/pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)

    def machine(self, name: str) -> Path:
        return self.folder / "machines" / name

    @contextlib.contextmanager
    def locked(self) -> Any:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.settings = json.loads((self.folder / "settings.json").read_text())
            yield

    def answer(self, text: str) -> int:
        print(text, flush=True)
        return 0

    def fail(self, text: str, code: int = 1) -> int:
        print(text, file=sys.stderr, flush=True)
        return code


def uv(folder: Path, words: list[str]) -> int:
    with (folder / "uv.jsonl").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[0] == "venv":
        place = Path(words[-1]) / "bin"
        place.mkdir(parents=True)
        python = json.loads((folder / "settings.json").read_text()).get("python", sys.executable)
        seen = f'[ -z "$HF_TOKEN_PATH" ] || cp "$HF_TOKEN_PATH" {folder}/token-seen'
        (place / "trillora").write_text(f'#!/bin/sh\n{seen}\nexec {python} -m trillora "$@"\n')
        (place / "trillora").chmod(0o755)
        # Installing is tested in test_install.py.
        record = f"""echo '["installed"]' >> {folder}/uv.jsonl"""
        install = f'case "$*" in *trillora.launch.install*) {record}; exit 0;; esac'
        (place / "python").write_text(f'#!/bin/sh\n{install}\nexec {sys.executable} "$@"\n')
        (place / "python").chmod(0o755)
    return 0


if __name__ == "__main__":
    _, kind, place, *rest = sys.argv
    sys.exit(uv(Path(place), rest) if kind == "uv" else StandIn(Path(place), rest).main())
