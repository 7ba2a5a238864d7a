"""Answers of preflight, for tests of what is shown."""

from __future__ import annotations

from dataclasses import replace

from trillora.preflight.result import (
    HostLine,
    LargeBuffer,
    PreflightResult,
    RunForecast,
    StageForecast,
    StepForecast,
    UnitSeconds,
)
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import MeshSection

STEP = StepForecast(
    seconds=0.9,
    error=0.15,
    roofline_seconds=0.6,
    flops=1.0e14,
    unit_seconds=UnitSeconds(compute=0.61, hbm=0.4, interconnect=0.2, exposed_interconnect=0.05, kernels=0.1),
    tokens_per_second=18204.1,
    fraction_of_peak=0.42,
)


RUN = RunForecast(
    hours=23.4,
    num_steps=13000,
    num_tokens=4915200,
    padding=0.05,
    num_compiles=2,
    compile_seconds=31.2,
    sessions=1,
    weeks=1,
    session_hours=None,
    weekly_hours=None,
    cost=None,
    price_per_hour=None,
    stages=(StageForecast("train", 13000, 2048, 0.9),),
)


GO = PreflightResult(
    slice="v5e-8",
    chip="v5e",
    num_devices=8,
    method="compiler",
    verdict="GO",
    hbm_peak_gib=9.43,
    hbm_limit_gib=15.75,
    memory={"base": 1.9, "adapter": 0.04, "optimizer": 0.02, "batch": 0.0, "activations": 6.97, "logits": 0.5},
    largest_buffers=(LargeBuffer("MLP up projection, saved for the backward pass", 2.5),),
    settings=StepSettings("tpu", 8, MeshSection(fsdp=8), "bfloat16", "scan", "splash", 4096, "linear", 8),
    changes=(),
    tried=(),
    host=(HostLine("RAM for loading", 5.1, 330.0, True),),
    smallest_go="v5e-8",
    problem=None,
    notes=("Evaluations are counted.",),
    versions={"libtpu": "0.0.42.1"},
    from_cache=False,
    step=STEP,
    run=RUN,
)


# Everything that is known if the step does not fit.
NO_GO = replace(
    GO,
    slice="v5e-1",
    num_devices=1,
    verdict="NO-GO",
    hbm_peak_gib=19.2,
    memory={"base": 13.5, "activations": 5.0, "logits": 0.7},
    largest_buffers=(LargeBuffer("base: MLP down projection", 3.5),),
    settings=None,
    host=(HostLine("Disk for the model", 14.9, 10.0, False),),
    smallest_go="v5e-4",
    problem="The step needs 19.20 GiB and a v5e chip has 15.75.",
    notes=(),
    step=None,
    run=None,
)
