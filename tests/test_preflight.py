"""Preflight asks about the step that trains, says what the compiler says, and survives it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
import tiny_run
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.events import Event, Note, ignore_events
from trillora.model.loading.source import load_config
from trillora.preflight import client, compiler_process
from trillora.preflight.estimate.estimate import Estimate
from trillora.preflight.hlo.memory import StepShapes, describe, largest, logits_bytes, out_of_memory, read_report
from trillora.preflight.inputs import KNOWN_MODELS, describe_model, fingerprint, read_asked
from trillora.preflight.verdict import changed, ladder, preflight
from trillora.recipe.load import load_recipe
from trillora.step import autotune
from trillora.training import trainer

needs_compiler = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, has wheels for x86-64 Linux only: Colab, Kaggle, WSL, a container",
    ),
]


def with_compiler(test: Any) -> Any:
    for mark in needs_compiler:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_small(tmp_path_factory.mktemp("tiny"))


# ---- the step


def test_the_step_asked_about_is_the_step_that_trains(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are chosen and assembled by the same function; here also compared as programs, to the letter."""
    assert compiler_process.choose is autotune.choose is trainer.choose
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3, "batch_size": 8}, hardware={"devices": 8}))
    trained: list[str] = []

    def remembered(*arguments: Any, **options: Any) -> Any:
        plan = autotune.choose(*arguments, **options)
        trained.append(plan.assembly.lower().as_text())
        return plan

    monkeypatch.setattr(trainer, "choose", remembered)
    trainer.train(recipe, tmp_path / "run")
    asked = read_asked(recipe, ignore_events)
    config = load_config(asked.model)
    (stage,) = asked.stages
    plan = autotune.choose(stage.recipe, config, jax.devices("cpu"), stage.num_steps, ignore_events)
    assert [plan.assembly.lower().as_text()] == trained
    other = changed(stage.recipe, {"engine.remat": "full"})
    another = autotune.choose(other, config, jax.devices("cpu"), stage.num_steps, ignore_events)
    assert another.assembly.lower().as_text() != trained[0], "the comparison can fail"


def test_real_data_decides_steps_and_tokens(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": None, "epochs": 2, "batch_size": 4}))
    (stage,) = read_asked(recipe, ignore_events).stages
    batches = trainer.read_stage(trainer.stages_of(recipe)[0], _tokenizer(recipe), ignore_events).batches
    assert stage.num_steps == 2 * batches.steps_per_epoch
    assert stage.num_tokens == 2 * batches.summary()["tokens"]
    assert sum(stage.steps_by_length.values()) == stage.num_steps
    assert stage.full_steps == stage.num_steps  # one length


def _tokenizer(recipe: Any) -> Any:
    from trillora.model.loading.source import load_tokenizer

    return load_tokenizer(describe_model(recipe)[0])


# ---- the compiler


@with_compiler
def test_go_with_the_compilers_memory_and_at_once_from_the_cache(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 20}))
    events: list[Event] = []
    (answer,) = preflight(recipe, ["colab"], listener=events.append)
    assert answer["verdict"] == "GO" and answer["method"] == "compiler" and not answer["from_cache"]
    assert 0 < answer["hbm_peak_gib"] < 1 < answer["hbm_limit_gib"] == 15.75
    assert answer["memory"]["base"] + answer["memory"]["adapter"] <= answer["hbm_peak_gib"]
    assert answer["step_seconds"] > 0 and answer["tokens_per_second"] > 0 and 0 < answer["fraction_of_peak"] < 1
    assert answer["num_steps"] == 20 and answer["sessions"] == 1 and answer["session_hours"] == 12
    assert answer["settings"]["attention"] == "splash"
    assert any(isinstance(event, Note) and "Compiling" in event.text for event in events)
    (again,) = preflight(recipe, ["colab"], listener=lambda event: pytest.fail("nothing is asked twice"))
    assert again == answer | {"from_cache": True}
    assert json.dumps(answer, allow_nan=False)


@with_compiler
def test_what_does_not_fit_is_changed_and_the_change_compiled(tmp_path: Path, folder: Path) -> None:
    """Qwen3-0.6B with 24 rows of 1,024 tokens at once is half as much again as a v5e chip has. Fewer rows at once are
    GO, if the machine may choose."""
    settings = tiny_run.recipe(
        folder,
        model={"name": "Qwen/Qwen3-0.6B"},
        train={"steps": 5, "batch_size": 24, "micro_batch_size": 24, "sequence_length": 1024},
        engine={"remat": "linear"},
    )
    (answer,) = preflight(load_recipe(settings), ["v5e-1"])
    assert answer["verdict"] == "GO WITH CHANGES" and answer["fits"]
    assert [change["option"] for change in answer["changes"]] == ["train.micro_batch_size"]
    assert answer["changes"][0]["from"] == 24 and answer["changes"][0]["to"] == 12
    assert answer["tried"][0]["fits"] is False and answer["tried"][0]["peak_gib"] > 15.75
    assert answer["tried"][-1]["fits"] is True and answer["hbm_peak_gib"] <= 15.75
    assert any("shapes" in note for note in answer["notes"]) and any("tokenizer" in note for note in answer["notes"])


@with_compiler
def test_a_killed_compiler_is_reported_and_survived(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3}))

    def kill_when_it_works() -> None:
        for _ in range(600):
            time.sleep(0.1)
            for process in psutil.Process().children(recursive=True):
                if "trillora.preflight.compiler_process" in process.cmdline():
                    process.kill()
                    return

    killer = threading.Thread(target=kill_when_it_works)
    killer.start()
    with pytest.raises(client.CompilerCrashed, match=r"without an answer for v5e-1.*SIGKILL"):
        preflight(recipe, ["v5e-1"])
    killer.join()


def test_the_compiler_is_mended_and_not_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "has_compiler_builds", lambda: True)
    found = {"jax": "0.10.2", "libtpu": None}
    monkeypatch.setattr(client, "installed_version", found.get)
    monkeypatch.setattr(client, "pinned_version", lambda owner, package: "==0.0.42.*")
    with pytest.raises(TrilloraError, match="not installed") as missing:
        client.choose_method(False)
    assert 'pip install "jax[tpu]==0.10.2"' in missing.value.do
    assert client.choose_method(True) == "estimate"
    found["libtpu"] = "0.0.40"
    with pytest.raises(TrilloraError, match=r"0\.0\.40 is not the pair of jax 0\.10\.2"):
        client.choose_method(False)
    found["libtpu"] = "0.0.42.1"
    assert client.choose_method(False) == "compiler"
    monkeypatch.setattr(client, "has_compiler_builds", lambda: False)
    found["libtpu"] = None
    assert client.choose_method(False) == "estimate"


# ---- by estimate


def test_the_estimate_answers_anywhere_and_says_what_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(client.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    settings = tiny_run.recipe(folder, train={"steps": 20, "batch_size": 16}, hardware={"devices": "auto"})
    recipe = load_recipe(settings)
    one, eight, four, again = preflight(recipe, ["v5e-1", "kaggle", "v5e-4", "kaggle"], estimate=True)
    for answer in (one, eight, four):
        assert answer["method"] == "estimate" and answer["verdict"] == "GO"
        assert any("x86-64" in note for note in answer["notes"])
    assert (one["num_devices"], eight["num_devices"], four["num_devices"]) == (1, 8, 4)
    assert again == eight and eight["weekly_hours"] == 20
    assert one["settings"]["attention"] == "splash", "chosen for the chip, not for this machine"
    children = [process for process in started if "trillora.preflight.compiler_process" in process.args]
    assert len(children) == 1 and children[0].returncode is not None, "one process for all, and it has ended"
    capsys.readouterr()
    assert trillora.ask_compiler(settings, on=["v5e-1"], estimate=True) == [one | {"from_cache": True}]
    assert "ESTIMATE" in capsys.readouterr().out


def test_what_is_hopeless_by_the_guess_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is faster than a hopeless way needs still more: it is not even looked at."""
    asked = read_asked(load_recipe(tiny_run.recipe(folder, train={"steps": 2, "batch_size": 8})), ignore_events)
    config, (stage,) = load_config(asked.model), asked.stages
    assemble = autotune.assemble
    remats: dict[int, str] = {}

    def remembered(recipe: Any, settings: Any, *rest: Any) -> Any:
        assembly = dataclasses.replace(assemble(recipe, settings, *rest), state_shapes={})  # count only the step
        remats[id(assembly)] = settings.remat
        kept.append(assembly)
        return assembly

    kept: list[Any] = []
    monkeypatch.setattr(autotune, "assemble", remembered)
    monkeypatch.setattr(autotune, "memory_limit", lambda devices: 100.0)

    def ask(needs: dict[str, float]) -> tuple[Any, list[str], list[str]]:
        guessed: list[str] = []
        compiled: list[str] = []

        def guess(assembly: Any) -> float:
            guessed.append(remats[id(assembly)])
            return needs[guessed[-1]]

        def compile_one(assembly: Any) -> tuple[str, float]:
            compiled.append(remats[id(assembly)])
            return "a program", needs[compiled[-1]]

        devices = jax.devices("cpu")[:1]
        plan = autotune.choose(
            stage.recipe, config, devices, stage.num_steps, ignore_events, compiler=compile_one, guess=guess
        )
        return plan, guessed, compiled

    plan, guessed, compiled = ask({"none": 500.0, "linear": 141.0, "full": 20.0})
    assert (guessed, compiled) == (["full", "linear"], ["full"])
    assert [attempt.needed for attempt in plan.tried] == [141.0, 20.0] and plan.settings.remat == "full"
    plan, guessed, compiled = ask({"none": 500.0, "linear": 139.0, "full": 20.0})  # may be a bad guess: it is compiled
    assert (guessed, compiled) == (["full", "linear", "none"], ["linear", "full"])
    plan, guessed, compiled = ask({"none": 90.0, "linear": 50.0, "full": 20.0})
    assert compiled == ["none"] and plan.recipe.engine.remat == "none"


def test_a_program_that_cannot_be_read_gets_the_estimates_times() -> None:
    guessed = Estimate(1.0, {}, 0.0, 0.0, 0.0, step_seconds=2.0, roofline_seconds=1.0, flops=100.0, tokens=1.0)
    assert compiler_process._if_unread(85.0, guessed, 8) == compiler_process._if_unread(115.0, guessed, 8) == {}
    told = compiler_process._if_unread(5.0, guessed, 8)
    assert (told["step_seconds"], told["flops_per_step"], told["times_by"]) == (2.0, 800.0, "estimate")
    assert "5% of its arithmetic" in told["notes"][0]


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "v5e-3"], ["No slice is called v5e-3", "did you mean v5e-", "kaggle"]),
        (["--on", "v5e-8", "--estimate", "train.batch_size=12"], ["12 rows cannot be spread evenly over 8 devices"]),
        (["--on", "v5e-1", "model.name=nobody/nothing"], ["cannot be reached", "nobody/nothing"]),
        (["--on", "v5e-1", "train.batchsize=3"], ["train.batch_size"]),
    ],
)
def test_mistakes_are_told_in_words(folder: Path, tmp_path: Path, arguments: list[str], says: list[str]) -> None:
    settings = tiny_run.recipe(
        folder, train={"steps": 3}, hardware={"mesh": {"data": 8}, "devices": 8} if "v5e-8" in arguments else {}
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(settings))
    result = CliRunner(env={"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}).invoke(
        app, ["preflight", str(recipe), *arguments]
    )
    assert result.exit_code == 2
    assert all(text in result.output for text in says), result.output
    assert "Traceback" not in result.output


def test_an_answer_is_for_one_question(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3}))
    same = fingerprint(recipe, slice="v5e-8")
    assert fingerprint(recipe, slice="v5e-8") == same
    assert fingerprint(recipe, slice="v5e-1") != same
    assert fingerprint(load_recipe(tiny_run.recipe(folder, train={"steps": 4})), slice="v5e-8") != same
    data = folder / "chats.jsonl"
    before = data.stat()
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert fingerprint(recipe, slice="v5e-8") != same


def test_the_ladder_opens_what_the_user_fixed_one_by_one(folder: Path) -> None:
    def steps(**sections: Any) -> list[dict[str, Any]]:
        recipe = load_recipe(tiny_run.recipe(folder, **sections))
        return list(ladder(read_asked(recipe, ignore_events).stages))

    fixed = steps(
        train={"steps": 2, "batch_size": 8, "micro_batch_size": 8}, engine={"remat": "none", "loss_chunk": 4096}
    )
    assert fixed == [
        {},
        {"train.micro_batch_size": "auto"},
        {"train.micro_batch_size": "auto", "engine.remat": "auto"},
        {"train.micro_batch_size": "auto", "engine.remat": "auto", "engine.loss_chunk": 256},
    ]
    free = steps(train={"steps": 2, "batch_size": 8})
    assert free == [{}, {"engine.loss_chunk": 256}]


def test_every_known_model_is_one_transformers_can_build(tmp_path: Path) -> None:
    known = json.loads(KNOWN_MODELS.read_text())
    assert len(known) >= 5
    for name, described in known.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(described))
        text = load_config(folder).get_text_config()
        assert (text.hidden_size, text.vocab_size) == (described["hidden_size"], described["vocab_size"])


# ---- the memory report

REPORT = """\
Memory Space: default (color=0)
Total bytes: 3811809280 (3.55GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
  512.00MiB( 20%);  512.00MiB;      8830976;                5; 5\u00d7bf16[32,1,2048,4096]
  762.00MiB( 29%);  250.00MiB;    663158784;                1; bf16[32000,4096]
  890.00MiB( 34%);  128.00MiB;    646447104;                2; bf16[512,32000], bf16[2048,4096]
    1.10GiB( 43%);  112.00MiB;    942096384;                4; 4\u00d7bf16[1,14336,4096]
    1.65GiB( 65%);   56.00MiB;    883376128;                1; bf16[2048,14336]
    2.10GiB( 82%);   28.00MiB;    675741696;                6; f32[], 5\u00d7f32[32,14336,16]
  The rest 588 values are less than 5% of the total size and not shown.

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
  448.00MiB(100%);  448.00MiB;            0;                1; bf16[32,1792,4096]
"""
MISTRAL = StepShapes(
    num_layers=32,
    num_rows=1,
    num_tokens=2048,
    width=4096,
    vocabulary=32000,
    weights={(14336, 4096): "weight mlp.up_proj", (32000, 4096): "weight lm_head"},
)


def test_buffers_are_told_in_words_of_the_model() -> None:
    report = read_report(REPORT)
    assert report is not None and report.total_bytes == 3811809280
    assert [round(buffer.num_bytes / 2**20) for buffer in report.temporaries] == [512, 250, 128, 112, 56, 28]
    assert [describe(buffer, MISTRAL) for buffer in report.temporaries] == [
        "kept from all 32 layers for the backward pass",
        "weight lm_head, gathered whole to be used",
        "logits of a piece of the loss",
        "weight mlp.up_proj, gathered whole to be used",
        "one layer at work (width 14,336)",
        "adapter and its gradient, all 32 layers",
    ]
    assert logits_bytes(report, MISTRAL) == 128 * 2**20
    assert largest(report, MISTRAL)[0] == {"what": "kept from all 32 layers for the backward pass", "gib": 0.5}
    told = out_of_memory(report, MISTRAL, 2.0, "8 rows at once")
    assert "3.55 GiB of 2.00 GiB" in told and "kept from all 32 layers" in told
    assert read_report("another format") is None
    assert "2.00 GiB" in out_of_memory(None, MISTRAL, 2.0, "8 rows at once")
