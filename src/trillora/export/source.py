"""What is exported: an adapter, its base model and the run that it comes from.

    source = open_source("runs/first", listener=listener)
    source.base_id              "HuggingFaceTB/SmolLM2-135M-Instruct", as adapter_config.json names it
    source.matrices             {"model.layers.0.mlp.up_proj.lora_a": …}
    source.notes                ("The run is not finished: its adapter at the last checkpoint is used, step 12 of 40.",)

Weights of the base are read later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.adapters.card import CardFacts, Relation, model_card
from trillora.adapters.logits_check import open_local
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files.read_json import read_json
from trillora.files.user_path import user_path
from trillora.generation.prompts import Prompts, configured_stops
from trillora.model.adapters import CONFIG_FILE, TEMPLATE_FILE, load_adapter, read_head
from trillora.model.loading.growth import tokenizer_files
from trillora.model.loading.rope import rope_of
from trillora.model.loading.source import OpenModel, load_tokenizer
from trillora.model.lora_spec import LoraSpec
from trillora.recipe.schema import Recipe, stages_of
from trillora.runs.adapter import adapter_of, template_of
from trillora.runs.files import is_run
from trillora.runs.saved import SavedAdapter, SavedRun, find_adapter

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

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
    part: str | None = None  # the adapter's name, if its run has several

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files and the chat template, as the adapter was trained with them."""
        files = tokenizer_files(self.base.tokenizer, self.tokenizer_folder or self.base.folder)
        return files if self.own_template is None else {**files, TEMPLATE_FILE: self.own_template.encode()}

    @property
    def template(self) -> str | None:
        """The chat template that it was trained with."""
        tokenizer = self.base.tokenizer
        return self.own_template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)

    @cached_property
    def prompts(self) -> Prompts:
        """Prompts as in training. Templates are untrusted: they are rendered in a process with limits."""
        data = stages_of(self.recipe)[-1].recipe.data if self.recipe is not None else None
        return Prompts(
            self.base.tokenizer,
            template=self.template,
            template_date=data.template_date if data is not None else None,
            arguments=data.template_arguments if data is not None else None,
            stops=configured_stops(self.base.folder, self.base.config),
        )

    @property
    def adds_bos(self) -> bool:
        return adds_bos(self.base.tokenizer, self.prompts)

    def card(
        self,
        *,
        relation: Relation,
        form: str,
        library: str | None,
        usage: str,
        tags: Sequence[str] = (),
        notes: Sequence[str] = (),
        config: Mapping[str, object] | None = None,
    ) -> bytes:
        """The model card of something that is made from this adapter: README.md. `form` starts its first sentence, such
        as "A fine-tuned version"; `usage` says how to load it. `config`: another adapter_config.json than its own."""
        if config is None:
            config = read_json(self.adapter / CONFIG_FILE, dict[str, Any], do="copy the file again")
        facts = CardFacts(
            self.name,
            self.base_id,
            relation,
            form,
            self.run,
            self.part,
            config,
            notes,
            library,
            tags,
            usage,
            self.base.positions,
        )
        return model_card(facts).encode()


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    kind: str
    folder: Path
    files: tuple[str, ...]
    num_bytes: int
    notes: tuple[str, ...]


def adds_bos(tokenizer: Tokenizer, prompts: Prompts) -> bool:
    """Whether llama.cpp should add BOS to every text, chats too: it does both or neither. Where the tokenizer adds
    it and the chat template does not, chats count."""
    bos = [tokenizer.bos_token_id]
    if tokenizer.bos_token_id is None or tokenizer("a")["input_ids"][:1] != bos:
        return False
    return not prompts.has_template or prompts.encode([{"role": "user", "content": "a"}])[:1] == bos


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
    run = SavedRun(given, tuple(overrides)) if is_run(given) else SavedRun.around(given, overrides)
    if run is None:
        found = find_adapter(given if adapter is None else adapter)
    elif given != run.folder and adapter is None:
        found = SavedAdapter(given, run)
    else:
        found = adapter_of(run, adapter, base=base, listener=listener)
    folder, recipe = found.folder, run.recipe if run is not None else None
    spec, matrices = load_adapter(folder)
    base_id = read_head(folder).base_name or ""
    if run is not None:
        opened = run.open_base(base, adapter=folder)
    elif base is not None:
        opened = OpenModel.open(base, revision=None, trust_remote_code=False, rope=rope_of(folder))
    else:
        opened = _open_local(base_id, folder)
    if _has_tokenizer(folder):
        opened = replace(opened, tokenizer=load_tokenizer(folder))
    if base is None and run is not None:
        run.check_base(opened)
    notes = [found.note] if found.note else []
    if recipe is not None and recipe.model.quantize not in ("auto", "none"):
        products = "" if recipe.engine.matmul == "full" else f" with matmuls in {recipe.engine.matmul}"
        trained = f"The run trained on a base in {recipe.model.quantize}{products}"
        notes.append(f"{trained}; this uses its full-precision weights.")
        listener(Note(notes[-1]))
    shown = given.resolve().name
    if run is not None and given != run.folder:
        shown = f"{run.folder.resolve().name}-{shown}"
    return ExportSource(
        shown,
        None if run is None else run.folder,
        folder,
        opened,
        base_id or opened.base_name,
        spec,
        matrices,
        recipe,
        tuple(notes),
        template_of(folder),
        folder if _has_tokenizer(folder) else None,
        found.part,
    )


def _open_local(base_id: str, adapter: Path) -> OpenModel:
    """The base model that an adapter names. Nothing is downloaded because a file says so."""
    found = open_local(base_id, rope_of(adapter)) if base_id else None
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
