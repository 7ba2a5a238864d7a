"""Compiles the candidates that the choice of a step has, for typical shapes: writes tests/golden/step-candidates.json.

    python tools/step_candidates.py              all shapes; needs x86-64 Linux with libtpu, about 10 s per candidate
    python tools/step_candidates.py --only 3     one shape; the others stay as they are

tests/test_search.py checks that the choice is the fastest of these that fits. A candidate is a mesh (base whole on
every device, or split), a remat policy and a micro-batch size. Those that the estimate finds hopeless are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trillora.devices.chips import CHIPS
from trillora.devices.slices import find_slice
from trillora.events import ignore_events
from trillora.preflight.client import ask
from trillora.preflight.inputs import describe_model
from trillora.preflight.result import StageResult
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.step.autotune import BETWEEN, REMAT_ORDER, micro_batch_sizes
from trillora.step.search import HOPELESS

TABLE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "step-candidates.json"
NUM_SIZES = 4  # micro-batch sizes tried, the largest first
# model, slice, batch size, sequence length
SHAPES = (
    ("meta-llama/Llama-3.2-1B", "v5e-8", 8, 2048),
    ("meta-llama/Llama-3.1-8B", "v6e-8", 8, 2048),
    ("google/gemma-3-270m", "v5e-8", 64, 512),
    ("Qwen/Qwen3-0.6B", "v5e-8", 8, 2048),
    ("meta-llama/Llama-3.1-8B", "v6e-8", 24, 8192),
    ("google/gemma-3-270m", "v5e-1", 128, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the number of the shape, from 0")
    only = parser.parse_args().only
    table: list[dict[str, Any]] = json.loads(TABLE.read_text())
    for number, (model, slice_name, batch_size, sequence_length) in enumerate(SHAPES):
        if only is not None and number != only:
            continue
        table[number] = {
            "model": model,
            "slice": slice_name,
            "batch_size": batch_size,
            "sequence_length": sequence_length,
            "candidates": list(candidates(model, slice_name, batch_size, sequence_length)),
        }
        TABLE.write_text(written(table))


def candidates(model: str, slice_name: str, batch_size: int, sequence_length: int) -> Iterator[dict[str, Any]]:
    place = find_slice(slice_name)
    limit = CHIPS[place.chip].hbm_gib
    for axis in ("data", "fsdp") if place.num_devices > 1 else ("data",):
        for remat in (*REMAT_ORDER, *BETWEEN):
            for size in micro_batch_sizes(batch_size, None, place.num_devices)[:NUM_SIZES]:
                options = (model, slice_name, batch_size, sequence_length, axis, remat, size)
                guessed = measure(*options, method="estimate")
                if guessed.step is None or (guessed.hbm_peak_gib or 0) > HOPELESS * limit:
                    continue
                found = measure(*options, method="compiler")
                row = {
                    "axis": axis,
                    "remat": remat,
                    "micro_batch_size": size,
                    "seconds": found.step and round(found.step.seconds, 5),
                    "gib": found.hbm_peak_gib,
                    "estimated_seconds": round(guessed.step.seconds, 5),
                    "estimated_gib": guessed.hbm_peak_gib,
                }
                print(model, slice_name, json.dumps(row), flush=True)
                yield row


def measure(
    model: str, slice_name: str, batch: int, tokens: int, axis: str, remat: str, size: int, *, method: str
) -> StageResult:
    """Every option is fixed, so one step is estimated or compiled."""
    place = find_slice(slice_name)
    recipe = load_recipe(
        {
            "model": {"name": model, "dtype": "bfloat16"},
            "data": "chats.jsonl",
            "train": {"batch_size": batch, "micro_batch_size": size, "sequence_length": tokens, "steps": 100},
            "engine": {"layers": "scan", "remat": remat, "attention": "splash"},
            "hardware": {"mesh": {"data": 1, "fsdp": 1, "tensor": 1, axis: place.num_devices}},
        }
    )
    folder, _ = describe_model(recipe)
    question = {
        "slice": slice_name,
        "method": method,
        "model": str(folder),
        "trust_remote_code": False,
        "stage": stages_of(recipe)[0].recipe.model_dump(mode="json"),
        "num_steps": 100,
    }
    return ask(question, place, ignore_events)


def written(table: list[dict[str, Any]]) -> str:
    """One candidate per line."""
    shapes = []
    for shape in table:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in shape["candidates"])
        head = json.dumps({key: value for key, value in shape.items() if key != "candidates"})[1:-1]
        shapes.append(f' {{{head}, "candidates": [\n{rows}\n ]}}')
    return "[\n" + ",\n".join(shapes) + "\n]\n"


if __name__ == "__main__":
    main()
