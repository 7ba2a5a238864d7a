"""How fast the devices multiply, copy and exchange data, and whether what they exchange is right.

All devices work at once and the slowest one counts. Each rate is measured on a loop whose length is doubled until it
takes long enough to time; the time of a loop without turns is subtracted.

    exchange_faults(devices)               # [] or ["all-reduce: device 3 has 28.0 in place of 36.0"]
    measure_rates(devices, "bfloat16")     # Rates(matrix_tflops=187.2, memory_gb_per_second=702.1, ...)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from trillora.devices.mesh import per_shard
from trillora.recipe.schema import Dtype

AXIS = "devices"
PRODUCTS = 4  # in a turn of the loop, so that their results need not be copied
REPEATS = 3  # the fastest counts


@dataclass(frozen=True)
class LoopSizes:
    """How much work a turn of a loop is."""

    side: int  # of the square matrices of a matmul
    num_bytes: int  # that are read and written
    part_bytes: int  # of each device in a collective, at most
    gathered_bytes: int  # of all parts together, at most
    seconds: float  # that a loop takes at least


# A turn takes about a millisecond or more on any chip, and the arrays are far larger than its caches.
CHIP = LoopSizes(side=8192, num_bytes=2**30, part_bytes=2**26, gathered_bytes=2**30, seconds=0.25)
CPU = LoopSizes(side=256, num_bytes=2**22, part_bytes=2**18, gathered_bytes=2**22, seconds=0.02)


@dataclass(frozen=True)
class Rates:
    """Of one device."""

    matrix_tflops: float
    memory_gb_per_second: float
    gather_gb_per_second: float | None
    reduce_gb_per_second: float | None


def exchange_faults(devices: list[Any]) -> list[str]:
    """What is wrong with collectives over all devices. Whole numbers are exchanged, so results must be exact."""
    mesh, num_devices = Mesh(np.array(devices), (AXIS,)), len(devices)
    numbers = np.arange(num_devices * num_devices * 128, dtype=np.float32).reshape(num_devices, -1)
    sums = numbers.sum(0)
    expected = {
        "all-reduce": np.broadcast_to(sums, (num_devices, *sums.shape)),
        "all-gather": np.broadcast_to(numbers.ravel(), (num_devices, numbers.size)),
        "reduce-scatter": sums.reshape(num_devices, -1),
    }

    found = exchange_program(devices).compile()(_split(numbers, mesh))
    faults = []
    for name, array in found.items():
        for shard in array.addressable_shards:
            row = shard.index[0].start or 0
            wrong = np.flatnonzero(np.asarray(shard.data)[0] != expected[name][row])
            if wrong.size:
                got, want = float(np.asarray(shard.data)[0, wrong[0]]), float(expected[name][row, wrong[0]])
                faults.append(f"{name}: device {row} has {got} in place of {want}, {wrong.size} numbers are wrong")
    return faults


def exchange_program(devices: list[Any]) -> Any:
    """The lowered program that exchanges numbers. The devices need not be attached."""
    mesh, split, num_devices = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS), len(devices)

    def exchange(part_1N: jax.Array) -> dict[str, jax.Array]:
        part_N = part_1N[0]
        results = {
            "all-reduce": jax.lax.psum(part_N, AXIS),
            "all-gather": jax.lax.all_gather(part_N, AXIS).ravel(),
            "reduce-scatter": jax.lax.psum_scatter(part_N, AXIS, tiled=True),
        }
        return {name: result[None] for name, result in results.items()}

    place = jax.sharding.NamedSharding(mesh, split)
    numbers = jax.ShapeDtypeStruct((num_devices, num_devices * 128), jnp.float32, sharding=place)
    return jax.jit(per_shard(exchange, mesh, split, split)).lower(numbers)


def measure_rates(devices: list[Any], dtype: Dtype) -> Rates:
    mesh, sizes = Mesh(np.array(devices), (AXIS,)), CPU if devices[0].platform == "cpu" else CHIP
    gather = reduce = None
    if len(devices) > 1:
        others = (len(devices) - 1) / len(devices)
        part = min(sizes.part_bytes, sizes.gathered_bytes // len(devices))
        gather = len(devices) * others * part / _gather_seconds(mesh, sizes, part) / 1e9
        reduce = 2 * others * sizes.part_bytes / _reduce_seconds(mesh, sizes) / 1e9
    flops = 2 * PRODUCTS * sizes.side**3
    return Rates(
        matrix_tflops=flops / _product_seconds(mesh, sizes, dtype) / 1e12,
        memory_gb_per_second=2 * sizes.num_bytes / _copy_seconds(mesh, sizes) / 1e9,
        gather_gb_per_second=gather,
        reduce_gb_per_second=reduce,
    )


def _product_seconds(mesh: Mesh, sizes: LoopSizes, dtype: Dtype) -> float:
    """Four matmuls in a row. Random numbers, because chips are faster with zeros; of a size that matmuls keep."""

    def start() -> tuple[jax.Array, jax.Array]:
        x, w = jax.random.normal(jax.random.key(0), (2, sizes.side, sizes.side), jnp.dtype(dtype))
        return x, w / sizes.side**0.5

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, w = carry
        for _ in range(PRODUCTS):
            x = x @ w
        return x, w

    return _seconds(mesh, start, turn, sizes.seconds)


def _copy_seconds(mesh: Mesh, sizes: LoopSizes) -> float:
    return _seconds(mesh, lambda: _ones(sizes.num_bytes), lambda x: x + 1, sizes.seconds)


def _reduce_seconds(mesh: Mesh, sizes: LoopSizes) -> float:
    def turn(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS) / mesh.size

    return _seconds(mesh, lambda: _ones(sizes.part_bytes), turn, sizes.seconds)


def _gather_seconds(mesh: Mesh, sizes: LoopSizes, part_bytes: int) -> float:
    def start() -> tuple[jax.Array, jax.Array]:
        part = _ones(part_bytes)
        return part, jnp.zeros((mesh.size, *part.shape), part.dtype)

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part, _ = carry
        whole = jax.lax.all_gather(part, AXIS)
        return part.at[0].set(whole[-1, 1]), whole  # the next turn needs this one, and the whole result is kept

    return _seconds(mesh, start, turn, sizes.seconds)


def _ones(num_bytes: int) -> jax.Array:
    return jnp.ones(num_bytes // 4, jnp.float32)


def _seconds(mesh: Mesh, start: Callable[[], object], turn: Callable[[Any], Any], at_least: float) -> float:
    """Seconds of one turn, which maps what a device has to what it has next."""

    def loop(times: jax.Array) -> jax.Array:
        end = jax.lax.fori_loop(0, times, lambda _, carry: turn(carry), start())
        # One number of each result is returned, so that all of it has to be computed.
        return jnp.stack([leaf.ravel()[-1].astype(jnp.float32) for leaf in jax.tree.leaves(end)])[None]

    program = jax.jit(per_shard(loop, mesh, PartitionSpec(), PartitionSpec(AXIS)))

    def timed(times: int) -> float:
        started = time.perf_counter()
        program(np.int32(times)).block_until_ready()
        return time.perf_counter() - started

    timed(0)  # compiles
    overhead, times = timed(0), 1
    while timed(times) - overhead < at_least and times < 2**20:
        times *= 2
    while True:
        seconds = min(timed(times) for _ in range(REPEATS)) - min(timed(0) for _ in range(REPEATS))
        if seconds > at_least / 4 or times >= 2**20:
            return seconds / times
        times *= 2  # what was timed above was another program's time


def _split(array: np.ndarray, mesh: Mesh) -> jax.Array:
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
