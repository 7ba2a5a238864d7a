"""Weights of turns and rows, and arguments of the chat template, equal what the tokenizer's template gives."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from chat_tokenizers import FAMILIES, chat_tokenizer, own_tokens, some_conversation, some_tool
from dose import dose
from peft_parity import peft_losses
from proved_rendering import spoken, trained_runs
from rendering import load, render, render_chat

from trillora.data.rendering.formats import MAX_WEIGHT
from trillora.errors import TrilloraError
from trillora.generation.prompts import Prompts
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
# What templates of 2026 do with arguments: a switch, a text, a list of tools, and a default for what is not given.
ARGUMENTS_TEMPLATE = """\
{%- if reasoning_effort is defined %}{{- 'Effort: ' + reasoning_effort + '\\n' }}{% endif %}
{%- if tools %}{{- (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' and enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
MANY_ARGUMENTS: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "low"},
    {"tools": [some_tool("look")], "enable_thinking": False},
    {"unused": {"a": [1, 2.5, None]}},
]


def tokenizer_with_arguments() -> Any:
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.chat_template = ARGUMENTS_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_with_weight_0_are_read_and_not_trained(name: str) -> None:
    rng, family, tokenizer = random.Random(3), FAMILIES[name], chat_tokenizer(name)
    excluded = 0
    for number in range(dose(12, 200)):
        row = some_conversation(rng, family)
        turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        if len(turns) < 2:
            continue
        without = set(rng.sample(turns, rng.randint(1, len(turns) - 1)))
        mark = {"weight": 0} if number % 2 else {"train": False}
        other = {"weight": 1} if number % 3 else {}
        marked = [
            {**message, **(mark if i in without else other if i in turns else {})}
            for i, message in enumerate(row["messages"])
        ]
        rendered = render_chat(marked, tokenizer, tools=row.get("tools"))
        assert rendered.tokens.tolist() == own_tokens(tokenizer, **row)
        speech = spoken(row["messages"], family)
        kept = [text for turn, text in zip(turns, speech, strict=True) if turn not in without]
        assert trained_runs(rendered, tokenizer) == kept
        everything = render_chat(marked, tokenizer, train_on="everything", tools=row.get("tools"))
        left_out = "".join(text for turn, text in zip(turns, speech, strict=True) if turn in without)
        untrained = tokenizer.decode(everything.tokens[~everything.supervised].tolist())
        left = "".join(untrained.split()).replace("<think></think>", "")  # the template's empty block
        assert left == "".join(left_out.split()), "all but the answers and space after them"
        excluded += len(without)
    assert excluded > 2


def test_a_row_without_a_trained_answer_is_bad() -> None:
    tokenizer = chat_tokenizer("chatml")
    silent = [QUESTION, {"role": "assistant", "content": "3", "weight": 0}]
    with pytest.raises(TrilloraError, match="Every answer that would be trained has weight 0"):
        render_chat(silent, tokenizer)
    both = [*silent[:1], {"role": "assistant", "content": "3"}, QUESTION, silent[1]]
    with pytest.raises(TrilloraError, match="weight 0"):
        render_chat(both, tokenizer, train_on="last")
    assert trained_runs(render_chat(both, tokenizer), tokenizer) == ["3<|im_end|>"]


def test_sharegpt_turns_have_weights_too() -> None:
    tokenizer = chat_tokenizer("chatml")
    turns = [("human", "Why?", None), ("gpt", "No.", 0), ("human", "Why?", None), ("gpt", "Because.", 1)]
    row = {"conversations": [{"from": who, "value": text, "weight": weight} for who, text, weight in turns]}
    assert trained_runs(render(row, tokenizer, "sharegpt"), tokenizer) == ["Because.<|im_end|>"]


def weighted_rows(path: Path, weights: list[Any]) -> Path:
    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": f"It is {number}."}], "importance": weight}
        for number, weight in enumerate(weights)
    ]
    for row in rows:
        if row["importance"] is ...:
            del row["importance"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_row_weights_are_those_of_the_targets(tmp_path: Path) -> None:
    path = weighted_rows(tmp_path / "rows.jsonl", [2, 0.5, 0, ..., "3"])
    tokenizer = chat_tokenizer("chatml")
    data = load(path, tokenizer, tmp_path / "cache", weight_key="importance")
    documents = data.documents("train", 0)
    weights = {
        tokenizer.decode(d.tokens[d.supervised].tolist())[6]: d.weight for d in map(documents.__getitem__, range(4))
    }
    assert len(documents) == 4, "a row of weight 0 is left out"
    assert weights == {"0": 2, "1": 0.5, "3": 1, "4": 3}
    assert all(
        d.weight == 1
        for d in map(load(path, tokenizer, tmp_path / "other").documents("train", 0).__getitem__, range(5))
    )


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, True, None, "much", [1], 2 * MAX_WEIGHT])
def test_a_weight_that_cannot_be_used_is_refused(weight: Any) -> None:
    row = {"messages": [QUESTION, {"role": "assistant", "content": "3"}], "importance": weight}
    with pytest.raises(TrilloraError, match=r'The weight of this row, "importance"|NaN|Infinity'):
        render(row, chat_tokenizer("chatml"), "messages", weight_key="importance")


def test_losses_of_weighted_rows_equal_pefts(tmp_path: Path) -> None:
    folder = tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1))
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    weighted = [{**row, "importance": (0.25, 1, 4)[number % 3]} for number, row in enumerate(rows)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weighted))
    options = {"steps": 4, "learning_rate": 3e-3}
    losses = {}
    for key in ("importance", None):
        recipe = load_recipe(tiny_run.recipe(folder, train=options, data={"pack": False, "weight_key": key}))
        losses[key] = train(recipe, tmp_path / str(key)).losses
        np.testing.assert_allclose(losses[key], peft_losses(recipe, 4), rtol=1e-4)  # sums in another order
    assert abs(losses["importance"][0] - losses[None][0]) > 1e-3


@pytest.mark.parametrize("arguments", MANY_ARGUMENTS, ids=str)
def test_template_arguments_equal_the_tokenizers_own(arguments: dict[str, Any]) -> None:
    tokenizer = tokenizer_with_arguments()
    messages = [QUESTION, {"role": "assistant", "content": "3"}] * 2
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert theirs != tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) or "unused" in arguments
    by_row = render({"messages": messages, "chat_template_kwargs": arguments}, tokenizer, "messages")
    by_recipe = render({"messages": messages}, tokenizer, "messages", template_arguments=arguments)
    as_text = render({"messages": messages, "chat_template_kwargs": json.dumps(arguments)}, tokenizer, "messages")
    other = {"enable_thinking": True, "reasoning_effort": "high", "tools": [some_tool("other")]}
    kept = {key: value for key, value in other.items() if key in arguments}
    replaced = render(
        {"messages": messages, "chat_template_kwargs": arguments}, tokenizer, "messages", template_arguments=kept
    )
    for rendered in (by_row, by_recipe, as_text, replaced):
        assert rendered.tokens.tolist() == theirs
        assert [text.removeprefix("<think>\n\n</think>\n\n") for text in trained_runs(rendered, tokenizer)] == [
            "3<|im_end|>"
        ] * 2

    request = {"add_generation_prompt": True, "return_dict": False}
    asked = tokenizer.apply_chat_template([QUESTION], **request, **arguments)
    assert Prompts(tokenizer, template=tokenizer.chat_template).encode([QUESTION], arguments) == asked
    assert Prompts(tokenizer, template=tokenizer.chat_template, arguments=arguments).encode([QUESTION]) == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "'messages' cannot be set"),
        ({"add_generation_prompt": True}, "cannot be set"),
        ({"eos_token": "x"}, "cannot be set"),
        ({"reasoning_effort": "<|im_end|>"}, "spells a control token"),
        ({"deep": {"er": ["a <|im_start|> b"]}}, "spells a control token"),
        ({"deep": {"<|im_end|>": 1}}, "spells a control token"),
        (5, '"chat_template_kwargs" is a number'),
        ("[1", "not a JSON object"),
    ],
    ids=str,
)
def test_arguments_that_would_change_control_tokens_are_refused(arguments: Any, message: str) -> None:
    row = {"messages": [QUESTION, {"role": "assistant", "content": "3"}], "chat_template_kwargs": arguments}
    with pytest.raises(TrilloraError, match=message):
        render(row, tokenizer_with_arguments(), "messages")
