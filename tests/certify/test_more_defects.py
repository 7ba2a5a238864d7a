"""certify refuses every defect of more_defects.py, and accepts every rewrite that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import planted_defects
import pytest
from dose import slow_case
from more_defects import DEFECTS, HARMLESS, KNOWN_DEFECTS, NEW_DEFECTS, plant, write_small_world
from planted_defects import World
from small_world import TYPES, Defect, SmallWorld, read_weights, relative_changes

from trillora.certify.certify import certify
from trillora.errors import TrilloraError

SMALL_TARGETS = ("adapter", "merged", "lora_gguf", "ollama", *(f"gguf_{type}" for type in TYPES))
LARGE_TARGETS = ("adapter", "merged", "gguf", "lora_gguf", "ollama")
# The others run at full dose: they are alike these.
ALWAYS_ON = {
    "adapter: adapter_config.json with use_dora (float32)",
    "adapter: adapter_config.json with alora (float32)",
    "adapter: one entry of B off by a step of bfloat16 (bfloat16)",
    "merged: config.json with rms_norm_eps 1e-3 (float32)",
    "merged: half the alpha (bfloat16)",
    "merged: one k_proj missing (bfloat16)",
    "merged: untied head with noise (bfloat16)",
    "merged: config.json with rope_theta 20,000 (bfloat16)",
    "merged: config.json with twice the heads (bfloat16)",
    "merged: generation_config.json with 60 more stop ids (bfloat16)",
    "merged: tokenizer.json with a stop that strips (bfloat16)",
    "merged: auto map with code (bfloat16)",
    "merged: base in one file next to the shards (bfloat16)",
    "gguf: sign of one layer flipped (float32)",
    "gguf_q8_0: sign of one layer flipped (bfloat16)",
    "gguf_q8_0: header of normal type (bfloat16)",
    "gguf_q4_0: a quarter of the alpha (bfloat16)",
    "gguf_q4_1: one number of a block (bfloat16)",
    "gguf_bf16: rotary factors added (bfloat16)",
    "lora_gguf: B not permuted (bfloat16)",
    "ollama: system prompt (bfloat16)",
    # and rewrites that pass
    "adapter: alpha doubled and B halved (bfloat16)",
    "adapter: options saved by peft (bfloat16)",
    "merged: saved again by transformers (bfloat16)",
    "merged: other version of transformers (bfloat16)",
    "gguf_q4_0: description added (bfloat16)",
    "ollama: comment and licence in the modelfile (bfloat16)",
}

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Trained runs whose adapters have certificates: they hold the logits of what was trained."""
    folder = tmp_path_factory.mktemp("worlds")
    found = {
        "bfloat16": write_small_world(folder / "bfloat16"),
        "float32": planted_defects.write_world(folder / "float32"),
    }
    assert all(certify(world.run).passed for world in found.values())
    return found


def passes(target: Path) -> bool:
    """A folder that cannot be read at all is an error, which is as good as a certificate that fails."""
    try:
        return certify(target).passed
    except TrilloraError:
        return False


def cases(defects: Iterable[Defect]) -> list[Any]:
    return [defect if name(defect) in ALWAYS_ON else slow_case(defect) for defect in defects]


def name(defect: Defect) -> str:
    return f"{defect.name} ({defect.world})"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("defect", cases(DEFECTS), ids=name)
def test_defects_fail(defect: Defect, worlds: dict[str, World], tmp_path: Path) -> None:
    _, target = plant(defect, worlds[defect.world], tmp_path)
    assert contents(target) != contents(getattr(worlds[defect.world], defect.target))
    assert not passes(target), defect.harm


@pytest.mark.parametrize("rewrite", cases(HARMLESS), ids=name)
def test_harmless_rewrites_pass(rewrite: Defect, worlds: dict[str, World], tmp_path: Path) -> None:
    _, target = plant(rewrite, worlds[rewrite.world], tmp_path)
    assert contents(target) != contents(getattr(worlds[rewrite.world], rewrite.target))
    certificate = certify(target)
    assert certificate.passed, (rewrite.harm, certificate.failed)


@pytest.mark.parametrize("target", [each if each == "gguf_q4_0" else slow_case(each) for each in SMALL_TARGETS])
def test_undamaged_exports_pass(target: str, worlds: dict[str, World]) -> None:
    certificate = certify(getattr(worlds["bfloat16"], target))
    assert certificate.passed, certificate.failed


def test_the_change_is_small_and_kept(worlds: dict[str, World]) -> None:
    for size, kept in relative_changes(worlds["bfloat16"]).values():
        assert 0.001 < size < 2**-8  # half the distance between two bfloat16 numbers, or less
        assert 0.6 < kept < 1.1


def test_weights_are_the_same_in_every_format(worlds: dict[str, World]) -> None:
    """The tools put rows of heads where each format has them."""
    world = worlds["bfloat16"]
    assert isinstance(world, SmallWorld)
    merged, half = read_weights(world.merged), read_weights(world.gguf_bf16)
    assert merged.keys() == half.keys()
    assert all((merged[each] == half[each]).all() for each in merged)


def test_the_page_has_the_numbers_of_the_lists() -> None:
    text = (Path(__file__).parents[2] / "dev" / "DEFECTS.md").read_text("utf-8")
    assert f"| all | {len(DEFECTS)} | {len(DEFECTS)} |" in text, "run tools/planted_defects_table.py"
    assert f"{len(planted_defects.DEFECTS)} of {len(planted_defects.DEFECTS)} are caught" in text
    assert f"{len(KNOWN_DEFECTS)} are attacks" in text and f"{len(NEW_DEFECTS)} were written" in text
    assert f"{len(HARMLESS)} rewrites that change nothing pass" in text


def test_the_lists_are_long_and_without_doubles() -> None:
    names = Counter(name(defect) for defect in (*DEFECTS, *HARMLESS))
    assert max(names.values()) == 1 and names.keys() >= ALWAYS_ON
    assert len(NEW_DEFECTS) >= 30 and len(HARMLESS) >= 12
    assert all(defect.harm.endswith(".") for defect in (*DEFECTS, *HARMLESS))
    assert {defect.target for defect in NEW_DEFECTS} == {*SMALL_TARGETS, *LARGE_TARGETS}
