"""Runs that start quickly: forked from a process that has already imported everything.

Kill tests are about what happens after the imports, and two hundred kills would spend most of their time importing. The
child uses the real command line and its own pipe, and a signal ends only the child.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any, TextIO

STARTUP = Path(__file__).parent / "startup"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trillora.cli", "trillora.training.trainer", "trillora.certify.certify"])


class WarmCommand:
    """A command of `trillora`. Has the part of `subprocess.Popen` that the tests need."""

    def __init__(self, *arguments: str, errors: bool = False, audit: Path | None = None) -> None:
        """`errors`: standard error goes to the same pipe. `audit`: file for what the command does, see
        startup/sitecustomize.py. The command then has secrets in its environment (canaries.py) and may use the hub,
        but connections to other machines fail."""
        read, write = os.pipe()
        parent, child = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(child, list(arguments), errors, audit), daemon=True)
        self._process.start()
        child.close()
        reduction.send_handle(parent, write, self._process.pid)
        os.close(write)
        parent.close()
        self.stdout: TextIO = os.fdopen(read, errors="backslashreplace")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        output = self.stdout.read()
        self._process.join(timeout)
        self.stdout.close()
        return output, ""


class WarmRun(WarmCommand):
    def __init__(self, recipe: Path, out: Path) -> None:
        super().__init__("train", str(recipe), "--out", str(out), "--json")


def _run(pipe: connection.Connection, arguments: list[str], errors: bool, audit: Path | None) -> Any:
    write = reduction.recv_handle(pipe)
    os.dup2(write, 1)
    sys.stdout = os.fdopen(1, "w")  # the old object may belong to a file
    if errors:
        os.dup2(write, 2)
        sys.stderr = os.fdopen(2, "w")
    os.close(write)
    if audit is not None:
        _watch(audit)
    sys.argv = ["trillora", *arguments]
    from trillora.cli import main

    main()


def _watch(audit: Path) -> None:
    """Watches this process and the ones that it starts."""
    from canaries import SECRETS
    from huggingface_hub import constants

    os.environ.update(TRILLORA_AUDIT=str(audit), TRILLORA_AUDIT_OFFLINE="1", HF_HUB_OFFLINE="0", **SECRETS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
    constants.HF_HUB_OFFLINE = False
    spec = importlib.util.spec_from_file_location("startup", STARTUP / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
