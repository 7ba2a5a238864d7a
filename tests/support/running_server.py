"""A server in this process, and requests to it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trillora.serving.app import App
from trillora.serving.http.address import open_socket
from trillora.serving.http.server import Server
from trillora.serving.served import Service

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 4, **options: Any) -> Path:
    """A random adapter, written by PEFT."""
    torch.manual_seed(seed)
    given = {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], **options}
    config = LoraConfig(r=rank, task_type="CAUSAL_LM", **given)
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
        self.http = httpx.Client(limits=httpx.Limits(max_connections=None))
        ready = threading.Event()
        run = self.server.run_until_stopped(ready.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(run), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def client(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "unused", "max_retries": 0, "timeout": 60, "http_client": self.http, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
        return self.http.post(self.url + path, content=content, headers=headers, timeout=60)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


CHAT: dict[str, Any] = {"model": "one", "messages": QUESTION, "max_tokens": 2}


def wait_until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
