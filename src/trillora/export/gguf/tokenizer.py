"""A tokenizer as metadata of a GGUF file.

    tokenizer_metadata(tokenizer, num_tokens=49152, template=…, stops=(2,)).values
    {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": […], …}

llama.cpp has two tokenizers for these models. `gpt2` splits text by a rule that it knows by name (`pre`) and merges
bytes by the list of merges. `llama` merges characters by the score of the result, as sentencepiece does. The rule is
found by comparing how the tokenizer splits text with `SPLITS`; one that is not there is refused, because llama.cpp
would silently fall back to a different rule. Each entry was compared with llama.cpp's ids
(`tests/export/test_gguf_tokenizer.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trillora.errors import TrilloraError

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, as in llama.cpp
SPACE = "▁"

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASES = rf"{_FIRST}{_UPPER}*{_LOWER}+%s|{_FIRST}{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
_CASES_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Steps that split text before bytes are merged -> name in llama.cpp. "bytes" is GPT-2's own rule, "digits" splits off
# each digit, anything else is a regular expression whose matches are split off.
SPLITS: dict[tuple[str, ...], str] = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (rf"{_ENGLISH}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}{_END}",): "llama-bpe",
    (rf"{_ENGLISH}|{_FIRST}\p{{L}}+|\p{{N}}{_END}",): "qwen2",
    (_CASES % ("", "", "") + _CASES_END,): "tekken",
    (_CASES % (f"{_ENGLISH}?", f"{_ENGLISH}?", "{1,3}") + _CASES_END,): "gpt-4o",
}
# Rules with which llama.cpp takes a whole word of the vocabulary before it merges (`ignore_merges`), and the name of
# the same rule without that.
WHOLE_WORDS = {"llama-bpe": "dbrx", "tekken": None}
KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # the white space after them stays, in Phi-3
APPROXIMATE = ("tekken", "gpt-4o")  # llama.cpp's rules know the case of ASCII letters only, and no combining marks


@dataclass(frozen=True)
class TokenizerMetadata:
    values: dict[str, Any]  # by key
    notes: tuple[str, ...]
    strips_after: bool = False  # special tokens remove the white space after them, as in Phi-3


def tokenizer_metadata(
    tokenizer: Tokenizer,
    num_tokens: int,
    *,
    template: str | None = None,
    stops: Iterable[int] = (),
    adds_bos: bool,
) -> TokenizerMetadata:
    """`num_tokens`: rows of the embedding, each of which needs a token. `stops`: tokens that end an answer.
    `adds_bos`: whether BOS is put before every text."""
    described = _described(tokenizer)
    added = {int(token["id"]): token for token in described["added_tokens"]}
    words = _words(described["model"], added, num_tokens)
    byte_fallback = described["model"].get("byte_fallback") is True
    values, notes = _sentencepiece(described, words, num_tokens) if byte_fallback else _byte_level(described)
    strips_after = _strips_after(added.values())
    if not strips_after:
        notes += _check_white_space(added.values(), template)
    beyond = sorted(id for id in [*described["model"]["vocab"].values(), *added] if id >= num_tokens)
    if beyond:
        notes.append(f"the model has no embedding for {len(beyond)} of the tokenizer's tokens; they are left out")
    encoded = tokenizer("a")["input_ids"]
    result = {
        "model": values.pop("model"),
        "pre": values.pop("pre"),
        "tokens": [words.get(id, f"[PAD{id}]") for id in range(num_tokens)],
        "token_type": [_type(id, words, added, described["model"], byte_fallback) for id in range(num_tokens)],
        **values,
        **_special_ids(tokenizer, num_tokens, stops),
        "add_bos_token": adds_bos,
        "add_eos_token": tokenizer.eos_token_id is not None and encoded[-1:] == [tokenizer.eos_token_id],
    }
    if not adds_bos and tokenizer.bos_token_id is not None and encoded[:1] == [tokenizer.bos_token_id]:
        notes.append("BOS is not added to text, because the chats of the training have none; the tokenizer adds it")
    if len(set(result["tokens"])) != num_tokens:
        raise _refused("two of its tokens have the same text")
    keyed = {f"tokenizer.ggml.{key}": value for key, value in result.items()}
    if template is not None:
        keyed["tokenizer.chat_template"] = without_marks(template)
    return TokenizerMetadata(keyed, tuple(notes), strips_after)


def without_marks(template: str) -> str:
    """The template without generation marks, which llama.cpp does not know. White space around them stays as it is."""
    start = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", template)
    return re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", start)


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused("it is not a tokenizer of the tokenizers library (tokenizer.json)")
    described = json.loads(backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise _refused(f"its model is {model['type']}, and GGUF is written for BPE only")
    if any(model.get(option) for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise _refused("it drops merges or marks parts of words")
    return described


def _refused(why: str) -> TrilloraError:
    known = ", ".join(dict.fromkeys([*SPLITS.values(), "sentencepiece with byte tokens (Llama 2, Mistral, Gemma)"]))
    return TrilloraError(
        f"This tokenizer cannot be written as GGUF: {why}.",
        where="tokenizer.json of the base model",
        do="use --to merged, which writes the model for transformers and vLLM. "
        f"Tokenizers that were compared with llama.cpp: {known}",
    )


def _words(model: Mapping[str, Any], added: Mapping[int, Any], num_tokens: int) -> dict[int, str]:
    words = {id: word for word, id in model["vocab"].items() if id < num_tokens}
    words |= {id: token["content"] for id, token in added.items() if id < num_tokens}
    return words


def _type(id: int, words: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any], fallback: bool) -> int:
    if id not in words:
        return UNUSED
    if fallback and words[id] == model.get("unk_token"):
        return UNKNOWN
    if id in added:
        return CONTROL if added[id]["special"] else USER
    return BYTE if fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", words[id]) else NORMAL


def _merges(model: Mapping[str, Any]) -> list[list[str]]:
    """Each as its two halves. Older files have them as one text with a space."""
    return [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model["merges"]]


def _byte_level(described: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    normalizer = _steps(described.get("normalizer"), "normalizers")
    if [step["type"] for step in normalizer] == ["NFC"]:
        notes.append(
            "the tokenizer composes Unicode characters (NFC) and llama.cpp does not: text in another form differs"
        )
    elif normalizer:
        raise _refused(f"it changes the text first ({normalizer[0]['type']})")
    splits = tuple(_split(step) for step in _steps(described.get("pre_tokenizer"), "pretokenizers"))
    pre = SPLITS.get(splits[:-1] if splits[-1:] == ("",) else splits)
    if pre is None:
        raise _refused("llama.cpp has no rule that splits text as it does, or none that was compared")
    if pre in WHOLE_WORDS and not described["model"].get("ignore_merges"):
        pre = WHOLE_WORDS[pre]
    elif pre not in WHOLE_WORDS and described["model"].get("ignore_merges"):
        pre = None
    if pre is None:
        raise _refused("it treats whole words of the vocabulary differently from llama.cpp")
    if pre in APPROXIMATE:
        notes.append(f"llama.cpp's rule '{pre}' splits words with accented capitals or combining marks differently")
    merges = [" ".join(pair) for pair in _merges(described["model"])]
    return {"model": "gpt2", "pre": pre, "merges": merges}, notes


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _split(step: Mapping[str, object]) -> str:
    """One step as in `SPLITS`; "" for bytes without a rule, which is always last."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return "bytes" if use_regex else ""
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return str(regex)
    return f"unknown: {step['type']}"


def _sentencepiece(
    described: Mapping[str, Any], words: Mapping[int, str], num_tokens: int
) -> tuple[dict[str, Any], list[str]]:
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in described["model"]["vocab"]]
    if missing:
        raise _refused(f"it has no token for {len(missing)} of the 256 bytes")
    prefix, notes = _prefix(described)
    # llama.cpp merges the pair whose result has the highest score. So a token's score is the place of its first merge.
    order: dict[str, int] = {}
    for left, right in _merges(described["model"]):
        order.setdefault(left + right, len(order))
    scores = [-float(order.get(words.get(id, ""), len(order))) for id in range(num_tokens)]
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}, notes


def _prefix(described: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether a space is put before text at the start and after special tokens."""
    normalizer = [_plain(step) for step in _steps(described.get("normalizer"), "normalizers")]
    splits = [_plain(step) for step in _steps(described.get("pre_tokenizer"), "pretokenizers")]
    replace, prepend = ("Replace", " ", SPACE), ("Prepend", SPACE)
    by_space = ("Split", " ", "MergedWithPrevious")  # has no effect after all spaces were replaced
    match normalizer, splits:
        case ([r], []) | ([r], [_]) if r == replace and splits in ([], [by_space]):
            return False, []
        case ([p, r], []) if (p, r) == (prepend, replace):
            return True, []
        case ([], [("Metaspace", "always", False)]):
            return True, []
        case ([], [("Metaspace", "never", False)]):
            return False, []
        case ([], [("Metaspace", "first", False)]):
            # Only at the start of a text that does not begin with a special token, which llama.cpp cannot do. Chats
            # begin with one.
            note = "text that does not start with a special token gets no space before it, unlike in transformers"
            return False, [note]
    raise _refused("llama.cpp has no rule that treats spaces as it does")


def _plain(step: Mapping[str, object]) -> tuple[Any, ...]:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return "Replace", old, new
        case {"type": "Prepend", "prepend": text}:
            return "Prepend", text
        case {"type": "Split", "pattern": {"String": text}, "behavior": behavior, "invert": False}:
            return "Split", text, behavior
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}:
            return "Metaspace", scheme, split
    return (step["type"], "unknown")


def _strips_after(added: Iterable[Mapping[str, object]]) -> bool:
    """Whether the white space after special tokens is removed exactly as llama.cpp does it for Phi-3."""
    tokens = list(added)
    stripping = [token["rstrip"] and token["content"] not in KEEPS_SPACE for token in tokens]
    others = any(token["lstrip"] or token["single_word"] for token in tokens)
    expected = [token["content"] not in KEEPS_SPACE for token in tokens]
    return any(stripping) and stripping == expected and not others


def _check_white_space(added: Iterable[Mapping[str, Any]], template: str | None) -> list[str]:
    """llama.cpp keeps the white space around added tokens."""
    greedy = [token["content"] for token in added if token["lstrip"] or token["rstrip"] or token["single_word"]]
    used = [word for word in greedy if template and word in template]
    if used:
        raise _refused(f"its token {used[0]} removes the white space around it, and the chat template uses it")
    return [f"llama.cpp keeps the white space around the token {word}" for word in greedy[:3]]


def _special_ids(tokenizer: Tokenizer, num_tokens: int, stops: Iterable[int]) -> dict[str, Any]:
    """Ids of special tokens."""
    named = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    found = {name: getattr(tokenizer, attribute, None) for name, attribute in named.items()}
    ids = {name: int(id) for name, id in found.items() if id is not None and 0 <= id < num_tokens}
    # eos ends a text. A chat may end its turns with another token, which llama.cpp calls eot.
    others = [stop for stop in stops if stop != ids.get("eos")]
    if "eos" not in ids and others:
        ids["eos"] = others.pop(0)
    result: dict[str, Any] = {f"{name}_token_id": id for name, id in ids.items()}
    if others:
        result["eot_token_id"] = others[0]
    return result
