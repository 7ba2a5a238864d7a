"""The process in which the TPU compiler runs: libtpu reads its settings before jax is imported, may abort on its own
errors, and cannot be stopped.

    python -m trillora.preflight.compiler_process FD

A `StepQuestion` is a line of JSON on stdin. Events and one result per question are lines of JSON on the file descriptor
FD (see `client`). The step is chosen by `autotune.choose` and built by `build.assemble`, as in training; only the
devices are absent.

Compilation is abandoned once the memory layout is known (`early_exit`); with `whole` it runs to the end.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from trillora.devices.chips import CHIPS, DEVICE_KINDS, GIB, Device
from trillora.devices.slices import Slice, find_slice
from trillora.errors import TrilloraError
from trillora.events import Chosen, Event, Listener, Note, ignore_events, to_json
from trillora.model.layout import stored_weights
from trillora.model.loading.source import load_config
from trillora.preflight.early_exit import CompileResult, compile_until_layout
from trillora.preflight.estimate.estimate import Estimate, argument_bytes
from trillora.preflight.hlo.memory import StepShapes, largest, logits_bytes, out_of_memory
from trillora.preflight.hlo.simulate import AS_ASSUMED, SimulatedStep, Slowdown
from trillora.preflight.predict import FLOPS_AGREE, Estimates, Simulations
from trillora.preflight.question import StepQuestion
from trillora.preflight.result import StageResult, StepTimes, Trial, UnitSeconds
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import Stage, StageRecipe
from trillora.step.autotune import Builder, DoesNotFit, Plan, choose
from trillora.step.build import Assembly, assemble
from trillora.step.group import assemble_group, widest
from trillora.step.group_plan import halvings
from trillora.step.search import Attempt

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

# Seconds to compile to the end on a TPU's host. Measured for Mistral-7B on 16 cores: 20 s, of which 5 s pass before
# code generation starts, with about 580 fusions and kernels. The last value is used where nothing was compiled.
LAYOUT_SECONDS, SECONDS_PER_INSTRUCTION, TYPICAL_COMPILE_SECONDS = 5.0, 0.026, 20.0


class TpuCompiler:
    """Compiles each step once, as far as needed."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        self._folder, self._whole = folder, whole
        self._known: dict[int, tuple[Assembly, CompileResult]] = {}

    def __call__(self, assembly: Assembly) -> tuple[CompileResult | None, float]:
        result = self.compile(assembly)
        return (None if result.program is None else result), result.needed

    def compile(self, assembly: Assembly) -> CompileResult:
        if id(assembly) not in self._known:
            dump = self._folder / str(len(self._known))
            self._known[id(assembly)] = assembly, compile_until_layout(assembly.compile, dump, whole=self._whole)
        return self._known[id(assembly)][1]


def _used(devices: Sequence[Device], stage: StageRecipe) -> Sequence[Device]:
    """The devices of the slice that the recipe uses."""
    requested = stage.hardware.devices
    if requested == "auto":
        return devices
    if requested > len(devices):
        raise TrilloraError(
            f"The recipe uses {requested} devices, the slice has {len(devices)}.",
            where="hardware.devices",
            do=f"set hardware.devices to {len(devices)} or auto",
        )
    return devices[:requested]


@dataclass(frozen=True)
class AbsentDevice:
    """A device of a slice that is not attached to this machine, for decisions that depend only on its kind."""

    device_kind: str
    platform: str = "tpu"
    process_index: int = 0

    def memory_stats(self) -> None:
        return None


def _without_devices(listener: Listener) -> Listener:
    """Drops what was decided for the devices: they belong to the slice, not to this machine."""

    def listen(event: Event) -> None:
        if not (isinstance(event, Chosen) and event.path in ("hardware.backend", "hardware.devices")):
            listener(event)

    return listen


@dataclass(frozen=True)
class StepSearch:
    """Everything that the choice of a step depends on, except how a step is compiled."""

    stage: StageRecipe
    config: PretrainedConfig
    place: Slice
    num_steps: int
    listener: Listener = ignore_events
    kept: Mapping[str, object] = field(default_factory=dict)  # settings that are already decided, by field name
    build: Builder = assemble
    slowdown: Slowdown = AS_ASSUMED


def answer(question: StepQuestion, listener: Listener) -> StageResult:
    place, listener = find_slice(question.slice), _without_devices(listener)
    rope = question.stage.model.rope
    config = load_config(Path(question.model), trust_remote_code=question.trust_remote_code, rope=rope)
    kept = question.kept.shared() if question.kept else {}
    search = StepSearch(question.stage, config, place, question.num_steps, listener, kept, slowdown=question.slowdown)
    if not question.members:
        return _find_step(search, question)
    stage = widest(question.members)
    search = replace(search, stage=stage, build=_group_builder(question.members))
    result: StageResult | None = None
    for size in halvings(question.width, 1 if stage.hardware.mesh == "auto" else stage.hardware.mesh.adapter):
        result = _find_step(replace(search, kept={**kept, "adapters_at_once": size}), question)
        if result.step is not None:
            return replace(result, step=_repeated(result.step, math.ceil(question.width / size)))
    assert result is not None
    return result


def _find_step(search: StepSearch, question: StepQuestion) -> StageResult:
    return by_estimate(search) if question.method == "estimate" else by_compiler(search, whole=question.whole)


def _group_builder(members: Sequence[Stage]) -> Builder:
    def build(
        recipe: StageRecipe, settings: StepSettings, config: PretrainedConfig, mesh: Mesh, num_steps: int
    ) -> Assembly:
        return assemble_group(members, settings, config, mesh)

    return build


def _repeated(step: StepTimes, calls: int) -> StepTimes:
    """The times of a step that needs several calls of the program."""
    return replace(
        step,
        seconds=calls * step.seconds,
        roofline_seconds=calls * step.roofline_seconds,
        flops=calls * step.flops,
    )


def by_compiler(search: StepSearch, *, whole: bool) -> StageResult:
    stage, config, place = search.stage, search.config, search.place
    chip = CHIPS[place.chip]
    limit, predictor = chip.hbm_gib, Simulations(chip, search.slowdown, text=lambda result: result.program)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    with tempfile.TemporaryDirectory(prefix="trillora-preflight-", ignore_cleanup_errors=True) as folder:
        compiler = TpuCompiler(Path(folder), whole=whole)
        try:
            plan = choose(
                stage,
                config,
                _used(list(topology.devices), stage),
                search.num_steps,
                search.listener,
                kept=search.kept,
                compiler=compiler,
                predictor=predictor,
                build=search.build,
            )
        except DoesNotFit as error:
            smallest = predictor.smallest
            size = stage.train.batch_size if stage.train.micro_batch_size == "auto" else stage.train.micro_batch_size
            shapes = step_shapes(smallest, config, stage.train.sequence_length, size)
            report = compiler.compile(smallest).report
            return replace(
                _refused(error, smallest, limit),
                problem=out_of_memory(report, shapes, limit, error.tried[-1].what),
                logits_gib=logits_bytes(report, shapes) / GIB if report else None,
                largest_buffers=largest(report, shapes) if report else (),
            )
        result: CompileResult = plan.compiled
        assert result.program is not None
        shapes = step_shapes(plan.assembly, config, stage.train.sequence_length, plan.settings.micro_batch_size)
        simulated = predictor.simulated(plan.assembly, result)
        arguments = argument_bytes(plan.assembly)
        logits = logits_bytes(result.report, shapes) if result.report else 0.0
        activations = max(plan.tried[-1].needed - sum(arguments.values()) - logits, 0.0)
        step, notes = _step_times(simulated, predictor.of(plan.assembly), plan.assembly.mesh.size, result)
        return replace(
            _accepted(plan, arguments | {"activations": activations, "logits": logits}, limit, step),
            largest_buffers=largest(result.report, shapes) if result.report else (),
            notes=notes,
        )


def _step_times(
    simulated: SimulatedStep, guessed: Estimate, num_devices: int, result: CompileResult
) -> tuple[StepTimes, tuple[str, ...]]:
    """Simulated times of the compiled program, and notes.

    Another version of the compiler may write its programs in a form not known here, so that a loop counts once. The
    traced step knows how many flops there are: if the two disagree, its estimated times are used."""
    assert result.program is not None
    instructions = result.program.count(" fusion(") + result.program.count(" custom-call(")
    compile_seconds = result.seconds if result.is_whole else LAYOUT_SECONDS + SECONDS_PER_INSTRUCTION * instructions
    if abs(simulated.flops - guessed.flops) > FLOPS_AGREE * guessed.flops:
        note = (
            f"Only {simulated.flops / guessed.flops:.0%} of the step's flops were found in the compiled program: "
            "times are estimates from the traced step."
        )
        return _estimated_times(guessed, num_devices, compile_seconds), (note,)
    units = UnitSeconds(
        compute=simulated.compute_seconds,
        hbm=simulated.hbm_seconds,
        interconnect=simulated.interconnect_seconds,
        exposed_interconnect=simulated.exposed_interconnect_seconds,
        kernels=simulated.kernel_seconds,
    )
    step = StepTimes(
        seconds=simulated.seconds,
        roofline_seconds=simulated.roofline_seconds,
        flops=simulated.flops * num_devices,
        compile_seconds=compile_seconds,
        timed_by="compiler",
        unit_seconds=units,
    )
    return step, simulated.warnings


def _estimated_times(guessed: Estimate, num_devices: int, compile_seconds: float) -> StepTimes:
    return StepTimes(
        seconds=guessed.step_seconds,
        roofline_seconds=guessed.roofline_seconds,
        flops=guessed.flops * num_devices,
        compile_seconds=compile_seconds,
        timed_by="estimate",
        unit_seconds=None,
    )


def by_estimate(search: StepSearch) -> StageResult:
    """The same choices on virtual CPU devices of this machine; nothing is compiled."""
    place = search.place
    chip = CHIPS[place.chip]
    estimates = Estimates(chip, search.slowdown)
    kind = next(kind for kind, name in DEVICE_KINDS.items() if name == place.chip)
    absent = _used([AbsentDevice(kind)] * place.num_devices, search.stage)

    def without_compiling(event: Event) -> None:
        if not isinstance(event, Note):
            search.listener(event)

    try:
        plan = choose(
            search.stage,
            search.config,
            absent,
            search.num_steps,
            without_compiling,
            kept=search.kept,
            compiler=estimates.compile,
            mesh_devices=jax.devices("cpu")[: len(absent)],
            predictor=estimates,
            build=search.build,
        )
    except DoesNotFit as error:
        return replace(_refused(error, estimates.smallest, chip.hbm_gib), problem=error.what)
    found: Estimate = plan.compiled
    memory = found.arguments | {
        "gathered": found.gathered_bytes,
        "activations": found.activations_bytes,
        "logits": found.logits_bytes,
    }
    step = _estimated_times(found, plan.assembly.mesh.size, TYPICAL_COMPILE_SECONDS)
    return _accepted(plan, memory, chip.hbm_gib, step)


def _accepted(plan: Plan, memory: dict[str, float], limit_gib: float, step: StepTimes) -> StageResult:
    weights, largest_tensor = _weights(plan.assembly)
    return StageResult(
        hbm_peak_gib=round(plan.tried[-1].needed / GIB, 3),
        hbm_limit_gib=limit_gib,
        tried=tuple(map(_trial, plan.tried)),
        weights_bytes=weights,
        largest_tensor_bytes=largest_tensor,
        memory={name: round(num_bytes / GIB, 3) for name, num_bytes in memory.items()},
        settings=plan.settings,
        step=step,
    )


def _refused(error: DoesNotFit, smallest: Assembly, limit_gib: float) -> StageResult:
    known = [attempt.needed for attempt in error.tried if math.isfinite(attempt.needed)]
    weights, largest_tensor = _weights(smallest)
    return StageResult(
        hbm_peak_gib=round(min(known) / GIB, 3) if known else None,
        hbm_limit_gib=limit_gib,
        tried=tuple(map(_trial, error.tried)),
        weights_bytes=weights,
        largest_tensor_bytes=largest_tensor,
    )


def _trial(attempt: Attempt) -> Trial:
    peak = round(attempt.needed / GIB, 2) if math.isfinite(attempt.needed) else None
    return Trial(attempt.what, peak, attempt.fits, attempt.seconds)


def _weights(assembly: Assembly) -> tuple[int, int]:
    """Bytes of all weights as they are stored, and of the largest one that is loaded at once."""
    leaves = [leaf for leaf, _ in stored_weights(assembly.model.layout).values()]
    return sum(leaf.num_bytes for leaf in leaves), max(leaf.num_bytes // max(len(leaf.names), 1) for leaf in leaves)


def step_shapes(
    assembly: Assembly, config: PretrainedConfig, sequence_length: int, micro_batch_size: int
) -> StepShapes:
    text, mesh = config.get_text_config(), assembly.mesh
    weights: dict[tuple[int, ...], str] = {}
    for leaf, _ in stored_weights(assembly.model.layout).values():
        name = leaf.names[0]
        for shape in (leaf.part_shape, leaf.part_shape[::-1]):
            weights.setdefault(tuple(d for d in shape if d > 1), f"weight {_without_number(name)}")
    return StepShapes(
        num_layers=text.num_hidden_layers,
        num_rows=max(1, micro_batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])),
        num_tokens=sequence_length,
        width=text.hidden_size,
        vocabulary=text.vocab_size,
        weights={shape: name for shape, name in weights.items() if len(shape) > 1},
        copied="all-gathered" if assembly.model.quantize is None else "dequantized",
    )


def _without_number(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj`."""
    words = name.removesuffix(".weight").split(".")
    numbered = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[numbered[-1] + 1 :] if numbered else words)


def _questions() -> Iterator[StepQuestion]:
    """Questions from stdin, read in a thread: the parent keeps stdin open while it is alive, and when it dies this
    process must end even in the middle of a compilation."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield StepQuestion.from_dict(json.loads(lines.get()))


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a surviving grandchild must not keep the pipe open
    with os.fdopen(descriptor, "w", buffering=1) as answers:

        def send(event: Event) -> None:
            print(to_json(event), file=answers)

        for question in _questions():
            try:
                print(json.dumps({"result": answer(question, send).to_dict()}), file=answers)
            except TrilloraError as error:
                refused = {"what": error.what, "where": error.where, "do": error.do}
                print(json.dumps({"refused": refused}), file=answers)


if __name__ == "__main__":
    main()
