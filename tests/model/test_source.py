"""Finding a model: by name, with clear errors, and without running or downloading code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import torch
from loopback import POLL
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from trillora.errors import TrilloraError
from trillora.model.loading import source
from trillora.model.loading.source import (
    OpenModel,
    base_name,
    find_model,
    load_config,
    load_tokenizer,
    weight_files,
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_thisTokenMustNeverBeShown"


def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return str(tokenizer.to_str())


def write_model(folder: Path, **config: Any) -> Path:
    """Writes a small but complete model folder; keyword arguments change its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tensors = {"model.norm.weight": torch.ones(16), "model.embed_tokens.weight": torch.ones(8, 16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(call: Callable[[], Any]) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        call()
    assert caught.value.where
    assert SECRET not in str(caught.value)
    return caught.value


# ---- folders


def test_complete_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert find_model(str(folder)) == folder
    assert load_config(folder).hidden_size == 16
    assert load_tokenizer(folder).encode("hello world") == [1, 2]


def test_without_weights_only_the_description_is_needed(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    assert find_model(str(folder), with_weights=False) == folder


def test_smollm2_is_the_embedded_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "smollm2_folder", lambda: tmp_path)
    assert find_model("smollm2") == tmp_path


def test_base_name_loads_the_same_model_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(source, "smollm2_folder", lambda: folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, expected in (
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (str(folder), str(folder)),
        ("model", str(folder)),
        ("~/model", str(folder)),
    ):
        assert OpenModel.open(name, revision=None, trust_remote_code=False).base_name == expected
    assert base_name("org/name") == "org/name"


@pytest.mark.parametrize("name", ["./modle", "/nowhere/at/all/modle", "~/modle", "a/b/modle", "smolm2"])
def test_missing_folder_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    error = refused(lambda: find_model(name))
    assert error.what == f"There is no model '{name}'."
    assert "is not a folder" in (error.where or "")
    assert "smollm2" in error.do
    if name in ("./modle", "smolm2"):
        assert f"did you mean '{'model' if name == './modle' else 'smollm2'}'?" in error.do


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    error = refused(lambda: find_model(str(tmp_path)))
    assert "no config.json" in error.what
    assert error.where == str(tmp_path)
    assert "complete model" in error.do


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_broken_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    error = refused(lambda: find_model(str(tmp_path)))
    assert "JSON" in error.what or "must be an object" in error.what
    assert error.where == str(tmp_path / "config.json")
    assert error.do == "download the file again"


@pytest.mark.parametrize(
    ("file", "what", "do"),
    [
        (None, "The model has no weights.", "model.safetensors"),
        ("pytorch_model.bin", "pickle files (pytorch_model.bin), which can run code", "save_pretrained"),
        ("consolidated.00.pth", "pickle files (consolidated.00.pth)", "save_pretrained"),
        ("weights.pt", "pickle files (weights.pt)", "save_pretrained"),
        ("model.Q4_K_M.gguf", "a GGUF file (model.Q4_K_M.gguf)", "safetensors files that it was made from"),
        ("adapter_model.safetensors", "no model.safetensors and no model.safetensors.index.json", "transformers"),
    ],
)
def test_folder_without_usable_weights_is_refused(file: str | None, what: str, do: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    if file:
        (folder / file).write_bytes(b"\x80\x04")
    error = refused(lambda: find_model(str(folder)))
    assert what in error.what
    assert error.where == str(folder)
    assert do in error.do


def test_index_must_name_files_that_are_there(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert weight_files(folder) == [folder / "model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    error = refused(lambda: find_model(str(folder)))
    assert error.what == "1 of the model's 2 weight files are missing: model-2.safetensors"
    assert error.where == str(index)
    assert "download" in error.do
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    (folder.parent / "outside.safetensors").touch()
    assert "missing: ../outside.safetensors" in refused(lambda: find_model(str(folder))).what
    (folder.parent / "outside.safetensors").unlink()
    index.write_text("{}")
    assert "weight_map: field required" in refused(lambda: find_model(str(folder))).what


# ---- code that comes with a model


def write_hostile(folder: Path, marker: Path, **config: Any) -> Path:
    """Writes a model whose code creates a marker file when it is imported."""
    code = "from pathlib import Path\nfrom transformers import PreTrainedConfig\n"
    code += f"Path({str(marker)!r}).touch()\nclass Config(PreTrainedConfig):\n    model_type = 'hostile'\n"
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    write_model(folder, **{"model_type": "hostile", "auto_map": auto_map, **config})
    (folder / "code.py").write_text(code)
    return folder


@pytest.mark.parametrize("model_type", ["hostile", "t5", None, ["llama"]])  # t5: supported, but not a causal model
def test_code_in_a_model_is_refused_and_not_run(model_type: Any, tmp_path: Path) -> None:
    marker = tmp_path / "code-was-run"
    folder = write_hostile(tmp_path / "model", marker, model_type=model_type)
    for call in (lambda: find_model(str(folder)), lambda: load_config(folder)):
        error = refused(call)
        assert "needs its own Python code (auto_map)" in error.what
        assert error.where == str(folder / "config.json")
        assert "trust_remote_code" in error.do
    assert not marker.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_model_that_transformers_supports_loads_without_its_own_code(trust: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    marker = tmp_path / "code-was-run"
    folder = write_hostile(tmp_path / "model", marker, model_type="llama")
    assert find_model(str(folder), trust_remote_code=trust) == folder
    config = load_config(folder, trust_remote_code=trust)
    assert type(config) is LlamaConfig
    assert type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust)) is LlamaForCausalLM
    assert load_tokenizer(folder).encode("hello world") == [1, 2]
    assert not marker.exists()


def test_trusted_code_in_a_local_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for the two tests above: the marker appears when the code is allowed."""
    marker = tmp_path / "code-was-run"
    folder = write_hostile(tmp_path / "model", marker)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert find_model(str(folder), trust_remote_code=True) == folder
    assert type(load_config(folder, trust_remote_code=True)).__name__ == "Config"
    assert marker.exists()


def test_code_in_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "code-was-run"
    folder = write_hostile(tmp_path / "model", marker)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = {"auto_map": {"AutoTokenizer": ["code.Config", None]}, "tokenizer_class": "Config"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    error = refused(lambda: load_tokenizer(folder))
    assert "tokenizer cannot be loaded" in error.what
    assert not marker.exists()


# ---- configs and tokenizers


@pytest.mark.parametrize(
    ("config", "what", "do"),
    [
        ({"model_type": "llamma"}, "model_type 'llamma' is not a causal language model", "did you mean 'llama'?"),
        ({"model_type": "t5"}, "model_type 't5' is not", "text-generation model"),
        ({"model_type": None}, "model_type 'None' is not", "text-generation model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification", "LlamaForCausalLM"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM", "BertLMHeadModel"),
        ({"num_hidden_layers": "many"}, "transformers cannot read this config", "repository"),
    ],
)
def test_other_models_than_causal_language_models_are_refused(
    config: dict[str, Any], what: str, do: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, **config)
    error = refused(lambda: load_config(folder))
    assert what in error.what
    assert error.where == str(folder / "config.json")
    assert do in error.do


def test_models_without_head_or_architecture_or_in_other_case_are_accepted(tmp_path: Path) -> None:
    for architectures in (["LlamaModel"], [], None, ["LLaMAForCausalLM"]):
        assert load_config(write_model(tmp_path, architectures=architectures)).model_type == "llama"


def test_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    error = refused(lambda: load_tokenizer(folder))
    assert "tokenizer cannot be loaded" in error.what
    assert error.where == str(folder)
    (folder / "tokenizer.json").unlink()
    error = refused(lambda: load_tokenizer(folder))
    assert error.what == "The model has no tokenizer files."
    assert error.where == str(folder)
    assert "tokenizer.json" in error.do


# ---- the hub: its real client and a small server that implements its protocol


@dataclass
class Hub:
    """Repositories by id, and the files that were downloaded."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    address: str = ""


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlparse(self.path).path.strip("/").removeprefix("api/models/").split("/")
            name, action = "/".join(path[:2]), path[2] if len(path) > 2 else ""
            files = hub.repositories.get(name)
            if files is None:
                self.reply(404, X_Error_Code="RepoNotFound")
            elif name in hub.gated:
                self.reply(403, X_Error_Code="GatedRepo")
            elif len(path) > 3 and path[3] not in ("main", COMMIT):
                self.reply(404, X_Error_Code="RevisionNotFound")
            elif action == "tree":
                entries = [
                    {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for file, body in files.items()
                ]
                self.reply(200, json.dumps(entries).encode(), Content_Type="application/json")
            elif action == "resolve":
                file = "/".join(path[4:])
                if self.command == "GET":
                    hub.fetched.append(file)
                self.reply(200, files[file], ETag=f'"{hashlib.sha1(files[file]).hexdigest()}"', X_Repo_Commit=COMMIT)
            else:
                siblings = [{"rfilename": file} for file in files]
                about = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
                self.reply(200, json.dumps(about).encode(), Content_Type="application/json")

        do_HEAD = do_GET

    return Handler


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    whole = files_of(write_model(tmp_path / "whole"))
    extras = {
        "pytorch_model.bin": b"\x80\x04pickle",
        "original/consolidated.00.pth": b"\x80\x04pickle",
        "consolidated.safetensors": b"second copy",
        "model.Q4.gguf": b"GGUF",
        "code.py": b"raise SystemExit",
        "README.md": b"# model",
        "chat_template.jinja": b"{{ messages }}",
    }
    no_weights = {file: body for file, body in whole.items() if file != "model.safetensors"}
    hub = Hub(
        {
            "org/whole": {**whole, **extras},
            "org/pickled": {**no_weights, "pytorch_model.bin": b"\x80\x04pickle"},
            "org/gguf": {**no_weights, "model.Q4.gguf": b"GGUF"},
            "org/coded": files_of(write_hostile(tmp_path / "coded", tmp_path / "code-was-run")),
            "org/native": files_of(write_hostile(tmp_path / "native", tmp_path / "code-was-run", model_type="llama")),
            "org/gated": whole,
            "org/adapter": {
                "adapter_config.json": b"{}",
                "adapter_model.safetensors": b"weights",  # files of equal content would be downloaded once
                "adapter_model.bin": b"\x80\x04pickle",
            },
            "org/pickled-adapter": {"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x04pickle"},
        },
        gated={"org/gated"},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(POLL,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


FIND = """
import json, sys
from trillora.errors import TrilloraError
from trillora.model.loading.source import find_model
from trillora.runs.saved import find_adapter
for name, how in json.loads(sys.argv[1]):
    try:
        is_adapter = how.pop("adapter", False)
        found = find_adapter(name, from_hub=True).folder if is_adapter else find_model(name, **how)
        answer = {"folder": str(found)}
    except TrilloraError as error:
        answer = {"what": error.what, "where": error.where, "do": error.do}
    print("ANSWER " + json.dumps(answer), flush=True)
    sys.stdin.readline()  # until the test has looked at the server
"""


def find_in_process(address: str, cache: Path, name: str, **how: Any) -> dict[str, str]:
    return find_all_in_process(address, cache, (name, how))[0]


def find_all_in_process(
    address: str, cache: Path, *calls: tuple[str, dict[str, Any]], look: Callable[[], None] = lambda: None
) -> list[dict[str, str]]:
    """Calls find_model in a new process: the hub's client reads its address and token once, when it is imported.
    `look` is called after each answer, before the next call."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": "0",  # the server of this test
        "HF_HOME": str(cache),
        "HF_TOKEN": SECRET,
        "PYTHONPATH": os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(source.__file__).parents[3])]
        ),
    }
    command = [sys.executable, "-c", FIND, json.dumps(calls)]
    answers, lines = [], []
    with (cache.parent / f"{cache.name}-errors.txt").open("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
            stop = threading.Timer(120, process.kill)
            stop.start()
            assert process.stdout is not None and process.stdin is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith("ANSWER "):
                    answers.append(json.loads(line.removeprefix("ANSWER ")))
                    look()
                    process.stdin.write("\n")
                    process.stdin.flush()
            process.wait()
            stop.cancel()
        errors.seek(0)
        assert SECRET not in "".join([*lines, found := errors.read()])
    assert len(answers) == len(calls), found
    return answers


def test_hub_model_is_downloaded_without_executable_files(hub: Hub, tmp_path: Path) -> None:
    needed = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    light = find_in_process(hub.address, tmp_path / "light", "org/whole", with_weights=False)
    assert set(hub.fetched) == needed
    assert Path(light["folder"]).name == COMMIT
    hub.fetched.clear()
    answer = find_in_process(
        hub.address, tmp_path / "cache", "org/whole", trust_remote_code=True
    )  # it names no code, so none is downloaded
    assert set(hub.fetched) == needed | {"model.safetensors"}
    assert {file.name for file in Path(answer["folder"]).iterdir()} == needed | {"model.safetensors"}
    offline = find_in_process("http://127.0.0.1:9", tmp_path / "cache", "org/whole")  # no server: the cache is used
    assert offline == answer


def test_unknown_hub_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    find_in_process(hub.address, tmp_path, "org/whole", with_weights=False)
    answer = find_in_process(hub.address, tmp_path, "org/whoel")
    assert "no model 'org/whoel'" in answer["what"]
    assert answer["where"] == "hub model org/whoel"
    assert "did you mean 'org/whole'?" in answer["do"]  # in the cache
    assert "hf auth login" in answer["do"]


def test_unknown_revision_is_refused(hub: Hub, tmp_path: Path) -> None:
    answer = find_in_process(hub.address, tmp_path, "org/whole", revision="v9")
    assert answer["what"] == "The model 'org/whole' has no revision 'v9'."
    assert answer["where"] == "hub model org/whole, revision v9"
    assert "branch, tag or full commit" in answer["do"]


def test_gated_hub_model_says_how_to_log_in(hub: Hub, tmp_path: Path) -> None:
    answer = find_in_process(hub.address, tmp_path, "org/gated")
    assert "gated" in answer["what"]
    assert answer["where"] == "hub model org/gated"
    assert "hf auth login" in answer["do"]


def test_unreachable_hub_is_named(tmp_path: Path) -> None:
    answer = find_in_process("http://127.0.0.1:9", tmp_path, "org/whole")  # port 9: no server
    assert "cannot be reached" in answer["what"]
    assert answer["where"] == "hub model org/whole"
    assert "smollm2" in answer["do"]


@pytest.mark.parametrize(("name", "what"), [("org/pickled", "pickle files (pytorch_model.bin)"), ("org/gguf", "GGUF")])
def test_hub_model_without_safetensors_is_refused(name: str, what: str, hub: Hub, tmp_path: Path) -> None:
    answer = find_in_process(hub.address, tmp_path, name)
    assert what in answer["what"]
    assert answer["where"] == f"hub model {name}"
    assert "safetensors" in answer["do"] or "save_pretrained" in answer["do"]
    assert not {"pytorch_model.bin", "model.Q4.gguf"} & set(hub.fetched)


def test_hub_adapters_are_found_and_others_refused(hub: Hub, tmp_path: Path) -> None:
    names = ("org/adapter", "org/adapter@main", "org/pickled-adapter", "org/whole", "org/adaptor", "org/gated")
    calls = [(name, {"adapter": True}) for name in names]
    found, same, pickled, model, unknown, gated = find_all_in_process(hub.address, tmp_path, *calls)
    assert set(hub.fetched) == {"adapter_config.json", "adapter_model.safetensors"}
    assert found == same and Path(found["folder"]).name == COMMIT
    assert "no adapter_model.safetensors" in pickled["what"] and "adapter_model.bin is a pickle" in pickled["what"]
    assert "no adapter_config.json" in model["what"] and model["where"] == "hub model org/whole"
    assert "no model 'org/adaptor'" in unknown["what"] and "did you mean 'org/adapter'?" in unknown["do"]
    assert "gated" in gated["what"] and "hf auth login" in gated["do"]


def test_hub_code_needs_trust_and_a_commit_and_is_not_downloaded_if_not_needed(hub: Hub, tmp_path: Path) -> None:
    revisions = (None, "main", COMMIT)
    calls = [("org/coded", {}), *(("org/coded", {"trust_remote_code": True, "revision": r}) for r in revisions)]
    calls += [("org/native", {"trust_remote_code": trust}) for trust in (True, False)]
    fetched: list[set[str]] = []  # for each of the calls

    def look() -> None:
        fetched.append(set(hub.fetched))
        hub.fetched.clear()

    untrusted, *unpinned, pinned, native, same = find_all_in_process(hub.address, tmp_path, *calls, look=look)
    assert "auto_map" in untrusted["what"]
    assert "trust_remote_code" in untrusted["do"]
    assert len(unpinned) == 2
    for answer in unpinned:
        assert "not a full commit" in answer["what"]
        assert answer["where"].endswith("config.json")
        assert "40-digit commit" in answer["do"]
    before = set.union(*fetched[:3])
    assert not {"code.py", "model.safetensors"} & before  # refused because of the description alone
    assert (Path(pinned["folder"]) / "code.py").is_file()
    assert not (tmp_path / "code-was-run").exists()

    # A model whose code is not needed.
    assert all((Path(answer["folder"]) / "model.safetensors").is_file() for answer in (native, same))
    assert "config.json" in fetched[4]
    assert "code.py" not in fetched[4] | fetched[5]
