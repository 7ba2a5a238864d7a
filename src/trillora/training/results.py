"""What a run leaves: its adapter in PEFT's format; of several adapters also scores and `group.json`.

runs/first/adapter/              the last stage's adapter, the merged phases, the best of a sweep, or the winner among
                                 learning rates
runs/skills/adapters/code/       one folder per phase
runs/skills/group.json           how each of several adapters ended, and which one was chosen
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from trillora.adapters.card import CARD_FILE, adapter_card
from trillora.adapters.merge import MergeResult, merge_adapters, write_merge_facts
from trillora.data.batches import Batches
from trillora.data.documents import Documents
from trillora.data.stage import StageData
from trillora.errors import TrilloraError
from trillora.events import Alarm, Note, Progress, Score, Scored
from trillora.files.checksums import with_checksums
from trillora.files.storage import LocalStorage
from trillora.model.adapters import (
    CONFIG_FILE,
    adapter_files,
    check_changes_something,
    check_written,
    fit_adapter,
    load_adapter,
)
from trillora.model.layout import Tree
from trillora.model.loading.source import OpenModel
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import LoraSection, Recipe
from trillora.report.run.adapters import edge_of_rates
from trillora.runs.files import ADAPTER, ADAPTERS, GROUP_FILE, MANIFEST_FILE
from trillora.runs.manifest import AdapterResult, AdapterSource, GroupResult, RunManifest
from trillora.step.adapter_spec import lora_spec
from trillora.step.build import Assembly, assemble
from trillora.step.group import padded, padding_of, scaled, widest, without_padding
from trillora.training.entries.timeline import Entry
from trillora.training.loop import Diverged, Run
from trillora.training.state.position import MemberPosition
from trillora.training.validation import Evaluator, Measures

UNFINISHED = "merged-unfinished"  # the merged adapter, until it is scored


class Results:
    """Writes the results of a run whose training is over. `entry` is the last one."""

    def __init__(
        self,
        recipe: Recipe,
        entry: Entry,
        run: Run,
        assembly: Assembly,
        settings: StepSettings,
        measures: Sequence[Measures],
        opened: OpenModel,
    ) -> None:
        """`settings`: of the entry's widest step. `measures`: of its adapters; empty if nothing was left to train."""
        self._recipe, self.entry, self._run, self._opened = recipe, entry, run, opened
        self._assembly, self._settings, self._measures, self._kept = assembly, settings, measures, run.kept

    def write(self, of_run: RunManifest) -> Path | None:
        """Returns the folder of the run's adapter, if there is one. Raises
        `Diverged` if an adapter that the user asked for is missing; the others are written before."""
        folder = self._run.folder.path / ADAPTER
        if self.entry.is_single:
            if jax.process_index() == 0:
                [own] = self._run.position.members
                step = self._step_of(own)
                source = AdapterSource(step, own.best_loss if step == own.best_step else None)
                self._run.folder.write(MANIFEST_FILE, dataclasses.replace(of_run, adapter=source).to_json())
                self._write_adapter(self.entry.members[0], self._run.folder.path, ADAPTER)
            return folder
        return folder if self._write_several() else None

    def _write_several(self) -> bool:
        """Returns whether the run has an adapter."""
        run, folders = self._run, dict[str, Path]()
        if not self._kept:
            raise self._diverged("Training diverged: none of the adapters could be trained.")
        best = self._best()
        wants_all = self.entry.kind == "phases" or (self._recipe.sweep and self._recipe.sweep.keep == "all")
        if jax.process_index() == 0:
            for member in self.entry.members if wants_all else ():
                if member.name in self._kept:
                    folders[member.name] = self._write_adapter(member, run.folder.path / ADAPTERS, member.name)
            if best is not None:
                folders.setdefault(best.name, self._write_adapter(best, run.folder.path, ADAPTER))
        diverged = [own.name for own in run.position.members if own.status == "diverged"]
        merged = self._merge(folders, diverged)
        if self.entry.kind == "phases":
            self._score(merged)
        if merged is not None:  # now, because a run with this folder counts as finished
            adapter = run.folder.path / ADAPTER
            os.rename(merged.adapter, adapter)
            write_merge_facts(dataclasses.replace(merged, adapter=adapter))
        self._write_summary(best, folders, merged)
        if diverged and self.entry.kind == "phases":
            raise self._diverged(f"{', '.join(diverged)} diverged; the adapters of the other phases are written.")
        return best is not None or merged is not None

    def _merge(self, folders: Mapping[str, Path], diverged: Sequence[str]) -> MergeResult | None:
        """Merges the adapters of all phases, if the recipe asks for it."""
        section, run = self._recipe.merge, self._run
        if section is None or jax.process_index() != 0:
            return None
        if diverged:
            run.listener(Alarm(f"The phases are not merged, because {', '.join(diverged)} diverged."))
            return None
        run.listener(Note(f"Merging {len(folders)} adapters: {section.method}"))
        target = run.folder.path / UNFINISHED
        shutil.rmtree(target, ignore_errors=True)  # left by a process that was killed
        try:
            # The changes are compared with their definition; for logits the base would be loaded a second time.
            return merge_adapters(
                [folders[name] for name in self.entry.names],
                section.options,
                target,
                prefix="merge.",
                with_logits=False,
                listener=run.listener,
            )
        except TrilloraError as error:  # the adapters themselves are written
            run.listener(Alarm(f"The phases are not merged: {error.what} `trillora merge` can merge them later."))
            return None

    def _best(self) -> StageData | None:
        """The adapter of a sweep or search that becomes the run's; phases have none."""
        if self.entry.kind == "phases":
            return None
        members = self._run.position.members
        usable = [number for number, own in enumerate(members) if own.name in self._kept]
        if len(usable) > 1 and all(members[number].best_loss is None for number in usable):
            return None  # nothing to compare them by
        number, why = best_of(
            {each: members[each] for each in usable}, {member.recipe.train.strength for member in self.entry.members}
        )
        self._run.listener(Note(f"The adapter of this run is {members[number].name}{why}"))
        member = self.entry.members[number]
        if hint := edge_of_rates(member.recipe.train.rate, [each.recipe.train.rate for each in self.entry.members]):
            self._run.listener(Note(hint))
        return member

    def _step_of(self, own: MemberPosition) -> int:
        """The step that the weights of an adapter are from."""
        [stage] = (stage for stage in self.entry.members if stage.name == own.name)
        return own.best_step if own.best_step and stage.recipe.evaluate.keep_best else own.step

    def _write_adapter(self, stage: StageData, folder: Path, name: str) -> Path:
        """Writes one adapter in PEFT's format, and reads it back."""
        run, model = self._run, self._assembly.model
        [own] = (own for own in run.position.members if own.name == stage.name)
        kept, target, run_name = self._kept[stage.name], folder / name, run.folder.path.resolve().name
        check_changes_something(kept, str(target))
        spec = lora_spec(stage.recipe.lora, num_new_tokens=len(stage.recipe.tokens or ()))
        files = adapter_files(kept, model.module, model.targets, spec, self._opened.base_name)
        files |= stage.files_with_adapter(self._opened)
        title = run_name if name == ADAPTER else f"{run_name}-{name}"
        part = stage.name if self.entry.kind == "phases" else None
        positions = self._opened.positions
        card = adapter_card(files[CONFIG_FILE], run.folder.path, name=title, part=part, positions=positions)
        with run.folder.reported(target):
            summed = with_checksums(self._step_of(own), files)
            LocalStorage(folder).write(name, {CARD_FILE: card.encode(), **summed})
        check_written(target, files)
        which = "Adapter" if self.entry.is_single else f"Adapter {stage.name}"
        is_last = self._step_of(own) == own.step
        of_best = "" if is_last else f": step {self._step_of(own)}, which had the best evaluation"
        run.listener(Note(f"{which} written to {target}{of_best}"))
        return target

    # ---- scores

    def _score(self, merged: MergeResult | None) -> None:
        """Evaluates the base model, every adapter and the merged one on the held-out rows of every phase."""
        run, rows = self._run, [(stage, *_held_out(stage)) for stage in self.entry.members]
        if any(documents is None for _, _, documents in rows):
            run.listener(Note("No scores: not every phase holds out rows (data.split)"))
            return
        which: Literal["test", "validation"] = "test" if all(part == "test" for _, part, _ in rows) else "validation"
        adapters = {"base": self._placed(None)}
        adapters |= {name: self._placed(name) for name in self.entry.names if name in self._kept}
        scores: list[Score] = []
        evaluator = of_merged = None
        whole = None if merged is None else self._merged_model(merged.adapter)
        total = len(rows) * (len(adapters) + (whole is not None))
        for stage, _, documents in rows:
            assert documents is not None
            evaluator = self._evaluator(self._assembly, stage, documents, evaluator)
            for name, adapter in adapters.items():
                run.listener(Progress("Scores of the adapters", len(scores), total))
                scores.append(_measured(evaluator, name, stage, adapter, run.base))
            if whole is not None:
                of_merged = self._evaluator(whole[0], stage, documents, of_merged, is_new=of_merged is None)
                scores.append(_measured(of_merged, "merged", stage, whole[1], run.base))
        run.listener(Progress("Scores of the adapters", total, total))
        run.listener(Scored(run.position.global_step, which, tuple(scores)))

    def _merged_model(self, folder: Path) -> tuple[Assembly, Tree]:
        """The model with the rank of the merged adapter, and that adapter on the devices."""
        mesh = self._assembly.mesh
        spec, matrices = load_adapter(folder)
        recipe, config = widest(self.entry.members), self._assembly.model.module.config
        lora = LoraSection(rank=spec.rank, alpha=spec.alpha, targets=recipe.lora.targets, exclude=recipe.lora.exclude)
        own = recipe.model_copy(update={"lora": lora})
        assembly = assemble(own, self._settings, config, mesh, 1)
        fitted = fit_adapter(matrices, assembly.model.adapter_layout, where=str(folder))
        return assembly, {key: jax.device_put(array, assembly.adapter_shardings[key]) for key, array in fitted.items()}

    def _evaluator(
        self,
        assembly: Assembly,
        stage: StageData,
        documents: Documents,
        like: Evaluator | None,
        *,
        is_new: bool = False,
    ) -> Evaluator:
        recipe = stage.recipe
        known = next((one.evaluator for one in self._measures if one.evaluator), None)
        other = like or known
        size = self._settings.micro_batch_size if other is None else other.batches.batch_size
        like = None if is_new else other
        batches = Batches(
            documents,
            batch_size=size,
            sequence_length=recipe.train.sequence_length,
            pack=recipe.data.pack,
            pad_id=stage.dataset.pad_id,
        )
        return Evaluator(assembly, batches, stage.name, like=like)

    def _placed(self, name: str | None) -> Tree:
        """A kept adapter, or an adapter that changes nothing, on the devices."""
        assembly, members = self._assembly, self.entry.members
        layout = assembly.model.adapter_layout
        if name is None:
            tree: Mapping[str, np.ndarray] = assembly.model.initial_adapter(self._run.base, 0)
        else:
            recipe = next(member.recipe for member in members if member.name == name)
            kept, own = self._kept[name], without_padding(layout, padding_of(members, recipe))
            stacked = {
                key: np.stack([kept[part] for part in leaf.names]) if leaf.stacked else kept[leaf.names[0]]
                for key, leaf in own.items()
            }
            scale = lora_spec(recipe.lora).scale / lora_spec(widest(members).lora).scale
            tree = scaled(padded(stacked, layout), np.float32(scale))
        return {key: jax.device_put(array, assembly.adapter_shardings[key]) for key, array in tree.items()}

    # ---- the summary

    def _write_summary(self, best: StageData | None, folders: Mapping[str, Path], merged: MergeResult | None) -> None:
        root = self._run.folder.path
        adapters = tuple(
            AdapterResult(
                own.name,
                own.status,
                own.reason,
                num_steps=own.step,
                best_step=own.best_step,
                best_loss=own.best_loss,
                folder=str(folders[own.name].relative_to(root)) if own.name in folders else None,
                step=self._step_of(own) if own.name in folders else None,
            )
            for own in self._run.position.members
        )
        of_merge: dict[str, Any] = {}
        if merged is not None:
            of_merge = {"method": merged.method, "rank": merged.rank, "lost": merged.lost, "folder": ADAPTER}
        summary = GroupResult(self.entry.kind, best.name if best else None, adapters, of_merge)
        self._run.folder.write(GROUP_FILE, summary.to_json())

    def _diverged(self, what: str) -> Diverged:
        reasons = "; ".join(
            f"{own.name}: {own.reason}" for own in self._run.position.members if own.status == "diverged"
        )
        return Diverged(
            f"{what} {reasons}." if reasons else what,
            where=str(self._run.folder.path),
            do="lower the learning rate of these adapters and start a new run",
        )


def best_of(members: Mapping[int, MemberPosition], betas: Set[float]) -> tuple[int, str]:
    """The number of the best adapter, and why it is. Losses of different betas are not comparable: then the most right
    pairs decide, and the loss only between equals."""
    if len(betas) == 1:
        number = min(members, key=lambda each: (_known(members[each].best_loss, math.inf), each))
        loss = members[number].best_loss
        return number, "" if loss is None else f", with the lowest evaluation loss: {loss:.4f}"
    number = min(
        members,
        key=lambda each: (-_known(members[each].best_accuracy, -1), _known(members[each].best_loss, math.inf), each),
    )
    accuracy = members[number].best_accuracy
    return number, "" if accuracy is None else f", with the most pairs right: {accuracy:.1%}"


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _measured(evaluator: Evaluator, name: str, stage: StageData, adapter: Tree, base: Tree) -> Score:
    metrics = evaluator.measure(adapter, base, lambda: None)
    return Score(name, stage.name, metrics.loss, metrics.accuracy, metrics.num_tokens)


def _held_out(stage: StageData) -> tuple[str, Documents | None]:
    """The test rows of a phase, or else its evaluation rows."""
    split = stage.recipe.data.split
    if split is not None and split.test:
        documents, _ = stage.dataset.fitted("test", stage.recipe.train.sequence_length)
        if len(documents):
            return "test", documents
    return "validation", stage.evaluation
