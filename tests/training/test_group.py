"""Several adapters trained together on one base: each ends as if it had been trained alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from dose import FULL, slow_case
from safetensors.numpy import load, load_file
from tiny_run import checkpoints_of, metrics

import trillora
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.events import AdapterEnded, AdapterStep, Event, Note, Scored, ignore_events
from trillora.generation.generator import Generator
from trillora.recipe.load import load_recipe
from trillora.step.group_plan import Segment, best, halvings, planned_widths, score, segments, selections
from trillora.training.entries.stepper import Call, plan_calls
from trillora.training.loop import Diverged
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

ROUNDING = 2e-4  # relative to the largest weight: float32 in another order, over a few steps of Adam
STEPS = 6
SPLIT = {"validation": 0.2, "test": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two files of chats. Two layers at full dose, which are scanned; test_expert_runs.py always has a
    sweep over scanned layers."""
    config = tiny_run.llama(num_layers=2 if FULL else 1)
    folder = tiny_run.write_both(tmp_path_factory.mktemp("group"), config, num_rows=40)
    lines = (folder / "chats.jsonl").read_text().splitlines()
    (folder / "other.jsonl").write_text("\n".join(line.replace("plus", "and") for line in lines[:25]) + "\n")
    return folder


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for tests of what becomes of the adapters."""
    return tiny_run.write_both(tmp_path_factory.mktemp("shallow"), tiny_run.llama(num_layers=1), num_rows=40)


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2, "batch_size": 4}
    values = tiny_run.recipe(folder, train={**train, **sections.pop("train", {})})
    values["data"]["split"] = SPLIT
    values["evaluate"] = {"num_samples": 0, "every_steps": 3}
    return {**values, **sections}


def phases(folder: Path, *, train: Any = None, **own: dict[str, Any]) -> dict[str, Any]:
    """Two phases with data, steps and schedules of their own. `own` adds options to a phase."""
    values = recipe(folder, train={"checkpoint_every": 2, "keep_checkpoints": 100, **(train or {})})
    data = {**values.pop("data"), "split": SPLIT}
    sums = {"name": "sums", "data": data, **own.get("sums", {})}
    pairs = {"name": "pairs", "data": {**data, "path": str(folder / "other.jsonl")}, "steps": 10, "schedule": "wsd"}
    return {**values, "phases": [sums, {**pairs, "learning_rate": 3e-3, **own.get("pairs", {})}]}


def run(out: Path, values: dict[str, Any]) -> list[Event]:
    events: list[Event] = []
    train(load_recipe(values), out, listener=events.append)
    return events


def assert_close(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, matrix in ours.items():
        assert matrix.shape == theirs[name].shape
        error = np.abs(matrix - theirs[name]).max()
        assert error <= ROUNDING * np.abs(theirs[name]).max(), (name, error)


def test_a_sweep_equals_single_runs(folder: Path, tmp_path: Path) -> None:
    """Learning rates, ranks and seeds, with dropout: every adapter of the sweep equals a run of its own."""
    sweep = {"learning_rate": [1e-3, 1e-2], "rank": [2, 4], "keep": "all"}
    lora = {"alpha": 8, "dropout": 0.1}
    events = run(tmp_path / "together", recipe(folder, sweep=sweep, lora=lora))
    assert sum(isinstance(event, AdapterStep) for event in events) == 4 * STEPS
    for rate, rank in ((1e-2, 2), *([(1e-3, 4)] if FULL else [])):  # the first is padded
        own = recipe(folder, train={"learning_rate": rate}, lora={**lora, "rank": rank})
        run(tmp_path / f"{rate}-{rank}", own)
        name = f"rate-{rate:g}_rank-{rank}"
        assert_close(tmp_path / "together" / "adapters" / name, tmp_path / f"{rate}-{rank}" / "adapter")
        config = json.loads((tmp_path / "together" / "adapters" / name / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (rank, 8)
        found = {file.name for file in (tmp_path / "together" / "adapters" / name).iterdir()}
        assert {"README.md", "tokenizer.json", "chat_template.jinja", "checksums.json"} <= found


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A run of two phases without interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(out, phases(folder))


def test_phases_equal_single_runs(folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path) -> None:
    """The second phase is longer, and has other data, another rate and another schedule."""
    out, events = whole
    for name, path, own in (
        ("pairs", "other.jsonl", {"steps": 10, "schedule": "wsd", "learning_rate": 3e-3}),
        *([("sums", "chats.jsonl", {})] if FULL else []),
    ):
        values = recipe(folder, train=own)
        values["data"]["path"] = str(folder / path)
        run(tmp_path / name, values)
        assert_close(out / "adapters" / name, tmp_path / name / "adapter")
        # Losses and evaluations equal the single run's too.
        together = [line["loss"] for line in metrics(out, "adapter_step") if line["adapter"] == name]
        alone = [line["loss"] for line in metrics(tmp_path / name, "step")]
        assert together == pytest.approx(alone, rel=1e-4)
        ours, theirs = (
            [(line["step"], line["num_tokens"]) for line in metrics(where, "evaluation") if line["stage"] in stages]
            for where, stages in ((out, {name}), (tmp_path / name, {"train"}))
        )
        assert ours == theirs
    ended = [event for event in events if isinstance(event, AdapterEnded)]
    assert [(event.adapter, event.step, event.status) for event in ended] == [
        ("sums", 6, "finished"),
        ("pairs", 10, "finished"),
    ]


def test_each_adapter_is_loaded_by_its_name(whole: tuple[Path, list[Event]], tmp_path: Path) -> None:
    """With `trillora.load`. A phase is evaluated on its own test rows."""
    out, events = whole
    with pytest.raises(TrilloraError, match="several"):
        trillora.load(out)
    sums, pairs = (trillora.load(out, adapter=name, listener=ignore_events) for name in ("sums", "pairs"))
    [scored] = [event for event in events if isinstance(event, Scored)]
    expected = next(s.loss for s in scored.scores if (s.adapter, s.phase) == ("sums", "sums"))
    assert sums.evaluate(with_base=False).adapter.loss == pytest.approx(expected, rel=1e-4)
    assert sums._generator.model is not None and "adapter sums" in repr(sums)
    assert "| sums | chats.jsonl |" in (sums.export("merged", out=tmp_path / "exported") / "README.md").read_text()
    merged = sums.merge(pairs, out=tmp_path / "merged")
    assert [Path(each.name).name for each in merged.inputs] == ["sums", "pairs"]


def test_a_phase_is_evaluated_on_its_own_test_rows(whole: tuple[Path, list[Event]]) -> None:
    out, events = whole
    [scored] = [event for event in events if isinstance(event, Scored)]
    expected = next(s.loss for s in scored.scores if (s.adapter, s.phase) == ("sums", "sums"))
    result = evaluate(out, stage="sums", max_tokens=1)
    assert result.adapter.loss == pytest.approx(expected, rel=1e-4)
    for wrong in ({}, {"stage": "none"}):
        with pytest.raises(TrilloraError, match=r"several adapters|of its own|no stage"):
            evaluate(out, **wrong)
    with pytest.raises(TrilloraError, match="several adapters"):
        Generator.open(str(out))


def test_phases_leave_scores_and_a_summary(whole: tuple[Path, list[Event]]) -> None:
    out, events = whole
    [scored] = [event for event in events if isinstance(event, Scored)]
    assert scored.rows == "test"
    losses = {(score.adapter, score.phase): score.loss for score in scored.scores}
    assert losses.keys() == {(a, p) for a in ("base", "sums", "pairs") for p in ("sums", "pairs")}
    assert losses["sums", "sums"] < losses["base", "sums"] and losses["pairs", "pairs"] < losses["base", "pairs"]
    summary = json.loads((out / "group.json").read_text())
    assert summary["kind"] == "phases" and summary["best"] is None
    assert [adapter["folder"] for adapter in summary["adapters"]] == ["adapters/sums", "adapters/pairs"]
    assert (out / "report.html").exists() and not (out / "adapter").exists()
    with pytest.raises(TrilloraError, match="finished run"):
        run(out, {"model": "smollm2", "data": "x.jsonl"})


@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_phases_resumed_from_any_checkpoint_end_the_same(
    folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path, step: int
) -> None:
    """Bit for bit: while both are trained, at the end of the first, and when only the second is left."""
    if step != 4 and not FULL:
        pytest.skip("only with TRILLORA_DOSE=full: each is a complete run")
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    shutil.rmtree(out / "adapters")
    (out / "group.json").unlink()
    (out / "saved.json").unlink()
    checkpoints_of(out).remove_after(step)
    events = run(out, phases(folder))
    assert any(isinstance(event, Note) and f"from step {step} of 10" in event.text for event in events)
    assert metrics(out) == metrics(whole[0])
    for name in ("sums", "pairs"):
        file = f"adapters/{name}/adapter_model.safetensors"
        assert (out / file).read_bytes() == (whole[0] / file).read_bytes()
    last, expected = (checkpoints_of(where).read(10) for where in (out, whole[0]))
    assert last["state.safetensors"] == expected["state.safetensors"]
    assert last["adapters.safetensors"] == expected["adapters.safetensors"]


def test_a_checkpoint_has_the_arrays_of_every_adapter_that_is_trained(whole: tuple[Path, list[Event]]) -> None:
    """By the adapter's name. The first phase ends at step 6, and then only its weights are left."""
    early, late = (checkpoints_of(whole[0]).read(step) for step in (4, 8))
    names = [{name.partition("/")[0] for name in load(files["state.safetensors"])} for files in (early, late)]
    assert names == [{"sums", "pairs"}, {"pairs"}]
    kept = {name.partition("/")[0] for name in load(late["adapters.safetensors"])}
    assert kept == {"sums", "pairs"}


def test_a_run_of_other_phases_is_not_resumed(folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    shutil.rmtree(out / "adapters")
    (out / "group.json").unlink()
    values = phases(folder)
    values["phases"][0]["name"] = "others"
    with pytest.raises(TrilloraError, match="is of other adapters: sums, pairs"):
        train(load_recipe(values), out, accept_changes=True)


def test_a_phase_that_diverges_stops_and_the_others_continue(
    folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    bad: dict[str, Any] = {"learning_rate": 1e5, "schedule": "constant", "warmup_steps": 0, "max_grad_norm": 1e9}
    values = {**phases(folder, train={"max_bad_steps": 2}, sums=bad), "merge": {"method": "ties"}}
    with pytest.raises(Diverged, match="sums diverged; the adapters of the other phases are written"):
        run(tmp_path / "run", values)
    summary = json.loads((tmp_path / "run" / "group.json").read_text())
    assert [(a["status"], a["folder"]) for a in summary["adapters"]] == [
        ("diverged", None),
        ("finished", "adapters/pairs"),
    ]
    assert_close(tmp_path / "run" / "adapters" / "pairs", whole[0] / "adapters" / "pairs")


@pytest.mark.parametrize("method", ["ties", slow_case("cat")])
def test_phases_are_merged_and_scored(folder: Path, tmp_path: Path, method: str) -> None:
    """The merged adapter may have a larger rank than the phases."""
    events = run(tmp_path / "run", {**phases(folder), "merge": {"method": method}})
    [scored] = [event for event in events if isinstance(event, Scored)]
    losses = {(score.adapter, score.phase): score.loss for score in scored.scores}
    assert losses["merged", "sums"] < losses["base", "sums"] and losses["merged", "pairs"] < losses["base", "pairs"]
    summary = json.loads((tmp_path / "run" / "group.json").read_text())
    assert summary["merged"]["method"] == method and summary["merged"]["rank"] == (8 if method == "cat" else 4)
    facts = json.loads((tmp_path / "run" / "adapter" / "merge.json").read_text())
    assert facts["adapter"] == str(tmp_path / "run" / "adapter")
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if "merged" in path.name) == []


def test_fewer_adapters_at_once_give_the_same_result(
    folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    run(tmp_path / "run", phases(folder, train={"adapters_at_once": 1, "micro_batch_size": 2}))
    for name in ("sums", "pairs"):
        assert_close(tmp_path / "run" / "adapters" / name, whole[0] / "adapters" / name)


@pytest.mark.parametrize("mesh", [slow_case({"data": 2, "fsdp": 2}), {"adapter": 2, "data": 2}], ids=str)
def test_a_mesh_gives_the_same_result(
    folder: Path, whole: tuple[Path, list[Event]], tmp_path: Path, mesh: dict[str, int]
) -> None:
    """Sequences over the devices, or adapters over groups of devices."""
    values = phases(folder)
    values["hardware"] = {"devices": 4, "mesh": mesh}
    run(tmp_path / "run", values)
    for name in ("sums", "pairs"):
        assert_close(tmp_path / "run" / "adapters" / name, whole[0] / "adapters" / name)


def test_the_best_of_a_sweep_is_the_adapter_of_the_run(shallow: Path, tmp_path: Path) -> None:
    events = run(tmp_path / "run", recipe(shallow, sweep={"learning_rate": [1e-5, 1e-2]}))
    summary = json.loads((tmp_path / "run" / "group.json").read_text())
    losses = {adapter["name"]: adapter["best_loss"] for adapter in summary["adapters"]}
    assert summary["best"] == min(losses, key=losses.__getitem__) == "rate-0.01"
    by_name = {adapter["name"]: adapter for adapter in summary["adapters"]}
    checksums = json.loads((tmp_path / "run" / "adapter" / "checksums.json").read_text())
    assert by_name["rate-0.01"]["step"] == by_name["rate-0.01"]["best_step"] == checksums["step"]
    hint = "The best learning rate, 1e-2, is the highest that was tried; try higher."
    assert Note(hint) in events and hint in (tmp_path / "run" / "report.html").read_text("utf-8")
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "adapters").exists()


def test_auto_drops_learning_rates_until_one_is_left(shallow: Path, tmp_path: Path) -> None:
    values = recipe(shallow, train={"learning_rate": "auto", "steps": 20, "warmup_steps": 0})
    events = run(tmp_path / "run", values)
    ended = [event for event in events if isinstance(event, AdapterEnded)]
    assert [event.status for event in ended].count("dropped") == 7
    assert ended[-1].status == "finished" and ended[-1].step == 20
    summary = json.loads((tmp_path / "run" / "group.json").read_text())
    assert summary["best"] == ended[-1].adapter
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sweep": {"learning_rate": [1e-3]}}, "nothing to compare"),
        ({"sweep": {"learning_rate": [1e-3, 1e-3]}}, "the same value twice"),
        ({"sweep": {"seed": list(range(65))}}, "the limit is 64"),
        ({"sweep": {"rank": [0, 4]}}, "sweep.rank"),
        ({"sweep": {"seed": [1, 2]}, "train": {"learning_rate": "auto"}}, "both sweep and train.learning_rate: auto"),
        ({"merge": {"method": "ties"}}, "only to a recipe with phases"),
        (
            {
                "merge": {},
                "lora": {"dora": True},
                "data": None,
                "phases": [{"name": n, "data": "x.jsonl"} for n in "ab"],
            },
            "cannot be merged",
        ),
        ({"train": {"adapters_at_once": 2}}, "several adapters"),
        ({"sweep": {"seed": [1, 2]}, "stages": [{"name": "a", "data": "x.jsonl"}], "data": None}, "with stages"),
    ],
)
def test_recipes_of_groups_that_cannot_be_trained(folder: Path, change: dict[str, Any], what: str) -> None:
    with pytest.raises(TrilloraError, match=what):
        load_recipe({**recipe(folder), **change})


def test_a_phase_without_rows_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    values = phases(folder, pairs={"data": str(tmp_path / "empty.jsonl")})
    with pytest.raises(TrilloraError, match=r"no rows|empty"):
        run(tmp_path / "run", values)
    assert not (tmp_path / "run" / "adapters").exists()


def test_a_sweep_without_held_out_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    values = recipe(folder, sweep={"seed": [1, 2]})
    values["data"] = {"path": values["data"]["path"]}
    with pytest.raises(TrilloraError, match="holds out no rows"):
        run(tmp_path / "run", values)


def test_calls_and_widths() -> None:
    assert plan_calls([0, 1, 2, 4, 5], 6, [4, 2]) == [Call([0, 1, 2, 4], []), Call([5], [0])]
    assert planned_widths([100, 100, 200, 400], [], at_once=4, multiple=1) == [2, 1]
    assert planned_widths([200] * 8, selections(200), at_once=8, multiple=2) == [4, 2]
    assert segments([100, 100, 200], []) == [Segment(3, 100), Segment(1, 100)]
    assert sum(segment.num_steps for segment in segments([1000] * 8, selections(1000))) == 1000
    assert halvings(8, 1) == [8, 4, 2, 1] and halvings(6, 2) == [6, 4, 2]


def test_learning_rates_are_judged_by_their_latest_losses() -> None:
    assert [selection.keep for selection in selections(1000)][-1] == 1
    assert selections(3)[-1].step == 3
    assert score([9.0, 9.0, 2.0, 4.0]) == 3.0 and score([]) == float("inf") == score([1.0, None])
    assert best([3.0, 1.0, 2.0, 1.0], 2) == [1, 3] and best([1.0, 1.0], 1) == [1]
