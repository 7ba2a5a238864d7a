"""Runs the reliability tests at full scale: `make soak` writes dev/SOAK.md.

    python tools/soak.py                        everything: hours on two cores
    python tools/soak.py --part kills           one part; the other rows of the table do not change
    python tools/soak.py --scale 0.05           a trial at 5 % of the scale; prints the table instead of writing it

A row of the table is a guarantee and the tests that check it: tests of `make test-all`, run with TRILLORA_DOSE=full.
The row shows what the tests counted with `record_property`. Only goodput is measured here: it is a number, not a
property.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "dev" / "SOAK.md"
LIBRARIES = ("jax", "torch", "torchax", "transformers")


@dataclass(frozen=True)
class Guarantee:
    """A row of the table."""

    name: str
    part: str
    tested: str  # how it is tested, and how often
    tests: tuple[str, ...]  # prefixes of node ids below tests/: at least a file name and "::"
    alone: bool = False  # without parallel tests


GUARANTEES = (
    Guarantee(
        "R1 kill -9 loses no saved work",
        "kills",
        "200 kills of whole runs at random times, each run then compared bit for bit with an uninterrupted one; "
        "250 kills of a process that only writes checkpoints",
        ("test_interruptions.py::test_killed_at_random", "test_checkpoint.py::test_a_kill_at_any_instant"),
    ),
    Guarantee(
        "R2 resume is exact",
        "resume",
        "from every checkpoint of a 100-step run and of a 29-step run: two stages, dropout, packing, micro-batches",
        ("test_resume.py::test_resumed_from", "test_resume.py::test_optimizer_state"),
    ),
    Guarantee(
        "R3 corruption is detected",
        "rot",
        "1,000 bit flips, every bit of the checksums, truncations, deleted, added and swapped files",
        (
            "test_checkpoint.py::test_every_flipped_bit",
            "test_checkpoint.py::test_every_bit_of_the_checksums",
            "test_checkpoint.py::test_every_truncation",
            "test_checkpoint.py::test_deleted_added_and_swapped",
            "test_checkpoint.py::test_whole_checkpoints_under",
            "test_checkpoint.py::test_hostile_checksums",
            "test_resume.py::test_damaged_checkpoint",
        ),
    ),
    Guarantee(
        "R4 power loss",
        "rot",
        "recorded operations replayed with a crash after each, unsynced data dropped",
        ("test_storage.py::test_power_loss",),
    ),
    Guarantee(
        "R5 full or failing disk",
        "disk",
        "ENOSPC, EIO and read-only errors at every call; a whole run with a full disk at a checkpoint",
        (
            "test_storage.py::test_a_disk_that_fails",
            "test_storage.py::test_a_file_that_cannot_be_written",
            "test_storage.py::test_an_interrupted_remote_write_or_removal",
            "test_checkpoint.py::test_a_failed_save",
            "test_faults.py::test_full_disk",
            "test_best_checkpoint.py::test_full_disk",
            "test_faults.py::test_run_without_its_last",
        ),
    ),
    Guarantee(
        "R6 signals",
        "signals",
        "while training and compiling; 40 during evaluation and saving, half of them twice; exit within 10 s",
        ("test_interruptions.py::test_stop_signal", "test_interruptions.py::test_signals_during"),
    ),
    Guarantee(
        "R7 closed terminal",
        "signals",
        "standard output closed during a run; SIGHUP is one of the signals above",
        ("test_interruptions.py::test_run_continues", "test_checkpoint.py::test_a_listener_whose_terminal"),
    ),
    Guarantee(
        "R8 NaN and Inf",
        "numbers",
        "in loss, gradient and update, for each optimizer; a whole run with an infinite weight",
        (
            "test_step.py::test_a_loss_that_is_not_finite",
            "test_step.py::test_a_gradient_that_is_not_finite",
            "test_step.py::test_an_update_that_is_not_finite",
            "test_faults.py::test_batch_with_a_non_finite_loss",
        ),
    ),
    Guarantee(
        "R9 one bad batch",
        "numbers",
        "a batch of garbage among clean ones; 10 clean seeds, 1,400 simulated runs of 6,000 steps",
        (
            "test_promises.py::test_a_poisonous_batch",
            "test_promises.py::test_clean_runs",
            "test_divergence.py::test_a_healthy_run",
            "test_divergence.py::test_a_diverged_run",
        ),
    ),
    Guarantee(
        "R10 every row once per epoch",
        "data",
        "1, 3 and 8 processes, shuffled, packed or not, resumed; text split into documents",
        (
            "test_data.py::test_every_epoch_has",
            "test_data.py::test_processes_together",
            "test_data.py::test_packing_has_each_document",
            "test_data.py::test_unpacked_documents",
            "test_data.py::test_split_text",
        ),
    ),
    Guarantee("R11 device counts change", "devices", "1, 8, 1 devices", ("test_resume.py::test_devices_may_change",)),
    Guarantee(
        "R12 bad rows",
        "data",
        "10,000 fuzzed rows, 10,000 mutated rows of every format, mutated files of every kind",
        (
            "test_data_prepare.py::test_ten_thousand_fuzzed_rows",
            "test_data_prepare.py::test_bad_row_stops",
            "test_data_formats.py::test_ten_thousand_mutated_rows",
            "test_data_sources.py::test_mutated_files",
            "test_data_sources.py::test_corrupt_parquet",
            "test_hostile_data.py::",
        ),
    ),
    Guarantee(
        "R13 real data",
        "real data",
        "public data sets, downloaded; every count of the summary adds up",
        ("test_real_data.py::",),
    ),
    Guarantee(
        "R14 every trained document has supervised tokens",
        "data",
        "rows without an answer within the sequence length, rows too long, rows shortened: refused or counted",
        (
            "test_data.py::test_documents_without_trained_tokens",
            "test_data_prepare.py::test_rows_whose_answer",
            "test_data_prepare.py::test_rows_too_long",
            "test_data_prepare.py::test_truncation_shortens",
            "test_data_report.py::test_rows_too_long_are_counted",
            "test_data_report.py::test_nothing_left_to_train",
            "test_data_report.py::test_shortened_rows",
        ),
    ),
    Guarantee(
        "R15 the mask is correct",
        "masks",
        "10,000 random conversations over all template families and real tokenizers, against the tokenizer's own "
        "rendering",
        (
            "test_data_render.py::test_rendering_equals",
            "test_data_render.py::test_stop_token_is_trained",
            "test_data_render.py::test_marked_template",
            "test_data_render.py::test_questions_and_tool_results",
            "test_data_real_tokenizers.py::test_rendering_equals",
        ),
    ),
    Guarantee(
        "R16 the saved adapter is correct",
        "adapter",
        "loaded by PEFT for every architecture of the tests, and in a process without Trillora",
        (
            "test_adapters.py::test_peft_loads_our_adapter",
            "test_trainer.py::test_adapter_loads_in_peft",
            "test_evaluate.py::test_the_adapter_is_the_adapter",
        ),
    ),
    Guarantee(
        "R17 long runs",
        "long",
        "10,000 steps, 100 checkpoints in one process",
        ("test_promises.py::test_a_long_run",),
        alone=True,
    ),
    Guarantee(
        "R18 polite install",
        "install",
        "pip on the complete package lists of Colab's TPU and GPU images: nothing they have is changed",
        ("test_install.py::",),
    ),
    Guarantee(
        "R20 one owner",
        "owner",
        "a second process is refused, the lock of a dead process is taken over, many processes at once; two runs with "
        "the same checkpoint folder or URL",
        ("test_run_lock.py::", "test_checkpoint_owner.py::", "test_interruptions.py::test_second_process"),
    ),
    Guarantee(
        "S1 no pickle",
        "safety",
        "every unpickling during train, eval, generate, inspect, report and doctor; pickled models",
        (
            "test_promises.py::test_no_file_is_unpickled",
            "test_promises.py::test_the_audit_sees",
            "test_promises.py::test_pickled_weights",
            "test_source.py::test_folder_without_usable_weights",
        ),
    ),
    Guarantee(
        "S2 no remote code",
        "safety",
        "malicious model and tokenizer folders with auto_map",
        ("test_source.py::test_code_in_a", "test_source.py::test_model_that_transformers_supports"),
    ),
    Guarantee(
        "S3 archives",
        "safety",
        "parent paths, absolute paths, links, devices, bombs, too many members, false headers",
        (
            "test_data_sources.py::test_hostile_tar",
            "test_data_sources.py::test_hostile_zip",
            "test_data_sources.py::test_an_archive_with_too_many",
            "test_data_sources.py::test_a_tar_header",
            "test_data_sources.py::test_compression_bombs",
            "test_data_sources.py::test_members_after_a_bomb",
            "test_data_sources.py::test_many_small_bombs",
        ),
    ),
    Guarantee(
        "S4 control tokens",
        "masks",
        "every control token in every text field of 10,000 hostile conversations, over all template families and real "
        "tokenizers with their own flags",
        (
            "test_control_tokens.py::",
            "test_data_render.py::test_control_tokens_planted",
            "test_data_real_tokenizers.py::test_control_tokens_planted",
            "test_prompts.py::test_control_tokens",
        ),
    ),
    Guarantee(
        "S5 hostile templates",
        "templates",
        "endless loops, gigabytes, recursion, escapes from the sandbox, mutated templates",
        ("test_hostile_templates.py::", "test_data_worker.py::test_hostile_template", "test_data_worker.py::test_row"),
    ),
    Guarantee(
        "S6 secrets",
        "safety",
        "canary values in the environment, the recipe and the command line",
        (
            "test_promises.py::test_no_secret_is_printed",
            "test_promises.py::test_no_error_repeats",
            "test_run_report.py::test_no_secret_reaches",
            "test_storage.py::test_secrets_of_a_url",
        ),
    ),
    Guarantee(
        "S7 report pages",
        "safety",
        "markup in every field, in a real browser if one is installed",
        (
            "test_run_report.py::test_markup_in_every_field",
            "test_run_report.py::test_a_browser_shows",
            "test_run_report.py::test_a_hostile_run",
            "test_data_report.py::test_data_on_the_page",
        ),
    ),
    Guarantee(
        "S8 names",
        "safety",
        "malicious names of runs, data and 10,000 stages; all writes of a run are observed",
        (
            "test_promises.py::test_strange_names",
            "test_promises.py::test_no_stage_is_named",
            "test_storage.py::test_no_name_leads_out",
            "test_storage.py::test_a_link_in_place",
        ),
    ),
    Guarantee(
        "S9 changed inputs are refused",
        "resume",
        "recipe, data, model or tokenizer changed between two starts",
        ("test_resume.py::test_changed_inputs", "test_resume.py::test_changes_are_accepted", "test_token_cache.py::"),
    ),
    Guarantee(
        "S10 dependencies",
        "install",
        "the lock files have every requirement with its hashes, and are what the tests run with; the linter's security "
        "rules are part of `make lint`",
        ("test_locks.py::",),
    ),
    Guarantee(
        "S11 hostile files and commands",
        "fuzz",
        "10,000 recipes, 10,000 changes of a model's description, 2,000 of checkpoints, adapters, 5,000 command lines",
        (
            "test_hostile_recipes.py::",
            "test_hostile_models.py::",
            "test_hostile_adapters.py::",
            "test_hostile_checkpoints.py::",
            "test_hostile_terminal.py::",
            "test_hostile_environment.py::",
            "test_isolation.py::",
        ),
    ),
    Guarantee(
        "S12 changed folders",
        "mutations",
        "1,350 changes of runs, models, recipes, adapters and exports, each followed by a real command of 13 verbs "
        "with secrets in its environment; connections to other machines are recorded",
        ("test_mutations.py::",),
    ),
)
GOODPUT = "R19 goodput"
GOODPUT_TESTED = "time lost per preemption with a warm compile cache; one preemption every 60 s for 5 minutes"
PARTS = (*dict.fromkeys(guarantee.part for guarantee in GUARANTEES), "goodput")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel test processes")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the full scale, for a trial; does not write the table"
    )
    parser.add_argument("--commit", help="the commit for the table, if git is not available")
    parser.add_argument("--model", default="smollm2", help="model for the goodput measurement: smollm2 or tiny")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows: list[Row] = []
    for part in args.part or PARTS:
        say(f"part {part}")
        if part == "goodput":
            new = [measure_goodput(args.model, args.scale)]
        else:
            new = run_part([one for one in GUARANTEES if one.part == part], args.workers, args.scale)
        for row in new:
            say(str(row))
        rows += new
        if args.scale == 1.0:
            write_table(rows, args.commit or commit())  # after each part, so that an interruption loses little
    if args.scale != 1.0:
        print("\n".join(["", *HEAD.splitlines(), *map(str, rows)]))
    failed = [row.guarantee for row in rows if not row.passed]
    say(f"failed: {', '.join(failed)}" if failed else f"all {len(rows)} passed")
    return 1 if failed else 0


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


# Tests as rows


def run_part(guarantees: list[Guarantee], workers: int, scale: float) -> list[Row]:
    """Runs all tests of a part in one pytest, so that they share fixtures."""
    tests = [test for guarantee in guarantees for test in guarantee.tests]
    nodes = [node for node in collect(sorted({test.partition("::")[0] for test in tests})) if _matches(node, tests)]
    alone = any(guarantee.alone for guarantee in guarantees)
    with tempfile.TemporaryDirectory() as folder:
        results = run_tests(nodes, 0 if alone else workers, scale, Path(folder))
    return [row_of(guarantee, results) for guarantee in guarantees]


def collect(files: list[str]) -> list[str]:
    """The node ids of all tests in the files."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *(f"tests/{file}" for file in files)]
    done = subprocess.run(command, cwd=ROOT, env=environment(1.0), capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def _matches(node: str, tests: list[str]) -> bool:
    return any(node.removeprefix("tests/").startswith(test) for test in tests)


@dataclass(frozen=True)
class Result:
    node: str  # file and function
    outcome: str  # passed, failed, skipped
    seconds: float
    properties: tuple[tuple[str, str], ...]


def run_tests(nodes: list[str], workers: int, scale: float, folder: Path) -> list[Result]:
    functions = list(dict.fromkeys(node.partition("[")[0] for node in nodes))
    report, log = folder / "report.xml", folder / "log"
    log.touch()
    # The default format, xunit2, has no properties.
    options = ["-v", f"--junitxml={report}", "-o", "junit_family=xunit1", "-n", str(workers)]
    command = [sys.executable, "-m", "pytest", *options, *functions]
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
    """Passed if all tests of the guarantee were found, none failed and not all were skipped."""
    own = [result for result in results if _matches(result.node, list(guarantee.tests))]
    missing = [test for test in guarantee.tests if not any(result.node.startswith(test) for result in own)]
    num_passed = sum(result.outcome == "passed" for result in own)
    failed = [result.node for result in own if result.outcome == "failed"]
    skipped = [result.node for result in own if result.outcome == "skipped"]
    observed = [*merge([pair for result in own for pair in result.properties]), f"{num_passed} tests passed"]
    observed += [f"failed: {', '.join(failed)}"] if failed else []
    observed += [f"not found: {', '.join(missing)}"] if missing else []
    observed += [f"skipped: {', '.join(node.partition('::')[2] for node in skipped)}"] if skipped else []
    passed = not failed and not missing and num_passed > 0
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


# Goodput


def measure_goodput(model: str, scale: float) -> Row:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests"), str(ROOT / "src")]
    import soak_goodput

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak_goodput.measure(Path(folder), model, 60 * scale, 300 * scale, say)
    seconds = time.monotonic() - started
    return Row(GOODPUT, GOODPUT_TESTED, figures.text(), figures.passed, seconds)


# The table

HEAD = "| guarantee | how it is tested | observed | result | seconds |\n|---|---|---|---|---|"


def write_table(rows: list[Row], state: str) -> None:
    """Updates the table. Rows that were not tested now stay, with their notes."""
    notes = dict(re.findall(r"^- (\S+): (.*)$", TABLE.read_text("utf-8"), re.MULTILINE)) if TABLE.exists() else {}
    lines = {}
    if TABLE.exists():
        for line in TABLE.read_text("utf-8").splitlines():
            if re.match(r"\| [RS]\d+ ", line):
                lines[line.split(" ", 2)[1]] = line
    for row in rows:
        number = row.guarantee.partition(" ")[0]
        lines[number], notes[number] = str(row), f"{time.strftime('%Y-%m-%d')}, {state}, {machine()}"
    order = sorted(lines, key=lambda number: (number[0], int(number[1:])))
    text = PAGE.format(
        head=HEAD,
        rows="\n".join(lines[number] for number in order),
        notes="\n".join(f"- {number}: {notes.get(number, 'not known')}" for number in order),
    )
    TABLE.parent.mkdir(exist_ok=True)
    new = TABLE.with_suffix(".new")
    new.write_text(text, "utf-8")
    os.replace(new, TABLE)


def commit() -> str:
    """The commit that was tested, if git is available."""
    try:
        changes = " with changes" if _git("status", "--short", "--", ".", f":!{TABLE.relative_to(ROOT)}") else ""
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


PAGE = """# Reliability tests at full scale

Written by `make soak`; run one part with `make soak PART=kills`. The seconds are the sum over the tests, which run in
parallel.

{head}
{rows}

Date, commit and machine of each row:

{notes}
"""


if __name__ == "__main__":
    sys.exit(main())
