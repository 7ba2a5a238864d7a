"""Trillora: LoRA fine-tuning of any Hugging Face causal language model on TPU, GPU and CPU.

    import trillora
    trillora.inspect_data("recipe.yaml")
    trillora.ask_compiler("recipe.yaml", on=["kaggle"])
    trillora.train("recipe.yaml", out="runs/first", train={"steps": 60})

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trillora.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from trillora.data.summary import DataReport
    from trillora.errors import TrilloraError
    from trillora.events import Listener
    from trillora.recipe.load import load_recipe
    from trillora.recipe.schema import Recipe
    from trillora.training.trainer import TrainResult

__all__ = ["Recipe", "TrilloraError", "__version__", "ask_compiler", "inspect_data", "load_recipe", "train"]


def train(
    recipe: str | Path | Mapping[str, Any], *, out: str | Path, listener: Listener | None = None, **overrides: Any
) -> TrainResult:
    """Trains by a recipe (a YAML file or a mapping) into the folder `out`.

    Overrides go on top, as sections (`train={"steps": 5}`) or dotted (`**{"train.steps": 5}`). Without a listener the
    run reports as on the command line.
    """
    from pathlib import Path

    from trillora.recipe.load import load_recipe
    from trillora.report.console import console_listener
    from trillora.training.trainer import train as run

    loaded = load_recipe(recipe, overrides)
    if listener is not None:
        return run(loaded, Path(out), listener=listener)
    with console_listener() as shown:
        return run(loaded, Path(out), listener=shown)


def inspect_data(recipe: str | Path | Mapping[str, Any], **overrides: Any) -> list[DataReport]:
    """Shows what a recipe's data would train, as `trillora inspect` does, and returns the figures of each stage."""
    from rich.console import Console

    from trillora.data.summary import inspect
    from trillora.recipe.load import load_recipe
    from trillora.recipe.schema import stages_of
    from trillora.report.data.screen import show

    reports = [inspect(stage.recipe) for stage in stages_of(load_recipe(recipe, overrides))]
    for report in reports:
        show(report, Console(highlight=False))
    return reports


def ask_compiler(
    recipe: str | Path | Mapping[str, Any], *, on: Sequence[str], estimate: bool = False, **overrides: Any
) -> list[dict[str, Any]]:
    """Shows whether a recipe fits these slices and how long it takes there, as `trillora preflight` does, and returns
    the answers."""
    from rich.console import Console

    from trillora.preflight.verdict import preflight
    from trillora.recipe.load import load_recipe
    from trillora.report.console import console_listener
    from trillora.report.preflight_screen import show

    with console_listener() as listener:
        answers = preflight(load_recipe(recipe, overrides), on, estimate=estimate, listener=listener)
    show(answers, Console(highlight=False))
    return answers


def __getattr__(name: str) -> Any:
    if name == "load_recipe":
        from trillora.recipe.load import load_recipe

        return load_recipe
    if name == "Recipe":
        from trillora.recipe.schema import Recipe

        return Recipe
    if name == "TrilloraError":
        from trillora.errors import TrilloraError

        return TrilloraError
    raise AttributeError(f"module 'trillora' has no attribute '{name}'")
