"""A run as an object, for notebooks and scripts: `trillora.load`.

run = trillora.load("runs/qa")
run.generate("What is LoRA?")                  # "A low-rank …"
run.evaluate("test.jsonl").adapter.loss
run.export("gguf")                             # runs/qa/exports/gguf-f16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from trillora.devices.quiet import quiet_libraries
from trillora.early.runs import check_run
from trillora.events import Listener
from trillora.files.user_path import user_path
from trillora.recipe.schema import Recipe

if TYPE_CHECKING:
    from trillora.adapters.merge import MergeResult
    from trillora.evaluation.result import Evaluation
    from trillora.generation.generator import Generator
    from trillora.generation.prompts import Prompt


class LoadedRun:
    """A run, opened for use. The model is loaded for the first answer, and kept."""

    folder: Path  # of the run
    recipe: Recipe  # that it was trained with
    adapter: str | None  # the name of one of several

    def __init__(
        self,
        run: str | Path,
        *,
        adapter: str | None = None,
        overrides: Sequence[str] = (),
        listener: Listener | None = None,
    ) -> None:
        saved = check_run(run, overrides, adapter=adapter)
        self.folder, self.recipe, self.adapter = saved.folder, saved.recipe, adapter
        self._overrides, self._listener = tuple(overrides), listener
        self._is_phase = saved.recipe.phases is not None and adapter in saved.parts
        self._merged = saved.folder if adapter is None else saved.finished_adapter(adapter).folder

    def __repr__(self) -> str:
        which = "" if self.adapter is None else f", adapter {self.adapter}"
        return f"<run {self.folder}: {self.recipe.model.name}{which}>"

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str
        self,
        prompts: str,
        *,
        system: str | None = ...,
        max_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        seed: int = ...,
        base: bool = ...,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        system: str | None = ...,
        max_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        seed: int = ...,
        base: bool = ...,
    ) -> list[str]: ...
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        system: str | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        base: bool = False,
    ) -> str | list[str]:
        """Answers one prompt, or each of a list. A prompt is a text, or a list of messages with role and content.
        `system`: the system message for texts; None: the one that all rows of the training had, if they had the same.
        `base`: the base model answers, without the adapter."""
        from trillora.engine.sampling import Sampling
        from trillora.generation.system_message import with_system

        message = self._generator.system if system is None else system
        texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        given = [with_system(prompt, message) if isinstance(prompt, str) else prompt for prompt in texts]
        sampling = Sampling(temperature, top_p, seed=seed)
        answers = self._generator.generate(given, max_tokens=max_tokens, sampling=sampling, adapted=not base)
        return answers[0].text if isinstance(prompts, str) else [answer.text for answer in answers]

    def evaluate(
        self,
        data: str | Path | Sequence[str | Path] | None = None,
        *,
        max_rows: int | None = None,
        with_base: bool = True,
        forgetting: bool = False,
        needle: str | None = None,
        gate: str | None = None,
    ) -> Evaluation:
        """Evaluates the run on files of rows (default: those held out of the run), as `trillora eval` does."""
        from trillora.adapters.card import refresh_card
        from trillora.evaluation.evaluate import evaluate

        with self._shown() as listener:
            result = evaluate(
                self.folder,
                data,
                stage=self.adapter if self._is_phase else None,
                adapter=self.adapter,
                overrides=self._overrides,
                max_rows=max_rows,
                with_base=with_base,
                forgetting=forgetting,
                needle=needle,
                gate=gate,
                listener=listener,
            )
        refresh_card(self.folder)
        return result

    def export(self, to: str = "merged", *, out: str | Path | None = None, type: str | None = None) -> Path:
        """Writes the run in another form (merged, gguf, lora-gguf, ollama, text-adapter), as `trillora export` does,
        and returns the new folder. Nothing is certified: `trillora certify FOLDER` does that."""
        from trillora.export.kinds import check_kind, default_folder, export_as
        from trillora.export.source import open_source

        check_kind(to)
        with self._shown() as listener:
            source = open_source(str(self.folder), adapter=self.adapter, overrides=self._overrides, listener=listener)
            folder = default_folder(source, to, type) if out is None else user_path(out, where="out")
            return export_as(to, source, folder, type=type, listener=listener).folder

    def merge(
        self,
        *others: str | Path | LoadedRun,
        out: str | Path,
        method: str = "linear",
        weights: Sequence[float] | None = None,
    ) -> MergeResult:
        """Merges the run's adapter with adapters of other runs of the same base, as `trillora merge` does."""
        from trillora.adapters.merge import merge_adapters
        from trillora.recipe.group_section import MergeOptions

        folders = [self._merged, *(other._merged if isinstance(other, LoadedRun) else other for other in others)]
        options = MergeOptions(method, None if weights is None else tuple(weights))  # type: ignore[arg-type]
        with self._shown() as listener:
            return merge_adapters(folders, options, out, listener=listener)

    @cached_property
    def _generator(self) -> Generator:
        with self._shown() as listener:
            from trillora.generation.generator import Generator

            return Generator.open(str(self.folder), adapter=self.adapter, overrides=self._overrides, listener=listener)

    @contextmanager
    def _shown(self) -> Iterator[Listener]:
        """The listener; without one, what happens is shown as on the command line."""
        quiet_libraries()
        if self._listener is not None:
            yield self._listener
            return
        from trillora.report.console import console_listener

        with console_listener() as listener:
            yield listener
