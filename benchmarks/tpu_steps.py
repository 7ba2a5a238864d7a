"""Training steps that `auto` chooses, by the TPU compiler, without a TPU: memory, step time, share of peak.

    python benchmarks/tpu_steps.py models       models of 2026 on the smallest slice that fits
    python benchmarks/tpu_steps.py shapes       typical shapes, with Tunix' steps of the same shapes
    python benchmarks/tpu_steps.py models --only gemma      cases whose name contains the word
    python benchmarks/tpu_steps.py preferences              DPO and ORPO against SFT, on the same number of tokens
    python benchmarks/tpu_steps.py scaling --estimate       longer sequences, more layers, vocabulary and devices
    python benchmarks/tpu_steps.py models --estimate        on machines without the TPU compiler

Each case is a run of `trillora preflight` with everything on auto that is not in the table. Prints one JSON line for
each case and a table at the end. A mixture of experts is compared with a dense model that has its active parameters.
In `scaling` one size grows at a time, with fixed settings: the share of peak shows whether time grows as arithmetic
does. Tunix' times were simulated in the same way from its compiled program (version 0.1.7, libtpu 0.0.42.1);
benchmarks/tunix_steps.py repeats them, which was done for Llama-3.2-1B.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record import MODEL_CODE, add_record_option, by_name, record_if

from trillora.devices.slices import find_slice
from trillora.errors import TrilloraError
from trillora.preflight.inputs import KNOWN_MODELS
from trillora.preflight.result import PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe.load import load_recipe

MIXTURE, DENSE = "Qwen/Qwen3-30B-A3B", "dense with the active parameters of Qwen3-30B-A3B"
SOURCES = ("benchmarks/tpu_steps.py", "src/trillora/preflight", *MODEL_CODE)
SLICES = ("v5e-1", "v6e-1", "v5e-4", "v5e-8", "v6e-8")  # by memory


@dataclass(frozen=True)
class Case:
    model: str
    slices: tuple[str, ...] = SLICES
    rows_per_device: int = 4
    tokens: int = 2048
    tunix_seconds: float | None = None
    changes: tuple[tuple[str, int], ...] = ()  # of the model's configuration
    options: str = ""  # more lines of the recipe
    loss: str = "sft"

    @property
    def name(self) -> str:
        loss = () if self.loss == "sft" else (self.loss,)
        return " ".join([self.model, *loss, *(f"{key} {value:,}" for key, value in self.changes)])


def grown(slice_name: str = "v6e-1", tokens: int = 2048, **changes: int) -> Case:
    """One sequence on each device, and the same settings everywhere, so that only the sizes differ."""
    devices = find_slice(slice_name).num_devices
    options = f"engine: {{remat: attention}}\nhardware: {{mesh: {{data: {devices}}}}}\n"
    return Case("meta-llama/Llama-3.2-1B", (slice_name,), 1, tokens, None, tuple(changes.items()), options)


def compared(loss: str) -> Case:
    """One sequence on each device, with the settings that `auto` chooses for SFT."""
    options = "engine: {remat: attention}\nhardware: {mesh: {fsdp: 8}}\n"
    return Case("meta-llama/Llama-3.1-8B", ("v6e-8",), 1, 2048, None, (), options, loss)


CASES = {
    "models": (
        Case("google/gemma-3-4b-it"),
        Case("Qwen/Qwen3.5-9B"),
        Case("mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
        Case("openai/gpt-oss-20b"),
        Case(MIXTURE),
        Case(DENSE),
    ),
    "shapes": (
        Case("meta-llama/Llama-3.2-1B", ("v5e-8",), 1, 2048, 0.168),
        Case("meta-llama/Llama-3.1-8B", ("v6e-8",), 1, 2048, 0.430),
        Case("google/gemma-3-270m", ("v5e-8",), 8, 512),
        Case("Qwen/Qwen3-0.6B", ("v5e-8",), 1, 2048, 0.180),
        Case("meta-llama/Llama-3.1-8B", ("v6e-8",), 3, 8192),
    ),
    "preferences": tuple(compared(loss) for loss in ("sft", "dpo", "orpo")),
    "scaling": (
        *(grown(tokens=tokens) for tokens in (2048, 8192, 32768, 131072)),
        *(grown(num_hidden_layers=layers) for layers in (8, 32, 64)),
        *(grown(vocab_size=size) for size in (32064, 256512)),
        *(grown(slice_name) for slice_name in ("v6e-8", "v6e-64", "v6e-256")),
    ),
}


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
    parser.add_argument("table", choices=CASES)
    parser.add_argument("--only", default="")
    parser.add_argument("--estimate", action="store_true")
    add_record_option(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES[args.table]:
            if args.only.lower() not in case.model.lower():
                continue
            if case.model == DENSE:  # on the slice of the mixture
                case = replace(case, slices=tuple(row["slice"] for row in rows if row["model"] == MIXTURE) or SLICES)
            rows.append(first_that_fits(case, Path(temporary), estimate=args.estimate))
            print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    good = [row for row in rows if row["slice"] is not None]
    cases = [{"case": f"{row['model']} {row['slice']} {row['batch_size']} x {row['tokens']}", **row} for row in good]
    name = "tpu-steps" if args.table == "shapes" else f"tpu-{args.table}"
    methods = {row["method"] for row in good}
    on = "TPU compiler" if methods == {"compiler"} else "estimate"
    record_if(args.record, name, by_name(cases, "case"), SOURCES, on=on)


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "\n| model | slice | sequences x tokens | memory of each device | step | tokens/s/device | share of peak |"
        " exposed interconnect | mesh | remat | micro-batch | base | Tunix' step | ours / Tunix' |"
    )
    print("|---" * 14 + "|")
    for row in rows:
        if row["slice"] is None:
            print(f"| {row['model']} | none of {', '.join(SLICES)} |" + " |" * 12)
            continue
        exposed = row["exposed_interconnect"] and f"{row['exposed_interconnect'] / row['seconds']:.1%}"
        tunix = row["tunix_seconds"]
        print(
            f"| {row['model']} | {row['slice']} | {row['batch_size']} x {row['tokens']} | {row['peak_gib']:.1f} of "
            f"{row['limit_gib']:.1f} GiB | {row['seconds']:.4g} s | {row['tokens_per_second_per_device']:,.0f} | "
            f"{row['share_of_peak']:.0%} | {exposed or ''} | "
            f"{row['mesh']} | {row['remat']} | {row['rows_at_once']} | {row['base']} | "
            + (f"{tunix:.3f} s | {row['seconds'] / tunix:.2f} |" if tunix else "| |")
        )
    step = {row["model"]: row["seconds"] for row in rows if row["slice"] is not None}
    if MIXTURE in step and DENSE in step:
        print(f"\nstep of the mixture / step of the dense model: {step[MIXTURE] / step[DENSE]:.2f}")


def first_that_fits(case: Case, folder: Path, *, estimate: bool) -> dict[str, Any]:
    for place in case.slices:
        try:
            [result] = preflight(recipe(case, place, folder), [place], estimate=estimate, use_cache=False)
        except TrilloraError as error:
            sys.exit(str(error))
        print(f"{case.model} on {place}: {result.verdict}", file=sys.stderr, flush=True)
        if result.verdict == "GO":
            return as_row(case, place, result)
    return {"model": case.model, "slice": None}


def recipe(case: Case, place: str, folder: Path) -> Any:
    batch_size = case.rows_per_device * find_slice(place).num_devices
    data = folder / "rows.jsonl"
    text = "The quick brown fox jumps over the lazy dog. " * (case.tokens // 8)
    half = text[: len(text) // 3]
    row = {"text": text} if case.loss == "sft" else {"prompt": "Write.", "chosen": half, "rejected": half + "Lazy."}
    rows = [{name: f"{i} {value}" for name, value in row.items()} for i in range(2 * batch_size)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = case.model
    if model == DENSE or case.changes:
        config = dense_config() if model == DENSE else json.loads(KNOWN_MODELS.read_text())[model]
        model = str(folder / case.name.replace("/", " "))
        Path(model).mkdir(exist_ok=True)
        (Path(model) / "config.json").write_text(json.dumps({**config, **dict(case.changes)}))
    file = folder / "recipe.yaml"
    kind = "text" if case.loss == "sft" else "preference"
    file.write_text(
        f"model: {{name: {json.dumps(model)}, quantize: auto}}\ndata: {{path: {data}, format: {kind}}}\n"
        f"train: {{sequence_length: {case.tokens}, batch_size: {batch_size}, steps: 100000, loss: {case.loss}}}\n"
        + case.options
    )
    return load_recipe(file)


def as_row(case: Case, place: str, result: PreflightResult) -> dict[str, Any]:
    assert result.settings is not None and result.step is not None
    chosen, step = result.settings, result.step
    mesh = ", ".join(f"{axis} {size}" for axis, size in vars(chosen.mesh).items() if size > 1)
    return {
        "model": case.name,
        "slice": place,
        "batch_size": case.rows_per_device * find_slice(place).num_devices,
        "tokens": case.tokens,
        "method": result.method,
        "peak_gib": result.hbm_peak_gib,
        "limit_gib": result.hbm_limit_gib,
        "seconds": step.seconds,
        "tokens_per_second_per_device": step.tokens_per_second / result.num_devices,
        "share_of_peak": step.fraction_of_peak,
        "exposed_interconnect": step.unit_seconds.exposed_interconnect if step.unit_seconds else None,
        "mesh": mesh or "1 device",
        "remat": chosen.remat,
        "rows_at_once": chosen.micro_batch_size,
        "base": "bfloat16" if chosen.quantize == "none" else chosen.quantize,
        "tried": [[each.what, each.peak_gib, each.seconds] for each in result.tried],
        "tunix_seconds": case.tunix_seconds,
        "libtpu": result.versions["libtpu"],
    }


if __name__ == "__main__":
    main()
