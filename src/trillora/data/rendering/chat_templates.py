"""Chat templates that a recipe can choose for a tokenizer without one: `data.chat_template: chatml`.

Each has generation marks around the assistant's text and ends its turn with a token that the tokenizer must have: a
token of the model family for `chatml`, `llama3` and `gemma`, the EOS token for `zephyr` and `instruct`, which work
with any base model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from trillora.errors import TrilloraError, nearest
from trillora.files.read_json import read_text

MAX_TEMPLATE_BYTES = 1 << 20  # the largest known ones have 30 kB

_TURNS = """\
{%- for message in messages %}
    {{- HEADER }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- (message['content'] | trim) + STOP }}{%- endgeneration %}
    {%- else %}{{- (message['content'] | trim) + STOP }}{%- endif %}
ENDING
{%- endfor %}
{%- if add_generation_prompt %}{{- PROMPT }}{%- endif %}"""


def _turns(
    header: str, stop: str, prompt: str, opening: str = "", ending: str = "    {{- '\\n' }}\n"
) -> tuple[str, tuple[str, ...]]:
    """A template that writes every turn in the same form: header, content, stop; and the tokens it needs."""
    template = _TURNS.replace("HEADER", header).replace("STOP", stop).replace("ENDING\n", ending)
    return opening + template.replace("PROMPT", prompt), tuple(re.findall(r"<[^<>' ]+>", header + stop))


_INSTRUCT = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- (message['content'] | trim) + '\\n\\n' }}
    {%- elif message['role'] == 'user' %}
        {{- '### Instruction:\\n' + (message['content'] | trim) + '\\n\\n### Response:\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- (message['content'] | trim) + eos_token }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}{{- raise_exception('this template has no turn for the role ' + message['role']) }}
    {%- endif %}
{%- endfor %}"""

# name -> (template, words the tokenizer must have as tokens of their own)
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": _turns("'<|im_start|>' + message['role'] + '\\n'", "'<|im_end|>'", "'<|im_start|>assistant\\n'"),
    "llama3": _turns(
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'",
        "'<|eot_id|>'",
        "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
        "{{- bos_token }}",
        ending="",
    ),
    "gemma": _turns(
        "'<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n'",
        "'<end_of_turn>'",
        "'<start_of_turn>model\\n'",
        "{{- bos_token }}",
    ),
    "zephyr": _turns("'<|' + message['role'] + '|>\\n'", "eos_token", "'<|assistant|>\\n'"),
    "instruct": (_INSTRUCT, ()),
}


def find_template(name: str, words: Collection[str], eos: str | None) -> str:
    """The text of a template, by name or from a file. Raises if the tokenizer lacks a token that a named one needs."""
    if "/" in name or name.endswith((".jinja", ".j2", ".txt")):
        do = f"write the path of a .jinja file in data.chat_template, or one of the names {' '.join(NAMED)}"
        return read_text(Path(name), do=do, max_bytes=MAX_TEMPLATE_BYTES)
    if name not in NAMED:
        guess = nearest(name, NAMED)
        hint = f"did you mean '{guess}'? " if guess else ""
        do = f"{hint}names: {' '.join(NAMED)}; or write the path of a .jinja file"
        raise TrilloraError(f"There is no chat template '{name}'.", where="data.chat_template", do=do)
    template, needed = NAMED[name]
    missing = [word for word in needed if word not in words]
    do = "use zephyr or instruct, which end a turn with the tokenizer's EOS token"
    if not needed and eos is None:
        missing, do = ["an EOS token"], "use a model whose tokenizer has an EOS token"
    if missing:
        what = f"The chat template '{name}' needs {' and '.join(missing)}, which this tokenizer does not have."
        raise TrilloraError(what, where="data.chat_template", do=do)
    return template
