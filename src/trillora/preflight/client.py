"""The compiler's process from outside: started with the settings it needs, listened to, and survived. No jax."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Literal

from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT, Slice
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note, Progress

Method = Literal["compiler", "estimate"]
WHERE_IT_RUNS = "any x86-64 Linux: a Colab or Kaggle CPU notebook, WSL, a container"
_EVENTS = {"note": Note, "chosen": Chosen, "progress": Progress}
DYING_SECONDS = 10  # between a process's last word and its end
_STDERR_SHOWN = 2000  # characters of what a crashed compiler said last


class CompilerCrashed(TrilloraError):
    """The compiler's process ended without an answer."""


def has_compiler_builds() -> bool:
    """libtpu is made for x86-64 Linux only."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def choose_method(estimate_wanted: bool) -> Method:
    """The compiler, unless there is none for this machine. One that is missing or of the wrong pair is mended, not
    gone around."""
    if estimate_wanted or not has_compiler_builds():
        return "estimate"
    wanted = _pinned("jax", "libtpu")
    found = _version("libtpu")
    jax_version = _version("jax")
    mend = f'pip install "jax[tpu]=={jax_version}"'
    if found is None:
        raise TrilloraError(
            "The TPU compiler is not installed.", where="package libtpu", do=f"{mend}; or ask with --estimate"
        )
    if wanted is not None and not _matches(found, wanted):
        raise TrilloraError(
            f"libtpu {found} is not the pair of jax {jax_version}, which wants {wanted}.",
            where="package libtpu",
            do=f"{mend}; or ask with --estimate",
        )
    return "compiler"


def ask(question: dict[str, Any], place: Slice, listener: Listener) -> dict[str, Any]:
    """The result for one slice."""
    with CompilerClient(question["method"]) as answerer:
        return answerer.ask(question, place, listener)


class CompilerClient:
    """The process that answers. It can be started before there is a question, as its imports take longer than many an
    answer. One process makes all estimates; the compiler cannot be told to stop, so its process ends with its answer.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._process: subprocess.Popen[str] | None = None
        self._streams = contextlib.ExitStack()
        self._said: IO[str] | None = None  # on stderr
        self._num_devices = 0

    def __enter__(self) -> CompilerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def get_ready(self, place: Slice) -> subprocess.Popen[str]:
        """The process for this slice: the one that is there, if it has enough virtual devices, or a new one."""
        if self._process is not None and self._num_devices >= place.num_devices:
            return self._process
        self._end()
        self._said = self._streams.enter_context(contextlib.closing(_scratch_file()))
        self._num_devices = place.num_devices
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trillora.preflight.compiler_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=_environment(self._method, place),
            start_new_session=True,  # ^C is ours to handle
        )
        return self._process

    def ask(self, question: dict[str, Any], place: Slice, listener: Listener) -> dict[str, Any]:
        """The process's result for one slice. Its events reach the listener as they come."""
        process = self.get_ready(place)
        result = _converse(process, question, listener)
        if result is None:
            try:
                process.wait(timeout=DYING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert self._said is not None
            self._said.seek(0)
            raise _crashed(process.returncode, self._said.read()[-_STDERR_SHOWN:], place)
        if self._method == "compiler":
            self._end()
        return result

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._streams.close()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _scratch_file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def _converse(process: subprocess.Popen[str], question: dict[str, Any], listener: Listener) -> dict[str, Any] | None:
    """Nothing where the process died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        print(json.dumps(question), file=process.stdin, flush=True)
    except BrokenPipeError:
        return None
    for line in process.stdout:
        told = json.loads(line)
        if "result" in told:
            return dict(told["result"])
        if "refused" in told:
            refused = told["refused"]
            raise TrilloraError(refused["what"], where=refused["where"], do=refused["do"])
        kind = _EVENTS.get(told.pop("event"))
        if kind is not None:
            listener(kind(**told))
    return None


def _environment(method: Method, place: Slice) -> dict[str, str]:
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    # The child must find the very package that asks, however that was found.
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    if method == "estimate":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={place.num_devices}"
    return environment


def _crashed(code: int, said: str, place: Slice) -> CompilerCrashed:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
    return CompilerCrashed(
        f"The compiler's process ended without an answer for {place.name} ({how}): {last.strip()[:300]}",
        where=f"--on {place.name}",
        do="ask again with --estimate, or with other settings (engine.remat=full, train.micro_batch_size); "
        "if memory was short here, close other programs",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {package: _version(package) for package in ("trillora", "jax", "libtpu", "transformers", "torchax")}


def _pinned(owner: str, package: str) -> str | None:
    """`==0.0.42.*` from the owner's own requirements."""
    try:
        requirements = importlib.metadata.requires(owner) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    names = (text.partition(";")[0].strip() for text in requirements)
    return next((name[len(package) :].strip() for name in names if name.startswith(package + "=")), None)


def _matches(version: str, wanted: str) -> bool:
    pinned = wanted.removeprefix("==")
    return version.startswith(pinned.removesuffix("*")) if pinned.endswith("*") else version == pinned
