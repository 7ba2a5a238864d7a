"""Weights are loaded as transformers loads them, from any file layout, on any mesh, with little host memory."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dose import full_dose_only, slow_case
from loaded_weights import TINY, as_float, layout_of, llama, memory_config, meta_model, sharded, whole
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaModel,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from trillora.errors import TrilloraError
from trillora.model.layout import Layout, Leaf, unstack
from trillora.model.loading.weights import load_weights, random_weights

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def mixtral(num_experts: int = 4) -> MixtralConfig:
    return MixtralConfig(**{**TINY, "num_local_experts": num_experts, "num_experts_per_tok": 2})


def save_random(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """Writes a checkpoint of random values, norms included, so that a test notices two swapped norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, **how)
    return model


def assert_equals_transformers(
    folder: Path, tree: dict[str, jax.Array], layout: Layout, dtype: torch.dtype = torch.float32
) -> int:
    """Asserts that every value is bit-equal to `from_pretrained`; returns the number of compared tensors."""
    reference = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    tensors = {**reference.state_dict(), **dict(reference.named_buffers())}
    loaded = unstack(tree, layout)
    for name, array in loaded.items():
        np.testing.assert_array_equal(as_float(array), tensors[name].detach().float().numpy(), err_msg=name)
    return len(loaded)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,  # experts stored one by one, other names
    "mixtral-12": lambda: mixtral(12),  # expert 10 must not sort between 1 and 2
    "qwen3_moe": lambda: Qwen3MoeConfig(**TINY, **EXPERTS, num_experts=8, head_dim=16),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32),
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
    "bloom": lambda: BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128),
}
RARE = ("qwen3_moe", "gpt_neox", "bloom")  # stored like mixtral, llama and gpt2


@pytest.mark.parametrize("name", [slow_case(name) if name in RARE else name for name in CONFIGS])
def test_loaded_weights_equal_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    save_random(config, tmp_path)
    module = meta_model(config)
    for stacked in (False, True):
        layout = layout_of(module, stacked=stacked)
        tree = load_weights(tmp_path, module, layout, sharded(layout))
        assert {key: array.sharding for key, array in tree.items()} == sharded(layout)
        assert assert_equals_transformers(tmp_path, tree, layout) >= 20


def test_mixtral_is_saved_one_tensor_per_expert(tmp_path: Path) -> None:
    """The conversion tests above are useful only if transformers writes the original layout."""
    save_random(mixtral(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.block_sparse_moe.experts.3.w1.weight"].shape == (96, 64)
    assert not any("gate_up_proj" in name for name in stored)


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", slow_case("mixtral")])
def test_casting_rounds_as_transformers_does(
    name: str, stored_dtype: torch.dtype, target_dtype: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]()
    save_random(config, tmp_path, stored_dtype)
    layout = layout_of(meta_model(config), jnp.dtype(target_dtype), stacked=True, drop=("model.rotary_emb.inv_freq",))
    layout.pop("model.rotary_emb.original_inv_freq", None)
    tree = load_weights(tmp_path, meta_model(config), layout, sharded(layout))
    assert {array.dtype for array in tree.values()} == {jnp.dtype(target_dtype)}
    assert_equals_transformers(tmp_path, tree, layout, getattr(torch, target_dtype))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_many_files_equal_one(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    save_random(config, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    layout = layout_of(meta_model(config), stacked=True)
    tree = load_weights(tmp_path, meta_model(config), layout, sharded(layout))
    assert_equals_transformers(tmp_path, tree, layout)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("held", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_load_under_either_name(stored: str, held: str, tmp_path: Path) -> None:
    config = llama(tie_word_embeddings=True)
    save_random(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, stored: embedding}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module = meta_model(config)
    layout = {held: Leaf((held,), False, (128, 64), np.dtype(np.float32))}
    tree = load_weights(tmp_path, module, layout, whole(layout))
    np.testing.assert_array_equal(np.asarray(tree[held]), embedding.numpy())


def test_tied_weights_stored_twice_must_agree(tmp_path: Path) -> None:
    config = llama(tie_word_embeddings=True)
    save_random(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    module = meta_model(config)
    layout = layout_of(module, drop=("lm_head.weight",))
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_weights(tmp_path, module, layout, whole(layout))
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrilloraError) as caught:
        load_weights(tmp_path, module, layout, whole(layout))
    assert "ties lm_head.weight to model.embed_tokens.weight" in caught.value.what
    assert "model.safetensors" in (caught.value.where or "")
    assert "tie_word_embeddings" in caught.value.do


def test_checkpoint_of_the_bare_body_loads(tmp_path: Path) -> None:
    """A LlamaModel saves `layers.0…`; the causal LM has `model.layers.0…`."""
    config = llama(tie_word_embeddings=True)
    body = LlamaModel(config)
    body.save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    layout = layout_of(meta_model(config), stacked=True)
    tree = load_weights(tmp_path, meta_model(config), layout, whole(layout))
    assert_equals_transformers(tmp_path, tree, layout)


def test_buffers_come_from_the_checkpoint_or_the_module(tmp_path: Path) -> None:
    config = llama()
    save_random(config, tmp_path)
    module = meta_model(config)
    module.register_buffer("stored_scale", torch.tensor(1.0))
    module.register_buffer("computed_scale", torch.tensor(3.0))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["stored_scale"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layout = layout_of(module)
    tree = load_weights(tmp_path, module, layout, sharded(layout))
    assert (float(tree["stored_scale"]), float(tree["computed_scale"])) == (2.0, 3.0)
    np.testing.assert_array_equal(tree["model.rotary_emb.inv_freq"], module.model.rotary_emb.inv_freq.numpy())


def test_unused_tensors_are_counted_and_rotary_tables_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = llama()
    save_random(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layout = layout_of(meta_model(config))
    with caplog.at_level(logging.WARNING):
        load_weights(tmp_path, meta_model(config), layout, whole(layout))
        assert caplog.records == []
        save_file({**tensors, "value_head.weight": torch.ones(8)}, tmp_path / "model.safetensors")
        load_weights(tmp_path, meta_model(config), layout, whole(layout))
    assert [record.getMessage() for record in caplog.records] == [
        "1 tensors of the checkpoint are not used by the model: value_head.weight"
    ]


def test_each_process_reads_only_its_own_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trillora.model.loading import weights

    config = llama()
    save_random(config, tmp_path)
    key = "model.embed_tokens.weight"
    layout = {key: layout_of(meta_model(config))[key]}
    read: list[tuple[int, ...]] = []
    as_numpy = weights._as_numpy

    def recorded(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        read.append(tuple(tensor.shape))
        return as_numpy(tensor, dtype)

    monkeypatch.setattr(weights, "_as_numpy", recorded)
    load_weights(tmp_path, meta_model(config), layout, sharded(layout))
    assert read == [(32, 64)] * 8  # a quarter of 128 rows for each device, never the whole matrix


def test_stacks_compile_once_per_shape(tmp_path: Path) -> None:
    # No other test has these sizes, so nothing is compiled yet. Clearing jax's caches would take seconds.
    config = llama(num_hidden_layers=5, hidden_size=88, intermediate_size=104)
    save_random(config, tmp_path)
    module = meta_model(config)
    layout = {key: leaf for key, leaf in layout_of(module, stacked=True).items() if leaf.stacked}
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        load_weights(tmp_path, module, layout, sharded(layout))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    num_shapes = len({(leaf.shape, sharded(layout)[key]) for key, leaf in layout.items()})
    assert 0 < len(compiled) <= 2 * num_shapes  # one creates the zeros, one writes a layer
    assert len(layout) > num_shapes


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    config = llama()
    save_random(config, tmp_path)
    layout = layout_of(meta_model(config), stacked=True)
    reported: list[Any] = []
    load_weights(tmp_path, meta_model(config), layout, whole(layout), reported.append)
    total = sum(leaf.num_bytes for leaf in layout.values())
    assert {(event.label, event.total, event.unit) for event in reported} == {("Loading weights", total, "bytes")}
    done = [event.done for event in reported]
    assert done == sorted(done) and done[-1] == total and len(done) > 10


# ---- damaged and unsuitable checkpoints


def refusal(folder: Path, config: PreTrainedConfig, layout: Layout | None = None) -> TrilloraError:
    module = meta_model(config)
    layout = layout or layout_of(module)
    with pytest.raises(TrilloraError) as caught:
        load_weights(folder, module, layout, whole(layout))
    return caught.value


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_random(llama(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = refusal(tmp_path, llama())
    assert error.what == "The checkpoint lacks 1 of the model's parameters: model.norm.weight"
    assert str(tmp_path) in (error.where or "")
    assert "model.final_norm.weight" in (error.where or "")
    assert "complete model" in error.do


def test_missing_expert_is_an_error(tmp_path: Path) -> None:
    save_random(mixtral(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = refusal(tmp_path, mixtral())
    assert "[3, 64, 96] in the file, but the model needs [4, 64, 96]" in error.what
    assert "model.layers.1" in (error.where or "")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]  # now its w3 has no partner
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = refusal(tmp_path, mixtral())
    assert "cannot be combined into model.layers.1.mlp.experts.gate_up_proj" in error.what
    assert "number of experts" in error.do


def test_wrong_shape_names_both_shapes_and_the_file(tmp_path: Path) -> None:
    save_random(llama(vocab_size=64), tmp_path)
    error = refusal(tmp_path, llama(vocab_size=128))
    assert error.what == "model.embed_tokens.weight has shape [64, 64] in the file, but the model needs [128, 64]."
    assert error.where == f"{tmp_path / 'model.safetensors'}, tensor model.embed_tokens.weight"
    assert "config.json" in error.do


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_random(llama(), tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    error = refusal(tmp_path, llama())
    assert lost.name in error.what
    assert error.where == str(tmp_path / "model.safetensors.index.json")
    assert "download" in error.do


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty"])
def test_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    save_random(llama(), tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    damaged = {"truncated": content[:-100], "overwritten": b"<html>error 502</html>" + content[22:], "empty": b""}
    file.write_bytes(damaged[damage])
    error = refusal(tmp_path, llama())
    assert error.what.startswith("This weight file is damaged or incomplete")
    assert error.where == f"{file} ({len(damaged[damage])} bytes)"
    assert "download it again" in error.do


@pytest.mark.parametrize("stored_dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantized_weights_are_refused(stored_dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(llama(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(stored_dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = refusal(tmp_path, llama())
    assert error.what.startswith(f"{name} is stored as")
    assert error.where == str(tmp_path / "model.safetensors")
    assert "unquantized" in error.do


def test_integers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = llama()
    save_random(config, tmp_path)
    module = meta_model(config)
    module.register_buffer("multipliers", torch.tensor([1, 2**40]))
    layout = layout_of(module)
    with pytest.raises(TrilloraError) as caught:
        load_weights(tmp_path, module, layout, whole(layout))
    assert caught.value.what == "multipliers contains integers that do not fit int32."
    assert "int64" in (caught.value.where or "")
    assert "64-bit" in caught.value.do


# ---- random weights


def test_random_weights_fill_the_same_tree(tmp_path: Path) -> None:
    config = llama(attention_bias=True)
    module = meta_model(config)
    layout = layout_of(module, jnp.bfloat16, stacked=True)
    tree = random_weights(module, layout, sharded(layout), seed=3)
    assert {key: (array.shape, array.dtype) for key, array in tree.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in layout.items()
    }
    assert {key: array.sharding for key, array in tree.items()} == sharded(layout)
    up = as_float(tree["model.layers.0:3:1.mlp.up_proj.weight"])
    # 3 * 96 * 64 samples: the standard error of their deviation is 0.5 %; 3 % is six of these
    assert up.std() == pytest.approx(0.02, rel=0.03)
    assert not np.array_equal(up[0], up[1])
    assert not np.array_equal(up, as_float(tree["model.layers.0:3:1.mlp.gate_proj.weight"]))
    assert (as_float(tree["model.norm.weight"]) == 1).all()
    assert (as_float(tree["model.layers.0:3:1.self_attn.q_proj.bias"]) == 0).all()
    computed = module.model.rotary_emb.inv_freq.to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(as_float(tree["model.rotary_emb.inv_freq"]), computed)
    again = random_weights(module, layout, whole(layout), seed=3)
    np.testing.assert_array_equal(as_float(again["lm_head.weight"]), as_float(tree["lm_head.weight"]))


# ---- memory, measured in a separate process

MEASURE = """
import json, os, re, sys, threading, time
sys.path[:0] = json.loads(sys.argv[2])
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, torch
import loaded_weights as t
from trillora.model.loading.weights import load_weights

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

config = t.memory_config()
module = t.meta_model(config, torch.bfloat16)
layout = t.layout_of(module, jnp.bfloat16, stacked=True)
shardings = t.sharded(layout)
tiny = {"model.norm.weight": layout["model.norm.weight"]}
load_weights(Path(sys.argv[1]), module, tiny, shardings)  # the memory that jax and safetensors need anyway
peak, running = 0, True
def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.001)
baseline = resident()
watcher = threading.Thread(target=watch); watcher.start()
tree = load_weights(Path(sys.argv[1]), module, layout, shardings)
running = False; watcher.join()
held = sum(shard.data.nbytes for array in tree.values() for shard in array.addressable_shards)
print(json.dumps({"peak": peak - baseline, "held": held}))
"""


@full_dose_only
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_host_memory_is_little_more_than_the_devices_need(tmp_path: Path) -> None:
    shapes = {name: tuple(p.shape) for name, p in meta_model(memory_config()).named_parameters()}
    values = torch.randn(max(math.prod(shape) for shape in shapes.values())).to(torch.bfloat16)
    tensors = {name: values[: math.prod(shape)].reshape(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    memory_config().save_pretrained(tmp_path)
    largest = max(tensor.nbytes for tensor in tensors.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 300e6
    tests = Path(__file__).resolve().parents[1]
    paths = json.dumps([str(tests / "support"), str(tests.parent / "src")])
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), paths]
    # With XLA's optimizations: copying 600 MB takes longer than compiling the copies.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["held"] >= 2 * total * 0.99  # replicated over `data`, so the virtual devices hold two copies
    # Beyond the arrays, in largest tensors: its pages in the mapped file (1), its slices on the host while they are
    # sent, once per copy (2), what the allocator keeps of the tensor before (2), library code touched meanwhile (1).
    # Measured: 3.3. Keeping the whole checkpoint in memory measured 10, stacks written without donation 14.
    assert measured["peak"] <= measured["held"] + 6 * largest
