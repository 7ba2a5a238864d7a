"""Served throughput: tokens/s and time to the first token with 1, 8 and 32 clients at the same time.

    python benchmarks/serve.py                                    # SmolLM2, which is embedded
    python benchmarks/serve.py --shape llama-1b --clients 1 8 32  # random weights, see random_model.py

Starts `trillora serve` as its own process. Every client sends one request after another: a prompt of random tokens
(`--prompt` on average, from half to one and a half of it), and streams an answer of `--new` tokens, which does not end
earlier. So clients join and leave the batch all the time. Each number of clients runs twice, and the second run counts:
in the first one, programs are compiled. The clients use Python's own HTTP client, in threads.

transformers has the same model and the same requests in this process afterwards, without HTTP: `generate` for one
request at a time, and for a batch of as many requests as there are clients, padded, which is the best case for it: all
of them arrive and end together. `--peer none` leaves it out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from random_model import SHAPES, write_model
from record import add_record_option, by_name, record_if

SOURCES = ("benchmarks/serve.py", "src/trillora/serving", "src/trillora/generation", "src/trillora/model")


@dataclass(frozen=True)
class Load:
    """The requests of one measurement."""

    num_clients: int
    num_requests: int  # of each client
    prompt: int  # tokens, on average
    new: int
    vocabulary: int

    def prompts(self) -> list[list[int]]:
        random = Random(self.num_clients)
        lengths = [random.randint(self.prompt // 2, self.prompt * 3 // 2) for _ in range(self.total)]
        return [[random.randrange(10, self.vocabulary) for _ in range(length)] for length in lengths]

    @property
    def total(self) -> int:
        return self.num_clients * self.num_requests


@dataclass(frozen=True)
class Result:
    engine: str
    num_clients: int
    tokens_per_second: float
    first_token_ms: float | None  # median


def ask(connection: http.client.HTTPConnection, model: str, prompt: list[int], new: int) -> float:
    """Streams one answer; returns the seconds to its first token."""
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True}
    start, first = time.monotonic(), None
    options = {"include_usage": True}
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "stream_options": options}),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    usage = None
    for line in response:
        if line.startswith(b'data: {"'):
            first = first or time.monotonic()
            usage = json.loads(line[6:]).get("usage") or usage
    assert first is not None and usage is not None and usage["completion_tokens"] == new, usage
    return first - start


def measure(address: tuple[str, int], model: str, load: Load) -> Result:
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for prompt in load.prompts():
        waiting.put(prompt)
    delays: list[float] = []
    errors: list[BaseException] = []

    def client() -> None:
        connection = http.client.HTTPConnection(*address, timeout=600)
        try:
            while True:
                delays.append(ask(connection, model, waiting.get_nowait(), load.new))
        except queue.Empty:
            connection.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(load.num_clients)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    if errors:
        raise errors[0]
    delay = statistics.median(delays) * 1000
    return Result("trillora serve", load.num_clients, load.total * load.new / seconds, delay)


def with_transformers(folder: str, loads: list[Load]) -> list[Result]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, **options)

    results = []
    for load in loads:
        for at_once in dict.fromkeys((1, load.num_clients)):
            prompts = load.prompts()[: max(load.num_clients, 4) if at_once == 1 else load.total]
            generate(prompts[:at_once], load.new)
            start = time.monotonic()
            for first in range(0, len(prompts), at_once):
                generate(prompts[first : first + at_once], load.new)
            rate = len(prompts) * load.new / (time.monotonic() - start)
            results.append(Result(f"transformers generate, {at_once} at once", load.num_clients, rate, None))
    return results


def start_server(model: str, options: list[str]) -> tuple[subprocess.Popen[str], tuple[str, int], str]:
    """The process, its address, and the name of the base."""
    command = [sys.executable, "-m", "trillora", "serve", model, "--base", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://([\d.]+):(\d+)", line):
            address = (found[1], int(found[2]))
            connection = http.client.HTTPConnection(*address)
            connection.request("GET", "/v1/models")
            return process, address, json.loads(connection.getresponse().read())["data"][0]["id"]
    raise SystemExit("The server did not start.")


def model_folder(arguments: argparse.Namespace, scratch: Path) -> tuple[str, str, int]:
    """The model for the server, its folder for transformers, and the size of its vocabulary."""
    if arguments.shape is not None:
        write_model(scratch / arguments.shape, arguments.shape)
        folder = str(scratch / arguments.shape)
        return folder, folder, SHAPES[arguments.shape]["vocab_size"]
    from trillora.model.loading.source import find_model

    found = find_model(arguments.model)
    return arguments.model, str(found), json.loads((found / "config.json").read_text())["vocab_size"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape, instead of --model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt, on average")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--peer", choices=("transformers", "none"), default="transformers")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_record_option(parser)
    parser.add_argument("options", nargs="*", help="more options of trillora serve, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model, folder, vocabulary = model_folder(arguments, Path(scratch))
        loads = [Load(n, arguments.requests, arguments.prompt, arguments.new, vocabulary) for n in arguments.clients]
        process, address, name = start_server(model, ["--rows", str(max(arguments.clients)), *arguments.options])
        results: list[Result] = []
        try:
            for load in loads:
                measure(address, name, load)
                results.append(measure(address, name, load))
                print(json.dumps(asdict(results[-1])), flush=True)
        finally:
            process.terminate()
            process.wait(120)
        if arguments.peer == "transformers":
            results += with_transformers(folder, loads)
    shown: list[dict[str, Any]] = [asdict(result) for result in results]
    for result in results:
        delay = "" if result.first_token_ms is None else f"{result.first_token_ms:.0f} ms to the first token"
        print(f"{result.num_clients:3} clients  {result.engine:32} {result.tokens_per_second:9.1f} tokens/s  {delay}")
    if arguments.json:
        arguments.json.write_text(json.dumps(shown, indent=1))
    record_if(arguments.record, "serve", by_name(shown, "num_clients", "engine"), SOURCES)


if __name__ == "__main__":
    main()
