"""The process that proves: it uses the chips and sends progress and the record to its parent as lines of JSON.

A part that fails with an error is a refused line of the record, with the error's text: that is what we need to know
about a chip that we do not have. What is most important comes first: on a machine so slow that time runs out, the rest
is skipped.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from trillora.devices.cluster import join_cluster
from trillora.devices.measured import GoldenFigures, MeasuredChip, ProofCheck
from trillora.devices.mesh import any_process, find_devices
from trillora.devices.versions import installed_version
from trillora.errors import TrilloraError
from trillora.events import Listener, Progress, to_json
from trillora.prove.compare import GoldenRecord, figures_of, judge
from trillora.prove.golden import golden_dtypes, train_golden
from trillora.prove.rates import Rates, exchange_faults, measure_rates
from trillora.recipe.schema import Dtype
from trillora.secrets import mask_message

LIBRARIES = ("trillora", "jax", "jaxlib", "libtpu", "torch", "torchax", "transformers", "numpy")
MAX_ERROR = 600  # characters of an error's text in a record
END = 55  # seconds after the start of the process; another number format that would not end by then is skipped


def prove_devices(devices: list[Any], listener: Listener) -> MeasuredChip:
    """The record of these devices."""
    checks: list[ProofCheck] = []
    golden: dict[str, GoldenFigures] = {}
    parts = {"start": round(_seconds_so_far(), 1)}

    def attempt(name: str, work: Callable[[], list[ProofCheck]]) -> float:
        began = time.monotonic()
        try:
            checks.extend(work())
        except Exception as error:  # whatever a new chip, its driver or its compiler raises
            checks.append(ProofCheck(name, "refused", "failed with an error", _text_of(error)))
        parts[name] = round(time.monotonic() - began, 1)
        return parts[name]

    def prove_golden(dtype: Dtype) -> list[ProofCheck]:
        record = GoldenRecord.read()
        run = train_golden(devices, dtype, listener)
        if run.inputs != record.inputs:
            return [ProofCheck(f"golden model, {dtype}", "refused", "its inputs differ from the record's")]
        golden[dtype] = figures_of(run.losses, run.gradients, run.how, record)
        return judge(golden[dtype], dtype)

    first, *others = golden_dtypes(devices[0])
    attempt("collectives", lambda: [_collectives(devices, listener)])
    needed = attempt(f"golden model, {first}", lambda: prove_golden(first))
    rates: list[Rates] = []
    attempt("speed", lambda: [_speed(devices, first, listener, rates)])
    for dtype in others:
        if any(any_process(_seconds_so_far() + needed > END)):  # all processes of a slice do the same
            checks.append(ProofCheck(f"golden model, {dtype}", "skipped", f"would not end within {END} s"))
        else:
            attempt(f"golden model, {dtype}", lambda dtype=dtype: prove_golden(dtype))  # type: ignore[misc]
    return MeasuredChip(
        device_kind=devices[0].device_kind,
        platform=devices[0].platform,
        num_devices=len(devices),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries={name: installed_version(name) for name in LIBRARIES},
        checks=checks,
        golden=golden,
        seconds=round(_seconds_so_far(), 1),
        part_seconds=parts,
        **(dataclasses.asdict(rates[0]) if rates else {}),
    )


def _collectives(devices: list[Any], listener: Listener) -> ProofCheck:
    name = "collectives"
    if len(devices) == 1:
        return ProofCheck(name, "skipped", "one device")
    label = "Exchanging numbers between devices"
    listener(Progress(label, 0, 1))
    faults = exchange_faults(devices)
    listener(Progress(label, 1, 1))
    if faults:
        return ProofCheck(name, "refused", f"{len(faults)} wrong results", "; ".join(faults[:3]))
    return ProofCheck(name, "ok", f"all-reduce, all-gather and reduce-scatter over {len(devices)} devices are exact")


def _speed(devices: list[Any], dtype: Dtype, listener: Listener, found: list[Rates]) -> ProofCheck:
    """A chip that cannot be timed, for example because another process uses its memory, may still be right."""
    label = "Measuring speeds"
    listener(Progress(label, 0, 1))
    try:
        rates = measure_rates(devices, dtype)
    except Exception as error:
        return ProofCheck("speed", "skipped", "failed with an error", _text_of(error))
    finally:
        listener(Progress(label, 1, 1))
    shown = [f"{rates.matrix_tflops:.4g} TFLOP/s ({dtype} matmuls)", f"{rates.memory_gb_per_second:.4g} GB/s memory"]
    if rates.gather_gb_per_second and rates.reduce_gb_per_second:
        shown.append(f"all-gather {rates.gather_gb_per_second:.4g}, all-reduce {rates.reduce_gb_per_second:.4g} GB/s")
    found.append(rates)
    return ProofCheck("speed", "ok", ", ".join(shown), "of one device, while all of them work")


def _seconds_so_far() -> float:
    return time.time() - psutil.Process().create_time()


def _text_of(error: Exception) -> str:
    """In one line, without what a record must not have: secrets, the name of the machine and of its user."""
    text = mask_message(" ".join(f"{type(error).__name__}: {error}".split()))
    for private, shown in ((os.path.expanduser("~"), "~"), (platform.node(), "this machine")):
        text = re.sub(rf"(?<!\w){re.escape(private)}(?!\w)", shown, text) if private.strip("/") else text
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"


def main() -> None:
    """Writes to the file descriptor in `sys.argv[1]`."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        try:
            join_cluster()
            record = prove_devices(find_devices("auto", None), lambda event: print(to_json(event), file=answers))
            answer: dict[str, Any] = {"result": record.to_dict()}
        except TrilloraError as error:
            answer = {"refused": {"what": error.what, "where": error.where, "do": error.do}}
        print(json.dumps(answer, allow_nan=False), file=answers)
