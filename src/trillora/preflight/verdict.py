"""GO, GO WITH CHANGES or NO-GO: one answer per slice, each proposed change verified by compiling it. No jax.

The recipe is first tried as written. If it does not fit, options that the user fixed are released one after the other:
micro-batch size, rematerialization, chunk size of the loss. If nothing fits, larger slices of the same chip are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.devices.chips import CHIPS
from trillora.devices.slices import Slice, find_slice, larger_slices
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files.atomic import write_file
from trillora.files.cache_dir import cache_root
from trillora.preflight.client import WHERE_IT_RUNS, CompilerClient, choose_method, versions
from trillora.preflight.host import host_lines
from trillora.preflight.inputs import PreflightInput, StageInput, fingerprint, read_inputs
from trillora.preflight.measured_speeds import measured_speeds, slowdown_of
from trillora.preflight.question import StepQuestion
from trillora.preflight.result import (
    Method,
    OptionChange,
    PreflightResult,
    RunForecast,
    StageForecast,
    StageResult,
    StepForecast,
    Trial,
)
from trillora.preflight.sessions import run_time
from trillora.recipe.resolve import StepSettings, given_settings
from trillora.recipe.schema import Recipe, StageRecipe

# Relative error of step times, as shown: more than the largest one against published training rates (0.114), because
# none of these is of a LoRA step; for the estimate, with the error against the compiler (benchmarks/PREFLIGHT.md).
STEP_ERROR = {"compiler": 0.17, "estimate": 0.35}
SMALL_CHUNK = 256  # tokens per chunk of the loss, as the last resort
DOWNLOAD_BYTES_PER_SECOND = 100e6  # typical for notebooks downloading from the hub
START_SECONDS = 60  # imports, reading data from the cache, the first batches; without installing packages
FORWARD_SHARE = 1 / 3  # of a step's time, for a batch that is only evaluated
MAX_LARGER_SLICES = 4  # slices tried beyond the requested one


def preflight(
    recipe: Recipe,
    slices: Sequence[str],
    *,
    estimate: bool = False,
    whole: bool = False,
    price_per_hour: float | None = None,
    use_cache: bool = True,
    listener: Listener = ignore_events,
) -> list[PreflightResult]:
    """One result per slice, in the given order."""
    if not slices:
        raise TrilloraError("No slice given.", where="--on", do="name at least one, for example v5e-8, colab or kaggle")
    places = [find_slice(name) for name in slices]
    method = choose_method(estimate)
    results: dict[str, PreflightResult] = {}
    files: dict[str, Path] = {}
    for place in places:
        speeds = measured_speeds(place, lambda text: listener(Note(text)))
        question = {"slice": place.name, "method": method, "whole": whole, "price": price_per_hour, "measured": speeds}
        file = cache_root() / "preflight" / f"{fingerprint(recipe, **question)}.json"
        if use_cache and file.exists():
            cached = PreflightResult.from_dict(json.loads(file.read_text()))
            results[place.name] = dataclasses.replace(cached, from_cache=True)
        else:
            files[place.name] = file
    unknown = list({place.name: place for place in places if place.name in files}.values())
    if unknown:
        with CompilerClient(method) as client:
            client.get_ready(max(unknown, key=lambda place: place.num_devices))
            inputs = read_inputs(recipe, listener)
            search = _Preflight(inputs, method, whole, price_per_hour, listener, client, results)
            for place in unknown:
                results[place.name] = search.result(place)
                with contextlib.suppress(OSError):  # an answer that cannot be kept is computed again
                    files[place.name].parent.mkdir(parents=True, exist_ok=True)
                    write_file(files[place.name], json.dumps(results[place.name].to_dict(), indent=1))
    return [results[place.name] for place in places]


@dataclass(frozen=True)
class _Outcome:
    """Of a search: a result per stage, or the one of the stage that does not fit."""

    stages: list[tuple[StageInput, StageResult]]
    tried: list[Trial]
    changes: tuple[OptionChange, ...] = ()

    @property
    def fits(self) -> bool:
        return all(result.fits for _, result in self.stages)


@dataclass(frozen=True)
class _Preflight:
    """Searches for settings of one recipe that fit. `known`: results of other slices, so that nothing is compiled
    twice."""

    inputs: PreflightInput
    method: Method
    whole: bool
    price: float | None
    listener: Listener
    client: CompilerClient
    known: dict[str, PreflightResult]

    def result(self, place: Slice) -> PreflightResult:
        source = "TPU compiler" if self.method == "compiler" else "estimate"
        self.listener(Note(f"Checking {place.name} with the {source}"))
        outcome = self._search(place)
        first = max((result for _, result in outcome.stages), key=lambda result: result.hbm_peak_gib or 0.0)
        host = host_lines(
            first.largest_tensor_bytes,
            first.weights_bytes,
            0,
            place.num_hosts,
            place.platform,
            place.host_ram_gib,
            place.disk_gib,
        )
        notes = [*self.inputs.notes, *first.notes]
        if self.method == "estimate":
            notes.append(f"This is an estimate. The TPU compiler runs on {WHERE_IT_RUNS}.")
        if not all(line.ok for line in host):
            notes.append("The host may be too small: see Host.")
        step, run = self._forecast(place, outcome) if outcome.fits else (None, None)
        return PreflightResult(
            slice=place.name,
            chip=place.chip,
            num_devices=place.num_devices,
            method=self.method,
            verdict="NO-GO" if not outcome.fits else "GO WITH CHANGES" if outcome.changes else "GO",
            hbm_peak_gib=first.hbm_peak_gib,
            hbm_limit_gib=first.hbm_limit_gib,
            memory=first.memory,
            largest_buffers=first.largest_buffers,
            settings=first.settings,
            changes=outcome.changes,
            tried=tuple(outcome.tried),
            host=host,
            smallest_go=place.name if outcome.fits else self._smallest_go(place),
            problem=first.problem,
            notes=tuple(notes),
            versions=versions(),
            from_cache=False,
            step=step,
            run=run,
            measured=measured_speeds(place),
        )

    def _search(self, place: Slice) -> _Outcome:
        """Results of all stages and the changes they need; the last failure if nothing fits."""
        tried: list[Trial] = []
        stages: list[tuple[StageInput, StageResult]] = []
        for relaxed in ladder(self.inputs.stages):
            if stages and "loss_chunk" in relaxed and not _logits_matter(stages[0][1]):
                continue
            stages = self._ask_stages(place, relaxed)
            if all(result.fits for _, result in stages):
                first = stages[0][1]
                return _Outcome(stages, [*tried, *first.tried], _proven(relaxed, first, self.inputs.stages))
            tried += stages[0][1].tried
        return _Outcome(stages, tried)

    def _ask_stages(self, place: Slice, relaxed: Sequence[str]) -> list[tuple[StageInput, StageResult]]:
        """The stage with the longest sequences comes first, as in training: its mesh and its rematerialization are used
        for all stages. The first stage that does not fit is returned alone."""
        results: list[tuple[StageInput, StageResult]] = []
        kept: StepSettings | None = None
        slowdown = slowdown_of(measured_speeds(place))
        for stage in sorted(self.inputs.stages, key=lambda s: -s.sequence_length):
            recipe = relax(stage.recipe, relaxed)
            question = StepQuestion(
                slice=place.name,
                method=self.method,
                whole=self.whole,
                model=str(self.inputs.model),
                trust_remote_code=recipe.model.trust_remote_code,
                stage=recipe,
                num_steps=stage.num_steps,
                kept=kept,
                slowdown=slowdown,
                members=tuple(stage.members),
                width=stage.width,
            )
            result = self.client.ask(question, self.listener)
            if not result.fits:
                return [(stage, result)]
            results.append((stage, result))
            kept = results[0][1].settings
        return results

    def _smallest_go(self, place: Slice) -> str | None:
        if self.inputs.stages[0].recipe.hardware.mesh != "auto":  # it is for one number of devices
            return None
        for larger in larger_slices(place)[:MAX_LARGER_SLICES]:
            known = self.known.get(larger.name)
            if known.fits if known else self._search(larger).fits:
                return larger.name
        return None

    def _forecast(self, place: Slice, outcome: _Outcome) -> tuple[StepForecast, RunForecast]:
        """Of the step with the longest sequences, and of the whole recipe with each stage's own step time."""
        timed = [(stage, result.step) for stage, result in outcome.stages if result.step is not None]
        longest, step = max(timed, key=lambda pair: pair[0].sequence_length)
        num_steps = sum(stage.num_steps for stage, _ in timed)
        num_tokens = sum(stage.num_tokens for stage, _ in timed)
        num_slots = sum(s.recipe.train.batch_size * s.full_steps * s.sequence_length * s.width for s, _ in timed)
        compile_seconds = sum(times.compile_seconds * len(s.steps_by_length) for s, times in timed)
        download_seconds = outcome.stages[0][1].weights_bytes / DOWNLOAD_BYTES_PER_SECOND
        total = run_time(
            sum(stage.full_steps * times.seconds for stage, times in timed) / num_steps,
            num_steps,
            START_SECONDS + download_seconds + compile_seconds,
            sum(_forward_seconds(stage, times.seconds) for stage, times in timed),
            place.platform,
            self.price,
            place.num_chips,
        )
        peak_flops = CHIPS[place.chip].bf16_tflops * 1e12 * place.num_devices
        step_forecast = StepForecast(
            seconds=step.seconds,
            error=STEP_ERROR[step.timed_by],
            roofline_seconds=step.roofline_seconds,
            flops=step.flops,
            unit_seconds=step.unit_seconds,
            tokens_per_second=longest.recipe.train.batch_size * longest.sequence_length * longest.width / step.seconds,
            fraction_of_peak=step.flops / (peak_flops * step.seconds),
        )
        run = RunForecast(
            hours=total.hours,
            num_steps=num_steps,
            num_tokens=num_tokens,
            padding=1 - num_tokens / num_slots,
            num_compiles=sum(len(stage.steps_by_length) for stage, _ in timed),
            compile_seconds=compile_seconds,
            sessions=total.sessions,
            weeks=total.weeks,
            session_hours=place.platform.session_hours if place.platform else None,
            weekly_hours=place.platform.weekly_hours if place.platform else None,
            cost=total.cost,
            price_per_hour=self.price,
            stages=tuple(StageForecast(s.name, s.num_steps, s.sequence_length, times.seconds) for s, times in timed),
        )
        return step_forecast, run


def _forward_seconds(stage: StageInput, step_seconds: float) -> float:
    """Of the evaluations, and of the sequences that a reference reads before the first step."""
    every, batch_size = stage.recipe.evaluate.every_steps, stage.recipe.train.batch_size
    times = 10 if every == "auto" else math.ceil(stage.num_steps / every)
    batches = times * math.ceil(stage.num_evaluated / batch_size) + stage.num_compared / batch_size
    return batches * step_seconds * FORWARD_SHARE


def ladder(stages: Sequence[StageInput]) -> Iterator[tuple[str, ...]]:
    """Settings to relax, by field name and in order of cost: first none, then one more each time. The last one is a
    small loss chunk."""
    given = [given_settings(stage.recipe) for stage in stages]
    relaxed: tuple[str, ...] = ()
    yield relaxed
    for field in ("micro_batch_size", "remat"):
        if any(field in settings for settings in given):
            relaxed += (field,)
            yield relaxed
    if not all(settings.get("loss_chunk", math.inf) <= SMALL_CHUNK for settings in given):
        yield (*relaxed, "loss_chunk")


def relax(recipe: StageRecipe, fields: Sequence[str]) -> StageRecipe:
    """The recipe with these settings on auto, or for the loss with a small chunk."""
    engine: dict[str, Any] = {"remat": "auto"} if "remat" in fields else {}
    if "loss_chunk" in fields:
        engine["loss_chunk"] = SMALL_CHUNK
    sections: dict[str, Any] = {"engine": recipe.engine.model_copy(update=engine)}
    if "micro_batch_size" in fields:
        sections["train"] = recipe.train.model_copy(update={"micro_batch_size": "auto"})
    return recipe.model_copy(update=sections)


def _logits_matter(refused: StageResult) -> bool:
    """Whether a smaller loss chunk could free enough memory."""
    peak, logits = refused.hbm_peak_gib, refused.logits_gib
    return peak is None or logits is None or peak - logits <= refused.hbm_limit_gib


def _proven(relaxed: Sequence[str], first: StageResult, stages: Sequence[StageInput]) -> tuple[OptionChange, ...]:
    """The options that must change, with the values that fit."""
    why = f"fits: {first.hbm_peak_gib:.2f} of {first.hbm_limit_gib:.2f} GiB"
    given = given_settings(stages[0].recipe)
    proven = []
    for field in relaxed:
        before, after = given.get(field, "auto"), getattr(first.settings, field)
        if before not in (after, "auto") or field == "loss_chunk":
            proven.append(OptionChange(StepSettings.OPTIONS[field], before, after, why))
    return tuple(proven)
