"""The tutorial: every command in it runs, on a tiny model, with the files that come with it."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import tiny_run
import typer
from dose import FULL
from typer.testing import CliRunner
from warm_process import WarmCommand

from trillora.cli import app

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "recipes" / "tutorial"
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SLOW = {"certify", "serve"}  # run at full dose only: they import the libraries of others, or start a process
# What makes the commands small. The model of the recipe is replaced by a tiny random one.
SMALL = {
    "train": ["train.steps=3", "evaluate.every_steps=3", "evaluate.num_samples=0", "train.sequence_length=192"],
    "eval": ["--rows", "3"],
    "generate": ["--max-tokens", "4"],
    "serve": ["--port", "0", "--rows", "2", "--max-length", "200"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)


def commands() -> list[list[str]]:
    """The commands of the page, without `trillora`."""
    text = "\n".join(blocks("console")).replace("\\\n", " ")
    return [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ trillora ")]


def parse(verb: str, *arguments: str) -> None:
    """Fails if the command line does not know the command or one of its options."""
    command = typer.main.get_command(app).get_command(None, verb)  # type: ignore[attr-defined]
    assert command is not None, verb
    command.make_context(verb, list(arguments))


def serve_and_ask(run: Path) -> str:
    """Starts the server of the tutorial and runs the page's Python example against it."""
    command = WarmCommand("serve", str(run), *SMALL["serve"])
    try:
        url = next(match[0] for line in command.stdout if (match := re.search(r"http://127.0.0.1:\d+", line)))
        [example] = [block for block in blocks("python") if "OpenAI(" in block]
        shown: list[str] = []
        values = {"print": lambda *parts: shown.extend(map(str, parts))}
        exec(re.sub(r"http://127.0.0.1:\d+", url, example), values)
        return " ".join(shown)
    finally:
        command.kill()
        command.communicate(60)


def test_the_files_on_the_page_are_those_that_come_with_it() -> None:
    [recipe] = blocks("yaml")
    assert recipe == (TUTORIAL / "recipe.yaml").read_text(encoding="utf-8")
    rows = (TUTORIAL / "messages.csv").read_text(encoding="utf-8")
    [shown] = blocks("csv")
    assert rows.startswith(shown) and shown.count("\n") > 3
    assert f"{rows.count(chr(10)) - 1} rows" in PAGE


def test_every_command_in_the_text_can_be_parsed() -> None:
    inline = [shlex.split(text) for text in re.findall(r"`trillora (\w+ [^`]+)`", PAGE)]
    for verb, *arguments in [*inline, *commands()]:
        parse(verb, *arguments)
    assert len(inline) > 3
    with pytest.raises(Exception, match="no-such-option"):  # of click or of typer, whose versions differ
        parse("train", "recipe.yaml", "--out", "runs/areas", "--no-such-option")


def test_every_command_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TUTORIAL, tmp_path, dirs_exist_ok=True)
    model = tiny_run.write_model(tmp_path / "model", tiny_run.llama(num_layers=1))
    monkeypatch.chdir(tmp_path)
    done = []
    for verb, *arguments in commands():
        if verb in SLOW and not FULL:
            continue
        if verb == "serve":
            assert "areas" in serve_and_ask(tmp_path / arguments[0])
        else:
            replaced = [f"model.name={model}"] if verb in ("inspect", "train") else []
            result = CliRunner().invoke(app, [verb, *arguments, *SMALL.get(verb, []), *replaced])
            assert result.exit_code == 0, (verb, result.output)
        done.append(verb)
    assert {"inspect", "train", "eval", "generate", *(SLOW if FULL else ())} == set(done)
    assert (tmp_path / "runs" / "areas" / "adapter" / "adapter_model.safetensors").exists()
