"""Builds the training step from the model and the engine, using shapes only.

`assemble` needs a configuration and devices, but no weights. Training fills the shapes with arrays; preflight compiles
the same step without them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillora.devices.chips import generation_of
from trillora.devices.mesh import AXES, FSDP_AXIS, batch_sharding, replicated, weight_spec
from trillora.engine.hash_random import MaskKey
from trillora.engine.kernels.cross_entropy import PLAIN, Kernel
from trillora.engine.kernels.product_sum import IN_XLA, Products
from trillora.engine.kernels.triton_call import has_triton
from trillora.engine.loss import (
    TokenScores,
    Totals,
    chunked_divergences,
    chunked_loss,
    chunked_token_scores,
    chunked_totals,
    divergences,
    token_losses,
    token_scores,
    totals,
)
from trillora.engine.optim import make_optimizer, make_schedule
from trillora.engine.quantize import block_of, item_bytes, stored_format
from trillora.engine.step import Batch, Evaluation, Loss, TrainState, initial_state, make_eval_step, make_train_step
from trillora.engine.types import Pytree
from trillora.errors import TrilloraError
from trillora.model.adapter_parameters import kind_of
from trillora.model.bridge import CausalLM, Inputs
from trillora.model.layout import Layout, Leaf, Tree
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.expert_parameters import split_by_expert
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import Backend, StageRecipe
from trillora.step.adapter_spec import check_layers, lora_spec
from trillora.step.background import Program, compile_program
from trillora.step.compiler_options import WITH_CUBLAS, Options, tpu_options

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "weights": jnp.float32,
    "segments": jnp.int32,
    "positions": jnp.int32,
}
WHOLE_SHARE = 0.25  # of a device's experts: if all other weights take no more, they are copied to every device
COPIED_ADAPTER_BYTES = 2**30  # adapter and optimizer state up to this size are copied to every device, not split


@dataclass(frozen=True)
class Assembly:
    """A step ready to be compiled, and the shardings of its arguments."""

    model: CausalLM
    mesh: Mesh
    spec: LoraSpec
    optimizer: optax.GradientTransformation
    train_step: Any
    eval_step: Any
    base_shardings: dict[str, NamedSharding]
    adapter_shardings: dict[str, NamedSharding]
    state_shapes: TrainState
    base_shapes: Tree
    batch_shapes: Tree
    micro_batch_size: int  # sequences

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
        shape = (batch_size, sequence_length)
        batch = {name: leaf.update(shape=shape) for name, leaf in self.batch_shapes.items()}
        step = jax.jit(self.eval_step, out_shardings=replicated(self.mesh))
        return compile_program(step.lower(self.state_shapes.adapter, self.base_shapes, batch), self._options)

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
    train, data = recipe.train, recipe.data
    spec = lora_spec(recipe.lora, num_new_tokens=len(recipe.tokens or ()))
    model = CausalLM(
        config,
        dtype=settings.dtype,
        quantize=stored_format(settings.quantize, settings.backend, settings.matmul),
        matmul=settings.matmul,
        lora=spec,
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
    check_layers(recipe.lora, spec, model)
    check_kernels(model, mesh, settings.backend)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    chunk = loss_chunk_positions(settings.loss_chunk, settings.micro_batch_size // shards, train.sequence_length)
    factors = update_factors(model.adapter_layout, recipe.lora.loraplus_ratio, pissa=spec.pissa)
    optimizer = make_optimizer(train.optimizer, train.weight_decay, decayed_leaves(model.adapter_layout), factors)
    train_step = make_train_step(
        loss_function(model, chunk, packed=data.pack),
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
        eval_step=make_eval_step(evaluation_function(model, chunk, packed=data.pack)),
        base_shardings=base_shardings,
        adapter_shardings=adapter_shardings,
        state_shapes=_state_shapes(adapter, optimizer, adapter_shardings, mesh),
        base_shapes=_shapes(model.layout, base_shardings),
        batch_shapes={
            name: jax.ShapeDtypeStruct(batch_size, dtype, sharding=batch_sharding(mesh))
            for name, dtype in BATCH_DTYPES.items()
        },
        micro_batch_size=settings.micro_batch_size,
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


def loss_chunk_positions(tokens: int, rows_per_device: int, sequence_length: int) -> int:
    """Positions per sequence that make about this many tokens on a device."""
    return max(1, min(sequence_length, tokens // max(rows_per_device, 1)))


def model_inputs(batch: Batch, *, packed: bool) -> Inputs:
    """The model's inputs. A sequence with one document needs no segment ids: only padding follows it, and attention is
    causal. Kernels are faster without them."""
    names = ("tokens", "positions", "segments") if packed else ("tokens", "positions")
    return {name: batch[name] for name in names}


def loss_function(model: CausalLM, chunk: int, *, packed: bool) -> Loss:
    """The summed loss of a batch. If a model's head cannot be called separately, the full logits are computed."""

    kernel = Kernel("triton", interpret=model.interpret) if model.kernels == "fused" else PLAIN

    def loss(adapter: Tree, base: Tree, batch: Batch, key: MaskKey) -> jax.Array:
        dropout_key = key if model.has_dropout else None
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            logits = model.logits(base, adapter, inputs, dropout_key)
            return (token_losses(logits, batch["targets"]) * batch["weights"]).sum()
        hidden = model.hidden(base, adapter, inputs, dropout_key)
        head_adapter, base = model.head_adapter(adapter), with_whole_head(model, base)
        targets, weights = batch["targets"], batch["weights"]
        return chunked_loss(model.head, base, head_adapter, hidden, targets, weights, chunk, kernel)

    return loss


def with_whole_head(model: CausalLM, base: Tree) -> Tree:
    """The base with the weight of its head gathered over `fsdp`. Otherwise every chunk of the loss would gather it."""
    weight = getattr(model.module.get_output_embeddings(), "weight", None)
    key = next((name for name, parameter in model.module.named_parameters() if parameter is weight), "")
    if model.mesh is None or model.mesh.shape[FSDP_AXIS] == 1 or key not in base:
        return base
    whole = NamedSharding(model.mesh, _without_fsdp(weight_shardings(model, model.mesh)[key].spec))
    return {**base, key: jax.lax.with_sharding_constraint(base[key], whole)}


def evaluation_function(model: CausalLM, chunk: int, *, packed: bool) -> Evaluation:
    def evaluate(adapter: Tree, base: Tree, batch: Batch) -> Totals:
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            return totals(model.logits(base, adapter, inputs), batch["targets"], batch["weights"])
        hidden = model.hidden(base, adapter, inputs)
        head_adapter = model.head_adapter(adapter)
        return chunked_totals(model.head, base, head_adapter, hidden, batch["targets"], batch["weights"], chunk)

    return evaluate


def token_score_function(model: CausalLM, chunk: int, *, packed: bool) -> Callable[[Tree, Tree, Batch], TokenScores]:
    """For every token of a batch that has a weight, its loss and whether it is the most likely one."""

    def scores(adapter: Tree, base: Tree, batch: Batch) -> TokenScores:
        inputs = model_inputs(batch, packed=packed)
        if not model.has_separate_head:
            return token_scores(model.logits(base, adapter, inputs), batch["targets"])
        hidden = model.hidden(base, adapter, inputs)
        head_adapter, weights = model.head_adapter(adapter), batch["weights"]
        return chunked_token_scores(model.head, base, head_adapter, hidden, batch["targets"], weights, chunk)

    return scores


def divergence_function(model: CausalLM, chunk: int) -> Callable[[tuple[Tree, Tree], Tree, Batch], jax.Array]:
    """KL(first || second) of two adapters' next-token distributions at every position of a batch [B, T]."""

    def divergence(adapters: tuple[Tree, Tree], base: Tree, batch: Batch) -> jax.Array:
        inputs = model_inputs(batch, packed=False)
        if not model.has_separate_head:
            first, second = (model.logits(base, adapter, inputs) for adapter in adapters)
            return divergences(first, second)
        first, second = (model.hidden(base, adapter, inputs) for adapter in adapters)
        heads = (model.head_adapter(adapters[0]), model.head_adapter(adapters[1]))
        return chunked_divergences(model.head, base, heads, (first, second), chunk)

    return divergence


def weight_shardings(model: CausalLM, mesh: Mesh) -> dict[str, NamedSharding]:
    """Codes of a quantized weight are sharded like the weight; its scales, if they are one vector, are replicated. If a
    device has some of the experts, and the other weights are few in comparison, it has all of those: they would have to
    be gathered."""
    on_last_dim, experts = model.weights_split_on_last_dim(), split_by_expert(model.module)
    embedding = getattr(model.module.get_input_embeddings(), "weight", None)
    tables = {name for name, parameter in model.module.named_parameters() if parameter is embedding}

    def spec(leaf: Leaf) -> PartitionSpec:
        part, stacked, name = leaf.quantized, leaf.stacked, leaf.names[0]
        if part is None:
            return weight_spec(
                leaf.shape,
                mesh,
                stacked=stacked,
                tensor_on_last_dim=name in on_last_dim,
                fsdp_on_last_dim=name in tables,
                of_experts=name in experts,
            )
        if len(leaf.part_shape) < 2:
            return PartitionSpec()
        *stack, rows, columns = part.weight.shape
        shape = (*stack, columns, rows) if part.inputs_first else (*stack, rows, columns)
        last, block = part.weight.names[0] in on_last_dim, block_of(part.format)
        return weight_spec(shape, mesh, stacked=stacked, tensor_on_last_dim=last, block=block)

    specs = {key: spec(leaf) for key, leaf in model.layout.items()}
    split = {key for key, leaf in model.layout.items() if leaf.names[0] in experts and FSDP_AXIS in _axes(specs[key])}
    shards = {key: NamedSharding(mesh, specs[key]).shard_shape(model.layout[key].shape) for key in split}
    of_experts = sum(math.prod(shape) * item_bytes(model.layout[key].dtype) for key, shape in shards.items())
    others = sum(leaf.num_bytes for key, leaf in model.layout.items() if key not in split)
    if others <= WHOLE_SHARE * of_experts:
        specs = {key: spec if key in split else _without_fsdp(spec) for key, spec in specs.items()}
    return {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,)) if axis is not None]


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == FSDP_AXIS else axis for axis in spec))


def shard_adapter(layout: Layout, mesh: Mesh) -> dict[str, NamedSharding]:
    """Small adapters are copied to every device, which avoids gathering; large ones are split like the base. On a mesh
    with all three axes the adapter is always copied: XLA's partitioner was seen to give wrong numbers there."""
    with_optimizer = 3 * sum(leaf.num_bytes for leaf in layout.values())
    if with_optimizer <= COPIED_ADAPTER_BYTES or all(mesh.shape[axis] > 1 for axis in AXES):
        return {key: replicated(mesh) for key in layout}
    return {
        key: NamedSharding(mesh, weight_spec(leaf.shape, mesh, stacked=leaf.stacked)) for key, leaf in layout.items()
    }


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
    adapter: Tree, optimizer: optax.GradientTransformation, shardings: dict[str, NamedSharding], mesh: Mesh
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

    shapes = jax.eval_shape(lambda a: initial_state(a, optimizer, 0), adapter)
    return jax.tree_util.tree_map_with_path(place, shapes)
