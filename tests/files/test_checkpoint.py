"""Checkpoints: damage is detected, a kill leaves nothing incomplete visible, background saves report their result."""

from __future__ import annotations

import json
import os
import random
import shutil
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

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Saved, ignore_events
from trillora.files import storage as storage_module
from trillora.files.checkpoints import Checkpoints, Damaged
from trillora.files.storage import MARK, LocalStorage, open_storage
from trillora.training.saver import Saver

FULL_DOSE = os.environ.get("TRILLORA_DOSE") == "full"
SOURCE = Path(__file__).parents[2] / "src"
FILES = ["adapter_model.safetensors", "adapter_config.json", "state.safetensors", "state.json", "metrics.jsonl"]


def files_of(draw: random.Random) -> dict[str, bytes]:
    return {name: draw.randbytes(draw.randint(200, 3000)) for name in FILES}


@pytest.fixture(params=["folder", "url"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoints:
    """Steps 10, 20 and 30 in tmp_path, seen as a folder or through fsspec."""
    made = Checkpoints(open_storage(tmp_path if request.param == "folder" else f"file://{tmp_path}"))
    draw = random.Random(3)
    for step in (10, 20, 30):
        made.write(step, files_of(draw))
    return made


def paths_of(root: Path, step: int) -> list[Path]:
    found = sorted((root / f"step-{step:08d}").iterdir())
    assert len(found) == len(FILES) + 1
    return found


def check_noticed(checkpoints: Checkpoints, names: set[str], expected: dict[str, bytes], *, to: int = 20) -> None:
    """Every damaged checkpoint is reported with one of the names, and the one before them is used."""
    events: list[Event] = []
    found = checkpoints.newest_valid(events.append)
    assert found == (to, expected)
    assert len(events) == (30 - to) // 10
    for event in events:
        assert isinstance(event, Alarm)
        assert "is damaged" in event.text and any(name in event.text for name in names)
    with pytest.raises(Damaged) as caught:
        checkpoints.read(30)
    assert caught.value.file in names and caught.value.file in str(caught.value)


# Damage


@contextmanager
def restored(*paths: Path) -> Iterator[None]:
    before = {path: path.read_bytes() for path in paths}
    yield
    for path, data in before.items():
        path.write_bytes(data)


def test_every_flipped_bit_is_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draw, good, hit = random.Random(31), checkpoints.read(20), set()
    for number in range(1000 if FULL_DOSE else 100):
        path = paths_of(tmp_path, 30)[number % (len(FILES) + 1)]
        with restored(path):
            data = bytearray(path.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            check_noticed(checkpoints, {path.name}, good)
        hit.add(path.name)
    assert hit == {*FILES, MARK}
    assert checkpoints.newest_valid(ignore_events) == (30, checkpoints.read(30))


def test_every_bit_of_the_checksums_counts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "step-00000030" / MARK
    whole = path.read_bytes()
    for place in range(0, len(whole), 1 if FULL_DOSE else 41):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(Damaged) as caught:
                checkpoints.read(30)
            assert caught.value.file == MARK
    # The same facts in another formatting are damage too.
    same = [whole.rstrip(), whole + b" ", whole.replace(b"\n ", b"\n\t", 1), whole.replace(b"{", b'{"step": 30,', 1)]
    for other in same:
        assert json.loads(other) == json.loads(whole)
        path.write_bytes(other)
        with pytest.raises(Damaged):
            checkpoints.read(30)


def test_every_truncation_is_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draw, good = random.Random(32), checkpoints.read(20)
    for number in range(200 if FULL_DOSE else 20):
        path = paths_of(tmp_path, 30)[number % (len(FILES) + 1)]
        with restored(path):
            size = path.stat().st_size
            os.truncate(path, draw.choice([0, size - 1, draw.randrange(size)]))
            check_noticed(checkpoints, {path.name}, good)


def test_deleted_added_and_swapped_files_are_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    draw, good = random.Random(33), checkpoints.read(20)
    num_kinds = dict.fromkeys(("deleted", "within", "between", "added"), 0)
    for number in range(52 if FULL_DOSE else 12):
        kind = list(num_kinds)[number % 4]
        path = draw.choice(paths_of(tmp_path, 30))
        with restored(*paths_of(tmp_path, 30), *paths_of(tmp_path, 10)):
            names = {path.name}
            if kind == "deleted":
                path.unlink()
            elif kind == "added":
                names = {draw.choice(["aaa.json", "zzz.bin", "state.json.bak"])}
                (path.parent / next(iter(names))).write_bytes(b"x")
            else:
                step = 30 if kind == "within" else 10
                other = draw.choice([each for each in paths_of(tmp_path, step) if each != path])
                one, two = path.read_bytes(), other.read_bytes()
                path.write_bytes(two)
                other.write_bytes(one)
                names |= {other.name, MARK}
            check_noticed(checkpoints, names, good)
        num_kinds[kind] += 1
        for extra in {*paths_and_more(tmp_path, 30)} - {*FILES, MARK}:
            (tmp_path / "step-00000030" / extra).unlink()
    assert min(num_kinds.values()) >= 3


def paths_and_more(root: Path, step: int) -> list[str]:
    return [path.name for path in (root / f"step-{step:08d}").iterdir()]


def test_whole_checkpoints_under_each_others_names_are_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    good = checkpoints.read(10)
    (tmp_path / "step-00000020").rename(tmp_path / "moved")
    (tmp_path / "step-00000030").rename(tmp_path / "step-00000020")
    (tmp_path / "moved").rename(tmp_path / "step-00000030")
    check_noticed(checkpoints, {MARK}, good, to=10)


def test_no_valid_checkpoint_gives_none_and_an_alarm_for_each(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step-{step:08d}" / "state.json").write_bytes(b"")
    events: list[Event] = []
    assert checkpoints.newest_valid(events.append) is None
    assert [isinstance(event, Alarm) and "state.json has 0 bytes" in event.text for event in events] == [True] * 3


def test_hostile_checksums_are_reported_as_damage(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from trillora.files.checksums import seal

    path = tmp_path / "step-00000030" / MARK
    sums = {"sha256": "0" * 64, "size": 1}
    bodies = [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100_000, b'{"format": 1e999}', b"9" * 10_000]
    strange: list[Any] = [None, [], {"a": 1}, {"a": {"size": 1}}]
    bodies += [seal({"format": 1, "step": 30, "files": files}) for files in strange]
    bodies += [seal({"format": 1, "step": "30", "files": {}}), seal({"format": 1, "files": {"a": sums}})]
    bodies += [seal({"format": 1, "step": 30, "files": {"../../x": sums}})]
    for body in bodies:
        path.write_bytes(body)
        with pytest.raises(Damaged):
            checkpoints.read(30)


def test_a_checkpoint_of_a_later_version_is_an_error_and_not_skipped(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from trillora.files.checksums import seal

    (tmp_path / "step-00000030" / MARK).write_bytes(seal({"format": 2, "step": 30, "novel": []}))
    with pytest.raises(TrilloraError, match="has format 2") as caught:
        checkpoints.newest_valid(ignore_events)
    assert not isinstance(caught.value, Damaged)


def test_a_bad_sector_is_damage_and_no_permission_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(LocalStorage(tmp_path))
    for step in (10, 20):
        checkpoints.write(step, files_of(random.Random(step)))
    real, code = storage_module.read_whole, 5

    def read_whole(path: Path) -> bytes:
        if path.parent.name == "step-00000020" and path.name == "state.json":
            raise OSError(code, os.strerror(code))  # like read(2): without the file name
        return real(path)

    monkeypatch.setattr(storage_module, "read_whole", read_whole)
    events: list[Event] = []
    found = checkpoints.newest_valid(events.append)
    assert found is not None and found[0] == 10
    assert isinstance(events[0], Alarm) and "step-00000020/state.json cannot be read" in events[0].text
    code = 13
    with pytest.raises(TrilloraError, match="Permission denied"):
        checkpoints.newest_valid(ignore_events)


# The set of checkpoints


def test_pruning_keeps_the_newest(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (40, 50, 123456789):
        checkpoints.write(step, {"state.json": b"{}"})
    (tmp_path / "step-40").mkdir()  # not in our format
    (tmp_path / "step-000000050").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoints.steps() == [10, 20, 30, 40, 50, 123456789]
    checkpoints.prune(3)
    assert checkpoints.steps() == [40, 50, 123456789]
    checkpoints.prune(5)
    assert checkpoints.steps() == [40, 50, 123456789]
    checkpoints.remove_after(40)
    assert checkpoints.steps() == [40]
    with pytest.raises(ValueError):
        checkpoints.prune(0)
    assert (tmp_path / "notes").exists()
    with pytest.raises(TrilloraError, match="no checkpoint of step 30") as caught:
        checkpoints.read(30)
    assert "40" in caught.value.do


def test_the_checksums_are_last_and_readable(tmp_path: Path) -> None:
    checkpoints = Checkpoints(LocalStorage(tmp_path))
    checkpoints.write(7, {"zzz.bin": b"abc"})
    assert checkpoints.read(7) == {"zzz.bin": b"abc"}
    facts = json.loads((tmp_path / "step-00000007" / MARK).read_text())
    assert (facts["format"], facts["step"], facts["files"]["zzz.bin"]["size"]) == (1, 7, 3)
    with pytest.raises(ValueError):
        checkpoints.write(7, {MARK: b""})


# kill -9

WRITER = """
import random, sys
sys.path.insert(0, sys.argv[1])
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import open_storage
checkpoints = Checkpoints(open_storage(sys.argv[2]))
checkpoints.clean()
step = max(checkpoints.steps(), default=0)
print("ready", flush=True)
while True:
    step += random.randint(0, 1)  # 0 replaces the last checkpoint
    files = {name: random.randbytes(random.choice([10, 100_000])) for name in ("adapter", "state", "metrics")}
    checkpoints.write(step, files)
    print(step, flush=True)
    checkpoints.prune(3)
"""


@pytest.mark.parametrize(("kind", "num_kills"), [("folder", 200 if FULL_DOSE else 20), ("url", 50 if FULL_DOSE else 4)])
def test_a_kill_at_any_instant_shows_nothing_damaged(tmp_path: Path, kind: str, num_kills: int) -> None:
    root = tmp_path / "checkpoints"
    where = str(root) if kind == "folder" else f"file://{root}"
    checkpoints, draw = Checkpoints(open_storage(where)), random.Random(9)
    options = ["-S"] if kind == "folder" else []  # Python starts faster without site-packages, but fsspec needs them
    num_unfinished = newest = 0
    for _ in range(num_kills):
        command = [sys.executable, *options, "-c", WRITER, str(SOURCE), where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            saved = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        newest = max([newest, *saved])
        steps = checkpoints.steps()
        for step in steps:
            checkpoints.read(step)  # raises if a visible checkpoint is damaged
        assert steps or newest <= 1  # the only checkpoint is hidden while it is replaced; `clean` restores it
        num_unfinished += bool(checkpoints.clean())
        steps = checkpoints.steps()
        assert not newest or max(steps) >= newest
        assert not list(root.rglob(".*"))
        for step in steps:
            checkpoints.read(step)
    assert num_unfinished >= num_kills // 8  # the kills did hit writes
    shutil.rmtree(root)


# Saving in the background


def test_saving_runs_in_the_background(tmp_path: Path) -> None:
    events: list[Event] = []
    order: list[str] = []
    may_continue = threading.Event()

    def make_files() -> dict[str, bytes]:
        assert threading.current_thread() is not threading.main_thread()
        may_continue.wait(10)
        order.append("made")
        return {"state.json": b"{}"}

    checkpoints = Checkpoints(LocalStorage(tmp_path))
    with Saver(checkpoints, events.append) as saver:
        assert not saver.busy and saver.seconds is None
        saver.submit(5, make_files, after=lambda: order.append(f"after {checkpoints.steps()}"))
        assert saver.busy and saver.seconds is None
        may_continue.set()
        saver.submit(6, make_files)  # waits for the first
        assert order[:2] == ["made", "after [5]"]
    assert checkpoints.steps() == [5, 6] and not saver.busy and saver.seconds is not None
    assert saver.seconds is not None and 0 < saver.seconds < 10
    assert [(event.step, event.where) for event in events if isinstance(event, Saved)] == [
        (5, str(tmp_path / "step-00000005")),
        (6, str(tmp_path / "step-00000006")),
    ]


def failing_with(error: BaseException) -> Callable[[], Any]:
    def make_files() -> None:
        raise error

    return make_files


def test_a_failed_save_is_an_alarm_and_a_later_save_clears_it(tmp_path: Path) -> None:
    events: list[Event] = []
    checkpoints = Checkpoints(LocalStorage(tmp_path / "run"))
    saver = Saver(checkpoints, events.append)
    (tmp_path / "run").write_text("a file where the folder should be")
    saver.submit(5, lambda: {"state.json": b"{}"}, after=lambda: pytest.fail("nothing was saved"))
    saver.wait()
    assert isinstance(saver.failure, OSError) and saver.seconds is None
    (tmp_path / "run").unlink()
    saver.submit(6, failing_with(OSError(28, "No space left on device")))
    saver.wait()
    assert "no valid checkpoint yet" in event_text(events[-1]) and "No space left" in event_text(events[-1])
    saver.submit(7, lambda: {"state.json": b"{}"}, after=failing_with(OSError(30, "Read-only file system")))
    saver.wait()
    assert saver.failure is None and checkpoints.steps()[-1] == 7
    assert [type(event) for event in events] == [Alarm, Alarm, Saved, Alarm]
    assert "step 7 is saved" in event_text(events[-1])


def event_text(event: Event) -> str:
    assert isinstance(event, Alarm)
    return event.text


def test_any_other_error_reaches_the_trainer_once(tmp_path: Path) -> None:
    saver = Saver(Checkpoints(LocalStorage(tmp_path)), ignore_events)
    saver.submit(1, failing_with(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        saver.wait()
    saver.wait()
    saver.submit(2, failing_with(KeyError("again")))
    with pytest.raises(KeyError):
        saver.submit(3, lambda: {"state.json": b""})
    with pytest.raises(ValueError, match="first"), saver:
        saver.submit(4, failing_with(RuntimeError("second")))
        raise ValueError("first")
    with (
        pytest.raises(TrilloraError, match="cannot be the name"),
        Saver(Checkpoints(LocalStorage(tmp_path)), ignore_events) as saver,
    ):
        saver.submit(5, lambda: {"../state.json": b""})
    assert not list(tmp_path.rglob("*state.json"))


def test_a_listener_whose_terminal_is_closed_is_not_a_disk_failure(tmp_path: Path) -> None:
    def listener(event: Event) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    saver = Saver(Checkpoints(LocalStorage(tmp_path)), listener)
    saver.submit(1, lambda: {"state.json": b""})
    with pytest.raises(BrokenPipeError):
        saver.wait()
    assert saver.failure is None and saver.seconds is not None
