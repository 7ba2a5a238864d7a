"""An evaluation's figures equal transformers' and PEFT's on the same rows, and what it asks is what was trained."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from chat_tokenizers import FAMILIES, chat_tokenizer, some_conversation
from dose import full_dose_only
from peft import PeftModel
from peft_reference import mean_loss
from rendering import load, render, render_chat, render_text
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.data.questions import Question, last_question, question_of
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import (
    Evaluation,
    ask,
    default_limit,
    evaluate,
    read_rows,
    recipe_with_data,
)
from trillora.evaluation.kinds.answers import token_scores
from trillora.evaluation.likelihood import TokenScorer
from trillora.evaluation.result import Example
from trillora.evaluation.scores import METRICS, Scores
from trillora.events import Alarm, Progress, ignore_events
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.recipe import run_file
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.report.eval_table import show
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]
ROUNDING = 2e-5  # float32 sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("evaluate"), tiny_run.llama(num_layers=1))


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Some steps of a tiny Llama on chats, with rows kept for a test."""
    train(
        load_recipe(tiny_run.recipe(folder, data={"split": {"test": 0.3}}, train={"steps": 8, "sequence_length": 96})),
        folder / "run",
    )
    return folder / "run"


@pytest.fixture(scope="module")
def other_chats(folder: Path) -> Path:
    """Questions of several lengths, two of them with a system turn, one with two rounds."""
    rows = []
    for a in range(11):
        turns = [
            {"role": "user", "content": f"What is {a} minus {a // 2}?" + " Say it." * (a % 4)},
            {"role": "assistant", "content": f"It is {a - a // 2}."},
        ]
        if a in (3, 7):
            turns.insert(0, {"role": "system", "content": "You are short."})
        if a == 5:
            turns += [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "The same."}]
        rows.append({"messages": turns})
    file = folder / "other.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


@pytest.fixture(scope="module")
def tested(run: Path, other_chats: Path) -> tuple[Evaluation, list[Any]]:
    """An evaluation and what was heard of it."""
    (run / "eval.json").write_text("old")
    events: list[Any] = []
    return evaluate(run, other_chats, batch_size=4, listener=events.append), events


@pytest.fixture(scope="module")
def generator(run: Path) -> Generator:
    return Generator.open(str(run), batch_size=2)


def reference(run: Path, *, adapted: bool) -> Any:
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32).eval()
    return PeftModel.from_pretrained(base, run / "adapter").eval() if adapted else base


def reference_rows(run: Path, file: Path, cache: Path) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    documents = load(file, tokenizer, cache).documents()
    return [documents[i] for i in range(len(documents))]


def reference_scores(model: Any, rows: list[Any]) -> tuple[float, float]:
    """Loss and accuracy over all trained tokens, one row at a time."""
    loss = num_correct = num_tokens = 0.0
    for row in rows:
        tokens = torch.tensor(row.tokens[None]).long()
        weights = torch.tensor(row.supervised[None, 1:]).float()
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[:, :-1]
        loss += (mean_loss(logits, tokens[:, 1:], weights) * weights.sum()).item()
        num_correct += ((logits.argmax(-1) == tokens[:, 1:]) * weights).sum().item()
        num_tokens += weights.sum().item()
    return loss / num_tokens, num_correct / num_tokens


def test_figures_and_answers_are_those_of_transformers_and_peft(
    run: Path, other_chats: Path, tested: tuple[Evaluation, list[Any]], tmp_path: Path
) -> None:
    found, events = tested
    rows = reference_rows(run, other_chats, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "model")
    assert found.num_rows == len(rows) == 11
    for scores, adapted in ((found.base, False), (found.adapter, True)):
        assert scores is not None
        loss, accuracy = reference_scores(reference(run, adapted=adapted), rows)
        assert scores.loss == pytest.approx(loss, rel=ROUNDING)
        assert scores.perplexity == pytest.approx(math.exp(loss), rel=10 * ROUNDING)
        assert scores.accuracy == pytest.approx(accuracy, abs=1e-9)
    assert found.base is not None and found.base.loss != pytest.approx(found.adapter.loss, rel=0.01)

    questions = [question_of(row) for row in rows]
    limit = default_limit([q for q in questions if q is not None])
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    models = {which: reference(run, adapted=which == "adapter") for which in ("base", "adapter")}
    for question, example in zip(questions, found.examples, strict=True):
        assert question is not None
        assert tokenizer.decode(question.expected[:-1]) == example.expected
        for which, model in models.items():
            ids = torch.tensor([question.prompt])
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=0,
            )
            assert tokenizer.decode(out[0, len(question.prompt) :], skip_special_tokens=True) == getattr(example, which)
    assert len({answer for e in found.examples for answer in (e.base, e.adapter)}) > 2  # else it would prove little
    labels = {event.label for event in events if isinstance(event, Progress)}
    assert {"Loss of the trained tokens", "Answers of the base", "Answers of the adapter"} <= labels


def test_examples_show_the_question_and_nothing_of_the_template(tested: tuple[Evaluation, list[Any]]) -> None:
    found = tested[0]
    assert [example.prompt for example in found.examples[:3]] == [
        "What is 0 minus 0?",
        "What is 1 minus 0? Say it.",
        "What is 2 minus 1? Say it. Say it.",
    ]
    assert found.examples[3].prompt == "What is 3 minus 1? Say it. Say it. Say it."  # behind a system turn
    assert found.examples[5].prompt == "And now?"


def test_packed_loss_equals_unpacked_and_any_batch_size_gives_it(
    run: Path, other_chats: Path, generator: Generator, tested: tuple[Evaluation, list[Any]]
) -> None:
    recipe = recipe_with_data(load_run_recipe(run), other_chats, run / "adapter")
    assert recipe.data.pack
    unpacked = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pack": False})})
    _, documents = read_rows(recipe, AutoTokenizer.from_pretrained(run.parent / "model"), False, None, ignore_events)
    found = token_scores(TokenScorer(generator), {"adapter": generator.adapter}, unpacked, documents, 3, ignore_events)
    scores = found["adapter"].metrics()
    assert scores.loss == pytest.approx(tested[0].adapter.loss, rel=ROUNDING)
    assert scores.accuracy == tested[0].adapter.accuracy


def test_eval_json_is_the_result_and_replaces_an_older_one(
    run: Path, other_chats: Path, tested: tuple[Evaluation, list[Any]]
) -> None:
    written = json.loads((run / "eval.json").read_text("utf-8"))
    assert written == tested[0].to_dict()
    first_version = {"data", "num_rows", "base", "adapter", "majority", "examples"}  # what other programs read
    assert written["version"] == 2 and first_version < set(written)
    assert set(written["base"]) == set(written["adapter"]) == {*METRICS, "fields"}
    assert set(written["examples"][0]) == {"prompt", "expected", "base", "adapter", "scores"}
    assert set(written["intervals"]["f1"]) == {"difference", "low", "high", "beyond_chance"}
    assert written["adapter"]["valid_json"] is None and written["adapter"]["exact_match"] is not None
    assert written["data"] == str(other_chats)
    assert not list(run.glob(".eval*"))


def test_without_a_file_the_runs_own_test_rows_are_used(run: Path, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    dataset = load(folder / "chats.jsonl", tokenizer, tmp_path, validation=0.1, test=0.3)
    own = dataset.documents("test")
    recipe = recipe_with_data(load_run_recipe(run), None, run / "adapter")
    name, documents = read_rows(recipe, tokenizer, True, None, ignore_events)
    assert 0 < len(documents) == len(own) < len(dataset.store.rows)
    assert all((documents[i].tokens == own[i].tokens).all() for i in range(len(own)))
    assert str(folder / "chats.jsonl") in name and "test split" in name


def test_some_rows_are_evenly_spaced(run: Path, folder: Path, other_chats: Path) -> None:
    recipe = recipe_with_data(load_run_recipe(run), other_chats, run / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for num_rows, expected in ((3, [0, 5, 10]), (1, [0]), (99, list(range(11)))):
        _, documents = read_rows(recipe, tokenizer, False, num_rows, ignore_events)
        assert documents.rows_N.tolist() == expected


def test_json_answers_are_judged_by_field_against_the_majority(run: Path, folder: Path) -> None:
    verdicts = [{"severity": "high" if a % 3 else "low", "area": "iam"} for a in range(9)]
    file = folder / "verdicts.jsonl"
    rows = [{"prompt": f"Finding {a}:", "completion": json.dumps(verdict)} for a, verdict in enumerate(verdicts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (run / "eval.json").unlink(missing_ok=True)
    (run / "eval.json").mkdir()  # a file cannot take the place of a folder
    events: list[Any] = []
    try:
        found = evaluate(run, file, max_tokens=3, listener=events.append)
    finally:
        (run / "eval.json").rmdir()
    assert found.majority == {"severity": pytest.approx(2 / 3), "area": 1.0}
    assert found.adapter.valid_json == 0.0 and found.adapter.fields == {"severity": 0.0, "area": 0.0}
    assert json.loads(found.examples[0].expected) == verdicts[0]
    assert found.examples[0].prompt == "Finding 0:"
    # It could not be written, and was not thrown away for that.
    assert any(isinstance(event, Alarm) and "eval.json" in event.text for event in events)
    assert not list(run.glob(".eval*"))


def test_a_question_near_the_models_last_position_gets_as_many_tokens_as_fit(
    generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "longest", 40)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("the quick brown fox jumps over the lazy dog " * 9)["input_ids"]
    questions = [Question(tuple(ids[:length]), (1, 2)) for length in (5, 30, 10, 12)]
    answers = ask(generator, questions, 20, True, "Answers", ignore_events)
    alone = generator.continue_tokens([questions[1].prompt], max_tokens=10)
    assert answers[1] == generator.prompts.decode(alone[0][0])
    together = generator.continue_tokens([questions[i].prompt for i in (0, 2, 3)], max_tokens=20)
    assert [answers[i] for i in (0, 2, 3)] == [generator.prompts.decode(tokens) for tokens, _ in together]


def test_few_questions_of_similar_length_are_answered_by_the_programs_of_the_longest(
    generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "batch_size", 2)
    monkeypatch.setattr(generator, "_readers", {})
    monkeypatch.setattr(generator, "_writers", {})
    ids = AutoTokenizer.from_pretrained(folder / "model")("the quick brown fox jumps over the lazy dog " * 9)[
        "input_ids"
    ]
    questions = [Question(tuple(ids[:length]), (1, 2)) for length in (62, 36, 61, 40, 33, 34)]
    answers = ask(generator, questions, 8, True, "Answers", ignore_events)
    assert generator.num_compiles == 2
    own = [generator.continue_tokens([question.prompt], max_tokens=8)[0][0] for question in questions]
    assert answers == [generator.prompts.decode(tokens) for tokens in own]
    assert generator.num_compiles > 4


def test_rows_longer_than_the_runs_are_dropped_and_reported(run: Path, folder: Path) -> None:
    file = folder / "long.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "Say " * n}, {"role": "assistant", "content": "It is."}]}
        for n in (1, 200, 2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    events: list[Any] = []
    recipe = recipe_with_data(load_run_recipe(run), file, run / "adapter")
    _, documents = read_rows(recipe, AutoTokenizer.from_pretrained(run.parent / "model"), False, None, events.append)
    assert documents.rows_N.tolist() == [0, 2]
    assert [event.text for event in events if isinstance(event, Alarm)] == [
        "1 row is longer than the run's 96 tokens and not tested."
    ]


def refused(*arguments: Any, **options: Any) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        evaluate(*arguments, **options)
    assert caught.value.where and caught.value.do
    return caught.value


def test_what_cannot_be_tested_is_refused_with_a_remedy(run: Path, folder: Path, other_chats: Path) -> None:
    gone = refused(folder / "runn", other_chats)
    assert "no run" in gone.what and "run" in gone.do
    assert "is not a run" in refused(folder, other_chats).what
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    shutil.copy(run / "recipe.json", unfinished)
    assert "no adapter yet" in refused(unfinished, other_chats).what
    assert "missing.jsonl" in str(refused(run, folder / "missing.jsonl"))
    empty = folder / "empty.jsonl"
    empty.write_text("")
    assert str(empty) in str(refused(run, empty))
    assert "at least 1" in refused(run, other_chats, max_rows=0).what
    (unfinished / "adapter").symlink_to(run / "adapter")
    recipe = load_run_recipe(run, ["data.split.test=0.0"]).recipe
    (unfinished / "recipe.json").write_text(run_file.dump(recipe))
    assert "no test rows" in refused(unfinished).what
    bad = folder / "bad.jsonl"
    bad.write_text('{"messages": "no"}\n')
    assert "bad.jsonl:1" in str(refused(run, bad))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_question_is_the_prompt_of_the_conversation_before_its_last_answer(name: str) -> None:
    """Two families ask in other words than they write: R1 opens a <think> that it then leaves out, and the bare ChatML
    does not ask. There a question is what was trained."""
    family, tokenizer = FAMILIES[name], chat_tokenizer(name)
    prompts = Prompts(tokenizer, template=tokenizer.chat_template)
    first = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
    second = [*first, {"role": "user", "content": "And of the quick fox?"}, {"role": "assistant", "content": "A den."}]
    for messages in (first, second):
        question = question_of(render_chat(messages, tokenizer))
        assert question is not None
        prompt, asked = list(question.prompt), prompts.encode(messages[:-1])
        if name == "deepseek-r1":
            assert tokenizer.decode(asked[len(prompt) :]).strip() == "<think>"
            asked = asked[: len(prompt)]
        if name == "chatml-bare":
            assert tokenizer.decode(prompt[len(asked) :]) == "<|im_start|>assistant\n"
            prompt = prompt[: len(asked)]
        assert prompt == asked
        said = tokenizer.decode(question.expected).rpartition("</think>")[2]
        assert said.strip() == messages[-1]["content"] + family.stop
        assert question.expected[-1] in prompts.stops


@pytest.mark.parametrize("name", FAMILIES)
def test_the_expected_answer_is_the_last_thing_the_assistant_says(name: str) -> None:
    family, tokenizer, rng = FAMILIES[name], chat_tokenizer(name), random.Random(name)
    for _ in range(20):
        row = some_conversation(rng, family)
        document = render(row, tokenizer, "messages", train_on="assistant")
        question = question_of(document)
        assert question is not None
        whole = [*question.prompt, *question.expected]
        assert whole == document.tokens[: len(whole)].tolist() and not document.supervised[len(whole) :].any()
        said, last = tokenizer.decode(question.expected), family.speech(row["messages"])[-1]
        # The template's empty block of thinking is a part of what follows the prompt.
        assert "".join(said.split()).removeprefix("<think></think>") == "".join(last.split())


def test_rows_without_a_question_have_none() -> None:
    tokenizer = chat_tokenizer("gemma")
    assert question_of(render_text("The quick brown fox", tokenizer)) is None
    pair = question_of(render({"prompt": "The quick", "completion": " brown"}, tokenizer, "prompt-completion"))
    assert pair is not None
    assert list(pair.prompt) == tokenizer("The quick")["input_ids"]  # with its BOS
    assert pair.expected[-1] == tokenizer.eos_token_id


def test_the_last_question_is_found_in_the_template_or_not_at_all() -> None:
    head, request, words = "<s>sys<t>user\n", "<e><t>model\n", ["<s>", "<t>", "<e>"]
    assert last_question("<s>sys<t>user\nHow?<e><t>model\n", head, request, words) == "How?"
    assert last_question("<s>other<t>user\nA<e><t>model\nB<e><t>user\n C <e><t>model\n", head, request, words) == "C"
    for end in ("model", "model\n   "):  # the answer's first token joins spaces to the line break
        assert last_question(f"<s>sys<t>user\nHow?<e><t>{end}", head, request, words) == "How?"
    assert last_question("<s>plain text", head, request, words) is None
    assert last_question("How?", "", "", words) is None


@full_dose_only  # test_lora_variants.py compares logits, in this process; test_card.py only loads in another
def test_the_adapter_is_the_adapter(run: Path, folder: Path, generator: Generator, tmp_path: Path) -> None:
    """PEFT, in a process that imports nothing of ours, gives our logits."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 200, (4, 48))
    batch = {"tokens": jnp.asarray(tokens), "positions": jnp.broadcast_to(jnp.arange(48), tokens.shape)}
    ours = jax.jit(lambda base, adapter: generator.model.logits(base, adapter, batch))(
        generator.base, generator.adapter
    )
    np.save(tmp_path / "tokens.npy", tokens)
    script = """
import sys
import numpy, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model, adapter, folder = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
ids = torch.tensor(numpy.load(folder + "/tokens.npy"))
with torch.no_grad():
    numpy.save(folder + "/base.npy", base(ids).logits.numpy())
    numpy.save(folder + "/logits.npy", PeftModel.from_pretrained(base, adapter).eval()(ids).logits.numpy())
assert not [name for name in sys.modules if name.partition(".")[0] in ("trillora", "jax", "torchax")]
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", script, str(folder / "model"), str(run / "adapter"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    theirs, base = np.load(tmp_path / "logits.npy"), np.load(tmp_path / "base.npy")
    assert np.abs(theirs - base).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-5)  # the promise's own tolerance


def test_verb_prints_a_table_on_stdout_and_progress_on_stderr(run: Path, other_chats: Path) -> None:
    arguments = ["eval", str(run), "--data", str(other_chats), "--rows", "3", "--max-tokens", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "exact match" in result.stdout and "token accuracy" in result.stdout and "base" in result.stdout
    assert "valid JSON" not in result.stdout and "Model " not in result.stdout and "Model " in result.stderr
    assert CliRunner().invoke(app, ["eval", str(run / "nowhere")]).exit_code == 2


def test_texts_have_a_loss_and_no_answers(run: Path, folder: Path) -> None:
    file = folder / "texts.jsonl"
    texts = ["the quick brown fox jumps over the lazy dog", "numbers 0 1 2 3 " * 30]  # the second is split
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    told = CliRunner().invoke(app, ["eval", str(run), "--data", str(file), "--json", "--no-base"])
    found = json.loads(told.stdout)
    assert found == json.loads((run / "eval.json").read_text("utf-8"))
    assert (found["num_rows"], found["base"], found["examples"], found["majority"]) == (2, None, [], {})
    adapter = found["adapter"]
    assert adapter["loss"] > 0 and adapter["fields"] == {}
    assert (adapter["exact_match"], adapter["valid_json"], adapter["right_fields"]) == (None, None, None)


def some_evaluation(**changes: Any) -> Evaluation:
    base = Scores(2.5, 12.18, 0.41, 0.0, 0.0, 0.0, {"severity": 0.0, "area": 0.0})
    adapter = Scores(0.11, 1.12, 0.97, 0.5, 1.0, 1.0, {"severity": 0.55, "area": 0.9})
    example = Example(
        "Is the bucket open?", '{"severity": "high"}', "It is\x1b[31m a bucket. " * 40, '{"severity": "high"}'
    )
    known = Evaluation("test.jsonl", 60, base, adapter, {"severity": 0.5, "area": 0.1}, (example,) * 5)
    return dataclasses.replace(known, **changes)


@pytest.mark.parametrize("width", [40, 80, 140])
def test_table_fits_its_terminal_and_ignores_control_characters(width: int) -> None:
    stream = io.StringIO()
    show(some_evaluation(), Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    if width >= 80:
        assert "90.0%" in text and "majority" in text and "characters)" in text


def test_figures_that_json_does_not_have_become_text() -> None:
    told = some_evaluation(adapter=Scores(loss=math.nan, perplexity=math.inf)).to_dict()
    assert told["adapter"]["loss"] == "nan" and told["adapter"]["perplexity"] == "inf"
    json.dumps(told, allow_nan=False)
