"""`recipe.json` is exact and for programs, `resolved.yaml` is masked and for people; neither can allow code to run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from dose import dose, log_progress
from transformers import AutoTokenizer
from typer.testing import CliRunner

from trillora.cli import app
from trillora.data.stage import read_stage
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate, read_rows, recipe_with_data
from trillora.events import ignore_events
from trillora.generation.generator import Generator
from trillora.model.loading.digest import weights_digest
from trillora.recipe import run_file
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.recipe.schema import Recipe, stages_of
from trillora.report.run.read import read_run
from trillora.report.run.status import run_status
from trillora.secrets import MASK
from trillora.training.run_identity import fixed_options
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

SECRET = "canary-5150-horse"
TEMPLATE = {"prompt": "{{ user }} has password: {{ password }}, it is ", "completion": "{{ strength }}"}
OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def refused(call: Any) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        call()
    return caught.value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose path has the shape of a Hugging Face token, and rows whose template has the name of a secret."""
    folder = tmp_path_factory.mktemp("inputs") / "hf_checkpoints"
    tiny_run.write_both(folder, tiny_run.llama(1, 32))
    rows = [{"user": f"u{i}", "password": f"pw{i * 7}", "strength": ["strong", "weak"][i % 2]} for i in range(60)]
    (folder / "passwords.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(folder: Path, **train_options: Any) -> dict[str, Any]:
    data = {"path": str(folder / "passwords.jsonl"), "template": TEMPLATE, "split": {"validation": 0.1, "test": 0.3}}
    return tiny_run.recipe(folder, data=data, train={"steps": 2, **train_options}, evaluate={"num_samples": 0})


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    train(load_recipe(settings(folder)), folder.parent / "run")
    return folder.parent / "run"


def test_programs_read_what_was_trained_with_and_people_read_it_masked(run: Path, folder: Path) -> None:
    recipe = load_run_recipe(run).recipe
    assert recipe.data is not None and recipe.data.template is not None
    assert recipe.data.template.prompt == TEMPLATE["prompt"]
    assert recipe.model.name == str(folder / "model")
    assert (run / "recipe.json").stat().st_mode & 0o777 == 0o600
    text = (run / "resolved.yaml").read_text("utf-8")
    assert MASK in text and "{{ password }}" not in text
    assert "recipe.json" in text.splitlines()[1]


def test_eval_tests_exactly_the_rows_that_were_held_out(run: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    (stage,) = stages_of(load_recipe(settings(folder)))
    trained = read_stage(stage, tokenizer, ignore_events).dataset
    held_out = trained.documents("test")
    recipe = recipe_with_data(load_run_recipe(run), None, run / "adapter")
    _, documents = read_rows(recipe, tokenizer, True, None, ignore_events)
    assert len(documents) == len(held_out) > 10
    assert all((documents[i].tokens == held_out[i].tokens).all() for i in range(len(held_out)))
    assert evaluate(run, max_tokens=2, with_base=False).num_rows == len(held_out)


def test_a_run_of_a_model_in_a_folder_named_like_a_token_generates(run: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(run), "-p", "hi", "--max-tokens", "2"])
    assert result.exit_code == 0, result.output


def test_a_masked_recipe_is_refused_with_the_options_to_set(run: Path, folder: Path) -> None:
    error = refused(lambda: load_recipe(run / "resolved.yaml"))
    assert "model.name=…" in error.do and "data.template.prompt=…" in error.do
    with pytest.raises(TrilloraError, match=r"data\.template\.prompt contains"):
        load_recipe(run / "resolved.yaml", [f"model.name={folder / 'model'}", f"data.path={folder}/passwords.jsonl"])
    again = load_recipe(
        run / "resolved.yaml",
        {"model.name": str(folder / "model"), "data.path": f"{folder}/passwords.jsonl", "data.template": TEMPLATE},
    )
    assert again == load_recipe(run / "recipe.json")


def test_a_changed_recipe_json_is_noticed(run: Path, tmp_path: Path) -> None:
    data, dice, copy = (run / "recipe.json").read_bytes(), random.Random(4), tmp_path / "recipe.json"
    exact = load_run_recipe(run).recipe
    num_harmless = 0
    for _ in range(total := dose(300, 5_000)):
        bad = bytearray(data)
        match dice.randrange(3):
            case 0:
                bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
            case 1:
                del bad[dice.randrange(len(bad)) :]
            case 2:
                at = dice.randrange(len(bad))
                bad[at : at + dice.randrange(40)] = dice.choice(
                    (b"", b"null", b"[" * 500, b"1e999", b"\xff", b'"x": 1,')
                )
        copy.write_bytes(bad)
        try:
            recipe = load_run_recipe(tmp_path).recipe
        except TrilloraError as error:
            assert error.where and error.do
        else:
            assert recipe == exact, "only spaces may change"
            num_harmless += 1
    assert num_harmless < total / 2
    log_progress(f"recipe.json: {total} damaged, {num_harmless} with the same content")


def test_a_run_folder_with_a_name_that_is_too_long_is_refused(run: Path) -> None:
    name = "r" * 5000
    for arguments in (["train", str(run / "recipe.json"), "--out", name], ["report", name], ["eval", name]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "too long" in result.output, result.output


# Credentials of addresses


def addressed(**changes: Any) -> Recipe:
    data = [f"https://me:{SECRET}@host/a.jsonl", "gs://bucket/part-?.jsonl", f"https://host/b.jsonl?sig={SECRET}"]
    where = f"s3://key:{SECRET}@bucket/run"
    return load_recipe(
        {"model": "m", "data": {"path": data, "split": {}}, "train": {"checkpoint_dir": where}, **changes}
    )


def test_credentials_of_addresses_are_not_saved_and_asked_for_again(tmp_path: Path) -> None:
    recipe = addressed()
    text = run_file.dump(recipe)
    (tmp_path / "recipe.json").write_text(text)
    assert SECRET not in text
    saved = load_run_recipe(tmp_path)
    assert saved.recipe.data is not None and not isinstance(saved.recipe.data.path, str)
    assert [source.path for source in saved.recipe.data.path] == [
        "https://host/a.jsonl",
        "gs://bucket/part-?.jsonl",
        "https://host/b.jsonl",
    ]
    error = refused(lambda: load_recipe(tmp_path / "recipe.json"))
    assert error.do.endswith("data.path.0.path=ADDRESS data.path.2.path=ADDRESS train.checkpoint_dir=ADDRESS")
    error = refused(lambda: recipe_with_data(saved, None, tmp_path / "adapter"))
    assert error.do.endswith("data.path.0.path=ADDRESS data.path.2.path=ADDRESS")
    assert recipe_with_data(saved, "other.jsonl", tmp_path / "adapter").data.path == "other.jsonl"
    given = [
        f"data.path.0.path=https://me:{SECRET}@host/a.jsonl",
        f"data.path.2.path=https://host/b.jsonl?sig={SECRET}",
    ]
    assert recipe_with_data(load_run_recipe(tmp_path, given), None, tmp_path / "adapter").data.path == recipe.data.path
    again = load_recipe(tmp_path / "recipe.json", [*given, f"train.checkpoint_dir=s3://key:{SECRET}@bucket/run"])
    assert again == recipe


def test_the_command_that_resumes_names_the_addresses_to_give(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(run_file.dump(addressed(data=f"https://me:{SECRET}@host/a.jsonl")))
    command = run_status(read_run(tmp_path)).command
    assert command.split()[2:5] == [
        str(tmp_path / "recipe.json"),
        "data.path=ADDRESS",
        "train.checkpoint_dir=ADDRESS",
    ]
    assert SECRET not in command


@pytest.mark.parametrize(
    "address", ["gs://b/x#1.jsonl", "s3://b/a-?.jsonl", "https://h/x.jsonl?download=true", "/a@b/c"]
)
def test_an_address_without_credentials_is_exact(address: str, tmp_path: Path) -> None:
    recipe = load_recipe({"model": "m", "data": address})
    (tmp_path / "recipe.json").write_text(run_file.dump(recipe))
    assert load_recipe(tmp_path / "recipe.json") == recipe


def test_a_changed_secret_in_an_option_is_a_change() -> None:
    """A checkpoint stores options masked; two different secrets must not look the same."""

    def prompts(key: str) -> dict[str, Any]:
        template = {"prompt": f"use hf_{key} ", "completion": "x"}
        return fixed_options(load_recipe({"model": "m", "data": {"path": "a.jsonl", "template": template}}))

    first, second = prompts("abcdefgh1"), prompts("abcdefgh2")
    assert first != second and first == prompts("abcdefgh1")
    assert "hf_abcdefgh" not in json.dumps([first, second])


# Code of a model


@pytest.fixture(scope="module")
def own_code(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that works only with its own code, and the file which that code creates."""
    place = tmp_path_factory.mktemp("own_code")
    shutil.copytree(folder / "model", model := place / "model")
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": auto_map}))
    (model / "mine.py").write_text(OWN_CODE.format(marker=str(place / "code-was-run")))
    return model, place / "code-was-run"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a model's code to this folder and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("file", ["recipe.json", "resolved.yaml"])
def test_a_run_of_a_stranger_runs_no_code(file: str, own_code: tuple[Path, Path], tmp_path: Path) -> None:
    model, marker = own_code
    marker.unlink(missing_ok=True)
    run = tmp_path / "stranger"
    shutil.copytree(model, run / "m")
    (run / "adapter").mkdir()
    (run / "run.json").write_text("{}")
    for trusting in ("true", "false"):
        text = f"model: {{name: ./m, trust_remote_code: {trusting}}}\ndata: {{path: x.jsonl, split: {{test: 0.5}}}}\n"
        (run / "resolved.yaml").write_text(text)
        if file == "recipe.json":
            recipe = load_recipe(run / "resolved.yaml", [f"model.trust_remote_code={trusting}"])
            (run / file).write_text(run_file.dump(recipe).replace(str(run / "m"), "./m"))
            content = json.loads((run / file).read_text())  # a stranger can also write the digest
            content["sha256"] = run_file.json_digest({name: content[name] for name in ("withheld", "recipe")})
            (run / file).write_text(json.dumps(content))
        for arguments in (
            ["generate", str(run), "--base", "-p", "hi"],
            ["chat", str(run), "--base"],
            ["eval", str(run)],
        ):
            result = CliRunner().invoke(app, arguments)
            is_run = file == "recipe.json"
            why = "--trust-remote-code" if is_run else "There is no config.json"
            why = "is not a run" if arguments[0] == "eval" and not is_run else why
            assert result.exit_code == 2 and why in result.output, result.output
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
        data = f"data={tmp_path / 'rows.jsonl'}"
        for arguments in (
            ["train", str(run / file), data, "--out", str(tmp_path / "out")],
            ["inspect", str(run / file), data],
        ):
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 2 and "model.trust_remote_code=true" in result.output, result.output
    assert not marker.exists()


@pytest.mark.usefixtures("modules")
def test_a_run_of_a_model_with_its_own_code_is_used_with_the_flag(own_code: tuple[Path, Path], folder: Path) -> None:
    model, marker = own_code
    marker.unlink(missing_ok=True)
    chosen = {**tiny_run.recipe(folder, train={"steps": 1}), "model": {"name": str(model), "trust_remote_code": True}}
    train(load_recipe(chosen), model.parent / "run")
    assert marker.exists()
    error = refused(lambda: Generator.open(str(model.parent / "run")))
    assert "belongs to a run" in error.what and str(model) in error.do
    arguments = ["generate", str(model.parent / "run"), "-p", "hi", "--max-tokens", "2", "--trust-remote-code"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_the_identity_of_a_run_covers_the_code_of_its_model(own_code: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(own_code[0], model := tmp_path / "model")
    before = weights_digest(model, [])
    (model / "other.py").write_text("x = 1\n")
    assert weights_digest(model, []) != before
    (model / "other.py").unlink()
    assert weights_digest(model, []) == before
    (model / "config.json").write_text((model / "config.json").read_text().replace('"mine"', '"llama"'))
    without = weights_digest(model, [])
    (model / "mine.py").unlink()
    assert weights_digest(model, []) == without, "transformers has this model: its code is not used"


def test_code_of_another_repository_is_refused(own_code: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(own_code[0], model := tmp_path / "model")
    text = (model / "config.json").read_text().replace("mine.Model", "other/repository--mine.Model")
    (model / "config.json").write_text(text)
    error = refused(lambda: Generator.open(str(model), overrides=["model.trust_remote_code=true"]))
    assert "another repository" in error.what
