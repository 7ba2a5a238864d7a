"""Text from outside never controls the terminal, and no exception is shown as a traceback."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import typer
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.cli.errors import Verbs
from trillora.errors import TrilloraError, as_error
from trillora.events import Alarm, Note
from trillora.report.console import console_listener
from trillora.report.output import guarded_output
from trillora.report.safe_console import SafeConsole
from trillora.safe_text import visible
from trillora.secrets import mask_message, mask_urls, secrets_of_url

# Sets the title, clears the screen, turns text around, moves the cursor, 8-bit CSI, a bell, half a character.
HOSTILE = "\x1b]0;owned\x07 \x1b[2J \u202eevil\u2066 \r \x08 \x9b31m \x7f \udcff [bold red]x[/bold red] [link=http://x]y[/link]"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
OWN_COLORS = re.compile(r"\x1b\[[\d;]*m|\x1b\[\d*[ABCDGK]|\x1b\[\?25[hl]|\r")  # styles and cursor steps of the panel


def assert_safe(text: str) -> None:
    assert "owned" in text  # the hostile text is there
    assert (found := UNSAFE.search(text)) is None, (found, text)


# Answers


class FakeSampling(NamedTuple):
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class FakeGenerator:
    """Answers without a model. The commands import it instead of the real one, so that no test here needs jax."""

    answer = HOSTILE
    prompts = SimpleNamespace(has_template=True)
    system = ""
    longest = None
    seen: ClassVar[list[Any]] = []

    @classmethod
    def open(cls, name: str, **options: Any) -> FakeGenerator:
        return cls()

    def generate(self, prompts: list[str], **options: Any) -> list[Any]:
        self.seen.append((prompts, options))
        return [SimpleNamespace(text=self.answer, num_prompt_tokens=1, tokens=[1], stopped=True) for _ in prompts]

    def stream(self, messages: list[Any], **options: Any) -> Iterator[str]:
        self.seen.append((messages, options))
        yield from self.answer  # character by character: an escape sequence is spread over several pieces


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> type[FakeGenerator]:
    for name, contents in {
        "trillora.generation.generator": {"Generator": FakeGenerator},
        "trillora.generation.prompts": {"Message": dict},
        "trillora.engine.sampling": {"Sampling": FakeSampling},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "trillora.generation.chat", raising=False)
    monkeypatch.setattr(FakeGenerator, "seen", [])
    yield FakeGenerator
    sys.modules.pop("trillora.generation.chat", None)


def test_answers_cannot_control_the_terminal(generator: type[FakeGenerator], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGenerator, "system", HOSTILE)  # of the rows of someone else's run
    ask = ["generate", "smollm2", "-p"]
    for arguments in ([*ask, "hi"], [*ask, "a", "-p", "b"], ["chat", "smollm2"]):
        result = CliRunner().invoke(app, arguments, input="hello\n/quit\n")
        assert result.exit_code == 0, result.output
        assert_safe(result.output)
        assert "[bold red]x[/bold red]" in result.output
    result = CliRunner().invoke(app, ["generate", "smollm2", "-p", "hi", "--json"])
    assert_safe(result.output)


def test_code_in_an_answer_keeps_its_tabs_and_lines(
    generator: type[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGenerator, "answer", "all:\n\tcc a.c  # für 你好 👩‍🚀")
    assert CliRunner().invoke(app, ["generate", "smollm2", "-p", "hi"]).output == "all:\n\tcc a.c  # für 你好 👩‍🚀\n"


def test_a_line_that_is_not_text_is_refused_and_the_chat_continues(generator: type[FakeGenerator]) -> None:
    result = CliRunner().invoke(app, ["chat", "smollm2"], input=b"\xff\xfe\nhello\n/quit\n")
    assert result.exit_code == 0
    assert "This line is not valid" in result.output
    assert [messages[-1]["content"] for messages, _ in generator.seen] == ["hello"]


def test_the_guard_has_what_input_needs_to_edit_a_line() -> None:
    with guarded_output():
        assert isinstance(sys.stdout.encoding, str) and isinstance(sys.stdout.errors, str)  # else it ignores readline


def test_a_prompt_that_is_not_text_is_an_error(generator: type[FakeGenerator]) -> None:
    result = CliRunner().invoke(app, ["generate", "smollm2", "-p", "a\udcff"])
    assert (result.exit_code, generator.seen) == (2, [])
    assert result.output.startswith("An argument is not valid utf-8 text.\n  where: a\\udcff\n")


@pytest.mark.parametrize(
    "option",
    [
        *("--temperature nan", "--temperature -1", "--temperature inf", "--temperature 1e9", "--temperature hot"),
        *("--top-p nan", "--top-p 2", "--top-p -0.1", "--max-tokens 0", "--max-tokens -5", f"--max-tokens {10**30}"),
        *("--seed -1", f"--seed {2**31}", "--seed 1.5", f"--seed {'9' * 5000}"),
    ],
)
def test_numbers_out_of_bounds_are_errors(generator: type[FakeGenerator], option: str) -> None:
    for verb in (["generate", "smollm2", "-p", "hi"], ["chat", "smollm2"]):
        result = CliRunner().invoke(app, [*verb, *option.split()], prog_name="trillora")
        assert result.exit_code == 2 and generator.seen == []
        name, value = option.split()
        assert result.output.startswith(f"Invalid value for '{name}': '{value[:30]}")
        assert len(result.output) < 400


@pytest.mark.parametrize("option", ["--price nan", "--price -1", "--price inf", "--price 1e999", "--price much"])
def test_a_price_is_a_finite_number(option: str) -> None:
    result = CliRunner().invoke(app, ["preflight", "no.yaml", "--on", "v5e-8", "--json", *option.split()])
    assert result.exit_code == 2 and "Invalid value for '--price'" in result.output


def test_numbers_within_bounds_are_used(generator: type[FakeGenerator]) -> None:
    options = ["--max-tokens=7", "--temperature=0.5", "--top-p=0.9", "--seed=3"]
    assert CliRunner().invoke(app, ["generate", "smollm2", "-p", "hi", *options]).exit_code == 0
    assert generator.seen == [(["hi"], {"max_tokens": 7, "sampling": (0.5, 0.9, 3)})]


# Errors


def failing(error: BaseException) -> typer.Typer:
    verbs = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)
    verbs.callback()(lambda: None)

    @verbs.command()
    def fail() -> None:
        raise error

    return verbs


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


BUGS: list[Exception] = [ZeroDivisionError("x"), KeyError(HOSTILE), AssertionError(), Unprintable(), UnicodeError("y")]


@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
def test_an_unexpected_exception_is_one_message_with_code_70(error: Exception) -> None:
    result = CliRunner().invoke(failing(error), ["fail"], prog_name="trillora")
    assert result.exit_code == 70
    assert result.output.startswith(f"This is a bug of Trillora: {type(error).__name__}")
    assert "Traceback" not in result.output and not UNSAFE.search(result.output)
    assert "trillora fail\n" in result.output
    assert f"trillora {trillora.__version__}, Python 3" in result.output and "--traceback" in result.output


SYSTEM: list[tuple[Exception, str]] = [
    (OSError(errno.ENOSPC, "No space left on device", "/data/\x1bx"), "  where: /data/\\x1bx\n  do:    free some disk"),
    (OSError(errno.EROFS, "Read-only file system", "/ro"), "  where: /ro\n  do:    use a folder that you can write"),
    (PermissionError(errno.EACCES, "Permission denied", "a", None, "b"), "  where: a and b\n  do:    change the perm"),
    (OSError("no number"), "OSError: no number.\n"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']"), "set TMPDIR to a folder"),
    (MemoryError(), "does not have enough memory"),
    (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    (ModuleNotFoundError("No module named 'jax'", name="jax.numpy"), "The Python package jax is not installed"),
]


@pytest.mark.parametrize(("error", "shown"), SYSTEM, ids=lambda value: type(value).__name__)
def test_a_problem_of_the_machine_is_not_called_a_bug(error: Exception, shown: str) -> None:
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == 2
    assert shown in result.output and "bug" not in result.output and not UNSAFE.search(result.output)


def test_a_bug_names_the_line_of_our_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError) as caught:
        visible(5)  # type: ignore[arg-type]
    assert re.fullmatch(r"trillora/safe_text\.py, line \d+", as_error(caught.value).where or "")


@pytest.mark.parametrize(
    "arguments", [["--traceback", "report", "no"], ["report", "no", "--traceback"], ["report", "no"]]
)
def test_the_traceback_is_shown_on_request(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--traceback" not in arguments:
        monkeypatch.setenv("TRILLORA_TRACEBACK", "1")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Traceback (most recent call last)")
    assert "There is no run 'no'.\n  where: no\n" in result.output
    monkeypatch.setenv("TRILLORA_TRACEBACK", "0")
    assert "Traceback" not in CliRunner().invoke(app, ["report", "no"]).output


def test_errors_cannot_control_the_terminal() -> None:
    for error in (TrilloraError(HOSTILE, where=HOSTILE, do=HOSTILE), ValueError(HOSTILE), OSError(5, HOSTILE, HOSTILE)):
        for arguments in (["fail"], [HOSTILE.replace("\udcff", "")]):
            assert_safe(CliRunner().invoke(failing(error), arguments).output)


def test_a_reader_that_leaves_is_not_an_error() -> None:
    result = CliRunner().invoke(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), ["fail"])
    assert (result.exit_code, result.output) == (1, "")


# Secrets in errors


@pytest.mark.parametrize(
    ("override", "secret"),
    [
        ("train.steps=s3://k:hunter2x@b", "hunter2x"),
        ('data={path: "https://u:hunter2x@h/x.jsonl", bogus: 1}', "hunter2x"),
        ("model.token=hf_abcdefghijklmnop", "abcdefgh"),
        ("model.token=hunter2x", "hunter2x"),
        ("model.name=[https://u:hunter2x@host/m]", "hunter2x"),
        ("train.steps=http://user:hun@ter2pass@h/x.jsonl", "ter2"),
        ("train.steps=http://user:hunter/2pass@h/x.jsonl", "2pass"),
        ("train.steps=http://user:hunter/2pass-and-much-more-of-it@h/x.jsonl", "much"),
        ("train.steps=http://h/x.jsonl#token=hunter2x", "hunter2x"),
        ("train.steps=http://h/x.jsonl?api_key=hunter2x", "hunter2x"),
        ("train.steps={password: hunter2x}", "hunter2x"),
        ("train.steps=letmein-4711", "letmein"),  # the value of a variable of the environment
        ("http://user:hunter/2pass@h", "2pass"),
    ],
)
def test_an_error_never_repeats_a_secret(
    override: str, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "letmein-4711")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: smollm2\ndata: a.jsonl\n")
    for traceback in ([], ["--traceback"]):
        arguments = ["train", str(recipe), override, "--out", str(tmp_path / "run"), *traceback]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert secret not in result.output


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("train.steps cannot be 's3://k:hunter2x@b'.", "train.steps cannot be 's3://•••@b'."),
        ("override data=http://user:hun@ter2pass@h/x", "override data=http://•••@h/x"),
        ("http://user:hunter/2pass@h/x", "http://•••@h/x"),
        ("http://user:hun ter'2@h/x", "http://•••@h/x"),
        ("http://user:80/hunter@h/x", "http://•••@h/x"),
        ("http://hunter@h/x", "http://•••@h/x"),
        ("http://h/x#token=hunter", "http://h/x#token=•••"),
        ("zip://a.json::s3://k:hunter@b", "zip://a.json::s3://•••@b"),
        ("override model.token=hunter", "override model.token=•••"),
        ("eos_token: 5, s3://bucket/a@b http://[::1]:80/x http://h:8080/x. me@h", None),
        ("zip://a.json::s3://b/c http://h:80: refused; see a@b", None),
    ],
)
def test_secrets_in_a_message_are_masked_and_other_text_is_kept(message: str, shown: str | None) -> None:
    assert mask_message(message) == (message if shown is None else shown)


def test_a_short_user_name_is_not_replaced_inside_words() -> None:
    url = "webhdfs://r:pw@host/runs"
    error = "ConnectionError: port 80 of host does not respond to r with pw, spwx; see webhdfs://r:pw@host/runs"
    assert mask_urls(error, secrets_of_url(url)) == (
        "ConnectionError: port 80 of host does not respond to r with •••, spwx; see webhdfs://host/runs"
    )
    assert mask_urls("port of r", secrets_of_url("s3://r@host/x")) == "port of •••"


def test_a_url_in_the_place_of_a_path_is_masked_too() -> None:
    for arguments in (["report", "s3://k:hunter2x@b"], ["train", "s3://k:hunter2x@b/hunter2x", "--out", "x"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "hunter2x" not in result.output and "•••" in result.output


def test_messages_of_a_run_never_repeat_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with console_listener() as listen:
        listen(Note("reading s3://k:hunter2x@b"))
        listen(Alarm("cannot send: key sk-abcdefghijklmnop"))
    shown = capsys.readouterr().out
    assert "hunter2x" not in shown and "abcdefgh" not in shown and shown.count("•••") == 2


# The streams


def in_terminal(code: str, tmp_path: Path) -> str:
    """What a new process writes to a real terminal."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(trillora.__file__).parent.parent)}
    environment |= {"HOSTILE": os.fsencode(HOSTILE.replace("\udcff", "")).decode(), "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=tmp_path
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            block = os.read(controller, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not block:
            break
        output += block
    os.close(controller)
    assert process.wait() == 0, output.decode(errors="replace")
    return output.decode().replace("\r\n", "\n")


EVERY_EVENT = """
import logging, os, sys
from trillora.events import *
from trillora.report.console import console_listener
from trillora.report.output import guarded_output
x = os.environ["HOSTILE"]
with guarded_output(), console_listener() as listen:
    listen(Note(x)); listen(Alarm(x)); listen(Chosen(x, x, x)); listen(Progress(x, 1, 2, "rows"))
    listen(Step(1, 2, x, 2.5, 2e-4, 1.0, False, 1234.0, 2.0, 198.0, 0.0))
    listen(Sampled(1, x, (Sample(x, x, x),)))
    listen(Evaluated(1, x, 1.0, 2.0, 0.5, 3, True)); listen(Saved(1, x, 0.1)); listen(Skipped(1, x, x, (x,)))
    print(x); print(x, file=sys.stderr); logging.warning(x)
    listen(Step(2, 2, x + "2", 2.5, 2e-4, 1.0, False, 1234.0, 2.0, 198.0, 0.0))
"""


def test_a_live_terminal_gets_our_colors_and_no_sequence_of_others(tmp_path: Path) -> None:
    output = in_terminal(EVERY_EVENT, tmp_path)
    assert "\x1b[1;31m" in output  # an alarm is red
    assert "31m" in output and "\\x1b]0;owned\\x07" in output
    assert output.count("owned") > 8
    assert_safe(OWN_COLORS.sub("", output))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_beyond_the_encoding_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with guarded_output():
        print("RÜN 你 \x1b[2J\udcff")
    assert sys.stdout is stream
    text = raw.getvalue().decode(encoding)
    assert (
        text
        == {
            "ascii": "R\\xdcN \\u4f60 \\x1b[2J\\udcff\n",
            "latin-1": "RÜN \\u4f60 \\x1b[2J\\udcff\n",
            "utf-8": "RÜN 你 \\x1b[2J\\udcff\n",
        }[encoding]
    )


def test_progress_bars_of_libraries_still_move(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_output():
        for text in ("\rFetching: 10%", "\rFetching: 20%", "\n", "\x1b[A", "\r"):
            sys.stderr.write(text)
        for text in ("\rFetching\r\x1b[2J", "x\x1b[A", "\x1b[A\x1b[Ax", "\n\x1b[Aevil"):
            sys.stderr.write(text + "|")
        sys.stdout.write("\rno bar")
    out, err = capsys.readouterr()
    bars, _, rest = err.partition("\rFetching: 20%\n\x1b[A\r")
    assert bars == "\rFetching: 10%"
    assert rest == "\\rFetching\\r\\x1b[2J|x\\x1b[A|\\x1b[A\\x1b[Ax|\n\\x1b[Aevil|"
    assert out == "\\rno bar"


def test_markup_of_rich_has_no_effect_and_tables_are_safe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    console = SafeConsole()
    table = Table(title=HOSTILE, width=400)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "bold"))
    console.print(table)
    console.print(HOSTILE, soft_wrap=True)
    shown = capsys.readouterr().out
    assert_safe(shown)
    assert shown.count("[bold red]x[/bold red]") == 5


def test_every_console_of_the_package_is_safe() -> None:
    """Anything else would be a second way to the terminal."""
    folder = Path(trillora.__file__).parent
    other = [
        f"{file.relative_to(folder)}: {line.strip()}"
        for file in folder.rglob("*.py")
        for line in file.read_text("utf-8").splitlines()
        if re.search(r"(?<![\w])Console\(", line) and "class SafeConsole" not in line
    ]
    assert other == []
