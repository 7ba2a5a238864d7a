"""The golden model: a small Llama whose numbers are known, trained for a few steps with the real training step.

    run = train_golden(jax.devices(), "bfloat16", listener)
    run.losses, run.gradients["model.layers.0.self_attn.q_proj.lora_a"]

It is built to go through what a real run goes through: weights from a safetensors file, layers in a scan, the chip's
attention kernel with heads of 128 and three blocks of 128 tokens in each direction, packed documents, micro-batches, a
chunked loss, LoRA on seven layers, AdamW; on several devices the base is split over them.

Weights, adapter and batch are the same on every machine. They come from whole numbers of a generator that numpy has
frozen, times powers of two, so that bfloat16 holds them exactly: two number formats differ only in their arithmetic.
The batch of another number of devices repeats its rows, which changes neither loss nor gradients: both are means over
all tokens.

Gradients are read from the optimizer. After the first step, AdamW's mean is a tenth of the first gradient, so the
program that is checked is the program that trains.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trillora.data.pack import fill_row
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.devices.chips import generation_of
from trillora.devices.mesh import gather, local_rows, put_batch
from trillora.engine.step import initial_state
from trillora.events import Listener, Progress
from trillora.files.digests import text_digest
from trillora.model.layout import Layout, stack, unstack
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import Dtype, StageRecipe, stages_of
from trillora.step.autotune import Plan, choose, compile_step
from trillora.step.build import Assembly
from trillora.step.compiler_options import WITH_CUBLAS

NUM_STEPS = 3
BATCH_SIZE, SEQUENCE_LENGTH, VOCABULARY = 8, 384, 512
LEARNING_RATE = 4e-3
MEAN_SHARE = 1 - 0.9  # of the newest gradient in AdamW's mean
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGEST = 127  # whole numbers up to this have seven bits, which bfloat16 holds exactly
SPREAD = 73.3  # standard deviation of the whole numbers from -LARGEST to LARGEST

Gradients = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class GoldenRun:
    """What a training of the golden model gave."""

    losses: tuple[float, ...]  # of each step
    gradients: Gradients  # of the first step, by parameter
    inputs: str  # digest of the adapter and the batch
    how: str  # the settings that differ between chips


def golden_dtypes(device: Any) -> tuple[Dtype, ...]:
    """The number formats to prove: bfloat16 where a run would use it, and float32 everywhere."""
    has_bfloat16 = device.platform == "tpu" or (device.platform == "gpu" and generation_of(device).has_bfloat16)
    return ("bfloat16", "float32") if has_bfloat16 else ("float32",)


def train_golden(devices: list[Any], dtype: Dtype, listener: Listener, num_steps: int = NUM_STEPS) -> GoldenRun:
    """Trains the golden model on these devices."""
    label = f"Training the golden model in {dtype}"
    listener(Progress(label, 0, num_steps + 1))
    # A TPU multiplies float32 numbers in bfloat16 by default, and a GPU in TF32.
    exact = jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="trillora-golden-") as name, exact:
        folder = Path(name)
        recipe, plan = _recipe(folder, dtype, len(devices)), golden_plan(devices, dtype)
        assembly = plan.assembly
        base = _base(folder, assembly)
        adapter, batch = golden_adapter(assembly.model.adapter_layout), golden_batch()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, assembly.state_shapes)
        begin = functools.partial(initial_state, optimizer=assembly.optimizer, seed=0)
        state = jax.jit(begin, out_shardings=shardings)(stack(adapter, assembly.model.adapter_layout))
        placed = _placed(batch, recipe.train.batch_size, assembly.mesh)
        losses, gradients = [], {}
        for step in range(num_steps):
            listener(Progress(label, step + 1, num_steps + 1))
            state, metrics = plan.compiled(state, base, placed)
            losses.append(float(metrics.loss))
            if step == 0:
                gradients = unstack(gather(dict(state.optimizer.mu), assembly.mesh), assembly.model.adapter_layout)
        listener(Progress(label, num_steps + 1, num_steps + 1))
    settings = plan.settings
    return GoldenRun(
        losses=tuple(losses),
        gradients={name: np.asarray(mean / MEAN_SHARE, np.float32) for name, mean in sorted(gradients.items())},
        inputs=_digest({**adapter, **batch}),
        how=f"{settings.attention} attention, {settings.kernels} kernels, layers {settings.layers}, "
        f"mesh {_mesh_text(assembly)}",
    )


def golden_plan(devices: list[Any], dtype: Dtype) -> Plan:
    """The compiled step. The devices need not be attached."""
    with tempfile.TemporaryDirectory(prefix="trillora-golden-") as name:
        (Path(name) / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float32"}), "utf-8")
        recipe = _recipe(Path(name), dtype, len(devices))
        # XLA for GPUs would try many kernels of its own for each exact matmul: 8 minutes of CPU time. cuBLAS is what
        # runs with fused kernels use.
        compiler = functools.partial(compile_step, options=WITH_CUBLAS if devices[0].platform == "gpu" else None)
        return choose(recipe, load_config(Path(name)), devices, NUM_STEPS, lambda event: None, compiler=compiler)


def _recipe(folder: Path, dtype: Dtype, num_devices: int) -> StageRecipe:
    """The recipe of the golden run. Attention and layers are left to the choice that a real run makes, except that the
    exact run scans its layers on every chip."""
    num_rows = math.lcm(BATCH_SIZE, num_devices)
    has_halves = num_rows // num_devices % 2 == 0
    recipe = load_recipe(
        {
            "model": {"name": str(folder), "dtype": dtype},
            "data": {"path": str(folder / "not-read.jsonl"), "pack": True},
            "lora": {"rank": 8, "alpha": 16},
            "train": {
                "batch_size": num_rows,
                "micro_batch_size": num_rows // 2 if has_halves else num_rows,
                "sequence_length": SEQUENCE_LENGTH,
                "steps": NUM_STEPS,
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "max_grad_norm": 1e9,  # clipping would hide a wrong size
            },
            "hardware": {"mesh": {"fsdp": num_devices}},
            "engine": {
                "remat": "linear",
                "loss_chunk": 1024,
                "layers": "scan" if dtype == "float32" else "auto",
            },
        }
    )
    return stages_of(recipe)[0].recipe


def _placed(batch: dict[str, np.ndarray], num_rows: int, mesh: Mesh) -> dict[str, jax.Array]:
    """The batch on the devices, repeated up to this many rows."""
    rows = [row % BATCH_SIZE for row in local_rows(num_rows, mesh)]
    return put_batch({name: array[rows] for name, array in batch.items()}, mesh, num_rows)


def _base(folder: Path, assembly: Assembly) -> dict[str, jax.Array]:
    """The golden weights, through a file and the real loader."""
    shapes = {name: parameter.shape for name, parameter in assembly.model.module.named_parameters()}
    weights = {name: golden_weight(name, tuple(shape)) for name, shape in shapes.items() if "lora" not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = assembly.model
    return load_weights(folder, model.module, model.layout, assembly.base_shardings)


def golden_weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms are between one and two. Matrices keep the size of what passes through them, so that attention is neither
    uniform nor on one token."""
    random = np.random.RandomState(zlib.crc32(name.encode()))  # its numbers never change between versions of numpy
    if len(shape) == 1:
        return (random.randint(64, LARGEST + 1, shape) / 64).astype(np.float32)
    spread = 1.0 if "embed_tokens" in name else 1 / math.sqrt(shape[-1])
    return _whole_numbers(random, shape, spread)


def golden_adapter(layout: Layout) -> Gradients:
    """Neither A nor B is zero, so both have a gradient at the first step."""
    adapter: Gradients = {}
    for leaf in layout.values():
        for name in leaf.names:
            random = np.random.RandomState(zlib.crc32(name.encode()))
            spread = 1 / math.sqrt(leaf.part_shape[-1]) if leaf.part_shape[0] == 8 else 0.02
            adapter[name] = _whole_numbers(random, leaf.part_shape, spread)
    return adapter


def _whole_numbers(random: np.random.RandomState, shape: tuple[int, ...], spread: float) -> NDArray[np.float32]:
    """Whole numbers times the power of two that brings them closest to this standard deviation."""
    power = 2.0 ** round(math.log2(spread / SPREAD))
    return (random.randint(-LARGEST, LARGEST + 1, shape) * power).astype(np.float32)


def golden_batch() -> dict[str, np.ndarray]:
    """Packed sequences of one to four documents and some padding. The second half of each document is trained."""
    random = np.random.RandomState(16)
    batch: dict[str, np.ndarray] = {
        name: np.zeros((BATCH_SIZE, SEQUENCE_LENGTH), dtype)
        for name, dtype in (
            ("tokens", np.int32),
            ("targets", np.int32),
            ("weights", np.float32),
            ("segments", np.int32),
            ("positions", np.int32),
        )
    }
    for row in range(BATCH_SIZE):
        num_documents = 1 + row % 4
        longest = SEQUENCE_LENGTH // num_documents
        lengths = random.randint(longest // 2, longest + 1, num_documents)
        documents = [
            TokenizedDocument(random.randint(3, VOCABULARY, length).astype(np.int32), np.arange(length) >= length // 2)
            for length in lengths.tolist()
        ]
        fill_row(documents, {name: array[row] for name, array in batch.items()})
    return batch


def _digest(arrays: Mapping[str, object]) -> str:
    """Of adapter and batch, so that a record is compared only with a run of the same inputs."""
    checksums = {name: zlib.crc32(np.ascontiguousarray(array).tobytes()) for name, array in sorted(arrays.items())}
    return text_digest(json.dumps([CONFIG, checksums], sort_keys=True))


def _mesh_text(assembly: Assembly) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in assembly.mesh.shape.items())
