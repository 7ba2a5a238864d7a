"""What a parsed row means: a chat, a prompt with its completion, or plain text.

    {"instruction": "Add.", "input": "1 2", "output": "3"}

has the keys of the format `alpaca` (`detect`) and means (`convert`)

    Chat([{"role": "user", "content": "Add.\\n\\n1 2"}, {"role": "assistant", "content": "3"}])

`check_chat` decides what a conversation may look like. A row that matches no format, or several, or is wrong otherwise
raises `BadRow`. A key whose value is null counts as absent: tables (Parquet, CSV) have every key in every row. This
code runs on millions of rows: text is passed on, not copied.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from trillora.data.rendering.control import ROLES
from trillora.data.rendering.json_values import excerpt, kind_name, parse_json, shortened
from trillora.data.rows import BadRow, Chat, Example, Message, Pair, Text
from trillora.errors import nearest

Row = dict[str, Any]
MAX_WEIGHT = 1000.0  # of a row

# Role names in ShareGPT-like data sets, in lower case. A function call is an assistant turn that is all call.
_CALL_ROLES = ("function_call", "function-call", "tool_call")
_ROLE_NAMES = {
    "system": "system",
    "developer": "developer",
    "user": "human user prompter",
    "assistant": f"gpt assistant chatgpt gpt4 gpt-4 bing bard claude model bot ai {' '.join(_CALL_ROLES)}",
    "tool": "tool tools function function_response function-response tool_response observation",
}
SHAREGPT_ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}

TURN_KEYS = ("messages", "conversation", "conversations")
SYSTEM_KEYS = ("system", "system_prompt")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names for the assistant's thinking
_KEPT_TEXT = ("name", "tool_call_id", *REASONING_KEYS)  # what chat templates read in addition to role and content
_UNTRAINED = "weight"  # key of a checked turn that is not trained, until `chat` removes it
ARGUMENTS_KEY = "chat_template_kwargs"  # TRL's name for a row's arguments of the chat template
_MORE_THAN_A_ROUND = (*SYSTEM_KEYS, "history", "tools", ARGUMENTS_KEY)
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")  # of data sets for multimodal models
_TURN_FORM = 'write each turn as {"role": "user", "content": "..."}'
_SHAREGPT_FORM = 'write each turn as {"from": "human", "value": "..."}'
_ULTRACHAT_FORM = 'write the turns as texts in a list: {"data": ["question", "answer", ...]}'
_KEYS_OF_FORMATS = (
    "messages (messages: role, content), sharegpt (conversations: from, value), ultrachat (data: texts), "
    "prompt-completion (prompt, completion or response), alpaca (instruction, output, optionally input), "
    "question-answer (question, answer or response), text (text)"
)
# Formats without a list of turns: the key of the question, and the keys that may hold the answer.
_PLAIN_FORMATS = {
    "prompt-completion": ("prompt", ("completion", "response")),
    "alpaca": ("instruction", ("output",)),
    "question-answer": ("question", ("answer", "response")),
    "text": ("text", ("text",)),
}

FOR_PREFERENCES = "This is a row for preference tuning ({}), but train.loss: sft learns one answer per row."
DO_COMPARE = "set train.loss: dpo to train on both answers"

# Which roles may follow a turn; "" is the start, "call" an assistant turn that calls tools.
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
    """The format that matches the keys of the row. Raises `BadRow` if none or several match."""
    matching = []
    if (key := turn_key(row)) is not None:
        matching.append(turn_format(key, row[key]))
    given = {key for key, value in row.items() if value is not None}
    matching += [
        name for name, (key, answers) in _PLAIN_FORMATS.items() if key in given and given.intersection(answers)
    ]
    if not matching and _is_list_of_texts(row.get("data")):
        return "ultrachat"
    if len(matching) == 1:
        return matching[0]
    if matching:
        what = f"The row matches several formats: {', '.join(matching)}. Its keys: {keys_of(row)}."
        raise BadRow(what, f"choose one in the recipe, such as data.format: {matching[0]}")
    raise _unknown_format(row)


def _unknown_format(row: Row) -> BadRow:
    """The refusal of a row whose keys match no format, with what was probably meant."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        do = f"; or train on the better answers alone, with data.columns: {_columns_of_chosen(row)}"
        return BadRow(FOR_PREFERENCES.format("chosen, rejected"), DO_COMPARE + do)
    if row.get("preferred_output") is not None:
        return BadRow(FOR_PREFERENCES.format("preferred_output, non_preferred_output"), DO_COMPARE)
    what = f"The row matches no known format. Its keys: {keys_of(row)}."
    if meant := _meant_columns(row):
        return BadRow(what, f"say in the recipe which column is which: data.columns: {in_yaml(meant)}")
    do = "say in the recipe which column is which, such as data.columns: {question: …, answer: …}"
    return BadRow(what, f"{do}; or use the keys of a format: {_KEYS_OF_FORMATS}; or convert rows with data.template")


def _columns_of_chosen(row: Row) -> str:
    prompt, is_chat = row.get("prompt"), isinstance(row["chosen"], list)
    if is_chat:
        return in_yaml(
            {"prompt": "prompt", "completion": "chosen"} if isinstance(prompt, list) else {"messages": "chosen"}
        )
    return in_yaml({"text": "chosen"} if prompt is None else {"question": "prompt", "answer": "chosen"})


def _meant_columns(row: Row) -> dict[str, str]:
    """The columns of a format whose keys are written differently (`Question`), or of a row of two texts."""
    own = {key.strip().lower(): key for key, value in row.items() if value is not None}
    for key, answers in _PLAIN_FORMATS.values():
        if key in own and (answer := next((name for name in answers if name in own), None)):
            others = ("input", "system") if key == "instruction" else ("system",)
            return {name: own[name] for name in (key, answer, *others) if name in own}
    if turns := next((own[name] for name in TURN_KEYS if name in own), None):
        return {"messages": turns}
    texts = [key for key, value in row.items() if isinstance(value, str)]
    return {"question": texts[0], "answer": texts[1]} if len(texts) == len(row) == 2 else {}


def in_yaml(columns: dict[str, str]) -> str:
    def word(name: str) -> str:
        return name if re.fullmatch(r"[A-Za-z_][\w-]*", name) else json.dumps(shortened(name, 60))

    return f"{{{', '.join(f'{key}: {word(column)}' for key, column in columns.items())}}}"


def columns_of(format: str, row: Row) -> tuple[str, str] | None:
    """The keys of the question and of the answer, if the row has one text of each and nothing else that is rendered,
    except the input of alpaca."""
    question, answers = _PLAIN_FORMATS.get(format, ("", ()))
    answer = next((key for key in answers if row.get(key) is not None), None)
    if answer is None or answer == question or any(row.get(key) for key in _MORE_THAN_A_ROUND):
        return None
    texts = (row[question], row[answer], row.get("input") or "")
    return (question, answer) if all(isinstance(text, str) for text in texts) else None


def convert(row: Row, format: str) -> Example:
    """The row as an example of the given format, except "template", which `RowTemplate` converts."""
    if format != "text":
        refuse_media(row)
    if format in ("messages", "sharegpt"):
        return _from_turns(row, format)
    return _CONVERTERS[format](row)


def refuse_media(row: Row) -> None:
    if media := next((key for key in _MEDIA_KEYS if row.get(key)), None):
        what = f'The row has "{media}", but only text can be trained: the question may be about what is not there.'
        raise BadRow(what, "remove the row; if text alone makes sense, name the columns to use in data.columns")


def check_chat(messages: object, *, calls_in_text: bool = False) -> list[Message]:
    """A validated copy: known roles in a valid order, content as text, tool arguments as objects.

    `calls_in_text` is for formats without a field for tool calls: a tool turn may follow any assistant turn.
    """
    if not isinstance(messages, list):
        raise BadRow(f"The conversation is {kind_name(messages)}, not a list of turns.", f"{_TURN_FORM}, in a list")
    if not messages:
        raise BadRow("The conversation is empty.", "add a question and an answer, or remove the row")
    checked = []
    before, answered = "", False
    for number, message in enumerate(messages, start=1):
        turn = _checked_turn(message, number)
        role = turn["role"]
        if role not in _MAY_FOLLOW[before]:
            _refuse_order(role, before, number)
        before = "call" if role == "assistant" and (calls_in_text or "tool_calls" in turn) else role
        answered = answered or role == "assistant"
        checked.append(turn)
    if not answered:
        raise BadRow("The conversation has no assistant turn, so there is nothing to train on.", "add the answer")
    return checked


def _from_turns(row: Row, format: str) -> Chat:
    key, is_sharegpt = turn_key(row), format == "sharegpt"
    if key is None:
        _refuse_keys(row, '"conversations"' if is_sharegpt else '"messages"')
    turns = row[key]
    if is_sharegpt and isinstance(turns, list):
        turns = [sharegpt_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    elif not is_sharegpt and turns and turn_format(key, turns) == "sharegpt":
        raise BadRow(f'The turns of "{key}" have no "role".', f"{_TURN_FORM}, or set data.format: sharegpt")
    return chat(row, check_chat(turns, calls_in_text=is_sharegpt))


def _from_prompt_completion(row: Row) -> Chat | Pair:
    """Lists of turns are a chat. Text stays raw text, except with a system text, which needs a chat."""
    answer_key = _answer_key(row, "prompt-completion")
    prompt, completion = row.get("prompt"), row.get(answer_key)
    if prompt is None or completion is None:
        _refuse_keys(row, '"prompt" and "completion"')
    if isinstance(prompt, list) and isinstance(completion, list):
        if not prompt:
            raise BadRow('"prompt" is empty.', "add at least one turn to it")
        turns = check_chat(prompt + completion)
        if all(turn["role"] != "assistant" for turn in turns[len(prompt) :]):
            raise BadRow(f'"{answer_key}" has no assistant turn, so there is nothing to train on.', "add the answer")
        return chat(row, turns, num_completion=len(completion))
    if isinstance(prompt, list) or isinstance(completion, list):
        what = f'"prompt" is {kind_name(prompt)} and "{answer_key}" is {kind_name(completion)}.'
        raise BadRow(what, "write both as text, or both as lists of turns")
    prompt, completion = text_at(row, "prompt"), text_at(row, answer_key)
    if any(key in row for key in SYSTEM_KEYS):
        return one_round(row, prompt, completion)
    return Pair(prompt, completion)


def _from_alpaca(row: Row) -> Chat:
    return one_round(row, alpaca_question(row), text_at(row, "output"))


def alpaca_question(row: Row) -> str:
    """The instruction with its input, if it has one."""
    if row.get("history"):
        what = '"history" has earlier turns, which the format alpaca does not support.'
        raise BadRow(what, 'write the row as {"messages": [...]}')
    question = text_at(row, "instruction")
    if (extra := row.get("input")) is not None and not is_blank(extra):
        question = f"{question}\n\n{text_at(row, 'input')}"
    return question


def _from_ultrachat(row: Row) -> Chat:
    """Texts without roles: user and assistant take turns."""
    texts = row.get("data")
    if texts is None:
        _refuse_keys(row, '"data"')
    if not _is_list_of_texts(texts):
        raise BadRow('"data" is not a list of texts.', _ULTRACHAT_FORM)
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return Chat(_with_system(row, check_chat(turns)), _tools(row))


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _from_question_answer(row: Row) -> Chat:
    return one_round(row, text_at(row, "question"), text_at(row, _answer_key(row, "question-answer")))


_CONVERTERS: dict[str, Callable[[Row], Example]] = {
    "ultrachat": _from_ultrachat,
    "prompt-completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "question-answer": _from_question_answer,
    "text": lambda row: Text(text_at(row, "text")),
}


def _answer_key(row: Row, format: str) -> str:
    """The first key of the format's answer that the row has, or else the last."""
    keys = _PLAIN_FORMATS[format][1]
    return next((key for key in keys if row.get(key) is not None), keys[-1])


def one_round(row: Row, question: str, answer: str) -> Chat:
    turns: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return chat(row, turns)


def chat(row: Row, turns: list[Message], num_completion: int | None = None) -> Chat:
    """The conversation of checked turns, with what the row has for all of them."""
    turns = _with_system(row, turns)
    untrained = [number for number, turn in enumerate(turns) if turn.pop(_UNTRAINED, None) is not None]
    num_prompt = 0 if num_completion is None else len(turns) - num_completion
    return Chat(turns, _tools(row), num_prompt, frozenset(untrained), _arguments(row))


def _arguments(row: Row) -> dict[str, Any]:
    """The row's arguments for the chat template."""
    arguments, form = row.get(ARGUMENTS_KEY), f'write {{"{ARGUMENTS_KEY}": {{"enable_thinking": false}}}}'
    if not arguments:
        return {}
    if isinstance(arguments, str) and (arguments := _parsed(arguments, dict)) is None:
        raise BadRow(f'"{ARGUMENTS_KEY}" is text that is not a JSON object.', form)
    if not isinstance(arguments, dict):
        raise BadRow(f'"{ARGUMENTS_KEY}" is {kind_name(arguments)}, not an object.', form)
    # A table (Parquet) has every key in every row; null there means that the row does not give it.
    return {key: value for key, value in arguments.items() if value is not None}


def picked(row: Row, columns: dict[str, str], dropped: Collection[str] = ()) -> Row:
    """The row with the keys that `data.columns` gives it, without `data.drop_keys`. A column of null counts as
    absent."""
    if dropped:
        row = _without_keys(row, dropped)
    if not columns:
        return row
    if missing := next((column for column in columns.values() if column not in row), None):
        meant = nearest(missing, [*row])
        do = (f"did you mean {meant}? " if meant else "") + "correct data.columns"
        raise BadRow(f'This row has no "{missing}", which data.columns names.', do)
    return {key: row[column] for key, column in columns.items()}


def _without_keys(row: Row, dropped: Collection[str]) -> Row:
    """The row without these keys, also in its turns."""

    def kept(value: Any) -> Any:
        return {key: inner for key, inner in value.items() if key not in dropped} if isinstance(value, dict) else value

    return {
        key: [kept(item) for item in value] if isinstance(value, list) else value for key, value in kept(row).items()
    }


def row_weight(row: Row, key: str) -> float:
    """The row's weight in the loss, at the key that `data.weight_key` names; 1 without it."""
    weight = row.get(key, 1)
    if isinstance(weight, str):  # CSV files have only text
        with contextlib.suppress(ValueError):
            weight = float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        what = f'The weight of this row, "{key}", is {excerpt(weight)}.'
        raise BadRow(what, f"write a number from 0 to {MAX_WEIGHT:,}")
    return float(weight)


def _with_system(row: Row, turns: list[Message]) -> list[Message]:
    """The turns, preceded by the row's separate system text, if any."""
    for key in SYSTEM_KEYS:
        if (text := row.get(key)) in (None, ""):
            continue
        if not isinstance(text, str):
            raise BadRow(f'"{key}" is {kind_name(text)}, not text.', "write it as text, or remove the key")
        if turns[0]["role"] in ("system", "developer"):
            raise BadRow(f'The row has both a "{key}" text and a {turns[0]["role"]} turn.', "keep one of the two")
        turns = [{"role": "system", "content": text}, *turns]
    return turns


def _tools(row: Row) -> list[Any] | None:
    tools, form = row.get("tools"), "write the tools as a list of objects"
    if not tools:
        return None
    if isinstance(tools, str) and (tools := _parsed(tools, list)) is None:
        raise BadRow('"tools" is text that is not a JSON list.', form)
    if not isinstance(tools, list):
        raise BadRow(f'"tools" is {kind_name(tools)}, not a list.', form)
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise BadRow(f"Tool {number} is {kind_name(tool)}, not an object.", form)
    return tools or None


def sharegpt_turn(turn: object, number: int) -> Message:
    """Convert `from` and `value` to `role` and `content`."""
    turn, name = _turn_and_role(turn, number, "from", _SHAREGPT_FORM)
    known = name.strip().lower() if isinstance(name, str) else ""
    role = SHAREGPT_ROLES.get(known)
    if role is None:
        _refuse_role(name, number, SHAREGPT_ROLES)
    value = turn.get("value")
    if known in _CALL_ROLES and isinstance(value, str) and (calls := _parsed(value, (dict, list))):
        plain = {"role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    else:
        plain = {"role": role, "content": value}
    return plain if len(turn) == 2 else {**turn, **plain}


def _turn_and_role(turn: object, number: int, key: str, form: str) -> tuple[Row, Any]:
    """The turn, which must be an object, and its value at `key`, which must not be null."""
    if not isinstance(turn, dict):
        raise BadRow(f"Turn {number} is {kind_name(turn)}, not an object.", form)
    if turn.get(key) is None:
        raise BadRow(f'Turn {number} has no "{key}".', form)
    return turn, turn[key]


def _checked_turn(message: object, number: int) -> Message:
    message, role = _turn_and_role(message, number, "role", _TURN_FORM)
    if role not in ROLES:
        _refuse_role(role, number, ROLES)
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, number)
    turn = {"role": role, "content": content}
    if len(message) > 2:
        _keep_extras(turn, message, number)
    if content is None:
        if "tool_calls" not in turn:
            raise BadRow(f'Turn {number} has no "content".', _TURN_FORM)
    elif not isinstance(content, str):
        raise BadRow(f'The "content" of turn {number} is {kind_name(content)}, not text.', _TURN_FORM)
    elif is_blank(content):
        if role == "assistant" and "tool_calls" not in turn:
            raise BadRow(f"The answer in turn {number} is empty.", "write the answer, or remove the row")
        if role == "user":
            raise BadRow(f"The question in turn {number} is empty.", "write the question, or remove the row")
    return turn


def _keep_extras(turn: Message, message: Row, number: int) -> None:
    """Copy the keys that templates know in addition to role and content. `unused` counts the others."""
    for key in _KEPT_TEXT:
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise BadRow(f'The "{key}" of turn {number} is {kind_name(value)}, not text.', "write it as text")
            turn[key] = value
    if calls := message.get("tool_calls"):
        if turn["role"] != "assistant":
            raise BadRow(f"Turn {number} is a {turn['role']} turn with tool calls.", "move them to an assistant turn")
        turn["tool_calls"] = _checked_calls(calls, number)
    if turn["role"] == "assistant" and not _is_trained(message, number):
        turn[_UNTRAINED] = 0


def _is_trained(message: Row, number: int) -> bool:
    """Whether the turn is a target. OpenAI's format says so by a weight of 0 or 1, others by `train`."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and weight not in (0, 1):  # 1.0 and true are in it, NaN is not
        what = f'The "weight" of turn {number} is {excerpt(weight)}.'
        raise BadRow(what, "write 0 (not trained) or 1; for other numbers, weight whole rows with data.weight_key")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f'"train" of turn {number} is {kind_name(train)}.', "write true or false")
    return weight != 0 and train is not False


def _checked_calls(calls: object, number: int) -> list[Row]:
    """Tool calls in the form that templates expect: type, function, and arguments as an object."""
    form = 'write each call as {"type": "function", "function": {"name": "...", "arguments": {...}}}'
    if not isinstance(calls, list):
        raise BadRow(f"The tool calls of turn {number} are {kind_name(calls)}, not a list.", form)
    checked = []
    for call in calls:
        if not isinstance(call, dict):
            raise BadRow(f"A tool call of turn {number} is {kind_name(call)}, not an object.", form)
        kept = {key: value for key, value in call.items() if value is not None}
        function = kept.get("function")
        if function is None:  # the bare form, {"name": ..., "arguments": ...}
            function = {key: kept.pop(key) for key in ("name", "arguments") if key in kept}
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
            raise BadRow(f"A tool call of turn {number} has no function name.", form)
        if kept.setdefault("type", "function") != "function":
            raise BadRow(f"A tool call of turn {number} has the unknown type {excerpt(kept['type'])}.", form)
        arguments = function.get("arguments")
        if not isinstance(arguments, dict | str | None):
            raise BadRow(f"The arguments of a tool call of turn {number} are {kind_name(arguments)}.", form)
        if isinstance(arguments, str) and (parsed := _parsed(arguments, dict)) is not None:
            arguments = parsed
        kept["function"] = {**function, "arguments": {} if arguments is None else arguments}
        checked.append(kept)
    return checked


def _joined(parts: list[Any], number: int) -> str:
    """The text of content that is a list of parts."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind_name(part) if kind is None else f"of type {excerpt(kind)}"
            what = f"Turn {number} has a part that is {shown}; only text is supported."
            raise BadRow(what, "remove the row, or write a text in place of this part")
        if not isinstance(part.get("text"), str):
            raise BadRow(f"Turn {number} has a text part without text.", 'write {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return texts[0] if len(texts) == 1 else "".join(texts)


def _refuse_order(role: str, before: str, number: int) -> NoReturn:
    if role in ("system", "developer"):
        is_second = before in ("system", "developer")
        what = "a second system turn" if is_second else f"a {role} turn, which may only come first"
        raise BadRow(f"Turn {number} is {what}.", "put all instructions into one system turn at the start")
    if role == "tool":
        what = f"Turn {number} is a tool turn, but the turn before it calls no tool."
        raise BadRow(what, 'add "tool_calls" to the assistant turn before it')
    if before == "tool":
        raise BadRow(f"Turn {number} follows a tool turn, but is a {role} turn.", "add an assistant turn before it")
    what = f"User and assistant do not alternate: turns {number - 1} and {number} are both {role} turns."
    raise BadRow(what, "join the two turns, or remove the row")


def _refuse_role(role: object, number: int, known: dict[str, str] | tuple[str, ...]) -> NoReturn:
    name = role[:40].strip().lower() if isinstance(role, str) else ""
    guess = SHAREGPT_ROLES.get(name) or nearest(name, known)
    hint = f"did you mean {guess!r}? " if guess else ""
    raise BadRow(f"Turn {number} has the unknown role {excerpt(role)}.", f"{hint}roles: {' '.join(known)}")


def _refuse_keys(row: Row, missing: str) -> NoReturn:
    raise BadRow(
        f"The row has no {missing}. Its keys: {keys_of(row)}.",
        f"set data.format to the format of the rows, or to auto. Formats and their keys: {_KEYS_OF_FORMATS}",
    )


def turn_key(row: Row) -> str | None:
    """The key of the conversation, if any."""
    found = [key for key in TURN_KEYS if row.get(key) is not None]
    if len(found) > 1:
        raise BadRow(f"The row has several conversations: {', '.join(found)}.", "keep only one of these keys")
    return found[0] if found else None


def turn_format(key: str, turns: object) -> str:
    """Whether turns have role/content or from/value. If the first turn has neither, the key decides."""
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and ("role" in first or "from" in first):
        return "messages" if "role" in first else "sharegpt"
    return "sharegpt" if key == "conversations" else "messages"


def text_at(row: Row, key: str) -> str:
    text = row.get(key)
    if text is None:
        _refuse_keys(row, f'"{key}"')
    if not isinstance(text, str):
        raise BadRow(f'"{key}" is {kind_name(text)}, not text.', f'write {{"{key}": "..."}}')
    if is_blank(text):
        raise BadRow(f'"{key}" is empty.', "write the text, or remove the row")
    return text


def is_blank(text: object) -> bool:
    return isinstance(text, str) and (not text or text.isspace())


def _parsed(text: str, kind: type | tuple[type, ...]) -> Any:
    """JSON text as a value of that kind; None if it is not usable JSON, or of another kind."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def keys_of(row: Row) -> str:
    shown = " ".join(excerpt(key) for key in list(row)[:12])
    return f"{shown} and {len(row) - 12} more" if len(row) > 12 else shown or "none"
