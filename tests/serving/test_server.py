"""The server, used through OpenAI's own client and through raw HTTP: answers, streams, errors, limits, and its end."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import openai
import psutil
import pytest
import tiny_run
import torch
from dose import FULL, dose, full_dose_only
from peft import PeftModel
from running_server import CHAT, QUESTION, Running, wait_until, write_adapter
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from warm_process import WarmCommand

from trillora.cli import app
from trillora.data.rendering.chat_templates import NAMED
from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.runs.saved import SavedAdapter
from trillora.serving import served
from trillora.serving.http import server
from trillora.serving.http.address import open_socket, read_key
from trillora.serving.lane import Lane
from trillora.serving.programs import BatchShape
from trillora.serving.served import open_service

STOPS_AT_IM_START = "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"
Reference = Callable[[list[int]], torch.Tensor]


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


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """The log-probabilities [tokens, vocabulary] of PEFT's model."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "one")

    def logprobs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)

    return logprobs


def test_a_base_has_its_own_chat_template_here_and_in_a_chat(folder: Path, tmp_path: Path) -> None:
    """The adapter was trained in another one. A base without a template gets the adapter's."""
    trained, _ = NAMED["zephyr"]
    adapter = shutil.copytree(folder / "one", tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text(trained)
    bare = shutil.copytree(folder / "model", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    own = (folder / "model" / "chat_template.jinja").read_text()
    for model, expected in ((folder / "model", own), (bare, trained)):
        generator = Generator.open(str(model), adapter=adapter)
        models = served._models(generator, "base", {"adapter": SavedAdapter(adapter, None)})
        assert {name: one.prompts.template for name, one in models.items()} == {"base": expected, "adapter": trained}
        for name, one in models.items():
            assert generator.encode(QUESTION, adapted=name == "adapter") == one.prompts.encode(QUESTION)
            assert set(one.prompts.stops) <= set(generator.prompts.stops)


def test_stop_tokens_of_one_adapter_do_not_end_the_answers_of_another(folder: Path, tmp_path: Path) -> None:
    first = shutil.copytree(folder / "one", tmp_path / "first")
    (first / "chat_template.jinja").write_text(STOPS_AT_IM_START)
    generator = Generator.open(str(folder / "model"), adapter=first)
    adapters = {"first": SavedAdapter(first, None), "two": SavedAdapter(folder / "two", None)}
    models = served._models(generator, "base", adapters)
    stop = generator.prompts.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert [name for name, one in models.items() if stop in one.prompts.stops] == ["first"]
    for one in models.values():
        one.prompts.close()


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
    options: dict[str, Any] = {"model": "one", "messages": QUESTION, "max_tokens": 40, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    # It came in parts. Tokens that are ready together are sent together, so a busy machine sends fewer parts.
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 1


def test_32_clients_at_once_get_the_answers_they_get_alone(running: Running) -> None:
    client = running.client(max_retries=2)

    def ask(i: int) -> str | None:
        messages = [{"role": "user", "content": f"What is {i} plus {'and ' * (i % 7)}{i}?"}]
        options: dict[str, Any] = {"model": ("model", "one", "two")[i % 3], "messages": messages, "temperature": 0}
        if i % 2:
            return client.chat.completions.create(**options, max_tokens=8 + i % 5).choices[0].message.content
        chunks = client.chat.completions.create(**options, max_tokens=8 + i % 5, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    assert together == [ask(i) for i in range(32)]
    assert len(set(together)) > 16


def test_sampling_repeats_for_a_seed_and_equals_the_generator(running: Running, generator: Generator) -> None:
    client = running.client()
    options: dict[str, Any] = {"model": "one", "messages": QUESTION, "max_tokens": 10, "temperature": 1.2, "top_p": 0.9}
    found = client.chat.completions.create(**options, seed=7, n=3).choices
    again = client.chat.completions.create(**options, seed=7, n=3).choices
    assert [one.message.content for one in found] == [one.message.content for one in again]
    assert len({one.message.content for one in found}) > 1
    expected = generator.generate([QUESTION], max_tokens=10, sampling=Sampling(1.2, 0.9, seed=7))[0]
    assert found[0].message.content == expected.text
    without = {client.chat.completions.create(**options).choices[0].message.content for _ in range(4)}
    assert len(without) > 1


def test_equal_prompts_of_a_request_get_different_answers_unless_there_is_a_seed(running: Running) -> None:
    body = {"model": "one", "prompt": ["The capital"] * 4, "max_tokens": 12, "temperature": 1.5}

    def texts(**options: Any) -> list[str]:
        return [choice["text"] for choice in running.post({**body, **options}, "/v1/completions").json()["choices"]]

    assert len(set(texts())) > 1
    assert texts(seed=7) == texts(seed=7, prompt="The capital") * 4


def test_probabilities_are_those_of_the_model(running: Running, generator: Generator, reference: Reference) -> None:
    client = running.client()
    answer = client.chat.completions.create(
        model="one", messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    ).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content is not None
    assert len(answer.logprobs.content) == 4
    prompt = generator.prompts.encode(QUESTION)
    [(tokens, _)] = generator.continue_tokens([prompt], max_tokens=4)
    logprobs = reference(prompt + tokens)
    for i, one in enumerate(answer.logprobs.content):
        expected = logprobs[len(prompt) - 1 + i]
        assert one.logprob == pytest.approx(float(expected[tokens[i]]), abs=1e-4)  # float32, another order of sums
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(expected.topk(5)[0].tolist(), abs=1e-4)
        assert one.token == one.top_logprobs[0].token == generator.prompts.token_text(tokens[i])


def test_a_stop_string_ends_the_answer_and_is_never_shown(running: Running) -> None:
    client = running.client()
    options: dict[str, Any] = {"model": "two", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = whole[9:13]  # in the middle of tokens
    place = whole.index(stop)
    answer = client.chat.completions.create(**options, stop=[stop, "never met"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole[:place], "stop")
    chunks = list(client.chat.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[:place]
    unmet = client.chat.completions.create(**options, stop="\u2603 never met").choices[0]
    assert unmet.message.content == whole


def test_completions_continue_texts_and_tokens(running: Running, generator: Generator, reference: Reference) -> None:
    client, prompts = running.client(), generator.prompts
    tokens = prompts.encode_text("The capital of France")
    [(expected, _)] = generator.continue_tokens([tokens], max_tokens=9)
    options: dict[str, Any] = {"model": "one", "max_tokens": 9, "temperature": 0}
    by_text = client.completions.create(prompt="The capital of France", **options).choices[0]
    by_tokens = client.completions.create(prompt=[tokens, tokens[:3]], logprobs=2, **options).choices
    assert by_text.text == by_tokens[0].text == prompts.decode(expected)
    assert by_tokens[0].logprobs is not None and by_tokens[0].logprobs.tokens is not None
    assert "".join(by_tokens[0].logprobs.tokens) == by_text.text
    echoed = client.completions.create(prompt="The capital", echo=True, **options).choices[0].text
    assert echoed.startswith("The capital")
    scored = client.completions.create(
        model="one", prompt=tokens * 30, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    found = scored.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    logprobs = reference(tokens * 30)
    expected = [float(logprobs[i, token]) for i, token in enumerate((tokens * 30)[1:])]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)  # float32, another order of sums
    assert [max(top.values()) for top in found.top_logprobs[1:-1]] == pytest.approx(
        logprobs.max(dim=1)[0][:-1].tolist(), abs=1e-4
    )
    chunks = list(client.completions.create(prompt=tokens, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == by_text.text


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "JSON"),
    (b"\xff\xfe", 400, "JSON"),
    (b"[" * 100_000, 400, "JSON"),
    ([], 400, "object"),
    ({**CHAT, "messages": "hi"}, 400, "messages"),
    ({**CHAT, "messages": []}, 400, "messages"),
    ({**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "content"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    ({**CHAT, "messages": QUESTION * 3000}, 400, "2048"),
    ({**CHAT, "temperature": "hot"}, 400, "temperature"),
    ({**CHAT, "temperature": -1}, 400, "temperature"),
    ({**CHAT, "top_p": 0}, 400, "top_p"),
    ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ({**CHAT, "max_tokens": 1.5}, 400, "max_tokens"),
    ({**CHAT, "n": 1000}, 400, "n"),
    ({**CHAT, "stop": [""]}, 400, "stop"),
    ({**CHAT, "stop": ["a"] * 99}, 400, "stop"),
    ({**CHAT, "seed": "x"}, 400, "seed"),
    ({**CHAT, "top_logprobs": 3}, 400, "logprobs"),
    ({**CHAT, "tools": [{}]}, 400, "tools"),
    ({**CHAT, "presence_penalty": 1.0}, 400, "presence_penalty"),
    ({**CHAT, "model": "three"}, 404, "one, two"),
    ({"messages": QUESTION}, 400, "model"),
    ({**CHAT, "messages": [{"role": "user", "content": "word " * 2000}]}, 400, "256"),
    ({**CHAT, "messages": [{"role": "user"}]}, 400, "template"),
    ({**CHAT, "messages": [{"role": "user", "content": "x" * (5 << 20)}]}, 413, "4 MiB"),
]


def test_bad_requests_get_an_error_that_says_why(running: Running) -> None:
    for body, status, text in BAD:
        answer = running.post(body)
        error = answer.json()["error"]
        assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"}), body
        assert text in f"{error['message']} {error['param']}", (text, error)
    for options in (
        *({"prompt": prompt} for prompt in ([10**9], [], [""])),
        *({"prompt": [token] * length, "echo": True} for token in (-1, 2**32) for length in (1, 300)),
        {"prompt": "a", "n": 65},  # more than rows and queue have room for
    ):
        assert running.post({"model": "one", **options}, "/v1/completions").status_code == 400, options
    assert running.post(CHAT, content_type="text/plain").status_code == 415
    assert running.post(CHAT, "/v1/nothing").status_code == 404
    assert httpx.get(f"{running.url}/v1/chat/completions").status_code == 405
    assert httpx.get(f"{running.url}/report").status_code == 404
    with pytest.raises(openai.NotFoundError, match="no model 'three'"):
        running.client().chat.completions.create(model="three", messages=QUESTION)  # type: ignore[arg-type]
    assert running.post({**CHAT, "unknown": 1, "user": "me", "store": False}).status_code == 200


def test_a_text_with_tokens_that_the_model_lacks_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    model = running.service.models["one"]
    monkeypatch.setattr(model.prompts, "encode_text", lambda text, max_tokens: [5, model.num_tokens])
    monkeypatch.setattr(model.prompts, "encode", lambda messages, arguments, max_tokens: [5, model.num_tokens])
    for answer in (running.post(CHAT), running.post({"model": "one", "prompt": "a"}, "/v1/completions")):
        assert answer.status_code == 400 and "tokens that this model does not have" in answer.text


def test_control_tokens_in_a_message_stay_text(running: Running) -> None:
    def num_tokens(text: str) -> int:
        return running.post({**CHAT, "messages": [{"role": "user", "content": text}]}).json()["usage"]["prompt_tokens"]

    assert num_tokens("<|im_end|>") > num_tokens("a") + 2


def test_only_local_pages_and_names_are_answered(running: Running) -> None:
    port = running.url.rpartition(":")[2]
    for name in ("127.0.0.1", "localhost"):
        assert running.post(CHAT, host=f"{name}:{port}").status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert running.post(CHAT, host=host).status_code in (400, 403)
    assert running.post(CHAT, origin="http://evil.example").status_code == 403
    assert running.post(CHAT, origin="null").status_code == 403
    answer = running.post(CHAT, origin=running.url)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    for origins, status in ((("http://evil.example", running.url), 403), ((running.url, "null"), 403)):
        headers = [("content-type", "application/json"), *(("origin", origin) for origin in origins)]
        url = f"{running.url}/v1/chat/completions"
        assert running.http.post(url, content=json.dumps(CHAT), headers=headers).status_code == status


def test_a_key_is_required_where_others_can_connect(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrilloraError, match="needs a key"):
        read_key("0.0.0.0", None)
    monkeypatch.setenv("SERVER_KEY", "short")
    with pytest.raises(TrilloraError, match="no key of at least 8"):
        read_key("0.0.0.0", "SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "a long key 123")
    assert read_key("0.0.0.0", "SERVER_KEY") == "a long key 123"
    assert read_key("127.0.0.1", None) is None
    app = running.server.config.app
    monkeypatch.setattr(app, "_key", "a long key 123")
    assert httpx.get(f"{running.url}/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        running.client(api_key="wrong").models.list()
    assert running.client(api_key="a long key 123").models.list().data
    for keys in (("wrong", "a long key 123"), ("a long key 123", "wrong")):
        headers = [("authorization", f"Bearer {key}") for key in keys]
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 401


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the device takes a while."""
    advance = Lane.advance

    def slowly(lane: Lane) -> bool:
        time.sleep(0.03)
        return advance(lane)

    monkeypatch.setattr(Lane, "advance", slowly)
    monkeypatch.setattr(Lane, "_num_steps", lambda lane: 1)


@pytest.mark.usefixtures("slow")
def test_a_client_that_disconnects_frees_its_row(running: Running) -> None:
    engine = running.service.engine
    endless = {"model": "one", "messages": QUESTION, "max_tokens": 200, "extra_body": {"ignore_eos": True}, "n": 4}
    streams = [running.client().chat.completions.create(**endless, stream=True) for _ in range(3)]  # type: ignore
    wait_until(lambda: engine.num_running == 4 and engine.num_waiting == 8)
    for stream in streams:
        stream.close()
    wait_until(lambda: engine.num_running == engine.num_waiting == 0)

    def give_up() -> None:
        with pytest.raises(httpx.TimeoutException):
            body = {**CHAT, "max_tokens": 200, "ignore_eos": True}
            httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=0.5)

    whole = threading.Thread(target=give_up)
    whole.start()
    wait_until(lambda: engine.num_running == 1)
    wait_until(lambda: engine.num_running == 0)
    whole.join()


def test_200_requests_at_once_are_answered_or_sent_away(running: Running) -> None:
    def ask(i: int) -> httpx.Response:
        return running.post({**CHAT, "max_tokens": 6, "temperature": 0})

    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        answers = list(threads.map(ask, range(200)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 64  # 4 rows and a queue of 60
    assert all(answer.headers["retry-after"] == "5" for answer in answers if answer.status_code == 429)
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers if answer.is_success}) == 1
    assert running.post(CHAT).status_code == 200


def test_a_client_that_does_not_read_does_not_stop_the_others(running: Running) -> None:
    body = json.dumps(
        {
            "model": "one",
            "messages": QUESTION,
            "stream": True,
            "n": 4,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
    port = int(running.url.rpartition(":")[2])
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(head.encode() + body)
        wait_until(lambda: running.service.engine.num_running > 0)
        assert running.post({**CHAT, "max_tokens": 20}).status_code == 200
        wait_until(lambda: running.service.engine.num_running == 0)


def test_a_failure_of_the_engine_fails_its_requests_and_the_server_stays_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    for place in ("_prompt", "_num_steps"):  # reading the prompt, and decoding
        with monkeypatch.context() as patch:
            patch.setattr(Lane, place, fail)
            answer = running.post({**CHAT, "max_tokens": 9})
            assert answer.status_code == 500 and "out of memory" in answer.json()["error"]["message"]
            with pytest.raises(openai.APIError, match="out of memory"):
                list(running.client().chat.completions.create(**{**CHAT, "max_tokens": 9}, stream=True))
        assert running.post(CHAT).status_code == 200


def test_memory_stays_flat_over_many_requests(running: Running) -> None:
    process = psutil.Process()

    def ask(i: int) -> None:
        bad = {**CHAT, "messages": [{"role": "user", "content": "x" * 30_000}]}
        running.post(bad if i % 4 == 0 else {**CHAT, "max_tokens": 4, "seed": i})

    def used(num: int) -> tuple[int, int, int]:
        """After this many requests: bytes of the process, number of Python's objects, bytes of arrays."""
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(num)))
        wait_until(lambda: all(lane.is_empty for lane in running.service.engine._lanes))
        gc.collect()
        return process.memory_info().rss, len(gc.get_objects()), sum(array.nbytes for array in jax.live_arrays())

    before, after = used(60 if FULL else 30), used(dose(30, 2000))
    assert after[2] == before[2]  # no cache is left
    assert after[1] - before[1] < 200
    assert after[0] - before[0] < 48 << 20  # pages that allocators keep, 39 MB were seen, after the first 200 requests


def test_the_command_serves_until_a_signal_and_finishes_what_runs(folder: Path) -> None:
    command = WarmCommand("serve", str(folder / "model"), "--port", "0", "--rows", "2", "--max-length", "200")
    try:
        found = next(match for line in command.stdout if (match := re.search(r"http://127.0.0.1:\d+", line)))
        client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="unused", max_retries=0)
        options: dict[str, Any] = {"model": "model", "messages": QUESTION, "temperature": 0, "max_tokens": 100}
        whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
        stream = client.chat.completions.create(**options, extra_body={"ignore_eos": True}, stream=True)
        first = next(stream)
        os.kill(command._process.pid or 0, signal.SIGTERM)
        chunks = [first, *stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content and chunks[-1].choices[0].finish_reason == "length"
        output, _ = command.communicate(60)
        assert "Stopped." in output and command.returncode == 0
    finally:
        command.kill()


def test_answers_that_take_too_long_end_with_an_error_when_the_server_stops(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.3)
    running = Running(open_service(str(folder / "model"), num_rows=1))
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "_num_steps", lambda lane: time.sleep(0.05) or 1)
        stream = running.client().chat.completions.create(
            model="model", messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        running.server.should_exit = True
        with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
            list(stream)
    running.stop()


def test_wrong_uses_of_the_command_are_refused(folder: Path) -> None:
    model = str(folder / "model")

    def refused(*options: str) -> str:
        result = CliRunner().invoke(app, ["serve", model, "--port", "0", *options])
        assert result.exit_code == 2, result.output
        return result.output

    assert "needs a key" in refused("--host", "0.0.0.0")
    assert "no key" in refused("--key-env", "THERE_IS_NO_SUCH_VARIABLE")
    assert "at most 256 tokens" in refused("--max-length", "257")
    with pytest.raises(TrilloraError, match="cannot be used"):
        open_socket("example..com", 0)
    assert "contradict" in refused("--base", "--adapter", model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be used" in refused("--port", str(taken.getsockname()[1]))


@full_dose_only
def test_smollm2_is_served_with_the_answers_of_the_generator() -> None:
    questions = [[{"role": "user", "content": text}] for text in ("What is LoRA?", "Name three colors.", "Hi!")]
    expected = Generator.open("smollm2").generate(questions, max_tokens=24)
    running = Running(open_service("smollm2", num_rows=4))
    try:
        name = running.client().models.list().data[0].id
        assert name == "HuggingFaceTB/SmolLM2-135M-Instruct"

        def ask(messages: Any) -> str | None:
            client = running.client(timeout=300)
            answer = client.chat.completions.create(model=name, messages=messages, max_tokens=24, temperature=0)
            return answer.choices[0].message.content

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            assert list(threads.map(ask, questions)) == [answer.text for answer in expected]
    finally:
        running.stop()


def test_caches_that_do_not_fit_into_memory_are_refused_with_figures(
    running: Running, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = running.service.engine._lanes[0].programs
    one_row = programs.num_bytes(BatchShape(1, 256))
    assert 0.9 < programs.num_bytes(BatchShape(4, 256)) / (4 * one_row) < 1.1
    monkeypatch.setattr(served, "memory_limit", lambda devices: 10 * one_row)  # two copies of 4 rows, and a margin
    with pytest.raises(TrilloraError, match=r"8 rows of 256 tokens needs 0\.\d\d GiB, but only 0\.\d\d GiB"):
        served._fitting_shape(generator.mesh, programs, 8, 256, 256)
    assert served._fitting_shape(generator.mesh, programs, None, 256, 256) == BatchShape(4, 256)
    assert served._fitting_shape(generator.mesh, programs, None, None, 256) == BatchShape(4, 256)
    assert served._fitting_shape(generator.mesh, programs, 8, None, 256).num_slots < 256
