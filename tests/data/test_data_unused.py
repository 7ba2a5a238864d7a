"""What of a row does not reach the training text is refused or counted, never dropped silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from rendering import load

from trillora.data.rendering import thinking
from trillora.errors import TrilloraError

QUESTION = {"role": "user", "content": "three and three"}
THOUGHT = {"role": "assistant", "reasoning_content": "three plus three", "content": "6"}
PLAIN = {"role": "assistant", "content": "6"}


def loaded(folder: Path, row: dict[str, Any], family: str = "chatml", num_rows: int = 3, **options: Any) -> Any:
    (folder / "a.jsonl").write_text(f"{json.dumps(row)}\n" * num_rows, "utf-8")
    return load(folder / "a.jsonl", chat_tokenizer(family), folder / "cache", **options)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_that_the_template_does_not_write_is_refused_unless_dropped_on_purpose(
    tmp_path: Path, key: str
) -> None:
    row = {"messages": [QUESTION, {"role": "assistant", key: "three plus three", "content": "6"}]}
    with pytest.raises(
        TrilloraError, match=f'does not write "{key}", so the thinking of turn 2 would be lost'
    ) as caught:
        loaded(tmp_path, row)
    assert "<think>" in caught.value.do and "data.thinking: drop" in caught.value.do
    dropped = loaded(tmp_path, row, drop_keys=(key,))
    plain = loaded(tmp_path, {"messages": [QUESTION, PLAIN]})
    assert dropped.remarks == {} and dropped.store.rows["digest"].tolist() == plain.store.rows["digest"].tolist()
    inside = {"messages": [QUESTION, {"role": "assistant", "content": "<think>three plus three</think>6"}]}
    assert loaded(tmp_path, inside).remarks == {thinking.TRAINED: 3}


def test_thinking_that_a_template_writes_in_the_last_round_only_is_counted(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"messages": [QUESTION, THOUGHT]}, "qwen3").remarks == {thinking.TRAINED: 3}
    for last, said in ((PLAIN, thinking.EMPTY), (THOUGHT, thinking.TRAINED)):
        dataset = loaded(tmp_path, {"messages": [QUESTION, THOUGHT, QUESTION, last]}, "qwen3")
        (remark,) = dataset.remarks.keys() - {said}
        assert "leaves out the thinking of an earlier answer" in remark and dataset.remarks[remark] == 3


def test_thinking_that_a_template_removes_from_the_content_is_counted(tmp_path: Path) -> None:
    inside = {"messages": [QUESTION, {"role": "assistant", "content": "<think>three plus three</think>6"}]}
    ((remark, count),) = loaded(tmp_path, inside, "deepseek-r1").remarks.items()
    assert "removes the thinking inside an answer" in remark and count == 3
    with pytest.raises(TrilloraError, match="would be lost") as caught:
        loaded(tmp_path, {"messages": [QUESTION, THOUGHT]}, "deepseek-r1")
    assert "<think>" not in caught.value.do, "that template would remove it there too"


def test_names_and_unknown_keys_are_counted_once_for_each(tmp_path: Path) -> None:
    named = {**QUESTION, "name": "Ada", "mood": "curious", "id": None}
    row = {"messages": [named, {**PLAIN, "name": "Bot"}], "source": "book", "label": False, "tools": [], "note": ""}
    assert loaded(tmp_path, row).remarks == {
        'The chat template does not write the "name" of a turn of the role user': 3,
        'The chat template does not write the "name" of a turn of the role assistant': 3,
        '"source" is not used': 3,
        '"label" is not used': 3,
        '"mood" of a turn is not used': 3,
    }
    names = "{% for m in messages %}{{ m.name }}: {{ m.content }}<|im_end|>{% endfor %}"
    assert not any("name" in remark for remark in loaded(tmp_path, row, chat_template=names).remarks)


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"question": "a", "answer": "b", "context": "c"}, ["context"]),
        ({"prompt": "a", "completion": "b", "label": True}, ["label"]),
        ({"instruction": "a", "input": "", "output": "b", "id": 0}, ["id"]),
        ({"text": "a", "system": "b"}, ["system"]),
        ({"data": ["a", "b"], "system": "c"}, []),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "likes": 3}]}, ["likes"]),
    ],
)
def test_keys_that_a_format_does_not_read_are_counted(tmp_path: Path, row: dict[str, Any], unused: list[str]) -> None:
    assert [remark.split('"')[1] for remark in loaded(tmp_path, row).remarks] == unused
    columns = {key: key for key in row if key not in unused}
    assert loaded(tmp_path, {**row, "more": 1}, columns=columns).remarks.keys() <= {'"likes" of a turn is not used'}


def test_a_chat_that_begins_with_the_assistant_is_counted(tmp_path: Path) -> None:
    opened = {"messages": [{"role": "system", "content": "Be brief."}, PLAIN, QUESTION, PLAIN]}
    ((remark, count),) = loaded(tmp_path, opened).remarks.items()
    assert "begins with the assistant" in remark and count == 3


def test_a_row_with_very_many_keys_does_not_grow_the_description(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": "a", **{f"{n} {m}": 1 for m in range(100)}}) + "\n" for n in range(50))
    (tmp_path / "a.jsonl").write_text(rows)
    assert len(load(tmp_path / "a.jsonl", chat_tokenizer("chatml"), tmp_path).remarks) == 50
