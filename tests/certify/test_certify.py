"""Certificates: every planted defect is caught by the check that is meant for it, and correct adapters pass."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import planted_defects
import psutil
import pytest
import tiny_run
from certificate_text import shown
from chat_tokenizers import chat_tokenizer
from dose import dose, slow_case
from hostile_json import changed_bytes, changed_value
from planted_defects import DEFECTS, Defect, World
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trillora.certify.certificate import Certificate, Check, read_certificate
from trillora.certify.certify import certify
from trillora.certify.llama_cpp import MEMORY
from trillora.certify.logits import TEXTS, compute_reference
from trillora.certify.readers import read_with_llama_cpp
from trillora.certify.subject import find_subject
from trillora.certify.verify import verify
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.events import ignore_events
from trillora.export.gguf.write import export_gguf
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.recipe.load import load_recipe
from trillora.report.certificate_page import certificate_page
from trillora.report.certificate_table import show, summary
from trillora.report.safe_console import SafeConsole
from trillora.training.trainer import train


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A trained run whose adapter has a certificate: it holds the logits of what was trained."""
    world = planted_defects.write_world(tmp_path_factory.mktemp("certify"))
    certificate = certify(world.run)
    assert certificate.passed, shown(certificate)
    assert {check.name for check in certificate.checks if check.status == "skipped"} <= {"tokens"}
    return world


def test_there_are_enough_defects() -> None:
    assert len(DEFECTS) >= 20 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize(
    "defect",
    [slow_case(defect) if defect.slow else defect for defect in DEFECTS],
    ids=[defect.name for defect in DEFECTS],
)
def test_planted_defect_is_caught(defect: Defect, world: World, tmp_path: Path) -> None:
    copy, target = planted_defects.plant(defect, world, tmp_path)
    certificate = certify(target, base=str(copy.model) if defect.base else None)
    assert not certificate.passed
    failed = {f"{check.part}: {check.name}" for check in certificate.failed}
    assert {*defect.caught_by} <= failed, shown(certificate)
    assert all(check.do for check in certificate.failed)


@pytest.mark.parametrize("kind", ["merged", slow_case("half"), "gguf", "lora_gguf", "ollama"])
def test_correct_export_passes(kind: str, world: World) -> None:
    certificate = certify(getattr(world, kind))
    assert certificate.passed, shown(certificate)
    share = next(check for check in certificate.checks if check.name == "share of the change")
    assert share.figure == pytest.approx(1, abs=1e-3)
    again = verify(getattr(world, kind))
    assert again.passed, shown(again)


@pytest.mark.parametrize("type", ["q4_0", slow_case("bf16")])
def test_rounded_gguf_has_the_trained_change(type: str, world: World, tmp_path: Path) -> None:
    """Rounding to 4 bits moves log-probabilities by more than some adapters do; the share does not depend on it."""
    export_gguf(open_source(str(world.run)), tmp_path / "export", type=type)
    certificate = certify(tmp_path / "export", run=world.run)
    assert certificate.passed, shown(certificate)
    share = next(check for check in certificate.checks if check.name == "share of the change")
    assert share.figure == pytest.approx(1, abs=0.02)


def test_llama_cpp_is_read_where_the_most_likely_token_ends_the_answer(world: World) -> None:
    """llama.cpp returns no probabilities for an answer that is a stop token or a part of a character."""
    num_tokens = json.loads((world.model / "config.json").read_text("utf-8"))["vocab_size"]
    prompts = [[1, 2, 3], *([token] for token in range(24))]
    (file,) = world.gguf.glob("*.gguf")
    found = read_with_llama_cpp(file, prompts, num_tokens)[0].logprobs
    assert [array.shape for array in found] == [(num_tokens,)] * len(prompts)
    assert all(np.exp(array).sum() == pytest.approx(1, abs=1e-3) for array in found)


def test_the_engines_weights_are_freed_before_a_reader_loads_its_own(world: World) -> None:
    before = {id(array) for array in jax.live_arrays()}
    reference = compute_reference(find_subject(world.run), (), ignore_events)
    assert len(reference.logits) >= len(TEXTS)
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) < 1 << 10


# ---- correct ones of every kind

KINDS: dict[str, dict[str, Any]] = {
    "DoRA, rsLoRA, patterns and new tokens": {
        "lora": {"dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}, "train_tokens": ["<|eot_id|>"]},
        "tokens": ["<tool>"],
    },
    "plain LoRA with its own template": {"data": {"chat_template": "template.jinja"}},
    "PiSSA": {"lora": {"init": "pissa"}},
    "whole modules": {"lora": {"modules_to_save": ["lm_head"]}},
    "embedding": {"lora": {"targets": ["q_proj", "embed_tokens"]}},
    "sweep": {"sweep": {"rank": [2, 4], "keep": "all"}, "data": {"split": {"validation": 0.3}}},
}


def trained_kind(name: str, world: World, folder: Path) -> Path:
    options = KINDS[name]
    sections = {key: value for key, value in options.items() if isinstance(value, dict)}
    train_options = {"sequence_length": 96, "batch_size": 4, "learning_rate": 2e-2, "steps": 3}
    recipe = tiny_run.recipe(world.folder, train=train_options, **sections)
    template = chat_tokenizer("llama3").get_chat_template()
    (world.folder / "template.jinja").write_text(template.replace(r"\n\n'", r"\n'"))
    assert (world.folder / "template.jinja").read_text() != template
    if "chat_template" in recipe["data"]:
        recipe["data"]["chat_template"] = str(world.folder / "template.jinja")
    recipe |= {key: value for key, value in options.items() if not isinstance(value, dict)}
    train(load_recipe(recipe), folder)
    return folder


@pytest.mark.parametrize("kind", [name if number == 0 else slow_case(name) for number, name in enumerate(KINDS)])
def test_correct_adapter_passes(kind: str, world: World, tmp_path: Path) -> None:
    run = trained_kind(kind, world, tmp_path / "run")
    targets = [run / "adapter", *sorted((run / "adapters").glob("*"))]
    assert len(targets) == (3 if kind == "sweep" else 1)
    for target in targets:
        certificate = certify(target)
        assert certificate.passed, shown(certificate)
        assert {check.name for check in certificate.checks if check.status == "skipped"} <= {"tokens", "layers"}
        assert "checkpoint of step" in certificate.trained
        again = verify(target)
        assert again.passed, shown(again)


@pytest.mark.parametrize("kind", [name if number == 0 else slow_case(name) for number, name in enumerate(KINDS)])
def test_correct_export_of_every_kind_passes(kind: str, world: World, tmp_path: Path) -> None:
    run = trained_kind(kind, world, tmp_path / "run")
    source = open_source(str(run / "adapter"))
    export_merged(source, tmp_path / "merged", dtype="bfloat16")
    export_gguf(source, tmp_path / "gguf", type="q8_0")
    for folder in (tmp_path / "merged", tmp_path / "gguf"):
        certificate = certify(folder, run=run)
        assert certificate.passed and certificate.result == "passed", shown(certificate)


def test_a_certificate_without_its_reader_or_run_is_partial(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "adapter"
    shutil.copytree(world.adapter, moved)
    planted_defects.change_json(
        moved / "adapter_config.json", lambda values: values.update(base_model_name_or_path="some/base")
    )
    planted_defects.seal(moved)
    alone = certify(moved, base=str(world.model))
    assert alone.passed and alone.result == "partial" and "its run is not known" in summary(alone)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    unread = certify(world.adapter)
    assert unread.passed and unread.result == "partial"
    assert "Not proved, reader" in summary(unread) and "pip install" in summary(unread)
    monkeypatch.undo()
    assert certify(world.adapter).result == "passed"


@contextmanager
def edited(file: Path, change: Callable[[str], str]) -> Iterator[None]:
    before = file.read_text()
    assert change(before) != before
    file.write_text(change(before))
    try:
        yield
    finally:
        file.write_text(before)


def test_rows_that_have_changed_prove_nothing_about_what_was_trained(world: World, tmp_path: Path) -> None:
    adapter = shutil.copytree(world.adapter, tmp_path / "adapter")
    assert "only answers were trained" in summary(certify(adapter, run=world.run))
    with edited(world.folder / "chats.jsonl", lambda text: text.replace("What", "what", 1)):
        certificate = certify(adapter, run=world.run)
    assert certificate.passed and certificate.result == "partial"
    found = summary(certificate)
    assert "only answers were trained" not in found and "The run's data has changed" in found


def test_settings_of_the_base_that_changed_after_training_are_not_certified(world: World, tmp_path: Path) -> None:
    """An export of today contains the changed file, so the export and its certificate would agree."""
    name = "generation_config.json"
    with edited(world.model / name, lambda text: json.dumps({**json.loads(text), "temperature": 50.0})):
        export_merged(open_source(str(world.run)), tmp_path / "merged")
        export = certify(tmp_path / "merged", run=world.run)
        adapter = certify(shutil.copytree(world.adapter, tmp_path / "adapter"), run=world.run)
    [fault] = [check for check in export.failed if check.name == "base settings"]
    assert name in fault.what and json.loads((tmp_path / "merged" / name).read_text())["temperature"] == 50
    [warned] = [check for check in adapter.checks if check.name == "base settings"]
    assert adapter.passed and warned.status == "warning", "an adapter does not contain the file"


def test_a_base_with_values_that_are_not_finite_proves_nothing(world: World, tmp_path: Path) -> None:
    """Norms and losses of such a base cannot be written as JSON, and say nothing about the adapter."""
    [file] = world.model.glob("*.safetensors")
    good = file.read_bytes()
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith("down_proj.weight"))
    weights[name][0, 0] = float("nan")
    try:
        save_file(weights, file, metadata={"format": "pt"})
        certificate = certify(shutil.copytree(world.adapter, tmp_path / "adapter"), run=world.run)
    finally:
        file.write_bytes(good)
    assert not certificate.passed
    assert any(name in check.what and "not finite" in check.what for check in certificate.failed), summary(certificate)


def test_llama_cpp_has_a_limit_of_memory_and_answers_no_one_else(world: World) -> None:
    """It is C++ code that reads a file which may be hostile, and it listens on loopback."""
    num_tokens = json.loads((world.model / "config.json").read_text("utf-8"))["vocab_size"]
    (file,) = world.gguf.glob("*.gguf")
    known = {child.pid for child in psutil.Process().children()}
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_with_llama_cpp, file, [[token % 24] for token in range(100)], num_tokens)
        ports: list[int] = []
        while not ports and not reading.done():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in known and child.name().startswith("python"):
                        limit = child.rlimit(psutil.RLIMIT_AS)
                        listening = [each for each in child.net_connections() if each.status == psutil.CONN_LISTEN]
                        ports = [each.laddr.port for each in listening]
        assert ports and limit[0] == 2 * file.stat().st_size + MEMORY
        status = 503
        while status == 503 and not reading.done():  # it loads the file
            status = httpx.post(f"http://127.0.0.1:{ports[0]}/tokenize", json={"content": "a"}, timeout=60).status_code
        assert status == 401
        assert len(reading.result()[0].logprobs) == 100


@pytest.mark.parametrize("again", [certify, verify])
@pytest.mark.parametrize("place", ["nowhere", "sub"])
def test_an_ollama_folder_without_its_file_fails(again: Any, place: str, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "exports" / "ollama"
    shutil.copytree(world.run, tmp_path / "run")
    assert certify(folder).passed
    (file,) = folder.glob("*.gguf")
    (folder / "sub").mkdir()
    file.rename(folder / "sub" / file.name) if place == "sub" else file.unlink()
    failed = {f"{check.part}: {check.name}" for check in again(folder).failed}
    assert "files: complete" in failed


# ---- verify and the commands


def test_verify_repeats_the_certificate_without_the_run(world: World, tmp_path: Path) -> None:
    moved = tmp_path / "adapter"
    shutil.copytree(world.adapter, moved)
    certificate = verify(moved)
    assert certificate.passed, shown(certificate)
    parts = {check.part for check in certificate.checks}
    assert parts == {"files", "trained", "norms", "tokenizer", "reader"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "new.json").write_text("{}"), "same as certified"),
        (lambda folder: _write_below(folder / "sub" / "evil.py"), "same as certified"),
        (lambda folder: _write_below(folder / "additional_chat_templates" / "tool_use.jinja"), "same as certified"),
        (lambda folder: _write_below(folder / ".evil.bin"), "no pickle"),
        (lambda folder: (folder / "sub").symlink_to(folder.parent), "only files"),
        (lambda folder: _other_alpha(folder), "weights"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"short"), "files"),
    ],
    ids=[
        *("new file", "in a sub-folder", "template for tools", "hidden pickle", "link to a folder"),
        *("other alpha", "broken weights"),
    ],
)
def test_verify_notices_a_change(change: Any, expected: str, world: World, tmp_path: Path) -> None:
    moved = tmp_path / "adapter"
    shutil.copytree(world.adapter, moved)
    change(moved)
    failed = {check.name for check in verify(moved).failed}
    assert expected in failed


def _write_below(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")


def _other_alpha(folder: Path) -> None:
    planted_defects.change_json(folder / "adapter_config.json", lambda values: values.update(lora_alpha=99))
    planted_defects.seal(folder)


def test_edited_certificate_is_refused(world: World, tmp_path: Path) -> None:
    moved = tmp_path / "adapter"
    shutil.copytree(world.adapter, moved)
    file = moved / "certificate.json"
    file.write_text(file.read_text().replace('"ok"', '"skipped"', 1))
    with pytest.raises(TrilloraError, match="has changed"):
        verify(moved)


def test_hostile_certificates_are_refused(world: World, tmp_path: Path) -> None:
    rng, data = random.Random(0), (world.adapter / "certificate.json").read_bytes()
    refused = 0
    for number in range(dose(60, 2000)):
        file = tmp_path / str(number) / "certificate.json"
        file.parent.mkdir()
        changed = changed_bytes(data, rng) if number % 2 else json.dumps(changed_value(json.loads(data), rng)).encode()
        file.write_bytes(changed)
        if file.read_bytes() == data:
            continue
        try:
            read_certificate(file.parent)
        except TrilloraError as error:
            assert error.do
            refused += 1
    assert refused > dose(40, 1500)


def test_commands_print_and_exit_with_the_result(world: World, tmp_path: Path) -> None:
    copy, target = planted_defects.plant(DEFECTS[4], world, tmp_path)
    bad = CliRunner().invoke(app, ["certify", str(copy.run), "--json"])
    assert bad.exit_code == 1
    printed = json.loads(bad.stdout)
    assert not printed["passed"] and printed["kind"] == "adapter"
    assert "scale of" in " ".join(check["what"] for check in printed["checks"] if check["status"] == "failed")
    page = (target / "certificate.html").read_text()
    assert "Failed: " in page and "<script" not in page
    good = CliRunner().invoke(app, ["verify", str(world.run)])
    assert good.exit_code == 0 and "adapter passed" in good.stdout
    none = CliRunner().invoke(app, ["verify", str(world.model)])
    assert none.exit_code == 2 and "no certificate" in none.stderr


def test_page_shows_hostile_text_as_text(world: World) -> None:
    certificate = read_certificate(world.adapter)
    check = dataclasses.replace(certificate.checks[0], what="<img src=x onerror=alert(1)>\x1b[31m", do="<b>")
    page = certificate_page(dataclasses.replace(certificate, checks=(check,), target="<script>"))
    assert "<img" not in page and "<script" not in page and "\x1b" not in page and "&lt;img" in page


def test_the_verdict_names_the_reader_that_was_skipped_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ok = Check("files", "checksums", "ok", "All files are whole.")
    do = "uv pip install peft"
    skipped = Check("reader", "PEFT", "skipped", "Reading adapters with PEFT needs the package peft.", do=do)
    whole = Certificate("adapter", "a", "now", {}, None, None, "a checkpoint", None, {}, (ok,))
    show(dataclasses.replace(whole, checks=(ok, skipped)), SafeConsole())
    output = capsys.readouterr().out
    assert "adapter passed in part, without its reader PEFT (1 ok, 1 skipped" in output
    assert f"\n                do: {do}\n" in output.replace("reader: PEFT", "") or output.count(do) == 2
    show(whole, SafeConsole())
    assert "without" not in capsys.readouterr().out
