"""Compiles programs in threads, while the main thread traces the next one or loads weights.

    with compiling_in_background():
        evaluate = compile_program(lowered)      # returns at once
        base = load_weights(...)                 # meanwhile
        wait_for_programs()                      # raises the error of a compiler, if there was one
        evaluate(adapter, base, batch)

Compilers do not hold Python's lock, so the programs of a run take about as long as the slowest of them. Outside the
block, `compile_program` compiles at once. Only compilers run in the threads: tracing replaces attributes of the model's
modules, which all programs share, so it stays in one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar

import jax

from trillora.engine.types import Pytree
from trillora.step.compiler_options import Options, compile_with

NUM_THREADS = 4  # each compiler also has threads of its own, and needs gigabytes for a large program


class Pending:
    """A program that is being compiled. Calling it waits for the compiler."""

    def __init__(self, compiling: Future[jax.stages.Compiled]) -> None:
        self._compiling = compiling

    def result(self) -> jax.stages.Compiled:
        """The compiled program, or the compiler's error."""
        return self._compiling.result()

    def __call__(self, *arguments: Pytree) -> Pytree:
        return self._compiling.result()(*arguments)


Program = Pending | jax.stages.Compiled


class _Background:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._started: list[Pending] = []

    def start(self, lowered: jax.stages.Lowered, options: Options | None) -> Pending:
        pending = Pending(self._pool.submit(compile_with, lowered, options))
        self._started.append(pending)
        return pending

    def wait(self) -> None:
        while self._started:
            self._started.pop().result()


_current: ContextVar[_Background | None] = ContextVar("trillora_background", default=None)


@contextlib.contextmanager
def compiling_in_background() -> Iterator[None]:
    """Within the block, `compile_program` returns before the program is compiled. The end of the block waits only for
    compilers that have begun."""
    pool = ThreadPoolExecutor(NUM_THREADS, "compiler")
    token = _current.set(_Background(pool))
    try:
        yield
    finally:
        _current.reset(token)
        pool.shutdown(cancel_futures=True)


def compile_program(lowered: jax.stages.Lowered, options: Options | None = None) -> Program:
    """The compiled program; within `compiling_in_background`, a `Pending` one. `options` have XLA's names."""
    background = _current.get()
    if background is None:
        return compile_with(lowered, options)
    return background.start(lowered, options)


def wait_for_programs() -> None:
    """Waits for all programs of the block, and raises the error of a compiler."""
    background = _current.get()
    if background is not None:
        background.wait()


def compiled(program: Program) -> jax.stages.Compiled:
    """The program itself, after its compilation."""
    return program.result() if isinstance(program, Pending) else program
