"""Missing, full and read-only folders, and a locale without UTF-8: a run works, or the error says what to set."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dose import dose
from typer.testing import CliRunner

import trillora
from trillora import doctor
from trillora.cli import app, errors
from trillora.cli.output import only_progress
from trillora.data.tokenizing import store as store_module
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import ROW, StoreWriter, locked_store, open_store
from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Note, Progress
from trillora.files import atomic, hub
from trillora.files.cache_dir import CacheUnwritable, cache_root, with_cache, writing_cache
from trillora.model.loading import embedded


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A path below a file: no folder can be created there, not even by root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


# The cache


def write_store(folder: Path) -> None:
    writer = StoreWriter(folder)
    try:
        document = TokenizedDocument(np.array([5, 6, 7], np.int32), np.array([False, False, True]))
        writer.add([document], np.zeros(1, ROW))
        writer.finish({"names": [[0, ""]], "files": [], "problems": [], "num_problems": 0})
    finally:
        writer.discard()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every file of a store is on a device that is full."""
    monkeypatch.setattr(store_module, "open", lambda name, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
    yield


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CacheUnwritable) as caught:
        write_store(tmp_path / "store")
    assert "No space left on device" in caught.value.what and "TRILLORA_CACHE" in caught.value.do
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from trillora.files.atomic import new_folder
with new_folder(Path(sys.argv[1])) as making:
    (making / "weights").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_export_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    source = str(Path(trillora.__file__).parents[1])
    target, elsewhere = tmp_path / "merged", f".merged.making-{2**22 + 1}-1-0123abcd"
    subprocess.run([sys.executable, "-c", KILLED, str(target)], env={**os.environ, "PYTHONPATH": source})
    [left] = os.listdir(tmp_path)
    kept = {f".merged.making-{os.getppid()}-1-{left[-8:]}", elsewhere, ".merged.making-1", f".other{left[7:]}"}
    for name in (*kept, ".merged.making-1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("")
    for path in (tmp_path / ".merged.making-1-2" / "weights", tmp_path / ".merged.making-1-2"):
        os.utime(path, (1e9, 1e9))  # years ago, by an older version
    (tmp_path / f"{left[:-8]}00000000").symlink_to(tmp_path / "other")
    with atomic.new_folder(target) as making:
        assert making.name.endswith(left[-8:])
        assert {*os.listdir(tmp_path)} == {*kept, making.name, f"{left[:-8]}00000000"}
    assert target.is_dir()


def test_a_cache_that_cannot_be_created_is_replaced_by_a_temporary_one(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(nowhere))
    said: list[str] = []

    def work(cache: Path) -> Path:
        with locked_store(cache / "data" / "abc"):
            write_store(cache / "data" / "abc")
        return cache

    cache = with_cache(work, said.append)
    assert cache != nowhere and open_store(cache / "data" / "abc", ["a"]) is not None
    assert len(said) == 1 and str(nowhere) in said[0] and "TRILLORA_CACHE" in said[0]
    assert with_cache(work, said.append) == cache  # the next use finds what the first one wrote


def test_a_store_in_a_read_only_cache_is_used_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "abc"
    folder.parent.mkdir()
    write_store(folder)
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(store_module.filelock.FileLock, "acquire", lambda self: (_ for _ in ()).throw(read_only))
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(read_only))
    with locked_store(folder):
        assert open_store(folder, ["a"]) is not None
    with pytest.raises(CacheUnwritable, match="Read-only"), locked_store(tmp_path / "data" / "other"):
        pass


def test_the_lock_of_a_store_is_released(tmp_path: Path) -> None:
    for _ in range(2):
        with locked_store(tmp_path / "data" / "abc"):
            lock = store_module.filelock.FileLock(tmp_path / "data" / "abc.lock", timeout=0)
            with pytest.raises(store_module.filelock.Timeout):
                lock.acquire()


def test_every_command_shows_that_the_cache_is_not_used() -> None:
    shown: list[Event] = []
    listen = only_progress(shown.append)  # of `trillora inspect`
    for event in (Note("a"), Alarm("b"), Progress("c", 1, 2, "rows")):
        listen(event)
    assert shown == [Alarm("b"), Progress("c", 1, 2, "rows")]


def test_errors_of_libraries_are_not_called_a_full_cache(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such tokenizer"), writing_cache(tmp_path):
        raise OSError("no such tokenizer")


def test_the_embedded_model_works_with_a_home_that_cannot_be_written(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRILLORA_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setattr(embedded, "find_gguf", lambda: (Path("model.gguf"), "0"))
    monkeypatch.setattr(embedded, "_convert", lambda _, folder: (folder / "config.json").write_text("{}"))
    said: list[str] = []
    folder = embedded.smollm2_folder(said.append)
    assert (folder / "config.json").read_text() == "{}"
    assert embedded.smollm2_folder(said.append) == folder
    assert sum("Converting" in text for text in said) == 1 and "TRILLORA_CACHE" in said[0]


# Folders of the environment


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without HOME and without an entry in the system's list of users."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("TRILLORA_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid not found")))


def test_without_a_home_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    no_home(monkeypatch)
    with pytest.raises(TrilloraError) as caught:
        cache_root()
    assert caught.value.where == "HOME" and "export HOME=" in caught.value.do
    monkeypatch.setenv("TRILLORA_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.setenv("TRILLORA_CACHE", "~/somewhere")
    with pytest.raises(TrilloraError):
        cache_root()


def test_without_a_home_nothing_is_downloaded_into_a_folder_called_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(TrilloraError, match="home folder is not known"):
        hub.download("a/b", "model", revision=None, allow=["*"])


def test_a_download_that_cannot_be_kept_is_not_blamed_on_the_connection(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def snapshot_download(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(nowhere))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(TrilloraError) as caught:
        hub.download("a/b", "model", revision=None, allow=["*"])
    assert "No space left" in caught.value.what and "HF_HOME" in caught.value.do
    assert caught.value.where == str(nowhere)


def test_the_doctor_finds_folders_that_cannot_be_written(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("TRILLORA_CACHE", str(nowhere))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(nowhere))
    monkeypatch.setenv("TMPDIR", str(nowhere))
    monkeypatch.setattr(tempfile, "tempdir", None)
    findings = {finding.name: finding for finding in doctor._folders()}
    assert {name: finding.state for name, finding in findings.items()} == dict.fromkeys(
        ("cache", "downloads", "temporary files"), "warning"
    )
    assert "TRILLORA_CACHE" in findings["cache"].do and "HF_HOME" in findings["downloads"].do
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(nowhere)])
    assert doctor._temporary_files().state == "broken"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    no_home(monkeypatch)
    assert [f.state for f in doctor._folders() if f.name == "cache"] == ["broken"]
    assert doctor._free_disk() > 0


def test_healthy_folders_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TMPDIR", raising=False)
    assert {f.name: f.state for f in doctor._folders() if f.name != "downloads"} == {
        "cache": "ok",
        "temporary files": "ok",
    }
    assert list(tmp_path.iterdir()) == []  # the trial leaves nothing, not even the folder


# Locale


def run(*arguments: str | bytes, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "trillora", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(Path(trillora.__file__).parent.parent), **environment}
    return subprocess.run(command, capture_output=True, check=False, cwd=cwd, env=variables)


def test_a_locale_without_utf8_says_what_to_set(tmp_path: Path) -> None:
    folder = tmp_path / "RÜN"
    folder.mkdir()
    (folder / "r.yaml").write_text("model: smollm2\ndata: a.jsonl\n")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments, cwd in (
        (["inspect", "r.yaml"], folder),
        (["report", "RÜN"], tmp_path),
        (["generate", "m", "-p", b"\xff"], tmp_path),
    ):
        result = run(*arguments, cwd=cwd, **ascii_only)
        assert result.returncode == 2, result
        assert b"is not valid ascii text" in result.stderr and b"set PYTHONUTF8=1" in result.stderr
    assert run("schema", cwd=folder, **ascii_only).returncode == 0


def test_the_path_of_a_report_is_printed_in_any_encoding(tmp_path: Path) -> None:
    folder = tmp_path / "RÜN"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    result = run("report", str(folder), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result
    assert result.stdout.strip().endswith(b"R\\xdcN/report.html")


def test_a_deleted_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = OSError(errno.ENOENT, "No such file or directory")
    monkeypatch.setattr(errors.os, "getcwd", lambda: (_ for _ in ()).throw(gone))
    result = CliRunner().invoke(app, ["report", "x"])
    assert (result.exit_code, result.output.splitlines()[0]) == (
        2,
        "The current folder cannot be used: No such file or directory.",
    )


# Any command line

TEXTS = [
    *("", " ", "a", "-", "--", "---", "=", "a=", "=b", "train.steps=5", "train.steps=nan", "data=x.jsonl", "data=["),
    *("~", "~none/x", "\0", "a\0b", "\udcff", "\ud800x", "\x1b]0;owned\x07", "\u202eevil", "[bold]x[/bold]", "ü"),
    *("1", "-1", "0", "nan", "inf", "-inf", "1e999", "9" * 5000, "0x10", "1_0", "\u0663", "1.5", "true", "a" * 5000),
    *("/", "/dev/null", "/proc/self/mem", ".", "..", "s3://k:hunter2x@b", "file:///", "http://127.0.0.1:9/x", "%s"),
    *("{}", "{0}", "../" * 900, "你好", "👩\u200d🚀"),
    *("model={a: {b: [", "!!python/object:os.system x", "&a [*a]", "v5e-8", "v5e-8,,", "smollm2x", "\r\n", "\t", "\n"),
]
OPTIONS = [
    *("--out", "-o", "--json", "--accept-changes", "--on", "--estimate", "--whole", "--price", "--fresh", "--html"),
    *("--stage", "--prompt", "-p", "--max-tokens", "--temperature", "--top-p", "--seed", "--base", "--data", "--rows"),
    *("--no-base", "--traceback", "--help", "-h", "--version", "--nonsense", "-x"),
]
VERBS = "train preflight inspect generate chat eval quickstart report schema doctor nope".split()  # noqa: SIM905
DOCUMENTED = {0, 1, 2, 75, 76, 130}
LETTERS = "ab-=.~/\0\x1b\u202e\u2066\udc80ü[]{}:#&*!|>'\"%@`,0159\n\t\r\x7f\x9b"


def hostile_word(rng: random.Random) -> str:
    match rng.randrange(4):
        case 0:
            return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 12)))
        case 1:
            return rng.choice(["train.steps", "data", "model", "lora.rank", "stages"]) + "=" + hostile_word(rng)
        case 2:
            return rng.choice(OPTIONS) + rng.choice(["", "="]) + rng.choice(TEXTS)
    return rng.choice(TEXTS)


def command_line(rng: random.Random, recipes: list[str]) -> list[str]:
    words = [rng.choice(VERBS)] if rng.random() < 0.9 else []
    if rng.random() < 0.6:
        words.append(rng.choice(recipes))
    for _ in range(rng.randrange(6)):
        words.append(rng.choice(OPTIONS) if rng.random() < 0.5 else hostile_word(rng))
    if rng.random() < 0.2:
        rng.shuffle(words)
    return words


def refuse(*_: Any, **__: Any) -> Any:
    raise TrilloraError("the work of the command starts here", do="nothing")


@pytest.fixture
def commands_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands call raises an error, so that only the command line itself is tried."""
    for name, contents in {
        "trillora.training.trainer": {"train": refuse},
        "trillora.preflight.verdict": {"preflight": refuse},
        "trillora.data.summary": {"inspect": refuse},
        "trillora.evaluation.evaluate": {"evaluate": refuse},
        "trillora.quickstart.run": {"run": refuse},
        "trillora.generation.generator": {"Generator": SimpleNamespace(open=refuse)},
        "trillora.generation.chat": {"converse": refuse},
        "trillora.engine.sampling": {"Sampling": refuse},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, child = name.rpartition(".")
        __import__(package)
        monkeypatch.setattr(sys.modules[package], child, module, raising=False)
    monkeypatch.setattr(doctor, "this_machine", refuse)


@pytest.mark.usefixtures("commands_without_work")
def test_no_command_line_finds_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = {
        "good.yaml": "model: smollm2\ndata: a.jsonl\n",
        "empty.yaml": "",
        "bad.yaml": "model: [\n",
        "odd.yaml": 'model: smollm2\ndata: a.jsonl\ntrain: {steps: "\\e]0;owned\\a\\u202e"}\n',
    }
    for name, text in recipes.items():
        Path(name).write_text(text)
    rng = random.Random(13)
    seen: dict[int, int] = {}
    for _ in range(dose(120, 5_000)):
        words = command_line(rng, [*recipes, ".", "missing"])
        result = CliRunner().invoke(app, words, prog_name="trillora", input="hi\n")
        assert result.exit_code in DOCUMENTED, (words, result.output, result.exception)
        assert isinstance(result.exception, SystemExit | None), (words, result.exception)
        bad = [c for c in result.output if c not in "\n\t\u200c\u200d" and not c.isprintable()]
        assert bad == [], (words, bad)
        assert "hunter2x" not in result.output
        assert "Traceback" not in result.output or any(word.startswith("--traceback") for word in words)
        seen[result.exit_code] = seen.get(result.exit_code, 0) + 1
    assert seen[0] > 2 and seen[2] > 50
    assert {path.name for path in tmp_path.iterdir()} == set(recipes)  # nothing was written
