"""The command line and the console: start without weight, speak plainly, exit with the right code."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import trillora
from trillora.cli import Verbs, app
from trillora.errors import TrilloraError
from trillora.events import Chosen, Event, Note, Progress, Step, to_json
from trillora.recipe.load import recipe_schema
from trillora.report.console import KEPT_STEPS, LOGGED_PARTS, console_listener

HEAVY = {"jax", "jaxlib", "torch", "torchax", "transformers", "numpy", "tokenizers", "huggingface_hub"}


# Where the package under test lies, for a fresh interpreter started in another folder.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(trillora.__file__).parent.parent),
    "NO_COLOR": "1",
    "COLUMNS": "120",
}


def modules_after(code: str) -> set[str]:
    """Top-level packages a fresh interpreter has loaded after running the code."""
    code += "\nimport sys; print('loaded:', *{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return set(result.stdout.rpartition("loaded:")[2].split())


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_after(
        "import contextlib, sys\n"
        "from trillora.cli import main\n"
        "sys.argv = ['trillora', '--help']\n"
        "with contextlib.suppress(SystemExit): main()"
    )
    assert "typer" in loaded  # the list is real
    assert loaded & HEAVY == set()


def test_importing_the_package_loads_nothing_but_itself() -> None:
    assert modules_after("import trillora") & (HEAVY | {"pydantic", "typer", "rich", "yaml"}) == set()


def test_reading_a_recipe_loads_nothing_heavy() -> None:
    loaded = modules_after("import trillora; trillora.load_recipe({'model': 'a', 'data': 'b.jsonl'})")
    assert "pydantic" in loaded
    assert loaded & HEAVY == set()


def test_lazy_names_are_the_real_ones() -> None:
    from trillora.recipe import load

    assert trillora.load_recipe is load.load_recipe
    assert trillora.Recipe is load.Recipe
    assert trillora.TrilloraError is TrilloraError
    with pytest.raises(AttributeError):
        trillora.nothing  # noqa: B018


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trillora", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)


def test_a_mistake_in_the_recipe_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: smollm2\ndata: a.jsonl\ntrain: {stesp: 3}\n")
    result = run("train", "r.yaml", "--out", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "Unknown option 'train.stesp'.\n  where: r.yaml, train.stesp\n  do:    did you mean"
    )
    assert not (tmp_path / "run").exists()


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_missing_recipe_is_told(tmp_path: Path) -> None:
    code, output = invoke("train", str(tmp_path / "no.yaml"), "--out", str(tmp_path / "run"))
    assert (code, "There is no recipe 'no.yaml'" in output) == (2, True)


def test_unknown_verb_and_missing_arguments_are_told() -> None:
    code, output = invoke("trian")
    assert (code, "'train'" in output) == (2, True)
    code, output = invoke("train")
    assert (code, "RECIPE" in output) == (2, True)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: smollm2\ndata: a.jsonl\n")
    (tmp_path / "adapter").mkdir()
    code, output = invoke("train", str(recipe), "--out", str(tmp_path))
    assert (code, "already holds a finished run" in output) == (2, True)
    code, output = invoke("train", str(recipe), "--out", str(recipe))
    assert (code, "this is a file" in output) == (2, True)


def test_version_and_schema_are_printed() -> None:
    assert invoke("--version") == (0, f"trillora {trillora.__version__}\n")
    code, output = invoke("schema")
    assert (code, json.loads(output)) == (0, recipe_schema())


def test_errors_of_any_verb_become_text_and_an_exit_code() -> None:
    verbs = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)

    @verbs.command()
    def mistake() -> None:
        raise TrilloraError("what", where="here", do="this")

    @verbs.command()
    def interrupt() -> None:
        raise KeyboardInterrupt

    @verbs.command()
    def bug() -> None:
        raise ZeroDivisionError

    runner = CliRunner()
    result = runner.invoke(verbs, ["mistake"])
    assert (result.exit_code, result.output) == (2, "what\n  where: here\n  do:    this\n")
    assert runner.invoke(verbs, ["interrupt"]).exit_code == 130
    assert isinstance(runner.invoke(verbs, ["bug"]).exception, ZeroDivisionError)  # ours to see, whole


def step(number: int, num_steps: int = 100, loss: float = 2.5) -> Step:
    left = (num_steps - number) * 2.0
    return Step(number, num_steps, "all", loss, 2e-4, 1.0, False, 1234.0, number * 2.0, left, 0.0)


EVENTS: list[Event] = [
    Note("loading [bold]model[/bold] [x"),
    Chosen("engine.layers", "scan", "a TPU compiles it in seconds"),
    *(Progress("reading weights", done, 1000) for done in range(1001)),
    *(step(number) for number in range(1, 101)),
]


def test_a_log_gets_plain_lines() -> None:
    out = io.StringIO()
    with console_listener(Console(file=out, highlight=False)) as listener:
        for event in EVENTS:
            listener(event)
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading [bold]model[/bold] [x"  # text is text, never markup
    assert lines[1] == "engine.layers = scan  (a TPU compiles it in seconds)"
    assert sum(line.startswith("reading weights") for line in lines) == LOGGED_PARTS + 1
    assert lines[-1] == "step 100/100  loss 2.5000  lr 2.00e-04  grad 1.000  1,234 tokens/s  left 0:00:00"
    assert sum(line.startswith("step") for line in lines) == 100
    assert "\x1b" not in out.getvalue()


def test_a_terminal_keeps_some_of_the_steps_and_moves_one_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False, _environ={"TERM": "xterm"})
    with console_listener(console) as listener:
        for event in EVENTS:
            listener(event)
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    kept = [line for line in lines if line.startswith("step") and "━" not in line]
    assert KEPT_STEPS <= len(kept) <= KEPT_STEPS + 2
    assert any("━" in line for line in lines)
    assert "[bold]model[/bold] [x" in out.getvalue()


@pytest.mark.parametrize("event", [EVENTS[0], EVENTS[1], EVENTS[2], step(1), step(1, loss=math.nan)])
def test_every_event_is_one_line_of_json(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    fields = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert fields.pop("event") == type(event).__name__.lower()
    assert list(fields) == list(type(event).__match_args__)
    if isinstance(event, Step) and math.isnan(event.loss):
        assert fields["loss"] == "nan"
