"""Losses of preferences compared with TRL's trainers: the same tokens, loss, metrics and gradients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import preference_formulas
import pytest
import torch
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from peft import PeftModel
from preference_engine import Engine
from preference_formulas import Options
from rendering import load
from transformers import AutoModelForCausalLM
from trl_reference import Batch, Kind, Row, TrlRun, labelled, pairs, text_pairs, trl_run, write_start

# Relative differences. Float32 rounds logits and sums to some 1e-7; losses and rewards are differences of sums.
LOSS = 2e-6
METRIC = 1e-5  # also absolute: rewards may be close to zero
COSINE, NORM = 1 - 1e-8, 2e-5  # of the gradient of each matrix
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
    rows: Callable[[int], list[Row]] = pairs
    has_equal_metrics: bool = True

    @property
    def losses(self) -> tuple[str, ...]:
        return self.loss or (self.name,)

    @property
    def train(self) -> dict[str, Any]:
        """The section of a recipe."""
        weights = {} if self.loss_weights is None else {"loss_weights": self.loss_weights}
        return {"loss": self.losses, **weights, **{k: v for k, v in vars(self.ours).items() if v != vars(DEFAULTS)[k]}}


def dpo(name: str, **options: float) -> Case:
    return Case(name, {"loss_type": [name], **options}, Options(**options))


SMOOTHED = {"label_smoothing": 0.1}
WEIGHTED = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
CASES = (
    dpo("sigmoid"),
    dpo("hinge"),
    dpo("ipo", beta=0.2),
    dpo("robust", **SMOOTHED),
    dpo("exo_pair", **SMOOTHED),
    dpo("nca_pair"),
    dpo("bco_pair"),
    dpo("sppo_hard"),
    dpo("apo_zero"),
    dpo("apo_down"),
    dpo("discopop"),
    dpo("sigmoid_norm", beta=0.5),
    Case(
        "sigmoid and sft",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.7]},
        loss=("sigmoid", "sft"),
        loss_weights=(0.5, 0.7),
    ),
    # TRL's metrics are of answers whose later tokens count less, as in the loss; ours are of whole answers.
    Case("ld_alpha", {"ld_alpha": 0.3}, Options(ld_alpha=0.3), loss=("sigmoid",), has_equal_metrics=False),
    Case(
        "ld_alpha of means",
        {"loss_type": ["ipo"], "ld_alpha": 0.3},
        Options(ld_alpha=0.3),
        loss=("ipo",),
        has_equal_metrics=False,
    ),
    Case("texts", {}, loss=("sigmoid",), rows=text_pairs),
    Case("cpo", {**SMOOTHED, "cpo_alpha": 0.3}, Options(**SMOOTHED, cpo_alpha=0.3), "cpo"),
    Case(
        "simpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
        Options(beta=2.0, gamma=0.8),
        "cpo",
    ),
    # TRL adds the loss of the prompts, the paper and we do not; without prompts there is no difference.
    Case("orpo", {"beta": 0.4}, Options(beta=0.4), "orpo", rows=lambda count: text_pairs(count, prompts=False)),
    Case("kto", WEIGHTED, Options(**WEIGHTED), "kto", rows=labelled),
    Case("apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}, kind="kto", rows=labelled),
)
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def engine(start: Path) -> Engine:
    return Engine(start)


@pytest.fixture(scope="module")
def theirs(start: Path) -> Callable[[Case], TrlRun]:
    """TRL's first step."""
    runs: dict[str, TrlRun] = {}

    def run(case: Case) -> TrlRun:
        if case.name not in runs:
            runs[case.name] = trl_run(start, case.kind, case.rows(4), **case.trl)
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
def test_formulas_equal_trl(case: Case, start: Path, theirs: Callable[[Case], TrlRun]) -> None:
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
        for name in metrics if case.has_equal_metrics else ():
            assert metrics[name] == pytest.approx(run.metrics[0][name], rel=METRIC, abs=METRIC), name
    assert loss.item() == pytest.approx(run.losses[0], rel=LOSS)
    loss.backward()
    gradients = {n.replace(".default.", "."): p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    assert_gradients_equal(gradients, run.gradients)


@pytest.mark.parametrize("rows", [pairs, text_pairs])
@pytest.mark.parametrize("kind", ["dpo", "orpo", "cpo", "kto"])
def test_tokens_and_masks_equal_trl(kind: Kind, rows: Callable[[int], list[Row]], start: Path, tmp_path: Path) -> None:
    """Of chats by a template whose answers end with the stop token, and of texts, after which both add it."""
    given = labelled(8, of=rows) if kind == "kto" else rows(8)
    [batch] = trl_run(start, kind, given, per_device_train_batch_size=8).batches
    expected = list(zip(batch.tokens, batch.masks, strict=True))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given), "utf-8")
    what = "labels" if kind == "kto" else "pairs"
    dataset = load(tmp_path / "rows.jsonl", chat_tokenizer("llama3"), tmp_path / "cache", 512, rows=what)
    documents = dataset.documents()
    ours = [documents[place].parts for place in range(len(documents))]
    if kind == "kto":
        assert tuple(part.weight > 0 for (part,) in ours) == batch.labels
    sides = list(zip(*ours, strict=True))
    found = [(part.tokens.tolist(), part.supervised.astype(int).tolist()) for side in sides for part in side]
    assert found == expected and len(found) == (8 if kind == "kto" else 16)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_first_step_equals_trl(case: Case, engine: Engine, theirs: Callable[[Case], TrlRun]) -> None:
    run = theirs(case)
    loss, metrics, gradients = engine.first_step(case.train, run.batches[0])
    assert loss == pytest.approx(run.losses[0], rel=LOSS)
    assert_gradients_equal(gradients, run.gradients)
    shared = metrics.keys() & run.metrics[0].keys()
    assert shared >= {f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected")}
    if case.has_equal_metrics:
        for name in shared:
            assert metrics[name] == pytest.approx(run.metrics[0][name], rel=METRIC, abs=METRIC), name


def test_orpo_learns_the_chosen_answers_and_trl_their_prompts_too(engine: Engine, start: Path) -> None:
    """TRL has the same odds ratio. The rest of its loss is the mean over all tokens of the chosen rows."""
    run = trl_run(start, "orpo", pairs(4), beta=0.4)
    [batch] = run.batches
    ratio_part = -0.4 * run.metrics[0]["log_odds_ratio"]
    assert run.losses[0] == pytest.approx(run.metrics[0]["nll_loss"] + ratio_part, rel=LOSS)
    chosen = Batch(batch.tokens[:4], [[1] * len(tokens) for tokens in batch.tokens[:4]], labels=(True,) * 4)
    assert engine.mean_loss(chosen) == pytest.approx(run.metrics[0]["nll_loss"], rel=LOSS)
    loss, metrics, _ = engine.first_step({"loss": "orpo", "beta": 0.4}, batch)
    answers = dataclasses.replace(chosen, masks=batch.masks[:4])
    assert loss == pytest.approx(engine.mean_loss(answers) + ratio_part, rel=LOSS)
    assert abs(engine.mean_loss(answers) - engine.mean_loss(chosen)) > 1e-3, "the prompts make a difference"
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"):
        assert metrics[name] == pytest.approx(run.metrics[0][name], rel=METRIC, abs=METRIC), name


@pytest.mark.parametrize(
    ("name", "continued"),
    [
        ("sigmoid", True),
        ("sigmoid", False),
        ("kto", False),
        slow_case("kto", True),
        slow_case("sigmoid and sft", False),
        slow_case("hinge", False),
        slow_case("simpo", False),
        slow_case("orpo", False),
    ],
)
def test_fifty_steps_equal_trl(name: str, continued: bool, engine: Engine, start: Path) -> None:
    """AdamW with weight decay and clipping, twelve times through four batches. A reference that is the adapter at the
    start stays what it was."""
    case = CASES[NAMES.index(name)]
    rows = labelled(16, of=text_pairs) if case.kind == "kto" else text_pairs(16, prompts=name != "orpo")
    options = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    run = trl_run(start, case.kind, rows, 50, continued=continued, **case.trl, **options)
    losses, adapter = engine.train({**case.train, **options}, run.batches, continued=continued)
    assert losses == pytest.approx(run.losses, rel=1e-4, abs=1e-5)  # rounding grows; the losses of hinge reach zero
    assert min(run.losses[-4:]) < 0.8 * run.losses[0], "the run learns"
    begun = engine.numbers(engine.adapter)
    for matrix, expected in run.adapter.items():
        change = np.abs(expected - begun[matrix]).max()
        assert change > 5e-3, matrix
        assert np.abs(adapter[matrix] - expected).max() < 1e-2 * change, matrix
