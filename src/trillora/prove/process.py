"""The process that proves: it uses the chips and sends progress and the record to its parent as lines of JSON.

A part that fails with an error is a refused line of the record, with the error's text: that is what we need to know
about a chip that we do not have. What is most important comes first: on a machine so slow that time runs out, the rest
is skipped.
"""

from __future__ import annotations

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
from trillora.devices.mesh import find_devices
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
LATEST = 40  # seconds after the start of the process; a part that has not begun by then is skipped


def prove_devices(devices: list[Any], listener: Listener) -> MeasuredChip:
    """The record of these devices."""
    checks: list[ProofCheck] = []
    golden: dict[str, GoldenFigures] = {}

    def attempt(name: str, work: Callable[[], list[ProofCheck]]) -> None:
        try:
            checks.extend(work())
        except Exception as error:  # whatever a new chip, its driver or its compiler raises
            checks.append(ProofCheck(name, "refused", "failed with an error", _text_of(error)))

    def prove_golden(dtype: Dtype) -> list[ProofCheck]:
        record = GoldenRecord.read()
        run = train_golden(devices, dtype, listener)
        if run.inputs != record.inputs:
            return [ProofCheck(f"golden model, {dtype}", "refused", "its inputs are not those of the record")]
        golden[dtype] = figures_of(run.losses, run.gradients, run.how, record)
        return judge(golden[dtype], dtype)

    first, *others = golden_dtypes(devices[0])
    attempt("collectives", lambda: [_collectives(devices, listener)])
    attempt(f"golden model, {first}", lambda: prove_golden(first))
    rates, speed = _rates(devices, first, listener)
    for dtype in others:
        if _seconds_so_far() > LATEST:
            checks.append(ProofCheck(f"golden model, {dtype}", "skipped", f"{LATEST} s have passed"))
        else:
            attempt(f"golden model, {dtype}", lambda dtype=dtype: prove_golden(dtype))  # type: ignore[misc]
    return MeasuredChip(
        device_kind=devices[0].device_kind,
        platform=devices[0].platform,
        num_devices=len(devices),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries={name: installed_version(name) for name in LIBRARIES},
        checks=[*checks, speed],
        matrix_tflops=rates.matrix_tflops if rates else None,
        memory_gb_per_second=rates.memory_gb_per_second if rates else None,
        gather_gb_per_second=rates.gather_gb_per_second if rates else None,
        reduce_gb_per_second=rates.reduce_gb_per_second if rates else None,
        golden=golden,
        seconds=round(_seconds_so_far(), 1),
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


def _rates(devices: list[Any], dtype: Dtype, listener: Listener) -> tuple[Rates | None, ProofCheck]:
    """A chip that cannot be timed, for example because another process uses its memory, may still be right."""
    label = "Measuring speeds"
    listener(Progress(label, 0, 1))
    try:
        rates = measure_rates(devices, dtype)
    except Exception as error:
        return None, ProofCheck("speed", "skipped", "failed with an error", _text_of(error))
    finally:
        listener(Progress(label, 1, 1))
    shown = [f"{rates.matrix_tflops:.4g} TFLOP/s ({dtype} products)", f"{rates.memory_gb_per_second:.4g} GB/s memory"]
    if rates.gather_gb_per_second and rates.reduce_gb_per_second:
        shown.append(f"all-gather {rates.gather_gb_per_second:.4g}, all-reduce {rates.reduce_gb_per_second:.4g} GB/s")
    return rates, ProofCheck("speed", "ok", ", ".join(shown), "of one device, while all of them work")


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
