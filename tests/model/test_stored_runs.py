"""A run on a base that is stored quantized: trained, certified by PEFT's own reading of the base, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from certificate_text import shown
from safetensors.torch import load_file, save_file
from stored_formats import FP8, KEPT, float8, nf4

from trillora.certify.certify import certify
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.preflight.inputs import read_inputs
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")


def write(folder: Path, quantize: Any, about: dict[str, Any]) -> Any:
    """A model with quantized linear layers and rows, and the recipe of a short run."""
    tiny_run.write_both(folder, tiny_run.llama(num_layers=1))
    file = folder / "model" / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        stored |= quantize(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(stored, file, {"format": "pt"})
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return load_recipe(tiny_run.recipe(folder, train={"steps": 3, "sequence_length": 96, "batch_size": 4}))


def test_a_run_on_a_float8_base_is_certified_and_merged(tmp_path: Path) -> None:
    recipe = write(tmp_path, float8(32, 32), FP8)
    events: list[Any] = []
    train(recipe, tmp_path / "run", listener=events.append)
    assert any("stored in float8: dequantized to float32" in getattr(event, "text", "") for event in events)
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "model")
    certificate = certify(tmp_path / "run")
    assert certificate.passed, shown(certificate)
    assert any(check.name == "PEFT" and check.status == "ok" for check in certificate.checks), shown(certificate)
    exported = export_merged(open_source(tmp_path / "run"), tmp_path / "merged")
    assert any("float8" in note for note in exported.notes)
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    types = {
        tensor.dtype for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items() if "_proj" in name
    }
    assert "quantization_config" not in merged and types == {torch.bfloat16}
    certificate = certify(tmp_path / "merged", run=tmp_path / "run")
    assert certificate.passed, shown(certificate)


def test_preflight_says_how_the_base_is_stored(tmp_path: Path) -> None:
    recipe = write(tmp_path, nf4, KEPT["nf4"][1])
    notes = read_inputs(recipe, lambda event: None).notes
    assert any("stored in bitsandbytes 4 bit and dequantized while loading" in note for note in notes)
