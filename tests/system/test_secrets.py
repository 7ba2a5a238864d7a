"""Text and settings are masked if they look like secrets, and are unchanged otherwise."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from canaries import CANARIES, SECRETS, contents, find_secrets
from typer.testing import CliRunner

from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.launch import go
from trillora.secrets import MASK, mask_secrets, mask_settings, mask_values, secrets_of_environment


@pytest.mark.parametrize("name", CANARIES)
def test_what_looks_like_a_secret_is_masked(name: str) -> None:
    masked = mask_secrets(f"before {CANARIES[name]} after")
    assert "canary" not in masked.lower() and "ca0a12" not in masked and MASK in masked
    assert masked.startswith("before ") and masked.endswith(" after")


@pytest.mark.parametrize(
    "text", ["?key", "eyJ-", "eyJ", "://a", "bearer ", "hf_", "a: ", "token: ", "-----BEGIN PRIVATE KEY-----"]
)
def test_long_hostile_texts_are_masked_in_linear_time(text: str) -> None:
    long = text * (100_000 // len(text))  # quadratic code would take minutes
    assert mask_settings(long) and mask_secrets(long)


@pytest.mark.parametrize(
    "text",
    [
        "revision: " + "ab" * 20,
        "org/model@" + "ab" * 20,
        "models--org--name/snapshots/" + "ab" * 20 + "/config.json",
        "sha256: " + "ab" * 32,
        "eos_token: <|im_end|>\nnum_tokens: 12345678\nmax_new_tokens: 10000000\ntokenizer: org/some-tokenizer",
        "mail someone@example.org, see https://example.org/a?b=c&page=3",
        "a task-force risk-assessment of half_precision hf_hub",
        "secret: null\npassword:\ntoken: ~",
        "The password policy is weak: secrets are not rotated.",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert mask_settings(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "password: canary",
        "  api_key: 'canary, canary'   # mine",
        'tracking: {wandb_key: canary, hf_token: "canary }", rank: 8}',
        "HF_TOKEN=canary canary",
        '{"client_secret": "canary"}',
        "aws_secret_access_key: canary/canary+canary==",
        "token: canary",
    ],
)
def test_a_setting_named_like_a_secret_is_masked(text: str) -> None:
    masked = mask_settings(text)
    assert "canary" not in masked and MASK in masked
    assert ("rank: 8}" in masked) == ("rank: 8}" in text) and ("# mine" in masked) == ("# mine" in text)


def test_values_named_like_secrets_are_masked_at_any_depth() -> None:
    values = {"a": [{"password": "canary", "rank": 8}], "identity": {"model": "ab" * 20}, "pin": {"token": 1234}}
    masked = mask_values(values)
    assert masked == {"a": [{"password": MASK, "rank": 8}], "identity": {"model": "ab" * 20}, "pin": {"token": MASK}}


def test_secrets_of_the_environment_are_found_by_name() -> None:
    environment = {"HF_TOKEN": "canary-1", "MY_API_KEY": "canary-22", "PATH": "/usr/bin-1", "TOKEN_FILE": "/run/a-1"}
    assert secrets_of_environment({**environment, "USE_TOKEN": "yes", "KEY_SECRET": "12345678"}) == (
        "canary-22",
        "canary-1",
    )


# ---- what `launch` writes; test_mutations.py has the other verbs, test_promises.py has `train`, `eval` and `generate`


@pytest.mark.parametrize(
    "words",
    [
        ("colab",),
        ("kaggle", "--owner", "me"),
        ("tpu-vm", "--on", "v5e-8", "--as", "skypilot"),
        ("tpu-vm", "--on", "v5e-8", "--project", "project-1"),
    ],
    ids=["colab", "kaggle", "skypilot", "tpu-vm"],
)
def test_no_launch_prints_or_writes_a_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Notebooks and bundles leave the machine, so they are searched inside. Preflight has no answer here (--force)."""

    def no_answer(*args: Any, **options: Any) -> Any:
        raise TrilloraError("No compiler.", where="this test", do="nothing")

    monkeypatch.setattr(go, "preflight", no_answer)
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1, width=32), num_rows=8)
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(tiny_run.recipe(tmp_path)))
    more = ["train.checkpoint_dir=gs://mine/chat"] if words[0] == "tpu-vm" else []
    more += ["--out", str(tmp_path / "new")] if "--project" not in words else []
    done = CliRunner().invoke(app, ["launch", words[0], str(tmp_path / "chat.yaml"), *words[1:], *more, "--force"])
    assert done.exit_code == 0, done.output
    assert find_secrets(tmp_path, done.output) == []
    files = [file for file in (tmp_path / "new").rglob("*") if file.is_file()]
    names = [f"{file}{inner}" for file in files for inner, _ in contents(file.read_bytes())]
    assert bool(files) == ("--out" in more) and (not files or any("chats.jsonl" in name for name in names))


def test_secrets_are_found_in_archives_and_notebooks(tmp_path: Path) -> None:
    """Checks that the searches can fail."""
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("inner.txt")
        entry.size = len(SECRETS["HF_TOKEN"])
        archive.addfile(entry, io.BytesIO(SECRETS["HF_TOKEN"].encode()))
    packed = base64.b64encode((tmp_path / "a.tar.gz").read_bytes()).decode()
    (tmp_path / "b.ipynb").write_text(json.dumps({"cells": [packed[:100] + "\n", packed[100:]]}, indent=1))
    found = find_secrets(tmp_path, SECRETS["KAGGLE_KEY"])
    files = {"the output: KAGGLE_KEY", "a.tar.gz, inner.txt: HF_TOKEN", "b.ipynb, base64, inner.txt: HF_TOKEN"}
    assert files <= set(found)
