"""Small real tokenizers, one per family of chat template, trained on a few sentences when a test asks for them.

The templates are written in the manner of their families: ChatML with a default system prompt, ChatML that ignores
`add_generation_prompt`, Llama 3 (BOS, trimmed content), Gemma (system text inside the first user turn, role "model"),
Mistral (no assistant header, sentencepiece spaces), Qwen 3 (thinking dropped from earlier turns), Phi (an end token
that swallows the newline behind it). The `-marked` ones put `{% generation %}` marks around answer and stop token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_SENTENCES = [
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "system user assistant model tool: answer the question, explain it, and end the turn.",
    "def add(a, b):\n    return a + b\n\nNumbers: 0 1 2 3 4 5 6 7 8 9; signs < | > / [ ] _ # * ( ) { } ! ? - = & %",
    "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
]


@dataclass(frozen=True)
class Family:
    """What a test must know about a template to say what it should train."""

    template: str
    specials: tuple[str, ...]
    stop: str
    bos: str | None = None
    adds_bos: bool = False
    spaces: str = "byte-level"  # or "gemma", "mistral": how the tokenizer writes a space
    trims: bool = False  # the template trims the content of turns
    has_system: bool = True
    stop_strips: bool = False  # the stop token swallows the whitespace behind it
    thinks: str = ""  # what the template puts in front of the last answer


_CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

_CHATML_MARKED = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}
    {%- generation -%}
        {{ message['content'] + '<|im_end|>\\n' }}
    {%- endgeneration %}
{% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_CHATML_BARE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
)

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_LLAMA3_MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
    {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set opening = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set opening = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate user/assistant') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- opening if loop.first else '' }}ANSWER
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
_GEMMA_PLAIN = _GEMMA.replace("ANSWER", "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}")
_GEMMA_MARKED = _GEMMA.replace(
    "ANSWER",
    "{% if message['role'] == 'assistant' %}{% generation %}\n{{ message['content'] | trim }}{{ '<end_of_turn>' }}\n"
    "    {% endgeneration %}{{ '\\n' }}{% else %}{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endif %}",
)

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}"""

_QWEN3 = """\
{%- set last = namespace(query=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set last.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' and loop.index0 > last.query %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- message['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_PHI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

_IM = ("<|im_start|>", "<|im_end|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TURNS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA_FACTS: dict[str, Any] = {
    "specials": _TURNS, "stop": "<end_of_turn>", "bos": "<bos>", "adds_bos": True, "spaces": "gemma", "trims": True,
}  # fmt: skip
_LLAMA_FACTS: dict[str, Any] = {
    "specials": _HEADERS, "stop": "<|eot_id|>", "bos": "<|begin_of_text|>", "adds_bos": True, "trims": True,
}  # fmt: skip

FAMILIES = {
    "chatml": Family(_CHATML, _IM, "<|im_end|>"),
    "chatml-marked": Family(_CHATML_MARKED, _IM, "<|im_end|>"),
    "chatml-bare": Family(_CHATML_BARE, _IM, "<|im_end|>"),
    "llama3": Family(_LLAMA3, **_LLAMA_FACTS),
    "llama3-marked": Family(_LLAMA3_MARKED, **_LLAMA_FACTS),
    "gemma": Family(_GEMMA_PLAIN, **_GEMMA_FACTS),
    "gemma-marked": Family(_GEMMA_MARKED, **_GEMMA_FACTS),
    "mistral": Family(
        _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", True, spaces="mistral", has_system=False
    ),
    "qwen3": Family(_QWEN3, _IM, "<|im_end|>", thinks="<think>\n\n</think>\n\n"),
    "phi": Family(
        _PHI, ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", stop_strips=True
    ),
}


@functools.cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family. Callers must not change it."""
    family = FAMILIES[name]
    inner = _train(family.spaces)
    words = [
        AddedToken(word, special=True, normalized=False, rstrip=family.stop_strips and word == family.stop)
        for word in family.specials
    ]
    inner.add_special_tokens(words)
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if family.adds_bos:
        assert family.bos is not None
        inner.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, inner.token_to_id(family.bos))]
        )
    eos = next(
        word for word in (*family.specials, family.stop) if word in ("<eos>", "</s>", "<|endoftext|>", family.stop)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=family.bos,
        eos_token=eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _train(spaces: str) -> Tokenizer:
    inner = Tokenizer(models.BPE(unk_token=None if spaces == "byte-level" else "<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if spaces == "byte-level":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    else:
        alphabet = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
        if spaces == "gemma":
            inner.normalizer = normalizers.Replace(" ", "▁")
            inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        else:
            inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            strip = decoders.Strip(content=" ", left=1, right=0)
            inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=alphabet,
        special_tokens=[] if spaces == "byte-level" else ["<unk>"],
        show_progress=False,
    )
    inner.train_from_iterator(_SENTENCES, trainer)
    return inner
