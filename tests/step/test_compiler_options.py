"""Options of the compiler: sent only to chips that support them, and dropped if a compiler refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from trillora.devices.chips import DEVICE_KINDS
from trillora.step import compiler_options
from trillora.step.background import compile_program, compiled, compiling_in_background
from trillora.step.compiler_options import blamed, compile_with, refused_options, tpu_options

pytestmark = pytest.mark.core

UNKNOWN = "xla_no_such_option"
# libtpu 0.0.48 and 0.0.50, word for word
CONTINUATION_FUSION = (
    "FAILED_PRECONDITION: Continuation fusion for AllGather is enabled on platform ghostlite (variant: ), but it is "
    "not supported/recommended on platforms other than TPU v5e, and this might lead to many errors including but not "
    "limited to: incorrect results, hang, SDC, etc. "
    "Please disable it with xla_tpu_enable_async_collective_fusion=false "
)


@pytest.fixture(autouse=True)
def nothing_refused_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiler_options, "_refused", {})
    yield


def lowered(factor: float = 2.0) -> Any:
    return jax.jit(lambda x: x * factor).lower(jnp.ones(3))


def test_a_refused_option_is_dropped_and_the_others_stay() -> None:
    """The CPU compiler accepts one of the two, and changes the program accordingly."""
    program = compile_with(lowered(), {UNKNOWN: True, "xla_cpu_enable_fast_math": True})
    assert program(jnp.ones(3)).tolist() == [2.0] * 3
    assert list(refused_options()) == [UNKNOWN] and "No such compile option" in refused_options()[UNKNOWN]


def test_a_refused_option_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(lowered(), {UNKNOWN: True})
    sent: list[Any] = []

    class Recorded:
        def compile(self, compiler_options: Any) -> None:
            sent.append(compiler_options)

    compile_with(Recorded(), {UNKNOWN: True, "xla_other": True})
    assert sent == [{"xla_other": True}]


def test_a_program_in_the_background_is_compiled_without_a_refused_option() -> None:
    with compiling_in_background():
        program = compiled(compile_program(lowered(3.0), {UNKNOWN: True}))
    assert program(jnp.ones(3)).tolist() == [3.0] * 3 and UNKNOWN in refused_options()


def test_an_error_that_is_not_about_options_is_raised() -> None:
    class Broken:
        def compile(self, compiler_options: Any) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        compile_with(Broken(), {"xla_other": True})
    assert refused_options() == {}


def test_the_second_refusal_is_raised() -> None:
    class Stubborn:
        def compile(self, compiler_options: Any) -> None:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: this program cannot be compiled")

    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot be compiled"):
        compile_with(Stubborn(), {"xla_other": True})
    assert refused_options() == {}  # the option was not the reason


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("INVALID_ARGUMENT: No such compile option: 'xla_b'", ["xla_b"]),
        (CONTINUATION_FUSION, ["xla_tpu_enable_async_collective_fusion_fuse_all_gather"]),
        ("UNIMPLEMENTED: not on this platform", ["xla_tpu_enable_async_collective_fusion_fuse_all_gather", "xla_b"]),
        ("INVALID_ARGUMENT: set xla_something_else", []),
        ("INTERNAL: Mosaic failed to compile", []),
        ("RESOURCE_EXHAUSTED: Ran out of memory", []),
    ],
)
def test_the_option_is_found_by_the_words_of_the_compiler(message: str, names: list[str]) -> None:
    options = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true", "xla_b": "true"}
    assert blamed(message, options) == names


def test_no_chip_gets_an_option_that_is_unsafe_there() -> None:
    visited = 0
    for kind in DEVICE_KINDS:
        options = tpu_options(kind, 8)
        assert options and not any("async_collective_fusion" in name or "sparse_core" in name for name in options)
        assert tpu_options(kind, 1) == {}
        visited += 1
    assert visited >= 7 and tpu_options("a chip of tomorrow", 8) == {}
