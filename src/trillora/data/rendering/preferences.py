"""Rows of preferences: two answers to one prompt, or one answer that is good or bad.

    {"prompt": "1+1?", "chosen": "2", "rejected": "3"}       format `preference`, for pairs
    {"prompt": "1+1?", "completion": "3", "label": false}    format `labelled`, for labels

`detect` knows what a stage's rows are for (`recipe.losses.Rows`); with "answers", rows are as in `formats`. The prompt
and the answers of a pair come in several forms (TRL, OpenAI, ms-swift, LLaMA-Factory, UltraFeedback):

    prompt, chosen, rejected                            texts, or turns: the turns of the answers follow the prompt
    prompt, chosen, rejected                            answers that are whole conversations: the prompt is their start
    chosen, rejected                                    the same without the prompt's text
    input.messages, preferred_output, non_preferred_output
    messages, rejected_response                         the last answer of the messages is the chosen one
    conversations, chosen, rejected                     turns with `from` and `value`
    question or instruction, chosen, rejected           a conversation of one round

A labelled row is a row of any format with one answer, and a label. All sides are checked as conversations are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trillora.data.rendering import formats
from trillora.data.rendering.formats import Row
from trillora.data.rendering.json_values import excerpt, kind_name
from trillora.data.rows import BadRow, Chat, Example, Labelled, Message, Pair, Preference, Text

if TYPE_CHECKING:  # the worker that renders rows starts without pydantic
    from trillora.recipe.losses import Rows

PREFERENCE, LABELLED = "preference", "labelled"
# The keys of the better and of the worse answer.
_SIDES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("messages", "rejected_response"),
    ("messages", "rejected_messages"),
)
SIDE_KEYS = frozenset(key for keys in _SIDES for key in keys) - {"messages"}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
SAME = "The chosen and the rejected answer are the same"
DO_SAME = "remove the row: there is nothing to compare"
SWAPPED = "The chosen answer has a lower score than the rejected one: they may be swapped"
_SCORE = re.compile("score|rating|reward", re.IGNORECASE)


def detect(row: Row, rows: str) -> str:
    """The format of a row. Raises `BadRow` if the row is not of the kind that `rows` names."""
    if rows == "answers":
        return formats.detect(row)
    given = {key for key, value in row.items() if value is not None}
    has_sides = not SIDE_KEYS.isdisjoint(given)
    if rows == "labels" and "label" in given and not has_sides:
        return LABELLED
    if has_sides:
        return PREFERENCE
    raise _not_of_this_kind(row, rows)


def rows_shown_by(row: Row, usual: Rows) -> Rows:
    """What a row is for, as far as its keys show it. `usual`: of the other rows; a label such as 1 may be a class, if
    they have none. Raises `BadRow` if the keys show nothing."""
    given = {key for key, value in row.items() if value is not None}
    if not SIDE_KEYS.isdisjoint(given):
        return "pairs"
    format = formats.detect(row)
    is_truth = isinstance(label := row.get("label"), bool) or str(label).strip().lower() in ("true", "false")
    has_label = "label" in given and (is_truth or usual == "labels")
    return "labels" if has_label and format != "text" else "answers"


def convert(row: Row, format: str) -> Example:
    """The row as an example of the given format, except "template"."""
    if format == PREFERENCE:
        formats.refuse_media(row)
        return _preference(row)
    if format == LABELLED:
        return _labelled(row)
    return formats.convert(row, format)


def is_swapped(row: Row) -> bool:
    """Whether the row has a score for each answer, such as `score_chosen` and `score_rejected`, in the wrong order."""
    for key, score in row.items():
        if "chosen" in key and _SCORE.search(key):
            other = row.get(key.replace("chosen", "rejected"))
            if isinstance(score, int | float) and isinstance(other, int | float):
                return score < other
    return False


def _not_of_this_kind(row: Row, rows: str) -> BadRow:
    keys = f"Its keys: {formats.keys_of(row)}."
    if rows == "labels":
        what = f"train.loss needs an answer with a label, which this row does not have. {keys}"
        columns = "{prompt: …, completion: …, label: …}"
        return BadRow(what, f"use the keys prompt, completion and label (true or false), or data.columns: {columns}")
    what = f"train.loss needs a chosen and a rejected answer, which this row does not have. {keys}"
    columns = "{prompt: …, chosen: …, rejected: …}"
    do = f"use the keys prompt, chosen and rejected, or data.columns: {columns}"
    other = "kto for answers with a label" if row.get("label") is not None else "sft to learn one answer per row"
    return BadRow(what, f"{do}; or set train.loss: {other}")


# -- pairs -------------------------------------------------------------------------------------------------------------


def _preference(row: Row) -> Preference:
    keys = _sides_of(row)
    chosen, rejected = (_given(row, key) for key in keys)
    if keys[0] == "messages":
        chosen = _turns(chosen, "messages")
        return _compared(row, keys, _conversations(chosen, rejected, keys[1]), None)
    row, prompt = _prompt_of(row, keys)
    if prompt is None and (isinstance(chosen, str) or isinstance(rejected, str)):
        what = f'The row has no prompt: it has only the texts of "{keys[0]}" and "{keys[1]}".'
        raise BadRow(what, "put the prompt into a key of its own: prompt, chosen, rejected")
    if isinstance(prompt, str):
        if isinstance(chosen, str) and isinstance(rejected, str) and not _has_system(row):
            if chosen == rejected:
                raise BadRow(f"{SAME}.", DO_SAME)
            return Preference(Pair(prompt, chosen), Pair(prompt, rejected))
        prompt = [{"role": "user", "content": prompt}]
    sides = [_turns(value, key) for value, key in zip((chosen, rejected), keys, strict=True)]
    are_whole = [side[0].get("role") != "assistant" for side in sides]
    begun = [side if is_whole else [*(prompt or []), *side] for side, is_whole in zip(sides, are_whole, strict=True)]
    return _compared(row, keys, begun, None if prompt is None or any(are_whole) else len(prompt))


def _sides_of(row: Row) -> tuple[str, str]:
    """The keys of the two answers. One of them may be missing."""
    for keys in _SIDES:
        if any(row.get(key) is not None for key in keys if key != "messages"):
            return keys
    return _SIDES[0]


def _given(row: Row, key: str) -> Any:
    value = row.get(key)
    if key == "messages" and value is None:
        raise BadRow("The row has a rejected answer, but no messages.", "add the conversation with the chosen answer")
    if value is None:
        side = "rejected" if key in {other for _, other in _SIDES} else "chosen"
        raise BadRow(f'The row has no "{key}", which is the {side} answer.', "add this answer, or remove the row")
    if value in ("", [], {}) or formats.is_blank(value):
        raise BadRow(f'"{key}" is empty.', "write this answer, or remove the row")
    return value


def _prompt_of(row: Row, keys: tuple[str, str]) -> tuple[Row, str | list[Message] | None]:
    """The prompt: a text that stays a text, or turns, or None. And the row, with the tools of OpenAI's `input`."""
    if keys[0] == "preferred_output":
        given = row.get("input")
        if not isinstance(given, dict) or given.get("messages") is None:
            raise BadRow('The row has no prompt: "input" has no "messages".', 'write {"input": {"messages": [...]}}')
        tools = row.get("tools") if given.get("tools") is None else given["tools"]
        return {**row, "tools": tools}, _turns(given["messages"], "input.messages")
    prompt = row.get("prompt")
    if prompt is not None:
        return row, formats.text_at(row, "prompt") if isinstance(prompt, str) else _turns(prompt, "prompt")
    if (key := formats.turn_key(row)) is not None:
        return row, _turns(row[key], key)
    if row.get("question") is not None:
        return row, [{"role": "user", "content": formats.text_at(row, "question")}]
    if row.get("instruction") is not None:
        return row, [{"role": "user", "content": formats.alpaca_question(row)}]
    return row, None


def _has_system(row: Row) -> bool:
    return any(key in row for key in formats.SYSTEM_KEYS)


def _turns(value: object, key: str) -> list[Message]:
    """The turns of a prompt or an answer: a text is an assistant's turn, an object is one turn."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    form = 'write turns as {"role": "assistant", "content": "..."}, in a list'
    if not isinstance(turns, list):
        raise BadRow(f'"{key}" is {kind_name(value)}, not text or a list of turns.', form)
    if not turns:
        raise BadRow(f'"{key}" is empty.', "add at least one turn to it")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRow(f'Turn {number} of "{key}" is {kind_name(turn)}, not an object.', form)
    if formats.turn_format(key, turns) == "sharegpt":
        return [formats.sharegpt_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    return turns


def _conversations(chosen: list[Message], rejected: object, key: str) -> tuple[list[Message], list[Message]]:
    """Both conversations of a row with messages and a rejected response: the response replaces the last answer. A list
    that begins with the assistant replaces all turns after the last question."""
    if chosen[-1].get("role") != "assistant":
        raise BadRow('"messages" does not end with the chosen answer.', "add the answer to the messages")
    turns = _turns(rejected, key)
    if isinstance(rejected, str):
        return chosen, [*chosen[:-1], *turns]
    if turns[0].get("role") != "assistant":
        return chosen, turns
    last_question = max((i for i, turn in enumerate(chosen) if turn.get("role") == "user"), default=-1)
    return chosen, [*chosen[: last_question + 1], *turns]


def _compared(
    row: Row, keys: tuple[str, str], conversations: Sequence[list[Message]], num_prompt: int | None
) -> Preference:
    """The pair of two whole conversations. `num_prompt`: turns of the prompt; None: the turns that both begin with."""
    # Turns with `from` have no field for tool calls, which are in their text.
    is_sharegpt = any(_begins_with(row.get(key), "from") for key in (*keys, "prompt", *formats.TURN_KEYS))
    sides = [_checked(turns, key, is_sharegpt) for turns, key in zip(conversations, keys, strict=True)]
    if sides[0] == sides[1]:
        raise BadRow(f"{SAME}.", DO_SAME)
    if num_prompt is None:
        num_prompt = _num_common(*sides)
        if not num_prompt:
            what = f'The conversations of "{keys[0]}" and "{keys[1]}" have no turn in common, so there is no prompt.'
            raise BadRow(what, "begin both with the same turns, or add a prompt")
    for side, key in zip(sides, keys, strict=True):
        if all(turn["role"] != "assistant" for turn in side[num_prompt:]):
            what = f'"{key}" has no answer after the prompt, so there is nothing to compare.'
            raise BadRow(what, "add the answer, or remove the row")
    return Preference(*(formats.chat(row, side, num_completion=len(side) - num_prompt) for side in sides))


def _begins_with(value: object, key: str) -> bool:
    """Whether the first turn has this key."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and key in first


def _checked(turns: list[Message], key: str, calls_in_text: bool) -> list[Message]:
    try:
        return formats.check_chat(turns, calls_in_text=calls_in_text)
    except BadRow as error:
        raise BadRow(f'{error.what.removesuffix(".")} (in the conversation of "{key}").', error.do) from None


def _num_common(turns: list[Message], others: list[Message]) -> int:
    """The number of turns that both conversations begin with."""
    pairs = enumerate(zip(turns, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(turns), len(others)))


# -- labels ------------------------------------------------------------------------------------------------------------


def _labelled(row: Row) -> Labelled:
    is_good = _label_of(row)
    rest = {key: value for key, value in row.items() if key != "label"}
    try:
        format = formats.detect(rest)
    except BadRow:
        raise _not_of_this_kind(row, "labels") from None
    answer = formats.convert(rest, format)
    if not isinstance(answer, Chat | Pair):
        assert isinstance(answer, Text)
        raise BadRow("The row has a label, but no prompt.", "write the prompt and the answer in two keys")
    return Labelled(with_prompt(answer) if isinstance(answer, Chat) else answer, is_good)


def with_prompt(chat: Chat) -> Chat:
    """The conversation with a prompt: if the row does not say where it ends, everything up to the last question."""
    if not chat.num_prompt:
        roles = [message["role"] for message in chat.messages]
        last_answer = len(roles) - 1 - roles[::-1].index("assistant")
        questions = (i for i in range(last_answer) if roles[i] == "user")
        chat = dataclasses.replace(chat, num_prompt=roles.index("assistant", max(questions, default=0)))
    if not chat.num_prompt:
        raise BadRow(
            "The conversation has no prompt: it begins with the answer.", "add the question, or remove the row"
        )
    return chat


def _label_of(row: Row) -> bool:
    """True or false, also as 1 or 0, and as text, which is all that CSV files have."""
    label = row.get("label")
    if label is None:
        raise BadRow('The row has no "label".', "write true for a good answer and false for a bad one")
    known = _TRUTH.get(label.strip().lower()) if isinstance(label, str) else label
    if known not in (True, False):  # 1, 0 and 1.0 are equal to them
        what = f'The "label" of this row is {excerpt(label)}, which is neither true nor false.'
        raise BadRow(what, "write true for a good answer and false for a bad one")
    return bool(known)
