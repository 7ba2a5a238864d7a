"""A run whose rows had one and the same system message uses it in its answers, and says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.engine.sampling import Sampling
from trillora.events import Note, ignore_events
from trillora.generation.chat import converse
from trillora.generation.generator import Generator
from trillora.recipe.load import load_recipe
from trillora.runs.saved import SavedRun, find_adapter
from trillora.serving.served import open_service
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")
SYSTEM = "Answer with one number."
PHASES = {"one": SYSTEM, "two": "Be brief."}
QUESTION = "What is 3 plus 4?"
SAID = f"All rows of the training had the same system message (“{SYSTEM}”)."
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("system"), tiny_run.llama(num_layers=1))


def with_systems(chats: Path, name: str, systems: Sequence[str]) -> str:
    """The chats again, with these system messages in turn."""
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    file = chats.with_name(name)
    texts = [{"role": "system", "content": systems[number % len(systems)]} for number in range(len(rows))]
    pairs = zip(texts, rows, strict=True)
    file.write_text("".join(json.dumps({"messages": [text, *row]}) + "\n" for text, row in pairs))
    return str(file)


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    data = {"path": with_systems(home / "chats.jsonl", "same.jsonl", [SYSTEM])}
    return train(load_recipe(tiny_run.recipe(home, data=data)), home / "same").run


@pytest.fixture(scope="module")
def mixed(home: Path) -> Path:
    data = {"path": with_systems(home / "chats.jsonl", "mixed.jsonl", [SYSTEM, "Be brief."])}
    return train(load_recipe(tiny_run.recipe(home, data=data)), home / "mixed").run


@pytest.fixture(scope="module")
def generator(run: Path) -> Generator:
    return Generator.open(str(run))


def generated(*arguments: str | Path) -> tuple[int, str]:
    """The number of tokens of the prompt, and what was said about it."""
    words = ["generate", *map(str, arguments), "--prompt", QUESTION, "--max-tokens", "4", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["num_prompt_tokens"], result.stderr


def test_generate_uses_it_and_says_so_once(run: Path, mixed: Path, generator: Generator) -> None:
    alone, whole = (len(generator.encode(prompt)) for prompt in (QUESTION, MESSAGES))
    length, said = generated(run)
    assert length == whole > alone and said.count(SAID) == 1 and '--system ""' in said
    assert generated(run, "--base") == (whole, said.replace(f" with {run / 'adapter'}", ""))  # compares the same prompt
    assert generated(run, "--system", "")[0] == alone
    length, said = generated(run, "--system", "Be brief.")
    assert alone < length < whole and SAID not in said
    length, said = generated(mixed)
    assert length == alone and "system message" not in said


def test_a_loaded_run_uses_it_for_texts(run: Path, generator: Generator) -> None:
    loaded = trillora.load(run, listener=ignore_events)
    wanted, without = (answer.text for answer in generator.generate([MESSAGES, QUESTION], max_tokens=8))
    assert wanted != without
    assert loaded.generate(QUESTION, max_tokens=8) == wanted
    messages = [{"role": "user", "content": QUESTION}]  # are what the caller wants to send
    assert loaded.generate([QUESTION, messages, MESSAGES], max_tokens=8) == [wanted, without, wanted]
    assert loaded.generate(QUESTION, system="", max_tokens=8) == without


def test_a_chat_begins_with_it_and_can_remove_it(generator: Generator) -> None:
    lines, said, seen = iter([QUESTION, "/system", QUESTION, "/quit"]), list[str](), list[Any]()

    class Recorded:
        system, prompts, longest, listener = generator.system, generator.prompts, None, ignore_events

        def stream(self, messages: Any, **options: Any) -> Any:
            seen.append(messages)
            return iter(["7"])

    converse(Recorded(), lambda: next(lines), said.append, max_tokens=4, sampling=Sampling())  # type: ignore[arg-type]
    assert seen == [MESSAGES, MESSAGES[1:]]
    assert [text for text in said if SAID in text] == [f"{SAID} It is set here too; /system removes it.\n"]


def test_a_server_lists_it_with_the_adapter(run: Path, mixed: Path) -> None:
    service = open_service(str(run), adapters=[str(mixed)], num_rows=1, max_length=128)
    try:
        systems = {name: model.system for name, model in service.models.items()}
        assert systems == {"model": "", "same": SYSTEM, "mixed": ""}
    finally:
        service.engine.close()


def test_it_belongs_to_the_adapter(run: Path, home: Path, tmp_path: Path) -> None:
    assert find_adapter(run / "adapter").system == SYSTEM
    shutil.copytree(run / "adapter", tmp_path / "copy")
    assert find_adapter(tmp_path / "copy").system == ""  # its run is not known
    tiny_run.copy_interrupted(run, tmp_path / "stopped", 4)
    notes: list[Any] = []
    found = Generator.open(str(tmp_path / "stopped"), listener=notes.append)
    assert found.system == SYSTEM and any("checkpoint" in note.text for note in notes if isinstance(note, Note))
    assert Generator.open(str(home / "model"), adapter=run / "adapter").system == SYSTEM


def test_phases_have_their_own_and_the_base_only_a_common_one(home: Path) -> None:
    files = {name: with_systems(home / "chats.jsonl", f"{name}.jsonl", [text]) for name, text in PHASES.items()}
    phases = [{"name": name, "data": {"path": file}} for name, file in files.items()]
    recipe = {**tiny_run.recipe(home, train={"steps": 1}), "phases": phases}
    del recipe["data"]
    run = SavedRun.open(train(load_recipe(recipe), home / "phases").run)
    assert {name: part.system for name, part in run.parts.items()} == PHASES
    assert run.finished_adapter("one").system == SYSTEM
    assert Generator.open(str(run.folder), with_adapter=False).system == ""


def test_of_several_stages_the_last_one_counts(home: Path) -> None:
    texts = home / "texts.jsonl"
    texts.write_text('{"text": "Three plus four is seven."}\n' * 8)
    chats = with_systems(home / "chats.jsonl", "last.jsonl", [SYSTEM])
    stages = [{"name": "text", "data": {"path": str(texts)}}, {"name": "chat", "data": {"path": chats}}]
    recipe = {**tiny_run.recipe(home, train={"steps": 1}), "stages": stages}
    del recipe["data"]
    run = train(load_recipe(recipe), home / "stages").run
    assert SavedRun.open(run).finished_adapter().system == SYSTEM
