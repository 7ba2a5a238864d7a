"""Products with the frozen base in int8 or fp8 (`engine.matmul`): what they gain, and what they do to the loss.

    python benchmarks/low_precision.py products                      products alone, in the shapes of 1.2B and 7.2B
    python benchmarks/low_precision.py steps --shape 1b --rows 8     training steps of a model with random weights
    python benchmarks/low_precision.py curves --steps 180            SmolLM2 on the data of `trillora quickstart`

`--kinds full fp8 int8` are the values of `engine.matmul`; `int8-base` and `fp8-base` only store the base in 8 bits. All
kinds of one table are measured in one process. Steps are timed in two rounds that take the kinds in opposite orders,
with the same batches. Curves use the same batches for the same seed: two seeds in full precision show how far apart
curves are anyway. Each prints a table at the end; a kind that fails prints why, and the others are measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from random_model import SHAPES

DATA = Path(__file__).resolve().parents[1] / "src" / "trillora" / "quickstart" / "data"
NAMES = {"1b": "llama-1b", "7b": "mistral-7b", "tiny": "tiny"}
PRODUCTS = ((8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096), (16384, 2048, 8192), (16384, 8192, 2048))
NUM_HELD_OUT = 64  # documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("products", "steps", "curves"))
    parser.add_argument("--kinds", nargs="+", default=["full", "fp8", "int8"])
    parser.add_argument("--shape", choices=NAMES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_args()
    {"products": products, "steps": steps, "curves": curves}[args.table](args)


def options_of(kind: str) -> dict[str, Any]:
    """Recipe overrides."""
    if kind.endswith("-base"):
        return {"model.quantize": kind.removesuffix("-base")}
    return {"engine.matmul": kind}


def attempt(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or None if it failed."""
    try:
        return function(*arguments)
    except Exception:
        print(f"{kind} failed:\n{traceback.format_exc()}", flush=True)
        return None


# ---- products


def products(args: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp

    from trillora.engine.quantize import linear, quantize, rounded_linear

    def plain(x: jax.Array, weight: jax.Array, bias: None) -> jax.Array:
        return x @ weight.T

    def milliseconds(product: Any, x: jax.Array, weight: Any, dy: jax.Array) -> tuple[float, float]:
        forward = jax.jit(lambda x, weight: product(x, weight, None))
        backward = jax.jit(lambda x, weight, dy: jax.vjp(lambda x: product(x, weight, None), x)[1](dy)[0])
        return timed(forward, x, weight), timed(backward, x, weight, dy)

    lines = []
    for num_rows, num_in, num_out in PRODUCTS:
        x, dy = (jax.random.normal(jax.random.key(0), (num_rows, n), jnp.bfloat16) for n in (num_in, num_out))
        weight = jax.random.normal(jax.random.key(1), (num_out, num_in), jnp.bfloat16) * 0.02
        for kind in args.kinds:
            format = "fp8_one_scale" if kind == "fp8" else kind.removesuffix("-base")
            operand = weight if kind == "full" else jax.jit(quantize, static_argnums=1)(weight, format)
            product = plain if kind == "full" else linear if kind.endswith("-base") else rounded_linear
            found = attempt(kind, milliseconds, product, x, operand, dy)
            if found is not None:
                rate = 2e-9 * num_rows * num_in * num_out  # TFLOP/s for one millisecond
                rates = " | ".join(f"{ms:.3f} | {rate / ms:.0f}" for ms in found)
                lines.append(f"| {num_rows} x {num_in} x {num_out} | {kind} | {rates} |")
                print(lines[-1], flush=True)
    print("\n| rows x inputs x outputs | matmul | forward, ms | TFLOP/s | gradient of x, ms | TFLOP/s |")
    print("\n".join(["|---|---|---|---|---|---|", *lines]))


def timed(function: Any, *arguments: Any, calls: int = 20) -> float:
    """Milliseconds of one call, without the wait of the host: many calls are started, and the last one waited for."""
    import jax

    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls * 1e3)
    return min(found)


# ---- steps


def steps(args: argparse.Namespace) -> None:
    ready: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    losses: dict[str, list[float]] = {kind: [] for kind in args.kinds}

    def run(kind: str) -> None:
        run_steps(ready[kind], args.steps // 2, seconds[kind], losses[kind])
        median = statistics.median(seconds[kind][-args.steps // 4 :])
        print(f"{kind}: {median * 1e3:.1f} ms, loss {losses[kind][-1]:.4f}", flush=True)

    for kind in args.kinds:
        if (step := attempt(kind, prepare_step, kind, args)) is not None:
            ready[kind] = step
            run(kind)
    for kind in list(ready)[::-1]:
        run(kind)
    fastest = {kind: statistics.median(seconds[kind][len(seconds[kind]) // 4 :]) for kind in ready}
    first = next(iter(fastest.values()))
    print("\n| matmul | step, ms | tokens/s | relative | memory, GiB | remat | loss, first step | last step |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, found in fastest.items():
        step = ready[kind]
        print(
            f"| {kind} | {found * 1e3:.1f} | {args.rows * args.tokens / found:,.0f} | {first / found:.2f} | "
            f"{step['gib']:.1f} | {step['remat']} | {losses[kind][0]:.4f} | {losses[kind][-1]:.4f} |"
        )


def prepare_step(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoConfig

    from trillora.devices.mesh import find_devices
    from trillora.events import Note
    from trillora.model.loading.weights import random_weights
    from trillora.recipe.load import load_recipe
    from trillora.recipe.schema import stages_of
    from trillora.step.autotune import choose, step_bytes
    from trillora.training.entries.programs import place_state

    fields = dict(SHAPES[NAMES[args.shape]])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=args.tokens)
    recipe = {
        "model": "random",
        "data": {"path": "random.jsonl", "pack": False},
        "lora": {"rank": 16, "alpha": 32},
        "train": {"sequence_length": args.tokens, "batch_size": args.rows, "steps": args.steps},
    }
    [stage] = stages_of(load_recipe(recipe, [f"{k}={v}" for k, v in options_of(kind).items()] + args.set))
    start = time.perf_counter()
    plan = choose(
        stage.recipe,
        config,
        find_devices("auto", 1),
        args.steps,
        listener=lambda event: print(event.text, flush=True) if isinstance(event, Note) else None,
    )
    num_calls = plan.compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"')
    print(f"{kind}: compiled in {time.perf_counter() - start:.0f} s, {num_calls} fp8 products of cuBLAS", flush=True)
    assembly = plan.assembly
    base = random_weights(assembly.model.module, assembly.model.layout, assembly.base_shardings, seed=0)
    return {
        "plan": plan,
        "base": base,
        "state": place_state(assembly, seed=0, base=base),
        "batches": random_batches(args, config.vocab_size, assembly.mesh),
        "gib": step_bytes(plan.compiled) / 2**30,
        "remat": plan.settings.remat,
    }


def random_batches(args: argparse.Namespace, vocab_size: int, mesh: Any) -> list[dict[str, Any]]:
    """Repeated phrases, so that the loss falls."""
    import numpy as np

    from trillora.devices.mesh import put_batch

    generator, shape = np.random.default_rng(0), (args.rows, args.tokens)
    phrases = generator.integers(3, vocab_size, (args.rows, 16)).astype(np.int32)
    tokens = np.tile(phrases, (1, args.tokens // 16 + 1))[:, : args.tokens]
    positions = np.broadcast_to(np.arange(args.tokens, dtype=np.int32), shape)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": (positions < args.tokens - 1).astype(np.float32),
        "segments": np.ones(shape, np.int32),
        "positions": positions,
    }
    return [put_batch(batch, mesh)]


def run_steps(step: dict[str, Any], count: int, seconds: list[float], losses: list[float]) -> None:
    for number in range(count):
        start = time.perf_counter()
        batch = step["batches"][number % len(step["batches"])]
        step["state"], metrics = step["plan"].compiled(step["state"], step["base"], batch)
        losses.append(float(metrics.loss))
        seconds.append(time.perf_counter() - start)


# ---- curves


def curves(args: argparse.Namespace) -> None:
    every = max(args.steps // 6, 1)
    found: dict[tuple[str, int], tuple[list[float], dict[int, float]]] = {}
    for kind in args.kinds:
        result = attempt(kind, losses_of, kind, args, every)
        for seed, curve in enumerate(result or ()):
            found[kind, seed] = curve
    steps = list(range(0, args.steps + 1, every))
    print(f"\n| matmul | seed |{''.join(f' {step} |' for step in steps)} last 20 training steps |")
    print("|---|---|" + "---|" * (len(steps) + 1))
    for (kind, seed), (losses, held_out) in found.items():
        shown = "".join(f" {held_out[step]:.4f} |" for step in steps)
        print(f"| {kind} | {seed} |{shown} {statistics.mean(losses[-20:]):.4f} |")
    print("\nmean difference of the held-out losses after the start, from the first kind with the same seed:")
    first = args.kinds[0]
    pairs = [((first, 0), (first, seed)) for seed in range(1, args.seeds)]
    pairs += [((first, seed), (kind, seed)) for kind in args.kinds[1:] for seed in range(args.seeds)]
    for one, other in pairs:
        if one in found and other in found:
            apart = [abs(found[one][1][step] - found[other][1][step]) for step in steps[1:]]
            last = found[other][1][steps[-1]] / found[one][1][steps[-1]]
            print(f"  {one} and {other}: {statistics.mean(apart):.4f}; at the end {last:.3f} times the loss")


def losses_of(kind: str, args: argparse.Namespace, every: int) -> list[tuple[list[float], dict[int, float]]]:
    """For each seed, the loss of every step, and the held-out loss by step."""
    from trillora.data.stage import evaluation_batches, read_stage
    from trillora.devices.mesh import find_devices
    from trillora.events import ignore_events
    from trillora.model.loading.source import OpenModel
    from trillora.model.loading.weights import load_weights
    from trillora.recipe.schema import stages_of
    from trillora.step.autotune import choose
    from trillora.training.entries.programs import place_state
    from trillora.training.entries.stepper import placed_batches
    from trillora.training.validation import Evaluator

    opened = OpenModel.open("smollm2", revision=None, trust_remote_code=False)
    plan, base, evaluator, curves = None, {}, None, []
    for seed in range(args.seeds):
        [stage] = stages_of(curve_recipe(kind, args, seed))
        data = read_stage(stage, opened.tokenizer, ignore_events)
        if plan is None:  # the same programs for all seeds
            plan = choose(data.recipe, opened.config, find_devices("auto", 1), args.steps, ignore_events)
            model, shardings = plan.assembly.model, plan.assembly.base_shardings
            base = load_weights(opened.folder, model.module, model.layout, shardings, ignore_events)
            held_out = evaluation_batches(data, data.recipe.train.batch_size)
            assert held_out is not None
            evaluator = Evaluator(plan.assembly, held_out, "curves")
        assert evaluator is not None
        state = place_state(plan.assembly, seed, base)
        losses: list[Any] = []
        measured = {0: evaluator.measure(state.adapter, base, lambda: None).loss}
        for batch in placed_batches(data.batches, range(args.steps), plan.assembly.mesh):
            state, metrics = plan.compiled(state, base, batch)
            losses.append(metrics.loss)
            if len(losses) % every == 0:
                measured[len(losses)] = evaluator.measure(state.adapter, base, lambda: None).loss
        curves.append((list(map(float, losses)), measured))
        print(f"{kind}, seed {seed}: held-out loss {measured[0]:.4f} to {measured[max(measured)]:.4f}", flush=True)
    return curves


def curve_recipe(kind: str, args: argparse.Namespace, seed: int) -> Any:
    from trillora.recipe.load import load_recipe

    recipe = {
        "model": "smollm2",
        "data": {"path": str(DATA / "train.jsonl"), "validation": str(DATA / "validation.jsonl")},
        "lora": {"rank": 16, "alpha": 32},
        "train": {
            "sequence_length": 256,
            "batch_size": 4,
            "steps": args.steps,
            "learning_rate": 1e-3,
            "warmup_steps": 5,
            "seed": seed,
        },
        "evaluate": {"max_documents": NUM_HELD_OUT},
        "engine": {"layers": "scan"},
    }
    overrides: Sequence[str] = [f"{k}={v}" for k, v in options_of(kind).items()]
    return load_recipe(recipe, [*overrides, *args.set])


if __name__ == "__main__":
    main()
