"""`trillora launch colab` and `launch kaggle`: their files, and the programs of Google and Kaggle.

Kaggle's own client talks to a service on this machine. Google's program cannot run here: a stand-in answers with its
texts.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import tiny_run
import yaml
from chat_tokenizers import chat_tokenizer
from dose import FULL, full_dose_only
from loopback import Heard
from loopback_kaggle import Kaggle, Kernel
from transformers import LlamaConfig
from typer.testing import CliRunner

from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.events import Alarm, Event
from trillora.launch.bundle import Bundle, make_bundle
from trillora.launch.go import require_go
from trillora.launch.notebooks.colab import ColabRun, write_colab
from trillora.launch.notebooks.document import LARGEST_EMBEDDED, make_notebook, pack
from trillora.launch.notebooks.kaggle import KERNEL_KEYS, KaggleFiles, clean_kernel, open_kaggle, write_kaggle
from trillora.launch.notebooks.kaggle_client import KaggleClient
from trillora.launch.notebooks.session import RESULT
from trillora.launch.notebooks.targets import TARGETS, Target, find_target
from trillora.launch.origin import Release, find_release
from trillora.locks.sets import find_set, locked_versions
from trillora.preflight import client
from trillora.recipe.load import load_recipe
from trillora.version import REPOSITORY, __version__

TOKEN = "hf_" + "Qz7" * 11
TPU = {"platform": "tpu", "kind": "TPU v5 lite", "count": 8}
CPU = {"platform": "cpu", "kind": "cpu", "count": 1}
COLAB, KAGGLE = find_target("colab", "colab"), find_target("kaggle", "kaggle")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("recipe")
    tiny_run.write_chats(folder / "chats.jsonl")
    tree = {"model": "owner/model", "data": {"path": "chats.jsonl", "split": {"test": 0.2}}, "train": {"steps": 3}}
    (folder / "chat.yaml").write_text(yaml.safe_dump(tree))
    return make_bundle(folder / "chat.yaml")


def result_file(state: str, device: dict[str, Any] = TPU) -> bytes:
    return json.dumps({"format": 1, "name": "chat", "state": state, "device": device, "saved": 1.0}).encode()


# ---- the files


def test_colab_notebook_is_valid_selects_the_tpu_and_contains_everything(bundle: Bundle, tmp_path: Path) -> None:
    files = write_colab(bundle, tmp_path / "out", COLAB)
    notebook = nbformat.read(files.notebook, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.accelerator == "TPU" and notebook.metadata.colab.gpuType == "V5E1"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["chat.ipynb"]
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert bundle.recipe_text in code
    order = ["install", "check", "keep_results", "read_secrets", "train", "evaluate", "show_report", "export", "finish"]
    places = [code.index(f"session.{step}(") for step in order]
    assert places == sorted(places)
    before = files.notebook.read_bytes()
    assert write_colab(bundle, tmp_path / "out", COLAB).notebook.read_bytes() == before
    with pytest.raises(TrilloraError, match="another notebook"):
        write_colab(bundle, tmp_path / "out", find_target("colab", "colab-v6e"))
    assert files.notebook.read_bytes() == before and len(list((tmp_path / "out").iterdir())) == 1
    files.notebook.write_bytes(b"not UTF-8: \xff")
    with pytest.raises(TrilloraError, match="another notebook"):
        write_colab(bundle, tmp_path / "out", COLAB)


def test_large_bundle_is_a_file_next_to_the_notebook(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trillora.launch.notebooks.colab.LARGEST_EMBEDDED", 1000)
    files = write_colab(bundle, tmp_path / "out", find_target("colab", "colab-v6e"))
    assert files.bundle == tmp_path / "out" / "chat.bundle" and files.bundle.is_file()
    assert files.notebook.stat().st_size < 20_000 < LARGEST_EMBEDDED
    steps = [words for _, words in files.steps(send_token=True)]
    assert ["colab", "new", "-s", "trillora-chat", "--tpu", "v6e1"] in steps
    assert [words[-1] for words in steps if words[1] == "upload"] == ["content/chat.bundle", "content/hf-token"]


def test_only_known_machines_are_offered_and_only_tpus_are_started_from_here(bundle: Bundle, tmp_path: Path) -> None:
    # Google's program turns any word but v5e1 into a v6e1, and some into an A100, which cost more.
    assert [(target.place, target.name, target.num_devices) for target in TARGETS] == [
        *(("colab", "colab", 1), ("colab", "colab-v6e", 1), ("colab", "t4", 1)),
        *(("kaggle", "kaggle", 8), ("kaggle", "2xt4", 2)),
    ]
    with pytest.raises(TrilloraError, match="Colab does not have v5e-8"):
        find_target("colab", "v5e-8")
    with pytest.raises(TrilloraError, match="Only TPUs are started") as refused:
        ColabRun(write_colab(bundle, tmp_path / "out", find_target("colab", "T4")), Heard()).run()
    assert "in a browser" in refused.value.do


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.name))
def test_notebook_says_what_it_brings_and_what_was_not_tried_and_speaks_of_its_own_platform(
    bundle: Bundle, target: Target, tmp_path: Path
) -> None:
    text = make_notebook(bundle, pack(bundle, tmp_path / "chat.bundle"), target, embed=True)
    cells = nbformat.reads(text, as_version=4).cells
    said = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert f"Not run on a {'TPU' if target.backend == 'tpu' else 'T4'} yet" in said and target.menu in said
    own, other = ("Colab", "Kaggle") if target.place == "colab" else ("Kaggle", "Colab")
    assert f"Trillora on {own}" in said and other not in said
    places = [number for number, cell in enumerate(cells) if "EMBEDDED =" in cell.source]
    before = cells[places[0] - 1].source  # the files are listed before they are unpacked
    assert f"Trillora {__version__}, commit " in before and "its wheel is in the bundle" in before
    with tarfile.open(tmp_path / "chat.bundle") as archive:
        assert all(f"| {file.name} | {file.size:,} |" in before for file in archive)
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert f'backend="{target.backend}", devices={target.num_devices}' in code
    assert ("unassign" in code or "release=" in code) == (target.place == "colab")


def test_a_bundle_for_gpus_has_the_set_for_gpus(tmp_path: Path) -> None:
    tiny_run.write_chats(tmp_path / "chats.jsonl")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model": "smollm2", "data": "chats.jsonl"}))
    made = make_bundle(tmp_path / "r.yaml", set_name="cuda")
    assert made.packages == ("cuda", "smollm2")
    versions = locked_versions(made.requirements)
    assert find_set("cuda").versions.items() <= versions.items() and "libtpu" not in versions


class Installed:
    """A distribution as importlib.metadata shows it."""

    def __init__(self, url: str, archive: dict[str, Any], folder: Path) -> None:
        content = b"x = 1\n"
        (folder / "trillora").mkdir()
        (folder / "trillora" / "a.py").write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        file = importlib.metadata.PackagePath("trillora/a.py")
        file.hash, file.dist = importlib.metadata.FileHash(f"sha256={digest}"), self  # type: ignore[assignment]
        self.files, self._folder, self._told = [file], folder, {"url": url, "archive_info": archive}

    def locate_file(self, path: Path) -> Path:
        return self._folder / path

    def read_text(self, name: str) -> str:
        assert name == "direct_url.json"
        return json.dumps(self._told)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_wheel_of_a_release_is_downloaded_by_its_hash(
    bundle: Bundle, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Release(__version__, "ab" * 32)
    assert release.url == f"{REPOSITORY}/releases/download/v{__version__}/{bundle.wheel.name}"
    assert find_release() is None  # a checkout
    url = release.url if is_ours else release.url.replace(REPOSITORY, "https://example.com/them")
    installed = Installed(url, {"hashes": {"sha256": release.sha256}}, tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert find_release() == (release if is_ours else None)
    files = write_colab(bundle, tmp_path / "out", COLAB)
    code = "\n".join(cell.source for cell in nbformat.read(files.notebook, as_version=4).cells)
    assert (release.url in code and release.sha256 in code) == is_ours
    assert (f"| {bundle.wheel.name} |" in code) != is_ours
    assert (files.notebook.stat().st_size < 200_000) == is_ours
    (tmp_path / "trillora" / "a.py").write_text("x = 2")
    assert find_release() is None  # a changed file: what runs here is not the release


def test_kaggle_folders_have_valid_keys_only_and_form_a_chain(bundle: Bundle, tmp_path: Path) -> None:
    files = write_kaggle(bundle, tmp_path / "out", "me", KAGGLE, sessions=3)
    assert files == open_kaggle(tmp_path / "out")
    assert sorted(file.name for file in files.dataset.iterdir()) == [
        "chat.bundle",
        "dataset-metadata.json",
        "recipe.yaml",
    ]
    for number in (1, 2, 3):
        metadata = json.loads((files.session(number) / "kernel-metadata.json").read_text())
        assert set(metadata) == set(KERNEL_KEYS)
        assert metadata["enable_tpu"] and metadata["machine_shape"] == "TpuV5E8" and metadata["is_private"]
        assert metadata["kernel_sources"] == ([f"me/trillora-chat-{number - 1}"] if number > 1 else [])
        assert metadata["title"].replace(" ", "-") == metadata["id"].partition("/")[2]
        notebook = nbformat.read(files.session(number) / metadata["code_file"], as_version=4)
        nbformat.validate(notebook)
        assert "hours=9.0" in "".join(cell.source for cell in notebook.cells)
        assert clean_kernel(files.session(number), KAGGLE) == []


def test_kaggles_gpus_are_kept_by_every_later_command(bundle: Bundle, tmp_path: Path) -> None:
    target = find_target("kaggle", "2xt4")
    files = write_kaggle(bundle, tmp_path / "out", "me", target)
    assert files == open_kaggle(tmp_path / "out") and files.target == target
    file = files.session(1) / "kernel-metadata.json"
    metadata = json.loads(file.read_text())
    assert metadata["enable_gpu"] and not metadata["enable_tpu"] and metadata["machine_shape"] == "NvidiaTeslaT4"
    file.write_text(json.dumps(metadata | {"machine_shape": "NvidiaTeslaP100"}))
    assert clean_kernel(files.session(1), files.target) == ["machine_shape"]
    assert json.loads(file.read_text()) == metadata


def test_leftover_keys_that_select_a_cpu_are_removed(bundle: Bundle, tmp_path: Path) -> None:
    """`kaggle kernels pull -m` writes such keys."""
    folder = write_kaggle(bundle, tmp_path / "out", "me", KAGGLE).session(1)
    file, notebook = folder / "kernel-metadata.json", folder / "trillora-chat-1.ipynb"
    clean = file.read_text(), notebook.read_text()
    left = {"docker_image": "gcr.io/kaggle-images/python", "machine_shape": "TpuV232", "enable_tpo": True, "id_no": 7}
    file.write_text(json.dumps(json.loads(clean[0]) | left))
    tree = json.loads(clean[1])
    tree["metadata"]["kaggle"] = {"accelerator": "none", "dockerImageVersionId": 31}
    notebook.write_text(json.dumps(tree))
    assert clean_kernel(folder, KAGGLE) == [
        "docker_image",
        "enable_tpo",
        "id_no",
        "machine_shape",
        "metadata.kaggle of the notebook",
    ]
    assert (file.read_text(), notebook.read_text()) == clean
    for damaged in (b"\xff", b"[]", b"{}", b'{"nbformat": 4, "cells": 1}'):
        notebook.write_bytes(damaged)
        with pytest.raises(TrilloraError, match="not a notebook"):
            clean_kernel(folder, KAGGLE)


@pytest.mark.parametrize("owner", ["", "a/b", "-me", "me there", "x" * 60])
def test_wrong_user_of_kaggle_is_refused(bundle: Bundle, tmp_path: Path, owner: str) -> None:
    with pytest.raises(TrilloraError, match="not a user of Kaggle"):
        write_kaggle(bundle, tmp_path / "out", owner, KAGGLE)
    assert not (tmp_path / "out").exists()


# ---- Kaggle's own client


@pytest.fixture
def kaggle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kaggle]:
    service = Kaggle()
    for name, value in (service.environment() | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KAGGLE_USERNAME", raising=False)
    yield service
    service.close()


@pytest.fixture
def files(bundle: Bundle, tmp_path: Path) -> KaggleFiles:
    return write_kaggle(bundle, tmp_path / "launch", "me", KAGGLE, sessions=2)


@full_dose_only
def test_states_of_a_chain_decide_what_is_pushed_next(kaggle: Kaggle, files: KaggleFiles) -> None:
    client = KaggleClient(files, Heard(), pace=0.01)
    first, second = (kaggle.kernels.setdefault(f"me/trillora-chat-{number}", Kernel({})) for number in (1, 2))
    for (status, state), (then, after), what in (
        (("COMPLETE", "finished"), ("QUEUED", None), "The run is finished"),
        (("ERROR", "failed"), ("QUEUED", None), "Session 1 failed"),
        (("ERROR", None), ("QUEUED", None), "Session 1 failed"),
        (("COMPLETE", "stopped"), ("RUNNING", None), "Session 2 is still running"),
        (("COMPLETE", "stopped"), ("COMPLETE", "stopped"), "All 2 sessions ran"),
    ):
        for kernel, word, own in ((first, status, state), (second, then, after)):
            kernel.status, kernel.output = word, {RESULT: result_file(own)} if own else {}
        with pytest.raises(TrilloraError, match=what):
            client.push()
    assert [(s.kaggle, s.state) for s in client.status()] == [("COMPLETE", "stopped")] * 2


@full_dose_only  # every call of the client takes more than a second of imports
def test_chain_is_pushed_watched_and_fetched(kaggle: Kaggle, files: KaggleFiles) -> None:
    heard = Heard()
    client = KaggleClient(files, heard, pace=0.01)
    assert client.push() == "me/trillora-chat-1"
    [version] = kaggle.datasets["me/trillora-chat"]
    assert version == {name: (files.dataset / name).read_bytes() for name in ("chat.bundle", "recipe.yaml")}
    pushed = kaggle.kernels["me/trillora-chat-1"].request
    assert pushed["enableTpu"] and pushed["machineShape"] == "TpuV5E8" and pushed["sessionTimeoutSeconds"] == 9 * 3600
    assert pushed["datasetDataSources"] == ["me/trillora-chat"] and "dockerImage" not in pushed
    assert "20.0 h left" in str(heard)

    with pytest.raises(TrilloraError, match="Session 1 is still running"):
        client.push()
    first = kaggle.kernels["me/trillora-chat-1"]
    first.status, first.output = "COMPLETE", {RESULT: result_file("stopped"), "checkpoints/step-1/a": b"1"}
    assert client.push() == "me/trillora-chat-2"
    second = kaggle.kernels["me/trillora-chat-2"]
    assert second.request["kernelDataSources"] == ["me/trillora-chat-1"]
    assert len(kaggle.datasets["me/trillora-chat"]) == 1

    second.status, second.output = "COMPLETE", {RESULT: result_file("finished"), "run/adapter/x": b"2"}
    assert (client.pull() / "run" / "adapter" / "x").read_bytes() == b"2"


def test_kernel_that_came_back_from_the_cpu_is_refused(kaggle: Kaggle, files: KaggleFiles) -> None:
    client = KaggleClient(files, Heard(), pace=0.01)
    kernel = kaggle.kernels["me/trillora-chat-1"] = Kernel({})
    refused: list[tuple[str, bytes, Any]] = [("COMPLETE", result_file("finished", CPU), client.pull)]
    if FULL:
        refused.append(("ERROR", result_file("no-chip", CPU), client.status))
    for status, content, command in refused:
        kernel.status, kernel.output = status, {RESULT: content, "run/adapter/x": b"2"}
        with pytest.raises(TrilloraError, match="without TPU") as caught:
            command()
        assert "me/trillora-chat-1" in str(caught.value.where) and "identity" in caught.value.do
    assert not files.results.exists()


@full_dose_only  # every call of the client takes more than a second of imports
def test_refusals_that_kaggles_client_only_prints_are_errors(kaggle: Kaggle, files: KaggleFiles) -> None:
    client = KaggleClient(files, Heard(), pace=0.01)
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("CreateDataset", {"status": "error", "error": "the title is in use"}, "the title is in use"),
        ("SaveKernel", {"versionNumber": 1, "url": "u", "invalidDatasetSources": ["me/trillora-chat"]}, "not valid"),
        ("SaveKernel", {"error": "Maximum batch TPU session count reached."}, "Maximum batch TPU session"),
    ]
    for call, answer, text in refusals:
        if call == "SaveKernel":
            files.uploaded.touch()
        kaggle.refuse = {call: answer}
        with pytest.raises(TrilloraError, match="Kaggle refused") as caught:
            client.push()
        assert text in str(caught.value.where)


def test_client_without_credentials_is_an_error_that_says_how_to_log_in(
    kaggle: Kaggle, files: KaggleFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in (None, "wrong"):
        if token is None:
            monkeypatch.delenv("KAGGLE_API_TOKEN")
        else:
            monkeypatch.setenv("KAGGLE_API_TOKEN", token)
        with pytest.raises(TrilloraError, match="not logged in") as caught:
            KaggleClient(files, Heard()).push()
        assert "kaggle auth login" in caught.value.do
    assert kaggle.kernels == {}


def test_missing_client_is_an_error_with_the_command_that_installs_it(
    files: KaggleFiles, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(TrilloraError) as caught:
        KaggleClient(files, Heard())
    assert caught.value.do.startswith("pip install kaggle")
    with pytest.raises(TrilloraError) as caught:
        ColabRun(write_colab(bundle, tmp_path / "out", COLAB), Heard()).run()
    assert "uv tool install --python 3.12 google-colab-cli" in caught.value.do


# ---- Google's program


STAND_IN = """\
#!{python}
import json, os, pathlib, shutil, sys
home = pathlib.Path({home!r})
with open(home / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
verb, words = sys.argv[1], sys.argv[2:]
plan = json.loads((home / "plan.json").read_text())
if verb == "new" and "refuse" in plan:
    print(plan["refuse"], file=sys.stderr)
    sys.exit(1)
if verb == "upload":
    target = home / "vm" / words[-1]
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(words[-2], target)
if verb == "exec":
    print("step 1 of 3")
    for name in plan["results"]:
        shutil.copy(home / name, home / "vm")
    if plan.get("lost"):
        print("Connection was lost.")
        sys.exit(1)
if verb == "download":
    name = pathlib.Path(words[-2]).name
    polls = len([1 for line in open(home / "calls.jsonl") if name in line])
    if polls <= plan.get("late", 0) or not (home / "vm" / name).exists():
        sys.exit(1)
    shutil.copyfile(home / "vm" / name, words[-1])
"""


class Google:
    """A stand-in for Google's program `colab`, with its texts and its exit codes: 0 from `exec` whatever happened."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir(parents=True)
        (home / "vm").mkdir()
        program = home / "bin" / "colab"
        program.write_text(STAND_IN.format(python=sys.executable, home=str(home)))
        program.chmod(0o755)
        (home / "adapter").write_text("trained")
        with tarfile.open(home / "chat-results.tar", "w") as archive:
            archive.add(home / "adapter", arcname="./run/adapter")
        self.plan("finished")

    def plan(self, state: str, **options: Any) -> None:
        (self.home / RESULT).write_bytes(result_file(state))
        (self.home / "calls.jsonl").write_text("")
        tree = {"results": [RESULT, "chat-results.tar"], **options}
        (self.home / "plan.json").write_text(json.dumps(tree))

    @property
    def verbs(self) -> list[str]:
        return [json.loads(line)[0] for line in (self.home / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Google:
    found = Google(tmp_path / "google")
    monkeypatch.setenv("PATH", f"{found.home / 'bin'}:{os.environ['PATH']}")
    return found


def test_run_on_colab_is_followed_and_fetched_and_the_runtime_is_given_back(
    google: Google, bundle: Bundle, tmp_path: Path
) -> None:
    heard = Heard()
    files = write_colab(bundle, tmp_path / "out", COLAB)
    assert ColabRun(files, heard, token=TOKEN).run()["state"] == "finished"
    assert google.verbs == ["new", "upload", "exec", "download", "download", "stop"]
    assert (files.results / "run" / "adapter").read_text() == "trained"
    assert "step 1 of 3" in str(heard)
    # The token is a file on the runtime, and in no command.
    assert (google.home / "vm" / "content" / "hf-token").read_text() == TOKEN
    assert TOKEN not in (google.home / "calls.jsonl").read_text() and TOKEN not in str(heard)


def test_results_with_a_link_are_refused_and_the_archive_stays(google: Google, bundle: Bundle, tmp_path: Path) -> None:
    with tarfile.open(google.home / "chat-results.tar", "w") as archive:
        link = tarfile.TarInfo("run/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    files = write_colab(bundle, tmp_path / "out", COLAB)
    with pytest.raises(TrilloraError, match="run/link is a symbolic link") as refused:
        ColabRun(files, Heard()).run()
    assert refused.value.exit_code == 2 and Path(str(refused.value.where)).is_file() and not files.results.exists()
    assert google.verbs[-1] == "stop"


def test_lost_connection_does_not_lose_the_run(google: Google, bundle: Bundle, tmp_path: Path) -> None:
    google.plan("finished", lost=True, late=2)
    files = write_colab(bundle, tmp_path / "out", COLAB)
    assert ColabRun(files, Heard(), pace=0.01).run()["state"] == "finished"
    assert google.verbs.count("status") == 2 and google.verbs[-1] == "stop"


@pytest.mark.parametrize(
    ("state", "what"),
    [("no-chip", "without TPU"), ("started", "did not finish"), ("failed", "did not finish")],
)
def test_failed_notebook_is_an_error_although_the_program_returns_0(
    google: Google, bundle: Bundle, tmp_path: Path, state: str, what: str
) -> None:
    google.plan(state)
    with pytest.raises(TrilloraError, match=what):
        ColabRun(write_colab(bundle, tmp_path / "out", COLAB), Heard()).run()
    assert google.verbs[-1] == "stop"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Allocation refused (precondition failed)", "no TPU for this account now"),
        ("Backend rejected accelerator 'V5E1'", "may not use that TPU"),
        ("google.auth.exceptions.DefaultCredentialsError: Your default credentials were not found", "not logged in"),
    ],
)
def test_refused_runtime_is_explained(google: Google, bundle: Bundle, tmp_path: Path, text: str, what: str) -> None:
    google.plan("finished", refuse=text)
    with pytest.raises(TrilloraError, match=what):
        ColabRun(write_colab(bundle, tmp_path / "out", COLAB), Heard()).run()
    assert google.verbs == ["new"]


# ---- the commands


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["launch", *arguments])
    return done.exit_code, done.output


@full_dose_only  # test_tpu_vm.py always has a refusal and --force, of `launch tpu-vm`
def test_recipe_that_cannot_fit_is_refused_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fourteen billion parameters on one chip of 16 GiB."""
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    tiny_run.write_chats(tmp_path / "chats.jsonl")
    sizes = {"hidden_size": 8192, "intermediate_size": 131072, "num_hidden_layers": 4, "num_attention_heads": 64}
    LlamaConfig(**sizes, vocab_size=len(chat_tokenizer("chatml"))).save_pretrained(tmp_path / "model")
    chat_tokenizer("chatml").save_pretrained(tmp_path / "model")
    # Options that leave preflight few settings to try.
    tree = {"model": {"name": "./model", "dtype": "bfloat16"}, "data": "chats.jsonl", "lora": {"rank": 4, "alpha": 8}}
    tree |= {
        "train": {"sequence_length": 64, "batch_size": 4, "steps": 2},
        "engine": {"remat": "full", "loss_chunk": 64},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    words = ["colab", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")]
    code, text = invoke(*words)
    assert code == 2 and "NO-GO: this recipe does not fit colab" in text and "--force" in text
    assert not (tmp_path / "out").exists()
    code, text = invoke(*words, "--force")  # the answer of preflight is known now
    assert code == 0 and "colab new -s trillora-recipe --tpu v5e1" in text
    assert (tmp_path / "out" / "recipe.ipynb").is_file()


def test_recipe_with_a_secret_is_refused(tmp_path: Path) -> None:
    tiny_run.write_chats(tmp_path / "chats.jsonl")
    tree = {"model": "owner/model", "data": "chats.jsonl", "track": {"project": TOKEN}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    for platform in (["colab"], ["kaggle", "--owner", "me"]):
        code, text = invoke(*platform, str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out"))
        assert code == 2 and "secret in track.project" in text and TOKEN not in text
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KAGGLE_USERNAME", raising=False)
    monkeypatch.chdir(tmp_path)
    for words, text in (
        (["colab", "r.yaml", "--on", "v5e-8"], "Colab does not have v5e-8"),
        (["colab", "r.yaml", "--export", "zip"], "no export to 'zip'"),
        (["kaggle", "r.yaml"], "--owner"),
        (["kaggle", "r.yaml", "--status"], "not the folder of a launch"),
        (["kaggle", "r.yaml", "--push", "--pull"], "give only one"),
        (["kaggle", "r.yaml", "--sessions", "0"], "not a whole number"),
        (["nowhere", "r.yaml"], "nowhere"),
    ):
        code, output = invoke(*words)
        assert code == 2 and text in output, output


def test_without_the_tpu_compiler_a_launch_asks_for_an_estimate_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler_here: None
) -> None:
    recipe = load_recipe(tiny_run.recipe(tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1)), hardware={}))
    monkeypatch.setattr(client, "has_compiler_builds", lambda: True)
    monkeypatch.setattr(client, "installed_version", {"jax": "0.10.2"}.get)
    events: list[Event] = []
    answer = require_go(recipe, "v5e-1", listener=events.append)
    assert answer is not None and answer.verdict == "GO" and answer.method == "estimate"
    [alarm] = [event.text for event in events if isinstance(event, Alarm) and "estimate" in event.text]
    assert "The TPU compiler is not installed." in alarm and 'pip install "jax[tpu]==0.10.2"' in alarm
