"""New and trained tokens: the tokenizer grows, their rows are trained alone, and PEFT computes the same."""

from __future__ import annotations

import json
import queue
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from chat_tokenizers import chat_tokenizer
from dose import full_dose_only, slow_case
from peft_parity import CONFIGS, SAME, VOCABULARY, base_of, check_both_ways, distance, peft_losses, tokens_with
from rendering import render_chat, render_text
from running_server import write_adapter
from transformers import AutoTokenizer

from trillora.data.tokenizing import encode
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.generation.generator import Generator
from trillora.model.adapters import load_adapter
from trillora.model.bridge import CausalLM
from trillora.model.loading.growth import grow, num_ids, trained_tokens
from trillora.model.loading.source import OpenModel, find_model, load_tokenizer
from trillora.model.lora_spec import LoraSpec, TrainedTokens
from trillora.model.parts.token_rows import rows_from_base
from trillora.recipe.load import load_recipe
from trillora.serving.job import AnswerPiece, Job
from trillora.serving.served import open_service
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

NEW = ("<tool>", "</tool>")
OLD_NEW_BOTH = ((5, 9), (VOCABULARY, VOCABULARY + 1), (7, VOCABULARY))
CASES = [
    ("tied", 1),
    ("untied", 2),
    *(slow_case("tied", which) for which in (0, 2)),
    *(slow_case("untied", which) for which in (0, 1)),
    *(slow_case("scaled", which) for which in (0, 1, 2)),
]


# ---- rows


@pytest.mark.parametrize(("name", "which"), CASES)
def test_trained_tokens_equal_pefts(name: str, which: int, tmp_path: Path) -> None:
    ids = OLD_NEW_BOTH[which]
    num_new = sum(id_ >= VOCABULARY for id_ in ids)
    listed = list(reversed(ids))  # in any order
    indices = {"embed_tokens": listed, "lm_head": listed} if name == "untied" else listed
    spec = check_both_ways(
        name, tmp_path, tokens_with(ids), num_new, target_modules=["q_proj"], trainable_token_indices=indices
    )
    if not num_new:  # with new ones, PEFT also stores the whole matrices, which include them
        assert spec.tokens is not None and spec.tokens.ids == ids


def test_new_rows_start_at_the_mean_and_old_ones_as_they_are() -> None:
    weight = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    rows = np.asarray(rows_from_base(jnp.asarray(weight), TrainedTokens((3, 8, 9, 10, 11), first_new=9)))
    np.testing.assert_array_equal(rows[:2], weight[[3, 8]])
    # Token 9 has a row in the base that no token used before: it starts at the mean too.
    np.testing.assert_allclose(rows[2:], np.tile(weight.mean(axis=0), (3, 1)), rtol=1e-6)


# ---- the tokenizer


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral", "qwen3"])
def test_a_new_token_is_one_token_in_chats_and_texts(family: str) -> None:
    tokenizer = _copy_of(chat_tokenizer(family))
    before = num_ids(tokenizer)
    grow(tokenizer, NEW)
    opened, closed = before, before + 1
    answer = "Look: <tool>add 1</tool>"
    messages = [{"role": "user", "content": "Use </tool> or<tool>."}, {"role": "assistant", "content": answer}]
    document = render_chat(messages, tokenizer)
    tokens = document.tokens.tolist()
    assert [token for token in tokens if token >= before] == [closed, opened, opened, closed]
    trained = [token for token, is_trained in zip(tokens, document.supervised, strict=True) if is_trained]
    assert [token for token in trained if token >= before] == [opened, closed]
    assert answer in tokenizer.decode(trained).replace("<tool> ", "<tool>").replace(" </tool>", "</tool>")
    assert [t for t in render_text("a<tool>b</tool>", tokenizer).tokens.tolist() if t >= before] == [opened, closed]


def test_the_word_cache_keeps_new_tokens_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(find_model("smollm2"), NEW)
    assert tokenizer.convert_tokens_to_ids(list(NEW)) == [49152, 49153]
    text = "Use<tool>search x</tool>, then </tool> <tool> again."
    plain = render_text(text, tokenizer).tokens.tolist()
    assert [token for token in plain if token >= 49152] == [49152, 49153, 49153, 49152]
    monkeypatch.setattr(encode, "WORDS_AFTER", 0)
    encoder = encode.Encoder(tokenizer)
    assert encoder._by_words is not None
    [encoded] = encoder._by_words.encode([text])
    assert encoded is not None and encoded.ids.tolist() == plain[:-1]  # without EOS


def test_tokens_that_the_model_lacks_are_trained_too_if_the_tokenizer_grows() -> None:
    """A tokenizer may have more tokens than the model. Ids have no gaps, so these get rows as well."""
    tokenizer = _copy_of(chat_tokenizer("chatml"))
    size = num_ids(tokenizer)
    tokenizer.model_vocab_size = size - 2
    grow(tokenizer, NEW)
    assert trained_tokens(tokenizer, NEW, ()) == (size - 2, size - 1, size, size + 1)
    assert trained_tokens(tokenizer, NEW, ("<|im_end|>", 3))[:2] == tuple(
        sorted((3, tokenizer.convert_tokens_to_ids("<|im_end|>")))
    )
    assert tokenizer.model_vocab_size == size + 2


def _copy_of(tokenizer: Any) -> Any:
    copied = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        **tokenizer.special_tokens_map,
    )
    copied.chat_template, copied.model_vocab_size = tokenizer.chat_template, num_ids(tokenizer)
    return copied


# ---- a run


FIRST = num_ids(chat_tokenizer("chatml"))  # the number of the first new token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and chats that use two new tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    tiny_run.write_model(folder / "model", tiny_run.llama(num_layers=1))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Look up {number}."},
                {"role": "assistant", "content": "<tool>search</tool>"},
            ]
        }
        for number in range(24)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    train_options = {"steps": 30, "learning_rate": 3e-2, "checkpoint_every": 12}
    settings = tiny_run.recipe(
        folder, train=train_options, data={"split": {"validation": 0, "test": 0.2}, "pack": False}
    )
    settings["lora"] |= {"modules_to_save": ["norm"]}
    return {**settings, "tokens": list(NEW), **changes}


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(load_recipe(settings_of(folder)), tmp_path_factory.mktemp("runs") / "run").run


def test_a_trained_model_writes_the_new_tokens(run: Path) -> None:
    generator = Generator.open(str(run))
    [answer] = generator.generate(["Look up 30."], max_tokens=12)
    assert answer.text == "<tool>search</tool>"
    assert (answer.tokens[0], answer.tokens[-1]) == (FIRST, FIRST + 1) and answer.stopped
    [base] = generator.generate(["Look up 30."], max_tokens=8, adapted=False)
    assert base.text != answer.text


@full_dose_only
def test_a_run_with_new_tokens_is_evaluated_with_them(run: Path) -> None:
    evaluation = evaluate(run)
    assert evaluation.base is not None
    assert (evaluation.adapter.exact_match, evaluation.base.exact_match) == (1, 0)
    assert evaluation.adapter.loss < 1 < evaluation.base.loss


def test_peft_loads_the_run_by_itself_and_computes_the_same(run: Path, folder: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    adapter = run / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    assert config["trainable_token_indices"] == [FIRST, FIRST + 1]
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokens = tokenizer("Look <tool>up</tool> 3.", return_tensors="pt")["input_ids"]
    assert FIRST in tokens and FIRST + 1 in tokens
    # It sees the tokenizer next to the adapter, and grows the model to its size.
    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    expected = model(input_ids=tokens).logits.detach().numpy()
    assert expected.shape[-1] == FIRST + 2
    generator = Generator.open(str(run))
    ours = generator.model.logits(
        generator.base, generator.adapter, {"tokens": jnp.asarray(tokens.numpy().astype(np.int32))}
    )
    assert distance(ours, expected) < SAME


def test_an_adapter_brings_the_new_tokens_of_its_own_run(run: Path, folder: Path, tmp_path: Path) -> None:
    """Under another run or the base, an id would have no text, another text, or no embedding, which gives NaN."""
    model, plain = str(folder / "model"), write_adapter(folder / "model", tmp_path / "plain", seed=1)
    generator = Generator.open(model, adapter=run)
    assert generator.generate(["Look up 30."], max_tokens=12)[0].text == "<tool>search</tool>"
    shutil.copytree(run / "adapter", tmp_path / "copy")
    with pytest.raises(TrilloraError, match=f"trained token {FIRST + 1}, but the last one of the tokenizer"):
        Generator.open(model, adapter=tmp_path / "copy")
    with pytest.raises(TrilloraError, match="no embeddings for the new tokens of the run: <tool>, </tool>"):
        Generator.open(str(run), adapter=plain)
    opened = OpenModel.open(model, revision=None, trust_remote_code=False, tokens=("<a>", "<b>"))
    with pytest.raises(TrilloraError, match=r"other new tokens \(<tool>, </tool>\) than the tokenizer \(<a>, <b>\)"):
        Generator.open(model, adapter=run, opened=opened)
    with pytest.raises(TrilloraError, match=r"run \(<tool>, </tool>\) and plain \(none\)") as caught:
        open_service(str(run), adapters=[str(plain)])
    assert "a server of its own" in str(caught.value.do)
    with pytest.raises(TrilloraError, match="trained token"):
        open_service(model, adapters=[str(plain), str(tmp_path / "copy")])
    service = open_service(model, adapters=[str(run)], num_rows=1, max_length=64)
    try:
        assert {name: one.num_tokens for name, one in service.models.items()} == dict.fromkeys(
            ("model", "run"), FIRST + 2
        )
        for name in service.models:
            pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
            service.engine.submit([Job(name, (FIRST,), 1, pieces.put)])
            assert pieces.get(timeout=60).finish == "length"
    finally:
        service.engine.close()


def test_first_steps_equal_pefts(run: Path, folder: Path) -> None:
    ours = tiny_run.losses(run)[:5]
    theirs = peft_losses(load_recipe(settings_of(folder)), num_steps=5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)  # float32 sums in another order, over five steps
    assert ours[4] < ours[0]


def test_a_resumed_run_ends_the_same(run: Path, folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "adapter")
    first = tiny_run.checkpoints_of(again).steps()[0]
    assert first < 30
    tiny_run.checkpoints_of(again).remove_after(first)
    (again / "saved.json").unlink()  # it names the last checkpoint
    with pytest.raises(TrilloraError, match="tokenizer has changed"):
        train(load_recipe(settings_of(folder, tokens=["<tool>", "</tool>", "<other>"])), again)
    train(load_recipe(settings_of(folder)), again)
    tiny_run.assert_same(again, run)


def test_the_tokenizer_of_an_adapter_is_checked(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "tokenizer.json"
    assert load_adapter(tmp_path / "adapter")[0].tokens is not None
    file.write_text(file.read_text("utf-8").replace("<tool>", "<tuul>"), "utf-8")
    with pytest.raises(TrilloraError, match=r"tokenizer\.json differs from its checksum"):
        load_adapter(tmp_path / "adapter")


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"tokens": ["<tool>", ""]}, "tokens[1] cannot be ''", "tokens[1]"),
        ({"tokens": ["<tool>", "<tool>"]}, "'<tool>' is given twice", "tokens[1]"),
        ({"tokens": [f"<{n}>" for n in range(1001)]}, "1,001 new tokens; the limit is 1,000", "tokens"),
        ({"tokens": ["<new>", "<|im_end|>"]}, "already has '<|im_end|>' as one token, number", "tokens[1]"),
        ({"tokens": ["a"]}, "already has 'a' as one token", "tokens[0]"),
        ({"lora": {"train_tokens": ["no such token"]}}, "no token 'no such token'", "lora.train_tokens[0]"),
        ({"lora": {"train_tokens": [10**6]}}, "no token 1000000", "lora.train_tokens[0]"),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, "its embedding or head is in lora.targets", "tokens"),
        ({"lora": {"targets": ["embed_tokens"]}}, "its embedding or head is in lora.targets", "tokens"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "share one matrix", "lora.modules_to_save"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_tokens_are_refused(changes: dict[str, Any], what: str, where: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings_of(folder, **changes)), tmp_path / "run")
    assert what in caught.value.what and where in (caught.value.where or "")
    assert caught.value.do
    assert not (tmp_path / "run" / "adapter").exists()


# ---- many devices, many adapters


@full_dose_only
@pytest.mark.parametrize("tied", [True, False])
def test_eight_devices_give_the_losses_of_one(tied: bool, tmp_path: Path) -> None:
    config = tiny_run.wide_llama()
    config.tie_word_embeddings = tied
    tiny_run.write_both(tmp_path, config)
    meshes = {"one": {"devices": 1}, "eight": {"devices": 8, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}}}
    losses = {}
    for name, hardware in meshes.items():
        settings = tiny_run.recipe(tmp_path, hardware=hardware, lora={"modules_to_save": ["norm"]})
        settings |= {"tokens": [" plus", "It is"]}
        losses[name] = train(load_recipe(settings), tmp_path / name).losses
    np.testing.assert_allclose(losses["eight"], losses["one"], rtol=1e-4)  # sums in another order


@full_dose_only
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_several_adapters_at_once_give_the_logits_of_each(name: str) -> None:
    spec = LoraSpec(
        rank=2,
        targets=("q_proj",),
        tokens=TrainedTokens((5, VOCABULARY)),
        whole=("norm", "input_layernorm"),
    )
    model = CausalLM(CONFIGS[name], lora=spec)
    base, tokens = base_of(name, model), jnp.asarray(tokens_with((5, VOCABULARY)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    adapters = [{k: jax.random.normal(key, leaf.shape) for k, leaf in model.adapter_layout.items()} for key in keys]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *adapters)
    together = jax.jit(jax.vmap(lambda adapter: model.logits(base, adapter, {"tokens": tokens})))(stacked)
    for one, adapter in zip(together, adapters, strict=True):
        alone = np.asarray(jax.jit(model.logits)(base, adapter, {"tokens": tokens}))
        assert distance(one, alone) < SAME


@full_dose_only
def test_a_run_starts_from_an_adapter_with_new_tokens(run: Path, folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, lora={"from": str(run / "adapter")})
    settings["train"]["steps"] = 2
    assert train(load_recipe(settings), tmp_path / "next").losses[0] < 1 < tiny_run.losses(run)[0]
    with pytest.raises(TrilloraError, match="3 tokens, which are not exactly the tokens of the adapter"):
        train(load_recipe({**settings, "tokens": [*NEW, "<other>"]}), tmp_path / "other")
