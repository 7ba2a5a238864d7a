"""The system message that all rows have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rendering import load

TOKENIZER = chat_tokenizer("chatml")
BRIEF = "Answer briefly.\nIn English, or auf Deutsch: für alle."


def chat(system: str | None, number: int = 0) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"Hello {number}"}, {"role": "assistant", "content": "Hi"}]
    return {"messages": [*([{"role": "system", "content": system}] if system is not None else []), *turns]}


def alpaca(number: int, **more: str) -> dict[str, Any]:
    return {"instruction": f"Add {number} and 1.", "output": str(number + 1), **more}


MANY = [chat(BRIEF, number) for number in range(600)]  # several batches, for several workers
CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "the same in all": (MANY, BRIEF),
    "another in one": ([*MANY, chat("Be rude.")], ""),
    "another in the first": ([chat("Be rude."), *MANY], ""),
    "none in one": ([*MANY, chat(None)], ""),
    "none": ([chat(None)], ""),
    "empty": ([chat("")], ""),
    "of a developer": ([{"messages": [{"role": "developer", "content": BRIEF}, *chat(None)["messages"]]}], ""),
    "a key of the row": ([alpaca(number, system="Add.") for number in range(3)], "Add."),
    "two values of a key": ([alpaca(1, system="Add."), alpaca(2, system="Sum.")], ""),
    "texts": ([{"text": "Once upon a time"}], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_system_message_that_all_rows_have_is_known(name: str, tmp_path: Path) -> None:
    rows, expected = CASES[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for _ in ("new", "from the cache"):
        dataset = load(path, TOKENIZER, tmp_path)
        assert dataset.system == expected and len(dataset.store.rows) == len(rows)
    assert not dataset.is_new


def test_bad_rows_do_not_count(tmp_path: Path) -> None:
    rows = [chat(BRIEF), {"messages": "no"}, chat(BRIEF, 1), {"messages": [chat("Be rude.")["messages"][0]]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    dataset = load(tmp_path / "rows.jsonl", TOKENIZER, tmp_path, on_bad_row="skip")
    assert dataset.num_problems == 2 and dataset.system == BRIEF


def test_a_template_of_the_recipe_has_one_if_it_does_not_depend_on_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(alpaca(number)) + "\n" for number in range(3)), "utf-8")
    for system, expected in (("Add.", "Add."), ("Add to {{ output }}.", "")):
        template = {"system": system, "user": "{{ instruction }}", "assistant": "{{ output }}"}
        assert load(tmp_path / "rows.jsonl", TOKENIZER, tmp_path, template=template).system == expected
