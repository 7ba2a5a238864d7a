"""What is exported: an adapter, its base model and the run that it comes from.

    source = open_source("runs/first", listener=listener)
    source.base_id              "HuggingFaceTB/SmolLM2-135M-Instruct", as adapter_config.json names it
    source.matrices             {"model.layers.0.mlp.up_proj.lora_a": …}
    source.notes                ("The run has not finished: this is its checkpoint of step 120.",)

A run that has not finished has no adapter yet. Then the newest valid checkpoint is used, and a note says so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trillora.adapters.card import CardFacts, Relation, model_card
from trillora.adapters.inputs import recorded_base_digest
from trillora.adapters.logits_check import open_local
from trillora.data.open import chat_template
from trillora.data.rendering.chat_templates import find_template
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files.checkpoints import Checkpoints
from trillora.files.checksums import with_checksums
from trillora.files.read_json import read_json
from trillora.files.storage import LocalStorage, open_storage
from trillora.files.user_path import user_path
from trillora.model.adapters import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE, load_adapter, read_head
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.growth import tokenizer_files
from trillora.model.loading.source import OpenModel, load_tokenizer, weight_files
from trillora.model.lora_spec import LoraSpec
from trillora.recipe.load import load_run_recipe
from trillora.recipe.schema import Recipe, stages_of
from trillora.runs.files import ADAPTER, ADAPTERS, CHECKPOINTS, EXPORTS, is_run
from trillora.secrets import without_secrets

TOKENIZER_FILE = "tokenizer_config.json"  # of a complete tokenizer next to an adapter


@dataclass(frozen=True)
class ExportSource:
    """An adapter with everything that an export needs. The weights of the base are not read yet."""

    name: str  # for people: the name of the run's folder, or of the adapter's
    run: Path | None
    adapter: Path  # folder
    base: OpenModel  # with the tokenizer that the adapter was trained with
    base_id: str  # a hub id or path, as in adapter_config.json
    spec: LoraSpec
    matrices: dict[str, np.ndarray]  # by parameter name
    recipe: Recipe | None
    notes: tuple[str, ...]
    own_template: str | None = None  # the chat template next to the adapter
    tokenizer_folder: Path | None = None  # the tokenizer's files, if they are not the base's

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files and the chat template, as the adapter was trained with them."""
        files = tokenizer_files(self.base.tokenizer, self.tokenizer_folder or self.base.folder)
        return files if self.own_template is None else {**files, TEMPLATE_FILE: self.own_template.encode()}

    @property
    def template(self) -> str | None:
        """The chat template that it was trained with."""
        tokenizer = self.base.tokenizer
        return self.own_template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)

    def card(
        self,
        *,
        relation: Relation,
        form: str,
        library: str | None,
        usage: str,
        tags: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> bytes:
        """The model card of something that is made from this adapter: README.md. `form` starts its first sentence, such
        as "A fine-tuned version"; `usage` says how to load it."""
        config = read_json(self.adapter / CONFIG_FILE, dict[str, Any], do="copy the file again")
        part = self.adapter.name if self.adapter.parent.name == ADAPTERS else None
        facts = CardFacts(self.name, self.base_id, relation, form, self.run, part, config, notes, library, tags, usage)
        return model_card(facts).encode()


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    kind: str
    folder: Path
    files: tuple[str, ...]
    num_bytes: int
    notes: tuple[str, ...]


def open_source(
    name: str,
    *,
    adapter: str | Path | None = None,
    base: str | None = None,
    overrides: Sequence[str] = (),
    listener: Listener = ignore_events,
) -> ExportSource:
    """Opens a run's folder or an adapter's folder. `adapter` chooses one of several adapters of a run: its name or its
    folder. `base` replaces the base model; `overrides` replace options of the run's recipe."""
    given = user_path(name, where="the run or adapter")
    run = given if is_run(given) else _run_of(given)
    recipe = load_run_recipe(run, overrides).recipe if run is not None else None
    notes: list[str] = []
    folder = _adapter_folder(given, run, adapter)
    opened = None
    if folder is None:
        assert run is not None and recipe is not None
        checkpoints = _checkpoints(run, recipe, overrides)
        opened = _open_named(base, recipe)
        folder, step = _last_checkpoint(run, recipe, opened, checkpoints, listener)
        notes.append(f"The run has not finished: this is its checkpoint of step {step}.")
    spec, matrices = load_adapter(folder)
    base_id = read_head(folder).base_name or ""
    if opened is None:
        opened = _open_local(base_id, folder) if base is None and recipe is None else _open_named(base, recipe)
    if _has_tokenizer(folder):
        opened = replace(opened, tokenizer=load_tokenizer(folder))
    if base is None and recipe is not None:
        _check_base(opened, folder, run)
    if recipe is not None and recipe.model.quantize not in ("auto", "none"):
        products = "" if recipe.engine.matmul == "full" else f" with matmuls in {recipe.engine.matmul}"
        trained = f"The run trained on a base in {recipe.model.quantize}{products}"
        notes.append(f"{trained}; this uses its full-precision weights.")
    for note in notes:
        listener(Note(note))
    shown = given.resolve().name if run is None or given == run else f"{run.resolve().name}-{given.resolve().name}"
    template = folder / TEMPLATE_FILE
    return ExportSource(
        shown,
        run,
        folder,
        opened,
        base_id or opened.base_name,
        spec,
        matrices,
        recipe,
        tuple(notes),
        find_template(str(template), (), None) if template.is_file() else None,
        folder if _has_tokenizer(folder) else None,
    )


def _run_of(folder: Path) -> Path | None:
    """The run that an adapter's folder belongs to: RUN/adapter or RUN/adapters/NAME."""
    folder = folder.absolute()
    run = folder.parent if folder.name == ADAPTER else None
    run = folder.parent.parent if folder.parent.name == ADAPTERS else run
    return run if run is not None and is_run(run) else None


def _adapter_folder(given: Path, run: Path | None, adapter: str | Path | None) -> Path | None:
    """The finished adapter; None if the run has none yet."""
    if adapter is not None:
        inside = None if run is None else run / ADAPTERS / str(adapter)
        chosen = inside if inside is not None and inside.is_dir() else user_path(adapter, where="--adapter")
        return chosen / ADAPTER if is_run(chosen) else chosen
    if run is None or given != run:
        return given  # load_adapter refuses a folder without an adapter
    if (run / ADAPTER).is_dir():
        return run / ADAPTER
    several = sorted(entry.name for entry in (run / ADAPTERS).glob("*") if (entry / CONFIG_FILE).is_file())
    if several:
        raise TrilloraError(
            f"This run has {len(several)} adapters.",
            where=str(run),
            do=f"choose one with --adapter NAME: {' '.join(several[:8])}",
        )
    return None


def _checkpoints(run: Path, recipe: Recipe, overrides: Sequence[str]) -> Checkpoints:
    """The run's checkpoints. Its folder may come from another person, so an address that only it names is not
    contacted: that would use this user's network and credentials."""
    place, inside = recipe.train.checkpoint_dir or str(run / CHECKPOINTS), run / CHECKPOINTS
    is_given = any(override.startswith("train.checkpoint_dir=") for override in overrides)
    if "://" in place and not is_given:
        if not inside.is_dir():
            shown = without_secrets(place)
            raise TrilloraError(
                f"This run has no adapter yet, and its folder says that its checkpoints are at {shown}.",
                where=str(run),
                do=f"if you trust this address, add --checkpoints {shown}; or copy the checkpoints to {inside}",
            )
        place = str(inside)
    return Checkpoints(open_storage(place))


def _last_checkpoint(
    run: Path, recipe: Recipe, opened: OpenModel, checkpoints: Checkpoints, listener: Listener
) -> tuple[Path, int]:
    """Writes the adapter of the newest valid checkpoint to a folder of its own, and returns it with its step. The
    checkpoint itself may be elsewhere, and the run may remove it at any time."""
    found = checkpoints.newest_valid(listener)
    if found is None:
        raise TrilloraError(
            "This run has no adapter and no checkpoint yet.", where=str(run), do="train it for at least one step"
        )
    step, files = found
    if WEIGHTS_FILE not in files:
        raise TrilloraError(
            "This run trains several adapters together and has not finished, so none of them is written yet.",
            where=str(run),
            do="run the training command again to finish it",
        )
    name = f"adapter-step-{step}"
    data = stages_of(recipe)[-1].recipe.data
    adapter = {file: files[file] for file in (WEIGHTS_FILE, CONFIG_FILE)}
    adapter |= tokenizer_files(opened.tokenizer, opened.folder)
    if data.chat_template is not None and (template := chat_template(data, opened.tokenizer)) is not None:
        adapter[TEMPLATE_FILE] = template.encode()
    try:
        LocalStorage(run / EXPORTS).write(name, with_checksums(step, adapter))
    except OSError as error:
        raise TrilloraError(
            f"The checkpoint's adapter cannot be written: {error.strerror}.",
            where=str(run / EXPORTS / name),
            do="free disk space, or copy the run to a folder that you can write to",
        ) from error
    return run / EXPORTS / name, step


def _open_named(base: str | None, recipe: Recipe | None) -> OpenModel:
    """The base model that the user named, in the recipe or with --base. It is downloaded if needed."""
    tokens = (recipe.tokens or ()) if recipe is not None else ()
    if base is not None or recipe is None:
        return OpenModel.open(base or "", revision=None, trust_remote_code=False, tokens=tokens)
    model = recipe.model
    return OpenModel.open(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, tokens=tokens)


def _open_local(base_id: str, adapter: Path) -> OpenModel:
    """The base model that an adapter names. Nothing is downloaded because a file says so."""
    found = open_local(base_id) if base_id else None
    if found is None:
        raise TrilloraError(
            f"The base model {base_id} is not on this machine." if base_id else "The adapter names no base model.",
            where=str(adapter / CONFIG_FILE),
            do=f"name it, and it is downloaded: --base {base_id or 'MODEL'}",
        )
    return found


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    return (folder / TOKENIZER_FILE).is_file() and any((folder / name).is_file() for name in names)


def _check_base(opened: OpenModel, adapter: Path, run: Path | None) -> None:
    """An adapter is right only for the weights that it was trained on."""
    recorded = recorded_base_digest(adapter if run is None else run / ADAPTER)
    if recorded is not None and recorded != weights_digest(opened.folder, weight_files(opened.folder)):
        raise TrilloraError(
            "The base model is not the one that this run was trained on: its weights, config or code have changed.",
            where=os.fspath(opened.folder),
            do="restore the original model; or use this one with --base MODEL",
        )
