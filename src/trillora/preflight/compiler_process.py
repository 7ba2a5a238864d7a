"""Questions put to the TPU compiler, in a process of its own: libtpu reads its settings before jax is imported, may
abort on its own errors, and cannot be told to stop.

Questions are lines of JSON on stdin; events and a result for each are lines of JSON on stdout. The step is chosen by
`choices.choose` and assembled by `assembly.assemble`, as in training; only the devices are not there.

The compiler is left as soon as memory is laid out (`laid_out`); with `whole` it runs to the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from trillora.devices.chips import CHIPS, DEVICE_KINDS, Chip
from trillora.devices.slices import Slice, find_slice
from trillora.errors import TrilloraError
from trillora.events import Event, Note, to_json
from trillora.model.loading.source import load_config
from trillora.preflight.early_exit import CompileResult, lay_out
from trillora.preflight.estimate.estimate import Estimate, argument_bytes, estimate, kind_shares
from trillora.preflight.hlo.memory import (
    GIB,
    StepShapes,
    largest,
    logits_bytes,
    out_of_memory,
)
from trillora.preflight.hlo.simulate import simulate
from trillora.recipe.schema import StageRecipe
from trillora.step.autotune import Attempt, DoesNotFit, Plan, choose
from trillora.step.build import Assembly

# What compiling to the end takes on a TPU's host: 20 s were seen on 16 cores for Mistral-7B, 5 of them before there is
# machine code to make, for some 580 fusions and kernels. Where nothing is compiled it is taken for that.
LAYING_OUT_SECONDS, SECONDS_PER_INSTRUCTION, TYPICAL_COMPILE_SECONDS = 5.0, 0.026, 20.0

FLOPS_AGREE = 0.2  # relative: what is counted in the compiled program against what is counted in the traced step


class Estimates:
    """Of every assembly that was looked at, made once."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._made: dict[int, tuple[Assembly, Estimate]] = {}

    def of(self, assembly: Assembly) -> Estimate:
        if id(assembly) not in self._made:
            self._made[id(assembly)] = assembly, estimate(assembly, self._chip)
        return self._made[id(assembly)][1]

    def peak_bytes(self, assembly: Assembly) -> float:
        return self.of(assembly).peak_bytes

    def __call__(self, assembly: Assembly) -> tuple[Estimate, float]:
        """In a compiler's place."""
        return self.of(assembly), self.of(assembly).peak_bytes

    @property
    def smallest(self) -> Assembly:
        return min(self._made.values(), key=lambda made: made[1].peak_bytes)[0]


class TpuCompiler:
    """Compiles a step as far as is needed, once."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        self._folder, self._whole = folder, whole
        self._made: dict[int, tuple[Assembly, CompileResult]] = {}

    def __call__(self, assembly: Assembly) -> tuple[CompileResult | None, float]:
        laid = self.lay_out(assembly)
        return (None if laid.program is None else laid), laid.needed

    def lay_out(self, assembly: Assembly) -> CompileResult:
        if id(assembly) not in self._made:
            dump = self._folder / str(len(self._made))
            self._made[id(assembly)] = assembly, lay_out(assembly.compile, dump, whole=self._whole)
        return self._made[id(assembly)][1]


def _used(devices: list[Any], stage: StageRecipe) -> list[Any]:
    """As many of the slice's devices as the recipe wants."""
    wanted = stage.hardware.devices
    if wanted == "auto":
        return devices
    if wanted > len(devices):
        raise TrilloraError(
            f"{wanted} devices asked for, the slice has {len(devices)}.",
            where="hardware.devices",
            do=f"set hardware.devices to {len(devices)} or auto",
        )
    return devices[:wanted]


@dataclass(frozen=True)
class AbsentDevice:
    """A device of a slice that is not here, for what is decided by its kind alone."""

    device_kind: str
    platform: str = "tpu"
    process_index: int = 0

    def memory_stats(self) -> None:
        return None


def answer(question: dict[str, Any], listener: Any) -> dict[str, Any]:
    """`question`: slice, method, whole, model (folder), trust_remote_code, stage (a StageRecipe), num_steps."""
    place = find_slice(question["slice"])
    stage = StageRecipe.model_validate(question["stage"])
    config = load_config(Path(question["model"]), trust_remote_code=question["trust_remote_code"])
    ask = by_estimate if question["method"] == "estimate" else by_compiler
    return ask(stage, config, place, question["num_steps"], bool(question.get("whole")), listener)


def by_compiler(
    stage: StageRecipe, config: Any, place: Slice, num_steps: int, whole: bool, listener: Any
) -> dict[str, Any]:
    chip = CHIPS[place.chip]
    limit, estimates = chip.hbm_gib, Estimates(chip)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **place.options)
    with tempfile.TemporaryDirectory(prefix="trillora-preflight-", ignore_cleanup_errors=True) as folder:
        compiler = TpuCompiler(Path(folder), whole=whole)
        try:
            devices = _used(list(topology.devices), stage)
            plan = choose(stage, config, devices, num_steps, listener, compiler, guess=estimates.peak_bytes)
        except DoesNotFit as error:
            smallest = estimates.smallest
            shapes, report = step_shapes(smallest, config, stage), compiler.lay_out(smallest).report
            return {
                **_refused(error.tried, smallest),
                "hbm_limit_gib": limit,
                "problem": out_of_memory(report, shapes, limit, error.tried[-1].what),
                "logits_gib": logits_bytes(report, shapes) / GIB if report else None,
                "largest_buffers": largest(report, shapes) if report else [],
            }
        laid: CompileResult = plan.compiled
        assert laid.program is not None
        shapes = step_shapes(plan.assembly, config, plan.recipe)
        num_devices = plan.assembly.mesh.size
        times = simulate(laid.program, chip, num_devices, kind_shares(config))
        held = argument_bytes(plan.assembly)
        needed = plan.tried[-1].needed
        logits = logits_bytes(laid.report, shapes) if laid.report else 0.0
        rest = max(needed - sum(held.values()) - logits, 0.0)
        instructions = laid.program.count(" fusion(") + laid.program.count(" custom-call(")
        to_the_end = LAYING_OUT_SECONDS + SECONDS_PER_INSTRUCTION * instructions
        return {
            **_accepted(plan, held | {"activations": rest, "logits": logits}),
            "hbm_limit_gib": limit,
            "largest_buffers": largest(laid.report, shapes) if laid.report else [],
            "flops_per_step": times.flops * num_devices,
            "step_seconds": times.seconds,
            "step_seconds_roofline": times.roofline_seconds,
            "time": {
                "compute": times.compute_seconds,
                "hbm": times.hbm_seconds,
                "interconnect": times.interconnect_seconds,
                "exposed_interconnect": times.exposed_interconnect_seconds,
                "kernels": times.kernel_seconds,
            },
            "compile_seconds": laid.seconds if laid.is_whole else to_the_end,
            "notes": list(times.warnings),
            **_if_unread(times.flops, estimates.of(plan.assembly), num_devices),
        }


def _if_unread(flops: float, guessed: Estimate, num_devices: int) -> dict[str, Any]:
    """Another compiler may write its programs in a way not known here, so that a loop counts once. The traced step
    knows how much there is to multiply; where the two do not agree its times are the better ones."""
    if abs(flops - guessed.flops) <= FLOPS_AGREE * guessed.flops:
        return {}
    return {
        "flops_per_step": guessed.flops * num_devices,
        "step_seconds": guessed.step_seconds,
        "step_seconds_roofline": guessed.roofline_seconds,
        "times_by": "estimate",
        "time": {},
        "notes": [
            f"The compiled program could not be read whole ({flops / guessed.flops:.0%} of its arithmetic): times are "
            "those of the estimate."
        ],
    }


def by_estimate(
    stage: StageRecipe, config: Any, place: Slice, num_steps: int, whole: bool, listener: Any
) -> dict[str, Any]:
    """The same choices on as many virtual devices of this machine's CPU; nothing is compiled."""
    chip = CHIPS[place.chip]
    estimates = Estimates(chip)
    kind = next(kind for kind, name in DEVICE_KINDS.items() if name == place.chip)
    absent = _used([AbsentDevice(kind)] * place.num_devices, stage)
    virtual = jax.devices("cpu")[: len(absent)]

    def without_compiling(event: Event) -> None:
        if not isinstance(event, Note):
            listener(event)

    try:
        plan = choose(
            stage, config, absent, num_steps, without_compiling, estimates, virtual, guess=estimates.peak_bytes
        )
    except DoesNotFit as error:
        return {**_refused(error.tried), "hbm_limit_gib": chip.hbm_gib, "problem": error.what}
    found = plan.compiled
    return {
        **_accepted(
            plan,
            found.arguments
            | {"gathered": found.gathered_bytes, "activations": found.activations_bytes, "logits": found.logits_bytes},
        ),
        "hbm_limit_gib": chip.hbm_gib,
        "flops_per_step": found.flops * plan.assembly.mesh.size,
        "step_seconds": found.step_seconds,
        "step_seconds_roofline": found.roofline_seconds,
        "compile_seconds": TYPICAL_COMPILE_SECONDS,
        "notes": [],
    }


def _accepted(plan: Plan, parts: dict[str, float]) -> dict[str, Any]:
    recipe, mesh = plan.recipe, plan.assembly.mesh
    return {
        "fits": True,
        "hbm_peak_gib": round(plan.tried[-1].needed / GIB, 3),
        "memory": {name: round(num_bytes / GIB, 3) for name, num_bytes in parts.items()},
        "settings": {
            "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            "micro_batch_size": recipe.train.micro_batch_size,
            "remat": recipe.engine.remat,
            "loss_chunk": recipe.engine.loss_chunk,
            "attention": recipe.engine.attention,
            "layers": recipe.engine.layers,
        },
        "choices": [dataclasses.asdict(choice) for choice in plan.choices],
        "tried": list(map(_tried, plan.tried)),
        **_weights(plan.assembly),
    }


def _refused(tried: tuple[Attempt, ...], assembly: Assembly | None = None) -> dict[str, Any]:
    known = [attempt.needed for attempt in tried if math.isfinite(attempt.needed)]
    return {
        "fits": False,
        "hbm_peak_gib": round(min(known) / GIB, 3) if known else None,
        "tried": list(map(_tried, tried)),
        **(_weights(assembly) if assembly is not None else {}),
    }


def _tried(attempt: Attempt) -> dict[str, Any]:
    needed = round(attempt.needed / GIB, 2) if math.isfinite(attempt.needed) else None
    return {"what": attempt.what, "peak_gib": needed, "fits": attempt.fits}


def _weights(assembly: Assembly) -> dict[str, int]:
    """Of the files: their sum, and the largest array that is loaded at once."""
    sizes = [leaf.num_bytes for leaf in assembly.model.layout.values()]
    parts = [leaf.num_bytes // max(len(leaf.names), 1) for leaf in assembly.model.layout.values()]
    return {"weights_bytes": sum(sizes), "largest_tensor_bytes": max(parts)}


def step_shapes(assembly: Assembly, config: Any, stage: StageRecipe) -> StepShapes:
    text, mesh = config.get_text_config(), assembly.mesh
    rows = stage.train.micro_batch_size
    rows = stage.train.batch_size if rows == "auto" else rows
    weights: dict[tuple[int, ...], str] = {}
    for leaf in assembly.model.layout.values():
        name = leaf.names[0]
        for shape in (leaf.part_shape, leaf.part_shape[::-1]):
            weights.setdefault(tuple(d for d in shape if d > 1), f"weight {_without_number(name)}")
    return StepShapes(
        num_layers=text.num_hidden_layers,
        num_rows=max(1, rows // (mesh.shape["data"] * mesh.shape["fsdp"])),
        num_tokens=stage.train.sequence_length,
        width=text.hidden_size,
        vocabulary=text.vocab_size,
        weights={shape: name for shape, name in weights.items() if len(shape) > 1},
    )


def _without_number(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj`."""
    words = name.removesuffix(".weight").split(".")
    numbered = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[numbered[-1] + 1 :] if numbered else words)


@contextlib.contextmanager
def stdout_for_answers() -> Iterator[Any]:
    """Libraries print where they like: from here on that is stderr, and stdout carries answers only."""
    kept = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with kept:
        yield kept


def _questions() -> Iterator[dict[str, Any]]:
    """Read beside the work: stdin stays open as long as whoever asks is alive, and the work ends with it."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main() -> None:
    with stdout_for_answers() as answers:

        def tell(event: Event) -> None:
            print(to_json(event), file=answers)

        for question in _questions():
            try:
                print(json.dumps({"result": answer(question, tell)}), file=answers)
            except TrilloraError as error:
                told = {"what": error.what, "where": error.where, "do": error.do}
                print(json.dumps({"refused": told}), file=answers)


if __name__ == "__main__":
    main()
