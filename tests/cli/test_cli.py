"""The command line: starts fast, prints errors as text, and exits with the right code."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from dose import slow_case
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.cli.errors import OTHER_VERBS, Verbs
from trillora.devices.quiet import quiet_libraries
from trillora.errors import TrilloraError
from trillora.events import Chosen, Event, Note, Progress, Step, to_json
from trillora.own_command import runnable
from trillora.recipe.load import recipe_schema
from trillora.recipe.run_file import dump

HEAVY = {"jax", "jaxlib", "torch", "torchax", "transformers", "numpy", "tokenizers", "huggingface_hub"}


# A new interpreter that is started in another folder must find the package under test.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(trillora.__file__).parent.parent),
    "NO_COLOR": "1",
    "COLUMNS": "120",
}


def modules_after(code: str) -> set[str]:
    """Top-level packages that a new interpreter has loaded after running the code."""
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
    assert loaded & (HEAVY | {"rich", "pydantic", "psutil"}) == set()


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


# A sign of life


STARTING = """
import sys, time
import trillora.report.console
from trillora.cli import output
from trillora.cli.output import progress_on_stderr
from trillora.events import Note
output.SILENT_SECONDS = 1
with progress_on_stderr(as_json="json" in sys.argv) as listener:
    if "early" in sys.argv:
        listener(Note("shown"))
    time.sleep(1.5)
"""


@pytest.mark.parametrize(("words", "says"), [((), True), (("early",), False), (("json",), False)])
def test_a_command_that_shows_nothing_yet_says_that_it_is_starting(words: tuple[str, ...], says: bool) -> None:
    command = [sys.executable, "-c", STARTING, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert ("Starting: " in result.stderr) == says and result.stdout == ""


# Noise of libraries


def test_libraries_are_quiet_and_jax_uses_the_cpu_where_there_is_no_accelerator() -> None:
    laptop: dict[str, str] = {}
    quiet_libraries("auto", laptop, accelerator=False)
    assert laptop["JAX_PLATFORMS"] == "cpu" and laptop["TPU_STDERR_LOG_LEVEL"] == "3"
    assert laptop["TRANSFORMERS_VERBOSITY"] == "error"


@pytest.mark.parametrize(("backend", "accelerator"), [("auto", True), ("tpu", True), ("tpu", False), ("gpu", False)])
def test_jax_chooses_the_device_where_there_is_an_accelerator_or_the_recipe_names_one(
    backend: str, accelerator: bool
) -> None:
    environment: dict[str, str] = {}
    quiet_libraries(backend, environment, accelerator=accelerator)
    assert "JAX_PLATFORMS" not in environment


def test_variables_of_the_user_stay() -> None:
    own = {"JAX_PLATFORMS": "cuda", "TF_CPP_MIN_LOG_LEVEL": "0", "TRANSFORMERS_VERBOSITY": "info"}
    environment = dict(own)
    quiet_libraries("auto", environment, accelerator=False)
    assert {name: environment[name] for name in own} == own


PROBE = """
import os, sys
class Probe:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "transformers"):
            print("first", name, os.environ.get("JAX_PLATFORMS"), os.environ.get("TRANSFORMERS_VERBOSITY"))
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Probe())
import trillora.devices.chips
trillora.devices.chips.has_accelerator = lambda: False
from trillora.cli import main
sys.argv = ["trillora", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "r.yaml", "--out", "new"),
        slow_case(("quickstart", "--out", "new")),
        ("generate", "smollm2", "-p", "hi"),
        slow_case(("chat", "smollm2")),
        slow_case(("eval", "run")),
        ("merge", "run", "run/adapter", "--out", "merged"),
        ("inspect", "r.yaml"),
        ("preflight", "r.yaml", "--on", "v5e-8", "--estimate"),
    ],
)
def test_variables_are_set_before_jax_and_transformers_are_imported(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "r.yaml").write_text("model: smollm2\ndata: a.jsonl\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "run" / "recipe.json").write_text(dump(trillora.load_recipe(tmp_path / "r.yaml")))
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", PROBE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    line = [line for line in result.stdout.splitlines() if line.startswith("first")]
    assert line and line[0].split()[2:] == ["cpu", "error"], result


# Errors


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trillora", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)


def test_a_mistake_in_the_recipe_is_printed_without_a_traceback(tmp_path: Path) -> None:
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


def test_a_missing_recipe_is_an_error(tmp_path: Path) -> None:
    code, output = invoke("train", str(tmp_path / "no.yaml"), "--out", str(tmp_path / "run"))
    assert (code, "There is no recipe 'no.yaml'" in output) == (2, True)


@pytest.mark.parametrize(("verb", "meant"), [("trian", "train"), *OTHER_VERBS.items()])
def test_an_unknown_command_names_the_right_one(verb: str, meant: str) -> None:
    code, output = invoke(verb, "r.yaml")
    assert code == 2
    assert output.startswith(f"Unknown command '{verb}'.\n  where: command line\n  do:    did you mean {meant}? ")


@pytest.mark.parametrize(
    ("arguments", "what", "where"),
    [
        (["train"], "Missing argument 'RECIPE'", "trillora train"),
        (["train", "r.yaml", "--otu", "run"], "No such option: --otu", "trillora train"),
        (["eval", "run", "--rows", "many"], "Invalid value for '--rows'", "trillora eval"),
        (["--verison"], "No such option: --verison", "trillora"),
    ],
)
def test_wrong_arguments_are_errors_with_what_where_and_do(arguments: list[str], what: str, where: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="trillora")
    lines = result.output.splitlines()
    assert result.exit_code == 2
    assert len(lines) == 3 and what in lines[0]
    assert lines[1:] == [f"  where: {where}", f"  do:    see `{runnable(where + ' --help')}`"]


@pytest.mark.parametrize(("verb", "option"), [("preflight", "--on kaggle"), ("train", "--out runs/first")])
def test_a_missing_option_comes_with_an_example(verb: str, option: str) -> None:
    code, output = invoke(verb, "r.yaml")
    assert code == 2 and output.startswith(f"Missing option '{option.split()[0]}'")
    assert f"do:    add it, for example {option}; see " in output


def test_without_a_command_the_help_is_printed() -> None:
    code, output = invoke()
    assert code == 2
    verbs = (
        "train",
        "inspect",
        "preflight",
        "eval",
        "generate",
        "chat",
        "merge",
        "report",
        "schema",
        "doctor",
        "quickstart",
    )
    assert all(f"  {verb} " in output for verb in verbs)


@pytest.mark.parametrize("verb", ["train", "merge", "eval", "chat"])
def test_help_shows_arguments_by_their_names(verb: str) -> None:
    code, output = invoke(verb, "--help")
    assert code == 0 and "Arguments:" in output and not re.search(r"<\w|[{}]", output), output


def test_a_slice_without_the_option_on_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: smollm2\ndata: a.jsonl\n")
    code, output = invoke("preflight", str(recipe), "v5e-8", "--on", "v6e-8")
    assert (code, "name a slice with --on v5e-8" in output) == (2, True)


def test_preflight_reads_several_slices_from_one_or_more_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trillora.preflight import verdict

    def check(recipe: object, slices: list[str], **options: object) -> None:
        raise TrilloraError(" ".join(slices), do="nothing")

    monkeypatch.setattr(verdict, "preflight", check)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: smollm2\ndata: a.jsonl\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    code, output = invoke("preflight", str(recipe), "train.steps=3", "--on", "v5e-8, v6e-8", "--on", "kaggle")
    assert (code, output.splitlines()[0]) == (2, "v5e-8 v6e-8 kaggle")


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: smollm2\ndata: a.jsonl\n")
    (tmp_path / "adapter").mkdir()
    code, output = invoke("train", str(recipe), "--out", str(tmp_path))
    assert (code, "already contains a finished run" in output) == (2, True)
    code, output = invoke("train", str(recipe), "--out", str(recipe))
    assert (code, "must be a folder" in output) == (2, True)


def test_version_and_schema_are_printed() -> None:
    assert invoke("--version") == (0, f"trillora {trillora.__version__}\n")
    code, output = invoke("schema")
    assert (code, json.loads(output)) == (0, recipe_schema())


def test_errors_of_any_command_become_text_and_an_exit_code() -> None:
    verbs = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)

    @verbs.command()
    def mistake() -> None:
        raise TrilloraError("what \x1b[31m", where="here", do="this")

    @verbs.command()
    def interrupt() -> None:
        raise KeyboardInterrupt

    @verbs.command()
    def bug() -> None:
        raise ZeroDivisionError

    runner = CliRunner()
    result = runner.invoke(verbs, ["mistake"])
    assert (result.exit_code, result.output) == (2, "what \\x1b[31m\n  where: here\n  do:    this\n")
    assert runner.invoke(verbs, ["interrupt"]).exit_code == 130
    result = runner.invoke(verbs, ["bug"])
    assert (result.exit_code, result.output.splitlines()[0]) == (70, "This is a bug of Trillora: ZeroDivisionError.")


# Events as JSON


def step(loss: float) -> Step:
    return Step(1, 100, "all", loss, 2e-4, 1.0, False, 1234.0, 2.0, 198.0, 0.0)


@pytest.mark.parametrize(
    "event", [Note("a\nb"), Chosen("a.b", 1, "c"), Progress("a", 1, 2, "bytes"), step(2.5), step(math.nan)]
)
def test_every_event_is_one_line_of_json(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    fields = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert fields.pop("event") == type(event).__name__.lower()
    assert list(fields) == list(type(event).__match_args__)
    if isinstance(event, Step) and math.isnan(event.loss):
        assert fields["loss"] == "nan"


# Completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [("trillora tr", "train"), ("trillora train --acc", "--accept-changes"), ("trillora trian --acc", "")],
)
def test_the_shell_completes_commands_and_options_without_anything_large(words: str, expected: str) -> None:
    variables = {"_TRILLORA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = (
        "import contextlib, os, sys\n"
        f"os.environ |= {variables!r}\n"
        "from trillora.cli import main\n"
        "sys.argv = ['trillora']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('loaded:', *{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    completed, _, loaded = output.rpartition("loaded:")
    assert completed.strip() == expected and set(loaded.split()) & HEAVY == set()
