"""The steps of a generated notebook. On Colab, Kaggle or any other machine, the notebook runs

    session = Session("chat", folder)    # `folder`: where the bundle was unpacked
    session.install()
    session.check()                      # on Colab and Kaggle: refuses a machine without the chips
    session.train()                      # resumes from the kept checkpoints
    session.evaluate(); session.show_report(); session.export("merged"); session.finish()

Files that must outlive the session are in one folder: on Google Drive, in Kaggle's output, else in `results`.

    checkpoints/  run/  trillora-session.json

This module is imported from the wheel before anything is installed, so it uses the standard library only. Everything
else happens in processes of the `trillora` command.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trillora.devices import listed
from trillora.errors import EXIT_STOPPED
from trillora.launch.install import REQUIREMENTS, TOKEN_FILE, InstallError, find_uv, requirements
from trillora.locks.sets import PREFERRED_PYTHON, PYTHONS
from trillora.runs.files import CHECKPOINTS, REPORT_FILE, is_finished
from trillora.version import __version__

Platform = Literal["colab", "kaggle", "local"]
RESULT = "trillora-session.json"
HEADLESS = "TRILLORA_HEADLESS"  # set by `trillora launch colab --run`: no person can answer Colab's questions
RESERVE = 1800  # seconds before the end of a session, for evaluation and export
LAST = 300  # seconds before it, when every process is stopped: what a platform ends by force may be lost
LEAST = 60  # seconds of training that are worth starting
DRIVE = Path("/content/drive")
HELP = {
    ("colab", "tpu"): "choose Runtime > Change runtime type > TPU, and run all cells again",
    ("colab", "gpu"): "choose Runtime > Change runtime type > T4 GPU, and run all cells again; the driver that "
    "`!nvidia-smi` shows must be 580 or newer",
    ("kaggle", "tpu"): "check Settings > Accelerator > TPU v5e-8 and the weekly quota. Kaggle gives TPUs only to "
    "accounts with a verified identity (a phone number is not enough). Then push the kernel again",
    ("kaggle", "gpu"): "check Settings > Accelerator > GPU T4 x2 and the weekly quota; the driver that `!nvidia-smi` "
    "shows must be 580 or newer. Then run all cells again",
}


class SessionError(Exception):
    """A step failed. The notebook stops here."""


def find_platform() -> Platform:
    """Where this process runs."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    try:
        return "colab" if importlib.util.find_spec("google.colab") else "local"
    except ModuleNotFoundError:
        return "local"


class Session:
    """One session of a run. `folder` has the unpacked bundle; `hours` is the time limit of the session; `packages` are
    a set and what is added to it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        secrets: Sequence[str] = ("HF_TOKEN",),
        hours: float | None = None,
        backend: Literal["tpu", "gpu"] = "tpu",
        devices: int = 1,
        packages: Sequence[str] = ("tpu",),
        checkpoint_url: str | None = None,
    ) -> None:
        self.name, self.folder, self.platform = name, folder, find_platform()
        self._started = time.monotonic()
        self._secrets, self._hours = secrets, hours
        self._backend, self._num_devices, self._packages = backend, devices, packages
        self._checkpoint_url = checkpoint_url
        self._python = sys.executable
        self._environment = clean_environment(os.environ, self.platform)
        self._on_drive = False
        self.run = folder / "run"
        self.results = {"kaggle": Path("/kaggle/working"), "colab": Path("/content/results")}.get(
            self.platform, folder.parent / "results"
        ) / ("" if self.platform == "kaggle" else name)
        self._result: dict[str, Any] = {"format": 1, "name": name, "platform": self.platform, "state": "started"}
        self._result |= {"trillora": __version__, "recipe": _digest(folder / "recipe.yaml")}
        self._is_checked = False
        self._failures: list[str] = []
        print(f"Trillora {__version__}, {name}, platform: {self.platform}")
        if self.platform != "colab":  # its results are on Drive, which is not mounted yet
            self._take_previous()

    # ---- before training

    def install(self) -> None:
        """Makes an environment with exactly the packages of a set that was tested: the image's own are others, and
        change. On a machine that is neither Colab nor Kaggle, an installed Trillora of this version is used."""
        if self.platform == "local" and self._has_trillora():
            print(f"Trillora {__version__} is already installed.")
            return
        try:
            uv = find_uv()
        except InstallError as error:
            raise SessionError(str(error)) from error
        self._environment["PATH"] = f"{Path(uv).parent}{os.pathsep}{self._environment.get('PATH', '')}"
        home, (first, last) = self.folder / "venv", PYTHONS[self._packages[0]]
        python = sys.executable if first <= sys.version_info[:2] <= last else PREFERRED_PYTHON
        self._python = str(home / "bin" / "python")
        if not home.exists():
            print("Installing Trillora and the libraries that it was tested with, in an environment of their own.")
            self._require([uv, "venv", "--quiet", "--python", python, str(home)], "No environment can be made")
        wheel = next(self.folder.glob(f"trillora-{__version__}-*.whl"))
        if not (self.folder / REQUIREMENTS).is_file():  # it comes with a bundle
            (self.folder / REQUIREMENTS).write_text(requirements(self._packages, wheel), "utf-8")
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        code += "from trillora.launch.install import main; sys.exit(main())"
        words = [str(wheel), str(self.folder), self._packages[0]]
        self._require([self._python, "-P", "-c", code, *words], "The installation failed")

    def keep_results(self) -> None:
        """Colab: mounts Google Drive, where the results outlive the session. The mount asks for permission."""
        if self.platform == "colab" and HEADLESS not in os.environ:
            try:
                importlib.import_module("google.colab.drive").mount(str(DRIVE))
                self.results = DRIVE / "MyDrive" / "trillora" / self.name
                self._on_drive = True
            except Exception as error:  # of Colab's own code, in any version
                print(f"Google Drive is not mounted ({type(error).__name__}): download the results before you leave.")
            self._take_previous()
            self._save()
        print(f"Results: {self.results}")

    def read_secrets(self) -> None:
        """Reads tokens from the platform's own store. Only the processes of `trillora` get them."""
        file = Path(TOKEN_FILE)
        if self.platform == "colab" and file.is_file():  # uploaded by `trillora launch colab --run --send-token`
            self._environment["HF_TOKEN"] = file.read_text().strip()
            file.unlink()
            print("HF_TOKEN: read from the uploaded file, which is removed now.")
        for name in self._secrets:
            if name not in self._environment and (value := self._secret(name)):
                self._environment[name] = value
                print(f"{name}: found")

    def check(self, *, prove: bool = True) -> None:
        """Refuses a machine without the chips on Colab and Kaggle. With `prove`, `trillora doctor` checks the rest, and
        a tiny model is trained on the chips and compared with recorded values."""
        found = self._devices()
        self._save(device=found)
        print(f"Devices: {found.get('count', 0)} x {found.get('kind', 'unknown')} ({found.get('platform', 'none')})")
        if self.platform == "local":
            print("This is neither Colab nor Kaggle: any device is accepted.")
        elif found.get("platform") != self._backend or found.get("count") != self._num_devices:
            self._save(state="no-chip")
            why, do = f": {found['error']}" if "error" in found else ".", HELP[self.platform, self._backend]
            what = f"This session does not have {self._num_devices} x {self._backend.upper()}{why}"
            raise SessionError(f"{what}\n  do: {do}.")
        self._save(state="started")
        if prove:
            self._trillora("doctor", what="This machine cannot be used")
            self._trillora("doctor", "--prove", what="The results of these chips are wrong")
        self._is_checked = True

    # ---- training and after

    @property
    def is_finished(self) -> bool:
        return self._result.get("state") == "finished"

    def train(self) -> None:
        """Trains, or resumes from the newest checkpoint. A run that is stopped by the time limit, by an interrupt or
        by a signal is saved, and the next session resumes it."""
        if is_finished(self.run):  # what a run writes last
            self._save(state="finished")
            print("The run is already finished.")
            return
        if not self._is_checked:  # `colab exec` runs the next cell although one has failed
            raise SessionError("The check of this machine has not passed.\n  do: see its cell above.")
        options = [] if self._checkpoint_url else [f"train.checkpoint_dir={self.results / CHECKPOINTS}"]
        if (left := self._seconds_left()) is not None:
            if left - RESERVE < LEAST:
                raise SessionError(f"The session ends in {max(left, 0):.0f} s.\n  do: start a new one.")
            options.append(f"train.time_limit={left - RESERVE:.0f}s")
        recipe = str(self.folder / "recipe.yaml")
        code = self._call([*self._command("train"), recipe, *options, "--out", str(self.run)])
        self._save(state={0: "finished", EXIT_STOPPED: "stopped"}.get(code, "failed"), exit_code=code)
        self._copy_run()
        if code == EXIT_STOPPED:
            print("The run is saved, but not finished. The next session resumes it.")
        elif code != 0:
            raise SessionError(f"Training ended with exit code {code}.\n  do: see its last lines above.")

    def evaluate(self) -> None:
        """Base model and adapter on the held-out rows."""
        if self._skipped("evaluation"):
            return
        self._try("eval", str(self.run), what="The evaluation failed")

    def show_report(self) -> None:
        """Shows report.html in the notebook. A run that is not finished has one too."""
        if not self._try("report", str(self.run), what="The report failed"):
            return
        page = html.escape((self.run / REPORT_FILE).read_text(encoding="utf-8"), quote=True)
        frame = f'<iframe srcdoc="{page}" sandbox width="100%" height="900" style="border:0"></iframe>'
        display = importlib.import_module("IPython.display")
        display.display(display.HTML(frame))

    def export(self, kind: str) -> None:
        """Exports the adapter in another form, in `run/exports`."""
        if self._skipped("export"):
            return
        self._try("export", str(self.run), "--to", kind, what="The export failed, but the adapter is complete")

    def finish(self, *, release: bool = False) -> None:
        """Copies everything to the results. Colab: writes what is left to Drive, or packs the results for a download;
        with `release`, gives the machine back, because an idle TPU costs compute units too."""
        self._copy_run()
        self._save(seconds=round(time.monotonic() - self._started), failures=self._failures)
        print(f"State: {self._result['state']}. Results: {self.results}")
        if self._on_drive:
            importlib.import_module("google.colab.drive").flush_and_unmount()
        elif self.platform == "colab":
            self._pack(Path(f"/content/{self.name}-results.tar"))
        if self._failures:
            raise SessionError("\n".join([*self._failures, "  do: see the last lines of that cell."]))
        if release and self.platform == "colab":
            importlib.import_module("google.colab.runtime").unassign()

    # ---- how

    def _command(self, verb: str) -> list[str]:
        return [self._python, "-P", "-m", "trillora", verb]

    def _trillora(self, verb: str, *words: str, what: str) -> None:
        self._require([*self._command(verb), *words], what)

    def _try(self, verb: str, *words: str, what: str) -> bool:
        """A step after training. If it fails, the others still run, and `finish` reports it."""
        if code := self._call([*self._command(verb), *words]):
            self._failures.append(f"{what}: exit code {code}.")
            print(self._failures[-1])
        return not code

    def _require(self, command: Sequence[str], what: str) -> None:
        if code := self._call(command):
            raise SessionError(f"{what}: exit code {code}.\n  do: see its last lines above.")

    def _call(self, command: Sequence[str]) -> int:
        """Runs a program and shows its lines. It can save its work when the cell is interrupted or the session ends."""
        left = self._seconds_left()
        with subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            end = threading.Timer(max(left - LAST, 1), process.terminate) if left is not None else None
            if end is not None:
                end.start()
            try:
                while True:
                    try:
                        for line in process.stdout:
                            print(line, end="", flush=True)
                        return process.wait()
                    except KeyboardInterrupt:
                        print("Interrupted: waiting until the work is saved.", flush=True)
                        process.terminate()
            finally:
                if end is not None:
                    end.cancel()

    def _seconds_left(self) -> float | None:
        return None if self._hours is None else self._hours * 3600 - (time.monotonic() - self._started)

    def _skipped(self, what: str) -> bool:
        if not self.is_finished:
            print(f"Skipping {what}: the run is not finished yet.")
        return not self.is_finished

    def _devices(self) -> dict[str, Any]:
        """What jax finds, in a process of its own: this one must not hold the chips."""
        found = listed.found_by([self._python, "-P", "-c", listed.CODE], self._environment, timeout=300)
        return {"error": found["error"].splitlines()[-1][:300]} if "error" in found else found

    def _has_trillora(self) -> bool:
        code = f"import importlib.metadata as m; assert m.version('trillora') == {__version__!r}; m.version('torchax')"
        command = [self._python, "-P", "-c", code]
        return subprocess.run(command, env=self._environment, capture_output=True).returncode == 0

    def _secret(self, name: str) -> str | None:
        try:
            if HEADLESS in os.environ:
                return None
            if self.platform == "colab":
                found = importlib.import_module("google.colab.userdata").get(name)
            elif self.platform == "kaggle":
                found = importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name)
            else:
                return None
        except Exception as error:  # SecretNotFoundError, NotebookAccessError, TimeoutException; BackendError
            print(f"{name}: not available ({type(error).__name__}). Only models that need a login ask for it.")
            return None
        return str(found) if found else None

    def _take_previous(self) -> None:
        """What an earlier session kept. Kaggle mounts it as input, which cannot be written: it is copied."""
        source = self._previous_output()
        if source is not None and not self._has_results():
            print(f"Taking over {source}")
            self.results.mkdir(parents=True, exist_ok=True)
            for name in (CHECKPOINTS, "run"):
                if (source / name).is_dir():
                    shutil.copytree(source / name, self.results / name, dirs_exist_ok=True)
            shutil.copyfile(source / RESULT, self.results / RESULT)
        before = read_result(self.results / RESULT)
        if before.get("recipe", self._result["recipe"]) != self._result["recipe"]:
            if not self._has_results():
                return  # a recipe with a mistake, which is corrected now
            raise SessionError(
                f"{self.results} has the results of another recipe with the name {self.name}.\n"
                "  do: move them away, or give the recipe's file another name and launch it again."
            )
        if before.get("state") == "finished":
            shutil.copytree(self.results / "run", self.run, dirs_exist_ok=True)
            self._result["state"] = "finished"

    def _has_results(self) -> bool:
        return any((self.results / name).exists() for name in (CHECKPOINTS, "run"))

    def _previous_output(self) -> Path | None:
        """The output of the last kernel in a chain, wherever it is mounted: the newest one of this run."""
        root = Path("/kaggle/input") if self.platform == "kaggle" else self.folder.parent / "input"
        found = [(read_result(file), file.parent) for file in root.rglob(RESULT)] if root.is_dir() else []
        own = [(result.get("saved", 0.0), folder) for result, folder in found if result.get("name") == self.name]
        return max(own)[1] if own else None

    def _copy_run(self) -> None:
        """The run without its checkpoints, which are kept already."""
        if self.run.is_dir():
            shutil.copytree(
                self.run, self.results / "run", dirs_exist_ok=True, ignore=shutil.ignore_patterns(CHECKPOINTS, ".*")
            )

    def _pack(self, file: Path) -> None:
        with tarfile.open(file, "w", dereference=True) as archive:  # links are refused where it is unpacked
            archive.add(self.results, arcname=".")
        print(f"Packed: {file}")

    def _save(self, **facts: object) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        was_finished = self.is_finished and facts.get("state") == "started"
        self._result |= {**facts, "saved": time.time()} | ({"state": "finished"} if was_finished else {})
        making = self.results / f".{RESULT}"
        making.write_text(json.dumps(self._result, indent=1) + "\n")
        making.replace(self.results / RESULT)


def clean_environment(variables: Mapping[str, str], platform: Platform) -> dict[str, str]:
    """The environment of all processes. An image may name its own libtpu, which jax would prefer to the installed one,
    and folders of its own packages. Kaggle's may have a warning text where the names of hosts belong."""
    kept = {**variables, "PYTHONUNBUFFERED": "1"}
    if platform != "local":
        for name in ("TPU_LIBRARY_PATH", "PYTHONPATH"):
            kept.pop(name, None)
        if not re.fullmatch(r"[A-Za-z0-9.:,-]+", kept.get("TPU_WORKER_HOSTNAMES", "localhost")):
            del kept["TPU_WORKER_HOSTNAMES"]
    return kept


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def read_result(file: Path) -> dict[str, Any]:
    """What a session wrote; empty if there is nothing, or something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size < 1 << 20 else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == 1 else {}
