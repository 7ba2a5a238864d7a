"""The server against what should not reach it: connections without requests, numbers that overflow, links, floods."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from running_server import CHAT, QUESTION, Running, wait_until, write_adapter
from safetensors.torch import load_file, save_file

from trillora.serving.completions import LARGE_BODY, Completions
from trillora.serving.http import connections
from trillora.serving.http.log import FailureLog
from trillora.serving.served import open_service
from trillora.serving.stream import ClientGone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_model(tmp_path_factory.mktemp("limits") / "model", tiny_run.llama(1))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    """With the base and adapters whose numbers overflow: to equal logits, because a norm divides by infinity, and to
    NaN."""
    adapters = []
    for name, factor in (("equal", 1e18), ("nan", 1e25)):
        adapters.append(write_adapter(model, model.parent / name, seed=1))
        weights = load_file(adapters[-1] / "adapter_model.safetensors")
        save_file({name: w * factor for name, w in weights.items()}, adapters[-1] / "adapter_model.safetensors")
    running = Running(open_service(str(model), adapters=[str(adapter) for adapter in adapters], num_rows=1))
    yield running
    running.stop()


def test_a_report_that_is_a_link_out_of_the_run_is_not_served(running: Running, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run" / "own.html").write_text("own")
    report = tmp_path / "run" / "report.html"
    service = replace(running.service, report=report)
    assert service.readable_report() is None
    report.symlink_to(report)
    assert service.readable_report() is None
    for target, is_served in (("../secret", False), (str(tmp_path / "secret"), False), ("own.html", True)):
        report.unlink()
        report.symlink_to(target)
        found = service.readable_report()
        assert found == (tmp_path / "run" / "own.html" if is_served else None)


@pytest.mark.parametrize("name", ["equal", "nan"])
def test_overflowed_logits_are_an_error(running: Running, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overflowed: dict[str, Any] = {"model": name, "max_tokens": 4}
    chat, text = {**overflowed, "messages": QUESTION}, {**overflowed, "prompt": "The capital"}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3}),
        ("/v1/chat/completions", {**chat, "temperature": 0}),
        ("/v1/completions", {**text, "logprobs": 1}),
        ("/v1/completions", {**text, "logprobs": 1, "echo": True}),
        ("/v1/completions", {**text, "logprobs": 1, "echo": True, "max_tokens": 0}),
    ):
        answer = running.post(body, path)
        assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"], answer.text
        events = running.post({**body, "stream": True}, path).text.strip().split("\n\n")
        assert "not finite" in json.loads(events[-1].removeprefix("data: "))["error"]["message"], events
        assert not any("!" in event for event in events)
    assert running.post({**CHAT, "model": "model"}).status_code == 200
    assert not re.search("bug|Traceback", capsys.readouterr().err)


def test_connections_that_wait_are_closed_and_those_above_the_limit_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, state = int(running.url.rpartition(":")[2]), running.server.server_state
    wait_until(lambda: set(state.connections) == set(state.waiting))
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)

    def connect(data: bytes) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", port), timeout=20)
        opened.sendall(data)
        return opened

    def end_of(opened: socket.socket) -> float:
        started = time.monotonic()
        while opened.recv(1000):
            pass
        return time.monotonic() - started

    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data in (b"", b"GET /health HTTP/1.1\r\nHost: loc", whole, whole + whole + b"GET"):
        with connect(data) as opened:
            assert 0.2 < end_of(opened) < 5
    monkeypatch.setattr(connections, "IDLE_SECONDS", 30.0)
    monkeypatch.setattr(state, "limit", len(state.connections) + 2)
    body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    half = [connect(body + b"Content-Length: 9\r\n\r\n") for _ in range(state.limit)]  # replace those that wait
    wait_until(lambda: not state.waiting)
    with connect(whole) as refused:
        assert refused.recv(1000).startswith(b"HTTP/1.1 503")
    half.pop().close()
    wait_until(lambda: len(state.connections) < state.limit)
    with connect(whole) as opened:
        assert opened.recv(1000).startswith(b"HTTP/1.1 200")
    for opened in half:
        opened.close()


def test_a_large_answer_arrives_at_a_slow_client(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for longer than connections may wait without a request."""
    size = 32 << 20  # more than the buffers of the operating system

    async def large(*_: Any) -> str:
        return "x" * size

    monkeypatch.setattr(Completions, "_answer", large)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    body = json.dumps({"model": "model", "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=20) as opened:
        opened.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(1.5)
        received = 0
        while received < size and (part := opened.recv(1 << 20)):
            received += len(part)
    assert received >= size


def test_the_body_of_a_client_that_is_gone_is_freed_while_the_threads_are_busy(running: Running) -> None:
    freed: list[int] = []

    class Body(bytes):
        def __del__(self) -> None:
            freed.append(len(self))

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    completions, busy = Completions(running.service), threading.Event()
    threads = (completions._for_small, completions._for_large)
    for thread in threads:
        for _ in range(thread._max_workers):
            thread.submit(busy.wait)
    try:
        for how, size in ((completions.chat, 100), (completions.complete, LARGE_BODY + 1)):
            with pytest.raises(ClientGone):
                asyncio.run(how(Body(size), gone, send))
        assert freed == [100, LARGE_BODY + 1]
    finally:
        busy.set()
        for thread in threads:
            thread.shutdown()


def test_the_shortest_length_leaves_one_token_for_an_answer(model: Path) -> None:
    service = open_service(str(model), num_rows=1, max_length=2)
    try:
        assert service.engine.is_alive and service.engine.max_length == 2
    finally:
        service.engine.close()
        service.models["model"].prompts.close()


def test_failures_are_one_short_line_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    log = FailureLog()
    for _ in range(1000):
        log.write("It failed\n" + "x" * 10_000)
    for i in range(1000):
        log.write(f"Failure {i}")
    log.finish()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) < 600
    assert lines[-2].endswith("[repeated 999 times]") and lines[-1].startswith("Other failures. [repeated")
