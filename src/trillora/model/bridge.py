"""A transformers causal LM as pure functions of JAX arrays.

    model = CausalLM(config, lora=LoraSpec(rank=16))
    hidden_BTD = model.hidden(base, adapter, {"tokens": tokens_BT})      # inside jax.jit
    logits_BCV = model.head(base, model.head_adapter(adapter), hidden_BTD[:, :128])

`base` and `adapter` are dicts of arrays with the keys of `model.layout` and `model.adapter_layout`. The PyTorch module
is on the meta device, so it has code but no weights. Each call substitutes the arrays for its parameters
(`torch.func.functional_call`), runs transformers' own forward under torchax, and restores the module afterwards.

Legend: B sequences, T tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from torchax import interop
from torchax.ops import mappings
from transformers.pytorch_utils import Conv1D

from trillora.devices.mesh import split_rows
from trillora.engine.attention import Implementation
from trillora.engine.hash_random import MaskKey
from trillora.engine.kernels.product_sum import IN_XLA, Products
from trillora.engine.quantize import Format, Matmul, linear, rounded_linear
from trillora.engine.ragged import find_documents
from trillora.errors import TrilloraError
from trillora.model.adapter_parameters import LORA_A, LORA_B, SUFFIXES
from trillora.model.layout import Layout, Leaf, Tree, split_layers, stored_weights
from trillora.model.loading.wrapper import auto_class, is_wrapper, keep_text_model, removed_modules
from trillora.model.lora import FrozenLayer, add_lora, initial_adapter, linear_layers
from trillora.model.lora_spec import LoraSpec
from trillora.model.overrides import attention as attention_functions
from trillora.model.overrides import experts
from trillora.model.overrides.compressors import window_keys
from trillora.model.overrides.expert_loops import static_loops
from trillora.model.overrides.gated_mlps import find_gated_mlps, fused_forwards
from trillora.model.overrides.indexers import block_indexers
from trillora.model.overrides.ngrams import hashed_ngrams
from trillora.model.overrides.recurrent import packing_aware
from trillora.model.overrides.rms_norms import find_rms_norms, fused_norms
from trillora.model.overrides.rope import make_rope_static, rotations_as_products, rotations_with_gradient
from trillora.model.overrides.torchax_fixes import counted_no_grad, environment
from trillora.model.parts.token_rows import add_token_rows
from trillora.model.parts.whole_weights import add_whole_weights, select_modules, values_from_base, with_whole_weights
from trillora.model.quantized import part_leaves, quantize_layers, whole_weight
from trillora.model.remat import Remat
from trillora.model.stack import LayerStack, LinkedLayers, decoder_layers
from trillora.model.trace import Kernels, Replacement, Trace, replaced, tracing

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

Inputs = dict[str, jax.Array]  # tokens; optionally positions, segments
RANDOM = ("normal_", "trunc_normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_")  # how transformers initializes
OF_LINEAR = (LORA_A.suffix, LORA_B.suffix)


class CausalLM:
    """One architecture with its adapters, to be called inside `jax.jit`."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: str = "float32",
        quantize: Format | None = None,
        matmul: Matmul = "full",
        lora: LoraSpec | None = None,
        scan: bool = True,
        unroll: int = 1,
        remat: Remat = "full",
        attention: Implementation = "xla",
        document_room: tuple[int, int] | None = None,
        kernels: Kernels = "xla",
        products: Products = IN_XLA,
        interpret: bool = False,
        mapped: bool = False,
        mesh: Mesh | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`document_room`: tokens of a block of a packed sequence, and how many documents can begin in a block (see
        `engine.ragged`); None if that is not known."""
        self._build = functools.partial(
            CausalLM,
            config,
            dtype=dtype,
            quantize=quantize,
            matmul=matmul,
            scan=scan,
            unroll=unroll,
            remat=remat,
            attention=attention,
            document_room=document_room,
            kernels=kernels,
            products=products,
            interpret=interpret,
            mapped=mapped,
            mesh=mesh,
            trust_remote_code=trust_remote_code,
        )
        self.module = build_module(config, dtype, trust_remote_code=trust_remote_code)
        self.name = type(self.module).__name__
        self.attention_style = attention_functions.choose_style(self.module)
        self.matmul, self.arithmetic = matmul, _arithmetic(dtype, quantize, matmul)
        self.quantize, self._quantized = quantize, _quantize(self.module, quantize, matmul)
        self.targets = add_lora(self.module, lora)
        self.lora = lora or LoraSpec()
        self.whole = select_modules(self.module, self.lora)
        add_token_rows(self.module, self.lora.tokens, self.whole)
        add_whole_weights(self.module, self.whole, self.lora.num_tokens, self.targets)
        self.kernels, self.products, self.document_room = kernels, products, document_room
        self.gated_mlps = find_gated_mlps(self.module) if kernels == "fused" else []
        self.rms_norms = find_rms_norms(self.module) if kernels == "fused" else []
        self._rotations = rotations_with_gradient(self.module) if kernels == "fused" else []
        self.has_dropout = lora is not None and lora.dropout > 0
        self._splits_lora = kernels == "fused" and not scan  # stored as one array of all equal layers
        self.stack = LayerStack(self.module, scan=scan, unroll=unroll, remat=remat, stack_lora=self._splits_lora)
        self.attention, self.interpret, self.mapped, self.mesh = attention, interpret, mapped, mesh
        self.decoder = find_decoder(self.module, self.stack)
        self.arguments = inspect.signature(self.module.forward).parameters
        self._decoder_output: type | None = None
        self.layout, self.adapter_layout = self._layouts()

    def with_lora(self, lora: LoraSpec | None) -> CausalLM:
        """The same model with other adapters. Both use the same base weights."""
        return self._build(lora=lora)

    @property
    def has_separate_head(self) -> bool:
        """Whether hidden states can be computed without logits; then the loss can be computed in chunks."""
        return self.decoder is not None

    def head_adapter(self, adapter: Tree) -> Tree:
        """The part of an adapter that the head uses."""
        decoder = {id(m) for m in (self.decoder or self.module).modules()}
        outside = [m for m in self.module.modules() if id(m) not in decoder]
        used = {id(parameter) for m in outside for parameter in m.parameters(recurse=False)}
        # By identity: a tied head uses token rows that are named after the embedding.
        ours = {name for name, parameter in self.module.named_parameters() if id(parameter) in used}
        return {key: array for key, array in adapter.items() if key in ours}

    def initial_adapter(self, base: Tree, seed: int, layout: Layout | None = None) -> Tree:
        """The adapter before the first step. It does not change the base; some kinds start from its weights. `layout`:
        of an adapter with a smaller rank."""
        layout = layout or self.adapter_layout
        where = {n: (w, i) for w in stored_weights(self.layout).values() for i, n in enumerate(w[0].names)}
        name_of = {id(parameter): name for name, parameter in self.module.named_parameters()}  # tied ones have one name

        def frozen(target: str) -> FrozenLayer:
            layer = self.module.get_submodule(target)
            (leaf, parts), i = where[name_of[id(layer.weight)]]
            arrays = {key: base[key][i] if leaf.stacked else base[key] for key in parts}
            if not all(array.is_fully_addressable for array in arrays.values()):  # parts are on other hosts
                arrays = multihost_utils.process_allgather(arrays, tiled=True)
            weight = whole_weight(arrays, parts)
            weight_ED = np.array(weight.T if isinstance(layer, Conv1D) else weight, np.float32)
            return FrozenLayer(weight_ED, layer.lora_scale)

        of_lora = initial_adapter(layout, seed, self.lora.init, frozen)
        return {**of_lora, **values_from_base(layout, self.lora.tokens, base)}

    def hidden(self, base: Tree, adapter: Tree, inputs: Inputs, dropout_key: MaskKey | None = None) -> jax.Array:
        """The decoder's last hidden state [B, T, D]; `head` turns it into logits.

        The whole model's forward is called, because it may do something before the decoder. When the decoder returns,
        an exception carries its output out of the forward, so the head is not traced.
        """
        decoder = self.decoder
        assert decoder is not None

        def stop_after_decoder(*args: object, **kwargs: object) -> None:
            raise _DecoderReturned(type(decoder).forward(decoder, *args, **kwargs))

        try:
            with _replaced_forward(decoder, stop_after_decoder):
                self._forward(base, adapter, inputs, dropout_key)
        except _DecoderReturned as done:
            self._decoder_output = type(done.output)
            return split_rows(interop.jax_view(done.output[0]), self.mesh)
        raise AssertionError(f"{self.name} did not call its decoder")

    def head(self, base: Tree, head_adapter: Tree, hidden_BTD: jax.Array) -> jax.Array:
        """Logits [B, C, V] of any slice [B, C, D] of the hidden states. Runs the whole model's forward with a decoder
        that returns the slice, so whatever the model does after the decoder (scaling, soft caps) is included."""
        decoder, kind = self.decoder, self._decoder_output
        assert decoder is not None and kind is not None, "hidden() has to be traced before head()"
        tokens = jnp.zeros(hidden_BTD.shape[:2], jnp.int32)  # not used: the decoder does not run

        def return_slice(*args: object, **kwargs: object) -> Any:
            chunk = interop.torch_view(split_rows(hidden_BTD, self.mesh))
            return (chunk,) if kind is tuple else kind(last_hidden_state=chunk)

        def return_zeros(ids: Any) -> Any:
            """A multimodal model looks up the tokens itself. The head's part of the adapter has no rows for them."""
            width = self.module.get_input_embeddings().weight.shape[-1]
            return interop.torch_view(jnp.zeros((*ids.shape, width), hidden_BTD.dtype))

        with contextlib.ExitStack() as forwards:
            forwards.enter_context(_replaced_forward(decoder, return_slice))
            if removed_modules(self.module):
                forwards.enter_context(_replaced_forward(self.module.get_input_embeddings(), return_zeros))
            logits = self._forward(base, head_adapter, {"tokens": tokens}, None).logits
            return split_rows(interop.jax_view(logits), self.mesh)

    def logits(self, base: Tree, adapter: Tree, inputs: Inputs, dropout_key: MaskKey | None = None) -> jax.Array:
        """Full logits [B, T, V]."""
        return interop.jax_view(self._forward(base, adapter, inputs, dropout_key).logits)

    def weights_split_on_last_dim(self) -> set[str]:
        """Which weights tensor parallelism splits on their last dim, the inputs: layers that write to the
        residual stream, such as `o_proj` and `down_proj`. The rule needs no list of names: it is the last of the linear
        layers that have the same parent module."""
        head = self.module.get_output_embeddings()
        linear = {name: module for name, module in linear_layers(self.module).items() if module is not head}
        last = {name.rpartition(".")[0]: name for name in linear}
        writes_residual = set(last.values())

        def inputs_first(name: str, module: torch.nn.Module) -> bool:  # codes have outputs first
            return isinstance(module, Conv1D) and f"{name}.weight" not in self._quantized

        return {f"{name}.weight" for name, m in linear.items() if (name in writes_residual) != inputs_first(name, m)}

    def as_stored(self, layer: str, change_ED: np.ndarray) -> np.ndarray:
        """A change [outputs, inputs] of a linear layer's weight, in the order in which the layer stores it."""
        return change_ED.T if isinstance(self.module.get_submodule(layer), Conv1D) else change_ED

    def _forward(self, base: Tree, adapter: Tree, inputs: Inputs, dropout_key: MaskKey | None) -> Any:
        if dropout_key is not None:  # split like the batch, so that each device computes only its own masks
            dropout_key = dropout_key._replace(index_B=split_rows(dropout_key.index_B, self.mesh))
        segments, room = inputs.get("segments"), self.document_room
        adapter = split_layers(adapter, self.adapter_layout) if self._splits_lora else adapter
        trace = Trace(
            weights=with_whole_weights(base, adapter),
            segments_BT=segments,
            positions_BT=inputs.get("positions"),
            documents=None if segments is None or room is None else find_documents(segments, *room),
            attention=self.attention,
            kernels=self.kernels,
            products=self.products,
            interpret=self.interpret,
            mapped=self.mapped,
            mesh=self.mesh,
            dropout_key=dropout_key,
        )
        # Stacked weights have a slice such as "1:4:1" in their key. They are not parameters of the module: `LayerStack`
        # reads them from the trace.
        unstacked = {key: value for key, value in trace.weights.items() if ":" not in key}
        keywords = {"input_ids": interop.torch_view(inputs["tokens"]), "use_cache": False}
        if trace.positions_BT is not None and "position_ids" in self.arguments:
            keywords["position_ids"] = interop.torch_view(trace.positions_BT)
        return self.run(trace, unstacked, keywords, packing_aware(self.module))

    def run(self, trace: Trace, weights: Tree, keywords: Mapping[str, object], replacements: list[Replacement]) -> Any:
        """Runs transformers' own forward with these weights, for training and generation. `replacements` are (object,
        attribute, value): attributes that are replaced during the call."""
        masks = attention_functions.mask_replacements(self.module, self.attention_style)
        parts = (static_loops, block_indexers, window_keys, hashed_ngrams)
        modules = [replacement for part in parts for replacement in part(self.module)]
        if self.attention == "splash":
            modules += rotations_as_products(self.module)
        modules += self._rotations
        modules += fused_forwards(self.gated_mlps) + fused_norms(self.rms_norms)
        given, replacements = replacements, [*replacements, *masks, *modules, *counted_no_grad()]
        with (
            _restored(self.module),
            replaced(replacements),
            tracing(trace),
            environment(),
            warnings.catch_warnings(),
        ):
            try:
                # Models request int64 positions, and jax warns every time that it uses int32.
                warnings.filterwarnings("ignore", "Explicitly requested dtype int64", UserWarning)
                return torch.func.functional_call(
                    self.module, interop.torch_view(weights), (), keywords, tie_weights=True, strict=False
                )
            except (_DecoderReturned, TrilloraError):
                raise
            except LinkedLayers:
                self.stack.linked = True
            except Exception as error:
                raise _cannot_trace(self.name, error) from error
        return self.run(dataclasses.replace(trace, layer_calls={}, bodies=[]), weights, keywords, given)

    def _layouts(self) -> tuple[Layout, Layout]:
        """Every parameter and buffer of the module, with the layers of a segment stacked: of the base, of adapters."""
        canonical = {canonical for names in self.stack.shared for canonical in names.values()}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        layout: Layout = {}
        in_layers: set[str] = set()
        slots = [(of_lora, slot) for of_lora in (False, True) for slot in self.stack.slots(of_lora=of_lora)]
        for of_lora, (segment, j, prefix) in slots:
            layer = self.stack.layers[segment.start + j]
            indices = [segment.start + j + r * segment.period for r in range(segment.repetitions)]
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if name in self.stack.shared[segment.start + j] or name.endswith(OF_LINEAR) != of_lora:
                    continue
                names = tuple(f"{self.stack.prefix}.{i}.{name}" for i in indices)
                in_layers.update(names)
                stacked = segment.repetitions > 1
                shape = (len(names), *tensor.shape) if stacked else tuple(tensor.shape)
                layout |= self._leaves(prefix + name, Leaf(names, stacked, shape, _dtype(tensor)))
        for name, tensor in tensors.items():
            if name not in in_layers or name in canonical:
                layout[name] = Leaf((name,), False, tuple(tensor.shape), _dtype(tensor))
        of_adapter = {key: leaf for key, leaf in layout.items() if key.endswith(SUFFIXES)}
        return {key: leaf for key, leaf in layout.items() if key not in of_adapter}, of_adapter

    def _leaves(self, key: str, leaf: Leaf) -> Layout:
        """The leaf itself, or the parts that replace it if it is quantized."""
        if self.quantize is None or leaf.names[0] not in self._quantized:
            return {key: leaf}
        module = self.module.get_submodule(leaf.names[0].rpartition(".")[0])
        return part_leaves(key, leaf, self.quantize, inputs_first=isinstance(module, Conv1D))


def _quantize(module: torch.nn.Module, format: Format | None, matmul: Matmul) -> set[str]:
    """Prepares the linear layers of the decoder for a format. Returns the names of their weights."""
    if format is None:
        return set()
    within, _ = decoder_layers(module) or ("", [])
    return quantize_layers(
        module, linear_layers(module), within, format, linear if matmul == "full" else rounded_linear
    )


def _arithmetic(dtype: str, quantize: Format | None, matmul: Matmul) -> str:
    """How the model computes, for people.

    >>> _arithmetic("bfloat16", "int8", "int8")
    'bfloat16, base in int8, matmuls with it in int8'
    """
    base = "" if quantize is None else f", base in {quantize.partition('_')[0]}"
    return dtype + base + ("" if matmul == "full" else f", matmuls with it in {matmul}")


def find_decoder(module: torch.nn.Module, stack: LayerStack) -> torch.nn.Module | None:
    """The submodule that contains all layers and returns hidden states; None if only the whole model does. The text
    model of a wrapper may have a head of its own; then it is the module with the list of layers."""
    head = module.get_output_embeddings()
    parent = module.get_submodule(stack.prefix.rpartition(".")[0])
    for candidate in (module.get_decoder(), module.base_model, parent):
        inside = {id(m) for m in candidate.modules()}
        if candidate is not module and id(head) not in inside and all(id(layer) in inside for layer in stack.layers):
            return candidate
    return None


def build_module(config: PretrainedConfig, dtype: str, *, trust_remote_code: bool = False) -> Any:
    """transformers' module with parameters on the meta device and real buffers; of a multimodal one, the text model. It
    is in evaluation mode: the base is frozen, so its own dropout is off."""
    attention_functions.register()
    experts.register()
    name_or_path = config.name_or_path
    try:
        config = type(config).from_dict(config.to_dict())
        config.use_cache = False
        if hasattr(config, "rescale_every"):  # halves weights in place, for inference in float16
            config.rescale_every = 0
        with _parameters_on_meta():
            module = getattr(transformers, auto_class(config)).from_config(
                config, dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever the model's code raises for values that do not fit each other
        raise TrilloraError(
            f"transformers cannot build a {config.model_type} model from this config: {_reason(error)}",
            where=f"{name_or_path}/config.json" if name_or_path else None,
            do="install the package that it needs, or use a model that has only text"
            if isinstance(error, ImportError)
            else "use the config.json of the model's repository, and the transformers version that it names",
        ) from error
    if is_wrapper(config):
        keep_text_model(module)
    with contextlib.suppress(Exception):  # raises for a model without experts
        module.set_experts_implementation(experts.NAME)
    make_rope_static(module)
    keep = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in module.named_parameters():
        if any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.float()
    return module.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves each parameter to the meta device when it is registered, so none is initialized. Buffers such as rotary
    frequencies are computed as usual."""
    register = torch.nn.Module.register_parameter
    initialization = sys.modules.get("transformers.initialization")  # if this version of transformers has it

    @functools.wraps(register)
    def register_on_meta(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    functions = {name: function for name in RANDOM if (function := getattr(initialization, name, None))}
    skipped = [(initialization, name, _except_on_meta(function)) for name, function in functions.items()]
    with replaced([(torch.nn.Module, "register_parameter", register_on_meta), *skipped]):
        yield


def _except_on_meta(function: Callable[..., object]) -> Callable[..., object]:
    """torch takes 1.5 ms to draw no random numbers: a third of a second for a model of 30 layers."""

    @functools.wraps(function)
    def initialize(tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    return initialize


@contextlib.contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Restores attributes and buffers that a forward writes: otherwise tracers would leak into the next trace."""
    before = [(m, dict(m.__dict__), dict(m._buffers), dict(m._parameters)) for m in module.modules()]
    try:
        yield
    finally:
        for child, attributes, buffers, parameters in before:
            child.__dict__.clear()
            child.__dict__.update(attributes)
            child._buffers.clear()
            child._buffers.update(buffers)
            child._parameters.clear()
            child._parameters.update(parameters)


class _DecoderReturned(Exception):
    """Carries the decoder's output out of the forward, past the head."""

    def __init__(self, output: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.output = output


@contextlib.contextmanager
def _replaced_forward(module: torch.nn.Module, forward: object) -> Iterator[None]:
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)


def _dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    return np.dtype(mappings.t2j_dtype(tensor.dtype))


def _cannot_trace(name: str, error: Exception) -> TrilloraError:
    frames = traceback.extract_tb(error.__traceback__)
    in_model = [frame for frame in frames if "transformers" in frame.filename.split("site-packages")[-1]]
    where = None
    if in_model:
        frame = in_model[-1]
        where = f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}  {frame.line}"
    return TrilloraError(
        f"{name} cannot be traced: {_reason(error)}",
        where=where,
        do="choose an architecture from docs/models.md, or report this operation and the model's name",
    )


def _reason(error: Exception) -> str:
    """The type and the first line of an exception from a library."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
