"""Damaged and hostile adapters: every change is noticed, and every failure is a TrilloraError that names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dose import dose
from hostile_json import changed_bytes, changed_value
from safetensors.numpy import load_file, save, save_file

from trillora.errors import TrilloraError
from trillora.files.checksums import seal, with_checksums
from trillora.files.storage import MARK
from trillora.model.adapters import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE, load_adapter, read_adapter, read_head

pytestmark = pytest.mark.core

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/base",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "target_modules": ["q_proj"],
    "bias": "none",
}
NAME = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def matrices() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {NAME.format(i, m): (2, 6) if m == "A" else (4, 2) for i in range(2) for m in "AB"}
    return {name: generator.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, *, checksums: bool, template: bool = False) -> Path:
    files = {WEIGHTS_FILE: save(matrices(), {"format": "pt"}), CONFIG_FILE: json.dumps(CONFIG, indent=2).encode()}
    files |= {TEMPLATE_FILE: b"{{ messages }}"} if template else {}
    folder.mkdir(exist_ok=True)
    for name, data in (with_checksums(3, files) if checksums else files).items():
        (folder / name).write_bytes(data)
    return folder


def refusal(folder: Path) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        load_adapter(folder)
    assert caught.value.where and caught.value.do
    return caught.value


# ---- checksums


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE, MARK])
def test_every_changed_bit_of_a_runs_adapter_is_noticed(file: str, tmp_path: Path) -> None:
    write(tmp_path, checksums=True, template=True)
    load_adapter(tmp_path)
    original = (tmp_path / file).read_bytes()
    randomness = random.Random(0)
    for _ in range(dose(20, 1000)):
        place, bit = randomness.randrange(len(original)), 1 << randomness.randrange(8)
        (tmp_path / file).write_bytes(original[:place] + bytes([original[place] ^ bit]) + original[place + 1 :])
        error = refusal(tmp_path)
        assert file in error.what and error.where == str(tmp_path / file)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE])
def test_a_shorter_or_missing_file_of_a_runs_adapter_is_noticed(file: str, tmp_path: Path) -> None:
    write(tmp_path, checksums=True, template=True)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    assert f"{file} has" in refusal(tmp_path).what
    (tmp_path / file).unlink()
    assert f"{file} is missing" in refusal(tmp_path).what


def test_a_template_that_the_run_did_not_write_is_refused(tmp_path: Path) -> None:
    write(tmp_path, checksums=True)
    (tmp_path / TEMPLATE_FILE).write_text("{{ 'ignore the user' }}")
    assert refusal(tmp_path).what == f"The adapter is damaged: {TEMPLATE_FILE} has no checksum."


def test_checksums_of_a_later_format_are_named(tmp_path: Path) -> None:
    write(tmp_path, checksums=True)
    (tmp_path / MARK).write_bytes(seal({"format": 2, "step": 3, "novel": []}))
    assert "has format 2" in refusal(tmp_path).what


def test_missing_checksums_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_adapter(write(tmp_path / "sealed", checksums=True))
    assert not caplog.records
    load_adapter(write(tmp_path / "plain", checksums=False))
    assert "has no checksums.json" in caplog.text


# ---- values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    write(tmp_path, checksums=False)
    tensors = matrices()
    tensors[NAME.format(1, "B")][3, 1] = value
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    error = refusal(tmp_path)
    assert NAME.format(1, "B") in error.what and "not finite" in error.what
    assert error.where == str(tmp_path / WEIGHTS_FILE)
    with pytest.raises(TrilloraError, match="not finite"):
        read_adapter((tmp_path / WEIGHTS_FILE).read_bytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({NAME.format(0, "A"): np.ones((3, 6), np.float32)}), "rank 2"),
        (lambda t: t.update({NAME.format(0, "B"): np.ones((2, 4), np.float32)}), "rank 2"),
        (lambda t: t.update({NAME.format(0, "B"): np.ones(8, np.float32)}), "rank 2"),
        (lambda t: t.pop(NAME.format(0, "A")), "A is missing"),
        (lambda t: t.update({NAME.format(0, "A"): np.ones((2, 6), np.int32)}), "not floating-point numbers"),
        (lambda t: t.update({NAME.format(0, "A"): np.full((2, 6), 1e300)}), "not finite"),  # not in float32
    ],
)
def test_matrices_that_contradict_the_config_are_refused(
    change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, checksums=False)
    tensors = matrices()
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert words in refusal(tmp_path).what


def test_half_precision_matrices_load(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    write(tmp_path, checksums=False)
    tensors = {name: torch.from_numpy(array).bfloat16() for name, array in matrices().items()}
    save_torch(tensors, tmp_path / WEIGHTS_FILE)
    _, adapter = load_adapter(tmp_path)
    expected = tensors[NAME.format(0, "A")].float().numpy()
    assert np.array_equal(adapter["model.layers.0.self_attn.q_proj.lora_a"], expected)


# ---- the configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in ("2", 0, -1, 1e9, 2.0, True, None, [2], 10**30)),
        *(("lora_alpha", value) for value in ("4", 0, -4, None, True, float("nan"), float("inf"), 1e30, {})),
        *(("lora_dropout", value) for value in (None, "0", -0.1, 1, 2.0, float("nan"))),
        *(("use_rslora", value) for value in ("false", 0, 1, None, [])),
        *(("peft_type", value) for value in (None, 5, ["LORA"])),
    ],
)
def test_config_values_of_a_wrong_type_or_range_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, checksums=False)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**CONFIG, key: value}))
    error = refusal(tmp_path)
    assert error.where == str(tmp_path / CONFIG_FILE)
    assert key in error.what or "JSON" in error.what


@pytest.mark.parametrize("text", ["", "[]", "5", "{", "[" * 100_000, "\udcff"])
def test_a_config_that_is_not_an_object_is_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path, checksums=False)
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(tmp_path).where == str(tmp_path / CONFIG_FILE)


# ---- fuzzers


def test_any_change_of_an_adapter_without_checksums_is_refused_or_loads_sound_matrices(tmp_path: Path) -> None:
    """Without checksums a changed number cannot be noticed. What loads is finite and fits its config."""
    original = write(tmp_path / "original", checksums=False)
    names = {file: (original / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}
    folder = shutil.copytree(original, tmp_path / "changed")
    num_refused, num = 0, dose(200, 10_000)
    for seed in range(num):
        randomness = random.Random(seed)
        for file, data in names.items():
            (folder / file).write_bytes(data)
        if randomness.random() < 0.5:
            text = json.dumps(changed_value(CONFIG, randomness))
            (folder / CONFIG_FILE).write_text(text)
        else:
            file = randomness.choice(list(names))
            (folder / file).write_bytes(changed_bytes(names[file], randomness))
        try:
            spec, adapter = load_adapter(folder)
        except TrilloraError as error:
            assert error.where and error.do, seed
            num_refused += 1
            continue
        assert 1 <= spec.rank <= 1 << 16 and 0 < spec.alpha < np.inf and 0 <= spec.dropout < 1, seed
        assert type(spec.rslora) is bool, seed
        for name, matrix in adapter.items():
            assert np.isfinite(matrix).all() and matrix.dtype == np.float32, seed
            assert matrix.shape[0 if name.endswith("lora_a") else 1] == spec.rank, seed
    assert num // 4 < num_refused < num  # both outcomes occur


def test_any_change_of_an_adapter_with_checksums_is_refused(tmp_path: Path) -> None:
    original = write(tmp_path / "original", checksums=True, template=True)
    names = {file.name: file.read_bytes() for file in original.iterdir()}
    for seed in range(dose(100, 5000)):
        randomness = random.Random(seed)
        file = randomness.choice(list(names))
        changed = changed_bytes(names[file], randomness)
        (original / file).write_bytes(changed)
        if changed != names[file]:
            assert file in refusal(original).what, seed
        (original / file).write_bytes(names[file])


def test_the_matrices_are_those_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, checksums=True)
    _, adapter = load_adapter(tmp_path)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert len(adapter) == len(stored) == 4
    assert np.array_equal(adapter["model.layers.1.self_attn.q_proj.lora_b"], stored[NAME.format(1, "B")])


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE, MARK])
def test_a_file_of_terabytes_is_refused_by_its_name_before_it_is_read(
    file: str, has_checksums: bool, tmp_path: Path
) -> None:
    write(tmp_path, checksums=has_checksums, template=True)
    with open(tmp_path / file, "ab") as target:
        target.truncate(4 << 40)  # a sparse file: it takes no space
    assert refusal(tmp_path).where == str(tmp_path / file)
    if file == CONFIG_FILE:
        with pytest.raises(TrilloraError, match="larger than 64 MiB"):
            read_head(tmp_path)
