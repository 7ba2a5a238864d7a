"""What llama.cpp itself makes of a GGUF file: log-probabilities, token ids and chat prompts.

    with LlamaCpp(gguf) as reader:
        reader.log_probs([[1, 5, 7]])       # float32 [1, V]: of the token after each prompt
        reader.token_ids("Hello")           # with BOS if the file asks for it; special tokens are parsed
        reader.chat_prompt([{"role": "user", "content": "Hi"}])

llama.cpp runs in a child process: it starts a server with threads of its own, it may abort on a damaged file, and its
memory is given back. The cache is float32 and flash attention is off, so that only the file is compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCpp:
    """A child process with one model; a context manager."""

    def __init__(self, gguf: Path, *, lora: Path | None = None, num_tokens: int = 512) -> None:
        arguments = [sys.executable, __file__, str(gguf), str(lora or ""), str(num_tokens)]
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.answer = self._read()  # "ready"

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()

    def log_probs(self, prompts: list[list[int]]) -> np.ndarray:
        """Of every token of the vocabulary after each prompt, ordered by id."""
        rows = []
        for prompt in prompts:
            pairs = np.array(self._ask({"prompt": prompt}))
            row = np.full(int(pairs[:, 0].max()) + 1, np.nan, np.float64)
            row[pairs[:, 0].astype(int)] = pairs[:, 1]
            rows.append(row)
        return np.stack(rows)

    def token_ids(self, text: str, *, add_special: bool = True) -> list[int]:
        return self._ask({"tokenize": text, "add_special": add_special})

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return self._ask({"messages": messages})

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("@answer "):
                return json.loads(line.removeprefix("@answer "))
        assert self._child.stderr is not None
        self._child.wait()
        raise AssertionError(f"llama.cpp ended with {self._child.returncode}: {self._child.stderr.read()[-3000:]}")


def _serve(gguf: str, lora: str, num_tokens: int) -> None:
    import urllib.request

    import xllamacpp as x

    options = x.CommonParams()
    options.model.path = gguf
    options.n_ctx, options.n_parallel, options.warmup, options.verbosity = num_tokens, 1, False, 0
    options.n_batch = options.n_ubatch = num_tokens
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_type_k = options.cache_type_v = x.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.use_jinja = True
    if lora:
        options.lora_adapters = [x.CommonAdapterLoraInfo(lora, 1.0)]
    server = x.Server(options)

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())

    def answer(question: dict[str, Any]) -> Any:
        if "prompt" in question:
            # A stop token, or a part of a character, would give an answer without probabilities. So the answer is "a".
            # The probabilities are of the unchanged logits anyway.
            options = {"n_predict": 1, "temperature": 0, "n_probs": 1 << 24, "cache_prompt": False}
            result = server.handle_completions(
                {"prompt": question["prompt"], "logit_bias": [[letter, 1000.0]], **options}
            )
            top = result["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return [(each["id"], each["logprob"]) for each in top]
        if "tokenize" in question:
            body = {"content": question["tokenize"], "add_special": question["add_special"], "parse_special": True}
            return post("/tokenize", body)["tokens"]
        return post("/apply-template", {"messages": question["messages"]})["prompt"]

    def say(value: Any) -> None:
        print("@answer " + json.dumps(value), flush=True)

    letter = post("/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    say("ready")
    for line in sys.stdin:
        say(answer(json.loads(line)))


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
