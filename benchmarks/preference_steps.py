"""A step of each kind of loss by the TPU compiler, without a TPU: its time and memory next to a step of SFT.

    python benchmarks/preference_steps.py               Llama-3.2-1B on v5e-1 and Qwen3-0.6B on v5e-8
    python benchmarks/preference_steps.py --only qwen   cases whose name contains the word

All steps of a case have the same sequences and the settings that preflight chose for SFT; only the loss differs. A
sequence of pairs holds both answers. Prints one JSON line for each step and a table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from record import MODEL_CODE, add_record_option, by_name, record_if

from trillora.devices.slices import find_slice
from trillora.events import ignore_events
from trillora.preflight.client import ask
from trillora.preflight.inputs import KNOWN_MODELS
from trillora.preflight.question import StepQuestion
from trillora.preflight.result import StageResult
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import stages_of

SOURCES = ("benchmarks/preference_steps.py", "src/trillora/engine/preference", "src/trillora/preflight", *MODEL_CODE)
CASES = (("meta-llama/Llama-3.2-1B", "v5e-1", 4, 2048), ("Qwen/Qwen3-0.6B", "v5e-8", 4, 2048))  # sequences per device
LOSSES = ("sft", "dpo", "orpo", "kto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    add_record_option(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if args.only.lower() not in case[0].lower():
                continue
            kept = None
            for loss in LOSSES:
                result = measured(*case, loss, Path(folder), kept)
                kept = kept or result.settings
                rows.append(as_row(case, loss, result, rows))
                print(json.dumps(rows[-1]), flush=True)
    print("\n| model | slice | loss | step | of SFT's | memory of each device |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['slice']} | {row['loss']} | {row['seconds']:.4f} s | {row['times_sft']:.2f} | "
            f"{row['peak_gib']:.2f} of {row['limit_gib']:.1f} GiB |"
        )
    cases = [{"case": f"{row['model']} {row['slice']} {row['loss']}", **row} for row in rows]
    record_if(args.record, "preference-steps", by_name(cases, "case"), SOURCES, on="TPU compiler")


def measured(
    model: str, place: str, rows: int, tokens: int, loss: str, folder: Path, kept: StepSettings | None
) -> StageResult:
    config = folder / model.replace("/", " ")
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(json.loads(KNOWN_MODELS.read_text())[model]), "utf-8")
    batch_size = rows * find_slice(place).num_devices
    train = {"sequence_length": tokens, "batch_size": batch_size, "steps": 1000, "loss": loss, "learning_rate": 1e-4}
    [stage] = stages_of(load_recipe({"model": str(config), "data": "-", "train": train}))
    recipe = stage.recipe
    if kept is not None:  # the settings of SFT, given as a person would
        engine = {name: getattr(kept, name) for name in ("remat", "attention", "loss_chunk", "layers")}
        train = {**train, "micro_batch_size": kept.micro_batch_size}
        values = {"model": str(config), "data": "-", "train": train, "engine": engine}
        values["hardware"] = {"mesh": {name: size for name, size in vars(kept.mesh).items() if size > 1} or "auto"}
        recipe = stages_of(load_recipe(values))[0].recipe
    return ask(StepQuestion(place, "compiler", str(config), recipe, num_steps=1000), ignore_events)


def as_row(
    case: tuple[str, str, int, int], loss: str, result: StageResult, before: list[dict[str, Any]]
) -> dict[str, Any]:
    model, place, rows, tokens = case
    assert result.step is not None and result.settings is not None, result.problem
    seconds = result.step.seconds
    sft = next((row["seconds"] for row in before if row["model"] == model and row["loss"] == "sft"), seconds)
    return {
        "model": model,
        "slice": place,
        "loss": loss,
        "rows_per_device": rows,
        "tokens": tokens,
        "seconds": seconds,
        "times_sft": round(seconds / sft, 3),
        "peak_gib": result.hbm_peak_gib,
        "limit_gib": result.hbm_limit_gib,
        "remat": result.settings.remat,
        "micro_batch_size": result.settings.micro_batch_size,
    }


if __name__ == "__main__":
    main()
