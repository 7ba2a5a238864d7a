"""Sums of matmuls on a Hopper GPU, in one Pallas kernel for its tensor cores (jax's Mosaic GPU).

    y = x Wᵀ + low Bᵀ + residual            a linear layer with LoRA, added to the residual stream
    dx = dq Wq + dk Wk + dv Wv + dlow A     the gradient of what q, k and v are computed from

cuBLAS computes one matmul at a time, so each further one reads the sum so far and writes it again. Here a block of the
result stays in registers until all matmuls have been added, in float32, and is rounded and written once. LoRA's term
is a matmul like the others, with few columns.

    >>> product_sum([(x, w), (low, b)], residual, transposed=True, on=Products(processors=132))

How a block is computed: three groups of four warps share a ring of places for parts of the operands. One group copies
parts into places that are free. The other two multiply them, half of the block each, and free them. While these write
the block, the first group is already fetching the next.

Elsewhere, and for shapes that the kernel does not take, XLA computes the same with cuBLAS. There, too, each matmul is
added to the sum before it as a part of the matmul: XLA does so if the matmul comes first in the addition.

Legend: M rows, N columns of the result, K what is summed over.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from trillora.engine.kernels.triton_call import LARGEST

Pair = tuple[jax.Array, jax.Array]
FEW = 64  # columns of LoRA's terms are padded to a multiple of this: the kernel's step along K


class Products(NamedTuple):
    """Where sums of matmuls are computed."""

    processors: int = 0  # of a Hopper GPU; 0: XLA computes the sums
    interpret: Any = None  # parameters of jax's interpreter for GPU kernels


IN_XLA = Products()


@dataclass(frozen=True)
class Tiles:
    """The defaults were the fastest of eight on an H200, by 1 to 2 %."""

    rows: int = 64  # of one of the two groups that multiply
    columns: int = 256
    inner: int = FEW
    places: int = 4
    written: int = 64  # rows and columns that are written at once
    band: int = 4  # blocks of rows that are computed before the next columns, so that operands stay in the cache

    @property
    def block(self) -> tuple[int, int]:
        return 2 * self.rows, self.columns


USUAL = Tiles()


def product_sum(
    pairs: Sequence[Pair], addend: jax.Array | None = None, *, transposed: bool, on: Products, tiles: Tiles = USUAL
) -> jax.Array:
    """The sum of left @ right over `pairs`, plus `addend`. Left: [..., K]; right: [N, K] if `transposed`, else [K, N].
    The widest matmul comes first."""
    (left, right), *_ = pairs
    width = right.shape[0 if transposed else 1]
    shape = (*left.shape[:-1], width)
    rows = [(left.reshape(-1, left.shape[-1]), right) for left, right in pairs]
    if is_supported(rows, width, on.processors, tiles):
        total = None if addend is None else addend.reshape(-1, width)
        return product_sum_kernel(tuple(rows), total, transposed=transposed, on=on, tiles=tiles).reshape(shape)
    for left, right in reversed(pairs):
        product = left @ (right.T if transposed else right)
        addend = product if addend is None else product + addend
    assert addend is not None
    return addend


def is_supported(pairs: Sequence[Pair], width: int, processors: int, tiles: Tiles = USUAL) -> bool:
    """Whether the kernel takes these shapes, and has a block for each processor."""
    num_rows = pairs[0][0].shape[0]
    block_rows, block_columns = tiles.block
    fits = num_rows % block_rows == 0 and width % block_columns == 0 and num_rows * width < LARGEST
    usual = all(
        left.dtype == right.dtype == jnp.bfloat16 and left.shape[1] % tiles.inner == 0 and left.size < LARGEST
        for left, right in pairs
    )
    return 0 < processors <= num_rows // block_rows * (width // block_columns) and fits and usual


KERNEL_NAME = "product_sum_kernel"  # of the next function, for preflight


@functools.partial(jax.jit, static_argnames=("transposed", "on", "tiles"))
def product_sum_kernel(
    pairs: tuple[Pair, ...], addend: jax.Array | None, *, transposed: bool, on: Products, tiles: Tiles
) -> jax.Array:
    """With jit, equal calls of a program are compiled once."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    lefts, rights = zip(*pairs, strict=True)
    if transposed and on.interpret is not None:  # which has no transposed operands
        rights, transposed = tuple(right.T for right in rights), False
    num_rows, width = lefts[0].shape[0], rights[0].shape[0 if transposed else 1]
    kernel = _Kernel(gpu, tiles, num_rows, width, tuple(left.shape[1] for left in lefts), transposed, lefts[0].dtype)

    def product_sums(*refs: Any) -> None:  # the name that profiles show
        *operands, out = refs
        kernel.body(operands if addend is None else operands[:-1], None if addend is None else operands[-1], out)

    call = gpu.kernel(
        product_sums,
        out_type=jax.ShapeDtypeStruct((num_rows, width), lefts[0].dtype),
        grid=(on.processors,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="group",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        interpret=on.interpret,
    )
    y: jax.Array = call(*lefts, *rights, *([] if addend is None else [addend]))
    return y


@dataclass(frozen=True)
class _Kernel:
    gpu: Any  # jax's module
    tiles: Tiles
    num_rows: int
    width: int
    inner: tuple[int, ...]  # K of each pair
    transposed: bool
    dtype: Any

    def body(self, operands: Sequence[Any], addend: Any, out: Any) -> None:
        """One processor: its blocks, one after the other."""
        gpu, tiles, (rows, columns) = self.gpu, self.tiles, self.tiles.block
        swizzled = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))  # as the tensor cores read bfloat16
        right = (columns, tiles.inner) if self.transposed else (tiles.inner, columns)
        pl.run_scoped(
            functools.partial(self._run, operands[: len(self.inner)], operands[len(self.inner) :], addend, out),
            lefts=gpu.SMEM((tiles.places, rows, tiles.inner), self.dtype, transforms=swizzled),
            rights=gpu.SMEM((tiles.places, *right), self.dtype, transforms=swizzled),
            written=gpu.SMEM((2, 2, tiles.written, tiles.written), self.dtype, transforms=swizzled),
            full=gpu.Barrier(num_arrivals=2, num_barriers=tiles.places),  # both operands have arrived
            free=gpu.Barrier(num_arrivals=2, num_barriers=tiles.places),  # both groups have read them
            added=None if addend is None else gpu.Barrier(num_barriers=4),
            collective_axes="group",
        )

    def _run(self, lefts_ref: Any, rights_ref: Any, addend: Any, out: Any, **shared: Any) -> None:
        group = lax.axis_index("group")

        @pl.when(group == 2)
        def _copies() -> None:
            self.gpu.set_max_registers(40, action="decrease")
            self._for_each_block(functools.partial(self._fetch, lefts_ref, rights_ref, shared))
            for place in range(self.tiles.places):  # until everything has been read
                self.gpu.barrier_wait(shared["free"].at[place])

        @pl.when(group < 2)
        def _multiplies() -> None:
            self.gpu.set_max_registers(232, action="increase")
            for place in range(self.tiles.places):  # all are free at first
                self.gpu.barrier_arrive(shared["free"].at[place])
            self._for_each_block(functools.partial(self._multiply, group, addend, out, shared))
            self.gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _for_each_block(self, function: Any) -> None:
        """Calls it with the first row and the first column of a block, and the number of steps before it."""
        rows, columns = self.tiles.block
        grid = (self.num_rows // rows, self.width // columns)

        @self.gpu.nd_loop((grid[0] * grid[1],), collective_axes="processor")
        def _block(info: Any) -> None:
            row, column = self.gpu.planar_snake(info.index[0], grid, 0, self.tiles.band)
            function(row * rows, column * columns, info.local_index * self._num_steps)

    @property
    def _num_steps(self) -> int:
        return sum(self.inner) // self.tiles.inner

    def _place(self, step: Any) -> Any:
        return lax.rem(step, self.tiles.places)

    def _fetch(self, lefts_ref: Any, rights_ref: Any, shared: Any, row: Any, column: Any, done: Any) -> None:
        rows, columns = pl.ds(row, self.tiles.block[0]), pl.ds(column, self.tiles.block[1])
        for left_ref, right_ref, inner in zip(lefts_ref, rights_ref, self.inner, strict=True):

            def step(i: Any, _: None, left_ref: Any = left_ref, right_ref: Any = right_ref, done: Any = done) -> None:
                place, part = self._place(done + i), pl.ds(i * self.tiles.inner, self.tiles.inner)
                full = shared["full"].at[place]
                right = right_ref.at[columns, part] if self.transposed else right_ref.at[part, columns]
                self.gpu.barrier_wait(shared["free"].at[place])
                self.gpu.copy_gmem_to_smem(left_ref.at[rows, part], shared["lefts"].at[place], full)
                self.gpu.copy_gmem_to_smem(right, shared["rights"].at[place], full)

            num_steps = inner // self.tiles.inner
            lax.fori_loop(0, num_steps, step, None)
            done = done + num_steps

    def _multiply(self, group: Any, addend: Any, out: Any, shared: Any, row: Any, column: Any, done: Any) -> None:
        """Half of a block."""
        gpu, tiles, free = self.gpu, self.tiles, shared["free"]
        half = pl.ds(group * tiles.rows, tiles.rows)

        def part(ref: Any, i: int) -> Any:
            return ref.at[pl.ds(row + group * tiles.rows, tiles.rows), pl.ds(column + i * tiles.written, tiles.written)]

        def multiplied(total: Any) -> None:
            def step(i: Any, _: None) -> None:
                place = self._place(done + i)
                right = shared["rights"].at[place]
                gpu.barrier_wait(shared["full"].at[place])
                gpu.wgmma(
                    total,
                    shared["lefts"].at[place, half],
                    right.transpose((1, 0)) if self.transposed else right,
                )
                gpu.wgmma_wait(1)  # the place of the matmul before this one can be filled again

                @pl.when(i > 0)
                def _free() -> None:
                    gpu.barrier_arrive(free.at[self._place(done + i - 1)])

            edge.begin()
            lax.fori_loop(0, self._num_steps, step, None)
            gpu.wgmma_wait(0)
            gpu.barrier_arrive(free.at[self._place(done + self._num_steps - 1)])
            edge.write(total[...])

        edge = _Edge(self, group, shared, part, addend, out)
        pl.run_scoped(multiplied, gpu.ACC((tiles.rows, tiles.columns), jnp.float32))


@dataclass(frozen=True)
class _Edge:
    """How a group reads the addend and writes its half of a block: in parts, by way of two places in shared memory. One
    is written while the other is filled."""

    kernel: _Kernel
    group: Any
    shared: Any
    part: Any  # of an array in memory, by its number
    addend: Any
    out: Any

    def begin(self) -> None:
        """The first two parts of the addend are fetched while matmuls are computed."""
        for i in range(2):
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        gpu, tiles = self.kernel.gpu, self.kernel.tiles
        if self.addend is not None and i < tiles.columns // tiles.written:
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
            gpu.copy_gmem_to_smem(self.part(self.addend, i), self._place(i), self._added(i))

    def _place(self, i: int) -> Any:
        return self.shared["written"].at[self.group, i % 2]

    def _added(self, i: int) -> Any:
        return self.shared["added"].at[self.group * 2 + i % 2]

    def write(self, total: Any) -> None:
        gpu, size = self.kernel.gpu, self.kernel.tiles.written
        for i in range(self.kernel.tiles.columns // size):
            place, sums = self._place(i), total[:, i * size : (i + 1) * size]
            if self.addend is None:
                gpu.wait_smem_to_gmem(1, wait_read_only=True)
            else:
                gpu.barrier_wait(self._added(i))
                sums = sums + place[...].astype(jnp.float32)
            place[...] = sums.astype(self.kernel.dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(place, self.part(self.out, i))
            self._fetch(i + 2)
