"""The TPU kernel compiles, forwards and backwards, for chips that are not here.

The interpreter of `test_attention.py` takes shapes and layouts that the chip's compiler refuses; this is the other
half. libtpu reads its settings once, before jax is imported, so the compiler has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from trillora.devices.slices import COMPILE_ONLY_ENVIRONMENT

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, has wheels for x86-64 Linux only: Colab, Kaggle, WSL, a container",
    ),
]

# Runs with the name of a slice; prints one line per form it has compiled.
PROGRAM = textwrap.dedent(
    """
    import sys

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from trillora.engine.attention import MaskRule, Scores, unsupported
    from trillora.devices.slices import find_slice
    from trillora.devices.mesh import BATCH_AXES, TENSOR_AXIS, MeshShape, make_mesh
    from trillora.model.overrides.attention import _attend_per_shard
    from trillora.model.trace import Trace

    chips = find_slice(sys.argv[1])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chips.topology, **chips.options)
    mesh = make_mesh(topology.devices, MeshShape(data=1, fsdp=len(topology.devices) // 2, tensor=2))
    B, T, H, K = mesh.size // 2, 512, 4, 2

    # rule, soft cap, sinks, documents, key width, value width, tokens, kind of number
    forms = {
        "soft cap": (MaskRule(), 30.0, False, False, 128, 128, T, jnp.bfloat16),
        "window": (MaskRule(window=200), None, False, True, 128, 128, T, jnp.bfloat16),
        "sinks": (MaskRule(window=128), None, True, True, 128, 128, T, jnp.bfloat16),
        "filled up to whole blocks": (MaskRule(), None, False, True, 128, 128, 500, jnp.bfloat16),
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
            return _attend_per_shard(trace, query, key, value, rule, Scores(0.1, softcap), sinks, None)

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
        reason = unsupported("splash", query, key, value, rule, Scores(0.1, softcap), sink, None)
        compiled = jax.jit(both).lower(query, key, value, sink, tokens, tokens, cotangent).compile()
        kernels = compiled.as_text().count("tpu_custom_call")
        assert (kernels >= 2) == (reason is None), f"{name}: {kernels} kernels, {reason}"
        print(f"compiled: {name}", flush=True)
    """
)
NUM_FORMS = 7


@pytest.mark.parametrize("slice_name", ["v5e-4", "v6e-4"])
def test_the_kernel_compiles_in_every_form_it_claims(slice_name: str) -> None:
    environment = {**os.environ, **COMPILE_ONLY_ENVIRONMENT, "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, slice_name], env=environment, capture_output=True, text=True, check=False
    )
    compiled = [line for line in done.stdout.splitlines() if line.startswith("compiled: ")]
    assert done.returncode == 0, f"after {compiled}:\n{done.stderr[-4000:]}"
    assert len(compiled) == NUM_FORMS
