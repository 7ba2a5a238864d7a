"""The working folder decides nothing: a `json.py` that comes with a data set is never run, in no process of ours."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dose import full_dose_only, slow_case
from run_process import WAIT

import trillora
from trillora.child_process import bare_environment, isolated_python

SOURCE = Path(trillora.__file__).parent
# Modules of the standard library and of ours that every process imports early.
CANARIES = ("json", "jax", "jinja2", "types", "numpy", "typing", "trillora")
OTHER_PROGRAMS = ("launch/gcloud.py", "launch/notebooks/program.py", "launch/origin.py")  # gcloud, colab, kaggle; git
# Start Python before our packages are there -> how often.
BEFORE_INSTALLING = {"launch/notebooks/session.py": 4, "launch/install.py": 2}
PRINTED = ("own_command.py", "launch/notebooks/document.py")  # text for users and notebooks; nothing is started
CLIENT = "launch/notebooks/kaggle_client.py"
# Starts the command that it is given, by the doctor and by a notebook.
GIVEN, ASKS = "devices/listed.py", "listed.found_by(child.command, child.environment, "
STARTS_PROCESSES = re.compile(
    r"sys\.executable|\bmultiprocessing\b|ProcessPoolExecutor|os\.(system|popen|exec|spawn|posix_spawn|fork)|\bpty\b"
)


def write_canaries(folder: Path, names: tuple[str, ...] = CANARIES) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(f"open('OWNED-{name}', 'w').close()\n")
    return folder


def run_there(
    folder: Path, *command: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in the folder. Fails if a canary was imported."""
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT
    )
    assert sorted(folder.glob("**/OWNED-*")) == [], (command, done.stderr)
    assert "Traceback" not in done.stderr, (command, done.stderr)
    return done


def test_a_child_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    folder = write_canaries(tmp_path)
    program = (
        f"import {', '.join(set(CANARIES) - {'jax'})}\nprint(trillora.__file__, *sys.argv[1:], *sys.path, sep='\\n')"
    )
    child = isolated_python(program, "a b", environment=os.environ)
    file, argument, *path = run_there(folder, *child.command, environment=child.environment).stdout.splitlines()
    assert (file, argument) == (trillora.__file__, "a b")
    assert "" not in path and str(folder) not in path
    assert child.environment["PYTHONSAFEPATH"] == "1"


def test_relative_entries_of_our_own_path_do_not_reach_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_canaries(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *(entry for entry in sys.path if entry != str(SOURCE.parent))])
    child = isolated_python("import json, trillora; print(trillora.__file__)", environment=bare_environment())
    done = run_there(folder, *child.command, environment=child.environment)
    assert done.stdout.strip() == trillora.__file__, "this very package, although no other entry contains it"


def test_only_one_module_starts_python() -> None:
    found: set[str] = set()
    starters: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        name, text = file.relative_to(SOURCE).as_posix(), file.read_text("utf-8")
        if any(STARTS_PROCESSES.search(line.partition("#")[0]) for line in text.splitlines()):
            found.add(name)
        for call in process_starts(ast.parse(text)):
            starters.add(name)
            if name == GIVEN:
                continue
            if name in OTHER_PROGRAMS or name in BEFORE_INSTALLING:
                continue
            assert ast.unparse(call.args[0]) == "child.command", f"{name}:{call.lineno}"
            assert "child.environment" in [ast.unparse(k.value) for k in call.keywords if k.arg == "env"], name
    assert found == {"child_process.py", *BEFORE_INSTALLING, CLIENT, *PRINTED}
    for name, starts in BEFORE_INSTALLING.items():
        own = (SOURCE / name).read_text("utf-8")
        assert re.findall(r'\[(?:self\._python|sys\.executable), "(.*?)"', own) == ["-P"] * starts, (
            "nothing from the notebook's folder"
        )
    assert (SOURCE / CLIENT).read_text("utf-8").count("sys.executable") == 1, "only to find the program next to it"
    assert not {*PRINTED} & starters
    assert ASKS in (SOURCE / "doctor.py").read_text("utf-8")
    assert {GIVEN, "preflight/client.py", "data/rendering/pool.py"} <= starters


def process_starts(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"))):
                yield node
            case ast.ImportFrom(module="subprocess"):
                raise AssertionError("write `import subprocess`, so that this test sees what is started")


# ---- every verb, as a real process

COMMAND = str(Path(sys.executable).parent / "trillora")
# `inspect` and `doctor` start their processes for real. Others end at a missing file; the slow ones are in REAL_VERBS.
VERBS = [
    ("train", "missing.yaml", "--out", "run"),
    ("inspect", "missing.yaml"),
    ("inspect", "recipe.yaml"),
    ("preflight", "missing.yaml", "--on", "v5e-1"),
    ("preflight", "missing.yaml", "--on", "v5e-1", "--estimate"),
    ("eval", "--help"),
    ("report", "missing"),
    ("schema",),
    ("recipes", "copy", "tutorial"),
    ("doctor",),
    ("launch", "colab", "missing.yaml"),
    *map(slow_case, (("quickstart", "--help"), ("generate", "--help"), ("chat", "--help"))),
    *map(slow_case, (("serve", "missing"), ("merge", "missing", "missing-2", "--out", "new"))),
]
REAL_VERBS = [
    ("preflight", "recipe.yaml", "--on", "v5e-1", "--estimate"),
    ("preflight", "recipe.yaml", "--on", "v5e-1"),
    ("train", "recipe.yaml", "--out", "run"),
    ("eval", "run", "--max-tokens", "2", "--data", "chats.jsonl", "--rows", "2"),
    ("generate", "run", "--prompt", "hi", "--max-tokens", "2"),
    ("chat", "run"),
    ("report", "run"),
    ("certify", "run"),
    ("verify", "run"),
    ("export", "run", "--to", "merged", "--out", "merged"),
    ("verify", "merged"),
    ("export", "run", "--to", "ollama", "--type", "q8_0", "--out", "ollama"),
    ("certify", "ollama", "--run", "run"),
    ("launch", "tpu-vm", "recipe.yaml", "--on", "v5e-8", "--step", "copy", "--project", "project-1"),
    ("launch", "kaggle", "recipe.yaml", "--owner", "me", "--out", "kaggle"),
    ("quickstart", "--out", "chats.jsonl/below-a-file"),
]


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as someone may download it: data, a recipe, and Python files with the names of libraries."""
    import tiny_run

    folder = write_canaries(tmp_path_factory.mktemp("data_set"))
    tiny_run.write_both(folder, tiny_run.llama(1, 32), num_rows=8)
    (folder / "recipe.yaml").write_text(
        "model: ./model\ndata: chats.jsonl\nlora: {rank: 2, alpha: 4}\n"
        "train: {sequence_length: 64, batch_size: 4, steps: 2, learning_rate: 0.01}\n"
    )
    return folder


def environment_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "TRILLORA_CACHE": str(folder / "cache")}


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_no_verb_runs_code_of_the_working_folder(data_set: Path, words: tuple[str, ...]) -> None:
    done = run_there(data_set, COMMAND, *words, environment=environment_of(data_set))
    assert done.returncode == (2 if "missing" in " ".join(words) else 0), done.stderr


@full_dose_only
def test_no_whole_run_runs_code_of_the_working_folder(data_set: Path) -> None:
    for name in ("run", "merged", "ollama", "kaggle"):
        shutil.rmtree(data_set / name, ignore_errors=True)
    for words in REAL_VERBS:
        done = run_there(data_set, COMMAND, *words, environment=environment_of(data_set))
        assert done.returncode == (2 if words[0] == "quickstart" else 0), (words, done.stderr)


def test_python_m_drops_the_working_folder_before_our_imports(tmp_path: Path) -> None:
    """Python itself imports `types` and others before our first line. From those, only `python -P -m` is safe."""
    folder = write_canaries(tmp_path, ("json", "jax", "jinja2", "numpy", "typer", "yaml", "pydantic"))
    assert run_there(folder, sys.executable, "-m", "trillora", "schema").returncode == 0
    write_canaries(tmp_path, ("types", "typing"))
    assert run_there(folder, sys.executable, "-P", "-m", "trillora", "schema").returncode == 0
