"""The tokenizer in a GGUF file: llama.cpp gives the same ids as transformers, and unknown rules are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_models
import pytest
import torch
from dose import slow_case
from gguf_models import sentencepiece
from llama_cpp import LlamaCpp
from real_tokenizers import real_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from trillora.errors import TrilloraError
from trillora.export.gguf.tokenizer import APPROXIMATE, SPLITS, WHOLE_WORDS, tokenizer_metadata, without_marks
from trillora.export.gguf.write import export_gguf
from trillora.model.loading.source import OpenModel, find_model, load_config, load_tokenizer

TEXTS = (
    "It's 12345 o'clock; I'LL go, they'Re here, won't we?",
    "def f(x):\n\n\treturn  x**2   # three   spaces \n\n\n end ",
    "naïve Ésprit Șerban ΑΒΓ αβγ Ünï",
    "ภาษาไทย हिन्दी",
    "東京は日本の首都です。 한국어 텍스트",
    "🙂👍🏽 x² ½ ٣٤ Ⅷ 10.5% $3,000.00 <tag/> {json: [1, 2]}",
    "\n\n  leading, \r\n windows lines\r\n",
    "",
)
ACCENTS = TEXTS[2:4]  # llama.cpp's rules `tekken` and `gpt-4o` treat accents and combining marks differently


def written(tokenizer: Any, folder: Path) -> Path:
    """A tiny model with this tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **{**gguf_models.SIZES, **sizes, "vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "base")
    source, _ = gguf_models.source_of("llama", folder / "other")
    matrices = {
        "model.layers.0.self_attn.o_proj.lora_a": torch.zeros(4, 8).numpy(),
        "model.layers.0.self_attn.o_proj.lora_b": torch.zeros(8, 4).numpy(),
    }
    spec = dataclasses.replace(source.spec, targets=("model.layers.0.self_attn.o_proj",))
    base = OpenModel(folder / "base", load_config(folder / "base"), tokenizer, "some/base")
    source = dataclasses.replace(source, base=base, matrices=matrices, spec=spec)
    return folder / "out" / export_gguf(source, folder / "out", type="f16").files[0]


def by_splits(steps: tuple[str, ...], ignore_merges: bool) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that splits text by these steps, trained on the texts."""
    made: list[Any] = []
    for step in steps:
        if step == "digits":
            made.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "bytes":
            made.append(pre_tokenizers.Split(Regex(step), "isolated"))
    made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=steps[-1] == "bytes"))
    inner = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(made)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([*TEXTS, *TEXTS], trainer)
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def rules() -> Iterator[tuple[str, tuple[str, ...], bool]]:
    for steps, pre in SPLITS.items():
        yield pre, steps, pre in WHOLE_WORDS
        if other := WHOLE_WORDS.get(pre):
            yield other, steps, False


RULES = list(rules())
OFTEN = ("smollm", "qwen2")


@pytest.mark.parametrize("pre", [rule[0] if rule[0] in OFTEN else slow_case(rule[0]) for rule in RULES])
def test_each_rule_splits_text_as_llama_cpp(pre: str, tmp_path: Path) -> None:
    _, steps, ignore_merges = next(rule for rule in RULES if rule[0] == pre)
    tokenizer = by_splits(steps, ignore_merges)
    texts = [text for text in TEXTS if pre not in APPROXIMATE or text not in ACCENTS]
    with LlamaCpp(written(tokenizer, tmp_path)) as reader:
        for text in (*texts, "".join(TEXTS[:2]) + "<|end|>" + TEXTS[4]):
            assert reader.token_ids(text) == tokenizer(text)["input_ids"], (pre, text)


REAL = ("qwen3-own", "llama3", "mistral-tekken", "gemma3", "llama2", "mistral-v3")


@pytest.mark.parametrize("name", [slow_case(name) for name in REAL])
def test_ids_of_real_tokenizers(name: str, tmp_path: Path) -> None:
    tokenizer = real_tokenizer(name)
    with LlamaCpp(written(tokenizer, tmp_path)) as reader:
        for text in TEXTS:
            if name == "mistral-tekken" and text in ACCENTS:
                continue
            if name == "gemma3" and "  " in text:
                continue  # runs of spaces are tokens, which llama.cpp merges and the reader of these tests does not
            start = tokenizer.all_special_tokens[0] if name.startswith("mistral-v") else ""
            expected = tokenizer(start + text, add_special_tokens=False)["input_ids"]
            assert reader.token_ids(start + text, add_special=False) == expected, text


def test_ids_of_smollm2(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    chat = [{"role": "user", "content": TEXTS[1]}]
    with LlamaCpp(written(tokenizer, tmp_path)) as reader:
        for text in TEXTS:
            assert reader.token_ids(text) == tokenizer(text)["input_ids"], text
        prompt = reader.chat_prompt(chat)
        ids = reader.token_ids(prompt)
    assert prompt == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("name", ["gemma", "zephyr"])
def test_spaces_and_bytes_of_sentencepiece(name: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(name)
    with LlamaCpp(written(tokenizer, tmp_path)) as reader:
        for text in TEXTS:
            found = reader.token_ids(text, add_special=False)
            assert found == tokenizer(text, add_special_tokens=False)["input_ids"], text


def changed(tokenizer: Any, change: Any) -> PreTrainedTokenizerFast:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    change(described)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token=tokenizer.eos_token
    )


def _lowercase(described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "Lowercase"}


def _other_words(described: dict[str, Any]) -> None:
    described["pre_tokenizer"]["pretokenizers"][0] = {"type": "Punctuation", "behavior": "Isolated"}


def _whole_words(described: dict[str, Any]) -> None:
    described["model"]["ignore_merges"] = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_lowercase, "Lowercase"), (_other_words, "no rule"), (_whole_words, "whole words")],
)
def test_other_rules_are_refused(change: Any, reason: str) -> None:
    tokenizer = changed(by_splits(("digits", "bytes"), False), change)
    with pytest.raises(TrilloraError, match=reason) as raised:
        tokenizer_metadata(tokenizer, len(tokenizer), adds_bos=False)
    assert "smollm" in raised.value.do


def test_a_token_that_removes_spaces_is_refused_if_the_template_uses_it() -> None:
    tokenizer = by_splits(("bytes",), False)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<x>", lstrip=True)]})
    noted = tokenizer_metadata(tokenizer, len(tokenizer), template="{{ messages }}", adds_bos=False)
    assert any("<x>" in note for note in noted.notes)
    with pytest.raises(TrilloraError, match="removes the white space"):
        tokenizer_metadata(tokenizer, len(tokenizer), template="<x>{{ messages }}", adds_bos=False)


def test_rows_without_a_token_and_tokens_without_a_row() -> None:
    tokenizer = by_splits(("bytes",), False)
    size = len(tokenizer)
    more = tokenizer_metadata(tokenizer, size + 2, adds_bos=False).values
    assert more["tokenizer.ggml.tokens"][-2:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]
    assert more["tokenizer.ggml.token_type"][-3:] == [3, 5, 5]
    fewer = tokenizer_metadata(tokenizer, size - 1, adds_bos=False)
    assert len(fewer.values["tokenizer.ggml.tokens"]) == size - 1
    assert "no embedding for 1 of" in fewer.notes[-1]


def test_generation_marks_leave_the_white_space_as_it_was() -> None:
    template = "{% for m in messages %} {%- generation -%} {{ m }} {% endgeneration %}\n{% endfor %}"
    assert without_marks(template) == "{% for m in messages %} {%- if true -%} {{ m }} {% endif %}\n{% endfor %}"
