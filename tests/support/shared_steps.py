"""Runs with equal steps share one compiled step: tracing and compiling it takes most of the time of a tiny run.

For tests of what happens around the step, such as checkpoints, resumption and faults. The key is everything that a step
is built from. Only options that no program can depend on are left out, so that an option added later is part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest

from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.model.bridge import CausalLM
from trillora.recipe.schema import Recipe, Stage
from trillora.step import autotune, build
from trillora.step.build import Assembly
from trillora.step.group import GroupAssembly
from trillora.training import trainer, validation
from trillora.training.entries import plan, programs

# Where files are, how chats are written, when to save and evaluate, and the seed, which the step gets with its state.
NOT_COMPILED: dict[str, Any] = {
    "model": {"name", "revision"},
    "data": {"path", "validation", "split", "chat_template"},
    "train": {"seed", "checkpoint_every", "keep_checkpoints", "checkpoint_dir", "time_limit", "max_bad_steps"},
    "evaluate": True,
    "track": True,
}
LENGTH = {"steps", "epochs"}


def has_length(recipe: Recipe) -> bool:
    """Whether the program has the number of steps in it: a constant rate does not depend on it."""
    return recipe.train.schedule != "constant"


def options_key(recipe: Recipe, *, length: bool) -> str:
    length_options = set() if length else LENGTH
    return recipe.model_dump_json(exclude={**NOT_COMPILED, "train": NOT_COMPILED["train"] | length_options})


def config_key(config: Any) -> str:
    return repr(sorted((key, str(value)) for key, value in config.to_dict().items() if key != "_name_or_path"))


def step_key(
    recipe: Recipe, settings: Any, config: Any, mesh: Any, num_steps: int, *, mapped: bool = False
) -> Hashable:
    length = has_length(recipe)
    options = options_key(recipe, length=length)
    return options, repr(settings), config_key(config), mesh, num_steps if length else None, mapped


def group_key(members: Sequence[Stage], settings: Any, config: Any, mesh: Any, width: int | None = None) -> Hashable:
    recipes = tuple(options_key(member.recipe, length=True) for member in members)
    return recipes, repr(settings), config_key(config), mesh, width


def of_assembly(assembly: Assembly, *values: Any, **options: Any) -> Hashable:
    """For programs of a step: `shared` keeps their assembly, so that its id stays its own."""
    return id(assembly), values, tuple(sorted(options.items()))


@contextlib.contextmanager
def sharing(shared: dict[Hashable, Any] | None = None) -> Iterator[dict[Hashable, Any]]:
    """While it is open, `train` builds and compiles each step once. Yields what is shared, with what already was."""
    shared = {} if shared is None else shared

    def once(function: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
        def remembered(*values: Any, **options: Any) -> Any:
            name = (function.__qualname__, key(*values, **options))
            if name not in shared:
                shared[name] = function(*values, **options)
            return shared[name]

        return remembered

    def generator(model: CausalLM, base: Any, adapter: Any, prompts: Prompts, mesh: Any, **options: Any) -> Generator:
        """The programs that answer prompts are shared too. `shared` keeps the model, so that its id stays its own."""
        made = Generator(model, base, adapter, prompts, mesh, **options)
        kept = shared.setdefault(("generator", id(model), prompts.stops, mesh), (model, made._readers, made._writers))
        _, made._readers, made._writers = kept
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "Generator", generator)
        patch.setattr(autotune, "assemble", once(build.assemble, step_key))
        patch.setattr(plan, "assemble_group", once(plan.assemble_group, group_key))
        patch.setattr(Assembly, "compile", once(Assembly.compile, of_assembly))
        patch.setattr(Assembly, "compile_evaluation", once(Assembly.compile_evaluation, of_assembly))
        patch.setattr(GroupAssembly, "compile_lane", once(GroupAssembly.compile_lane, of_assembly))
        patch.setattr(trainer, "make_copier", once(trainer.make_copier, of_assembly))
        patch.setattr(programs, "compile_next", once(programs.compile_next, of_assembly))
        yield shared
