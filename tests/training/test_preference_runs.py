"""Runs with losses of preferences: stages, their reference, several adapters, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load
from tiny_run import assert_same, checkpoints_of, copy_interrupted, metrics

from trillora.data.summary import inspect
from trillora.errors import TrilloraError
from trillora.events import SWAPPED, Alarm, Note
from trillora.model.adapters import load_adapter
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.report.run.adapter_tables import summary
from trillora.report.run.read import read_run
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

SPLIT = {"validation": 0.25, "test": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))
    tiny_run.write_pairs(folder / "pairs.jsonl")
    tiny_run.write_labels(folder / "labels.jsonl")
    return folder


def recipe(folder: Path, file: str = "pairs.jsonl", **sections: Any) -> dict[str, Any]:
    own = {
        "steps": 6,
        "batch_size": 4,
        "sequence_length": 96,
        "checkpoint_every": 2,
        "keep_checkpoints": 100,
        "loss": "dpo",
    }
    values = tiny_run.recipe(folder, train={**own, **sections.pop("train", {})})
    values["data"] = {"path": str(folder / file), "split": SPLIT}
    return {**values, "evaluate": {"every_steps": 3, "num_samples": 0}, **sections}


def stages(folder: Path) -> dict[str, Any]:
    values = recipe(folder, train={"loss": "sft"})
    del values["train"]["steps"], values["train"]["loss"]
    pairs = values.pop("data")
    second = {"name": "second", "data": pairs, "loss": "dpo", "steps": 6, "learning_rate": 5e-3}
    return {**values, "stages": [{"name": "first", "data": str(folder / "chats.jsonl"), "steps": 4}, second]}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(stages(folder)), run)
    return run


def arrays(run: Path, step: int, start: str) -> dict[str, np.ndarray]:
    stored = load(checkpoints_of(run).read(step)["state.safetensors"])
    return {name.partition(start)[2]: array for name, array in stored.items() if start in name}


def test_the_reference_is_the_adapter_at_the_start_of_the_stage(whole: Path) -> None:
    assert checkpoints_of(whole).steps() == [2, 4, 6, 8, 10]
    at_start = arrays(whole, 4, "/adapter/")  # the first state of the second stage
    for step in (4, 6, 10):
        reference = arrays(whole, step, "/reference/")
        assert reference.keys() == at_start.keys() and len(reference) > 4
        assert all((reference[name] == at_start[name]).all() for name in reference)
    assert any((arrays(whole, 6, "/adapter/")[name] != at_start[name]).any() for name in at_start)
    assert all(not array.any() for name, array in arrays(whole, 2, "/reference/").items() if name.endswith("lora_b"))


def test_the_first_step_after_sft_prefers_nothing_and_then_the_margin_grows(whole: Path) -> None:
    steps = [line for line in metrics(whole, "step") if line["stage"] == "second"]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert steps[0]["preferences"]["rewards_margins"] == 0
    assert steps[-1]["preferences"]["rewards_margins"] > 0.1
    assert all("preferences" not in line for line in metrics(whole, "step") if line["stage"] == "first")
    first, *_, last = metrics(whole, "evaluation")
    assert first["accuracy"] == first["preferences"]["rewards_accuracies"] == 0.5 and last["accuracy"] > 0.9
    assert last["preferences"]["pairs"] == first["preferences"]["pairs"] >= 5
    assert last["loss"] < first["loss"] == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("step", [2, 4, 8])
def test_resumed_in_either_stage_it_ends_bit_for_bit_the_same(
    folder: Path, whole: Path, tmp_path: Path, step: int
) -> None:
    copy_interrupted(whole, tmp_path / "run", step)
    train(load_recipe(stages(folder)), tmp_path / "run")
    assert_same(tmp_path / "run", whole)


def precomputing(folder: Path, **data: Any) -> dict[str, Any]:
    values = stages(folder)
    values["stages"][1] |= {"precompute_ref_log_probs": True}
    values["stages"][1]["data"] |= data
    return values


@pytest.fixture(scope="module")
def precomputed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("precomputed") / "run"
    train(load_recipe(precomputing(folder)), run)
    return run


def same_numbers(run: Path, whole: Path) -> None:
    """Of two programs that add up in another order."""
    for own, other in zip(metrics(run, "step"), metrics(whole, "step"), strict=True):
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-6)
        for name, value in other.get("preferences", {}).items():
            assert value is None or own["preferences"][name] == pytest.approx(value, abs=1e-5)
    ours, theirs = load_adapter(run / "adapter")[1], load_adapter(whole / "adapter")[1]
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4 * float(np.abs(array).max()))


def test_what_the_reference_thinks_may_be_computed_once(precomputed: Path, whole: Path) -> None:
    same_numbers(precomputed, whole)
    [kept] = (precomputed / "references").iterdir()
    arrays_of = load(kept.joinpath("step-00000000", "log_probs.safetensors").read_bytes())
    assert arrays_of["0"].min() < -1 and arrays_of["0"].max() == 0  # log-probabilities, and zeros for other tokens


@pytest.mark.parametrize("references", ["kept", "gone", "damaged"])
def test_a_resumed_run_has_the_same_reference(folder: Path, precomputed: Path, tmp_path: Path, references: str) -> None:
    run = tmp_path / "run"
    copy_interrupted(precomputed, run, 8)
    shutil.rmtree(run / "references", ignore_errors=True)
    if references != "gone":
        shutil.copytree(precomputed / "references", run / "references")
    if references == "damaged":
        [file] = run.glob("references/*/*/log_probs.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    notes: list[str] = []
    train(load_recipe(precomputing(folder)), run, listener=lambda e: notes.append(getattr(e, "text", "")))
    assert any("The reference reads" in note for note in notes) == (references != "kept")
    assert_same(run, precomputed)


@pytest.mark.parametrize("options", ["padded", "lengths", "devices"])
def test_every_sequence_has_its_own_reference(folder: Path, tmp_path: Path, options: str) -> None:
    data: dict[str, Any] = {"padded": {"pack": False}, "lengths": {"pack": False, "num_length_buckets": 2}}.get(
        options, {}
    )
    once, always = precomputing(folder, **data), precomputing(folder, **data)
    if options == "devices":
        for values in (once, always):
            values["hardware"] = {"backend": "cpu", "devices": 4, "mesh": {"data": 2, "fsdp": 2}}
    del always["stages"][1]["precompute_ref_log_probs"]
    train(load_recipe(once), tmp_path / "once")
    train(load_recipe(always), tmp_path / "always")
    same_numbers(tmp_path / "once", tmp_path / "always")


def test_kto_learns_which_answers_are_good(folder: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe(folder, "labels.jsonl", train={"loss": "kto", "steps": 12})), tmp_path / "run")
    steps, evaluations = metrics(tmp_path / "run", "step"), metrics(tmp_path / "run", "evaluation")
    assert steps[0]["loss"] == 0.5 and steps[0]["preferences"]["kl"] == 0
    assert steps[-1]["preferences"]["rewards_chosen"] > steps[-1]["preferences"]["rewards_rejected"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] and evaluations[-1]["accuracy"] > 0.8


def test_an_ipo_stage_after_sft_is_not_called_diverged(folder: Path, tmp_path: Path) -> None:
    values = stages(folder)
    values["stages"][1] |= {"loss": "ipo", "steps": 14, "learning_rate": 1e-4}
    train(load_recipe(values), tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run", "step") if line["stage"] == "second"]
    assert len(losses) == 14 and losses[0] == pytest.approx(25, rel=1e-5) and losses[-1] > 10


def test_labels_are_learned_without_an_estimate_too(folder: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe(folder, "labels.jsonl", train={"loss": "apo_zero_unpaired"})), tmp_path / "run")
    first, *_, last = metrics(tmp_path / "run", "evaluation")
    assert first["loss"] == pytest.approx(0.5, abs=1e-6) and last["loss"] < first["loss"]


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_are_all_the_same_are_refused(label: bool, folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    file = tmp_path / "same.jsonl"
    file.write_text("".join(f"{json.dumps({**row, 'label': label})}\n" for row in rows))
    asked = load_recipe(recipe(folder, str(file), train={"loss": "kto"}))
    with pytest.raises(TrilloraError, match="there is nothing to compare them with"):
        train(asked, tmp_path / "run")
    [stage] = stages_of(asked)
    verdict = inspect(stage.recipe).verdict
    assert not verdict.ready and "nothing to compare" in verdict.what


def test_held_out_answers_may_all_be_bad_ones(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    (tmp_path / "bad.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows if not row["label"]))
    values = recipe(folder, "labels.jsonl", train={"loss": "kto"})
    values["data"] = {"path": str(folder / "labels.jsonl"), "validation": str(tmp_path / "bad.jsonl")}
    train(load_recipe(values), tmp_path / "run")
    assert metrics(tmp_path / "run", "evaluation")[-1]["perplexity"] == "nan"  # of no answer


def test_the_evaluation_loss_does_not_depend_on_the_batches(folder: Path, tmp_path: Path) -> None:
    found = []
    for size in (1, 4):
        values = recipe(folder, train={"loss": "orpo", "steps": 3, "micro_batch_size": size, "learning_rate": 1e-3})
        train(load_recipe(values), tmp_path / f"run-{size}")
        found.append(metrics(tmp_path / f"run-{size}", "evaluation"))
    for one, other in zip(*found, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)  # sums of float32 in another order
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=2e-5)
    assert 1.1 < found[0][0]["perplexity"] < 1e4
    assert found[0][0]["perplexity"] == pytest.approx(math.exp(-found[0][0]["preferences"]["logps_chosen"]), rel=0.5)


def test_a_sweep_evaluates_each_adapter_with_its_own_beta(folder: Path, tmp_path: Path) -> None:
    values = recipe(folder, sweep={"beta": [0.1, 0.5]}, train={"learning_rate": 2e-3})
    notes: list[str] = []
    train(
        load_recipe(values),
        tmp_path / "sweep",
        listener=lambda e: notes.append(e.text) if isinstance(e, Note) else None,
    )
    together = [line for line in metrics(tmp_path / "sweep", "evaluation") if line["stage"] == "beta-0.5"]
    del values["sweep"]
    values["train"]["beta"] = 0.5
    train(load_recipe(values), tmp_path / "alone")
    alone = metrics(tmp_path / "alone", "evaluation")
    assert len(alone) == len(together) == 3
    for one, other in zip(together, alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        own, same = one["preferences"], other["preferences"]
        assert own["rewards_margins"] == pytest.approx(same["rewards_margins"], rel=1e-3, abs=1e-6)
    assert any("with the most pairs right" in note for note in notes)  # losses of two betas are not comparable
    run = read_run(tmp_path / "sweep")
    assert run.best is not None and run.compares_betas
    assert re.search(rf"Best: {run.best.name} with \S+\s% of the pairs right", " ".join(summary(run)))


def test_betas_and_rates_are_compared_on_one_base(folder: Path, tmp_path: Path) -> None:
    values = recipe(folder, sweep={"beta": [0.1, 0.5], "learning_rate": [2e-3, 1e-2], "keep": "all"})
    train(load_recipe(values), tmp_path / "sweep")
    names = [f"rate-{rate}_beta-{beta}" for rate in ("0.002", "0.01") for beta in ("0.1", "0.5")]
    assert sorted(path.name for path in (tmp_path / "sweep" / "adapters").iterdir()) == sorted(names)
    del values["sweep"]
    values["train"] |= {"beta": 0.5, "learning_rate": 2e-3}
    train(load_recipe(values), tmp_path / "alone")
    _, alone = load_adapter(tmp_path / "alone" / "adapter")
    _, own = load_adapter(tmp_path / "sweep" / "adapters" / "rate-0.002_beta-0.5")
    _, other = load_adapter(tmp_path / "sweep" / "adapters" / "rate-0.002_beta-0.1")
    for name, array in alone.items():
        limit = 2e-4 * float(np.abs(array).max())  # float32 in another order, over a few steps of Adam
        np.testing.assert_allclose(own[name], array, atol=limit)
        assert np.abs(other[name] - array).max() > 10 * limit


def test_the_learning_rate_of_pairs_is_found_too(folder: Path, tmp_path: Path) -> None:
    values = recipe(folder, train={"learning_rate": "auto", "steps": 16})
    train(load_recipe(values), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "group.json").read_text("utf-8"))
    assert summary["best"] and (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"loss": "dpo", "beta": 0}}, "train.beta cannot be 0"),
        ({"train": {"loss": "dpoo"}}, "did you mean dpo?"),
        ({"train": {"loss": ["dpo", "kto"]}}, "different rows"),
        ({"train": {"loss": ["dpo", "sft"], "loss_weights": [1.0]}}, "1 values for 2 losses"),
        ({"train": {"loss": "simpo", "ld_alpha": 0.5}}, "train.ld_alpha has no effect"),
        ({"train": {"loss": "orpo", "precompute_ref_log_probs": True}}, "because it has no reference"),
        ({"train": {"loss": "kto", "precompute_ref_log_probs": True}}, "kto compares mismatched answers too"),
        (
            {"train": {"loss": "dpo", "precompute_ref_log_probs": True}, "sweep": {"beta": [0.1, 0.2]}},
            "is for runs with one adapter, not for sweep",
        ),
        ({"train": {"loss": "cdpo"}}, "cdpo is dpo with train.label_smoothing, which is 0"),
        ({"train": {"loss": "exo_pair"}}, "needs train.label_smoothing above 0"),
        ({"train": {"loss": "sft"}, "sweep": {"beta": [0.1, 0.2]}}, "sweep.beta has no effect"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    values = recipe(folder)
    values["train"].pop("loss")
    for name, section in changes.items():
        values[name] = {**values.get(name, {}), **section}
    with pytest.raises(TrilloraError) as error:
        load_recipe(values)
    assert words in str(error.value)


def test_phases_cannot_compare_answers(folder: Path) -> None:
    values = recipe(folder)
    data = values.pop("data")
    values["phases"] = [{"name": name, "data": data} for name in ("one", "two")]
    with pytest.raises(TrilloraError, match="phases cannot have a loss of preferences"):
        load_recipe(values)


def test_a_loss_of_preferences_brings_its_own_rate_and_resets_the_optimizer(folder: Path) -> None:
    values = recipe(folder, train={"learning_rate": None})
    assert load_recipe(values).train.learning_rate == 2e-5
    two = stages(folder)
    del two["stages"][1]["learning_rate"]
    second = load_recipe(two).stages[1]
    assert second.learning_rate == 2e-5 and second.optimizer_state == "restart"
    assert load_recipe(json.loads(load_recipe(two).model_dump_json())) == load_recipe(two)


def test_dropout_is_off_and_a_run_says_so(folder: Path, tmp_path: Path) -> None:
    values = recipe(folder, lora={"rank": 4, "alpha": 8, "dropout": 0.5}, train={"steps": 1})
    notes: list[str] = []
    train(
        load_recipe(values), tmp_path / "run", listener=lambda e: notes.append(e.text) if isinstance(e, Note) else None
    )
    assert sum("dropout is off" in note for note in notes) == 1
    [step] = metrics(tmp_path / "run", "step")
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-7)  # with chance in it, it would not be


@pytest.mark.parametrize("are_swapped", [False, True])
def test_held_out_pairs_that_contradict_the_training_pairs_are_said_once(
    are_swapped: bool, folder: Path, tmp_path: Path
) -> None:
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    if are_swapped:
        pairs = [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    (tmp_path / "held-out.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    values = recipe(folder, train={"steps": 9, "learning_rate": 5e-3})
    values["data"] = {"path": str(folder / "pairs.jsonl"), "validation": str(tmp_path / "held-out.jsonl")}
    alarms: list[str] = []
    train(
        load_recipe(values),
        tmp_path / "run",
        listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None,
    )
    last = metrics(tmp_path / "run", "evaluation")[-1]["preferences"]
    assert (last["rewards_accuracies"] < 0.2) == are_swapped != (last["rewards_accuracies"] > 0.8)
    assert sum(SWAPPED in alarm for alarm in alarms) == are_swapped
