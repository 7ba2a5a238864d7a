"""The TPU attention kernel compiles, forward and backward, on a machine without a TPU.

The interpreter used in `test_attention.py` accepts shapes and layouts that the TPU compiler rejects. libtpu reads its
settings once, before jax is imported, so each test compiles in a separate process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
from dose import slow_case

from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, has wheels for x86-64 Linux only: Colab, Kaggle, WSL, a container",
    ),
]

# Takes the name of a slice and prints one line for every form it has compiled.
PROGRAM = textwrap.dedent(
    """
    import sys

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from trillora.engine.attention import MaskRule, ScoreScaling, unsupported
    from trillora.devices.slices import find_slice
    from trillora.devices.mesh import BATCH_AXES, TENSOR_AXIS, MeshShape, make_mesh
    from trillora.model.overrides.attention import _attend_per_shard
    from trillora.model.trace import Trace

    chips = find_slice(sys.argv[1])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chips.topology, **chips.options)
    mesh = make_mesh(topology.devices, MeshShape(data=1, fsdp=len(topology.devices) // 2, tensor=2))
    B, T, H, K = mesh.size // 2, 512, 4, 2

    # rule, soft cap, sinks, packed, key width, value width, tokens, dtype
    forms = {
        "soft cap": (MaskRule(), 30.0, False, False, 128, 128, T, jnp.bfloat16),
        "window": (MaskRule(window=200), None, False, True, 128, 128, T, jnp.bfloat16),
        "sinks": (MaskRule(window=128), None, True, True, 128, 128, T, jnp.bfloat16),
        "padded to whole blocks": (MaskRule(), None, False, True, 128, 128, 500, jnp.bfloat16),
        "odd heads": (MaskRule(), None, False, True, 80, 80, T, jnp.bfloat16),
        "values of another width": (MaskRule(), None, False, True, 192, 128, T, jnp.bfloat16),
        "float32": (MaskRule(), None, False, True, 128, 128, T, jnp.float32),
    }


    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


    for name, (rule, softcap, sinks, packed, width, value_width, num_tokens, dtype) in forms.items():
        def run(query, key, value, sinks, segments, positions):
            trace = Trace(
                weights={}, segments_BT=segments, positions_BT=positions, attention="splash", mesh=mesh
            )
            return _attend_per_shard(trace, query, key, value, rule, ScoreScaling(0.1, softcap), sinks, None)

        def both(query, key, value, sinks, segments, positions, cotangent):
            out, pull_back = jax.vjp(lambda *t: run(*t, sinks, segments, positions), query, key, value)
            return out, pull_back(cotangent)

        rows = (BATCH_AXES, None, TENSOR_AXIS, None)
        query, key, value, cotangent = (
            shape((B, num_tokens, *dims), dtype, *rows)
            for dims in ((H, width), (K, width), (K, value_width), (H, value_width))
        )
        tokens = shape((B, num_tokens), jnp.int32, BATCH_AXES) if packed else None
        sink = shape((H,), dtype, TENSOR_AXIS) if sinks else None
        reason = unsupported("splash", query, key, value, rule, ScoreScaling(0.1, softcap), sink, None)
        compiled = jax.jit(both).lower(query, key, value, sink, tokens, tokens, cotangent).compile()
        kernels = compiled.as_text().count("tpu_custom_call")
        assert (kernels >= 2) == (reason is None), f"{name}: {kernels} kernels, {reason}"
        print(f"compiled: {name}", flush=True)
    """
)
NUM_FORMS = 7


@pytest.mark.parametrize("slice_name", ["v5e-4", slow_case("v6e-4")])
def test_the_kernel_compiles_in_every_supported_form(slice_name: str) -> None:
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, slice_name], env=environment, capture_output=True, text=True, check=False
    )
    compiled = [line for line in done.stdout.splitlines() if line.startswith("compiled: ")]
    assert done.returncode == 0, f"after {compiled}:\n{done.stderr[-4000:]}"
    assert len(compiled) == NUM_FORMS
