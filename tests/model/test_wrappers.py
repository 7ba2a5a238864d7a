"""Text training of multimodal checkpoints: the text model inside a wrapper, with the wrapper's names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
import transformers
from architecture_checks import CHECKS, LOGITS, Subject, distance
from chat_tokenizers import chat_tokenizer
from dose import FULL, full_dose_only, slow_case
from safetensors.torch import load_file, save_file
from tiny_wrappers import WRAPPERS
from typer.testing import CliRunner

from trillora.certify.certify import certify
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.export.text_adapter import export_text_adapter
from trillora.model.adapters import adapter_files, fit_adapter, load_adapter
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.limits import check_rows
from trillora.model.loading import weights
from trillora.model.loading.rope import scale_positions
from trillora.model.loading.source import OpenModel, load_config
from trillora.model.loading.weights import load_weights
from trillora.model.loading.wrapper import removed_modules
from trillora.model.lora_spec import LoraSpec
from trillora.recipe.load import load_recipe
from trillora.recipe.lora import RopeSection
from trillora.report.event_text import adapted_lines
from trillora.step.adapted_share import adapted_share
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

# One with renamed tensors and a tower that has layers of the same names; one with three positions per token.
QUICK = ("mistral3", "qwen3_vl")
TOKENS = np.random.default_rng(0).integers(3, 256, (2, 20)).astype(np.int32)


def families(quick: tuple[str, ...] = QUICK) -> list[Any]:
    return [name if name in quick else slow_case(name) for name in WRAPPERS]


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.tensor(TOKENS, dtype=torch.int64), use_cache=False).logits.numpy()
    return logits


def test_enough_families() -> None:
    assert len(WRAPPERS) >= 12


@pytest.mark.parametrize("name", families())
def test_a_wrapper_on_text_equals_pytorch(name: str) -> None:
    subject = Subject(name, None if FULL else 2)
    answers = {question: CHECKS[question](subject) for question in (CHECKS if FULL else ("scanned", "packed"))}
    assert all(answer.passed for answer in answers.values()), answers


def our_logits(folder: Path, adapter: Path) -> np.ndarray:
    """By Trillora, from the files of the model and of the adapter."""
    spec, matrices = load_adapter(adapter)
    model = CausalLM(load_config(folder), ModelOptions(scan=False, remat="none"), lora=spec)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    base = load_weights(folder, model.module, model.layout, dict.fromkeys(model.layout, device))
    arrays = fit_adapter(matrices, model.adapter_layout, "here")
    return np.asarray(jax.jit(model.logits)(base, arrays, {"tokens": jnp.asarray(TOKENS)}))


@pytest.mark.parametrize("name", families())
def test_peft_loads_the_adapter_on_the_wrapper_and_computes_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights come from the files that transformers writes, the adapter from the files that Trillora writes."""
    from peft import PeftModel

    wrapper = tiny_models.build(name, num_layers=2)
    wrapper.save_pretrained(tmp_path / "model")
    spec = LoraSpec(rank=4, alpha=8)
    model = CausalLM(load_config(tmp_path / "model"), ModelOptions(scan=False, remat="none"), lora=spec)
    removed = removed_modules(model.module)
    assert removed and set(adapted_share(model).left_out) <= {name.rpartition(".")[2] for name in removed}
    assert f"without {', '.join(adapted_share(model).left_out)}" in adapted_lines(adapted_share(model))[-1]
    inside = model.module.get_decoder().modules()
    assert {id(model.module.get_submodule(target)) for target in model.targets} < {id(child) for child in inside}

    random = np.random.default_rng(1)
    adapter = {n: random.normal(0, 0.2, leaf.shape).astype(np.float32) for n, leaf in model.adapter_layout.items()}
    files = adapter_files(adapter, model.module, model.targets, spec, str(tmp_path / "model"))
    (tmp_path / "adapter").mkdir()
    for file, data in files.items():
        (tmp_path / "adapter" / file).write_bytes(data)
    plain, theirs = torch_logits(wrapper), torch_logits(PeftModel.from_pretrained(wrapper, tmp_path / "adapter"))
    assert distance(plain, theirs) > 100 * LOGITS
    assert load_adapter(tmp_path / "adapter")[0].targets == tuple(sorted(model.targets))
    assert distance(our_logits(tmp_path / "model", tmp_path / "adapter"), theirs) < LOGITS
    assert not [r for r in caplog.records if r.name == weights.__name__]  # tensors of the towers are no surprise
    written = json.loads(files["adapter_config.json"])
    assert written["auto_mapping"]["base_model_class"] == type(wrapper).__name__


# ---- a whole run


def run_config(name: str) -> Any:
    config = tiny_models.configuration(name, 2)
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings = len(chat_tokenizer("chatml")), 256
    text.initializer_range = 0.1  # enough for an adapter to learn in a few steps
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = text.vocab_size
    if name == "mistral3":
        config.tie_word_embeddings = False  # its default ties them
    return config


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a wrapper. Its model and data are in the parent of the run."""

    @functools.cache
    def trained(name: str) -> Path:
        folder = tiny_run.write_both(tmp_path_factory.mktemp(name), run_config(name))
        assert train(recipe_of(folder), folder / "run").stopped is None
        return folder / "run"

    return trained


@pytest.fixture(scope="module")
def run(run_of: Callable[[str], Path]) -> Path:
    return run_of("mistral3")


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    return run.parent


def recipe_of(folder: Path) -> Any:
    return load_recipe(tiny_run.recipe(folder, train={"checkpoint_every": 2, "keep_checkpoints": 9}))


def wrapper_of(folder: Path) -> Any:
    loader = transformers.AutoModelForMultimodalLM
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("name", families(("mistral3",)))
def test_a_run_learns_and_resumes_bit_for_bit_and_peft_computes_the_same(
    name: str, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    run = run_of(name)
    losses = [line["loss"] for line in tiny_run.metrics(run, "step")]
    assert len(losses) == 4 and losses[-1] < losses[0]
    again = tmp_path / "again"
    tiny_run.copy_interrupted(run, again, 2)
    train(recipe_of(run.parent), again)
    tiny_run.assert_same(again, run)
    wrapper = wrapper_of(run.parent / "model")
    plain, theirs = torch_logits(wrapper), torch_logits(PeftModel.from_pretrained(wrapper, run / "adapter"))
    assert distance(plain, theirs) > 1e-3
    assert distance(our_logits(run.parent / "model", run / "adapter"), theirs) < LOGITS


def test_the_trained_adapter_works_on_the_wrapper_and_in_a_merged_model(folder: Path, run: Path) -> None:
    """By PEFT's AutoPeftModel, which builds the wrapper; and in files where the towers are the base's."""
    from peft import AutoPeftModel

    adapted = AutoPeftModel.from_pretrained(run / "adapter", dtype=torch.float32, attn_implementation="eager").eval()
    assert type(adapted.base_model.model).__name__ == "Mistral3ForConditionalGeneration"
    expected = torch_logits(adapted)
    assert distance(torch_logits(wrapper_of(folder / "model")), expected) > 1e-3
    source = open_source(str(run))
    export_merged(source, folder / "merged")
    assert distance(torch_logits(wrapper_of(folder / "merged")), expected) < LOGITS
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "merged"))
    towers = [name for name in before if "vision_tower" in name]
    assert towers and all(torch.equal(before[name], after[name]) for name in towers)
    assert "AutoModelForMultimodalLM" in (folder / "merged" / "README.md").read_text("utf-8")


def test_an_adapter_for_the_text_model_alone(folder: Path, run: Path) -> None:
    from peft import PeftModel

    told = CliRunner().invoke(app, ["export", str(run), "--to", "text-adapter", "--out", str(folder / "text")])
    assert told.exit_code == 0 and "Not certified: its base is a text model" in told.output, told.output
    whole = wrapper_of(folder / "model")
    text = transformers.MistralForCausalLM(whole.config.get_text_config()).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    expected = torch_logits(PeftModel.from_pretrained(whole, run / "adapter"))
    assert distance(torch_logits(PeftModel.from_pretrained(text, folder / "text")), expected) < LOGITS
    spec, _ = load_adapter(folder / "text")  # its checksums are right
    assert CausalLM(text.config, lora=spec).targets
    written = json.loads((folder / "text" / "adapter_config.json").read_text("utf-8"))
    assert written["task_type"] == "CAUSAL_LM" and "q_proj" in written["target_modules"]


def test_the_card_of_an_adapter_for_the_text_model_scales_its_positions(folder: Path, run: Path) -> None:
    source = open_source(str(run))
    rope = RopeSection(type="yarn", factor=4)
    scale_positions(source.base.config, rope, "config.json")
    scaled = dataclasses.replace(source, base=dataclasses.replace(source.base, rope=rope))
    out = export_text_adapter(scaled, folder / "scaled").folder
    card = (out / "README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code, "card", "exec")
    assert 'AutoConfig.from_pretrained("TEXT_MODEL")' in code and "config=config, dtype" in code
    [update] = re.findall(r"get_text_config\(\)\.update\((.*)\)\n", code)
    [override] = re.findall(r"--hf-overrides '(.*)'", card)
    assert ast.literal_eval(update) == json.loads(override) == json.loads((out / "rope.json").read_text())


def test_certificates_of_a_wrapper(folder: Path, run: Path) -> None:
    certificate = certify(run)
    assert certificate.passed, [check for check in certificate.checks if check.status == "failed"]
    assert any("PEFT" in check.name or "PEFT" in check.what for check in certificate.checks)
    export_merged(open_source(str(run)), folder / "certified", dtype="bfloat16")
    certificate = certify(folder / "certified", run=run)
    assert certificate.passed, [check for check in certificate.checks if check.status == "failed"]


@full_dose_only
@pytest.mark.parametrize("name", ["mistral3", "qwen3_5"])
def test_four_devices_give_the_losses_of_one(name: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of(name)
    settings = tiny_run.recipe(run.parent, hardware={"devices": 4, "mesh": {"data": 2, "fsdp": 2}})
    losses = train(load_recipe(settings), tmp_path / "run").losses
    alone = [line["loss"] for line in tiny_run.metrics(run, "step")]
    assert losses == pytest.approx(alone, rel=1e-5)  # float32 sums over devices in another order


@full_dose_only
def test_a_wrapper_with_a_quantized_base_and_new_tokens(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, model={"quantize": "int8"})
    losses = train(load_recipe({**settings, "tokens": ["<new>"]}), tmp_path / "run").losses
    assert losses[-1] < losses[0]
    certificate = certify(tmp_path / "run")
    assert certificate.passed, [check for check in certificate.checks if check.status == "failed"]


# ---- heads and bad input


def test_a_head_of_its_own_is_used_although_the_config_ties_it(folder: Path, tmp_path: Path) -> None:
    """The default of Mistral3Config ties; the files have a head, as in Mistral Small 3.1."""
    shutil.copytree(folder / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text("utf-8"))
    config["tie_word_embeddings"] = True
    file.write_text(json.dumps(config), "utf-8")
    opened = OpenModel.open(str(tmp_path / "model"), revision=None, trust_remote_code=False)
    assert opened.config.tie_word_embeddings is False
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    head = next(name for name in tensors if name.endswith("lm_head.weight"))
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[head] = tensors[embedding].clone()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    opened = OpenModel.open(str(tmp_path / "model"), revision=None, trust_remote_code=False)
    assert opened.config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}},
         "text model inside this model cannot be found"),
        ({"model_type": "udop"}, "text model inside this model cannot be found"),
        ({"model_type": "mistral3", "architectures": ["Mistral3ForSequenceClassification"]}, "not a causal language"),
    ],
)  # fmt: skip
def test_a_model_without_a_text_part_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(TrilloraError, match=message) as error:
        load_config(tmp_path)
    assert error.value.do and str(tmp_path) in str(error.value.where)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "?"}]},
                       {"role": "assistant", "content": "A cat."}]}, "Turn 1 has a part that is of type 'image'"),
        ({"image": "cat.png", "conversations": [{"from": "human", "value": "<image>\n?"},
                                                {"from": "gpt", "value": "A cat."}]}, 'The row has "image"'),
    ],
)  # fmt: skip
def test_rows_with_images_are_refused_with_their_place(
    row: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    recipe = tiny_run.recipe(folder, data={"path": str(tmp_path / "chats.jsonl")})
    with pytest.raises(TrilloraError, match=message) as error:
        train(load_recipe(recipe), tmp_path / "run")
    assert str(error.value.where).endswith("chats.jsonl:1") and "remove the row" in str(error.value.do)


def test_a_model_whose_tokens_see_the_next_ones_is_refused() -> None:
    config = tiny_models.configuration("gemma4")
    config.text_config.use_bidirectional_attention = "vision"
    check_rows(config, 64)
    config.text_config.use_bidirectional_attention = "all"
    with pytest.raises(TrilloraError, match="sees the tokens after it"):
        check_rows(config, 64)


def test_an_adapter_of_the_wrapper_is_refused_by_the_text_model_and_vice_versa(run: Path) -> None:
    spec, _ = load_adapter(run / "adapter")
    text = load_config(run.parent / "model").get_text_config()
    with pytest.raises(TrilloraError, match="not a linear layer of MistralForCausalLM") as error:
        CausalLM(text, lora=spec)
    assert "text model alone" in str(error.value.do) and "model.layers.0." in str(error.value.do)
    names = tuple(target.replace("language_model.", "") for target in spec.targets)
    with pytest.raises(TrilloraError, match="not a linear layer of Mistral3ForConditionalGeneration"):
        CausalLM(load_config(run.parent / "model"), lora=LoraSpec(targets=names, file="adapter"))
