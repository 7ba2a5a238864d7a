"""Records memory and step time from the TPU compiler for typical steps: writes src/trillora/preflight/records.json.

    python tools/preflight_records.py             all cases; needs x86-64 Linux with libtpu, ten minutes on two cores
    python tools/preflight_records.py --only 3    prints one case

tests/preflight/test_preflight_records.py compares the estimate and the compiler itself with these records. A case is a
model of known_models.json, options of a recipe, and a slice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trillora.devices.slices import find_slice
from trillora.events import ignore_events
from trillora.preflight.client import ask, versions
from trillora.preflight.inputs import KNOWN_MODELS, describe_model
from trillora.preflight.question import Question
from trillora.preflight.result import Method, StageResult
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of

RECORDS = KNOWN_MODELS.parent / "records.json"
MISTRAL, GEMMA = "mistralai/Mistral-7B-v0.3", "google/gemma-3-270m"
LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"

# model, slice, batch size, micro-batch size, sequence length, remat, fsdp (else the base is replicated)
CASES: tuple[tuple[str, str, int, int, int, str, bool], ...] = (
    (MISTRAL, "v5e-8", 8, 8, 2048, "full", True),
    (MISTRAL, "v5e-8", 8, 8, 2048, "linear", True),
    (MISTRAL, "v5e-8", 32, 32, 2048, "full", True),
    (MISTRAL, "v5e-8", 32, 8, 2048, "full", True),
    (MISTRAL, "v5e-4", 8, 4, 1024, "full", True),
    (MISTRAL, "v6e-8", 16, 16, 4096, "full", True),
    (MISTRAL, "v6e-8", 8, 8, 2048, "linear", True),
    (MISTRAL, "v4-8", 8, 8, 2048, "full", True),
    (LLAMA, "v6e-8", 8, 8, 8192, "full", True),
    (LLAMA, "v5p-8", 8, 8, 4096, "full", True),
    (GEMMA, "v5e-8", 64, 64, 512, "full", False),
    (GEMMA, "v5e-8", 64, 64, 512, "linear", False),
    (GEMMA, "v5e-1", 16, 16, 1024, "full", False),
    (GEMMA, "v6e-1", 32, 32, 512, "linear", False),
    (QWEN, "v5e-1", 8, 8, 2048, "full", False),
    (QWEN, "v5e-8", 32, 32, 1024, "linear", False),
    (QWEN, "v6e-1", 8, 8, 2048, "linear", False),
)


def question(case: tuple[str, str, int, int, int, str, bool], method: Method) -> Question:
    """The question preflight would ask. Every option is fixed, so the compiler and the estimate see the same step."""
    model, slice_name, batch_size, micro_batch_size, sequence_length, remat, split = case
    num_devices = find_slice(slice_name).num_devices
    axis = "fsdp" if split else "data"
    recipe = load_recipe(
        {
            "model": {"name": model, "dtype": "bfloat16"},
            "data": "chats.jsonl",
            "train": {
                "batch_size": batch_size,
                "micro_batch_size": micro_batch_size,
                "sequence_length": sequence_length,
                "steps": 100,
            },
            "engine": {"layers": "scan", "remat": remat, "attention": "splash"},
            "hardware": {"mesh": {"data": 1, "fsdp": 1, "tensor": 1, axis: num_devices}},
        }
    )
    folder, _ = describe_model(recipe)
    return Question(slice_name, method, str(folder), stages_of(recipe)[0].recipe, num_steps=100)


def measure(case: tuple[str, str, int, int, int, str, bool], method: Method) -> StageResult:
    return ask(question(case, method), ignore_events)


def record(case: tuple[str, str, int, int, int, str, bool]) -> dict[str, Any]:
    result = measure(case, "compiler")
    return {
        "case": list(case),
        "hbm_peak_gib": result.hbm_peak_gib,
        "memory": result.memory,
        "step_seconds": result.step and result.step.seconds,
        "flops_per_step": result.step and result.step.flops,
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", type=int, metavar="N", help="print this case, write nothing")
    only = parser.parse_args().only
    if only is not None:
        print(json.dumps(record(CASES[only]), indent=1))
        return
    records = []
    for number, case in enumerate(CASES):
        records.append(record(case))
        print(number, *case, records[-1]["hbm_peak_gib"], records[-1]["step_seconds"], flush=True)
        lines = ",\n".join(f" {json.dumps(each)}" for each in records)
        Path(RECORDS).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
