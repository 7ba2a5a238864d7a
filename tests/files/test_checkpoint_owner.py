"""One process writes the checkpoints of a run, also at a URL, and a run whose checkpoints are gone is refused.

With real processes where that matters. Another machine is a note with another machine's name.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Note, Saved, ignore_events
from trillora.files import owner, storage
from trillora.files.checkpoints import Checkpoints
from trillora.files.owner import lock_run, own_checkpoints
from trillora.files.storage import LocalStorage, Storage, open_storage
from trillora.training.run_folder import RunFolder
from trillora.training.saved_record import RunIdRecord
from trillora.training.saver import Saver

SOURCE = Path(__file__).parents[2] / "src"
FILES = {"state.json": b"{}"}

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trillora.errors import TrilloraError
from trillora.files.storage import open_storage
from trillora.files.checkpoints import Checkpoints
from trillora.files.owner import own_checkpoints
storage = open_storage(sys.argv[2])
try:
    with own_checkpoints(storage, Path(sys.argv[3])) as owned:
        checkpoints = Checkpoints(storage, owned.check)
        checkpoints.clean()
        if sys.argv[4] == "write":
            checkpoints.write(1, {"state.json": b"{}"})
        print("owns", flush=True)
        sys.stdin.readline()
except TrilloraError as error:
    print("refused", error.what, flush=True)
"""


@contextmanager
def writer(where: str, run: Path, does: str = "write") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(SOURCE), where, str(run), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "ck" if request.param == "folder" else f"file://{tmp_path}/ck")


# Two processes


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_of_two_runs_with_the_same_checkpoints_the_second_is_refused(tmp_path: Path, kind: str) -> None:
    ck = tmp_path / "ck"
    where = str(ck) if kind == "folder" else f"file://{ck}"
    with writer(where, tmp_path / "a") as first:
        assert first_line(first) == "owns"
        under_way = ck / ".making-step-00000002-1" if kind == "folder" else ck / "step-00000002"
        under_way.mkdir()
        (under_way / ".making").write_text("being written\n")
        with writer(where, tmp_path / "b") as second:
            assert first_line(second).startswith(f"refused These checkpoints are in use by process {first.pid} ")
        other = open_storage(f"file://{ck}" if kind == "folder" else ck)  # the same place in the other form
        with pytest.raises(TrilloraError, match=f"process {first.pid} ") as caught, own_checkpoints(other, tmp_path):
            pytest.fail("two owners")
        assert "train.checkpoint_dir" in caught.value.do
        assert (under_way / ".making").exists()  # the save of the first is still there
        first.send_signal(signal.SIGKILL)
        first.wait()
        start = time.monotonic()
        with writer(where, tmp_path / "b", "read") as second:  # the run's folder is lost with its machine
            assert first_line(second) == "owns"
            assert time.monotonic() - start < 10  # no waiting: the first process is known to be dead
            assert not under_way.exists()
            second.communicate("go\n")
    assert Checkpoints(open_storage(where)).steps() == [1]
    assert not (ck / ".lock-owner").exists()


def other_machine(place: Storage, *, seconds_ago: float) -> owner.Owner:
    """Leave the note of a process on another machine."""
    now = time.time()
    other = owner.Owner(71, "vm-3", now - 3600, "another machine", now - seconds_ago)
    if isinstance(place, LocalStorage):
        place.root.mkdir(exist_ok=True)
    place.write_note(owner.NOTE, owner._text(other), new=False)
    return other


def test_an_owner_on_another_machine_is_taken_over_when_it_is_silent(
    place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_machine(place, seconds_ago=owner.STALE_SECONDS + 1)
    events: list[Event] = []
    with own_checkpoints(place, tmp_path, events.append):
        assert not events  # a run lost hours ago: no waiting
    monkeypatch.setattr(owner, "_POLL_SECONDS", 0.05)
    for seconds_ago in (owner.STALE_SECONDS - 1, -1000.0):  # the clock of the other machine may be ahead
        if seconds_ago < 0:
            monkeypatch.setattr(owner, "STALE_SECONDS", 1.0)
        events.clear()
        other_machine(place, seconds_ago=seconds_ago)
        start = time.monotonic()
        with own_checkpoints(place, tmp_path, events.append) as owned:
            assert 0.8 < time.monotonic() - start < 10
            assert owned is not None
            owned.check()
        (note,) = events
        assert isinstance(note, Note) and "process 71 on vm-3" in note.text and "Waiting up to 1 s" in note.text


def test_an_owner_on_another_machine_is_respected_when_it_gives_a_sign_of_life(
    place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_POLL_SECONDS", 0.05)
    other_machine(place, seconds_ago=20)
    beat = threading.Timer(0.3, lambda: other_machine(place, seconds_ago=0))
    beat.start()
    with pytest.raises(TrilloraError, match="in use by process 71 on vm-3"), own_checkpoints(place, tmp_path):
        pytest.fail("two owners")
    beat.join()


def test_the_owner_gives_signs_of_life(place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owner.STALE_SECONDS >= 4 * owner.BEAT_SECONDS  # some may be late
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.1)

    def beat() -> float:
        data = place.read_note(owner.NOTE)
        return float(json.loads(data)["beat"]) if data else 0.0

    with own_checkpoints(place, tmp_path):
        first, until = beat(), time.monotonic() + 20
        while beat() <= first and time.monotonic() < until:
            time.sleep(0.02)
        assert beat() > first
    time.sleep(0.3)
    assert place.read_note(owner.NOTE) is None  # and none after its end


def test_an_owner_that_was_taken_for_dead_stops_before_its_next_change(place: Storage, tmp_path: Path) -> None:
    with own_checkpoints(place, tmp_path) as owned:
        assert owned is not None
        checkpoints = Checkpoints(place, owned.check)
        checkpoints.write(1, FILES)
        other_machine(place, seconds_ago=0)
        changes: list[Callable[[], Any]] = [
            lambda: checkpoints.write(2, FILES),
            lambda: checkpoints.prune(1),
            lambda: checkpoints.remove_after(0),
            checkpoints.clean,
        ]
        for change in changes:
            with pytest.raises(TrilloraError, match=r"Another process has taken over.*process 71 on vm-3"):
                change()
        with pytest.raises(TrilloraError, match="taken over"), Saver(checkpoints, ignore_events) as saver:
            saver.submit(2, lambda: FILES)
        assert checkpoints.steps() == [1]
    assert place.read_note(owner.NOTE) is not None  # the note of the other one stays


def test_a_store_that_cannot_refuse_a_second_note_is_read_back(memory: MemoryFileSystem, tmp_path: Path) -> None:
    """Two processes find no note and both write theirs. The last one stays, and the first is refused."""
    place = open_storage("memory://bucket/run")
    real = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        real(self, path, value)
        other = owner.Owner(71, "vm-3", time.time(), "another machine", time.time())
        real(self, path, owner._text(other))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        with pytest.raises(TrilloraError, match="process 71 on vm-3"), own_checkpoints(place, tmp_path):
            pytest.fail("two owners")


def test_checkpoints_in_the_folder_of_the_run_itself_have_one_lock(tmp_path: Path) -> None:
    with lock_run(tmp_path), own_checkpoints(LocalStorage(tmp_path), tmp_path) as owned:
        assert owned is None


# Places that cannot be written


def refusal(place: Storage, run: Path) -> str:
    with pytest.raises(TrilloraError) as caught, own_checkpoints(place, run):
        pytest.fail("owned")
    assert caught.value.exit_code == 2 and caught.value.do and caught.value.where == place.where
    return caught.value.what


def test_a_place_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere" / "ck")
    for name in ("file", "file/ck", "broken"):
        assert "train.checkpoint_dir cannot be written" in refusal(LocalStorage(tmp_path / name), tmp_path)
    assert "cannot be written" in refusal(open_storage(f"file://{tmp_path}/file/ck"), tmp_path)
    assert (tmp_path / "file").read_text() == "x"
    real = os.open
    for code, flag in ((errno.EROFS, os.O_CREAT), (errno.ENOSPC, os.O_EXCL)):  # read-only; full

        def open_(path: Any, flags: int, *more: Any, code: int = code, flag: int = flag, **options: Any) -> int:
            if str(path).startswith(str(tmp_path)) and flags & flag:
                raise OSError(code, os.strerror(code), str(path))
            return real(path, flags, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_)
            assert os.strerror(code) in refusal(LocalStorage(tmp_path / "ck"), tmp_path)


def test_a_store_that_refuses_connections_is_an_error(tmp_path: Path) -> None:
    start = time.monotonic()
    assert "train.checkpoint_dir cannot be written" in refusal(open_storage("webhdfs://127.0.0.1:9/x"), tmp_path)
    assert time.monotonic() - start < 30


def test_a_store_that_never_answers_is_an_error(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CALL_SECONDS", 0.2)
    place, hang = open_storage("memory://bucket/run"), threading.Event()
    for name in ("cat_file", "ls", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, name, lambda *a, **k: hang.wait(60))
    assert "no answer within 0 s" in refusal(place, tmp_path)
    events: list[Event] = []
    with Saver(Checkpoints(place), events.append) as saver:
        saver.submit(1, lambda: FILES)
        saver.wait()
        assert saver.failure is not None
    (alarm,) = events
    assert isinstance(alarm, Alarm) and "could not be saved" in alarm.text and "Training continues" in alarm.text
    with pytest.raises(TrilloraError, match="Checkpoints cannot be read"):
        Checkpoints(place).newest_valid(ignore_events)
    hang.set()


# Checkpoints that are gone


def started(run: Path, place: Storage) -> RunIdRecord:
    """A run with a checkpoint of step 3."""
    folder = RunFolder(run)
    record = RunIdRecord(folder)
    record.compare([], None, place.where, ignore_events)
    record.write(None)
    checkpoints = Checkpoints(place)
    with Saver(checkpoints, record.listening(ignore_events)) as saver:
        saver.submit(3, lambda: FILES)
    assert json.loads((run / "saved.json").read_text())["where"] == checkpoints.where(3)
    return record


def test_missing_checkpoints_of_a_started_run_are_an_error(place: Storage, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_id = started(run, place).run_id
    again = RunIdRecord(RunFolder(run))
    again.check_place(place)
    again.compare([2, 3], run_id, place.where, ignore_events)
    assert again.run_id == run_id
    with pytest.raises(TrilloraError, match=r"missing: step 3 was saved") as caught:
        again.compare([], None, place.where, ignore_events)
    assert place.where == caught.value.where and "mount or restore" in caught.value.do
    (tmp_path / "ck").rename(tmp_path / "elsewhere")
    with pytest.raises(TrilloraError, match="missing") as caught:
        again.check_place(place)
    assert not (tmp_path / "ck").exists()  # nothing is created in place of an unmounted drive
    with pytest.raises(TrilloraError) as caught:
        again.compare([], None, "gs://new/place", ignore_events)
    assert f"copy {place.where}/step-00000003 there" in caught.value.do
    assert "remove the run's folder" in caught.value.do


def test_older_checkpoints_than_recorded_are_reported(place: Storage, tmp_path: Path) -> None:
    started(tmp_path / "run", place)
    events: list[Event] = []
    RunIdRecord(RunFolder(tmp_path / "run")).compare([1, 2], None, place.where, events.append)
    (alarm,) = events
    assert isinstance(alarm, Alarm) and "step-00000003, is missing" in alarm.text


def test_checkpoints_of_another_run_are_refused_and_a_new_folder_adopts_them(place: Storage, tmp_path: Path) -> None:
    run_id = started(tmp_path / "run", place).run_id
    with pytest.raises(TrilloraError, match="belong to another run"):
        RunIdRecord(RunFolder(tmp_path / "run")).compare([3], "another id", place.where, ignore_events)
    fresh = RunIdRecord(RunFolder(tmp_path / "new machine"))
    fresh.compare([3], run_id, place.where, ignore_events)
    assert fresh.run_id == run_id
    assert RunIdRecord(RunFolder(tmp_path / "third")).run_id != run_id


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', '{"run": "a", "step": "x"}', '{"step": 3}', "[" * 9999])
def test_a_damaged_record_is_an_error(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "saved.json").write_text(content)
    with pytest.raises(TrilloraError) as caught:
        RunIdRecord(folder)
    assert caught.value.where == str(tmp_path / "saved.json")


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    record = RunIdRecord(RunFolder(tmp_path))
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    record.listening(events.append)(Saved(step=1, where="ck/step-00000001", seconds=0.1))
    assert [type(event) for event in events] == [Alarm, Saved]


@pytest.mark.parametrize("target", ["there", "gone"])
def test_links_in_place_of_checkpoints_are_used_or_refused(tmp_path: Path, target: str) -> None:
    checkpoints = Checkpoints(LocalStorage(tmp_path / "ck"))
    for step in (1, 2):
        checkpoints.write(step, FILES)
    moved, link = tmp_path / "drive" / "step-00000002", tmp_path / "ck" / "step-00000002"
    moved.parent.mkdir()
    link.rename(moved)
    link.symlink_to(moved)
    if target == "there":
        assert checkpoints.newest_valid(ignore_events) == (2, FILES)
        (moved / "state.json").write_bytes(b"[]")
        found = checkpoints.newest_valid(ignore_events)
        assert found is not None and found[0] == 1  # damage is noticed through a link too
        checkpoints.remove_after(1)
        assert not link.is_symlink() and moved.exists()  # only the link is removed
        return
    moved.rename(tmp_path / "unmounted")
    with pytest.raises(TrilloraError, match="Checkpoints cannot be read") as caught:
        checkpoints.newest_valid(ignore_events)
    assert "step-00000002" in caught.value.what
