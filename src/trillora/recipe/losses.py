"""The losses that `train.loss` names: which rows each needs, whether it compares with a reference, and its numbers.

    LOSSES["sigmoid"].rows          # "pairs": rows with a chosen and a rejected answer
    canonical("dpo")                # "sigmoid", TRL's name for DPO's loss
    rows_of(["sigmoid", "sft"])     # "pairs"

The formulas are in `engine.preference.losses`, the names are TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from trillora.errors import nearest
from trillora.recipe.section import Section, conflict

# What a row is for: an answer to learn, two answers to compare, or an answer that is good or bad.
Rows = Literal["answers", "pairs", "labels"]
PREFERENCE_RATE = 2e-5
FILE_SUFFIX = ".py"  # of a loss that is a person's own


@dataclass(frozen=True)
class LossFacts:
    """What a recipe has to know about a loss."""

    rows: Rows
    has_reference: bool = True
    beta: float = 0.1  # the default
    options: tuple[str, ...] = ("beta",)  # of `train`, that have an effect on it


_MARGIN = ("beta", "ld_alpha")
LOSSES: dict[str, LossFacts] = {
    "sft": LossFacts("answers", has_reference=False, options=()),
    "sigmoid": LossFacts("pairs", options=(*_MARGIN, "label_smoothing")),
    "hinge": LossFacts("pairs", options=_MARGIN),
    "ipo": LossFacts("pairs", options=_MARGIN),
    "robust": LossFacts("pairs", options=(*_MARGIN, "label_smoothing")),
    "exo_pair": LossFacts("pairs", options=(*_MARGIN, "label_smoothing")),
    "nca_pair": LossFacts("pairs", options=_MARGIN),
    "bco_pair": LossFacts("pairs", options=_MARGIN),
    "sppo_hard": LossFacts("pairs", options=_MARGIN),
    "apo_zero": LossFacts("pairs", options=_MARGIN),
    "apo_down": LossFacts("pairs", options=_MARGIN),
    "discopop": LossFacts("pairs", options=_MARGIN),
    "sigmoid_norm": LossFacts("pairs", options=_MARGIN),
    "cpo": LossFacts("pairs", has_reference=False, options=("beta", "label_smoothing", "cpo_alpha")),
    "simpo": LossFacts("pairs", has_reference=False, beta=2.0, options=("beta", "label_smoothing", "gamma")),
    "orpo": LossFacts("pairs", has_reference=False),
    "kto": LossFacts("labels", options=("beta", "desirable_weight", "undesirable_weight")),
    "apo_zero_unpaired": LossFacts("labels", options=("beta", "desirable_weight", "undesirable_weight")),
}
ALIASES = {"dpo": "sigmoid", "cdpo": "sigmoid"}
NAMES = ("sft", "dpo", *(name for name in LOSSES if name != "sft"))
_OWN = LossFacts("pairs", options=("beta",))  # of a person's file


def canonical(name: str) -> str:
    return ALIASES.get(name, name)


def is_file(name: str) -> bool:
    """Whether a loss is a person's own, by its path."""
    return name.endswith(FILE_SUFFIX)


def facts_of(name: str) -> LossFacts:
    return _OWN if is_file(name) else LOSSES[canonical(name)]


def rows_of(names: Sequence[str]) -> Rows:
    """What the rows of these losses are for. `sft` together with others is about the chosen answers of pairs."""
    found = [facts_of(name).rows for name in names]
    return next((rows for rows in found if rows != "answers"), "answers")


def has_reference(names: Sequence[str]) -> bool:
    return any(facts_of(name).has_reference for name in names)


def default_beta(names: Sequence[str]) -> float:
    """Of the first loss that has one."""
    return next((facts_of(name).beta for name in names if "beta" in facts_of(name).options), 0.1)


LossName = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class LossOptions(Section):
    """What is minimized."""

    loss: LossName | Annotated[tuple[LossName, ...], Field(min_length=1, max_length=4)] = Field(
        default="sft",
        description="sft: the answers. dpo, ipo, simpo, cpo, orpo and others: pairs of a chosen and a rejected answer. "
        "kto: answers with a label. A list adds several up. my_loss.py: a function of your own.",
    )
    loss_weights: Annotated[tuple[Weight, ...], Field(min_length=1, max_length=4)] | None = Field(
        default=None, description="Factors of the losses in a list (default: 1 each)."
    )
    beta: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None,
        description="How close the model stays to the reference: with a smaller beta it moves further "
        "(default 0.1; simpo 2).",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of the pairs that may have their answers swapped by mistake."
    )
    gamma: float = Field(default=1.0, ge=0, le=1e6, description="simpo: the margin that a pair has to reach.")
    ld_alpha: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Weight of the tokens after the length of the shorter answer. Below 1, long answers gain less.",
    )
    cpo_alpha: float = Field(default=1.0, ge=0, le=1e6, description="cpo: weight of the loss of the chosen answers.")
    desirable_weight: float = Field(default=1.0, ge=0, le=1e6, description="kto: weight of the good answers.")
    undesirable_weight: float = Field(default=1.0, ge=0, le=1e6, description="kto: weight of the bad answers.")
    precompute_ref_log_probs: bool = Field(
        default=False,
        description="Compute the reference's log-probabilities of the answers once, before the stage, and not in every "
        "step. It saves time from the second epoch on.",
    )

    @property
    def losses(self) -> tuple[str, ...]:
        """The names, TRL's where there are several, and paths."""
        names = (self.loss,) if isinstance(self.loss, str) else self.loss
        return tuple(map(canonical, names))

    @property
    def rows(self) -> Rows:
        return rows_of(self.losses)

    @property
    def has_reference(self) -> bool:
        return has_reference(self.losses)

    @property
    def compares_others(self) -> bool:
        """Whether a batch also has every question with the answer of another row."""
        return "kto" in self.losses

    @property
    def strength(self) -> float:
        """Beta, or its default."""
        return default_beta(self.losses) if self.beta is None else self.beta


def with_preference_rate(value: object) -> Any:
    """Adds a learning rate to options that name a loss with preferences: answers are compared with a tenth of the rate
    that answers are learned with. TRL's default, 1e-6, is for training without LoRA."""
    if not isinstance(value, Mapping) or value.get("learning_rate") is not None:
        return value
    names = value.get("loss")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return value
    known = [name for name in names if is_file(name) or canonical(name) in LOSSES]
    return value if rows_of(known) == "answers" else {**value, "learning_rate": PREFERENCE_RATE}


def check_losses(train: LossOptions) -> None:
    """Raises the conflict of options that do not fit together."""
    names = train.losses
    for name in names:
        if not is_file(name) and name not in LOSSES:
            meant = nearest(name, NAMES)
            hint = f"did you mean {meant}? " if meant else ""
            what = f"train.loss: {name} is not a loss."
            raise conflict("loss", what, f"{hint}losses: {' '.join(NAMES)}; or the path of a .py file")
    if len(set(names)) < len(names):
        raise conflict("loss", "train.loss names the same loss twice.", "remove one, and use train.loss_weights")
    if len({facts_of(name).rows for name in names} - {"answers"}) > 1:
        what = "train.loss adds up a loss of pairs and a loss of labels, which need different rows."
        raise conflict("loss", what, "use one of them, or two stages")
    if "sft" in names and rows_of(names) == "labels":
        what = "train.loss cannot add sft to a loss of labels: bad answers would be learned."
        raise conflict("loss", what, "train the good answers in a stage of their own")
    if train.loss_weights is not None and len(train.loss_weights) != len(names):
        what = f"train.loss_weights has {len(train.loss_weights)} values for {len(names)} losses."
        raise conflict("loss_weights", what, "give one weight per loss, in their order")
    used = {option for name in names for option in facts_of(name).options}
    for option in LossOptions.model_fields:
        given = getattr(train, option) != LossOptions.model_fields[option].default
        if given and option not in (*used, "loss", "loss_weights", "precompute_ref_log_probs"):
            users = ", ".join(name for name, facts in LOSSES.items() if option in facts.options)
            what = f"train.{option} has no effect on train.loss: {', '.join(names)}. It is for {users}."
            raise conflict(option, what, f"remove train.{option}, or set train.loss to one of these")
    if train.precompute_ref_log_probs and (not train.has_reference or "kto" in names):
        compared = "kto compares mismatched answers too" if "kto" in names else "it has no reference"
        what = f"train.precompute_ref_log_probs cannot be used with train.loss: {', '.join(names)}, because {compared}."
        raise conflict("precompute_ref_log_probs", what, "remove it")
    if "exo_pair" in names and not train.label_smoothing:
        what = "train.loss: exo_pair needs train.label_smoothing above 0."
        raise conflict("label_smoothing", what, "set it to 0.001")
    if "cdpo" in ((train.loss,) if isinstance(train.loss, str) else train.loss) and not train.label_smoothing:
        what = "train.loss: cdpo is dpo with train.label_smoothing, which is 0."
        raise conflict("label_smoothing", what, "set it, for example to 0.1, or set train.loss to dpo")


def check_group(train: LossOptions, *, has_phases: bool, sweeps_beta: bool) -> None:
    """Raises the conflict of a loss with what is trained together."""
    if train.rows != "answers" and has_phases:
        what = "A recipe with phases cannot have a loss of preferences."
        raise conflict("train.loss", what, "use stages, or one run for each phase")
    if train.rows == "answers" and sweeps_beta:
        raise conflict("sweep.beta", "sweep.beta has no effect on train.loss: sft.", "remove it, or set train.loss")
