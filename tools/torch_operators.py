"""Records which operators of PyTorch the supported models use, in tests/golden/torch-operators.json.

    python tools/torch_operators.py              all configurations of tests/support/tiny_models.py: some minutes
    python tools/torch_operators.py --check      whether this torch and torchax have every recorded operator

    {"torch.ops.aten.mul.Tensor": ["llama", "gemma3", …], "torch.nn.functional.silu": […]}

Each model is traced as in training, and torchax is asked for each operator by name. A new torch or torchax that drops
one is found by tests/project/test_torch_operators.py in a second, with the models that need it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "golden" / "torch-operators.json"
MOST_NAMED = 5  # models of an operator


def main() -> int:
    os.environ.update(JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
    if "--check" in sys.argv:
        missing = missing_operators(read_record())
        print("\n".join(missing) or f"torchax has all {len(read_record())} operators.")
        return 1 if missing else 0
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import tiny_models

    used: dict[str, list[str]] = defaultdict(list)
    for name in [*tiny_models.buildable(), *tiny_models.WRAPPERS]:
        try:
            found = operators_of(name)
        except Exception as error:  # a model that is refused, or fails: docs/models.md has the reason
            print(f"{name}: not traced ({str(error).splitlines()[0][:100]})", flush=True)
            continue
        for operator in found:
            used[operator].append(name)
    record = dict(sorted(used.items()))
    RECORD.write_text(json.dumps(record, indent=0) + "\n", "utf-8")
    print(f"{len(record)} operators of {len({n for names in used.values() for n in names})} models")
    return 0


def read_record() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORD.read_text("utf-8"))
    return found


def operators_of(name: str) -> set[str]:
    """Of one model, traced and not computed."""
    import jax
    import jax.numpy as jnp
    import tiny_models
    from torchax.tensor import Environment

    from trillora.model.bridge import CausalLM
    from trillora.model.lora_spec import LoraSpec

    found: set[str] = set()
    original = Environment._get_op_or_decomp

    def recorded(env: Environment, function: Any) -> Any:
        operator = original(env, function)  # raises an error for a function that torch breaks into operators
        found.add(name_of(function))
        return operator

    model = CausalLM(tiny_models.configuration(name), lora=LoraSpec(rank=2, alpha=2), scan=False)
    base, adapter = (
        {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in layout.items()}
        for layout in (model.layout, model.adapter_layout)
    )
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    Environment._get_op_or_decomp = recorded  # type: ignore[method-assign]
    try:
        jax.eval_shape(lambda b, a, t: model.logits(b, a, {"tokens": t}), base, adapter, tokens)
    finally:
        Environment._get_op_or_decomp = original  # type: ignore[method-assign]
    return found


def name_of(function: Any) -> str:
    """The name by which `find_operator` finds it again."""
    import torch

    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops.{function.namespace}.{function.overloadpacket.__name__}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch.ops.{str(function).replace('.', ' ').split()[0]}.{function.__name__}"
    return str(torch.overrides.resolve_name(function) or getattr(function, "__qualname__", function))


def find_operator(name: str) -> Any:
    """The operator, or None if this torch does not have it."""
    import torch

    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def missing_operators(record: dict[str, list[str]]) -> list[str]:
    """One line for each operator that torch or torchax does not have, with the models that need it."""
    from torchax.tensor import OperatorNotFound

    from trillora.model.overrides.torchax_fixes import environment

    missing = []
    for name, models in record.items():
        others = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
        users = f"{', '.join(models[:MOST_NAMED])}{others}"
        function = find_operator(name)
        if function is None:
            missing.append(f"torch has no {name}, which is used by {users}")
            continue
        try:
            environment()._get_op_or_decomp(function)
        except OperatorNotFound:
            missing.append(f"torchax has no {name}, which is used by {users}")
    return missing


if __name__ == "__main__":
    sys.exit(main())
