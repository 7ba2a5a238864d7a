"""`trillora launch tpu-vm --as skypilot|xpk`: the files of the jobs, and the script that they run. `make clouds` also
gives them to the real programs, which have two hundred packages; without these, those tests are skipped."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from trillora.errors import TrilloraError
from trillora.launch.bundle import Bundle, make_bundle
from trillora.launch.managed import make_job
from trillora.recipe.schema import Recipe
from trillora.training.signals import EXIT_STOPPED

CLOUDS = os.environ.get("TRILLORA_CLOUDS")  # the folder with the programs of SkyPilot and xpk
needs_clouds = pytest.mark.skipif(CLOUDS is None, reason="SkyPilot and xpk are not installed: `make clouds`")
SLICES = ["v5e-8", "v6e-8", "v6e-16", "v5p-8"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("managed"))
    recipe = tiny_run.recipe(folder, train={"checkpoint_dir": "gs://mine/chat"})
    (folder / "chat.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILLORA_CACHE", str(folder / "cache"))
        return make_bundle(folder / "chat.yaml")


# ---- files


def test_skypilot_task_says_which_machine_and_recovers_from_exit_code_75(bundle: Bundle, tmp_path: Path) -> None:
    job = make_job(bundle, "v5e-8", zone="us-west4-a", has_token=True)
    assert job.write("skypilot", tmp_path / "job") == "sky jobs launch task.yaml --secret HF_TOKEN"
    assert sorted(file.name for file in (tmp_path / "job").iterdir()) == [
        "bundle.tar",
        "job.sh",
        "setup.sh",
        "task.yaml",
    ]
    task = yaml.safe_load((tmp_path / "job" / "task.yaml").read_text())
    assert task == {
        "name": "trillora-chat",
        "workdir": ".",
        "resources": {
            "infra": "gcp/us-west4/us-west4-a",
            "accelerators": "tpu-v5litepod-8",
            "accelerator_args": {"runtime_version": "v2-alpha-tpuv5-lite", "gcp_queued_resource": True},
            "use_spot": True,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [EXIT_STOPPED]},
        },
        "secrets": {"HF_TOKEN": None},
        "setup": "bash setup.sh",
        "run": "bash job.sh",
    }
    anywhere = yaml.safe_load(make_job(bundle, "v6e-8", is_spot=False).skypilot_task())
    assert anywhere["resources"]["infra"] == "gcp" and anywhere["resources"]["use_spot"] is False
    assert "secrets" not in anywhere


def test_xpk_command_restarts_on_exit_code_75(bundle: Bundle, tmp_path: Path) -> None:
    command = make_job(bundle, "7x-16", project="my-project").write("xpk", tmp_path / "job", "my-tpus")
    assert command == (
        "xpk workload create --cluster=my-tpus --workload=trillora-chat --tpu-type=tpu7x-16 "
        "--base-docker-image=python:3.12 --script-dir=. '--command=bash job.sh' --max-restarts=5 "
        "--restart-on-exit-codes=75 --zone=us-central1-c --project=my-project"
    )
    assert (tmp_path / "job" / "setup.sh").is_file() and not (tmp_path / "job" / "task.yaml").exists()


def test_jobs_without_bucket_cluster_or_machine_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    kept = {**bundle.recipe.train.model_dump(), "checkpoint_dir": None}
    local = Recipe.model_validate({**bundle.recipe.model_dump(by_alias=True), "train": kept})
    with pytest.raises(TrilloraError, match="needs a bucket") as caught:
        make_job(Bundle(bundle.name, local, bundle.recipe_text, bundle.files, bundle.wheel), "v6e-8")
    assert "train.checkpoint_dir=gs://" in (caught.value.do or "")
    with pytest.raises(TrilloraError, match="SkyPilot does not offer 7x-8"):
        make_job(bundle, "7x-8").write("skypilot", tmp_path / "job")
    with pytest.raises(TrilloraError, match="xpk needs a cluster"):
        make_job(bundle, "v6e-8").write("xpk", tmp_path / "job")
    with pytest.raises(TrilloraError, match="is not the name of a cluster"):
        make_job(bundle, "v6e-8").write("xpk", tmp_path / "job", "a b")
    assert not (tmp_path / "job").exists()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mine").touch()
    with pytest.raises(TrilloraError, match="not empty"):
        make_job(bundle, "v6e-8").write("skypilot", tmp_path / "job")


# ---- the script of the job

TRAINING = """#!/bin/bash
[ "$*" = "train job/recipe.yaml --out run" ] || exit 9
trap 'mkdir -p run/adapter; echo saved > run/adapter/file; exit 75' TERM
touch running
case "$(cat mode)" in
  finish) mkdir -p run/adapter; echo done > run/adapter/file; exit 0 ;;
  several) mkdir -p run/adapters/code; echo code > run/adapters/code/file; touch run/group.json; exit 0 ;;
  fail) exit 2 ;;
esac
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("mode", "code", "content"),
    [("finish", 0, "done\n"), ("several", 0, "code\n"), ("fail", 2, None), ("wait", EXIT_STOPPED, "saved\n")],
)
def test_job_passes_signals_and_exit_codes_on_and_copies_the_results(
    bundle: Bundle, tmp_path: Path, mode: str, code: int, content: str | None
) -> None:
    folder, results = tmp_path / "job", tmp_path / "results it's"
    job = make_job(bundle, "v6e-8")
    type(job)(**{**vars(job), "results": f"file://{results}"}).write("skypilot", folder)
    (folder / "venv" / "bin").mkdir(parents=True)
    for name, text in (("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'), ("trillora", TRAINING)):
        (folder / "venv" / "bin" / name).write_text(text)
        (folder / "venv" / "bin" / name).chmod(0o755)
    (folder / "installed").write_text(hashlib.sha256((folder / "bundle.tar").read_bytes()).hexdigest())
    (folder / "mode").write_text(mode)
    process = subprocess.Popen(["bash", "job.sh"], cwd=folder, text=True, stdout=subprocess.PIPE)
    if mode == "wait":
        until = time.monotonic() + 60
        while not (folder / "running").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code and "already installed" in output
    found = results / ("adapters/code" if mode == "several" else "adapter") / "file"
    assert (found.read_text() if found.exists() else None) == content


# ---- the real programs

PARSE = """
import json, sys, sky
for file in sys.argv[1:]:
    task = sky.Task.from_yaml(file)
    [r] = task.resources
    print(json.dumps({
        "name": task.name, "setup": task.setup, "run": task.run, "cloud": str(r.cloud), "spot": r.use_spot,
        "accelerators": r.accelerators, "arguments": r.accelerator_args, "recovery": r.job_recovery,
    }))
"""


def call(words: list[str], folder: Path, home: Path) -> str:
    """The output of one of the programs, with a home folder of its own."""
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_clouds
def test_skypilot_itself_reads_the_tasks(bundle: Bundle, tmp_path: Path) -> None:
    jobs = {name: make_job(bundle, name) for name in SLICES}
    for name, job in jobs.items():
        (tmp_path / f"{name}.yaml").write_text(job.skypilot_task())
    python = str(Path(str(CLOUDS), "python").absolute())
    words = [python, "-c", PARSE, *(f"{name}.yaml" for name in SLICES)]
    lines = call(words, tmp_path, tmp_path / "home").splitlines()[-len(SLICES) :]
    for job, line in zip(jobs.values(), lines, strict=True):
        read = json.loads(line)
        assert read["name"] == "trillora-chat" and read["run"] == "bash job.sh" and read["setup"] == "bash setup.sh"
        assert read["accelerators"] == {f"tpu-{job.offer.accelerator_type}": 1} and read["spot"] is True
        assert read["arguments"]["runtime_version"] == job.offer.runtime_version
        assert read["recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED] and read["cloud"] == "GCP"


@needs_clouds
@pytest.mark.parametrize("slice_name", ["v5e-8", "v6e-16", "7x-8"])
def test_dry_run_of_xpk_writes_the_manifest(bundle: Bundle, tmp_path: Path, slice_name: str) -> None:
    command = make_job(bundle, slice_name, project="my-project").write("xpk", tmp_path / "job", "my-tpus")
    words = [str(Path(str(CLOUDS), "xpk").absolute()), *shlex.split(command)[1:]]
    words += ["--dry-run", f"--output-manifest-file={tmp_path / 'jobset.yaml'}"]
    call(words, tmp_path / "job", tmp_path / "home")
    jobset: dict[str, Any] = yaml.safe_load((tmp_path / "jobset.yaml").read_text())
    assert jobset["kind"] == "JobSet" and jobset["spec"]["failurePolicy"]["maxRestarts"] == 5
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["operator"] == "NotIn" and EXIT_STOPPED in rule["onExitCodes"]["values"]
    [container] = job["template"]["spec"]["containers"]
    assert "bash job.sh" in container["command"][-1]
