"""What preflight finds out, as frozen dataclasses. No jax.

`StageResult` describes the training step of one stage. The compiler process sends it to its parent as JSON.
`PreflightResult` is the answer for one slice. The screen shows it, the cache stores it, and `--json` prints it: one
object, or a list for several slices. Sizes are GiB of one device, times are seconds:

    {"slice": "v5e-8", "chip": "v5e", "num_devices": 8,
     "method": "compiler",                      # or "estimate"
     "verdict": "GO",                           # or "GO WITH CHANGES", "NO-GO"
     "hbm_peak_gib": 10.71,                     # null if the compiler stopped before it knew
     "hbm_limit_gib": 15.75,
     "memory": {"base": 1.69, "adapter": 0.16, "optimizer": 0.04, "batch": 0.0, "activations": 8.57, "logits": 0.25},
     "largest_buffers": [{"what": "kept from all 32 layers for the backward pass", "gib": 4.0}],
     "settings": {"backend": "tpu", "num_devices": 8, "mesh": {"data": 1, "fsdp": 8, "tensor": 1}, "dtype": "bfloat16",
                  "layers": "scan", "attention": "splash", "loss_chunk": 4096, "remat": "full",
                  "micro_batch_size": 32},      # null for NO-GO
     "changes": [{"option": "train.micro_batch_size", "before": 64, "after": 32, "why": "..."}],
     "tried": [{"what": "micro-batch 32, remat full", "peak_gib": 10.71, "fits": true, "seconds": 6.14}],
     "host": [{"what": "RAM for loading", "needed_gib": 5.0, "available_gib": 384.0, "ok": true}],
     "smallest_go": "v5e-8",                    # smallest slice of this chip known to fit; null if none was found
     "problem": null,                           # NO-GO: why the step does not fit
     "notes": ["..."],
     "versions": {"trillora": "0.2.0", "jax": "0.10.2", "libtpu": "0.0.42.1", "transformers": "5.22.2", ...},
     "from_cache": false,
     "step": {"seconds": 6.14, "error": 0.17, "roofline_seconds": 3.74, "flops": 2.8e15,
              "unit_seconds": {"compute": 4.54, "hbm": 1.86, "interconnect": 0.38, "exposed_interconnect": 0.02,
                               "kernels": 1.0},
              "tokens_per_second": 21360.0, "fraction_of_peak": 0.61},                      # null for NO-GO
     "run": {"hours": 0.57, "num_steps": 300, "num_tokens": 1753800, "padding": 0.96, "num_compiles": 1,
             "compile_seconds": 20.4, "sessions": 1, "weeks": 1, "session_hours": null, "weekly_hours": null,
             "cost": null, "price_per_hour": null,
             "stages": [{"name": "train", "num_steps": 300, "sequence_length": 4096, "step_seconds": 6.14}]},
     "measured": {"date": "2026-11-16", "num_devices": 8, "compute": 1.0, "hbm": 1.08, "links": 1.0}}
                                                # times slower than assumed; null if the chip was not measured

Reading is strict: an unknown key, a missing required key, or a value of the wrong type is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, TypeAdapter

from trillora.recipe.resolve import StepSettings

Method = Literal["compiler", "estimate"]
Verdict = Literal["GO", "GO WITH CHANGES", "NO-GO"]


@dataclass(frozen=True)
class JsonRecord:
    """Converts to and from the plain values of JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    def to_dict(self) -> dict[str, object]:
        tree: dict[str, object] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return tree

    @classmethod
    def from_dict(cls, tree: dict[str, object]) -> Self:
        return TypeAdapter(cls).validate_json(json.dumps(tree))  # strict Python input would refuse lists for tuples


@dataclass(frozen=True)
class LargeBuffer(JsonRecord):
    what: str
    gib: float


@dataclass(frozen=True)
class Trial(JsonRecord):
    """A combination of settings that was compiled or estimated."""

    what: str
    peak_gib: float | None  # None: the compiler stopped before it knew
    fits: bool
    seconds: float | None = None  # of a step; None: not predicted


@dataclass(frozen=True)
class OptionChange(JsonRecord):
    """An option of the recipe that must change for the run to fit."""

    option: str  # dotted, as in the recipe
    before: Any
    after: Any
    why: str


@dataclass(frozen=True)
class HostLine(JsonRecord):
    """One resource of the host: how much is needed and how much there is."""

    what: str
    needed_gib: float
    available_gib: float | None  # None: not known
    ok: bool


@dataclass(frozen=True)
class UnitSeconds(JsonRecord):
    """How long each unit of a device is busy in one step. They overlap, so these do not add up to the step."""

    compute: float
    hbm: float
    interconnect: float
    exposed_interconnect: float  # the part of `interconnect` that the step waits for
    kernels: float


@dataclass(frozen=True)
class StepTimes(JsonRecord):
    """Times of the step of one stage."""

    seconds: float
    roofline_seconds: float
    flops: float  # of all devices
    compile_seconds: float
    timed_by: Method
    unit_seconds: UnitSeconds | None  # None: not known


@dataclass(frozen=True)
class StageResult(JsonRecord):
    """The training step of one stage on one slice."""

    hbm_peak_gib: float | None  # if nothing fits: of the smallest candidate; None if the compiler did not say
    hbm_limit_gib: float
    tried: tuple[Trial, ...]
    weights_bytes: int  # of the whole base model
    largest_tensor_bytes: int  # largest array loaded at once
    memory: dict[str, float] = field(default_factory=dict)  # GiB by part
    largest_buffers: tuple[LargeBuffer, ...] = ()
    logits_gib: float | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
    settings: StepSettings | None = None
    step: StepTimes | None = None  # None: the step does not fit

    @property
    def fits(self) -> bool:
        return self.step is not None


@dataclass(frozen=True)
class StepForecast(JsonRecord):
    """One step of the stage with the longest sequences."""

    seconds: float
    error: float  # relative; largest known error of `seconds`
    roofline_seconds: float
    flops: float  # of all devices
    unit_seconds: UnitSeconds | None
    tokens_per_second: float  # padding included
    fraction_of_peak: float


@dataclass(frozen=True)
class StageForecast(JsonRecord):
    name: str
    num_steps: int
    sequence_length: int
    step_seconds: float


@dataclass(frozen=True)
class RunForecast(JsonRecord):
    """The whole recipe: all stages, evaluations and start-up of every session."""

    hours: float
    num_steps: int
    num_tokens: int  # without padding
    padding: float  # fraction of all token slots
    num_compiles: int
    compile_seconds: float
    sessions: int
    weeks: int
    session_hours: float | None  # limit of the platform; None: no limit
    weekly_hours: float | None
    cost: float | None  # None: no price is known
    price_per_hour: float | None  # of one chip, as given
    stages: tuple[StageForecast, ...]


@dataclass(frozen=True)
class MeasuredSpeeds(JsonRecord):
    """A measurement of the chip, and how many times slower than assumed it found each unit. Step times contain it."""

    date: str  # ISO 8601
    num_devices: int  # that were measured
    compute: float = 1.0
    hbm: float = 1.0
    links: float = 1.0


@dataclass(frozen=True)
class PreflightResult(JsonRecord):
    """The answer for one slice."""

    slice: str
    chip: str
    num_devices: int
    method: Method
    verdict: Verdict
    hbm_peak_gib: float | None
    hbm_limit_gib: float
    memory: dict[str, float]  # GiB by part
    largest_buffers: tuple[LargeBuffer, ...]
    settings: StepSettings | None
    changes: tuple[OptionChange, ...]
    tried: tuple[Trial, ...]
    host: tuple[HostLine, ...]
    smallest_go: str | None
    problem: str | None
    notes: tuple[str, ...]
    versions: dict[str, str | None]
    from_cache: bool
    step: StepForecast | None
    run: RunForecast | None
    measured: MeasuredSpeeds | None = None  # None: the chip was not measured

    @property
    def fits(self) -> bool:
        return self.verdict != "NO-GO"
