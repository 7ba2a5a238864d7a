"""Lists the programs of a run before training starts, and stops the run if any other one would be compiled.

A shape that changes during training silently compiles another program: minutes of TPU time, perhaps at every step. So
every program of the loop is compiled in advance. `Programs` rejects a batch of another shape, and `CompileWatch` stops
the run if anything else reaches the compiler, however small: the loop computes nothing outside its own programs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import jax
import numpy as np

from trillora.engine.types import Pytree
from trillora.errors import TrilloraError
from trillora.events import Event, Listener

# Events that jax reports for each program: first its lowering, which is the moment to stop it; then its compilation, or
# that it was found in the cache.
COMPILE_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
NUM_SHAPES_SHOWN = 6
DO = "run the same command again: it resumes from the last checkpoint; if it stops here again, report this message"

Shape = tuple[int, int]  # sequences in a batch, tokens in a sequence


class UnplannedProgram(TrilloraError):
    """A program that is not in the plan would have been compiled."""


@dataclass(frozen=True)
class Planned:
    """Programs with one purpose."""

    what: str
    num_programs: int = 1
    shapes: str = ""  # they are compiled for


def describe(planned: Iterable[Planned]) -> str:
    """The number of programs, and what each is for."""
    planned = list(planned)
    total = sum(part.num_programs for part in planned)
    return f"{total} programs are compiled: {'; '.join(map(_describe_part, planned))}"


def _describe_part(part: Planned) -> str:
    count = f"{part.num_programs} for " if part.num_programs > 1 else ""
    return f"{count}{part.what}" + (f" ({part.shapes})" if part.shapes else "")


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


class Programs:
    """A program compiled ahead of time for each batch shape. The batch is the last argument."""

    def __init__(self, what: str, by_shape: Mapping[Shape, Callable[..., object]]) -> None:
        self._what, self._by_shape = what, dict(by_shape)

    def __call__(self, *arguments: Pytree) -> Pytree:
        shape = arguments[-1]["tokens"].shape
        if shape not in self._by_shape:
            raise self._refuse(f"a batch of {shape_text(shape)}")
        try:
            return self._by_shape[shape](*arguments)
        except TypeError as error:  # raised for arguments of another shape or type
            raise self._refuse(f"arguments it was not compiled for: {error}") from error

    def _refuse(self, given: str) -> UnplannedProgram:
        planned = ", ".join(map(shape_text, self._by_shape))
        return UnplannedProgram(f"{self._what} got {given}. Planned and compiled: {planned}.", where=self._what, do=DO)


class CompileWatch:
    """Raises `UnplannedProgram` if the watched thread compiles.

    Other threads are not watched: the saver's compiles nothing, and a notebook's threads belong to the user.
    """

    def __init__(self) -> None:
        self.doing = "the preparation"  # for the error message; the loop keeps it up to date
        self._thread: int | None = None  # which must not compile

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, this thread must not compile."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            jax.monitoring.unregister_event_duration_listener(self._on_event)

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
        """The listener, allowed to compile: a listener may use jax for its own purposes."""

        def listen(event: Event) -> None:
            with self.allowing():
                listener(event)

        return listen

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event not in COMPILE_EVENTS or self._thread != threading.get_ident():
            return
        # jax's own frame has the shapes of the arguments, and our frame the line of code; no event has either.
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


def _describe_shapes(arguments: Sequence[Pytree]) -> str:
    """Shapes of the last arguments first: a batch comes after the weights, which never change."""
    found = [_describe_shape(leaf) for leaf in reversed(arguments) if hasattr(leaf, "shape")]
    shapes = list(dict.fromkeys(found))
    if not shapes:
        return ""
    return f" for {', '.join(shapes[:NUM_SHAPES_SHOWN])}" + (" and more" if len(shapes) > NUM_SHAPES_SHOWN else "")


def _describe_shape(leaf: jax.Array | np.ndarray) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
