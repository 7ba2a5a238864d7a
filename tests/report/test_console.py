"""How a run is shown: a panel in a terminal, a few lines elsewhere. Untrusted text has no effect on the terminal."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from console_panels import in_terminal, last_panel, logged, step, terminal, without_codes
from rich.console import Console

import trillora
from trillora.events import (
    AdapterEnded,
    AdaptersStarted,
    AdapterStep,
    Alarm,
    Chosen,
    Evaluated,
    Event,
    Note,
    Progress,
    Recorded,
    Sample,
    Sampled,
    Saved,
    Score,
    Scored,
    Skipped,
)
from trillora.report import console as console_module
from trillora.report.console import console_listener
from trillora.report.event_text import in_one_line, step_line
from trillora.report.output import closed_pipe_safe
from trillora.report.panels.terminal import KEPT_STEPS
from trillora.report.plain_lines import LOGGED_PARTS
from trillora.safe_text import visible, visible_line

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\x9b1m[bold]b[/bold] \u202eright\x00 :smile:"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(trillora.__file__).parent.parent)}
ENVIRONMENT.pop("JPY_PARENT_PID", None)


@pytest.fixture(autouse=True)
def outside_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)


@pytest.fixture
def progress_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the progress of short work too."""

    class Timer:
        def __init__(self, seconds: float, function: Any, arguments: tuple[Any, ...]) -> None:
            assert seconds == 2
            self.start, self.cancel = lambda: function(*arguments), lambda: None

    monkeypatch.setattr(threading, "Timer", Timer)


def evaluated(number: int, loss: float = 1.5, *, is_best: bool = False) -> Evaluated:
    return Evaluated(number, "chat", loss, math.exp(loss), 0.612, 1000, is_best)


# One event of every kind, and unusual ones.
EVENTS: list[Event] = [
    Note("loading [bold]model[/bold] [x"),
    Chosen("engine.layers", "scan", "a TPU compiles it in seconds"),
    Alarm("step 3 was skipped"),
    Progress("reading weights", 3, 10),
    Progress("downloading", 3_000_000, 10_000_000, "bytes"),
    Progress("nothing to do", 0, 0),
    Skipped(3, "chat", "the loss is not finite", ("a.jsonl:1",)),
    evaluated(0, 3.2, is_best=True),
    Sampled(0, "chat", (Sample("What is it?", "It is.", "It is not."), Sample("And now?", ""))),
    Sampled(0, "chat", ()),
    step(1),
    step(2, loss=math.nan, grad_norm=math.inf, skipped=True, memory_gib=None, peak_fraction=None),
    step(3, seconds_left=math.nan),
    step(4, seconds_left=math.inf, stage="another"),
    step(5, seconds_left=1e300, tokens_per_second=math.inf),
    step(0, num_steps=0),
    evaluated(5, math.inf),
    Saved(5, "runs/a/checkpoints/step-00000005", 0.31),
    Note(HOSTILE),
    Alarm("\ud800 half a surrogate pair"),
    Chosen(HOSTILE, HOSTILE, HOSTILE),
    Progress(HOSTILE, 1, 2),
    Sampled(6, HOSTILE, (Sample(HOSTILE, HOSTILE, HOSTILE),) * 9),
    Saved(6, HOSTILE, math.nan),
    Recorded(6),
    step(7, stage=HOSTILE),
    AdaptersStarted("phases", (HOSTILE, "code")),
    AdapterStep(8, HOSTILE, 1.5, 1e-4, math.nan, False, 100),
    AdapterStep(8, "code", math.nan, 1e-4, math.nan, True, 0),
    Evaluated(8, HOSTILE, 1.5, 4.5, 0.6, 1000, True),
    Evaluated(8, "code", math.nan, math.nan, math.nan, 1000, False),
    AdapterEnded(8, HOSTILE, "diverged", HOSTILE),
    Scored(8, "test", (Score(HOSTILE, HOSTILE, 1.5, 0.6, 1000), Score("base", "code", math.nan, math.nan, 0))),
    Scored(8, "validation", ()),
]


# Logs


def test_a_log_gets_plain_lines(progress_at_once: None) -> None:
    lines = logged(
        [
            *EVENTS[:3],
            *(Progress("reading weights", done, 1000) for done in range(1001)),
            *(step(number) for number in range(1, 101)),
            evaluated(100, is_best=True),
            Saved(100, "run/checkpoints/step-00000100", 0.31),
        ]
    )
    assert lines[0] == "loading [bold]model[/bold] [x"  # text is text, never markup
    assert lines[1] == "engine.layers = scan  (a TPU compiles it in seconds)"
    assert lines[2] == "alarm: step 3 was skipped"
    assert sum(line.startswith("reading weights") for line in lines) == LOGGED_PARTS + 1
    assert sum(line.startswith("step") for line in lines) == 100
    assert lines[-3:] == [
        "step 100/100  loss 2.5000  lr 2.00e-04  grad 1.000  1,234 tokens/s  left 0 s",
        "evaluation at step 100  loss 1.5000  perplexity 4.48  accuracy 61.2%  best",
        "saved step 100 to run/checkpoints/step-00000100 (0.3 s)",
    ]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("num_steps", "most"), [(10, 10), (100, 100), (199, 199), (200, 111), (1000, 111), (12345, 112)]
)
def test_a_long_run_has_few_lines_in_a_log(num_steps: int, most: int) -> None:
    lines = logged([step(number, num_steps) for number in range(1, num_steps + 1)])
    shown = [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]  # type: ignore[index]
    assert len(shown) <= most and min(num_steps, 100) <= len(shown)
    assert shown == sorted(set(shown)) and shown[-1] == num_steps
    assert set(range(1, min(num_steps, 10) + 1)) <= set(shown)


@pytest.mark.parametrize("num_steps", [40, 1000, 1037])
def test_the_steps_in_a_log_can_be_chosen(num_steps: int) -> None:
    lines = logged([step(number, num_steps) for number in range(1, num_steps + 1)], every_steps=50)
    shown = [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]  # type: ignore[index]
    assert shown == sorted({1, *range(50, num_steps + 1, 50), num_steps})


def test_everything_else_is_bounded_in_a_log_and_the_latest_is_never_lost() -> None:
    events: list[Event] = []
    for number in range(1, 4322):  # the run ends early
        samples = (Sample(f"q{number}", f"a{number}"),)
        events += [step(number, 5000), evaluated(number), Saved(number, f"s{number}", 0.1)]
        events += [Sampled(number, "chat", samples), Progress("evaluating", 0, 3), Progress("evaluating", 3, 3)]
    lines = logged(events)
    assert 5 * 80 < len(lines) < 5 * 120
    assert [line.split("  ")[0] for line in lines[-6:]] == [
        *("step 4321/5000", "evaluation at step 4321", "saved step 4321 to s4321 (0.1 s)"),
        *("samples at step 4321", "", ""),
    ]
    assert lines[-1] == "  > a4321"
    assert len(lines) == len(set(lines))  # no line twice


def test_held_lines_are_printed_before_a_note() -> None:
    lines = logged([*(step(number, 10_000) for number in range(1, 151)), Note("stopped by a signal")])
    assert [line[:10] for line in lines[-3:]] == ["step   100", "step   150", "stopped by"]


def test_a_resumed_run_prints_its_first_step() -> None:
    assert logged([step(537, 10_000), step(538, 10_000)])[0].startswith("step   537/10000")


def test_the_start_of_a_stage_is_printed_and_skipped_steps_are_counted() -> None:
    lines = logged([step(1, stage="text"), step(2, stage="text", skipped=True), step(3, stage="chat")])
    assert lines[1].endswith("  skipped 1") and lines[2] == "stage chat starts" and lines[3].endswith("  skipped 1")
    assert len(lines) == 4


def test_a_command_in_a_notebook_writes_about_fifty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    for number in range(1, 10_001):
        events.append(step(number, 10_000))
        if number % 100 == 0:
            events += [evaluated(number), Saved(number, "there", 0.1), Progress("evaluating", 3, 3)]
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # set in commands that a cell starts with `!`
    out = io.StringIO()
    with console_listener(terminal(out)) as listener:
        for event in events:
            listener(event)
    assert 30 <= len(out.getvalue().splitlines()) <= 55
    assert "\x1b" not in out.getvalue()


# Terminals


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_the_run(width: int) -> None:
    written = in_terminal(
        [
            evaluated(0, 3.2, is_best=True),
            *(step(number, 300, loss=3 - number / 100) for number in range(1, 101)),
            evaluated(50, 1.75, is_best=True),
            evaluated(100, 1.9),
            Saved(100, "there", 1.0),
            step(101, 300, loss=math.nan, skipped=True),
            step(137, 300, loss=1.25),
        ],
        width,
    )
    panel = last_panel(written)
    assert all(len(line) == width for line in panel)
    text = "\n".join(panel)
    for part in ("─ chat ─", "step 137/300 ━", "46%  left 5 min", "loss 1.2500 ", "evaluation 1.9000", "padding 3%"):
        assert part in text
    for part in (
        "best 1.7500 at step 50",
        "1,234 tokens/s",
        "41% of peak",
        "memory 13.3 GiB",
        "skipped 1",
        "saved step",
    ):
        assert part in text
    assert re.search("█[▁▂▃▄▅▆▇]+!▁", text)  # falling losses, a missing one, then the lowest
    assert "evaluation at step 50  loss 1.7500  perplexity 5.75  accuracy 61.2%  best\n" in written


def test_a_terminal_keeps_some_of_the_steps() -> None:
    lines = in_terminal([step(number, 300) for number in range(1, 301)], 120).splitlines()
    kept = [line for line in lines if line.lstrip("\r").startswith("step")]
    assert KEPT_STEPS <= len(kept) <= KEPT_STEPS + 2
    assert any("100%  took 10 min" in line for line in lines[-6:])  # the panel stays as a summary


@pytest.mark.parametrize(
    ("work", "amount"),
    [
        (Progress("Loading weights", 269_042_688, 538_060_288, "bytes"), "269 MB of 538 MB"),
        (Progress("Loading weights", 5000, 10_000), "5,000/10,000"),
    ],
)
def test_other_work_is_a_bar_that_disappears(work: Progress, amount: str, progress_at_once: None) -> None:
    out = io.StringIO()
    with console_listener(terminal(out)) as listener:
        listener(work)
        assert re.search(rf"Loading weights ━+[╸╺]?━+ {amount}", without_codes(out.getvalue()))
        before = len(out.getvalue())
        listener(Progress(work.label, work.total, work.total, work.unit))
        assert "Loading" not in out.getvalue()[before:]
    assert "╭" not in out.getvalue()  # nothing was trained
    almost = Progress(work.label, work.total * 999_999 // 1_000_000, work.total, work.unit)
    done = Progress(work.label, work.total, work.total, work.unit)
    lines = logged([work, almost, done])
    assert lines[0] == f"Loading weights  {amount}" and len(lines) == len(set(lines))


@pytest.mark.parametrize("mode", ["terminal", "log", "notebook"])
def test_progress_is_shown_only_for_work_that_takes_long(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert console_module.QUIET_SECONDS == 2
    monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.2)
    if mode == "notebook":
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    out = io.StringIO()
    with console_listener(Console(file=out) if mode == "log" else terminal(out)) as listener:
        for done in range(11):
            listener(Progress("short", done, 10))
        listener(Progress("long", 0, 10))
        listener(Progress("long", 3, 10))
        assert "long" not in out.getvalue()
        deadline = time.monotonic() + 30
        while "long" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)  # no event arrives: the timer shows the latest one
        listener(Progress("late", 0, 10))
    assert "3/10" in out.getvalue() and "0/10" not in out.getvalue()
    written = out.getvalue()
    time.sleep(0.4)
    assert out.getvalue() == written and "short" not in written and "late" not in written


def test_samples_are_compact_in_a_terminal() -> None:
    samples = (
        Sample("Say it\nin JSON.", '{"a": 1}', '{"a": 1}'),
        Sample("Long? " * 100, "Yes, very long. " * 1000, "No."),
        *(Sample(f"q{number}", "a") for number in range(7)),
    )
    lines = [line.rstrip() for line in in_terminal([Sampled(50, "chat", samples)]).strip("\r\n").splitlines()]
    assert lines[:3] == ["samples at step 50", "  ? Say it in JSON.", '  > {"a": 1}']
    assert lines[7] == "  = No." and " … " in "".join(lines[3:7])
    assert lines[-1].strip("\r") == "    and 5 more" and len(lines) == 13
    assert max(map(len, lines)) <= 80


def test_the_screen_is_drawn_at_most_four_times_a_second_and_only_on_change(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with console_listener(terminal(out)) as listener:
        listener(step(1, 100_000))
        drawn = []
        for number in range(2, 1002):
            before = len(out.getvalue())
            clock[0] += 0.01
            listener(step(number, 100_000))
            drawn.append(len(out.getvalue()) > before)
        assert 35 <= sum(drawn) <= 40  # ten seconds
        before = len(out.getvalue())
        time.sleep(0.6)
        assert len(out.getvalue()) == before


def test_a_terminal_without_a_cursor_gets_lines() -> None:
    out = io.StringIO()
    with console_listener(Console(file=out, force_terminal=True, _environ={"TERM": "dumb"})) as listener:
        listener(step(1))
    assert out.getvalue() == step_line(step(1)) + "\n"


# No event raises, and no text controls the terminal


@pytest.mark.parametrize("width", [0, 20, 80, 120])  # 0 is a log
def test_no_event_raises(width: int, progress_at_once: None) -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event)) and len(get_args(Event)) == 14
    for event in EVENTS:
        out = io.StringIO()
        console = terminal(out, width) if width else Console(file=out)
        with console_listener(console) as listener:
            listener(event)
    assert logged(EVENTS) if not width else in_terminal(EVENTS, width)


def test_untrusted_text_has_no_effect(progress_at_once: None) -> None:
    hostile = [event for event in EVENTS if HOSTILE in repr(event) or repr(HOSTILE)[1:-1] in repr(event)]
    assert len(hostile) == 11
    log = "\n".join(logged(hostile))
    out = io.StringIO()
    with console_listener(terminal(out)) as listener:
        for event in hostile:
            listener(event)
    shown = without_codes(out.getvalue())
    for written in (log, shown.replace("\r", "")):
        assert all(c.isprintable() or c == "\n" for c in written)
        assert "\\x1b]0;owned\\x07\\x1b[2J" in written and "[bold]b[/bold]" in written and ":smile:" in written
        assert "\\x9b" in written and "\\u202e" in written
    # Only our own codes: colors, hiding and moving the cursor, erasing lines.
    codes = set(re.findall(r"\x1b(\[[0-9;?]*[A-Za-z]|.)", out.getvalue()))
    assert {code for code in codes if code[-1] != "m"} <= {"[?25l", "[?25h", "[2K", "[1A"}
    assert "[31m" not in codes and "[0m" in codes


def test_letters_of_any_language_are_unchanged() -> None:
    text = "Grüße 你好 👩\u200d💻 a\u00a0b\nd"
    assert visible(text) == text
    assert visible_line("a\tb\nc") == "a\\tb\\nc"
    assert in_one_line("a\n\n b\tc" + "d" * 100, 30) == "a b c" + "d" * 15 + " … " + "d" * 7


def test_characters_outside_the_encoding_of_a_file_are_escaped() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, "ascii")
    with console_listener(Console(file=file)) as listener:
        listener(Note("Grüße 你"))
    assert raw.getvalue() == b"Gr\\xfc\\xdfe \\u4f60\n"
    console = terminal(io.TextIOWrapper(io.BytesIO(), "ascii"))  # type: ignore[arg-type]
    with console_listener(console) as listener:
        listener(step(1, 3))
    assert "loss 2.5000 ." in without_codes(console.file.buffer.getvalue().decode("ascii"))  # type: ignore[attr-defined]


def test_threads_share_a_listener() -> None:
    out = io.StringIO()
    with console_listener(Console(file=out)) as listener:
        notes = [[Note(f"{name}{number}") for number in range(200)] for name in "abcd"]
        threads = [threading.Thread(target=lambda part=part: [listener(n) for n in part]) for part in notes]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(out.getvalue().split()) == sorted(note.text for part in notes for note in part)


# Closed output

RUN = """
import sys, time
from rich.console import Console
from trillora.report.console import console_listener
from trillora.report.output import flush_output
from trillora.events import Note, Saved, Step
with console_listener(Console(stderr=STDERR, force_terminal=TERMINAL)) as listener:
    for i in range(1, 2001):
        listener(Step(i, 2000, "a", 1.0, 1.0, 1.0, False, 1.0, 1.0, 1.0, 0.0))
        listener(Saved(i, "there", 0.0))
        if i == 5:
            time.sleep(0.3)  # the reader closes the pipe here
    listener(Note("last"))
open(sys.argv[1], "w").write("finished")
print("a last word")
flush_output()
"""


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_continues_when_its_reader_closes_the_pipe(tmp_path: Path, stream: str, shown: bool) -> None:
    code = RUN.replace("STDERR", str(stream == "stderr")).replace("TERMINAL", str(shown))
    command = [sys.executable, "-c", code, str(tmp_path / "done")]
    with (tmp_path / "other").open("wb") as other:
        pipes = {"stdout": other, "stderr": other, stream: subprocess.PIPE}
        process = subprocess.Popen(command, env=ENVIRONMENT, **pipes)  # type: ignore[call-overload]
    pipe = getattr(process, stream)
    assert pipe.readline()
    pipe.close()
    assert process.wait(60) == 0
    assert (tmp_path / "done").read_text() == "finished"
    assert (tmp_path / "other").read_text() == ("" if stream == "stdout" else "a last word\n")


def test_a_run_continues_when_head_closes_stdout_and_stderr(tmp_path: Path) -> None:
    code = RUN.replace("STDERR", "False").replace("TERMINAL", "False")
    (tmp_path / "run.py").write_text(code)
    command = f"{sys.executable} run.py done 2>&1 | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert (result.stdout.splitlines()[1:], result.stderr) == (["0"], "")
    assert result.stdout.startswith("step    1/2000") and (tmp_path / "done").exists()


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_run_continues_when_output_is_closed_or_full_from_the_start(tmp_path: Path, redirection: str) -> None:
    code = RUN.replace("STDERR", str("2>" in redirection)).replace("TERMINAL", "False").replace("0.3", "0")
    (tmp_path / "run.py").write_text(code)
    command = f"{sys.executable} run.py done {redirection}"
    assert subprocess.run(["bash", "-c", command], env=ENVIRONMENT, cwd=tmp_path, capture_output=True).returncode == 0
    assert (tmp_path / "done").exists()


def test_a_terminal_that_hangs_up_does_not_stop_a_run(tmp_path: Path) -> None:
    code = RUN.replace("STDERR", "False").replace("TERMINAL", "None")
    leader, follower = os.openpty()
    command = [sys.executable, "-c", code, str(tmp_path / "done")]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env={**ENVIRONMENT, "TERM": "xterm"})
    os.close(follower)
    assert os.read(leader, 100)
    os.close(leader)  # writes now fail with EIO
    assert process.wait(60) == 0 and (tmp_path / "done").exists()


@pytest.mark.parametrize("width", [0, 80])
def test_a_file_closed_in_python_silences_the_listener(tmp_path: Path, width: int) -> None:
    file = (tmp_path / "log").open("w")
    console = terminal(file, width) if width else Console(file=file)  # type: ignore[arg-type]
    with console_listener(console) as listener:
        listener(Note("first"))
        file.close()
        listener(Note("second"))
        listener(step(1))
    assert "first" in (tmp_path / "log").read_text()


def test_printing_survives_a_closed_file(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("w")
    out = closed_pipe_safe(file)
    print("first", file=out, flush=True)
    file.close()
    print("second", file=out, flush=True)
    assert (tmp_path / "log").read_text() == "first\n"
