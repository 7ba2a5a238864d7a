"""`autotune.choose` with tables in place of the predictor and the compiler: what is compiled, chosen and said.

test_search.py has the search alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_run

from trillora.events import Chosen, ignore_events
from trillora.model.loading.source import load_config
from trillora.preflight.inputs import read_inputs
from trillora.recipe.load import load_recipe
from trillora.step import autotune
from trillora.step.build import assemble
from trillora.step.search import ERROR, Guess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"))


@dataclasses.dataclass
class TableOfSteps:
    """A predictor and a compiler that know each step by its remat and its mesh: seconds and bytes of each."""

    guessed: dict[tuple[str, str], Guess]
    compiled: dict[tuple[str, str], tuple[float, float]]
    error: float = ERROR
    knows_time: bool = True
    is_small: bool = False
    num_guessed: int = 0
    order: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)
    keys: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def build(self, recipe: Any, settings: Any, *rest: Any) -> Any:
        assembly = dataclasses.replace(assemble(recipe, settings, *rest), state_shapes={})  # count only the step
        self.keys[id(assembly)] = settings.remat, "split" if settings.mesh.fsdp > 1 else "whole"
        self.kept.append(assembly)  # so that its id stays its own
        return assembly

    def surely_fits(self, assembly: Any, limit: float) -> bool:
        return self.is_small

    def guess(self, assembly: Any) -> Guess:
        """Those that are not in the table are hopeless."""
        self.num_guessed += 1
        return self.guessed.get(self.keys[id(assembly)], Guess(1.0, 1e12))

    def compile(self, assembly: Any) -> tuple[Any, float]:
        key = self.keys[id(assembly)]
        self.order.append(key)
        return self.compiled[key][0], self.compiled[key][1]

    def seconds(self, assembly: Any, compiled: Any) -> float | None:
        return compiled


def by_table(
    folder: Path, steps: TableOfSteps, num_devices: int, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> tuple[Any, list[Any]]:
    train = {"steps": 2, "batch_size": num_devices, **sections.pop("train", {})}
    inputs = read_inputs(load_recipe(tiny_run.recipe(folder, train=train, **sections)), ignore_events)
    config, (stage,) = load_config(inputs.model), inputs.stages
    monkeypatch.setattr(autotune, "memory_limit", lambda devices: 1e9)
    chosen: list[Any] = []
    plan = autotune.choose(
        stage.recipe,
        config,
        jax.devices("cpu")[:num_devices],
        10**6,
        chosen.append,
        compiler=steps.compile,
        predictor=steps,
        build=steps.build,
    )
    return plan, [event for event in chosen if isinstance(event, Chosen)]


def test_hopeless_candidates_are_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guessed = {
        ("none", "whole"): Guess(1.0, 5e9),
        ("linear", "whole"): Guess(1.1, 1.41e9),
        ("full", "whole"): Guess(2.0, 2e8),
    }
    steps = TableOfSteps(guessed, {("full", "whole"): (2.0, 2e8)})
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert steps.order == [("full", "whole")] and plan.settings.remat == "full" and plan.num_compiles == 1
    assert [attempt.fits for attempt in plan.tried] == [False, True], "the fastest that is too large is named"


def test_the_fastest_compiled_step_wins_and_the_reason_has_both_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed = {
        ("none", "whole"): Guess(1.0, 5e8),
        ("linear", "whole"): Guess(1.05, 3e8),
        ("full", "whole"): Guess(1.5, 2e8),
    }
    compiled = {("none", "whole"): (1.2, 5e8), ("linear", "whole"): (1.1, 3e8)}
    steps = TableOfSteps(guessed, compiled)
    plan, chosen = by_table(folder, steps, 1, monkeypatch)
    assert steps.order == [("none", "whole"), ("linear", "whole")] and plan.settings.remat == "linear"
    assert plan.compiled == 1.1 and plan.tried[-1].settings == plan.settings
    (event,) = [event for event in chosen if event.path == "engine.remat"]
    assert "1.1 s per step" in event.reason and "slower: micro-batch 1, remat none: 1.2 s" in event.reason


def test_a_policy_between_linear_and_full_is_chosen_where_it_is_the_fastest_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are guessed only if linear is too large."""
    guessed = {
        ("none", "whole"): Guess(1.0, 5e9),
        ("linear", "whole"): Guess(1.0, 2e9),
        ("wide", "whole"): Guess(1.1, 1.5e9),
        ("half", "whole"): Guess(1.2, 9e8),
        ("gate", "whole"): Guess(1.3, 7e8),
        ("attention", "whole"): Guess(1.4, 6e8),
        ("full", "whole"): Guess(1.5, 5e8),
    }
    compiled = {key: (guess.seconds, guess.needed) for key, guess in guessed.items()}
    steps = TableOfSteps(guessed, compiled)
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert plan.settings.remat == "half" and steps.num_guessed == 7
    guessed[("linear", "whole")] = Guess(1.0, 9e8)
    steps = TableOfSteps(guessed, {**compiled, ("linear", "whole"): (1.0, 9e8)})
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert plan.settings.remat == "linear" and steps.num_guessed == 3


def test_where_only_memory_is_known_the_first_that_fits_wins_and_hopeless_steps_are_not_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {("none", "whole"): 1.5e9, ("linear", "whole"): 1.3e9, ("full", "whole"): 2e8}
    guessed = {key: Guess(0.0, needed) for key, needed in needs.items()}
    steps = TableOfSteps(guessed, {key: (1.0, needed) for key, needed in needs.items()}, knows_time=False)
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert steps.order == [("linear", "whole"), ("full", "whole")] and plan.settings.remat == "full"
    assert plan.num_compiles == 2 and [attempt.is_compiled for attempt in plan.tried] == [False, True, True]
    guessed[("none", "whole")] = Guess(0.0, 5e8)
    steps = TableOfSteps(guessed, {("none", "whole"): (1.0, 5e8)}, knows_time=False)
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert steps.num_guessed == 1 and steps.order == [("none", "whole")], "starting is not slowed down by other guesses"
    steps = TableOfSteps({}, {("none", "whole"): (1.0, 5e8)}, knows_time=False, is_small=True)
    plan, _ = by_table(folder, steps, 1, monkeypatch)
    assert steps.num_guessed == 0 and plan.settings.remat == "none"


def test_a_base_that_fits_is_whole_on_every_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: no share of the memory is forbidden to it. If it fits well, a split one is not even guessed."""
    both = [(remat, place) for remat in autotune.REMAT_ORDER for place in ("whole", "split")]
    for needed, num_guessed in ((8e8, 3), (9e8, 6)):  # of 9.7e8: it may be that 9e8 does not fit
        guessed = {(remat, place): Guess(1.0 + (place == "split"), needed) for remat, place in both}
        compiled = {key: (guess.seconds, guess.needed) for key, guess in guessed.items()}
        steps = TableOfSteps(guessed, compiled)
        plan, chosen = by_table(folder, steps, 8, monkeypatch)
        assert plan.settings.mesh.model_dump() == {"data": 8, "fsdp": 1, "tensor": 1}
        assert steps.num_guessed == num_guessed
        assert any(event.path == "hardware.mesh" and "per step" in event.reason for event in chosen)


def test_the_simulated_time_decides_between_a_whole_and_a_split_base(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole base leaves room only for full recomputation."""
    guessed = {
        ("none", "whole"): Guess(1.0, 2e9),
        ("linear", "whole"): Guess(1.0, 1.5e9),
        ("full", "whole"): Guess(1.4, 9e8),
        ("none", "split"): Guess(1.5, 1.5e9),
        ("linear", "split"): Guess(1.5, 8e8),
        ("full", "split"): Guess(2.0, 1e8),
    }
    compiled = {("full", "whole"): (1.4, 9e8), ("linear", "split"): (1.5, 8e8)}
    steps = TableOfSteps(guessed, compiled)
    plan, _ = by_table(folder, steps, 8, monkeypatch)
    assert (plan.settings.remat, plan.settings.mesh.data) == ("full", 8) and len(steps.order) == 2
    steps = TableOfSteps(guessed, {**compiled, ("linear", "split"): (1.3, 8e8)})
    plan, _ = by_table(folder, steps, 8, monkeypatch)
    assert (plan.settings.remat, plan.settings.mesh.fsdp) == ("linear", 8)


def test_a_smaller_loss_chunk_is_chosen_where_only_the_logits_are_too_much(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed = {("full", "whole"): Guess(1.0, 1.2e9, 4e8)}
    steps = TableOfSteps(guessed, {("full", "whole"): (1.0, 9e8)})
    plan, chosen = by_table(folder, steps, 1, monkeypatch, engine={"remat": "full"})
    usual = [event.value for event in chosen if event.path == "engine.loss_chunk"]
    assert len(usual) == 2 and plan.settings.loss_chunk == usual[1] == usual[0] // 4
    with pytest.raises(autotune.DoesNotFit):
        steps = TableOfSteps(guessed, {("full", "whole"): (1.0, 1.1e9)})
        by_table(folder, steps, 1, monkeypatch, engine={"remat": "full", "loss_chunk": 64})
