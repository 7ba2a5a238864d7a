"""Only one process may use a run folder. With real processes: a second one is refused at once, and the lock of a
killed owner is taken over."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from run_locks import first_line, owner

from trillora.errors import TrilloraError
from trillora.files.owner import lock_run

FULL_DOSE = os.environ.get("TRILLORA_DOSE") == "full"


def test_a_second_process_is_refused_at_once_with_the_name_of_the_owner(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    with owner(run) as process:
        assert first_line(process) == "owns"
        start = time.monotonic()
        with pytest.raises(TrilloraError) as caught, lock_run(run):
            pytest.fail("two owners")
        assert time.monotonic() - start < 1
        assert f"process {process.pid} on {socket.gethostname()}" in caught.value.what
        assert caught.value.where == str(run)
        with owner(run) as second:
            assert first_line(second) == "refused"
        # The refused process has not changed the note.
        with pytest.raises(TrilloraError, match=f"process {process.pid} "), lock_run(run):
            pytest.fail("two owners")
        process.communicate("go\n")
    with lock_run(run):
        pass


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_a_killed_owners_lock_is_recovered(tmp_path: Path, locks: str) -> None:
    for _ in range(20 if FULL_DOSE else 2):
        with owner(tmp_path, locks) as process:
            assert first_line(process) == "owns"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert json.loads((tmp_path / ".lock-owner").read_text())["pid"] == process.pid  # not removed
            with owner(tmp_path, locks) as successor:
                assert first_line(successor) == "owns"
                successor.communicate("go\n")
    assert not (tmp_path / ".lock-owner").exists()


def test_of_many_at_once_exactly_one_owns(tmp_path: Path) -> None:
    dead = json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "since": 0})
    for locks in ("locks", "no locks"):
        (tmp_path / ".lock-owner").write_text(dead)  # every process tries to replace this note
        with ExitStack() as stack:
            processes = [stack.enter_context(owner(tmp_path, locks)) for _ in range(8 if FULL_DOSE else 4)]
            assert sorted(first_line(process) for process in processes) == ["owns", *["refused"] * (len(processes) - 1)]


def test_the_same_process_owns_a_run_once(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        with pytest.raises(TrilloraError, match=f"process {os.getpid()} "), lock_run(tmp_path):
            pytest.fail("two owners")
        with lock_run(tmp_path / "other"):
            pass
        assert (tmp_path / ".lock-owner").exists()
    with pytest.raises(ZeroDivisionError), lock_run(tmp_path):
        _ = 1 / 0
    with lock_run(tmp_path):
        pass


@pytest.mark.parametrize("code", [38, 95, 37], ids=["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def test_without_locks_the_note_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    note = tmp_path / ".lock-owner"
    with lock_run(tmp_path):
        assert json.loads(note.read_text())["pid"] == os.getpid()
        with pytest.raises(TrilloraError, match=f"process {os.getpid()} "), lock_run(tmp_path):
            pytest.fail("two owners")
    assert not note.exists()

    def leave(pid: int, host: str, since: float) -> None:
        note.write_text(json.dumps({"pid": pid, "host": host, "since": since}))

    leave(2**22 + 1, "elsewhere", time.time() - 3600)  # no sign of life for an hour
    with lock_run(tmp_path):
        pass
    leave(os.getpid(), socket.gethostname(), time.time() - 10**6)  # our pid, but of a much older process
    with lock_run(tmp_path):
        pass
    leave(2**22 + 1, socket.gethostname(), time.time())  # larger than any possible pid
    with lock_run(tmp_path):
        pass
    assert not note.exists()


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_a_removed_lock_file_gives_no_second_owner(tmp_path: Path, locks: str) -> None:
    """The owner's note is asked too."""
    with owner(tmp_path, locks) as process:
        assert first_line(process) == "owns"
        (tmp_path / ".lock").unlink(missing_ok=True)
        with pytest.raises(TrilloraError, match=f"process {process.pid} "), lock_run(tmp_path):
            pytest.fail("two owners")
        process.kill()
        process.wait()
        with lock_run(tmp_path):
            pass


def test_an_owner_whose_lock_and_note_were_removed_notices_the_next_one(tmp_path: Path) -> None:
    with lock_run(tmp_path) as owned:
        for name in (".lock", ".lock-owner"):
            (tmp_path / name).unlink()
        owned.check()  # no one else is there: the note is written again
        assert (tmp_path / ".lock-owner").exists()
        (tmp_path / ".lock-owner").unlink()
        with owner(tmp_path) as process:
            assert first_line(process) == "owns"
            with pytest.raises(TrilloraError, match="Another process has taken over") as caught:
                owned.check()
            assert f"process {process.pid} " in caught.value.what


def test_a_damaged_note_does_no_harm(tmp_path: Path) -> None:
    draw = random.Random(20)
    notes = [b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid": 1e999}', b"\xff" * 10, b"[" * 100_000, draw.randbytes(100)]
    notes.append(json.dumps({"pid": -1, "host": socket.gethostname(), "since": 1e300}).encode())
    for data in notes if FULL_DOSE else notes[::2]:  # each is waited for
        (tmp_path / ".lock-owner").write_bytes(data)
        with lock_run(tmp_path):
            assert json.loads((tmp_path / ".lock-owner").read_text())["pid"] == os.getpid()
    for data in notes[-1], notes[0]:
        with lock_run(tmp_path):
            (tmp_path / ".lock-owner").write_bytes(data)
            with pytest.raises(TrilloraError, match="in use by another process"), lock_run(tmp_path):
                pytest.fail("two owners")


def test_an_impossible_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrilloraError, match="cannot be written") as caught, lock_run(tmp_path / "file" / "run"):
        pytest.fail("no such folder")
    assert caught.value.where == str(tmp_path / "file" / "run")
