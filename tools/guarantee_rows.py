"""Runs the tests of guarantees, and shows what they found as rows of a table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from guarantees import Guarantee

ROOT = Path(__file__).parents[1]
LIBRARIES = ("jax", "torch", "torchax", "transformers")
HEAD = "| guarantee | how it is tested | observed | result | seconds |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    guarantee: str
    tested: str
    observed: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        result = "passed" if self.passed else "FAILED"
        cells = (self.guarantee, self.tested, self.observed, result, f"{self.seconds:.0f}")
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_part(guarantees: list[Guarantee], workers: int, scale: float) -> list[Row]:
    """Runs all tests of a part in one pytest, so that they share fixtures."""
    tests = [test for guarantee in guarantees for test in guarantee.tests]
    files = sorted({test.partition("::")[0] for test in tests})
    nodes = [node for node in collect(files, scale) if _matches(node, tests)]
    alone = any(guarantee.alone for guarantee in guarantees)
    with tempfile.TemporaryDirectory() as folder:
        results = run_tests(nodes, 0 if alone else workers, scale, Path(folder))
    return [row_of(guarantee, results) for guarantee in guarantees]


def collect(files: list[str], scale: float) -> list[str]:
    """The node ids of all tests in the files."""
    paths = {path.name: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *(paths[file] for file in files)]
    done = subprocess.run(command, cwd=ROOT, env=environment(scale), capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def _matches(node: str, tests: list[str]) -> bool:
    path, _, name = node.partition("::")
    return any(f"{Path(path).name}::{name}".startswith(test) for test in tests)


@dataclass(frozen=True)
class Result:
    node: str  # file and function
    outcome: str  # passed, failed, skipped
    seconds: float
    properties: tuple[tuple[str, str], ...]


def run_tests(nodes: list[str], workers: int, scale: float, folder: Path) -> list[Result]:
    report, log = folder / "report.xml", folder / "log"
    log.touch()
    # The default format, xunit2, has no properties.
    options = ["-v", f"--junitxml={report}", "-o", "junit_family=xunit1", "-n", str(workers), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    done = threading.Event()
    follower = threading.Thread(target=_follow, args=(log, done))
    follower.start()
    environ = {**environment(scale), "TRILLORA_DOSE_LOG": str(log)}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tail = []
        try:
            for line in process.stdout:
                tail = [*tail[-200:], line.rstrip()]
                if re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line):
                    say(line.strip())
        except BaseException:
            process.send_signal(signal.SIGINT)  # pytest stops its workers too
            done.set()
            raise
    done.set()
    follower.join()
    if process.returncode not in (0, 1):
        say(f"pytest failed with exit code {process.returncode}")
    if process.returncode != 0:
        print("\n".join(tail), flush=True)
    return read_report(report) if report.exists() else []


def _follow(log: Path, done: threading.Event) -> None:
    """Prints the progress lines that tests write while they run."""
    with open(log, encoding="utf-8") as stream:
        is_last = False
        while True:
            for line in stream:
                say(f"  {line.rstrip()}")
            if is_last:
                return
            is_last = done.wait(1.0)


def read_report(report: Path) -> list[Result]:
    """The results in pytest's XML report. We wrote the file ourselves, so its XML is trusted."""
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        properties = tuple((p.get("name", ""), p.get("value", "")) for p in case.iter("property"))
        node = f"{module}.py::{case.get('name', '')}"
        results.append(Result(node, outcome, float(case.get("time", 0)), properties))
    return results


def row_of(guarantee: Guarantee, results: list[Result]) -> Row:
    """Passed if all tests of the guarantee were found, none failed and enough passed."""
    own = [result for result in results if _matches(result.node, list(guarantee.tests))]
    missing = [test for test in guarantee.tests if not any(result.node.startswith(test) for result in own)]
    num_passed = sum(result.outcome == "passed" for result in own)
    failed = [result.node for result in own if result.outcome == "failed"]
    skipped = [result.node for result in own if result.outcome == "skipped"]
    observed = [*merge([pair for result in own for pair in result.properties]), f"{num_passed} tests passed"]
    observed += [f"at least {guarantee.least} expected"] if num_passed < guarantee.least else []
    observed += [f"failed: {', '.join(failed)}"] if failed else []
    observed += [f"not found: {', '.join(missing)}"] if missing else []
    observed += [f"skipped: {', '.join(node.partition('::')[2] for node in skipped)}"] if skipped else []
    passed = not failed and not missing and num_passed >= guarantee.least
    seconds = sum(result.seconds for result in own)
    return Row(guarantee.name, guarantee.tested, "; ".join(observed), passed, seconds)


def merge(pairs: list[tuple[str, str]]) -> list[str]:
    """Combines properties of the same name: the sum of integers, the maximum of other numbers, a list of words."""
    found: dict[str, str] = {}
    for name, value in pairs:
        before = found.get(name)
        if before is None:
            found[name] = value
        elif re.fullmatch(r"\d+", value) and re.fullmatch(r"\d+", before):
            found[name] = str(int(before) + int(value))
        elif re.fullmatch(r"-?[\d.]+", value) and re.fullmatch(r"-?[\d.]+", before):
            found[name] = str(max(float(before), float(value)))
        elif value not in before:
            found[name] = f"{before}, {value}"
    return [f"{name}: {value}" for name, value in found.items()]


def environment(scale: float) -> dict[str, str]:
    source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"TRILLORA_DOSE": "full", "TRILLORA_DOSE_SCALE": str(scale), "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return {**os.environ, **own}


# The table

HEAD = "| guarantee | how it is tested | observed | result | seconds |\n|---|---|---|---|---|"


def write_table(file: Path, page: str, names: tuple[str, ...], rows: list[Row], state: str) -> None:
    """Updates the table in a file. Rows that were not tested now stay, with their notes."""
    old = file.read_text("utf-8") if file.exists() else ""
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines() if line.startswith("| ")}
    notes = dict(re.findall(r"^- (.+?): (\d{4}-.*)$", old, re.MULTILINE))
    for row in rows:
        lines[row.guarantee] = str(row)
        notes[row.guarantee] = f"{time.strftime('%Y-%m-%d')}, {state}, {machine()}"
    shown = [name for name in names if name in lines]
    text = page.format(
        rows="\n".join([HEAD, *(lines[name] for name in shown)]),
        notes="\n".join(f"- {name}: {notes.get(name, 'not known')}" for name in shown),
    )
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(text, "utf-8")
    os.replace(new, file)


def commit(*written: Path) -> str:
    """The commit that was tested, if git is available. Files that are written by the test do not count as changes."""
    try:
        others = [f":!{file.relative_to(ROOT)}" for file in written]
        changes = " with changes" if _git("status", "--short", "--", ".", *others) else ""
        return f"commit {_git('rev-parse', '--short', 'HEAD')}{changes}"
    except (OSError, subprocess.CalledProcessError):
        return "commit not known"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    return f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
