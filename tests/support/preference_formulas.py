"""The losses of preferences by their definitions: from the log-probabilities of one answer after another, without
padding, batches and chunks. PyTorch differentiates them, in float64 if the log-probabilities are.

    chosen = Answer(policy=torch.tensor([-1.0, -2.0]), reference=torch.tensor([-1.5, -2.5]))    # ratio 1
    rejected = Answer(policy=torch.tensor([-3.0]), reference=torch.tensor([-2.0]))              # ratio -1
    pair_loss(["sigmoid"], [(chosen, rejected)], Options(beta=0.5))                             # log(1 + exp(-0.5 * 2))

Names and options are a recipe's (`train.loss`). `answers_of` gives the answers of a model with PEFT's adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu
from torch.special import expit
from trl_reference import Batch

TAU = 0.05  # of discopop


@dataclass(frozen=True)
class Options:
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 1.0
    ld_alpha: float = 1.0
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class Answer:
    """The log-probability of each token of an answer, and how much the token counts in the ratio (None: all by one)."""

    policy: Tensor
    reference: Tensor
    weights: Tensor | None = None

    @property
    def sum(self) -> Tensor:
        return self.policy.sum()

    @property
    def mean(self) -> Tensor:
        return self.policy.mean()

    @property
    def ratio(self) -> Tensor:
        ratios = self.policy - self.reference
        return ratios.sum() if self.weights is None else ratios @ self.weights

    @property
    def mean_ratio(self) -> Tensor:
        return self.ratio / len(self.policy)


Pair = tuple[Answer, Answer]  # chosen, rejected


def _smoothed(margin: Tensor, o: Options) -> Tensor:
    """The loss of a pair that is labelled the wrong way round with the probability `label_smoothing`."""
    return -(1 - o.label_smoothing) * logsigmoid(margin) - o.label_smoothing * logsigmoid(-margin)


def _margin(chosen: Answer, rejected: Answer, o: Options) -> Tensor:
    return o.beta * (chosen.ratio - rejected.ratio)


def _exo(margin: Tensor, epsilon: float) -> Tensor:
    """KL divergence from the model's preference to the label's, (1 - epsilon, epsilon)."""
    p = torch.stack([margin, -margin])
    label = torch.tensor([1 - epsilon, epsilon], dtype=margin.dtype)
    return (expit(p) * (logsigmoid(p) - label.log())).sum()


def _discopop(margin: Tensor) -> Tensor:
    share = expit(margin / TAU)
    return (1 - share) * -logsigmoid(margin) + share * torch.exp(-margin)


def _log_odds(answer: Answer) -> Tensor:
    """log(p / (1 - p)), where p is the geometric mean of the probabilities of the tokens."""
    return answer.mean - torch.log(-torch.expm1(answer.mean))


PAIR_LOSSES: dict[str, Callable[[Answer, Answer, Options], Tensor]] = {
    "sigmoid": lambda c, r, o: _smoothed(_margin(c, r, o), o),
    "hinge": lambda c, r, o: relu(1 - _margin(c, r, o)),
    "ipo": lambda c, r, o: (c.mean_ratio - r.mean_ratio - 1 / (2 * o.beta)) ** 2,
    "robust": lambda c, r, o: (
        -((1 - o.label_smoothing) * logsigmoid(_margin(c, r, o)) - o.label_smoothing * logsigmoid(-_margin(c, r, o)))
        / (1 - 2 * o.label_smoothing)
    ),
    "exo_pair": lambda c, r, o: _exo(_margin(c, r, o), o.label_smoothing),
    "nca_pair": lambda c, r, o: (
        -logsigmoid(o.beta * c.ratio) - (logsigmoid(-o.beta * c.ratio) + logsigmoid(-o.beta * r.ratio)) / 2
    ),
    "bco_pair": lambda c, r, o: -logsigmoid(o.beta * c.ratio) - logsigmoid(-o.beta * r.ratio),
    "sppo_hard": lambda c, r, o: (c.ratio - 1 / (2 * o.beta)) ** 2 + (r.ratio + 1 / (2 * o.beta)) ** 2,
    "apo_zero": lambda c, r, o: expit(-o.beta * c.ratio) + expit(o.beta * r.ratio),
    "apo_down": lambda c, r, o: expit(o.beta * c.ratio) + expit(-_margin(c, r, o)),
    "discopop": lambda c, r, o: _discopop(_margin(c, r, o)),
    "sigmoid_norm": lambda c, r, o: _smoothed(o.beta * (c.mean_ratio - r.mean_ratio), o),
    "cpo": lambda c, r, o: _smoothed(o.beta * (c.sum - r.sum), o),
    "simpo": lambda c, r, o: _smoothed(o.beta * (c.mean - r.mean) - o.gamma, o),
    "orpo": lambda c, r, o: -o.beta * logsigmoid(_log_odds(c) - _log_odds(r)),
}


def pair_loss(
    names: Sequence[str], pairs: Sequence[Pair], o: Options, loss_weights: Sequence[float] | None = None
) -> Tensor:
    """The sum of the losses, each the mean over the pairs; `sft` is the mean over the tokens of chosen answers."""
    with_chosen = {"sft": 1.0, "cpo": o.cpo_alpha, "orpo": 1.0}
    pairs = [_with_lengths(pair, o) for pair in pairs]
    chosen_loss = -torch.cat([chosen.policy for chosen, _ in pairs]).mean()
    total = torch.zeros_like(chosen_loss)
    for name, weight in zip(names, loss_weights or [1.0] * len(names), strict=True):
        total = total + weight * with_chosen.get(name, 0.0) * chosen_loss
        if name != "sft":
            total = total + weight * torch.stack([PAIR_LOSSES[name](*pair, o) for pair in pairs]).mean()
    return total


def _with_lengths(pair: Pair, o: Options) -> Pair:
    """Tokens after the length of the shorter answer count `ld_alpha`."""
    shorter = min(len(answer.policy) for answer in pair)

    def weighted(answer: Answer) -> Answer:
        weights = torch.full_like(answer.reference, o.ld_alpha)
        weights[:shorter] = 1
        return dataclasses.replace(answer, weights=weights)

    chosen, rejected = map(weighted, pair)
    return chosen, rejected


def pair_metrics(name: str, pairs: Sequence[Pair], o: Options) -> dict[str, float]:
    """By TRL's names. Rewards without a reference are the log-probabilities that the loss compares, times beta."""
    pairs = [_with_lengths(pair, o) for pair in pairs]

    def values(what: str) -> tuple[Tensor, Tensor]:
        chosen, rejected = (
            torch.stack([getattr(answer, what) for answer in answers]) for answers in zip(*pairs, strict=True)
        )
        return chosen, rejected

    compared = {"cpo": "sum", "simpo": "mean", "orpo": "mean"}.get(name, "ratio")
    chosen, rejected = (o.beta * each for each in values(compared))
    log_probs = values("mean" if compared == "mean" else "sum")
    found = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "logps/chosen": log_probs[0].mean(),
        "logps/rejected": log_probs[1].mean(),
    }
    return {key: value.item() for key, value in found.items()}


def label_loss(
    name: str, answers: Sequence[Answer], labels: Sequence[bool], others: Sequence[Answer], o: Options
) -> Tensor:
    """The mean over all answers. `others` have the prompts of other rows; KTO subtracts their mean ratio."""
    usual = torch.tensor(0.0)
    if name == "kto":
        usual = torch.stack([other.ratio for other in others]).mean().clamp(min=0).detach()
    losses = [
        o.desirable_weight * expit(-o.beta * (answer.ratio - usual))
        if label
        else o.undesirable_weight * expit(o.beta * (answer.ratio - usual))
        for answer, label in zip(answers, labels, strict=True)
    ]
    return torch.stack(losses).mean()


# ---- answers of a model


def answers_of(model: Any, batch: Batch) -> list[Answer]:
    """Row after row, by a PEFT model. The reference is its base model."""
    found = []
    for tokens, mask in zip(batch.tokens, batch.masks, strict=True):
        with torch.no_grad(), model.disable_adapter():
            reference = _log_probs(model, tokens, mask)
        found.append(Answer(_log_probs(model, tokens, mask), reference))
    return found


def pairs_of(model: Any, batch: Batch) -> list[Pair]:
    answers = answers_of(model, batch)
    half = len(answers) // 2
    return list(zip(answers[:half], answers[half:], strict=True))


def _log_probs(model: Any, tokens: list[int], mask: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[:, 0][torch.tensor(mask[1:]).bool()]
