"""Predicts time and memory of training steps, for `autotune.choose`: in preflight, and in training before it compiles.

    predictor = predictor_for(jax.devices())           # None on a CPU, or on a chip that is not in the tables
    predictor.guess(assembly)                           # Guess(seconds=0.0491, needed=…): from the traced step
    predictor.seconds(assembly, compiled)               # 0.0503: its program, simulated

On a GPU only the guessed memory is used, so that a hopeless step is not compiled: guessed times were not compared with
measured ones there, and simulating unrolled programs takes long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trillora.devices.chips import DEVICE_KINDS, Chip, Device, chip_of
from trillora.preflight.estimate.estimate import Estimate, argument_bytes, estimate, kind_shares
from trillora.preflight.hlo.simulate import AS_ASSUMED, SimulatedStep, Slowdown, simulate
from trillora.preflight.measured_speeds import measured_chip, slowdown_of
from trillora.step.build import Assembly
from trillora.step.search import ERROR, Guess

# Bytes per token, layer and unit of its width: three times what SmolLM2 needs if all is saved for the backward pass.
MOST_SAVED = 400
FLOPS_AGREE = 0.2  # relative: flops of the compiled program against the traced step's


class Estimates:
    """Estimates of assemblies, each computed once. Takes the place of a compiler and of its program's times."""

    error = 0.0
    knows_time = True

    def __init__(self, chip: Chip, slowdown: Slowdown = AS_ASSUMED) -> None:
        self._chip, self._slowdown = chip, slowdown
        self._known: dict[int, tuple[Assembly, Estimate]] = {}

    def of(self, assembly: Assembly) -> Estimate:
        if id(assembly) not in self._known:
            self._known[id(assembly)] = assembly, estimate(assembly, self._chip, slowdown=self._slowdown)
        return self._known[id(assembly)][1]

    def surely_fits(self, assembly: Assembly, limit: float) -> bool:
        text = assembly.model.module.config.get_text_config()
        tokens = math.prod(assembly.batch_shapes["tokens"].shape)  # no micro-batch has more
        saved = tokens * text.num_hidden_layers * text.hidden_size * MOST_SAVED
        return sum(argument_bytes(assembly).values()) + saved <= limit / 2

    def guess(self, assembly: Assembly) -> Guess:
        found = self.of(assembly)
        return Guess(found.step_seconds, found.peak_bytes, found.logits_bytes)

    def seconds(self, assembly: Assembly, compiled: object) -> float | None:
        return compiled.step_seconds if isinstance(compiled, Estimate) else None

    def compile(self, assembly: Assembly) -> tuple[Estimate, float]:
        """As a compiler for `choose`."""
        return self.of(assembly), self.of(assembly).peak_bytes

    @property
    def smallest(self) -> Assembly:
        return min(self._known.values(), key=lambda known: known[1].peak_bytes)[0]


class Simulations(Estimates):
    """Guesses by estimates, and times of compiled programs by simulation. `text` returns the program's HLO."""

    error = ERROR

    def __init__(self, chip: Chip, slowdown: Slowdown = AS_ASSUMED, text: Callable[[Any], str] | None = None) -> None:
        super().__init__(chip, slowdown)
        self._text = text or (lambda compiled: compiled.as_text())
        self._simulated: dict[int, SimulatedStep] = {}

    def simulated(self, assembly: Assembly, compiled: object) -> SimulatedStep:
        if id(assembly) not in self._simulated:
            shares = kind_shares(assembly.model.module.config)
            self.of(assembly)  # keeps the assembly, so that its id stays its own
            self._simulated[id(assembly)] = simulate(
                self._text(compiled), self._chip, assembly.mesh.size, shares, self._slowdown
            )
        return self._simulated[id(assembly)]

    def is_understood(self, assembly: Assembly, compiled: object) -> bool:
        """Another version of the compiler may write its programs in a form not known here, so that a loop counts once.
        The traced step knows how many flops there are."""
        guessed = self.of(assembly).flops
        return abs(self.simulated(assembly, compiled).flops - guessed) <= FLOPS_AGREE * guessed

    def seconds(self, assembly: Assembly, compiled: object) -> float | None:
        if not self.is_understood(assembly, compiled):
            return self.of(assembly).step_seconds
        return self.simulated(assembly, compiled).seconds


class MemoryEstimates(Estimates):
    """Only shows which steps are far too large."""

    knows_time = False


def predictor_for(devices: Sequence[Device]) -> Estimates | None:
    """For the devices of this machine."""
    platform, kind = devices[0].platform, devices[0].device_kind
    chip = chip_of(kind)
    if platform == "cpu" or chip is None:
        return None
    if platform == "gpu":
        return MemoryEstimates(chip)
    speeds = measured_chip(DEVICE_KINDS[kind], len(devices)) if kind in DEVICE_KINDS else None
    return Simulations(chip, slowdown_of(speeds))
