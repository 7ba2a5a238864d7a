"""What is certified: a folder, the run that it came from, the base model, and the weights that were trained.

    subject = find_subject("runs/first")              # RUN/adapter
    subject = find_subject("runs/first/exports/merged")
    subject.trained.source                            # "checkpoint of step 84"

Everything is read when it is first needed. A part that is not on this machine raises `NotHere`; checks that need it are
skipped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from trillora.adapters.logits_check import open_local
from trillora.certify.certificate import Kind
from trillora.certify.gguf_file import GgufFile, open_gguf
from trillora.certify.weights.expected import ExpectedWeights
from trillora.data.open import chat_template
from trillora.data.rendering.render import TEMPLATE_DATE
from trillora.errors import TrilloraError
from trillora.export.merged_weights import MergedWeights
from trillora.export.source import TOKENIZER_FILE, ExportSource
from trillora.files.digests import json_digest
from trillora.files.read_json import parse_json, read_json, read_text
from trillora.files.storage import MARK
from trillora.files.user_path import user_path
from trillora.generation.prompts import Prompts
from trillora.model.adapters import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    load_adapter,
    read_adapter,
    spec_of,
)
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.rope import rope_of
from trillora.model.loading.source import OpenModel, weight_files
from trillora.model.lora_spec import LayerLora, LoraSpec
from trillora.recipe.group import group_of
from trillora.recipe.schema import Recipe, StageRecipe, stages_of
from trillora.runs.files import ADAPTERS, KEPT_FILE, MERGE_FILE, is_run
from trillora.runs.manifest import RunManifest, StageRecord
from trillora.runs.saved import NotContacted, SavedRun, find_adapter

logger = logging.getLogger(__name__)
DO = "restore it from a copy, or train again"


class NotHere(TrilloraError):
    """Something that a check needs is not on this machine."""


@dataclass(frozen=True)
class Trained:
    """The weights that were trained."""

    spec: LoraSpec
    matrices: dict[str, np.ndarray]
    source: str
    is_from_run: bool  # read from a checkpoint, not from the adapter itself
    options: dict[str, Any] | None = None  # PEFT's, as the checkpoint has them

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(json_digest(_options(self.spec)).encode())
        for name in sorted(self.matrices):
            array = np.ascontiguousarray(self.matrices[name])
            digest.update(json_digest([name, array.shape, str(array.dtype)]).encode())
            digest.update(array.data)
        return digest.hexdigest()

    def scale(self, layer: str) -> float:
        return scale_of(self.spec, layer)


class Subject:
    """See the module's docstring. `base` is the name of the base model that the user gave."""

    def __init__(
        self, name: str, folder: Path, kind: Kind, adapter: Path | None, run: SavedRun | None, base: str | None
    ):
        self.name, self.folder, self.kind, self.adapter, self.run = name, folder, kind, adapter, run
        self._base = base

    # ---- the run

    @cached_property
    def recipe(self) -> Recipe | None:
        return None if self.run is None else self.run.recipe

    @cached_property
    def member(self) -> str | None:
        """The name of the adapter in a run that trains several; None otherwise."""
        if self.run is None or self.recipe is None or group_of(self.recipe) is None or self.adapter is None:
            return None
        if self.adapter.parent.name == ADAPTERS:
            return self.adapter.name
        return self.run.result.best if self.run.result is not None else None

    @cached_property
    def stage(self) -> StageRecipe | None:
        """The recipe that the adapter was trained with last."""
        if self.recipe is None:
            return None
        group = group_of(self.recipe)
        members = group.members if group else stages_of(self.recipe)
        named = [member for member in members if member.name == self.member]
        return (named or list(members))[-1].recipe

    @property
    def stage_record(self) -> StageRecord | None:
        """What run.json says about the stage, or the adapter of a group, that was trained last."""
        stages = self.manifest.stages if self.manifest is not None else ()
        named = [stage for stage in stages if self.member is not None and stage.name == self.member]
        return next(reversed(named or stages), None)

    @property
    def manifest(self) -> RunManifest | None:
        return None if self.run is None else self.run.manifest

    # ---- the base

    @cached_property
    def opened(self) -> OpenModel:
        """The base model. Nothing is downloaded because an adapter names it."""
        if self.run is not None:
            return self.run.open_base(self._base)
        if self._base is not None:
            rope = rope_of(self.adapter)
            return OpenModel.open(self._base, revision=None, trust_remote_code=False, rope=rope)
        name = self.base_id
        found = None if name is None else open_local(name, rope_of(self.adapter))
        if found is None:
            what = f"The base model {name} is not on this machine." if name else "The base model is not known."
            raise NotHere(what, where=str(self.folder), do="name it: --base MODEL, or give the run: --run RUN")
        return found

    @cached_property
    def base_id(self) -> str | None:
        """The base model's name in PEFT's config, or in the run."""
        if self.adapter is not None and (self.adapter / CONFIG_FILE).is_file():
            name = read_json(self.adapter / CONFIG_FILE, dict[str, Any], do=DO).get("base_model_name_or_path")
            return name if isinstance(name, str) and name else None
        return self.manifest.model.get("base_name") if self.manifest is not None else None

    @cached_property
    def base_digest(self) -> str:
        return weights_digest(self.opened.folder, weight_files(self.opened.folder))

    @cached_property
    def template(self) -> str | None:
        """The chat template that the rows were rendered with: the recipe's, or else the base tokenizer's."""
        if self.stage is not None and self.stage.data.chat_template is not None:
            try:
                return chat_template(self.stage.data, self.opened.tokenizer)
            except TrilloraError:  # the file that the recipe names is gone; the adapter has a copy
                if self.adapter is None or not (self.adapter / TEMPLATE_FILE).is_file():
                    raise
                return read_text(self.adapter / TEMPLATE_FILE, do=DO)
        file = None if self.adapter is None else self.adapter / TEMPLATE_FILE
        if self.run is None and file is not None and file.is_file():
            return read_text(file, do=DO)
        tokenizer = self.opened.tokenizer
        return tokenizer.get_chat_template() if tokenizer.chat_template else None

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.opened.tokenizer, template=self.template, template_date=TEMPLATE_DATE)

    # ---- what was trained

    @cached_property
    def trained(self) -> Trained:
        """From the run's checkpoint if it is there; else from the adapter, which then cannot be compared with it."""
        if self.run is not None and not self._is_merge:
            try:
                return self._from_checkpoint()
            except NotHere:
                if self.adapter is None:
                    raise
        if self.adapter is None:
            what = "It is not known which adapter this was made from."
            raise NotHere(what, where=str(self.folder), do="name the run or the adapter: --run RUN")
        return Trained(*load_adapter(self.adapter), "the adapter's own file", False)

    @cached_property
    def source(self) -> ExportSource:
        """What was trained, as an export would read it. Tokenizer and template come from the base and the run where
        these are known, not from the adapter's folder."""
        trained, base = self.trained, self.opened
        has_tokenizer = self.adapter is not None and (self.adapter / TOKENIZER_FILE).is_file()
        return ExportSource(
            name=self.name,
            run=None if self.run is None else self.run.folder,
            adapter=self.adapter or self.folder,
            base=base,
            base_id=self.base_id or base.base_name,
            spec=trained.spec,
            matrices=trained.matrices,
            recipe=self.recipe,
            notes=(),
            own_template=self.template,
            tokenizer_folder=self.adapter if self.run is None and has_tokenizer else None,
        )

    @cached_property
    def expected(self) -> ExpectedWeights:
        return ExpectedWeights(self.opened, self.trained.spec, self.trained.matrices)

    @cached_property
    def merged(self) -> MergedWeights:
        return MergedWeights(self.source)

    @property
    def gguf_path(self) -> Path:
        found = sorted(self.folder.glob("*.gguf"))
        if not found:
            raise TrilloraError("The GGUF file is missing.", where=str(self.folder), do="export it again")
        return found[0]

    @cached_property
    def gguf(self) -> GgufFile:
        return open_gguf(self.gguf_path)

    @property
    def _is_merge(self) -> bool:
        return self.adapter is not None and (self.adapter / MERGE_FILE).is_file()

    def _from_checkpoint(self) -> Trained:
        assert self.run is not None and self.recipe is not None
        try:
            checkpoints = self.run.checkpoints()
        except NotContacted as error:
            logger.warning("%s", error.what)
            raise NotHere("The run's checkpoints are not on this machine.", where=error.where, do=error.do) from None
        place = checkpoints.place
        with checkpoints.reported("read"):
            steps = checkpoints.steps()
        group = group_of(self.recipe)
        step = self._step if group is None else None  # the last checkpoint of a group has every adapter
        step = step if step is not None else max(steps, default=None)
        if step not in steps:
            raise NotHere(
                "The run has no checkpoint." if step is None else f"The checkpoint of step {step} is gone.",
                where=place,
                do="restore it to compare the adapter with what was trained",
            )
        files = checkpoints.read(step)
        source = f"checkpoint of step {step}"
        if group is not None:
            return self._of_member(files, source)
        where = f"{checkpoints.where(step)}/{WEIGHTS_FILE}"
        config = parse_json(files[CONFIG_FILE], AdapterConfig, where=f"{checkpoints.where(step)}/{CONFIG_FILE}", do=DO)
        matrices = read_adapter(files[WEIGHTS_FILE], where)
        spec = spec_of(config, {n: a.shape for n, a in matrices.items()}, where)
        return Trained(spec, matrices, source, True, config.model_dump(exclude_unset=True))

    def _of_member(self, files: Mapping[str, bytes], source: str) -> Trained:
        assert self.adapter is not None and self.stage is not None
        if self.member is None:
            raise NotHere("This adapter is not one that the run trained.", where=str(self.adapter), do=DO)
        try:
            arrays = load(files[KEPT_FILE])
        except (KeyError, SafetensorError, ValueError) as error:
            raise TrilloraError("The run's checkpoint cannot be read.", where=KEPT_FILE, do=DO) from error
        start = f"{self.member}/"
        matrices = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
        lora, found = self.stage.lora, load_adapter(self.adapter)[0]
        usual = dataclasses.replace(found, rslora=lora.rslora).in_file(LayerLora(lora.rank, lora.alpha))
        spec = dataclasses.replace(found, rank=usual.rank, alpha=usual.alpha, rslora=lora.rslora, dora=lora.dora)
        return Trained(spec, matrices, f"{source}, adapter {self.member}", True)

    @property
    def _step(self) -> int | None:
        """The step that the adapter says it is from."""
        mark = None if self.adapter is None else self.adapter / MARK
        if mark is None or not mark.is_file():
            return None
        try:
            step = json.loads(mark.read_bytes())["step"]
        except (ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) and step > 0 else None


def find_subject(target: str | Path, run: Path | None = None, base: str | None = None) -> Subject:
    """`target` is the folder of a run, an adapter or an export, or a GGUF file. `run` is the run or the adapter that an
    export was made from; by default the run that contains it."""
    folder = user_path(target, where="the folder to certify")
    if folder.is_file() and folder.suffix == ".gguf":
        folder = folder.parent
    if not folder.is_dir():
        raise TrilloraError("There is no such folder.", where=str(folder), do="give a run, an adapter or an export")
    if is_run(folder):
        folder = SavedRun(folder).finished_adapter().folder
    kind, name = _kind(folder), str(target)
    given = SavedRun(run) if run is not None and is_run(run) else None
    if kind == "adapter":
        return Subject(name, folder, kind, folder, given or SavedRun.around(folder), base)
    if run is not None and given is None:
        found = find_adapter(run)
        return Subject(name, folder, kind, found.folder, found.run, base)
    source = given or SavedRun.around(folder)
    adapter = source.finished_adapter().folder if source is not None and source.is_finished else None
    return Subject(name, folder, kind, adapter, source, base)


def _kind(folder: Path) -> Kind:
    if (folder / CONFIG_FILE).is_file():
        return "adapter"
    if (folder / "Modelfile").is_file():
        return "ollama"
    if files := sorted(folder.glob("*.gguf")):
        from trillora.certify.gguf_file import is_adapter

        return "lora-gguf" if is_adapter(files[0]) else "gguf"
    if (folder / "config.json").is_file():
        return "merged"
    raise TrilloraError(
        "There is nothing here that can be certified.",
        where=str(folder),
        do=f"give a run, or a folder with {CONFIG_FILE}, config.json or a GGUF file",
    )


def scale_of(spec: LoraSpec, layer: str) -> float:
    """The factor of B A in a layer of a loaded adapter, whose patterns are by layer."""
    ranks, alphas = dict(spec.rank_pattern), dict(spec.alpha_pattern)
    return spec.scale_of(LayerLora(ranks.get(layer, spec.rank), alphas.get(layer, spec.alpha)))


def _options(spec: LoraSpec) -> list[Any]:
    tokens = None if spec.tokens is None else list(spec.tokens.ids)
    patterns = sorted(spec.rank_pattern), sorted(spec.alpha_pattern)
    return [spec.rank, spec.alpha, spec.rslora, spec.dora, *patterns, tokens, list(spec.whole)]
