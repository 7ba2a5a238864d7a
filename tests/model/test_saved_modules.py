"""Modules that are trained as a whole, and embeddings as targets: PEFT computes the same and reads the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from dose import slow_case
from peft_parity import VOCABULARY, check_both_ways, peft_losses, tokens_with
from safetensors.numpy import save_file

from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

ROWS = "model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD, EMBEDDING, BOTH, NORMS = (
    ["lm_head"],
    ["embed_tokens"],
    ["embed_tokens", "lm_head"],
    ["model.norm", "input_layernorm"],
)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("untied", HEAD),
        ("tied", NORMS),
        slow_case("scaled", EMBEDDING),
        *(slow_case("tied", modules) for modules in (HEAD, EMBEDDING, BOTH)),
        *(slow_case("untied", modules) for modules in (EMBEDDING, BOTH, NORMS)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_whole_modules_equal_pefts(name: str, modules: list[str], tmp_path: Path) -> None:
    spec = check_both_ways(
        name, tmp_path, tokens_with(()), target_modules=["q_proj", "up_proj"], modules_to_save=modules
    )
    assert len(spec.whole) == (3 if modules is NORMS else len(modules))


@pytest.mark.parametrize("name", [slow_case("tied"), slow_case("untied")])
def test_whole_modules_of_a_grown_model_equal_pefts(name: str, tmp_path: Path) -> None:
    spec = check_both_ways(
        name,
        tmp_path,
        tokens_with((VOCABULARY, VOCABULARY + 1)),
        num_new=2,
        target_modules=["q_proj"],
        modules_to_save=BOTH,
    )
    assert spec.num_tokens == VOCABULARY + 2


@pytest.mark.parametrize("name", ["scaled", slow_case("tied"), slow_case("untied")])
def test_an_embedding_as_a_target_equals_pefts(name: str, tmp_path: Path) -> None:
    spec = check_both_ways(name, tmp_path, tokens_with(()), target_modules=["embed_tokens", "q_proj"])
    assert "model.embed_tokens" in spec.targets and not spec.whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("saved"), tiny_run.llama(num_layers=1))


def settings_of(folder: Path, **lora: Any) -> dict[str, Any]:
    options = {"steps": 5, "learning_rate": 3e-3, "weight_decay": 0.1}
    return tiny_run.recipe(folder, lora=lora, train=options, data={"pack": False})


@pytest.mark.parametrize(
    "lora",
    [
        {"modules_to_save": ["lm_head", "norm"], "targets": ["q_proj", "embed_tokens"]},
        slow_case({"modules_to_save": ["embed_tokens", "post_attention_layernorm"]}),
    ],
    ids=["head, norm and embedding", "embedding and norms"],
)
def test_first_steps_equal_pefts(lora: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(settings_of(folder, **lora))
    result = train(recipe, tmp_path / "run")
    np.testing.assert_allclose(result.losses, peft_losses(recipe, 5), rtol=1e-4)  # sums in another order, five steps
    assert result.losses[-1] < result.losses[0]
    generator = Generator.open(str(result.run))
    base = Generator.open(str(result.run), with_adapter=False)
    prompt = ["What is 3 plus 4?"]
    assert generator.generate(prompt, max_tokens=6, adapted=False) == base.generate(prompt, max_tokens=6)


@pytest.mark.parametrize(
    ("lora", "what", "where"),
    [
        ({"modules_to_save": ["lm_hed"]}, "LlamaForCausalLM has no module named 'lm_hed'", "lora.modules_to_save[0]"),
        ({"modules_to_save": ["q_proj"]}, "q_proj cannot be both a target of LoRA", "lora.modules_to_save"),
        ({"modules_to_save": ["lm_head"], "targets": ["lm_head"]}, "is both in lora.targets and in", "modules_to_save"),
        ({"targets": ["embed_tokens"], "dora": True}, "can be a target of plain LoRA only", "lora.targets"),
        ({"modules_to_save": [""]}, "lora.modules_to_save[0] cannot be ''", "lora.modules_to_save[0]"),
    ],
)
def test_bad_modules_are_refused(lora: dict[str, Any], what: str, where: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings_of(folder, **lora)), tmp_path / "run")
    assert what in caught.value.what and where in (caught.value.where or "")
    assert caught.value.do


@pytest.mark.parametrize(
    ("config", "arrays", "what"),
    [
        ({"modules_to_save": ["lm_head"]}, {}, "no weights of lm_head"),
        ({"trainable_token_indices": [1]}, {}, "no rows for its trainable_token_indices"),
        ({"trainable_token_indices": [1, 1]}, {ROWS: (2, 16)}, "embed_tokens do not fit its trainable_token_indices"),
        ({"trainable_token_indices": [1, 2]}, {ROWS: (3, 16)}, "embed_tokens do not fit its trainable_token_indices"),
        ({"trainable_token_indices": [-1]}, {ROWS: (1, 16)}, "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": [1]}}, {ROWS: (1, 16)}, "embed_tokens do not fit"),
        (
            {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}},
            {ROWS: (1, 16), "lm_head.token_adapter.trainable_tokens_delta": (1, 16)},
            "different tokens in the embedding and in the head",
        ),
        ({}, {"model.embed_tokens.lora_embedding_A": (4, 40)}, "B is missing"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    config: dict[str, Any], arrays: dict[str, tuple[int, ...]], what: str, tmp_path: Path
) -> None:
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, **config}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(described), "utf-8")
    of_lora = {"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 16)}
    of_lora["model.layers.0.self_attn.q_proj.lora_B.weight"] = (16, 4)
    tensors = {f"base_model.model.{name}": np.ones(shape, np.float32) for name, shape in {**of_lora, **arrays}.items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(TrilloraError) as caught:
        load_adapter(tmp_path)
    assert what in caught.value.what and caught.value.where and caught.value.do
