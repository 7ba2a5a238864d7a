"""Trackers: event files read by TensorBoard's own reader, and services through their real libraries."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tracked_files import needs_tensorboard, scalars

from trillora.errors import TrilloraError
from trillora.events import Alarm, Evaluated, Event, Note, Step, ignore_events
from trillora.secrets import MASK
from trillora.tracking import tracking_listener
from trillora.tracking.services import open_tracker
from trillora.tracking.tensorboard import EventFile, crc32c, masked_crc32c

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
needs_trackio = pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
SOURCE = Path(__file__).parents[2] / "src"


def step(number: int, loss: float = 1.0) -> Step:
    return Step(number, 10, "chat", loss, 1e-3, 0.5, False, 1234.0, 1.0, 9.0, 0.1)


def evaluated(number: int, loss: float = 2.0) -> Evaluated:
    return Evaluated(number, "chat", loss, math.exp(loss), 0.25, 100, True)


@pytest.mark.parametrize(
    ("data", "checksum"),
    [  # RFC 3720, appendix B.4; the last is the check value of the CRC catalogue
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum
    rotated = int(f"{checksum:032b}"[-15:] + f"{checksum:032b}"[:-15], 2)
    assert masked_crc32c(data) == (rotated + 0xA282EAD8) % 2**32


def records(file: Path) -> Iterator[bytes]:
    """An independent TFRecord reader."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        yield data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked_crc32c(data[12 : 12 + length]),)
        data = data[16 + length :]


def test_event_bytes_follow_the_format(tmp_path: Path) -> None:
    events = EventFile(tmp_path, 300)
    events.scalar("a/b", 300, 0.5)
    events.close()
    version, start, point = records(events.path)
    assert version[0] == 0x09 and version[9:] == b"\x10\x00\x1a\x0dbrain.Event:2"  # time; step 0; file_version
    assert start[9:] == b"\x10\xac\x02\x3a\x02\x08\x01"  # step 300; session_log { status: START }
    # step 300; summary { value { tag: "a/b" simple_value: 0.5 } }
    assert point[9:] == b"\x10\xac\x02\x2a\x0c\x0a\x0a\x0a\x03a/b\x15\x00\x00\x00\x3f"


@needs_tensorboard
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    events = EventFile(tmp_path, 1)
    expected = [(number, 1 / number) for number in range(1, 200)]
    for number, value in expected:
        events.scalar("train/loss", number, value)
    events.scalar("ümlaut/größe", 2**40, -1e300)
    events.close()
    read = scalars(tmp_path)
    assert read["train/loss"] == [(number, pytest.approx(value, rel=1e-6)) for number, value in expected]  # 32 bits
    assert read["ümlaut/größe"] == [(2**40, -math.inf)]


@needs_tensorboard
@pytest.mark.parametrize("values", [(math.nan,), (math.inf,)])
def test_tensorboard_sees_that_a_loss_was_not_finite(tmp_path: Path, values: tuple[float]) -> None:
    with tracking_listener(tmp_path, 1, (), "trillora", {}, ignore_events) as listener:
        listener(step(1, values[0]))
    assert str(scalars(tmp_path / "tensorboard")["train/loss"][0][1]) == str(values[0])


@needs_tensorboard
def test_trackers_get_the_chosen_steps_and_every_evaluation(tmp_path: Path) -> None:
    with tracking_listener(tmp_path, 1, (), "trillora", {}, ignore_events, every_steps=5) as listener:
        for number in range(1, 13):
            listener(step(number))
        listener(evaluated(12))
    read = scalars(tmp_path / "tensorboard")
    assert [number for number, _ in read["train/loss"]] == [5, 10]
    assert [number for number, _ in read["eval/loss"]] == [12]


@needs_tensorboard
def test_a_resumed_run_replaces_what_was_trained_again(tmp_path: Path) -> None:
    for first, last in ((1, 8), (6, 10), (4, 9)):  # killed at 8 with a checkpoint at 5; then resumed from 3
        with tracking_listener(tmp_path, first, (), "trillora", {}, ignore_events) as listener:
            if first == 1:
                listener(evaluated(0))
            for number in range(first, last + 1):
                listener(step(number, loss=100 * first + number))
    read = scalars(tmp_path / "tensorboard")
    assert read["train/loss"] == [(n, 100.0 + n) for n in (1, 2, 3)] + [(n, 400.0 + n) for n in range(4, 10)]
    assert read["eval/loss"] == [(0, 2.0)]


@needs_tensorboard
def test_a_restarted_run_replaces_the_evaluation_of_the_base(tmp_path: Path) -> None:
    for loss in (2.0, 3.0):
        with tracking_listener(tmp_path, 1, (), "trillora", {}, ignore_events) as listener:
            listener(evaluated(0, loss))
    assert scalars(tmp_path / "tensorboard")["eval/loss"] == [(0, 3.0)]


def test_files_of_later_processes_sort_later_even_if_the_clock_went_back(tmp_path: Path) -> None:
    ahead = tmp_path / f"events.out.tfevents.{int(time.time()) + 3600}.000000000.trillora.1"
    ahead.write_bytes(b"")
    later = [EventFile(tmp_path, 1) for _ in range(3)]
    for events in later:
        events.close()
    assert sorted(tmp_path.iterdir()) == [ahead, *(events.path for events in later)]


@needs_tensorboard
def test_the_listener_passes_every_event_on_and_logs_metrics(tmp_path: Path) -> None:
    events: list[Event] = [Note("hello"), evaluated(0, 3.0), step(1), step(2), evaluated(2, 1.5)]
    received: list[Event] = []
    with tracking_listener(tmp_path, 1, (), "trillora", {}, received.append) as listener:
        for event in events:
            listener(event)
    assert received == events
    read = scalars(tmp_path / "tensorboard")
    assert read["eval/loss"] == [(0, 3.0), (2, 1.5)]
    assert [number for number, _ in read["train/learning_rate"]] == [1, 2]
    assert read.keys() == {
        *("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second"),
        *("eval/loss", "eval/perplexity", "eval/accuracy"),
    }


def test_unwritable_folder_is_one_alarm_and_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    received: list[Event] = []
    with tracking_listener(tmp_path, 1, (), "trillora", {}, received.append) as listener:
        for number in range(1, 5):
            listener(step(number))
    assert [type(event) for event in received] == [Alarm, Step, Step, Step, Step]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_alarm_and_does_not_stop_the_run(tmp_path: Path) -> None:
    received: list[Event] = []
    with tracking_listener(tmp_path, 1, (), "trillora", {}, received.append) as listener:
        (written,) = (tmp_path / "tensorboard").iterdir()
        full = os.open("/dev/full", os.O_WRONLY)
        for descriptor in os.listdir("/proc/self/fd"):  # redirect the open event file to the full device
            target = Path(f"/proc/self/fd/{descriptor}")
            if target.exists() and target.resolve() == written.resolve():
                os.dup2(full, int(descriptor))
        os.close(full)
        listener(evaluated(1))  # flushes
        listener(evaluated(2))
    assert [type(event) for event in received] == [Evaluated, Alarm, Evaluated]
    assert "No space left" in received[1].text  # type: ignore[union-attr]


def test_unknown_service_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(TrilloraError, match="Unknown tracker 'wandbb'") as error:
        open_tracker("wandbb", "p", "r", {}, tmp_path)
    assert "did you mean 'wandb'" in error.value.do
    with pytest.raises(TrilloraError), tracking_listener(tmp_path, 1, ("wandbb",), "trillora", {}, ignore_events):
        raise AssertionError("never opened")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_library_is_an_error_with_the_install_command(tmp_path: Path, name: str) -> None:
    code = f"""
import sys
sys.modules[{name!r}] = None  # makes `import` fail
from pathlib import Path
from trillora.tracking import tracking_listener
with tracking_listener(Path({str(tmp_path)!r}), 1, ({name!r},), "trillora", {{}}, print): pass
"""
    result = run_python(code, {})
    assert result.returncode == 1 and f"pip install {name}" in result.stderr


def test_trackers_import_no_jax_and_no_unused_service(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from trillora.tracking import tracking_listener
with tracking_listener(Path({str(tmp_path)!r}), 1, (), "trillora", {{}}, print): pass
assert not {{"jax", "torch", "transformers", "wandb", "trackio", "tensorboard"}} & sys.modules.keys()
"""
    result = run_python(code, {})
    assert result.returncode == 0, result.stderr


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a new process: the services' libraries start threads and install exit hooks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "TRACKIO", "HF_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**kept, "PYTHONPATH": str(SOURCE), **environment},
    )


TRACKED = """
import sys
from pathlib import Path
from trillora.events import Evaluated, Step
from trillora.tracking import tracking_listener
run, service, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = {"train": {"learning_rate": 1e-3}, "api_key": "canary-of-config", "name": "hf_" + "canary" * 4}
received = []
with tracking_listener(run, first, (service,), "trillora", config, received.append) as listener:
    for n in range(first, first + 4):
        listener(Step(n, 10, "chat", 4.0 / n, 1e-3, 0.5, False, 1234.0, 1.0, 9.0, 0.1))
    listener(Evaluated(n, "chat", 0.5, 1.65, 0.25, 100, True))
print([event.text for event in received if type(event).__name__ == "Alarm"])
"""


def track(run: Path, service: str, first: int, environment: dict[str, str]) -> str:
    argv = f"import sys; sys.argv = ['-', {str(run)!r}, {service!r}, {str(first)!r}, 'hf_canaryOnTheCommandLine']\n"
    result = run_python(argv + TRACKED, {"HOME": str(run.parent), **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout


def bytes_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


@needs_wandb
def test_wandb_offline_stores_the_run_without_secrets(tmp_path: Path) -> None:
    run, offline = tmp_path / "run", {"WANDB_MODE": "offline", "WANDB_API_KEY": "c0ffee" * 6 + "c0ff"}
    assert track(run, "wandb", 1, offline) == "[]\n"
    assert track(run, "wandb", 3, offline) == "[]\n"
    files = sorted((run / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # one id, so the service joins both parts
    written = bytes_below(run)
    for word in (b"train/loss", b"eval/perplexity", b"learning_rate", MASK.encode()):
        assert word in written or json.dumps(word.decode()).encode() in written
    for secret in (b"canary-of-config", b"hf_canary", b"c0ffeec0ffee"):
        assert secret not in written


@needs_wandb
def test_unreachable_wandb_is_one_alarm_and_does_not_stop_the_run(tmp_path: Path) -> None:
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "c0ffee" * 6 + "c0ff"}  # port 9: discard
    code = "import trillora.tracking.services as s; s.OPEN_SECONDS = 2\n"
    result = run_python(
        f"{code}import sys; sys.argv = ['-', {str(tmp_path / 'run')!r}, 'wandb', '1']\n{TRACKED}",
        {"HOME": str(tmp_path), **unreachable},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wandb cannot be reached") == 1
    assert "c0ffeec0ffee" not in result.stdout + result.stderr


@needs_wandb
def test_wandb_without_a_login_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    argv = f"import sys; sys.argv = ['-', {str(tmp_path / 'run')!r}, 'wandb', '1']\n"
    result = run_python(argv + TRACKED, {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"})
    assert result.returncode == 1 and "wandb login" in result.stderr and "WANDB_MODE=offline" in result.stderr


@needs_trackio
def test_trackio_stores_one_run_without_secrets(tmp_path: Path) -> None:
    run, where = tmp_path / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    assert track(run, "trackio", 1, where) == "[]\n"
    assert track(run, "trackio", 5, where) == "[]\n"
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as rows:
        found = rows.execute("select run_name, step, metrics from metrics order by step").fetchall()
    rows.close()
    assert len({name for name, _, _ in found}) == 1
    losses = {number: json.loads(values)["train/loss"] for _, number, values in found if b"train/loss" in values}
    assert losses == {number: 4 / number for number in range(1, 9)}
    assert any(b"eval/accuracy" in values for _, _, values in found)
    for secret in (b"canary-of-config", b"hf_canary"):
        assert secret not in bytes_below(tmp_path / "trackio") + bytes_below(run)
