"""Preflight compiles the step that trains, reports what the compiler says, and survives a compiler crash."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
import tiny_run
from dose import FULL, full_dose_only
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.data.stage import read_stage
from trillora.errors import TrilloraError
from trillora.events import Chosen, Event, Note, ignore_events
from trillora.model.loading.source import load_config
from trillora.preflight import client, compiler_process
from trillora.preflight.early_exit import CompileResult
from trillora.preflight.estimate.estimate import Estimate
from trillora.preflight.hlo.memory import StepShapes, describe, largest, logits_bytes, out_of_memory, read_report
from trillora.preflight.hlo.simulate import SimulatedStep
from trillora.preflight.inputs import KNOWN_MODELS, describe_model, fingerprint, read_inputs
from trillora.preflight.question import StepQuestion
from trillora.preflight.result import LargeBuffer, StageResult, Trial
from trillora.preflight.verdict import ladder, preflight, relax
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings, given_settings
from trillora.recipe.schema import MeshSection, Stage, StageRecipe, stages_of
from trillora.step import autotune
from trillora.training import trainer
from trillora.training.entries import plan as training_plan

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
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=2 if FULL else 1))


# ---- the step


def test_preflight_builds_the_step_that_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the same function. Their programs are compared as text, too."""
    assert compiler_process.choose is autotune.choose is training_plan.choose
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3, "batch_size": 8}, hardware={"devices": 2}))
    trained: list[str] = []

    def remembered(*arguments: Any, **options: Any) -> Any:
        plan = autotune.choose(*arguments, **options)
        trained.append(plan.assembly.lower().as_text())
        return plan

    monkeypatch.setattr(training_plan, "choose", remembered)
    trainer.train(recipe, tmp_path / "run")
    inputs = read_inputs(recipe, ignore_events)
    config = load_config(inputs.model)
    (stage,) = inputs.stages
    plan = autotune.choose(stage.recipe, config, jax.devices("cpu")[:2], stage.num_steps, ignore_events)
    assert [plan.assembly.lower().as_text()] == trained
    engine = stage.recipe.engine.model_copy(update={"remat": "full"})
    other = stage.recipe.model_copy(update={"engine": engine})
    another = autotune.choose(other, config, jax.devices("cpu")[:2], stage.num_steps, ignore_events)
    assert another.assembly.lower().as_text() != trained[0], "the comparison can fail"


def test_steps_and_tokens_are_counted_from_the_real_data(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": None, "epochs": 2, "batch_size": 4}))
    (stage,) = read_inputs(recipe, ignore_events).stages
    batches = read_stage(stages_of(recipe)[0], _tokenizer(recipe), ignore_events).batches
    assert stage.num_steps == 2 * batches.steps_per_epoch
    assert stage.num_tokens == 2 * batches.summary()["tokens"]
    assert sum(stage.steps_by_length.values()) == stage.num_steps
    assert stage.full_steps == stage.num_steps  # one length


def test_mostly_padding_is_a_note(folder: Path) -> None:
    def notes(batch_size: int) -> str:
        train = {"steps": 2, "batch_size": batch_size, "sequence_length": 256}
        recipe = load_recipe(tiny_run.recipe(folder, data={"pack": True}, train=train))
        return " ".join(read_inputs(recipe, ignore_events).notes)

    assert "Warning: " in notes(64) and "of the computed tokens are padding" in notes(64)
    assert "padding" not in notes(1)


def _tokenizer(recipe: Any) -> Any:
    from trillora.model.loading.source import load_tokenizer

    return load_tokenizer(describe_model(recipe)[0])


# ---- the compiler


@with_compiler
def test_go_with_the_compilers_memory_then_from_the_cache(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 20}))
    events: list[Event] = []
    (result,) = preflight(recipe, ["colab"], listener=events.append)
    assert result.verdict == "GO" and result.method == "compiler" and not result.from_cache
    assert result.hbm_peak_gib is not None
    assert 0 < result.hbm_peak_gib < 1 < result.hbm_limit_gib == 15.75
    assert result.memory["base"] + result.memory["adapter"] <= result.hbm_peak_gib
    assert result.step is not None and result.run is not None and result.settings is not None
    assert result.step.seconds > 0 and result.step.tokens_per_second > 0 and 0 < result.step.fraction_of_peak < 1
    assert result.run.num_steps == 20 and result.run.sessions == 1 and result.run.session_hours == 12
    assert result.settings.attention == "splash"
    assert any(isinstance(event, Note) and "Compiling" in event.text for event in events)
    (again,) = preflight(recipe, ["colab"], listener=lambda event: pytest.fail("the result was not cached"))
    assert again == dataclasses.replace(result, from_cache=True)


@full_dose_only
@with_compiler
def test_a_step_that_does_not_fit_is_changed_and_the_change_compiled(tmp_path: Path, folder: Path) -> None:
    """Qwen3-0.6B with a micro-batch of 24 sequences of 1,024 tokens needs half as much again as a v5e chip has. A
    smaller micro-batch fits."""
    settings = tiny_run.recipe(
        folder,
        model={"name": "Qwen/Qwen3-0.6B"},
        train={"steps": 5, "batch_size": 24, "micro_batch_size": 24, "sequence_length": 1024},
        engine={"remat": "linear"},
    )
    (result,) = preflight(load_recipe(settings), ["v5e-1"])
    assert result.verdict == "GO WITH CHANGES" and result.fits
    assert [change.option for change in result.changes] == ["train.micro_batch_size"]
    assert result.changes[0].before == 24 and result.changes[0].after == 12
    first, last = result.tried[0], result.tried[-1]
    assert not first.fits and first.peak_gib is not None and first.peak_gib > 15.75
    assert last.fits and result.hbm_peak_gib is not None and result.hbm_peak_gib <= 15.75
    assert any("configuration that comes with" in note for note in result.notes)
    assert any("tokenizer" in note for note in result.notes)


@with_compiler
def test_a_killed_compiler_is_reported_and_survived(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3}))

    def kill_when_it_works() -> None:
        for _ in range(600):
            time.sleep(0.1)
            for process in psutil.Process().children(recursive=True):
                if "trillora.preflight.compiler_process" in " ".join(process.cmdline()):
                    process.kill()
                    return

    killer = threading.Thread(target=kill_when_it_works)
    killer.start()
    with pytest.raises(client.CompilerCrashed, match=r"without an answer for v5e-1.*SIGKILL"):
        preflight(recipe, ["v5e-1"])
    killer.join()


def test_a_missing_or_mismatched_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "has_compiler_builds", lambda: True)
    found = {"jax": "0.10.2", "libtpu": None}
    monkeypatch.setattr(client, "installed_version", found.get)
    monkeypatch.setattr(client, "pinned_version", lambda owner, package: "==0.0.42.*")
    with pytest.raises(TrilloraError, match="not installed") as missing:
        client.choose_method(False)
    assert 'pip install "jax[tpu]==0.10.2"' in missing.value.do
    assert client.choose_method(True) == "estimate"
    found["libtpu"] = "0.0.40"
    with pytest.raises(TrilloraError, match=r"0\.0\.40 does not match jax 0\.10\.2"):
        client.choose_method(False)
    found["libtpu"] = "0.0.42.1"
    assert client.choose_method(False) == "compiler"
    monkeypatch.setattr(client, "has_compiler_builds", lambda: False)
    found["libtpu"] = None
    assert client.choose_method(False) == "estimate"


# ---- by estimate


def test_the_estimate_runs_anywhere_and_is_labelled(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(client.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    settings = tiny_run.recipe(
        folder,
        train={"steps": 20, "batch_size": 16},
        hardware={"devices": "auto"},
        engine={"remat": "none"},  # one candidate for each slice
    )
    recipe = load_recipe(settings)
    one, eight, again = preflight(recipe, ["v5e-1", "kaggle", "kaggle"], estimate=True)
    for result in (one, eight):
        assert result.method == "estimate" and result.verdict == "GO"
        assert any("x86-64" in note for note in result.notes)
    assert (one.num_devices, eight.num_devices) == (1, 8)
    assert again == eight and eight.run is not None and eight.run.weekly_hours == 20
    assert one.settings is not None
    assert one.settings.attention == "splash", "chosen for the chip, not for this machine"
    children = [process for process in started if "trillora.preflight.compiler_process" in " ".join(process.args)]
    assert len(children) == 1 and children[0].returncode is not None, "one process for all, and it has ended"
    capsys.readouterr()
    assert trillora.run_preflight(settings, on="v5e-1", estimate=True) == [dataclasses.replace(one, from_cache=True)]
    assert "ESTIMATE" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler_here")
def test_an_estimate_that_does_not_fit_names_the_smallest_slice_that_fits(folder: Path, tmp_path: Path) -> None:
    """23 GiB of weights: one v5e chip, with 15.75 GiB, is too small; four are enough."""
    shutil.copytree(folder / "model", tmp_path / "large", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    large = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 52, "head_dim": 128}
    config |= large | {"num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "large" / "config.json").write_text(json.dumps(config))
    settings = tiny_run.recipe(
        folder,
        model={"name": str(tmp_path / "large")},
        train={"steps": 5, "batch_size": 1},  # one micro-batch size to try
        engine={"loss_chunk": 256, "remat": "full"},
        hardware={"devices": "auto"},
    )
    (result,) = preflight(load_recipe(settings), ["v5e-1"], estimate=True)
    assert result.verdict == "NO-GO" and result.step is None and result.run is None and result.settings is None
    assert result.hbm_peak_gib is not None and result.hbm_peak_gib > result.hbm_limit_gib
    assert result.smallest_go == "v5e-4"
    assert result.tried and not any(trial.fits for trial in result.tried)
    assert result.problem is not None and "does not fit" in result.problem
    fixed = {**settings, "hardware": {"devices": "auto", "mesh": {"data": 1}}}  # a mesh is for one number of devices
    (result,) = preflight(load_recipe(fixed), ["v5e-1"], estimate=True)
    assert result.verdict == "NO-GO" and result.smallest_go is None


def test_a_program_that_cannot_be_read_gets_estimated_times() -> None:
    guessed = Estimate(1.0, {}, 0.0, 0.0, 0.0, step_seconds=2.0, roofline_seconds=1.0, flops=100.0, tokens=1.0)
    compiled = CompileResult(None, "%f = bf16[] fusion(%x)\n%k = bf16[] custom-call(%f)", 0.0, 3.0, is_whole=False)

    def times(flops: float) -> Any:
        simulated = SimulatedStep(7.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, flops, 0.0, 0.0, ("a warning",))
        return compiler_process._step_times(simulated, guessed, 8, compiled)

    for flops in (85.0, 115.0):
        step, notes = times(flops)
        assert (step.seconds, step.flops, step.timed_by, notes) == (7.0, 8 * flops, "compiler", ("a warning",))
        assert step.compile_seconds == pytest.approx(5.0 + 2 * 0.026)  # two instructions
    step, (note,) = times(5.0)
    assert (step.seconds, step.flops, step.timed_by, step.unit_seconds) == (2.0, 800.0, "estimate", None)
    assert "Only 5% of the step's flops" in note


# ---- the terminal stays clean

RESULT = StageResult(19.2, 15.75, (Trial("8 sequences at once, remat full", 19.2, False),), 100, 10)
# Takes the place of the compiler process. Prints as libtpu does, to both file descriptors, also from a grandchild.
NOISY_CHILD = """
import json, os, subprocess, sys
os.write(1, b"I0000 tpu_platform: INVALID_ARGUMENT: no TPU platform\\n")
os.write(2, b"W0000 libtpu: could not read metadata \\xff\\n")
subprocess.run(["sh", "-c", "echo noise of a grandchild; echo more noise >&2"])
answers = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
for line in sys.stdin:
    print("INVALID_ARGUMENT: a trace", flush=True)
    print(json.dumps({"event": "note", "text": "Compiling"}), file=answers)
    if then == "raise":
        raise RuntimeError("INVALID_ARGUMENT: Mosaic failed\\n  at kernel.cc:12")
    if then == "abort":
        os.abort()
    print(json.dumps({"result": then}), file=answers)
"""


@pytest.fixture
def question() -> StepQuestion:
    recipe = load_recipe({"model": "llama", "data": "chats.jsonl", "train": {"steps": 10}})
    return StepQuestion("v5e-1", "estimate", "llama", stages_of(recipe)[0].recipe, num_steps=10)


def test_a_question_survives_being_sent(question: StepQuestion) -> None:
    settings = StepSettings("tpu", 1, MeshSection(), "bfloat16", "scan", "splash", 4096, "full", 8)
    member = Stage("first", question.stage)
    for sent in (question, dataclasses.replace(question, kept=settings, members=(member, member), width=2)):
        assert StepQuestion.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


def test_nothing_the_compiler_process_prints_reaches_the_terminal(
    question: StepQuestion, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "PROGRAM", f"then = {json.loads(json.dumps(RESULT.to_dict()))!r}\n{NOISY_CHILD}")
    events: list[Event] = []
    assert client.ask(question, events.append) == RESULT
    assert events == [Note("Compiling")]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("then", "how"),
    [("raise", "(exit code 1): RuntimeError: INVALID_ARGUMENT: Mosaic failed"), ("abort", "(killed by SIGABRT).")],
)
def test_a_crash_is_one_line_and_keeps_the_output_in_a_file(
    question: StepQuestion,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    capfd: pytest.CaptureFixture[str],
    then: str,
    how: str,
) -> None:
    monkeypatch.setattr(client, "PROGRAM", f"then = {then!r}\n{NOISY_CHILD}")
    with pytest.raises(client.CompilerCrashed) as crash:
        client.ask(question, ignore_events)
    assert crash.value.what == f"The compiler process ended without an answer for v5e-1 {how}"
    file = cache / "preflight" / "compiler-output.txt"
    assert crash.value.where is not None and str(file) in crash.value.where
    output = file.read_text()
    for noise in ("no TPU platform", "could not read metadata", "noise of a grandchild", "more noise", "a trace"):
        assert noise in output
        assert noise not in str(crash.value)
    assert capfd.readouterr() == ("", "")


def test_a_process_that_cannot_start_is_reported(question: StepQuestion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROGRAM", "raise SystemExit(3)")
    with pytest.raises(client.CompilerCrashed, match=r"v5e-1 \(exit code 3\)\."):
        client.ask(question, ignore_events)


def test_devices_of_the_slice_are_not_reported_as_found_here() -> None:
    """The user has named the slice; "jax found TPU v5 lite" would be about a machine without one."""
    heard: list[Event] = []
    listen = compiler_process._without_devices(heard.append)
    kept = [Chosen("engine.attention", "splash", "the kernel for bfloat16 on tpu"), Note("Checking v5e-8")]
    for event in (
        Chosen("hardware.backend", "tpu", "jax found TPU v5 lite"),
        Chosen("hardware.devices", 8, "all devices"),
    ):
        listen(event)
    for event in kept:
        listen(event)
    assert heard == kept


# ---- mistakes


@pytest.mark.usefixtures("compiler_here")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "v5e-3"], ["Unknown slice 'v5e-3'", "did you mean v5e-", "kaggle"]),
        (
            ["--on", "v5e-8", "--estimate", "train.batch_size=12"],
            ["12 sequences cannot be spread evenly over 8 devices"],
        ),
        (
            ["--on", "v5e-1", "--estimate", "model.name=no-such-owner/no-such-model"],
            ["cannot be reached", "no-such-owner/no-such-model"],
        ),
        (["--on", "v5e-1", "train.batchsize=3"], ["train.batch_size"]),
    ],
)
def test_user_errors_are_printed_without_a_traceback(
    folder: Path, tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
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


def test_a_cached_result_is_for_one_question_only(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train={"steps": 3}))
    same = fingerprint(recipe, slice="v5e-8")
    assert fingerprint(recipe, slice="v5e-8") == same
    assert fingerprint(recipe, slice="v5e-1") != same
    assert fingerprint(load_recipe(tiny_run.recipe(folder, train={"steps": 4})), slice="v5e-8") != same
    data = folder / "chats.jsonl"
    before = data.stat()
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert fingerprint(recipe, slice="v5e-8") != same


def test_fixed_options_are_released_one_by_one(folder: Path) -> None:
    def steps(**sections: Any) -> tuple[list[tuple[str, ...]], StageRecipe]:
        recipe = load_recipe(tiny_run.recipe(folder, **sections))
        stages = read_inputs(recipe, ignore_events).stages
        return list(ladder(stages)), stages[0].recipe

    fixed, recipe = steps(
        train={"steps": 2, "batch_size": 8, "micro_batch_size": 8}, engine={"remat": "none", "loss_chunk": 4096}
    )
    assert fixed == [
        (),
        ("micro_batch_size",),
        ("micro_batch_size", "remat"),
        ("micro_batch_size", "remat", "loss_chunk"),
    ]
    assert relax(recipe, fixed[0]) == recipe
    others = {"num_devices": 1, "quantize": "none", "matmul": "full"}
    assert given_settings(relax(recipe, fixed[2])) == {**others, "loss_chunk": 4096}
    assert given_settings(relax(recipe, fixed[3])) == {**others, "loss_chunk": 256}
    assert steps(train={"steps": 2, "batch_size": 8})[0] == [(), ("loss_chunk",)]


def test_every_known_model_is_one_transformers_can_build(tmp_path: Path) -> None:
    known = json.loads(KNOWN_MODELS.read_text())
    assert len(known) >= 5
    for name, described in known.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(described))
        text, sizes = load_config(folder).get_text_config(), described.get("text_config", described)
        assert (text.hidden_size, text.vocab_size) == (sizes["hidden_size"], sizes["vocab_size"])


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


def test_buffers_are_described_in_terms_of_the_model() -> None:
    report = read_report(REPORT)
    assert report is not None and report.total_bytes == 3811809280
    assert [round(buffer.num_bytes / 2**20) for buffer in report.temporaries] == [512, 250, 128, 112, 56, 28]
    assert [describe(buffer, MISTRAL) for buffer in report.temporaries] == [
        "kept from all 32 layers for the backward pass",
        "weight lm_head, all-gathered",
        "logits of one chunk of the loss",
        "weight mlp.up_proj, all-gathered",
        "activations of one layer (width 14,336)",
        "adapter and its gradient, all 32 layers",
    ]
    assert logits_bytes(report, MISTRAL) == 128 * 2**20
    assert largest(report, MISTRAL)[0] == LargeBuffer("kept from all 32 layers for the backward pass", 0.5)
    problem = out_of_memory(report, MISTRAL, 2.0, "8 sequences at once")
    assert "needs 3.55 GiB per device, the limit is 2.00 GiB" in problem and "kept from all 32 layers" in problem
    assert read_report("another format") is None
    assert "2.00 GiB" in out_of_memory(None, MISTRAL, 2.0, "8 sequences at once")
