"""Rows of preferences, from their formats to documents: pairs of answers, and answers with a label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer
from rendering import load, render

from trillora.data.documents import PARTS
from trillora.data.prepare import UNPAIRED, Dataset
from trillora.data.questions import question_of
from trillora.data.rendering import formats
from trillora.data.rendering.chat_templates import NAMED
from trillora.data.rendering.preferences import convert, detect
from trillora.data.rows import BadRow, Chat, Labelled, Pair, Preference
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.errors import TrilloraError

TOKENIZER = chat_tokenizer("chatml")
Row = dict[str, Any]


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED = [turn("user", "Why?")]
GOOD, BAD = turn("assistant", "Because it is."), turn("assistant", "Go away!")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def write(folder: Path, *rows: Row) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read(folder: Path, *rows: Row, kind: str = "pairs", **options: Any) -> Dataset:
    return load(write(folder, *rows), TOKENIZER, folder / "cache", rows=kind, **options)


def documents_of(dataset: Dataset) -> list[TokenizedDocument]:
    documents = dataset.documents()
    return [documents[index] for index in range(len(documents))]


def as_text(document: TokenizedDocument) -> str:
    return str(TOKENIZER.decode(document.tokens.tolist()))


def trained_text(document: TokenizedDocument) -> str:
    return str(TOKENIZER.decode(document.tokens[document.supervised].tolist()))


# -- pairs: formats ----------------------------------------------------------------------------------------------------

CHATS = {
    "turns": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "one turn as an object": {"prompt": ASKED[0], "chosen": GOOD, "rejected": BAD},
    "answers as texts": {"prompt": ASKED, "chosen": GOOD["content"], "rejected": BAD["content"]},
    "a text and whole conversations": {"prompt": "Why?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "UltraFeedback": {
        "prompt": "Why?",
        "prompt_id": "17",
        "chosen": [*ASKED, GOOD],
        "rejected": [*ASKED, BAD],
        "messages": [*ASKED, GOOD],
        "score_chosen": 6.0,
        "score_rejected": 4.0,
    },
    "a text and answers as turns": {"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]},
    "turns and whole conversations": {"prompt": ASKED, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "implicit": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "OpenAI": {
        "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    },
    "ms-swift": {"messages": [*ASKED, GOOD], "rejected_response": BAD["content"]},
    "ms-swift, messages": {"messages": [*ASKED, GOOD], "rejected_response": [BAD]},
    "ms-swift, conversation": {"messages": [*ASKED, GOOD], "rejected_messages": [*ASKED, BAD]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
    "question": {"question": "Why?", "chosen": GOOD["content"], "rejected": BAD["content"]},
    "instruction": {"instruction": "Why?", "input": "", "chosen": GOOD["content"], "rejected": BAD["content"]},
    "content as parts": {
        "prompt": ASKED,
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": GOOD["content"]}]}],
        "rejected": [BAD],
    },
    "null in other columns": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD], "messages": None, "question": None},
}


@pytest.mark.parametrize("row", CHATS.values(), ids=list(CHATS))
def test_every_form_of_a_pair_of_conversations_means_the_same(row: Row) -> None:
    assert detect(row, "pairs") == "preference"
    pair = convert(row, "preference")
    assert pair == Preference(Chat([*ASKED, GOOD], num_prompt=1), Chat([*ASKED, BAD], num_prompt=1))


def test_texts_stay_raw_texts_unless_the_row_has_a_system_text() -> None:
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert convert(row, "preference") == Preference(Pair("2+2=", "4"), Pair("2+2=", "5"))
    pair = convert({**row, "system": "Count."}, "preference")
    turns = [turn("system", "Count."), turn("user", "2+2=")]
    sides = (Chat([*turns, turn("assistant", answer)], num_prompt=2) for answer in "45")
    assert pair == Preference(*sides)


def test_system_tools_and_arguments_of_a_row_belong_to_both_sides() -> None:
    about = {"system": "Be kind.", "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    for row in (CHATS["turns"], CHATS["implicit"], CHATS["question"], CHATS["ms-swift"]):
        pair = convert({**row, **about}, "preference")
        assert isinstance(pair, Preference)
        for side in (pair.chosen, pair.rejected):
            assert isinstance(side, Chat)
            assert (side.messages[0], side.num_prompt) == (turn("system", "Be kind."), 2)
            assert (side.tools, side.arguments) == (TOOLS, {"enable_thinking": False})
    openai = {**CHATS["OpenAI"], "input": {"messages": ASKED, "tools": TOOLS}}
    pair = convert(openai, "preference")
    assert isinstance(pair, Preference) and isinstance(pair.rejected, Chat) and pair.rejected.tools == TOOLS


def test_answers_of_several_turns_begin_where_the_row_says_or_where_they_differ() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = turn("tool", "7")
    explicit = convert({"prompt": ASKED, "chosen": [call, result, GOOD], "rejected": [call, result, BAD]}, "preference")
    implicit = convert({"chosen": [*ASKED, call, result, GOOD], "rejected": [*ASKED, BAD]}, "preference")
    shared = convert({"messages": [*ASKED, call, result, GOOD], "rejected_response": "No."}, "preference")
    replaced = convert({"messages": [*ASKED, call, result, GOOD], "rejected_response": [BAD]}, "preference")
    for pair, prompt, turns in ((explicit, 1, 4), (implicit, 1, 2), (shared, 3, 4), (replaced, 1, 2)):
        assert isinstance(pair, Preference) and isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
        assert (pair.chosen.num_prompt, pair.rejected.num_prompt, len(pair.rejected.messages)) == (
            prompt,
            prompt,
            turns,
        )


def test_sharegpt_turns_may_have_tool_results_without_calls() -> None:
    said = [("human", "Why?"), ("gpt", "f()"), ("observation", "7")]
    turns = [{"from": name, "value": value} for name, value in said]
    row = {"conversations": turns, "chosen": {"from": "gpt", "value": "7"}, "rejected": {"from": "gpt", "value": "8"}}
    pair = convert(row, "preference")
    assert isinstance(pair, Preference) and isinstance(pair.chosen, Chat) and pair.chosen.num_prompt == 3


# -- pairs: bad rows ---------------------------------------------------------------------------------------------------

BAD_PAIRS: dict[str, tuple[Row, str]] = {
    "equal texts": ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"answer are the same\.$"),
    "equal turns": ({"prompt": ASKED, "chosen": [GOOD], "rejected": [GOOD]}, r"answer are the same\.$"),
    "equal conversations": ({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD]}, r"answer are the same\.$"),
    "no rejected": ({"prompt": "a", "chosen": "b", "rejected": None}, 'no "rejected", which is the rejected answer'),
    "no chosen": ({"prompt": "a", "rejected": "b"}, 'no "chosen", which is the chosen answer'),
    "no output": ({"input": {"messages": ASKED}, "preferred_output": [GOOD]}, 'no "non_preferred_output"'),
    "empty text": ({"prompt": "a", "chosen": "b", "rejected": " "}, '"rejected" is empty'),
    "empty list": ({"prompt": ASKED, "chosen": [], "rejected": [BAD]}, '"chosen" is empty'),
    "empty answer": ({"prompt": ASKED, "chosen": [turn("assistant", "")], "rejected": [BAD]}, 'empty .*of "chosen"'),
    "no prompt of texts": ({"chosen": "H: a A: b", "rejected": "H: a A: c"}, "has no prompt: it has only the texts"),
    "no prompt of turns": ({"chosen": [GOOD], "rejected": [BAD]}, "no turn in common, so there is no prompt"),
    "empty prompt": ({"prompt": "", "chosen": "b", "rejected": "c"}, '"prompt" is empty'),
    "empty prompt turns": ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, '"prompt" is empty'),
    "no input": ({"preferred_output": [GOOD], "non_preferred_output": [BAD]}, 'no prompt: "input" has no "messages"'),
    "other start": ({"chosen": [turn("user", "a"), GOOD], "rejected": [turn("user", "b"), BAD]}, "no turn in common"),
    "start of the other": (
        {"chosen": [*ASKED, GOOD, *ASKED, BAD], "rejected": [*ASKED, GOOD]},
        'rejected" has no answer',
    ),
    "no assistant": ({"prompt": ASKED, "chosen": [GOOD], "rejected": [turn("user", "?")]}, "no assistant turn"),
    "answer is a question": (
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [turn("user", "?"), GOOD]},
        "no turn in common",
    ),
    "number": ({"prompt": ASKED, "chosen": [GOOD], "rejected": 5}, '"rejected" is a number, not text or a list'),
    "list of texts": ({"prompt": ASKED, "chosen": ["b"], "rejected": ["c"]}, 'Turn 1 of "chosen" is text'),
    "unknown role": (
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [turn("bot", "c")]},
        "unknown role 'bot'",
    ),
    "question at the end": (
        {"messages": [*ASKED, GOOD, *ASKED], "rejected_response": "c"},
        "does not end with",
    ),
    "no messages": ({"rejected_response": "c"}, "a rejected answer, but no messages"),
    "image": ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"]}, "only text can be trained"),
}


@pytest.mark.parametrize(("row", "message"), BAD_PAIRS.values(), ids=list(BAD_PAIRS))
def test_a_bad_pair_is_refused_with_its_reason(row: Row, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        convert(row, detect(row, "pairs"))
    assert caught.value.what.endswith(".") and caught.value.do


def test_bad_pairs_are_counted_under_their_own_reasons(tmp_path: Path) -> None:
    good = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    rows = [
        good,
        {**good, "rejected": "4"},
        {**good, "rejected": None},
        {**good, "chosen": "   "},
        {**good, "prompt": ""},
    ]
    dataset = read(tmp_path, *rows, on_bad_row="skip")
    assert len(dataset.documents()) == 1
    assert list(dataset.store.facts["reasons"].values()) == [1, 1, 1, 1]
    assert [problem.where.rpartition(":")[2] for problem in dataset.problems] == ["2", "3", "4", "5"]
    with pytest.raises(TrilloraError, match="answer are the same") as caught:
        read(tmp_path, *rows)
    assert caught.value.where and caught.value.where.endswith("rows.jsonl:2")


def test_answers_that_become_equal_are_refused(tmp_path: Path) -> None:
    trimming = chat_tokenizer("llama3")
    row = {"prompt": ASKED, "chosen": [turn("assistant", "Yes")], "rejected": [turn("assistant", "Yes  ")]}
    dataset = load(write(tmp_path, row), trimming, tmp_path / "cache", rows="pairs", on_bad_row="skip")
    assert dataset.problems[0].what == "The chosen and the rejected answer are the same in the chat template's text."


def test_rows_of_another_kind_are_refused_with_what_is_needed() -> None:
    pair, labelled, answer = CHATS["turns"], {"prompt": "a", "completion": "b", "label": True}, {"question": "a"}
    with pytest.raises(BadRow, match=r"preference tuning .chosen, rejected., but train\.loss: sft") as caught:
        detect(pair, "answers")
    assert caught.value.do.startswith("set train.loss: dpo") and "data.columns: {prompt: prompt" in caught.value.do
    with pytest.raises(BadRow, match="preferred_output") as caught:
        detect(CHATS["OpenAI"], "answers")
    assert caught.value.do == formats.DO_COMPARE
    with pytest.raises(BadRow, match="needs a chosen and a rejected answer") as caught:
        detect(answer, "pairs")
    assert "{prompt: …, chosen: …, rejected: …}; or set train.loss: sft" in caught.value.do
    with pytest.raises(BadRow, match="needs a chosen and a rejected answer") as caught:
        detect(labelled, "pairs")
    assert caught.value.do.endswith("train.loss: kto for answers with a label")
    with pytest.raises(BadRow, match="needs an answer with a label") as caught:
        detect(answer, "labels")
    assert "{prompt: …, completion: …, label: …}" in caught.value.do
    # A label does not change what a row is to answers: it is not used, as before.
    assert detect(labelled, "answers") == "prompt-completion"


# -- pairs: tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_both_sides_have_the_tokens_and_the_trained_answers_of_the_same_conversation_alone(
    family: str, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(family)
    before = [turn("user", "a quick fox?"), turn("assistant", "the lazy dog"), turn("user", "Why?\n")]
    answers = [turn("assistant", "the brown fox"), turn("assistant", "THE DOG jumps, 7 = 7")]
    row = {"prompt": before, "chosen": answers[:1], "rejected": answers[1:]}
    (pair,) = documents_of(load(write(tmp_path, row), tokenizer, tmp_path / "cache", rows="pairs"))
    alone = [render({"messages": [*before, a]}, tokenizer, "messages", train_on="last") for a in answers]
    for side, expected in zip(pair.parts, alone, strict=True):
        assert side.tokens.tolist() == expected.tokens.tolist()
        assert side.supervised[1:].tolist() == expected.supervised[1:].tolist()
        # Where a template writes an empty block of thinking, the prompt ends before it.
        assert pair.prompt == (expected.prompt or 1 + int(np.argmax(expected.supervised[1:])))
    first, second = (side.tokens[: pair.prompt].tolist() for side in pair.parts)
    assert first == second
    assert pair.num_supervised == sum(each.num_supervised for each in alone)


def test_texts_have_the_tokens_of_a_prompt_with_its_completion(tmp_path: Path) -> None:
    for tokenizer in map(chat_tokenizer, ("chatml", "llama3", "gemma")):
        row = {"prompt": "the quick\n", "chosen": "\nbrown fox", "rejected": "lazy dog"}
        (pair,) = documents_of(load(write(tmp_path, row), tokenizer, tmp_path / "cache", rows="pairs"))
        for side, name in zip(pair.parts, ("chosen", "rejected"), strict=True):
            alone = render({"prompt": row["prompt"], "completion": row[name]}, tokenizer, "prompt-completion")
            assert side.tokens.tolist() == alone.tokens.tolist()
            assert side.supervised[1:].tolist() == alone.supervised[1:].tolist()


def test_a_token_of_prompt_and_answer_belongs_to_the_answers_of_both_sides(tmp_path: Path) -> None:
    """ChatML's header ends with a line break. The tokenizer joins it with the spaces that one answer begins with."""
    row = {"prompt": ASKED, "chosen": [turn("assistant", "    return a")], "rejected": [turn("assistant", "7")]}
    (pair,) = documents_of(read(tmp_path, row))
    alone = [render({"messages": [*ASKED, *row[name]]}, TOKENIZER, "messages") for name in ("chosen", "rejected")]
    starts = [int(np.argmax(document.supervised)) for document in alone]
    assert starts[0] == pair.prompt == starts[1] - 1
    assert [side.tokens.tolist() for side in pair.parts] == [document.tokens.tolist() for document in alone]
    assert [trained_text(side) for side in pair.parts] == ["\n    return a<|im_end|>", "\n7<|im_end|>"]


def test_a_prompt_that_depends_on_the_answer_is_refused(tmp_path: Path) -> None:
    """This template changes the system text with the last answer."""
    template, _ = NAMED["chatml"]
    first = (
        "{%- if 'deep' in messages[-1]['content'] -%}{{- '<|im_start|>system\\nThink.<|im_end|>\\n' -}}{%- endif -%}"
    )
    row = {"prompt": ASKED, "chosen": [turn("assistant", "deep thought")], "rejected": [BAD]}
    dataset = read(tmp_path, row, chat_template=first + template, on_bad_row="skip")
    assert dataset.problems[0].what.startswith("The text before the first trained answer differs between")


def test_several_answers_after_the_prompt_are_all_trained_and_last_trains_the_last(tmp_path: Path) -> None:
    more = [turn("user", "And?"), turn("assistant", "seven")]
    row = {"prompt": ASKED, "chosen": [GOOD, *more], "rejected": [BAD, *more[:1], turn("assistant", "nine")]}
    (pair,) = documents_of(read(tmp_path, row))
    assert [trained_text(side) for side in pair.parts] == [
        "Because it is.<|im_end|>seven<|im_end|>",
        "Go away!<|im_end|>nine<|im_end|>",
    ]
    # The turns before the last ones differ here, so the last ones do not have one prompt.
    dataset = read(tmp_path, row, train_on="last", on_bad_row="skip")
    assert "differs between" in dataset.problems[0].what and "leave data.train_on out" in dataset.problems[0].do
    (pair,) = documents_of(read(tmp_path, {**row, "rejected": [GOOD, *row["rejected"][1:]]}, train_on="last"))
    assert [trained_text(side) for side in pair.parts] == ["seven<|im_end|>", "nine<|im_end|>"]


def test_answers_in_the_prompt_are_not_trained(tmp_path: Path) -> None:
    row = {"prompt": [*ASKED, GOOD, *ASKED], "chosen": [GOOD], "rejected": [BAD]}
    (pair,) = documents_of(read(tmp_path, row))
    assert [trained_text(side) for side in pair.parts] == ["Because it is.<|im_end|>", "Go away!<|im_end|>"]


def test_a_question_is_the_prompt_of_the_chosen_side(tmp_path: Path) -> None:
    (pair,) = documents_of(read(tmp_path, CHATS["turns"]))
    question = question_of(pair)
    assert question is not None
    assert question.prompt == tuple(pair.tokens[: pair.prompt].tolist())
    assert TOKENIZER.decode(list(question.expected)) == "Because it is.<|im_end|>"


# -- labels ------------------------------------------------------------------------------------------------------------

ANSWERS: dict[str, tuple[Row, Chat | Pair]] = {
    "texts": ({"prompt": "2+2=", "completion": "4"}, Pair("2+2=", "4")),
    "response": ({"prompt": "2+2=", "response": "4"}, Pair("2+2=", "4")),
    "turns": ({"prompt": ASKED, "completion": [GOOD]}, Chat([*ASKED, GOOD], num_prompt=1)),
    "messages": ({"messages": [*ASKED, BAD, *ASKED, GOOD]}, Chat([*ASKED, BAD, *ASKED, GOOD], num_prompt=3)),
    "conversations": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because it is."}]},
        Chat([*ASKED, GOOD], num_prompt=1),
    ),
    "question": ({"question": "Why?", "answer": "Because it is."}, Chat([*ASKED, GOOD], num_prompt=1)),
    "alpaca": ({"instruction": "Why?", "output": "Because it is."}, Chat([*ASKED, GOOD], num_prompt=1)),
    "system": (
        {"system": "s", "question": "Why?", "answer": "Because it is."},
        Chat([turn("system", "s"), *ASKED, GOOD], num_prompt=2),
    ),
}


@pytest.mark.parametrize(("row", "expected"), ANSWERS.values(), ids=list(ANSWERS))
def test_a_labelled_answer_may_have_any_format_with_a_prompt(row: Row, expected: Chat | Pair) -> None:
    for label in (True, False):
        labelled = {**row, "label": label}
        assert detect(labelled, "labels") == "labelled"
        assert convert(labelled, "labelled") == Labelled(expected, label)


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", " TRUE ", "1"])
def test_labels_may_be_numbers_and_texts_as_in_csv_files(label: object) -> None:
    row = {"prompt": "a", "completion": "b"}
    opposite = {"true": "false", "1": "0"}.get(label.strip().lower(), "") if isinstance(label, str) else 1 - label  # type: ignore[operator]
    assert convert({**row, "label": label}, "labelled") == Labelled(Pair("a", "b"), True)
    assert convert({**row, "label": opposite}, "labelled") == Labelled(Pair("a", "b"), False)


BAD_LABELS: dict[str, tuple[Row, str]] = {
    "a word": ({"prompt": "a", "completion": "b", "label": "good"}, "'good', which is neither true nor false"),
    "a number": ({"prompt": "a", "completion": "b", "label": 2}, "is 2, which is neither"),
    "a list": ({"prompt": "a", "completion": "b", "label": [True]}, "neither true nor false"),
    "no label": ({"prompt": "a", "completion": "b", "label": None}, 'The row has no "label"'),
    "no completion": ({"prompt": "a", "label": True}, "needs an answer with a label"),
    "empty completion": ({"prompt": "a", "completion": "", "label": True}, '"completion" is empty'),
    "empty prompt": ({"prompt": " ", "completion": "b", "label": True}, '"prompt" is empty'),
    "no prompt": ({"messages": [GOOD], "label": True}, "has no prompt: it begins with the answer"),
    "a text": ({"text": "a", "label": True}, "a label, but no prompt"),
}


@pytest.mark.parametrize(("row", "message"), BAD_LABELS.values(), ids=list(BAD_LABELS))
def test_a_bad_labelled_row_is_refused_with_its_reason(row: Row, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        convert(row, "labelled")
    assert caught.value.what.endswith(".") and caught.value.do


def test_labelled_answers_have_signed_weights_and_the_tokens_of_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": [*ASKED, GOOD, *ASKED], "completion": [GOOD], "label": True, "w": 2},
        {"prompt": ASKED, "completion": [BAD], "label": False, "w": 3},
        {"prompt": ASKED, "completion": [GOOD], "label": False, "w": 0},
    ]
    documents = documents_of(read(tmp_path, *rows, kind="labels", weight_key="w"))
    assert [document.weight for document in documents] == [2, -3], "weight 0 is not trained on"
    for document, row in zip(documents, rows, strict=False):
        alone = render({"messages": [*row["prompt"], *row["completion"]]}, TOKENIZER, "messages", train_on="last")
        assert document.tokens.tolist() == alone.tokens.tolist()
        assert document.supervised[1:].tolist() == alone.supervised[1:].tolist()
        assert document.prompt == int(np.argmax(document.supervised)) and document.first == 0


def test_a_csv_file_of_labelled_texts_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,label\n2+2=,4,True\n2+2=,5,False\n")
    documents = documents_of(load(tmp_path / "a.csv", TOKENIZER, tmp_path, rows="labels"))
    assert [(as_text(each), each.weight) for each in documents] == [("2+2=4<|im_end|>", 1), ("2+2=5<|im_end|>", -1)]


def test_a_pair_becomes_a_good_and_a_bad_answer_for_a_loss_of_labels(tmp_path: Path) -> None:
    rows = [CHATS["turns"], {**CHATS["turns"], "rejected": [turn("assistant", "No.")], "w": 2}]
    dataset = read(tmp_path, *rows, kind="labels", weight_key="w")
    documents = documents_of(dataset)
    assert [each.weight for each in documents] == [1, -1, 2, -2]
    (pair, _) = documents_of(read(tmp_path, *rows, weight_key="w"))
    assert [each.tokens.tolist() for each in documents[:2]] == [side.tokens.tolist() for side in pair.parts]
    assert dataset.remarks[UNPAIRED] == 2
    stored = dataset.store.rows
    assert len(set(stored["digest"].tolist())) == 4 and len(set(stored["split"].tolist())) == 1
    assert stored["line"].tolist() == [1, 1, 2, 2]


# -- splits, lengths, duplicates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_a_prompt_is_never_in_two_parts(kind: str, tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(60):
        for answer in range(3):
            about = {"prompt": [turn("user", f"What is {number}?")]}
            good, bad = ([turn("assistant", f"{word} {answer}")] for word in ("yes", "no"))
            pair = {**about, "chosen": good, "rejected": bad}
            rows.append(pair if kind == "pairs" else {**about, "completion": good, "label": answer > 0})
    dataset = read(tmp_path, *rows, kind=kind, validation=0.3, test=0.3)
    prompts = []
    for part in PARTS:
        documents = dataset.documents(part)
        each = [tuple(documents[i].tokens[: documents[i].prompt].tolist()) for i in range(len(documents))]
        assert len(each) == 3 * len(set(each)) > 0, "all answers to a prompt are in one part"
        prompts.append(set(each))
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == 60


def test_equal_pairs_have_equal_digests_and_other_answers_do_not(tmp_path: Path) -> None:
    pair = CHATS["turns"]
    rows = [pair, CHATS["implicit"], {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}]
    digests = read(tmp_path, *rows).store.rows["digest"].tolist()
    assert digests[0] == digests[1] != digests[2]


def test_the_length_of_a_pair_is_of_both_answers(tmp_path: Path) -> None:
    long = {**CHATS["turns"], "rejected": [turn("assistant", "no " * 60)]}
    dataset = read(tmp_path, CHATS["turns"], long)
    short, too_long = documents_of(dataset)
    assert len(short) == sum(map(len, short.parts))
    kept, lost = dataset.fitted("train", len(too_long))
    assert (len(kept), lost.num_rows) == (2, 0)
    with pytest.raises(TrilloraError) as caught:
        dataset.fitted("train", len(too_long) - 1)
    length = f"sequence_length {len(too_long) - 1}, which has to hold both answers, each with the prompt"
    assert f"1 of 2 pairs are longer than {length}" in caught.value.what
    assert f"sequence_length to {len(too_long)}" in caught.value.do
    dropped, lost = read(tmp_path, CHATS["turns"], long, on_too_long="drop").fitted("train", len(too_long) - 1)
    assert (len(dropped), lost.num_rows, dropped.firsts_N.tolist()) == (1, 1, [short.first])


@pytest.mark.parametrize("side", ["left", "middle"])
def test_a_long_prompt_is_shortened_for_both_sides_alike(side: str, tmp_path: Path) -> None:
    asked = "the quick brown fox " * 30
    for row in (
        {**CHATS["turns"], "prompt": [turn("user", asked)]},
        {"prompt": asked, "chosen": "brown", "rejected": "lazy dog"},
    ):
        dataset = read(tmp_path, row, on_too_long=f"truncate-{side}", sequence_length=120)
        (pair,) = documents_of(dataset)
        assert 100 < len(pair) <= 120 and dataset.store.rows["cut"].tolist() == [1]
        chosen, rejected = pair.parts
        assert chosen.tokens[: pair.prompt].tolist() == rejected.tokens[: pair.prompt].tolist()
        whole = documents_of(read(tmp_path, row))[0]
        assert [trained_text(part) for part in pair.parts] == [trained_text(part) for part in whole.parts]


def test_unpaired_answers_are_shortened_too(tmp_path: Path) -> None:
    row = {**CHATS["turns"], "prompt": [turn("user", "the quick brown fox " * 30)]}
    documents = documents_of(read(tmp_path, row, kind="labels", on_too_long="truncate-left", sequence_length=64))
    assert [trained_text(each) for each in documents] == ["Because it is.<|im_end|>", "Go away!<|im_end|>"]
    assert all(50 < len(each) <= 64 for each in documents)
