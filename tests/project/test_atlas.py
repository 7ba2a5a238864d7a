"""The fit atlas: the search for the longest sequence, sweeps that are stopped and resumed, and its pages.

A stand-in takes the place of the TPU compiler where there is none: a step needs a fixed amount of memory and an amount
per token. One test asks the real compiler.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atlas
import atlas_pages
import atlas_steps
import pytest
from atlas import Limits, Sweep, Watch, ask_compiler, main, selected
from atlas_pages import cells_of, render
from atlas_steps import MODELS, SLICES, Step, lengths, limit_of, next_ask, of_cell, read_steps, write_steps
from browser import Browser, needs_chromium
from dose import dose
from html_pages import HOSTILE, Page

from trillora.devices.slices import find_slice
from trillora.errors import TrilloraError
from trillora.preflight.client import has_compiler_builds
from trillora.preflight.question import Question
from trillora.preflight.result import StageResult, StepTimes
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import MeshSection

PAGES = ("ATLAS.md", "atlas.html")
ANSWERS = Path(__file__).parents[2] / "docs" / "atlas.jsonl"


@dataclasses.dataclass
class StandIn:
    """Answers like the compiler process. Sizes are GiB; `factors` is the memory of the other rematerializations."""

    fixed: float = 4.0
    per_token: float = 1e-3
    factors: tuple[tuple[str, float], ...] = (("none", 8.0), ("linear", 3.0), ("wide", 2.0), ("full", 1.0))
    asked: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)

    def __call__(self, question: Question, limits: Limits) -> StageResult:
        stage, place = question.stage, find_slice(question.slice)
        train, limit = stage.train, limit_of(place.name)
        self.asked.append((stage.model.name, place.name, train.sequence_length))
        sizes = [train.batch_size // 2**k for k in range(7)]
        if train.micro_batch_size != "auto":
            sizes = [train.micro_batch_size]
        remats = dict(self.factors)
        if stage.engine.remat != "auto":
            remats = {stage.engine.remat: remats[stage.engine.remat]}
        common = {"hbm_limit_gib": limit, "tried": (), "weights_bytes": 2 * 10**9, "largest_tensor_bytes": 1}
        peak = 0.0
        for size in [size for size in sizes if size >= place.num_devices]:
            for remat, factor in remats.items():
                tokens = train.sequence_length * size // place.num_devices
                peak = self.fixed + factor * self.per_token * tokens
                if peak <= 0.97 * limit:
                    settings = _settings(size, remat, place.num_devices)
                    step = StepTimes(0.5 * factor, 0.1, 1e12, 20.0, "compiler", None)
                    memory = {"base": self.fixed, "activations": peak - self.fixed}
                    return StageResult(peak, memory=memory, settings=settings, step=step, **common)  # type: ignore[arg-type]
        # As from preflight: the smallest figure may be an estimate, the reason has the compiler's.
        problem = f"micro-batch 8, remat full: needs {peak:.2f} GiB per device, the limit is {limit:.2f} GiB."
        return StageResult(peak / 2, problem=problem, **common)  # type: ignore[arg-type]

    def fits(self, tokens: int, slice_name: str) -> bool:
        return self.fixed + self.per_token * tokens <= 0.97 * limit_of(slice_name)


def _settings(micro_batch_size: int, remat: Any, num_devices: int) -> StepSettings:
    mesh = MeshSection(fsdp=num_devices)
    return StepSettings("tpu", num_devices, mesh, "bfloat16", "scan", "splash", 1024, remat, micro_batch_size)


def sweep(file: Path, cells: list[tuple[str, str]], answer: Callable[..., StageResult], **options: Any) -> Sweep:
    return Sweep(file, cells, "compiler", read_steps(file), answer=answer, **options)


def test_the_search_finds_the_longest_sequence_in_few_steps(tmp_path: Path) -> None:
    """Compared with every length, for random sizes of models."""
    rng, asks, seen = random.Random(0), [], set()
    for number in range(dose(60, 1500)):
        cell = rng.choice(MODELS), rng.choice(SLICES)
        limit = limit_of(cell[1])
        compiler = StandIn(rng.uniform(0.05, 1.1) * limit, 10 ** rng.uniform(-5.5, -2) * limit / 16)
        file = tmp_path / f"{number}.jsonl"
        sweep(file, [cell], compiler).run(1)
        tried = [tokens for tokens in lengths(cell[0]) if tokens in (512, 1024) or compiler.fits(2048, cell[1])]
        longest = max((tokens for tokens in tried if compiler.fits(tokens, cell[1])), default=0)
        [found] = cells_of(read_steps(file))
        assert (found.longest, found.longest_is_known) == (longest, True), (cell, compiler)
        assert found.verdict == ("GO" if compiler.fits(2048, cell[1]) else "NO-GO")
        assert len(compiler.asked) == len(set(compiler.asked)) + (compiler.asked.count((*cell, 2048)) > 1)
        for step in read_steps(file):
            if not step.fits:
                assert step.peak_gib is not None and step.peak_gib > 0.96 * limit  # not half of it
        asks.append(len(compiler.asked))
        seen.add(longest)
    assert max(asks) <= 1 + atlas_steps.MAX_LONG and sum(asks) / len(asks) < 3.2
    assert len(seen) > 8


def test_a_stopped_sweep_resumes_where_it_was(tmp_path: Path) -> None:
    cells = selected(["Qwen/*:v5e-*"])
    assert len(cells) == 8 * 4
    whole = StandIn()
    sweep(tmp_path / "whole.jsonl", cells, whole).run(3)
    parts: list[StandIn] = []
    while not parts or parts[-1].asked:
        part = StandIn()
        parts.append(part)
        running = sweep(tmp_path / "parts.jsonl", cells, part)

        def answer(question: Question, limits: Limits, part: StandIn = part, running: Sweep = running) -> Any:
            if len(part.asked) >= 10:
                running._end = 0.0
            return part(question, limits)

        running.answer = answer
        running.run(3)
        with open(tmp_path / "parts.jsonl", "a") as file:
            file.write('{"model": "Qwen/Qw')  # killed while it wrote
        write_steps(tmp_path / "parts.jsonl", read_steps(tmp_path / "parts.jsonl"))
    write_steps(tmp_path / "whole.jsonl", read_steps(tmp_path / "whole.jsonl"))
    assert len(parts) > 4
    assert sorted(ask for part in parts for ask in part.asked) == sorted(whole.asked)
    names = ("whole.jsonl", "parts.jsonl")
    one, other = ([dataclasses.replace(s, took_seconds=0.0) for s in read_steps(tmp_path / name)] for name in names)
    assert one == other and len(one) == len(whole.asked)


def test_the_most_useful_cells_come_first_and_time_ends_a_sweep(tmp_path: Path) -> None:
    compiler = StandIn()
    cells = selected([])
    assert len(cells) >= 20 * 10 and len(set(cells)) == len(cells)
    running = sweep(tmp_path / "a.jsonl", cells, compiler)
    running.answer = lambda question, limits: _ended(running, compiler, question, limits)
    assert running.run(1) == 5
    assert compiler.asked == [(model, "v5e-8", 2048) for model in MODELS[:5]]
    assert sweep(tmp_path / "a.jsonl", cells, compiler, minutes=0.0).run(2) == 0


def _ended(running: Sweep, compiler: StandIn, question: Question, limits: Limits) -> StageResult:
    result = compiler(question, limits)
    if len(compiler.asked) == 5:
        running._end = 0.0
    return result


def test_a_failing_compiler_is_an_answer_and_the_other_cells_continue(tmp_path: Path) -> None:
    file, cells = tmp_path / "a.jsonl", selected(["google/*:v6e-1"])
    compiler = StandIn()

    def answer(question: Question, limits: Limits) -> StageResult:
        if question.stage.model.name == "google/gemma-2-9b":
            raise TrilloraError("The compiler process ended without an answer.", do="try again")
        if question.stage.model.name == "google/gemma-2-2b":
            limits.stopped = "stopped after 300 s"
            raise TrilloraError("killed", do="")
        return compiler(question, limits)

    sweep(file, cells, answer).run(2)
    steps = read_steps(file)
    failed = {step.model: step.problem for step in steps if step.failed}
    assert failed == {
        "google/gemma-2-9b": "The compiler process ended without an answer.",
        "google/gemma-2-2b": "stopped after 300 s",
    }
    assert {step.model for step in steps if step.fits} == {model for model, _ in cells} - set(failed)
    assert sweep(file, cells, compiler).run(2) == 0  # not asked again
    page = render(steps)["ATLAS.md"]
    assert "| gemma-2-9b | v6e-1 | The compiler process ended without an answer. |" in page
    write_steps(file, [step for step in steps if not step.failed])  # --retry
    assert sweep(file, cells, compiler).run(2) > 0
    assert not any(step.failed for step in read_steps(file))


def test_a_process_that_exceeds_its_limits_is_killed() -> None:
    hungry = "import time\nx = bytearray(300 << 20)\ntime.sleep(60)"
    cases = (("import time; time.sleep(60)", Limits(0.5, 10.0), "stopped after"), (hungry, Limits(60, 0.2), "GiB"))
    for program, limits, reason in cases:
        process = subprocess.Popen([sys.executable, "-S", "-c", program], text=True)
        with Watch(process, limits):
            assert process.wait(timeout=30) < 0
        assert limits.stopped is not None and reason in limits.stopped
    limits = Limits(60, 10)
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"], text=True) as process, Watch(process, limits):
        process.wait()
    assert limits.stopped is None and threading.active_count() < 20


def test_estimates_are_marked_and_give_way_to_compiled_steps(tmp_path: Path) -> None:
    file, cells = tmp_path / "a.jsonl", selected(["Qwen/Qwen3-8B:v5e-8", "Qwen/Qwen3-8B:v6e-8"])
    Sweep(file, cells, "estimate", [], answer=StandIn()).run(1)
    estimated = read_steps(file)
    pages = render(estimated)
    assert all("0 compiled and 2 estimated (≈)" in page for page in pages.values())
    assert "| *≈ " in pages["ATLAS.md"] and pages["atlas.html"].count("≈ GO") == 2
    sweep(file, cells[:1], StandIn()).run(1)
    write_steps(file, read_steps(file))
    steps = read_steps(file)
    methods = {step.slice: step.method for step in steps}
    assert methods == {"v5e-8": "compiler", "v6e-8": "estimate"}
    assert len(of_cell(steps, *cells[0])) == len(of_cell(estimated, *cells[0]))
    assert render(steps)["atlas.html"].count("≈ GO") == 1
    assert all("1 compiled and 1 estimated (≈)" in page for page in render(steps).values())


def test_a_time_from_the_estimate_is_marked_in_a_compiled_cell() -> None:
    step = example("Qwen/Qwen3-8B", "v5e-8", timed_by="estimate")
    pages = render([step])
    assert all("≈ 262,144" in page for page in pages.values())
    assert not any("≈ 262,144" in page for page in render([dataclasses.replace(step, timed_by="compiler")]).values())


def example(model: str, slice_name: str, **changed: Any) -> Step:
    settings = _settings(64, "full", find_slice(slice_name).num_devices).to_dict()
    values: dict[str, Any] = {
        "tokens": 2048,
        "is_long": False,
        "method": "compiler",
        "fits": True,
        "made_with": "libtpu 1; 2026-11-16",
        "batch_size": 64,
        "peak_gib": 10.0,
        "fixed_gib": 4.0,
        "seconds": 0.5,
        "timed_by": "compiler",
        "flops": 4e14,
        "settings": settings,
        "num_parameters": 8 * 10**9,
    }
    return Step(model, slice_name, **{**values, **changed})


def test_models_with_older_answers_are_named() -> None:
    steps = [example("Qwen/Qwen3-8B", "v5e-8"), example("Qwen/Qwen3-4B", "v5e-8", made_with="libtpu 2; 2026-11-18")]
    for page in render(steps).values():
        assert "1 compiled with libtpu 1; 2026-11-16, by an older version of Trillora: Qwen3-8B" in page
        assert page.count("by an older version") == 1 and "1 compiled with libtpu 2; 2026-11-18<" in page.replace(
            "\n", "<"
        )


def test_the_pages_begin_with_the_versions_that_made_them() -> None:
    steps = [
        example("Qwen/Qwen3-8B", "v5e-8"),
        example("Qwen/Qwen3-4B", "v5e-8", made_with="trillora a, libtpu 2; day"),
    ]
    steps.append(example("Qwen/Qwen3-8B", "v5e-8", tokens=4096, is_long=True))
    for page in render(steps).values():
        assert "Steps of 2048 tokens: 1 with libtpu 1, 2026-11-16; 1 with trillora a, libtpu 2, day. Longest" in page
        assert "Of 2 of these 3 steps, the commit of Trillora was not recorded." in page
    assert "All by one version: libtpu 1; 2026-11-16." in render([steps[0], steps[2]])["ATLAS.md"]


def test_hours_and_cost_follow_from_the_step() -> None:
    """By hand: 64 sequences of 2048 tokens in half a second on eight chips of 1.20 dollars per hour."""
    [cell] = cells_of([example("Qwen/Qwen3-8B", "v5e-8")])
    assert cell.tokens_per_second == 262_144
    assert cell.hours_per_million == pytest.approx(1e6 / 262_144 / 3600)
    assert cell.cost_per_million == pytest.approx(1e6 / 262_144 / 3600 * 9.60)
    assert cell.share_of_peak == pytest.approx(4e14 / (0.5 * 8 * 197e12))
    [four_chips] = cells_of([example("Qwen/Qwen3-8B", "v5p-8")])
    assert four_chips.cost_per_million == pytest.approx(1e6 / 262_144 / 3600 * 16.80)
    [no_price] = cells_of([example("Qwen/Qwen3-8B", "7x-8")])
    assert no_price.cost_per_million is None
    [refused] = cells_of([example("Qwen/Qwen3-8B", "v5e-1", fits=False, seconds=None, settings=None, flops=None)])
    assert (refused.verdict, refused.tokens_per_second, refused.cost_per_million) == ("NO-GO", None, None)


def test_text_from_the_compiler_cannot_become_part_of_the_pages() -> None:
    steps = [example("Qwen/Qwen3-8B", "v5e-8", fits=False, failed=True, problem=HOSTILE, made_with=HOSTILE)]
    pages = render(steps)
    clean = render([dataclasses.replace(steps[0], problem="x", made_with="x")])
    assert Page(pages["atlas.html"]).names == Page(clean["atlas.html"]).names
    assert "<script>" not in pages["ATLAS.md"] and "<img" not in pages["ATLAS.md"]


@needs_chromium
def test_the_page_sorts_and_filters_in_the_browser_and_loads_nothing(tmp_path: Path) -> None:
    cells = selected(["Qwen/*:v[56]e-8", "meta-llama/*:v[56]e-8"])
    file = tmp_path / "a.jsonl"
    sweep(file, cells, StandIn(fixed=3.0)).run(1)
    seconds = random.Random(1)
    steps = [dataclasses.replace(s, seconds=s.seconds and seconds.uniform(0.001, 5)) for s in read_steps(file)]
    steps[0] = dataclasses.replace(steps[0], seconds=None)  # an empty cell
    (tmp_path / "atlas.html").write_text(render(steps)["atlas.html"])
    column = list(atlas_pages.COLUMNS).index("tokens/s") + 1
    speeds = sorted(cell.tokens_per_second for cell in cells_of(steps) if cell.tokens_per_second)

    def shown(browser: Browser) -> list[float | None]:
        values = browser.evaluate(
            f"[...document.querySelectorAll('tbody tr:not([hidden]) td:nth-child({column})')].map(e => e.dataset.value)"
        )
        return [float(value) if value else None for value in values]

    with Browser(tmp_path, width=1500) as browser:
        browser.open((tmp_path / "atlas.html").as_uri())
        for expected in (speeds, speeds[::-1]):
            browser.click(f"th:nth-child({column}) button")
            assert shown(browser) == [pytest.approx(speed, rel=1e-5) for speed in expected] + [None]
        browser.type("#search", "qwen3-8b")
        assert len(shown(browser)) == 2 and browser.text("#count") == [f"2 of {len(cells)}"]
        browser.evaluate(
            "(e => { e.value = 'v6e-8'; e.dispatchEvent(new Event('input')) })(document.querySelector('select'))"
        )
        assert len(shown(browser)) == 1
        assert browser.console == []
        assert browser.requested == [(tmp_path / "atlas.html").as_uri()]


def test_the_pages_on_disk_are_what_render_makes_of_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["atlas.py", "--render", "--pages", str(tmp_path)])
    assert main() == 0
    for name in PAGES:
        assert (tmp_path / name).read_bytes() == (ANSWERS.parent / name).read_bytes(), "run tools/atlas.py --render"
    steps = read_steps(ANSWERS)
    write_steps(tmp_path / "sorted.jsonl", steps)
    assert (tmp_path / "sorted.jsonl").read_bytes() == ANSWERS.read_bytes()


@pytest.mark.skipif(has_compiler_builds(), reason="libtpu exists for this machine")
def test_without_a_compiler_nothing_is_estimated_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["atlas.py", "--answers", str(tmp_path / "a.jsonl")])
    assert main() == 2
    assert "--render" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["atlas.py", "--estimate", "--only", "no:such", "--answers", str(tmp_path / "a")])
    assert main() == 2
    assert "Qwen/*:v5e-8" in capsys.readouterr().err


@pytest.mark.tpu_compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has wheels for x86-64 Linux only")
def test_a_small_real_cell(tmp_path: Path) -> None:
    file, cell = tmp_path / "a.jsonl", ("google/gemma-3-270m", "v5e-1")
    Sweep(file, [cell], atlas.choose_method(False), [], answer=ask_compiler).run(1)
    steps = read_steps(file)
    [found] = cells_of(steps)
    assert not any(step.failed for step in steps) and next_ask(*cell, steps) is None
    assert found.verdict == "GO" and found.first.method == found.first.timed_by == "compiler"
    assert found.longest >= 4096 and found.longest_is_known
    assert found.first.num_parameters == pytest.approx(268e6, rel=0.01)
    assert 0 < (found.share_of_peak or 0) < 1
