"""Explains what is wrong with a recipe: which option, where, what is expected, and what was probably meant.

pydantic finds the mistakes, but describes them in terms of types and validators. Here they become `TrilloraError`s:

    Unknown option 'train.lerning_rate'.
      where: recipe.yaml, train.lerning_rate
      do:    did you mean 'train.learning_rate'? Options of train: …
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trillora.errors import TrilloraError, nearest
from trillora.secrets import mask_message

MAX_SHOWN = 20  # problems of one recipe
MAX_LETTERS = 80  # of a value or a name

# Names of other trainers, and paths that are easily guessed: used for suggestions, never accepted.
ELSEWHERE = {
    "lora.adapter": "lora.from",
    "adapter_path": "lora.from",
    "adapter_name_or_path": "lora.from",
    "lr": "train.learning_rate",
    "max_length": "train.sequence_length",
    "max_seq_length": "train.sequence_length",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "optim": "train.optimizer",
    "lr_scheduler_type": "train.schedule",
    "lora_rank": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "use_dora": "lora.dora",
    "init_lora_weights": "lora.init",
    "exclude_modules": "lora.exclude",
    "loraplus_lr_ratio": "lora.loraplus_ratio",
    "use_rslora": "lora.rslora",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "trainable_token_indices": "lora.train_tokens",
    "lora_modules_to_save": "lora.modules_to_save",
    "additional_special_tokens": "tokens",
    "new_tokens": "tokens",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "torch_dtype": "model.dtype",
    "dataset": "data.path",
    "packing": "data.pack",
    "gradient_checkpointing": "engine.remat",
    "attn_implementation": "engine.attention",
}


_NO_FLOAT16 = "float16 does not exist here: gradients would overflow. Use bfloat16, float32 or auto"
# Values of other trainers that have no counterpart.
VALUES_ELSEWHERE = {("model.dtype", value): _NO_FLOAT16 for value in ("fp16", "float16", "half", "f16")}


@dataclass(frozen=True)
class Option:
    """One option, described for error messages."""

    path: str
    expected: str  # completes "give …"
    effect: str
    section: type[Any] | None  # the section that it contains, if any
    words: tuple[str, ...] = ()  # values that are names, such as auto

    @classmethod
    def of(cls, path: str, info: FieldInfo) -> Option:
        kinds = _kinds(info.annotation)
        section = next((inner for kind in kinds if (inner := _section(kind)) is not None), None)
        phrases = [_phrase(kind, info.metadata) for kind in kinds]
        shorthand = getattr(section, "shorthand", None)
        if shorthand and section in kinds:
            phrases.insert(0, f"text (the {shorthand})")
        words = tuple(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
        return cls(path, " or ".join(dict.fromkeys(phrases)), info.description or "", section, words)


@dataclass(frozen=True)
class RecipeProblem:
    path: str
    what: str
    where: str
    do: str


@dataclass
class Origins:
    """Where each value was given: in the recipe, or in an override."""

    recipe: str
    overrides: dict[str, str] = field(default_factory=dict)

    def overridden(self, path: str, where: str) -> None:
        self.overrides[path] = where

    def of(self, path: str) -> str:
        """The file and the option. Of an override only the name: its value may be a secret."""
        for given, where in reversed(self.overrides.items()):
            inside, around = path.startswith((f"{given}.", f"{given}[")), given.startswith(f"{path}.")
            if path == given or inside or around:
                return where
        return f"{self.recipe}, {path}"


def unknown_option(path: str, known: Mapping[str, Option], origins: Origins) -> RecipeProblem:
    """Suggests an option: the same name in another section, another trainer's name, or the nearest spelling."""
    if len(path) > MAX_LETTERS:
        return RecipeProblem(path, f"Unknown option {shown(path)}.", origins.recipe, "remove it")
    parent, _, name = path.rpartition(".")
    leaves = {p: p.rpartition(".")[2] for p in known}
    siblings = [leaf for p, leaf in leaves.items() if p.rpartition(".")[0] == parent]
    listing = f"{f'Options of {parent}' if parent else 'Options'}: {' '.join(siblings)}"
    homes = {leaf: p for p, leaf in reversed(leaves.items())}  # if several sections have the name, the first one
    dotted = next((p for p in known if p.replace(".", "_") == path), None)  # train_steps
    meant = dotted or ELSEWHERE.get(path) or homes.get(name) or ELSEWHERE.get(name)
    if meant is None and (close := nearest(name, siblings)):
        meant = f"{parent}.{close}" if parent else close
    elif meant is None and (close := nearest(name, leaves.values())):
        meant = homes[close]
    do = f"did you mean '{meant}'? {listing}" if meant else f"remove it. {listing}"
    return RecipeProblem(path, f"Unknown option {shown(path)}.", origins.of(path), do)


def inner_problems(
    error: ValidationError, known: Mapping[str, Option], unknown: Sequence[str]
) -> dict[str, ErrorDetails]:
    """Options with a wrong value, each once, even if pydantic reports several problems. `unknown`: other options that
    are reported."""
    found: dict[str, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            continue  # reported by unknown_option, with a suggestion
        path = _option_path(detail["loc"], known)
        if detail["type"] == "conflict":
            path = f"{path}.{detail['ctx']['key']}".removeprefix(".")
        if path:  # else a key of the recipe itself is no text, and so unknown
            found.setdefault(path, detail)
    # A mistake inside a mapping or list is also reported for the whole; only the inner report helps.
    around = {path[: match.start()] for path in (*found, *unknown) for match in re.finditer(r"[.\[]", path)}
    return {path: detail for path, detail in found.items() if path not in around}


def value_problem(path: str, detail: ErrorDetails, known: Mapping[str, Option], origins: Origins) -> RecipeProblem:
    if detail["type"] == "conflict":
        return RecipeProblem(path, detail["ctx"]["what"], origins.of(path), detail["ctx"]["do"])
    option = known[_without_numbers(path)]
    if detail["type"] == "missing":
        do = f"give {option.expected}. {option.effect}"
        return RecipeProblem(path, f"The recipe has no '{path}'.", origins.recipe, do)
    return _wrong_value(path, detail["input"], option, origins)


def problems_as_error(problems: Sequence[RecipeProblem], num_problems: int) -> TrilloraError:
    """One error for all problems: the first in full, the others listed below it, the rest counted."""
    first, *others = problems
    also = [f"\n  also:  {p.what}\n           where: {p.where}\n           do:    {p.do}" for p in others]
    if num_problems > len(problems):
        also.append(f"\n  also:  {num_problems - len(problems):,} more")
    return TrilloraError(first.what, where=first.where, do=first.do + "".join(also))


def _wrong_value(path: str, value: object, option: Option, origins: Origins) -> RecipeProblem:
    expected = "text" if path.endswith("]") else option.expected
    do = f"give {expected}. {option.effect}"
    if expected.startswith("text") and isinstance(value, (bool, int, float)):
        reading = "yes or no" if isinstance(value, bool) else "a number"
        do = f"put it in quotes if it is a name: YAML reads it as {reading}"
    elif isinstance(value, str) and (instead := VALUES_ELSEWHERE.get((_without_numbers(path), value.lower()))):
        do = instead
    elif isinstance(value, str) and (meant := nearest(value[:MAX_LETTERS], option.words)):
        do = f"did you mean '{meant}'? {do[0].upper()}{do[1:]}"
    return RecipeProblem(path, f"{path} cannot be {shown(value)}.", origins.of(path), do)


def _option_path(loc: Iterable[int | str], known: Mapping[str, Option]) -> str:
    """pydantic's location without the parts it adds for the members of a union."""
    path = ""
    for part in loc:
        longer = f"{path}.{part}" if path else str(part)
        if isinstance(part, int):
            path = f"{path}[{part}]"
        elif _without_numbers(longer) in known:
            path = longer
    return path


def _without_numbers(path: str) -> str:
    """The path of the option: `data.path[0].weight` becomes `data.path.weight`."""
    return re.sub(r"\[\d+\]", "", path)


def shown(value: object) -> str:
    """A value in an error message: short, and without secrets."""
    match value:
        case None:
            return "empty"
        case bool():
            return "yes" if value else "no"
        case int() if abs(value) >= 10**MAX_LETTERS:
            return f"a number of more than {MAX_LETTERS} digits"
        case int() | float():
            return repr(value)
        case str():
            # Masked before it is cut: half a key has no shape.
            text = repr(mask_message(value[:1000]))
            return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
    return f"a {type(value).__name__}"


def _kinds(annotation: object) -> list[Any]:
    """The members of a union, or the type itself, without `None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _kinds(member)]
    return [] if annotation is type(None) else [annotation]


def _section(kind: object) -> type[BaseModel] | None:
    """The section in an option's type, or in a list of them."""
    if get_origin(kind) is Annotated or get_origin(kind) is tuple:
        return _section(get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _phrase(kind: Any, constraints: Iterable[Any]) -> str:
    if get_origin(kind) is Annotated:
        kind, *inner = get_args(kind)
        constraints = [*constraints, *(c for info in inner for c in getattr(info, "metadata", [info]))]
    if get_origin(kind) is Literal:
        values = [str(value) for value in get_args(kind)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if get_origin(kind) is tuple:
        inner_section = _section(kind)
        of = "names or patterns" if inner_section is None else f"mappings of {_names(inner_section)}"
        return f"a list of {of}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a mapping of {_names(kind)}"
    if get_origin(kind) is dict and get_args(kind)[1] is Any:
        return "a mapping of options"
    if get_origin(kind) is dict:
        return f"a mapping of names or patterns to {_phrase(get_args(kind)[1], ())}"
    words = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}[kind]
    bounds = " and ".join(text for c in constraints if (text := _bound(c))).replace(" and of ", " and ")
    return f"{words} {bounds}".strip()


def _names(section: type[BaseModel]) -> str:
    return ", ".join(info.alias or name for name, info in section.model_fields.items())


def _bound(constraint: object) -> str | None:
    match constraint:
        case Ge(ge=low):
            return f"of at least {_number(low)}"
        case Gt(gt=low):
            return f"above {_number(low)}"
        case Le(le=high):
            return f"of at most {_number(high)}"
        case Lt(lt=high):
            return f"below {_number(high)}"
    return None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
