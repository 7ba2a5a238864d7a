"""`trillora doctor --prove` accepts machines that train correctly, refuses wrong gradients, and stores what it found.

The record that chips are compared with is compared with PyTorch's autograd and PEFT here. Wrong programs are planted
into the process that proves, wrong gradients into the comparison.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from dose import dose, full_dose_only
from hostile_json import changed_value
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from trillora.cli import app
from trillora.devices import measured
from trillora.devices.measured import MeasuredChip, ProofCheck
from trillora.errors import TrilloraError
from trillora.events import Progress, ignore_events
from trillora.prove import client, golden, process, rates
from trillora.prove.compare import GoldenRecord, figures_of, judge

Gradients = dict[str, Any]
Plant = Callable[[Gradients], Gradients]
LAYER = "model.layers.1."
Q = "model.layers.0.self_attn.q_proj.lora_a"
RECORD = GoldenRecord.read()
SAVED = MeasuredChip(
    device_kind="TPU v5 lite",
    platform="tpu",
    num_devices=8,
    date="2026-11-16T12:00:00+00:00",
    libraries={"jax": "0.10.2", "libtpu": None},
    checks=[ProofCheck("speed", "ok", "all")],
    matrix_tflops=187.0,
    memory_gb_per_second=702.0,
    gather_gb_per_second=70.0,
    reduce_gb_per_second=68.0,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path))
    return tmp_path


# ---- the record


def test_recorded_losses_and_gradients_are_those_of_pytorch() -> None:
    """Each document alone, so that packing is not part of the reference."""
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**golden.CONFIG)),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    ours = {_name(name): parameter for name, parameter in model.named_parameters()}
    trained = {name: parameter for name, parameter in ours.items() if "lora" in name}
    adapter = golden_adapter_of(trained)
    with torch.no_grad():
        for name, parameter in ours.items():
            value = adapter[name] if name in adapter else golden.golden_weight(name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(value))
    batch = {name: torch.from_numpy(array) for name, array in golden.golden_batch().items()}
    total, num_documents = torch.zeros(()), 0
    for row in range(golden.BATCH_SIZE):
        for segment in batch["segments"][row].unique().tolist():
            place = batch["segments"][row] == segment
            weights = batch["weights"][row][place]
            if not weights.any():
                continue
            logits = model(input_ids=batch["tokens"][row][place][None].long()).logits[0]
            targets = batch["targets"][row][place].long()
            total = total + (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
            num_documents += 1
    loss = total / batch["weights"].sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert num_documents == 20 and set(trained) == set(RECORD.gradients) and len(trained) == 28
    assert loss.item() == pytest.approx(RECORD.losses[0], rel=1e-5)  # float32 sums in another order
    for name, parameter in trained.items():
        assert parameter.grad is not None
        found, expected = parameter.grad.numpy(), RECORD.gradients[name]
        assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected), name


def golden_adapter_of(parameters: dict[str, Any]) -> dict[str, Any]:
    @dataclasses.dataclass
    class Leaf:
        names: tuple[str, ...]
        part_shape: tuple[int, ...]

    return golden.golden_adapter({name: Leaf((name,), tuple(p.shape)) for name, p in parameters.items()})  # type: ignore[misc]


def _name(name: str) -> str:
    for theirs, ours in (("base_model.model.", ""), (".base_layer", ""), (".default.weight", "")):
        name = name.replace(theirs, ours)
    return name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")


def test_what_an_h200_computed_is_accepted() -> None:
    """Judged again: the figures in the file are measured, the verdict is today's."""
    file = Path(__file__).parents[2] / "benchmarks" / "proofs" / "NVIDIA-H200-1.json"
    figures = measured.read(file).golden
    assert set(figures) == {"bfloat16", "float32"}
    for dtype, found in figures.items():
        assert all(check.state == "ok" for check in judge(found, dtype)), dtype


# ---- wrong gradients


def change(*names: str) -> Callable[[Callable[[Any], Any]], Plant]:
    """Plants that change the gradients whose names contain one of these texts."""

    def planting(function: Callable[[Any], Any]) -> Plant:
        return lambda g: {k: function(v) if any(n in k for n in names) else v for k, v in g.items()}

    return planting


PLANTS: dict[str, tuple[Plant, str]] = {
    "all signs are flipped": (change("")(lambda x: -x), "cosine"),
    "the signs of one matrix are flipped": (change(Q)(lambda x: -x), "signs"),
    "the mean over micro-batches is a sum": (change("")(lambda x: 2 * x), "norm ratio"),
    "5 % too large": (change("")(lambda x: 1.05 * x), "norm ratio"),
    "alpha is missing in one layer": (change(LAYER)(lambda x: x / 2), "norm ratio"),
    "one layer has no gradient": (change(LAYER)(np.zeros_like), "cosine"),
    "one matrix is not finite": (change(Q)(lambda x: np.full_like(x, np.nan)), "cosine"),
    "the rows of one matrix are in another order": (change(Q)(lambda x: x[::-1].copy()), "cosine"),
    "half of a matrix is missing, as on a device that was left out": (
        change(Q)(lambda x: np.concatenate([x[:4], 0 * x[4:]])),
        "cosine",
    ),
    "the gradients of two layers are exchanged": (
        lambda g: {k: g[k.replace(".1.", ".x.").replace(".0.", ".1.").replace(".x.", ".0.")] for k in g},
        "cosine",
    ),
    "noise of a fifth": (
        change("")(lambda x: x + 0.2 * x.std() * np.random.RandomState(0).randn(*x.shape)),
        "cosine",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_gradient_is_refused(plant: str, dtype: str) -> None:
    planted, refused_by = PLANTS[plant]
    checks = judge(figures_of(RECORD.losses, planted(RECORD.gradients), "planted", RECORD), dtype)
    refused = [check.name for check in checks if check.state == "refused"]
    assert any(refused_by in name for name in refused), checks


def test_rounding_to_bfloat16_is_accepted() -> None:
    """Otherwise the bars would refuse correct chips."""
    rounded = {k: torch.from_numpy(v).bfloat16().float().numpy() for k, v in RECORD.gradients.items()}
    for dtype in ("float32", "bfloat16"):
        checks = judge(figures_of(RECORD.losses, rounded, "rounded", RECORD), dtype)
        assert len(checks) == 4 and all(check.state == "ok" for check in checks), checks


@pytest.mark.parametrize("wrong", [1.02, 0.9, float("nan")])
def test_wrong_loss_is_refused(wrong: float) -> None:
    losses = [*RECORD.losses[:-1], RECORD.losses[-1] * wrong]
    checks = judge(figures_of(losses, RECORD.gradients, "planted", RECORD), "bfloat16")
    assert [check.state for check in checks] == ["refused", "ok", "ok", "ok"]
    assert f"step {len(losses)}" in checks[0].where


# ---- the proof


def test_two_devices_are_accepted_and_measured() -> None:
    seen: list[str] = []

    def listen(event: Any) -> None:
        assert isinstance(event, Progress)
        seen.append(event.label)

    record = process.prove_devices(jax.devices()[:2], listen)
    assert record.ok and [check.state for check in record.checks] == ["ok"] * 6, record.checks
    assert record.num_devices == 2 and "fsdp 2" in record.golden["float32"].how
    speeds = (record.matrix_tflops, record.memory_gb_per_second)
    assert all(speed and speed > 0 for speed in (*speeds, record.gather_gb_per_second, record.reduce_gb_per_second))
    assert len(dict.fromkeys(seen)) == 3
    record.save()
    assert measured.load("cpu", 2, say=pytest.fail) == record
    sent = json.dumps(record.to_dict())
    assert re.search(rf"\b{platform.node()}\b", sent) is None and str(Path.home()) not in sent


@pytest.mark.parametrize("as_json", [True, False])
def test_refused_record_ends_the_command_with_exit_code_1(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sends a record with a planted gradient over its real pipe."""
    flipped = PLANTS["the signs of one matrix are flipped"][0](RECORD.gradients)
    checks = judge(figures_of(RECORD.losses, flipped, "planted", RECORD), "float32")
    line = json.dumps({"result": dataclasses.replace(SAVED, checks=checks).to_dict()})
    monkeypatch.setattr(client, "PROGRAM", f"import os, sys; os.write(int(sys.argv[1]), {line + chr(10)!a}.encode())")
    result = CliRunner().invoke(app, ["doctor", "--prove", *(["--json"] if as_json else [])])
    assert result.exit_code == 1, result.output
    if as_json:
        assert [check["state"] for check in json.loads(result.stdout)["checks"]] == ["ok", "refused", "refused", "ok"]
    else:
        assert "REFUSED: 2 of 4 checks. Do not train here." in result.stdout and f"where: {Q}" in result.stdout
    said: list[str] = []
    assert measured.load("v5e", 8, said.append) is None
    assert len(said) == 1 and "refused" in said[0]


def test_accepted_record_ends_the_command_with_exit_code_0(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"result": SAVED.to_dict()})
    monkeypatch.setattr(client, "PROGRAM", f"import os, sys; os.write(int(sys.argv[1]), {line + chr(10)!a}.encode())")
    result = CliRunner().invoke(app, ["doctor", "--prove"])
    assert result.exit_code == 0 and "This machine trains correctly." in result.stdout
    shown = "".join(result.stdout.split())
    assert str(cache / "measured" / "v5e-8.json") in shown and "Preflightusesitsspeeds." in shown
    assert measured.load("v5e", 8, pytest.fail) == SAVED


@full_dose_only
def test_repeated_rows_change_no_gradient() -> None:
    """Three devices do not divide the eight rows of the batch: each of its rows is there three times."""
    run = golden.train_golden(jax.devices()[:3], "float32", ignore_events, num_steps=1)
    checks = judge(figures_of(run.losses, run.gradients, run.how, RECORD), "float32")
    assert len(checks) == 4 and all(check.state == "ok" for check in checks), checks


# Code that runs before the proof in its process.
WRONG_PROGRAMS = {
    "documents see each other": "a.visible = lambda rule, t, s, segments, see=a.visible: see(rule, t, s, None)",
    "tokens see later ones": "a.visible = lambda r, t, s, seg, see=a.visible: see(a.MaskRule(causal=False), t, s, seg)",
    "a window": "a.visible = lambda r, t, s, seg, see=a.visible: see(a.MaskRule(window=128), t, s, seg)",
}


@full_dose_only
@pytest.mark.parametrize("plant", WRONG_PROGRAMS)
def test_wrong_attention_mask_is_refused(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command, in its own process."""
    planted = f"import trillora.engine.attention as a; {WRONG_PROGRAMS[plant]}\n"
    monkeypatch.setattr(client, "PROGRAM", planted + client.PROGRAM)
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    result = CliRunner().invoke(app, ["doctor", "--prove", "--json"])
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    refused = [check["name"] for check in record["checks"] if check["state"] == "refused"]
    assert "gradients, float32: cosine" in refused and record["golden"]["float32"]["losses"]


def test_wrong_collective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates.exchange_faults(jax.devices()[:4]) == []
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: x)
    faults = rates.exchange_faults(jax.devices()[:4])
    assert len(faults) == 4 and all(fault.startswith("all-reduce: device") for fault in faults)
    check = process._collectives(jax.devices()[:4], ignore_events)
    assert check.state == "refused" and "4 wrong results" in check.figures


def test_error_of_a_part_is_a_refused_line_without_private_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError(f"INTERNAL: {Path.home()}/x on {platform.node()}: bad key hf_abcdefgh12345")

    monkeypatch.setattr(process, "train_golden", fail)
    monkeypatch.setattr(process, "measure_rates", fail)
    record = process.prove_devices(jax.devices()[:1], ignore_events)
    assert not record.ok and [check.state for check in record.checks] == ["skipped", "refused", "skipped"]
    text = record.checks[1].where
    assert text.startswith("RuntimeError: INTERNAL: ~/x on this machine") and "hf_" not in text


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("import time; time.sleep(60)", "did not end within 1 seconds"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("raise ValueError('no chip')", "exit code 1 before it had a result: ValueError: no chip"),
        ("import os, sys; os.write(int(sys.argv[1]), b'{half')", "exit code 0"),
    ],
)
def test_process_that_fails_is_an_error_with_its_output(
    program: str, what: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PROGRAM", program)
    monkeypatch.setattr(client, "TIMEOUT", 1)
    with pytest.raises(TrilloraError) as caught:
        client.prove(ignore_events)
    assert what in caught.value.what and str(cache) in str(caught.value.where)


# ---- the stored record


def test_record_is_found_by_chip_and_number_of_devices() -> None:
    one = dataclasses.replace(SAVED, num_devices=1, date="2026-11-17T12:00:00+00:00")
    for record in (SAVED, one, dataclasses.replace(SAVED, device_kind="TPU v5")):
        record.save()
    assert measured.load("v5e", 8, pytest.fail) == SAVED
    assert measured.load("v5e", 16, pytest.fail) == one, "the newest"
    assert measured.load("v6e", 8, pytest.fail) is None
    found = measured.load("v5p", 8, pytest.fail)
    assert found is not None and found.device_kind == "TPU v5"


def test_damaged_record_is_ignored_with_a_note() -> None:
    path = SAVED.save()
    tree = json.loads(path.read_text())
    randomness, num_ignored = random.Random(16), 0
    for _ in range(dose(200, 5000)):
        path.write_text(json.dumps(changed_value(tree, randomness)))
        said: list[str] = []
        found = measured.load("v5e", 8, said.append)
        num_ignored += bool(said)
        assert found is None or measured._fault(found) is None
    assert num_ignored > 50
    for text in ("", "[]", "null", "{", "[" * 5000, '{"format": 1}', '{"format": 2}', "x" * (measured.MAX_BYTES + 1)):
        path.write_text(text)
        said = []
        assert measured.load("v5e", 8, said.append) is None and len(said) == 1
