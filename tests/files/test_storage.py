"""Storage under power loss, failing disks, hostile names and URLs with secrets.

Power loss is simulated: the `os` calls of a real write are replayed into a model of a disk. The power fails after each
call; data that was not flushed is lost, kept, or kept in part.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from disk_model import Disk, Operation, Tree, crashes, recorded, tree_of, write_tree
from fsspec.implementations.memory import MemoryFileSystem

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Saved
from trillora.files import atomic
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import MARK, LocalStorage, RemoteStorage, Storage, open_storage
from trillora.secrets import without_secrets
from trillora.training.run_folder import RunFolder
from trillora.training.saver import Saver

FULL_DOSE = os.environ.get("TRILLORA_DOSE") == "full"
NUM_MIXTURES = 40 if FULL_DOSE else 4  # random mixtures of lost and kept data, in addition to the four pure cases
SOURCE = Path(__file__).parents[2] / "src"


def files_of(tag: str) -> dict[str, bytes]:
    return {"adapter_model.safetensors": (tag * 250).encode(), "state.json": f'{{"tag": "{tag}"}}'.encode()}


# Power loss


def tag_of(files: dict[str, bytes]) -> str:
    return files["state.json"].decode().split('"')[3]


def test_power_loss_after_any_operation_never_shows_a_damaged_checkpoint_nor_loses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # the disk is a model; flushing the real one takes seconds
    disk_root = tmp_path / "disk"
    disk_root.mkdir()
    checkpoints = Checkpoints(LocalStorage(disk_root / "run" / "checkpoints"))
    history: list[
        tuple[list[Operation], dict[int, set[str]], set[int]]
    ] = []  # operations, steps that must exist, steps that must not

    def do(act: Callable[[], None], during: dict[int, set[str]], after: dict[int, set[str]], gone: set[int]) -> None:
        operations: list[Operation] = []
        with recorded(disk_root, operations):
            act()
        history.extend(([operation], during, set()) for operation in operations[:-1])
        history.append((operations[-1:], after, gone))

    do(lambda: checkpoints.write(10, files_of("a")), {}, {10: {"a"}}, set())
    do(lambda: checkpoints.write(20, files_of("b")), {10: {"a"}}, {10: {"a"}, 20: {"b"}}, set())
    replaced = {10: {"a"}, 20: {"c"}}
    do(lambda: checkpoints.write(20, files_of("c")), {10: {"a"}, 20: {"b", "c"}}, replaced, set())
    do(lambda: checkpoints.write(30, files_of("d")), replaced, {**replaced, 30: {"d"}}, set())
    kept = {20: {"c"}, 30: {"d"}}
    do(lambda: checkpoints.prune(2), kept, kept, {10})
    do(lambda: checkpoints.remove_after(20), {20: {"c"}}, {20: {"c"}}, {10, 30})
    do(lambda: checkpoints.write(30, files_of("e")), {20: {"c"}}, {20: {"c"}, 30: {"e"}}, {10})

    disk, draw, seen = Disk(), random.Random(4), set()
    for number, (operations, must, gone) in enumerate(history):
        for operation in operations:
            disk.apply(operation)
        for tree in crashes(disk, draw, NUM_MIXTURES):
            state = (tuple(tree.items()), repr(must), repr(gone))
            if state not in seen:
                seen.add(state)
                check_after_crash(tree, tmp_path / "crash", must, gone, number)
    assert disk.after_crash(lambda n: n, lambda node: node.data) == tree_of(disk_root)  # every operation was recorded
    assert len(history) > 100 and len(seen) > 100


def check_after_crash(tree: Tree, root: Path, must: dict[int, set[str]], gone: set[int], number: int) -> None:
    write_tree(tree, root)
    storage = LocalStorage(root / "run" / "checkpoints")
    checkpoints = Checkpoints(storage)
    for step in checkpoints.steps():
        checkpoints.read(step)  # raises if a visible checkpoint is damaged
    checkpoints.clean()
    found = {step: tag_of(checkpoints.read(step)) for step in checkpoints.steps()}
    for step, tags in must.items():
        assert found.get(step) in tags, f"step {step} after operation {number}"
    assert not gone & set(found)
    assert hidden_in(root) == []
    shutil.rmtree(root)


def hidden_in(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if path.name.startswith(".")]


def test_power_loss_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    disk_root = tmp_path / "disk"
    disk_root.mkdir()
    history: list[tuple[Operation, set[bytes | None]]] = []
    before: bytes | None = None
    for data in (b"first" * 100, b"second" * 90):
        operations: list[Operation] = []
        with recorded(disk_root, operations):
            atomic.write_file(disk_root / "run.json", data)
        # The last but one call flushes the folder; closing it changes nothing.
        history += [(operation, {before, data}) for operation in operations[:-2]]
        history += [(operation, {data}) for operation in operations[-2:]]
        before = data
    disk, draw = Disk(), random.Random(5)
    for operation, allowed in history:
        disk.apply(operation)
        for tree in crashes(disk, draw, NUM_MIXTURES):
            assert tree.get("/run.json") in allowed
    assert len(history) > 20


# Full and failing disks

CHANGING = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


@contextmanager
def failing(at: int, code: int, *, for_good: bool, thread: str) -> Iterator[list[str]]:
    """Call number `at` of `os` in the named thread fails; with `for_good`, also every later call that writes."""
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not threading.current_thread().name.startswith(thread):
                return real(*arguments, **options)
            calls.append(name)
            is_change = name in CHANGING and not (name == "open" and not arguments[1] & os.O_CREAT)
            if len(calls) - 1 == at or (for_good and len(calls) > at and is_change):
                if name == "close":
                    real(*arguments)  # the kernel closes the file even if close fails
                raise OSError(code, os.strerror(code))
            return None if name == "fsync" else real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*CHANGING, "close", "scandir"):
            patch.setattr(os, name, wrap(name))
        yield calls


@pytest.mark.parametrize("step", [20, 30], ids=["replacing", "adding"])
def test_a_disk_that_fails_at_any_call_costs_no_good_checkpoint(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # flushing the real disk takes seconds
    template = tmp_path / "template"
    for each in (5, 10, 20):
        Checkpoints(LocalStorage(template)).write(each, files_of(f"old {each}"))
    num_failed = num_saved = 0
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def attempt(at: int, code: int, for_good: bool) -> int:
        nonlocal num_failed, num_saved
        root = tmp_path / "run"
        shutil.copytree(template, root)
        checkpoints, events = Checkpoints(LocalStorage(root)), list[Event]()
        watched = failing(at, code, for_good=for_good, thread="trillora-saver")
        with watched as calls, Saver(checkpoints, events.append) as saver:
            saver.submit(step, lambda: files_of("new"), after=lambda: checkpoints.prune(2 if step == 20 else 3))
        alarms = [event.text for event in events if isinstance(event, Alarm)]
        is_saved = any(isinstance(event, Saved) for event in events)
        assert is_saved == (saver.failure is None)
        assert tag_of(checkpoints.read(10)) == "old 10"
        for each in checkpoints.steps():
            checkpoints.read(each)
        if not for_good:  # after a single failure, the saver cleans up at once
            assert 20 in checkpoints.steps() and not [path for path in hidden_in(root) if ".making-" in path]
        if is_saved:
            assert tag_of(checkpoints.read(step)) == "new"
            num_saved += 1
        else:
            assert len(alarms) == 1 and os.strerror(code) in alarms[0] and str(root) in alarms[0]
            good = max(checkpoints.steps())
            assert "Training continues" in alarms[0] and f"newest valid checkpoint is from step {good}." in alarms[0]
            num_failed += 1
        checkpoints.clean()
        assert hidden_in(root) == []
        found = {each: tag_of(checkpoints.read(each)) for each in checkpoints.steps()}
        assert found[10] == "old 10"
        assert found[20] == "old 20" or (step == 20 and found[20] == "new")
        assert is_saved or step not in found or found[step] in ("old 20", "new")
        shutil.rmtree(root)
        return len(calls)

    num_calls = attempt(10**9, errno.EIO, False)
    assert num_saved == 1 and num_calls > 30
    codes = [errno.ENOSPC, errno.EIO, errno.EROFS]
    for at in range(num_calls):
        for number, for_good in enumerate((False, True)):
            for code in codes if FULL_DOSE else [codes[(at + number) % 3]]:
                attempt(at, code, for_good)
    assert num_failed + num_saved == 1 + num_calls * 2 * (3 if FULL_DOSE else 1)
    assert num_failed > num_calls * 0.7
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_orphan(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    thread = threading.current_thread().name
    with failing(10**9, errno.EIO, for_good=False, thread=thread) as calls:
        atomic.write_file(path, "old")
    for at in range(len(calls)):
        for code in (errno.ENOSPC, errno.EIO, errno.EROFS):
            path.write_text("old")
            with failing(at, code, for_good=False, thread=thread), pytest.raises(OSError) as caught:
                atomic.write_file(path, "new")
            assert caught.value.errno == code
            # The folder is flushed after the rename, so a failure there leaves the new file.
            assert path.read_text() == ("new" if at > calls.index("replace") else "old")
            assert hidden_in(tmp_path) == []
    with failing(2, errno.EIO, for_good=True, thread=thread), pytest.raises(OSError):
        atomic.write_file(path, "new")
    assert len(hidden_in(tmp_path)) == 1  # the failing disk could not remove it
    assert len(atomic.remove_unfinished(tmp_path)) == 1 and hidden_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder"])
def test_lines_are_appended_to_regular_files_only(tmp_path: Path, kind: str) -> None:
    """A history.jsonl that is a link must not write to another person's file, and a pipe must not block."""
    other, history = tmp_path / "other", tmp_path / "run" / "history.jsonl"
    events: list[Event] = []
    folder = RunFolder(history.parent, listener=events.append)
    if kind == "pipe":
        os.mkfifo(history)
    elif kind == "folder":
        history.mkdir()
    else:
        history.symlink_to(other)
    if kind == "link":
        other.write_text("precious\n")
    folder.add_history("started", 0)
    folder.add_history("stopped", 1)
    assert other.read_text() == "precious\n" if kind == "link" else not other.exists()
    (alarm,) = events
    assert isinstance(alarm, Alarm) and f"{history} cannot be written" in alarm.text
    history.rmdir() if kind == "folder" else history.unlink()
    folder.add_history("resumed", 1)  # nothing was lost
    assert [json.loads(line)["event"] for line in history.read_text().splitlines()] == ["started", "stopped", "resumed"]


def test_an_append_that_fails_leaves_the_file_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    atomic.append_file(path, b"one\n")
    real, num_calls = os.write, 0

    def write(descriptor: int, data: bytes) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, bytes(data)[:2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space"):
            atomic.append_file(path, b"two\n")
    assert path.read_bytes() == b"one\n"
    atomic.append_file(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_system_that_cannot_flush_folders_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic.write_file(tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").read_text() == "text"


# At a URL


@contextmanager
def failing_remote(at: int, make_error: Callable[[], BaseException], *, for_good: bool) -> Iterator[list[str]]:
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(MemoryFileSystem, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == at or (for_good and len(calls) > at):
                raise make_error()
            answer = real(*arguments, **options)
            return (
                sorted(answer, key=lambda entry: str(entry["name"])) if name == "ls" else answer
            )  # sorted, as in object stores

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "rm_file", "ls", "cat_file"):
            patch.setattr(MemoryFileSystem, name, wrap(name))
        yield calls


class Killed(BaseException):
    pass


class LibraryError(Exception):
    """Like the errors of cloud stores' libraries: not an OSError, and the URL is in the text."""


@pytest.mark.parametrize("kind", ["killed", "once", "for good"])
def test_an_interrupted_remote_write_or_removal_shows_no_damaged_checkpoint(
    memory: MemoryFileSystem, kind: str
) -> None:
    url = "memory://bucket/run?token=hidden-canary"
    error = Killed if kind == "killed" else lambda: LibraryError(f"403 at {url}")
    num_cut = 0

    def attempt(at: int) -> int:
        nonlocal num_cut
        memory.store.clear()
        memory.pipe_file("/bucket/run?token=hidden-canary/others/data.bin", b"not ours")
        checkpoints = Checkpoints(open_storage(url))
        for step in (5, 10, 20):
            checkpoints.write(step, files_of(f"old {step}"))
        with failing_remote(at, error, for_good=kind == "for good") as calls:
            try:
                checkpoints.write(20, files_of("new"))
                checkpoints.write(30, files_of("new"))
                checkpoints.prune(3)
            except Killed:
                num_cut += 1
            except OSError as caught:
                assert "LibraryError" in str(caught) and "canary" not in str(caught)
                num_cut += 1
        for step in checkpoints.steps():
            checkpoints.read(step)
        assert 10 in checkpoints.steps() and tag_of(checkpoints.read(10)) == "old 10"
        checkpoints.clean()
        for step in checkpoints.steps():
            checkpoints.read(step)
        assert {20, 30} & {*checkpoints.steps()}  # 20 also while it was being replaced
        assert not [path for path in memory.store if "/." in path]
        assert len(memory.store) == 3 * len(checkpoints.steps()) + 1  # the other file is still there
        return len(calls)

    num_calls = attempt(10**9)
    assert num_cut == 0 and num_calls >= 30
    places = range(0, num_calls, 1 if FULL_DOSE or kind == "killed" else 3)
    for at in places:
        attempt(at)
    assert len(places) * 0.7 < num_cut <= len(places)  # all except the calls that clean up after a write


def test_a_removed_checkpoint_does_not_come_back_from_an_interrupted_replacement(memory: MemoryFileSystem) -> None:
    checkpoints, storage = Checkpoints(open_storage("memory://run")), open_storage("memory://run")
    num_calls = 1
    at = 0
    while at < num_calls:
        for step in (10, 20):
            checkpoints.write(step, files_of("old"))
        with failing_remote(at, Killed, for_good=False) as calls, suppress(Killed):
            checkpoints.write(20, files_of("new"))
        storage.remove("step-00000020")
        storage.clean()
        assert checkpoints.steps() == [10] and len(memory.store) == 3
        at, num_calls = at + 1, max(num_calls, len(calls) + 1)
    assert at > 15


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_reading_returns_what_was_written(tmp_path: Path, memory: MemoryFileSystem, kind: str) -> None:
    where = {"folder": str(tmp_path / "a" / "b"), "file": f"file://{tmp_path}/a/b", "memory": "memory://a/b"}[kind]
    storage: Storage = open_storage(where)
    assert isinstance(storage, LocalStorage if kind == "folder" else RemoteStorage)
    assert storage.where == where
    assert storage.names() == [] and storage.clean() == []
    first = {"one.bin": bytes(range(256)) * 300, "empty.json": b"", MARK: b"mark"}
    storage.write("step-1", first)
    storage.write("step-2", {MARK: b"mark"})
    assert storage.names() == ["step-1", "step-2"]
    assert open_storage(where).read("step-1") == first
    storage.write("step-1", {"two.bin": b"2", MARK: b"other"})  # no file of the first is left
    assert storage.read("step-1") == {"two.bin": b"2", MARK: b"other"}
    storage.remove("step-2")
    assert storage.names() == ["step-1"] and storage.clean() == []
    with pytest.raises(FileNotFoundError):
        storage.read("step-2")
    assert [path for path in [*tmp_path.rglob("*"), *map(Path, memory.store)] if path.name.startswith(".")] == []


def test_listings_are_not_cached(tmp_path: Path) -> None:
    reader, writer = open_storage(f"file://{tmp_path}"), open_storage(f"file://{tmp_path}")
    assert reader.names() == []
    writer.write("step-1", {MARK: b"mark"})
    assert reader.names() == ["step-1"]
    assert isinstance(reader, RemoteStorage) and reader._system is not fsspec.filesystem("file")
    assert reader._system.dircache.use_listings_cache is False


def test_hidden_files_of_other_programs_are_not_part_of_a_checkpoint(tmp_path: Path, memory: MemoryFileSystem) -> None:
    for where in (str(tmp_path), f"file://{tmp_path}"):
        storage = open_storage(where)
        storage.write("step-1", {MARK: b"mark"})
        (tmp_path / "step-1" / ".DS_Store").write_bytes(b"left by a file manager")
        (tmp_path / "step-1" / ".ipynb_checkpoints").mkdir(exist_ok=True)
        assert storage.read("step-1") == {MARK: b"mark"}
        (tmp_path / "step-1" / "sub").mkdir()
        assert storage.read("step-1") == {MARK: b"mark", "sub/": b""}
        storage.remove("step-1")
        assert storage.names() == []


# URLs


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("gs://bucket/runs/a", "gs://bucket/runs/a", []),
        ("gs://bucket/me@home/a", "gs://bucket/me@home/a", []),
        ("memory://runs?token=canary-1&x=canary-2", "memory://runs", ["canary-1", "canary-2"]),
        ("memory://me:canary-1@host/runs", "memory://host/runs", ["canary-1"]),
        ("memory://canary-1@host/runs", "memory://host/runs", ["canary-1"]),
        ("memory://me:canary-1@canary-2@host/runs", "memory://host/runs", ["canary-1", "canary-2"]),
        ("memory://me:canary-1/canary-2@host/runs", "memory://host/runs", ["canary-1", "canary-2"]),
        ("memory://me:canary-1?canary-2#canary-3@host/runs", "memory://host/runs", ["canary-1", "canary-2"]),
        ("memory://host/runs#canary-1", "memory://host/runs", ["canary-1"]),
        ("memory://host/runs?sig=canary%2D1", "memory://host/runs", ["canary-1", "canary%2D1"]),
        ("unknown://me:canary-1@host/runs?t=canary-2", "unknown://host/runs", ["canary-1", "canary-2"]),
        ("simplecache::memory://me:canary-1@host/runs", "memory://host/runs", ["canary-1"]),
        ("zip://a.b/c.zip::memory://me:canary-1@host/runs", "zip://a.b/c.zip", ["canary-1"]),
        ("memory://[canary-1@", "memory://", ["canary-1"]),
    ],
)
def test_secrets_of_a_url_are_never_shown(
    url: str, shown: str, secrets: list[str], memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown_texts = []
    try:
        storage = open_storage(url)
        shown_texts.append(storage.where)
        with failing_remote(0, lambda: LibraryError(f"PUT {url} {' '.join(secrets)}"), for_good=True):
            for act in (storage.names, lambda: storage.write("a", {MARK: b""}), lambda: storage.read("a")):
                with pytest.raises(OSError) as caught:
                    act()
                shown_texts.append(str(caught.value))
    except TrilloraError as error:
        shown_texts.append(str(error))
        assert error.where == shown
    else:
        assert storage.where == shown
    assert shown_texts and not [text for text in shown_texts for secret in secrets if secret in text]


def test_a_path_that_is_not_a_url_is_shown_unchanged() -> None:
    for path in ("data/part-?.jsonl", "owner/name@main", "C#/train.jsonl", ""):
        assert without_secrets(path) == path


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "gs", raising=False)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    with pytest.raises(TrilloraError) as caught:
        open_storage("gs://bucket/runs")
    assert "gcsfs" in caught.value.what and caught.value.do == "pip install gcsfs"
    assert caught.value.where == "gs://bucket/runs"


def test_an_unknown_scheme_or_a_url_without_a_folder_is_refused() -> None:
    with pytest.raises(TrilloraError, match="memry://") as caught:
        open_storage("memry://runs")
    assert "memory://" in caught.value.do
    with pytest.raises(TrilloraError, match="names no folder"):
        open_storage("memory://")


# Names


def hostile_names() -> list[str]:
    fixed = ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\n", "a\0b", ".hidden", "~", "a b", "é", "a:b", "x" * 129]
    fixed += [
        "step-1\n",
        "%2e%2e",
        "..%2f",
        "C:",
        "CON:",
        "a\u202eb",
        "\uff0e\uff0e",
        "-/../x",
        "a*",
        "a?",
        "a[",
        "a#b",
    ]
    draw = random.Random(8)
    letters = "./\\~\0\n %:*?#@ aA0é-_"
    return fixed + ["".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(5_000 if FULL_DOSE else 400)]


def test_no_name_leads_out_of_the_folder(tmp_path: Path, memory: MemoryFileSystem) -> None:
    inside = tmp_path / "inside"
    num_refused = num_accepted = 0
    for storage in (open_storage(inside), open_storage(f"file://{inside}"), open_storage("memory://top/inside")):
        for name in hostile_names():
            acts: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
                (storage.write, (name, {MARK: b"x"})),
                (storage.read, (name,)),
                (storage.remove, (name,)),
                (storage.write, ("good", {name: b"x", MARK: b"x"})),
            ]
            for act, arguments in acts:
                try:
                    act(*arguments)
                    num_accepted += 1
                    assert set(name) <= set("aA0-_.") and not name.startswith(".")
                except TrilloraError as error:
                    assert "cannot be the name" in error.what
                    num_refused += 1
        with suppress(FileNotFoundError):
            storage.remove("good")
    assert num_refused > 4_000 and num_accepted > 20
    assert list(tmp_path.iterdir()) == [inside] and list(inside.iterdir()) == []
    assert not memory.store


def test_a_link_in_place_of_a_checkpoint_is_never_written_through(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root.mkdir()
    (root / "step-1").symlink_to(outside)
    (root / ".removing-step-2").symlink_to(outside)
    storage = open_storage(root)
    assert storage.names() == ["step-1"]
    assert storage.clean() == [".removing-step-2"]
    storage.write("step-1", {MARK: b"mark"})
    storage.remove("step-1")
    assert (outside / "precious").exists() and list(root.iterdir()) == []


def test_these_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, trillora.training.saver, trillora.files.owner\n"
        "print({'jax', 'torch', 'numpy', 'fsspec', 'pydantic', 'psutil', 'trillora.recipe.load'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
