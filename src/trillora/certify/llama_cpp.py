"""The process that runs llama.cpp: a request as JSON on stdin, one line of JSON on stdout.

{"model": FILE, "prompts": [[1, 2]], "num_tokens": 49152, "chats": [[{"role": "user", …}]], "threads": 2}
-> {"logprobs": [[[id, logprob], …]], "chats": [[1, 4093, …]]}
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import secrets
import sys
from collections.abc import Mapping
from typing import Any

KEY = secrets.token_hex(16)  # of this process
MEMORY = 16 << 30  # address space in addition to twice the files: libraries, threads, logits


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    _limit_memory(request)
    answers = os.dup(1)
    os.dup2(2, 1)  # llama.cpp prints to stdout too
    server = _open(request)
    letter = _post(server, "/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    logprobs = [_next_token(server, prompt, request["num_tokens"], letter) for prompt in request["prompts"]]
    chats = [_chat_tokens(server, chat) for chat in request["chats"]]
    os.write(answers, json.dumps({"logprobs": logprobs, "chats": chats}).encode() + b"\n")
    os._exit(0)  # its threads would keep the process


def _limit_memory(request: dict[str, Any]) -> None:
    """A file whose header asks for absurd sizes must not take the memory of the machine."""
    size = sum(os.path.getsize(file) for file in (request["model"], request["lora"]) if file is not None)
    limit = 2 * size + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _open(request: Mapping[str, object]) -> Any:
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = request["model"]
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.api_keys = [KEY]  # it listens on loopback, where other users of the machine could ask it
    options.n_parallel, options.warmup, options.verbosity, options.use_jinja = 1, False, 0, True
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = request["threads"]
    # The defaults round keys and values to float16.
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["lora"] is not None:
        options.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["lora"], 1.0)]
    return xllamacpp.Server(options)


def _next_token(server: Any, prompt: list[int], num_tokens: int, letter: int) -> list[tuple[int, float]]:
    """The log-probabilities of the next token, without any bias. llama.cpp returns none if the token that it chooses is
    a stop token or a part of a character, so it is made to choose a letter."""
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": num_tokens, "cache_prompt": False}
    asked["logit_bias"] = [[letter, 1000.0]]
    answer = server.handle_completions(asked)
    if "choices" not in answer:
        raise RuntimeError(str(answer)[:400])
    found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(each["id"], each["logprob"]) for each in found]


def _chat_tokens(server: Any, messages: list[dict[str, str]]) -> list[int]:
    """The prompt of a chat by llama.cpp's template code, in its tokens, as its own chat endpoint makes them."""
    prompt = _post(server, "/apply-template", {"messages": messages})["prompt"]
    asked = {"content": prompt, "add_special": True, "parse_special": True}
    return list(_post(server, "/tokenize", asked)["tokens"])


def _post(server: Any, path: str, body: Mapping[str, object]) -> Any:
    host, _, port = server.listening_address.rpartition("/")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read(400).decode(errors="replace"))
    return json.load(answer)
