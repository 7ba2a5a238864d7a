"""From files to stored rows: every lost row is counted, no work is repeated, every problem has its place."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from rendering import load, render, render_chat, render_text
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trillora.data.batches import Batches
from trillora.data.documents import part_of
from trillora.data.open import data_options, with_template_date
from trillora.data.prepare import Dataset, Source
from trillora.data.rendering.chat_templates import NAMED, find_template
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import StageRecipe, stages_of

TOKENIZER = chat_tokenizer("chatml")
HELLO = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def question(text: str, answer: str = "yes") -> dict[str, Any]:
    return chat(("user", text), ("assistant", answer))


def only_stage(settings: dict[str, Any]) -> StageRecipe:
    (stage,) = stages_of(load_recipe(settings))
    return stage.recipe


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokens(dataset: Dataset, part: str = "train", seed: int = 0) -> list[tuple[int, ...]]:
    documents = dataset.documents(part, seed)
    return [tuple(documents[i].tokens.tolist()) for i in range(len(documents))]


def trained_texts(dataset: Dataset) -> list[str]:
    documents = (dataset.documents()[i] for i in range(len(dataset.documents())))
    return [str(TOKENIZER.decode(d.tokens[d.supervised].tolist())) for d in documents]


def test_stored_rows_are_the_rendered_rows_in_order(tmp_path: Path) -> None:
    rows = [question("x " * (n % 50) + str(n)) for n in range(700)]  # more than two batches for the workers
    dataset = load(write(tmp_path / "a.jsonl", rows), TOKENIZER, tmp_path)
    documents = dataset.documents()
    assert len(documents) == 700
    for number in range(0, 700, 7):
        expected = render_chat(rows[number]["messages"], TOKENIZER)
        assert documents[number].tokens.tolist() == expected.tokens.tolist()
        assert documents[number].supervised.tolist() == expected.supervised.tolist()
        assert documents.trained_N[number] == expected.num_supervised
        assert dataset.store.place(number) == f"{tmp_path / 'a.jsonl'}:{number + 1}"
    assert dataset.files[0]["format"] == "messages"
    assert dataset.files[0]["num_rows"] == 700


def test_files_of_different_formats_and_archives_can_be_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [HELLO])
    (tmp_path / "b.txt").write_text("The quick brown fox")
    (tmp_path / "c.csv").write_text("question,answer\nOne?,1\n")
    alpaca = json.dumps({"instruction": "Add", "input": "1 1", "output": "2"})
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as archive:
        for name, content in (("in/e.jsonl", alpaca.encode()), ("in/f.txt", b"Jumps over")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    dataset = load(tmp_path, TOKENIZER, tmp_path / "cache")
    assert [file["format"] for file in dataset.files] == ["messages", "text", "question-answer", "alpaca, text"]
    expected = [
        render_chat(HELLO["messages"], TOKENIZER),
        render_text("The quick brown fox", TOKENIZER),
        render_chat(question("One?", "1")["messages"], TOKENIZER),
        render_chat(question("Add\n\n1 1", "2")["messages"], TOKENIZER),
        render_text("Jumps over", TOKENIZER),
    ]
    assert tokens(dataset) == [tuple(document.tokens.tolist()) for document in expected]
    assert dataset.store.place(3) == f"{tmp_path / 'd.tar.gz'}!in/e.jsonl:1"


def test_second_start_finds_the_tokens_and_any_change_makes_new_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [HELLO, question("Again?")])
    first = load(path, TOKENIZER, tmp_path)
    assert first.is_new
    again = load(path, TOKENIZER, tmp_path)
    assert not again.is_new
    assert tokens(again) == tokens(first)
    assert not load(path, TOKENIZER, tmp_path, sequence_length=99).is_new  # only truncation depends on it
    assert load(path, TOKENIZER, tmp_path, train_on="everything").is_new
    assert load(path, chat_tokenizer("chatml-bare"), tmp_path).is_new
    assert load(path, TOKENIZER, tmp_path, on_too_long="truncate-left").is_new
    path.rename(tmp_path / "moved.jsonl")
    moved = load(tmp_path / "moved.jsonl", TOKENIZER, tmp_path)
    assert not moved.is_new  # the content counts, not the name
    assert moved.store.place(1) == f"{tmp_path / 'moved.jsonl'}:2"
    write(path, [HELLO, question("Changed?")])
    assert load(path, TOKENIZER, tmp_path).is_new


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "garbage"])
def test_damaged_store_is_detected_and_replaced(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "a.jsonl", [HELLO, question("Again?")])
    first = load(path, TOKENIZER, tmp_path)
    expected = tokens(first)
    for name in ("tokens.bin", "rows.bin", "store.json"):
        file = first.store.folder / name
        whole = file.read_bytes()
        if damage == "flip":
            file.write_bytes(whole[:5] + bytes([whole[5] ^ 4]) + whole[6:])
        elif damage == "cut":
            file.write_bytes(whole[:-3])
        elif damage == "remove":
            file.unlink()
        else:
            file.write_bytes(b"\x00garbage")
        again = load(path, TOKENIZER, tmp_path)
        assert again.is_new, name
        assert tokens(again) == expected


def test_refused_data_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [HELLO, {"messages": []}])
    with pytest.raises(TrilloraError):
        load(path, TOKENIZER, tmp_path / "cache")
    assert [file for file in (tmp_path / "cache" / "data").iterdir() if file.suffix != ".lock"] == []


BAD = [
    (b'{"text": "\xff"}', "Byte 11 of this row is not UTF-8"),
    (b'{"text": ', "not JSON: Expecting value at column 9"),
    (b'{"text": NaN}', "NaN is not a JSON number"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"text": ' + b"9" * 5000 + b"}", "not usable JSON"),
    (b"[" * 200000, "not usable JSON"),
    (b"[1]", "is a list, not a JSON object"),
    (b'"text"', "is text, not"),
    ({"messages": []}, "empty"),
    ({"messages": "Hello"}, "list"),
    ({"messages": ["Hello"]}, "urn 1"),
    ({"messages": [{"content": "Hello"}]}, "role"),
    (chat(("user", "a"), ("asistant", "b")), "asistant"),
    (chat(("user", "a"), ("assistant", " \n")), "empty"),
    (chat(("user", "a")), "assistant"),
    (chat(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")), "system"),
    (chat(("user", "a"), ("user", "b"), ("assistant", "c")), "turns 1 and 2 are both user"),
    (chat(("user", "a"), ("assistant", "b"), ("assistant", "c")), "turns 2 and 3 are both assistant"),
    ({"messages": [*HELLO["messages"]], "tools": [{"type": "function"}]}, "the chat template ignores"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_row_stops_the_run_with_its_place_or_is_skipped_and_counted(tmp_path: Path, bad: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    line = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    path.write_bytes(json.dumps(HELLO).encode() + b"\n\n" + line + b"\n" + json.dumps(HELLO).encode())
    with pytest.raises(TrilloraError) as caught:
        load(path, TOKENIZER, tmp_path)
    assert message in str(caught.value)
    assert caught.value.where == f"{path}:3"
    assert caught.value.do
    lenient = load(path, TOKENIZER, tmp_path, on_bad_row="skip")
    assert len(tokens(lenient)) == 2
    assert lenient.num_problems == 1
    assert lenient.problems[0].where == f"{path}:3"
    assert message in lenient.problems[0].what
    with pytest.raises(TrilloraError):  # the store of a lenient run does not make a strict run lenient
        load(path, TOKENIZER, tmp_path)


def test_truncated_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    packed = gzip.compress("".join(json.dumps(question(str(n))) + "\n" for n in range(5000)).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TrilloraError):
        load(path, TOKENIZER, tmp_path)
    lenient = load(path, TOKENIZER, tmp_path, on_bad_row="skip")
    assert 1000 < len(tokens(lenient)) < 5000
    assert lenient.num_problems == 1
    assert str(path) in lenient.problems[0].where


def test_ten_thousand_fuzzed_rows_are_all_counted_without_a_traceback(tmp_path: Path) -> None:
    rng = random.Random(0)
    seeds = [
        json.dumps(row).encode()
        for row in (
            HELLO,
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"prompt": "a", "completion": "b"},
            {"text": "the fox <|im_end|> \\ud83d"},
            chat(("system", "s"), ("user", "<|im_start|>"), ("assistant", "<think>x</think>y")),
        )
    ]
    alphabet = b'{}[]":,\\u0\xff\xed\xa0\x80<|>im_endrolecontent \x00\xef\xb7\x90'
    lines = []
    for _ in range(10_000):
        line = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 4)):
            place = rng.randrange(len(line))
            match rng.randrange(4):
                case 0:
                    line[place] = rng.choice(alphabet)
                case 1:
                    del line[place : place + rng.randint(1, 20)]
                case 2:
                    line[place:place] = bytes(rng.choices(alphabet, k=rng.randint(1, 6)))
                case _:
                    line = bytearray(line[: place + 1] * rng.randint(1, 2))
            line = line or bytearray(b"{")
        lines.append(bytes(line).replace(b"\n", b" ").replace(b"\r", b" "))
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    num_rows = sum(1 for line in lines if line.strip())
    dataset = load(path, TOKENIZER, tmp_path, on_bad_row="skip")
    assert len(dataset.store.rows) + dataset.num_problems == num_rows
    assert 300 < len(dataset.store.rows) < num_rows
    assert sum(dataset.store.facts["reasons"].values()) <= dataset.num_problems
    for problem in dataset.problems:
        assert problem.where.startswith(f"{path}:") and problem.what and problem.do
        assert "Traceback" not in problem.what


def test_template_that_exceeds_its_limit_on_many_rows_stops_early(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"n": n} for n in range(500)])
    template = {"text": "{{ 'x' * (n * 10000000000) }}y"}
    with pytest.raises(TrilloraError, match="more than 512 MB"):
        load(path, TOKENIZER, tmp_path, template=template, on_bad_row="skip")


def test_rows_too_long_are_dropped_up_to_one_percent_and_then_refused(tmp_path: Path) -> None:
    rows = [question("a", "y " * 15) for _ in range(300)]
    long = question("fox " * 90, "y")
    few = load(write(tmp_path / "few.jsonl", [*rows, long]), TOKENIZER, tmp_path)
    documents, lost = few.fitted("train", 64)
    assert (len(documents), lost.num_rows, lost.num_trained) == (300, 1, 2)
    many = load(write(tmp_path / "many.jsonl", [long] * 10), TOKENIZER, tmp_path)
    longest = len(render_chat(long["messages"], TOKENIZER))
    with pytest.raises(
        TrilloraError, match=r"10 of 10 rows are longer than sequence_length 64.*100\.0% of the"
    ) as caught:
        many.fitted("train", 64)
    assert f"set train.sequence_length to {longest} to keep all" in caught.value.do
    assert f"{tmp_path / 'many.jsonl'}:1" in str(caught.value.where)
    assert len(many.fitted("train", longest)[0]) == 10
    with pytest.raises(TrilloraError):
        load(tmp_path / "few.jsonl", TOKENIZER, tmp_path, on_too_long="refuse").fitted("train", 64)
    dropped, lost = load(tmp_path / "many.jsonl", TOKENIZER, tmp_path, on_too_long="drop").fitted("train", 64)
    assert (len(dropped), lost.num_rows) == (0, 10)


def test_rows_whose_answer_is_beyond_the_sequence_length_are_refused(tmp_path: Path) -> None:
    """8,377 characters of prompt, 486 of answer: truncated to 512 tokens, no answer would be in the loss."""
    pair = {"prompt": ("finding " * 2000)[:8377], "completion": ("fix it " * 100)[:486]}
    dataset = load(write(tmp_path / "a.jsonl", [pair] * 5), TOKENIZER, tmp_path)
    with pytest.raises(TrilloraError, match="5 of 5 rows are longer than sequence_length 512"):
        dataset.fitted("train", 512)


def test_fewer_documents_than_a_batch_make_a_smaller_batch_on_request(tmp_path: Path) -> None:
    rows = [question(f"number {n}") for n in range(3)]
    documents = load(write(tmp_path / "a.jsonl", rows), TOKENIZER, tmp_path).documents()

    def batches(batch_size: int, shrink: bool) -> Batches:
        return Batches(documents, batch_size=batch_size, sequence_length=64, pack=False, shrink=shrink)

    whole, small = batches(8, shrink=False), batches(8, shrink=True)
    assert (whole.batch_size, small.batch_size, small.steps_per_epoch) == (8, 3, 1)
    for name, array in small.batch(0).items():
        np.testing.assert_array_equal(array, whole.batch(0)[name][:3])
    assert batches(2, shrink=True).batch_size == 2
    assert small.padding_fraction == pytest.approx(1 - documents.lengths_N.sum() / (3 * 64))
    assert whole.padding_fraction == pytest.approx(1 - documents.lengths_N.sum() / (8 * 64))


@pytest.mark.parametrize("side", ["left", "middle"])
def test_truncation_shortens_prompts_and_keeps_answers_whole(tmp_path: Path, side: str) -> None:
    start, end = "Begin at the start. ", " That is the end."
    long = chat(("system", "Be kind."), ("user", start + "fox " * 200 + end), ("assistant", "It is a fox, no doubt."))
    pair = {"prompt": start + "dog " * 200 + end, "completion": "It is a dog."}
    hopeless = question("short", "y " * 300)
    path = write(tmp_path / "a.jsonl", [long, HELLO, hopeless])
    dataset = load(path, TOKENIZER, tmp_path, sequence_length=80, on_too_long=f"truncate-{side}", on_bad_row="skip")
    document = dataset.documents()[0]
    assert 60 < len(document) <= 80
    text = TOKENIZER.decode(document.tokens.tolist())
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert (start in text) == (side == "middle")
    assert end in text
    assert trained_texts(dataset)[:2] == ["It is a fox, no doubt.<|im_end|>", "Hi<|im_end|>"]
    kept = text.partition("user\n")[2].partition("<|im_end|>")[0]
    messages = [long["messages"][0], {"role": "user", "content": kept}, long["messages"][2]]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == text
    assert dataset.store.rows["cut"].tolist() == [1, 0, 0]
    with pytest.raises(TrilloraError, match="1 of 3 rows"):  # no prompt to shorten: counted, not truncated
        dataset.fitted("train", 80)
    pairs = load(
        write(tmp_path / "b.jsonl", [pair]), TOKENIZER, tmp_path, sequence_length=80, on_too_long=f"truncate-{side}"
    )
    text = TOKENIZER.decode(pairs.documents()[0].tokens.tolist())
    assert len(pairs.documents()[0]) <= 80
    assert text.endswith(end + "It is a dog.<|im_end|>")
    assert text.startswith(start) == (side == "middle")


def test_split_is_stable_and_never_separates_equal_rows(tmp_path: Path) -> None:
    rows = [question(f"number {n}") for n in range(600)]
    path = write(tmp_path / "a.jsonl", rows + rows[:200])
    dataset = load(path, TOKENIZER, tmp_path, validation=0.1, test=0.1)
    parts = {part: tokens(dataset, part) for part in ("train", "validation", "test")}
    assert sum(map(len, parts.values())) == 800
    assert 0.7 < len(parts["train"]) / 800 < 0.9
    sets = [set(part) for part in parts.values()]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    # Reordered and mixed with a new row, the rows stay in their parts.
    other = write(tmp_path / "b.jsonl", [question("new"), *reversed(rows)])
    again = load(other, TOKENIZER, tmp_path, validation=0.1, test=0.1)
    assert set(tokens(again, "test")) - {tokens(again)[0]} >= sets[2] - set(tokens(again, "train"))
    assert sets[2] <= set(tokens(again, "test"))
    digests = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    counts = np.bincount(part_of(digests, 0.1, 0.1)) / 20_000
    np.testing.assert_allclose(counts, [0.8, 0.1, 0.1], atol=0.01)


def test_equal_conversations_are_equal_in_any_format(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [HELLO])
    write(
        tmp_path / "b.jsonl", [{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}]
    )
    digests = load(tmp_path / "?.jsonl", TOKENIZER, tmp_path / "cache").store.rows["digest"]
    assert digests[0] == digests[1]


def test_weights_repeat_and_thin_out_sources(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [question(f"a {n}") for n in range(40)])
    b = write(tmp_path / "b.jsonl", [question(f"b {n}") for n in range(400)])
    dataset = load(a, TOKENIZER, tmp_path, sources=(Source(str(a), 2.5), Source(str(b), 0.25)))
    counts = Counter(tokens(dataset, seed=1))
    from_a = [counts[tuple(render_chat(question(f"a {n}")["messages"], TOKENIZER).tokens.tolist())] for n in range(40)]
    from_b = [counts[tuple(render_chat(question(f"b {n}")["messages"], TOKENIZER).tokens.tolist())] for n in range(400)]
    assert set(from_a) == {2, 3} and 90 <= sum(from_a) <= 110
    assert set(from_b) == {0, 1} and 70 <= sum(from_b) <= 130
    assert Counter(tokens(dataset, seed=2)) != counts
    assert Counter(tokens(dataset, seed=1)) == counts


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        ("assistant", "1<|im_end|>2<|im_end|>3<|im_end|>"),
        ("auto", "1<|im_end|>2<|im_end|>3<|im_end|>"),
        ("last", "3<|im_end|>"),
        ("completion", "3<|im_end|>"),
    ],
)
def test_train_on_selects_answers(train_on: str, trained: str) -> None:
    turns = [turn for n in (1, 2, 3) for turn in (("user", f"{n}?"), ("assistant", str(n)))]
    rendered = render_chat(chat(*turns)["messages"], TOKENIZER, train_on)
    assert TOKENIZER.decode(rendered.tokens[rendered.supervised].tolist()) == trained


def test_pair_trains_its_completion_and_tokenizes_the_prompt_as_in_generation() -> None:
    row = {"prompt": "### Response:\n", "completion": "\nyes"}
    rendered = render(row, TOKENIZER, "prompt-completion")
    prompt = TOKENIZER(row["prompt"])["input_ids"]
    assert rendered.tokens[: len(prompt)].tolist() == prompt
    assert rendered.supervised.tolist() == [False] * len(prompt) + [True] * (len(rendered) - len(prompt))
    assert rendered.tokens[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(rendered.tokens[:-1].tolist()) == "### Response:\n\nyes"
    messages = {"prompt": HELLO["messages"], "completion": [{"role": "user", "content": "?"}, HELLO["messages"][1]]}
    rendered = render(messages, TOKENIZER, "prompt-completion")
    assert TOKENIZER.decode(rendered.tokens[rendered.supervised].tolist()) == "Hi<|im_end|>"
    assert int(rendered.supervised.nonzero()[0][0]) > len(render_chat(HELLO["messages"], TOKENIZER))


@pytest.mark.parametrize("name", NAMED)
def test_named_chat_templates_train_the_answers_with_a_stop_token(name: str) -> None:
    tokenizer = chat_tokenizer({"chatml": "chatml", "llama3": "llama3", "gemma": "gemma"}.get(name, "mistral"))
    words = [token.content for token in tokenizer.added_tokens_decoder.values()]
    template = find_template(name, words, tokenizer.eos_token)
    messages = [{"role": "system", "content": "Be kind."}, *HELLO["messages"]]
    rendered = render_chat(messages, tokenizer, "assistant")
    rendered = render({"messages": messages}, tokenizer, "messages", chat_template=template)
    theirs = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert rendered.tokens.tolist() == theirs
    stop = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(name, "</s>")
    assert tokenizer.decode(rendered.tokens[rendered.supervised].tolist()).strip() == f"Hi{stop}"


def without_template() -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(chat_tokenizer("mistral").backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def test_model_without_a_chat_template_needs_a_named_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [HELLO])
    tokenizer = without_template()
    with pytest.raises(TrilloraError, match="no chat template"):
        load(path, tokenizer, tmp_path)

    def options(name: str) -> Any:
        recipe = only_stage({"model": "m", "data": {"path": str(path), "chat_template": name}})
        return data_options(recipe.data, tokenizer)

    with pytest.raises(TrilloraError, match=r"needs <\|im_start\|> and <\|im_end\|>") as caught:
        options("chatml")
    assert "zephyr" in caught.value.do
    with pytest.raises(TrilloraError, match="no chat template 'zephir'") as caught:
        options("zephir")
    assert "did you mean 'zephyr'" in caught.value.do
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    assert options(str(own)).chat_template == own.read_text()
    assert len(tokens(load(path, tokenizer, tmp_path, chat_template=options("zephyr").chat_template))) == 1


def test_the_date_of_a_template_is_chosen_once_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [HELLO])
    template = "{{ strftime_now('%d %b %Y') }}" + str(TOKENIZER.chat_template)
    (tmp_path / "dated.jinja").write_text(template)
    settings = {"model": "m", "data": {"path": str(path), "chat_template": str(tmp_path / "dated.jinja")}}
    events: list[Any] = []
    dated = with_template_date(only_stage(settings), TOKENIZER, events.append)
    assert [(event.path, event.value) for event in events] == [("data.template_date", dated.data.template_date)]
    settings["data"]["template_date"] = "2024-07-26"  # type: ignore[index]
    kept = with_template_date(only_stage(settings), TOKENIZER, events.append)
    rendered = render(HELLO, TOKENIZER, "messages", chat_template=template, template_date=kept.data.template_date)
    assert TOKENIZER.decode(rendered.tokens.tolist()).startswith("26 Jul 2024")
    undated = only_stage({"model": "m", "data": str(path)})
    assert with_template_date(undated, TOKENIZER, events.append) == undated
    assert len(events) == 1
