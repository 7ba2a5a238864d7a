"""Pushing to the hub, with the real client of huggingface_hub against a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback_hub
import pytest
import tiny_run
from huggingface_hub import constants
from loopback_hub import Hub
from safetensors.numpy import load
from typer.testing import CliRunner

from trillora.adapters.card import CARD_FILE
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.export.hub import _new_checksums, adapter_to_push, push, token_of_environment
from trillora.export.source import open_source
from trillora.files.atomic import write_synced
from trillora.files.checksums import checksums_of, read_checksums
from trillora.files.storage import MARK
from trillora.model.adapters import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

# httpx's, about how the hub's client passes a file to it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_pushpushpushpush1234"
BASE = "some-org/tiny-base"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.write_both(tmp_path_factory.mktemp("push"), tiny_run.llama(num_layers=1))
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 1})), folder / "run")
    return folder / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with loopback_hub.running(Hub(TOKEN)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def files_of(run: Path) -> dict[str, Any]:
    return adapter_to_push(open_source(str(run)), BASE)


def test_an_adapter_is_pushed_as_a_folder_that_loads(run: Path, hub: Hub, tmp_path: Path) -> None:
    (run / "adapter" / "merge.json").write_text(json.dumps({"adapter": str(run)}), "utf-8")
    pushed = push(files_of(run), "me/first", token=TOKEN)
    (run / "adapter" / "merge.json").unlink()
    assert pushed.is_private and hub.is_private == {"me/first": True} and pushed.url == f"{hub.address}/me/first"
    assert {*hub.files} == {file.name for file in (run / "adapter").iterdir()} and set(pushed.files) == {*hub.files}
    assert hub.files[WEIGHTS_FILE] == (run / "adapter" / WEIGHTS_FILE).read_bytes() and load(hub.files[WEIGHTS_FILE])
    assert json.loads(hub.files[CONFIG_FILE])["base_model_name_or_path"] == BASE
    assert f"base_model: {BASE}" in hub.files[CARD_FILE].decode()
    everything = b"".join(data for name, data in hub.files.items() if name != "tokenizer.json")
    assert str(run.parent).encode() not in everything and TOKEN.encode() not in everything
    for name, data in hub.files.items():
        (tmp_path / name).write_bytes(data)
    load_adapter(tmp_path)  # its checksums match the pushed files


def test_an_adapter_above_a_gibibyte_has_checksums_and_is_not_read_into_memory(tmp_path: Path) -> None:
    write_synced(tmp_path / MARK, checksums_of(7, {WEIGHTS_FILE: b"", CONFIG_FILE: b"{}"}))
    with open(tmp_path / WEIGHTS_FILE, "wb") as file:
        file.truncate((1 << 30) + 1)
    facts = read_checksums(_new_checksums(tmp_path, {WEIGHTS_FILE: tmp_path / WEIGHTS_FILE, CONFIG_FILE: b"{}"}))
    assert facts is not None and facts["step"] == 7 and facts["files"][WEIGHTS_FILE]["size"] == (1 << 30) + 1
    with open(tmp_path / MARK, "ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(TrilloraError, match="larger than 64 MiB"):
        _new_checksums(tmp_path, {})


def test_a_path_is_not_published_as_the_name_of_the_base(run: Path) -> None:
    with pytest.raises(TrilloraError, match="a path of this machine") as caught:
        adapter_to_push(open_source(str(run)))
    assert "--base ORG/NAME" in caught.value.do


def test_an_edited_card_is_pushed_as_it_is(run: Path, hub: Hub) -> None:
    card = run / "adapter" / CARD_FILE
    before = card.read_text("utf-8")
    card.write_text("---\nlicense: mit\n---\n# Mine\n", "utf-8")
    try:
        push(files_of(run), "me/first", token=TOKEN)
    finally:
        card.write_text(before, "utf-8")
    assert hub.files[CARD_FILE] == b"---\nlicense: mit\n---\n# Mine\n"


def test_a_public_repository_is_used_only_if_the_user_says_so(run: Path, hub: Hub) -> None:
    hub.is_private["me/known"] = False
    with pytest.raises(TrilloraError, match="everybody can read it") as caught:
        push(files_of(run), "me/known", token=TOKEN)
    assert "--public" in caught.value.do and not hub.files
    assert not push(files_of(run), "me/known", token=TOKEN, private=False).is_private and hub.files


@pytest.mark.parametrize(
    ("refuses", "what"),
    [
        ({"/api/repos/create": 403}, "The token may not write to me."),
        ({"/api/models/me/first/preupload": 403}, "The token may not write to me."),
        ({"/api/models/me/first/preupload": 404}, "me/first cannot be used as a model"),
        ({"/api/models/me/first": 404}, "me/first cannot be used as a model"),
        ({"/api/models/me/first/commit": 400}, "The hub answered with status 400."),
        ({"/api/validate-yaml": 0}, 'The hub refuses the model card: Invalid metadata in README.md. - "base_model"'),
    ],
)
def test_what_the_hub_refuses_is_said_without_the_token(
    refuses: dict[str, int], what: str, run: Path, hub: Hub
) -> None:
    hub.refuses = {path: status for path, status in refuses.items() if status}
    hub.card_error = None if hub.refuses else f'"base_model" is not valid {TOKEN}'
    with pytest.raises(TrilloraError) as caught:
        push(files_of(run), "me/first", token=TOKEN)
    assert caught.value.what.startswith(what) and TOKEN not in str(caught.value) and not hub.files


def test_a_wrong_token_and_no_connection_are_said(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(run)
    with pytest.raises(TrilloraError, match="does not accept the token") as caught:
        push(files, "me/first", token="hf_wrongwrongwrong123")
    assert "hf_wrong" not in str(caught.value)
    with pytest.raises(TrilloraError, match="cannot be reached"):
        push(files, "me/first", token=TOKEN, endpoint="http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(TrilloraError, match="no token for the hub"):
        token_of_environment()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--repo", "me/first", "--base", BASE], 0, "Pushed 7 files to"),
        (["--repo", "me/merged", "--what", "merged", "--public"], 0, "everybody can read it"),
        (["--repo", "first"], 2, "is not the name of a repository"),
        ([], 2, "Where to push is not given"),
        (["--repo", "me/first", "--what", "all"], 2, "cannot be pushed"),
    ],
)
def test_the_command_pushes_or_says_why_not(arguments: list[str], code: int, said: str, run: Path, hub: Hub) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--to", "hub", *arguments])
    assert result.exit_code == code and said in result.output and TOKEN not in result.output, result.output
    assert bool(hub.files) == (code == 0)
    if "merged" in arguments:
        assert {"model.safetensors", "config.json", "tokenizer.json", CARD_FILE} <= {*hub.files}
    assert not [entry.name for entry in run.iterdir() if entry.name.startswith(".merged")]
