"""Whether a folder is the run, the model or the adapter that a command needs, before anything is loaded.

check_source("runs/dome")

There is no run 'dome'.
  where: runs/dome
  do:    did you mean 'done'? Give the folder that `trillora train --out` wrote; runs in the same place: done
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trillora.early.model import check_model
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import open_storage
from trillora.files.user_path import user_path
from trillora.recipe.load import load_model_section
from trillora.runs.files import CHECKPOINTS, RECIPE_FILE, is_run
from trillora.runs.manifest import not_a_run
from trillora.runs.saved import SavedRun, find_adapter, not_finished


def check_run(
    folder: str | Path, overrides: Sequence[str] = (), *, adapter: str | None = None, stage: str | None = None
) -> SavedRun:
    """Checks a run and the adapter that is used: the run's own, one of several, or another one. A run that is not
    finished has the adapter of its last checkpoint."""
    run = SavedRun.open(folder, overrides)
    which = adapter if adapter is not None else stage if stage in run.parts else None
    if which is not None or run.is_finished or run.parts:
        run.finished_adapter(which)
    elif not _has_checkpoint(run):
        raise not_finished(run, "it has no adapter yet, and no checkpoint")
    return run


def _has_checkpoint(run: SavedRun) -> bool:
    """Whether there may be one. No file of it is read, and no address is contacted yet."""
    inside, given = run.folder / CHECKPOINTS, run.recipe.train.checkpoint_dir

    def has_some(place: str) -> bool:
        return "://" in place or (Path(place).is_dir() and bool(Checkpoints(open_storage(place)).steps()))

    return has_some(str(inside)) or (given is not None and has_some(given))


def check_source(
    name: str, overrides: Sequence[str] = (), *, with_adapter: bool = True, adapter: str | None = None
) -> None:
    """Checks a run or a model that answers prompts. `adapter` is used instead of the run's own."""
    folder = user_path(name, where="the run or model")
    if is_run(folder):
        if with_adapter:
            check_run(folder, overrides, adapter=adapter)
        return
    if adapter is not None:
        find_adapter(adapter)
    if "/" in name and not folder.exists() and any(folder.parent.glob(f"*/{RECIPE_FILE}")):
        raise not_a_run(folder)  # `runs/nope` looks like an id of the hub
    check_model(load_model_section(name, overrides))


def check_service(name: str, overrides: Sequence[str], *, adapters: Sequence[str], only_base: bool) -> None:
    """Checks the run or model of a server. A run may have several adapters: each is a model of its own."""
    for adapter in adapters:
        find_adapter(adapter)
    folder = user_path(name, where="the run or model")
    has_several = is_run(folder) and bool(SavedRun.open(folder, overrides).several)
    check_source(name, overrides, with_adapter=not only_base and not has_several)


def check_exportable(name: str | Path, adapter: str | None = None, overrides: Sequence[str] = ()) -> None:
    """Checks the run or the adapter of an export."""
    path = user_path(name, where="the run or adapter")
    if is_run(path):
        check_run(path, overrides, adapter=adapter)
    else:
        find_adapter(path)
