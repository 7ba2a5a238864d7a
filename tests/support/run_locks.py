"""Processes that own a folder, for tests of locks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trillora.errors import TrilloraError
from trillora.files.owner import lock_run
if sys.argv[3] == "no locks":
    import fcntl
    def flock(*arguments):
        raise OSError(int(sys.argv[4]), "no locks here")
    fcntl.flock = flock
try:
    with lock_run(Path(sys.argv[2])):
        print("owns", flush=True)
        sys.stdin.readline()
except TrilloraError as error:
    print("refused", flush=True)
    print(error, flush=True)
"""


@contextmanager
def owner(run: Path, locks: str = "locks", code: int = 95) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(SOURCE), str(run), locks, str(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
