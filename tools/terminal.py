"""Types the commands of docs/first-ten-minutes.md into a terminal, as printed, and records it.

    python tools/terminal.py clone           in a fresh clone of the last commit: five minutes
    python tools/terminal.py wheel BIN       with the trillora in the folder BIN, where the wheel is installed alone
    python tools/terminal.py clone --write   writes docs/terminal/clone.cast, for `asciinema play`, and clone.txt

A line that begins with `$` is a command, one with `>` is typed when it asks. tests/system/test_first_ten_minutes.py
does the same in CI and looks at the results.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-ten-minutes.md"
RECORDINGS = ROOT / "docs" / "terminal"
COLUMNS, ROWS = 110, 32
SECONDS = 1800  # for a command, on a busy machine
PARTS = ("clone", "wheel")
PROMPT = "$ "
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
_PARTS = re.compile(rf"({_CODES.pattern}|\r|\n)")
_UP, _ERASE = re.compile(r"\x1b\[(\d*)A"), "\x1b[2K"
_KEPT = ("PATH", "HOME", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@dataclass(frozen=True)
class Typed:
    """A command, and the lines that are typed while it runs."""

    command: str
    lines: tuple[str, ...]


@dataclass
class Recording:
    """What appeared in the terminal, and when. `codes` are the exit codes by command."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def add(self, text: str) -> None:
        self.pieces.append((time.monotonic() - self.started, text))

    @property
    def text(self) -> str:
        """The lines as they are on the screen at the end, if it is long enough."""
        lines, row = [""], 0
        for part in _PARTS.split("".join(text for _, text in self.pieces)):
            if up := _UP.fullmatch(part):
                row = max(row - int(up[1] or 1), 0)
            elif part in ("\r", _ERASE):
                lines[row] = "" if part == _ERASE else lines[row] + "\r"
            elif part == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif part and not _CODES.fullmatch(part):
                lines[row] = part if lines[row].endswith("\r") else lines[row] + part
        shown = "\n".join(line.rstrip("\r ").rstrip() for line in lines)
        return re.sub(r"\n{3,}", "\n\n", shown).strip() + "\n"

    def cast(self) -> str:
        """In asciinema's format, version 2."""
        head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "Trillora: the first ten minutes"}
        lines = [json.dumps(head), *(json.dumps([round(at, 3), "o", text]) for at, text in self.pieces)]
        return "\n".join(lines) + "\n"


def commands_of(part: str) -> list[Typed]:
    """The commands of a part of the page."""
    return list(_typed(_blocks("console")[PARTS.index(part)]))


def _typed(block: str) -> Iterator[Typed]:
    for chunk in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *lines = chunk.strip().split("\n")
        yield Typed(command, tuple(re.sub("^> ?", "", line) for line in lines))


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.M | re.S)


def write_files(folder: Path) -> None:
    """The files that the page asks to save."""
    [rows] = _blocks("csv")
    (folder / "qa.csv").write_text(rows, "utf-8")


def record(part: str, folder: Path, path: str) -> Recording:
    """Types the commands of a part in this folder. `path` is the shell's PATH. Stops after a command that fails."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"PATH": path, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    environment |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    recording = Recording()
    for typed in commands_of(part):
        recording.add(f"{PROMPT}{typed.command}\r\n")
        recording.codes[typed.command] = _run(typed, folder, environment, recording)
        if recording.codes[typed.command] != 0:
            break
    return recording


def _run(typed: Typed, folder: Path, environment: dict[str, str], recording: Recording) -> int:
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "-c", typed.command],
        cwd=folder,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        try:
            _follow(screen, list(typed.lines), recording)
            return process.wait(60)
        finally:
            process.kill()
            os.close(screen)


def _follow(screen: int, lines: list[str], recording: Recording) -> None:
    """Reads until the command ends. A line is typed when the command waits for one: its last output is a prompt."""
    decode, shown, until = codecs.getincrementaldecoder("utf-8")("replace"), "", time.monotonic() + SECONDS
    while time.monotonic() < until:
        ready, _, _ = select.select([screen], [], [], 1)
        if ready:
            try:
                data = os.read(screen, 65536)
            except OSError:  # how Linux says that the other end is closed
                return
            if not data:
                return
            text = decode.decode(data)
            recording.add(text)
            shown = (shown + text)[-2000:]
        elif lines and _CODES.sub("", shown).endswith(("> ", ": ")):
            os.write(screen, f"{lines.pop(0)}\n".encode())
            shown = ""
    raise TimeoutError(f"not finished after {SECONDS} s:\n{shown}")


def clone(folder: Path) -> Path:
    """A fresh clone of the last commit. make takes this Python."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def write(part: str, recording: Recording, folder: Path) -> None:
    """Writes the recording; the folder that it was made in is shown as `~/trillora`, the one above as `~`."""
    RECORDINGS.mkdir(exist_ok=True)
    for suffix, text in (("cast", recording.cast()), ("txt", recording.text)):
        shown = (
            text.replace(str(folder), "~/trillora").replace(str(folder.parent), "~").replace(sys.base_prefix, "/usr")
        )
        (RECORDINGS / f"{part}.{suffix}").write_text(shown, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("bin", nargs="?", type=Path, help="the folder of trillora, for `wheel`")
    parser.add_argument("--write", action="store_true", help="write docs/terminal")
    args = parser.parse_args()
    if (args.part == "wheel") != (args.bin is not None):
        parser.error("`wheel` needs the folder of trillora, and `clone` none")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "trillora"
        if args.part == "clone":
            recording = record("clone", clone(folder), os.environ["PATH"])
        else:
            folder.mkdir()
            write_files(folder)
            recording = record("wheel", folder, os.pathsep.join((str(args.bin.resolve()), "/usr/bin", "/bin")))
        print(recording.text)
        if args.write:
            write(args.part, recording, folder)
    return max(recording.codes.values())


if __name__ == "__main__":
    sys.exit(main())
