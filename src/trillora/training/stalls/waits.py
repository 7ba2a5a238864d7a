"""What a thread is waiting for, read from its stack: which of the functions in `WAITS` is the innermost one. Within an
evaluation it is not in a step.

    find_wait(sys._current_frames()[thread_id]).what     # "the next batch of data, which ..."

So the training loop does nothing to announce what it waits for. A test compares the names with the code.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple


class Wait(NamedTuple):
    """A function that waits. Without a name: every function of the module and of its submodules."""

    module: str
    function: str
    what: str | None  # it waits for; None: this is not part of a step
    at_least: float = 0.0  # seconds that are normal


DATA = "the next batch of data: the host builds batches more slowly than the device trains"
DEVICE = "the device to finish the step, with its exchanges with other devices"
STORAGE = "a checkpoint to be written to its storage"
WAITS = (
    Wait("jax._src.compiler", "", "the compiler"),
    Wait("trillora.devices.mesh", "any_process", "the other processes of the run: one of them is late or has ended"),
    Wait("trillora.training.saver", "", STORAGE, at_least=120.0),
    Wait("trillora.files", "", "the disk of the run's folder"),
    Wait("trillora.tracking", "", "a tracking service"),
    Wait("trillora.training.entries.stepper", "made_ahead", DATA),
    Wait("trillora.training.loop", "EntryLoop._settle", None),
    Wait("trillora.training.loop", "EntryLoop._report", DEVICE),
    Wait("trillora.step.compile_guard", "Programs.__call__", DEVICE),
    Wait("trillora.training.loop", "EntryLoop._step", DEVICE),
)
OTHER = Wait("", "", "its own code on the host")


def find_wait(innermost: FrameType | None) -> Wait:
    """What this stack is waiting for."""
    found = [wait for frame in _frames(innermost) for wait in WAITS if _is_in(frame, wait)]
    return next((wait for wait in found if wait.what is None), found[0] if found else OTHER)


def _is_in(frame: FrameType, wait: Wait) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    if not wait.function:
        return f"{module}.".startswith(f"{wait.module}.")
    return (module, frame.f_code.co_qualname) == (wait.module, wait.function)


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def all_stacks() -> str:
    """The stacks of all other threads: files, lines and functions, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
