"""Starts the compiler process, sends it questions and reads its answers. Survives its crashes. No jax.

The child's stdout and stderr go to a file, from its first instruction on: libtpu and XLA print warnings and stack
traces that must not reach the user's terminal. Answers come over a pipe of their own. After a crash the captured output
is kept in the cache folder and the error names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import tempfile
from typing import IO

from trillora.child_process import isolated_python
from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT, Slice, find_slice
from trillora.devices.versions import installed_version, matches_pin, pinned_version
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note, Progress
from trillora.files.cache_dir import cache_root
from trillora.preflight.question import Question
from trillora.preflight.result import Method, StageResult

WHERE_IT_RUNS = "any x86-64 Linux: a Colab or Kaggle CPU notebook, WSL, a container"
PROGRAM = "from trillora.preflight.compiler_process import main; main()"
_EVENTS = {"note": Note, "chosen": Chosen, "progress": Progress}
EXIT_SECONDS = 10  # to wait for a process that closed its pipe
_REASON_LENGTH = 300  # characters


class CompilerCrashed(TrilloraError):
    """The compiler process ended without an answer."""


def has_compiler_builds() -> bool:
    """Whether libtpu exists for this machine: x86-64 Linux only."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def choose_method(use_estimate: bool) -> Method:
    """The compiler where it exists for this machine, else the estimate. A missing or mismatched libtpu is an error; we
    never fall back silently."""
    if use_estimate or not has_compiler_builds():
        return "estimate"
    required = pinned_version("jax", "libtpu")
    found = installed_version("libtpu")
    jax_version = installed_version("jax")
    fix = f'pip install "jax[tpu]=={jax_version}"; or use --estimate'
    if found is None:
        raise TrilloraError("The TPU compiler is not installed.", where="package libtpu", do=fix)
    if required is not None and not matches_pin(found, required):
        raise TrilloraError(
            f"libtpu {found} does not match jax {jax_version}, which requires {required}.",
            where="package libtpu",
            do=fix,
        )
    return "compiler"


def ask(question: Question, listener: Listener) -> StageResult:
    """The result for one slice, from a process started for this question."""
    with CompilerClient(question.method) as client:
        return client.ask(question, listener)


class CompilerClient:
    """A running compiler process.

    Start it early with `get_ready`: its imports often take longer than an answer. One process makes all estimates. A
    compilation cannot be stopped, so with the compiler each answer ends its process.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._process: subprocess.Popen[str] | None = None
        self._streams = contextlib.ExitStack()
        self._answers: IO[str] | None = None
        self._output: IO[str] | None = None  # what the process prints, on stdout and stderr
        self._num_devices = 0

    def __enter__(self) -> CompilerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def get_ready(self, place: Slice) -> subprocess.Popen[str]:
        """A process for this slice: the running one if it has enough virtual devices, else a new one."""
        if self._process is not None and self._num_devices >= place.num_devices:
            return self._process
        self._end()
        self._output = self._streams.enter_context(contextlib.closing(_scratch_file()))
        self._num_devices = place.num_devices
        read_end, write_end = os.pipe()
        self._answers = self._streams.enter_context(os.fdopen(read_end))
        child = isolated_python(PROGRAM, str(write_end), environment=_environment(self._method, place))
        try:
            self._process = subprocess.Popen(
                child.command,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                text=True,
                env=child.environment,
                start_new_session=True,  # ^C is ours to handle
            )
        finally:
            os.close(write_end)
        return self._process

    def ask(self, question: Question, listener: Listener) -> StageResult:
        """The result for one slice. Events of the process reach the listener as they arrive."""
        place = find_slice(question.slice)
        process = self.get_ready(place)
        result = self._converse(process, question, listener)
        if result is None:
            try:
                process.wait(timeout=EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert self._output is not None
            self._output.seek(0)
            raise _crashed(process.returncode, self._output.read(), place)
        if self._method == "compiler":
            self._end()
        return result

    def _converse(self, process: subprocess.Popen[str], question: Question, listener: Listener) -> StageResult | None:
        """None if the process died."""
        assert process.stdin is not None and self._answers is not None
        try:
            print(json.dumps(question.to_dict()), file=process.stdin, flush=True)
        except BrokenPipeError:
            return None
        for line in self._answers:
            message = json.loads(line)
            if "result" in message:
                return StageResult.from_dict(message["result"])
            if "refused" in message:
                raise TrilloraError(**message["refused"])
            kind = _EVENTS.get(message.pop("event"))
            if kind is not None:
                listener(kind(**message))
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._streams.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _scratch_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _environment(method: Method, place: Slice) -> dict[str, str]:
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    if method == "estimate":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={place.num_devices}"
    return environment


def _crashed(code: int, output: str, place: Slice) -> CompilerCrashed:
    """The error for a process that died. Only the reason of a Python exception is repeated on the terminal, in one
    line; everything the process printed is in the file."""
    file = cache_root() / "preflight" / "compiler-output.txt"
    with contextlib.suppress(OSError):  # a cache that cannot be written must not hide the error
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(output, encoding="utf-8", errors="backslashreplace")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    _, is_exception, traceback = output.rpartition("Traceback (most recent call last):")
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()] if is_exception else []
    reason = f": {lines[0].strip()[:_REASON_LENGTH]}" if lines else "."
    return CompilerCrashed(
        f"The compiler process ended without an answer for {place.name} ({how}){reason}",
        where=f"--on {place.name}; its output is in {file}",
        do="use --estimate, or try other settings (engine.remat=full, a smaller train.micro_batch_size); "
        "if this machine ran out of memory, close other programs",
    )


def versions() -> dict[str, str | None]:
    return {package: installed_version(package) for package in ("trillora", "jax", "libtpu", "transformers", "torchax")}
