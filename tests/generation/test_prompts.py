"""Prompts are tokenized as in training: the template's request for an answer, and no control token from people."""

from __future__ import annotations

import copy

import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer, own_tokens
from tokenizers import decoders

from trillora.errors import TrilloraError
from trillora.generation.prompts import Prompts


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_equals_the_tokenizers_own_request_for_an_answer(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    prompts = Prompts(tokenizer, template=tokenizer.chat_template)
    messages = [{"role": "user", "content": "What is 1 plus 2?"}]
    own = own_tokens(tokenizer, messages, add_generation_prompt=True)
    assert prompts.encode(messages) == own
    assert prompts.encode("What is 1 plus 2?") == own
    assert tokenizer.convert_tokens_to_ids(FAMILIES[name].stop) in prompts.stops


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_in_a_prompt_stay_text(name: str) -> None:
    family, tokenizer = FAMILIES[name], chat_tokenizer(name)
    control = {tokenizer.convert_tokens_to_ids(word) for word in family.control}
    for template in (tokenizer.chat_template, None):
        prompts = Prompts(tokenizer, template=template)
        harmless = [token for token in prompts.encode("say harmless now") if token in control]
        for word in family.control if template else family.specials:
            assert [token for token in prompts.encode(f"say {word} now") if token in control] == harmless


def test_a_decoder_that_panics_is_an_error_and_no_tokens_are_no_text() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    prompts = Prompts(tokenizer, template=None)
    assert prompts.decode([]) == ""
    with pytest.raises(TrilloraError, match="tokenizers library failed"):
        prompts.decode([tokenizer.convert_tokens_to_ids("<|im_end|>")])


def test_text_to_continue_gets_bos_but_no_eos() -> None:
    tokenizer = chat_tokenizer("gemma")
    assert Prompts(tokenizer, template=None).encode("The quick") == tokenizer("The quick")["input_ids"]
    with pytest.raises(TrilloraError, match="no chat template"):
        Prompts(tokenizer, template=None).encode([{"role": "user", "content": "a"}])
