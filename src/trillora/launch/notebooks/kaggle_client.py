"""Pushes, watches and fetches kernels through Kaggle's own client.

    client = KaggleClient(files, listener)
    client.push()      # the data set, and the first kernel of the chain that has not run
    client.status()    # [SessionStatus(1, "COMPLETE", "stopped"), SessionStatus(2, "RUNNING", None)]
    client.pull()      # the output of the last kernel that ran

The client exits with 0 although an upload failed, so its texts are read. A kernel that ran without the chips is an
error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.devices.slices import KAGGLE
from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Note
from trillora.files.atomic import write_file
from trillora.launch.notebooks.kaggle import KaggleFiles, clean_kernel
from trillora.launch.notebooks.program import ProgramEnd, call, find_program
from trillora.launch.notebooks.session import RESULT, read_result

INSTALL = "pip install kaggle six"  # kaggle 2.2 needs six, and does not say so
LOGIN = "log in with `kaggle auth login`, or put a token of kaggle.com/settings/api into ~/.kaggle/access_token"
ASK, TRANSFER = 300, 6 * 3600  # seconds
DATASET_SECONDS = 1800  # until an uploaded data set must be ready
BUSY = ("QUEUED", "RUNNING", "NEW_SCRIPT", "CANCEL_REQUESTED")
_STATUS = re.compile(r'has status "(?:KernelWorkerStatus\.)?([A-Za-z_]{1,40})"')


@dataclass(frozen=True)
class SessionStatus:
    """One kernel of the chain."""

    number: int
    kernel: str
    kaggle: str | None  # Kaggle's own word; None: it was never pushed
    state: str | None  # what the notebook wrote: finished, stopped, failed, no-chip; None: nothing yet
    device: str | None = None


class KaggleClient:
    """Kaggle's program with the folders of a launch."""

    def __init__(self, files: KaggleFiles, listener: Listener, *, pace: float = 10.0) -> None:
        self._files, self._listener, self._pace = files, listener, pace
        self._program = require_program()

    # ---- what a person asks for

    def push(self) -> str:
        """Pushes the data set, once, and the next kernel of the chain. Returns the kernel's id."""
        number = self._next_session()
        folder = self._files.session(number)
        if changed := clean_kernel(folder, self._files.target):
            self._listener(Note(f"Removed from {folder.name}, because Kaggle would use a CPU: {', '.join(changed)}"))
        self._show_quota()
        if not self._files.uploaded.is_file():
            self._push_dataset()
            write_file(self._files.uploaded, f"{self._files.dataset_id}\n")
        seconds = int(KAGGLE.session_hours * 3600)
        answer = self._ask("kernels", "push", "-p", str(folder), "-t", str(seconds), seconds=TRANSFER)
        if "successfully pushed" not in answer.text or "not valid" in answer.text:
            do = "fix what Kaggle says; the account needs a verified phone number and identity for TPUs"
            raise TrilloraError("Kaggle refused the kernel.", where=_refusal_line(answer), do=do)
        return self._files.kernel_id(number)

    def status(self) -> list[SessionStatus]:
        """Every kernel of the chain. Raises an error if one ran without the chips."""
        found = [self._session_status(number) for number in range(1, self._files.num_sessions + 1)]
        for session in found:
            self._require_chip(session)
        return found

    def pull(self) -> Path:
        """Downloads the output of the last kernel that ended. Returns the folder."""
        ended = [session for session in self.status() if session.state is not None]
        if not ended:
            what = "No kernel of this launch has an output yet."
            raise TrilloraError(what, where=self._files.kernel_id(1), do="see --status, and try again later")
        last = ended[-1]
        target = self._files.results
        target.mkdir(parents=True, exist_ok=True)
        self._listener(Note(f"Downloading the output of {last.kernel}"))
        answer = self._ask("kernels", "output", last.kernel, "-p", str(target), "-o", seconds=TRANSFER)
        if answer.code != 0 or read_result(target / RESULT).get("state") != last.state:
            raise TrilloraError("The download failed.", where=answer.last_line, do="try again")
        return target

    # ---- the chain

    def _next_session(self) -> int:
        """The first session that was not pushed. Those before it must have stopped in good order."""
        for number in range(1, self._files.num_sessions + 1):
            session = self._session_status(number)
            if session.kaggle is None:
                return number
            self._require_chip(session)
            if session.kaggle in BUSY:
                what = f"Session {number} is still running ({session.kaggle})."
                raise TrilloraError(what, where=session.kernel, do="wait until it ends; --status shows it")
            if session.state == "finished":
                what = f"The run is finished: session {number} trained the last step."
                raise TrilloraError(what, where=session.kernel, do="fetch it with --pull")
            if session.state != "stopped":
                what = f"Session {number} failed ({session.kaggle})."
                do = f"see `kaggle kernels logs {session.kernel}`, then delete it with `kaggle kernels delete`"
                raise TrilloraError(what, where=session.kernel, do=do)
        what = f"All {self._files.num_sessions} sessions ran, and the run is not finished."
        raise TrilloraError(what, where=str(self._files.folder), do="write the folder again with more --sessions")

    def _session_status(self, number: int) -> SessionStatus:
        kernel = self._files.kernel_id(number)
        answer = self._ask("kernels", "status", kernel, seconds=ASK, check=False)
        found = _STATUS.search(answer.text)
        if found is None:
            if not re.search(r"404|403|not found|denied|cannot access", answer.text, re.IGNORECASE):
                raise TrilloraError("Kaggle does not answer.", where=answer.last_line, do="try again later")
            return SessionStatus(number, kernel, None, None)
        status = found[1].upper()
        if status in BUSY:
            return SessionStatus(number, kernel, status, None)
        result = self._result_of(kernel)
        found_device = result.get("device")
        device: dict[str, Any] = found_device if isinstance(found_device, dict) else {}
        shown = f"{device.get('count', 0)} x {device.get('kind', '?')}" if device else None
        state = result.get("state")
        is_wrong = bool(device) and device.get("platform") != self._files.target.backend
        return SessionStatus(
            number, kernel, status, "no-chip" if is_wrong else state if isinstance(state, str) else None, shown
        )

    def _result_of(self, kernel: str) -> dict[str, Any]:
        """What the notebook wrote about its session."""
        with tempfile.TemporaryDirectory() as folder:
            pattern = f"^{re.escape(RESULT)}$"
            self._ask("kernels", "output", kernel, "-p", folder, "-o", "-q", "--file-pattern", pattern, seconds=ASK)
            return read_result(Path(folder) / RESULT)

    def _require_chip(self, session: SessionStatus) -> None:
        if session.state != "no-chip":
            return
        is_tpu = self._files.target.backend == "tpu"
        why = "verify your identity on Kaggle (a phone number is not enough for TPUs), check" if is_tpu else "check"
        raise TrilloraError(
            f"Session {session.number} came back from a machine without {'TPU' if is_tpu else 'GPUs'}, so nothing was "
            "trained.",
            where=f"{session.kernel}: {session.device or 'no devices'}",
            do=f"{why} the weekly quota, then `kaggle kernels delete {session.kernel}` and push again",
        )

    # ---- the data set

    def _push_dataset(self) -> None:
        folder, name = str(self._files.dataset), self._files.dataset_id
        exists = self._ask("datasets", "status", name, seconds=ASK, check=False).code == 0
        self._listener(Note(f"Uploading the data set {name}"))
        words = ("version", "-p", folder, "-m", "trillora launch") if exists else ("create", "-p", folder)
        answer = self._ask("datasets", *words, seconds=TRANSFER)
        if "is being created" not in answer.text or "error:" in answer.text.lower():
            raise TrilloraError("Kaggle refused the data set.", where=_refusal_line(answer), do="fix what Kaggle says")
        end = time.monotonic() + DATASET_SECONDS
        while time.monotonic() < end:
            status = self._ask("datasets", "status", name, seconds=ASK, check=False)
            if re.search(r"\bready\b", status.text):
                return
            if re.search(r"\b(failed|error)\b", status.text):
                break
            time.sleep(self._pace)
        where = f"kaggle.com/datasets/{name}"
        raise TrilloraError("Kaggle did not process the data set.", where=where, do="look at that page, and push again")

    def _show_quota(self) -> None:
        """How many TPU hours are left this week, if Kaggle says so."""
        kind, longest = self._files.target.backend.upper(), KAGGLE.session_hours
        answer = self._ask("quota", "--format", "json", seconds=ASK, check=False)
        try:
            rows = json.loads(answer.text[answer.text.index("[") :])
            [left] = [row["remaining"] for row in rows if row["resource"] == kind]
            hours = float(str(left).rstrip("h"))
        except (ValueError, KeyError, TypeError):
            return
        self._listener(Note(f"{kind} quota: {hours:.1f} h left this week"))
        if hours < longest:
            self._listener(Alarm(f"A session takes up to {longest:.0f} h, but only {hours:.1f} h are left."))

    def _ask(self, *words: str, seconds: float, check: bool = True) -> ProgramEnd:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        answer = call([self._program, *words], seconds=seconds, environment=environment)
        if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]{1,60})'", answer.text):
            what = f"Kaggle's client does not start: the package {missing[1]} is missing."
            raise TrilloraError(what, where=self._program, do=f"pip install {missing[1]}")
        if re.search(r"Authentication required|Unauthenticated|Unauthorized", answer.text) or "401" in answer.last_line:
            raise TrilloraError("Kaggle's client is not logged in.", where=self._program, do=LOGIN)
        if check and answer.code != 0:
            what = f"`kaggle {' '.join(words[:2])}` failed."
            raise TrilloraError(what, where=answer.last_line, do="fix what Kaggle says, and try again")
        return answer


def require_program() -> str:
    """The path of Kaggle's client: the one of this Python, or the first in PATH."""
    own = Path(sys.executable).with_name("kaggle")
    return str(own) if own.is_file() else find_program("kaggle", INSTALL)


def _refusal_line(answer: ProgramEnd) -> str:
    lines = [line for line in answer.text.splitlines() if "error" in line.lower() or "not valid" in line]
    return ProgramEnd(answer.code, lines[-1]).last_line if lines else answer.last_line
