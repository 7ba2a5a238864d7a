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


def longest_kernels(run: Callable[[], Any], most: int, num_steps: int = 1) -> str:
    """Markdown; times are per step, of `num_steps` steps. On a CPU, operations of XLA's threads take the place of
    kernels."""
    times, counts = collections.Counter[str](), collections.Counter[str]()
    spans: list[tuple[float, float, str]] = []
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
            times[name] += event.duration_ns / 1e6 / num_steps
            counts[name] += 1
            spans.append((event.start_ns, event.start_ns + event.duration_ns, event.name))
    total = sum(times.values())
    rows = [
        f"{counts.total() // num_steps} kernels of {len(counts)} kinds, {total:.2f} ms",
        waits(spans, num_steps),
        "",
    ]
    rows += ["| ms | share | calls | kernel |", "|---|---|---|---|"]
    rows += [
        f"| {ms:.3f} | {ms / total:.1%} | {counts[name] // num_steps} | {name[:100]} |"
        for name, ms in times.most_common(most)
    ]
    return "\n".join(rows)


def waits(spans: list[tuple[float, float, str]], num_steps: int) -> str:
    """When nothing runs: the sum, and before which kernels."""
    gaps, end = collections.Counter[str](), None
    for start, stop, name in sorted(spans):
        if end is not None and start > end:
            gaps[NUMBER.sub("", name)] += (start - end) / 1e6 / num_steps
        end = stop if end is None else max(end, stop)
    longest = ", ".join(f"{name[:40]} {ms:.2f}" for name, ms in gaps.most_common(8))
    return f"nothing runs for {gaps.total():.2f} ms, of them before: {longest}"
