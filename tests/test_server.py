"""The server, used through OpenAI's own client and through raw HTTP: answers, streams, errors, limits, and its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import tiny_run
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.serving.app import App
from trillora.serving.served import Service, open_service
from trillora.serving.server import Server, open_socket, read_key

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """A random adapter, written by PEFT."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return folder


class Running:
    """A server in a thread of this process."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.service, opened = service, open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{opened.getsockname()[1]}"
        self.server = Server(App(service, **options), service.engine, opened)
        ready = threading.Event()
        run = self.server.run_until_stopped(ready.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(run), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def client(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "unused", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    write_adapter(tiny_run.write_model(folder / "model"), folder / "one", seed=1)
    write_adapter(folder / "model", folder / "two", seed=2)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    names = [str(folder / name) for name in ("one", "two")]
    running = Running(open_service(str(folder / "model"), adapters=names, num_rows=4, max_waiting=60))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator.open(str(folder / "model"), adapter=folder / "one")


def test_the_models_are_the_base_and_every_adapter(running: Running) -> None:
    models = running.client().models.list().data
    assert [model.id for model in models] == ["model", "one", "two"]
    assert running.client().models.retrieve("one").id == "one"
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_answers_equal_those_of_the_generator_with_base_and_adapters(running: Running, generator: Generator) -> None:
    client = running.client()
    texts = {}
    for name in ("model", "one", "two"):
        answer = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=12, temperature=0)
        texts[name] = answer.choices[0].message.content
    expected = generator.generate([QUESTION], max_tokens=12)[0]
    assert texts["one"] == expected.text
    assert texts["model"] == generator.generate([QUESTION], max_tokens=12, adapted=False)[0].text
    assert len(set(texts.values())) == 3
    usage = client.chat.completions.create(model="one", messages=QUESTION, max_tokens=12, temperature=0).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, len(expected.tokens))


def test_a_stream_is_the_whole_answer_in_parts(running: Running) -> None:
    client = running.client()
    options: dict[str, Any] = {"model": "one", "messages": QUESTION, "max_tokens": 20, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len(chunks) > 5  # it came in parts
