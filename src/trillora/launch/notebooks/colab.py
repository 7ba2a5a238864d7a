"""`trillora launch colab`: a notebook for Colab; and with Google's own command line, the whole run from here.

    out/chat.ipynb     open it in Colab; recipe, data and Trillora are in it
    out/chat.bundle    only if they are too large for that: upload it to MyDrive/trillora

    colab new -s trillora-chat --tpu v5e1
    colab exec -s trillora-chat -f out/chat.ipynb --timeout 86400 --env TRILLORA_HEADLESS=1
    colab download -s trillora-chat content/chat-results.tar …
    colab stop -s trillora-chat

`colab exec` returns 0 although a cell failed, so only the file that the notebook wrote decides how the run ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, Note, ignore_events
from trillora.files.atomic import make_folder, write_file
from trillora.files.unpack import unpack
from trillora.launch.bundle import Bundle
from trillora.launch.install import TOKEN_FILE
from trillora.launch.notebooks.document import LARGEST_EMBEDDED, SUFFIX, make_notebook, pack
from trillora.launch.notebooks.program import ProgramEnd, call, find_program
from trillora.launch.notebooks.session import HEADLESS, RESULT, read_result
from trillora.launch.notebooks.targets import Target
from trillora.launch.origin import find_release

INSTALL = "install Google's Colab command line: uv tool install --python 3.12 google-colab-cli (0.7.4 or newer)"
LOGIN = "log in with `colab whoami`, which prints a link"
LONGEST = 86_400  # seconds of a session
SHORT = 300  # seconds for a command that only asks
TRANSFER = 3600  # seconds for an upload or a download


@dataclass(frozen=True)
class ColabFiles:
    """What was written, and what Google's program does with it."""

    name: str
    notebook: Path
    bundle: Path | None  # None: it is in the notebook
    target: Target

    @property
    def session(self) -> str:
        return f"trillora-{self.name}"

    @property
    def results(self) -> Path:
        return self.notebook.parent / "results"

    def command(self, verb: str, *words: str) -> list[str]:
        return ["colab", verb, "-s", self.session, *words]

    def steps(self, *, send_token: bool = False, keep: bool = False) -> list[tuple[str, list[str]]]:
        """Every command, in order, with the name of its step."""
        uploads = [(str(self.bundle), f"content/{self.bundle.name}")] if self.bundle else []
        uploads += [("TEMPORARY_FILE", f"content/{TOKEN_FILE}")] if send_token else []
        tar = f"{self.name}-results.tar"
        return [
            ("create", self.command("new", "--tpu", self.target.accelerator)),
            *(("upload", self.command("upload", *words)) for words in uploads),
            ("run", self.command("exec", *self._exec_words())),
            ("fetch", self.command("download", f"content/results/{self.name}/{RESULT}", RESULT)),
            ("fetch", self.command("download", f"content/{tar}", tar)),
            *([] if keep else [("stop", self.command("stop"))]),
        ]

    def _exec_words(self) -> list[str]:
        return ["-f", str(self.notebook), "--timeout", str(LONGEST), "--env", f"{HEADLESS}=1"]


def write_colab(
    bundle: Bundle,
    out: Path,
    target: Target,
    *,
    export: str = "merged",
    prove: bool = True,
    listener: Listener = ignore_events,
) -> ColabFiles:
    """Writes the notebook, and the bundle next to it if it is too large for the notebook. The same recipe makes the
    same files; other ones are not overwritten."""
    notebook, stored = out / f"{bundle.name}.ipynb", out / f"{bundle.name}{SUFFIX}"
    make_folder(out)
    release = find_release()
    with tempfile.TemporaryDirectory(prefix=".launch-", dir=out) as folder:
        packed = pack(bundle, Path(folder) / stored.name, listener, has_wheel=release is None)
        is_small = packed.stat().st_size <= LARGEST_EMBEDDED
        text = make_notebook(bundle, packed, target, embed=is_small, release=release, export=export, prove=prove)
        if notebook.exists() and notebook.read_bytes() != text.encode():
            what = "This folder has another notebook of this name."
            raise TrilloraError(what, where=str(notebook), do="remove it, or choose another --out")
        if not is_small:
            os.replace(packed, stored)
        write_file(notebook, text)
    return ColabFiles(bundle.name, notebook, None if is_small else stored, target)


def require_program(target: Target) -> None:
    """Raises an error if Google's program is not installed, or must not be used. It takes other words after --tpu for a
    v6e-1, and some after --gpu for an A100: both cost more."""
    if target.backend != "tpu":
        what = f"Only TPUs are started through Google's program, not {target.chips}."
        raise TrilloraError(what, where="--run", do="open the notebook in a browser, without --run")
    find_program("colab", INSTALL)


class ColabRun:
    """The whole run through Google's program. The runtime is given back at the end, whatever happens, unless `keep`."""

    def __init__(
        self,
        files: ColabFiles,
        listener: Listener,
        *,
        token: str | None = None,
        keep: bool = False,
        pace: float = 60.0,
    ) -> None:
        self._files, self._listener, self._token, self._keep, self._pace = files, listener, token, keep, pace

    def run(self) -> dict[str, Any]:
        """Creates, uploads, runs, fetches, stops. Returns what the notebook wrote about its session."""
        require_program(self._files.target)
        answer = self._ask("new", "--tpu", self._files.target.accelerator, seconds=SHORT)
        if answer.code != 0:
            raise _refusal(answer)
        try:
            self._upload()
            self._listener(Note(f"Running {self._files.notebook} on Colab"))
            ended = self._ask("exec", *self._files._exec_words(), seconds=LONGEST, show=True)
            return self._fetch(ended)
        finally:
            if self._keep:
                self._listener(Note(f"The runtime is kept; end it with: colab stop -s {self._files.session}"))
            elif self._ask("stop", seconds=SHORT).code != 0:
                session = self._files.session
                self._listener(Alarm(f"The runtime may still cost compute units. End it: colab stop -s {session}"))

    def _ask(self, verb: str, *words: str, seconds: float, show: bool = False) -> ProgramEnd:
        listener = self._listener if show else None
        return call(self._files.command(verb, *words), seconds=seconds, listener=listener)

    def _upload(self) -> None:
        if self._files.bundle is not None:
            self._send(self._files.bundle, f"content/{self._files.bundle.name}")
        if self._token is not None:
            with tempfile.TemporaryDirectory() as folder:  # only this user can read it
                file = Path(folder) / TOKEN_FILE
                with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as secret:
                    secret.write(self._token)
                self._send(file, f"content/{TOKEN_FILE}")

    def _send(self, file: Path, place: str) -> None:
        self._listener(Note(f"Uploading {place.removeprefix('content/')}"))
        if (answer := self._ask("upload", str(file), place, seconds=TRANSFER)).code != 0:
            do = "try again; see ~/.config/colab-cli/colab.log"
            raise TrilloraError("The upload to Colab failed.", where=answer.last_line, do=do)

    def _fetch(self, ended: ProgramEnd) -> dict[str, Any]:
        """The notebook's own record, then its results. A lost connection does not end a run: it is asked for again."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / RESULT
            place = f"content/results/{self._files.name}/{RESULT}"
            result: dict[str, Any] = {}
            while True:
                self._ask("download", place, str(record), seconds=TRANSFER)
                result = read_result(record)
                is_running = ended.code != 0 and result.get("state", "started") == "started"
                if not is_running or self._ask("status", seconds=SHORT).code != 0:
                    break
                self._listener(Note("The connection was lost; the run continues. Asking again."))
                time.sleep(self._pace)
        self._fetch_results()
        self._judge(result, ended)
        return result

    def _fetch_results(self) -> None:
        packed = self._files.notebook.with_name(f"{self._files.name}-results.tar")
        packed.unlink(missing_ok=True)  # of an earlier run
        self._ask("download", f"content/{packed.name}", str(packed), seconds=TRANSFER)
        if packed.is_file():
            unpack(packed, self._files.results)  # if it is refused, the archive stays, because the runtime does not
            packed.unlink()
            self._listener(Note(f"Results: {self._files.results}"))

    def _judge(self, result: Mapping[str, object], ended: ProgramEnd) -> None:
        output = self._files.notebook.with_name(f"{self._files.name}_output.ipynb")
        state = result.get("state")
        if state == "no-chip":
            what = "Colab gave a machine without TPU, so nothing was trained."
            raise TrilloraError(
                what, where=str(result.get("device"))[:300], do="try again later, or use --on colab-v6e"
            )
        if state not in ("finished", "stopped"):
            what = "The run on Colab did not finish." if state else "The notebook on Colab left no result."
            raise TrilloraError(what, where=ended.last_line, do=f"see the output of the cells in {output}")


def _refusal(answer: ProgramEnd) -> TrilloraError:
    """Why no runtime was created, by the texts of Google's program."""
    text = answer.text
    if "Allocation refused" in text:
        what = "Colab has no TPU for this account now: its limit is reached, or none is free."
        return TrilloraError(what, where=answer.last_line, do="try again later; `colab usage` shows what is left")
    if "Backend rejected accelerator" in text:
        what = "This account may not use that TPU."
        return TrilloraError(what, where=answer.last_line, do="use --on colab, or buy compute units on Colab")
    if any(word in text.lower() for word in ("credential", "log in", "login", "authoriz", "token")):
        return TrilloraError("Colab's program is not logged in.", where=answer.last_line, do=LOGIN)
    return TrilloraError("Colab created no runtime.", where=answer.last_line, do="see ~/.config/colab-cli/colab.log")
