"""The models people fine-tune in 2026 on the smallest TPU slice that fits, by the TPU compiler: memory, step time and
share of peak. A mixture of experts is compared with a dense model that has its active parameters.

    python benchmarks/models_preflight.py
    python benchmarks/models_preflight.py --only gemma      cases whose name contains the word
    python benchmarks/models_preflight.py --estimate        on machines without the TPU compiler

Each case is a run of `trillora preflight` with one sequence of 2048 tokens for each device and everything else on auto.
Prints one JSON line for each case and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trillora.devices.slices import find_slice
from trillora.errors import TrilloraError
from trillora.preflight.inputs import KNOWN_MODELS
from trillora.preflight.result import PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe.load import load_recipe

MIXTURE, DENSE = "Qwen/Qwen3-30B-A3B", "dense with the active parameters of Qwen3-30B-A3B"
MODELS = (
    "google/gemma-3-4b-it",
    "Qwen/Qwen3.5-9B",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "openai/gpt-oss-20b",
    MIXTURE,
)
SLICES = ("v5e-1", "v6e-1", "v5e-4", "v5e-8", "v6e-8")  # by memory
TOKENS = 2048
ROWS = 4  # sequences per device and step


def dense_config() -> dict[str, Any]:
    """A dense model with the layers of the mixture. Its feed-forward layer is as wide as the experts of one token."""
    mixture = json.loads(KNOWN_MODELS.read_text())[MIXTURE]
    width = mixture["num_experts_per_tok"] * mixture["moe_intermediate_size"]
    of_experts = (
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "decoder_sparse_step",
    )
    kept = {key: value for key, value in mixture.items() if key not in (*of_experts, "mlp_only_layers")}
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": width}
    return {**kept, **dense}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--estimate", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in (*MODELS, DENSE):
            if args.only.lower() in name.lower():
                places = [row["slice"] for row in rows if row["model"] == MIXTURE] if name == DENSE else SLICES
                rows.append(first_that_fits(name, places or SLICES, folder, estimate=args.estimate))
                print(json.dumps(rows[-1]), flush=True)
    print("\n| model | slice | memory of each device | step | tokens/s | share of peak | settings |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["slice"] is None:
            print(f"| {row['model']} | none of {', '.join(SLICES)} | | | | | |")
            continue
        print(
            f"| {row['model']} | {row['slice']} | {row['peak_gib']:.1f} of {row['limit_gib']:.1f} GiB | "
            f"{row['seconds']:.2f} s | {row['tokens_per_second']:,.0f} | {row['share_of_peak']:.0%} | "
            f"{row['settings']} |"
        )
    step = {row["model"]: row["seconds"] for row in rows if row["slice"] is not None}
    if MIXTURE in step and DENSE in step:
        print(f"\nstep of the mixture / step of the dense model: {step[MIXTURE] / step[DENSE]:.2f}")


def first_that_fits(name: str, slices: tuple[str, ...] | list[str], folder: Path, *, estimate: bool) -> dict[str, Any]:
    for place in slices:
        try:
            [result] = preflight(recipe(name, place, folder), [place], estimate=estimate, use_cache=False)
        except TrilloraError as error:
            sys.exit(str(error))
        print(f"{name} on {place}: {result.verdict}", file=sys.stderr, flush=True)
        if result.verdict == "GO":
            return as_row(name, place, result)
    return {"model": name, "slice": None}


def recipe(name: str, place: str, folder: Path) -> Any:
    data = folder / "rows.jsonl"
    # more tokens than one step takes
    words = "The quick brown fox jumps over the lazy dog. " * 200
    data.write_text("".join(json.dumps({"text": f"{i} {words}"}) + "\n" for i in range(2 * ROWS * 8)))
    model = name
    if name == DENSE:
        (folder / "dense").mkdir(exist_ok=True)
        (folder / "dense" / "config.json").write_text(json.dumps(dense_config()))
        model = str(folder / "dense")
    file = folder / "recipe.yaml"
    batch_size = ROWS * find_slice(place).num_devices
    file.write_text(
        f"model: {{name: {model}, quantize: auto}}\ndata: {{path: {data}, format: text}}\n"
        f"train: {{sequence_length: {TOKENS}, batch_size: {batch_size}, steps: 100}}\n"
    )
    return load_recipe(file)


def as_row(name: str, place: str, result: PreflightResult) -> dict[str, Any]:
    assert result.settings is not None and result.step is not None
    chosen = result.settings
    mesh = ", ".join(f"{axis} {size}" for axis, size in vars(chosen.mesh).items() if size > 1)
    settings = (
        f"{mesh or '1 device'}, remat {chosen.remat}, {chosen.micro_batch_size} rows at once, base {chosen.quantize}"
    )
    return {
        "model": name,
        "slice": place,
        "method": result.method,
        "peak_gib": result.hbm_peak_gib,
        "limit_gib": result.hbm_limit_gib,
        "seconds": result.step.seconds,
        "tokens_per_second": result.step.tokens_per_second,
        "share_of_peak": result.step.fraction_of_peak,
        "settings": settings,
        "libtpu": result.versions["libtpu"],
    }


if __name__ == "__main__":
    main()
