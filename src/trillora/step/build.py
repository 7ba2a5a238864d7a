"""Builds the training step from the model and the engine, using shapes only.

`assemble` needs a configuration and devices, but no weights. Training fills the shapes with arrays; preflight compiles
the same step without them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from trillora.devices.chips import generation_of
from trillora.devices.mesh import batch_sharding, replicated, weight_spec
from trillora.engine.kernels.product_sum import IN_XLA, Products
from trillora.engine.kernels.triton_call import has_triton
from trillora.engine.optim import make_optimizer, make_schedule
from trillora.engine.quantize import stored_format
from trillora.engine.step import TrainState, initial_state, make_train_step
from trillora.engine.types import Pytree
from trillora.errors import TrilloraError
from trillora.model.adapter_parameters import kind_of
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Layout, Leaf, Tree
from trillora.model.lora_spec import LoraSpec
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import Backend, StageRecipe
from trillora.step.adapter_spec import check_layers, lora_spec
from trillora.step.background import Program, compile_program
from trillora.step.compiler_options import WITH_CUBLAS, Options, tpu_options
from trillora.step.loss.objective import (
    REFERENCE,
    batch_dtypes,
    evaluation_of,
    loss_chunk_positions,
    objective_of,
    reference_function,
)
from trillora.step.shardings import shard_adapter, weight_shardings

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig


@dataclass(frozen=True)
class Assembly:
    """A step ready to be compiled, and the shardings of its arguments."""

    model: CausalLM
    mesh: Mesh
    spec: LoraSpec
    optimizer: optax.GradientTransformation
    train_step: Any
    eval_step: Any
    reference_step: Any  # what the reference thinks of a batch, if its batches have that
    base_shardings: dict[str, NamedSharding]
    adapter_shardings: dict[str, NamedSharding]
    state_shapes: TrainState
    base_shapes: Tree
    batch_shapes: Tree
    micro_batch_size: int  # sequences
    has_preferences: bool  # the loss compares answers

    def lower(self, sequence_length: int | None = None) -> jax.stages.Lowered:
        """The step, lowered for the mesh's devices. The state is donated. `sequence_length` replaces the recipe's."""
        return (self.traced if sequence_length is None else self._trace(sequence_length)).lower()

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced step: estimates read its jaxpr, and compiling it does not trace it again."""
        return self._trace(None)

    def _trace(self, sequence_length: int | None) -> jax.stages.Traced:
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_shapes)
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=(state_shardings, replicated(self.mesh)))
        return step.trace(*self.arguments(sequence_length))

    def arguments(self, sequence_length: int | None = None) -> tuple[Pytree, ...]:
        """The shapes of the step's arguments."""
        batch = self.batch_shapes
        if sequence_length is not None:
            batch = {name: leaf.update(shape=(leaf.shape[0], sequence_length)) for name, leaf in batch.items()}
        return (self.state_shapes, self.base_shapes, batch)

    def compile(self, sequence_length: int | None = None, **options: str | bool) -> Program:
        """`options` are additional compiler options, by their XLA names."""
        return compile_program(self.lower(sequence_length), {**self._options, **options})

    def compile_evaluation(self, batch_size: int, sequence_length: int) -> Program:
        """The evaluation step for batches of this shape."""
        batch = self._batch_of((batch_size, sequence_length))
        beta = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(self.mesh))
        step = jax.jit(self.eval_step, out_shardings=replicated(self.mesh))
        return compile_program(
            step.lower(self.state_shapes.adapter, self.state_shapes.reference, self.base_shapes, beta, batch),
            self._options,
        )

    def compile_reference(self, batch_size: int, sequence_length: int) -> Program:
        """(reference, base, batch) -> log-probabilities [B, T] of the trained tokens, on every device."""
        batch = self._batch_of((batch_size, sequence_length))
        step = jax.jit(self.reference_step, out_shardings=replicated(self.mesh))
        return compile_program(step.lower(self.state_shapes.reference, self.base_shapes, batch), self._options)

    def _batch_of(self, shape: tuple[int, int]) -> Tree:
        """The shapes of a batch as the data has it."""
        return {name: leaf.update(shape=shape) for name, leaf in self.batch_shapes.items() if name != REFERENCE}

    @property
    def member_shapes(self) -> TrainState:
        """The shapes of the state of one adapter."""
        return self.state_shapes

    def split(self, state: TrainState) -> list[TrainState]:
        """The state of each adapter, from arrays on the host."""
        return [state]

    def join(self, states: Sequence[TrainState | None]) -> TrainState:
        """The state of all adapters, from arrays on the host. None for one that is not trained any more."""
        [state] = states
        return zeros_of(self.member_shapes) if state is None else state

    @property
    def state_bytes(self) -> int:
        """Size of the state on one device. Saving a checkpoint needs this much a second time."""
        leaves = [
            leaf for leaf in jax.tree.leaves(self.state_shapes) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ]
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def _options(self) -> Options:
        device = self.mesh.devices.flat[0]
        if device.platform == "gpu" and (self.model.matmul == "fp8" or self.model.kernels == "fused"):
            return WITH_CUBLAS
        return tpu_options(device.device_kind, self.mesh.size) if device.platform == "tpu" else {}


def assemble(
    recipe: StageRecipe,
    settings: StepSettings,
    config: PretrainedConfig,
    mesh: Mesh,
    num_steps: int,
    *,
    mapped: bool = False,
) -> Assembly:
    """Builds the step of a stage for the model described by `config`. The mesh may be of devices that are not here.
    `mapped`: the loss will be mapped over several adapters."""
    train = recipe.train
    spec = lora_spec(recipe.lora, num_new_tokens=len(recipe.tokens or ()))
    model = CausalLM(config, _model_options(recipe, settings, mesh, mapped=mapped), lora=spec)
    check_layers(recipe.lora, spec, model)
    check_kernels(model, mesh, settings.backend)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    chunk = loss_chunk_positions(settings.loss_chunk, settings.micro_batch_size // shards, train.sequence_length)
    factors = update_factors(model.adapter_layout, recipe.lora.loraplus_ratio, pissa=spec.pissa)
    optimizer = make_optimizer(train.optimizer, train.weight_decay, decayed_leaves(model.adapter_layout), factors)
    train_step = make_train_step(
        objective_of(model, recipe, chunk),
        optimizer,
        make_schedule(train.schedule, train.rate, train.warmup_steps, num_steps, train.decay_fraction),
        max_grad_norm=train.max_grad_norm,
        num_micro_batches=train.batch_size // settings.micro_batch_size,
    )
    base_shardings = weight_shardings(model, mesh)
    adapter_shardings = shard_adapter(model.adapter_layout, mesh)
    adapter = _shapes(model.adapter_layout, adapter_shardings)
    batch_size = (train.batch_size, train.sequence_length)
    return Assembly(
        model=model,
        mesh=mesh,
        spec=spec,
        optimizer=optimizer,
        train_step=train_step,
        eval_step=evaluation_of(model, recipe, chunk),
        reference_step=reference_function(model, recipe, chunk) if recipe.train.precompute_ref_log_probs else None,
        base_shardings=base_shardings,
        adapter_shardings=adapter_shardings,
        state_shapes=_state_shapes(adapter, optimizer, adapter_shardings, mesh, keeps_reference=recipe.keeps_reference),
        base_shapes=_shapes(model.layout, base_shardings),
        batch_shapes={
            name: jax.ShapeDtypeStruct(batch_size, dtype, sharding=batch_sharding(mesh))
            for name, dtype in batch_dtypes(recipe).items()
        },
        micro_batch_size=settings.micro_batch_size,
        has_preferences=recipe.train.rows != "answers",
    )


def _model_options(recipe: StageRecipe, settings: StepSettings, mesh: Mesh, *, mapped: bool) -> ModelOptions:
    return ModelOptions(
        dtype=settings.dtype,
        quantize=stored_format(settings.quantize, settings.backend, settings.matmul),
        matmul=settings.matmul,
        scan=settings.layers == "scan",
        remat=settings.remat,
        attention=settings.attention,
        document_room=settings.document_room,
        kernels=settings.kernels,
        products=products_on(mesh.devices.flat[0]),
        interpret=settings.kernels == "fused" and settings.backend == "cpu",  # for tests and comparisons
        mapped=mapped,
        mesh=mesh,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def check_kernels(model: CausalLM, mesh: Mesh, backend: Backend) -> None:
    """Refuses fused kernels where they cannot be used at all: silently slower would be worse."""
    if model.kernels != "fused":
        return
    device, why = mesh.devices.flat[0], ""
    is_old = backend == "gpu" and device.platform == "gpu" and not generation_of(device).widest_head
    if backend not in ("gpu", "cpu") or is_old or mesh.size > 1:
        why = f"it needs one NVIDIA GPU (Ampere or newer), and this step is for {mesh.size} x {device.device_kind}"
    elif model.mapped:
        why = "several adapters are trained together"
    elif not has_triton():
        why = "this version of jax has no Pallas for Triton"
    if why:
        raise TrilloraError(
            f"engine.kernels: fused cannot be used: {why}.",
            where="engine.kernels",
            do="use engine.kernels=xla",
        )


def products_on(device: jax.Device) -> Products:
    """What adds up matmuls if kernels are fused."""
    is_hopper = device.platform == "gpu" and generation_of(device).has_wgmma
    return Products(device.core_count) if is_hopper else IN_XLA


def decayed_leaves(layout: Layout) -> dict[str, bool]:
    """Whether weight decay applies to each leaf of the adapter: not to norms and biases of whole modules. DoRA's
    vectors decay, as in PyTorch's AdamW with PEFT's parameters and in transformers' Trainer."""
    return {key: kind_of(key).num_dims is not None or len(leaf.part_shape) >= 2 for key, leaf in layout.items()}


def update_factors(layout: Layout, loraplus_ratio: float, *, pissa: bool) -> dict[str, float | np.ndarray] | None:
    """What the update of each leaf is multiplied by: the ratio of LoRA+, and zero for the half of PiSSA's matrices that
    keeps their initial values. None: nothing is multiplied."""
    if loraplus_ratio == 1 and not pissa:
        return None

    def factor(key: str, leaf: Leaf) -> float | np.ndarray:
        kind = kind_of(key)
        ratio = loraplus_ratio if kind.is_fast else 1.0
        if not pissa or kind.rank_dim is None:
            return ratio
        rank = leaf.part_shape[kind.rank_dim]
        trained_R = np.where(np.arange(rank) < rank // 2, np.float32(ratio), np.float32(0))
        return trained_R[:, None] if kind.rank_dim == 0 else trained_R

    return {key: factor(key, leaf) for key, leaf in layout.items()}


def zeros_of(shapes: TrainState) -> TrainState:
    """Zeros on the host. The random key is given by its data."""
    as_stored = shapes._replace(key=jax.eval_shape(jax.random.key_data, shapes.key))
    zeros: TrainState = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), as_stored)
    return zeros


def _shapes(layout: Layout, shardings: dict[str, NamedSharding]) -> Tree:
    return {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[key]) for key, leaf in layout.items()}


def _state_shapes(
    adapter: Tree,
    optimizer: optax.GradientTransformation,
    shardings: dict[str, NamedSharding],
    mesh: Mesh,
    *,
    keeps_reference: bool,
) -> TrainState:
    """Each array of the optimizer state is sharded like its parameter. An array of another shape is sharded by the rule
    for weights if its parameter is."""

    def place(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        key = str(getattr(path[-1], "key", ""))
        if key not in adapter or shardings[key].is_fully_replicated:
            sharding = replicated(mesh)
        elif leaf.shape == adapter[key].shape:
            sharding = shardings[key]
        else:
            sharding = NamedSharding(mesh, weight_spec(leaf.shape, mesh, stacked=len(leaf.shape) > 2))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.eval_shape(lambda a: initial_state(a, optimizer, 0, keeps_reference=keeps_reference), adapter)
    return jax.tree_util.tree_map_with_path(place, shapes)
