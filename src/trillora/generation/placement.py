"""Puts a model that generates, and its adapter, on devices: on one if the weights fit there, else split over all.

model, mesh = place_model(config, jax.devices(), spec, "auto", "auto", "full", trust_remote_code=False)
adapter = place_adapter(matrices, model, mesh, where="runs/first/adapter")
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from trillora.devices.chips import Device
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.quantize import Matmul, stored_format
from trillora.model.adapters import fit_adapter
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Tree
from trillora.model.lora_spec import LoraSpec
from trillora.recipe.schema import Auto, Dtype, Quantize
from trillora.step.decisions import choose_dtype, fastest_attention, formats_to_try, memory_limit
from trillora.step.shardings import shard_adapter

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

FULL_DEVICE = 0.6  # fraction of a device's memory that weights may use before they are split over all devices


def place_model(
    config: PretrainedConfig,
    devices: Sequence[Device],
    spec: LoraSpec | None,
    dtype: Auto | Dtype,
    quantize: Auto | Quantize,
    codes_for: Matmul,
    *,
    trust_remote_code: bool,
) -> tuple[CausalLM, Mesh]:
    """The model on one device if the weights fit there; otherwise with tensor parallelism over all devices.
    `codes_for`: the products that the codes were made for in training. Here products are full."""
    platform, text = devices[0].platform, config.get_text_config()

    def build(mesh: Mesh, quantize: Quantize) -> CausalLM:
        number = "float32" if dtype == "float32" else choose_dtype(devices, text, quantize)[0]
        return CausalLM(
            config,
            ModelOptions(
                dtype=number,
                quantize=stored_format(quantize, platform, codes_for),
                scan=False,
                remat="none",
                attention=fastest_attention(devices[0], number, text),
                mesh=mesh,
                trust_remote_code=trust_remote_code,
            ),
            lora=spec,
        )

    limit = None if platform == "cpu" else memory_limit(devices)
    formats = formats_to_try(platform) if quantize == "auto" else (quantize,)
    meshes = (make_mesh(devices[:1], MeshShape()), make_mesh(devices, MeshShape(tensor=len(devices))))
    for mesh, format in itertools.product(meshes, formats):
        model = build(mesh, format)
        if limit is None or sum(leaf.num_bytes for leaf in model.layout.values()) <= FULL_DEVICE * limit * mesh.size:
            break
    return model, mesh  # the last ones, if nothing fits: they need the least memory


def place_adapter(matrices: dict[str, np.ndarray], model: CausalLM, mesh: Mesh, *, where: str) -> Tree:
    """The matrices of an adapter on the devices."""
    fitted = fit_adapter(matrices, model.adapter_layout, where=where)
    shardings = shard_adapter(model.adapter_layout, mesh)
    return {key: jax.device_put(array, shardings[key]) for key, array in fitted.items()}
