"""Whole runs on a tiny model: what they leave, what they refuse, and how many programs they compile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
import torch
from dose import full_dose_only, slow_case
from transformers import AutoModelForCausalLM

import trillora
from trillora.errors import TrilloraError
from trillora.events import Chosen, Step
from trillora.model.adapters import load_adapter
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for tests of what happens around the model."""
    return tiny_run.write_both(tmp_path_factory.mktemp("shallow"), tiny_run.llama(num_layers=1))


def refused(settings: dict[str, Any], out: Path) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), out)
    assert caught.value.do
    return caught.value


def test_run_learns_and_leaves_adapter_metrics_and_resolved_recipe(folder: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    settings = tiny_run.recipe(folder, train={"steps": 12})
    result = train(load_recipe(settings), tmp_path / "run", listener=events.append)
    assert result.losses[-1] < 0.7 * result.losses[0]
    assert tiny_run.losses(tmp_path / "run") == list(result.losses)
    assert [e.loss for e in events if isinstance(e, Step)] == list(result.losses)
    assert set(json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])) >= {
        "step",
        "loss",
        "num_tokens",
        "grad_norm",
        "learning_rate",
        "skipped",
    }
    spec, adapter = load_adapter(tmp_path / "run" / "adapter")
    assert spec.rank == 4 and any(a.any() for name, a in adapter.items() if name.endswith("lora_b"))
    resolved = load_recipe(tmp_path / "run" / "resolved.yaml")
    chosen = [e for e in events if isinstance(e, Chosen)]
    assert len(chosen) >= 6
    assert resolved.engine.remat != "auto" and resolved.train.micro_batch_size != "auto"
    again = train(resolved, tmp_path / "again")
    assert again.losses == result.losses, "the resolved recipe is the same run, bit for bit"


def test_adapter_loads_in_peft_with_our_loss(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from peft_reference import mean_loss

    saving = {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 9}
    settings = tiny_run.recipe(folder, data={"pack": False}, train=saving)
    losses = train(load_recipe(settings), tmp_path / "four").losses
    shutil.copytree(tmp_path / "four" / "adapter", tmp_path / "three")
    saved = tiny_run.checkpoints_of(tmp_path / "four").read(3)["adapter_model.safetensors"]
    assert saved != (tmp_path / "three" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "three" / "adapter_model.safetensors").write_bytes(saved)
    # Three steps lead to the adapter whose loss on the fourth batch the fourth step reports.
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "three").eval()
    batch = _batches(settings).batch(3)
    tensors = {name: torch.tensor(array) for name, array in batch.items()}
    with torch.no_grad():
        logits = model(input_ids=tensors["tokens"].long()).logits
    expected = mean_loss(logits, tensors["targets"].long(), tensors["weights"])
    assert losses[3] == pytest.approx(expected.item(), rel=1e-5)  # float32 sums in another order


def _batches(settings: dict[str, Any]) -> Any:
    return tiny_run.batches_of(load_recipe(settings), Path(settings["model"]["name"]))


def test_one_program_serves_the_whole_run(shallow: Path, tmp_path: Path) -> None:
    """Three epochs with a last batch that is not full, and not one compilation after the first step."""
    compiled: list[str] = []
    first_step_done = False

    def listener(event: Any) -> None:
        nonlocal first_step_done
        first_step_done |= isinstance(event, Step)

    def on_compile(name: str, seconds: float, **tags: Any) -> None:
        if first_step_done and name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_compile)
    settings = tiny_run.recipe(shallow, train={"steps": 9, "batch_size": 4})
    assert _batches(settings).num_rows % 4, "the last batch is to be filled up"
    result = train(load_recipe(settings), tmp_path / "run", listener=listener)
    assert result.num_compiles == 1
    # What closes a stage is a program of its own; the loop itself compiles nothing.
    assert len(compiled) <= 1


def test_same_seed_same_run_and_another_seed_another(shallow: Path, tmp_path: Path) -> None:
    runs = [
        train(load_recipe(tiny_run.recipe(shallow, train={"steps": 2, "seed": seed})), tmp_path / name).losses
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.fixture(scope="module")
def plain_losses(folder: Path) -> tuple[float, ...]:
    settings = tiny_run.recipe(folder, train={"steps": 2}, engine={"layers": "unroll", "remat": "none"})
    return train(load_recipe(settings), folder / "plain").losses


@pytest.mark.parametrize(
    ("layers", "remat"),
    [
        slow_case("scan", "none"),
        slow_case("scan", "full"),  # in the tests of architectures
        ("scan", "linear"),
        ("scan", "dots"),
        slow_case("unroll", "linear"),
        slow_case("scan", "half"),  # test_remat.py has its gradients
        slow_case("scan", "wide"),
        slow_case("scan", "attention"),
        slow_case("unroll", "offload"),
        slow_case("unroll", "dots"),
    ],
)
def test_layers_and_remat_do_not_change_the_numbers(
    folder: Path, plain_losses: tuple[float, ...], tmp_path: Path, layers: str, remat: str
) -> None:
    engine = {"layers": layers, "remat": remat, "loss_chunk": 24}
    other = tiny_run.recipe(folder, train={"steps": 2}, engine=engine)
    assert train(load_recipe(other), tmp_path / "other").losses == pytest.approx(plain_losses, rel=1e-5)


@full_dose_only  # test_dropout.py always has the micro-batches, and test_lora.py has scan and unroll
def test_dropout_trains_the_same_in_scan_and_unroll_and_for_any_micro_batch(folder: Path, tmp_path: Path) -> None:
    def losses(dropout: float, layers: str, micro_batch_size: int) -> tuple[float, ...]:
        train_section = {"steps": 3, "micro_batch_size": micro_batch_size}
        settings = tiny_run.recipe(folder, lora={"dropout": dropout}, train=train_section, engine={"layers": layers})
        return train(load_recipe(settings), tmp_path / f"{dropout}-{layers}-{micro_batch_size}").losses

    without, whole = losses(0.0, "scan", 8), losses(0.3, "scan", 8)
    assert abs(whole[2] - without[2]) > 1e-4, "dropout has an effect"
    assert losses(0.0, "scan", 2) == pytest.approx(without, rel=1e-5)
    for layers, micro_batch_size in (("unroll", 1), ("unroll", 8), ("scan", 4)):
        assert losses(0.3, layers, micro_batch_size) == pytest.approx(whole, rel=1e-5)


def test_python_api_trains_with_overrides(shallow: Path, tmp_path: Path) -> None:
    result = trillora.train(tiny_run.recipe(shallow), out=tmp_path / "run", train={"steps": 2})
    assert len(result.losses) == 2 and np.isfinite(result.losses).all()


def test_finished_run_is_not_overwritten(shallow: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(shallow, train={"steps": 2})
    train(load_recipe(settings), tmp_path / "run")
    assert "finished run" in refused(settings, tmp_path / "run").what


@pytest.mark.parametrize(
    ("section", "values", "what", "where"),
    [
        ("lora", {"targets": ["q_prj"]}, "q_prj", "lora.targets[0]"),
        ("hardware", {"devices": 9}, "9 devices requested, but only 8 cpu devices found", "hardware.devices"),
        ("hardware", {"backend": "tpu"}, "No tpu device", "hardware.backend"),
        ("hardware", {"devices": 8, "mesh": {"data": 8}}, "", "train.batch_size"),
        ("train", {"sequence_length": 512}, "256 positions", "train.sequence_length"),
    ],
)
def test_what_cannot_run_is_refused(
    folder: Path, tmp_path: Path, section: str, values: dict[str, Any], what: str, where: str
) -> None:
    sections = {section: values}
    if where == "train.batch_size":
        sections["train"] = {"batch_size": 6}
    error = refused(tiny_run.recipe(folder, **sections), tmp_path / "run")
    assert what in error.what and error.where == where
    if section == "lora":
        assert "q_proj" in error.do
