"""XLA options for the training step, by chip, and what happens if a compiler refuses one.

    tpu_options("TPU v6 lite", 8)        # {"xla_enable_async_all_gather": "true", …}
    compile_with(lowered, options)       # the compiled program

An option is sent only to the chips that have it in the table: a compiler may accept an option silently that its chip
does not support. A newer compiler may refuse one. Then the option is dropped, `refused_options` names it from then on,
and the step is compiled again. A step without an option computes the same numbers, perhaps more slowly.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

import jax

from trillora.devices.chips import DEVICE_KINDS

Options = Mapping[str, str | bool]

# On several devices. Collective matmul is off: it makes the program larger, slower to compile and, where measured,
# slower to run.
GATHERS: Options = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    "xla_enable_async_all_gather": "true",
}
# How the weights of a split base are gathered while the matrix unit works. v5e's compiler fuses pieces of a gather with
# matmuls by itself. Two options do it on v6e, and neither is sent: libtpu 0.0.48 and later refuse this fusion there,
# because results may be wrong (0.0.42 accepts it silently); SparseCores as the senders crash the compiler of 0.0.42 in
# some steps. So a split base waits for its gathers on v6e, and the choice by time prefers a whole one (dev/LOG.md).
BY_CHIP: Mapping[str, Options] = dict.fromkeys(("v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"), GATHERS)
# Without XLA's own kernels for matmuls: with fused kernels cuBLAS is faster (180.6 instead of 182.0 ms on an H200) and
# compiling takes half as long, and cuBLAS's fp8 matmuls would not be used everywhere. XLA does not join small matmuls
# with the same input, such as k and v: the parts of the result would be copied (0.5 ms on an H200).
WITH_CUBLAS: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": "0"}

# What the compiler of this process refused. A fact about the compiler, kept like jax keeps compiled programs.
_refused: dict[str, str] = {}
_lock = threading.Lock()  # programs are compiled in threads


def tpu_options(device_kind: str, num_devices: int) -> Options:
    """The options for a step on several TPU devices; none for one device, where nothing is gathered."""
    if num_devices == 1:
        return {}
    return BY_CHIP.get(DEVICE_KINDS.get(device_kind, ""), {})


def compile_with(lowered: jax.stages.Lowered, options: Options | None) -> jax.stages.Compiled:
    """The compiled program. Options that the compiler refuses are dropped; the error of a second refusal is raised."""
    left = {name: value for name, value in (options or {}).items() if name not in _refused}
    try:
        return lowered.compile(compiler_options=left or None)
    except jax.errors.JaxRuntimeError as error:
        names = blamed(str(error), left)
        if not names:
            raise
        kept = {name: value for name, value in left.items() if name not in names}
        program = lowered.compile(compiler_options=kept or None)
        with _lock:
            _refused.update(dict.fromkeys(names, " ".join(str(error).split())[:300]))
        return program


def blamed(message: str, options: Options) -> list[str]:
    """The options that an error of the compiler is about: those it names, by their name or its beginning; all of them
    if it refuses the request without a name; none if it is about something else.

    >>> blamed("INVALID_ARGUMENT: No such compile option: 'xla_b'", {"xla_a": True, "xla_b": True})
    ['xla_b']
    """
    named = set(re.findall(r"\bxla_\w+", message))
    found = [name for name in options if any(name.startswith(word) for word in named)]
    is_refusal = message.startswith(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED"))
    return found or (list(options) if is_refusal and not named else [])


def refused_options() -> dict[str, str]:
    """The options that the compiler of this process refused, with its reasons."""
    with _lock:
        return dict(_refused)
