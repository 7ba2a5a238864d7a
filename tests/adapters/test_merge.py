"""Merging adapters: equal to PEFT's `add_weighted_adapter` where that is right, and to the definition everywhere."""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
from adapter_folders import refusal, small, write
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import merge_utils
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trillora.adapters import merge, methods
from trillora.adapters.inputs import read_input
from trillora.adapters.merge import MergeResult, merge_adapters
from trillora.cli import app
from trillora.errors import Bug, TrilloraError
from trillora.events import Alarm, Event
from trillora.model.adapters import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE, load_adapter, peft_files
from trillora.recipe.group_section import MergeOptions
from trillora.recipe.load import load_recipe
from trillora.runs.saved import find_adapter
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

ROUNDING = 2e-6  # of the norm: float32 products and sums in another order
CUT = 1e-4  # of the norm, after a cut: rounding turns the leading directions by 1e-7 divided by their gaps
WEIGHTS = (1.0, -0.7, 0.4)
TARGETS = (["q_proj", "v_proj", "down_proj"], ["q_proj", "v_proj"], ["q_proj", "up_proj"])


def peft_model(ranks: Sequence[int], targets: Sequence[Any], **options: Any) -> Any:
    """A tiny Llama with random adapters "skill0", "skill1", …: PEFT takes a bare number for a layer's."""
    torch.manual_seed(0)
    model: Any = None
    for number, (rank, names) in enumerate(zip(ranks, targets, strict=True)):
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM", **options)
        if model is None:
            model = get_peft_model(copy.deepcopy(tiny_models.build("llama")), config, adapter_name="skill0")
        else:
            model.add_adapter(f"skill{number}", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    return model


def saved(model: Any, folder: Path) -> list[Path]:
    names = list(model.peft_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT cannot check the vocabulary of a model without a folder
        model.save_pretrained(folder, selected_adapters=names)
    return [folder / name for name in names]


def peft_changes(model: Any, name: str) -> dict[str, np.ndarray]:
    found = {}
    for layer, module in model.base_model.model.named_modules():
        if isinstance(module, LoraLayer) and name in module.lora_A:
            found[layer] = module.get_delta_weight(name).detach().numpy()
    return found


def our_changes(folder: Path) -> dict[str, np.ndarray]:
    return {layer: change.matrix() for layer, change in read_input(folder).changes.items()}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The norm of the difference, relative to the norm of `expected`."""
    assert found.keys() == expected.keys()
    rest = sum(methods.square_of(found[layer] - expected[layer]) for layer in expected)
    return math.sqrt(rest / sum(map(methods.square_of, expected.values())))


def weighted_sum(folders: Sequence[Path], weights: Sequence[float] = WEIGHTS) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    for folder, weight in zip(folders, weights, strict=True):
        for layer, change in our_changes(folder).items():
            total[layer] = total.get(layer, 0) + np.float64(weight) * change
    return total


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Path]]:
    """Three adapters with different ranks and layers, in PEFT and as files."""
    model = peft_model((4, 3, 2), TARGETS)
    return model, saved(model, tmp_path_factory.mktemp("mixed"))


def peft_merged(model: Any, kind: str, **options: Any) -> dict[str, np.ndarray]:
    name = f"merged{len(model.peft_config)}"
    model.add_weighted_adapter(["skill0", "skill1", "skill2"], list(WEIGHTS), name, kind, **options)
    return peft_changes(model, name)


# ---- parity with PEFT


@pytest.mark.parametrize(
    ("method", "theirs", "tolerance"),
    [
        ("cat", "cat", ROUNDING),
        ("svd", "svd", CUT),
        ("ties", "ties_svd", CUT),
        ("magnitude-prune", "magnitude_prune_svd", CUT),
    ],
)
def test_a_merge_equals_that_of_peft(
    method: Any, theirs: str, tolerance: float, mixed: tuple[Any, list[Path]], tmp_path: Path
) -> None:
    model, folders = mixed
    density = 0.3 if method in ("ties", "magnitude-prune") else None
    expected = peft_merged(model, theirs, density=density)
    result = merge_adapters(folders, MergeOptions(method, WEIGHTS, density), tmp_path / "out")
    assert result.rank == (9 if method == "cat" else 4)
    assert distance(our_changes(tmp_path / "out"), expected) < tolerance
    assert distance(weighted_sum(folders), expected) > (0 if method == "cat" else 0.1)


@pytest.mark.parametrize(("method", "theirs"), [("dare-linear", "dare_linear_svd"), ("dare-ties", "dare_ties_svd")])
def test_dare_equals_that_of_peft_with_its_random_masks(
    method: Any, theirs: str, mixed: tuple[Any, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folders = mixed
    masks: list[np.ndarray] = []

    def recorded(probabilities: torch.Tensor) -> torch.Tensor:
        mask = bernoulli(probabilities)
        masks.append(mask.numpy() > 0)
        return mask

    bernoulli = torch.bernoulli
    monkeypatch.setattr(merge_utils.torch, "bernoulli", recorded)
    expected = peft_merged(model, theirs, density=0.6)
    # PEFT draws layer by layer in the order of the model, and in each for the adapters that have it.
    per_adapter = [peft_changes(model, f"skill{number}") for number in range(3)]
    order = [(layer, n) for layer in expected for n in range(3) if layer in per_adapter[n]]
    drawn = dict(zip(order, masks, strict=True))
    monkeypatch.setattr(methods, "random_mask", lambda seed, layer, adapter, shape, density: drawn[layer, adapter])
    merge_adapters(folders, MergeOptions(method, WEIGHTS, 0.6), tmp_path / "out")
    assert distance(our_changes(tmp_path / "out"), expected) < CUT


# ---- the definition, where PEFT differs


def test_linear_is_the_exact_sum_where_that_of_peft_has_cross_terms(tmp_path: Path) -> None:
    model = peft_model((4, 4, 4), [["q_proj", "down_proj"]] * 3)
    folders = saved(model, tmp_path / "inputs")
    result = merge_adapters(folders, MergeOptions("linear", WEIGHTS), tmp_path / "out")
    expected = weighted_sum(folders)
    assert distance(our_changes(tmp_path / "out"), expected) < ROUNDING
    assert (result.rank, result.lost) == (12, 0.0)
    assert distance(peft_merged(model, "linear"), expected) > 0.5


def test_adapters_with_rslora_are_not_merged_too_strong(tmp_path: Path) -> None:
    """peft#3761: PEFT's result inherits use_rslora, so its scale is alpha / sqrt(r) instead of 1."""
    model = peft_model((8, 8, 8), [["q_proj", "down_proj"]] * 3, use_rslora=True)
    folders = saved(model, tmp_path / "inputs")
    expected = weighted_sum(folders)
    for method in ("linear", "cat"):
        merge_adapters(folders, MergeOptions(method, WEIGHTS), tmp_path / method)
        assert distance(our_changes(tmp_path / method), expected) < ROUNDING
        config = json.loads((tmp_path / method / CONFIG_FILE).read_text())
        assert config["use_rslora"] is False and config["lora_alpha"] == config["r"] == 24
    theirs = peft_merged(model, "cat")
    assert distance(theirs, {layer: math.sqrt(24) * change for layer, change in expected.items()}) < ROUNDING


def test_ranks_rslora_and_layers_may_differ(tmp_path: Path) -> None:
    plain = saved(peft_model((4,), [["q_proj", "up_proj"]]), tmp_path / "plain")
    scaled = saved(peft_model((2,), [["q_proj", "k_proj"]], use_rslora=True), tmp_path / "scaled")
    folders = [*plain, *scaled]
    result = merge_adapters(folders, MergeOptions(weights=(1, 1)), tmp_path / "out")
    assert distance(our_changes(tmp_path / "out"), weighted_sum(folders, (1, 1))) < ROUNDING
    assert result.rank == 6 and result.num_layers == 4 * 3
    assert sum(each.share for each in result.inputs) == pytest.approx(1)


def test_layers_with_ranks_and_alphas_of_their_own_are_merged(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 20.0}}
    model = peft_model((4, 2), [["q_proj", "k_proj"]] * 2, **patterns)
    folders = saved(model, tmp_path)
    expected = weighted_sum(folders, (1.0, 0.5))
    by_peft = {
        layer: peft_changes(model, "skill0")[layer] + 0.5 * change
        for layer, change in peft_changes(model, "skill1").items()
    }
    assert distance(expected, by_peft) < ROUNDING
    merge_adapters(folders, MergeOptions("linear", weights=(1.0, 0.5)), tmp_path / "merged", with_logits=False)
    assert distance(our_changes(tmp_path / "merged"), expected) < ROUNDING


def test_linear_finds_the_true_rank(tmp_path: Path) -> None:
    """The second adapter changes the same directions as the first, so their sum has the rank of one."""
    first = saved(peft_model((4,), [["q_proj"]]), tmp_path / "inputs")[0]
    _, matrices = load_adapter(first)
    turned = {name: -2.5 * array[::-1] if name.endswith("a") else array[:, ::-1] for name, array in matrices.items()}
    second = write(tmp_path / "second", turned, json.loads((first / CONFIG_FILE).read_text()))
    result = merge_adapters([first, second], MergeOptions(), tmp_path / "out")
    assert result.rank == 4
    assert distance(our_changes(tmp_path / "out"), weighted_sum([first, second], (1, 1))) < ROUNDING
    assert [each.share for each in result.inputs] == pytest.approx([1 / -1.5, 2.5 / 1.5])


def test_a_cut_keeps_the_best_part_and_says_what_it_loses(mixed: tuple[Any, list[Path]], tmp_path: Path) -> None:
    folders = mixed[1]
    whole = weighted_sum(folders)
    for rank in (1, 3):
        result = merge_adapters(folders, MergeOptions("linear", WEIGHTS, rank=rank), tmp_path / f"{rank}")
        parts = {layer: np.linalg.svd(change, full_matrices=False) for layer, change in whole.items()}
        best = {layer: (u[:, :rank] * s[:rank]) @ v[:rank] for layer, (u, s, v) in parts.items()}
        assert distance(our_changes(tmp_path / f"{rank}"), best) < CUT
        lost = {layer: (s[rank:] ** 2).sum() / (s**2).sum() for layer, (_, s, _) in parts.items()}
        assert result.lost == pytest.approx(distance(best, whole) ** 2, rel=1e-5)
        assert result.worst_layer == max(lost, key=lambda layer: lost[layer])
        assert result.worst_lost == pytest.approx(max(lost.values()), rel=1e-5)


def test_the_iteration_for_large_matrices_loses_hardly_more_than_the_best_cut(
    mixed: tuple[Any, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = MergeOptions("ties", WEIGHTS, 0.2)
    exact = merge_adapters(mixed[1], options, tmp_path / "exact")
    monkeypatch.setattr(methods, "EXACT_SIZE", 0)
    monkeypatch.setattr(methods, "NUM_SPARE", 4)
    found = merge_adapters(mixed[1], options, tmp_path / "iterated")
    assert exact.lost < found.lost * (1 + 1e-6) < exact.lost * 1.01
    assert (tmp_path / "exact" / WEIGHTS_FILE).read_bytes() != (tmp_path / "iterated" / WEIGHTS_FILE).read_bytes()


def test_the_largest_entries_are_kept_and_equal_ones_in_order() -> None:
    matrix = np.array([[1, -5, 2], [2, -2, 0]], np.float32)
    assert methods.largest_mask(matrix, 0.5).tolist() == [[False, True, True], [True, False, False]]
    assert methods.largest_mask(matrix, 1.0).all() and not methods.largest_mask(matrix, 0.1).any()


def test_dare_depends_on_the_seed_alone_and_keeps_the_expected_share(
    mixed: tuple[Any, list[Path]], tmp_path: Path
) -> None:
    files = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        merge_adapters(mixed[1], MergeOptions("dare-linear", WEIGHTS, 0.5, seed=seed), tmp_path / name)
        files[name] = (tmp_path / name / WEIGHTS_FILE).read_bytes()
    assert files["a"] == files["b"] != files["c"]
    mask = methods.random_mask(0, "layer", 0, (300, 300), 0.3)
    assert mask.mean() == pytest.approx(0.3, abs=0.01)
    assert (mask != methods.random_mask(0, "layer", 1, (300, 300), 0.3)).any()


# ---- what is written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("merge"), tiny_run.llama(num_layers=1))


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Path]:
    """Two runs on one base model, with test rows of their own. The second has the first one's files, but another
    adapter: random, of another rank."""
    sections = {"data": {"split": {"test": 0.3}}, "train": {"sequence_length": 96}}
    train(load_recipe(tiny_run.recipe(folder, **sections)), folder / "one")
    shutil.copytree(folder / "one", folder / "two")
    shutil.rmtree(folder / "two" / "adapter")
    config = json.loads((folder / "one" / "adapter" / CONFIG_FILE).read_text())
    generator, matrices = np.random.default_rng(0), {}
    for name, array in load_adapter(folder / "one" / "adapter")[1].items():
        shape = (2, array.shape[1]) if name.endswith("a") else (array.shape[0], 2)
        matrices[name] = generator.normal(0, 0.05, shape).astype(np.float32)
    write(folder / "two" / "adapter", matrices, {**config, "r": 2})
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def merged(folder: Path, runs: list[Path]) -> MergeResult:
    return merge_adapters(runs, MergeOptions(weights=(1, 0.5)), folder / "merged")


def test_logits_of_the_merged_adapter_are_those_of_the_definition(merged: MergeResult, runs: list[Path]) -> None:
    assert merged.logits is not None
    assert merged.logits.difference < 1e-5 * merged.logits.logits < 1e-2 * merged.logits.change


def test_peft_computes_with_the_merged_adapter_what_the_definition_says(
    merged: MergeResult, folder: Path, runs: list[Path]
) -> None:
    tokens = {"input_ids": torch.arange(3, 40)[None]}
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    plain = base(**tokens).logits
    defined = copy.deepcopy(base)
    for layer, change in weighted_sum([run / "adapter" for run in runs], (1, 0.5)).items():
        defined.get_submodule(layer).weight.data += torch.tensor(change, dtype=torch.float32)
    expected = defined(**tokens).logits
    found = PeftModel.from_pretrained(base, merged.adapter).eval()(**tokens).logits
    assert (expected - plain).norm() > 0.01 * plain.norm()
    assert (found - expected).norm() < 1e-5 * expected.norm()  # float32 sums in another order


def test_the_folder_says_what_it_was_merged_from(merged: MergeResult, folder: Path, runs: list[Path]) -> None:
    names = {file.name for file in merged.adapter.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == {CONFIG_FILE, WEIGHTS_FILE, "checksums.json", "merge.json", "README.md", *tokenizer}
    card = (merged.adapter / "README.md").read_text("utf-8")
    assert "Merged from 2 adapters" in card and str(folder) not in card
    facts = json.loads((merged.adapter / "merge.json").read_text())
    assert facts == {"format": 1, **json.loads(json.dumps(merged.to_dict()))}
    assert [each["name"] for each in facts["inputs"]] == [str(run) for run in runs]
    assert [each["rank"] for each in facts["inputs"]] == [4, 2] and facts["rank"] == 6
    assert facts["base"] == str(folder / "model")
    assert not list(folder.glob(".*"))


def test_a_changed_bit_of_a_merged_adapter_is_noticed(merged: MergeResult, tmp_path: Path) -> None:
    copied = shutil.copytree(merged.adapter, tmp_path / "copy")
    data = bytearray((copied / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (copied / WEIGHTS_FILE).write_bytes(bytes(data))
    with pytest.raises(TrilloraError, match="damaged"):
        load_adapter(copied)


def test_a_common_chat_template_is_kept_and_different_ones_are_reported(
    mixed: tuple[Any, list[Path]], tmp_path: Path
) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in mixed[1]]
    for each in folders:
        (each / TEMPLATE_FILE).write_text("{{ messages }}")
    merge_adapters(folders, MergeOptions(), tmp_path / "same")
    assert (tmp_path / "same" / TEMPLATE_FILE).read_text() == "{{ messages }}"
    load_adapter(tmp_path / "same")
    (folders[1] / TEMPLATE_FILE).write_text("other")
    heard: list[Event] = []
    merge_adapters(folders, MergeOptions(), tmp_path / "different", listener=heard.append)
    assert not (tmp_path / "different" / TEMPLATE_FILE).exists()
    assert any(isinstance(event, Alarm) and "chat templates" in event.text for event in heard)


def test_a_common_tokenizer_is_kept(mixed: tuple[Any, list[Path]], tmp_path: Path) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in mixed[1]]
    for each in folders[:2]:
        (each / "tokenizer.json").write_text("{}")
    merge_adapters(folders, MergeOptions(), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    load_adapter(tmp_path / "out")


def test_a_result_that_is_not_the_definition_is_never_written(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(merge, "definition", lambda *arguments: 1.05 * methods.definition(*arguments))
        with pytest.raises(Bug, match="its logits differ"):
            merge_adapters(runs, MergeOptions(), tmp_path / "out")
    factored = methods._factored
    with monkeypatch.context() as patch:
        patch.setattr(methods, "_factored", lambda b, a: tuple(1.001 * x for x in factored(b, a)))
        with pytest.raises(Bug, match="is not the one that linear defines"):
            merge_adapters(runs, MergeOptions(), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(
            merge, "peft_files", lambda adapter, *others: peft_files({k: v + 1 for k, v in adapter.items()}, *others)
        )
        with pytest.raises(Bug, match="does not contain its matrices"):
            merge_adapters(runs, MergeOptions(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_transposed_weights_are_compared_in_their_own_order(tmp_path: Path) -> None:
    """GPT-2 stores a linear layer's weight [inputs, outputs]."""
    model = tiny_models.build("gpt2")
    model.save_pretrained(tmp_path / "base")
    tiny_run.chat_tokenizer("chatml").save_pretrained(tmp_path / "base")
    generator, folders = np.random.default_rng(0), []
    for number in range(2):
        matrices = {}
        for layer in ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj"):
            num_in, num_out = model.get_submodule(layer).weight.shape
            matrices[f"{layer}.lora_a"] = generator.normal(0, 0.3, (2, num_in)).astype(np.float32)
            matrices[f"{layer}.lora_b"] = generator.normal(0, 0.3, (num_out, 2)).astype(np.float32)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(tmp_path / "base")}
        folders.append(write(tmp_path / str(number), matrices, {**config, "fan_in_fan_out": True}))
    result = merge_adapters(folders, MergeOptions("ties"), tmp_path / "out")
    assert result.logits is not None and result.lost > 0.01
    assert 0.01 < result.logits.difference / result.logits.change < 1  # of the cut
    exact = merge_adapters(folders, MergeOptions(), tmp_path / "exact")
    assert exact.logits is not None and exact.logits.difference < 1e-3 * exact.logits.change


# ---- runs that cannot be merged


def test_runs_on_a_base_that_changed_in_between_are_refused(runs: list[Path], tmp_path: Path) -> None:
    for run in runs:
        shutil.copytree(run, tmp_path / run.name)
    facts = json.loads((tmp_path / "two" / "run.json").read_text())
    facts["identity"]["model"] = "0" * 64
    (tmp_path / "two" / "run.json").write_text(json.dumps(facts))
    assert "same name but other weights" in refusal(tmp_path, [tmp_path / "one", tmp_path / "two"]).what


def test_a_folder_without_an_adapter_says_what_to_give(runs: list[Path], tmp_path: Path) -> None:
    assert find_adapter(runs[0]).folder == runs[0] / "adapter" == find_adapter(runs[0] / "adapter").folder
    (tmp_path / "empty").mkdir()
    assert "no adapter here" in refusal(tmp_path, [tmp_path / "empty", runs[0]]).what
    assert "no such folder" in refusal(tmp_path, [tmp_path / "missing", runs[0]]).what
    (tmp_path / "many" / "adapters").mkdir(parents=True)
    small(tmp_path / "many" / "adapters" / "sql", 1)
    assert str(tmp_path / "many" / "adapters" / "sql") in refusal(tmp_path, [tmp_path / "many", runs[0]]).do


# ---- the commands


def invoke(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_a_table_or_json_and_generate_uses_the_result(
    merged: MergeResult, runs: list[Path], folder: Path, tmp_path: Path
) -> None:
    code, text, _ = invoke(
        "merge", *runs, "--method", "ties", "--weights", "1,-0.5", "--density", 0.4, "-o", tmp_path / "t"
    )
    assert (
        code == 0 and "share of the change" in text and "lost" in text and f"{tmp_path / 't'}" in text.replace("\n", "")
    )
    code, text, _ = invoke("merge", *runs, "--weights", "1,0.5", "--out", tmp_path / "j", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["rank"] == 6 and facts["method"] == "linear" and facts["logits"]["difference"] < 1e-4
    assert (tmp_path / "j" / WEIGHTS_FILE).read_bytes() == (merged.adapter / WEIGHTS_FILE).read_bytes()

    ask = ("-p", "What is 3 plus 4?", "--max-tokens", 12)
    code, answer, _ = invoke("generate", folder / "model", "--adapter", merged.adapter, *ask)
    assert code == 0 and answer
    assert invoke("generate", runs[0], "--adapter", merged.adapter, *ask)[:2] == (0, answer)
    code, _, error = invoke("generate", runs[0], "--adapter", merged.adapter, "--base", *ask)
    assert code == 2 and "contradict" in error


def test_eval_tests_another_adapter_and_leaves_the_run_as_it_is(merged: MergeResult, runs: list[Path]) -> None:
    before = sorted(file.name for file in runs[0].iterdir())
    code, text, error = invoke("eval", runs[0], "--adapter", merged.adapter, "--rows", 2, "--max-tokens", 4, "--json")
    assert code == 0 and f"with{merged.adapter}" in "".join(error.split())
    assert json.loads(text)["adapter"]["loss"] != json.loads(text)["base"]["loss"]
    assert sorted(file.name for file in runs[0].iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--weights", "1,x"), "is not a list of weights"),
        (("--weights", "1"), "2 adapters and 1 weight"),
        (("--density", "2"), "is not a number from 0 to 1"),
        (("--method", "linaer"), "did you mean linear?"),
    ],
)
def test_wrong_arguments_end_with_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    adapters = [small(tmp_path / "a", 1), small(tmp_path / "b", 2)]
    code, _, error = invoke("merge", *adapters, "--out", tmp_path / "out", *arguments)
    assert code == 2 and words in error and not (tmp_path / "out").exists()


def test_an_adapter_of_another_base_is_refused_by_its_shapes(folder: Path, tmp_path: Path) -> None:
    alien = small(tmp_path / "a", 1)
    code, _, error = invoke("generate", folder / "model", "--adapter", alien, "-p", "hi")
    assert code == 2 and "The adapter does not fit this model" in error and str(alien) in error
    small(tmp_path / "b", 2, base_model_name_or_path=str(folder / "model"))
    small(tmp_path / "c", 3, base_model_name_or_path=str(folder / "model"))
    assert "does not fit this model" in refusal(tmp_path, [tmp_path / "b", tmp_path / "c"]).what
