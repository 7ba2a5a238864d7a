"""The compile matrix: complete for the set that launches install, and a part of it compiled again here, to the end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import compile_matrix
import pytest
from compile_matrix import PAGE, all_rows, read_records, table

from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT
from trillora.locks.sets import find_set

PROOF = {"golden model, bfloat16", "golden model, float32"}


def test_every_program_of_the_recipes_compiles_with_the_set_that_launches_install() -> None:
    tpu = find_set("tpu").versions
    records = [r for r in read_records() if (r["jax"], r["libtpu"]) == (tpu["jax"], tpu["libtpu"])]
    assert {r["row"] for r in records} == {row.key for row in all_rows()} and len(records) >= 30
    assert not [r for r in records if "error" in r]
    assert all(r["program_mib"] > 0 or r["program"] == "collectives" for r in records)
    for row in all_rows():
        programs = {r["program"] for r in records if r["row"] == row.key}
        if row.kind == "recipe":
            assert programs == {"step", "evaluation", "prefill", "decode"}, row
        else:
            assert programs >= (
                {"step"} if row.kind == "shape" else {"golden model, bfloat16", "golden model, float32"}
            )


def test_the_page_shows_the_records() -> None:
    assert table() in PAGE.read_text("utf-8")


@pytest.mark.tpu_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, has wheels for x86-64 Linux only"
)
@pytest.mark.parametrize("place", ["v5e-8", "v6e-8"])
def test_the_proof_compiles_to_the_end_for_a_slice_that_is_not_here(place: str) -> None:
    """The real compiler: an executable comes out, with a base that is split over eight devices."""
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    command = [sys.executable, str(compile_matrix.__file__), "--child", json.dumps({"kind": "prove", "slice": place})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = ["golden model, bfloat16", "golden model, float32", "collectives"]
    assert [program["program"] for program in programs] == names
    assert all("error" not in program and program["program_mib"] > 0 for program in programs), programs
