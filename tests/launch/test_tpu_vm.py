"""`trillora launch tpu-vm` against a stand-in gcloud, which runs the commands of its machines for real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_gcloud as texts
import tiny_run
import yaml
from dose import FULL, slow_case
from loopback import Heard
from preflight_answers import GO, NO_GO
from stand_in_gcloud import Google
from typer.testing import CliRunner, Result

from trillora import cli
from trillora.cli import tpu_vm_commands
from trillora.errors import TrilloraError
from trillora.launch import go, worker_files
from trillora.launch.bundle import Bundle, make_bundle
from trillora.launch.gcloud import TABLES, GcloudRefused, explain
from trillora.launch.offers import CHIP_OFFERS, find_offer
from trillora.launch.tpu_vm import STEPS, LaunchPlan, TpuVm, make_plan
from trillora.preflight.result import PreflightResult
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

TOKEN = "hf_" + "Qz7" * 11
PACE = 0.02  # seconds between two questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model with data. The wheel is built once, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILLORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield tiny_run.write_both(tmp_path_factory.mktemp("tpu-vm"), tiny_run.wide_llama(num_layers=1))


@pytest.fixture(scope="module")
def bundle_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle of a recipe with these sections. Equal ones are made once."""
    made: dict[str, Bundle] = {}

    def make(**sections: Any) -> Bundle:
        text = yaml.safe_dump(tiny_run.recipe(folder, **sections))
        if text not in made:
            recipe = tmp_path_factory.mktemp("recipe") / "chat.yaml"
            recipe.write_text(text)
            made[text] = make_bundle(recipe)
        return made[text]

    return make


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Google:
    service = Google(tmp_path / "google")
    monkeypatch.setenv("PATH", f"{service.bin}:{os.environ['PATH']}")
    return service


@pytest.fixture
def plan(bundle_of: Callable[..., Bundle], tmp_path: Path) -> Callable[..., LaunchPlan]:
    """A plan for v6e-8; with `sections` of the recipe, and options of `make_plan`."""

    def make(slice_name: str = "v6e-8", sections: dict[str, Any] | None = None, **options: Any) -> LaunchPlan:
        options = {"out": tmp_path / "out", "hours": 2.0, "zone": None, **options}
        return make_plan(bundle_of(**(sections or {})), slice_name, **options)

    return make


# ---- the run itself


@pytest.mark.core
def test_preempted_run_of_two_workers_resumes_on_a_new_machine_and_equals_one_process(
    google: Google,
    plan: Callable[..., LaunchPlan],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: Path,
) -> None:
    """Two processes of four devices, in the environment that the launcher writes; one process of eight."""
    steps = {"steps": 6, "checkpoint_every": 1}  # differences by rounding grow with every step
    hardware = {"devices": 8, "mesh": {"data": 2, "fsdp": 4}}
    bucket = tmp_path / "bucket"
    google.set(
        workers=2,
        states=["WAITING_FOR_RESOURCES"],
        python=sys.executable if FULL else str(warm_python),
        preempt_when=[str(bucket / "step-00000002" / "checksums.json")],
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(worker_files, "PORT", probe.getsockname()[1])
    train_section = {**steps, "checkpoint_dir": f"file://{bucket}"}
    launched = plan("v5p-16", {"train": train_section, "hardware": hardware}, has_token=True)
    assert launched.offer.slice.num_hosts == 2
    heard = Heard()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"))
        patch.setenv("HF_TOKEN", TOKEN)
        assert TpuVm(launched, heard, token=TOKEN, pace=PACE).launch() == 0, str(heard)

    assert google.verbs().count("create") == 2 and google.machines == []
    assert "PREEMPTED" in str(heard) and "resume" in str(heard) and "Process 0 of 2 joins" in str(heard)
    starts = [word for words in google.calls for word in words if "start.sh" in word]
    assert sorted(starts) == [f"--command=bash trillora-chat/start.sh {n}" for n in (0, 0, 1, 1)]
    alone = train(load_recipe(tiny_run.recipe(folder, train=steps, hardware=hardware)), tmp_path / "alone").losses
    # float32 sums over devices in another order
    assert tiny_run.losses(launched.out) == pytest.approx(alone, rel=1e-5)
    assert (launched.out / "adapter" / "adapter_model.safetensors").is_file()

    # The token reached the run as a file that only its owner can read, and is nowhere else.
    assert (google.folder / "token-seen").read_text() == TOKEN
    modes = [json.loads(line) for line in (google.folder / "modes.jsonl").read_text().splitlines()]
    assert modes == [["hf-token", "0o600"]] * 4
    assert TOKEN not in google.everything_recorded() and TOKEN not in str(heard)
    assert not any(TOKEN in text for _, text in launched.commands())
    assert all(json.loads(line)["tokens"] == [] for line in (google.folder / "calls.jsonl").read_text().splitlines())
    # Both workers of both machines made an environment and installed the bundle.
    calls = [json.loads(line) for line in (google.folder / "uv.jsonl").read_text().splitlines()]
    assert calls.count(["installed"]) == 4 and sum(words[0] == "venv" for words in calls) == 4


# ---- the machine is deleted


class Broken(TpuVm):
    """Fails in one of its steps, before the run could start."""

    def setup(self) -> None:
        raise RuntimeError("broken")


def test_machine_is_deleted_after_an_error_unless_kept(google: Google, plan: Callable[..., LaunchPlan]) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        Broken(plan(), pace=PACE).launch()
    assert google.machines == [] and google.verbs().count("delete") == 1
    heard = Heard()
    with pytest.raises(RuntimeError, match="broken"):
        Broken(plan(), heard, pace=PACE).launch(keep=True)
    assert google.machines == ["trillora-chat"]
    assert "costs money until you run: gcloud compute tpus queued-resources delete trillora-chat" in str(heard)


def test_existing_machine_of_the_same_name_is_not_deleted(google: Google, plan: Callable[..., LaunchPlan]) -> None:
    TpuVm(plan(), pace=PACE).create()
    with pytest.raises(TrilloraError, match="already a machine with the name trillora-chat"):
        TpuVm(plan(), pace=PACE).launch()
    assert google.machines == ["trillora-chat"]


def test_failing_deletion_is_tried_again_and_then_reported_with_its_command(
    google: Google, plan: Callable[..., LaunchPlan]
) -> None:
    google.set(refuse={"delete": ["ERROR: connection reset"]})
    machine = TpuVm(plan(), pace=PACE)
    machine.create()
    machine.delete()
    assert google.machines == []
    google.set(refuse={"delete": ["ERROR: connection reset"] * 9})
    with pytest.raises(TrilloraError, match="may still run and cost money") as caught:
        TpuVm(plan(), pace=PACE).delete()
    assert "gcloud compute tpus queued-resources delete trillora-chat --zone=us-central1-b --force" in str(caught.value)


LAUNCH = """
import sys
from pathlib import Path
from trillora.launch.bundle import make_bundle
from trillora.launch.tpu_vm import TpuVm, make_plan
bundle = make_bundle(Path(sys.argv[1]))
TpuVm(make_plan(bundle, "v6e-8", out=Path("out")), print, pace=0.05).launch()
"""
INTERRUPTIONS = [
    ("describe", signal.SIGTERM),
    ("create", signal.SIGINT),
    slow_case("describe", signal.SIGINT),
    slow_case("describe", signal.SIGHUP),
    slow_case("create", signal.SIGTERM),
]


@pytest.mark.parametrize(("during", "number"), INTERRUPTIONS)
def test_machine_is_deleted_after_a_signal(
    google: Google, folder: Path, tmp_path: Path, during: str, number: signal.Signals
) -> None:
    """Also if it appears only after the command that creates it was interrupted."""
    google.set(states=["WAITING_FOR_RESOURCES"] * 10_000, is_slow=during == "create")
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(tiny_run.recipe(folder)))
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "chat.yaml"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until = time.monotonic() + 120
    while during not in google.verbs():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in output
    if during == "create":
        assert (google.folder / "appeared").exists(), output
    assert google.machines == [], output


# ---- answers of Google


@pytest.mark.parametrize(
    ("answer", "what", "do"),
    [
        (texts.CAPACITY, "No v6e-8 is free in zone", "--zone: us-east1-d us-east5-a"),
        (texts.QUOTA, "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI is used up.*It allows 0", "FAILED and SUSPENDED"),
        (texts.ENGINE_QUOTA, "quota TPUS_PER_TPU_FAMILY", "quotas"),
        (texts.STOCKOUT, "is free in zone", "--zone"),
        (texts.WRONG_TYPE, "does not have v6e-8", "--zone"),
        (texts.WRONG_ZONE, "does not have v6e-8", "--zone"),
        (texts.NOT_ALLOWED, "does not have v6e-8", "--zone"),
        (texts.NO_ACCOUNT, "not logged in", "gcloud auth login"),
        (texts.NO_PROJECT, "no project", "--project"),
        ("ERROR: SERVICE_DISABLED Cloud TPU API has not been used in project 1", "not enabled", "services enable tpu"),
        ("ERROR: PERMISSION_DENIED: tpu.nodes.create", "may not do that", "TPU Admin"),
        ("ERROR: \x1b[31msomething new hf_" + "a" * 30, "exit code 1", "by hand"),
    ],
)
def test_answer_of_gcloud_becomes_an_error_that_says_what_to_do(
    plan: Callable[..., LaunchPlan], answer: str, what: str, do: str
) -> None:
    launched = plan()
    error = explain(GcloudRefused(answer, 1), launched.gcloud(), launched.offer.zones)
    assert re.search(what, error.what) and do in (error.do or "")
    assert "\x1b" not in str(error) and "aaaaaaaaaa" not in str(error)


def test_refused_creation_leaves_nothing(google: Google, plan: Callable[..., LaunchPlan]) -> None:
    google.set(refuse={"create": [texts.QUOTA]})
    with pytest.raises(TrilloraError, match="TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"):
        TpuVm(plan(), pace=PACE).launch()
    google.set(refuse={"create": [texts.CAPACITY]})
    with pytest.raises(TrilloraError, match="No v6e-8 is free"):
        TpuVm(plan(), pace=PACE).step("create")
    assert google.machines == [] and google.verbs().count("delete") == 2, "a refused request may exist anyway"


def test_failed_request_is_deleted_because_it_holds_quota(google: Google, plan: Callable[..., LaunchPlan]) -> None:
    google.set(states=["CREATING", "ACCEPTED", f"FAILED\t{texts.QUOTA}"])
    with pytest.raises(TrilloraError, match="quota"):
        TpuVm(plan(), pace=PACE).launch()
    assert google.machines == []
    google.set(states=["FAILED"])
    with pytest.raises(TrilloraError, match="the request FAILED"):
        TpuVm(plan(), pace=PACE).launch()
    assert google.machines == [] and google.verbs().count("delete") == 2


@pytest.mark.parametrize("state", ["SUSPENDED", slow_case("SUSPENDING"), slow_case("DELETING"), "SOMETHING_NEW"])
def test_request_in_a_state_without_a_way_back_is_deleted_and_made_again(
    google: Google, plan: Callable[..., LaunchPlan], state: str
) -> None:
    google.set(states=["PROVISIONING", state, state])
    heard = Heard()
    bucket = {"train": {"checkpoint_dir": "memory://bucket"}}
    with pytest.raises(TrilloraError, match="lost 2 times; the run is saved"):
        TpuVm(plan(sections=bucket), heard, pace=PACE).launch(max_restarts=1)
    assert google.verbs().count("create") == 2 and google.verbs().count("delete") == 2 and google.machines == []
    assert f"its state is {state}" in str(heard)


@pytest.mark.parametrize("state", ["PREEMPTED", slow_case("TERMINATED"), slow_case("HIDDEN")])
def test_lost_machine_without_a_bucket_is_an_error(google: Google, plan: Callable[..., LaunchPlan], state: str) -> None:
    google.set(node=state)
    launched = plan()
    assert "train.checkpoint_dir=gs://" in launched.warnings()[0]
    with pytest.raises(TrilloraError, match="the run with it") as caught:
        TpuVm(launched, pace=PACE).launch()
    assert "train.checkpoint_dir=gs://" in str(caught.value) and google.machines == []


def test_missing_bucket_account_project_and_gcloud_are_found_before_anything_is_created(
    google: Google, plan: Callable[..., LaunchPlan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = plan(sections={"train": {"checkpoint_dir": "gs://mine/chat"}})
    with pytest.raises(TrilloraError, match="bucket gs://mine does not exist") as caught:
        TpuVm(bucket, pace=PACE).launch()
    assert "gcloud storage buckets create gs://mine --location=us-central1" in str(caught.value)
    google.set(buckets=["gs://mine"], account="")
    with pytest.raises(TrilloraError, match="not logged in"):
        TpuVm(bucket, pace=PACE).launch()
    google.set(account="me@example.com", project="")
    with pytest.raises(TrilloraError, match="no project"):
        TpuVm(bucket, pace=PACE).launch()
    TpuVm(plan(project="other-project"), pace=PACE).check()
    bucket.out.mkdir()
    (bucket.out / "file").touch()
    with pytest.raises(TrilloraError, match="not empty"):
        TpuVm(bucket, pace=PACE).launch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrilloraError, match="not installed") as caught:
        TpuVm(plan(out=tmp_path / "new"), pace=PACE).launch()
    assert "cloud.google.com/sdk" in str(caught.value)
    assert "create" not in google.verbs()


# ---- tables


def test_commands_are_those_of_the_documentation(plan: Callable[..., LaunchPlan]) -> None:
    commands = plan("v5e-8", zone="us-west4-a", project="my-project").commands()
    assert [step for number, (step, _) in enumerate(commands) if step not in dict(commands[:number])] == list(STEPS)
    assert commands[0][1] == (
        "gcloud compute tpus queued-resources create trillora-chat --node-id=trillora-chat --zone=us-west4-a "
        "--accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --valid-until-duration=6h --quiet --spot "
        "--project=my-project"
    )
    assert commands[-1][1].startswith("gcloud compute tpus queued-resources delete trillora-chat --zone=us-west4-a ")
    engine = plan("7x-8").commands()
    assert (
        "gcloud compute instances create trillora-chat --zone=us-central1-c --machine-type=tpu7x-standard-4t"
        in (engine[0][1])
    )
    assert "--max-run-duration=6h --instance-termination-action=DELETE" in engine[0][1]
    assert "--provisioning-model=SPOT" in engine[0][1]
    assert "SPOT" not in plan("7x-8", is_spot=False).commands()[0][1]
    assert set(TABLES) == {"cloud-tpu", "compute-engine"}


def test_compute_engine_has_the_same_steps(google: Google, plan: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    for name in ("create", "wait", "copy", "setup"):  # each alone, as in processes of their own
        assert TpuVm(plan("v6e-4", backend="compute-engine"), pace=PACE).step(name) == 0
    home = google.folder / "machines" / "trillora-chat" / "worker-0" / "trillora-chat"
    assert (home / "job" / "recipe.yaml").is_file() and (home / "workers" / "0.env").read_text() == ""
    TpuVm(plan("v6e-4", backend="compute-engine"), pace=PACE).step("delete")
    with pytest.raises(TrilloraError, match="is lost: there is no such machine"):
        TpuVm(plan("v6e-4", backend="compute-engine"), pace=PACE).step("wait")
    assert google.machines == [] and not any("tpus" in words for words in google.calls)


def test_costs_are_those_of_all_chips_and_hours(plan: Callable[..., LaunchPlan]) -> None:
    hourly, total = plan("v6e-8").costs()
    assert "v6e-8 spot: $5.21 to $12.35 per hour" in hourly and "2.00 h by preflight: $10.42 to $24.70" in total
    assert "$16.80 per hour" in plan("v5p-8", is_spot=False).costs()[0]
    assert "v5p-16 on demand: $33.60 per hour" in plan("v5p-16", is_spot=False).costs()[0]
    assert "no price is published" in plan("7x-8").costs()[0]


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"zone": "us-east1-d"}, "Zone us-east1-d has no v5e", "us-central1-a us-south1-a"),
        ({"zone": "moon; rm -rf"}, "is not a zone", "us-central1-a"),
        ({"slice_name": "kaggle"}, "a notebook of Kaggle", "launch kaggle"),
        ({"slice_name": "v4-8"}, "does not rent v4-8", "v6e-8"),
        ({"slice_name": "v6e-2"}, "does not rent v6e-2", "v6e-8"),
        ({"slice_name": "7x-16"}, "2 hosts", "--as xpk"),
        ({"slice_name": "7x-8", "backend": "cloud-tpu"}, "cannot be rented with --backend cloud-tpu", "compute-engine"),
        ({"backend": "compute-engine"}, "cannot be rented with --backend compute-engine", "cloud-tpu"),
        ({"slice_name": "v6e-16", "backend": "compute-engine"}, "4 hosts", "--backend cloud-tpu"),
        ({"name": "Chat_1"}, "cannot be the name", "lower case"),
        ({"project": "--x"}, "not the ID of a project", "gcloud projects list"),
    ],
)
def test_wrong_slice_zone_or_name_is_refused_without_gcloud(
    plan: Callable[..., LaunchPlan], options: dict[str, Any], what: str, do: str
) -> None:
    with pytest.raises(TrilloraError, match=what) as caught:
        plan(**{"slice_name": "v5e-8", **options})
    assert do in (caught.value.do or "")


def test_every_offer_has_names_and_zones() -> None:
    assert len(CHIP_OFFERS) == 4
    for chip, offer in CHIP_OFFERS.items():
        assert offer.zones and (offer.type_prefix is None) == (offer.runtime_version is None) == (chip == "7x")
    assert find_offer("v5litepod-16").accelerator_type == "v5litepod-16"


# ---- the command


def launch(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["launch", "tpu-vm", *words])


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreflightResult], None]:
    """Sets preflight's answer. tests/launch/test_launch.py asks preflight itself, at full dose."""

    def answer(result: PreflightResult) -> None:
        monkeypatch.setattr(go, "preflight", lambda *args, **options: [result])

    return answer


def test_command_prints_all_commands_and_costs_and_creates_nothing(
    google: Google,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: Callable[[PreflightResult], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.yaml").write_text(yaml.safe_dump(tiny_run.recipe(folder)))
    answered(GO)
    shown = launch("chat.yaml", "--on", "v6e-8", "train.checkpoint_dir=gs://mine/chat")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["create", "wait", "wait", "copy", "copy", "setup"]
    assert "v6e-8 spot: $5.21 to $12.35 per hour" in shown.stdout
    assert "23.40 h by preflight: $121.91 to $288.99" in shown.stdout
    assert lines[-1] == "Nothing was created. Add --run to execute these commands." and google.calls == []
    Path("runs/chat").mkdir(parents=True)
    assert "refused" not in launch("chat.yaml", "--on", "v6e-8").stdout
    Path("runs/chat/adapter").touch()
    told = launch("chat.yaml", "--on", "v6e-8").stdout
    assert "With --run this would be refused. The folder for the results is not empty: runs/chat. Do: use" in told
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    unasked = launch("chat.yaml", "--on", "v6e-8", "--step", "copy", "--json")
    assert len(json.loads(unasked.stdout)["commands"]) == 2 and "hf-token" not in unasked.output
    one = launch("chat.yaml", "--on", "v6e-8", "--step", "copy", "--json", "--send-token")
    answer = json.loads(one.stdout)
    assert [command["step"] for command in answer["commands"]] == ["copy", "copy", "copy"]
    assert "preempted" in answer["warnings"][0] and TOKEN not in one.output and google.calls == []
    # One step for real, and an error of one.
    deleted = launch("chat.yaml", "--on", "v6e-8", "--step", "delete", "--run")
    assert deleted.exit_code == 0 and google.verbs() == ["delete"]
    lost = launch("chat.yaml", "--on", "v6e-8", "--step", "wait", "--run")
    assert lost.exit_code == 2 and "is lost: there is no such machine" in lost.output
    managed = ("--as", "skypilot", "--out", "job", "train.checkpoint_dir=gs://mine/chat", "--send-token")
    job = launch("chat.yaml", "--on", "v6e-8", *managed)
    assert job.exit_code == 0 and "sky jobs launch task.yaml --secret HF_TOKEN" in job.stdout, job.output
    assert TOKEN not in job.output and not any(TOKEN in file.read_text() for file in Path("job").glob("*.[sy]*"))


def test_a_token_that_stays_here_is_said_for_models_of_the_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def said(model: str, *, sent: bool = False) -> str:
        heard = Heard()
        tpu_vm_commands._say_what_is_not_sent(model, sent, heard)
        return str(heard)

    assert said("org/gated") == ""  # there is no token
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "is not sent" in said("org/gated") and TOKEN not in said("org/gated")
    assert said("org/gated", sent=True) == said(str(folder / "model")) == said("smollm2") == ""


def test_no_go_and_secrets_are_refused(
    google: Google,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: Callable[[PreflightResult], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.yaml").write_text(yaml.safe_dump(tiny_run.recipe(folder)))
    answered(NO_GO)
    refused = launch("chat.yaml", "--on", "v5e-1", "--run")
    assert refused.exit_code == 2 and "NO-GO" in refused.output and "--on v5e-4" in refused.output, refused.output
    job = launch("chat.yaml", "--on", "v5e-1", "--as", "skypilot", "train.checkpoint_dir=gs://mine/chat")
    assert job.exit_code == 2 and "NO-GO" in job.output and not Path("runs").exists()
    forced = launch("chat.yaml", "--on", "v5e-1", "--force")
    assert forced.exit_code == 0 and "queued-resources create" in forced.stdout, forced.output
    recipe = tiny_run.recipe(folder, train={"checkpoint_dir": f"s3://key:{TOKEN}@bucket/chat"})
    Path("secret.yaml").write_text(yaml.safe_dump(recipe))
    secret = launch("secret.yaml", "--on", "v5e-1", "--run", "--force")
    assert secret.exit_code == 2 and "secret" in secret.output and TOKEN not in secret.output
    assert google.calls == []
