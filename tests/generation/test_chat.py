"""`trillora chat`: its commands, two models side by side, and the files that it saves. The model is tiny and real."""

from __future__ import annotations

import copy
import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from architecture_checks import LORA, to_jax
from chat_tokenizers import chat_tokenizer
from dose import dose
from transformers import AutoModelForCausalLM

from trillora.data.rendering.formats import convert, detect
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.sampling import Sampling
from trillora.generation.chat import COMMANDS, GREETING, converse
from trillora.generation.columns import NARROWEST, Column, column_width, side_by_side
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.model.bridge import CausalLM
from trillora.model.layout import stack
from trillora.safe_text import visible

MAX_TOKENS = 6
SAMPLING = Sampling(0.8, 0.95, seed=7)
SAMPLED = "Temperature 0.8: answers are sampled and differ. --temperature 0 takes the most likely."
FIRST, SECOND = "What is 3 plus 4?", "And 4 plus 5?"


@pytest.fixture(scope="module")
def generator() -> Generator:
    """A random Llama with a random adapter that changes its answers."""
    torch.manual_seed(0)
    config = tiny_run.llama(num_layers=1)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    model = CausalLM(config, lora=LORA, scan=False, remat="none", mesh=mesh)
    flat = {name: to_jax(tensor) for name, tensor in (*reference.named_parameters(), *reference.named_buffers())}
    base = stack({name: flat[name] for leaf in model.layout.values() for name in leaf.names}, model.layout)
    rng = np.random.default_rng(1)
    adapter = {
        name: jnp.asarray(rng.normal(0, 0.2, leaf.shape).astype(np.float32))
        for name, leaf in model.adapter_layout.items()
    }
    tokenizer = chat_tokenizer("chatml")
    return Generator(model, base, adapter, Prompts(tokenizer, template=tokenizer.chat_template), mesh)


def chat(generator: Generator, *lines: str, width: int | None = None) -> str:
    """What is printed after these lines and the end of the input, without the greeting and the goodbye."""
    given, said = iter(lines), list[str]()

    def ask() -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    converse(generator, ask, said.append, max_tokens=MAX_TOKENS, sampling=SAMPLING, width=lambda: width)
    text = "".join(piece for piece in said if not piece.startswith("(Compiling for prompts of up to"))
    return text.removeprefix(f"{GREETING}\n{SAMPLED}\n").removesuffix("\nBye.\n")


def test_the_chat_says_how_it_samples_and_why_it_is_silent(generator: Generator) -> None:
    fresh = copy.copy(generator)
    fresh._readers, fresh._writers = {}, {}
    said: list[str] = []
    lines = iter([FIRST, "/reset", FIRST, "/quit"])
    converse(fresh, lambda: next(lines), said.append, max_tokens=2, sampling=Sampling(0.0))
    assert said[0].startswith(f"{GREETING}\nTemperature 0: ") and "always the same" in said[0]
    assert sum(piece.startswith("(Compiling for prompts of up to") for piece in said) == 1, "once for each program"
    converse(fresh, iter(["/quit"]).__next__, said.append, max_tokens=2, sampling=SAMPLING)
    assert f"{GREETING}\n{SAMPLED}\n" in said


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def answer(generator: Generator, *messages: dict[str, Any], adapted: bool = True) -> str:
    return "".join(generator.stream(messages, max_tokens=MAX_TOKENS, sampling=SAMPLING, adapted=adapted))


def two_rounds(generator: Generator, *, adapted: bool, system: str = "") -> list[dict[str, Any]]:
    turns = [turn("system", system)] if system else []
    for question in (FIRST, SECOND):
        turns.append(turn("user", question))
        turns.append(turn("assistant", answer(generator, *turns, adapted=adapted)))
    return turns


def test_base_and_adapter_answer_with_their_own_history_and_one_seed(generator: Generator) -> None:
    base, adapter = (two_rounds(generator, adapted=adapted) for adapted in (False, True))
    assert base[1]["content"] != adapter[1]["content"]  # otherwise the rest would prove little
    expected = "".join(f"[base]\n{base[n]['content']}\n[adapter]\n{adapter[n]['content']}\n" for n in (1, 3))
    said = chat(generator, "/compare", FIRST, SECOND, "/compare", "/reset", FIRST)
    assert said.startswith("Base and adapter answer every message. /compare again ends it.\n" + expected)
    assert said.endswith(f"Only the adapter answers.\nConversation cleared.\n{adapter[1]['content']}\n")


def test_a_wide_terminal_shows_both_answers_in_columns(generator: Generator) -> None:
    said = chat(generator, "/compare", FIRST, width=100)
    head, *rows = said.splitlines()[1:]
    assert re.fullmatch(r"base {44} │ adapter", head)
    base, adapter = (answer(generator, turn("user", FIRST), adapted=adapted) for adapted in (False, True))
    for side, text in enumerate((base, adapter)):
        shown = "".join(row.partition(" │")[0 if side == 0 else 2] for row in rows)
        assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", visible(text))
    assert "[base]" in chat(generator, "/compare", FIRST, width=2 * NARROWEST)  # too narrow with the line between


def test_compare_needs_an_adapter(generator: Generator) -> None:
    alone = copy.copy(generator)
    alone.adapter = {}
    assert "There is no adapter here" in chat(alone, "/compare")


def test_the_system_message_restarts_the_conversation(generator: Generator) -> None:
    with_system = two_rounds(generator, adapted=True, system="Be brief.")
    said = chat(generator, FIRST, "/system Be brief.", FIRST, SECOND, "/system", FIRST)
    plain = answer(generator, turn("user", FIRST))
    assert said == (
        f"{plain}\nSystem message set, conversation cleared.\n"
        f"{with_system[2]['content']}\n{with_system[4]['content']}\n"
        f"System message removed, conversation cleared.\n{plain}\n"
    )


def test_a_template_that_ignores_or_refuses_system_messages_is_named(generator: Generator) -> None:
    other = copy.copy(generator)
    ask = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    other.prompts = Prompts(chat_tokenizer("chatml"), template=ask)
    assert "set, conversation cleared. The chat template of this model ignores it." in chat(other, "/system Be brief.")
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}" + ask
    other.prompts = Prompts(chat_tokenizer("chatml"), template=refuse)
    said = chat(other, "/system Be brief.", FIRST)
    assert "No system!" in said and "conversation cleared" not in said
    assert said.count("No system!") == 1  # the message after it is sent without a system message


def test_saved_conversations_are_rows_that_training_reads(
    generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = chat(generator, "/system Be brief.", FIRST, SECOND, "/save one.jsonl", "/compare", FIRST, "/save two.jsonl")
    assert "1 conversation written to one.jsonl\n" in said and "2 conversations written to two.jsonl\n" in said
    (one,) = (json.loads(line) for line in Path("one.jsonl").read_text("utf-8").splitlines())
    assert one == {"messages": two_rounds(generator, adapted=True, system="Be brief.")}
    two = [json.loads(line) for line in Path("two.jsonl").read_text("utf-8").splitlines()]
    assert [row["model"] for row in two] == ["base", "adapter"]
    assert [len(row["messages"]) for row in two] == [7, 7] and two[0]["messages"][:5] == one["messages"]
    for row in (one, *two):
        assert detect(row) == "messages"
        assert convert(row, "messages").messages == row["messages"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"]


def test_a_file_is_replaced_only_with_an_exclamation_mark(generator: Generator, tmp_path: Path) -> None:
    file, missing = tmp_path / "chat.jsonl", tmp_path / "missing" / "chat.jsonl"
    file.write_text("mine")
    assert "There is nothing to save yet." in chat(generator, f"/save {file}")
    said = chat(generator, FIRST, f"/save {file}", "/save", f"/save {missing}", f"/save! {tmp_path}")
    assert "This file exists." in said and f"write /save! {file} to replace it" in said
    assert "/save needs the name of a file." in said and "No such file or directory." in said
    assert "Is a directory." in said
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    assert "1 conversation written" in chat(generator, FIRST, f"/save! {file}")
    assert json.loads(file.read_text("utf-8"))["messages"][0]["content"] == FIRST


def test_unknown_commands_are_named_and_never_sent(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    real = generator.stream
    monkeypatch.setattr(
        generator, "stream", lambda messages, **options: sent.append(messages) or real(messages, **options)
    )
    lines = {
        "/rest": "did you mean /reset?",
        "/Compare": "did you mean /compare?",
        "/exit now": "Unknown command '/exit'.",
        "/": "Unknown command '/'.",
        "/quit!": "did you mean /quit?",
        "/reset all": "/reset takes no text after it.",
        "/etc/passwd?": "write two slashes",
    }
    for line, expected in lines.items():
        said = chat(generator, line)
        assert expected in said and "do:" in said, line
    assert sent == []
    chat(generator, "//etc/passwd?")
    assert sent == [[turn("user", "/etc/passwd?")]]


def test_help_lists_every_command(generator: Generator) -> None:
    said = chat(generator, "/help")
    assert [line.split()[0] for line in said.splitlines()] == list(COMMANDS)
    assert max(map(len, said.splitlines())) < 100


def test_a_conversation_beyond_the_limit_says_what_to_do(generator: Generator) -> None:
    said = chat(generator, "word " * 300)
    assert "the model's limit, with the answer, is 256." in said and "write a shorter message" in said
    said = chat(generator, *[FIRST + " word" * 40] * 2, "/reset", FIRST)
    assert "clear it with /reset; save it before with /save FILE" in said
    assert said.endswith(f"Conversation cleared.\n{answer(generator, turn('user', FIRST))}\n")


@pytest.mark.parametrize("width", [None, 100])
def test_an_interrupt_ends_the_answer_and_keeps_what_was_written(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int | None
) -> None:
    def interrupted(messages: Any, **options: Any) -> Iterator[str]:
        yield "Seven"
        raise KeyboardInterrupt

    monkeypatch.setattr(generator, "stream", interrupted)
    said = chat(generator, *(["/compare"] if width else []), FIRST, f"/save {tmp_path / 'chat.jsonl'}", width=width)
    assert "Seven" in said and "(stopped)" in said
    saved = json.loads((tmp_path / "chat.jsonl").read_text("utf-8").splitlines()[0])
    assert saved["messages"] == [turn("user", FIRST), turn("assistant", "Seven")]


# Columns


def column(text: str, width: int, rng: random.Random) -> list[str]:
    """The lines of a text that arrives in random pieces."""
    made = Column(width)
    while text:
        size = rng.randint(1, 9)
        made.add(text[:size])
        text = text[size:]
    made.finish()
    return made.lines


def test_columns_break_lines_as_textwrap_does() -> None:
    rng = random.Random(3)
    for _ in range(dose(300, 10_000)):
        width = rng.randint(4, 20)
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 30))]
        words = [word[:width] for word in words]
        assert column(" ".join(words), width, rng) == textwrap.wrap(" ".join(words), width)


def test_columns_keep_indents_blank_lines_wide_letters_and_long_words() -> None:
    rng = random.Random(4)
    assert column("def f():\n    return 1\n\n\tx", 12, rng) == ["def f():", "    return 1", "", "    x"]
    assert column("abcdefghij", 4, rng) == ["abcd", "efgh", "ij"]
    assert column("你好世界 ok", 5, rng) == ["你好", "世界", "ok"]  # each letter has two cells
    assert column("e\u0301" * 3, 3, rng) == ["e\u0301" * 3]  # the accents have none
    assert column("red\x1b[31m\u202e", 40, rng) == ["red\\x1b[31m\\u202e"]


def test_a_row_is_printed_when_both_columns_have_it() -> None:
    said: list[str] = []

    def pieces(*parts: str) -> Iterator[str]:
        for part in parts:
            seen.append(len(said))
            yield part

    seen: list[int] = []
    side_by_side({"a": pieces("1\n2\n3"), "b": pieces("x\n", "y")}, 4, said.append)
    assert said == ["a    │ b\n", "1    │ x\n", "2    │ y\n", "3    │\n"]
    assert seen == [1, 1, 2]  # rows that were printed when each piece was asked for
    assert column_width(None, 2) is None and column_width(2 * NARROWEST + 4, 2) == NARROWEST
