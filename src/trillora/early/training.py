"""What a person gets wrong when a run starts: its folder, its data, its model. The trainer checks everything again;
here, the usual mistakes are found before jax, torch and transformers are imported.

    check_start(load_recipe("recipe.yaml"), Path("runs/first"))

    The data file /home/me/qs.csv does not exist.
      where: /home/me/qs.csv
      do:    did you mean 'qa.csv'? Check the path; a relative path in a recipe starts at the recipe's folder
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path

from trillora.data.reading.files import DataFile, expand, kind_of
from trillora.data.reading.readers import first_rows
from trillora.data.rendering.chat_templates import NAMED, find_template
from trillora.data.rendering.formats import picked
from trillora.data.rendering.preferences import convert, detect, rows_shown_by
from trillora.data.rendering.render import parse
from trillora.data.rendering.sandbox import names_needed
from trillora.data.rows import BadRow, BadTemplate, Fault, place, refused
from trillora.early.model import check_model, check_targets
from trillora.errors import TrilloraError, nearest
from trillora.files.hub import HUB_ID_AT
from trillora.files.user_path import user_path
from trillora.recipe.data_section import DataSection
from trillora.recipe.load import load_run_recipe
from trillora.recipe.losses import Rows, is_file
from trillora.recipe.schema import Recipe, stages_of
from trillora.runs.files import ADAPTER, GROUP_FILE, is_finished, is_run

FEWEST_BYTES = 64 << 20  # free on the disk of a run; a rank-16 adapter of a small model with its checkpoints takes them
ROWS_READ = 3  # of each file
LENGTHS = ("steps", "epochs")  # options that the last stage of a finished run may have more of
FILES_READ = 20  # of a folder
LOSS_FOR: dict[Rows, str] = {"answers": "sft", "pairs": "dpo", "labels": "kto"}


def check_start(recipe: Recipe, out: Path) -> None:
    """Checks a run that is about to start or to resume in `out`."""
    check_is_folder(out)
    check_not_finished(recipe, out)
    check_room(out)
    check_inputs(recipe)
    check_targets(recipe.lora, check_model(recipe.model))


def check_inputs(recipe: Recipe) -> None:
    """Checks the data of every stage."""
    for stage in stages_of(recipe):
        for name in filter(is_file, stage.recipe.train.losses):
            if not os.path.isfile(name):
                raise TrilloraError("There is no such file.", where=f"train.loss: {name}", do="check the path")
        check_data(stage.recipe.data, stage.recipe.train.rows)


def check_files_of(recipe: Recipe) -> None:
    """Checks that the local files of every stage exist."""
    for stage in stages_of(recipe):
        for path in _paths(stage.recipe.data):
            check_files(path)


def check_is_folder(out: Path) -> None:
    """Checks that a run can have this folder, which need not exist."""
    user_path(out, where="--out")
    if out.exists() and not out.is_dir():
        raise TrilloraError("--out must be a folder, not a file.", where=str(out), do="choose another --out")


def check_not_finished(recipe: Recipe, out: Path) -> None:
    """Checks that a run may be written to this folder: that it has no finished one, or is to become longer."""
    if is_finished(out) and not is_longer(recipe, out):
        of_last = "train.steps or train.epochs" if recipe.stages is None else "steps or epochs of its last stage"
        do = f"use another --out, or remove the folder; to train this run longer, raise {of_last}"
        if (out / ADAPTER).exists():
            do += f"; to train its adapter further, use another --out and add lora.from={shlex.quote(str(out))}"
        raise TrilloraError("This folder already contains a finished run.", where=str(out), do=do)


def is_longer(recipe: Recipe, run: Path) -> bool:
    """Whether the recipe asks the last stage of a finished run of one adapter for more steps, and the other stages for
    as many as before. Only the data shows how many steps an epoch has."""
    if not (run / ADAPTER).exists() or (run / GROUP_FILE).exists() or not is_run(run):
        return False
    now, before = (
        [[getattr(stage.recipe.train, name) or 0 for name in LENGTHS] for stage in stages_of(each)]
        for each in (recipe, load_run_recipe(run).recipe)
    )
    return now[:-1] == before[:-1] and any(new > old for new, old in zip(now[-1], before[-1], strict=True))


def lengths_of_last(recipe: Recipe) -> tuple[str, ...]:
    """The options that say how long the last stage is, and no other."""
    stages = recipe.stages or ()
    own = [f"stages.{len(stages) - 1}.{name}" for name in LENGTHS] if stages else []
    are_shared = any(stage.steps is None and stage.epochs is None for stage in stages[:-1])
    return (*own, *(() if are_shared else (f"train.{name}" for name in LENGTHS)))


def check_room(out: Path) -> None:
    """Checks that the folder can be written and that its disk is not full."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        what = f"The run's folder cannot be written to: {there} is read-only for you."
        raise TrilloraError(what, where=str(out), do="choose another --out, or change the permissions")
    if (free := shutil.disk_usage(there).free) < FEWEST_BYTES:
        what = f"The disk has only {free >> 20} MiB left, too little for checkpoints and an adapter."
        raise TrilloraError(what, where=str(there), do="free some disk space, or use another disk with --out")


def check_data(data: DataSection, rows: Rows = "answers") -> None:
    """Checks that the local files exist and that their first rows can be used for what the loss needs. Files of the hub
    and URLs are not opened."""
    if data.chat_template is not None and data.chat_template not in NAMED:
        find_template(data.chat_template, (), None)
    for path in _paths(data):
        for file in check_files(path)[:FILES_READ]:
            if data.on_bad_row == "refuse":
                _check_rows(file, data, rows)


def check_files(path: str) -> list[DataFile]:
    """The local files of a path; an error if there are none."""
    inner = path.removeprefix("file://")
    is_of_hub = HUB_ID_AT.fullmatch(inner) and kind_of(inner) is None and not os.path.lexists(inner)
    return [] if "://" in inner or is_of_hub else expand([inner])


def loss_for(path: str) -> str:
    """The loss for the rows of a local file, as far as its first row shows what they are for: sft, dpo or kto."""
    with suppress(TrilloraError, BadRow):  # checked later, with a message
        for file in check_files(path)[:1]:
            for row in first_rows(file, 1):
                if not isinstance(row, Fault):
                    return LOSS_FOR[rows_shown_by(parse(row.raw), "answers")]
    return LOSS_FOR["answers"]


def _paths(data: DataSection) -> Iterator[str]:
    sources = [data.path] if isinstance(data.path, str) else [source.path for source in data.path if not source.config]
    yield from sources
    if data.validation is not None:
        yield data.validation


def _check_rows(file: DataFile, data: DataSection, rows: Rows) -> None:
    """Refuses a file whose first rows cannot be read, or are not of one format."""
    template = data.template.model_dump(exclude_none=True) if data.template is not None else {}
    try:
        needed = {name: names_needed(source, f"data.template.{name}") for name, source in template.items()}
    except BadTemplate as error:
        raise TrilloraError(error.what, where=error.where, do=error.do) from None
    own = data.format if data.format != "auto" else None
    found: dict[str, str] = {}  # member of an archive -> format of its rows
    unknown: TrilloraError | None = None
    lacking: list[TrilloraError] = []
    first = list(first_rows(file, ROWS_READ, data.row_path))
    for row in first:
        where = place(file.name, row.member, row.line)
        if isinstance(row, Fault):
            raise refused(row.what, where, row.do)
        try:
            content = parse(row.raw)
        except BadRow as error:
            raise refused(error.what, where, error.do) from None
        try:
            read = picked(content, data.columns, data.drop_keys)
            if template:
                lacking += [_lacks(needed, read, where)] if any(each - read.keys() for each in needed.values()) else []
            else:
                found[row.member] = own or found.get(row.member) or detect(read, rows)
                convert(read, found[row.member])
        except BadRow as error:
            if row.member in found:
                raise refused(error.what, where, error.do) from None
            unknown = unknown or refused(error.what, where, error.do)
    if lacking and len(lacking) == len(first):  # a template that fits some rows is left to the rows themselves
        raise lacking[0]
    if unknown is not None and not found:  # else the row is refused later, in the words of the format
        raise unknown


def _lacks(needed: Mapping[str, Set[str]], row: Mapping[str, object], where: str) -> TrilloraError:
    name, missing = next((name, sorted(each - row.keys())) for name, each in needed.items() if each - row.keys())
    what = f"data.template.{name} cannot be rendered with this row: it has no '{missing[0]}'."
    hint = f"did you mean '{meant}'? " if (meant := nearest(missing[0], row)) else ""
    return refused(what, where, f"{hint}Keys of the row: {' '.join(sorted(map(str, row))[:20])}")
