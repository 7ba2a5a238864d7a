"""Runs the proof in a child process, which may hang or crash, and returns its record. No jax.

    record = prove(listener)
    record.ok, record.checks

The chips are free again when the child has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trillora.child_process import isolated_python
from trillora.devices.measured import MAX_BYTES, MeasuredChip, from_json
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress
from trillora.files.cache_dir import cache_root

PROGRAM = "from trillora.prove.process import main; main()"
EXIT_SECONDS = 10  # to wait for a process that closed its pipe
TIMEOUT = 180  # seconds; the proof takes less than one minute on a chip
DO = "run `trillora doctor`, restart the runtime, and try again; if it happens again, send us this file"


def prove(listener: Listener) -> MeasuredChip:
    """The record of the chips of this machine."""
    with contextlib.ExitStack() as streams:
        output = streams.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        read_end, write_end = os.pipe()
        answers = streams.enter_context(os.fdopen(read_end, errors="replace"))
        # Another process may use some of a GPU's memory: take only what is needed.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        child = isolated_python(PROGRAM, str(write_end), environment=environment)
        try:
            process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=child.environment,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        with _ended_after(process, TIMEOUT) as timed_out:
            doing, result = _read_answers(answers, listener)
        if result is None:
            raise _no_record(process.returncode, timed_out.is_set(), doing, output)
        return result


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Ends the process and its children after this time, or after the block if it is still running then. The event
    is set if its time was over."""
    timed_out = threading.Event()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def time_is_over() -> None:
        timed_out.set()
        end()

    timer = threading.Timer(seconds, time_is_over)
    timer.daemon = True
    timer.start()
    try:
        yield timed_out
    except BaseException:  # ^C, or the process has refused
        end()
        raise
    finally:
        try:
            process.wait(timeout=EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            end()
            process.wait()
        timer.cancel()


def _read_answers(answers: IO[str], listener: Listener) -> tuple[str, MeasuredChip | None]:
    """What the process did last, and its record."""
    doing = "starting jax"
    for line in answers:
        if len(line) > 2 * MAX_BYTES:
            break
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:  # the process died in the middle of a line
            break
        if "result" in message:
            return doing, from_json(json.dumps(message["result"]).encode(), where="the proof")
        if "refused" in message:
            raise TrilloraError(**message["refused"])
        message.pop("event", None)
        progress = Progress(**message)
        doing = progress.label
        listener(progress)
    return doing, None


def _no_record(code: int, timed_out: bool, doing: str, output: IO[str]) -> TrilloraError:
    output.seek(0)
    text = output.read()
    file: Path | None = cache_root() / "measured" / "proof-output.txt"
    try:
        assert file is not None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        file = None
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")
    what = (
        f"The proof did not end within {TIMEOUT} seconds."
        if timed_out
        else f"The proof {how} before it had a result{f': {last}' if last and code > 0 else '.'}"
    )
    where = f"{doing}; its output is in {file}" if file else doing
    return TrilloraError(what, where=where, do=DO)
