"""LoRA of experts equals PyTorch with PEFT, in logits and gradients, and its files are PEFT's `target_parameters`."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
from architecture_checks import (
    GRADIENTS,
    LOGITS,
    base_weights,
    distance,
    gradient_distance,
    logits_and_gradients,
    peft_logits_and_gradients,
    read_by_peft,
)
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from transformers import AutoModelForCausalLM

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.mixture import experts as engine_experts
from trillora.errors import TrilloraError
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_files, fit_adapter, load_adapter
from trillora.model.bridge import CausalLM, build_module
from trillora.model.layout import unstack
from trillora.model.lora_spec import LoraSpec, adapted_layers, select_targets
from trillora.model.parts.expert_parameters import by_expert, expert_parameters
from trillora.recipe.lora import LoraSection
from trillora.report.event_text import adapted_lines
from trillora.step.adapted_share import adapted_share
from trillora.step.adapter_spec import check_layers

SPEC = LoraSpec(rank=3, alpha=6, targets=("all-linear", "experts"))
TOKENS = np.random.default_rng(0).integers(3, tiny_models.VOCABULARY, (2, 12)).astype(np.int32)
# Expert weights as [E, outputs, inputs] after a dense layer with a shared expert; as [E, inputs, outputs] with biases,
# gate and up interleaved; without a gate; computed by the model's own code.
FAMILIES = ["deepseek_v3", "gpt_oss"]
MORE = [
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "glm4_moe",
    "nemotron_h_mixture",
    "llama4_text",
    "granitemoe",
    "aria_text",
    "ernie4_5_moe",
]
LAYERS = {"deepseek_v3": 2, "gpt_oss": 2, "mixtral": 2, "qwen3_moe": 2}  # fewer than the tiny models have


def original(name: str) -> Any:
    return tiny_models.build(name, num_layers=LAYERS.get(name))


@functools.cache
def ours(name: str, spec: LoraSpec = SPEC) -> CausalLM:
    return CausalLM(tiny_models.configuration(name, LAYERS.get(name)), lora=spec)


def random_adapter(model: CausalLM) -> dict[str, np.ndarray]:
    """By parameter name."""
    generator = np.random.default_rng(1)
    names = sorted((name, leaf.part_shape) for leaf in model.adapter_layout.values() for name in leaf.names)
    return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in names}


def write(folder: Path, model: CausalLM, adapter: dict[str, np.ndarray]) -> dict[str, bytes]:
    files = adapter_files(adapter, model.module, model.targets, SPEC, "some/base")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


@pytest.mark.parametrize("name", [*FAMILIES, *(slow_case(name) for name in MORE)])
def test_logits_and_gradients_equal_those_of_peft(name: str, tmp_path: Path) -> None:
    model = ours(name)
    adapter = random_adapter(model)
    files = write(tmp_path, model, adapter)
    expected, gradients = peft_logits_and_gradients(read_by_peft(original(name), files), TOKENS)
    base, stacked = base_weights(model, original(name)), fit_adapter(adapter, model.adapter_layout, "here")
    logits, own = logits_and_gradients(model, base, stacked, TOKENS)
    assert distance(logits, expected) <= LOGITS
    assert gradient_distance(unstack(own, model.adapter_layout), gradients) <= GRADIENTS
    of_experts = {key: value for key, value in gradients.items() if ".experts." in key and "shared" not in key}
    assert of_experts and all(value.any() for value in of_experts.values())
    spec, loaded = load_adapter(tmp_path)
    assert ours(name, spec).targets == model.targets
    assert {key: array.tobytes() for key, array in loaded.items()} == {key: a.tobytes() for key, a in adapter.items()}


def test_we_load_experts_that_peft_trained(tmp_path: Path) -> None:
    """PEFT targets some parameters only, with ranks of their own."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
        rank_pattern={"experts.down_proj": 3},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(original("qwen3_moe"), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, 0, 0.2)
        model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()
    spec, adapter = load_adapter(tmp_path)
    own = CausalLM(tiny_models.configuration("qwen3_moe", 2), lora=spec)
    fitted = fit_adapter(adapter, own.adapter_layout, "here")
    base = base_weights(own, original("qwen3_moe"))
    logits = jax.jit(own.logits)(base, fitted, {"tokens": jnp.asarray(TOKENS)})
    assert distance(logits, expected) <= LOGITS


def test_a_file_that_names_other_parameters_than_it_has_is_refused(tmp_path: Path) -> None:
    model = ours("mixtral")
    write(tmp_path, model, random_adapter(model))
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    for parameters, what in ((["experts.down_proj"], "for each of the target_parameters"), ([], "matrices of rank 3")):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "target_parameters": parameters}), "utf-8")
        with pytest.raises(TrilloraError, match=what):
            load_adapter(tmp_path)


def test_a_dense_model_has_no_experts_to_adapt() -> None:
    for target in ("experts", "mlp.experts.gate_up_proj"):
        with pytest.raises(TrilloraError, match="LlamaForCausalLM has no experts") as caught:
            CausalLM(tiny_models.configuration("llama"), lora=LoraSpec(targets=("q_proj", target)))
        assert caught.value.where == "lora.targets[1]" and "all-linear" in caught.value.do


@pytest.mark.parametrize("option", [{"dora": True}, {"dropout": 0.1}, {"init": "pissa"}])
def test_what_peft_cannot_load_for_experts_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(TrilloraError, match=f"plain LoRA only, without lora.{next(iter(option))}"):
        CausalLM(tiny_models.configuration("mixtral"), lora=LoraSpec(targets=("experts",), **option))


def test_patterns_select_experts_if_they_say_so_or_match_nothing_else() -> None:
    module = build_module(tiny_models.configuration("deepseek_v3"), "float32")
    experts = list(expert_parameters(module))
    linear = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.shared_experts.down_proj"]
    assert len(experts) == 6 and experts[0] == "model.layers.1.mlp.experts.gate_up_proj"

    def chosen(*targets: str) -> list[str]:
        return select_targets(module, linear, targets, experts=experts)

    assert chosen("down_proj") == linear
    assert chosen("experts.down_proj") == [name for name in experts if name.endswith("down_proj")]
    assert chosen("gate_up_proj") == [name for name in experts if name.endswith("gate_up_proj")]
    assert chosen("experts") == experts
    assert chosen("*.layers.1.*") == linear[1:]
    assert chosen("*.layers.1.*experts*") == [linear[1], *experts[:2]]
    spec = LoraSpec(targets=("down_proj", "experts"), exclude=("*.layers.1.*",))
    assert list(adapted_layers(module, linear, spec, experts)) == [linear[0], *experts[2:]]


@pytest.mark.parametrize(("name", "router"), [("afmoe", "mlp.router.gate"), ("gemma4_text_mixture", "router.proj")])
def test_a_router_that_is_a_linear_layer_is_adapted_only_by_name(name: str, router: str) -> None:
    def adapted(*targets: str) -> set[bool]:
        model = CausalLM(tiny_models.configuration(name), lora=LoraSpec(targets=targets))
        return {target.endswith(f".{router}") for target in model.targets}

    assert adapted("all-linear", "experts") == {False} and adapted(router) == {True}


def test_layers_that_peft_refuses_are_adapted_only_by_name() -> None:
    """PEFT raises for out_proj of Mamba layers: an adapter with it could not be loaded."""
    config = tiny_models.configuration("nemotron_h_mixture")
    model = CausalLM(config, lora=LoraSpec(targets="all-linear"))
    assert model.targets and not [target for target in model.targets if target.endswith(".out_proj")]
    named = LoraSpec(targets=("out_proj",))
    with pytest.raises(TrilloraError, match="PEFT could not load an adapter of ") as caught:
        check_layers(LoraSection(), named, CausalLM(config, lora=named))
    assert caught.value.where == "lora.targets" and "remove out_proj" in caught.value.do


def test_the_router_stays_frozen_and_the_file_names_parameters(tmp_path: Path) -> None:
    model = ours("deepseek_v3")
    assert not [name for name in model.targets if name.endswith("mlp.gate")]
    write(tmp_path, model, random_adapter(model))
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    assert {"experts.gate_up_proj", "experts.down_proj", "gate_proj.weight"} < {*config["target_parameters"]}
    assert (tmp_path / WEIGHTS_FILE).is_file()


def test_a_run_says_what_share_is_adapted_and_how_to_adapt_the_rest() -> None:
    config = tiny_models.configuration("deepseek_v3", 2)
    share = adapted_share(CausalLM(config, lora=LoraSpec(rank=4)))
    assert share.linear.num_frozen == 0 and share.experts.num_adapted == 0 and share.experts.num_frozen == 2
    assert share.experts.frozen == 4 * 32 * 64 * 3  # experts, width of an expert, width, projections
    first, second = adapted_lines(share)
    assert f"{share.linear.num_adapted} of {share.linear.num_adapted} linear layers and 0 of 2 weights of exp" in first
    assert "Frozen: 2 weights of 4 experts each" in second and "lora.targets: [all-linear, experts]" in second
    share = adapted_share(ours("deepseek_v3"))
    assert share.experts.frozen == 0 and len(adapted_lines(share)) == 1
    share = adapted_share(CausalLM(config, lora=LoraSpec(targets=("o_proj",))))
    assert "o_proj" not in share.frozen_names and "gate_proj" in share.frozen_names and len(adapted_lines(share)) == 3


def saved(folder: Path, name: str) -> Any:
    """The original model, saved with a tokenizer, and next to it a random adapter of its experts."""
    whole = original(name)
    whole.save_pretrained(folder / "model")
    chat_tokenizer("chatml").save_pretrained(folder / "model")
    model = ours(name)
    (folder / "adapter").mkdir()
    files = adapter_files(random_adapter(model), model.module, model.targets, SPEC, str(folder / "model"))
    for file, data in files.items():
        (folder / "adapter" / file).write_bytes(data)
    return peft_logits_and_gradients(read_by_peft(whole, files), TOKENS)[0]


@pytest.mark.parametrize("name", [*FAMILIES, *(slow_case(name) for name in MORE)])
def test_experts_are_merged_into_the_files(name: str, tmp_path: Path) -> None:
    """Stored in one tensor (gpt_oss), or one by one."""
    expected = saved(tmp_path, name)
    export_merged(open_source(str(tmp_path / "adapter")), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = merged.eval()(input_ids=torch.tensor(TOKENS, dtype=torch.int64), use_cache=False).logits.numpy()
    assert distance(logits, expected) <= LOGITS
    base = expert_parameters(original(name))
    for name, parameter in expert_parameters(merged).items():
        assert not torch.equal(*(each.module._parameters[each.name] for each in (parameter, base[name])))


def test_matrices_of_each_expert_in_the_order_of_the_file() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(4 * 3, 5)), generator.normal(size=(6, 3 * 4))
    a_ERI, b_ERO = by_expert(a, b, 4)
    assert np.array_equal(a_ERI[2, 1], a[2 * 3 + 1]) and np.array_equal(b_ERO[2, 1], b[:, 1 * 4 + 2])


@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [
        ("mixtral", MeshShape(fsdp=2, tensor=2), 0.5),
        slow_case("gpt_oss", MeshShape(fsdp=2), 0.5),
        slow_case("mixtral", MeshShape(fsdp=2, tensor=2), 1.25),
        slow_case("mixtral", MeshShape(data=2), 1.25),
        slow_case("nemotron_h_mixture", MeshShape(data=2, tensor=2), 0.5),
        slow_case("deepseek_v3", MeshShape(fsdp=2), 1.25),
    ],
)
def test_experts_on_a_mesh_give_the_gradients_of_one_device(
    name: str, shape: MeshShape, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer rows at first than the average, devices always need further passes."""
    model = ours(name)
    base = base_weights(model, original(name))
    adapter = fit_adapter(random_adapter(model), model.adapter_layout, "here")
    expected, gradients = logits_and_gradients(model, base, adapter, TOKENS)
    monkeypatch.setattr(engine_experts, "ROW_BLOCK", 1)
    monkeypatch.setattr(engine_experts, "FIRST", first)
    mesh = make_mesh(jax.devices()[: shape.size], shape)
    spread = CausalLM(tiny_models.configuration(name, LAYERS.get(name)), lora=SPEC, mesh=mesh, remat="linear")
    logits, own = logits_and_gradients(spread, base, adapter, TOKENS)
    assert distance(logits, np.asarray(expected)) <= LOGITS
    assert gradient_distance(own, {key: np.asarray(array) for key, array in gradients.items()}) <= GRADIENTS
