"""Several adapters in one step against the same adapters one after another, on one base.

    python benchmarks/together.py --adapters 4 --rows 1 --tokens 256 [--shape 1b|135m|tiny]

Random weights, LoRA rank 16 on the seven linear layers of a block, AdamW: the steps of `trillora train`, built by the
same functions. Prints one JSON line: the time of a step of one adapter, of all together, and their ratio to the time of
one after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.metadata import version
from typing import Any

from gpu_step import SHAPES, random_batch

SHAPES["135m"] = {  # SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, as in engine.remat=linear")
    args = parser.parse_args()
    args.packed = False
    print(json.dumps(measure(args)), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    single, together = step_seconds(args)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "shape": args.shape,
        "adapters": args.adapters,
        "rows of each": args.rows,
        "tokens": args.tokens,
        "one, ms": round(1e3 * single, 2),
        "together, ms": round(1e3 * together, 2),
        "together / in sequence": round(together / (args.adapters * single), 3),
        "peak GiB, one base": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2),
        "device": jax.devices()[0].device_kind,
        "versions": {name: version(name) for name in ("jax", "torch", "torchax", "transformers")},
    }


def step_seconds(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step of one adapter, and of all together."""
    import jax
    import numpy as np
    from transformers import LlamaConfig

    from trillora.devices.mesh import find_devices, group_sharding, put_batch, replicated
    from trillora.engine.group import Lanes
    from trillora.events import ignore_events
    from trillora.model.loading.weights import random_weights
    from trillora.recipe.group import group_of
    from trillora.recipe.load import load_recipe
    from trillora.step.autotune import choose
    from trillora.step.group import assemble_group, options_of
    from trillora.training.entries.programs import place_group, place_state

    values = {
        "model": "random",
        "data": {"path": "random.jsonl", "pack": False},
        "lora": {"rank": 16, "alpha": 32},
        "train": {"sequence_length": args.tokens, "batch_size": args.rows, "steps": args.steps},
        "sweep": {"seed": list(range(args.adapters))},
    }
    group = group_of(load_recipe(values, args.overrides))
    assert group is not None
    alone = group.members[0].recipe
    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=args.tokens)
    devices = find_devices("auto", 1)
    one = choose(alone, config, devices, args.steps, ignore_events)
    kept = {**one.settings.shared(), "adapters_at_once": args.adapters}

    def build(recipe: Any, settings: Any, config: Any, mesh: Any, num_steps: int) -> Any:
        return assemble_group(group.members, settings, config, mesh)

    many = choose(alone, config, devices, args.steps, ignore_events, kept=kept, build=build)
    base = random_weights(one.assembly.model.module, one.assembly.model.layout, one.assembly.base_shardings, seed=0)
    mesh, generator = one.assembly.mesh, np.random.default_rng(0)
    rows = [random_batch(generator, args, config.vocab_size) for _ in range(args.adapters)]

    state = place_state(one.assembly, seed=0, base=base)
    batch = put_batch(rows[0], mesh)
    single = timed(lambda state: one.compiled(state, base, batch), state, args.steps)

    lanes = jax.device_put(
        Lanes(np.arange(args.adapters, dtype=np.int32), np.ones(args.adapters, bool)), replicated(mesh)
    )
    options = jax.device_put(options_of(group.members, [args.steps] * args.adapters), replicated(mesh))
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    together_batch = jax.device_put(stacked, group_sharding(mesh))
    group_state = place_group(many.assembly, group.members, base)
    together = timed(lambda state: many.compiled(state, base, options, lanes, together_batch), group_state, args.steps)
    return single, together


def timed(step: Any, state: Any, num_steps: int) -> float:
    """Seconds of a step: the median of the second half."""
    seconds = []
    for _ in range(num_steps):
        before = time.perf_counter()
        state, metrics = step(state)
        metrics.loss.block_until_ready()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[num_steps // 2 :])


if __name__ == "__main__":
    main()
