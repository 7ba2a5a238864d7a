"""Rows of every format become the right example; a wrong row raises a `BadRow` with the reason."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
import socket
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from trillora.data.rendering.formats import SHAREGPT_ROLES, check_chat, convert, detect, picked
from trillora.data.rendering.sandbox import RowTemplate
from trillora.data.rendering.schema import SchemaCheck
from trillora.data.rows import BadRow, Chat, Pair, Text
from trillora.errors import TrilloraError
from trillora.recipe import yaml
from trillora.recipe.data_section import DataSection

# Rows of preferences are in test_preferences.py.
FORMATS = tuple(
    each
    for each in get_args(DataSection.model_fields["format"].annotation)
    if each not in ("auto", "preference", "labelled")
)

RECIPES = Path(__file__).parents[2] / "recipes"


def user(content: Any = "Why?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "Because.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(arguments: Any = "{}", name: Any = "look") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"role": "tool", "content": "42"}
ROUND = [user(), assistant()]

# One row of every kind: the row, its format, and what it means.
ROWS: list[tuple[dict[str, Any], str, Any]] = [
    ({"messages": ROUND}, "messages", Chat(ROUND)),
    ({"conversation": ROUND, "id": 7}, "messages", Chat(ROUND)),
    ({"conversations": ROUND}, "messages", Chat(ROUND)),
    ({"messages": ROUND, "system": "Be brief."}, "messages", Chat([system(), *ROUND])),
    ({"messages": ROUND, "prompt": "Why?", "tools": "[]"}, "messages", Chat(ROUND)),
    ({"messages": ROUND, "tools": [{"name": "look"}]}, "messages", Chat(ROUND, [{"name": "look"}])),
    ({"messages": ROUND, "tools": '[{"name": "look"}]'}, "messages", Chat(ROUND, [{"name": "look"}])),
    ({"messages": ROUND, "text": None, "tools": None}, "messages", Chat(ROUND)),
    ({"messages": ROUND, "images": [], "image": None}, "messages", Chat(ROUND)),
    (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "GPT", "value": "Because."}]},
        "sharegpt",
        Chat(ROUND),
    ),
    (
        {
            "conversation": [{"from": "user", "value": "Why?"}, {"from": "bard", "value": "Because."}],
            "system": "Be brief.",
        },
        "sharegpt",
        Chat([system(), *ROUND]),
    ),
    ({"id": "7", "data": ["Why?", "Because."]}, "ultrachat", Chat(ROUND)),
    (
        {"data": ["Why?", "Because.", "And?"], "system": "Be brief."},
        "ultrachat",
        Chat([system(), *ROUND, user("And?")]),
    ),
    ({"prompt": "Why? ", "completion": "Because."}, "prompt-completion", Pair("Why? ", "Because.")),
    ({"prompt": "Why? ", "response": "Because."}, "prompt-completion", Pair("Why? ", "Because.")),
    ({"prompt": "Why?", "response": "Because.", "system": ""}, "prompt-completion", Chat(ROUND)),
    ({"prompt": ROUND[:1], "completion": ROUND[1:]}, "prompt-completion", Chat(ROUND, num_prompt=1)),
    (
        {"prompt": [*ROUND, user("And?")], "completion": [assistant("So.")], "system": "Be brief."},
        "prompt-completion",
        Chat([system(), *ROUND, user("And?"), assistant("So.")], num_prompt=4),
    ),
    ({"instruction": "Why?", "output": "Because."}, "alpaca", Chat(ROUND)),
    ({"instruction": "Why?", "input": "", "output": "Because."}, "alpaca", Chat(ROUND)),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca", Chat([user("Add.\n\n1 2"), assistant("3")])),
    ({"question": "Why?", "answer": "Because."}, "question-answer", Chat(ROUND)),
    (
        {"system_prompt": "Be brief.", "question": "Why?", "response": "Because."},
        "question-answer",
        Chat([system(), *ROUND]),
    ),
    ({"text": "Once."}, "text", Text("Once.")),
    ({"text": "Once.", "data": ["a", "b"]}, "text", Text("Once.")),
]


@pytest.mark.parametrize(("row", "format", "example"), ROWS)
def test_a_row_is_detected_and_converted(row: dict[str, Any], format: str, example: Any) -> None:
    before = copy.deepcopy(row)
    assert detect(row) == format
    assert convert(row, format) == example
    assert row == before, "the row itself must not change"


def test_every_format_except_template_has_a_row() -> None:
    assert {format for _, format, _ in ROWS} == set(FORMATS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": ROUND, "text": "Once."}, "messages, text"),
        ({"instruction": "Why?", "output": "So.", "text": "Why? So."}, "alpaca, text"),
        ({"prompt": "a", "question": "b", "response": "c"}, "prompt-completion, question-answer"),
        ({"messages": ROUND, "conversations": ROUND}, "several conversations"),
    ],
)
def test_an_ambiguous_row_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        detect(row)


def test_a_row_of_no_format_is_reported_with_its_keys_and_the_formats() -> None:
    with pytest.raises(BadRow) as caught:
        detect({"titel": "x", "body\n": "y", "prompt": "without an answer"})
    assert "'titel' 'body\\n' 'prompt'" in caught.value.what
    assert all(format in caught.value.do for format in (*FORMATS, "template"))
    many = {f"key{n}": n for n in range(5000)}
    with pytest.raises(BadRow) as caught:
        detect({**many, "k" * 10**6: 1})
    assert "4989 more" in caught.value.what and len(caught.value.what) < 400


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"Question": "a", "Answer": "b"}, "{question: Question, answer: Answer}"),
        (
            {" INSTRUCTION": "a", "Input": "", "output": "b"},
            '{instruction: " INSTRUCTION", output: output, input: Input}',
        ),
        ({"Messages": []}, "{messages: Messages}"),
        ({"Frage": "a", "Antwort des Arztes": "b"}, '{question: Frage, answer: "Antwort des Arztes"}'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "{question: prompt, answer: chosen}"),
        ({"prompt": [user()], "chosen": [assistant()], "rejected": []}, "{prompt: prompt, completion: chosen}"),
        ({"prompt": "a", "chosen": ROUND, "rejected": ROUND}, "{messages: chosen}"),
        ({"chosen": "H: a A: b", "rejected": "H: a A: c"}, "{text: chosen}"),
    ],
)
def test_an_unknown_row_gets_the_columns_that_make_it_a_known_one(row: dict[str, Any], columns: str) -> None:
    with pytest.raises(BadRow) as caught:
        detect(row)
    assert caught.value.do.endswith(f"data.columns: {columns}")
    assert ("preference tuning" in caught.value.what) == ("chosen" in row)
    meant = picked(row, yaml.parse(columns, "columns"))
    assert detect(meant) in FORMATS


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_without_the_keys_of_the_named_format_is_refused(format: str) -> None:
    with pytest.raises(BadRow, match=r"has no .* Its keys: 'other'"):
        convert({"other": 1}, format)


@pytest.mark.parametrize("name", [*SHAREGPT_ROLES, " Human ", "ChatGPT", "USER"])
def test_role_names_of_published_data_sets_are_known(name: str) -> None:
    turns = {
        "system": [(name, "a"), ("human", "b"), ("gpt", "c")],
        "developer": [(name, "a"), ("human", "b"), ("gpt", "c")],
        "user": [(name, "a"), ("gpt", "b")],
        "assistant": [("human", "a"), (name, "b")],
        "tool": [("human", "a"), ("gpt", "<call>"), (name, "b"), ("gpt", "c")],
    }
    role = SHAREGPT_ROLES[name.strip().lower()]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns[role]]}
    chat = convert(row, detect(row))
    assert isinstance(chat, Chat)
    assert role in [message["role"] for message in chat.messages]


def test_a_sharegpt_function_call_becomes_a_tool_call() -> None:
    def row(value: str) -> dict[str, Any]:
        turns = (("human", "Where?"), ("function_call", value), ("observation", "[1]"), ("gpt", "There."))
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    chat = convert(row('{"name": "look", "arguments": {"at": 1}}'), "sharegpt")
    assert isinstance(chat, Chat)
    assert chat.messages[1] == assistant(None, tool_calls=[call({"at": 1})])
    assert chat.messages[2] == {"role": "tool", "content": "[1]"}
    chat = convert(row("look(at=1)"), "sharegpt")
    assert isinstance(chat, Chat)
    assert chat.messages[1] == assistant("look(at=1)"), "a call that is not JSON stays text"


def test_turns_are_normalised_and_keep_the_keys_of_templates() -> None:
    parts = [{"type": "text", "text": "Where "}, {"type": "text", "text": "is it?", "image": None}]
    thinking = {"reasoning_content": "Hm.", "thinking": "Hm.", "name": "Ada"}
    calls = [{"id": "c1", **call('{"at": [1, 2.5]}')}, {"name": "bare", "id": None}, call("not JSON"), call("5")]
    answer = {"role": "tool", "content": "", "tool_call_id": "c1", "cost": 3}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {**user(parts), "tool_calls": None, "name": None},
        assistant(None, tool_calls=calls, **thinking, logprobs=[1]),
        answer,
        answer,
        assistant("<think>Hm.</think>Here."),
    ]
    before = copy.deepcopy(messages)
    assert check_chat(messages) == [
        {"role": "developer", "content": "Be brief."},
        user("Where is it?"),
        assistant(
            None,
            tool_calls=[{"id": "c1", **call({"at": [1, 2.5]})}, call({}, "bare"), call("not JSON"), call("5")],
            **thinking,
        ),
        *[{"role": "tool", "content": "", "tool_call_id": "c1"}] * 2,
        assistant("<think>Hm.</think>Here."),
    ]
    assert messages == before


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": NaN}', "[" * 10**5, f'{{"a": {"9" * 5000}}}', "", '{"a": 1'],
    ids=["surrogate", "nan", "deep", "huge number", "nothing", "cut"],
)  # fmt: skip
def test_arguments_that_are_not_usable_json_stay_text(arguments: str) -> None:
    (_, answer) = check_chat([user(), assistant("", tool_calls=[call(arguments)])])
    assert answer["tool_calls"] == [call(arguments)]


BAD_CHATS: list[tuple[Any, str]] = [
    ("Why?", "is text, not a list of turns"),
    ({}, "is an object, not a list"),
    ([], "is empty"),
    (["Why?"], "Turn 1 is text, not an object"),
    ([{"content": "Why?"}], 'Turn 1 has no "role"'),
    ([user(), {"role": None, "content": "a"}], 'Turn 2 has no "role"'),
    ([{"role": "usr", "content": "Why?"}], "Turn 1 has the unknown role 'usr'"),
    ([{"role": ["user"], "content": "Why?"}], r"Turn 1 has the unknown role \['user'\]"),
    ([{"role": "User", "content": "Why?"}], "unknown role 'User'"),
    ([user(None)], 'Turn 1 has no "content"'),
    ([user(math.nan)], '"content" of turn 1 is a number'),
    ([user(True)], '"content" of turn 1 is true or false'),
    ([user({"text": "a"})], '"content" of turn 1 is an object'),
    ([user([{"type": "image", "image": "x"}])], "Turn 1 has a part that is of type 'image'; only text"),
    ([user(["Why?"])], "Turn 1 has a part that is text"),
    ([user([{"type": "text", "text": 5}])], "Turn 1 has a text part without text"),
    ([user([])], "The question in turn 1 is empty"),
    ([user(" \n")], "The question in turn 1 is empty"),
    ([user(), assistant("")], "The answer in turn 2 is empty"),
    ([user(), assistant(" \t\n")], "The answer in turn 2 is empty"),
    ([user(), assistant(None)], 'Turn 2 has no "content"'),
    ([user(), assistant("", tool_calls=[])], "The answer in turn 2 is empty"),
    ([user(), assistant("", thinking="Hm.")], "The answer in turn 2 is empty"),
    ([user()], "no assistant turn"),
    ([system(), user()], "no assistant turn"),
    ([system(), system(), *ROUND], "Turn 2 is a second system turn"),
    ([system(), {"role": "developer", "content": "a"}, *ROUND], "Turn 2 is a second system turn"),
    ([*ROUND, system(), *ROUND], "Turn 3 is a system turn, which may only come first"),
    ([user(), user(), assistant()], "turns 1 and 2 are both user turns"),
    ([user(), assistant(), assistant()], "turns 2 and 3 are both assistant turns"),
    ([user(), assistant(tool_calls=[call()]), system(), assistant()], "Turn 3 is a system turn, which may only come"),
    ([TOOL, *ROUND], "Turn 1 is a tool turn, but the turn before it calls no tool"),
    ([user(), TOOL, assistant()], "Turn 2 is a tool turn, but the turn before it calls no tool"),
    ([user(), assistant(), TOOL, assistant()], "Turn 3 is a tool turn, but the turn before it calls no tool"),
    ([user(), assistant("", tool_calls=[call()]), TOOL, user()], "Turn 4 follows a tool turn"),
    ([user(), assistant("", tool_calls="look")], "tool calls of turn 2 are text, not a list"),
    ([user(), assistant("", tool_calls=["look"])], "tool call of turn 2 is text, not an object"),
    ([user(), assistant("", tool_calls=[{"function": "look"}])], "tool call of turn 2 has no function name"),
    ([user(), assistant("", tool_calls=[call(name="")])], "tool call of turn 2 has no function name"),
    ([user(), assistant("", tool_calls=[call(arguments=[1])])], "arguments of a tool call of turn 2 are a list"),
    ([user(), assistant("", tool_calls=[{**call(), "type": "code"}])], "unknown type 'code'"),
    ([{**user(), "tool_calls": [call()]}, assistant()], "Turn 1 is a user turn with tool calls"),
    ([user(), assistant(thinking=["Hm."])], 'The "thinking" of turn 2 is a list'),
    ([user(), assistant(weight=0.5)], 'The "weight" of turn 2 is 0.5'),
    ([user(), assistant(weight=-1)], 'The "weight" of turn 2 is -1'),
    ([user(), assistant(weight=math.nan)], 'The "weight" of turn 2 is nan'),
    ([user(), assistant(weight="0")], "The \"weight\" of turn 2 is '0'"),
    ([user(), assistant(train="no")], '"train" of turn 2 is text'),
]


@pytest.mark.parametrize(("messages", "message"), BAD_CHATS)
def test_a_bad_chat_is_refused_with_its_turn(messages: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        check_chat(messages)
    assert caught.value.do


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        ({"messages": ROUND, "system": 5}, "messages", '"system" is a number'),
        ({"messages": [system(), *ROUND], "system": "a"}, "messages", 'both a "system" text and a system turn'),
        ({"messages": ROUND, "tools": "look"}, "messages", '"tools" is text that is not a JSON list'),
        ({"messages": ROUND, "tools": {"a": 1}}, "messages", '"tools" is an object, not a list'),
        ({"messages": ROUND, "tools": [{}, "look"]}, "messages", "Tool 2 is text, not an object"),
        ({"messages": [{"from": "human", "value": "a"}]}, "messages", 'have no "role"'),
        ({"data": ["Why?", 3]}, "ultrachat", '"data" is not a list of texts'),
        ({"data": []}, "ultrachat", '"data" is not a list of texts'),
        ({"data": ["Why?"]}, "ultrachat", "no assistant turn"),
        ({"data": ["Why?", " "]}, "ultrachat", "The answer in turn 2 is empty"),
        ({"conversations": []}, "sharegpt", "The conversation is empty"),
        ({"conversations": ["a"]}, "sharegpt", "Turn 1 is text"),
        ({"conversations": [{"value": "a"}]}, "sharegpt", 'Turn 1 has no "from"'),
        ({"conversations": [{"from": "humann", "value": "a"}]}, "sharegpt", "unknown role 'humann'"),
        ({"conversations": [{"from": {}, "value": "a"}]}, "sharegpt", "unknown role {}"),
        ({"conversations": [{"from": "gpt", "value": ""}]}, "sharegpt", "The answer in turn 1 is empty"),
        ({"prompt": "Why?", "completion": ""}, "prompt-completion", '"completion" is empty'),
        ({"prompt": "", "completion": "a"}, "prompt-completion", '"prompt" is empty'),
        ({"prompt": 1, "completion": "a"}, "prompt-completion", '"prompt" is a number'),
        ({"prompt": [], "completion": ROUND}, "prompt-completion", '"prompt" is empty'),
        ({"prompt": ROUND[:1], "completion": "a"}, "prompt-completion", '"prompt" is a list and "completion" is text'),
        ({"prompt": ROUND, "completion": [user()]}, "prompt-completion", '"completion" has no assistant turn'),
        ({"instruction": "Why?", "output": " "}, "alpaca", '"output" is empty'),
        ({"instruction": "Why?", "input": 5, "output": "a"}, "alpaca", '"input" is a number'),
        ({"instruction": "Why?", "output": "a", "history": [["b", "c"]]}, "alpaca", "earlier turns"),
        ({"question": "", "answer": "a"}, "question-answer", '"question" is empty'),
        ({"question": "Why?", "answer": 42}, "question-answer", '"answer" is a number'),
        ({"messages": ROUND, "images": ["cat.png"]}, "messages", 'The row has "images", but only text can be trained'),
        ({"image": {"path": "cat.png"}, "question": "What is it?", "answer": "A cat."}, "question-answer", '"image"'),
        ({"text": "\n"}, "text", '"text" is empty'),
        ({"text": ["a"]}, "text", '"text" is a list'),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(row: dict[str, Any], format: str, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        convert(row, format)


def test_a_misspelled_role_gets_a_suggestion() -> None:
    for written, meant in (("usr", "user"), ("human", "user"), ("Assistant", "assistant"), ("function", "tool")):
        with pytest.raises(BadRow) as caught:
            check_chat([{"role": written, "content": "a"}])
        assert f"did you mean '{meant}'?" in caught.value.do
    with pytest.raises(BadRow) as caught:
        convert({"conversations": [{"from": "humn", "value": "a"}]}, "sharegpt")
    assert "did you mean 'human'?" in caught.value.do


def test_ten_thousand_mutated_rows_are_converted_or_refused() -> None:
    rng = random.Random(4)
    junk: list[Any] = [None, True, 0, -1.5, math.nan, 10**30, "", " ", "\ud800", "user", "x" * 5000]
    junk += [[], {}, [[]], [None], {"role": "user"}, {"type": "text", "text": "a"}, call("{")]
    seeds = [row for row, _, _ in ROWS]
    seeds += [
        {"messages": [user([{"type": "text", "text": "a"}]), assistant(None, tool_calls=[call()]), TOOL, assistant()]}
    ]

    def mutate(value: Any) -> Any:
        if rng.random() < 0.08:
            return copy.deepcopy(rng.choice(junk))
        if isinstance(value, dict):
            kept = {key: mutate(item) for key, item in value.items() if rng.random() > 0.04}
            if rng.random() < 0.08:
                key = rng.choice(
                    ["messages", "text", "role", "from", "content", "tools", "tool_calls", "system", "\ud800"]
                )
                kept[key] = copy.deepcopy(rng.choice(junk))
            return kept
        if isinstance(value, list):
            items = [mutate(item) for item in value for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2)))]
            return rng.sample(items, len(items)) if rng.random() < 0.1 else items
        return value

    num_converted, reasons = 0, set()
    for _ in range(10_000):
        while not isinstance(row := mutate(rng.choice(seeds)), dict):
            pass
        for format in (None, rng.choice(FORMATS)):
            try:
                example = convert(row, format or detect(row))
            except BadRow as bad:
                assert bad.what and bad.do
                assert len(bad.what) + len(bad.do) < 1500 and bad.what.isprintable()
                reasons.add(bad.what)
            else:
                num_converted += 1
                if isinstance(example, Chat):
                    assert check_chat(example.messages, calls_in_text=True) == example.messages
    assert num_converted > 1000 and len(reasons) > 100, "some mutations must be harmless, and others not"


def scan_records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECIPES / "samples" / "sys-scan.jsonl").read_text("utf-8").splitlines()]


def scan_schema() -> dict[str, Any]:
    return json.loads((RECIPES / "schemas" / "sys-scan-ground-truth.schema.json").read_text("utf-8"))


# A path in a record of the sample, the value to put there (... deletes it), and the message.
_FINDING, _CORRELATION = ("enriched_findings", 0), ("correlations", 0)
SCHEMA_BREACHES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("version",), "ground_truth_v2", r"requires 'ground_truth_v1' at \$\.version; it is 'ground_truth_v2'"),
    *[
        ((key,), ..., rf"requires '{key}' at \$\.")
        for key in ("version", "enriched_findings", "correlations", "reductions", "summaries", "actions")
    ],
    *[
        ((*_FINDING, key), ..., rf"requires '{key}' at \$\.enriched_findings\[0\]\.")
        for key in (
            "id", "title", "severity", "risk_score", "base_severity_score", "description", "metadata", "risk_subscores",
            "probability_actionable", "baseline_status", "tags", "rationale", "correlation_refs",
        )
    ],
    *[
        ((*_FINDING, "risk_subscores", key), ..., rf"requires '{key}' at \$\.enriched_findings\[0\]\.risk_subscores")
        for key in ("impact", "exposure", "anomaly", "confidence")
    ],
    ((*_FINDING, "risk_subscores", "impact"), 1.1, r"requires maximum 1 at .*impact; it is 1\.1"),
    ((*_FINDING, "risk_subscores", "impact"), -0.1, "requires minimum 0 at"),
    ((*_FINDING, "risk_subscores", "impact"), "0.5", "requires the type number at .*impact; it is text"),
    ((*_FINDING, "probability_actionable"), 2, "requires maximum 1 at .*probability_actionable"),
    ((*_FINDING, "severity"), "severe", "requires one of 'info', 'low', .* it is 'severe'"),
    (_FINDING, "a finding", "requires the type object"),
    ((*_CORRELATION, "title"), ..., r"requires 'title' at \$\.correlations\[0\]"),
    ((*_CORRELATION, "correlation_type"), ..., r"requires 'correlation_type' at \$\.correlations\[0\]"),
    ((*_CORRELATION, "correlation_refs"), ..., "requires 'correlation_refs'"),
    ((*_CORRELATION, "correlation_refs"), [], "requires minItems 1 at .*correlation_refs; it has 0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), SCHEMA_BREACHES)
def test_every_rule_of_the_schema_is_checked(path: tuple[Any, ...], value: Any, message: str) -> None:
    record = next(record for record in scan_records() if record["correlations"])
    parent: Any = record
    for key in path[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    with pytest.raises(BadRow, match=message):
        SchemaCheck(scan_schema()).check(record)


def test_a_schema_failure_inside_anyof_has_its_path_and_a_short_message() -> None:
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, {"properties": {"b": {"type": "integer"}}}]}}}
    with pytest.raises(BadRow, match=r"type integer at \$\.a\.b; it is text"):
        SchemaCheck(schema).check({"a": {"b": "x" * 10**6}})
    with pytest.raises(BadRow) as caught:
        SchemaCheck({"additionalProperties": {"pattern": "^a"}}).check({"k\n" * 10**5: "b" * 10**6})
    assert len(caught.value.what) < 400 and caught.value.what.isprintable()


def test_references_of_a_schema_are_never_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        check = SchemaCheck({"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/other.json"})
        socket.setdefaulttimeout(2.0)  # seconds; a connection would wait for an answer that never comes
        try:
            with pytest.raises(TrilloraError, match="does not contain; references are not fetched"):
                check.check({})
        finally:
            socket.setdefaulttimeout(None)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_invalid_or_endless_schema_is_reported() -> None:
    with pytest.raises(TrilloraError, match=r"not a JSON Schema: .*'strin.* at \$\.properties\.a\.type"):
        SchemaCheck({"properties": {"a": {"type": "strin"}}})
    with pytest.raises(BadRow, match="endlessly"):
        SchemaCheck({"$ref": "#"}).check({})


def test_a_missing_schema_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(TrilloraError) as caught:
        SchemaCheck({})
    assert "pip install" in caught.value.do


def recipe_data(name: str) -> dict[str, Any]:
    path = RECIPES / name
    return yaml.parse(path.read_text("utf-8"), str(path))["data"]


def rows_at(document: Any, where: str) -> list[Any]:
    """What `row_path: a.*.*` means, in the most obvious form."""
    found = [document]
    for step in where.split("."):
        if step == "*":
            found = [item for value in found for item in (value.values() if isinstance(value, dict) else value)]
        else:
            found = [value[step] for value in found]
    return [row for value in found for row in value]


def finding_rows(name: str) -> list[dict[str, Any]]:
    data = recipe_data(name)
    rows = []
    for file in sorted(RECIPES.glob(data["path"])):
        document = json.loads(file.read_text("utf-8"))
        if "compressed" in document:
            assert document["compression_method"] == "gzip"
            document = json.loads(gzip.decompress(bytes.fromhex(document["data"])))
        rows += rows_at(document, data["row_path"])
    return rows


def test_the_scan_recipe_writes_the_bytes_of_the_original_pipeline() -> None:
    data = recipe_data("sys-scan.yaml")
    template, schema = (
        RowTemplate(data["template"]),
        SchemaCheck(json.loads((RECIPES / data["json_schema"]).read_text("utf-8"))),
    )
    records = scan_records()
    assert len(records) == 12
    for record in records:
        schema.check(record)
        shown = json.dumps({"findings": record["enriched_findings"], "correlations": record["correlations"]})
        answer = json.dumps({"summary": record["summaries"], "actions": record["actions"]})
        pair = template.convert(record)
        assert isinstance(pair, Pair)
        assert pair.completion == answer
        assert pair.prompt == (
            "### Instruction:\nAnalyze the following security finding and provide an assessment:\n\n"
            f"{shown}\n\n### Response:\n"
        )
    assert any(not json.dumps(record, ensure_ascii=False).isascii() for record in records), (
        "the sample must test escaping"
    )


@pytest.mark.parametrize("name", ["sys-scan-shards.yaml", "sys-scan-flat.yaml"])
def test_a_finding_recipe_asks_without_the_answer(name: str) -> None:
    template, rows = RowTemplate(recipe_data(name)["template"]), finding_rows(name)
    assert len(rows) == 12
    for row in rows:
        pair = template.convert(row)
        assert isinstance(pair, Pair)
        answer = {key: row[key] for key in ("risk_score", "risk_subscores", "probability_actionable", "rationale")}
        shown = {key: value for key, value in row.items() if key not in answer}
        assert len(shown) == 9
        assert pair.completion == json.dumps(answer)
        assert pair.prompt.splitlines()[3] == json.dumps(shown)
        assert pair.prompt.endswith("\n\n### Response:\n")
        assert row["rationale"] not in pair.prompt


def test_shards_and_the_flat_file_hold_the_same_findings() -> None:
    def by_id(name: str) -> list[Any]:
        return sorted(finding_rows(name), key=lambda row: row["id"])

    assert by_id("sys-scan-shards.yaml") == by_id("sys-scan-flat.yaml")


def test_the_chat_recipe_holds_chats() -> None:
    data = recipe_data("sys-scan-chatml.yaml")
    lines = (RECIPES / data["path"]).read_text("utf-8").splitlines()
    assert len(lines) == 12
    for line in lines:
        row = json.loads(line)
        assert detect(row) == data["format"]
        assert isinstance(convert(row, "messages"), Chat)
