"""The adapter's options, and the layers that they apply to.

A pattern selects linear layers by name:

    q_proj, mlp.up_proj             the end of a name, in whole parts
    model.layers.3.mlp.up_proj      a full name: this layer alone
    *.layers.[0-3].*                a glob: * is any text, ? one character, [0-3] one of these
    re:.*\\.layers\\.\\d+\\.mlp\\..*    a regular expression, which must match the full name
    experts                         the weights of all experts

With rank 8, targets (q_proj, v_proj) and rank_pattern {*.layers.0.*: 4}, `adapted_layers` returns

    {"model.layers.0.self_attn.q_proj": LayerLora(rank=4, alpha=32.0), …, "model.layers.1…": LayerLora(rank=8, …), …}
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trillora.errors import TrilloraError, nearest

if TYPE_CHECKING:
    import torch

ALL_LINEAR = "all-linear"
EXPERTS = "experts"  # as a target: all parameters of experts
REGEX = "re:"
Initial = Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16"]
# A repeated group can make a regular expression take years, and every further repetition multiplies the time.
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?(?!:)|\\[1-9]")
_REPETITION = re.compile(r"[*+{?]")
_MAX_REPETITIONS, _MAX_LETTERS = 3, 300


class AdapterDoesNotFit(TrilloraError):
    """The adapter was made for another model."""


@dataclass(frozen=True)
class TrainedTokens:
    """The tokens whose rows of the embedding are trained (`parts/token_rows.py`)."""

    ids: tuple[int, ...]  # in increasing order
    first_new: int | None = None  # tokens from here on are new: they start at the mean. None: those without a base row
    modules: tuple[str, ...] | None = None  # that have rows; None: the embedding, and a head that is not tied


@dataclass(frozen=True)
class LoraSpec:
    """The adapter's options. Dropout does not apply to an adapted head, which is called for each chunk of the loss."""

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR  # "all-linear", or patterns
    exclude: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()  # (pattern, rank)
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    dora: bool = False
    init: Initial = "default"
    tokens: TrainedTokens | None = None  # whose embeddings are trained
    whole: tuple[str, ...] = ()  # modules that are trained as a whole
    num_tokens: int = 0  # rows of an embedding or head that is trained as a whole, if more than the base has
    file: str | None = field(default=None, compare=False)  # the adapter that has these options; None: the recipe

    @property
    def pissa(self) -> bool:
        return self.init != "default"

    @property
    def scale(self) -> float:
        """Of the layers that match no pattern."""
        return self.scale_of(LayerLora(self.rank, self.alpha))

    def scale_of(self, layer: LayerLora) -> float:
        return layer.alpha / (math.sqrt(layer.rank) if self.rslora else layer.rank)

    def in_file(self, layer: LayerLora) -> LayerLora:
        """Rank and alpha of a layer as PEFT sees them. PiSSA's initial matrices are stored too, at the same scale."""
        if not self.pissa:
            return layer
        return LayerLora(2 * layer.rank, layer.alpha * (math.sqrt(2) if self.rslora else 2))


@dataclass(frozen=True)
class LayerLora:
    """The options of one layer."""

    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"rank {self.rank} and alpha {self.alpha:g}"


def adapted_layers(
    model: torch.nn.Module,
    linear: Sequence[str],
    spec: LoraSpec,
    experts: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> dict[str, LayerLora]:
    """The layers that get an adapter, in the order of the model, with their rank and alpha. `experts`: the parameters
    of experts; `left_out`: linear layers that "all-linear" does not include."""
    targets = select_targets(model, linear, spec.targets, spec.file, experts, left_out)
    excluded: set[str] = set()
    for i, pattern in enumerate(spec.exclude):
        every = list(experts) if pattern == EXPERTS else []
        matches = every or matching(pattern, [*linear, *experts], f"lora.exclude[{i}]")
        if not matches:
            raise matches_nothing(
                f"lora.exclude {pattern!r}", type(model).__name__, pattern, linear, f"lora.exclude[{i}]"
            )
        excluded.update(matches)
    layers = [name for name in targets if name not in excluded]
    if spec.exclude and not layers:
        raise TrilloraError(
            f"lora.exclude leaves no layer of {type(model).__name__} to adapt.",
            where="lora.exclude",
            do=f"remove one of {', '.join(spec.exclude)}, or add targets",
        )
    ranks = _by_layer(model, layers, spec.rank_pattern, "lora.rank_pattern")
    alphas = _by_layer(model, layers, spec.alpha_pattern, "lora.alpha_pattern")
    return {name: LayerLora(ranks.get(name, spec.rank), alphas.get(name, spec.alpha)) for name in layers}


def select_targets(
    model: torch.nn.Module,
    linear: Sequence[str],
    targets: str | tuple[str, ...],
    file: str | None = None,
    experts: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> list[str]:
    """Names of the linear layers and of the parameters of experts that match. "all-linear" does not include the head
    and those in `left_out`."""
    chosen: set[str] = set()
    for i, target in enumerate((targets,) if isinstance(targets, str) else targets):
        where = f"lora.targets[{i}]"
        if file is not None and target not in linear and target not in experts:  # a file has whole names
            raise _not_a_layer(target, model, linear, file)
        if target == ALL_LINEAR:
            head = model.get_output_embeddings()
            matches = [name for name in linear if model.get_submodule(name) is not head and name not in left_out]
        else:
            matches = _matching_any(target, linear, experts, where)
        if not matches and not experts and EXPERTS in target:
            raise TrilloraError(
                f"LoRA target {target!r} matches nothing: {type(model).__name__} has no experts that can be adapted.",
                where=where,
                do=f"remove it from lora.targets; {ALL_LINEAR} adapts all linear layers",
            )
        if not matches:
            raise matches_nothing(f"LoRA target {target!r}", type(model).__name__, target, [*linear, *experts], where)
        chosen.update(matches)
    return [name for name in (*linear, *experts) if name in chosen]


def _matching_any(pattern: str, linear: Sequence[str], experts: Sequence[str], where: str) -> list[str]:
    """The linear layers that a pattern selects. Parameters of experts are selected by `experts`, by a pattern that
    contains this word, and by one that matches no linear layer: `down_proj` alone means the linear layers, if the model
    has any of this name."""
    if pattern == EXPERTS:
        return list(experts)
    matches = matching(pattern, linear, where)
    return matches + (matching(pattern, experts, where) if EXPERTS in pattern or not matches else [])


def _not_a_layer(target: str, model: torch.nn.Module, linear: Sequence[str], file: str) -> AdapterDoesNotFit:
    do = "use the base model that the adapter was trained with (see its adapter_config.json)"
    in_layer = re.search(r"\w+\.\d+\..*", target)  # layers.0.self_attn.q_proj
    same = next((name for name in linear if in_layer and name.endswith(f".{in_layer[0]}")), None)
    if same is not None:
        do += f". The same layer is {same} here: a multimodal model and its text model alone have different names"
    return AdapterDoesNotFit(
        f"The adapter does not fit this model: it has matrices for {target}, which is not a linear layer of "
        f"{type(model).__name__}.",
        where=file,
        do=do,
    )


def check_ranks(layers: dict[str, LayerLora], sizes: dict[str, tuple[int, int]]) -> None:
    """A rank above the smaller side of a matrix adds parameters, but nothing that the adapter could learn. `sizes` are
    the numbers of inputs and outputs of each layer."""
    for name, layer in layers.items():
        if layer.rank > min(sizes[name]):
            num_in, num_out = sizes[name]
            raise TrilloraError(
                f"LoRA rank {layer.rank} is above the rank of {name}, which has {num_in} inputs and {num_out} outputs.",
                where="lora.rank or lora.rank_pattern",
                do=f"use at most {min(num_in, num_out)} for this layer: a smaller lora.rank, or lora.rank_pattern: "
                f"{{{name.rsplit('.', 1)[-1]}: {min(num_in, num_out)}}}",
            )


def matching(pattern: str, names: Collection[str], where: str) -> list[str]:
    """The names that a pattern selects."""
    if pattern in names:
        return [pattern]
    if pattern.startswith(REGEX):
        regex = bounded_regex(pattern.removeprefix(REGEX), where)
        return [name for name in names if regex.fullmatch(name)]
    return [name for name in names if name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)]


def bounded_regex(text: str, where: str) -> re.Pattern[str]:
    """A compiled regular expression that cannot take long on the name of a layer. Patterns may come from a file of
    another person."""
    reason = ""
    if _REPEATED_GROUP.search(text):
        reason = "it repeats a group, looks around or refers back"
    elif len(_REPETITION.findall(text)) > _MAX_REPETITIONS or len(text) > _MAX_LETTERS:
        reason = f"it has more than {_MAX_REPETITIONS} repetitions or {_MAX_LETTERS} characters"
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        reason = str(error)
    if reason:
        raise TrilloraError(
            f"The regular expression {text[:80]!r} cannot be used: {reason}.",
            where=where,
            do=r"write a simpler one, such as .*\.layers\.[0-3]\..*q_proj, or list several patterns",
        )
    return compiled


def _by_layer(
    model: torch.nn.Module, layers: list[str], patterns: Iterable[tuple[str, Any]], where: str
) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for pattern, value in patterns:
        matches = matching(pattern, layers, where)
        if not matches:
            raise matches_nothing(f"{where} {pattern!r}", type(model).__name__, pattern, layers, where)
        for name in matches:
            other, before = found.setdefault(name, (pattern, value))
            if before != value:
                raise TrilloraError(
                    f"Two patterns give different values for {name}: {other!r} gives {before}, {pattern!r} gives "
                    f"{value}.",
                    where=where,
                    do="change the patterns so that each layer matches one of them, or give both the same value",
                )
    return {name: value for name, (_, value) in found.items()}


def matches_nothing(what: str, model: str, pattern: str, names: Sequence[str], where: str) -> TrilloraError:
    """The error for a pattern that selects none of the names. `model` is the name of its class."""
    short = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    guess = nearest(pattern.removeprefix(REGEX), [*short, *names])
    hint = f"did you mean {guess!r}? " if guess else ""
    kind = "adapted" if where.endswith("_pattern") else "linear"
    return TrilloraError(
        f"{what} matches no {kind} layer of {model}.",
        where=where,
        do=f"{hint}{kind.capitalize()} layers here: {' '.join(short)}",
    )
