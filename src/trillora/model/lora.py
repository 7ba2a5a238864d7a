"""LoRA for any model: selects the linear layers to adapt, and adds the adapter to their output.

A target keeps its name and its frozen weight. It gets two parameters, `lora_a` [R, D] and `lora_b` [E, R], and returns

    y = linear(x) + scale * (dropout(x) @ lora_a.T) @ lora_b.T

Example: with rank 2, a layer `q_proj` with weight [4, 3] (E = 4 outputs, D = 3 inputs) gets `q_proj.lora_a` [2, 3] and
`q_proj.lora_b` [4, 2]. With alpha 8, scale is 8 / 2 = 4.

Legend: R rank, D inputs, E outputs.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from torchax import interop
from transformers.pytorch_utils import Conv1D

from trillora.engine.hash_random import keep_mask
from trillora.engine.kernels.joined_linear import lora_linear
from trillora.errors import TrilloraError
from trillora.model.adapter_parameters import EMBEDDING_B, LORA_A, LORA_B, MAGNITUDE, is_of_lora, kind_of
from trillora.model.layout import Layout, Tree
from trillora.model.limits import refused_by_peft
from trillora.model.lora_spec import Initial, LayerLora, LoraSpec, adapted_layers
from trillora.model.overrides.sums import output_with_note
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS, fused_input, in_no_grad, without_gradient
from trillora.model.parts.expert_parameters import add_to_experts, expert_parameters, linear_routers
from trillora.model.parts.token_rows import token_logits, weight_replaced
from trillora.model.remat import SMALL, name_of_output
from trillora.model.trace import AdaptedInput, ChosenAdapters, Trace, current


class RowsMixed(TrilloraError):
    """A layer's input does not say which sequence it is of."""


class _LinearOutput:
    """A mixin for linear layers: names the output for remat policies, and adds the adapter if there is one.

    `add_lora` sets the class of an existing layer to a subclass of this and the layer's own class, so `super().forward`
    is the original layer, with its frozen weight. The attributes below exist only on adapted layers.
    """

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_magnitude: torch.nn.Parameter  # of DoRA only
    lora_scale: float
    lora_dropout: float
    lora_init: str
    lora_stream: int  # a number for the dropout key, different for each adapted projection of a layer

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        joined = self._joined_output(x) if not args and not kwargs else None
        if joined is not None:
            return joined
        out = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(out, TORCHAX_TENSORS):  # called as ordinary PyTorch
            return out
        y = interop.jax_view(out)
        if hasattr(self, "lora_a"):
            a, b = self._matrices()
            delta = self._lora_delta(interop.jax_view(x), a, b)
            y = self._dora(y, delta, a, b) if hasattr(self, "lora_magnitude") else y + delta.astype(y.dtype)
            y = without_gradient(y) if in_no_grad() else y
        if hasattr(self, "token_rows"):
            y = token_logits(self, interop.jax_view(x), y)
        return interop.torch_view(checkpoint_name(y, name_of_output(x.shape[-1], y.shape[-1], current())))

    def _joined_output(self, x: torch.Tensor) -> torch.Tensor | None:
        """The output of a layer that `lora_linear` computes; None if it does not."""
        given, trace = fused_input(x), current()
        if given is None or trace is None:
            return None
        joined = trace.joined_layers.get(id(self), (self,))
        if not all(layer.is_plain and layer.frozen_weight().dtype == given.dtype for layer in joined):
            return None
        call = trace.adapted_inputs.setdefault(id(given), AdaptedInput(given))
        call.layers.append(self)

        def computed(addend: jax.Array | None) -> tuple[jax.Array, ...]:
            weights = [layer.frozen_weight() for layer in joined]
            matrices = [layer._scaled_matrices(given.dtype) for layer in joined]
            return lora_linear(given, weights, matrices, addend, trace.products, SMALL)

        name = name_of_output(given.shape[-1], self.frozen_weight().shape[0], trace)
        if len(joined) == 1:
            return interop.torch_view(output_with_note(lambda addend: computed(addend)[0], name, trace))
        if id(self) not in call.outputs:
            call.outputs.update(zip(map(id, joined), computed(None), strict=True))
        return interop.torch_view(checkpoint_name(call.outputs[id(self)], name))

    @property
    def is_plain(self) -> bool:
        """An ordinary linear layer with plain LoRA: without dropout, DoRA or PiSSA, on a base that is not quantized. A
        bias belongs to the matmul, which is rounded once."""
        has_plain_lora = hasattr(self, "lora_a") and self.lora_init == "default" and not self.lora_dropout
        is_linear = type(self).__bases__[-1] is torch.nn.Linear and getattr(self, "bias", None) is None
        return has_plain_lora and is_linear and not hasattr(self, "lora_magnitude") and not hasattr(self, "token_rows")

    def frozen_weight(self) -> jax.Array:
        """The weight [E, D] of the base, dequantized if it is quantized."""
        weight = interop.jax_view(self.weight)  # type: ignore[attr-defined]
        return weight.T if isinstance(self, Conv1D) else weight

    def _matrices(self) -> tuple[jax.Array, jax.Array]:
        """A and B. With PiSSA, their second half is minus what they were at the start, and never changes."""
        a, b = interop.jax_view(self.lora_a), interop.jax_view(self.lora_b)
        if self.lora_init == "default":
            return a, b
        half = a.shape[0] // 2
        a = jnp.concatenate([a[:half], jax.lax.stop_gradient(a[half:])])
        return a, jnp.concatenate([b[:, :half], jax.lax.stop_gradient(b[:, half:])], axis=1)

    def _scaled_matrices(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """A, and B times the scale, which is applied to B, not to wide outputs."""
        a, b = self._matrices()
        return a.astype(dtype), (b * self.lora_scale).astype(dtype)

    def _dora(self, y: jax.Array, delta: jax.Array, a_RD: jax.Array, b_ER: jax.Array) -> jax.Array:
        """DoRA as in PEFT: each row of W + s B A gets a trained length, and its own length counts as a constant. In
        float32, because bfloat16 would round most changes of the length away."""
        norm_E = row_norms(self.frozen_weight(), a_RD, b_ER, self.lora_scale)
        ratio_E = interop.jax_view(self.lora_magnitude) / checkpoint_name(norm_E, SMALL)
        bias: Any = getattr(self, "bias", None)
        bias_E = 0.0 if bias is None else interop.jax_view(bias).astype(jnp.float32)
        return (bias_E + ratio_E * (y.astype(jnp.float32) - bias_E + delta.astype(jnp.float32))).astype(y.dtype)

    def _lora_delta(self, x: jax.Array, a_RD: jax.Array, b_ER: jax.Array) -> jax.Array:
        trace = current()
        if self.lora_dropout and trace is not None and trace.dropout_key is not None:
            key = trace.dropout_key.fold_in(self.lora_stream)
            kept = keep_mask(key, 1 - self.lora_dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.lora_dropout), 0).astype(x.dtype)
        b_ER = (b_ER * self.lora_scale).astype(x.dtype)  # the scale is applied to B, not to wide outputs
        is_splash = trace is not None and trace.attention == "splash"
        if trace is not None and (is_splash or trace.kernels == "fused"):
            low = self._joined_low(x, trace)
        else:
            low = checkpoint_name(x @ a_RD.astype(x.dtype).T, SMALL)  # small, so remat policies save it
        if trace is not None and trace.chosen is not None:
            low = own_ranks(low, trace.chosen)
        # On a TPU, XLA would add the base's output to the second matmul, in passes of their own, and compute a gradient
        # again for each matmul that uses it. With barriers the additions are a part of the base's matmuls.
        return jax.lax.optimization_barrier(low @ b_ER.T) if is_splash else low @ b_ER.T

    def _joined_low(self, x: jax.Array, trace: Trace) -> jax.Array:
        """What A gives, from one matmul for all layers that are called with the same input, such as q, k and v: the
        matrix unit takes as long for 48 columns as for 16."""
        call = self._call_with(x, trace)
        call.layers.append(self)
        return call.low[id(self)]

    def _call_with(self, x: jax.Array, trace: Trace) -> AdaptedInput:
        """With what the A matrices of all layers give that are called with this input."""
        call = trace.adapted_inputs.setdefault(id(x), AdaptedInput(x))
        if id(self) not in call.low:
            joined = trace.joined_layers.get(id(self), (self,))
            matrices = [layer._matrices()[0].astype(x.dtype) for layer in joined]
            left = _gradient_apart(x) if trace.attention == "splash" else x
            low = left @ jnp.concatenate(matrices).T
            ends = np.cumsum([len(matrix) for matrix in matrices])[:-1]
            parts = jnp.split(checkpoint_name(low, SMALL), ends, axis=-1)
            call.low.update(zip(map(id, joined), parts, strict=True))
        return call


def own_ranks(low: jax.Array, chosen: ChosenAdapters) -> jax.Array:
    """What A gives [B, …, A·R], with zeros in the ranks of the adapters that are not the sequence's own."""
    num_rows, num_ranks = len(chosen.adapters_B), low.shape[-1]
    if low.shape[0] != num_rows:
        raise RowsMixed(
            f"A linear layer of this model gets an input of shape {low.shape[:-1]} for {num_rows} sequences, so they "
            "cannot use different adapters.",
            do="use one adapter at a time",
        )
    owner_R = jnp.arange(num_ranks) // (num_ranks // chosen.num_adapters)
    is_own_BR = owner_R == chosen.adapters_B[:, None]
    return jnp.where(is_own_BR.reshape(num_rows, *[1] * (low.ndim - 2), num_ranks), low, 0)


@jax.custom_vjp
def _gradient_apart(x: jax.Array) -> jax.Array:
    """x, with a gradient that is computed on its own before it is added to others."""
    return x


_gradient_apart.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))


def row_norms(w_ED: jax.Array, a_RD: jax.Array, b_ER: jax.Array, scale: float) -> jax.Array:
    """The lengths of the rows of W + s B A, without computing B A:

        |w + s b A|² = |w|² + 2 s b·(A w) + s² b·(A Aᵀ) b       for a row w of W and the row b of B

    No gradient flows through them.
    """
    w_ED, a_RD, b_ER = jax.lax.stop_gradient((w_ED, a_RD.astype(jnp.float32), b_ER.astype(jnp.float32)))
    squares_E = jnp.square(w_ED.astype(jnp.float32)).sum(-1)
    products_ER = jnp.einsum("ed,rd->er", w_ED, a_RD.astype(w_ED.dtype), preferred_element_type=jnp.float32)
    gram_RR = a_RD @ a_RD.T
    squares_E += 2 * scale * (b_ER * products_ER).sum(-1) + scale**2 * ((b_ER @ gram_RR) * b_ER).sum(-1)
    return jnp.sqrt(jnp.maximum(squares_E, jnp.finfo(jnp.float32).tiny))


class _EmbeddingOutput:
    """A mixin for an embedding that is a target: adds scale * B @ A[:, token] to the row of a token. As in PEFT, there
    is no dropout, and a tied head does not get it. The original class computes A[:, token], so scaling is included."""

    lora_embedding_a: torch.nn.Parameter
    lora_embedding_b: torch.nn.Parameter
    lora_scale: float

    def forward(self, tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = super().forward(tokens, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(out, TORCHAX_TENSORS):
            return out
        with weight_replaced(self, self.lora_embedding_a.T):
            columns = interop.jax_view(super().forward(tokens, *args, **kwargs))  # type: ignore[misc]
        y, b_DR = interop.jax_view(out), interop.jax_view(self.lora_embedding_b)
        delta = columns @ b_DR.astype(columns.dtype).T * self.lora_scale
        return interop.torch_view(y + delta.astype(y.dtype))


def joined_layers(
    layers: Sequence[torch.nn.Module], inputs: Iterable[AdaptedInput]
) -> dict[int, tuple[torch.nn.Module, ...]]:
    """The parts of each decoder layer that are called with the same input, as seen in a trace of the first one: for the
    id of each part, all of them."""
    found: dict[int, tuple[Any, ...]] = {}
    names = {id(module): name for name, module in layers[0].named_modules()}
    for each in inputs:
        shared = [names[id(part)] for part in each.layers]
        for layer in layers:
            modules = dict(layer.named_modules())
            joined = tuple(modules[name] for name in shared if hasattr(modules.get(name), "lora_a"))
            found |= {id(part): joined for part in joined}
    return found


@functools.cache
def _with_output(cls: type, mixin: type = _LinearOutput) -> type:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def add_lora(model: torch.nn.Module, spec: LoraSpec | None) -> list[str]:
    """Adds adapter parameters (on the meta device) to the targets of `spec`, and returns the targets' names."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adaptable = linear_layers(model) if spec is None else adaptable_layers(model, spec)
    layers = {} if spec is None else chosen_layers(model, spec)
    for name, module in adaptable.items():
        cls: type = type(module)
        is_embedding = isinstance(module, torch.nn.Embedding)
        module.__class__ = _with_output(cls, _EmbeddingOutput if is_embedding else _LinearOutput)
        if spec is not None and name in layers:
            add = _add_to_embedding if is_embedding else _add_parameters
            add(name, module, layers[name], spec)
    if spec is not None:
        add_to_experts(expert_parameters(model), layers, spec)
    return list(layers)


def chosen_layers(model: torch.nn.Module, spec: LoraSpec) -> dict[str, LayerLora]:
    """The targets of `spec`: linear layers, and parameters of experts."""
    linear, experts = adaptable_layers(model, spec), expert_parameters(model)
    left_out = [*linear_routers(experts, linear), *refused_by_peft(getattr(model, "config", None), linear)]
    return adapted_layers(model, list(linear), spec, list(experts), left_out)


def _add_to_embedding(name: str, module: torch.nn.Module, layer: LayerLora, spec: LoraSpec) -> None:
    if spec.dora or spec.pissa:
        raise TrilloraError(
            f"{name} is an embedding, which can be a target of plain LoRA only.",
            where=spec.file or "lora.targets",
            do="remove it from lora.targets, or remove lora.dora and lora.init",
        )
    num_in, num_out = features(module)
    module.lora_embedding_a = torch.nn.Parameter(torch.empty(layer.rank, num_in, device="meta"))
    module.lora_embedding_b = torch.nn.Parameter(torch.empty(num_out, layer.rank, device="meta"))
    module.lora_scale = spec.scale_of(layer)


def _add_parameters(name: str, module: torch.nn.Module, layer: LayerLora, spec: LoraSpec) -> None:
    num_in, num_out = features(module)
    rank = 2 * layer.rank if spec.pissa else layer.rank
    module.lora_a = torch.nn.Parameter(torch.empty(rank, num_in, device="meta"))
    module.lora_b = torch.nn.Parameter(torch.empty(num_out, rank, device="meta"))
    if spec.dora:
        module.lora_magnitude = torch.nn.Parameter(torch.empty(num_out, device="meta"))
    module.lora_scale, module.lora_dropout, module.lora_init = spec.scale_of(layer), spec.dropout, spec.init
    module.lora_stream = zlib.crc32(
        re.sub(r"\.\d+\.", ".#.", name).encode()
    )  # the same in all layers, which share one scan body; the dropout key already contains the layer


def adaptable_layers(model: torch.nn.Module, spec: LoraSpec) -> dict[str, torch.nn.Module]:
    """The layers that patterns select from: all linear ones; and the embedding, if it is named."""
    linear = linear_layers(model)
    if isinstance(spec.targets, str) or not hasattr(model, "get_input_embeddings"):
        return linear
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    is_named = any(name == target or name.endswith(f".{target}") for target in spec.targets)
    return {name: embedding, **linear} if is_named else linear


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every linear module that returns a single tensor. A router may subclass Linear and return a tuple: subclasses are
    called once on the meta device to find out."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and _returns_one_tensor(module):
            found[name] = module
    return found


def _returns_one_tensor(module: torch.nn.Module) -> bool:
    if type(module) in (torch.nn.Linear, Conv1D):
        return True
    num_in, num_out = features(module)
    try:
        out = module(torch.empty(1, 2, num_in, device="meta", dtype=module.weight.dtype))
    except Exception:  # a subclass that cannot be called like Linear is not a plain linear layer
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 2, num_out)


def features(module: torch.nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs. Conv1D stores its weight transposed; the inputs of an embedding are tokens."""
    out_features, in_features = module.weight.shape
    is_transposed = isinstance(module, Conv1D | torch.nn.Embedding)
    return (out_features, in_features) if is_transposed else (in_features, out_features)


@dataclass(frozen=True)
class FrozenLayer:
    """What the initial adapter of a layer depends on."""

    weight_ED: np.ndarray  # float32
    scale: float


def initial_adapter(
    layout: Layout, seed: int, init: Initial = "default", frozen: Callable[[str], FrozenLayer] | None = None
) -> Tree:
    """A is Kaiming-uniform and B is zero, so the adapted model starts equal to the base. The numbers depend only on the
    seed and the parameter's name, so they do not change with the stacking of layers or the number of devices.

    DoRA and PiSSA start from the base: `frozen` returns the layer that has this name.
    """

    @functools.cache
    def factors(target: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        assert frozen is not None
        return principal_factors(frozen(target), rank, init, _seed_of(seed, target))

    def initial(name: str, shape: tuple[int, ...]) -> np.ndarray:
        kind = kind_of(name)
        target = name.removesuffix(kind.suffix)
        if kind is MAGNITUDE:
            assert frozen is not None
            return np.linalg.norm(frozen(target).weight_ED, axis=1)
        if kind in (LORA_A, LORA_B) and init != "default":
            a_RD, b_ER = factors(target, shape[kind.rank_dim or 0] // 2)
            return np.concatenate([a_RD, a_RD]) if kind is LORA_A else np.concatenate([b_ER, -b_ER], axis=1)
        return _initial(name, shape, seed)

    return {
        key: np.stack([initial(name, leaf.part_shape) for name in leaf.names]).reshape(leaf.shape)
        for key, leaf in layout.items()
        if is_of_lora(key)
    }


def _initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if kind_of(name).is_zero_at_start:
        return np.zeros(shape, np.float32)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), PEFT's default
    generator = np.random.default_rng(_seed_of(seed, name))
    if kind_of(name) is EMBEDDING_B:
        return generator.standard_normal(shape).astype(np.float32)
    return generator.uniform(-bound, bound, shape).astype(np.float32)


def _seed_of(seed: int, name: str) -> list[int]:
    return [seed, zlib.crc32(name.encode())]


def principal_factors(layer: FrozenLayer, rank: int, init: Initial, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """PiSSA's A [R, D] and B [E, R]: scale * B A is the part of the weight with the largest singular values.
    `pissa_niter_16` finds them by 16 steps of subspace iteration from random numbers, which is far faster."""
    weight = torch.from_numpy(layer.weight_ED)
    if init == "pissa":
        u_EK, values_K, vt_KD = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.default_rng(seed).integers(2**63)))
            u_EK, values_K, v_DK = torch.svd_lowrank(weight, rank, niter=int(init.rpartition("_")[2]))
        vt_KD = v_DK.T
    roots_R = (values_K[:rank] / layer.scale).sqrt()
    return (roots_R[:, None] * vt_KD[:rank]).numpy(), (u_EK[:, :rank] * roots_R).numpy()
