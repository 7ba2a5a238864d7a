"""The device mesh, and the rules that shard arrays over it.

The mesh has three axes. `data` replicates the base weights. `fsdp` shards them and gathers each layer when it is used.
`tensor` shards the matmuls. The sequences of a batch are sharded over `data` and `fsdp`. The rules depend only
on shapes, never on the model:

    weight [4096, 1024] on data 1 x fsdp 4 x tensor 2  ->  PartitionSpec("tensor", "fsdp")
    batch  [8, 2048]    on data 2 x fsdp 4             ->  PartitionSpec(("data", "fsdp"))

A run that trains several adapters together may have a fourth axis, `adapter`: each of its parts trains some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from trillora.devices.chips import GIB, Device, has_accelerator
from trillora.errors import TrilloraError

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS, ADAPTER_AXIS = "data", "fsdp", "tensor", "adapter"
AXES = (DATA_AXIS, FSDP_AXIS, TENSOR_AXIS)
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)
PROGRAM_CACHE_BYTES = 4 * GIB
CACHED_SECONDS = 0.3  # programs that took longer to compile are cached; jax's own limit is 1 s
SMALL = 2**16  # elements; replicating a smaller weight costs less than gathering it


@dataclass(frozen=True)
class MeshShape:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    adapter: int = 1

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor * self.adapter

    def __str__(self) -> str:
        adapter = f"adapter {self.adapter} x " if self.adapter > 1 else ""
        return f"{adapter}data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"


def find_devices(backend: str, num_devices: int | None) -> list[jax.Device]:
    """Returns the requested devices. If they are missing, that is an error: we never fall back silently."""
    if backend == "cpu" or (backend == "auto" and not has_accelerator()):
        # Otherwise an installed libtpu searches for chips and prints long warnings on machines without any.
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices() if backend == "auto" else jax.devices(backend)
    except RuntimeError as error:
        seen = ", ".join(sorted({d.platform for d in jax.devices()}))
        raise TrilloraError(
            f"No {backend} device was found on this machine.",
            where="hardware.backend",
            do=f"use hardware.backend={seen}, or install jax for {backend} and check the runtime type",
        ) from error
    if num_devices is None:
        return devices
    if num_devices > len(devices):
        raise TrilloraError(
            f"{num_devices} devices requested, but only {len(devices)} {devices[0].platform} devices found.",
            where="hardware.devices",
            do=f"set hardware.devices to {len(devices)} or auto",
        )
    return devices[:num_devices]


def make_mesh(devices: Sequence[Device], shape: MeshShape) -> Mesh:
    if shape.size != len(devices):
        raise TrilloraError(
            f"A mesh of {shape} needs {shape.size} devices, but {len(devices)} are used.",
            where="hardware.mesh",
            do=f"choose sizes whose product is {len(devices)}, or set hardware.mesh to auto",
        )
    inner = (shape.data, shape.fsdp, shape.tensor)
    if shape.adapter > 1:
        return Mesh(np.array(devices).reshape(shape.adapter, *inner), (ADAPTER_AXIS, *AXES))
    return Mesh(np.array(devices).reshape(inner), AXES)


def expert_axes(num_experts: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that the experts of a layer are split over, so that each device computes its own experts: `fsdp` and
    `tensor`, or the first of them that divides their number."""
    for axes in ((FSDP_AXIS, TENSOR_AXIS), (FSDP_AXIS,), (TENSOR_AXIS,)):
        used = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if used and num_experts % math.prod(mesh.shape[axis] for axis in used) == 0:
            return used
    return ()


def weight_spec(
    shape: tuple[int, ...],
    mesh: Mesh,
    *,
    stacked: bool,
    tensor_on_last_dim: bool = False,
    fsdp_on_last_dim: bool = False,
    block: int = 1,
    of_experts: bool = False,
) -> PartitionSpec:
    """The sharding of a frozen weight: `tensor` on the last dim or the one before, `fsdp` on the largest other dim. The
    stacked dim is never sharded. A small weight, or a dim that is not divisible, is replicated. The last dim is split
    in multiples of `block`. The weight of all experts of a layer is split by expert, over `expert_axes`.

    `fsdp_on_last_dim`: for a table of embeddings. Each device looks up its columns for all tokens; if it had some of
    the rows, the devices would add up whole rows, most of them zero."""
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    dims = list(range(1 if stacked else 0, len(shape)))
    if len(dims) < 2 or math.prod(shape[dims[0] :]) < SMALL:
        return PartitionSpec()

    def divides(axis: str, dim: int) -> bool:
        size = mesh.shape[axis]
        return size > 1 and shape[dim] % (size * (block if dim == dims[-1] else 1)) == 0

    if of_experts and (axes := expert_axes(shape[dims[0]], mesh)):
        spec[dims[0]] = axes if len(axes) > 1 else axes[0]
        if FSDP_AXIS in axes:
            return PartitionSpec(*spec)
    tensor_dim = dims[-1] if tensor_on_last_dim else dims[-2]
    if TENSOR_AXIS not in spec and divides(TENSOR_AXIS, tensor_dim):
        spec[tensor_dim] = TENSOR_AXIS
    for dim in dims[::-1] if fsdp_on_last_dim else sorted(dims, key=lambda d: -shape[d]):
        if spec[dim] is None and divides(FSDP_AXIS, dim):
            spec[dim] = FSDP_AXIS
            break
    return PartitionSpec(*spec)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences are sharded over the batch axes; the tokens of a sequence stay together."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def group_sharding(mesh: Mesh) -> NamedSharding:
    """Batches [K, B, T] of several adapters: the adapters over their axis, if the mesh has one; sequences as always."""
    return NamedSharding(mesh, PartitionSpec(adapter_axis(mesh), BATCH_AXES))


def adapter_axis(mesh: Mesh) -> str | None:
    return ADAPTER_AXIS if ADAPTER_AXIS in mesh.shape else None


def local_rows(num_rows: int, mesh: Mesh) -> list[int]:
    """The sequences of a batch that are on the devices of this process."""
    parts = [index[0] for index in batch_sharding(mesh).addressable_devices_indices_map((num_rows,)).values() if index]
    return sorted({row for part in parts for row in range(*part.indices(num_rows))})


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, num_rows: int | None = None) -> dict[str, jax.Array]:
    """Copies a batch to the mesh. The arrays contain all sequences or, with `num_rows`, only `local_rows`."""
    sharding = batch_sharding(mesh)
    whole = num_rows or len(next(iter(batch.values())))
    place = {row: number for number, row in enumerate(local_rows(whole, mesh))} if num_rows else None

    def put(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # every device of the mesh has a part
            if place is None:
                return array[index]
            first = place[index[0].indices(whole)[0]]
            return array[first : first + len(range(*index[0].indices(whole)))]

        return jax.make_array_from_callback((whole, *array.shape[1:]), sharding, part)

    return {name: put(array) for name, array in batch.items()}


def put_array(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Copies an array that every process has to the devices of all processes; `jax.device_put` does not do that."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def split_rows(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Constrains the leading dim to the batch axes. Used at every boundary of the model: without it, the partitioner
    computed wrong numbers on a data x fsdp x tensor mesh."""
    if mesh is None or mesh.size == 1:
        return array
    return jax.lax.with_sharding_constraint(array, batch_sharding(mesh))


def per_shard(function: Callable[..., object], mesh: Mesh, in_specs: object, out_specs: object) -> Callable[..., Any]:
    """Runs `function` on each device with its shard of the arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather(tree: object, mesh: Mesh) -> Any:
    """Copies whole arrays to the host, in every process."""
    everywhere = jax.jit(lambda t: t, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(np.asarray, everywhere)


def remember_programs(folder: Path) -> None:
    """Caches compiled programs on disk, so that a resumed run does not compile again. JAX_COMPILATION_CACHE_DIR has
    precedence over `folder`."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", PROGRAM_CACHE_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_SECONDS)


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Logical OR of each flag over all processes, so that all take the same branch. Otherwise they would deadlock."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(axis=0))


def same_everywhere(number: int) -> bool:
    """Whether all processes of the run have the same number."""
    return jax.process_count() == 1 or len(set(multihost_utils.process_allgather(np.array(number)).tolist())) == 1
