"""Builds the step that trains several adapters together, like `build` does for one.

The model has the largest rank of the group. An adapter of a smaller rank is padded with zeros, which stay zero: the
gradient of a row of A is a product with a column of B, and the other way round. The scale of each adapter relative to
the model's is an input of the step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from trillora.devices.mesh import adapter_axis, group_sharding, replicated
from trillora.engine.group import (
    LANE_DTYPES,
    OPTION_DTYPES,
    AdapterOptions,
    OneAdapter,
    adapter_options,
    group_state,
    lane_of,
    make_group_step,
)
from trillora.engine.step import Means, Objective, TrainState
from trillora.engine.types import Pytree
from trillora.errors import TrilloraError
from trillora.model.adapter_parameters import EMBEDDING_B, LORA_B, kind_of
from trillora.model.bridge import CausalLM
from trillora.model.layout import Layout, Leaf, Tree
from trillora.model.parts.expert_parameters import expert_parameters
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import StageRecipe
from trillora.step.background import Program, compile_program
from trillora.step.build import Assembly, assemble, lora_spec, zeros_of
from trillora.step.loss.objective import loss_chunk_positions, objective_of

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig


class Member(Protocol):
    """An adapter of the group."""

    @property
    def recipe(self) -> StageRecipe: ...


@dataclass(frozen=True)
class GroupAssembly(Assembly):
    """A step for K of N adapters. `state_shapes` and `batch_shapes` have a leading dim of N and K adapters."""

    num_adapters: int
    width: int  # K
    one: Assembly  # of a single adapter

    def arguments(self, sequence_length: int | None = None) -> tuple[Pytree, ...]:
        batch = self.batch_shapes
        if sequence_length is not None:
            batch = {name: leaf.update(shape=(*leaf.shape[:2], sequence_length)) for name, leaf in batch.items()}
        return (self.state_shapes, self.base_shapes, self.option_shapes, self.lane_shapes, batch)

    def compile_evaluation(self, batch_size: int, sequence_length: int) -> Program:
        """The evaluation step of a single adapter."""
        return self.one.compile_evaluation(batch_size, sequence_length)

    @property
    def member_shapes(self) -> TrainState:
        return self.one.state_shapes

    def split(self, state: TrainState) -> list[TrainState]:
        return [jax.tree.map(lambda array_N, n=number: array_N[n], state) for number in range(self.num_adapters)]

    def join(self, states: Sequence[TrainState | None]) -> TrainState:
        found = [zeros_of(self.member_shapes) if state is None else state for state in states]
        joined: TrainState = jax.tree.map(lambda *arrays: np.stack(arrays), *found)
        return joined

    @property
    def option_shapes(self) -> Tree:
        shape = functools.partial(jax.ShapeDtypeStruct, (self.num_adapters,), sharding=replicated(self.mesh))
        return jax.tree.map(lambda dtype: shape(dtype), OPTION_DTYPES)

    @property
    def lane_shapes(self) -> Tree:
        shape = functools.partial(jax.ShapeDtypeStruct, (self.width,), sharding=replicated(self.mesh))
        return jax.tree.map(lambda dtype: shape(dtype), LANE_DTYPES)

    def compile_lane(self) -> Program:
        """The program that returns adapter number n, with its scale and without: (adapters, options, n) -> both."""

        def lane(adapters_N: Tree, options: AdapterOptions, number: jax.Array) -> tuple[Tree, Tree]:
            adapter = lane_of(adapters_N, number)
            return scaled(adapter, options.scale[number]), adapter

        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.mesh))
        program = jax.jit(lane, out_shardings=(self.adapter_shardings, self.adapter_shardings))
        return compile_program(program.lower(self.state_shapes.adapter, self.option_shapes, number))


def assemble_group(
    members: Sequence[Member], settings: StepSettings, config: PretrainedConfig, mesh: Mesh, width: int | None = None
) -> GroupAssembly:
    """The step for `width` adapters at once, by default as many as the settings say."""
    width = width or settings.adapters_at_once
    recipe = widest(members)
    one = assemble(recipe, settings, config, mesh, 1, mapped=True)
    check_ranks_differ_simply(members, one.model)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = width * settings.micro_batch_size // shards
    chunk = loss_chunk_positions(settings.loss_chunk, rows, recipe.train.sequence_length)
    axis = adapter_axis(mesh)
    if axis is not None and width % mesh.shape[axis]:
        raise TrilloraError(
            f"{width} adapters cannot be spread evenly over {mesh.shape[axis]} groups of devices.",
            where="hardware.mesh.adapter",
            do="use a number that divides the number of adapters, or leave hardware.mesh on auto",
        )
    step = make_group_step(
        lambda options: scaled_objective(objective_of(one.model, recipe, chunk, options.beta), options.scale),
        one.optimizer,
        num_micro_batches=recipe.train.batch_size // settings.micro_batch_size,
        mesh_axis=axis,
    )
    shape = (width, recipe.train.batch_size, recipe.train.sequence_length)
    shared = {field.name: getattr(one, field.name) for field in dataclasses.fields(Assembly)}
    return GroupAssembly(
        **{
            **shared,
            "train_step": step,
            "state_shapes": _group_shapes(one, len(members)),
            "batch_shapes": {
                name: jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=group_sharding(mesh))
                for name, leaf in one.batch_shapes.items()
            },
        },
        num_adapters=len(members),
        width=width,
        one=one,
    )


def widest(members: Sequence[Member]) -> StageRecipe:
    """The recipe with the largest rank: the others are padded to it."""
    return max((member.recipe for member in members), key=lambda recipe: recipe.lora.rank)


def options_of(members: Sequence[Member], num_steps: Sequence[int]) -> AdapterOptions:
    """The options of every adapter. `num_steps`: the length of its training."""
    scale = lora_spec(widest(members).lora).scale
    return adapter_options(
        [
            OneAdapter(
                schedule=train.schedule,
                peak=train.rate,
                warmup_steps=train.warmup_steps,
                num_steps=steps,
                decay_fraction=train.decay_fraction,
                max_grad_norm=train.max_grad_norm,
                scale=lora_spec(member.recipe.lora).scale / scale,
                beta=train.strength,
            )
            for member, steps in zip(members, num_steps, strict=True)
            for train in (member.recipe.train,)
        ]
    )


def scaled(adapter: Pytree, scale: ArrayLike) -> Pytree:
    """The adapter with its change multiplied by `scale`. There may be none, for a reference."""
    if adapter is None:
        return None
    of_b = (LORA_B.suffix, EMBEDDING_B.suffix)
    return {key: array * scale if key.endswith(of_b) else array for key, array in adapter.items()}


def scaled_objective(objective: Objective, scale: jax.Array) -> Objective:
    """The objective of an adapter whose change, and its reference's, is multiplied by `scale`."""

    def scaled_sums(adapter: Tree, reference: Tree, *others: Pytree) -> tuple[jax.Array, Means]:
        return objective.sums(scaled(adapter, scale), scaled(reference, scale), *others)

    def scaled_before(adapter: Tree, reference: Tree, *others: Pytree) -> Means:
        assert objective.before is not None
        return objective.before(scaled(adapter, scale), scaled(reference, scale), *others)

    return objective._replace(sums=scaled_sums, before=None if objective.before is None else scaled_before)


def padding_of(members: Sequence[Member], recipe: StageRecipe) -> int:
    """How much smaller the rank of an adapter is than the largest one."""
    return widest(members).lora.rank - recipe.lora.rank


def check_ranks_differ_simply(members: Sequence[Member], model: CausalLM) -> None:
    lora = widest(members).lora
    has_experts = not expert_parameters(model.module).keys().isdisjoint(model.targets)
    if not any(padding_of(members, member.recipe) for member in members):
        return
    if lora.rank_pattern or lora.init != "default" or has_experts:
        option = "lora.rank_pattern" if lora.rank_pattern else f"lora.init: {lora.init}"
        raise TrilloraError(
            f"A sweep over ranks cannot be combined with {'experts in lora.targets' if has_experts else option}.",
            where="sweep.rank",
            do="remove one of them, or make one run for each rank",
        )


def without_padding(layout: Layout, padding: int) -> Layout:
    """The layout of an adapter with a smaller rank."""

    def smaller(key: str, leaf: Leaf) -> Leaf:
        dim = _rank_dim(key, len(leaf.shape))
        shape = leaf.shape if dim is None else (*leaf.shape[:dim], leaf.shape[dim] - padding, *leaf.shape[dim + 1 :])
        return dataclasses.replace(leaf, shape=shape)

    return {key: smaller(key, leaf) for key, leaf in layout.items()}


def padded(adapter: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """An adapter of a smaller rank with the shapes of `layout`: zeros are added."""
    return {
        key: np.pad(array, [(0, whole - own) for own, whole in zip(array.shape, layout[key].shape, strict=True)])
        for key, array in adapter.items()
    }


def cut(name: str, array: np.ndarray, padding: int) -> np.ndarray:
    """The part of a padded matrix that belongs to the adapter."""
    dim = _rank_dim(name, array.ndim)
    return array if dim is None else array.take(range(array.shape[dim] - padding), axis=dim)


def _rank_dim(name: str, num_dims: int) -> int | None:
    """Which dim of a parameter is the rank: A is [R, D], B is [E, R]. The first dim may be the stack of layers."""
    kind = kind_of(name)
    if kind.rank_dim is None:
        return None
    assert kind.num_dims is not None
    return num_dims - kind.num_dims + kind.rank_dim


def _group_shapes(one: Assembly, num_adapters: int) -> TrainState:
    """The shapes of the state of all adapters: one adapter's shapes with a leading dim."""
    first = adapter_axis(one.mesh)

    def place(
        path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, alone: jax.ShapeDtypeStruct
    ) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(one.mesh, PartitionSpec(first, *alone.sharding.spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    adapter = {
        key: jax.ShapeDtypeStruct((num_adapters, *leaf.shape), leaf.dtype)
        for key, leaf in one.state_shapes.adapter.items()
    }
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_adapters))
    keeps_reference = one.state_shapes.reference is not None
    shapes = jax.eval_shape(
        lambda a, k: group_state(a, one.optimizer, k, keeps_reference=keeps_reference), adapter, keys
    )
    return jax.tree_util.tree_map_with_path(place, shapes, one.state_shapes)
