"""The programs a run compiles: told before it trains, and no other one compiled afterwards.

A shape that changes on the way compiles another program in silence: minutes of a TPU's time, perhaps at every step. So
whatever runs in the loop is compiled ahead. `Programs` refuses a batch of another shape, and `CompileWatch` stops the
run where anything else reaches the compiler. No program is too small for that: the loop computes nothing outside its
own, so one that appears is new at every step, or a large one's beginning.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from trillora.errors import TrilloraError
from trillora.events import Event, Listener

# What jax reports of a program on its way: first that it is written down, which is before it is compiled and hence the
# place to stop it; then that it is compiled or was found in the cache.
COMPILE_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
NUM_SHAPES_TOLD = 6
DO = "give the same command again: it goes on from the last checkpoint; if it stops here again, report this message"

Shape = tuple[int, int]  # rows and tokens of a batch


class UnplannedProgram(TrilloraError):
    """Something would have been compiled that the plan does not have."""


@dataclass(frozen=True)
class Planned:
    """Programs of one purpose."""

    what: str
    num_programs: int = 1
    shapes: str = ""  # that they are compiled for


def describe(planned: Iterable[Planned]) -> str:
    """How many programs, and what each is for."""
    planned = list(planned)
    total = sum(part.num_programs for part in planned)
    return f"{total} programs are compiled: {'; '.join(map(_describe_part, planned))}"


def _describe_part(part: Planned) -> str:
    count = f"{part.num_programs} for " if part.num_programs > 1 else ""
    return f"{count}{part.what}" + (f" ({part.shapes})" if part.shapes else "")


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


class Programs:
    """Programs compiled ahead that do one thing, one for each shape of a batch; the batch is their last argument."""

    def __init__(self, what: str, by_shape: Mapping[Shape, Any]) -> None:
        self._what, self._by_shape = what, dict(by_shape)

    def __call__(self, *arguments: Any) -> Any:
        shape = arguments[-1]["tokens"].shape
        if shape not in self._by_shape:
            raise self._refuse(f"a batch of {shape_text(shape)}")
        try:
            return self._by_shape[shape](*arguments)
        except TypeError as error:  # what a compiled program says to arguments of another shape or type
            raise self._refuse(f"other arguments than it was compiled for: {error}") from error

    def _refuse(self, given: str) -> UnplannedProgram:
        planned = ", ".join(map(shape_text, self._by_shape))
        return UnplannedProgram(f"{self._what} got {given}. Planned and compiled: {planned}.", where=self._what, do=DO)


class CompileWatch:
    """Raises `UnplannedProgram` where the watched thread compiles.

    Other threads are not watched: the saver's compiles nothing, and those of a notebook are the user's own.
    """

    def __init__(self) -> None:
        self.doing = "the preparation"  # what the error tells; the loop keeps it up to date
        self._thread: int | None = None  # that may not compile

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """From here to the end of the block this thread compiles nothing."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            # Older versions of jax cannot take a listener back: there it stays, and lets everything pass.
            if hasattr(jax.monitoring, "unregister_event_duration_listener"):
                jax.monitoring.unregister_event_duration_listener(self._hear)

    @contextlib.contextmanager
    def allowing(self) -> Iterator[None]:
        """Within the block, the watched thread may compile."""
        if self._thread != threading.get_ident():
            yield
            return
        watched, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = watched

    def allow_compiling(self, listener: Listener) -> Listener:
        """The listener, with leave to compile: what it computes from a run's events is its own affair."""

        def listen(event: Event) -> None:
            with self.allowing():
                listener(event)

        return listen

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event not in COMPILE_EVENTS or self._thread != threading.get_ident():
            return
        # A frame of jax has its arguments' shapes, one of ours the place to look; nothing else tells them.
        frames = list(_frames(sys._getframe(1)))
        shapes = next((f.f_locals["global_in_avals"] for f in frames if "global_in_avals" in f.f_locals), ())
        own = next((f for f in frames if f.f_globals.get("__name__", "").startswith("trillora.")), None)
        raise UnplannedProgram(
            f"{kwargs.get('fun_name', 'A program')}{_describe_shapes(shapes)} is not in the compile plan, and would "
            f"have been compiled during {self.doing}.",
            where=f"{own.f_globals['__name__']}, line {own.f_lineno}" if own else None,
            do=DO,
        )


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _describe_shapes(arguments: Sequence[Any]) -> str:
    """The last arguments first: a batch comes after weights that never change."""
    found = [_describe_shape(leaf) for leaf in reversed(arguments) if hasattr(leaf, "shape")]
    told = list(dict.fromkeys(found))
    if not told:
        return ""
    return f" for {', '.join(told[:NUM_SHAPES_TOLD])}" + (" and more" if len(told) > NUM_SHAPES_TOLD else "")


def _describe_shape(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
