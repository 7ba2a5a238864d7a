"""Reads checkpoint files into sharded arrays, one tensor at a time: the host never holds the whole model.

First, `resolve_sources` finds where each parameter comes from. Transformers decides this (names that changed, experts
stored one by one, tied weights); here its rules are only applied:

    model.norm.weight            Stored     the tensor of that name in model-00002.safetensors, dequantized if it is
                                            stored quantized (`loading/stored/`)
    …mlp.experts.gate_up_proj    Converted  from experts.0.w1, experts.0.w3, experts.1.w1, … by transformers' converter
    model.rotary_emb.inv_freq    Computed   not in the checkpoint: the module computed it

Then each device's slice is read directly from the safetensors file, cast on the host and copied to the device. In a
multi-host run a process reads only the slices of its own devices. A weight that is to be quantized is quantized there,
and only its codes stay: the devices never hold more than one unquantized weight. If the checkpoint has the same codes,
they are copied.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from trillora.engine.quantize import Format, quantize
from trillora.errors import TrilloraError, nearest
from trillora.events import Listener, Note, Progress, ignore_events
from trillora.model.layout import Layout, Leaf, stored_weights
from trillora.model.loading.source import weight_files
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.stored.packed import Index, ReadSlice, Stored, fitting_parts, opened_tensor
from trillora.model.loading.stored.view import formats, unquantized
from trillora.model.loading.tensor_files import opened
from trillora.model.loading.wrapper import removed_modules

logger = logging.getLogger(__name__)

PLAIN_FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors; a weight of another type is quantized
ROWS_PER_READ = 4096  # when two tied matrices are compared


@dataclass(frozen=True)
class Converted:
    """A parameter that transformers computes from stored tensors (fused experts, split projections)."""

    target: str
    shape: tuple[int, ...]
    converter: WeightConverter  # has state, so each use makes a copy
    parts: tuple[tuple[str, Stored], ...]  # (matching pattern of the converter, tensor)
    first_target: str  # the name passed to the converter, the same for all its results


@dataclass(frozen=True)
class Computed:
    """A buffer that is not in the checkpoint; the module computed it when it was built."""

    tensor: torch.Tensor


Source = Stored | Converted | Computed


def load_weights(
    folder: Path,
    module: torch.nn.Module,
    layout: Layout,
    shardings: Mapping[str, Sharding],
    listener: Listener = ignore_events,
) -> dict[str, jax.Array]:
    """Reads every array of `layout` from the safetensors files of `folder`.

    `module` is the transformers model with its parameters on the meta device. The listener gets the number of bytes
    loaded. All names, shapes and dtypes are checked before the first array is created.
    """
    weights = stored_weights(layout)
    sources = resolve_sources(folder, module, {key: leaf for key, (leaf, _) in weights.items()})
    num_bytes, done = sum(leaf.num_bytes for leaf, _ in weights.values()), 0
    tree: dict[str, jax.Array] = {}
    kept = 0
    for leaf, parts in weights.values():
        place = _while_loading(parts, shardings)
        for layer, name in enumerate(leaf.names):
            arrays = _kept(sources[name], parts, shardings)
            kept += arrays is not None
            if arrays is None:
                with _open_source(sources[name], module, leaf.dtype) as read:
                    weight = _place(name, leaf.part_shape, leaf.dtype, place, read)
                arrays = _quantized(weight, parts, shardings)
            _store(tree, arrays, layer, parts, shardings)
            done += leaf.num_bytes // len(leaf.names)
            listener(Progress("Loading weights", done, num_bytes, "bytes"))
    _say_formats(sources, weights, kept, listener)
    return tree


def random_weights(
    module: torch.nn.Module, layout: Layout, shardings: Mapping[str, Sharding], seed: int
) -> dict[str, jax.Array]:
    """The same arrays without a checkpoint, created on the devices: small normals, ones for norms, zeros for biases."""
    buffers = dict(module.named_buffers())
    tree: dict[str, jax.Array] = {}
    for number, (key, (leaf, parts)) in enumerate(stored_weights(layout).items()):
        random = jax.random.fold_in(jax.random.key(seed), number)
        if leaf.names[0] in buffers:
            value = torch.stack([buffers[name] for name in leaf.names]) if leaf.stacked else buffers[leaf.names[0]]
            tree[key] = _place(key, leaf.shape, leaf.dtype, shardings[key], functools.partial(_cut, value))
        elif key not in parts:
            fill = jax.jit(_normal, static_argnums=(1, 2), out_shardings=_while_loading(parts, shardings))
            for layer in range(len(leaf.names)):
                weight = fill(jax.random.fold_in(random, layer), leaf.part_shape, leaf.dtype)
                _store(tree, _quantized(weight, parts, shardings), layer, parts, shardings)
        elif len(leaf.part_shape) >= 2:
            fill = jax.jit(_normal, static_argnums=(1, 2), out_shardings=shardings[key])
            tree[key] = fill(random, leaf.shape, leaf.dtype)
        else:
            fill = jax.jit(jnp.full, static_argnums=(0, 1, 2), out_shardings=shardings[key])
            tree[key] = fill(leaf.shape, 0 if key.endswith("bias") else 1, leaf.dtype)
    return tree


def _while_loading(parts: Layout, shardings: Mapping[str, Sharding]) -> Sharding:
    """Where one layer of a weight is placed: like its array, or like its codes, which are its first part."""
    key, leaf = next(iter(parts.items()))
    sharding = _of_one_layer(shardings[key], leaf)
    if leaf.quantized and leaf.quantized.inputs_first and isinstance(sharding, NamedSharding):
        outputs, inputs = (*sharding.spec, None, None)[:2]
        return NamedSharding(sharding.mesh, PartitionSpec(inputs, outputs), memory_kind=sharding.memory_kind)
    return sharding


def _store(
    tree: dict[str, jax.Array],
    arrays: dict[str, jax.Array],
    layer: int,
    parts: Layout,
    shardings: Mapping[str, Sharding],
) -> None:
    """Adds one layer of a weight to the tree."""
    for key, array in arrays.items():
        leaf, sharding = parts[key], shardings[key]
        if leaf.stacked and key not in tree:
            tree[key] = _zeros(leaf.shape, leaf.dtype, sharding)
        tree[key] = _write(tree[key], array, layer, sharding) if leaf.stacked else array
    # Wait for the devices: if the host read ahead, its copies would fill its memory.
    jax.block_until_ready([tree[key] for key in parts])


def _quantized(weight: jax.Array, parts: Layout, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
    """One layer of a weight by the keys of `parts`, computed on the devices."""
    about = next(iter(parts.values())).quantized
    if about is None:
        return dict.fromkeys(parts, weight)
    names = {leaf.quantized.name: key for key, leaf in parts.items() if leaf.quantized}
    places = {name: _of_one_layer(shardings[key], parts[key]) for name, key in names.items()}
    program = jax.jit(_codes, static_argnums=(1, 2), out_shardings=places)
    return {names[name]: array for name, array in program(weight, about.format, about.inputs_first).items()}


def _kept(source: Source, parts: Layout, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array] | None:
    """One layer of a weight that is stored in the very format of the quantized base; else None."""
    about = next(iter(parts.values())).quantized
    if about is None or about.inputs_first or not isinstance(source, Stored) or source.packed is None:
        return None
    with source.packed.opened() as stored:
        with fitting_parts(source):
            codes = source.packed.codes(stored, about.format)
            if codes is None:
                return None
            by_key = {key: codes[leaf.quantized.name] for key, leaf in parts.items() if leaf.quantized}
            if any(tuple(code.shape) != parts[key].part_shape for key, code in by_key.items()):
                raise ValueError("codes of another shape")
        arrays = {}
        for key, leaf in parts.items():
            place, read = _of_one_layer(shardings[key], leaf), functools.partial(_cut, by_key[key])
            arrays[key] = _place(key, leaf.part_shape, leaf.dtype, place, read)
        return arrays


def _say_formats(
    sources: Mapping[str, Source], weights: Mapping[str, tuple[Leaf, Layout]], kept: int, listener: Listener
) -> None:
    """Says what happened to weights that are stored quantized."""
    packed = {name: part for name, source in sources.items() for part in _stored_parts(source) if part.packed}
    if not packed:
        return
    held = [(leaf, next(iter(parts.values())).quantized) for leaf, parts in weights.values() if leaf.names[0] in packed]
    done = f"dequantized to {' and '.join(sorted({leaf.dtype.name for leaf, _ in held}))} while loading"
    if again := sorted({about.format for _, about in held if about}):
        done += f" and quantized again to {' and '.join(again)}"
    if kept:
        others = f", {len(packed) - kept} are {done}" if kept < len(packed) else ""
        done = f"the codes of {kept} weights are used as they are{others}"
    listener(Note(f"The base is stored in {' and '.join(formats(packed.values()))}: {done}"))


def _stored_parts(source: Source) -> list[Stored]:
    if isinstance(source, Converted):
        return [part for _, part in source.parts]
    return [source] if isinstance(source, Stored) else []


def _codes(weight: jax.Array, format: Format, inputs_first: bool) -> dict[str, jax.Array]:
    return quantize(weight.T if inputs_first else weight, format)


# ---- where each parameter comes from


def resolve_sources(folder: Path, module: torch.nn.Module, layout: Layout) -> dict[str, Source]:
    """Where each parameter of `layout` comes from. Checks everything that can be checked without reading values."""
    stored = unquantized(read_headers(folder), read_method(folder))
    known, unused = match_names(stored, module)
    buffers = dict(module.named_buffers())
    ties = tied_groups(module)
    names = {name: leaf for leaf in layout.values() for name in leaf.names}
    sources: dict[str, Source] = {}
    missing: list[str] = []
    for name, leaf in names.items():
        found = [known[alias] for alias in (name, *ties.get(name, ())) if alias in known]
        if found:
            sources[name] = found[0]
            _check_fits(name, leaf, found[0], module)
            for alias in ties.get(name, ()):
                if alias not in names and name in known and alias in known:
                    _check_equal(name, known[name], alias, known[alias])
        elif name in buffers:
            sources[name] = Computed(buffers[name])
        else:
            missing.append(name)
    if missing:
        raise _missing(missing, list(stored), folder)
    _report_unused(unused, module)
    return sources


def read_headers(folder: Path) -> dict[str, Stored]:
    """Name, file, shape and type of every tensor. Opens each file, so a damaged file is found now."""
    stored: dict[str, Stored] = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                head = tensors.get_slice(name)
                stored[name] = Stored(name, file, tuple(head.get_shape()), head.get_dtype())
    return stored


def match_names(stored: dict[str, Stored], module: torch.nn.Module) -> tuple[dict[str, Source], list[str]]:
    """The source of each parameter, by the module's names; and the stored tensors that no parameter uses, without
    the tensors of a wrapper's other modules."""
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = module.state_dict()
    prefix, removed = module.base_model_prefix, removed_modules(module)
    known: dict[str, Source] = {}
    unused: list[str] = []
    groups: dict[str, list[tuple[str, Stored]]] = defaultdict(list)
    # In transformers' order: it decides which expert is which, and some renamings depend on it.
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = rename_source_key(name, [], [], prefix, parameters)
        if target.rpartition(".")[0] in removed:
            continue
        if target not in parameters:
            unused.append(name)
        elif pattern is None:
            known[target] = stored[name]
        else:
            groups[target].append((pattern, stored[name]))
    for first_target, parts in groups.items():
        first = Converted(first_target, (), converter_of[parts[0][0]], tuple(parts), first_target)
        # A conversion on the meta device finds the names and shapes of all results.
        results = convert(first, module, lambda part: torch.empty(part.shape, device="meta"))
        for target, tensor in results.items():
            known[target] = replace(first, target=target, shape=tuple(tensor.shape))
    return known, unused


def convert(
    source: Converted, module: torch.nn.Module, read: Callable[[Stored], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Runs transformers' conversion and returns all its results by parameter name."""
    converter = copy.deepcopy(source.converter)
    for pattern, part in source.parts:
        converter.add_tensor(source.first_target, part.name, pattern, functools.partial(read, part))
    try:
        results = converter.convert(source.first_target, model=module, config=module.config)
    except (RuntimeError, ValueError) as error:
        raise TrilloraError(
            f"{len(source.parts)} stored tensors cannot be combined into {source.first_target}: {error}",
            where=f"{source.parts[0][1].file}, tensor {source.parts[0][1].name} and following",
            do="check that the checkpoint is complete and that config.json (number of experts, sizes) matches it",
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def tied_groups(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """The other names of each tied parameter."""
    groups: dict[str, list[str]] = defaultdict(list)
    for alias, original in module.all_tied_weights_keys.items():
        groups[original].append(alias)
    members = [[original, *aliases] for original, aliases in groups.items()]
    return {name: tuple(other for other in group if other != name) for group in members for name in group}


# ---- checks


def _check_fits(name: str, leaf: Leaf, source: Source, module: torch.nn.Module) -> None:
    assert not isinstance(source, Computed)
    parts = _stored_parts(source)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        for part in parts:
            if part.dtype not in PLAIN_FLOATS:
                raise TrilloraError(
                    f"{part.name} is stored as {part.dtype}: the checkpoint is quantized in a way that cannot be read.",
                    where=str(part.file),
                    do="use the unquantized (bfloat16 or float32) version of the model",
                )
            # The weight is [D, E], and was quantized as [E, D].
            if part.packed is not None and isinstance(module.get_submodule(name.rpartition(".")[0]), Conv1D):
                raise TrilloraError(
                    f"{part.name} is quantized, which is not supported for models with transposed linear layers.",
                    where=str(part.file),
                    do="use the unquantized (bfloat16 or float32) version of the model",
                )
    if source.shape != leaf.part_shape:
        raise TrilloraError(
            f"{name} has shape {list(source.shape)} in the file, but the model needs {list(leaf.part_shape)}.",
            where=f"{parts[0].file}, tensor {parts[0].name}",
            do="use config.json and weights of the same model",
        )


def _check_equal(name: str, source: Source, alias: str, other: Source) -> None:
    """Checks that two stored copies of tied weights are equal, since only one of them is used."""
    if not (isinstance(source, Stored) and isinstance(other, Stored)) or source == other:
        return
    with opened_tensor(source, torch.float32) as ours, opened_tensor(other, torch.float32) as theirs:
        rows = [(slice(row, row + ROWS_PER_READ),) for row in range(0, source.shape[0], ROWS_PER_READ)]
        same = source.shape == other.shape and all(torch.equal(ours(index), theirs(index)) for index in rows)
    if not same:
        raise TrilloraError(
            f"The config ties {alias} to {name}, but the checkpoint contains two different tensors.",
            where=f"{other.file}, tensor {other.name}",
            do='set "tie_word_embeddings": false in a local copy of config.json',
        )


def _missing(missing: list[str], stored: list[str], folder: Path) -> TrilloraError:
    close = nearest(missing[0], stored)
    return TrilloraError(
        f"The checkpoint lacks {len(missing)} of the model's parameters: {', '.join(missing[:3])}"
        + (" …" if len(missing) > 3 else ""),
        where=str(folder) + (f" (nearest stored name: {close})" if close else ""),
        do="check that the folder contains a complete model that matches config.json, not an adapter",
    )


def _report_unused(unused: list[str], module: torch.nn.Module) -> None:
    # Old checkpoints contain rotary tables. Transformers lists for each model what else may be unused.
    expected = [r"rotary_emb\.inv_freq", *(module._keys_to_ignore_on_load_unexpected or ())]
    surprising = [name for name in unused if not any(re.search(pattern, name) for pattern in expected)]
    if surprising:
        names = ", ".join(surprising[:3])
        logger.warning("%d tensors of the checkpoint are not used by the model: %s", len(surprising), names)


# ---- reading values, slice by slice


@contextmanager
def _open_source(source: Source, module: torch.nn.Module, dtype: np.dtype[Any]) -> Iterator[ReadSlice]:
    """Yields a function that reads any slice of the parameter. The file is mapped only meanwhile, to free its pages."""
    if isinstance(source, Stored):
        with opened_tensor(source, _torch_dtype(dtype)) as read_slice:
            yield read_slice
    elif isinstance(source, Converted):
        # A conversion needs whole tensors, so this one parameter is built in host memory and then sliced.
        def read(part: Stored) -> torch.Tensor:
            with opened_tensor(part, _torch_dtype(dtype)) as read_slice:
                return read_slice(()).to(_torch_dtype(dtype), copy=True)

        yield functools.partial(_cut, convert(source, module, read)[source.target])
    else:
        yield functools.partial(_cut, source.tensor)


def _cut(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    return tensor[index]


def _place(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding, read: ReadSlice) -> jax.Array:
    def host_slice(index: Index | None) -> np.ndarray[Any, Any]:
        piece = read(index or ())
        # A copy even without a cast: the array must not refer to the mapped file, which may change or be removed.
        cast = piece.detach().to(_torch_dtype(dtype), copy=True).contiguous()
        if not piece.is_floating_point() and not torch.equal(cast.to(piece.dtype), piece):
            raise TrilloraError(
                f"{name} contains integers that do not fit {dtype.name}.",
                where=f"tensor of type {piece.dtype}",
                do="run with 64-bit integers (JAX_ENABLE_X64=1), or choose another model",
            )
        return _as_numpy(cast, dtype)

    return jax.make_array_from_callback(shape, sharding, host_slice)


def _as_numpy(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.kind == "V":  # bfloat16 and float8: types of ml_dtypes, which numpy cannot convert
        same_size = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
        return tensor.view(same_size).numpy().view(dtype)
    return tensor.numpy()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def _of_one_layer(sharding: Sharding, leaf: Leaf) -> Sharding:
    """The sharding of one layer of a leaf: without the leading dim if it is a stack."""
    if not leaf.stacked or isinstance(sharding, SingleDeviceSharding):
        return sharding
    assert isinstance(sharding, NamedSharding), f"a stack needs a named sharding, not {type(sharding).__name__}"
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> jax.Array:
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)


def _write(stack: jax.Array, part: jax.Array, layer: int, sharding: Sharding) -> jax.Array:
    """Writes one layer into the stack, in place: the old stack is donated."""
    return jax.jit(_with_layer, donate_argnums=0, out_shardings=sharding)(stack, part, layer)


def _with_layer(stack: jax.Array, part: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
