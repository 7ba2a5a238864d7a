"""Decides every `auto` of a stage, with the reason shown to the user.

What the shapes and the devices determine is decided first (`decisions`). Mesh, recomputation (remat), micro-batch size
and loss chunk are then found by compiling a few candidates: the one with the shortest predicted step that fits in
memory wins (`search`). Where no time can be predicted, they are tried in a fixed order, and the first that fits wins.

    plan = choose(stage.recipe, config, jax.devices(), num_steps=100, listener=print, predictor=predictor)
    plan.settings.remat, plan.tried         # "linear", [micro-batch 8, remat none: 57.6 ms, 7.30 GiB, …]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import Mesh

from trillora.devices.chips import Device
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, Progress
from trillora.recipe.resolve import DocumentRoom, StepSettings, given_settings
from trillora.recipe.schema import MeshSection, Quantize, Remat, StageRecipe
from trillora.step import background
from trillora.step.build import Assembly, assemble
from trillora.step.compiler_options import Options, refused_options
from trillora.step.decisions import (
    SMALL_BASE,
    Decisions,
    decide_by_hardware,
    decide_kernels,
    decide_mesh,
    formats_to_try,
    local_bytes,
    memory_limit,
    meshes_to_try,
    num_experts,
)
from trillora.step.search import (
    HOPELESS,
    UNSURE,
    Attempt,
    Guess,
    Search,
    fastest_first,
    format_gib,
    guess_sizes,
    in_order,
    leaves_room,
    reason,
    smaller_chunks,
)

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

REMAT_ORDER: tuple[Remat, ...] = ("none", "linear", "full")  # most memory first
BETWEEN: tuple[Remat, ...] = ("wide", "half", "gate", "attention")  # what they save is between linear and full
LITTLE_RECOMPUTED: tuple[Remat, ...] = ("none", "linear", "wide")
USABLE = 0.97  # of the device's memory limit; the rest is left for fragmentation


@dataclass(frozen=True)
class Plan:
    """The settings of a stage and the compiled step. `reasons` explains each new decision, by field name."""

    settings: StepSettings
    reasons: dict[str, str]
    assembly: Assembly
    compiled: Any
    tried: tuple[Attempt, ...]  # the chosen one is the last

    @property
    def num_compiles(self) -> int:
        return sum(attempt.is_compiled for attempt in self.tried)


class DoesNotFit(TrilloraError):
    """No candidate that the recipe allows fits in the devices' memory."""

    def __init__(self, what: str, tried: tuple[Attempt, ...]) -> None:
        super().__init__(
            what,
            where="train",
            do="use model.quantize=auto, a shorter train.sequence_length, a smaller lora.rank, more devices, or leave "
            "engine.remat and train.micro_batch_size on auto",
        )
        self.tried = tried


Compiler = Callable[[Assembly], tuple[Any, float]]
Builder = Callable[[StageRecipe, StepSettings, Any, Mesh, int], Assembly]


def compile_step(
    assembly: Assembly, meanwhile: Callable[[Assembly], None] | None = None, options: Options | None = None
) -> tuple[Any, float]:
    """The compiled step and the bytes it needs per device; (None, inf) if the compiler runs out of device memory.
    `meanwhile` is called while a compiler in the background works. `options` are additional compiler options."""
    try:
        program = assembly.compile(None, **(options or {}))
        if meanwhile is not None:
            meanwhile(assembly)
        compiled = background.compiled(program)
    except jax.errors.JaxRuntimeError as error:
        if says_out_of_memory(error):
            return None, math.inf
        raise
    return compiled, step_bytes(compiled)


class Predictor(Protocol):
    """Predicts how long steps take on the devices, and what they need."""

    error: float  # of guessed times, relative; 0 if compiled programs are not timed
    knows_time: bool  # else only the memory is predicted

    def surely_fits(self, assembly: Assembly, limit: float) -> bool:
        """Whether the step is so small that its memory need not be guessed."""

    def guess(self, assembly: Assembly) -> Guess:
        """From the traced step, without compiling it."""

    def seconds(self, assembly: Assembly, compiled: object) -> float | None:
        """Of a compiled step; None if only its guess is known."""


@dataclass(frozen=True)
class Candidates:
    """Builds the step for any settings, each once."""

    make: Callable[[StepSettings], Assembly]
    values: Mapping[str, Any]  # what was decided so far
    _built: dict[StepSettings, Assembly] = field(default_factory=dict)

    def settings(self, mesh: MeshSection, remat: Remat, micro_batch_size: int) -> StepSettings:
        own = {"mesh": mesh, "remat": remat, "micro_batch_size": micro_batch_size}
        return StepSettings(**{**self.values, **own})

    def assembly(self, settings: StepSettings) -> Assembly:
        if settings not in self._built:
            self._built[settings] = self.make(settings)
        return self._built[settings]


def choose(
    recipe: StageRecipe,
    config: PretrainedConfig,
    devices: Sequence[Device],
    num_steps: int,
    listener: Listener,
    *,
    kept: Mapping[str, object] | None = None,
    compiler: Compiler = compile_step,
    mesh_devices: Sequence[jax.Device] | None = None,
    predictor: Predictor | None = None,
    build: Builder | None = None,
    document_room: DocumentRoom | None = None,
) -> Plan:
    """Decides what the recipe leaves open, compiles the step, and reports each decision.

    `kept` holds fields of `StepSettings` that were decided before: at the first start of a resumed run, or for another
    stage. The devices may belong to a slice that is not attached; preflight then passes its own `compiler`, and
    `mesh_devices` if only CPU devices can take their place. `build` makes the step: of one adapter, or of several.
    `document_room`: what the data needs; None if it is not known, or if nothing is packed.
    """
    known_refusals = refused_options()
    fixed = {**(kept or {}), **given_settings(recipe)}
    decisions = Decisions(fixed, listener)
    decide_by_hardware(decisions, recipe, config, devices, document_room)
    limit = memory_limit(devices)
    by_time = predictor is not None and predictor.knows_time and limit is not None
    if not by_time:
        decide_mesh(decisions, recipe.train.batch_size, config, devices)

    def make(settings: StepSettings) -> Assembly:
        shape = settings.mesh
        mesh = make_mesh(mesh_devices or devices, MeshShape(shape.data, shape.fsdp, shape.tensor, shape.adapter))
        return (build or assemble)(recipe, settings, config, mesh, num_steps)

    candidates = Candidates(make, decisions.values)
    batch_size = recipe.train.batch_size
    has_experts = num_experts(config.get_text_config()) > 1
    meshes = meshes_to_try(len(devices), batch_size, has_experts=has_experts)
    meshes = meshes if decisions.is_open("mesh") else [decisions["mesh"]]
    remats: tuple[Remat, ...] = (fixed["remat"],) if "remat" in fixed else REMAT_ORDER
    sizes = micro_batch_sizes(batch_size, fixed.get("micro_batch_size"), meshes[-1].data * meshes[-1].fsdp)
    smallest = (meshes[-1], remats[-1], sizes[-1])
    attempts = decide_quantization(decisions, lambda: candidates.settings(*smallest), candidates, compiler, limit)
    decide_kernels(decisions, config, devices, in_group=build is not None)
    if predictor is not None and limit is not None and by_time:
        guesses = guess_all(candidates, meshes, remats, sizes, predictor, limit * USABLE, listener)
        if "loss_chunk" not in fixed:
            guesses |= smaller_chunks(guesses, limit * USABLE)
        search = Search(guesses, limit * USABLE, num_steps, predictor.error)
    else:
        ranked = [candidates.settings(meshes[0], remat, size) for size in sizes for remat in remats]
        ranked = fastest_first(ranked, recipe.train.sequence_length)
        search = Search(in_order(ranked), limit and limit * USABLE, num_steps, error=0.0)
    compiled = compile_fastest(search, candidates, compiler, predictor, limit, listener)
    attempts += [*search.too_large(), *search.attempts]
    for name in refused_options().keys() - known_refusals.keys():
        listener(Note(f"The compiler refuses its option {name}: steps are compiled without it and may be slower"))
    best = search.best
    if best is None:
        raise _does_not_fit(attempts, limit)
    attempts.sort(key=lambda attempt: attempt is best)
    decisions.decide_step(best.settings, reason(best, limit, attempts[:-1]))
    return Plan(best.settings, decisions.reasons, candidates.assembly(best.settings), compiled, tuple(attempts))


def _does_not_fit(attempts: list[Attempt], limit: float | None) -> DoesNotFit:
    attempts = sorted(attempts, key=lambda attempt: -attempt.needed)
    tried = "; ".join(map(str, attempts))
    return DoesNotFit(
        f"The run does not fit in {format_gib(limit)} of memory per device. Tried {tried}.", tuple(attempts)
    )


def compile_fastest(
    search: Search,
    candidates: Candidates,
    compiler: Compiler,
    predictor: Predictor | None,
    limit: float | None,
    listener: Listener,
) -> Any:
    """Compiles what the search asks for. Returns the program of its best candidate, and keeps no other."""
    best_program = None
    while (settings := search.next()) is not None:
        assembly = candidates.assembly(settings)
        if predictor and limit and not predictor.knows_time and not predictor.surely_fits(assembly, limit):
            # Unrolled layers need about what scanned ones do, but take many times as long to read.
            guess = predictor.guess(candidates.assembly(replace(settings, layers="scan")))
            if guess.needed > HOPELESS * limit:
                search.add(Attempt(settings, guess.needed, False, is_compiled=False))
                continue
        listener(Note(f"Compiling the training step ({settings})"))
        compiled, needed = compiler(assembly)
        fits = compiled is not None and _fits(needed, assembly, limit)
        is_choice = predictor is not None and len(search.guesses) > 1
        seconds = predictor.seconds(assembly, compiled) if predictor and is_choice and fits else None
        attempt = Attempt(settings, needed, fits, seconds)
        search.add(attempt)
        if search.best is attempt:
            best_program = compiled
    return best_program


def _fits(needed: float, assembly: Assembly, limit: float | None) -> bool:
    """Saving a checkpoint needs room for a second copy of the state."""
    return limit is None or needed + assembly.state_bytes <= limit * USABLE


def guess_all(
    candidates: Candidates,
    meshes: Sequence[MeshSection],
    remats: Sequence[Remat],
    sizes: Sequence[int],
    predictor: Predictor,
    limit: float,
    listener: Listener,
) -> dict[StepSettings, Guess]:
    """Guesses for all candidates that could be chosen. A split base only adds transfers: it is a candidate if the whole
    one may not fit, or only with much recomputed. Each guess takes seconds, so policies between linear and full
    are guessed only where they could be faster."""
    between = BETWEEN if len(remats) > 1 else ()
    each = len(remats) + len(between)  # families of a mesh

    def guess(settings: StepSettings) -> Guess:
        assembly = candidates.assembly(settings)
        return replace(predictor.guess(assembly), state=assembly.state_bytes)

    def is_enough(settings: StepSettings) -> bool:
        found = guesses[settings]
        saves = settings.remat in LITTLE_RECOMPUTED or len(remats) == 1
        return saves and UNSURE * (found.needed + found.state) <= limit

    guesses: dict[StepSettings, Guess] = {}
    for number, mesh in enumerate(meshes):
        if number and any(map(is_enough, guesses)):
            break
        smallest = candidates.assembly(candidates.settings(mesh, remats[-1], sizes[-1]))
        if mesh != meshes[-1] and local_bytes(smallest.base_shapes) > limit:
            continue
        found: dict[StepSettings, Guess] = {}
        for done, remat in enumerate((*remats, *between)):
            if done == len(remats) and not leaves_room(found, limit):
                break
            listener(Progress("Estimating the training step", number * each + done, len(meshes) * each))
            found |= guess_sizes(candidates.settings(mesh, remat, sizes[0]), sizes, limit, guess)
        guesses |= found
    listener(Progress("Estimating the training step", len(meshes) * each, len(meshes) * each))
    return guesses


def decide_quantization(
    decisions: Decisions,
    smallest: Callable[[], StepSettings],
    candidates: Candidates,
    compiler: Compiler,
    limit: float | None,
) -> list[Attempt]:
    """Takes the first format in which the candidate that needs the least memory fits. Returns those that do not."""
    attempts: list[Attempt] = []
    formats = formats_to_try(decisions["backend"])
    while decisions.is_open("quantize"):
        decisions.values["quantize"] = formats[len(attempts)]
        settings = smallest()
        assembly = candidates.assembly(settings)
        format: Quantize = decisions.values.pop("quantize")
        base = local_bytes(assembly.base_shapes)
        what = f"{format_gib(base)} of {format_gib(limit)} per device for the base"
        if limit is None or base <= SMALL_BASE * limit or format == formats[-1]:
            decisions.decide(
                "quantize", format, f"{what}; too large: {'; '.join(map(str, attempts))}" if attempts else what
            )
            continue
        needed = compiler(assembly)[1]
        if _fits(needed, assembly, limit):
            decisions.decide("quantize", format, what)
        else:
            attempts.append(Attempt(settings, needed, False))
    return attempts


def says_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error)


def micro_batch_sizes(batch_size: int, fixed: int | None, num_shards: int) -> list[int]:
    """Sizes to try, largest first, down to one sequence on each device. Each gives every device the same number.

    >>> micro_batch_sizes(24, None, 2)
    [24, 12, 6, 2]
    """
    if batch_size % num_shards:
        raise TrilloraError(
            f"{batch_size} sequences cannot be spread evenly over {num_shards} devices.",
            where="train.batch_size",
            do=f"use a multiple of {num_shards}, or leave hardware.mesh on auto",
        )
    if fixed is None:
        rows = [batch_size // num_shards]  # on a device
        while rows[-1] > 1:
            rows.append(rows[-1] // next(factor for factor in range(2, rows[-1] + 1) if rows[-1] % factor == 0))
        return [num_shards * count for count in rows]
    if fixed % num_shards:
        raise TrilloraError(
            f"A micro-batch of {fixed} sequences cannot be spread evenly over {num_shards} devices.",
            where="train.micro_batch_size",
            do=f"use a multiple of {num_shards}, or auto",
        )
    return [fixed]


def step_bytes(compiled: Any) -> float:
    """Arguments, results and temporaries of a compiled step on one device."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0.0
    return float(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
