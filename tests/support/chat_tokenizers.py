"""Small real tokenizers, one per family of chat templates, trained on a few sentences on first use.

The templates imitate their families: ChatML with a default system prompt, ChatML that ignores `add_generation_prompt`,
Llama 3 (BOS, trimmed content) and 3.1 (one call per turn, results from "ipython"), Gemma (system text inside the first
user turn, role "model"), Mistral (no assistant header, sentencepiece spaces; tools and system text at the last
question), Qwen 3 (thinking dropped from earlier rounds, tool results in a user turn), Phi (an end token that swallows
the newline after it), Zephyr (headers that are not tokens), SmolVLM (content is a list of parts), DeepSeek V3 (no
header after tool results) and R1 (its generation prompt opens a <think> that it never writes). The `-marked` ones have
`{% generation %}` marks around answer and stop token. A Python function next to each template gives the text of its
assistant.
"""
# ruff: noqa: RUF001  (DeepSeek spells its tokens with the full-width bar)

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]

_SENTENCES = [
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "system user assistant model tool: answer the question, explain it, and end the turn.",
    "def add(a, b):\n    return a + b\n\nNumbers: 0 1 2 3 4 5 6 7 8 9; signs < | > / [ ] _ # * ( ) { } ! ? - = & %",
    "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
]


@dataclass(frozen=True)
class Family:
    """What a test must know about a template to predict what is trained."""

    template: str
    specials: tuple[str, ...]  # flagged as special by the tokenizer
    stop: str
    bos: str | None = None
    adds_bos: bool = False
    spaces: str = "byte-level"  # or "gemma", "mistral": how the tokenizer writes a space
    trims: bool = False  # the template trims the content of turns
    has_system: bool = True
    stop_strips: bool = False  # the stop token swallows the whitespace after it
    num_calls: int = 0  # maximum in one turn; 0: the family has no tools
    thinks: bool = False  # the template supports thinking, in `reasoning_content` or between <think> and </think>
    drops_thinking: bool = False  # the template leaves it out: `reasoning_content` is refused
    opens: bool = True  # a conversation may begin with the assistant
    says: Callable[[Messages, int], str] | None = None  # the assistant's text in a turn, if not content and stop
    marks: tuple[str, ...] = ()  # added tokens that the template writes, not flagged as special
    own: tuple[str, ...] = ()  # marks that the model itself writes: its answers may have them

    @property
    def control(self) -> tuple[str, ...]:
        return (*self.specials, *self.marks)

    def speech(self, messages: Messages) -> list[str]:
        """The text of each assistant turn, including its stop token."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [self.says(messages, i) if self.says else self._content(messages[i]) + self.stop for i in turns]

    def _content(self, message: dict[str, Any]) -> str:
        content: str = message["content"]
        return content.strip() if self.trims else content


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

_PARTS = """\
{{- '<|im_start|>' -}}
{%- for message in messages -%}
    {{- message['role'] | capitalize + ':' -}}
    {%- if message['content'][0]['type'] != 'image' -%}{{- ' ' -}}{%- endif -%}
    {%- for part in message['content'] -%}
        {%- if part['type'] == 'text' -%}{{- part['text'] -}}
        {%- elif part['type'] == 'image' -%}{{- '<image>' -}}{%- endif -%}
    {%- endfor -%}
    {{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""


def _parts_says(messages: Messages, turn: int) -> str:
    return f" {messages[turn]['content']}<end_of_utterance>"


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

_LLAMA3_TOOLS = """\
{{- bos_token }}
{%- set first = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- 'Knowledge ends in 2023.\\n\\n' + first + '<|eot_id|>' }}
{%- set written = namespace(tools=false) %}
{%- for message in turns %}
    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message['tool_calls'] %}
        {%- if message['tool_calls'] | length > 1 %}{{ raise_exception('one call in a turn') }}{% endif %}
        {%- set call = message['tool_calls'][0]['function'] %}
        {%- if call['name'] == 'search' %}
            {{- '<|python_tag|>search.call(' }}
            {%- for key, value in call['arguments'] | items %}
                {{- key + '="' + value ~ '"' + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ')<|eom_id|>' }}
        {%- else %}
            {{- '{"name": "' + call['name'] + '", "parameters": ' + (call['arguments'] | tojson) + '}<|eot_id|>' }}
        {%- endif %}
    {%- else %}
        {%- if tools and role == 'user' and not written.tools %}
            {%- set written.tools = true %}
            {{- 'Call one of these functions with JSON, where it helps.\\n\\n' }}
            {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""


def _llama3_says(messages: Messages, turn: int) -> str:
    message = messages[turn]
    if not message.get("tool_calls"):
        return str(message["content"]).strip() + "<|eot_id|>"
    call = message["tool_calls"][0]["function"]
    if call["name"] == "search":
        arguments = ", ".join(f'{key}="{value}"' for key, value in call["arguments"].items())
        return f"<|python_tag|>search.call({arguments})<|eom_id|>"
    return f'{{"name": "{call["name"]}", "parameters": {_json(call["arguments"])}}}<|eot_id|>'


_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}"""

_MISTRAL_TOOLS = """\
{%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{%- set last = namespace(question=-1) %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- set is_last = loop.index0 == last.question %}
        {%- if tools and is_last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + (first if is_last else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (message['content'] | tojson) }}
        {{- ', "call_id": "' + message['tool_call_id'] + '"}[/TOOL_RESULTS]' }}
    {%- elif message['tool_calls'] %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message['tool_calls'] %}
            {%- if call['id'] | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
            {{- '{"name": ' + (call['function']['name'] | tojson) }}
            {{- ', "arguments": ' + (call['function']['arguments'] | tojson) + ', "id": "' + call['id'] + '"}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""


def _mistral_says(messages: Messages, turn: int) -> str:
    message = messages[turn]
    if not message.get("tool_calls"):
        return f" {message['content']}</s>"
    calls = [{**call["function"], "id": call["id"]} for call in message["tool_calls"]]
    return f"[TOOL_CALLS] {_json(calls)}</s>"


_QWEN3 = """\
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') + 'Functions to call:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nWrite a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif first %}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message['content'] or '' %}
    {%- if message['role'] == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message['role'] == 'tool' %}
        {%- if loop.previtem['role'] != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem['role'] != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- set thought = message['reasoning_content'] or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
            {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def _qwen3_says(messages: Messages, turn: int) -> str:
    message, last_question = messages[turn], max(i for i, m in enumerate(messages) if m["role"] == "user")
    content, thought = message["content"] or "", message.get("reasoning_content") or ""
    if not thought and "</think>" in content:
        thought = content.partition("</think>")[0].rpartition("<think>")[2]
        content = content.rpartition("</think>")[2].lstrip("\n")
    written = content
    if turn > last_question and (thought or turn == len(messages) - 1):
        stripped = thought.strip("\n")  # without thinking, the template writes an empty block: the template's text
        written = (f"<think>\n{stripped}\n</think>\n\n" if stripped else "") + content.lstrip("\n")
    calls = [
        f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {_json(c["arguments"])}}}\n</tool_call>'
        for c in (call["function"] for call in message.get("tool_calls", []))
    ]
    return written + ("\n" if content and calls else "") + "\n".join(calls) + "<|im_end|>"


_PHI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

_ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}"""

_DEEPSEEK = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{% endif %}
{%- if tools %}{{- '\\n\\n## Functions\\n' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'tool' %}
        {%- if loop.previtem['role'] != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{% endif %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or loop.nextitem['role'] != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if loop.first or loop.previtem['role'] != 'tool' %}{{- '<｜Assistant｜>' }}{% endif %}
        {{- THOUGHTLESS }}
        {%- if message['tool_calls'] %}{{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message['tool_calls'] %}
                {{- '' if loop.first else '\\n' }}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
                {{- (call['function']['arguments'] | tojson) + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{- '<｜Assistant｜>' }}OPENING{% endif %}"""
_DEEPSEEK_V3 = _DEEPSEEK.replace("THOUGHTLESS", "message['content'] or ''").replace("OPENING", "")
_DEEPSEEK_R1 = _DEEPSEEK.replace(
    "THOUGHTLESS", "(message['content'] or '').split('</think>')[-1].lstrip('\\n')"
).replace("OPENING", "{{- '<think>\\n' }}")


def _deepseek_says(messages: Messages, turn: int) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c['name']}\n```json\n{_json(c['arguments'])}\n```<｜tool▁call▁end｜>"
        for c in (call["function"] for call in messages[turn].get("tool_calls", []))
    ]
    written = "\n".join(calls)
    answer = messages[turn]["content"] or ""
    return answer + (f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else "") + "<｜end▁of▁sentence｜>"


def _r1_says(messages: Messages, turn: int) -> str:
    answer = (messages[turn]["content"] or "").rpartition("</think>")[2].lstrip("\n")
    return _deepseek_says([{**messages[turn], "content": answer}], 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_IM = ("<|im_start|>", "<|im_end|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TURNS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]")
_TOOLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEP = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEP_CALLS = (
    "<｜tool▁sep｜>",
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call") for end in ("begin", "end")),
)
_DEEP_MARKS = (
    *("<｜User｜>", "<｜Assistant｜>", *_DEEP_CALLS),
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("outputs", "output") for end in ("begin", "end")),
)
_THINKING = ("<think>", "</think>")
_CALLS = ("<tool_call>", "</tool_call>")
# Added to every tokenizer, but not flagged as special: content may use them, unless they are marks of the template.
_VOCABULARY = (*_THINKING, *_CALLS)
_QWEN_MARKS = (*_VOCABULARY, "<tool_response>", "</tool_response>")
_GEMMA_FACTS: dict[str, Any] = {
    "specials": _TURNS, "stop": "<end_of_turn>", "bos": "<bos>", "adds_bos": True, "spaces": "gemma", "trims": True,
    "opens": False,
}  # fmt: skip
_LLAMA_FACTS: dict[str, Any] = {
    "specials": _HEADERS, "stop": "<|eot_id|>", "bos": "<|begin_of_text|>", "adds_bos": True, "trims": True,
}  # fmt: skip
_DEEPSEEK_FACTS: dict[str, Any] = {
    "specials": _DEEP, "stop": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>", "adds_bos": True,
    "num_calls": 3,
}  # fmt: skip
_MISTRAL_FACTS: dict[str, Any] = {
    "stop": "</s>", "bos": "<s>", "adds_bos": True, "spaces": "mistral", "opens": False, "says": _mistral_says,
}  # fmt: skip

FAMILIES = {
    "chatml": Family(_CHATML, _IM, "<|im_end|>"),
    "chatml-marked": Family(_CHATML_MARKED, _IM, "<|im_end|>"),
    "chatml-bare": Family(_CHATML_BARE, _IM, "<|im_end|>", opens=False),
    "llama3": Family(_LLAMA3, **_LLAMA_FACTS),
    "llama3-marked": Family(_LLAMA3_MARKED, **_LLAMA_FACTS),
    "llama3-tools": Family(
        _LLAMA3_TOOLS,
        **{**_LLAMA_FACTS, "specials": (*_HEADERS, "<|eom_id|>", "<|python_tag|>")},
        num_calls=1,
        says=_llama3_says,
    ),
    "gemma": Family(_GEMMA_PLAIN, **_GEMMA_FACTS),
    "gemma-marked": Family(_GEMMA_MARKED, **_GEMMA_FACTS),
    "mistral": Family(_MISTRAL, _INST, has_system=False, **_MISTRAL_FACTS),
    "mistral-tools": Family(_MISTRAL_TOOLS, (*_INST, *_TOOLS), num_calls=3, **_MISTRAL_FACTS),
    "qwen3": Family(
        _QWEN3, _IM, "<|im_end|>", num_calls=3, thinks=True, says=_qwen3_says, marks=_QWEN_MARKS, own=_VOCABULARY
    ),
    "phi": Family(
        _PHI, ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", stop_strips=True
    ),
    "parts": Family(_PARTS, ("<|im_start|>", "<end_of_utterance>", "<image>"), "<end_of_utterance>", says=_parts_says),
    "zephyr": Family(_ZEPHYR, ("<s>", "</s>"), "</s>", "<s>", spaces="mistral"),
    "deepseek": Family(_DEEPSEEK_V3, **_DEEPSEEK_FACTS, says=_deepseek_says, marks=_DEEP_MARKS, own=_DEEP_CALLS),
    "deepseek-r1": Family(
        _DEEPSEEK_R1,
        **_DEEPSEEK_FACTS,
        thinks=True,
        drops_thinking=True,
        opens=False,
        says=_r1_says,
        marks=(*_DEEP_MARKS, *_THINKING),
        own=(*_DEEP_CALLS, *_THINKING),
    ),
}


@functools.cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family. Callers must not modify it."""
    family = FAMILIES[name]
    inner = Tokenizer.from_str(_trained(family.spaces))
    words = [
        AddedToken(word, special=True, normalized=False, rstrip=family.stop_strips and word == family.stop)
        for word in family.specials
    ]
    inner.add_special_tokens(words)
    inner.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys((*_VOCABULARY, *family.marks))])
    if family.adds_bos:
        assert family.bos is not None
        inner.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, inner.token_to_id(family.bos))]
        )
    eos = next(word for word in family.specials if word in ("<eos>", "</s>", "<|endoftext|>", family.stop))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=family.bos,
        eos_token=eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _trained(spaces: str) -> str:
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
    return inner.to_str()


_WORDS = [
    *("Paris", "the", "answer:", "is", "42.", "def", "f(x):", "\n", "\n\n", "  ", "fox", "<", "|", "x<y", "[1]", "end"),
    *("<|user|>", "assistant", '"quoted"', "back\\slash"),
]
_BEYOND_ASCII = ["naïve", "東京", "🙂", "ș"]
_TOOL_NAMES = ("weather", "search", "add_numbers")


def some_text(rng: random.Random, family: Family) -> str:
    specials = set(family.specials)  # planted tokens have their own tests
    words = [word for word in _WORDS if word not in specials]
    words += _BEYOND_ASCII if family.spaces == "byte-level" else []
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, 12))).lstrip() or "fox"


def some_conversation(rng: random.Random, family: Family) -> dict[str, Any]:
    """A row with messages of every kind in the family, and tools if some are called."""
    messages: Messages = []
    if family.has_system and rng.random() < 0.5:
        messages.append({"role": "system", "content": some_text(rng, family)})
    has_tools = family.num_calls > 0 and rng.random() < 0.6
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": some_text(rng, family)})
        while has_tools and rng.random() < 0.4:
            messages += _some_calls(rng, family)
        messages.append(_some_answer(rng, family))
    if rng.random() < 0.2:
        messages.append({"role": "user", "content": some_text(rng, family)})
    return (
        {"messages": messages, "tools": [some_tool(name) for name in _TOOL_NAMES]}
        if has_tools
        else {"messages": messages}
    )


def some_tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "of the world"}}}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def _some_answer(rng: random.Random, family: Family) -> dict[str, Any]:
    answer = some_text(rng, family)
    chance = rng.random() if family.thinks else 1.0
    thought = answer.strip() if rng.random() < 0.2 else some_text(rng, family)  # thinking and answer may be equal
    if chance < 0.3 and not family.drops_thinking:
        return {"role": "assistant", "content": answer, "reasoning_content": thought}
    if chance < 0.6:
        answer = f"<think>\n{thought}\n</think>\n\n{answer}"
    return {"role": "assistant", "content": answer}


def _some_calls(rng: random.Random, family: Family) -> Messages:
    """An assistant turn with calls, and the tool turns after it."""
    turn = _some_answer(rng, family)
    if rng.random() < 0.5:
        turn["content"] = None if rng.random() < 0.5 else ""
    values: list[Any] = [some_text(rng, family), 7, 1.5, True, None, ["a", {"b": "c"}], ""]
    turn["tool_calls"], answers = [], []
    for _ in range(rng.randint(1, family.num_calls)):
        arguments = {key: rng.choice(values) for key in rng.sample(["city", "name", "unit"], rng.randint(0, 3))}
        call_id = "".join(rng.choice("abc012") for _ in range(9))
        function = {"name": rng.choice(_TOOL_NAMES), "arguments": arguments}
        turn["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        answers.append({"role": "tool", "content": some_text(rng, family), "tool_call_id": call_id})
    return [turn, *answers]


def own_tokens(tokenizer: Any, messages: Messages, **arguments: Any) -> list[int]:
    """The tokens of the tokenizer's own template, in the form in which it takes the text."""
    if tokenizer.chat_template == FAMILIES["parts"].template:
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    return list(tokenizer.apply_chat_template(messages, **arguments, tokenize=True, return_dict=False))
