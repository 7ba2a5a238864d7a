"""Programs are compiled in threads; their errors are raised where the run waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from trillora.devices.quiet import start_gpu
from trillora.step.background import Pending, compile_program, compiled, compiling_in_background, wait_for_programs
from trillora.training.signals import EXIT_STOPPED


def lowered(factor: float) -> Any:
    return jax.jit(lambda x: x * factor).lower(jnp.ones(3))


class Broken:
    """A program that the compiler cannot compile."""

    def compile(self, compiler_options: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile the kernel")


def test_programs_are_pending_only_within_the_block() -> None:
    with compiling_in_background():
        programs = [compile_program(lowered(factor)) for factor in range(6)]
        assert all(isinstance(program, Pending) for program in programs)
        wait_for_programs()
    assert [program(jnp.ones(3)).tolist() for program in programs] == [[float(factor)] * 3 for factor in range(6)]
    now = compile_program(lowered(2.0))
    assert not isinstance(now, Pending) and compiled(now) is now
    assert compiled(programs[2])(jnp.ones(3)).tolist() == [2.0] * 3


def test_an_error_of_the_compiler_is_raised_by_the_wait_and_by_the_call() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as at_once:
        compile_program(Broken())
    with compiling_in_background():
        program = compile_program(Broken())
        with pytest.raises(jax.errors.JaxRuntimeError) as in_thread:
            wait_for_programs()
        with pytest.raises(jax.errors.JaxRuntimeError):
            program(jnp.ones(3))
    assert str(in_thread.value) == str(at_once.value)


def test_an_error_in_the_block_is_not_hidden_by_a_program() -> None:
    with pytest.raises(ZeroDivisionError), compiling_in_background():
        compile_program(Broken())
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("backend", "variables", "files", "starts"),
    [
        ("auto", {}, ["nvidia0", "nvidiactl"], True),
        ("gpu", {}, ["nvidia0"], True),
        ("cpu", {}, ["nvidia0"], False),
        ("auto", {}, ["accel0"], False),
        ("auto", {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, ["nvidia0"], False),
    ],
)
def test_gpus_are_found_early_only_where_there_are_any_and_one_process(
    backend: str, variables: dict[str, str], files: list[str], starts: bool, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    before = set(threading.enumerate())
    thread = start_gpu(backend, variables, tmp_path)
    assert (thread is not None) == starts
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()
    assert set(threading.enumerate()) <= before


def test_a_signal_ends_a_process_that_waits_for_a_compiler() -> None:
    """Before the first step there is nothing to save, so it does not wait for the compiler. Not by SIGINT, which is
    ignored by what a shell started in the background."""
    program = """
import os, signal, threading, time
from types import SimpleNamespace
from trillora.step.background import compile_program, compiling_in_background
from trillora.training import signals
signals.PATIENCE = 0.5
slow = SimpleNamespace(compile=lambda compiler_options: time.sleep(60))
with signals.Stop().listening():
    with compiling_in_background():
        program = compile_program(slow)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        program()
"""
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_STOPPED and "no training was lost" in ended.stderr
    assert time.monotonic() - started < 30
