"""The real TPU compiler takes the step that trains: Mistral-7B and Gemma-3-270M for v5e-8 and v6e-8, on this machine.

No weights exist: configurations become shapes. Figures are compared with those on record; `--record` as below writes
them anew.

    python tests/test_tpu_compile.py --record
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RECORDS = Path(__file__).parent / "tpu_records.json"
CASES = [(model, chip) for model in ("mistral-7b", "gemma-3-270m") for chip in ("v5e-8", "v6e-8")]
HOST_GIB = 6.0  # far below the 14 GiB that Mistral-7B's weights would take: none are made
HBM = 0.02  # relative: the same compiler on another machine lays memory out the same

pytestmark = pytest.mark.tpu_compiler


def model_config(name: str) -> Any:
    from transformers import Gemma3TextConfig, MistralConfig

    if name == "mistral-7b":
        return MistralConfig(sliding_window=None)
    return Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        sliding_window=512,
        max_position_embeddings=32768,
    )


def compile_step(name: str, chip: str) -> dict[str, Any]:
    """Runs in a process of its own, whose environment is set for compiling only."""
    import resource

    from jax.experimental import topologies

    from trillora.assembly import assemble
    from trillora.config import load_recipe
    from trillora.hardware import find_slice
    from trillora.mesh import MeshShape, make_mesh

    rows, tokens = (8, 2048) if name == "mistral-7b" else (64, 512)
    recipe = load_recipe(
        {
            "model": {"name": name, "dtype": "bfloat16"},
            "data": "chats.jsonl",
            "train": {"batch_size": rows, "micro_batch_size": rows, "sequence_length": tokens, "steps": 100},
            "engine": {"layers": "scan", "remat": "full", "attention": "splash", "loss_chunk": 512},
        }
    )
    place = find_slice(chip)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    mesh = make_mesh(list(topology.devices), MeshShape(fsdp=len(topology.devices)))
    started = time.perf_counter()
    compiled = assemble(recipe, model_config(name), mesh, num_steps=100).compile()
    memory = compiled.memory_analysis()
    return {
        "model": name,
        "chip": chip,
        "rows": rows,
        "tokens": tokens,
        "hbm_peak_gib": round(memory.peak_memory_in_bytes / 2**30, 3),
        "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 3),
        "compile_seconds": round(time.perf_counter() - started, 1),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "libtpu", "transformers")},
    }


def compile_apart(name: str, chip: str) -> dict[str, Any]:
    from trillora.hardware import COMPILE_ONLY_ENVIRONMENT

    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    command = [sys.executable, __file__, name, chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "chip"), CASES)
def test_step_compiles_for_a_tpu_that_is_not_here(name: str, chip: str) -> None:
    """Gemma's compile takes five minutes: in the full dose only."""
    if name == "gemma-3-270m" and os.environ.get("TRILLORA_DOSE") != "full":
        pytest.skip("full dose only: five minutes of compiling (TRILLORA_DOSE=full)")
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(f"libtpu has no build for {platform.machine()} {platform.system()}; this runs on x86-64 Linux")
    from trillora.hardware import CHIPS

    result = compile_apart(name, chip)
    print(json.dumps(result))
    assert result["hbm_peak_gib"] < CHIPS[chip.split("-")[0]].hbm_gib
    assert result["host_peak_gib"] < HOST_GIB
    recorded = {(r["model"], r["chip"]): r for r in json.loads(RECORDS.read_text())}[name, chip]
    if recorded["versions"] == result["versions"]:
        assert result["hbm_peak_gib"] == pytest.approx(recorded["hbm_peak_gib"], rel=HBM)


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        records = []
        for case in CASES:
            records.append(compile_apart(*case))
            print(records[-1], flush=True)
            RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    else:
        print(json.dumps(compile_step(*sys.argv[1:])))
