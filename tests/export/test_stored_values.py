"""The expected weights of an export, computed by their definition, against what the exporter writes.

Both must agree in every value, for every family and type; and one value that differs must be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from dose import slow_case
from gguf import GGMLQuantizationType, GGUFReader, quants
from merge_cases import CASES, source_of
from safetensors.numpy import load_file, save_file

from trillora.certify.gguf_file import open_gguf
from trillora.certify.weights.checks import Tally, compare_gguf, compare_merged
from trillora.certify.weights.expected import ExpectedWeights
from trillora.certify.weights.stored_values import FLOATS, wrong_blocks, wrong_values
from trillora.errors import TrilloraError
from trillora.export.gguf.write import export_gguf, plan_model
from trillora.export.merged import export_merged
from trillora.export.merged_weights import MergedWeights
from trillora.export.source import ExportSource

SIMPLE = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def expected_of(source: ExportSource) -> ExpectedWeights:
    return ExpectedWeights(source.base, source.spec, source.matrices)


def compared(source: ExportSource, folder: Path, type: str) -> Tally:
    (file,) = folder.glob("*.gguf")
    plan = plan_model(source, MergedWeights(source), type)
    return compare_gguf(expected_of(source), open_gguf(file), plan, source.base.config.get_text_config())


FEW = ("llama", "llama3", "gemma3", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", [name if name in FEW else slow_case(name) for name in gguf_models.MODELS])
def test_every_family_of_gguf_files_has_the_expected_values(name: str, tmp_path: Path) -> None:
    source, _ = gguf_models.source_of(name, tmp_path)
    for type in ("f16", "q8_0") if name in FEW else ("q4_0",):
        export_gguf(source, tmp_path / type, type=type)
        tally = compared(source, tmp_path / type, type)
        assert not tally.faults and tally.num_wrong == 0
        assert tally.num_values >= sum(np.prod(tensor.shape) for tensor in GGUFReader(_file(tmp_path / type)).tensors)


@pytest.mark.parametrize("type", ["f32", "bf16", "q5_1", "q5_0", "q4_1", "q4_0", "q4_k_m"])
def test_every_type_of_gguf_files_has_the_expected_values(type: str, tmp_path: Path) -> None:
    source, _ = gguf_models.source_of("llama-wide", tmp_path)
    export_gguf(source, tmp_path / "export", type=type)
    assert not compared(source, tmp_path / "export", type).faults
    tensor = "blk.1.attn_k.weight"
    reader = GGUFReader(_file(tmp_path / "export"), "r+")
    [found] = [each for each in reader.tensors if each.name == tensor]
    codes = found.data.reshape(-1).view(np.uint8)
    codes[len(codes) // 2 + 5] ^= 0x11  # one step of one or two values
    reader.data.flush()
    faults = compared(source, tmp_path / "export", type).faults
    assert len(faults) == 1 and tensor in faults[0]


def _file(folder: Path) -> str:
    (file,) = folder.glob("*.gguf")
    return str(file)


@pytest.mark.parametrize("dtype", ["float32", slow_case("float16"), "bfloat16"])
@pytest.mark.parametrize("case", [case if case in ("dora", "tied head") else slow_case(case) for case in CASES])
def test_merged_models_have_the_expected_values(case: str, dtype: str, tmp_path: Path) -> None:
    base, options = CASES[case][:2]
    source, _ = source_of(tmp_path, base, options)
    export_merged(source, tmp_path / "merged", dtype=dtype)
    tally = compare_merged(expected_of(source), tmp_path / "merged")
    assert not tally.faults and tally.num_wrong == 0
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name, array in tensors.items() if array.ndim == 2)[-1]
    tensors[name] = tensors[name].copy()
    bits = tensors[name].view({"float32": np.uint32}.get(dtype, np.uint16))
    bits[1, 2] += 1 << (8 if dtype == "float32" else 0)  # one unit in the last place; of float32, more than its slack
    save_file(tensors, file, metadata={"format": "pt"})
    tally = compare_merged(expected_of(source), tmp_path / "merged")
    assert tally.num_wrong == 1 and name in tally.faults[0]


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_float_may_be_the_next_one_only_near_a_tie(kind: str) -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(64, 64))
    off = values * (1 + 1e-7 * generator.uniform(-1, 1, values.shape))
    stored = off.astype(np.float32).astype(FLOATS[kind])
    slack = 2e-7 * np.abs(values)
    assert not wrong_values(stored.astype(np.float32), values, slack, kind).any()
    bits, units = {"BF16": (np.uint16, 1), "F16": (np.uint16, 1), "F32": (np.uint32, 6)}[kind]
    up = (stored.view(bits) + bits(units)).view(FLOATS[kind])
    assert wrong_values(up.astype(np.float32), values, slack, kind).mean() > 0.99


@pytest.mark.parametrize("name", SIMPLE)
def test_a_quantized_block_may_differ_only_near_a_tie(name: str) -> None:
    """Values that float32 rounds differently give other codes and scales now and then; a change of 0.1 % is seen."""
    type = GGMLQuantizationType[name]
    generator = np.random.default_rng(0)
    values = generator.normal(size=(400, 256)) * generator.lognormal(size=(400, 1))
    values[0], values[1] = 0.0, np.where(np.arange(256) % 2, 1.0, -1.0)  # no scale; both ends equally far
    slack = 4e-6 * np.abs(values) + 1e-9
    again = quants.quantize(values.astype(np.float32), type).view(np.uint8)
    differing = 0
    for _ in range(4):
        off = (values + slack * generator.uniform(-0.9, 0.9, values.shape)).astype(np.float32)
        data = quants.quantize(off, type).view(np.uint8)
        found = quants.dequantize(data, type)
        differing += int((data != again).any(axis=1).sum())
        assert not wrong_blocks(data, again, found, values, slack, type).any()
    assert differing > 20  # so the rule was needed
    for change in (1.002, 0.998):
        data = quants.quantize((values * change).astype(np.float32), type).view(np.uint8)
        is_wrong = wrong_blocks(data, again, quants.dequantize(data, type), values, slack, type)
        assert is_wrong[8:].mean() > 0.9


def test_a_type_that_loses_the_change_is_refused_with_types_that_keep_it(tmp_path: Path) -> None:
    """A base whose weights lie on the grid of Q4_1, because it was quantized before."""
    source, _ = gguf_models.source_of("llama-wide", tmp_path)
    grid: dict[str, Any] = load_file(source.base.folder / "model.safetensors")
    type = GGMLQuantizationType.Q4_1
    for name, array in grid.items():
        if array.ndim == 2:
            grid[name] = quants.dequantize(quants.quantize(array, type), type).reshape(array.shape)
    save_file(grid, source.base.folder / "model.safetensors", metadata={"format": "pt"})
    for name, array in source.matrices.items():
        source.matrices[name] = array * np.float32(0.1)  # 1 % of the change, far below half a step
    with pytest.raises(TrilloraError, match=r"q4_1 keeps [0-9]+ %") as caught:
        export_gguf(source, tmp_path / "small", type="q4_1")
    assert "--type q8_0" in (caught.value.do or "") and not (tmp_path / "small").exists()
    export_gguf(source, tmp_path / "small", type="q8_0")
    assert (compared(source, tmp_path / "small", "q8_0").found.value or 0) > 0.9
