"""Trillora: LoRA fine-tuning of any Hugging Face causal language model on TPU, GPU and CPU.

    import trillora
    trillora.inspect_data("recipe.yaml")
    trillora.run_preflight("recipe.yaml", on="kaggle")
    trillora.train("recipe.yaml", out="runs/first", train={"steps": 60})
    trillora.load("runs/first").generate("What is LoRA?")

The functions below import what they need when they are called, so that `import trillora` is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trillora.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from trillora.data.summary import DataReport
    from trillora.errors import TrilloraError
    from trillora.events import Listener, StopTraining
    from trillora.loaded_run import LoadedRun
    from trillora.preflight.result import PreflightResult
    from trillora.recipe.load import load_recipe
    from trillora.recipe.schema import Recipe
    from trillora.training.run_process import TrainResult

__all__ = [
    "Recipe",
    "StopTraining",
    "TrilloraError",
    "__version__",
    "inspect_data",
    "load",
    "load_recipe",
    "run_preflight",
    "train",
]


def train(
    recipe: str | Path | Mapping[str, object],
    *,
    out: str | Path,
    tiny: bool = False,
    listener: Listener | None = None,
    **overrides: object,
) -> TrainResult:
    """Trains an adapter by a recipe (a YAML file or a mapping), and writes the run into the folder `out`. A data file
    in place of a recipe trains the embedded model, or `model`, with the default options.

    Overrides replace options of the recipe: whole sections (`train={"steps": 5}`) or dotted names
    (`**{"train.steps": 5}`). `tiny` uses the embedded model and small sizes, to try the recipe on a CPU. Without a
    listener, events are shown as on the command line. A listener may raise `StopTraining`.
    """
    from pathlib import Path

    from trillora.devices.quiet import quiet_libraries, start_gpu
    from trillora.early.from_data import recipe_or_data
    from trillora.early.training import check_start
    from trillora.recipe.load import load_recipe
    from trillora.recipe.tiny import is_tiny_run
    from trillora.report.console import console_listener

    loaded = load_recipe(recipe_or_data(recipe), overrides, tiny=tiny or is_tiny_run(out))
    check_start(loaded, Path(out))
    quiet_libraries(loaded.hardware.backend)
    start_gpu(loaded.hardware.backend)
    from trillora.training.trainer import train as run

    if listener is not None:
        return run(loaded, Path(out), listener=listener)
    with console_listener(every_steps=loaded.track.every_steps) as shown:
        return run(loaded, Path(out), listener=shown)


def load(
    run: str | Path,
    *,
    adapter: str | None = None,
    overrides: Sequence[str] = (),
    listener: Listener | None = None,
) -> LoadedRun:
    """Opens a run, to ask it, evaluate it, export it or merge it. One that is not finished has the adapter of its last
    checkpoint, and cannot be merged. `adapter` is the name of one of several.
    Overrides replace options of its recipe: `["model.name=FOLDER"]` if the model has moved."""
    from trillora.loaded_run import LoadedRun

    return LoadedRun(run, adapter=adapter, overrides=overrides, listener=listener)


def inspect_data(
    recipe: str | Path | Mapping[str, object], *, tiny: bool = False, **overrides: object
) -> list[DataReport]:
    """Shows the data of a recipe or of a data file, as `trillora inspect` does. Returns one report per stage."""
    from trillora.early.from_data import recipe_or_data
    from trillora.early.training import check_files_of
    from trillora.recipe.load import load_recipe

    loaded = load_recipe(recipe_or_data(recipe), overrides, tiny=tiny)
    check_files_of(loaded)
    from trillora.data.summary import inspect
    from trillora.devices.quiet import hide_widget_warning
    from trillora.recipe.schema import stages_of
    from trillora.report.data.screen import show
    from trillora.report.safe_console import SafeConsole

    hide_widget_warning()
    reports = [inspect(stage.recipe) for stage in stages_of(loaded)]
    with SafeConsole() as console:  # one output of a notebook's cell, not one for each line
        for report in reports:
            show(report, console)
    return reports


def run_preflight(
    recipe: str | Path | Mapping[str, object],
    *,
    on: str | Sequence[str],
    tiny: bool = False,
    estimate: bool = False,
    **overrides: object,
) -> list[PreflightResult]:
    """Shows whether a recipe fits these slices (`"kaggle"` or `["v5e-8", "kaggle"]`) and how long it takes, as
    `trillora preflight` does. Returns one result per slice."""
    from trillora.devices.slices import find_slice
    from trillora.early.training import check_files_of
    from trillora.recipe.load import load_recipe

    slices = [on] if isinstance(on, str) else on
    for name in slices:
        find_slice(name)
    loaded = load_recipe(recipe, overrides, tiny=tiny)
    check_files_of(loaded)
    from trillora.preflight.verdict import preflight
    from trillora.report.console import console_listener
    from trillora.report.preflight_screen import show
    from trillora.report.safe_console import SafeConsole

    with console_listener() as listener:
        results = preflight(loaded, slices, estimate=estimate, listener=listener)
    with SafeConsole() as console:
        show(results, console)
    return results


_LAZY = {
    "Recipe": "trillora.recipe.schema",
    "StopTraining": "trillora.events",
    "TrilloraError": "trillora.errors",
    "load_recipe": "trillora.recipe.load",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trillora' has no attribute '{name}'")
