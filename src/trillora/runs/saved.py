"""A run on disk, for everything that comes after training. Nothing else looks for the files of a run.

    run = SavedRun.open("runs/first")
    run.recipe.lora.rank, run.manifest.num_steps       what it was made from
    run.finished_adapter().folder                      runs/first/adapter
    run.finished_adapter("code").folder                runs/skills/adapters/code, of a run with several

    find_adapter("runs/first").run                     a finished adapter, by its run or by its own folder

`runs.adapter` also takes a run that is not finished. An address that only the folder of a run names is not contacted:
the folder may come from another person, and the address would get this user's credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from trillora.errors import TrilloraError
from trillora.files.checkpoints import Checkpoints
from trillora.files.hub import HUB_ID_AT, download, list_files
from trillora.files.storage import open_storage
from trillora.files.user_path import user_path
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.source import PICKLE_SUFFIXES, OpenModel, weight_files
from trillora.recipe.load import RunRecipe, load_run_recipe
from trillora.recipe.schema import Recipe
from trillora.runs.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ADAPTERS,
    CHECKPOINTS,
    EXPORTS,
    RECIPE_FILE,
    ROPE_FILE,
    is_finished,
    is_run,
)
from trillora.runs.manifest import GroupResult, RunManifest, not_a_run, read_group_result, read_manifest
from trillora.secrets import without_secrets


class NotContacted(TrilloraError):
    """A run's checkpoints are at an address that only the run names."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in PEFT's format."""

    folder: Path
    run: SavedRun | None  # that trained it
    note: str = ""  # for people, if it is from a checkpoint

    @property
    def part(self) -> str | None:
        """Its name, if its run has several adapters."""
        return self.folder.name if self.folder.absolute().parent.name == ADAPTERS else None

    @property
    def name(self) -> str:
        """The name of its run, or of one of several."""
        if self.run is not None and self.note:
            return self.run.folder.absolute().name
        is_own = self.folder.name == ADAPTER and self.part is None
        return (self.folder.absolute().parent if is_own else self.folder).name

    @property
    def system(self) -> str:
        """The system message of every row that it was trained on; empty if they had different ones or none. Of a run
        with stages, the rows of the last one."""
        manifest = self.run.manifest if self.run is not None else None
        if manifest is None:
            return ""
        stages = manifest.stages if manifest.group.kind else manifest.stages[-1:]
        own = [stage for stage in stages if stage.name == self.part] or stages
        return own[0].system if len({stage.system for stage in own}) == 1 else ""

    @property
    def is_result(self) -> bool:
        """Whether it is the one result of its run."""
        return self.run is not None and self.folder.absolute() == self.run.folder.absolute() / ADAPTER


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run, finished or not. `overrides` replace options of its recipe: what the user typed."""

    folder: Path
    overrides: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | Path, overrides: Sequence[str] = ()) -> Self:
        run = cls(user_path(folder, where="the run"), tuple(overrides))
        if not is_run(run.folder):
            raise not_a_run(run.folder)
        return run

    @classmethod
    def around(cls, folder: Path, overrides: Sequence[str] = ()) -> Self | None:
        """The run of RUN/adapter, RUN/adapters/NAME or RUN/exports/NAME."""
        path = folder.absolute()
        is_one_of_many = path.parent.name in (ADAPTERS, EXPORTS)
        above = path.parent.parent if is_one_of_many else path.parent
        is_inside = is_one_of_many or path.name == ADAPTER
        return cls(above, tuple(overrides)) if is_inside and is_run(above) else None

    @cached_property
    def saved_recipe(self) -> RunRecipe:
        return load_run_recipe(self.folder, self.overrides)

    @property
    def recipe(self) -> Recipe:
        return self.saved_recipe.recipe

    @cached_property
    def manifest(self) -> RunManifest | None:
        """None if the run stopped before its first step."""
        return read_manifest(self.folder)

    @cached_property
    def result(self) -> GroupResult | None:
        """How several adapters ended."""
        return read_group_result(self.folder)

    @property
    def is_finished(self) -> bool:
        return is_finished(self.folder)

    @property
    def parts(self) -> dict[str, SavedAdapter]:
        """Its adapters by name, if it trained several."""
        folders = sorted(self.folder.joinpath(ADAPTERS).glob("*"))
        return {each.name: SavedAdapter(each, self) for each in folders if (each / ADAPTER_CONFIG).is_file()}

    @property
    def several(self) -> dict[str, SavedAdapter]:
        """The parts of a run that has no other adapter."""
        return {} if (self.folder / ADAPTER).is_dir() else self.parts

    def finished_adapter(self, which: str | Path | None = None) -> SavedAdapter:
        """`which` is the name of one of several adapters, or the folder of any other adapter."""
        if which is not None:
            return self.parts.get(str(which)) or find_adapter(which)
        own = self.folder / ADAPTER
        if own.is_dir():
            return SavedAdapter(own, self)
        if self.parts:
            raise _several(self)
        if self.is_finished:
            what, do = "This run has no adapter.", "see in its report how its adapters ended"
            raise TrilloraError(what, where=str(self.folder), do=do)
        raise not_finished(self, "it has no adapter yet")

    def checkpoints(self) -> Checkpoints:
        """Where the user says that they are, in the folder of the run, or where the run says."""
        inside = self.folder / CHECKPOINTS
        is_given = any(override.startswith("train.checkpoint_dir=") for override in self.overrides)
        place = self.recipe.train.checkpoint_dir if is_given or not inside.is_dir() else None
        if place is not None and "://" in place and not is_given:
            shown = without_secrets(place)
            raise NotContacted(
                f"This run's checkpoints are at {shown}, which is not contacted.",
                where=str(self.folder),
                do=f"if you trust this address, add train.checkpoint_dir={shown}, in export --checkpoints {shown}; "
                f"or copy the checkpoints to {inside}",
            )
        return Checkpoints(open_storage(place or str(inside)))

    def open_base(self, base: str | None = None, *, adapter: Path | None = None) -> OpenModel:
        """The base model, or the one that the user named, with the tokens that the recipe adds, and with the rotary
        positions of the recipe or of a finished `adapter`. It is downloaded if needed."""
        model, tokens = self.recipe.model, self.recipe.tokens or ()
        if base is not None:
            model = model.model_copy(update={"name": base, "revision": None, "trust_remote_code": False})
        return OpenModel.of(model, tokens=tokens, adapter=adapter)

    def check_base(self, opened: OpenModel) -> None:
        """An adapter is right only for the weights that it was trained on."""
        if self.manifest is None:
            return
        if self.manifest.identity.get("model") != weights_digest(opened.folder, weight_files(opened.folder)):
            raise TrilloraError(
                "The base model is not the one that this run was trained on: its weights, config or code have changed.",
                where=str(opened.folder),
                do="restore the original model; or use this one with model.name=MODEL, in export with --base MODEL",
            )


def find_adapter(name: str | Path, *, from_hub: bool = False) -> SavedAdapter:
    """A finished adapter, by its own folder or by its run. `from_hub`: or by its id `org/name`, with `@revision`."""
    path = user_path(name, where="the adapter")
    if (path / ADAPTER_CONFIG).is_file():
        return SavedAdapter(path, SavedRun.around(path))
    run = SavedRun(path)
    if is_run(path) or (path / ADAPTER).is_dir() or run.parts:
        return replace(run.finished_adapter(), run=run if is_run(path) else None)
    if from_hub and not path.is_dir() and HUB_ID_AT.fullmatch(str(name)):
        return SavedAdapter(_download(str(name)), None)
    if not path.is_dir() and any(path.parent.glob(f"*/{RECIPE_FILE}")):
        raise not_a_run(path)
    what, do = "There is no such folder.", f"give a finished run, or a folder that contains {ADAPTER_CONFIG}"
    if from_hub:
        what, do = f"There is no adapter '{name}'.", f"{do}; or a hub id of the form org/name"
    if path.is_dir():
        what = "There is no adapter here."
    raise TrilloraError(what, where=f"lora.from: {path}" if from_hub else str(path), do=do)


def _download(name: str) -> Path:
    hub_id, _, revision = name.partition("@")
    wanted = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    found = download(hub_id, "model", revision=revision or None, allow=(*wanted, ROPE_FILE))
    if missing := [file for file in wanted if not (found / file).is_file()]:
        files = list_files(hub_id, revision or "main") or set()
        pickled = next((file for file in sorted(files) if file.endswith(PICKLE_SUFFIXES)), None)
        raise TrilloraError(
            f"{hub_id} is not an adapter that can be used: it has no {missing[0]}."
            + (f" {pickled} is a pickle file, which can run code when it is opened." if pickled else ""),
            where=f"hub model {hub_id}",
            do=f"choose a repository with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}",
        )
    return found


def not_finished(run: SavedRun, why: str) -> TrilloraError:
    return TrilloraError(
        f"This run is not finished: {why}.",
        where=str(run.folder),
        do="finish it: the same `trillora train` command resumes it; or ask its base model with --base",
    )


def _several(run: SavedRun) -> TrilloraError:
    names = list(run.parts)[:8]
    folders = " ".join(str(run.folder / ADAPTERS / name) for name in names)
    return TrilloraError(
        f"This run has several adapters: {', '.join(names)}.",
        where=str(run.folder),
        do=f"choose one with --adapter NAME (eval: --stage NAME; Python: adapter=NAME), or give its folder: {folders}",
    )
