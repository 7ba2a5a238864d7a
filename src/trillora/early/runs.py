"""Whether a folder is the run, the model or the adapter that a command needs, before anything is loaded.

check_source("runs/nope")

There is no run 'nope'.
  where: runs/nope
  do:    did you mean 'none'? Runs in the same place: none
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trillora.early.model import check_model
from trillora.errors import TrilloraError, nearest
from trillora.files.user_path import user_path
from trillora.recipe.load import load_model_section, load_run_recipe
from trillora.runs.files import ADAPTER, ADAPTERS, RECIPE_FILE, is_run

CONFIG_FILE = "adapter_config.json"
FROM_TRAIN = "give the folder that `trillora train --out` wrote"


def runs_beside(folder: Path) -> list[str]:
    """The names of the runs in the same place."""
    return sorted(file.parent.name for file in folder.parent.glob(f"*/{RECIPE_FILE}"))


def no_run(folder: Path) -> TrilloraError:
    """The error for a folder that is not a run."""
    others = [name for name in runs_beside(folder) if name != folder.name]
    meant = nearest(folder.name, others)
    do = f"did you mean '{meant}'? G{FROM_TRAIN[1:]}" if meant else FROM_TRAIN
    do = f"{do}; runs in the same place: {', '.join(others[:8])}" if others else do
    there, nothing = f"This folder is not a run: it has no {RECIPE_FILE}.", f"There is no run '{folder.name}'."
    return TrilloraError(there if folder.is_dir() else nothing, where=str(folder), do=do)


def check_run(folder: Path, adapter: Path | None = None) -> Path:
    """Checks that the folder holds a run, which is finished unless another adapter is given."""
    if not is_run(folder):
        raise no_run(folder)
    if adapter is None and (folder / ADAPTERS).is_dir() and not (folder / ADAPTER).is_dir():
        raise _several(folder, "--stage")
    if adapter is None and not (folder / ADAPTER).is_dir():
        raise TrilloraError(
            "This run has no adapter yet, so there is nothing to test.",
            where=str(folder),
            do="finish it first: the same `trillora train` command resumes it",
        )
    return folder


def run_adapter(run: Path) -> Path:
    """The folder of a run's only adapter."""
    if (run / ADAPTER).is_dir():
        return run / ADAPTER
    if (run / ADAPTERS).is_dir():
        raise _several(run, f"--adapter {run}/{ADAPTERS}/NAME")
    do = "finish the run, or use its base model with --base"
    raise TrilloraError("This run has no adapter yet.", where=str(run), do=do)


def _several(run: Path, option: str) -> TrilloraError:
    names = sorted(phase.name for phase in (run / ADAPTERS).iterdir())
    what = "This run has several adapters, one for each phase."
    return TrilloraError(what, where=str(run), do=f"choose one with {option}: {' '.join(names)}")


def find_adapter(name: str | Path) -> Path:
    """The folder of an adapter, given by itself or by its run."""
    path = user_path(name, where="the adapter")
    if (path / CONFIG_FILE).is_file():
        return path
    if (path / ADAPTER).is_dir():
        return path / ADAPTER
    several = sorted(entry.name for entry in (path / ADAPTERS).glob("*") if (entry / CONFIG_FILE).is_file())
    if several:
        raise TrilloraError(
            f"This run has {len(several)} adapters.",
            where=str(path),
            do=f"name one of them: {' '.join(str(path / ADAPTERS / each) for each in several[:8])}",
        )
    if is_run(path):
        raise TrilloraError("This run has no adapter yet.", where=str(path), do="finish the run first")
    meant = None if path.is_dir() else nearest(path.name, runs_beside(path))
    raise TrilloraError(
        "There is no adapter here." if path.is_dir() else "There is no such folder.",
        where=str(path),
        do=(f"did you mean '{meant}'? Give" if meant else "give")
        + f" a finished run, or a folder that contains {CONFIG_FILE}",
    )


def check_source(
    name: str, overrides: Sequence[str] = (), *, with_adapter: bool = True, adapters: Sequence[str | Path] = ()
) -> None:
    """Checks a run or a model that answers prompts. `adapters` are used instead of the run's own."""
    run = user_path(name, where="the run or model")
    for adapter in adapters:
        find_adapter(adapter)
    if is_run(run):
        load_run_recipe(run, overrides)
        if with_adapter and not adapters:
            run_adapter(run)
        return
    if "/" in name and not run.exists() and runs_beside(run):  # `runs/nope` looks like an id of the hub
        raise no_run(run)
    check_model(load_model_section(name, overrides))


def check_service(name: str, overrides: Sequence[str], *, adapters: Sequence[str], only_base: bool) -> None:
    """Checks the run or model of a server. A run may have several adapters: each is a model of its own."""
    for adapter in adapters:
        find_adapter(adapter)
    has_several = (user_path(name, where="the run or model") / ADAPTERS).is_dir()
    check_source(name, overrides, with_adapter=not only_base and not has_several)


def check_exportable(name: str | Path) -> None:
    """Checks the run or the adapter of an export. A run need not be finished: it has checkpoints."""
    path = user_path(name, where="the run or adapter")
    if not is_run(path):
        find_adapter(path)
