"""Which models fit on which TPU slices, from compiled steps: `make atlas` writes docs/ATLAS.md and docs/atlas.html.

    python tools/atlas.py                      compile what is missing in docs/atlas.jsonl, then write the pages
    python tools/atlas.py --minutes 15         the most useful cells first; run it again to resume
    python tools/atlas.py --only 'Qwen/*:v5e-8'
    python tools/atlas.py --fresh              forget the answers so far, for example after an update of libtpu
    python tools/atlas.py --render             only write the pages; works on any machine

Compiling needs x86-64 Linux with libtpu. Each step is compiled in a process of its own, through preflight, bounded in
time and memory. An answer is written as soon as it is known; a compiler that fails is an answer, too.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from atlas_pages import render
from atlas_steps import (
    MODELS,
    SLICES,
    Ask,
    Step,
    append_step,
    batch_size_of,
    config_of,
    next_ask,
    of_cell,
    question,
    read_steps,
    step_of,
    write_steps,
)

from trillora.devices.slices import find_slice
from trillora.errors import TrilloraError
from trillora.events import ignore_events
from trillora.preflight.client import WHERE_IT_RUNS, CompilerClient, choose_method, versions
from trillora.preflight.question import Question
from trillora.preflight.result import Method, StageResult

ROOT = Path(__file__).parents[1]
ANSWERS = ROOT / "docs" / "atlas.jsonl"
GIB = 2**30
USUAL_GIB = 4  # a compiler process stays below this; bounds the number of processes
GRACE_SECONDS = 30  # after the end of the time budget, for steps that are nearly done

Answerer = Callable[[Question, "Limits"], StageResult]


@dataclass
class Limits:
    """Bounds of one compiler process, and what it used."""

    seconds: float
    gib: float
    used_seconds: float = 0.0
    used_gib: float = 0.0
    stopped: str | None = None  # why it was stopped


class Watch(threading.Thread):
    """Kills a process that exceeds its limits."""

    def __init__(self, process: subprocess.Popen[str], limits: Limits) -> None:
        super().__init__(daemon=True)
        self._process, self._limits, self._done = process, limits, threading.Event()

    def __enter__(self) -> Watch:
        self._since = time.monotonic()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        limits = self._limits
        while not self._done.wait(0.25):
            limits.used_seconds = time.monotonic() - self._since
            try:
                limits.used_gib = max(limits.used_gib, psutil.Process(self._process.pid).memory_info().rss / GIB)
            except psutil.Error:
                continue
            if limits.used_seconds > limits.seconds:
                limits.stopped = f"stopped after {limits.seconds:.0f} s"
            elif limits.used_gib > limits.gib:
                limits.stopped = f"stopped at {limits.gib:g} GiB of memory"
            if limits.stopped:
                self._process.kill()
                return


def ask_compiler(asked: Question, limits: Limits) -> StageResult:
    """The answer of a process started for this question."""
    with CompilerClient(asked.method) as client, Watch(client.get_ready(find_slice(asked.slice)), limits):
        return client.ask(asked, ignore_events)


@dataclass
class Sweep:
    """Fills cells in the order of `cells`, in several threads. `answer` is replaced in tests."""

    file: Path
    cells: Sequence[tuple[str, str]]
    method: Method
    steps: list[Step]
    minutes: float | None = None
    seconds_per_step: float = 300.0
    gib_per_step: float = 12.0
    answer: Answerer = ask_compiler
    _busy: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known = {cell: [s for s in of_cell(self.steps, *cell) if s.method == self.method] for cell in self.cells}
        self._asks = {cell: next_ask(*cell, known) for cell, known in self._known.items()}
        self._changed = threading.Condition()
        self._end = time.monotonic() + 60 * self.minutes if self.minutes is not None else float("inf")
        self._made_with = made_with(self.method)
        self._num_answers = 0

    def run(self, num_workers: int) -> int:
        """The number of new answers."""
        with tempfile.TemporaryDirectory(prefix="trillora-atlas-") as folder:
            self._folder = Path(folder)
            workers = [threading.Thread(target=self._work, daemon=True) for _ in range(num_workers)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        return self._num_answers

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            (model, slice_name), ask, first = taken
            step = self._step(model, slice_name, ask, first)
            with self._changed:
                self._busy.discard((model, slice_name))
                if step is not None:
                    self._learn((model, slice_name), step)
                    append_step(self.file, step)
                    self._num_answers += 1
                    print(self._said(step), flush=True)
                self._changed.notify_all()

    def _take(self) -> tuple[tuple[str, str], Ask, Step | None] | None:
        """The next ask, of a cell that is not busy; None when the sweep is over. First steps come before the searches
        for the longest sequence, so that little time gives many cells."""
        with self._changed:
            while time.monotonic() < self._end:
                asks = [(cell, ask) for cell, ask in self._asks.items() if ask is not None and cell not in self._busy]
                if asks:
                    cell, ask = min(asks, key=lambda pair: pair[1].is_long)
                    self._busy.add(cell)
                    return cell, ask, next((step for step in self._known[cell] if not step.is_long), None)
                if not self._busy:
                    return None
                self._changed.wait(timeout=1.0)
        return None

    def _learn(self, cell: tuple[str, str], step: Step) -> None:
        self.steps.append(step)
        self._known[cell].append(step)
        self._asks[cell] = next_ask(*cell, self._known[cell])

    def _step(self, model: str, slice_name: str, ask: Ask, first: Step | None) -> Step | None:
        """The answer; None if the time budget ended before it."""
        limits = Limits(min(self.seconds_per_step, self._end + GRACE_SECONDS - time.monotonic()), self.gib_per_step)
        folder = self._folder / model
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config_of(model)))
            result = self.answer(question(model, slice_name, ask, first, self.method, folder), limits)
        except Exception as error:  # this cell has no answer; the others may have one
            if limits.stopped and limits.seconds < self.seconds_per_step:
                return None
            reason = limits.stopped or (error.what if isinstance(error, TrilloraError) else repr(error))
            return Step(
                model,
                slice_name,
                ask.tokens,
                ask.is_long,
                self.method,
                fits=False,
                failed=True,
                problem=reason[:300],
                batch_size=batch_size_of(slice_name, ask),
                **self._took(limits),
            )
        return step_of(model, slice_name, ask, result, self.method, **self._took(limits))

    def _took(self, limits: Limits) -> dict[str, Any]:
        return {
            "took_seconds": round(limits.used_seconds, 1),
            "took_gib": round(limits.used_gib, 1),
            "made_with": self._made_with,
        }

    def _said(self, step: Step) -> str:
        verdict = "FAILED" if step.failed else "fits" if step.fits else "too large"
        memory = f"{step.peak_gib:7.2f} GiB" if step.peak_gib is not None else "          ?"
        done = sum(ask is None for ask in self._asks.values())
        took = f"took {step.took_seconds:5.1f} s, {step.took_gib:4.1f} GiB"
        problem = f"  {step.problem}" if step.failed else ""
        return (
            f"{done:3}/{len(self.cells)} cells  {step.model:38} {step.slice:7} {step.tokens:6} tokens  "
            f"{verdict:9} {memory}  {took}{problem}"
        )


def made_with(method: Method) -> str:
    found = versions()
    names = ("libtpu", "jax", "transformers") if method == "compiler" else ("jax", "transformers")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    code = f"trillora {commit.stdout.strip() or 'of an unknown commit'}"
    return f"{', '.join([code, *(f'{name} {found[name]}' for name in names)])}; {time.strftime('%Y-%m-%d')}"


def selected(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Cells by patterns such as `Qwen/*:v5e-8`, all if there are none; the most useful first."""
    cells = [(model, slice_name) for slice_name in SLICES for model in MODELS]
    if not patterns:
        return cells
    found = [cell for cell in cells if any(fnmatch.fnmatch(":".join(cell), pattern) for pattern in patterns)]
    if not found:
        raise TrilloraError(
            f"No cell of the atlas matches {' '.join(patterns)}.",
            where="--only",
            do=f"use a pattern such as 'Qwen/*:v5e-8'; models: {' '.join(MODELS)}; slices: {' '.join(SLICES)}",
        )
    return found


def default_workers() -> int:
    by_memory = int(psutil.virtual_memory().available / GIB / USUAL_GIB)
    return max(1, min(os.cpu_count() or 1, by_memory))


def compile_missing(args: argparse.Namespace) -> None:
    method = choose_method(args.estimate)
    if method == "estimate" and not args.estimate:
        raise TrilloraError(
            "The TPU compiler does not exist for this machine.",
            where="tools/atlas.py",
            do=f"run it on {WHERE_IT_RUNS}; --render writes the pages from the answers so far; --estimate fills cells "
            "with estimates, which the pages mark as such",
        )
    cells = selected(args.only)
    steps = [] if args.fresh else [step for step in read_steps(args.answers) if not (args.retry and step.failed)]
    args.answers.parent.mkdir(parents=True, exist_ok=True)
    write_steps(args.answers, steps)
    limits = {"seconds_per_step": args.step_seconds, "gib_per_step": args.step_gib}
    sweep = Sweep(args.answers, cells, method, steps, args.minutes, **limits)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trillora-atlas-", ignore_cleanup_errors=True) as scratch:
        os.environ["TMPDIR"] = scratch  # of the compiler processes: one that is killed leaves files behind
        try:
            num_answers = sweep.run(args.jobs)
        finally:
            write_steps(args.answers, sweep.steps)
    took = sorted(step.took_seconds for step in sweep.steps if step.took_seconds)
    print(
        f"{num_answers} new answers in {(time.monotonic() - started) / 60:.1f} min with {args.jobs} processes; "
        f"per step: {took[len(took) // 2] if took else 0:.0f} s (median), "
        f"{max((step.took_gib for step in sweep.steps), default=0):.1f} GiB at most."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, metavar="N", help="time budget (default: until all cells are done)")
    parser.add_argument("--jobs", type=int, default=default_workers(), help="processes (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL:SLICE", help="a pattern; may be repeated")
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="FILE", help="default: docs/atlas.jsonl")
    parser.add_argument("--pages", type=Path, default=None, metavar="FOLDER", help="default: the folder of --answers")
    parser.add_argument("--fresh", action="store_true", help="forget the answers so far")
    parser.add_argument("--retry", action="store_true", help="ask again where the compiler failed")
    parser.add_argument("--estimate", action="store_true", help="estimates instead of compiled steps")
    parser.add_argument("--render", action="store_true", help="write the pages, compile nothing")
    parser.add_argument("--step-seconds", type=float, default=300.0, metavar="S", help="time limit of one step")
    parser.add_argument("--step-gib", type=float, default=12.0, metavar="G", help="memory limit of one step")
    args = parser.parse_args()
    try:
        if not args.render:
            compile_missing(args)
        folder = args.pages or args.answers.parent
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render(read_steps(args.answers)).items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"{folder / name} written.")
    except TrilloraError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
