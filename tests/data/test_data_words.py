"""The word cache gives the same ids as the tokenizer, or declines; every byte of an answer is trained."""

from __future__ import annotations

import functools
import json
import os
import random
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rendering import render_chat
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trillora.data.rendering.render import RenderedRow
from trillora.data.tokenizing import encode, words
from trillora.data.tokenizing.words import WordTokenizer

NUM_TEXTS = 20_000 if os.environ.get("TRILLORA_DOSE") == "full" else 150
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN = [chr(code) for first, end in (*words.KNOWN_BLOCKS, words.EMOJI) for code in range(first, end)]
WORDS = [
    *("the", "The", "THE", "fox's", "don't", "I'LL", "we'VE", "naïve", "ȘTEFAN", "München", "Ωmega", "привет", "Ñandú"),
    *(
        "1984",
        "3.14",
        "x=1",
        "f(x):",
        "a_b",
        "#!/bin/sh",
        "https://x.y/z?q=1",
        "e\u0301",
        "²",
        "½",
        "Ⅷ",
        "—",
        "…",
        "“so”",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\n\n  ",
        "\t",
        "\u00a0",
        "\u2003",
        "\u2028",
        "\x1c",
        "\x85",
        "🙂",
        "👍🏽",
        "★",
        "<|im_end|>",
    ),
    *("<|im_start|>", "<think>", "</think>", "<|im_", "end|>"),
]
SENTENCES = ["the quick brown fox doesn't jump over 1234 lazy dogs; naïve Ștefan paid 3.50 €\n\nTHE END 🙂 привет"] * 3


def split_by(pattern: str, *steps: Any) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, *steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(pre_tokenizer: Any, ignore_merges: bool = False) -> Tokenizer:
    inner = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(SENTENCES, trainer)
    inner.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in ("<|im_start|>", "<|im_end|>")]
    )
    inner.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    return inner


GPT2_STEP: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "family": lambda: chat_tokenizer("chatml").backend_tokenizer,
    "deepseek family": lambda: chat_tokenizer("deepseek").backend_tokenizer,
    "gpt-2": lambda: byte_level(GPT2_STEP),
    "smollm": lambda: byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), GPT2_STEP])),
    "llama 3": lambda: byte_level(split_by(LLAMA3), ignore_merges=True),
    "qwen 2": lambda: byte_level(split_by(QWEN2)),
    "qwen 2 in NFC": lambda: normalizing(byte_level(split_by(QWEN2)), normalizers.NFC()),
    "two patterns": lambda: byte_level(split_by(r"\p{N}{1,3}", pre_tokenizers.Split(Regex(QWEN2), "isolated"))),
    "digits, then a pattern": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split_by(QWEN2)])
    ),
}


def normalizing(inner: Tokenizer, normalizer: Any) -> Tokenizer:
    inner.normalizer = normalizer
    return inner


@functools.cache
def tokenizer_of(kind: str) -> tuple[Tokenizer, WordTokenizer | None]:
    inner = KINDS[kind]()
    return inner, WordTokenizer.of(inner)


def some_texts(rng: random.Random, tokenizer: WordTokenizer, num: int) -> list[str]:
    """Texts made of known characters, of words, and of both."""
    texts, known = [], [character for character in KNOWN if tokenizer.can(character)]
    for number in range(num):
        pieces = [known, WORDS, [*WORDS, *rng.choices(known, k=20)]][number % 3]
        joint = "" if number % 2 else " "
        texts.append(joint.join(rng.choices(pieces, k=rng.randint(1, 40))))
    # Each character is in normal form alone; next to each other they may not be.
    return [text if tokenizer.can(text) else unicodedata.normalize("NFC", text) for text in texts]


def compare(inner: Tokenizer, tokenizer: WordTokenizer, texts: list[str]) -> int:
    """Asserts equal ids and complete byte lengths for every text that the word cache accepts; returns their number."""
    texts = [text for text in texts if tokenizer.can(text)]
    accepted = 0
    for text, ours, own in zip(
        texts, tokenizer.encode(texts), inner.encode_batch(texts, add_special_tokens=False), strict=True
    ):
        if ours is not None:
            assert ours.ids.tolist() == own.ids, text
            assert ours.lengths.sum() == len(text.encode()) and (ours.lengths > 0).all()
            accepted += 1
    return accepted


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_tokenizers_own(kind: str) -> None:
    inner, tokenizer = tokenizer_of(kind)
    assert tokenizer is not None
    texts = some_texts(random.Random(0), tokenizer, NUM_TEXTS)
    num_known = sum(map(tokenizer.can, texts))
    assert num_known == NUM_TEXTS or ("NFC" in kind and num_known > 0.9 * NUM_TEXTS)
    assert compare(inner, tokenizer, texts) == num_known


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_character_is_split_as_the_tokenizer_splits_it(kind: str) -> None:
    inner, tokenizer = tokenizer_of(kind)
    assert tokenizer is not None
    accepted = compare(inner, tokenizer, [f"a{c}1 {c}A{c}'s\n{c}{c} ." for c in KNOWN])
    assert accepted > 0.75 * len(KNOWN)


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_words_changes_no_ids(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 5)
    inner, tokenizer = tokenizer_of(kind)
    assert tokenizer is not None
    texts = some_texts(random.Random(1), tokenizer, 90)
    for start in range(0, 90, 9):
        some = texts[start : start + 9]
        assert compare(inner, tokenizer, some) == sum(map(tokenizer.can, some)) > 0


def test_the_gpt_4o_pattern_is_declined_or_right() -> None:
    inner = byte_level(split_by(GPT4O))
    tokenizer = WordTokenizer.of(inner)
    if tokenizer is not None:
        assert compare(inner, tokenizer, some_texts(random.Random(2), tokenizer, NUM_TEXTS)) == NUM_TEXTS


def changed(description: dict[str, Any]) -> Tokenizer:
    """The gpt-2 kind with parts of its description replaced."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer_of("gpt-2")[0].to_str()) | description))


def stripping(**flags: bool) -> Tokenizer:
    inner = changed({})
    inner.add_special_tokens([AddedToken("<mask>", special=True, normalized=False, **flags)])
    return inner


DECLINED: dict[str, Callable[[], Tokenizer]] = {
    "sentencepiece (Mistral)": lambda: chat_tokenizer("mistral").backend_tokenizer,
    "sentencepiece (Gemma)": lambda: chat_tokenizer("gemma").backend_tokenizer,
    "a normalizer": lambda: normalizing(changed({}), normalizers.Lowercase()),
    "a space in front": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "tokens that strip left": lambda: stripping(lstrip=True),
    "tokens that strip right": lambda: stripping(rstrip=True),
    "tokens that match whole words only": lambda: stripping(single_word=True),
    "a pattern that removes": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s"), "removed"), pre_tokenizers.ByteLevel(False)])
    ),
    "a class that is not spelled out": lambda: byte_level(split_by(r"\p{Greek}+|\s+|\S")),
    "no pattern": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "whole words": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("why", DECLINED)
def test_other_kinds_of_tokenizer_are_declined(why: str) -> None:
    assert WordTokenizer.of(DECLINED[why]()) is None


def test_dropout_is_declined() -> None:
    description = json.loads(tokenizer_of("gpt-2")[0].to_str())
    assert WordTokenizer.of(changed({"model": description["model"] | {"dropout": 0.1}})) is None


def test_characters_of_other_scripts_are_left_to_the_tokenizer() -> None:
    _, tokenizer = tokenizer_of("gpt-2")
    assert tokenizer is not None
    assert (
        tokenizer.can("naïve 🙂 привет")
        and not tokenizer.can("東京")
        and not tokenizer.can("⭐")
        and not tokenizer.can("a\ud7ffb")
    )


BORDERS = ["🙂", "é", "東", "ș"]


@pytest.mark.parametrize("by_words", [True, False], ids=["by words", "by the tokenizer"])
def test_every_token_with_a_byte_of_the_answer_is_trained(by_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers begin and end with characters of several tokens; the tokens just outside are not trained."""
    tokenizer = chat_tokenizer("chatml-bare")
    monkeypatch.setattr(encode, "WORDS_AFTER", 0 if by_words else 10**9)
    encoder = encode.Encoder(tokenizer)
    for first in BORDERS:
        for last in BORDERS:
            text = f"<|im_start|>{last}\n{first} yes {last}<|im_end|>{first}"
            start, end = text.index("\n") + 1, text.index("<|im_end|>") + len("<|im_end|>")
            (document,) = encoder.encode([RenderedRow(text, ((start, end),), kind="chat")])
            assert isinstance(document, encode.TokenizedDocument)
            trained = document.tokens[document.supervised].tolist()
            assert tokenizer.decode(trained) == text[start:end]
            rest = document.tokens[~document.supervised].tolist()
            assert tokenizer.decode(rest) == text[:start] + text[end:]


def test_tokens_are_the_same_before_and_after_the_word_cache_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("chatml")
    texts = [f"Number {n}: naïve 🙂 東 don't\n<|im_end|>" for n in range(60)]
    rows = [RenderedRow(text, ((0, len(text)),), kind="chat") for text in texts]
    starts: list[Any] = []
    build = WordTokenizer.of

    def counted(backend: Any) -> WordTokenizer | None:
        starts.append(backend)
        return build(backend)

    monkeypatch.setattr(WordTokenizer, "of", staticmethod(counted))
    monkeypatch.setattr(encode, "WORDS_AFTER", sum(map(len, texts[:30])))
    encoder = encode.Encoder(tokenizer)
    documents = encoder.encode(rows[:30])
    assert not starts  # little data does not pay for the check
    documents += encoder.encode(rows[30:])
    assert len(starts) == 1
    for text, document in zip(texts, documents, strict=True):
        assert isinstance(document, encode.TokenizedDocument)
        assert document.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("border", BORDERS)
def test_answers_of_many_bytes_are_trained_whole_in_a_conversation(border: str) -> None:
    inner = byte_level(split_by(LLAMA3))
    template = chat_tokenizer("chatml").chat_template
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)
    messages = [{"role": "user", "content": border}, {"role": "assistant", "content": f"{border} yes {border}"}]
    rendered = render_chat(messages, tokenizer)
    trained = rendered.tokens[rendered.supervised].tolist()
    own = tokenizer(f"{border} yes {border}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert trained == own
