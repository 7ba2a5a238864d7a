"""What a parsed row means: a chat, a prompt with its completion, or plain text.

`detect` names the format of a row from its keys and refuses what fits none or several; `convert` makes an `Example` of
it; `check_chat` is the one place that decides what a conversation may look like. Everything wrong raises `BadRow`. A
key whose value is null counts as absent: tables (Parquet, CSV) have every key in every row. All of this runs once per
row on millions of rows: text is passed on, never copied.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

from trillora.data.rows import BadRow, Chat, Example, Message, Pair, Text
from trillora.errors import nearest

Row = dict[str, Any]

FORMATS = ("messages", "sharegpt", "prompt-completion", "alpaca", "question-answer", "text", "template")
ROLES = ("system", "developer", "user", "assistant", "tool")

# Role names met in ShareGPT-like dumps, in lower case; a function call is an assistant turn that is all call.
SHAREGPT_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "gpt4": "assistant",
    "gpt-4": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "function-call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "tools": "tool",
    "function": "tool",
    "function_response": "tool",
    "function-response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_CALL_ROLES = {"function_call", "function-call", "tool_call"}

_TURN_KEYS = ("messages", "conversation", "conversations")
_SYSTEM_KEYS = ("system", "system_prompt")
_KEPT_TEXT = (
    "name",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "reasoning",
)  # what chat templates read beside content
_TURN_FORM = 'write each turn as {"role": "user", "content": "..."}'
_KEYS_OF_FORMATS = (
    "messages (messages: role, content), sharegpt (conversations: from, value), prompt-completion (prompt, completion "
    "or response), alpaca (instruction, output, perhaps input), question-answer (question, answer or response), "
    "text (text)"
)

# Which turn may follow which; "" is the start, "call" an assistant turn that calls tools.
_MAY_FOLLOW = {
    "": ROLES[:4],
    "system": ("user", "assistant"),
    "developer": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def detect(row: Row) -> str:
    """The format the row's keys tell, unless none or several fit."""
    fitting = []
    if (key := _turn_key(row)) is not None:
        fitting.append(_turn_format(key, row[key]))
    has_response = row.get("response") is not None
    if row.get("prompt") is not None and (has_response or row.get("completion") is not None):
        fitting.append("prompt-completion")
    if row.get("instruction") is not None and row.get("output") is not None:
        fitting.append("alpaca")
    if row.get("question") is not None and (has_response or row.get("answer") is not None):
        fitting.append("question-answer")
    if row.get("text") is not None:
        fitting.append("text")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadRow(
            f"The row fits several formats ({', '.join(fitting)}); which to train on is not a guess to make. "
            f"Its keys: {_keys_of(row)}.",
            f"name one in the recipe: data: {{format: {fitting[0]}}}",
        )
    raise BadRow(
        f"The row fits no known format. Its keys: {_keys_of(row)}.",
        f"use the keys of one of these formats: {_KEYS_OF_FORMATS}; or say in the recipe with data.template what a row "
        "means",
    )


def convert(row: Row, format: str) -> Example:
    """The row as an example of the named format; "template" is rendered elsewhere."""
    return _CONVERTERS[format](row)


def check_chat(messages: object, *, calls_in_text: bool = False) -> list[Message]:
    """A checked copy: known roles in an order that makes sense, text everywhere, tool arguments as objects.

    `calls_in_text` is for sources that have no field for tool calls: any assistant turn may be answered by a tool.
    """
    if not isinstance(messages, list):
        raise BadRow(f"The conversation is {_kind(messages)}, not a list of turns.", f"{_TURN_FORM}, in a list")
    if not messages:
        raise BadRow("The conversation is empty.", "remove the row, or give it a question and an answer")
    checked = []
    before, answered = "", False
    for number, message in enumerate(messages, start=1):
        turn = _checked_turn(message, number)
        role = turn["role"]
        if role not in _MAY_FOLLOW[before]:
            _refuse_order(role, before, number)
        before = role
        if role == "assistant":
            answered = True
            if calls_in_text or "tool_calls" in turn:
                before = "call"
        checked.append(turn)
    if not answered:
        raise BadRow("The conversation has no assistant turn, so there is nothing to learn.", "add the answer")
    return checked


def _from_messages(row: Row) -> Chat:
    key = _turn_key(row)
    if key is None:
        _refuse_keys(row, '"messages"')
    if _turn_format(key, row[key]) == "sharegpt" and row[key]:
        raise BadRow(f'The turns of "{key}" have no "role" and "content".', f"{_TURN_FORM}, or use format: sharegpt")
    return Chat(_with_system(row, check_chat(row[key])), _tools(row))


def _from_sharegpt(row: Row) -> Chat:
    key = _turn_key(row)
    if key is None:
        _refuse_keys(row, '"conversations"')
    turns = row[key]
    if isinstance(turns, list):
        turns = [_sharegpt_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    return Chat(_with_system(row, check_chat(turns, calls_in_text=True)), _tools(row))


def _from_prompt_completion(row: Row) -> Chat | Pair:
    """Text stays raw text, lists of turns are a chat. With a column for the system text, text is a chat as well:
    raw text has no place for it."""
    answer_key = "completion" if row.get("completion") is not None else "response"
    prompt, completion = row.get("prompt"), row.get(answer_key)
    if prompt is None or completion is None:
        _refuse_keys(row, '"prompt" and "completion"')
    if isinstance(prompt, list) and isinstance(completion, list):
        if not prompt:
            raise BadRow('"prompt" is empty.', "give it at least one turn")
        turns = check_chat(prompt + completion)
        if all(turn["role"] != "assistant" for turn in turns[len(prompt) :]):
            raise BadRow(f'"{answer_key}" has no assistant turn, so there is nothing to learn.', "add the answer")
        whole = _with_system(row, turns)
        return Chat(whole, _tools(row), num_prompt=len(whole) - len(completion))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow(
            f'"prompt" is {_kind(prompt)} and "{answer_key}" is {_kind(completion)}.',
            "make both text, or both lists of turns",
        )
    prompt, completion = _text_at(row, "prompt"), _text_at(row, answer_key)
    if any(key in row for key in _SYSTEM_KEYS):
        return _one_round(row, prompt, completion)
    return Pair(prompt, completion)


def _from_alpaca(row: Row) -> Chat:
    if row.get("history"):
        raise BadRow('"history" holds earlier turns, which this format has no place for.', "write the row as messages")
    question = _text_at(row, "instruction")
    given = row.get("input")
    if given is not None and not _is_blank(given):
        question = f"{question}\n\n{_text_at(row, 'input')}"
    return _one_round(row, question, _text_at(row, "output"))


def _from_question_answer(row: Row) -> Chat:
    answer_key = "answer" if row.get("answer") is not None else "response"
    return _one_round(row, _text_at(row, "question"), _text_at(row, answer_key))


def _from_text(row: Row) -> Text:
    return Text(_text_at(row, "text"))


_CONVERTERS: dict[str, Callable[[Row], Example]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "prompt-completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "question-answer": _from_question_answer,
    "text": _from_text,
}


def _one_round(row: Row, question: str, answer: str) -> Chat:
    turns: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(_with_system(row, turns), _tools(row))


def _with_system(row: Row, turns: list[Message]) -> list[Message]:
    """The turns with the row's separate system text, if any, in front."""
    for key in _SYSTEM_KEYS:
        text = row.get(key)
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise BadRow(f'"{key}" is {_kind(text)}, not text.', "write it as text, or remove it")
        if turns[0]["role"] in ("system", "developer"):
            raise BadRow(f'The row has both a "{key}" text and a {turns[0]["role"]} turn.', "keep one of the two")
        turns = [{"role": "system", "content": text}, *turns]
    return turns


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools")
    if not tools:
        return None
    if isinstance(tools, str):
        tools = _parsed(tools, list)
        if tools is None:
            raise BadRow('"tools" is text, but not the JSON text of a list.', "write the tools as a list of objects")
    if not isinstance(tools, list):
        raise BadRow(f'"tools" is {_kind(tools)}, not a list.', "write the tools as a list of objects")
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise BadRow(f"Tool {number} is {_kind(tool)}, not an object.", "write the tools as a list of objects")
    return tools or None


def _sharegpt_turn(turn: object, number: int) -> Message:
    """A turn with `from` and `value` as one with `role` and `content`."""
    if not isinstance(turn, dict):
        raise BadRow(f"Turn {number} is {_kind(turn)}, not an object.", 'write {"from": "human", "value": "..."}')
    name = turn.get("from")
    if name is None:
        raise BadRow(f'Turn {number} has no "from".', 'write each turn as {"from": "human", "value": "..."}')
    known = name.strip().lower() if isinstance(name, str) else ""
    role = SHAREGPT_ROLES.get(known)
    if role is None:
        _refuse_role(name, number, SHAREGPT_ROLES)
    value = turn.get("value")
    if known in _CALL_ROLES and isinstance(value, str):
        calls = _parsed(value, (dict, list))
        if calls:
            return {"role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    plain = {"role": role, "content": value}
    return plain if len(turn) == 2 else {**turn, **plain}


def _checked_turn(message: object, number: int) -> Message:
    if not isinstance(message, dict):
        raise BadRow(f"Turn {number} is {_kind(message)}, not an object.", _TURN_FORM)
    role = message.get("role")
    if role is None:
        raise BadRow(f'Turn {number} has no "role".', _TURN_FORM)
    if role not in ROLES:
        _refuse_role(role, number, ROLES)
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, number)
    turn = {"role": role, "content": content}
    if len(message) > 2:
        _keep_extras(turn, message, number)
    if not isinstance(content, str):
        if content is not None or "tool_calls" not in turn:
            raise BadRow(f'The "content" of turn {number} is {_kind(content)}, not text.', _TURN_FORM)
    elif _is_blank(content):
        if role == "assistant" and "tool_calls" not in turn:
            raise BadRow(f"The answer in turn {number} is empty.", "write the answer, or remove the row")
        if role == "user":
            raise BadRow(f"The user says nothing in turn {number}.", "write the question, or remove the row")
    return turn


def _keep_extras(turn: Message, message: Row, number: int) -> None:
    """Take over what templates know beside role and content; other keys are the source's own affair."""
    for key in _KEPT_TEXT:
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise BadRow(f'The "{key}" of turn {number} is {_kind(value)}, not text.', "write it as text")
            turn[key] = value
    if calls := message.get("tool_calls"):
        if turn["role"] != "assistant":
            raise BadRow(f"Turn {number} is a {turn['role']} turn with tool calls.", "only the assistant calls tools")
        turn["tool_calls"] = _checked_calls(calls, number)
    # Asked for in the formats of other trainers: to train such a turn all the same would go against the data.
    if turn["role"] == "assistant" and (message.get("weight") == 0 or message.get("train") is False):
        raise BadRow(
            f"The answer in turn {number} asks not to be trained, which cannot be done turn by turn.",
            "end the conversation before it, or train on the last turn only and leave the key out",
        )


def _checked_calls(calls: object, number: int) -> list[Row]:
    """Tool calls in the one form templates expect: type, function, and arguments as an object."""
    form = 'write a call as {"type": "function", "function": {"name": "...", "arguments": {...}}}'
    if not isinstance(calls, list):
        raise BadRow(f"The tool calls of turn {number} are {_kind(calls)}, not a list.", form)
    checked = []
    for call in calls:
        if not isinstance(call, dict):
            raise BadRow(f"A tool call of turn {number} is {_kind(call)}, not an object.", form)
        kept = {key: value for key, value in call.items() if value is not None}
        function = kept.get("function")
        if function is None:  # the bare form, {"name": ..., "arguments": ...}
            function = {key: kept.pop(key) for key in ("name", "arguments") if key in kept}
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
            raise BadRow(f"A tool call of turn {number} names no function.", form)
        if kept.setdefault("type", "function") != "function":
            raise BadRow(f"A tool call of turn {number} has the unknown type {_shown(kept['type'])}.", form)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        elif isinstance(arguments, str):
            parsed = _parsed(arguments, dict)
            arguments = arguments if parsed is None else parsed
        elif not isinstance(arguments, dict):
            raise BadRow(f"The arguments of a tool call of turn {number} are {_kind(arguments)}.", form)
        kept["function"] = {**function, "arguments": arguments}
        checked.append(kept)
    return checked


def _joined(parts: list[Any], number: int) -> str:
    """The text of content given in parts."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = _kind(part) if kind is None else f"of type {_shown(kind)}"
            raise BadRow(f"Turn {number} has a part that is {shown}; only text is trained.", "remove the row")
        if not isinstance(part.get("text"), str):
            raise BadRow(f"Turn {number} has a text part without text.", 'write {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return texts[0] if len(texts) == 1 else "".join(texts)


def _refuse_order(role: str, before: str, number: int) -> NoReturn:
    if role in ("system", "developer"):
        raise BadRow(
            f"Turn {number} is a second system turn."
            if before in ("system", "developer")
            else f"Turn {number} is a {role} turn, which may only come first.",
            "put all instructions into one system turn at the start",
        )
    if role == "tool":
        raise BadRow(
            f"Turn {number} is a tool's answer, but no tool was called in the turn before.",
            'give the assistant turn before it its "tool_calls"',
        )
    if before == "tool":
        raise BadRow(f"Turn {number} follows a tool's answer, but is not the assistant's.", "let the assistant answer")
    raise BadRow(
        f"User and assistant do not take turns: turns {number - 1} and {number} are both {role} turns.",
        "join the two turns, or remove the row",
    )


def _refuse_role(role: object, number: int, known: dict[str, str] | tuple[str, ...]) -> NoReturn:
    guess = None
    if isinstance(role, str):
        name = role[:40].strip().lower()
        guess = SHAREGPT_ROLES.get(name) or nearest(name, known)
    hint = f"did you mean {guess!r}? " if guess else ""
    raise BadRow(f"Turn {number} has the unknown role {_shown(role)}.", f"{hint}roles: {' '.join(known)}")


def _refuse_keys(row: Row, wanted: str) -> NoReturn:
    raise BadRow(
        f"The row has no {wanted}. Its keys: {_keys_of(row)}.",
        f"name the right data.format, or leave it auto: {_KEYS_OF_FORMATS}",
    )


def _turn_key(row: Row) -> str | None:
    """The key that holds the conversation."""
    found = [key for key in _TURN_KEYS if row.get(key) is not None]
    if len(found) > 1:
        raise BadRow(f"The row has several conversations: {', '.join(found)}.", "keep one of these keys")
    return found[0] if found else None


def _turn_format(key: str, turns: object) -> str:
    """Whether turns are role/content or from/value; where they do not say, the key does."""
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict):
        if "role" in first:
            return "messages"
        if "from" in first:
            return "sharegpt"
    return "sharegpt" if key == "conversations" else "messages"


def _text_at(row: Row, key: str) -> str:
    text = row.get(key)
    if text is None:
        _refuse_keys(row, f'"{key}"')
    if not isinstance(text, str):
        raise BadRow(f'"{key}" is {_kind(text)}, not text.', f'write {{"{key}": "..."}}')
    if _is_blank(text):
        raise BadRow(f'"{key}" is empty.', "write the text, or remove the row")
    return text


def _is_blank(text: object) -> bool:
    return isinstance(text, str) and (not text or text.isspace())


def _parsed(text: str, kind: type | tuple[type, ...]) -> Any:
    """JSON text as a value of that kind, or None: not JSON, another kind, or no text a tokenizer could take."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair fails here
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _keys_of(row: Row) -> str:
    shown = " ".join(_shown(key) for key in list(row)[:12])
    return f"{shown} and {len(row) - 12} more" if len(row) > 12 else shown or "none"


def _shown(value: object) -> str:
    text = reprlib.repr(value)  # escapes what cannot be printed
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: object) -> str:
    kinds = {type(None): "missing", bool: "yes or no", int: "a number", float: "a number", str: "text"}
    return kinds.get(type(value)) or ("a list" if isinstance(value, list) else "an object")
