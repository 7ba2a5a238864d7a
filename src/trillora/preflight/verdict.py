"""GO, NO-GO or GO WITH CHANGES: one answer a slice, each change proved by compiling it. No jax.

The recipe is tried as it is written. Where it does not fit, what the user fixed is opened step by step: fewer rows at
once, more recomputed, smaller pieces of the loss. Where nothing helps, larger slices of the same chip are tried until
one fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trillora.devices.chips import CHIPS
from trillora.devices.slices import Slice, find_slice, larger_slices
from trillora.errors import TrilloraError
from trillora.events import Chosen, Listener, Note, ignore_events
from trillora.files.atomic import write_file
from trillora.files.cache_dir import cache_root
from trillora.preflight.client import WHERE_IT_RUNS, CompilerClient, Method, choose_method, versions
from trillora.preflight.host import host_lines
from trillora.preflight.inputs import AskedStage, PreflightInput, fingerprint, read_asked
from trillora.preflight.sessions import run_time
from trillora.recipe.load import resolve, still_open
from trillora.recipe.schema import Recipe, StageRecipe

Answer = dict[str, Any]
# Of step times: the largest error against published training rates, and for the estimate that against the compiler on
# top of it; docs/preflight.md has the tables.
STEP_ERROR = {"compiler": 0.17, "estimate": 0.35}
SMALL_CHUNK = 256  # tokens whose logits are held at once, as the last resort
DOWNLOAD_BYTES_PER_SECOND = 100e6  # about what notebooks get from the hub
START_SECONDS = 60  # installing nothing: imports, data found in the cache, the first batches
FORWARD_SHARE = 1 / 3  # of a step's time, for a batch that is only evaluated
MOST_LARGER = 4  # slices tried beyond the one asked for


def preflight(
    recipe: Recipe,
    slices: Sequence[str],
    *,
    estimate: bool = False,
    whole: bool = False,
    price_per_hour: float | None = None,
    use_cache: bool = True,
    listener: Listener = ignore_events,
) -> list[Answer]:
    """One answer for each slice, in the order asked."""
    if not slices:
        raise TrilloraError("No slice was named.", where="--on", do="name one: v5e-8 for example, or colab, kaggle")
    places = [find_slice(name) for name in slices]
    method = choose_method(estimate)
    answers: dict[str, Answer] = {}
    files: dict[str, Path] = {}
    for place in places:
        question = {"slice": place.name, "method": method, "whole": whole, "price": price_per_hour}
        file = cache_root() / "preflight" / f"{fingerprint(recipe, **question)}.json"
        if use_cache and file.exists():
            answers[place.name] = {**json.loads(file.read_text()), "from_cache": True}
        else:
            files[place.name] = file
    unknown = list({place.name: place for place in places if place.name in files}.values())
    if unknown:
        with CompilerClient(method) as answerer:
            answerer.get_ready(max(unknown, key=lambda place: place.num_devices))
            asked = read_asked(recipe, listener)
            questions = _Preflight(asked, method, whole, price_per_hour, listener, answerer, answers)
            for place in unknown:
                answers[place.name] = questions.of(place)
                files[place.name].parent.mkdir(parents=True, exist_ok=True)
                write_file(files[place.name], json.dumps(answers[place.name], indent=1))
    return [answers[place.name] for place in places]


class _Preflight:
    """One recipe's questions. `known`: answers for other slices, so that nothing is compiled twice."""

    def __init__(
        self,
        asked: PreflightInput,
        method: Method,
        whole: bool,
        price: float | None,
        listener: Listener,
        answerer: CompilerClient,
        known: dict[str, Answer],
    ) -> None:
        self._asked, self._method, self._whole = asked, method, whole
        self._price, self._listener, self._answerer, self._known = price, listener, answerer, known

    def of(self, place: Slice) -> Answer:
        self._listener(Note(f"Asking the {'TPU compiler' if self._method == 'compiler' else 'estimate'}: {place.name}"))
        results, changes = self._search(place)
        answer = self._whole_answer(place, results, changes)
        if not answer["fits"]:
            answer["smallest_go"] = self._smallest_go(place)
        return answer

    def _search(self, place: Slice) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Results of all stages, and what had to be changed for them to fit. The last failure where nothing did."""
        results: list[dict[str, Any]] = []
        tried: list[dict[str, Any]] = []
        for changes in ladder(self._asked.stages):
            if results and "engine.loss_chunk" in changes and not _logits_matter(results[0]):
                continue
            results = self._ask_stages(place, changes)
            if all(result["fits"] for result in results):
                results[0]["tried"] = [*tried, *results[0]["tried"]]
                return results, _told(changes, results, self._asked.stages)
            tried += [row for result in results if not result["fits"] for row in result["tried"]]
        results[0]["tried"] = tried
        return results, []

    def _ask_stages(self, place: Slice, changes: dict[str, Any]) -> list[dict[str, Any]]:
        """The stage with the longest rows first, as in training: it decides for all how the base lies and how much is
        recomputed. What does not fit ends it."""
        results: list[dict[str, Any]] = []
        kept: list[Chosen] = []
        for stage in sorted(self._asked.stages, key=lambda s: -s.row_tokens):
            recipe = changed(stage.recipe, changes)
            recipe = resolve(
                recipe, [c for c in still_open(recipe, kept) if not c.path.startswith(("data.", "train."))]
            )
            question = {
                "slice": place.name,
                "method": self._method,
                "whole": self._whole,
                "model": str(self._asked.model),
                "trust_remote_code": recipe.model.trust_remote_code,
                "stage": recipe.model_dump(mode="json"),
                "num_steps": stage.num_steps,
            }
            results.append(self._answerer.ask(question, place, self._listener) | {"stage": stage.name})
            if not results[-1]["fits"]:
                return [results[-1]]
            kept = [Chosen(**choice) for choice in results[0]["choices"]]
        return results

    def _smallest_go(self, place: Slice) -> str | None:
        for larger in larger_slices(place)[:MOST_LARGER]:
            known = self._known.get(larger.name)
            fits = known["fits"] if known else all(r["fits"] for r in self._search(larger)[0])
            if fits:
                return larger.name
        return None

    def _whole_answer(self, place: Slice, results: list[dict[str, Any]], changes: list[dict[str, Any]]) -> Answer:
        first = max(results, key=lambda result: result["hbm_peak_gib"] or 0.0)
        chip, fits = CHIPS[place.chip], all(result["fits"] for result in results)
        host = host_lines(
            first["largest_tensor_bytes"],
            first["weights_bytes"],
            0,
            place.num_hosts,
            place.platform,
            place.host_ram_gib,
            place.disk_gib,
        )
        host_holds = all(line.ok for line in host)
        notes = [*self._asked.notes, *first.get("notes", ())]
        if self._method == "estimate":
            notes.append(f"This is an estimate. The real compiler runs on {WHERE_IT_RUNS}.")
        verdict = "NO-GO" if not fits else "GO WITH CHANGES" if changes else "GO"
        answer: Answer = {
            "slice": place.name,
            "chip": place.chip,
            "num_devices": place.num_devices,
            "method": self._method,
            "verdict": verdict,
            "fits": fits,
            "hbm_peak_gib": first["hbm_peak_gib"],
            "hbm_limit_gib": first["hbm_limit_gib"],
            "memory": first.get("memory", {}),
            "largest_buffers": first.get("largest_buffers", []),
            "settings": first.get("settings", {}),
            "changes": changes,
            "tried": results[0]["tried"],
            "host": [vars(line) for line in host],
            "smallest_go": place.name if fits else None,
            "problem": first.get("problem"),
            "notes": notes,
            "versions": versions(),
            "from_cache": False,
        }
        if not host_holds:
            answer["notes"].append("The host may be too small: see its lines above.")
        if fits:
            answer |= self._times(place, results, chip.bf16_tflops)
        return answer

    def _times(self, place: Slice, results: list[dict[str, Any]], peak_tflops: float) -> dict[str, Any]:
        """Of the whole recipe, every stage by its own step."""
        stages = {stage.name: stage for stage in self._asked.stages}
        pairs = [(stages[result["stage"]], result) for result in results]
        longest, first = max(pairs, key=lambda pair: pair[0].row_tokens)
        work = sum(stage.full_steps * result["step_seconds"] for stage, result in pairs)
        num_steps = sum(stage.num_steps for stage, _ in pairs)
        num_programs = sum(len(stage.steps_by_length) for stage, _ in pairs)
        compile_seconds = sum(r["compile_seconds"] * len(s.steps_by_length) for s, r in pairs)
        loading = first["weights_bytes"] / DOWNLOAD_BYTES_PER_SECOND
        total = run_time(
            work / num_steps,
            num_steps,
            START_SECONDS + loading + compile_seconds,
            sum(self._evaluation_seconds(stage, result) for stage, result in pairs),
            place.platform,
            self._price,
            place.num_chips,
        )
        slots = longest.recipe.train.batch_size * longest.row_tokens
        peak = peak_tflops * 1e12 * place.num_devices
        num_slots = sum(s.recipe.train.batch_size * s.full_steps * s.row_tokens for s, _ in pairs)
        return {
            "flops_per_step": first["flops_per_step"],
            "step_seconds": first["step_seconds"],
            "step_seconds_roofline": first["step_seconds_roofline"],
            "step_seconds_error": STEP_ERROR[first.get("times_by", self._method)],
            "time": first.get("time", {}),
            "tokens_per_second": slots / first["step_seconds"],
            "fraction_of_peak": first["flops_per_step"] / (peak * first["step_seconds"]),
            "num_compiles": num_programs,
            "compile_seconds": compile_seconds,
            "padding": 1 - sum(s.num_tokens for s, _ in pairs) / num_slots,
            "num_steps": num_steps,
            "num_tokens": sum(s.num_tokens for s, _ in pairs),
            "stages": [
                {
                    "name": s.name,
                    "num_steps": s.num_steps,
                    "tokens_of_a_row": s.row_tokens,
                    "step_seconds": r["step_seconds"],
                }
                for s, r in pairs
            ],
            "run_hours": total.hours,
            "sessions": total.sessions,
            "weeks": total.weeks,
            "session_hours": place.platform.session_hours if place.platform else None,
            "weekly_hours": place.platform.weekly_hours if place.platform else None,
            "cost": total.cost,
            "price_per_hour": self._price,
        }

    def _evaluation_seconds(self, stage: AskedStage, result: dict[str, Any]) -> float:
        if not stage.num_evaluated:
            return 0.0
        every = stage.recipe.evaluate.every_steps
        times = 10 if every == "auto" else math.ceil(stage.num_steps / every)
        batches = math.ceil(stage.num_evaluated / stage.recipe.train.batch_size)
        return times * batches * float(result["step_seconds"]) * FORWARD_SHARE


def ladder(stages: Sequence[AskedStage]) -> Iterator[dict[str, Any]]:
    """Nothing changed; then, cumulatively, what the user fixed is left to the machine, the cheapest change first."""
    changes: dict[str, Any] = {}
    yield dict(changes)
    for path, value in (
        ("train.micro_batch_size", "auto"),
        ("engine.remat", "auto"),
        ("engine.loss_chunk", SMALL_CHUNK),
    ):
        if any(_option(stage.recipe, path) != value for stage in stages) and not (
            value == SMALL_CHUNK and all(_is_small(_option(stage.recipe, path)) for stage in stages)
        ):
            changes[path] = value
            yield dict(changes)


def _logits_matter(refused: dict[str, Any]) -> bool:
    """Whether smaller pieces of the loss could make up for what is missing."""
    peak, logits = refused["hbm_peak_gib"], refused.get("logits_gib")
    return peak is None or logits is None or peak - logits <= refused["hbm_limit_gib"]


def _is_small(chunk: Any) -> bool:
    return isinstance(chunk, int) and chunk <= SMALL_CHUNK


def changed(recipe: StageRecipe, changes: dict[str, Any]) -> StageRecipe:
    tree = recipe.model_dump(mode="json")
    for path, value in changes.items():
        section, key = path.split(".")
        tree[section][key] = value
    return StageRecipe.model_validate(tree)


def _option(recipe: StageRecipe, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(recipe, section), key)


def _told(changes: dict[str, Any], results: list[dict[str, Any]], stages: Sequence[AskedStage]) -> list[dict[str, Any]]:
    """Each option that has to be another one, with what the compiler was happy with."""
    told = []
    settings = results[0]["settings"]
    why = f"fits with {results[0]['hbm_peak_gib']:.2f} of {results[0]['hbm_limit_gib']:.2f} GiB, compiled"
    for path in changes:
        before, after = _option(stages[0].recipe, path), settings[path.split(".")[1]]
        if before not in (after, "auto") or path == "engine.loss_chunk":
            told.append({"option": path, "from": before, "to": after, "why": why})
    return told
