"""The longest kernels of a program, from a profile of jax.

print(longest_kernels(step, 40))     # time, share, number of calls, name; names that differ in a number are one
"""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

NUMBER = re.compile(r"[._]?\d+$|(?<=_)\d+(?=_)")  # in names such as loop_fusion_12 or wrapped_add.3


def longest_kernels(run: Callable[[], Any], most: int) -> str:
    """Markdown. On a CPU, the operations of XLA's threads take the place of kernels."""
    times, counts = collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        profiles = [jax.profiler.ProfileData.from_file(str(file)) for file in Path(folder).rglob("*.xplane.pb")]
    planes = [plane for profile in profiles for plane in profile.planes]
    on_gpu = [plane for plane in planes if "device:GPU" in plane.name]
    wanted = "Stream" if on_gpu else "XLA"
    for line in (line for plane in on_gpu or planes for line in plane.lines if wanted in line.name):
        for event in line.events:
            name = NUMBER.sub("", event.name)
            times[name] += event.duration_ns / 1e6
            counts[name] += 1
    total = sum(times.values())
    rows = [f"{counts.total()} kernels of {len(counts)} kinds, {total:.2f} ms", ""]
    rows += ["| ms | share | calls | kernel |", "|---|---|---|---|"]
    rows += [f"| {ms:.3f} | {ms / total:.1%} | {counts[name]} | {name[:100]} |" for name, ms in times.most_common(most)]
    return "\n".join(rows)
