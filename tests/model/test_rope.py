"""Rotations of queries and keys on a TPU: as products with a matrix, equal to transformers' own code bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchax import interop
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.nanochat import modeling_nanochat

from trillora.model.overrides.rope import rotations_as_products
from trillora.model.overrides.torchax_fixes import environment


@pytest.mark.parametrize("code", [modeling_llama, modeling_glm, modeling_cohere, modeling_nanochat])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_rotation_as_a_product_is_exact(code: object, dtype: jnp.dtype) -> None:
    class Model(torch.nn.Module):
        __module__ = code.__name__  # type: ignore[attr-defined]

    ((file, name, rotated),) = rotations_as_products(Model())
    assert (file, name) == (code, "rotate_half")
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 128), dtype)

    def as_arrays(function: object) -> tuple[np.ndarray, np.ndarray]:
        def run(x: jax.Array) -> jax.Array:
            with environment():
                return interop.jax_view(function(interop.torch_view(x)))  # type: ignore[operator]

        out, back = jax.vjp(jax.jit(run), x)
        return np.asarray(out), np.asarray(back(jnp.cos(x))[0])

    for found, expected in zip(as_arrays(rotated), as_arrays(code.rotate_half), strict=True):  # type: ignore[attr-defined]
        np.testing.assert_array_equal(found, expected)
