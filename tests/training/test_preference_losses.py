"""Losses of preferences compared with TRL's trainers: the same tokens, loss, metrics and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import preference_formulas
import pytest
import torch
from peft import PeftModel
from preference_formulas import Options
from transformers import AutoModelForCausalLM
from trl_reference import Kind, Row, TrlRun, labelled, pairs, text_pairs, trl_run, write_start

LOSS = 1e-6  # relative: float32 sums over tokens in another order
METRIC = 1e-5  # relative, and absolute for rewards, which are small differences of large sums
COSINE, NORM = 0.99999, 1e-4  # of gradients: float32, forward and backward

DEFAULTS = Options()


@dataclass(frozen=True)
class Case:
    """A loss by its name and options here and in TRL."""

    name: str
    trl: dict[str, Any]
    ours: Options = DEFAULTS
    kind: Kind = "dpo"
    loss: tuple[str, ...] = ()  # if not the name alone
    loss_weights: tuple[float, ...] | None = None
    rows: Callable[[], list[Row]] = field(default=lambda: pairs(4))

    @property
    def losses(self) -> tuple[str, ...]:
        return self.loss or (self.name,)


def dpo(name: str, **options: float) -> Case:
    return Case(name, {"loss_type": [name], **options}, Options(**options))


SMOOTHED = {"label_smoothing": 0.1}
CASES = (
    dpo("sigmoid"),
    dpo("hinge"),
    dpo("ipo", beta=0.5),
    dpo("robust", **SMOOTHED),
    dpo("exo_pair", **SMOOTHED),
    dpo("nca_pair"),
    dpo("bco_pair"),
    dpo("sppo_hard"),
    dpo("apo_zero"),
    dpo("apo_down"),
    dpo("discopop"),
    dpo("sigmoid_norm", beta=2.0),
    Case(
        "sigmoid and sft",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.7]},
        loss=("sigmoid", "sft"),
        loss_weights=(0.5, 0.7),
    ),
    Case("ld_alpha", {"ld_alpha": 0.3}, Options(ld_alpha=0.3), loss=("sigmoid",)),
    Case("ld_alpha of means", {"loss_type": ["ipo"], "ld_alpha": 0.3}, Options(ld_alpha=0.3), loss=("ipo",)),
    Case("texts", {}, loss=("sigmoid",), rows=lambda: text_pairs(4)),
    Case("cpo", {**SMOOTHED, "cpo_alpha": 0.3}, Options(**SMOOTHED, cpo_alpha=0.3), "cpo"),
    Case(
        "simpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
        Options(beta=2.0, gamma=0.8),
        "cpo",
    ),
    # TRL adds the loss of the prompts, the paper and we do not; without prompts there is no difference.
    Case("orpo", {"beta": 0.4}, Options(beta=0.4), "orpo", rows=lambda: text_pairs(4, prompts=False)),
    Case(
        "kto",
        {"desirable_weight": 1.3, "undesirable_weight": 0.7},
        Options(desirable_weight=1.3, undesirable_weight=0.7),
        "kto",
        rows=lambda: labelled(pairs(4)),
    ),
    Case("apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}, kind="kto", rows=lambda: labelled(pairs(4))),
)
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def theirs(start: Path) -> Callable[[Case], TrlRun]:
    """TRL's first step."""
    runs: dict[str, TrlRun] = {}

    def run(case: Case) -> TrlRun:
        if case.name not in runs:
            runs[case.name] = trl_run(start, case.kind, case.rows(), **case.trl)
        return runs[case.name]

    return run


def assert_gradients_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) == 28
    largest = max(np.linalg.norm(gradient) for gradient in theirs.values())
    for name, expected in theirs.items():
        a, b = (np.asarray(each, np.float64).ravel() for each in (ours[name], expected))
        assert np.linalg.norm(b) > 1e-4 * largest, name  # so that its direction is more than rounding
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= COSINE, name
        assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=NORM), name


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_formulas_are_those_of_trl(case: Case, start: Path, theirs: Callable[[Case], TrlRun]) -> None:
    """The independent reference: from PEFT's log-probabilities, one row after another."""
    base = AutoModelForCausalLM.from_pretrained(start / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, start / "adapter", is_trainable=True)
    run = theirs(case)
    [batch] = run.batches
    if case.kind == "kto":
        assert True in batch.labels and False in batch.labels
        answers = preference_formulas.answers_of(model, batch)
        others = preference_formulas.answers_of(model, batch.others) if batch.others else []
        loss = preference_formulas.label_loss(case.name, answers, batch.labels, others, case.ours)
    else:
        found = preference_formulas.pairs_of(model, batch)
        loss = preference_formulas.pair_loss(case.losses, found, case.ours, case.loss_weights)
        metrics = preference_formulas.pair_metrics(case.losses[0], found, case.ours)
        for name, value in metrics.items():
            assert value == pytest.approx(run.metrics[0][name], rel=METRIC, abs=METRIC), name
    assert loss.item() == pytest.approx(run.losses[0], rel=LOSS)
    loss.backward()
    gradients = {n.replace(".default.", "."): p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    assert_gradients_equal(gradients, run.gradients)
