"""Settings for every test process and its children, set before jax is imported.

XLA compiles fast code in several times the time that our tiny models need to run, so its optimizations are off:
`JAX_DISABLE_MOST_OPTIMIZATIONS`, and no fusion emitters, which take two thirds of the rest. A program is compiled in
one part: 32 parts, for as many threads, cost a twelfth more. test_golden.py uses none of this.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The first is an extra option, because a version of XLA that does not have it ignores it.
FASTER_COMPILATION = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
FLAGS = ("--xla_force_host_platform_device_count=8", *FASTER_COMPILATION)

LONGEST = (
    "test_first_ten_minutes.py",
    "test_scores.py",
    "test_notebooks.py",
    "test_ready_notebooks.py",
    "test_tpu_vm.py",
    "test_quickstart.py",
    "test_release.py",
    "test_smollm2.py",
    "test_recipes.py",
    "test_interruptions.py",
)

gc.disable()  # during the imports, which leave little garbage
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS])
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A program must get its weights as arguments: XLA copies constants, and compiles longer. Constants of more than 128 KiB
# are a warning of jax, and so an error here. The models of the tests are larger.
os.environ["JAX_CAPTURED_CONSTANTS_WARN_BYTES"] = str(1 << 17)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # The first process, which is the controller of pytest-xdist: all workers and their children share its programs.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="trillora-test-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # reading any program is faster than compiling it
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest starts first, so that no worker is left alone with it at the end: compiling for a TPU, then
    LONGEST. With TRILLORA_TESTS=rest, tests that `make evidence` runs at a larger dose are left out."""
    if os.environ.get("TRILLORA_TESTS") == "rest":
        from guarantees import in_evidence

        config.hook.pytest_deselected(items=[item for item in items if in_evidence(item.nodeid)])
        items[:] = [item for item in items if not in_evidence(item.nodeid)]

    def place(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("tpu_compiler") else 1 if item.path.name in LONGEST else 2

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector does not have to look at it again. Tracing creates many
    objects, of which few are garbage: with Python's own threshold of 700, a twentieth of the time goes to looking."""
    gc.freeze()
    gc.set_threshold(400_000)
    gc.enable()


@pytest.fixture(scope="session")
def steps_so_far() -> dict[Hashable, Any]:
    return {}


@pytest.fixture(scope="module")
def shared_steps(steps_so_far: dict[Hashable, Any]) -> Iterator[None]:
    """The runs of all modules that ask for it share one compiled step where their steps are equal."""
    from shared_steps import sharing

    with sharing(steps_so_far):
        yield


@pytest.fixture(scope="session")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that install packages as a user would. Some machines with a GPU reach no index."""
    folder = str(tmp_path_factory.mktemp("index"))
    pip = [sys.executable, "-m", "pip", "--retries", "1", "download", "--quiet", "--no-deps", "--dest", folder, "six"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `python` whose runs of `-m trillora` start quickly."""
    from warm_python import write_warm_python

    return write_warm_python(tmp_path_factory.mktemp("warm"))


@pytest.fixture
def compiler_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight's estimates are made in this process, and not in one of their own, which would import for seconds."""
    import json

    from trillora.preflight.client import CompilerClient
    from trillora.preflight.compiler_process import answer
    from trillora.preflight.question import StepQuestion

    def ask(self: CompilerClient, question: StepQuestion, listener: Any) -> Any:
        return answer(StepQuestion.from_dict(json.loads(json.dumps(question.to_dict()))), listener)

    monkeypatch.setattr(CompilerClient, "get_ready", lambda self, place: None)
    monkeypatch.setattr(CompilerClient, "ask", ask)


@pytest.fixture
def optimized() -> Iterator[None]:
    """XLA's optimizations are on, for a program that would run longer without them than it compiles with them."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty again after the test."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]
