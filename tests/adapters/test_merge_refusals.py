"""Merges that are refused: wrong options, adapters that do not belong together, damaged files."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from adapter_folders import CONFIG, refusal, small, write
from dose import dose
from hostile_json import changed_bytes, changed_value

from trillora.adapters import logits_check
from trillora.adapters.merge import merge_adapters
from trillora.errors import Bug, TrilloraError
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from trillora.recipe.group_section import MERGE_METHODS, MergeOptions
from trillora.recipe.load import load_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("merge"))


@pytest.mark.parametrize(
    ("options", "what", "where"),
    [
        (MergeOptions(weights=(1,)), "2 adapters and 1 weight.", "--weights"),
        (MergeOptions(weights=(1, 2, 3)), "2 adapters and 3 weights", "--weights"),
        (MergeOptions(weights=(1, math.nan)), "not a finite number", "--weights"),
        (MergeOptions(weights=(1, math.inf)), "not a finite number", "--weights"),
        (MergeOptions(weights=(0, 0)), "All weights are zero", "--weights"),
        (MergeOptions(weights=(1, 1e30)), "too large for float32", "q"),
        (MergeOptions("tie"), "Unknown merge method 'tie'", "--method"),  # type: ignore[arg-type]
        (MergeOptions("ties", density=0), "above 0 and at most 1", "--density"),
        (MergeOptions("ties", density=1.5), "above 0 and at most 1", "--density"),
        (MergeOptions("ties", density=math.nan), "above 0 and at most 1", "--density"),
        (MergeOptions("linear", density=0.5), "linear has no density", "--density"),
        (MergeOptions("cat", rank=3), "cat has no rank", "--rank"),
        (MergeOptions("ties", seed=3), "ties has no seed", "--seed"),
        (MergeOptions("dare-ties", seed=-1), "must not be negative", "--seed"),
        (MergeOptions("linear", rank=0), "at least 1", "--rank"),
        (MergeOptions("linear", rank=5), "more than this merge can have, 4", "--rank"),
        (MergeOptions("ties", rank=6), "more than this merge can have, 5", "--rank"),
        (MergeOptions("ties", density=1e-3), "changes nothing: no entry", None),
        (MergeOptions("dare-linear", density=1e-300), "too large for float32", "q"),
    ],
)
def test_wrong_options_are_refused(options: MergeOptions, what: str, where: str | None, tmp_path: Path) -> None:
    error = refusal(tmp_path, [small(tmp_path / "a", 1), small(tmp_path / "b", 2)], options)
    assert what in error.what and error.where == where


def test_options_of_a_recipe_are_named_as_there() -> None:
    with pytest.raises(TrilloraError) as caught:
        MergeOptions(weights=(1,)).checked(2, "merge.")
    assert caught.value.where == "merge.weights"
    assert MergeOptions("dare-ties").checked(2) == MergeOptions("dare-ties", (1.0, 1.0), 0.5, None, 0)


@pytest.mark.parametrize(
    ("section", "option", "what"),
    [
        ({"method": "linear", "density": 0.2}, "merge.density", "The method linear has no density."),
        ({"method": "cat", "rank": 8}, "merge.rank", "The method cat has no rank."),
        ({"weights": [0, 0]}, "merge.weights", "All weights are zero"),
    ],
)
def test_a_recipe_whose_merge_would_fail_at_the_end_is_refused_at_the_start(
    section: dict[str, Any], option: str, what: str
) -> None:
    phases = [{"name": name, "data": f"{name}.jsonl"} for name in ("sql", "chat")]
    with pytest.raises(TrilloraError) as caught:
        load_recipe({"model": "smollm2", "phases": phases, "merge": section})
    assert what in str(caught.value) and option in str(caught.value)


def test_too_few_adapters_and_the_same_one_twice_are_refused(tmp_path: Path) -> None:
    a, b = small(tmp_path / "a", 1), small(tmp_path / "b", 2)
    assert "at least two adapters, got one" in refusal(tmp_path, [a]).what
    assert "got none" in refusal(tmp_path, []).what
    assert "the same adapter is given twice" in refusal(tmp_path, [a, b, a]).what.lower()
    copied = small(tmp_path / "copy", 1, target_modules=["q"])  # the same changes with another config
    error = refusal(tmp_path, [a, b, copied])
    assert "twice" in error.what and error.where == f"{a} and {copied}"


def test_adapters_that_cancel_each_other_are_refused(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1)
    _, matrices = load_adapter(a)
    negative = write(tmp_path / "b", {k: -v if k.endswith("a") else v for k, v in matrices.items()}, CONFIG)
    for method in ("linear", "cat", "svd", "magnitude-prune"):
        error = refusal(tmp_path, [a, negative], MergeOptions(method))  # type: ignore[arg-type]
        assert error.what == "The merge changes nothing: the adapters cancel each other."


def test_adapters_without_a_change_are_refused(tmp_path: Path) -> None:
    zeros = [
        write(
            tmp_path / f"{n}",
            {"q.lora_a": np.full((2, 5), n, np.float32), "q.lora_b": np.zeros((6, 2), np.float32)},
            CONFIG,
        )
        for n in (1, 2)
    ]
    assert "changes nothing" in refusal(tmp_path, zeros).what


def test_adapters_of_different_bases_are_refused_with_both_names(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1)
    other = small(tmp_path / "b", 2, base_model_name_or_path="other/base")
    error = refusal(tmp_path, [a, other])
    assert error.what == "The adapters have different base models: some/base and other/base."
    assert error.where == f"{a} and {other}"
    wide = small(tmp_path / "c", 2, num_out=7)
    assert "q is 6 x 5 in one and 7 x 5 in the other" in refusal(tmp_path, [a, wide]).what


def test_spellings_and_copies_of_a_base_are_the_same_base(folder: Path, tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1, base_model_name_or_path="smollm2")
    b = small(tmp_path / "b", 2, base_model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct/")
    merge_adapters([a, b], MergeOptions(), tmp_path / "named", with_logits=False)
    copied = shutil.copytree(folder / "model", tmp_path / "model")
    c = small(tmp_path / "c", 1, base_model_name_or_path=str(folder / "model"))
    d = small(tmp_path / "d", 2, base_model_name_or_path=str(copied))
    merge_adapters([c, d], MergeOptions(), tmp_path / "copies", with_logits=False)
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(bytes(weights))
    assert "different base models" in refusal(tmp_path, [c, d]).what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("bias", "all"),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
    ],
)
def test_adapters_that_are_more_than_a_change_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    a, b = small(tmp_path / "a", 1), small(tmp_path / "b", 2, **{key: value})
    error = refusal(tmp_path, [a, b])
    assert f"it uses {key}" in error.what and error.where == str(b / CONFIG_FILE)


def test_different_tokenizers_are_refused(tmp_path: Path) -> None:
    folders = [small(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for number, each in enumerate(folders):
        (each / "tokenizer.json").write_text(f"[{number}]")
    assert "different tokenizers: tokenizer.json differs" in refusal(tmp_path, folders).what


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ([{"pad_token": "<|im_end|>"}, {"pad_token": "<|endoftext|>"}], "padding tokens: '<|im_end|>' and '<|endoftex"),
        ([{"eos_token": {"content": "a"}}, {"eos_token": "b"}], "stop tokens: 'a' and 'b'"),
        ([{"pad_token": {"content": "a"}}, {"pad_token": "a"}], None),
        ([{"pad_token": "a"}, {"pad_token": None}], None),
        ([{"pad_token": "a"}, ["pad_token"]], None),
        ([{"pad_token": "a"}, None], None),
    ],
)
def test_adapters_must_have_the_same_stop_and_padding_tokens(
    tokens: list[Any], what: str | None, tmp_path: Path
) -> None:
    """As the adapters of phases do that were trained in notebooks of their own."""
    folders = [small(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for each, content in zip(folders, tokens, strict=True):
        (each / "tokenizer.json").write_text("[1]")
        (each / "tokenizer_config.json").write_text("{" if content is None else json.dumps(content))
    if what is None:
        merge_adapters(folders, MergeOptions("ties"), tmp_path / "out", with_logits=False)
    else:
        assert what in refusal(tmp_path, folders).what


def test_an_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    adapters = [small(tmp_path / "a", 1), small(tmp_path / "b", 2)]
    (tmp_path / "out").write_text("mine")
    error = refusal(tmp_path, adapters)
    assert "already exists" in error.what and (tmp_path / "out").read_text() == "mine"


def test_a_base_that_is_not_here_is_not_downloaded_and_said(tmp_path: Path) -> None:
    result = merge_adapters([small(tmp_path / "a", 1), small(tmp_path / "b", 2)], MergeOptions(), tmp_path / "out")
    assert result.logits is None and result.not_compared == "the base model some/base is not on this machine"
    assert logits_check.open_local("\0") is None


def test_a_base_that_cannot_be_used_is_said(folder: Path, tmp_path: Path) -> None:
    base = shutil.copytree(folder / "model", tmp_path / "model")
    (base / "tokenizer.json").unlink()
    pair = [small(tmp_path / name, seed, base_model_name_or_path=str(base)) for seed, name in enumerate("ab")]
    result = merge_adapters(pair, MergeOptions(), tmp_path / "out")
    assert result.logits is None and "cannot be used: The model has no tokenizer" in str(result.not_compared)


def test_damaged_adapters_are_refused_or_merge_to_finite_ones(tmp_path: Path) -> None:
    """No change of the files is a bug, and none leaves a folder."""
    a, b = small(tmp_path / "a", 1), small(tmp_path / "b", 2)
    for each in (a, b):
        (each / "checksums.json").unlink()
    config, data = {**CONFIG, "target_modules": ["q"], "use_rslora": False}, (b / WEIGHTS_FILE).read_bytes()
    num_refused, num = 0, dose(150, 5000)
    for seed in range(num):
        randomness = random.Random(seed)
        text = json.dumps(changed_value(config, randomness)) if seed % 2 else json.dumps(config)
        (b / CONFIG_FILE).write_text(text)
        (b / WEIGHTS_FILE).write_bytes(data if seed % 2 else changed_bytes(data, randomness))
        method: Any = randomness.choice(MERGE_METHODS)
        try:
            merge_adapters([a, b], MergeOptions(method), tmp_path / "out", with_logits=False)
        except TrilloraError as error:
            assert not isinstance(error, Bug) and error.do, (seed, error)
            num_refused += 1
            assert not (tmp_path / "out").exists()
            continue
        load_adapter(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    assert num // 4 < num_refused < num  # both outcomes occur
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]
