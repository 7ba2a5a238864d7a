"""PEFT uses every matrix of our files, although it converts names as transformers converts old checkpoints' names."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from architecture_checks import LOGITS, distance
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from safetensors.numpy import load_file

from trillora.adapters.inputs import read_input
from trillora.adapters.merge import merge_adapters
from trillora.certify.certify import uses_all_arrays
from trillora.certify.readers import Reading, read_with_peft
from trillora.errors import TrilloraError
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_files, load_adapter, peft_files, read_head
from trillora.model.bridge import CausalLM
from trillora.model.lora_spec import LoraSpec
from trillora.model.parts.peft_names import names_in_file, with_layers
from trillora.recipe.group_section import MergeOptions

# Checkpoints of all of them store experts one by one, under the names of linear layers. PEFT renames laguna's too.
SLOW = ("glm4_moe", "qwen3_next", "qwen3_moe", "mixtral", "dots1", "hunyuan_v1_moe", "nemotron_h_mixture", "olmoe")
FAMILIES = ("ernie4_5_moe", "laguna", *map(slow_case, ("deepseek_v3", *SLOW)))
LAYERS = 2  # the second of them is a mixture
LORA = LoraSpec(rank=2, alpha=4, targets="all-linear")
OTHER = LoraSpec(rank=3, alpha=4, rslora=True, targets="all-linear")
PROMPTS = [[5, 7, 11, 13, 17, 19, 23], [29, 31, 37, 41]]


def write_model(folder: Path, name: str) -> Path:
    tiny_models.build(name, num_layers=LAYERS).save_pretrained(folder)
    chat_tokenizer("chatml").save_pretrained(folder)
    return folder


def write_adapter(
    folder: Path, name: str, spec: LoraSpec, base: str, seed: int = 0, without: int | None = None
) -> dict[str, np.ndarray]:
    """Random matrices. `without` leaves out every third layer, from this one on."""
    model = CausalLM(tiny_models.configuration(name, LAYERS), lora=spec)
    if without is not None:
        spec = dataclasses.replace(spec, exclude=tuple(model.targets[without::3]))
        model = model.with_lora(spec)
    generator = np.random.default_rng(seed)
    shapes = sorted((name, leaf.part_shape) for leaf in model.adapter_layout.values() for name in leaf.names)
    adapter = {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes}
    folder.mkdir()
    for file, data in adapter_files(adapter, model.module, model.targets, spec, base).items():
        (folder / file).write_bytes(data)
    return adapter


def expected_logprobs(name: str, adapter: Path) -> list[np.ndarray]:
    """Of plain PyTorch: the changes are added to the weights."""
    model = tiny_models.build(name, num_layers=LAYERS)
    with torch.no_grad():
        for layer, change in read_input(adapter).changes.items():
            model.get_submodule(layer).weight += torch.tensor(change.matrix())
        logits = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in PROMPTS]
    return [torch.log_softmax(each, dim=-1).numpy() for each in logits]


def far(reading: Reading, expected: list[np.ndarray]) -> float:
    return max(distance(found, each) for found, each in zip(reading.logprobs, expected, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_uses_every_matrix_of_a_merged_adapter(name: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", name)
    for method, named in (("cat", "some/base"), ("ties", "some/base"), ("svd", str(base))):
        inputs, merged = [tmp_path / f"{method}-{seed}" for seed in range(2)], tmp_path / method
        for seed, folder in enumerate(inputs):  # in the last two, each has layers that the other does not have
            without = None if method == "cat" else seed
            write_adapter(folder, name, (LORA, OTHER)[seed], named, seed, without)
        merge_adapters(inputs, MergeOptions(method), merged, with_logits=False)
        reading = read_with_peft(base, merged, PROMPTS)
        assert reading.lost == () and reading.num_arrays == len(load_file(merged / WEIGHTS_FILE))
        assert far(reading, expected_logprobs(name, merged)) < LOGITS


def test_certify_notices_matrices_that_peft_leaves_out(tmp_path: Path) -> None:
    """The control of the test above: with the names of the layers in `target_modules`, PEFT ignores them."""
    base, adapter = write_model(tmp_path / "base", "ernie4_5_moe"), tmp_path / "adapter"
    arrays = write_adapter(adapter, "ernie4_5_moe", LORA, "some/base")
    reading = read_with_peft(base, adapter, PROMPTS)
    (check,) = uses_all_arrays("PEFT", reading)
    assert check.status == "ok" and far(reading, expected_logprobs("ernie4_5_moe", adapter)) < LOGITS
    config = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))
    names = config.pop("target_parameters")
    config["target_modules"] += [name.removesuffix(".weight") for name in names]
    (adapter / CONFIG_FILE).write_text(json.dumps(config), "utf-8")
    reading = read_with_peft(base, adapter, PROMPTS)
    assert {*reading.lost} == {name for name in arrays if name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")}
    (check,) = uses_all_arrays("PEFT", reading)
    assert check.status == "failed" and check.figure == len(reading.lost) and reading.lost[0] in check.what
    assert far(reading, expected_logprobs("ernie4_5_moe", adapter)) > 100 * LOGITS


def test_a_layer_that_peft_renames_has_the_name_of_the_checkpoint_in_the_file(tmp_path: Path) -> None:
    arrays = write_adapter(tmp_path / "adapter", "laguna", LORA, "some/base")
    ours = "model.layers.1.mlp.shared_experts.up_proj.lora_a"
    stored = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    theirs = stored["base_model.model.model.layers.1.mlp.shared_expert.up_proj.lora_A.weight"]
    assert theirs.tobytes() == arrays[ours].tobytes() and not any(".shared_experts." in name for name in stored)
    spec, loaded = load_adapter(tmp_path / "adapter")
    assert loaded.keys() == arrays.keys() and all(loaded[name].tobytes() == arrays[name].tobytes() for name in arrays)
    assert spec.targets == tuple(sorted({name.rpartition(".")[0] for name in arrays}))
    assert read_head(tmp_path / "adapter").shapes == {name: array.shape for name, array in arrays.items()}
    write_adapter(tmp_path / "again", "laguna", LORA, "some/base")
    files = [(tmp_path / name / WEIGHTS_FILE).read_bytes() for name in ("adapter", "again")]
    assert files[0] == files[1]


def test_peft_uses_laguna_and_so_does_transformers(tmp_path: Path) -> None:
    base, adapter = write_model(tmp_path / "base", "laguna"), tmp_path / "adapter"
    arrays = write_adapter(adapter, "laguna", LORA, "some/base")
    reading, expected = read_with_peft(base, adapter, PROMPTS), expected_logprobs("laguna", adapter)
    assert reading.lost == () and far(reading, expected) < LOGITS
    model: Any = tiny_models.build("laguna", num_layers=LAYERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # patterns of ranks that match no module
        model.load_adapter(str(adapter))
    held = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(held) == len(arrays)
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in PROMPTS]
    assert far(Reading([torch.log_softmax(each, dim=-1).numpy() for each in found]), expected) < LOGITS


def test_layers_without_rules_keep_their_names() -> None:
    model = CausalLM(tiny_models.configuration("llama", LAYERS), lora=LORA)
    assert names_in_file(model.module, model.targets) == {}
    assert with_layers(b"anything", {}) == b"anything"


@pytest.mark.parametrize("layers", [{"q": "k"}, {"q": "v", "k": "v"}, ["q"], {"q": 1}])
def test_metadata_that_do_not_fit_are_refused(layers: Any, tmp_path: Path) -> None:
    """Two matrices of the same layer; two names of a layer; not names."""
    arrays = {f"{layer}.{kind}": np.ones((2, 2), np.float32) for layer in "qk" for kind in ("lora_a", "lora_b")}
    files = peft_files(arrays, {"peft_type": "LORA", "r": 2, "lora_alpha": 2}, {"x": "y"})
    old = json.dumps(json.dumps({"y": "x"})).encode()
    new = json.dumps(json.dumps(layers)).encode()
    data = files[WEIGHTS_FILE]
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(old, new)
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    (tmp_path / CONFIG_FILE).write_bytes(files[CONFIG_FILE])
    for read in (load_adapter, read_head):
        with pytest.raises(TrilloraError) as caught:
            read(tmp_path)
        assert caught.value.do
