"""Recorded results of the TPU compiler for real steps: the compiler still agrees, and the estimate is close.

tools/preflight_records.py writes the records. The compiler runs on x86-64 Linux only, the estimate anywhere.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import preflight_records
import pytest
from dose import FULL, full_dose_only

from trillora.devices.chips import CHIPS
from trillora.devices.slices import find_slice
from trillora.events import ignore_events
from trillora.preflight.client import CompilerClient, ask, versions

RECORDS: list[dict[str, Any]] = json.loads(preflight_records.RECORDS.read_text())
SAME_COMPILER = 0.02  # relative: the same compiler gives the same layout on another machine
MEMORY_ERROR, TIME_ERROR = 0.0375, 0.2395  # the largest of benchmarks/PREFLIGHT.md, before rounding
WHOLE_ERROR = 0.25  # of a program compiled to the end, timed with the compiler's own cycle counts
RECOMPILED = range(len(RECORDS)) if FULL else (11,)  # Gemma-3-270M for v5e-8
# Compiled to machine code: Mistral-7B for v5e-8 takes four minutes on two cores, Qwen3-0.6B for v5e-1 two.
TO_THE_END = (0, 14)
ESTIMATED = range(len(RECORDS)) if FULL else (0, 11, 15)  # one of each kind of model, both kinds of remat


def name_of(number: int) -> str:
    model, place, batch_size, micro_batch_size, tokens, remat, _ = RECORDS[number]["case"]
    return f"{model.partition('/')[2]}-{place}-{batch_size}x{tokens}-{micro_batch_size}-{remat}"


def test_there_is_a_record_for_every_case_and_it_fits() -> None:
    assert [tuple(record["case"]) for record in RECORDS] == list(preflight_records.CASES)
    assert len(RECORDS) >= 12
    for record in RECORDS:
        assert 0 < record["hbm_peak_gib"] < CHIPS[find_slice(record["case"][1]).chip].hbm_gib
        assert record["step_seconds"] > 0


@pytest.mark.tpu_compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has wheels for x86-64 Linux only")
@pytest.mark.parametrize("number", RECOMPILED, ids=name_of)
def test_the_compiler_agrees_with_its_record(number: int) -> None:
    record = RECORDS[number]
    result = preflight_records.measure(tuple(record["case"]), "compiler")
    assert result.step is not None and result.hbm_peak_gib is not None
    assert result.hbm_peak_gib < CHIPS[find_slice(record["case"][1]).chip].hbm_gib
    same = ("jax", "libtpu", "transformers")
    if all(record["versions"][package] == versions()[package] for package in same):
        assert result.hbm_peak_gib == pytest.approx(record["hbm_peak_gib"], rel=SAME_COMPILER)
        assert result.step.seconds == pytest.approx(record["step_seconds"], rel=SAME_COMPILER)


@full_dose_only
@pytest.mark.tpu_compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has wheels for x86-64 Linux only")
@pytest.mark.parametrize("number", TO_THE_END, ids=name_of)
def test_compiled_to_the_end_it_needs_the_memory_of_the_early_layout(number: int) -> None:
    record = RECORDS[number]
    case = tuple(record["case"])
    question = dataclasses.replace(preflight_records.question(case, "compiler"), whole=True)
    result = ask(question, ignore_events)
    assert result.step is not None
    if record["versions"]["libtpu"] == versions()["libtpu"]:
        assert result.hbm_peak_gib == pytest.approx(record["hbm_peak_gib"], rel=SAME_COMPILER)
    assert result.step.seconds == pytest.approx(record["step_seconds"], rel=WHOLE_ERROR)


@pytest.fixture(scope="module")
def estimator() -> Iterator[CompilerClient]:
    with CompilerClient("estimate") as client:
        if FULL:
            client.get_ready(find_slice("v5e-8"))
        yield client


@pytest.mark.parametrize("number", ESTIMATED, ids=name_of)
def test_the_estimate_is_close_to_the_compiler(
    number: int, estimator: CompilerClient, request: pytest.FixtureRequest
) -> None:
    """In a process of its own at full dose; test_preflight.py always has one."""
    if not FULL:
        request.getfixturevalue("compiler_here")
    record = RECORDS[number]
    case = tuple(record["case"])
    result = estimator.ask(preflight_records.question(case, "estimate"), ignore_events)
    assert result.step is not None
    assert result.hbm_peak_gib == pytest.approx(record["hbm_peak_gib"], rel=MEMORY_ERROR)
    assert result.step.seconds == pytest.approx(record["step_seconds"], rel=TIME_ERROR)
