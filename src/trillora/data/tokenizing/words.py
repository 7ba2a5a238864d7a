r"""A word cache for byte-level BPE tokenizers: the same tokens as the tokenizer, several times faster.

A byte-level BPE tokenizer splits text into words with a fixed pattern, then tokenizes each word independently. Words
repeat, so their tokens are looked up; only new words go to the tokenizer. Example with GPT-2's pattern:

    "the cat sat on the cat"  ->  "the", " cat", " sat", " on", " the", " cat"
    the tokenizer gets the five different words; the ids of the text are the ids of its words, joined

The pattern comes from the tokenizer's own description and is translated for Python's `re`: a class such as `\p{L}`
becomes a list of character ranges, limited to characters whose class has not changed since Unicode 3.2. Text with any
other character, scripts without spaces between words, and other kinds of tokenizers are left to the tokenizer itself.
`WordTokenizer.of` compares the translated pattern with the tokenizer on texts designed to reveal differences, and
returns None if there is one.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

MAX_WORDS = 400_000  # in the cache; when it is full, it is emptied
# The default pattern of ByteLevel.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = r"\s"
Form = Literal["NFC", "NFKC", "NFD", "NFKD"]
# Alphabets and punctuation. Scripts without spaces between words are not included: their "words" rarely repeat.
KNOWN_BLOCKS = ((0x0000, 0x0600), (0x2000, 0x27C0), (0xFE0F, 0xFE10))
EMOJI = (0x1F300, 0x1FB00)  # never a letter, number or space, even if not yet assigned


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text, and the number of UTF-8 bytes of each."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]


class WordTokenizer:
    """The word cache of one byte-level tokenizer. Create it with `of`."""

    def __init__(self, backend: Any, stages: list[re.Pattern[str]], added: dict[str, int], form: Form | None) -> None:
        self._backend = backend
        self._stages = stages  # patterns that split one after the other
        self._form = form  # Unicode normal form that the text must already have
        self._added = added
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(added, key=lambda w: (-len(w), w)))) + ")")
        self._unknown = re.compile(f"[^{_classes()['known']}]")
        self._numbers: dict[str, int] = {}
        self._first: NDArray[np.int64] = np.empty(0, np.int64)  # index of each word's first token in the arrays below
        self._counts: NDArray[np.int64] = np.empty(0, np.int64)
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._lengths: NDArray[np.int32] = np.empty(0, np.int32)

    @staticmethod
    def of(backend: Any) -> WordTokenizer | None:
        """A word cache for this tokenizer, or None if its kind is not supported or the check finds a difference."""
        description = json.loads(backend.to_str())
        normalizer = description["normalizer"] or {"type": "Sequence", "normalizers": []}
        nothing, form = normalizer.get("normalizers") == [], normalizer["type"]
        stages, tokens = _stages(description), description["added_tokens"]
        if not stages or not (nothing or form in get_args(Form)):
            return None
        if not tokens or any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in tokens):
            return None
        tokenizer = WordTokenizer(backend, stages, {t["content"]: t["id"] for t in tokens}, None if nothing else form)
        return tokenizer if tokenizer._agrees() else None

    def can(self, text: str) -> bool:
        """Whether `encode` supports all characters of a text."""
        if text.isascii():
            return True
        return not self._unknown.search(text) and (not self._form or unicodedata.is_normalized(self._form, text))

    def encode(self, texts: Sequence[str]) -> list[Encoded | None]:
        """The tokens of supported texts, without BOS or EOS; None for a text that the tokenizer shortens."""
        if len(self._numbers) > MAX_WORDS:
            self._numbers = {}
            self._first, self._counts = self._first[:0], self._counts[:0]
            self._ids, self._lengths = self._ids[:0], self._lengths[:0]
        words_of = [self._cut(text) for text in texts]
        self._learn(words_of)
        numbers = np.fromiter(map(self._numbers.__getitem__, itertools.chain.from_iterable(words_of)), np.int64)
        first, counts = self._first[numbers], self._counts[numbers]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        ids, lengths = self._ids[places], self._lengths[places]
        bounds = np.cumsum([len(words) for words in words_of], dtype=np.int64)
        stops = np.concatenate([np.zeros(1, np.int64), ends])[bounds]
        encoded = [Encoded(ids[a:b], lengths[a:b]) for a, b in itertools.pairwise([0, *stops.tolist()])]
        return [e if e.lengths.sum() == _num_bytes(text) else None for text, e in zip(texts, encoded, strict=True)]

    def _cut(self, text: str) -> list[str]:
        """The words of a text; each added token is one word."""
        words: list[str] = []
        for number, part in enumerate(self._split.split(text)):
            pieces = [part]
            if not number % 2 and len(self._stages) == 1:
                pieces = self._stages[0].findall(part)
            elif not number % 2:
                for stage in self._stages:
                    pieces = [word for piece in pieces for word in stage.split(piece) if word]
            words += pieces
        return words

    def _learn(self, words_of: Sequence[list[str]]) -> None:
        new = list(set(itertools.chain.from_iterable(words_of)).difference(self._numbers))
        if not new:
            return
        encodings = self._backend.encode_batch(new, add_special_tokens=False)
        lengths = [  # a token of the byte-level alphabet has one character per byte
            [_num_bytes(word)] if word in self._added else [len(token) for token in encoding.tokens]
            for word, encoding in zip(new, encodings, strict=True)
        ]
        counts = np.array([len(encoding.ids) for encoding in encodings], np.int64)
        self._numbers.update(zip(new, itertools.count(len(self._numbers))))
        self._first = np.concatenate([self._first, len(self._ids) + np.cumsum(counts) - counts])
        self._counts = np.concatenate([self._counts, counts])
        ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        self._ids = np.concatenate([self._ids, np.fromiter(ids, np.int32)])
        self._lengths = np.concatenate([self._lengths, np.array(list(itertools.chain(*lengths)), np.int32)])

    def _agrees(self) -> bool:
        """Compares with the tokenizer on all pairs of ASCII characters, on words, numbers, spaces and added tokens."""
        characters = [chr(code) for code in range(128)]
        known = [c for c in map(chr, _codes()) if self.can(c)]
        beyond = [f"a{c}b {c}{c} {c}1{c}.{c}\n{c}" for c in known[128:]]
        pairs = "".join(a + b for a in characters for b in characters)
        pieces = [
            "don't I'LL we've it's",
            "x  y   z\n\n\n  end ",
            "12345 6 78,901.5",
            "a\r\n\tb\x0b\x0c c",
            "CamelCase ",
        ]
        added = [f"a {word} b{word}{word}\n{word}" for word in self._added if word.isascii()][:50]
        mixed = [a + b + c for a in "a1 .\n'" for b in string.printable for c in "aS1 .\n'"]
        texts = [pairs, "".join(mixed), *mixed, *pieces, " ".join(pieces), *added, *beyond]
        texts = [text for text in texts if self.can(text)]
        plain = self._backend.encode_batch(texts, add_special_tokens=False)
        ours = self.encode(texts)
        compared = [(e.ids.tolist(), p.ids) for e, p in zip(ours, plain, strict=True) if e is not None]
        return len(compared) > len(texts) // 2 and all(mine == theirs for mine, theirs in compared)


def _stages(description: dict[str, Any]) -> list[re.Pattern[str]]:
    """The patterns with which the tokenizer splits text into words; empty if it is of an unsupported kind."""
    steps = description["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    last = steps[-1] if steps else {}
    if description["model"].get("dropout") or last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return []
    cuts: list[str] = []
    for step in steps[:-1]:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts.append(step["pattern"].get("Regex", r"\d"))  # a plain string: `_compiled` declines \d
        elif step["type"] == "Digits" and step["individual_digits"]:
            cuts.append(r"\p{N}")
        else:
            return []
    if last["use_regex"]:
        cuts.append(GPT2)
    if cuts == [r"\p{N}", GPT2]:
        # Both in one pattern: each digit is a word, and spaces before a digit split as at the end of the text.
        cuts = [r"\p{N}|" + GPT2.replace(r"| ?\p{N}+", "").replace(r"(?!\S)", r"(?![^\s\p{N}])")]
    stages = [_compiled(cut if len(cuts) == 1 else f"({cut})") for cut in cuts]
    return [stage for stage in stages if stage is not None] if None not in stages else []


def _compiled(pattern: str) -> re.Pattern[str] | None:
    r"""The tokenizer's pattern with `\p{…}` and `\s` replaced by character ranges; None if that is not possible."""
    classes, written, inside = _classes(), [], False
    for piece in re.split(r"(\\p\{\w+\}|\\.|\[\^?|\])", pattern):
        if piece in classes:
            written.append(classes[piece] if inside else f"[{classes[piece]}]")
            continue
        if piece == r"\S" and not inside:
            piece = f"[^{classes[SPACE]}]"
        elif re.fullmatch(r"\\p.*|\\[SwWdDbB]", piece):
            return None  # an unsupported class
        elif piece in ("[", "[^", "]"):
            inside = piece != "]"
        written.append(piece)
    try:
        return re.compile("".join(written))
    except re.error:
        return None


@functools.cache
def _classes() -> dict[str, str]:
    """Character ranges, to be used inside brackets, of the patterns' classes and of all known characters."""
    old = unicodedata.ucd_3_2_0
    settled = [c for c in map(chr, _codes()) if (kind := old.category(c)) != "Cn" and kind == unicodedata.category(c)]
    emoji = f"{chr(EMOJI[0])}-{chr(EMOJI[1] - 1)}"
    classes = {
        f"\\p{{{name}}}": _ranges([c for c in settled if unicodedata.category(c).startswith(name)])
        for name in ("L", "N", "Lu", "Ll", "M", "P", "S")
    }
    classes[r"\p{S}"] += emoji
    # Unicode white space; Python's isspace() also includes the four ASCII separators.
    classes[SPACE] = _ranges([c for c in settled if c.isspace() and not "\x1c" <= c <= "\x1f"])
    return {**classes, "known": _ranges(settled) + emoji}


def _codes() -> Iterator[int]:
    return (code for first, end in KNOWN_BLOCKS for code in range(first, end))


def _ranges(characters: Sequence[str]) -> str:
    """The characters as ranges, to be used inside brackets."""
    groups = itertools.groupby(enumerate(map(ord, characters)), lambda pair: pair[1] - pair[0])
    runs = [[code for _, code in group] for _, group in groups]
    return "".join(f"\\u{run[0]:04x}-\\u{run[-1]:04x}" for run in runs)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
