"""Preflight corrects its step times by what was measured on the chip, on that chip only, and says so."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import tiny_run
from rich.console import Console

from trillora.devices.chips import CHIPS
from trillora.devices.measured import MeasuredChip, ProofCheck
from trillora.devices.slices import find_slice
from trillora.preflight.hlo.simulate import Slowdown, simulate
from trillora.preflight.measured_speeds import measured_speeds
from trillora.preflight.result import MeasuredSpeeds, PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe.load import load_recipe
from trillora.report.preflight_screen import show

# On 8 v5e, preflight assumes 181.2 TFLOP/s, 696 GB/s of HBM and 72 GB/s of links.
HEALTHY = MeasuredChip(
    device_kind="TPU v5 lite",
    platform="tpu",
    num_devices=8,
    date="2026-11-16T12:00:00+00:00",
    libraries={},
    checks=[ProofCheck("speed", "ok", "")],
    matrix_tflops=187.0,
    memory_gb_per_second=702.0,
    gather_gb_per_second=80.0,
    reduce_gb_per_second=78.0,
)
SLOW = dataclasses.replace(
    HEALTHY, matrix_tflops=181.24 / 2, memory_gb_per_second=696.15 / 1.5, gather_gb_per_second=72 / 1.25
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_measurement_nothing_is_corrected() -> None:
    assert measured_speeds(find_slice("v5e-8"), pytest.fail) is None


def test_a_healthy_chip_is_as_assumed() -> None:
    HEALTHY.save()
    assert measured_speeds(find_slice("v5e-8"), pytest.fail) == MeasuredSpeeds("2026-11-16", 8)


def test_a_slow_unit_is_slower_by_the_measured_ratio_on_this_chip_only() -> None:
    SLOW.save()
    assert measured_speeds(find_slice("v5e-8"), pytest.fail) == MeasuredSpeeds("2026-11-16", 8, 2.0, 1.5, 1.25)
    # Links are of another number of devices.
    assert measured_speeds(find_slice("v5e-4"), pytest.fail) == MeasuredSpeeds("2026-11-16", 8, 2.0, 1.5, 1.0)
    for other in ("v6e-8", "v5p-8", "v4-8"):
        assert measured_speeds(find_slice(other), pytest.fail) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"matrix_tflops": 300.0}, "faster than the chip can be"),
        ({"memory_gb_per_second": 5000.0}, "faster than the chip can be"),
        ({"matrix_tflops": 1.0}, "181.2 times slower"),
        ({"gather_gb_per_second": 0.5}, "144.0 times slower"),
        ({"checks": [ProofCheck("gradients", "refused", "")]}, "refused"),
    ],
)
def test_a_measurement_that_cannot_be_right_is_ignored_with_a_note(change: dict[str, object], says: str) -> None:
    dataclasses.replace(HEALTHY, **change).save()  # type: ignore[arg-type]
    said: list[str] = []
    assert measured_speeds(find_slice("v5e-8"), said.append) is None
    assert len(said) == 1 and says in said[0]


# The example of preflight/hlo/simulate.py.
STEP = """HloModule step, is_scheduled=true

ENTRY %main (x: bf16[2048,4096], w: bf16[4096,4096], v: bf16[512,4096]) -> bf16[2048,4096] {
  %x = bf16[2048,4096]{1,0} parameter(0)
  %w = bf16[4096,4096]{1,0} parameter(1)
  %v = bf16[512,4096]{1,0} parameter(2)
  %s = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%v), replica_groups={}
  %y = bf16[2048,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = bf16[4096,4096]{1,0} all-gather-done(%s)
  ROOT %z = bf16[2048,4096]{1,0} dot(%y, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_each_unit_of_a_simulated_step_is_slower_alone() -> None:
    def run(**slowdown: float) -> tuple[float, float, float, float]:
        step = simulate(STEP, CHIPS["v5e"], 8, slowdown=Slowdown(**slowdown))
        return step.compute_seconds, step.hbm_seconds, step.interconnect_seconds, step.roofline_seconds

    compute, hbm, links, roofline = run()
    hops = 8e-6  # latency, which a slow link does not change
    assert run(compute=2.0) == pytest.approx((2 * compute, hbm, links, roofline))
    assert run(hbm=1.5) == pytest.approx((compute, 1.5 * hbm, links, roofline))
    assert run(links=3.0) == pytest.approx((compute, hbm, 3 * (links - hops) + hops, roofline))


@pytest.mark.usefixtures("compiler_here")
def test_preflight_uses_a_measurement_and_shows_it(tmp_path: Path) -> None:
    folder = tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1))
    sections = {"train": {"steps": 20, "batch_size": 16}, "hardware": {"devices": "auto"}}
    sections["engine"] = {"remat": "none"}  # one candidate for each slice
    recipe = load_recipe(tiny_run.recipe(folder, **sections))
    before, other = preflight(recipe, ["v5e-1", "v6e-1"], estimate=True)
    slow = {"matrix_tflops": 181.24 / 2, "memory_gb_per_second": 696.15 / 2}
    dataclasses.replace(HEALTHY, num_devices=1, gather_gb_per_second=None, reduce_gb_per_second=None, **slow).save()
    after, same = preflight(recipe, ["v5e-1", "v6e-1"], estimate=True)
    assert same == dataclasses.replace(other, from_cache=True), "another chip"
    assert not after.from_cache and before.measured is None
    assert after.measured == MeasuredSpeeds("2026-11-16", 1, 2.0, 2.0)
    assert before.step is not None and after.step is not None and before.run is not None and after.run is not None
    # Only the vector unit is not slower.
    assert 1.5 * before.step.seconds < after.step.seconds <= 2.01 * before.step.seconds
    assert after.run.hours > before.run.hours and after.step.roofline_seconds == before.step.roofline_seconds
    assert PreflightResult.from_dict(after.to_dict()) == after and after.to_dict()["measured"]["hbm"] == 2.0
    text = "Corrected by the speeds measured on 2026-11-16 (1 device): products 2.00x slower, HBM 2.00x slower"
    for results in ([after], [after, same]):
        assert text in shown(results)
    assert "measured" not in shown([before])
    confirmed = dataclasses.replace(after, measured=MeasuredSpeeds("2026-11-16", 8))
    assert "Confirmed by the speeds measured on 2026-11-16 (8 devices)." in shown([confirmed])


def shown(results: list[PreflightResult]) -> str:
    file = io.StringIO()
    show(results, Console(file=file, width=100, highlight=False))
    return " ".join(file.getvalue().split())
