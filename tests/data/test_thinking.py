"""What counts in the loss for answers with thinking: `data.thinking`, and empty blocks that a template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer, own_tokens
from real_tokenizers import real_tokenizer
from rendering import load, render
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trillora.data.excerpt import pieces_of
from trillora.data.open import refusal_of
from trillora.data.prepare import Dataset
from trillora.data.questions import question_of
from trillora.data.rendering import thinking
from trillora.data.tokenizing import encode
from trillora.data.tokenizing.encode import Encoder, TokenizedDocument
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe

QWEN = chat_tokenizer("qwen3")
ASKED = {"role": "user", "content": "three and three"}
PLAIN = {"role": "assistant", "content": "6"}
IN_FIELD = {**PLAIN, "reasoning_content": "three plus three"}
INSIDE = {"role": "assistant", "content": "<think>\nthree plus three\n</think>\n\n6"}
HALF = {"role": "assistant", "content": "three plus three\n</think>\n\n6"}  # sampled after a prompt that opens thinking
BLOCK, EMPTY = "<think>\nthree plus three\n</think>\n\n", "<think>\n\n</think>\n\n"


def trained(document: TokenizedDocument, tokenizer: Any = QWEN) -> str:
    return str(tokenizer.decode(document.tokens[document.supervised].tolist()))


def chat(answer: dict[str, Any], tokenizer: Any = QWEN, **options: Any) -> TokenizedDocument:
    return render({"messages": [ASKED, answer]}, tokenizer, "messages", **options)


def read(folder: Path, *rows: dict[str, Any], tokenizer: Any = QWEN, **options: Any) -> Dataset:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return load(folder / "a.jsonl", tokenizer, folder / "cache", **options)


def only(dataset: Dataset) -> TokenizedDocument:
    return dataset.documents()[0]


@pytest.mark.parametrize("answer", [IN_FIELD, INSIDE, HALF], ids=["field", "inside", "half"])
def test_thinking_is_trained_masked_or_dropped(answer: dict[str, Any]) -> None:
    whole = own_tokens(QWEN, [ASKED, answer])
    for mode, expected in {"auto": f"{BLOCK}6", "train": f"{BLOCK}6", "mask": "6"}.items():
        document = chat(answer, thinking=mode)
        assert document.tokens.tolist() == whole, "the context is the template's"
        assert trained(document) == f"{expected}<|im_end|>"
    dropped = chat(answer, thinking="drop")
    assert dropped.tokens.tolist() == own_tokens(QWEN, [ASKED, PLAIN]) and trained(dropped) == "6<|im_end|>"


def test_an_empty_block_is_out_of_the_loss_unless_it_is_asked_for() -> None:
    whole = own_tokens(QWEN, [ASKED, PLAIN])
    assert EMPTY in QWEN.decode(whole)
    for mode in ("auto", "mask", "drop", "train"):
        document = chat(PLAIN, thinking=mode)
        assert document.tokens.tolist() == whole
        assert trained(document) == (f"{EMPTY}6<|im_end|>" if mode == "train" else "6<|im_end|>")


def test_the_real_template_of_qwen_3_is_read_alike() -> None:
    tokenizer = real_tokenizer("qwen3-own")
    texts = {mode: trained(chat(IN_FIELD, tokenizer, thinking=mode), tokenizer) for mode in ("auto", "mask", "drop")}
    assert texts == {"auto": f"{BLOCK}6<|im_end|>", "mask": "6<|im_end|>", "drop": "6<|im_end|>"}
    assert trained(chat(PLAIN, tokenizer), tokenizer) == "6<|im_end|>"
    off = {"enable_thinking": False}  # the prompt has the empty block then
    assert trained(chat(PLAIN, tokenizer, template_arguments=off), tokenizer) == "6<|im_end|>"
    masked = chat(IN_FIELD, tokenizer, template_arguments=off, thinking="mask")
    assert trained(masked, tokenizer) == "6<|im_end|>"


_TURN = "{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% else %}"
_END = "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
OTHER_TEMPLATES = {
    "brackets": (
        "{% for m in messages %}" + _TURN + "{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}" + _END,
        "[THINK]three plus three[/THINK]",
    ),
    "channels": (
        "{% for m in messages %}" + _TURN + "{% if m.thinking %}<|im_start|>thoughts: {{ m.thinking }}<|im_end|>"
        "{% endif %}<|im_start|>final: " + _END,
        "thoughts: three plus three<|im_end|>",
    ),
    "opened by the prompt": (
        "{% for m in messages %}" + _TURN + "<|im_start|><think>\n{{ m.reasoning_content or '' }}\n</think>\n\n" + _END
        + "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}",
        "three plus three\n</think>\n\n",
    ),
}  # fmt: skip


def with_template(template: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(chat_tokenizer("chatml").backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)


@pytest.mark.parametrize("name", OTHER_TEMPLATES)
def test_the_marks_of_other_templates_are_found_in_an_example(name: str) -> None:
    template, block = OTHER_TEMPLATES[name]
    tokenizer = with_template(template)
    full, masked = (trained(chat(IN_FIELD, tokenizer, thinking=mode), tokenizer) for mode in ("auto", "mask"))
    before, found, after = full.partition(block)
    assert (before, found) == ("", block)
    assert masked == after and masked.endswith("6<|im_end|>")
    plain = trained(chat(PLAIN, tokenizer), tokenizer)
    assert plain == trained(chat(IN_FIELD, tokenizer, thinking="drop"), tokenizer)
    assert plain.strip() == "6<|im_end|>"


def test_only_thinking_at_the_start_of_an_answer_is_thinking() -> None:
    tokenizer = chat_tokenizer("chatml")
    about = {"role": "assistant", "content": "Write <think> first, then </think>."}
    for mode in ("mask", "drop"):
        assert trained(chat(about, tokenizer, thinking=mode), tokenizer) == f"{about['content']}<|im_end|>"
    unfinished = {"role": "assistant", "content": "<think>three plus"}
    assert trained(chat(unfinished, tokenizer, thinking="mask"), tokenizer) == "<think>three plus<|im_end|>"


def test_completions_without_a_template_have_thinking_too() -> None:
    row = {"prompt": "3+3=", "completion": "<think>three</think> 6"}
    expected = {"auto": "<think>three</think> 6", "mask": "6", "drop": "6"}
    for mode, answer in expected.items():
        document = render(row, QWEN, "prompt-completion", thinking=mode)
        assert trained(document).strip() == f"{answer}<|im_end|>"
    assert render({"text": row["completion"]}, QWEN, "text", thinking="mask").supervised.all(), "a text has no answers"


def test_what_happens_is_said_once_with_the_number_of_rows(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, answer]} for answer in (IN_FIELD, INSIDE, PLAIN)]
    for mode, said in {"auto": thinking.TRAINED, "mask": thinking.MASKED}.items():
        assert read(tmp_path, *rows, thinking=mode).remarks == {said: 2, thinking.EMPTY: 1}
    assert read(tmp_path, *rows, thinking="drop").remarks == {thinking.DROPPED: 2, thinking.EMPTY: 3}
    assert read(tmp_path, *rows, thinking="train").remarks == {thinking.TRAINED: 2, thinking.EMPTY_TRAINED: 1}
    real = read(tmp_path, *rows, tokenizer=real_tokenizer("qwen3-own")).remarks
    assert real == {thinking.TRAINED: 2, thinking.EMPTY_WITH_SWITCH: 1}


@pytest.mark.parametrize("mode", ["mask", "drop", "train"])
def test_an_option_without_any_thinking_is_refused(mode: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    refusal = refusal_of(read(tmp_path, {"messages": [ASKED, PLAIN]}, tokenizer=tokenizer, thinking=mode))
    assert refusal is not None and refusal.where == "data.thinking" and "reasoning_content" in refusal.do
    assert f"data.thinking: {mode}, but no row has thinking" in refusal.what
    rows = [{"messages": [ASKED, answer]} for answer in (PLAIN, INSIDE)]
    assert refusal_of(read(tmp_path, *rows, tokenizer=tokenizer, thinking=mode)) is None
    assert refusal_of(read(tmp_path, {"messages": [ASKED, PLAIN]}, tokenizer=tokenizer)) is None


def test_thinking_that_the_template_does_not_write_is_refused_unless_it_is_dropped(tmp_path: Path) -> None:
    tokenizer, row = chat_tokenizer("chatml"), {"messages": [ASKED, IN_FIELD]}
    for mode in ("auto", "train", "mask"):
        with pytest.raises(TrilloraError, match="would be lost") as caught:
            read(tmp_path, row, tokenizer=tokenizer, thinking=mode)
        assert "data.thinking: drop" in caught.value.do
    dropped = read(tmp_path, row, tokenizer=tokenizer, thinking="drop")
    plain = read(tmp_path, {"messages": [ASKED, PLAIN]}, tokenizer=tokenizer)
    assert dropped.store.rows["digest"].tolist() == plain.store.rows["digest"].tolist()


def test_a_mask_that_does_not_find_the_thinking_is_refused() -> None:
    number = "{% if m.thinking %}{{ loop.index }}: {{ m.thinking }} | {% endif %}"  # another mark in every turn
    tokenizer = with_template("{% for m in messages %}" + _TURN + number + _END)
    assert trained(chat(IN_FIELD, tokenizer, thinking="mask"), tokenizer).strip() == "6<|im_end|>"
    row = {"messages": [ASKED, PLAIN, ASKED, IN_FIELD]}
    assert "three plus three |" in trained(render(row, tokenizer, "messages"), tokenizer)
    with pytest.raises(TrilloraError, match="thinking of turn 4 is not at the start of its answer") as caught:
        render(row, tokenizer, "messages", thinking="mask")
    assert "data.thinking: drop" in caught.value.do


@pytest.mark.parametrize("first", [IN_FIELD, INSIDE])
def test_a_mask_does_not_take_an_answer_for_thinking(first: dict[str, Any]) -> None:
    """The template leaves out the thinking of an earlier answer, which repeats it."""
    repeats = {**first, "content": first["content"] + ", as three plus three is"}
    document = render({"messages": [ASKED, repeats, ASKED, IN_FIELD]}, QWEN, "messages", thinking="mask")
    assert trained(document) == "6, as three plus three is<|im_end|>6<|im_end|>"


def test_an_answer_that_is_all_thinking_cannot_be_dropped() -> None:
    with pytest.raises(TrilloraError, match="The answer in turn 2 is all thinking"):
        chat({"role": "assistant", "content": "<think>three</think>"}, thinking="drop")
    with pytest.raises(TrilloraError, match="completion is empty"):
        render({"prompt": "a", "completion": "<think>b</think>"}, QWEN, "prompt-completion", thinking="drop")


def test_everything_has_no_place_for_thinking_that_does_not_count() -> None:
    with pytest.raises(TrilloraError, match=r"everything trains on every token, so data\.thinking: mask has"):
        load_recipe({"model": "smollm2", "data": {"path": "a.jsonl", "train_on": "everything", "thinking": "mask"}})
    assert chat(PLAIN, train_on="everything").supervised.all()


# -- pairs -------------------------------------------------------------------------------------------------------------


def pair(chosen: dict[str, Any], rejected: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [ASKED], "chosen": [chosen], "rejected": [rejected]}


@pytest.mark.parametrize("answer", [PLAIN, IN_FIELD], ids=["without", "with"])
@pytest.mark.parametrize("mode", ["auto", "train", "mask", "drop"])
def test_both_sides_of_a_pair_have_one_prompt_and_count_alike(
    mode: str, answer: dict[str, Any], tmp_path: Path
) -> None:
    document = only(read(tmp_path, pair(answer, {**PLAIN, "content": "7"}), rows="pairs", thinking=mode))
    chosen, rejected = document.parts
    blocks = (BLOCK if answer is IN_FIELD else EMPTY, EMPTY)
    counts = {"train": (True, True), "auto": (answer is IN_FIELD, False)}.get(mode, (False, False))
    for side, number, block, is_trained in zip((chosen, rejected), "67", blocks, counts, strict=True):
        assert trained(side) == f"{block if is_trained else ''}{number}<|im_end|>"
        assert not side.supervised[: side.prompt].any()
    assert chosen.tokens[: document.prompt].tolist() == rejected.tokens[: document.prompt].tolist()
    assert QWEN.decode(chosen.tokens[: document.prompt].tolist()).endswith("assistant\n")


def test_pairs_that_differ_in_their_thinking_only_are_the_same_without_it(tmp_path: Path) -> None:
    row = pair(IN_FIELD, {**IN_FIELD, "reasoning_content": "a guess"})
    assert len(only(read(tmp_path, row, rows="pairs")).parts) == 2
    with pytest.raises(TrilloraError, match="chosen and the rejected answer are the same"):
        read(tmp_path, row, rows="pairs", thinking="drop")


def test_a_labelled_answer_keeps_its_thinking_in_the_answer(tmp_path: Path) -> None:
    row = {"prompt": [ASKED], "completion": [IN_FIELD], "label": False}
    document = only(read(tmp_path, row, rows="labels", thinking="mask"))
    assert trained(document) == "6<|im_end|>" and document.weight == -1
    assert QWEN.decode(document.tokens[document.prompt :].tolist()).startswith(BLOCK)


# -- what is made of it ------------------------------------------------------------------------------------------------


def test_an_evaluation_asks_before_the_thinking(tmp_path: Path) -> None:
    messages = [ASKED, PLAIN, ASKED, IN_FIELD]
    asked = own_tokens(QWEN, messages[:-1], add_generation_prompt=True)
    for mode in ("auto", "mask"):
        question = question_of(only(read(tmp_path, {"messages": messages}, thinking=mode)))
        assert question is not None and list(question.prompt) == asked
        assert QWEN.decode(list(question.expected)) == f"{BLOCK}6<|im_end|>", "the thinking is not given away"
    question = question_of(only(read(tmp_path, {"messages": [ASKED, PLAIN]})))
    assert question is not None
    assert list(question.prompt) == own_tokens(QWEN, [ASKED], add_generation_prompt=True)
    assert QWEN.decode(list(question.expected)) == f"{EMPTY}6<|im_end|>"


def test_inspect_shows_masked_thinking_as_context() -> None:
    document = chat(IN_FIELD, thinking="mask")
    pieces = pieces_of(QWEN, document.tokens.tolist(), document.supervised.tolist())
    assert "".join(piece.text for piece in pieces if piece.trained) == "6<|im_end|>"
    assert any(BLOCK in piece.text and not piece.trained for piece in pieces)


def test_the_fast_tokenizer_masks_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from trillora.data.prepare import DataOptions, render_settings
    from trillora.data.rendering.render import Renderer

    encoder = Encoder(QWEN)
    rows = []
    for mode in ("auto", "mask"):
        renderer = Renderer(render_settings(DataOptions(sources=(), thinking=mode), QWEN, encoder))
        answers = (PLAIN, IN_FIELD, INSIDE, {**IN_FIELD, "reasoning_content": "naïve 東京"})
        rows += [renderer.render(json.dumps({"messages": [ASKED, a]}).encode(), "messages") for a in answers]
    slow = encoder.encode(rows)
    monkeypatch.setattr(encode, "WORDS_AFTER", 0)
    fast = Encoder(QWEN)
    assert fast._by_words is not None, "this tokenizer has the fast path"
    for one, other in zip(slow, fast.encode(rows), strict=True):
        assert isinstance(one, TokenizedDocument) and isinstance(other, TokenizedDocument)
        assert np.array_equal(one.supervised, other.supervised) and one.prompt == other.prompt
