"""What a row has that is not trained on: keys that its format does not read, fields that the chat template leaves out.

    {"question": "1+1?", "answer": "2", "context": "arithmetic"}     '"context" is not used'

Each is a remark, counted over all rows and shown once. Thinking is different. If a template writes none, the model
would learn to answer without it, so the row is refused; `data.thinking: drop` says that this is intended. A template
that writes the thinking of the last round only, such as Qwen 3's, or removes it from the content, as DeepSeek R1's
does, gets a remark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from trillora.data.rendering.formats import ARGUMENTS_KEY, REASONING_KEYS, SYSTEM_KEYS, TURN_KEYS, Row
from trillora.data.rendering.json_values import shortened
from trillora.data.rendering.preferences import LABELLED, PREFERENCE, SIDE_KEYS
from trillora.data.rendering.sandbox import CLOSE, OPEN, ChatTemplate
from trillora.data.rows import BadRow, Chat, Message

_OF_ALL_CHATS = frozenset((*SYSTEM_KEYS, "tools", ARGUMENTS_KEY))
_READ = {
    "messages": _OF_ALL_CHATS | frozenset(TURN_KEYS),
    "sharegpt": _OF_ALL_CHATS | frozenset(TURN_KEYS),
    "ultrachat": frozenset(("data", "tools", *SYSTEM_KEYS)),
    "prompt-completion": _OF_ALL_CHATS | {"prompt", "completion", "response"},
    "alpaca": _OF_ALL_CHATS | {"instruction", "input", "output", "history"},
    "question-answer": _OF_ALL_CHATS | {"question", "answer", "response"},
    "text": frozenset(("text",)),
}
_QUESTIONS = frozenset(("prompt", "question", "instruction", "input", "history"))
_READ[PREFERENCE] = _OF_ALL_CHATS | _QUESTIONS | SIDE_KEYS | frozenset(TURN_KEYS)
_READ[LABELLED] = frozenset().union(*_READ.values(), ("label",)) - SIDE_KEYS - {"text"}
_WITH_TURNS = (*TURN_KEYS, "prompt", "completion", "response", *sorted(SIDE_KEYS))
_READ_IN_TURNS = frozenset(
    ("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "weight", "train", *REASONING_KEYS)
)
_ABSENT: tuple[object, ...] = (None, "", [], {})
_THOUGHT = re.compile(r"\S.*</think>", re.DOTALL)
_MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


def unused_keys(row: Row, format: str, weight_key: str | None) -> list[str]:
    """A remark for each key of the row, and of its turns, that has a value which is not used."""
    read = _READ[format]
    found = [key for key, value in row.items() if value not in _ABSENT and key not in read and key != weight_key]
    of_turns = {
        key: None
        for name in _WITH_TURNS
        if isinstance(turns := row.get(name), list)
        for turn in turns
        if isinstance(turn, dict) and len(turn) > 2
        for key, value in turn.items()
        if value not in _ABSENT and key not in _READ_IN_TURNS
    }
    return [f"{_quoted(key)} is not used" for key in found] + [
        f"{_quoted(key)} of a turn is not used" for key in of_turns
    ]


def unwritten_fields(chat: Chat, template: ChatTemplate) -> list[str]:
    """A remark for names and thoughts that the template does not write. `tool_call_id` only links turns."""
    fields = [(turn, key) for turn, message in enumerate(chat.messages) for key in _fields(message)]
    if not fields:
        return []
    written = {fields[number] for number in _written(chat, template, fields)}
    thoughts: dict[int, bool] = {}  # whether the thought of a turn is written, under any of its names
    for turn, key in fields:
        if key in REASONING_KEYS and chat.messages[turn]["role"] == "assistant":
            thoughts[turn] = thoughts.get(turn, False) or (turn, key) in written
    lost = [turn for turn, is_written in thoughts.items() if not is_written]
    if lost and not any(thoughts.values()) and not template.writes_thinking:
        _refuse_thinking(
            next(key for turn, key in fields if turn == lost[0] and key in REASONING_KEYS), lost[0], template
        )
    names = dict.fromkeys(
        chat.messages[turn]["role"] for turn, key in fields if key == "name" and (turn, key) not in written
    )
    remarks = [f'The chat template does not write the "name" of a turn of the role {role}' for role in names]
    if any(key == "content" and (turn, key) not in written for turn, key in fields):
        remarks.append("The chat template removes the thinking inside an answer (<think>...</think>)")
    if lost:
        remarks.append("The chat template leaves out the thinking of an earlier answer, which is trained without it")
    return remarks


def _fields(message: Message) -> Iterator[str]:
    """The keys of the texts that a template may leave out."""
    if len(message) > 2:
        yield from (key for key in ("name", *REASONING_KEYS) if str(message.get(key) or "").strip())
    if (
        message["role"] == "assistant"
        and "</think>" in (message["content"] or "")
        and _THOUGHT.search(message["content"])
    ):
        yield "content"


def _refuse_thinking(key: str, turn: int, template: ChatTemplate) -> NoReturn:
    inside = (
        "put it into the content, as <think>...</think> before the answer; " if template.writes_thinking_inside else ""
    )
    raise BadRow(
        f'The chat template does not write "{key}", so the thinking of turn {turn + 1} would be lost.',
        f"{inside}use a model or a data.chat_template that writes it; or train without it: data.thinking: drop",
    )


def _written(chat: Chat, template: ChatTemplate, fields: Sequence[tuple[int, str]]) -> set[int]:
    """The numbers of the fields that the template writes. All of them, if it refuses a field with a mark."""
    messages: list[Message] = [dict(message) for message in chat.messages]
    for number, (turn, key) in enumerate(fields):
        mark, text = f"{OPEN}{number}{CLOSE}", messages[turn][key]
        messages[turn][key] = text.replace("</think>", f"{mark}</think>", 1) if key == "content" else text + mark
    try:
        rendered = template.render(messages, chat.tools)
    except BadRow:
        return set(range(len(fields)))
    return {int(number) for number in _MARK.findall(rendered)}


def _quoted(key: str) -> str:
    return f'"{shortened(key, 40)}"'
