"""Damaged and hostile model folders: every failure is a TrilloraError that names the file, found before anything large
is built."""

from __future__ import annotations

import json
import logging
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dose import dose
from hostile_json import changed_bytes, changed_value
from safetensors.torch import load_file
from tiny_run import write_model
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trillora.data.rendering.render import RenderedRow
from trillora.data.tokenizing.encode import Encoder
from trillora.errors import TrilloraError
from trillora.model.bridge import build_module
from trillora.model.layout import Layout, Leaf
from trillora.model.loading.description import check_weights, read_config, stop_tokens
from trillora.model.loading.digest import weights_digest
from trillora.model.loading.source import OpenModel, load_config, load_tokenizer
from trillora.model.loading.tensor_files import stored_shapes
from trillora.model.loading.weights import resolve_sources
from trillora.preflight.inputs import KNOWN_MODELS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "model")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def open_model(folder: Path) -> Any:
    """Everything that happens to a model's description before its weights are read."""
    opened = OpenModel.open(str(folder), revision=None, trust_remote_code=False)
    if opened.tokenizer.chat_template:
        opened.tokenizer.get_chat_template()
    opened.tokenizer.encode("Hello, 世界!")
    stop_tokens(opened.folder, opened.config)
    module = build_module(opened.config, "float32")
    resolve_sources(opened.folder, module, layout_of(module))  # compares all names, shapes and types
    return module


def layout_of(module: Any) -> Layout:
    parameters = module.named_parameters()
    return {name: Leaf((name,), False, tuple(p.shape), np.dtype(np.float32)) for name, p in parameters}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(folder: Path) -> TrilloraError:
    with at_most(20), pytest.raises(TrilloraError) as caught:
        open_model(folder)
    assert caught.value.where and caught.value.do
    return caught.value


def change(file: Path, **values: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}))


# ---- config.json


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("architectures", value) for value in ([1], "LlamaForCausalLM", {})),
        *(("vocab_size", value) for value in (0, -1, 10**9, 455, "454", [454])),
        *(("hidden_size", value) for value in (0, -1, 2**31, 2**20, 128, 64.0)),
        *(("num_hidden_layers", value) for value in (0, -1, 100_000, 1000, 10**30, None)),
        *(("num_key_value_heads", value) for value in (0, -2, 3, 10**9)),
        *(("head_dim", value) for value in (0, -1, 2**31)),
        *(("intermediate_size", value) for value in (0, 2**31)),
        *(("num_labels", value) for value in (10**9, 2**40)),
        *(("pad_token_id", value) for value in (10**9, 10**14, 454, -2)),
        *(("hidden_act", value) for value in ("unknown", 5, None)),
        *(("rope_parameters", value) for value in ({"rope_type": "unknown", "rope_theta": 1e4}, 5)),
        *(("auto_map", value) for value in (5, ["x"])),
        ("text_config", {"hidden_size": 2**31}),
        ("max_position_embeddings", 0),
    ],
)
def test_a_config_value_that_cannot_be_right_is_refused(key: str, value: Any, folder: Path) -> None:
    change(folder / "config.json", **{key: value})
    assert str(folder) in (refusal(folder).where or "")


def test_a_size_is_refused_before_weights_or_transformers_are_asked(folder: Path) -> None:
    """Preflight has only the config."""
    (folder / WEIGHTS).unlink()
    change(folder / "config.json", num_hidden_layers=100_000)
    with pytest.raises(TrilloraError) as caught:
        load_config(folder)
    assert caught.value.what == "The model's num_hidden_layers must be between 1 and 1024, but is 100000."


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("num_hidden_layers", 1000, "num_hidden_layers is 1000, but the weights have 2 layers"),
        ("vocab_size", 455, "vocab_size is 455, but no weight has a dimension of this size"),
        ("hidden_size", 2**20, "hidden_size is 1048576, but no weight has a dimension of this size"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_a_model_is_built(
    key: str, value: int, what: str, folder: Path
) -> None:
    change(folder / "config.json", **{key: value})
    with pytest.raises(TrilloraError, match=what):
        OpenModel.open(str(folder), revision=None, trust_remote_code=False)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "5", "[]", "\udcff", "{"])
def test_a_description_that_is_not_a_json_object_is_refused(file: str, text: str, folder: Path) -> None:
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(folder).where == str(folder / file)


def test_configs_of_all_architectures_and_known_models_are_accepted(tmp_path: Path) -> None:
    configs = json.loads(KNOWN_MODELS.read_text())
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type != "gemma4_assistant":  # has no default
            configs[model_type] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    assert len(configs) > 150
    for config in configs.values():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path) == config


def test_an_infinite_limit_is_accepted(folder: Path) -> None:
    """Mamba 2 has one; json.dumps writes it as Infinity."""
    change(folder / "config.json", time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (folder / "config.json").read_text()
    assert load_config(folder).time_step_limit == [0.0, float("inf")]


def test_weights_that_are_used_several_times_are_accepted() -> None:
    shapes = {f"model.layers.{i}.norm.weight": (16,) for i in range(2)} | {"model.embed.weight": (8, 16)}
    config = CONFIG_MAPPING["llama"](num_hidden_layers=12, hidden_size=16, num_attention_heads=4, vocab_size=8)
    check_weights(config, shapes, "here")


# ---- generation_config.json


@pytest.mark.parametrize("value", ["abc", {}, 10**14, 454, -5, [1, "x"], [10**9], True, 1.5, [[1]]])
def test_a_stop_token_that_cannot_be_one_is_refused(value: Any, folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=value)
    assert refusal(folder).where == str(folder / "generation_config.json")


@pytest.mark.parametrize(("value", "stops"), [(5, {5}), ([5, 7], {5, 7}), (None, set()), ([], set()), (-1, set())])
def test_stop_tokens_are_those_of_the_generation_config(value: Any, stops: set[int], folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=value)
    assert stop_tokens(folder, load_config(folder)) == stops


def test_without_a_generation_config_the_config_names_the_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert stop_tokens(folder, load_config(folder)) == {2}


# ---- the index


@pytest.mark.parametrize("weight_map", [{"a": ["x"]}, {"a": 5}, {"a": None}, {}, [], None, "x", {"a": "\x00"}])
def test_an_index_that_lists_no_files_is_refused(weight_map: Any, folder: Path) -> None:
    change(folder / INDEX, weight_map=weight_map)
    assert refusal(folder).where == str(folder / INDEX)


# ---- the tokenizer


@pytest.mark.parametrize("template", [5, [5], {"a": 5}, [{"name": "x"}], [{"name": 1, "template": "x"}], True])
def test_a_chat_template_that_is_no_text_is_refused(template: Any, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=template)
    error = refusal(folder)
    assert error.where == str(folder / "tokenizer_config.json") and "chat_template" in error.what


def named(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": f"template {name}"} for name in names]


@pytest.mark.parametrize(
    ("templates", "used"),
    [
        (named("rag", "default"), "template default"),
        (named("rag"), "template rag"),
        (named("rag", "tool_use"), None),
    ],
)
def test_one_of_several_chat_templates_is_used(templates: Any, used: str | None, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=templates)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.get_chat_template() if tokenizer.chat_template else None) == used


@pytest.mark.parametrize("text", ["plain text", "a" * 60 + "c"])
def test_a_pattern_that_makes_tokenizers_panic_is_an_error(text: str, folder: Path) -> None:
    """The pattern needs exponential time for some texts. tokenizers then panics, with a BaseException."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(?i)(?:(a|a)*)*$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": pattern}))
    encoder = Encoder(load_tokenizer(folder))
    row = RenderedRow(text, ((0, len(text)),))
    if text == "plain text":
        encoder.encode([row])
        return
    with pytest.raises(TrilloraError, match="retry-limit") as caught:
        encoder.encode([row])
    assert caught.value.where == "tokenizer.json"


# ---- weight files


def hub_cache(original: Path, root: Path) -> Path:
    """The model as the hub's cache keeps it: links to files that are named by their SHA-256."""
    snapshot, blobs = root / "snapshots" / "0", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in original.iterdir():
        blob = blobs / sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def flip(file: Path, place: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def test_a_changed_blob_in_the_hubs_cache_is_noticed(original: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(original, tmp_path)
    before = weights_digest(snapshot, [snapshot / WEIGHTS])
    assert before == weights_digest(original, [original / WEIGHTS])  # the same model, the same digest
    flip((snapshot / WEIGHTS).resolve(), -5)
    with pytest.raises(TrilloraError, match="hub's cache is damaged") as caught:
        weights_digest(snapshot, [snapshot / WEIGHTS])
    assert str((snapshot / WEIGHTS).resolve()) in (caught.value.where or "")


def test_a_link_to_another_name_of_64_digits_is_read(original: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    stored = tmp_path / "store" / ("0" * 64)
    shutil.copy(original / WEIGHTS, stored)
    link = tmp_path / WEIGHTS
    link.symlink_to(stored)
    shutil.copy(original / "config.json", tmp_path)
    before = weights_digest(tmp_path, [link])
    flip(stored, -5)
    assert weights_digest(tmp_path, [link]) != before


# ---- fuzzers


def documents(folder: Path) -> dict[str, Any]:
    shard = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = [{"name": "default", "template": (folder / "chat_template.jinja").read_text()}]
    return {
        **{name: json.loads((folder / name).read_text()) for name in names},
        "tokenizer_config.json": {**config, "chat_template": template},
        INDEX: shard,
    }


def test_any_change_of_a_description_is_refused_or_gives_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is built has the original's parameters."""
    originals = documents(folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = (folder / "tokenizer.json").read_bytes()
    shapes = stored_shapes([folder / WEIGHTS])
    num, num_refused = dose(50, 10_000), 0
    for seed in range(num):
        randomness = random.Random(seed)
        for name, document in originals.items():
            (folder / name).write_text(json.dumps(document))
        (folder / "tokenizer.json").write_bytes(tokenizer)
        file = randomness.choice([*originals, "config.json", "config.json", "tokenizer.json"])
        if file == "tokenizer.json":
            document = changed_value(json.loads(tokenizer), randomness)
            (folder / file).write_text(json.dumps(document))
        elif randomness.random() < 0.8:
            (folder / file).write_text(json.dumps(changed_value(originals[file], randomness)))
        else:
            (folder / file).write_bytes(changed_bytes((folder / file).read_bytes(), randomness))
        # Libraries repeat hostile values, half a surrogate pair among them, and pytest-xdist cannot send those.
        capsys.readouterr()
        logging.disable()
        try:
            with at_most(20):
                module = open_model(folder)
        except TrilloraError as error:
            assert error.where and error.do, seed
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {file}: {type(error).__name__}: {error!a}") from None
        else:
            for name, parameter in module.named_parameters():
                assert parameter.is_meta and tuple(parameter.shape) == shapes[name], (seed, name)
        finally:
            logging.disable(logging.NOTSET)
    capsys.readouterr()
    assert num // 5 < num_refused < num  # both outcomes occur


def test_any_change_of_a_weight_files_header_is_refused_or_harmless(folder: Path) -> None:
    """A change of the values themselves is noticed by the digest when a run resumes."""
    module = build_module(load_config(folder), "float32")
    layout = layout_of(module)
    file = folder / WEIGHTS
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    expected, digest = load_file(file), weights_digest(folder, [file])
    for seed in range(dose(100, 5000)):
        randomness = random.Random(seed)
        header = changed_bytes(data[:size], randomness)
        if header == data[:size]:
            continue
        file.write_bytes(header + data[size:])
        assert weights_digest(folder, [file]) != digest, seed
        try:
            sources = resolve_sources(folder, module, layout)
        except TrilloraError as error:
            assert error.where and error.do, seed
            continue
        found = load_file(file)
        for name, source in sources.items():
            if hasattr(source, "file"):
                assert torch.equal(found[source.name], expected[source.name]), (seed, name)
